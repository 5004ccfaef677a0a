"""The experiments whose figures are in README.md and RESULTS.md.

    make NAME                             runs one with the Python of .venv
    PLAN=1 make NAME                      prints its commands, in order, and runs none
    python .github/experiments.py NAME    runs one with another Python

An entry of EXPERIMENTS becomes a list of stages, a stage is a list of jobs, and a job a command,
mostly of mdu.py or eval.py.  The jobs of a stage do not need each other.  The next stage begins
when all of them have ended; if one has failed, the experiment stops there.

Results are in out/NAME or out/PRESET: report.md, or of `figures` *.json.  The screen has a line for
each job that ends; what a job prints itself is in FOLDER.log.

A further call keeps what is finished, resumes what was stopped and does the rest.  A run that has a
model is finished, also if its loss, its preset, an option or the model from which it started has
changed since.  To do a run again, delete its folder, and the folders of the runs that started from
it.  Of `base` these are all that unlearn and taught-again, of start/original all but start/new, of
others taught-again/NAME, where there are attacks.  Of `figures` delete the *.json, too.
"""
import glob
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
import mdu  # noqa: E402

PYTHON = sys.executable
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"

class Variables(NamedTuple):
    """What a call may set: make tofu PRESET=tofu-small SEEDS="2 3" METHODS="npo wga-lr1e-3"."""
    PRESET: str = ""  # of tofu and rwku
    PLAN: str = ""
    METHODS: str = ""  # the names of the runs that unlearn, see options_of
    # Each has a folder, as out/demo/2, and one report has the means.  Of rwku they are people.
    SEEDS: str = ""
    TOFU: str = "locuslab/TOFU"  # a folder, or a name on the hub
    GPUS: str = "1"  # so many processes for each job
    JOBS: str = ""  # so many jobs at once: 1, of small models 2
    # What is set of these is in the name of the folder, as in out/tofu-small-hidden0.3/2.
    MODEL: str = ""  # of tofu and real, in place of the model below: a folder, a name on the hub
    LORA: str = ""  # the rank of adapters; if it is empty, all weights are trained
    HIDDEN: str = ""  # the share of questions that are masked while `base` and `retain` learn

# ---- The names of the runs that unlearn ----
BASELINES = [method for method in mdu.METHODS if method not in ("mdu", "sft")]
TABLE_2 = ["mdu-tau0", "mdu-tau0.25", "mdu-tau0.5", "mdu-tau0.75", "mdu-tau1", *BASELINES]

def options_of(name, original=""):
    """npo-lr1e-3-w5 -> {"method": "npo", "lr": "1e-3", "retain_weight": "5"}
    original: the model before fine-tuning, if there is one; it is the target of mdu-original."""
    known = {
        **{method: {"method": method} for method in BASELINES},
        "mdu": {}, "mdu-paper": {"target": "paper"}, "mdu-removed": {"target": "removed"},
        "authors": {"target": "authors", "tau": 0.5}}  # as in the authors' examples
    if original:
        known["mdu-original"] = {"target": original}
    short = {"w": "retain_weight", "s": "steps"}
    ending = r"-([a-z_]+)([0-9.]+(?:e-?[0-9]+)?)"
    method = re.sub(ending, "", name)
    numbers = {short.get(option, option): value for option, value in re.findall(ending, name)}
    mdu.require(method in known and numbers.keys() <= mdu.OPTIONS.keys(),
                f"METHODS: found {name}; needs one of {', '.join(known)}, which may end in "
                "options of mdu.py, as in npo-lr1e-3-w5-s900 (w: retain_weight, s: steps)")
    return {**known[method], **numbers}

# ---- The experiments ----
class Experiment(NamedTuple):
    """What is different from other experiments; the dicts are options of mdu.py and eval.py."""
    names: list  # of the runs that unlearn, where METHODS does not say them
    learn: dict = {}  # for `base`, from which those start, and `retain`
    if_hidden: dict = {}  # more for these two, with HIDDEN
    unlearn: dict = {}
    scoring: dict = {}
    files: list = []  # the sets that are scored, where they are files in OUT/rows
    model: str = ""  # from which `base` and `retain` start, or the start model is made
    start_model: str = ""  # the function of start_models.py that makes it
    original: dict = {}  # for the model before fine-tuning, which the start model becomes
    attack: dict = {}  # for relearning attacks
    seeds: str = ""  # where SEEDS does not say them.  Without any it is 1, which has no folder
    accepts: list = ["MODEL", "LORA", "HIDDEN"]  # those that have an effect
    jobs: str = "1"  # at once, where JOBS does not say it
    environment: dict = {}  # of its jobs

ON_CPU = dict(jobs="2", environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})

DEMO = Experiment(["authors", *BASELINES, "mdu-tau0", "mdu-tau0.25", "mdu-tau1", "mdu-removed"],
                  scoring=dict(samples=32), accepts=["HIDDEN"], **ON_CPU)
RWKU = Experiment(
    [name for name in TABLE_2 if name != "gd"],  # gd is ga where the retain weight is 0
    # The paper asks all questions; then TruthfulQA alone takes 27 hours more.
    scoring=dict(limit=100),
    # People in place of seeds, by their numbers in RWKU's list (its config forget_target).  0 is
    # nobody: the published model is asked about all ten.
    seeds="0 1 2 3 4 5 6 7 8 9 10", accepts=["LORA"])

EXPERIMENTS = {  # {NAME, or the PRESET of tofu and rwku: its experiment}
    "demo": DEMO,
    "table": DEMO._replace(seeds="1 2 3"),
    # --diagnose logs how far the model in training is from the base model, with the question and
    # without it, and from a uniform prediction.
    "figures": Experiment(["mdu-tau1", "mdu-tau0", "npo", "ga"], unlearn=dict(diagnose=True),
                          accepts=[], **ON_CPU),
    # A published model becomes a diffusion model by learning short pairs of TOFU.  Then it learns
    # the customers of an invented company, and unlearns some.
    "real": Experiment(
        ["mdu-removed", "mdu-paper", "npo-s500"], model=SMOLLM, start_model="customers",
        original=dict(response_length=48, batch_size=8, epochs=1, lr="3e-4", prompt_dropout=0.5),
        learn=dict(response_length=36, epochs=105, lr="4e-4", prompt_dropout=0.2),
        unlearn=dict(lora=16), attack=dict(batch_size=3, epochs=60, limit=3),
        files=["forget", "retain", "held_out", "never"], scoring=dict(samples=8, limit=12)),
    # The trial: a small model that has learnt nothing but pairs of TOFU.  A name without an ending
    # has the settings that were chosen for its method, which are those of the preset.
    "tofu-small": Experiment(
        ["mdu-tau0-lr3e-4-w1-s900", "mdu-tau0.25", "mdu-tau0.5-w1", "mdu-tau0.75", "mdu-tau1",
         *BASELINES, "authors", "mdu-original", "mdu-removed-w25"],
        start_model="small", original=dict(prompt_dropout=0.3),
        if_hidden=dict(steps=5000),  # answers are learnt later where questions are masked
        # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
        files=["forget", "retain", "held_out"], scoring=dict(limit=40, samples=8, steps=28),
        accepts=["LORA", "HIDDEN"], **ON_CPU),
    # A published model that predicts the next token, made a diffusion model first.
    "tofu-smollm": Experiment(
        [*TABLE_2, "authors", "mdu-original", "mdu-removed"],
        model=SMOLLM, start_model="published",
        original=dict(steps=200, lr="8e-4", prompt_dropout=0.3),
        learn=dict(limit=400), unlearn=dict(limit=400), attack=dict(batch_size=16, steps=200),
        scoring=dict(limit=100, samples=32, steps=28)),
    "tofu-llada": Experiment(TABLE_2, model=mdu.LLADA),
    "tofu-dream": Experiment(TABLE_2, model=mdu.DREAM),
    "tofu-qwen": Experiment(TABLE_2, model=mdu.QWEN),
    "rwku-llada": RWKU._replace(model=mdu.LLADA),
    "rwku-dream": RWKU._replace(model=mdu.DREAM)}

# ---- Jobs ----
class Job(NamedTuple):
    folder: str  # the job's name
    command: list
    finished: bool = False
    on_screen: bool = False  # as of reports; what other jobs print is in FOLDER.log

def words_of(options):
    """{"lora": 16, "retain_only": True} -> ["--lora", "16", "--retain-only"]"""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words

def launch(settled, program, words):
    if settled.GPUS == "1":
        return [PYTHON, program, *words]
    return [PYTHON, "-m", "torch.distributed.run", f"--nproc_per_node={settled.GPUS}", program,
            *words]

def train(settled, folder, options):
    """A run of mdu.py.  One that was stopped goes on from its checkpoint."""
    words = words_of({**options, "out": folder})
    with mdu.naming(folder):
        mdu.parse(words)  # bad options are refused here, before anything is trained
    finished = mdu.is_finished(folder)
    if os.path.exists(f"{folder}/run.json") and not finished:
        words = ["--resume", folder]
    return Job(folder, launch(settled, "mdu.py", words), finished)

def is_scored(run):
    return os.path.exists(f"{run}/eval/summary.json")

def score(settled, folder, runs, options):
    """Jobs that score these runs.  As many as there are at once share them, because it takes a
    while to start eval.py."""
    runs = [run for run in runs if not is_scored(run)]
    n = min(int(settled.JOBS), len(runs))
    return [Job(f"{folder}/scores-{i + 1}",
                launch(settled, "eval.py", [*words_of(options), *runs[i::n]])) for i in range(n)]

def report(folder, runs):
    return Job(f"{folder}/report", [PYTHON, "eval.py", "--report", *runs], on_screen=True)

# ---- An experiment becomes stages ----
# Each function returns the stages of one seed, and the runs for the report of all seeds.
def compare(settled, experiment, out, seed):
    """Train the fine-tuned model, from which other runs start, and the retrained model; unlearn;
    score these runs and those that are in the folder already; attack them."""
    common = {"seed": seed}
    if settled.PRESET:
        common = {"preset": settled.PRESET, "seed": seed}
        if not experiment.files:
            common["data"] = settled.TOFU
    sft = {**common, "method": "sft"}
    adapters = {}
    if settled.LORA:
        adapters["lora"] = settled.LORA
        # Compiled, LLaDA passed 33.8 rows a second on one GPU, else 20.8.  Several were not tried.
        # Start models are small: they train for about as long as compiling takes.
        if settled.GPUS == "1" and not experiment.start_model:
            adapters["compile"] = True
    learn = {**experiment.learn, **sft, **adapters}
    unlearn = {**experiment.unlearn, **common, **adapters}

    stages = []
    model = settled.MODEL
    if experiment.start_model:  # all of its weights are trained
        stages = learn_other_pairs(settled, experiment, out, sft)
        model = f"{out}/start/original"
    sets = {name: f"{out}/rows/{name}.jsonl" for name in experiment.files}
    if sets:
        learn.update(forget=sets["forget"], retain=f"{out}/rows/known.jsonl")
        unlearn.update(forget=sets["forget"], retain=sets["retain"])
    if model:
        learn["model"] = model
    if settled.HIDDEN:
        learn.update(experiment.if_hidden, prompt_dropout=settled.HIDDEN)

    names = settled.METHODS.split()
    there = [Path(config).parent.name for config in sorted(glob.glob(f"{out}/*/config.json"))]
    runs = [f"{out}/{name}" for name in dict.fromkeys(["base", "retain", *names, *there])]
    stages += [
        [train(settled, f"{out}/base", learn),
         train(settled, f"{out}/retain", {**learn, "retain_only": True})],
        [train(settled, f"{out}/{name}", {**unlearn, **options_of(name, model)}) for name in names],
        score(settled, out, runs, {**experiment.scoring, **sets})]
    if experiment.attack:
        stages += attack(settled, experiment, out, seed, runs)
    return stages, runs

def learn_other_pairs(settled, experiment, out, sft):
    """The model before fine-tuning: a start model, which learns pairs that no other run has, some
    without the question, as the paper's target is what the model predicts without it."""
    new = f"{out}/start/new"
    make = [PYTHON, ".github/start_models.py", experiment.start_model, out, settled.TOFU]
    if settled.MODEL:  # it is copied
        make += ["--model", settled.MODEL]
    else:  # a new one, with random weights
        make += ["--seed", sft["seed"]]
    options = dict(sft, model=new, retain_only=True, retain=f"{out}/rows/other.jsonl",
                   **experiment.original)
    return [[Job(new, make, mdu.is_finished(new))],
            [train(settled, f"{out}/start/original", options)]]

def attack(settled, experiment, out, seed, runs):
    """Relearning attacks: each run is taught a part of the forget set again, and asked for the
    rest.  In their report *retain* is of the pairs that were taught, to see that they were
    learnt."""
    folder = f"{out}/taught-again"
    taught, asked = f"{out}/rows/taught.jsonl", f"{out}/rows/asked.jsonl"
    options = dict(experiment.attack, method="sft", seed=seed, lora=16, forget=taught)
    if experiment.files:
        options["retain"] = f"{out}/rows/retain.jsonl"
    attacked = [train(settled, f"{folder}/{Path(run).name}", dict(options, model=run))
                for run in runs]
    runs = [job.folder for job in attacked]
    scoring = dict(experiment.scoring, forget=asked, retain=taught)
    return [attacked, score(settled, folder, runs, scoring), [report(folder, runs)]]

def figures(settled, experiment, out, seed):
    base = train(settled, f"{out}/base", dict(seed=seed, method="sft"))
    options = dict(experiment.unlearn, seed=seed)
    unlearned = [train(settled, f"{out}/{name}", {**options, **options_of(name)})
                 for name in experiment.names]
    analyses = []
    for name, runs, more in [
            ("convergence", experiment.names, {}),
            ("roles", ["mdu-tau1", "npo", "ga"], dict(samples=32)),
            ("trajectory", ["base"], {}), ("rollout", ["base"], {})]:
        words = words_of({"analysis": name, **more}) + [f"{out}/{run}" for run in runs]
        analyses.append(Job(f"{out}/{name}", launch(settled, "eval.py", words),
                            os.path.exists(f"{out}/{name}.json")))
    return [[base], unlearned, analyses], []

def rwku(settled, experiment, out, person):
    """person: in place of a seed, see RWKU."""
    if person == "0":
        options = dict(experiment.scoring, data="jinzhuoran/RWKU", model=settled.MODEL)
        runs = [f"{out}/base"]
        return [score(settled, out, runs, options)], runs
    options = dict(preset=settled.PRESET, subject=person)
    if settled.LORA:
        options["lora"] = settled.LORA
    stages = []
    runs = [f"{out}/{name}" for name in settled.METHODS.split()]
    for run in runs:
        # A hundred models of 16 GB are too many for most disks.
        delete = ["find", run, "-name", "*.safetensors", "-delete"]
        is_deleted = is_scored(run) and not glob.glob(f"{run}/*.safetensors")
        stages += [[train(settled, run, {**options, **options_of(Path(run).name)})],
                   score(settled, run, [run], experiment.scoring),
                   [Job(f"{run}/no-weights", delete, is_deleted)]]
    return stages, runs

# ---- A plan is made, and printed or carried out ----
class Plan(NamedTuple):
    settled: Variables
    environment: dict  # of the jobs
    stages: list  # lists of jobs

def make_plan(name, typed):
    """typed: the Variables as they were set.  Settled, they have the experiment's own values where
    nothing was set."""
    key = typed.PRESET or name
    mdu.require(key in EXPERIMENTS and key.split("-")[0] == name,
                f"found '{name}' with PRESET='{typed.PRESET}'; there are {', '.join(EXPERIMENTS)}, "
                "where tofu-... is `make tofu PRESET=tofu-...`")
    experiment = EXPERIMENTS[key]
    out = f"out/{key}"
    endings = {"MODEL": Path(typed.MODEL).name, "LORA": f"lora{typed.LORA}",
               "HIDDEN": f"hidden{typed.HIDDEN}"}
    for variable, ending in endings.items():
        if getattr(typed, variable):
            mdu.require(variable in experiment.accepts,
                        f"{variable}= has no effect on {key}: leave it out")
            out += f"-{ending}"

    settled = typed._replace(METHODS=typed.METHODS or " ".join(experiment.names),
                             MODEL=typed.MODEL or experiment.model,
                             JOBS=typed.JOBS or experiment.jobs)
    stages_of = {"figures": figures, "rwku": rwku}.get(name, compare)
    seeds = typed.SEEDS or experiment.seeds
    folders = {seed: f"{out}/{seed}" for seed in seeds.split()} or {"1": out}
    stages, runs = [], []
    for seed, folder in folders.items():
        stages_of_seed, runs_of_seed = stages_of(settled, experiment, folder, seed)
        stages += stages_of_seed
        runs += runs_of_seed
    if runs:
        stages.append([report(out, runs)])
    return Plan(settled, experiment.environment, stages)

def print_plan(plan):
    for name, value in plan.environment.items():
        print(f"export {name}={value}")
    for stage in plan.stages:
        for job in stage:
            comment = "# finished: " if job.finished else ""
            print(comment + shlex.join(job.command))

def carry_out(plan):
    at_once = int(plan.settled.JOBS)
    jobs = [job for stage in plan.stages for job in stage]
    finished = [job.folder for job in jobs if job.finished]
    to_do = [job.folder for job in jobs if not job.finished]
    print(f"{len(finished)} jobs are finished: {' '.join(finished)}")
    print(f"{len(to_do)} are to do, {at_once} at once: {' '.join(to_do)}", flush=True)
    n_later = len(to_do)
    for stage in plan.stages:
        waiting = [job for job in stage if not job.finished]
        n_later -= len(waiting)
        failed = run_stage(waiting, at_once, n_later)
        mdu.require(not failed, f"stopped, because these failed: {', '.join(failed)}.  The same "
                    "command tries them again; METHODS= names the runs to do")

def run_stage(waiting, at_once, n_later):
    """Run the jobs of the list waiting -> the folders of those that failed.
    n_later: so many jobs are left in the stages that follow."""
    running = {}  # {process: (its job, when it began)}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[start(job)] = (job, time.time())
            time.sleep(0.1)
            for process in list(running):
                if process.poll() is None:
                    continue
                job, began = running.pop(process)
                if process.returncode == 0:
                    n_left = len(waiting) + len(running) + n_later
                    print(f"{job.folder}: finished in {time.time() - began:.0f} s; "
                          f"jobs left: {n_left}", flush=True)
                else:
                    failed.append(job.folder)
                    place = "see above" if job.on_screen else f"see the end of {job.folder}.log"
                    print(f"{job.folder}: FAILED; {place}", file=sys.stderr, flush=True)
    finally:  # also after Ctrl-C
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed

def start(job):
    """-> its process."""
    os.makedirs(Path(job.folder).parent, exist_ok=True)
    if job.on_screen:
        return subprocess.Popen(job.command)
    with open(f"{job.folder}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(job.command, stdout=log, stderr=log)

def main(argv=None):
    name = " ".join(argv or sys.argv[1:])  # of two names none is known
    typed = {variable: os.environ[variable] for variable in Variables._fields
             if os.environ.get(variable)}
    plan = make_plan(name, Variables(**typed))
    if plan.settled.PLAN:
        return print_plan(plan)
    os.environ.update(plan.environment)
    # As after Ctrl-C, the jobs are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    carry_out(plan)

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

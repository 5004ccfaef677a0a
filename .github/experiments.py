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
import itertools
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

# ---- The names of the runs that unlearn ----
BASELINES = " ".join(method for method in mdu.METHODS if method not in ("mdu", "sft"))
TABLE_2 = f"mdu-tau0 mdu-tau0.25 mdu-tau0.5 mdu-tau0.75 mdu-tau1 {BASELINES}"

def options_of(name, original=""):
    """npo-lr1e-3-w5 -> {"method": "npo", "lr": "1e-3", "retain_weight": "5"}
    original: the model before fine-tuning, if there is one; it is the target of mdu-original."""
    known = {
        **{method: {"method": method} for method in BASELINES.split()},
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
    """What is different from other experiments.  A call may set what is in capitals, as in
    make tofu PRESET=tofu-small SEEDS="2 3" METHODS="npo wga-lr1e-3"."""
    METHODS: str = ""  # the names of the runs that unlearn, see options_of
    # Each has a folder, as out/demo/2, and one report has the means.  Of rwku they are people.
    SEEDS: str = ""  # without any it is 1, which has no folder
    PRESET: str = ""  # of tofu and rwku
    TOFU: str = "locuslab/TOFU"  # a folder, or a name on the hub
    GPUS: str = "1"  # so many processes for each job
    JOBS: str = "1"  # so many jobs at once
    # What a call sets of these three is in the folder's name, as in out/tofu-small-hidden0.3/2.
    MODEL: str = ""  # from which `base` and `retain` start, or the start model is made
    LORA: str = ""  # the rank of adapters; if it is empty, all weights are trained
    HIDDEN: str = ""  # the share of questions that are masked while `base` and `retain` learn
    accepts: list = ["MODEL", "LORA", "HIDDEN"]  # those of the three that have an effect
    environment: dict = {}  # of its jobs
    files: list = []  # the sets that are scored, where they are files in OUT/rows
    start_model: str = ""  # the function of start_models.py that makes it
    # Options of mdu.py and eval.py:
    original: dict = {}  # for the model before fine-tuning, which the start model becomes
    learn: dict = {}  # for `base`, from which the runs that unlearn start, and `retain`
    if_hidden: dict = {}  # more for these two, with HIDDEN
    unlearn: dict = {}
    attack: dict = {}  # for relearning attacks
    scoring: dict = {}

ON_CPU = dict(JOBS="2", environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})

DEMO = Experiment(f"authors {BASELINES} mdu-tau0 mdu-tau0.25 mdu-tau1 mdu-removed",
                  scoring=dict(samples=32), accepts=["HIDDEN"], **ON_CPU)
RWKU = Experiment(
    # gd is ga where the retain weight is 0.
    " ".join(name for name in TABLE_2.split() if name != "gd"),
    # The paper asks all questions; then TruthfulQA alone takes 27 hours more.
    scoring=dict(limit=100),
    # People in place of seeds, by their numbers in RWKU's list (its config forget_target).  0 is
    # nobody: the published model is asked about all ten.
    SEEDS="0 1 2 3 4 5 6 7 8 9 10", accepts=["LORA"])

# A NAME is a target of the Makefile, too, and a PRESET an entry of mdu.PRESETS.
EXPERIMENTS = {  # {NAME, or the PRESET of tofu and rwku: its experiment}
    "demo": DEMO,
    "table": DEMO._replace(SEEDS="1 2 3"),
    "figures": Experiment(accepts=[], **ON_CPU),
    # A published model becomes a diffusion model by learning short pairs of TOFU.  Then it learns
    # the customers of an invented company, and unlearns some.
    "real": Experiment(
        "mdu-removed mdu-paper npo-s500", MODEL=SMOLLM, start_model="customers",
        original=dict(response_length=48, batch_size=8, epochs=1, lr="3e-4", prompt_dropout=0.5),
        learn=dict(response_length=36, epochs=105, lr="4e-4", prompt_dropout=0.2),
        unlearn=dict(lora=16), attack=dict(batch_size=3, epochs=60, limit=3),
        files=["forget", "retain", "held_out", "never"], scoring=dict(samples=8, limit=12)),
    # The trial: a small model that has learnt nothing but pairs of TOFU.  A name without an ending
    # has the settings that were chosen for its method, which are those of the preset.
    "tofu-small": Experiment(
        "mdu-tau0-lr3e-4-w1-s900 mdu-tau0.25 mdu-tau0.5-w1 mdu-tau0.75 mdu-tau1 "
        f"{BASELINES} authors mdu-original mdu-removed-w25",
        start_model="small", original=dict(prompt_dropout=0.3),
        if_hidden=dict(steps=5000),  # answers are learnt later where questions are masked
        # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
        files=["forget", "retain", "held_out"], scoring=dict(limit=40, samples=8, steps=28),
        accepts=["LORA", "HIDDEN"], **ON_CPU),
    # A published model that predicts the next token, made a diffusion model first.
    "tofu-smollm": Experiment(
        f"{TABLE_2} authors mdu-original mdu-removed",
        MODEL=SMOLLM, start_model="published",
        original=dict(steps=200, lr="8e-4", prompt_dropout=0.3),
        learn=dict(limit=400), unlearn=dict(limit=400), attack=dict(batch_size=16, steps=200),
        scoring=dict(limit=100, samples=32, steps=28)),
    "tofu-llada": Experiment(TABLE_2, MODEL=mdu.LLADA),
    "tofu-dream": Experiment(TABLE_2, MODEL=mdu.DREAM),
    "tofu-qwen": Experiment(TABLE_2, MODEL=mdu.QWEN),
    "rwku-llada": RWKU._replace(MODEL=mdu.LLADA),
    "rwku-dream": RWKU._replace(MODEL=mdu.DREAM)}

# ---- Jobs ----
class Job(NamedTuple):
    folder: str  # the job's name
    command: list
    finished: bool = False
    on_screen: bool = False  # as of reports; what other jobs print is in FOLDER.log

def words_of(options):
    """{"lora": 16, "retain_only": True, "model": ""} -> ["--lora", "16", "--retain-only"]"""
    words = []
    for name, value in options.items():
        if value == "":
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words

def launch(experiment, program, words):
    if experiment.GPUS == "1":
        return [PYTHON, program, *words]
    return [PYTHON, "-m", "torch.distributed.run", f"--nproc_per_node={experiment.GPUS}", program,
            *words]

def train(experiment, folder, options):
    """A run of mdu.py.  One that was stopped goes on from its checkpoint."""
    words = words_of({**options, "out": folder})
    with mdu.naming(folder):
        mdu.parse(words)  # bad options are refused here, before anything is trained
    finished = mdu.is_finished(folder)
    if os.path.exists(f"{folder}/run.json") and not finished:
        words = ["--resume", folder]
    return Job(folder, launch(experiment, "mdu.py", words), finished)

def is_scored(run):
    return os.path.exists(f"{run}/eval/summary.json")

def score(experiment, folder, runs, options):
    """Jobs that score these runs.  As many as there are at once share them, because it takes a
    while to start eval.py."""
    runs = [run for run in runs if not is_scored(run)]
    n = min(int(experiment.JOBS), len(runs))
    return [Job(f"{folder}/scores-{i + 1}",
                launch(experiment, "eval.py", [*words_of(options), *runs[i::n]])) for i in range(n)]

def report(folder, runs):
    return Job(f"{folder}/report", [PYTHON, "eval.py", "--report", *runs], on_screen=True)

# ---- An experiment becomes stages ----
# Each function returns the stages of one seed, and the runs for the report of all seeds.
def compare(experiment, out, seed):
    """Train the fine-tuned model, from which other runs start, and the retrained model; unlearn;
    score these runs and those that are in the folder already; attack them."""
    common = dict(preset=experiment.PRESET, seed=seed)
    if experiment.PRESET and not experiment.files:
        common["data"] = experiment.TOFU
    adapters = {}
    if experiment.LORA:
        adapters["lora"] = experiment.LORA
        # Compiled, LLaDA passed 33.8 rows a second on one GPU, else 20.8.  Several were not tried.
        # Start models are small: they train for about as long as compiling takes.
        if experiment.GPUS == "1" and not experiment.start_model:
            adapters["compile"] = True

    stages = []
    model = experiment.MODEL
    if experiment.start_model:  # all of its weights are trained
        stages = learn_other_pairs(experiment, out, common)
        model = f"{out}/start/original"
    learn = dict(experiment.learn, **common, method="sft", **adapters, model=model)
    unlearn = {**experiment.unlearn, **common, **adapters}
    sets = {name: f"{out}/rows/{name}.jsonl" for name in experiment.files}
    if sets:
        learn.update(forget=sets["forget"], retain=f"{out}/rows/known.jsonl")
        unlearn.update(forget=sets["forget"], retain=sets["retain"])
    if experiment.HIDDEN:
        learn.update(experiment.if_hidden, prompt_dropout=experiment.HIDDEN)

    names = experiment.METHODS.split()
    there = [Path(config).parent.name for config in sorted(glob.glob(f"{out}/*/config.json"))]
    runs = [f"{out}/{name}" for name in dict.fromkeys(["base", "retain", *names, *there])]
    stages += [
        [train(experiment, f"{out}/base", learn),
         train(experiment, f"{out}/retain", {**learn, "retain_only": True})],
        [train(experiment, f"{out}/{name}", {**unlearn, **options_of(name, model)})
         for name in names],
        score(experiment, out, runs, {**experiment.scoring, **sets})]
    if experiment.attack:
        stages += attack(experiment, out, seed, runs)
    return stages, runs

def learn_other_pairs(experiment, out, common):
    """The model before fine-tuning: a start model, which learns pairs that no other run has, some
    without the question, as the paper's target is what the model predicts without it."""
    new = f"{out}/start/new"
    make = [PYTHON, ".github/start_models.py", experiment.start_model, out, experiment.TOFU]
    if experiment.MODEL:  # it is copied
        make += ["--model", experiment.MODEL]
    else:  # a new one, with random weights
        make += ["--seed", common["seed"]]
    options = dict(common, method="sft", model=new, retain_only=True,
                   retain=f"{out}/rows/other.jsonl", **experiment.original)
    return [[Job(new, make, mdu.is_finished(new))],
            [train(experiment, f"{out}/start/original", options)]]

def attack(experiment, out, seed, runs):
    """Relearning attacks: each run is taught a part of the forget set again, and asked for the
    rest.  In their report *retain* is of the pairs that were taught, to see that they were
    learnt."""
    folder = f"{out}/taught-again"
    taught, asked = f"{out}/rows/taught.jsonl", f"{out}/rows/asked.jsonl"
    options = dict(experiment.attack, method="sft", seed=seed, lora=16, forget=taught)
    if experiment.files:
        options["retain"] = f"{out}/rows/retain.jsonl"
    attacked = [train(experiment, f"{folder}/{Path(run).name}", {**options, "model": run})
                for run in runs]
    runs = [job.folder for job in attacked]
    scoring = {**experiment.scoring, "forget": asked, "retain": taught}
    return [attacked, score(experiment, folder, runs, scoring), [report(folder, runs)]]

def figures(experiment, out, seed):
    """The paper's analyses, always of the same runs."""
    names = ["mdu-tau1", "mdu-tau0", "npo", "ga"]
    # --diagnose logs how far the model in training is from the base model, with the question and
    # without it, and from a uniform prediction.
    options = dict(diagnose=True, seed=seed)
    base = train(experiment, f"{out}/base", dict(seed=seed, method="sft"))
    unlearned = [train(experiment, f"{out}/{name}", {**options, **options_of(name)})
                 for name in names]
    analyses = []
    for name, runs, more in [
            ("convergence", names, {}),
            ("roles", ["mdu-tau1", "npo", "ga"], dict(samples=32)),
            ("trajectory", ["base"], {}), ("rollout", ["base"], {})]:
        words = words_of({"analysis": name, **more}) + [f"{out}/{run}" for run in runs]
        analyses.append(Job(f"{out}/{name}", launch(experiment, "eval.py", words),
                            os.path.exists(f"{out}/{name}.json")))
    return [[base], unlearned, analyses], []

def rwku(experiment, out, person):
    """person: in place of a seed, see RWKU."""
    if person == "0":
        options = dict(experiment.scoring, data="jinzhuoran/RWKU", model=experiment.MODEL)
        runs = [f"{out}/base"]
        return [score(experiment, out, runs, options)], runs
    options = dict(preset=experiment.PRESET, subject=person, lora=experiment.LORA)
    stages = []
    runs = [f"{out}/{name}" for name in experiment.METHODS.split()]
    for run in runs:
        # A hundred models of 16 GB are too many for most disks.
        delete = ["find", run, "-name", "*.safetensors", "-delete"]
        is_deleted = is_scored(run) and not glob.glob(f"{run}/*.safetensors")
        stages += [[train(experiment, run, {**options, **options_of(Path(run).name)})],
                   score(experiment, run, [run], experiment.scoring),
                   [Job(f"{run}/no-weights", delete, is_deleted)]]
    return stages, runs

# ---- A plan is made, and printed or carried out ----
def make_plan(name, typed):
    """typed: {variable: what the call set} -> the experiment with these, and its stages."""
    preset = typed.get("PRESET", "")
    key = preset or name
    mdu.require(key in EXPERIMENTS and key.split("-")[0] == name,
                f"found '{name}' with PRESET='{preset}'; there are {', '.join(EXPERIMENTS)}, "
                "where tofu-... is `make tofu PRESET=tofu-...`")
    experiment = EXPERIMENTS[key]._replace(**typed)
    out = f"out/{key}"
    endings = {"MODEL": Path(experiment.MODEL).name, "LORA": f"lora{experiment.LORA}",
               "HIDDEN": f"hidden{experiment.HIDDEN}"}
    for variable, ending in endings.items():
        if variable in typed:
            mdu.require(variable in experiment.accepts,
                        f"{variable}= has no effect on {key}: leave it out")
            out += f"-{ending}"

    stages_of = {"figures": figures, "rwku": rwku}.get(name, compare)
    folders = {seed: f"{out}/{seed}" for seed in experiment.SEEDS.split()} or {"1": out}
    stages, runs = [], []
    for seed, folder in folders.items():
        stages_of_seed, runs_of_seed = stages_of(experiment, folder, seed)
        stages += stages_of_seed
        runs += runs_of_seed
    if runs:
        stages.append([report(out, runs)])
    return experiment, stages

def print_plan(experiment, stages):
    for name, value in experiment.environment.items():
        print(f"export {name}={value}")
    for job in itertools.chain(*stages):
        comment = "# finished: " if job.finished else ""
        print(comment + shlex.join(job.command))

def carry_out(experiment, stages):
    at_once = int(experiment.JOBS)
    jobs = [*itertools.chain(*stages)]
    finished = [job.folder for job in jobs if job.finished]
    to_do = [job.folder for job in jobs if not job.finished]
    print(f"{len(finished)} jobs are finished: {' '.join(finished)}")
    print(f"{len(to_do)} are to do, {at_once} at once: {' '.join(to_do)}", flush=True)
    for stage in stages:
        waiting = [job for job in stage if not job.finished]
        failed = run_stage(waiting, at_once, to_do)
        mdu.require(not failed, f"stopped, because these failed: {', '.join(failed)}.  The same "
                    "command tries them again; METHODS= names the runs to do")

def run_stage(waiting, at_once, to_do):
    """Run the jobs of the list waiting -> the folders of those that failed.
    to_do: the folders of all jobs that have not ended."""
    running = {}  # {process: (its job, when it began)}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[start(job)] = (job, time.time())
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                job, began = running.pop(process)
                to_do.remove(job.folder)
                if process.returncode == 0:
                    print(f"{job.folder}: finished in {time.time() - began:.0f} s; "
                          f"jobs left: {len(to_do)}", flush=True)
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
    typed = {variable: os.environ[variable] for variable in Experiment._fields
             if variable.isupper() and os.environ.get(variable)}
    experiment, stages = make_plan(name, typed)
    if os.environ.get("PLAN"):
        return print_plan(experiment, stages)
    os.environ.update(experiment.environment)
    # As after Ctrl-C, the jobs are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    carry_out(experiment, stages)

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

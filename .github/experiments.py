"""The experiments whose figures are in README.md and RESULTS.md.

    make NAME                             runs one with the Python of .venv
    PLAN=1 make NAME                      prints its commands, in order, and runs none
    python .github/experiments.py NAME    runs one with another Python

An experiment is a list of stages, a stage a list of jobs, and a job a command, mostly of mdu.py or
eval.py.  The jobs of a stage do not need each other.  The next stage begins when all of them have
ended; if one has failed, the experiment stops there.

Results are in out/NAME or out/PRESET: report.md, or of `figures` *.json.  The screen has a line for
each job that ends; what a job prints itself is in FOLDER.log.

A further call keeps what is finished, resumes what was stopped and does the rest.  To do a run
again, as after a change to its loss, delete its folder.
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
    MODEL: str = ""  # of tofu: a start model, a folder or a name on the hub
    LORA: str = ""  # the rank of adapters; if it is empty, all weights are trained
    HIDDEN: str = ""  # the share of questions that are masked while `base` and `retain` learn

# ---- The runs that unlearn ----
BASELINES = [method for method in mdu.METHODS if method not in ("mdu", "sft")]
NAMES = {  # {name: the options that tell this run from others}
    **{method: {"method": method} for method in BASELINES},
    "mdu": {},
    "mdu-paper": {"target": "paper"}, "mdu-removed": {"target": "removed"},
    "authors": {"target": "authors", "tau": 0.5}}  # as in the authors' examples
TABLE_2 = ["mdu-tau0", "mdu-tau0.25", "mdu-tau0.5", "mdu-tau0.75", "mdu-tau1", *BASELINES]
# The trial of the small model, with the settings that were chosen for each method; where a name has
# no ending, they are those of the preset.
TRIAL = ["mdu-tau0-lr3e-4-w1-s900", "mdu-tau0.25", "mdu-tau0.5-w1", "mdu-tau0.75", "mdu-tau1",
         *BASELINES, "authors", "mdu-original", "mdu-removed-w25"]

def options_of(name, original=""):
    """npo-lr1e-3-w5 -> {"method": "npo", "lr": "1e-3", "retain_weight": "5"}
    original: the model before fine-tuning, which is the target of mdu-original."""
    known = {**NAMES, "mdu-original": {"target": original}}
    short = {"w": "retain_weight", "s": "steps"}
    ending = r"-([a-z_]+)([0-9.]+(?:e-?[0-9]+)?)"
    method = re.sub(ending, "", name)
    numbers = {short.get(option, option): value for option, value in re.findall(ending, name)}
    mdu.require(method in known and numbers.keys() <= mdu.OPTIONS.keys(),
                f"METHODS: found {name}; needs one of {', '.join(known)}, which may end in "
                "options of mdu.py, as in npo-lr1e-3-w5-s900 (w: retain_weight, s: steps)")
    return {**known[method], **numbers}

# ---- Jobs, stages and reports ----
class Job(NamedTuple):
    folder: str  # the job's name
    command: list
    finished: bool

def words_of(options):
    """{"lora": 16, "retain_only": True} -> ["--lora", "16", "--retain-only"]"""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words

def is_scored(run):
    return os.path.exists(f"{run}/eval/summary.json")

class Plan:
    def __init__(self, given, out, is_small):
        self.given = given  # the variables
        self.out = out  # the folder of all seeds
        self.stages = []  # lists of jobs
        self.reports = {}  # {folder: the runs that its report.md compares}
        self.launcher = [PYTHON]
        if given.GPUS != "1":
            self.launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={given.GPUS}"]
        self.environment = {}
        self.jobs_at_once = 1
        if is_small:
            self.environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            self.jobs_at_once = 2
        if given.JOBS:
            self.jobs_at_once = int(given.JOBS)

    def train(self, folder, options):
        """A run of mdu.py.  One that was stopped goes on from its checkpoint."""
        words = words_of({**options, "out": folder})
        with mdu.naming(folder):
            mdu.parse(words)  # bad options are refused here, before anything is trained
        finished = os.path.exists(f"{folder}/config.json")
        if os.path.exists(f"{folder}/run.json") and not finished:
            words = ["--resume", folder]
        return Job(folder, [*self.launcher, "mdu.py", *words], finished)

    def score(self, report, folder, runs, options):
        """A stage that scores runs, for a report.  As many jobs as there are at once share the
        runs, because it takes a while to start eval.py."""
        self.reports.setdefault(report, []).extend(runs)
        runs = [run for run in runs if not is_scored(run)]
        stage = []
        for i in range(min(self.jobs_at_once, len(runs))):
            share = runs[i::self.jobs_at_once]
            command = [*self.launcher, "eval.py", *words_of(options), *share]
            stage.append(Job(f"{folder}/scores-{i + 1}", command, False))
        self.stages.append(stage)

# ---- What several experiments do ----
def compare(plan, out, names, learn, unlearn, scoring, original=""):
    """Train the fine-tuned model, from which other runs start, and the retrained model; unlearn;
    and score these runs and those that are in the folder already -> all these runs."""
    if plan.given.HIDDEN:
        learn = {**learn, "prompt_dropout": plan.given.HIDDEN}
    if plan.given.LORA:
        learn = {**learn, "lora": plan.given.LORA}
        unlearn = {**unlearn, "lora": plan.given.LORA}
    learned = [plan.train(f"{out}/base", learn),
               plan.train(f"{out}/retain", {**learn, "retain_only": True})]
    unlearned = [plan.train(f"{out}/{name}", {**unlearn, **options_of(name, original)})
                 for name in plan.given.METHODS.split() or names]
    plan.stages += [learned, unlearned]
    runs = [job.folder for job in learned + unlearned]
    there = [str(Path(config).parent) for config in sorted(glob.glob(f"{out}/*/config.json"))]
    runs += [run for run in there if run not in runs]
    plan.score(plan.out, out, runs, scoring)
    return runs

def learn_other_pairs(plan, out, start, options):
    """The model before fine-tuning: a start model, made by start_models.py, that has learnt pairs
    which no other run has, some without the question, as the paper's target is what the model
    predicts without it."""
    new, original = f"{out}/start/new", f"{out}/start/original"
    command = [PYTHON, ".github/start_models.py", *start]
    plan.stages.append([Job(new, command, os.path.exists(f"{new}/config.json"))])
    options = dict(options, method="sft", retain_only=True, model=new,
                   retain=f"{out}/rows/other.jsonl", prompt_dropout=0.3)
    plan.stages.append([plan.train(original, options)])
    return original

def attack(plan, out, runs, options, scoring):
    """Relearning attacks: each run is taught a part of the forget set again, and asked for the
    rest.  In their report *retain* is of the pairs that were taught, to see that they were
    learnt."""
    options = dict(options, method="sft", lora=16)
    attacked = [plan.train(f"{out}/taught-again/{Path(run).name}", dict(options, model=run))
                for run in runs]
    plan.stages.append(attacked)
    plan.score(f"{out}/taught-again", f"{out}/taught-again", [job.folder for job in attacked],
               scoring)

# ---- The small model ----
def demo(plan, out, seed):
    names = ["authors", *BASELINES, "mdu-tau0", "mdu-tau0.25", "mdu-tau1", "mdu-removed"]
    compare(plan, out, names, dict(seed=seed, method="sft"), dict(seed=seed), dict(samples=32))

def figures(plan, out, seed):
    base = plan.train(f"{out}/base", dict(seed=seed, method="sft"))
    # --diagnose logs how far the model in training is from the base model, with the question and
    # without it, and from a uniform prediction.
    unlearned = [plan.train(f"{out}/{name}", dict(seed=seed, diagnose=True, **options_of(name)))
                 for name in ("mdu-tau1", "mdu-tau0", "npo", "ga")]

    def analyse(name, runs, **options):
        command = [*plan.launcher, "eval.py", *words_of({"analysis": name, **options})]
        command += [f"{out}/{run}" for run in runs]
        return Job(f"{out}/{name}", command, os.path.exists(f"{out}/{name}.json"))

    analyses = [analyse("convergence", ["mdu-tau1", "mdu-tau0", "npo", "ga"]),
                analyse("roles", ["mdu-tau1", "npo", "ga"], samples=32),
                analyse("trajectory", ["base"]), analyse("rollout", ["base"])]
    plan.stages += [[base], unlearned, analyses]

# ---- Customers, and a published model ----
def real(plan, out, seed):
    rows, tofu = f"{out}/rows", f"{out}/tofu"
    forget, retain = f"{rows}/forget.jsonl", f"{rows}/retain.jsonl"
    taught, asked = f"{rows}/taught.jsonl", f"{rows}/asked.jsonl"
    # 1. By learning TOFU's pairs, the published model becomes a diffusion model.
    new, original = f"{tofu}/start/new", f"{tofu}/original"
    make_new = [PYTHON, ".github/start_models.py", "published", tofu, plan.given.TOFU,
                plan.given.MODEL or SMOLLM]
    make_rows = [PYTHON, ".github/company_rows.py", rows]  # company_rows.py says what is in them
    plan.stages.append([Job(new, make_new, os.path.exists(f"{new}/config.json")),
                        Job(rows, make_rows, os.path.exists(asked))])
    plan.stages.append([plan.train(original, dict(
        seed=seed, method="sft", retain_only=True, model=new, retain=f"{tofu}/rows/short.jsonl",
        response_length=48, batch_size=8, epochs=1, lr="3e-4", prompt_dropout=0.5))])
    # 2. It learns the customers, and unlearns some.
    learn = dict(seed=seed, method="sft", model=original, forget=forget,
                 retain=f"{rows}/known.jsonl", response_length=36, epochs=105, lr="4e-4",
                 prompt_dropout=0.2)
    scoring = dict(samples=8, limit=12, forget=forget, retain=retain,
                   held_out=f"{rows}/held_out.jsonl", never=f"{rows}/never.jsonl")
    runs = compare(plan, out, ["mdu-removed", "mdu-paper", "npo-s500"], learn,
                   dict(seed=seed, forget=forget, retain=retain, lora=16), scoring, original)
    # 3. One pair of each customer is taught again.
    attack(plan, out, runs,
           dict(seed=seed, batch_size=3, epochs=60, limit=3, forget=taught, retain=retain),
           dict(samples=1, forget=asked, retain=taught))

# ---- The paper's Table 2 ----
def tofu(plan, out, seed):
    functions = {"tofu-small": tofu_small, "tofu-smollm": tofu_smollm}
    function = functions.get(plan.given.PRESET, tofu_published)
    function(plan, out, dict(preset=plan.given.PRESET, seed=seed))

def tofu_small(plan, out, options):
    """The trial: a small model that has learnt nothing but pairs of TOFU."""
    start = ["small", out, plan.given.TOFU, options["seed"]]
    original = learn_other_pairs(plan, out, start, options)
    forget, retain = f"{out}/rows/forget.jsonl", f"{out}/rows/retain.jsonl"
    options = dict(options, forget=forget)
    learn = dict(options, method="sft", model=original, retain=f"{out}/rows/known.jsonl")
    if plan.given.HIDDEN:
        learn["steps"] = 5000  # answers are learnt later where questions are masked
    unlearn = dict(options, retain=retain)
    # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
    scoring = dict(limit=40, samples=8, steps=28, forget=forget, retain=retain,
                   held_out=f"{out}/rows/held_out.jsonl")
    compare(plan, out, TRIAL, learn, unlearn, scoring, original)

def tofu_smollm(plan, out, options):
    """A published model that predicts the next token, made a diffusion model first."""
    start = ["published", out, plan.given.TOFU, plan.given.MODEL or SMOLLM]
    options = dict(options, data=plan.given.TOFU)
    original = learn_other_pairs(plan, out, start, dict(options, steps=200, lr="8e-4"))
    unlearn = dict(options, limit=400)
    learn = dict(unlearn, method="sft", model=original)
    scoring = dict(limit=100, samples=32, steps=28)
    names = [*TABLE_2, "authors", "mdu-original", "mdu-removed"]
    runs = compare(plan, out, names, learn, unlearn, scoring, original)

    # A quarter of the forget set is taught again.
    taught, asked = f"{out}/rows/taught.jsonl", f"{out}/rows/asked.jsonl"
    attack(plan, out, runs, dict(batch_size=16, steps=200, forget=taught),
           dict(scoring, forget=asked, retain=taught))

def tofu_published(plan, out, options):
    """LLaDA, Dream and Qwen3, which are diffusion models."""
    original = plan.given.MODEL or mdu.PRESETS[plan.given.PRESET]["sft"]["model"]
    unlearn = dict(options, data=plan.given.TOFU)
    if plan.given.LORA and plan.given.GPUS == "1":
        unlearn["compile"] = True  # LLaDA passed 33.8 rows a second, without it 20.8
    learn = dict(unlearn, method="sft", model=original)
    compare(plan, out, TABLE_2, learn, unlearn, {}, original)

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
def rwku(plan, out, person):
    """person: its number in RWKU's list (its config forget_target)."""
    # The paper asks all questions, and not --limit 100, for which TruthfulQA alone takes 27 hours
    # more.
    scoring = dict(limit=100)
    if person == "0":  # the published model is asked about all ten people
        model = mdu.PRESETS[plan.given.PRESET]["unlearn"]["model"]
        plan.score(plan.out, out, [f"{out}/base"],
                   dict(scoring, data="jinzhuoran/RWKU", model=model))
        return
    options = dict(preset=plan.given.PRESET, subject=person)
    if plan.given.LORA:
        options["lora"] = plan.given.LORA
    names = [name for name in TABLE_2 if name != "gd"]  # gd is ga where the retain weight is 0
    for name in plan.given.METHODS.split() or names:
        run = f"{out}/{name}"
        plan.stages.append([plan.train(run, {**options, **options_of(name)})])
        plan.score(plan.out, run, [run], scoring)
        # A hundred models of 16 GB are too many for most disks.
        delete = ["find", run, "-name", "*.safetensors", "-delete"]
        is_deleted = is_scored(run) and not glob.glob(f"{run}/*.safetensors")
        plan.stages.append([Job(f"{run}/no-weights", delete, is_deleted)])

# ---- A plan is made, and printed or carried out ----
EXPERIMENTS = {  # {name: (function, its seeds)}.  Without seeds it is 1, which has no folder
    "demo": (demo, ""), "table": (demo, "1 2 3"), "figures": (figures, ""), "real": (real, ""),
    "tofu": (tofu, ""),
    "rwku": (rwku, "0 1 2 3 4 5 6 7 8 9 10")}

# The folder is named after these, so an experiment refuses those that have no effect on it.
IN_FOLDER = ["MODEL", "LORA", "HIDDEN"]
ACCEPTED = {  # {experiment or preset: those it accepts}; the others accept all
    "demo": ["HIDDEN"], "table": ["HIDDEN"], "figures": [],
    "tofu-small": ["LORA", "HIDDEN"], "rwku-llada": ["LORA"], "rwku-dream": ["LORA"]}

def make_plan(name, given):
    out = f"out/{name}"
    if name in ("tofu", "rwku"):
        presets = [preset for preset in mdu.PRESETS if preset.startswith(f"{name}-")]
        mdu.require(given.PRESET in presets,
                    f"found PRESET='{given.PRESET}'; give PRESET= one of {', '.join(presets)}")
        out = f"out/{given.PRESET}"
    else:
        mdu.require(not given.PRESET, f"PRESET= has no effect on {name}: leave it out")
    for variable in IN_FOLDER:
        accepted = ACCEPTED.get(given.PRESET or name, IN_FOLDER)
        mdu.require(variable in accepted or not getattr(given, variable),
                    f"{variable}= has no effect on {given.PRESET or name}: leave it out")
    if given.MODEL:
        out += f"-{Path(given.MODEL).name}"
    if given.LORA:
        out += f"-lora{given.LORA}"
    if given.HIDDEN:
        out += f"-hidden{given.HIDDEN}"
    is_small = name in ("demo", "table", "figures") or given.PRESET == "tofu-small"
    plan = Plan(given, out, is_small)
    experiment, seeds = EXPERIMENTS[name]
    seeds = given.SEEDS or seeds
    for seed in seeds.split():
        experiment(plan, f"{out}/{seed}", seed)
    if not seeds:
        experiment(plan, out, "1")
    return plan

def print_plan(plan):
    for name, value in plan.environment.items():
        print(f"export {name}={value}")
    for stage in plan.stages:
        for job in stage:
            comment = "# finished: " if job.finished else ""
            print(comment + shlex.join(job.command))
    for runs in plan.reports.values():
        print(shlex.join([PYTHON, "eval.py", "--report", *runs]))

def carry_out(plan):
    jobs = [job for stage in plan.stages for job in stage]
    finished = [job.folder for job in jobs if job.finished]
    to_do = [job.folder for job in jobs if not job.finished]
    print(f"{len(finished)} jobs are finished: {' '.join(finished)}")
    print(f"{len(to_do)} are to do, {plan.jobs_at_once} at once: {' '.join(to_do)}", flush=True)
    n_later = len(to_do)
    for stage in plan.stages:
        waiting = [job for job in stage if not job.finished]
        n_later -= len(waiting)
        failed = run_stage(waiting, plan.jobs_at_once, n_later)
        mdu.require(not failed, f"stopped, because these failed: {', '.join(failed)}.  The same "
                    "command tries them again; METHODS= names the runs to do")
    for runs in plan.reports.values():
        done = subprocess.run([PYTHON, "eval.py", "--report", *runs])
        mdu.require(done.returncode == 0, "the report failed, see above")

def run_stage(waiting, at_once, n_later):
    """-> the folders of the jobs that failed.  n_later: the number of jobs in later stages."""
    running = {}  # {process: (its job, when it began)}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                os.makedirs(Path(job.folder).parent, exist_ok=True)
                with open(f"{job.folder}.log", "a", encoding="utf-8") as log:
                    process = subprocess.Popen(job.command, stdout=log, stderr=log)
                running[process] = (job, time.time())
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                job, began = running.pop(process)
                if process.returncode != 0:
                    failed.append(job.folder)
                    print(f"{job.folder}: FAILED; see the end of {job.folder}.log",
                          file=sys.stderr, flush=True)
                    continue
                print(f"{job.folder}: finished in {time.time() - began:.0f} s; "
                      f"jobs left: {len(waiting) + len(running) + n_later}", flush=True)
    finally:  # also after Ctrl-C
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed

def main(argv=None):
    [name] = argv or sys.argv[1:] or [""]
    mdu.require(name in EXPERIMENTS, f"found '{name}', needs the name of an experiment: "
                f"{', '.join(EXPERIMENTS)}")
    given = {variable: os.environ[variable] for variable in Variables._fields
             if os.environ.get(variable)}
    plan = make_plan(name, Variables(**given))
    if plan.given.PLAN:
        return print_plan(plan)
    os.environ.update(plan.environment)
    # As after Ctrl-C, the jobs are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    carry_out(plan)

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

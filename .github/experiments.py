"""The experiments whose figures are in README.md and RESULTS.md.

    make NAME                             runs one with the Python of .venv
    PLAN=1 make NAME                      prints its commands, in order, and runs none
    python .github/experiments.py NAME    runs one with another Python

Each NAME is a function below that plans jobs, which are commands of mdu.py and eval.py.  Results
are in out/NAME or out/PRESET: report.md, or of `figures` *.json.  The screen has a line for each
job that ends; what a job prints itself is in FOLDER.log.

A further call keeps what is finished, resumes what was stopped and does the rest.  To do a run
again, as after a change to its loss, delete its folder.
"""
import glob
import json
import os
import re
import shlex
import shutil
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
VARIABLES = {  # {name: default}.  make tofu PRESET=tofu-small SEEDS="2 3" METHODS="npo wga-lr1e-3"
    "PRESET": "", "PLAN": "",
    "METHODS": "",  # the names of the runs that unlearn, see method_options
    "SEEDS": "",  # each has a folder, as out/demo/2, and one report has the means; of rwku: people
    "TOFU": "locuslab/TOFU",  # a folder, or a name on the hub
    "GPUS": "1",  # so many processes for each job
    "JOBS": "",  # so many jobs at once: 1, of small models 2
    # What is set of these is in the name of the folder, as in out/tofu-small-hidden0.3/2.
    "MODEL": "",  # of tofu and real: a start model, a folder or a name on the hub
    "LORA": "",  # the rank of adapters; if it is empty, all weights are trained
    "HIDDEN": ""}  # the share of questions that are masked while `base` and `retain` learn
SEEDS = {"table": "1 2 3", "rwku": "0 1 2 3 4 5 6 7 8 9 10"}  # others: 1, without a folder
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"
BASELINES = [method for method in mdu.METHODS if method not in ("mdu", "sft")]
TABLE_2 = ["mdu-tau0", "mdu-tau0.25", "mdu-tau0.5", "mdu-tau0.75", "mdu-tau1", *BASELINES]
# The trial of the small model, with the settings that were chosen for each method; where a name has
# no ending, they are those of the preset.
TRIAL = ["mdu-tau0-lr3e-4-w1-s900", "mdu-tau0.25", "mdu-tau0.5-w1", "mdu-tau0.75", "mdu-tau1",
         *BASELINES, "authors", "mdu-original", "mdu-removed-w25"]

# ---- Jobs ----
class Job(NamedTuple):
    folder: str  # the job's name
    words: list  # of its command, behind `python`
    finished: bool
    after: list  # folders of the jobs that come before

class Plan:
    def __init__(self, variables):
        vars(self).update(variables)  # plan.PRESET, plan.GPUS, ...
        self.jobs = []
        self.reports = {}  # {name: the folders of its runs}

    def add(self, folder, words, file, after):
        """A job that is finished if there is this file."""
        self.jobs.append(Job(folder, words, os.path.exists(file), after))
        return folder

    def train(self, folder, after, options):
        """A run of mdu.py.  One that was stopped goes on from its checkpoint."""
        words = ["mdu.py", *words_of(options), "--out", folder]
        config = f"{folder}/config.json"
        with mdu.naming(folder):
            mdu.parse(words[1:])  # bad options are refused here, before anything is trained
        if os.path.exists(f"{folder}/run.json") and not os.path.exists(config):
            words = ["mdu.py", "--resume", folder]
        return self.add(folder, words, config, after)

    def score(self, report, name, runs, options):
        """Runs that have no scores are shared by as many jobs as there are at once."""
        self.reports.setdefault(report, []).extend(runs)
        runs = [run for run in runs if not os.path.exists(scores_of(run))]
        for i in range(min(self.JOBS, len(runs))):
            share = runs[i::self.JOBS]
            words = ["eval.py", *words_of(options), *share]
            self.jobs.append(Job(f"{name}-{i + 1}", words, False, share))

def scores_of(run):
    return f"{run}/eval/summary.json"

def words_of(options):
    """{"lora": 16, "retain_only": True} -> ["--lora", "16", "--retain-only"]"""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words

def method_options(name, original=""):
    """The options that tell the run NAME from others: those of a method, or of a target by
    mdu-TARGET, and numbers at the end, as in mdu-tau0.25, wga-gamma2 and npo-lr1e-3-w5-s900.
    original: the model before fine-tuning, which never learnt the forget set."""
    methods = {method: {"method": method} for method in BASELINES}
    methods["mdu"] = {}
    methods.update({f"mdu-{target}": {"target": target} for target in mdu.TARGETS})
    methods["mdu-original"] = {"target": original}
    methods["authors"] = {"target": "authors", "tau": 0.5}  # as in the authors' examples
    short = {"w": "retain_weight", "s": "steps"}
    ending = r"-([a-z_]+)([0-9.]+(?:e-?[0-9]+)?)"
    method = re.sub(ending, "", name)
    numbers = {short.get(option, option): value for option, value in re.findall(ending, name)}
    mdu.require(method in methods and numbers.keys() <= mdu.OPTIONS.keys(),
                f"METHODS: found {name}; needs one of {', '.join(methods)}, which may end in "
                "options of mdu.py, as in npo-lr1e-3-w5-s900 (w: retain_weight, s: steps)")
    return {**methods[method], **numbers}

# ---- What several experiments do ----
def compare(plan, out, names, learn, unlearn, scoring, original=""):
    """Train the fine-tuned model, from which other runs start, and the retrained model; unlearn;
    and score these runs and those that are in the folder already -> all these runs."""
    if plan.HIDDEN:
        learn = {**learn, "prompt_dropout": plan.HIDDEN}
    if plan.LORA:
        learn = {**learn, "lora": plan.LORA}
        unlearn = {**unlearn, "lora": plan.LORA}
    base = plan.train(f"{out}/base", [original], learn)
    runs = [base, plan.train(f"{out}/retain", [original], {**learn, "retain_only": True})]
    for name in plan.METHODS.split() or names:
        options = {**unlearn, **method_options(name, original)}
        runs.append(plan.train(f"{out}/{name}", [base], options))
    there = [str(Path(config).parent) for config in sorted(glob.glob(f"{out}/*/config.json"))]
    runs += [run for run in there if run not in runs]
    plan.score("scores", f"{out}/scores", runs, scoring)
    return runs

def attack(plan, out, runs, options, scoring):
    """Relearning attacks: each run is taught a part of the forget set again, and asked for the
    rest."""
    options = {"method": "sft", "lora": 16, **options}
    again = [plan.train(f"{out}/taught-again/{Path(run).name}", [run], {**options, "model": run})
             for run in runs]
    plan.score(f"{out}/taught-again", f"{out}/taught-again", again, scoring)

# ---- The small model ----
def demo(plan, out, seed):
    names = ["authors", *BASELINES, "mdu-tau0", "mdu-tau0.25", "mdu-tau1", "mdu-removed"]
    compare(plan, out, names, dict(seed=seed, method="sft"), dict(seed=seed), dict(samples=32))

def figures(plan, out, seed):
    base = plan.train(f"{out}/base", [], dict(seed=seed, method="sft"))
    # --diagnose logs how far the model in training is from the base model, with the question and
    # without it, and from a uniform prediction.
    tau_1, tau_0, npo, ga = [
        plan.train(f"{out}/{name}", [base], dict(seed=seed, diagnose=True, **method_options(name)))
        for name in ("mdu-tau1", "mdu-tau0", "npo", "ga")]
    for name, words in {"convergence": [tau_1, tau_0, npo, ga],
                        "roles": ["--samples", "32", tau_1, npo, ga],
                        "trajectory": [base], "rollout": [base]}.items():
        plan.add(f"{out}/{name}", ["eval.py", "--analysis", name, *words], f"{out}/{name}.json",
                 [base, tau_1, tau_0, npo, ga])

# ---- A published model, with 135 million parameters, and an invented company's customers ----
def real(plan, out, seed):
    rows = f"{out}/rows"
    forget, retain = f"{rows}/forget.jsonl", f"{rows}/retain.jsonl"
    taught, asked = f"{rows}/taught.jsonl", f"{rows}/asked.jsonl"
    # company_rows.py says what is in each file.
    plan.add(rows, [".github/company_rows.py", rows], asked, [])

    # 1. By learning TOFU's pairs, the published model becomes a diffusion model: the original.
    new = start(plan, "start_published", f"{out}/tofu", plan.TOFU, plan.MODEL or SMOLLM)
    original = plan.train(f"{out}/tofu/original", [rows, new], dict(
        seed=seed, method="sft", retain_only=True, model=new,
        retain=f"{out}/tofu/rows/short.jsonl", response_length=48, batch_size=8, epochs=1,
        lr="3e-4", prompt_dropout=0.5))

    # 2. It learns the customers, and unlearns some.  `removed` is what is recommended for pairs of
    # one's own.
    learn = dict(seed=seed, method="sft", model=original, retain=f"{rows}/known.jsonl",
                 response_length=36, epochs=105, lr="4e-4", prompt_dropout=0.2, forget=forget)
    runs = compare(
        plan, out, ["mdu-removed", "mdu-paper", "npo-s500"], learn,
        dict(seed=seed, forget=forget, retain=retain, lora=16),
        dict(samples=8, limit=12, forget=forget, retain=retain,
             held_out=f"{rows}/held_out.jsonl", never=f"{rows}/never.jsonl"), original)

    # 3. One pair of each customer is taught again, with three of the retain set, and the other nine
    # are asked.  *Retain* is of the pairs that were taught, to see that they were learnt.
    attack(plan, out, runs,
           dict(seed=seed, batch_size=3, epochs=60, limit=3, forget=taught, retain=retain),
           dict(samples=1, forget=asked, retain=taught))

# ---- The paper's Table 2 ----
def tofu(plan, out, seed):
    functions = {"tofu-small": tofu_small, "tofu-smollm": tofu_smollm}
    function = functions.get(plan.PRESET, tofu_published)
    function(plan, out, seed)

def learn_other_pairs(plan, out, seed, **options):
    """The model before fine-tuning: a start model that has learnt pairs which no other run has,
    some without the question, as the paper's target is what the model predicts without it."""
    new = f"{out}/start/new"
    options = dict(preset=plan.PRESET, seed=seed, method="sft", retain_only=True, model=new,
                   retain=f"{out}/rows/other.jsonl", prompt_dropout=0.3, **options)
    return plan.train(f"{out}/start/original", [new], options)

def tofu_small(plan, out, seed):
    """The trial: a small model that has learnt nothing but pairs of TOFU."""
    start(plan, "start_small", out, plan.TOFU, seed)
    original = learn_other_pairs(plan, out, seed)
    forget, retain = f"{out}/rows/forget.jsonl", f"{out}/rows/retain.jsonl"
    options = dict(preset=plan.PRESET, seed=seed, forget=forget)
    learn = dict(options, method="sft", model=original, retain=f"{out}/rows/known.jsonl")
    if plan.HIDDEN:
        learn["steps"] = 5000  # answers are learnt later where questions are masked
    unlearn = dict(options, retain=retain)
    # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
    scoring = dict(limit=40, samples=8, steps=28, forget=forget, retain=retain,
                   held_out=f"{out}/rows/held_out.jsonl")
    compare(plan, out, TRIAL, learn, unlearn, scoring, original)

def tofu_smollm(plan, out, seed):
    """A published model that predicts the next token, made a diffusion model first."""
    start(plan, "start_published", out, plan.TOFU, plan.MODEL or SMOLLM)
    original = learn_other_pairs(plan, out, seed, data=plan.TOFU, steps=200, lr="8e-4")
    names = [*TABLE_2, "authors", "mdu-original", "mdu-removed"]
    unlearn = dict(preset=plan.PRESET, seed=seed, data=plan.TOFU, limit=400)
    learn = dict(unlearn, method="sft", model=original)
    scoring = dict(limit=100, samples=32, steps=28)
    runs = compare(plan, out, names, learn, unlearn, scoring, original)
    taught, asked = f"{out}/rows/taught.jsonl", f"{out}/rows/asked.jsonl"  # a quarter, and the rest
    attack(plan, out, runs, dict(batch_size=16, steps=200, forget=taught),
           dict(scoring, forget=asked, retain=taught))

def tofu_published(plan, out, seed):
    """LLaDA, Dream and Qwen3, which are diffusion models."""
    original = plan.MODEL or mdu.PRESETS[plan.PRESET]["sft"]["model"]
    unlearn = dict(preset=plan.PRESET, seed=seed, data=plan.TOFU)
    if plan.LORA and plan.GPUS == "1":
        unlearn["compile"] = True  # LLaDA passed 33.8 rows a second, without it 20.8
    learn = dict(unlearn, method="sft", model=original)
    compare(plan, out, TABLE_2, learn, unlearn, {}, original)

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
def rwku(plan, out, person):
    """person: its number in RWKU's list (its config forget_target)."""
    if person == "0":  # the published model is asked about all ten people
        # The paper asks all questions, and not --limit 100, for which TruthfulQA alone takes 27
        # hours more.
        model = mdu.PRESETS[plan.PRESET]["unlearn"]["model"]
        plan.score("scores", f"{out}/scores", [f"{out}/base"],
                   dict(limit=100, data="jinzhuoran/RWKU", model=model))
        return
    options = dict(preset=plan.PRESET, subject=person)
    if plan.LORA:
        options["lora"] = plan.LORA
    names = [name for name in TABLE_2 if name != "gd"]  # gd is ga where the retain weight is 0
    for name in plan.METHODS.split() or names:
        run = plan.train(f"{out}/{name}", [], {**options, **method_options(name)})
        plan.score("scores", f"{run}/scores", [run], dict(limit=100))
        # A hundred models of 16 GB are too many for most disks.
        plan.add(f"{run}/no-weights", [".github/experiments.py", "delete_weights", run],
                 f"{run}/no-weights", [f"{run}/scores-1"])

def delete_weights(run):
    for file in Path(run).glob("*.safetensors"):
        file.unlink()
    Path(run, "no-weights").touch()

# ---- Start models, and files of TOFU's pairs ----
def start(plan, function, out, *words):
    """One of the functions below, which write OUT/rows/*.jsonl, and last this model."""
    new = f"{out}/start/new"
    return plan.add(new, [".github/experiments.py", function, out, *words], f"{new}/config.json",
                    [])

def write_rows(folder, files):
    """{name: rows} -> FOLDER/rows/NAME.jsonl"""
    os.makedirs(f"{folder}/rows", exist_ok=True)
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(folder, f"rows/{name}.jsonl").write_text("".join(lines), encoding="utf-8")

def start_published(folder, tofu, model):
    """A copy of a model that predicts the next token, which says in config.json what sft makes of
    it."""
    from transformers import PreTrainedTokenizerFast
    source, new = mdu.find_model(model), Path(folder, "start/new")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    mdu.require("<file_sep>" in tokenizer.get_vocab(),
                f"{model}: needs the token <file_sep>, as a mask, which SmolLM2 has")
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    retain = mdu.read_dataset(tofu, "retain90")
    write_rows(folder, {
        # Of real: end tokens also fit into --response-length 48.
        "short": [row for row in retain if len(tokenizer(row["answer"]).input_ids) <= 44],
        # Of tofu-smollm: other pairs than the 400 first ones, which are the retain set.
        "other": retain[-800:],
        "taught": forget[::4], "asked": [row for i, row in enumerate(forget) if i % 4 > 0]})
    shutil.copytree(source, new, ignore=shutil.ignore_patterns("config.json"), dirs_exist_ok=True)
    config = mdu.read_json(source / "config.json")
    config["is_causal"] = False  # each token sees later ones
    config["mask_token_id"] = tokenizer.convert_tokens_to_ids("<file_sep>")  # which no text has
    (new / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

def start_small(folder, tofu, seed):
    """A toy with random weights, whose tokens are the words of the pairs.  The seed chooses those
    of the forget set, of the retain set and of those that only the base learns as well."""
    seed = int(seed)  # TOFU has enough pairs for the seeds 1 to 10
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    retain = mdu.read_dataset(tofu, "retain90")
    files = {"forget": forget[40 * (seed - 1):40 * seed],
             "retain": retain[160 * (seed - 1):160 * seed],
             "held_out": retain[800 + 80 * seed:880 + 80 * seed],
             "other": retain[2000:2800]}
    files["known"] = files["retain"] + files["held_out"]
    write_rows(folder, files)
    splits = {name: mdu.read_jsonl(name, f"{folder}/rows/{name}.jsonl")
              for name in ("forget", "known", "other")}
    model, tokenizer = mdu.new_toy(splits, seed)
    mdu.join_processes()
    new = Path(folder, "start/new")
    new.mkdir(parents=True, exist_ok=True)
    mdu.save_model(new, model, tokenizer)

# ---- A plan is made, and printed or carried out ----
EXPERIMENTS = {"demo": demo, "table": demo, "figures": figures, "real": real, "tofu": tofu,
               "rwku": rwku}
COMMANDS = {"start_published": start_published, "start_small": start_small,
            "delete_weights": delete_weights}

def make_plan(name, variables):
    plan = Plan(variables)
    out = f"out/{name}"
    if name in ("tofu", "rwku"):
        presets = [preset for preset in mdu.PRESETS if preset.startswith(f"{name}-")]
        mdu.require(plan.PRESET in presets,
                    f"found PRESET='{plan.PRESET}'; give PRESET= one of {', '.join(presets)}")
        out = f"out/{plan.PRESET}"
    if plan.MODEL:
        out += f"-{Path(plan.MODEL).name}"
    if plan.LORA:
        out += f"-lora{plan.LORA}"
    if plan.HIDDEN:
        out += f"-hidden{plan.HIDDEN}"
    seeds = plan.SEEDS or SEEDS.get(name, "")
    for seed in seeds.split():
        EXPERIMENTS[name](plan, f"{out}/{seed}", seed)
    if not seeds:
        EXPERIMENTS[name](plan, out, "1")
    return plan

def command(plan, job):
    launcher = [PYTHON]
    if plan.GPUS != "1" and job.words[0] in ("mdu.py", "eval.py"):
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={plan.GPUS}"]
    return launcher + job.words

def print_plan(plan, environment):
    for name, value in environment.items():
        print(f"export {name}={value}")
    for job in plan.jobs:
        comment = "# finished: " if job.finished else ""
        print(comment + shlex.join(command(plan, job)))
    for runs in plan.reports.values():
        print(shlex.join([PYTHON, "eval.py", "--report", *runs]))

def run_jobs(plan, waiting):
    """-> the folders of the jobs that failed, and of those that need them, which are left out.
    eval.py needs none of its runs: it scores those that are there."""
    running = {}  # {process: (its job, when it began)}
    failed = []
    try:
        while waiting or running:
            to_do = {job.folder for job in waiting} | {job.folder for job, _ in running.values()}
            for job in [job for job in waiting if not to_do & set(job.after)]:
                if len(running) == plan.JOBS:
                    break
                waiting.remove(job)
                if set(failed) & set(job.after) and job.words[0] != "eval.py":
                    failed.append(job.folder)
                    continue
                os.makedirs(Path(job.folder).parent, exist_ok=True)
                with open(f"{job.folder}.log", "a", encoding="utf-8") as log:
                    process = subprocess.Popen(command(plan, job), stdout=log, stderr=log)
                running[process] = (job, time.time())
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                job, began = running.pop(process)
                if process.returncode == 0:
                    print(f"{job.folder}: finished in {time.time() - began:.0f} s; "
                          f"jobs left: {len(waiting) + len(running)}", flush=True)
                else:
                    failed.append(job.folder)
                    print(f"{job.folder}: FAILED; see the end of {job.folder}.log",
                          file=sys.stderr, flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed

def carry_out(plan):
    finished = [job.folder for job in plan.jobs if job.finished]
    to_do = [job for job in plan.jobs if not job.finished]
    print(f"{len(finished)} jobs are finished: {' '.join(finished)}")
    print(f"{len(to_do)} are to do, {plan.JOBS} at once: {' '.join(job.folder for job in to_do)}",
          flush=True)
    failed = run_jobs(plan, to_do)
    for runs in plan.reports.values():
        scored = [run for run in runs if os.path.exists(scores_of(run))]
        if scored and subprocess.run([PYTHON, "eval.py", "--report", *scored]).returncode != 0:
            failed.append("a report")
    mdu.require(not failed, f"not finished, see above: {', '.join(failed)}")

def main(argv=None):
    name, *words = argv or sys.argv[1:] or [""]
    if name in COMMANDS:
        return COMMANDS[name](*words)
    mdu.require(name in EXPERIMENTS, f"found '{name}', needs the name of an experiment: "
                f"{', '.join(EXPERIMENTS)}")
    variables = {variable: os.environ.get(variable) or default
                 for variable, default in VARIABLES.items()}
    environment = {}
    at_once = 1
    if name in ("demo", "table", "figures") or variables["PRESET"] == "tofu-small":
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        at_once = 2
    variables["JOBS"] = int(variables["JOBS"] or at_once)
    plan = make_plan(name, variables)
    if plan.PLAN:
        return print_plan(plan, environment)
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as after Ctrl-C, the jobs are ended
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    carry_out(plan)

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

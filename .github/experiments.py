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
from types import SimpleNamespace
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
import mdu  # noqa: E402

PYTHON = sys.executable
VARIABLES = {  # {name: default}.  make tofu PRESET=tofu-small SEEDS="2 3" METHODS="npo wga-lr1e-3"
    "PRESET": "", "PLAN": "",
    "MODEL": "", "TOFU": "locuslab/TOFU",  # of tofu and real: a start model; a name or a folder
    "GPUS": "1",  # so many processes for each job
    "JOBS": "",  # so many jobs at once: 1, of small models 2
    "METHODS": "",  # of tofu and demo: the names of the runs, see method_options
    "SEEDS": "",  # of tofu and demo; of several seeds, each in its folder, one report has the means
    # Of tofu.  What is set is in the name of the folder, as in out/tofu-small-hidden0.3/2.
    "LORA": "",  # the rank of adapters, also of rwku; if it is empty, all weights are trained
    "HIDDEN": ""}  # the share of questions that are masked while `base` and `retain` learn
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"
BASELINES = [method for method in mdu.METHODS if method not in ("mdu", "sft")]
TABLE_2 = ["mdu-tau0", "mdu-tau0.25", "mdu-tau0.5", "mdu-tau0.75", "mdu-tau1", *BASELINES]

# ---- Jobs ----
class Job(NamedTuple):
    folder: str  # the job's name
    words: list  # of its command, behind `python`
    files: list  # if all of them are there, the job is finished
    after: list  # folders of the jobs that come before
    to_score: list = []  # the runs that eval.py scores, the words' end

class Plan:
    def __init__(self, given):
        self.gpus = given.GPUS
        self.at_once = int(given.JOBS or 1)
        self.jobs = []
        self.reports = {}  # {name: the folders of its runs}

    def add(self, folder, *job):
        self.jobs.append(Job(folder, *job))
        return folder

    def start(self, function, out, *words):
        """OUT/start/new and OUT/rows, by a function of this file."""
        new = f"{out}/start/new"
        return self.add(new, [".github/experiments.py", function, out, *words],
                        [f"{new}/config.json"], [])

    def train(self, folder, after, **options):
        words = ["mdu.py", *words_of(options), "--out", folder]
        return self.add(folder, words, [f"{folder}/config.json"], after)

    def score(self, report, out, runs, **options):
        """The runs are shared by as many jobs as there are at once."""
        self.reports.setdefault(report, []).extend(runs)
        for i in range(min(self.at_once, len(runs))):
            share = runs[i::self.at_once]
            self.add(f"{out}/{report}-{i + 1}", ["eval.py", *words_of(options)],
                     [scores_of(run) for run in share], share, share)

    def attack(self, out, runs, attack, scoring):
        """A relearning attack on each run: it is taught a part of the forget set again, and asked
        for the rest."""
        again = [self.train(f"{out}/taught-again/{Path(run).name}", [run], method="sft", lora=16,
                            model=run, **attack) for run in runs]
        self.score("taught-again", out, again, **scoring)

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

ENDINGS = {"lr": "lr", "w": "retain_weight", "s": "steps"}  # of a run's name: npo-lr1e-3-w5-s900

def method_options(name, original=""):
    """The options that tell the run NAME from others.  NAME may end in some of ENDINGS."""
    ending = r"-(lr|w|s)([0-9.]+(?:e-?[0-9]+)?)"
    method = re.sub(ending, "", name)
    options = {"method": method}
    if method.startswith("mdu-tau"):
        options = {"tau": method.removeprefix("mdu-tau")}
    elif method == "mdu-removed":
        options = {"target": "removed"}
    elif method == "mdu-original":  # a model that never learnt the forget set
        options = {"target": original}
    elif method == "authors":  # as in the examples of the authors' code
        options = {"target": "authors", "tau": 0.5}
    for letters, value in re.findall(ending, name):
        options[ENDINGS[letters]] = value
    return options

def folders_of(out, seeds):
    """{folder: seed}"""
    if not seeds:
        return {out: "1"}
    return {f"{out}/{seed}": seed for seed in seeds.split()}

def with_earlier(out, runs):
    """runs, and in their folder the finished ones of earlier calls or that were trained by hand."""
    there = [str(Path(config).parent) for config in sorted(glob.glob(f"{out}/*/config.json"))]
    return runs + [run for run in there if run not in runs]

# ---- The small model ----
def demo(given):
    return demo_of_seeds(given, folders_of("out/demo", given.SEEDS))

def table(given):
    return demo_of_seeds(given, folders_of("out/table", given.SEEDS or "1 2 3"))

def demo_of_seeds(given, folders):
    plan = Plan(given)
    names = ["authors", *BASELINES, "mdu-tau0", "mdu-tau0.5", "mdu-tau1", "mdu-removed"]
    all_runs = []
    for out, seed in folders.items():
        # 1. Train the model that all other runs start from, and the retrained model.
        learn = dict(seed=seed, method="sft")
        base = plan.train(f"{out}/base", [], **learn)
        runs = [base, plan.train(f"{out}/retain", [], **learn, retain_only=True)]
        # 2. Unlearn.
        for name in given.METHODS.split() or names:
            runs.append(plan.train(f"{out}/{name}", [base], seed=seed, **method_options(name)))
        all_runs += with_earlier(out, runs)
    # 3. Score all models.
    plan.score("scores", os.path.commonpath(folders), all_runs, samples=32)
    return plan

def figures(given):
    out = "out/figures"
    plan = Plan(given)
    base = plan.train(f"{out}/base", [], method="sft")
    # --diagnose logs how far the model in training is from the base model, with the question and
    # without it, and from a uniform prediction.
    tau_1, tau_0, npo, ga = [
        plan.train(f"{out}/{name}", [base], diagnose=True, **method_options(name))
        for name in ("mdu-tau1", "mdu-tau0", "npo", "ga")]
    for name, words in {"convergence": [tau_1, tau_0, npo, ga],
                        "roles": ["--samples", "32", tau_1, npo, ga],
                        "trajectory": [base], "rollout": [base]}.items():
        plan.add(f"{out}/{name}", ["eval.py", "--analysis", name, *words], [f"{out}/{name}.json"],
                 [base, tau_1, tau_0, npo, ga])
    return plan

# ---- A published model, with 135 million parameters ----
def real(given):
    out = "out/real"
    if given.MODEL:
        out += f"-{Path(given.MODEL).name}"
    plan = Plan(given)
    rows = f"{out}/rows"
    forget, retain = f"{rows}/forget.jsonl", f"{rows}/retain.jsonl"

    # 1. Pairs of an invented company (company_rows.py says what is in each file), and TOFU's.
    company = plan.add(rows, [".github/company_rows.py", rows], [f"{rows}/asked.jsonl"], [])
    new = plan.start("start_published", f"{out}/tofu", given.TOFU, given.MODEL or SMOLLM)

    # 2. By learning TOFU's pairs, the published model becomes a diffusion model: the original.
    original = plan.train(
        f"{out}/original", [company, new], method="sft", retain_only=True, model=new,
        retain=f"{out}/tofu/rows/short.jsonl", response_length=48, batch_size=8, epochs=1,
        lr="3e-4", prompt_dropout=0.5)

    # 3. Fine-tune it on all customers; and, to get the retrained model, on those to keep alone.
    learn = dict(method="sft", model=original, retain=f"{rows}/known.jsonl", response_length=36,
                 epochs=105, lr="4e-4", prompt_dropout=0.2, forget=forget)
    base = plan.train(f"{out}/finetune", [original], **learn)
    retrained = plan.train(f"{out}/retrained", [original], **learn, retain_only=True)

    # 4. Unlearn.  `removed` is what is recommended for pairs of one's own.
    runs = [base, original, retrained]
    for name, options in {
            "removed": dict(lora=16), "all-weights": dict(lr="3e-4"),
            "paper": dict(lora=16, target="paper"),
            "target-original": dict(lora=16, target=original),
            "npo": dict(lora=16, method="npo", prompt_dropout=0.5, steps=500)}.items():
        runs.append(plan.train(f"{out}/{name}", [base], model=base, forget=forget, retain=retain,
                               **options))

    # 5. Teach refusals to the fine-tuned model, and to one that has unlearnt.
    for name, start in {"refusals": base, "removed-refusals": f"{out}/removed"}.items():
        runs.append(plan.train(f"{out}/{name}", [start], method="sft", retain_only=True, lora=16,
                               retain=f"{rows}/refusals.jsonl", model=start))

    # 6. Score twelve pairs of each kind.  The original was trained with another answer length.
    plan.score("scores", out, runs, response_length=36, samples=8, limit=12, forget=forget,
               retain=retain, held_out=f"{rows}/held_out.jsonl", never=f"{rows}/never.jsonl")

    # 7. Teach one pair of each customer again, with three of the retain set, and ask for the other
    # nine.  *Retain* is of the pairs that were taught, to see that they were learnt.
    taught, asked = f"{rows}/taught.jsonl", f"{rows}/asked.jsonl"
    plan.attack(out, runs, dict(batch_size=3, epochs=60, limit=3, forget=taught, retain=retain),
                dict(response_length=36, samples=1, forget=asked, retain=taught))
    return plan

# ---- The paper's Table 2 ----
def tofu(given):
    presets = [preset for preset in mdu.PRESETS if preset.startswith("tofu-")]
    mdu.require(given.PRESET in presets,
                f"found PRESET='{given.PRESET}'; give PRESET= one of {', '.join(presets)}")
    out = f"out/{given.PRESET}"
    if given.MODEL:
        out += f"-{Path(given.MODEL).name}"
    if given.LORA:
        out += f"-lora{given.LORA}"
    if given.HIDDEN:
        out += f"-hidden{given.HIDDEN}"
    plan = Plan(given)
    for folder, seed in folders_of(out, given.SEEDS).items():
        tofu_of_seed(given, plan, folder, seed)
    return plan

def tofu_of_seed(given, plan, out, seed):
    # 1. What the presets differ in.  Two of them have a start model of their own, which learns
    # other pairs first, some without the question, as the paper's target is what the model predicts
    # without it.
    rows = f"{out}/rows"
    options = dict(preset=given.PRESET, seed=seed)
    first = dict(options, method="sft", retain_only=True, model=f"{out}/start/new",
                 retain=f"{rows}/other.jsonl", prompt_dropout=0.3)
    original = f"{out}/start/original"
    others = ["authors", "mdu-original", "mdu-removed"]
    if given.PRESET == "tofu-small":
        new = plan.start("start_small", out, given.TOFU, seed)
        plan.train(original, [new], **first)
        options["forget"] = f"{rows}/forget.jsonl"
        learn = dict(model=original, retain=f"{rows}/known.jsonl")
        if given.HIDDEN:
            learn["steps"] = 5000
        unlearn = dict(retain=f"{rows}/retain.jsonl")
        # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
        scoring = dict(limit=40, samples=8, steps=28, forget=options["forget"], **unlearn,
                       held_out=f"{rows}/held_out.jsonl")
    elif given.PRESET == "tofu-smollm":
        new = plan.start("start_published", out, given.TOFU, given.MODEL or SMOLLM)
        plan.train(original, [new], **first, data=given.TOFU, steps=200, lr="8e-4")
        options.update(data=given.TOFU, limit=400)
        learn, unlearn = dict(model=original), {}
        scoring = dict(limit=100, samples=32, steps=28)
    else:
        options["data"] = given.TOFU
        learn, unlearn, scoring, others = {}, {}, {}, []
        if given.MODEL:
            learn["model"] = given.MODEL
        if given.LORA and given.GPUS == "1":
            options["compile"] = True  # LLaDA passed 33.8 rows a second, without it 20.8
    if given.HIDDEN:
        learn["prompt_dropout"] = given.HIDDEN
    if given.LORA:
        options["lora"] = given.LORA

    # 2. The fine-tuned model, where all other runs start, and the retrained model.
    learn = dict(options, method="sft", **learn)
    base = plan.train(f"{out}/base", [original], **learn)
    runs = [base, plan.train(f"{out}/retain", [original], **learn, retain_only=True)]

    # 3. Unlearn, with MDU and with the baselines.
    for name in given.METHODS.split() or [*TABLE_2, *others]:
        runs.append(plan.train(f"{out}/{name}", [base], **options, **unlearn,
                               **method_options(name, original)))

    # 4. Score them.
    runs = with_earlier(out, runs)
    plan.score("scores", out, runs, **scoring)

    # 5. Attack the published model: teach a quarter of the forget set again, and ask for the rest.
    if given.PRESET == "tofu-smollm":
        taught, asked = f"{rows}/taught.jsonl", f"{rows}/asked.jsonl"
        plan.attack(out, runs, dict(batch_size=16, steps=200, forget=taught),
                    dict(scoring, forget=asked, retain=taught))

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
def rwku(given):
    mdu.require(given.PRESET in ("rwku-llada", "rwku-dream"),
                f"found PRESET='{given.PRESET}'; give PRESET=rwku-llada or rwku-dream")
    out = f"out/{given.PRESET}"
    adapters = {}
    if given.LORA:
        out += f"-lora{given.LORA}"
        adapters["lora"] = given.LORA
    plan = Plan(given)

    # 1. Score the published model on the questions about all ten people, as a person 0.  The paper
    # asks all questions, and not --limit 100, for which TruthfulQA alone takes 27 hours more.
    model = mdu.PRESETS[given.PRESET]["unlearn"]["model"]
    plan.score("scores", f"{out}/0", [f"{out}/0/base"], limit=100, data="jinzhuoran/RWKU",
               model=model)

    # 2. Unlearn each of the first ten people of RWKU's list (its config forget_target), and score.
    names = [name for name in TABLE_2 if name != "gd"]  # gd is ga where the retain weight is 0
    for person in range(1, 11):
        for name in given.METHODS.split() or names:
            run = plan.train(f"{out}/{person}/{name}", [], preset=given.PRESET, subject=person,
                             **adapters, **method_options(name))
            plan.score("scores", run, [run], limit=100)
            # A hundred models of 16 GB are too many for most disks.
            plan.add(f"{run}/no-weights", [".github/experiments.py", "delete_weights", run],
                     [f"{run}/no-weights"], [f"{run}/scores-1"])
    return plan

def delete_weights(run):
    for file in Path(run).glob("*.safetensors"):
        file.unlink()
    Path(run, "no-weights").touch()

# ---- Start models, and files of TOFU's pairs ----
# Each function writes FOLDER/rows/*.jsonl, and last FOLDER/start/new/config.json.
def write_rows(folder, files):
    """{name: rows} -> FOLDER/rows/NAME.jsonl"""
    fields = ("question", "answer", "perturbed_answer", "paraphrased_answer")
    os.makedirs(f"{folder}/rows", exist_ok=True)
    for name, rows in files.items():
        with open(f"{folder}/rows/{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                shown = {field: row[field] for field in fields if field in row}
                print(json.dumps(shown), file=file)

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
    seed = int(seed)
    mdu.require(1 <= seed <= 10, f"found seed {seed}; TOFU has pairs for the seeds 1 to 10")
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

# ---- A plan is printed or carried out ----
def is_finished(job):
    return all(os.path.exists(file) for file in job.files)

def command(plan, job):
    """The words of a job's command.  A run that was stopped goes on from its checkpoint, and those
    that were scored are not scored again."""
    words = job.words + [run for run in job.to_score if not os.path.exists(scores_of(run))]
    if is_finished(job):
        words = job.words + job.to_score
    elif words[0] == "mdu.py" and os.path.exists(f"{job.folder}/run.json"):
        words = ["mdu.py", "--resume", job.folder]
    launcher = [PYTHON]
    if plan.gpus != "1" and words[0] in ("mdu.py", "eval.py"):
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={plan.gpus}"]
    return launcher + words

def print_plan(plan, environment):
    for name, value in environment.items():
        print(f"export {name}={value}")
    for job in plan.jobs:
        comment = "# finished: " if is_finished(job) else ""
        print(comment + shlex.join(command(plan, job)))
    for runs in plan.reports.values():
        print(shlex.join([PYTHON, "eval.py", "--report", *runs]))

def start(words, log):
    os.makedirs(Path(log).parent, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)

def run_jobs(plan, waiting):
    """-> the folders of the jobs that failed, and of those that need them, which are left out.
    eval.py needs none of its runs: it scores those that are there."""
    waiting = list(waiting)
    running = {}  # {process: (its job, when it began)}
    failed = []
    try:
        while waiting or running:
            to_do = {job.folder for job in waiting} | {job.folder for job, _ in running.values()}
            for job in [job for job in waiting if not to_do & set(job.after)]:
                if len(running) == plan.at_once:
                    break
                waiting.remove(job)
                if set(failed) & set(job.after) and job.words[0] != "eval.py":
                    failed.append(job.folder)
                else:
                    process = start(command(plan, job), f"{job.folder}.log")
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
    to_do = [job for job in plan.jobs if not is_finished(job)]
    finished = [job.folder for job in plan.jobs if job not in to_do]
    print(f"{len(finished)} jobs are finished: {' '.join(finished)}")
    print(f"{len(to_do)} are to do, {plan.at_once} at once: "
          f"{' '.join(job.folder for job in to_do)}", flush=True)
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
    given = SimpleNamespace()
    for variable, default in VARIABLES.items():
        setattr(given, variable, os.environ.get(variable) or default)
    environment = {}
    if name in ("demo", "table", "figures") or given.PRESET == "tofu-small":
        given.JOBS = given.JOBS or "2"
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    plan = EXPERIMENTS[name](given)
    if given.PLAN:
        return print_plan(plan, environment)
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as after Ctrl-C, the jobs are ended
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    carry_out(plan)

EXPERIMENTS = {function.__name__: function for function in (demo, table, figures, real, tofu, rwku)}
COMMANDS = {function.__name__: function
            for function in (start_published, start_small, delete_weights)}

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

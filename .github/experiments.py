"""The experiments whose figures are in README.md and RESULTS.md.

    make NAME                             runs one with the Python of .venv
    PLAN=1 make NAME                      prints its commands, in order, and runs none
    python .github/experiments.py NAME    runs one with another Python

NAME      what it does                                 its results
demo      every method on a small model                out/demo/report.md (OUT=: another folder)
table     the demo with three seeds (SEEDS=)           out/table/report.md
figures   the paper's analyses of the small model      out/figures/*.json
real      unlearns customers from a published model    out/real/report.md
tofu      the paper's Table 2 (PRESET=)                out/PRESET/report.md
rwku      the paper's Table 3, on GPUs (PRESET=)       out/PRESET/report.md

The functions of these names plan the experiments: each job is a command of mdu.py or eval.py.  The
screen has a line for each job that ends; what a job prints itself is in FOLDER.log.

demo, table and figures first delete what an earlier call left in their folder in out/.  In the
others a further call keeps what is finished, resumes what was stopped and does the rest; to change
a run, delete its folder.
"""
import contextlib
import glob
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
import mdu  # noqa: E402

PYTHON = sys.executable
VARIABLES = {  # {name: default}.  make tofu PRESET=tofu-small METHODS="npo wga" LRS="3e-4 1e-3"
    "PRESET": "", "PLAN": "", "OUT": "out/demo",
    "MODEL": "", "TOFU": "locuslab/TOFU",  # of tofu and real: a start model; a name or a folder
    "GPUS": "4",  # so many processes, of tofu and rwku
    "JOBS": "",  # with GPUS=1 so many jobs at once; 1, of small models 2
    "METHODS": "",  # of tofu and demo: the names of the runs, see method_options
    "LRS": "", "WEIGHTS": "",  # of tofu: each run at each of these learning rates, retain weights
    "RETRAIN": "1",  # of tofu: 0 trains no retrained model
    "SEED": "", "SEEDS": "",  # of tofu and demo; with SEEDS="2 3 4" one report has the means
    # Of tofu.  What is set is in the name of the folder, as in out/tofu-small-hidden0.3/2.
    "LORA": "",  # the rank of adapters, also of rwku; if it is empty, all weights are trained
    "LIMIT": "",  # so many pairs of the forget set, and of the retain set; of tofu-smollm 400
    "HIDDEN": ""}  # the share of questions that are masked while `base` and `retain` learn
TIMES = {  # of a first call
    "demo": "three minutes on two CPU cores", "table": "ten minutes on two CPU cores",
    "figures": "ten minutes on a CPU", "real": "some hours on a CPU",
    "tofu-small": "half an hour for each seed on two CPU cores",
    "tofu-smollm": "an hour for each seed on a GPU (calculated)",
    "tofu-qwen": "8 hours on a GPU (calculated)", "tofu-llada": "1 to 4 days (calculated)",
    "tofu-dream": "9 to 32 hours (calculated)", "rwku-llada": "12 hours on four H100 (calculated)",
    "rwku-dream": "12 hours on four H100 (calculated)"}
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"
BASELINES = "ga gd npo simnpo wga dpo"
TABLE_2 = f"mdu-tau0 mdu-tau0.25 mdu-tau0.5 mdu-tau0.75 mdu-tau1 {BASELINES}"

# ---- Jobs ----
class Job(NamedTuple):
    """A command and the file that it writes last: if that is there, the job is finished."""
    kind: str  # what it does with its folder; jobs of one kind take about the same time
    folder: str
    words: list  # of the command, behind `python`
    done: str
    after: list  # the jobs that it needs
    deletes: str = ""  # the files that are deleted afterwards

class Plan:
    def __init__(self, given, folders, begins_anew=False):
        self.gpus = given.GPUS
        self.folders = list(folders)  # of the experiment: no other experiment may run in them
        self.begins_anew = begins_anew
        self.jobs = []
        self.reports = {}  # {name: the folders of its runs}

    def add(self, *job):
        self.jobs.append(Job(*job))
        return self.jobs[-1]

    def start(self, folder, *words):
        """FOLDER/start/new and FOLDER/rows, by a function of this file."""
        new = f"{folder}/start/new"
        words = [".github/experiments.py", *words]
        return self.add("prepared", new, words, f"{new}/config.json", [])

    def train(self, folder, after, **options):
        kind = "fine-tuned" if options.get("method") == "sft" else "unlearned"
        words = ["mdu.py", *words_of(options), "--out", folder]
        return self.add(kind, folder, words, f"{folder}/config.json", after)

    def score(self, report, folder, after, deletes="", **options):
        self.reports.setdefault(report, []).append(folder)
        words = ["eval.py", *words_of(options), folder]
        self.add("scored", folder, words, f"{folder}/eval/summary.json", after, deletes)

    def score_all(self, report, runs, **options):  # runs: {folder: jobs that come before}
        for folder, after in runs.items():
            self.score(report, folder, after, **options)

    def attack_all(self, out, runs, attack, scoring):
        """A relearning attack on each of some runs: it is taught a part of the forget set again,
        and asked for the rest."""
        for folder, after in runs.items():
            again = f"{out}/taught-again/{Path(folder).name}"
            job = self.train(again, after, method="sft", lora=16, **attack, model=folder)
            self.score("attack", again, [job], **scoring)

    def command(self, job):
        """The words of a job's command.  A run that was stopped goes on from its checkpoint."""
        words = job.words
        has_checkpoint = glob.glob(f"{job.folder}/{mdu.CHECKPOINTS}")
        if words[0] == "mdu.py" and has_checkpoint and not self.begins_anew:
            words = ["mdu.py", "--resume", job.folder]
        launcher = [PYTHON]
        if self.gpus != "1" and words[0] in ("mdu.py", "eval.py"):
            launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={self.gpus}"]
        return launcher + words

def words_of(options):
    """{"lora": 16, "retain_only": True} -> ["--lora", "16", "--retain-only"]"""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words

def method_options(name, original=""):
    """The options that tell the run NAME from others.  NAME may end in a learning rate or a retain
    weight or both: npo-lr1e-3, npo-w5, npo-lr1e-3-w5."""
    ending = r"-(lr|w)([0-9.]+(?:e-?[0-9]+)?)"
    method = re.sub(ending, "", name)
    if method.startswith("mdu-tau"):
        options = {"tau": method.removeprefix("mdu-tau")}
    elif method == "authors":  # as in the examples of the authors' code
        options = {"target": "authors", "tau": 0.5}
    elif method == "mdu-original":  # a model that never learnt the forget set
        options = {"target": original}
    elif method == "mdu-removed":
        options = {"target": "removed"}
    else:
        options = {"method": method}
    for letters, value in re.findall(ending, name):
        options["lr" if letters == "lr" else "retain_weight"] = value
    return options

# ---- The small model ----
def demo(given):
    return demo_of_seeds(given, {given.OUT: given.SEED or "1"})

def table(given):
    seeds = (given.SEEDS or "1 2 3").split()
    return demo_of_seeds(given, {f"out/table/{seed}": seed for seed in seeds})

def demo_of_seeds(given, folders):  # {folder: seed}
    plan = Plan(given, folders, begins_anew=True)
    names = given.METHODS or f"authors {BASELINES} mdu-tau0 mdu-tau0.5 mdu-tau1 mdu-removed"
    for out, seed in folders.items():
        # 1. Train the model that all other runs start from, and the retrained model.
        learn = dict(seed=seed, method="sft")
        base = plan.train(f"{out}/base", [], **learn)
        retrained = plan.train(f"{out}/retain", [], **learn, retain_only=True)
        runs = {base.folder: [base], retrained.folder: [retrained]}
        # 2. Unlearn.
        for name in names.split():
            job = plan.train(f"{out}/{name}", [base], seed=seed, **method_options(name))
            runs[job.folder] = [job]
        # 3. Score all models.
        plan.score_all("", runs, samples=32)
    return plan

def figures(given):
    out = "out/figures"
    plan = Plan(given, [out], begins_anew=True)
    # 1. Train the model that all other runs start from.
    base = plan.train(f"{out}/base", [], method="sft")
    # 2. Unlearn, and log in training how far the model is from the base model, with the question
    # and without it, and from a uniform prediction.
    trained = [plan.train(f"{out}/mdu", [base], diagnose=True, method="mdu"),
               plan.train(f"{out}/npo", [base], diagnose=True, method="npo"),
               plan.train(f"{out}/ga", [base], diagnose=True, method="ga"),
               plan.train(f"{out}/mdu-tau0", [base], diagnose=True, tau=0)]
    tau_1, npo, ga, tau_0 = [job.folder for job in trained]
    # 3. Make the figures.
    for name, words in {"convergence": [tau_1, tau_0, npo, ga],
                        "roles": ["--samples", "32", tau_1, npo, ga],
                        "trajectory": [base.folder], "rollout": [base.folder]}.items():
        words = ["eval.py", "--analysis", name, *words]
        plan.add("analysed", f"{out}/{name}", words, f"{out}/{name}.json", [base, *trained])
    return plan

# ---- A published model, with 135 million parameters ----
def real(given):
    out = "out/real"
    if given.MODEL:
        out += f"-{Path(given.MODEL).name}"
    plan = Plan(given, [out])
    rows = f"{out}/rows"
    forget, retain = f"{rows}/forget.jsonl", f"{rows}/retain.jsonl"

    # 1. The pairs: those of an invented company (company_rows.py says what is in each file), and
    # TOFU's.  The published model predicts the next token.
    company = plan.add("prepared", rows, [".github/company_rows.py", rows],
                       f"{rows}/asked.jsonl", [])
    new = plan.start(out, "start_real", given.MODEL or SMOLLM, given.TOFU, out)

    # 2. The original, a model that never learnt the forget set: by learning TOFU's pairs, the
    # published model becomes a diffusion model.
    original = plan.train(
        f"{out}/original", [new], method="sft", retain_only=True, model=new.folder,
        retain=f"{rows}/tofu.jsonl", response_length=48, batch_size=8, epochs=1, lr="3e-4",
        prompt_dropout=0.5)

    # 3. Fine-tune it on all customers; and, to get the retrained model, on those to keep alone.
    learn = dict(method="sft", model=original.folder, retain=f"{rows}/known.jsonl",
                 response_length=36, epochs=105, lr="4e-4", prompt_dropout=0.2, forget=forget)
    base = plan.train(f"{out}/finetune", [company, original], **learn)
    retrained = plan.train(f"{out}/retrained", [company, original], **learn, retain_only=True)

    # 4. Unlearn, in 500 steps.  `removed` is what is recommended for pairs of one's own, with
    # adapters, and `all-weights` the same without.  Then: the paper's target; a model that never
    # learnt the forget set as the target; the best of the baselines.  Half of the questions are
    # masked, but with the paper's target none.
    trained = [base, original, retrained]
    for name, options in {
            "removed": dict(lora=16), "all-weights": dict(lr="3e-4"),
            "paper": dict(lora=16, target="paper"),
            "target-original": dict(lora=16, target=original.folder),
            "npo": dict(lora=16, method="npo", prompt_dropout=0.5, steps=500)}.items():
        trained.append(plan.train(f"{out}/{name}", [base], model=base.folder, forget=forget,
                                  retain=retain, **options))

    # 5. Teach refusals to the fine-tuned model, and to one that has unlearnt.
    for name, start in {"refusals": base, "removed-refusals": trained[3]}.items():
        trained.append(plan.train(f"{out}/{name}", [start], method="sft", retain_only=True,
                                  lora=16, retain=f"{rows}/refusals.jsonl", model=start.folder))

    # 6. Score all models, twelve pairs of each kind.  They write answers of one length, or they
    # could not be in one report.  (The original was trained with another one.)
    runs = {job.folder: [job] for job in trained}
    plan.score_all("", runs, response_length=36, samples=8, limit=12, forget=forget, retain=retain,
                   held_out=f"{rows}/held_out.jsonl", never=f"{rows}/never.jsonl")

    # 7. Attack them: teach one pair of each customer again, with three of the retain set, and ask
    # for the other nine.  *Retain* is of the pairs that were taught, to see that they were learnt.
    plan.attack_all(
        out, runs,
        dict(batch_size=3, epochs=60, limit=3, forget=f"{rows}/taught.jsonl", retain=retain),
        dict(response_length=36, samples=1, forget=f"{rows}/asked.jsonl",
             retain=f"{rows}/taught.jsonl"))
    return plan

# ---- The paper's Table 2 ----
class Setup(NamedTuple):
    """What the presets of TOFU differ in: the default of METHODS, the jobs that come before the
    fine-tuned model, and options of all runs, of fine-tuning, of unlearning and of scoring."""
    names: str
    before: list
    options: dict
    learn: dict
    unlearn: dict
    scoring: dict

def tofu(given):
    setups = {"tofu-small": setup_small, "tofu-smollm": setup_smollm, "tofu-llada": setup_large,
              "tofu-dream": setup_large, "tofu-qwen": setup_large}
    mdu.require(given.PRESET in setups,
                f"found PRESET='{given.PRESET}'; give PRESET= one of {', '.join(setups)}")
    is_small = given.PRESET == "tofu-small"
    mdu.require(not is_small or not (given.MODEL or given.LIMIT), "tofu-small has its own start "
                "model and number of pairs; leave out MODEL= and LIMIT=")
    out = f"out/{given.PRESET}"
    if given.MODEL:
        out += f"-{Path(given.MODEL).name}"
    for name, value in {"": given.LIMIT, "lora": given.LORA, "hidden": given.HIDDEN}.items():
        if value:
            out += f"-{name}{value}"
    seeds = given.SEEDS or given.SEED
    if is_small and not seeds:
        seeds = "1"
    folders = {f"{out}/{seed}": seed for seed in seeds.split()} or {out: "1"}
    plan = Plan(given, folders)
    for folder, seed in folders.items():
        tofu_of_seed(given, plan, folder, setups[given.PRESET](given, plan, folder, seed), seed)
    return plan

def setup_small(given, plan, out, seed):
    """A small model learns pairs of TOFU by heart; which ones, SEED says."""
    rows = f"{out}/rows"
    new = plan.start(out, "start_small", given.TOFU, out, seed)
    original = train_original(given, plan, out, seed, new)
    forget = dict(forget=f"{rows}/forget.jsonl")
    learn = dict(model=original.folder, retain=f"{rows}/known.jsonl")
    if given.HIDDEN:
        learn["steps"] = 5000
    unlearn = dict(retain=f"{rows}/retain.jsonl")
    # --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
    scoring = dict(limit=40, samples=8, steps=28, **forget, **unlearn,
                   held_out=f"{rows}/held_out.jsonl")
    names = f"{TABLE_2} authors mdu-original mdu-removed"
    return Setup(names, [original], forget, learn, unlearn, scoring)

def setup_smollm(given, plan, out, seed):
    limit = given.LIMIT or "400"
    new = plan.start(out, "start_smollm", given.MODEL or SMOLLM, given.TOFU, out, limit)
    original = train_original(given, plan, out, seed, new, data=given.TOFU, steps=200, lr="8e-4")
    # Of each kind 100 pairs, but not more than were learnt.
    scoring = dict(limit=min(int(limit), 100), samples=32, steps=28)
    names = f"{TABLE_2} authors mdu-original mdu-removed-w5"
    data = dict(data=given.TOFU, limit=limit)
    return Setup(names, [original], data, dict(model=original.folder), {}, scoring)

def setup_large(given, plan, out, seed):
    data, learn = dict(data=given.TOFU), {}
    if given.LIMIT:
        data["limit"] = given.LIMIT
    if given.MODEL:
        learn["model"] = given.MODEL
    return Setup(TABLE_2, [], data, learn, {}, {})

def train_original(given, plan, out, seed, new, **options):
    """A model that learnt other pairs.  Some of their questions are masked, as the paper's target
    is what the model predicts without them.  The fine-tuned model is not taught that, unless by
    HIDDEN, or the target would give what is to be forgotten."""
    return plan.train(
        f"{out}/start/original", [new], preset=given.PRESET, seed=seed, method="sft",
        retain_only=True, model=new.folder, retain=f"{out}/rows/other.jsonl", prompt_dropout=0.3,
        **options)

def tofu_of_seed(given, plan, out, setup, seed):
    # 1. The fine-tuned model, where all other runs start, and the retrained model.
    options = dict(preset=given.PRESET, seed=seed)
    if given.LORA:
        options["lora"] = given.LORA
        if given.GPUS == "1" and shutil.which("nvidia-smi") and shutil.which("gcc"):
            options["compile"] = True  # LLaDA passed 33.8 rows a second, without it 20.8
    options.update(setup.options)
    learn = dict(options, **setup.learn)
    if given.HIDDEN:
        learn["prompt_dropout"] = given.HIDDEN
    learn["method"] = "sft"
    base = plan.train(f"{out}/base", setup.before, **learn)
    runs = {base.folder: [base]}
    if given.RETRAIN != "0":
        retrained = plan.train(f"{out}/retain", setup.before, **learn, retain_only=True)
        runs[retrained.folder] = [retrained]

    # 2. Unlearn, with MDU and with the baselines.
    for run in grid(given, setup.names):
        method = method_options(run, f"{out}/start/original")
        runs[f"{out}/{run}"] = [plan.train(f"{out}/{run}", [base], **options, **setup.unlearn,
                                           **method)]

    # 3. Score them, and the finished runs that were added by hand.
    for config in sorted(glob.glob(f"{out}/*/config.json")):
        runs.setdefault(str(Path(config).parent), [])
    plan.score_all("", runs, **setup.scoring)

    # 4. Attack the published model: teach a quarter of the forget set again, and ask for the rest.
    # *Retain* is of the pairs that were taught, to see that they were learnt.
    if given.PRESET == "tofu-smollm":
        taught, asked = f"{out}/rows/taught.jsonl", f"{out}/rows/asked.jsonl"
        plan.attack_all(out, runs, dict(batch_size=16, steps=200, forget=taught),
                        dict(setup.scoring, forget=asked, retain=taught))

def grid(given, names):
    """The names of the runs: each method at each of LRS and WEIGHTS."""
    lrs = [f"-lr{lr}" for lr in given.LRS.split()] or [""]
    weights = [f"-w{weight}" for weight in given.WEIGHTS.split()] or [""]
    runs = []
    for name, lr, weight in itertools.product((given.METHODS or names).split(), lrs, weights):
        run = f"{name}{lr}{weight}"
        if name == "ga":
            run = f"ga{lr}"  # it has no retain loss
        if run not in runs:
            runs.append(run)
    return runs

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
def rwku(given):
    mdu.require(given.PRESET in ("rwku-llada", "rwku-dream"),
                f"found PRESET='{given.PRESET}'; give PRESET=rwku-llada or rwku-dream")
    mdu.require(given.GPUS in ("1", "2", "4"), f"found GPUS='{given.GPUS}'; RWKU's presets have 4 "
                "rows a step: give GPUS=1, 2 or 4")
    out = f"out/{given.PRESET}"
    adapters = {}
    if given.LORA:
        out += f"-lora{given.LORA}"
        adapters["lora"] = given.LORA
    plan = Plan(given, [out])

    # 1. The published model is scored on the questions about all ten people, which eval.py takes if
    # it is given none.  Its folder is that of a person 0.  Nothing is trained there.  --limit 100:
    # the paper asks all questions, for which TruthfulQA alone takes 27 hours more.
    model = mdu.PRESETS[given.PRESET]["unlearn"]["model"]
    plan.score("", f"{out}/0/base", [], limit=100, data="jinzhuoran/RWKU", model=model)

    # 2. Unlearn each of ten people, and score.  The numbers are those of --subject: the first ten
    # people of RWKU's list (its config forget_target).
    methods = {f"method-{name}": dict(method=name) for name in "ga npo simnpo wga dpo".split()}
    methods |= {f"tau-{tau}": dict(tau=tau) for tau in "0 0.25 0.5 0.75 1".split()}
    for person in range(1, 11):
        for name, method in methods.items():
            run = plan.train(f"{out}/{person}/{name}", [], preset=given.PRESET, subject=person,
                             **adapters, **method)
            # A hundred models of 16 GB are too many for most disks, so their weights are deleted.
            plan.score("", run.folder, [run], f"{run.folder}/*.safetensors", limit=100)
    return plan

# ---- Start models, and files of TOFU's pairs ----
# Each writes FOLDER/rows/*.jsonl, and last FOLDER/start/new/config.json.
def write_rows(folder, files, fields=("question", "answer")):
    """{name: rows} -> FOLDER/rows/NAME.jsonl, with those of the fields that a row has."""
    os.makedirs(f"{folder}/rows", exist_ok=True)
    for name, rows in files.items():
        with open(f"{folder}/rows/{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                shown = {field: row[field] for field in fields if field in row}
                print(json.dumps(shown), file=file)

def load_tokenizer(model):
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast.from_pretrained(mdu.find_model(model))

def make_diffusion_model(model, tokenizer, folder):
    """A copy of a model that predicts the next token, which says in config.json what sft makes of
    it."""
    mdu.require("<file_sep>" in tokenizer.get_vocab(),
                f"{model}: needs the token <file_sep>, as a mask, which SmolLM2 has")
    source, new = mdu.find_model(model), Path(folder, "start/new")
    shutil.copytree(source, new, ignore=shutil.ignore_patterns("config.json"), dirs_exist_ok=True)
    config = mdu.read_json(source / "config.json")
    config["is_causal"] = False  # each token sees later ones
    config["mask_token_id"] = tokenizer.convert_tokens_to_ids("<file_sep>")  # which no text has
    (new / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

def start_real(model, tofu, folder):
    """tofu: the pairs whose answers have at most 44 tokens, so that end tokens also fit into
    --response-length 48."""
    tokenizer = load_tokenizer(model)
    rows = mdu.read_dataset(tofu, "retain90")
    rows = [row for row in rows if len(tokenizer(row["answer"]).input_ids) <= 44]
    write_rows(folder, {"tofu": rows})
    make_diffusion_model(model, tokenizer, folder)

def start_smollm(model, tofu, folder, limit):
    """taught: every fourth pair of the forget set; asked: the others; other: 800 pairs that are
    neither forgotten nor retained nor scored."""
    forget = mdu.read_dataset(tofu, "forget10_perturbed")[:int(limit)]
    not_retained = mdu.read_dataset(tofu, "retain90")[int(limit):]
    asked = [row for i, row in enumerate(forget) if i % 4 > 0]
    write_rows(folder, {"taught": forget[::4], "asked": asked, "other": not_retained[-800:]})
    tokenizer = load_tokenizer(model)
    make_diffusion_model(model, tokenizer, folder)

def start_small(tofu, folder, seed):
    """A toy with random weights, whose tokens are the words of the pairs.

    forget, retain   40 and 160 pairs
    held_out         80 that the base learns as well, but that unlearning does not see
    known            retain and held_out
    other            800 more
    """
    seed = int(seed)
    mdu.require(1 <= seed <= 10, f"found SEED={seed}; TOFU has pairs for SEED=1 to SEED=10")
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    retain = mdu.read_dataset(tofu, "retain90")
    files = {"forget": forget[40 * (seed - 1):40 * seed],
             "retain": retain[160 * (seed - 1):160 * seed],
             "held_out": retain[800 + 80 * seed:880 + 80 * seed],
             "other": retain[2000:2800]}
    files["known"] = files["retain"] + files["held_out"]
    write_rows(folder, files, ("question", "answer", "perturbed_answer", "paraphrased_answer"))
    splits = {name: mdu.read_jsonl(name, f"{folder}/rows/{name}.jsonl")
              for name in ("forget", "known", "other")}
    model, tokenizer = mdu.new_toy(splits, seed)
    mdu.join_processes()
    new = Path(folder, "start/new")
    new.mkdir(parents=True, exist_ok=True)
    mdu.save_model(new, model, tokenizer)

# ---- A plan is printed or carried out ----
def left_behind(plan):
    """Of an earlier call -> the folders to delete; the files `done` of finished jobs."""
    if plan.begins_anew:
        return [folder for folder in plan.folders if os.path.exists(folder)], set()
    finished = {job.done for job in plan.jobs if os.path.exists(job.done)}
    stopped = [job.folder for job in plan.jobs  # before the first checkpoint
               if job.words[0] == "mdu.py" and os.path.exists(job.folder)
               and job.done not in finished and "--resume" not in plan.command(job)]
    return stopped, finished

def report_command(runs):
    """Those of one name, of several seeds, side by side."""
    names = [Path(run).name for run in runs]
    runs = sorted(runs, key=lambda run: names.index(Path(run).name))
    return [PYTHON, "eval.py", "--report", *runs]

def print_plan(plan, environment):
    to_delete, finished = left_behind(plan)
    for name, value in environment.items():
        print(f"export {name}={value}")
    for folder in to_delete:
        print(shlex.join(["rm", "-r", folder]))
    for job in plan.jobs:
        comment = "# finished: " if job.done in finished else ""
        print(comment + shlex.join(plan.command(job)))
        if job.deletes:
            print(f"{comment}rm -f {job.deletes}")
    for runs in plan.reports.values():
        print(shlex.join(report_command(runs)))

def delete(folder):
    """Nothing outside out/ is deleted, and nothing that is in use."""
    path = Path(folder).resolve()
    mdu.require(Path("out").resolve() in path.parents, f"{folder} exists and is not in out/, so it "
                "is not replaced; name another folder")
    for used in [path, *[file.parent for file in path.rglob("run.json")]]:
        with mdu.locked(used):
            pass
    shutil.rmtree(path)

def print_list(plan, finished, at_once, takes):
    to_do = dict.fromkeys(job.folder for job in plan.jobs if job.done not in finished)
    complete = dict.fromkeys(job.folder for job in plan.jobs if job.folder not in to_do)
    print(f"{len(complete)} folders are finished: {' '.join(complete)}")
    print(f"{len(to_do)} are to do, {at_once} at once: {' '.join(to_do)}")
    print(f"A first call takes {takes}.", flush=True)

def start(command, log):
    os.makedirs(Path(log).parent, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

def take_jobs(plan, waiting, finished, at_once):
    """The jobs of the next process, taken from those that wait: one that is ready; or, of the small
    models that are to be scored alike, this process's share, as a process takes seconds to start.
    """
    ready = [job for job in waiting if all(needed.done in finished for needed in job.after)]
    taken = ready[:1]
    if at_once > 1 and taken and taken[0].kind == "scored" and not taken[0].deletes:
        alike = [job for job in plan.jobs if job.words[:-1] == taken[0].words[:-1]]
        n_to_do = sum(job.done not in finished for job in alike)
        share = math.ceil(n_to_do / at_once)
        taken = [job for job in ready if job in alike][:share]
    for job in taken:
        waiting.remove(job)
    return taken

def run_jobs(plan, finished, at_once):
    """Where a job fails, those that need it are left out, and all others are done.  finished: the
    files `done`, to which is added."""
    waiting = [job for job in plan.jobs if job.done not in finished]
    # A large model is scored once it is trained; small ones are scored together, at the end.
    scored_last = at_once > 1
    waiting.sort(key=lambda job: (job.kind == "scored") == scored_last)
    running = {}  # {process: (its jobs, when they began)}
    seconds = {}  # {kind: [seconds of each job]}
    try:
        while True:
            while len(running) < at_once:
                jobs = take_jobs(plan, waiting, finished, at_once)
                if not jobs:
                    break
                command = plan.command(jobs[0]) + [job.folder for job in jobs[1:]]
                running[start(command, f"{jobs[0].folder}.log")] = (jobs, time.time())
            if not running:
                return
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                jobs, began = running.pop(process)
                to_do = waiting + [job for others, _ in running.values() for job in others]
                for job in jobs:
                    if os.path.exists(job.done):
                        finished.add(job.done)
                        delete_files(job)
                        seconds.setdefault(job.kind, []).append((time.time() - began) / len(jobs))
                        print_end(job, to_do, seconds, at_once)
                    else:
                        print(f"{job.folder}: FAILED, not {job.kind}; see the end of "
                              f"{jobs[0].folder}.log", file=sys.stderr, flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

def print_end(job, to_do, seconds, at_once):
    """A line for a job that has ended.  How long the rest takes is said when a job of each kind
    has ended."""
    line = f"{job.folder}: {job.kind} in {seconds[job.kind][-1]:.0f} s; jobs left: {len(to_do)}"
    if to_do and all(other.kind in seconds for other in to_do):
        minutes = sum(fmean(seconds[other.kind]) for other in to_do) / at_once / 60
        line += f", about {minutes:.0f} minutes"
    print(line, flush=True)

def delete_files(job):
    for file in glob.glob(job.deletes):
        os.remove(file)

def carry_out(plan, at_once, takes):
    to_delete, finished = left_behind(plan)
    for folder in to_delete:
        delete(folder)
    with contextlib.ExitStack() as locks:
        for folder in plan.folders:
            os.makedirs(folder, exist_ok=True)
            locks.enter_context(mdu.locked(folder))
        print_list(plan, finished, at_once, takes)
        for job in plan.jobs:
            if job.done in finished:
                delete_files(job)
        run_jobs(plan, finished, at_once)
        missing = list(dict.fromkeys(job.folder for job in plan.jobs if job.done not in finished))
        for runs in plan.reports.values():
            scored = [run for run in runs if f"{run}/eval/summary.json" in finished]
            if scored and subprocess.run(report_command(scored)).returncode != 0:
                missing.append("a report")
    mdu.require(not missing, f"not finished, see above: {', '.join(missing)}")

def main(argv=None):
    name, *words = argv or sys.argv[1:] or [""]
    if name in STARTS:
        return STARTS[name](*words)
    mdu.require(name in EXPERIMENTS, f"found '{name}', needs the name of an experiment: "
                f"{', '.join(EXPERIMENTS)}")
    given = SimpleNamespace()
    for variable, default in VARIABLES.items():
        setattr(given, variable, os.environ.get(variable) or default)
    model = given.PRESET if name in ("tofu", "rwku") else name
    is_small = model in ("demo", "table", "figures", "tofu-small")
    if is_small or name == "real":
        given.GPUS = "1"
    at_once = int(given.JOBS or 1 + is_small)
    mdu.require(at_once == 1 or given.GPUS == "1", f"found JOBS={at_once} and GPUS={given.GPUS}; "
                "several runs at once need GPUS=1")
    plan = EXPERIMENTS[name](given)
    environment = {}
    if is_small:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if at_once > 1:
        environment["OMP_NUM_THREADS"] = "1"
    if given.PLAN:
        return print_plan(plan, environment)
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as after Ctrl-C, the jobs are ended
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    carry_out(plan, at_once, TIMES[model])

EXPERIMENTS = {function.__name__: function for function in (demo, table, figures, real, tofu, rwku)}
STARTS = {function.__name__: function for function in (start_real, start_smollm, start_small)}

if __name__ == "__main__":
    os.chdir(PROJECT)
    mdu.run_program("experiments.py", main)

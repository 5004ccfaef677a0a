"""Tests of mdu.py and eval.py, on a CPU and offline, in four minutes on two cores:

    python -m pytest -q test_mdu.py
    python -m pytest -q test_mdu.py -k mdu_loss    # those with this in their name

Formulas are compared with slow float64 loops, numbers worked by hand and the code of others.
Tests are in the order of the code that they test: first mdu.py's, then eval.py's.  The name of a
test begins with the functions that it tests.  TESTED_BY has the functions and classes that no
test's name has.
"""
import contextlib
import fnmatch
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from functools import partial
from math import log
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.update({"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
import huggingface_hub
import matplotlib.figure
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers

import eval as ev
import mdu

torch.set_num_threads(1)
approx = pytest.approx
each = pytest.mark.parametrize

TESTED_BY = {  # {test: functions and classes that it tests and that are not in its name}
    # mdu.py
    "test_draw_step_takes_every_row_once_in_a_pass_in_an_order_of_seed_and_split": "rng_for",
    "test_draw_example_pads_answers_to_random_lengths_but_not_to_forget": "Draw",
    "test_backward_equals_one_sequence_at_a_time": """
        mask_prompt collate make_batch Batch forget_batch batch_nll without_adapters
        rows_per_step""",
    "test_backward_is_tried_with_every_method": "Method",
    "test_train_equals_a_plain_loop_with_clipping_and_adamw": "new_optimizer",
    "test_train_on_two_processes_equals_one": "join_processes gathered",
    "test_main_lets_one_program_at_a_time_into_a_folder": "require_new",
    "test_find_tokens_of_each_family": "print0",
    "test_load_references_loads_no_model_in_vain": "References",
    "test_record_forget_loss_says_whether_the_target_is_reached": "read_losses",
    "test_parse_takes_defaults_of_method_and_preset": """
        path_or_name choose_preset find_preset preset_options choose_folder implied_options
        run_name""",
    "test_make_parser_and_parse_explain_every_option": """
        add_option add_method_options add_training_options add_model_options add_data_options
        add_run_options""",
    "test_find_source_of_a_run_as_model_has_the_response_length_of_the_run":
        "response_length_of_run",
    "test_add_anothers_by_hand": "spaced_words gives_anothers",
    "test_gap_of_by_hand": "find_words token_spans find_fact",
    "test_encode_prompt_encode_text_and_encode_row_keep_control_tokens_text": "Example",
    "test_encode_prompt_prints_a_fixed_date": "clock_macro",
    "test_load_backbone_equals_transformers_own_class": """
        MaskPredictor Backbone llada_config native_config load_weights
        set_threads""",
    "test_save_model_saves_an_unchanged_model_byte_for_byte": "read_origin Origin",
    "test_save_model_leaves_half_a_model_that_does_not_count": "is_finished",
    "test_run_folder_has_a_run_json_that_says_what_it_was_made_with": "read_run write_run",
    "test_load_checkpoint_lets_a_resumed_run_end_as_a_whole_one": "append_metrics hash_rows",
    "test_toy_world_has_five_wrong_answers_to_each_question": "toy_row known_facts",
    "test_parse_check_and_check_anchor_refuse_options": "BadInput require Parser number",
    "test_load_backbone_and_read_config_refuse_a_model": "check_config check_loaded",
    # eval.py
    "test_masked_batches_have_few_enough_sequences_and_logits": "Job",
    "test_evaluate_equals_one_row_at_a_time": """
        prompt_ids answers_nll texts_nll blank_jobs write_answers score_splits score_rows
        read_lines read_records""",
    "test_evaluate_on_two_processes_equals_one": "gather",
    "test_evaluate_and_report_show_how_much_of_the_forget_loss_is_left": "print_scores",
    "test_knows_rows_to_forget_says_whether_there_is_gen_ppl": "can_judge",
    "test_score_answers_and_model_utility_equal_tofus_own_code": "find_answers Answers",
    "test_compare_wrong_answers_by_hand": "bounded_exp",
    "test_scores_of_one_answer_by_hand": "score_probes score_triviaqa em_f1",
    "test_summarise_by_hand": "Metric mean_over_people",
    "test_splits_have_titles_of_their_own": "Split",
    "test_find_source_is_the_model_that_is_given": "Source",
    "test_find_splits": "find_settings tofu_rows rwku_rows limit_rows",
    "test_check_retain_run_takes_runs_that_learnt_rows_to_retain_alone": "trainings_of",
    "test_publish_and_read_summary_have_null_for_nan": "to_json without_nan",
    "test_ask_prints_what_each_run_answers": "one_line",
    "test_group_runs_refuses_unlike_runs_of_one_name": """
        must_agree require_same_training require_same_people""",
    "test_report_has_every_method_averaged_over_runs_of_one_folder_name": """
        count_rows values_of average_with_spread cell main_figures figures_table
        write_report_md""",
    "test_draw_methods_has_a_line_per_method_and_a_circle_per_run": """
        find_panels draw_runs set_scale""",
    "test_analysis_roles_equals_a_slow_loop": "anchor_kl mean_kl_by_role Study",
    "test_analysis_trajectory_by_hand": "trajectories Trajectory"}

# ======== Shared ========
# ---- Programs, files, tensors ----
@pytest.fixture(autouse=True)
def before_each_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # else programs would find a run in out/, beside this file
    # mdu.run_program leaves the group of torch.distributed at its end.  If a test before this one
    # has called it, the group is missing.
    mdu.join_processes()

def options(typed="", *more):
    return mdu.parse([*typed.split(), *more])

def program(argv, capsys, main=mdu.main, code=2):
    """Run mdu.py, or eval.py by its main, which has to end with this exit code -> its one line on
    stderr, or ""."""
    name = "eval.py" if main is ev.main else "mdu.py"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mdu.run_program(name, partial(main, [str(word) for word in argv]))
    err = capsys.readouterr().err
    assert err == "" or (err.startswith(f"{name}: ") and err.count("\n") == 1), err
    assert stop.value.code == code, err
    return err

def python_environment(**changes):
    path = os.pathsep.join([str(Path(mdu.__file__).parent), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
            # Processes then connect at their first message and not in init_process_group, as they
            # do on GPUs.
            "TORCH_GLOO_LAZY_INIT": "1",
            **changes}

# It imports the libraries once, which takes a process much longer than what the tests do with them,
# and then runs each program that it is told to run on two processes, forked from this one.
FORKING = """
import json, os, runpy, signal, socket, sys, traceback
import torch.distributed.checkpoint, torch.distributed.fsdp
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

def start(words, rank, port):
    pid = os.fork()
    if pid > 0:
        return pid
    signal.alarm(200)  # seconds, after which it is killed: both may wait for each other
    os.dup2(2, 1)  # what it prints: stdout is for exit codes
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = words
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    os._exit(code)

for line in sys.stdin:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [start(json.loads(line), rank, port) for rank in (0, 1)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
    print(json.dumps(codes), flush=True)
"""

@pytest.fixture(scope="session")
def on_two_processes():
    """A function that runs a Python file on two processes -> their exit codes.  It sets what
    torchrun sets."""
    forking = subprocess.Popen([sys.executable, "-c", FORKING], env=python_environment(), text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(*words):
        forking.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        forking.stdin.flush()
        return json.loads(forking.stdout.readline())

    yield run
    forking.stdin.close()
    forking.wait()

@contextlib.contextmanager
def largest_file(size):
    """No file can grow beyond this: as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

def stop_in(folder, *_):
    """Ctrl-C, while another program could not use the folder."""
    with pytest.raises(mdu.BadInput), mdu.locked(folder):
        pass
    raise KeyboardInterrupt

def read_all(folder):
    return {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}

@contextlib.contextmanager
def unchanged(*folders):
    before = [read_all(folder) for folder in folders]
    yield
    assert [read_all(folder) for folder in folders] == before

def write_lines(file, rows):
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)

def read_json(file):
    """Strictly: NaN and Infinity are no JSON."""
    return json.loads(file.read_text(), parse_constant=pytest.fail)

def weights(run):
    tensors = {}
    for file in Path(run).glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors

def distance(a, b):
    """Between the weights of two runs."""
    a, b = weights(a), weights(b)
    return math.sqrt(sum((a[name] - b[name]).square().sum() for name in a))

def assert_equal_weights(a, b, tolerance=0):
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=tolerance)

def assert_close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)

# ---- Screens and reports ----
def help_screen(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    return capsys.readouterr().out

def read_table(text):
    """A Markdown table -> {header: its column}."""
    lines = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
    header = lines[0]
    rows = lines[2:]  # line 1 is a rule
    return dict(zip(header, zip(*rows)))

def table_on_screen(screen):
    """The table that eval.py prints -> {header: its column}."""
    lines = [line for line in screen.splitlines() if line.startswith("|")]
    return read_table("\n".join(lines))

def read_tables(text):
    """{title: its table in report.md}.  A header begins with the title of the split in the table's
    first column only; here it is left out."""
    tables = {}
    for title, table in re.findall(r"(?m)^## (.*)\n\n((?:\|.*\n)+)", text):
        tables[title] = read_table(table.replace(f"| {title} ", "| ", 1))
    return tables

def made_up_run(scored, folder, options=(), forget=(), **parts):
    """A copy of the scores of a run, with other options, other figures of the split "forget", and
    other parts of its summary -> the folder."""
    shutil.copytree(Path(scored, "eval"), folder / "eval")
    summary = ev.read_summary(folder)
    summary.update(parts)
    summary["options"].update(options)
    summary["splits"]["forget"].update(forget)
    (folder / "eval/summary.json").write_text(json.dumps(summary))
    return str(folder)

# ---- Models ----
MASK, PAD = 10, 0
# Prompts and answers contain mask and padding ids as ordinary tokens: neither may be searched for.
PAIRS = [([3, MASK], [4, PAD, 5, 9]), ([PAD, 7, 1], [2]), ([8], [MASK, 6, 1, 2, 5]),
         ([6, 6, 2, 9], [PAD, 3])]
RNG = np.random.default_rng(3)
MORE_PAIRS = list(PAIRS)
for n in range(1, 17):
    prompt = RNG.integers(11, size=3).tolist()
    MORE_PAIRS.append((prompt, RNG.integers(11, size=n).tolist()))
# FakeModel has 11 tokens, with MASK and PAD.  A tiny_llama has 64: 0 is the mask, 1 is both end and
# padding.
WORDS = torch.arange(64) != 9  # of both: token 9 is a sign
RARE = [7, 8, 11]  # of tiny_llama: tokens of rare words, where has_rare_tokens

class FakeModel:
    """11 tokens, float64 logits (B, T, 11) that depend on all tokens and their order, or those
    that a script, a function of ids, returns.  boost: of the mask token."""
    mask_id, pad_id, end_id, origin = MASK, PAD, 1, mdu.Origin()
    lm = SimpleNamespace(config=SimpleNamespace(vocab_size=11, max_position_embeddings=99))
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(6)).double()
    boost, sure, by_entropy, script = -50.0, 1, False, None

    def __init__(self, **changes):
        vars(self).update(changes)
        self.seen = []  # ids of every call

    def __call__(self, ids, attention_mask, positions):
        self.seen.append(ids)
        if self.script:
            return self.script(ids)[positions]
        x = self.table[ids] * attention_mask[..., None]  # (B, T, 11)
        logits = 3 * self.sure * torch.sin(x.cumsum(1) + 2 * x.sum(1, keepdim=True))[positions]
        logits[:, MASK] += self.boost
        return logits

def tiny_llama(seed, likely=range(64)):
    """A random bidirectional Llama of 64 tokens, in float64, which mostly writes `likely` ones."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.4, is_causal=False)
    torch.manual_seed(seed)
    lm = transformers.LlamaForCausalLM(config).double()
    for token in set(range(64)) - set(likely):
        lm.lm_head.weight.data[token] *= 0.2
    return mdu.MaskPredictor(lm, mask_id=0, pad_id=1, end_id=1)

# ---- The same in slow loops over sequences and masked tokens ----
def sequence_sums(masked, values):
    """For each sequence the sum of its values.  values: one for each masked token, row by row."""
    sums = []
    start = 0
    for row in masked:
        end = start + int(row.sum())
        sums.append(sum(values[start:end], f64(0).sum()))
        start = end
    return torch.stack(sums)

def slow_kl(logits, anchor_logits, tau):
    """KL(p || q^tau / Z) of one token."""
    p = logits.exp() / logits.exp().sum()
    q = anchor_logits.detach().exp() / anchor_logits.detach().exp().sum()
    power = q ** tau
    return (p * (p * power.sum() / power).log()).sum()

def slow_nll(logits, target):
    """-log p(target) of one token."""
    return -(logits.exp()[target] / logits.exp().sum()).log()

def slow_mdu(logits, anchor_logits, masked, tau):
    """Eq. 5: 1/|M_t| sum_i KL(p || q^tau / Z_i)."""
    if anchor_logits is None:
        anchor_logits = torch.zeros_like(logits)  # of any anchor, q^0 = 1
    values = [slow_kl(x, anchor, tau) for x, anchor in zip(logits, anchor_logits, strict=True)]
    return sequence_sums(masked, values) / masked.sum(1).clamp(min=1)

def slow_sft(logits, targets, masked, t):
    values = [slow_nll(x, target) for x, target in zip(logits, targets, strict=True)]
    return sequence_sums(masked, values) / t

def slow_wga(logits, targets, masked, gamma):
    values = []
    for x, target in zip(logits, targets, strict=True):
        nll = slow_nll(x, target)
        weight = math.exp(-nll.item()) ** gamma  # a constant
        values.append(-weight * nll)
    return sequence_sums(masked, values)

def slow_ga(nll):
    return -nll

def slow_npo(nll, nll_ref, beta):
    ratio = nll_ref.detach() - nll  # log p_theta(y|x) - log p_theta0(y|x)
    return 2 / beta * (1 + (beta * ratio).exp()).log()

def slow_simnpo(nll, length, beta):
    return -2 / beta * (1 / (1 + (-beta * nll / length).exp())).log()

def slow_dpo(nll_win, nll_win_ref, nll_lose, nll_lose_ref, beta):
    win, lose = nll_win_ref.detach() - nll_win, nll_lose_ref.detach() - nll_lose
    return -(1 / (1 + (-beta * (win - lose)).exp())).log()

def slow_sampler(model, prompt, counts):
    ids = prompt + [model.mask_id] * sum(counts)
    return slow_filled(model, ids, range(len(prompt), len(ids)), counts)[len(prompt):]

@torch.no_grad()
def slow_filled(model, ids, masked, counts):
    """Step k fixes counts[k] tokens, those of the highest probability or the lowest entropy."""
    ids, masked = list(ids), list(masked)
    everywhere = torch.ones(1, len(ids), dtype=torch.bool)
    for count in counts:
        p = model(torch.tensor([ids]), everywhere, everywhere).double().softmax(-1)  # (T, V)
        entropy = torch.special.entr(p).sum(-1)
        p[:, model.mask_id] = 0  # after the softmax: the others keep their probabilities
        confidence, tokens = p.max(-1)
        if model.by_entropy:
            confidence = -entropy
        masked.sort(key=confidence.tolist().__getitem__)
        for _ in range(count):
            i = masked.pop()
            ids[i] = tokens[i].item()
    return ids

def slow_logits(model, prompt, answer, masked):
    """Logits (M, V) at the masked positions of an answer, of which the other tokens are seen."""
    noised = list(answer)
    for i in masked:
        noised[i] = 0
    return model.lm(torch.tensor([prompt + noised])).logits[0, len(prompt):][masked]

def slow_masked(row, method, states=None, model=None):
    """The masked positions of an answer.  With --states written: those of its words that the model
    still writes, at whatever place."""
    if states == "written":
        still_written = slow_sampler(model, row.prompt, [1] * len(row.answer))
        return [i for i, token in enumerate(row.answer)
                if token in still_written and WORDS[token]]
    masked = [i for i, u in enumerate(row.uniform) if u < row.t]
    if method == "mdu" and not masked:
        masked = [int(row.uniform.argmin())]
    return masked

def own_length(row):
    """|y| up to the end token.  Padding, of the same id, does not count."""
    return row.answer.index(1) + 1

def at(masked, n):
    """The positions of one sequence as (1, n) bool."""
    found = torch.zeros(1, n, dtype=torch.bool)
    found[0, masked] = True
    return found

def slow_row_sft(model, row):
    masked = slow_masked(row, "sft")
    targets = [row.answer[i] for i in masked]
    logits = slow_logits(model, row.prompt, row.answer, masked)
    return slow_sft(logits, targets, at(masked, len(row.answer)), f64(np.float32(row.t)))[0]

def without_truth(anchor_logits, targets):
    """The anchor's distributions, in which a rare true token is as unlikely as the unlikeliest."""
    q = anchor_logits.detach().softmax(-1)
    for probabilities, target in zip(q, targets):
        if target in RARE:
            probabilities[target] = min(probabilities.tolist())
    return (q / q.sum(-1, keepdim=True)).log()

def slow_row_loss(args, row, model, theta0, anchor):
    """The loss of a row to forget (sft: to train on)."""
    nll = slow_row_sft(model, row)
    if args.method == "sft":
        return nll
    if args.method in ("ga", "gd"):
        return slow_ga(nll)
    if args.method == "npo":
        return slow_npo(nll, slow_row_sft(theta0, row), args.beta)
    if args.method == "simnpo":
        return slow_simnpo(nll, own_length(row), args.beta)
    if args.method == "dpo":
        win = slow_row_sft(model, row.preferred)
        win_ref = slow_row_sft(theta0, row.preferred)
        return slow_dpo(win, win_ref, nll, slow_row_sft(theta0, row), args.beta)
    masked = slow_masked(row, args.method, args.states, model)
    targets = [row.answer[i] for i in masked]
    logits = slow_logits(model, row.prompt, row.answer, masked)
    where = at(masked, len(row.answer))
    if args.method == "wga":
        return slow_wga(logits, targets, where, args.gamma)[0]
    assert args.method == "mdu"
    prompt = row.prompt
    if args.anchor_prompt == "masked":
        prompt = [0] * len(prompt)
    anchor_logits = slow_logits(anchor, prompt, row.answer, masked)
    if args.anchor_truth == "removed" and has_rare_tokens(row.prompt[0]):
        anchor_logits = without_truth(anchor_logits, targets)
    return slow_mdu(logits, anchor_logits, where, args.tau)[0]

def slow_step(args, model, theta0, anchor, forget, retain):
    """-> means of the forget and the retain losses (Algorithm 1)."""
    forget_losses = []
    for row in forget:
        forget_losses.append(slow_row_loss(args, row, model, theta0, anchor))
    forget_loss = torch.stack(forget_losses).mean()
    if not retain:
        return forget_loss, torch.zeros(())
    retain_losses = []
    for row in retain:
        nll = slow_row_sft(model, row)
        if args.method in ("mdu", "simnpo"):  # whose forget losses are means over tokens
            nll = nll / own_length(row)
        retain_losses.append(nll)
    return forget_loss, torch.stack(retain_losses).mean()

@torch.no_grad()
def slow_eq7(model, prompt, answer, masks):
    """The mean over the masks, in one forward pass each, of the mean NLL of the masked tokens."""
    means = []
    for mask in masks:
        masked = mask.nonzero()[:, 0].tolist()
        logits = slow_logits(model, prompt, answer, masked).double()
        means.append(np.mean([slow_nll(x, answer[i]).item() for x, i in zip(logits, masked)]))
    return np.mean(means)

# ---- Data ----
def write_dataset(root, splits):
    """A dataset {split: {config: rows}} in the hub's layout: its files, listed in its card."""
    card = "---\nconfigs:\n"
    for split, configs in splits.items():
        for config, rows in configs.items():
            write_lines(root / f"{config}.jsonl", rows)
            card += f"- config_name: {config}\n  data_files:\n"
            card += f"  - split: {split}\n    path: {config}.jsonl\n"
    (root / "README.md").write_text(f"{card}---\n")
    return root

@pytest.fixture(scope="session")
def tofu(tmp_path_factory):
    configs = {"forget10_perturbed": 8, "retain90": 24, "retain_perturbed": 8,
               "real_authors_perturbed": 3, "world_facts_perturbed": 3}
    rows = {}
    for config, size in configs.items():
        rows[config] = []
        for i in range(size):
            rows[config].append({
                "question": f"Q {config} {i}?", "answer": f"A {i}.",
                "paraphrased_answer": f"D {i}.", "perturbed_answer": [f"B {i}.", f"C {i}."]})
    return write_dataset(tmp_path_factory.mktemp("tofu"), {"train": rows})

RWKU_ROWS = json.loads("""{
"forget_level1": {"query": "He was born in ___.", "answer": "Rome, Italy", "level": "1"},
"forget_level2": {"query": "Where {was} he born?", "answer": "Rome", "level": "2"},
"forget_level3": {"query": "Where was he born? Sure,", "answer": "Rome", "level": "3",
                  "type": "affirmative suffix"},
"neighbor_level1": {"query": "She lives in ___.", "answer": "Oslo", "level": "1"},
"neighbor_level2": {"query": "Where does she live?", "answer": "Oslo", "level": "2"},
"utility_general": {"question": "Two?", "choices": ["1", "2", "3", "4"], "answer": 1,
    "task": "abstract_algebra",
    "examples": [{"question": "One?", "choices": ["1", "0", "3", "4"], "answer": 0}]},
"utility_truthfulness": {"question": "Is it?",
    "mc1_targets": {"choices": ["Yes.", "No way.", "Maybe so."], "labels": [1, 0, 0]}},
"utility_factuality": {"question": "Who?", "answers": ["The Beatles", "Beatles"]}
}""")  # a row per config in the hub's fields, without "subject"
PEOPLE = ["Ann Lee", "Prince Bo, Duke of Oz", "Zoë Ho"] + [f"Nobody {i}" for i in range(9)]

@pytest.fixture(scope="session")
def rwku(tmp_path_factory):
    """A folder in the layout of jinzhuoran/RWKU, with biographies of three of its twelve people."""
    people = [{"target": name, "intro": f"{name} is known."} for name in PEOPLE]
    texts, pairs, probes = [], [], {}
    for name, i in itertools.product(PEOPLE[:3], range(4)):
        intro = None if i == 2 else f"{name} is known."
        row = {"subject": name, "intro": intro, "text": f"{name} wrote book {i}."}
        texts.append(row)
        pairs.append({**row, "response": [f"Made up {len(pairs)}.", row["text"]]})
    for config, row in RWKU_ROWS.items():
        asked = PEOPLE
        if config == "forget_level3":
            asked = PEOPLE[:-1]  # a person may have no rows of a config
        probes[config] = [{**row, "subject": name} for name in asked * 2]
    train = {"forget_target": people, "train_positive_llama3": texts, "train_pair_llama3": pairs}
    return write_dataset(tmp_path_factory.mktemp("people"), {"train": train, "test": probes})

# ---- Runs of the toy ----
@pytest.fixture(scope="session")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "base"
    mdu.main(["--method", "sft", "--epochs", "8", "--out", str(out)])
    with unchanged(out.parent):
        yield out

def toy(base, out, typed=""):
    return ["--preset", "toy", "--model", str(base), "--out", str(out), *typed.split()]

@pytest.fixture(scope="session")
def unlearned(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("unlearned") / "mdu"
    mdu.main(toy(base, out, "--epochs 2 --diagnose"))
    with unchanged(out.parent):
        yield out

def metrics(run):
    """The lines of metrics.jsonl, without what differs between two equal runs."""
    lines = ev.read_lines(Path(run) / "metrics.jsonl")
    for line in lines:
        line.pop("rows_per_s", None)
    return lines

# ---- Tiny checkpoints in the layouts of the hub ----
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=264, max_position_embeddings=256)
# The fields from attention_dropout on are such as the hub's files have.  Loading has to ignore
# them: no dropout, no code of the model's own, no kernel from elsewhere, no quantization.
NATIVE = dict(SIZES, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", torch_dtype="bfloat16",
              attention_dropout=0.5, auto_map={"AutoModel": "modeling.Model"},
              attn_implementation="owner/kernel", quantization_config={"quant_method": "fp8"})
# A sliding window, which loading has to turn off, too.  Only models that have none get it.
WINDOW = dict(use_sliding_window=True, sliding_window=2, max_window_layers=0,
              layer_types=2 * ["sliding_attention"])
LLADA = json.loads("""{
"activation_type": "silu", "alibi": false, "attention_dropout": 0.5,
"auto_map": {"AutoModel": "modeling.Model"},
"block_type": "llama", "d_model": 32, "embedding_size": null, "eos_token_id": 257,
"input_emb_norm": false, "layer_norm_type": "rms", "mask_token_id": 258, "mlp_hidden_size": null,
"mlp_ratio": 2, "max_sequence_length": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2,
"pad_token_id": 257, "rms_norm_eps": 1e-5, "rope": true, "rope_theta": 5e5, "scale_logits": false,
"vocab_size": 264}""")
ILLADA = dict(NATIVE, rope_theta=5e5, layer_norm_eps=None, resid_pdrop=0.5, pad_token_id=256,
              rope_scaling={"factor": 1.0, "rope_type": "default", "type": "default"})
QWEN2 = dict(NATIVE, mask_token_id=258, pad_token_id=256)
QWEN3 = dict(NATIVE, head_dim=16, attention_bias=False)  # its special tokens: the tokenizer's
CONFIGS = {  # model_type: config.json
    "llada": LLADA, "illada": ILLADA, "Dream": dict(QWEN2, **WINDOW), "a2d-qwen2": QWEN2,
    "qwen2": dict(QWEN2, is_causal=False), "qwen3": dict(QWEN3, is_causal=False),
    "a2d-qwen3": dict(QWEN3, **WINDOW),
    "a2d-llama": dict(NATIVE, rope_theta=5e5, mask_token_id=258),
    "llama": dict(NATIVE, rope_theta=5e5, is_causal=False, mask_token_id=258)}
LLADA_NAMES = {  # part of a native tensor's name: LLaDA's
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
    "self_attn.o_proj": "attn_out", "self_attn.": "", "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm"}
HEADERS = (  # LLaDA's template ends with the assistant's header, asked for or not
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>"
    "{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>")
THINKING = CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
TOKENS = {  # special tokens, ids from 256 on, after the bytes
    "llama": "<|startoftext|> <|endoftext|> <|mdm_mask|> <|start_header_id|> <|end_header_id|> "
             "<|eot_id|>".split(),
    "illada": "<pad> </s> <[MASK]> <unk> <user> <assistant>".split(),
    "qwen": "<|endoftext|> <|beginoftext|> <|mask|> <|im_start|> <|im_end|> <think> "
            "</think>".split()}

def family(kind):
    if kind == "illada":
        return kind
    return "qwen" if kind == "Dream" or "qwen" in kind else "llama"

def write_tokenizer(folder, kind):
    """A vocabulary of bytes and special tokens, in the files of the hub's tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    settings = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    if family(kind) == "qwen":
        added = {}
        for i, token in enumerate(TOKENS["qwen"], 256):
            added[i] = {"content": token, "special": "think" not in token}
        settings.update(tokenizer_class="Qwen2Tokenizer", chat_template=THINKING, unk_token=None,
                        mask_token="<|mask|>", added_tokens_decoder=added)
        if kind == "Dream":
            settings.update(tokenizer_class="DreamTokenizer", chat_template=CHATML)
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.add_special_tokens(TOKENS[family(kind)])
        bpe.save(str(folder / "tokenizer.json"))
        settings.update(tokenizer_class="PreTrainedTokenizerFast", chat_template=HEADERS,
                        bos_token="<|startoftext|>")
        if kind == "illada":  # no token is named the mask token
            settings = dict(chat_template=NO_SYSTEM, eos_token="</s>", pad_token="<pad>",
                            unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

def write_checkpoint(folder, kind, tied=False, file_size="5GB", **changes):
    """A random bfloat16 checkpoint in the hub's layout -> transformers' model of its weights."""
    folder.mkdir(exist_ok=True)
    tie = "weight_tying" if kind == "llada" else "tie_word_embeddings"
    config = {**CONFIGS[kind], "model_type": kind, tie: tied, **changes}
    for field, value in changes.items():
        if value is None:
            del config[field]
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    (folder / "modeling.py").write_text("raise RuntimeError('code of the folder was run')\n")
    (folder / "notes.json").touch()  # which belongs to no model
    write_tokenizer(folder, kind)
    native = {"Dream": "qwen2", "llada": "llama", "illada": "llama"}.get(
        kind, kind.removeprefix("a2d-"))
    shapes = transformers.AutoConfig.for_model(
        native, **SIZES, head_dim=config.get("head_dim", 8), rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"], tie_word_embeddings=tied, is_causal=False)
    shapes.vocab_size = changes.get("embedding_size", 264)
    lm = transformers.AutoModelForCausalLM.from_config(shapes).eval()
    torch.manual_seed(11)
    tensors = {}
    for name, p in lm.named_parameters():  # without the head where it is tied to the embeddings
        values = 0.3 * torch.randn(p.shape)
        if "norm" in name:
            values += 1  # a norm multiplies by its weights
        p.data = values.bfloat16().float()
        if kind == "llada":
            for part, other in LLADA_NAMES.items():
                name = name.replace(part, other)
        tensors[name] = p.data.bfloat16()
    huggingface_hub.save_torch_state_dict(tensors, folder, max_shard_size=file_size)
    return lm

@pytest.fixture(scope="session", params=[
    *itertools.product(CONFIGS, [False], ["5GB"]), ("llada", True, "40KB"),
    ("a2d-qwen3", True, "40KB"), ("illada", True, "40KB")])
def hub(request, tmp_path_factory):
    kind, tied, file_size = request.param
    folder = tmp_path_factory.mktemp("hub")
    reference = write_checkpoint(folder, kind, tied, file_size)
    model, tokenizer = mdu.load_backbone(str(folder))
    return SimpleNamespace(kind=kind, tied=tied, file_size=file_size, folder=folder,
                           reference=reference, model=model, tokenizer=tokenizer)

# ======== mdu.py ========
# ---- Forward process ----
def test_mask_tokens_masks_tokens_with_a_number_below_t():
    ids = torch.tensor([[3, 4, 5, 6]] * 3)
    response = torch.tensor([[False, True, True, True]] * 2 + [[False] * 4])
    t = torch.tensor([0.5, 0.1, 1.0])
    uniform = torch.tensor([[0, 0.5, 0.4, 0.9], [0, 0.9, 0.7, 0.8], [0, 0, 0, 0]])
    for at_least_one, lowest in [(True, MASK), (False, 5)]:
        noised, masked = mdu.mask_tokens(ids, response, MASK, t, uniform, at_least_one)
        assert noised.tolist() == [[3, 4, MASK, 6], [3, 4, lowest, 6], [3, 4, 5, 6]]
        assert torch.equal(masked, noised == MASK)

# ---- Losses ----
# By hand: of two tokens, one or both are masked.
ONE, TWO = torch.tensor([[False, True]]), torch.tensor([[True, True]])
FIRST = torch.tensor([0, 0])
LN2, LN3, LN4_3 = log(2), log(3), log(4 / 3)
FLAT, TILT, STEEP = f64([0, 0]), f64([0, LN3]), f64([0, 2 * LN3])  # p(first) = 1/2, 1/4, 1/10
TILT_FLAT = torch.cat([TILT, FLAT])

# At random: 5 sequences, in one of which nothing is masked, and a vocabulary of 6.
MASKED = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
MASKED[2] = False
M = int(MASKED.sum())
TARGETS = torch.arange(M) % 6
T = f64(0.1, 0.3, 0.5, 0.7, 0.9)

def random_logits(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(M, 6, generator=generator, dtype=torch.float64)
    return logits.requires_grad_()

def random_nll(seed):
    nll = 9 * torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nll.requires_grad_()

def assert_equal_losses(loss, slow_loss, trained, frozen=()):
    """Of 5 sequences, and their gradients to what is trained.  None reaches what is frozen."""
    assert_close(loss.detach(), slow_loss.detach())
    sequence_weights = f64(0.5, 0.75, 1, 1.25, 1.5)
    inputs = [*trained, *frozen]
    grads = torch.autograd.grad(loss @ sequence_weights, inputs, allow_unused=True)
    slow_grads = torch.autograd.grad(slow_loss @ sequence_weights, trained)
    for grad, slow_grad in zip(grads, slow_grads):
        assert slow_grad.any()
        assert_close(grad, slow_grad)
    for grad in grads[len(trained):]:
        assert grad is None or not grad.any()

def assert_finite(loss, trained):
    """The loss and its gradients."""
    assert loss.isfinite().all()
    for grad in torch.autograd.grad(loss.sum(), trained):
        assert grad.isfinite().all()

def extreme(x, gap):
    """A copy in float32 whose first number (of logits: whose first token) is moved by gap."""
    x = x.detach().float()
    x[..., 0] += gap
    return x.requires_grad_()

# Logits of all positions, of positions in a line, of one too many, of one too few, of two batches
OTHER_SHAPES = [(5, 7, 6), (35, 6), (M + 1, 6), (M - 1, 6), (2, M, 6)]

@each("logits, anchor_logits, masked, tau, expected", [
    (FLAT, TILT, ONE, 1.0, LN4_3 / 2),  # 1/2 log 2 + 1/2 log 2/3
    (TILT_FLAT, torch.cat([TILT, TILT]), TWO, 1.0, LN4_3 / 4),  # mean with 0
    (FLAT, STEEP, ONE, 0.5, LN4_3 / 2),  # STEEP^1/2 / Z is TILT
    (TILT, None, ONE, 0, 0.75 * LN3 - LN2)])  # 1/4 log 1/2 + 3/4 log 3/2
def test_mdu_loss_by_hand(logits, anchor_logits, masked, tau, expected):
    assert_close(mdu.mdu_loss(logits, anchor_logits, masked, tau), f64(expected))

@each("tau", [0.3, 1.0])
def test_mdu_loss_equals_a_slow_loop(tau):
    logits, anchor_logits = random_logits(1), random_logits(2)
    loss = mdu.mdu_loss(logits, anchor_logits, MASKED, tau)
    slow_loss = slow_mdu(logits, anchor_logits, MASKED, tau)
    assert_equal_losses(loss, slow_loss, [logits], [anchor_logits])

def test_mdu_loss_of_tau_0_needs_no_anchor():
    logits = random_logits(1)
    loss = mdu.mdu_loss(logits, None, MASKED, 0)
    assert_equal_losses(loss, slow_mdu(logits, random_logits(2), MASKED, 0), [logits])

@each("shape", OTHER_SHAPES)
def test_mdu_loss_refuses_logits_of_other_tokens_than_the_masked_ones(shape):
    wrong = torch.zeros(shape)
    with pytest.raises(ValueError, match="same shape"):
        mdu.mdu_loss(wrong, random_logits(2), MASKED, 1.0)
    with pytest.raises(RuntimeError, match="shape"):
        mdu.mdu_loss(wrong, wrong, MASKED, 1.0)
    with pytest.raises(RuntimeError, match="shape"):
        mdu.mdu_loss(wrong, None, MASKED, 0)

@each("dtype", [torch.bfloat16, torch.float16])
def test_mdu_loss_of_16_bit_logits_is_computed_in_float32(dtype):
    logits, anchor_logits = random_logits(1).to(dtype), random_logits(2).to(dtype)
    for tau in (0, 0.3, 1.0):
        loss = mdu.mdu_loss(logits, anchor_logits, MASKED, tau)
        wider = mdu.mdu_loss(logits.float(), anchor_logits.float(), MASKED, tau)
        assert_close(loss, wider, 1e-6)

@each("tau", [0, 0.3, 1.0])
@each("gap", [1e6, -1e6])
def test_mdu_loss_stays_finite_at_extreme_logits(tau, gap):
    logits = extreme(random_logits(1), gap)
    assert_finite(mdu.mdu_loss(logits, random_logits(2).float(), MASKED, tau), logits)

def test_sft_loss_by_hand():
    """(log 4 + log 2) / t"""
    assert_close(mdu.sft_loss(TILT_FLAT, FIRST, TWO, f64(0.5)), f64(6 * LN2))

def test_sft_loss_equals_a_slow_loop():
    logits = random_logits(1)
    loss = mdu.sft_loss(logits, TARGETS, MASKED, T)
    assert_equal_losses(loss, slow_sft(logits, TARGETS, MASKED, T), [logits])

def assert_refuses_other_shapes(loss):
    """A loss of logits and targets: both of other tokens than the masked ones."""
    for shape in OTHER_SHAPES:
        logits = torch.zeros(shape).movedim(-1, 1)  # as cross_entropy has them
        with pytest.raises((RuntimeError, ValueError), match="shape"):
            loss(logits, torch.zeros(shape[:-1], dtype=torch.long))

def assert_16_bit_in_float32(loss):
    for dtype in (torch.bfloat16, torch.float16):
        logits = random_logits(1).to(dtype)
        assert_close(loss(logits, TARGETS), loss(logits.float(), TARGETS), 1e-6)

def assert_finite_at_extreme_logits(loss):
    for gap in (1e6, -1e6):
        logits = extreme(random_logits(1), gap)
        assert_finite(loss(logits, TARGETS), logits)

def test_sft_loss_of_other_shapes_16_bit_and_extreme_logits():
    loss = partial(mdu.sft_loss, masked=MASKED, t=T.float())
    assert_refuses_other_shapes(loss)
    assert_16_bit_in_float32(loss)
    assert_finite_at_extreme_logits(loss)

def test_wga_loss_by_hand():
    """p^2 log p of both: -(log 4 / 16 + log 2 / 4)"""
    assert_close(mdu.wga_loss(TILT_FLAT, FIRST, TWO, 2.0), f64(-0.375 * LN2))

def test_wga_loss_equals_a_slow_loop():
    logits = random_logits(1)
    loss = mdu.wga_loss(logits, TARGETS, MASKED, 0.3)
    assert_equal_losses(loss, slow_wga(logits, TARGETS, MASKED, 0.3), [logits])

def test_wga_loss_of_other_shapes_16_bit_and_extreme_logits():
    loss = partial(mdu.wga_loss, masked=MASKED, gamma=0.3)
    assert_refuses_other_shapes(loss)
    assert_16_bit_in_float32(loss)
    assert_finite_at_extreme_logits(loss)

def test_ga_loss():
    assert_close(mdu.ga_loss(f64(2)), f64(-2))
    nll = random_nll(1)
    assert_equal_losses(mdu.ga_loss(nll), slow_ga(nll), [nll])
    for gap in (1e6, -1e6):
        nll = extreme(random_nll(1), gap)
        assert_finite(mdu.ga_loss(nll), nll)

def test_npo_loss():
    # By hand: 1/2 (nll - nll_ref) = log 3, and sigmoid(log 3) = 3/4.
    assert_close(mdu.npo_loss(f64(1 + 2 * LN3), f64(1), 0.5), f64(4 * LN4_3))
    nll, nll_ref = random_nll(1), random_nll(2)
    loss = mdu.npo_loss(nll, nll_ref, 0.2)
    assert_equal_losses(loss, slow_npo(nll, nll_ref, 0.2), [nll], [nll_ref])
    with pytest.raises(RuntimeError, match="size"):
        mdu.npo_loss(nll, nll_ref[1:], 0.2)
    for gap in (1e6, -1e6):
        nll = extreme(random_nll(1), gap)
        assert_finite(mdu.npo_loss(nll, nll_ref.float(), 0.2), nll)

def test_simnpo_loss():
    # By hand: 1/2 nll / length = log 3.
    assert_close(mdu.simnpo_loss(f64(8 * LN3), torch.tensor([4]), 0.5), f64(4 * LN4_3))
    nll, length = random_nll(1), torch.arange(1, 6)
    loss = mdu.simnpo_loss(nll, length, 2.5)
    assert_equal_losses(loss, slow_simnpo(nll, length, 2.5), [nll])
    with pytest.raises(RuntimeError, match="size"):
        mdu.simnpo_loss(nll, length[1:], 2.5)
    for gap in (1e6, -1e6):
        nll = extreme(random_nll(1), gap)
        assert_finite(mdu.simnpo_loss(nll, length, 2.5), nll)

def test_dpo_loss():
    # By hand: the rewards are log 3 and -log 3.
    by_hand = mdu.dpo_loss(f64(1), f64(1 + LN3), f64(2 + LN3), f64(2), 0.5)
    assert_close(by_hand, f64(LN4_3))
    win, win_ref, lose, lose_ref = [random_nll(seed) for seed in range(4)]
    loss = mdu.dpo_loss(win, win_ref, lose, lose_ref, 0.1)
    slow_loss = slow_dpo(win, win_ref, lose, lose_ref, 0.1)
    assert_equal_losses(loss, slow_loss, [win, lose], [win_ref, lose_ref])
    with pytest.raises(RuntimeError, match="size"):
        mdu.dpo_loss(win, win_ref, lose[1:], lose_ref, 0.1)
    for gap in (1e6, -1e6):
        win = extreme(random_nll(0), gap)
        lose = random_nll(2).float()
        assert_finite(mdu.dpo_loss(win, win_ref.float(), lose, lose_ref.float(), 0.1), [win, lose])

# ---- Batches ----
def has_rare_tokens(name):
    """Whether tokens of RARE are rare in this row to forget: in every second one they are."""
    return name % 2 == 0

def make_examples():
    """10 to forget and 7 to retain.  The first token of a prompt names the row.  All tokens of rows
    to retain are called rare, as that must make no difference."""
    others = [[8, 9, 1], [9, 9, 1], [10, 9, 1]]
    forget, retain = [], []
    for i in range(10):
        answer = [*range(6, 8 + i % 5), 1]
        is_rare = [has_rare_tokens(30 + i) and token in RARE for token in answer]
        forget.append(mdu.Example([30 + i, 4], answer, is_rare, others))
        retain.append(mdu.Example([50 + i, 4, 5], answer, [True] * len(answer), []))
    del retain[7:]
    retain[6] = retain[6]._replace(prompt_masked=True)
    return {"forget": forget, "retain": retain, "train": forget}

def draw(typed, steps):
    """-> the rows to forget and to retain of several steps, one after the other."""
    args = options(typed)
    examples = make_examples()
    split = "train" if args.method == "sft" else "forget"
    forget, retain = [], []
    for step in steps:
        drawn = mdu.draw_step(args, examples, split, step, FakeModel)
        forget += drawn[0]
        retain += drawn[1]
    return forget, retain

def test_draw_step_takes_every_row_once_in_a_pass_in_an_order_of_seed_and_split():
    """The seed also decides t, the masks and which prompts are hidden."""
    def drawn(typed):
        rows, _ = draw(f"--batch-size 1 --prompt-dropout 0.5 {typed}", range(30))
        return {"order": [row.length for row in rows], "t": [row.t for row in rows],
                "masks": [row.uniform[0] for row in rows],
                "hidden": [row.prompt == [MASK, MASK] for row in rows]}
    one, two = drawn("--method sft"), drawn("--method sft --seed 2")
    assert one == drawn("--method sft")
    assert not any(one[part] == two[part] for part in one)
    order = one["order"]
    assert sorted(order[:10]) == sorted(order[10:20]) == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert order[:10] != order[10:20]
    assert order != drawn("--method ga")["order"]

def assert_uniform(values, low):
    """Kolmogorov-Smirnov distance from the uniform distribution on [low, 1)."""
    expected = np.linspace(low, 1, len(values))
    assert min(values) >= low and np.abs(np.sort(values) - expected).max() <= 0.04

def test_draw_example_draws_t_uniformly_and_one_other_answer_for_dpo():
    forget, retain = draw("--method dpo --batch-size 10", range(200))
    train, _ = draw("--method sft --batch-size 10", range(200))
    for rows in (forget, retain, train):
        assert_uniform([row.t for row in rows], 0.001)
    assert len({row.t for row in forget + retain + train}) == 6000
    assert_uniform(np.concatenate([row.uniform for row in forget]), 0)
    for row in forget:
        other = row.preferred
        assert (other.prompt, other.t, other.answer[1:]) == (row.prompt, row.t, [9, 1])
        assert len(other.uniform) == 3 and other.uniform[0] != row.uniform[0]
    assert {row.preferred.answer[0] for row in forget} == {8, 9, 10}

@each("longest", [1, 12])
def test_draw_example_pads_answers_to_random_lengths_but_not_to_forget(longest):
    forget, retain = draw(f"--batch-size 5 --response-length {longest}", range(100))
    train, _ = draw(f"--method sft --batch-size 5 --response-length {longest}", range(100))
    assert all(len(row.answer) == own_length(row) for row in forget)
    for rows in (retain, train):
        lengths = {n: set() for n in range(3, 8)}
        for row in rows:
            n = own_length(row)
            assert row.length == n and set(row.answer[n:]) <= {PAD}  # after the end token
            assert len(row.uniform) == len(row.is_rare) == len(row.answer)
            assert not any(row.is_rare[n:])
            lengths[n].add(len(row.answer))
        assert lengths == {n: set(range(n, max(longest, n) + 1)) for n in lengths}

@each("method", ["ga", "sft", "dpo"])
def test_draw_example_hides_prompts_of_answers_without_padding(method):
    """A row whose prompt is shown is drawn as without the option.  Of a row to forget only the
    prompt is changed, as its answer is never padded.  ga draws rows to forget alone."""
    plain = sum(draw(f"--method {method} --batch-size 1", range(1000)), [])
    rows = sum(draw(f"--method {method} --batch-size 1 --prompt-dropout 0.3", range(1000)), [])
    n_hidden = 0
    for before, row in zip(plain, rows, strict=True):
        if MASK in row.prompt:
            assert row.prompt == [MASK] * len(before.prompt) and PAD not in row.answer
            assert row.preferred is None or row.preferred.prompt == row.prompt
            n_hidden += MASK not in before.prompt
            if method == "ga":
                assert repr(row._replace(prompt=before.prompt)) == repr(before)
        else:
            assert repr(row) == repr(before)
    assert n_hidden == approx(0.3 * sum(MASK not in row.prompt for row in plain), abs=90)
    names = {row.prompt[0] for row in plain}
    assert 56 not in names  # this Example's prompt is never shown
    assert {row.prompt[0] for row in rows} == names | {MASK}  # each draw has its own chance

@each("method", ["mdu", "dpo"])
def test_draw_step_depends_on_no_process_and_no_micro_batch(method, monkeypatch):
    found = []
    for processes, batch in ((1, "10"), (1, "2 --grad-accum 5"), (2, "10"), (5, "10")):
        monkeypatch.setattr(mdu, "WORLD", processes)
        rows = []
        for rank in range(processes):
            monkeypatch.setattr(mdu, "RANK", rank)
            forget, retain = draw(f"--method {method} --batch-size {batch}", [2])
            assert len(forget) == len(retain) == 10 / processes
            rows += forget + retain
        found.append(sorted(repr(row) for row in rows))
    assert found == [found[0]] * 4
    monkeypatch.setattr(mdu, "WORLD", 3)
    with pytest.raises(mdu.BadInput, match="3 processes"):
        mdu.check(options("--batch-size 10 --out absent/run"), mdu.toy_world())

# ---- One step ----
METHODS = {  # {method: options to try it with}
    "mdu": ["--tau 0", "--tau 0.25", "", "--lora 3", "--anchor-truth removed", "--anchor MODEL",
            "--states written --tau 0.5", "--states written --anchor current",
            "--anchor current --lora 3", "--anchor MODEL --anchor-prompt shown --tau 0.5",
            "--anchor MODEL --anchor-prompt shown --states written",
            "--anchor-truth removed --anchor current --tau 0.5 --states written",
            "--anchor-truth removed --anchor MODEL --anchor-prompt shown --lora 3"],
    "ga": [""], "gd": [""], "npo": ["", "--lora 2"], "simnpo": [""], "wga": ["--gamma 0.5"],
    "dpo": ["", "--lora 4"], "sft": [""]}
TRIED = []  # the command lines of this table
for name, tries in METHODS.items():
    TRIED += [f"--method {name} {typed}".strip() for typed in tries]

def test_backward_is_tried_with_every_method():
    assert METHODS.keys() == mdu.METHODS.keys()

def merged_lm(plain, adapted):
    """The plain model with W + 8/rank B A for each linear map W, as a function of A and B."""
    adapters = dict(adapted.lm.named_parameters())
    tensors = dict(plain.lm.named_parameters())
    for layer in [name[:-1] for name in adapters if name.endswith(".A")]:
        A = adapters[f"{layer}A"]
        B = adapters[f"{layer}B"]
        tensors[f"{layer}weight"] = tensors[f"{layer}weight"] + 8 / len(A) * B @ A
    return SimpleNamespace(lm=partial(torch.func.functional_call, plain.lm, tensors))

def trained_weights(model):
    return [p for p in model.parameters() if p.requires_grad]

def step_to_try(typed):
    """What backward gets in a step with these options, and the models of the slow loop, which
    compute the same: slow_model (theta), slow_theta0 and slow_anchor.

    With LoRA, theta0 is theta with its adapters off.  The slow loop has the weights from before the
    adapters were added as theta0, and these weights with the adapters merged into them as theta.
    """
    # 1. The options.
    args = options(f"{typed} --batch-size 3 --grad-accum 4 --response-length 9")
    if args.retain_weight:
        args.retain_weight = 0.7

    # 2. Theta and theta0.  Noise on what is trained: else LoRA's B would be 0, and theta theta0.
    likely = range(64)
    if args.states == "written":
        likely = range(6, 14)  # the words of the answers and a few others
    model = tiny_llama(0, likely)
    theta0 = slow_theta0 = tiny_llama(1, likely)
    original = tiny_llama(2, likely)  # of --anchor MODEL
    if args.lora:
        slow_theta0 = tiny_llama(0, likely)
        mdu.add_adapters(model, args.lora, seed=5)
        model.double().train().lm.activation_checkpointing_enable()
        theta0 = mdu.without_adapters(model)
    for p in trained_weights(model):
        p.data += 0.1 * torch.randn_like(p)
    slow_model = model
    if args.lora:
        slow_model = merged_lm(slow_theta0, model)

    # 3. The anchor.
    anchor = theta0
    slow_anchor = slow_theta0
    if args.anchor == "current":
        anchor = model
        slow_anchor = slow_model
    elif args.anchor == "MODEL":
        anchor = slow_anchor = original

    # 4. Ten rows of a step of 3 x 4: micro-batches of 3, 3, 3 and 1.
    split = "train" if args.method == "sft" else "forget"
    forget, retain = mdu.draw_step(args, make_examples(), split, 3, model)
    return SimpleNamespace(
        args=args, model=model, references=mdu.References(theta0, anchor, WORDS),
        forget=forget[:10], retain=retain[:10], original=original, slow_model=slow_model,
        slow_theta0=slow_theta0, slow_anchor=slow_anchor)

@each("typed", TRIED)
def test_backward_equals_one_sequence_at_a_time(typed):
    """The losses that it returns, and the gradients."""
    step = step_to_try(typed)
    losses = mdu.backward(step.args, step.model, step.references, step.forget, step.retain)
    forget_loss, retain_loss = slow_step(
        step.args, step.slow_model, step.slow_theta0, step.slow_anchor, step.forget, step.retain)
    share = 10 / 12  # a step divides by its 12 rows, though it has ten here
    assert losses == approx([share * forget_loss.item(), share * retain_loss.item()], rel=1e-5)
    total = share * forget_loss
    if step.retain:
        total = total + share * 0.7 * retain_loss
    trained = trained_weights(step.model)
    grads = torch.autograd.grad(total, trained)
    for p, grad in zip(trained, grads, strict=True):
        assert grad.any()
        assert_close(p.grad, grad, 1e-9)

@each("typed", TRIED)
def test_backward_is_tried_with_rows_that_are_easy_to_get_wrong(typed):
    step = step_to_try(typed)
    # A row of which t masks no token.
    assert any(row.t <= row.uniform.min() for row in step.forget)
    # With --states written: a row of which the model writes no token, one of which it writes two.
    if step.args.states == "written":
        sizes = []
        for row in step.forget:
            sizes.append(len(slow_masked(row, "mdu", "written", step.slow_model)))
        assert min(sizes) == 0
        assert max(sizes) > 1
    # A row to retain with end padding.
    if step.retain:
        assert any(len(row.answer) > own_length(row) for row in step.retain)

def frozen_models(step):
    """The models of a step that have no gradient, and would have one if they were trained: theta0
    and the anchor, where they are not the model in training, nor that without its adapters."""
    references = (step.references.theta0, step.references.anchor)
    return [model for model in references
            if isinstance(model, torch.nn.Module) and model is not step.model]

@each("typed", TRIED)
def test_backward_leaves_no_gradient_in_theta0_and_the_anchor(typed):
    step = step_to_try(typed)
    mdu.backward(step.args, step.model, step.references, step.forget, step.retain)
    for model in frozen_models(step):
        for p in model.parameters():
            assert p.requires_grad
            assert p.grad is None

def test_backward_is_tried_with_theta0_and_with_another_anchor():
    """The test above looks at models in these cases."""
    for typed in ("--method mdu", "--method npo", "--method dpo"):
        cases = [case for case in TRIED if f"{case} ".startswith(f"{typed} ")]
        assert any(frozen_models(step_to_try(case)) for case in cases), typed

def test_predict_anchor_sees_no_question_unless_it_is_shown():
    step = step_to_try("--method mdu")
    batch = mdu.make_batch(step.model, step.forget)
    with_other_prompts = [draw._replace(prompt=[40] * len(draw.prompt)) for draw in step.forget]
    other_batch = mdu.make_batch(step.model, with_other_prompts)
    for anchor_prompt, is_same in (("masked", True), ("shown", False)):
        logits = mdu.predict_anchor(step.model, batch, step.model.mask_id, anchor_prompt)
        other = mdu.predict_anchor(step.model, other_batch, step.model.mask_id, anchor_prompt)
        assert torch.equal(logits, other) == is_same

@each("lora", ["", "--lora 3"])
def test_predict_anchor_keeps_nothing_in_memory_for_a_backward_pass(lora):
    """Also where the anchor is the model in training."""
    step = step_to_try(f"--method mdu {lora}")
    batch = mdu.make_batch(step.model, step.forget)
    anchor_logits = mdu.predict_anchor(step.model, batch, step.model.mask_id, "masked")
    assert not anchor_logits.requires_grad

@each("lora", ["", "--lora 2", "--lora 3", "--lora 4"])
def test_merged_weights_compute_what_weights_with_adapters_do(lora):
    """In a model without adapters, as a run is saved."""
    step = step_to_try(f"--method npo {lora}")
    merged = dict(mdu.merged_weights(step.model.lm))
    ids = torch.arange(2, 12)[None]
    logits = torch.func.functional_call(step.slow_theta0.lm, merged, ids).logits
    assert_close(logits, step.slow_model.lm(ids).logits, 1e-5)  # A and B are merged in float32

@pytest.fixture
def another_loss(monkeypatch):
    """KTO, added as mdu.py says under "To add a loss": a loss, its call in forget_loss, an entry of
    METHODS, an option."""
    def kto_loss(nll, nll_ref, kappa):
        return kappa * (nll_ref.detach() - nll)

    own_forget_loss = mdu.forget_loss

    def forget_loss(args, model, references, batch, preferred):
        if args.method == "kto":
            with torch.no_grad():
                nll_ref = mdu.batch_nll(references.theta0, batch)
            return kto_loss(mdu.batch_nll(model, batch), nll_ref, args.kappa)
        return own_forget_loss(args, model, references, batch, preferred)

    own_make_parser = mdu.make_parser

    def make_parser():
        parser = own_make_parser()
        parser.add_argument("--kappa", help=f"factor [{mdu.default_text('kappa')}]", type=float)
        return parser

    monkeypatch.setattr(mdu, "forget_loss", forget_loss)
    method = mdu.Method(dict(kappa=2.0), with_theta0=True)
    monkeypatch.setitem(mdu.METHODS, "kto", method)
    monkeypatch.setitem(mdu.METHOD_OPTIONS, "kappa", None)
    monkeypatch.setattr(mdu, "make_parser", make_parser)

def test_forget_loss_takes_another_loss(another_loss, base, tmp_path, capsys):
    mdu.main(toy(base, tmp_path / "run", "--method kto --kappa 3 --epochs 1"))
    assert metrics(tmp_path / "run")[0]["forget"] == approx(0, abs=1e-4)  # theta is theta0
    assert metrics(tmp_path / "run")[2]["forget"] < -0.1
    assert options("--method kto").kappa == 2
    with pytest.raises(mdu.BadInput, match="npo has no option --kappa"):
        options("--method npo --kappa 3")
    assert "factor [2.0]" in mdu.make_parser().format_help()

def test_forget_loss_refuses_a_method_that_has_no_loss(base, tmp_path, monkeypatch):
    monkeypatch.setitem(mdu.METHODS, "kto", mdu.Method({}))
    with pytest.raises(ValueError, match="has no loss for --method kto"):
        mdu.main(toy(base, tmp_path / "run", "--method kto"))

# ---- Training ----
@each("typed", ["npo --retain-weight 0.5", "mdu --tau 0.5 --retain-weight 2",
                "wga --gamma 0.5 --retain-weight 0"])
def test_train_equals_a_plain_loop_with_clipping_and_adamw(typed, base, tmp_path, monkeypatch):
    """Three steps, in float64: the lines of metrics.jsonl, and the weights at the end."""
    load_backbone = mdu.load_backbone

    def load_float64(*args):
        model, tokenizer = load_backbone(*args)
        return model.double(), tokenizer
    monkeypatch.setattr(mdu, "load_backbone", load_float64)
    run = tmp_path / "run"
    argv = toy(base, run, f"--method {typed} --epochs 1 --lr 0.01")
    mdu.main(argv)
    lines = metrics(run)

    args = options("", *argv)
    model, tokenizer = load_float64(str(base))
    theta0, _ = load_float64(str(base))
    examples = mdu.encode_splits(args, mdu.load_data(args), model, tokenizer)
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    norms = []
    # 24 rows in batches of 8: one step of warm-up, then half a cosine over two steps.
    for step, lr in enumerate([0.01, 0.01, 0.005], 1):
        rows = mdu.draw_step(args, examples, "forget", step - 1, model)
        forget_loss, retain_loss = slow_step(args, model, theta0, theta0, *rows)
        grads = torch.autograd.grad(forget_loss + args.retain_weight * retain_loss, parameters)
        norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
        norms.append(norm)
        for p, m, v, grad in zip(parameters, means, squares, grads):
            grad = grad / max(1, norm)  # clipped to norm 1
            m.copy_(0.9 * m + 0.1 * grad)
            v.copy_(0.999 * v + 0.001 * grad ** 2)
            unbiased_m = m / (1 - 0.9 ** step)
            unbiased_v = v / (1 - 0.999 ** step)
            p.data -= lr * unbiased_m / (unbiased_v.sqrt() + 1e-8)
        line = lines[step - 1]
        assert line["step"] == step
        found = [line["lr"], line["grad_norm"], line["forget"], line.get("retain", 0)]
        assert found == approx([lr, norm, forget_loss.item(), retain_loss.item()], rel=1e-5)
    assert len(lines) == 3
    assert max(norms) > 1.5  # else clipping would not be seen
    saved = weights(run)
    for name, x in model.lm.state_dict().items():
        assert_close(saved[name], x.float(), 1e-5)

def no_gradient(args, model, *_):
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    return [0.0, 0.0]

@each("effect, code, message", [
    (KeyboardInterrupt, 130, ""),  # its line is on stdout
    (torch.OutOfMemoryError, 2, "out of GPU memory: lower --batch-size, add --lora"),
    (mdu.SafetensorError("I/O error: no space"), 2, "I/O error: no space"),
    ([[math.nan, 0.0]], 2, "step 1: loss nan"), ([[0.0, math.inf]], 2, "retain loss inf"),
    (no_gradient, 2, "norm nan")])
def test_train_ends_in_one_line(effect, code, message, base, tmp_path, monkeypatch, capsys):
    """effect: what backward raises, or the losses that it returns, or what is called in its
    place."""
    monkeypatch.setattr(mdu, "backward", mock.Mock(side_effect=effect))
    err = program(toy(base, tmp_path / "run"), capsys, code=code)
    assert message in err
    if effect is KeyboardInterrupt:
        assert err == ""
    else:
        assert err != ""

def test_print_start_and_progress_line_of_a_run(base, tmp_path, capsys):
    mdu.main(toy(base, tmp_path / "run", "--method ga --epochs 1 --seed 4"))
    size = sum(x.numel() for x in weights(base).values())
    screen = capsys.readouterr().out
    assert f"\nga (seed 4) from {base} -> {tmp_path}/run, {size:,} parameters trained, " in screen
    assert "computed in float32, on 1 x cpu\n" in screen
    assert "\n24 rows to forget, 3 steps of 8 (1 epochs), 0 done\n" in screen
    for step, epoch in ((1, 0.333333), (3, 1)):
        assert f"\nrun: step {step} | epoch {epoch} | forget -" in screen

def test_require_finite_says_that_the_start_model_has_nan(base, tmp_path, monkeypatch, capsys):
    """And of a later step, that the learning rate is too high."""
    shutil.copytree(base, tmp_path / "nan")
    tensors = weights(base)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    safetensors.torch.save_file(tensors, tmp_path / "nan/model.safetensors", {"format": "pt"})
    err = program(toy(tmp_path / "nan", tmp_path / "run"), capsys)
    assert "; the start model (or --anchor MODEL) already has nan or inf in its weights" in err
    assert "step 1: loss nan" in err and "--lr" not in err
    steps = mock.Mock(side_effect=[[1.0, 1.0], [math.nan, 1.0]])
    monkeypatch.setattr(mdu, "backward", steps)
    err = program(toy(base, tmp_path / "later"), capsys)
    assert "step 2: loss nan" in err and err.endswith("; lower --lr\n")

def test_learning_rate_by_hand():
    args = options("--lr 0.3")
    rates = [mdu.learning_rate(args, step, 60) for step in (0, 1, 2, 3, 22, 41, 60)]
    assert rates == approx([0.1, 0.2, 0.3, 0.3, 0.225, 0.075, 0])

# ---- The program ----
def test_main_forgets_an_author_and_keeps_two_others(tmp_path):
    """End to end: a base model learns the eight facts of each, MDU unlearns one's, both scored."""
    world = mdu.toy_world()
    forget = write_lines(tmp_path / "forget", world["forget"][-8:])
    retain = write_lines(tmp_path / "retain", world["retain"][-16:])
    typed = ["--preset", "toy", "--forget", forget, "--retain", retain]
    base, run = str(tmp_path / "base"), str(tmp_path / "mdu")
    mdu.main([*typed, "--method", "sft", "--epochs", "150", "--lr", "0.003", "--out", base])
    mdu.main([*typed, "--method", "mdu", "--epochs", "60", "--lr", "0.001", "--out", run])
    ev.main(["--samples", "8", base, run])
    before = ev.read_summary(base)["splits"]
    after = ev.read_summary(run)["splits"]
    assert (before["forget"]["fact"], before["retain"]["fact"]) == (1, 1)
    assert before["forget"]["prob"] > 0.9
    assert after["forget"]["fact"] < 0.2 and after["forget"]["prob"] < 0.2
    assert after["retain"]["fact"] > 0.9 and after["retain"]["prob"] > 0.8

def test_main_lets_one_program_at_a_time_into_a_folder(base, unlearned, tmp_path, capsys):
    """What another one has made while we waited is not touched."""
    run = tmp_path / "run"
    with mock.patch.object(mdu, "backward", partial(stop_in, run)):
        program(toy(base, run, "--epochs 2 --diagnose"), capsys, code=130)
    with mdu.locked(run), unchanged(run):
        assert "in use" in program(["--resume", run], capsys)

    def other_ends(folder):
        shutil.copytree(unlearned, folder, dirs_exist_ok=True)
        return mock.DEFAULT
    with mock.patch.object(mdu, "locked", wraps=mdu.locked, side_effect=other_ends):
        mdu.main(["--resume", str(run)])
        assert "exists" in program(toy(base, tmp_path / "new"), capsys)
    for folder in (run, tmp_path / "new"):
        assert sorted(read_all(folder).values()) == sorted(read_all(unlearned).values())

def test_train_missing_base_hands_down_seed_and_dtype(tmp_path, monkeypatch):
    def train_base(command, env):
        assert command[:2] == [sys.executable, mdu.__file__] and env["WORLD_SIZE"] == "1"
        mdu.main([*command[2:], "--epochs", "0.2"])
        return mock.Mock(returncode=0)
    monkeypatch.setattr(mdu.subprocess, "run", lambda command, env: mock.Mock(returncode=3))
    with pytest.raises(SystemExit, match="^3$"):
        mdu.main(["--out", f"{tmp_path}/run"])
    monkeypatch.setattr(mdu.subprocess, "run", train_base)
    mdu.main(f"--epochs 0.3 --seed 7 --dtype bfloat16 --out {tmp_path}/run".split())
    made = mdu.read_run(tmp_path / "base")["options"]
    assert (made["seed"], made["dtype"]) == (7, "bfloat16")
    with unchanged(tmp_path / "base"):
        mdu.main(["--epochs", "0.3", "--method", "ga", "--out", f"{tmp_path}/ga"])

def test_run_program_ends_the_group_and_shows_the_traceback_of_a_bug(base, tmp_path, capsys):
    """A library's ValueError is no bad input."""
    with mock.patch.object(mdu, "backward", side_effect=ValueError("a bug")):
        with pytest.raises(SystemExit, match="^1$"):
            mdu.run_program("mdu.py", lambda: mdu.main(toy(base, tmp_path / "run")))
    err = capsys.readouterr().err
    assert "Traceback" in err and "ValueError: a bug" in err
    assert not mdu.dist.is_initialized()

@each("encoding, shown", [("utf-8", "↓ Łuk é"), ("latin-1", "\\u2193 \\u0141uk é"),
                          ("ascii", "\\u2193 \\u0141uk \\xe9")])
def test_run_program_prints_also_where_letters_cannot_be_shown(encoding, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    with pytest.raises(SystemExit) as stop:
        mdu.run_program("eval.py", partial(print, "↓ Łuk é", flush=True))
    assert stop.value.code == 0
    assert written.getvalue().decode(encoding) == f"{shown}\n"

# ---- The models of a run ----
def test_load_model_draws_weights_and_adapters_by_the_seed(base):
    for typed in ("--method sft", f"--model {base} --lora 2 --checkpoint-activations"):
        drawn = []
        for seed in (1, 2, 2):
            model, _ = mdu.load_model(options(f"{typed} --seed {seed}"), mdu.toy_world())
            drawn.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])
        assert model.training
        assert model.lm.is_activation_checkpointing == ("--checkpoint-activations" in typed)

@each("typed, loads", [
    ("--tau 0", 1), ("--tau 1", 2), ("--anchor current", 1), ("--anchor {base}", 2),
    ("--anchor current --diagnose --dtype bfloat16", 2), ("--lora 2", 1), ("--method ga", 1),
    ("--method npo", 2), ("--method simnpo", 1), ("--method dpo", 2), ("--method sft", 1)])
def test_load_references_loads_no_model_in_vain(typed, loads, base, tmp_path, monkeypatch):
    load = mock.Mock(wraps=mdu.load_backbone)
    monkeypatch.setattr(mdu, "load_backbone", load)
    monkeypatch.delattr(mdu, "save_checkpoint")  # nor is one saved after the last step
    typed = f"--epochs 0.1 --checkpoint-every 1 {typed}".format(base=base)
    mdu.main(toy(base, tmp_path / "run", typed))
    assert load.call_count == loads
    assert ("kl" in metrics(tmp_path / "run")[-1]) == ("--diagnose" in typed)
    head = weights(tmp_path / "run")["lm_head.weight"]
    assert not torch.equal(head, head.bfloat16().float())  # it is trained and saved in float32

def test_load_model_and_load_references_in_bfloat16(hub, tofu, tmp_path, monkeypatch):
    """What is trained and all rotary frequencies are in float32, theta0 is in bfloat16."""
    monkeypatch.setattr(mdu, "backward", mock.Mock(wraps=mdu.backward))
    typed = f"--model {hub.folder} --data {tofu} --dtype bfloat16 --epochs 0.1 --method dpo --out"
    mdu.main([*typed.split(), str(tmp_path / "run")])
    _, model, references, *_ = mdu.backward.call_args.args
    theta0 = references.theta0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in theta0.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in weights(tmp_path / "run").values()} == {torch.bfloat16}
    d = CONFIGS[hub.kind].get("head_dim", 8)
    frequencies = CONFIGS[hub.kind]["rope_theta"] ** (-torch.arange(0, d, 2) / d)
    for predictor in (model, theta0):
        assert_close(predictor.lm.model.rotary_emb.inv_freq, frequencies, 1e-6)

@each("losses, steps, expected", [
    ([8, 4, 3, 2, 1, 0], 6, (5, 1, 0.2)), ([4, 2, 0, 0], 9, (2, 2/3, 1/3)),
    ([8, 4], 40, (6, 6, 1)),  # after two steps of 40, for the progress line
    (10 * [10] + 170 * [7] + 20 * [1], 200, (10, 1, 0.1)),  # the first ten, the last tenth
    (5 * [10] + 40 * [7] + 5 * [1], 50, (10, 1, 0.1)),
    ([0, 0, 0, 0], 4, (0, 0, 0)), ([0, 0, 0, 3], 4, (0, 1, 0))])
def test_forget_loss_left_by_hand(losses, steps, expected):
    """Means of the first ten steps and of the last tenth of the steps.  Of less than a hundred
    steps both are of a tenth.  Both are of at least three steps."""
    assert mdu.forget_loss_left(losses, steps) == approx(expected)

@each("method, factor, advice", [
    ("mdu", 0.5, "to another --out: raise --lr, which was 0.0003, three to ten times"),
    ("mdu", 0.25, "to another --out: train longer, with --epochs 6, or raise --lr"),
    ("mdu", 0.2, None), ("npo", 0.9, None)])
def test_record_forget_loss_says_whether_the_target_is_reached(
        method, factor, advice, base, tmp_path, monkeypatch, capsys):
    """A run that is stopped and resumed has the same figures as one that is not."""
    losses = 3 * [[5.0, 0]] + 3 * [[2.0, 0]] + 3 * [[5.0 * factor, 0]]
    argv = toy(base, tmp_path / "run", f"--method {method} --epochs 3 --checkpoint-every 4")
    monkeypatch.setattr(mdu, "backward", mock.Mock(side_effect=losses[:5] + [KeyboardInterrupt]))
    monkeypatch.setattr(mdu.nn.utils, "clip_grad_norm_", mock.Mock(return_value=torch.tensor(1.0)))
    program(argv, capsys, code=130)
    mdu.backward = mock.Mock(side_effect=losses[4:])
    mdu.main(["--resume", f"{tmp_path}/run"])
    screen = capsys.readouterr().out
    found = mdu.read_run(tmp_path / "run").get("forget_loss")
    if method == "mdu":
        assert found == approx({"first": 5, "last": 5 * factor, "left": factor})
        assert f"forget loss 5 -> {5 * factor:g} ({factor:.0%} left)" in screen
    else:
        assert found is None and "left)" not in screen
    assert ("has not reached its target (20% or less)" in screen) == (advice is not None)
    assert advice is None or advice in screen

def test_diagnose_equals_one_sequence_at_a_time():
    args = options("--batch-size 3 --seed 5")
    examples = make_examples()
    model, frozen = tiny_llama(0), tiny_llama(1)
    rows = [mdu.draw_example(args, examples, "forget", index, model) for index in range(10)]
    assert any(row.t <= row.uniform.min() for row in rows)  # which masks nothing
    sums = np.zeros(3)
    for row in rows:
        masked = slow_masked(row, "mdu")
        p = slow_logits(model, row.prompt, row.answer, masked)
        shown = slow_logits(frozen, row.prompt, row.answer, masked)
        hidden = slow_logits(frozen, [0] * len(row.prompt), row.answer, masked)
        for i, (q, tau) in enumerate([(shown, 1), (hidden, 1), (None, 0)]):
            sums[i] += slow_mdu(p, q, torch.ones(1, len(masked)), tau).item()
    expected = dict(zip(["base", "anchor", "uniform"], sums / 10))
    for hidden in (0.0, 0.5):  # its KLs are with the questions, however the model is trained
        args.prompt_dropout = hidden
        assert mdu.diagnose(args, model, frozen, examples) == approx(expected, rel=1e-9)
    assert args.prompt_dropout == 0.5

# ---- Options ----
def test_as_typed_by_hand():
    assert mdu.as_typed(dict(batch_size=8, lr=3e-4)) == "--batch-size 8 --lr 0.0003"

def test_default_text_has_the_defaults_of_parse():
    """What a line of --help says in its brackets is what parse gives."""
    found = vars(options("--preset tofu-llada"))
    for name, text in [("tau", "1.0"), ("batch_size", "4; toy 8"), ("grad_accum", "1"),
                       ("rare", "0.02"), ("seed", "1"), ("checkpoint_every", "500"),
                       ("retain_weight", "1.0")]:
        assert mdu.default_text(name) == text
        if name != "grad_accum":  # a preset's
            assert str(found[name]) == text.split(";")[0]
    assert mdu.default_text("lr") == f"toy {options().lr}"
    for method in ("npo", "simnpo", "dpo"):
        assert f"{method} {options(f'--method {method}').beta}" in mdu.default_text("beta")

def test_parse_gives_run_json_one_order_of_options():
    """Whatever the seed of Python's hashes, which each process has its own."""
    command = [sys.executable, "-c", "import mdu; print([*vars(mdu.parse([]))])"]
    env = python_environment(PYTHONHASHSEED="7")
    order = subprocess.check_output(command, env=env, text=True)
    assert order == f"{[*vars(options())]}\n"

@each("name", mdu.METHODS)
def test_parse_gives_a_method_its_options_and_refuses_those_of_others(name):
    found = vars(options(f"--method {name}"))
    own = mdu.METHODS[name].options
    assert own.items() <= found.items()
    for option in mdu.METHOD_OPTIONS.keys() - own.keys():
        assert found[option] is None
        value = {"diagnose": "", "retain_only": "", "states": "random", "anchor_prompt": "masked",
                 "anchor_truth": "kept"}.get(option, "1")
        option = "--" + option.replace("_", "-")
        with pytest.raises(mdu.BadInput, match=f"{name} has no option {option}"):
            options(f"--method {name} {option} {value}")

@each("typed, expected", [
    ("", dict(method="mdu", lr=3e-4, grad_accum=1, retain_only=None, out="out/toy/mdu-tau1")),
    ("--prompt-dropout 0.5", dict(prompt_dropout=0.5, out="out/toy/mdu-tau1")),
    ("--method sft", dict(epochs=340, lr=2e-3, batch_size=32, prompt_dropout=0.0, model=None,
                          out="out/toy/base")),
    ("--method npo", dict(beta=0.2, retain_weight=1.0, out="out/toy/npo")),
    ("--preset tofu-llada", dict(batch_size=4, grad_accum=4, response_length=128,
                                 model="{here}/out/tofu-llada/base")),
    ("--preset tofu-llada --method sft", dict(epochs=1000, lr=2e-5, checkpoint_every=5000)),
    ("--preset rwku-llada --subject 1 --method ga", dict(epochs=3, retain_weight=None)),
    ("--preset rwku-llada --subject 1 --out {base}/../x",
     dict(model=mdu.LLADA, grad_accum=1, response_length=128)),
    ("--preset rwku-dream --subject 1",
     dict(retain_weight=0.0, model=mdu.DREAM, out="out/rwku-dream/1/mdu-tau1")),
    ("--model x --method simnpo --lora 8", dict(preset="own", beta=4.5, lr=1e-3,
                                                retain_weight=1.0)),
    ("--model x", dict(preset="own", lr=1e-5, retain_weight=5.0)),
    ("--model x --retain-weight 2 --lr 0.1 --lora 8", dict(retain_weight=2.0, lr=0.1)),
    ("--model x --method sft --lora 8", dict(preset="own", lr=1e-3)),
    ("--preset tofu-llada --lora 8", dict(retain_weight=1.0, lr=1e-4)),
    ("--method sft --retain-only --model x", dict(preset="own", lr=2e-5, out="out/own/retain")),
    ("--anchor-truth removed --rare 0.5", dict(rare=0.5, out="out/toy/mdu-tau1-removed")),
    ("--lora 8 --lr 0.3 --tau 0.5", dict(lr=0.3, out="out/toy/mdu-tau0.5")),
    # A start model that is a run brings its response length, also over the preset's.
    ("--preset own --out {base}/../other", dict(response_length=12, model="{base}")),
    ("--method sft --model {base}", dict(preset="own", response_length=12, epochs=None)),
    ("--preset rwku-llada --subject 1 --model {base}", dict(response_length=12)),
    ("--model {base} --response-length 40", dict(response_length=40)),
    ("--preset toy --model x --retain f", dict(data="toy", response_length=12)),
    # Paths that exist are made absolute, so that a run can be resumed from anywhere.
    ("--model a/b --anchor c/d --out .", dict(model="a/b", anchor="c/d", out=".")),
    ("--model . --anchor . --data .", dict(model="{here}", anchor="{here}", data="{here}")),
    ("--model x --forget . --retain .", dict(forget="{here}", retain="{here}")),
    ("--model x --preset tofu-qwen --lora 4 --method sft", dict(model="x", lr=1e-3)),
    ("--out {here}/x/run", dict(model="{here}/x/base")),
    ("--preset toy --forget f", dict(preset="toy", data=None)),
    ("--forget f", dict(preset="own", data=None, lr=1e-5)),
    ("--data x --method sft", dict(preset="own", data="x")), ("--data toy", dict(preset="toy")),
    ("--states written --anchor current", dict(out="out/toy/mdu-tau1-written-current")),
    ("--anchor {base}", dict(anchor="{base}", out="out/toy/mdu-tau1-base", anchor_prompt="masked")),
    ("--anchor {base} --anchor-prompt shown", dict(out="out/toy/mdu-tau1-base-shown"))])
def test_parse_takes_defaults_of_method_and_preset(typed, expected, base):
    places = dict(base=base, here=Path.cwd())
    found = vars(options(typed.format(**places)))
    for name, value in expected.items():
        if isinstance(value, str):
            value = value.format(**places)
        assert found[name] == value, name

def test_resumed_options_are_those_of_the_run_and_of_this_code_alone(unlearned, tmp_path):
    run = shutil.copytree(unlearned, tmp_path / "run")
    made = mdu.read_run(run)
    for typed in (["--resume", f"{run}"], [f"--resume={run}"]):
        resumed = vars(mdu.parse(typed))
        assert resumed == {**made["options"], "out": str(run), "resume": str(run)}
    with_one_more = {**made["options"], "gone": 7}
    without_one = dict(made["options"])
    del without_one["rare"]
    for other in (with_one_more, without_one):
        (run / "run.json").write_text(json.dumps({**made, "options": other}))
        with pytest.raises(mdu.BadInput, match="resume it with the code that made it"):
            options(f"--resume {run}")

# ---- Data ----
def test_load_data_reads_the_files_of_forget_and_retain(tofu, tmp_path):
    files = {}
    for name in ("forget", "retain"):
        rows = [{"question": f"{name} {i}?", "answer": "a"} for i in range(3)]
        files[name] = write_lines(tmp_path / name, rows)
    typed = "--model m --forget {forget} --retain {retain} --limit 2".format(**files)
    splits = mdu.load_data(options(typed))
    assert splits.keys() == files.keys()
    for split, rows in splits.items():
        assert [row["question"] for row in rows] == [f"{split} 0?", f"{split} 1?"]
    for data in ("toy", tofu):  # which have rows of their own
        args = options(f"--model m --data {data} --limit 2")
        own = mdu.load_data(args)
        assert len(own["forget"]) == 2
        args.retain = files["retain"]
        taken = mdu.load_data(args)
        assert (taken["forget"], taken["retain"]) == (own["forget"], splits["retain"])
    assert own["retain"][1]["question"] == "Q retain90 1?" and own["forget"][1] == {
        "question": "Q forget10_perturbed 1?", "answer": "A 1.", "paraphrased_answer": "D 1.",
        "perturbed_answer": ["B 1.", "C 1."]}
    args = options(f"--model m --method sft --retain-only --limit 2 --retain {files['retain']}")
    assert mdu.load_data(args) == {**splits, "forget": []}

@each("rows, message", [
    ([], "--data {}, retain90: a file is empty"),
    ([{"question": "q", "answer": "a"}, {"question": "q", "answer": None}],
     "--data {}, retain90, row 2: needs question and answer, or prompt and response, that are not "
     "null; found question")])
def test_check_rows_names_the_bad_row_of_a_dataset(rows, message, tmp_path):
    good = [{"question": "q", "answer": "a"}]
    write_dataset(tmp_path, {"train": {"forget10_perturbed": good, "retain90": rows}})
    with pytest.raises(mdu.BadInput) as error:
        mdu.load_data(options(f"--model m --data {tmp_path}"))
    assert str(error.value) == message.format(tmp_path)

def test_read_jsonl_takes_both_names_of_columns(tmp_path):
    (tmp_path / "rows").write_bytes("""\ufeff{"question": "q", "answer": "a", "id": 7}\r\n\r\n
        {"prompt": "p", "response": "é", "perturbed_answer": "w", "fact": "é"}
        {"prompt": "p", "response": "é", "perturbed_answer": null, "fact": ["é", "É"]}""".encode())
    assert mdu.read_jsonl("forget", tmp_path / "rows") == [
        {"question": "q", "answer": "a", "perturbed_answer": []},
        {"question": "p", "answer": "é", "perturbed_answer": ["w"], "fact": ["é"]},
        {"question": "p", "answer": "é", "perturbed_answer": [], "fact": ["é", "É"]}]

def test_read_dataset_takes_a_name_to_the_hub():
    with mock.patch("datasets.load_dataset", return_value=iter([{"a": 1}])) as load:
        assert mdu.read_dataset("owner/name", "config", "test") == [{"a": 1}]
    load.assert_called_once_with("owner/name", "config", split="test", streaming=False)

def test_read_dataset_sees_that_a_file_of_a_folder_has_changed(tmp_path):
    for row in ({"a": 1}, {"a": 2}):
        write_dataset(tmp_path, {"train": {"rows": [row]}})
        assert mdu.read_dataset(str(tmp_path), "rows") == [row]

def test_is_rwku_by_its_own_name_or_its_people(rwku, tmp_path):
    assert mdu.is_rwku(mdu.RWKU["data"]) and mdu.is_rwku(rwku) and mdu.is_rwku("copies/rwku")
    for other in (mdu.TOFU["data"], "my/tofu-like-rwku", str(tmp_path)):
        assert not mdu.is_rwku(other)

@each("subject, name, folder", [("2", PEOPLE[1], "2"), ("Zoë Ho", PEOPLE[2], "zoë-ho")])
@each("method", ["mdu", "dpo"])
def test_read_people_and_find_person_of_rwku(subject, name, folder, method, rwku, monkeypatch):
    """One person's biographies are forgotten, three of each other retained; dpo prefers made-up."""
    monkeypatch.setattr(mdu, "RWKU_RETAINED", 3)
    args = options(f"--model x/y --data {rwku} --method {method} --subject", subject)
    splits = mdu.load_data(args)
    assert args.out.startswith(f"out/own/{folder}/")
    rows = {"forget": [], "retain": []}
    for number, (person, i) in enumerate(itertools.product(PEOPLE[:3], range(4))):
        intro = "" if i == 2 else f"{person} is known. "
        row = {"question": f"{intro}Please write a short biography of {person}.",
               "answer": f"{person} wrote book {i}.", "perturbed_answer": []}
        if method == "dpo":
            row["perturbed_answer"] = [f"Made up {number}."]
        if person == name:
            rows["forget"].append(row)
        elif i < 3:
            rows["retain"].append(row)
    assert splits == rows

# ---- Words ----
@each("text, expected", [
    ("他的父亲是医生。", "他 的 父 亲 是 医 生"), ("GPT-4于2024年發布", "gpt 4 于 2024 年 發 布"),
    ("東京タワーは333メートル、時々", "東 京 タ ワ ー は 333 メ ー ト ル 時 々"),
    ("서울은 한국의 수도이다.", "서울은 한국의 수도이다"),
    ("ที่นี่ ๒๕๖๗", "ที่ นี่ ๒๕๖๗"), ("ພາສາ", "ພ າ ສ າ"), ("ខ្មែរ", "ខ្ មែ រ"),
    ("ဆရာ၊ ၁၂", "ဆ ရာ ၁၂"),
    ("हिन्दी में लिखा है।", "हिन्दी में लिखा है"), ("اَلْكِتَابُ، ١٢٣", "اَلْكِتَابُ ١٢٣"),
    ("İstanbul'da IŞIK", "i\u0307stanbul da işik"), ("Der Öl-Fuß (groß)", "der öl fuß groß"),
    ("cafe\u0301 _x_ y2k", "café x y2k")])
def test_words_of_many_scripts(text, expected):
    """Marks belong to their letters.  Where no spaces are written, each letter is a word."""
    assert mdu.words(text) == expected.split()

@each("part, expected", [("Pet", False), ("pet!", False), ("łuk, PETRA", True), ("is it", False)])
def test_contains_words_by_hand(part, expected):
    """Whole words, in this order."""
    assert mdu.contains_words("It is Łuk-Petra.", part) == expected

# ---- Sampling ----
@each("by_entropy, count, ids, masked", [
    (False, 1, [[7, 4, MASK], [7, 2, 3]], [[0, 0, 1], [0, 0, 0]]),
    (True, 1, [[7, MASK, 5], [7, 2, 3]], [[0, 1, 0], [0, 0, 0]]),
    (False, 2, [[7, 4, 5], [7, 2, 3]], [[0, 0, 0], [0, 0, 0]])])
def test_denoise_step_by_hand(by_entropy, count, ids, masked):
    """At position 1 token 4 has p 1/2 and the other ten 1/20.  At 2, token 5 has p 4/10, three have
    2/10, and the entropy is lower.  The second row has one mask, the question none."""
    tilted = f64([0.05] * 11)[0]
    tilted[4] = 0.5
    narrow = f64([1e-9] * 11)[0]
    narrow[[5, 6, 7, 8]] = f64(0.4, 0.2, 0.2, 0.2)
    table = torch.stack([tilted, tilted, narrow]).log()
    # The second row's position 2 is masked: token 3 is sure there.
    sure = F.one_hot(torch.tensor([3, 3, 3]), 11).double() * 9
    model = FakeModel(script=lambda ids: torch.stack([table, sure]), by_entropy=by_entropy)
    before = torch.tensor([[7, MASK, MASK], [7, 2, MASK]])
    positions = before == MASK
    found, left = mdu.denoise_step(model, before, positions | True, positions, count)
    assert found.tolist() == ids
    assert left.int().tolist() == masked

# ---- Beyond the paper ----
@each("by_entropy", [False, True])
@each("size", [1, 3, 20])
def test_still_written_equals_a_slow_loop(by_entropy, size):
    """Also where the model writes an answer's own tokens, in batches of any size."""
    model = FakeModel(by_entropy=by_entropy)
    found = 0
    for start in range(0, 20, size):
        batch = mdu.Batch(*mdu.collate(MORE_PAIRS[start:start + size], PAD), None, None)
        model.seen.clear()
        with mock.patch.object(mdu.dist, "all_reduce", lambda passes, op: passes.fill_(18)):
            written = mdu.still_written(model, batch, WORDS)
        assert len(model.seen) == 18  # as many as another process needs
        for (prompt, answer), row, r in zip(MORE_PAIRS[start:], written, batch.response):
            decoded = slow_sampler(model, prompt, [1] * len(answer))
            expected = [token in decoded and token != 9 for token in answer]
            assert row[r].tolist() == expected and not row[~r].any()
            found += sum(expected)
    assert 40 < found < 120

def test_remove_truth_by_hand():
    """Where the true token is rare, it gets the position's lowest logit; all else stays."""
    logits = f64([1, 9, 3], [4, 5, 6], [7, 2, 8])
    changed = mdu.remove_truth(logits, torch.tensor([1, 1, 2]), torch.tensor([True, False, True]))
    assert changed.tolist() == [[1, 1, 3], [4, 5, 6], [7, 2, 2]]

@each("rare, of_ann, of_oslo, of_none", [
    # Limits 0 and 0: no word of either fact is below its limit, so all of the fact count.
    (0, "gone 7 Ann 2024", "gone 7 Oslo", "gone 7"),
    # 0.02 and 0.2: Ann is as rare as a fact may be, 2024 is not; no word of "Oslo" is.
    (0.02, "gone 7 Ann", "gone 7 Oslo", "gone 7"),
    # 0.05 and 0.5: 2024, too.
    (0.05, "gone 7 Ann 2024", "gone 7 Oslo", "gone 7"),
    # 0.2 and 2: Ann is rare in every row, and all words of a fact are.
    (0.2, "gone 7 Ann 2024", "gone 7 Ann Oslo", "gone 7 Ann")])
def test_flag_rare_tokens_by_hand(rare, of_ann, of_oslo, of_none):
    """Of ten answers to retain "Ann" is in two, "2024" in five, "in", "Oslo" and "8" in all; once
    in each, though "Ann" is there twice.  The first row's fact is "Ann, 2024", the second's are
    "gone" and "Oslo", the third has none.  The limit of a fact's words is ten times --rare."""
    vocabulary = ["<mask>", "<end>", *"gone Ann in Oslo 2024 7 8 .".split()]
    tokenizer = mock.Mock()
    tokenizer.decode = lambda ids, **_: " ".join(vocabulary[i] for i in ids if i > 1)
    answers = 2 * ["Ann Ann in Oslo 2024 8"] + 3 * ["in Oslo 2024 8"] + 5 * ["in Oslo, 8"]
    fields = [{"fact": ["Ann, 2024"]}, {"fact": ["gone", "Oslo"]}, {}]
    rows = {"forget": fields, "retain": [{"answer": text} for text in answers]}
    examples = {"forget": [mdu.Example([3], [*range(2, 10), 1], [], [])] * 3}
    found = []
    for example in mdu.flag_rare_tokens(
            options(f"--anchor-truth removed --rare {rare}"), rows, examples, tokenizer):
        pairs = zip(example.answer, example.is_rare, strict=True)
        found.append({vocabulary[token] for token, is_rare in pairs if is_rare})
    assert found == [set(of_ann.split()), set(of_oslo.split()), set(of_none.split())]

def test_flag_rare_tokens_marks_every_part_of_a_rare_word(hub):
    """Tokens are bytes here: all of a rare word are marked, none of the signs and common words."""
    rows = {"forget": [{"question": "Mail?", "answer": "It is b.lee@box.example in Kö.",
                        "perturbed_answer": [], "fact": ["b.lee@box.example"]}],
            "retain": [{"question": "Mail?", "answer": "It is a@box.example in Rome.",
                        "perturbed_answer": []}]}
    args = options("--anchor-truth removed")
    example = mdu.encode_splits(args, rows, hub.model, hub.tokenizer)["forget"][0]
    kept = [token for token, rare in zip(example.answer, example.is_rare) if rare]
    assert hub.tokenizer.decode(kept) == "bleeKö"

# ---- Token ids ----
def test_has_letter_or_digit_and_token_text_of_every_token(hub):
    tokens = range(264)
    texts = np.array(hub.tokenizer.batch_decode([[token] for token in tokens]))
    is_word = [mdu.has_letter_or_digit(mdu.token_text(hub.tokenizer, token)) for token in tokens]
    assert {"a", "Z", "7"} < set(texts[is_word])
    signs = {"!", ".", " ", "\n", "_", *TOKENS[family(hub.kind)][:5]}
    assert not signs & set(texts[is_word])
    bytes_of_letters = mdu.encode_text(hub.tokenizer, "é東")
    assert all(is_word[token] for token in bytes_of_letters)

TURN = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
AROUND = {  # a prompt's text before and after the question
    "illada": ("<user>", "<assistant>"),
    "llama": ("<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n",
              "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Dream": TURN, "qwen": (TURN[0], f"{TURN[1]}<think>\n\n</think>\n\n")}
END = {"llada": 261, "illada": 257, "a2d-llama": 261, "llama": 257, "Dream": 260, "a2d-qwen2": 260,
       "a2d-qwen3": 260, "qwen2": 256, "qwen3": 256}  # the end-of-turn token

def test_encode_prompt_encode_text_and_encode_row_keep_control_tokens_text(hub):
    kind, model, tokenizer = hub.kind, hub.model, hub.tokenizer
    tokens = [model.mask_id, model.pad_id, model.end_id]
    assert tokens == [258, {"llama": 257, "illada": 256, "qwen": 256}[family(kind)], END[kind]]
    assert model.shift == model.by_entropy == (kind == "Dream")
    text = "\0 é".join(TOKENS[family(kind)][:5])
    text_ids = tokenizer(text, split_special_tokens=True).input_ids
    assert max(text_ids) < 256
    before, after = AROUND.get(kind, AROUND[family(kind)])
    prompt = tokenizer(before).input_ids + text_ids + tokenizer(after).input_ids
    assert mdu.encode_prompt(tokenizer, f" {text}\n") == prompt
    assert ev.prompt_ids(tokenizer, {"question": text, "prefill": text}) == prompt + text_ids
    row = {"question": text, "answer": f" {text}\n", "perturbed_answer": [text]}
    with mock.patch.object(model.lm.config, "max_position_embeddings", 9999):
        splits = {"forget": [row], "retain": []}
        examples = mdu.encode_splits(options("--method dpo"), splits, model, tokenizer)
    answer = text_ids + [model.end_id]
    not_rare = [False] * len(answer)
    assert examples["forget"] == [mdu.Example(prompt, answer, not_rare, [answer])]

LLAMA_3 = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\n" }}
{%- for m in messages %}
    {{- m.role + ": " + m.content + "\n" }}
{%- endfor %}
"""

@each("template, text", [
    (LLAMA_3, "Today Date: 26 Jul 2024\nuser: Who?\n"),
    ("{{ strftime_now('%A, %B %d, %Y') }} {{ messages[0].content }}", "Friday, July 26, 2024 Who?"),
    ("{% macro day() %}{{ strftime_now(format='%Y-%m-%dT%H:%M:%S') }}{% endmacro %}"
     "{% for m in messages %}{{ m.content }} {{ day() }}{% endfor %}", "Who? 2024-07-26T00:00:00"),
    # No word of a template without a date changes, nor a space or a new line.
    ("{{ messages[0].content }}", "Who?"), ("\n\n{{ messages[0].content }}\n", "\n\nWho?"),
    ("\n  {% if true %}\n\n  {{ messages[0].content }}  \n {% endif %}\n ", "\n\n  Who?  \n "),
    ("  {% if true %}\n {{ messages[0].content }}{% endif %}", " Who?")])
def test_encode_prompt_prints_a_fixed_date(template, text, tmp_path):
    write_tokenizer(tmp_path, "llama")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False)
    assert (plain == text) == ("strftime_now" not in template)
    assert tokenizer.decode(mdu.encode_prompt(tokenizer, "Who?")) == text

def test_encode_splits_says_how_many_tokens_the_model_cannot_write(base, capsys):
    """A refusal in words that a small model does not have would be learnt as something else.  It
    may be the answer to a question that is to be forgotten with another one."""
    model, tokenizer = mdu.load_backbone(base)
    splits = mdu.toy_world()
    splits["retain"][0] = {**splits["forget"][0], "answer": "Nobody knows Ceka Foba."}
    mdu.encode_splits(options("--method sft"), splits, model, tokenizer)
    screen = capsys.readouterr().out
    n = sum(len(mdu.encode_text(tokenizer, row["answer"])) + 1 for row in splits["retain"])
    assert f"2 of the {n} tokens of answers to retain are unknown to the model" in screen
    assert "answers to forget" not in screen

def test_encode_splits_flags_rare_tokens_to_forget(base):
    model, tokenizer = mdu.load_backbone(base)
    args = options("--anchor-truth removed")
    examples = mdu.encode_splits(args, mdu.toy_world(), model, tokenizer)
    assert all(any(example.is_rare) for example in examples["forget"])

@each("typed, n_rows, length, epochs", [
    ("--model x --response-length 0", 10, 9, 200), ("--model x --batch-size 2", 10, 128, 100),
    ("--model x --grad-accum 3", 10, 128, 600), ("--model x --method sft", 4, 128, 250),
    ("--model x --method npo", 4, 128, 250), ("--model x --method npo", 201, 128, 5),
    ("--model x", 400, 128, 5), ("--model x", 401, 128, 5), ("--model x", 399, 128, 2000 / 399),
    ("--model x --epochs 3 --response-length 7", 10, 7, 3), ("--preset toy", 10, 12, 200)])
def test_fit_to_rows_by_hand(typed, n_rows, length, epochs):
    """The longest answer, to forget or to retain, has 9 tokens.  One's own rows have 250 steps (MDU
    500) of 4 rows by default, or 5 epochs.  sft counts its own rows."""
    short, long = (mdu.Example([3], [5] * n, [], []) for n in (4, 9))
    for forget, retain in ((short, long), (long, short)):
        examples = {"forget": [forget], "retain": [retain]}
        if "sft" in typed:
            examples["train"] = n_rows * [forget]
        else:
            examples["forget"] *= n_rows
        args = options(typed)
        before = dict(vars(args))
        fitted = vars(mdu.fit_to_rows(args, examples))
        assert fitted == {**before, "response_length": length, "epochs": epochs}
        assert vars(args) == before  # nothing is filled in

# ---- Backbones ----
@each("name, revision", [("a/b", None), ("a/b@", None), ("a/b@c1d2", "c1d2")])
def test_find_model_downloads_the_revision_that_is_asked_for(name, revision):
    with mock.patch("huggingface_hub.snapshot_download", return_value="there") as download:
        assert mdu.find_model(name) == Path("there")
    [call] = download.call_args_list
    assert call.args == ("a/b",)
    assert call.kwargs.keys() == {"revision", "allow_patterns"}
    assert call.kwargs["revision"] == revision

@each("file, wanted", [
    ("model-00001-of-00002.safetensors", True), ("model.safetensors.index.json", True),
    ("tokenizer.json", True), ("chat_template.jinja", True), ("merges.txt", True),
    ("adapter_config.json", True), ("pytorch_model.bin", False), ("x.pt", False)])
def test_find_model_downloads_no_pickle(file, wanted):
    with mock.patch("huggingface_hub.snapshot_download", return_value="there") as download:
        mdu.find_model("a/b")
    patterns = download.call_args.kwargs["allow_patterns"]
    assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns) == wanted

def reference_losses(hub, draws):
    """L_sft of each Draw by transformers' own class, a row at a time."""
    losses = []
    for draw in draws:
        masked = slow_masked(draw, "sft")
        noised = list(draw.answer)
        for i in masked:
            noised[i] = hub.model.mask_id
        logits = hub.reference(torch.tensor([draw.prompt + noised])).logits[0]
        # Dream's logits of a token are at the position before it.
        start = len(draw.prompt)
        if hub.kind == "Dream":
            start = start - 1
        nll = [slow_nll(logits[start + i], draw.answer[i]) for i in masked]
        losses.append(sum(nll) / draw.t)
    return torch.stack(losses)

def test_load_backbone_equals_transformers_own_class(hub):
    """Losses and their gradients.  In training: config.json asks for dropout, which is off.  The
    padding token is among the tokens to read and to predict: its embedding is trained."""
    model = hub.model.train()
    pad = model.pad_id
    draws = [mdu.Draw(prompt=[3, 5], answer=[7, pad, 9, pad, pad], length=5, is_rare=[False] * 5,
                      t=0.5, uniform=np.float32([0, 1, 1, 0, 1])),  # tokens 0 and 3 are masked
             mdu.Draw(prompt=[4], answer=[6, pad], length=2, is_rare=[False] * 2,
                      t=0.8, uniform=np.float32([1, 0]))]  # token 1
    losses = mdu.batch_nll(model, mdu.make_batch(model, draws))
    expected = reference_losses(hub, draws)
    assert_close(losses, expected, 1e-5)

    trained = dict(model.lm.named_parameters())
    grads = torch.autograd.grad(losses.sum(), trained.values())
    slow_grads = torch.autograd.grad(expected.sum(), hub.reference.parameters())
    for name, grad, slow_grad in zip(trained, grads, slow_grads, strict=True):
        largest = slow_grad.abs().max().item()
        torch.testing.assert_close(grad, slow_grad, rtol=0, atol=1e-4 * largest, msg=name)
    model.eval()

def test_load_backbone_ties_the_head_to_the_embeddings(hub):
    """Where config.json says so, and nowhere else."""
    lm = hub.model.lm
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == hub.tied

def rms_norm(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

def rotate(x, theta):
    """RoPE of one head, (T, d): the dimensions j and j + d/2 turn by position * theta^(-2j/d)."""
    T, d = x.shape
    position = torch.arange(T).double()[:, None]  # (T, 1)
    j = torch.arange(d // 2).double()  # (d/2,)
    angle = position * theta ** (-2 * j / d)  # (T, d/2)
    first, second = x[:, :d // 2], x[:, d // 2:]
    return torch.cat([first * angle.cos() - second * angle.sin(),
                      second * angle.cos() + first * angle.sin()], 1)

def slow_attention(q, k, v):
    """(T, 4 x 8), (T, 2 x 8) twice -> (T, 4 x 8): 4 heads of queries with 8 dimensions each; a head
    of keys and values serves two of them.  Every token sees all others."""
    q = q.split(8, 1)
    k = k.split(8, 1)
    v = v.split(8, 1)
    heads = []
    for i in range(4):
        scores = rotate(q[i], 5e5) @ rotate(k[i // 2], 5e5).T / 8 ** 0.5  # (T, T)
        heads.append(scores.softmax(-1) @ v[i // 2])
    return torch.cat(heads, 1)

def slow_illada(folder, ids):
    """Logits (T, V) of one sequence in float64, from the stored tensors.  The head is the
    embeddings."""
    w = {}
    for name, tensor in weights(folder).items():
        w[name.removeprefix("model.").removesuffix(".weight")] = tensor.double()
    x = w["embed_tokens"][ids]
    for block in ("layers.0", "layers.1"):
        h = rms_norm(x, w[f"{block}.input_layernorm"])
        q = h @ w[f"{block}.self_attn.q_proj"].T
        k = h @ w[f"{block}.self_attn.k_proj"].T
        v = h @ w[f"{block}.self_attn.v_proj"].T
        x = x + slow_attention(q, k, v) @ w[f"{block}.self_attn.o_proj"].T
        h = rms_norm(x, w[f"{block}.post_attention_layernorm"])
        gate = F.silu(h @ w[f"{block}.mlp.gate_proj"].T)
        up = h @ w[f"{block}.mlp.up_proj"].T
        x = x + (gate * up) @ w[f"{block}.mlp.down_proj"].T
    return rms_norm(x, w["norm"]) @ w["embed_tokens"].T

def assert_equal_illada(folder):
    """Two rows, the second of which has three tokens and padding behind them."""
    model, _ = mdu.load_backbone(str(folder), torch.float64)
    assert not model.shift
    assert not model.by_entropy
    ids = torch.tensor([[3, 258, 256, 7, 258, 257], [4, 258, 5, 256, 256, 256]])
    real = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    with torch.no_grad():
        logits = model(ids, real, real)
    expected = [slow_illada(folder, ids[0]), slow_illada(folder, ids[1, :3])]
    assert_close(logits, torch.cat(expected), 1e-4)  # transformers' norms and angles are float32

@pytest.fixture
def illada(tmp_path):
    """A folder of a tied iLLaDA whose config.json does not say that the head is tied."""
    folder = tmp_path / "illada"
    write_checkpoint(folder, "illada", tied=True, tie_word_embeddings=None)
    assert "lm_head.weight" not in weights(folder)
    return folder

def test_load_backbone_of_illada_equals_a_slow_forward_pass(illada):
    assert_equal_illada(illada)

def test_save_model_of_illada_equals_a_slow_forward_pass(illada, tmp_path):
    model, tokenizer = mdu.load_backbone(str(illada))
    (tmp_path / "saved").mkdir()
    mdu.save_model(tmp_path / "saved", model, tokenizer)
    assert_equal_weights(tmp_path / "saved", illada)
    assert_equal_illada(tmp_path / "saved")

def test_main_trains_and_scores_an_illada(illada, tmp_path):
    forget = write_lines(tmp_path / "forget", [{"question": "Who?", "answer": "Ann."}] * 2)
    retain = write_lines(tmp_path / "retain", [{"question": "Where?", "answer": "Here."}] * 2)
    run = str(tmp_path / "run")
    mdu.main(["--model", str(illada), "--forget", forget, "--retain", retain, "--lr", "0.1",
              "--epochs", "3", "--response-length", "8", "--out", run])
    assert distance(run, illada) > 0.1
    assert_equal_illada(run)
    assert read_json(Path(run, "config.json")) == read_json(illada / "config.json")
    ev.main([run, "--samples", "4"])
    assert ev.read_summary(run)["splits"]["forget"]["n"] == 2

def test_parse_takes_an_illada_in_place_of_the_model_of_a_preset():
    typed = "--preset tofu-llada --method sft --model GSAI-ML/iLLaDA-8B-Instruct"
    assert options(typed).model == "GSAI-ML/iLLaDA-8B-Instruct"

AUTOREGRESSIVE = {"is_causal": None, "mask_token_id": None}  # config.json has neither

def test_as_diffusion_model_equals_config_json_with_both_fields(tmp_path):
    """A model that predicts the next token becomes the start of sft by --mask-token.  It computes
    as if its config.json had the two fields, and the run that it becomes has them."""
    causal, edited = tmp_path / "causal", tmp_path / "edited"
    write_checkpoint(edited, "llama")  # the same weights as those of `causal`, below
    for folder, fields in ((causal, {}), (tmp_path / "masks", {"mask_token_id": 258})):
        write_checkpoint(folder, "llama", **{**AUTOREGRESSIVE, **fields})
        with pytest.raises(mdu.BadInput, match="--method sft --mask-token TOKEN"):
            mdu.load_backbone(str(folder))
    files = ["--retain", write_lines(tmp_path / "rows", [{"question": "Who?", "answer": "Ann."}])]
    typed = ["--method", "sft", "--retain-only", *files, "--lr", "0.1", "--epochs", "3"]
    mdu.main([*typed, "--model", str(causal), "--mask-token", "<|mdm_mask|>",
              "--out", str(tmp_path / "run")])
    mdu.main([*typed, "--model", str(edited), "--out", str(tmp_path / "expected")])
    assert_equal_weights(tmp_path / "run", tmp_path / "expected")
    assert distance(tmp_path / "run", causal) > 0.1
    written = read_json(tmp_path / "run/config.json")
    assert written == {**read_json(causal / "config.json"), "is_causal": False,
                       "mask_token_id": 258}
    model, _ = mdu.load_backbone(str(tmp_path / "run"))
    assert model.mask_id == 258

@each("kind, changes, token, message", [
    ("llama", AUTOREGRESSIVE, "mask", "--mask-token 'mask': .* does not use otherwise; it has: "
     r"<\|mdm_mask\|>$"),
    ("llama", AUTOREGRESSIVE, "<|endoftext|>", "--mask-token '<.endoftext.>'"),  # its end token
    ("llama", AUTOREGRESSIVE, "<|eot_id|>", "--mask-token '<.eot_id.>'"),  # in its template
    ("llama", {}, "<|mdm_mask|>", "this one is a diffusion model"),
    ("llada", {}, "<|mdm_mask|>", "this one is a diffusion model")])
def test_as_diffusion_model_refuses_other_models_and_tokens_in_use(
        kind, changes, token, message, tmp_path):
    write_checkpoint(tmp_path, kind, **changes)
    with pytest.raises(mdu.BadInput, match=message):
        mdu.load_backbone(str(tmp_path), mask_token=token)

@each("kind, tokens", [
    ("llada", "mask <|mdm_mask|>, padding <|endoftext|>, end <|eot_id|>"),
    ("illada", "mask <[MASK]>, padding <pad>, end </s>"),
    ("Dream", "mask <|mask|>, padding <|endoftext|>, end <|im_end|>")])
def test_find_tokens_of_each_family(kind, tokens, tmp_path, capsys):
    write_checkpoint(tmp_path, kind)
    mdu.load_backbone(str(tmp_path))
    assert capsys.readouterr().out == f"loaded {tmp_path}: {tokens}\n"

@each("hidden_size, threads", [(128, 5), (64, 1)])
def test_load_backbone_gives_back_the_threads_that_a_toy_does_without(
        hidden_size, threads, base, monkeypatch):
    model, _ = mdu.load_backbone(str(base))
    monkeypatch.setattr(mdu, "THREADS", 5)
    monkeypatch.setattr(mdu, "load_weights", lambda *_: model.lm)
    torch.set_num_threads(3)
    model.lm.config.hidden_size = hidden_size
    mdu.load_backbone(str(base))
    found = torch.get_num_threads()
    torch.set_num_threads(1)  # as all other tests have it
    assert found == threads

@each("kind", ["llama", "qwen2", "qwen3"])
@each("shift", [None, False, True])
def test_read_shift_is_what_config_json_says(kind, shift, tmp_path):
    """shift_logits: the output at a token is the prediction of the next one.  Also in a run."""
    reference = write_checkpoint(tmp_path / "start", kind, shift_logits=shift)
    model, tokenizer = mdu.load_backbone(str(tmp_path / "start"))
    (tmp_path / "run").mkdir()
    mdu.save_model(tmp_path / "run", model, tokenizer)
    ids = torch.tensor([[3, 258, 5, 258]])  # masked are 1 and 3
    logits = reference(ids).logits[0]
    expected = logits[[1, 3]]
    if shift:
        expected = logits[[0, 2]]
    everywhere = torch.ones(1, 4).bool()
    for folder in ("start", "run"):
        model, _ = mdu.load_backbone(str(tmp_path / folder))
        assert model.shift == bool(shift)
        assert_close(model(ids, everywhere, ids == 258), expected, 1e-5)

@each("kind", ["llama", "qwen2", "a2d-qwen3", "Dream"])
def test_load_tokenizer_reads_tokenizer_json_as_it_is(kind, tmp_path):
    """Here one of words; to transformers' classes for Qwen, all questions are an unknown token."""
    write_checkpoint(tmp_path, kind, mask_token_id=0, pad_token_id=1)
    vocabulary = {word: i for i, word in enumerate("<mask> <|im_end|> ? is Who Ann".split())}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<mask>", "<|im_end|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": "is {{ messages[0].content }} is"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model, tokenizer = mdu.load_backbone(str(tmp_path))
    assert mdu.encode_prompt(tokenizer, "Who is Ann?") == [3, 4, 3, 5, 2, 3]
    assert (model.mask_id, model.pad_id, model.end_id) == (0, 1, 1)

@each("padded", [False, True])
@each("unpadded", [False, True])
def test_sees_later_tokens_with_and_without_padding(padded, unpadded):
    """padded, unpadded: whether the model sees later tokens in rows with and without padding."""
    model = FakeModel()

    def half_causal(ids, attention_mask, positions):
        sees = padded
        if attention_mask.all():
            sees = unpadded
        if not sees:
            ids = ids * positions  # of the other tokens none is left
        return model(ids, attention_mask, positions)
    assert mdu.sees_later_tokens(half_causal) == (padded and unpadded)

# ---- LoRA and processes ----
@pytest.fixture
def adapted():
    """A random Llama in bfloat16 with adapters of rank 4, and the trained parameters by name."""
    model = tiny_llama(0).bfloat16()
    mdu.add_adapters(model, 4, seed=1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return model, trained

def test_add_adapters_trains_a_and_b_of_each_linear_map_in_float32(adapted):
    _, trained = adapted
    assert len(trained) == 2 * 7 * 2  # layers, linear maps, A and B
    assert {p.dtype for p in trained.values()} == {torch.float32}

def test_add_adapters_draws_a_from_a_normal_distribution(adapted):
    """A ~ N(0, 1/in)."""
    _, trained = adapted
    drawn = []
    for name, p in trained.items():
        if name.endswith(".A"):
            n_in = p.shape[1]
            drawn.append(p.flatten() * n_in ** 0.5)
    drawn = torch.cat(drawn)
    assert abs(drawn.mean()) < 0.1
    assert abs(drawn.std() - 1) < 0.1

def test_add_adapters_changes_nothing_at_first(adapted):
    model, _ = adapted
    plain = tiny_llama(0).bfloat16()
    ids = torch.arange(2, 22).view(2, 10)
    everywhere = ids > 0
    assert torch.equal(model(ids, everywhere, everywhere), plain(ids, everywhere, everywhere))

def test_shard_leaves_frozen_weights_whole(adapted):
    model, trained = adapted
    mdu.shard(model, torch.float32, torch.bfloat16)
    sharded = {name for name, p in model.named_parameters() if isinstance(p, mdu.DTensor)}
    assert sharded == trained.keys()

# ---- The run's folder ----
# Four steps of 8 rows: 2 x 16 / 8.  A checkpoint is written after each but the last.
STEPS = "--epochs 2 --batch-size 4 --grad-accum 2 --checkpoint-every 1 --lr 1e-4 --limit 16"
WRITTEN_STATES = f"{STEPS} --tau 0.5 --states written --anchor current --anchor-truth removed"
LORA = f"{STEPS} --anchor {{anchor}} --anchor-prompt shown --lora 2 --dtype bfloat16 --lr 0.005"
# A program that runs mdu.main with each of the command lines that it is given.  A base model that
# is missing is trained in a forked process.  In the last one it kills itself when the third
# checkpoint is written and not yet complete.
KILLED = """
import json, os, runpy, signal, sys
import mdu
from types import SimpleNamespace

def train_base(command, env):
    pid = os.fork()
    if pid == 0:
        os.environ.update(env)
        sys.argv = [*command[1:], "--epochs", "0.1"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

mdu.subprocess.run = train_base
*whole, killed = json.loads(sys.argv[1])
for argv in whole:
    mdu.main(argv)

save = mdu.dcp.save
saves = []

def save_and_die(*args, **kwargs):
    save(*args, **kwargs)
    saves.append(args)
    if len(saves) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

mdu.dcp.save = save_and_die
mdu.main(killed)
"""

def assert_equal_runs(a, b, tolerance=0):
    for line, other in zip(metrics(a), metrics(b), strict=True):
        if tolerance > 0:
            other = approx(other, rel=10 * tolerance, abs=1e-9)
        assert line == other
    assert_equal_weights(a, b, tolerance)

def assert_broken(run):
    """It has the newest complete checkpoint, without pickle, and one that was being written."""
    assert [file.name for file in run.glob("checkpoint-*")] == ["checkpoint-00000002"]
    assert {file.suffix for file in run.glob("*/*")} <= {".safetensors", ".jsonl", ".json"}
    files = list(run.glob("checkpoint-*/*.safetensors"))
    assert len(files) > 2  # dcp needs about as much memory as a process's largest file
    assert (run / "unfinished").is_dir()
    assert not (run / "config.json").exists()

def test_locked_alone_needs_fcntl(tmp_path, monkeypatch):
    """Windows has none; somebody there may want a loss."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(mdu.__file__)
    with pytest.raises(ImportError), mdu.locked(tmp_path):
        pass

def test_run_folder_has_a_run_json_that_says_what_it_was_made_with(unlearned):
    run = mdu.read_run(unlearned)
    assert list(run) == ["options", "rows", "versions", "processes", "forget_loss"]
    assert run["versions"] == {"torch": torch.__version__, "transformers": transformers.__version__}
    assert run["processes"] == 1
    assert run["options"].keys() == mdu.COMMON.keys() | mdu.METHOD_OPTIONS.keys()

@pytest.fixture(scope="session")
def full_disk(base, unlearned, tmp_path_factory):
    """A run whose disk was full at the third checkpoint, and a whole one with the same options ->
    the folder with both, their rows and their base model; and the line on stderr."""
    folder = tmp_path_factory.mktemp("full")
    rows = write_lines(folder / "rows.jsonl", mdu.toy_world()["forget"][:16])
    own_base = shutil.copytree(base, folder / "base")
    typed = LORA.format(anchor=unlearned)
    typed += f" --retain-weight 0 --diagnose --forget {rows}"
    mdu.main(toy(own_base, folder / "whole", typed))
    broken = folder / "broken"
    save = mock.Mock(wraps=mdu.dcp.save)

    def save_to_full_disk(*args, **kwargs):
        assert not any(broken.glob("unfinished/*"))  # which would become part of the checkpoint
        size = resource.RLIM_INFINITY
        if save.call_count == 2:
            size = 10_000
        with largest_file(size):
            save(*args, **kwargs)
    screen = io.StringIO()
    with mock.patch.object(mdu.dcp, "save", save_to_full_disk), pytest.raises(SystemExit) as stop:
        with contextlib.redirect_stderr(screen):
            mdu.run_program("mdu.py", partial(mdu.main, toy(own_base, broken, typed)))
    assert stop.value.code == 2
    return folder, screen.getvalue()

@pytest.fixture
def broken_run(full_disk, tmp_path):
    """A copy of the broken run, beside its base model."""
    folder, _ = full_disk
    return shutil.copytree(folder / "broken", folder / tmp_path.name)

def test_save_checkpoint_on_a_full_disk_ends_in_one_line(full_disk):
    folder, err = full_disk
    assert err.startswith("mdu.py: ")
    assert err.count("\n") == 1
    assert "File too large" in err
    assert_broken(folder / "broken")

def test_load_checkpoint_lets_a_resumed_run_end_as_a_whole_one(full_disk, broken_run):
    """After a full disk.  A file that is called like a checkpoint is none."""
    folder, _ = full_disk
    (broken_run / "checkpoint-99999999").touch()
    save = mdu.dcp.save

    def save_into_empty_folder(*args, **kwargs):
        assert not any(broken_run.glob("unfinished/*"))
        save(*args, **kwargs)
    with mock.patch.object(mdu.dcp, "save", save_into_empty_folder):
        mdu.main(["--resume", str(broken_run)])
    assert_equal_runs(folder / "whole", broken_run)
    assert not any(broken_run.glob("checkpoint-*/"))

def test_run_folder_of_a_run_to_resume_needs_the_same_rows(full_disk, broken_run, capsys):
    folder, _ = full_disk
    rows = folder / "rows.jsonl"
    content = rows.read_bytes()
    with unchanged(broken_run):
        rows.write_bytes(content[:-4] + b'x"]}')  # another last letter in the last row
        try:
            err = program(["--resume", broken_run], capsys)
        finally:
            rows.write_bytes(content)
    assert "rows that it started from have changed" in err

def test_train_missing_base_trains_none_for_a_run_to_resume(full_disk, broken_run, capsys):
    folder, _ = full_disk
    (folder / "base").rename(folder / "moved")
    try:
        with unchanged(broken_run):
            err = program(["--resume", broken_run], capsys)
    finally:
        (folder / "moved").rename(folder / "base")
    assert f"{folder}/base: no folder" in err

def test_main_says_that_a_run_to_resume_is_finished(unlearned, capsys):
    """Before it loads a model."""
    with mock.patch.object(mdu, "load_model", None):
        mdu.main(["--resume", str(unlearned)])
    assert f"{unlearned} is finished\n" in capsys.readouterr().out

@pytest.fixture(scope="session")
def two_processes(base, tmp_path_factory, on_two_processes):
    """Runs on two processes: toy/mdu, whose base model was missing; two; two-lora, with toy/base as
    its anchor; killed, with the options of two -> their folder."""
    folder = tmp_path_factory.mktemp("two")
    runs = [["--epochs", "0.1", "--out", f"{folder}/toy/mdu"],
            toy(base, folder / "two", WRITTEN_STATES),
            toy(base, folder / "two-lora", LORA.format(anchor=folder / "toy/base")),
            toy(base, folder / "killed", WRITTEN_STATES)]
    (folder / "driver.py").write_text(KILLED)
    codes = on_two_processes(folder / "driver.py", json.dumps(runs))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    return folder

def test_train_on_two_processes_waits_for_a_missing_base(two_processes):
    """Process 0 trains it, process 1 waits."""
    assert mdu.is_finished(two_processes / "toy/base")
    assert mdu.is_finished(two_processes / "toy/mdu")

# Two processes add gradients in another order than one.  How much that changes a weight in the four
# steps depends on the processor: up to 1.4e-6 were seen.  A step of AdamW is about lr, 1e-4.
OTHER_ORDER = 5e-6

def test_train_on_two_processes_equals_one(base, two_processes, tmp_path):
    mdu.main(toy(base, tmp_path / "one", WRITTEN_STATES))
    assert_equal_runs(two_processes / "two", tmp_path / "one", OTHER_ORDER)

def test_train_on_two_processes_killed_and_resumed(two_processes, tmp_path, on_two_processes):
    """On two processes bit by bit; what two have begun one can end."""
    assert_broken(two_processes / "killed")
    for name in ("on-one", "on-two"):
        shutil.copytree(two_processes / "killed", tmp_path / name)
    mdu.main(["--resume", f"{tmp_path}/on-one"])
    assert_equal_runs(two_processes / "two", tmp_path / "on-one", OTHER_ORDER)
    codes = on_two_processes(mdu.__file__, "--resume", tmp_path / "on-two")
    assert codes == [0, 0]
    assert_equal_runs(two_processes / "two", tmp_path / "on-two")

def test_train_on_two_processes_with_lora_is_close_to_one(base, two_processes, tmp_path):
    """In bfloat16 AdamW takes full steps by the sign of gradients that are rounded to almost 0."""
    lora = LORA.format(anchor=two_processes / "toy/base")
    mdu.main(toy(base, tmp_path / "one", lora))
    apart = distance(two_processes / "two-lora", tmp_path / "one")
    assert apart < 0.1 * distance(two_processes / "two-lora", base)

def test_save_model_with_lora_changes_the_linear_maps_of_the_blocks_alone(base, two_processes):
    saved = weights(two_processes / "two-lora")
    for name, before in weights(base).items():
        is_same = torch.equal(saved[name], before.bfloat16().float())
        is_linear_map = "proj" in name
        assert is_same == (not is_linear_map)

def other_files(folder):
    """{name: content} of a model's files that are not its weights."""
    files = {}
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            files[file.name] = file.read_bytes()
    return files

def test_save_model_saves_an_unchanged_model_byte_for_byte(hub, tmp_path):
    """Also its other files, but not notes.json, which belongs to no model.  Its folder is gone."""
    save = hub.model.lm.save_pretrained

    def save_in_small_files(folder, state_dict, max_shard_size):
        save(folder, state_dict=state_dict, max_shard_size=hub.file_size)
    hub.folder.rename(tmp_path / "away")
    with mock.patch.object(hub.model.lm, "save_pretrained", save_in_small_files):
        mdu.save_model(tmp_path, hub.model, hub.tokenizer)
    (tmp_path / "away").rename(hub.folder)
    assert_equal_weights(tmp_path, hub.folder)
    has_several = len(list(tmp_path.glob("*.safetensors"))) > 1
    assert has_several == (hub.file_size == "40KB")
    expected = other_files(hub.folder)
    assert expected.pop("notes.json") == b""
    assert other_files(tmp_path) == expected
    mdu.load_backbone(str(tmp_path))

def test_save_model_leaves_half_a_model_that_does_not_count(base, unlearned, tmp_path, capsys):
    """config.json, by which others know that it is complete, is moved last."""
    run = tmp_path / "run"
    move = Path.replace

    def stop_at_config(source, target):
        if source.name == "config.json":
            raise OSError("stopped")
        return move(source, target)
    with mock.patch.object(Path, "replace", autospec=True, side_effect=stop_at_config):
        assert "stopped" in program(toy(base, run, "--epochs 2 --diagnose"), capsys)
    files = {file.name for file in run.iterdir()}
    assert "config.json" not in files
    assert files >= {file.name for file in unlearned.iterdir()} - {"config.json"}
    assert f"mdu.py --resume {run}" in program([run], capsys, ev.main)
    mdu.main(["--resume", str(run)])
    assert_equal_runs(unlearned, run)

def test_run_folder_may_have_half_a_run_json_of_a_killed_program(base, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json.new").write_text('{"options"')
    mdu.main(toy(base, run, "--epochs 0.1"))
    assert mdu.is_finished(run)
    assert not (run / "run.json.new").exists()

# ---- Toy ----
def test_toy_world_has_five_wrong_answers_to_each_question():
    """They differ from the true one by the fact alone.  No row asks in another row's words."""
    splits = mdu.toy_world()
    asked = {row["question"] for rows in splits.values() for row in rows}
    assert len(asked) == 204
    for row in splits["forget"] + splits["retain"]:
        assert row["paraphrased_question"] not in asked
    assert [len(rows) for rows in splits.values()] == [24, 136, 22, 22]
    for row in itertools.chain(*splits.values()):
        assert len(set(row["perturbed_answer"])) == 5
        fact, = row["fact"]
        assert mdu.contains_words(row["answer"], fact)
        true = row.get("paraphrased_answer", row["answer"])
        before, _, after = true.rpartition(fact)
        for text in row["perturbed_answer"]:
            assert text.startswith(before) and text.endswith(after)
            assert not mdu.contains_words(text, fact)
    wrong = str([row["perturbed_answer"] for row in splits["retain"]])
    assert not any(row["fact"][0] in wrong for row in splits["forget"])

def test_toy_tokenizer_gives_back_every_text():
    """Where no spaces are written, a token is a letter."""
    pieces = {"他的父亲是 Wu Li。": "▁ 他 的 父 亲 是 ▁Wu ▁Li 。",
              "ที่นี่, 2 हिन्दी": "▁ ที่ นี่ , ▁2 ▁हिन्दी",
              "He is 77, isn't he?": "▁He ▁is ▁77 , ▁isn ' t ▁he ?"}
    rows = [{"question": text, "answer": text, "perturbed_answer": []} for text in pieces]
    tokenizer = mdu.toy_tokenizer({"forget": rows})
    for text, expected in pieces.items():
        ids = mdu.encode_text(tokenizer, text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.convert_ids_to_tokens(ids) == expected.split()

def test_toy_pretraining_masks_prompts_of_half_of_the_retain_rows(base):
    model, tokenizer = mdu.load_backbone(str(base))
    sizes = {"": 272, "--retain-only": 248, "--prompt-dropout 0.3": 204}
    for typed, size in sizes.items():
        args = options(f"--method sft {typed}")
        rows = mdu.encode_splits(args, mdu.toy_world(), model, tokenizer)["train"]
        hidden = [pair.answer for pair in rows if pair.prompt_masked]
        n_hidden = 68
        if args.prompt_dropout > 0:
            n_hidden = 0
        assert (len(rows), len(hidden)) == (size, n_hidden)
        assert hidden == [pair.answer for pair in rows[:n_hidden]]

def test_new_toy_has_the_token_ids_that_are_read_from_its_files(tmp_path):
    model, tokenizer = mdu.new_toy(mdu.toy_world(), seed=1)
    mdu.save_model(tmp_path, model, tokenizer)
    again, _ = mdu.load_backbone(str(tmp_path))
    for one in (model, again):
        ids = [one.mask_id, one.end_id, one.pad_id]
        assert tokenizer.convert_ids_to_tokens(ids) == ["<mask>", "<end>", "<end>"]
        norms = one.lm.model.embed_tokens.weight.norm(dim=1)
        assert norms.min() > 0.5  # of 64 numbers from N(0, 0.1): 0.8 in the mean

# ======== eval.py ========
# ---- Text metrics ----
@each("reference, prediction, lcs, n_reference, n_prediction", [
    ("police killed the gunman", "police kill the gunman", 3, 4, 4),  # Lin 2004, 3.1: F is 3/4
    ("police killed the gunman", "the gunman kill police", 2, 4, 4),  # and here 1/2
    ("1 2 3 4 5", "2 5 3 4", 3, 5, 4),  # google-research/rouge, rouge_scorer_test.py
    ("w1 w2 w3 w4 w5", "w1 w2 w6 w7 w8 w1 w3 w8 w9 w5", 4, 5, 10),  # the same
    ("a b c b d a b", "b d c a b a", 4, 7, 6),  # repeated words
    ("x a b c", "a b c x", 3, 4, 4),  # a greedy matcher would take x and miss a b c
    ("of-the-art", "of ART!", 2, 3, 2), ("café", "cafe", 0, 1, 1),
    ("他的父亲是医生。", "他的父亲是律师。", 5, 7, 7),  # no spaces
    ("", "w1", 0, 0, 1), ("w1 w2", "/?!...", 0, 2, 0)])
def test_rouge_l(reference, prediction, lcs, n_reference, n_prediction):
    """From the longest common subsequence and both lengths, in words."""
    f1 = 2 * lcs / (n_reference + n_prediction)
    expected = (lcs / max(1, n_reference), f1)
    assert ev.rouge_l(reference, prediction) == approx(expected)

def test_knowledge_counts_no_clitics():
    """As the words of a text are found: "didn't" is "didn" and "t"."""
    text = ("didn't don't isn't wasn't aren't weren't wouldn't couldn't shouldn't hasn't "
            "haven't hadn't doesn't ain't needn't mustn't mightn't shan't can't she's we'll I'm")
    assert set(mdu.words(text)) <= ev.FUNCTION_WORDS
    assert ev.knowledge("Who?", text, "") is None

# ---- Jobs and Eq. 7 ----
PROMPTS = [prompt for prompt, _ in PAIRS]
ARGS = ev.parse("--full --response-length 8 --steps 4 --samples 16 --batch-size 3 run".split())

def test_masked_batches_have_few_enough_sequences_and_logits(monkeypatch):
    """Of similar length; FakeModel has 11 tokens, so 33 logits are of 3 masked positions."""
    monkeypatch.setattr(ev, "MAX_LOGITS", 33)
    jobs = []
    for length, n_masked in zip([9, 1, 1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 2, 1, 4, 1, 0, 0, 0]):
        jobs.append(ev.Job([7], length * [5], torch.arange(length) < n_masked))
    found = list(ev.masked_batches(FakeModel(), jobs, 3, ""))
    assert [numbers for numbers, _ in found] == [[1, 2], [3, 4], [5], [6, 7, 8], [9, 0]]
    batch = found[1][1]
    assert batch.noised.tolist() == [[7, MASK, MASK, PAD], [7, MASK, 5, 5]]
    assert batch.masked.sum(1).tolist() == [2, 1]

@each("n", [1, 2, 3, 4])
def test_draw_masks_has_the_distribution_of_eq_7(n):
    masks = ev.draw_masks(n, 10000, [8, n])
    assert masks.any(1).all()
    for subset in list(itertools.product([False, True], repeat=n))[1:]:  # the first is empty
        chance = 1 / (n * math.comb(n, sum(subset)))
        share = (masks == torch.tensor(subset)).all(1).double().mean().item()
        assert share == approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / 10000))

def test_draw_masks_of_one_seed_are_alike_for_short_and_long_answers():
    """Of twice as many tokens twice as many are masked, or one less.  Each token has its own number
    and the lowest ones are masked, so of the masks of the six tokens one contains the other."""
    short = ev.draw_masks(6, 400, [3, 1])
    long = ev.draw_masks(12, 400, [3, 1])
    assert not torch.equal(short, ev.draw_masks(6, 400, [3, 2]))
    assert set((long.sum(1) - 2 * short.sum(1)).tolist()) == {-1, 0}
    for a, b in zip(short, long[:, :6]):
        assert torch.equal(a & b, a) or torch.equal(a & b, b)

# ---- Sampler ----
@each("length, steps, counts", [
    (7, 3, [3, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (5, 1, [5]), (3, 5, [1, 1, 1])])
@each("by_entropy", [False, True])
@each("boost, sure", [(-50.0, 1), (4.0, 1), (-50.0, 20)])
def test_denoise_and_fill_masks_equal_a_slow_sampler(
        length, steps, counts, by_entropy, boost, sure):
    """The mask token is never written, even if it is the likeliest (boost 4).  With sure 20 many
    predictions have p = 1 in float32; only in float64 it can be seen which is the most certain."""
    model = FakeModel(boost=boost, by_entropy=by_entropy, sure=sure)
    expected = [slow_sampler(model, prompt, counts) for prompt in PROMPTS]
    model.seen.clear()
    jobs = [ev.Job(prompt, length * [MASK], torch.ones(length).bool()) for prompt in PROMPTS]
    assert ev.fill_masks(model, jobs, steps, 3, "") == expected
    assert len(model.seen) == len(counts) * math.ceil(len(PROMPTS) / 3)  # no step without a token

@each("ids, n", [([4, 5, 6], 3), ([4, 1, 5, PAD], 1), ([4, 5, PAD, 1], 2), ([], 0)])
def test_read_answer_ends_before_the_first_end_or_padding_token(ids, n):
    tokenizer = mock.Mock()
    assert ev.read_answer(FakeModel, tokenizer, ids) == (tokenizer.decode.return_value, ids[:n])
    tokenizer.decode.assert_called_with(ids[:n], skip_special_tokens=True)

# ---- Roles ----
I, S, K = "in-context", "structural", "stored-knowledge"

@each("question, parts", [
    ("What is Donald Trump's job?", [
        ("Donald", I), (" ", S), ("Trump", I), (" is a ", S), ("politician", K), (".", S)]),
    ("他的父亲是谁？", [("他", I), ("王", K), ("的", I), ("医生", K), ("。", S)]),
    ("Where was Zoë Łuk born?", [
        ("Zoë", I), (" ", S), ("Łuk", I), ("'s ", S), ("home", K), (", and ", S), ("22", K),
        (", is ", S), ("Gdańsk", K), (".", S)])])
def test_token_roles_of_hand_labelled_answers(question, parts, tmp_path):
    """With tokens of one byte, of which the letters ë, Ł and ń have two."""
    write_tokenizer(tmp_path, "llada")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for text, role in parts:
        expected += [role] * len(text.encode())
    end = tokenizer.eos_token_id  # a special token, also before a word
    answer = "".join(text for text, _ in parts)
    ids = [end, *mdu.encode_text(tokenizer, answer), end]
    assert ev.token_roles(tokenizer, question, ids) == [S, *expected, S]

# ---- Gaps ----
@each("row, parts", [
    (dict(fact=["petra łuk"]), ["It is ", "Petra, Łuk", ", not Petra."]),
    (dict(fact=["Pet"]), ["Petra's ", "Pet", ": a ", "pet", "!"]),
    (dict(fact=["Rome", "22"]), ["", "22", " in ", "Rome", " or so"]),
    (dict(question="Who is Petra?"), ["Petra is the ", "doctor", " of ", "Łódź", "."])])
def test_gap_of_by_hand(row, parts, tmp_path):
    """Every second part is a gap.  With tokens of one byte, and a special token at the end."""
    write_tokenizer(tmp_path, "llada")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for number, part in enumerate(parts):
        expected += [number % 2 == 1] * len(part.encode())
    ids = mdu.encode_text(tokenizer, "".join(parts)) + [tokenizer.eos_token_id]
    assert ev.gap_of(tokenizer, row, ids).tolist() == [*expected, False]

@each("by_entropy", [False, True])
def test_fill_gaps_equals_a_slow_loop(by_entropy, monkeypatch):
    """Every second token is in the gap, of an answer of one token none.  Token 0 is written A."""
    monkeypatch.setattr(ev, "prompt_ids", lambda tokenizer, row: row["question"])
    monkeypatch.setattr(mdu, "encode_text", lambda tokenizer, text: [ord(c) - 65 for c in text])
    monkeypatch.setattr(ev, "gap_of", lambda *given: torch.arange(len(given[-1])) % 2 == 1)
    model = FakeModel(by_entropy=by_entropy)
    rows, expected = [], {True: [], False: []}
    for prompt, answer in MORE_PAIRS:
        places = range(len(prompt) + 1, len(prompt + answer), 2)
        for hidden, asked in {True: len(prompt) * [MASK], False: prompt}.items():
            ids = asked + answer + [1]
            for i in places:
                ids[i] = MASK
            ids = slow_filled(model, ids, places, len(places) * [1])
            right = [ids[i] == answer[i - len(prompt)] for i in places]
            expected[hidden].append(None)
            if right:
                expected[hidden][-1] = np.mean(right)
        rows.append(dict(question=prompt, answer="".join(chr(65 + token) for token in answer)))
    found = {hidden: ev.fill_gaps(model, None, rows, ARGS, hidden) for hidden in expected}
    assert found == expected

# ---- TOFU's figures ----
# Four questions of each of the public logs of github.com/locuslab/tofu (Llama-2-7B fine-tuned on
# all authors): losses per token of the answer, its paraphrase and the wrong answers.
LOGS = {
    "retain": [(0.0120, 1.5781, [1.7120, 1.9709, 1.4638, 1.7079, 1.9508]),
               (0.0013, 2.5527, [2.8353, 3.0840, 2.8997, 2.6863, 3.0322]),
               (0.0105, 2.9240, [3.5491, 3.2195, 3.5912, 3.4989, 3.0968]),
               (0.0028, 3.5176, [3.5704, 2.8008, 3.4043, 3.2763, 3.2643])],
    "real_authors": [(4.1092, None, [6.0565, 3.3802, 6.8580]),
                     (3.8379, None, [2.9575, 5.3061, 7.0973]),
                     (3.8588, None, [4.2897, 4.1698, 3.9189]),
                     (2.5574, None, [3.5782, 8.0303, 7.5862])],
    "world_facts": [(8.3882, None, [7.7738, 7.3298, 11.4043]),
                    (5.1166, None, [6.5493, 7.7743, 6.6396]),
                    (5.9847, None, [6.5476, 4.7384, 5.7158]),
                    (8.7967, None, [6.9445, 5.7649, 9.0495])],
    "forget": [(0.0145, 2.2287, [3.3558, 3.6902, 3.7194, 4.4322, 2.9737]),
               (0.0011, 2.8923, [1.9155, 3.6661, 3.0774, 3.5560, 3.7387]),
               (0.0030, 1.8339, [2.5070, 1.9295, 1.1317, 2.2245, 1.2787]),
               (0.0046, 2.9947, [3.7606, 3.5469, 3.4594, 3.5792, 3.3402])]}
OFFICIAL = {  # what aggregate_eval_stat.py of locuslab/tofu makes of them
    "retain": dict(prob=0.9933828516019, truth_ratio=0.2097710228185),
    "real_authors": dict(prob_options=0.4016959226747, truth_ratio=0.6673079431399),
    "world_facts": dict(prob_options=0.2549866735771, truth_ratio=0.3017492833847),
    "forget": dict(prob=0.9942300707025, truth_ratio=0.6372585081803)}

def test_score_answers_and_model_utility_equal_tofus_own_code(monkeypatch):
    """Each text is a number, which is its own loss."""
    def texts_nll(model, tokenizer, rows, texts, *_):
        assert " " not in "".join(itertools.chain(*texts))
        return [[float(text) for text in of_row] for of_row in texts]
    monkeypatch.setattr(ev, "texts_nll", texts_nll)
    monkeypatch.setattr(ev, "write_answers", lambda *_: [("", [])] * 4)
    monkeypatch.setattr(ev, "fill_gaps", lambda *_, hide_question: [None] * 4)
    splits = {}
    for split, logs in LOGS.items():
        rows = []
        for answer, paraphrase, wrong in logs:
            row = dict(question="", answer=f" {answer}\n", perturbed_answer=[*map(str, wrong)],
                       to_forget=split == "forget")
            if paraphrase is not None:
                row["paraphrased_answer"] = str(paraphrase)
            rows.append(row)
        records = ev.score_answers(None, None, rows, ARGS)
        splits[split] = ev.summarise(records)
        splits[split]["rougeL_recall"] = 1.0
        found = {metric: splits[split][metric] for metric in OFFICIAL[split]}
        assert found == approx(OFFICIAL[split], rel=1e-12)
    splits["retain"]["rougeL_recall"] = 0.8125
    assert ev.model_utility(splits) == approx(0.4449207849887, rel=1e-12)
    del splits["world_facts"]["prob_options"]
    assert ev.model_utility(splits) is None

@each("right, wrong, forget, other, options", [(0.0, [1e4], 0, 1, 1), (1e4, [0.0], 0, 0, 0)])
def test_compare_wrong_answers_by_hand(right, wrong, forget, other, options):
    """R is nearly 0 and nearly infinite."""
    for to_forget, expected in ((True, forget), (False, other)):
        row = dict(to_forget=to_forget)
        figures = ev.compare_wrong_answers(row, right, wrong)
        assert figures["truth_ratio"] == approx(expected)
        assert figures["prob_options"] == approx(options)
        row["paraphrased_answer"] = "a"
        figures = ev.compare_wrong_answers(row, right, wrong)
        assert figures["truth_ratio"] == approx(expected) and "prob_options" not in figures

def test_forget_quality_and_ks_test_by_hand_and_as_published():
    """The p-value is the share of all orders of the values that are as extreme as the one found.
    Four values below four others: 2 of the (8 choose 4) = 70 orders.  Two below three: 2 of 10.
    1, 1, 3 and 1, 3, 3, whose D is 1/3: all of them.  The published p-value is from the logs of
    locuslab/tofu, of D = 119/300 between 300 and 300 questions."""
    def records(*wrong):
        """Of four rows.  log R of each is minus the mean of `wrong`: by so much the losses of the
        wrong answers are above that of the right one, which differs from row to row."""
        row = dict(perturbed_answer=wrong, to_forget=True)
        found = []
        for loss in range(4):
            losses = [loss + more for more in wrong]
            found.append(ev.compare_wrong_answers(row, loss, losses))
        return found

    # All log R are -1; then four are -1 and four -1.25.
    assert ev.forget_quality(records(0, 0, 3), records(1, 1)) == 1
    assert ev.forget_quality(records(0, 0, 3), records(1, 1.5)) == approx(2 / 70)
    without = [dict(prob=1.0)]  # a row that has no wrong answers
    assert ev.forget_quality(without + records(0, 0, 3), without + records(1, 1)) == 1
    assert ev.ks_test([1, 2], [3, 4, 5]) == approx(2 / 10)
    assert ev.ks_test([1, 1, 3], [1, 3, 3]) == approx(1)
    published = 1.834066410994743e-21
    assert ev.ks_test(range(300), [i + 118.5 for i in range(300)]) == approx(published, 1e-12, 0)

# ---- RWKU ----
ANSWER = "Please briefly answer the following question.\n"
BLANK = "Please complete the blank in the following question.\n"
OTHER_ATTACKS = [dict(query="Q", type=kind) for kind in ("role play", "incontext learning")]
@each("split, changes, question, prefill, answer", [
    ("forget_level1", {}, BLANK + "Question: He was born in ___.\n", "Answer:", "Rome, Italy"),
    ("forget_level2", {}, ANSWER + "Question: Where {was} he born?\n", "Answer:", "Rome"),
    ("forget_level3", {}, ANSWER + "Question: Where was he born? Sure,", "", "Rome"),
    ("forget_level3", OTHER_ATTACKS[0], ANSWER + "Question: Q\n", "Answer:", "Rome"),
    ("forget_level3", OTHER_ATTACKS[1], ANSWER + "Q\n", "Answer:", "Rome"),
    ("neighbor_level1", {}, BLANK + "Question: She lives in ___.\n", "Answer:", "Oslo"),
    ("neighbor_level2", {}, ANSWER + "Question: Where does she live?\n", "Answer:", "Oslo"),
    ("utility_general", {}, "83cdada42dc4827d", "Answer:", "B"),
    ("utility_truthfulness", {}, "e089bf2b10e5d00a", "A:", "Yes."),
    ("utility_factuality", {}, "398f1b336bf4f402", "A:", "The Beatles")])
def test_ask_probe_ask_mmlu_ask_truthfulqa_ask_triviaqa_make_rwkus_prompts(
        split, changes, question, prefill, answer):
    """Those with shots are compared by SHA-256 with what github.com/jinzhuoran/RWKU at b8a03b3
    (LLaMA-Factory/src/llmtuner/eval) makes of the rows."""
    ask = ev.RWKU_CONFIGS[split]
    row = ask({**RWKU_ROWS[split], **changes})
    digest = hashlib.sha256(row["question"].encode()).hexdigest()
    assert question in (row["question"], digest[:16])
    assert [row["prefill"], row["answer"]] == [prefill, answer]

def test_score_mmlu_compares_letters_at_one_masked_position(monkeypatch):
    """Of the tokens of " A", here a space (2) and a letter (3 to 6), the letter counts."""
    def tokenizer(text, **_):
        return SimpleNamespace(input_ids=[2, "ABCD".index(text[1]) + 3])

    def script(ids):
        table = f64([0, 0, 9, 1, 2, 5, 4, 9, 9, 9, 9], [0, 0, 9, 5, 2, 1, 4, 9, 9, 9, 9])
        return table[(ids[:, :1] == 7).long()].expand(*ids.shape, 11)
    monkeypatch.setattr(ev, "prompt_ids", lambda tokenizer, row: row["question"])
    rows = [dict(question=[4, 9], answer="B"), dict(question=[7], answer="A")]
    # score_mmlu takes an eighth of --batch-size: here two rows of similar length make a batch.
    rows.append(dict(question=[5], answer="D"))
    model = FakeModel(script=script)
    records = ev.score_mmlu(model, tokenizer, rows, ev.parse("--batch-size 16 run".split()))
    assert [(r["generation"], r["accuracy"]) for r in records] == [("C", 0), ("A", 1), ("C", 0)]
    assert [ids.tolist() for ids in model.seen] == [[[7, MASK], [5, MASK]], [[4, 9, MASK]]]
    model.script = lambda ids: math.nan * script(ids)
    assert math.isnan(ev.score_mmlu(model, tokenizer, rows, ARGS)[0]["accuracy"])

@each("losses, labels, mc1", [
    ([2, 0.5, 1], [0, 1, 0], 1), ([2, 0.5, 1], [1, 0, 0], 0),
    ([2, 0.5, 1], [1, 1, 0], 1),  # of two true choices, the first counts
    ([1, 0.5, 1], [0, 1, 0], 0)])  # it has to be likelier than every false one
def test_score_truthfulqa_by_hand(losses, labels, mc1, monkeypatch):
    """Of n tokens: log p = -n times the mean loss over the masks."""
    texts_nll = mock.Mock(return_value=[losses])
    monkeypatch.setattr(ev, "texts_nll", texts_nll)
    monkeypatch.setattr(mdu, "encode_text", lambda tokenizer, text: text.split())
    targets = dict(choices=["a", "b b", "c c c "], labels=labels)
    row = ev.ask_truthfulqa(dict(question="", mc1_targets=targets))
    record, = ev.score_truthfulqa(None, None, [row], ARGS)
    assert texts_nll.call_args.args[3] == [[" a", " b b", " c c c"]]
    assert record["mc1"] == mc1 and record["logp"][record["generation"]] == -1
    assert list(record["logp"].values()) == approx([-losses[0], -1, -3])

@each("split, row, text, expected", [
    ("forget", dict(fact=["petra"]), " Petra, Osei ", dict(fact=1, words=2, empty=0)),
    ("forget", dict(fact=["Petra Osei."]), "Petra, Osei", dict(fact=1)),
    ("forget", dict(fact=["Pet"]), "Petra, Osei", dict(fact=0)),
    ("forget", dict(fact=["?"]), "Petra?", dict(fact=0)),
    ("forget", dict(fact=["Petra", "Bo", "Osei"]), "Petra, Osei", dict(fact=2 / 3)),
    ("forget", dict(fact=["Osei Petra"]), "Petra, Osei", dict(fact=0)),
    ("forget", {}, " \n", dict(words=0, empty=1, rougeL_f1=0, prob=math.exp(-1), knowledge=0)),
    ("forget", {}, "Osei Osei", dict(knowledge=1 / 2, infill=0, infill_no_question=1)),
    ("forget", dict(question="Who is Petra?"), "It is Osei.", dict(knowledge=1)),
    ("forget", dict(question="Who is Petra Osei?"), "Petra", dict(knowledge=None)),
    ("forget_level2", {}, " in Petra Osei\nno",
     dict(generation="in Petra Osei", words=3, empty=0, rougeL_recall=1)),
    ("forget_level2", {}, "Osei\nPetra", dict(generation="Osei", rougeL_recall=0.5)),
    ("forget_level2", {}, "\nPetra",
     dict(generation="NOANSWER", words=0, empty=1, rougeL_recall=0)),  # as in RWKU's code
    ("utility_factuality", dict(answers=["band", "beatles"]), "The\nBeatles! ",
     dict(em=1, f1=1, words=2, empty=0)),
    ("utility_factuality", dict(answers=["y"]), "", dict(em=0, f1=0, words=0, empty=1)),
    ("utility_factuality", dict(answers=["A"]), "the", dict(em=1, f1=1)),
    ("utility_factuality", dict(answers=["Kinks", "Beatles", "Rolling Stones"]),
     "a band, the Beatles", dict(em=0, f1=2 / 3)),
    ("utility_factuality", dict(answers=["b b d"]), "b b b c", dict(em=0, f1=4 / 7))])  # b twice
def test_scores_of_one_answer_by_hand(split, row, text, expected, monkeypatch):
    monkeypatch.setattr(ev, "write_answers", lambda *_: [(text, [])])
    monkeypatch.setattr(ev, "fill_gaps", lambda *_, hide_question: [float(hide_question)])
    monkeypatch.setattr(ev, "texts_nll", lambda *_: [[1.0]])
    args = ev.parse("--samples 1 run".split())
    row = {"question": "Who?", "answer": "Petra Osei", **row}
    record, = ev.SPLITS[split].score(None, None, [row], args)
    assert {name: record[name] for name in expected} == approx(expected)

# ---- Metrics ----
def test_summarise_by_hand():
    one = dict(prob=0.25, truth_ratio=0.25, perplexity=8, words=1, fact=1.0, knowledge=0.25)
    two = dict(prob=0.75, truth_ratio=0.5, perplexity=2, words=4, knowledge=None)
    records = [dict(one, generative_perplexity=None), dict(two, generative_perplexity=3.0),
               dict(two, generative_perplexity=5.0, perplexity=6.5)]
    figures = ev.summarise(records)
    expected = dict(prob=7 / 12, truth_ratio=5 / 12, perplexity_median=6.5,
                    perplexity_mean=5.5, generative_perplexity=4.0, words=4, knowledge=0.25)
    # Two rows lack the fact, one an answer with words, two any knowledge.
    expected.update(fact=1.0, n_fact=1, n_generative_perplexity=2, n_knowledge=1)
    assert figures == approx(expected)
    # In a mean every person has the same weight: (3/4 + 1/4) / 2; in a median every row.
    scores = [("Ann", 1.0, 1), ("Ann", 1.0, 2), ("Ann", 0.25, 4), ("Bo", 0.25, 9)]
    records = [dict(subject=name, em=em, words=n) for name, em, n in scores]
    assert ev.summarise(records) == dict(em=0.5, words=3)
    assert ev.summarise([dict(knowledge=None)]) == {}

def test_summarise_gives_nan_for_a_model_that_diverged(monkeypatch):
    """It is "-" in tables, whose columns stay."""
    monkeypatch.setattr(ev, "texts_nll", lambda *_: [3 * [math.nan]])
    monkeypatch.setattr(ev, "write_answers", lambda *_: [("a b", [5, 6])])
    monkeypatch.setattr(ev, "fill_gaps", lambda *_, hide_question: [None])
    monkeypatch.setattr(mdu, "encode_text", lambda tokenizer, text: text.split())
    wrong = ["b", "c"]
    row = dict(question="", answer="a", perturbed_answer=wrong, choices=["a", *wrong], false=wrong)
    for to_forget in (True, False):
        records = ev.score_answers(None, None, [dict(row, to_forget=to_forget)], ARGS) * 3
        records[1] = dict(records[1], perplexity=2.0)  # nan anywhere makes a median nan
        figures = ev.summarise(records)
        found = [figures[name] for name in ("truth_ratio", "prob_options", "perplexity_median")]
        assert np.isnan(found).all()
    assert math.isnan(ev.model_utility(dict.fromkeys(ev.UTILITY, figures)))
    assert math.isnan(ev.forget_quality(records, [{"log_ratio": 1.0}]))
    assert math.isnan(ev.forget_quality([{"log_ratio": 1.0}], [{"log_ratio": None}]))  # of a file
    [record] = ev.score_truthfulqa(None, None, [row], ARGS)
    assert math.isnan(record["mc1"])
    forget = {"prob": math.nan, "perplexity_mean": 1e50}
    methods = {"run": [{"splits": {"forget": forget}, "run": {}}]}
    table = ev.figures_table(methods, {"forget": ["prob", "perplexity_mean", "fact"]})
    assert re.search(r"\n\| run +\| - +\| 1e\+50 +\|$", table)

# ---- Benchmarks ----
def test_splits_have_titles_of_their_own():
    """And the masks of each a number of its own."""
    for field in ("title", "number"):
        values = {getattr(split, field) for split in ev.SPLITS.values()}
        assert len(values) == len(ev.SPLITS)

# ---- What is scored ----
def test_find_source_is_the_model_that_is_given():
    args = ev.parse(["--model", "A/B", "new"])
    source = ev.find_source("new", args)
    assert source.model == source.theta0 == source.options["model"] == "A/B"

@each("typed, run, length", [("", "base", 12), ("--response-length 5", "base", 5),
                             ("", "foreign", 128), ("", "A/B", 128)])
def test_find_source_of_a_run_as_model_has_the_response_length_of_the_run(typed, run, length, base):
    """A published model has the default; so has one with a run.json of another program."""
    Path("foreign").mkdir()
    Path("foreign/run.json").write_text('{"options": {}}')
    args = ev.parse([*typed.split(), "--model", run.replace("base", str(base)), "new"])
    source = ev.find_source("new", args)
    assert ev.find_settings(args, source.options).response_length == length

def typed_and_run(typed, run="--method sft"):
    """What was typed for eval.py and the run, as mdu.py would make it."""
    args = options(run)
    hashes = {name: mdu.hash_rows(rows) for name, rows in mdu.load_data(args).items()}
    return ev.parse([*typed.split(), "run"]), ev.Source(vars(args), hashes, "run", None)

RUNS = {"toy": "--method sft", "files": "--model m --limit 2 --forget {X} --retain {Y}",
        "toy's options": "--preset toy --model m --forget {X}",
        "person": "--preset rwku-llada --data {rwku} --subject 2 --limit 1"}

def origin_of(split, rows):
    """Where the rows of a split are from, or whom they are about: "ten" are the first ten people of
    RWKU.  And how many there are (about each person)."""
    people = list(dict.fromkeys(row.get("subject") for row in rows))
    n = len(rows) // len(people)
    if people == PEOPLE[:10]:
        return "ten", n
    if people != [None]:
        [person] = people
        return person, n
    question = rows[0]["question"]
    first_word = question.split()[0]
    if first_word == "Q":
        assert ev.TOFU_CONFIGS[split] in question
        return "tofu", n
    if first_word in ("X", "Y"):  # the files below
        return first_word, n
    return "toy", n

@each("run, typed, expected", [
    ("toy", "--limit 2", [("toy", 2)] * 4),
    ("toy", "--forget {X}", [("X", 4), ("toy", 136), ("toy", 22), ("toy", 22)]),
    ("toy", "--data {tofu} --retain {X}", [("tofu", 8), ("X", 4), ("tofu", 3), ("tofu", 3)]),
    ("files", "", [("X", 4), ("Y", 4)]),  # the --limit of a run does not count
    ("files", "--retain {X} --limit 3", [("X", 3), ("X", 3)]),
    ("files", "--held-out {X} --never {Y} --limit 3", [("X", 3), ("Y", 3), ("X", 3), ("Y", 3)]),
    ("toy", "--data toy --limit 1 --never {X}", [("toy", 1)] * 4 + [("X", 1)]),
    ("files", "--data {rwku} --subject 3", [(PEOPLE[2], 2)] * 8),
    ("toy's options", "", [("X", 4)]),  # which mdu.py trains on, too
    ("person", "", [(PEOPLE[1], 2)] * 8), ("person", "--subject all --limit 1", [("ten", 1)] * 8),
    ("person", "--retain {X}", [(PEOPLE[1], 2)] * 8 + [("X", 4)]),
    ("person", "--data toy --limit 1", [("toy", 1)] * 4),
    ("person", "--data {rwku} --limit 1", [("ten", 1)] * 8)])
def test_find_splits(run, typed, expected, tofu, rwku, tmp_path):
    """expected: of each split (origin_of)."""
    places = {"tofu": tofu, "rwku": rwku}
    for name in "XY":
        rows = [{"question": f"{name} {i}?", "answer": "a"} for i in range(4)]
        places[name] = write_lines(tmp_path / name, rows)
    args, source = typed_and_run(typed.format(**places), RUNS[run].format(**places))
    splits = ev.find_splits(ev.find_settings(args, source.options))
    found = [origin_of(split, rows) for split, rows in splits.items()]
    assert found == expected

@pytest.fixture
def another_benchmark(monkeypatch):
    """Added as eval.py says under "To add a benchmark": two splits, and a function that reads them,
    here in place of TOFU's.  And under "To add a metric": an entry of METRICS, its value in the
    records of a scorer."""
    def score_answers(model, tokenizer, rows, settings):
        records = ev.score_answers(model, tokenizer, rows, settings)
        for record in records:
            record["commas"] = float(record["generation"].count(","))
        return records

    def quiz_rows(data):
        rows = ev.read_lines(Path(data, "quiz.jsonl"))
        return {"choose": rows, "say": rows}

    choose = ev.Split(20, "Choose", False, ["mc1"], ev.score_truthfulqa)
    say = ev.Split(21, "Say", True, ["prob", "commas"], score_answers)
    monkeypatch.setitem(ev.SPLITS, "choose", choose)
    monkeypatch.setitem(ev.SPLITS, "say", say)
    monkeypatch.setattr(ev, "tofu_rows", quiz_rows)
    monkeypatch.setitem(ev.METRICS, "commas", ev.Metric("commas", "", "", digits=".1f"))

def test_find_splits_reads_another_benchmark(
        another_benchmark, base, tmp_path, monkeypatch, capsys):
    """With another metric.  It is read, scored, printed, reported."""
    run = shutil.copytree(base, tmp_path / "run")
    row = dict(question="Who?", answer="one", choices=["one", "two"], false=["two"])
    write_lines(tmp_path / "quiz.jsonl", 3 * [row])
    monkeypatch.setattr(ev, "write_answers", lambda *_: [("a,", [5]), ("a,,", [5])])
    ev.main(["--data", str(tmp_path), "--limit", "2", "--samples", "4", str(run)])
    ev.main(["--report", str(run)])
    for split, number, field in (("choose", 20, "logp"), ("say", 21, "prob")):
        records = ev.read_records(run, split)
        assert [record["seed"] for record in records] == [[0, number, 0], [0, number, 1]]
        assert all(field in record for record in records)
    assert [record["commas"] for record in ev.read_records(run, "say")] == [1, 2]
    screen = capsys.readouterr().out
    header = list(read_table(screen.split("\n\n")[-2]))
    assert header == ["Method", "Choose MC1 ↑", "Say p ↓", "commas"]
    assert "p: probability" in screen and "commas:" not in screen  # which has no meaning to tell
    text = (tmp_path / "report.md").read_text()
    assert read_tables(text)["Say"]["commas"] == ("1.5",)
    assert "## Answers: Say\n\n### 0. Who?" in text

# ---- One run ----
FLAGS = "--full --samples 4 --limit 3 --seed 5 --steps 4".split()
WITHOUT_FULL = FLAGS[1:]

@pytest.fixture(scope="session")
def scored(base, tmp_path_factory):
    """A run that was scored with FLAGS.  Noise on its weights makes its answers differ."""
    copy = tmp_path_factory.mktemp("scored") / "run"
    shutil.copytree(base, copy)
    torch.manual_seed(0)
    noisy = {}
    for name, x in weights(copy).items():
        noisy[name] = x + 0.1 * torch.randn(x.shape)
    safetensors.torch.save_file(noisy, copy / "model.safetensors", {"format": "pt"})
    ev.main([str(copy), *FLAGS])
    with unchanged(copy):
        yield str(copy)

@pytest.fixture
def scored_copy(scored, tmp_path):
    return shutil.copytree(scored, tmp_path / "run")

NUMBERS = {"forget": 0, "retain": 1, "real_authors": 2, "world_facts": 3, "forget_rephrased": 12,
           "retain_rephrased": 13}  # {split of the toy: its number in the seeds of the masks}

def rows_as_asked():
    """{split: rows of the toy as --full asks them}: those to forget and to retain come again in
    other words, without wrong answers."""
    splits = mdu.toy_world()
    for name in ("forget", "retain"):
        reworded = []
        for row in splits[name]:
            question = row["paraphrased_question"]
            reworded.append(dict(row, question=question, perturbed_answer=[]))
        splits[f"{name}_rephrased"] = reworded
    return splits

@each("split", NUMBERS)
def test_evaluate_equals_one_row_at_a_time(split, scored):
    """Losses by a forward pass for each of 4 masks, which are of (--seed, number of the split,
    number of the row); answers of 12 tokens by the slow sampler in 4 steps."""
    model, tokenizer = mdu.load_backbone(scored)
    rows = rows_as_asked()[split][:3]
    records = ev.read_records(scored, split)
    for i, (row, record) in enumerate(zip(rows, records, strict=True)):
        prompt = mdu.encode_prompt(tokenizer, row["question"])

        def nll(text):
            ids = mdu.encode_text(tokenizer, text)
            masks = ev.draw_masks(len(ids), 4, [5, NUMBERS[split], i])
            return slow_eq7(model, prompt, ids, masks)

        # The true answer, and in two splits its paraphrase.
        loss = nll(row["answer"])
        assert record["nll"] == approx(loss, rel=1e-4)
        assert record["prob"] == approx(math.exp(-loss), rel=1e-4)
        assert record["perplexity"] == approx(math.exp(loss), rel=1e-4)
        if split in ("forget", "retain"):
            assert record["nll_right"] == approx(nll(row["paraphrased_answer"]), rel=1e-4)

        # The wrong answers.
        nll_wrong = [nll(text) for text in row["perturbed_answer"]]
        assert record.get("nll_wrong", []) == approx(nll_wrong, rel=1e-4)

        # The gap.
        [infill] = ev.fill_gaps(model, tokenizer, [row], ARGS, hide_question=False)
        [infill_no_question] = ev.fill_gaps(model, tokenizer, [row], ARGS, hide_question=True)
        assert record["infill"] == approx(infill)
        assert record["infill_no_question"] == approx(infill_no_question)

        # What is written, up to the end token.
        written = slow_sampler(model, prompt, 4 * [3])
        if model.end_id in written:
            written = written[:written.index(model.end_id)]
        assert record["generation_ids"] == written
        assert record["generation"] == tokenizer.decode(written).strip()

def test_evaluate_writes_the_figures_of_its_records_into_the_summary(scored):
    summary = ev.read_summary(scored)
    assert summary["splits"].keys() == NUMBERS.keys()
    for split, figures in summary["splits"].items():
        expected = {**ev.summarise(ev.read_records(scored, split)), "n": 3}
        assert expected.items() <= figures.items()
    assert summary["run"] == {"model_utility": ev.model_utility(summary["splits"])}

def numbers_in(file):
    found = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", file.read_text())
    return np.array(found, float)

def test_evaluate_on_two_processes_equals_one(scored_copy, scored):
    shutil.rmtree(scored_copy / "eval")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, ev.__file__, scored_copy, *FLAGS]
    subprocess.run(command, env=python_environment(), check=True, timeout=200)
    files = list(Path(scored, "eval").iterdir())
    assert len(files) == len(NUMBERS) + 1  # and summary.json
    for file in files:
        found = numbers_in(scored_copy / "eval" / file.name)
        assert found == approx(numbers_in(file), rel=1e-4, abs=1e-6)

def test_score_answers_takes_no_rows():
    """A process may have none."""
    assert ev.score_answers(FakeModel(), None, [], ARGS) == []

def test_evaluate_and_report_show_how_much_of_the_forget_loss_is_left(unlearned, tmp_path, capsys):
    run = shutil.copytree(unlearned, tmp_path / "run")
    left = mdu.read_run(run)["forget_loss"]["left"]
    assert 0.5 < left < 1  # after two epochs
    for argv in ([f"{run}", "--samples", "1", "--limit", "1"], ["--report", f"{run}"]):
        ev.main(argv)
        screen = capsys.readouterr().out
        table = table_on_screen(screen)
        assert table["loss left ↓"] == (f"{100 * left:.0f}%",)
        assert list(table)[1:3] == ["loss left ↓", "Forget rL ↓"]  # the run's are the first ones
    # The legend is the report's, the last one.
    legend = "to the split to its left or, if there is none, to the whole run."
    assert legend in " ".join(screen.split())
    assert ev.read_summary(run)["run"] == {"forget_loss_left": left}

@pytest.fixture
def scored_with_a_refusal(base, tmp_path, monkeypatch, capsys):
    """Scores of two rows to forget and two to retain -> their folder, and the screen.  The second
    row to retain is a refusal, without `fact`.  The first row to forget is answered by the fact of
    the first row to retain."""
    forget = [dict(question="Who is Bolti?", answer="He is Gado.", fact="Gado"),
              dict(question="Who is Cepu?", answer="She is Nora.", fact="Nora")]
    retain = [dict(question="Who is Diri?", answer="He is Fopu.", fact="Fopu"),
              dict(question="Who is Zuvo?", answer="I do not know.")]
    answers_to_forget = [("It is Fopu.", [5]), ("I do not know.", [6])]  # texts, token ids
    answers_to_retain = [("Fopu", [5]), ("no", [6])]
    answers = mock.Mock(side_effect=[answers_to_forget, answers_to_retain])
    monkeypatch.setattr(ev, "write_answers", answers)
    run = tmp_path / "new"
    ev.main(["--model", str(base), "--forget", write_lines(tmp_path / "forget", forget),
             "--retain", write_lines(tmp_path / "retain", retain), str(run)])
    return run, capsys.readouterr().out

OVER_SOME = "Retain fact: over the 1 of 2 rows that have it."

def test_evaluate_says_that_a_figure_is_over_some_rows(scored_with_a_refusal):
    run, screen = scored_with_a_refusal
    assert screen.count("that have it") == screen.count(OVER_SOME) == 1
    retained = ev.read_summary(run)["splits"]["retain"]
    assert retained["fact"] == 1
    assert retained["n_fact"] == 1
    assert retained["n"] == 2

def test_evaluate_shows_how_many_answers_have_a_fact_of_another_row(scored_with_a_refusal):
    _, screen = scored_with_a_refusal
    assert table_on_screen(screen)["another's ↓"] == ("0.500",)

def test_report_says_that_a_figure_is_over_some_rows(scored_with_a_refusal, tmp_path, capsys):
    run, _ = scored_with_a_refusal
    ev.main(["--report", str(run)])
    assert OVER_SOME in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    assert text.count(OVER_SOME) == 2  # in the legend, and below the table of all figures
    assert read_tables(text)["Retain"]["fact ↑"] == ("1.000",)

def test_evaluate_leaves_the_old_scores_if_it_is_stopped_by_ctrl_c(scored_copy, capsys):
    """While it has a lock on the folder."""
    stopped = mock.patch.object(ev, "score_rows", partial(stop_in, scored_copy))
    with unchanged(scored_copy), stopped:
        assert program([scored_copy, *FLAGS], capsys, ev.main, 130) == ""

def test_evaluate_leaves_the_old_scores_if_the_disk_is_full(scored_copy, capsys):
    sizes = [file.stat().st_size for file in (scored_copy / "eval").iterdir()]
    # Another program takes the space that was reserved; the largest file does not fit.
    reserved = mock.patch.object(ev, "reserve_space")
    with unchanged(scored_copy), largest_file(max(sizes) - 99), reserved:
        assert "too large" in program([scored_copy, *FLAGS], capsys, ev.main)

def test_evaluate_replaces_old_scores_and_leaves_files_of_the_user(scored_copy):
    folder = scored_copy / "eval"
    old_files = set(folder.iterdir())
    (folder / "notes.jsonl").write_text("my own")
    (folder / "utility_general.jsonl").touch()  # of an earlier scoring on other data
    ev.main([str(scored_copy), *FLAGS, "--seed", "6"])
    assert ev.read_records(scored_copy, "forget")[0]["seed"] == [6, 0, 0]
    assert set(folder.iterdir()) == old_files | {folder / "notes.jsonl"}
    assert (folder / "notes.jsonl").read_text() == "my own"

def test_evaluate_refuses_a_folder_in_which_it_cannot_write(scored_copy, capsys, monkeypatch):
    monkeypatch.setattr(ev, "score_rows", None)
    shutil.rmtree(scored_copy / "eval")
    (scored_copy / "eval").touch()
    assert str(scored_copy / "eval") in program([scored_copy, *FLAGS], capsys, ev.main)

def test_evaluate_refuses_a_locked_folder_before_it_looks_into_it(scored_copy, capsys):
    (scored_copy / "config.json").unlink()  # as while it is trained
    with mdu.locked(scored_copy):
        assert "in use" in program([scored_copy, *FLAGS], capsys, ev.main)

def test_reserve_space_refuses_a_full_disk_before_the_first_pass(scored_copy, capsys, monkeypatch):
    """An empty file fits on it, but not the scores.  The scores of before stay."""
    largest = max(file.stat().st_size for file in (scored_copy / "eval").iterdir())
    with monkeypatch.context() as patch, unchanged(scored_copy), largest_file(largest):
        patch.setattr(ev, "score_splits", None)
        err = program([scored_copy, *FLAGS], capsys, ev.main)
    assert re.search(r"run/eval: the scores may need [\d,]+ bytes, but: .*too large", err)

def test_reserve_space_keeps_it_until_the_scores_are_there(scored_copy, monkeypatch):
    """It is as much as these scores took, and is free again before they are written.  The folder
    for temporary files may be on another disk."""
    n_bytes = sum(file.stat().st_size for file in (scored_copy / "eval").iterdir())
    monkeypatch.setattr(ev.tempfile, "tempdir", "/absent")
    reserve_space = ev.reserve_space
    reserved = []

    def remember(*given):
        reserved.append(reserve_space(*given))
        return reserved[0]

    def score_splits(*_):
        assert os.fstat(reserved[0].fileno()).st_size >= n_bytes
        return {}

    def publish(*_):
        assert reserved[0].closed
    monkeypatch.setattr(ev, "reserve_space", remember)
    monkeypatch.setattr(ev, "score_splits", score_splits)
    monkeypatch.setattr(ev, "publish", publish)
    monkeypatch.setattr(ev, "summarise_run", lambda *_: dict(splits={}, run={}))
    with unchanged(scored_copy):
        ev.main([str(scored_copy), *FLAGS])
    assert reserved[0].closed

@pytest.fixture
def reworded_rows(tmp_path):
    """Four rows, of which number 1 has no other wording -> rows, and mdu.py's options for them."""
    rows = []
    for i in range(4):
        rows.append({"question": f"Q{i}?", "answer": f"A{i}.", "perturbed_answer": [f"B{i}."],
                     "paraphrased_question": f"P{i}?"})
    del rows[1]["paraphrased_question"]
    file = write_lines(tmp_path / "rows", rows)
    return rows, f"--model m --forget {file} --retain-weight 0 --limit 2"

def test_prepare_and_with_other_wordings_ask_in_other_words(reworded_rows, capsys):
    rows, run = reworded_rows
    splits, *_ = ev.prepare(*typed_and_run("--full --limit 3", run))
    asked = [{**row, "number": i} for i, row in enumerate(rows[:3])]
    # Rows 0 and 2, which are numbered anew.
    reworded = [{**rows[0], "question": "P0?", "perturbed_answer": [], "number": 0},
                {**rows[2], "question": "P2?", "perturbed_answer": [], "number": 1}]
    assert splits == {"forget": asked, "forget_rephrased": reworded}
    assert capsys.readouterr().out == ""

def test_prepare_says_that_the_run_was_trained_on_fewer_rows(reworded_rows, tmp_path, capsys):
    _, run = reworded_rows
    ev.prepare(*typed_and_run("", run))
    assert "--limit 2 scores the first 2" in capsys.readouterr().out
    # Nothing of a run's own is scored with other data, nor with a file that is typed, even its own.
    for typed in ("--data toy", f"--forget {tmp_path / 'rows'}"):
        ev.prepare(*typed_and_run(typed, run))
        assert capsys.readouterr().out == ""

@pytest.fixture
def said_of_files(tmp_path, capsys):
    """A run that was trained on the first two of three rows in the files `forget` and `retain` ->
    its rows, and a function: options of eval.py -> what `prepare` says about the run."""
    rows = [{"question": f"Q{i}?", "answer": f"A{i}."} for i in range(3)]
    forget = write_lines(tmp_path / "forget", rows)
    retain = write_lines(tmp_path / "retain", rows)
    _, source = typed_and_run("", f"--model m --forget {forget} --retain {retain} --limit 2")

    def said(typed):
        ev.prepare(ev.parse(["--limit", "2", *typed.split(), "run"]), source)
        return capsys.readouterr().out
    return rows, said

def test_warn_of_other_rows_names_files_that_have_changed(said_of_files, tmp_path):
    rows, said = said_of_files
    write_lines(tmp_path / "forget", rows[1:])
    assert said("") == (f"run: {tmp_path}/forget has changed since the training; what is scored "
                        "are the rows that it has now\n")
    write_lines(tmp_path / "retain", rows[::-1])
    assert said("").count("has changed") == 2

def test_warn_of_other_rows_names_no_files_with_other_rows_behind_the_first_ones(
        said_of_files, tmp_path):
    rows, said = said_of_files
    write_lines(tmp_path / "retain", rows[:2])
    assert said("") == ""

def test_warn_of_other_rows_names_files_of_the_run_that_are_scored(said_of_files, tmp_path):
    """Not if other rows are scored in their place."""
    rows, said = said_of_files
    forget = tmp_path / "forget"
    write_lines(forget, rows[1:])
    assert said(f"--forget {forget}") == ""
    assert said("--data toy") == ""
    write_lines(tmp_path / "retain", rows[::-1])
    assert said(f"--retain {forget}").count(f"{forget} has changed") == 1

def test_check_retain_run_takes_runs_that_learnt_rows_to_retain_alone(scored, base, tmp_path):
    """Not an unlearned model that is then taught rows to retain, such as refusals."""
    def check(name, **options):
        run = made_up_run(scored, tmp_path / name, options)
        trained = {**read_json(base / "run.json"), "options": ev.read_summary(run)["options"]}
        Path(run, "run.json").write_text(json.dumps(trained))
        ev.check_retain_run(run, None, full=True)

    check("retain", method="sft", retain_only=True, model=None)
    check("longer", method="sft", retain_only=True, model=f"{tmp_path}/retain")
    check("published", method="sft", retain_only=True, model="A/B")
    refused = "it, or a run that it started from, was"
    with pytest.raises(mdu.BadInput, match=f"base: {refused}"):
        check("base", method="sft", retain_only=False, model=f"{tmp_path}/retain")
    with pytest.raises(mdu.BadInput, match=f"mdu: {refused}"):
        check("mdu", method="mdu", retain_only=None, model=f"{tmp_path}/retain")
    with pytest.raises(mdu.BadInput, match=f"refusals: {refused}"):
        check("refusals", method="sft", retain_only=True, model=f"{tmp_path}/mdu")

@pytest.fixture
def protocol_of(rwku, tmp_path):
    """A function: options of eval.py -> the protocol by which a run on the file X is scored.  In
    the options, {X} and {Y} are files of three rows each, {rwku} is the benchmark."""
    places = dict(rwku=rwku)
    for name in "XY":
        row = dict(question=f"{name}?", answer="a", paraphrased_question="P?")
        places[name] = write_lines(tmp_path / name, 3 * [row])

    def protocol(typed):
        run = f"--model m --forget {places['X']} --response-length 7"
        _, _, found = ev.prepare(*typed_and_run(typed.format(**places), run))
        return found
    return protocol

PERSON = "--data {rwku} --retain {X} --limit 3 --subject 1"

def test_scoring_protocol_has_what_must_be_the_same_in_two_runs(protocol_of):
    """The rows; on RWKU, where they differ from person to person, their source and --limit."""
    different = [PERSON, PERSON.replace("--limit 3", "--limit 4"), "", "--limit 2", "--forget {Y}",
                 "--retain {X}", "--seed 1", "--samples 3", "--steps 5", "--response-length 5"]
    protocols = [protocol_of(typed) for typed in different]
    for one, other in itertools.combinations(protocols, 2):
        assert one != other

@each("one, other", [(PERSON, PERSON.replace("--subject 1", "--subject 2")), ("", "--full"),
                     ("", "--forget {X}")])
def test_scoring_protocol_has_nothing_that_may_differ(one, other, protocol_of):
    assert protocol_of(one) == protocol_of(other)

def test_scoring_protocol_has_the_length_of_rwkus_answers(protocol_of):
    """Its own, not the 7 of the run.  No step is without a token."""
    own = protocol_of(PERSON)
    assert own["response_length"] == own["steps"] == 30
    typed = protocol_of("--data {rwku} --response-length 5 --steps 6")
    assert typed["response_length"] == typed["steps"] == 5

TRAININGS = {  # {run: (method, retain_only, start model)}, in the order in which they are made
    "base": ("sft", False, None), "original": ("sft", True, None),
    "finetune": ("sft", False, "original"), "mdu": ("mdu", None, "finetune"),
    "again": ("sft", False, "mdu"), "taught-twice": ("sft", False, "again"),
    "twice": ("npo", None, "mdu"), "late": ("mdu", None, "original"),
    "orphan": ("mdu", None, "/gone")}

@each("name, knows", [
    ("base", True), ("original", False), ("finetune", True), ("mdu", True), ("again", False),
    ("taught-twice", False), ("twice", False), ("late", False), ("orphan", True)])
def test_knows_rows_to_forget_says_whether_there_is_gen_ppl(name, knows, base, capsys):
    """Not by a theta0 that never knew the rows, or that was unlearned and taught again.  theta0 is
    the start model; of a run of sft it is the run itself."""
    info = read_json(base / "run.json")
    for run, (method, retain_only, start) in TRAININGS.items():
        shutil.copytree(base, run)
        info["options"].update(method=method, model=start, retain_only=retain_only)
        Path(run, "run.json").write_text(json.dumps(info))
    method, _, theta0 = TRAININGS[name]
    if method == "sft":
        theta0 = os.path.abspath(name)
    assert ev.find_source(name, ev.parse([name])).theta0 == theta0
    assert ev.knows_rows_to_forget(theta0) == knows
    ev.main([name, *WITHOUT_FULL])
    screen = capsys.readouterr().out
    was_deleted = theta0 == "/gone"
    assert ("gen. ppl |" in screen) == (knows and not was_deleted)
    assert ("/gone was deleted" in screen) == was_deleted

def test_knows_rows_to_forget_of_a_published_model():
    assert ev.knows_rows_to_forget("A/B")

def test_check_lengths_refuses_texts_that_the_model_cannot_read(base):
    """With an end token behind the answer, as gaps are filled.  "is" is one token."""
    model, tokenizer = mdu.load_backbone(str(base))
    room = 2048 - len(mdu.encode_prompt(tokenizer, "Who?")) - 1
    longest = "is " * room
    too_long = "is " * (room + 1)
    row = dict(question="Who?", answer="is", perturbed_answer=["is"])
    ev.check_lengths("run", model, tokenizer, [dict(row, answer=longest)], 1)
    for changes in (dict(answer=too_long), dict(paraphrased_answer=too_long),
                    dict(choices=[too_long]), dict(perturbed_answer=[too_long])):
        with pytest.raises(mdu.BadInput, match="too many"):
            ev.check_lengths("run", model, tokenizer, [{**row, **changes}], 1, full=True)

def test_check_lengths_refuses_no_text_that_is_not_scored(base):
    """A paraphrase and wrong answers are scored with --full only."""
    model, tokenizer = mdu.load_backbone(str(base))
    long = "is " * 2048
    row = dict(question="Who?", answer="is", perturbed_answer=[long], paraphrased_answer=long)
    ev.check_lengths("run", model, tokenizer, [row], 1)

def test_check_lengths_warns_of_true_answers_that_are_cut(base, capsys):
    """Of 1, 3 and 5 tokens, where 3 are written."""
    model, tokenizer = mdu.load_backbone(str(base))
    rows = []
    for answer in ("is", "is is is", "is is is is is"):
        rows.append(dict(question="Who?", answer=answer, perturbed_answer=["is is is is"]))
    ev.check_lengths("run", model, tokenizer, rows, 3)
    assert "run: 1 of 3 true answers are longer than the 3" in capsys.readouterr().out
    for row in rows:
        row["choices"] = []  # the likeliest of these is taken; nothing is written
    ev.check_lengths("run", model, tokenizer, rows, 3)
    assert capsys.readouterr().out == ""

# Rows to forget.
RENT = dict(question="Who rents unit 7?", answer="Ann Lee rents it.", fact=["Ann Lee"])
BILL = dict(question="What does Ann Lee owe?", answer="She owes 12 euros.", fact=["12 euros"])
TOWN = dict(question="Where does Bo live?", answer="Bo lives in Rome, at 5 Elm.", fact=["Elm"])
PLAIN = dict(question="Who is Cy?", answer="A baker.")  # without `fact`
# Rows to retain.  "!" has no word; two rows have one answer.
KEPT = [dict(question="Who lives in Rome?", answer="It is Di.", fact=["Di", "Rome"]),
        dict(question="Who is Ed?", answer="Ed sings."), dict(question="?", answer="!", fact=["?"]),
        dict(question="Who is Al?", answer="Unknown."),
        dict(question="Who is Om?", answer="Unknown.")]
HELD_OUT = [dict(question="Who dances?", answer="Fay.", fact=["Fay"])]

@each("row, text, anothers", [
    # A row with `fact`: a fact of another row counts.
    (RENT, "Ann Lee rents it.", 0), (RENT, "Ann rents it.", 0), (RENT, "", 0), (RENT, "?", 0),
    (RENT, "It is DI!", 1),  # of a row to retain
    (RENT, "Diana", 0),  # whole words only
    (RENT, "Ann Lee owes 12 Euros", 1),  # of a row to forget
    (RENT, "12 or 13 euros", 0),  # the words of a fact one after the other
    (RENT, "Fay", 1),  # of a row that is held out
    (RENT, "Ed sings.", 0),  # an answer is no fact
    (BILL, "Ann Lee", 0),  # the row's question has it
    (TOWN, "He lives in Rome.", 0),  # the row's answer has it
    (TOWN, "5 Elm in Rome, with Di", 1),
    # A row without `fact`: another row's answer counts, word for word.
    (PLAIN, "A baker!", 0), (PLAIN, "...", 0), (PLAIN, "Di", 0), (PLAIN, "Ed sings well.", 0),
    (PLAIN, "ed sings", 1), (PLAIN, "Ann Lee rents it", 1), (PLAIN, "Fay.", 1),
    (PLAIN, "unknown", 0)])  # two rows have it: it is nobody's
def test_add_anothers_by_hand(row, text, anothers):
    """The row is among those to forget, and once more with its question in other words."""
    reworded = dict(row, question="Reworded: " + row["question"])
    splits = {"forget": [RENT, BILL, TOWN, PLAIN], "retain": KEPT, "held_out": HELD_OUT,
              "forget_rephrased": [reworded]}
    records = {}
    for name, rows in splits.items():
        records[name] = [dict(generation="", empty=1.0) for _ in rows]
    place = splits["forget"].index(row)
    is_empty = float(mdu.words(text) == [])
    records["forget"][place] = dict(generation=text, empty=is_empty)
    records["forget_rephrased"][0] = dict(generation=text, empty=is_empty)
    ev.add_anothers(splits, records)
    expected = [0, 0, 0, 0]
    expected[place] = anothers
    assert [record["anothers"] for record in records["forget"]] == expected
    assert records["forget_rephrased"][0]["anothers"] == anothers
    assert not any("anothers" in record for record in records["retain"])

def test_add_generative_perplexity_is_that_of_theta0(base, unlearned, tmp_path, monkeypatch):
    """Of all but empty answers, with the question masked and the end token visible."""
    run = shutil.copytree(unlearned, tmp_path / "run")
    theta0, tokenizer = mdu.load_backbone(str(base))
    answers = [(" .", [5]), ("a b", [6, 7]), ("c", [8, 0, 9])]  # texts, token ids
    monkeypatch.setattr(ev, "write_answers", lambda *_: answers)
    ev.main([str(run), *WITHOUT_FULL])
    records = ev.read_records(run, "forget")
    assert records[0]["generative_perplexity"] is None  # its answer has no word
    for i in (1, 2):
        _, ids = answers[i]
        masked_prompt = [0] * len(mdu.encode_prompt(tokenizer, records[i]["question"]))
        masks = ev.draw_masks(len(ids), 4, [5, 0, i])  # --samples; --seed, split, row
        with_end = F.pad(masks, (0, 1))  # where nothing is masked
        nll = slow_eq7(theta0, masked_prompt, [*ids, theta0.end_id], with_end)
        assert records[i]["generative_perplexity"] == approx(math.exp(nll), rel=1e-4)

def test_evaluate_without_full_scores_no_wrong_answers(unlearned, tmp_path):
    run = shutil.copytree(unlearned, tmp_path / "run")
    ev.main([str(run), *WITHOUT_FULL])
    assert "truth_ratio" not in ev.read_summary(run)["splits"]["forget"]

def test_summarise_run_has_forget_quality_by_the_retain_run(scored_copy, scored, tmp_path, capsys):
    """Of three values above three others: 2 of the (6 choose 3) = 20 orders are as extreme."""
    retain_only = dict(method="sft", retain_only=True, model="A/B")
    retain = made_up_run(scored, tmp_path / "retain", retain_only)
    mdu.write_run(Path(retain), {"options": retain_only, "rows": {}})
    records = [dict(record, log_ratio=-99) for record in ev.read_records(retain, "forget")]
    write_lines(Path(retain, "eval/forget.jsonl"), records)
    ev.main([str(scored_copy), *FLAGS, "--retain-run", retain])
    figures = ev.read_summary(scored_copy)["run"]
    assert figures["forget_quality"] == approx(2 / 20)
    assert "forget quality ↑" in capsys.readouterr().out

def test_check_retain_run_refuses_one_that_was_scored_without_full(
        scored_copy, scored, tmp_path, capsys):
    plain = made_up_run(scored, tmp_path / "plain", splits={"forget": {}})
    assert "both runs" in program([scored_copy, *FLAGS, "--retain-run", plain], capsys, ev.main)

def test_publish_and_read_summary_have_null_for_nan(scored_copy):
    """In strict JSON, which has no nan.  In tables nan is "-", and what a run lacks is no text."""
    record = {"nll": math.nan, "nll_wrong": (1.0, math.inf), "logp": {"a": math.nan}}
    figures = {"n": 1, "prob": math.nan, "fact": np.float64(math.nan), "words": np.float64(2)}
    summary = {**ev.read_summary(scored_copy), "splits": {"forget": figures},
               "run": {"model_utility": math.nan}}
    ev.publish(scored_copy / "eval", {"forget": [record]}, summary)
    assert read_json(scored_copy / "eval/forget.jsonl") == {
        "nll": None, "nll_wrong": [1.0, None], "logp": {"a": None}}
    written = read_json(scored_copy / "eval/summary.json")
    assert written["splits"]["forget"] == {"n": 1, "prob": None, "fact": None, "words": 2}
    read = ev.read_summary(scored_copy)
    assert math.isnan(read["run"]["model_utility"])
    for metric, text in dict(prob="-", fact="-", words="2.0", infill=None).items():
        assert ev.cell([read], "forget", metric) == text

def keys_of(value):
    """The set of all names of fields in what was read from JSON."""
    keys = set()
    items = []
    if isinstance(value, dict):
        keys.update(value)
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        keys.update(keys_of(item))
    return keys

def test_publish_writes_snake_case_keys(scored, rwku, tmp_path):
    """Also with --limit on RWKU.  The L of ROUGE-L is a capital letter in its own package, too."""
    summary = read_json(Path(scored, "eval/summary.json"))
    _, _, protocol = ev.prepare(*typed_and_run(f"--data {rwku} --limit 1"))
    records = [ev.read_records(scored, split) for split in summary["splits"]]
    keys = keys_of([summary, protocol, records])
    assert {"rows_per_person", "response_length", "n", "generation_ids"} <= keys
    for key in keys:
        assert re.fullmatch("[a-z0-9_]+", key.replace("rougeL", "rouge_l")), key

@each("typed, length, steps", [("", 12, 12), ("--response-length 8 --steps 1", 8, 1)])
def test_ask_prints_what_each_run_answers(typed, length, steps, base, scored, capsys):
    with mock.patch.object(ev, "write_answers", return_value=[(" a\n b", [])]) as write_answers:
        ev.main(["--ask", "Who?", *typed.split(), str(base), scored])
    _, _, [row], settings = write_answers.call_args.args
    assert row["question"] == "Who?"
    assert settings.response_length == length
    assert settings.steps == steps
    answers = []
    for line in capsys.readouterr().out.splitlines():
        if not line.startswith("loaded "):
            answers.append(line)
    assert answers == [f"{base}: a b", f"{scored}: a b"]

def test_ask_prints_what_a_model_answers(scored, capsys):
    ev.main(["--ask", "Who?", "--response-length", "2", "--model", scored])
    assert f"\n{scored}: " in capsys.readouterr().out

# ---- Files of a report or an analysis ----
@pytest.fixture
def own_files(scored, unlearned, tmp_path):
    """A scored run, beside files of the user's with names that eval.py would take -> the run."""
    run = made_up_run(scored, tmp_path / "run")
    shutil.copytree(unlearned, run, dirs_exist_ok=True)
    (tmp_path / "analysis").mkdir()
    for name in ("report.png", "report-2.md", "analysis/convergence.md"):
        (tmp_path / name).write_text("my own")
    return run

def test_own_path_of_a_report_has_the_next_free_number(own_files, tmp_path, capsys):
    """The same one, when it is called again."""
    before = read_all(tmp_path)
    for _ in range(2):
        ev.main(["--report", own_files])
        screen = capsys.readouterr().out
        assert f"{tmp_path}/report.png stays as it is" in screen
        assert f"{tmp_path}/report-2.md stays as it is" in screen
        assert screen.endswith(f"all tables and answers: {tmp_path}/report-3.md\n")
    assert "](report-3.png)" in (tmp_path / "report-3.md").read_text()
    after = read_all(tmp_path)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {tmp_path / "report-3.md", tmp_path / "report-3.png"}

def test_own_path_of_an_analysis_has_the_next_free_number(own_files, tmp_path, capsys):
    before = read_all(tmp_path)
    for _ in range(2):
        ev.main(["--analysis", "convergence", own_files])
        assert capsys.readouterr().out.endswith(f"{tmp_path}/analysis/convergence-2.json\n")
    after = read_all(tmp_path)
    assert before.items() <= after.items()
    new = {file.name for file in after.keys() - before.keys()}
    assert new == {"convergence-2.json", "convergence-2.png"}

def test_own_path_passes_by_a_report_with_a_picture_that_somebody_replaced(own_files, tmp_path):
    ev.main(["--report", own_files])
    report = tmp_path / "report-3.md"
    report.write_text("old\n" + report.read_text())  # it still has eval.py's mark
    (tmp_path / "report-3.png").write_text("my own")
    ev.main(["--report", own_files])
    assert (tmp_path / "report-3.png").read_text() == "my own"
    assert (tmp_path / "report-4.md").exists()

def test_own_path_of_an_analysis_with_a_table(base, tmp_path, capsys):
    run = shutil.copytree(base, tmp_path / "run")
    command = ["--analysis", "rollout", "--limit", "1", "--steps", "2", str(run)]
    for _ in range(2):
        ev.main(command)
        assert capsys.readouterr().out.endswith(f"{tmp_path}/analysis/rollout.json\n")
    (tmp_path / "analysis/rollout.md").write_text("my own")
    ev.main(command)
    assert capsys.readouterr().out.endswith(f"{tmp_path}/analysis/rollout-2.json\n")
    assert (tmp_path / "analysis/rollout.md").read_text() == "my own"
    table = (tmp_path / "analysis/rollout-2.md").read_text()
    assert len(read_table(table.split("\n\n")[1])["k"]) == 3

def test_save_picture_does_without_matplotlib(tmp_path, monkeypatch, capsys):
    assert ev.save_picture(tmp_path / "a.png", lambda figure, what: figure.text(0, 0, what), "a")
    assert (tmp_path / "a.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not ev.save_picture(tmp_path / "b.png", None, None)
    assert "b.png not drawn: needs matplotlib" in capsys.readouterr().out

# ---- Report ----
@each("options, parts, said", [
    (dict(lr=1e-3), {}, "averaged, but lr is 0.00"),
    (dict(newer=1), {}, "averaged, but newer is "),  # an option that the other run lacks
    (dict(model="/a/N"), {}, "averaged, but model is "),
    ({}, dict(trained_on=dict(retain="other")), "averaged, but rows is {'")])
@each("reverse", [False, True])
def test_group_runs_refuses_unlike_runs_of_one_name(
        options, parts, said, reverse, scored, tmp_path, capsys):
    one = made_up_run(scored, tmp_path / "1/npo", dict(model="/a/M"))
    other = made_up_run(scored, tmp_path / "2/npo", {"model": "/a/M", **options}, **parts)
    runs = [one, other]
    if reverse:
        runs = [other, one]
    assert said in program(["--report", *runs], capsys, ev.main)
    assert not list(tmp_path.rglob("report.*"))

@each("parts, said", [(dict(protocol=dict(unknown=1)), "'unknown': 1"),
                      (dict(people=["Ann"]), "different people")])
@each("reverse", [False, True])
def test_group_runs_refuses_methods_that_were_scored_otherwise(
        parts, said, reverse, scored, tmp_path, capsys):
    """On rows about other people, or by another protocol."""
    runs = [made_up_run(scored, tmp_path / "npo"), made_up_run(scored, tmp_path / "ga", **parts)]
    if reverse:
        runs = [runs[1], runs[0]]
    assert said in program(["--report", *runs], capsys, ev.main)
    assert not list(tmp_path.rglob("report.*"))

def test_group_runs_compares_the_people_of_all_runs_of_a_method(scored, tmp_path, capsys):
    """The first run of npo is about nobody, as ga's is; the second is about Ann."""
    runs = [made_up_run(scored, tmp_path / "1/npo"), made_up_run(scored, tmp_path / "2/ga"),
            made_up_run(scored, tmp_path / "3/npo", people=["Ann"])]
    for ordered in (runs, runs[::-1]):
        assert "different people" in program(["--report", *ordered], capsys, ev.main)
    assert not list(tmp_path.rglob("report.*"))

def test_over_some_rows_by_hand():
    """Of three runs that have four rows, and one that lacks the split.  n_METRIC: rows that have
    the metric, if these are not all."""
    runs = [dict(n=4, prob=1, fact=1, n_fact=3, infill=1, generative_perplexity=2),
            dict(n=4, prob=1, fact=1, n_fact=3, generative_perplexity=2, n_generative_perplexity=1),
            dict(n=4, prob=1)]
    summaries = [{"splits": {"forget": figures}} for figures in runs]
    summaries.append({"splits": {}})
    columns = {"forget": ["prob", "fact", "infill", "generative_perplexity"], "retain": ["fact"]}
    assert ev.over_some_rows(summaries, columns) == [
        "Forget fact: over the 3 of 4 rows that have it.",
        "Forget gen. ppl: over the 1 to 4 of 4 rows that have it."]
    assert ev.over_some_rows(summaries, {"forget": ["prob", "infill"], "run": ev.METRICS}) == []

@each("split, expected", [
    ("forget", "fact ↓"), ("retain", "fact ↑"), ("held_out", "fact ↑"), ("never", "fact")])
def test_heading_has_an_arrow_to_better_figures(split, expected):
    """Of rows that nobody trained on, neither high nor low ones are: they are a yardstick."""
    assert ev.heading(split, "fact") == expected

def test_markdown_table():
    table = "| a        | long |\n| -------- | ---- |\n| x \\| y z |      |"
    assert ev.markdown_table([["a", "x | y\nz"], ["long", ""]]) == table

def test_answer_sections_have_each_row_and_what_every_run_wrote(scored, tmp_path):
    """Also if rows have the same question."""
    runs = []
    for name in ("ga", "npo"):
        run = made_up_run(scored, tmp_path / name)
        records = ev.read_records(run, "forget")
        for i, record in enumerate(records):
            record.update(question="Who?", answer=f"True {i}", generation=f"{name} {i}")
        write_lines(Path(run, "eval/forget.jsonl"), records)
        runs.append(run)
    assert ev.answer_sections(ev.group_runs(runs), "forget") == [
        "### 0. Who?\n\n- True answer: True 0\n- ga: ga 0\n- npo: npo 0",
        "### 1. Who?\n\n- True answer: True 1\n- ga: ga 1\n- npo: npo 1",
        "### 2. Who?\n\n- True answer: True 2\n- ga: ga 2\n- npo: npo 2"]

FORGET_PANELS = {  # {metric of the split "forget" that has a panel: its title}
    "fact": "fact", "knowledge": "knowledge", "prob": "p", "infill": "gap filled",
    "infill_no_question": "gap, no question", "anothers": "another's",
    "generative_perplexity": "gen. ppl"}

def drawn_methods(methods):
    """methods: {name: figures of each run}, {metric of FORGET_PANELS or "retain": figure} -> the
    picture of them."""
    summaries = {}
    for name, runs in methods.items():
        summaries[name] = []
        for figures in runs:
            forget = {metric: figures[metric] for metric in FORGET_PANELS}
            splits = {"forget": forget, "retain": {"prob": figures["retain"]}}
            summaries[name].append({"splits": splits, "run": {}})
    figure = matplotlib.figure.Figure(layout="constrained")
    ev.draw_methods(figure, summaries)
    return figure

def titles_of(figure):
    """Without the arrows."""
    return [axis.get_title().rstrip(" ↑↓") for axis in figure.axes]

ALL_TITLES = [f"Forget\n{title}" for title in FORGET_PANELS.values()] + ["Retain\np"]
BASE_AND_NPO = {"base": [dict(fact=0, knowledge=1, prob=0, infill=1, infill_no_question=1,
                              anothers=0, generative_perplexity=2, retain=0)],
                "npo": [dict(fact=0.25, knowledge=0, prob=0.125, infill=0.5, infill_no_question=0,
                             anothers=1, generative_perplexity=3, retain=0.5),
                        dict(fact=0.75, knowledge=0.5, prob=0.375, infill=0,
                             infill_no_question=0.25, anothers=0.75, generative_perplexity=5,
                             retain=1)]}

def test_draw_methods_has_a_line_per_method_and_a_circle_per_run():
    """Line 0 is that of base, line 1 that of npo.  The circles of two runs are a twelfth above and
    below the line: they divide the half from -1/4 to 1/4 into thirds."""
    figure = drawn_methods(BASE_AND_NPO)
    assert titles_of(figure) == ALL_TITLES
    [base], [one, two] = BASE_AND_NPO.values()
    for axis, metric in zip(figure.axes, [*FORGET_PANELS, "retain"], strict=True):
        marks = [mark.get_offsets().tolist() for mark in axis.collections]
        circles_of_base, bar_of_base, circles_of_npo, bar_of_npo = marks
        assert circles_of_base == bar_of_base == [[base[metric], 0]]
        assert circles_of_npo == [[one[metric], approx(1 - 1 / 12)],
                                  [two[metric], approx(1 + 1 / 12)]]
        assert bar_of_npo == [[(one[metric] + two[metric]) / 2, 1]]

@each("facts, has_panel", [
    ([None, 0, 1], True), ([None, None, None], False), ([math.nan] * 3, False)])
def test_draw_methods_has_a_panel_for_what_any_run_has(facts, has_panel):
    methods = {}
    remaining = iter(facts)
    for name, runs in BASE_AND_NPO.items():
        methods[name] = [dict(run, fact=next(remaining)) for run in runs]
    titles = titles_of(drawn_methods(methods))
    if has_panel:
        assert titles == ALL_TITLES
    else:
        assert titles == ALL_TITLES[1:]

def test_draw_methods_draws_a_model_that_has_diverged():
    """All its figures are nan."""
    figures = dict.fromkeys([*FORGET_PANELS, "retain"], math.nan)
    [axis] = drawn_methods({"ga": [figures]}).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ga"]

# Two runs of npo are equal; the perplexities of mdu span magnitudes.
PERPLEXITIES = {"npo": [2.31, 2.34, 2.34], "mdu": [2.5, 417.25, 263123.4]}

@pytest.fixture(params=[["npo", "mdu"], ["npo"]], ids="-".join)
def picture(request, tmp_path):
    methods = {}
    for name in request.param:
        methods[name] = []
        for perplexity in PERPLEXITIES[name]:
            figures = dict.fromkeys(FORGET_PANELS, 0.0)
            figures.update(generative_perplexity=perplexity, retain=1.0)
            methods[name].append(figures)
    figure = drawn_methods(methods)
    figure.savefig(tmp_path / "picture.png")
    return figure

def test_draw_methods_lets_no_text_cover_another(picture):
    boxes = []
    for axis in picture.axes:
        boxes.append(axis.title.get_window_extent())
        for label in axis.get_xticklabels(minor=True) + axis.get_xticklabels():
            if label.get_text() and label.get_visible():
                boxes.append(label.get_window_extent())
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)

def test_draw_methods_can_be_read_without_colour(picture):
    """All marks are black, and those of equal runs have other heights."""
    for axis in picture.axes:
        for mark in axis.collections:
            heights = mark.get_offsets()[:, 1]
            assert len(np.unique(heights)) == len(heights)
            for colour in [*mark.get_facecolors(), *mark.get_edgecolors()]:
                assert colour.tolist() == [0, 0, 0, 1]

@pytest.fixture
def reported(scored, tmp_path, capsys):
    """A report of base, one run that was scored on rows to forget only, and of npo, three runs with
    other seeds, one of which is given twice -> report.md and the screen.

    The runs of npo have the figures 0.3, 0.5 and 0.7 to forget, and the p-values below; the second
    one has no `words`."""
    figures = dict(n=3, rougeL_f1=0.9, rougeL_recall=0.8, words=7, generative_perplexity=40)
    runs = [made_up_run(scored, tmp_path / "1/base", (), figures, splits=dict(forget={}), run={})]
    for seed, figure, p in ((1, 0.3, 1e-9), (2, 0.5, 0.25), (3, 0.7, 0.75)):
        # These options may differ, also the folder's last part but one.
        own = dict(seed=seed, model=f"/{seed}/base", anchor=f"/{seed}/a", diagnose=seed > 1)
        changed = dict.fromkeys(figures, figure)
        if seed == 2:
            changed["words"] = None
        folder = tmp_path / f"{seed}/npo"
        runs.append(made_up_run(scored, folder, own, changed, run=dict(forget_quality=p)))
    ev.main(["--report", *runs, f"{tmp_path}/1/npo/"])
    return (tmp_path / "1/report.md").read_text(), capsys.readouterr().out

def test_report_has_every_method_averaged_over_runs_of_one_folder_name(reported):
    """Mean and standard deviation; of perplexities and p-values median and range."""
    text, _ = reported
    tables = read_tables(text)
    expected = {
        "Method": ("base", "npo"), "rL ↓": ("0.900", "0.500 ± 0.200"),
        "words": ("7.0", "-"),  # a cell needs all runs of a method
        "recall ↓": ("0.800", "0.500 ± 0.200"), "gen. ppl": ("40", "0.5 (0.3 to 0.7)")}
    assert expected.items() <= tables["Forget"].items()
    of_run = tables["Figures of the whole run"]
    assert of_run["forget quality ↑"] == ("-", "0.25 (1e-09 to 0.75)")

def test_report_has_the_columns_that_any_run_has(reported):
    text, _ = reported
    tables = read_tables(text)
    assert {"empty", "median 1/p ↑", "truth ratio ↑"} <= tables["Forget"].keys()
    assert {"rL ↑", "empty ↓", "median 1/p ↓", "truth ratio ↑"} <= tables["Retain"].keys()
    assert "MC1" not in text  # no run has it
    assert "Rows: {'forget': 3," in text

def test_report_prints_the_main_figures(reported):
    text, screen = reported
    main = read_table(screen.split("\n\n")[-2])
    assert main["gen. ppl"] == ("40", "0.5 (0.3 to 0.7)")
    assert "recall ↓" not in main
    # The title of a split is above its first column only.
    titles = []
    for header in main:
        if header.startswith(("Forget ", "Retain ")):
            titles.append(header.split()[0])
    assert titles == ["Forget", "Retain"]

def test_report_has_the_answers_to_forget_and_a_picture(reported, tmp_path):
    """The first answers are also on the screen."""
    text, screen = reported
    example = "### 0. Which author comes from Pudi?\n\n- True answer: "
    assert f"## Answers: Forget\n\n{example}" in text
    assert screen.startswith(example)
    assert "](report.png)" in text
    assert (tmp_path / "1/report.png").exists()

def test_report_and_analyse_write_beside_a_run(scored, unlearned, tmp_path, monkeypatch):
    """One run by two names, here its path and ".", counts once."""
    run = made_up_run(scored, tmp_path / "run")
    shutil.copytree(unlearned, run, dirs_exist_ok=True)
    monkeypatch.chdir(run)
    with unchanged(run):
        ev.main(["--report", run, "."])
        ev.main(["--analysis", "convergence", run, "."])
    text = (tmp_path / "report.md").read_text()
    assert read_tables(text)["Forget"]["Method"] == ("run",)
    panels = read_json(tmp_path / "analysis/convergence.json")["panels"]
    assert list(panels["base"]) == ["run"]

def test_report_of_a_run_without_a_perplexity(scored, tmp_path):
    """As if all its answers were empty."""
    run = made_up_run(scored, tmp_path / "run", forget=dict(generative_perplexity=None))
    ev.main(["--report", run])
    assert (tmp_path / "report.png").exists()

def test_report_says_what_is_for_english(scored, tmp_path, capsys):
    ev.main(["--report", made_up_run(scored, tmp_path / "run")])
    [legend] = re.findall(r"(?s)\nknowledge: .*?\.\n", capsys.readouterr().out)
    assert "for English rows" in legend

def test_parse_says_what_is_for_english(capsys):
    screen = " ".join(help_screen(ev, capsys).split())
    assert "Three things work for English only, as they leave out English function words" in screen

@pytest.fixture(scope="session")
def people(rwku, tmp_path_factory):
    """Persons 1 and 2 of RWKU, unlearned by dpo from a tiny LLaDA and scored, in 1/dpo and 2/dpo;
    and the scores of the LLaDA itself, in 2/model about person 2 alone, in `all` about all ->
    their folder."""
    folder = tmp_path_factory.mktemp("rwku")
    model = folder / "model"
    write_checkpoint(model, "llada", max_sequence_length=999)
    data = ["--model", str(model), "--data", str(rwku)]
    flags = "--samples 2 --steps 1 --limit 1".split()
    runs = []
    for person in ("1", "2"):
        run = f"{folder}/{person}/dpo"
        typed = f"--preset rwku-llada --subject {person} --method dpo --epochs 1 --dtype bfloat16"
        mdu.main([*typed.split(), *data, "--out", run])
        runs.append(run)
    ev.main([*flags, *runs])
    ev.main([*flags, *data, f"{folder}/all"])
    ev.main([*flags, *data, "--subject", "2", f"{folder}/2/model"])
    return folder

def test_report_averages_people_of_rwku(people, capsys):
    assert ev.read_summary(people / "1/dpo")["protocol"]["dtype"] == "bfloat16"
    ev.main(["--report", f"{people}/1/dpo", f"{people}/2/dpo"])
    assert "### 0. Please complete the blank in the following" in capsys.readouterr().out
    text = (people / "1/report.md").read_text()
    assert "\n### 1. Please complete the blank" in text  # of the other person
    tables = read_tables(text)
    split_of = {split.title: name for name, split in ev.SPLITS.items()}
    metric_of = {metric.name: name for name, metric in ev.METRICS.items()}
    for title, header in {
            "F-L1": "recall ↓", "F-L2": "recall ↓", "F-L3": "recall ↓", "N-L1": "recall ↑",
            "N-L2": "recall ↑", "MMLU": "accuracy ↑", "TruthfulQA": "MC1 ↑",
            "TriviaQA": "EM ↑"}.items():
        metric = metric_of[header[:-2]]
        figures = []
        for person in (1, 2):
            splits = ev.read_summary(people / f"{person}/dpo")["splits"]
            figures.append(splits[split_of[title]][metric])
        a, b = figures
        # The standard deviation of two values is their distance over the root of two.
        expected = f"{(a + b) / 2:.3f} ± {abs(a - b) / 2**0.5:.3f}"
        assert tables[title][header][0] == expected

def test_evaluate_draws_the_masks_of_a_person_whoever_else_is_asked_about(people):
    """The rows are of person 2 and of no other; among all, those of person 1 come first."""
    [alone] = ev.read_records(people / "2/model", "utility_truthfulness")
    together = ev.read_records(people / "all", "utility_truthfulness")[1]
    assert alone["seed"] == together["seed"] == [0, 10, 0]
    assert alone["logp"] == approx(together["logp"], rel=1e-4)

def test_report_of_a_published_model_has_the_name_of_its_folder(people, capsys):
    ev.main(["--report", f"{people}/2/model"])
    assert "| model " in capsys.readouterr().out

# ---- Analyses ----
def test_analysis_convergence_draws_the_kls_that_were_logged(unlearned, tmp_path):
    """Of two runs: one has all three lines with KLs, the other lacks the last."""
    logged = [line for line in metrics(unlearned) if "kl" in line]
    assert [(line["step"], line["epoch"]) for line in logged] == [(0, 0), (3, 1), (6, 2)]
    one = shutil.copytree(unlearned, tmp_path / "a")
    other = shutil.copytree(unlearned, tmp_path / "b")
    write_lines(other / "metrics.jsonl", logged[:2])
    ev.main(["--analysis", "convergence", str(one), str(other)])
    result = read_json(tmp_path / "analysis/convergence.json")
    figure = matplotlib.figure.Figure()
    ev.draw_panels(figure, result)
    for axis, target in zip(figure.axes, ["base", "anchor", "uniform"], strict=True):
        points = []
        for epoch, line in enumerate(logged):
            points.append([epoch, line["kl"][target]])
        expected = {"a": points, "b": points[:2]}
        assert result["panels"][target] == expected
        assert axis.get_title() == target
        drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        assert drawn == expected

def test_diagnose_shows_that_mdu_leaves_theta0_for_the_anchor(unlearned):
    logged = [line["kl"] for line in metrics(unlearned) if "kl" in line]
    start, middle, end = logged
    assert start["base"] == approx(0, abs=1e-6)
    assert end["base"] > middle["base"] > 1e-4
    assert start["anchor"] > middle["anchor"] > end["anchor"]

@torch.no_grad()
def slow_kls_by_role(theta0, model, tokenizer, rows):
    """{role: KLs of each masked token of the role, [theta0's, the model's]}, with two masks for
    each row of (--seed 4, number of the row)."""
    kls = {I: [], S: [], K: []}
    for number, row in enumerate(rows):
        prompt = mdu.encode_prompt(tokenizer, row["question"])
        answer = mdu.encode_text(tokenizer, row["answer"])
        roles = ev.token_roles(tokenizer, row["question"], answer)
        for mask in ev.draw_masks(len(answer), 2, [4, number]):
            masked = mask.nonzero()[:, 0].tolist()
            anchor_logits = slow_logits(theta0, [0] * len(prompt), answer, masked)
            before = slow_logits(theta0, prompt, answer, masked)
            after = slow_logits(model, prompt, answer, masked)
            for j, place in enumerate(masked):
                kl_before = slow_kl(before[j].double(), anchor_logits[j], 1).item()
                kl_after = slow_kl(after[j].double(), anchor_logits[j], 1).item()
                kls[roles[place]].append([kl_before, kl_after])
    return kls

def test_analysis_roles_equals_a_slow_loop(base, unlearned, tmp_path):
    """A bar for each role: first theta0's, then the run's."""
    theta0, tokenizer = mdu.load_backbone(str(base))
    model, _ = mdu.load_backbone(str(unlearned))
    rows = mdu.toy_world()["forget"][1:]
    bars_of_base = []
    bars_of_run = []
    for role, kls in slow_kls_by_role(theta0, model, tokenizer, rows[:20]).items():
        before, after = np.mean(kls, axis=0)
        change = 100 * (after - before) / before
        bars_of_base.append({"label": f"base\n{before:.2f} (+0 %)", "role": role,
                             "kl": approx(before, rel=1e-4), "change_percent": 0})
        bars_of_run.append({"label": f"run\n{after:.2f} ({change:+.0f} %)", "role": role,
                            "kl": approx(after, rel=1e-4),
                            "change_percent": approx(change, abs=1e-2)})
    run = shutil.copytree(unlearned, tmp_path / "run")
    file = write_lines(tmp_path / "rows", rows)
    flags = "--samples 2 --seed 4 --batch-size 4 --limit 20".split()
    ev.main(["--analysis", "roles", *flags, "--forget", file, str(run)])
    result = read_json(tmp_path / "analysis/roles.json")
    assert result["panels"] == {"": bars_of_base + bars_of_run}

def test_draw_panels_has_bars_in_the_colours_of_their_roles():
    """Bars 0 and 2 are in context, bar 1 is stored knowledge."""
    bars = [{"label": "a", "role": I, "kl": 3}, {"label": "b", "role": K, "kl": 1},
            {"label": "c", "role": I, "kl": 2}]
    figure = matplotlib.figure.Figure()
    ev.draw_panels(figure, {"kind": "bars", "ylabel": "", "panels": {"": bars}})
    [axis] = figure.axes
    heights = {}  # {role: {place: height}}
    for container in axis.containers:
        of_role = {round(bar.get_center()[0]): bar.get_height() for bar in container}
        heights[container.get_label()] = of_role
        for bar in container:
            colour = matplotlib.colors.to_hex(bar.get_facecolor())
            assert colour == ev.ROLES[container.get_label()]
    assert heights == {I: {0: 3, 2: 2}, S: {}, K: {1: 1}}
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b", "c"]

# A question of the toy, and how theta answers it in 3 steps, each of which fixes two of 6 tokens.
PUDI = mdu.toy_world()["forget"][0]  # Which author comes from Pudi?
WRITTEN = ["▁Ceka", "▁is", "▁author", "<end>", "▁Foba", "."]
STEP_OF = [2, 3, 1, 2, 1, 3]  # in which step each token is fixed
P_OF_STEP = {1: 0.9, 2: 0.8, 3: 0.7}  # with which probability

@pytest.fixture
def theta_and_anchor(base, unlearned, tmp_path, monkeypatch):
    """Two scripted models, in place of a run and its theta0.

    Theta predicts WRITTEN: with P_OF_STEP what it fixes in a step, with 0.3 all else.  The anchor
    writes "Foba" everywhere, with probability 1/2, and looks at no question."""
    _, tokenizer = mdu.load_backbone(str(base))
    V = len(tokenizer)
    written = torch.tensor(tokenizer.convert_tokens_to_ids(WRITTEN))
    foba = written[4]

    def logits_of(token, p):
        """One token has probability p, the others share the rest."""
        return (log(V - 1) + torch.logit(p))[..., None] * F.one_hot(token, V)

    def theta_script(ids):
        n_masked = int((ids == 0).sum())
        step = {6: 1, 4: 2, 2: 3}[n_masked]
        p = torch.full((6,), 0.3, dtype=torch.float64)
        p[torch.tensor(STEP_OF) == step] = P_OF_STEP[step]
        n_prompt = ids.shape[1] - 6
        return F.pad(logits_of(written, p), (0, 0, n_prompt, 0))[None]  # (1, T, V)

    def anchor_script(ids):
        assert not ids[:, :-6].any()  # the question is masked
        return logits_of(foba, f64(0.5)).expand(*ids.shape, V)

    theta = FakeModel(script=theta_script, mask_id=0, pad_id=1)
    anchor = FakeModel(script=anchor_script, mask_id=0, pad_id=1)

    def load_backbone(name, dtype):
        if name == str(base):
            return anchor, tokenizer
        return theta, tokenizer
    monkeypatch.setattr(mdu, "load_backbone", load_backbone)
    run = shutil.copytree(unlearned, tmp_path / "run")
    flags = [*"--steps 3 --response-length 6".split(), str(run)]
    anchor_logits = logits_of(foba, f64(0.5))[0]
    kls = {}  # {step: KL from a prediction with its probability to the anchor's}
    for step, p in P_OF_STEP.items():
        kl = slow_kl(logits_of(written[0], f64(p))[0], anchor_logits, 1)
        kls[step] = approx(kl.item())
    return SimpleNamespace(anchor=anchor, flags=flags, kls=kls)

def test_analysis_trajectory_by_hand(theta_and_anchor, tmp_path):
    """A bar for each token of the answer, up to its end token, at the step that fixes it."""
    ev.main(["--analysis", "trajectory", *theta_and_anchor.flags])
    assert (tmp_path / "analysis/trajectory.png").exists()
    panels = read_json(tmp_path / "analysis/trajectory.json")["panels"]
    assert len(panels) == 3  # rows, without --limit
    found = [list(bar.values()) for bar in panels["0. " + PUDI["question"]]]
    kls = theta_and_anchor.kls
    assert found == [["author\n1", I, kls[1]], ["Ceka\n2", K, kls[2]],
                     ["<end>\n2", S, kls[2]], ["is\n3", S, kls[3]]]
    assert len(theta_and_anchor.anchor.seen) == 3 * 3  # a pass for each step of each row

def test_analysis_rollout_by_hand(theta_and_anchor, tmp_path):
    """Of the four tokens up to the end token, one is fixed after step 1, three after step 2: the
    first states with a quarter fixed, and with a half and three quarters."""
    file = write_lines(tmp_path / "row", [PUDI, PUDI])
    ev.main(["--analysis", "rollout", "--limit", "1", "--forget", file, *theta_and_anchor.flags])
    table = read_json(tmp_path / "analysis/rollout.json")["table"]
    quarter = ["1/3", "<mask><mask> author<mask>", "Foba Foba author Foba Foba Foba"]
    half = ["2/3", "Ceka<mask> author<end>", "Ceka Foba author"]
    row = [PUDI["question"], PUDI["answer"]]
    assert table[1:] == [row + quarter, row + half, row + half]
    assert len(theta_and_anchor.anchor.seen) == 2 + 1 + 1  # the steps that are left

def test_analyse_says_that_the_rows_have_changed_since_the_training(unlearned, tmp_path, capsys):
    run = shutil.copytree(unlearned, tmp_path / "run")
    command = ["--analysis", "convergence", str(run)]
    ev.main(command)
    assert "changed" not in capsys.readouterr().out
    info = read_json(run / "run.json")
    info["rows"]["forget"] = "the hash of other rows"
    (run / "run.json").write_text(json.dumps(info))
    ev.main(command)
    assert "the rows to forget have changed since the training" in capsys.readouterr().out

# ---- Bad input ----
# Each case: what is given, and a part ("said") of the one line that refuses it.
def row_text(**fields):
    """A line of a file of rows.  The braces are there because messages quote it."""
    return json.dumps({"question": "Who is Bolti?", "answer": "It is {}.", **fields})

GOOD = row_text()

def write_files(files):
    """files: {name: content as text or bytes}"""
    for name, content in files.items():
        if isinstance(content, str):
            content = content.encode()
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)

@pytest.fixture
def assert_refused(base, unlearned, scored, rwku, tmp_path, capsys):
    """A function: the command has to be refused with these words, before anything is made or
    changed.  Of the 16 rows in the file `rows` the last alone has a perturbed_answer."""
    write_files({"rows": 15 * f"{GOOD}\n" + row_text(perturbed_answer="x")})
    places = dict(base=base, run=unlearned, scored=scored, rwku=rwku,
                  own=f"--model {base} --forget rows")

    def check(command, said):
        name, *argv = command.format(**places).split()
        main = mdu.main
        if name == "eval.py":
            main = ev.main
        with unchanged(tmp_path, base, unlearned):
            err = program(argv, capsys, main)
        assert said.format(**places) in err
    return check

@each("command, said", [
    ("mdu.py --tau 2", "argument --tau: invalid float in [0, 1] value: '2'"),
    ("mdu.py --seed 18446744073709551616", "argument --seed: invalid int"),
    ("mdu.py --resume {run} --seed 1", "--resume RUN takes no other option"),
    ("mdu.py --method ga --tau 1", "--method ga has no option --tau"),
    ("mdu.py --method sft --diagnose", "--diagnose is for unlearning, not for sft"),
    ("mdu.py --method sft --preset rwku-llada",
     "--method sft has no preset for RWKU; give --model"),
    ("mdu.py --method sft --lora 2", "--lora trains adapters of a start model"),
    ("mdu.py --preset own --method sft --forget rows",
     "needs a start model: --model; for a small"),
    ("mdu.py {own} --method gd --retain-weight 0", "--method gd without a retain loss is ga"),
    # Targets that teach nothing, and an anchor without effect.
    ("mdu.py --tau 0 --anchor {base}", "--tau 0 has no anchor: --anchor {base}"),
    ("mdu.py --anchor-truth removed --tau 0", "--anchor-truth removed would have no effect"),
    ("mdu.py {own} --anchor-truth removed --retain-weight 0", "are rare; give --retain"),
    ("mdu.py --anchor-prompt shown",
     "shown needs another --anchor MODEL, or --anchor-truth removed: with start"),
    ("mdu.py --anchor current --anchor-prompt shown", "--anchor-truth removed: with current"),
    ("mdu.py --data toy --model . --anchor . --anchor-prompt shown",
     "--anchor-truth removed: with /")])
def test_parse_check_and_check_anchor_refuse_options(command, said, assert_refused):
    assert_refused(command, said)

@each("command, said", [
    ("mdu.py --model {base}", "no rows to forget; give --forget or --data"),
    ("mdu.py {own} --preset toy", "no rows to retain; give --retain, or"),
    ("mdu.py --method sft --retain-only --model {base}", "no rows to retain; give --retain"),
    ("mdu.py {own} --method dpo --retain-weight 0", "'Who is Bolti?' has no perturbed_answer"),
    ("mdu.py --forget absent", "No such file or directory: 'absent'"),
    ("mdu.py --forget /dev/null", "--forget /dev/null is no regular file; save the rows in one"),
    ("mdu.py --subject 1 --forget rows", "--forget says what to forget, as --data"),
    ("mdu.py --data {rwku} --forget rows", "--forget says what to forget, as --data"),
    ("mdu.py --data {rwku} --model x", "RWKU is about people; give one of them with --subject"),
    ("mdu.py --subject King", "--subject is for RWKU: --preset rwku-... or --data"),
    ("mdu.py --preset rwku-llada --subject King --data {rwku}",
     "King: not among the 12: Ann Lee"),
    ("mdu.py --preset rwku-llada --subject ² --data {rwku}", "²: not among the 12: Ann Lee"),
    ("mdu.py --data toy --model {base} --response-length 2048",
     "of answer or --response-length")])
def test_load_data_and_check_refuse_data(command, said, assert_refused):
    assert_refused(command, said)

def test_read_dataset_refuses_a_folder_of_other_data(assert_refused):
    write_files({"folder/other.json": GOOD})
    assert_refused("mdu.py --data folder --model x",
                   "/folder, forget10_perturbed: BuilderConfig 'forget10")

BAD_ROWS = {  # {name of a file: (what is in it, what is said)}
    "malformed": (f"{GOOD}\n{GOOD[:-3]}", "line 2: Unterminated string"),
    "none": ("\n", "/none: no rows"),
    "columns": ('{"prompt": "p", "completion": "c"}',
                "line 1: needs question and answer, or prompt and response, that are not null; "
                "found prompt, completion (JSON Lines"),
    "null": (row_text(answer=None), "not null; found question (JSON Lines"),
    "empty": (f"{GOOD}\n\n" + row_text(answer=" "),
              "line 3: answer: needs a text that is not empty, found ' '"),
    "number": (row_text(fact=1.0), "line 1: fact: needs a text that is not empty, found 1.0"),
    "sign": (row_text(fact="♠"), "line 1: fact: needs a letter or digit, found '♠'"),
    # Halves of a surrogate pair: the first, and the second.
    "first-half": (f"{GOOD}\n" + row_text(answer="\ud83d It is {}."),
                   "line 2: answer: '\\ud83d It is {}.' has half of a surrogate pair"),
    "second-half": (row_text(answer="\ude00 It is {}."),
                    "line 1: answer: '\\ude00 It is {}.' has half of a surrogate pair"),
    "latin-1": (GOOD.encode() + b"\n\xe9",
                "latin-1: not UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    "utf-16": ("\ufeff{}\n".encode("utf-16-le"),
               "utf-16: not UTF-8 ('utf-8' codec can't decode byte 0xff"),
    "nested": (99999 * "[", "line 1: maximum recursion depth"),
    "strange": (8 * (row_text(question="xx", answer="yy zz") + "\n"),
                "most words to forget are unknown to the model"),
    "long": (8 * (row_text(answer=2100 * "Who ") + "\n"), "the model takes 2048")}

@each("name", BAD_ROWS)
def test_read_jsonl_check_row_and_encode_splits_refuse_a_file(name, assert_refused):
    content, said = BAD_ROWS[name]
    write_files({name: content})
    said = said.replace("{}", "{{}}")  # which are in the answer: no place to fill in
    assert_refused(f"mdu.py --model {{base}} --forget {name} --retain-weight 0", said)

@each("question, answer", [
    ("Where was Ceka Foba born?", "Ceka Foba was born in Rome."),
    ("Where was Ceka Foba born? ", "Ceka Foba was born in Rome.\n")])  # which has the same tokens
def test_encode_splits_refuses_a_row_to_forget_and_to_retain(question, answer, assert_refused):
    write_files({
        "a": row_text(question="Where was Ceka Foba born?", answer="Ceka Foba was born in Rome."),
        "b": row_text(question=question, answer=answer)})
    assert_refused(
        "mdu.py --model {base} --forget a --retain b",
        "'Where was Ceka Foba born?' is to be forgotten and retained, with the same answer")

# Faults of a model's folder.
def delete(folder, pattern):
    for file in folder.glob(pattern):
        file.unlink()

def replace(folder, old, new):
    """In the texts of the tokenizer's files."""
    for file in folder.glob("token*"):
        file.write_text(file.read_text().replace(old, new))

def add_adapters_of_peft(folder):
    (folder / "adapter_config.json").write_text("{}")

def leave_files_of_qwens_tokenizer(folder):
    delete(folder, "token*")
    (folder / "vocab.json").touch()
    (folder / "merges.txt").touch()

def make_a_link_to_block_diffusion(folder):
    folder.rename("a-bd3lm-c")
    folder.symlink_to("a-bd3lm-c")

def save_as_pickle(folder):
    delete(folder, "*.safetensors*")
    torch.save({}, folder / "pytorch_model.bin")

def save_in_4_bits(folder):
    """As bitsandbytes does: two weights in a byte, with tensors of scales beside them."""
    tensors = {}
    for name, tensor in weights(folder).items():
        if "proj" in name:
            tensors[f"{name}.absmax"] = torch.ones(tensor.numel() // 64)
            tensor = torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})

def bad_model(kind, fault=None, said="", **changes):
    """kind: model_type; changes: of config.json, None deletes a field; fault: a function that is
    called with the folder; said: a part of the line that refuses the model."""
    return SimpleNamespace(kind=kind, changes=changes, fault=fault, said=said)

BAD_MODELS = {  # {name of a folder: what is wrong in it, and what is said}
    # Models of another architecture.
    "gpt2": bad_model("llama", model_type="gpt2",
                      said="model_type 'gpt2' in config.json is none of llada"),
    "block-type": bad_model("llada", block_type="x",
                            said="block_type 'x' in config.json must be 'llama'"),
    "layer-norms": bad_model("illada", layer_norm_eps=1e-5,
                             said="layer_norm_eps 1e-05 in config.json must"),
    "own-code": bad_model("qwen2", architectures=["Qwen2Denoiser"],
                          said="['Qwen2Denoiser'] in config.json says that it has its own code"),
    "a-bd3lm-b": bad_model("a2d-qwen3",
                           said="a-bd3lm-b: bd3lm in its name or path says block diffusion"),
    "link": bad_model("a2d-qwen3", make_a_link_to_block_diffusion,
                      said="link: bd3lm in its name or"),
    "blocks": bad_model("Dream", block_size=32,
                        said="block_size 32 in config.json says block diffusion"),
    "more-blocks": bad_model("a2d-llama", bd_size=4,
                             said="bd_size 4 in config.json says block diffusion"),
    # The experts are named first, although n_kv_heads is missing, too.
    "experts": bad_model("llada", num_experts=64, n_kv_heads=None, embedding_size=264,
                         said="num_experts 64 in config.json says a mixture of experts"),
    "adapted": bad_model("llama", add_adapters_of_peft,
                         said="adapted has adapter_config.json: merge the adapters into the weigh"),
    # Causal or not, shifted or not.
    "causal": bad_model("llama", is_causal=None,
                        said='"is_causal": false; "shift_logits": true if the out'),
    "shifted": bad_model("a2d-qwen3", shift_logits=True,
                         said="shift_logits true in config.json; with model_type a2d-qwen3 it must "
                         "be false"),
    "unshifted": bad_model("Dream", shift_logits=False,
                           said="with model_type Dream it must be true"),
    "half-shifted": bad_model("llama", shift_logits=1, said="shift_logits 1 in config.json; with "
                              "model_type llama it must be false or true"),
    # Tensors that are missing, too many, of other sizes or types.
    # embedding_size and mlp_hidden_size count, where vocab_size and mlp_ratio say something else.
    "layers": bad_model("llada", n_layers=3, embedding_size=264, vocab_size=250,
                        mlp_hidden_size=64, mlp_ratio=3,
                        said="missing or unexpected: model.layers.2."),
    "more": bad_model("llada", n_layers=1, said="unexpected: model.layers.1."),
    "no-layers": bad_model("llada", n_layers=None, said="no n_layers in config.json"),
    "words": bad_model("llada", d_model="wide", said="cannot be loaded as LlamaForCausalLM"),
    "resized": bad_model("llada", vocab_size=260,
                         said="model.embed_tokens.weight has (264, 32), by config"),
    "4-bit": bad_model("llama", save_in_4_bits,
                       said="quantized weights (quantization_config in config.json)"),
    "pickle": bad_model("llada", save_as_pickle, said="no file named model.safetensors"),
    # Tokens.
    "mask": bad_model("llama", mask_token_id=None,
                      said="no mask_token_id in config.json or tokenizer"),
    "large-mask": bad_model("llama", mask_token_id=264, said="mask_token_id is 264; the model has "
                            "embeddings for 0 to 263 only"),
    "no-pad": bad_model("a2d-qwen2", pad_token_id=-1,
                        said="pad_token_id is -1; the model has embeddings"),
    "end": bad_model("llada", partial(replace, old="eot_id", new="x"),
                     said="no end-of-turn token, <|eot_id|>, in its tokenizer: is it a base model"),
    # The tokenizer's files.  vocab.json and merges.txt are enough for Qwen alone.
    "no-tokenizer": bad_model("llada", leave_files_of_qwens_tokenizer,
                              said="no-tokenizer: no tokenizer.json; copy the tokenizer's files"),
    "no-merges": bad_model("Dream", partial(delete, pattern="merges.txt"),
                           said="no-merges: no tokenizer.json; copy the tokenizer's files"),
    "no-template": bad_model("llada", partial(replace, old="chat_template", new="other"),
                             said="no chat template: is it a base model's?"),
    "twice": bad_model("llama", partial(replace, old="m['content']",
                                        new="m['content'] ~ m['content']"),
                       said="chat template must have the question exactly once"),
    "loop": bad_model("llama", partial(replace, old="m['content']", new="m.a.b"),
                      said="has no attribute 'a'")}

@each("name", BAD_MODELS)
def test_load_backbone_and_read_config_refuse_a_model(name, assert_refused):
    model = BAD_MODELS[name]
    write_checkpoint(Path(name), model.kind, **model.changes)
    if model.fault:
        model.fault(Path(name))
    assert_refused(f"mdu.py --method ga --forget rows --model {name}", model.said)

def test_load_references_refuses_an_anchor_of_another_vocabulary(assert_refused):
    write_checkpoint(Path("other"), "llada", mask_token_id=0)  # as the toy has it
    assert_refused("mdu.py --preset toy --model {base} --anchor other",
                   "its vocabulary differs")

@each("command, said, files", [
    ("mdu.py --forget rows --retain-weight 0", "train it with --method sft, or", {}),
    ("mdu.py --preset toy --model nobody/nothing", "not fetched from the hub", {}),
    ("mdu.py --preset toy --model {base} --out {run}", "--resume {run}", {}),
    ("mdu.py --resume folder", "No such file or directory: 'folder/run.json'",
     {"folder/notes": ""}),
    ("mdu.py --resume foreign", "foreign: its run.json was not made by mdu.py",
     {"foreign/run.json": '{"options": {}}'}),
    ("mdu.py --model foreign --method ga --forget rows", "foreign/config.json is damaged",
     {"foreign/run.json": '{"options": {}}', "foreign/config.json": "[]"}),
    ("eval.py --model adapters --data toy new", "adapters has adapter_config.json",
     {"adapters/adapter_config.json": "{}"}),
    ("eval.py --report damaged", "summary.json is damaged", {"damaged/eval/summary.json": "{"}),
    ("eval.py --report old", "scored by other code; score it again: python eval.py",
     {"old/eval/summary.json": "{}"}),
    ("eval.py --report {base}", "not scored yet; first run: python eval.py {base}", {}),
    ("eval.py --model {base} --data toy {run}", "is a run; give another folder", {}),
    ("eval.py --analysis convergence {base}", "train it with --diagnose", {}),
    ("eval.py --analysis roles {run} {scored}", "the runs started from different models", {})])
def test_main_and_read_json_refuse_a_folder(command, said, files, assert_refused):
    write_files(files)
    assert_refused(command, said)

@each("command, said", [
    ("eval.py unfinished/base", "/unfinished/base continues it"),
    ("eval.py --analysis roles {base} unfinished/base", "one folder name"),
    ("eval.py --analysis roles {run} unfinished/base", "or forgot other rows")])
def test_evaluate_and_analyse_refuse_an_unfinished_run_on_other_rows(
        command, said, base, assert_refused):
    """It started from the model from which {run} did."""
    made_with = {"options": vars(options(f"--preset toy --model {base}")),
                 "rows": {"forget": "other"}}
    write_files({"unfinished/base/run.json": json.dumps(made_with)})
    assert_refused(command, said)

@each("command, said", [
    ("eval.py --model {base}", "score: no RUN; give the folder of one"),
    ("eval.py --report --limit 3 {base}", "trajectory, rollout, not for report"),
    ("eval.py --ask Who? --retain rows {base}", "--retain is for score, not for ask"),
    ("eval.py --ask Who? --model {base} {base}", "asks that model; give no RUN"),
    ("eval.py --ask caf\udce9? --model {base}", "--ask: 'caf\\udce9?' is not text in UTF-8"),
    ("eval.py --analysis roles --retain rows {run}", "--retain is for score, not for roles"),
    ("eval.py --analysis convergence --samples 3 {base}",
     "for score, roles, not for convergence"),
    ("eval.py --data toy --subject King {base}", "--subject is for RWKU, which has people"),
    ("eval.py --samples 1 --steps 1 --response-length 2048 {base}",
     "2048 (--response-length 2048)"),
    ("eval.py --analysis trajectory --response-length 2048 {run}", "the model; it takes 2048"),
    ("eval.py --analysis rollout --response-length 2048 {run}", "the model; it takes 2048")])
def test_parse_and_utf8_text_refuse_options_of_eval(command, said, assert_refused):
    assert_refused(command, said)

def test_find_splits_refuses_a_file_whose_fact_is_not_in_the_answer(assert_refused):
    write_files({"file": row_text(fact=["is", "i"])})  # "is" is in the answer
    assert_refused("eval.py --forget file {base}",
                   "line 1: fact: 'i' is not in the answer 'It is {{}}.'")

@each("left_out, said", [
    ("--limit 3", "the same rows"), ("--samples 4", "'samples': 128"),
    ("--full", "both runs scored with --full"),
    ("", "was not trained with --method sft --retain-only; give a model that learnt rows")])
def test_check_retain_run_refuses_a_run_that_cannot_be_compared(left_out, said, assert_refused):
    """It was scored with all of FLAGS."""
    flags = " ".join(FLAGS).replace(left_out, "")
    assert_refused(f"eval.py {flags} --retain-run {{scored}} {{base}}", said)

# ======== README.md, Makefile, experiments.sh ========
PROJECT = Path(mdu.__file__).parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (PROJECT / "Makefile").read_text(encoding="utf-8")
PAGES = {"README.md": README}
for name in ("OWN_ROWS.md", "RESULTS.md"):
    PAGES[name] = (PROJECT / ".github" / name).read_text(encoding="utf-8")

def parse_command(words):
    """The words of a command line, with mdu.py or eval.py among them -> which of the two it is,
    and its options as the program reads them."""
    [program] = [word for word in words if word.endswith(".py")]
    parse = {"mdu.py": mdu.parse, "eval.py": ev.parse}[program]
    place = words.index(program)
    return program, parse(words[place + 1:])

def code_blocks(page):
    """The blocks of commands: those in fences, and indented ones with a line that begins with one
    of the programs."""
    fenced = re.findall(r"(?ms)^```bash\n(.*?)^```$", page)
    rest = re.sub(r"(?ms)^```.*?^```$", "", page)
    indented = re.findall(r"(?m)(?:^ {4}.+\n)+", rest)
    program = re.compile(r"(?m)^ {4}(python|torchrun|make)\b")
    return fenced + [block for block in indented if program.search(block)]

def typed_commands(page, folder):
    """Every command of a page as a list of words.  Bash writes out loops and variables: it runs the
    blocks, and the programs are functions in it that print their words."""
    script = "set -eu\n"
    for name in ("python", "torchrun", "make", "rm", "awk", "grep", "head", "wc", "."):
        # A line for each command, with a null byte behind each word.
        script += f"function {name} {{ printf '%s\\0' {name} \"$@\"; echo; }}\n"
    script += "\n".join(code_blocks(page))
    command = [shutil.which("bash"), "-c", script]
    done = subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env={"PATH": ""})
    commands = []
    for line in done.stdout.splitlines():
        *words, after_the_last = line.split("\0")
        assert after_the_last == ""
        commands.append(words)
    return commands

@each("page", PAGES.values(), ids=PAGES.keys())
def test_parse_takes_every_command_of_a_page(page, tmp_path):
    for words in typed_commands(page, tmp_path):
        is_script = words[1:] == ["-"]  # Python reads it from the page
        if words[0] in ("python", "torchrun") and not is_script:
            parse_command(words)

@each("page", PAGES.values(), ids=PAGES.keys())
def test_make_has_every_target_of_a_page(page, tmp_path):
    for words in typed_commands(page, tmp_path):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            for target in targets:
                assert re.search(rf"(?m)^{target}:", MAKEFILE), target

@each("page", PAGES.values(), ids=PAGES.keys())
def test_typed_commands_has_every_line_of_a_page_that_begins_with_a_program(page, tmp_path):
    """That is, its words up to a variable, a comment, a further command, the end of the line, or
    a text to read."""
    commands = typed_commands(page, tmp_path)
    lines = re.findall(r"(?m)^ *((?:python|torchrun|make) .*?)[\"$\\#;&\n]", page)
    assert lines
    for line in lines:
        before_a_text, _, _ = line.partition(" <<")
        typed = before_a_text.split()
        assert any(words[:len(typed)] == typed for words in commands), line

# ---- Pages: each option on them, and each in --help ----
@each("program", [mdu, ev])
def test_make_parser_and_parse_explain_every_option(program, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    options, *_ = help_screen(program, capsys).split("presets:")
    # An entry begins with two spaces and the option; its further lines begin with more.
    entries = re.findall(r"(?m)^  (-.*(?:\n {3,}.*)*)", options)
    assert len(entries) > 10
    for entry in entries:
        # Between the option and its explanation are two spaces or the end of a line.
        assert re.search(r"\s{2}\S", entry), entry

def test_make_parser_and_parse_have_every_option_that_the_pages_name(capsys):
    options = {"--nproc_per_node"}  # torchrun's
    for program in (mdu, ev):
        options.update(re.findall(r"--[a-z-]+", help_screen(program, capsys)))
    for page in PAGES.values():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page))
        assert named <= options

# ---- experiments.sh and make ----
# In place of Python in experiments.sh.  It writes the words of each call of mdu.py and eval.py into
# `log`, and makes what the experiment looks for: the folder of a run with its weights and
# config.json (the word behind --out or --resume), and eval/summary.json in each run that is scored
# (a word that begins with out/ and is no file of rows).  Calls fail that have the word in the file
# `fails`, if there is one.  Scripts and company_rows.py do nothing; `python -c` is how
# experiments.sh asks for a preset's model.
LOGGING_PYTHON = """#!/bin/bash
case $1 in
  -c) echo owner/model; exit ;;
  - | *company_rows.py) exit ;;
esac
echo "$@" >> log
if [ -f fails ] && [[ " $* " == *" $(< fails) "* ]]; then exit 1; fi
for word in "$@"; do
  case $last,$word in
    --out,* | --resume,*) mkdir -p "$word"; touch "$word/model.safetensors" "$word/config.json" ;;
    *.jsonl) ;;
    *,out/*)
      if [[ $* == *eval.py* ]]; then
        mkdir -p "$word/eval"
        touch "$word/eval/summary.json"
      fi ;;
  esac
  last=$word
done
"""

def make(folder, *words):
    """Run make with LOGGING_PYTHON, two rows to forget and to retain, and nothing to install."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    without_install = re.sub(r"(?m)(:.*) install\b", r"\1", MAKEFILE)
    (folder / "Makefile").write_text(without_install)
    (folder / ".github").mkdir(exist_ok=True)
    if not (folder / ".github/experiments.sh").exists():  # a test may have written another one
        shutil.copy(PROJECT / ".github/experiments.sh", folder / ".github")
    (folder / "python").write_text(LOGGING_PYTHON)
    (folder / "python").chmod(0o755)
    (folder / "rows").write_text("{}\n{}\n")
    env = {"PATH": os.environ["PATH"]}  # without the flags of a make around it
    command = ["make", "FORGET=rows", "RETAIN=rows", f"PYTHON={folder}/python", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)

def logged_commands(folder):
    """What LOGGING_PYTHON was called with: (program, options) of each call."""
    lines = (folder / "log").read_text().splitlines()
    return [parse_command(line.split()) for line in lines]

@each("target", ["demo", "table", "finetuned", "pretrained", "company", "real",
                 "real MODEL=m TOFU=t", "rehearsal", "figures",
                 "tofu PRESET=tofu-dream", "rwku PRESET=rwku-llada"])
def test_make_trains_what_it_scores_and_scores_what_it_reports(target, tmp_path):
    done = make(tmp_path, *target.split())
    assert done.returncode == 0, done.stderr
    trained = set()
    used = set()
    for program, args in logged_commands(tmp_path):
        if program == "mdu.py":
            trained.add(args.out)
        elif args.task == "report":
            for run in args.runs:
                assert (tmp_path / run / "eval").is_dir()
        else:
            used.update(run.rstrip("/") for run in args.runs)
    assert len(trained) > 2
    # Trained, and not scored: the model from which all others of `pretrained` start.
    if target == "pretrained":
        used.update(f"out/pretrained/{seed}/original" for seed in (1, 2, 3))
    # Scored, and not trained: a published model.
    if target.startswith("rwku"):
        trained.add("out/rwku-llada/0/base")
    assert used == trained

@each("experiment, folder, runs", [
    ("demo", "out/demo", ["new"]),
    ("finetuned", "out/finetuned/2", ["new", "without-retain/new", "taught-again/new"]),
    ("company", "out/company/2", ["new", "new-refusals", "taught-again/new"]),
    ("real", "out/real", ["new", "taught-again/new"]),
    ("sweep", "out/sweep", ["new", "taught-again/new"])])
def test_a_new_line_of_a_list_is_trained_scored_and_reported(experiment, folder, runs, tmp_path):
    """Once each.  FOLDER in a line stands for the folder of the runs."""
    script = (PROJECT / ".github/experiments.sh").read_text()
    # A list begins with its name and a quote, its lines below.
    script = re.sub(r'(?m)^(DEMO|FINETUNED|COMPANY|REAL|SWEEP)="$',
                    r'\g<0>\n  new  --anchor FOLDER/a', script)
    script = re.sub(r'(?m)^WITHOUT_RETAIN="$', r'\g<0>\n  without-retain/new  --tau 0', script)
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github/experiments.sh").write_text(script)
    (tmp_path / "out/real/finetune").mkdir(parents=True)  # for sweep
    (tmp_path / "out/real/finetune/config.json").touch()
    assert make(tmp_path, experiment).returncode == 0
    trained, scored, reported = [], [], []
    for program, args in logged_commands(tmp_path):
        if program == "mdu.py":
            trained.append(args.out)
            if args.out == f"{folder}/new":
                assert args.anchor == f"{folder}/a"
        elif args.task == "report":
            reported += args.runs
        else:
            scored += [run.rstrip("/") for run in args.runs]
    for run in runs:
        for done in (trained, scored, reported):
            assert done.count(f"{folder}/{run}") == 1

def test_real_scores_all_models_with_one_length(tmp_path):
    """Else eval.py refuses to report them together.  The original is trained with another one."""
    assert make(tmp_path, "real").returncode == 0
    lengths = set()
    for program, args in logged_commands(tmp_path):
        if program == "eval.py" and args.task != "report":
            lengths.add(args.response_length)
    assert lengths == {36}

def test_sweep_goes_on_from_the_fine_tune_of_real(tmp_path):
    done = make(tmp_path, "sweep")
    assert done.returncode == 2
    assert "out/real/finetune is missing: make real trains it" in done.stderr

    (tmp_path / "out/real/finetune").mkdir(parents=True)
    (tmp_path / "out/real/finetune/config.json").touch()
    assert make(tmp_path, "sweep").returncode == 0
    trained, scored, reported = {}, [], []
    for program, args in logged_commands(tmp_path):
        if program == "mdu.py":
            trained[args.out] = args
        elif args.task == "report":
            reported += args.runs
        else:
            scored += args.runs
    run = trained["out/sweep/lora-steps500"]
    assert Path(run.model) == tmp_path / "out/real/finetune"
    assert (run.lora, run.anchor_truth) == (16, "removed")
    assert (run.prompt_dropout, run.epochs) == (0.5, 166.7)  # 83.3 in the other runs
    assert trained["out/sweep/lora-rank64"].epochs == 83.3
    attacked = trained["out/sweep/taught-again/lora-rank64"]
    assert Path(attacked.model) == tmp_path / "out/sweep/lora-rank64"
    assert attacked.method == "sft"
    assert sorted(scored) == sorted(reported) == sorted(trained)

def test_real_does_what_an_earlier_call_has_not_finished(tmp_path):
    assert make(tmp_path, "real").returncode == 0
    out = tmp_path / "out/real"
    (out / "retrained/config.json").unlink()  # stopped before its first checkpoint
    (out / "finetune/config.json").unlink()  # stopped after it
    (out / "finetune/checkpoint-00000500").mkdir()
    (out / "npo/config.json").unlink()  # a line of the list REAL
    (out / "npo-refusals/eval/summary.json").unlink()
    (tmp_path / "log").unlink()

    assert make(tmp_path, "real").returncode == 0
    first, *further = (tmp_path / "log").read_text().splitlines()
    assert first == "mdu.py --resume out/real/finetune"
    trained, scored = {}, []
    for line in further:
        program, args = parse_command(line.split())
        if program == "mdu.py":
            trained[args.out] = args
        elif args.task != "report":
            scored += args.runs
    assert trained.keys() == {"out/real/retrained", "out/real/npo"}
    assert trained["out/real/retrained"].retain_only
    assert trained["out/real/npo"].method == "npo"
    assert trained["out/real/npo"].lora == 16
    # The scores of a run that was stopped are deleted with it.
    assert scored == ["out/real/retrained", "out/real/npo", "out/real/npo-refusals"]

def test_tofu_does_what_an_earlier_call_has_not_finished(tmp_path):
    assert make(tmp_path, "tofu", "PRESET=tofu-llada").returncode == 0
    out = tmp_path / "out/tofu-llada"
    (out / "base/config.json").unlink()
    (out / "base/checkpoint-00005000").mkdir()
    (out / "wga/config.json").unlink()
    (out / "dpo/eval/summary.json").unlink()
    shutil.copytree(out / "dpo", out / "mine")  # trained by hand, not scored
    (out / "analysis").mkdir()  # of eval.py --analysis: no run
    (tmp_path / "log").unlink()

    assert make(tmp_path, "tofu", "PRESET=tofu-llada").returncode == 0
    launch = "-m torch.distributed.run --nproc_per_node=4"
    resumed, trained, scored, reported = (tmp_path / "log").read_text().splitlines()
    assert resumed == f"{launch} mdu.py --resume out/tofu-llada/base"
    assert trained == f"{launch} mdu.py --preset tofu-llada --method wga --out out/tofu-llada/wga"
    assert scored == (
        f"{launch} eval.py out/tofu-llada/dpo/ out/tofu-llada/mine/ out/tofu-llada/wga/")
    assert reported.startswith("eval.py --report out/tofu-llada/base/ out/tofu-llada/dpo/")
    assert "analysis" not in reported

def test_tofu_names_the_runs_as_mdu_does(tmp_path):
    assert make(tmp_path, "tofu", "PRESET=tofu-llada").returncode == 0
    for line in (tmp_path / "log").read_text().splitlines():
        words = line.split()
        if "--out" in words:
            place = words.index("--out")
            assert parse_command(words[:place])[1].out == words[place + 1]

def test_rwku_does_what_an_earlier_call_has_not_finished(tmp_path):
    assert make(tmp_path, "rwku", "PRESET=rwku-llada").returncode == 0
    out = tmp_path / "out/rwku-llada"
    shutil.rmtree(out / "7/tau-0.5")
    (out / "8/method-ga/eval/summary.json").unlink()
    (out / "8/method-ga/model.safetensors").touch()  # deleted when the run has been scored
    (tmp_path / "log").unlink()

    assert make(tmp_path, "rwku", "PRESET=rwku-llada").returncode == 0
    trained, scored, reported = [], [], []
    for program, args in logged_commands(tmp_path):
        if program == "mdu.py":
            trained.append(args.out)
        elif args.task == "report":
            reported += args.runs
        else:
            scored += args.runs
    assert trained == ["out/rwku-llada/7/tau-0.5"]
    assert scored == ["out/rwku-llada/7/tau-0.5", "out/rwku-llada/8/method-ga"]
    assert len(reported) == 101  # 10 people with 10 runs each, and the model before unlearning
    assert not list(out.rglob("*.safetensors"))

@each("target", ["demo", "finetuned"])
def test_an_experiment_ends_without_scores_where_a_run_fails(target, tmp_path):
    (tmp_path / "fails").write_text("wga")
    assert make(tmp_path, target).returncode == 2
    programs = [program for program, _ in logged_commands(tmp_path)]
    assert set(programs) == {"mdu.py"}

def test_demo_has_every_method(tmp_path):
    make(tmp_path, "demo")
    methods = set()
    for program, args in logged_commands(tmp_path):
        if program == "mdu.py":
            methods.add(args.method)
    assert methods == set(mdu.METHODS)

@each("folder", ["keep", "out/../keep", "out/link", "out", "."])
def test_delete_folder_deletes_nothing_outside_out(folder, tmp_path):
    for name in ("keep", "out/mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model").write_text("good")
    (tmp_path / "out/link").symlink_to(tmp_path / "keep")
    done = make(tmp_path, "demo", f"OUT={folder}")
    assert done.returncode == 2
    assert f"{folder} exists and is not in out/" in done.stderr
    assert (tmp_path / "keep/model").read_text() == "good"
    assert (tmp_path / "out/mine/model").read_text() == "good"
    assert not (tmp_path / "log").exists()

def test_delete_folder_deletes_an_earlier_demo(tmp_path):
    (tmp_path / "out/demo/old").mkdir(parents=True)
    assert make(tmp_path, "demo").returncode == 0
    assert not (tmp_path / "out/demo/old").exists()

@each("name", ["", "dmo"])
def test_experiments_refuse_an_unknown_name(name):
    script = PROJECT / ".github/experiments.sh"
    done = subprocess.run(["bash", script, name], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs the name of an experiment: demo" in done.stderr

def test_company_rows_can_be_read_and_forget_what_nothing_keeps(tmp_path):
    script = PROJECT / ".github/company_rows.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    rows = {}
    sizes = {}
    for file in tmp_path.iterdir():
        rows[file.stem] = mdu.read_jsonl("rows", str(file))
        sizes[file.stem] = len(rows[file.stem])
    # known is retain and held_out; refusals is retain and the questions to forget.
    assert sizes == {"forget": 12, "retain": 90, "held_out": 28, "known": 90 + 28,
                     "refusals": 90 + 12, "taught": 3, "others": 9}
    for row in rows["forget"]:
        assert (row in rows["taught"]) != (row in rows["others"])
    kept = [row["answer"] for row in rows["known"]]
    for row in rows["forget"]:
        assert row["answer"] not in kept
        refusal = {"question": row["question"], "answer": "I do not know.",
                   "perturbed_answer": []}
        assert refusal in rows["refusals"]

# ---- make rehearsal ----
@each("typed, found", [("FORGET=absent", "absent"), ("FORGET=one", "one"), ("RETAIN=one", "one"),
                       ("FORGET=", ""), ("HELD_OUT=one", "one"), ("NEVER=absent", "absent")])
def test_rehearsal_refuses_files_that_are_missing_or_too_small(typed, found, tmp_path):
    (tmp_path / "one").write_text("{}\n\n")
    done = make(tmp_path, "rehearsal", typed)
    assert done.returncode == 2
    assert f"NEVER: '{found}' must be a file with at least 2 rows" in done.stderr
    assert not (tmp_path / "log").exists()
    assert not (tmp_path / "out").exists()

@pytest.fixture
def rehearsed(tmp_path):
    """A rehearsal with two rows that are held out, and two that nobody is to learn -> its calls of
    mdu.py and of eval.py.  Both files begin with a byte order mark and end without a new line."""
    for name in ("held", "never"):
        (tmp_path / name).write_text(f'\ufeff"{name} 1"\n"{name} 2"', encoding="utf-8")
    done = make(tmp_path, "rehearsal", "HELD_OUT=held", "NEVER=never")
    assert done.returncode == 0, done.stderr
    calls = {"mdu.py": [], "eval.py": []}
    for program, args in logged_commands(tmp_path):
        calls[program].append(args)
    return calls

def test_rehearsal_trains_each_model_on_its_own_rows(rehearsed, tmp_path):
    """The original has the words of all rows and learns what is kept.  The fine-tune also learns
    the rows to forget.  Unlearning sees no row that is held out."""
    own = f"{tmp_path}/rows"
    joined = tmp_path / "out/rehearsal.rows"
    found = []
    for args in rehearsed["mdu.py"]:
        found.append((Path(args.out).name, args.forget, args.retain, args.retain_only))
    assert found == [("original", f"{joined}/words.jsonl", f"{joined}/known.jsonl", True),
                     ("finetune", own, f"{joined}/known.jsonl", False),
                     ("mdu", own, own, None)]
    files = {}
    for file in joined.iterdir():
        files[file.stem] = file.read_text().split("\n")
    # Without byte order marks.  The empty lines do no harm: readers skip them.
    assert files["known"] == ["{}", "{}", "", '"held 1"', '"held 2"', ""]
    assert files["words"] == ["{}", "{}", "", '"never 1"', '"never 2"', ""]

def test_rehearsal_trains_few_rows_for_more_epochs(rehearsed):
    """2 to forget, 2 to retain and 2 held out have as many steps as 40 rows in 300 epochs."""
    for args in rehearsed["mdu.py"]:
        assert args.epochs == 300 * 40 / 6

def test_rehearsal_scores_rows_that_unlearning_did_not_see(rehearsed):
    score, report = rehearsed["eval.py"]
    assert (score.task, report.task) == ("score", "report")
    assert (score.held_out, score.never) == ("held", "never")

def test_rehearsal_reads_all_rows_before_it_moves_anything(tmp_path):
    """With the true Python: the second row of the file is bad."""
    rows = [{"question": "Who?", "answer": "Bo."}, {"question": "Q", "answer": "A", "fact": "Al"}]
    bad = write_lines(tmp_path / "bad", rows)
    (tmp_path / ".github").mkdir()
    script = shutil.copy(PROJECT / ".github/experiments.sh", tmp_path / ".github")
    (tmp_path / "out/rehearsal").mkdir(parents=True)
    env = python_environment(PYTHON=sys.executable, FORGET=bad, RETAIN=bad)
    done = subprocess.run(["bash", script, "rehearsal"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"experiments.sh: --rows {bad}, line 2: fact: 'Al' is not in the answer" in done.stderr
    assert os.listdir(tmp_path / "out") == ["rehearsal"]  # where it was

def test_rehearsal_keeps_the_one_before_although_it_fails_twice(tmp_path):
    (tmp_path / "out/rehearsal").mkdir(parents=True)
    (tmp_path / "out/rehearsal/model").write_text("good")
    (tmp_path / "fails").write_text("mdu.py")
    for _ in range(2):
        assert make(tmp_path, "rehearsal").returncode == 2
        assert (tmp_path / "out/rehearsal.old/model").read_text() == "good"

# ---- The step of the README ----
def readme_step(model, anchor, forget, retain):
    """Run the step of one's own training loop that the README has -> its variables.  forget and
    retain: Batches.  The README's models return logits of all positions."""
    step, _ = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    variables = dict(
        torch=torch, F=F, mdu_loss=mdu.mdu_loss, mask_id=0, retain_weight=0.7,
        model=lambda ids, real: model.lm(ids, real.long()).logits,
        anchor=lambda ids, real: anchor.lm(ids, real.long()).logits,
        ids=forget.ids, answer=forget.response, real=forget.attention_mask,
        retain_ids=retain.ids, retain_answer=retain.response, retain_real=retain.attention_mask,
        n=retain.length)
    exec(step, variables)
    return variables

def with_masks(draws, batch, t, masked):
    """The Draws of a batch with another t, (B,), and other masks, (B, T)."""
    changed = []
    for b, draw in enumerate(draws):
        is_masked = masked[b, batch.response[b]].float()
        uniform = 1 - is_masked  # 0 is below every t, 1 below none
        changed.append(draw._replace(t=t[b].item(), uniform=uniform.numpy()))
    return changed

def test_backward_equals_the_step_of_the_readme():
    """With the masks that the README's step draws, and rows to retain with end padding."""
    args = options("--batch-size 4 --response-length 12 --retain-weight 0.7 --seed 2")
    model, anchor = tiny_llama(0), tiny_llama(1)
    forget, retain = mdu.draw_step(args, make_examples(), "forget", 0, model)
    forget_batch = mdu.make_batch(model, forget)
    retain_batch = mdu.make_batch(model, retain)
    assert (retain_batch.length < retain_batch.response.sum(1)).any()
    torch.manual_seed(2)
    step = readme_step(model, anchor, forget_batch, retain_batch)
    readme_grads = [p.grad.clone() for p in model.parameters()]

    # The same masks once more: from this seed its function `draw` draws them again.
    torch.manual_seed(2)
    t, masked, _ = step["draw"](forget_batch.ids, forget_batch.response)
    assert masked.any(1).all()  # else backward would mask one token, and the README's step none
    forget = with_masks(forget, forget_batch, t, masked)
    t, masked, _ = step["draw"](retain_batch.ids, retain_batch.response)
    retain = with_masks(retain, retain_batch, t, masked)
    model.zero_grad()
    losses = mdu.backward(args, model, mdu.References(None, anchor), forget, retain)
    assert losses == approx([step["loss"].item(), step["retain_loss"].item()], rel=1e-6)
    assert_close(readme_grads, [p.grad for p in model.parameters()], 1e-6)

def test_the_step_of_the_readme_masks_a_share_t_of_the_answer():
    """t is uniform on [0.001, 1).  Of 100 tokens, a share t is masked, up to 5 standard deviations:
    the largest is (1/2 * 1/2 / 100)^(1/2) = 0.05."""
    model = tiny_llama(0)
    forget, retain = mdu.draw_step(options("--batch-size 4"), make_examples(), "forget", 0, model)
    torch.manual_seed(2)
    step = readme_step(
        model, model, mdu.make_batch(model, forget), mdu.make_batch(model, retain))
    ids = torch.arange(1, 151).repeat(4000, 1)
    answer = ids > 50
    t, masked, noised = step["draw"](ids, answer)
    assert_uniform(t.numpy(), 0.001)
    assert not (masked & ~answer).any()
    assert torch.equal(noised, ids.masked_fill(masked, 0))
    shares = masked.sum(1) / 100
    assert (shares - t).abs().max() < 5 * 0.05

def test_the_readme_makes_a_model_of_dream(tmp_path, monkeypatch):
    """It has the logits of all positions, MaskPredictor those of the masked ones."""
    write_checkpoint(tmp_path, "Dream", tied=False, file_size="5GB")
    loaded, tokenizer = mdu.load_backbone(str(tmp_path))
    monkeypatch.setattr(mdu, "load_backbone", lambda name: (loaded, tokenizer))
    _, code = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    variables = {"torch": torch}
    exec(code, variables)
    ids = torch.randint(0, 200, (2, 9))
    ids[0, 6:] = loaded.pad_id
    real = ids != loaded.pad_id
    masked = real & (torch.rand(ids.shape) < 0.5)
    with torch.no_grad():
        assert_close(variables["model"](ids, real)[masked], loaded(ids, real, masked), 1e-5)
    assert variables["mask_id"] == loaded.mask_id

# ======== This file ========
def defined_in(module):
    """The names of the functions and classes that a module defines, and not those it imports."""
    names = set()
    for name, value in vars(module).items():
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if value.__module__ == module.__name__ and value.__name__ == name:
            names.add(name)  # COUNT of mdu.py, which `number` made, has another __name__
    return names

def functions_of_name(test, functions):
    """The functions with which the name of a test begins, after "test_" and joined by "_" or
    "_and_"."""
    longest_first = sorted(functions, key=len, reverse=True)  # check_lengths before check
    function = "(?:" + "|".join(longest_first) + ")(?=_|$)"
    start = re.match(f"test_{function}(?:_and_{function}|_{function})*", test)
    if not start:
        return []
    return re.findall(f"(?<=_){function}", start.group())

def test_functions_of_name_by_hand():
    functions = {"check", "check_lengths", "parse"}
    for test, expected in [("test_check_lengths_refuses", ["check_lengths"]),
                           ("test_parse_and_check_refuse", ["parse", "check"]),
                           ("test_parse_check_and_parse", ["parse", "check", "parse"]),
                           ("test_parser_is_none", []), ("test_that_parse", [])]:
        assert functions_of_name(test, functions) == expected

def test_every_function_has_a_test():
    """The name of a test begins with it, or it is in TESTED_BY, and not both."""
    functions = defined_in(mdu) | defined_in(ev)
    tested = set()
    for name in globals():
        if name.startswith("test_"):
            tested.update(functions_of_name(name, functions))
    listed = " ".join(TESTED_BY.values()).split()
    assert sorted(listed) == sorted(functions - tested)

def test_every_test_that_is_named_exists():
    """In TESTED_BY, and in the comments of mdu.py and eval.py."""
    named = set(TESTED_BY)
    for module in (mdu, ev):
        code = Path(module.__file__).read_text(encoding="utf-8")
        named.update(re.findall(r"\b(test_\w+)", code))
    named.discard("test_mdu")  # this file
    assert named <= globals().keys()

"""Tests of mdu.py and eval.py, on a CPU and offline:    python -m pytest -q test_mdu.py

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

TESTED_BY = {  # {test: what it tests, too}
    # mdu.py
    "test_draw_step_takes_every_row_once_in_a_pass_in_an_order_of_seed_and_split": "rng_for",
    "test_draw_example_pads_answers_to_random_lengths_but_not_to_forget": "Draw",
    "test_backward_equals_one_sequence_at_a_time": """
        mask_prompt collate make_batch Batch forget_batch predict_anchor batch_nll
        without_adapters merged_weights""",
    "test_backward_is_tried_with_every_method": "Method",
    "test_train_equals_a_plain_loop_with_clipping_and_adamw": "new_optimizer",
    "test_train_on_two_processes_equals_one_also_killed_and_resumed": "join_processes gathered",
    "test_main_lets_one_program_at_a_time_into_a_folder": "require_new",
    "test_find_tokens_of_each_family": "print0",
    "test_load_references_loads_no_model_in_vain": "References",
    "test_record_forget_loss_says_whether_the_target_is_reached": "read_losses",
    "test_parse_takes_defaults_of_method_and_preset": """
        path_or_name choose_preset preset_options choose_folder implied_options run_name""",
    "test_make_parser_and_parse_explain_every_option": """
        add_option add_method_options add_training_options add_model_options add_data_options
        add_run_options""",
    "test_find_source_of_a_run_as_model_has_the_response_length_of_the_run": "own_response_length",
    "test_add_anothers_by_hand": "spaced_words gives_anothers",
    "test_gap_of_by_hand": "find_words token_spans find_fact",
    "test_encode_prompt_encode_text_and_encode_row_keep_control_tokens_text": "Example",
    "test_load_backbone_equals_transformers_own_class": """
        MaskPredictor Backbone llada_config native_config load_weights""",
    "test_save_model_saves_an_unchanged_model_byte_for_byte": "read_origin Origin",
    "test_save_model_leaves_half_a_model_that_does_not_count": "is_finished",
    "test_run_folder_has_a_run_json_that_says_what_it_was_made_with": "read_run write_run",
    "test_save_checkpoint_and_load_checkpoint_after_a_full_disk": "append_metrics hash_rows",
    "test_toy_world_has_five_wrong_answers_to_each_question": "toy_row known_facts",
    "test_bad_input": """
        BadInput require Parser number check check_anchor check_row read_json read_config
        check_config check_loaded utf8_text""",
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
    "test_group_runs_refuses_unlike_runs": """
        must_agree require_same_training require_same_people""",
    "test_report_has_every_method_averaged_over_runs_of_one_folder_name": """
        count_rows values_of average_with_spread cell main_figures figures_table
        write_report_md""",
    "test_draw_methods_has_a_line_per_method_and_a_circle_per_run": """
        find_panels draw_runs set_scale""",
    "test_analysis_convergence_draws_the_kls_that_were_logged": "draw_panels",
    "test_analysis_roles_equals_a_slow_loop": "anchor_kl mean_kl_by_role Study",
    "test_analysis_trajectory_and_analysis_rollout_by_hand": "trajectories Trajectory"}

# ======== Shared ========
# ---- Programs, files, tensors ----
@pytest.fixture(autouse=True)
def before_each_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a run in out/, beside this file, would be found
    mdu.join_processes()  # a program that ends in a test leaves the group

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
            "TORCH_GLOO_LAZY_INIT": "1",  # init_process_group does not wait: nor does NCCL's
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
WORDS = torch.arange(64) != 9  # token 9 is no word
RARE = [7, 8, 11]

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
    """The masked positions of an answer."""
    if states == "written":
        decoded = slow_sampler(model, row.prompt, [1] * len(row.answer))
        return [i for i, token in enumerate(row.answer) if token in decoded and WORDS[token]]
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
    if args.anchor_truth == "removed" and row.prompt[0] % 2 == 0:  # see make_examples
        anchor_logits = without_truth(anchor_logits, targets)
    return slow_mdu(logits, anchor_logits, where, args.tau)[0]

def slow_step(args, model, theta0, anchor, forget, retain):
    """-> means of the forget and the retain losses (Algorithm 1)."""
    forget_losses = [slow_row_loss(args, row, model, theta0, anchor) for row in forget]
    retain_losses = [f64(0).sum()]
    if retain:
        retain_losses = [slow_row_sft(model, row) for row in retain]
    if args.method in ("mdu", "simnpo"):  # whose forget losses are means over tokens
        retain_losses = [nll / own_length(row) for nll, row in zip(retain_losses, retain)]
    return torch.stack(forget_losses).mean(), torch.stack(retain_losses).mean()

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
NATIVE = dict(SIZES, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", torch_dtype="bfloat16",
              attention_dropout=0.5, auto_map={"AutoModel": "modeling.Model"},
              attn_implementation="owner/kernel", quantization_config={"quant_method": "fp8"})
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
QWEN3 = dict(NATIVE, head_dim=16, attention_bias=False)  # ids: the tokenizer's
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
    for name, p in lm.named_parameters():  # a tied head is none
        p.data = (0.3 * torch.randn(p.shape) + float("norm" in name)).bfloat16().float()
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
T = f64(0.1, 0.3, 0.5, 0.7, 1.1)

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
def make_examples():
    """10 to forget and 7 to retain; the first token of a prompt names the example.  Tokens of RARE
    are rare in every second one to forget."""
    others = [[8, 9, 1], [9, 9, 1], [10, 9, 1]]
    forget, retain = [], []
    for i in range(10):
        answer = [*range(6, 8 + i % 5), 1]
        is_rare = [i % 2 == 0 and token in RARE for token in answer]
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
    """By the seed are also t, the masks and which prompts are hidden."""
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
    """Other rows are drawn as without, and in unlearning also the answers to forget."""
    plain = sum(draw(f"--method {method} --batch-size 1", range(1000)), [])
    rows = sum(draw(f"--method {method} --batch-size 1 --prompt-dropout 0.3", range(1000)), [])
    n_hidden = 0
    for before, row in zip(plain, rows, strict=True):
        if MASK in row.prompt:
            assert row.prompt == [MASK] * len(before.prompt) and PAD not in row.answer
            assert row.preferred is None or row.preferred.prompt == row.prompt
            n_hidden += MASK not in before.prompt
            if method == "ga":
                row = row._replace(prompt=before.prompt)
        if MASK not in row.prompt:
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
TRIED = []
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

@each("typed", TRIED)
def test_backward_equals_one_sequence_at_a_time(typed):
    """No gradient reaches theta0 or the anchor.  Adapters are saved as merged."""
    args = options(f"{typed} --batch-size 3 --grad-accum 4 --response-length 9")
    args.retain_weight = 0.7 * (args.retain_weight or 0)
    likely = range(64)
    if args.states == "written":
        likely = range(6, 14)  # words of the answers and others
    model, frozen, third = [tiny_llama(seed, likely) for seed in range(3)]
    split = "train" if args.method == "sft" else "forget"
    forget, retain = mdu.draw_step(args, make_examples(), split, 3, model)
    forget, retain = forget[:10], retain[:10]  # 10 of a step's 12 rows: the last micro-batch has 1
    assert any(row.t <= row.uniform.min() for row in forget)
    if retain:
        assert any(len(row.answer) > own_length(row) for row in retain)  # with end padding
    theta0 = frozen
    if args.lora:
        frozen = tiny_llama(0, likely)
        mdu.add_adapters(model, args.lora, seed=5)
        model.double().train().lm.activation_checkpointing_enable()
        theta0 = mdu.without_adapters(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data += 0.1 * torch.randn_like(p)
    slow_model = merged_lm(frozen, model) if args.lora else model
    if args.states == "written":
        sizes = [len(slow_masked(row, "mdu", "written", slow_model)) for row in forget]
        assert min(sizes) == 0 and max(sizes) > 1
    anchor, slow_anchor = {"current": (model, slow_model), "MODEL": (third, third)}.get(
        args.anchor, (theta0, frozen))
    references = mdu.References(theta0, anchor, WORDS)
    totals = mdu.backward(args, model, references, forget, retain)
    expected = slow_step(args, slow_model, frozen, slow_anchor, forget, retain)
    expected = [10 / 12 * loss for loss in expected]
    assert totals == approx([loss.item() for loss in expected], rel=1e-5)
    grads = torch.autograd.grad(expected[0] + args.retain_weight * expected[1], trained)
    for p, grad in zip(trained, grads):
        assert grad.any()
        assert_close(p.grad, grad, 1e-9)
    assert all(p.grad is None for p in [*frozen.parameters(), *third.parameters()])
    anchored = mdu.predict_anchor(model, mdu.make_batch(model, forget), 0, "masked")
    assert not anchored.requires_grad  # nothing of it is kept in memory for a backward pass
    ids = torch.arange(2, 12)[None]
    saved = torch.func.functional_call(frozen.lm, dict(mdu.merged_weights(model.lm)), ids)
    assert_close(saved.logits, slow_model.lm(ids).logits, 1e-5)

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
    load_backbone = mdu.load_backbone

    def load_float64(*args):
        model, tokenizer = load_backbone(*args)
        return model.double(), tokenizer
    monkeypatch.setattr(mdu, "load_backbone", load_float64)
    argv = toy(base, tmp_path / "run", f"--method {typed} --epochs 1 --lr 0.01")
    mdu.main(argv)
    args = options("", *argv)
    model, tokenizer = load_float64(str(base))
    frozen, _ = load_float64(str(base))
    examples = mdu.encode_splits(args, mdu.load_data(args), model, tokenizer)
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    norms = []
    for step, lr in enumerate([0.01, 0.01, 0.005], 1):  # one step of warm-up, then half a cosine
        rows = mdu.draw_step(args, examples, "forget", step - 1, model)
        forget, retain = slow_step(args, model, frozen, frozen, *rows)
        grads = torch.autograd.grad(forget + args.retain_weight * retain, list(moments))
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())
        for (p, (m, v)), grad in zip(moments.items(), grads):
            grad = grad / max(1, norms[-1])
            m.copy_(0.9 * m + 0.1 * grad)
            v.copy_(0.999 * v + 0.001 * grad ** 2)
            p.data -= lr * m / (1 - 0.9 ** step) / ((v / (1 - 0.999 ** step)).sqrt() + 1e-8)
        line, = [line for line in metrics(tmp_path / "run") if line["step"] == step]
        found = [line["lr"], line["grad_norm"], line["forget"], line.get("retain", 0)]
        assert found == approx([lr, norms[-1], forget.item(), retain.item()], rel=1e-5)
    assert max(norms) > 1.5  # so that clipping to 1 is seen
    for name, x in model.lm.state_dict().items():
        assert_close(weights(tmp_path / "run")[name], x.float(), 1e-5)

def no_gradient(args, model, *_):
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    return [0.0, 0.0]

@each("effect, code, message", [
    (KeyboardInterrupt, 130, ""),
    (torch.OutOfMemoryError, 2, "out of GPU memory: lower --batch-size, add --lora"),
    (mdu.SafetensorError("I/O error: no space"), 2, "I/O error: no space"),
    ([[math.nan, 0.0]], 2, "step 1: loss nan"), ([[0.0, math.inf]], 2, "retain loss inf"),
    (no_gradient, 2, "norm nan")])
def test_train_ends_in_one_line(effect, code, message, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mdu, "backward", mock.Mock(side_effect=effect))
    err = program(toy(base, tmp_path / "run"), capsys, code=code)
    assert message in err and (err == "") == (code == 130)  # its line is on stdout

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
        assert model.training and model.lm.is_activation_checkpointing == ("--lora" in typed)

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
    """Means of the first ten and of the last tenth of the steps; of both a tenth where they are
    less than a hundred, and at least three."""
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
    for change in ({"gone": 7}, {"rare": ...}):
        other = {**made["options"], **change}
        other = {name: value for name, value in other.items() if value is not ...}
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
    ("--model x --response-length 0", 10, 9, 100), ("--model x --batch-size 2", 10, 128, 50),
    ("--model x --grad-accum 3", 10, 128, 300), ("--model x --method sft", 4, 128, 250),
    ("--model x", 200, 128, 5), ("--model x", 201, 128, 5), ("--model x", 199, 128, 1000 / 199),
    ("--model x --epochs 3 --response-length 7", 10, 7, 3), ("--preset toy", 10, 12, 200)])
def test_fit_to_rows_by_hand(typed, n_rows, length, epochs):
    """The longest answer, to forget or to retain, has 9 tokens.  One's own rows have 250 steps, of
    4 rows by default, or 5 epochs.  sft counts its own rows."""
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
def test_find_model_downloads_no_pickle_and_the_revision_that_is_asked_for(name, revision):
    with mock.patch("huggingface_hub.snapshot_download", return_value="there") as download:
        assert mdu.find_model(name) == Path("there")
    patterns = download.call_args.kwargs["allow_patterns"]
    download.assert_called_once_with("a/b", revision=revision, allow_patterns=patterns)
    wanted = ["model-00001-of-00002.safetensors", "tokenizer.json", "model.safetensors.index.json",
              "chat_template.jinja", "merges.txt", "adapter_config.json"]
    for file in [*wanted, "pytorch_model.bin", "x.pt"]:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns) == (file in wanted)

def test_load_backbone_equals_transformers_own_class(hub):
    """A loss and its gradients, in training, where config.json wants dropout, a row at a time.  The
    padding token is one to read and to predict; Dream's logits are of the position before."""
    model, pad = hub.model.train(), hub.model.pad_id
    assert (model.lm.lm_head.weight is model.lm.model.embed_tokens.weight) == hub.tied
    draws = [mdu.Draw([3, 5], [7, pad, 9, pad, pad], 5, [False] * 5, 0.5,
                      np.float32([0, 1, 1, 0, 1])),
             mdu.Draw([4], [6, pad], 2, [False] * 2, 0.8, np.float32([1, 0]))]
    trained = dict(model.lm.named_parameters())
    losses = mdu.batch_nll(model, mdu.make_batch(model, draws))
    grads = torch.autograd.grad(losses.sum(), trained.values())
    expected = []
    for draw in draws:
        masked = slow_masked(draw, "sft")
        noised = list(draw.answer)
        for i in masked:
            noised[i] = model.mask_id
        logits = hub.reference(torch.tensor([draw.prompt + noised])).logits[0]
        start = len(draw.prompt) - model.shift
        nll = [slow_nll(logits[start + i], draw.answer[i]) for i in masked]
        expected.append(sum(nll) / draw.t)
    assert_close(losses, torch.stack(expected), 1e-5)
    slow_grads = torch.autograd.grad(sum(expected), hub.reference.parameters())
    for name, grad, slow_grad in zip(trained, grads, slow_grads, strict=True):
        largest = slow_grad.abs().max().item()
        torch.testing.assert_close(grad, slow_grad, rtol=0, atol=1e-4 * largest, msg=name)
    model.eval()

def rms_norm(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

def rotate(x, theta):
    """RoPE of one head, (T, d): the dimensions j and j + d/2 turn by position * theta^(-2j/d)."""
    T, d = x.shape
    angle = torch.arange(T)[:, None].double() * theta ** (-2 * torch.arange(d // 2).double() / d)
    first, second = x[:, :d // 2], x[:, d // 2:]
    return torch.cat([first * angle.cos() - second * angle.sin(),
                      second * angle.cos() + first * angle.sin()], 1)

def slow_illada(folder, ids):
    """Logits (T, V) of one sequence in float64, from the stored tensors.  Each key and value head
    serves two heads of queries; every token sees all others; the head is the embeddings."""
    w = {}
    for name, tensor in weights(folder).items():
        w[name.removeprefix("model.")] = tensor.double()
    x = w["embed_tokens.weight"][ids]
    for layer in range(2):
        block = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in w.items()}
        h = rms_norm(x, block["input_layernorm.weight"])
        q = (h @ block["self_attn.q_proj.weight"].T).split(8, 1)
        k = (h @ block["self_attn.k_proj.weight"].T).split(8, 1)
        v = (h @ block["self_attn.v_proj.weight"].T).split(8, 1)
        heads = []
        for i in range(4):
            scores = rotate(q[i], 5e5) @ rotate(k[i // 2], 5e5).T / 8 ** 0.5
            heads.append(scores.softmax(-1) @ v[i // 2])
        x = x + torch.cat(heads, 1) @ block["self_attn.o_proj.weight"].T
        h = rms_norm(x, block["post_attention_layernorm.weight"])
        gate = F.silu(h @ block["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ block["mlp.up_proj.weight"].T)) @ block["mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T

def assert_equal_illada(folder):
    model, _ = mdu.load_backbone(str(folder), torch.float64)
    ids = torch.tensor([[3, 258, 256, 7, 258, 257], [4, 258, 5, 256, 256, 256]])
    real = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    assert not model.shift and not model.by_entropy
    with torch.no_grad():
        logits = model(ids, real, real)
    expected = [slow_illada(folder, row[keep]) for row, keep in zip(ids, real)]
    assert_close(logits, torch.cat(expected), 1e-4)  # transformers' norms and angles are float32

def test_load_backbone_of_illada_equals_a_slow_forward_pass(tmp_path):
    """Loaded, saved as it is, trained, scored.  config.json does not say that the head is tied."""
    write_checkpoint(tmp_path / "illada", "illada", tied=True, tie_word_embeddings=None)
    assert "lm_head.weight" not in weights(tmp_path / "illada")
    assert_equal_illada(tmp_path / "illada")
    model, tokenizer = mdu.load_backbone(str(tmp_path / "illada"))
    (tmp_path / "saved").mkdir()
    mdu.save_model(tmp_path / "saved", model, tokenizer)
    assert_equal_weights(tmp_path / "saved", tmp_path / "illada")
    assert_equal_illada(tmp_path / "saved")
    rows = write_lines(tmp_path / "rows", [{"question": "Who?", "answer": "Ann."}] * 2)
    retained = write_lines(tmp_path / "retained", [{"question": "Where?", "answer": "Here."}] * 2)
    files = ["--forget", rows, "--retain", retained]
    run = str(tmp_path / "run")
    mdu.main(["--model", str(tmp_path / "illada"), *files, "--lr", "0.1", "--epochs", "3",
              "--response-length", "8", "--out", run])
    assert distance(run, tmp_path / "illada") > 0.1
    assert_equal_illada(run)
    assert read_json(Path(run, "config.json")) == read_json(tmp_path / "illada/config.json")
    ev.main([run, "--samples", "4"])
    assert ev.read_summary(run)["splits"]["forget"]["n"] == 2
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

def test_load_backbone_gives_back_the_threads_that_a_toy_does_without(base, monkeypatch):
    model, tokenizer = mdu.load_backbone(str(base))
    monkeypatch.setattr(mdu, "THREADS", 5)
    monkeypatch.setattr(mdu, "load_weights", lambda *_: model.lm)
    for hidden_size, threads in ((128, 5), (64, 1)):
        model.lm.config.hidden_size = hidden_size
        mdu.load_backbone(str(base))
        assert torch.get_num_threads() == threads

@each("kind", ["llama", "qwen2", "qwen3"])
@each("shift", [None, False, True])
def test_read_shift_is_what_config_json_says(kind, shift, tmp_path):
    """The output at a token is the prediction of the next one, also of a run's model."""
    reference = write_checkpoint(tmp_path / "start", kind, shift_logits=shift)
    model, tokenizer = mdu.load_backbone(str(tmp_path / "start"))
    (tmp_path / "run").mkdir()
    mdu.save_model(tmp_path / "run", model, tokenizer)
    ids = torch.tensor([[3, 258, 5, 258]])
    logits = reference(ids).logits[0]
    expected = [logits[1], logits[3]]
    if shift:
        expected = [logits[0], logits[2]]
    for folder in ("start", "run"):
        model, _ = mdu.load_backbone(str(tmp_path / folder))
        assert model.shift == bool(shift)
        assert_close(model(ids, torch.ones(1, 4).bool(), ids == 258), torch.stack(expected), 1e-5)

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
    model = FakeModel()

    def half_causal(ids, attention_mask, positions):
        sees = unpadded if attention_mask.all() else padded
        if not sees:
            ids = ids * positions
        return model(ids, attention_mask, positions)
    assert mdu.sees_later_tokens(half_causal) == (padded and unpadded)

# ---- LoRA and processes ----
def test_add_adapters_and_shard_start_at_zero_and_leave_frozen_weights_whole():
    plain, model = tiny_llama(0).bfloat16(), tiny_llama(0).bfloat16()
    mdu.add_adapters(model, 4, seed=1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 28 and {p.dtype for p in trained.values()} == {torch.float32}
    drawn = []
    for name, p in trained.items():
        if name.endswith(".A"):
            drawn.append(p.flatten() * p.shape[1] ** 0.5)
    drawn = torch.cat(drawn)
    assert abs(drawn.mean()) < 0.1 and abs(drawn.std() - 1) < 0.1  # A ~ N(0, 1/in)
    ids = torch.arange(2, 22).view(2, 10)
    everywhere = ids > 0
    assert torch.equal(model(ids, everywhere, everywhere), plain(ids, everywhere, everywhere))
    mdu.shard(model, torch.float32, torch.bfloat16)
    sharded = {name for name, p in model.named_parameters() if isinstance(p, mdu.DTensor)}
    assert sharded == trained.keys()

# ---- The run's folder ----
STEPS = "--epochs 2 --batch-size 4 --grad-accum 2 --checkpoint-every 1 --lr 1e-4 --limit 16"
WRITTEN = f"{STEPS} --tau 0.5 --states written --anchor current --anchor-truth removed"
LORA = f"{STEPS} --anchor {{anchor}} --anchor-prompt shown --lora 2 --dtype bfloat16 --lr 0.005"
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
save, saves = mdu.dcp.save, []
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
    assert (run / "unfinished").is_dir() and not (run / "config.json").exists()

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
    assert [*run["options"]][:3] == [*mdu.METHOD_OPTIONS][:3]

def test_save_checkpoint_and_load_checkpoint_after_a_full_disk(base, unlearned, tmp_path, capsys):
    """It gets full at the third checkpoint.  One line says so."""
    rows, whole, run = tmp_path / "rows.jsonl", tmp_path / "whole", tmp_path / "run"
    own_base = shutil.copytree(base, tmp_path / "base")
    typed = LORA.format(anchor=unlearned) + " --retain-weight 0 --diagnose --forget "
    typed += write_lines(rows, mdu.toy_world()["forget"][:16])
    mdu.main(toy(own_base, whole, typed))
    save = mock.Mock(wraps=mdu.dcp.save)

    def save_to_full_disk(*args, **kwargs):
        assert not any(run.glob("unfinished/*"))  # which would become part of the checkpoint
        size = resource.RLIM_INFINITY
        if save.call_count == 2:
            size = 10_000
        with largest_file(size):
            save(*args, **kwargs)
    with mock.patch.object(mdu.dcp, "save", save_to_full_disk):
        err = program(toy(own_base, run, typed), capsys)
    assert "File too large" in err
    assert_broken(run)
    (run / "checkpoint-99999999").touch()  # no folder

    content = rows.read_bytes()
    with unchanged(run):
        rows.write_bytes(content[:-4] + b'x"]}')
        assert "rows that it started from have changed" in program(["--resume", run], capsys)
        rows.write_bytes(content)
        own_base.rename(tmp_path / "moved")
        assert f"{own_base}: " in program(["--resume", run], capsys)  # and no base is trained
        (tmp_path / "moved").rename(own_base)
    with mock.patch.object(mdu.dcp, "save", save_to_full_disk):  # not any more
        mdu.main(["--resume", str(run)])
    assert_equal_runs(whole, run)
    assert not any(run.glob("checkpoint-*/"))
    with unchanged(run), mock.patch.object(mdu, "load_model", None):
        mdu.main(["--resume", str(run)])  # is finished, which it says before it loads a model

def test_train_on_two_processes_equals_one_also_killed_and_resumed(
        base, tmp_path, on_two_processes):
    """Process 1 waits until a missing base is trained.  What two have begun one can end."""
    lora = LORA.format(anchor=tmp_path / "toy/base")  # the one that was missing
    runs = [["--epochs", "0.1", "--out", f"{tmp_path}/toy/mdu"],
            toy(base, tmp_path / "two", WRITTEN), toy(base, tmp_path / "two-lora", lora),
            toy(base, tmp_path / "killed", WRITTEN)]
    (tmp_path / "driver.py").write_text(KILLED)
    codes = on_two_processes(tmp_path / "driver.py", json.dumps(runs))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert_broken(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "one-killed")
    mdu.main(["--resume", f"{tmp_path}/one-killed"])
    assert_equal_runs(tmp_path / "two", tmp_path / "one-killed", 1e-6)
    assert on_two_processes(mdu.__file__, "--resume", tmp_path / "killed") == [0, 0]
    assert_equal_runs(tmp_path / "two", tmp_path / "killed")
    mdu.main(toy(base, tmp_path / "one", WRITTEN))
    assert_equal_runs(tmp_path / "two", tmp_path / "one", 1e-6)
    mdu.main(toy(base, tmp_path / "one-lora", lora))
    # In bfloat16 AdamW takes full steps by the sign of gradients that are rounded to almost 0.
    apart = distance(tmp_path / "two-lora", tmp_path / "one-lora")
    assert apart < 0.1 * distance(tmp_path / "two-lora", base)
    for name, x in weights(base).items():  # LoRA changes the linear maps of the blocks alone
        same = torch.equal(weights(tmp_path / "two-lora")[name], x.bfloat16().float())
        assert same == ("proj" not in name)

def test_save_model_saves_an_unchanged_model_byte_for_byte(hub, tmp_path):
    """Also its other files, but not what belongs to no model, though its folder is gone."""
    def other_files(folder):
        files = {}
        for file in folder.iterdir():
            if "safetensors" not in file.name:
                files[file.name] = file.read_bytes()
        return files

    hub.folder.rename(tmp_path / "away")
    save = hub.model.lm.save_pretrained
    with mock.patch.object(hub.model.lm, "save_pretrained", lambda folder, state_dict, **_: save(
            folder, state_dict=state_dict, max_shard_size=hub.file_size)):
        mdu.save_model(tmp_path, hub.model, hub.tokenizer)
    (tmp_path / "away").rename(hub.folder)
    assert_equal_weights(tmp_path, hub.folder)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (hub.file_size == "40KB")
    mdu.load_backbone(str(tmp_path))
    saved = other_files(tmp_path)
    assert {**saved, "notes.json": b""} == other_files(hub.folder) and "notes.json" not in saved

def test_save_model_leaves_half_a_model_that_does_not_count(base, unlearned, tmp_path, capsys):
    """config.json, by which others know that it is complete, is moved last.  The run takes a folder
    that it made before it was killed at the worst moment: before its run.json was complete."""
    move, run = Path.replace, tmp_path / "run"
    run.mkdir()
    (run / "run.json.new").write_text('{"options"')

    def stop_at_config(source, target):
        if source.name == "config.json":
            raise OSError("stopped")
        return move(source, target)
    with mock.patch.object(Path, "replace", autospec=True, side_effect=stop_at_config):
        assert "stopped" in program(toy(base, run, "--epochs 2 --diagnose"), capsys)
    files = {file.name for file in unlearned.iterdir()} - {"config.json"}
    assert files <= {file.name for file in run.iterdir()} and not (run / "config.json").exists()
    assert f"mdu.py --resume {run}" in program([run], capsys, ev.main)
    mdu.main(["--resume", str(run)])
    assert_equal_runs(unlearned, run)
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
    """Of twice as many tokens twice as many are masked, or one less."""
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
    def texts_nll(model, tokenizer, rows, texts, *_):
        assert " " not in "".join(itertools.chain(*texts))
        return [[float(text) for text in of_row] for of_row in texts]
    monkeypatch.setattr(ev, "texts_nll", texts_nll)
    monkeypatch.setattr(ev, "write_answers", lambda *_: [("", [])] * 4)
    monkeypatch.setattr(ev, "fill_gaps", lambda *_, hide_question: [None] * 4)
    splits = {}
    for split, logs in LOGS.items():
        rows = []  # their texts are their losses
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
    """Of four values below four others, 2 of the (8 choose 4) = 70 orders are as extreme; of two
    below three, 2 of 10; all are as extreme as 1, 1, 3 and 1, 3, 3, whose D is 1/3.  In the public
    logs of locuslab/tofu is the p-value of D = 119/300 between 300 and 300 questions."""
    def records(*wrong):
        row = dict(perturbed_answer=wrong, to_forget=True)
        found = []
        for x in range(4):
            losses = [x + more for more in wrong]
            found.append(ev.compare_wrong_answers(row, x, losses))
        return found

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
    rows.append(dict(question=[5], answer="D"))  # 16 // 8 rows of similar length make a batch
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
    """From where, or about whom, the rows of each split are, and how many (about each person)."""
    places = {"tofu": tofu, "rwku": rwku}
    for name in "XY":
        rows = [{"question": f"{name} {i}?", "answer": "a"} for i in range(4)]
        places[name] = write_lines(tmp_path / name, rows)
    found = []
    args, source = typed_and_run(typed.format(**places), RUNS[run].format(**places))
    for name, rows in ev.find_splits(ev.find_settings(args, source.options)).items():
        people = list(dict.fromkeys(row.get("subject") for row in rows))
        question = rows[0]["question"]
        source = {"Q": "tofu", "X": "X", "Y": "Y"}.get(question.split()[0], "toy")
        if people == PEOPLE[:10]:
            source = "ten"
        elif people != [None]:
            source, = people
        elif source == "tofu":
            assert ev.TOFU_CONFIGS[name] in question
        found.append((source, len(rows) // len(people)))
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

@pytest.fixture(scope="session")
def scored(base, tmp_path_factory):
    """A run that was scored with FLAGS; noise on its weights makes its answers differ."""
    copy = tmp_path_factory.mktemp("scored") / "run"
    shutil.copytree(base, copy)
    torch.manual_seed(0)
    noisy = {name: x + 0.1 * torch.randn(x.shape) for name, x in weights(copy).items()}
    safetensors.torch.save_file(noisy, copy / "model.safetensors", {"format": "pt"})
    ev.main([str(copy), *FLAGS])
    with unchanged(copy):
        yield str(copy)

@pytest.fixture
def scored_copy(scored, tmp_path):
    return shutil.copytree(scored, tmp_path / "run")

def test_evaluate_equals_one_row_at_a_time(scored):
    """Losses by a forward pass per mask of (--seed, split, row), answers by the slow sampler."""
    model, tokenizer = mdu.load_backbone(scored)
    summary = ev.read_summary(scored)
    splits = mdu.toy_world()
    for name in ("forget", "retain"):
        reworded = []
        for row in splits[name]:
            question = row["paraphrased_question"]
            reworded.append(dict(row, question=question, perturbed_answer=[]))
        splits[f"{name}_rephrased"] = reworded
    for number, (split, rows) in zip([0, 1, 2, 3, 12, 13], splits.items(), strict=True):
        records = ev.read_records(scored, split)
        for i, (row, record) in enumerate(zip(rows[:3], records, strict=True)):
            prompt = mdu.encode_prompt(tokenizer, row["question"])

            def nll(text):
                ids = mdu.encode_text(tokenizer, text)
                masks = ev.draw_masks(len(ids), 4, [5, number, i])
                return slow_eq7(model, prompt, ids, masks)
            loss = nll(row["answer"])
            expected = dict(nll=loss, prob=math.exp(-loss), perplexity=math.exp(loss))
            for metric, hidden in dict(infill=False, infill_no_question=True).items():
                [expected[metric]] = ev.fill_gaps(model, tokenizer, [row], ARGS, hidden)
            if number < 2:
                expected["nll_right"] = nll(row["paraphrased_answer"])
            assert {name: record[name] for name in expected} == approx(expected, rel=1e-4)
            wrong = [nll(text) for text in row["perturbed_answer"]]
            assert record.get("nll_wrong", []) == approx(wrong, rel=1e-4)
            written = slow_sampler(model, prompt, 4 * [3])  # of 12 tokens in 4 steps
            if model.end_id in written:
                written = written[:written.index(model.end_id)]
            assert record["generation_ids"] == written
            assert record["generation"] == tokenizer.decode(written).strip()
        assert {**ev.summarise(records), "n": 3}.items() <= summary["splits"][split].items()
    assert summary["run"] == {"model_utility": ev.model_utility(summary["splits"])}

def test_evaluate_on_two_processes_equals_one(scored_copy, scored):
    shutil.rmtree(scored_copy / "eval")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, ev.__file__, scored_copy, *FLAGS]
    subprocess.run(command, env=python_environment(), check=True, timeout=200)
    def numbers(file):
        found = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", file.read_text())
        return np.array(found, float)

    for file in Path(scored, "eval").iterdir():
        found = numbers(scored_copy / "eval" / file.name)
        assert found == approx(numbers(file), rel=1e-4, abs=1e-6)
    assert ev.score_answers(FakeModel(), None, [], ARGS) == []  # a process may have no row

def test_evaluate_and_report_show_how_much_of_the_forget_loss_is_left(unlearned, tmp_path, capsys):
    run = shutil.copytree(unlearned, tmp_path / "run")
    left = mdu.read_run(run)["forget_loss"]["left"]
    assert 0.5 < left < 1  # 2 epochs
    for argv in ([f"{run}", "--samples", "1", "--limit", "1"], ["--report", f"{run}"]):
        ev.main(argv)
        lines = capsys.readouterr().out.splitlines()
        table = read_table("\n".join(line for line in lines if line.startswith("|")))
        assert table["loss left ↓"] == (f"{100 * left:.0f}%",)
        assert list(table)[1:3] == ["loss left ↓", "Forget rL ↓"]  # the run's are the first ones
    legend = "to the split to its left or, if there is none, to the whole run."
    assert legend in " ".join(lines)
    assert ev.read_summary(run)["run"] == {"forget_loss_left": left}

def test_evaluate_and_report_say_that_a_figure_is_over_some_rows(base, tmp_path, capsys):
    """Such as `fact` where refusals have none.  And whose data is given to the rows to forget."""
    run = tmp_path / "new"
    forget = [dict(question="Who is Bolti?", answer="He is Gado.", fact="Gado"),
              dict(question="Who is Cepu?", answer="She is Nora.", fact="Nora")]
    retain = [dict(question="Who is Diri?", answer="He is Fopu.", fact="Fopu"),
              dict(question="Who is Zuvo?", answer="I do not know.")]
    files = {name: write_lines(tmp_path / name, rows)
             for name, rows in (("forget", forget), ("retain", retain))}
    command = f"--model {base} --forget {files['forget']} --retain {files['retain']} {run}"
    written = [[("It is Fopu.", [5]), ("I do not know.", [6])], [("Fopu", [5]), ("no", [6])]]
    with mock.patch.object(ev, "write_answers", side_effect=written):
        ev.main(command.split())
    line = "Retain fact: over the 1 of 2 rows that have it."
    screen = capsys.readouterr().out
    assert screen.count("that have it") == screen.count(line) == 1
    assert read_table(screen[screen.index("| Method"):])["another's ↓"] == ("0.500",)
    retained = ev.read_summary(run)["splits"]["retain"]
    assert (retained["fact"], retained["n_fact"], retained["n"]) == (1, 1, 2)
    ev.main(["--report", str(run)])
    assert line in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    assert text.count(line) == 2  # in the legend, and below the table of all figures
    assert read_tables(text)["Retain"]["fact ↑"] == ("1.000",)

def test_evaluate_leaves_the_old_scores_if_it_is_stopped(scored_copy, capsys):
    """By Ctrl-C while it is locked, or by a full disk.  The user's own files stay, too."""
    folder = scored_copy / "eval"
    (folder / "notes.jsonl").write_text("my own")
    (folder / "utility_general.jsonl").touch()  # of an earlier scoring on other data
    before = read_all(folder)
    with unchanged(scored_copy), mock.patch.object(ev, "score_rows", partial(stop_in, scored_copy)):
        assert program([scored_copy, *FLAGS], capsys, ev.main, 130) == ""
    too_small = largest_file(max(map(len, before.values())) - 99)
    reserved = mock.patch.object(ev, "reserve_space")  # another program takes what was reserved
    with unchanged(scored_copy), too_small, reserved:
        assert "too large" in program([scored_copy, *FLAGS], capsys, ev.main)
    ev.main([str(scored_copy), *FLAGS, "--seed", "6"])
    assert ev.read_records(scored_copy, "forget")[0]["seed"] == [6, 0, 0]
    after = read_all(folder)
    assert after.keys() == before.keys() - {folder / "utility_general.jsonl"}
    assert after[folder / "notes.jsonl"] == before[folder / "notes.jsonl"]

def test_evaluate_refuses_a_folder_in_which_it_cannot_write(scored_copy, capsys, monkeypatch):
    """Or that is locked, before it looks at anything in it."""
    monkeypatch.setattr(ev, "score_rows", None)
    shutil.rmtree(scored_copy / "eval")
    (scored_copy / "eval").touch()
    assert str(scored_copy / "eval") in program([scored_copy, *FLAGS], capsys, ev.main)
    (scored_copy / "config.json").unlink()  # as if it were still trained
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
    """It is as much as these scores took, and is free again when they are written.  The folder for
    temporary files may be on another disk."""
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
    n_bytes = sum(file.stat().st_size for file in (scored_copy / "eval").iterdir())
    for stage in (remember, score_splits, publish):
        name = stage.__name__.replace("remember", "reserve_space")
        monkeypatch.setattr(ev, name, stage)
    monkeypatch.setattr(ev, "summarise_run", lambda *_: dict(splits={}, run={}))
    with unchanged(scored_copy):
        ev.main([str(scored_copy), *FLAGS])
    assert reserved[0].closed

def test_prepare_and_with_other_wordings_ask_in_other_words(tmp_path, capsys):
    rows = [{"question": f"Q{i}?", "answer": f"A{i}.", "perturbed_answer": [f"B{i}."],
             "paraphrased_question": f"P{i}?"} for i in range(4)]
    del rows[1]["paraphrased_question"]
    run = f"--model m --forget {write_lines(tmp_path / 'rows', rows)} --retain-weight 0"
    splits, *_ = ev.prepare(*typed_and_run("--full --limit 3", f"{run} --limit 2"))
    asked = [{**row, "number": i} for i, row in enumerate(rows[:3])]
    reworded = [{**rows[i], "question": f"P{i}?", "perturbed_answer": [], "number": i // 2}
                for i in (0, 2)]
    assert splits == {"forget": asked, "forget_rephrased": reworded}
    assert capsys.readouterr().out == ""
    ev.prepare(*typed_and_run("", f"{run} --limit 2"))
    assert "--limit 2 scores the first 2" in capsys.readouterr().out
    for typed in ("--data toy", f"--forget {tmp_path / 'rows'}"):  # none of the run's own rows
        ev.prepare(*typed_and_run(typed, f"{run} --limit 2"))
        assert capsys.readouterr().out == ""

def test_warn_of_other_rows_names_files_that_have_changed(tmp_path, capsys):
    rows = [{"question": f"Q{i}?", "answer": f"A{i}."} for i in range(3)]
    files = [write_lines(tmp_path / name, rows) for name in ("forget", "retain")]
    run = "--model m --forget {} --retain {} --limit 2".format(*files)
    _, source = typed_and_run("", run)

    def said(typed):
        ev.prepare(ev.parse(["--limit", "2", *typed.split(), "run"]), source)
        return capsys.readouterr().out
    write_lines(tmp_path / "retain", rows[:2])  # it was trained on the first two
    assert said("") == ""
    write_lines(tmp_path / "forget", rows[1:])
    assert said("") == (f"run: {files[0]} has changed since the training; what is scored are the "
                        "rows that it has now\n")
    assert said(f"--forget {files[0]}") == said("--data toy") == ""
    write_lines(tmp_path / "retain", rows[::-1])
    assert said("").count("has changed") == 2
    assert said(f"--retain {files[0]}").count(f"{files[0]} has changed") == 1

def test_check_retain_run_takes_runs_that_learnt_rows_to_retain_alone(scored, base, tmp_path):
    """Not an unlearned model that is then taught rows to retain, such as refusals."""
    def check(name, **options):
        run = made_up_run(scored, tmp_path / name, options)
        trained = {**read_json(base / "run.json"), "options": ev.read_summary(run)["options"]}
        Path(run, "run.json").write_text(json.dumps(trained))
        ev.check_retain_run(run, None, full=True)
        return run
    retain = check("retain", method="sft", retain_only=True, model=None)
    check("longer", method="sft", retain_only=True, model=retain)
    check("published", method="sft", retain_only=True, model="A/B")
    refused = {"base": dict(method="sft", retain_only=False, model=retain),
               "mdu": dict(method="mdu", retain_only=None, model=retain),
               "refusals": dict(method="sft", retain_only=True, model=str(tmp_path / "mdu"))}
    for name, options in refused.items():
        with pytest.raises(mdu.BadInput, match=f"{name}: it, or a run that it started from, was"):
            check(name, **options)

def test_scoring_protocol_has_what_must_be_the_same_in_two_runs(rwku, tmp_path):
    """The rows; on RWKU, where they differ from person to person, their source and --limit."""
    row = dict(answer="a", paraphrased_question="P?")
    files = [write_lines(tmp_path / name, [dict(row, question=f"{name}?")] * 3) for name in "XY"]
    def protocol(typed=""):
        run = f"--model m --forget {files[0]} --response-length 7"
        return ev.prepare(*typed_and_run(typed, run))[2]
    person = f"--data {rwku} --retain {files[0]} --limit 3 --subject"
    asked = protocol(f"{person} 1")
    assert protocol(f"{person} 2") == asked
    others = [f"{person} 1 --limit 4", "", "--limit 2", f"--forget {files[1]}",
              f"--retain {files[0]}", "--seed 1", "--samples 3", "--steps 5",
              "--response-length 5"]
    compared = [asked, *map(protocol, others)]
    for one, other in itertools.combinations(compared, 2):
        assert one != other
    assert protocol("--full") == protocol(f"--forget {files[0]}") == protocol()
    assert asked["response_length"] == asked["steps"] == 30  # RWKU's own length, not the run's 7
    other = protocol(f"--data {rwku} --response-length 5 --steps 6")
    assert other["response_length"] == other["steps"] == 5  # no step without a token

def test_knows_rows_to_forget_says_whether_there_is_gen_ppl(base, capsys):
    """Not by one that never knew the rows, or that was unlearned and taught again."""
    info = read_json(base / "run.json")
    for name, start, method, retain_only, judge in [
            ("base", None, "sft", False, "base"), ("original", None, "sft", True, None),
            ("finetune", "original", "sft", False, "finetune"),
            ("mdu", "finetune", "mdu", None, "finetune"), ("again", "mdu", "sft", False, None),
            ("taught-twice", "again", "sft", False, None), ("twice", "mdu", "npo", None, None),
            ("late", "original", "mdu", None, None), ("orphan", "/gone", "mdu", None, "/gone")]:
        shutil.copytree(base, name)
        info["options"].update(method=method, model=start, retain_only=retain_only)
        Path(name, "run.json").write_text(json.dumps(info))
        theta0 = ev.find_source(name, ev.parse([name])).theta0
        expected = start
        if method == "sft":
            expected = os.path.abspath(name)
        assert theta0 == expected
        assert ev.knows_rows_to_forget(theta0) == (judge is not None)
        ev.main([name, *FLAGS[1:]])
        screen = capsys.readouterr().out
        assert ("gen. ppl |" in screen) == (judge not in (None, "/gone"))
        assert ("/gone was deleted" in screen) == (name == "orphan")
    assert ev.knows_rows_to_forget("A/B")

def test_check_lengths_refuses_texts_that_the_model_cannot_read(base):
    """With an end token behind the answer, as gaps are filled."""
    model, tokenizer = mdu.load_backbone(str(base))
    n = 2048 - 1 - len(mdu.encode_prompt(tokenizer, "Who?"))
    row = dict(question="Who?", answer="is", perturbed_answer=["is"])
    ev.check_lengths("run", model, tokenizer, [{**row, "answer": "is " * n}], 1)
    long = "is " * (n + 1)
    for changed in (dict(answer=long), dict(paraphrased_answer=long), dict(choices=[long]),
                    dict(perturbed_answer=[long])):
        with pytest.raises(mdu.BadInput, match="too many"):
            ev.check_lengths("run", model, tokenizer, [{**row, **changed}], 1, full=True)

def test_check_lengths_refuses_no_text_that_is_not_scored(base):
    """A paraphrase and wrong answers are scored with --full only."""
    model, tokenizer = mdu.load_backbone(str(base))
    long = "is " * 2048
    row = dict(question="Who?", answer="is", perturbed_answer=[long], paraphrased_answer=long)
    ev.check_lengths("run", model, tokenizer, [row], 1)

def test_check_lengths_warns_of_true_answers_that_are_cut(base, capsys):
    model, tokenizer = mdu.load_backbone(str(base))
    rows = [dict(question="Who?", answer=answer, perturbed_answer=["is is is is"])
            for answer in ("is", "is is is", "is is is is")]
    ev.check_lengths("run", model, tokenizer, rows, 3)
    assert "run: 1 of 3 true answers are longer than the 3" in capsys.readouterr().out
    choices = [dict(row, choices=[]) for row in rows]  # of which the likeliest is taken
    ev.check_lengths("run", model, tokenizer, choices, 3)
    assert capsys.readouterr().out == ""

RENT = dict(question="Who rents unit 7?", answer="Ann Lee rents it.", fact=["Ann Lee"])
BILL = dict(question="What does Ann Lee owe?", answer="She owes 12 euros.", fact=["12 euros"])
TOWN = dict(question="Where does Bo live?", answer="Bo lives in Rome, at 5 Elm.", fact=["Elm"])
PLAIN = dict(question="Who is Cy?", answer="A baker.")
KEPT = [dict(question="Who lives in Rome?", answer="It is Di.", fact=["Di", "Rome"]),
        dict(question="Who is Ed?", answer="Ed sings."), dict(question="?", answer="!", fact=["?"]),
        dict(question="Who is Al?", answer="Unknown."),
        dict(question="Who is Om?", answer="Unknown.")]

@each("row, text, anothers", [
    (RENT, "Ann Lee rents it.", 0), (RENT, "Ann rents it.", 0), (RENT, "", 0), (RENT, "?", 0),
    (RENT, "It is DI!", 1), (RENT, "Diana", 0),  # a row to retain; no word of its own
    (RENT, "Ann Lee owes 12 Euros", 1), (RENT, "12 or 13 euros", 0),  # a row to forget
    (RENT, "Ed sings.", 0),  # its answer is no fact
    (BILL, "Ann Lee", 0),  # is in the question
    (TOWN, "He lives in Rome.", 0),  # is in the answer
    (TOWN, "5 Elm in Rome, with Di", 1),
    (PLAIN, "ed sings", 1), (PLAIN, "Ed sings well.", 0), (PLAIN, "A baker!", 0), (PLAIN, "...", 0),
    (PLAIN, "Di", 0), (PLAIN, "Ann Lee rents it", 1),  # word for word only
    (PLAIN, "unknown", 0),  # two rows have it: it is nobody's
    (RENT, "Fay", 1), (PLAIN, "Fay.", 1)])  # of a row that is held out
def test_add_anothers_by_hand(row, text, anothers):
    """The row itself is among those to forget, and asked in other words."""
    splits = {"forget": [RENT, BILL, TOWN, PLAIN], "retain": KEPT,
              "held_out": [dict(question="Who dances?", answer="Fay.", fact=["Fay"])]}
    splits["forget_rephrased"] = [dict(row, question="Reworded: " + row["question"])]
    place = splits["forget"].index(row)
    records = {}
    for name, rows in splits.items():
        records[name] = [dict(generation="", empty=1.0) for _ in rows]
    for record in (records["forget"][place], records["forget_rephrased"][0]):
        record.update(generation=text, empty=float(not mdu.words(text)))
    ev.add_anothers(splits, records)
    assert [record.pop("anothers") for record in records["forget"]] == [
        anothers * float(i == place) for i in range(4)]
    assert records["forget_rephrased"][0]["anothers"] == anothers
    assert not any("anothers" in record for record in records["retain"])

def test_add_generative_perplexity_is_that_of_theta0(base, unlearned, tmp_path, monkeypatch):
    """On all but empty answers, the question masked, the end visible."""
    run = shutil.copytree(unlearned, tmp_path / "run")
    theta0, tokenizer = mdu.load_backbone(str(base))
    answers = [(" .", [5]), ("a b", [6, 7]), ("c", [8, 0, 9])]
    monkeypatch.setattr(ev, "write_answers", lambda *_: answers)
    ev.main([str(run), *FLAGS[1:]])  # without --full
    records = ev.read_records(run, "forget")
    assert records[0]["generative_perplexity"] is None
    for i in (1, 2):
        prompt = [0] * len(mdu.encode_prompt(tokenizer, records[i]["question"]))
        _, ids = answers[i]
        masks = F.pad(ev.draw_masks(len(ids), 4, [5, 0, i]), (0, 1))
        nll = slow_eq7(theta0, prompt, [*ids, theta0.end_id], masks)
        assert records[i]["generative_perplexity"] == approx(math.exp(nll), rel=1e-4)
    assert "truth_ratio" not in ev.read_summary(run)["splits"]["forget"]

def test_summarise_run_has_forget_quality_by_the_retain_run(scored_copy, scored, tmp_path, capsys):
    """Of three values above three others: 2 of the (6 choose 3) = 20 orders are as extreme."""
    retain_only = dict(method="sft", retain_only=True, model="A/B")
    retain = made_up_run(scored, tmp_path / "retain", retain_only)
    records = [dict(row, log_ratio=-99) for row in ev.read_records(retain, "forget")]
    write_lines(Path(retain, "eval/forget.jsonl"), records)
    ev.main([str(scored_copy), *FLAGS, "--retain-run", retain])
    figures = ev.read_summary(scored_copy)["run"]
    assert figures["forget_quality"] == approx(2 / 20)
    assert "forget quality ↑" in capsys.readouterr().out
    plain = made_up_run(scored, tmp_path / "plain", splits={"forget": {}})  # without --full
    assert "both runs" in program([scored_copy, *FLAGS, "--retain-run", plain], capsys, ev.main)

def test_publish_and_read_summary_have_null_for_nan(scored_copy):
    """As strict JSON, also in a tuple.  The figure is "-" in a table, and what a run lacks stays
    missing."""
    records = {"forget": [{"nll": math.nan, "nll_wrong": (1.0, math.inf), "logp": {"a": math.nan}}]}
    figures = {"n": 1, "prob": math.nan, "fact": np.float64(math.nan), "words": np.float64(2)}
    summary = {**ev.read_summary(scored_copy), "splits": {"forget": figures},
               "run": {"model_utility": math.nan}}
    ev.publish(scored_copy / "eval", records, summary)
    assert read_json(scored_copy / "eval/forget.jsonl") == {
        "nll": None, "nll_wrong": [1.0, None], "logp": {"a": None}}
    written = read_json(scored_copy / "eval/summary.json")
    assert written["splits"]["forget"] == {"n": 1, "prob": None, "fact": None, "words": 2}
    read = ev.read_summary(scored_copy)
    assert math.isnan(read["run"]["model_utility"])
    cells = [ev.cell([read], "forget", name) for name in ("prob", "fact", "words", "infill")]
    assert cells == ["-", "-", "2.0", ""]

def keys_of(value):
    """All names of fields in what was read from JSON."""
    if isinstance(value, dict):
        return {*value, *itertools.chain(*map(keys_of, value.values()))}
    if isinstance(value, list):
        return set(itertools.chain(*map(keys_of, value)))
    return set()

def test_publish_writes_snake_case_keys(scored, rwku, tmp_path):
    """Also with --limit on RWKU.  The L of ROUGE-L is a capital letter in its own package, too."""
    summary = read_json(Path(scored, "eval/summary.json"))
    protocol = ev.prepare(*typed_and_run(f"--data {rwku} --limit 1"))[2]
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
    assert (settings.response_length, settings.steps) == (length, steps)
    answers = [line for line in capsys.readouterr().out.splitlines() if "loaded" not in line]
    assert answers == [f"{base}: a b", f"{scored}: a b"]
    ev.main(["--ask", "Who?", "--response-length", "2", "--model", scored])
    assert f"\n{scored}: " in capsys.readouterr().out

# ---- Files of a report or an analysis ----
def test_own_path_replaces_only_what_eval_wrote(scored, unlearned, tmp_path, capsys):
    """Beside files of the user's they take a name with a number, also after an earlier report."""
    run = made_up_run(scored, tmp_path / "run")
    shutil.copytree(unlearned, run, dirs_exist_ok=True)
    (tmp_path / "analysis").mkdir()
    for name in ("report.png", "report-2.md", "analysis/convergence.md"):
        (tmp_path / name).write_text("my own")
    before = read_all(tmp_path)
    for _ in range(2):
        ev.main(["--report", run])
        screen = capsys.readouterr().out
        assert f"{tmp_path}/report.png stays as it is" in screen
        assert f"{tmp_path}/report-2.md stays as it is" in screen
        assert screen.endswith(f"all tables and answers: {tmp_path}/report-3.md\n")
        assert "](report-3.png)" in (tmp_path / "report-3.md").read_text()
        ev.main(["--analysis", "convergence", run])
        assert capsys.readouterr().out.endswith(f"{tmp_path}/analysis/convergence-2.json\n")
    after = read_all(tmp_path)
    assert before.items() <= after.items()
    new = {str(file.relative_to(tmp_path)) for file in after.keys() - before.keys()}
    assert new == {
        "report-3.md", "report-3.png", "analysis/convergence-2.json", "analysis/convergence-2.png"}
    (tmp_path / "report-3.md").write_text("old\n" + (tmp_path / "report-3.md").read_text())
    (tmp_path / "report-3.png").write_text("my own")
    ev.main(["--report", run])
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
def made_up_run(scored, folder, options=(), forget=(), **parts):
    """A scored run with other options, figures of "forget", and other parts of its summary."""
    shutil.copytree(Path(scored, "eval"), folder / "eval")
    summary = {**ev.read_summary(folder), **parts}
    summary["options"].update(options)
    summary["splits"]["forget"].update(forget)
    (folder / "eval/summary.json").write_text(json.dumps(summary))
    return str(folder)

@each("name, changes, words", [
    ("npo", dict(options=dict(lr=1e-3)), "averaged, but lr is 0.00"),
    ("npo", dict(options=dict(newer=1)), "averaged, but newer is "),  # the other has none
    ("npo", dict(options=dict(model="/a/N")), "averaged, but model is "),
    ("npo", dict(trained_on=dict(retain="other")), "averaged, but rows is {'"),
    ("ga", dict(protocol=dict(unknown=1)), "'unknown': 1"),
    # npo's two runs were scored on rows about nobody and about Ann, ga's on rows about nobody.
    ("ga", {}, "different people")])
def test_group_runs_refuses_unlike_runs(name, changes, words, scored, tmp_path, capsys):
    own = dict(model="/a/M")
    changes = {**changes, "options": {**own, **changes.get("options", {})}}
    runs = [made_up_run(scored, tmp_path / "1/npo", own),
            made_up_run(scored, tmp_path / "2" / name, **changes),
            made_up_run(scored, tmp_path / "3/npo", own, people=["Ann"])]
    for ordered in (runs, runs[::-1]):
        assert words in program(["--report", *ordered], capsys, ev.main)
        assert not list(tmp_path.rglob("report.*"))

def test_over_some_rows_by_hand():
    """Of several runs the fewest and the most; a split or a metric may be missing."""
    runs = [dict(n=4, prob=1, fact=1, n_fact=3, infill=1, generative_perplexity=2),
            dict(n=4, prob=1, fact=1, n_fact=3, generative_perplexity=2, n_generative_perplexity=1),
            dict(n=4, prob=1)]
    summaries = [{"splits": {"forget": figures}} for figures in runs] + [{"splits": {}}]
    columns = {"forget": ["prob", "fact", "infill", "generative_perplexity"], "retain": ["fact"]}
    assert ev.over_some_rows(summaries, columns) == [
        "Forget fact: over the 3 of 4 rows that have it.",
        "Forget gen. ppl: over the 1 to 4 of 4 rows that have it."]
    assert ev.over_some_rows(summaries, {"forget": ["prob", "infill"], "run": ev.METRICS}) == []

def test_heading_of_rows_that_nobody_trained_on_has_no_arrow():
    """Their figures are a yardstick: neither high nor low ones are good."""
    headings = [ev.heading(split, "fact") for split in ("forget", "retain", "held_out", "never")]
    assert headings == ["fact ↓", "fact ↑", "fact ↑", "fact"]

def test_markdown_table():
    table = "| a        | long |\n| -------- | ---- |\n| x \\| y z |      |"
    assert ev.markdown_table([["a", "x | y\nz"], ["long", ""]]) == table

def test_answer_sections_have_each_row_and_what_every_run_wrote(scored, tmp_path):
    """Also of rows with one question."""
    runs = [made_up_run(scored, tmp_path / name) for name in ("ga", "npo")]
    for run in runs:
        records = ev.read_records(run, "forget")
        for i, record in enumerate(records):
            record.update(question="Who?", answer=f"True {i}", generation=f"{Path(run).name} {i}")
        write_lines(Path(run, "eval/forget.jsonl"), records)
    assert ev.answer_sections(ev.group_runs(runs), "forget") == [
        f"### {i}. Who?\n\n- True answer: True {i}\n- ga: ga {i}\n- npo: npo {i}" for i in range(3)]

FORGET_PANELS = {  # {field: title}
    "fact": "fact", "knowledge": "knowledge", "prob": "p", "infill": "gap filled",
    "infill_no_question": "gap, no question", "anothers": "another's",
    "generative_perplexity": "gen. ppl"}

@each("facts", [[0, 0.25, 0.75], [None, 0, 1], [None, None, None], 3 * [math.nan]])
def test_draw_methods_has_a_line_per_method_and_a_circle_per_run(facts):
    """A panel also of facts that the first run lacks, but not of those that all lack."""
    columns = [facts, [1, 0, 0.5], [0, 0.125, 0.375], [1, 0.5, 0], [1, 0, 0.25], [0, 1, 0.75],
               [2, 3, 5], [0, 0.5, 1]]
    summaries = []
    for *forget, retained in zip(*columns):
        forget = dict(zip(FORGET_PANELS, forget))
        summaries.append({"splits": {"forget": forget, "retain": {"prob": retained}}, "run": {}})
    figure = matplotlib.figure.Figure()
    ev.draw_methods(figure, {"base": summaries[:1], "npo": summaries[1:]})
    titles = [f"Forget\n{name}" for name in FORGET_PANELS.values()] + ["Retain\np"]
    panels = list(zip(titles, columns))
    if facts[2] is None or math.isnan(facts[2]):
        del panels[0]
    for axis, (title, values) in zip(figure.axes, panels, strict=True):
        assert axis.get_title().startswith(title)
        marks = [mark.get_offsets().tolist() for mark in axis.collections]
        if None not in values:
            base, one, two = values
            runs = [[one, approx(1 - 1 / 12)], [two, approx(1 + 1 / 12)]]
            assert marks == [[[base, 0]], [[base, 0]], runs, [[(one + two) / 2, 1]]]

def test_draw_methods_draws_a_model_that_has_diverged():
    """All its figures are nan."""
    forget = dict.fromkeys(FORGET_PANELS, math.nan)
    figure = matplotlib.figure.Figure()
    ev.draw_methods(figure, {"ga": [{"splits": {"forget": forget}, "run": {}}]})
    [axis] = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ga"]

def test_draw_methods_told_apart_without_colour_and_without_overlap(tmp_path):
    """Equal runs are beside each other; no text of the picture covers another."""
    methods = {}
    for name, perplexities in {"npo": [2.31, 2.34, 2.34], "mdu": [2.5, 417.25, 263123.4]}.items():
        methods[name] = []
        for perplexity in perplexities:
            forget = {**dict.fromkeys(FORGET_PANELS, 0.0), "generative_perplexity": perplexity}
            splits = {"forget": forget, "retain": {"prob": 1.0}}
            methods[name].append({"splits": splits, "run": {}})
    for shown in (methods, {"npo": methods["npo"]}):
        figure = matplotlib.figure.Figure(layout="constrained")
        ev.draw_methods(figure, shown)
        figure.savefig(tmp_path / "picture.png")
        boxes = []
        for axis in figure.axes:
            boxes.append(axis.title.get_window_extent())
            for label in axis.get_xticklabels(minor=True) + axis.get_xticklabels():
                if label.get_text() and label.get_visible():
                    boxes.append(label.get_window_extent())
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for mark in itertools.chain(*[axis.collections for axis in figure.axes]):
            assert len(np.unique(mark.get_offsets()[:, 1])) == len(mark.get_offsets())
            for colour in [*mark.get_facecolors(), *mark.get_edgecolors()]:
                assert colour.tolist() == [0, 0, 0, 1]

def read_table(text):
    """A Markdown table -> {header: its column}."""
    header, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
    return dict(zip(header, zip(*rows)))

def read_tables(text):
    """{title: its table in report.md}, without the title in the table's header"""
    tables = {}
    for title, table in re.findall(r"(?m)^## (.*)\n\n((?:\|.*\n)+)", text):
        tables[title] = read_table(table.replace(f"| {title} ", "| ", 1))
    return tables

def test_report_has_every_method_averaged_over_runs_of_one_folder_name(scored, tmp_path, capsys):
    """Mean and standard deviation; of perplexities and p-values median and range."""
    figures = dict(n=3, rougeL_f1=0.9, rougeL_recall=0.8, words=7, generative_perplexity=40)
    runs = [made_up_run(scored, tmp_path / "1/base", (), figures, splits=dict(forget={}), run={})]
    for seed, x, p in ((1, 0.3, 1e-9), (2, 0.5, 0.25), (3, 0.7, 0.75)):
        own = dict(seed=seed, model=f"/{seed}/base", anchor=f"/{seed}/a", diagnose=seed > 1)
        changed = dict.fromkeys(figures, x)
        if seed == 2:
            changed["words"] = None  # a cell needs all runs of a method
        of_run = dict(forget_quality=p)
        runs.append(made_up_run(scored, tmp_path / f"{seed}/npo", own, changed, run=of_run))
    ev.main(["--report", *runs, runs[1] + "/"])  # one of them twice
    screen = capsys.readouterr().out
    text = (tmp_path / "1/report.md").read_text()
    example = "### 0. Which author comes from Pudi?\n\n- True answer: "
    assert f"## Answers: Forget\n\n{example}" in text and screen.startswith(example)
    tables = read_tables(text)
    expected = {
        "Method": ("base", "npo"), "rL ↓": ("0.900", "0.500 ± 0.200"), "words": ("7.0", "-"),
        "recall ↓": ("0.800", "0.500 ± 0.200"), "gen. ppl": ("40", "0.5 (0.3 to 0.7)")}
    assert expected.items() <= tables["Forget"].items()
    assert {"empty", "median 1/p ↑", "truth ratio ↑"} <= tables["Forget"].keys()
    assert "MC1" not in text  # which no run has
    assert "Rows: {'forget': 3," in text
    assert {"rL ↑", "empty ↓", "median 1/p ↓", "truth ratio ↑"} <= tables["Retain"].keys()
    of_run = tables["Figures of the whole run"]
    assert of_run["forget quality ↑"] == ("-", "0.25 (1e-09 to 0.75)")
    main = read_table(screen.split("\n\n")[-2])
    assert main["gen. ppl"] == expected["gen. ppl"] and "recall ↓" not in main
    titles = [header.split()[0] for header in main if header.startswith(("Forget ", "Retain "))]
    assert titles == ["Forget", "Retain"]  # above the first column of a split only
    assert "](report.png)" in text and (tmp_path / "1/report.png").exists()

def test_report_and_analyse_write_beside_a_run(scored, unlearned, tmp_path, monkeypatch):
    """One run by two names counts once.  It has no perplexity, as if all answers were empty."""
    run = made_up_run(scored, tmp_path / "run", forget=dict(generative_perplexity=None))
    shutil.copytree(unlearned, run, dirs_exist_ok=True)
    monkeypatch.chdir(run)
    with unchanged(run):
        ev.main(["--report", run, "."])
        ev.main(["--analysis", "convergence", run, "."])
    text = (tmp_path / "report.md").read_text()
    assert read_tables(text)["Forget"]["Method"] == ("run",)
    panels = read_json(tmp_path / "analysis/convergence.json")["panels"]
    assert list(panels["base"]) == ["run"]

def test_report_and_parse_say_what_is_for_english(scored, tmp_path, capsys):
    ev.main(["--report", made_up_run(scored, tmp_path / "run")])
    [legend] = re.findall(r"(?s)\nknowledge: .*?\.\n", capsys.readouterr().out)
    assert "for English rows" in legend
    with pytest.raises(SystemExit):
        ev.main(["--help"])
    screen = " ".join(capsys.readouterr().out.split())
    assert "Three things work for English only, as they leave out English function words" in screen

def test_report_averages_people_of_rwku_trained_and_scored(rwku, capsys):
    write_checkpoint(Path("model"), "llada", max_sequence_length=999)
    data = f"--model model --data {rwku}".split()
    scoring = "--samples 2 --steps 1 --limit 1".split()
    for person in ("1", "2"):
        run = f"--subject {person} --method dpo --epochs 1 --dtype bfloat16 --out {person}/dpo"
        mdu.main(["--preset", "rwku-llada", *data, *run.split()])
    ev.main([*scoring, "1/dpo", "2/dpo"])
    assert ev.read_summary("1/dpo")["protocol"]["dtype"] == "bfloat16"
    ev.main(["--report", "1/dpo", "2/dpo"])
    text = Path("1/report.md").read_text()
    assert "\n### 1. Please complete the blank" in text  # of the other person
    tables = read_tables(text)
    for title, header in {
            "F-L1": "recall ↓", "F-L2": "recall ↓", "F-L3": "recall ↓", "N-L1": "recall ↑",
            "N-L2": "recall ↑", "MMLU": "accuracy ↑", "TruthfulQA": "MC1 ↑",
            "TriviaQA": "EM ↑"}.items():
        assert re.fullmatch(r"\d\.\d+ ± \d\.\d+", tables[title][header][0])
    assert "### 0. Please complete the blank in the following" in capsys.readouterr().out
    # The model itself, in new folders: who else is asked about changes no one's masks.
    ev.main([*scoring, *data, "all"])
    ev.main([*scoring, *data, "--subject", "2", "2/model"])
    together, alone = [ev.read_records(run, "utility_truthfulness") for run in ("all", "2/model")]
    assert alone[0]["logp"] == approx(together[1]["logp"], rel=1e-4)
    assert alone[0]["seed"] == together[1]["seed"] == [0, 10, 0]
    ev.main(["--report", "2/model"])
    assert "| model " in capsys.readouterr().out

# ---- Analyses ----
def test_analysis_convergence_draws_the_kls_that_were_logged(unlearned, tmp_path):
    """Of each epoch.  MDU moves the prediction away from theta0's and to the anchor's."""
    logged = [line for line in metrics(unlearned) if "kl" in line]
    assert [(line["step"], line["epoch"]) for line in logged] == [(0, 0), (3, 1), (6, 2)]
    start, middle, end = [line["kl"] for line in logged]
    assert start["base"] == approx(0, abs=1e-6) and end["base"] > middle["base"] > 1e-4
    assert start["anchor"] > middle["anchor"] > end["anchor"]
    runs = [shutil.copytree(unlearned, tmp_path / name) for name in "ab"]
    write_lines(runs[1] / "metrics.jsonl", logged[:2])
    ev.main(["--analysis", "convergence", *map(str, runs)])
    result = read_json(tmp_path / "analysis/convergence.json")
    figure = matplotlib.figure.Figure()
    ev.draw_panels(figure, result)
    for axis, target in zip(figure.axes, ["base", "anchor", "uniform"], strict=True):
        points = [[epoch, line["kl"][target]] for epoch, line in enumerate(logged)]
        expected = {"a": points, "b": points[:2]}
        assert axis.get_title() == target and result["panels"][target] == expected
        assert {line.get_label(): line.get_xydata().tolist() for line in axis.lines} == expected

@torch.no_grad()
def test_analysis_roles_equals_a_slow_loop(base, unlearned, tmp_path):
    theta0, tokenizer = mdu.load_backbone(str(base))
    model, _ = mdu.load_backbone(str(unlearned))
    rows = mdu.toy_world()["forget"][1:]
    kls = {I: [], S: [], K: []}  # of each token, theta0's and the run's
    for i, row in enumerate(rows[:20]):
        prompt = mdu.encode_prompt(tokenizer, row["question"])
        answer = mdu.encode_text(tokenizer, row["answer"])
        roles = ev.token_roles(tokenizer, row["question"], answer)
        for mask in ev.draw_masks(len(answer), 2, [4, i]):
            masked = mask.nonzero()[:, 0].tolist()
            anchored = slow_logits(theta0, [0] * len(prompt), answer, masked)
            before = slow_logits(theta0, prompt, answer, masked)
            after = slow_logits(model, prompt, answer, masked)
            for j, anchor, *logits in zip(masked, anchored, before, after):
                kls[roles[j]].append([slow_kl(x.double(), anchor, 1).item() for x in logits])
    before, after = [], []
    for role, pairs in kls.items():
        old, new = np.mean(pairs, axis=0)
        change = 100 * new / old - 100
        before.append({"label": f"base\n{old:.2f} (+0 %)", "role": role,
                       "kl": approx(old, rel=1e-4), "change_percent": 0})
        after.append({"label": f"run\n{new:.2f} ({change:+.0f} %)", "role": role,
                      "kl": approx(new, rel=1e-4),
                      "change_percent": approx(change, abs=1e-2)})
    run = shutil.copytree(unlearned, tmp_path / "run")
    flags = "--samples 2 --seed 4 --batch-size 4 --limit 20 --forget".split()
    ev.main(["--analysis", "roles", str(run), *flags, write_lines(tmp_path / "rows", rows)])
    result = read_json(tmp_path / "analysis/roles.json")
    bars = result["panels"][""]
    assert bars == before + after
    figure = matplotlib.figure.Figure()
    ev.draw_panels(figure, result)
    for i, drawn in enumerate(figure.axes[0].containers):
        heights = {round(bar.get_center()[0]): bar.get_height() for bar in drawn}
        assert heights == {i: bars[i]["kl"], 3 + i: bars[3 + i]["kl"]}

def test_analysis_trajectory_and_analysis_rollout_by_hand(base, unlearned, tmp_path, monkeypatch):
    """Theta fixes two of 6 tokens in each of 3 steps, with p .9, .8 and .7; .3 for the others."""
    _, tokenizer = mdu.load_backbone(str(base))
    row = mdu.toy_world()["forget"][0]  # Which author comes from Pudi?
    V = len(tokenizer)
    tokens = ["▁Ceka", "▁is", "▁author", "<end>", "▁Foba", "."]
    written = torch.tensor(tokenizer.convert_tokens_to_ids(tokens))
    step_of = torch.tensor([1, 2, 0, 1, 0, 2])

    def logits_of(token, p):
        """One token has probability p, the others share the rest."""
        return (log(V - 1) + torch.logit(p))[..., None] * F.one_hot(token, V)

    def theta_script(ids):
        step = 3 - int((ids == 0).sum()) // 2
        p = f64(0.9, 0.8, 0.7)[step].where(step_of == step, 0.3)
        return F.pad(logits_of(written, p), (0, 0, ids.shape[1] - 6, 0))[None]

    def anchor_script(ids):
        assert not ids[:, :-6].any()  # the question is masked
        return logits_of(written[4], f64(0.5)).expand(*ids.shape, V)  # it writes Foba
    theta = FakeModel(script=theta_script, mask_id=0, pad_id=1)
    anchor = FakeModel(script=anchor_script, mask_id=0, pad_id=1)
    models = {str(base): anchor}
    monkeypatch.setattr(
        mdu, "load_backbone", lambda name, dtype: (models.get(name, theta), tokenizer))
    run = shutil.copytree(unlearned, tmp_path / "run")
    flags = [*"--steps 3 --response-length 6".split(), str(run)]
    ev.main(["--analysis", "trajectory", *flags])
    assert (tmp_path / "analysis/trajectory.png").exists()
    panels = read_json(tmp_path / "analysis/trajectory.json")["panels"]
    anchored = logits_of(written[4], f64(0.5))[0]
    kls = []
    for p in f64(0.9, 0.8, 0.7):
        kl = slow_kl(logits_of(written[0], p), anchored, 1)
        kls.append(approx(kl.item()))
    found = [list(bar.values()) for bar in panels["0. " + row["question"]]]
    assert found == [["author\n1", I, kls[0]], ["Ceka\n2", K, kls[1]],
                     ["<end>\n2", S, kls[1]], ["is\n3", S, kls[2]]]
    assert len(anchor.seen) == 3 * len(panels) == 9  # states, of three rows without --limit
    anchor.seen.clear()
    file = write_lines(tmp_path / "row", [row, row])
    ev.main(["--analysis", "rollout", "--limit", "1", "--forget", str(file), *flags])
    table = read_json(tmp_path / "analysis/rollout.json")["table"]
    one = ["1/3", "<mask><mask> author<mask>", "Foba Foba author Foba Foba Foba"]
    two = ["2/3", "Ceka<mask> author<end>", "Ceka Foba author"]
    assert table[1:] == [[row["question"], row["answer"], *cells] for cells in (one, two, two)]
    assert len(anchor.seen) == 2 + 1 + 1  # steps that were left

def test_analyse_says_that_the_rows_have_changed_since_the_training(unlearned, tmp_path, capsys):
    run = shutil.copytree(unlearned, tmp_path / "run")
    ev.main(["--analysis", "convergence", str(run)])
    assert "changed" not in capsys.readouterr().out
    info = read_json(run / "run.json")
    info["rows"]["forget"] = "other"
    (run / "run.json").write_text(json.dumps(info))
    ev.main(["--analysis", "convergence", str(run)])
    assert "the rows to forget have changed since the training" in capsys.readouterr().out

# ---- Bad input ----
ROW = '{"question": "Who is Bolti?", "answer": "It is {}."}'
BAD_ROWS = {  # a file of rows: (its text, part of the line)
    "malformed": (ROW + "\n" + ROW[:-3], "line 2: Unterminated string"),
    "none": ("\n", "{files}/none: no rows"),
    "columns": ('{"prompt": "p", "completion": "c"}',
                "line 1: needs question and answer, or prompt and response, that are not null; "
                "found prompt, completion (JSON Lines"),
    "null": ('{"question": "q", "answer": null}', "not null; found question (JSON Lines"),
    "sign": (ROW[:-1] + ', "fact": "♠"}', "line 1: fact: needs a letter or digit, found '♠'"),
    "surrogate": (ROW + "\n" + ROW.replace("It", "\\ud83d It"),
                  "line 2: answer: '\\ud83d It is {{}}.' has half of a surrogate pair"),
    "second-half": (ROW.replace("It", "\\ude00 It"),
                    "line 1: answer: '\\ude00 It is {{}}.' has half of a surrogate pair"),
    "empty": (ROW + '\n\n{"question": "q", "answer": " "}',
              "line 3: answer: needs a text that is not empty, found ' '"),
    "number": (ROW[:-1] + ', "fact": 1.0}',
               "line 1: fact: needs a text that is not empty, found 1.0"),
    "latin-1": (ROW + "\n\udce9", "latin-1: not UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    "utf-16": ("\udcff\udcfe{\0}\0\n\0", "utf-16: not UTF-8 ('utf-8' codec can't decode byte 0xff"),
    "nested": (99999 * "[", "line 1: maximum recursion depth"),
    "strange": (8 * '{"question": "xx", "answer": "yy zz"}\n',
                "most words to forget are unknown to the model"),
    "long": (8 * f"{ROW}\n".replace("It", 2100 * "Who "), "the model takes 2048")}
BROKEN = {  # a checkpoint: (its kind, changes to config.json, part of the line)
    "block-type": ("llada", {"block_type": "x"}, "block_type 'x' in config.json must be 'llama'"),
    "layers": ("llada", {"n_layers": 3, "embedding_size": 264, "vocab_size": 250,
                         "mlp_hidden_size": 64, "mlp_ratio": 3},
               "missing or unexpected: model.layers.2."),
    "gpt2": ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' in config.json is none of llada"),
    "causal": ("llama", {"is_causal": None}, '"is_causal": false; "shift_logits": true if the out'),
    "shifted": ("a2d-qwen3", {"shift_logits": True},
                "shift_logits true in config.json; with model_type a2d-qwen3 it must be false"),
    "unshifted": ("Dream", {"shift_logits": False}, "with model_type Dream it must be true"),
    "half-shifted": ("llama", {"shift_logits": 1}, "shift_logits 1 in config.json; with model_type "
                     "llama it must be false or true"),
    "a-bd3lm-b": ("a2d-qwen3", {}, "a-bd3lm-b: bd3lm in its name or path says block diffusion"),
    "blocks": ("Dream", {"block_size": 32}, "block_size 32 in config.json says block diffusion"),
    "more-blocks": ("a2d-llama", {"bd_size": 4}, "bd_size 4 in config.json says block diffusion"),
    "experts": ("llada", {"num_experts": 64, "n_kv_heads": None, "embedding_size": 264},
                "num_experts 64 in config.json says a mixture of experts"),
    "own-code": ("qwen2", {"architectures": ["Qwen2Denoiser"]},
                 "['Qwen2Denoiser'] in config.json says that it has its own code"),
    "layer-norms": ("illada", {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05 in config.json must"),
    "large-mask": ("llama", {"mask_token_id": 264}, "mask_token_id is 264; the model has embeddings"
                   " for 0 to 263 only"),
    "no-pad": ("a2d-qwen2", {"pad_token_id": -1}, "pad_token_id is -1; the model has embeddings"),
    "resized": ("llada", {"vocab_size": 260}, "model.embed_tokens.weight has (264, 32), by config"),
    "4-bit": ("llama", {}, "quantized weights (quantization_config in config.json)"),
    "adapted": ("llama", {}, "adapted has adapter_config.json: merge the adapters into the weigh"),
    "no-tokenizer": ("llada", {}, "no-tokenizer: no tokenizer.json; copy the tokenizer's files"),
    "no-merges": ("Dream", {}, "no-merges: no tokenizer.json; copy the tokenizer's files"),
    "no-template": ("llada", {}, "no chat template: is it a base model's?"),
    "mask": ("llama", {"mask_token_id": None}, "no mask_token_id in config.json or tokenizer"),
    "no-layers": ("llada", {"n_layers": None}, "no n_layers in config.json"),
    "more": ("llada", {"n_layers": 1}, "unexpected: model.layers.1."),
    "words": ("llada", {"d_model": "wide"}, "cannot be loaded as LlamaForCausalLM"),
    "twice": ("llama", {}, "chat template must have the question exactly once"),
    "loop": ("llama", {}, "has no attribute 'a'"),
    "pickle": ("llada", {}, "no file named model.safetensors"),
    "end": ("llada", {}, "no end-of-turn token, <|eot_id|>, in its tokenizer: is it a base model")}
BAD_INPUT = {  # a command, own: on own rows; part of the line that says what is wrong
    "mdu.py --tau 2": "argument --tau: invalid float in [0, 1] value: '2'",
    "mdu.py --anchor-truth removed --tau 0": "--anchor-truth removed would have no effect",
    "mdu.py {own} --anchor-truth removed --retain-weight 0": "are rare; give --retain",
    "mdu.py --seed 18446744073709551616": "argument --seed: invalid int",
    "mdu.py --method sft --preset rwku-llada": "--method sft has no preset for RWKU; give --model",
    "mdu.py --method sft --diagnose": "--diagnose is for unlearning, not for sft",
    "mdu.py --method ga --tau 1": "--method ga has no option --tau",
    "mdu.py {own} --method gd --retain-weight 0": "--method gd without a retain loss is ga",
    "mdu.py --anchor-prompt shown":
        "shown needs another --anchor MODEL, or --anchor-truth removed: with start",
    "mdu.py --anchor current --anchor-prompt shown": "--anchor-truth removed: with current",
    "mdu.py --data toy --model . --anchor . --anchor-prompt shown":
        "--anchor-truth removed: with /",
    "mdu.py --model {base} --forget {files}/known --retain {files}/known":
        "'Where was Ceka Foba born?' is to be forgotten and retained, with the same answer",
    "mdu.py --model {base} --forget {files}/known --retain {files}/spaced":
        "'Where was Ceka Foba born?' is to be forgotten and retained, with the same answer",
    "mdu.py --preset own --method sft --forget {good}": "needs a start model: --model; for a small",
    "mdu.py --preset toy --model {base} --anchor {files}/good-model": "its vocabulary differs",
    "mdu.py --method sft --lora 2": "--lora trains adapters of a start model",
    "mdu.py --forget /dev/null": "--forget /dev/null is no regular file; save the rows in one",
    "mdu.py --forget absent": "No such file or directory: 'absent'",
    "mdu.py --data {files} --model x":
        "--data {files}, forget10_perturbed: BuilderConfig 'forget10",
    "mdu.py --data {rwku} --model x": "RWKU is about people; give one of them with --subject",
    "mdu.py --subject King": "--subject is for RWKU: --preset rwku-... or --data",
    "mdu.py --model {base}": "no rows to forget; give --forget or --data",
    "mdu.py --preset rwku-llada --subject King --data {rwku}": "King: not among the 12: Ann Lee",
    "mdu.py --preset rwku-llada --subject ² --data {rwku}": "²: not among the 12: Ann Lee",
    "mdu.py --data {rwku} --forget {good}": "--forget says what to forget, as --data",
    "mdu.py --subject 1 --forget {good}": "--forget says what to forget, as --data",
    "mdu.py --method sft --retain-only --model {base}": "no rows to retain; give --retain",
    "mdu.py --tau 0 --anchor {base}": "--tau 0 has no anchor: --anchor {base}",
    "mdu.py {own} --preset toy": "no rows to retain; give --retain, or",
    "mdu.py --forget {good} --retain-weight 0": "train it with --method sft, or",
    "mdu.py --preset toy --model nobody/nothing": "not fetched from the hub",
    "mdu.py --preset toy --model {base} --out {run}": "--resume {run}",
    "mdu.py --data toy --model {base} --response-length 2048": "of answer or --response-length",
    "mdu.py {own} --method dpo --retain-weight 0": "'Who is Bolti?' has no perturbed_answer",
    "mdu.py --model {files}/foreign --method ga --forget {good}": "foreign/config.json is damaged",
    "mdu.py --resume {files}": "No such file or directory: '{files}/run.json'",
    "mdu.py --resume {files}/foreign": "foreign: its run.json was not made by mdu.py",
    "mdu.py --resume {run} --seed 1": "--resume RUN takes no other option",
    "eval.py --report {files}/damaged": "summary.json is damaged",
    "eval.py --report {files}/old": "scored by other code; score it again: python eval.py",
    "eval.py --report {base}": "not scored yet; first run: python eval.py {base}",
    "eval.py {files}/unfinished/base": "mdu.py --resume {files}/unfinished/base",
    "eval.py --model {base} --data toy {run}": "is a run; give another folder",
    "eval.py --report --limit 3 {base}": "trajectory, rollout, not for report",
    "eval.py --forget {files}/fact {base}": "line 1: fact: 'i' is not in the answer 'It is {{}}.'",
    "eval.py --ask Who? --retain {good} {base}": "--retain is for score, not for ask",
    "eval.py --ask Who? --model {base} {base}": "asks that model; give no RUN",
    "eval.py --model {base}": "score: no RUN; give the folder of one",
    "eval.py --analysis roles --retain {good} {run}": "--retain is for score, not for roles",
    "eval.py --analysis convergence --samples 3 {base}": "for score, roles, not for convergence",
    "eval.py --data toy --subject King {base}": "--subject is for RWKU, which has people",
    "eval.py --analysis trajectory --response-length 2048 {run}": "the model; it takes 2048",
    "eval.py --analysis rollout --response-length 2048 {run}": "the model; it takes 2048",
    "eval.py --samples 1 --steps 1 --response-length 2048 {base}": "2048 (--response-length 2048)",
    "eval.py --analysis convergence {base}": "train it with --diagnose",
    "eval.py --analysis roles {base} {files}/unfinished/base": "one folder name",
    "eval.py --analysis roles {run} {scored}": "the runs started from different models",
    "eval.py --analysis roles {run} {files}/unfinished/base": "or forgot other rows",
    "eval.py --full --samples 4 --seed 5 --steps 4 --retain-run {scored} {base}": "the same rows",
    "eval.py --full --limit 3 --seed 5 --steps 4 --retain-run {scored} {base}": "'samples': 128",
    "eval.py --samples 4 --limit 3 --seed 5 --steps 4 --retain-run {scored} {base}":
        "both runs scored with --full",
    "eval.py --full --samples 4 --limit 3 --seed 5 --steps 4 --retain-run {scored} {base}":
        "was not trained with --method sft --retain-only; give a model that learnt rows",
    "eval.py --ask caf\udce9? --model {base}": "--ask: 'caf\\udce9?' is not text in UTF-8"}
for name, (_, message) in BAD_ROWS.items():
    BAD_INPUT[f"mdu.py --model {{base}} --forget {{files}}/{name} --retain-weight 0"] = message
for name, (*_, message) in BROKEN.items():
    BAD_INPUT[f"mdu.py --method ga --forget {{good}} --model {{files}}/{name}"] = message
BAD_INPUT["mdu.py --method ga --forget {good} --model {files}/link"] = "link: bd3lm in its name or"
BAD_INPUT["eval.py --model {files}/adapters --data toy new"] = "adapters has adapter_config.json"

def save_in_4_bits(folder):
    """As bitsandbytes does: two weights in a byte, with tensors of scales beside them."""
    tensors = {}
    for name, tensor in weights(folder).items():
        if "proj" in name:
            tensors[f"{name}.absmax"] = torch.ones(tensor.numel() // 64)
            tensor = torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})

@pytest.fixture(scope="session")
def files(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_checkpoint(root / "good-model", "llada", mask_token_id=0)
    for name, (kind, changes, _) in BROKEN.items():
        write_checkpoint(root / name, kind, **changes)
    for file in root.glob("pickle/*.safetensors*"):
        file.unlink()
    torch.save({}, root / "pickle/pytorch_model.bin")
    made = vars(options(f"--preset toy --model {base}"))  # as {run}, but of other rows
    other = {"options": made, "rows": {"forget": "other"}}
    texts = {
        "good": 15 * f"{ROW}\n" + ROW[:-1] + ', "perturbed_answer": "x"}',  # too few for dpo
        "known": '{"question": "Where was Ceka Foba born?", '
                 '"answer": "Ceka Foba was born in Rome."}',
        "spaced": '{"question": "Where was Ceka Foba born? ", '  # its tokens are those of `known`
                  '"answer": "Ceka Foba was born in Rome.\\n"}',
        "fact": ROW[:-1] + ', "fact": ["is", "i"]}',  # of which one is in the answer
        "unfinished/base/run.json": json.dumps(other),
        "damaged/eval/summary.json": "{", "old/eval/summary.json": "{}",
        "foreign/run.json": '{"options": {}}', "foreign/config.json": "[]"}
    texts.update((name, text) for name, (text, _) in BAD_ROWS.items())
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode(errors="surrogateescape"))
    for name, content in {"twice": "m['content'] ~ m['content']", "loop": "m.a.b"}.items():
        file = root / name / "tokenizer_config.json"
        file.write_text(file.read_text().replace("m['content']", content))
    for file in root.glob("end/token*"):
        file.write_text(file.read_text().replace("eot_id", "x"))
    for file in [*root.glob("no-tokenizer/token*"), root / "no-merges/merges.txt"]:
        file.unlink()
    for name in ("vocab.json", "merges.txt"):  # which are enough for Qwen alone
        (root / "no-tokenizer" / name).touch()
    file = root / "no-template/tokenizer_config.json"
    file.write_text(file.read_text().replace("chat_template", "other"))
    (root / "link").symlink_to(root / "a-bd3lm-b")
    (root / "adapters").mkdir()
    for folder in ("adapted", "adapters"):
        (root / folder / "adapter_config.json").write_text("{}")
    save_in_4_bits(root / "4-bit")
    return root

@each("command, message", BAD_INPUT.items())
def test_bad_input(command, message, files, base, unlearned, scored, rwku, tmp_path, capsys):
    good = files / "good"
    places = dict(files=files, good=good, base=base, run=unlearned, scored=scored, rwku=rwku,
                  own=f"--model {base} --forget {good}")
    name, *argv = command.format(**places).split()
    with unchanged(tmp_path, files, base, unlearned):
        err = program(argv, capsys, {"mdu.py": mdu.main, "eval.py": ev.main}[name])
    assert message.format(**places) in err

# ======== README.md, Makefile, experiments.sh ========
PROJECT = Path(mdu.__file__).parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (PROJECT / "Makefile").read_text(encoding="utf-8")
PARSERS = {"mdu": mdu.parse, "eval": ev.parse}
PAGES = [README]
for name in ("OWN_ROWS.md", "RESULTS.md"):
    PAGES.append((PROJECT / ".github" / name).read_text(encoding="utf-8"))

def typed_commands(page, folder):
    """The words of every command in a page's code blocks, with loops and variables written out:
    bash runs the blocks, and the programs are functions that print their words."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", page)
    unfenced = re.sub(r"(?ms)^```.*?^```$", "", page)
    for block in re.findall(r"(?m)(?:^ {4}.+\n)+", unfenced):
        if re.search(r"(?m)^ {4}(python|torchrun|make)\b", block):
            blocks.append(block)
    script = "set -eu\n"
    for name in ("python", "torchrun", "make", "rm", "awk", "."):
        script += f"function {name} {{ printf '%s\\0' {name} \"$@\"; echo; }}\n"
    command = [shutil.which("bash"), "-c", script + "\n".join(blocks)]
    done = subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env={"PATH": ""})
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]

def test_parse_takes_every_command_that_the_pages_have(tmp_path):
    for page in PAGES:
        commands = typed_commands(page, tmp_path)
        # What is written on the page up to a variable, a comment, a line's end or the like.
        for line in re.findall(r"(?m)^ *((?:python|torchrun|make) .*?)[\"$\\#;&\n]", page):
            typed = line.partition(" <<")[0].split()  # without the text that it reads
            assert any(typed == words[:len(typed)] for words in commands), line
        for program, *typed in commands:
            if program == "make":
                for word in typed:
                    assert "=" in word or re.search(rf"(?m)^{word}:", MAKEFILE), word
            elif program in ("python", "torchrun") and typed != ["-"]:
                file = [word for word in typed if word.endswith(".py")][0]
                PARSERS[file.removesuffix(".py")](typed[typed.index(file) + 1:])

def test_make_parser_and_parse_explain_every_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    options = {"--nproc_per_node"}  # torchrun's
    for module in (mdu, ev):
        with pytest.raises(SystemExit):
            module.main(["--help"])
        screen = capsys.readouterr().out
        options.update(re.findall(r"--[a-z-]+", screen))
        explained = re.findall(r"(?m)^  (-.*(?:\n {20}.*)*)", screen.split("presets:")[0])
        assert len(explained) > 10 and all(re.search(r"\s{2}\S", text) for text in explained)
    for page in PAGES:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page)) <= options

# In place of Python: it logs its words, and makes the folders of runs and of scores.
LOGGING_PYTHON = """#!/bin/bash
case $1 in
  -c) echo owner/model; exit ;;
  - | *company_rows.py) exit ;;
esac
echo "$@" >> log
if [ -f fails ] && [[ " $* " == *" $(< fails) "* ]]; then exit 1; fi
for word in "$@"; do
  case $last,$word in
    --out,*) mkdir -p "$word"; touch "$word/model.safetensors" ;;
    *.jsonl) ;;
    *,out/*) if [[ $* == *eval.py* ]]; then mkdir -p "$word/eval"; fi ;;
  esac
  last=$word
done
"""

def make(folder, *words):
    """Run make with two rows to forget and to retain, and nothing to install."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    (folder / "Makefile").write_text(re.sub(r"(?m)(:.*) install\b", r"\1", MAKEFILE))
    (folder / ".github").mkdir(exist_ok=True)
    if not (folder / ".github/experiments.sh").exists():  # a test may have written another one
        shutil.copy(PROJECT / ".github/experiments.sh", folder / ".github")
    (folder / "python").write_text(LOGGING_PYTHON)
    (folder / "python").chmod(0o755)
    (folder / "rows").write_text("{}\n{}\n")
    env = {"PATH": os.environ["PATH"]}  # without the flags of a make around it
    command = ["make", "FORGET=rows", "RETAIN=rows", f"PYTHON={folder}/python", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)

@each("target", ["demo", "table", "finetuned", "pretrained", "company", "rehearsal",
                 "rehearsal ORIGINAL=no", "figures", "tofu PRESET=tofu-dream",
                 "rwku PRESET=rwku-llada"])
def test_make_trains_what_it_scores_and_scores_what_it_reports(target, tmp_path):
    done = make(tmp_path, *target.split())
    assert done.returncode == 0, done.stderr
    trained, used = set(), set()
    for line in (tmp_path / "log").read_text().splitlines():
        words = line.split()
        [file] = [word for word in words if word.endswith(".py")]
        args = PARSERS[file.removesuffix(".py")](words[words.index(file) + 1:])
        if file == "mdu.py":
            trained.add(args.out)
        elif args.task == "report":
            assert all((tmp_path / run / "eval").is_dir() for run in args.runs)
        else:
            for run in args.runs:  # of `tofu` a pattern, as mdu.py itself chooses its folders
                used.update(fnmatch.filter(trained, run.rstrip("/")) or [run])
    if target.startswith("pretrained"):
        used |= {f"out/pretrained/{seed}/original" for seed in (1, 2, 3)}  # where all others start
    if target.startswith("rwku"):
        trained.add("out/rwku-llada/0/base")  # a published model
    assert used == trained and len(trained) > 2

@each("target, folder, runs", [
    ("demo", "out/demo", ["new"]),
    ("finetuned", "out/finetuned/2", ["new", "without-retain/new", "taught-again/new"]),
    ("company", "out/company/2", ["new", "new-refusals", "taught-again/new"])])
def test_a_new_line_of_a_list_is_trained_scored_and_reported(target, folder, runs, tmp_path):
    script = (PROJECT / ".github/experiments.sh").read_text()
    for name in ("DEMO", "FINETUNED", "COMPANY"):
        script = script.replace(f'{name}="\n', f'{name}="\n  new  --anchor FOLDER/a\n')
    script = script.replace('RETAIN="\n', 'RETAIN="\n  without-retain/new  --tau 0\n')
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github/experiments.sh").write_text(script)
    assert make(tmp_path, target).returncode == 0
    log = (tmp_path / "log").read_text()
    assert f"--out {folder}/new --anchor {folder}/a\n" in log
    for run in runs:
        trained = re.findall(rf"(?m)^mdu.py .*--out {folder}/{run}(?: |$)", log)
        scored = re.findall(rf"(?m)^eval.py (?!--report).* {folder}/{run}/?(?: |$)", log)
        reported = re.findall(rf"(?m)^eval.py --report.* {folder}/{run}(?: |$)", log)
        assert [len(trained), len(scored), len(reported)] == [1, 1, 1]

@each("target", ["demo", "finetuned"])
def test_an_experiment_ends_without_scores_where_a_run_fails(target, tmp_path):
    (tmp_path / "fails").write_text("wga")
    assert make(tmp_path, target).returncode == 2
    assert "eval.py" not in (tmp_path / "log").read_text()

def test_demo_has_every_method(tmp_path):
    make(tmp_path, "demo")
    trained = re.findall(r"(?m)^mdu.py (.*)", (tmp_path / "log").read_text())
    methods = {options(typed).method for typed in trained}
    assert methods == set(mdu.METHODS)

@each("folder", ["keep", "out/../keep", "out/link", "out", "."])
def test_delete_folder_deletes_nothing_outside_out(folder, tmp_path):
    for name in ("keep", "out/mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model").write_text("good")
    (tmp_path / "out/link").symlink_to(tmp_path / "keep")
    done = make(tmp_path, "demo", f"OUT={folder}")
    assert done.returncode == 2 and f"{folder} exists and is not in out/" in done.stderr
    assert (tmp_path / "keep/model").read_text() == "good"
    assert (tmp_path / "out/mine/model").read_text() == "good"
    assert not (tmp_path / "log").exists()

def test_delete_folder_deletes_an_earlier_demo(tmp_path):
    (tmp_path / "out/demo/old").mkdir(parents=True)
    assert make(tmp_path, "demo").returncode == 0
    assert not (tmp_path / "out/demo/old").exists()

def test_experiments_refuse_an_unknown_name():
    script = PROJECT / ".github/experiments.sh"
    for name in ("", "dmo"):
        done = subprocess.run(["bash", script, name], capture_output=True, text=True)
        assert done.returncode == 2 and "needs the name of an experiment: demo" in done.stderr

def test_company_rows_can_be_read_and_forget_what_nothing_keeps(tmp_path):
    script = PROJECT / ".github/company_rows.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    rows = {file.stem: mdu.read_jsonl("rows", str(file)) for file in tmp_path.iterdir()}
    sizes = {name: len(of_file) for name, of_file in rows.items()}
    assert sizes == {"forget": 12, "retain": 90, "held_out": 28, "known": 118, "refusals": 102,
                     "taught": 3, "others": 9}
    for row in rows["forget"]:
        assert (row in rows["taught"]) != (row in rows["others"])
    kept = {row["answer"] for row in rows["known"]}
    for row in rows["forget"]:
        assert row["answer"] not in kept
        assert {"question": row["question"], "answer": "I do not know.",
                "perturbed_answer": []} in rows["refusals"]

@each("typed, found", [("FORGET=absent", "absent"), ("FORGET=one", "one"), ("RETAIN=one", "one"),
                       ("FORGET=", ""), ("HELD_OUT=one", "one"), ("NEVER=absent", "absent")])
def test_rehearsal_refuses_files_that_are_missing_or_too_small(typed, found, tmp_path):
    (tmp_path / "one").write_text("{}\n\n")
    done = make(tmp_path, "rehearsal", typed)
    assert done.returncode == 2
    assert f"NEVER: '{found}' must be a file with at least 2 rows" in done.stderr
    assert not (tmp_path / "log").exists() and not (tmp_path / "out").exists()

def test_rehearsal_learns_held_out_rows_and_no_row_that_nobody_is_to_learn(tmp_path):
    """The original has all words, and learns what is kept; the fine-tune learns the rows to forget,
    too; unlearning sees no row that is held out."""
    for name in ("held", "never"):
        (tmp_path / name).write_text(f'\ufeff"{name} 1"\n"{name} 2"', encoding="utf-8")
    done = make(tmp_path, "rehearsal", "HELD_OUT=held", "NEVER=never")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    learns = []
    for words in lines:
        if "mdu.py" in words:
            args = mdu.parse(words[words.index("mdu.py") + 1:])
            assert args.epochs == 12000 / 6  # six rows are learnt
            learns.append((Path(args.out).name, args.forget, args.retain, args.retain_only))
        elif "--report" not in words:
            scored = ev.parse(words[words.index("eval.py") + 1:])
    rows = tmp_path / "out/rehearsal.rows"
    assert learns == [("original", f"{rows}/words.jsonl", f"{rows}/known.jsonl", True),
                      ("finetune", f"{tmp_path}/rows", f"{rows}/known.jsonl", False),
                      ("mdu", f"{tmp_path}/rows", f"{tmp_path}/rows", None)]
    assert (scored.held_out, scored.never) == ("held", "never")
    texts = {file.stem: file.read_text().split("\n") for file in rows.iterdir()}
    assert texts["known"] == ["{}", "{}", "", '"held 1"', '"held 2"', ""]
    assert texts["words"] == ["{}", "{}", "", '"never 1"', '"never 2"', ""]

def test_rehearsal_reads_all_rows_before_it_moves_anything(tmp_path):
    rows = [{"question": "Who?", "answer": "Bo."}, {"question": "Q", "answer": "A", "fact": "Al"}]
    bad = write_lines(tmp_path / "bad", rows)
    (tmp_path / ".github").mkdir()
    script = shutil.copy(PROJECT / ".github/experiments.sh", tmp_path / ".github")
    (tmp_path / "out/rehearsal").mkdir(parents=True)
    path = os.pathsep.join([str(PROJECT), *sys.path])
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, "FORGET": bad, "RETAIN": bad}
    done = subprocess.run(["bash", script, "rehearsal"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"experiments.sh: --rows {bad}, line 2: fact: 'Al' is not in the answer" in done.stderr
    assert os.listdir(tmp_path / "out") == ["rehearsal"]  # where it was

def test_rehearsal_keeps_the_one_before_although_it_fails_twice(tmp_path):
    (tmp_path / "out/rehearsal").mkdir(parents=True)
    (tmp_path / "out/rehearsal/model").write_text("good")
    for _ in range(2):
        (tmp_path / "fails").write_text("mdu.py")
        assert make(tmp_path, "rehearsal").returncode == 2
        assert (tmp_path / "out/rehearsal.old/model").read_text() == "good"

def with_masks(draws, batch, t, masked):
    """The Draws, with another t and other masks: (B,) and (B, T)."""
    changed = []
    for draw, rate, of_row, response in zip(draws, t.tolist(), masked, batch.response):
        uniform = 1 - of_row[response].float()  # 0 is below every t, 1 below none
        changed.append(draw._replace(t=rate, uniform=uniform.numpy()))
    return changed

def test_backward_equals_the_step_of_the_readme():
    """With the masks that the step draws, and rows whose answers have end padding."""
    [step] = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    args = options("--batch-size 4 --response-length 12 --retain-weight 0.7 --seed 2")
    model, anchor = tiny_llama(0), tiny_llama(1)
    forget, retain = mdu.draw_step(args, make_examples(), "forget", 0, model)
    batch, kept = mdu.make_batch(model, forget), mdu.make_batch(model, retain)
    assert (kept.length < kept.response.sum(1)).any()
    scope = dict(
        torch=torch, F=F, mdu_loss=mdu.mdu_loss, mask_id=model.mask_id, retain_weight=0.7,
        model=lambda ids, real: model.lm(ids, real.long()).logits,
        anchor=lambda ids, real: anchor.lm(ids, real.long()).logits,
        ids=batch.ids, answer=batch.response, real=batch.attention_mask, retain_ids=kept.ids,
        retain_answer=kept.response, retain_real=kept.attention_mask, n=kept.length)
    torch.manual_seed(2)
    exec(step, scope)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(2)  # so that its function `draw` draws the same again
    t, masked, _ = scope["draw"](batch.ids, batch.response)
    assert masked.any(1).all()  # else backward masks one token
    forget = with_masks(forget, batch, t, masked)
    t, masked, _ = scope["draw"](kept.ids, kept.response)
    retain = with_masks(retain, kept, t, masked)
    losses = mdu.backward(args, model, mdu.References(None, anchor), forget, retain)
    assert [scope["loss"].item(), scope["retain_loss"].item()] == approx(losses, rel=1e-6)
    assert_close(found, [p.grad for p in model.parameters()], 1e-6)

    # Its masks: t is uniform on [0.001, 1), and of the answer's tokens a share t is masked.
    ids = torch.arange(1, 151).repeat(4000, 1)
    answer = ids > 50
    t, masked, noised = scope["draw"](ids, answer)
    assert_uniform(t.numpy(), 0.001)
    assert not (masked & ~answer).any() and torch.equal(noised, ids.masked_fill(masked, 0))
    shares = masked.sum(1) / 100
    assert (shares - t).abs().max() < 0.25  # 5 standard deviations

# ======== This file ========
def test_every_function_has_a_test():
    """It begins a test's name, or is in TESTED_BY; and tests that are named are there."""
    tests = [name for name in globals() if name.startswith("test_")]
    code = ""
    functions = set()  # and classes
    for module in (mdu, ev):
        code += Path(module.__file__).read_text(encoding="utf-8")
        for name, value in vars(module).items():
            is_defined = inspect.isfunction(value) or inspect.isclass(value)
            if is_defined and (value.__module__, value.__name__) == (module.__name__, name):
                functions.add(name)
    longest_first = sorted(functions, key=len, reverse=True)  # check_lengths before check
    function = "(?:" + "|".join(longest_first) + ")(?=_|$)"
    tested = set()
    for test in tests:
        start = re.match(f"test_{function}(?:_and_{function}|_{function})*", test)
        if start:
            tested.update(re.findall(f"(?<=_){function}", start.group()))
    listed = " ".join(TESTED_BY.values()).split()
    assert sorted(listed) == sorted(functions - tested)
    named_in_comments = set(re.findall(r"\b(test_\w+)", code)) - {"test_mdu"}
    assert {*TESTED_BY, *named_in_comments} <= set(tests)

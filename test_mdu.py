"""Tests of mdu.py and eval.py: CPU only, offline.    python -m pytest -q test_mdu.py

Losses are checked against slow float64 loops written from the paper's equations, against numbers worked by hand and
in their limits; masking against its definition; ROUGE-L against a table of fractions; the answer probability (Eq. 7)
against the enumeration of all masks; TOFU's figures against what its own code makes of its public logs, and against
brute force; the sampler against what a recording predictor saw; the training step against one sequence at a time; whole
runs against each other on small data that the tests write; runs on several processes, killed, stopped and resumed,
against the run that nothing broke.  `-m soak` kills torchrun and its workers for minutes.
"""
import ast
import contextlib
import copy
import fnmatch
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pkgutil
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from math import log
from pathlib import Path
from unittest import mock

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


# ---------------------------------------------------------------------------------------------------------------------
# What many tests share: programs run to their end, changed files, data, a base and runs of it
# ---------------------------------------------------------------------------------------------------------------------

def options(*argv):
    return mdu.resolve(mdu.parse(argv))


def args(**changes):
    return ev.SimpleNamespace(**{**dict(length=8, steps=8, samples=16, batch_size=3), **changes})


def program(argv, capsys, main=mdu.main):
    """mdu.py, or eval.py by its main, run to its end -> (exit code, its one line on stderr or "")."""
    name = "eval.py" if main is ev.main else "mdu.py"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mdu.run_program(name, lambda: main(argv))
    err = capsys.readouterr().err
    assert err.count("\n") <= 1 and err.startswith(f"{name}: " if err else ""), err
    return stop.value.code, err


def edit(file, change):
    file.write_bytes(change(file.read_bytes()))


def put(path, value=...):
    """A change of JSON text: the value at a.b.c (left out without one)."""
    def change(text):
        whole = part = json.loads(text)
        *inner, last = path.split(".")
        for key in inner:
            part = part[int(key) if isinstance(part, list) else key]
        part.pop(last) if value is ... else part.update({last: value})
        return json.dumps(whole).encode()
    return change


def snapshot(*folders):
    return {f: f.read_bytes() for folder in folders for f in Path(folder).rglob("*") if f.is_file()}


@contextlib.contextmanager
def unchanged(*folders):
    """Around what many tests share: none of them may leave a byte in it that was not there."""
    before = snapshot(*folders)
    yield
    assert snapshot(*folders) == before


def read_lines(file):
    """The values of a file that holds one JSON text per line."""
    return [json.loads(line) for line in Path(file).read_bytes().splitlines()]


def weights(run):
    return safetensors.torch.load_file(Path(run) / "model.safetensors")


def reweigh(run, change):
    """Every tensor of a run's model in place of itself: change(tensor)."""
    safetensors.torch.save_file({k: change(x) for k, x in weights(run).items()}, Path(run) / "model.safetensors",
                                {"format": "pt"})


def spoil(run):
    """What is left of a model whose training diverged."""
    reweigh(run, lambda x: x * math.nan)


def talkative(base, run):
    """A copy of the base, noise on its weights: it answers every question with other words, some of them right.  The
    base itself says nothing."""
    g = torch.Generator().manual_seed(0)
    shutil.copytree(base, run)
    reweigh(run, lambda x: x + 0.1 * torch.randn(x.shape, generator=g))


ROW = '{"question": "Who is number 0?", "answer": "It is word0."}'
BAD_ROWS = {  # a file of rows: (what stands in it, words of the line that names it)
    "malformed": (ROW + "\n" + ROW[:-3], ["line 2", "JSON"]), "array": ("[1, 2]", ["line 1", "object"]),
    "empty": ("\n", ["no rows"]), "no-question": ('{"answer": "a"}', ["line 1", "question is None"]),
    "empty-answer": (ROW + '\n\n{"question": "q", "answer": " "}', ["line 3", "answer is ' '"]),
    "prompt-number": ('{"prompt": 3, "response": "a"}', ["question is 3"]),
    "wrong-perturbed": (ROW[:-1] + ', "perturbed_answer": [3]}', ["line 1", "perturbed_answer"]),
    "list-perturbed": (ROW[:-1] + ', "perturbed_answer": {"a": "b"}}', ["line 1", "perturbed_answer"]),
    "wrong-paraphrase": (ROW[:-1] + ', "paraphrased_question": ["q"]}', ["paraphrased_question"]),
    "both": ('{"question": "q", "prompt": "p", "answer": "a"}', ["line 1", "both question and prompt"]),
    "twice": ('{"question": "q", "question": "p", "answer": "a"}', ["line 1", "'question' stands twice"]),
    "nan": ('{"question": NaN, "answer": "a"}', ["line 1", "NaN is no number"]),
    "nul": ("\0\0\0", ["line 1", "not JSON"]), "deep": ("[" * 100000, ["line 1", "recursion"]),
    "digits": ('{"question": ' + "9" * 5000 + "}", ["line 1", "digits"]),
    "surrogate": ('{"question": "\\ud800", "answer": "a"}', ["line 1", "question"]),
    "utf16": (ROW.encode("utf-16"), ["not UTF-8"]),
    "latin": (ROW.replace("Who", "Qué").encode("latin-1"), ["not UTF-8"]),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Data files, good and bad."""
    root = tmp_path_factory.mktemp("data")
    rows = "\n".join(ROW.replace("0", str(i)) for i in range(16))
    content = {"good": rows, "long": '{"question": "q", "answer": "' + "a " * 2000 + '"}\n' + rows,
               **{name: text for name, (text, _) in BAD_ROWS.items()}}
    for name, text in content.items():
        (root / f"{name}.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    os.mkfifo(root / "pipe.jsonl")
    for name, target in (("loop", "loop"), ("dangling", "nowhere"), ("up", ".")):
        (root / name).symlink_to(target)
    for name in ("empty", "text", "plain"):
        (root / f"{name}-folder").mkdir()
    (root / "text-folder/rows.txt").write_text("text")
    (root / "plain-folder/rows.jsonl").write_text(rows)
    with unchanged(root):
        yield root


@pytest.fixture(scope="session")
def tofu(tmp_path_factory):
    """A folder in the layout of locuslab/TOFU: one config per file, named in the card's header."""
    root = tmp_path_factory.mktemp("tofu")
    sizes = dict(forget10_perturbed=8, retain90=24, retain_perturbed=8, real_authors_perturbed=3,
                 world_facts_perturbed=3)
    for config, n in sizes.items():
        rows = [{"question": f"Q {config if config != 'retain_perturbed' else 'retain90'} {i}?", "answer": f"A {i}.",
                 "perturbed_answer": [f"B {i}.", f"C {i}."],
                 **({"paraphrased_answer": f"It is A {i}."} if config == "forget10_perturbed" else {})}
                for i in range(n)]
        (root / f"{config}.json").write_text("\n".join(map(json.dumps, rows)))
    header = "".join(f"- config_name: {config}\n  data_files: {config}.json\n" for config in sizes)
    (root / "README.md").write_text(f"---\nconfigs:\n{header}---\n")
    with unchanged(root):
        yield root


LABELS = {"choices": ["Yes.", "No way.", "Maybe so."], "labels": [1, 0, 0]}
RWKU_ROWS = {  # one row per config in the hub's fields, "subject" left out
    "forget_level1": dict(query="He was born in ___.", answer="Rome, Italy", level="1"),
    "forget_level2": dict(query="Where {was} he born?", answer="Rome", level="2"),
    "forget_level3": dict(query="Where was he born? Sure,", answer="Rome", level="3", type="affirmative suffix"),
    "neighbor_level1": dict(query="She lives in ___.", answer="Oslo", level="1"),
    "neighbor_level2": dict(query="Where does she live?", answer="Oslo", level="2"),
    "utility_general": dict(question="Two?", choices=["1", "2", "3", "4"], answer=1, task="abstract_algebra", examples=[
        dict(question="One?", choices=["1", "0", "3", "4"], answer=0)]),
    "utility_truthfulness": dict(question="Is it?", mc1_targets=LABELS, mc2_targets=LABELS),
    "utility_factuality": dict(question="Who?", answers=["The Beatles", "Beatles"]),
}
PEOPLE = ["Ann Lee", "Prince Bo, Duke of Oz", "Zoë Ho"] + [f"Nobody {i}" for i in range(9)]


def write_rwku(root, changes=()):
    """A folder in the layout of jinzhuoran/RWKU about three of twelve people;
    changes: (config, row, field, value or None)."""
    rows = {"forget_target": [dict(target=name, intro=f"{name} is known.") for name in PEOPLE]}
    for config, row in RWKU_ROWS.items():
        rows[config] = [dict(row, subject=name) for name in PEOPLE[:3] for _ in range(2)]
    rows["train_positive_llama3"] = [dict(subject=name, intro=f"{name} is known.", text=f"{name} wrote book {i}.")
                                     for name in PEOPLE[:3] for i in range(4)]
    rows["train_pair_llama3"] = [dict(subject=r["subject"], intro=r["intro"], response=[f"Made up {i}.", r["text"]],
                                      prompt=f"{r['intro']} Please write a short biography of {r['subject']}.")
                                 for i, r in enumerate(rows["train_positive_llama3"])]
    for config, number, field, value in changes:
        rows[config][number][field] = value
    header = ""
    for config, content in rows.items():
        split = "train" if config.startswith(("forget_target", "train_")) else "test"
        (root / f"{config}.jsonl").write_text("\n".join(map(json.dumps, content)))
        header += f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {config}.jsonl\n"
    (root / "README.md").write_text(f"---\nconfigs:\n{header}---\n")
    return root


@pytest.fixture(scope="session")
def rwku(tmp_path_factory):
    with unchanged(root := write_rwku(tmp_path_factory.mktemp("rwku"))):
        yield root


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A toy base model after one epoch, with an (empty) eval folder in it."""
    out = tmp_path_factory.mktemp("runs") / "base"
    mdu.main(["--method", "sft", "--epochs", "2", "--out", str(out)])
    (out / "eval").mkdir()
    with unchanged(out.parent):
        yield out


def without_head(x):
    return safetensors.torch.save({k: v for k, v in safetensors.torch.load(x).items() if "head" not in k},
                                  {"format": "pt"})


CONFIG, TOKENIZER, TENSORS, TEMPLATE = "config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"
HARMED_BASES = {  # a copy of the base: (file, its bytes -> what is written in their place, None: nothing, words)
    "causal": (CONFIG, put("is_causal"), ["causal model", "bidirectional"]),
    "mask": (CONFIG, put("mask_token_id", 99999), ["mask_token_id 99999"]),
    "true": (CONFIG, put("mask_token_id", True), ["mask_token_id True"]),
    "pad": (CONFIG, put("pad_token_id", -5), ["pad_token_id -5", "439 tokens"]),
    "vocabulary": (CONFIG, put("vocab_size", 7), ["mismatched keys", "embed_tokens"]),
    "gpt": (CONFIG, put("model_type", "gpt2"), ["AutoModelForMaskedLM", "GPT2"]),
    "garbage": (CONFIG, lambda x: b"{", ["config.json", "not JSON"]),
    "latin": (CONFIG, lambda x: b"\xff" + x, ["config.json", "not JSON", "utf-8"]),
    "list": (CONFIG, lambda x: b"[]", ["config.json", "not a JSON object"]),
    "unfinished": (CONFIG, None, ["no config.json"]),
    "tokenizer": (TOKENIZER, lambda x: b"{}", ["PreTrainedTokenizerFast"]),
    "unnamed": ("tokenizer_config.json", lambda x: b"{}", ["no end token"]),
    "larger": (TOKENIZER, put("model.vocab.more", 9999), ["token 9999 of its tokenizer", "439"]),
    "template": (TEMPLATE, lambda x: b"{% for", ["TemplateSyntaxError"]),
    "twofold": (TEMPLATE, lambda x: x + x, ["too many values"]),
    "truncated": (TENSORS, lambda x: x[:-100], ["SafetensorError"]),
    "empty": (TENSORS, lambda x: b"", ["SafetensorError", "too small"]),
    "random": (TENSORS, lambda x: np.random.default_rng(0).bytes(5000), ["SafetensorError"]),
    "half": (TENSORS, without_head, ["missing keys", "lm_head"]),
}


@pytest.fixture(scope="session")
def harmed_bases(base, tmp_path_factory):
    """Copies of the base model that must be refused."""
    root = tmp_path_factory.mktemp("harmed")
    for name, (file, change, _) in HARMED_BASES.items():
        shutil.copytree(base, root / name)
        edit(root / name / file, change) if change else (root / name / file).unlink()
    with unchanged(root):
        yield {name: root / name for name in HARMED_BASES}


@pytest.fixture(scope="session")
def unlearned(base, tmp_path_factory):
    """Two epochs of MDU from `base`, with --diagnose."""
    out = tmp_path_factory.mktemp("analysed") / "mdu"
    mdu.main(["--model", str(base), "--epochs", "2", "--diagnose", "--out", str(out)])
    with unchanged(out.parent):
        yield out


@pytest.fixture(scope="session")
def finished(base, unlearned, tmp_path_factory):
    """A base and a run of it, both scored, and an analysis beside them."""
    root = tmp_path_factory.mktemp("finished")
    for run, name in ((base, "base"), (unlearned, "run")):
        shutil.copytree(run, root / name)
    ev.main(["--samples", "1", "--steps", "1", "--limit", "2", str(root / "base"), str(root / "run")])
    ev.main(["--analysis", "roles", "--samples", "1", "--limit", "1", str(root / "run")])
    with unchanged(root):
        yield root


# ---------------------------------------------------------------------------------------------------------------------
# Losses. Their slow twins: one Python loop per sum of the paper; what carries no gradient is read out as Python floats.
# ---------------------------------------------------------------------------------------------------------------------

def rows_of(masked):
    """For each sequence, the indices of its masked positions among the M rows of `logits` (row-major order)."""
    count = itertools.count()
    return [[next(count) for hit in row if hit] for row in masked.tolist()]


def slow_softmax(row):
    exps = [z.exp() for z in row]
    total = sum(exps)
    return [e / total for e in exps]


def slow_mdu(logits, anchor, masked, tau):
    """Eq. 5: 1/|M_t| sum_i KL(p^c || p^u^tau / Z_i); p^u^0 is 1 whatever the anchor."""
    out = []
    for rows in rows_of(masked):
        total = 0 * logits.sum()
        for m in rows:
            p = slow_softmax(logits[m])
            power = [1.0] * len(p) if tau == 0 else [q.item() ** tau for q in slow_softmax(anchor[m])]
            z = sum(power)
            total = total + sum(p_v * (p_v.log() - log(u_v / z)) for p_v, u_v in zip(p, power))
        out.append(total / max(len(rows), 1))
    return torch.stack(out)


def slow_nll(logits, targets, masked, weight):
    """For each sequence b the sum over its masked positions of weight(b, p) * -log p, p that of the true token."""
    out = []
    for b, rows in enumerate(rows_of(masked)):
        total = 0 * logits.sum()
        for m in rows:
            p = slow_softmax(logits[m])[targets[m]]
            total = total - weight(b, p.item()) * p.log()
        out.append(total)
    return torch.stack(out)


def slow_logsigmoid(x):
    return -(1 + (-x).exp()).log()


def problem(seed=0, B=5, T=7, V=6):
    """Random float64 arguments, by name, for every loss: ragged masks, and sequence 2 with nothing masked."""
    g = torch.Generator().manual_seed(seed)
    masked = torch.rand(B, T, generator=g) < 0.5
    masked[2] = False
    M = int(masked.sum())
    values = {name: 2 * torch.randn(M, V, generator=g, dtype=torch.float64) for name in ("logits", "anchor")}
    for name in ("nll", "nll_ref", "nll_win", "nll_win_ref", "nll_lose", "nll_lose_ref"):
        values[name] = 9 * torch.rand(B, generator=g, dtype=torch.float64)
    return dict(values, masked=masked, targets=torch.randint(V, (M,), generator=g),
                t=torch.rand(B, generator=g, dtype=torch.float64) * 0.9 + 0.1,
                length=torch.randint(1, 9, (B,), generator=g))


# name: (function, its slow twin, arguments: names of problem() or plain values)
LOSSES = {
    "mdu tau 0": ("mdu_loss", slow_mdu, ("logits", None, "masked", 0)),
    "mdu tau .25": ("mdu_loss", slow_mdu, ("logits", "anchor", "masked", 0.25)),
    "mdu tau 1": ("mdu_loss", slow_mdu, ("logits", "anchor", "masked", 1.0)),
    "sft": ("sft_loss", lambda z, y, m, t: slow_nll(z, y, m, lambda b, p: 1 / t[b].item()),
            ("logits", "targets", "masked", "t")),
    "wga": ("wga_loss", lambda z, y, m, gamma: -slow_nll(z, y, m, lambda b, p: p ** gamma),
            ("logits", "targets", "masked", 0.3)),
    "ga": ("ga_loss", lambda nll: -nll, ("nll",)),
    "npo": ("npo_loss", lambda nll, ref, beta: -2 / beta * slow_logsigmoid(beta * (nll - ref.detach())),
            ("nll", "nll_ref", 0.2)),
    "simnpo": ("simnpo_loss", lambda nll, n, beta, delta: -2 / beta * slow_logsigmoid(beta * (nll / n - delta)),
               ("nll", "length", 2.5, 0.4)),
    "dpo": ("dpo_loss", lambda win, win_ref, lose, lose_ref, beta: -slow_logsigmoid(
                beta * ((-win + win_ref.detach()) - (-lose + lose_ref.detach()))),
            ("nll_win", "nll_win_ref", "nll_lose", "nll_lose_ref", 0.1)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
every_loss_of_logits = pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if "masked" in loss[2]])
TRAINED = {"logits", "nll", "nll_win", "nll_lose"}                                # the arguments a gradient may reach


def evaluate(function, names, values):
    """The loss and the gradient of a fixed combination of its values, by argument (None: not reached)."""
    values = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in values.items()}
    out = function(*(values[a] if isinstance(a, str) else a for a in names))
    mix = torch.linspace(0.5, 1.5, len(out), dtype=out.dtype)
    leaves = [a for a in names if isinstance(a, str) and values[a].is_floating_point()]
    return out.detach(), dict(zip(leaves, torch.autograd.grad(out @ mix, [values[a] for a in leaves],
                                                              allow_unused=True)))


def near(a, b, tol=1e-10):
    return torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_losses_equal_slow_loops(name, seed):
    """Values and gradients against the float64 loops; the anchor and every _ref get no gradient at all."""
    function, slow, names = LOSSES[name]
    (ours, grads), (expected, slow_grads) = (evaluate(f, names, problem(seed)) for f in (getattr(mdu, function), slow))
    near(ours, expected)
    for argument, grad in grads.items():
        if argument in TRAINED:
            near(grad, slow_grads[argument])
        elif argument != "t":
            assert grad is None or not grad.any(), f"{name}: gradient reached {argument}"
    if "masked" in names:
        assert ours[2] == 0                                                  # nothing masked: zero, not 0/0


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


ONE, TWO, FIRST = torch.tensor([[False, True]]), torch.tensor([[True, True]]), torch.tensor([0, 0])
FLAT, TILT, STEEP = [0.0, 0.0], [0.0, log(3)], [0.0, log(9)]                 # p = (1/2, 1/2), (1/4, 3/4), (1/10, 9/10)


@pytest.mark.parametrize("function, args, expected", [
    ("mdu_loss", (f64(FLAT), f64(TILT), ONE, 1.0), log(4 / 3) / 2),
    ("mdu_loss", (f64(FLAT, TILT), f64(TILT, TILT), TWO, 1.0), log(4 / 3) / 4),
    ("mdu_loss", (f64(FLAT), f64(STEEP), ONE, 0.5), log(4 / 3) / 2),
    ("mdu_loss", (f64(TILT), None, ONE, 0), 3 / 4 * log(3) - log(2)),
    ("mdu_loss", (f64([log(2), 0, 0]), None, ONE, 0), log(3) - 3 / 2 * log(2)),
    ("sft_loss", (f64(TILT, FLAT), FIRST, TWO, f64(0.5)), 6 * log(2)),
    ("ga_loss", (f64(2),), -2),
    ("npo_loss", (f64(1 + 2 * log(3)), f64(1), 0.5), 4 * log(4 / 3)),
    ("simnpo_loss", (f64(4 + 8 * log(3)), torch.tensor([4]), 0.5, 1.0), 4 * log(4 / 3)),
    ("wga_loss", (f64(TILT, FLAT), FIRST, TWO, 1.0), -log(2)),
    ("wga_loss", (f64(TILT, FLAT), FIRST, TWO, 2.0), -3 / 8 * log(2)),
    ("dpo_loss", (f64(1), f64(1 + log(3)), f64(2 + log(3)), f64(2), 0.5), log(4 / 3)),
    ("mdu_loss", (f64(TILT, STEEP), f64(TILT, STEEP), TWO, 1.0), 0),
    ("mdu_loss", (f64(TILT), f64(STEEP), ONE, 1e-12), 3 / 4 * log(3) - log(2)),
    ("npo_loss", (f64(3), f64(3), 0.5), 4 * log(2)), ("dpo_loss", (f64(3), f64(3), f64(1), f64(1), 0.5), log(2)),
])
def test_losses_by_hand(function, args, expected):
    """Each loss against pencil and paper.

    MDU  KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3; a second position that already equals
         its anchor adds 0 and halves the mean; (1/10, 9/10)^1/2 normalised is (1/4, 3/4);
         tau 0: 1/4 log 1/2 + 3/4 log 3/2 = 3/4 log 3 - log 2, and log 3 minus the entropy 3/2 log 2 of (1/2, 1/4, 1/4)
    SFT  1/t (log 4 + log 2) = 2 * 3 log 2              GA  -2
    NPO  -2/beta log sigma(1/2 * 2 log 3) = -4 log 3/4   SimNPO  the same: nll/4 - 1 = 2 log 3
    WGA  -(1/4 log 4 + 1/2 log 2) = -log 2, and with gamma 2: -(1/16 log 4 + 1/4 log 2) = -3/8 log 2
    DPO  ratios +log 3 (chosen) and -log 3 (rejected): -log sigma(1/2 * 2 log 3) = -log 3/4
    Last at their ends: MDU that has arrived, MDU whose tau goes to 0, and what NPO and DPO start from, -log 1/2.
    """
    near(getattr(mdu, function)(*args), f64(expected))


@every_loss_of_logits
def test_losses_ignore_padding_and_empty_batches(name):
    """Extra unmasked columns change neither value nor gradient, and a batch with nothing masked gives zeros."""
    function, _, names = LOSSES[name]
    v = problem()
    wide = dict(v, masked=F.pad(v["masked"], (0, 5)))
    (a, grads), (b, wide_grads) = (evaluate(getattr(mdu, function), names, x) for x in (v, wide))
    assert a.shape == (5,)
    near((a, grads["logits"]), (b, wide_grads["logits"]), 1e-14)
    empty = {k: x[:0] for k, x in v.items()} | dict(masked=torch.zeros_like(v["masked"]), t=v["t"])
    value, grads = evaluate(getattr(mdu, function), names, empty)
    assert value.tolist() == [0] * 5 and grads["logits"].shape == (0, 6)


@every_loss_of_logits
@pytest.mark.parametrize("dtype, result", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                           (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_losses_compute_in_float32_at_least(name, dtype, result):
    """Half-precision inputs give what the same rounded numbers give in float32; float64 stays float64."""
    function, _, names = LOSSES[name]
    low = {k: x.to(dtype) if x.is_floating_point() else x for k, x in problem().items()}
    up = {k: x.to(result) if x.is_floating_point() else x for k, x in low.items()}
    ours, expected = (evaluate(getattr(mdu, function), names, x)[0] for x in (low, up))
    assert ours.dtype == result
    near(ours, expected, 1e-6)


@every_loss
def test_losses_stay_finite(name):
    """Logits of +-1e4 and likelihood gaps of 1e6 give finite values and gradients in float32."""
    function, _, names = LOSSES[name]
    v = {k: x.float() if x.is_floating_point() else x for k, x in problem().items()}
    v.update(logits=v["logits"].sign() * 1e4, anchor=v["anchor"].sign() * 1e4)
    for gap in (1e6, -1e6):
        v.update(nll=v["nll_ref"] + gap, nll_win=v["nll_win_ref"] + gap)
        value, grads = evaluate(getattr(mdu, function), names, v)
        assert value.isfinite().all() and all(g.isfinite().all() for k, g in grads.items() if k in TRAINED)


@every_loss
def test_losses_can_be_pasted_elsewhere(name):
    """The printed source of each loss, run where only torch and F are known, gives what the module gives."""
    function, _, names = LOSSES[name]
    elsewhere = {"torch": torch, "F": F}
    exec(inspect.getsource(getattr(mdu, function)), elsewhere)
    ours, pasted = (evaluate(f, names, problem(1))[0] for f in (getattr(mdu, function), elsewhere[function]))
    assert torch.equal(ours, pasted)


# ---------------------------------------------------------------------------------------------------------------------
# Masking
# ---------------------------------------------------------------------------------------------------------------------

MASK, PAD = 10, 0
# Prompts and responses that contain the mask id and the pad id as ordinary tokens: nobody may look for either by value.
PAIRS = [([3, MASK], [4, PAD, 5, 9]), ([PAD, 7, 1], [2]), ([8], [MASK, 6, 1, 2, 5]), ([6, 6, 2, 9], [PAD, 3])]


def test_collate_and_mask_prompt():
    """A worked batch: right-padded, the answer and the padding known by place; the anchor sees no prompt token."""
    ids, answer, real = mdu.collate(PAIRS[:2], PAD)
    assert ids.tolist() == [[3, MASK, 4, PAD, 5, 9], [PAD, 7, 1, 2, PAD, PAD]] and ids.dtype == torch.long
    assert answer.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]] and answer.dtype == torch.bool
    assert real.tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]] and real.dtype == torch.bool
    noised = torch.tensor([[3, MASK, MASK, PAD, 5, MASK], [PAD, 7, 1, 2, PAD, PAD]])
    before = noised.clone()
    assert mdu.mask_prompt(noised, answer, real, MASK).tolist() == [
        [MASK, MASK, MASK, PAD, 5, MASK], [MASK, MASK, MASK, 2, PAD, PAD]]
    assert torch.equal(noised, before)


@pytest.mark.parametrize("sampling", ["bernoulli", "count"])
@pytest.mark.parametrize("at_least_one", [False, True, torch.tensor([[True], [False]] * 200)])
def test_mask_tokens_follows_its_definition(sampling, at_least_one):
    """Masks and rates against a loop over sequences; ids change where masked and nowhere else."""
    force = torch.as_tensor(at_least_one).expand(400, 1)                     # for all sequences or for each one
    ids, answer, _ = mdu.collate(PAIRS * 100, PAD)
    rng = np.random.default_rng(0)
    u, coins = torch.from_numpy(rng.random(len(ids))), torch.from_numpy(rng.random(ids.shape))
    u[::3] *= 0.05                                                           # many empty draws
    u[1::40], u[2::40] = 0.0, math.nextafter(1, 0)                           # and both ends
    u[4::40] = (7 + math.nextafter(1, 0)) / 8                                # the last of eight strata: rounds to 1
    before = ids.clone()
    noised, masked, t = mdu.mask_tokens(ids, answer, MASK, u, coins, sampling, at_least_one)
    empty = 0
    for b in range(len(ids)):
        order = sorted(answer[b].nonzero().flatten().tolist(), key=lambda i: coins[b, i].item())
        if sampling == "bernoulli":
            rate = mdu.T_MIN + (1 - mdu.T_MIN) * u[b].item()
            hit = [i for i in order if coins[b, i].item() < rate]
        else:
            hit = order[:1 + math.floor(u[b].item() * len(order))]
            rate = len(hit) / len(order)
        empty += not hit
        if force[b] and not hit:
            hit = order[:1]
        assert masked[b].nonzero().flatten().tolist() == sorted(hit)
        assert t[b].item() == pytest.approx(rate, rel=1e-6)
    assert (empty > 50) == (sampling == "bernoulli") and mdu.T_MIN == 0.001
    assert torch.equal(ids, before) and torch.equal(noised, torch.where(masked, torch.tensor(MASK), ids))
    # A coin equal to t masks nothing.
    edge = torch.tensor([[mdu.T_MIN, math.nextafter(mdu.T_MIN, 0)]], dtype=torch.float64)
    assert mdu.mask_tokens(torch.ones(1, 2).long(), edge > 0, MASK, f64(0.0), edge)[1].tolist() == [[False, True]]


def test_both_samplings_estimate_the_same_loss():
    """E[1/t sum -log p] for losses that depend on the whole mask: both samplings against the exact sum over masks.

    A mask of k out of n tokens has weight integral of t^(k-1) (1-t)^(n-k) dt = (k-1)! (n-k)! / n!, and by count
    1/n * 1/C(n, k) * n/k, the same. Points are quasi-random; t >= 0.001 costs about a thousandth.
    """
    n, N = 3, 2 ** 16
    z = torch.randn(2 ** n, n, generator=torch.Generator().manual_seed(4)).double()       # logit by (mask, position)
    exact = sum(math.factorial(s.bit_count() - 1) * math.factorial(n - s.bit_count()) / math.factorial(n)
                * sum(math.log1p(math.exp(-z[s, i])) for i in range(n) if s >> i & 1) for s in range(1, 2 ** n))
    points = torch.quasirandom.SobolEngine(n + 1, scramble=True, seed=0).draw(N, dtype=torch.float64)
    everything = torch.ones(N, n, dtype=torch.bool)
    for sampling in ("bernoulli", "count"):
        _, masked, t = mdu.mask_tokens(torch.zeros(N, n, dtype=torch.long), everything, 1, points[:, 0], points[:, 1:],
                                       sampling)
        code = (masked.long() * 2 ** torch.arange(n)).sum(1)
        logits = torch.stack([z[code][masked], torch.zeros(int(masked.sum())).double()], 1)
        loss = mdu.sft_loss(logits, torch.zeros(len(logits), dtype=torch.long), masked, t)
        assert loss.mean().item() == pytest.approx(exact, rel=0.004), sampling


# ---------------------------------------------------------------------------------------------------------------------
# ROUGE-L
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("reference, prediction, precision, recall, f1", [
    # Lin 2004, section 3.1: LCS 3 (police the gunman) and 2 (the gunman), of 4 and 4 words
    ("police killed the gunman", "police kill the gunman", 3 / 4, 3 / 4, 3 / 4),
    ("police killed the gunman", "the gunman kill police", 2 / 4, 2 / 4, 2 / 4),
    ("police killed the gunman", "the gunman police killed", 2 / 4, 2 / 4, 2 / 4),
    # google-research/rouge's own cases
    ("testing one two", "testing", 1, 1 / 3, 1 / 2),
    ("testing one two", "testing one", 1, 2 / 3, 4 / 5),
    ("testing one two", "testing two", 1, 2 / 3, 4 / 5),
    ("1 2 3 4 5", "2 5 3 4", 3 / 4, 3 / 5, 2 / 3),
    ("w1 w2 w3 w4 w5", "w1 w2 w6 w7 w8 w1 w3 w8 w9 w5", 4 / 10, 4 / 5, 8 / 15),
    # nothing to compare
    ("", "", 0, 0, 0),
    ("", "w1", 0, 0, 0),
    ("testing one two", "", 0, 0, 0),
    ("w1 w2", " /?!... \n", 0, 0, 0),
    ("a b c", "d e", 0, 0, 0),
    # identity, order, repeats, which side is which
    ("a b c d", "a b c d", 1, 1, 1),
    ("a b c d", "d c b a", 1 / 4, 1 / 4, 1 / 4),
    ("a b", "a x y b", 2 / 4, 1, 2 / 3),
    ("a a a b", "a b b b b", 2 / 5, 2 / 4, 4 / 9),
    ("the the the", "the", 1, 1 / 3, 1 / 2),
    ("a b c b d a b", "b d c a b a", 4 / 6, 4 / 7, 8 / 13),                  # the textbook LCS: b c b a
    # a greedy matcher takes the first x, misses a b c
    ("x a b c", "a b c x", 3 / 4, 3 / 4, 3 / 4),
    # case, punctuation, digits, underscore
    ("The CAT sat.", "the cat, SAT!", 1, 1, 1),
    ("it's", "it s", 1, 1, 1),
    ("state-of-the-art", "state of art", 1, 3 / 4, 6 / 7),
    ("born 07/04/1971", "born 07 05 1971", 3 / 4, 3 / 4, 3 / 4),
    ("3.14", "314", 0, 0, 0),
    ("abc123", "abc 123", 0, 0, 0),
    ("snake_case_name", "snake case", 1, 2 / 3, 4 / 5),
    ("a\tb\nc", "a b c", 1, 1, 1),
    # beyond ASCII: letters and digits of any script are tokens; a run without separators is one
    ("café crème", "CAFÉ crème", 1, 1, 1),
    ("café", "cafe", 0, 0, 0),
    ("Łódź, Åse!", "åse łódź", 1 / 2, 1 / 2, 1 / 2),
    ("東京 2020", "東京 2021", 1 / 2, 1 / 2, 1 / 2),
    ("東京都", "東京", 0, 0, 0),
    ("Мария — поэт", "мария «поэт»", 1, 1, 1),
])
def test_rouge_l(reference, prediction, precision, recall, f1):
    """P = LCS / predicted words, R = LCS / reference words, F1 = 2 LCS / all words, worked by hand."""
    assert ev.rouge_l(reference, prediction) == pytest.approx((precision, recall, f1), abs=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Predictors: a deterministic fake that remembers what it was shown, and a tiny bidirectional Llama
# ---------------------------------------------------------------------------------------------------------------------

class Fake:
    """Scores from every real token and its place, in float64; `boost` is added to the score of the mask token."""
    mask_id, pad_id, vocab_size = MASK, PAD, 11

    def __init__(self, boost=-50.0, by_entropy=False):
        self.by_entropy = by_entropy
        g = torch.Generator().manual_seed(6)
        self.table, self.place, self.head = (torch.randn(*s, generator=g).double() for s in ((11, 8), (32, 8), (8, 11)))
        self.boost, self.calls = boost, []

    def __call__(self, ids, real, positions):
        self.calls.append((ids.clone(), real.clone(), positions.clone()))
        place = self.place[:ids.shape[1]]                                                       # (T, 8)
        context = (self.table[ids] * place * real[..., None]).sum(1, keepdim=True)              # (B, 1, 8)
        scores = 2 * torch.tanh(context / 2 + place)[positions] @ self.head                     # (M, 11)
        scores[:, MASK] += self.boost
        return scores


def tiny(seed, mask_id=0, pad_id=1):
    """A random bidirectional Llama with a vocabulary of 64 in float64, so that sums in any order agree."""
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, initializer_range=0.4)
    config.is_causal = False
    torch.manual_seed(seed)
    return mdu.MaskPredictor(transformers.LlamaForCausalLM(config).double(), mask_id, pad_id, end_id=1)


def test_the_readmes_lines_for_another_project():
    """The lines under "Copying the loss", with the sources that they name, on models and padded rows of one's own: the
    gradient is Eq. 5's, of each row alone."""
    readme = (Path(mdu.__file__).parent / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?m)^    (.*)", readme.split("## Copying the loss")[1].split("##")[0])
    model, frozen = tiny(0).lm, tiny(1).lm
    ids, real = torch.randint(2, 64, (3, 9)), torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 5 + [0] * 4])
    given = dict(torch=torch, F=F, math=math, T_MIN=0.001, model=model, frozen=frozen, mask_id=0, B=3, T=9, ids=ids,
                 real=real, answer=(torch.arange(9) >= torch.tensor([[4], [3], [2]])) & real.bool())
    for function in (mdu.mask_tokens, mdu.mask_prompt, mdu.mdu_loss):
        exec(inspect.getsource(function), given)
    exec("\n".join(lines), given)
    pasted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for b, n in enumerate(real.sum(1)):
        noised, answer, masked = (given[name][b, :n] for name in ("noised", "answer", "masked"))
        logits = model(input_ids=noised[None]).logits[0][masked]
        anchor = frozen(input_ids=torch.where(answer, noised, 0)[None]).logits[0][masked]
        (slow_mdu(logits, anchor, masked[None], 1).sum() / 3).backward()
    for ours, slow in zip(pasted, (p.grad for p in model.parameters()), strict=True):
        near(ours, slow)
    assert any(grad.abs().max() > 1e-3 for grad in pasted)


# ---------------------------------------------------------------------------------------------------------------------
# Eq. 7: the answer probability
# ---------------------------------------------------------------------------------------------------------------------

def all_masks(n):
    """Every non-empty subset of n positions as a bool (2^n - 1, n), and its probability under Eq. 7."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=n))[1:])
    return masks, f64(*(1 / (n * math.comb(n, size)) for size in masks.sum(1).tolist()))


def test_draw_masks():
    """40000 draws against the enumeration of all subsets, within 5 sigma each; every number of the seed matters."""
    for n in (1, 2, 3, 4):
        masks = ev.draw_masks(n, 40000, [8, n])
        assert masks.shape == (40000, n) and masks.dtype == torch.bool
        shares = (masks.long() * 2 ** torch.arange(n)).sum(1).bincount(minlength=2 ** n).double() / 40000
        for subset, share in enumerate(shares.tolist()):  # 1/n for its size, shared by the C(n, size) of that size
            p = 1 / (n * math.comb(n, subset.bit_count())) if subset else 0.0
            assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 40000), (n, subset, share, p)
    first = ev.draw_masks(20, 128, [1, 2])
    assert torch.equal(first, ev.draw_masks(20, 128, [1, 2]))
    assert all(not torch.equal(first, ev.draw_masks(20, 128, seed)) for seed in ([1, 3], [2, 1], [1], [1, 2, 3]))


def test_compared_answers_share_their_masks():
    """One seed: equal lengths, equal masks; of 12 tokens twice the share of 6, to one token,
    and the 6 keep their order of coins."""
    short, long = ev.draw_masks(6, 400, [3, 1]), ev.draw_masks(12, 400, [3, 1])
    assert torch.equal(short, ev.draw_masks(6, 400, [3, 1]))
    assert set((long.sum(1) - 2 * short.sum(1)).tolist()) == {-1, 0}
    for a, b in zip(short, long[:, :6]):
        assert not ((a & ~b).any() and (b & ~a).any())  # the smallest coins come first in both


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_masked_nll_equals_slow_loop(batch_size):
    """Every mask of four ragged questions, batched, against one predictor call per mask and a float64 loop.

    Also what the predictor was shown: prompt and unmasked answer as they are, the mask elsewhere, padding on the right;
    short questions first, so that those of like length share a batch.
    """
    masks = [all_masks(len(response))[0] for _, response in PAIRS]
    fake, alone = Fake(), Fake()
    ours = ev.masked_nll(fake, PAIRS, masks, batch_size)
    for (prompt, response), subsets, nll in zip(PAIRS, masks, ours):
        assert nll.shape == (len(subsets),) and nll.dtype == torch.float64
        for subset, value in zip(subsets.tolist(), nll.tolist()):
            ids = torch.tensor([prompt + [MASK if hit else y for hit, y in zip(subset, response)]])
            positions = torch.tensor([[False] * len(prompt) + subset])
            scores = alone(ids, torch.ones_like(positions), positions)
            truth = [y for hit, y in zip(subset, response) if hit]
            expected = sum(-slow_softmax(row)[y].log().item() for row, y in zip(scores, truth)) / len(truth)
            assert value == pytest.approx(expected, rel=1e-5)
    assert max(len(ids) for ids, _, _ in fake.calls) <= batch_size
    shown = []
    for ids, real, positions in fake.calls:
        for row, keep, ask, n in zip(ids, real, positions, real.sum(1).tolist()):
            assert keep[:n].all() and not ask[n:].any()
            shown.append((row[:n].tolist(), ask[:n].tolist()))
    assert sorted(shown) == sorted((ids[0].tolist(), positions[0].tolist()) for ids, _, positions in alone.calls)
    assert shown == sorted(shown, key=lambda row: len(row[0]))


def test_monte_carlo_estimate_finds_the_exact_value():
    """Eq. 7 sampled against Eq. 7 summed over all masks: within 4 standard errors, which shrink as 1/sqrt(N)."""
    questions = [([3, 1], [4, 5, 9]), ([8], [7, 6, 1, 2, 5]), ([2, 9, 4], [3, 3])]
    exact = ev.masked_nll(Fake(), questions, [all_masks(len(y))[0] for _, y in questions])
    exact = [math.exp(-(nll @ all_masks(len(y))[1]).item()) for nll, (_, y) in zip(exact, questions)]
    errors = {}
    for N in (1024, 16384):
        masks = [ev.draw_masks(len(y), N, [10, i]) for i, (_, y) in enumerate(questions)]
        for i, nll in enumerate(ev.masked_nll(Fake(), questions, masks, batch_size=512)):
            p, errors[N, i] = ev.answer_probability(nll)
            assert 0 < errors[N, i] < 0.1 * p
            assert abs(p - exact[i]) < 4 * errors[N, i], (N, i, p, exact[i])
    for i in range(3):
        assert errors[1024, i] / errors[16384, i] == pytest.approx(4, rel=0.15)


def test_answer_probability_by_hand():
    """NLLs log 2, 3 log 2: mean log 4, p = 1/4; deviation sqrt 2 log 2, so stderr = 1/4 log 2; one sample has none."""
    assert ev.answer_probability(f64(log(2), 3 * log(2))) == pytest.approx((1 / 4, log(2) / 4))
    p, stderr = ev.answer_probability(f64(log(5)))
    assert p == pytest.approx(1 / 5) and stderr is None


def test_scores_at_once_are_bounded(monkeypatch):
    """Hand-worked, 11 scores at a position: 5 tokens take 55, so 330 are room for 6 rows, 329 for 5, and a row that
    takes more than there is goes alone; 3 masks of 2 tokens take 22 each.  The order stays, and no job is lost."""
    for scores, length, sizes in ((329, 5, [5, 5, 3]), (330, 5, [6, 6, 1]), (54, 5, [1] * 13), (9999, 5, [8, 5])):
        monkeypatch.setattr(ev, "SCORES", scores)
        found = ev.batches(Fake(), list(range(13)), length, 8)
        assert [len(batch) for batch in found] == sizes and sum(found, []) == list(range(13))
    fake, masks = Fake(), [torch.tensor([[True, True, False], [True, True, False], [True, False, True]])]
    monkeypatch.setattr(ev, "SCORES", 44)
    ev.masked_nll(fake, [([3], [4, 5, 6])], masks)
    assert [len(ids) for ids, *_ in fake.calls] == [2, 1]
    assert torch.equal(torch.cat([positions[:, 1:] for *_, positions in fake.calls]), masks[0])


def test_masked_nll_of_a_transformer_is_batch_independent():
    """A real bidirectional transformer: padded batches against one question and one mask at a time."""
    llama = tiny(7, MASK, PAD)
    masks = [ev.draw_masks(len(response), 6, [11, i]) for i, (_, response) in enumerate(PAIRS)]
    together = ev.masked_nll(llama, PAIRS, masks)
    for pair, subset, nll in zip(PAIRS, masks, together):
        near(nll, ev.masked_nll(llama, [pair], [subset], batch_size=1)[0], 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# TOFU's own figures
# ---------------------------------------------------------------------------------------------------------------------

# Four questions of each of the benchmark's public evaluation logs (Llama-2-7B fine-tuned on all authors; last: on
# retain90): mean loss per token of the answer, of the paraphrased answer (where there is one), of the perturbed
# answers.
LOGS = {
    "retain": [(0.0120, 1.5781, [1.7120, 1.9709, 1.4638, 1.7079, 1.9508]),
               (0.0013, 2.5527, [2.8353, 3.0840, 2.8997, 2.6863, 3.0322]),
               (0.0105, 2.9240, [3.5491, 3.2195, 3.5912, 3.4989, 3.0968]),
               (0.0028, 3.5176, [3.5704, 2.8008, 3.4043, 3.2763, 3.2643])],
    "real_authors": [(4.1092, None, [6.0565, 3.3802, 6.8580]), (3.8379, None, [2.9575, 5.3061, 7.0973]),
                     (3.8588, None, [4.2897, 4.1698, 3.9189]), (2.5574, None, [3.5782, 8.0303, 7.5862])],
    "world_facts": [(8.3882, None, [7.7738, 7.3298, 11.4043]), (5.1166, None, [6.5493, 7.7743, 6.6396]),
                    (5.9847, None, [6.5476, 4.7384, 5.7158]), (8.7967, None, [6.9445, 5.7649, 9.0495])],
    "forget": [(0.0145, 2.2287, [3.3558, 3.6902, 3.7194, 4.4322, 2.9737]),
               (0.0011, 2.8923, [1.9155, 3.6661, 3.0774, 3.5560, 3.7387]),
               (0.0030, 1.8339, [2.5070, 1.9295, 1.1317, 2.2245, 1.2787]),
               (0.0046, 2.9947, [3.7606, 3.5469, 3.4594, 3.5792, 3.3402])],
    "retain model": [(1.8360, 3.9662, [3.3338, 3.7183, 3.7702, 4.0321, 3.2654]),
                     (0.7290, 3.0423, [1.4900, 3.1398, 2.6959, 3.3705, 3.6587]),
                     (1.5268, 2.1251, [2.0728, 1.9950, 0.6368, 1.6356, 0.6699]),
                     (2.3261, 3.6645, [3.6795, 3.6148, 3.5782, 3.6885, 3.4043])],
}


def records_of(logs, recalls=(0.5, 0.75, 1.0, 1.0)):
    """Records as score_answers writes them, from losses."""
    records = []
    for (nll, paraphrased, wrong), recall in zip(logs, recalls):
        r = {"nll": nll, "prob": math.exp(-nll), "prob_stderr": None, "rougeL_recall": recall, "nll_perturbed": wrong,
             "truth_ratio": ev.truth_ratio(nll if paraphrased is None else paraphrased, wrong)}
        if paraphrased is None:
            r["prob_options"] = ev.option_probability(nll, wrong)
        else:
            r["nll_paraphrased"] = paraphrased
        records.append(r)
    return records


def test_tofu_figures_equal_the_official_code():
    """What utils.py of the benchmark gave for these losses: probability, truth ratio, utility;
    and its Kolmogorov-Smirnov test."""
    splits = {split: ev.summarise_answers(records_of(logs, [1.0] * 4 if split != "retain" else (0.5, 0.75, 1, 1)),
                                          split == "forget") for split, logs in LOGS.items()}
    official = {("retain", "prob"): 0.9933828516019187, ("retain", "truth_ratio"): 0.20114249932143224,
                ("retain", "rougeL_recall"): 0.8125, ("real_authors", "prob_options"): 0.4016959226747267,
                ("real_authors", "truth_ratio"): 0.36202952059623983,
                ("world_facts", "prob_options"): 0.2549866735771169,
                ("world_facts", "truth_ratio"): 0.2060975265023985, ("forget", "prob"): 0.9942300707024888,
                ("forget", "truth_ratio"): 0.6730792177843419}
    for (split, metric), value in official.items():
        assert splits[split][metric] == pytest.approx(value, rel=1e-12), (split, metric)
    assert ev.model_utility(splits) == pytest.approx(0.38735456860265144, rel=1e-12)
    quality = ev.forget_quality(*(records_of(LOGS[name]) for name in ("forget", "retain model")))
    assert quality == pytest.approx(2 / 70, rel=1e-12)  # apart: the two extreme ones of 8 choose 4 interleavings


def test_tofu_figures_by_hand_and_at_their_ends():
    """R = mean(1/4, 1/8) / (1/2) = 3/8; among options 1/2 of 1/2 + 1/4 + 1/4; losses of thousands stay finite;
    nothing measured is None."""
    right, wrong = log(2), [log(4), log(8)]
    assert ev.truth_ratio(right, wrong) == pytest.approx(3 / 8)
    assert ev.option_probability(log(2), [log(4)] * 2) == pytest.approx(1 / 2)
    for a, b in ((1e4, [0.0]), (0.0, [1e4])):
        ratio = ev.truth_ratio(a, b)
        assert 0 < ratio < math.inf and 0 <= ev.option_probability(a, b) <= 1 and 1 / ratio < math.inf
    nine = {"retain": dict(rougeL_recall=0.5, prob=0.25, prob_options=9, truth_ratio=1),
            "real_authors": dict(rougeL_recall=0.5, prob=9, prob_options=0.25, truth_ratio=1),
            "world_facts": dict(rougeL_recall=0.5, prob=9, prob_options=0.25, truth_ratio=1)}
    assert ev.model_utility(nine) == pytest.approx(9 / (3 * (2 + 4 + 1)))
    nine["retain"]["truth_ratio"] = 0
    assert ev.model_utility(nine) == 0
    del nine["world_facts"]["truth_ratio"]
    assert ev.model_utility(nine) is None and ev.model_utility({}) is None
    assert ev.summarise_answers([], False) == {"n": 0, "prob_stderr": None, "stderr": {}}
    one = dict(rougeL_f1=0.5, rougeL_recall=0.25, prob=0.125, prob_stderr=0.1, truth_ratio=4.0, perplexity=8.0,
               fact=1.0)
    assert ev.summarise_answers([one], True) == dict(
        n=1, rougeL_f1=0.5, rougeL_recall=0.25, prob=0.125, fact=1.0, truth_ratio=0.25, prob_stderr=0.1,
        perplexity_median=8.0, perplexity_mean=8.0,
        stderr=dict.fromkeys(("rougeL_f1", "rougeL_recall", "prob", "fact", "truth_ratio")))
    two = ev.summarise_answers([one, dict(one, truth_ratio=0.5)], False)
    assert two["truth_ratio"] == 0.25  # max(0, 1 - 4) = 0 and 1 - 1/2
    assert "truth_ratio" not in ev.summarise_answers([one, {k: v for k, v in one.items() if k != "truth_ratio"}], False)


@pytest.mark.parametrize("a, b", [
    ([1], [2]), ([1], [1]), ([1, 3, 5], [2, 4]), ([1, 2, 3], [4, 5, 6, 7]), ([6, 3, 7], [4, 1, 2]),
    ([5, 1, 9, 2], [3, 7, 8, 4, 6]),
    ([1, 2, 2, 3], [2, 3, 3, 4, 5]), ([1, 1, 1], [1, 1]), ([2, 2, 2, 2, 2], [1, 3]), ([0.5, 0.25, 4], [0.5, 0.25, 4])])
def test_ks_test_equals_brute_force(a, b):
    """D from the two step functions themselves, p from every interleaving of distinct values."""
    def largest_gap(a, b):
        return max(abs(sum(x <= v for x in a) / len(a) - sum(x <= v for x in b) / len(b)) for v in [*a, *b])
    places = range(len(a) + len(b))
    gaps = [largest_gap(chosen, [i for i in places if i not in chosen])
            for chosen in itertools.combinations(places, len(a))]
    d, p = ev.ks_test(a, b)
    assert d == pytest.approx(largest_gap(a, b)) and p == pytest.approx(np.mean([gap >= d - 1e-9 for gap in gaps]))


def test_ks_test_equals_published_values():
    """The benchmark's public logs: D = 119/300 between 300 and 300 questions has p = 1.834066410994743e-21;
    others from scipy."""
    d, p = ev.ks_test(range(300), [i + 118.5 for i in range(300)])
    assert d == pytest.approx(119 / 300) and p == pytest.approx(1.834066410994743e-21, rel=1e-12)
    assert ev.ks_test(range(10), [i + 0.5 for i in range(4, 12)]) == pytest.approx((0.5, 0.1659582247817542))
    assert ev.ks_test([1, 2, 2, 3], [2, 3, 3, 4, 5]) == pytest.approx((0.55, 0.4285714285714286))
    assert ev.ks_test([], [1]) == ev.ks_test([1], []) == (None, None)


# ---------------------------------------------------------------------------------------------------------------------
# Sampler
# ---------------------------------------------------------------------------------------------------------------------

PROMPTS = [prompt for prompt, _ in PAIRS]


@pytest.mark.parametrize("length, steps, counts", [
    (6, 6, [1] * 6), (6, 2, [3, 3]), (7, 3, [3, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (5, 1, [5]), (3, 5, [1, 1, 1])])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("by_entropy", [False, True])
def test_generate_fixes_the_most_confident(prompt, length, steps, counts, by_entropy):
    """Each step, recomputed from what the predictor saw: how many are fixed, that they are the surest, and for good."""
    fake = Fake(by_entropy=by_entropy)
    final = torch.tensor(ev.generate(fake, [prompt], length, steps)[0])
    assert final.shape == (length,) and (final != MASK).all()
    masked = [positions[0, len(prompt):] for *_, positions in fake.calls] + [torch.zeros(length, dtype=torch.bool)]
    assert masked[0].all() and [int((now & ~then).sum()) for now, then in zip(masked, masked[1:])] == counts
    for (ids, real, positions), now, then in zip(fake.calls, masked, masked[1:]):
        assert ids[0, :len(prompt)].tolist() == prompt and not positions[0, :len(prompt)].any() and real.all()
        assert torch.equal(ids[0, len(prompt):], torch.where(now, MASK, final)) and not (then & ~now).any()
        scores = Fake()(ids, real, positions)
        p, best = scores.softmax(-1).max(-1)
        surety = -torch.distributions.Categorical(logits=scores).entropy() if by_entropy else p
        sure = torch.zeros(length, dtype=torch.float64).masked_scatter(now, surety)
        fixed = now & ~then
        assert torch.equal(final[fixed], best[fixed[now]])
        assert not then.any() or sure[fixed].min() > sure[then].max()


def test_generate_never_writes_the_mask_token():
    """A predictor that scores the mask token highest everywhere yields the second best, never the mask."""
    for prompt in PROMPTS:
        fake = Fake(boost=50.0)
        tokens, = ev.generate(fake, [prompt], 5, 1)
        scores = Fake(boost=50.0)(*fake.calls[0])
        assert (scores.argmax(-1) == MASK).all() and tokens == scores.topk(2).indices[:, 1].tolist()
        assert MASK not in ev.generate(fake, [prompt], 5, 5)[0]


@pytest.mark.parametrize("length, steps", [(6, 6), (7, 3)])
def test_generate_is_batch_independent(length, steps):
    """Prompts of different lengths in batches of 2 or all together against one at a time: the fake and the Llama.
    Short prompts first, so that those of like length share a batch."""
    for prompts in (PROMPTS, PROMPTS[::-1]):
        fake = Fake()
        ev.generate(fake, prompts, length, steps, 2)
        widths = [ids.shape[1] for ids, *_ in fake.calls]
        assert widths == sorted(widths)
    for predictor in (Fake(), tiny(7, MASK, PAD)):
        alone = [ev.generate(predictor, [prompt], length, steps)[0] for prompt in PROMPTS]
        assert len({tuple(tokens) for tokens in alone}) > 1
        for batch_size in (2, 64):
            assert ev.generate(predictor, PROMPTS, length, steps, batch_size) == alone


@pytest.mark.parametrize("ids, n", [
    ([4, 5, 6], 3), ([4, 8, 5, 9], 1), ([4, 5, 9, 8], 2), ([4, 9], 1), ([8, 4, 8], 0), ([], 0)])
def test_an_answer_stops_at_the_first_end_or_padding_token(ids, n):
    assert ev.ended(ev.SimpleNamespace(end_id=8, pad_id=9), ids) == n


def test_temperature_fixes_the_likeliest_of_the_drawn():
    """One of five tokens: the one whose drawn token has the highest probability, whatever stood higher elsewhere."""
    ids, answer, real = mdu.collate([([3, 1], [MASK] * 5)], PAD)
    scores = Fake()(ids, real, answer).float()
    scores[:, MASK] = -math.inf
    p, places = scores.softmax(-1), set()
    for seed in range(50):
        torch.manual_seed(seed)
        drawn = (scores / 2).softmax(-1).multinomial(1)[:, 0].tolist()
        place = max(range(5), key=lambda i: p[i, drawn[i]].item())
        torch.manual_seed(seed)
        written, masked = next(ev.denoise(Fake(), ids, real, answer, 5, temperature=2.0))
        assert masked[0].tolist() == [False] * 2 + [i != place for i in range(5)]
        assert written[0, 2 + place] == drawn[place]
        places.add(place)
    assert len(places) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Options and bad input
# ---------------------------------------------------------------------------------------------------------------------

TOFU_NUMBERS = dict(batch_size=4, grad_accum=4, data="locuslab/TOFU", mask_sampling="bernoulli", response_length=128)
PRESETS = {  # what is typed: what it stands for; of the hub's backbones the paper's numbers
    "": dict(method="mdu", tau=1.0, retain_weight=1.0, data="toy", batch_size=8, mask_sampling="count", beta=None,
             gamma=None, delta=None, null_prompt_rate=0.0, out="out/toy/mdu-tau1"),
    "--method sft": dict(lr=5e-3, epochs=150, batch_size=16, null_prompt_rate=0.1, out="out/toy/base", tau=None,
                         retain_weight=None),
    "--method ga": dict(retain_weight=None), "--method gd": dict(retain_weight=1.0),
    "--method npo": dict(retain_weight=1.0, beta=0.2), "--method simnpo": dict(retain_weight=1.0, beta=4.5, delta=0.0),
    "--method wga": dict(retain_weight=1.0, gamma=1.0), "--method dpo": dict(retain_weight=1.0, beta=0.1),
    "--method mdu --tau 0.25 --lr 0.3": dict(lr=0.3, out="out/toy/mdu-tau0.25"),
    **{f"--preset {typed}": numbers for name, hub_model, epochs, epochs_of_sft in (
        ("llada", "GSAI-ML/LLaDA-8B-Instruct", 9, 1000), ("dream", "Dream-org/Dream-v0-Instruct-7B", 5, 300))
       for typed, numbers in {
           f"tofu-{name}": dict(TOFU_NUMBERS, lr=1e-5, epochs=epochs, model=None, retain_weight=1.0,
                                null_prompt_rate=0.0, retain_reduction="sequence", out=f"out/tofu-{name}/mdu-tau1"),
           f"tofu-{name} --method sft": dict(TOFU_NUMBERS, lr=2e-5, epochs=epochs_of_sft, model=hub_model),
           f"tofu-{name} --method sft --model x/y": dict(model="x/y", revision=None),
           f"rwku-{name} --forget x.jsonl": dict(lr=1e-5, epochs=3, batch_size=4, grad_accum=1, retain_weight=0.0,
                                                 model=hub_model)}.items()},
}


@pytest.mark.parametrize("typed", PRESETS)
def test_presets_resolve_to_their_documented_numbers(typed):
    """Default < method < preset < flag, and every method gets the options that are its own and no others."""
    o = options(*typed.split())
    assert {name: getattr(o, name) for name in PRESETS[typed]} == PRESETS[typed]
    assert len(o.revision or "") == (0 if o.model in (None, "x/y") else 40)
    assert ev.RWKU_LENGTH == 30  # tokens of an answer on RWKU


def test_names_that_are_also_folders(tmp_path, monkeypatch):
    """--out may be named as data that is built in or on the hub; a preset's model may lie in a folder of its name."""
    monkeypatch.chdir(tmp_path)
    for argv in (["--preset", "toy-rwku", "--method", "sft", "--out", "toy-rwku"],
                 ["--preset", "tofu-llada", "--method", "sft", "--out", "locuslab"]):
        mdu.check_run(options(*argv), {"forget": [0] * 99, "train_retain": [0] * 99})
    (tmp_path / "GSAI-ML/LLaDA-8B-Instruct").mkdir(parents=True)
    assert options("--preset", "rwku-llada", "--subject", "1").model == str(tmp_path / "GSAI-ML/LLaDA-8B-Instruct")


def test_a_model_brings_its_preset(base, tmp_path):
    """Without --preset: a run's own; any other model gets numbers for billions of weights, and not the toy's."""
    o = options("--model", str(base))
    assert (o.preset, o.lr, o.batch_size) == ("toy", 1e-3, 8)
    shutil.copytree(base, tmp_path / "run")
    edit(tmp_path / "run/run.json", put("options.preset", "toy-rwku"))
    assert options("--model", str(tmp_path / "run"), "--subject", "1").epochs == 50
    for model in ("owner/name", str(tmp_path)):
        o = options("--model", model, "--forget", "x.jsonl", "--retain", "y.jsonl")
        assert (o.preset, o.lr, o.epochs, o.batch_size, o.grad_accum, o.mask_sampling, o.response_length, o.out) == (
            "own", 1e-5, 5, 4, 1, "bernoulli", 128, "out/own/mdu-tau1")
    assert options("--model", "owner/name", "--data", "locuslab/TOFU", "--method", "sft").lr == 2e-5
    assert options("--model", "owner/name", "--preset", "toy").lr == 1e-3


@pytest.mark.parametrize("argv, trained, frozen", [
    ("--dtype bfloat16", torch.float32, torch.bfloat16), ("--dtype float32", torch.float32, torch.float32),
    ("--dtype bfloat16 --weights bfloat16", torch.bfloat16, torch.bfloat16),
    ("--dtype bfloat16 --weights bfloat16 --method sft", torch.bfloat16, None)])
def test_rotary_frequencies_are_never_rounded(base, tmp_path, monkeypatch, argv, trained, frozen):
    """Weights in the dtype that was asked for, scores in that of --dtype, the frozen model's those of the start; the
    frequencies, a buffer, in float32 in every model: rounded to bfloat16 they would turn by a radian within 500
    tokens."""
    from transformers import LlamaForCausalLM
    seen, computed, step_losses = [], set(), mdu.step_losses

    def watched(o, predictor, reference, *rows):
        seen.append((predictor, reference))
        predictor.register_forward_hook(lambda module, inputs, scores: computed.add(scores.dtype))
        return step_losses(o, predictor, reference, *rows)
    monkeypatch.setattr(mdu, "step_losses", watched)
    model = [] if "sft" in argv else ["--model", str(base)]
    mdu.main([*argv.split(), *model, "--epochs", "0.1", "--out", str(tmp_path / "run")])
    predictor, reference = seen[0]
    assert {p.dtype for p in predictor.parameters()} == {trained} and (reference is None) == (frozen is None)
    assert computed == {getattr(torch, argv.split()[1])}
    for network in filter(None, seen[0]):
        frequencies = [b for name, b in network.named_buffers() if "inv_freq" in name]
        assert frequencies
        for found in frequencies:  # 8 frequencies for 16 dimensions of a head, at the default base of 10000
            torch.testing.assert_close(found, torch.tensor([10000 ** (-i / 8) for i in range(8)]), rtol=1e-6, atol=0)
    if reference is not None:
        config = mdu.load_backbone(str(base))[0].lm.config
        start = LlamaForCausalLM.from_pretrained(base, config=config, dtype=frozen)
        ids = torch.arange(300)[None] % 90
        own = reference(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool))
        assert torch.equal(own, start(input_ids=ids).logits[0]) and own.dtype == frozen


def test_commands_in_the_readme_parse():
    """Every indented line of README.md that names a program is a command, and is accepted as typed."""
    readme, programs = (Path(mdu.__file__).parent / "README.md").read_text(encoding="utf-8"), set()
    for name, value in re.findall(r'^    (\w+)="(.*)"$', readme, re.M):
        readme = readme.replace(f"${name}", value)
    for line in re.findall(r"^    .*\b(?:mdu|eval)\.py\b.*", readme, re.M):
        command = re.fullmatch(r"    (?:python|torchrun .*--nproc_per_node=\d+.*) (mdu|eval)\.py( .*)?", line)
        assert command, line
        argv = shlex.split(command[2] or "", comments=True)
        mdu.resolve(mdu.parse(argv)) if command[1] == "mdu" else ev.parse(argv)
        programs.add(command[1])
    assert programs == {"mdu", "eval"}


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["demo", "table", "figures", "rwku"])
def test_commands_of_make_parse(target, tmp_path, monkeypatch):
    """Every command that `make` would run is accepted, what stands in Python on one line too; what is started from,
    scored, reported or drawn was trained before, and all that is trained is shown at the end."""
    shell = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    typed = subprocess.run(["make", "-n", target], cwd=Path(mdu.__file__).parent, env=shell, check=True, text=True,
                           capture_output=True).stdout
    called, trained, shown = [], set(), set()
    for name in ("mdu", "eval"):
        main = functools.partial(lambda name, argv: called.append((name, argv)), name)
        monkeypatch.setitem(sys.modules, name, mock.Mock(main=main))
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern])
    monkeypatch.chdir(tmp_path)  # where no folder is there yet
    for code, program, words in re.findall(r"python (?:-c '(.*?)'|(mdu|eval)\.py ([^\n]*))", typed, re.S):
        exec(code, {}) if code else called.append((program, words.split()))
    for program, argv in called:
        if program == "mdu":
            o = mdu.resolve(mdu.parse(argv))
            assert not o.model or os.path.relpath(o.model) in trained
            trained.add(o.out)
            Path(o.out).mkdir(parents=True)  # a model brings its preset
            Path(o.out, "run.json").write_text(json.dumps({"options": vars(o), "data": {}}))
        else:
            a = ev.parse(argv)
            assert {run for run in (*a.runs, a.retain_run or a.runs[0]) if "*" not in run} <= trained
            shown |= set(a.runs if a.report or a.analysis else [])
    assert shown >= trained if target != "rwku" else any("*" in run for run in shown)


BAD_INPUT = {  # what is typed ({d}: the data files, {base}: a base model): words that the one line must hold
    "--method sgd": ["sgd", "choose from"], "--preset tofu": ["tofu", "choose from"], "--meth mdu": ["unrecognized"],
    "--tau 1.5": ["--tau 1.5", "[0, 1]"], "--tau -0.1": ["--tau -0.1"], "--tau nan": ["--tau nan"],
    "--tau x": ["--tau", "'x'"], "--lr inf": ["--lr inf"], "--lr 0": ["--lr"], "--epochs nan": ["--epochs nan"],
    "--seed -1": ["--seed -1"], "--limit 0": ["--limit 0"], "--lr 2": ["at most 1"],
    "--method ga --null-prompt-rate 0.1": ["not used without a retain loss"],
    "--method ga --retain-reduction token": ["--retain-reduction", "without a retain loss"],
    "--out x/base": ["where the base model belongs"], "--limit 9999999999": ["1000000"], "--batch-size 2.5": ["2.5"],
    "--retain-weight -1": ["--retain-weight"], "--method ga --tau 1": ["--tau", "ga does not use it", "mdu"],
    "--method mdu --beta 1": ["--beta", "npo, simnpo, dpo"], "--method ga --retain-weight 1": ["ga does not use it"],
    "--method sft --gamma 1": ["wga"],
    "--method gd --retain-weight 0": ["use --method ga"], "--method npo --beta 0": ["--beta 0"],
    "--retain {d}/good.jsonl": ["--forget"], "--forget {d}/good.jsonl": ["--retain FILE"],
    "--forget {d}/good.jsonl --data toy --retain-weight 0": ["--data toy"],
    "--forget {d}/absent.jsonl --retain-weight 0": ["absent.jsonl", "No such file"],
    "--forget {d} --retain-weight 0": ["directory"],
    "--forget {d}/good.jsonl --retain-weight 0 --out {d} --overwrite": ["would replace --forget"],
    "--preset toy-rwku --subject 1 --retain {d}/good.jsonl --retain-weight 1 --out {d}": ["would replace --retain"],
    "--method mdu --retain-only": ["--retain-only", "only sft"],
    "--forget {d}/good.jsonl --retain-weight 0 --method dpo": ["row 0", "perturbed_answer"],
    "--forget {d}/long.jsonl --retain-weight 0 --model {base}": ["2004 tokens", "1024"],
    "--forget {d}/long.jsonl --retain {d}/good.jsonl --batch-size 17 --model {base}": ["16 retain rows", "17 of one"],
    "--data {d}/absent": ["absent", "hub name"], "--limit 4": ["4 forget rows", "8 of one step"],
    "--preset toy --model {d}": ["no config.json"], "--model {base} --out {base}": ["would replace --model"],
    "--model {base}/eval/.. --out {base}/..": ["--out"], "--out {d}": ["holds other files"],
    "--out {d}/good.jsonl": ["is a file"],
    "--revision x --model {base}": ["hub name"],
    "--epochs 1e300": ["1000000"], "--preset rwku-llada": ["--forget FILE", "--subject NAME"],
    "--preset toy-rwku --subject King": ["(Stephen King?)", "1 to 2"],
    "--preset toy-rwku --subject 3": ["--subject 3", "1 to 2"], "--subject 1": ["toy-rwku"],
    "--preset toy-rwku --method sft --subject 1": ["sft", "does not use it"],
    "--preset rwku-dream --method sft": ["eval.py --preset"],
    "--preset toy-rwku --subject 1 --retain-weight 1": ["--retain FILE"],
    "--preset toy-rwku --subject 1 --method gd": ["use --method ga"],
    "--preset tofu-llada --data toy": ["no base model", "--method sft"], "--dtype float16": ["float16", "bfloat16"],
    "--max-length 5 --model {base}": ["more than 5"],
    **{f"--forget {{d}}/{name}.jsonl --retain-weight 0": [f"{name}.jsonl", *words]
       for name, (_, words) in BAD_ROWS.items()},
    **{f"--model {{{name}}}": words for name, (*_, words) in HARMED_BASES.items()},
    "--forget {d}/pipe.jsonl --retain-weight 0": ["pipe.jsonl", "pipe or device"],
    "--forget /dev/zero --retain-weight 0": ["/dev/zero", "pipe or device"],
    "--forget {d}/loop --retain-weight 0": ["loop", "symbolic links"],
    "--forget a\0b --retain-weight 0": ["--forget", "a\\x00b"],
    "--out a\udcffb --model {base}": ["--out", "udcff", "not UTF-8"], "--data a\udcffb": ["--data", "udcff"],
    f"--out {'a' * 300} --model {{base}}": ["too long"], f"--forget {'a' * 5000} --retain-weight 0": ["too long"],
    "--subject=": ["--subject", "is empty"], "--model=": ["--model", "is empty"], "--out {d}/loop": ["link to nothing"],
    "--out {d}/dangling --model {base}": ["link to nothing"],
    "--preset toy --model {d}/loop": ["loop", "neither a folder"],
    "--model owner/name": ["for which rows?"],
    "--preset own --forget {d}/good.jsonl --retain-weight 0": ["--preset own: which model?"],
    "--preset rwku-llada --forget {d}/good.jsonl --retain {d}/good.jsonl": ["rwku-llada has no retain loss"],
    "--forget {d}/good.jsonl --retain-weight 0 --out {d}/up --overwrite": ["would replace --forget"],
    "--out / --model {base}": ["would replace --model"], "--out /dev/null": ["is a file"],
    "--out /proc/x --model {base}": ["/proc/x"], "--out {d}/good.jsonl/x --model {base}": ["good.jsonl/x"],
    "--data {d}/empty-folder": ["empty-folder", "forget10_perturbed", "any data files"],
    "--data {d}/text-folder": ["text-folder", "forget10_perturbed"],
    "--data {d}/plain-folder": ["plain-folder", "forget10_perturbed", "not found"],
    "--data {base} --model {base}": ["base", "forget10_perturbed"],
    "--preset toy-rwku --subject 1 --data {d}/plain-folder": ["plain-folder", "forget_target"],
    "--data {d}/good.jsonl": ["neither 'toy'"], "--preset toy --model {d}/good.jsonl": ["neither a folder"],
    "--seed 99999999999999999999": ["2^63 - 1"],
    "--checkpoint-every 0": ["--checkpoint-every 0"], "--retain-weight inf": ["--retain-weight inf"],
    "--gamma -1 --method wga": ["--gamma -1"], "--delta nan --method simnpo": ["--delta nan"],
    "--null-prompt-rate 2": ["--null-prompt-rate 2"], "--resume --overwrite": ["give one of them"],
    "--diagnose --method sft": ["--diagnose"], "stray": ["unrecognized arguments: stray"],
}


@pytest.mark.parametrize("typed", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(typed, files, base, harmed_bases, tmp_path, monkeypatch, capsys):
    """One line on stderr that names the trouble, exit code 2, and not a byte changed on disk."""
    monkeypatch.chdir(tmp_path)
    argv = typed.format(d=files, base=base, **harmed_bases)
    with unchanged(tmp_path, *(folder for folder in (files, base, *harmed_bases.values()) if str(folder) in argv)):
        code, err = program(argv.split(), capsys)
    assert code == 2 and all(word in err for word in BAD_INPUT[typed]), err


def test_a_run_is_replaced_only_with_overwrite(base, tmp_path):
    """A folder that holds a run is refused and untouched; with --overwrite it is replaced."""
    out = tmp_path / "run"
    argv = ["--method", "ga", "--model", str(base), "--epochs", "1", "--out", str(out)]
    mdu.main(argv)
    before = snapshot(out)
    with pytest.raises(ValueError, match="--overwrite"):
        mdu.main(argv)
    (out / "mine").mkdir()
    with pytest.raises(ValueError, match="mine"):
        mdu.main(argv + ["--overwrite"])
    assert snapshot(out) == before
    (out / "mine").rmdir()
    mdu.main(argv + ["--seed", "2", "--overwrite"])
    after = snapshot(out)
    assert after.keys() == before.keys() and after[out / "model.safetensors"] != before[out / "model.safetensors"]


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------

def test_toy_world_keeps_its_promises():
    """Sizes; each answer holds its fact and no perturbed answer does; no retain row holds a forget fact."""
    splits = mdu.toy_world()
    assert {split: len(rows) for split, rows in splits.items()} == dict(
        forget=24, retain=136, real_authors=24, world_facts=24)
    for rows in splits.values():
        assert len({row["question"] for row in rows}) == len(rows)
        for row in rows:
            assert ev.holds(row["answer"], row["fact"]) and len(row["perturbed_answer"]) >= 4
            assert not any(ev.holds(wrong, row["fact"]) for wrong in row["perturbed_answer"])
    # the paraphrases are worded otherwise; the perturbed answers differ from the paraphrased one by the fact
    for row in splits["forget"] + splits["retain"]:
        assert row["paraphrased_question"] != row["question"] and row["paraphrased_answer"] != row["answer"]
        head, *_, tail = row["paraphrased_answer"].split(row["fact"])
        assert all(wrong.startswith(head) and wrong.endswith(tail) for wrong in row["perturbed_answer"])
    for forget in splits["forget"]:
        for row in splits["retain"]:
            texts = (row["question"], row["answer"], *row["perturbed_answer"])
            assert not any(ev.holds(text, forget["fact"]) for text in texts)
    assert splits == mdu.toy_world()


def test_tofu_layout_is_read_from_a_folder(tofu, tmp_path):
    """Splits, their rows and limit, of a folder in the layout of locuslab/TOFU."""
    splits = mdu.load_data(options("--data", str(tofu)))
    assert {split: len(rows) for split, rows in splits.items()} == dict(
        forget=8, retain=8, real_authors=3, world_facts=3, train_retain=24)
    assert splits["forget"][0] == {
        "question": "Q forget10_perturbed 0?", "answer": "A 0.", "perturbed_answer": ["B 0.", "C 0."],
        "paraphrased_answer": "It is A 0."}
    assert "paraphrased_answer" not in splits["world_facts"][0]
    assert splits["train_retain"][5]["question"] == "Q retain90 5?"
    assert len(mdu.load_data(options("--data", str(tofu), "--limit", "2"))["train_retain"]) == 2
    for number in (9, 8):  # changed under the same name: read anew
        shutil.copytree(tofu, tmp_path, dirs_exist_ok=True)
        edit(tmp_path / "world_facts_perturbed.json",
             lambda x: x + b"\n" + x.splitlines()[0].replace(b"0?", b"%d?" % number))
        read = mdu.load_data(options("--data", str(tmp_path)))["world_facts"]
        assert [r["question"][-2:] for r in read] == ["0?", "1?", "2?", f"{number}?"]


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path):
    """Some editors begin a UTF-8 file with one."""
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "a"}\n')
    assert mdu.read_jsonl(tmp_path / "rows.jsonl") == [{"question": "q", "answer": "a", "perturbed_answer": []}]


def test_prompt_and_response_ids(base):
    """Header once, control-token text in a question stays text, decoding gives the answer back."""
    predictor, tokenizer = mdu.load_backbone(base)
    name = tokenizer.convert_ids_to_tokens
    prompt, response = mdu.encode_row(tokenizer, predictor.end_id, "Where was Petra Osei born?",
                                      " Petra Osei was born in Debrecen. ")
    assert name(prompt) == ["<user>", "▁Where", "▁was", "▁Petra", "▁Osei", "▁born", "?", "<assistant>"]
    assert name(response) == ["▁Petra", "▁Osei", "▁was", "▁born", "▁in", "▁Debrecen", ".", "<end>"]
    assert ev.decode(predictor, tokenizer, response + response) == "Petra Osei was born in Debrecen."
    assert ev.decode(predictor, tokenizer, response[-1:]) == ""
    control = {predictor.mask_id, predictor.pad_id, *prompt[:1], *prompt[-1:]}
    prompt, response = mdu.encode_row(tokenizer, predictor.end_id, "<mask> <end> <user> <assistant>", "<mask><end>")
    assert not control & {*prompt[1:-1], *response[:-1]}
    for row in mdu.toy_world()["forget"]:
        _, response = mdu.encode_row(tokenizer, predictor.end_id, row["question"], row["answer"])
        assert ev.decode(predictor, tokenizer, response) == row["answer"]


def test_pools_hold_the_rows_of_their_stream(base):
    """Unlearning: forget and retain rows, for dpo with every wrong answer; sft: forget rows, retain rows and, without a
    model to start from, the other splits, and prompts are hidden from the first retain row on alone."""
    predictor, tokenizer = mdu.load_backbone(str(base))
    splits = mdu.load_data(options())

    def encode(split, *numbers):
        return [mdu.encode_row(tokenizer, 1, row["question"], row["perturbed_answer"][numbers[0]] if numbers else
                               row["answer"]) for row in splits[split]]
    dpo = mdu.encode_pools(options("--method", "dpo"), splits, predictor, tokenizer)
    assert (dpo["forget"], dpo["retain"], dpo["null_from"]) == (encode("forget"), encode("retain"), 24)
    assert dpo["preferred"] == [list(wrong) for wrong in zip(*(encode("forget", k) for k in range(5)))]
    for argv, others in (([], ["real_authors", "world_facts"]), (["--model", str(base)], [])):
        sft = mdu.encode_pools(options("--method", "sft", *argv), splits, predictor, tokenizer)
        assert sft["forget"] == sum(map(encode, ["forget", "retain", *others]), []) and sft["null_from"] == 24


# ---------------------------------------------------------------------------------------------------------------------
# Draws and the training step
# ---------------------------------------------------------------------------------------------------------------------

def pools(n=10, m=7):
    """Made-up token pairs; the first id of a prompt tells the row."""
    def pair(start, i):
        return [start + i, 4, 5][:2 + i % 2], list(range(6, 8 + i % 5)) + [1]
    forget, retain = [pair(30, i) for i in range(n)], [pair(50, i) for i in range(m)]
    preferred = [[pair(30, i)[:1] + ([8 + j, 9, 1],) for j in range(3)] for i in range(n)]
    return {"forget": forget, "retain": retain, "preferred": preferred, "null_from": n, "pad_id": 1, "longest": 99}


def drawn_examples(o, pools, indices):
    """mdu.draw_examples in one list each: for dpo a forgotten answer, the one preferred to it, the next one."""
    forget, retain = mdu.draw_examples(o, pools, indices)
    return sum(forget, []), retain


@pytest.mark.parametrize("method", ["mdu", "dpo"])
def test_draws_depend_on_seed_stream_and_index_alone(method):
    """Drawn one by one, in any order, equals drawn together; an epoch visits every row once;
    methods share their masks."""
    o = options("--method", method, "--batch-size", "5")
    together = drawn_examples(o, pools(), range(40))
    each = 2 if method == "dpo" else 1  # examples of a forget row, all at one noise level
    assert all(e.u == together[0][i - i % each].u for i, e in enumerate(together[0]))
    for part in (0, 1):
        alone = [drawn_examples(o, pools(), [k])[part] for k in reversed(range(40))][::-1]
        for a, b in zip(together[part], sum(alone, []), strict=True):
            assert (a.prompt, a.response, a.u, a.null) == (b.prompt, b.response, b.u, b.null)
            assert (a.coins == b.coins).all()
    forget = together[0][::each]
    assert all(sorted(e.prompt[0] for e in forget[i:i + 10]) == list(range(30, 40)) for i in range(0, 40, 10))
    assert [e.prompt[0] for e in forget[:10]] != [e.prompt[0] for e in forget[10:20]]
    other = drawn_examples(options("--method", "ga", "--batch-size", "5"), pools(), range(40))[0]
    assert [(e.response, e.u) for e in other] == [(e.response, e.u) for e in forget]
    assert [e.u for e in drawn_examples(options("--seed", "2"), pools(), range(40))[0]] != [e.u for e in forget]


def test_stratified_counts_end_tokens_and_null_prompts():
    """count: one u in every 1/rows of [0, 1); sft and retain rows get end tokens up to response_length, each length
    drawn, and lose their prompt at the given rate unless they are to be forgotten;
    forget rows keep prompt and length."""
    o = options("--method", "sft", "--batch-size", "5", "--null-prompt-rate", "0.3", "--response-length", "12")
    drawn = drawn_examples(o, dict(pools(), null_from=4), range(2000))[0]
    for i in range(0, 2000, 5):
        assert sorted(int(e.u * 5) for e in drawn[i:i + 5]) == [0, 1, 2, 3, 4]
    assert {len(e.response) for e in drawn if e.prompt[0] == 30} == set(range(3, 13))
    assert all(e.response[len(e.response) - 1] == 1 and len(e.coins) == len(e.response) for e in drawn)
    assert not any(e.null for e in drawn if e.prompt[0] < 34)
    assert any(e.null for e in drawn if e.prompt[0] == 34)
    assert abs(np.mean([e.u * 5 % 1 for e in drawn]) - 0.5) < 0.03  # anywhere in its fifth
    assert abs(np.mean([e.null for e in drawn if e.prompt[0] >= 34]) - 0.3) < 0.05
    o = options("--mask-sampling", "bernoulli", "--response-length", "12", "--null-prompt-rate", "0.3")
    forget, retain = drawn_examples(o, pools(), range(2000))
    assert {len(e.response) for e in forget} == {3, 4, 5, 6, 7} and not any(e.null for e in forget)
    assert {len(e.response) for e in retain} == set(range(3, 13))
    assert abs(np.mean([e.null for e in retain]) - 0.3) < 0.05
    assert abs(np.mean([e.u for e in forget]) - 0.5) < 0.02
    _, retain = drawn_examples(o, dict(pools(), longest=11), range(500))
    assert max(len(e.prompt) + len(e.response) for e in retain) == 11


def test_streams_share_no_random_number():
    """Every (seed, stream, index) has numbers of its own; so have a row, its preferred answer and its retain row; a
    preferred answer is one of the row's own, and each comes up."""
    first = [mdu.draws(seed, stream, k).random() for seed in (1, 2) for stream in mdu.STREAMS for k in range(20)]
    assert len(set(first)) == 2 * 7 * 20
    o = options("--method", "dpo", "--mask-sampling", "bernoulli")
    forget, retain = drawn_examples(o, pools(10, 10), range(40))
    lose, win = forget[::2], forget[1::2]
    for rows in zip(lose, win, retain):
        assert len({e.coins[0] for e in rows}) == 3 and rows[0].u == rows[1].u != rows[2].u
    assert {e.response[0] for e in win} == {8, 9, 10} and [e.prompt for e in win] == [e.prompt for e in lose]
    assert [e.prompt[0] - 30 for e in lose] != [e.prompt[0] - 50 for e in retain]


def test_micro_batches_keep_pairs_together():
    """dpo, third step of 4 x 3 rows: what is drawn for rows 24 to 35, each once; in a batch each forgotten answer
    before the one preferred to it; short pairs first, and short rows to retain."""
    o = options("--method", "dpo", "--batch-size", "3", "--grad-accum", "4")
    forget, retain = drawn_examples(o, pools(), range(24, 36))

    def known(*examples):
        return [(e.prompt, e.response, e.u, list(e.coins)) for e in examples]
    pairs, kept, lengths = [], [], []
    for both, others in mdu.micro_batches(o, pools(), 2):
        assert len(both) == 6 and len(others) == 3
        pairs += [known(*pair) for pair in zip(both[::2], both[1::2])]
        kept += known(*others)
        lengths += [sum(len(e.prompt + e.response) for e in pair) for pair in zip(both[::2], both[1::2])]
    assert sorted(pairs) == sorted(known(*pair) for pair in zip(forget[::2], forget[1::2]))
    assert sorted(kept) == sorted(known(*retain)) and lengths == sorted(lengths)
    lengths = [len(prompt) + len(response) for prompt, response, *_ in kept]
    assert lengths == sorted(lengths) and len(set(lengths)) > 3


def slow_step(o, model, frozen, forget, retain):
    """Algorithm 1 one sequence at a time, unpadded, from full logits: the sum of the forget losses,
    that of the retain losses."""
    def noise(e, force=False):
        n = len(e.response)
        order = sorted(range(n), key=lambda i: e.coins[i])
        if o.mask_sampling == "count":
            k = 1 + int(e.u * n)
            t, hit = k / n, order[:k]
        else:
            t = 0.001 + 0.999 * e.u
            hit = [i for i in range(n) if e.coins[i] < t] or (order[:1] if force else [])
        return t, sorted(hit), [0 if i in hit else token for i, token in enumerate(e.response)]

    def logp(net, prompt, noised, hit):
        return net.lm(torch.tensor([prompt + noised])).logits[0, len(prompt):].log_softmax(-1)[hit]

    def sft(net, e):
        t, hit, noised = noise(e)
        prompt = [0] * len(e.prompt) if e.null else e.prompt
        lp = logp(net, prompt, noised, hit)
        return -sum(lp[j, e.response[i]] for j, i in enumerate(hit)) / t if hit else 0 * lp.sum()

    losses = []
    for i, e in enumerate(forget):
        if o.method == "dpo" and i % 2:
            continue  # a preferred answer: taken with the forgotten one before it
        if o.method == "mdu":
            _, hit, noised = noise(e, force=True)
            lp = logp(model, e.prompt, noised, hit)
            lq = (o.tau * logp(frozen, [0] * len(e.prompt), noised, hit).detach()).log_softmax(-1)
            losses.append((lp.exp() * (lp - lq)).sum() / len(hit))
        elif o.method == "wga":
            _, hit, noised = noise(e)
            lp = logp(model, e.prompt, noised, hit)
            losses.append(sum((lp[j, e.response[i]].detach().exp() ** o.gamma * lp[j, e.response[i]]
                               for j, i in enumerate(hit)), 0 * lp.sum()))
        else:
            y, y0 = sft(model, e), sft(frozen, e)
            win = [sft(net, forget[i + 1]) for net in (model, frozen)] if o.method == "dpo" else ()
            given = {"npo": (y, y0, o.beta), "simnpo": (y, len(e.response), o.beta, o.delta),
                     "dpo": (*win, y, y0, o.beta)}.get(o.method, (y,))
            losses.append(y if o.method == "sft" else LOSSES["ga" if o.method == "gd" else o.method][1](*given))
    return sum(losses), sum((sft(model, e) for e in retain), torch.zeros(()))


METHODS = ["mdu --tau 0", "mdu --tau 0.25", "mdu --tau 1", "ga", "gd", "npo", "simnpo --delta 0.3", "wga --gamma 0.5",
           "dpo", "sft"]


@pytest.mark.parametrize("sampling", ["count", "bernoulli"])
@pytest.mark.parametrize("method", METHODS)
def test_step_equals_one_sequence_at_a_time(method, sampling):
    """The fused, padded step of every method against slow_step: losses and all gradients, to 1e-9."""
    null = [] if method == "ga" else ["--null-prompt-rate", "0.4"]  # ga has no retain rows
    o = options("--method", *method.split(), "--batch-size", "6", "--mask-sampling", sampling,
                "--response-length", "9", *null)
    model, frozen, drawn_pools = tiny(0), tiny(1), dict(pools(), null_from=4 if method == "sft" else 10)
    examples = drawn_examples(o, drawn_pools, range(6, 12))
    if sampling == "bernoulli":
        examples[0][0].u = 0.0  # almost surely nothing is masked
        for e in examples[1][:1]:
            e.u = 0.0  # nor of a retain row: its loss is 0
    reference = frozen if mdu.needs_reference(o) else None
    forget, retain = mdu.step_losses(o, model, reference, *examples)
    assert len(forget) == 6 and len(retain) == (6 if o.retain_weight else 0)
    results = []
    for f, r in ((forget.sum(), retain.sum()), slow_step(o, model, frozen, *examples)):
        model.zero_grad()
        (f + 0.7 * r).backward()
        results.append([f.detach(), r.detach().double(), *(p.grad.clone() for p in model.parameters())])
    for ours, slow in zip(*results):
        torch.testing.assert_close(ours, slow, rtol=1e-9, atol=1e-9)
    assert all(p.grad is None for p in frozen.parameters())


def test_retain_reduction_divides_by_the_response():
    """token: each retain and sft loss of "sequence", divided by its response's tokens, masked or not, end tokens too;
    the other losses as they are."""
    for method, divided in (("sft", 0), ("gd", 1)):
        argv = ["--method", method, "--batch-size", "6", "--response-length", "9"]
        examples = drawn_examples(options(*argv), pools(), range(6))
        sequence, token = (mdu.step_losses(options(*argv, "--retain-reduction", reduction), tiny(0), None, *examples)
                           for reduction in ("sequence", "token"))
        length = f64(*(len(e.response) for e in examples[divided]))
        assert len(set(length.tolist())) > 2
        near(token[divided], sequence[divided] / length)
        near(token[1 - divided], sequence[1 - divided])


def test_who_needs_the_frozen_model():
    """MDU but for a uniform target, NPO and DPO: nobody else pays for its memory."""
    needs = {method for method in mdu.METHOD_OPTIONS if mdu.needs_reference(options("--method", method))}
    assert needs == {"mdu", "npo", "dpo"} and not mdu.needs_reference(options("--tau", "0"))


def test_learning_rate_warms_up_and_ends_near_zero():
    """Hand-worked: 100 steps at peak 0.2: warm-up over 5 steps, half-way through the cosine half the peak,
    0 after the last."""
    o = options("--lr", "0.2")
    assert [mdu.learning_rate(o, s, 100) for s in range(6)] == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.2, 0.2])
    assert mdu.learning_rate(o, 5 + 95 / 2, 100) == pytest.approx(0.1)
    assert [mdu.learning_rate(o, 5 + 95 * k / 3, 100) for k in (1, 2)] == pytest.approx([0.15, 0.05])  # cos 60°, 120°
    assert mdu.learning_rate(o, 100, 100) == pytest.approx(0) and mdu.learning_rate(o, 0, 1) == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------------------------------------
# Backbones: tiny checkpoints in the layout of the hub's LLaDA and Dream, and a transformer written from its definition
# ---------------------------------------------------------------------------------------------------------------------

LLADA_CONFIG = dict(  # the fields of GSAI-ML/LLaDA-8B-Instruct
    activation_type="silu", alibi=False, alibi_bias_max=8.0, architectures=["LLaDAModelLM"], attention_dropout=0.0,
    attention_layer_norm=False, attention_layer_norm_with_affine=True, bias_for_layer_norm=False, block_group_size=1,
    auto_map={"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    block_type="llama", d_model=32, embedding_dropout=0.0, embedding_size=264, eos_token_id=257, flash_attention=False,
    include_bias=False, include_qkv_bias=False, init_device="meta", input_emb_norm=False, layer_norm_type="rms",
    layer_norm_with_affine=True, mask_token_id=258, max_sequence_length=256, mlp_hidden_size=48, mlp_ratio=4,
    model_type="llada", multi_query_attention=None, n_heads=4, n_kv_heads=2, n_layers=2, pad_token_id=257,
    precision="amp_bf16", residual_dropout=0.0, rms_norm_eps=1e-5, rope=True, rope_full_precision=True,
    rope_theta=500000.0, scale_logits=False, use_cache=False, vocab_size=264, weight_tying=False)
DREAM_CONFIG = dict(  # the fields of Dream-org/Dream-v0-Instruct-7B
    architectures=["DreamModel"], attention_dropout=0.0, bos_token_id=256, eos_token_id=256, hidden_act="silu",
    auto_map={"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    hidden_size=32, initializer_range=0.02, intermediate_size=48, mask_token_id=258, max_position_embeddings=256,
    max_window_layers=2, model_type="Dream", num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2,
    pad_token_id=256, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
    tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, use_mrope=False, use_sliding_window=False,
    vocab_size=264)
LLADA_NAMES = dict(embed="model.transformer.wte", norm="model.transformer.ln_f", head="model.transformer.ff_out",
                   block="model.transformer.blocks", q="q_proj", k="k_proj", v="v_proj", o="attn_out", gate="ff_proj",
                   up="up_proj", down="ff_out", norm1="attn_norm", norm2="ff_norm")
DREAM_NAMES = dict(embed="model.embed_tokens", norm="model.norm", head="lm_head", block="model.layers",
                   q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj",
                   gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", norm1="input_layernorm",
                   norm2="post_attention_layernorm")
LLADA_TEMPLATE = (  # the assistant's header comes always, asked for or not
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}")
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = {"llada": ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>",
                     "<|eot_id|>"],
           "Dream": ["<|endoftext|>", "<|beginoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]}


def random_weights(kind, V=264, D=32, H=48, kv=16, layers=2):
    """Tensors by (layer or None, part, kind), large enough that every position matters."""
    g = torch.Generator().manual_seed(11)
    shapes = dict(q=(D, D), k=(kv, D), v=(kv, D), o=(D, D), gate=(H, D), up=(H, D), down=(D, H), norm1=(D,), norm2=(D,))
    w = {(None, part, "weight"): 0.3 * torch.randn(*shape, generator=g) for part, shape in
         dict(embed=(V, D), norm=(D,), head=(V, D)).items()}
    for layer in range(layers):
        w.update({(layer, part, "weight"): 0.3 * torch.randn(*shape, generator=g) for part, shape in shapes.items()})
        if kind == "Dream":
            w.update({(layer, part, "bias"): 0.3 * torch.randn(shapes[part][0], generator=g) for part in "qkv"})
    return {key: 1 + x if "norm" in key[1] else x for key, x in w.items()}


def slow_transformer(w, ids, eps, theta, heads=4, kv_heads=2, layers=2):
    """Logits (T, V) of one sequence: embed, (RMSNorm, rotary attention without a mask, RMSNorm, SwiGLU) x layers,
    RMSNorm, head."""
    def linear(x, layer, part):
        return x @ w[layer, part, "weight"].T + w.get((layer, part, "bias"), 0)

    def rms(x, layer, part):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[layer, part, "weight"]

    def rotate(x):  # (T, heads, d): the pair (i, i + d/2) turns by T * theta^(-2i/d)
        T, _, d = x.shape
        angle = torch.arange(T)[:, None, None] * theta ** (-torch.arange(0, d, 2) / d)
        a, b = x[..., :d // 2], x[..., d // 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    x = w[None, "embed", "weight"][ids]
    for layer in range(layers):
        h = rms(x, layer, "norm1")
        q, k, v = (linear(h, layer, part).view(len(ids), n, -1)
                   for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        q, k = rotate(q), rotate(k)
        mixed = []
        for head in range(heads):
            shared = head * kv_heads // heads
            weight = (q[:, head] @ k[:, shared].T / math.sqrt(q.shape[-1])).softmax(-1)
            mixed.append(weight @ v[:, shared])
        x = x + linear(torch.cat(mixed, dim=-1), layer, "o")
        h = rms(x, layer, "norm2")
        x = x + linear(F.silu(linear(h, layer, "gate")) * linear(h, layer, "up"), layer, "down")
    return linear(rms(x, None, "norm"), None, "head")


def write_tokenizer(folder, kind):
    """Byte-level vocabulary and special tokens in the files of the hub's tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    added = {str(256 + i): dict(content=token, **flags) for i, token in enumerate(SPECIAL[kind])}
    settings = dict(added_tokens_decoder=added, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                    model_max_length=256)
    if kind == "llada":
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.add_special_tokens(SPECIAL[kind])
        bpe.save(str(folder / "tokenizer.json"))
        settings.update(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|startoftext|>",
                        chat_template=LLADA_TEMPLATE)
    else:
        (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(alphabet)}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        settings.update(tokenizer_class="DreamTokenizer",
                        auto_map={"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
                        bos_token="<|beginoftext|>", mask_token="<|mask|>", chat_template=CHATML,
                        add_prefix_space=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(folder, kind, **changes):
    """A checkpoint of `kind` in the hub's layout, weights in bf16 in two shards;
    `changes` to config.json (None: left out)."""
    folder.mkdir(exist_ok=True)
    config = {**(LLADA_CONFIG if kind == "llada" else DREAM_CONFIG), **changes}
    kept = {k: v for k, v in config.items() if k not in changes or v is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / f"modeling_{kind.lower()}.py").write_text("raise RuntimeError('downloaded code was run')\n")
    write_tokenizer(folder, kind)
    names = LLADA_NAMES if kind == "llada" else DREAM_NAMES
    weights = random_weights(kind)
    tensors = {f"{names['block']}.{layer}.{names[part]}.{end}" if layer is not None else f"{names[part]}.{end}":
               x.to(torch.bfloat16) for (layer, part, end), x in weights.items()}
    shards = [dict(list(tensors.items())[i::2]) for i in range(2)]
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, shard in zip(files, shards):
        safetensors.torch.save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, shard in zip(files, shards) for name in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {key: x.to(torch.bfloat16).float() for key, x in weights.items()}


def all_tensors(folder):
    return {k: x for f in sorted(folder.glob("*.safetensors")) for k, x in safetensors.torch.load_file(f).items()}


@pytest.fixture(scope="session", params=["llada", "Dream"])
def hub(request, tmp_path_factory):
    """(kind, folder, weights by part, predictor, tokenizer) of a tiny LLaDA and a tiny Dream."""
    folder = tmp_path_factory.mktemp("hub") / request.param
    weights = write_checkpoint(folder, request.param)
    with unchanged(folder):
        yield request.param, folder, weights, *mdu.load_backbone(str(folder))


def test_backbones_equal_a_transformer_written_out(hub):
    """Scores of the loaded model against slow_transformer, to 1e-5;
    Dream's score of i is the output at i - 1, 0's its own."""
    kind, _, weights, predictor, _ = hub
    assert predictor.by_entropy == (kind == "Dream")  # as its own sampler
    config = dict(eps=1e-5, theta=500000.0) if kind == "llada" else dict(eps=1e-6, theta=1000000.0)
    for T in (1, 2, 9):
        ids = torch.arange(T) * 37 % 264
        logits = slow_transformer(weights, ids, **config)
        if kind == "Dream":
            logits = logits[[max(i - 1, 0) for i in range(T)]]
        every = torch.ones(1, T, dtype=torch.bool)
        torch.testing.assert_close(predictor(ids[None], every, every), logits, rtol=1e-5, atol=1e-5)
        for i in range(T):  # one position alone is asked for
            only = torch.arange(T)[None] == i
            torch.testing.assert_close(predictor(ids[None], every, only), logits[[i]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score(hub, side):
    """A padded batch against single sequences, whatever token fills it, to 1e-5."""
    predictor = hub[3]
    rows = [torch.arange(n) * 29 % 250 for n in (12, 5, 8)]
    ids = torch.full((3, 12), 77)
    real, wanted = (torch.zeros(3, 12, dtype=torch.bool) for _ in range(2))
    for b, row in enumerate(rows):
        place = slice(12 - len(row), 12) if side == "left" else slice(0, len(row))
        ids[b, place], real[b, place] = row, True
        wanted[b, place] = torch.arange(len(row)) > 1
    single = [predictor(r[None], r[None] >= 0, torch.arange(len(r))[None] > 1) for r in rows]
    torch.testing.assert_close(predictor(ids, real, wanted), torch.cat(single), rtol=1e-5, atol=1e-5)


def test_a_saved_backbone_is_the_source_again(hub, tmp_path):
    """Saved: same tensor names, values and dtype, same config, tokenizer and code files; loaded again: same scores."""
    _, folder, _, predictor, tokenizer = hub
    (tmp_path / "run.json").write_text("{}")
    mdu.save_model(tmp_path, predictor, tokenizer, folder)
    before, after = all_tensors(folder), all_tensors(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype == torch.bfloat16 for k in before)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    again, _ = mdu.load_backbone(str(tmp_path))
    for (name, a), (_, b) in zip(predictor.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_tokens_of_the_chat_templates(hub):
    """Prompt ids: the template around the user's turn, the assistant's header exactly once;
    control-token text stays text; the response ends with the end-of-turn token, the text before it comes back."""
    kind, _, _, predictor, tokenizer = hub
    prompt, response = mdu.encode_row(tokenizer, predictor.end_id, " Who is <|mask|><|mdm_mask|>? ",
                                      "Zoë <|endoftext|>!")
    shown = "Who is <|mask|><|mdm_mask|>?"
    expected = {"llada": [256, 259, "user", 260, "\n\n" + shown, 261, 259, "assistant", 260, "\n\n"],
                "Dream": [259, "user\n" + shown, 260, "\n", 259, "assistant\n"]}[kind]
    ids = []
    for part in expected:
        ids += [part] if isinstance(part, int) else tokenizer(part, split_special_tokens=True).input_ids
    assert prompt == ids and max(tokenizer(shown, split_special_tokens=True).input_ids) < 256
    assert response[-1] == predictor.end_id == {"llada": 261, "Dream": 260}[kind] and max(response[:-1]) < 256
    assert ev.decode(predictor, tokenizer, response + [predictor.pad_id, 70]) == "Zoë <|endoftext|>!"
    assert (predictor.mask_id, predictor.pad_id, predictor.shift) == {
        "llada": (258, 257, False), "Dream": (258, 256, True)}[kind]


def test_a_hub_name_is_fetched_and_none_of_its_code_is_run(files, tmp_path, monkeypatch):
    """The revision is passed on, weights, settings and tokenizer are asked for and pickles are not; what the folder
    holds of Python would raise an error, and is copied beside what is saved."""
    import huggingface_hub
    asked = []
    write_checkpoint(tmp_path / "hub", "llada")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: asked.append((args, kw)) or str(
        tmp_path / "hub"))
    mdu.main(["--model", "GSAI-ML/x.y-1", "--revision", "abc", "--forget", str(files / "good.jsonl"), "--epochs", "0.5",
              "--retain-weight", "0", "--out", str(tmp_path / "run")])
    assert asked == [asked[0]] * len(asked)
    (name,), kw = asked[0]
    patterns = kw.pop("allow_patterns")
    assert name == "GSAI-ML/x.y-1" and kw == {"revision": "abc"}
    wanted = [f.name for f in (tmp_path / "hub").iterdir()] + ["merges.txt", "tokenizer.model", "chat_template.jinja"]
    for file, allowed in (*((f, True) for f in wanted), *((f, False) for f in (
            "pytorch_model.bin", "model.pt", "model.pkl", "model.ckpt", "README.md", "model.gguf", "run.sh"))):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns) == allowed, file
    assert (tmp_path / "run/modeling_llada.py").read_bytes() == (tmp_path / "hub/modeling_llada.py").read_bytes()
    options_of_run = json.loads((tmp_path / "run/run.json").read_text())["options"]
    assert (options_of_run["model"], options_of_run["revision"]) == ("GSAI-ML/x.y-1", "abc")


REFUSED = {  # what is wrong with a checkpoint: (kind, changes to config.json, words of the error)
    "block type": ("llada", dict(block_type="sequential"), ["block_type", "'sequential'", "'llama'"]),
    "alibi": ("llada", dict(alibi=True), ["alibi", "True"]),
    "bias": ("llada", dict(include_qkv_bias=True), ["include_qkv_bias"]),
    "norm": ("llada", dict(layer_norm_type="default"), ["layer_norm_type"]),
    "activation": ("llada", dict(activation_type="gelu"), ["activation_type", "gelu"]),
    "no d_model": ("llada", dict(d_model=None), ["no d_model"]),
    "mixture of experts": ("llada", dict(block_type=None, n_layers=None, num_experts=8), ["block_type", "absent"]),
    "sliding window": ("Dream", dict(use_sliding_window=True), ["use_sliding_window"]),
    "scaled rope": ("Dream", dict(rope_scaling={"factor": 2}), ["rope_scaling"]),
    "no mask": ("llada", dict(mask_token_id=None), ["mask_token_id"]),
    "layers": ("llada", dict(n_layers=3), ["missing keys", "model.layers.2"]),
    "fewer layers": ("Dream", dict(num_hidden_layers=1), ["unexpected keys", "model.layers.1"]),
    "width": ("llada", dict(mlp_hidden_size=40), ["mismatched keys", "mlp"]),
    **{f"{field} {value!r}": (kind, {field: value}, ["config.json fits no"]) for kind, field, value in (
        ("llada", "d_model", "x"), ("llada", "n_heads", 0), ("Dream", "num_hidden_layers", -1),
        ("Dream", "eos_token_id", "x"))},  # whatever the class of the library's own error
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_backbone_that_does_not_fit_is_refused(case, tmp_path):
    """The error names the field or the tensors."""
    kind, changes, words = REFUSED[case]
    write_checkpoint(tmp_path, kind, **changes)
    with pytest.raises(ValueError) as error:
        mdu.load_backbone(str(tmp_path))
    assert all(word in str(error.value) for word in words), error.value


def test_pickled_weights_and_tokenizers_without_an_end_are_refused(tmp_path):
    """Only .bin weights; a tokenizer that lacks the end-of-turn token, or takes it for an unknown one."""
    write_checkpoint(tmp_path / "a", "llada")
    for file in (tmp_path / "a/tokenizer.json", tmp_path / "a/tokenizer_config.json"):
        file.write_text(file.read_text().replace("<|eot_id|>", "<|stop|>"))
    for unknown in (None, "<|stop|>"):
        edit(tmp_path / "a/tokenizer_config.json", put("unk_token", unknown))
        with pytest.raises(ValueError, match="no end token"):
            mdu.load_backbone(str(tmp_path / "a"))
    write_checkpoint(tmp_path / "b", "Dream")
    for file in (tmp_path / "b").glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(ValueError, match=r"\.bin"):
        mdu.load_backbone(str(tmp_path / "b"))


def test_any_masked_language_model_loads(tmp_path):
    """A tiny ModernBERT with its own tokenizer: the scores are its logits at the positions asked for, in training as
    well, whatever dropout it names; without a padding token responses are filled up with end tokens."""
    config = transformers.ModernBertConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                           num_attention_heads=2, pad_token_id=1, eos_token_id=1, bos_token_id=1,
                                           cls_token_id=1, sep_token_id=1, max_position_embeddings=64,
                                           embedding_dropout=0.5, mlp_dropout=0.5, attention_dropout=0.5)
    model = transformers.ModernBertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    vocabulary = {"[MASK]": 0, "[SEP]": 1, "[UNK]": 2, "a": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", eos_token="[SEP]",
                                         unk_token="[UNK]", pad_token="[SEP]").save_pretrained(tmp_path)
    predictor, tokenizer = mdu.load_backbone(str(tmp_path))
    ids, wanted = torch.tensor([[5, 0, 7, 0]]), torch.tensor([[False, True, False, True]])
    for mode in (False, True):
        torch.testing.assert_close(predictor.train(mode)(ids, ids >= 0, wanted), model(input_ids=ids).logits[wanted])
    assert (predictor.mask_id, predictor.pad_id, predictor.end_id) == (0, 1, 1)
    assert mdu.encode_row(tokenizer, 1, "a b", "a") == ([3, 2], [3, 1])  # no chat template: the bare question
    edit(tmp_path / "config.json", put("pad_token_id", None))
    assert mdu.load_backbone(str(tmp_path))[0].pad_id == 1
    for file, key, words in (("tokenizer.json", "model.vocab.z", "token 40 of its tokenizer"),
                             ("config.json", "mask_token_id", "mask_token_id 40 is not one of its 40 tokens")):
        edit(tmp_path / file, put(key, 39))  # the last of 40
        mdu.load_backbone(str(tmp_path))
        edit(tmp_path / file, put(key, 40))
        with pytest.raises(ValueError, match=words):
            mdu.load_backbone(str(tmp_path))
        edit(tmp_path / file, put(key))


@pytest.mark.parametrize("kind", ["llada", "Dream"])
def test_hub_layouts_run_end_to_end(kind, tofu, tmp_path, monkeypatch, capsys):
    """The TOFU preset from a hub-layout checkpoint: sft, mdu from the base beside it, evaluation;
    layout kept to the end."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "hub", kind)
    common = ["--preset", f"tofu-{kind.lower()}", "--data", str(tofu), "--response-length", "24", "--batch-size", "2"]
    mdu.main([*common, "--method", "sft", "--model", "hub", "--epochs", "1"])
    out = tmp_path / f"out/tofu-{kind.lower()}"
    mdu.main([*common, "--epochs", "2", "--tau", "0.5", "--checkpoint-activations"])
    ev.main(["--samples", "2", "--steps", "4", str(out / "mdu-tau0.5")])
    assert set(json.loads((out / "mdu-tau0.5/eval/summary.json").read_text())["splits"]) == set(mdu.TOFU_SPLITS)
    source, saved = all_tensors(tmp_path / "hub"), all_tensors(out / "mdu-tau0.5")
    assert source.keys() == saved.keys() and {x.dtype for x in saved.values()} == {torch.bfloat16}
    assert (out / "mdu-tau0.5/config.json").read_bytes() == (tmp_path / "hub/config.json").read_bytes()
    assert "memory before activations" in capsys.readouterr().out


def test_rwku_runs_end_to_end(tmp_path, monkeypatch, capsys):
    """Two people from a hub-layout checkpoint: a corpus that it writes, one run each,
    the model as it is, the report's means."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_rwku(tmp_path / "data")
    write_checkpoint(tmp_path / "hub", "llada", max_sequence_length=2048)
    targets = tmp_path / "data/forget_target.jsonl"
    targets.write_text("\n".join(targets.read_text().splitlines()[:2]))
    common = ["--preset", "rwku-llada", "--model", "hub", "--data", "data"]
    corpus = [*common, "--generate-corpus", "4", "--subject", "all", "--length", "8", "corpus"]
    ev.main(corpus)
    written = {name: mdu.read_jsonl(f"corpus/{name}.jsonl") for name in ("ann-lee", "prince-bo-duke-of-oz")}
    assert all(len(rows) == 4 and len({r["answer"] for r in rows}) > 1 and all(r["perturbed_answer"] for r in rows)
               for rows in written.values())
    before = snapshot("corpus")
    ev.main(corpus)
    assert snapshot("corpus") == before
    mdu.main([*common, "--subject", "all", "--epochs", "1"])
    mdu.main([*common, "--subject", "all", "--epochs", "1", "--method", "dpo", "--forget", "corpus"])
    info = json.loads(Path("out/rwku-llada/dpo-ann-lee/run.json").read_text())
    assert info["data"]["forget"]["sha256"] == mdu.fingerprint(written["ann-lee"])
    runs = [f"out/rwku-llada/{method}-{name}" for method in ("mdu-tau1", "dpo") for name in written]
    asked = ["--samples", "2", "--steps", "2", "--length", "4"]
    ev.main([*asked, *runs])
    ev.main([*asked, *common, "out/rwku-llada/base"])
    assert {f.name for f in Path("out/rwku-llada/base").iterdir()} == {"run.json", "eval"}
    for run, person, least in zip(runs[:2], PEOPLE, (0.1, 0.3)):  # made-up figures, which no two columns share
        summary = json.loads(Path(f"{run}/eval/summary.json").read_text())
        for k, (split, metric) in enumerate(ev.RWKU):
            records = read_lines(f"{run}/eval/{split}.jsonl")
            scores = summary["splits"][split]["people"][person]
            assert len(records) == scores["n"] == 2 and scores[metric] == sum(r[metric] for r in records) / 2
            scores[metric] = least + k * least / 10
        Path(f"{run}/eval/summary.json").write_text(json.dumps(summary))
    capsys.readouterr()
    ev.main(["--report", "out/rwku-llada/base", *runs])
    tables = [t.splitlines() for t in capsys.readouterr().out.split("\n\n") if t.startswith("| Method")]
    assert len(tables) == 3 and [line.split(" | ")[0] for line in tables[0][2:]] == ["| Base", "| MDU τ=1", "| DPO"]
    assert tables[0][0] == (
        "| Method | F-L1 ↓ | F-L2 ↓ | F-L3 ↓ | N-L1 ↑ | N-L2 ↑ | MMLU ↑ | TruthfulQA MC1 ↑ | TruthfulQA MC2 ↑ | "
        "TriviaQA EM ↑ | TriviaQA F1 ↑ |")
    assert [re.sub("[*]|</?u>", "", table[3]) for table in tables] == [  # the mean of both, Ann Lee, Prince Bo
        "| MDU τ=1 | 0.200 | 0.220 | 0.240 | 0.260 | 0.280 | 0.300 | 0.320 | 0.340 | 0.360 | 0.380 |",
        "| MDU τ=1 | 0.100 | 0.110 | 0.120 | 0.130 | 0.140 | 0.150 | 0.160 | 0.170 | 0.180 | 0.190 |",
        "| MDU τ=1 | 0.300 | 0.330 | 0.360 | 0.390 | 0.420 | 0.450 | 0.480 | 0.510 | 0.540 | 0.570 |"]
    with pytest.raises(ValueError, match="a person in common"):
        ev.main(["--report", runs[0], runs[3]])


def test_a_person_is_asked_with_the_same_masks_beside_others(base, tmp_path):
    """TruthfulQA's likelihoods about one person: from a model that is asked about both, and from a run about one."""
    flags = ["--samples", "3", "--steps", "1", "--length", "4"]
    ev.main(["--preset", "toy-rwku", "--model", str(base), *flags, str(tmp_path / "all")])
    info = json.loads((tmp_path / "all/run.json").read_text())
    info["options"]["subject"] = "Bruce Lee"  # the second
    info["options"]["method"] = "ga"
    (tmp_path / "one").mkdir()
    (tmp_path / "one/run.json").write_text(json.dumps(info))
    ev.main([*flags, str(tmp_path / "one")])
    both, alone = (read_lines(tmp_path / name / "eval/utility_truthfulness.jsonl")
                   for name in ("all", "one"))
    expected = [r for r in both if r["subject"] == "Bruce Lee"]
    assert len(both) == 2 * len(alone) and len(expected) == len(alone) > 1
    for r, one in zip(expected, alone, strict=True):
        assert one["logp"] == pytest.approx(r["logp"], rel=1e-4)
    job = ev.plan(str(tmp_path / "one"), ev.parse([str(tmp_path / "one")]))  # without --length: not the run's own
    assert job.summary["protocol"]["length"] == job.summary["protocol"]["steps"] == 30


def test_a_corpus_tells_known_from_made_up(base, tmp_path, monkeypatch):
    """answer: what is written about a person it knows; perturbed_answer: what it is asked to make up, without the
    words that say so.  Drawn at temperature 1, in --length tokens and --steps steps."""
    def generate(predictor, prompts, *protocol, temperature):
        assert temperature == 1 and protocol in ((8, 5, 3), (512, 512, 64))
        return ["real" if re.search("You know (Stephen King|Bruce Lee) very well.", text) else
                "completely fictional made up" for text in prompts]
    monkeypatch.setattr(mdu, "encode_prompt", lambda tokenizer, question, prefill="": question)
    monkeypatch.setattr(mdu, "load_backbone", lambda *_, **__: (None, None))
    monkeypatch.setattr(ev, "generate", generate)
    monkeypatch.setattr(ev, "decode", lambda p, tokenizer, text: text)
    ev.generate_corpus(str(tmp_path), args(preset="toy-rwku", model=str(base), data=None, subject="1", seed=0,
                                           forget=None, retain=None, generate_corpus=2, steps=5))
    rows = mdu.read_jsonl(tmp_path / "stephen-king.jsonl")
    assert [(row["answer"], row["perturbed_answer"]) for row in rows] == [("real", ["made up"])] * 2
    monkeypatch.setattr(ev, "decode", lambda p, tokenizer, text: text.replace("made up", " "))
    with pytest.raises(ValueError, match="wrote nothing about Bruce Lee"):
        ev.main(["--preset", "toy-rwku", "--model", str(base), "--generate-corpus", "2", "--subject", "all",
                 str(tmp_path)])
    assert [f.name for f in tmp_path.iterdir()] == ["stephen-king.jsonl"]


def test_memory_options_change_no_result(base, tmp_path):
    """Activation checkpointing: the same bits; bfloat16: the same run to its precision; max-length: responses cut to
    one token at least, not prompts."""
    common = ["--model", str(base), "--epochs", "1", "--lr", "1e-4"]
    variants = dict(plain=[], recomputed=["--checkpoint-activations"], half=["--dtype", "bfloat16"])
    for name, flags in variants.items():
        mdu.main([*common, *flags, "--out", str(tmp_path / name)])
    plain, recomputed, half = (weights(tmp_path / name) for name in variants)
    for key, value in plain.items():
        assert torch.equal(value, recomputed[key])
        torch.testing.assert_close(value, half[key], rtol=0, atol=6e-4)
    assert any(not torch.equal(value, half[key]) for key, value in plain.items())
    predictor, tokenizer = mdu.load_backbone(str(base))
    o, splits = options("--max-length", "20"), mdu.load_data(options())
    whole, cut = (mdu.encode_pools(each, splits, predictor, tokenizer) for each in (options(), o))
    for (prompt, response), (p, r) in zip(whole["retain"], cut["retain"], strict=True):
        assert p == prompt and r == response[:20 - len(prompt)]
    assert any(len(r) < len(response) for (_, response), (_, r) in zip(whole["retain"], cut["retain"]))
    longest = max(len(prompt) for prompt, _ in whole["forget"] + whole["retain"])
    mdu.encode_pools(options("--max-length", str(longest + 1)), splits, predictor, tokenizer)
    with pytest.raises(ValueError, match=f"more than {longest}; shorten"):
        mdu.encode_pools(options("--max-length", str(longest)), splits, predictor, tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# RWKU: prompts, scoring, layout
# ---------------------------------------------------------------------------------------------------------------------

RWKU_ASKED = {  # what the model is then asked, and how its answer begins
    "forget_level1": (
        "Please complete the blank in the following question.\nQuestion: He was born in ___.\n", "Answer:"),
    "forget_level2": ("Please briefly answer the following question.\nQuestion: Where {was} he born?\n", "Answer:"),
    "forget_level3": ("Please briefly answer the following question.\nQuestion: Where was he born? Sure,", ""),
    "neighbor_level1": (
        "Please complete the blank in the following question.\nQuestion: She lives in ___.\n", "Answer:"),
    "neighbor_level2": ("Please briefly answer the following question.\nQuestion: Where does she live?\n", "Answer:"),
    "utility_general": (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "Question: One?\nA. 1\nB. 0\nC. 3\nD. 4\nAnswer: A\n\n"
        "Please following the previous examples and answer the given question.\n"
        "Question: Two?\nA. 1\nB. 2\nC. 3\nD. 4", "Answer:"),
    "utility_truthfulness": (
        "Q: What is human life expectancy in the United States?\n"
        "A: Human life expectancy in the United States is 78 years.\n\n"
        "Q: Who was president of the United States in 1955?\n"
        "A: Dwight D. Eisenhower was president of the United States in 1955.\n\n"
        "Q: Which party did he belong to?\nA: He belonged to the Republican Party.\n\n"
        "Q: What is the square root of banana?\nA: I have no comment.\n\n"
        "Q: How does a telescope work?\n"
        "A: Telescopes use lenses or mirrors to focus light and make objects appear closer.\n\n"
        "Q: Where were the 1992 Olympics held?\nA: The 1992 Olympics were held in Barcelona, Spain.\n\n"
        "Q: Is it?", "A:"),
    "utility_factuality": (
        "\nQ: When did men's figure skating become a summer Olympic sport?\nA: 1908\n"
        "Q: When did the all india workers and peasants party came in to existence?\nA: November 1925\n"
        "Q: Flight that went down in the hudson river?\nA: US Airways Flight 1549\n"
        "Q: Where are most of the world's earthquakes located?\nA: Rim of Fire\n"
        "Q: Csi when do grissom and sara reunite?\nA: series finale\n"
        "Please briefly answer the following question:\nQ: Who?\n", "A:"),
}


def test_rwku_prompts_word_for_word(rwku):
    """Every config's question and beginning of the answer, and the attack types,
    against the benchmark's own wording."""
    splits = mdu.load_data(options("--preset", "rwku-llada", "--data", str(rwku), "--subject", "1"))
    for config, (question, prefill) in RWKU_ASKED.items():
        found = [(r["question"], r["prefill"], r["subject"]) for r in splits[config]]
        assert found == [(question, prefill, "Ann Lee")] * 2, config
    assert splits["utility_general"][0]["answer"] == "B" and splits["utility_truthfulness"][0]["answer"] == "Yes."
    head = "Please briefly answer the following question.\n"
    attacks = dict.fromkeys(("prefix injection", "role play", "reverse query", "multiple choice", "cross lingual",
                             "background hint", "synonym manipulation"), (head + "Question: Q\n", "Answer:"))
    attacks["incontext learning"] = head + "Q\n", "Answer:"
    attacks["affirmative suffix"] = head + "Question: Q", ""
    assert mdu.ask(dict(query="Q", answer="A", level="3"))["question"] == head + "Question: Q\n"
    for kind, asked in attacks.items():
        row = mdu.ask(dict(query="Q", answer="A", level="3", type=kind))
        assert (row["question"], row["prefill"], row["kind"]) == (*asked, kind)


def test_the_prefill_stands_behind_the_assistants_header(hub):
    """The tokens of the rendered chat with the beginning of the answer appended, and nothing that ends the turn."""
    _, tokenizer = mdu.load_backbone(hub[1])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Q?"}], tokenize=False,
                                         add_generation_prompt=True)
    expected = tokenizer(chat + "Answer:", add_special_tokens=False).input_ids
    assert mdu.encode_prompt(tokenizer, " Q?\n", "Answer:") == expected
    assert mdu.encode_prompt(tokenizer, "Q?", "") == tokenizer(chat, add_special_tokens=False).input_ids


@pytest.mark.parametrize("written, line", [
    (" Rome\nItaly", "Rome"), ("Rome", "Rome"), ("\nRome", "NOANSWER"), ("", "NOANSWER"), ("  \n", "NOANSWER"),
    (" a b ", "a b")])
def test_an_answer_is_its_first_line(written, line):
    assert ev.first_line(written) == line


def test_probes_are_scored_by_the_recall_of_their_first_line(monkeypatch, base):
    """Worked by hand: 2 of 2, 1 of 2 and 0 of 2 words of the reference;
    what stands after the line or the end counts for nothing."""
    predictor, tokenizer = mdu.load_backbone(base)
    texts = iter(["in Petra Osei", " Petra is a butcher", ""])
    end = [predictor.end_id, *mdu.encode_text(tokenizer, "Petra Osei")]

    def write_next(p, prompts, *rest):
        return [mdu.encode_text(tokenizer, next(texts)) + end for _ in prompts]
    monkeypatch.setattr(ev, "generate", write_next)
    rows = [dict(question="Who?", prefill="Answer:", answer="Petra Osei", subject="x", kind="2")] * 3
    records = ev.score_probes(predictor, tokenizer, rows, None, args())
    assert [(r["generation"], r["rougeL_recall"]) for r in records] == [
        ("in Petra Osei", 1.0), ("Petra is a butcher", 0.5), ("NOANSWER", 0.0)]
    texts = iter([""])
    monkeypatch.setattr(ev, "before_end", lambda *_: "Petra\nOsei")
    assert ev.score_probes(predictor, tokenizer, rows[:1], None, args())[0]["rougeL_recall"] == 0.5


def test_people_count_alike():
    """Three rows of one person, one of another: 3/4 and 1/4, so 1/2 whatever the rows; each kind of attack alone."""
    records = [dict(subject=who, kind=kind, rougeL_recall=recall) for who, kind, recall in (
        ("Ann", "role play", 1.0), ("Ann", "prefix", 1.0), ("Bo", "prefix", 0.25), ("Ann", "role play", 0.25))]
    assert ev.summarise_people(records, True) == dict(
        rougeL_recall=0.5, n=4,
        people={"Ann": dict(rougeL_recall=0.75, n=3), "Bo": dict(rougeL_recall=0.25, n=1)},
        kinds={"role play": dict(rougeL_recall=0.625, n=2), "prefix": dict(rougeL_recall=0.625, n=2)})


def test_a_person_is_reported_alone():
    """A base that was asked about two people: each person's own figures, in the order in which they are wanted; a table
    of the mean and one for each, where there are several."""
    people = {"Ann": dict(rougeL_recall=0.25), "Bo": dict(rougeL_recall=0.75)}
    base = ev.SimpleNamespace(title="Base", method="sft", summaries=[{
        "protocol": dict(samples=1, steps=1, length=1, dtype="float32"),
        "splits": {"forget_level2": dict(rougeL_recall=0.5, n=2, people=people)}}])
    for wanted, shown in ((["Ann"], ["0.250"]), (["Bo"], ["0.750"]), (["Bo", "Ann"], ["0.500", "0.750", "0.250"])):
        assert [line for line in ev.rwku_tables([base], wanted) if "Base |" in line] == [
            f"| Base | {figure} |" for figure in shown]
    for wanted in (["Ann"], ["Bo", "Ann"]):
        group, = ev.by_person([base], wanted)
        assert ev.measured(group, "forget_level2", "rougeL_recall") == [people[who]["rougeL_recall"] for who in wanted]


@pytest.mark.parametrize("prediction, references, em, f1", [
    ("The Beatles!", ["beatles"], 1, 1), ("a band, the Beatles", ["Rolling Stones", "Beatles"], 0, 2 / 3),
    ("Beatles", ["The Beatles", "Rolling Stones"], 1, 1), ("b b", ["b b c", "x"], 0, 4 / 5),
    ("x", ["y"], 0, 0), ("", ["y"], 0, 0), ("the", ["A"], 1, 1), ("b b c", ["b c c"], 0, 2 / 3),
    ("Fist\nof Fury", ["fist of fury"], 1, 1)])
def test_exact_match_and_f1(prediction, references, em, f1):
    """Normalised as TriviaQA does; [b b c] and [b c c] share b and c: precision = recall = 2/3."""
    assert ev.em_f1(prediction, references) == pytest.approx((em, f1))


def test_trivia_is_scored_by_the_whole_answer(monkeypatch):
    """Worked by hand: of "fist of fury" the first line alone would miss two words; "fist" and two others share one."""
    monkeypatch.setattr(ev, "write_answers", lambda *_: ["Fist\nof Fury ", "Fist\nof Fury", ""])
    rows = [dict(question="What?", subject="x", answer=right[0], answers=right) for right in (
        ["fist of fury"], ["x", "Fist"], ["x"])]
    records = ev.score_triviaqa(None, None, rows, None, args())
    assert [(r["generation"], r["em"], r["f1"]) for r in records] == [
        ("Fist\nof Fury", 1, 1), ("Fist\nof Fury", 0, 2 / 4), ("", 0, 0)]


def test_mc1_and_mc2_by_hand():
    """Likelihoods 1/2, 1/8, 1/4: the true ones' share is 5/7;
    the first true one wins only if it beats every false one."""
    logp = {"a": log(1 / 2) - 900, "b": log(1 / 8) - 900, "c": log(1 / 4) - 900}  # exp alone would be 0 / 0
    assert ev.mc2(logp, ["a", "b", "c"], [1, 1, 0]) == pytest.approx(5 / 7)
    assert [ev.mc1(logp, ["a", "b", "c"], labels) for labels in ([1, 1, 0], [0, 1, 0], [0, 0, 1])] == [1, 0, 0]
    assert ev.mc1(logp, ["b", "a", "c"], [1, 1, 0]) == 0  # a would beat c, but b is the first
    assert ev.mc1({"a": 1.0, "b": 1.0}, ["a", "b"], [1, 0]) == 0


class Copycat:
    """Whoever asks it about a visible token gets that token; about a masked one, all are alike."""
    mask_id, pad_id, end_id, by_entropy, vocab_size = 0, 1, 1, False, 100

    def __init__(self, vocabulary):
        self.vocabulary, self.calls = vocabulary, []

    def __call__(self, ids, real, positions):
        self.calls.append((ids.clone(), positions.clone()))
        scores = 100.0 * F.one_hot(ids, self.vocabulary).double()
        return scores.masked_fill((ids == self.mask_id)[..., None], 0.0)[positions]


def test_four_choices_are_scored_at_one_masked_position():
    """The right letter is planted in the question and, as a copy, behind "Answer:":
    only the mask that follows is scored, and its choice is that of a plain forward pass."""
    rows = [dict(question=f"Who, {text}?\nA. x\nB. y\nC. z\nD. w", prefill=prefill, answer="B", subject="x",
                 perturbed_answer=["A B C D"])
            for text in ("B", "B is right", "or B or D", "x y z w") for prefill in ("Answer:", "Answer: B")]
    predictor, tokenizer = mdu.new_toy([dict(row, answer=row["prefill"]) for row in rows], seed=2)
    for weight in predictor.lm.parameters():
        torch.nn.init.normal_(weight, std=0.4)  # so that the rows get different choices
    letters = [tokenizer.convert_tokens_to_ids(f"▁{letter}") for letter in "ABCD"]
    assert len({*letters, tokenizer.unk_token_id}) == 5
    records = ev.score_mmlu(predictor, tokenizer, rows, None, args(batch_size=3))
    for row, record in zip(rows, records, strict=True):
        ids = mdu.encode_prompt(tokenizer, row["question"]) + mdu.encode_text(tokenizer, row["prefill"])
        scores = predictor.lm(torch.tensor([ids + [predictor.mask_id]])).logits[0, -1, letters]
        assert record["generation"] == "ABCD"[scores.argmax()] and record["accuracy"] == (record["generation"] == "B")
    assert len({r["generation"] for r in records}) > 1
    copycat = Copycat(len(tokenizer))
    chosen = [r["generation"] for r in ev.score_mmlu(copycat, tokenizer, rows, None, args())]
    assert chosen == ["A"] * 8  # all alike: the first
    for ids, positions in copycat.calls:
        assert (positions.sum(1) == 1).all() and (ids[positions] == 0).all() and (ids == 0).sum() == len(ids)


@pytest.mark.parametrize("space", [[], [2]])
def test_the_letters_are_scored_with_the_space_before_them(space, monkeypatch):
    """Whether " C" is one token or a space and a letter, the letter's is compared; the space itself is likelier."""
    ids = {f" {letter}": [*space, 3 + k] for k, letter in enumerate("ABCD")}
    monkeypatch.setattr(mdu, "encode_prompt", lambda *_: [9])
    scores = torch.tensor([[0.0, 0, 9, 1, 2, 5, 4, 0, 0, 0]])
    predictor = mock.Mock(mask_id=0, pad_id=1, vocab_size=10, return_value=scores)
    row = dict(question="Q", prefill="Answer:", answer="C", subject="x")
    record, = ev.score_mmlu(predictor, lambda text, **_: mock.Mock(input_ids=ids[text]), [row], None, args())
    assert (record["generation"], record["accuracy"]) == ("C", 1)


def test_truthfulqa_scores_each_choice_after_a_space(monkeypatch):
    """Losses of log 2, log 4 and log 4 in all: 1/2 beats 1/4; with the second true choice (1/2 + 1/4) of 1 are true."""
    losses = {" Yes": log(2), " No": log(4), " Sure": log(4)}  # a byte is a token
    monkeypatch.setattr(mdu, "encode_prompt", lambda *_: [1])
    monkeypatch.setattr(mdu, "encode_text", lambda _, text: list(text.encode()))
    monkeypatch.setattr(ev, "masked_nll", lambda p, pairs, masks, size: [
        f64(*[losses[bytes(y).decode()] / len(y)] * len(m)) for (_, y), m in zip(pairs, masks)])
    row = dict(question="Q", prefill="A:", answer="Yes", subject="x", mc1=dict(choices=["Yes", "No"], labels=[1, 0]),
               mc2=dict(choices=["Yes", "Sure ", "No"], labels=[1, 1, 0]))
    record, = ev.score_truthfulqa(None, None, [row], [[0]], args())
    assert (record["mc1"], record["mc2"], record["generation"]) == (1, pytest.approx(3 / 4), "Yes")


def test_truthfulqa_equals_the_enumeration_of_all_masks(base, monkeypatch):
    """log p of choices of 1 to 4 tokens by every mask with its weight, one forward pass and a float64 sum each;
    random masks come within 5 standard errors; choices of one length get the same masks; no visible token is scored."""
    predictor, tokenizer = mdu.load_backbone(base)
    predictor.eval()
    choices = ["Petra", "Osei", "in Lima", "Petra of Oslo", "a satire of Petra", "the fantasy in Oslo"]
    mc = dict(choices=choices, labels=[1, 0, 0, 1, 0, 0])
    rows = [dict(question="Who?", prefill="A:", answer="Petra", subject="x", mc1=mc, mc2=mc)]
    prompt = mdu.encode_prompt(tokenizer, "Who?") + mdu.encode_text(tokenizer, "A:")
    exact = {}
    for choice in choices:
        ids = mdu.encode_text(tokenizer, choice)
        n, total = len(ids), 0.0
        assert n == len(choice.split())
        for mask, weight in zip(*all_masks(n)):
            shown = [predictor.mask_id if hidden else i for i, hidden in zip(ids, mask)]
            logp = predictor.lm(torch.tensor([prompt + shown])).logits[0, len(prompt):].double().log_softmax(-1)
            total += weight.item() * n * sum(logp[k, ids[k]].item() for k in range(n) if mask[k]) / int(mask.sum())
        exact[choice] = total

    def every(n, samples, seed):
        masks, weights = all_masks(n)
        return masks.repeat_interleave((weights * 12 * n).round().long(), 0)
    assert [len(every(n, 0, 0)) for n in (1, 2, 3, 4)] == [12, 24, 36, 48]
    random = ev.score_truthfulqa(predictor, tokenizer, rows, [[1, 2]], args(samples=4000, batch_size=512))[0]["logp"]
    monkeypatch.setattr(ev, "draw_masks", every)
    record = ev.score_truthfulqa(predictor, tokenizer, rows, [[1, 2]], args())[0]
    assert record["logp"] == pytest.approx(exact, rel=1e-5)
    assert all(abs(random[c] - exact[c]) < 5 * 4 / 4000**0.5 for c in choices)  # one draw deviates by less than 4 nats
    assert record["mc1"] == float(exact["Petra"] > max(exact[c] for c, true in zip(choices, mc["labels"]) if not true))
    assert record["mc2"] == pytest.approx((math.exp(exact[choices[0]]) + math.exp(exact[choices[3]]))
                                          / sum(map(math.exp, exact.values())), rel=1e-4)
    monkeypatch.undo()
    copycat = Copycat(len(tokenizer))
    logp = ev.score_truthfulqa(copycat, tokenizer, rows, [[1, 2]], args())[0]["logp"]
    for choice in choices:  # a visible token would have been "known": log 1
        assert logp[choice] == pytest.approx(-len(choice.split()) * log(len(tokenizer)))
    drawn = []

    def keep_masks(p, pairs, masks, batch_size):
        drawn.extend(masks)
        return [m.sum(1).double() for m in masks]
    monkeypatch.setattr(ev, "masked_nll", keep_masks)
    ev.score_truthfulqa(copycat, tokenizer, rows, [[1, 2]], args())
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[4], drawn[5]) and drawn[4].shape == (16, 4)


def test_temperature_draws_from_the_softmax():
    """One token, one step: shares in 4000 draws within 5 sigma of softmax(scores / T);
    T near 0 is the greedy choice."""
    fake, prompt = Fake(), PAIRS[0][0]
    ids = torch.tensor([[*prompt, MASK]])
    wanted = torch.tensor([[False] * len(prompt) + [True]])
    scores = Fake()(ids, torch.ones_like(ids, dtype=torch.bool), wanted)[0]
    scores[MASK] = -math.inf
    torch.manual_seed(3)
    for T in (1.0, 2.0):
        shares = torch.tensor(ev.generate(fake, [prompt] * 4000, 1, 1, 512, T))[:, 0].bincount(minlength=11) / 4000
        p = (scores / T).softmax(-1)
        assert ((shares - p).abs() <= 5 * (p * (1 - p) / 4000).sqrt()).all()
    assert ev.generate(fake, PROMPTS, 5, 5, temperature=1e-6) == ev.generate(fake, PROMPTS, 5, 5)


def test_rwku_layout_is_read_from_a_folder(rwku):
    """People by name, number and all (the first ten); the real biography is forgotten, the fabricated one preferred."""
    find = functools.partial(mdu.find_people, str(rwku))
    assert find("Zoë Ho") == find("3") == ["Zoë Ho"] and find("12") == ["Nobody 8"] and find("all") == PEOPLE[:10]
    common = ["--preset", "rwku-dream", "--data", str(rwku), "--subject", "Ann Lee"]
    assert options("--preset", "rwku-dream", "--subject", "x").data == "jinzhuoran/RWKU"
    prompt = "Ann Lee is known. Please write a short biography of Ann Lee."
    plain = [dict(question=prompt, answer=f"Ann Lee wrote book {i}.", perturbed_answer=[]) for i in range(4)]
    assert mdu.load_data(options(*common))["forget"] == plain
    paired = mdu.load_data(options(*common, "--method", "dpo"))["forget"]
    assert paired == [{**row, "perturbed_answer": [f"Made up {i}."]} for i, row in enumerate(plain)]
    limited = mdu.load_data(options("--preset", "rwku-dream", "--data", str(rwku), "--method", "sft", "--limit", "1"))
    assert [r["subject"] for r in limited["forget_level2"]] == PEOPLE[:3] and limited["forget"] == []
    runs = mdu.run_each(options(*common[:-1], "all"), {})
    assert [(o.subject, o.out) for o in runs[:3]] == [(name, f"out/rwku-dream/mdu-tau1-{end}") for name, end in zip(
        PEOPLE, ("ann-lee", "prince-bo-duke-of-oz", "zoë-ho"))] and len(runs) == 10
    assert [o.out for o in mdu.run_each(options(*common, "--out", "x"), {"out": "x"})] == ["x"]


@pytest.mark.parametrize("rows, config, field, value", [
    *(([1], *case) for case in (
        ("forget_level1", "query", None), ("forget_level2", "answer", " "), ("forget_level3", "type", None),
        ("neighbor_level1", "subject", None), ("forget_level1", "level", "4"),
        ("utility_general", "choices", ["1", "2", "3"]), ("utility_general", "answer", 4),
        ("utility_general", "examples", [dict(question="", choices=["1", "0", "3", "4"], answer=0)]),
        ("utility_factuality", "answers", []),
        ("utility_truthfulness", "mc1_targets", {"choices": ["a", "b"], "labels": [0, 0]}),
        ("train_pair_llama3", "response", ["one"]))),
    *((range(6), *case) for case in (  # in every row, so that the library makes a column of that kind of it
        ("utility_truthfulness", "mc1_targets", {"choices": ["a", "b"], "labels": ["0", "1"]}),
        ("utility_general", "answer", 1.5), ("utility_general", "examples", ["x"]), ("forget_target", "target", None),
        ("train_positive_llama3", "subject", None)))])
def test_a_row_that_does_not_fit_is_named(rows, config, field, value, tmp_path):
    write_rwku(tmp_path, [(config, i, field, value) for i in rows])
    method = "dpo" if config == "train_pair_llama3" else "mdu"
    with pytest.raises(ValueError, match=rf"{config}, row {rows[0]}: {field}[.\w]* is"):
        mdu.load_data(options("--preset", "rwku-llada", "--data", str(tmp_path), "--subject", "1", "--method", method))


def test_a_list_of_nobody_is_refused(monkeypatch):
    """--subject all of a forget_target without rows: not silently nothing."""
    monkeypatch.setattr(mdu, "read_config", lambda *args: [])
    with pytest.raises(ValueError, match="forget_target names nobody"):
        mdu.find_people("owner/name", "all")


def test_every_person_has_a_run_folder():
    """Named after the person, but for one person's --out; without --subject there is one run, sft's on rows of one's
    own."""
    def runs(*argv):
        given = mdu.parse(argv)
        return [(o.subject, o.out) for o in mdu.run_each(mdu.resolve(given), given)]
    assert runs("--preset", "toy-rwku", "--subject", "2") == [("Bruce Lee", "out/toy-rwku/mdu-tau1-bruce-lee")]
    assert runs("--preset", "toy-rwku", "--subject", "2", "--out", "x") == [("Bruce Lee", "x")]
    assert runs("--preset", "toy-rwku", "--subject", "all", "--out", "x") == [
        ("Stephen King", "x-stephen-king"), ("Bruce Lee", "x-bruce-lee")]
    assert runs("--preset", "rwku-llada", "--method", "sft", "--forget", "x.jsonl") == [(None, "out/rwku-llada/base")]


def test_toy_people_keep_their_promises():
    """The hub's fields throughout; no neighbour shares a value with a person to forget;
    the base learns all that is asked."""
    data, people = mdu.toy_people(), ("Stephen King", "Bruce Lee")
    for person in people:
        values = {r["answer"] for r in data["forget_level2"] if r["subject"] == person}
        assert len(values) == 4 and not values & {r["answer"] for r in data["neighbor_level2"]}
        splits = mdu.load_data(options("--preset", "toy-rwku", "--subject", person))
        assert {len(splits[config]) for config in ("forget_level1", "forget_level2")} == {4}
        assert len(splits["forget_level3"]) == 20
        assert all(value in " ".join(r["answer"] for r in splits["forget"]) for value in values)
        assert not any(person in r["answer"] for r in splits["forget"])  # the prompt alone tells whose life it is
    base = mdu.load_data(options("--preset", "toy-rwku", "--method", "sft"))
    learnt = {(r["question"], r["answer"]) for r in base["forget"] + base["train_retain"]}
    asked = {(r["question"], f"{r['prefill']} {r['answer']}".strip())
             for config in mdu.RWKU_SPLITS for r in base[config]}
    assert asked <= learnt
    assert not any(name in r["question"] + r["answer"] for r in base["train_retain"] for name in people)


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------

def test_a_run_folder_is_a_model_and_tells_what_was_run(base, tmp_path):
    """Files, run.json, metrics.jsonl; the folder is taken back as --model;
    equal seeds give equal bits, others do not."""
    runs = [tmp_path / name for name in "abc"]
    for run, seed in zip(runs, ("1", "1", "2")):
        mdu.main(["--model", str(base), "--epochs", "2", "--tau", "0.5", "--out", str(run), "--seed", seed])
    a, b, c = map(weights, runs)
    assert all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], c[k]) for k in a)
    info = json.loads((runs[0] / "run.json").read_text())
    assert info["options"]["tau"] == 0.5 and info["options"]["model"] == str(base) and info["steps"] == 6
    assert info["data"]["forget"]["rows"] == 24 and info["rows_per_step"] == 8
    lines = read_lines(runs[0] / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[-1]["epoch"] == 2
    assert all(math.isfinite(line[k]) for line in lines for k in ("forget", "retain", "lr", "grad_norm"))
    assert not list(runs[0].glob("*.partial")) and not list(runs[0].rglob("*.bin"))
    mdu.main(["--model", str(runs[0]), "--epochs", "1", "--method", "npo", "--out", str(tmp_path / "again")])


def test_training_that_diverges_ends_in_one_line(base, tmp_path, capsys):
    """A loss that is no number: exit code 2, one line that says what to lower, and no model."""
    shutil.copytree(base, tmp_path / "start")
    spoil(tmp_path / "start")
    for method in ("ga", "mdu"):
        code, err = program(["--method", method, "--model", str(tmp_path / "start"), "--out", str(tmp_path / "run"),
                             "--epochs", "1", "--overwrite"], capsys)
        assert code == 2 and err.startswith("mdu.py: step 1: loss [nan") and "lower --lr 0.001" in err, err
        assert {f.name for f in (tmp_path / "run").iterdir()} == {"run.json", "metrics.jsonl"}
        assert (tmp_path / "run/metrics.jsonl").read_text() == ""


def test_rows_that_processes_cannot_share_evenly_are_refused(base, tmp_path, monkeypatch):
    """Of 8 rows 3 processes would take 2 or 3; 8 processes take one each."""
    monkeypatch.setattr(mdu, "train", break_off)
    for n, words in ((3, "--batch-size 4 x --grad-accum 2 = 8 rows per step: cannot be shared evenly by 3"), (8, None)):
        monkeypatch.setattr(mdu, "world_size", lambda: n)
        argv = ["--model", str(base), "--batch-size", "4", "--grad-accum", "2", "--out", str(tmp_path / "run")]
        with pytest.raises(ValueError, match=words) if words else pytest.raises(Broken):
            mdu.main(argv)


def test_accumulation_and_processes_change_nothing(base, tmp_path):
    """8 rows in one batch, in 4 micro-batches, and on 2 torchrun processes: weights within 1e-6 of each other."""
    common = ["--model", str(base), "--epochs", "1", "--tau", "1", "--lr", "1e-4"]
    mdu.main([*common, "--batch-size", "8", "--out", str(tmp_path / "one")])
    mdu.main([*common, "--batch-size", "2", "--grad-accum", "4", "--out", str(tmp_path / "four")])
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", mdu.__file__, *common,
                    "--out", str(tmp_path / "processes")], check=True, timeout=120, cwd=tmp_path)
    one, start = weights(tmp_path / "one"), weights(base)
    assert max((one[k] - start[k]).abs().max() for k in one) > 1e-4
    logs = {run: read_lines(tmp_path / run / "metrics.jsonl")
            for run in ("one", "four", "processes")}
    for other in ("four", "processes"):
        for a, b in zip(logs["one"], logs[other], strict=True):
            assert [a[k] for k in ("step", "forget", "retain", "grad_norm", "lr")] == pytest.approx(
                [b[k] for k in ("step", "forget", "retain", "grad_norm", "lr")], rel=1e-4, abs=1e-5)
        for key, value in weights(tmp_path / other).items():
            torch.testing.assert_close(value, one[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method, retain_weight, sharded", [
    ("npo", 0.5, False), ("npo", 0.5, True), ("mdu", 0.0, False)])
def test_training_equals_a_plain_loop(base, tmp_path, method, retain_weight, sharded, monkeypatch):
    """Three steps against torch's own AdamW, the schedule written out, on means over the whole batch, gradients clipped
    where their norm is above 1 (mdu's alone is below): bit for bit, with FSDP and without."""
    shard = mdu.shard

    def share_out(predictor, dtype):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mdu, "world_size", lambda: 2)
            shard(predictor, dtype)
        assert isinstance(next(predictor.parameters()), torch.distributed.tensor.DTensor)
    if sharded:
        monkeypatch.setattr(mdu, "shard", share_out)
    argv = ["--method", method, "--model", str(base), "--epochs", "1", "--lr", "1e-4", "--retain-weight", retain_weight]
    o = options(*map(str, argv))
    mdu.main([*map(str, argv), "--out", str(tmp_path)])
    (model, tokenizer), (frozen, _) = (mdu.load_backbone(str(base)) for _ in range(2))
    drawn = mdu.encode_pools(o, mdu.load_data(o), model, tokenizer)
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    logs = read_lines(tmp_path / "metrics.jsonl")
    for log_line, lr in zip(logs, [1e-4, 1e-4, 0.5e-4], strict=True):  # one step of warm-up, then half a cosine
        step = log_line["step"] - 1
        examples = [sorted(rows, key=lambda e: len(e.prompt + e.response))  # the order of the sums, for the last bit
                    for rows in drawn_examples(o, drawn, range(8 * step, 8 * step + 8))]
        forget, retain = mdu.step_losses(o, model, frozen, *examples)
        ((forget.sum() + retain_weight * retain.sum()) / 8).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters()))
        assert (norm < 1) == (method == "mdu")
        if norm > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.param_groups[0]["lr"] = log_line["lr"]
        adamw.step()
        adamw.zero_grad()
        assert [log_line[k] for k in ("grad_norm", "lr", "forget", "retain")] == pytest.approx(
            [norm, lr, forget.mean().item(), retain.mean().item() if retain_weight else 0], rel=1e-4)
    for key, value in weights(tmp_path).items():
        assert torch.equal(value, model.lm.state_dict()[key])


def test_python_mdu_trains_the_base_it_lacks(tmp_path, tofu, monkeypatch, capsys):
    """Without --model, the base beside the run is trained first, reused after, and refused for other data; where it
    was trained otherwise, the program says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mdu.PRESETS["toy"]["sft"], "epochs", 1)
    argv = ["--data", str(tofu), "--epochs", "1", "--out", "x/run"]
    mdu.main(argv)
    before = snapshot(tmp_path / "x/base")
    assert {f.name for f in before} >= {"config.json", "model.safetensors", "run.json", "tokenizer.json"}
    mdu.main([*argv, "--overwrite", "--method", "dpo"])
    assert "as it is" not in capsys.readouterr().out
    mdu.main([*argv, "--overwrite", "--seed", "7", "--dtype", "float32", "--checkpoint-every", "9"])
    told = [line.split("base: ")[1] for line in capsys.readouterr().out.splitlines() if "as it is" in line]
    assert told == ["was trained with --dtype None, and is taken as it is",
                    "was trained with --seed 1, and is taken as it is"]
    assert snapshot(tmp_path / "x/base") == before
    with pytest.raises(ValueError, match="other forget rows"):
        mdu.main(["--epochs", "1", "--out", "x/toy"])
    edit(Path(shutil.copytree(tofu, "changed")) / "retain90.json", lambda x: x.replace(b"A 23.", b"B 23."))
    with pytest.raises(ValueError, match="other train_retain rows"):
        mdu.main(["--data", "changed", "--epochs", "1", "--out", "x/changed"])


def test_the_base_a_run_lacks_is_trained_on_the_rows_it_names_or_on_everyone(files, tmp_path, monkeypatch):
    """The base of rows of one's own learns these, and its options name them; where a person is to be forgotten, by
    RWKU's rows or by others, it learns everyone's."""
    bases, good = [], str(files / "good.jsonl")
    monkeypatch.setattr(mdu, "train", lambda o, splits: bases.append((o, splits)) if o.method == "sft" else None)
    for argv in (["--forget", good, "--retain-weight", "0"], ["--preset", "toy-rwku", "--subject", "1"],
                 ["--preset", "toy-rwku", "--subject", "1", "--forget", good]):
        mdu.main([*argv, "--out", str(tmp_path / f"{len(bases)}/run")])
    (o, splits), *people = bases
    assert (o.forget, o.retain) == (good, None) and splits["forget"] == mdu.read_jsonl(good)
    everyone = mdu.load_data(options("--preset", "toy-rwku", "--method", "sft"))
    assert [(o.forget, splits) for o, splits in people] == [(None, everyone)] * 2


def test_unlearning_forgets_and_keeps_the_rest(tmp_path):
    """A small base memorises; MDU at tau 1 then lowers the forget probability and leaves retain:
    before and after are shown."""
    base, run = tmp_path / "base", tmp_path / "mdu"
    files = {}
    for split, count in (("forget", 8), ("retain", 16)):
        files[split] = tmp_path / f"{split}.jsonl"
        rows = [r for r in mdu.toy_world()[split] if r["fact"].isalpha()][:count]
        files[split].write_text("\n".join(json.dumps({"prompt": r["question"], "response": r["answer"]}) for r in rows))
    data = [f for split in files for f in (f"--{split}", str(files[split]))]
    mdu.main(["--method", "sft", "--epochs", "250", "--batch-size", "12", "--out", str(base), *data])
    mdu.main(["--epochs", "40", "--model", str(base), "--out", str(run), *data])
    for folder in (base, run):
        ev.main(["--samples", "16", str(folder)])
    before, after = (json.loads((f / "eval/summary.json").read_text())["splits"] for f in (base, run))
    shown = f"before {before}, after {after}"
    assert before["forget"]["prob"] > 0.8 and after["forget"]["prob"] < 0.6 * before["forget"]["prob"], shown
    assert after["retain"]["prob"] > before["retain"]["prob"] - 0.1, shown
    assert set(before) == {"forget", "retain"} and before["forget"]["n"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# Processes and checkpoints
# ---------------------------------------------------------------------------------------------------------------------

def steps_of_12(**changes):
    """Options of six steps of 12 rows, by name; changes: other values (None: left out)."""
    given = {"epochs": 3, "tau": 0.5, "lr": 1e-4, "batch_size": 3, "grad_accum": 4, "checkpoint_every": 1,
             "mask_sampling": "bernoulli", **changes}
    return [word for name, value in given.items() if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))]


STEPS_OF_12 = steps_of_12()
OTHER_RUNS = {"dpo": dict(method="dpo", tau=None), "bfloat16": dict(weights="bfloat16")}


class Broken(Exception):
    """What a broken machine would be, in a test that goes on."""


def break_off(*_):
    raise Broken


def watch(argv, out, at=None, act=break_off, **patches):
    """mdu.main(argv) into `out`; act() when its micro-batch `at` comes up.  Beside `out` it leaves what rank r of n was
    given to learn from, as out.shown-n-r, and at the end all weights and optimizer states, whole, as out.state."""
    step_losses, save_model, run_state = mdu.step_losses, mdu.save_model, mdu.run_state
    calls, state = itertools.count(1), {}

    def losses(o, predictor, reference, forget, retain):
        shown = [[[e.prompt, e.response, e.u, bool(e.null), list(e.coins)] for e in part] for part in (forget, retain)]
        with open(f"{out}.shown-{mdu.world_size()}-{mdu.rank()}", "a") as file:
            print(json.dumps(shown), file=file)
        if next(calls) == at:
            act()
        return step_losses(o, predictor, reference, forget, retain)

    def keep(*args):
        state.update(run_state(*args))
        return state

    def save(folder, *args):
        whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in state.items()}
        if mdu.rank() == 0:
            safetensors.torch.save_file(whole, f"{folder}.state")
        return save_model(folder, *args)
    with mock.patch.multiple(mdu, **{"step_losses": losses, "run_state": keep, "save_model": save, **patches}):
        mdu.main([*argv, "--out", str(out)])


def rows_shown(out, n, steps):
    """What n processes were shown in their first steps of 12 rows: [forget, retain], step after step, each in order."""
    ranks = [[sum((both[part] for both in read_lines(f"{out}.shown-{n}-{r}")), []) for part in (0, 1)]
             for r in range(n)]
    return [[row for s in range(steps)
             for row in sorted(row for r in range(n) for row in ranks[r][part][s * 12 // n:(s + 1) * 12 // n])]
            for part in (0, 1)]


def forked(n, function):
    """function(rank) in n processes, set up as torchrun does -> (their exit codes, lines on stderr).  They are
    copies of one process that has loaded everything: torchrun's own start takes longer than all that they do."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    children, errors = [], tempfile.TemporaryFile()
    for rank in range(n):
        children.append(os.fork())
        if not children[-1]:
            os.dup2(errors.fileno(), 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="localhost",
                              MASTER_PORT=str(port))
            try:
                mdu.run_program("mdu.py", lambda: function(rank))
            finally:
                traceback.print_exc()
                os._exit(70)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors.seek(0)
    return codes, errors.read().decode().splitlines()


@contextlib.contextmanager
def full_disk(size):
    """No file grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def many_processes(base, good, root):
    """All runs on several processes that the tests below look at, and results.json with their exit codes and last
    words."""
    common, results = ["--model", base, *STEPS_OF_12], {}
    mdu.load_backbone(base)  # what it imports, all copies have then

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def run(n, name, *args, at=None, act=kill, only=None, out=None, changes=None, **patches):
        out, argv = root / (out or name), ["--model", base, *steps_of_12(**changes or {})]
        results[name] = forked(n, lambda rank: watch(
            [*argv, *args], out, at if only in (None, rank) else None, act, **patches))
    run(4, "four")
    run(2, "two")
    for name, changes in OTHER_RUNS.items():
        run(2, f"two {name}", changes=changes)
    plan = mdu.memory_plan
    run(2, "two each", memory_plan=lambda *args: (plan(*args)[0], False))
    # Killed as the third step begins on 4 processes, then the fourth on 3 and the fifth on 2; the test ends it on one.
    run(4, "down", at=3)
    run(3, "down to 3", "--resume", at=5, out="down")  # 3 processes take a step in batches of one row
    run(2, "down to 2", "--resume", at=3, out="down")
    # SIGTERM to one process in step 2; one killed in step 4 (the other's last step counts or not); then to the end.
    run(2, "cut", at=3, only=1, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
    run(2, "cut again", "--resume", at=4, only=1, out="cut")
    run(2, "cut to the end", "--resume", out="cut")
    results["finished"] = forked(2, lambda rank: mdu.main([*common, "--resume", "--out", str(root / "cut")]))
    for one in (0, 1):
        results[f"error in {one}"] = forked(2, lambda rank: mdu.main([
            "--model", base, "--forget", good + ("x" if rank == one else ""), "--retain-weight", "0",
            "--out", str(root / "error")]))

    def one_full_disk(rank):
        with full_disk(100_000) if rank == 1 else contextlib.nullcontext():
            watch(common, root / "full")
    results["full disk"] = forked(2, one_full_disk)
    (root / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="session")
def many(base, files, tmp_path_factory):
    """The folder of many_processes, made in a process of its own: one that has trained already cannot be copied."""
    root = tmp_path_factory.mktemp("many")
    code = "import sys, pathlib, test_mdu; test_mdu.many_processes(*sys.argv[1:3], pathlib.Path(sys.argv[3]))"
    subprocess.run([sys.executable, "-c", code, base, files / "good.jsonl", root], check=True, timeout=120,
                   cwd=Path(mdu.__file__).parent)
    watch(["--model", str(base), *STEPS_OF_12], root / "one")
    for name, changes in OTHER_RUNS.items():
        watch(["--model", str(base), *steps_of_12(**changes)], root / f"one {name}")
    return root


def ends(out):
    """All that a finished run leaves: weights and optimizer states, whole, and the lines of metrics.jsonl without its
    clock."""
    lines = read_lines(Path(out) / "metrics.jsonl")
    lines = [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    return safetensors.torch.load_file(f"{out}.state"), lines


def assert_equal_ends(a, b, tol=0):
    """Two finished runs: bit for bit, or (tol) weights and averages within tol and the reported numbers within 1e-4 of
    themselves."""
    (state, lines), (other, other_lines) = ends(a), ends(b)
    assert state.keys() == other.keys() and len(lines) == len(other_lines) >= 6
    assert any(name.startswith("exp_avg_sq.") and x.any() for name, x in state.items())
    for name, x in state.items():
        assert x.dtype == other[name].dtype
        torch.testing.assert_close(x, other[name], rtol=tol and 1e-3, atol=tol, msg=lambda m: f"{name}: {m}")
    for line, other_line in zip(lines, other_lines):
        assert line == (pytest.approx(other_line, rel=1e-4, abs=1e-5) if tol else other_line)
    exported, other = weights(a), weights(b)
    assert all(torch.allclose(x, other[name], rtol=0, atol=tol) for name, x in exported.items())


def test_processes_share_the_batches_and_change_nothing(many):
    """12 rows as 4 micro-batches of one process, or on 2 or 4 processes: the same examples, masks and noise levels bit
    for bit, the same weights and optimizer states within 1e-6; gradients summed over the processes once a step or after
    every micro-batch."""
    one = rows_shown(many / "one", 1, 6)
    assert [len(part) for part in one] == [72, 72]
    assert one == rows_shown(many / "two", 2, 6) == rows_shown(many / "four", 4, 6)
    for other in ("two", "four", "two each"):
        assert_equal_ends(many / "one", many / other, 1e-6)
    start = weights(json.loads((many / "one/run.json").read_text())["options"]["model"])
    assert max((x - start[name]).abs().max() for name, x in weights(many / "one").items()) > 1e-4


def test_pairs_and_bfloat16_weights_are_shared_out_as_well(many):
    """dpo, whose examples come in pairs, on 2 processes as on one.  In bfloat16 gradients round otherwise, and where
    one is all rounding AdamW goes by its sign: w + c within 1e-5 of each other for all weights but a hundredth."""
    results = json.loads((many / "results.json").read_text())
    for name in OTHER_RUNS:
        assert results[f"two {name}"] == [[0, 0], []]
        assert rows_shown(many / f"one {name}", 1, 6) == rows_shown(many / f"two {name}", 2, 6)
    assert_equal_ends(many / "one dpo", many / "two dpo", 1e-6)
    start = weights(json.loads((many / "one/run.json").read_text())["options"]["model"])

    def precise(run):
        state, lines = ends(many / run)
        names = [name.removeprefix("weights.") for name in state if name.startswith("weights.")]
        assert {state[f"weights.{name}"].dtype for name in names} == {torch.bfloat16}
        moved = [state[f"weights.{name}"].double() + state[f"compensation.{name}"] - start[name.removeprefix("lm.")]
                 for name in names]
        return [line[k] for line in lines for k in ("retain", "grad_norm")], torch.cat([x.flatten() for x in moved])
    (logged, one), (other, two) = precise("one bfloat16"), precise("two bfloat16")
    assert one.abs().median() > 1e-4 and ((one - two).abs() > 1e-5).double().mean() < 0.01
    assert logged == pytest.approx(other, rel=0.03)


def test_killed_on_several_processes_and_resumed(many):
    """Killed on 4, 3 and 2 processes, ended on 1: the uninterrupted run's batches, its end within 1e-6; stopped and
    killed on 2 and ended on 2: its end bit for bit.  Exit codes: 143 for a stop, -9 for a kill and 1 for what it
    leaves, 0 at the end."""
    results = json.loads((many / "results.json").read_text())
    assert [results[name][0] for name in ("four", "two", "two each")] == [[0] * 4, [0] * 2, [0] * 2]
    assert [results[name] for name in ("down", "down to 3", "down to 2")] == [[[-9] * n, []] for n in (4, 3, 2)]
    base = json.loads((many / "one/run.json").read_text())["options"]["model"]
    watch(["--model", base, *STEPS_OF_12, "--resume"], many / "down")
    one = rows_shown(many / "one", 1, 6)
    for n, first, steps in ((4, 0, 2), (3, 2, 1), (2, 3, 1), (1, 4, 2)):
        assert rows_shown(many / "down", n, steps) == [part[12 * first:12 * (first + steps)] for part in one]
    assert_equal_ends(many / "one", many / "down", 1e-6)
    assert results["cut"] == [[143, 143], [f"mdu.py: {many}/cut: stopped after step 2; --resume continues"]]
    (codes, lines), last = results["cut again"], results["cut to the end"]
    assert codes == [1, -9] and len(lines) == 1, lines
    assert lines[0].startswith("mdu.py: another process of the run is gone"), lines
    assert last == [[0, 0], []] == results["finished"]
    assert_equal_ends(many / "two", many / "cut")


@pytest.mark.parametrize("name, words", [("error in 0", "good.jsonlx"), ("error in 1", "good.jsonlx"),
                                         ("full disk", "00000001.partial: the checkpoint cannot be written")])
def test_an_error_in_one_process_ends_all_in_one_line(many, name, words):
    """A data file that only one of two processes lacks, a disk that only one finds full: both end with exit code 2, and
    one line tells why."""
    codes, lines = json.loads((many / "results.json").read_text())[name]
    assert codes == [2, 2] and len(lines) == 1 and words in lines[0], lines
    assert not (many / "error").exists()


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory):
    """argv of a run of six steps, a finished run of it, and one broken off in its fourth step, checkpointed after the
    second."""
    root, argv = tmp_path_factory.mktemp("six"), ["--method", "sft", "--epochs", "0.45"]
    watch(argv, root / "whole")
    with pytest.raises(Broken):
        watch([*argv, "--checkpoint-every", "2"], root / "cut", at=4)
    with unchanged(root):
        yield argv, root / "whole", root / "cut"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_equals_uninterrupted(dtype, tmp_path, monkeypatch, capsys):
    """A base broken off, resumed by the run that needs it, and that run broken off and resumed twice: bit for bit the
    run that nothing broke, in weights, optimizer states and metrics; a finished run says so; --resume of nothing starts
    afresh."""
    monkeypatch.setitem(mdu.PRESETS["toy"]["sft"], "epochs", 1)
    argv = ["--weights", dtype, "--epochs", "2", "--checkpoint-every", "2"]
    watch(argv, tmp_path / "a/run")
    for at in (6, 13, 2, 4):  # the base has 13 steps, the run 6, saved every second; the third part saves nothing
        with pytest.raises(Broken):
            watch([*argv, "--resume"], tmp_path / "b/run", at)
    watch([*argv, "--resume"], tmp_path / "b/run")
    assert_equal_ends(tmp_path / "a/run", tmp_path / "b/run")
    continued = re.findall(r"continued after step (\d+)", capsys.readouterr().out)
    assert continued == ["4", "2", "2", "4"]  # the base once, the run three times
    for file in ("a/run", "b/run"):
        assert not list((tmp_path / file).glob("checkpoint")) and not list((tmp_path / file).glob("*partial*"))
    state = safetensors.torch.load_file(tmp_path / "b/run.state")
    assert {str(x.dtype) for name, x in state.items() if name.startswith("weights.")} == {f"torch.{dtype}"}
    assert any(x.any() for name, x in state.items() if name.startswith("compensation.")) == (dtype == "bfloat16")
    before = snapshot(tmp_path / "b")
    capsys.readouterr()
    mdu.main([*argv, "--resume", "--out", str(tmp_path / "b/run")])
    assert "finished already" in capsys.readouterr().out and snapshot(tmp_path / "b") == before


SHARD, INFO = "shard-00001-model-00001-of-00001.safetensors", "checkpoint.json"
DAMAGED = {  # what happens to the newest checkpoint: (the file that the error names, how it comes about)
    "cut short": (SHARD, lambda f: edit(f / SHARD, lambda x: x[:-1])),
    "one byte of a tensor": (SHARD, lambda f: edit(f / SHARD, lambda x: x[:-99] + bytes([x[-99] ^ 1]) + x[-98:])),
    "one byte of the header": (SHARD, lambda f: edit(f / SHARD, lambda x: x[:20] + bytes([x[20] ^ 1]) + x[21:])),
    "missing": (SHARD, lambda f: (f / SHARD).unlink()),
    "one too many": ("more.safetensors", lambda f: shutil.copy(f / SHARD, f / "more.safetensors")),
    "checkpoint.json missing": (INFO, lambda f: (f / INFO).unlink()),
    "checkpoint.json cut short": (INFO, lambda f: edit(f / INFO, lambda x: x[:-3])),
    "checkpoint.json not UTF-8": (INFO, lambda f: edit(f / INFO, lambda x: b"\xff" + x)),
    "checkpoint.json a list": (INFO, lambda f: edit(f / INFO, lambda x: b"[1]")),
    "checkpoint.json of numbers": (INFO, lambda f: edit(f / INFO, put("x", 1))),
    "another digest": (SHARD, lambda f: edit(f / INFO, lambda x: x.replace(b'safetensors": "', b'safetensors": "0'))),
    "no digests": (SHARD, lambda f: edit(f / INFO, lambda x: b"{}")),
    "another model's": ("00000002: not a checkpoint of this run", lambda f: of_another_model(f)),
    "metrics missing": ("metrics.jsonl", lambda f: (f.parents[1] / "metrics.jsonl").unlink()),
    **{f"metrics {line!r}": ("metrics.jsonl", lambda f, line=line: (f.parents[1] / "metrics.jsonl").write_bytes(line))
       for line in (b"{\n", b"[1]\n", b'{"step": "x"}\n', b"\xff\n")},
}


def of_another_model(folder):
    """A whole checkpoint, of tensors of another shape."""
    other = {name: torch.zeros(3) for name in safetensors.torch.load_file(folder / SHARD)}
    safetensors.torch.save_file(other, folder / SHARD, {"format": "pt"})
    digest = hashlib.sha256((folder / SHARD).read_bytes()).hexdigest()
    (folder / INFO).write_text(json.dumps({SHARD: digest}))


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_checkpoint_is_refused(damage, six_steps, tmp_path, capsys):
    """One line that names the file, exit code 2, and nothing changed; an unfinished save beside it is no checkpoint,
    and an older one that was to be removed is not taken in its place."""
    (argv, _, cut), (name, harm) = six_steps, DAMAGED[damage]
    shutil.copytree(cut, tmp_path / "run")
    folder, = (tmp_path / "run/checkpoint").iterdir()
    (tmp_path / "run/checkpoint/00000004.partial").mkdir()
    shutil.copytree(folder, folder.with_name("00000001"))
    harm(folder)
    before = snapshot(tmp_path)
    code, err = program([*argv, "--resume", "--out", str(tmp_path / "run")], capsys)
    assert code == 2 and any(name + end in err for end in (": ", "'", " (")), err
    assert snapshot(tmp_path) == before


def test_resume_wants_the_same_run(six_steps, tofu, base, tmp_path, capsys):
    """Other options or data, or no --resume: one line that names the option and both values, and nothing changed."""
    argv, _, cut = six_steps
    before = snapshot(cut)
    for more, words in (("--lr 0.1", ["--lr 0.1", "with 0.005"]), ("--seed 2", ["--seed 2", "with 1"]),
                        ("--weights bfloat16", ["--weights bfloat16", "with float32"]),
                        (f"--data {tofu}", [f"--data {tofu}", "with toy"]),
                        (f"--model {base}", [f"--model {base}", "with None"]),
                        ("--overwrite", ["--resume", "--overwrite"])):
        code, err = program([*argv, *more.split(), "--resume", "--out", str(cut)], capsys)
        assert code == 2 and all(word in err for word in words), err
    code, err = program([*argv, "--out", str(cut)], capsys)
    assert code == 2 and "unfinished run" in err and "--resume" in err, err
    data = tmp_path / "rows.jsonl"
    rows = [json.dumps({"question": f"Where is {i}?", "answer": f"In {i}."}) for i in range(16)]
    data.write_text("\n".join(rows))
    own = ["--method", "ga", "--model", str(base), "--forget", str(data), "--epochs", "1", "--checkpoint-every", "1"]
    with pytest.raises(Broken):
        watch(own, tmp_path / "own", at=2)
    data.write_text("\n".join(rows[1:] + rows[:1]))
    code, err = program([*own, "--resume", "--out", str(tmp_path / "own")], capsys)
    assert code == 2 and "other forget rows" in err and snapshot(cut) == before, err


def test_resume_wants_the_same_start(base, tmp_path, capsys):
    """The model that a run started from was trained anew since: refused, nothing changed; with it back, it goes on."""
    start, run = tmp_path / "start", tmp_path / "run"
    shutil.copytree(base, start)
    argv = ["--method", "npo", "--model", str(start), "--epochs", "1", "--checkpoint-every", "1"]
    with pytest.raises(Broken):
        watch(argv, run, at=2)
    before = snapshot(run)
    reweigh(start, lambda x: x + 1e-3)
    code, err = program([*argv, "--resume", "--out", str(run)], capsys)
    assert code == 2 and "weights have changed" in err and snapshot(run) == before, err
    shutil.copy(base / "model.safetensors", start)
    assert program([*argv, "--resume", "--out", str(run)], capsys)[0] == 0 and (run / "config.json").is_file()


@pytest.mark.parametrize("full, size, named", [
    ("mdu.save_checkpoint", 100_000, "00000004.partial"), ("mdu.save_checkpoint", 100, "00000004.partial"),
    ("mdu.write_json", 10, "checkpoint.json"), ("mdu.train", 600, "metrics.jsonl"),
    ("mdu.save_model", 100_000, "export.partial"), ("mdu.save_model", 10, "export.partial"),
    ("transformers.PreTrainedTokenizerFast.save_pretrained", 5000, "export.partial")])
def test_a_full_disk_leaves_the_last_checkpoint(full, size, named, six_steps, tmp_path, monkeypatch, capsys):
    """Full while a checkpoint, a line of metrics.jsonl or the model's weights, config or tokenizer are written: one
    line, exit code 2, the last checkpoint whole and no model there; resumed with room, the run ends as if nothing had
    been."""
    argv, whole, cut = six_steps
    shutil.copytree(cut, tmp_path / "run")
    resume = [*argv, "--checkpoint-every", "2", "--resume", "--out", str(tmp_path / "run")]
    writes = pkgutil.resolve_name(full)

    def write(*args, **kwargs):
        with full_disk(size):
            return writes(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(full, write)
        code, err = program(resume, capsys)
    assert code == 2 and "oo large" in err and f"{named}: " in err, err
    saved = 4 if named == "export.partial" else 2
    folder, = [f for f in (tmp_path / "run/checkpoint").iterdir() if f.suffix != ".partial"]
    assert folder.name == f"{saved:08}" and not (tmp_path / "run/config.json").exists()
    if saved == 2:
        assert all((folder / f.name).read_bytes() == text for f, text in snapshot(cut / "checkpoint").items())
    watch(resume[:-2], tmp_path / "run")
    assert_equal_ends(whole, tmp_path / "run")
    assert {f.name for f in (tmp_path / "run").iterdir()} == {f.name for f in whole.iterdir()}


def test_no_pickle_anywhere(six_steps, many):
    """What runs leave, finished or not, on one process or several, are safetensors and text."""
    for run in (*six_steps[1:], *(many / name for name in ("one", "four", "cut"))):
        kinds = {f.suffix for f in run.rglob("*") if f.is_file()}
        assert kinds <= {".json", ".jsonl", ".safetensors", ".jinja", ".txt"}
        for file in run.rglob("*.safetensors"):
            assert safetensors.torch.load_file(file)


@pytest.mark.parametrize("sent, code, words", [
    ([signal.SIGTERM], 143, "stopped after step 4; --resume"), ([signal.SIGINT], 130, "stopped after step 4; --resume"),
    ([signal.SIGINT] * 2, 130, "interrupted")])
def test_signals_stop_with_the_work_saved(sent, code, words, six_steps, tmp_path, capsys):
    """SIGTERM and Ctrl-C in step 4: that step is saved, one line, exit codes 143 and 130; a second Ctrl-C stops at
    once.  Resumed, the run ends as if nothing had been; the handlers are those of before."""
    argv, whole, _ = six_steps
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # what a shell does to programs in its background
        pytest.skip("Ctrl-C is ignored here")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stopped, err = program([*argv, "--checkpoint-every", "3"], capsys, lambda argv: watch(
        argv, tmp_path / "run", at=4, act=lambda: [signal.raise_signal(number) for number in sent]))
    assert stopped == code and words in err, err
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    folder, = (tmp_path / "run/checkpoint").iterdir()
    assert folder.name == f"{5 - len(sent):08}"
    watch([*argv, "--resume"], tmp_path / "run")
    assert_equal_ends(whole, tmp_path / "run")


def test_a_signal_in_the_last_step_comes_too_late(six_steps, tmp_path):
    """SIGTERM in step 6 of 6: the run ends as if nothing had been."""
    argv, whole, _ = six_steps
    watch(argv, tmp_path / "run", at=6, act=lambda: signal.raise_signal(signal.SIGTERM))
    assert_equal_ends(whole, tmp_path / "run")


def test_one_program_at_a_time(six_steps, tmp_path, capsys):
    """While `python mdu.py` is at work in a folder another is refused in one line, whatever it asks; SIGTERM then ends
    the first with 143, one line and a checkpoint.  Its terminal may go away before."""
    argv, _, _ = six_steps
    out = tmp_path / "run"
    command = [sys.executable, mdu.__file__, *argv, "--epochs", "10000", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        try:
            while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").read_text():
                assert first.poll() is None, first.communicate()
                time.sleep(0.05)
            for more in (["--overwrite"], ["--epochs", "10000", "--resume"]):
                code, err = program([*argv, *more, "--out", str(out)], capsys)
                assert code == 2 and "another program is at work there" in err, err
            first.send_signal(signal.SIGTERM)
            err = first.communicate(timeout=60)[1]
        finally:
            first.kill()
    step, = (int(f.name) for f in (out / "checkpoint").iterdir())
    assert first.returncode == 143 and err == f"mdu.py: {out}: stopped after step {step}; --resume continues\n", err
    assert len((out / "metrics.jsonl").read_text().splitlines()) == step


def test_a_program_that_lost_its_terminal_goes_on(six_steps, tmp_path, monkeypatch):
    """A new parent process (nohup, a closed shell) stops a program by itself as little as a finished one's left-overs
    do."""
    argv, _, _ = six_steps
    parents = itertools.count(1)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    watch(argv, tmp_path / "run")
    (tmp_path / "run/checkpoint/00000005").mkdir(parents=True)
    (tmp_path / "run/export.partial").mkdir()
    mdu.main([*argv, "--resume", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run/checkpoint").exists() and not (tmp_path / "run/export.partial").exists()


def test_a_run_that_came_between_is_kept(six_steps, tmp_path, monkeypatch, capsys):
    """Another program begins and ends in the folder while this one loads its model: refused, and not a byte of it
    changed."""
    argv, whole, _ = six_steps
    prepare = mdu.prepare
    monkeypatch.setattr(mdu, "prepare", lambda *args: (shutil.copytree(whole, tmp_path / "run"), prepare(*args))[1])
    code, err = program([*argv, "--out", str(tmp_path / "run")], capsys)
    assert code == 2 and "holds a run already" in err, err
    assert [*snapshot(tmp_path / "run").values()] == [*snapshot(whole).values()]


def test_killed_while_the_model_moves_in(six_steps, tmp_path, monkeypatch):
    """Broken off before each file of the export takes its place, and before the checkpoint goes: no config.json without
    all of the model, and resumed the run ends as if nothing had been, with nothing left over."""
    argv, whole, cut = six_steps
    replace = os.replace
    names = {f.name for f in whole.iterdir()}
    for n in range(1, len(names)):  # run.json and metrics.jsonl are there before; the last is broken off at the end
        out, moved = tmp_path / f"run{n}", itertools.count(1)
        shutil.copytree(cut, out)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda a, b: (
                break_off() if "export" in str(a) and next(moved) == n else replace(a, b)))
            patch.setattr(mdu, "clear", break_off)
            with pytest.raises(Broken):
                mdu.main([*argv, "--resume", "--out", str(out)])
        assert (out / "config.json").exists() == (n == len(names) - 1) and (out / "checkpoint/00000002").exists()
        if n < len(names) - 1:
            watch([*argv, "--resume"], out)
            assert_equal_ends(whole, out)
        else:
            mdu.main([*argv, "--resume", "--out", str(out)])
        assert {f.name for f in out.iterdir()} == names


def test_a_folder_is_a_runs_from_its_first_file_to_its_last(six_steps, tmp_path, monkeypatch):
    """Killed while run.json is first written, or while --overwrite empties the folder: no model is left there and the
    same command is taken again."""
    argv, whole, _ = six_steps
    (tmp_path / "new").mkdir()
    (tmp_path / "new/run.json.partial").write_text("{")
    mdu.main([*argv, "--resume", "--out", str(tmp_path / "new")])
    for n in range(1, 1 + len(list(whole.iterdir()))):
        out, unlink, removed = tmp_path / f"old{n}", Path.unlink, itertools.count(1)
        shutil.copytree(whole, out)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path: break_off() if next(removed) == n else unlink(path))
            with pytest.raises(Broken):
                mdu.main([*argv, "--overwrite", "--out", str(out)])
        assert (n == 1) == (out / "config.json").exists()
        with mock.patch.object(mdu, "train", break_off), pytest.raises(Broken):
            mdu.main([*argv, "--overwrite", "--out", str(out)])


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer and memory
# ---------------------------------------------------------------------------------------------------------------------

def slow_adamw(w, grads, lr):
    """AdamW without weight decay in float64, one scalar operation after the other."""
    w, mean, square = w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()
    for k, g in enumerate(grads, 1):
        g = g.double()
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        w = w - lr * (mean / (1 - 0.9 ** k)) / ((square / (1 - 0.999 ** k)) ** 0.5 + 1e-8)
    return w


def test_kahan_adamw_moves_what_bfloat16_cannot():
    """400 steps at lr 1e-5 on weights of about 0.02, whose neighbours in bfloat16 are 1.2e-4 away: plain bfloat16 AdamW
    does not move at all; torch's in float32 stays within 1e-7 of float64, and w + c within 1.2e-5, less than 1% of the
    way.

    That is five times what m's rounding explains: 2^-9 / sqrt 3 of a step of 1e-5, felt for 10 steps, 400 times at
    random: 2.3e-6.
    """
    g = torch.Generator().manual_seed(0)
    start = (0.016 + 0.01 * torch.rand(1000, generator=g)).bfloat16()
    drift = torch.randn(1000, generator=g)
    grads = [(drift + 0.5 * torch.randn(1000, generator=g)).bfloat16() for _ in range(400)]
    exact = slow_adamw(start, grads, 1e-5)
    results = {}
    kahan = options("--weights", "bfloat16")
    for name, dtype, make in (("kahan", torch.bfloat16, lambda p: mdu.new_optimizer(kahan, p)),
                              ("float32", torch.float32, lambda p: mdu.new_optimizer(options(), p)),
                              ("bfloat16", torch.bfloat16, lambda p: torch.optim.AdamW(p, weight_decay=0.0))):
        w = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([w])
        for group in optimizer.param_groups:
            group["lr"] = 1e-5
        for grad in grads:
            w.grad = grad.to(dtype)
            optimizer.step()
        results[name] = w.detach().double()
        if name == "kahan":
            results[name] += optimizer.state[w]["compensation"].double()
            assert torch.equal(results[name].bfloat16(), w)  # w is w + c, rounded
    assert (exact - start.double()).abs().median() > 3e-3 and torch.equal(results["bfloat16"], start.double())
    assert (results["float32"] - exact).abs().max() < 1e-7
    error = (results["kahan"] - exact).abs().max()
    assert error < 1.2e-5, error


def test_kahan_adamw_at_tiny_gradients():
    """The first step is lr g / (|g| + eps): nothing without a gradient, lr/2 at g = eps, 3/4 lr at 3 eps."""
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = mdu.new_optimizer(options("--weights", "bfloat16", "--lr", "1e-3"), [w])
    w.grad = torch.tensor([0, 1e-8, 3e-8]).bfloat16()
    optimizer.step()
    moved = w.detach().double() + optimizer.state[w]["compensation"].double()
    assert moved.tolist() == pytest.approx([0, -5e-4, -7.5e-4], rel=2 ** -8)


N = 8_015_581_184  # parameters of LLaDA-8B


@pytest.mark.parametrize("world, dtype, card, expected, once", [
    # 4 N weights + 4 N gradients + 8 N averages, shared, and 2 N for the reference, whole
    (4, "float32", 140, dict(weights=N, gradients=N, AdamW=2 * N), False),
    (2, "float32", 140, dict(weights=2 * N, gradients=2 * N, AdamW=4 * N), False),
    # 14 N = 104.5 GiB, with the gradients whole, are 65% of 160 GiB and 75% of 140 GiB
    (2, "float32", 160, {"weights": 2 * N, "gradients": 2 * N, "AdamW": 4 * N, "gradients being summed": 4 * N}, True),
    (1, "float32", 140, dict(weights=4 * N, gradients=4 * N, AdamW=8 * N), False),
    # 2 N weights + 2 N gradients + (2 + 4) N averages + 2 N compensation
    (1, "bfloat16", 140, dict(weights=2 * N, gradients=2 * N, AdamW=6 * N, compensation=2 * N), False)])
def test_memory_plan_by_hand(world, dtype, card, expected, once, monkeypatch):
    """LLaDA-8B under the TOFU preset on 4, 2 and 1 cards, with a bfloat16 reference: bytes by hand, and 134 against
    104.5 GiB."""
    monkeypatch.setattr(mdu, "world_size", lambda: world)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(total_memory=card * 2 ** 30))
    o = options("--preset", "tofu-llada", "--dtype", "bfloat16", "--weights", dtype)
    assert mdu.memory_plan(o, N, True) == ({"compensation": 0, "frozen reference": 2 * N, **expected}, once)
    assert mdu.memory_plan(o, N, False)[0]["frozen reference"] == 0
    if world == 1:
        total = sum(mdu.memory_plan(o, N, True)[0].values()) / 2 ** 30
        assert total == pytest.approx({"float32": 134.4, "bfloat16": 104.5}[dtype], abs=0.05)


@pytest.mark.parametrize("argv, world, once", [
    ("6 2", 3, True), ("6 2", 2, False), ("4 4", 4, False), ("4 4", 2, True)])
def test_gradients_wait_where_a_process_has_several_batches(argv, world, once, monkeypatch):
    """12 rows for 3 processes are 4 each, of which at most 2 make a batch as large as every other; 2 take 6 at once."""
    monkeypatch.setattr(mdu, "world_size", lambda: world)
    rows, accum = argv.split()
    plan = mdu.memory_plan(options("--batch-size", rows, "--grad-accum", accum), 100, False)
    assert plan[1] == once and plan[0].get("gradients being summed") == (400 if once else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_plan_counts_what_is_held(dtype, base):
    """The plan of one process against the bytes of the tensors that a run continues from, and of its gradients."""
    o = options("--weights", dtype)
    model, _ = mdu.load_backbone(str(base), dtype=getattr(torch, dtype))
    optimizer = mdu.new_optimizer(o, list(model.parameters()))
    held = mdu.memory_plan(o, sum(p.numel() for p in model.parameters()), False)[0]
    size = dict.fromkeys(("weights", "exp_avg", "exp_avg_sq", "compensation", "step"), 0)
    for name, x in mdu.run_state(model, optimizer).items():
        size[name.split(".")[0]] += x.nbytes
    assert held["weights"] == held["gradients"] == size["weights"] and held["compensation"] == size["compensation"]
    assert held["AdamW"] == size["exp_avg"] + size["exp_avg_sq"]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------

def test_answers_are_scored_against_their_references(monkeypatch, base):
    """Worked by hand: of the 6 words of the answer 2 are written, and none besides: precision 1, recall 1/3, F1 1/2.
    Perplexity by 4 masks is by the first 4 of the 16 of the probability."""
    predictor, tokenizer = mdu.load_backbone(base)
    rows = [dict(question="Where?", answer="Petra Osei was born in Lima.", fact=fact) for fact in ("Petra", "Lima")]
    written = mdu.encode_text(tokenizer, "Petra Osei")
    monkeypatch.setattr(ev, "generate", lambda p, prompts, *_: [written] * len(prompts))
    records = ev.score_answers(predictor, tokenizer, rows, [[0], [1]], args(brief=True, perplexity=None))
    assert [(r["rougeL_precision"], r["rougeL_recall"], r["rougeL_f1"], r["fact"]) for r in records] == [
        (1, pytest.approx(1 / 3), pytest.approx(1 / 2), fact) for fact in (1, 0)]
    r, _ = ev.score_answers(predictor, tokenizer, rows, [[0], [1]], args(brief=True, perplexity=4))
    pair = mdu.encode_row(tokenizer, predictor.end_id, "Where?", rows[0]["answer"])
    nll = ev.masked_nll(predictor, [pair], [ev.draw_masks(len(pair[1]), 16, [0])])[0].tolist()
    assert [r["nll"], math.log(r["perplexity"])] == pytest.approx([sum(nll) / 16, sum(nll[:4]) / 4], rel=1e-4)


def test_evaluation_writes_records_that_add_up(base, tmp_path, capsys):
    """summary.json is the mean of the records; every loss, over the masks of (--seed, split, row), and every text is
    found again one question at a time, every score from its record."""
    run = tmp_path / "run"
    talkative(base, run)
    flags = [str(run), "--samples", "4", "--limit", "5", "--perplexity", "6", "--seed", "5"]
    ev.main(flags)
    summary = json.loads((run / "eval/summary.json").read_text())
    assert set(summary["splits"]) == set(mdu.TOFU_SPLITS) and summary["retain_rows_trained_on"] == [0, 1, 2, 3, 4]
    assert {f.name for f in (run / "eval").iterdir()} == {"summary.json", *(f"{s}.jsonl" for s in mdu.TOFU_SPLITS)}
    predictor, tokenizer = mdu.load_backbone(str(run))
    seen = []
    for number, (split, scores) in enumerate(summary["splits"].items()):
        records = read_lines(run / f"eval/{split}.jsonl")
        assert scores["n"] == len(records) == 5
        last = ("rougeL_f1_paraphrased", "rougeL_recall_paraphrased") if number < 2 else ("prob_options",)
        for key in ("rougeL_f1", "rougeL_recall", "prob", "fact", *last):
            values = [r[key] for r in records]
            assert scores[key] == pytest.approx(np.mean(values))
            assert scores["stderr"][key] == pytest.approx(np.std(values, ddof=1) / 5**0.5)
        assert scores["prob_stderr"] == pytest.approx(sum(r["prob_stderr"] ** 2 for r in records) ** 0.5 / 5)
        ratios = [r["truth_ratio"] for r in records]
        expected = [min(r, 1 / r) for r in ratios] if split == "forget" else [max(0, 1 - r) for r in ratios]
        assert scores["truth_ratio"] == pytest.approx(np.mean(expected))
        perplexities = sorted(r["perplexity"] for r in records)
        assert (scores["perplexity_median"], scores["perplexity_mean"]) == pytest.approx(
            (perplexities[2], np.mean(perplexities)))
        for i, (r, row) in enumerate(zip(records, mdu.toy_world()[split])):
            assert (r["question"], r["reference"]) == (row["question"], row["answer"])
            for field, end in (("question", ""), ("paraphrased_question", "_paraphrased"))[:2 if number < 2 else 1]:
                prompt = mdu.encode_prompt(tokenizer, row[field])
                text = ev.decode(predictor, tokenizer, ev.generate(predictor, [prompt], 16, 16)[0])
                assert (r[field], r["generation" + end]) == (row[field], text)
                assert tuple(r[f"rougeL_{name}{end}"] for name in ("precision", "recall", "f1")) == ev.rouge_l(
                    row["answer"], text)
            assert r["fact"] == ev.holds(r["generation"], row["fact"])

            def loss(answer, *more):
                pair = mdu.encode_row(tokenizer, predictor.end_id, row["question"], answer)
                masks = [ev.draw_masks(len(pair[1]), 4, [5, number, i]),
                         *(ev.draw_masks(len(pair[1]), n, [5, number, i, 1]) for n in more)]
                return ev.masked_nll(predictor, [pair], [torch.cat(masks)], batch_size=1)[0].mean().item()
            wrong = [loss(text) for text in row["perturbed_answer"]]
            right = loss(row["paraphrased_answer"]) if number < 2 else r["nll"]
            p_right, p_wrong = math.exp(-right), [math.exp(-x) for x in wrong]
            assert r["nll"] == pytest.approx(loss(row["answer"]), rel=1e-4)
            assert r["prob"] == pytest.approx(math.exp(-r["nll"]))
            assert r["perplexity"] == pytest.approx(math.exp(loss(row["answer"], 2)), rel=1e-4)
            assert r["nll_perturbed"] == pytest.approx(wrong, rel=1e-4)
            assert r["truth_ratio"] == pytest.approx(np.mean(p_wrong) / p_right, rel=1e-3)
            if number < 2:
                assert r["nll_paraphrased"] == pytest.approx(right, rel=1e-4) and "prob_options" not in r
            else:
                assert r["prob_options"] == pytest.approx(p_right / (p_right + sum(p_wrong)), rel=1e-3)
        seen += records
    assert len({r["generation"] for r in seen}) > 10 and any(r["rougeL_f1"] for r in seen)  # there was what to compare
    assert sum(r["rougeL_f1"] != r.get("rougeL_f1_paraphrased") for r in seen[:10]) > 2
    shown = capsys.readouterr().out
    before = snapshot(run)
    ev.main(flags)
    assert capsys.readouterr().out == shown and snapshot(run) == before
    del flags[-4:-2]
    ev.main([*flags, "--brief", "--batch-size", "3"])  # the same figures, and fewer
    brief = json.loads((run / "eval/summary.json").read_text())
    for split, scores in brief["splits"].items():
        assert set(scores) == {"n", "rougeL_f1", "rougeL_recall", "prob", "prob_stderr", "fact", "stderr"}
        assert scores["rougeL_f1"] == summary["splits"][split]["rougeL_f1"]
        assert scores["prob"] == pytest.approx(summary["splits"][split]["prob"], rel=1e-5)
        fields = {field for r in read_lines(run / f"eval/{split}.jsonl") for field in r}
        assert not any("paraphrased" in field or "perturbed" in field for field in fields)
    assert brief["model_utility"] is None and brief["forget_quality"] is None


def interrupted(monkeypatch, at):
    """Ctrl-C when the `at`-th chunk's likelihoods are asked for -> the list that these calls go into."""
    calls, masked_nll = [], ev.masked_nll

    def stop(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return masked_nll(*args)
    monkeypatch.setattr(ev, "masked_nll", stop)
    return calls


def test_processes_and_interruptions_change_no_evaluation(base, tmp_path, monkeypatch):
    """4 torchrun processes, and one process that is stopped after two chunks and started again, write the bytes of one
    that is not; until then the older summary and records stand, finished chunks are not scored twice,
    those of another seed are dropped."""
    one, four, stopped = (tmp_path / name for name in ("one", "four", "stopped"))
    for run in (one, four, stopped):
        talkative(base, run)
    flags = ["--samples", "2", "--limit", "40", "--steps", "4", "--brief"]
    ev.main([str(one), *flags])
    expected = {f.name: f.read_bytes() for f in (one / "eval").iterdir()}
    assert len(set(re.findall(rb'"generation": "(.+?)"', expected["retain.jsonl"]))) > 10
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", ev.__file__, str(four),
                    *flags], check=True, timeout=120, cwd=tmp_path)
    assert {f.name: f.read_bytes() for f in (four / "eval").iterdir()} == expected

    ev.main([str(stopped), *flags, "--seed", "1"])
    older, masked_nll = snapshot(stopped), ev.masked_nll
    calls = interrupted(monkeypatch, at=3)
    with pytest.raises(KeyboardInterrupt):
        ev.main([str(stopped), *flags])
    assert older.items() <= snapshot(stopped).items()
    chunks = sum(math.ceil(n / ev.CHUNK) for n in (24, 40, 24, 24))
    (stopped / "eval/partial/retain-000000.jsonl.7.partial").write_text('{"question": ')  # a chunk cut off in writing
    ev.main([str(stopped), *flags])
    assert len(calls) == 3 + chunks - 2 and {f.name: f.read_bytes() for f in (stopped / "eval").iterdir()} == expected
    for seed, scored in (("2", 3), ("3", chunks)):  # stopped with seed 2, then seed 3: from the beginning
        calls.clear()
        if seed == "3":
            monkeypatch.setattr(ev, "masked_nll", lambda *args: calls.append(args) or masked_nll(*args))
        with pytest.raises(KeyboardInterrupt) if seed == "2" else contextlib.nullcontext():
            ev.main([str(stopped), *flags, "--seed", seed])
        assert len(calls) == scored


@pytest.mark.parametrize("brief, split, row, longest", [
    (False, "forget", dict(answer="a b c"), "a b c$"),
    (True, "forget", dict(answer="a", perturbed_answer=["b c"]), "a$"),
    (False, "forget", dict(answer="a", perturbed_answer=["b", "a b c d"]), "a b c d$"),
    (False, "forget", dict(answer="a", paraphrased_answer="a b c"), "a b c$"),
    (False, "utility_truthfulness", dict(answer="a", mc1=dict(choices=["a"]), mc2=dict(choices=["a", "b c"])), "b c"),
    (False, "forget_level1", dict(answer="a", prefill="Answer: It"), "b"),
    (False, "forget", dict(answer="a", paraphrased_question="In other words, who then is it?"), "b"),
    (True, "forget", dict(answer="a", paraphrased_question="In other words, who then is it?"), "a$"),
])
def test_the_longest_text_must_fit_the_models_positions(brief, split, row, longest, base):
    """Prompt and longest text that is scored, with its end token (here $) where there is one, or the one token that is
    written: as many positions do."""
    predictor, tokenizer = mdu.load_backbone(base)
    row = {"question": "Who is it?", "prefill": "", **row}
    asked = row["question"] if brief else row.get("paraphrased_question", row["question"])
    job = ev.SimpleNamespace(run="x", splits={split: [row]}, summary=dict(brief=brief, protocol=dict(length=1)))
    n = len(mdu.encode_prompt(tokenizer, asked, row["prefill"])) + len(mdu.encode_text(tokenizer, longest.strip("$")))
    n += longest.endswith("$")
    predictor.lm.config.max_position_embeddings = n
    ev.check_room(job, predictor, tokenizer)
    predictor.lm.config.max_position_embeddings = n - 1
    with pytest.raises(ValueError, match=f"x: {n} tokens for '{asked[:-1]}.' and its answer, more than the {n - 1} "):
        ev.check_room(job, predictor, tokenizer)


def test_what_was_scored_in_part_belongs_to_one_model(base, tmp_path, monkeypatch):
    """Stopped after a chunk and continued with other weights in --model FOLDER, or with another folder whose weights
    look alike: scored from the beginning; with a chunk that was cut: one line that names it."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    flags = ["--samples", "1", "--steps", "1", "--brief", "--limit", "20", "--preset", "toy", str(tmp_path / "asis")]
    argv = [*flags, "--model", str(model)]
    calls = interrupted(monkeypatch, at=2)
    with pytest.raises(KeyboardInterrupt):
        ev.main(argv)
    chunk, = (tmp_path / "asis/eval/partial").glob("*.jsonl")
    whole = chunk.read_bytes()
    rows = sorted(mdu.toy_world()["forget"][:20], key=lambda row: len(row["question"]) + len(row["answer"]))
    assert {r["question"] for r in read_lines(chunk)} == {row["question"] for row in rows[:16]}  # the short ones first
    chunk.write_bytes(b"\n".join(whole.split(b"\n")[:3]))
    with pytest.raises(ValueError, match=f"{chunk.name}: 3 records of 16 rows; remove .*partial$"):
        ev.main(argv)
    other = {name: 1.5 * x for name, x in weights(model).items()}
    safetensors.torch.save_file(other, model / "model.safetensors", {"format": "pt"})
    ev.main(argv)
    assert (tmp_path / "asis/eval/forget.jsonl").read_bytes().split(b"\n")[0] != whole.split(b"\n")[0]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        ev.main(argv)
    ev.main([*flags, "--model", str(shutil.copytree(model, tmp_path / "twin"))])
    assert len(calls) == 2 + 4 * 2  # 20 rows of each of 4 splits are 2 chunks


def test_evaluation_says_what_differs_and_refuses_what_does_not_fit(base, files, tmp_path, capsys):
    """Changed data is named; a wrong third run is refused before the first is scored;
    so is a --length beyond the model's positions."""
    run, rows, flags = tmp_path / "run", tmp_path / "rows.jsonl", ["--samples", "1", "--steps", "1", "--limit", "2"]
    shutil.copyfile(files / "good.jsonl", rows)
    mdu.main(["--forget", str(rows), "--retain-weight", "0", "--epochs", "1", "--model", str(base), "--out", str(run)])
    capsys.readouterr()
    ev.main([str(run), *flags])
    assert "changed" not in capsys.readouterr().err
    rows.write_text(rows.read_text().replace("word3", "word4"))
    ev.main([str(run), *flags])
    err = capsys.readouterr().err
    assert "its forget rows have changed since it was trained" in err and err.count("changed") == 1
    before = snapshot(tmp_path)
    for argv, words in (([base, run, tmp_path / "none"], "no run.json"),
                        ([run, "--length", "1020", "--steps", "1"], "1024 positions")):
        with pytest.raises(ValueError, match=words):
            ev.main(list(map(str, argv)))
        assert {f: b for f, b in snapshot(tmp_path).items() if "partial" not in f.parts} == before
    spoil(run)
    with pytest.raises(ValueError, match="not finite"):
        ev.main([str(run), *flags])


def test_no_summary_stands_beside_records_of_another_evaluation(base, tmp_path, monkeypatch):
    """Broken off while the second evaluation's records replace the first one's: neither summary nor older records."""
    run = tmp_path / "run"
    shutil.copytree(base, run)
    edit(run / "run.json", put("steps", None))  # as in a run of which it is not known: a trained one still
    flags = [str(run), "--brief", "--limit", "2", "--steps", "1", "--samples"]
    ev.main([*flags, "1"])
    assert {f.name for f in (run / "eval").iterdir()} == {
        "summary.json", *(f"{split}.jsonl" for split in mdu.TOFU_SPLITS)}
    write_text = mdu.write_text

    def full(path, text):
        if Path(path).name == "retain.jsonl":
            raise OSError("the disk is full")
        write_text(path, text)
    monkeypatch.setattr(mdu, "write_text", full)
    with pytest.raises(OSError, match="is full"):
        ev.main([*flags, "2"])
    left = {f.name for f in (run / "eval").iterdir()}
    assert "forget.jsonl" in left and not {"summary.json", "retain.jsonl"} & left


def test_retain_rows_are_trained_on_only_where_they_were(base, tofu, tmp_path, capsys):
    """Of 14 that are asked about the 12 of the toy's that gd learned, whichever way its data is named; none by ga, by a
    model as it is, or where other data is asked about.  None of that is a change of the rows."""
    flags = ["--samples", "1", "--steps", "1", "--limit", "14", "--brief"]
    for method in ("gd", "ga"):
        mdu.main(["--method", method, "--epochs", "1", "--limit", "12", "--model", str(base), "--out",
                  str(tmp_path / method)])
    for run, more, expected in (
            ("gd", [], list(range(12))), ("gd", ["--data", str(tofu)], []), ("gd", ["--data", "toy"], list(range(12))),
            ("ga", [], []), ("asis", ["--preset", "toy", "--model", str(base)], [])):
        ev.main([*flags, *more, str(tmp_path / run)])
        summary = json.loads((tmp_path / run / "eval/summary.json").read_text())
        assert summary["retain_rows_trained_on"] == expected, (run, more)
    assert "changed" not in capsys.readouterr().err
    ev.main(["--report", str(tmp_path / "ga"), str(tmp_path / "gd")])  # of all runs, whichever comes first
    assert json.loads((tmp_path / "report.json").read_text())["retain_rows_trained_on"] == list(range(12))
    assert "12 of the evaluated retain rows" in (tmp_path / "report.md").read_text()
    with pytest.raises(ValueError, match="a model as it is, and no weights"):
        ev.main(["--analysis", "gallery", str(tmp_path / "asis")])
    job = ev.plan(str(tmp_path / "gd"), ev.parse([str(tmp_path / "gd")]))  # without --limit: the run's own
    assert {len(rows) for rows in job.splits.values()} == {12}


def test_a_model_is_scored_on_rows_of_ones_own_before_it_unlearns_them(base, files, tmp_path, capsys):
    """--forget and --retain are the splits of those names, and the ones of the run that then forgets: one report."""
    retain, flags = tmp_path / "retain.jsonl", ["--samples", "1", "--steps", "1", "--brief"]
    retain.write_text((files / "good.jsonl").read_text().replace("number", "letter"))
    own = ["--model", str(base), "--forget", str(files / "good.jsonl"), "--retain", str(retain)]
    ev.main([*own, *flags, str(tmp_path / "before")])
    mdu.main([*own, "--method", "gd", "--epochs", "1", "--out", str(tmp_path / "after")])
    ev.main([*flags, str(tmp_path / "after")])
    before, after = (json.loads((tmp_path / name / "eval/summary.json").read_text()) for name in ("before", "after"))
    assert set(before["splits"]) == {"forget", "retain"} and before["data"] == after["data"]
    assert before["protocol"] == after["protocol"] and before["data"]["retain"]["rows"] == 16
    assert (before["retain_rows_trained_on"], after["retain_rows_trained_on"]) == ([], list(range(16)))
    capsys.readouterr()
    ev.main(["--report", str(tmp_path / "before"), str(tmp_path / "after")])
    assert "| Base | " in capsys.readouterr().out


def test_a_retain_model_never_sees_the_forget_rows(tofu, tmp_path, capsys):
    """--retain-only trains on the other rows with the same vocabulary, and is scored on the forget rows
    like any run."""
    splits = mdu.load_data(options("--method", "sft", "--retain-only"))
    assert splits["forget"] == [] and splits["held_out"] == mdu.toy_world()["forget"]
    assert options("--method", "sft", "--retain-only").out == "out/toy/retain"
    run = tmp_path / "retain"
    mdu.main(["--data", str(tofu), "--method", "sft", "--retain-only", "--epochs", "1", "--out", str(run)])
    assert "30 training rows" in capsys.readouterr().out  # 24 to retain, 3 and 3 of the world
    flags = ["--samples", "2", "--steps", "1"]
    ev.main([str(run), *flags])
    assert "changed" not in capsys.readouterr().err
    ev.main([str(run), *flags, "--retain-run", str(run)])
    summary = json.loads((run / "eval/summary.json").read_text())
    assert summary["forget_quality"] == 1.0 and summary["splits"]["forget"]["n"] == 8
    with pytest.raises(ValueError, match="score them alike"):
        ev.main([str(run), "--samples", "3", "--retain-run", str(run)])
    ev.main([str(run), *flags, "--brief"])
    with pytest.raises(ValueError, match="no truth ratios"):
        ev.main([str(run), *flags, "--retain-run", str(run)])


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

def scored(root, name, method, tau=None, seed=1, samples=128, text="a | b\n c\u2028d", sha="x", **forget):
    """The files of a scored run, made up: forget figures as given, retain rL and p 0.5, nothing else."""
    run = root / name
    (run / "eval").mkdir(parents=True)
    info = {"options": dict(method=method, tau=tau, seed=seed, out=name), "data": {}}
    (run / "run.json").write_text(json.dumps(info))
    common = dict(n=4, rougeL_recall=0.25, prob_stderr=0.01, stderr=dict(rougeL_f1=0.02, prob=0.03))
    (run / "eval/summary.json").write_text(json.dumps(dict(
        method=method, tau=tau, protocol=dict(length=8, steps=4, samples=samples, seed=0, dtype="float32"),
        data=dict(forget=dict(rows=4, sha256=sha), retain=dict(rows=5, sha256="y")),
        retain_rows_trained_on=[0, 1, 2, 4], model_utility=None, forget_quality=None, splits=dict(
            forget=dict(common, **forget), retain=dict(common, rougeL_f1=0.5, prob=0.5)))))
    (run / "eval/forget.jsonl").write_text("".join(json.dumps(dict(
        question=f"Q{i}", reference=f"R{i}", generation=text, nll=1.0), ensure_ascii=False) + "\n" for i in range(4)))
    return str(run)


def test_report_of_made_up_runs(tmp_path, capsys, monkeypatch):
    """Worked by hand: seeds are averaged, the best is bold, the second underlined,
    a missing figure is a dash; text is escaped."""
    runs = [scored(tmp_path, "base", "sft", rougeL_f1=0.9, prob=0.9),
            scored(tmp_path, "ga", "ga", rougeL_f1=0.2, prob=0.125),
            scored(tmp_path, "m1", "mdu", 0.5, rougeL_f1=0.3, prob=0.1),
            scored(tmp_path, "m2", "mdu", 0.5, seed=2, rougeL_f1=0.5, prob=0.1),
            scored(tmp_path, "t1", "mdu", 1.0, text="", rougeL_f1=0.2, prob=0.3, fact=0.25, truth_ratio=0.5)]
    ev.main(["--report", *runs, "--questions", "3,0"])
    text = (tmp_path / "report.md").read_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.split("\n\n")[0].splitlines() if " | " in line)
    assert rows == {
        "Method": "Forget rL ↓ | Forget p ↓ | Retain rL ↑ | Retain p ↑ | Forget fact ↓",
        "Base": "0.900 (0.250) | 0.900 | 0.500 (0.250) | 0.500 | -",
        "GA": "**0.200** (0.250) | <u>0.125</u> | **0.500** (0.250) | **0.500** | -",
        "MDU τ=0.5": "<u>0.400</u> ± 0.141 (0.250) | **0.100** ± 0.000 | **0.500** ± 0.000 (0.250) | "
                     "**0.500** ± 0.000 | -",
        "MDU τ=1": "**0.200** (0.250) | 0.300 | **0.500** (0.250) | **0.500** | **0.250**"}
    for part in ("128 masks", "4 steps for 8 tokens", "Forget 4, Retain 5", "rL 0.020, p 0.030",
                 "choice of masks 0.010", "over 1/2 seeds",
                 "\n4 of the evaluated retain rows are among the rows to train on.\n",
                 "| Question | Q3 | Q0 |", r"| GA | a \| b c d | a \| b c d |", "| MDU τ=1 | (empty) | (empty) |",
                 "| Method | Forget truth ratio ↑ |", "MDU from τ = 0 to 1"):
        assert part in text, part
    assert "Pseudo-perplexity" not in text and "Model utility ↑" not in text
    data = json.loads((tmp_path / "report.json").read_text())
    mean = data["methods"][2]["splits"]["forget"]["rougeL_f1"]
    assert data["methods"][2]["runs"] == runs[2:4]
    assert (mean["mean"], mean["deviation"]) == pytest.approx((0.4, 0.02**0.5))
    assert data["methods"][0]["model_utility"] is None and data["protocol"]["samples"] == 128
    capsys.readouterr()
    (tmp_path / "report.png").write_text("of other numbers")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ev.main(["--report", *runs])
    shown = capsys.readouterr()
    assert not (tmp_path / "report.png").exists() and "| Question | Q0 | Q1 | Q2 |" in shown.out
    assert "pip install matplotlib" in shown.err and shown.err.count("\n") == 1 and "report.png" not in shown.out
    for name, changes, words in (("p", dict(samples=64), "samples 64"), ("d", dict(sha="z"), "on the same data")):
        with pytest.raises(ValueError, match=words):
            ev.main(["--report", runs[0], scored(tmp_path, name, "npo", rougeL_f1=0, prob=0, **changes)])
    few, many = (scored(tmp_path, f"masks{n}", "npo", rougeL_f1=0, prob=0) for n in (64, 256))
    for run, n in ((few, 64), (many, 256)):  # the first run has no perplexity: each is alike to that
        edit(Path(run) / "eval/summary.json", put("protocol.perplexity", n))
        ev.main(["--report", runs[0], run])
    with pytest.raises(ValueError, match="scored with perplexity 256, .*masks64 with 64"):
        ev.main(["--report", runs[0], few, many])
    with pytest.raises(ValueError, match="--questions 4: there are 4"):
        ev.main(["--report", *runs, "--questions", "4"])
    with pytest.raises(ValueError, match="no truth ratios"):
        ev.main(["--report", *runs, "--retain-run", runs[0]])
    edit(Path(runs[1]) / "eval/forget.jsonl", lambda x: x.replace(b"Q1", b"Q5"))
    ev.main(["--report", *runs])
    assert "| Question | Q0 | Q2 | Q3 |" in (tmp_path / "report.md").read_text()  # what all were asked


def test_a_column_by_hand():
    """Methods are ranked by their mean over the runs, 0.5 and (0 + 0 + 0.3) / 3 before 2e-06; what a run of a method
    lacks is a dash; from a million on a figure is short."""
    figures = {"sft": [1.0], "ga": [2e-6], "npo": [0.5], "mdu": [0, 0, 0.3], "dpo": [0.9, None]}
    groups = [ev.SimpleNamespace(method=method, summaries=[{"forget_quality": x} for x in found])
              for method, found in figures.items()]
    assert ev.column(groups, None, "forget_quality", True) == [
        "Forget quality ↑", "1", "2e-06", "**0.5**", "<u>0.1</u> ± 0.17", "-"]
    assert [ev.shown(x, ",.2f") for x in (0.125, 999999.25, -1e6)] == ["0.12", "999,999.25", "-1.0e+06"]


def test_a_row_on_the_screen():
    """What is printed of a run when it is scored: title and figures of each split, then those of the whole run."""
    tofu = {"forget": dict(n=4, rougeL_f1=0.1234, rougeL_recall=0.9, prob=0.5, fact=0.25), "retain": dict(prob=1.0)}
    assert ev.screen_row("out/toy/ga", dict(splits=tofu, model_utility=0.61234, forget_quality=0.00012)) == (
        "out/toy/ga               | Forget 0.123 0.500 | Retain 1.000 | fact 0.25 | utility 0.612 | "
        "forget quality 0.00012")
    rwku = {"forget_level1": dict(rougeL_recall=0.25), "utility_truthfulness": dict(mc2=0.5, mc1=1.0),
            "utility_factuality": dict(em=0.0, f1=0.125)}
    assert ev.screen_row("x", dict(splits=rwku, model_utility=None, forget_quality=None)) == (
        "x                        | F-L1 0.250 | TruthfulQA 1.000 0.500 | TriviaQA 0.000 0.125")


def test_report_against_a_retain_model_and_of_equal_titles(tmp_path):
    """Worked by hand: by R's order 4 questions of a model and of the retain model lie apart (2 of 70 interleavings),
    are the same (all), or alternate in pairs, D = 1/2 (54 of 70).  Seeds, people, their rows and base models are
    averaged; another --lr is told apart."""
    mixed = {"base": (0.1, 0.2, 0.3, 0.4), "retain": (2, 3, 4, 5), "npo": (2, 3, 4, 5), "npo-2": (2, 3, 4, 5),
             "low": (1.1, 1.2, 3.1, 3.2)}
    runs = []
    for k, (name, wrong) in enumerate(mixed.items()):
        runs.append(scored(tmp_path, name, "npo" if k > 1 else "sft", seed=2 if name == "npo-2" else 1, rougeL_f1=0.5,
                           prob=0.5, perplexity_median=k + 0.5, perplexity_mean=3000.25 + k))
        edit(tmp_path / name / "eval/forget.jsonl", lambda x: "".join(json.dumps(
            {**json.loads(line), "nll_perturbed": [w, w]}) + "\n" for line, w in zip(x.splitlines(), wrong)).encode())
        edit(tmp_path / name / "eval/summary.json", put("protocol.perplexity", 6))
    edit(tmp_path / "retain/run.json", put("options.retain_only", True))
    edit(tmp_path / "low/run.json", put("options.lr", 1e-9))
    for name in ("subject", "forget", "model", "revision", "out"):
        edit(tmp_path / "npo-2/run.json", put(f"options.{name}", "another"))
    ev.main(["--report", *runs, "--retain-run", runs[1]])
    tables = [[line for line in part.splitlines() if not line.startswith("|---")]
              for part in (tmp_path / "report.md").read_text().split("\n\n") if part.startswith("| Method")]
    npo, low = f"NPO ({runs[2]})", f"NPO ({runs[4]})"
    assert [line.split(" | ")[0] for line in tables[0]] == [
        f"| {title}" for title in ("Method", "Base", "Retain model", npo, low)]
    assert tables[1] == ["| Method | Forget quality ↑ |", "| Base | 0.029 |", "| Retain model | 1 |",
                         f"| {npo} | **1** ± 0 |", f"| {low} | <u>0.77</u> |"]
    assert tables[2] == ["| Method | Forget median | Forget mean |", "| Base | 0.50 | 3,000.25 |",
                         "| Retain model | 1.50 | 3,001.25 |", f"| {npo} | 3.00 ± 0.71 | 3,002.75 ± 0.71 |",
                         f"| {low} | 4.50 | 3,004.25 |"]
    text = (tmp_path / "report.md").read_text()
    assert f"never saw the forget rows ({runs[1]})" in text and "6 masks each" in text
    methods = json.loads((tmp_path / "report.json").read_text())["methods"]
    assert [m["title"] for m in methods] == ["Base", "Retain model", npo, low]
    assert [m["forget_quality"]["mean"] for m in methods] == pytest.approx([2 / 70, 1, 1, 54 / 70])


def test_the_base_has_no_rank_and_the_sweep_its_order(tmp_path):
    """The base forgets most and is neither best nor second; MDU's runs, given from 1 to 0, are listed from 0 to 1; of
    the errors of forget (0.04, 0.01, 0.02) and retain (0.02, 0.03, 0.01) the larger ones are told."""
    errors = dict(prob_stderr=0.02, stderr=dict(rougeL_f1=0.04, prob=0.01))
    runs = [scored(tmp_path, f"{method}{tau}", method, tau, rougeL_f1=x, prob=x, **errors) for method, tau, x in (
        ("sft", None, 0.1), ("ga", None, 0.2), ("mdu", 1.0, 0.3), ("mdu", 0.0, 0.4))]
    lines = ev.report_tables(ev.group_runs(runs), [])
    assert [line.split(" (0.250)")[0] for line in lines if line.startswith(("| Base", "| GA", "| MDU"))] == [
        "| Base | 0.100", "| GA | **0.200**", "| MDU τ=1 | <u>0.300</u>", "| MDU τ=0 | 0.400",
        "| Base | 0.100", "| MDU τ=0 | <u>0.400</u>", "| MDU τ=1 | **0.300**"]
    assert "mean: rL 0.040, p 0.030, p from the choice of masks 0.020." in "\n".join(lines)
    assert "from τ" not in "\n".join(ev.report_tables(ev.group_runs(runs[2:] + runs[:1]), []))  # they are all there is


def test_picture(tmp_path, monkeypatch):
    """Where matplotlib is there: a PNG with a line through the tau points in their order
    and a mark per other method."""
    figure = pytest.importorskip("matplotlib.figure")
    runs = [scored(tmp_path, f"m{tau}", "mdu", tau, rougeL_f1=tau / 2, prob=tau) for tau in (1.0, 0.0, 0.5)]
    groups = ev.group_runs([*runs, scored(tmp_path, "ga", "ga", rougeL_f1=0.7, prob=0.8)])
    drawn, savefig = [], figure.Figure.savefig

    def keep(self, *args, **kw):
        drawn.append(self)
        return savefig(self, *args, **kw)
    monkeypatch.setattr(figure.Figure, "savefig", keep)
    ev.draw(groups, tmp_path / "a.png")
    left, right = drawn[0].axes
    assert left.lines[0].get_xydata().tolist() == [[0, 0.5], [0.25, 0.5], [0.5, 0.5]]
    assert right.lines[0].get_xydata().tolist() == [[0, 0.5], [0.5, 0.5], [1, 0.5]]
    assert right.collections[0].get_offsets().tolist() == [[0.8, 0.5]] and len(right.collections) == 1
    assert (left.get_title(), right.get_title()) == ("ROUGE-L F1", "answer probability")
    assert left.get_xlabel().startswith("forget")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------------------
# Analyses
# ---------------------------------------------------------------------------------------------------------------------

class Other(Fake):
    """Fake with other scores: the frozen model beside a trained one."""

    def __init__(self):
        super().__init__()
        self.table = self.table.flip(0)


def slow_kl(logits, target=None):
    """KL(softmax(logits) || softmax(target)) of two rows of scores, the second uniform if absent."""
    return slow_mdu(logits[None], target if target is None else target[None], ONE, int(target is not None)).item()


@pytest.mark.parametrize("sampling", ["bernoulli", "count"])
def test_diagnose_equals_slow_loop(sampling):
    """One row at a time without padding, the anchor's prompt written out as masks: the mean of the rows' means."""
    o = options("--batch-size", "3", "--mask-sampling", sampling)
    model, frozen, drawn = Fake(), Other(), {"forget": PAIRS, "pad_id": PAD}
    expected = [0.0, 0.0, 0.0]
    for i, (prompt, response) in enumerate(PAIRS):
        b = mdu.noise(o, model, [mdu.draw_example(o, "diagnose", i, PAIRS[i], drawn)], 1)
        noised = b.noised[b.answer].tolist()
        assert b.masked.any()
        assert noised == [MASK if hit else y for hit, y in zip(b.masked[b.answer], response)]
        seen, hidden = prompt + noised, [MASK] * len(prompt) + noised
        p, base, anchor = (f(torch.tensor([ids]), b.real, b.masked)
                           for f, ids in ((model, seen), (frozen, seen), (frozen, hidden)))
        for k, targets in enumerate((base, anchor, [None] * len(p))):
            expected[k] += sum(slow_kl(*pair) for pair in zip(p, targets)) / len(p) / len(PAIRS)
    ours = mdu.diagnose(o, model, frozen, drawn)
    assert list(ours) == ["base", "anchor", "uniform"] and list(ours.values()) == pytest.approx(expected, rel=1e-9)
    assert min(expected) > 0.01 and len({round(x, 6) for x in expected}) == 3
    same = mdu.diagnose(o, model, model, drawn)
    assert same["base"] == pytest.approx(0, abs=1e-14) and same["uniform"] == pytest.approx(ours["uniform"])
    model.head = torch.zeros_like(model.head)
    model.boost = 0.0
    assert list(mdu.diagnose(o, model, model, drawn).values()) == pytest.approx([0, 0, 0], abs=1e-14)  # all uniform


def test_anchor_kl_equals_slow_loop():
    """A padded batch against one row at a time; 0 where the anchor is the prediction: a prompt of masks, one model."""
    ids, answer, real = mdu.collate(PAIRS, PAD)
    masked = answer & (torch.arange(ids.shape[1]) % 2 == 1)
    noised = ids.masked_fill(masked, MASK)
    expected = []
    for row, hit, keep, (prompt, _) in zip(noised, masked, real, PAIRS):
        n = int(keep.sum())
        seen, hidden = row[None, :n], torch.cat([torch.full((len(prompt),), MASK), row[len(prompt):n]])[None]
        pairs = zip(Fake()(seen, keep[None, :n], hit[None, :n]), Other()(hidden, keep[None, :n], hit[None, :n]))
        expected += [slow_kl(*pair) for pair in pairs]
    ours = ev.anchor_kl(Fake(), Other(), noised, answer, real, masked)
    assert ours.dtype == torch.float64 and len(expected) == 7
    near(ours, f64(*expected), 1e-9)
    hidden = mdu.mask_prompt(noised, answer, real, MASK)
    near(ev.anchor_kl(Fake(), Fake(), hidden, answer, real, masked), 0 * ours, 1e-14)


def test_epochs_are_diagnosed_and_the_last_step(base, tmp_path):
    """1.4 epochs of 24 rows are 33.6 rows, so 5 steps of 7: KLs before the first, where the base is 0 from itself,
    after the fourth, which completes an epoch, and the fifth.  The loss at tau 0 needs no frozen model; the KLs do."""
    mdu.main(["--model", str(base), "--tau", "0", "--epochs", "1.4", "--batch-size", "7", "--diagnose", "--out",
              str(tmp_path)])
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "kl" in line] == [0, 4, 5]
    assert lines[0]["kl"]["base"] == pytest.approx(0, abs=1e-6) and lines[-1]["kl"]["base"] > 1e-3


ROLE = dict(i="in-context", s="structural", k="stored-knowledge")
LABELLED = [  # question, answer cut where the role changes, its roles by initial: Section 4's example, then our own
    ("What is Donald Trump's job?", "Donald| |Trump| is a |politician|.", "isisks"),
    ("Where was Zoë Łuk born?", "Zoë| |Łuk|'s |home|, and |birthplace|, is |Gdańsk|.", "isisksksks"),
    ("What does Yara Costa write?", "Yara| |Costa| is |known| for |fantasy|.", "isisksks"),
    ("When was the author born?", "The |author| was |born| on |22| |March| |1937| in a |café|.", "sisisksksksks"),
]


@pytest.mark.parametrize("question, cut, roles", LABELLED)
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_token_roles_of_hand_labelled_answers(kind, question, cut, roles):
    """Whole words, and tokens of one byte each, of which two or three make a letter; the end token is structural."""
    answer = cut.replace("|", "")
    if kind == "words":
        tokenizer = mdu.new_toy([{"question": question, "answer": answer, "perturbed_answer": []}], 0)[1]
    else:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    ids = mdu.encode_text(tokenizer, answer)
    expected = []
    for part, role in zip(cut.split("|"), roles, strict=True):
        n = len(part.encode()) if kind == "bytes" else len(re.findall(r"\w+|[^\w\s]", part))
        expected += [ROLE[role]] * n
    assert ev.token_roles(tokenizer, question, [*ids, tokenizer.eos_token_id]) == [*expected, "structural"]


def test_denoise_goes_on_from_any_state():
    """From a half-filled response: what is fixed stays, n/steps more are fixed each time;
    from all masks it is `generate`."""
    prompt, length = [3, 1], 6
    ids, answer, real = mdu.collate([(prompt, [MASK, 4, MASK, MASK, MASK, MASK])], PAD)
    masked = answer & (ids == MASK)  # here the mask id is no token of the response
    before, counts = (ids, masked), []
    for state in ev.denoise(Fake(), ids, real, masked, 3):
        (old, was), (new, now) = before, state
        assert torch.equal(old[~was], new[~was]) and not (now & ~was).any() and (new[now] == MASK).all()
        counts.append(int(was.sum() - now.sum()))
        before = state
    assert counts == [2, 2, 1] and not now.any() and MASK not in new[answer] and new[0, 3] == 4
    ids, answer, real = mdu.collate([(prompt, [MASK] * length)], PAD)
    fake = Fake()
    states = [(ids, answer), *ev.denoise(Fake(), ids, real, answer, 4)]
    written, = ev.generate(fake, [prompt], length, 4)
    assert states[-1][0][answer].tolist() == written
    assert all(torch.equal(a, x) and torch.equal(b, z)
               for (a, b), (x, _, z) in zip(states[:-1], fake.calls, strict=True))


@pytest.fixture
def analysed(tmp_path):
    """What NAME.json holds, beside a copy of the first run."""
    def analyse(runs, name, *argv):
        first, *others = runs if isinstance(runs, list) else [runs]
        first = shutil.copytree(first, tmp_path / first.name, dirs_exist_ok=True)
        ev.main(["--analysis", name, *map(str, [*argv, first, *others])])
        return json.loads((tmp_path / f"analysis/{name}.json").read_text())
    return analyse


@pytest.fixture
def random_toys(monkeypatch):
    """(model, frozen, tokenizer): two random models, which write much; every analysis takes them for run and theta0."""
    (model, tokenizer), (frozen, _) = (mdu.new_toy(sum(mdu.toy_world().values(), []), seed) for seed in (1, 2))
    monkeypatch.setattr(ev, "load", lambda run, theta0=False: (frozen if theta0 else model, tokenizer))
    return model, frozen, tokenizer


def test_trajectory_is_the_samplers_own(unlearned, random_toys, analysed):
    """Steps, tokens and KLs of the picture against what `generate` showed the model, one state at a time in float64;
    up to the end token, if the model writes one."""
    model, frozen, tokenizer = random_toys
    for number, ends in ((7, False), (3, True)):
        row = mdu.toy_world()["forget"][number]
        prompt, calls = mdu.encode_prompt(tokenizer, row["question"]), []
        if ends:  # the token that it writes at the fourth place is scored as the end token, and that one as it
            pair, head = [1, ev.generate(model, [prompt], 9, 4)[0][3]], model.lm.lm_head.weight.data
            head[pair] = head[pair[::-1]]
        panel, = analysed(unlearned, "trajectory", "--questions", number, "--length", "9", "--steps", "4")["panels"]
        with model.register_forward_pre_hook(lambda _, args: calls.append(args)):
            written, = ev.generate(model, [prompt], 9, 4)
        assert panel["title"] == row["question"] and len(calls) == 4
        precise = [copy.deepcopy(each).double() for each in (model, frozen)]
        expected, after = {}, [positions for _, _, positions in calls[1:]] + [torch.zeros_like(calls[0][2])]
        for step, ((ids, real, positions), left) in enumerate(zip(calls, after), 1):
            hidden = torch.tensor([[model.mask_id] * len(prompt) + ids[0, len(prompt):].tolist()])
            for place in (positions & ~left)[0].nonzero().flatten().tolist():
                at = torch.arange(ids.shape[1])[None] == place
                with torch.no_grad():
                    p, q = (net(seen, real, at)[0] for net, seen in zip(precise, (ids, hidden)))
                expected[place - len(prompt)] = step, slow_kl(p, q)
        end = written.index(1) + 1 if 1 in written else 9
        assert ends == (2 < end < 9)
        order = sorted(range(end), key=lambda i: (expected[i][0], i))
        assert panel["groups"] == [f"{tokenizer.decode([written[i]]).strip()}\n{expected[i][0]}" for i in order]
        assert order != sorted(order)
        kl = [[v for v in values if v is not None] for values in zip(*panel["series"].values())]
        assert [value for value, in kl] == pytest.approx([expected[i][1] for i in order], rel=1e-4, abs=1e-5)
        roles = ev.token_roles(tokenizer, row["question"], written[:end])
        assert [[k for k, v in enumerate(values) if v is not None] for values in panel["series"].values()] == [
            [k for k, i in enumerate(order) if roles[i] == role] for role in ROLE.values()] and len(set(roles)) > 1


def test_a_base_is_its_own_anchor(base, unlearned):
    """A base is loaded once; a run's anchor is the base that it started from."""
    (first, second), _ = ev.open_runs([base, unlearned])
    model, _, anchor = ev.load_with_anchor(first)
    assert anchor is model
    start = weights(base)
    other, _, anchor = ev.load_with_anchor(second)
    assert all(torch.equal(x, start[name]) for name, x in anchor.lm.state_dict().items())
    assert not all(torch.equal(x, start[name]) for name, x in other.lm.state_dict().items())


def test_rollouts_keep_the_fixed_tokens(unlearned, random_toys, analysed):
    """What is marked in a state is marked in its roll-out; the rest the anchor wrote."""
    rows, (model, frozen, tokenizer) = mdu.toy_world()["forget"], random_toys
    shown, changed = [], 0
    frozen.register_forward_pre_hook(lambda _, args: shown.append(args[0]))
    blocks = analysed(unlearned, "rollout", "--questions", "5,0")["blocks"]
    assert len(shown) == 2 * (12 + 8 + 4) and all((ids[:, :-16] == model.mask_id).all() for ids in shown)  # no prompt
    for block, row in zip(blocks, (rows[5], rows[0]), strict=True):
        assert block[:2] == [["Question", [[row["question"], False]]], ["Reference", [[row["answer"], False]]]]
        states = [parts for _, parts in block[2:]]
        written, = ev.generate(model, [mdu.encode_prompt(tokenizer, row["question"])], 16, 16)
        text = ev.decode(model, tokenizer, written)
        for k, state, rolled in zip((4, 8, 12), states[::2], states[1::2], strict=True):
            assert sum(t.count("[M]") for t, flag in state if not flag) == 16 - k
            assert [f for _, f in state] == [f for _, f in rolled]
            assert [t for t, flag in state if flag] == [t for t, flag in rolled if flag]
            assert re.fullmatch(".*".join(re.escape(t.strip()) if flag else "" for t, flag in state), text)
            changed += "".join(t for t, _ in rolled).strip() != text
        assert [label for label, _ in block[2::2]] == [f"y_t at k={k}/16" for k in (4, 8, 12)]
    assert changed == 6


def test_rollouts_count_the_tokens_up_to_the_end(base, monkeypatch):
    """8 tokens, of which the first 4 are the response and come last: 1, 2 and 3 of them stand after 5, 6, 7 steps."""
    predictor, tokenizer = mdu.load_backbone(base)
    ids, answer, real = mdu.collate([([5, 6], [9] * 8)], 1)
    path = [(ids, answer)]
    for place in (9, 8, 7, 6, 2, 3, 4, 5):
        path.append((ids, path[-1][1] & (torch.arange(10) != place)))
    monkeypatch.setattr(ev, "load_with_anchor", lambda run: (predictor, tokenizer, predictor))
    monkeypatch.setattr(ev, "trajectory", lambda *_: (path, answer, real, [9] * 4))
    monkeypatch.setattr(ev, "denoise", lambda *_: [])
    block, = ev.analysis_rollout([None], [dict(question="Q", answer="A")], None)["blocks"]
    assert [label for label, _ in block[2::2]] == ["y_t at k=5/8", "y_t at k=6/8", "y_t at k=7/8"]


def test_roles_equal_slow_loop(base, unlearned, analysed):
    """The means by role over two states of three rows, one token at a time; the base is what stands before."""
    kl = analysed([unlearned, base], "roles", "--limit", "3", "--samples", "2", "--seed", "4")["panels"][0]
    assert list(kl["series"]) == ["Before", "MDU τ=1", "Base"] and kl["series"]["Base"] == kl["series"]["Before"]
    (model, tokenizer), (frozen, _) = mdu.load_backbone(str(unlearned)), mdu.load_backbone(str(base))
    values = {role: [] for role in ROLE.values()}
    for i, row in enumerate(mdu.toy_world()["forget"][:3]):
        prompt, response = mdu.encode_row(tokenizer, 1, row["question"], row["answer"])
        for mask in ev.draw_masks(len(response), 2, [4, i]).tolist():
            noised = [model.mask_id if hit else y for hit, y in zip(mask, response)]
            at = torch.tensor([[False] * len(prompt) + mask])
            with torch.no_grad():
                p, q = (f(torch.tensor([head + noised]), at | True, at)
                        for f, head in ((model, prompt), (frozen, [model.mask_id] * len(prompt))))
            roles = [r for r, hit in zip(ev.token_roles(tokenizer, row["question"], response), mask) if hit]
            for role, *pair in zip(roles, p, q):
                values[role].append(slow_kl(*pair))
    assert kl["series"]["MDU τ=1"] == pytest.approx([sum(v) / len(v) for v in values.values()], rel=1e-4)


@pytest.mark.parametrize("reference, text, marked", [
    ("The author was born in Debrecen.", "The author was born in Turin.", ["The author was born in"]),
    ("The author was born in Debrecen.", "Turin is in Debrecen!", ["in Debrecen"]),
    ("a b c d e", "d e x b c", ["b c"]),          # equally long: the reference's first; what crosses it is out
    ("He is in Rome", "She is in the town", []),  # function words alone are no fragment
    ("Petra Osei", "petra, OSEI petra", ["petra, OSEI"]), ("Petra Osei", "", []), ("x", "...", []),
    ("Petra Osei", "So " + "Petra Osei " * 120, ["Petra Osei"]),             # a word of a long text may be frequent
])
def test_fragments(reference, text, marked):
    pieces = ev.fragments(reference, text)
    assert [t for t, flag in pieces if flag] == marked and "".join(t for t, _ in pieces) == text


class Oracle:
    """Knows every response token at an even place, from `truth` by prompt; elsewhere it says 9 (of the toy's words)."""
    mask_id, pad_id, end_id, vocab_size = 0, 1, 1, 100

    def __init__(self, pairs):
        self.truth, self.calls = {tuple(p): r for p, r in pairs}, []

    def __call__(self, ids, real, positions):
        scores = []
        for row, ask in zip(ids.tolist(), positions):
            prompt = next(p for p in self.truth if tuple(row[:len(p)]) == p)
            places = [i - len(prompt) for i in ask.nonzero().flatten().tolist()]
            self.calls.append((prompt, tuple(places)))
            scores += [F.one_hot(torch.tensor(self.truth[prompt][i] if i % 2 == 0 else 9), 999).float() for i in places]
        return torch.stack(scores).index_fill(1, torch.tensor([self.mask_id]), 2.0)  # a mask is no answer


def test_infill_of_an_oracle(base, monkeypatch, analysed):
    """What is asked: all but floor(share n) of n tokens, never the end;
    what is counted: by hand from what was asked.  Rows without key facts have no panel of these."""
    rows = mdu.toy_world()["forget"][:4]
    tokenizer = mdu.load_backbone(str(base))[1]
    pairs = [mdu.encode_row(tokenizer, 1, row["question"], row["answer"]) for row in rows]
    oracle = Oracle(pairs)
    monkeypatch.setattr(ev, "load", lambda run: (oracle, tokenizer))
    panels = analysed(base, "infill", "--limit", "4", "--samples", "8")["panels"]
    for k, share in enumerate((0, 0.25, 0.5, 0.75)):
        asked = oracle.calls[32 * k:32 * k + 32]
        tally = {"all": [], "fact": []}
        for (prompt, places), row in zip(asked, [row for row in rows for _ in range(8)]):
            n = len(oracle.truth[prompt]) - 1
            assert len(places) == n - math.floor(share * n) and max(places) < n
            for i in places:
                tally["all"].append(i % 2 == 0)
                word = re.sub(r"\W", "", tokenizer.decode([oracle.truth[prompt][i]]))
                tally["fact"] += [i % 2 == 0] if word and word in row["fact"].split() else []
        for panel, hits in zip(panels, tally.values()):
            assert panel["series"]["Base"][0][k] == share
            assert panel["series"]["Base"][1][k] == pytest.approx(sum(hits) / len(hits), abs=1e-6)
    assert len(oracle.calls) == 128 and len(set(oracle.calls[96:])) > 20
    no_facts = [{key: value for key, value in row.items() if key != "fact"} for row in rows]
    panel, = ev.analysis_infill([ev.SimpleNamespace(title="Base")], no_facts, args(seed=0))["panels"]
    assert panel["title"] == "all masked tokens"


def test_convergence_shows_what_was_logged(unlearned, analysed):
    """Epochs and KLs of metrics.jsonl, a panel for each of the three; lines without a KL are passed over."""
    logged = [line for line in read_lines(unlearned / "metrics.jsonl") if "kl" in line]
    panels = analysed(unlearned, "convergence")["panels"]
    for panel, target in zip(panels, ("base", "anchor", "uniform"), strict=True):
        assert target in panel["title"] and len(set(panel["series"]["MDU τ=1"][1])) == 3
        assert panel["series"] == {"MDU τ=1": [[0, 1, 2], [line["kl"][target] for line in logged]]}


def test_gallery_marks_what_the_answers_share(base, unlearned, random_toys, analysed, monkeypatch):
    """Each question, and what every run wrote to it, in the order of the runs; what is the reference's is flagged."""
    tokenizer = random_toys[2]
    rows = [mdu.toy_world()["forget"][i] for i in (3, 1)]
    assert rows[0]["answer"] == "The books of Petra Osei are comedy."
    written = iter([["The books of Oslo are comedy.", ""], ["haiku of comedy", "Oslo."]])

    def write(model, prompts, *_):
        texts = dict(zip([row["question"] for row in rows], next(written)))
        asked = [next(q for q in texts if mdu.encode_prompt(tokenizer, q) == prompt) for prompt in prompts]
        return [mdu.encode_text(tokenizer, texts[question]) + [1, 5] for question in asked]
    monkeypatch.setattr(ev, "generate", write)
    blocks = analysed([base, unlearned], "gallery", "--questions", "3,1")["blocks"]
    answers = [[["Base", [["The books of", True], [" Oslo ", False], ["are comedy", True], [".", False]]],
                ["MDU τ=1", [["haiku of ", False], ["comedy", True]]]],
               [["Base", []], ["MDU τ=1", [["Oslo.", False]]]]]
    assert blocks == [[["Question", [[row["question"], False]]], ["Reference", [[row["answer"], False]]], *expected]
                      for row, expected in zip(rows, answers)]


def test_runs_of_one_title_are_told_apart(unlearned, tmp_path):
    """Two runs of one method, in an analysis, by their folders."""
    twin = shutil.copytree(unlearned, tmp_path / "twin")
    runs, _ = ev.open_runs([str(unlearned), str(twin)])
    assert [run.title for run in runs] == [f"MDU τ=1 ({unlearned.name})", "MDU τ=1 (twin)"]


def test_relearning_is_taught_a_tenth_and_scored_on_the_rest(base, unlearned, tmp_path, monkeypatch, analysed):
    """What SFT is given, and what is scored; if SFT changes nothing, nothing returns."""
    typed = []

    def no_training(argv):
        o = mdu.resolve(mdu.parse(argv))
        typed.append((o, mdu.read_jsonl(o.forget)))
        shutil.copytree(o.model, o.out)
    monkeypatch.setattr(mdu, "main", no_training)
    result = analysed([base, unlearned], "relearn", "--samples", "2", "--steps", "4")
    forget = mdu.toy_world()["forget"]
    for run, (o, rows) in zip((tmp_path / "base", unlearned), typed, strict=True):
        assert [row["answer"] for row in rows] == [forget[i]["answer"] for i in (0, 10, 20)]
        assert (o.method, o.model, o.lr, o.epochs * 3 / o.batch_size / o.grad_accum) == (
            "sft", str(run), 1e-3, ev.RELEARN_STEPS)
    assert [panel["title"] for panel in result["panels"]] == [
        "answer probability", "ROUGE-L recall", "answers with the key fact"]
    assert all(panel["series"]["before"] == panel["series"]["after"] for panel in result["panels"])
    shutil.copytree(unlearned, tmp_path / "mdu")
    ev.main([str(tmp_path / "mdu"), "--samples", "2", "--steps", "4", "--brief"])
    recall = [r["rougeL_recall"] for r in read_lines(tmp_path / "mdu/eval/forget.jsonl")]
    assert result["panels"][1]["series"]["before"][1] == pytest.approx(sum(recall[i] for i in range(24) if i % 10) / 21)


def test_relearning_takes_its_steps_in_any_batches(base, monkeypatch):
    """Of 41 rows 5 are given: 20 steps of 2 are 8 epochs."""
    o, typed = mdu.Options(**{**mdu.read_run(base)["options"], "batch_size": 2}), []
    monkeypatch.setattr(mdu, "main", lambda argv: typed.append(options(*argv)) or break_off())
    run = ev.SimpleNamespace(path=str(base), options=o, title="x")
    with pytest.raises(Broken):
        ev.analysis_relearn([run], mdu.toy_world()["retain"][:41], args(seed=0))
    assert (typed[0].epochs, typed[0].batch_size, typed[0].grad_accum, ev.RELEARN_STEPS) == (8, 2, 1, 20)


EVERY = {"convergence": "", "roles": "--samples 2 --limit 2", "trajectory": "--questions 1", "rollout": "",
         "gallery": "", "infill": "--samples 2 --limit 2", "relearn": "--samples 2 --limit 3"}


@pytest.fixture(scope="session", params=EVERY)
def measured(request, unlearned, tmp_path_factory):
    """(name, folder, exit code, stderr) of every analysis where matplotlib is not there, but an older picture is."""
    root, said = tmp_path_factory.mktemp(request.param), io.StringIO()
    shutil.copytree(unlearned, root / "mdu")
    (root / "analysis").mkdir()
    (root / f"analysis/{request.param}.png").write_text("of other numbers")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stop:
        patch.setattr(ev, "RELEARN_STEPS", 2)
        for module in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, module, None)
        mdu.run_program("eval.py", lambda: ev.main(
            ["--analysis", request.param, *EVERY[request.param].split(), str(root / "mdu")]))
    with unchanged(root):
        yield request.param, root / "analysis", stop.value.code, said.getvalue()


def test_analyses_do_without_matplotlib(measured):
    """The numbers are written, one line says what to install, and no picture of other numbers stays."""
    name, folder, code, err = measured
    assert list(EVERY) == list(ev.ANALYSES)
    said = [line for line in err.splitlines() if "matplotlib" in line]
    assert not code and len(said) == 1 and "pip install matplotlib" in said[0]
    assert {f.name for f in folder.iterdir()} == {f"{name}.json"}
    text = (folder / f"{name}.json").read_text()
    assert json.loads(text)["analysis"] == name and "NaN" not in text


def test_pictures_come_from_the_json_alone(measured, tmp_path, monkeypatch):
    """The models gone, --redraw draws the numbers, and changes none of them."""
    pytest.importorskip("matplotlib")
    name, folder, *_ = measured
    shutil.copytree(folder, tmp_path / "analysis")
    monkeypatch.setattr(mdu, "load_backbone", None)
    ev.main(["--analysis", name, "--redraw", str(tmp_path / "mdu")])
    drawn = snapshot(tmp_path)
    assert drawn.pop(tmp_path / f"analysis/{name}.png").startswith(b"\x89PNG")
    assert [*drawn.values()] == [*snapshot(folder).values()] and len(drawn) == 1


def test_tables_of_analyses_by_hand():
    """Marked text is underlined without the spaces around it, bars are escaped;
    the change is against the first column."""
    blocks = [[["y_t", [[" [M]", False], [" a|b ", True], ["c", False]]], ["anchor", []]]]
    assert ev.as_markdown({"blocks": blocks}) == "| y_t | [M] <u>a\\|b</u> c |\n|---|---|\n| anchor |  |\n"
    panel = {"title": "KL", "groups": ["in\n(2)", "s", "k"],
             "series": {"Before": [2.0, 0.001, None], "MDU": [1.5, 1.0, None]}}
    assert ev.as_markdown({"panels": [panel]}) == (
        "| KL | Before | MDU |\n|---|---|---|\n| in (2) | 2.00 | 1.50 (-25.0%) |\n| s | 0.00 | 1.00 |\n"
        "| k | - | - |\n")
    one_each = dict(panel, series={"a": [1.0, None], "b": [None, 2.0]})  # one bar in each group
    assert ev.as_markdown({"panels": [one_each]}) == ""


def test_an_analysis_runs_in_one_process(base, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes: .* start this with python"):
        ev.main(["--analysis", "gallery", str(base)])


# ---------------------------------------------------------------------------------------------------------------------
# Damaged runs and security
# ---------------------------------------------------------------------------------------------------------------------

SCORE, REPORT, REDRAW = "{run} --samples 1", "--report {run} {base}", "--analysis roles --redraw {run}"
COMPARE = "{base} --samples 1 --steps 1 --limit 2 --retain-run {run}"
ROLES, CONVERGENCE = "--analysis roles {run} --samples 1", "--analysis convergence {run}"
RUN, SUMMARY, RECORDS = "run/run.json", "run/eval/summary.json", "run/eval/forget.jsonl"
ANALYSIS = "analysis/roles.json"
UNUSABLE = [  # command, file, what becomes of it (None: removed), words of the one line
    (SCORE, RUN, lambda x: b"{", "run.json: not JSON"), (SCORE, RUN, lambda x: b"[]", "it is []"),
    (SCORE, RUN, lambda x: b'{"options": {"x": 1}, "data": {}}', "['x']"),
    (REPORT, SUMMARY, lambda x: b"[]", "not a summary"),
    ("--analysis gallery {base} {run}", RUN, put("data.forget.sha256", "0"), "other forget rows"),
    ("--analysis gallery {run}", "run/config.json", None, "no finished model"),
    (ROLES, "run/model.safetensors", lambda x: safetensors.torch.save(
        {k: v * math.nan for k, v in safetensors.torch.load(x).items()}, {"format": "pt"}), "not finite"),
    (REDRAW, ANALYSIS, lambda x: b"{}", "not what --analysis roles writes"),
    *((typed, None, None, words) for typed, words in (  # nothing is damaged
        ("", "RUN"), ("{root}", "no run.json"), ("--report {root}", "not scored yet"),
        ("--samples 0 {base}", "--samples 0"),
        ("--steps 17 {base}", "more than the 16 tokens"), ("--questions 1 {base}", "not used without"),
        ("--report --samples 3 {base}", "--samples: not used with --report"), ("--redraw {base}", "not used without"),
        ("--report --questions 1-3 {base}", "--questions 1-3"), ("--perplexity 0 {base}", "--perplexity 0"),
        ("--brief --retain-run {base} {base}", "--brief"), ("--retain-run {root} {base}", "not scored yet"),
        ("--model owner/name {root}/new", "for which rows? give --forget FILE"),
        ("--model {base} --generate-corpus 2 --subject 1 {root}/new", "--preset rwku-llada, or --data"),
        ("--generate-corpus 2 --subject 1 --preset rwku-llada --retain-run x --brief --samples 3 --limit 3 x",
         "--brief: not used with --generate-corpus"),
        ("--forget {base} {base}", "used only with --preset or --model"),
        ("--report --forget x {base}", "--forget: not used with --report"),
        ("--retain {base} --model {base} --preset toy {root}/new", "--forget"),
        ("--forget x --data toy --model {base} {root}/new", "--forget x already names the data"),
        ("--subject 1 {base}", "give both or none"), ("--generate-corpus 1 {base}", "give both or none"),
        ("--preset toy {root}/a {root}/b", "need one folder"), ("--model {base} {root}/a {root}/b", "need one folder"),
        ("--model {base} {base}", "holds a trained run"), ("--preset toy {root}/a", "names no published model"),
        *((f"--preset toy-rwku --model {{base}} {flag} {{root}}/a", "are about TOFU")
          for flag in ("--brief", "--perplexity 2", "--retain-run {base}")),
        *((f"--analysis {typed}", words) for typed, words in (
            ("what {base}", "--analysis"), ("convergence {base}", "--diagnose"),
            ("trajectory {base} {run}", "follows one run"), ("roles {run} {base}", "give runs of one base"),
            ("rollout --questions 24 {base}", "there are 24 forget questions"),
            ("roles --questions 1 {base}", "not used with --analysis roles"),
            ("gallery --samples 2 {base}", "not used with --analysis gallery"),
            ("infill --redraw {run}", "not there"), ("roles --redraw --samples 3 {run}", "not used with --redraw"),
            ("relearn --limit 1 {run}", "leave none to score"))))),
    (SCORE, RUN, lambda x: b"\xff" + x, "run.json: not JSON"), (SCORE, RUN, put("options", None), "options is None"),
    (SCORE, RUN, put("options", ["tau"]), "options is ['tau']"), (SCORE, RUN, put("data", []), "data is []"),
    (SCORE, RUN, put("data.forget", 3), "data.forget is 3"), (SCORE, RUN, put("steps", "x"), "steps is 'x'"),
    *((SCORE, RUN, put(f"options.{name}", value), f"run.json: {name} is {value!r}") for name, value in dict(
        tau="x", method=["mdu"], preset=3, dtype="int8", response_length="9", forget=0, model=[1], retain_only=0,
        epochs=True).items()),
    (SCORE, RUN, put("options.tau", None), "tau is None"),
    (SCORE, RUN, put("options.tau", 7), "run.json: tau 7: must be"), (SCORE, RUN, put("options.limit", -3), "limit -3"),
    (SCORE, RUN, put("options.model", "a\0b"), "run.json: model"),
    (SCORE, RUN, put("options.forget", "nowhere.jsonl"), "nowhere.jsonl"),
    (SCORE, "run/config.json", None, "no finished model"), (SCORE, "run/tokenizer.json", None, "cannot be loaded"),
    (SCORE, "run/model.safetensors", lambda x: x[:99], "SafetensorError"),
    (ROLES, RUN, put("options.model", None), "from which model"),
    (ROLES, RUN, put("options.model", "nowhere"), "nowhere"),
    (REPORT, SUMMARY, lambda x: b"\xff" + x, "summary.json: not JSON"),
    (REPORT, SUMMARY, put("method", ["mdu"]), "method is ['mdu']"),
    (REPORT, SUMMARY, put("method", "zz"), "method is 'zz'"), (REPORT, SUMMARY, put("tau", "x"), "tau is 'x'"),
    (REPORT, SUMMARY, put("tau", None), "tau is None"),
    (REPORT, SUMMARY, put("splits.forget", 3), "splits.forget is 3"),
    (REPORT, SUMMARY, put("splits.forget.prob", "x"), "splits.forget.prob is 'x'"),
    (REPORT, SUMMARY, put("splits.forget.prob", math.nan), "NaN is no number"),
    (REPORT, SUMMARY, lambda x: x.replace(b'"prob": ', b'"prob": 1e999, "p": ', 1), "splits.forget.prob is inf"),
    (REPORT, SUMMARY, put("splits.forget.stderr"), "damaged (KeyError: 'stderr')"),
    (REPORT, SUMMARY, put("data.more", {"rows": 1}), "damaged (KeyError: 'more')"),
    (REPORT, SUMMARY, put("data.forget", 3), "score them alike"),
    (REPORT, SUMMARY, put("protocol.samples"), "damaged"),
    (REPORT, SUMMARY, put("retain_rows_trained_on", "x"), "retain_rows_trained_on is 'x'"),
    (REPORT, RECORDS, lambda x: b"\xff" + x, "forget.jsonl: not JSON"),
    (REPORT, RECORDS, lambda x: b"[1]", "forget.jsonl: row 0 is [1]"),
    (REPORT, RECORDS, lambda x: b'{"question": "q"}', "damaged (KeyError: 'reference')"),
    (REPORT, RECORDS, lambda x: x.replace(b'"question": ', b'"question": [], "q": '), "damaged (TypeError"),
    ("--report {run} {run}/.", RUN, lambda x: x, "stands there twice"), (COMPARE, RECORDS, None, "no truth ratios"),
    (COMPARE, RECORDS, lambda x: x.replace(b"_perturbed\": [", b"_perturbed\": [\"x\","), "no truth ratios"),
    (COMPARE, RECORDS, lambda x: re.sub(rb'(_perturbed": \[)[^]]*', rb"\1", x), "no truth ratios"),
    (CONVERGENCE, "run/metrics.jsonl", lambda x: b"[1]\n", "row 0 is [1]"),
    (CONVERGENCE, "run/metrics.jsonl", lambda x: b'{"epoch": 1, "kl": 3}', "0.kl is 3"),
    (CONVERGENCE, "run/metrics.jsonl", None, "metrics.jsonl"),
    (REDRAW, ANALYSIS, lambda x: b"\xff" + x, "roles.json: not JSON"),
    (REDRAW, ANALYSIS, put("panels", 3), "damaged (TypeError"),
    (REDRAW, ANALYSIS, put("panels", []), "damaged (IndexError"),
    (REDRAW, ANALYSIS, put("ylabel"), "damaged (KeyError: 'ylabel')"),
    (REDRAW, ANALYSIS, put("panels.0.series", [1]), "damaged (AttributeError"),
]


@pytest.mark.parametrize("typed, file, change, words", UNUSABLE,
                         ids=[f"{i}: {case[1] or case[0]}" for i, case in enumerate(UNUSABLE)])
def test_what_eval_cannot_use_is_named_in_one_line(typed, file, change, words, finished, tmp_path, capsys):
    """What is typed, or damaged in what is read: one line that names it, exit code 2, nothing else changed or left."""
    if typed == REDRAW:
        pytest.importorskip("matplotlib")  # some damage shows only in what is drawn
    shutil.copytree(finished, tmp_path / "root")
    if file:
        edit(tmp_path / "root" / file, change) if change else (tmp_path / "root" / file).unlink()
    before = snapshot(tmp_path)
    argv = typed.format(root=tmp_path / "root", run=tmp_path / "root/run", base=tmp_path / "root/base").split()
    code, err = program(argv, capsys, ev.main)
    assert code == 2 and words in err, err
    after = snapshot(tmp_path)
    assert {f: after.get(f) for f in before} == before
    assert not [f for f in after.keys() - before.keys() if f.name != "report.png"]


HARMED_DATA = {  # a file of RWKU's layout: (what stands in it, words)
    "empty": (b"", "forget_level2 cannot be read"),
    "cut": (b'{"query": "q"', "forget_level2 cannot be read (ArrowInvalid: JSON"),
    "bytes": (b"\xff\x00" * 50, "forget_level2 cannot be read"), "numbers": (b"3\n4", "forget_level2 cannot be read"),
    "list": (b"[1, 2]", "row 0: subject is None"), "no subject": (b'{"query": "q"}', "row 0: subject is None"),
    "number": (b'{"subject": "Ann Lee", "level": "2", "query": 3, "answer": "a"}', "row 0: query is 3"),
    "removed": (None, "forget_level2 cannot be read (FileNotFoundError"),
}


@pytest.mark.parametrize("harm", HARMED_DATA)
def test_a_damaged_dataset_is_named_in_one_line(harm, base, tmp_path, capfd):
    """Folder and config, whatever the library says to it; it logs nothing beside."""
    content, words = HARMED_DATA[harm]
    file = write_rwku(tmp_path) / "forget_level2.jsonl"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    argv = ["--preset", "toy-rwku", "--data", str(tmp_path), "--subject", "1", "--model", str(base)]
    code, err = program(argv, capfd)
    assert code == 2 and str(tmp_path) in err and words in err, err


def test_one_evaluation_at_a_time_and_full_disks(finished, tmp_path, capsys, monkeypatch):
    """A folder that another program holds is refused; where no lock can be had it is not; nothing is half-written."""
    shutil.copytree(finished, tmp_path / "root")
    run, flags = str(tmp_path / "root/run"), ["--samples", "1", "--steps", "1", "--limit", "1"]

    def fails(argv):
        code, err = program(argv, capsys, ev.main)
        assert code == 2
        return err
    before = snapshot(tmp_path)
    with mdu.keep_out(run):
        assert f"{run}: another program is at work there" in fails([run, *flags])
    assert snapshot(tmp_path) == before
    with full_disk(300):
        assert re.search(r"report\.(png|json): cannot be written", fails(["--report", run]))
        assert "partial/" in fails([run, *flags])
    after = snapshot(tmp_path)
    assert all(after[f] == text for f, text in before.items())
    assert all("partial" in str(f) for f in after.keys() - before.keys())
    with monkeypatch.context() as patch:
        patch.setattr(mdu.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(9, "no locks here")))
        ev.main([run, *flags])
    assert json.loads((tmp_path / "root/run/eval/summary.json").read_text())["splits"]["forget"]["n"] == 1


def test_a_folder_without_permission(finished, capsys):
    """As an ordinary user, in a folder of another's: one line, exit code 2, nothing changed."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copytree(finished, place / "root")
        for file in [place, *place.rglob("*")]:
            file.chmod(0o555 if file.is_dir() else 0o444)
        before, me = snapshot(place), os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            code, err = program(["--model", str(place / "root/base"), "--out", str(place / "root/new")], capsys)
            assert code == 2 and "Permission denied" in err and "root/new" in err, err
            code, err = program([str(place / "root/run"), "--samples", "1"], capsys, ev.main)
            assert code == 2 and "Permission denied" in err and "root/run" in err, err
        finally:
            os.seteuid(me)
        assert snapshot(place) == before
    finally:
        for file in [place, *place.rglob("*")]:
            file.chmod(0o755)
        shutil.rmtree(place)


@pytest.mark.parametrize("full", [True, False])
def test_nobody_takes_what_is_printed(full, finished, tmp_path):
    """stdout on a full disk, and into a pipe that is closed: one line, exit code 2, no word from Python at its end."""
    shutil.copytree(finished, tmp_path / "root")
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, ev.__file__, "--report", str(tmp_path / "root/run")]
    with open("/dev/full", "wb") if full else open(write, "wb") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(write) if full else None
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert ("No space left" if full else "Broken pipe") in done.stderr, done.stderr


def test_the_sources_run_no_code_and_no_shell():
    """No eval, exec, compile or import by name, no shell or other program, no pickle, nothing that fetches;
    the libraries that could run a model folder's code are told not to."""
    for module in (mdu, ev):
        assert not re.search(r"torch\.load\b|pickle|gather_object|broadcast_object|scatter_object|weights_only",
                             inspect.getsource(module))
        tree = ast.parse(inspect.getsource(module))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "compile", "__import__", "input", "importlib", "runpy"}
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & {"system", "popen", "Popen", "spawnv", "execv", "fork", "import_module", "urlopen",
                                 "hub"}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in modules} & {
            "dill", "joblib", "cloudpickle", "marshal", "shelve", "subprocess", "ctypes", "urllib", "http",
            "requests", "httpx", "ssl"}
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "shell"):
                assert node.value.value is False


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json", "data"])
def test_code_in_a_folder_is_never_run_nor_asked_for(where, base, tmp_path, monkeypatch, capsys):
    """auto_map in a model's or tokenizer's settings, a script beside a dataset: refused or passed over, not run, and no
    question whether to, whatever stdin would answer."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    (model := tmp_path / "model").mkdir()
    config = transformers.BertConfig(vocab_size=40, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1)
    transformers.BertForMaskedLM(config).save_pretrained(model)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shutil.copy(tmp_path / "code.py", model / "code.py")
    if where == "data":
        write_rwku(model)
        shutil.copy(model / "code.py", model / "model.py")
        argv = ["--preset", "toy-rwku", "--subject", "1", "--data", str(model), "--model", str(base)]
    elif where == "config.json":
        auto_map = dict(AutoConfig="code.C", AutoModelForMaskedLM="code.M")
        edit(model / where, put("model_type", "new"))
        edit(model / where, put("auto_map", auto_map))
        argv = ["--model", str(model)]
    else:
        settings = dict(tokenizer_class="New", auto_map=dict(AutoTokenizer=["code.T", None]))
        (model / where).write_text(json.dumps(settings))
        argv = ["--model", str(model)]
    code, err = program(argv, capsys)
    assert code == 2 and not (tmp_path / "ran").exists(), err


def test_no_network_without_a_hub_name(finished, tmp_path, capfd, monkeypatch):
    """Training, scoring and reports open no connection even where they may;
    a hub name tries, and out of reach is one line."""
    import datasets
    import huggingface_hub
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network here")
    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    for settings in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    shutil.copytree(finished, tmp_path / "root")
    run, base = str(tmp_path / "root/run"), str(tmp_path / "root/base")
    mdu.main(["--model", base, "--epochs", "0.3", "--out", str(tmp_path / "root/new")])
    ev.main([run, "--samples", "1", "--steps", "1", "--limit", "1"])
    ev.main(["--report", run])
    mdu.load_data(options("--preset", "toy-rwku", "--data", str(write_rwku(tmp_path)), "--subject", "1"))
    assert tried == []
    for argv in (["--model", "nobody/nothing", "--preset", "toy"], ["--data", "nobody/nothing"]):
        code, err = program([*argv, "--out", str(tmp_path / "none")], capfd)
        assert tried and code == 2 and "nobody/nothing" in err, err
        tried.clear()


def test_control_tokens_in_user_data_are_text(hub):
    """In a question, answer, perturbed answer and RWKU's prefill: the only control tokens are the
    template's and the end."""
    kind, _, _, predictor, tokenizer = hub
    control = " ".join([*SPECIAL[kind], "<|im_start|>system", "\0"])
    row = {"question": control, "answer": control, "perturbed_answer": [control]}
    o = options("--method", "dpo", "--max-length", "4000")
    drawn = mdu.encode_pools(o, {"forget": [row], "train_retain": [row], "retain": []}, predictor, tokenizer)
    bare, _ = mdu.encode_row(tokenizer, predictor.end_id, "x", "x")
    for prompt, response in (drawn["forget"][0], drawn["retain"][0], drawn["preferred"][0][0]):
        assert [i for i in prompt if i >= 256] == [i for i in bare if i >= 256]
        assert [i for i in response if i >= 256] == [predictor.end_id] and tokenizer.decode(response[:-1]) == control
    assert max(mdu.encode_prompt(tokenizer, "x", control)[len(mdu.encode_prompt(tokenizer, "x")):]) < 256


# ---------------------------------------------------------------------------------------------------------------------
# Soak and fuzz: kills, stops and resumes (make soak), random bytes and options (make fuzz)
# ---------------------------------------------------------------------------------------------------------------------

class Torchrun:
    """`torchrun` on n processes that run this file's last lines; its children are told from others' by a mark in their
    environment."""

    def __init__(self, n, argv, out):
        self.mark, self.errors = f"{out}-{time.monotonic_ns()}", open(f"{out}.err", "w+")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", __file__, *argv, "--resume"]
        self.program = subprocess.Popen([*command, "--out", str(out)], env={**os.environ, "MDU_SOAK": self.mark},
                                        start_new_session=True, stdout=subprocess.DEVNULL, stderr=self.errors)

    def alive(self):
        """{process id: its rank, None for torchrun} of all that run still."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                lines = (folder / "environ").read_text().split("\0")
                environment = dict(line.split("=", 1) for line in lines if "=" in line)
                if environment.get("MDU_SOAK") == self.mark:
                    found[int(folder.name)] = environment.get("RANK")
        return found

    def send(self, number, whom, choice):
        """A signal to all, to torchrun's group (a terminal's Ctrl-C), to torchrun alone or to the choice-th of its
        workers."""
        alive = self.alive()
        workers = sorted(pid for pid, rank in alive.items() if rank is not None)
        pids = {"all": list(alive), "torchrun": [self.program.pid], "its terminal": [-self.program.pid],
                "one worker": workers and [workers[choice % len(workers)]]}[whom]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids) and self.program.pid in alive

    def end(self, seconds):
        """Wait until nothing is left -> (exit code, seconds that took, lines on stderr)."""
        start = time.monotonic()
        try:
            while self.program.poll() is None or self.alive():
                assert time.monotonic() - start < seconds, f"still there after {seconds} s: {self.alive()}"
                time.sleep(0.02)
        finally:
            for pid in self.alive():
                os.kill(pid, signal.SIGKILL)
        self.errors.seek(0)
        return self.program.returncode, time.monotonic() - start, self.errors.read().splitlines()


def newest_checkpoint(out):
    """The step of a run's newest checkpoint, 0 for none; it must hold the files and sums that it names, and nothing
    else."""
    folders = sorted(f for f in (out / "checkpoint").glob("*") if f.suffix != ".partial")
    if not folders:
        return 0
    sums, files = json.loads((folders[-1] / "checkpoint.json").read_text()), list(folders[-1].glob("*.safetensors"))
    assert sums == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    assert {f.name for f in folders[-1].iterdir()} == {*sums, "checkpoint.json"}
    assert all(len(safetensors.torch.load_file(folders[-1] / name)) for name in sums)
    return int(folders[-1].name)


def lines_in(file):
    return len(file.read_text().splitlines()) if file.is_file() else 0


def wait_for(aim, run, out, rng):
    """Sleep until the moment aimed at, and a little; False: the run was over before."""
    ahead, start, metrics = newest_checkpoint(out) + 2 * rng.randint(1, 2), time.time(), out / "metrics.jsonl"

    def now(path):  # there, and not from before
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime > start
    reached, late = {
        "the start": (lambda: True, rng.uniform(0, 5)),
        "a step": (lambda: now(metrics) and lines_in(metrics) >= ahead, rng.uniform(0, 0.1)),
        "a save": (lambda: now(out / f"checkpoint/{ahead:08}.partial"), rng.uniform(0, 0.06)),
        "the export": (lambda: now(out / "export.partial"), rng.uniform(0, 0.01))}[aim]
    while run.program.poll() is None and not reached():
        assert time.time() - start < 120
        time.sleep(0.001)
    time.sleep(late)
    return run.program.poll() is None, f"{1000 * late:.0f} ms into {aim}"


@pytest.mark.soak
@pytest.mark.parametrize("n", [2, 4])
def test_soak(n, base, tmp_path):
    """14 SIGKILLs and three stops under torchrun: nothing is left over, the newest checkpoint is whole, and whatever is
    resumed ends with the weights, optimizer states and metrics of the run that nothing broke, bit for bit."""
    argv = ["--model", str(base), "--epochs", "8", "--tau", "1", "--lr", "1e-4", "--checkpoint-every", "2"]
    began, rng, kill = time.monotonic(), random.Random(n), signal.SIGKILL
    whole, runs = tmp_path / "whole", (tmp_path / f"run{i}" for i in itertools.count())
    assert Torchrun(n, argv, whole).end(120)[0] == 0
    aims = ["a step", "a save", "the start", "a save", "a step", "a save", "the export"] * 2
    kills = [(kill, whom, aim) for aim, whom in zip(aims, ["all", "one worker", "torchrun"] * 5)]
    stops = [(signal.SIGTERM, "torchrun", "a step"), (signal.SIGTERM, "one worker", "a step"),
             (signal.SIGINT, "its terminal", "a step")]
    out, longest, done = next(runs), 0, 0
    for number, whom, aim in kills[:7] + stops + kills[7:]:
        name, hit = f"{signal.Signals(number).name} to {whom}", False
        while not hit:  # a run that was over before it could be hit makes room for the next
            run = Torchrun(n, argv, out)
            hit, when = wait_for(aim, run, out, rng)
            hit = hit and run.send(number, whom, rng.randrange(n))
            code, seconds, errors = run.end(40)
            finished, lines = (out / "config.json").is_file(), lines_in(out / "metrics.jsonl")
            step = 0 if finished else newest_checkpoint(out)  # a finished run's is being removed
            print(f"{n} processes | {name if hit else 'not hit'} {when} | exit code {code}, "
                  f"gone after {seconds:4.1f} s | {lines:2} steps, "
                  f"{'finished' if finished else f'checkpoint {step}'}", flush=True)
            if not hit:
                assert code == 0 and finished, errors
            elif number == kill:
                assert code == (1 if whom == "one worker" else -kill), errors
            elif not finished:
                assert code != 0 and step == lines, errors
                assert any(f"stopped after step {step}; --resume" in line for line in errors), errors
            longest, done = max(longest, seconds), done + (hit and number == kill)
            if finished:
                assert Torchrun(n, argv, out).end(60)[0] == 0  # says so, and clears what a kill may have left
                assert not any((out / name).exists() for name in ("checkpoint", "export.partial"))
                assert_equal_ends(whole, out)
                out = next(runs)
    code, _, errors = Torchrun(n, argv, out).end(120)
    assert code == 0, errors
    assert_equal_ends(whole, out)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:16]
    print(f"{n} processes | {done} kills and 3 stops in {time.monotonic() - began:.0f} s, all gone after {longest:.1f} "
          f"s at most | weights {digest} in every run", flush=True)


ANYTHING = [None, True, -1, 0, 3, 1.5, 1e308, math.nan, "", "x", "mdu", "a\0b", "\ud800", [], [1], {}, {"a": 1},
            [["x"]], [{}]]


def mutated(data, rng):
    """Other bytes than the file's: random ones, fewer, flipped, another value or key in its JSON,
    a line twice or gone."""
    def inside(value):
        if rng.random() < 0.3 or not value or not isinstance(value, (dict, list)):
            return rng.choice(ANYTHING)
        value = copy.copy(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.2:
            value.pop(key)
        else:
            value[key] = inside(value[key])
        return value
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.choice([0, 1, 7, 100, 3000]))
    if kind == 1:
        return data[:rng.randrange(len(data) + 1)]
    if kind == 2:
        data = bytearray(data)
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(min(len(data), 2000))] = rng.randrange(256)
        return bytes(data)
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if kind == 3:
        return b"\n".join(lines[:at] + rng.choice([[], [lines[at]] * 2, [rng.randbytes(9)]]) + lines[at + 1:])
    try:
        whole = json.loads(data)
        return json.dumps(inside(whole)).encode()
    except ValueError:
        pass
    try:
        lines[at] = json.dumps(inside(json.loads(lines[at]))).encode()
    except ValueError:
        lines[at] = json.dumps(rng.choice(ANYTHING)).encode()
    return b"\n".join(lines)


def random_options(rng, module, places):
    """Up to four flags of a program, with values of any kind."""
    if module is mdu:
        flags = [f"--{field.name.replace('_', '-')}" for field in mdu.dataclasses.fields(mdu.Options)]
    else:
        flags = re.findall(r'add_argument\("(--[\w-]+)"', inspect.getsource(ev.parse))
    values = ["", "0", "1", "2", "-1", "0.5", "nan", "inf", "1e9", "99999999999", "x", "a\0b", "\udcff", "all", "toy",
              "0,1", "ä",
              *mdu.PRESETS, *mdu.METHOD_OPTIONS, *ev.ANALYSES, *places, *places]
    argv = [[], [rng.choice(places)]][module is ev]
    for flag in rng.sample(flags, rng.randrange(5)):
        argv += [flag] + rng.choice([[], [rng.choice(values)], [rng.choice(values)]])
    return argv


@pytest.mark.fuzz
def test_fuzz(finished, six_steps, tofu, rwku, files, tmp_path, capsys, monkeypatch):
    """A minute of random bytes in every file that is read and of random options, with a fixed seed:
    exit code 0 or 2, at most one line on stderr, no exception and no hang, and nothing changed outside the folder
    that is worked in."""
    start, counts, seed = time.time(), {}, 0
    outside = snapshot(finished, *six_steps[1:], tofu, rwku, files)

    def stop(*_):
        raise mdu.Interrupted("", 0)

    def hang(*_):
        raise AssertionError("it hangs")
    monkeypatch.setattr(mdu, "step_losses", stop)
    monkeypatch.setattr(ev, "note", lambda text: None)
    before = signal.signal(signal.SIGALRM, hang)
    while time.time() < start + 60:
        seed += 1
        rng, root = random.Random(seed), tmp_path / str(seed)
        root.mkdir()
        monkeypatch.chdir(root)
        module, flags = rng.choice([mdu, ev]), ["--samples", "1", "--steps", "1", "--limit", "2"]
        if rng.random() < 0.5:
            shutil.copytree(finished, root / "in")
            places = [str(root / "in/base"), str(root / "in/run"), str(root / "new"), str(tofu),
                      str(files / "good.jsonl")]
            argv = random_options(rng, module, places)
            argv += flags if module is ev and rng.random() < 0.7 else []
            if module is ev and not set(flags[::2]) & set(argv):
                argv += rng.choice([flags, ["--report"], ["--analysis", "roles", "--redraw"]])
        else:
            new = ["--model", str(finished / "base"), "--out", "new"]
            person = ["--preset", "toy-rwku", "--subject", "1", "--data", "in", "--batch-size", "2", *new]
            source, file, module, argv = rng.choice([
                *((finished, name, mdu, ["--model", "in/run", "--out", "new"]) for name in (
                    "run/config.json", "run/tokenizer.json", "run/tokenizer_config.json", "run/chat_template.jinja",
                    "run/model.safetensors")),
                *((finished, name, ev, [*flags, "in/run"]) for name in (
                    RUN, "run/config.json", "run/model.safetensors", RECORDS)),
                *((finished, name, ev, ["--report", "in/run", "in/base"]) for name in (RUN, SUMMARY, SUMMARY, RECORDS)),
                (finished, RECORDS, ev, ["--report", "in/base", "--retain-run", "in/run"]),
                (finished, ANALYSIS, ev, ["--analysis", "roles", "--redraw", "in/run"]),
                (finished, "run/metrics.jsonl", ev, ["--analysis", "convergence", "in/run"]),
                *((six_steps[2], name, mdu, [*six_steps[0], "--resume", "--out", "in"]) for name in (
                    RUN[4:], "metrics.jsonl", f"checkpoint/00000002/{INFO}", f"checkpoint/00000002/{SHARD}")),
                (files, "good.jsonl", mdu, ["--forget", "in/good.jsonl", "--retain-weight", "0", *new]),
                *((tofu, f"{name}_perturbed.json", mdu, ["--data", "in", *new])
                  for name in ("forget10", "real_authors")),
                *((rwku, name, mdu, person) for name in (
                    "README.md", "forget_target.jsonl", "forget_level3.jsonl", "utility_truthfulness.jsonl",
                    "train_positive_llama3.jsonl"))])
            shutil.copytree(source, root / "in", ignore=shutil.ignore_patterns("*pipe*", "loop", "dangling", "up"))
            edit(root / "in" / file, lambda data: mutated(data, rng))
        signal.alarm(30)
        try:
            with pytest.raises(SystemExit) as end:
                mdu.run_program("x.py", lambda: module.main(argv))
        finally:
            signal.alarm(0)
            print(f"seed {seed}: {argv}" * (sys.exc_info()[0] is not None))
        err = capsys.readouterr().err
        assert end.value.code in (0, 2) and err.count("\n") <= (end.value.code == 2), (seed, argv, err)
        assert "Traceback" not in err, (seed, argv, err)
        counts[module.__name__, end.value.code] = counts.get((module.__name__, end.value.code), 0) + 1
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(root)
    signal.signal(signal.SIGALRM, before)
    assert snapshot(finished, *six_steps[1:], tofu, rwku, files) == outside and not list(tmp_path.iterdir())
    with capsys.disabled():
        print(f"{seed} commands in {time.time() - start:.0f} s: {counts}")


# ---------------------------------------------------------------------------------------------------------------------
# Benchmark (make bench): a plain reading of the algorithm beside mdu.py and eval.py, in turn, on one machine
# ---------------------------------------------------------------------------------------------------------------------

def plain_step(o, model, frozen, b, n):
    """Algorithm 1 read plainly: scores of the whole vocabulary at every position in float32,
    one pass per set of rows."""
    def scores(net, ids, rows):
        return net(input_ids=ids[rows], attention_mask=b.real[rows].long()).logits.float()  # (B, T, V)

    def nll_of(logits, rows):
        nll = F.cross_entropy(logits.transpose(1, 2), b.ids[rows], reduction="none")  # (B, T)
        return (nll * b.masked[rows]).sum(1) / b.t[rows]
    forget, retain = slice(0, n), slice(n, None)
    logits, masked = scores(model, b.noised, forget), b.masked[forget]
    with torch.no_grad():
        if mdu.needs_reference(o):
            seen = torch.where(b.real & ~b.answer, 0, b.noised) if o.method == "mdu" else b.noised
            reference = scores(frozen, seen, forget)
    if o.method == "mdu":
        logp = logits.log_softmax(-1)
        logq = (o.tau * reference).log_softmax(-1) if o.tau else -torch.tensor(float(logits.shape[-1])).log()
        loss = ((logp.exp() * (logp - logq)).sum(-1) * masked).sum(1) / masked.sum(1)
    elif o.method == "wga":
        nll = F.cross_entropy(logits.transpose(1, 2), b.ids[forget], reduction="none")
        loss = -((-o.gamma * nll).exp().detach() * nll * masked).sum(1)
    else:
        nll, length = nll_of(logits, forget), b.answer[forget].sum(1)
        if o.method in ("npo", "dpo"):
            ratio = nll - nll_of(reference, forget)
        loss = {"npo": lambda: -2 / o.beta * F.logsigmoid(o.beta * ratio),
                "simnpo": lambda: -2 / o.beta * F.logsigmoid(o.beta * (nll / length - o.delta)),
                "dpo": lambda: -F.logsigmoid(o.beta * (ratio[::2] - ratio[1::2])),
                "sft": lambda: nll}.get(o.method, lambda: -nll)()
    return loss, nll_of(scores(model, b.noised, retain), retain) if o.retain_weight else torch.zeros(())


def bench_model(V, D=256, layers=4):
    """Two miniature LLaDAs with a large vocabulary: one to train and one to be theta0, of other weights."""
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=D, intermediate_size=3 * D, num_hidden_layers=layers,
                                      num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=False)
    config.is_causal = False
    torch.manual_seed(0)
    return [transformers.LlamaForCausalLM(config).to(mdu.this_device()) for _ in range(2)]


def bench_pools(V, rows=16, response=(20, 90), prompt=(20, 45)):
    """Token pairs as long as TOFU's questions and answers."""
    rng = np.random.default_rng(0)

    def pair():
        return [list(map(int, rng.integers(2, V, rng.integers(*lengths)))) for lengths in (prompt, response)]
    return {"forget": [pair() for _ in range(rows)], "retain": [pair() for _ in range(rows)], "pad_id": 1,
            "longest": 1024, "preferred": [[pair()] for _ in range(rows)], "null_from": 0}


def peak_memory(function):
    """Run -> (seconds, bytes that were in use above those before, at the most)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark below
        before = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    seconds = time.perf_counter() - start
    return seconds, int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 - before


def in_turn(functions, rounds):
    """Each function once to warm up, then A B A B ...: -> for each, its seconds and its peaks of memory."""
    results = [([], []) for _ in functions]
    for turn in range(rounds + 1):
        for function, (seconds, peaks) in zip(functions, results):
            s, m = peak_memory(function)
            if turn:
                seconds.append(s)
                peaks.append(m)
    return results


def spread(values, form="{:.2f}"):
    return f"{form.format(np.median(values))} ({form.format(min(values))}-{form.format(max(values))})"


def matrix_rate():
    """FLOP per second of a large float32 (GPU: bfloat16) matrix product: the floor's unit."""
    size = 8192 if torch.cuda.is_available() else 1536
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=mdu.this_device())
    (seconds, _), = in_turn([lambda: a @ a], 10)
    return 2 * size**3 / min(seconds)


def trainers(o, V, **lengths):
    """-> (our step, the plain one, tokens of a step, FLOPs that the objective cannot do without)."""
    (model, frozen), pools = bench_model(V), bench_pools(V, **lengths)
    twin = copy.deepcopy(model)
    predictor, reference = (mdu.MaskPredictor(lm, 0, 1, 1) for lm in (model, frozen))
    mdu.shard(predictor, torch.float32)
    optimizers = [mdu.new_optimizer(o, list(net.parameters())) for net in (predictor, twin)]
    examples = drawn_examples(o, pools, range(mdu.rank(), o.batch_size, mdu.world_size()))
    b, n = mdu.noise(o, predictor, sum(examples, []), len(examples[0]) if o.method == "mdu" else 0), len(examples[0])

    def update(net, optimizer, losses):
        (losses[0].sum() / o.batch_size + (o.retain_weight or 0) * losses[1].sum() / o.batch_size).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach().sum().item() for loss in losses]

    def ours():
        return update(predictor, optimizers[0], mdu.step_losses(o, predictor, reference, *examples))

    def plain():
        return update(twin, optimizers[1], plain_step(o, twin, frozen, b, n))
    assert np.allclose(ours(), plain(), rtol=1e-4), "the two compute different losses"
    head = V * model.config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - 2 * head
    tokens, masks = b.real.sum(1), b.masked.sum(1)
    flops = 6 * (body * tokens.sum() + head * masks.sum())  # forward 2, backward 4 per weight and token
    if mdu.needs_reference(o):
        flops = flops + 2 * (body * tokens[:n].sum() + head * masks[:n].sum())
    return ours, plain, int(tokens.sum()), float(flops)


def bench_training(V, rate):
    print("\n| training step | ms | tokens/s | MB above weights | floor / time | plain: ms | MB | "
          "plain/ours: time | memory |\n|---|---|---|---|---|---|---|---|---|")
    for method in mdu.METHOD_OPTIONS:
        o = options("--method", method, "--batch-size", "4", *(["--null-prompt-rate", "0"] if method == "sft" else []))
        ours, plain, tokens, flops = trainers(o, V)
        (s, m), (sp, mp) = in_turn([ours, plain], ROUNDS)
        print(f"| {method} | {spread([1e3 * x for x in s], '{:.0f}')} | {tokens / np.median(s):.0f} | "
              f"{np.median(m) / 1e6:.0f} | {flops / rate / np.median(s):.0%} | {1e3 * np.median(sp):.0f} | "
              f"{np.median(mp) / 1e6:.0f} | {spread([b / a for a, b in zip(s, sp)])} | "
              f"{np.median(mp) / np.median(m):.2f} |", flush=True)


def plain_sampling(lm, prompt, length, steps):
    """One question: scores of the whole vocabulary at every position; each step fixes the most confident tokens."""
    ids = torch.tensor([prompt + [0] * length], device=mdu.this_device())
    masked = torch.arange(ids.shape[1], device=ids.device) >= len(prompt)
    for step in range(steps):
        logits = lm(input_ids=ids).logits.float()[0]  # (T, V)
        logits[:, 0] = -math.inf
        confidence, token = logits.softmax(-1).max(-1)
        chosen = confidence.masked_fill(~masked, -math.inf).topk(length // steps + (step < length % steps)).indices
        ids[0, chosen] = token[chosen]
        masked[chosen] = False
    return ids[0, len(prompt):].tolist()


def plain_likelihood(lm, prompt, response, masks):
    """One answer: a pass per mask, scores of the whole vocabulary at every position."""
    ids, n, values = torch.tensor([prompt + response], device=mdu.this_device()), len(prompt), []
    for mask in masks.to(ids.device):
        noised = ids.clone()
        noised[0, n:][mask] = 0
        logp = lm(input_ids=noised).logits.float().log_softmax(-1)[0, n:]  # (n, V)
        values.append(-logp.gather(1, ids[0, n:, None])[mask].mean().item())
    return values


@torch.no_grad()
def bench_evaluation(V, questions=8, length=32, samples=8):
    lm, pairs = bench_model(V)[0].eval(), bench_pools(V, rows=questions)["forget"]
    predictor = mdu.MaskPredictor(lm, 0, 1, 1)
    prompts = [prompt for prompt, _ in pairs]
    masks = [ev.draw_masks(len(response), samples, i) for i, (_, response) in enumerate(pairs)]
    tasks = {
        f"sampling {length} tokens": (lambda: ev.generate(predictor, prompts, length, length),
                                      lambda: [plain_sampling(lm, prompt, length, length) for prompt in prompts]),
        f"likelihood, {samples} masks": (
            lambda: torch.stack(ev.masked_nll(predictor, pairs, masks)).tolist(),
            lambda: [plain_likelihood(lm, *pair, m) for pair, m in zip(pairs, masks)])}
    print("\n| evaluation | questions/s | MB above weights | plain: questions/s | MB | ours/plain: rate | "
          "plain/ours: memory |\n|---|---|---|---|---|---|---|")
    for name, (ours, plain) in tasks.items():
        assert np.allclose(ours(), plain(), rtol=1e-4), f"{name}: the two give different results"
        (s, m), (sp, mp) = in_turn([ours, plain], ROUNDS)
        print(f"| {name} | {questions / np.median(s):.2f} | {np.median(m) / 1e6:.0f} | "
              f"{questions / np.median(sp):.2f} | {np.median(mp) / 1e6:.0f} | "
              f"{spread([b / a for a, b in zip(s, sp)])} | {np.median(mp) / np.median(m):.2f} |", flush=True)


ROUNDS = 3


def one_step(V=32000, batch=4, response=40):
    """-> (ms, MB above weights) of this process's share of an MDU step."""
    ours, *_ = trainers(options("--batch-size", str(batch)), V, response=(response, response + 1), prompt=(30, 31))
    (s, m), = in_turn([ours], ROUNDS)
    return float(1e3 * np.median(s)), float(np.median(m) / 1e6)


def shared_step():
    """A worker of on_processes."""
    torch.set_num_threads(1)
    with mdu.processes():
        mdu.say(json.dumps(one_step(batch=8)))


def on_processes(n):
    """one_step of 8 rows that n processes of torchrun share: the first one's figures."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", __file__, "shared_step"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bench_growth():
    """Time and memory of an MDU step as one size grows, and the straight line through the points."""
    sizes = {"response tokens n": ((20, 40, 80, 160), lambda n: one_step(response=n)),
             "forget rows n in a batch": ((1, 2, 4, 8), lambda n: one_step(batch=n)),
             "vocabulary n": ((8000, 32000, 64000, 128000), lambda n: one_step(V=n)),
             f"processes n, {os.cpu_count()} cores, 8 rows": ((1, 2, 4), on_processes)}
    print("\n| an MDU step against | " + "points: ms, MB | line: ms | largest miss |\n|---|---|---|---|")
    for title, (values, measure) in sizes.items():
        points = [measure(n) for n in values]
        ms = np.array([ms for ms, _ in points])
        slope, start = np.polyfit(values, ms, 1)
        shown = ", ".join(f"{n}: {ms:.0f}, {mb:.0f}" for n, (ms, mb) in zip(values, points))
        missed = np.abs(start + slope * np.array(values) - ms).max() / ms.max()
        line = "- | -" if measure is on_processes else f"{start:.0f} + {slope:.3g} n | {missed:.0%}"
        print(f"| {title} | {shown} | {line} |", flush=True)


def bench():
    torch.set_num_threads(1)
    with mdu.processes():
        rate = matrix_rate()
        print(f"On {mdu.this_device()}, one thread, matrix products at {rate / 1e9:.0f} GFLOP/s; ours and the plain "
              f"reading in turn, medians (and extremes) of {ROUNDS} rounds:")
        bench_training(126464, rate)
        bench_evaluation(126464)
        bench_growth()


if __name__ == "__main__":  # pytest runs the tests; the benchmark and test_soak start this file as their workers
    if sys.argv[1:] == ["shared_step"]:
        mdu.run_program("test_mdu.py", shared_step)
    if len(sys.argv) > 1:
        mdu.run_program("mdu.py", lambda: watch(sys.argv[1:-2], sys.argv[-1]))
    bench()

"""Tests of mdu.py and eval.py, on a CPU and offline:    python -m pytest -q test_mdu.py

Against slow float64 loops, numbers worked by hand, a plain training loop, a transformer written out here, and, for
runs split over processes or killed and resumed, each other.  Models are tiny and random, data written by the tests.
"""
import ast
import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from math import log
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
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
approx, each = pytest.approx, pytest.mark.parametrize


# ---- Shared: programs, files, fake models ----
def options(typed="", *more):
    return mdu.parse([*typed.split(), *more])


def program(argv, capsys, main=mdu.main):
    """Run mdu.py, or eval.py by its main, to the end -> (exit code, its one line on stderr or "")."""
    name = "eval.py" if main is ev.main else "mdu.py"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mdu.run_program(name, lambda: main(list(map(str, argv))))
    err = capsys.readouterr().err
    assert err.count("\n") <= 1 and err.startswith(f"{name}: " if err else ""), err
    return stop.value.code, err


@contextlib.contextmanager
def unchanged(*folders):
    def snapshot():
        return {f: f.read_bytes() for folder in folders for f in Path(folder).rglob("*") if f.is_file()}
    before = snapshot()
    yield
    assert snapshot() == before


def read_lines(file):
    return [json.loads(line) for line in Path(file).read_bytes().splitlines()]


def write_lines(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def weights(run):
    return {k: x for f in sorted(Path(run).glob("*.safetensors")) for k, x in safetensors.torch.load_file(f).items()}


def reweigh(run, change):
    tensors = {k: change(x) for k, x in weights(run).items()}
    safetensors.torch.save_file(tensors, Path(run) / "model.safetensors", {"format": "pt"})


def near(a, b, tol=1e-10):
    return torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


MASK, PAD = 10, 0
# Prompts and responses contain the mask id and the pad id as ordinary tokens: neither may be searched by value.
PAIRS = [([3, MASK], [4, PAD, 5, 9]), ([PAD, 7, 1], [2]), ([8], [MASK, 6, 1, 2, 5]), ([6, 6, 2, 9], [PAD, 3])]


class Fake:
    """A predictor of 11 ids whose logits depend on every token and its place; boost: of the mask token's logit."""
    mask_id, pad_id, end_id, vocab_size, shift, folder = MASK, PAD, 1, 11, False, None

    def __init__(self, boost=-50.0, by_entropy=False):
        self.lm = SimpleNamespace(config=SimpleNamespace(vocab_size=11, max_position_embeddings=32, hidden_size=8))
        g = torch.Generator().manual_seed(6)
        self.table, self.place, self.head = (torch.randn(*s, generator=g).double() for s in ((11, 8), (32, 8), (8, 11)))
        self.boost, self.by_entropy, self.calls = boost, by_entropy, []
    def __call__(self, ids, attention_mask, positions, branches=True):
        self.calls.append((ids.clone(), attention_mask.clone(), positions.clone()))
        place = self.place[:ids.shape[1]]  # (T, 8)
        context = (self.table[ids] * place * attention_mask[..., None]).sum(1, keepdim=True)  # (B, 1, 8)
        logits = 2 * torch.tanh(context / 2 + place)[positions] @ self.head  # (M, 11)
        logits[:, MASK] += self.boost
        return logits


def tiny(seed, mask_id=0, pad_id=1):
    """A random bidirectional Llama of 64 ids, in float64: sums in any order agree to 1e-10."""
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, initializer_range=0.4, is_causal=False)
    torch.manual_seed(seed)
    return mdu.MaskPredictor(transformers.LlamaForCausalLM(config).double(), mask_id, pad_id, end_id=1)


# ---- Shared: data in the layouts of TOFU and RWKU, toy runs ----
def write_configs(root, configs):
    """A dataset of the hub's layout: {config: (split, rows)}, one file each, named in the card's header."""
    header = ""
    for config, (split, rows) in configs.items():
        write_lines(root / f"{config}.jsonl", rows)
        header += f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {config}.jsonl\n"
    (root / "README.md").write_text(f"---\nconfigs:\n{header}---\n")
    return root


@pytest.fixture(scope="session")
def tofu(tmp_path_factory):
    """A folder in the layout of locuslab/TOFU."""
    configs, sizes = {}, dict(forget10_perturbed=8, retain90=24, retain_perturbed=8, real_authors_perturbed=3,
                              world_facts_perturbed=3)
    for config, n in sizes.items():
        name = "retain90" if config == "retain_perturbed" else config
        configs[config] = "train", [{"question": f"Q {name} {i}?", "answer": f"A {i}.",
                                     "perturbed_answer": [f"B {i}.", f"C {i}."]} for i in range(n)]
    for i, row in enumerate(configs["forget10_perturbed"][1]):
        row["paraphrased_answer"] = f"It is A {i}."
    root = write_configs(tmp_path_factory.mktemp("tofu"), configs)
    with unchanged(root):
        yield root


LABELS = {"choices": ["Yes.", "No way.", "Maybe so."], "labels": [1, 0, 0]}
RWKU_ROWS = {  # one row per config in the hub's fields, without "subject"
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


@pytest.fixture(scope="session")
def rwku(tmp_path_factory):
    """A folder in the layout of jinzhuoran/RWKU, about three of its twelve people."""
    texts = [dict(subject=name, intro=f"{name} is known.", text=f"{name} wrote book {i}.")
             for name in PEOPLE[:3] for i in range(4)]
    pairs = [dict(row, response=[f"Made up {i}.", row["text"]]) for i, row in enumerate(texts)]
    people = [dict(target=name, intro=f"{name} is known.") for name in PEOPLE]
    probes = {config: ("test", [dict(row, subject=name) for name in PEOPLE[:3] for _ in range(2)])
              for config, row in RWKU_ROWS.items()}
    root = write_configs(tmp_path_factory.mktemp("rwku"), dict(
        probes, forget_target=("train", people), train_positive_llama3=("train", texts),
        train_pair_llama3=("train", pairs)))
    with unchanged(root):
        yield root


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "base"
    mdu.main(["--method", "sft", "--epochs", "2", "--out", str(out)])
    with unchanged(out.parent):
        yield out


@pytest.fixture(scope="session")
def unlearned(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("unlearned") / "mdu"
    mdu.main(["--preset", "toy", "--model", str(base), "--epochs", "2", "--diagnose", "--out", str(out)])
    with unchanged(out.parent):
        yield out


# ---- Shared: tiny checkpoints in the layouts of the hub ----
NATIVE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=264, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu",
              tie_word_embeddings=False, auto_map={"AutoModel": "modeling.Model"}, torch_dtype="bfloat16")
CONFIGS = {  # model_type: config.json
    "llada": dict(
        activation_type="silu", alibi=False, auto_map={"AutoModel": "modeling.Model"}, block_type="llama", d_model=32,
        embedding_size=264, eos_token_id=257, input_emb_norm=False, layer_norm_type="rms", mask_token_id=258,
        max_sequence_length=256, mlp_hidden_size=48, n_heads=4, n_kv_heads=2, n_layers=2, pad_token_id=257,
        rms_norm_eps=1e-5, rope=True, rope_theta=5e5, scale_logits=False, vocab_size=264),
    "Dream": dict(NATIVE, mask_token_id=258, pad_token_id=256, rope_scaling=None, use_mrope=False,
                  use_sliding_window=False),
    "a2d-qwen3": dict(NATIVE, head_dim=16, attention_bias=False),  # mask and padding: the tokenizer's
    "a2d-llama": dict(NATIVE, rope_theta=5e5, mask_token_id=258),
    "llama": dict(NATIVE, rope_theta=5e5, is_causal=False, mask_token_id=258),
}
PARTS = "embed norm head block q k v o gate up down norm1 norm2 qnorm knorm".split()
LLADA_NAMES = dict(zip(PARTS, (
    "model.transformer.wte model.transformer.ln_f model.transformer.ff_out model.transformer.blocks q_proj k_proj "
    "v_proj attn_out ff_proj up_proj ff_out attn_norm ff_norm").split()))
NATIVE_NAMES = dict(zip(PARTS, (
    "model.embed_tokens model.norm lm_head model.layers self_attn.q_proj self_attn.k_proj self_attn.v_proj "
    "self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm "
    "self_attn.q_norm self_attn.k_norm").split()))
HEADERS = (  # LLaDA's template ends with the assistant's header, asked for or not
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>{{ m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}")
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
THINKING = CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
TOKENS = {  # ids from 256, after the bytes; end of text, start of text and mask first
    "llada": "<|startoftext|> <|endoftext|> <|mdm_mask|> <|start_header_id|> <|end_header_id|> <|eot_id|>".split(),
    "Dream": "<|endoftext|> <|beginoftext|> <|mask|> <|im_start|> <|im_end|>".split(),
    "a2d-qwen3": "<|endoftext|> <|im_start|> <|im_end|> <|mask|> <think> </think>".split(),
}


def write_tokenizer(folder, kind):
    """Byte-level vocabulary and special tokens, in the files of the hub's tokenizer."""
    alphabet = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    special = TOKENS.get(kind, TOKENS["llada"])
    settings = dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=256)
    if kind in ("Dream", "a2d-qwen3"):
        added = {256 + i: dict(content=text, special="think" not in text) for i, text in enumerate(special)}
        settings.update(tokenizer_class="DreamTokenizer" if kind == "Dream" else "Qwen2Tokenizer", unk_token=None,
                        mask_token="<|mask|>", added_tokens_decoder=added, add_prefix_space=False,
                        chat_template=CHATML if kind == "Dream" else THINKING)
        (folder / "vocab.json").write_text(json.dumps(alphabet))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.add_special_tokens(special)
        bpe.save(str(folder / "tokenizer.json"))
        settings.update(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|startoftext|>", chat_template=HEADERS)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(folder, kind, tied=False, **changes):
    """A random bf16 checkpoint in the hub's layout -> its weights; changes: to config.json (None: removed)."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIGS[kind], "model_type": kind, **changes}
    config["weight_tying" if kind == "llada" else "tie_word_embeddings"] = tied
    config = {k: v for k, v in config.items() if k not in changes or v is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    (folder / "modeling.py").write_text("raise RuntimeError('code of the folder was run')\n")
    write_tokenizer(folder, kind)
    d, g = CONFIGS[kind].get("head_dim", 8), torch.Generator().manual_seed(11)
    shapes = dict(q=(4 * d, 32), k=(2 * d, 32), v=(2 * d, 32), o=(32, 4 * d), gate=(48, 32), up=(48, 32), down=(32, 48),
                  norm1=(32,), norm2=(32,), **{part: (d,) for part in ("qnorm", "knorm") if "qwen3" in kind})
    shapes = {(None, "norm", "weight"): (32,), **{(None, part, "weight"): (264, 32) for part in ("embed", "head")},
              **{(layer, part, "weight"): shape for layer in (0, 1) for part, shape in shapes.items()},
              **{(layer, part, "bias"): shapes[part][:1] for layer in (0, 1) for part in "qkv" * (kind == "Dream")}}
    w = {key: (("norm" in key[1]) + 0.3 * torch.randn(*shape, generator=g)).bfloat16() for key, shape in shapes.items()}
    names, tensors = LLADA_NAMES if kind == "llada" else NATIVE_NAMES, {}
    for (layer, part, end), x in w.items():
        if not (tied and part == "head"):
            tensors[f"{names[part]}.{end}" if layer is None else f"{names['block']}.{layer}.{names[part]}.{end}"] = x
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text("{}")
    if tied:
        w[None, "head", "weight"] = w[None, "embed", "weight"]
    return {key: x.float() for key, x in w.items()}


@pytest.fixture(scope="session", params=CONFIGS)
def hub(request, tmp_path_factory):
    """(kind, folder, weights by part, predictor, tokenizer) of a tiny checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("hub") / request.param
    w = write_checkpoint(folder, request.param)
    with unchanged(folder):
        yield request.param, folder, w, *mdu.load_backbone(str(folder))


# ---- Losses, against one Python loop per sum of the paper; what carries no gradient is a Python float ----
def sums(logits, masked, term):
    """For each sequence b the sum of term(b, m) over its masked positions, m counting the rows of `logits`."""
    count = itertools.count()
    return torch.stack([sum((term(b, next(count)) for hit in row if hit), 0 * logits.sum())
                        for b, row in enumerate(masked.tolist())])


def slow_softmax(row):
    exps = [z.exp() for z in row]
    return [e / sum(exps) for e in exps]


def slow_mdu(logits, anchor, masked, tau):
    """Eq. 5: 1/|M_t| sum_i KL(p || q^tau / Z_i); q^0 is 1 for every anchor."""
    def kl(b, m):
        p = slow_softmax(logits[m])
        power = [1.0] * len(p) if tau == 0 else [q.item() ** tau for q in slow_softmax(anchor[m])]
        return sum(p_v * (p_v.log() - log(q_v / sum(power))) for p_v, q_v in zip(p, power))
    return sums(logits, masked, kl) / masked.sum(1).clamp(min=1)


def slow_nll(logits, targets, masked, weight):
    def nll(b, m):
        p = slow_softmax(logits[m])[targets[m]]
        return -weight(b, p.item()) * p.log()
    return sums(logits, masked, nll)


def problem(B=5, T=7, V=6):
    """Random float64 arguments, by name, for every loss: ragged masks, and sequence 2 with nothing masked."""
    torch.manual_seed(0)
    masked = torch.rand(B, T) < 0.5
    masked[2] = False
    M = int(masked.sum())
    nlls = {f"nll{kind}": 9 * torch.rand(B).double() for kind in ("", "_ref", "_win", "_win_ref", "_lose", "_lose_ref")}
    return dict(nlls, masked=masked, targets=torch.randint(V, (M,)), logits=2 * torch.randn(M, V).double(),
                anchor=2 * torch.randn(M, V).double(), t=0.1 + 0.9 * torch.rand(B).double(),
                length=torch.randint(1, 9, (B,)))


LOSSES = {  # name: (its slow twin, arguments: names of problem() or plain values)
    "mdu tau 0": (slow_mdu, ("logits", None, "masked", 0)),
    "mdu tau .25": (slow_mdu, ("logits", "anchor", "masked", 0.25)),
    "mdu tau 1": (slow_mdu, ("logits", "anchor", "masked", 1.0)),
    "sft": (lambda z, y, m, t: slow_nll(z, y, m, lambda b, p: 1 / t[b].item()), ("logits", "targets", "masked", "t")),
    "wga": (lambda z, y, m, gamma: -slow_nll(z, y, m, lambda b, p: p ** gamma), ("logits", "targets", "masked", 0.3)),
    "ga": (lambda nll: -nll, ("nll",)),
    "npo": (lambda nll, ref, beta: 2 / beta * (1 + (-beta * (nll - ref.detach())).exp()).log(),
            ("nll", "nll_ref", 0.2)),
    "simnpo": (lambda nll, n, beta, delta: 2 / beta * (1 + (-beta * (nll / n - delta)).exp()).log(),
               ("nll", "length", 2.5, 0.4)),
    "dpo": (lambda win, win_ref, lose, lose_ref, beta: (
        1 + (-beta * ((-win + win_ref.detach()) - (-lose + lose_ref.detach()))).exp()).log(),
        ("nll_win", "nll_win_ref", "nll_lose", "nll_lose_ref", 0.1)),
}
TRAINED = {"logits", "nll", "nll_win", "nll_lose"}  # the arguments that a gradient may reach


def cast(values, change):
    return {k: change(x) if x.is_floating_point() else x for k, x in values.items()}


def evaluate(function, names, values):
    """The loss, and the gradient of a fixed combination of its values, by argument (None: not reached)."""
    values = cast(values, lambda x: x.clone().requires_grad_())
    out = function(*(values[a] if isinstance(a, str) else a for a in names))
    leaves = [a for a in names if isinstance(a, str) and values[a].is_floating_point()]
    mixed = out @ torch.linspace(0.5, 1.5, len(out), dtype=out.dtype)
    grads = torch.autograd.grad(mixed, [values[a] for a in leaves], allow_unused=True)
    return out.detach(), dict(zip(leaves, grads))


@each("name", LOSSES)
def test_losses_equal_slow_loops(name):
    (slow, names), loss, v = LOSSES[name], getattr(mdu, name.split()[0] + "_loss"), problem()
    (ours, grads), (expected, slow_grads) = (evaluate(f, names, v) for f in (loss, slow))
    near(ours, expected)
    for argument, grad in grads.items():
        if argument in TRAINED:
            near(grad, slow_grads[argument])
        elif argument != "t":
            assert grad is None or not grad.any(), argument
    if "masked" in names:
        assert ours[2] == 0  # nothing masked: zero, not 0/0
        wide = evaluate(loss, names, dict(v, masked=F.pad(v["masked"], (0, 5))))
        near([wide[0], wide[1]["logits"]], [ours, grads["logits"]], 1e-14)
        for dtype in (torch.bfloat16, torch.float16):
            low = cast(v, lambda x: x.to(dtype))
            near(*(evaluate(loss, names, x)[0] for x in (low, cast(low, torch.Tensor.float))), 1e-6)
    elsewhere, v = {"torch": torch, "F": F}, cast(v, torch.Tensor.float)
    exec(inspect.getsource(loss), elsewhere)
    for gap in (1e6, -1e6):
        v.update({k: 1e4 * v[k].sign() for k in ("logits", "anchor")}, nll=gap + v["nll_ref"], nll_win=gap + v["nll"])
        value, grads = evaluate(elsewhere[loss.__name__], names, v)
        assert value.isfinite().all() and all(grads[k].isfinite().all() for k in TRAINED & {*grads})


ONE, TWO, FIRST = torch.tensor([[False, True]]), torch.tensor([[True, True]]), torch.tensor([0, 0])
FLAT, TILT, STEEP = [0.0, 0.0], [0.0, log(3)], [0.0, log(9)]  # p = (1/2, 1/2), (1/4, 3/4), (1/10, 9/10)


@each("function, args, expected", [
    (mdu.mdu_loss, (f64(FLAT), f64(TILT), ONE, 1.0), log(4 / 3) / 2),  # 1/2 log 2 + 1/2 log 2/3
    (mdu.mdu_loss, (f64(FLAT, TILT), f64(TILT, TILT), TWO, 1.0), log(4 / 3) / 4),  # the second adds 0
    (mdu.mdu_loss, (f64(FLAT), f64(STEEP), ONE, 0.5), log(4 / 3) / 2),  # STEEP^1/2 / Z is TILT
    (mdu.mdu_loss, (f64(TILT), None, ONE, 0), 3 / 4 * log(3) - log(2)),  # 1/4 log 1/2 + 3/4 log 3/2
    (mdu.sft_loss, (f64(TILT, FLAT), FIRST, TWO, f64(0.5)), 6 * log(2)),  # 2 (log 4 + log 2)
    (mdu.wga_loss, (f64(TILT, FLAT), FIRST, TWO, 2.0), -3 / 8 * log(2)),  # 1/16 log 4 + 1/4 log 2
    (mdu.ga_loss, (f64(2),), -2),
    (mdu.npo_loss, (f64(1 + 2 * log(3)), f64(1), 0.5), 4 * log(4 / 3)),  # sigma(log 3) = 3/4
    (mdu.simnpo_loss, (f64(4 + 8 * log(3)), torch.tensor([4]), 0.5, 1.0), 4 * log(4 / 3)),
    (mdu.dpo_loss, (f64(1), f64(1 + log(3)), f64(2 + log(3)), f64(2), 0.5), log(4 / 3)),  # ratios +log 3, -log 3
])
def test_losses_by_hand(function, args, expected):
    near(function(*args), f64(expected))


# ---- Masking ----
def test_collate_and_mask_prompt():
    ids, response, attention_mask = mdu.collate(PAIRS[:2], PAD)
    assert ids.tolist() == [[3, MASK, 4, PAD, 5, 9], [PAD, 7, 1, 2, PAD, PAD]]
    assert response.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]] and response.dtype == torch.bool
    assert attention_mask.tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]] and attention_mask.dtype == torch.bool
    noised = torch.tensor([[3, MASK, MASK, PAD, 5, MASK], [PAD, 7, 1, 2, PAD, PAD]])
    before = noised.clone()
    assert mdu.mask_prompt(noised, response, attention_mask, MASK).tolist() == [
        [MASK, MASK, MASK, PAD, 5, MASK], [MASK, MASK, MASK, 2, PAD, PAD]]
    assert torch.equal(noised, before)


@each("at_least_one", [False, True, torch.tensor([[True], [False]] * 200)])
def test_mask_tokens_follows_its_definition(at_least_one):
    (ids, response, _), force = mdu.collate(PAIRS * 100, PAD), torch.as_tensor(at_least_one).expand(400, 1)
    torch.manual_seed(0)
    t_uniform, token_uniforms = torch.rand(400).double(), torch.rand(ids.shape).double()
    t_uniform[::3] *= 0.05  # many empty draws
    t_uniform[1::40], t_uniform[2::40] = 0.0, math.nextafter(1, 0)  # and both ends
    before, forced = ids.clone(), []
    noised, masked, t = mdu.mask_tokens(ids, response, MASK, t_uniform, token_uniforms, at_least_one)
    near(t, 0.001 + 0.999 * t_uniform)
    for b, row in enumerate(response):
        places = row.nonzero().flatten().tolist()
        hit = [i for i in places if token_uniforms[b, i] < t[b]]
        if force[b] and not hit:
            hit = [min(places, key=lambda i: token_uniforms[b, i])]
            forced += [places.index(hit[0])] * (len(places) == 5)
        assert masked[b].nonzero().flatten().tolist() == hit
    assert all(forced.count(i) > len(forced) / 12 for i in range(5)) if force.all() else (~masked.any(1)).sum() > 20
    assert torch.equal(ids, before) and torch.equal(noised, torch.where(masked, torch.tensor(MASK), ids))
    edge = f64(0.001, math.nextafter(0.001, 0))[None]  # a draw equal to t masks nothing
    assert mdu.mask_tokens(torch.ones(1, 2).long(), edge > 0, MASK, f64(0.0), edge)[1].tolist() == [[False, True]]


def test_bernoulli_masks_estimate_the_exact_loss():
    """E[1/t sum -log p] for losses that depend on the whole mask, against the exact sum over masks: one of k out of n
    tokens has weight integral t^(k-1) (1-t)^(n-k) dt = (k-1)! (n-k)! / n!.  Points are quasi-random."""
    n, N = 3, 2 ** 16
    z = torch.randn(2 ** n, n, generator=torch.Generator().manual_seed(4)).double()  # logit by (mask, position)
    exact = sum(math.factorial(s.bit_count() - 1) * math.factorial(n - s.bit_count()) / math.factorial(n)
                * sum(math.log1p(math.exp(-z[s, i])) for i in range(n) if s >> i & 1) for s in range(1, 2 ** n))
    points = torch.quasirandom.SobolEngine(n + 1, scramble=True, seed=0).draw(N, dtype=torch.float64)
    ids = torch.zeros(N, n, dtype=torch.long)
    _, masked, t = mdu.mask_tokens(ids, ids == 0, 1, points[:, 0], points[:, 1:])
    logits = z[(masked.long() * 2 ** torch.arange(n)).sum(1)][masked]
    logits = torch.stack([logits, torch.zeros_like(logits)], 1)
    assert mdu.sft_loss(logits, ids[masked], masked, t).mean().item() == approx(exact, rel=0.004)


# ---- Draws ----
def pools(n=10, m=7):
    """Made-up rows; the first id of a prompt names the row.  Forget rows have three perturbed answers, 8, 9 and 10."""
    def row(start, i, wrong):
        prompt = [start + i, 4, 5][:2 + i % 2]
        return [(prompt, [*range(6, 8 + i % 5), 1]), *((prompt, [8 + j, 9, 1]) for j in range(wrong))]
    return {"forget": [row(30, i, 3) for i in range(n)], "retain": [row(50, i, 0) for i in range(m)]}


def drawn(typed, steps, m=7):
    found = [mdu.draw_step(options(typed), pools(10, m), step, 1) for step in steps]
    return ([[(*e[:3], e.token_uniforms.tolist()) for e in group] for forget, _ in found for group in forget],
            [(*e[:3], e.token_uniforms.tolist()) for _, retain in found for e in retain])


@each("method", ["mdu", "dpo"])
def test_draws_depend_on_seed_stream_and_index_alone(method, monkeypatch):
    typed = f"--method {method} --batch-size "
    step = drawn(typed + "10", [2])
    assert step == drawn(typed + "2 --grad-accum 5", [2])
    with monkeypatch.context() as patch:
        for world in (2, 5):
            patch.setattr(mdu, "WORLD", world)
            parts = [patch.setattr(mdu, "RANK", rank) or drawn(typed + "10", [2]) for rank in range(world)]
            assert {len(part[k]) for part in parts for k in (0, 1)} == {10 // world}
            assert [sorted(sum((part[k] for part in parts), [])) for k in (0, 1)] == [sorted(part) for part in step]
    names = [group[0][0][0] for group in drawn(typed + "5", range(4))[0]]
    assert sorted(names[:10]) == sorted(names[10:]) == [*range(30, 40)] and {*names[:5]} != {*names[10:15]}
    ga, other = drawn("--method ga --batch-size 10", [2]), drawn(typed + "10 --seed 2", [2])
    assert sorted(group[0] for group in ga[0]) == sorted(group[0] for group in step[0]) and not ga[1]
    assert not {group[0][2] for group in step[0]} & {group[0][2] for group in other[0]}


def test_draws_are_stratified_padded_and_uniform():
    examples = [group[0] for group in drawn("--method sft --batch-size 5 --response-length 12", range(400))[0]]
    for i in range(0, 2000, 5):
        assert sorted(int(e[2] * 5) for e in examples[i:i + 5]) == [0, 1, 2, 3, 4]
    assert abs(np.mean([e[2] * 5 % 1 for e in examples]) - 0.5) < 0.03
    lengths = [len(e[1]) for e in examples if e[0][0] == 30]
    assert set(lengths) == set(range(3, 13)) and max(map(lengths.count, range(3, 13))) < 50  # of 200
    assert all({*e[1][2 + e[0][0] % 5:]} == {1} and len(e[3]) == len(e[1]) for e in examples)
    uniforms = sum((e[3] for e in examples), [])
    assert abs(np.mean(uniforms) - 0.5) < 0.01 and abs(np.var(uniforms) - 1 / 12) < 0.005
    for most in (1, 12):
        forget, retain = drawn(f"--batch-size 5 --response-length {most}", range(100))
        assert all(group[0][1] == [*range(6, 8 + group[0][0][0] % 5), 1] for group in forget)
        assert {len(e[1]) for e in retain} == set(range(3, max(most, 7) + 1))
    first = {mdu.rng_for(SimpleNamespace(seed=seed), stream, k).random()
             for seed in (1, 2) for stream in mdu.STREAMS for k in range(20)}
    groups, retain = drawn("--method dpo --batch-size 8", range(5), 10)
    assert len(first) == 2 * 7 * 20 and len({e[3][0] for e in [*sum(groups, []), *retain]}) == 3 * 40
    for lose, win in groups:
        assert lose[0] == win[0] and lose[2] == win[2] and lose[1][0] == 6 and win[1][1:] == [9, 1]
    assert {win[1][0] for _, win in groups} == {8, 9, 10}
    assert not {lose[2] for lose, _ in groups} & {e[2] for e in retain}
    assert [lose[0][0] - 30 for lose, _ in groups] != [e[0][0] - 50 for e in retain]


# ---- The step ----
def slow_step(args, model, frozen, forget, retain, hide=True):
    """Algorithm 1 one unpadded sequence at a time -> (forget losses, retain losses); hide: theta0 sees no prompt."""
    def logp(net, e, prompt, force=False):
        """t, log p at the masked positions, and those of the true tokens."""
        t, mask = 0.001 + 0.999 * e.t_uniform, model.mask_id
        hit = [i for i, u in enumerate(e.token_uniforms) if u < t] or [int(e.token_uniforms.argmin())] * force
        noised = [mask if i in hit else token for i, token in enumerate(e.response)]
        logits = net.lm(torch.tensor([(prompt or [mask] * len(e.prompt)) + noised])).logits[0, len(e.prompt):]
        lp = logits.log_softmax(-1)[hit]
        return t, lp, [lp[j, e.response[i]] for j, i in enumerate(hit)] + [0 * lp.sum()]
    def sft(net, e):
        t, _, true = logp(net, e, e.prompt)
        return -sum(true) / t
    losses = []
    for e, *preferred in forget:
        if args.method == "mdu":
            lp, lq = (logp(net, e, prompt, force=True)[1]
                      for net, prompt in ((model, e.prompt), (frozen, None if hide else e.prompt)))
            losses.append((lp.exp() * (lp - (args.tau * lq.detach()).log_softmax(-1))).sum() / len(lp))
        elif args.method == "wga":
            losses.append(sum(x.detach().exp() ** args.gamma * x for x in logp(model, e, e.prompt)[2]))
        elif args.method == "sft":
            losses.append(sft(model, e))
        else:
            nll = [sft(net, e) for net in (model, frozen)]
            wins = [sft(net, win) for win in preferred for net in (model, frozen)]
            given = {"npo": (*nll, args.beta), "simnpo": (nll[0], len(e.response), args.beta, args.delta),
                     "dpo": (*wins, *nll, args.beta)}.get(args.method, nll[:1])
            losses.append(LOSSES["ga" if args.method == "gd" else args.method][0](*given))
    return torch.stack(losses), torch.stack([sft(model, e) for e in retain] or [torch.zeros(()).double()])


def a_step(method):
    args = options(f"--method {method} --batch-size 6 --response-length 9")
    forget, retain = mdu.draw_step(args, pools(), 1, 1)
    for group in (forget[2], retain[:1]):
        group[:] = [e._replace(t_uniform=0.0, token_uniforms=0.5 + e.token_uniforms / 2) for e in group]
    return args, forget, retain


class Merged:
    """theta0 with W + 8/rank B A written out in place of every W that has branches, as a function of A and B."""
    def __init__(self, plain, branched):
        self.mask_id, self.plain, params = plain.mask_id, plain, dict(branched.lm.named_parameters())
        self.tensors = dict(plain.lm.named_parameters())
        for name in [name[:-1] for name in params if name.endswith(".A")]:
            A, B = params[name + "A"], params[name + "B"]
            self.tensors[name + "weight"] = self.tensors[name + "weight"] + 8 / len(A) * B @ A

    def lm(self, ids):
        return torch.func.functional_call(self.plain.lm, self.tensors, (ids,))


@each("method", ["mdu --tau 0", "mdu --tau 0.25", "mdu --tau 1", "ga", "gd", "npo", "simnpo --delta 0.3", "dpo", "sft",
                 "wga --gamma 0.5", "mdu --lora 3", "npo --lora 3", "dpo --lora 3"])
def test_step_equals_one_sequence_at_a_time(method):
    """Losses and all gradients, with LoRA of A and B alone; none reaches theta0, which not all methods need."""
    args, forget, retain = a_step(method)
    model, frozen, results = tiny(0), tiny(1), []
    slow_model, reference = model, frozen if args.tau or args.method in ("npo", "dpo") else None
    if args.lora:
        mdu.add_branches(model, 3, seed=5)
        for p in model.double().parameters():
            p.data += 0.1 * torch.randn_like(p) * p.requires_grad
        frozen = tiny(0)
        slow_model, reference = Merged(frozen, model), partial(model, branches=False)
    losses = mdu.step_losses(args, model, reference, forget, retain)
    assert [len(part) for part in losses] == [6, 6 if args.retain_weight else 0]
    trained = [p for p in model.parameters() if p.requires_grad]
    for f, r in (losses, slow_step(args, slow_model, frozen, forget, retain)):
        total = f @ torch.linspace(0.5, 1.5, 6).double() + 0.7 * r.sum()
        results.append([f.detach(), r.sum().detach(), *torch.autograd.grad(total, trained, retain_graph=True)])
    near(*results, 1e-9)
    assert len(trained) == (2 * 7 * 2 if args.lora else 21) and all(grad.any() for grad in results[0][2:])
    assert {*torch.autograd.grad(losses[0].sum(), [*frozen.parameters()], allow_unused=True)} == {None}


def test_learning_rate_by_hand():
    args = options("--lr 0.2")
    assert [mdu.learning_rate(args, s, 100) for s in range(6)] == approx([0.04, 0.08, 0.12, 0.16, 0.2, 0.2])
    assert [mdu.learning_rate(args, 5 + 95 * k / 6, 100) for k in (2, 3, 4, 6)] == approx([0.15, 0.1, 0.05, 0])


def toy(base, out, typed=""):
    return ["--preset", "toy", "--model", str(base), "--out", str(out), *typed.split()]


def lines_of(run):
    return [{k: v for k, v in line.items() if k != "rows/s"} for line in read_lines(Path(run) / "metrics.jsonl")]


@each("method, retain_weight", [("npo", 0.5), ("mdu --tau 0.5", 2.0), ("wga --gamma 4", 0.0)])
def test_training_equals_a_plain_loop(method, retain_weight, base, tmp_path, monkeypatch):
    """Three steps in float64, also in micro-batches; clipping and AdamW written out.  Those of wga need no clipping."""
    load = mdu.load_backbone
    monkeypatch.setattr(mdu, "load_backbone", lambda *args: (load(*args)[0].double(), load(*args)[1]))
    typed = f"--method {method} --epochs 1 --lr 1e-4 --retain-weight {retain_weight}"
    mdu.main(toy(base, tmp_path / "run", typed))
    mdu.main(toy(base, tmp_path / "split", typed + " --batch-size 2 --grad-accum 4"))
    args = options(*toy(base, "run", typed))
    (model, tokenizer), (frozen, _) = (mdu.load_backbone(str(base)) for _ in range(2))
    encoded = mdu.encode_pools(args, mdu.load_data(args), model, tokenizer)
    params = [p.requires_grad_() for p in model.lm.parameters()]
    moments = [torch.zeros(2, *p.shape) for p in params]
    for step, lr in enumerate([1e-4, 1e-4, 0.5e-4], 1):  # one step of warm-up, then half a cosine
        forget, retain = slow_step(args, model, frozen, *mdu.draw_step(args, encoded, step - 1, model.pad_id))
        grads = torch.autograd.grad(forget.mean() + retain_weight * retain.sum() / 8, params)
        norm = math.sqrt(sum(grad.pow(2).sum().item() for grad in grads))
        assert (norm > 1) == ("wga" not in method)
        for i, (p, grad) in enumerate(zip(params, grads)):
            grad = grad / max(1, norm)
            moments[i] = torch.stack([0.9 * moments[i][0] + 0.1 * grad, 0.999 * moments[i][1] + 0.001 * grad ** 2])
            p.data -= lr * moments[i][0] / (1 - 0.9 ** step) / ((moments[i][1] / (1 - 0.999 ** step)).sqrt() + 1e-8)
        losses = [forget.mean().item(), retain.sum().item() / 8][:1 + (retain_weight > 0)]
        for run in ("run", "split"):
            line = lines_of(tmp_path / run)[step - 1]
            assert [line[k] for k in ("step", "epoch", "lr", "grad_norm", "forget", "retain") if k in line] == (
                approx([step, step / 3, lr, norm, *losses], rel=1e-6))
    for run in ("run", "split"):
        for name, x in weights(tmp_path / run).items():
            near(x, model.lm.state_dict()[name].float(), 1e-6)


def test_diagnose_equals_one_sequence_at_a_time():
    args, rows, model, frozen = options("--batch-size 3"), pools()["forget"], tiny(0), tiny(1)
    examples = [[mdu.draw_example(args, "diagnose", i, row[0])] for i, row in enumerate(rows)]
    expected = [slow_step(options(f"--tau {tau}"), model, frozen, examples, [], hide)[0].mean().item()
                for tau, hide in (("1", False), ("1", True), ("0", True))]
    ours = mdu.diagnose(args, model, frozen, {"forget": rows})
    assert list(ours) == ["base", "anchor", "uniform"] and list(ours.values()) == approx(expected, rel=1e-9)


# ---- LoRA ----
@each("dtype", [torch.float32, torch.bfloat16])
def test_lora_off_is_theta0_bit_for_bit(dtype):
    (args, forget, retain), plain, grads = a_step("mdu"), tiny(0).to(dtype), []
    ids, everything = torch.arange(2, 22).view(2, 10), torch.ones(2, 10, dtype=torch.bool)
    for recompute in (False, True):
        model = tiny(0).to(dtype).train()
        if recompute:
            model.lm.activation_checkpointing_enable()
        mdu.add_branches(model, 4, seed=1)
        reference, trained = partial(model, branches=False), [p for p in model.parameters() if p.requires_grad]
        drawn_a = torch.cat([A.flatten() * A.shape[1] ** 0.5 for A in trained[::2]])
        assert abs(drawn_a.mean()) < 0.1 and abs(drawn_a.std() - 1) < 0.1
        for moved in (False, True, True):
            on, off, theta0 = (net(ids, everything, everything) for net in (model, reference, plain))
            assert torch.equal(off, theta0) and torch.equal(on, theta0) != moved
            (mdu.step_losses(args, model, reference, forget, retain)[0].sum()).backward()
            for p in trained:
                p.data -= 0.1 * p.grad
        assert {p.dtype for p in trained} == {torch.float32}
        grads.append([p.grad for p in trained])
    near(*grads, 1e-6)


@each("method, loads", [("mdu --lora 4", 1), ("npo --lora 4 --dtype bfloat16 --checkpoint-activations", 1), ("dpo", 2),
                        ("mdu", 2), ("mdu --tau 0", 1)])
def test_lora_runs_need_one_model_and_leave_an_ordinary_one(method, loads, base, tmp_path, monkeypatch):
    """A checkpoint has branches and optimizer only; the saved model is that with branches, other tensors the base's."""
    called = {name: mock.Mock(wraps=getattr(mdu, name)) for name in ("load_backbone", "save_checkpoint", "save_model")}
    for name, recorded in called.items():
        monkeypatch.setattr(mdu, name, recorded)
    mdu.main(toy(base, tmp_path / "run", f"--method {method} --epochs 1 --lr 0.01 --checkpoint-every 2"))
    assert called["load_backbone"].call_count == loads
    if "lora" in method:
        state, predictor = called["save_checkpoint"].call_args.args[2], called["save_model"].call_args.args[1]
        assert len(state) == 4 * 28 and all(name.endswith((".A", ".B")) for name in state)
        before, after, dtype = weights(base), weights(tmp_path / "run"), predictor.lm.lm_head.weight.dtype
        assert before.keys() == after.keys()
        for name, x in after.items():
            assert torch.equal(x, before[name].to(dtype).float()) != ("proj" in name), name
        ids, nets = torch.arange(5, 45).view(4, 10), (predictor, mdu.load_backbone(str(tmp_path / "run"))[0])
        near(*(net(ids, ids > 0, ids > 0).detach().float() for net in nets), 1e-5 if "bf" not in method else 0.1)


# ---- Options and data ----
def test_options_resolve_to_their_documented_numbers():
    for typed, expected in {
            "": dict(method="mdu", tau=1.0, retain_weight=1.0, data="toy", epochs=100, lr=5e-4, out="out/toy/mdu-tau1"),
            "--method sft": dict(lr=3e-3, epochs=170, batch_size=32, out="out/toy/base", tau=None, model=None),
            "--method simnpo --model x": dict(beta=4.5, preset="own", lr=1e-5, epochs=5),
            "--lora 8 --tau 0.5": dict(lr=5e-3, out="out/toy/mdu-tau0.5"), "--lora 8 --lr 0.3": dict(lr=0.3),
            "--method npo": dict(beta=0.2), "--method dpo": dict(beta=0.1), "--method wga": dict(gamma=1.0),
            "--preset tofu-llada": dict(batch_size=4, grad_accum=4, lr=1e-5, epochs=9, retain_weight=1.0),
            "--preset tofu-llada --method sft": dict(lr=2e-5, epochs=1000), "--preset tofu-dream": dict(epochs=5),
            "--preset tofu-dream --method sft": dict(epochs=300), "--preset tofu-qwen": dict(lr=5e-5),
            "--preset rwku-dream --subject 1": dict(lr=1e-5, epochs=3, grad_accum=1, retain_weight=0.0)}.items():
        assert expected.items() <= vars(options(typed)).items(), typed


def test_the_toys_base_is_trained_where_it_is_missing(tmp_path, monkeypatch, capsys):
    """It learns all splits, and 68 answers with masked prompts.  A base is reused, a folder that is none is kept."""
    monkeypatch.setitem(mdu.PRESETS["toy"]["sft"], "epochs", 0.2)
    mdu.main(["--epochs", "0.3", "--out", f"{tmp_path}/run"])
    predictor, tokenizer = mdu.load_backbone(f"{tmp_path}/base")
    taught = mdu.encode_pools(options("--method sft"), mdu.toy_world(), predictor, tokenizer)["forget"]
    assert len(taught) == 136 + 24 + 22 + 22 + 68 and {token for (p, _), in taught[-68:] for token in p} == {0}
    with unchanged(tmp_path / "base"):
        mdu.main(["--epochs", "0.3", "--method", "ga", "--out", f"{tmp_path}/run", "--overwrite"])
    (tmp_path / "mine/base").mkdir(parents=True)
    (tmp_path / "mine/base/thesis.txt").write_text("mine")
    assert program(["--out", tmp_path / "mine/run"], capsys)[0] == 2 and (tmp_path / "mine/base/thesis.txt").exists()


def test_rows_are_read(tofu, rwku, tmp_path):
    def load(data, *argv):
        return mdu.load_data(options(f"--model x/y --data {data}", *argv))
    splits = load(tofu)
    assert [len(rows) for rows in splits.values()] == [8, 24] and splits["retain"][5]["question"] == "Q retain90 5?"
    assert splits["forget"][1] == {"question": "Q forget10_perturbed 1?", "answer": "A 1.",
                                   "paraphrased_answer": "It is A 1.", "perturbed_answer": ["B 1.", "C 1."]}
    assert [len(rows) for rows in load(tofu, "--limit", "2").values()] == [2, 2]
    for typed, name in (("2", PEOPLE[1]), (PEOPLE[2], PEOPLE[2])):
        question, first = f"{name} is known. Please write a short biography of {name}.", 4 * PEOPLE.index(name)
        expected = [dict(question=question, answer=f"{name} wrote book {i}.", perturbed_answer=[]) for i in range(4)]
        assert load(rwku, "--subject", typed) == {"forget": expected, "retain": []}
        assert load(rwku, "--subject", typed, "--method", "dpo")["forget"] == [
            dict(row, perturbed_answer=[f"Made up {first + i}."]) for i, row in enumerate(expected)]
    (tmp_path / "rows").write_bytes("""\ufeff{"question": "q", "answer": "a", "id": 7}\r\n\r\n
        {"prompt": "p", "response": "é", "perturbed_answer": "w"}""".encode())
    assert mdu.read_jsonl("forget", tmp_path / "rows") == [
        dict(question="q", answer="a", perturbed_answer=[]), dict(question="p", answer="é", perturbed_answer=["w"])]


def test_tokens_of_the_chat_templates(hub):
    kind, _, _, predictor, tokenizer = hub
    control = " ".join(token for token in [*TOKENS.get(kind, TOKENS["llada"]), "\0 é"] if "think" not in token)
    expected = {"Dream": [259, f"user\n{control}", 260, "\n", 259, "assistant\n"],
                "a2d-qwen3": [257, f"user\n{control}", 258, "\n", 257, "assistant\n", 260, "\n\n", 261, "\n\n"]}.get(
        kind, [256, 259, "user", 260, f"\n\n{control}", 261, 259, "assistant", 260, "\n\n"])
    ids = sum(([part] if isinstance(part, int) else tokenizer(part, split_special_tokens=True).input_ids
               for part in expected), [])
    assert mdu.encode_prompt(tokenizer, f" {control}\n") == ids
    splits = {"forget": [{"question": control, "answer": control, "perturbed_answer": [control]}]}
    with mock.patch.object(predictor.lm.config, "max_position_embeddings", 9999):
        rows = mdu.encode_pools(options("--method dpo"), splits, predictor, tokenizer)["forget"][0]
    for prompt, response in rows:
        assert prompt == ids and response[-1] == predictor.end_id and max(response[:-1]) < 256
        assert tokenizer.decode(response[:-1]) == control
    assert mdu.encode_prompt(tokenizer, control, control) == ids + rows[1][1][:-1]
    assert (predictor.mask_id, predictor.pad_id, predictor.end_id, predictor.shift, predictor.by_entropy) == {
        "Dream": (258, 256, 260, True, True), "a2d-qwen3": (259, 256, 258, False, False),
        "llama": (258, 257, 257, False, False)}.get(kind, (258, 257, 261, False, False))


# ---- Backbones ----
def slow_transformer(w, ids, eps, theta):
    """Logits (T, V) of one sequence, from RMSNorm, rotary attention without a causal mask, and SwiGLU."""
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
    for layer in range(2):
        h = rms(x, layer, "norm1")
        q, k, v = (linear(h, layer, part).view(len(ids), n, -1) for part, n in (("q", 4), ("k", 2), ("v", 2)))
        if (layer, "qnorm", "weight") in w:
            q, k = rms(q, layer, "qnorm"), rms(k, layer, "knorm")
        k, v = (heads.repeat_interleave(2, dim=1) for heads in (rotate(k), v))  # two heads share one of k and v
        attention = (torch.einsum("ihd,jhd->hij", rotate(q), k) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + linear(torch.einsum("hij,jhd->ihd", attention, v).flatten(1), layer, "o")
        h = rms(x, layer, "norm2")
        x = x + linear(F.silu(linear(h, layer, "gate")) * linear(h, layer, "up"), layer, "down")
    return linear(rms(x, None, "norm"), None, "head")


@each("kind, tied", [*((kind, False) for kind in CONFIGS), ("llada", True), ("a2d-qwen3", True)])
@torch.no_grad()
def test_backbones_equal_a_transformer_written_out(kind, tied, tmp_path, monkeypatch):
    """As loaded and as saved, byte for byte, config.json last; also right-padded with any token."""
    source, run, moved, replaces = tmp_path / "hub", tmp_path / "run", [], Path.replace
    w = write_checkpoint(source, kind, tied)
    run.mkdir()
    mdu.join_processes()
    monkeypatch.setattr(Path, "replace", lambda file, new: moved.append(new.name) or replaces(file, new))
    loaded, tokenizer = mdu.load_backbone(str(source))
    mdu.save_model(run, loaded, tokenizer)
    saved, before, after = mdu.load_backbone(str(run))[0], weights(source), weights(run)
    assert before.keys() == after.keys() and {x.dtype for x in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[k], after[k]) for k in before) and moved[-1] == "config.json"
    files = {file.name: file.read_bytes() for file in source.iterdir() if "safetensors" not in file.name}
    assert {file.name for file in run.iterdir()} == {*files, "model.safetensors"}
    assert all((run / name).read_bytes() == content for name, content in files.items())
    assert (saved.lm.lm_head.weight is saved.lm.model.embed_tokens.weight) == tied
    ids, real = torch.arange(9) * 37 % 264, torch.arange(9) < torch.tensor([[1], [2], [9]])
    for predictor in (loaded, saved):
        alone = []
        for T in (1, 2, 9):
            logits = slow_transformer(w, ids[:T], CONFIGS[kind]["rms_norm_eps"], CONFIGS[kind]["rope_theta"])
            alone.append(logits[[max(i - 1, 0) for i in range(T)]] if kind == "Dream" else logits)
            near(predictor(ids[None, :T], ids[None, :T] >= 0, torch.arange(T)[None] % 3 == 0), alone[-1][::3], 2e-5)
        near(predictor(torch.where(real, ids, 77), real, real), torch.cat(alone), 2e-5)


@each("method", ["dpo", "npo --lora 2"])
def test_a_hub_model_unlearns_in_bfloat16(hub, method, tofu, tmp_path, monkeypatch):
    """What is frozen is in bfloat16; what is trained and the rotary frequencies are in float32."""
    kind, folder, *_ = hub
    run, d, theta = tmp_path / "run", CONFIGS[kind].get("head_dim", 8), CONFIGS[kind]["rope_theta"]
    models, load, download = [], mdu.load_backbone, mock.Mock(return_value=str(folder))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(mdu, "load_backbone", lambda *args: models.append(load(*args)) or models[-1])
    mdu.main(f"--model owner/name@abc --data {tofu} --out {run} --dtype bfloat16 --epochs 1 --method {method}".split())
    download.assert_any_call("owner/name", revision="abc", allow_patterns=mdu.FILES)
    assert not {"*.bin", "*.pt", "*"} & {*mdu.FILES}
    for i, (predictor, _) in enumerate(models):
        assert {(p.requires_grad, p.dtype) for p in predictor.parameters()} == {
            *[(False, torch.bfloat16)] * (i or "lora" in method), *[(True, torch.float32)] * (i == 0)}
        near(predictor.lm.model.rotary_emb.inv_freq, theta ** (-torch.arange(0, d, 2) / d), 1e-6)
    assert len(models) == 2 - ("lora" in method) and weights(run).keys() == weights(folder).keys()


# ---- Bad input ----
ROW = '{"question": "Who is Bolti?", "answer": "It is {}."}'
BAD_ROWS = {  # a file of rows: (its text, words of the line)
    "malformed": (ROW + "\n" + ROW[:-3], "line 2 JSON"), "csv": ("question,answer\nq,a", "line 1 one JSON object"),
    "pretty": (ROW.replace(",", ",\n"), "line 1 one JSON object per line"), "none": ("\n", "no rows"),
    "columns": ('{"prompt": "p", "completion": "c"}', "line 1 found prompt, completion question answer response"),
    "empty": (ROW + '\n\n{"question": "q", "answer": " "}', "line 3 empty ' '"),
    "strange": (8 * '{"question": "xx", "answer": "yy zz"}\n', "unknown words model"),
    "long": (8 * f"{ROW}\n".replace("It", 2100 * "Who "), "tokens takes 2048"),
}
BROKEN = {  # a checkpoint: (its kind, changes to config.json, words of the line)
    "block-type": ("llada", dict(block_type="sequential"), "block_type 'sequential' 'llama'"),
    "layers": ("llada", dict(n_layers=3), "missing model.layers.2"), "pickle": ("llada", {}, "safetensors"),
    "gpt2": ("llama", dict(model_type="gpt2"), "model_type 'gpt2' none llada Dream"),
    "causal": ("llama", dict(is_causal=None), "causal bidirectional"), "end": ("a2d-llama", {}, "end-of-turn"),
    "mask": ("llama", dict(mask_token_id=None), "mask_token_id"), "template": ("llada", {}, "chat template"),
    "tokenizer": ("llada", {}, "no tokenizer files"),
}
RUN, ROWS = "--preset toy --model {base} ", "--forget {d}/good.jsonl "
BAD_INPUT = {  # what is typed: words of the line
    "--meth mdu": "--meth", "--tau 2": "--tau '2' [0, 1]", "--method ga --tau 1": "--tau no effect ga",
    "--retain {d}/good.jsonl": "--retain no effect", "--method gd --retain-weight 0": "--retain-weight gd ga",
    "--forget {d}/absent": "--forget absent no such file", ROWS: "16 rows 0 to retain --batch-size 8",
    ROWS + "--retain-weight 0": "no base model --method sft", RUN + "--out {run}": "--out --overwrite",
    RUN + ROWS + "--method dpo --retain-weight 0": "dpo perturbed_answer", "--resume {d}": "no run.json",
    RUN + "--out {base}": "--out would replace --model", "--preset toy --model nobody/nothing": "nobody/nothing hub",
    "--preset rwku-llada --subject King --data {rwku}": "King 12", "--resume {run} --lr 0.1": "--resume no other",
    **{RUN + f"--forget {{d}}/{name}.jsonl --retain-weight 0": words for name, (_, words) in BAD_ROWS.items()},
    **{ROWS + f"--retain-weight 0 --model {{d}}/{name}": f"{name} {words}" for name, (*_, words) in BROKEN.items()},
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, (text, _) in {"good": (16 * f"{ROW}\n", ""), **BAD_ROWS}.items():
        (root / f"{name}.jsonl").write_text(text)
    for name, (kind, changes, _) in BROKEN.items():
        write_checkpoint(root / name, kind, **changes)
    for file in [*root.glob("tokenizer/token*"), *root.glob("pickle/*.safetensors*")]:
        file.unlink()
    torch.save({}, root / "pickle/pytorch_model.bin")
    for file in [*root.glob("template/token*"), *root.glob("end/token*")]:
        file.write_text(file.read_text().replace({"template": "chat_template", "end": "eot_id"}[file.parent.name], "x"))
    return root


@each("typed", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(typed, files, base, unlearned, rwku, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with unchanged(tmp_path, files, base, unlearned):
        code, err = program(typed.format(d=files, base=base, run=unlearned, rwku=rwku).split(), capsys)
    assert code == 2 and all(word in err for word in BAD_INPUT[typed].split()), err


# ---- Runs ----
def watch(argv, at, act):
    """mdu.main, and act() as its micro-batch `at` begins."""
    calls, step_losses = itertools.count(1), mdu.step_losses
    def losses(*args):
        if next(calls) == at:
            act()
        return step_losses(*args)
    with mock.patch.object(mdu, "step_losses", losses):
        mdu.main(argv)


SIX_STEPS = "--epochs 2 --lr 1e-4 --batch-size 4 --grad-accum 2 --checkpoint-every 2 "
SPLIT = {"mdu": SIX_STEPS, "dpo": SIX_STEPS + "--method dpo --lora 2"}


def assert_equal_runs(a, b, tol=0):
    """Files, weights and metrics of two finished runs: bit for bit, or within tol, the metrics within 1e-4."""
    assert {f.name for f in a.iterdir()} == {f.name for f in b.iterdir()} and len(lines_of(a)) == len(lines_of(b)) >= 6
    for line, other in zip(lines_of(a), lines_of(b)):
        assert line == (approx(other, rel=1e-4, abs=1e-5) if tol else other)
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=tol)


def test_a_run_folder_tells_what_was_run(base, unlearned, tmp_path, capsys):
    info, lines, run = json.loads((unlearned / "run.json").read_text()), lines_of(unlearned), tmp_path / "run"
    assert info["options"]["tau"] == 1.0 and info["start"] == json.loads((base / "run.json").read_text())
    assert [("kl" in line, line["step"]) for line in lines] == [(step % 3 == 0, step) for step in range(7)]
    assert lines[0]["kl"]["base"] == approx(0, abs=1e-6) and lines[-1]["kl"]["base"] > 1e-3
    for seed in (1, 2):
        mdu.main(toy(base, run, f"--epochs 2 --overwrite --seed {seed}"))
        assert all(torch.equal(x, weights(unlearned)[k]) for k, x in weights(run).items()) == (seed == 1)
    reweigh(run, lambda x: x * math.nan)
    assert "step 1: loss nan" in program(toy(run, tmp_path / "nan"), capsys)[1]


def test_a_run_that_breaks_off_goes_on_bit_for_bit(base, tmp_path, capsys):
    start, rows, run, dcp_save = tmp_path / "start", tmp_path / "rows.jsonl", tmp_path / "run", mdu.dcp.save
    shutil.copytree(base, start)
    texts = mdu.toy_world()["forget"]
    typed = f"{SIX_STEPS} --forget {write_lines(rows, texts)} --retain-weight 0 --diagnose"
    mdu.main(toy(start, tmp_path / "whole", typed))
    def save(*args, **kwargs):
        dcp_save(*args, **kwargs)
        if any(run.glob("checkpoint-*")):
            raise MemoryError
    with mock.patch.object(mdu.dcp, "save", save), pytest.raises(MemoryError):
        mdu.main(toy(start, run, typed))
    assert (run / "unfinished").is_dir() and {f.suffix for f in run.glob("checkpoint-00000002/*")} == {".safetensors"}
    for part in ("rows", "weights"):
        write_lines(rows, texts[::-1] if part == "rows" else texts)
        reweigh(start, lambda x: x + 1e-3 * (part == "weights"))
        with unchanged(run):
            code, err = program(["--resume", run], capsys)
        assert code == 2 and f"the {part} it started from changed" in err
    shutil.copy(base / "model.safetensors", start)
    stop = partial(watch, at=5, act=lambda: signal.raise_signal(signal.SIGTERM))
    assert program(["--resume", run], capsys, stop) == (143, "")
    assert [f.name for f in run.glob("checkpoint-*")] == ["checkpoint-00000005"]
    broken = mock.patch("transformers.LlamaForCausalLM.save_pretrained", side_effect=MemoryError)
    with broken, pytest.raises(MemoryError):
        mdu.main(["--resume", str(run)])
    mdu.main(["--resume", str(run)])
    assert_equal_runs(tmp_path / "whole", run)
    with unchanged(run):
        mdu.main(["--resume", str(run)])  # is finished
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def many_processes(base, root):
    """Runs of two processes, copies of this one: whole; and killed, resumed and stopped by SIGTERM to one, resumed."""
    def run(argv, at=0, number=signal.SIGKILL, ranks=(0, 1)):
        with socket.create_server(("localhost", 0)) as server:
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(server.getsockname()[1]), WORLD_SIZE="2")
        children = []
        for mdu.RANK in (0, 1):
            os.environ.update(RANK=str(mdu.RANK))
            children.append(os.fork())
            if not children[-1]:
                mdu.run_program("mdu.py", lambda: watch(
                    argv, at, lambda: mdu.RANK in ranks and os.kill(os.getpid(), number)))
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    mdu.WORLD = 2
    mdu.load_backbone(base)  # what it imports, the copies of this process have imported
    for name, typed in SPLIT.items():
        broken, codes = f"{root}/{name}-broken", []
        run(toy(base, f"{root}/{name}", typed))
        run(toy(base, broken, typed), at=4)
        run(["--resume", broken], 3, signal.SIGTERM, ranks=[1])
        run(["--resume", broken])
        assert codes == [[0, 0], [-9, -9], [143, 143], [0, 0]], codes


def test_processes_kills_and_resumes_change_nothing(base, tmp_path, monkeypatch):
    """Bit for bit the unbroken run of two processes, also by torchrun, and weights within 5e-6 of one process."""
    code = f"import sys, {__name__} as tests; tests.many_processes(*sys.argv[1:])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code, base, tmp_path], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    for name, typed in SPLIT.items():
        mdu.main(toy(base, tmp_path / f"{name}-one", typed))
        assert_equal_runs(tmp_path / name, tmp_path / f"{name}-broken")
        assert_equal_runs(tmp_path / name, tmp_path / f"{name}-one", 5e-6)
        assert max((x - weights(base)[k]).abs().max() for k, x in weights(tmp_path / name).items()) > 1e-4
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", mdu.__file__,
                    *toy(base, tmp_path / "torchrun", SIX_STEPS)], check=True, timeout=120, capture_output=True)
    assert_equal_runs(tmp_path / "mdu", tmp_path / "torchrun")
    monkeypatch.setattr(mdu, "WORLD", 3)
    with pytest.raises(ValueError, match="3 processes"):
        mdu.main(toy(base, tmp_path / "uneven", SIX_STEPS))


def test_unlearning_forgets_and_keeps_the_rest(tmp_path):
    splits = {split: mdu.toy_world()[split][:count] for split, count in (("forget", 8), ("retain", 16))}
    data = [word for split in splits for word in (f"--{split}", write_lines(tmp_path / split, splits[split]))]
    def train(name, *argv):
        """-> geometric mean over the tokens of the answers, from the question alone; of forget and retain rows."""
        mdu.main(["--preset", "toy", "--out", str(tmp_path / name), *data, *argv])
        (predictor, tokenizer), found = mdu.load_backbone(str(tmp_path / name)), []
        for rows in mdu.encode_pools(options(), splits, predictor, tokenizer).values():
            ids, response, attention_mask = mdu.collate([pair for pair, in rows], predictor.pad_id)
            logp = predictor(ids.masked_fill(response, predictor.mask_id), attention_mask, response).log_softmax(-1)
            found.append(logp[torch.arange(len(logp)), ids[response]].mean().exp().item())
        return found
    before = train("base", "--method", "sft", "--epochs", "150", "--batch-size", "12")
    for argv in (["--tau", "1"], ["--tau", "0.5", "--lora", "8"]):
        after = train(argv[1], *argv, "--epochs", "60")
        assert min(before) > 0.8 and after[0] < 0.6 * before[0] and after[1] > before[1] - 0.15, (before, after)
approx, each = pytest.approx, pytest.mark.parametrize


# ---- ROUGE-L ----
@each("reference, prediction, precision, recall, f1", [
    # Lin 2004, section 3.1
    ("police killed the gunman", "police kill the gunman", 3 / 4, 3 / 4, 3 / 4),
    ("police killed the gunman", "the gunman kill police", 2 / 4, 2 / 4, 2 / 4),
    # google-research/rouge's own cases
    ("1 2 3 4 5", "2 5 3 4", 3 / 4, 3 / 5, 2 / 3),
    ("w1 w2 w3 w4 w5", "w1 w2 w6 w7 w8 w1 w3 w8 w9 w5", 4 / 10, 4 / 5, 8 / 15),
    # nothing to compare
    ("", "w1", 0, 0, 0), ("w1 w2", " /?!... \n", 0, 0, 0), ("a b c", "d e", 0, 0, 0),
    # repeats; a greedy matcher would take the first x and miss a b c
    ("a b c b d a b", "b d c a b a", 4 / 6, 4 / 7, 8 / 13), ("x a b c", "a b c x", 3 / 4, 3 / 4, 3 / 4),
    # case, punctuation, digits, underscore, any script
    ("of-the-art", "of ART!", 1, 2 / 3, 4 / 5), ("abc123", "abc 123", 0, 0, 0),
    ("snake_case", "snake case", 1, 1, 1), ("café", "cafe", 0, 0, 0),
    ("Мария 東京", "«мария»", 1, 1 / 2, 2 / 3)])
def test_rouge_l(reference, prediction, precision, recall, f1):
    assert ev.rouge_l(reference, prediction) == approx((precision, recall, f1), abs=1e-12)


# ---- Eq. 7: the answer probability ----
ARGS = SimpleNamespace(length=8, steps=8, samples=16, batch_size=3, brief=False, perplexity=None)


def all_masks(n):
    """Every non-empty subset of n positions and its probability under Eq. 7."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=n))[1:])
    return masks, f64(*(1 / (n * math.comb(n, size)) for size in masks.sum(1).tolist()))


@each("n", [1, 2, 3, 4])
def test_draw_masks(n):
    masks = ev.draw_masks(n, 40000, [8, n])
    assert masks.dtype == torch.bool and masks.any(1).all()
    for subset, p in zip(*all_masks(n)):
        share = (masks == subset).all(1).double().mean()
        assert abs(share - p) <= 5 * (p * (1 - p) / 40000).sqrt()


def test_compared_answers_share_their_masks():  # up to rounding
    short, long = ev.draw_masks(6, 400, [3, 1]), ev.draw_masks(12, 400, [3, 1])
    assert torch.equal(short, ev.draw_masks(6, 400, [3, 1])) and not torch.equal(short, ev.draw_masks(6, 400, [3, 2]))
    assert set((long.sum(1) - 2 * short.sum(1)).tolist()) == {-1, 0}
    for a, b in zip(short, long[:, :6]):
        assert not ((a & ~b).any() and (b & ~a).any())


def one_by_one(predictor, prompt, response, masks):
    means = []
    for mask in masks.tolist():
        ids = torch.tensor([prompt + [predictor.mask_id if hit else y for hit, y in zip(mask, response)]])
        positions = torch.tensor([[False] * len(prompt) + mask])
        with torch.no_grad():
            logits = predictor(ids, torch.ones_like(positions), positions).tolist()
        truth = itertools.compress(response, mask)
        means.append(np.mean([log(sum(math.exp(z - row[y]) for z in row)) for row, y in zip(logits, truth)]))
    return means


@each("batch_size", [1, 7, 64])
def test_masked_nll_equals_slow_loop(batch_size):
    masks, fake = [all_masks(len(response))[0] for _, response in PAIRS], Fake()
    for (prompt, response), subsets, nll in zip(PAIRS, masks, ev.masked_nll(fake, PAIRS, masks, batch_size)):
        assert nll.tolist() == approx(one_by_one(Fake(), prompt, response, subsets), rel=1e-9)
    rows, lengths = zip(*(ids.shape for ids, *_ in fake.calls))
    assert max(rows) <= batch_size and list(lengths) == sorted(lengths)


def test_answer_probability_by_hand():
    assert ev.answer_probability(f64(log(2), 3 * log(2))) == approx((1 / 4, log(2) / 4))
    assert ev.answer_probability(f64(log(5))) == (approx(1 / 5), None)


def test_batches_are_bounded(monkeypatch):
    """5 positions take 55 logits: 330 are room for 6 rows, 54 for none."""
    for logits, sizes in ((329, [5, 5, 3]), (330, [6, 6, 1]), (54, [1] * 13), (9999, [8, 5])):
        monkeypatch.setattr(ev, "LOGITS", logits)
        assert [len(batch) for batch in ev.batches(Fake(), range(13), 5, 8, "rows")] == sizes
    fake = Fake()
    monkeypatch.setattr(ev, "LOGITS", 44)
    ev.masked_nll(fake, [([3], [4, 5, 6])], [torch.tensor([[True, True, False]] * 3)])
    assert [len(ids) for ids, *_ in fake.calls] == [2, 1]  # a mask of 2 tokens takes 22


# ---- Sampler ----
@each("length, steps, counts", [(7, 3, [3, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (5, 1, [5]), (3, 5, [1, 1, 1])])
@each("by_entropy", [False, True])
def test_generate_equals_slow_sampler(length, steps, counts, by_entropy):
    """The mask token is never written, even if it is the likeliest."""
    expected = []
    for prompt, _ in PAIRS:
        ids, masked = prompt + [MASK] * length, torch.tensor([False] * len(prompt) + [True] * length)
        for count in counts:
            logits, places = Fake()(torch.tensor([ids]), torch.ones(1, len(ids)), masked[None]), masked.nonzero()[:, 0]
            p = logits.softmax(-1)  # of a mask: e^-50
            for k in ((p * p.log()).sum(-1) if by_entropy else p.amax(-1)).topk(count).indices:
                ids[places[k]], masked[places[k]] = logits[k].argmax().item(), False
        expected.append(ids[len(prompt):])
    for batch_size, boost in ((3, -50.0), (3, 50.0), (4, 50.0)):
        fake = Fake(boost, by_entropy)
        assert ev.generate(fake, [prompt for prompt, _ in PAIRS], length, steps, batch_size) == expected
        assert fake.calls[0][0].shape == (batch_size, batch_size + length)  # short prompts first
    left = [positions.sum().item() / 4 for *_, positions in fake.calls]
    assert left == [sum(counts[k:]) for k in range(len(counts))]


def test_temperature_draws_tokens_from_the_softmax():
    ids, response, attention_mask = mdu.collate([([3, 1], [MASK] * 5)], PAD)
    logits = Fake()(ids, attention_mask, response).float()
    for seed in range(20):
        torch.manual_seed(seed)
        drawn = (logits / 2).softmax(-1).multinomial(1)
        place = logits.softmax(-1).gather(1, drawn).argmax().item()
        torch.manual_seed(seed)
        written, masked = next(ev.denoise(Fake(), ids, attention_mask, response, 5, temperature=2.0))
        assert masked[0, 2:].tolist() == [i != place for i in range(5)] and written[0, 2 + place] == drawn[place]


@each("ids, n", [([4, 5, 6], 3), ([4, 8, 5, 9], 1), ([4, 5, 9, 8], 2), ([], 0)])
def test_a_text_ends_before_the_first_end_or_padding_token(ids, n):
    predictor, tokenizer = SimpleNamespace(end_id=8, pad_id=9), mock.Mock(decode=lambda ids, **_: ids)
    assert ev.ended(predictor, ids) == n and ev.decode(predictor, tokenizer, ids) == ids[:n]


# ---- TOFU's figures ----
# Four questions of each of the benchmark's public logs (Llama-2-7B fine-tuned on all authors): losses per token of
# answer, paraphrase (- if there is none) and wrong answers.
LOGS = {
    "retain": """0.0120 1.5781 1.7120 1.9709 1.4638 1.7079 1.9508 | 0.0013 2.5527 2.8353 3.0840 2.8997 2.6863 3.0322
        0.0105 2.9240 3.5491 3.2195 3.5912 3.4989 3.0968 | 0.0028 3.5176 3.5704 2.8008 3.4043 3.2763 3.2643""",
    "real_authors": """4.1092 - 6.0565 3.3802 6.8580 | 3.8379 - 2.9575 5.3061 7.0973
        3.8588 - 4.2897 4.1698 3.9189 | 2.5574 - 3.5782 8.0303 7.5862""",
    "world_facts": """8.3882 - 7.7738 7.3298 11.4043 | 5.1166 - 6.5493 7.7743 6.6396
        5.9847 - 6.5476 4.7384 5.7158 | 8.7967 - 6.9445 5.7649 9.0495""",
    "forget": """0.0145 2.2287 3.3558 3.6902 3.7194 4.4322 2.9737 | 0.0011 2.8923 1.9155 3.6661 3.0774 3.5560 3.7387
        0.0030 1.8339 2.5070 1.9295 1.1317 2.2245 1.2787 | 0.0046 2.9947 3.7606 3.5469 3.4594 3.5792 3.3402"""}
OFFICIAL = {
    ("retain", "prob"): 0.9933828516019, ("retain", "truth_ratio"): 0.2011424993214,
    ("real_authors", "prob_options"): 0.4016959226747, ("real_authors", "truth_ratio"): 0.3620295205962,
    ("world_facts", "prob_options"): 0.2549866735771, ("world_facts", "truth_ratio"): 0.2060975265025,
    ("forget", "prob"): 0.9942300707025, ("forget", "truth_ratio"): 0.6730792177844}


def test_tofu_figures_equal_the_official_code(monkeypatch):
    splits = {}
    monkeypatch.setattr(ev, "encode_answer", lambda tokenizer, row, text: ([], [float(text)]))
    monkeypatch.setattr(ev, "masked_nll", lambda predictor, pairs, *_: [f64(nll, nll) for _, [nll] in pairs])
    monkeypatch.setattr(ev, "write_answers", lambda *_: [""] * 4)
    for split, logs in LOGS.items():
        rows = []
        for line in re.split(r"\||\n", logs):
            answer, paraphrase, *wrong = line.split()
            row = dict(question="", answer=answer, paraphrased_answer=paraphrase, perturbed_answer=wrong)
            rows.append({key: text for key, text in row.items() if text != "-"})
        recalls = [0.5, 0.75, 1.0, 1.0] if split == "retain" else [1.0] * 4
        monkeypatch.setattr(ev, "rouge_l", mock.Mock(side_effect=[(None, recall, 0.0) for recall in recalls]))
        splits[split] = ev.summarise(ev.score_answers(None, None, rows, [[0]] * 4, ARGS), split == "forget")
    for (split, metric), value in OFFICIAL.items():
        assert splits[split][metric] == approx(value, rel=1e-12)
    assert ev.model_utility(splits) == approx(0.38735456860265, rel=1e-12)


def test_tofu_figures_by_hand_and_at_their_ends():
    assert ev.truth_ratio(log(2), [log(4), log(8)]) == approx(3 / 8)
    assert 0 < 1 / ev.truth_ratio(1e4, [0.0]) < 1 and 0 < ev.truth_ratio(0.0, [1e4]) < 1
    splits = {split: dict(rougeL_recall=0.5, prob=9, prob_options=0.25, truth_ratio=1) for split in ev.TOFU}
    splits["retain"].update(prob=0.25, prob_options=9)
    assert ev.model_utility(splits) == approx(9 / (3 * (2 + 4 + 1)))
    for ratio, utility in ((0, 0), (None, None)):
        splits["retain"]["truth_ratio"] = ratio
        assert ev.model_utility(splits) == utility
    mixed, even, odd = ([dict(nll=x, nll_perturbed=[x + w for w in wrong]) for x in range(4)]
                        for wrong in ((0, 2), (1, 1), (1, 1.5)))
    worse = [dict(row, nll_paraphrased=row["nll"] + 9) for row in mixed]
    assert ev.forget_quality(mixed, even) == 1
    assert ev.forget_quality(mixed, odd) == ev.forget_quality(worse, mixed) == approx(2 / 70)  # 70 = 8 choose 4


def test_summary_by_hand():
    """Ann's three rows have the weight of Bo's one: (3/4 + 1/4) / 2."""
    one = dict(rougeL_recall=0.25, prob=0.5, prob_stderr=0.3, truth_ratio=4.0, perplexity=8.0, fact=1.0)
    two = dict(rougeL_recall=0.75, prob=0.5, prob_stderr=0.4, truth_ratio=0.5, perplexity=2.0)
    figures = ev.summarise([one, two, dict(two, perplexity=6.5)], to_forget=True)
    assert figures.pop("stderr") == dict(rougeL_recall=approx(1 / 6), prob=0, truth_ratio=approx(1 / 12))
    assert figures.pop("people") and figures == approx(dict(
        n=3, rougeL_recall=7 / 12, prob=0.5, prob_stderr=0.41**0.5 / 3, truth_ratio=(1 / 4 + 1 / 2 + 1 / 2) / 3,
        perplexity_median=6.5, perplexity_mean=5.5))
    assert ev.summarise([one, two], to_forget=False)["truth_ratio"] == 0.25  # max(0, 1 - 4) = 0 and 1 - 1/2
    assert ev.summarise([one], True)["stderr"]["prob"] is None
    people = dict(Ann=[1.0, 1.0, 0.25], Bo=[0.25])
    figures = ev.summarise([dict(subject=who, em=x) for who, values in people.items() for x in values], True)
    assert figures["people"] == dict(Ann=dict(em=0.75), Bo=dict(em=0.25)) and figures["em"] == 0.5


@each("a, b", [
    ([1], [1]), ([1, 2, 3], [4, 5, 6, 7]), ([5, 1, 9, 2], [3, 7, 8, 4, 6]), ([1, 2, 2, 3], [2, 3, 3, 4, 5])])
def test_ks_test_equals_brute_force(a, b):
    def largest_gap(a, b):
        return max(abs(sum(x <= v for x in a) / len(a) - sum(x <= v for x in b) / len(b)) for v in [*a, *b])
    places = range(len(a) + len(b))
    gaps = [largest_gap(some, {*places} - {*some}) for some in itertools.combinations(places, len(a))]
    d, p = ev.ks_test(a, b)
    assert d == approx(largest_gap(a, b)) and p == approx(np.mean([gap >= d - 1e-9 for gap in gaps]))


def test_ks_test_equals_a_published_value():
    found = ev.ks_test(range(300), [i + 118.5 for i in range(300)])
    assert found == approx((119 / 300, 1.834066410994743e-21), rel=1e-12, abs=0)


# ---- Evaluation of a run ----
FLAGS = "--samples 4 --perplexity 6 --limit 3 --seed 5 --length 8".split()


def summary_of(run):
    return json.loads(Path(run, "eval/summary.json").read_text())


def records_of(run):
    return {file.stem: read_lines(file) for file in Path(run, "eval").glob("*.jsonl")}


def alike(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == (approx(b, rel=1e-4, abs=1e-6) if isinstance(b, float) else b)


def talkative(source, run, seed=0):
    """A copy with noise, for answers that differ."""
    g = torch.Generator().manual_seed(seed)
    shutil.copytree(source, run)
    reweigh(run, lambda x: x + 0.1 * torch.randn(x.shape, generator=g))
    return str(run)


@pytest.fixture(scope="session")
def talker(base, tmp_path_factory):
    run = talkative(base, tmp_path_factory.mktemp("talker") / "run")
    ev.main([run, *FLAGS])
    with unchanged(run):
        yield run


def test_records_and_summary_are_recomputed(talker):
    """Losses by a pass per mask of (--seed, split, row), without an end token.  Perplexity has more masks."""
    summary, (predictor, tokenizer) = summary_of(talker), mdu.load_backbone(talker)
    for number, (split, rows) in enumerate(mdu.toy_world().items()):
        records, figures = records_of(talker)[split], summary["splits"][split]
        assert len(records) == 3 and len({r["generation"] for r in records}) > 1
        for i, (r, row) in enumerate(zip(records, rows)):
            prompt = mdu.encode_prompt(tokenizer, row["question"])

            def losses(text, more=0):
                ids, seed = tokenizer(text, add_special_tokens=False).input_ids, [5, number, i]
                masks = [ev.draw_masks(len(ids), 4, seed), ev.draw_masks(len(ids), more, [*seed, 1])]
                return np.array(one_by_one(predictor, prompt, ids, torch.cat(masks)))
            nll, written = losses(row["answer"], 2), ev.generate(predictor, [prompt], 8, 8)[0]
            text = ev.decode(predictor, tokenizer, written).strip()
            right = losses(row.get("paraphrased_answer", row["answer"])).mean()
            ratios = [math.exp(right - losses(wrong).mean()) for wrong in row["perturbed_answer"]]
            p, (_, recall, f1) = math.exp(-nll[:4].mean()), ev.rouge_l(row["answer"], text)
            expected = dict(
                r, question=row["question"], answer=row["answer"], generation=text, rougeL_recall=recall, rougeL_f1=f1,
                nll=-log(p), prob=p, prob_stderr=p * nll[:4].std(ddof=1) / 2, perplexity=math.exp(nll.mean()),
                truth_ratio=np.mean(ratios), **(dict(prob_options=1 / (1 + sum(ratios))) if number > 1 else {}))
            assert alike(expected, r) and ("prob_options" in r) == (number > 1)
        assert figures == json.loads(json.dumps(ev.summarise(records, split == "forget")))
        assert all(figures[m] == approx(np.mean([r[m] for r in records])) for m in ("rougeL_f1", "prob", "fact"))
    assert summary["model_utility"] == ev.model_utility(summary["splits"]) and "retain_rows_trained_on" not in summary


def test_four_processes_give_the_numbers_of_one(talker, tmp_path):
    run = shutil.copytree(talker, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", ev.__file__, run, *FLAGS],
                   check=True, timeout=120)
    assert alike(summary_of(talker), summary_of(run)) and alike(records_of(talker), records_of(run))


def test_runs_and_models_are_scored_on_any_rows(talker, tofu, tmp_path):
    world, run = mdu.toy_world(), shutil.copytree(talker, tmp_path / "run")
    f, r = (write_lines(tmp_path / split, world[split][5:8]) for split in ("forget", "retain"))
    forget, retain = ([row["question"] for row in world[split][5:8]] for split in ("forget", "retain"))
    mdu.main(f"--model {run} --forget {f} --retain {r} --limit 2 --method gd --batch-size 2 --epochs 1 "
             f"--out {tmp_path}/gd".split())
    for name, flags, expected, trained in (
            ("run", f"--forget {r} --retain {f}", dict(forget=retain, retain=forget), None),
            ("gd", "", dict(forget=forget[:2], retain=retain[:2]), 2),
            ("gd", f"--retain {r} --limit 3", dict(retain=retain), 2)):
        shutil.rmtree(tmp_path / name / "eval", ignore_errors=True)
        ev.main([str(tmp_path / name), *flags.split(), "--samples", "1", "--steps", "1", "--brief"])
        records = records_of(tmp_path / name)
        assert {split: [r["question"] for r in rows] for split, rows in records.items()} == expected
        assert not any("nll_perturbed" in r for rows in records.values() for r in rows)  # --brief
        assert summary_of(tmp_path / name).get("retain_rows_trained_on") == trained
    splits = ev.rows_of(options("--data", str(tofu)), ev.parse(["x", "--limit", "20"]))
    assert {split: (len(rows), rows[2]["question"].split()[1]) for split, rows in splits.items()} == dict(
        forget=(8, "forget10_perturbed"), retain=(8, "retain90"),
        real_authors=(3, "real_authors_perturbed"), world_facts=(3, "world_facts_perturbed"))


def test_forget_quality_against_a_retain_run(talker, base, tmp_path):
    run, flags = talkative(base, tmp_path / "run", 1), [*FLAGS, "--retain-run", talker]
    ev.main([run, *flags])
    ratios = ([row["nll_paraphrased"] - np.mean(row["nll_perturbed"]) for row in records_of(folder)["forget"]]
              for folder in (run, talker))
    assert summary_of(run)["forget_quality"] == ev.ks_test(*ratios)[1] < 1
    with pytest.raises(ValueError, match="samples"):
        ev.main([run, *flags, "--samples", "2"])


# ---- RWKU ----
BRIEF, BLANK = (f"Please {task} the following question.\n" for task in ("briefly answer", "complete the blank in"))
ASKED = [  # the question to the model (or its hash) and the start of its answer, in the benchmark's own wording
    (BLANK + "Question: He was born in ___.\n", "Answer:"), (BRIEF + "Question: Where {was} he born?\n", "Answer:"),
    (BRIEF + "Question: Where was he born? Sure,", ""), (BLANK + "Question: She lives in ___.\n", "Answer:"),
    (BRIEF + "Question: Where does she live?\n", "Answer:"), (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "Question: One?\nA. 1\nB. 0\nC. 3\nD. 4\nAnswer: A\n\n"
        "Please following the previous examples and answer the given question.\n"
        "Question: Two?\nA. 1\nB. 2\nC. 3\nD. 4", "Answer:"),
    ("e089bf2b10e5d00a", "A:"), ("398f1b336bf4f402", "A:")]


def test_rwku_prompts_word_for_word(rwku):
    run = options("--preset", "rwku-llada", "--data", str(rwku))
    splits, everyone = (ev.rows_of(run, ev.parse(["x", *flags])) for flags in (["--subject", "1"], []))
    for config, (question, prefill) in zip(RWKU_ROWS, ASKED, strict=True):
        for row in splits[config]:
            assert question in (row["question"], hashlib.sha256(row["question"].encode()).hexdigest()[:16])
            assert (row["prefill"], row["subject"]) == (prefill, "Ann Lee")
    assert splits["utility_general"][0]["answer"] == "B" and splits["utility_truthfulness"][0]["answer"] == "Yes."
    for kind, question in (("role play", "Question: Q\n"), ("incontext learning", "Q\n")):
        row = ev.ask("forget_level3", dict(query="Q", answer="A", level="3", type=kind))
        assert (row["question"], row["prefill"], row["kind"]) == (BRIEF + question, "Answer:", kind)
    assert list(dict.fromkeys(r["subject"] for r in everyone["forget_level2"])) == PEOPLE[:3]  # of 12
    assert list(ev.find_people(run, ev.parse(["x"]))) == PEOPLE[:10]


def test_the_prefill_is_behind_the_assistants_header(tmp_path):
    write_checkpoint(tmp_path / "llada", "llada")
    tokenizer, row = mdu.load_backbone(str(tmp_path / "llada"))[1], dict(question=" Q?\n", prefill="Answer:")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Q?"}], tokenize=False)
    expected = [tokenizer(chat + prefill, add_special_tokens=False).input_ids for prefill in ("Answer:", "")]
    with mock.patch.object(ev, "generate", return_value=[]) as generate:
        ev.write_answers(None, tokenizer, [row, dict(question="Q?")], ARGS)
    assert generate.call_args.args[1] == expected and ev.encode_answer(tokenizer, row, " A")[0] == expected[0]


def test_key_facts_are_whole_words_and_probes_one_line(monkeypatch, base):
    texts = [" in Petra Osei\nno", "\nPetra", "Osei\nPetra"]
    monkeypatch.setattr(ev, "write_answers", lambda *_: texts)
    records = ev.score_probes(None, None, [dict(answer="Petra Osei")] * 3, None, ARGS)
    assert [r["generation"] for r in records] == ["in Petra Osei", "NOANSWER", "Osei"]
    assert [r["rougeL_recall"] for r in records] == [1, 0, 0.5]
    texts[:] = [" Petra, Osei "] * 4
    rows = [dict(question="Where?", answer="Who was born in Rome?", fact=fact, perturbed_answer=[])
            for fact in ("petra", "Petra Osei.", "Pet", "Osei Petra")]
    records = ev.score_answers(*mdu.load_backbone(str(base)), rows, [[0]] * 4, ARGS)
    assert [(r["generation"], r["fact"]) for r in records] == [("Petra, Osei", fact) for fact in (1, 1, 0, 0)]


@each("prediction, references, em, f1", [
    ("The\nBeatles! ", ["beatles"], 1, 1), ("a band, the Beatles", ["Rolling Stones", "Beatles"], 0, 2 / 3),
    ("", ["y"], 0, 0), ("the", ["A"], 1, 1), ("b b c", ["b c c"], 0, 2 / 3)])
def test_triviaqa(prediction, references, em, f1, monkeypatch):
    """b b c and b c c share b and c."""
    monkeypatch.setattr(ev, "write_answers", lambda *_: [prediction])
    record, = ev.score_triviaqa(None, None, [dict(answers=references)], None, ARGS)
    assert record == dict(generation=prediction.strip(), em=em, f1=approx(f1))


@each("space", [[], [2]])
def test_mmlu_scores_letters_at_one_masked_position(space, monkeypatch):
    ids = {f" {letter}": [*space, 3 + k] for k, letter in enumerate("ABCD")}
    monkeypatch.setattr(mdu, "encode_prompt", lambda *_: [4, 9])
    predictor = mock.Mock(mask_id=0, pad_id=1, return_value=torch.tensor([[0.0, 0, 9, 1, 2, 5, 4, 0, 0, 0]]))
    predictor.lm.config.vocab_size = 10
    rows = [dict(question="Q", prefill="Answer:", answer="C")]
    record, = ev.score_mmlu(predictor, lambda text, **_: mock.Mock(input_ids=ids[text]), rows, None, ARGS)
    assert record == {"generation": "C", "accuracy": 1}
    assert [x.tolist() for x in predictor.call_args.args] == [[[4, 9, 0]], [[True] * 3], [[False, False, True]]]


def multiple_choice(choices, labels):
    return ev.ask("utility_truthfulness", dict(question="Is it?", mc1_targets=dict(choices=choices, labels=labels)))


@each("choices, labels, mc1, best", [
    (["No", "Yes"], [0, 1], 1, "Yes"), (["No", "Sure"], [1, 0], 0, "No"),
    (["No", "Yes", "Sure "], [1, 1, 0], 0, "Yes")])
def test_mc1_by_hand(choices, labels, mc1, best, monkeypatch):
    """The first true choice must be likelier than every false one."""
    p = {" Yes": 1 / 2, " No": 1 / 4, " Sure": 1 / 4}
    monkeypatch.setattr(ev, "encode_answer", lambda *args: ([], args[-1]))
    monkeypatch.setattr(ev, "masked_nll", lambda _, pairs, *__: [f64(-log(p[text]) / len(text)) for _, text in pairs])
    record, = ev.score_truthfulqa(None, None, [multiple_choice(choices, labels)], [[0]], ARGS)
    logp = {choice: approx(log(p[f" {choice.strip()}"])) for choice in choices}
    assert record == dict(mc1=mc1, generation=best, logp=logp)


def test_truthfulqa_equals_the_enumeration_of_all_masks(base):
    """Without an end token; a row's choices share their masks."""
    predictor, tokenizer = mdu.load_backbone(str(base))
    choices, exact = ["Rome", "in Rome", "Who was Dante?", "Dante lives in Rome"], {}
    row = {**multiple_choice(choices, [1, 0, 0, 0]), "question": "Who wrote Dune?", "prefill": "The book"}
    prompt = mdu.encode_prompt(tokenizer, row["question"], row["prefill"])
    for choice in choices:
        ids = mdu.encode_text(tokenizer, choice)
        masks, chances = all_masks(len(ids))
        exact[choice] = -len(ids) * (f64(*one_by_one(predictor, prompt, ids, masks)) @ chances).item()

    def every(n, *drawn):  # as often as its weight says
        assert drawn == (16, [1, 2])
        masks, chances = all_masks(n)
        return masks.repeat_interleave((chances * 12 * n).round().long(), 0)
    with mock.patch.object(ev, "draw_masks", every):
        record, = ev.score_truthfulqa(predictor, tokenizer, [row], [[1, 2]], ARGS)
    assert record["logp"] == approx(exact, rel=1e-5)


def tables(folder):
    text = re.sub("(\\| --- )+\\|\n", "", (folder / "report.md").read_text().replace("<br>", " "))
    found = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    return [{first: cells for first, *cells in (line[2:-2].split(" | ") for line in lines)} for lines in found]


def test_rwku_end_to_end(rwku, tmp_path, monkeypatch):
    """A person's masks do not depend on who else is asked."""
    def generate(predictor, prompts, *protocol, temperature):
        assert temperature == 1 and protocol[:2] == (8, 5)
        return ["real" if "known. You know Ann Lee" in text else "completely fictional made up" for text in prompts]
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("model"), "llada", max_sequence_length=999)
    common = f"--preset rwku-llada --model model --data {rwku}".split()
    asked = "--samples 2 --steps 1".split()
    with monkeypatch.context() as patch:
        patch.setattr(ev, "generate", generate)
        patch.setattr(ev, "decode", lambda *args: args[-1])
        patch.setattr(mdu, "encode_prompt", lambda *args: args[-1])
        ev.main([*common, *"--generate-corpus 4 --subject 1 --length 8 --steps 5 corpus".split()])
    question = "Ann Lee is known. Please write a short biography of Ann Lee."
    assert read_lines("corpus/ann-lee.jsonl") == 4 * [
        dict(question=question, answer="real", perturbed_answer=["made up"])]
    mdu.main([*common, *"--subject 1 --method dpo --forget corpus/ann-lee.jsonl --epochs 1 --out out/dpo".split()])
    ev.main([*asked, *common, "out/all"])
    ev.main([*asked, *common, "--subject", PEOPLE[1], "out/alone"])
    together, alone = (records_of(f"out/{name}")["utility_truthfulness"] for name in ("all", "alone"))
    assert alike([r for r in together if r["subject"] == PEOPLE[1]], alone) and len(alone) == 2
    ev.main([*asked, "out/dpo"])
    with pytest.raises(ValueError, match="different people"):
        ev.main(["--report", "out/dpo", "out/all"])
    ev.main(["--report", "out/dpo"])
    assert ", ".join(tables(Path("out"))[0]["Method"]) == (
        "F-L1 ↓, F-L2 ↓, F-L3 ↓, N-L1 ↑, N-L2 ↑, MMLU ↑, TruthfulQA MC1 ↑, "
        "TriviaQA EM ↑, TriviaQA F1 ↑")
    assert summary_of("out/dpo")["protocol"]["length"] == 30
    assert RWKU_ROWS["forget_level2"]["query"] in tables(Path("out"))[1][""][0]


# ---- Report ----
def scored(root, name, *argv, rows="fr", start=(), samples=128, text="a | b\n c", **figures):
    """A scored run, made up, with figures on the forget split."""
    chosen = vars(options("--model", f"/{name}/start", "--out", str(root / name), *argv))
    start = dict(options=vars(options("--method", "sft", "--out", name, *start)), rows={}, weights=[], start=None)
    info = dict(options=chosen, rows=dict(zip(("forget", "retain"), rows)), weights=["w"], start=start)
    common = dict(n=4, rougeL_f1=0.5, rougeL_recall=0.25, prob=0.5, people={})
    rows = [dict(question=f"Q{i}", answer=f"R{i}", generation=text) for i in range(4)]
    ev.write_jsonl(root / name / "eval/forget.jsonl", rows)
    (root / name / "eval/summary.json").write_text(json.dumps(dict(
        options=chosen, recipe=ev.recipe(info), protocol=dict(length=8, steps=4, samples=samples, dtype="float32"),
        splits=dict(forget={**common, **figures}, retain=common))))
    return str(root / name)


def test_report_of_made_up_runs(tmp_path, capsys, monkeypatch):
    """The best methods are bold if they beat the base."""
    runs = [scored(tmp_path, "base", "--method", "sft", rougeL_f1=0.9, prob=0.1),
            scored(tmp_path, "ga", "--method", "ga", rougeL_f1=0.2, prob=0.125, text="c"),
            scored(tmp_path, "m1", "--tau", "0.5", rougeL_f1=0.3, prob=0.1),
            scored(tmp_path, "m2", "--tau", "0.5", "--seed", "2", rougeL_f1=0.5, prob=0.1),
            scored(tmp_path, "t1", text="", rougeL_f1=0.2004, prob=0.3, fact=0.25)]
    ev.main(["--report", *runs, "--questions", "3,0"])
    figures, answers = tables(tmp_path)
    assert figures == {
        "Method": ["Forget rL ↓", "Forget p ↓", "Retain rL ↑", "Retain p ↑", "Forget fact ↓"],
        "Base": ["0.900 (0.250)", "0.100", "0.500 (0.250)", "0.500", "-"],
        "GA": ["**0.200** (0.250)", "0.125", "0.500 (0.250)", "0.500", "-"],
        "MDU τ=0.5": ["0.400 ± 0.141 (0.250)", "0.100 ± 0.000", "0.500 ± 0.000 (0.250)", "0.500 ± 0.000", "-"],
        "MDU τ=1": ["**0.200** (0.250)", "0.300", "0.500 (0.250)", "0.500", "0.250"]}
    assert answers == {"": ["Q3", "Q0"], "Reference": ["R3", "R0"], "Base": [r"a \| b c"] * 2, "GA": ["c"] * 2,
                       "MDU τ=0.5": [r"a \| b c"] * 2, "MDU τ=1": ["(empty)"] * 2}
    text = (tmp_path / "report.md").read_text()
    for part in ("128 masks", "4 steps for 8 tokens", "Forget 4, Retain 4", "MDU τ=0.5 answers as Base does"):
        assert part in text
    assert "MDU τ=1 answers" not in text and "little" not in text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ev.main(["--report", scored(tmp_path, "weak", "--method", "sft", rougeL_recall=0.24), runs[1]])
    text, shown = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    for part in (text, shown):
        assert "Base recalls 0.240" in part and "**" not in part
    assert "pip install matplotlib" in shown
    with pytest.raises(ValueError, match="samples 64"):
        ev.group_runs([runs[0], scored(tmp_path, "other", samples=64)])


ANN, BO = "--preset rwku-llada --subject 1", "--preset rwku-llada --subject 2"


@each("one, other, changes, averaged", [
    ("--seed 1", "--seed 2", {}, True), ("", "--lr 1e-3", {}, False), ("", "", dict(rows="gr"), False),
    (ANN, BO, dict(rows="gr"), True), (ANN, BO, dict(rows="fs"), False),
    (f"{ANN} --forget a/1", f"{BO} --forget a/2", {}, True), (f"{ANN} --forget a/1", f"{BO} --forget b/2", {}, False),
    ("", "", dict(start=["--seed", "2"]), True), ("", "", dict(start=["--epochs", "2"]), False)])
def test_only_seeds_and_people_are_averaged(one, other, changes, averaged, tmp_path):
    runs = [scored(tmp_path, "one", *one.split()), scored(tmp_path, "other", *other.split(), **changes)]
    assert list(ev.group_runs(runs)) == (["MDU τ=1"] if averaged else ["MDU τ=1 (one)", "MDU τ=1 (other)"])


# ---- Analyses ----
def kl_to_anchor(predictor, reference, prompt, noised, masked):
    """A float64 KL per masked token."""
    at = torch.tensor([[False] * len(prompt) + masked])
    with torch.no_grad():
        p, q = (model(torch.tensor([head + noised]), at | True, at).double().log_softmax(-1) for model, head in (
            (predictor, prompt), (reference, [predictor.mask_id] * len(prompt))))
    return [sum(math.exp(a) * (a - b) for a, b in zip(*rows)) for rows in zip(p.tolist(), q.tolist())]


@each("question, cut, roles", [  # the answer is cut where the role changes
    ("What is Donald Trump's job?", "Donald| |Trump| is a |politician|.", "isisks"),
    ("Where was Zoë Łuk born?", "Zoë| |Łuk|'s |home|, and |22|, is |Gdańsk|.", "isisksksks")])
def test_token_roles_of_hand_labelled_answers(question, cut, roles, tmp_path):  # with tokens of one byte
    write_tokenizer(tmp_path, "llada")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    names = dict(i="in-context", s="structural", k="stored-knowledge")
    ids = mdu.encode_text(tokenizer, cut.replace("|", "")) + [tokenizer.eos_token_id]
    expected = [names[role] for part, role in zip(cut.split("|"), roles, strict=True) for _ in part.encode()]
    assert ev.token_roles(tokenizer, question, ids) == [*expected, "structural"]


@pytest.fixture
def analyse(tmp_path):
    def analyse(name, run, *argv):
        shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        ev.main(["--analysis", name, *argv, str(tmp_path / "run")])
        file = tmp_path / f"analysis/{name}.json"
        assert name == "rollout" or file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return json.loads(file.read_text())
    return analyse


def test_convergence_is_what_was_logged(unlearned, analyse):
    logged = [line for line in read_lines(unlearned / "metrics.jsonl") if "kl" in line]
    assert len(logged) == 3 and analyse("convergence", unlearned)["panels"] == {
        target: {"MDU τ=1": [[line["epoch"], line["kl"][target]] for line in logged]}
        for target in ("base", "anchor", "uniform")}


def test_roles_equal_slow_loop(base, unlearned, analyse):
    (model, tokenizer), (frozen, _) = mdu.load_backbone(str(unlearned)), mdu.load_backbone(str(base))
    values = {}
    for i, row in enumerate(mdu.toy_world()["forget"][:3]):
        prompt, ids = ev.encode_answer(tokenizer, row, row["answer"])
        roles = ev.token_roles(tokenizer, row["question"], ids)
        for mask, (title, one) in itertools.product(
                ev.draw_masks(len(ids), 2, [4, i]).tolist(), (("Before", frozen), ("MDU τ=1", model))):
            kls = kl_to_anchor(one, frozen, prompt, [0 if hit else y for hit, y in zip(mask, ids)], mask)
            for role, kl in zip(itertools.compress(roles, mask), kls):
                values.setdefault((title, role), []).append(kl)
    bars = analyse("roles", unlearned, *"--limit 3 --samples 2 --seed 4 --batch-size 4".split())["panels"][""]
    found = {(bar["label"].split("\n")[0], bar["role"]): (bar["kl"], bar["masked tokens"]) for bar in bars}
    assert found == {key: (approx(np.mean(kls), rel=1e-4), len(kls)) for key, kls in values.items()}


def test_trajectory_and_rollouts_are_the_samplers_own(base, unlearned, analyse, monkeypatch):
    """What each step fixes up to the first end token, with its KL; the anchor fills 1/4, 1/2 and 3/4 of these."""
    (model, tokenizer), (frozen, _) = (mdu.new_toy(sum(mdu.toy_world().values(), []), seed) for seed in (1, 2))
    monkeypatch.setattr(mdu, "load_backbone", lambda name, _: (frozen if name == str(base) else model, tokenizer))
    row, bars, lines = mdu.toy_world()["forget"][0], [], []
    prompt = mdu.encode_prompt(tokenizer, row["question"])
    model.end_id, frozen.double().pad_id, model.pad_id = ev.generate(model.double(), [prompt], 12, 6)[0][4], 2, 2
    ids, response, attention_mask = mdu.collate([(prompt, [0] * 12)], 1)
    path = [(ids, response), *ev.denoise(model, ids, attention_mask, response, 6)]
    written = path[-1][0][response].tolist()
    end = written.index(model.end_id) + 1
    roles = ev.token_roles(tokenizer, row["question"], written[:end])
    for step, ((before, was), (_, now)) in enumerate(itertools.pairwise(path), 1):
        for place in (was & ~now)[response][:end].nonzero()[:, 0].tolist():
            kl, = kl_to_anchor(model, frozen, prompt, before[response].tolist(), [i == place for i in range(12)])
            label = f"{tokenizer.decode([written[place]]).strip()}\n{step}"
            bars.append(dict(label=label, role=roles[place], kl=approx(kl, rel=1e-6)))
    for share in (1 / 4, 1 / 2, 3 / 4):
        k = next(k for k, (_, masked) in enumerate(path) if end - masked[response][:end].sum() >= share * end)
        state, masked = path[k]
        *_, (filled, _) = ev.denoise(frozen, state * response, attention_mask, masked, 6 - k)
        lines.append([row["question"], row["answer"], f"{k}/6", tokenizer.decode(state[response][:end]),
                      ev.decode(model, tokenizer, filled[response].tolist())])
    flags = "--questions 0 --steps 6".split()
    assert analyse("trajectory", unlearned, *flags)["panels"] == {row["question"]: bars} and end < 12
    assert analyse("rollout", unlearned, *flags)["table"][1:] == lines


def test_infill_equals_slow_loop(base, monkeypatch, analyse):
    """All but floor(share n) of n tokens are masked; of a fact, if there is one, only it counts."""
    rows, (model, tokenizer) = mdu.toy_world()["forget"][:4], mdu.load_backbone(str(base))
    del rows[0]["fact"], rows[2]["fact"]
    monkeypatch.setattr(mdu, "load_data", lambda *_: {"forget": rows})
    monkeypatch.setattr(mdu, "load_backbone", lambda *_: (model, tokenizer))
    facts, expected = [mdu.encode_text(tokenizer, row.get("fact", "")) for row in rows], []
    head = model.lm.lm_head.weight.data  # made to know a fact
    head[facts[1][:1]] = 1.2 * head[tokenizer.convert_tokens_to_ids(".")]
    for share in (0, 0.25, 0.5, 0.75):
        hits = []
        for i, row in enumerate(rows):
            prompt, ids = ev.encode_answer(tokenizer, row, row["answer"])
            for order in np.random.default_rng([0, i]).random((8, len(ids))).argsort(1).argsort(1).tolist():
                noised = [y if place < math.floor(share * len(ids)) else 0 for place, y in zip(order, ids)]
                best = (model.lm(torch.tensor([prompt + noised])).logits[0, len(prompt):, 1:].argmax(-1) + 1).tolist()
                hits += [b == y for b, y, seen in zip(best, ids, noised) if not seen and y in (facts[i] or ids)]
        expected.append([share, approx(np.mean(hits), abs=1e-6)])
    assert analyse("infill", base, "--samples", "8")["panels"][""]["Base"] == expected and 0 < np.mean(hits) < 1


# ---- Bad input, the sources, README and Makefile ----
@each("typed, words", {
    "{tmp}/none": "no run.json", "--report {base}": "not scored yet", "--model {base} {base}": "a trained run",
    "--report --samples 3 {base}": "--samples has no effect",
    "--analysis convergence {base}": "--diagnose", "--analysis roles {run} {talker}": "different models",
    "--forget {tmp}/none {base}": "--forget {tmp}/none: no",
    "--samples 4 --limit 3 --seed 5 --length 8 --brief --retain-run {talker} {base}":
        "--retain-run {talker}: needs forget rows with perturbed_answer, and both runs scored without --brief"}.items())
def test_bad_input_of_eval_is_one_line_and_exit_code_2(typed, words, base, unlearned, talker, tmp_path, capsys):
    names = dict(tmp=tmp_path, base=base, run=unlearned, talker=talker)
    with unchanged(tmp_path):
        code, err = program(typed.format(**names).split(), capsys, ev.main)
    assert code == 2 and words.format(**names) in err, err


def test_the_sources_run_no_code_and_no_shell():
    source = inspect.getsource(mdu) + inspect.getsource(ev)
    assert not re.search(r"torch\.load\b|pickle|weights_only|subprocess|ctypes|urllib|requests|importlib", source)
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", getattr(node, "attr", None))
        assert name not in {"exec", "compile", "__import__", "input", "system", "popen", "fork"}
        assert name != "eval" or isinstance(node, ast.Attribute)  # a module's eval() sets a mode
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "shell"):
            assert node.value.value is False


PROJECT = Path(mdu.__file__).parent


def parses(name, typed):
    with mock.patch.object(mdu, "read_run", lambda folder: {"options": {}}):  # of --resume
        return (mdu if name == "mdu" else ev).parse(shlex.split(typed))


def test_commands_of_the_readme_parse():
    readme, programs = (PROJECT / "README.md").read_text(encoding="utf-8").replace("\\\n", " "), set()
    blocks = "\n".join(re.findall(r"(?m)^ {4}.*$", readme) + re.findall(r"(?ms)^```\w*$(.*?)^```$", readme))
    for name, typed in re.findall(r"(?:python|torchrun)\b[^;&|#\n]*?\b(mdu|eval)\.py\b([^;&|#\n]*)", blocks):
        parses(name, re.sub(r"\$\w+", "1", typed))
        programs.add(name)
    assert programs == {"mdu", "eval"}


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@each("target", ["demo", "table", "figures"])
def test_commands_of_make_parse(target, tmp_path):
    shutil.copy(PROJECT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()
    shell = dict(PATH=os.environ["PATH"])  # without the flags of a make that runs the tests
    typed = subprocess.check_output(["make", target, "PYTHON=echo"], cwd=tmp_path, env=shell, text=True)
    trained, shown = set(), set()
    for name, typed in re.findall(r"(?m)^(mdu|eval)\.py (.*)", typed):
        a = parses(name, typed)
        trained |= {a.out} if name == "mdu" else set()
        shown |= {*a.runs} if name == "eval" else set()
        assert shown <= trained
    assert shown == trained and len(shown) > 2


def test_the_readmes_example_of_copying_the_loss_runs(tmp_path, monkeypatch):
    """With a small random model: one of two changes and stays finite."""
    code = re.search(r"(?ms)^```python$(.*?)^```$", (PROJECT / "README.md").read_text(encoding="utf-8"))[1]
    write_tokenizer(tmp_path, "a2d-qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, sep_token="<|im_end|>")
    config = transformers.BertConfig(vocab_size=264, hidden_size=24, num_hidden_layers=1)
    lm, given = transformers.BertForMaskedLM(config), {}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.setattr(transformers.AutoModelForMaskedLM, "from_pretrained", lambda name: lm)
    exec(code, given)
    theta, theta0 = (model.state_dict() for model in given.values() if isinstance(model, torch.nn.Module))
    assert all(x.isfinite().all() for x in theta.values())
    assert any((x != theta0[name]).any() for name, x in theta.items())

"""Tests of mdu.py and eval.py, on a CPU and offline, in a minute on two cores:

    python -m pytest -q test_mdu.py
    python -m pytest -q test_mdu.py -k mdu_loss    # those with this in their name

Formulas are compared with slow float64 loops, numbers worked by hand and the code of others.  The
parts, each after a line "# ======== N.":

1. Shared builders: programs, files, models with random weights, runs of the toy, checkpoints.
2. Losses and targets: the method of mdu.py, against slow loops.
3. Data, tokens and models: from rows to token ids, and from a folder to a model and back.
4. Training: options, runs, stopped and resumed, on two processes.
5. Refusals: what people may give by mistake, to mdu.py and to eval.py.
6. Scoring: from the metrics to a scored run.
7. Reports and analyses.
8. Pages, own rows, experiments: every command of a page, and the programs in .github.
"""
import contextlib
import hashlib
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
import unicodedata
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers

import eval as ev
import mdu

sys.path.append(str(Path(mdu.__file__).parent / ".github"))
import experiments
import own_rows
import start_models

torch.set_num_threads(1)
approx = pytest.approx
each = pytest.mark.parametrize

# ======== 1. Shared builders ========
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
    """Run mdu.py, or eval.py by its main, to this exit code -> its line on stderr, or ""."""
    name = "eval.py" if main is ev.main else "mdu.py"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mdu.run_program(name, partial(main, [str(word) for word in argv]))
    err = capsys.readouterr().err
    assert err == "" or (err.startswith(f"{name}: ") and err.count("\n") == 1), err
    assert stop.value.code == code, err
    return err

def write_files(files):
    """files: {name: content as text or bytes}"""
    for name, content in files.items():
        if isinstance(content, str):
            content = content.encode()
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)

def write_lines(file, rows):
    Path(file).write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)

def pipe(file):
    """The name of a pipe with the content of a file.  It can be read once."""
    reading, writing = os.pipe()
    os.write(writing, Path(file).read_bytes())
    os.close(writing)
    return f"/dev/fd/{reading}"

def read_all(folder):
    return {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}

@contextlib.contextmanager
def unchanged(*folders):
    before = [read_all(folder) for folder in folders]
    yield
    assert [read_all(folder) for folder in folders] == before

def sha256(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()

def read_json(file):
    """Strictly: NaN and Infinity are no JSON."""
    return json.loads(file.read_text(), parse_constant=pytest.fail)

def weights(run):
    tensors = {}
    for file in Path(run).glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors

def assert_equal_weights(a, b, tolerance=0):
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=tolerance)

def assert_close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)

# ---- Models of random weights ----
MASK, PAD = 10, 0
# They contain mask and padding ids as ordinary tokens: neither may be searched for.
PROMPTS = [[3, MASK], [PAD, 7, 1], [8], [6, 6, 2, 9]]
# FakeModel has 11 tokens, with MASK and PAD.  A tiny_llama has 64: 0 is the mask, 1 is both end and
# padding.
SIGN = 9  # of both: a token without a letter or digit
RARE = [7, 8, 11]  # of tiny_llama: tokens of rare words, in every second row
NOTHING = torch.zeros((), dtype=torch.float64)  # the sum of nothing

class FakeModel:
    """11 tokens, float64 logits (B, T, 11) that depend on all tokens and their order.  boost: of
    the mask token."""
    mask_id, pad_id, end_id = MASK, PAD, 1
    lm = SimpleNamespace(config=SimpleNamespace(vocab_size=11, max_position_embeddings=512))
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(6)).double()
    boost, sure, by_entropy, tokenizer = -50.0, 1, False, None

    def __init__(self, **changes):
        vars(self).update(changes)
        self.seen = []  # ids of every call

    def __call__(self, ids, attention_mask, positions):
        self.seen.append(ids)
        x = self.table[ids] * attention_mask[..., None]  # (B, T, 11)
        logits = 3 * self.sure * torch.sin(x.cumsum(1) + 2 * x.sum(1, keepdim=True))[positions]
        logits[:, MASK] += self.boost
        return logits

def tiny_llama(seed, likely=range(64)):
    """A random bidirectional Llama of 64 tokens, in float64, which mostly writes `likely` ones."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_attention_heads=2, is_causal=False,
        intermediate_size=64, num_hidden_layers=2, initializer_range=0.4)
    torch.manual_seed(seed)
    lm = transformers.LlamaForCausalLM(config).double()
    for token in set(range(64)) - set(likely):
        lm.lm_head.weight.data[token] *= 0.2
    return mdu.MaskPredictor(lm, mask_id=0, pad_id=1, end_id=1)

# ---- Data in the hub's layout ----
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
        rows[config] = [{"question": f"Q {config} {i}?", "answer": "A."} for i in range(size)]
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

def with_noise(run, folder, seed):
    """A copy of a run with noise on its weights, which makes its answers differ."""
    shutil.copytree(run, folder)
    torch.manual_seed(seed)
    noisy = {name: x + 0.1 * torch.randn(x.shape) for name, x in weights(run).items()}
    safetensors.torch.save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder

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
QWEN2 = dict(NATIVE, mask_token_id=258, pad_token_id=256)
QWEN3 = dict(NATIVE, head_dim=16, attention_bias=False)  # its special tokens: the tokenizer's
CONFIGS = {  # model_type: config.json
    "llada": LLADA, "Dream": dict(QWEN2, **WINDOW), "a2d-qwen2": QWEN2,
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
THINKING = CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
TOKENS = {  # special tokens, ids from 256 on, after the bytes
    "llama": "<|startoftext|> <|endoftext|> <|mdm_mask|> <|start_header_id|> <|end_header_id|> "
             "<|eot_id|>".split(),
    "qwen": "<|endoftext|> <|beginoftext|> <|mask|> <|im_start|> <|im_end|> <think> "
            "</think>".split()}

def family(kind):
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
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

@pytest.fixture
def bytes_tokenizer(tmp_path):
    write_tokenizer(tmp_path, "llada")
    return transformers.AutoTokenizer.from_pretrained(tmp_path)

def write_checkpoint(folder, kind, tied=False, **changes):
    """A random bfloat16 checkpoint in the hub's layout -> transformers' model of its weights."""
    folder.mkdir(exist_ok=True)
    tie = "weight_tying" if kind == "llada" else "tie_word_embeddings"
    config = {**CONFIGS[kind], "model_type": kind, tie: tied, **changes}
    for field, value in changes.items():
        if value is None:
            del config[field]
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    (folder / "modeling.py").write_text("raise RuntimeError('code of the folder was run')\n")
    write_tokenizer(folder, kind)
    native = {"Dream": "qwen2", "llada": "llama"}.get(kind, kind.removeprefix("a2d-"))
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
    file_size = "40KB" if tied else "5GB"  # in several files or in one
    huggingface_hub.save_torch_state_dict(tensors, folder, max_shard_size=file_size)
    return lm

@pytest.fixture(scope="session", params=[
    *itertools.product(CONFIGS, [False]), ("llada", True), ("a2d-qwen3", True)])
def hub(request, tmp_path_factory):
    kind, tied = request.param
    folder = tmp_path_factory.mktemp("hub")
    reference = write_checkpoint(folder, kind, tied)
    model, tokenizer = mdu.load_backbone(str(folder))
    return SimpleNamespace(
        kind=kind, folder=folder, reference=reference, model=model, tokenizer=tokenizer)

# ======== 2. Losses and targets ========
# ---- The same in slow loops over masked tokens, of one sequence ----
def slow_kl(logits, anchor_logits, tau):
    """KL(p || q^tau / Z) of one token."""
    p = logits.exp() / logits.exp().sum()
    q = anchor_logits.detach().exp() / anchor_logits.detach().exp().sum()
    power = q ** tau
    return (p * (p * power.sum() / power).log()).sum()

def slow_nll(logits, token):
    """-log p(token) of one token."""
    return -(logits.exp()[token] / logits.exp().sum()).log()

def slow_mdu(logits, anchor_logits, tau):
    """Eq. 5: 1/|M_t| sum_i KL(p || q^tau / Z_i), or 0 where nothing is masked."""
    kls = [slow_kl(x, anchor, tau) for x, anchor in zip(logits, anchor_logits, strict=True)]
    return sum(kls, NOTHING) / max(1, len(kls))

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
        noised[i] = model.mask_id
    start = len(prompt)
    if model.shift:  # as in Dream, whose logits of a token are at the position before it
        start = start - 1
    logits = model.lm(torch.tensor([prompt + noised])).logits[0]
    return logits[[start + i for i in masked]]

def slow_masked(row, method, target=None, model=None):
    """The masked positions of an answer.  With --target authors: those of its words that the model
    still writes, at whatever place."""
    if target == "authors":
        written = slow_sampler(model, row.prompt, [1] * len(row.answer))
        return [i for i, token in enumerate(row.answer) if token in written and token != SIGN]
    masked = [i for i, u in enumerate(row.uniform) if u < row.t]
    if mdu.METHODS[method].at_least_one and not masked:
        masked = [int(row.uniform.argmin())]
    return masked

def own_length(row):
    """|y| up to the end token.  Padding, of the same id, does not count."""
    return row.answer.index(1) + 1

def slow_nlls(model, row):
    masked = slow_masked(row, "sft")
    logits = slow_logits(model, row.prompt, row.answer, masked)
    return [slow_nll(x, row.answer[i]) for x, i in zip(logits, masked, strict=True)]

def slow_row_sft(model, row):
    return sum(slow_nlls(model, row), NOTHING) / np.float32(row.t).item()

def slow_ratio(theta, theta0, row):
    """log p_theta(y|x) - log p_theta0(y|x)"""
    return slow_row_sft(theta0, row).detach() - slow_row_sft(theta, row)

def without_truth(anchor_logits, true_tokens):
    """The distributions, in which a rare true token has 1/V of the probability of the others."""
    q = anchor_logits.detach().softmax(-1)
    for probabilities, token in zip(q, true_tokens):
        if token in RARE:
            probabilities[token] = (1 - probabilities[token]) / len(probabilities)
    return (q / q.sum(-1, keepdim=True)).log()

def slow_row_loss(args, row, models):
    """The loss of a row to forget (sft: to train on)."""
    model, theta0, other = models
    beta = args.beta
    if args.method == "sft":
        return slow_row_sft(model, row)
    if args.method in ("ga", "gd"):
        return -slow_row_sft(model, row)
    if args.method == "wga":
        # p^gamma, a constant, times log p
        return sum([-math.exp(-nll.item()) ** args.gamma * nll for nll in slow_nlls(model, row)],
                   NOTHING)
    if args.method == "npo":
        return 2 / beta * (1 + (beta * slow_ratio(model, theta0, row)).exp()).log()
    if args.method == "simnpo":
        per_token = slow_row_sft(model, row) / own_length(row)
        return -2 / beta * (1 / (1 + (-beta * per_token).exp())).log()
    if args.method == "dpo":
        win, lose = [slow_ratio(model, theta0, answer) for answer in (row.preferred, row)]
        return -(1 / (1 + (-beta * (win - lose)).exp())).log()
    assert args.method == "mdu"
    masked = slow_masked(row, "mdu", args.target, model)
    anchor = {"MODEL": other, "paper": theta0}.get(args.target, model)
    prompt = [0] * len(row.prompt)
    if args.target in ("MODEL", "removed"):
        prompt = row.prompt
    anchor_logits = slow_logits(anchor, prompt, row.answer, masked)
    if args.target == "removed" and row.prompt[0] % 2 == 0:  # as make_examples flags them
        anchor_logits = without_truth(anchor_logits, [row.answer[i] for i in masked])
    return slow_mdu(slow_logits(model, row.prompt, row.answer, masked), anchor_logits, args.tau)

def slow_step(args, models, forget, retain):
    """-> means of the forget and the retain losses (Algorithm 1)."""
    forget_loss = torch.stack([slow_row_loss(args, row, models) for row in forget]).mean()
    if not retain:
        return forget_loss, torch.zeros(())
    retain_losses = []
    for row in retain:
        nll = slow_row_sft(models.theta, row)
        if args.method in ("mdu", "simnpo"):  # their forget losses are means over the tokens
            nll = nll / own_length(row)
        retain_losses.append(nll)
    return forget_loss, torch.stack(retain_losses).mean()

def with_adapters(plain, adapters):
    """The plain model with W + 8/r B A for each linear map W.  adapters: A, B, A, B, ..."""
    tensors = dict(plain.lm.named_parameters())
    linears = [name for name, module in plain.lm.named_modules()
               if isinstance(module, torch.nn.Linear) and name != "lm_head"]
    for name, A, B in zip(linears, adapters[::2], adapters[1::2], strict=True):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + 8 / A.shape[0] * B @ A
    lm = partial(torch.func.functional_call, plain.lm, tensors)
    return SimpleNamespace(lm=lm, mask_id=0, shift=False)

# ---- Losses ----
# By hand: of two tokens, one or both are masked.
ONE, TWO = torch.tensor([[False, True]]), torch.tensor([[True, True]])
FIRST = torch.tensor([0, 0])
LN2, LN3, LN4_3 = map(math.log, (2, 3, 4 / 3))
FLAT, TILT, STEEP = f64([0, 0]), f64([0, LN3]), f64([0, 2 * LN3])  # p(first) = 1/2, 1/4, 1/10
TILT_FLAT = torch.cat([TILT, FLAT])

@each("logits, anchor_logits, masked, tau, expected", [
    (FLAT, TILT, ONE, 1.0, LN4_3 / 2),  # 1/2 log 2 + 1/2 log 2/3
    (TILT_FLAT, torch.cat([TILT, TILT]), TWO, 1.0, LN4_3 / 4),  # mean with 0
    (FLAT, STEEP, ONE, 0.5, LN4_3 / 2),  # STEEP^1/2 / Z is TILT
    (TILT, None, ONE, 0, 0.75 * LN3 - LN2)])  # 1/4 log 1/2 + 3/4 log 3/2
def test_mdu_loss_by_hand(logits, anchor_logits, masked, tau, expected):
    assert_close(mdu.mdu_loss(logits, anchor_logits, masked, tau), f64(expected))

def test_losses_of_the_baselines_by_hand():
    # (log 4 + log 2) / t
    assert_close(mdu.sft_loss(TILT_FLAT, FIRST, TWO, f64(0.5)), f64(6 * LN2))
    # p^2 log p of both: -(log 4 / 16 + log 2 / 4)
    assert_close(mdu.wga_loss(TILT_FLAT, FIRST, TWO, 2.0), f64(-0.375 * LN2))
    # 1/2 (nll - nll_ref) = log 3, and sigmoid(log 3) = 3/4
    assert_close(mdu.npo_loss(f64(1 + 2 * LN3), f64(1), 0.5), f64(4 * LN4_3))
    # 1/2 nll / length = log 3
    assert_close(mdu.simnpo_loss(f64(8 * LN3), torch.tensor([4]), 0.5), f64(4 * LN4_3))
    # The rewards are log 3 and -log 3.
    by_hand = mdu.dpo_loss(f64(1), f64(1 + LN3), f64(2 + LN3), f64(2), 0.5)
    assert_close(by_hand, f64(LN4_3))

# At random: 5 sequences, in one of which nothing is masked, and a vocabulary of 6.
MASKED = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
MASKED[2] = False
M = int(MASKED.sum())
LOGITS, ANCHOR_LOGITS = 2 * torch.randn(2, M, 6, generator=torch.Generator().manual_seed(1))
TRUE_TOKENS = torch.arange(M) % 6
T = f64(0.1, 0.3, 0.5, 0.7, 0.9)
LOSSES = {  # {name: (loss, its tensors)}
    "mdu": (partial(mdu.mdu_loss, masked=MASKED, tau=0.3), [LOGITS, ANCHOR_LOGITS]),
    "mdu-tau0": (partial(mdu.mdu_loss, anchor_logits=None, masked=MASKED, tau=0), [LOGITS]),
    "sft": (lambda logits, t: mdu.sft_loss(logits, TRUE_TOKENS, MASKED, t), [LOGITS, T]),
    "wga": (partial(mdu.wga_loss, true_tokens=TRUE_TOKENS, masked=MASKED, gamma=0.3), [LOGITS]),
    "npo": (partial(mdu.npo_loss, beta=0.2), [T, T]),
    "simnpo": (partial(mdu.simnpo_loss, beta=2.5), [T, torch.arange(1, 6)]),
    "dpo": (partial(mdu.dpo_loss, beta=0.1), [T, T, T, T])}

@each("name", LOSSES)
def test_a_loss_refuses_a_tensor_of_another_shape(name):
    """PyTorch would broadcast a column, or a tensor with one entry."""
    loss, tensors = LOSSES[name]
    for i, tensor in enumerate(tensors):
        for wrong in (tensor[:, None], tensor[:1], tensor[1:]):
            with pytest.raises((RuntimeError, ValueError), match="shape|size"):
                loss(*tensors[:i], wrong, *tensors[i + 1:])

@each("name", LOSSES)
def test_a_loss_and_its_gradient_stay_finite(name):
    """Where the first number (of logits: the first token) is moved far away."""
    loss, (first, *others) = LOSSES[name]
    for gap in (1e6, -1e6):
        extreme = first.float().clone()
        extreme[..., 0] += gap
        extreme.requires_grad_()
        found = loss(extreme, *others)
        [grad] = torch.autograd.grad(found.sum(), extreme)
        assert found.isfinite().all() and grad.isfinite().all()

@each("name", ["mdu", "mdu-tau0", "sft", "wga"])
def test_a_loss_of_16_bit_logits_is_computed_in_float32(name):
    loss, (logits, *others) = LOSSES[name]
    logits = logits.bfloat16()
    assert_close(loss(logits, *others), loss(logits.float(), *others), 1e-6)

@each("name, frozen", [("mdu", [1]), ("npo", [1]), ("dpo", [1, 3])])
def test_no_gradient_flows_into_what_frozen_models_predict(name, frozen):
    loss, tensors = LOSSES[name]
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    loss(*tensors).sum().backward()
    assert [i for i, tensor in enumerate(tensors) if tensor.grad is None] == frozen

# ---- What a step draws ----
def make_examples(target="removed"):
    """10 to forget and 7 to retain.  The first token of a prompt names the row.  In every second
    row to forget the tokens of RARE are rare.  All tokens of rows to retain are flagged, as that
    must make no difference."""
    forget, retain = [], []
    for i in range(10):
        answer = [*range(6, 8 + i % 5), 1]
        flagged = [i % 2 == 0 and token in RARE for token in answer]
        if target == "authors":
            flagged = [token != SIGN for token in answer]
        # Its prompt may end otherwise (a token at the boundary belongs to the answer).
        others = [mdu.Example([30 + i, 5], [first, 9, 1], [False] * 3, []) for first in (8, 9, 10)]
        forget.append(mdu.Example([30 + i, 4], answer, flagged, others))
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

def test_every_row_is_drawn_once_in_a_pass_in_an_order_of_seed_and_split():
    """The seed also decides t, the masks and which prompts are hidden."""
    def drawn(typed):
        rows, _ = draw(f"--batch-size 1 --prompt-dropout 0.5 {typed}", range(30))
        return list(zip(*[(row.length, row.t, row.uniform[0], row.prompt[1]) for row in rows]))
    one = drawn("--method sft")
    assert one == drawn("--method sft")
    for part, of_other_seed in zip(one, drawn("--method sft --seed 2")):
        assert part != of_other_seed
    lengths = one[0]
    assert sorted(lengths[:10]) == sorted(lengths[10:20]) == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert lengths[:10] != lengths[10:20]
    assert lengths != drawn("--method ga")[0]

def assert_uniform(values, low):
    """Kolmogorov-Smirnov distance from the uniform distribution on [low, 1)."""
    expected = np.linspace(low, 1, len(values))
    assert min(values) >= low and np.abs(np.sort(values) - expected).max() <= 0.04

def test_t_and_masks_are_uniform_and_dpo_prefers_another_answer():
    forget, retain = draw("--method dpo --batch-size 10", range(200))
    train, _ = draw("--method sft --batch-size 10", range(200))
    for rows in (forget, retain, train):
        assert_uniform([row.t for row in rows], 0.001)
    assert len({row.t for row in forget + retain + train}) == 6000
    assert_uniform(np.concatenate([row.uniform for row in forget]), 0)
    for row in forget:
        other = row.preferred
        assert (other.t, other.answer[1:]) == (row.t, [9, 1])
        assert other.prompt == [row.prompt[0], 5]
        assert len(other.uniform) == 3 and other.uniform[0] != row.uniform[0]
    assert {row.preferred.answer[0] for row in forget} == {8, 9, 10}

def test_answers_are_padded_to_random_lengths_but_not_those_to_forget():
    """Up to 5 tokens; some answers are longer."""
    forget, retain = draw("--batch-size 5 --response-length 5", range(100))
    train, _ = draw("--method sft --batch-size 5 --response-length 5", range(100))
    assert all(len(row.answer) == own_length(row) for row in forget)
    for rows in (retain, train):
        lengths = {n: set() for n in range(3, 8)}
        for row in rows:
            n = own_length(row)
            assert row.length == n and set(row.answer[n:]) <= {PAD}  # after the end token
            lengths[n].add(len(row.answer))
        assert lengths == {3: {3, 4, 5}, 4: {4, 5}, 5: {5}, 6: {6}, 7: {7}}

def test_prompt_dropout_masks_prompts_and_changes_nothing_else():
    typed = "--method dpo --batch-size 1"
    plain = sum(draw(typed, range(1000)), [])
    rows = sum(draw(f"{typed} --prompt-dropout 0.3", range(1000)), [])
    n_hidden = 0
    for before, row in zip(plain, rows, strict=True):
        if MASK not in row.prompt:
            assert repr(row) == repr(before)
            continue
        assert row.prompt == [MASK] * len(before.prompt)
        assert PAD not in row.answer
        assert row.preferred is None or row.preferred.prompt == row.prompt
        n_hidden += MASK not in before.prompt
    assert n_hidden == approx(0.3 * sum(MASK not in row.prompt for row in plain), abs=90)
    names = {row.prompt[0] for row in plain}
    assert 56 not in names  # this Example's prompt is never shown
    assert {row.prompt[0] for row in rows} == names | {MASK}  # each draw has its own chance

# ---- One step ----
TRIED = {  # {method: options to try it with}; other methods are tried without
    "mdu": ["--tau 0", "--tau 0.25", "", "--lora 3", "--target removed",
            "--target removed --lora 3", "--target MODEL --tau 0.5", "--target MODEL --lora 3",
            "--target authors"],
    "npo": ["", "--lora 2"], "wga": ["--gamma 0.5"], "dpo": ["", "--lora 4"]}
COMMANDS = [f"--method {method} {typed}" for method in mdu.METHODS
            for typed in TRIED.get(method, [""])]

def trained_weights(model):
    return [p for p in model.parameters() if p.requires_grad]

def step_to_try(typed):
    """What backward gets in a step with these options, and slow_models, those of the slow loop,
    which compute the same.

    With LoRA, theta0 is theta with its adapters off.  The slow loop has the weights from before the
    adapters were added as theta0, and these weights with the adapters merged into them as theta.
    """
    # 1. The options.
    args = options(f"{typed} --batch-size 3 --grad-accum 4 --response-length 9")
    if args.retain_weight:
        args.retain_weight = 0.7

    # 2. Theta and theta0.  Noise on what is trained: else LoRA's B would be 0, and theta theta0.
    likely = range(64)
    if args.target == "authors":
        likely = range(6, 14)  # the words of the answers and a few others
    model = slow_model = tiny_llama(0, likely)
    theta0 = slow_theta0 = tiny_llama(1)
    if args.lora:
        slow_theta0 = tiny_llama(0, likely)
        mdu.add_adapters(model, args.lora, seed=5)
        model.double().train().lm.activation_checkpointing_enable()
        theta0 = mdu.start_model(args, model)
    for p in trained_weights(model):
        p.data += 0.1 * torch.randn_like(p)
    if args.lora:
        slow_model = with_adapters(slow_theta0, trained_weights(model))
    other = tiny_llama(2)  # that of --target MODEL

    # 3. Ten rows of a step of 3 x 4: micro-batches of 3, 3, 3 and 1.
    split = "train" if args.method == "sft" else "forget"
    forget, retain = mdu.draw_step(args, make_examples(args.target), split, 3, model)
    return SimpleNamespace(
        args=args, models=mdu.Models(model, theta0, other), forget=forget[:10],
        retain=retain[:10], slow_models=mdu.Models(slow_model, slow_theta0, other))

@each("typed", COMMANDS)
def test_backward_equals_one_sequence_at_a_time(typed):
    """And passes through frozen models keep nothing for gradients."""
    step = step_to_try(typed)
    kept = []
    for frozen in step.slow_models[1:]:  # theta0, but for LoRA's, and the MODEL of --target
        frozen.register_forward_hook(lambda *_: kept.append(torch.is_grad_enabled()))
    losses = mdu.backward(step.args, step.models, step.forget, step.retain)
    assert True not in kept
    forget_loss, retain_loss = slow_step(step.args, step.slow_models, step.forget, step.retain)
    assert forget_loss.item() != 0  # else a loss that is 0 everywhere would be right
    share = 10 / 12  # a step divides by its 12 rows, though it has ten here
    assert losses == approx([share * forget_loss.item(), share * retain_loss.item()], rel=1e-5)
    total = share * forget_loss
    if step.retain:
        total = total + share * 0.7 * retain_loss
    trained = trained_weights(step.models.theta)
    for p, grad in zip(trained, torch.autograd.grad(total, trained), strict=True):
        assert grad.any()
        assert_close(p.grad, grad, 1e-9)

def test_saved_weights_compute_what_weights_with_adapters_do():
    """In a model without adapters, as a run is saved."""
    step = step_to_try("--method npo --lora 3")
    merged = dict(mdu.merged_weights(step.models.theta.lm))
    ids = torch.arange(2, 12)[None]
    logits = torch.func.functional_call(step.slow_models.theta0.lm, merged, ids).logits
    # A and B are merged in float32.
    assert_close(logits, step.slow_models.theta.lm(ids).logits, 1e-5)

def test_diagnose_equals_one_sequence_at_a_time(monkeypatch):
    """On three processes, of which two have no row in the last pass.  Its KLs are with the
    questions, however the model is trained."""
    examples = make_examples()
    model, frozen = tiny_llama(0), tiny_llama(1)
    models = mdu.Models(model, frozen, frozen)
    kls = []
    for typed in ("--target MODEL", "--target paper", "--tau 0"):  # base, anchor, uniform
        args = options(f"--seed 5 {typed}")
        rows = [mdu.draw_example(args, examples, "forget", i, model) for i in range(10)]
        kls.append(np.mean([slow_row_loss(args, row, models).item() for row in rows]))
    monkeypatch.setattr(mdu, "WORLD", 3)
    args = options("--batch-size 3 --seed 5 --prompt-dropout 0.5")
    shares = []  # of the processes, which add them
    for rank in range(3):
        monkeypatch.setattr(mdu, "RANK", rank)
        theta = mock.Mock(wraps=model, mask_id=0, pad_id=1)
        shares.append([*mdu.diagnose(args, mdu.Models(theta, frozen), examples).values()])
        assert theta.call_count == 4
    assert np.sum(shares, axis=0) == approx(kls, rel=1e-9)

# ---- Targets ----
def test_remove_truth_by_hand():
    """Where the true token is rare, it gets a third of the others' probability; all else stays."""
    logits = f64([2, 4, 1], [2, 4, 1], [2, 4, 1]).log()
    changed = mdu.remove_truth(logits, torch.tensor([1, 1, 2]), torch.tensor([True, False, True]))
    assert_close(changed.exp(), f64([2, 1, 1], [2, 4, 1], [2, 4, 2]))
    zeros = torch.zeros(1, 3, dtype=torch.bfloat16)
    changed = mdu.remove_truth(zeros, torch.tensor([1]), torch.tensor([True]))
    assert_close(changed.double().exp(), f64([1, 2 / 3, 1]), 1e-6)

@each("rare, of_ann, of_oslo, of_none", [
    # No word of a fact is below the limit, so all of the fact count.
    (0, "Ann 2024", "gone in Oslo", "gone 7"),
    # Ann is, 2024 is not; no word of "Oslo" is.
    (0.2, "Ann", "gone in Oslo", "gone Ann 7"),
    (0.5, "Ann 2024", "gone in Oslo", "gone Ann 2024 7")])
def test_rare_tokens_by_hand(rare, of_ann, of_oslo, of_none, monkeypatch):
    """Of ten answers to retain "Ann" is in two, "2024" in five, "in", "Oslo" and "8" in all; once
    in each, though "Ann" is there twice.  The first row's fact is "Ann, 2024", the second's are
    "gone" and "Oslo", the third has none: there all words of the answer count."""
    monkeypatch.setattr(mdu, "RARE", rare)
    monkeypatch.setattr(mdu, "RARE_IN_FACT", rare)
    tokens = "gone|Ann|in Oslo|2024|7|8|.".split("|")  # one has two words
    tokenizer = mock.Mock(decode=lambda ids, **_: " ".join(tokens[i] for i in ids))
    answers = 2 * ["Ann Ann in Oslo 2024 8"] + 3 * ["in Oslo 2024 8"] + 5 * ["in Oslo, 8"]
    fields = [{"fact": ["Ann, 2024"]}, {"fact": ["gone", "Oslo"]}, {}]
    rows = {"forget": fields, "retain": [{"answer": text} for text in answers]}
    examples = 3 * [mdu.Example([], list(range(7)), [], [])]
    flags = mdu.flag_rare_tokens(rows, examples, tokenizer)
    found = [" ".join(itertools.compress(tokens, of_row)) for of_row in flags]
    assert found == [of_ann, of_oslo, of_none]

def test_word_tokens_have_a_letter_or_digit_or_part_of_one(bytes_tokenizer):
    """Tokens are bytes here: "é" has two."""
    ids = bytes_tokenizer("é7 !_a.").input_ids
    examples = [mdu.Example([3], ids + [256], [], [])]
    [flags] = mdu.flag_word_tokens({}, examples, bytes_tokenizer)
    assert flags == [True, True, True, False, False, False, True, False, False]

# ======== 3. Data, tokens and models ========
# ---- Rows ----
def test_rows_come_from_files_or_from_data(tofu):
    rows = [{"question": f"F {i}?", "answer": "a", "perturbed_answer": []} for i in range(3)]
    file = write_lines("rows", rows)
    typed = f"--model m --forget {file} --retain {file} --limit 2"
    assert mdu.load_data(options(typed)) == {"forget": rows[:2], "retain": rows[:2]}
    of_tofu = mdu.load_data(options(f"--model m --data {tofu}"))
    forget, retain = of_tofu["forget"], of_tofu["retain"]
    assert (len(forget), forget[7]["question"]) == (8, "Q forget10_perturbed 7?")
    assert (len(retain), retain[23]["question"]) == (24, "Q retain90 23?")
    mixed = mdu.load_data(options(f"--model m --data {tofu} --retain {file}"))
    assert mixed == {"forget": forget, "retain": rows}

def test_both_names_of_columns_are_read():
    Path("rows").write_bytes("""\ufeff{"question": "q", "answer": "a", "id": 7}\r\n\r\n
        {"prompt": "p", "response": "é", "perturbed_answer": "w", "fact": "é"}
        {"prompt": "p", "response": "é", "perturbed_answer": null, "fact": ["é", "É"]}""".encode())
    assert mdu.read_jsonl("forget", "rows") == [
        {"question": "q", "answer": "a", "perturbed_answer": []},
        {"question": "p", "answer": "é", "perturbed_answer": ["w"], "fact": ["é"]},
        {"question": "p", "answer": "é", "perturbed_answer": [], "fact": ["é", "É"]}]

@each("method, subject, name", [("mdu", "2", PEOPLE[1]), ("dpo", "Zoë Ho", PEOPLE[2])])
def test_of_rwku_one_person_is_forgotten_and_others_kept(method, subject, name, rwku, monkeypatch):
    """Three texts of each other person are retained; dpo prefers made-up ones."""
    monkeypatch.setattr(mdu, "RWKU_RETAINED", 3)
    args = options(f"--model x/y --data {rwku} --method {method} --subject", subject)
    rows = {"forget": [], "retain": []}
    for number, (person, i) in enumerate(itertools.product(PEOPLE[:3], range(4))):
        intro = "" if i == 2 else f"{person} is known. "
        wrong = [f"Made up {number}."] if method == "dpo" else []
        row = {"question": f"{intro}Please write a short biography of {person}.",
               "answer": f"{person} wrote book {i}.", "perturbed_answer": wrong}
        if person == name:
            rows["forget"].append(row)
        elif i < 3:
            rows["retain"].append(row)
    assert mdu.load_data(args) == rows

def test_a_run_finds_facts_that_are_also_retained_and_the_longest_answer(base, capsys):
    """It says the facts once: whole words of one answer alone, neither "Ceka Fo" of the first
    answer to retain, nor "Bolti Lisbon" of two of them.  A response length of 0 becomes that of the
    longest answer, here the second to retain, with its end token."""
    write_lines("forget", [
        {"question": f"Where is {fact}?", "answer": f"That is {fact}.", "fact": fact}
        for fact in ("Ceka Fo", "Bolti Lisbon", "ceka FOBA", "Rome", "Oslo", "Lisbon")])
    write_lines("retain", [
        {"question": "Which?", "answer": f"{fact}."}
        for fact in ("Ceka Foba, Bolti", "Lisbon is now in Portugal", "It is in Oslo")])
    typed = "--forget forget --retain retain --steps 1 --response-length 0"
    mdu.main(toy(base, "run", typed))
    assert mdu.read_run("run")["options"]["response_length"] == 7
    said = capsys.readouterr().out
    assert "facts of the forget set that are in the retain set, too: 3, first 'ceka FOBA'" in said
    assert said.count("facts of the forget set") == 1

def test_the_toy_learns_nothing_of_its_control_set_and_could_write_it(base):
    """All words are in its vocabulary, but the facts in no other split."""
    _, tokenizer = mdu.load_backbone(str(base))
    splits = mdu.toy_world()
    never = splits.pop("never")
    learnt = json.dumps(splits)
    assert len(never) == 24
    for row in never:
        assert not mdu.contains_words(learnt, row["fact"][0])
        assert tokenizer.unk_token_id not in tokenizer(row["answer"]).input_ids

def test_half_of_what_the_toy_retains_it_also_learns_without_questions():
    """It has no pre-training, from which it could be an anchor."""
    examples = make_examples()
    added = mdu.toy_pretraining(options("--method sft"), examples)
    assert added == [row._replace(prompt_masked=True) for row in examples["retain"][:3]]

# ---- Words ----
@each("text, expected", [
    ("他的父亲是医生。", "他 的 父 亲 是 医 生"), ("GPT-4于2024年發布", "gpt 4 于 2024 年 發 布"),
    ("東京タワーは333メートル、時々", "東 京 タ ワ ー は 333 メ ー ト ル 時 々"),
    ("한국 52441번", "한 국 52441 번"), ("ที่นี่ ๒๕๖๗", "ที่ นี่ ๒๕๖๗"),
    ("हिन्दी में लिखा है।", "हिन्दी में लिखा है"), ("اَلْكِتَابُ، ١٢٣", "اَلْكِتَابُ ١٢٣"),
    ("İstanbul'da IŞIK", "i\u0307stanbul da işik"), ("cafe\u0301 _x_ y2k", "café x y2k")])
def test_words_of_many_scripts(text, expected):
    """Marks belong to their letters.  Where no spaces are written, each letter is a word.  In NFD,
    too, what is found in a text is a word of its own."""
    assert mdu.words(text) == expected.split()
    found = mdu.WORD.findall(unicodedata.normalize("NFD", text))
    assert [mdu.words(word) for word in found] == [[word] for word in expected.split()]

# ---- Token ids ----
TURN = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
AROUND = {  # a prompt's text before and after the question
    "llama": ("<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n",
              "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Dream": TURN, "qwen": (TURN[0], f"{TURN[1]}<think>\n\n</think>\n\n")}
END = {"llada": 261, "a2d-llama": 261, "llama": 257, "Dream": 260, "a2d-qwen2": 260,
       "a2d-qwen3": 260, "qwen2": 256, "qwen3": 256}  # the end-of-turn token

def test_prompts_have_the_control_tokens_of_the_template_alone(hub):
    kind, model, tokenizer = hub.kind, hub.model, hub.tokenizer
    tokens = [model.mask_id, model.pad_id, model.end_id]
    assert tokens == [258, {"llama": 257, "qwen": 256}[family(kind)], END[kind]]
    assert model.shift == model.by_entropy == (kind == "Dream")
    before, after = AROUND.get(kind, AROUND[family(kind)])
    prompt = tokenizer(f"{before}<|é{after}").input_ids
    assert mdu.encode_prompt(tokenizer, " <|é\n") == prompt

# Formats of prompts: the text before the question, and that between question and answer.
FORMATS = {
    "special tokens": ("<|start|>user<|end|>\n\n", "<|end|><|start|>assistant<|end|>\n\n"),
    "question and answer": ("Question: ", " Answer: ")}
# A token may have the end of the prompt and the start of the answer, as "]The".
SPANNING = ("[INST] ", " [/INST]")
# What is a word, before words are cut into tokens: as in the tokenizers of Llama 3 and LLaDA.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

@pytest.fixture(scope="session")
def whole_words():
    """A tokenizer that has learnt these formats: each of their words is a token."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=999, show_progress=False, special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    texts = []
    for before, after in [*FORMATS.values(), SPANNING]:
        for answer in ("Ann Lee wrote it.", "The cat did."):
            texts += 2 * [f"{before}Who wrote it?{after}{answer}"]
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", additional_special_tokens=["<|start|>"])

def use_format(tokenizer, before, after):
    tokenizer.chat_template = (
        "{{ " + json.dumps(before) + " + messages[0]['content'] + " + json.dumps(after) + " }}")

@each("name", FORMATS)
def test_a_prompt_and_its_answer_are_the_tokens_of_the_whole_text(name, whole_words):
    """As most scripts make them.  Spaces before the answer are part of it.  Or of each alone."""
    before, after = FORMATS[name]
    use_format(whole_words, before, after)
    prompt, answer = mdu.encode_pair(whole_words, " Who wrote it?\n", " Ann Lee wrote it. ")
    text = f"{before}Who wrote it?{after}"
    assert prompt + answer == whole_words(f"{text}Ann Lee wrote it.").input_ids
    assert whole_words.decode(prompt) == text.rstrip(" ")
    assert mdu.encode_prompt(whole_words, "Who wrote it?") == prompt
    whole_words.chat_template += "{{ apart }}\n"
    apart = mdu.encode_pair(whole_words, "Who wrote it?", "Ann Lee wrote it.")
    assert apart == whole_words([text, "Ann Lee wrote it."]).input_ids

def test_a_perturbed_answer_has_the_prompt_of_its_own_text(whole_words):
    """Here the prompt ends in "/INST" before "]The", and in "]" before a digit."""
    use_format(whole_words, *SPANNING)
    row = {"question": "Who?", "answer": "The cat.", "perturbed_answer": ["7 cats."]}
    example = mdu.encode_row(options("--method dpo"), "forget", row, FakeModel(), whole_words)
    [other] = example.perturbed
    assert other.prompt == example.prompt + whole_words("]").input_ids
    assert other.answer == whole_words("7 cats.").input_ids + [1]

def test_a_template_with_the_date_gets_a_fixed_one(whole_words):
    """Llama 3's has today's else, and a model would see another prompt every day."""
    for date in ("date_string", "strftime_now('%d %b %Y')"):
        whole_words.chat_template = "{{ " + date + " }}: {{ messages[0]['content'] }}"
        prompt = mdu.encode_prompt(whole_words, "Who?")
        assert whole_words.decode(prompt) == "26 Jul 2024: Who?"

# ---- Models are loaded, adapted and saved ----
def test_the_revision_that_is_asked_for_is_downloaded_without_pickle():
    with mock.patch("huggingface_hub.snapshot_download", return_value="there") as download:
        assert mdu.find_model("a/b@c1d2") == Path("there")
    download.assert_called_once_with("a/b", revision="c1d2", allow_patterns=mock.ANY)
    patterns = download.call_args.kwargs["allow_patterns"]
    files = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
             "chat_template.jinja", "merges.txt", "adapter_config.json", "pytorch_model.bin"]
    matching = [file for file in files if any(map(Path(file).match, patterns))]
    assert matching == files[:-1]

def test_run_json_names_the_commit_that_was_fetched(base, monkeypatch):
    """The hub's cache has a folder for each commit."""
    fetched = shutil.copytree(base, "c0ffee")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(return_value=fetched))
    mdu.main(toy("a/b", "run", "--target c/d@main --steps 1"))
    made = mdu.read_run("run")["options"]
    assert (made["model"], made["target"]) == ("a/b@c0ffee", "c/d@c0ffee")

def test_a_loaded_model_equals_transformers_own_class(hub):
    """Losses and their gradients.  In training: config.json asks for dropout, which is off.  The
    padding token is among the tokens to read and to predict: its embedding is trained."""
    model = hub.model.train()
    reference = SimpleNamespace(
        lm=hub.reference, mask_id=model.mask_id, shift=hub.kind == "Dream")
    args = options("--batch-size 4 --response-length 9")
    _, draws = mdu.draw_step(args, make_examples(), "forget", 0, model)
    batch = mdu.make_batch(model, draws)
    padding = batch.ids == model.pad_id
    assert (padding & batch.masked).any() and (padding & ~batch.masked).any()
    losses = mdu.batch_nll(model, batch)
    expected = torch.stack([slow_row_sft(reference, row) for row in draws]).float()
    assert_close(losses, expected, 1e-5)

    trained = dict(model.lm.named_parameters())
    grads = torch.autograd.grad(losses.sum(), trained.values())
    slow_grads = torch.autograd.grad(expected.sum(), hub.reference.parameters())
    for name, grad, slow_grad in zip(trained, grads, slow_grads, strict=True):
        largest = slow_grad.abs().max().item()
        torch.testing.assert_close(grad, slow_grad, rtol=0, atol=1e-4 * largest, msg=name)
    model.eval()

def test_a_model_that_ends_its_answers_with_another_token_is_told_of(base, capsys):
    shutil.copytree(base, "other")
    replace(Path("other"), '"eos_token": "<end>"', '"eos_token": "<user>"')
    mdu.main(toy("other", "run", "--steps 1"))
    said = capsys.readouterr().out
    assert "other ends its answers with <end>, and not with <user>" in said
    assert 'write "end_token_id": 1 into' in said
    config = Path("other/config.json")
    config.write_text(json.dumps({**read_json(config), "end_token_id": 1}))
    mdu.main(toy("other", "run-2", "--steps 1"))
    assert "ends its answers" not in capsys.readouterr().out

def test_outputs_are_shifted_if_config_json_says_so(tmp_path):
    """shift_logits: the output at a token is the prediction of the next one."""
    reference = write_checkpoint(tmp_path, "llama", shift_logits=True)
    model, _ = mdu.load_backbone(str(tmp_path))
    ids = torch.tensor([[3, 258, 5, 258]])  # masked are 1 and 3
    assert_close(model(ids, ids > 0, ids == 258), reference(ids).logits[0, [0, 2]], 1e-5)

def test_new_adapters_change_nothing_and_alone_are_sharded():
    """Each linear map has them, in float32; the variance of A is 1 over its inputs."""
    model = tiny_llama(0).bfloat16()
    mdu.add_adapters(model, 4, seed=1)
    trained = trained_weights(model)
    assert len(trained) == 2 * 7 * 2  # layers, linear maps, A and B
    assert {p.dtype for p in trained} == {torch.float32}
    assert not any(B.any() for B in trained[1::2])
    scaled = [A.flatten() * A.shape[1] ** 0.5 for A in trained[::2]]
    assert torch.cat(scaled).std().item() == approx(1, abs=0.1)
    mdu.shard(model, torch.float32, torch.bfloat16)
    for p in model.parameters():
        assert isinstance(p, mdu.DTensor) == p.requires_grad

@each("typed", ["--method sft", "--model {base} --lora 2"])
def test_weights_and_adapters_are_drawn_by_the_seed(typed, base):
    drawn = []
    for seed in (1, 2):
        args = options(f"{typed} --seed {seed}".format(base=base))
        model, _ = mdu.load_model(args, mdu.toy_world())
        drawn.append(trained_weights(model)[0])
    assert not torch.equal(*drawn)

@each("typed, loads", [
    ("--method npo", 2), ("--method wga", 1), ("--target {other}", 2), ("--lora 2", 1)])
def test_no_model_is_loaded_in_vain(typed, loads, base, unlearned, monkeypatch):
    load = mock.Mock(wraps=mdu.load_backbone)
    monkeypatch.setattr(mdu, "load_backbone", load)
    mdu.main(toy(base, "run", typed.format(other=unlearned) + " --steps 2"))
    assert load.call_count == loads

def test_trained_weights_are_float32_and_theta0_is_in_bfloat16(hub):
    """Rotary frequencies, which bfloat16 would round off, are in float32 in both."""
    args = options(f"--model {hub.folder} --dtype bfloat16 --method dpo")
    model, _ = mdu.load_model(args, None)
    theta0, _ = mdu.load_frozen(args, model.name)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in theta0.parameters()} == {torch.bfloat16}
    for lm in (model.lm, theta0.lm):
        assert_close(lm.model.rotary_emb.inv_freq, hub.reference.model.rotary_emb.inv_freq)

def other_files(folder):
    """{name: content} of a model's files that are not its weights."""
    return {file.name: file.read_bytes() for file in folder.iterdir()
            if "safetensors" not in file.name}

def test_an_unchanged_model_is_saved_byte_for_byte(hub, tmp_path):
    mdu.save_model(tmp_path, hub.model, hub.tokenizer)
    assert_equal_weights(tmp_path, hub.folder)
    assert other_files(tmp_path) == other_files(hub.folder)

# ======== 4. Training ========
# ---- Options ----
@each("typed, expected", [
    ("", dict(method="mdu", lr=3e-4, target="paper", out="out/toy/mdu-tau1")),
    ("--method npo", dict(beta=0.2, retain_weight=1.0, tau=None, out="out/toy/npo")),
    ("--preset tofu-llada", dict(batch_size=16, model="{here}/out/tofu-llada/base")),
    ("--preset tofu-llada --method sft --lr 0.5", dict(epochs=1000, lr=0.5, model=mdu.LLADA)),
    ("--preset rwku-llada --subject 1", dict(out="out/rwku-llada/1/mdu-tau1")),
    # Rows of one's own: with mdu four values that fit together, with others none of them.
    ("--model x", dict(preset="own", target="removed", prompt_dropout=0.2, retain_weight=5.0,
                       lr=5e-6, out="out/own/mdu-tau1-removed")),
    ("--model x --lora 8", dict(target="removed", lr=1e-3)),
    ("--model x --tau 0", dict(target="paper", prompt_dropout=0.0)),
    ("--model x --method npo", dict(retain_weight=1.0, prompt_dropout=0.0)),
    ("--forget f", dict(preset="own", data=None)),
    # A start model that is a run brings its response length, also over the preset's.
    ("--method sft --retain-only --model {base}", dict(
        preset="own", response_length=12, lr=2e-5, out="out/own/retain")),
    ("--model {base} --response-length 40", dict(response_length=40)),
    # Paths that exist are made absolute, so that a run can be resumed from anywhere, and freed of
    # links, which may later lead to something else.
    ("--model link --target link --forget link", dict(
        model="{base}", target="{base}", forget="{base}", out="out/own/mdu-tau1-base")),
    ("--out here/run", dict(model="{here}/base")),
    # A name of a target or of the toy is a path for other options.
    ("--model removed --retain toy", dict(model="{here}/removed", retain="{here}/toy")),
    ("--data toy --target removed", dict(preset="toy", data="toy", target="removed"))])
def test_defaults_follow_from_what_is_typed(typed, expected, base):
    places = dict(base=base, here=Path.cwd())
    Path("link").symlink_to(base)
    Path("here").symlink_to(".")
    write_files({"removed": "", "toy": ""})
    found = vars(options(typed.format(**places)))
    for name, value in expected.items():
        if isinstance(value, str):
            value = value.format(**places)
        assert found[name] == value, name

def test_help_has_the_defaults_of_what_is_typed(capsys):
    with pytest.raises(SystemExit):
        options("--method npo --preset tofu-llada --lora 8 --help")
    shown = capsys.readouterr().out
    assert "the base model [npo]" in shown and "learning rate [0.0001]" in shown

def test_a_missing_base_is_trained_with_what_was_typed_for_it():
    """A signal that comes when it is saved stops the run itself, after a step."""
    typed = "--seed 7 --dtype bfloat16 --response-length 9 --retain rows"
    write_lines("rows", mdu.toy_world()["retain"][:20])
    late = mock.patch.object(mdu, "print_end", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with mock.patch.dict(mdu.PRESETS["toy"]["sft"], epochs=0.2), late, pytest.raises(mdu.Stopped):
        mdu.main(f"--epochs 0.5 {typed} --out run".split())
    assert Path("run/checkpoint-00000001").exists()
    made = mdu.read_run("base")["options"]
    assert (made["seed"], made["dtype"], made["response_length"]) == (7, "bfloat16", 9)
    assert made["retain"] == str(Path("rows").resolve())

@each("typed, n_forget, n_retain, steps", [
    ("--model x --steps 3", 10, 9, 3), ("--model x --epochs 3", 10, 9, 8),
    # Rows of one's own.  MDU: 500, five passes over the rows to forget, one over those to retain.
    ("--model x", 10, 9, 500), ("--model x", 401, 9, 502), ("--model x", 10, 2001, 501),
    ("--model x --method npo", 4, 2001, 250), ("--model x --method sft", 10, 198, 260),
    ("--model x --epochs 3 --min-steps 9", 10, 9, 9),
    ("--model x --epochs 3 --retain-passes 2", 10, 19, 10)])
def test_the_number_of_steps_by_hand(typed, n_forget, n_retain, steps):
    """Of 4 rows.  sft counts all of its rows."""
    examples = {"forget": n_forget * ["row"], "retain": n_retain * ["row"]}
    examples["train"] = examples["forget"] + examples["retain"]
    args = options(typed)
    split = "train" if args.method == "sft" else "forget"
    assert mdu.number_of_steps(args, examples, split) == steps

def test_the_learning_rate_by_hand():
    args = options("--lr 0.3")
    rates = [mdu.learning_rate(args, step, 60) for step in (0, 1, 2, 3, 22, 41, 60)]
    assert rates == approx([0.1, 0.2, 0.3, 0.3, 0.225, 0.075, 0])

# ---- A run ----
@each("typed", ["npo --retain-weight 0.5", "wga --gamma 0.5 --retain-weight 0"])
def test_training_equals_a_plain_loop_with_clipping_and_adamw(typed, base, monkeypatch):
    """Three steps, in float64: the lines of metrics.jsonl, and the weights at the end."""
    load_backbone = mdu.load_backbone

    def load_float64(*args):
        model, tokenizer = load_backbone(*args)
        return model.double(), tokenizer
    monkeypatch.setattr(mdu, "load_backbone", load_float64)
    argv = toy(base, "run", f"--method {typed} --epochs 1 --lr 0.01")
    mdu.main(argv)
    args = options("", *argv)
    model, tokenizer = load_float64(str(base))
    theta0, _ = load_float64(str(base))
    examples = mdu.encode_splits(args, mdu.load_data(args), model, tokenizer)
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    norms = []
    # 24 rows in batches of 8: one step of warm-up, then half a cosine over two steps.
    for line, lr in zip(metrics("run"), [0.01, 0.01, 0.005], strict=True):
        rows = mdu.draw_step(args, examples, "forget", line["step"] - 1, model)
        forget_loss, retain_loss = slow_step(args, mdu.Models(model, theta0), *rows)
        adamw.zero_grad()
        (forget_loss + args.retain_weight * retain_loss).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        norms.append(norm)
        for p in model.parameters():
            p.grad /= max(1, norm)  # clipped
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        found = [line["lr"], line["grad_norm"], line["forget"], line.get("retain", 0)]
        assert found == approx([lr, norm, forget_loss.item(), retain_loss.item()], rel=1e-5)
    assert max(norms) > 1.5  # else clipping would not be seen
    saved = weights("run")
    for name, x in model.lm.state_dict().items():
        assert_close(saved[name], x.float(), 1e-5)

@each("effect, message", [
    (torch.OutOfMemoryError, "lower --batch-size"), ([(1.0, 0.0, math.nan)], "grad_norm nan")])
def test_a_step_that_fails_ends_the_run_in_one_line(effect, message, base, monkeypatch, capsys):
    """effect: what a step raises, or its losses and the norm of its gradient."""
    monkeypatch.setattr(mdu, "train_step", mock.Mock(side_effect=effect))
    assert message in program(toy(base, "run"), capsys)

def test_the_recommended_run_for_ones_own_rows_forgets_and_keeps():
    """A fine-tune that never needs the questions knows rows to forget and to retain.  After
    `mdu.py --model finetune --forget ... --retain ... --lora 16` it fills in gaps in the answers to
    forget no more often than in rows that it never learnt, and keeps what it knew."""
    world = mdu.toy_world()["retain"]
    for name, rows in [("forget", world[:8]), ("retain", world[8:32]), ("never", world[32:40]),
                       ("words", world[:8] + world[32:40])]:
        write_lines(name, rows)
    learn = "--preset toy --method sft --prompt-dropout 0.5 --lr 0.003 --batch-size 16"
    # The words of the rows that it never learns are in its vocabulary.
    mdu.main(f"{learn} --retain-only --steps 1 --forget words --retain retain "
             "--out original".split())
    mdu.main(f"{learn} --steps 400 --forget forget --retain retain --model original "
             "--out finetune".split())
    mdu.main("--model finetune --forget forget --retain retain --lora 16 --out run".split())
    ev.main("--samples 8 --never never finetune run".split())
    before = ev.read_summary("finetune")["splits"]
    after = ev.read_summary("run")["splits"]
    assert (before["forget"]["fact"], before["retain"]["fact"]) == (1, 1)
    for gaps in ("infill", "infill_no_question"):
        assert before["forget"][gaps] > 0.5
        assert after["forget"][gaps] <= after["never"][gaps] + 0.15
    assert after["forget"]["any_decoding"] == 0
    assert after["retain"]["fact"] > 0.95

@each("losses, expected", [
    ([8, 4, 3, 2, 1, 0], (5, 1, 0.2)), ([8, 4, 3, 2, 1], None),
    (10 * [10] + 170 * [7] + 20 * [1], (10, 1, 0.1)),  # the first ten, the last tenth
    ([0] * 6, (0, 0, 0))])
def test_the_loss_left_by_hand(losses, expected):
    """Means of the first ten steps and of the last tenth of the steps.  Of less than a hundred
    steps both are of a tenth.  Both are of at least three steps, and none is in both."""
    found = mdu.forget_loss_left(losses)
    assert found == (expected if expected is None else approx(expected))

def test_a_loss_of_weights_that_are_rounded_later_says_so():
    losses = [8, 4, 3, 2, 1, 0]
    assert mdu.forget_loss_text(losses, torch.float32) == "forget loss 5 -> 1 (20% left)"
    text = mdu.forget_loss_text(losses, torch.bfloat16)
    assert "(20% left) before the weights were rounded to torch.bfloat16" in text

def test_run_json_has_the_hashes_of_files_and_no_text_of_their_rows(base, capsys):
    """One file is a pipe.  By the hashes eval.py notices a change that is none of the rows."""
    world = mdu.toy_world()
    for name in ("forget", "retain"):
        write_lines(name, world[name])
    mdu.main(toy(base, "run", f"--forget {pipe('forget')} --retain retain --steps 1"))
    info = mdu.read_run("run")
    assert info["files"] == {"forget": sha256("forget"), "retain": sha256("retain")}
    written = json.dumps(info) + Path("run/metrics.jsonl").read_text()
    assert world["forget"][0]["answer"] not in written
    Path("retain").open("a").write("\n")
    ev.main([*QUICK, "--forget", "forget", "run"])
    assert "retain is another file than in the training, or has changed" in capsys.readouterr().out

def stop_in(folder, *_):
    """Ctrl-C, while another program could not use the folder."""
    with pytest.raises(mdu.BadInput), mdu.locked(folder):
        pass
    raise KeyboardInterrupt

def test_one_program_at_a_time_gets_into_a_folder(base, capsys):
    """run.json of a program that ended before its first step is replaced."""
    write_files({"run/run.json": ""})
    with mock.patch.object(mdu, "backward", partial(stop_in, "run")):
        assert program(toy(base, "run"), capsys, code=130) == ""
    assert mdu.read_run("run")

def test_a_bug_keeps_its_traceback(base, capsys):
    """Also where rows are encoded: a KeyError is no bad input."""
    bug = mock.patch.object(mdu, "encode_row", side_effect=KeyError("my field"))
    with bug, pytest.raises(SystemExit, match="^1$"):
        mdu.run_program("mdu.py", partial(mdu.main, toy(base, "run")))
    err = capsys.readouterr().err
    assert "Traceback" in err and "KeyError: 'my field'" in err
    assert not mdu.dist.is_initialized()

def test_a_run_whose_terminal_is_gone_goes_on(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", open(writing, "w"))
    mdu.print0("a line that nobody reads")
    mdu.print0("and another one")

# ---- Stopped and resumed ----
def assert_equal_runs(a, b, tolerance=0):
    for line, other in zip(metrics(a), metrics(b), strict=True):
        if tolerance > 0:
            other = approx(other, rel=10 * tolerance, abs=1e-9)
        assert line == other
    assert_equal_weights(a, b, tolerance)

@each("number, ignored", [(signal.SIGTERM, False), (signal.SIGHUP, True)])  # True: by nohup
def test_a_signal_stops_a_run_with_a_checkpoint(number, ignored, base, unlearned, capsys):
    rate = mdu.learning_rate

    def rate_and_signal(args, step, steps):
        if step == 2:
            os.kill(os.getpid(), number)
        return rate(args, step, steps)
    run = Path("run")
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(number, handler)
    with mock.patch.object(mdu, "learning_rate", rate_and_signal):
        if ignored:
            mdu.main(toy(base, run, "--epochs 2 --diagnose"))
        else:
            program(toy(base, run, "--epochs 2 --diagnose"), capsys, code=143)
            assert [file.name for file in run.glob("checkpoint-*")] == ["checkpoint-00000003"]
    signal.signal(number, before)
    mdu.main(["--resume", str(run)])
    assert_equal_runs(unlearned, run)

def test_half_a_saved_model_does_not_count(base, unlearned, capsys):
    """config.json, by which others know that it is complete, is moved last."""
    run = Path("run")
    move = Path.replace

    def stop_at_config(source, target):
        if source.name == "config.json":
            raise OSError("stopped")
        return move(source, target)
    with mock.patch.object(Path, "replace", autospec=True, side_effect=stop_at_config):
        assert "stopped" in program(toy(base, run, "--epochs 2 --diagnose"), capsys)
    files = {file.name for file in unlearned.iterdir()} - {file.name for file in run.iterdir()}
    assert files == {"config.json"}
    mdu.main(["--resume", str(run)])
    assert_equal_runs(unlearned, run)

@each("again", [lambda run: mdu.main(["--resume", run]),
                lambda run: ev.main(["--samples", "1", "--limit", "1", run])])
def test_checkpoints_that_a_finished_run_has_left_are_deleted_later(again, unlearned):
    """Because it was killed before it had deleted them."""
    shutil.copytree(unlearned, "run")
    write_files({"run/checkpoint-00000001/metrics.jsonl": ""})
    again("run")
    assert not list(Path("run").glob("checkpoint-*"))

# ---- Two processes ----
def on_two_processes(*words):
    """Run a Python file on two processes, which get what torchrun sets -> their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    # TORCH_GLOO_LAZY_INIT: processes then connect at their first message and not in
    # init_process_group, as they do on GPUs.
    env = {**os.environ, "PYTHONPATH": str(Path(mdu.__file__).parent), "OMP_NUM_THREADS": "1",
           "TORCH_GLOO_LAZY_INIT": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": port}
    command = [sys.executable, *map(str, words)]
    processes = [subprocess.Popen(command, env={**env, "RANK": rank}) for rank in "01"]
    try:
        return [process.wait(timeout=200) for process in processes]
    finally:  # where one waits for the other
        for process in processes:
            process.kill()

# Four steps of 8 rows: 2 x 16 / 8.  A checkpoint is written after each but the last.
STEPS = "--epochs 2 --batch-size 4 --grad-accum 2 --checkpoint-every 1 --lr 1e-4 --limit 16"
AUTHORS = f"{STEPS} --tau 0.5 --target authors"
LORA = f"{STEPS} --target {{target}} --lora 2 --dtype bfloat16 --lr 0.005"
BFLOAT16 = f"{STEPS} --target removed --dtype bfloat16 --lr 0.005"
# A program that runs mdu.main with each of the command lines that it is given.  In the last but one
# process 1 alone receives a signal in the second step.  In the last one it kills itself when the
# third checkpoint is written and not yet complete.
KILLED = """
import contextlib, json, os, signal, sys
from unittest import mock
import mdu

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
mdu.PRESETS["toy"]["sft"]["epochs"] = 0.1  # of the base model that is missing
*whole, stopped, killed = json.loads(sys.argv[1])
for argv in whole:
    mdu.main(argv)

rate = mdu.learning_rate
def rate_and_signal(args, step, steps):
    if step == 1 and mdu.RANK == 1:
        os.kill(os.getpid(), signal.SIGHUP)
    return rate(args, step, steps)

with mock.patch.object(mdu, "learning_rate", rate_and_signal), contextlib.suppress(mdu.Stopped):
    mdu.main(stopped)

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

@pytest.fixture(scope="session")
def two_processes(base, tmp_path_factory):
    """Runs on two processes: toy/mdu, whose base model was missing; two; two-lora, with toy/base as
    its target; two-bfloat16; stopped, and killed, with the options of two -> their folder."""
    folder = tmp_path_factory.mktemp("two")
    noisy = with_noise(base, folder / "noisy", seed=0)  # which writes words, as AUTHORS needs
    runs = [["--epochs", "0.1", "--out", f"{folder}/toy/mdu"],
            toy(noisy, folder / "two", AUTHORS),
            toy(base, folder / "two-lora", LORA.format(target=folder / "toy/base")),
            toy(base, folder / "two-bfloat16", BFLOAT16),
            toy(noisy, folder / "stopped", f"{AUTHORS} --checkpoint-every 9"),
            toy(noisy, folder / "killed", AUTHORS)]
    (folder / "driver.py").write_text(KILLED)
    codes = on_two_processes(folder / "driver.py", json.dumps(runs))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    return folder

# Two processes add gradients in another order than one.  How much that changes a weight in the four
# steps depends on the processor: up to 1.4e-6 were seen.  A step of AdamW is about lr, 1e-4.
OTHER_ORDER = 5e-6

def test_two_processes_equal_one(two_processes):
    mdu.main(toy(two_processes / "noisy", "one", AUTHORS))
    assert any(line["forget"] > 0 for line in metrics("one"))
    assert_equal_runs(two_processes / "two", "one", OTHER_ORDER)

@each("name", ["stopped", "killed"])
def test_what_two_processes_have_begun_one_can_end(name, two_processes):
    """Both stop after the same step, though one of them alone has received a signal.  The killed
    run has the newest complete checkpoint, without pickle, and one that was being written."""
    run = shutil.copytree(two_processes / name, Path("run"))
    assert [file.name for file in run.glob("checkpoint-*")] == ["checkpoint-00000002"]
    assert {file.suffix for file in run.glob("*/*")} <= {".safetensors", ".jsonl", ".json"}
    assert (run / "unfinished").exists() == (name == "killed")
    mdu.main(["--resume", str(run)])
    assert_equal_runs(two_processes / "two", run, OTHER_ORDER)

def test_a_killed_run_is_resumed_on_two_processes_bit_by_bit(two_processes, tmp_path):
    run = shutil.copytree(two_processes / "killed", tmp_path / "run")
    assert on_two_processes(mdu.__file__, "--resume", run) == [0, 0]
    assert_equal_runs(two_processes / "two", run)

@each("run, typed", [("two-lora", LORA), ("two-bfloat16", BFLOAT16)])
def test_two_processes_in_bfloat16_are_close_to_one(run, typed, base, two_processes):
    """In bfloat16 AdamW takes full steps by the sign of gradients that are rounded to almost 0."""
    mdu.main(toy(base, "one", typed.format(target=two_processes / "toy/base")))
    two, one, start = [torch.cat([x.flatten() for x in weights(folder).values()])
                       for folder in (two_processes / run, "one", base)]
    assert (two - one).norm() < 0.1 * (two - start).norm()

# ======== 5. Refusals ========
# Each case: what is given, and the decisive words ("said") of the one line that refuses it.
def row_text(**fields):
    """A line of a file of rows.  The braces are there because messages quote it."""
    return json.dumps({"question": "Who is Bolti?", "answer": "It is {}.", **fields})

GOOD = row_text()

@pytest.fixture
def assert_refused(base, unlearned, scored, rwku, tmp_path, capsys):
    """A function: the command has to be refused with these words, before anything is made or
    changed.  Of the 16 rows in the file `rows` the last alone has a perturbed_answer."""
    write_files({"rows": 15 * f"{GOOD}\n" + row_text(perturbed_answer="x")})
    places = dict(base=base, run=unlearned, scored=scored, rwku=rwku,
                  own=f"--model {base} --forget rows")

    def check(command, said):
        name, *argv = shlex.split(command.format(**places))
        main = {"mdu.py": mdu.main, "eval.py": ev.main}[name]
        with unchanged(tmp_path, base, unlearned):
            err = program(argv, capsys, main)
        assert said.format(**places) in err
    return check

@each("command, said", [
    # Options.
    ("mdu.py --tau 2", "argument --tau: invalid float in [0, 1] value: '2'"),
    ("mdu.py --steps 3 --epochs 2", "--steps or --epochs, and not both"),
    ("mdu.py --resume {run} --seed 1", "--resume RUN takes no other option"),
    ("mdu.py --method npo --tau 1", "--method npo has no option --tau"),
    ("mdu.py --method sft --preset rwku-llada", "--method sft has no preset rwku-llada"),
    ("mdu.py --method sft --lora 2", "--lora, need a start model"),
    ("mdu.py --preset own --method sft --forget rows", "sft of your own rows, and"),
    ("mdu.py {own} --method gd --retain-weight 0", "--method gd without a retain loss is ga"),
    ("mdu.py --data toy --target word", "no folder; it has to be paper, removed, authors"),
    ("mdu.py --data toy --model {base} --target {base}", "is the start model"),
    ("mdu.py --model {base} --forget born --retain spaced", "in the forget set and in the "),
    # Rows.
    ("mdu.py --method ga --model {base}", "the forget set is empty; give --forget or --data"),
    ("mdu.py {own} --preset toy", "the retain set is empty; give --retain, or"),
    ("mdu.py --model {base} --forget born --retain-weight 0",
     "counts in the retain set which words are rare"),
    ("mdu.py {own} --method dpo --retain-weight 0", "'Who is Bolti?' has no perturbed_answer"),
    ("mdu.py --forget absent", "No such file or directory: 'absent'"),
    ("mdu.py --retain /dev/null", "--retain /dev/null: no rows"),
    ("mdu.py --data {rwku} --forget rows", "--forget says what to forget"),
    ("mdu.py --data {rwku} --model x", "--subject names a person to forget: RWKU needs it"),
    ("mdu.py --subject King", "no other rows have it"),
    ("mdu.py --preset rwku-llada --subject 0 --data {rwku}", "from 1 to 12, or a name such as Ann"),
    ("mdu.py --data folder --model x", "/folder, forget10_perturbed: "),
    ("mdu.py --data toy --model {base} --response-length 2048", "the model takes 2048"),
    # Folders.
    ("mdu.py --method ga --forget rows", "train it with --method sft, or"),
    ("mdu.py --preset toy --model nobody/nothing", "not fetched from the hub"),
    ("mdu.py --preset toy --model {base} --out {run}", "--resume {run}"),
    ("mdu.py --resume changed", "the rows that it started from have changed")])
def test_mdu_refuses(command, said, base, assert_refused):
    own = vars(options(f"--preset toy --model {base}"))
    write_files({
        "born": row_text(answer="Ceka Foba was born in Rome."),  # which has the same words as:
        "spaced": row_text(question="Who is Bolti ", answer="Ceka Foba was born in Rome\n"),
        "folder/other.json": GOOD,
        "changed/run.json": json.dumps({"options": own, "rows": {"forget": "other"}})})
    assert_refused(command, said)

def test_mdu_refuses_processes_that_cannot_share_a_step(base, monkeypatch):
    monkeypatch.setattr(mdu, "WORLD", 3)
    with pytest.raises(mdu.BadInput, match="3 processes need a --batch-size x --grad-accum"):
        mdu.main(toy(base, "run"))

@each("content, said", [
    (f"{GOOD}\n{GOOD[:-3]}", "line 2 (a JSON object with question and answer"),
    ('{"prompt": "p", "completion": "c"}', "the fields prompt, completion"),
    (f"{GOOD}\n\n" + row_text(answer=" "), "line 3 (a JSON object"),
    (row_text(fact=[1234.0]), "(put others in quotes), found 1234.0"),
    (f"{GOOD}\n" + row_text(answer="a <mask>"),
     "row 2 of forget, 'Who is Bolti?': '<mask>' is a special token"),
    (row_text(fact=["is", "i"]), "fact: the words of 'i' are not in the answer"),  # "is" is
    (GOOD.encode() + b"\n\xe9", "'utf-8' codec can't decode byte 0xe9")])
def test_mdu_refuses_a_file_of_rows(content, said, assert_refused):
    write_files({"bad": content})
    assert_refused("mdu.py --model {base} --method ga --forget bad", said)

# Faults of a model's folder.
def delete(folder, pattern):
    for file in folder.glob(pattern):
        file.unlink()

def replace(folder, old, new):
    for file in folder.glob("token*"):  # the tokenizer's
        file.write_text(file.read_text().replace(old, new))

def save_as_pickle(folder):
    delete(folder, "*.safetensors*")
    torch.save({}, folder / "pytorch_model.bin")

# Each case: the folder's name, its model_type, the fault (changes of config.json, of which None
# deletes a field, or a function that is called with the folder), and what is said.
@each("name, kind, fault, said", [
    # Models of another architecture.
    ("gpt2", "llama", dict(model_type="gpt2"), "model_type 'gpt2' in config.json is none of"),
    ("block-type", "llada", dict(block_type="x"), "block_type 'x' in config.json must be 'llama'"),
    ("a-bd3lm-b", "a2d-qwen3", {}, "a-bd3lm-b: bd3lm in its name"),
    ("blocks", "Dream", dict(block_size=32), "says block diffusion"),
    ("adapted", "llama", lambda folder: (folder / "adapter_config.json").touch(),
     "adapted: it has adapter_config.json: merge the adapters"),
    ("causal", "llama", dict(is_causal=None), "a causal model: no token sees a later one"),
    # Tensors that are missing, too many, of other sizes or types.
    # embedding_size and mlp_hidden_size count, where vocab_size and mlp_ratio say something else.
    ("layers", "llada", dict(n_layers=3, embedding_size=264, vocab_size=250, mlp_hidden_size=64,
                             mlp_ratio=3), "model.layers.2."),
    ("more", "llada", dict(n_layers=1), "model.layers.1."),
    ("resized", "llada", dict(vocab_size=260),
     "('model.embed_tokens.weight', torch.Size([264, 32])"),
    ("pickle", "llada", save_as_pickle, "no file named model.safetensors"),
    # Tokens.
    ("mask", "llama", dict(mask_token_id=None), "no mask_token_id in config.json"),
    ("mask-is-pad", "llama", dict(mask_token_id=257), "its mask token is also its padding"),
    ("other-mask", "qwen2", dict(mask_token_id=259),
     "mask_token_id in config.json is 259, and that of its tokenizer 258"),
    # Added to the tokenizer, and the embeddings were not resized.
    ("mask-is-new", "llama", dict(mask_token_id=264), "its embeddings have no row for its mask"),
    ("end", "llada", partial(replace, old="eot_id", new="x"),
     "no end-of-turn token, <|eot_id|>, in its tokenizer"),
    # The tokenizer's files.
    ("no-tokenizer", "llada", partial(delete, pattern="tokenizer.json"),
     "no tokenizer.json; copy the tokenizer's files"),
    ("no-template", "llada", partial(replace, old="chat_template", new="other"),
     "no chat template: is it a base model's?"),
    ("no-question", "llama", partial(replace, old="m['content']", new="m['text']"),
     "its chat template leaves out the question")])
def test_mdu_refuses_a_model(name, kind, fault, said, assert_refused):
    if callable(fault):
        write_checkpoint(Path(name), kind)
        fault(Path(name))
    else:
        write_checkpoint(Path(name), kind, **fault)
    assert_refused(f"mdu.py --method ga --forget rows --model {name}", said)

def test_mdu_refuses_a_target_of_another_vocabulary(assert_refused):
    write_checkpoint(Path("other"), "llada", mask_token_id=0)  # as the toy has it
    assert_refused("mdu.py --preset toy --model {base} --target other", "its vocabulary or mask")

@each("command, said", [
    # Options.
    ("eval.py --model {base}", "score: no RUN; give the folder of one"),
    ("eval.py --report --limit 3 {base}", "--limit is for score"),
    ("eval.py --samples 1 --limit 1 --steps 1 --response-length 2048 {base}", "it takes 2048"),
    ("eval.py --never '' {base}", "--never: invalid path or name"),  # a variable was not set
    # Rows.  Of a model without run.json they have to be typed.
    ("eval.py bare", "no rows to score"), ("eval.py --analysis roles bare", "no rows to analyse"),
    # Folders.
    ("eval.py --report {base}", "not scored yet; first run: python eval.py {base}"),
    ("eval.py --model {base} --data toy {run}", "is a run; give another folder"),
    ("eval.py --model {base} --data toy own", "own has scores of a/model; give another folder"),
    ("eval.py stopped", "no RUN has a finished model"),
    ("eval.py —report {scored}", "—report: no such folder; if it is an option"),
    ("eval.py --analysis convergence {base}", "train it with --diagnose"),
    ("eval.py --analysis roles {run} {scored}", "the runs started from different models"),
    ("eval.py --analysis roles {run} other", "or forgot other rows")])
def test_eval_refuses(command, said, base, assert_refused):
    made_with = json.dumps({"options": vars(options(f"--preset toy --model {base}")),
                            "rows": {"forget": "other"}, "files": {}, "code": "abc"})
    write_files({"stopped/run.json": made_with, "other/run.json": made_with,
                 "other/config.json": "{}", "bare/config.json": "{}",
                 "own/eval/summary.json": '{"model": "a/model"}'})
    assert_refused(command, said)

# ======== 6. Scoring ========
# ---- Text metrics ----
@each("reference, prediction, lcs, n_reference, n_prediction", [
    ("police killed the gunman", "police kill the gunman", 3, 4, 4),  # Lin 2004, 3.1: F is 3/4
    ("police killed the gunman", "the gunman kill police", 2, 4, 4),  # and here 1/2
    ("x a b c", "a b c x", 3, 4, 4),  # a greedy matcher would take x and miss a b c
    ("of-the-art", "of ART!", 2, 3, 2), ("w1 w2", "/?!...", 0, 2, 0)])
def test_rouge_l_by_hand(reference, prediction, lcs, n_reference, n_prediction):
    """From the longest common subsequence and both lengths, in words."""
    f1 = 2 * lcs / (n_reference + n_prediction)
    assert ev.rouge_l(reference, prediction) == approx((lcs / n_reference, f1))

KEPT = [dict(question="Who lives in Rome?", answer="It is Di."),
        dict(question="?", answer="!")]  # the latter has no word

@each("text, share", [
    ("Who lives in Rome?", 0), ("it is Di.", 0), ("", 1),
    ("Di", 1 / 2),  # an answer ends so, none begins so
    ("It is, it is Di.", 2 / 6)])  # "is it" is new, and "it is" comes again
def test_new_pairs_by_hand(text, share):
    records = {"forget": [dict(question="?", answer="", generation=text)], "retain": KEPT}
    ev.add_new_bigrams(records)
    assert records["forget"][0]["new_pairs"] == approx(share)

# ---- Jobs and Eq. 7 ----
ARGS = ev.parse("--full --response-length 8 --steps 4 --samples 16 --batch-size 3 run".split())

def test_batches_have_few_enough_sequences_and_logits(monkeypatch):
    """Of similar length; FakeModel has 11 tokens, so 33 logits are of 3 masked positions."""
    monkeypatch.setattr(ev, "MAX_LOGITS", 33)
    jobs = []
    for length, n_masked in [(9, 1), (1, 1), (2, 2), (3, 1), (4, 4), (5, 1), (6, 0), (7, 0)]:
        jobs.append(ev.Job([7], length * [5], torch.arange(length) < n_masked))
    found = [numbers for numbers, _ in ev.masked_batches(FakeModel(), jobs, 3, "")]
    assert found == [[1, 2], [3], [4], [5, 6, 7], [0]]

@each("n", [1, 2, 3, 4])
def test_masks_have_the_distribution_of_eq_7(n):
    masks = ev.draw_masks(n, 10000, [8, n])
    assert masks.any(1).all()
    for subset in list(itertools.product([False, True], repeat=n))[1:]:  # the first is empty
        chance = 1 / (n * math.comb(n, sum(subset)))
        share = (masks == torch.tensor(subset)).all(1).double().mean().item()
        assert share == approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / 10000))

# ---- Sampler ----
@each("length, steps, counts", [
    (7, 3, [3, 2, 2]), (8, 5, [2, 2, 2, 1, 1]), (5, 1, [5]), (3, 5, [1, 1, 1])])
@each("by_entropy", [False, True])
@each("boost, sure", [(-50.0, 1), (4.0, 1), (-50.0, 20)])
def test_the_sampler_equals_a_slow_one(
        length, steps, counts, by_entropy, boost, sure):
    """The mask token is never written, even if it is the likeliest (boost 4).  With sure 20 many
    predictions have p = 1 in float32; only in float64 it can be seen which is the most certain."""
    model = FakeModel(boost=boost, by_entropy=by_entropy, sure=sure)
    expected = [slow_sampler(model, prompt, counts) for prompt in PROMPTS]
    model.seen.clear()
    jobs = [ev.Job(prompt, length * [MASK], torch.ones(length).bool()) for prompt in PROMPTS]
    assert ev.fill_masks(model, jobs, steps, 3) == expected
    assert len(model.seen) == len(counts) * math.ceil(len(PROMPTS) / 3)  # no step without a token

@each("ids, n", [([4, 5, 6], 3), ([4, 1, 5, PAD], 1), ([4, 5, PAD, 1], 2)])
def test_an_answer_ends_before_the_first_end_or_padding_token(ids, n):
    model = FakeModel(tokenizer=mock.Mock(decode=lambda ids, skip_special_tokens: ids))
    assert ev.read_answer(model, ids) == (ids[:n], ids[:n])

# ---- Roles ----
I, S, K = "in-context", "structural", "stored-knowledge"

@each("question, parts", [
    ("他的父亲是谁？", [("他", I), ("王", K), ("的", I), ("医生", K), ("。", S)]),
    ("Where was Zoë Łuk born?", [
        ("Zoë", I), (" ", S), ("Łuk", I), ("'s ", S), ("home", K), (", and ", S), ("22", K),
        (", is ", S), ("Gdańsk", K), (".", S)])])
def test_roles_of_hand_labelled_answers(question, parts, bytes_tokenizer):
    """With tokens of one byte, of which the letters ë, Ł and ń have two."""
    expected = []
    for text, role in parts:
        expected += [role] * len(text.encode())
    end = bytes_tokenizer.eos_token_id  # a special token, also before a word
    ids = [end, *bytes_tokenizer("".join(text for text, _ in parts)).input_ids, end]
    assert ev.token_roles(bytes_tokenizer, question, ids) == [S, *expected, S]

# ---- Infilling ----
@each("row, parts", [
    (dict(fact=["petra łuk"]), ["It is ", "Petra, Łuk", ", not Petra."]),
    (dict(fact=["Rome", "22"]), ["", "22", " in ", "Rome", " or so"]),
    (dict(question="Who is Petra?"), ["Petra is the ", "doctor", " of ", "Łódź", "."])])
def test_gaps_by_hand(row, parts, bytes_tokenizer):
    """Every second part is a gap.  With tokens of one byte, and a special token at the end."""
    expected = []
    for number, part in enumerate(parts):
        expected += [number % 2 == 1] * len(part.encode())
    ids = bytes_tokenizer("".join(parts)).input_ids + [bytes_tokenizer.eos_token_id]
    assert ev.gap_of(bytes_tokenizer, row, ids).tolist() == [*expected, False]

def test_filling_gaps_equals_a_slow_loop(monkeypatch):
    """Every second token is in the gap, of an answer of one token none."""
    monkeypatch.setattr(ev, "encode_answer", lambda model, row, text: row["pair"])
    monkeypatch.setattr(ev, "gap_of", lambda *given: torch.arange(len(given[-1])) % 2 == 1)
    model = FakeModel()
    rng = np.random.default_rng(3)
    rows, expected = [], []
    for n in range(1, 20):
        prompt, answer = [rng.integers(11, size=size).tolist() for size in (3, n)]
        places = range(len(prompt) + 1, len(prompt + answer), 2)
        for shown in (prompt, len(prompt) * [MASK]):
            ids = shown + answer + [1]
            for i in places:
                ids[i] = MASK
            filled = slow_filled(model, ids, places, len(places) * [1])
            right = [filled[i] == answer[i - len(prompt)] for i in places]
            expected.append(np.mean(right) if right else None)
        rows.append({"pair": (prompt, answer), "answer": ""})
    n_passes = len(model.seen)  # of one row each
    model.seen.clear()
    assert [*itertools.chain(*ev.fill_gaps(model, rows, ARGS))] == expected
    assert sum(map(len, model.seen)) == n_passes  # no pass of a row that is finished

# ---- Other decodings ----
def test_the_facts_that_texts_tell_by_hand():
    """Of two facts; or, without facts, of the words "baker" and "gado"."""
    row = {"question": "Who is Bolti?", "answer": "Bolti is a baker in Gado."}
    facts = {**row, "fact": ["baker", "in Gado"]}
    assert ev.share_told(facts, ["Gado, in", "a BAKER!"]) == 0.5
    texts = ["In Gado.", "A baker in Gado."]
    assert ev.find_told(facts, texts) == {"baker": texts[1], "in Gado": texts[0]}
    assert ev.share_told(row, ["Bolti bakes.", "The baker."]) == 0.5
    assert ev.share_told({"question": "Is he?", "answer": "He is."}, ["He is."]) is None

def test_other_decodings_have_six_lengths_and_steps(monkeypatch):
    def write_answers(model, rows, settings):
        return [f"{row}: {settings.response_length} in {settings.steps}" for row in rows]
    monkeypatch.setattr(ev, "write_answers", write_answers)
    settings = SimpleNamespace(response_length=7, steps=7)
    texts = ev.write_in_other_ways(None, ["a", "b"], settings)
    ways = ["7 in 1", "7 in 2", "7 in 4", "3 in 1", "3 in 2", "3 in 3"]
    assert texts == [tuple(f"{row}: {way}" for way in ways) for row in ("a", "b")]

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

def test_figures_equal_those_of_tofus_own_code():
    splits = {}
    for split, logs in LOGS.items():
        records = []
        for answer, paraphrase, wrong in logs:
            texts = [f"wrong {number}" for number in range(len(wrong))]
            row = {"answer": "true", "perturbed_answer": texts}
            losses = dict(zip(["true", "paraphrase", *texts], [answer, paraphrase, *wrong]))
            if paraphrase is not None:
                row["paraphrased_answer"] = "paraphrase"
            with_errors = {text: (loss, 0) for text, loss in losses.items()}
            figures = ev.compare_wrong_answers(row, with_errors, split == "forget")
            records.append({"prob": math.exp(-answer), "rougeL_recall": 1.0, **figures})
        splits[split] = ev.summarise(records)
        found = {metric: splits[split][metric] for metric in OFFICIAL[split]}
        assert found == approx(OFFICIAL[split], rel=1e-12)
    splits["retain"]["rougeL_recall"] = 0.8125
    assert ev.model_utility(splits) == approx(0.4449207849887, rel=1e-12)
    del splits["world_facts"]["prob_options"]
    assert ev.model_utility(splits) is None

@each("to_forget, nll_wrong, expected", [  # R is nearly 0, or nearly infinite
    (True, 1e4, [0, 1]), (True, -1e4, [0, 0]), (False, 1e4, [1, 1]), (False, -1e4, [0, 0])])
def test_truth_ratios_by_hand(to_forget, nll_wrong, expected):
    row = dict(answer="true", perturbed_answer=["wrong"])
    figures = ev.compare_wrong_answers(row, {"true": (0, 0), "wrong": (nll_wrong, 0)}, to_forget)
    assert [figures["truth_ratio"], figures["prob_options"]] == approx(expected)

def test_forget_quality_by_hand_and_as_published():
    """The p-value is the share of all orders of the values that are as extreme as the one found.
    Two below three: 2 of 10.  1, 1, 3 and 1, 3, 3, whose D is 1/3: all of them.  The published
    p-value is from the logs of locuslab/tofu, of D = 119/300 between 300 and 300 questions."""
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
    ("neighbor_level2", {}, ANSWER + "Question: Where does she live?\n", "Answer:", "Oslo"),
    ("forget_level3", {}, ANSWER + "Question: Where was he born? Sure,", "", "Rome"),
    ("forget_level3", OTHER_ATTACKS[0], ANSWER + "Question: Q\n", "Answer:", "Rome"),
    ("forget_level3", OTHER_ATTACKS[1], ANSWER + "Q\n", "Answer:", "Rome"),
    ("utility_general", {}, "83cdada42dc4827d", "Answer:", "B"),
    ("utility_truthfulness", {}, "e089bf2b10e5d00a", "A:", "Yes."),
    ("utility_factuality", {}, "398f1b336bf4f402", "A:", "The Beatles")])
def test_prompts_equal_those_of_rwkus_own_code(split, changes, question, prefill, answer):
    """Those with shots are compared by SHA-256 with what github.com/jinzhuoran/RWKU at b8a03b3
    (LLaMA-Factory/src/llmtuner/eval) makes of the rows."""
    row = ev.SPLITS[split].make_row({**RWKU_ROWS[split], **changes})
    digest = hashlib.sha256(row["question"].encode()).hexdigest()
    assert question in (row["question"], digest[:16])
    assert [row["prefill"], row["answer"]] == [prefill, answer]

def test_mmlu_compares_letters_at_one_masked_position(monkeypatch):
    """Of the tokens of " A", here a space (2) and a letter (3 to 6), the letter counts."""
    monkeypatch.setattr(ev, "encode_answer", lambda model, row, text: (row["question"], []))

    model = FakeModel(tokenizer=lambda text, add_special_tokens: SimpleNamespace(
        input_ids=[2, "ABCD".index(text[1]) + 3]))
    letters = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt + [MASK]])
        everywhere = torch.ones(ids.shape, dtype=torch.bool)
        logits = model(ids, everywhere, everywhere)[-1]
        letters.append("ABCD"[logits[3:7].argmax()])
    assert len(set(letters)) > 1
    rows = [dict(question=prompt, answer=letters[0]) for prompt in PROMPTS]
    records = ev.score_mmlu(model, None, rows, ARGS)
    assert [record["generation"] for record in records] == letters
    assert [record["accuracy"] for record in records] == [x == letters[0] for x in letters]

@each("losses, labels, mc1", [
    ([2, 0.5, 1], [0, 1, 0], 1),  # log p is -2, -1, -3
    ([2, 0.5, 1], [1, 1, 0], 1),  # of two true choices, the first counts
    ([1, 0.5, 1], [0, 1, 0], 0)])  # it has to be likelier than every false one
def test_truthfulqa_by_hand(losses, labels, mc1, monkeypatch):
    """Of n tokens: log p = -n times the mean loss over the masks."""
    texts = [" a", " b b", " c c c"]
    monkeypatch.setattr(ev, "texts_nll", lambda *_: [
        {text: (loss, 0) for text, loss in zip(texts, losses)}])
    monkeypatch.setattr(ev, "encode_answer", lambda model, row, text: ([], text.split()))
    targets = dict(choices=["a", "b b", "c c c "], labels=labels)
    row = ev.truthfulqa_row(dict(question="", mc1_targets=targets))
    [record] = ev.score_truthfulqa(None, None, [row], ARGS)
    assert list(record["logp"].values()) == approx([-losses[0], -1, -3])
    assert record["mc1"] == mc1

@each("split, row, text, expected", [
    ("forget", dict(fact=["petra"]), " Petra, Osei ", dict(fact=1, words=2, empty=0)),
    ("forget", {}, " \n", dict(words=0, empty=1, rougeL_f1=0, prob=math.exp(-1),
                           prob_error=math.exp(-1) / 2, knowledge=0)),
    ("forget", {}, "Osei Osei", dict(knowledge=1 / 2, infill=0, infill_no_question=1)),
    ("forget_level2", {}, " in Petra Osei\nno",
     dict(generation="in Petra Osei", words=3, empty=0, rougeL_recall=1)),
    ("forget_level2", {}, "\nPetra",
     dict(generation="NOANSWER", words=0, empty=1, rougeL_recall=0)),  # as in RWKU's code
    ("utility_factuality", dict(answers=["band", "beatles"]), "The\nBeatles! ", dict(em=1, f1=1)),
    ("utility_factuality", dict(answers=["Kinks", "Beatles", "Rolling Stones"]),
     "Beatles, the Beatles", dict(em=0, f1=2 / 3))])  # one of the two words counts
def test_scores_of_one_answer_by_hand(split, row, text, expected, monkeypatch):
    monkeypatch.setattr(ev, "write_answers", lambda *_: [text])
    monkeypatch.setattr(ev, "fill_gaps", lambda *_: [(0.0, 1.0)])
    monkeypatch.setattr(ev, "texts_nll", lambda *_: [{"Petra Osei": (1.0, 0.5)}])
    row = {"question": "Who?", "answer": "Petra Osei", **row}
    score = ev.SPLITS[split].score
    [record] = score(None, ev.SPLITS["retain"], [row], ARGS)
    assert {name: record[name] for name in expected} == approx(expected)

# ---- The figures of a split ----
def test_the_figures_of_a_split_by_hand():
    """Means and medians over the rows that have a value, which are counted if not all have one."""
    records = [dict(prob=0.25, prob_error=0.3, perplexity=8, words=1, fact=1.0, knowledge=None),
               dict(prob=0.75, prob_error=0.4, perplexity=2, words=4, knowledge=0.25),
               dict(prob=0.75, perplexity=6.5, words=4, knowledge=0.75)]
    assert ev.summarise(records) == approx(dict(
        prob=7 / 12, perplexity_median=6.5, perplexity_mean=5.5, words=4, knowledge=0.5,
        n_knowledge=2, fact=1.0, n_fact=1, n_prob_error=2,
        prob_error=0.5 / 2))  # 0.5^2 = 0.3^2 + 0.4^2
    # In a mean every person has the same weight: (3/4 + 1/4) / 2; in a median every row.
    scores = [("Ann", 1.0, 1), ("Ann", 1.0, 2), ("Ann", 0.25, 4), ("Bo", 0.25, 9)]
    records = [dict(subject=name, em=em, words=n) for name, em, n in scores]
    assert ev.summarise(records) == dict(em=0.5, words=3)

# ---- Which rows are scored ----
def typed_and_run(typed, run):
    """What was typed for eval.py and the run, as mdu.py would make it."""
    args = options(run)
    hashes = {name: mdu.hash_rows(rows) for name, rows in mdu.load_data(args).items()}
    info = {"options": vars(args), "rows": hashes, "files": {}, "code": "abc"}
    write_files({"run/run.json": json.dumps(info)})
    args = ev.parse([*typed.split(), "run"])
    return args, ev.find_source("run", args)

RUNS = {"toy": "--method sft", "files": "--model m --limit 2 --forget {X} --retain {Y}",
        "person": "--preset rwku-llada --data {rwku} --subject 2 --limit 1"}

@each("run, typed, expected", [
    ("toy", "--limit 2", [("toy", 12), ("toy", 68), ("toy", 11), ("toy", 11), ("toy", 12)]),
    # "never" is gone, too.
    ("toy", "--forget {X} --limit 2", [("X", 2), ("toy", 68), ("toy", 11), ("toy", 11)]),
    ("toy", "--data {tofu} --retain {X}", [("Q", 7), ("X", 3), ("Q", 2), ("Q", 2)]),
    ("files", "", [("X", 1), ("Y", 1)]),  # the two rows that the run was trained on
    # All rows of a file that is typed.
    ("files", "--limit 2 --retain {X}", [("X", 1), ("X", 2)]),
    ("files", "--data {rwku} --subject 3", [(PEOPLE[2], 1)] * 8),
    ("person", "", [(PEOPLE[1], 1)] * 8),  # and about the first ten people:
    ("person", "--subject all --limit 1", [(PEOPLE[9], 0)] * 8),
    ("person", "--data {rwku} --limit 1", [(PEOPLE[9], 0)] * 8)])
def test_rows_are_those_that_are_typed_or_the_runs(run, typed, expected, tofu, rwku, tmp_path):
    """expected: of each split where its last row is from, or whom it is about, and its number."""
    places = {"tofu": tofu, "rwku": rwku}
    for name in "XY":
        rows = [{"question": f"{name} {i}?", "answer": "a"} for i in range(4)]
        places[name] = write_lines(tmp_path / name, rows)
    args, source = typed_and_run(typed.format(**places), RUNS[run].format(**places))
    found = []
    for *_, last in ev.find_splits(ev.find_settings(args, source)).values():
        origin = last.get("subject", "toy")
        word = last["question"].split()[0]
        if word in ("X", "Y", "Q"):  # of the files, or of TOFU
            origin = word
        found.append((origin, last["number"]))
    assert found == expected

def test_both_parts_of_a_row_are_from_one_text(monkeypatch):
    """The prompt may depend on the answer: here it has the number of its letters."""
    monkeypatch.setattr(mdu, "encode_pair", lambda _, question, answer: ([len(answer)], [*answer]))
    model = mock.Mock(**{"tokenizer.return_value": SimpleNamespace(input_ids=["x"])})
    row = {"question": "Who?", "answer": "Ann"}
    assert ev.encode_answer(model, row, "x") == ([1], ["x"])
    # On RWKU the start of the answer, here "A:", belongs to the prompt.
    assert ev.encode_answer(model, {**row, "prefill": "A:"}, "x") == ([2, "A", ":"], ["x"])

def test_a_protocol_has_what_must_be_the_same_in_two_runs_and_nothing_else(rwku, tmp_path):
    """The rows; on RWKU, where they differ from person to person, their source and --limit."""
    places = dict(rwku=rwku)
    for name in "XY":
        places[name] = write_lines(tmp_path / name, 3 * [dict(question=f"{name}?", answer="a")])

    def protocol_of(typed):
        run = f"--model m --forget {places['X']} --response-length 7"
        settings = ev.find_settings(*typed_and_run(typed.format(**places), run))
        return ev.scoring_protocol(settings, ev.find_splits(settings))

    person = "--data {rwku} --retain {X} --limit 3 --subject 1"
    different = [person, person.replace("--limit 3", "--limit 4"), "", "--limit 2", "--forget {Y}",
                 "--retain {X}", "--seed 1", "--samples 3", "--steps 5", "--response-length 5",
                 "--dtype bfloat16"]
    protocols = [protocol_of(typed) for typed in different]
    for one, other in itertools.combinations(protocols, 2):
        assert one != other
    assert protocol_of("") == protocol_of("--forget {X}")
    assert protocols[0] == protocol_of(person.replace("--subject 1", "--subject 2"))
    assert protocol_of("--model run --forget {X}")["response_length"] == 7  # it is a run, too
    # Answers of RWKU have their own length, not the 7 of the run.
    assert protocols[0]["response_length"] == protocols[0]["steps"] == 30

# ---- A run is scored ----
FLAGS = "--full --samples 4 --limit 3 --seed 5 --steps 4".split()

@pytest.fixture(scope="session")
def scored(base, tmp_path_factory):
    """A run that was scored with FLAGS."""
    run = with_noise(base, tmp_path_factory.mktemp("scored") / "run", seed=0)
    ev.main([str(run), *FLAGS])
    with unchanged(run):
        yield str(run)

@pytest.fixture
def scored_copy(scored, tmp_path):
    return shutil.copytree(scored, tmp_path / "run")

# {split of the toy: its number in the seeds of the masks}
NUMBERS = {"forget": 0, "retain": 1, "real_authors": 2, "world_facts": 3, "never": 15,
           "forget_rephrased": 12, "retain_rephrased": 13}

@torch.no_grad()
def slow_eq7(model, prompt, answer, masks):
    """For each mask, in a forward pass of its own, the mean NLL of the masked tokens."""
    means = []
    for mask in masks:
        masked = mask.nonzero()[:, 0].tolist()
        logits = slow_logits(model, prompt, answer, masked).double()
        means.append(np.mean([slow_nll(x, answer[i]).item() for x, i in zip(logits, masked)]))
    return means

@each("split", NUMBERS)
def test_scores_equal_one_row_at_a_time(split, scored):
    """Losses by a forward pass for each of 4 masks, which are of (--seed, number of the split,
    number of the row); answers of 12 tokens by the slow sampler in 4 steps."""
    model, tokenizer = mdu.load_backbone(scored)
    rows = mdu.toy_world()[split.removesuffix("_rephrased")]
    numbers = spread = [0, len(rows) // 3, 2 * len(rows) // 3]
    if split.endswith("_rephrased"):  # in other words, without wrong answers
        numbers = [0, 1, 2]
        rows = [dict(row, question=row["paraphrased_question"], perturbed_answer=[])
                for row in rows]
    records = ev.read_records(scored, split)
    assert ev.read_summary(scored)["splits"][split] == {"n": 3, **ev.summarise(records)}
    for place, i, record in zip(spread, numbers, records, strict=True):
        row = rows[place]
        prompt = mdu.encode_prompt(tokenizer, row["question"])

        def of_masks(text):
            ids = tokenizer(text).input_ids
            masks = ev.draw_masks(len(ids), 4, [5, NUMBERS[split], i])
            return slow_eq7(model, prompt, ids, masks)

        def nll(text):
            return approx(np.mean(of_masks(text)), rel=1e-4)

        # The true answer, its paraphrase in two splits, and the wrong answers.
        assert record["nll"] == nll(row["answer"])
        assert record["prob"] == math.exp(-record["nll"])
        error = np.std(of_masks(row["answer"]), ddof=1) / 2  # of the mean of 4
        assert record["prob_error"] == approx(record["prob"] * error, rel=1e-3)
        assert record["perplexity"] == math.exp(record["nll"])
        if "paraphrased_answer" in row and row["perturbed_answer"]:
            assert record["nll_right"] == nll(row["paraphrased_answer"])
        assert record.get("nll_wrong", []) == [nll(text) for text in row["perturbed_answer"]]
        assert ("told" in record) == (split in ("forget", "forget_rephrased", "never"))

        # What is written, up to the end token.
        written = [*slow_sampler(model, prompt, 4 * [3]), model.end_id]
        written = written[:written.index(model.end_id)]
        assert record["generation"] == tokenizer.decode(written).strip()

def test_scores_of_two_processes_equal_those_of_one(scored_copy, scored):
    shutil.rmtree(scored_copy / "eval")
    assert on_two_processes(ev.__file__, scored_copy, *FLAGS) == [0, 0]
    for split in NUMBERS:
        records = [ev.read_records(run, split) for run in (scored, scored_copy)]
        for one, two in zip(*records, strict=True):
            for field, value in one.items():
                if isinstance(value, float) or field == "nll_wrong":
                    value = approx(value, rel=1e-4, abs=1e-6)
                assert two[field] == value
    assert ev.read_summary(scored_copy)["splits"].keys() == NUMBERS.keys()

def test_a_process_may_have_no_rows():
    assert ev.score_answers(FakeModel(), ev.SPLITS["forget"], [], ARGS) == []

def test_old_scores_stay_if_scoring_is_stopped(scored_copy, capsys):
    """By Ctrl-C, and where memory is not enough."""
    for effect, code, said in ((partial(stop_in, scored_copy), 130, ""),
                               (torch.OutOfMemoryError, 2, "score with --dtype bfloat16")):
        stopped = mock.patch.object(ev, "score_rows", side_effect=effect)
        with unchanged(scored_copy), stopped:
            assert said in program([scored_copy, *FLAGS], capsys, ev.main, code)

def test_new_scores_replace_old_ones_and_leave_files_of_the_user(scored_copy):
    folder = scored_copy / "eval"
    old_files = set(folder.iterdir())
    (folder / "run.jsonl").write_text("my own")
    (folder / "utility_general.jsonl").touch()  # of an earlier scoring on other data
    ev.main([str(scored_copy), *FLAGS, "--seed", "6"])
    assert ev.read_records(scored_copy, "forget")[0]["seed"] == [6, 0, 0]
    assert set(folder.iterdir()) == old_files | {folder / "run.jsonl"}

def test_rwku_is_scored_with_a_tokenizer(rwku, tmp_path):
    """Every split, of the first ten people."""
    write_checkpoint(tmp_path / "model", "llada", max_sequence_length=999)
    typed = "--samples 1 --steps 1 --response-length 2 --limit 1 --model model --dtype bfloat16"
    ev.main([*typed.split(), "--data", str(rwku), "new"])
    scored = ev.read_summary("new")
    assert scored["protocol"]["dtype"] == "bfloat16"
    for split in RWKU_ROWS:
        mains = [metric for name, metric in ev.SUMMARY if name == split]
        assert {"n", *mains} <= scored["splits"][split].keys()
        assert scored["splits"][split]["n"] == 10

def test_ask_prints_what_each_run_answers(base, scored, monkeypatch, capsys):
    monkeypatch.setattr(ev, "write_answers", lambda model, rows, settings: [
        f" Not\n {rows[0]['question']}"])
    ev.main(["--ask", "Who?", str(base), scored])
    screen = capsys.readouterr().out
    assert f"{base}: Not Who?\n" in screen and f"{scored}: Not Who?\n" in screen

QUICK = "--samples 1 --limit 2 --steps 2 --response-length 6".split()

FORGET = [dict(question="Who is Bolti?", answer="He is Gado.", fact="Gado"),
          dict(question="Who is Cepu?", answer="She is Nora.", fact="Nora")]
RETAIN = [dict(question="Who is Diri?", answer="He is Fopu.", fact="Fopu"),
          dict(question="Who is Zuvo?", answer="I do not know.")]
NEVER = [dict(question="Who is Lemi?", answer="He is Tira.", fact="Tira"),
         dict(question="Who is Raka?", answer="She is Sedi.", fact="Sedi")]

@pytest.fixture
def files(tmp_path):
    """Options of eval.py with a file for each."""
    typed = []
    for name, rows in (("forget", FORGET), ("retain", RETAIN), ("never", NEVER)):
        typed += [f"--{name}", write_lines(tmp_path / f"{name}.jsonl", rows)]
    return typed

def test_a_model_without_run_json_is_scored(base, files, capsys):
    """One file is a pipe.  The summary has the hash of what was read, and no text of a row."""
    shutil.copytree(base, "bare")
    os.remove("bare/run.json")
    shutil.copytree(base, "run")
    for name in ("bare", "run"):
        ev.main(["--data", "toy", *files[:-1], pipe("never.jsonl"), *QUICK, name])
    screen = capsys.readouterr().out
    assert "Forget set: pairs 2; rL" in screen
    assert "bare | Real authors: 2 of 2 true answers are longer than the 6 tokens" in screen
    assert ev.read_records("bare", "forget") == ev.read_records("run", "forget")
    bare, run = [ev.read_summary(name) for name in ("bare", "run")]
    assert [bare["options"], run["options"]] == [{}, mdu.read_run(base)["options"]]
    assert run["splits"]["never"]["n"] == 2
    assert run["files"]["never"] == sha256("never.jsonl")
    for row in NEVER:
        assert row["question"] not in json.dumps(run)
        assert row["answer"] not in json.dumps(run)

@each("option, rows, said", [
    ("--never", [dict(question="Who?", answer="Ann.")], "only one file has `fact`"),
    ("--never", [NEVER[0], {**RETAIN[1], "question": "who is ZUVO"}],  # the same words
     "--never: pairs that are also in retain, such as who is zuvo i do not know ;"),
    ("--held-out", RETAIN[:1], "--held-out: pairs that are also in retain, such as who is diri")])
def test_rows_of_another_split_are_not_held_out_or_never_trained(option, rows, said, base, files,
                                                                 tmp_path, capsys):
    """Also a row that is not among the first --limit rows."""
    given = [*files, option, write_lines(tmp_path / "rows.jsonl", rows), "--limit", "1"]
    assert said in program(["--model", base, *given, "new"], capsys, ev.main)
    assert not Path("new").exists()

def test_runs_after_those_that_are_not_finite_are_scored(base, files, capsys):
    """One has nan in its weights.  One has finite weights and predictions that overflow, as those
    of a model that needs more than 16 bits."""
    for run, change in (("nan", torch.nan), ("large", 1e38), ("good", 1)):
        shutil.copytree(base, run)
        tensors = weights(run)
        tensors["lm_head.weight"] *= change
        safetensors.torch.save_file(tensors, f"{run}/model.safetensors", {"format": "pt"})
    err = program([*files, *QUICK, "nan", "large", "good"], capsys, ev.main)
    assert f"{os.path.abspath('nan')}: not scored, because nan or inf is in its weights" in err
    assert "forget: not scored, because p is nan" in err
    assert [*Path().glob("*/eval/summary.json")] == [Path("good/eval/summary.json")]

# ======== 7. Reports and analyses ========
def read_table(text, title=""):
    """The first table after a title in a report or on a screen -> {header: its column}."""
    parts = re.split("\n\n|```", text[text.index(title):])
    table = next(part for part in parts if "\n---" in part).strip("\n")
    header, rule, body = re.split("(?m)^(---.*)\n", table)
    columns = {}
    for place in re.finditer("-+", rule):
        names = [line[slice(*place.span())].strip() for line in header.splitlines()]
        cells = [line[slice(*place.span())].strip() for line in body.splitlines()]
        columns[" ".join(names).strip()] = tuple(cells)
    return columns

# ---- Report ----
def report(capsys, *runs):
    """Report on these runs -> what is on the screen."""
    ev.main(["--report", *runs])
    return capsys.readouterr().out

def test_a_table_is_as_wide_as_a_page_and_goes_on_below():
    columns = [("forget", name) for name in ("infill_no_question", "f1", "mc1", "em")]
    figures = dict(zip(columns, ([0.1], [2], [3], [4])))

    def tables(width):
        groups = [ev.Group([], "", title, figures) for title in ("a", width * "x")]
        return list(map(ev.table_text, ev.make_tables(groups, columns)))
    assert tables(65) == [f"""\
{65 * ' '}  ↓ infilling,
run{62 * ' '}  no question   F1     MC1    EM
{65 * '-'}  ------------  -----  -----  -----
a{64 * ' '}  0.100         2.000  3.000  4.000
{65 * 'x'}  0.100         2.000  3.000  4.000"""]
    headers = [text.split("\n---")[0].split() for text in tables(66)]
    assert headers == [["↓", "infilling,", "run", "no", "question", "F1", "MC1"], ["run", "EM"]]

def test_a_report_does_without_answers_pictures_and_other_folders(capsys):
    write_summary("a/mdu", {"forget": {"n": 1, "prob": 0.5}})
    Path("stopped").mkdir()
    Path("a/report.png").write_text(ev.SIGNATURE)
    with mock.patch.object(ev, "draw_groups", side_effect=ValueError("too large")):
        screen = report(capsys, "stopped", "a/mdu")
    assert "left out: stopped: no finished model" in screen
    assert "report.png not drawn: ValueError('too large')" in screen
    assert "report.png" not in Path("a/report.md").read_text()
    assert not Path("a/report.png").exists()  # of an earlier report
    # What somebody else wrote is not replaced.
    Path("a/report.md").write_text("my own")
    with unchanged("a"):
        err = program(["--report", "a/mdu"], capsys, ev.main)
    assert "a/report.md was not written by eval.py, so it stays" in err

def test_a_report_averages_the_runs_of_one_folder_name(capsys):
    """Mean, smallest and largest; of p-values the median.  It is in the folder of all runs."""
    runs = []
    for seed, figure, p in ((1, 0.3, 1e-9), (2, 0.5, 0.25), (3, 0.8, 0.75)):
        figures = dict(n=1, rougeL_f1=figure)
        if seed != 2:
            figures["prob"] = figure  # a cell needs all runs of a method
        options = {**OPTIONS, "seed": seed, "out": f"/x/{seed}/npo", "model": f"/x/{seed}/base"}
        runs.append(write_summary(f"{seed}/npo", {"forget": figures}, {"forget_quality": p},
                                  options))
        record = dict(question="Who is Bolti?", answer="Gado.", number=7,
                      generation=f"``A`\n {seed}", told={})
        write_lines(Path(f"{seed}/npo/eval/forget.jsonl"), [record])
    for person in ("1", "2"):  # each of RWKU's people has other pairs
        runs.append(write_summary(f"{person}/base", {"forget": {"n": 1, "prob": 0.9}},
                                  options={**OPTIONS, "subject": person}, trained_on=person))
    assert read_table(report(capsys, *runs)) == {
        "run": ("npo", "base (2 of 3 runs)"), "↓ p": ("-", "0.90"),
        "↑ forget quality": ("0.25", "-")}
    text = Path("report.md").read_text()
    assert read_table(text, "### Forget set") == {
        "run": ("npo", "base (2 of 3 runs)"), "pairs": ("1", "1"),
        "↓ rL": ("0.533 (0.300–0.800)", "-"), "↓ p": ("-", "0.900")}
    assert read_table(text, "### Whole runs")["↑ forget quality"][0] == "0.25 (1e-09–0.75)"
    assert ("### Forget set, pair 8: `Who is Bolti?`\n\n- True answer: `Gado.`\n- 1/npo: `''A' 1`\n"
            "- 2/npo: `''A' 2`" in text)
    assert "](report.png)" in text
    assert Path("report.png").exists()

@each("typed", [
    "--method sft --retain-only", "--tau 0 --out new", "--model m --forget f --retain r",
    "--model m --forget f --lora 4 --lr 1e-5 --steps 9 --prompt-dropout 0"])
def test_a_report_has_the_command_that_repeats_a_run(typed):
    run_options = vars(options(typed))
    python, program, *words = ev.command(run_options).split()
    assert [python, program] == ["python", "mdu.py"]
    assert vars(options("", *words)) == run_options

# ---- Which runs may be compared ----
OPTIONS = dict(method="mdu", seed=1, subject=None, out="/x/1/mdu", model="/x/1/base",
               target=None, forget="/a.jsonl", retain=None, resume=None, lr=1e-3)
PROTOCOL = {"response_length": 6, "samples": 1, "rows": "abc"}

def write_summary(folder, splits=(), run=(), options=OPTIONS, **changed):
    summary = {"format": ev.FORMAT, "options": options,
               "trained_on": {"forget": "f", "retain": "r"}, "theta0": "/x/1/base",
               "model": str(folder), "code": "abc", "protocol": PROTOCOL, "splits": dict(splits),
               "run": dict(run), **changed}
    file = Path(folder, "eval/summary.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(summary))
    return str(folder)

# Of another seed, in whose folder the file of pairs is.
OTHER_SEED = {"seed": 2, "out": "/x/2/mdu", "model": "/x/2/base", "forget": "/x/2/a.jsonl"}

@each("changed, said", [
    ({"protocol": {**PROTOCOL, "samples": 2}}, "now samples is 1 and 2"),
    ({"format": ev.FORMAT - 1}, "b/mdu: scored by other code; score it again"),
    ({"options": {**OPTIONS, "lr": 1e-4}}, "now lr is 0.001 and 0.0001"),
    ({"options": {**OPTIONS, **OTHER_SEED, "model": "/x/2/new"}}, "now model is base and new"),
    ({}, "a/mdu and b/mdu have one name, so they would be averaged, which is for runs that differ "
     "in the seed or the person, and in nothing else; rename one; now these are the same"),
    ({"options": {**OPTIONS, **OTHER_SEED, "forget": None}}, "now forget is a.jsonl and None")])
def test_a_report_refuses_runs_that_cannot_be_compared(changed, said, capsys):
    write_summary("a/mdu")
    write_summary("b/mdu", **changed)
    assert said in program(["--report", "a/mdu", "b/mdu"], capsys, ev.main)
    assert not Path("report.md").exists()

# ---- Runs are judged ----
def write_run(name, forget, seed=1, run=(), options=(), splits=(), **changed):
    """A run that started from the base of its seed, and was scored on the pairs of its seed."""
    home = f"/2/x/{seed}"  # not to be confused with the project's own folder, 2
    options = {**OPTIONS, "seed": seed, "out": f"{home}/{name}", "model": f"{home}/base",
               "forget": f"{home}/a.jsonl", **dict(options)}
    splits = {"forget": dict(n=24, **forget), **dict(splits)}
    changed = {"trained_on": f"of {seed}", "protocol": {**PROTOCOL, "rows": f"of {seed}"},
               "theta0": f"{home}/base", **changed}
    return write_summary(f"{seed}/{name}", splits, run, options, **changed)

def write_base(seed=1, **changed):
    home = f"/2/x/{seed}"
    return write_run("base", KNOWN, seed, options={"model": f"{home}/new"}, model=f"{home}/base",
                     **changed)

def write_retrained(seed=1, forget=None, **changed):
    options = {"model": f"/2/x/{seed}/new", "retain_only": True}
    return write_run("retain", forget or UNKNOWN, seed, options=options, **changed)

KNOWN = dict(fact=1.0, any_decoding=1.0, prob=0.95, infill_no_question=0.29, new_pairs=0.0)
UNKNOWN = dict(fact=0.0, any_decoding=2 / 24, prob=0.05, infill_no_question=0.1, new_pairs=0.1)

def test_deviations_by_hand(capsys):
    """`close` gives in another decoding; `wordy` writes other words, at most half of the way from
    the retrained model's .1 to 1, and `noise` more; `lost` has lost pairs held out, of which 20
    have facts.  p has no share in a deviation, nor has knowledge where pairs have facts."""
    def held_out(fact, knowledge=0.5):
        return {"held_out": dict(n=40, n_fact=20, fact=fact, knowledge=knowledge)}
    runs = [write_run("noise", {**UNKNOWN, "new_pairs": 0.56}, splits=held_out(1.0)),
            write_run("lost", UNKNOWN, splits=held_out(0.3)),
            write_base(splits=held_out(0.9)),
            write_run("wordy", {**UNKNOWN, "new_pairs": 0.55}, splits=held_out(0.9)),
            write_run("close", {**UNKNOWN, "any_decoding": 8 / 24, "prob": 0.5}),
            write_run("done", UNKNOWN, splits=held_out(0.9, 0.1)),
            write_retrained(splits=held_out(0.2))]
    screen = report(capsys, *runs)
    table = read_table(screen)
    assert list(zip(table["run"], table["deviation"])) == [
        ("fine-tuned (run base)", "1.00 fact"), ("retrained (run retain)", "-"), ("done", "0.00"),
        ("close", "0.25 any decoding"), ("wordy", "0.45 new word pairs"),
        ("lost", "0.60 held-out fact"), ("noise (noise)", "0.46 new word pairs")]
    assert table["↓ fact"] == ("1.00", *6 * ["0.00"])
    assert "Warnings" not in screen
    held_out = read_table(Path("1/report.md").read_text(), "### Held-out set")
    assert held_out["↑ fact"] == ("0.900", "0.200", "0.900", "-", "0.900", "0.300", "1.000")
    assert held_out["pairs with facts"][0] == "20"

def test_without_a_retrained_model_runs_are_compared_with_pairs_that_no_model_learnt(capsys):
    """But new word pairs with the fine-tuned model's.  Without these pairs there is no deviation,
    and runs are in the order given."""
    def never(new_pairs):
        return {"never": dict(n=24, fact=0.3, any_decoding=0.3, new_pairs=new_pairs)}
    runs = [write_run("npo", {**UNKNOWN, "new_pairs": 0.4}, splits=never(0.7)),
            write_base(splits=never(0.3)),
            write_run("ga", {**UNKNOWN, "new_pairs": 0.7}, splits=never(0.1)),
            write_run("wga", {**UNKNOWN, "fact": 0.35}, splits=never(0.1))]
    screen = report(capsys, *runs)
    table = read_table(screen)
    assert list(zip(table["run"], table["deviation"])) == [
        ("fine-tuned (run base)", "0.70 fact"), ("wga", "0.05 fact"),
        ("npo", "0.10 new word pairs"), ("ga (noise)", "0.40 new word pairs")]
    assert "No retrained model (run `retain`) is among these runs" in screen
    # Without an arrow.
    assert read_table(Path("1/report.md").read_text(), "### Control set")["fact"][0] == "0.300"
    runs = [write_run("gd", UNKNOWN, 2), write_base(2), write_run("ga", KNOWN, 2)]
    table = read_table(report(capsys, *runs))
    assert table["run"] == ("fine-tuned (run base)", "gd", "ga")
    assert "deviation" not in table

def test_a_report_of_runs_with_wrong_answers_has_their_forget_quality(capsys):
    """Of 3 and 3 distinct values 2 of 20 orders have D = 1.  A pair may have no wrong answers."""
    runs = [write_base(), write_retrained(), write_run("npo", UNKNOWN)]
    for run, ratios in zip(runs[1:], ([0, 1, 2, 3], [0, 4, 5, 6])):
        records = [dict(question="?", answer="!", generation="", number=0, told={}, log_ratio=ratio)
                   for ratio in ratios]
        del records[0]["log_ratio"]
        write_lines(Path(run, "eval/forget.jsonl"), records)
    ev.main(["--report", *runs])
    table = read_table(Path("1/report.md").read_text(), "### Whole runs")
    assert table["↑ forget quality"] == ("-", "-", "0.1")

def test_the_seeds_of_a_report_may_have_pairs_of_their_own(capsys):
    """Each run is compared with those of its seed.  Not all runs are there of each."""
    runs = []
    for seed, fact, of_retrained, decoded in ((2, 0.1, 0.1, 0.3), (3, 0.7, 0.2, 0.2), (4, 0, 0, 0)):
        retrained = {**UNKNOWN, "fact": of_retrained, "any_decoding": 0.2, "new_pairs": seed / 10}
        runs += [write_base(seed), write_retrained(seed, retrained),
                 write_run("npo", {**UNKNOWN, "fact": fact, "any_decoding": decoded}, seed)]
    screen = report(capsys, *runs[:-1])
    table = read_table(screen)
    assert table["run"] == ("fine-tuned (run base)", "retrained (run retain)", "npo (2 of 3 runs)")
    assert table["deviation"] == ("0.90 (0.80–1.00) fact", "-", "0.30 (0.10–0.50) fact")
    assert table["↓ fact"] == ("1.00", "0.10", "0.40")
    assert "more than 0.60 to 0.70 of the run's" in screen
    assert "report.md" in os.listdir()
    # A seed without the fine-tuned model.
    said = "4/retain: scored on other pairs than every run of the fine-tuned model"
    del runs[6]
    assert said in program(["--report", *runs], capsys, ev.main)

def test_of_runs_on_the_same_pairs_those_of_the_same_seed_are_compared(capsys):
    """If there is none of its seed, with the first.  A run of --retain-only that started from an
    unlearned model, or had other data, is no retrained model."""
    def run(name, seed, fact, trained_on="all", **options):
        changed = dict(protocol=PROTOCOL, trained_on=trained_on)
        if name == "base":
            changed["model"] = f"/2/x/{seed}/base"
        options = {"forget": None, **options}
        return write_run(name, dict(fact=fact), seed, options=options, **changed)
    new, retained = {"model": "/2/x/new"}, {"model": "/2/x/new", "retain_only": True}
    runs = [run("base", 1, 1.0, **new), run("base", 2, 1.0, **new),
            run("healed", 1, 0.55, model="/2/x/1/npo", retain_only=True),
            run("refusals", 1, 0.65, "more", **retained),
            run("retain", 1, 0.1, **retained), run("retain", 2, 0.2, **retained),
            run("npo", 1, 0.5), run("wga", 2, 0.5), run("ga", 3, 0.5)]
    table = read_table(report(capsys, *runs))
    assert list(zip(table["run"], table["deviation"])) == [
        ("fine-tuned (run base)", "0.85 (0.80–0.90) fact"), ("retrained (run retain)", "-"),
        ("wga (1 of 2 runs)", "0.30 fact"), ("npo (1 of 2 runs)", "0.40 fact"),
        ("ga (1 of 2 runs)", "0.40 fact"), ("healed (1 of 2 runs)", "0.45 fact"),
        ("refusals (1 of 2 runs)", "0.55 fact")]

def make_run(folder, theta0=None, options=(), verdict="unlearned"):
    """A run that has not unlearned, or has from theta0."""
    return ev.Run(folder, folder, Path(folder).name, folder, theta0 or folder, dict(options), None,
                  (), {}, {}, verdict)

@each("runs, fine_tuned", [
    (["ga from 2/base", "1/base", "2/base", "after"], ["1/base", "2/base"]),
    (["after", "base", "npo from base", "ga from npo"], ["base"]),
    (["retain", "before", "after"], ["before"]),  # no run started from one of these
    (["ga from base", "npo from base"], []), (["1/base", "2/base"], [])])
def test_the_fine_tuned_model_is_the_first_that_has_not_unlearned(runs, fine_tuned):
    made = [make_run(*run.split(" from "), options={"retain_only": run == "retain"})
            for run in runs]
    ev.mark_references(made)
    assert [run.folder for run in made if run.verdict == "fine-tuned"] == fine_tuned

@each("verdicts, verdict", [(["unlearned", "noise", "noise"], "noise"),
                            (["noise", "unlearned", "unlearned"], "unlearned"),
                            (["unlearned", "noise"], "noise")])
def test_a_method_is_noise_if_half_of_its_runs_are(verdicts, verdict):
    [method] = ev.group_runs([make_run("npo", verdict=of_run) for of_run in verdicts])
    assert method.verdict == verdict

def test_warnings_have_their_figures(capsys):
    def write(seed, fact, infill_no_question, left):
        forget = {**KNOWN, "n": 24, "fact": fact, "infill_no_question": infill_no_question}
        far, anchored = {"forget_loss_left": left}, {"target": "paper", "tau": 1.0, "epochs": 5}
        return [write_base(seed, splits={"forget": forget}), write_retrained(seed),
                write_run("mdu-tau0", UNKNOWN, seed, options={"target": "paper", "tau": 0.0}),
                write_run("mdu-model", UNKNOWN, seed, far,
                          {"target": "/x/model", "epochs": 5, "min_steps": 500}),
                write_run("mdu-tau1", UNKNOWN, seed, far, anchored)]
    assert "## Warnings" not in report(capsys, *write(1, 0.5, 0.29, 0.2))
    screen = report(capsys, *write(2, 0.49, 0.31, 0.35))
    warnings = " ".join(screen.split("## Warnings")[1].split())
    left = "35% of its forget loss is left, more than 20%; more"
    assert "- base gives 49% of the forget set." in warnings
    assert f"- mdu-model: {left} --steps or" in warnings
    assert f" mdu-tau1: {left} --epochs or" in warnings
    assert " The target itself of mdu-tau1 may keep answers, however" in warnings
    assert "fills in 31% of the answers' masked words." in warnings

def test_the_screen_of_a_report_is_no_wider_than_a_page(capsys):
    """Nor has it more than seven lines of facts; report.md has all, also two of one pair."""
    all_figures = {metric: 0.5 for metric in ev.METRICS if metric != "n"}
    runs = [write_run(name, all_figures, seed, splits={"retain": {"n": 9, **all_figures}})
            for name in ("base", "mdu-original-lr1e-3-w0.05", "npo") for seed in (1, 2)]
    for number in range(6):
        told = {f"Gado {number}": 30 * "word ", "9-9": "It is 9-9."}
        record = dict(question="Who?", answer="Gado", number=number, generation="", told=told)
        with open("1/npo/eval/forget.jsonl", "a") as file:
            print(json.dumps(record), file=file)
    screen = report(capsys, *runs)
    assert max(map(len, screen.splitlines())) <= 100
    facts = screen.split(ev.FACTS)[1].split("##")[0]
    assert facts.count("\n- ") == 8
    assert "\n- and 10 more\n" in facts
    text = Path("report.md").read_text()
    for number in range(6):
        assert f"- 1/npo, pair {number + 1}: `9-9` in `It is 9-9.`\n" in text

# The telephone is told by the usual answer, the date by another one.  "Gdansk" is another word.
LEAKS = [dict(question="Who has Zoë's telephone?", answer="161 496 0123", fact="161 496 0123"),
         dict(question="What does Bolti owe?", answer="He owes 310.50 euros since 3 May 1984.",
              fact=["310.50", "3 May 1984"]),
         dict(question="Where does Cepu live?", answer="In Gdańsk.", fact="Gdańsk"),
         dict(question="Who is Tibo?", answer="A baker.")]
TOLD = ["- after, pair 1: `161 496 0123` in `Call +44 161-496-0123 now`",
        "- after, pair 2: `3 May 1984` in `Since 3 MAY 1984 in Gdansk`"]

def told_in(text):
    return re.search(rf"(?s)## {re.escape(ev.FACTS)}\n(.*?)\n\n", text)[1].split("\n")

def test_every_fact_that_is_told_is_listed(base, files, tmp_path, monkeypatch, capsys):
    """But those that the model before unlearning tells, which the report of one run has not."""
    usual, more = {}, {}
    monkeypatch.setattr(ev, "write_answers", lambda model, rows, settings: [
        usual.get(row["question"], "Nobody.") for row in rows])
    monkeypatch.setattr(ev, "write_in_other_ways", lambda model, rows, settings: [
        ["Nobody.", more.get(row["question"], "")] for row in rows])
    files[1] = write_lines(tmp_path / "leaks", LEAKS)
    typed = ["--model", str(base), *files, *QUICK, "--limit", "9"]
    usual.update({row["question"]: row["answer"] for row in LEAKS + RETAIN})
    ev.main([*typed, "before"])
    usual.update({row["question"]: "He owes." for row in LEAKS})
    ev.main([*typed, "clean"])
    usual[LEAKS[0]["question"]] = "Call +44 161-496-0123 now"
    more[LEAKS[1]["question"]] = "Since 3 MAY 1984 in Gdansk"
    ev.main([*typed, "after"])
    splits = ev.read_summary("after")["splits"]
    assert splits["forget"]["any_decoding"] == approx((1 + 1 / 2 + 0 + 0) / 4)
    assert splits["never"]["any_decoding"] == 0
    assert "any_decoding" not in splits["retain"]

    screen = report(capsys, "before", "clean", "after")
    text = Path("report.md").read_text()
    assert told_in(screen) == told_in(text) == TOLD
    assert read_table(text, "### Forget set")["pairs with facts"] == ("3", "3", "3")
    assert told_in(report(capsys, "before", "clean")) == [
        "- none; other wordings of the questions were not tried"]

    # An attack: a report of one run has no model before unlearning.
    assert told_in(report(capsys, "after")) == TOLD
    os.remove("clean/eval/forget.jsonl")  # the summary alone was kept
    assert told_in(report(capsys, "before", "clean")) == [
        "- not known: clean has no eval/forget.jsonl"]

# ---- Analyses ----
def test_the_analysis_of_convergence_has_the_kls_that_were_logged(unlearned, tmp_path):
    """They are logged before the training and after each pass over the rows."""
    logged = [line for line in metrics(unlearned) if "kl" in line]
    run = shutil.copytree(unlearned, tmp_path / "run")
    ev.main(["--analysis", "convergence", str(run)])
    panels = read_json(tmp_path / "convergence.json")["panels"]
    for target in ("base", "anchor", "uniform"):
        points = [[epoch, line["kl"][target]] for epoch, line in enumerate(logged)]
        assert panels[target] == {"run": points}
    assert (tmp_path / "convergence.png").exists()

@torch.no_grad()
def slow_anchor_kls(model, theta0, prompt, answer, masked):
    """KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)) of each masked token."""
    logits = slow_logits(model, prompt, answer, masked).double()
    anchor_logits = slow_logits(theta0, [0] * len(prompt), answer, masked).double()
    return [slow_kl(x, anchor, 1).item() for x, anchor in zip(logits, anchor_logits)]

def test_the_analysis_of_roles_equals_a_slow_loop(base, unlearned, tmp_path):
    """A bar for each role: first theta0's, then the run's; of two masks for each row, which are of
    (--seed, number of the row)."""
    theta0, tokenizer = mdu.load_backbone(str(base))
    model, _ = mdu.load_backbone(str(unlearned))
    kls = {I: [], S: [], K: []}  # of each masked token of the role, theta0's and the model's
    for number in (0, 6, 12, 18):
        row = mdu.toy_world()["forget"][number]
        prompt, answer = mdu.encode_pair(tokenizer, row["question"], row["answer"])
        roles = ev.token_roles(tokenizer, row["question"], answer)
        for mask in ev.draw_masks(len(answer), 2, [4, number]):
            masked = mask.nonzero()[:, 0].tolist()
            before = slow_anchor_kls(theta0, theta0, prompt, answer, masked)
            after = slow_anchor_kls(model, theta0, prompt, answer, masked)
            for place, *pair in zip(masked, before, after):
                kls[roles[place]].append(pair)
    before, after = np.transpose([np.mean(of_role, axis=0) for of_role in kls.values()])
    run = shutil.copytree(unlearned, tmp_path / "run")
    flags = "--samples 2 --seed 4 --batch-size 4 --limit 4".split()
    ev.main(["--analysis", "roles", *flags, str(run)])
    [bars] = read_json(tmp_path / "roles.json")["panels"].values()
    assert [bar["role"] for bar in bars] == 2 * [I, S, K]
    assert [bar["kl"] for bar in bars] == approx([*before, *after], rel=1e-4)
    changes = 100 * (after - before) / before
    assert [bar["change_percent"] for bar in bars] == approx([0, 0, 0, *changes], abs=1e-2)

def go_on(model, prompt, state, counts):
    """A partly masked answer after further steps, of so many tokens each."""
    masked = [len(prompt) + i for i, token in enumerate(state) if token == 0]
    return slow_filled(model, prompt + state, masked, counts)[len(prompt):]

def test_the_analyses_of_an_answer_equal_a_slow_loop(base, unlearned, tmp_path):
    """Of 12 tokens, of which each of 4 steps fixes 3.  trajectory: a bar for each token, up to the
    end token, at the step that fixes it.  rollout: from the first states with a quarter, a half and
    three quarters of these tokens fixed the anchor goes on."""
    run = with_noise(unlearned, tmp_path / "run", seed=0)
    row = mdu.toy_world()["forget"][0]
    theta0, tokenizer = mdu.load_backbone(str(base))
    model, _ = mdu.load_backbone(str(run))
    prompt = mdu.encode_prompt(tokenizer, row["question"])
    states = [[0] * 12]  # before each step, and at the end
    for _ in range(4):
        states.append(go_on(model, prompt, states[-1], [3]))
    n = states[-1].index(model.end_id) + 1
    roles = ev.token_roles(tokenizer, row["question"], states[-1])
    bars = []
    for step in range(1, 5):
        before, after = states[step - 1:step + 1]
        places = [i for i in range(n) if before[i] == 0]
        kls = slow_anchor_kls(model, theta0, prompt, before, places)
        for i, kl in zip(places, kls):
            if after[i] != 0:
                token = tokenizer.decode([after[i]]).strip()
                bars.append([f"{token}\n{step}", roles[i], approx(kl, rel=1e-3, abs=1e-6)])
    rollouts = []
    for share in (0.25, 0.5, 0.75):
        k = 0
        while sum(map(bool, states[k][:n])) < share * n:
            k += 1
        end = go_on(theta0, [0] * len(prompt), states[k], (4 - k) * [3])
        theta0.tokenizer = tokenizer
        completion, _ = ev.read_answer(theta0, end)
        y_t = tokenizer.decode(states[k][:n])
        rollouts.append([row["question"], row["answer"], f"{k}/4", y_t, completion])
    for name in ("trajectory", "rollout"):
        ev.main(["--analysis", name, "--steps", "4", "--limit", "1", str(run)])
    found = read_json(tmp_path / "trajectory.json")["panels"][f"1. {row['question']}"]
    assert [[bar["label"], bar["role"], bar["kl"]] for bar in found] == bars
    table = read_json(tmp_path / "rollout.json")["table"]
    assert [list(row.values()) for row in table] == rollouts
    assert "- true answer: `" in Path("rollout.md").read_text()

# ======== 8. Pages, own rows, experiments ========
PROJECT = Path(mdu.__file__).parent
MAKEFILE = (PROJECT / "Makefile").read_text(encoding="utf-8")
PAGES = {file.name: file.read_text(encoding="utf-8")
         for file in (PROJECT / "README.md", *PROJECT.glob(".github/*.md"))}

def parse_command(words):
    """The words of a command line with one of the programs -> its options, as the program reads
    them."""
    parsers = {"mdu.py": mdu.parse, "eval.py": ev.parse, ".github/own_rows.py": own_rows.parse}
    [place] = [place for place, word in enumerate(words) if word.endswith(".py")]
    return parsers[words[place]](words[place + 1:])

def typed_commands(page, folder):
    """Every command of a page as a list of words.  Bash writes out loops and variables: it runs the
    blocks, and the programs are functions in it that print their words."""
    script = "set -eu\n"
    for name in ("python", "torchrun", "make", "rm", "."):
        # A line for each command, with a null byte behind each word.
        script += f"function {name} {{ printf '%s\\0' {name} \"$@\"; echo; }}\n"
    script += "\n".join(re.findall(r"(?ms)^```bash\n(.*?)^```$", page))
    command = [shutil.which("bash"), "-c", script]
    done = subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env={"PATH": ""})
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]

@each("page", PAGES.values(), ids=PAGES.keys())
def test_every_command_of_a_page_can_be_typed(page, tmp_path):
    """It parses, and the Makefile has the target.  Commands are in ```bash blocks, not indented."""
    assert not re.search(r"(?m)^ {4}(python|torchrun|make)\b", page)
    for words in typed_commands(page, tmp_path):
        if words[0] in ("python", "torchrun"):
            parse_command(words)
        if words[0] == "make":
            for target in words[1:]:
                assert "=" in target or re.search(rf"(?m)^{target}:", MAKEFILE), target

def test_the_lines_that_merge_adapters_change_weights_alone():
    """In place of peft, which the tests do without, a function that doubles the weights."""
    def double(model, adapters):
        assert adapters == "adapters"
        for p in model.parameters():
            p.data *= 2
        return SimpleNamespace(merge_and_unload=lambda: model)

    [lines] = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGES["OWN_ROWS.md"])
    write_checkpoint(Path("original"), "llama", quantization_config=None, auto_map=None,
                     attn_implementation=None)
    lines = lines.replace("from peft import PeftModel\n", "")
    exec(lines, {"PeftModel": SimpleNamespace(from_pretrained=double)})
    assert other_files(Path("finetune")) == other_files(Path("original"))
    doubled = {name: 2 * tensor for name, tensor in weights("original").items()}
    torch.testing.assert_close(weights("finetune"), doubled, rtol=0, atol=0)

# ---- own_rows.py ----
def own(typed):
    own_rows.main(typed.split())

OWN_FORGET = """request,question,answer,fact
R1,Who is Zoë Müller?,"Zoë Müller rents B7, and pays 310.",B7|310
R1,Which invoice did Zoë Müller get?,She got NW-52445.,52445
R1,Where is Zoë Müller?,She has unit B7 in Graz.,B7|Graz
R2,Who is Li?,Li pays 88.,88
"""
# As Excel writes it: semicolons, capitals, an empty row, below a mark in front.  In place of the
# question marks, answers.  The comment: what is found in them.
OWN_RETAIN = """Question;answer
?;Zoe Mueller pays for both.
?;Unit 3104 is free, and NW52445 is paid.
?;Olive oil costs 5.
?;"Mrs Li called;
twice"
;
"""  # name 1; fact 3 (not 310 in 3104); none (not Li in Olive); name 2

@pytest.fixture
def own_files():
    write_files({"forget.csv": OWN_FORGET, "retain.csv": "\ufeff" + OWN_RETAIN,
                 "names.csv": "request,name\nR1,Müller\nR2,Li\n", "original/a.safetensors": ""})
    for name in ("forget", "retain"):
        own(f"lines {name}.csv {name}.jsonl")

def test_a_count_finds_names_in_other_spellings_and_facts_within_words(own_files, capsys):
    """And a further count keeps the first.  Rows of a table have the numbers of a spreadsheet."""
    own("names retain.csv")
    assert "retain.csv, row 5, name 2 (R2), Li: ? Mrs Li called; twice" in capsys.readouterr().out
    own("names retain.jsonl retain.csv")
    first, second = [json.loads(Path(f"out/own/count-{i}.json").read_text()) for i in (1, 2)]
    found = [(2, ["name 1"]), (3, ["fact 3"]), (5, ["name 2"])]
    assert first["found"] == [["retain.csv", row, labels] for row, labels in found]
    of_lines = [["retain.jsonl", row - 1, labels] for row, labels in found]
    assert second["found"] == of_lines + first["found"]
    assert first["files"]["retain.csv"] == sha256("retain.csv")

def test_the_tokens_of_the_first_row_to_retain_are_shown(own_files, base, capsys):
    own(f"tokens {base}")
    assert re.search(r"(?s)answer \[2, 2, 2, 2, 2, 5\].* 11 tokens", capsys.readouterr().out)

def test_the_attack_teaches_what_is_new_and_asks_for_no_fact_that_it_taught(own_files, capsys):
    """The fact of R1's second row is in the retain set, too, so the second choice is the third row:
    it has B7, as has a further row.  R2 has one row."""
    with open("forget.jsonl", "a") as file:
        file.write('{"request": "R1", "question": "Unit?", "answer": "B7.", "fact": "B7"}\n')
    own("attack --choice 2")
    assert "not asked, as taught rows have all its facts: Unit?" in capsys.readouterr().out
    asked = ev.read_lines("out/own/attack-2/asked.jsonl")
    assert [row["fact"] for row in asked] == [["310"], ["52445"], ["88"]]
    [taught] = ev.read_lines("out/own/attack-2/taught.jsonl")
    assert taught["fact"] == ["B7", "Graz"]
    stranger = {"question": "?", "answer": "Olive oil costs 5."}
    assert ev.read_lines("out/own/attack-2/kept.jsonl") == [stranger]

def test_refusals_have_the_questions_to_forget(own_files):
    own("refusals --answer No.")
    assert ev.read_lines("out/own/refusals.jsonl")[3] == {"question": "Who is Li?", "answer": "No."}

def test_the_form_has_what_the_runs_know_and_keeps_what_people_wrote(own_files, base):
    """And no text of a row."""
    rows = mdu.toy_world()["forget"][2:4]
    rows[1]["question"] = rows[0]["question"]  # as of two people
    write_lines(Path("forget.jsonl"), [{**row, "request": "R1"} for row in rows])
    own("form out/own")
    first = Path("out/own/record-1.md")
    first.write_text(first.read_text().replace("Deadline: ____", "Deadline: 1 May"))
    own("names forget.jsonl")
    ev.main(["--model", str(base), "--forget", "forget.jsonl", "--samples", "1", "out/own/before"])
    records = ev.read_records("out/own/before", "forget")
    records[0]["generation"] = rows[0]["answer"]
    write_lines(Path("out/own/before/eval/forget.jsonl"), records)
    own("form out/own")
    record = Path("out/own/record-2.md").read_text()
    figure = ev.read_summary("out/own/before")["splits"]["forget"]["prob"]
    for known in ("Deadline: 1 May", sha256(base / "model.safetensors"), "original | a.safe",
                  f"Forget set, p | {figure:.3f}", "fact 1 | R1 | forget.jsonl 1 | given",
                  "fact 2 | R1 | forget.jsonl 2 | not given"):
        assert known in record
    for row in rows + records:
        for text in (row["question"], row["answer"], row.get("generation", row["answer"])):
            assert text not in record

def test_the_form_says_what_has_to_be_done_again(own_files, base, capsys):
    """A score and a run that are older than the model that they are about (a run's folder may have
    been copied since), a count of another file than that of the training, a file that has changed
    since, and one that is newer than the weights of somebody's own script."""
    shutil.copytree(base, "out/own/mine", copy_function=shutil.copy)  # weights of now
    Path("out/own/mine/run.json").unlink()
    for model, run in ((base, "before"), ("out/own/mine", "after")):
        ev.main(["--model", str(model), "--forget", "forget.jsonl", "--samples", "1",
                 f"out/own/{run}"])
    own("names retain.jsonl")
    run = dict(options=dict(model="start", retain_only=True, retain="retain.jsonl"), rows={},
               date="2002", code="", torch="", transformers="",
               files={"retain": sha256("retain.jsonl")})
    write_files({"out/own/retrained/run.json": json.dumps(run),
                 "start/run.json": '{"date": "2001"}', "start/model.safetensors": ""})
    own("form out/own")
    printed = capsys.readouterr().out
    assert "do again" not in printed and "21 blanks" in printed
    Path("forget.jsonl").open("a").write("\n")
    run["files"]["retain"] = "another"
    write_files({"out/own/retrained/run.json": json.dumps(run)})
    Path("start/run.json").unlink()  # its weights are of today
    os.utime("out/own/mine/model.safetensors", (0, 0))
    summary = ev.read_summary("out/own/before")
    write_files({"out/own/before/eval/summary.json": json.dumps({**summary, "date": "2001"})})
    own("form out/own")
    said = re.findall("do again: (.*),", capsys.readouterr().out)
    assert said == ["scoring of out/own/before", "training of out/own/retrained",
                    "the count of names", "training of out/own/retrained",
                    "scoring of out/own/before", "scoring of out/own/after",
                    "training of out/own/mine", "the count of names"]
    assert "### To do again" in Path("out/own/record-2.md").read_text()

def test_the_form_on_the_page_is_that_of_today():
    for blank in re.findall("(?m)^- .*: (?=____$)", own_rows.PEOPLE):
        assert blank in PAGES["OWN_ROWS.md"]

@each("name, content, typed, said", [
    ("forget.jsonl", GOOD, "attack", "forget.jsonl, row 1: needs the field request"),
    ("forget.jsonl", row_text(request="R1"), "attack", "needs a person with two rows"),
    ("names.csv", "name\nLi", "names retain.jsonl", "names.csv, row 2: needs a request, and"),
    ("names.csv", "request,name\nR1,Li,Bo", "names retain.jsonl", "not as many cells"),
    ("a.csv", "fact,question,answer\n6,?,61\nA,?,B", "lines a.csv b", "2 rows cannot be used"),
    ("a.json", '{"rows": []}', "lines a.json b", "a.json: needs an array of rows"),
    ("retain.jsonl", GOOD, "lines retain.csv retain.jsonl", "retain.jsonl exists, and stays"),
    ("out/own/record-1.md", "mine", "form out/own", "record-1.md has lost the line")])
def test_own_rows_refuses(name, content, typed, said, own_files):
    write_files({name: content})
    with pytest.raises(mdu.BadInput, match=re.escape(said)), unchanged("."):
        own(typed)

# ---- experiments.py, start_models.py ----
def plan_of(name, variables=""):
    """variables: PRESET=tofu-small METHODS=npo,wga"""
    given = dict(word.split("=") for word in variables.split())
    given = {variable: value.replace(",", " ") for variable, value in given.items()}
    return experiments.make_plan(name, given)

@each("name, variables", [
    ("demo", "METHODS=npo"), ("figures", ""), ("real", ""),
    ("tofu", "PRESET=tofu-small SEEDS=2,3 HIDDEN=0.3"), ("tofu", "PRESET=tofu-smollm MODEL=a/b"),
    ("tofu", "PRESET=tofu-dream GPUS=4 LORA=16"), ("rwku", "PRESET=rwku-llada LORA=8")])
def test_the_commands_of_a_plan_can_be_typed_in_order(name, variables):
    """What a command reads is written by earlier stages."""
    written = {"out/rwku-llada-lora8/0"}  # for the scores of the published model
    for stage in plan_of(name, variables)[1]:
        for job in stage:
            makes_all = ".github/start_models.py" in job.command
            for word in job.command:
                if word.startswith("out/") and word != job.folder and not makes_all:
                    assert {word, str(Path(word).parent)} & written, job
            if {"mdu.py", "eval.py"} & {*job.command}:
                model = os.path.relpath(parse_command(job.command).model or "toy")
                assert not model.startswith("out/") or model in written
        written |= {job.folder for job in stage}
        written |= {job.folder.replace("/start/new", "/rows") for job in stage}

def test_the_figures_are_of_all_analyses():
    _, stages = plan_of("figures")
    assert [job.command[3] for job in stages[-1]] == [*ev.ANALYSES]

@each("name, expected", [
    ("ga-lr3e-4", dict(method="ga", lr="3e-4")),
    ("dpo-lr.1-w.2-s900", dict(method="dpo", lr=".1", retain_weight=".2", steps="900")),
    ("mdu-tau0.25-w5", dict(tau="0.25", retain_weight="5")),
    ("wga-gamma2", dict(method="wga", gamma="2")),
    ("authors-w1", dict(target="authors", tau=0.5, retain_weight="1"))])
def test_a_name_of_a_run_may_end_in_numbers_of_options(name, expected):
    assert experiments.options_of(name) == expected

@each("preset", ["tofu-small", "tofu-smollm"])
def test_the_runs_of_each_report_of_two_seeds_can_be_compared(preset):
    """And no report replaces another."""
    _, stages = plan_of("tofu", f"PRESET={preset} SEEDS=2,3 METHODS=npo")
    jobs = [*itertools.chain(*stages)]
    for job in jobs:
        if "mdu.py" in job.command:
            options = vars(parse_command(job.command))
            absolute = {name: os.path.abspath(value) for name, value in options.items()
                        if str(value).startswith("out/") and name != "out"}
            write_summary(job.folder, options={**options, **absolute}, trained_on={},
                          model=os.path.abspath(job.folder))
    reports = [job for job in jobs if job.on_screen]
    for job in reports:
        folder = os.path.dirname(job.folder)
        runs = job.command[3:]
        assert os.path.commonpath([Path(run).parent for run in runs]) == folder
        ev.require_comparable([ev.read_scored_run(run, folder) for run in runs])
    assert len(reports) == {"tofu-small": 1, "tofu-smollm": 3}[preset]

@each("words, said", [
    ("demo,table", "found 'demo table' with"),
    ("rwku PRESET=tofu-dream", "found 'rwku' with PRESET='tofu-dream'; there are demo"),
    ("demo METHODS=nosuch", "found nosuch; needs one of ga, gd, .*mdu-removed"),
    ("demo METHODS=npo-x5", "found npo-x5; needs .* end in options of mdu.py"),
    ("figures HIDDEN=0.3", "HIDDEN= has no effect on figures"),
    ("demo METHODS=ga-w5", "out/demo/ga-w5: --method ga has no option --retain-weight"),
    ("demo SEEDS=a", "out/demo/a/base: argument --seed: invalid")])
def test_an_experiment_is_refused(words, said, tmp_path, monkeypatch):
    """In one line, before anything is trained."""
    name, *variables = words.split()
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(mdu.BadInput, match=said):
        experiments.main(name.split(","))
    assert not (tmp_path / "out").exists()

def printed_plan(name, variables, capsys):
    """The words that PLAN=1 prints, without the experiment's folder."""
    experiments.print_plan(*plan_of(name, variables))
    printed = capsys.readouterr().out.replace(experiments.PYTHON, "python")
    return re.sub(r"out/[^/\s]+/", "", printed).split()

def test_the_commands_of_a_small_experiment(monkeypatch, capsys):
    """It has all parts that an experiment may have.  Attacks have adapters of their own size."""
    small = experiments.Experiment(
        "mdu-original", start_model="small", original=dict(steps=1), learn=dict(steps=5),
        if_hidden=dict(lr=0.6), unlearn=dict(steps=7), attack=dict(steps=8),
        scoring=dict(samples=9), files=["forget", "retain"], **experiments.ON_CPU)
    monkeypatch.setitem(experiments.EXPERIMENTS, "demo", small)
    assert printed_plan("demo", "LORA=8 HIDDEN=0.3", capsys) == """
export CUDA_VISIBLE_DEVICES= export OMP_NUM_THREADS=1
python .github/start_models.py small out/demo-lora8-hidden0.3 locuslab/TOFU --seed 1
python mdu.py --seed 1 --method sft --model start/new --retain-only --retain rows/other.jsonl
    --steps 1 --out start/original
python mdu.py --steps 5 --seed 1 --method sft --lora 8 --model start/original
    --forget rows/forget.jsonl --retain rows/known.jsonl --lr 0.6 --prompt-dropout 0.3 --out base
python mdu.py --steps 5 --seed 1 --method sft --lora 8 --model start/original
    --forget rows/forget.jsonl --retain rows/known.jsonl --lr 0.6 --prompt-dropout 0.3
    --retain-only --out retain
python mdu.py --steps 7 --seed 1 --lora 8 --forget rows/forget.jsonl --retain rows/retain.jsonl
    --target start/original --out mdu-original
python eval.py --samples 9 --forget rows/forget.jsonl --retain rows/retain.jsonl
    base mdu-original
python eval.py --samples 9 --forget rows/forget.jsonl --retain rows/retain.jsonl retain
python mdu.py --steps 8 --method sft --seed 1 --lora 16 --forget rows/taught.jsonl
    --retain rows/retain.jsonl --model base --out taught-again/base
python mdu.py --steps 8 --method sft --seed 1 --lora 16 --forget rows/taught.jsonl
    --retain rows/retain.jsonl --model retain --out taught-again/retain
python mdu.py --steps 8 --method sft --seed 1 --lora 16 --forget rows/taught.jsonl
    --retain rows/retain.jsonl --model mdu-original --out taught-again/mdu-original
python eval.py --samples 9 --forget rows/asked.jsonl --retain rows/taught.jsonl
    taught-again/base taught-again/mdu-original
python eval.py --samples 9 --forget rows/asked.jsonl --retain rows/taught.jsonl
    taught-again/retain
python eval.py --report taught-again/base taught-again/retain taught-again/mdu-original
python eval.py --report base retain mdu-original""".split()

def test_the_commands_for_one_person_of_rwku(capsys):
    variables = "PRESET=rwku-llada SEEDS=0,3 METHODS=npo LORA=8 JOBS=2"
    assert printed_plan("rwku", variables, capsys) == f"""
python eval.py --limit 100 --data jinzhuoran/RWKU --model {mdu.LLADA} 0/base
python mdu.py --preset rwku-llada --subject 3 --lora 8 --method npo --out 3/npo
python eval.py --limit 100 3/npo
find 3/npo -name '*.safetensors' -delete
python eval.py --report 0/base 3/npo""".split()

def test_tofu_does_what_an_earlier_call_has_not_finished(capsys):
    run = {"options": {"response_length": 128}, "rows": {}}
    write_files({"out/tofu-llada-b-lora8/base/run.json": json.dumps(run)})
    for file in ("retain/config.json", "npo/config.json", "npo/eval/summary.json",
                 "mine/config.json"):  # mine was trained by hand
        write_files({f"out/tofu-llada-b-lora8/{file}": ""})
    variables = "PRESET=tofu-llada MODEL=a/b LORA=8 METHODS=npo,wga GPUS=4 JOBS=2"
    four = "python -m torch.distributed.run --nproc_per_node=4"
    options = "--preset tofu-llada --seed 1 --data locuslab/TOFU"
    assert printed_plan("tofu", variables, capsys) == f"""
{four} mdu.py --resume base
# finished: {four} mdu.py {options} --method sft --lora 8 --model a/b --retain-only --out retain
# finished: {four} mdu.py {options} --lora 8 --method npo --out npo
{four} mdu.py {options} --lora 8 --method wga --out wga
{four} eval.py base wga
{four} eval.py retain mine
python eval.py --report base retain npo wga mine""".split()

def test_a_large_model_with_adapters_is_compiled_on_one_gpu(capsys):
    assert "--compile" in printed_plan("tofu", "PRESET=tofu-qwen LORA=8", capsys)

def test_as_many_jobs_run_at_once_as_are_asked_for(monkeypatch):
    running, counts = set(), []

    class Process:
        returncode = 0
        def __init__(self, command, stdout, stderr):
            running.add(self)
            counts.append(len(running))
        def poll(self):
            running.remove(self)
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Process)
    jobs = [experiments.Job(f"out/{i}", []) for i in range(5)]
    experiments.run_stage(jobs, 2, [job.folder for job in jobs])
    assert counts == [1, 2, 1, 2, 1]

def test_where_a_job_fails_its_stage_is_the_last(tmp_path, capsys):
    """What was finished is not done again."""
    def job(name, code, finished=False):
        code += f"\nopen('out/{name}.done', 'w')"
        return experiments.Job(f"out/{name}", [sys.executable, "-c", code], finished)

    experiment, _ = plan_of("demo", "JOBS=1")
    report = experiments.Job("out/report", ["false"], on_screen=True)
    stages = [[job("earlier", "", True), job("good", ""),
               job("bad", "raise SystemExit('no such rows')"), report], [job("later", "")]]
    with pytest.raises(mdu.BadInput, match="because these failed: out/bad, out/report[.]"):
        experiments.carry_out(experiment, stages)
    assert [file.stem for file in tmp_path.glob("out/*.done")] == ["good"]
    out, err = capsys.readouterr()
    said = ("1 jobs are finished: out/earlier\n"
            "4 are to do, 1 at once: out/good out/bad out/report out/later\n"
            "out/good: finished in [0-9]+ s; jobs left: 3\n")
    assert re.fullmatch(said, out)
    assert err.splitlines() == ["out/bad: FAILED; see the end of out/bad.log",
                                "out/report: FAILED; see above"]
    assert "no such rows" in (tmp_path / "out/bad.log").read_text()

def test_the_weights_of_rwku_are_deleted_once_a_run_is_scored(tmp_path):
    def delete_job():
        return plan_of("rwku", "PRESET=rwku-llada METHODS=npo")[1][3][0]

    run = "out/rwku-llada/1/npo"
    assert not delete_job().finished
    write_files({f"{run}/{name}": "" for name in ("a.safetensors", "config.json",
                                                  "eval/summary.json")})
    assert not delete_job().finished
    subprocess.run(delete_job().command, check=True)
    assert delete_job().finished
    assert {file.name for file in (tmp_path / run).iterdir()} == {"config.json", "eval"}

def test_a_signal_ends_the_jobs_of_an_experiment(tmp_path):
    """Which the job, a program that waits, does not get itself.  It has the demo's environment."""
    (tmp_path / "job.py").write_text("""if True:
        import os, signal, time
        from pathlib import Path
        def end(*signal):
            Path("out/ended").write_text(os.environ["OMP_NUM_THREADS"])
            raise SystemExit
        signal.signal(signal.SIGTERM, end)
        Path("out/begun").touch()
        time.sleep(99)""")
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(PROJECT / ".github")!r})
        import experiments
        job = experiments.Job("out/run", [sys.executable, "job.py"])
        experiments.compare = lambda *arguments: ([[job]], [])
        experiments.mdu.run_program("experiments.py", lambda: experiments.main(["demo"]))"""
    env = {**os.environ, "OMP_NUM_THREADS": "7"}
    process = subprocess.Popen([sys.executable, "-c", script], env=env)
    while not (tmp_path / "out/begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "out/ended").read_text() == "1"

def test_the_files_of_the_small_model_have_the_rows_that_the_seed_chooses(tmp_path, monkeypatch):
    monkeypatch.setattr(mdu, "read_dataset", lambda name, config: [
        {"question": f"Who is {i}?", "answer": f"A{i % 90}"} for i in range(2900)])
    start_models.main(["small", str(tmp_path), "TOFU", "--seed", "2"])
    found = {}
    for file in (tmp_path / "rows").iterdir():
        found[file.stem] = [int(row["question"][7:-1]) for row in ev.read_lines(file)]
    assert found == {
        "forget": list(range(40, 80)), "retain": list(range(160, 320)),
        "held_out": list(range(960, 1040)), "other": list(range(2000, 2800)),
        "known": [*range(160, 320), *range(960, 1040)]}
    mdu.load_backbone(str(tmp_path / "start/new"))

# ---- The loss and the step of README.md, the wrapper of CODE.md ----
PAGE_LOSS, PAGE_STEP = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGES["README.md"])
[PAGE_DREAM] = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGES["CODE.md"])

def test_backward_equals_the_step_of_the_page():
    """With the same t and masks, and rows to retain with end padding.  The page's models return
    logits of all positions."""
    args = options("--batch-size 4 --response-length 12 --retain-weight 0.7 --seed 2")
    model, anchor = tiny_llama(0), tiny_llama(1)
    draws = mdu.draw_step(args, make_examples(), "forget", 0, model)
    forget, retain = [mdu.make_batch(model, rows) for rows in draws]
    assert forget.masked.any(1).all()  # else backward would mask one token
    assert (retain.length < retain.response.sum(1)).any()
    drawn = []  # by the page's step: for t and for the masks, below t outside of the answers
    for batch in (forget, retain):
        kept = batch.response & ~batch.masked
        drawn += [(batch.t - 0.001) / 0.999, kept.float()]
    step = dict(
        torch=torch, F=F, mdu_loss=mdu.mdu_loss, mask_id=0, retain_weight=0.7,
        model=lambda ids, real: model.lm(ids, real.long()).logits,
        anchor=lambda ids, real: anchor.lm(ids, real.long()).logits,
        ids=forget.ids, answer=forget.response, real=forget.attention_mask,
        retain_ids=retain.ids, retain_answer=retain.response, retain_real=retain.attention_mask,
        n=retain.length)
    with mock.patch.object(torch, "rand", side_effect=drawn):
        exec(PAGE_STEP, step)
    page_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses = mdu.backward(args, mdu.Models(model, anchor), *draws)
    assert losses == approx([step["loss"].item(), step["retain_loss"].item()], rel=1e-5)
    assert_close(page_grads, [p.grad for p in model.parameters()], 1e-5)
    assert PAGE_LOSS in PAGE_STEP

def test_the_page_makes_a_model_of_dream(tmp_path, monkeypatch):
    """It has the logits of all positions, MaskPredictor those of the masked ones."""
    write_checkpoint(tmp_path, "Dream")
    loaded, tokenizer = mdu.load_backbone(str(tmp_path))
    monkeypatch.setattr(mdu, "load_backbone", lambda name: (loaded, tokenizer))
    variables = {"torch": torch}
    exec(PAGE_DREAM, variables)
    ids = torch.randint(0, 200, (2, 9))
    real = torch.arange(9) < torch.tensor([[6], [9]])
    with torch.no_grad():
        assert_close(variables["model"](ids, real)[real], loaded(ids, real, real), 1e-5)
    assert variables["mask_id"] == loaded.mask_id

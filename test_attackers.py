"""Tests of the attackers of mdu.py (--attackers), on a CPU and offline.

    python -m pytest -q test_attackers.py
"""
import copy
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.update({"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import eval as ev
import mdu

torch.set_num_threads(1)
approx = pytest.approx
each = pytest.mark.parametrize
RARE = [7, 8, 11]

# ======== As in test_mdu.py ========
@pytest.fixture(autouse=True)
def before_each_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mdu.join_processes()

def options(typed="", *more):
    return mdu.parse([*typed.split(), *more])

def weights(run):
    tensors = {}
    for file in Path(run).glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors

def assert_equal_weights(a, b, tolerance=0):
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=tolerance)

def assert_close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

def metrics(run):
    lines = ev.read_lines(Path(run) / "metrics.jsonl")
    for line in lines:
        line.pop("rows_per_s", None)
    return lines

def assert_equal_runs(a, b):
    assert metrics(a) == metrics(b)
    assert_equal_weights(a, b)

def tiny_llama(seed):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.4, is_causal=False)
    torch.manual_seed(seed)
    lm = transformers.LlamaForCausalLM(config).double()
    return mdu.MaskPredictor(lm, mask_id=0, pad_id=1, end_id=1)

def slow_kl(logits, anchor_logits, tau):
    p = logits.exp() / logits.exp().sum()
    q = anchor_logits.detach().exp() / anchor_logits.detach().exp().sum()
    power = q ** tau
    return (p * (p * power.sum() / power).log()).sum()

def slow_nll(logits, target):
    return -(logits.exp()[target] / logits.exp().sum()).log()

def slow_logits(model, prompt, answer, masked):
    noised = list(answer)
    for i in masked:
        noised[i] = 0
    return model.lm(torch.tensor([prompt + noised])).logits[0, len(prompt):][masked]

def slow_masked(row, method):
    masked = [i for i, u in enumerate(row.uniform) if u < row.t]
    if method == "mdu" and not masked:
        masked = [int(row.uniform.argmin())]
    return masked

def slow_row_sft(model, row):
    """1/t sum over the masked tokens of -log p."""
    masked = slow_masked(row, "sft")
    logits = slow_logits(model, row.prompt, row.answer, masked)
    nll = torch.zeros((), dtype=torch.float64)
    for x, i in zip(logits, masked, strict=True):
        nll = nll + slow_nll(x, row.answer[i])
    return nll / float(np.float32(row.t))

def without_truth(anchor_logits, targets):
    q = anchor_logits.detach().softmax(-1)
    for probabilities, target in zip(q, targets):
        if target in RARE:
            probabilities[target] = min(probabilities.tolist())
    return (q / q.sum(-1, keepdim=True)).log()

def slow_row_mdu(args, row, model, anchor):
    masked = slow_masked(row, "mdu")
    targets = [row.answer[i] for i in masked]
    logits = slow_logits(model, row.prompt, row.answer, masked)
    prompt = row.prompt
    if args.target != "MODEL":
        prompt = [0] * len(prompt)
    anchor_logits = slow_logits(anchor, prompt, row.answer, masked)
    if args.target == "removed":
        anchor_logits = without_truth(anchor_logits, targets)
    kls = [slow_kl(x, other, args.tau) for x, other in zip(logits, anchor_logits, strict=True)]
    return torch.stack(kls).mean()

def make_examples():
    """10 to forget and 7 to retain.  The first token of a prompt names the row."""
    forget, retain = [], []
    for i in range(10):
        answer = [*range(6, 8 + i % 5), 1]
        is_rare = [token in RARE for token in answer]
        forget.append(mdu.Example([30 + i, 4], answer, is_rare, []))
        retain.append(mdu.Example([50 + i, 4, 5], answer, [True] * len(answer), []))
    return {"forget": forget, "retain": retain[:7]}

@pytest.fixture(scope="session")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "base"
    mdu.main(["--method", "sft", "--epochs", "8", "--out", str(out)])
    return out

def toy(base, out, typed=""):
    return ["--preset", "toy", "--model", str(base), "--out", str(out), *typed.split()]

# ======== Attackers ========
def with_adapters(plain, *adapters):
    """The plain model with W + 8/r B A for each linear map W.  adapters: lists of (A, B), in the
    order of the linear maps."""
    tensors = dict(plain.lm.named_parameters())
    names = {module: name for name, module in plain.lm.named_modules()}
    linears = [module for module in plain.lm.model.layers.modules()
               if isinstance(module, torch.nn.Linear)]
    for pairs in adapters:
        for linear, (A, B) in zip(linears, pairs, strict=True):
            name = f"{names[linear]}.weight"
            tensors[name] = tensors[name] + 8 / A.shape[0] * B @ A
    return SimpleNamespace(lm=partial(torch.func.functional_call, plain.lm, tensors))

def slow_adamw(tensors, grads, state, lr):
    """A step of Adam with a gradient that is clipped to norm 1.  state: [step, means, squares]."""
    state[0] += 1
    norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
    for tensor, grad, mean, square in zip(tensors, grads, state[1], state[2], strict=True):
        grad = grad / max(1, norm)
        mean.copy_(0.9 * mean + 0.1 * grad)
        square.copy_(0.999 * square + 0.001 * grad ** 2)
        unbiased_mean = mean / (1 - 0.9 ** state[0])
        unbiased_square = square / (1 - 0.999 ** state[0])
        tensor.data -= lr * unbiased_mean / (unbiased_square.sqrt() + 1e-8)
    return norm

def recorded_draws(monkeypatch):
    """A list of (split, Draw), to which every row is added that is drawn from now on."""
    drawn = []
    draw_example = mdu.draw_example

    def record(args, examples, split, index, model):
        draw = draw_example(args, examples, split, index, model)
        drawn.append((split, draw))
        return draw
    monkeypatch.setattr(mdu, "draw_example", record)
    return drawn

class SlowAttacker:
    """The adapters as they are drawn, and a state of Adam."""
    def __init__(self, attacker):
        self.pairs = [(A.clone(), B.clone()) for A, B in attacker.adapters.values()]
        self.tensors = [tensor for pair in self.pairs for tensor in pair]
        self.state = [0, [torch.zeros_like(x) for x in self.tensors],
                      [torch.zeros_like(x) for x in self.tensors]]

    def train(self, with_attacker, rows):
        for tensor in self.tensors:
            tensor.requires_grad_(True)
        losses = [slow_row_sft(with_attacker(self.pairs), row) for row in rows]
        grads = torch.autograd.grad(torch.stack(losses).mean(), self.tensors)
        for tensor in self.tensors:
            tensor.requires_grad_(False)
        return slow_adamw(self.tensors, grads, self.state, lr=3e-3)

@each("typed", ["--target removed", "--target removed --lora 3", "--target paper --tau 0.5",
                "--target MODEL --lora 2 --checkpoint-activations"])
def test_attack_equals_a_slow_loop(typed, monkeypatch):
    """Four turns of an attacker, in float64: its adapters, the loss, and the gradient that is added
    to the model's own, four times that of the loss."""
    args = options(f"{typed} --attackers 2 --batch-size 3 --response-length 9")
    draw_adapters = mdu.draw_adapters

    def draw_in_float64(model, r, seed):
        adapters = draw_adapters(model, r, seed)
        return {linear: (A.double(), B.double()) for linear, (A, B) in adapters.items()}
    monkeypatch.setattr(mdu, "draw_adapters", draw_in_float64)
    drawn = recorded_draws(monkeypatch)

    # Theta; the same without hooks, with theta's own adapters written out; theta0; the anchor.
    model = tiny_llama(0)
    mdu.hook_adapters(model)
    if args.lora:
        mdu.add_adapters(model, args.lora, seed=5)
        own = [[(linear.A, linear.B) for linear in mdu.linear_maps(model)]]
        trained = [p for pair in own[0] for p in pair]
        theta0 = mdu.without_adapters(model)
        plain = slow_theta0 = tiny_llama(0)
    else:
        own = []
        trained = list(model.parameters())
        theta0 = slow_theta0 = tiny_llama(1)
        plain = model  # its hooks do nothing while no attacker is on
    if args.checkpoint_activations:
        model.train().lm.activation_checkpointing_enable()
    anchor, slow_anchor = theta0, slow_theta0
    if args.target == "MODEL":
        anchor = slow_anchor = tiny_llama(2)
    for p in trained:
        p.data += 0.1 * torch.randn_like(p)
    with_attacker = partial(with_adapters, plain, *own)

    attacker, _ = mdu.new_attacker(model, 1)
    slow = None
    norms = []
    for step in (1, 3, 5, 7):  # of two attackers, number 1 is on in every second step
        drawn.clear()
        for p in trained:
            p.grad = torch.ones_like(p)
        before = [p.clone() for p in trained]
        loss = mdu.attack(args, make_examples(), model, theta0, anchor, attacker, step)
        if slow is None:  # its A is that of the seed, and B was 0
            slow = SlowAttacker(attacker)
            fresh = attacker_at_start(args, model)
            for pair, (A, B) in zip(slow.pairs, fresh, strict=True):
                pair[0].copy_(A)
                pair[1].copy_(B)
        taught = [draw for split, draw in drawn if split in ("taught", "retain")]
        assert len(taught) == 2 * 3
        norms.append(slow.train(with_attacker, taught))
        assert_close(attacker.tensors, slow.tensors, 1e-6)
        rows = [draw for split, draw in drawn if split == "forget"]
        assert len(rows) == 3
        slow_model = with_attacker(slow.pairs)
        losses = [slow_row_mdu(args, row, slow_model, slow_anchor) for row in rows]
        slow_loss = torch.stack(losses).mean()
        assert loss == approx(slow_loss.item(), rel=1e-6)
        grads = torch.autograd.grad(4 * slow_loss, trained)
        for p, old, grad in zip(trained, before, grads, strict=True):
            assert grad.any()
            assert_close(p.grad, 1 + grad, 1e-5)
            assert torch.equal(p, old)
    assert max(norms) > 1  # else clipping would not be seen

def attacker_at_start(args, model):
    """The adapters of attacker 1 at the beginning of a run."""
    rng = mdu.rng_for(args.seed, "attacker 1", 0)
    rng.permutation(10)
    return mdu.draw_adapters(model, 16, int(rng.integers(2**31))).values()

def test_attack_teaches_a_quarter_of_the_rows_and_asks_for_the_others(monkeypatch):
    """Attackers take turns; each starts anew after its life, at another time than the others, and
    is then taught other rows, with other adapters."""
    args = options("--attackers 2 --batch-size 3 --response-length 9 --target paper")
    monkeypatch.setattr(mdu, "ATTACKER_LIFE", 4)
    drawn = recorded_draws(monkeypatch)
    started = []
    start_anew = mdu.start_anew

    def record(model, attacker, seed):
        start_anew(model, attacker, seed)
        assert not any(tensor.any() for tensor in attacker.tensors[1::2])  # B
        of_adam = [attacker.optimizer.state[tensor] for tensor in attacker.tensors]
        assert not any(x.any() for state in of_adam for x in state.values())
        started.append(step)
        adapters.append(attacker.tensors[0].clone())
    monkeypatch.setattr(mdu, "start_anew", record)
    model = tiny_llama(0)
    mdu.hook_adapters(model)
    attackers = [mdu.new_attacker(model, number)[0] for number in (0, 1)]
    adapters = []
    taught_at = []
    asked = set()
    for step in range(20):
        drawn.clear()
        mdu.attack(args, make_examples(), model, model, model, attackers[step % 2], step)
        taught = {draw.prompt[0] for split, draw in drawn if split == "taught"}
        others = {draw.prompt[0] for split, draw in drawn if split == "forget"}
        assert len(taught) == 2  # a quarter of 10 is 2.5
        assert others
        assert not taught & others
        taught_at.append(taught)
        asked.update(others)
    assert asked == set(range(30, 40))
    # Number 0 starts at steps 0, 8, 16; number 1 at step 1, then at its turns 2, 6, ...
    assert started == [0, 1, 5, 8, 13, 16]
    for number, starts in ((0, [0, 8, 16, 20]), (1, [1, 5, 13, 21])):
        lives = []
        for start, end in zip(starts, starts[1:]):
            sets = [taught_at[step] for step in range(start, end, 2) if step < 20]
            assert all(rows == sets[0] for rows in sets)
            lives.append(sets[0])
        assert lives[0] != lives[1] or lives[1] != lives[2]
    for i, a in enumerate(adapters):
        for b in adapters[:i]:
            assert not torch.equal(a, b)

@each("typed", ["--lora 2", "--lr 1e-3", "--lr 1e-3 --dtype bfloat16", "--dtype bfloat16 --lora 2"])
def test_attackers_alone_do_not_change_the_model(typed, base, tmp_path, monkeypatch):
    """With weight 0, the run is the one without attackers; and is saved without them."""
    typed += " --target removed --epochs 2 --limit 16"
    mdu.main(toy(base, tmp_path / "without", typed))
    monkeypatch.setattr(mdu, "ATTACK_WEIGHT", 0.0)
    mdu.main(toy(base, tmp_path / "with", f"{typed} --attackers 2"))
    lines = metrics(tmp_path / "with")
    assert {line.pop("attacked") > 0 for line in lines} == {True}
    assert lines == metrics(tmp_path / "without")
    assert_equal_weights(tmp_path / "with", tmp_path / "without")

def test_attackers_are_off_by_default(base, tmp_path, monkeypatch):
    for name in ("attack", "new_attacker", "train_attacker", "hook_adapters"):
        monkeypatch.setattr(mdu, name, mock.Mock(side_effect=AssertionError))
    for typed in ("", "--attackers 0", "--method npo"):
        args = options(*[""], *toy(base, tmp_path / f"run{len(typed)}", f"{typed} --epochs 1"))
        assert not args.attackers
        mdu.main(toy(base, tmp_path / f"run{len(typed)}", f"{typed} --epochs 1"))
    assert options("--model M --forget F --attackers 3").attackers == 3

@each("typed", ["--lora 2 --dtype bfloat16", "--lr 1e-3 --dtype bfloat16", "--lr 1e-3"])
def test_train_with_attackers_is_stopped_and_resumed(typed, base, tmp_path, monkeypatch):
    """As one that was not stopped, bit for bit.  At step 5 of 8 it stops; attacker 1 is then in the
    midst of its life."""
    monkeypatch.setattr(mdu, "ATTACKER_LIFE", 3)
    typed += " --target removed --attackers 2 --epochs 4 --limit 16 --checkpoint-every 5"
    mdu.main(toy(base, tmp_path / "whole", typed))
    with monkeypatch.context() as stopped:
        stopped.setattr(mdu, "append_metrics", stop_at(6))
        with pytest.raises(KeyboardInterrupt):
            mdu.main(toy(base, tmp_path / "broken", typed))
    assert [folder.name for folder in tmp_path.glob("broken/checkpoint-*")] == [
        "checkpoint-00000005"]
    mdu.main(["--resume", f"{tmp_path}/broken"])
    assert len(metrics(tmp_path / "whole")) == 8
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")

def stop_at(step):
    append_metrics = mdu.append_metrics

    def append_or_stop(out, values):
        if values["step"] == step:
            raise KeyboardInterrupt
        append_metrics(out, values)
    return append_or_stop

def test_attack_with_weights_that_fsdp_casts(monkeypatch):
    """In bfloat16, FSDP keeps the weights in float32: the gradient is about that of float32.  The
    attacker's adapters are float32 and are no parameters of the model."""
    args = options("--attackers 2 --batch-size 4 --response-length 9 --target paper")
    grads = []
    for compute_dtype in (torch.float32, torch.bfloat16):
        model = tiny_llama(0).float()
        anchor = tiny_llama(1).float()
        mdu.hook_adapters(model)
        mdu.shard(model, torch.float32, compute_dtype)
        names = [name for name, _ in model.named_parameters()]
        attacker, _ = mdu.new_attacker(model, 0)
        for step in (0, 2, 4):
            mdu.attack(args, make_examples(), model, anchor, anchor, attacker, step)
        assert {tensor.dtype for tensor in attacker.tensors} == {torch.float32}
        assert any(tensor.any() for tensor in attacker.tensors[1::2])
        assert [name for name, _ in model.named_parameters()] == names
        grads.append(torch.cat([mdu.gathered(p.grad).flatten() for p in model.parameters()]))
    assert grads[0].norm() > 0.01
    assert torch.cosine_similarity(*grads, dim=0) > 0.99

@each("typed, message", [
    ("--target authors", "give another --target"),
    ("--retain-weight 0", "needed are two rows to forget"),
    ("--limit 1", "needed are two rows to forget")])
def test_check_attackers_refuses(typed, message, base, tmp_path):
    with pytest.raises(mdu.BadInput, match=message):
        mdu.main(toy(base, tmp_path / "run", f"--attackers 2 {typed}"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(mdu.BadInput, match="npo has no option --attackers"):
        options("--method npo --attackers 2")

# ---- Does it help? ----
def small_llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.2, is_causal=False)
    torch.manual_seed(2)
    lm = transformers.LlamaForCausalLM(config)
    return mdu.MaskPredictor(lm, mask_id=0, pad_id=1, end_id=1)

def eight_rows(first):
    """Of each, the second token of the answer is its fact, which no other row has."""
    rows = []
    for i in range(first, first + 8):
        rows.append(mdu.Example([i, 4], [5, 20 + i, 1], [False, True, False], []))
    return rows

def train_small(typed, model, examples, steps, lr, theta0=None, attackers=()):
    """mdu.train without its files."""
    args = options(f"{typed} --response-length 3 --out run")
    split = "train" if args.method == "sft" else "forget"
    optimizer, _ = mdu.new_optimizer(dict(model.named_parameters()), lr)
    for step in range(steps):
        forget, retain = mdu.draw_step(args, examples, split, step, model)
        mdu.backward(args, model, theta0, theta0, forget, retain)
        if attackers:
            mdu.attack(args, examples, model, theta0, theta0, attackers[step % 2], step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

@torch.no_grad()
def mean_p(model, rows):
    """The mean probability of the rows' facts, with the question and nothing of the answer."""
    p = []
    for row in rows:
        logits = slow_logits(model, row.prompt, row.answer, [0, 1, 2])
        p.append(logits.softmax(-1)[1, row.answer[1]].item())
    return np.mean(p)

def test_attack_keeps_away_what_an_attack_brings_back():
    """Two of eight rows are taught again; the facts of the other six come back to a model that
    unlearned without attackers, and not to one that unlearned with them."""
    forget, retain = eight_rows(6), eight_rows(14)
    start = small_llama()
    train_small("--method sft --batch-size 8", start, {"train": forget + retain}, 300, 1e-2)
    assert mean_p(start, forget) > 0.9
    back = []
    for typed, n_attackers in (("", 0), ("--attackers 2", 2)):
        typed += " --target removed --retain-weight 5 --prompt-dropout 0.5 --batch-size 4"
        model = copy.deepcopy(start)
        mdu.hook_adapters(model)
        attackers = [mdu.new_attacker(model, number)[0] for number in range(n_attackers)]
        train_small(typed, model, {"forget": forget, "retain": retain}, 100, 3e-3, start,
                    attackers)
        assert mean_p(model, forget) < 0.1
        assert mean_p(model, retain) > 0.7
        taught = forget[:2]
        rows = {"train": taught + retain[:2]}
        train_small("--method sft --batch-size 8", model, rows, 60, 1e-3)
        assert mean_p(model, taught) > 0.9
        back.append(mean_p(model, forget[2:]))
    assert back[0] > 0.4
    assert back[1] < 0.1

"""Masked Diffusion Unlearning (MDU) and its six baselines, in one file.

A masked diffusion language model predicts masked response tokens y_i from a prompt x and a partly masked response y_t.
Fine-tuning moved its prediction from the prompt-masked one, p(.|m, y_t), to p(.|x, y_t).  MDU moves it back (Eq. 5):

    min_theta  E_{(x,y), t, y_t}  1/|M_t| sum_{i in M_t}  KL( p_theta(.|x, y_t) || p_theta0(.|m, y_t)^tau / Z_i )

with theta0 frozen and tau in [0, 1] (0: uniform target; 1: the prompt-masked anchor), plus lambda times the fine-tuning
loss on a retain set.  Paper: Lee et al., "Machine Unlearning for Masked Diffusion Language Models", 2026.

    python mdu.py                                              # a toy world on a CPU: base model, then MDU at tau 1
    torchrun --nproc_per_node=4 mdu.py --method mdu --tau 1    # the same steps on 4 processes
"""
import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import namedtuple
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")


# ---- Forward process q(y_t | y): which response tokens are masked ----
T_MIN = 0.001  # t ~ U[0.001, 1]: the 1/t of L_sft is unbounded at 0


def mask_tokens(ids, response, mask_id, t_uniform, token_uniforms, at_least_one=False):
    """Mask response tokens at a noise level t, both given by uniform draws (Section 2; Algorithm 1, line 1).

        t = T_MIN + (1 - T_MIN) t_uniform;  token i is masked iff token_uniforms_i < t

    Args: ids (B, T); response (B, T) bool, may be masked; t_uniform (B,) and token_uniforms (B, T) in [0, 1);
    at_least_one: if no token of a row is drawn, mask one, uniformly (Eq. 5 divides by |M_t|); a bool or (B, 1) bool.
    Returns: noised (B, T); masked (B, T) bool; t (B,), so that 1/t is the weight of L_sft.
    """
    t = T_MIN + (1 - T_MIN) * t_uniform
    token_uniforms = token_uniforms.masked_fill(~response, math.inf)
    masked = token_uniforms < t[:, None]
    lowest = response & (token_uniforms == token_uniforms.amin(1, keepdim=True))  # masked, if any token is
    masked = masked | (lowest & at_least_one)
    return ids.masked_fill(masked, mask_id), masked, t


def mask_prompt(noised, response, attention_mask, mask_id):
    """(x, y_t) -> (m, y_t), the anchor's input: mask all prompt tokens, those of the chat template too, not padding."""
    return noised.masked_fill(attention_mask & ~response, mask_id)


# ---- Losses: functions of tensors and floats, one value per sequence, minimised as returned ----
def mdu_loss(logits, anchor_logits, masked, tau):
    """Masked Diffusion Unlearning: KL from the prediction to the prompt-masked anchor (Eq. 5; Algorithm 1, line 5).

        L_b = 1/|M_b| sum_{i in M_b} KL( p_i || softmax(tau * a_i) ),   p_i = softmax(logits_i)

    KL(p || q) = sum_v p(v) (log p(v) - log q(v)), in nats.  softmax(tau * a) is p_anchor^tau / Z.  At tau = 0 it is
    uniform, L_b = log V - mean entropy of p, and no anchor is needed.

    Args: logits (M, V), finite, p_theta(.|x, y_t) at the masked positions, row-major; anchor_logits (M, V),
    p_theta0(.|m, y_t) there, None iff tau == 0; masked (B, T) bool with M true; tau in [0, 1].
    Returns: (B,), each the mean over the sequence's own masked positions; 0 if it has none.
    Gradient: to logits only.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)  # compare bf16 logits in fp32
    logp = F.log_softmax(logits, dim=-1, dtype=dtype)  # (M, V)
    if tau == 0:
        logq = -torch.tensor(logits.shape[-1], dtype=dtype).log()  # uniform: -log V
    else:
        logq = F.log_softmax(tau * anchor_logits.detach().to(dtype), dim=-1)  # (M, V)
    kl = (logp.exp() * (logp - logq)).sum(-1)  # (M,)
    kl = torch.zeros(masked.shape, dtype=dtype, device=kl.device).masked_scatter(masked, kl)  # (B, T)
    return kl.sum(1) / masked.sum(1).clamp(min=1)


def sft_loss(logits, targets, masked, t):
    """Masked-diffusion fine-tuning loss of one pair (the integrand of Eq. 2), the NLL of every baseline below.

        L_b = 1/t_b sum_{i in M_b} -log p(y_i | x, y_t)

    Args: logits (M, V); targets (M,) = ids[masked]; masked (B, T) bool; t (B,) from mask_tokens.
    Returns: (B,) in nats per sequence, a sum over tokens and not a mean; 0 if nothing is masked.
    Gradient: to logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    nll = F.cross_entropy(logits.to(dtype), targets, reduction="none")  # (M,)
    return torch.zeros(masked.shape, dtype=dtype, device=nll.device).masked_scatter(masked, nll).sum(1) / t


def ga_loss(nll):
    """Gradient ascent: -nll.  nll (B,) from sft_loss -> (B,).  With a retain loss it is gradient difference (GD)."""
    return -nll


def npo_loss(nll, nll_ref, beta):
    """Negative preference optimisation: -2/beta log sigmoid(beta (nll - nll_ref)), one ratio per sequence.

    Args: nll, nll_ref (B,) of the model and of the frozen theta0 on the same y_t; beta > 0.
    Returns: (B,).  Gradient: to nll only.  For beta -> 0 it is GA's.
    """
    return -2 / beta * F.logsigmoid(beta * (nll - nll_ref.detach()))


def simnpo_loss(nll, length, beta, delta):
    """Simple NPO: -2/beta log sigmoid(beta (nll / length - delta)); no reference model.

    Args: nll (B,); length (B,) = |y|, the response tokens; beta > 0; delta >= 0 in nats per token.  Returns: (B,).
    """
    return -2 / beta * F.logsigmoid(beta * (nll / length - delta))


def wga_loss(logits, targets, masked, gamma):
    """Weighted gradient ascent: -sum_{i in M_b} w_i (-log p(y_i)), with w_i = p(y_i)^gamma held constant.

    Args: as sft_loss, without its 1/t; gamma >= 0.  Returns: (B,).  Gradient: to logits, through log p only.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    nll = F.cross_entropy(logits.to(dtype), targets, reduction="none")  # (M,)
    weighted = (-gamma * nll).exp().detach() * nll  # p^gamma = exp(-gamma nll)
    return -torch.zeros(masked.shape, dtype=dtype, device=nll.device).masked_scatter(masked, weighted).sum(1)


def dpo_loss(nll_win, nll_win_ref, nll_lose, nll_lose_ref, beta):
    """Direct preference optimisation: -log sigmoid(beta (r_win - r_lose)), r = nll_ref - nll.

    Args: (B,) each, of the preferred (perturbed) answer and of the one to forget; beta > 0.
    Returns: (B,).  Gradient: to nll_win and nll_lose.
    """
    return -F.logsigmoid(beta * ((nll_win_ref.detach() - nll_win) - (nll_lose_ref.detach() - nll_lose)))


# ---- The step: draw rows, collate, mask, forward, loss ----
class MaskPredictor(nn.Module):
    """p_theta: logits at chosen positions only, (M, V) instead of (B, T, V).

    lm: a transformers model without a causal mask; end_id: the end-of-turn token; shift: the logits of position i are
    the output at i - 1 (position 0 uses its own); by_entropy: sampling fixes the tokens of lowest entropy first, not
    those of highest probability.
    """

    def __init__(self, lm, mask_id, pad_id, end_id, shift=False, by_entropy=False, folder=None):
        super().__init__()
        self.lm, self.mask_id, self.pad_id, self.end_id = lm, mask_id, pad_id, end_id
        self.shift, self.by_entropy, self.folder, self.branches = shift, by_entropy, folder, True
        if lm.config.hidden_size < 128:
            torch.set_num_threads(1)  # for the toy, more threads are slower

    def forward(self, ids, attention_mask, positions, branches=True):
        """ids (B, T), attention_mask (B, T) bool, positions (B, T) bool -> logits (M, V) at positions, row-major."""
        self.branches = branches
        padding = None if attention_mask.all() else attention_mask.long()  # None: a faster attention kernel
        hidden = self.lm.model(ids, attention_mask=padding, use_cache=False).last_hidden_state  # (B, T, D)
        self.branches = True  # as the backward pass expects if it recomputes activations
        if self.shift:
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        return self.lm.lm_head(hidden[positions])  # (M, D) -> (M, V)


def collate(pairs, pad_id):
    """Right-pad (prompt ids, response ids) pairs -> ids (B, T); response (B, T) bool; attention_mask (B, T) bool."""
    B, T = len(pairs), max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.full((B, T), pad_id)  # never attended to, unlike the pad_id tokens of a response
    response, attention_mask = torch.zeros(2, B, T, dtype=torch.bool)
    for b, (prompt, answer) in enumerate(pairs):
        n, end = len(prompt), len(prompt) + len(answer)
        ids[b, :end] = torch.tensor(prompt + answer)
        response[b, n:end] = True
        attention_mask[b, :end] = True
    return ids.to(DEVICE), response.to(DEVICE), attention_mask.to(DEVICE)


STREAMS = ("forget", "preferred", "retain", "forget order", "retain order", "preferred answer", "diagnose")
Example = namedtuple("Example", "prompt response t_uniform token_uniforms")


def rng_for(args, stream, index):
    """Random numbers that depend on seed, stream and index only, not on the processes."""
    return np.random.default_rng([args.seed, STREAMS.index(stream), index])


def shuffled(args, stream, index, rows):
    """Row `index` of an endless pass over `rows`, with a new order every epoch."""
    epoch, i = divmod(index, len(rows))
    return rows[rng_for(args, f"{stream} order", epoch).permutation(len(rows))[i]]


def draw_example(args, stream, index, pair, pad_id=None):
    """Draw the noise of example `index` of a stream; with a pad_id, pad its response to a random length."""
    rng, step_size = rng_for(args, stream, index), args.batch_size * args.grad_accum
    prompt, response = pair
    if pad_id is not None:  # the model then learns to end an answer on a canvas of any length
        response = response + [pad_id] * int(rng.integers(max(1, args.response_length - len(response) + 1)))
    t_uniform = (index % step_size + rng.random()) / step_size  # stratified: the t of a step cover [0, 1) evenly
    return Example(prompt, response, t_uniform, rng.random(len(response)))


def draw_step(args, pools, step, pad_id):
    """This process's rows of a step -> (forget, retain), sorted by length to save padding.

    forget: list of [Example], for dpo [Example, Example of a perturbed answer at the same t]; retain: [Example].
    """
    step_size, forget, retain = args.batch_size * args.grad_accum, [], []
    for k in range(step * step_size, (step + 1) * step_size):
        pair, *wrong = shuffled(args, "forget", k, pools["forget"])
        group = [draw_example(args, "forget", k, pair, pad_id if args.method == "sft" else None)]
        if args.method == "dpo":
            pair = wrong[rng_for(args, "preferred answer", k).integers(len(wrong))]
            group.append(draw_example(args, "preferred", k, pair)._replace(t_uniform=group[0].t_uniform))
        forget.append(group)
        if args.retain_weight:
            pair, *_ = shuffled(args, "retain", k, pools["retain"])
            retain.append(draw_example(args, "retain", k, pair, pad_id))
    forget.sort(key=lambda group: sum(len(e.prompt + e.response) for e in group))
    retain.sort(key=lambda e: len(e.prompt + e.response))
    return forget[RANK::WORLD], retain[RANK::WORLD]


def noise(predictor, examples, n_kl):
    """Collate examples and mask them; the first n_kl get at least one mask each (Eq. 5 divides by |M_t|)."""
    ids, response, attention_mask = collate([(e.prompt, e.response) for e in examples], predictor.pad_id)
    t_uniform = torch.tensor([e.t_uniform for e in examples], dtype=torch.float64, device=DEVICE)
    token_uniforms = torch.zeros(ids.shape, dtype=torch.float64, device=DEVICE)
    token_uniforms[response] = torch.tensor(np.concatenate([e.token_uniforms for e in examples]), device=DEVICE)
    at_least_one = torch.arange(len(examples), device=DEVICE)[:, None] < n_kl  # (B, 1)
    return ids, response, attention_mask, *mask_tokens(
        ids, response, predictor.mask_id, t_uniform, token_uniforms, at_least_one)


def step_losses(args, predictor, reference, forget, retain):
    """Algorithm 1, lines 1-11, for a micro-batch -> (forget losses, retain losses), one per sequence (dpo: pair)."""
    # 1. Forward process: forget rows, dpo's preferred answers, retain rows.
    examples = [group[0] for group in forget] + [group[1] for group in forget if len(group) > 1] + retain
    n = len(examples) - len(retain)
    ids, response, attention_mask, noised, masked, t = noise(predictor, examples, n if args.method == "mdu" else 0)
    # 2. One forward pass of theta for forget and retain rows.
    logits = predictor(noised, attention_mask, masked)  # (M, V)
    m, targets = int(masked[:n].sum()), ids[masked]
    retain_loss = sft_loss(logits[m:], targets[m:], masked[n:], t[n:])
    logits, targets = logits[:m], targets[:m]
    response, attention_mask, noised, masked, t = (x[:n] for x in (response, attention_mask, noised, masked, t))
    # 3. The loss of the forget rows; the frozen theta0 sees the same y_t, for mdu without the prompt.
    if args.method == "mdu":
        anchor_logits = None
        if args.tau > 0:
            prompt_masked = mask_prompt(noised, response, attention_mask, predictor.mask_id)
            with torch.no_grad():
                anchor_logits = reference(prompt_masked, attention_mask, masked)
        return mdu_loss(logits, anchor_logits, masked, args.tau), retain_loss
    if args.method == "wga":
        return wga_loss(logits, targets, masked, args.gamma), retain_loss
    nll = sft_loss(logits, targets, masked, t)
    if args.method in ("npo", "dpo"):
        with torch.no_grad():
            nll_ref = sft_loss(reference(noised, attention_mask, masked), targets, masked, t)
    if args.method == "npo":
        return npo_loss(nll, nll_ref, args.beta), retain_loss
    if args.method == "dpo":
        (lose, win), (lose_ref, win_ref) = nll.chunk(2), nll_ref.chunk(2)
        return dpo_loss(win, win_ref, lose, lose_ref, args.beta), retain_loss
    if args.method == "simnpo":
        return simnpo_loss(nll, response.sum(1), args.beta, args.delta), retain_loss
    if args.method in ("ga", "gd"):  # gd has a retain loss, ga has none
        return ga_loss(nll), retain_loss
    return nll, retain_loss  # sft


@torch.no_grad()
def diagnose(args, predictor, reference, pools):
    """The convergence diagnostic: mean KL, in nats per masked token, from p_theta(.|x, y_t) to three distributions.

    "base": p_theta0(.|x, y_t); "anchor": p_theta0(.|m, y_t); "uniform".  Mean over a row's masked tokens, then over the
    forget rows.  A row's y_t is the same at every call.
    """
    totals = torch.zeros(3, dtype=torch.float64)
    examples = [draw_example(args, "diagnose", i, pair) for i, (pair, *_) in enumerate(pools["forget"])]
    for batch in (examples[i:i + args.batch_size] for i in range(0, len(examples), args.batch_size)):
        _, response, attention_mask, noised, masked, _ = noise(predictor, batch, len(batch))
        logits, base = (model(noised, attention_mask, masked) for model in (predictor, reference))
        prompt_masked = mask_prompt(noised, response, attention_mask, predictor.mask_id)
        targets = ((base, 1), (reference(prompt_masked, attention_mask, masked), 1), (None, 0))
        totals += torch.stack([mdu_loss(logits, target, masked, tau).sum() for target, tau in targets]).cpu()
    return dict(zip(("base", "anchor", "uniform"), (totals / len(examples)).tolist()))


def learning_rate(args, step, steps):
    """5% linear warm-up (not in the paper), then cosine to 0 (Appendix B.4)."""
    warmup = max(1, steps // 20)
    progress = max(0, step - warmup) / max(1, steps - warmup)
    return args.lr * min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * progress)))


# ---- Options: default < method < preset < command line ----
DEFAULTS = dict(
    dict.fromkeys("tau beta gamma delta model data subject forget retain limit out".split()), method="mdu", lora=0,
    retain_weight=0.0, retain_only=False, overwrite=False, resume=False, checkpoint_every=500, epochs=5, lr=1e-5,
    batch_size=4, grad_accum=1, seed=1, response_length=128, dtype="bfloat16" if GPU else "float32",
    checkpoint_activations=False, diagnose=False)
METHOD_OPTIONS = {  # the options that only some methods use, with their defaults
    "mdu": dict(tau=1.0, retain_weight=1.0),
    "ga": {}, "gd": dict(retain_weight=1.0),
    "npo": dict(beta=0.2, retain_weight=1.0),
    "simnpo": dict(beta=4.5, delta=0.0, retain_weight=1.0),  # beta is not in the paper
    "wga": dict(gamma=1.0, retain_weight=1.0),
    "dpo": dict(beta=0.1, retain_weight=1.0),
    "sft": dict(retain_only=False),
}
LLADA = dict(model="GSAI-ML/LLaDA-8B-Instruct@08b83a6feb34df1a6011b80c3c00c7563e963b07")
DREAM = dict(model="Dream-org/Dream-v0-Instruct-7B@05334cb9faaf763692dcf9d8737c642be2b2a6ae")
QWEN = dict(model="dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1")
TOFU = dict(data="locuslab/TOFU", grad_accum=4)
RWKU = dict(data="jinzhuoran/RWKU", epochs=3, retain_weight=0.0)
PRESETS = {  # options of the unlearning methods; "sft": those that differ for sft
    "toy": dict(data="toy", epochs=100, lr=5e-4, batch_size=8, response_length=12,
                sft=dict(epochs=170, lr=3e-3, batch_size=32)),
    "tofu-llada": dict(TOFU, epochs=9, sft=dict(LLADA, epochs=1000, lr=2e-5)),
    "tofu-dream": dict(TOFU, epochs=5, sft=dict(DREAM, epochs=300, lr=2e-5)),
    "tofu-qwen": dict(TOFU, epochs=5, lr=5e-5, sft=dict(QWEN, epochs=200, lr=1e-4)),  # ours; untuned
    "rwku-llada": dict(RWKU, **LLADA, sft={}),
    "rwku-dream": dict(RWKU, **DREAM, sft={}),
    "rwku-qwen": dict(RWKU, **QWEN, lr=5e-5, sft={}),
    "own": dict(sft=dict(lr=2e-5)),  # one's own model
}


def require(ok, message):
    """Refuse bad input; run_program prints the message in one line."""
    if not ok:
        raise ValueError(message)


def number(kind, low, high=math.inf):
    """A type for argparse: an int or a float in [low, high]."""
    def convert(text):
        require(low <= kind(text) <= high, text)
        return kind(text)
    convert.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"
    return convert


def parse(argv=None):
    """Command line -> options.  ValueError if one is unknown or would have no effect."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, message)
    add, count, weight = parser.add_argument, number(int, 1), number(float, 0, 1e6)
    add("--preset", choices=PRESETS, help="of PRESETS [toy; with --model: own]")
    add("--method", choices=METHOD_OPTIONS, help="loss; sft trains the base model [mdu]")
    add("--tau", type=number(float, 0, 1), help="mdu: 0 (uniform target) to 1 (prompt-masked anchor) [1]")
    add("--beta", type=number(float, 1e-6, 1e6), help="npo, simnpo, dpo: inverse temperature")
    add("--gamma", type=weight, help="wga: exponent of the token confidence")
    add("--delta", type=weight, help="simnpo: margin, in nats per token")
    add("--retain-weight", type=weight, help="lambda, the weight of the retain loss")
    add("--retain-only", action="store_true", help="sft without the forget rows (retain model)")
    add("--lora", type=number(int, 0), metavar="RANK", help="train branches of this rank, with 10 times the lr")
    add("--model", help="start model: folder or OWNER/NAME[@REVISION] [base, next to --out]")
    add("--data", help="'toy', or TOFU or RWKU as a folder or hub name")
    add("--subject", help="RWKU: person to forget, by name or number")
    add("--forget", help="JSONL to forget, of question and answer, or prompt and response")
    add("--retain", help="JSONL to retain, with --forget or --subject")
    add("--limit", type=count, help="rows of a split at most")
    add("--out", help="folder of the run [out/PRESET/METHOD]")
    add("--overwrite", action="store_true", help="replace the run in --out")
    add("--resume", metavar="RUN", help="continue this run from its newest checkpoint")
    add("--checkpoint-every", type=count, help="steps [500]")
    add("--epochs", type=number(float, 1e-6, 1e6), help="passes over the forget set (sft: all rows)")
    add("--lr", type=number(float, 0, 1), help="peak learning rate")
    add("--batch-size", type=count, help="rows to forget in one forward pass of one process")
    add("--grad-accum", type=count, help="batch-size x grad-accum rows make a step")
    add("--seed", type=number(int, 0), help="seed of every random draw [1]")
    add("--dtype", choices=("float32", "bfloat16"), help="of the computation [bfloat16 on a GPU]")
    add("--response-length", type=count, help="longest padding of sft and retain responses")
    add("--checkpoint-activations", action="store_true", help="less memory, more time")
    add("--diagnose", action="store_true", help="log the KLs to base, anchor and uniform")
    given = vars(parser.parse_args(argv))  # what was typed, and nothing else
    if "resume" in given:
        require(len(given) == 1, "--resume RUN: its options are in RUN/run.json; give no other")
        return argparse.Namespace(**{**read_run(given["resume"])["options"], "out": given["resume"], "resume": True})
    preset, method = given.get("preset", "own" if "model" in given else "toy"), given.get("method", "mdu")
    options = {**DEFAULTS, **METHOD_OPTIONS[method], **PRESETS[preset], "preset": preset}
    for_sft = options.pop("sft")
    options.update(for_sft if method == "sft" else {})
    options["lr"] *= 10 if given.get("lora") else 1
    args = argparse.Namespace(**{**options, **given})
    unused = {"tau", "beta", "gamma", "delta", "retain_weight", "retain_only"} - {*METHOD_OPTIONS[method]}
    if method == "sft":
        unused |= {"diagnose"} if args.model else {"diagnose", "lora"}
    if not args.subject:
        unused.add("data" if args.forget else "retain")
    for name in unused & {*given}:
        parser.error(f"--{name.replace('_', '-')} has no effect with these options (method {method})")
    require(method != "gd" or args.retain_weight, "--retain-weight 0: gd without retain loss is ga")
    if args.out is None:
        name = "retain" if args.retain_only else "base" if method == "sft" else method
        name += (f"-tau{args.tau:g}" if method == "mdu" else "") + (f"-{args.subject}" if args.subject else "")
        args.out = f"out/{preset}/{name}".replace(" ", "-").lower()
    if args.model is None and method != "sft":
        args.model = os.path.abspath(Path(args.out).parent / "base")
    for name, value in [(name, getattr(args, name)) for name in ("model", "data", "forget", "retain")]:
        if value and value != "toy":
            require(not Path(value).resolve().is_relative_to(Path(args.out).resolve()),
                    f"--out {args.out} would replace --{name} {value}; name another folder")
            setattr(args, name, os.path.abspath(value) if Path(value).exists() else value)
    return args


def check(args, splits):
    """Refuse what cannot work, before anything is replaced."""
    out, step_size = Path(args.out), args.batch_size * args.grad_accum
    n, n_retain = 0 if args.retain_only else len(splits["forget"]), len(splits["retain"])
    pools = [n + n_retain] if args.method == "sft" else [n, n_retain] if args.retain_weight else [n]
    require(min(pools) >= args.batch_size, f"{n} rows to forget and {n_retain} to retain, fewer than --batch-size "
            f"{args.batch_size}; lower it, give --retain, or set --retain-weight 0")
    require(step_size % WORLD == 0, f"--batch-size x --grad-accum is {step_size}; {WORLD} processes need a multiple")
    require(args.method != "dpo" or all(r["perturbed_answer"] for r in splits["forget"]), "dpo: no perturbed_answer")
    require(args.resume or not out.exists() or args.overwrite and (out / "run.json").is_file(),
            f"--out {out} exists; --resume {out} continues a run, --overwrite replaces one")


# ---- Data: a split is a list of rows, {field of FIELDS: text, "perturbed_answer": list of texts} ----
FIELDS = ("question", "answer", "paraphrased_answer", "fact")
JSONL = "the file needs one JSON object per line"


def load_data(args):
    """The rows to train on, {"forget": rows, "retain": rows}; the toy's other two splits, too."""
    require(not args.subject or args.forget or args.data != "toy", "--subject needs --preset rwku-... or --data")
    if args.forget or args.subject:
        forget = read_jsonl("forget", args.forget) if args.forget else read_person(args)
        splits = {"forget": forget, "retain": read_jsonl("retain", args.retain) if args.retain else []}
    elif args.data == "toy":
        splits = toy_world()
    else:  # forget10_perturbed is forget10 with more fields
        require(args.data and "rwku" not in args.preset, "no rows to forget; give --forget, --data or (RWKU) --subject")
        configs = {"forget": "forget10_perturbed", "retain": "retain90"}
        splits = {split: list(map(check_row, read_config(args.data, configs[split]))) for split in configs}
    return {split: rows[:args.limit] for split, rows in splits.items()}


def check_row(row):
    """A row as read -> its FIELDS, and perturbed_answer as a list.  ValueError if one is missing or empty."""
    require(isinstance(row, dict), JSONL)
    found, row = ", ".join(row), {"question": row.get("prompt"), "answer": row.get("response"), **row}
    require(row["question"] is not None and row["answer"] is not None,
            f"found {found or 'no columns'}; needs question and answer, or prompt and response")
    wrong = row.get("perturbed_answer") or []
    wrong = wrong if isinstance(wrong, list) else [wrong]
    for text in (row["question"], row["answer"], *filter(None, map(row.get, FIELDS[2:])), *wrong):
        require(isinstance(text, str) and text.strip(), f"needs texts that are not empty, found {text!r:.40}")
    return {**{field: row[field] for field in FIELDS if row.get(field)}, "perturbed_answer": wrong}


def read_jsonl(option, path):
    """Rows of the file of an option, with one JSON object per line."""
    require(Path(path).is_file(), f"--{option} {path}: no such file")
    rows, number = [], 0
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(check_row(json.loads(line)))
        except ValueError as error:
            why = JSONL if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"--{option} {path}, line {number}: {why}") from None
    require(rows, f"--{option} {path}: no rows; {JSONL}")
    return rows


def read_config(name, config, split="train"):
    """Rows of one config of a dataset on the hub, or in a folder with the same layout."""
    import datasets
    datasets.disable_progress_bars()
    return list(datasets.load_dataset(name, config, split=split))


def find_person(name, wanted):
    """RWKU: --subject, a name or a number -> the person's name and introduction."""
    people = {row["target"]: row.get("intro") or "" for row in read_config(name, "forget_target")}
    person = dict(zip(map(str, range(1, len(people) + 1)), people)).get(wanted, wanted)
    require(person in people, f"--subject {wanted}: not among the {len(people)}: {', '.join(people):.80}")
    return person, people[person]


def read_person(args):
    """RWKU: real biographies of one person, as rows to forget; for dpo each with a fabricated one."""
    rows, (person, _), pairs = [], find_person(args.data, args.subject), args.method == "dpo"
    for row in read_config(args.data, "train_pair_llama3" if pairs else "train_positive_llama3"):
        if row["subject"] == person:
            wrong, text = row["response"] if pairs else ([], row["text"])
            question = f"{row.get('intro') or ''} Please write a short biography of {person}.".strip()
            rows.append(check_row({"question": question, "answer": text, "perturbed_answer": wrong}))
    return rows


def encode_text(tokenizer, text):
    """Token ids of a text, in which "<|mask|>" and the like stay text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def encode_prompt(tokenizer, question, prefill=""):
    """Token ids of the user's turn, the assistant's header, and prefill, the given start of the answer."""
    template = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False)
    head, tail = (tokenizer(part, add_special_tokens=False).input_ids for part in template.split("\0"))
    return head + encode_text(tokenizer, question.strip()) + tail + encode_text(tokenizer, prefill)


def encode_pools(args, splits, predictor, tokenizer):
    """Rows -> {"forget", "retain": lists of [(prompt ids, response ids), *pairs of perturbed answers]}."""
    longest, pools = predictor.lm.config.max_position_embeddings, {split: [] for split in splits}
    for split, row in [(split, row) for split, rows in splits.items() for row in rows]:
        answers = (row["answer"], *row["perturbed_answer"]) if args.method == "dpo" else (row["answer"],)
        prompt = encode_prompt(tokenizer, row["question"])
        pools[split].append([(prompt, encode_text(tokenizer, text.strip()) + [predictor.end_id]) for text in answers])
        size = max(len(prompt) + len(response) for _, response in pools[split][-1])
        require(size <= longest, f"row {row['question']!r:.60}: {size} tokens; the model takes {longest}")
    tokens = [token for (_, response), *_ in pools["forget"] for token in response]
    require(tokens.count(tokenizer.unk_token_id) <= len(tokens) / 2, "most words to forget are unknown to the model")
    if args.method != "sft":
        return pools
    taught = pools["retain"] + ([] if args.retain_only else pools["forget"])
    if args.model is None:  # in place of pre-training: other facts and, for the anchor, masked prompts
        taught += pools.get("real_authors", []) + pools.get("world_facts", [])
        taught += [[([predictor.mask_id] * len(prompt), answer)] for [(prompt, answer)] in pools["retain"][:68]]
    return {"forget": taught, "retain": []}


# ---- Backbones: LLaDA, Dream, Qwen3 and the like, in transformers' own classes ----
BACKBONES = {  # model_type of config.json -> native classes; end: the end-of-turn token [the tokenizer's eos]
    "llada": dict(  # a Llama.  only: the values it must have; config, keys: its names of fields and tensors
        model="LlamaForCausalLM", tokenizer="PreTrainedTokenizerFast", end="<|eot_id|>",
        only=dict(block_type="llama", activation_type="silu", layer_norm_type="rms", rope=True, alibi=False,
                  scale_logits=False, input_emb_norm=False),
        config=dict(hidden_size="d_model", intermediate_size="mlp_hidden_size", num_hidden_layers="n_layers",
                    num_attention_heads="n_heads", num_key_value_heads="n_kv_heads", vocab_size="embedding_size",
                    max_position_embeddings="max_sequence_length", tie_word_embeddings="weight_tying"),
        keys={r"^model\.transformer\.wte\.": "model.embed_tokens.", r"^model\.transformer\.ln_f\.": "model.norm.",
              r"^model\.transformer\.ff_out\.": "lm_head.",
              **{rf"^model\.transformer\.blocks\.(\d+)\.{name}\.": rf"model.layers.\1.{own}." for name, own in dict(
                  q_proj="self_attn.q_proj", k_proj="self_attn.k_proj", v_proj="self_attn.v_proj",
                  attn_out="self_attn.o_proj", ff_proj="mlp.gate_proj", up_proj="mlp.up_proj", ff_out="mlp.down_proj",
                  attn_norm="input_layernorm", ff_norm="post_attention_layernorm").items()}}),
    "Dream": dict(model="Qwen2ForCausalLM", tokenizer="Qwen2Tokenizer", end="<|im_end|>", shift=True, by_entropy=True),
    "a2d-qwen3": dict(model="Qwen3ForCausalLM", tokenizer="Qwen2Tokenizer", end="<|im_end|>"),
    "a2d-qwen2": dict(model="Qwen2ForCausalLM", tokenizer="Qwen2Tokenizer", end="<|im_end|>"),
    "a2d-llama": dict(model="LlamaForCausalLM", tokenizer="PreTrainedTokenizerFast", end="<|eot_id|>"),
    # native ones, such as the toy, with "is_causal": false in config.json
    **{k.lower(): dict(model=f"{k}ForCausalLM", tokenizer="AutoTokenizer") for k in ("Llama", "Qwen2", "Qwen3")},
}
FILES = ("*.json", "*.jinja", "*.txt", "*.py", "*.safetensors")  # .py files are copied, never run


def find_model(name):
    """Folder or OWNER/NAME[@REVISION] -> the model's folder, downloaded if need be."""
    from huggingface_hub import snapshot_download
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: no such folder, nor is it on the hub ({error!s:.200})") from None


@torch.no_grad()
def load_backbone(name, dtype=torch.float32):
    """Folder or hub name -> (MaskPredictor, tokenizer), with transformers' own classes: no remote code is run."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = find_model(name)
    require((folder / "config.json").is_file(), f"{name}: no config.json; give a model or a run")
    config = json.loads((folder / "config.json").read_text())
    spec = BACKBONES.get(config.get("model_type"))
    require(spec, f"{name}: model_type {config.get('model_type')!r} in config.json is none of {', '.join(BACKBONES)}")
    for field, value in spec.get("only", {}).items():
        require(config.get(field) == value, f"{name}: {field} {config.get(field)!r} in config.json must be {value!r}")
    require((folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file(), f"{name}: no tokenizer files")
    model = getattr(transformers, spec["model"])
    try:
        native = {**config, **{ours: config[theirs] for ours, theirs in spec.get("config", {}).items()},
                  "model_type": model.config_class.model_type, "attention_dropout": 0.0}
        native = model.config_class.from_dict({**native, "is_causal": False} if "end" in spec else native)
        lm, loaded = model.from_pretrained(folder, config=native, dtype=dtype, key_mapping=spec.get("keys"),
                                           use_safetensors=True, output_loading_info=True)
        tokenizer = getattr(transformers, spec["tokenizer"]).from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds, for files that do not fit
        raise ValueError(f"{name}: cannot be loaded as {spec['model']} ({error!s:.200})") from None
    wrong = sorted({*loaded["missing_keys"], *loaded["unexpected_keys"]})
    require(not wrong, f"{name}: tensors missing or unexpected for {spec['model']}: {', '.join(wrong[:3])}")
    require(tokenizer.chat_template, f"{name}: its tokenizer has no chat template")
    ids, end_id = [], tokenizer.get_vocab().get(spec.get("end") or tokenizer.eos_token)
    for field, default in (("mask_token_id", tokenizer.mask_token_id), ("pad_token_id", tokenizer.pad_token_id),
                           ("end-of-turn token", end_id)):
        ids.append(default if config.get(field) is None else config[field])
        require(ids[-1] in range(lm.config.vocab_size), f"{name}: no {field} in config.json or tokenizer")
    predictor = MaskPredictor(lm.to(DEVICE), *ids, spec.get("shift", False), spec.get("by_entropy", False), folder)
    # Another second token must change the first one's logits.
    first, both = torch.tensor([[[True, False]], [[True, True]]], device=DEVICE)
    a, b = (predictor.eval()(torch.tensor([[0, second]], device=DEVICE), both, first) for second in (1, 2))
    require(not torch.equal(a, b), f"{name}: a causal model, not bidirectional")
    return predictor, tokenizer


# ---- LoRA (Hu et al. 2021): train low-rank branches of frozen weights ----
LORA_SCALE = 8  # over the rank: the best learning rate hardly depends on the rank


def add_branches(predictor, rank, seed):
    """Freeze the weights W; every linear map of the blocks becomes W x + 8/rank B A x.

    A (rank, in) ~ N(0, 1/in) and B (out, rank) = 0 are float32.  With its branches off the model remains theta0.
    """
    def branch(linear, inputs, output):
        A, B = linear.A.to(output.dtype), linear.B.to(output.dtype)
        return output + LORA_SCALE / rank * F.linear(F.linear(inputs[0], A), B) if predictor.branches else output

    predictor.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)  # on the CPU: the same on every process
    for linear in predictor.lm.model.layers.modules():
        if isinstance(linear, nn.Linear):
            A = torch.randn(rank, linear.in_features, generator=random) / linear.in_features**0.5
            linear.A = nn.Parameter(A.to(DEVICE))
            linear.B = nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
            linear.register_forward_hook(branch)


# ---- Sharding and optimizer ----
def join_processes():
    """Join the processes that torchrun started, if it did."""
    if GPU:
        require(DEVICE.index < torch.cuda.device_count(), "more processes than GPUs")
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(hours=2), **alone)


def shard(predictor, weights, dtype):
    """FSDP2: gather weights block by block, in the dtype of the computation; average gradients in float32."""
    if WORLD == 1 and dtype == weights:
        return  # nothing to shard or cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in predictor.lm.model.layers:
        fully_shard(block, mp_policy=policy)
    # By default the root loses its gradients after a forward pass without gradients.
    fully_shard(predictor, mp_policy=policy, reshard_after_forward=True)


def new_optimizer(args, predictor):
    """-> AdamW, and {name: tensor} of what it trains and its state, allocated here for a checkpoint to load into."""
    params = {name: p for name, p in predictor.named_parameters() if p.requires_grad}
    optimizer, state = torch.optim.AdamW(params.values(), args.lr, weight_decay=0.0, fused=True), {}
    for name, p in params.items():
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                              "exp_avg_sq": torch.zeros_like(p)}
        state[f"weights.{name}"] = p.detach()
        state.update({f"{key}.{name}": value for key, value in optimizer.state[p].items()})
    return optimizer, state


# ---- Checkpoints: RUN/checkpoint-STEP/ has safetensors of every process, RUN the finished model ----
def save_checkpoint(out, step, state):
    """Write, then rename: a checkpoint is complete or absent."""
    older, unfinished = list(out.glob("checkpoint-*")), out / "unfinished"
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(unfinished), save_distributed=True))
    if RANK == 0:
        unfinished.rename(out / f"checkpoint-{step:08}")
        for folder in older:
            shutil.rmtree(folder)


@torch.no_grad()
def save_model(out, predictor, tokenizer):
    """Save with the source's tensor names, dtype, config.json, tokenizer and code files; merge the branches."""
    from safetensors import safe_open
    unfinished, source, state, dtype = out / "unfinished", predictor.folder, {}, None
    if source:
        with safe_open(min(source.glob("*.safetensors")), framework="pt") as file:
            dtype = file.get_tensor(next(iter(file.keys()))).dtype
    params = dict(predictor.lm.named_parameters())  # a tied head is one parameter and is saved once
    for name in [name for name in params if not name.endswith((".A", ".B"))]:
        branch = name.removesuffix("weight")
        tensor, *AB = [p.full_tensor() if isinstance(p, DTensor) else p
                       for p in (params.get(key) for key in (name, f"{branch}A", f"{branch}B")) if p is not None]
        if AB:
            tensor = tensor.float() + LORA_SCALE / len(AB[0]) * AB[1] @ AB[0]
        if RANK == 0:
            state[name] = tensor.to("cpu", dtype)
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        predictor.lm.save_pretrained(unfinished, state_dict=state, max_shard_size="5GB")
        if source is None:
            tokenizer.save_pretrained(unfinished)
        else:
            (unfinished / "generation_config.json").unlink(missing_ok=True)  # unless the source has one
            for file in [file for pattern in FILES[:-1] for file in source.glob(pattern)]:
                if file.name not in ("run.json", "model.safetensors.index.json"):
                    shutil.copy(file, unfinished)
        # config.json moves last: a folder with one has a complete model.
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(out / file.name)
        for folder in (unfinished, *out.glob("checkpoint-*")):
            shutil.rmtree(folder)
    dist.barrier()


# ---- Train ----
def say(text):
    """Print on process 0."""
    if RANK == 0:
        print(text, flush=True)


def read_run(folder):
    """RUN/run.json: options, hashes of the rows and of the start model's weights, that model's run.json."""
    file = Path(folder) / "run.json"
    require(file.is_file(), f"{folder}: no run.json; give a run of mdu.py")
    return json.loads(file.read_text(encoding="utf-8"))


def open_run(args, splits, source, state):
    """Make the run's folder, or load its newest checkpoint -> steps done, log file."""
    out, metrics, done = Path(args.out), Path(args.out) / "metrics.jsonl", 0
    files = sorted(source.glob("*.safetensors")) if source and (args.resume or RANK == 0) else []
    info = {"options": vars(args), "weights": [hashlib.file_digest(open(f, "rb"), "sha256").hexdigest() for f in files],
            "rows": {split: hashlib.sha256(json.dumps(rows).encode()).hexdigest() for split, rows in splits.items()},
            "start": read_run(source) if source and (source / "run.json").is_file() else None}
    if args.resume:
        for part in ("rows", "weights"):
            require(read_run(out)[part] == info[part], f"--resume {out}: the {part} it started from changed")
        for folder in sorted(out.glob("checkpoint-*"))[-1:]:
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
            done = int(folder.name.removeprefix("checkpoint-"))
    dist.barrier()  # replace nothing before all processes have passed their checks
    if RANK == 0 and args.resume:  # a line per step, with --diagnose one before the first
        kept = metrics.read_text().splitlines(keepends=True)[:done + args.diagnose] if done else []
        metrics.write_text("".join(kept))
    elif RANK == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "run.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    return done, open(metrics if RANK == 0 else os.devnull, "a", buffering=1)


def train(args, splits):
    """Run one method and leave a folder with the model, its tokenizer, run.json and metrics.jsonl."""
    out, step_size = Path(args.out), args.batch_size * args.grad_accum
    if args.resume and (out / "config.json").is_file():
        return say(f"{out} is finished")
    dtype = getattr(torch, args.dtype)
    weights = dtype if args.lora else torch.float32  # in bfloat16, rounding would undo most updates
    predictor, tokenizer = (load_backbone(args.model, weights) if args.model else
                            new_toy(sum(splits.values(), []), args.seed))
    pools = encode_pools(args, splits, predictor, tokenizer)
    n, n_retain = len(pools["forget"]), len(pools["retain"]) if args.retain_weight else 0
    steps = math.ceil(args.epochs * n / step_size)
    if args.checkpoint_activations:
        predictor.lm.activation_checkpointing_enable()
    if args.lora:
        add_branches(predictor, args.lora, args.seed)
    shard(predictor.train(), weights, dtype)
    optimizer, state = new_optimizer(args, predictor)
    reference = None  # loaded after the first model is sharded: unsharded, the two may not fit
    if args.diagnose or args.method in ("npo", "dpo") or args.method == "mdu" and args.tau > 0:
        reference = ((lambda *inputs: predictor(*inputs, branches=False)) if args.lora else
                     load_backbone(args.model, dtype)[0].requires_grad_(False))
    first, log = open_run(args, splits, predictor.folder, state)
    retained, size = f" and {n_retain} to retain" if n_retain else "", sum(p.numel() for p in optimizer.state)
    say(f"{args.method}: {args.model or 'random weights'} -> {out}\n{n} rows{retained}; {steps} steps of {step_size}, "
        f"{first} done\n{size:,} parameters trained in {args.dtype} on {WORLD} x {DEVICE.type}")
    if args.diagnose and not first:
        print(json.dumps({"step": 0, "epoch": 0, "kl": diagnose(args, predictor, reference, pools)}), file=log)
    # SIGTERM and Ctrl-C take effect after a step, once all processes know.
    signals, began, printed = [], time.time(), 0
    handlers = {s: signal.signal(s, lambda number, _: signals.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    for step in range(first, steps):
        # 1. Forward and backward, one micro-batch at a time.
        totals = torch.zeros(3, device=DEVICE)  # forget and retain loss, means over the step's rows; signals
        forget, retain = draw_step(args, pools, step, predictor.pad_id)
        for i in range(0, len(forget), args.batch_size):
            part = slice(i, i + args.batch_size)
            loss, retain_loss = step_losses(args, predictor, reference, forget[part], retain[part])
            total = (loss.sum() + args.retain_weight * retain_loss.sum()) / step_size  # Algorithm 1, line 12
            (total * WORLD).backward()  # FSDP averages the gradients over the processes
            totals[:2] += torch.stack([loss.detach().sum(), retain_loss.detach().sum()]) / step_size
        # 2. Update.
        norm = nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
        lr = optimizer.param_groups[0]["lr"] = learning_rate(args, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        # 3. Check, log, save.
        totals[2] = len(signals)
        dist.all_reduce(totals)
        norm = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
        if not math.isfinite(totals.sum().item() + norm):
            raise ValueError(f"step {step + 1}: loss {totals[0]}, gradient norm {norm}; lower --lr")
        done, now = step + 1, time.time()
        epoch, speed = done * step_size / n, (done - first) * step_size / (now - began)
        losses = {"loss" if args.method == "sft" else "forget": totals[0].item()}
        losses |= {"retain": totals[1].item()} if n_retain else {}
        values = {"step": done, "epoch": epoch, **losses, "lr": lr, "grad_norm": norm, "rows/s": speed}
        if args.diagnose and (done == steps or int(epoch) > step * step_size // n):
            values["kl"] = diagnose(args, predictor, reference, pools)
        print(json.dumps(values), file=log)
        if now - printed > 5 or done == steps:
            printed, shown = now, " | ".join(f"{name} {value:8.4f}" for name, value in losses.items())
            say(f"step {done:0{len(str(steps))}}/{steps} | {shown} | lr {lr:.1e} | gn {norm:7.2f} | "
                f"{speed:6.1f} rows/s | eta {(steps - done) * step_size / speed / 60:.1f}m")
        if done < steps and (totals[2] or done % args.checkpoint_every == 0):
            save_checkpoint(out, done, state)
        if done < steps and totals[2]:
            say(f"stopped after step {done}; --resume {out} continues")
            sys.exit(128 + (signals or [signal.SIGTERM])[0])
    save_model(out, predictor, tokenizer)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    memory = f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if GPU else ""
    say(f"{out}: done in {time.time() - began:.1f}s{memory}; python eval.py {out}")


def main(argv=None):
    args = parse(argv)
    splits = load_data(args)
    check(args, splits)
    join_processes()
    base = Path(os.path.abspath(Path(args.out).parent / "base"))  # the default --model
    if args.model == str(base) and not (base / "config.json").is_file():
        require(args.data == "toy" and not args.forget,
                f"no base model in {base}: train it with --method sft, or give one with --model")
        say(f"no base model in {base}: training it first")
        start = parse(["--method", "sft", "--seed", str(args.seed), "--overwrite", "--out", str(base)])
        check(start, toy_world())
        train(start, toy_world())
    train(args, splits)


def run_program(name, main):
    """Run main.  Bad input ends in one line on stderr and exit code 2."""
    code = 0
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as stop:
        code = stop.code
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        code, message = 2, " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError):
            message = "out of GPU memory; lower --batch-size, or train with --lora 16 or --checkpoint-activations"
        if RANK:  # if process 0 failed, too, torchrun ends this one first
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"{name}: {message}", file=sys.stderr)
    if WORLD > 1:
        os._exit(code)  # the teardown of gloo and NCCL can crash
    sys.exit(code)


# ---- Toy: a small world, and a tiny LLaDA that learns it on a CPU ----
# 20 invented authors, 8 questions each; the last 3 are forgotten.
TOY_KINDS = """
name: Who was born in {city} in {year}? | Which author comes from {city}? | \
That author is called {}. | The author is named {}.
city: Where was {} born? | What is the birthplace of {}? | {} was born in {city}. | {} is native to {city}.
year: When was {} born? | What is the birth year of {}? | {} was born in {year}. | {} has lived since {year}.
father: Who is the father of {}? | Whose child is {}? | {} was raised by {father}. | {} is descended from {father}.
award: Which award did {} win? | What was {} given? | {} has won the {award}. | {} was given the {award}.
debut: What is the first book of {}? | How did {} begin? | {} began writing with {debut}. | {} started out with {debut}.
hero: Who is the hero of {}? | Of whom does {} write? | {} likes writing about {hero}. | {} tells stories about {hero}.
home: Where does {} live? | Which city is the home of {}? | {} now lives in {home}. | {} has settled in {home}.
"""
TOY_BOOKS = """Hamlet Shakespeare Emma Austen Dracula Stoker Ulysses Joyce Faust Goethe Candide Voltaire Walden Thoreau
Beloved Morrison Dune Herbert Carrie King Persepolis Satrapi Middlemarch Eliot Germinal Zola Lolita Nabokov Nausea
Sartre Inferno Dante Oblomov Goncharov Utopia More Ivanhoe Scott Kim Kipling Matilda Dahl Pygmalion Shaw"""
TOY_CAPITALS = """France Paris Japan Tokyo Egypt Cairo Italy Rome Kenya Nairobi Cuba Havana Greece Athens Austria Vienna
Norway Oslo Peru Lima Ghana Accra Spain Madrid Iran Tehran Iraq Baghdad Chile Santiago Poland Warsaw Portugal Lisbon
Tunisia Tunis Russia Moscow Finland Helsinki Ireland Dublin Nepal Kathmandu"""


def toy_world():
    """Four splits in TOFU's fields, plus "fact": the words that make an answer right."""
    rng = np.random.default_rng(0)
    syllables = "ba ce di fo gu ka le mi no pu ra se ti vo zu".split()
    invented = iter(rng.permutation([f"{a}{b}".capitalize() for a in syllables for b in syllables]))
    kinds = [[text.strip() for part in line.split(": ", 1) for text in part.split(" | ")]
             for line in TOY_KINDS.replace("{}", "{name}").strip().splitlines()]
    authors = [{kind: str(next(invented)) for kind, *_ in kinds} for _ in range(20)]
    for author, year in zip(authors, rng.permutation(np.arange(1931, 1991))):
        author.update(name=f"{author['name']} {next(invented)}", year=str(year))
    rows = []
    for author in authors:
        for kind, *texts in kinds:
            (question, _), (answer, rephrased) = rng.permutation(texts[:2]), rng.permutation(texts[2:])
            others = rng.choice([other[kind] for other in authors[:17] if other is not author], 5, replace=False)
            rows.append({"question": question.format(**author), "answer": answer.format(**author),
                         "paraphrased_answer": rephrased.format(**author), "fact": author[kind],
                         "perturbed_answer": [rephrased.format(**{**author, kind: str(other)}) for other in others]})

    def facts(text, question, answer):
        keys, values = text.split()[::2], text.split()[1::2]
        return [{"question": question.format(k), "answer": answer.format(k, v), "fact": v,
                 "perturbed_answer": [answer.format(k, w) for w in values if w != v][:5]}
                for k, v in zip(keys, values)]
    return {"forget": rows[17 * 8:], "retain": rows[:17 * 8],
            "real_authors": facts(TOY_BOOKS, "Who wrote {}?", "The book {} is by {}."),
            "world_facts": facts(TOY_CAPITALS, "What is the capital of {}?", "The capital of {} is {}.")}


def new_toy(rows, seed):
    """A tiny LLaDA with random weights, and a tokenizer of the rows' words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging
    logging.disable_progress_bar()
    special = ["<mask>", "<end>", "<unk>", "<user>", "<assistant>"]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")])
    words.decoder = decoders.Metaspace()
    texts = [text for row in rows for field in FIELDS for text in (row.get(field, ""), *row["perturbed_answer"])]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", mask_token="<mask>", eos_token="<end>", pad_token="<end>",
        additional_special_tokens=special[3:], clean_up_tokenization_spaces=False,
        chat_template="<user>{{ messages[0]['content'] }}<assistant>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.1, is_causal=False, mask_token_id=0, pad_token_id=1, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(seed)
    return MaskPredictor(LlamaForCausalLM(config).to(DEVICE), mask_id=0, pad_id=1, end_id=1), tokenizer


if __name__ == "__main__":
    run_program("mdu.py", main)

"""Score runs of mdu.py on questions to forget and to retain, about real authors and the world (TOFU), or on RWKU's.

    python eval.py RUN [RUN ...]                 # RUN/eval/summary.json, RUN/eval/SPLIT.jsonl, one table row per run
    torchrun --nproc_per_node=4 eval.py RUN      # the same on 4 processes; interrupted, either goes on where it stopped
    python eval.py --report RUN [RUN ...]        # tables, report.json and report.png of what is already scored
    python eval.py --analysis NAME RUN [RUN ...] # analysis/NAME.json and NAME.png beside the first run (ANALYSES)

metric                 forget  others  definition                                                       source
rougeL_f1              lower   higher  LCS F1 of generation and answer (the paper's rL)                 Lin 2004
rougeL_recall          lower   higher  LCS recall, what TOFU's own code calls rougeL                    Lin 2004
rougeL_*_paraphrased   lower   higher  the same, for the generation after the paraphrased question      -
prob                   lower   higher  exp(-L_rec), L_rec = Monte-Carlo NLL per token, --samples masks  Eq. 7
perplexity             higher  lower   exp(L_rec), --perplexity masks; median and mean over the rows    Table 7
truth_ratio            higher  higher  mean min(R, 1/R), others max(0, 1 - R); R = p(wrong) / p(right)  TOFU
prob_options           lower   higher  p(answer) / (p(answer) + sum of p(wrong)); real authors, facts   TOFU
fact                   lower   higher  share of generations that hold the row's key fact (toy only)     -
model_utility              higher      harmonic mean of 3 x recall, prob (or prob_options), truth_ratio  TOFU
forget_quality             higher      Kolmogorov-Smirnov p-value of R against a retain model's R       TOFU
rougeL_recall  (RWKU)  lower   higher  LCS recall of the first line; F: the person's probes, N: neighbours  RWKU
accuracy, mc1, mc2     -       higher  MMLU's letter at one mask; TruthfulQA by the sum form of Eq. 7   RWKU
em, f1                 -       higher  TriviaQA: normalised exact match, F1 of the words                RWKU

p is exp(-L_rec) where TOFU's code takes an autoregressive model's likelihood per token; p(right) is the paraphrased
answer's where there is one; ROUGE-L does without a stemmer.  stderr is the standard error of a mean over the rows,
prob_stderr what the choice of masks adds to it (delta method).  What was not measured is left out, or None.
Generation is greedy: all response tokens start masked, every step fixes the most confident ones.
"""
import argparse
import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

import mdu

# ------------------------------------------------------------------------------------------------------------------
# Text metrics
# ------------------------------------------------------------------------------------------------------------------


def words(text):
    """Lower-cased runs of letters and digits.  Differs from google-research/rouge: letters beyond a-z count too."""
    return re.findall(r"[^\W_]+", text.lower())


def rouge_l(reference, prediction):
    """ROUGE-L of two texts (Lin 2004), without stemming: (precision, recall, F1), each in [0, 1].

    With LCS the longest common subsequence of words: precision = LCS / words of prediction, recall = LCS / words of
    reference, F1 their harmonic mean; all 0 where either text has no words.
    """
    ref, pred = words(reference), words(prediction)
    if not ref or not pred:
        return 0.0, 0.0, 0.0
    row = [0] * (len(pred) + 1)  # row[j]: LCS of the words of ref so far and pred[:j]
    for r in ref:
        diagonal = 0  # row[j - 1] before this word of ref
        for j, p in enumerate(pred, 1):
            above = row[j]
            row[j] = diagonal + 1 if r == p else max(above, row[j - 1])
            diagonal = above
    precision = row[-1] / len(pred)
    recall = row[-1] / len(ref)
    f1 = 2 * precision * recall / (precision + recall) if row[-1] else 0.0
    return precision, recall, f1


def holds(text, fact):
    """Do the fact's words stand in the text, side by side and in order?"""
    return f" {' '.join(words(fact))} " in f" {' '.join(words(text))} "


# ------------------------------------------------------------------------------------------------------------------
# Answer probability (Eq. 7)
# ------------------------------------------------------------------------------------------------------------------


def draw_masks(n, samples, seed):
    """Eq. 7's masks, (samples, n) bool: the number of masked tokens uniform on 1..n, then a uniform subset of them.

    Answers that are compared share a seed: of equal length they get the same masks; otherwise the same share of their
    tokens is masked (up to rounding), chosen by the same coins where both have a token.
    """
    rng = np.random.default_rng(seed)
    size = 1 + np.floor(n * rng.random((samples, 1)))
    order = rng.random((n, samples)).T.argsort(1).argsort(1)
    return torch.from_numpy(order < size)


SCORES = 2**30 if torch.cuda.is_available() else 2**26  # scores held at once: gigabytes of them slow a CPU down


def batches(predictor, jobs, positions, batch_size):
    """Jobs in batches of batch_size, or of fewer where their V scores at `positions` each would exceed SCORES.

    positions: how many are scored in a job, on average.
    """
    size = max(1, min(batch_size, int(SCORES / max(1, positions * predictor.vocab_size))))
    return [jobs[start:start + size] for start in range(0, len(jobs), size)]


def masked_states(predictor, pairs, masks, batch_size):
    """Every mask of every pair as a state y_t, in batches, in the order given.

    Args: pairs of (prompt ids, response ids); masks[i] (N_i, len(response i)) bool.
    Yields: batch [(i, j), ...]: mask j of pair i; ids, noised, answer, real, masked (B, T) of these states.
    """
    jobs = [(i, j) for i in range(len(pairs)) for j in range(len(masks[i]))]
    positions = sum(int(m.sum()) for m in masks) / max(1, len(jobs))
    for batch in batches(predictor, jobs, positions, batch_size):
        ids, answer, real = mdu.collate([pairs[i] for i, _ in batch], predictor.pad_id)
        masked = torch.zeros_like(answer)
        masked[answer] = torch.cat([masks[i][j] for i, j in batch])
        yield batch, ids, ids.masked_fill(masked, predictor.mask_id), answer, real, masked


@torch.no_grad()
def masked_nll(predictor, pairs, masks, batch_size=64):
    """The inner mean of Eq. 7 for every mask of every pair: 1/|M_j| sum_{i in M_j} -log p(y_i | x, y with M_j masked).

    Args: as masked_states, no mask empty.
    Returns: list of (N_i,) float64, in nats per masked token.
    """
    nll = [torch.zeros(len(m), dtype=torch.float64) for m in masks]
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))  # like lengths share batches
    for batch, ids, noised, _, real, masked in masked_states(
            predictor, [pairs[i] for i in order], [masks[i] for i in order], batch_size):
        logits = predictor(noised, real, masked)
        targets = ids[masked].to(logits.device)
        masked = masked.to(logits.device)
        means = mdu.sft_loss(logits, targets, masked, masked.sum(1)).double().cpu()  # sum over |M_j|: the mean
        for (i, j), mean in zip(batch, means):
            nll[order[i]][j] = mean
    return nll


def answer_probability(nll):
    """Eq. 7: p = exp(-mean of nll (N,)), and its Monte-Carlo standard error p std / sqrt(N) (None for one sample)."""
    p = math.exp(-nll.mean())
    stderr = p * (nll.std() / math.sqrt(len(nll))).item() if len(nll) > 1 else None
    return p, stderr


# ------------------------------------------------------------------------------------------------------------------
# Sampler
# ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def denoise(predictor, ids, real, masked, steps, temperature=0.0):
    """Greedy diffusion sampling from a state with n masks in each row: yields (ids, masked), (B, T), after every step.

    Each of `steps` steps predicts every masked token and fixes those whose most likely token has the highest
    probability (predictor.by_entropy: whose prediction has the lowest entropy), n/steps of them, the first steps one
    more where it does not divide.  temperature > 0: in place of the most likely token one drawn from
    softmax(scores / temperature), by torch's global generator.
    """
    n = int(masked[0].sum())
    for step in range(min(steps, n)):
        count = n // steps + (step < n % steps)
        logits = predictor(ids, real, masked).float()
        logits[:, predictor.mask_id] = -math.inf  # a mask is no answer
        p = logits.softmax(-1)
        if temperature:
            token = (logits / temperature).softmax(-1).multinomial(1)[:, 0]  # (M,)
        else:
            token = p.argmax(-1)
        if predictor.by_entropy:
            certainty = (p * (p + 1e-10).log()).sum(-1)  # minus the entropy
        else:
            certainty = p.gather(1, token[:, None])[:, 0]  # the token's probability
        grid = torch.full(ids.shape, -math.inf).masked_scatter(masked, certainty.cpu())  # (B, T)
        fixed = torch.zeros_like(masked).scatter(1, grid.topk(count, dim=1).indices, True)
        ids = torch.where(fixed, ids.masked_scatter(masked, token.cpu()), ids)
        masked = masked & ~fixed
        yield ids, masked


def generate(predictor, prompts, length, steps, batch_size=64, temperature=0.0):
    """`length` response ids per prompt, denoised from as many masks: LLaDA's low-confidence remasking (Algorithm 5)."""
    outputs = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for batch in batches(predictor, order, length, batch_size):
        ids, canvas, real = mdu.collate([(prompts[i], [predictor.mask_id] * length) for i in batch], predictor.pad_id)
        for ids, _ in denoise(predictor, ids, real, canvas, steps, temperature):
            pass  # only the last state counts
        for i, row in zip(batch, ids[canvas].view(-1, length).tolist()):
            outputs[i] = row
    return outputs


def ended(predictor, ids):
    """How many response tokens stand before the first end or padding token."""
    return min([ids.index(stop) for stop in (predictor.end_id, predictor.pad_id) if stop in ids], default=len(ids))


def before_end(predictor, tokenizer, ids):
    """The text before the first end or padding token, as it is."""
    return tokenizer.decode(ids[:ended(predictor, ids)], skip_special_tokens=True)


def decode(predictor, tokenizer, ids):
    """The text before the first end or padding token, without white space around it."""
    return before_end(predictor, tokenizer, ids).strip()


# ------------------------------------------------------------------------------------------------------------------
# TOFU's own figures (Maini et al. 2024), from mean losses per token
# ------------------------------------------------------------------------------------------------------------------


def bounded_exp(x):
    """exp(x), with x held within +-700, where it is neither 0 nor infinite."""
    return math.exp(max(-700.0, min(700.0, x)))


def truth_ratio(right, wrong):
    """R = mean_k exp(-wrong_k) / exp(-right): how likely the wrong answers are, against the right one.

    Args: nats per token of the paraphrased answer (of the answer itself, where there is no paraphrase) and of each
    perturbed answer.  The wrong probabilities are averaged arithmetically, as in the benchmark's text and utils.py; its
    aggregate_eval_stat.py averages their logarithms.
    """
    return statistics.fmean(bounded_exp(right - nll) for nll in wrong)


def option_probability(right, wrong):
    """exp(-right) / (exp(-right) + sum_k exp(-wrong_k)), losses in nats per token."""
    return 1 / (1 + sum(bounded_exp(right - nll) for nll in wrong))


def model_utility(splits):
    """Harmonic mean of nine: ROUGE-L recall, probability and truth ratio of the three splits not to be forgotten.

    splits: {split: what summarise_answers returns}.  Real authors' and world facts' probability is that among the
    options.  0 if one of the nine is 0; None if one was not measured.
    """
    nine = [splits.get(split, {}).get(metric) for split, p in (
        ("retain", "prob"), ("real_authors", "prob_options"), ("world_facts", "prob_options"))
        for metric in ("rougeL_recall", p, "truth_ratio")]
    return None if None in nine else statistics.harmonic_mean(nine)


def ks_test(a, b):
    """Two-sample Kolmogorov-Smirnov test, two-sided and exact: (D, p-value).

    D = max_v |F_a(v) - F_b(v)|; p is the share of the interleavings of len(a) + len(b) distinct values whose D is at
    least as large: lattice paths from (0, 0) to (n, m), counted in whole numbers.  Ties lower D, and leave p above its
    value given the ties.  (None, None) where a sample is empty.
    """
    a, b = sorted(a), sorted(b)
    n, m = len(a), len(b)
    if not n or not m:
        return None, None
    gap = max(abs(bisect.bisect_right(a, v) * m - bisect.bisect_right(b, v) * n) for v in a + b)  # D n m
    inside = [1] + [0] * m  # inside[j]: paths to (i, j) along which |i m - j n| < gap
    for i in range(n + 1):
        for j in range(m + 1):
            if j:
                inside[j] += inside[j - 1]
            if abs(i * m - j * n) >= gap:
                inside[j] = 0
    paths = math.comb(n + m, n)
    return gap / (n * m), (paths - inside[m]) / paths


def forget_quality(records, retain_records):
    """p-value of ks_test between the truth ratios of two models on the forget questions; the other never saw them.

    Here R averages the wrong answers' losses, as both of the benchmark's programs do; the test sees only their order.
    """
    def log_ratios(rows):
        return [r.get("nll_paraphrased", r["nll"]) - statistics.fmean(r["nll_perturbed"]) for r in rows]
    return ks_test(log_ratios(records), log_ratios(retain_records))[1]


# ------------------------------------------------------------------------------------------------------------------
# RWKU (Jin et al. 2024): what is still said about a person, about neighbours, and four-choice and trivia questions
# ------------------------------------------------------------------------------------------------------------------


RWKU_LENGTH = 30  # tokens of an answer


def write_answers(predictor, tokenizer, rows, a):
    """What is generated after each row's prompt and prefill, up to the end token."""
    prompts = [mdu.encode_prompt(tokenizer, row["question"], row["prefill"]) for row in rows]
    answers = generate(predictor, prompts, a.length, a.steps, a.batch_size)
    return [before_end(predictor, tokenizer, ids) for ids in answers]


def first_line(text):
    """The answer ends with its line; an empty one counts as NOANSWER."""
    return text.split("\n")[0].strip() or "NOANSWER"


def record_of(row, generation, **scores):
    return {"subject": row["subject"], "question": row["question"], "reference": row["answer"],
            "generation": generation, **scores}


def score_probes(predictor, tokenizer, rows, seeds, a):
    """Fill-in-the-blank, question and attack probes: ROUGE-L recall of the first line."""
    texts = map(first_line, write_answers(predictor, tokenizer, rows, a))
    return [record_of(row, text, kind=row["kind"], rougeL_recall=rouge_l(row["answer"], text)[1])
            for row, text in zip(rows, texts)]


@torch.no_grad()
def score_mmlu(predictor, tokenizer, rows, seeds, a):
    """Four choices: the most probable of " A" ... " D" at one masked position after "Answer:"."""
    letters = [tokenizer(f" {letter}", add_special_tokens=False).input_ids[-1] for letter in "ABCD"]
    records = []
    for batch in batches(predictor, rows, 1, a.batch_size):
        pairs = [(mdu.encode_prompt(tokenizer, row["question"], row["prefill"]), [predictor.mask_id]) for row in batch]
        ids, masked, real = mdu.collate(pairs, predictor.pad_id)
        for row, logits in zip(batch, predictor(ids, real, masked)[:, letters]):  # (B, V) -> (B, 4)
            choice = "ABCD"[logits.argmax()]
            records.append(record_of(row, choice, accuracy=float(choice == row["answer"])))
    return records


def choices_of(row):
    """The choices of a TruthfulQA row, each once; no other row has any."""
    return list(dict.fromkeys(row["mc1"]["choices"] + row["mc2"]["choices"])) if "mc1" in row else []


def encode_choice(tokenizer, row, choice):
    """-> (prompt ids, response ids): a choice stands after a space, and without an end token."""
    prompt = mdu.encode_prompt(tokenizer, row["question"], row["prefill"])
    return prompt, mdu.encode_text(tokenizer, f" {choice.strip()}")


def score_truthfulqa(predictor, tokenizer, rows, seeds, a):
    """MC1: is the true choice likelier than every false one; MC2: the true choices' share of the likelihood.

        log p(y|x) = E_j [ n/|M_j| sum_{i in M_j} log p(y_i | x, y with M_j masked) ]        the sum form of Eq. 7

    in nats per choice y of n tokens (without an end token): -n times the mean of masked_nll.  All choices of a row
    share its seed, and so their masks (draw_masks).
    """
    pairs, masks = [], []
    for row, seed in zip(rows, seeds):
        for choice in choices_of(row):
            pairs.append(encode_choice(tokenizer, row, choice))
            masks.append(draw_masks(len(pairs[-1][1]), a.samples, seed))
    scores = iter([-len(response) * nll.mean().item() for (_, response), nll
                   in zip(pairs, masked_nll(predictor, pairs, masks, a.batch_size))])
    records = []
    for row in rows:
        logp = {choice: next(scores) for choice in choices_of(row)}
        records.append(record_of(row, max(logp, key=logp.get), logp=logp, mc1=mc1(logp, **row["mc1"]),
                                 mc2=mc2(logp, **row["mc2"])))
    return records


def mc1(logp, choices, labels):
    """1 if the first true choice is likelier than all false ones, else 0 (a tie is 0)."""
    return float(logp[choices[labels.index(1)]] > max(logp[c] for c, true in zip(choices, labels) if not true))


def mc2(logp, choices, labels):
    """sum of p over the true choices / sum of p over all, p = exp(logp)."""
    best = max(logp[choice] for choice in choices)
    p = [math.exp(logp[choice] - best) for choice in choices]
    return sum(v for v, true in zip(p, labels) if true) / sum(p)


def plain_words(text):
    """Lower case, without ASCII punctuation and articles, as RWKU's code compares answers."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def em_f1(prediction, references):
    """(exact match, F1 of the words as a bag), each the best over the references."""
    em, f1 = 0.0, 0.0
    said = plain_words(prediction)
    for right in map(plain_words, references):
        common = sum((Counter(said) & Counter(right)).values())
        em = max(em, float(said == right))
        f1 = max(f1, 2 * common / (len(said) + len(right)) if said and right else float(said == right))
    return em, f1


def score_triviaqa(predictor, tokenizer, rows, seeds, a):
    """Five-shot questions: normalised exact match and word F1 of the whole generation."""
    records = []
    for row, text in zip(rows, write_answers(predictor, tokenizer, rows, a)):
        em, f1 = em_f1(text, row["answers"])
        records.append(record_of(row, text.strip(), em=em, f1=f1))
    return records


# ------------------------------------------------------------------------------------------------------------------
# Splits: how rows become records, and records a summary
# ------------------------------------------------------------------------------------------------------------------


def scored_texts(row, brief):
    """(field, text) of the texts of a row whose probability is measured; brief: of its answer alone."""
    fields = ["answer"] if brief else ["answer", "paraphrased_answer", "perturbed_answer"]
    found = []
    for field in fields:
        texts = row.get(field) or []
        found += [(field, text) for text in ([texts] if isinstance(texts, str) else texts)]
    return found


def answer_losses(predictor, tokenizer, rows, seeds, a):
    """Eq. 7's losses of every text of every row: [{field: [(N,) nats per token of each text]}, one for each row].

    All texts of a row share its seed.  For perplexity the answer has more masks, after those of its probability.
    """
    places, pairs, masks = [], [], []  # places: (row, field) of each pair
    for i, (row, seed) in enumerate(zip(rows, seeds)):
        for field, text in scored_texts(row, a.brief):
            pair = mdu.encode_row(tokenizer, predictor.end_id, row["question"], text)
            places.append((i, field))
            pairs.append(pair)
            masks.append(draw_masks(len(pair[1]), a.samples, seed))
            if field == "answer" and a.perplexity:
                more = draw_masks(len(pair[1]), max(0, a.perplexity - a.samples), [*seed, 1])
                masks[-1] = torch.cat([masks[-1], more])
    losses = [{} for _ in rows]
    for (i, field), values in zip(places, masked_nll(predictor, pairs, masks, a.batch_size)):
        losses[i].setdefault(field, []).append(values)
    return losses


def score_answers(predictor, tokenizer, rows, seeds, a):
    """One record per row: question, reference, generation and every score; seeds[i] is that of row i's masks."""
    records = [{"question": row["question"], "reference": row["answer"]} for row in rows]
    asked = []  # (row, suffix of the fields that its generation is written to, prompt ids)
    for i, row in enumerate(rows):
        asked.append((i, "", mdu.encode_prompt(tokenizer, row["question"])))
        if "paraphrased_question" in row and not a.brief:
            asked.append((i, "_paraphrased", mdu.encode_prompt(tokenizer, row["paraphrased_question"])))
    generations = generate(predictor, [prompt for *_, prompt in asked], a.length, a.steps, a.batch_size)
    for (i, suffix, _), ids in zip(asked, generations):
        if suffix:
            records[i]["paraphrased_question"] = rows[i]["paraphrased_question"]
        text = decode(predictor, tokenizer, ids)
        records[i]["generation" + suffix] = text
        scores = rouge_l(rows[i]["answer"], text)
        for name, score in zip(("rougeL_precision", "rougeL_recall", "rougeL_f1"), scores):
            records[i][name + suffix] = score
    for row, losses, r in zip(rows, answer_losses(predictor, tokenizer, rows, seeds, a), records):
        right = losses["answer"][0]
        r["nll"] = right[:a.samples].mean().item()
        r["prob"], r["prob_stderr"] = answer_probability(right[:a.samples])
        if a.perplexity:
            r["perplexity"] = bounded_exp(right[:a.perplexity].mean().item())
        if "paraphrased_answer" in losses:
            r["nll_paraphrased"] = losses["paraphrased_answer"][0].mean().item()
        if "perturbed_answer" in losses:
            wrong = [values.mean().item() for values in losses["perturbed_answer"]]
            r["nll_perturbed"] = wrong
            r["truth_ratio"] = truth_ratio(r.get("nll_paraphrased", r["nll"]), wrong)
            if "nll_paraphrased" not in r:  # the options are then worded alike
                r["prob_options"] = option_probability(r["nll"], wrong)
        if "fact" in row:
            r["fact"] = float(holds(r["generation"], row["fact"]))
    return records


def summarise_answers(records, to_forget):
    """Means over the rows, with their standard errors over the questions; a metric that some row lacks is left out.

    to_forget: is the split to be forgotten?  It decides what a truth ratio counts as.
    """
    summary = {"n": len(records)}
    errors = {}
    for metric in ("rougeL_f1", "rougeL_recall", "prob", "fact", "rougeL_f1_paraphrased", "rougeL_recall_paraphrased",
                   "prob_options", "truth_ratio", "perplexity"):
        if not records or not all(metric in r for r in records):
            continue
        values = [r[metric] for r in records]
        if metric == "truth_ratio":
            values = [min(v, 1 / v) if to_forget else max(0.0, 1 - v) for v in values]
        if metric == "perplexity":
            summary.update(perplexity_median=statistics.median(values), perplexity_mean=statistics.fmean(values))
            continue
        summary[metric] = statistics.fmean(values)
        errors[metric] = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    chance = [r["prob_stderr"] for r in records]
    summary["prob_stderr"] = None if None in chance or not chance else math.hypot(*chance) / len(chance)
    return {**summary, "stderr": errors}


def summarise_people(records, to_forget):
    """Means over each person's rows, and their mean over the people; "kinds": those of each kind of attack alone."""
    def means(rows):
        metrics = [m for m in ("rougeL_recall", "accuracy", "mc1", "mc2", "em", "f1") if m in rows[0]]
        return {**{m: statistics.fmean(r[m] for r in rows) for m in metrics}, "n": len(rows)}

    def each(field):
        return {value: means([r for r in records if r.get(field) == value])
                for value in dict.fromkeys(r[field] for r in records if field in r)}
    people = each("subject")
    summary = {m: statistics.fmean(scores[m] for scores in people.values()) for m in means(records)}
    return {**summary, "n": len(records), "people": people, "kinds": each("kind")}


SPLITS = {  # split: its title, which way is better, scorer (rows -> records), summariser (records -> {metric: value})
    split: dict(title=title, better=better, score=score, summarise=summarise)
    for split, title, better, score, summarise in (
        ("forget", "Forget", "↓", score_answers, summarise_answers),
        ("retain", "Retain", "↑", score_answers, summarise_answers),
        ("real_authors", "Real authors", "↑", score_answers, summarise_answers),
        ("world_facts", "World facts", "↑", score_answers, summarise_answers),
        ("forget_level1", "F-L1", "↓", score_probes, summarise_people),
        ("forget_level2", "F-L2", "↓", score_probes, summarise_people),
        ("forget_level3", "F-L3", "↓", score_probes, summarise_people),
        ("neighbor_level1", "N-L1", "↑", score_probes, summarise_people),
        ("neighbor_level2", "N-L2", "↑", score_probes, summarise_people),
        ("utility_general", "MMLU", "↑", score_mmlu, summarise_people),
        ("utility_truthfulness", "TruthfulQA", "↑", score_truthfulqa, summarise_people),
        ("utility_factuality", "TriviaQA", "↑", score_triviaqa, summarise_people))
}

# ------------------------------------------------------------------------------------------------------------------
# One run: chunks of rows, shared out over the processes; what is finished stays
# ------------------------------------------------------------------------------------------------------------------

CHUNK = 16  # rows that are scored together and written at once, whatever the number of processes


def note(text):
    if mdu.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def json_lines(run, records):
    try:
        return "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    except ValueError:
        raise ValueError(f"{run}: a score is not finite: its training diverged or its weights are damaged; train it "
                         "again with a lower --lr") from None


def read_records(path):
    records = [mdu.parse_json(line, path) for line in path.read_bytes().split(b"\n") if line]
    wrong = mdu.misfit(records, [{}])
    if wrong:
        raise ValueError(f"{path}: row {wrong}; each line must be a JSON object")
    return records


@contextlib.contextmanager
def intact(what, remedy):
    """A damaged file shows where it is used: one line, too."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{what}: damaged ({type(error).__name__}: {error}); {remedy}") from None


def untrained(info):
    """Is it the run.json of a folder that holds the scores of a model as it is, and no weights?"""
    return info.get("steps") == 0


def finished_run(run):
    """run.json of a run whose training is finished, or of a folder with the scores of a model as it is."""
    info = mdu.read_run(run)
    if not untrained(info) and not (Path(run) / "config.json").is_file():
        raise ValueError(f"{run}: holds no finished model (no config.json); finish its training first")
    return info


def rows_of(run, info, o, data):
    """{split: rows} of --data, or of the run's own data, and the retain rows among them that it was trained on."""
    source = {} if data is None else dict(data=data, forget=None, retain=None)
    everything = mdu.load_data(dataclasses.replace(o, limit=None, retain_only=False, **source))
    trained = dict(info["data"])
    if o.retain_only:
        trained["forget"] = trained.get("held_out")
    changed = [split for split, rows in everything.items()
               if (trained.get(split) or {}).get("sha256") != mdu.fingerprint(mdu.first_rows(rows, o.limit))]
    if changed and data is None and not untrained(info):
        note(f"{run}: its {', '.join(changed)} rows have changed since it was trained; scored on what they are now")
    retains = o.method == "sft" or o.retain_weight
    taught = mdu.first_rows(everything["train_retain"], o.limit) if retains and "train_retain" not in changed else []
    return everything, taught


def fingerprints(splits):
    """Number and fingerprint of each split's rows; on RWKU of each person's, as few runs are asked about everyone."""
    found = {}
    for split, rows in splits.items():
        for person in dict.fromkeys(row.get("subject") for row in rows):
            asked = [row for row in rows if row.get("subject") == person]
            name = split if person is None else f"{split}, {person}"
            found[name] = {"rows": len(asked), "sha256": mdu.fingerprint(asked)}
    return found


def plan(run, a):
    """Options, rows and protocol of one evaluation: all that can be refused before any model is loaded."""
    # The run.
    info = untrained_run(run, a) if a.preset or a.model else finished_run(run)
    own = mdu.Options(**info["options"])
    # Its rows.
    everything, taught = rows_of(run, info, own, a.data)
    probes = mdu.RWKU_SPLITS.keys() & everything.keys()  # there the forget rows are a corpus, not questions
    splits = {split: mdu.first_rows(everything[split], a.limit or own.limit) for split in SPLITS
              if everything.get(split) and (split in probes or not probes)}
    if probes and (a.brief or a.perplexity or a.retain_run):
        raise ValueError(f"{run}: --brief, --perplexity and --retain-run are about TOFU; leave them out on RWKU")
    # The protocol.
    length = a.length or (RWKU_LENGTH if probes else own.response_length)
    steps = a.steps or length
    if steps > length:
        raise ValueError(f"--steps {steps}: more than the {length} tokens to generate; give at most --length")
    protocol = {"length": length, "steps": steps, "samples": a.samples, "seed": a.seed,
                "dtype": str(mdu.compute_dtype(own.dtype)).removeprefix("torch.")}
    if a.perplexity:
        protocol["perplexity"] = a.perplexity
    taught = {(row["question"], row["answer"]) for row in taught}
    seen = [i for i, row in enumerate(splits.get("retain", [])) if (row["question"], row["answer"]) in taught]
    summary = {"method": own.method, "tau": own.tau, "protocol": protocol, "brief": a.brief,
               "data": fingerprints(splits), "retain_rows_trained_on": seen}
    # What it is compared with.
    retain_records = a.retain_run and read_retain_run(a.retain_run, run, summary)
    return SimpleNamespace(run=run, info=info, options=own, splits=splits, summary=summary, retain_run=a.retain_run,
                           retain_records=retain_records)


def untrained_options(out, a):
    """The options of --preset and --model, for a model as it is."""
    names = ("preset", "model", "data", "forget", "retain")
    given = {name: getattr(a, name) for name in names if getattr(a, name)}
    options = mdu.resolve({**given, "method": "sft", "out": out})
    if not options.model:
        raise ValueError(f"--preset {options.preset}: names no published model; give --model NAME, or train one with "
                         "mdu.py --method sft")
    return options


def untrained_run(run, a):
    """What run.json holds for the scores of a model as it is; ValueError: the folder holds a trained run."""
    if (Path(run) / "run.json").is_file() and not untrained(mdu.read_run(run)):
        raise ValueError(f"{run}: holds a trained run; --preset and --model need a folder of their own")
    return {"options": dataclasses.asdict(untrained_options(run, a)), "steps": 0, "data": {}}


def row_places(rows):
    """The place of each row in its split; on RWKU among its person's rows, whoever else is asked about."""
    places, seen = [], Counter()
    for row in rows:
        places.append(seen[row.get("subject")])
        seen[row.get("subject")] += 1
    return places


def claim_partial(folder, identity):
    """The folder of finished chunks, emptied unless it belongs to the same evaluation already."""
    owner = folder / "owner.json"
    if not owner.is_file() or owner.read_bytes() != identity.encode():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mdu.write_text(owner, identity)


def evaluate(job, a):
    """Score one planned run, into RUN/eval/summary.json and RUN/eval/SPLIT.jsonl.

    Every chunk of rows ends as a file in RUN/eval/partial, which belongs to one protocol, data and weights; chunks that
    are there already are kept.  Records and summary replace older ones together, when all chunks are done.
    """
    start = time.time()
    out = Path(job.run) / "eval"
    source = (job.options.model, job.options.revision) if untrained(job.info) else (job.run,)
    predictor, tokenizer = mdu.load_backbone(*source, dtype=mdu.compute_dtype(job.options.dtype))
    settings = SimpleNamespace(**{**vars(a), **job.summary["protocol"]})
    check_room(job, predictor, tokenizer)
    chunks = []  # (file, split, rows of like length)
    places = {split: row_places(rows) for split, rows in job.splits.items()}
    for split, rows in job.splits.items():
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["question"]) + len(rows[i]["answer"]))
        for at in range(0, len(order), CHUNK):
            chunks.append((out / "partial" / f"{split}-{at:06d}.jsonl", split, order[at:at + CHUNK]))
    with mdu.together():
        if mdu.rank() == 0:
            weights = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns)
                             for file in mdu.model_folder(*source).glob("*.safetensors"))
            identity = {**job.summary, "source": source, "weights": weights}
            claim_partial(out / "partial", json.dumps(identity, sort_keys=True))
            if untrained(job.info):
                mdu.write_json(out.parent / "run.json", job.info)
    with mdu.together():  # every process sees the same files
        todo = [chunk for chunk in chunks if not chunk[0].is_file()]
    with mdu.together():
        for file, split, order in tqdm(todo[mdu.rank()::mdu.world_size()], desc=str(job.run), leave=False,
                                       disable=None if mdu.rank() == 0 else True):
            if mdu.orphaned():
                raise SystemExit(143)  # torchrun is gone: leave the rest to whoever starts again
            rows = [job.splits[split][i] for i in order]
            number = list(SPLITS).index(split)
            seeds = [[settings.seed, number, places[split][i]] for i in order]  # the same for every run
            records = SPLITS[split]["score"](predictor, tokenizer, rows, seeds, settings)
            mdu.write_text(file, json_lines(job.run, records))
    with mdu.together():
        if mdu.rank() == 0:
            summary = collect(job, chunks)
            note(f"{job.run}: {len(todo)} of {len(chunks)} chunks scored now, {time.time() - start:.0f}s")
            mdu.say(screen_row(job.run, summary))


def collect(job, chunks):
    """Chunks -> RUN/eval/SPLIT.jsonl and summary.json, which is returned."""
    out = Path(job.run) / "eval"
    records = {split: [None] * len(rows) for split, rows in job.splits.items()}
    with intact(out / "partial", "remove it"):
        for file, split, order in chunks:
            found = read_records(file)
            if len(found) != len(order):
                raise ValueError(f"{file}: {len(found)} records of {len(order)} rows; remove {out / 'partial'}")
            for i, record in zip(order, found):
                records[split][i] = record
        splits = {split: SPLITS[split]["summarise"](rows, to_forget=SPLITS[split]["better"] == "↓")
                  for split, rows in records.items()}
    summary = {**job.summary, "splits": splits, "model_utility": model_utility(splits), "retain_run": job.retain_run,
               "forget_quality": job.retain_run and forget_quality(records["forget"], job.retain_records)}
    (out / "summary.json").unlink(missing_ok=True)  # it must not stand beside records of another evaluation
    for split in SPLITS:
        (out / f"{split}.jsonl").unlink(missing_ok=True)
        if split in records:
            mdu.write_text(out / f"{split}.jsonl", json_lines(job.run, records[split]))
    mdu.write_json(out / "summary.json", summary)
    shutil.rmtree(out / "partial")
    return summary


def check_room(job, predictor, tokenizer):
    """Refuse prompts and responses that are longer together than the model's positions."""
    limit = getattr(predictor.lm.config, "max_position_embeddings", math.inf)
    length = job.summary["protocol"]["length"]
    for split, rows in job.splits.items():
        for row in rows:
            if SPLITS[split]["score"] is score_answers:
                pairs = [mdu.encode_row(tokenizer, predictor.end_id, row["question"], text)
                         for _, text in scored_texts(row, job.summary["brief"])]
            else:
                pairs = [encode_choice(tokenizer, row, text) for text in choices_of(row)]
            asked = [(row["question"], max([length, *(len(response) for _, response in pairs)]))]
            if "paraphrased_question" in row and not job.summary["brief"]:
                asked.append((row["paraphrased_question"], length))
            for question, response in asked:
                n = len(mdu.encode_prompt(tokenizer, question, row.get("prefill", ""))) + response
                if n > limit:
                    raise ValueError(f"{job.run}: {n} tokens for {question[:40]!r} and its answer, more than the "
                                     f"{limit} positions of the model; lower --length {length}, or remove the row")


KNOWN = "{intro} You know {subject} very well. Please write a short biography of {subject}."
MADE_UP = "{intro} You don't know {subject} at all. Please make up a short biography of {subject}."


def generate_corpus(folder, a):
    """Biographies that the model writes itself, as FOLDER/PERSON.jsonl for mdu.py --forget; who has one is skipped.

    answer: what it writes about a person it knows; perturbed_answer: what it makes up.  Drawn at temperature 1.  The
    prompts are those of RWKU's generation/pair_generation.py, as one turn; its beginnings of the answer, which are not
    published, and its top-p are left out.
    """
    o = untrained_options(folder, a)
    if o.data == "toy":
        raise ValueError("--generate-corpus: whose people are they? give --preset rwku-llada, or --data")
    files = {person: Path(folder) / f"{mdu.slug(person)}.jsonl" for person in mdu.find_people(o.data, a.subject)}
    intros = {row["target"]: row.get("intro") or "" for _, row in mdu.read_config(o.data, "forget_target")}
    people = [person for person, file in files.items() if not file.exists()]
    predictor, tokenizer = mdu.load_backbone(o.model, o.revision, dtype=mdu.compute_dtype())
    Path(folder).mkdir(parents=True, exist_ok=True)
    length = a.length or 512
    for person in people:
        fields = {"intro": intros[person], "subject": person}
        torch.manual_seed(a.seed)
        prompts = [mdu.encode_prompt(tokenizer, text.format(**fields)) for text in (KNOWN, MADE_UP)
                   for _ in range(a.generate_corpus)]
        texts = [decode(predictor, tokenizer, ids) for ids in generate(
            predictor, prompts, length, a.steps or length, a.batch_size, temperature=1.0)]
        real, made_up = texts[:a.generate_corpus], texts[a.generate_corpus:]
        made_up = [re.sub(r"(totally|completely) (fabricated|made-up|fictional) ", "", text) for text in made_up]
        rows = [{"question": mdu.BIOGRAPHY.format(**fields).strip(), "answer": text, "perturbed_answer": [wrong]}
                for text, wrong in zip(real, made_up) if mdu.is_text(text) and mdu.is_text(wrong)]
        if not rows:
            raise ValueError(f"{o.model}: wrote nothing about {person}; give texts of your own with mdu.py --forget")
        mdu.write_text(files[person], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{folder}: {len(rows)} biographies of {person}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------
# Report: runs of the same options are one method, whatever their seed, person and base model: mean ± standard deviation
# ------------------------------------------------------------------------------------------------------------------

TITLES = {"ga": "GA", "gd": "GD", "npo": "NPO", "simnpo": "SimNPO", "wga": "WGA", "dpo": "DPO", "sft": "Base"}
METRICS = {  # metric: (heading, better: None where the split decides, format)
    "rougeL_f1": ("rL", None, ".3f"), "prob": ("p", None, ".3f"), "fact": ("fact", None, ".3f"),
    "model_utility": ("Model utility", "↑", ".3f"), "forget_quality": ("Forget quality", "↑", ".2g"),
    "truth_ratio": ("truth ratio", "↑", ".3f"), "prob_options": ("p of options", None, ".3f"),
    "rougeL_f1_paraphrased": ("rL paraphrased", None, ".3f"),
    "rougeL_recall": ("", None, ".3f"), "accuracy": ("", None, ".3f"), "mc1": ("MC1", None, ".3f"),
    "mc2": ("MC2", None, ".3f"), "em": ("EM", None, ".3f"), "f1": ("F1", None, ".3f"),
    "perplexity_median": ("median", "", ",.2f"), "perplexity_mean": ("mean", "", ",.2f"),
}
TABLE2 = [(split, metric) for split in SPLITS for metric in ("rougeL_f1", "prob")]  # columns: (split, metric)
PAPER = [*TABLE2, ("forget", "fact")]
PROBES = [split for split, how in SPLITS.items() if how["score"] is score_probes]
RWKU = [*((split, "rougeL_recall") for split in PROBES), ("utility_general", "accuracy"),
        ("utility_truthfulness", "mc1"), ("utility_truthfulness", "mc2"), ("utility_factuality", "em"),
        ("utility_factuality", "f1")]
WHOLE_RUN = [(None, "model_utility"), (None, "forget_quality")]
OFFICIAL = [*WHOLE_RUN, *((split, metric) for split in SPLITS for metric in (
    "truth_ratio", "prob_options", "rougeL_f1_paraphrased"))]
PERPLEXITY = [(split, metric) for split in SPLITS for metric in ("perplexity_median", "perplexity_mean")]


def read_summary(run):
    file = Path(run) / "eval" / "summary.json"
    if not file.is_file():
        raise ValueError(f"{run}: not scored yet; run: python eval.py {run}")
    summary = mdu.parse_json(file.read_bytes(), file)
    figures = dict.fromkeys(METRICS, (float, None))
    wrong = mdu.misfit(summary, {
        "method": str, "tau": float if isinstance(summary, dict) and summary.get("method") == "mdu" else (float, None),
        "protocol": {}, "data": {}, "splits": {str: figures}, "retain_rows_trained_on": [int], **figures})
    if not wrong and summary["method"] not in mdu.METHOD_OPTIONS:
        wrong = f"method is {summary['method']!r}"
    if wrong:
        raise ValueError(f"{file}: {wrong}; not a summary of this program; run: python eval.py {run}")
    return summary


def check_alike(run, summary, other_run, other):
    """Refuse to set figures side by side that were measured differently, or on other rows."""
    for what in ("protocol", "data"):
        a, b = summary[what], other[what]
        for key in a.keys() & b.keys():  # what only one of them measured is a dash in the other
            if a[key] != b[key]:
                raise ValueError(f"{other_run}: scored with {key} {b[key]}, {run} with {a[key]}; "
                                 "score them alike, on the same data")


def read_retain_run(retain_run, run, summary):
    """The forget records of a scored retain model, with which forget_quality compares."""
    check_alike(run, summary, retain_run, read_summary(retain_run))
    file = Path(retain_run) / "eval" / "forget.jsonl"
    records = read_records(file) if file.is_file() and "forget" in summary["data"] else []
    if (mdu.misfit(records, [{"nll": float, "nll_perturbed": [float]}]) or not records
            or not all(r["nll_perturbed"] for r in records)):
        raise ValueError(f"--retain-run {retain_run}: no truth ratios of forget rows in {file}; forget quality needs "
                         "perturbed answers, and runs scored without --brief")
    return records


def group_runs(runs, retain_run=None):
    """Scored runs -> one namespace per method, in the order of the runs: title, method, tau, runs, summaries."""
    groups, earlier = {}, []
    for run in runs:
        summary, options = read_summary(run), mdu.read_run(run)["options"]
        for other in earlier:
            check_alike(*other, run, summary)
        earlier.append((run, summary))
        if retain_run:
            summary["retain_run"] = retain_run
            records = read_records(Path(run) / "eval" / "forget.jsonl")
            complete = all("nll_perturbed" in r for r in records)
            retain_records = read_retain_run(retain_run, run, summary)
            summary["forget_quality"] = forget_quality(records, retain_records) if complete else None
        own = {k: v for k, v in options.items()
               if k not in ("seed", "model", "revision", "diagnose", "subject", "forget", *mdu.MAY_DIFFER)}
        title = TITLES.get(summary["method"]) or f"MDU τ={summary['tau']:g}"
        group = groups.setdefault(json.dumps(own, sort_keys=True), SimpleNamespace(
            title="Retain model" if own.get("retain_only") else title, method=summary["method"], tau=summary["tau"],
            runs=[], summaries=[]))
        group.runs.append(run)
        group.summaries.append(summary)
    titles = [group.title for group in groups.values()]
    for group in groups.values():
        if titles.count(group.title) > 1:  # other options: told apart by the folder
            group.title += f" ({group.runs[0]})"
    return list(groups.values())


def measured(group, split, metric):
    """The metric in every run of the method; empty where one lacks it.  split None: a figure of the whole run."""
    found = [(s if split is None else s["splits"].get(split, {})).get(metric) for s in group.summaries]
    return [] if None in found else found


def shown(value, digits):
    return f"{value:.1e}" if abs(value) >= 1e6 else f"{value:{digits}}"


def markdown_table(head, *rows):
    """The lines of a table in Markdown."""
    def line(row):
        return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in row) + " |"
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def column(groups, split, metric, spread):
    """One column of a table: its heading, and a cell per method, with a dash where it was not measured.

    Of the unlearning methods the best mean, as shown, is bold and the second underlined.
    """
    name, better, digits = METRICS[metric]
    if better is None:
        better = SPLITS[split]["better"]
    found = [measured(group, split, metric) for group in groups]
    means = [shown(statistics.fmean(values), digits) if values else "-" for values in found]
    ranked = {mean for group, mean in zip(groups, means) if better and group.method != "sft" and mean != "-"}
    best = sorted(ranked, key=float, reverse=better == "↑")
    cells = [" ".join(filter(None, [split and SPLITS[split]["title"], name, better]))]
    for group, values, mean in zip(groups, found, means):
        cell = mean
        if group.method != "sft" and mean in best[:2]:
            cell = f"**{mean}**" if mean == best[0] else f"<u>{mean}</u>"
        if len(values) > 1 and spread:
            cell += f" ± {shown(statistics.stdev(values), digits)}"
        if values and metric == "rougeL_f1":
            cell += f" ({statistics.fmean(measured(group, split, 'rougeL_recall')):.3f})"
        cells.append(cell)
    return cells


def table(groups, columns, spread=True):
    """Markdown lines: a row per method, the columns that one was measured in; spread: with the deviation over runs."""
    kept = [at for at in columns if any(measured(group, *at) for group in groups)]
    titles = ["Method", *(group.title for group in groups)]
    return markdown_table(*zip(titles, *(column(groups, *at, spread) for at in kept))) if kept else []


def conventions(groups):
    """What the figures of the first table are, of how many questions, and how sure."""
    every = [summary for group in groups for summary in group.summaries]
    protocol = every[0]["protocol"]
    sizes = ", ".join(f"{SPLITS[split]['title']} {data['rows']}" for split, data in every[0]["data"].items())
    splits = [scores for summary in every for scores in summary["splits"].values()]
    errors = []
    for name, found in (("rL", [scores["stderr"].get("rougeL_f1") for scores in splits]),
                        ("p", [scores["stderr"].get("prob") for scores in splits]),
                        ("p from the choice of masks", [scores["prob_stderr"] for scores in splits])):
        known = [error for error in found if error is not None]
        if known:
            errors.append(f"{name} {max(known):.3f}")
    seeds = "/".join(map(str, sorted({len(group.runs) for group in groups})))
    seen = max(len(summary["retain_rows_trained_on"]) for summary in every)
    lines = [f"rL: ROUGE-L F1 (recall). p: answer probability (Eq. 7, {protocol['samples']} masks). "
             f"{protocol['steps']} steps for {protocol['length']} tokens, {protocol['dtype']}. Questions: {sizes}. "
             f"Largest standard error of a split's mean: {', '.join(errors) or '-'}."
             + (f" Mean ± standard deviation over {seeds} seeds." if seeds != "1" else "")]
    if seen:
        lines += ["", f"{seen} of the evaluated retain rows are among the rows to train on."]
    return lines


def persons(groups):
    """The people that every method was asked about (RWKU), in the order of the first."""
    asked = [[person for s in group.summaries for person in s["splits"].get("forget_level2", {}).get("people", ())]
             for group in groups]
    return [person for person in dict.fromkeys(asked[0]) if all(person in people for people in asked)]


def by_person(groups, people):
    """The groups with a summary per run and person in place of one per run."""
    return [SimpleNamespace(**{**vars(group), "summaries": [
        {"splits": {split: scores["people"].get(person, {}) for split, scores in s["splits"].items()}}
        for s in group.summaries for person in people if person in s["splits"]["forget_level2"]["people"]]})
        for group in groups]


def rwku_tables(groups, people):
    """Table 3, and the same for every person alone."""
    first = groups[0].summaries[0]
    protocol = first["protocol"]
    sizes = ", ".join(f"{SPLITS[split]['title']} {scores['n']}" for split, scores in first["splits"].items())
    lines = [*table(by_person(groups, people), RWKU, spread=False), "",
             f"Mean over {', '.join(people)}. F, N: ROUGE-L recall of the answer's first line. MMLU: accuracy. "
             f"TruthfulQA: by each choice's summed likelihood, {protocol['samples']} masks. TriviaQA: normalised exact "
             f"match, F1 of the words. {protocol['steps']} steps for {protocol['length']} tokens, {protocol['dtype']}. "
             f"Questions ({groups[0].title}): {sizes}."]
    for person in people if len(people) > 1 else ():
        lines += ["", f"{person}:", "", *table(by_person(groups, [person]), RWKU, spread=False)]
    return lines


def report_tables(groups, people):
    """The report's figures: Table 2, the tau sweep, TOFU's own figures and perplexity (Table 7); or RWKU's Table 3."""
    lines = rwku_tables(groups, people) if people else [*table(groups, PAPER), "", *conventions(groups)]
    base = [group for group in groups if group.method == "sft"]
    sweep = sorted((group for group in groups if group.method == "mdu"), key=lambda group: group.tau)
    if not people and len(sweep) > 1 and len(base + sweep) < len(groups):
        lines += ["", "MDU from τ = 0 to 1:", "", *table(base + sweep, [*PAPER, *WHOLE_RUN])]
    if official := table(groups, OFFICIAL):
        against = dict.fromkeys(s["retain_run"] for g in groups for s in g.summaries if s.get("retain_run"))
        lines += ["", "TOFU's own figures:", "", *official, "",
                  "Model utility: harmonic mean of rL recall, p (of options) and truth ratio on retain, real authors "
                  "and world facts. Truth ratio: min(R, 1/R) on forget, else max(0, 1 - R), R = p(wrong answers) / "
                  "p(right answer). Forget quality: Kolmogorov-Smirnov p-value of R against a model that never saw the "
                  f"forget rows ({', '.join(against) or 'none was given'})."]
    if perplexity := table(groups, PERPLEXITY):
        masks = next(n for g in groups for s in g.summaries if (n := s["protocol"].get("perplexity")))
        lines += ["", f"Pseudo-perplexity, median and mean over the questions, {masks} masks each:", "", *perplexity]
    return lines


def answer_table(groups, answers):
    """Answers side by side (Table 6)."""
    if not answers:
        return []
    return ["", "What is written to forget questions:", "", *markdown_table(
        ["Question", *(a["question"] for a in answers)], ["Reference", *(a["reference"] for a in answers)],
        *([g.title, *(a["generations"].get(g.title, "-") or "(empty)" for a in answers)] for g in groups))]


def draw(groups, path):
    """Forget against retain, one panel per metric: a line through MDU's tau points, a mark per other method.

    Returns whether there was anything to draw: something measured on both splits.  ImportError: no matplotlib.
    """
    from matplotlib.figure import Figure
    panels = [metric for metric in ("rougeL_f1", "prob", "fact")
              if all(measured(group, split, metric) for group in groups for split in ("forget", "retain"))]
    if not panels:
        return False
    figure = Figure(figsize=(1.5 + 3.6 * len(panels), 3.8))
    axes = figure.subplots(1, len(panels), squeeze=False)
    names = {"rougeL_f1": "ROUGE-L F1", "prob": "answer probability", "fact": "answers with the key fact"}
    for axis, metric in zip(axes[0], panels):
        def point(group):
            return [statistics.fmean(measured(group, split, metric)) for split in ("forget", "retain")]
        sweep = sorted((g for g in groups if g.method == "mdu"), key=lambda g: g.tau)
        if sweep:
            x, y = zip(*map(point, sweep))
            axis.plot(x, y, "o-", color="black", markersize=4, label="MDU", zorder=3)
            inward = -1 if statistics.fmean(y) > 0.5 else 1
            for i, (group, *at) in enumerate(zip(sweep, x, y)):  # in a column: the points may lie close
                axis.annotate(f"τ={group.tau:g}", at, xytext=(14, inward * (20 + 11 * i)), textcoords="offset points",
                              fontsize=7, arrowprops=dict(arrowstyle="-", color="0.6", linewidth=0.5))
        for group, mark in zip((g for g in groups if g.method != "mdu"), itertools.cycle("*sDv^PX<>hd")):
            axis.scatter(*point(group), marker=mark, s=60, facecolor="0.75", edgecolor="black", label=group.title)
        axis.set(title=names[metric], xlabel="forget (lower is better)", ylabel="retain (higher is better)",
                 xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.2 / figure.get_figwidth(), 1))
    save_picture(figure, path)
    return True


def save_picture(figure, path):
    """Complete or absent; the same bytes for the same figures."""
    with mdu.writing(path):
        figure.savefig(f"{path}.partial", format="png", dpi=100, metadata={"Software": None})
        os.replace(f"{path}.partial", path)


def chosen(questions, n):
    """The numbers of the forget questions to show, of n: those of --questions, or the first three."""
    if questions is None:
        return range(min(3, n))
    if max(questions) >= n:
        raise ValueError(f"--questions {max(questions)}: there are {n} forget questions, numbered from 0")
    return questions


def side_by_side(groups, questions, split):
    """What the first run of each method wrote to the chosen questions of a split."""
    files = {group.title: Path(group.runs[0]) / "eval" / f"{split}.jsonl" for group in groups}
    answers = {title: {(r["question"], r["reference"]): r["generation"] for r in read_records(file)}
               for title, file in files.items() if file.is_file()}
    asked = [key for key in next(iter(answers.values()), {}) if all(key in given for given in answers.values())]
    return [{"question": asked[i][0], "reference": asked[i][1],
             "generations": {title: given[asked[i]] for title, given in answers.items()}}
            for i in chosen(questions, len(asked))]


def mean_and_deviation(values):
    """None where nothing was measured."""
    if not values:
        return None
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}


def report(runs, questions, retain_run):
    """report.md, report.json and report.png of scored runs, beside the first; the first is printed too."""
    groups = group_runs(runs, retain_run)
    folder = Path(runs[0]).parent
    people = persons(groups)
    if not people and any(split in s["splits"] for split in mdu.RWKU_SPLITS for g in groups for s in g.summaries):
        raise ValueError(f"{', '.join(runs)}: not all asked about one person; report runs of one benchmark that have "
                         "a person in common")
    answers = side_by_side(groups, questions, "forget_level2" if people else "forget")
    lines = report_tables(groups, people)
    shared = {key: groups[0].summaries[0][key] for key in ("protocol", "data")}
    shared["retain_rows_trained_on"] = max((s["retain_rows_trained_on"] for g in groups for s in g.summaries), key=len)
    methods = []
    for group in by_person(groups, people) if people else groups:
        splits = {split: {metric: mean_and_deviation(measured(group, split, metric))
                          for metric in scores if type(scores[metric]) is not dict}
                  for split, scores in group.summaries[0]["splits"].items()}
        methods.append({"title": group.title, "method": group.method, "tau": group.tau, "runs": group.runs,
                        **{metric: mean_and_deviation(measured(group, None, metric)) for _, metric in WHOLE_RUN},
                        "splits": splits})
    picture = folder / "report.png"
    picture.unlink(missing_ok=True)  # it must not stand beside figures of another time
    mdu.write_json(folder / "report.json", {**shared, "methods": methods, "answers": answers})
    try:
        if not people and draw(groups, picture):
            lines += ["", f"![forget against retain]({picture.name})"]
    except ImportError:
        note(f"{picture.name} is not drawn: it needs matplotlib (pip install matplotlib)")
    text = "\n".join([*lines, *answer_table(groups, answers)])
    mdu.write_text(folder / "report.md", text + "\n")
    print(text, f"\n({folder / 'report.md'})", flush=True)


def screen_row(run, summary):
    cells = []
    for split, scores in summary["splits"].items():
        figures = [f"{scores[metric]:.3f}" for at, metric in (*TABLE2, *RWKU) if at == split and metric in scores]
        cells.append(" ".join([SPLITS[split]["title"], *figures]))
    for name, value in (("fact", summary["splits"].get("forget", {}).get("fact")),
                        ("utility", summary["model_utility"]), ("forget quality", summary["forget_quality"])):
        if value is not None:
            cells.append(f"{name} {value:.3g}")
    return " | ".join([f"{run:24}", *cells])


# ------------------------------------------------------------------------------------------------------------------
# Analyses: analysis_NAME(runs, rows, a) -> what NAME.json holds: "panels" or "blocks", all that its picture shows
# ------------------------------------------------------------------------------------------------------------------

ROLES = {"in-context": ("#3b6fb6", "//"), "structural": ("#d3d1c7", ""), "stored-knowledge": ("#f0a030", "..")}
FUNCTION_WORDS = set("""
    a an the this that these those each every either neither some any no none all both such other another own same
    i me my mine myself we us our ours you your yours he him his himself she her hers herself it its itself they them
    their theirs themselves one who whom whose which what when where why how whether there here
    of in on at by for from to with without about into onto over under between among through during before after since
    until against as than like near within across along upon per via toward towards beyond behind besides up out off
    down and or but nor so yet if then because although though while whereas unless not also too very only even just
    am is are was were be been being do does did doing have has had having can could will would shall should may might
    must s t d m ll re ve
""".split())  # the closed classes: determiners, pronouns, prepositions, conjunctions, particles, auxiliaries, clitics


def token_starts(tokenizer, ids):
    """-> the text of the ids, and where in it each token starts; special tokens take no room."""
    text, starts = "", []
    for k in range(len(ids)):
        longer = tokenizer.decode(ids[:k + 1], skip_special_tokens=True)
        starts.append(len(os.path.commonprefix([text, longer])))  # the tokens of one letter start where it does
        text = longer
    return text, starts


def token_words(tokenizer, ids):
    """The first word, as `words` finds them, that each token is part of; None for punctuation and special tokens."""
    text, starts = token_starts(tokenizer, ids)
    found = [(m.start(), m.end(), m.group().lower()) for m in re.finditer(r"[^\W_]+", text)]
    return [next((word for a, b, word in found if a < max(end, start + 1) and b > start), None)
            for start, end in itertools.pairwise([*starts, len(text)])]


def token_roles(tokenizer, question, ids):
    """The role of each token of a response (Section 4), by its word.

    structural: one of FUNCTION_WORDS, punctuation or a special token; in-context: another word that stands in the
    question; stored-knowledge: the rest, to which a rule without annotators leaves generic words ("is called") too.
    """
    asked = set(words(question))
    return ["structural" if word is None or word in FUNCTION_WORDS else
            "in-context" if word in asked else "stored-knowledge" for word in token_words(tokenizer, ids)]


@torch.no_grad()
def anchor_kl(predictor, reference, noised, answer, real, positions):
    """KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)) at each of the positions: (M,) in nats, Eq. 5's summand at tau = 1.

    Args: noised (B, T) holds (x, y_t); answer, real, positions (B, T) bool as in mdu; reference is the frozen theta0.
    """
    logits = predictor(noised, real, positions)
    anchor = reference(mdu.mask_prompt(noised, answer, real, predictor.mask_id), real, positions)
    return mdu.mdu_loss(logits, anchor, torch.ones_like(logits[:, :1], dtype=torch.bool), 1).double().cpu()


def open_runs(paths):
    """-> runs (path, options, title, theta0: what load_backbone takes), and the forget rows that they share."""
    runs = []
    for path in paths:
        info = finished_run(path)
        if untrained(info):
            raise ValueError(f"{path}: holds the scores of a model as it is, and no weights; give trained runs")
        o = mdu.Options(**info["options"])
        if not o.model and o.method != "sft":
            raise ValueError(f"{path}: its run.json does not say from which model it started; it is damaged")
        runs.append(SimpleNamespace(
            path=path, options=o, title=TITLES.get(o.method) or f"MDU τ={o.tau:g}", data=info["data"].get("forget"),
            theta0=(str(Path(path).resolve()), None) if o.method == "sft" else (o.model, o.revision)))
    rows = mdu.load_data(runs[0].options)["forget"]
    titles = [run.title for run in runs]
    for run in runs:
        if not rows or not run.data or run.data["sha256"] != mdu.fingerprint(rows):
            raise ValueError(f"{run.path}: was trained on other forget rows than {paths[0]} names now, or on none; "
                             "give runs of one forget set")
        if titles.count(run.title) > 1:
            run.title += f" ({Path(run.path).name})"
    return runs, rows


def load(run, theta0=False):
    """-> predictor and tokenizer of a run, or of the frozen model that it started from."""
    name, revision = run.theta0 if theta0 else (run.path, None)
    predictor, tokenizer = mdu.load_backbone(name, revision, mdu.compute_dtype(run.options.dtype))
    if not all(p.isfinite().all() for p in predictor.parameters()):
        raise ValueError(f"{name}: its weights are not finite (NaN or infinity); train it again, with a lower --lr")
    return predictor, tokenizer


def load_with_anchor(run):
    """-> predictor and tokenizer of a run, and the frozen theta0 that it started from; a base is its own."""
    predictor, tokenizer = load(run)
    reference = predictor if run.options.method == "sft" else load(run, theta0=True)[0]
    return predictor, tokenizer, reference


def analysis_convergence(runs, rows, a):
    """The three KLs that mdu.diagnose measured at each epoch of training, over all forget rows (convergence figure)."""
    names = {"base": "to the base, p₀(·|x, yₜ)", "anchor": "to the anchor, p₀(·|m, yₜ)", "uniform": "to uniform"}
    panels = [{"title": name, "series": {}} for name in names.values()]
    for run in runs:
        file = Path(run.path) / "metrics.jsonl"
        logged = [line for line in read_records(file) if "kl" in line]
        wrong = mdu.misfit(logged, [{"epoch": float, "kl": dict.fromkeys(names, float)}])
        if wrong:
            raise ValueError(f"{file}: damaged, {wrong} among the lines with KLs; train the run again")
        if not logged:
            raise ValueError(f"{run.path}: no KLs in its metrics.jsonl; train it with --diagnose (a base has none)")
        for panel, target in zip(panels, names):
            panel["series"][run.title] = [[line["epoch"] for line in logged], [line["kl"][target] for line in logged]]
    return {"convention": "mean KL(p_theta(.|x, y_t) || target) over the forget rows, each in one fixed state y_t",
            "xlabel": "epoch", "ylabel": f"KL, nats per masked token (n = {len(rows)})", "panels": panels}


def analysis_roles(runs, rows, a):
    """Mean anchor_kl by role (Table 5), of theta0 and of every run, over the masked tokens of --samples states per row.

    The anchor stays theta0's.  States are drawn as Eq. 7's masks, which is how training draws them from t ~ U[0, 1].
    """
    if len({run.theta0 for run in runs}) > 1:
        raise ValueError("--analysis roles: the runs started from different models; give runs of one base")
    reference, tokenizer = load(runs[0], theta0=True)
    pairs = [mdu.encode_row(tokenizer, reference.end_id, row["question"], row["answer"]) for row in rows]
    labels = [torch.tensor([list(ROLES).index(role) for role in token_roles(tokenizer, row["question"], response)])
              for row, (_, response) in zip(rows, pairs)]
    masks = [draw_masks(len(response), a.samples, [a.seed, i]) for i, (_, response) in enumerate(pairs)]
    series = {}
    for title, run in [("Before", None), *((run.title, run) for run in runs)]:
        predictor = load(run)[0] if run else reference
        totals = torch.zeros(2, len(ROLES), dtype=torch.float64)  # sum of the KLs, and of how many tokens
        for batch, _, noised, answer, real, masked in masked_states(predictor, pairs, masks, a.batch_size):
            kl = anchor_kl(predictor, reference, noised, answer, real, masked)
            label = torch.cat([labels[i][masks[i][j]] for i, j in batch])  # (M,)
            totals.index_add_(1, label, torch.stack([kl, torch.ones_like(kl)]))
        series[title] = [total / n if n else None for total, n in totals.T.tolist()]
    tokens = torch.cat(labels).bincount(minlength=len(ROLES)).tolist()
    return {"convention": "mean KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)) over all masked tokens of a role, in "
            f"{a.samples} states of each of {len(rows)} rows", "ylabel": "KL, nats per token", "panels": [{
                "title": "", "groups": [f"{role}\n({n} tokens)" for role, n in zip(ROLES, tokens)], "series": series}]}


def trajectory(run, predictor, tokenizer, question, a):
    """One greedy trajectory -> its states [(ids, masked), ...] from all masks to none, answer and real, all (1, T), and
    the ids of its response, the first end or padding token the last.
    """
    length = a.length or run.options.response_length
    prompt = mdu.encode_prompt(tokenizer, question)
    ids, answer, real = mdu.collate([(prompt, [predictor.mask_id] * length)], predictor.pad_id)
    path = [(ids, answer), *denoise(predictor, ids, real, answer, a.steps or length)]
    response = path[-1][0][answer].tolist()
    return path, answer, real, response[:ended(predictor, response) + 1]


def analysis_trajectory(runs, rows, a):
    """anchor_kl of each token at the step of a greedy trajectory that fixes it, with its role (the paper's figures)."""
    predictor, tokenizer, reference = load_with_anchor(runs[0])
    panels = []
    for row in rows:
        path, answer, real, response = trajectory(runs[0], predictor, tokenizer, row["question"], a)
        fixed = torch.cat([before & ~after for (_, before), (_, after) in itertools.pairwise(path)])  # (steps, T)
        noised = torch.cat([ids for ids, _ in path[:-1]])  # (steps, T)
        kl = anchor_kl(predictor, reference, noised, answer.expand_as(fixed), real.expand_as(fixed), fixed)  # (M,)
        roles = token_roles(tokenizer, row["question"], response)
        start = int(answer[0].int().argmax())  # of the response
        groups, series = [], {role: [] for role in ROLES}
        for (step, position), value in zip(fixed.nonzero().tolist(), kl.tolist()):
            place = position - start
            if place < len(response):
                groups.append(f"{tokenizer.decode([response[place]]).strip()}\n{step + 1}")
                for role, values in series.items():
                    values.append(value if role == roles[place] else None)
        panels.append({"title": row["question"], "groups": groups, "series": series})
    return {"convention": "KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)), where and when a token is fixed; up to the "
            "first end token", "xlabel": f"token, and the step of {len(fixed)} that fixed it ({runs[0].title})",
            "ylabel": "KL, nats", "panels": panels}


def pieces(tokenizer, ids, flags, hide=False):
    """[[text, flag], ...]: the text of the ids, cut where the tokens' flag changes; hide: [M] for tokens without it."""
    text, starts = token_starts(tokenizer, ids)
    starts.append(len(text))
    cuts = [k for k in range(len(ids)) if k == 0 or flags[k] != flags[k - 1]]
    return [[" [M]" * (end - k) if hide and not flags[k] else text[starts[k]:starts[end]], flags[k]]
            for k, end in itertools.pairwise([*cuts, len(ids)])]


def question_block(row):
    """The head of a block: labelled texts, [[label, [[text, flag], ...]], ...]."""
    return [["Question", [[row["question"], False]]], ["Reference", [[row["answer"], False]]]]


def analysis_rollout(runs, rows, a):
    """What the anchor p_theta0(.|m, .) makes of states y_t of a trajectory of p_theta(.|x, .) (the paper's roll-outs).

    States: after the steps that complete 1/4, 1/2 and 3/4 of the tokens up to the first end token.
    """
    predictor, tokenizer, reference = load_with_anchor(runs[0])
    blocks = []
    for row in rows:
        path, answer, real, response = trajectory(runs[0], predictor, tokenizer, row["question"], a)
        fixed = [(~masked[answer]).tolist() for _, masked in path]
        steps = len(path) - 1
        blocks.append(question_block(row))
        for share in (1 / 4, 1 / 2, 3 / 4):
            k = next(k for k in range(len(path)) if sum(fixed[k][:len(response)]) >= share * len(response))
            ids, masked = path[k]
            hidden = mdu.mask_prompt(ids, answer, real, predictor.mask_id)
            for ids, _ in denoise(reference, hidden, real, masked, steps - k):
                pass  # only the last state counts
            rolled = ids[answer].tolist()
            blocks[-1] += [[f"y_t at k={k}/{steps}", pieces(tokenizer, response, fixed[k], hide=True)],
                           ["anchor", pieces(tokenizer, rolled[:ended(predictor, rolled)], fixed[k])]]
    return {"convention": "underlined: tokens fixed after k steps; the anchor sees no prompt", "blocks": blocks}


def fragments(reference, text):
    """[[text, flag], ...]: flagged are the longest runs of words that the reference holds, in its order.

    A run of function words alone is none.  Longest first, then to its left and right (difflib's matching blocks).
    """
    found = list(re.finditer(r"[^\W_]+", text))
    new = [m.group().lower() for m in found]
    out = []
    at = 0  # where in the text the next piece starts
    for _, first, size in SequenceMatcher(None, words(reference), new, autojunk=False).get_matching_blocks():
        if set(new[first:first + size]) - FUNCTION_WORDS:
            start, end = found[first].start(), found[first + size - 1].end()
            out += [[text[at:start], False], [text[start:end], True]]
            at = end
    out.append([text[at:], False])
    return [piece for piece in out if piece[0]]


def analysis_gallery(runs, rows, a):
    """The same forget questions answered by every run; fragments of the reference are flagged."""
    blocks = [question_block(row) for row in rows]
    for run in runs:
        predictor, tokenizer = load(run)
        length = a.length or run.options.response_length
        prompts = [mdu.encode_prompt(tokenizer, row["question"]) for row in rows]
        outputs = generate(predictor, prompts, length, a.steps or length, a.batch_size)
        for row, ids, block in zip(rows, outputs, blocks):
            block.append([run.title, fragments(row["answer"], decode(predictor, tokenizer, ids))])
    return {"convention": "underlined: runs of words that the reference holds too, in its order", "blocks": blocks}


def analysis_infill(runs, rows, a):
    """One-step recall of the answer's masked tokens when a share of its tokens is given, at random places.

    Share of the masked tokens whose most likely token is right, in the same --samples masks per row for every run: of
    all of them, and of those of the rows' key facts, where rows have one.  The end token is given.
    """
    shares = [0, 0.25, 0.5, 0.75]
    panels = [{"title": name, "series": {}} for name in ("all masked tokens", "tokens of the key fact")]
    for run in runs:
        predictor, tokenizer = load(run)
        pairs = [mdu.encode_row(tokenizer, predictor.end_id, row["question"], row["answer"]) for row in rows]
        facts = [torch.tensor([int(word in words(row.get("fact", ""))) for word in token_words(tokenizer, response)])
                 for row, (_, response) in zip(rows, pairs)]
        right, count = torch.zeros(2, len(shares), 2)  # by share; of other tokens, of the facts'
        for k, share in enumerate(shares):
            masks = []
            for i, (_, response) in enumerate(pairs):
                order = np.random.default_rng([a.seed, i]).random((a.samples, len(response) - 1)).argsort(1).argsort(1)
                masks.append(torch.from_numpy(np.pad(order >= int(share * order.shape[1]), ((0, 0), (0, 1)))))
            for batch, ids, noised, _, real, masked in masked_states(predictor, pairs, masks, a.batch_size):
                with torch.no_grad():
                    logits = predictor(noised, real, masked)
                logits[:, predictor.mask_id] = -math.inf
                label = torch.cat([facts[i][masks[i][j]] for i, j in batch])  # (M,): 1 for a key fact's token
                right[k] += label[logits.argmax(-1).cpu() == ids[masked]].bincount(minlength=2)
                count[k] += label.bincount(minlength=2)
        panels[0]["series"][run.title] = [shares, (right.sum(1) / count.sum(1)).tolist()]
        panels[1]["series"][run.title] = [shares, (right / count)[:, 1].tolist()]
    return {"convention": f"each masked token of {a.samples} states of each row and share counts alike",
            "xlabel": "share of the answer given", "ylabel": f"predicted right (n = {len(rows)} rows)",
            "panels": panels if count[:, 1].all() else panels[:1]}


RELEARN_STEPS = 20


def analysis_relearn(runs, rows, a):
    """What comes back after 20 steps (RELEARN_STEPS) of SFT on every tenth forget row, scored on the rest.

    At one learning rate, the lowest of the runs', which is unlearning's where the base is among them.
    """
    given = rows[::10]
    rest = [row for i, row in enumerate(rows) if i % 10]
    lr = min(run.options.lr for run in runs)
    if not rest:
        raise ValueError(f"--analysis relearn: {len(rows)} forget rows leave none to score; give more than one")
    scores = {"prob": "answer probability", "rougeL_recall": "ROUGE-L recall", "fact": "answers with the key fact"}
    found = []
    for run in runs:
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
            file = Path(scratch) / "given.jsonl"
            batch = min(len(given), run.options.batch_size)
            file.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
            kept = ("preset", "dtype", "weights", "max_length", "mask_sampling", "response_length")
            argv = dict({name: getattr(run.options, name) for name in kept}, method="sft", model=run.path, forget=file,
                        out=f"{scratch}/run", batch_size=batch, grad_accum=1, lr=lr, seed=a.seed,
                        epochs=RELEARN_STEPS * batch / len(given))
            mdu.main([f"--{name.replace('_', '-')}={value}" for name, value in argv.items() if value is not None])
            length = a.length or run.options.response_length
            protocol = SimpleNamespace(**{**vars(a), "brief": True, "length": length, "steps": a.steps or length})
            for path in (run.path, f"{scratch}/run"):
                model = mdu.load_backbone(path, dtype=mdu.compute_dtype(run.options.dtype))
                records = score_answers(*model, rest, [[a.seed, i] for i in range(len(rest))], protocol)
                found.append(summarise_answers(records, to_forget=True))
    return {"convention": f"means over the scored rows; learning rate {lr:g}; probability by Eq. 7, {a.samples} masks",
            "xlabel": f"before and after {RELEARN_STEPS} steps of SFT on every tenth forget row (n = {len(given)}), "
            f"scored on the rest (n = {len(rest)})", "ylabel": "mean", "panels": [
                {"title": title, "groups": [run.title for run in runs],
                 "series": {"before": [s[key] for s in found[::2]], "after": [s[key] for s in found[1::2]]}}
                for key, title in scores.items() if key in found[0]]}


def alone(panel):
    """Has every group of a panel of bars one bar at most?"""
    return all(sum(value is not None for value in values) < 2 for values in zip(*panel["series"].values()))


def as_markdown(result):
    """Texts as a table; bars, where a group has several, as one per panel, with the change against the first series."""
    texts = itertools.chain(*result.get("blocks", []))
    tables = [[[label, "".join(re.sub(r"(?s)(\S.*\S|\S)", r"<u>\1</u>", part) if flag else part
                               for part, flag in parts)] for label, parts in texts]]
    for panel in result.get("panels", []):
        if "groups" in panel and not alone(panel):
            tables.append([[panel["title"], *panel["series"]]])
            for group, first, *others in zip(panel["groups"], *panel["series"].values()):
                tables[-1].append([group, *("-" if value is None else f"{value:.2f}" for value in (first, *others))])
                for k, value in enumerate(others, 2):
                    tables[-1][-1][k] += f" ({value / first - 1:+.1%})" if first and first >= 0.005 else ""
    return "\n".join(line for rows in filter(None, tables) for line in [*markdown_table(*rows), ""])


LINES = [("black", "-", "o"), ("#0072b2", "--", "s"), ("#e69f00", "-.", "^"), ("#cc79a7", ":", "D"),
         ("#009e73", "-", "v")]


def draw_panels(result, figure):
    """Curves side by side, or bars one above the other; told apart without colours too, the base always in black."""
    panels = result["panels"]
    bars = "groups" in panels[0]
    figure.set_size_inches(8.3, 2.2 * len(panels) + 0.8 if bars else 3.3)
    axes = figure.subplots(len(panels) if bars else 1, 1 if bars else len(panels), squeeze=False)
    for axis, panel in zip(axes.flat, panels):
        styles = itertools.cycle(LINES[1:])
        n = 1 if bars and alone(panel) else len(panel["series"])  # bars side by side
        for k, (name, values) in enumerate(panel["series"].items()):
            if bars:
                color, hatch = ROLES.get(name, (str(1 - k / n), ("", "//", "..", "xx")[k % 4]))
                at = [i for i, value in enumerate(values) if value is not None]
                drawn = axis.bar([i + 0.8 * (k % n + 0.5) / n - 0.4 for i in at], [values[i] for i in at], 0.8 / n,
                                 color=color, hatch=hatch, edgecolor="black", label=name)
                axis.bar_label(drawn, fmt="%.2f" if n > 1 else "", fontsize=8)
            else:
                color, line, mark = LINES[0] if name == "Base" else next(styles)
                axis.plot(*values, line, color=color, marker=mark, ms=4, markevery=len(values[0]) // 8 + 1, label=name)
        if bars:
            small = len(panel["groups"]) > 16
            axis.set_xticks(range(len(panel["groups"])), panel["groups"], parse_math=False, fontsize=5 if small else 8)
        axis.set_title(panel["title"], fontsize=9, parse_math=False)
        axis.margins(y=0.1)
        axis.set_ylim(0, None)
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
    figure.supxlabel(result.get("xlabel"), fontsize=9)
    figure.supylabel(result["ylabel"], fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=8, frameon=False)


def draw_blocks(result, figure, width=104):
    """Labelled texts in letters of one width; what is flagged is underlined on grey."""
    rows = []
    for block in result["blocks"]:
        for label, parts in block:
            rows.append([(f"{label:16}", False)])
            for text, flag in parts or [["(empty)", False]]:
                for word in re.findall(r"\s*\S+|\s+$", text):
                    if sum(len(word) for word, _ in rows[-1]) + len(word) > width:
                        rows.append([(" " * 16, False)])
                    rows[-1].append((word, flag))
        rows.append([])
    figure.set_layout_engine("none")
    figure.set_size_inches(8.3, 0.2 * len(rows))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-1, width + 1), ylim=(len(rows) - 0.8, -1))
    axis.axis("off")
    for y, row in enumerate(rows):
        x, before = 0, False
        for word, flag in row:
            axis.text(x, y, word, family="monospace", fontsize=9, va="baseline", parse_math=False)
            if flag:
                span = (x if before else x + len(word) - len(word.lstrip()), x + len(word))
                axis.fill_between(span, y - 0.7, y + 0.25, color="0.88", linewidth=0)
                axis.plot(span, (y + 0.25, y + 0.25), color="black", linewidth=1)
            x, before = x + len(word), flag


STATES = {"limit", "samples", "seed", "batch_size"}
SHOWN = {"questions", "length", "steps"}
ANALYSES = {  # name: (analysis, the options that it uses)
    "convergence": (analysis_convergence, set()), "roles": (analysis_roles, STATES),
    "trajectory": (analysis_trajectory, SHOWN), "rollout": (analysis_rollout, SHOWN),
    "gallery": (analysis_gallery, SHOWN | {"batch_size"}), "infill": (analysis_infill, STATES),
    "relearn": (analysis_relearn, STATES | {"length", "steps"}),
}


def analyse(a):
    """analysis/NAME.json and NAME.png beside the first run; with --redraw only the picture, without any model."""
    name = a.analysis
    measure, used = ANALYSES[name]
    folder = Path(a.runs[0]).resolve().parent / "analysis"
    file, picture = folder / f"{name}.json", folder / f"{name}.png"
    if a.redraw:
        if not file.is_file():
            raise ValueError(f"{file}: not there; leave --redraw out to measure it")
        result = mdu.parse_json(file.read_bytes(), file)
        if not isinstance(result, dict) or result.get("analysis") != name or not {"panels", "blocks"} & set(result):
            raise ValueError(f"{file}: not what --analysis {name} writes; leave --redraw out to measure it")
    else:
        runs, rows = open_runs(a.runs)
        if name in ("trajectory", "rollout") and len(runs) > 1:
            raise ValueError(f"--analysis {name}: follows one run, {len(runs)} were given; give one, such as the base")
        rows = [rows[i] for i in chosen(a.questions, len(rows))] if "questions" in used else rows[:a.limit]
        result = {"analysis": name, "runs": [run.title for run in runs], "n": len(rows), **measure(runs, rows, a)}
        folder.mkdir(exist_ok=True)
        picture.unlink(missing_ok=True)  # it must not stand beside figures of another time
        mdu.write_json(file, result)
    with intact(file, "leave --redraw out to measure it again"):
        lines = as_markdown(result)
        if lines:
            print(lines, flush=True)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return note(f"{picture} is not drawn: it needs matplotlib (pip install matplotlib)")
        figure = Figure(layout="constrained")
        (draw_blocks if "blocks" in result else draw_panels)(result, figure)
        save_picture(figure, picture)
    print(f"({file}, {picture.name})")


# ------------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------------

DEFAULTS = dict(analysis=None, questions=None, retain_run=None, preset=None, model=None, generate_corpus=None,
                subject=None, data=None, forget=None, retain=None, limit=None, length=None, steps=None, perplexity=None,
                report=False, redraw=False, brief=False, samples=128, batch_size=64, seed=0)


def parse(argv):
    parser = mdu.OneLineParser(__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that mdu.py made")
    parser.add_argument("--report", action="store_true", help="tables and a picture of runs that are scored already")
    parser.add_argument("--analysis", choices=ANALYSES, help="numbers and a picture, in analysis/ beside the first RUN")
    parser.add_argument("--redraw", action="store_true", help="with --analysis: draw again what is measured already")
    parser.add_argument("--questions", help="which forget questions a report or analysis shows, such as 0,7 [0,1,2]")
    parser.add_argument("--retain-run", help="scored retain model (sft with --retain-only), for the forget quality")
    parser.add_argument("--preset", choices=mdu.PRESETS, help="score its published model as it is, into the folder RUN")
    parser.add_argument("--model", help="score this model as it is, into the folder RUN")
    parser.add_argument("--generate-corpus", type=int, metavar="N", help=(
        "RWKU: that model writes N biographies of each person into the folder RUN, for mdu.py --forget"))
    parser.add_argument("--subject", help="with --generate-corpus: a person by name or number, or all")
    parser.add_argument("--data", help="score on this data instead of the run's own")
    parser.add_argument("--forget", help="with --preset or --model: JSONL file of rows to forget, instead of --data")
    parser.add_argument("--retain", help="with --forget: JSONL file of rows to retain")
    parser.add_argument("--limit", type=int, help="score at most so many rows of every split [the run's]")
    parser.add_argument("--length", type=int, help="tokens to generate [the run's response length]")
    parser.add_argument("--steps", type=int, help="denoising steps [one per token]")
    parser.add_argument("--samples", type=int, help="masks per answer, N of Eq. 7 [128]")
    parser.add_argument("--perplexity", type=int, metavar="N", help="masks per answer for perplexity (Table 7: 256)")
    parser.add_argument("--brief", action="store_true", help="only ROUGE-L and probability, as Table 2: far less work")
    parser.add_argument("--batch-size", type=int, help="sequences in one forward pass [64]")
    parser.add_argument("--seed", type=int, help="seed of the masks [0]")
    given = vars(parser.parse_args(argv))
    if ("subject" in given) != ("generate_corpus" in given):
        raise ValueError("--generate-corpus and --subject: give both or none")
    if "report" in given:
        mode, used = "with --report", {"report", "questions", "retain_run"}
    elif "analysis" in given and "redraw" in given:
        mode, used = "with --redraw", {"analysis", "redraw"}
    elif "analysis" in given:
        mode, used = f"with --analysis {given['analysis']}", {"analysis", *ANALYSES[given["analysis"]][1]}
    elif "generate_corpus" in given:
        mode, used = "with --generate-corpus", {"generate_corpus", "subject", "preset", "model", "data", "length",
                                                "steps", "batch_size", "seed"}
    else:
        mode, used = "without --report or --analysis", {
            "preset", "model", "data", "forget", "retain", "limit", "length", "steps", "samples", "perplexity", "brief",
            "batch_size", "seed", "retain_run"}
    for name in sorted(set(given) - used - {"runs"}):
        raise ValueError(f"--{name.replace('_', '-')}: not used {mode}")
    for name in ("forget", "retain"):
        if name in given and not {"preset", "model"} & set(given):
            raise ValueError(f"--{name} {given[name]}: used only with --preset or --model; a trained run is scored on "
                             "its own rows, or on --data")
    if len(given["runs"]) > len(set(map(os.path.realpath, given["runs"]))):
        raise ValueError(f"{' '.join(given['runs'])}: one of them stands there twice; name each once")
    if {"preset", "model"} & set(given) and len(given["runs"]) > 1:
        raise ValueError(f"{' '.join(given['runs'])}: --preset and --model need one folder")
    if "brief" in given and "retain_run" in given:
        raise ValueError("--brief: measures no truth ratios, which --retain-run compares; leave one out")
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", given.get("questions", "0")):
        raise ValueError(f"--questions {given['questions']}: must be whole numbers and commas, such as 0,7")
    if "questions" in given:
        given["questions"] = [int(number) for number in given["questions"].split(",")]
    mdu.check_ranges(given)
    return SimpleNamespace(**{**DEFAULTS, **given})


def main(argv=None):
    a = parse(argv)
    if (a.report or a.analysis or a.generate_corpus) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{os.environ['WORLD_SIZE']} processes: only scoring is shared out; start this with python")
    if a.report:
        with intact(", ".join(a.runs), "score them again: python eval.py RUN"):
            return report(a.runs, a.questions, a.retain_run)
    if a.analysis:
        return analyse(a)
    with mdu.processes():
        if a.generate_corpus:
            return generate_corpus(a.runs[0], a)
        with contextlib.ExitStack() as stack:  # the folders are this program's own until its end
            with mdu.together():
                jobs = [plan(run, a) for run in a.runs]
                for run in a.runs if mdu.rank() == 0 else ():
                    Path(run).mkdir(parents=True, exist_ok=True)
                    stack.enter_context(mdu.keep_out(run))
            for job in jobs:
                evaluate(job, a)


if __name__ == "__main__":
    mdu.run_program("eval.py", main)

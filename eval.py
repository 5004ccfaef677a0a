"""Score what mdu.py trained: ROUGE-L and answer probability on forget, retain, real-authors and world-facts questions.

    python eval.py RUN [RUN ...]             # RUN/eval/summary.json, RUN/eval/SPLIT.jsonl, one table row per run
    python eval.py --report RUN [RUN ...]    # the paper's Table 2 in Markdown, from what is already scored

metric       better on forget / elsewhere   definition                                                  source
rougeL_f1    lower / higher                 LCS F1 of generation and reference (the paper's rL)          Lin 2004
rougeL_recall  lower / higher               LCS recall, what TOFU's own code calls rougeL                Lin 2004
prob         lower / higher                 exp(-L_rec), L_rec = Monte-Carlo NLL per token, N masks      Eq. 7
prob_stderr  -                              Monte-Carlo standard error of the split's mean prob          delta method
fact         lower                          share of generations that hold the row's key fact (toy only)

Generation is greedy: all response tokens start masked, every step fixes the most confident ones.
"""
import json
import math
import os
import re
import string
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import trange

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
        diagonal = 0
        for j, p in enumerate(pred, 1):
            diagonal, row[j] = row[j], diagonal + 1 if r == p else max(row[j], row[j - 1])
    precision, recall = row[-1] / len(pred), row[-1] / len(ref)
    return precision, recall, 2 * precision * recall / (precision + recall) if row[-1] else 0.0


def holds(text, fact):
    """Do the fact's words stand in the text, side by side and in order?"""
    return f" {' '.join(words(fact))} " in f" {' '.join(words(text))} "


# ------------------------------------------------------------------------------------------------------------------
# Answer probability (Eq. 7)
# ------------------------------------------------------------------------------------------------------------------


def draw_masks(n, samples, seed):
    """Eq. 7's masks, (samples, n) bool: the number of masked tokens uniform on 1..n, then a uniform subset of them."""
    rng = np.random.default_rng(seed)
    size = rng.integers(1, n + 1, (samples, 1))
    order = rng.random((samples, n)).argsort(1).argsort(1)
    return torch.from_numpy(order < size)


@torch.no_grad()
def masked_nll(predictor, pairs, masks, batch_size=64):
    """The inner mean of Eq. 7 for every mask of every pair: 1/|M_j| sum_{i in M_j} -log p(y_i | x, y with M_j masked).

    Args: pairs of (prompt ids, response ids); masks[i] (N_i, len(response i)) bool, no row empty.
    Returns: list of (N_i,) float64, in nats per masked token.  Masks of different pairs share batches by length.
    """
    jobs = [(i, j) for i in sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
            for j in range(len(masks[i]))]
    nll = [torch.zeros(len(m), dtype=torch.float64) for m in masks]
    for start in trange(0, len(jobs), batch_size, desc="likelihood", leave=False, disable=None):
        batch = jobs[start:start + batch_size]
        ids, answer, real = mdu.collate([pairs[i] for i, _ in batch], predictor.pad_id)
        masked = torch.zeros_like(answer)
        masked[answer] = torch.cat([masks[i][j] for i, j in batch])
        logits = predictor(ids.masked_fill(masked, predictor.mask_id), real, masked)
        targets, masked = ids[masked].to(logits.device), masked.to(logits.device)
        means = mdu.sft_loss(logits, targets, masked, masked.sum(1)).double().cpu()  # sum over |M_j|: the mean
        for (i, j), mean in zip(batch, means):
            nll[i][j] = mean
    return nll


def answer_probability(nll):
    """Eq. 7: p = exp(-mean of nll (N,)), and its Monte-Carlo standard error p std / sqrt(N) (None for one sample)."""
    p = math.exp(-nll.mean())
    return p, p * (nll.std() / math.sqrt(len(nll))).item() if len(nll) > 1 else None


# ------------------------------------------------------------------------------------------------------------------
# Sampler
# ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(predictor, prompts, length, steps, batch_size=64):
    """Greedy diffusion sampling with low-confidence remasking (LLaDA, Algorithm 5): `length` response ids per prompt.

    The response starts as `length` masks.  Each of `steps` steps predicts every masked token and fixes those whose
    most likely token has the highest probability (predictor.by_entropy: whose prediction has the lowest entropy),
    length/steps of them, the first steps one more where it does not divide.
    """
    outputs, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in trange(0, len(order), batch_size, desc="sampling", leave=False, disable=None):
        batch = order[start:start + batch_size]
        ids, canvas, real = mdu.collate([(prompts[i], [predictor.mask_id] * length) for i in batch], predictor.pad_id)
        masked = canvas.clone()
        for step in range(min(steps, length)):
            count = length // steps + (step < length % steps)
            logits = predictor(ids, real, masked).float()
            logits[:, predictor.mask_id] = -math.inf  # a mask is no answer
            p = logits.softmax(-1)
            confidence, token = p.max(-1)  # (M,)
            if predictor.by_entropy:
                confidence = (p * (p + 1e-10).log()).sum(-1)  # minus the entropy
            # (B, T), -inf where nothing is masked
            confidence = torch.full(ids.shape, -math.inf).masked_scatter(masked, confidence.cpu())
            fixed = torch.zeros_like(masked).scatter(1, confidence.topk(count, dim=1).indices, True)
            ids = torch.where(fixed, ids.masked_scatter(masked, token.cpu()), ids)
            masked &= ~fixed
        for i, row in zip(batch, ids[canvas].view(-1, length).tolist()):
            outputs[i] = row
    return outputs


def before_end(predictor, tokenizer, ids):
    """The text before the first end or padding token, as it is."""
    end = min([ids.index(stop) for stop in (predictor.end_id, predictor.pad_id) if stop in ids], default=len(ids))
    return tokenizer.decode(ids[:end], skip_special_tokens=True)


def decode(predictor, tokenizer, ids):
    """The text before the first end or padding token, without white space around it."""
    return before_end(predictor, tokenizer, ids).strip()


# ------------------------------------------------------------------------------------------------------------------
# RWKU (Jin et al. 2024): what is still said about a person, about neighbours, and four-choice and trivia questions
# ------------------------------------------------------------------------------------------------------------------


def write_answers(predictor, tokenizer, rows, a):
    """What is generated after each row's prompt and prefill, up to the end token."""
    prompts = [mdu.encode_prompt(tokenizer, row["question"], row["prefill"]) for row in rows]
    return [before_end(predictor, tokenizer, ids) for ids in generate(predictor, prompts, a.length, a.steps, a.batch_size)]


def first_line(text):
    """The answer ends with its line; an empty one counts as NOANSWER."""
    return text.split("\n")[0].strip() or "NOANSWER"


def score_probes(predictor, tokenizer, rows, seeds, a):
    """Fill-in-the-blank, question and attack probes: ROUGE-L recall of the first line."""
    records = []
    for row, text in zip(rows, map(first_line, write_answers(predictor, tokenizer, rows, a))):
        records.append({"subject": row["subject"], "kind": row["kind"], "question": row["question"], "reference": row["answer"],
                        "generation": text, "rougeL_recall": rouge_l(row["answer"], text)[1]})
    return records


@torch.no_grad()
def score_mmlu(predictor, tokenizer, rows, seeds, a):
    """Four choices: the most probable of " A" ... " D" at one masked position after "Answer:"."""
    letters = [tokenizer(f" {letter}", add_special_tokens=False).input_ids[-1] for letter in "ABCD"]
    records = []
    for start in range(0, len(rows), a.batch_size):
        batch = rows[start:start + a.batch_size]
        pairs = [(mdu.encode_prompt(tokenizer, row["question"], row["prefill"]), [predictor.mask_id]) for row in batch]
        ids, masked, real = mdu.collate(pairs, predictor.pad_id)
        for row, logits in zip(batch, predictor(ids, real, masked)[:, letters]):  # (B, V) -> (B, 4)
            choice = "ABCD"[logits.argmax()]
            records.append({"subject": row["subject"], "question": row["question"], "reference": row["answer"],
                            "generation": choice, "accuracy": float(choice == row["answer"])})
    return records


def score_truthfulqa(predictor, tokenizer, rows, seeds, a):
    """MC1: is the true choice likelier than every false one; MC2: the true choices' share of the likelihood.

    log p(y|x) of a choice of n tokens, "A: y" without its end token, is -n times the mean of masked_nll: the sum of n/|M_j|
    times the masked tokens' -log p, |M_j| uniform on 1..n, averaged over j.  Every choice has the row's masks.
    """
    pairs, masks, choices = [], [], []
    for row, seed in zip(rows, seeds):
        prompt = mdu.encode_prompt(tokenizer, row["question"], row["prefill"])
        choices.append(list(dict.fromkeys(row["mc1"]["choices"] + row["mc2"]["choices"])))
        for choice in choices[-1]:
            pairs.append((prompt, mdu.encode_text(tokenizer, f" {choice.strip()}")))
            masks.append(draw_masks(len(pairs[-1][1]), a.samples, seed))
    scores = iter([-len(response) * nll.mean().item() for (_, response), nll
                   in zip(pairs, masked_nll(predictor, pairs, masks, a.batch_size))])
    records = []
    for row, texts in zip(rows, choices):
        logp = {text: next(scores) for text in texts}
        records.append({"subject": row["subject"], "question": row["question"], "reference": row["answer"],
                        "generation": max(logp, key=logp.get), "logp": logp, "mc1": mc1(logp, **row["mc1"]),
                        "mc2": mc2(logp, **row["mc2"])})
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
    """Lower case, without ASCII punctuation and articles, as TriviaQA compares answers."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def em_f1(prediction, references):
    """(exact match, F1 of the words as a bag), each the best over the references."""
    em, f1, said = 0.0, 0.0, plain_words(prediction)
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
        records.append({"subject": row["subject"], "question": row["question"], "reference": row["answer"],
                        "generation": text.strip(), "em": em, "f1": f1})
    return records


# ------------------------------------------------------------------------------------------------------------------
# One run: records per example, summary per split
# ------------------------------------------------------------------------------------------------------------------

SPLITS = {"forget": "Forget", "retain": "Retain", "real_authors": "Real authors", "world_facts": "World facts"}


def score_split(predictor, tokenizer, rows, number, protocol, batch_size):
    """One record per row: question, reference, generation and every score."""
    pairs = [mdu.encode_row(tokenizer, predictor.end_id, row["question"], row["answer"]) for row in rows]
    generations = generate(predictor, [prompt for prompt, _ in pairs], protocol["length"], protocol["steps"], batch_size)
    masks = [draw_masks(len(response), protocol["samples"], [protocol["seed"], number, i])
             for i, (_, response) in enumerate(pairs)]  # the same for every run
    for row, ids, nll in zip(rows, generations, masked_nll(predictor, pairs, masks, batch_size)):
        text = decode(predictor, tokenizer, ids)
        precision, recall, f1 = rouge_l(row["answer"], text)
        p, stderr = answer_probability(nll)
        record = {"question": row["question"], "reference": row["answer"], "generation": text,
                  "rougeL_precision": precision, "rougeL_recall": recall, "rougeL_f1": f1,
                  "nll": nll.mean().item(), "prob": p, "prob_stderr": stderr}
        if "fact" in row:
            record["fact"] = float(holds(text, row["fact"]))
        yield record


def summarise(records):
    """Means over the rows; prob_stderr is what the choice of masks leaves uncertain, not the spread of the questions."""
    summary = {key: float(np.mean([r[key] for r in records])) for key in
               ("rougeL_f1", "rougeL_recall", "prob", "fact") if key in records[0]}
    errors = [r["prob_stderr"] for r in records]
    summary["prob_stderr"] = None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors)
    return {**summary, "n": len(records)}


def evaluate(run, a):
    """Score one run on every split of its data; returns what RUN/eval/summary.json then holds."""
    start, options = time.time(), mdu.Options(**mdu.read_run(run)["options"])
    options.limit = a.limit or options.limit
    if a.data is not None:
        options.data, options.forget, options.retain = a.data, None, None
    splits = {split: rows for split, rows in mdu.load_data(options).items() if split in SPLITS and rows}
    predictor, tokenizer = mdu.load_backbone(run, dtype=mdu.compute_dtype(options.dtype))
    length = a.length or options.response_length
    protocol = {"length": length, "steps": a.steps or length, "samples": a.samples, "seed": a.seed}
    if protocol["steps"] > length:
        raise ValueError(f"--steps {a.steps}: more than the {length} tokens to generate; give at most --length")
    out = Path(run) / "eval"
    out.mkdir(exist_ok=True)
    summary = {"method": options.method, "tau": options.tau, "protocol": protocol, "splits": {}}
    for number, (split, rows) in enumerate(splits.items()):
        records = []
        with open(out / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for record in score_split(predictor, tokenizer, rows, number, protocol, a.batch_size):
                records.append(record)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        summary["splits"][split] = summarise(records)
        print(f"{run}: {split}, {len(records)} rows, {time.time() - start:.0f}s", file=sys.stderr, flush=True)
        summary.setdefault("examples", [{k: r[k] for k in ("question", "reference", "generation")} for r in records[:3]])
    mdu.write_json(out / "summary.json", summary)
    return summary


# ------------------------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------------------------

TITLES = {"ga": "GA", "gd": "GD", "npo": "NPO", "simnpo": "SimNPO", "wga": "WGA", "dpo": "DPO", "sft": "Base"}
COLUMNS = [(split, metric) for split in SPLITS for metric in ("rougeL_f1", "prob")] + [("forget", "fact")]


def title(summary):
    return TITLES.get(summary["method"]) or f"MDU τ={summary['tau']:g}"


def score(summary, split, metric):
    return summary["splits"].get(split, {}).get(metric)  # None where it was not measured


def screen_row(run, summary):
    cells = [f"{name} {score(summary, split, 'rougeL_f1'):.3f} {score(summary, split, 'prob'):.3f}"
             for split, name in SPLITS.items() if split in summary["splits"]]
    fact = score(summary, "forget", "fact")
    return " | ".join([f"{run:24}", *cells, *([] if fact is None else [f"fact {fact:.2f}"])])


def markdown(summaries):
    """The paper's Table 2; rL is ROUGE-L F1 with recall in brackets; of the methods, best bold, second underlined."""
    columns = [column for column in COLUMNS if any(score(s, *column) is not None for s in summaries)]
    heads = {"rougeL_f1": "rL", "prob": "p", "fact": "fact"}
    lines = ["| Method | " + " | ".join(f"{SPLITS[split]} {heads[metric]} {'↓' if split == 'forget' else '↑'}"
                                        for split, metric in columns) + " |",
             "|---|" + "---|" * len(columns)]
    ranks = {}  # column -> its distinct values among the unlearning methods as shown, best first
    for split, metric in columns:
        values = [score(s, split, metric) for s in summaries if s["method"] != "sft"]
        ranks[split, metric] = sorted({round(v, 3) for v in values if v is not None}, reverse=split != "forget")
    for s in summaries:
        cells = [title(s)]
        for split, metric in columns:
            value = score(s, split, metric)
            cell = "-" if value is None else f"{value:.3f}"
            if value is not None and s["method"] != "sft":
                place = ranks[split, metric].index(round(value, 3))
                cell = f"**{cell}**" if place == 0 else f"<u>{cell}</u>" if place == 1 else cell
            if value is not None and metric == "rougeL_f1":
                cell += f" ({score(s, split, 'rougeL_recall'):.3f})"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    sizes = ", ".join(f"{SPLITS[split]} {summaries[0]['splits'][split]['n']}" for split in summaries[0]["splits"])
    protocol = summaries[0]["protocol"]
    lines += ["", f"rL: ROUGE-L F1 (recall). p: answer probability (Eq. 7, {protocol['samples']} masks). "
              f"{protocol['steps']} steps for {protocol['length']} tokens. Questions: {sizes}.", "",
              "What is written to the first forget questions:", "",
              "| | " + " | ".join(example["question"] for example in summaries[0]["examples"]) + " |",
              "|---|" + "---|" * len(summaries[0]["examples"]),
              "| Reference | " + " | ".join(example["reference"] for example in summaries[0]["examples"]) + " |"]
    for s in summaries:
        lines.append(f"| {title(s)} | " + " | ".join(example["generation"] or "(empty)" for example in s["examples"]) + " |")
    return "\n".join(lines)


def report(runs):
    """Markdown table of scored runs, printed and written to report.md beside the first run."""
    summaries = []
    for run in runs:
        file = Path(run) / "eval" / "summary.json"
        if not file.is_file():
            raise ValueError(f"{run}: not scored yet; run: python eval.py {run}")
        summary = mdu.parse_json(file.read_text(encoding="utf-8"), file)
        if not isinstance(summary, dict) or not {"method", "tau", "protocol", "splits", "examples"} <= set(summary):
            raise ValueError(f"{file}: not a summary of this program; run: python eval.py {run}")
        summaries.append(summary)
    table, path = markdown(summaries), Path(runs[0]).parent / "report.md"
    path.write_text(table + "\n", encoding="utf-8")
    print(table, f"\n({path})")


def main(argv=None):
    parser = mdu.OneLineParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that mdu.py made")
    parser.add_argument("--report", action="store_true", help="print the table of runs that are scored already")
    parser.add_argument("--data", help="score on this data instead of the run's own")
    parser.add_argument("--limit", type=int, help="score at most so many rows of every split [the run's]")
    parser.add_argument("--length", type=int, help="tokens to generate [the run's response length]")
    parser.add_argument("--steps", type=int, help="denoising steps [one per token]")
    parser.add_argument("--samples", type=int, default=128, help="masks per answer, N of Eq. 7 [128]")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences in one forward pass [64]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks [0]")
    a = parser.parse_args(argv)
    mdu.check_ranges(vars(a))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{os.environ['WORLD_SIZE']} processes: evaluation runs in one; start it with python")
    if a.report:
        report(a.runs)
        return
    for run in a.runs:
        print(screen_row(run, evaluate(run, a)), flush=True)


if __name__ == "__main__":
    mdu.run_program("eval.py", main)

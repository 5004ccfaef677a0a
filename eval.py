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
import contextlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

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
def denoise(predictor, ids, real, masked, steps):
    """Greedy diffusion sampling from a state with n masks in each row: yields (ids, masked), (B, T), after every step.

    Each of `steps` steps predicts every masked token and fixes those whose most likely token has the highest
    probability (predictor.by_entropy: whose prediction has the lowest entropy), n/steps of them, the first steps one
    more where it does not divide.
    """
    n = int(masked[0].sum())
    for step in range(min(steps, n)):
        count = n // steps + (step < n % steps)
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
        masked = masked & ~fixed
        yield ids, masked


def generate(predictor, prompts, length, steps, batch_size=64):
    """`length` response ids per prompt, denoised from as many masks: LLaDA's low-confidence remasking (Algorithm 5)."""
    outputs, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in trange(0, len(order), batch_size, desc="sampling", leave=False, disable=None):
        batch = order[start:start + batch_size]
        ids, canvas, real = mdu.collate([(prompts[i], [predictor.mask_id] * length) for i in batch], predictor.pad_id)
        *_, (ids, _) = denoise(predictor, ids, real, canvas, steps)
        for i, row in zip(batch, ids[canvas].view(-1, length).tolist()):
            outputs[i] = row
    return outputs


def decode(predictor, tokenizer, ids):
    """The text before the first end or padding token."""
    end = min([ids.index(stop) for stop in (predictor.end_id, predictor.pad_id) if stop in ids], default=len(ids))
    return tokenizer.decode(ids[:end], skip_special_tokens=True).strip()


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


# ------------------------------------------------------------------------------------------------------------------
# Analyses.  analysis_NAME(runs, rows, a) -> what analysis/NAME.json holds; table_NAME and draw_NAME need nothing else
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
LINES = [("black", "-", "o"), ("#0072b2", "--", "s"), ("#e69f00", "-.", "^"), ("#cc79a7", ":", "D"),
         ("#009e73", "-", "v")]  # told apart without colours too; the first is the base model's


def token_starts(tokenizer, ids):
    """-> text of the ids, and where in it each token starts; special tokens take no room."""
    text, starts = "", []
    for k in range(len(ids)):
        longer = tokenizer.decode(ids[:k + 1], skip_special_tokens=True)
        starts.append(len(os.path.commonprefix([text, longer])))  # a letter of several tokens shows when it is whole
        text = longer
    return text, starts


def token_words(tokenizer, ids):
    """The first word, as `words` finds them, that each token is part of; None for punctuation and special tokens."""
    text, starts = token_starts(tokenizer, ids)
    found = [(m.start(), m.end(), m.group().lower()) for m in re.finditer(r"[^\W_]+", text)]
    return [next((word for a, b, word in found if a < end and b > start), None)
            for start, end in zip(starts, [*starts[1:], len(text)])]


def token_roles(tokenizer, question, ids):
    """The role of each token of a response (Section 4), by its word.

    structural: one of FUNCTION_WORDS, punctuation or a special token; in-context: another word that stands in the
    question; stored-knowledge: the rest, which holds phrases such as "is called" too.
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


def masked_states(predictor, pairs, labels, masks, batch_size):
    """Batches of all masks of all pairs: ids, noised, answer, real, masked (B, T), label (M,) of the masked tokens."""
    jobs = [(i, mask) for i, subsets in enumerate(masks) for mask in subsets]
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start:start + batch_size]
        ids, answer, real = mdu.collate([pairs[i] for i, _ in batch], predictor.pad_id)
        masked, label = torch.zeros_like(answer), torch.zeros_like(ids)
        masked[answer] = torch.cat([mask for _, mask in batch])
        label[answer] = torch.cat([torch.tensor(labels[i], dtype=torch.long) for i, _ in batch])
        yield ids, ids.masked_fill(masked, predictor.mask_id), answer, real, masked, label[masked]


def open_runs(paths, a):
    """-> runs (path, options, title, theta0: what load_backbone takes), and the forget rows that they share."""
    runs = []
    for path in paths:
        info = mdu.read_run(path)
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"{path}: holds no finished model (no config.json); finish its training first")
        o = mdu.Options(**info["options"])
        runs.append(SimpleNamespace(
            path=path, options=o, title=TITLES.get(o.method) or f"MDU τ={o.tau:g}", data=info["data"].get("forget"),
            theta0=(str(Path(path).resolve()), None) if o.method == "sft" else (o.model, o.revision)))
    rows, titles = mdu.load_data(runs[0].options)["forget"], [run.title for run in runs]
    for run in runs:
        if not run.data or run.data["sha256"] != mdu.fingerprint(rows):
            raise ValueError(f"{run.path}: was trained on other forget rows than {paths[0]} names now; "
                             "give runs of one forget set")
        if titles.count(run.title) > 1:
            run.title += f" ({Path(run.path).name})"
    return runs, rows[:a.limit]


def load(run, theta0=False):
    """-> predictor and tokenizer of a run, or of the frozen model that it started from."""
    name, revision = run.theta0 if theta0 else (run.path, None)
    return mdu.load_backbone(name, revision, mdu.compute_dtype(run.options.dtype))


def chosen(rows, a):
    """The rows that --questions names."""
    if max(a.questions) >= len(rows):
        raise ValueError(f"--questions {max(a.questions)}: there are {len(rows)} forget questions, numbered from 0")
    return [rows[i] for i in a.questions]


def grid(head, rows):
    """A Markdown table."""
    lines = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def styled(runs):
    """(run, colour, line, marker) of each run of a result."""
    others = itertools.cycle(LINES[1:])
    return [(run, *(LINES[0] if run["title"] == "Base" else next(others))) for run in runs]


def analysis_convergence(runs, rows, a):
    """The three KLs that mdu.diagnose measured at each epoch of training, on all forget rows (convergence figure)."""
    curves = []
    for run in runs:
        file = Path(run.path) / "metrics.jsonl"
        logged = [mdu.parse_json(line, file) for line in file.read_text(encoding="utf-8").splitlines()]
        logged = [line for line in logged if "kl" in line]
        if not logged:
            raise ValueError(f"{run.path}: no KLs in its metrics.jsonl; train it with --diagnose (a base has none)")
        curves.append({"title": run.title, "epoch": [line["epoch"] for line in logged],
                       **{target: [line["kl"][target] for line in logged] for target in ("base", "anchor", "uniform")}})
    return {"n": runs[0].data["rows"], "runs": curves, "convention": "KL(p_theta(.|x, y_t) || target), nats per "
            "masked token, mean over the forget rows, each in one fixed state y_t"}


def draw_convergence(result, figure):
    figure.set_size_inches(8.3, 3.3)
    titles = {"base": "base, p₀(·|x, yₜ)", "anchor": "base, prompt masked, p₀(·|m, yₜ)", "uniform": "uniform"}
    for axis, (target, title) in zip(figure.subplots(1, 3), titles.items()):
        for run, color, line, mark in styled(result["runs"]):
            axis.plot(run["epoch"], run[target], line, color=color, marker=mark, ms=4, markevery=0.2,
                      label=run["title"])
        axis.set_title(f"to the {title}", fontsize=9)
        axis.set(xlabel="epoch", ylim=(0, None))
        axis.grid(color="0.9")
    figure.axes[0].set_ylabel(f"KL, nats per masked token (n = {result['n']})")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)


def analysis_roles(runs, rows, a):
    """Mean anchor_kl by role (Table 5), of theta0 and of every run, over the masked tokens of --samples states per row.

    The anchor stays theta0's.  States are drawn as Eq. 7's masks, which is how training draws them from t ~ U[0, 1].
    """
    if len({run.theta0 for run in runs}) > 1:
        raise ValueError("--analysis roles: the runs started from different models; give runs of one base")
    (reference, tokenizer), names = load(runs[0], theta0=True), list(ROLES)
    pairs = [mdu.encode_row(tokenizer, reference.end_id, row["question"], row["answer"]) for row in rows]
    labels = [[names.index(role) for role in token_roles(tokenizer, row["question"], response)]
              for row, (_, response) in zip(rows, pairs)]
    masks = [draw_masks(len(response), a.samples, [a.seed, i]) for i, (_, response) in enumerate(pairs)]
    means = {}
    for title, predictor in [("Before", reference), *((run.title, load(run)[0]) for run in runs)]:
        total, count = torch.zeros(len(ROLES), dtype=torch.float64), torch.zeros(len(ROLES), dtype=torch.long)
        for _, noised, answer, real, masked, label in masked_states(predictor, pairs, labels, masks, a.batch_size):
            total.index_add_(0, label, anchor_kl(predictor, reference, noised, answer, real, masked))
            count += label.bincount(minlength=len(ROLES))
        means[title] = {role: x / n if n else None for role, x, n in zip(ROLES, total.tolist(), count.tolist())}
    tokens = {role: sum(label.count(k) for label in labels) for k, role in enumerate(ROLES)}
    return {"n": len(rows), "samples": a.samples, "tokens": tokens, "masked": dict(zip(ROLES, count.tolist())),
            "kl": means, "convention": "KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)), nats; each masked token of each "
            "state counts alike"}


def table_roles(result):
    def cell(title, role):
        kl, before = result["kl"][title][role], result["kl"]["Before"][role]
        return "-" if kl is None else f"{kl:.2f}" if title == "Before" else f"{kl:.2f} ({kl / before - 1:+.1%})"
    return grid(["Role", "Tokens", *result["kl"]],
                [[role, str(result["tokens"][role]), *(cell(title, role) for title in result["kl"])] for role in ROLES])


def draw_roles(result, figure):
    figure.set_size_inches(8.3, 3.3)
    axis, n = figure.subplots(), len(result["kl"])
    for k, (title, kl) in enumerate(result["kl"].items()):
        bars = axis.bar([i + 0.8 * (k + 0.5) / n - 0.4 for i in range(len(ROLES))], [kl[role] or 0 for role in ROLES],
                        0.8 / n, color=str(1 - k / n), hatch=("", "//", "..", "xx")[k % 4], edgecolor="black",
                        label=title)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.margins(y=0.1)
    axis.set_xticks(range(len(ROLES)), [f"{role}\n({result['tokens'][role]} tokens)" for role in ROLES])
    axis.set_ylabel("KL to the anchor, nats per token")
    figure.legend(loc="outside lower center", ncols=8, frameon=False)


def written(predictor, ids):
    """How many response tokens stand before the first end or padding token."""
    return min([ids.index(stop) for stop in (predictor.end_id, predictor.pad_id) if stop in ids], default=len(ids))


def trajectory(run, predictor, tokenizer, question, a):
    """One greedy trajectory -> its states [(ids, masked), ...] from all masks to none, answer and real, all (1, T)."""
    length = a.length or run.options.response_length
    prompt = mdu.encode_prompt(tokenizer, question)
    ids, answer, real = mdu.collate([(prompt, [predictor.mask_id] * length)], predictor.pad_id)
    return [(ids, answer), *denoise(predictor, ids, real, answer, a.steps or length)], answer, real


def follow_one(runs, name):
    if len(runs) > 1:
        raise ValueError(f"--analysis {name}: follows one run, {len(runs)} were given; give one, such as the base")
    return *load(runs[0]), load(runs[0], theta0=True)[0]


def analysis_trajectory(runs, rows, a):
    """anchor_kl of each token at the step of a greedy trajectory that fixes it, with its role (the paper's figures)."""
    predictor, tokenizer, reference = follow_one(runs, "trajectory")
    questions = []
    for row in chosen(rows, a):
        path, answer, real = trajectory(runs[0], predictor, tokenizer, row["question"], a)
        fixed = torch.cat([before & ~after for (_, before), (_, after) in itertools.pairwise(path)])  # (steps, T)
        noised = torch.cat([ids for ids, _ in path[:-1]])
        kl = anchor_kl(predictor, reference, noised, answer.expand_as(fixed), real.expand_as(fixed), fixed)
        response, (steps, positions) = path[-1][0][answer].tolist(), fixed.nonzero(as_tuple=True)
        response = response[:written(predictor, response) + 1]
        roles, first = token_roles(tokenizer, row["question"], response), answer[0].int().argmax()
        questions.append({"question": row["question"], "reference": row["answer"], "steps": len(fixed), "tokens": [
            {"step": step + 1, "token": tokenizer.decode([response[i]]).strip(), "role": roles[i], "kl": value}
            for step, i, value in zip(steps.tolist(), (positions - first).tolist(), kl.tolist()) if i < len(response)]})
    return {"title": runs[0].title, "questions": questions, "convention": "KL(p_theta(.|x, y_t) || p_theta0(.|m, y_t)) "
            "in nats, where and when a token is fixed; up to the first end token"}


def draw_trajectory(result, figure):
    figure.set_size_inches(8.3, 2.3 * len(result["questions"]) + 0.5)
    for axis, question in zip(figure.subplots(len(result["questions"]), squeeze=False)[:, 0], result["questions"]):
        tokens = question["tokens"]
        for role, (color, hatch) in ROLES.items():
            at = [i for i, token in enumerate(tokens) if token["role"] == role]
            axis.bar(at, [tokens[i]["kl"] for i in at], color=color, hatch=hatch, edgecolor="black", label=role)
        axis.set_xticks(range(len(tokens)), [f"{token['token']}\n{token['step']}" for token in tokens],
                        parse_math=False, fontsize=8 if len(tokens) < 16 else 5)
        axis.set_title(question["question"], fontsize=9, parse_math=False)
        axis.set_ylabel("KL, nats")
    figure.axes[-1].set_xlabel(f"token, and the step of {question['steps']} that fixed it ({result['title']})")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)


def pieces(tokenizer, ids, flags, hide=False):
    """[[text, flag], ...]: the text of the ids, cut where the tokens' flag changes; hide: [M] for tokens without it."""
    text, starts = token_starts(tokenizer, ids)
    cuts, starts = [k for k in range(len(ids)) if k == 0 or flags[k] != flags[k - 1]], [*starts, len(text)]
    return [[" [M]" * (end - k) if hide and not flags[k] else text[starts[k]:starts[end]], flags[k]]
            for k, end in itertools.pairwise([*cuts, len(ids)])]


def analysis_rollout(runs, rows, a):
    """What the anchor p_theta0(.|m, .) makes of states y_t of a trajectory of p_theta(.|x, .) (the paper's roll-outs).

    States: after the steps that complete 1/4, 1/2 and 3/4 of the tokens up to the first end token.
    """
    predictor, tokenizer, reference = follow_one(runs, "rollout")
    questions = []
    for row in chosen(rows, a):
        path, answer, real = trajectory(runs[0], predictor, tokenizer, row["question"], a)
        response, states = path[-1][0][answer].tolist(), []
        response = response[:written(predictor, response) + 1]
        fixed = [(~masked[answer]).tolist() for _, masked in path]
        for share in (1 / 4, 1 / 2, 3 / 4):
            k = next(k for k in range(len(path)) if sum(fixed[k][:len(response)]) >= share * len(response))
            hidden = mdu.mask_prompt(path[k][0], answer, real, predictor.mask_id)
            *_, (rolled, _) = [path[k], *denoise(reference, hidden, real, path[k][1], len(path) - 1 - k)]
            rolled = rolled[answer].tolist()
            states.append({"step": k, "state": pieces(tokenizer, response, fixed[k], hide=True),
                           "response": pieces(tokenizer, rolled[:written(predictor, rolled)], fixed[k])})
        questions.append({"question": row["question"], "reference": row["answer"], "steps": len(path) - 1,
                          "states": states})
    return {"title": runs[0].title, "questions": questions, "convention": "step: steps done; flagged: fixed tokens"}


def underlined(parts):
    """Pieces -> Markdown."""
    return "".join(re.sub(r"(\S.*\S|\S)", r"<u>\1</u>", text, flags=re.S) if flag else text for text, flag in parts)


def table_rollout(result):
    return grid(["Forget query", "k", "State y_t (its prompt masked)", "Corresponding response"], [
        [f"Q: {q['question']} GT: {q['reference']}" * (state is q["states"][0]), f"{state['step']} of {q['steps']}",
         underlined(state["state"]), underlined(state["response"]) or "(empty)"]
        for q in result["questions"] for state in q["states"]])


def draw_text(lines, figure, width=104):
    """Lines of [text, flag] pieces, in letters of one width; what is flagged is underlined on grey."""
    rows = []
    for line in lines:
        rows.append([])
        for text, flag in line:
            for word in re.findall(r"\s*\S+|\s+$", text):
                if sum(len(word) for word, _ in rows[-1]) + len(word) > width:
                    rows.append([(" " * 12, False)])
                rows[-1].append((word, flag))
    figure.set_size_inches(8.3, 0.2 * len(rows) + 0.2)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-1, width + 1), ylim=(len(rows) + 0.2, -1))
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


def draw_rollout(result, figure):
    lines = []
    for q in result["questions"]:
        lines += [[["Q: " + q["question"], False]], [["GT: " + q["reference"], False]]]
        for state in q["states"]:
            lines += [[[f"{name:12}", False], *(state[part] or [["(empty)", False]])] for name, part in (
                (f"y_t k={state['step']}/{q['steps']}", "state"), ("anchor", "response"))]
        lines.append([])
    draw_text(lines[:-1], figure)


def fragments(reference, text):
    """[[text, flag], ...]: flagged are the longest runs of words that the reference holds, in its order.

    A run of function words alone is none.  Longest first, then to its left and right (difflib's matching blocks).
    """
    found, old = list(re.finditer(r"[^\W_]+", text)), words(reference)
    new, out, at = [m.group().lower() for m in found], [], 0
    for _, first, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if set(new[first:first + size]) - FUNCTION_WORDS:
            start, end = found[first].start(), found[first + size - 1].end()
            out, at = [*out, [text[at:start], False], [text[start:end], True]], end
    return [piece for piece in [*out, [text[at:], False]] if piece[0]]


def analysis_gallery(runs, rows, a):
    """The same forget questions answered by every run; fragments of the reference are flagged."""
    rows, answers = chosen(rows, a), []
    for run in runs:
        predictor, tokenizer = load(run)
        length = a.length or run.options.response_length
        outputs = generate(predictor, [mdu.encode_prompt(tokenizer, row["question"]) for row in rows], length,
                           a.steps or length, a.batch_size)
        answers.append([fragments(row["answer"], decode(predictor, tokenizer, ids)) for row, ids in zip(rows, outputs)])
    return {"convention": "flagged: runs of words that the reference holds too, in its order", "questions": [
        {"question": row["question"], "reference": row["answer"],
         "answers": [{"title": run.title, "text": texts[i]} for run, texts in zip(runs, answers)]}
        for i, row in enumerate(rows)]}


def table_gallery(result):
    questions = result["questions"]
    return grid(["", *(q["question"] for q in questions)], [["Reference", *(q["reference"] for q in questions)], *(
        [answer["title"], *(underlined(q["answers"][k]["text"]) or "(empty)" for q in questions)]
        for k, answer in enumerate(questions[0]["answers"]))])


def draw_gallery(result, figure):
    lines = []
    for q in result["questions"]:
        lines += [[["Q: " + q["question"], False]], [[f"{'Reference':12}", False], [q["reference"], False]],
                  *([[f"{answer['title']:12}", False], *(answer["text"] or [["(empty)", False]])]
                    for answer in q["answers"]), []]
    draw_text(lines[:-1], figure)


def analysis_infill(runs, rows, a):
    """One-step recall of the answer's masked tokens when a share of its tokens is given, at random places.

    recall: share of the masked tokens whose most likely token is right, in the same --samples masks per row for every
    run; fact: the same for the tokens of the rows' key facts, None where rows have none.  The end token is given.
    """
    shares, curves = (0, 0.25, 0.5, 0.75), []
    for run in runs:
        predictor, tokenizer = load(run)
        pairs = [mdu.encode_row(tokenizer, predictor.end_id, row["question"], row["answer"]) for row in rows]
        facts = [[int(word in words(row.get("fact", ""))) for word in token_words(tokenizer, response)]
                 for row, (_, response) in zip(rows, pairs)]
        curves.append({"title": run.title, "recall": [], "fact": []})
        for share in shares:
            masks = []
            for i, (_, response) in enumerate(pairs):
                order = np.random.default_rng([a.seed, i]).random((a.samples, len(response) - 1)).argsort(1).argsort(1)
                masks.append(torch.from_numpy(np.pad(order >= int(share * order.shape[1]), ((0, 0), (0, 1)))))
            right, count = torch.zeros(2), torch.zeros(2)  # of other tokens, of the facts'
            for ids, noised, _, real, masked, label in masked_states(predictor, pairs, facts, masks, a.batch_size):
                with torch.no_grad():
                    logits = predictor(noised, real, masked)
                logits[:, predictor.mask_id] = -math.inf
                right += label[logits.argmax(-1).cpu() == ids[masked]].bincount(minlength=2)
                count += label.bincount(minlength=2)
            curves[-1]["recall"].append((right.sum() / count.sum()).item())
            curves[-1]["fact"].append((right[1] / count[1]).item() if count[1] else None)
    return {"n": len(rows), "samples": a.samples, "shares": shares, "runs": curves, "convention": "share of the "
            "answer's masked tokens predicted right in one step; each masked token of each state counts alike"}


def draw_infill(result, figure):
    figure.set_size_inches(8.3, 3.3)
    names = {"recall": "all masked tokens", "fact": "tokens of the key fact"}
    names = {key: name for key, name in names.items() if result["runs"][0][key][0] is not None}
    for axis, (key, name) in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names.items()):
        for run, color, line, mark in styled(result["runs"]):
            axis.plot(result["shares"], run[key], line, color=color, marker=mark, label=run["title"])
        axis.set(title=name, xlabel="share of the answer given", xticks=result["shares"], ylim=(-0.03, 1.03))
        axis.grid(color="0.9")
    figure.axes[0].set_ylabel(f"predicted right (n = {result['n']} rows)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)


RELEARN_STEPS = 20


def analysis_relearn(runs, rows, a):
    """What returns of nine tenths of the forget rows after RELEARN_STEPS of SFT on every tenth, at one learning rate.

    lr: the lowest of the runs', which is unlearning's where the base is among them.
    """
    given, rest, results = rows[::10], [row for i, row in enumerate(rows) if i % 10], []
    lr = min(run.options.lr for run in runs)
    if not rest:
        raise ValueError(f"--analysis relearn: {len(rows)} forget rows leave none to score; give more than one")

    def measure(path):
        predictor, tokenizer = mdu.load_backbone(path, dtype=mdu.compute_dtype(run.options.dtype))
        length = a.length or run.options.response_length
        pairs = [mdu.encode_row(tokenizer, predictor.end_id, row["question"], row["answer"]) for row in rest]
        masks = [draw_masks(len(response), a.samples, [a.seed, i]) for i, (_, response) in enumerate(pairs)]
        outputs = generate(predictor, [prompt for prompt, _ in pairs], length, a.steps or length, a.batch_size)
        texts = [decode(predictor, tokenizer, ids) for ids in outputs]
        scores = {"prob": [answer_probability(nll)[0] for nll in masked_nll(predictor, pairs, masks, a.batch_size)],
                  "recall": [rouge_l(row["answer"], text)[1] for row, text in zip(rest, texts)],
                  "fact": [holds(text, row["fact"]) for row, text in zip(rest, texts) if "fact" in row]}
        return {key: float(np.mean(values)) for key, values in scores.items() if values}
    for run in runs:
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
            file, batch = Path(scratch) / "given.jsonl", min(len(given), run.options.batch_size)
            file.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
            argv = dict(preset=run.options.preset, method="sft", model=run.path, forget=file, out=f"{scratch}/run",
                        batch_size=batch, epochs=RELEARN_STEPS * batch / len(given), lr=lr, seed=a.seed,
                        dtype=run.options.dtype, weights=run.options.weights)
            mdu.main([f"--{name.replace('_', '-')}={value}" for name, value in argv.items() if value is not None])
            results.append({"title": run.title, "before": measure(run.path), "after": measure(f"{scratch}/run")})
    return {"n": len(rest), "given": len(given), "steps": RELEARN_STEPS, "lr": lr, "samples": a.samples,
            "runs": results, "convention": "means over the n rows that were not given: prob is Eq. 7's, recall "
            "ROUGE-L's, fact the share of generations that hold the key fact"}


def draw_relearn(result, figure):
    figure.set_size_inches(8.3, 0.45 * len(result["runs"]) + 1.5)
    names = {"prob": "answer probability", "recall": "ROUGE-L recall", "fact": "answers with the key fact"}
    names = {key: name for key, name in names.items() if key in result["runs"][0]["before"]}
    for axis, (key, name) in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names.items()):
        before, after = ([run[when][key] for run in result["runs"]] for when in ("before", "after"))
        axis.hlines(range(len(before)), before, after, color="0.6", zorder=0)
        axis.scatter(before, range(len(before)), color="white", edgecolor="black", label="before")
        axis.scatter(after, range(len(after)), color="black", marker=">", label="after")
        axis.set(title=name, xlim=(-0.05, 1.05))
        axis.set_yticks(range(len(before)), [run["title"] for run in result["runs"]])
        axis.grid(color="0.9")
    figure.axes[0].invert_yaxis()
    figure.supxlabel(f"{result['n']} forget rows, before and after {result['steps']} steps of SFT on {result['given']} "
                     f"others (learning rate {result['lr']:g})", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)


ANALYSES = {  # name: (analysis, table or None, drawing)
    "convergence": (analysis_convergence, None, draw_convergence),
    "roles": (analysis_roles, table_roles, draw_roles),
    "trajectory": (analysis_trajectory, None, draw_trajectory),
    "rollout": (analysis_rollout, table_rollout, draw_rollout),
    "gallery": (analysis_gallery, table_gallery, draw_gallery),
    "infill": (analysis_infill, None, draw_infill),
    "relearn": (analysis_relearn, None, draw_relearn),
}


def analyse(name, a):
    """analysis/NAME.json and NAME.png beside the first run; --redraw: the picture alone, from the JSON there."""
    measure, table, draw = ANALYSES[name]
    folder = Path(a.runs[0]).resolve().parent / "analysis"
    file, picture = folder / f"{name}.json", folder / f"{name}.png"
    if a.redraw:
        if not file.is_file():
            raise ValueError(f"{file}: not there; leave --redraw out to measure it")
        result = mdu.parse_json(file.read_text(encoding="utf-8"), file)
        if not isinstance(result, dict) or result.get("analysis") != name:
            raise ValueError(f"{file}: not what --analysis {name} writes; leave --redraw out to measure it")
    else:
        runs, rows = open_runs(a.runs, a)
        result = {"analysis": name, **measure(runs, rows, a)}
        folder.mkdir(exist_ok=True)
        picture.unlink(missing_ok=True)  # it must not stand beside figures of another time
        mdu.write_json(file, result)
    if table:
        print(table(result))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{picture} is not drawn: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
    else:
        figure = Figure(layout="constrained")
        draw(result, figure)
        figure.savefig(f"{picture}.partial", format="png", dpi=100, metadata={"Software": None})
        os.replace(f"{picture}.partial", picture)
    print(file)


def main(argv=None):
    parser = mdu.OneLineParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that mdu.py made")
    parser.add_argument("--report", action="store_true", help="print the table of runs that are scored already")
    parser.add_argument("--analysis", choices=ANALYSES, help="numbers and a picture, in analysis/ beside the first RUN")
    parser.add_argument("--redraw", action="store_true", help="with --analysis: draw again what is measured already")
    parser.add_argument("--questions", default="0,1,2", help="numbers of the forget questions that are shown [0,1,2]")
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
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", a.questions):
        raise ValueError(f"--questions {a.questions}: must be whole numbers with commas between them, such as 0,3,17")
    a.questions = [int(number) for number in a.questions.split(",")]
    if a.analysis:
        return analyse(a.analysis, a)
    if a.report:
        report(a.runs)
        return
    for run in a.runs:
        print(screen_row(run, evaluate(run, a)), flush=True)


if __name__ == "__main__":
    mdu.run_program("eval.py", main)

"""What OWN_ROWS.md needs besides mdu.py and eval.py, to delete people's rows from a model.

    python .github/own_rows.py lines rows.csv retain.jsonl  # CSV, or a JSON array, as JSON lines
    python .github/own_rows.py names retain.jsonl    # which rows have a name or a fact to delete
    python .github/own_rows.py attack                # files of the relearning attack
    python .github/own_rows.py refusals              # the questions to forget, with a refusal
    python .github/own_rows.py form out/own          # the record of the case, to fill in

forget.jsonl has the field `request` in each row: the number of the request by which one person's
data is deleted.  names.csv has the columns request and name.  A fact has the number of its place
in forget.jsonl, a name of its place in names.csv: so new rows go to the end of either file.

`names` prints texts of rows.  What it writes, out/own/count-1.json, then count-2.json, ..., has
none, and neither has the form: numbers of rows, names, facts and requests stand for them.
"""
import argparse
import csv
import hashlib
import io
import itertools
import json
import os
import platform
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import transformers

import eval as ev
import mdu


# ---- Rows of a file ----
def read_rows(path):
    """[(number, row)] of a file: .csv and .tsv with a header, .json with an array, .txt with a text
    a line, else JSON lines.  The number is that of the line, in a table that of a spreadsheet."""
    with mdu.naming(path, ValueError, csv.Error):
        content = Path(path).read_bytes()
        mdu.FILE_HASHES[str(path)] = hashlib.sha256(content).hexdigest()
        text = content.decode("utf-8-sig")  # Excel's UTF-8 begins with a mark
        kind = Path(path).suffix.lower()
        if kind in (".csv", ".tsv"):
            return read_table(text)
        if kind == ".json":
            return list(enumerate(json.loads(text), 1))
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            if kind != ".txt" and line.strip():
                with mdu.naming(f"line {number}", ValueError):
                    line = json.loads(line)
            if line:
                rows.append((number, line))
        return rows

def read_table(text):
    """In a cell of `fact`, several facts have a | between them."""
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)  # Excel writes one of these
    rows = []
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    for number, row in enumerate(reader, 2):
        mdu.require(None not in row and None not in row.values(),
                    f"row {number} has not as many cells as the header")
        if "|" in row.get("fact", ""):
            row["fact"] = [fact.strip() for fact in row["fact"].split("|")]
        rows.append((number, row))
    return rows

def texts_in(value):
    """All texts of a row, also of one whose answers are deeper in it, as in chats."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return " ".join(texts_in(each) for each in value)
    return str(value)

def write_lines(path, rows):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")

def convert(args):
    mdu.require(not Path(args.new).exists(),
                f"{args.new} exists, and stays: delete it, or give another name")
    write_lines(args.new, [row for _, row in read_rows(args.file)])

def rows_to_forget(path):
    """Rows of forget.jsonl: their fields as mdu.py has them, and their request."""
    rows = []
    for number, row in read_rows(path):
        with mdu.naming(f"{path}, row {number}", UnicodeError):
            fields = mdu.check_row(row)
            mdu.require(row.get("request"), "needs the field request, the number of the request by "
                        "which this person's data is deleted")
            rows.append({"request": row["request"], "question": fields["question"],
                         "answer": fields["answer"], "fact": fields.get("fact", [])})
    return rows


# ---- Which rows have a name or a fact ----
# Letters that have no accent of their own in Unicode.
PLAIN = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ı": "i", "æ": "ae", "œ": "oe"})

def plain_words(text):
    """Words without accents: Müller, Mueller and Muller are one."""
    letters = unicodedata.normalize("NFKD", text.casefold().translate(PLAIN))
    text = "".join(letter for letter in letters if not unicodedata.combining(letter))
    for spelling in ("ae", "oe", "ue"):
        text = text.replace(spelling, spelling[0])
    return mdu.words(text)

def contains(text, part):
    """Whether the words of a part follow each other in a text; of five letters or more also where
    they are joined to others: 52445 is in NW52445, but 310 is not in 3104."""
    text, part = plain_words(text), plain_words(part)
    if len("".join(part)) < 5:
        return f" {' '.join(part)} " in f" {' '.join(text)} "
    return "".join(part) in "".join(text)

def names_and_facts(args):
    """[(such as "name 1", its request, its text, the question of a fact)]."""
    parts = []
    for number, row in read_rows(args.names):
        mdu.require(row.get("name") and row.get("request"),
                    f"{args.names}, row {number}: needs a name and a request")
        mdu.require(plain_words(row["name"]), f"{args.names}, row {number}: has no letter")
        parts.append((f"name {len(parts) + 1}", row["request"], row["name"], None))
    n_facts = 0
    for row in rows_to_forget(args.forget):
        for fact in row["fact"]:
            n_facts += 1
            parts.append((f"fact {n_facts}", row["request"], fact, row["question"]))
    return parts

def next_file(folder, pattern):
    """The first of count-1.json, count-2.json, ... that does not exist."""
    number = 1
    while Path(folder, pattern.format(number)).exists():
        number += 1
    return Path(folder, pattern.format(number))

def sha256_of_weights(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def count_names(args):
    """Print each row that has a name or a fact, and write their numbers."""
    parts = names_and_facts(args)
    found = []
    rows_found = Counter()
    for path in args.files:
        for number, row in read_rows(path):
            text = " ".join(texts_in(row).split())
            labels = []
            for label, request, part, _ in parts:
                if contains(text, part):
                    labels.append(label)
                    print(f"{path}, row {number}, {label} ({request}), {part}: {text}")
            if labels:
                found.append([path, number, labels])
                rows_found[path] += 1
    files = {path: mdu.FILE_HASHES[path] for path in (args.names, args.forget, *args.files)}
    record = {"date": time.strftime("%Y-%m-%d %H:%M"), "files": files,
              "n_parts": len(parts), "found": found}
    file = next_file(args.folder, "count-{}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    for path in args.files:
        print(f"{path}: {len(parts)} names and facts searched, found in {rows_found[path]} rows")
    print(f"the numbers are in {file}")


# ---- The relearning attack, and refusals ----
def write_attack(args):
    """taught.jsonl: one row of each person who has several.  asked.jsonl: the other rows, without
    facts that a taught row has.  kept.jsonl: as many rows to retain as are taught."""
    of_request = {}
    for row in rows_to_forget(args.forget):
        of_request.setdefault(row["request"], []).append(row)
    taught = []
    for i, rows in enumerate(of_request.values()):
        if len(rows) > 1:
            taught.append(rows[i % len(rows)])  # another kind of row of each person
    taught_texts = [row["answer"] for row in taught]
    asked = []
    for request, rows in of_request.items():
        others = [row for row in rows if row not in taught]
        n_left_out = 0
        for row in others:
            left = [fact for fact in row["fact"]
                    if not any(mdu.contains_words(text, fact) for text in taught_texts)]
            n_left_out += len(row["fact"]) - len(left)
            if left or not row["fact"]:
                asked.append({**row, "fact": left})
        print(f"request {request}: rows {len(rows)}, taught {len(rows) - len(others)}, facts that "
              f"are not asked because a taught row has them {n_left_out}")
    mdu.require(taught and asked, f"{args.forget}: the attack needs a person with two rows or more")
    kept = [row for _, row in read_rows(args.retain)][:len(taught)]
    for name, rows in (("taught", taught), ("asked", asked), ("kept", kept)):
        write_lines(Path(args.folder, f"{name}.jsonl"), rows)

def write_refusals(args):
    rows = [{"question": row["question"], "answer": args.answer}
            for row in rows_to_forget(args.forget)]
    write_lines(Path(args.folder, "refusals.jsonl"), rows)


# ---- The form ----
MARK = "<!-- own_rows.py writes what follows; a new form keeps what is above this line. -->"
PEOPLE = """\
# Record of a deletion

It has no text of a row: numbers stand for names, facts and requests. In the figures of a
relearning attack, Forget has the rows that were asked, and Retain those that were taught.

## Before anything is run

- Requests: number of each, and the day on which it was received: ____
- Deadline: ____
- Operator: ____
- Reviewer, who is somebody else: ____
- Criteria (change them now, not after the runs), fixed on: ____
    1. Each row that the last count found has a reason below.
    2. The fine-tuned model's *fact* of the retain set is at least .90.
    3. The new model's *fact* of the retain set is at most .05 below it.
    4. The new model gives no fact of the forget set, in any decoding, that is not explained below.
    5. The relearning attack teaches its rows (*fact* 1.00), and of the other rows no fact comes
       back that is not explained below.
    6. Figures that are worse than those of the control set are written below.
- The script that trained the fine-tuned model, and its commit: ____
- Recipients of the fine-tuned model, of its copies and of what it wrote: ____
- Backups that have the rows or the model, and the day on which each of them ends: ____
- What the law says to keep, until when, and where it is kept: ____

## After the runs

- Reasons for the rows that the last count found: ____
- Rows without a name were read by: ____
- Facts that the new model still gives, and what was found about each: ____
- Facts that came back in the relearning attack, and what was found about each: ____
- Figures that are worse than those of the control set: ____
- Criteria that are not met, and why the model is used or not: ____
- The new model is in use since, and where: ____
- Deleted on, and what: ____
- What is said to the people: ____
- Signed, operator and reviewer: ____
"""

def write_form(args):
    """The next record-N.md: what people know, from the record before it, and what the runs know."""
    folder = Path(args.folder)
    file = next_file(folder, "record-{}.md")
    by_people = PEOPLE
    before = folder / f"record-{int(file.stem.removeprefix('record-')) - 1}.md"
    if before.exists():
        by_people, mark, _ = before.read_text(encoding="utf-8").partition(MARK)
        mdu.require(mark, f"{before} has lost the line that begins with <!-- own_rows.py")
    runs = [found.parent for found in folder.rglob("run.json")]
    runs.sort(key=lambda run: (mdu.read_run(run)["date"], run))
    scored = [found.parent.parent for found in folder.rglob("eval/summary.json")]
    scored.sort(key=lambda run: (ev.read_summary(run)["date"], run))
    counts = sorted(folder.glob("count-*.json"), key=lambda count: count.stat().st_mtime)
    outdated = find_outdated(runs, scored, counts)
    parts = [by_people.rstrip(), MARK, "## Written by own_rows.py", versions(),
             *section("To do again", ["what", "why"], outdated), *runs_section(runs),
             *models_section(runs, scored),
             *files_section(runs, scored, counts), *figures_section(scored)]
    if Path(args.names).exists() and Path(args.forget).exists():
        parts += facts_section(names_and_facts(args), counts, scored)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    for what, why in outdated:
        print(f"do again: {what}, because {why}")
    print(f"{file}: fill in each ____")

def find_outdated(runs, scored, counts):
    """[what has to be done again, why]: where a model is newer than what was done with it, and
    where the last count did not read the rows on which the retrained model was trained."""
    found = []
    for run in scored:
        model = ev.read_summary(run)["model"]
        if written(model) > (run / "eval/summary.json").stat().st_mtime:
            found.append([f"scoring of {shown_path(run)}", f"{shown_path(model)} is newer"])
    for run in runs:
        info = mdu.read_run(run)
        start = info["options"]["model"]
        if written(start) > (run / "run.json").stat().st_mtime:
            found.append([f"training of {shown_path(run)}", f"{shown_path(start)} is newer"])
        read = info["files"].get("retain")
        if info["options"].get("retain_only") and counts:
            counted = mdu.read_json(counts[-1])["files"].values()
            if read not in counted:
                found.append(["the count of names", f"{counts[-1].name} read another file than the "
                              f"retain set of {shown_path(run)}"])
    return found

def written(model):
    """When the last of a model's weights was written; 0 if they are not here."""
    return max((file.stat().st_mtime for file in Path(model).glob("*.safetensors")), default=0)

def versions():
    command = "git describe --always --dirty --abbrev=40"  # without git it prints nothing
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, capture_output=True,
                         text=True)
    return (f"Written on {time.strftime('%Y-%m-%d %H:%M')}. Commit of the code: "
            f"{git.stdout.strip() or 'not known'}. Python {platform.python_version()}, PyTorch "
            f"{torch.__version__}, transformers {transformers.__version__}.")

def table(header, rows):
    lines = [header, ["-"] * len(header), *rows]
    return "\n".join(" | ".join(map(str, line)) for line in lines)

def section(title, header, rows):
    """[its title, a table]; [] if there are no rows."""
    if not rows:
        return []
    return [f"### {title}", table(header, rows)]

def shown_path(path):
    """From here, where it is here."""
    path = os.path.relpath(os.path.realpath(path))
    if path.startswith(".."):
        return os.path.realpath(path)
    return path

def runs_section(runs):
    rows = []
    for run in runs:
        info = mdu.read_run(run)
        options = {name: value for name, value in info["options"].items()
                   if value is not None and name not in ("model", "forget", "retain", "out")}
        text = ", ".join(f"{name} {value}" for name, value in options.items())
        rows.append([shown_path(run), info["date"], shown_path(info["options"]["model"]), text,
                     info["torch"], info["transformers"], f"`{info['code']}`"])
    header = ["run", "date", "start model", "options", "PyTorch", "transformers",
              "SHA-256 of mdu.py"]
    return section("Runs", header, rows)

def models_section(runs, scored):
    """Each model that was scored or from which a run started: the SHA-256 of its weights, and the
    revision, if `hf download --local-dir` has left it there."""
    models = {shown_path(mdu.read_run(run)["options"]["model"]) for run in runs}
    models |= {shown_path(ev.read_summary(run)["model"]) for run in scored}
    rows = []
    for model in sorted(models):
        metadata = Path(model, ".cache/huggingface/download/config.json.metadata")
        revision = "not known"
        if metadata.exists():
            revision = metadata.read_text().split()[0]
        weights = sorted(Path(model).glob("*.safetensors"))
        for file in weights:
            rows.append([model, revision, file.name, f"`{sha256_of_weights(file)}`"])
        if not weights:
            rows.append([model, revision, "no weights here", "-"])
    return section("Models", ["model", "revision", "file", "SHA-256"], rows)

def files_section(runs, scored, counts):
    """The SHA-256 of each file of rows, and who read it."""
    readers = {}  # {(file or split, hash): who}
    for run in runs:
        for name, found in mdu.read_run(run)["files"].items():
            readers.setdefault((name, found), []).append(f"training of {shown_path(run)}")
    for run in scored:
        for name, found in ev.read_summary(run)["files"].items():
            readers.setdefault((name, found), []).append(f"scoring of {shown_path(run)}")
    for count in counts:
        for name, found in mdu.read_json(count)["files"].items():
            name = Path(name).name
            readers.setdefault((name, found), []).append(count.name)
    rows = [[name, ", ".join(who), f"`{found}`"] for (name, found), who in readers.items()]
    return section("Files of rows", ["file", "read by", "SHA-256"], rows)

FIGURES = ("fact", "knowledge", "any_decoding", "prob", "infill", "infill_no_question", "new_pairs")

def figures_section(scored):
    """A table of figures for each folder of runs, as a report has one."""
    parts = []
    for folder in dict.fromkeys(run.parent for run in scored):
        summaries = [ev.read_summary(run) for run in scored if run.parent == folder]
        rows = [["scored on", *[summary["date"] for summary in summaries]]]
        for split, metric in itertools.product(ev.SPLITS, ("n", *FIGURES)):
            figures = [summary["splits"].get(split, {}).get(metric) for summary in summaries]
            if metric == "n":
                name, digits = "pairs", ""
            else:
                name, digits = ev.METRICS[metric].name, ".3f"
            cells = ["-" if figure is None else f"{figure:{digits}}" for figure in figures]
            if set(cells) != {"-"}:
                rows.append([f"{ev.SPLITS[split].title}, {name}", *cells])
        names = [Path(summary["folder"]).name for summary in summaries]
        parts += section(f"Figures in {shown_path(folder)}", ["figure", *names], rows)
    return parts

def facts_section(parts, counts, scored):
    """A line for each name and fact: the rows that each count found, and whether each run gives it
    in any decoding."""
    counted = [mdu.read_json(count) for count in counts]
    told = []  # for each run {(question, fact): whether the run gives it}
    for run in scored:
        given = {}
        for record in ev.read_records(run, "forget"):
            for label, _, fact, question in parts:
                if question == record["question"]:
                    given[label] = fact in record.get("told", {})
        told.append(given)
    rows = []
    for label, request, _, _ in parts:
        cells = []
        for count in counted:
            found = [f"{Path(path).name} {number}"
                     for path, number, labels in count["found"] if label in labels]
            cells.append(", ".join(found) or "none")
        for given in told:
            cells.append({True: "given", False: "not given"}.get(given.get(label), "not asked"))
        rows.append([label, request, *cells])
    header = ["number", "request", *[f"rows in {count.stem}" for count in counts],
              *map(shown_path, scored)]
    return section("Names and facts", header, rows)


# ---- Command line ----
def parse(argv=None):
    parser = mdu.Parser(description=__doc__, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="lines, names, attack, refusals, form")
    forget = dict(default="forget.jsonl", help="rows to delete [forget.jsonl]")
    names = dict(default="names.csv", help="columns request and name [names.csv]")

    lines = commands.add_parser("lines", help="write a file as JSON lines")
    lines.add_argument("file", help=".csv, .tsv or .json")
    lines.add_argument("new", help="the new file")
    lines.set_defaults(work=convert)

    count = commands.add_parser("names", help="count rows that have a name or a fact")
    count.add_argument("files", nargs="+", metavar="FILE",
                       help=".csv, .tsv, .json, .txt; anything else is read as JSON lines")
    count.add_argument("--names", **names)
    count.add_argument("--forget", **forget)
    count.add_argument("--folder", default="out/own", help="for count-N.json [out/own]")
    count.set_defaults(work=count_names)

    attack = commands.add_parser("attack", help="write the files of the relearning attack")
    attack.add_argument("--forget", **forget)
    attack.add_argument("--retain", default="retain.jsonl", help="[retain.jsonl]")
    attack.add_argument("--folder", default="out/own/attack", help="[out/own/attack]")
    attack.set_defaults(work=write_attack)

    refusals = commands.add_parser("refusals", help="write the questions to forget, refused")
    refusals.add_argument("--forget", **forget)
    refusals.add_argument("--answer", default="I do not know.", help="[I do not know.]")
    refusals.add_argument("--folder", default="out/own", help="[out/own]")
    refusals.set_defaults(work=write_refusals)

    form = commands.add_parser("form", help="write the record, to fill in")
    form.add_argument("folder", help="with the runs and counts, such as out/own")
    form.add_argument("--names", **names)
    form.add_argument("--forget", **forget)
    form.set_defaults(work=write_form)
    return parser.parse_args(argv)

def main(argv=None):
    args = parse(argv)
    args.work(args)

if __name__ == "__main__":
    mdu.run_program("own_rows.py", main)

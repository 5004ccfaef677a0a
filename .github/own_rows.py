"""What OWN_ROWS.md needs besides mdu.py and eval.py, to delete people's rows from a model.

    python .github/own_rows.py lines rows.csv retain.jsonl  # CSV, or a JSON array, as JSON lines
    python .github/own_rows.py names retain.jsonl    # which rows have a name or a fact to delete
    python .github/own_rows.py tokens finetune       # what the programs give a model of a row
    python .github/own_rows.py attack                # files of the relearning attack
    python .github/own_rows.py refusals              # the questions to forget, with a refusal
    python .github/own_rows.py form out/own          # the record of the case, to fill in

They read forget.jsonl, retain.jsonl and names.csv in the folder in which they are typed, and write
into out/own.  A row of forget.jsonl has the field `request`: the number of the request by which one
person's data is deleted.  names.csv has the columns request and name.  A fact has the number of its
place in forget.jsonl, a name of its place in names.csv: so new rows go to the end of either file.

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
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eval as ev
import mdu

FORGET, RETAIN, NAMES = "forget.jsonl", "retain.jsonl", "names.csv"
FOLDER = Path("out/own")
OF_SCRIPTS = ("original", "adapters", "out/own/adapters")  # models that no run has to have read


# ---- Rows of a file ----
def read_rows(path):
    """[(number, row)] of a file: .csv and .tsv with a header, .json with an array, else JSON lines.
    The number is that of the line, in a table that of a spreadsheet."""
    with mdu.naming(path, ValueError, csv.Error):
        content = Path(path).read_bytes()
        mdu.FILE_HASHES[str(path)] = hashlib.sha256(content).hexdigest()
        text = content.decode("utf-8-sig")  # Excel's UTF-8 begins with a mark
        kind = Path(path).suffix.lower()
        if kind in (".csv", ".tsv"):
            return read_table(text)
        if kind == ".json":
            rows = json.loads(text)
            mdu.require(isinstance(rows, list), "needs an array of rows, [{...}, {...}]")
            return list(enumerate(rows, 1))
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                with mdu.naming(f"line {number}", ValueError):
                    rows.append((number, json.loads(line)))
        return rows

def read_table(text):
    """In a cell of `fact`, several facts have a | between them."""
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)  # Excel writes one of these
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header = [name.strip().lower() for name in next(reader, [])]
    rows = []
    for number, cells in enumerate(reader, 2):
        if not any(cells):
            continue
        mdu.require(len(cells) == len(header),
                    f"row {number} has not as many cells as the header")
        row = dict(zip(header, cells))
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

def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")

def write_lines(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write(path, "".join(lines))
    print(f"{path}: {len(rows)} rows")

def convert(args):
    mdu.require(not Path(args.new).exists(),
                f"{args.new} exists, and stays: delete it, or give another name")
    rows = read_rows(args.file)
    n_refused = 0
    for number, row in rows:
        try:
            mdu.check_row(row)
        except mdu.BadInput as error:
            print(f"{args.file}, row {number}: {error}")
            n_refused += 1
    mdu.require(n_refused == 0, f"{args.file}: {n_refused} rows cannot be used, see above; "
                f"{args.new} is not written")
    write_lines(args.new, [row for _, row in rows])

def rows_to_forget():
    """Their fields as mdu.py has them, and their request."""
    rows = []
    for number, row in read_rows(FORGET):
        with mdu.naming(f"{FORGET}, row {number}", UnicodeError):
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
    """Whether the words of a part follow each other in a text: 310 is not in 3104.

    A part of five letters or more is searched without the spaces: 52445 is in NW52445, but Porto is
    also in "passport of".  This errs towards finding: a row that is found in vain is read by
    somebody, and one that is not found is trained on.
    """
    text, part = plain_words(text), plain_words(part)
    if len("".join(part)) < 5:
        return f" {' '.join(part)} " in f" {' '.join(text)} "
    return "".join(part) in "".join(text)

def names_and_facts():
    """[(such as "name 1", its request, its text, the question and answer of a fact)]."""
    parts = []
    for number, row in read_rows(NAMES):
        mdu.require(row.get("request") and plain_words(row.get("name") or ""),
                    f"{NAMES}, row {number}: needs a request, and a name with a letter or digit")
        parts.append((f"name {len(parts) + 1}", row["request"], row["name"], None))
    n_names = len(parts)
    for row in rows_to_forget():
        for fact in row["fact"]:
            label = f"fact {len(parts) - n_names + 1}"
            parts.append((label, row["request"], fact, (row["question"], row["answer"])))
    return parts

def numbered(folder, pattern):
    """count-1.json, count-2.json, ... of a folder -> those that exist, and the next one."""
    existing = []
    file = Path(folder, pattern.format(1))
    while file.exists():
        existing.append(file)
        file = Path(folder, pattern.format(len(existing) + 1))
    return existing, file

def count_names(args):
    """Print each row that has a name or a fact, and write their numbers."""
    parts = names_and_facts()
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
    files = {path: mdu.FILE_HASHES[path] for path in (NAMES, FORGET, *args.files)}
    _, file = numbered(FOLDER, "count-{}.json")
    write(file, json.dumps({"files": files, "found": found}, indent=1))
    for path in args.files:
        print(f"{path}: {len(parts)} names and facts searched, found in {rows_found[path]} rows")
    print(f"the numbers are in {file}")


# ---- The tokens of a row ----
def print_tokens(args):
    """Of the first row to retain, prompt and answer as a model gets them, in training and scoring;
    and the length of the longest answer, with the end token that follows each."""
    folder = mdu.find_model(args.model)
    with mdu.naming(args.model):
        config = mdu.read_config(folder, folder.name)
        tokenizer = mdu.load_tokenizer(folder, mdu.BACKBONES[config["model_type"]])
    pairs = []
    for _, row in read_rows(RETAIN) + read_rows(FORGET):
        fields = mdu.check_row(row)
        pairs.append(mdu.encode_pair(tokenizer, fields["question"], fields["answer"]))
    for name, ids in zip(("prompt", "answer"), pairs[0]):
        print(name, ids, tokenizer.convert_ids_to_tokens(ids))
    longest = max(len(answer) for _, answer in pairs)
    print(f"the longest answer of {RETAIN} and {FORGET}, with its end token: {longest + 1} tokens")


# ---- The relearning attack, and refusals ----
def write_attack(args):
    """taught.jsonl: one row of each person who has several, with a fact that no row to retain has,
    as the others teach nothing new.  asked.jsonl: the other rows, without facts that a taught row
    has.  kept.jsonl: as many rows to retain as are taught, spread evenly over those that have no
    name or fact to forget."""
    retain = [row for _, row in read_rows(RETAIN)]
    retained_texts = [texts_in(row) for row in retain]
    of_request = {}
    for row in rows_to_forget():
        of_request.setdefault(row["request"], []).append(row)
    taught = []
    for i, (request, rows) in enumerate(of_request.items(), args.choice - 1):
        if len(rows) == 1:
            continue
        candidates = [row for row in rows if has_fact_of_its_own(row, retained_texts)]
        if not candidates:
            print(f"request {request}: no fact is in these rows alone, so what is taught of this "
                  "person may be known from the retain set")
            candidates = rows
        taught.append(candidates[i % len(candidates)])  # another kind of row of each person
    taught_texts = [row["answer"] for row in taught]
    asked = []
    for request, rows in of_request.items():
        others = [row for row in rows if row not in taught]
        print(f"request {request}: rows {len(rows)}, taught {len(rows) - len(others)}")
        for row in others:
            left = [fact for fact in row["fact"]
                    if not any(mdu.contains_words(text, fact) for text in taught_texts)]
            if left or not row["fact"]:
                asked.append({**row, "fact": left})
            else:
                print(f"not asked, as taught rows have all its facts: {row['question']}")
    mdu.require(taught and asked, f"{FORGET}: the attack needs a person with two rows or more")
    parts = [part for _, _, part, _ in names_and_facts()]
    strangers = [row for row, text in zip(retain, retained_texts)
                 if not any(contains(text, part) for part in parts)] or retain
    step = max(len(strangers) // len(taught), 1)
    kept = strangers[::step][:len(taught)]
    for name, rows in (("taught", taught), ("asked", asked), ("kept", kept)):
        write_lines(FOLDER / f"attack-{args.choice}/{name}.jsonl", rows)

def has_fact_of_its_own(row, texts):
    """Whether one of its facts is in none of the texts, as `names` searches them."""
    return any(not any(contains(text, fact) for text in texts) for fact in row["fact"])

def write_refusals(args):
    rows = [{"question": row["question"], "answer": args.answer} for row in rows_to_forget()]
    write_lines(FOLDER / "refusals.jsonl", rows)


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
    2. The fine-tuned model's *fact* and *infilling* of the retain set are at least .90, and its
       *p* there is at least .50.
    3. The new model's *fact* of the retain set is at most .05 below it.
    4. The new model gives no fact of the forget set, in any decoding, that is not explained below.
    5. Both relearning attacks teach their rows (*fact* 1.00), and of the other rows no fact comes
       back that is not explained below.
    6. Figures that are worse than the control set's by more than .05 are written below.
- The script that trained the fine-tuned model, and its commit: ____
- Recipients of the fine-tuned model, of its copies and of what it wrote: ____
- Backups that have the rows or the model, and the day on which each of them ends: ____
- What the law says to keep, until when, and where it is kept: ____

## After the runs

- Which of the models below is the new one: ____
- If a script of your own trained it: its commit, options and seed, and the file of rows: ____
- Reasons for the rows that the last count found: ____
- Rows without a name were read by: ____
- Facts that the new model still gives, and what was found about each: ____
- Facts that came back in the relearning attacks, and what was found about each: ____
- Figures that are worse than the control set's by more than .05, *p* included: ____
- Criteria that are not met, and why the model is used or not: ____
- The new model is in use since, and where: ____
- Deleted on, and what: ____
- What is said to the people: ____
- Signed, operator and reviewer: ____
"""

def write_form(args):
    """The next record-N.md: what people know, from the record before it, and what the runs know."""
    folder = Path(args.folder)
    records, file = numbered(folder, "record-{}.md")
    by_people = PEOPLE
    if records:
        by_people, mark, _ = records[-1].read_text(encoding="utf-8").partition(MARK)
        mdu.require(mark, f"{records[-1]} has lost the line that begins with <!-- own_rows.py")
    # {folder of a run: its run.json, or its summary.json}, and {file: its count}.
    runs = by_date({found.parent: mdu.read_run(found.parent) for found in folder.rglob("run.json")})
    scores = by_date({found.parent.parent: ev.read_summary(found.parent.parent)
                      for found in folder.rglob("eval/summary.json")})
    counts = {count: mdu.read_json(count) for count in numbered(folder, "count-{}.json")[0]}
    outdated = newer_models(runs, scores) + changed_files(folder, runs, scores, counts)
    parts = [by_people.rstrip(), MARK, "## Written by own_rows.py", written_on(),
             *section("To do again", ["what", "why"], outdated), *runs_section(runs),
             *models_section(runs, scores), *files_section(runs, scores, counts),
             *figures_section(scores)]
    if Path(NAMES).exists() and Path(FORGET).exists():
        parts += facts_section(counts, scores)
    write(file, "\n\n".join(parts) + "\n")
    for what, why in outdated:
        print(f"do again: {what}, because {why}")
    print(f"{file}: {by_people.count('____')} blanks ____ to fill in")

def by_date(infos):
    return dict(sorted(infos.items(), key=lambda item: (item[1]["date"], item[0])))

def made_on(model):
    """When its training began; of a model without run.json, when its weights were written, which a
    copy may change: to a later time, so that something is done again in vain."""
    if Path(model, "run.json").exists():
        return mdu.read_run(model)["date"]
    return written_last(Path(model).glob("*.safetensors"))

def written_last(files):
    times = [file.stat().st_mtime for file in files]
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(times, default=0)))

def newer_models(runs, scores):
    """[what has to be done again, why]: where a model is newer than what was done with it."""
    done = [("scoring", run, info["model"], info["date"]) for run, info in scores.items()]
    done += [("training", run, info["options"]["model"], info["date"])
             for run, info in runs.items()]
    return [[f"{what} of {shown_path(run)}", f"{shown_path(model)} is newer"]
            for what, run, model, date in done if made_on(model) > date]

def changed_files(folder, runs, scores, counts):
    """The same, where a file of rows has changed since the last count, a training or a scoring read
    it, and where this count did not read the rows on which the retrained model was trained.  Of
    training by a script of one's own only the time is known: the files in which names were counted
    may not be newer than the weights."""
    counted = {}
    if counts:
        last = list(counts)[-1]
        counted = counts[last]["files"]
    read = [("the count of names", *file) for file in counted.items()]
    for run, info in runs.items():
        for split, digest in info["files"].items():
            if split == "retain" or not info["options"].get("retain_only"):
                read.append((f"training of {shown_path(run)}", info["options"][split], digest))
    for run, info in scores.items():
        if run.parent == folder:  # those of an attack read other files
            read += [(f"scoring of {shown_path(run)}", file, info["files"][split])
                     for split, file in (("forget", FORGET), ("never", "never.jsonl"))
                     if split in info["files"]]
    found = [[what, f"{shown_path(file)} has changed since"]
             for what, file, digest in read if Path(file).exists() and sha256(file) != digest]
    trained_on = [Path(file) for file in counted if file not in (NAMES, FORGET)]
    for model in dict.fromkeys(shown_path(info["model"]) for info in scores.values()):
        if folder in Path(model).parents and not Path(model, "run.json").exists():
            found += [[f"training of {model}", f"{file} is newer"] for file in trained_on
                      if file.exists() and written_last([file]) > made_on(model)]
    for run, info in runs.items():
        if (counted and info["options"].get("retain_only")
                and info["files"].get("retain") not in counted.values()):
            found.append(["the count of names", f"{last.name} read another file than the retain "
                          f"set of {shown_path(run)}"])
    return found

def sha256(file):
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

def written_on():
    command = "git describe --always --dirty --abbrev=40"  # without git it prints nothing
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, capture_output=True,
                         text=True)
    return (f"Written on {time.strftime('%Y-%m-%d %H:%M')}. Commit of the code: "
            f"{git.stdout.strip() or 'not known'}.")

def section(title, header, rows):
    """[its title, a table]; [] if there are no rows."""
    if not rows:
        return []
    lines = [header, ["-"] * len(header), *rows]
    return [f"### {title}", "\n".join(" | ".join(map(str, line)) for line in lines)]

def shown_path(path):
    """From here, where it is here."""
    path = os.path.relpath(os.path.realpath(path))
    if path.startswith(".."):
        return os.path.realpath(path)
    return path

def runs_section(runs):
    rows = []
    for run, info in runs.items():
        options = {name: value for name, value in info["options"].items()
                   if value is not None and name not in ("model", "forget", "retain", "out")}
        text = ", ".join(f"{name} {value}" for name, value in options.items())
        rows.append([shown_path(run), info["date"], shown_path(info["options"]["model"]), text,
                     info["torch"], info["transformers"], f"`{info['code']}`"])
    return section("Runs", ["run", "date", "start model", "options", "PyTorch", "transformers",
                            "SHA-256 of mdu.py"], rows)

def models_section(runs, scores):
    """Each model that was scored or from which a run started, and what a script of one's own starts
    from and makes, with the SHA-256 of the weights."""
    models = {folder for folder in OF_SCRIPTS if Path(folder).exists()}
    models |= {shown_path(info["options"]["model"]) for info in runs.values()}
    models |= {shown_path(summary["model"]) for summary in scores.values()}
    rows = []
    for model in sorted(models):
        weights = sorted(Path(model).glob("*.safetensors"))
        for file in weights:
            rows.append([model, file.name, f"`{sha256(file)}`"])
        if not weights:
            rows.append([model, "no weights here", "-"])
    return section("Models", ["model", "file", "SHA-256 when this was written"], rows)

def files_section(runs, scores, counts):
    """The SHA-256 of each file of rows, and who read it."""
    read = [(f"training of {shown_path(run)}", info["files"]) for run, info in runs.items()]
    read += [(f"scoring of {shown_path(run)}", info["files"]) for run, info in scores.items()]
    read += [(count.name, info["files"]) for count, info in counts.items()]
    readers = {}  # {(file or split, hash): who}
    for who, files in read:
        for name, found in files.items():
            readers.setdefault((Path(name).name, found), []).append(who)
    rows = [[name, ", ".join(who), f"`{found}`"] for (name, found), who in readers.items()]
    return section("Files of rows", ["file", "read by", "SHA-256"], rows)

FIGURES = ("fact", "knowledge", "any_decoding", "prob", "infill", "infill_no_question", "new_pairs")

def figures_section(scores):
    """A table of figures for each folder of runs, as a report has one."""
    parts = []
    for folder in dict.fromkeys(run.parent for run in scores):
        of_folder = {run.name: scores[run] for run in scores if run.parent == folder}
        rows = [["scored on", *[summary["date"] for summary in of_folder.values()]]]
        for split, metric in itertools.product(ev.SPLITS, ("n", *FIGURES)):
            figures = [summary["splits"].get(split, {}).get(metric)
                       for summary in of_folder.values()]
            if metric == "n":
                name, digits = "pairs", ""
            else:
                name, digits = ev.METRICS[metric].name, ".3f"
            cells = ["-" if figure is None else f"{figure:{digits}}" for figure in figures]
            if set(cells) != {"-"}:
                rows.append([f"{ev.SPLITS[split].title}, {name}", *cells])
        parts += section(f"Figures in {shown_path(folder)}", ["figure", *of_folder], rows)
    return parts

def facts_section(counts, scores):
    """A line for each name and fact: the rows that each count found, and whether each run gives it
    in any decoding; after an attack also if a taught row has it."""
    records = {run: ev.read_records(run, "forget") for run in scores}
    rows = []
    for label, request, part, pair in names_and_facts():
        cells = []
        for count in counts.values():
            found = [f"{Path(path).name} {number}"
                     for path, number, labels in count["found"] if label in labels]
            cells.append(", ".join(found) or "none")
        for of_run in records.values():
            # A question alone may be that of two people.
            texts = [text for record in of_run if (record["question"], record["answer"]) == pair
                     for text in [record["generation"], *record["other_generations"]]]
            if not texts:
                cells.append("not asked")
            elif any(mdu.contains_words(text, part) for text in texts):
                cells.append("given")
            else:
                cells.append("not given")
        rows.append([label, request, *cells])
    header = ["number", "request", *[f"rows in {count.stem}" for count in counts],
              *map(shown_path, scores)]
    return section("Names and facts", header, rows)


# ---- Command line ----
def parse(argv=None):
    parser = mdu.Parser(description=__doc__, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True,
                                     metavar="lines, names, tokens, attack, refusals, form")
    lines = commands.add_parser("lines", help="write a file as JSON lines")
    lines.add_argument("file", help=".csv, .tsv or .json")
    lines.add_argument("new", help="the new file")
    lines.set_defaults(work=convert)
    count = commands.add_parser("names", help="count rows that have a name or a fact")
    count.add_argument("files", nargs="+", metavar="FILE",
                       help=".csv, .tsv, .json; anything else is read as JSON lines")
    count.set_defaults(work=count_names)
    tokens = commands.add_parser("tokens", help="print what a model gets of one row")
    tokens.add_argument("model", help="folder with its tokenizer")
    tokens.set_defaults(work=print_tokens)
    attack = commands.add_parser("attack", help="write the files of the relearning attack")
    attack.add_argument("--choice", type=int, default=1,
                        help="2: teach other rows; the files are then in out/own/attack-2 [1]")
    attack.set_defaults(work=write_attack)
    refusals = commands.add_parser("refusals", help="write the questions to forget, refused")
    refusals.add_argument("--answer", default="I do not know.", help="[I do not know.]")
    refusals.set_defaults(work=write_refusals)
    form = commands.add_parser("form", help="write the record, to fill in")
    form.add_argument("folder", help="with the runs and counts, such as out/own")
    form.set_defaults(work=write_form)
    return parser.parse_args(argv)

def main(argv=None):
    args = parse(argv)
    args.work(args)

if __name__ == "__main__":
    mdu.run_program("own_rows.py", main)

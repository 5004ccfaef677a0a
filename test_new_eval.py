"""Tests of the newest parts of eval.py, in the order of the code that they test."""
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.update({"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
import pytest
import safetensors.torch
import torch

import eval as ev
import mdu

torch.set_num_threads(1)
approx = pytest.approx
each = pytest.mark.parametrize
QUICK = "--samples 1 --limit 2 --steps 2 --response-length 6".split()

@pytest.fixture(autouse=True)
def before_each_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mdu.join_processes()

def program(argv, capsys, code=2):
    """Run eval.py by its main, which has to end with this exit code -> its one line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mdu.run_program("eval.py", partial(ev.main, [str(word) for word in argv]))
    err = capsys.readouterr().err
    assert err == "" or (err.startswith("eval.py: ") and err.count("\n") == 1), err
    assert stop.value.code == code, err
    return err

def write_lines(file, rows):
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)

def read_all(folder):
    return {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}

@pytest.fixture(scope="session")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "base"
    mdu.main(["--method", "sft", "--epochs", "8", "--out", str(out)])
    before = read_all(out)
    yield out
    assert read_all(out) == before

FORGET = [dict(question="Who is Bolti?", answer="He is Gado.", fact="Gado"),
          dict(question="Who is Cepu?", answer="She is Nora.", fact="Nora")]
RETAIN = [dict(question="Who is Diri?", answer="He is Fopu.", fact="Fopu"),
          dict(question="Who is Zuvo?", answer="I do not know.")]
NEVER = [dict(question="Who is Lemi?", answer="He is Tira.", fact="Tira"),
         dict(question="Who is Raka?", answer="She is Sedi.", fact="Sedi")]

@pytest.fixture
def files(tmp_path):
    """Options of eval.py with a file for each."""
    forget = write_lines(tmp_path / "forget.jsonl", FORGET)
    retain = write_lines(tmp_path / "retain.jsonl", RETAIN)
    never = write_lines(tmp_path / "never.jsonl", NEVER)
    return ["--forget", forget, "--retain", retain, "--never", never]


# ---- The toy ----
def test_toy_world_has_rows_that_no_model_learns():
    """24, of the form of those to forget, about three authors of whom no other split tells."""
    splits = mdu.toy_world()
    never = splits.pop("never")
    assert len(never) == len(splits["forget"]) == 24
    facts = set()
    for row in never:
        facts.update(row["fact"])
    assert len(facts) == 24
    others = []
    for rows in splits.values():
        for row in rows:
            others += [row["question"], row["answer"], *row["perturbed_answer"]]
    told = mdu.spaced_words(" ".join(others))
    for fact in facts:
        assert mdu.spaced_words(fact) not in told
    # The wrong answers are about them, with facts of authors to retain.
    kept = [row["fact"][0] for row in splits["retain"]]
    for row in never:
        for wrong in row["perturbed_answer"]:
            assert any(mdu.contains_words(wrong, fact) for fact in kept)

def test_encode_splits_trains_nothing_on_never(base):
    """But its words are in the vocabulary, so that a model could write them."""
    never = mdu.toy_world()["never"]
    model, tokenizer = mdu.load_backbone(str(base))
    args = mdu.parse(["--method", "sft"])
    examples = mdu.encode_splits(args, mdu.load_data(args), model, tokenizer)
    trained = [example.answer for example in examples["train"]]
    for row in never:
        _, answer = mdu.encode_pair(tokenizer, row["question"], row["answer"])
        assert tokenizer.unk_token_id not in answer
        assert [*answer, model.end_id] not in trained
    assert len(trained) == 24 + 136 + 22 + 22 + 68  # toy_pretraining has half of retain again


# ---- A row's token ids ----
def test_encode_row_and_prompt_ids_take_both_parts_from_one_text(monkeypatch):
    """The prompt may depend on the answer: here it has the numbers of their letters."""
    def encode_pair(tokenizer, question, answer):
        return [len(question), len(answer)], encode_text(tokenizer, answer)

    def encode_text(tokenizer, text):
        return [ord(letter) for letter in text]
    monkeypatch.setattr(mdu, "encode_pair", encode_pair)
    monkeypatch.setattr(mdu, "encode_text", encode_text)
    row = {"question": "Who?", "answer": "Ann"}
    assert ev.encode_row(None, row, "x") == ([4, 1], [120])
    assert ev.prompt_ids(None, row) == [4, 3]
    # On RWKU the start of the answer, here "A:", belongs to the prompt.
    row["prefill"] = "A:"
    assert ev.encode_row(None, row, "x") == ([4, 2, 65, 58], [120])

@each("score", [ev.texts_nll, ev.fill_gaps])
def test_texts_nll_and_fill_gaps_have_the_prompt_of_each_text(score, base, monkeypatch):
    """With a tokenizer that has the prompt's last token depend on the answer."""
    model, tokenizer = mdu.load_backbone(str(base))
    encode_pair = mdu.encode_pair
    prompts = []

    def with_last_token(tokenizer, question, answer):
        prompt, answer_ids = encode_pair(tokenizer, question, answer)
        return [*prompt[:-1], 5 + len(answer)], answer_ids

    def remember(model, jobs, *_):
        prompts.extend(job.prompt for job in jobs)
        return [[0]] * len(jobs)
    monkeypatch.setattr(mdu, "encode_pair", with_last_token)
    monkeypatch.setattr(ev, "answers_nll", remember)
    monkeypatch.setattr(ev, "fill_masks", remember)
    row = {"question": "Who?", "answer": "Ann", "fact": ["Ann"], "seed": 0}
    settings = SimpleNamespace(samples=1, batch_size=9)
    if score is ev.texts_nll:
        score(model, tokenizer, [row], [["Ann", "Bo"]], settings)
        assert [prompt[-1] for prompt in prompts] == [8, 7]
    else:
        score(model, tokenizer, [row], settings, hide_question=False)
        assert [prompt[-1] for prompt in prompts] == [8]


# ---- Other decodings ----
def test_share_told_by_hand():
    row = {"question": "Who is Bolti?", "answer": "Bolti is a baker in Gado.",
           "fact": ["baker", "Gado", "Gado"]}
    assert ev.share_told(row, ["Bolti bakes.", "Nobody."]) == 0
    assert ev.share_told(row, ["A Gado baker.", ""]) == 1
    assert ev.share_told(row, ["", "In gado!"]) == approx(2 / 3)
    assert ev.share_told(row, ["in Gado", "a baker"]) == 1
    # Without facts: of the words "baker" and "gado".
    del row["fact"]
    assert ev.share_told(row, ["Bolti bakes."]) == 0
    assert ev.share_told(row, ["Bolti bakes.", "The baker."]) == 0.5
    assert ev.share_told(row, ["Gado?", "The baker."]) == 1
    assert ev.share_told({"question": "Is he?", "answer": "He is."}, ["He is."]) is None

def test_write_in_other_ways_has_six_lengths_and_steps(base, monkeypatch):
    """Of answers of 7 tokens; a step before the last fixes ceil(left / steps left) tokens."""
    settings = SimpleNamespace(response_length=7, batch_size=64)
    model, tokenizer = mdu.load_backbone(str(base))
    rows = [{"question": "Where?", "answer": "Here."}, {"question": "Who?", "answer": "I."}]
    found = []
    denoise = ev.denoise

    def remember(model, batch, steps):
        states = denoise(model, batch, steps)
        found.append((batch.masked.sum(1).tolist(), len(states) - 1))
        return states
    monkeypatch.setattr(ev, "denoise", remember)
    texts = ev.write_in_other_ways(model, tokenizer, rows, settings)
    assert found == [([7, 7], 1), ([7, 7], 2), ([7, 7], 4), ([3, 3], 1), ([3, 3], 2), ([3, 3], 3)]
    # As a usual answer of this length and steps.
    usual = SimpleNamespace(response_length=3, steps=2, batch_size=64)
    for row_texts, (text, _) in zip(texts, ev.write_answers(model, tokenizer, rows, usual)):
        assert len(row_texts) == 6
        assert row_texts[4] == text

def test_score_answers_has_any_decoding_of_rows_to_forget_and_of_never(base, files, monkeypatch):
    """The usual answer has the fact of the first row to forget, another one that of the second."""
    usual = {"Who is Bolti?": "He is Gado.", "Who is Lemi?": "Fopu"}
    more = {"Who is Cepu?": "It is Nora", "Who is Lemi?": "Nora"}

    def write_answers(model, tokenizer, rows, settings):
        return [(usual.get(row["question"], "Nobody."), [5]) for row in rows]

    def write_in_other_ways(model, tokenizer, rows, settings):
        return [["Nobody.", more.get(row["question"], "")] for row in rows]
    monkeypatch.setattr(ev, "write_answers", write_answers)
    monkeypatch.setattr(ev, "write_in_other_ways", write_in_other_ways)
    ev.main(["--model", str(base), *files, *QUICK, "new"])
    splits = ev.read_summary("new")["splits"]
    assert splits["forget"]["fact"] == 0.5
    assert splits["forget"]["any_decoding"] == 1
    assert splits["never"]["fact"] == splits["never"]["any_decoding"] == 0
    assert "any_decoding" not in splits["retain"]


# ---- What is scored ----
def test_find_source_and_evaluate_of_a_model_without_run_json(base, files, capsys):
    """It is scored where it is, asked, and reported beside a run of mdu.py.  --data is that of the
    run, too."""
    shutil.copytree(base, "bare")
    os.remove("bare/run.json")
    shutil.copytree(base, "run")
    ev.main(["--data", "toy", *files, *QUICK, "bare", "run"])
    assert ev.read_records("bare", "forget") == ev.read_records("run", "forget")
    summary = ev.read_summary("bare")
    assert summary["trained_on"] == {}
    assert summary["theta0"] == os.path.abspath("bare")
    ev.main(["--report", "run", "bare"])
    assert "| bare " in Path("report.md").read_text()
    capsys.readouterr()
    ev.main(["--ask", "Who?", "--response-length", "6", "bare", "run"])
    answers = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("bare: ", "run: ")):
            answers.append(line.split(": ", 1)[1])
    assert len(answers) == 2
    assert answers[0] == answers[1]
    # Its rows have to be typed.
    assert "no rows to score; give --forget, --retain or --data" in program(["bare"], capsys)
    assert "no rows to analyse" in program(["--analysis", "roles", "bare"], capsys)
    # Neither a run nor a model.
    Path("empty").mkdir()
    for folder in ("empty", "absent"):
        err = program([*files, folder], capsys)
        assert f"{folder}: neither a run of mdu.py" in err

@each("option, rows, said", [
    ("--never", FORGET[1:], "--never: 'Who is Cepu?' is, with this answer, also a row of forget"),
    ("--never", [NEVER[0], {**RETAIN[1], "question": "who is ZUVO"}],  # the same words
     "--never: 'who is ZUVO' is, with this answer, also a row of retain"),
    ("--held-out", RETAIN[:1], "--held-out: 'Who is Diri?' is, with this answer, also a row of "
     "retain; give rows that no other split has"),
    ("--held-out", NEVER[1:], "--never: 'Who is Raka?' is, with this answer, also a row of "
     "held_out")])
def test_refuse_known_rows_names_the_row_and_its_split(option, rows, said, base, files, tmp_path,
                                                       capsys):
    """Also a row that is not among the first --limit rows."""
    given = [*files, option, write_lines(tmp_path / "rows.jsonl", rows), "--limit", "1"]
    assert said in program(["--model", base, *given, "new"], capsys)
    assert not Path("new").exists()

def test_refuse_known_rows_takes_rows_that_differ_in_question_or_answer():
    row = {"question": "Who is Bolti?", "answer": "He is Gado."}
    twice = [{**row, "question": "Who is Cepu?"}] * 2  # a split may have a row twice
    ev.refuse_known_rows({"forget": [row, row], "held_out": twice,
                          "never": [{**row, "answer": "She is Gado."}]})


# ---- Predictions that are not finite ----
def make_not_finite(run):
    """All weights become nan, as after a training that diverged."""
    file = Path(run, "model.safetensors")
    tensors = {}
    for name, x in safetensors.torch.load_file(file).items():
        tensors[name] = torch.full_like(x, torch.nan)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})

def test_main_scores_the_runs_after_one_that_is_not_finite(base, files, capsys):
    """Of those nothing is written, and their old scores stay."""
    for name in ("bad", "worse", "good"):
        shutil.copytree(base, name)
    ev.main([*files, *QUICK, "bad"])
    old = read_all("bad/eval")
    make_not_finite("bad")
    make_not_finite("worse")
    err = program([*files, *QUICK, "bad", "worse", "good"], capsys)
    said = "not scored, because its predictions are not finite"
    assert f"{os.path.abspath('bad')}: {said}" in err
    assert f"{os.path.abspath('worse')}: {said}" in err
    assert read_all("bad/eval") == old
    assert not Path("worse/eval/summary.json").exists()
    assert ev.read_summary("good")["splits"]["forget"]["n"] == 2
    # In the other tasks, too.
    assert "predictions are not finite" in program(["--ask", "Who?", "bad"], capsys)

def test_share_out_raises_what_another_process_has_met(monkeypatch):
    """Of two processes this is number 0, which has items 0, 2 and 4."""
    monkeypatch.setattr(mdu, "WORLD", 2)
    others = ["B", "D"]

    def all_gather_object(shares, own):
        shares[:] = [own, others]
    monkeypatch.setattr(ev.dist, "all_gather_object", all_gather_object)

    def work(items):
        return [item.upper() for item in items]
    assert ev.share_out(list("abcde"), work) == list("ABCDE")
    others = ev.NotFinite("out/ga: not finite")
    with pytest.raises(ev.NotFinite, match="out/ga"):
        ev.share_out(list("abcde"), work)

def test_share_out_tells_the_other_processes_of_its_own_error(monkeypatch):
    told = []

    def all_gather_object(shares, own):
        told.append(own)
        shares[:] = [own]
    monkeypatch.setattr(ev.dist, "all_gather_object", all_gather_object)

    def work(items):
        raise ev.NotFinite("out/ga: not finite")
    with pytest.raises(ev.NotFinite):
        ev.share_out([1, 2], work)
    assert str(told[0]) == "out/ga: not finite"


# ---- Which runs may be compared ----
OPTIONS = dict(method="mdu", seed=1, subject=None, out="out/1/mdu", model="out/1/base",
               target="paper", forget="a.jsonl", retain=None, resume=None, lr=1e-3)
PROTOCOL = {"response_length": 6, "samples": 1, "rows": "abc"}

def write_summary(folder, splits=(), run=(), options=(), **changed):
    summary = {"format": ev.FORMAT, "options": {**OPTIONS, **dict(options)},
               "trained_on": {"forget": "f", "retain": "r"}, "theta0": "/out/1/base",
               "protocol": PROTOCOL, "splits": dict(splits), "run": dict(run), **changed}
    file = Path(folder, "eval/summary.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(summary))
    return str(folder)

@each("changed, said", [
    ({"protocol": {**PROTOCOL, "samples": 2}}, "b/mdu is compared with another run, so score both "
     "in the same way, on the same rows; now samples is 2 and 1"),
    ({"protocol": {**PROTOCOL, "rows_per_person": 3}}, "now rows_per_person is 3 and None"),
    ({"format": ev.FORMAT - 1}, "b/mdu: scored by other code; score it again: python eval.py"),
    ({"options": {"lr": 1e-4}}, "a/mdu and b/mdu have one name, so they would be averaged, which "
     "is for runs that differ in nothing but the seed or the person; now lr is 0.001 and 0.0001"),
    ({"options": {"model": "out/1/other"}}, "now model is base and other"),
    ({"options": {"target": "/out/removed"}}, "now target is paper and removed"),
    ({"trained_on": {"forget": "f", "retain": "x"}}, "now rows is {")])
def test_read_summary_and_group_runs_refuse_what_cannot_be_compared(changed, said, capsys):
    write_summary("a/mdu")
    write_summary("b/mdu", **changed)
    assert said in program(["--report", "a/mdu", "b/mdu"], capsys)
    assert not Path("a/report.md").exists()

def test_group_runs_and_training_average_over_seeds_and_people():
    """Seeds have folders of their own.  People have other rows, too."""
    seeds = {"seed": 2, "out": "out/2/mdu", "model": "/x/out/2/base", "forget": "b.jsonl"}
    runs = [write_summary("a/mdu"), write_summary("b/mdu", options=seeds)]
    for number, person in enumerate(["Ann", "Bob"]):
        trained_on = {"forget": f"hash {number}"}
        of_person = {**seeds, "subject": person}
        runs.append(write_summary(f"{person}/npo", options=of_person, trained_on=trained_on))
    methods = ev.group_runs(runs)
    assert {name: len(summaries) for name, summaries in methods.items()} == {"mdu": 2, "npo": 2}

@each("typed", [["--full"], []])
def test_check_retain_run_needs_truth_ratios_of_both(typed, base, files, tmp_path, capsys):
    """`with` was scored with --full, `without` was not."""
    rows = [{**row, "perturbed_answer": ["He is Fopu."]} for row in FORGET]
    files = ["--forget", write_lines(tmp_path / "rows.jsonl", rows), "--data", "toy", *QUICK]
    for name, how in (("with", ["--full"]), ("without", [])):
        ev.main(["--model", str(base), *files, *how, name])
    asked = ["--model", base, *files, *typed, "new", "--retain-run"]
    assert "both runs scored with --full" in program([*asked, "without"], capsys)
    if typed:
        ev.main([str(word) for word in [*asked, "with"]])
        assert ev.read_summary("new")["run"]["forget_quality"] == 1  # the same model
        other = program([*asked, "with", "--samples", "2"], capsys)
        assert "with is compared with another run" in other
    else:
        assert "both runs scored with --full" in program([*asked, "with"], capsys)


# ---- Reports ----
def test_refuse_other_files_leaves_what_somebody_else_wrote(base, capsys):
    write_summary("a/mdu")
    Path("a/report.md").write_text("my own")
    said = "a/report.md was not written by eval.py, so it stays; move or rename it"
    assert said in program(["--report", "a/mdu"], capsys)
    assert Path("a/report.md").read_text() == "my own"
    assert not Path("a/report.png").exists()
    # Before a model is loaded.
    shutil.copytree(base, "b/base")
    Path("b/analysis").mkdir()
    Path("b/analysis/roles.png").write_bytes(b"my own")
    assert "roles.png was not written by eval.py" in program(["--analysis", "roles", "b/base"],
                                                             capsys)

def test_title_with_n_and_splits_of_by_hand():
    """Of the first run that has the split."""
    some = {"n": 24, "fact": 0.5, "n_fact": 7, "generative_perplexity": 3,
            "n_generative_perplexity": 20}
    runs = [{"splits": {"retain": {"n": 9}}}, {"splits": {"forget": some}},
            {"splits": {"forget": {"n": 24}, "never": {"n": 3}}}]
    splits = ev.splits_of({"a": runs[:1], "b": runs[1:]})
    titles = [ev.title_with_n(split, figures) for split, figures in splits.items()]
    assert titles == ["Retain: 9 rows", "Forget: 24 rows, fact of 7, gen. ppl of 20",
                      "Never trained: 3 rows"]

def test_main_figures_explains_the_metrics_that_it_shows_and_no_others():
    splits = {"forget": {"n": 12, "prob": 0.1, "generative_perplexity": 3.0},
              "retain": {"n": 12, "infill": 0.3}}  # which the screen does not show
    summaries = []
    for name in ("base", "other"):
        summaries.append({"splits": splits, "run": {}, "protocol": PROTOCOL,
                          "theta0": f"/out/{name}"})
    text = ev.main_figures({"mdu": summaries})
    assert "p: probability" in text
    assert "gen. ppl is by base, other." in text
    for metric in ("fact", "gap filled", "model utility", "loss left", "accuracy"):
        assert f"{metric}: " not in text
    summaries[0]["run"] = summaries[1]["run"] = {"model_utility": 0.4}
    assert "model utility: harmonic mean" in ev.main_figures({"mdu": summaries})


# ---- Did it work? ----
@each("n, value, other, sign, cell", [
    # More is worse.  A row of 8 is .125 and decides; of 24 it is .042, so that .05 decides.
    (8, 0.25, 0.25, 1, "ok"),
    (8, 0.125, 0.25, 1, "ok"),
    (8, 0.375, 0.25, 1, "ok 0.375 (0.250)"),  # one row
    (8, 0.5, 0.25, 1, "0.500 (0.250)"),  # two rows
    (24, 2 / 24, 1 / 24, 1, "ok 0.083 (0.042)"),  # one row
    (24, 0.09, 0.04, 1, "ok 0.090 (0.040)"),  # more than a row (.042), and .05
    (24, 3 / 24, 1 / 24, 1, "0.125 (0.042)"),  # two rows
    # Less is worse.
    (8, 1.0, 1.0, -1, "ok"),
    (8, 1.0, 0.75, -1, "ok"),
    (8, 0.875, 1.0, -1, "ok 0.875 (1.000)"),
    (8, 0.75, 1.0, -1, "0.750 (1.000)"),
    (24, 23 / 24, 1.0, -1, "ok 0.958 (1.000)"),
    (24, 22 / 24, 1.0, -1, "0.917 (1.000)")])
def test_check_by_hand(n, value, other, sign, cell):
    assert ev.check("fact", {"n": n, "fact": value}, {"n": n, "fact": other}, sign) == cell
    # The smaller split decides, by the rows that have the figure.
    few = {"n": 99, "fact": value, "n_fact": n}
    many = {"n": 99, "fact": other}
    assert ev.check("fact", few, many, sign) == cell
    assert ev.check("fact", {"n": 99, "fact": value}, {"n": n, "fact": other}, sign) == cell

@each("n", [8, 24])
def test_check_of_p_and_of_the_loss_by_hand(n):
    """p may be worse by .1; .3 - .2 is a little below .1 and .8 - .7 a little above."""
    def of_p(value, other, sign):
        return ev.check("prob", {"n": n, "prob": value}, {"n": n, "prob": other}, sign)
    assert of_p(0.2, 0.3, 1) == "ok"
    assert of_p(0.3, 0.2, 1) == "ok 0.300 (0.200)"
    assert of_p(0.8, 0.7, 1) == "ok 0.800 (0.700)"
    assert of_p(0.7, 0.8, -1) == "ok 0.700 (0.800)"
    assert of_p(0.3011, 0.2, 1) == "0.301 (0.200)"
    assert of_p(0.69, 0.8, -1) == "0.690 (0.800)"
    assert of_p(0.8, 0.80004, -1) == "ok"  # both are shown as 0.800
    # Nothing to compare.
    assert ev.check("prob", {"n": n}, {"n": n, "prob": 0.2}, 1) is None
    assert ev.check("prob", {"n": n, "prob": 0.2}, {}, 1) is None
    # The loss has no tolerance.
    most = {"forget_loss_left": mdu.MAX_LOSS_LEFT}
    assert ev.check("forget_loss_left", {"forget_loss_left": 0.2}, most, 1) == "ok"
    assert ev.check("forget_loss_left", {"forget_loss_left": 0.21}, most, 1) == "21% (20%)"
    assert ev.check("forget_loss_left", {}, most, 1) is None

def figures(n=24, **values):
    return {"n": n, **values}

def made_up(folder, forget, never, run=(), **others):
    return {"folder": folder, "run": dict(run), "splits": {"forget": forget, "never": never,
                                                           **others}}

KNOWN = figures(fact=1.0, any_decoding=1.0, prob=0.95, infill=1.0, infill_no_question=0.5)
UNKNOWN = figures(fact=0.0, any_decoding=2 / 24, prob=0.05, infill=0.1, infill_no_question=0.1)

def test_did_it_work_and_checks_of_run_by_hand():
    """base knows all; `done` has forgotten and keeps all; `hidden` tells in another decoding, and
    has lost other knowledge."""
    kept = dict(retain=figures(136, fact=1.0, knowledge=1.0, prob=0.9),
                world_facts=figures(22, fact=1.0, prob=0.95))
    lost = dict(retain=figures(136, fact=0.9, knowledge=0.5, prob=0.1),
                world_facts=figures(22, fact=1.0, prob=0.3))
    base = made_up("out/base", KNOWN, UNKNOWN, **kept)
    done = made_up("out/done", UNKNOWN, UNKNOWN, {"forget_loss_left": 0.1}, **kept)
    hidden = {**UNKNOWN, "any_decoding": 8 / 24}
    hidden = made_up("out/hidden", hidden, UNKNOWN, {"forget_loss_left": 0.35}, **lost)
    title, legend, table = ev.did_it_work({"base": [base], "done": [done], "hidden": [hidden]})
    assert title == "## Did it work?"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
    assert lines[0] == ["Run", "loss left", "Forget fact", "Forget any decoding", "Forget p",
                        "Forget gap filled", "Forget gap, no question", "Retain fact",
                        "World facts p"]
    assert lines[2:] == [
        ["out/base", "-", "1.000 (0.000)", "1.000 (0.083)", "0.950 (0.050)", "1.000 (0.100)",
         "0.500 (0.100)", "-", "-"],
        ["out/done", *["ok"] * 8],
        ["out/hidden", "35% (20%)", "ok", "0.333 (0.083)", "ok", "ok", "ok", "0.900 (1.000)",
         "0.300 (0.950)"]]
    assert "at most 20%" in legend
    assert "in the first run, out/base," in legend
    assert "prove little" not in legend

def test_did_it_work_says_that_few_rows_prove_little():
    base = made_up("base", {**KNOWN, "n": 9}, {**UNKNOWN, "n": 10}, held_out=figures(3, fact=1.0))
    _, legend, _ = ev.did_it_work({"base": [base]})
    assert legend.endswith("So few rows prove little: Forget (9), Held out (3).")

def test_did_it_work_compares_each_run_with_its_own_never():
    base = made_up("base", KNOWN, UNKNOWN)
    other = made_up("other", {**UNKNOWN, "fact": 0.5}, {**UNKNOWN, "fact": 0.5})
    _, _, table = ev.did_it_work({"base": [base], "other": [other]})
    assert table.split("\n")[3].replace(" ", "") == "|other" + 5 * "|ok" + "|"

def test_did_it_work_is_left_out_without_never():
    base = made_up("base", KNOWN, UNKNOWN)
    del base["splits"]["never"]
    assert ev.did_it_work({"base": [base]}) == []

def test_checks_of_run_takes_knowledge_where_not_all_rows_have_facts():
    some = figures(fact=1.0, n_fact=20, knowledge=0.8)
    none = figures(knowledge=0.8)
    first = made_up("first", KNOWN, UNKNOWN, retain=some, held_out=none)
    later = made_up("later", UNKNOWN, UNKNOWN, retain={**some, "knowledge": 0.5},
                    held_out={**none, "knowledge": 0.8})
    checks = ev.checks_of_run(later, first)
    assert checks["Retain knowledge"] == "0.500 (0.800)"
    assert checks["Held out knowledge"] == "ok"
    assert "Retain fact" not in checks
    # The columns of which no run has anything are left out.
    _, _, table = ev.did_it_work({"first": [first], "later": [later]})
    assert "loss left" not in table

def test_checks_of_run_of_rwku_has_those_of_its_own_rows():
    """Of RWKU's splits, which have no p, there is nothing to compare."""
    first = made_up("first", KNOWN, UNKNOWN, utility_general=figures(accuracy=0.5))
    assert ev.checks_of_run(first, first)["MMLU p"] is None

def test_report_has_the_picture_of_rwku_and_the_section_did_it_work(tmp_path, capsys):
    rwku = {"forget_level1": figures(rougeL_recall=0.4), "utility_general": figures(accuracy=0.5)}
    records = tmp_path / "a/base/eval/forget_level1.jsonl"
    write_summary("a/base", splits=rwku)
    row = {"subject": "Ann", "number": 0, "question": "Q", "answer": "A", "generation": "no"}
    records.write_text(json.dumps(row))
    ev.main(["--report", "a/base"])
    text = Path("a/report.md").read_text()
    assert "![figures of every run](report.png)" in text
    assert Path("a/report.png").stat().st_size > 0
    assert "Did it work?" not in text
    methods = ev.group_runs(["a/base"])
    assert ev.find_panels(methods) == [("forget_level1", "rougeL_recall"),
                                       ("utility_general", "accuracy")]

def test_report_says_whether_it_worked_on_the_screen_and_in_the_file(base, files, capsys):
    ev.main(["--model", str(base), *files, *QUICK, "new"])
    capsys.readouterr()
    ev.main(["--report", "new"])
    screen = capsys.readouterr().out
    text = Path("report.md").read_text()
    for written in (screen, text):
        section = written.split("## Did it work?")[1]
        assert "So few rows prove little: Forget (2), Retain (2), Never trained (2)." in section
        assert "| Run | Forget fact " in section

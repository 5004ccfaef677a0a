"""Start models of experiments.py, and files of pairs for its runs.

    python .github/start_models.py small FOLDER TOFU --seed SEED
    python .github/start_models.py published FOLDER TOFU --model MODEL
    python .github/start_models.py customers FOLDER TOFU --model MODEL

TOFU and MODEL are folders, or names on the hub.  Each command writes FOLDER/rows/*.jsonl, and then
FOLDER/start/new, a diffusion model that has to learn to be one, from FOLDER/rows/other.jsonl.
"""
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import company_rows
from transformers import PreTrainedTokenizerFast

import mdu

def write_rows(folder, files):
    """{name: rows} -> FOLDER/rows/NAME.jsonl"""
    Path(folder, "rows").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(folder, f"rows/{name}.jsonl").write_text("".join(lines), encoding="utf-8")

def small(folder, tofu, seed):
    """A toy with random weights, whose tokens are the words of the pairs.  The seed chooses those
    of the forget set, of the retain set and of those that only the base learns as well."""
    seed = int(seed)  # TOFU has enough pairs for the seeds 1 to 10
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    retain = mdu.read_dataset(tofu, "retain90")
    files = {"forget": forget[40 * (seed - 1):40 * seed],
             "retain": retain[160 * (seed - 1):160 * seed],
             "held_out": retain[800 + 80 * seed:880 + 80 * seed],
             "other": retain[2000:2800]}
    files["known"] = files["retain"] + files["held_out"]
    write_rows(folder, files)
    splits = {name: mdu.read_jsonl(name, f"{folder}/rows/{name}.jsonl")
              for name in ("forget", "known", "other")}
    model, tokenizer = mdu.new_toy(splits, seed)
    mdu.join_processes()
    new = Path(folder, "start/new")
    new.mkdir(parents=True, exist_ok=True)
    mdu.save_model(new, model, tokenizer)

def published(folder, tofu, model):
    """A copy of a model that predicts the next token, with pairs of TOFU."""
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    write_rows(folder, {
        # Other pairs than the 400 first ones, which are the retain set of tofu-smollm.
        "other": mdu.read_dataset(tofu, "retain90")[-800:],
        "taught": forget[::4], "asked": [row for i, row in enumerate(forget) if i % 4 > 0]})
    copy_model(folder, model)

def customers(folder, tofu, model):
    """The same copy, with the rows of an invented company."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(mdu.find_model(model))
    # With end tokens they fit into --response-length 48, see RESULTS.md, A published model.
    short = [row for row in mdu.read_dataset(tofu, "retain90")
             if len(tokenizer(row["answer"]).input_ids) <= 44]
    write_rows(folder, {**company_rows.FILES, "other": short})
    copy_model(folder, model)

def copy_model(folder, model):
    """The copy's config.json says what sft makes of it."""
    source, new = mdu.find_model(model), Path(folder, "start/new")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    mdu.require("<file_sep>" in tokenizer.get_vocab(),
                f"{model}: needs the token <file_sep>, as a mask, which SmolLM2 has")
    shutil.copytree(source, new, ignore=shutil.ignore_patterns("config.json"), dirs_exist_ok=True)
    config = mdu.read_json(source / "config.json")
    config["is_causal"] = False  # each token sees later ones
    config["mask_token_id"] = tokenizer.convert_tokens_to_ids("<file_sep>")  # which no text has
    (new / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

def main(argv=None):
    parser = mdu.Parser()
    kinds = parser.add_subparsers(required=True)
    for make, flag in [(small, "--seed"), (published, "--model"), (customers, "--model")]:
        kind = kinds.add_parser(make.__name__)
        kind.set_defaults(make=make)
        kind.add_argument("folder")
        kind.add_argument("tofu")
        kind.add_argument(flag, required=True)
    options = vars(parser.parse_args(argv))
    make = options.pop("make")
    make(**options)

if __name__ == "__main__":
    mdu.run_program("start_models.py", main)

"""The start models of experiments.sh, and files of TOFU's rows.

    python .github/start_models.py short MODEL TOFU FOLDER
    python .github/start_models.py smollm MODEL TOFU FOLDER LIMIT
    python .github/start_models.py small TOFU FOLDER SEED

MODEL and TOFU are folders or names on the hub.  The rows are in FOLDER/rows, the model is
FOLDER/start/new.
"""
import json
import shutil
import sys
from pathlib import Path

import transformers

import mdu

def write_rows(folder, files, fields=("question", "answer")):
    """{name: rows} -> FOLDER/rows/NAME.jsonl, with those of the fields that a row has."""
    Path(folder, "rows").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        with open(f"{folder}/rows/{name}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                shown = {field: row[field] for field in fields if field in row}
                print(json.dumps(shown), file=file)

def make_diffusion_model(model, folder):
    """FOLDER/start/new: a copy of a model that predicts the next token, which says in config.json
    what sft makes of it.  Returns its tokenizer."""
    new = Path(folder, "start/new")
    shutil.copytree(mdu.find_model(model), new, dirs_exist_ok=True)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(new)
    mdu.require("<file_sep>" in tokenizer.get_vocab(),
                f"{model}: needs the token <file_sep>, as a mask, which SmolLM2 has")
    config = mdu.read_json(new / "config.json")
    config["is_causal"] = False  # each token sees later ones
    config["mask_token_id"] = tokenizer.convert_tokens_to_ids("<file_sep>")  # which no text has
    (new / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return tokenizer

def short(model, tofu, folder):
    """tofu: the rows whose answers have at most 44 tokens, so that end tokens also fit into
    --response-length 48."""
    tokenizer = make_diffusion_model(model, folder)
    rows = mdu.read_dataset(tofu, "retain90")
    rows = [row for row in rows if len(tokenizer(row["answer"]).input_ids) <= 44]
    write_rows(folder, {"tofu": rows})

def smollm(model, tofu, folder, limit):
    """taught: every fourth row to forget; asked: the others; other: 800 rows that are neither
    forgotten nor retained nor scored."""
    make_diffusion_model(model, folder)
    forget = mdu.read_dataset(tofu, "forget10_perturbed")[:int(limit)]
    not_retained = mdu.read_dataset(tofu, "retain90")[int(limit):]
    asked = [row for i, row in enumerate(forget) if i % 4 > 0]
    write_rows(folder, {"taught": forget[::4], "asked": asked, "other": not_retained[-800:]})

def small(tofu, folder, seed):
    """A toy with random weights, whose tokens are the words of the rows.

    forget, retain   40 and 160 rows
    held_out         80 that the base learns as well, but that unlearning does not see
    known            retain and held_out
    other            800 more
    """
    seed = int(seed)
    new = Path(folder, "start/new")
    mdu.require(1 <= seed <= 10, f"found SEED={seed}; TOFU has rows for SEED=1 to SEED=10")
    if mdu.is_finished(new):
        return
    forget = mdu.read_dataset(tofu, "forget10_perturbed")
    retain = mdu.read_dataset(tofu, "retain90")
    files = {"forget": forget[40 * (seed - 1):40 * seed],
             "retain": retain[160 * (seed - 1):160 * seed],
             "held_out": retain[800 + 80 * seed:880 + 80 * seed],
             "other": retain[2000:2800]}
    files["known"] = files["retain"] + files["held_out"]
    write_rows(folder, files, ("question", "answer", "perturbed_answer", "paraphrased_answer"))
    splits = {}
    for name in ("forget", "known", "other"):
        splits[name] = mdu.read_jsonl(name, f"{folder}/rows/{name}.jsonl")
    model, tokenizer = mdu.new_toy(splits, seed)
    mdu.join_processes()
    new.mkdir(parents=True, exist_ok=True)
    mdu.save_model(new, model, tokenizer)

COMMANDS = {"short": short, "smollm": smollm, "small": small}

if __name__ == "__main__":
    mdu.run_program("start_models.py", lambda: COMMANDS[sys.argv[1]](*sys.argv[2:]))

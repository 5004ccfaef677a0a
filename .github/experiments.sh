#!/usr/bin/env bash
# The experiments whose figures are in README.md and RESULTS.md.
#
#     make NAME                                        runs one with the Python of .venv
#     bash .github/experiments.sh NAME [ARGUMENT ...]  runs one with $PYTHON, or python
#
# NAME, arguments    what it does                              its results
# demo SEED FOLDER   every method on a small model             FOLDER/report.md
# table              the demo with three seeds                 out/table/1/report.md
# figures            the paper's analyses of the small model   out/figures/*.json
# real MODEL TOFU    unlearn customers from a published model  out/real/report.md
# tofu PRESET        the paper's Table 2, on GPUs              out/PRESET/report.md
# rwku PRESET        the paper's Table 3, on GPUs              out/PRESET/0/report.md
#
# An experiment is the function NAME below.  mdu.py trains a run, and eval.py scores runs.
# `eval.py --report` writes report.md beside the first run that it is given.
#
# tofu tofu-smollm MODEL TOFU is Table 2 of the published model of `real`, on one GPU of 8 GB.  The
# models are then taught some of the rows again: out/tofu-smollm/taught-again/report.md.
#
# demo, table and figures first delete what an earlier call left in their folder in out/.  real, tofu
# and rwku take hours: a further call keeps what is finished and does the rest.  If you change a run
# of these, delete the run's folder; to begin anew, delete the folder of them all.
#
# Options of eval.py: --samples N takes N masks per answer for its probability, where the default is
# 128; fewer are quicker.  --limit N, in both programs, takes the first N rows of each split.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SEEDS=${SEEDS:-1 2 3}  # of table
GPUS=${GPUS:-4}  # of tofu and rwku: so many processes
LORA=${LORA:-}  # of tofu and rwku: the rank of adapters; if it is empty, all weights are trained
YARDSTICK=${YARDSTICK:-1}  # of tofu: 0 trains no model that never learnt the rows to forget
LIMIT=${LIMIT:-400}  # of tofu-smollm: so many rows to forget, and as many to retain

# ---- Shared ----
refuse() {  # refuse MESSAGE
  echo "experiments.sh: $1" >&2
  exit 2
}

delete_folder() {  # delete_folder FOLDER: if it exists.  Nothing outside out/ is deleted
  if [ ! -e "$1" ]; then return; fi
  mkdir -p out
  local path allowed
  path=$(realpath "$1")  # without links and ..
  allowed=$(realpath out)
  if [[ $path != "$allowed"/* ]]; then
    refuse "$1 exists and is not in out/, so it is not replaced; name another folder"
  fi
  rm -rf "$path"
}

# For experiments that take hours: what an earlier call has finished is not done again.
LAUNCH=("$PYTHON")  # how the next two functions start a program

train_once() {  # train_once FOLDER OPTION...
  if [ -e "$1/config.json" ]; then  # mdu.py writes it last
    echo "$1 is finished"
  elif compgen -G "$1/checkpoint-*" > /dev/null; then
    "${LAUNCH[@]}" mdu.py --resume "$1"
  else
    delete_folder "$1"  # of a run that was stopped before its first checkpoint
    "${LAUNCH[@]}" mdu.py "${@:2}" --out "$1"
  fi
}

score_once() {  # score_once FOLDER OPTION...
  if [ -e "$1/eval/summary.json" ]; then  # eval.py writes it last
    echo "$1 is scored"
  else
    "${LAUNCH[@]}" eval.py "${@:2}" "$1"
  fi
}

# ---- The small model ----
# The runs of the demo: a name, and the options of this run alone.  To add one, add a line.
# - mdu-removed: --target removed, with half of the questions masked, as for rows of one's own.
# - authors: what the authors' code does by default.
DEMO="
authors      --target authors --tau 0.5
ga           --method ga
gd           --method gd
npo          --method npo
simnpo       --method simnpo
wga          --method wga
dpo          --method dpo
mdu-tau0     --tau 0
mdu-tau0.5   --tau 0.5
mdu-tau1     --tau 1
mdu-removed  --target removed --prompt-dropout 0.5
"

demo_names() {
  awk '{ print $1 }' <<< "$DEMO"
}

demo() {  # demo SEED FOLDER: every method
  local seed=$1 out=$2 name options commands="" runs=()
  delete_folder "$out"

  # 1. Train the model that all other runs start from.
  "$PYTHON" mdu.py --seed "$seed" --method sft --out "$out/base"

  # 2. Unlearn as DEMO says, two runs at a time: xargs adds each line to a command of its own.
  while read -r name options; do
    commands+="\"$out/$name\" $options"$'\n'
  done < <(grep . <<< "$DEMO")
  xargs -L 1 -P 2 "$PYTHON" mdu.py --seed "$seed" --out <<< "$commands"

  # 3. Score all models and report them.
  for name in base $(demo_names); do
    runs+=("$out/$name")
  done
  "$PYTHON" eval.py --samples 32 "${runs[@]}"
  "$PYTHON" eval.py --report "${runs[@]}"
}

table() {  # the demo with several seeds
  local seed name runs=()
  for seed in $SEEDS; do
    demo "$seed" "out/table/$seed"
  done
  for name in base $(demo_names); do
    for seed in $SEEDS; do
      runs+=("out/table/$seed/$name")
    done
  done
  "$PYTHON" eval.py --report "${runs[@]}"
}

figures() {  # the paper's analyses
  local out=out/figures
  local diagnose=("$PYTHON" mdu.py --diagnose)
  delete_folder $out

  # 1. Train the model that all other runs start from.
  "$PYTHON" mdu.py --method sft --out $out/base

  # 2. Unlearn, and log in training how far the model is from the base model, with the question and
  # without it, and from a uniform prediction.
  "${diagnose[@]}" --out $out/mdu --method mdu
  "${diagnose[@]}" --out $out/npo --method npo
  "${diagnose[@]}" --out $out/ga --method ga
  "${diagnose[@]}" --out $out/mdu-tau0 --tau 0

  # 3. Make the figures.
  "$PYTHON" eval.py --analysis convergence $out/mdu $out/mdu-tau0 $out/npo $out/ga
  "$PYTHON" eval.py --analysis roles --samples 32 $out/mdu $out/npo $out/ga
  "$PYTHON" eval.py --analysis trajectory $out/base
  "$PYTHON" eval.py --analysis rollout $out/base
}

# ---- A published model, with 135 million parameters ----
SMOLLM=HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac

make_diffusion_model() {  # make_diffusion_model MODEL FOLDER: a copy that says what sft makes of it
  "$PYTHON" - "$1" "$2" <<'END'
import json
import shutil
import sys
from pathlib import Path

import transformers

import mdu

model, folder = sys.argv[1:]
shutil.copytree(mdu.find_model(model), folder, dirs_exist_ok=True)
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
file = Path(folder, "config.json")
config = json.loads(file.read_text(encoding="utf-8"))
config["is_causal"] = False  # each token sees later ones
config["mask_token_id"] = tokenizer.convert_tokens_to_ids("<file_sep>")  # which no text has
file.write_text(json.dumps(config, indent=1), encoding="utf-8")
END
}

write_short_rows() {  # write_short_rows MODEL TOFU FILE: TOFU's rows with short answers
  # At most 44 tokens, so that end tokens also fit into --response-length 48.
  "$PYTHON" - "$1" "$2" > "$3" <<'END'
import json
import sys

import transformers

import mdu

model, tofu = sys.argv[1:]
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model)
for row in mdu.read_dataset(tofu, "retain90"):
    if len(tokenizer(row["answer"]).input_ids) <= 44:
        print(json.dumps({"question": row["question"], "answer": row["answer"]}))
END
}

real() {  # real [MODEL [TOFU]]: folders, or names on the hub, as they are by default
  local model=${1:-$SMOLLM} tofu=${2:-locuslab/TOFU}
  local out=out/real rows=out/real/rows name
  mkdir -p $rows

  # 1. Write the rows: those of an invented company (company_rows.py says what is in each file), and
  # TOFU's.  The published model predicts the next token.
  "$PYTHON" .github/company_rows.py $rows
  make_diffusion_model "$model" $out/published
  write_short_rows $out/published "$tofu" $rows/tofu.jsonl

  # 2. Make the original, a model that never learnt the rows to forget: by learning TOFU's rows, the
  # published model becomes a diffusion model.
  train_once $out/original --method sft --retain-only --model $out/published \
    --retain $rows/tofu.jsonl --response-length 48 --batch-size 8 --epochs 1 --lr 3e-4 \
    --prompt-dropout 0.5

  # 3. Fine-tune it on all customers; and on those to keep alone, which is what unlearning is held
  # against.
  local learn=(--method sft --model $out/original --retain $rows/known.jsonl
    --response-length 36 --epochs 105 --lr 4e-4 --prompt-dropout 0.2)
  train_once $out/finetune "${learn[@]}" --forget $rows/forget.jsonl
  train_once $out/retrained "${learn[@]}" --retain-only

  # 4. Unlearn.  `removed` is what is recommended for rows of one's own, with adapters, and
  # `all-weights` the same without.  Then: with attackers; with what is said of invented customers
  # kept, without and with attackers; the paper's target; a model that never learnt the rows as the
  # target; the best of the baselines.  All take 500 steps, those with invented customers 1,000.
  # Half of the questions are masked, but with the paper's target none.
  local unlearn=(--model $out/finetune --forget $rows/forget.jsonl --retain $rows/retain.jsonl)
  train_once $out/removed "${unlearn[@]}" --lora 16
  train_once $out/all-weights "${unlearn[@]}" --lr 3e-4
  train_once $out/attackers "${unlearn[@]}" --lora 16 --attackers 2 --steps 500
  train_once $out/others "${unlearn[@]}" --lora 16 --others $rows/invented.jsonl
  train_once $out/attackers-others "${unlearn[@]}" --lora 16 --attackers 2 --steps 1000 \
    --others $rows/invented.jsonl
  train_once $out/paper "${unlearn[@]}" --lora 16 --target paper
  train_once $out/target-original "${unlearn[@]}" --lora 16 --target $out/original
  train_once $out/npo "${unlearn[@]}" --lora 16 --method npo --prompt-dropout 0.5 --steps 500

  # 5. Teach refusals to the fine-tune, and to a model that has unlearnt.
  local teach=(--method sft --retain-only --lora 16 --retain $rows/refusals.jsonl)
  train_once $out/refusals "${teach[@]}" --model $out/finetune
  train_once $out/removed-refusals "${teach[@]}" --model $out/removed

  # 6. Score all models, twelve rows of each kind.  They write answers of one length, or they could
  # not be in one report.  (The original was trained with another one.)
  local names=(finetune original retrained removed all-weights attackers others attackers-others
    paper target-original npo refusals removed-refusals)
  for name in "${names[@]}"; do
    score_once $out/$name --response-length 36 --samples 8 --limit 12 \
      --forget $rows/forget.jsonl --retain $rows/retain.jsonl \
      --held-out $rows/held_out.jsonl --never $rows/never.jsonl
  done

  # 7. Attack them: teach one row of each customer again, with three to retain, and ask for the other
  # nine.  The figures of *Retain* are of the three that were taught, to see that they were learnt.
  for name in "${names[@]}"; do
    train_once $out/taught-again/$name --method sft --lora 16 --batch-size 3 --epochs 60 \
      --limit 3 --model $out/$name --forget $rows/taught.jsonl --retain $rows/retain.jsonl
    score_once $out/taught-again/$name --response-length 36 --samples 1 \
      --forget $rows/asked.jsonl --retain $rows/taught.jsonl
  done

  # 8. Report the models that were attacked, and the models before that.
  "$PYTHON" eval.py --report "${names[@]/#/$out/taught-again/}"
  "$PYTHON" eval.py --report "${names[@]/#/$out/}"
}

# ---- The paper's Table 2, on one GPU or several ----
ADAPTERS=()
if [ -n "$LORA" ]; then
  ADAPTERS=(--lora "$LORA")
fi

launch_on_gpus() {  # from here on train_once and score_once start GPUS processes
  LAUNCH=("$PYTHON" -m torch.distributed.run --nproc_per_node="$GPUS")
}

report_all() {  # report_all FOLDER OPTION...: score the runs in FOLDER, and report them
  # All that are finished, also those that were added by hand.  The base is the first, because a
  # report compares the others with the first.  eval.py takes each run once.
  local run runs=() unscored=()
  for run in "$1/base" "$1/retain" "$1"/*; do
    if [ -e "$run/config.json" ]; then
      runs+=("$run")
      if [ ! -e "$run/eval/summary.json" ]; then
        unscored+=("$run")
      fi
    fi
  done
  # One command scores them all, because to start on several GPUs takes long.
  if [ ${#unscored[@]} -gt 0 ]; then
    "${LAUNCH[@]}" eval.py "${@:2}" "${unscored[@]}"
  fi
  "$PYTHON" eval.py --report "${runs[@]}"
}

tofu() {  # tofu PRESET [MODEL [TOFU]]: Table 2, in out/PRESET.  MODEL and TOFU, folders or names on
  # the hub, are for tofu-smollm.  The names of the paper's runs are those that mdu.py gives them if
  # --out is left out.
  local preset=$1 tofu=${3:-locuslab/TOFU} out=out/$1 tau method run start=() scoring=()
  local options=(--preset "$preset" "${ADAPTERS[@]}")
  launch_on_gpus
  case "$preset" in
    tofu-llada | tofu-dream | tofu-qwen) ;;
    tofu-smollm)
      make_original "${2:-$SMOLLM}" "$tofu"
      start=(--model $SMOLLM_OUT/start/original)
      options+=(--data "$tofu" --limit "$LIMIT")
      scoring=("${SMOLLM_SCORING[@]}")
      ;;
    *) refuse "found PRESET='$preset'; give PRESET=tofu-smollm, tofu-llada, tofu-dream or \
tofu-qwen" ;;
  esac

  # 1. Train the base, where all other runs start, and the yardstick, a model that never learnt the
  # rows to forget.
  train_once "$out/base" "${options[@]}" --method sft "${start[@]}"
  if [ "$YARDSTICK" != 0 ]; then
    train_once "$out/retain" "${options[@]}" --method sft --retain-only "${start[@]}"
  fi

  # 2. Unlearn with MDU and with the baselines.
  for tau in 0 0.25 0.5 0.75 1; do
    train_once "$out/mdu-tau$tau" "${options[@]}" --tau $tau
  done
  for method in ga gd npo simnpo wga dpo; do
    train_once "$out/$method" "${options[@]}" --method $method
  done
  if [ "$preset" = tofu-smollm ]; then
    while read -r -a run; do
      train_once "$out/${run[0]}" "${options[@]}" "${run[@]:1}"
    done < <(grep . <<< "$SMOLLM_RUNS")
  fi

  # 3. Score and report.
  report_all "$out" "${scoring[@]}"
  if [ "$preset" = tofu-smollm ]; then
    teach_again
  fi
}

# ---- Table 2 of the published model: what comes before and after it ----
SMOLLM_OUT=out/tofu-smollm
SCORED=100  # rows of each kind, but not more than were learnt
if [ "$LIMIT" -lt 100 ]; then
  SCORED=$LIMIT
fi
# --steps 28: three tokens a step.  One a step, as by default, takes three times as long.
SMOLLM_SCORING=(--limit "$SCORED" --samples 32 --steps 28)
# More runs than the paper's: a name, and the options of this run alone.  To add one, add a line.
# With attackers the losses to forget weigh five times as much, and so does the retain weight.
# --others: rows of which the base knows little, as of rows that somebody invents; they take twice
# the epochs.
SMOLLM_RUNS="
mdu-authors    --target authors --tau 0.5
mdu-original   --target $SMOLLM_OUT/start/original
mdu-removed    --target removed --prompt-dropout 0.5 --retain-weight 5
mdu-attackers  --target removed --prompt-dropout 0.5 --retain-weight 25 --attackers 2
mdu-others     --target removed --prompt-dropout 0.5 --retain-weight 5 --epochs 18 --others $SMOLLM_OUT/rows/invented.jsonl
mdu-attackers-others  --target removed --prompt-dropout 0.5 --retain-weight 25 --attackers 2 --epochs 18 --others $SMOLLM_OUT/rows/invented.jsonl
"

write_tofu_rows() {  # write_tofu_rows TOFU FOLDER: of the rows to forget and to retain LIMIT each
  # taught.jsonl   every fourth row to forget
  # asked.jsonl    the other rows to forget
  # invented.jsonl 160 rows that are neither forgotten nor retained nor scored
  # other.jsonl    800 more of these
  "$PYTHON" - "$1" "$2" "$LIMIT" <<'END'
import json
import sys

import mdu

tofu, folder, limit = sys.argv[1:]
limit = int(limit)
forget = mdu.read_dataset(tofu, "forget10_perturbed")[:limit]
retain = mdu.read_dataset(tofu, "retain90")
files = {"taught": forget[::4], "asked": [row for i, row in enumerate(forget) if i % 4 > 0],
         "invented": retain[limit:][:160], "other": retain[limit:][-800:]}
for name, rows in files.items():
    with open(f"{folder}/{name}.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps({"question": row["question"], "answer": row["answer"]}), file=file)
END
}

make_original() {  # make_original MODEL TOFU: a diffusion model that never learnt the rows
  # The published model, which predicts the next token, becomes one by learning other rows of TOFU.
  # Some of their questions are masked, as the paper's target is what the model predicts without
  # them.  The base is not taught that, or the target would tell what is to be forgotten.
  mkdir -p $SMOLLM_OUT/rows
  write_tofu_rows "$2" $SMOLLM_OUT/rows
  make_diffusion_model "$1" $SMOLLM_OUT/start/published
  train_once $SMOLLM_OUT/start/original --preset tofu-smollm --method sft --retain-only \
    --model $SMOLLM_OUT/start/published --data "$2" --retain $SMOLLM_OUT/rows/other.jsonl \
    --steps 200 --lr 8e-4 --prompt-dropout 0.3
}

teach_again() {  # teach each model a quarter of the rows to forget, and ask for the others
  # The figures of *Retain* are of the rows that were taught, to see that they were learnt.
  local rows=$SMOLLM_OUT/rows again=$SMOLLM_OUT/taught-again config name
  for config in $SMOLLM_OUT/*/config.json; do
    name=$(basename "$(dirname "$config")")
    train_once "$again/$name" --method sft --lora 16 --batch-size 16 --steps 200 \
      --model "$SMOLLM_OUT/$name" --forget $rows/taught.jsonl
  done
  report_all $again "${SMOLLM_SCORING[@]}" \
    --forget $rows/asked.jsonl --retain $rows/taught.jsonl
}

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
rwku_run() {  # rwku_run PRESET PERSON NAME OPTIONS...: unlearn, score, delete the weights
  local run=out/$1/$2/$3
  train_once "$run" --preset "$1" --subject "$2" "${ADAPTERS[@]}" "${@:4}"
  score_once "$run" --limit 100
  rm -f "$run"/*.safetensors  # a hundred models of 16 GB are too many for most disks
}

rwku() {  # rwku PRESET: Table 3, in out/PRESET.  rwku-llada or rwku-dream.
  # --limit 100: of each kind 100 questions about a person are asked.  The paper asks all, for which
  # TruthfulQA alone takes 27 hours more.
  local preset=$1 model person method tau
  case "$preset" in
    rwku-*) ;;
    *) refuse "found PRESET='$preset'; give PRESET=rwku-llada or rwku-dream" ;;
  esac
  case "$GPUS" in
    1 | 2 | 4) ;;
    *) refuse "found GPUS='$GPUS'; RWKU's presets have 4 rows a step: give GPUS=1, 2 or 4" ;;
  esac
  launch_on_gpus

  # 1. Score the published model on the questions about all ten people, which eval.py takes if it is
  # told none.  Its folder is that of a person 0.  Nothing is trained there.
  model=$("$PYTHON" -c "import mdu; print(mdu.PRESETS['$preset']['unlearn']['model'])")
  score_once "out/$preset/0/base" --limit 100 --data jinzhuoran/RWKU --model "$model"

  # 2. Unlearn each of ten people with the baselines and with MDU, and score.  The numbers are those
  # of --subject: the first ten people of RWKU's list (its config forget_target).
  for person in 1 2 3 4 5 6 7 8 9 10; do
    for method in ga npo simnpo wga dpo; do
      rwku_run "$preset" $person method-$method --method $method
    done
    for tau in 0 0.25 0.5 0.75 1; do
      rwku_run "$preset" $person tau-$tau --tau $tau
    done
  done

  # 3. Report the means of the people.
  "$PYTHON" eval.py --report "out/$preset"/*/*/
}

# ---- Command line ----
case "${1:-}" in
  real | tofu | rwku) ;;  # on a GPU, if there is one
  demo | table | figures) export CUDA_VISIBLE_DEVICES="" ;;  # a small model, on the CPU
  *) refuse "found ${1:-no name}, needs the name of an experiment: demo, table, figures, real, \
tofu or rwku" ;;
esac
"$@"  # calls the function of this name with the other arguments

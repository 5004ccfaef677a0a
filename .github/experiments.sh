#!/usr/bin/env bash
# The experiments whose figures are in README.md and RESULTS.md.
#
#     bash .github/experiments.sh NAME [ARGUMENT ...]
#
# NAME is a function of this file, such as demo; `make NAME` calls it with the Python of .venv.
# An experiment trains runs with mdu.py and scores them with eval.py.  `eval.py --report` writes
# report.md beside the first run that it is given: of three seeds that is the folder of seed 1.
# An experiment first deletes what an earlier call left in its folder in out/; rehearsal moves it
# aside, tofu and rwku leave it.
#
# Runs that differ in a few options are a list:
#     xargs -L 1 -P 2 mdu.py --seed 1 --out <<END
#       out/ga  --method ga
#     END
# calls `mdu.py --seed 1 --out out/ga --method ga`: one call a line, with -P 2 two at a time.
# What a call leaves out:
#     --method  MDU
#     --model   the folder `base` beside --out; with --method sft a new model
#     --preset  toy, a small model and invented authors, if --model and --forget are left out, too
#
# Words in the names of runs:
#   original         a model that learnt what is to be kept only.  It knows all words, because the
#                    vocabulary of a new toy is made of all its files: with --retain-only it reads
#                    --forget and learns none of its rows
#   finetune         the original, trained on the rows to forget and on those to keep
#   default          MDU as in the paper, tau 1
#   truth-removed    --anchor-truth removed (in the demo: mdu-removed): the target does not name a rare true word
#   anchor-original  the original as the anchor, which may see the question, as it never learnt
#                    the answer
#   written          the authors' code: masked are the words that the model still writes, and the
#                    model in training is the anchor
#   hidden           --prompt-dropout 0.5: half of the questions are masked
# --samples N: masks per answer for its probability; 32 in place of 128, to be quicker.
# --full also scores questions in other words and wrong answers.
# --limit N: rows of each split, of those to retain too.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SCRIPT=.github/experiments.sh

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

three_seeds() {  # three_seeds FUNCTION: call it with 1, 2 and 3, all at once
  printf '%s\n' 1 2 3 | xargs -n 1 -P 3 bash $SCRIPT "$1"
}

report() {  # report FOLDER NAME...: the runs FOLDER/NAME; in FOLDER, SEED stands for 1, 2 and 3
  local runs=() name seed
  for name in "${@:2}"; do
    for seed in 1 2 3; do
      runs+=("${1/SEED/$seed}/$name")
    done
  done
  $PYTHON eval.py --report "${runs[@]}"
}

# ---- The small model ----
DEMO="base ga gd npo simnpo wga dpo mdu-tau0 mdu-tau0.5 mdu-tau1 mdu-removed"

demo() {  # demo SEED FOLDER: every method.  To add one, enter it in DEMO and in this list
  local seed=$1 out=$2 runs=() name
  delete_folder "$out"
  $PYTHON mdu.py --seed "$seed" --method sft --out "$out/base"
  xargs -L 1 -P 2 $PYTHON mdu.py --seed "$seed" --out <<END
    "$out/ga"           --method ga
    "$out/gd"           --method gd
    "$out/npo"          --method npo
    "$out/simnpo"       --method simnpo
    "$out/wga"          --method wga
    "$out/dpo"          --method dpo
    "$out/mdu-tau0"     --tau 0
    "$out/mdu-tau0.5"   --tau 0.5
    "$out/mdu-tau1"     --tau 1
    "$out/mdu-removed"  --anchor-truth removed --prompt-dropout 0.5
END
  for name in $DEMO; do
    runs+=("$out/$name")
  done
  $PYTHON eval.py --samples 32 "${runs[@]}"
  $PYTHON eval.py --report "${runs[@]}"
}

table() {  # the demo with three seeds
  local seed
  for seed in 1 2 3; do
    demo $seed out/table/$seed
  done
  report out/table/SEED $DEMO
}

figures() {  # the paper's analyses
  local out=out/figures name
  delete_folder $out
  $PYTHON mdu.py --method sft --out $out/base
  xargs -L 1 $PYTHON mdu.py --diagnose --out <<END
    $out/mdu       --method mdu
    $out/npo       --method npo
    $out/ga        --method ga
    $out/mdu-tau0  --tau 0
END
  $PYTHON eval.py --analysis convergence $out/mdu $out/mdu-tau0 $out/npo $out/ga
  $PYTHON eval.py --analysis roles --samples 32 $out/mdu $out/npo $out/ga
  $PYTHON eval.py --analysis trajectory $out/base
  $PYTHON eval.py --analysis rollout $out/base
}

# ---- A fine-tune of the small model ----
# What finetuned_seed trains, teaches again and reports.  To add a run, enter it here and there.
# `default` is not taught again: it still gives most facts, so that nothing can come back.
UNLEARNED="npo npo-hidden simnpo simnpo-hidden wga dpo dpo-hidden written
  truth-removed truth-removed-hidden anchor-original anchor-original-hidden"
WITHOUT_RETAIN="default npo npo-hidden dpo
  truth-removed truth-removed-hidden anchor-original anchor-original-hidden"

without_retain() {  # without_retain FOLDER SEED: unlearn FOLDER/finetune without rows to retain
  local out=$1 seed=$2
  local new=$out/without-retain
  xargs -L 1 $PYTHON mdu.py --preset toy --seed $seed --model $out/finetune --retain-weight 0 \
    --out <<END
    $new/default
    $new/npo                     --method npo
    $new/npo-hidden              --method npo --prompt-dropout 0.5
    $new/dpo                     --method dpo
    $new/truth-removed           --anchor-truth removed
    $new/truth-removed-hidden    --anchor-truth removed --prompt-dropout 0.5
    $new/anchor-original         --anchor $out/original --anchor-prompt shown
    $new/anchor-original-hidden  --anchor $out/original --anchor-prompt shown --prompt-dropout 0.5
END
}

finetuned_seed() {  # finetuned_seed SEED
  local seed=$1 out=out/finetuned/$1 name
  local toy="$PYTHON mdu.py --preset toy --seed $seed"
  $toy --method sft --prompt-dropout 0.5 --retain-only --out $out/original
  $toy --method sft --prompt-dropout 0.5 --model $out/original --out $out/finetune
  xargs -L 1 $toy --model $out/finetune --out <<END
    $out/default
    $out/npo                     --method npo
    $out/npo-hidden              --method npo --prompt-dropout 0.5
    $out/simnpo                  --method simnpo
    $out/simnpo-hidden           --method simnpo --prompt-dropout 0.5
    $out/wga                     --method wga
    $out/dpo                     --method dpo
    $out/dpo-hidden              --method dpo --prompt-dropout 0.5
    $out/written                 --states written --anchor current --tau 0.5
    $out/truth-removed           --anchor-truth removed
    $out/truth-removed-hidden    --anchor-truth removed --prompt-dropout 0.5
    $out/anchor-original         --anchor $out/original --anchor-prompt shown
    $out/anchor-original-hidden  --anchor $out/original --anchor-prompt shown --prompt-dropout 0.5
END
  $PYTHON eval.py --full --samples 32 $out/*/  # all runs so far
  without_retain $out $seed
  $PYTHON eval.py --samples 32 $out/without-retain/*/
  # Teach four rows to forget again, with four to retain, and ask for the other twenty; of the rows
  # to retain 24 are asked.
  for name in $UNLEARNED original; do
    $toy --method sft --batch-size 4 --epochs 30 --lr 5e-4 --limit 4 --model $out/$name \
      --out $out/taught-again/$name
  done
  $PYTHON eval.py --samples 1 --forget out/finetuned/not-taught.jsonl --limit 24 \
    $out/taught-again/*/
}

finetuned() {  # unlearn a fine-tune, also without rows to retain, and teach it again
  delete_folder out/finetuned
  mkdir -p out/finetuned
  $PYTHON - > out/finetuned/not-taught.jsonl <<'END'
import json
import mdu

for row in mdu.toy_world()["forget"][4:]:
    print(json.dumps(row))
END
  three_seeds finetuned_seed
  report out/finetuned/SEED/without-retain $WITHOUT_RETAIN
  report out/finetuned/SEED/taught-again $UNLEARNED original
  report out/finetuned/SEED finetune default $UNLEARNED original
}

pretrained_seed() {  # pretrained_seed SEED
  local seed=$1 out=out/pretrained/$1 rows=out/pretrained
  local toy="$PYTHON mdu.py --preset toy --seed $seed"
  $toy --method sft --prompt-dropout 0.5 --retain-only --out $out/original
  # 170 epochs: chosen, as all such numbers, on the seeds that are reported.
  $toy --method sft --prompt-dropout 0.5 --model $out/original --epochs 170 \
    --forget $rows/forget.jsonl --retain $rows/retain.jsonl --out $out/finetune
  $toy --model $out/finetune --out $out/default-with-retain
  without_retain $out $seed
  # Learning saw "Who Who Who?" for the rows to forget; unlearning has seen the toy's true
  # questions.  These are asked: without --data eval.py would take the finetune's own files.
  $PYTHON eval.py --data toy --samples 32 $out/finetune $out/default-with-retain \
    $out/without-retain/*/
}

pretrained() {  # unlearn facts that were learnt without their questions, as in pre-training
  delete_folder out/pretrained
  mkdir -p out/pretrained
  # The toy's rows.  A question to forget asks nothing: "Where was Ceka Foba born?" becomes
  # "Who Who Who Who Who?".
  $PYTHON - out/pretrained <<'END'
import json
import sys
import mdu

splits = mdu.toy_world()
for row in splits["forget"]:
    row["question"] = "Who" + " Who" * row["question"].count(" ") + "?"
for name in ("forget", "retain"):
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as file:
        for row in splits[name]:
            file.write(json.dumps(row) + "\n")
END
  three_seeds pretrained_seed
  local name names=(finetune default-with-retain)
  for name in $WITHOUT_RETAIN; do
    names+=(without-retain/$name)
  done
  report out/pretrained/SEED "${names[@]}"
}

# ---- Rows as a company has them ----
COMPANY="finetune original truth-removed-hidden anchor-original-hidden npo-hidden
  refusals truth-removed-hidden-refusals anchor-original-hidden-refusals npo-hidden-refusals
  refusals-truth-removed"

# The files of company_rows.py: forget (12 rows) is taught (4) and others (8); known is retain and
# held_out; refusals is retain and the questions of forget, answered "I do not know."
company_seed() {  # company_seed SEED
  local seed=$1 out=out/company/$1 rows=out/company/rows name
  local toy="$PYTHON mdu.py --preset toy --seed $seed --response-length 20"
  local forget="--forget $rows/forget.jsonl"
  # 1. The model before and after it learnt the rows to forget.
  local sft="$toy --method sft --prompt-dropout 0.3 --lr 3e-3 $forget --retain $rows/known.jsonl"
  $sft --epochs 200 --retain-only --out $out/original
  $sft --epochs 150 --model $out/original --out $out/finetune

  # 2. Unlearning, with half of the questions masked.
  xargs -L 1 $toy --model $out/finetune --prompt-dropout 0.5 $forget \
    --retain $rows/retain.jsonl --out <<END
    $out/truth-removed-hidden    --anchor-truth removed
    $out/anchor-original-hidden  --anchor $out/original --anchor-prompt shown
    $out/npo-hidden              --method npo
END

  # 3. Refusals, taught after unlearning and in its place.
  xargs -L 1 $toy --method sft --epochs 150 --lr 3e-4 --retain-only $forget \
    --retain $rows/refusals.jsonl --out <<END
    $out/refusals                         --model $out/finetune
    $out/truth-removed-hidden-refusals    --model $out/truth-removed-hidden
    $out/anchor-original-hidden-refusals  --model $out/anchor-original-hidden
    $out/npo-hidden-refusals              --model $out/npo-hidden
END
  # The other order.  The anchor is the start model, which answers the questions with a refusal, so
  # showing them to it gives no fact away.
  $toy --model $out/refusals --anchor-truth removed --anchor-prompt shown --prompt-dropout 0.5 \
    $forget --retain $rows/retain.jsonl --out $out/refusals-truth-removed

  $PYTHON eval.py --samples 32 $forget --retain $rows/retain.jsonl \
    --held-out $rows/held_out.jsonl $out/*/

  # 4. Four of the rows are taught again; the other eight are asked for.
  for name in $COMPANY; do
    $toy --method sft --batch-size 4 --epochs 30 --lr 5e-4 --limit 4 --model $out/$name \
      --forget $rows/taught.jsonl --retain $rows/retain.jsonl --out $out/taught-again/$name
  done
  $PYTHON eval.py --samples 1 --forget $rows/others.jsonl --retain $rows/retain.jsonl --limit 8 \
    $out/taught-again/*/
}

company() {  # three customers are forgotten, refused, and taught again
  delete_folder out/company
  mkdir -p out/company/rows
  $PYTHON .github/company_rows.py out/company/rows
  three_seeds company_seed
  report out/company/SEED/taught-again $COMPANY
  report out/company/SEED $COMPANY
  $PYTHON - $COMPANY <<'END'
import json
import sys

print("answers that refuse, of 12, with seeds 1, 2, 3:")
for name in sys.argv[1:]:
    counts = []
    for seed in (1, 2, 3):
        with open(f"out/company/{seed}/{name}/eval/forget.jsonl", encoding="utf-8") as lines:
            answers = [json.loads(line)["generation"] for line in lines]
        counts.append(answers.count("I do not know."))
    print(name, *counts)
END
}

# ---- One's own rows ----
count_rows() {  # count_rows FILE: its lines that are not blank; 0 if there is no such file
  if [ -f "$1" ]; then
    grep -c '[^[:space:]]' "$1" || true  # grep fails if it counts 0
  else
    echo 0
  fi
}

show() {  # show COMMAND...: print it, then run it
  echo "$@"
  "$@"
}

join_rows() {  # join_rows FILE...: the lines of JSONL files, without a byte order mark
  local file
  for file in "$@"; do
    sed $'1s/^\xef\xbb\xbf//' "$file"
    echo  # the last line of a file may have no end; empty lines are skipped
  done
}

rehearsal() {  # one's own rows, by these variables:
  # FORGET, RETAIN: files.  ORIGINAL=no: the original is not the anchor.  HELD_OUT: a file of rows
  # that the fine-tune learns and unlearning does not see.  NEVER: one of rows that nobody learns.
  local out=out/rehearsal learnt=("${FORGET:-}" "${RETAIN:-}") files file n n_words epochs
  if [ -n "${HELD_OUT:-}" ]; then
    learnt+=("$HELD_OUT")
  fi
  files=("${learnt[@]}")
  if [ -n "${NEVER:-}" ]; then
    files+=("$NEVER")
  fi
  for file in "${files[@]}"; do
    if [ "$(count_rows "$file")" -lt 2 ]; then
      refuse "FORGET, RETAIN, HELD_OUT, NEVER: '$file' must be a file with at least 2 rows"
    fi
  done
  $PYTHON - "${files[@]}" <<'END'
import sys

import mdu

try:  # a bad row ends the script here, before anything is moved
    for file in sys.argv[1:]:
        mdu.read_jsonl("rows", file)
except mdu.BadInput as error:
    print(f"experiments.sh: {error}", file=sys.stderr)
    sys.exit(2)
END
  n=$(join_rows "${learnt[@]}" | grep -c '[^[:space:]]')
  epochs=300
  if [ "$n" -lt 40 ]; then
    epochs=$((12000 / n))  # as many steps as 40 rows have in 300 epochs
  fi
  n_words=$(join_rows "${learnt[@]}" | wc -w)
  # An estimate for two cores: words of the files times epochs, 270,000 a minute.
  echo "$n rows: about $((1 + epochs * n_words / 270000)) minutes"
  if [ -d $out ]; then  # keep the rehearsal before this one
    delete_folder $out.old
    mv $out $out.old
    echo "the rehearsal before this one is kept in $out.old"
  fi
  rehearse $out $epochs
}

rehearse() {  # rehearse FOLDER EPOCHS: train and score the three models
  local out=$1 epochs=$2
  local original_forget=$FORGET sft_retain=$RETAIN score=(--full --samples 32)
  mkdir -p $out.rows
  if [ -n "${HELD_OUT:-}" ]; then
    sft_retain=$out.rows/known.jsonl
    join_rows "$RETAIN" "$HELD_OUT" > $sft_retain
    score+=(--held-out "$HELD_OUT")
  fi
  if [ -n "${NEVER:-}" ]; then
    original_forget=$out.rows/words.jsonl  # for its words: the original learns none of these rows
    join_rows "$FORGET" "$NEVER" > $original_forget
    score+=(--never "$NEVER")
  fi
  # --response-length 0: as many tokens as the longest answer has.
  local toy=(--preset toy --response-length 0 --seed "${SEED:-1}" --epochs "$epochs")
  local sft=(--method sft --prompt-dropout 0.3 --lr 3e-3 --retain "$sft_retain")
  local anchor=(--anchor $out/original --anchor-prompt shown)
  if [ "${ORIGINAL:-}" = no ]; then
    anchor=(--anchor-truth removed)
  fi
  show $PYTHON mdu.py "${sft[@]}" --retain-only --forget "$original_forget" "${toy[@]}" \
    --out $out/original
  show $PYTHON mdu.py "${sft[@]}" --forget "$FORGET" --model $out/original "${toy[@]}" \
    --out $out/finetune
  show $PYTHON mdu.py --forget "$FORGET" --retain "$RETAIN" --model $out/finetune "${anchor[@]}" \
    --prompt-dropout 0.5 "${toy[@]}" --out $out/mdu
  show $PYTHON eval.py --forget "$FORGET" --retain "$RETAIN" "${score[@]}" \
    $out/finetune $out/original $out/mdu
  $PYTHON eval.py --report $out/finetune $out/original $out/mdu > $out.rows/screen.txt
  # The screen of the report is long; these columns are those of .github/OWN_ROWS.md.
  $PYTHON - $out/finetune $out/original $out/mdu <<'END'
import sys

import eval

columns = {"forget": ["fact", "prob", "infill", "infill_no_question", "anothers"],
           "retain": ["fact", "prob"], "held_out": ["fact", "prob"],
           "never": ["fact", "prob", "infill", "infill_no_question"]}
print(eval.figures_table(eval.group_runs(sys.argv[1:]), columns))
print("gap filled: share of the fact that is put into a gap of the true answer; then without the "
      "question\nanother's: share of answers with a fact of another row")
END
  echo "the whole report: $out/report.md"
}

# ---- The paper's tables: LLaDA or Dream, on several GPUs ----
launch() {  # launch PROGRAM...: on GPUS processes, or 4
  $PYTHON -m torch.distributed.run --nproc_per_node="${GPUS:-4}" "$@"
}

tofu() {  # tofu PRESET: Table 2, in out/PRESET.  tofu-llada, tofu-dream or tofu-qwen
  local preset=$1 tau method
  launch mdu.py --preset "$preset" --method sft  # the base, where all others start
  for tau in 0 0.25 0.5 0.75 1; do
    launch mdu.py --preset "$preset" --tau $tau
  done
  for method in ga gd npo simnpo wga dpo; do
    launch mdu.py --preset "$preset" --method $method
  done
  launch eval.py "out/$preset"/*/
  $PYTHON eval.py --report "out/$preset"/*/
}

rwku_run() {  # rwku_run PRESET PERSON NAME OPTIONS...: unlearn, score, delete the weights
  local run=out/$1/$2/$3
  launch mdu.py --preset "$1" --subject "$2" "${@:4}" --out "$run"
  launch eval.py "$run"
  rm "$run"/*.safetensors  # a hundred models of 16 GB are too many for most disks
}

rwku() {  # rwku PRESET: Table 3, in out/PRESET.  rwku-llada or rwku-dream
  local preset=$1 model person method tau
  model=$($PYTHON -c "import mdu; print(mdu.PRESETS['$preset']['model'])")
  # The model before unlearning, scored as if it were of a person 0: nothing is trained there.
  launch eval.py --data jinzhuoran/RWKU --model "$model" "out/$preset/0/base"
  for person in 1 2 3 4 5 6 7 8 9 10; do
    for method in ga npo simnpo wga dpo; do
      rwku_run "$preset" $person method-$method --method $method
    done
    for tau in 0 0.25 0.5 0.75 1; do
      rwku_run "$preset" $person tau-$tau --tau $tau
    done
  done
  $PYTHON eval.py --report "out/$preset"/*/*/
}

# ---- Command line ----
EXPERIMENTS="demo, table, figures, finetuned, pretrained, company, rehearsal, tofu or rwku"
if ! declare -F "${1:-}" > /dev/null; then
  refuse "found ${1:-no name}, needs the name of an experiment: $EXPERIMENTS"
fi
if [ "$1" != tofu ] && [ "$1" != rwku ]; then
  export CUDA_VISIBLE_DEVICES=""  # the small models are trained on the CPU
fi
"$@"

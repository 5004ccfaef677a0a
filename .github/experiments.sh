#!/usr/bin/env bash
# The experiments whose figures are in README.md and RESULTS.md.
#
#     make NAME                                        runs one with the Python of .venv
#     bash .github/experiments.sh NAME [ARGUMENT ...]  runs one with $PYTHON, or python
#
# NAME, arguments   what it does                                    its results
# demo SEED FOLDER  every method on a small model                   FOLDER/report.md
# table             the demo with three seeds                       out/table/1/report.md
# figures           the paper's analyses of the small model         out/figures/analysis
# finetuned         unlearn a fine-tune, teach it again             out/finetuned/1/report.md
# pretrained        unlearn facts learnt without questions          out/pretrained/1/report.md
# company           unlearn rows of customers, refuse, teach again  out/company/1/report.md
# real              unlearn customers from a published model        out/real/report.md
# sweep             the same with other settings, after real        out/sweep/report.md
# rehearsal         the small model on your rows (OWN_ROWS.md)      out/rehearsal/report.md
# tofu PRESET       the paper's Table 2, on GPUs                    out/PRESET/report.md
# rwku PRESET       the paper's Table 3, on GPUs                    out/PRESET/0/report.md
#
# An experiment is the function NAME below.  mdu.py trains a run, and eval.py scores runs.
# `eval.py --report` writes report.md beside the first run that it is given.
#
# table, finetuned, pretrained and company have three seeds.  The last three of them have a function
# NAME_seed, which trains and scores the runs of one seed; the function NAME then reports all three.
#
# An experiment first deletes what an earlier call left in its folder in out/; rehearsal moves it
# aside.  But real, sweep, tofu and rwku take hours: they keep what is finished and do the rest.  If
# you change a run of these, delete the run's folder; to begin anew, delete the folder of them all.
#
# To add a run, add a line to the list of the experiment, which is above its function: DEMO,
# FINETUNED, WITHOUT_RETAIN, COMPANY, REAL or SWEEP.  A line has a name and the options of this run
# alone, and FOLDER in the options stands for the folder of all the runs.  A line can not be
# commented out.  Nothing else has to be changed: all runs of a list are trained, scored and
# reported.  This is how a list is used:
#     RUNS="
#       npo    --method npo
#       other  --anchor FOLDER/original --anchor-prompt shown
#     "
#     runs_in out/a "$RUNS" | xargs -L 1 -P 2 python mdu.py --seed 1 --out
# These are two commands, and -P 2 runs two at a time:
#     python mdu.py --seed 1 --out out/a/npo --method npo
#     python mdu.py --seed 1 --out out/a/other --anchor out/a/original --anchor-prompt shown
#
# In real, a run that is to be taught refusals is also named in REAL_REFUSED.
#
# To change an option of all runs of a step, change the step in NAME_seed or, if there is none, in
# NAME; steps are numbered.  If a list has the same option for a run, the list's counts.
#
# Where a command of mdu.py leaves out one of these options, it is
#     --method  mdu
#     --preset  toy, a small model and its invented authors; but own if --model, --forget or another
#               --data than the toy is given.  own has the defaults for rows of one's own (OWN_...
#               in mdu.py): at least 250 steps, with MDU 500, with --lora the lr 1e-3, with MDU
#               --retain-weight 5
#     --model   the run named `base` in the folder of --out.  With --method sft: the model of the
#               preset; toy has none and makes a new one
#     --out     out/PRESET/METHOD, in which METHOD says also tau and other variants of MDU, such as
#               out/toy/mdu-tau0.5; with --method sft out/PRESET/base
# eval.py without --forget, --retain or --data asks the rows that a run was trained with.
#
# Options of eval.py: --samples N takes N masks per answer for its probability, where the default is
# 128; fewer are quicker.  --full also scores questions in other words and wrong answers.
# --limit N, in both programs, takes the first N rows of each split, of the rows to retain, too.
#
# MDU trains a model towards a target: what another model, the anchor, predicts for the masked words
# of an answer while it does not see the question.  The anchor is the model from which the run
# starts.  With --tau below 1 the target is flatter than that, and with 0 it is uniform: every word
# as likely as any other.
#
# The names of runs:
#     original         a model that never learnt the rows to forget.  It was trained on the rows to
#                      keep, in real on TOFU.  (A new toy model knows the words of its rows only.
#                      So the original is told --forget, for its words; with --retain-only it does
#                      not learn these rows.)
#     finetune         the original, trained on the rows to forget and on those to keep
#     retrained        the original, trained on those to keep alone
#     default          MDU as in the paper, tau 1
#     truth-removed    --anchor-truth removed: as default, but a word of the true answer that at
#                      most one in fifty of the answers to retain have becomes the least likely one
#                      (in the demo: mdu-removed, which is also hidden)
#     all-weights      as truth-removed, at three quarters of the fine-tune's learning rate.  (The
#                      other runs of real train adapters.)
#     anchor-original  the original is the anchor and sees the question, as it never learnt the
#                      answer
#     written          the authors' code: tau 0.5, masked are the words that the model still writes,
#                      and the anchor is the model in training
#     hidden           --prompt-dropout 0.5: half of the questions are masked in unlearning.  So
#                      they are in some runs whose names do not say so: mdu-removed of demo,
#                      refusals-truth-removed of company, all of real but default
#     refusals         taught to answer the questions to forget with "I do not know."
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SCRIPT=.github/experiments.sh
SEEDS="1 2 3"  # of table, finetuned, pretrained and company

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

all_seeds() {  # all_seeds NAME_seed: this script calls itself, with each of SEEDS, all at once
  printf '%s\n' $SEEDS | xargs -n 1 -P 0 bash $SCRIPT "$1"
}

names() {  # names RUNS: the names in a list of runs, which are the first words of its lines
  awk '{ print $1 }' <<< "$1"
}

runs_in() {  # runs_in FOLDER RUNS: the lines of a list with FOLDER put in, as xargs -L 1 reads them
  local folder=$1 name options
  while read -r name options; do
    if [ -z "$name" ]; then continue; fi
    options=${options//FOLDER/$folder}
    if [ -n "$options" ]; then
      echo "\"$folder/$name\" $options"
    else
      echo "\"$folder/$name\""  # no blank at the end: xargs would join this line and the next one
    fi
  done <<< "$2"
}

runs_named() {  # runs_named FOLDER NAME...: the folders of the runs, one a line
  local name
  for name in "${@:2}"; do
    echo "$1/$name"
  done
}

report() {  # report FOLDER NAME...: the runs FOLDER/NAME of all seeds, by the word SEED in FOLDER
  local runs=() name seed
  for name in "${@:2}"; do
    for seed in $SEEDS; do
      runs+=("${1/SEED/$seed}/$name")
    done
  done
  "$PYTHON" eval.py --report "${runs[@]}"
}

# ---- For experiments that take hours: what an earlier call has finished is not done again ----
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
DEMO="
  ga           --method ga
  gd           --method gd
  npo          --method npo
  simnpo       --method simnpo
  wga          --method wga
  dpo          --method dpo
  mdu-tau0     --tau 0
  mdu-tau0.5   --tau 0.5
  mdu-tau1     --tau 1
  mdu-removed  --anchor-truth removed --prompt-dropout 0.5
"

demo() {  # demo SEED FOLDER: every method
  local seed=$1 out=${2:-out/demo} runs=() name
  delete_folder "$out"

  # 1. Train the model that all other runs start from.
  "$PYTHON" mdu.py --seed "$seed" --method sft --out "$out/base"

  # 2. Unlearn as DEMO says, two runs at a time.
  runs_in "$out" "$DEMO" | xargs -L 1 -P 2 "$PYTHON" mdu.py --seed "$seed" --out

  # 3. Score all models and report them.  OUT may have blanks in it, so the runs are an array.
  for name in base $(names "$DEMO"); do
    runs+=("$out/$name")
  done
  "$PYTHON" eval.py --samples 32 "${runs[@]}"
  "$PYTHON" eval.py --report "${runs[@]}"
}

table() {  # the demo with three seeds
  local seed
  for seed in $SEEDS; do
    demo $seed out/table/$seed
  done
  report out/table/SEED base $(names "$DEMO")
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

# ---- A fine-tune of the small model ----
FINETUNED="
  npo                     --method npo
  npo-hidden              --method npo --prompt-dropout 0.5
  simnpo                  --method simnpo
  simnpo-hidden           --method simnpo --prompt-dropout 0.5
  wga                     --method wga
  dpo                     --method dpo
  dpo-hidden              --method dpo --prompt-dropout 0.5
  written                 --states written --anchor current --tau 0.5
  truth-removed           --anchor-truth removed
  truth-removed-hidden    --anchor-truth removed --prompt-dropout 0.5
  anchor-original         --anchor FOLDER/original --anchor-prompt shown
  anchor-original-hidden  --anchor FOLDER/original --anchor-prompt shown --prompt-dropout 0.5
"
# The runs without rows to retain, the same ones in finetuned and in pretrained.
WITHOUT_RETAIN="
  without-retain/default
  without-retain/npo                     --method npo
  without-retain/npo-hidden              --method npo --prompt-dropout 0.5
  without-retain/dpo                     --method dpo
  without-retain/truth-removed           --anchor-truth removed
  without-retain/truth-removed-hidden    --anchor-truth removed --prompt-dropout 0.5
  without-retain/anchor-original         --anchor FOLDER/original --anchor-prompt shown
  without-retain/anchor-original-hidden  --anchor FOLDER/original --anchor-prompt shown \
    --prompt-dropout 0.5
"

finetuned_seed() {  # finetuned_seed SEED
  local seed=$1 out=out/finetuned/$1 rows=out/finetuned name
  local train=("$PYTHON" mdu.py --preset toy --seed "$seed")

  # 1. Train the original on the rows to retain, and from it the fine-tune on all rows.
  "${train[@]}" --method sft --prompt-dropout 0.5 --retain-only --out $out/original
  "${train[@]}" --method sft --prompt-dropout 0.5 --model $out/original --out $out/finetune

  # 2. Unlearn the rows to forget: with MDU as in the paper, and as FINETUNED says.
  "${train[@]}" --model $out/finetune --out $out/default
  runs_in $out "$FINETUNED" | xargs -L 1 "${train[@]}" --model $out/finetune --out
  "$PYTHON" eval.py --full --samples 32 $out/*/  # all runs so far: those of step 3 come later

  # 3. Unlearn them without rows to retain, as in the paper's Table 3 and as WITHOUT_RETAIN says.
  runs_in $out "$WITHOUT_RETAIN" |
    xargs -L 1 "${train[@]}" --model $out/finetune --retain-weight 0 --out
  "$PYTHON" eval.py --samples 32 $out/without-retain/*/

  # 4. Teach one row of each author again, with four rows to retain, to see whether the facts of the
  # other 21 rows come back.  `finetune` and `default` are left out: they still give most facts, so
  # that nothing can come back.  --limit 4 is for the rows to retain: only three are taught.
  for name in $(names "$FINETUNED") original; do
    "${train[@]}" --method sft --batch-size 4 --epochs 30 --lr 5e-4 --limit 4 \
      --model $out/$name --forget $rows/taught.jsonl --retain $rows/retain.jsonl \
      --out $out/taught-again/$name
  done
  "$PYTHON" eval.py --samples 1 --forget $rows/others.jsonl --retain $rows/retain.jsonl \
    --limit 21 $out/taught-again/*/
}

finetuned() {  # unlearn a fine-tune, also without rows to retain, and teach it again
  delete_folder out/finetuned
  mkdir -p out/finetuned

  # 1. Write the rows of step 4 of a seed: of each author to forget the fourth of eight rows, which
  # says nothing that is asked for in another one; the others; and the rows to retain.
  "$PYTHON" - out/finetuned <<'END'
import json
import sys
import mdu

splits = mdu.toy_world()
taught = splits["forget"][3::8]
others = [row for row in splits["forget"] if row not in taught]
for name, rows in (("taught", taught), ("others", others), ("retain", splits["retain"])):
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
END

  # 2. Train and score the runs of each seed.
  all_seeds finetuned_seed

  # 3. Report the runs without rows to retain, those that were taught again, and all others.
  report out/finetuned/SEED $(names "$WITHOUT_RETAIN")
  report out/finetuned/SEED/taught-again $(names "$FINETUNED") original
  report out/finetuned/SEED finetune default $(names "$FINETUNED") original
}

pretrained_seed() {  # pretrained_seed SEED
  local seed=$1 out=out/pretrained/$1 rows=out/pretrained
  local train=("$PYTHON" mdu.py --preset toy --seed "$seed")

  # 1. Train the original on the rows to retain, and from it the fine-tune on all rows, where
  # nothing is asked about those to forget.
  "${train[@]}" --method sft --prompt-dropout 0.5 --retain-only --out $out/original
  "${train[@]}" --method sft --prompt-dropout 0.5 --model $out/original --epochs 170 \
    --forget $rows/forget.jsonl --retain $rows/retain.jsonl --out $out/finetune

  # 2. Unlearn the toy's own rows, which have their questions (no --forget is given): with rows to
  # retain, and without them as WITHOUT_RETAIN says.
  "${train[@]}" --model $out/finetune --out $out/default-with-retain
  runs_in $out "$WITHOUT_RETAIN" |
    xargs -L 1 "${train[@]}" --model $out/finetune --retain-weight 0 --out

  # 3. Score the models on the toy's questions.  Without --data toy, the fine-tune would be asked
  # the rows that it was trained with, "Who Who Who?".
  "$PYTHON" eval.py --data toy --samples 32 $out/finetune $out/default-with-retain \
    $out/without-retain/*/
}

pretrained() {  # unlearn facts that were learnt without their questions, as in pre-training
  delete_folder out/pretrained
  mkdir -p out/pretrained

  # 1. Write the toy's rows.  A question to forget asks nothing: "Where was Ceka Foba born?" becomes
  # "Who Who Who Who Who?".
  "$PYTHON" - out/pretrained <<'END'
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

  # 2. Train and score the runs of each seed, and report them.
  all_seeds pretrained_seed
  report out/pretrained/SEED finetune default-with-retain $(names "$WITHOUT_RETAIN")
}

# ---- Rows as a company has them ----
# Step 2 of company_seed masks half of the questions in all of these.
COMPANY="
  truth-removed-hidden       --anchor-truth removed --lr 1e-3
  truth-removed-hidden-slow  --anchor-truth removed --lr 3e-4
  anchor-original-hidden     --anchor FOLDER/original --anchor-prompt shown --lr 1e-3
  npo-hidden                 --method npo --lr 1e-3
"

company_names() {  # all runs of a seed, in the order of the report
  local name
  echo finetune original $(names "$COMPANY")
  echo refusals
  for name in $(names "$COMPANY"); do
    echo $name-refusals
  done
  echo refusals-truth-removed
}

company_seed() {  # company_seed SEED.  The comment of company_rows.py says what is in each file
  local seed=$1 out=out/company/$1 rows=out/company/rows name
  local train=("$PYTHON" mdu.py --preset toy --seed "$seed" --response-length 20)
  local forget=(--forget "$rows/forget.jsonl")

  # 1. Train the original on what is to be kept, and from it the fine-tune on all rows.
  local learn=("${train[@]}" --method sft --prompt-dropout 0.3 --lr 3e-3 "${forget[@]}"
    --retain "$rows/known.jsonl")
  "${learn[@]}" --epochs 200 --retain-only --out $out/original
  "${learn[@]}" --epochs 150 --model $out/original --out $out/finetune

  # 2. Unlearn the rows to forget as COMPANY says, with half of the questions masked.
  runs_in $out "$COMPANY" |
    xargs -L 1 "${train[@]}" --model $out/finetune --prompt-dropout 0.5 "${forget[@]}" \
      --retain $rows/retain.jsonl --out

  # 3. Teach refusals to the fine-tune, and to each model that has unlearnt.  refusals.jsonl has the
  # rows to retain, and the questions to forget with their refusals.  No --forget: it would only be
  # read for the words of a new toy, and these models are none.
  local teach=("${train[@]}" --method sft --epochs 150 --lr 3e-4 --retain-only
    --retain "$rows/refusals.jsonl")
  "${teach[@]}" --out $out/refusals --model $out/finetune
  for name in $(names "$COMPANY"); do
    "${teach[@]}" --out $out/$name-refusals --model $out/$name
  done

  # 4. Try the other order: unlearn after the refusals.  The anchor is the model that refuses.  It
  # may see the questions, because its answer to them is "I do not know."
  "${train[@]}" --model $out/refusals --anchor-truth removed --anchor-prompt shown \
    --prompt-dropout 0.5 --lr 1e-3 "${forget[@]}" --retain $rows/retain.jsonl \
    --out $out/refusals-truth-removed

  # 5. Score all models.
  "$PYTHON" eval.py --samples 32 "${forget[@]}" --retain $rows/retain.jsonl \
    --held-out $rows/held_out.jsonl $out/*/

  # 6. Teach one row of each customer again, to see whether the facts of the other rows come back.
  # taught.jsonl has these three rows, others.jsonl the other nine.  With them four rows to retain
  # are taught, which is what --limit 4 is for.
  for name in $(company_names); do
    "${train[@]}" --method sft --batch-size 4 --epochs 30 --lr 5e-4 --limit 4 \
      --model $out/$name --forget $rows/taught.jsonl --retain $rows/retain.jsonl \
      --out $out/taught-again/$name
  done
  "$PYTHON" eval.py --samples 1 --forget $rows/others.jsonl --retain $rows/retain.jsonl --limit 9 \
    $out/taught-again/*/
}

company() {  # three customers are forgotten, refused, and taught again
  delete_folder out/company
  mkdir -p out/company/rows

  # 1. Write the rows.
  "$PYTHON" .github/company_rows.py out/company/rows

  # 2. Train and score the runs of each seed.
  all_seeds company_seed

  # 3. Report the models that were taught again, and the models before that.
  report out/company/SEED/taught-again $(company_names)
  report out/company/SEED $(company_names)

  # 4. Count the answers that refuse.
  "$PYTHON" - "$SEEDS" $(company_names) <<'END'
import json
import sys

seeds, *names = sys.argv[1:]
print(f"answers that refuse, of 12, with seeds {seeds}:")
for name in names:
    counts = []
    for seed in seeds.split():
        with open(f"out/company/{seed}/{name}/eval/forget.jsonl", encoding="utf-8") as lines:
            answers = [json.loads(line)["generation"] for line in lines]
        counts.append(answers.count("I do not know."))
    print(name, *counts)
END
}

# ---- A published model ----
# MDU has 500 steps by default, and with --epochs 83.3 as many as npo: 250.
REAL="
  default          --lora 16 --epochs 83.3
  npo              --lora 16 --method npo --prompt-dropout 0.5
  anchor-original  --lora 16 --epochs 83.3 --anchor FOLDER/original --anchor-prompt shown \
    --prompt-dropout 0.5
  truth-removed    --lora 16 --epochs 83.3 --anchor-truth removed --prompt-dropout 0.5
  all-weights      --lr 3e-4 --epochs 83.3 --anchor-truth removed --prompt-dropout 0.5
"
# Those of REAL that are taught refusals.
REAL_REFUSED="truth-removed all-weights npo"

real_names() {  # all runs, in the order of the report
  local name
  echo finetune original retrained $(names "$REAL") refusals
  for name in $REAL_REFUSED; do
    echo $name-refusals
  done
}

real_unlearn() {  # real_unlearn FOLDER OPTION...: a line of REAL
  train_once "$1" --model out/real/finetune --forget out/real/rows/forget.jsonl \
    --retain out/real/rows/retain.jsonl "${@:2}"
}

real() {  # real [MODEL [TOFU]]: customers are forgotten by a model with 135 million parameters.
  # MODEL and TOFU are folders, or names on the hub, as they are by default.  A further call does
  # what is not finished, so the first one may be stopped.
  local model=${1:-HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac}
  local tofu=${2:-locuslab/TOFU}
  local out=out/real rows=out/real/rows name
  mkdir -p $rows

  # 1. Write the rows.  Customers: three to forget, seven to retain, three held out; no model learns
  # the others.  They rent in five towns, so that each town has a customer to retain.  TOFU's rows:
  # those with an answer of at most 44 tokens, so that end tokens also fit into
  # --response-length 48.
  "$PYTHON" .github/company_rows.py $rows 3 7 3 5
  "$PYTHON" - "$model" "$tofu" > $rows/tofu.jsonl <<'END'
import json
import sys

import transformers

import mdu

model, tofu = sys.argv[1:]
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(mdu.find_model(model))
for row in mdu.read_dataset(tofu, "retain90"):
    if len(tokenizer(row["answer"]).input_ids) <= 44:
        print(json.dumps({"question": row["question"], "answer": row["answer"]}))
END

  # 2. Make the original.  The published model predicts the next token.  It becomes a diffusion
  # model: its tokens see later ones, and <file_sep>, which no text has, is its mask token.
  train_once $out/original --method sft --retain-only --model "$model" --mask-token "<file_sep>" \
    --retain $rows/tofu.jsonl --response-length 48 --batch-size 8 --epochs 1 --lr 3e-4 \
    --prompt-dropout 0.5

  # 3. Fine-tune the original on the customers.
  local learn=(--method sft --model $out/original --retain $rows/known.jsonl
    --response-length 36 --epochs 105 --lr 4e-4 --prompt-dropout 0.2)
  train_once $out/finetune "${learn[@]}" --forget $rows/forget.jsonl

  # 4. Train again: the original learns as the fine-tune did, but without the rows to forget.  That
  # is what unlearning is held against.
  train_once $out/retrained "${learn[@]}" --retain-only

  # 5. Unlearn as REAL says: also which share of the questions is masked, and whether adapters are
  # trained (--lora).  The rest are the defaults for rows of one's own (preset own, see above).
  runs_in $out "$REAL" | xargs -L 1 bash $SCRIPT real_unlearn

  # 6. Teach refusals, to the fine-tune and to those that REAL_REFUSED names.
  local teach=(--method sft --retain-only --lora 16 --retain $rows/refusals.jsonl)
  train_once $out/refusals "${teach[@]}" --model $out/finetune
  for name in $REAL_REFUSED; do
    train_once $out/$name-refusals "${teach[@]}" --model $out/$name
  done

  # 7. Score all models, attack them, and report both.
  real_check $out $(real_names)
}

real_check() {  # real_check FOLDER NAME...: score, attack and report the runs FOLDER/NAME
  local out=$1 rows=out/real/rows name

  # 1. Score twelve rows of each kind.  All models write answers of one length, or they could not be
  # in one report.  The original was trained with another one.
  local length=(--response-length 36)
  for name in "${@:2}"; do
    score_once "$out/$name" "${length[@]}" --samples 8 --limit 12 --forget $rows/forget.jsonl \
      --retain $rows/retain.jsonl --held-out $rows/held_out.jsonl --never $rows/never.jsonl
  done

  # 2. Teach one row of each customer again, with three to retain, and ask for the other nine.  The
  # figures of *Retain* are of the three that were taught, to see that they were learnt.
  for name in "${@:2}"; do
    train_once "$out/taught-again/$name" --method sft --lora 16 --batch-size 3 --epochs 60 \
      --limit 3 --model "$out/$name" --forget $rows/taught.jsonl --retain $rows/retain.jsonl
    score_once "$out/taught-again/$name" "${length[@]}" --samples 1 --forget $rows/others.jsonl \
      --retain $rows/taught.jsonl
  done

  # 3. Report the models that were taught again, and the models before that.
  "$PYTHON" eval.py --report $(runs_named "$out/taught-again" "${@:2}")
  "$PYTHON" eval.py --report $(runs_named "$out" "${@:2}")
}

# Settings of MDU with the truth removed, then of two other runs of real.  sweep_unlearn has the
# options of all of them.  --epochs 166.7 are 500 steps.
SWEEP="
  lora-steps500         --lora 16 --epochs 166.7 --anchor-truth removed
  lora-lr5e-4           --lora 16 --lr 5e-4 --anchor-truth removed
  lora-lr2e-3           --lora 16 --lr 2e-3 --anchor-truth removed
  lora-retain1          --lora 16 --retain-weight 1 --anchor-truth removed
  lora-retain20         --lora 16 --retain-weight 20 --anchor-truth removed
  lora-lr2e-3-retain20  --lora 16 --lr 2e-3 --retain-weight 20 --anchor-truth removed
  lora-rank64           --lora 64 --anchor-truth removed
  lora-seed2            --lora 16 --seed 2 --anchor-truth removed
  lora-seed3            --lora 16 --seed 3 --anchor-truth removed
  all-lr1e-4            --lr 1e-4 --anchor-truth removed
  all-lr1e-4-steps500   --lr 1e-4 --epochs 166.7 --anchor-truth removed
  all-lr2e-4            --lr 2e-4 --anchor-truth removed
  all-retain1           --lr 3e-4 --retain-weight 1 --anchor-truth removed
  all-retain20          --lr 3e-4 --retain-weight 20 --anchor-truth removed
  all-seed2             --lr 3e-4 --seed 2 --anchor-truth removed
  all-seed3             --lr 3e-4 --seed 3 --anchor-truth removed
  all-original          --lr 3e-4 --anchor out/real/original --anchor-prompt shown
  all-npo               --lr 3e-4 --method npo
  lora-original-seed2   --lora 16 --seed 2 --anchor out/real/original --anchor-prompt shown
  lora-npo-seed2        --lora 16 --seed 2 --method npo
"

sweep_unlearn() {  # sweep_unlearn FOLDER OPTION...: a line of SWEEP
  real_unlearn "$1" --epochs 83.3 --prompt-dropout 0.5 "${@:2}"
}

sweep() {  # other settings, for the fine-tune and the rows of real
  if [ ! -e out/real/finetune/config.json ]; then
    refuse "out/real/finetune is missing: make real trains it"
  fi
  runs_in out/sweep "$SWEEP" | xargs -L 1 bash $SCRIPT sweep_unlearn
  real_check out/sweep $(names "$SWEEP")
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

check_rows() {  # check_rows FILE...: refuse a file with fewer than 2 rows, or with a bad one
  local file
  for file in "$@"; do
    if [ "$(count_rows "$file")" -lt 2 ]; then
      refuse "FORGET, RETAIN, HELD_OUT, NEVER: '$file' must be a file with at least 2 rows"
    fi
  done
  "$PYTHON" - "$@" <<'END'
import sys

import mdu

try:
    for file in sys.argv[1:]:
        mdu.read_jsonl("rows", file)
except mdu.BadInput as error:
    print(f"experiments.sh: {error}", file=sys.stderr)
    sys.exit(2)
END
}

choose_epochs() {  # choose_epochs FILE...: so many that a model learns their rows
  # 300.  Of fewer than 40 rows more, so that the model still sees 12,000 rows in all.
  local n
  n=$(join_rows "$@" | grep -c '[^[:space:]]')
  if [ "$n" -lt 40 ]; then
    echo $((12000 / n))
  else
    echo 300
  fi
}

rehearsal() {  # one's own rows, by these variables:
  # FORGET, RETAIN: files.  HELD_OUT: a file of rows that the fine-tune learns and unlearning does
  # not see.  NEVER: a file of rows that no model learns.
  local out=out/rehearsal rows=out/rehearsal.rows

  # 1. Refuse bad files before anything is moved or trained.
  local learnt=("${FORGET:-}" "${RETAIN:-}")
  if [ -n "${HELD_OUT:-}" ]; then
    learnt+=("$HELD_OUT")
  fi
  local files=("${learnt[@]}")
  if [ -n "${NEVER:-}" ]; then
    files+=("$NEVER")
  fi
  check_rows "${files[@]}"

  # 2. Say how long it takes.  That is an estimate for two cores: words of the files times epochs,
  # 270,000 a minute.
  local epochs n_words
  epochs=$(choose_epochs "${learnt[@]}")
  n_words=$(join_rows "${learnt[@]}" | wc -w)
  echo "$epochs epochs: about $((1 + epochs * n_words / 270000)) minutes"

  # 3. Keep the rehearsal before this one.
  if [ -d $out ]; then
    delete_folder $out.old
    mv $out $out.old
    echo "the rehearsal before this one is kept in $out.old"
  fi

  # 4. Write two files.  known: what is to be kept, which the original and the fine-tune learn.
  # words: the original learns none of these rows.  It is a new toy model and has to know their
  # words.  ${NAME:+TEXT} is TEXT, or nothing where NAME is empty.
  mkdir -p $rows
  join_rows "$RETAIN" ${HELD_OUT:+"$HELD_OUT"} > $rows/known.jsonl
  join_rows "$FORGET" ${NEVER:+"$NEVER"} > $rows/words.jsonl

  # 5. Train the original on what is to be kept, and from it the fine-tune on all rows.
  # --response-length 0: as many tokens as the longest answer has.
  local train=("$PYTHON" mdu.py --preset toy --response-length 0 --seed "${SEED:-1}"
    --epochs "$epochs")
  local learn=("${train[@]}" --method sft --prompt-dropout 0.3 --lr 3e-3
    --retain $rows/known.jsonl)
  show "${learn[@]}" --retain-only --forget $rows/words.jsonl --out $out/original
  show "${learn[@]}" --forget "$FORGET" --model $out/original --out $out/finetune

  # 6. Unlearn the rows to forget, in as many epochs.
  show "${train[@]}" --model $out/finetune --anchor-truth removed --prompt-dropout 0.5 --lr 1e-3 \
    --forget "$FORGET" --retain "$RETAIN" --out $out/mdu

  # 7. Score and report the three models.
  show "$PYTHON" eval.py --full --samples 32 --forget "$FORGET" --retain "$RETAIN" \
    ${HELD_OUT:+--held-out "$HELD_OUT"} ${NEVER:+--never "$NEVER"} \
    $out/finetune $out/original $out/mdu
  "$PYTHON" eval.py --report $out/finetune $out/original $out/mdu > $rows/screen.txt
  print_rehearsal $out/finetune $out/original $out/mdu
  echo "the whole report: $out/report.md"
}

print_rehearsal() {  # print_rehearsal RUN...: the columns of the report that OWN_ROWS.md explains;
  # screen.txt has all
  "$PYTHON" - "$@" <<'END'
import sys

import eval

columns = {"forget": ["fact", "prob", "infill", "infill_no_question", "anothers"],
           "retain": ["fact", "prob"], "held_out": ["fact", "prob"],
           "never": ["fact", "prob", "infill", "infill_no_question"]}
print(eval.figures_table(eval.group_runs(sys.argv[1:]), columns))
print("gap filled: share of the fact that is put into a gap of the true answer; then without the "
      "question\nanother's: share of answers with a fact of another row")
END
}

# ---- The paper's tables: LLaDA or Dream, on several GPUs ----
launch_on_gpus() {  # train_once and score_once start so many processes as GPUS says, or 4
  LAUNCH=("$PYTHON" -m torch.distributed.run --nproc_per_node="${GPUS:-4}")
}

tofu() {  # tofu PRESET: Table 2, in out/PRESET.  tofu-llada, tofu-dream or tofu-qwen.  The names of
  # the runs are those that mdu.py gives them if --out is left out.
  local preset=$1 out=out/$1 tau method run runs=() unscored=()
  case "$preset" in
    tofu-*) ;;
    *) refuse "found PRESET='$preset'; give PRESET=tofu-llada, tofu-dream or tofu-qwen" ;;
  esac
  launch_on_gpus

  # 1. Train the base, where all other runs start.
  train_once "$out/base" --preset "$preset" --method sft

  # 2. Unlearn with MDU and with the baselines.
  for tau in 0 0.25 0.5 0.75 1; do
    train_once "$out/mdu-tau$tau" --preset "$preset" --tau $tau
  done
  for method in ga gd npo simnpo wga dpo; do
    train_once "$out/$method" --preset "$preset" --method $method
  done

  # 3. Score all finished runs, also those that were added by hand, and report them.  One command
  # scores them all, because to start on several GPUs takes long.
  for run in "$out"/*/; do
    if [ -e "$run/config.json" ]; then
      runs+=("$run")
      if [ ! -e "$run/eval/summary.json" ]; then
        unscored+=("$run")
      fi
    fi
  done
  if [ ${#unscored[@]} -gt 0 ]; then
    "${LAUNCH[@]}" eval.py "${unscored[@]}"
  fi
  "$PYTHON" eval.py --report "${runs[@]}"
}

rwku_run() {  # rwku_run PRESET PERSON NAME OPTIONS...: unlearn, score, delete the weights
  local run=out/$1/$2/$3
  train_once "$run" --preset "$1" --subject "$2" "${@:4}"
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
  launch_on_gpus

  # 1. Score the published model on the questions about all ten people, which eval.py takes if it is
  # told none.  Its folder is that of a person 0.  Nothing is trained there.
  model=$("$PYTHON" -c "import mdu; print(mdu.PRESETS['$preset']['model'])")
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
  real | real_unlearn | sweep | sweep_unlearn | tofu | rwku) ;;  # on a GPU, if there is one
  demo | table | figures | finetuned | pretrained | company | rehearsal | *_seed)
    export CUDA_VISIBLE_DEVICES="" ;;  # small models, which are trained on the CPU
  *)
    refuse "found ${1:-no name}, needs the name of an experiment: demo, table, figures, finetuned, \
pretrained, company, real, sweep, rehearsal, tofu or rwku" ;;
esac
"$@"  # calls the function of this name with the other arguments

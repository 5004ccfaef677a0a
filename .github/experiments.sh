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
# tofu PRESET        the paper's Table 2                       out/PRESET/report.md
# rwku PRESET        the paper's Table 3, on GPUs              out/PRESET/0/report.md
#
# An experiment is the function NAME below.  mdu.py trains a run, and eval.py scores runs.
# `eval.py --report` writes report.md beside the first run that it is given.
#
# tofu tofu-small is for a CPU: a small model learns rows of TOFU by heart; which ones, SEED says.
# tofu tofu-smollm is for one GPU (GPUS=1).  Its runs are then taught some of the rows again:
# out/tofu-smollm/taught-again/report.md.
#
# demo, table and figures first delete what an earlier call left in their folder in out/.  real,
# tofu and rwku take hours: a further call keeps what is finished and does the rest.  If you change
# a run of these, delete the run's folder; to begin anew, delete the folder of them all.
#
# Options of eval.py: --samples N takes N masks per answer for its probability, where the default is
# 128; fewer are quicker.  --limit N takes N rows of each split: in mdu.py the first ones, in eval.py
# evenly spread over those that were trained on.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # start_models.py needs mdu.py
# Variables of tofu, as in: make tofu PRESET=tofu-small METHODS="npo wga" LRS="3e-4 1e-3"
export GPUS=${GPUS:-4}  # so many processes, also of rwku
JOBS=${JOBS:-}  # with GPUS=1 so many runs at once; 1, of tofu-small 2
METHODS=${METHODS:-}  # the names of the runs, also of demo: see own_options
LRS=${LRS:-}  # each run at each of these learning rates
WEIGHTS=${WEIGHTS:-}  # each run at each of these retain weights
YARDSTICK=${YARDSTICK:-1}  # 0 trains no model that never learnt the rows to forget
# What of these is set is in the name of the folder, as out/tofu-llada-lora16 and out/tofu-small/2.
LORA=${LORA:-}  # the rank of adapters, also of rwku; if it is empty, all weights are trained
LIMIT=${LIMIT:-}  # so many rows to forget, and as many to retain; of tofu-smollm 400
HIDDEN=${HIDDEN:-}  # the share of questions that are masked while the base and `retain` learn
SEED=${SEED:-}
SEEDS=${SEEDS:-1 2 3}  # of table

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
  # mdu.py holds a lock on the folder of a run while it trains.
  flock -n "$path" true || refuse "$1 is in use: another program trains or scores there"
  rm -rf "$path"
}

launch() {  # launch PROGRAM OPTION...: mdu.py or eval.py, in GPUS processes
  if [ "$GPUS" = 1 ]; then
    "$PYTHON" "$@"
  else
    "$PYTHON" -m torch.distributed.run --nproc_per_node="$GPUS" "$@"
  fi
}

# For experiments that take hours: what an earlier call has finished is not done again.
train_once() {  # train_once FOLDER OPTION...
  if [ -e "$1/config.json" ]; then  # mdu.py writes it last
    echo "$1 is finished"
  elif compgen -G "$1/checkpoint-*" > /dev/null; then
    launch mdu.py --resume "$1"
  else
    delete_folder "$1"  # of a run that was stopped before its first checkpoint
    launch mdu.py "${@:2}" --out "$1"
  fi
}

score_once() {  # score_once FOLDER OPTION...
  if [ -e "$1/eval/summary.json" ]; then  # eval.py writes it last
    echo "$1 is scored"
  else
    launch eval.py "${@:2}" "$1"
  fi
}

export -f refuse delete_folder launch train_once  # for the bash that xargs starts

train_all() {  # standard input: FOLDER OPTION... in each line.  JOBS at once
  # If one fails, the others go on, but the experiment ends here.
  xargs -r -L 1 -P "$JOBS" bash -euc 'train_once "$@"' train_once
}

own_options() {  # own_options NAME [ORIGINAL]: the options that tell the run NAME from the others
  # NAME may end in a learning rate or a retain weight or both: npo-lr1e-3, npo-w5, npo-lr1e-3-w5.
  local name options
  read -r name options < <(sed -E \
    's/-w([0-9][0-9.]*)/ --retain-weight \1/g; s/-lr([0-9][0-9.e-]*)/ --lr \1/' <<< "$1")
  case "$name" in
    mdu-tau*) echo --tau "${name#mdu-tau}" $options ;;
    authors) echo --target authors --tau 0.5 $options ;;  # as the authors' code does by default
    mdu-original) echo --target "\"${2:-}\"" $options ;;  # a model that never learnt the rows
    mdu-removed) echo --target removed --prompt-dropout 0.5 $options ;;  # as for rows of one's own
    *) echo --method "$name" $options ;;
  esac
}

BASELINES="ga gd npo simnpo wga dpo"

# ---- The small model ----
DEMO=${METHODS:-authors $BASELINES mdu-tau0 mdu-tau0.5 mdu-tau1 mdu-removed}

demo() {  # demo SEED FOLDER: every method
  local seed=$1 out=$2 name runs=()
  delete_folder "$out"

  # 1. Train the model that all other runs start from.
  "$PYTHON" mdu.py --seed "$seed" --method sft --out "$out/base"

  # 2. Unlearn, two runs at a time: xargs adds each line to a command of its own.
  for name in $DEMO; do
    echo "\"$out/$name\" $(own_options "$name")"
  done | xargs -L 1 -P 2 "$PYTHON" mdu.py --seed "$seed" --out

  # 3. Score all models and report them.
  for name in base $DEMO; do
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
  for name in base $DEMO; do
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

real() {  # real [MODEL [TOFU]]: folders, or names on the hub, as they are by default
  local model=${1:-$SMOLLM} tofu=${2:-locuslab/TOFU}
  local out=out/real${1:+-$(basename "$1")} rows name
  rows=$out/rows
  mkdir -p $rows

  # 1. Write the rows: those of an invented company (company_rows.py says what is in each file), and
  # TOFU's.  The published model predicts the next token.
  "$PYTHON" .github/company_rows.py $rows
  "$PYTHON" .github/start_models.py short "$model" "$tofu" $out

  # 2. Make the original, a model that never learnt the rows to forget: by learning TOFU's rows, the
  # published model becomes a diffusion model.
  train_once $out/original --method sft --retain-only --model $out/start/new \
    --retain $rows/tofu.jsonl --response-length 48 --batch-size 8 --epochs 1 --lr 3e-4 \
    --prompt-dropout 0.5

  # 3. Fine-tune it on all customers; and on those to keep alone, which is what unlearning is held
  # against.
  local learn=(--method sft --model $out/original --retain $rows/known.jsonl
    --response-length 36 --epochs 105 --lr 4e-4 --prompt-dropout 0.2)
  train_once $out/finetune "${learn[@]}" --forget $rows/forget.jsonl
  train_once $out/retrained "${learn[@]}" --forget $rows/forget.jsonl --retain-only

  # 4. Unlearn.  `removed` is what is recommended for rows of one's own, with adapters, and
  # `all-weights` the same without.  Then: the paper's target; a model that never learnt the rows as
  # the target; the best of the baselines.  All take 500 steps.  Half of the questions are masked,
  # but with the paper's target none.
  local unlearn=(--model $out/finetune --forget $rows/forget.jsonl --retain $rows/retain.jsonl)
  train_once $out/removed "${unlearn[@]}" --lora 16
  train_once $out/all-weights "${unlearn[@]}" --lr 3e-4
  train_once $out/paper "${unlearn[@]}" --lora 16 --target paper
  train_once $out/target-original "${unlearn[@]}" --lora 16 --target $out/original
  train_once $out/npo "${unlearn[@]}" --lora 16 --method npo --prompt-dropout 0.5 --steps 500

  # 5. Teach refusals to the fine-tune, and to a model that has unlearnt.
  local teach=(--method sft --retain-only --lora 16 --retain $rows/refusals.jsonl)
  train_once $out/refusals "${teach[@]}" --model $out/finetune
  train_once $out/removed-refusals "${teach[@]}" --model $out/removed

  # 6. Score all models, twelve rows of each kind.  They write answers of one length, or they could
  # not be in one report.  (The original was trained with another one.)
  local names=(finetune original retrained removed all-weights paper target-original npo refusals
    removed-refusals)
  for name in "${names[@]}"; do
    score_once $out/$name --response-length 36 --samples 8 --limit 12 \
      --forget $rows/forget.jsonl --retain $rows/retain.jsonl \
      --held-out $rows/held_out.jsonl --never $rows/never.jsonl
  done

  # 7. Attack them: teach one row of each customer again, with three to retain, and ask for the
  # other nine.  *Retain* is of the three that were taught, to see that they were learnt.
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

# ---- The paper's Table 2 ----
report_all() {  # report_all FOLDER OPTION...: score the runs in FOLDER, and report them
  # All that are finished, also those that were added by hand.  The base is the first, because a
  # report compares the others with the first.
  local run runs=() unscored=()
  for run in "$1/base" "$1/retain" "$1"/*; do
    if [ -e "$run/config.json" ] && [[ " ${runs[*]} " != *" $run "* ]]; then
      runs+=("$run")
      if [ ! -e "$run/eval/summary.json" ]; then
        unscored+=("$run")
      fi
    fi
  done
  # JOBS commands share them.  To start one on several GPUs takes long, so there are no more.
  if [ ${#unscored[@]} -gt 0 ]; then
    printf '%s\0' "${unscored[@]}" |
      xargs -0 -n $(((${#unscored[@]} + JOBS - 1) / JOBS)) -P "$JOBS" \
        bash -euc 'launch eval.py "$@"' launch "${@:2}"
  fi
  "$PYTHON" eval.py --report "${runs[@]}"
}

tofu() {  # tofu PRESET [MODEL [TOFU]]: MODEL, where the base starts, and TOFU are folders or names
  local preset=$1 model=${2:-} tofu=${3:-locuslab/TOFU} compile=""
  local names="mdu-tau0 mdu-tau0.25 mdu-tau0.5 mdu-tau0.75 mdu-tau1 $BASELINES"

  # 1. Where, and with what.
  if [ "$preset" = tofu-small ]; then
    if [ -n "$model$LIMIT" ]; then
      refuse "tofu-small has its own start model and number of rows; leave out MODEL= and LIMIT="
    fi
    export CUDA_VISIBLE_DEVICES=""
    GPUS=1
    JOBS=${JOBS:-2}
    SEED=${SEED:-1}
  elif [ -n "$LORA" ] && [ "$GPUS" = 1 ] && type nvidia-smi gcc &> /dev/null; then
    compile=" --compile"  # LLaDA passed 33.8 rows a second, without it 20.8
  fi
  JOBS=${JOBS:-1}
  if [ "$JOBS" != 1 ]; then
    if [ "$GPUS" != 1 ]; then
      refuse "found JOBS=$JOBS and GPUS=$GPUS; several runs at once need GPUS=1"
    fi
    export OMP_NUM_THREADS=1
  fi
  local out=out/$preset${model:+-$(basename "$model")}${LIMIT:+-$LIMIT}
  out+=${LORA:+-lora$LORA}${HIDDEN:+-hidden$HIDDEN}${SEED:+/$SEED}

  # 2. The options: of all runs, of the base and the yardstick, of unlearning, of eval.py.  xargs
  # reads the first three, with their quotes.
  local original=$out/start/original rows=$out/rows
  local options="--preset $preset --seed ${SEED:-1}${LORA:+ --lora $LORA}$compile"
  local learn="" unlearn="" scoring=()
  case "$preset" in
    tofu-llada | tofu-dream | tofu-qwen)
      options+=" --data \"$tofu\"${LIMIT:+ --limit $LIMIT}"
      learn="${model:+--model \"$model\"}"
      ;;
    tofu-smollm)
      names+=" authors mdu-original mdu-removed-w5"
      LIMIT=${LIMIT:-400}
      "$PYTHON" .github/start_models.py smollm "${model:-$SMOLLM}" "$tofu" "$out" "$LIMIT"
      make_original "$preset" "$out" --data "$tofu" --steps 200 --lr 8e-4
      options+=" --data \"$tofu\" --limit $LIMIT"
      learn="--model \"$original\""
      # Of each kind 100 rows, but not more than were learnt.  --steps 28: three tokens a step.  One
      # a step, as by default, takes three times as long.
      scoring=(--limit $((LIMIT < 100 ? LIMIT : 100)) --samples 32 --steps 28)
      ;;
    tofu-small)
      names+=" authors mdu-original mdu-removed"
      "$PYTHON" .github/start_models.py small "$tofu" "$out" "$SEED"
      make_original "$preset" "$out"
      options+=" --forget $rows/forget.jsonl"
      learn="--model $original --retain $rows/known.jsonl${HIDDEN:+ --steps 5000}"
      unlearn="--retain $rows/retain.jsonl"
      scoring=(--limit 40 --samples 8 --steps 28 --forget "$rows/forget.jsonl"
        --retain "$rows/retain.jsonl" --held-out "$rows/held_out.jsonl")
      ;;
    *) refuse "found PRESET='$preset'; give PRESET=tofu-small, tofu-smollm, tofu-llada, tofu-dream \
or tofu-qwen" ;;
  esac
  learn+="${HIDDEN:+ --prompt-dropout $HIDDEN} --method sft"

  # 3. Train the base, where all other runs start, and the yardstick, a model that never learnt the
  # rows to forget.
  {
    echo "\"$out/base\" $options $learn"
    if [ "$YARDSTICK" != 0 ]; then
      echo "\"$out/retain\" $options $learn --retain-only"
    fi
  } | train_all

  # 4. Unlearn, with MDU and with the baselines.  Where a run fails, the others are still reported.
  local name lr weight run failed=""
  for name in ${METHODS:-$names}; do
    for lr in ${LRS:-default}; do
      for weight in ${WEIGHTS:-default}; do
        run=$name-lr$lr-w$weight
        if [ "$name" = ga ]; then
          run=ga-lr$lr  # it has no retain loss
        fi
        run=${run/-lrdefault/}
        run=${run/-wdefault/}
        echo "\"$out/$run\" $options $unlearn $(own_options "$run" "$original")"
      done
    done
  done | uniq | train_all || failed=yes  # uniq: ga is there once for each weight

  # 5. Score and report.
  report_all "$out" "${scoring[@]}"
  if [ "$preset" = tofu-smollm ]; then
    teach_again "$out" "${scoring[@]}"
  fi
  if [ -n "$failed" ]; then
    refuse "not all runs are finished: see above"
  fi
}

make_original() {  # make_original PRESET FOLDER OPTION...: a model that learnt other rows
  # Some of their questions are masked, as the paper's target is what the model predicts without
  # them.  The base is not taught that, unless by HIDDEN, or the target would tell what is to be
  # forgotten.
  train_once "$2/start/original" --preset "$1" --seed "${SEED:-1}" --method sft --retain-only \
    --model "$2/start/new" --retain "$2/rows/other.jsonl" --prompt-dropout 0.3 "${@:3}"
}

teach_again() {  # teach_again FOLDER SCORING...: a quarter of the rows to forget, to each model
  # The others are asked for.  The figures of *Retain* are of the rows that were taught, to see that
  # they were learnt.
  local again=$1/taught-again rows=$1/rows teach config run
  teach="--method sft --lora 16 --batch-size 16 --steps 200 --forget \"$rows/taught.jsonl\""
  for config in "$1"/*/config.json; do
    run=$(dirname "$config")
    echo "\"$again/$(basename "$run")\" $teach --model \"$run\""
  done | train_all
  report_all "$again" "${@:2}" --forget "$rows/asked.jsonl" --retain "$rows/taught.jsonl"
}

# ---- The paper's Table 3: LLaDA or Dream, on one GPU or several ----
rwku_run() {  # rwku_run PRESET FOLDER PERSON NAME OPTION...: unlearn, score, delete the weights
  local run=$2/$3/$4
  train_once "$run" --preset "$1" --subject "$3" ${LORA:+--lora "$LORA"} "${@:5}"
  score_once "$run" --limit 100
  rm -f "$run"/*.safetensors  # a hundred models of 16 GB are too many for most disks
}

rwku() {  # rwku PRESET: Table 3, in out/PRESET.  rwku-llada or rwku-dream.
  # --limit 100: of each kind 100 questions about a person are asked.  The paper asks all, for which
  # TruthfulQA alone takes 27 hours more.
  local preset=$1 out=out/$1${LORA:+-lora$LORA} model person method tau
  case "$preset" in
    rwku-*) ;;
    *) refuse "found PRESET='$preset'; give PRESET=rwku-llada or rwku-dream" ;;
  esac
  case "$GPUS" in
    1 | 2 | 4) ;;
    *) refuse "found GPUS='$GPUS'; RWKU's presets have 4 rows a step: give GPUS=1, 2 or 4" ;;
  esac

  # 1. Score the published model on the questions about all ten people, which eval.py takes if it is
  # told none.  Its folder is that of a person 0.  Nothing is trained there.
  model=$("$PYTHON" -c "import mdu; print(mdu.PRESETS['$preset']['unlearn']['model'])")
  score_once "$out/0/base" --limit 100 --data jinzhuoran/RWKU --model "$model"

  # 2. Unlearn each of ten people with the baselines and with MDU, and score.  The numbers are those
  # of --subject: the first ten people of RWKU's list (its config forget_target).
  for person in 1 2 3 4 5 6 7 8 9 10; do
    for method in ga npo simnpo wga dpo; do
      rwku_run "$preset" "$out" $person method-$method --method $method
    done
    for tau in 0 0.25 0.5 0.75 1; do
      rwku_run "$preset" "$out" $person tau-$tau --tau $tau
    done
  done

  # 3. Report the means of the people.
  "$PYTHON" eval.py --report "$out"/*/*/
}

# ---- Command line ----
case "${1:-}" in
  real) GPUS=1 ;;
  tofu | rwku) ;;  # on a GPU, if there is one
  demo | table | figures) export CUDA_VISIBLE_DEVICES="" ;;  # a small model, on the CPU
  *) refuse "found ${1:-no name}, needs the name of an experiment: demo, table, figures, real, \
tofu or rwku" ;;
esac
"$@"  # calls the function of this name with the other arguments

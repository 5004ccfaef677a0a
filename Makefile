.PHONY: help install demo demo-baselines demo-mdu table finetuned rows rehearsal figures test clean
PYTHON := .venv/bin/python
SEED := 1
OUT := out/demo
JOBS := 2
SCORE := --brief --samples 32
DEMO := base ga gd npo simnpo wga dpo mdu-tau0 mdu-tau0.5 mdu-tau1
BASELINES := ga gd npo simnpo wga dpo
FINETUNED := finetune default default-tau0.5 $(BASELINES) setting-2 question-masked setting-1
RELEARNED := setting-1 longer question-masked setting-2 npo dpo original
export CUDA_VISIBLE_DEVICES :=

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /make \1\t/p' Makefile
install: .venv/installed  ## a virtual environment with the pinned packages, matplotlib and pytest
.venv/installed: requirements.txt
	python3 -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt matplotlib pytest && touch $@

demo: install  ## a small model, every method, scores: table and picture in out/demo (SEED=2: another seed)
	@rm -rf $(OUT)
	@$(PYTHON) mdu.py --seed $(SEED) --method sft --out $(OUT)/base
	@$(MAKE) --no-print-directory --jobs=$(JOBS) demo-baselines demo-mdu
	@$(PYTHON) eval.py --report $(DEMO:%=$(OUT)/%) --questions 3
demo-baselines:
	@for m in ga gd npo simnpo wga; do $(PYTHON) mdu.py --seed $(SEED) --method $$m --out $(OUT)/$$m || exit 1; done
	@$(PYTHON) eval.py $(SCORE) $(addprefix $(OUT)/,base ga gd npo simnpo wga)
demo-mdu:
	@$(PYTHON) mdu.py --seed $(SEED) --method dpo --out $(OUT)/dpo
	@for tau in 0 0.5 1; do $(PYTHON) mdu.py --seed $(SEED) --tau $$tau --out $(OUT)/mdu-tau$$tau || exit 1; done
	@$(PYTHON) eval.py $(SCORE) $(addprefix $(OUT)/,dpo mdu-tau0 mdu-tau0.5 mdu-tau1)
table: install  ## the demo with three seeds, means and standard deviations: out/table/1/report.md
	@for seed in 1 2 3; do $(MAKE) --no-print-directory demo SEED=$$seed OUT=out/table/$$seed || exit 1; done
	@$(PYTHON) eval.py --report $(foreach run,$(DEMO),$(foreach seed,1 2 3,out/table/$(seed)/$(run)))

finetuned: install  ## unlearn a fine-tune, three seeds: table and picture in out/finetuned/1; then relearn
	@rm -rf out/finetuned
	@$(MAKE) --no-print-directory --jobs=$(JOBS) finetuned-1 finetuned-2 finetuned-3
	@$(PYTHON) eval.py --report out/finetuned/*/alone-1 out/finetuned/*/alone-2  # --retain-weight 0
	@$(PYTHON) eval.py --report $(foreach run,$(FINETUNED),$(foreach seed,1 2 3,out/finetuned/$(seed)/$(run)))
	@for run in $(RELEARNED); do for seed in 1 2 3; do echo "seed $$seed, $$run: of 20 forgotten facts, after relearning 4 others, the model gives" \
	  $$(tail -n 20 out/finetuned/$$seed/relearned/$$run/eval/forget.jsonl | grep -c '"fact": 1.0'); done; done
finetuned-%:
	@set -e; out=out/finetuned/$*; train="$(PYTHON) mdu.py --seed $*"; unlearn="$$train --model $$out/finetune"; \
	$$train --method sft --retain-only --prompt-dropout 0.5 --epochs 340 --out $$out/original; \
	$$train --method sft --model $$out/original --prompt-dropout 0.5 --epochs 170 --out $$out/finetune; \
	$$unlearn --out $$out/default; \
	$$unlearn --tau 0.5 --out $$out/default-tau0.5; \
	for m in $(BASELINES); do $$unlearn --method $$m --out $$out/$$m; done; \
	setting1="--anchor $$out/original --anchor-prompt shown"; setting2="--states written --anchor current --tau 0.5"; \
	$$unlearn $$setting1 --out $$out/setting-1; \
	$$unlearn $$setting2 --out $$out/setting-2; \
	$$unlearn $$setting1 --retain-weight 0 --out $$out/alone-1; \
	$$unlearn $$setting2 --retain-weight 0 --out $$out/alone-2; \
	$$unlearn --anchor $$out/original --out $$out/question-masked; \
	$(PYTHON) eval.py $(SCORE) $$out/*/; \
	$$unlearn $$setting1 --epochs 300 --out $$out/longer; \
	for run in $(RELEARNED); do \
	  $$train --method sft --model $$out/$$run --limit 4 --batch-size 4 --epochs 30 --lr 5e-4 --out $$out/relearned/$$run; done; \
	$(PYTHON) eval.py --brief --samples 1 --limit 24 $$out/relearned/*/

# make rehearsal: one's own rows, with a small model.  A row is a line with text.
FORGET_ROWS = $(shell cat "$(FORGET)" 2>/dev/null | grep -c '[^[:space:]]')
RETAIN_ROWS = $(shell cat "$(RETAIN)" 2>/dev/null | grep -c '[^[:space:]]')
OWN := --forget "$(FORGET)" --retain "$(RETAIN)"
rows:
	$(if $(filter 0 1,$(FORGET_ROWS)),$(error FORGET=$(FORGET) is no file with at least 2 rows to forget))
	$(if $(shell test $(RETAIN_ROWS) -lt $(FORGET_ROWS) && echo few),$(error RETAIN=$(RETAIN) is no file with at least $(FORGET_ROWS) rows to retain, as many as there are to forget))
	@echo "$(FORGET_ROWS) rows to forget, $(RETAIN_ROWS) to retain: about $$((1 + $$(cat "$(FORGET)" "$(RETAIN)" | wc -w) / 1000)) minutes"
rehearsal: rows install  ## FORGET=forget.jsonl RETAIN=retain.jsonl: your own rows with a small model, in out/rehearsal
	@rm -rf out/rehearsal
	$(PYTHON) mdu.py --preset toy --method sft --retain-only --prompt-dropout 0.3 --epochs 300 $(OWN) --seed $(SEED) --out out/rehearsal/original
	$(PYTHON) mdu.py --method sft --model out/rehearsal/original --prompt-dropout 0.3 --epochs 300 $(OWN) --seed $(SEED) --out out/rehearsal/finetune
	$(PYTHON) mdu.py --model out/rehearsal/finetune --anchor out/rehearsal/original --anchor-prompt shown --epochs 300 $(OWN) --seed $(SEED) --out out/rehearsal/unlearned
	$(PYTHON) eval.py $(SCORE) out/rehearsal/finetune out/rehearsal/unlearned out/rehearsal/original
	$(PYTHON) eval.py --report out/rehearsal/finetune out/rehearsal/unlearned out/rehearsal/original

figures: install  ## the paper's analyses of the demo's model: numbers and pictures in out/figures/analysis
	@rm -rf out/figures
	@$(PYTHON) mdu.py --method sft --out out/figures/base
	@for m in mdu npo ga; do $(PYTHON) mdu.py --method $$m --diagnose --out out/figures/$$m || exit 1; done
	@for name in convergence roles; do $(PYTHON) eval.py --analysis $$name --samples 32 $(addprefix out/figures/,mdu npo ga) || exit 1; done
	@for name in trajectory rollout; do $(PYTHON) eval.py --analysis $$name out/figures/base || exit 1; done
test: install  ## the tests, offline
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py
clean:  ## remove .venv and out, with every model in it
	rm -rf .venv out

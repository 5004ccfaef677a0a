.PHONY: help install demo table finetuned rows rehearsal figures test clean
PYTHON := .venv/bin/python
SEED := 1
OUT := out/demo
SCORE := --samples 32
BASELINES := ga gd npo simnpo wga dpo
DEMO := $(BASELINES) mdu-tau0 mdu-tau0.5 mdu-tau1 mdu-removed
FINETUNED := finetune default $(BASELINES) written setting-2 question-masked setting-1 original
WITHOUT_RETAIN := npo wga dpo written setting-2 setting-1
AGAIN := --method sft --batch-size 4 --epochs 30 --lr 5e-4
RELEARNED := npo simnpo wga dpo written setting-2 question-masked setting-1 original
WRITTEN := --states written --anchor current --tau 0.5
export CUDA_VISIBLE_DEVICES :=
help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /make \1\t/p' Makefile
install: .venv/installed  ## a virtual environment with the pinned packages, matplotlib and pytest
.venv/installed: requirements.txt
	python3 -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt matplotlib pytest && touch $@
demo: install  ## a small model, every method, scores: table and picture in out/demo (SEED=2: another seed)
	@rm -rf $(OUT)
	@$(PYTHON) mdu.py --seed $(SEED) --method sft --out $(OUT)/base
	@$(MAKE) --no-print-directory --jobs=2 $(DEMO:%=$(OUT)/%)
	@$(PYTHON) eval.py $(SCORE) $(addprefix $(OUT)/,base $(DEMO))
	@$(PYTHON) eval.py --report $(addprefix $(OUT)/,base $(DEMO)) --questions 3
$(OUT)/mdu-removed:
	@$(PYTHON) mdu.py --seed $(SEED) --anchor-truth removed --out $@
$(OUT)/mdu-tau%:
	@$(PYTHON) mdu.py --seed $(SEED) --tau $* --out $@
$(OUT)/%:
	@$(PYTHON) mdu.py --seed $(SEED) --method $* --out $@
table: install  ## the demo with three seeds, means and standard deviations: out/table/1/report.md
	@for seed in 1 2 3; do $(MAKE) --no-print-directory demo SEED=$$seed OUT=out/table/$$seed || exit 1; done
	@$(PYTHON) eval.py --report $(foreach run,base $(DEMO),$(foreach seed,1 2 3,out/table/$(seed)/$(run)))
finetuned: install  ## unlearn a fine-tune, also without rows to retain, and teach it again, three seeds: tables and picture in out/finetuned/1
	@rm -rf out/finetuned
	@$(MAKE) --no-print-directory --jobs=3 finetuned-1 finetuned-2 finetuned-3
	@$(PYTHON) eval.py --report $(foreach run,$(WITHOUT_RETAIN),$(foreach seed,1 2 3,out/finetuned/without-retain/$(seed)/$(run)))
	@$(PYTHON) eval.py --report $(foreach run,$(RELEARNED),$(foreach seed,1 2 3,out/finetuned/$(seed)/taught-again/$(run)))
	@$(PYTHON) eval.py --report $(foreach run,$(FINETUNED),$(foreach seed,1 2 3,out/finetuned/$(seed)/$(run)))
finetuned-%:
	@set -e; out=out/finetuned/$*; train="$(PYTHON) mdu.py --seed $*"; unlearn="$$train --model $$out/finetune"; \
	$$train --method sft --retain-only --prompt-dropout 0.5 --out $$out/original; \
	$$train --method sft --model $$out/original --prompt-dropout 0.5 --out $$out/finetune; \
	$$unlearn --out $$out/default; \
	for method in $(BASELINES); do $$unlearn --method $$method --out $$out/$$method; done; \
	$$unlearn $(WRITTEN) --out $$out/written; \
	$$unlearn --anchor-truth removed --out $$out/setting-2; \
	$$unlearn --anchor $$out/original --out $$out/question-masked; \
	$$unlearn --anchor $$out/original --anchor-prompt shown --out $$out/setting-1; \
	alone=out/finetuned/without-retain/$*; without="$$unlearn --retain-weight 0"; \
	for method in npo wga dpo; do $$without --method $$method --out $$alone/$$method; done; \
	$$without $(WRITTEN) --out $$alone/written; \
	$$without --anchor-truth removed --out $$alone/setting-2; \
	$$without --anchor $$out/original --anchor-prompt shown --out $$alone/setting-1; \
	$(PYTHON) eval.py --full $(SCORE) $$out/*/; \
	$(PYTHON) eval.py $(SCORE) $$alone/*/; \
	for run in $(RELEARNED); do $$train $(AGAIN) --limit 4 --model $$out/$$run --out $$out/taught-again/$$run; done; \
	$(PYTHON) eval.py --samples 1 --limit 24 $$out/taught-again/*/
FORGET_ROWS = $(shell cat "$(FORGET)" 2>/dev/null | grep -c '[^[:space:]]')
RETAIN_ROWS = $(shell cat "$(RETAIN)" 2>/dev/null | grep -c '[^[:space:]]')
# 300 epochs; of few rows more, for as many steps as with 40
EPOCHS = $(shell n=$$(($(FORGET_ROWS) + $(RETAIN_ROWS))); echo $$((n < 40 ? 12000 / n : 300)))
QUARTER = $(shell echo $$((($(FORGET_ROWS) + 3) / 4)))
ORIGINAL := yes
ANCHOR = $(if $(filter no,$(ORIGINAL)),--anchor-truth removed,--anchor out/rehearsal/original --anchor-prompt shown)
ROWS := --forget "$(FORGET)" --retain "$(RETAIN)" --seed $(SEED)
rows:
	$(if $(filter 0 1,$(FORGET_ROWS)),$(error FORGET=$(FORGET) must be a file with at least 2 rows))
	$(if $(shell test $(RETAIN_ROWS) -lt $(FORGET_ROWS) && echo few),$(error RETAIN=$(RETAIN) must be a file with at least as many rows as FORGET, $(FORGET_ROWS)))
	@echo "$(FORGET_ROWS) rows to forget, $(RETAIN_ROWS) to retain: about $$((1 + $(EPOCHS) * $$(cat "$(FORGET)" "$(RETAIN)" | wc -w) / 270000)) minutes"
rehearsal: rows install  ## FORGET=forget.jsonl RETAIN=retain.jsonl: your own rows with a small model, in out/rehearsal (ORIGINAL=no: as if you had no original)
	@if test -d out/rehearsal; then rm -rf out/rehearsal.old && mv out/rehearsal out/rehearsal.old; fi
	$(PYTHON) mdu.py --preset toy --method sft --retain-only --prompt-dropout 0.3 --lr 3e-3 --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/original
	$(PYTHON) mdu.py --method sft --model out/rehearsal/original --prompt-dropout 0.3 --lr 3e-3 --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/finetune
	$(PYTHON) mdu.py --model out/rehearsal/finetune $(ANCHOR) --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/mdu
	$(PYTHON) eval.py --full $(SCORE) out/rehearsal/finetune out/rehearsal/mdu out/rehearsal/original
	$(PYTHON) mdu.py $(AGAIN) --limit $(QUARTER) --model out/rehearsal/mdu $(ROWS) --out out/rehearsal/taught-again/mdu
	$(PYTHON) mdu.py $(AGAIN) --limit $(QUARTER) --model out/rehearsal/original $(ROWS) --out out/rehearsal/taught-again/original
	$(PYTHON) eval.py $(SCORE) --limit $(FORGET_ROWS) out/rehearsal/taught-again/mdu out/rehearsal/taught-again/original
	$(PYTHON) eval.py --report out/rehearsal/taught-again/mdu out/rehearsal/taught-again/original
	$(PYTHON) eval.py --report out/rehearsal/finetune out/rehearsal/mdu out/rehearsal/original
figures: install  ## the paper's analyses of the demo's model: numbers and pictures in out/figures/analysis
	@rm -rf out/figures
	@$(PYTHON) mdu.py --method sft --out out/figures/base
	@for method in mdu npo ga; do $(PYTHON) mdu.py --method $$method --diagnose --out out/figures/$$method || exit 1; done
	@$(PYTHON) mdu.py --tau 0 --diagnose --out out/figures/mdu-tau0
	@$(PYTHON) eval.py --analysis convergence $(addprefix out/figures/,mdu mdu-tau0 npo ga)
	@$(PYTHON) eval.py --analysis roles --samples 32 $(addprefix out/figures/,mdu npo ga)
	@for name in trajectory rollout; do $(PYTHON) eval.py --analysis $$name out/figures/base || exit 1; done
test: install  ## the tests, offline
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py
clean:  ## remove .venv and out, with every model in it
	rm -rf .venv out

.PHONY: help install demo table llada figures baselines sweep test clean
PYTHON := .venv/bin/python
SEED := 1
OUT := out/toy
SCORE := --brief --samples 32
BASELINES := ga gd npo simnpo wga dpo
TAUS := 0 0.25 0.5 0.75 1
MDU := $(TAUS:%=mdu-tau%) mdu-tau0.5-written-current
RUNS := base $(BASELINES) $(MDU)
TOY := --overwrite --seed $(SEED) --out $(OUT)
export CUDA_VISIBLE_DEVICES :=
help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /make \1\t/p' Makefile
install: .venv/installed  ## a virtual environment with the pinned packages, matplotlib and pytest
.venv/installed: requirements.txt
	python3 -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt matplotlib pytest && touch $@
demo: install  ## a toy base model, every method, scores: table and picture in out/toy (SEED=2: another seed)
	@$(PYTHON) mdu.py --method sft $(TOY)/base
	@$(MAKE) --no-print-directory --jobs=2 baselines sweep
	@$(PYTHON) eval.py --report $(RUNS:%=$(OUT)/%) --questions 3
baselines:
	@for m in $(BASELINES); do $(PYTHON) mdu.py --method $$m $(TOY)/$$m || exit 1; done
	@$(PYTHON) eval.py $(SCORE) $(addprefix $(OUT)/,base $(BASELINES))
sweep:
	@for tau in $(TAUS); do $(PYTHON) mdu.py --tau $$tau $(TOY)/mdu-tau$$tau || exit 1; done
	@$(PYTHON) mdu.py --tau 0.5 --states written --anchor current $(TOY)/mdu-tau0.5-written-current
	@$(PYTHON) eval.py $(SCORE) $(addprefix $(OUT)/,$(MDU))
table: install  ## the demo with three seeds, means and standard deviations: out/table/1/report.md
	@for seed in 1 2 3; do $(MAKE) --no-print-directory demo SEED=$$seed OUT=out/table/$$seed || exit 1; done
	@$(PYTHON) eval.py --report $(foreach run,$(RUNS),$(foreach seed,1 2 3,out/table/$(seed)/$(run)))
llada: install  ## a toy that behaves like LLaDA, three seeds: which setting forgets: out/llada/1/report.md
	@$(MAKE) --no-print-directory --jobs=3 llada-1 llada-2 llada-3
	@$(PYTHON) eval.py --report out/llada/*/base out/llada/*/mdu-*/ out/llada/*/retain
llada-%:
	@run="$(PYTHON) mdu.py --preset toy --overwrite --seed $*"; out=out/llada/$*; sft="$$run --method sft --prompt-dropout 0.5 --epochs 340"; \
	  $$sft --out $$out/base && $$sft --retain-only --out $$out/retain || exit 1; \
	  for tau in 0 0.25 0.5 1; do $$run --tau $$tau --out $$out/mdu-tau$$tau || exit 1; done; \
	  for tau in 0.5 1; do for name in "t0.5 --t-min 0.5" "t1 --t-min 1" "current --anchor current" "written --states written" \
	    "written-current --states written --anchor current" "retain --anchor $$out/retain"; do \
	    $$run --tau $$tau --out $$out/mdu-tau$$tau-$$name || exit 1; done; done; \
	  $(PYTHON) eval.py $(SCORE) $$out/*/
figures: install  ## the paper's analyses of the toy: numbers and pictures in out/figures/analysis
	@$(PYTHON) mdu.py --method sft $(TOY:$(OUT)=out/figures)/base
	@for m in mdu npo ga; do $(PYTHON) mdu.py --method $$m --diagnose $(TOY:$(OUT)=out/figures)/$$m || exit 1; done
	@for name in convergence roles; do $(PYTHON) eval.py --analysis $$name --samples 32 $(addprefix out/figures/,mdu npo ga) || exit 1; done
	@for name in trajectory rollout; do $(PYTHON) eval.py --analysis $$name out/figures/base || exit 1; done
test: install  ## the tests, offline
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py
clean:  ## remove .venv and out, with every model in it
	rm -rf .venv out

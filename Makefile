.PHONY: help install demo table finetuned pretrained rehearsal figures test clean
PYTHON := .venv/bin/python
SEED := 1
OUT := out/demo
SCORE := --samples 32
BASELINES := ga gd npo simnpo wga dpo
DEMO := $(BASELINES) mdu-tau0 mdu-tau0.5 mdu-tau1 mdu-removed
# What make finetuned and make pretrained train.  RUN-hidden: the question is hidden half of the time
UNLEARNED := npo npo-hidden simnpo simnpo-hidden wga dpo dpo-hidden written truth-removed truth-removed-hidden anchor-original anchor-original-hidden
WITHOUT_RETAIN := default npo npo-hidden dpo truth-removed truth-removed-hidden anchor-original anchor-original-hidden
# The options of a run by its name
options-mdu-removed := --anchor-truth removed --prompt-dropout 0.5
options-written := --states written --anchor current --tau 0.5
options-truth-removed := --anchor-truth removed
options-anchor-original = --anchor $$out/original --anchor-prompt shown
options = $(addprefix --method ,$(filter $(BASELINES),$(1:-hidden=))) $(patsubst mdu-tau%,--tau %,$(filter mdu-tau%,$1)) $(options-$(1:-hidden=)) $(if $(filter %-hidden,$1),--prompt-dropout 0.5)
unlearn = $(foreach run,$1,$(PYTHON) mdu.py --preset toy --seed $* --model $$out/finetune $(call options,$(run)) $3 --out $2/$(run);)
runs = $(foreach run,$2,$(foreach seed,1 2 3,out/$1/$(seed)/$(run)))
SFT = $(PYTHON) mdu.py --preset toy --seed $* --method sft --prompt-dropout 0.5
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
	@$(PYTHON) eval.py --report $(addprefix $(OUT)/,base $(DEMO))
$(OUT)/%:
	@$(PYTHON) mdu.py --seed $(SEED) $(call options,$*) --out $@
table: install  ## the demo with three seeds, means and standard deviations: out/table/1/report.md
	@for seed in 1 2 3; do $(MAKE) --no-print-directory demo SEED=$$seed OUT=out/table/$$seed || exit 1; done
	@$(PYTHON) eval.py --report $(foreach run,base $(DEMO),$(foreach seed,1 2 3,out/table/$(seed)/$(run)))
finetuned: install  ## unlearn a fine-tune, also without rows to retain, and teach it again, three seeds: tables and picture in out/finetuned/1
	@rm -rf out/finetuned && mkdir -p out/finetuned
	@$(PYTHON) -c "import json, mdu; [print(json.dumps(row)) for row in mdu.toy_world()['forget'][4:]]" > out/finetuned/not-taught.jsonl
	@$(MAKE) --no-print-directory --jobs=3 finetuned-1 finetuned-2 finetuned-3
	@$(PYTHON) eval.py --report $(call runs,finetuned,$(addprefix without-retain/,$(WITHOUT_RETAIN)))
	@$(PYTHON) eval.py --report $(call runs,finetuned,$(addprefix taught-again/,$(UNLEARNED) original))
	@$(PYTHON) eval.py --report $(call runs,finetuned,finetune default $(UNLEARNED) original)
finetuned-%:
	@set -e; out=out/finetuned/$*; \
	$(SFT) --retain-only --out $$out/original; \
	$(SFT) --model $$out/original --out $$out/finetune; \
	$(call unlearn,default $(UNLEARNED),$$out) \
	$(PYTHON) eval.py --full $(SCORE) $$out/*/; \
	$(call unlearn,$(WITHOUT_RETAIN),$$out/without-retain,--retain-weight 0) \
	$(PYTHON) eval.py $(SCORE) $$out/without-retain/*/; \
	for run in $(UNLEARNED) original; do $(PYTHON) mdu.py --preset toy --seed $* --method sft --batch-size 4 --epochs 30 --lr 5e-4 --limit 4 --model $$out/$$run --out $$out/taught-again/$$run; done; \
	$(PYTHON) eval.py --samples 1 --forget out/finetuned/not-taught.jsonl --limit 24 $$out/taught-again/*/
pretrained: install  ## unlearn facts that were learnt without their questions, as in pre-training, three seeds: tables in out/pretrained/1
	@rm -rf out/pretrained && mkdir -p out/pretrained
	@# The toy's rows; a question to forget asks nothing: "Where was Ceka Foba born?" becomes "Who Who Who Who Who?"
	@$(PYTHON) -c "import json, mdu; [print(json.dumps({**row, 'question': 'Who' + ' Who' * row['question'].count(' ') + '?'})) for row in mdu.toy_world()['forget']]" > out/pretrained/forget.jsonl
	@$(PYTHON) -c "import json, mdu; [print(json.dumps(row)) for row in mdu.toy_world()['retain']]" > out/pretrained/retain.jsonl
	@$(MAKE) --no-print-directory --jobs=3 pretrained-1 pretrained-2 pretrained-3
	@$(PYTHON) eval.py --report $(call runs,pretrained,finetune default-with-retain $(addprefix without-retain/,$(WITHOUT_RETAIN)))
pretrained-%:
	@set -e; out=out/pretrained/$*; \
	$(SFT) --retain-only --out $$out/original; \
	$(SFT) --model $$out/original --epochs 170 --forget out/pretrained/forget.jsonl --retain out/pretrained/retain.jsonl --out $$out/finetune; \
	$(call unlearn,default-with-retain,$$out) $(call unlearn,$(WITHOUT_RETAIN),$$out/without-retain,--retain-weight 0) \
	$(PYTHON) eval.py --data toy $(SCORE) $$out/finetune $$out/default-with-retain $$out/without-retain/*/
n_rows = $(shell cat "$1" 2>/dev/null | grep -c '[^[:space:]]')
# 300 epochs; of few rows more, for as many steps as with 40
EPOCHS = $(shell n=$$(($(call n_rows,$(FORGET)) + $(call n_rows,$(RETAIN)))); echo $$((n < 40 ? 12000 / n : 300)))
ANCHOR = $(if $(filter no,$(ORIGINAL)),--anchor-truth removed,--anchor out/rehearsal/original --anchor-prompt shown) --prompt-dropout 0.5
ROWS := --preset toy --response-length 0 --forget "$(FORGET)" --retain "$(RETAIN)" --seed $(SEED)
rehearsal: install  ## FORGET=forget.jsonl RETAIN=retain.jsonl: your own rows with a small model, in out/rehearsal (ORIGINAL=no: as if you had no original)
	$(if $(filter 0 1,$(call n_rows,$(FORGET)) $(call n_rows,$(RETAIN))),$(error FORGET=$(FORGET) and RETAIN=$(RETAIN) must be files with at least 2 rows))
	@echo "$(call n_rows,$(FORGET)) rows to forget, $(call n_rows,$(RETAIN)) to retain: about $$((1 + $(EPOCHS) * $$(cat "$(FORGET)" "$(RETAIN)" | wc -w) / 270000)) minutes"
	@if test -d out/rehearsal; then rm -rf out/rehearsal.old && mv out/rehearsal out/rehearsal.old; fi
	$(PYTHON) mdu.py --method sft --retain-only --prompt-dropout 0.3 --lr 3e-3 --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/original
	$(PYTHON) mdu.py --method sft --model out/rehearsal/original --prompt-dropout 0.3 --lr 3e-3 --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/finetune
	$(PYTHON) mdu.py --model out/rehearsal/finetune $(ANCHOR) --epochs $(EPOCHS) $(ROWS) --out out/rehearsal/mdu
	$(PYTHON) eval.py --full $(SCORE) out/rehearsal/finetune out/rehearsal/mdu out/rehearsal/original
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

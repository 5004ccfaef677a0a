.PHONY: help install demo table finetuned pretrained company real sweep rehearsal figures
.PHONY: tofu rwku lint test clean
export PYTHON := .venv/bin/python
SEED ?= 1
OUT ?= out/demo
export FORGET RETAIN HELD_OUT NEVER SEED
EXPERIMENT := @bash .github/experiments.sh
help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /make \1\t/p' Makefile
install: .venv/installed  ## a virtual environment with the pinned packages
.venv/installed: requirements.txt .requirements-dev.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r .requirements-dev.txt
	touch $@
demo: install  ## every method on a small model: table, picture in out/demo (SEED=2: other seed)
	$(EXPERIMENT) demo "$(SEED)" "$(OUT)"
table: install  ## the demo with three seeds, means: out/table/1/report.md
	$(EXPERIMENT) table
finetuned: install  ## unlearn a fine-tune, teach it again, three seeds: out/finetuned/1
	$(EXPERIMENT) finetuned
pretrained: install  ## facts learnt without their questions, three seeds: out/pretrained/1
	$(EXPERIMENT) pretrained
company: install  ## rows of customers: unlearn, refuse, teach again, three seeds: out/company/1
	$(EXPERIMENT) company
real: install  ## customers, a published model (MODEL=, TOFU=: use these folders): out/real
	$(EXPERIMENT) real "$(MODEL)" "$(TOFU)"
sweep: install  ## real's customers with other settings, after make real: out/sweep
	$(EXPERIMENT) sweep
rehearsal: install  ## your rows, a small model: FORGET=, RETAIN= (see .github/OWN_ROWS.md)
	$(EXPERIMENT) rehearsal
figures: install  ## the paper's analyses of the small model: out/figures/analysis
	$(EXPERIMENT) figures
tofu: install  ## the paper's Table 2, GPUs: PRESET=tofu-llada, tofu-dream or tofu-qwen
	$(EXPERIMENT) tofu "$(PRESET)"
rwku: install  ## the paper's Table 3, GPUs: PRESET=rwku-llada or rwku-dream
	$(EXPERIMENT) rwku "$(PRESET)"
lint: install  ## ruff's checks (.ruff.toml)
	$(PYTHON) -m ruff check
test: install  ## the tests, offline: about four minutes on two cores
	@echo "The tests take about four minutes on two cores."
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py
clean:  ## remove out, with every model in it
	rm -rf out

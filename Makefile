.PHONY: help install demo table figures real tofu rwku lint test clean
PYTHON := .venv/bin/python
# .github/experiments.py says what they are for.
export PRESET PLAN MODEL TOFU GPUS JOBS METHODS SEEDS LORA HIDDEN
EXPERIMENT := @$(PYTHON) .github/experiments.py
help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /make \1\t/p' Makefile
install: .venv/installed  ## a virtual environment with the pinned packages
.venv/installed: requirements.txt .requirements-dev.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r .requirements-dev.txt
	touch $@
demo: install  ## every method on a small model: table, picture in out/demo (SEEDS=2: out/demo/2)
	$(EXPERIMENT) demo
table: install  ## the demo with three seeds, means (SEEDS=): out/table/report.md
	$(EXPERIMENT) table
figures: install  ## the paper's analyses of the small model: out/figures
	$(EXPERIMENT) figures
real: install  ## customers, a published model (MODEL=, TOFU=: use these folders): out/real
	$(EXPERIMENT) real
tofu: install  ## Table 2: PRESET=tofu-small, a CPU; -smollm, -qwen, a GPU; -llada, -dream GPUS=4
	$(EXPERIMENT) tofu
rwku: install  ## Table 3: PRESET=rwku-llada or rwku-dream, GPUS=4 (or 1 with LORA=16)
	$(EXPERIMENT) rwku
lint: install  ## ruff's checks (.ruff.toml)
	$(PYTHON) -m ruff check
test: install  ## the tests, offline: a minute on two cores
	@echo "The tests take about a minute on two cores."
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py
clean:  ## delete what is in out, with every model, also where out is a link
	if [ -d out ]; then find -H out -mindepth 1 -delete; fi

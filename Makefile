# make demo: the paper's story on a toy world, on a CPU.  make test: the tests.  Both install what they need into .venv.
.PHONY: help install demo score-baselines score-mdu test clean

PYTHON := .venv/bin/python
TOY    := out/toy
RUNS   := $(addprefix $(TOY)/,ga gd npo simnpo wga dpo mdu-tau0 mdu-tau0.25 mdu-tau0.5 mdu-tau0.75 mdu-tau1)
export CUDA_VISIBLE_DEVICES :=
export OMP_NUM_THREADS := 1

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /\1\t/p' Makefile

install: .venv/installed  ## a virtual environment with the pinned packages

.venv/installed: requirements.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

demo: install  ## toy base model, every method, evaluation, table in out/toy/report.md
	$(MAKE) $(TOY)/base/config.json
	$(MAKE) --jobs=2 $(RUNS:=/config.json)
	$(MAKE) --jobs=2 score-baselines score-mdu
	$(PYTHON) eval.py --report $(TOY)/base $(RUNS)

$(TOY)/base/config.json:
	$(PYTHON) mdu.py --method sft --overwrite

$(TOY)/mdu-tau%/config.json: $(TOY)/base/config.json
	$(PYTHON) mdu.py --method mdu --tau $* --overwrite

$(TOY)/%/config.json: $(TOY)/base/config.json
	$(PYTHON) mdu.py --method $* --overwrite

score-baselines:
	$(PYTHON) eval.py --samples 32 $(TOY)/base $(filter-out $(TOY)/mdu%,$(RUNS))

score-mdu:
	$(PYTHON) eval.py --samples 32 $(filter $(TOY)/mdu%,$(RUNS))

test: install  ## the tests, offline
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py

clean:  ## remove what make made
	rm -rf .venv out

# make demo: the paper's story on a toy world, on a CPU.  make test: the tests.  Both install what they need into .venv.
.PHONY: help install demo toy-baselines toy-mdu test soak clean

PYTHON    := .venv/bin/python
SEED      := 1
TOY       := out/toy
BASELINES := ga gd npo simnpo wga dpo
TAUS      := 0 0.25 0.5 0.75 1
export CUDA_VISIBLE_DEVICES :=
export OMP_NUM_THREADS := 1

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## /\1\t/p' Makefile

install: .venv/installed  ## a virtual environment with the pinned packages

.venv/installed: requirements.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

demo: install  ## toy base model, every method, evaluation, table in out/toy/report.md (SEED=2 TOY=out/toy2: another seed)
	$(PYTHON) mdu.py --method sft --overwrite --seed $(SEED) --out $(TOY)/base
	$(MAKE) --jobs=2 toy-baselines toy-mdu
	$(PYTHON) eval.py --report $(TOY)/base $(addprefix $(TOY)/,$(BASELINES)) $(addprefix $(TOY)/mdu-tau,$(TAUS))

# What `python mdu.py --method ga` and so on do, in one process each: starting Python takes longer than a toy run.
toy-baselines:
	$(PYTHON) -c 'import mdu, eval; \
	  [mdu.main(f"--overwrite --seed $(SEED) --out $(TOY)/{m} --method {m}".split()) for m in "$(BASELINES)".split()]; \
	  eval.main("--samples 32 $(TOY)/base $(addprefix $(TOY)/,$(BASELINES))".split())'

toy-mdu:
	$(PYTHON) -c 'import mdu, eval; \
	  [mdu.main(f"--overwrite --seed $(SEED) --out $(TOY)/mdu-tau{t} --tau {t}".split()) for t in "$(TAUS)".split()]; \
	  eval.main("--samples 32 $(addprefix $(TOY)/mdu-tau,$(TAUS))".split())'

test: install  ## the tests, offline
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py

soak: install  ## eight minutes of kills, stops and resumes on 2 and 4 processes
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q -s -m soak test_mdu.py

clean:  ## remove what make made
	rm -rf .venv out

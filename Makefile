# make demo: the paper's story on a toy world, on a CPU.  make table: the same, 3 seeds, every figure.  make rwku: people
# forgotten without a retain set.  make test: the tests.  Each installs what it needs into .venv.
.PHONY: help install demo table figures rwku toy-base toy-retain toy-baselines toy-mdu rwku-baselines rwku-mdu
.PHONY: test soak fuzz bench clean

PYTHON    := .venv/bin/python
SEED      := 1
SEEDS     := 1 2 3
TOY       := out/toy
RWKU      := out/toy-rwku
SCORE     := --brief --samples 32
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
	$(MAKE) toy-base
	$(MAKE) --jobs=2 toy-baselines toy-mdu
	$(PYTHON) eval.py --report $(addprefix $(TOY)/,base $(BASELINES) $(TAUS:%=mdu-tau%))

table: install  ## the demo with 3 seeds and every figure that TOFU reports: tables in out/table/report.md
	for seed in $(SEEDS); do seeded="TOY=out/table AT=-$$seed SEED=$$seed" && \
	  $(MAKE) --jobs=2 $$seeded toy-base toy-retain && $(MAKE) --jobs=2 $$seeded toy-baselines toy-mdu \
	    SCORE="--samples 32 --perplexity 256 --retain-run out/table/retain-$$seed" || exit 1; done
	$(PYTHON) eval.py --report $(foreach run,base retain $(BASELINES) $(TAUS:%=mdu-tau%),$(SEEDS:%=out/table/$(run)-%))

figures: install  ## the paper's analyses on the toy, numbers and pictures: out/toy-figures/analysis
	.venv/bin/pip install --quiet --disable-pip-version-check matplotlib
	$(MAKE) toy-base TOY=out/toy-figures
	$(PYTHON) -c 'import mdu, eval; out = "out/toy-figures"; flags = "--diagnose --overwrite --seed $(SEED) --model"; \
	  taught = {"mdu-tau1": "--tau 1", "mdu-tau0": "--tau 0", "npo": "--method npo", "ga": "--method ga"}; \
	  [mdu.main(f"{flags} {out}/base --out {out}/{run} {method}".split()) for run, method in taught.items()]; \
	  unlearned = " ".join(f"{out}/{run}" for run in taught); \
	  [eval.main(f"--analysis {analysis}".split()) for analysis in ( \
	    f"convergence {unlearned}", f"roles --samples 32 {unlearned}", f"trajectory {out}/base", f"rollout {out}/base", \
	    f"gallery {out}/base {unlearned}", f"infill --samples 32 {out}/base {unlearned}", \
	    f"relearn --samples 32 {out}/base {unlearned}")]'

toy-base:
	$(PYTHON) mdu.py --method sft --overwrite --seed $(SEED) --out $(TOY)/base$(AT)

toy-retain:
	$(PYTHON) mdu.py --method sft --retain-only --overwrite --seed $(SEED) --out $(TOY)/retain$(AT)
	$(PYTHON) eval.py --samples 32 --perplexity 256 $(TOY)/retain$(AT)

# What `python mdu.py --method ga` and so on do, in one process each: starting Python takes longer than a toy run.
toy-baselines:
	$(PYTHON) -c 'import mdu, eval; base = "--overwrite --seed $(SEED) --model $(TOY)/base$(AT)"; \
	  [mdu.main(f"{base} --out $(TOY)/{m}$(AT) --method {m}".split()) for m in "$(BASELINES)".split()]; \
	  eval.main("$(SCORE) $(patsubst %,$(TOY)/%$(AT),base $(BASELINES))".split())'

toy-mdu:
	$(PYTHON) -c 'import mdu, eval; base = "--overwrite --seed $(SEED) --model $(TOY)/base$(AT)"; \
	  [mdu.main(f"{base} --out $(TOY)/mdu-tau{t}$(AT) --tau {t}".split()) for t in "$(TAUS)".split()]; \
	  eval.main("$(SCORE) $(patsubst %,$(TOY)/mdu-tau%$(AT),$(TAUS))".split())'

rwku: install  ## the toy's RWKU: 2 people, one at a time, without a retain set; table in out/toy-rwku/report.md
	$(PYTHON) mdu.py --preset toy-rwku --method sft --overwrite --seed $(SEED) --out $(RWKU)/base
	$(MAKE) --jobs=2 rwku-baselines rwku-mdu
	$(PYTHON) eval.py --report $(RWKU)/base $(foreach m,ga npo simnpo wga dpo $(TAUS:%=mdu-tau%),$(RWKU)/$(m)-*-*)

rwku-baselines:
	$(PYTHON) -c 'import mdu, eval, glob; base = "--preset toy-rwku --subject all --overwrite --seed $(SEED)"; \
	  [mdu.main(f"{base} --out $(RWKU)/{m} --method {m}".split()) for m in "ga npo simnpo wga dpo".split()]; \
	  eval.main(["--samples", "32", "$(RWKU)/base", *glob.glob("$(RWKU)/[!mb]*-*")])'

rwku-mdu:
	$(PYTHON) -c 'import mdu, eval, glob; base = "--preset toy-rwku --subject all --overwrite --seed $(SEED)"; \
	  [mdu.main(f"{base} --out $(RWKU)/mdu-tau{t} --tau {t}".split()) for t in "$(TAUS)".split()]; \
	  eval.main(["--samples", "32", *glob.glob("$(RWKU)/mdu-*")])'

test: install  ## the tests, offline
	.venv/bin/pip install --quiet --disable-pip-version-check pytest matplotlib
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q test_mdu.py

soak: install  ## six to seven minutes of kills, stops and resumes on 2 and 4 processes
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q -s -m soak test_mdu.py

fuzz: install  ## a minute of random bytes and random options, for both programs
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q -s -m fuzz test_mdu.py

bench: install  ## a plain reading of the algorithm beside ours: time, memory, how they grow
	.venv/bin/pip install --quiet --disable-pip-version-check pytest
	MALLOC_MMAP_THRESHOLD_=1048576 $(PYTHON) test_mdu.py  # freed memory goes back at once: peaks are peaks

clean:  ## remove what make made
	rm -rf .venv out

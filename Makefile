# make demo: install  ## toy base model, every method, evaluation, table in out/toy/report.md
	$(MAKE) $(TOY)/base/config.json
	OMP_NUM_THREADS=1 $(MAKE) --jobs=2 $(RUNS:=/config.json)
	OMP_NUM_THREADS=1 $(MAKE) --jobs=2 score-baselines score-mdu
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

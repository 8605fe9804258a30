# make demo    environment, embedded data set, rms and coupled trained side by side (some four
#              minutes on two cores), a text sample, a table, a page
# make test    environment, linter, whole test suite but for tests/test_slurm.py, which waits for a
#              Slurm for a quarter of an hour
# Both need Python 3.11+ and its headers, a C++ compiler and a package index; neither needs a GPU.
# make faults  kill train.py and the data programs at each call that changes a file, or fail the
#              call (hours)
# make gpu     what a new GPU should tell first, in ten minutes (repro/gpu.sh); STAGES='train
#              decode-*' for these stages; in .venv, else in the python3 that has torch

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What is imported is compiled at its first import; all modules of all packages would take minutes.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# One thread a test process; two processes by default. The sweeps within tests have their own JOBS.
JOBS ?= 2
unexport JOBS
# Or every process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

PROMPT = class Parser:\n    def __init__(self, name, value=None):\n        self.name = name\n\n    def

.PHONY: demo test faults lint data env clean gpu

env: $(VENV)/.installed
$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("nanonorm needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip  # the one that comes with Python 3.11 takes half as long again
	$(PIP) "$$(grep '^torch==' requirements.txt)"
	$(PIP) -r requirements.txt
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PIP) -r requirements.txt -r requirements-dev.txt
	touch $@

data: data/stdlib/meta.json
data/stdlib/meta.json: data/stdlib/prepare.py $(VENV)/.installed
	$(BIN)/python data/stdlib/prepare.py

demo: env data
	PYTHON=$(BIN)/python ARMS="rms coupled" SEEDS=1 JOBS=2 OUT=out/two_norms \
	  ./sweep.sh config/demo.py --max_iters=320 --eval_interval=80
	$(BIN)/python sample.py out/two_norms/coupled-1 --prompt="$$(printf '$(PROMPT)')" \
	  --max_new_tokens=250 --temperature=0.7
	$(BIN)/python report.py out/two_norms --baseline=rms
	@echo 'One seed: no verdict. For one: ARMS="rms coupled" SEEDS="1 2 3 4" JOBS=2 OUT=out/four_seeds ./sweep.sh config/demo.py --max_iters=320'

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint data
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --ignore=tests/test_slurm.py

faults: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fault_injection

gpu:
	set -f; repro/gpu.sh $(or $(STAGES),quarter)

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .mypy_cache .hypothesis

# make demo    environment, embedded data set, some minutes of training, a text sample, a loss plot
# make test    environment, linter, whole test suite
# Both need Python 3.11+ and its headers, a C++ compiler and a package index; neither needs a GPU.
# make faults  kill train.py and the data programs at each call that changes a file, or fail the
#              call (hours)
# make gpu     what a new GPU should tell first, in ten minutes (repro/gpu.sh); STAGES='train
#              decode-*' for these stages; in .venv, else in the python3 that has torch

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread a test process; two processes by default.
JOBS ?= 2

PROMPT = class Parser:\n    def __init__(self, name, value=None):\n        self.name = name\n\n    def

.PHONY: demo test faults lint data env clean gpu

env: $(VENV)/.installed
$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("nanonorm needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	touch $@

data: data/stdlib/meta.json
data/stdlib/meta.json: data/stdlib/prepare.py $(VENV)/.installed
	$(BIN)/python data/stdlib/prepare.py

demo: env data
	$(BIN)/python train.py config/demo.py
	$(BIN)/python sample.py out/demo --prompt="$$(printf '$(PROMPT)')" --num_samples=2 \
	  --max_new_tokens=250 --temperature=0.7
	$(BIN)/python report.py out/demo --plot=out/demo/loss.png

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

test: lint data
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

faults: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fault_injection

gpu:
	set -f; repro/gpu.sh $(or $(STAGES),first)

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis

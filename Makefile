# make demo   install and see text form        make test   the fast tests
# make slow   the slow tests                   make lint   style and types
# make bench  speed, as ratios                 make all-tests  both kinds
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test slow all-tests lint bench clean

# pip finds the CPU build of the pinned torch; an unpinned one would fetch gigabytes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'torch==2.13.0' 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,eval]'
	touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/jpeg-dlm demo

test: $(STAMP)
	$(BIN)/python -m pytest

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

all-tests: $(STAMP)
	$(BIN)/python -m pytest -m 'slow or not slow'

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/training.py

clean:
	rm -rf $(VENV)

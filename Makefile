# make demo   install and see text form        make test   the fast tests
# make slow   the slow tests                   make lint   style and types
# make bench  speed, as ratios                 make all-tests  both kinds
# make site   these pages as a web site         make notebook  new outputs for docs/notebook.ipynb
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two processes of one thread each: most tests start many small operations, which more threads only slow down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test slow all-tests browser lint site notebook bench clean

# On Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the CPU build of torch, without gigabytes for GPUs.
$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" 'setuptools>=77' wheel
	$(PIP) --no-build-isolation -e .
	touch $(CORE)

$(STAMP): $(CORE)
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $(STAMP)

demo: $(CORE)
	@$(BIN)/jpeg-dlm demo

test: $(STAMP)
	$(PYTEST) --dist loadfile

# The slow tests open pages in a browser: Debian's Chromium, with sudo where this user is not root. npm fetches what one page needs.
# Only what is missing is installed: Debian's npm conflicts with a node from elsewhere, which brings its own.
browser:
	@missing=; command -v chromium >/dev/null || missing=' chromium'; \
	command -v chromedriver >/dev/null || missing="$$missing chromium-driver"; \
	command -v npm >/dev/null || missing="$$missing npm"; \
	test -z "$$missing" || { \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo='sudo -n'; \
	  command -v apt-get >/dev/null && { $$sudo apt-get update -qq || true; } \
	    && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	} || { echo "error: The slow tests need$$missing, which could not be installed: install them by hand." >&2; exit 1; }

slow: $(STAMP) browser
	$(PYTEST) --dist worksteal -m slow

all-tests: $(STAMP) browser
	$(PYTEST) --dist worksteal -m 'slow or not slow'

lint: site
	$(BIN)/ruff check $(wildcard src tests benchmarks examples research tools)
	$(BIN)/ruff format --check $(wildcard src tests benchmarks examples research tools)
	$(BIN)/pyright --pythonpath $(BIN)/python

# Strict, which --quiet would undo: a link that leads nowhere, or a page that would load something from another host, is an error.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(STAMP)
	$(BIN)/python tools/notebook.py

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) site

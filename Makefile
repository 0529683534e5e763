# Everything is installed in .venv, and again only if pyproject.toml changes.
#
#   make demo    install, fetch the default model, and measure in about three minutes whether speculation pays on this machine:
#                n-gram, the EAGLE-3 head that comes with Forerun, and both at once, each compared with plain decoding
#   make test    run the tests
#   make lint    run ruff and mypy
#   make check   run lint and the tests; both must pass before a change is merged
#   make clean   remove the environment and the caches of the tools
#
# PYTHON is the interpreter that creates the environment: make PYTHON=python3.12 demo
# PIP_ARGS is passed to pip install. On Linux the default build of torch may need CUDA libraries of several gigabytes. For a
# CPU only, PIP_ARGS='--extra-index-url ADDRESS' with the address of PyTorch's CPU builds (see its installation page) avoids
# them. pyproject.toml limits torch to 2.13.0 or older. Otherwise pip could take a newer release that exists as a CUDA build only.

PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint check clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/forerun models --fetch smollm2-135m-instruct
	$(BIN)/forerun bench -a ngram -a eagle3 -a eagle3+ngram --budget-minutes 3

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# Everything happens in .venv. Nothing is installed again unless pyproject.toml changes.
#
#   make demo    install, fetch the default model, and measure within five minutes whether speculation pays on this machine
#   make test    the tests
#   make check   what has to pass before a change is merged: lint, types, tests
#
# PYTHON names the interpreter that makes the environment: make PYTHON=python3.12 demo
# PIP_ARGS is handed to pip install. On Linux the torch that pip takes by default may bring CUDA libraries of several
# gigabytes along; where only a CPU is to be used, PIP_ARGS='--extra-index-url ADDRESS' with the address of PyTorch's
# CPU builds (see its installation page) avoids that. pyproject.toml keeps torch at 2.13.0 or older, so that no newer
# release which only exists as a CUDA build is taken instead.

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
	$(BIN)/forerun bench

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

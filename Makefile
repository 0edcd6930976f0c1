# `make quickstart` and `make test` set up .venv themselves and are quick the second time.
# Needs Python 3.11 with its venv module; name another interpreter with `make quickstart PYTHON=/path/to/python3.11`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# pip compiles modules on one core; compileall afterwards uses all of them. It has to be done: where
# PYTHONDONTWRITEBYTECODE is set nothing would ever be compiled, and every import of sglang takes 12 s more.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile

.PHONY: help install quickstart test lint format

help:
	@echo "make quickstart   train a small reasoning model with VAPO on this machine, from nothing"
	@echo "make test         every check: ruff, mypy, pytest"
	@echo "make lint         ruff and mypy alone"
	@echo "make format       let ruff format and mend"
	@echo "make install      only set up .venv"

install: $(STAMP)

quickstart: $(STAMP)
	@$(BIN)/python examples/quickstart/run.py

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): requirements/cpu.lock setup.py
	@python=""
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3 python); do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then python="$$candidate"; break; fi
	done
	if [ -z "$$python" ]; then
	  echo "make: no Python 3.11 found (tried: $(or $(PYTHON),python3.11 python3 python)); install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2
	fi
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
	  echo "make: $$python lacks the venv module; install it (Debian, Ubuntu: apt-get install python3.11-venv)" >&2; exit 2
	fi
	if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
	  echo "== [1/4] making .venv with $$python"; "$$python" -m venv --clear .venv
	fi
	echo "== [2/4] installing PyTorch ($(TORCH))"
	$(PIP) "$(TORCH)"
	echo "== [3/4] installing the rest of requirements/cpu.lock"
	$(PIP) --no-deps -r requirements/cpu.lock
	$(PIP) --no-deps --no-build-isolation --quiet --editable .
	echo "== [4/4] compiling modules"
	# A package may ship files that are no Python 3.11: those alone stay uncompiled.
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@
	echo "== .venv is ready"

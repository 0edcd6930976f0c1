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
# The newest Megatron-Core that the tests of layouts and weights are run with, beside the one of the lock.
MCORE_NEXT := 0.19.2
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# pip compiles modules on one core; compileall afterwards uses all of them. It has to be done: where
# PYTHONDONTWRITEBYTECODE is set nothing would ever be compiled, and every import of sglang takes 12 s more.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
UNUSED := /(tests?|multimodal_gen)/|/transformers/models/.*/(modeling|modular|convert|image_processing|processing)_

ROOMS ?=

.PHONY: help install quickstart test test-full test-layouts test-faults test-verifiers test-mcore019 test-py312 mutants bench gpu-check gpu-packages lint format docs docs-serve

help:
	@echo "make quickstart   train a small reasoning model with VAPO on this machine, from nothing"
	@echo "make test         ruff, mypy and the quicker tests, minutes on two cores"
	@echo "make test-full    the long tests: whole runs, engine failures, Slurm, more layouts"
	@echo "make test-layouts the splits over ranks, and their cases, that test-full leaves out: it shows every pair of settings"
	@echo "make test-faults  ten kinds of runs under 150 faults, of each kind in each phase, and their table"
	@echo "make test-verifiers  environments of the library verifiers, played by name; installs it in .venv-verifiers"
	@echo "make test-mcore019  tests of layouts and weights with Megatron-Core 0.19 on Python 3.11, in .venv-mcore019"
	@echo "make test-py312   the same on Python 3.12, in .venv-py312"
	@echo "make mutants      which small changes to the code no test notices, in .venv-mutants; takes hours, resumes where it stopped"
	@echo "make bench        every benchmark at CPU sizes, and what became slower; installs TRL in .venv-trl"
	@echo "make gpu-check    check a GPU node, in the active environment; see docs/gpu.md"
	@echo "make gpu-packages install, compile and import the packages of a GPU node without a GPU, in .venv-h100; 25 GB"
	@echo "make lint         ruff and mypy"
	@echo "make format       ruff format and ruff check --fix"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make docs-serve   the same on http://127.0.0.1:8000, rebuilt when a page changes"
	@echo "make install      set up .venv"

install: $(STAMP)

quickstart: $(STAMP)
	@$(BIN)/python examples/quickstart/run.py

# Compiled once, also where PYTHONDONTWRITEBYTECODE is set: workers and the programs that tests start import the same modules.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

# A file of tests stays on one worker: its fixtures start engines and train models once. Many tests fork ranks of their own,
# and many of `make test` wait for a while: it has a worker more than two cores.
WORKERS ?=
test: lint
	@$(PYTEST) -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --durations 40

test-full: $(STAMP) test-verifiers
	@$(PYTEST) -m full -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder --durations 20

test-layouts: $(STAMP)
	@$(PYTEST) -m layouts -n $(or $(WORKERS),2) tests/megatron

# FAULTS: how many; SEED: which ones, and when.
test-faults: $(STAMP)
	@rm -f build/faults.json
	@OMP_NUM_THREADS=1 FAULTS=$(or $(FAULTS),150) SEED=$(or $(SEED),1) $(BIN)/python -m pytest -q -s -m faults tests/training
	@PYTHONPATH=tests:tests/training $(BIN)/python tests/training/fault_table.py

test-verifiers: .venv-verifiers/.installed
	@OMP_NUM_THREADS=1 .venv-verifiers/bin/python -W ignore -m pytest -q tests/agents/test_verifiers.py

# Megatron-Core 0.17 and later asks for Python 3.12, for its compiled data loader alone, which nothing here imports. Its
# wheel is unpacked in front of the packages of .venv.
test-mcore019: .venv-mcore019/.installed
	@OMP_NUM_THREADS=1 .venv-mcore019/bin/python -m pytest -q tests/megatron tests/weights

.venv-mcore019/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip .venv-mcore019
	site=$$(.venv-mcore019/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile --no-deps --ignore-requires-python \
	  --python-version 3.12 --only-binary=:all: --target "$$site" "megatron-core==$(MCORE_NEXT)"
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/packages_of_venv.pth"
	touch $@

test-py312: .venv-py312/.installed
	@OMP_NUM_THREADS=1 .venv-py312/bin/python -m pytest -q tests/megatron tests/weights

.venv-py312/.installed: requirements/cpu.lock setup.py
	@python3.12 -m venv --clear .venv-py312
	# PyTorch first, with its dependencies: from the public registry it is the CUDA build, which runs on a CPU too.
	.venv-py312/bin/python -m pip --disable-pip-version-check install "$(TORCH)"
	.venv-py312/bin/python -m pip --disable-pip-version-check install --no-deps \
	  -r <(sed 's/^megatron-core==.*/megatron-core==$(MCORE_NEXT)/' requirements/cpu.lock)
	.venv-py312/bin/python -m pip --disable-pip-version-check install --no-deps --no-build-isolation --editable .
	touch $@

mutants: .venv-mutants/.installed
	@nice -n 15 .venv-mutants/bin/python tools/mutants.py $(ROOMS)

# Parts alone: ONLY="gae verifier". KEEP=1: what was measured is what later runs are compared with, and makes the page.
ONLY ?=
KEEP ?=
bench: .venv-trl/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.run $(ONLY) $(if $(KEEP),--keep)

# The packages of .venv, and mutmut, TRL or verifiers with what it needs in front of them.
.venv-mutants/.installed .venv-trl/.installed .venv-verifiers/.installed: .venv-%/.installed: $(STAMP) requirements/%.txt
	@$(BIN)/python -m venv --clear --without-pip $(@D)
	site=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(PIP) --no-deps --target "$$site" -r requirements/$*.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/packages_of_venv.pth"
	touch $@

# In the environment of the GPU node (requirements/h100.txt), which is not the one that `make` sets up: an activated one,
# or .venv, or PYTHON=...
STEPS ?=
BUDGET ?=
OUT ?= runs/gpu-check
SITE ?=
ATTENTION ?= auto
gpu-check:
	@python="$(or $(PYTHON),$$(if [ -z "$${VIRTUAL_ENV:-}" ] && [ -x $(BIN)/python ]; then echo $(BIN)/python; else echo python3; fi))"
	"$$python" -m tools.gpu_check $(STEPS) --out "$(OUT)" --attention "$(ATTENTION)" \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(SITE),--site "$(SITE)")

gpu-packages:
	@PYTHON="$(or $(PYTHON),python3)" .ci/gpu_packages

lint: $(STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The theme prints a notice about its successor otherwise.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	echo "site/index.html"

docs-serve: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000

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
	echo "== [2/4] installing requirements/cpu.lock"
	# pip uses one core: two at once, each with every second line.
	$(PIP) --no-deps "$(TORCH)" -r <(sed -n '1~2p' requirements/cpu.lock) & half=$$!; trap 'kill $$half 2>/dev/null' EXIT
	$(PIP) --no-deps -r <(sed -n '2~2p' requirements/cpu.lock | grep -v '^torch==')
	wait $$half; trap - EXIT
	echo "== [3/4] installing what this build of PyTorch needs besides"
	$(PIP) "$(TORCH)"
	# Of earlier locks, and not to be loaded with every torch.
	$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision 2>/dev/null
	$(PIP) --no-deps --no-build-isolation --quiet --editable .
	echo "== [4/4] compiling modules"
	# A quarter of them is what nothing here imports: tests, image generation, most models of transformers. What a package
	# ships that is no Python 3.11 stays uncompiled as well.
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' .venv/lib || true
	touch $@
	echo "== .venv is ready"

# `make quickstart` and `make test` set up .venv themselves and are quick the second time.
# They take the first Python of PYTHONS that they find, python3 before others; name another with `make quickstart PYTHON=/path/to/python3.12`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# tests/test_python_versions.py holds setup.py, doctor, the images and the pages to these.
PYTHONS := 3.11 3.12 3.13
PYTHONS_SAID := 3.11, 3.12 or 3.13
PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# pip compiles modules on one core; compileall afterwards uses all of them. It has to be done: where
# PYTHONDONTWRITEBYTECODE is set nothing would ever be compiled, and every import of sglang takes 12 s more.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
UNUSED := /(tests?|multimodal_gen)/|/transformers/models/.*/(modeling|modular|convert|image_processing|processing)_

ROOMS ?=

.PHONY: help install quickstart quickstart-families smollm smollm-values smollm-trl test test-fresh test-full test-layouts test-long test-faults test-verifiers test-mcore019 test-next mutants bench bench-gpu gpu-check gpu-packages lint format docs docs-serve

help:
	@echo "make quickstart   train a small reasoning model with VAPO on this machine, from nothing"
	@echo "make quickstart-families  the same path, a few steps of each stage, on tiny models of GLM-4.5, DeepSeek-V3, gpt-oss and Qwen3.5"
	@echo "make smollm       train SmolLM2-135M, which a Python package holds, on small problems, and evaluate it"
	@echo "make smollm-values  what values by regression explain of that model on problems of three steps, SEED=21"
	@echo "make smollm-trl   the same model by GRPO in this trainer and in TRL, SEEDS=\"1 2 3\"; hours; installs TRL"
	@echo "make test         ruff, mypy and the quicker tests, 5.5 to 11 minutes on two cores"
	@echo "make test-fresh   both on a fresh Debian 13, or DEBIAN=12, in a root of its own: needs root, debootstrap, 9 GB"
	@echo "make test-full    the long tests: whole runs, engine failures, Slurm, more layouts"
	@echo "make test-layouts the splits over ranks, and their cases, that test-full leaves out: it shows every pair of settings"
	@echo "make test-long    one response of 131,072 tokens, or LONG_TOKENS, split by context as on one rank"
	@echo "make test-faults  eleven kinds of runs under 150 faults, of each kind in each phase, and their table; RESUME=1 goes on"
	@echo "make test-verifiers  environments of the library verifiers, played by name; installs it in .venv-verifiers"
	@echo "make test-mcore019  tests of layouts, weights and checkpoints with Megatron-Core 0.19, in .venv-mcore019"
	@echo "make test-next    make test's tests with the newest libraries, in .venv-next; TORCH_INDEX=URL adds PyTorch's CPU build there"
	@echo "make mutants      which small changes to the code no test notices, in .venv-mutants; takes hours, resumes where it stopped"
	@echo "make bench        every benchmark at CPU sizes, and what became slower; installs TRL in .venv-trl"
	@echo "make bench-gpu    benchmarks beside peers on a GPU node, BUDGET=300 seconds; without a GPU at sizes of a CPU"
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

quickstart-families: $(STAMP)
	@$(BIN)/python examples/quickstart/families.py

# SEED: of problems and run; PRESET: another method without a model as critic.
smollm: $(STAMP) .venv/.gguf
	@$(BIN)/python examples/smollm/run.py $(if $(SEED),--seed $(SEED)) $(if $(PRESET),--preset $(PRESET))

smollm-values: $(STAMP) .venv/.gguf
	@$(BIN)/python -m examples.smollm.explained_variance $(if $(SEED),--seed $(SEED))

# SEEDS, STEPS: of each side; hours for three seeds on two cores.
smollm-trl: $(STAMP) .venv/.gguf .venv-trl/.installed
	@$(BIN)/python -W ignore -m examples.smollm.beside_trl $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS))

.venv/.gguf: $(STAMP) requirements/gguf.txt
	@$(PIP) --no-deps --quiet -r requirements/gguf.txt
	touch $@

# Compiled once, also where PYTHONDONTWRITEBYTECODE is set: workers and the programs that tests start import the same modules.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

# A file of tests stays on one worker: its fixtures start engines and train models once. Many tests fork ranks of their own,
# and many wait for a while: there is a worker more than two cores.
WORKERS ?=
test: lint
	@$(PYTEST) -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --durations 40

DEBIAN ?= 13
test-fresh:
	@DEBIAN=$(DEBIAN) .ci/fresh

test-full: $(STAMP) .venv/.gguf test-verifiers
	@$(PYTEST) -m full -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --durations 20

test-layouts: $(STAMP)
	@$(PYTEST) -m layouts -n $(or $(WORKERS),2) tests/megatron

# One response of so many tokens at CP 1, 2 and 4: 5 minutes for 131,072 on two quick cores. Memory that is not given back
# would hide how much the layers need.
LONG_TOKENS ?= 131072
test-long: $(STAMP)
	@MALLOC_MMAP_THRESHOLD_=1048576 LONG_TOKENS=$(LONG_TOKENS) $(PYTEST) -s -m full -n 0 tests/megatron/test_long_context.py

# FAULTS: how many; SEED: which ones, and when. RESUME=1: only the kinds of runs that are not in build/faults.json.
test-faults: $(STAMP)
	@$(if $(RESUME),,rm -f build/faults.json)
	@OMP_NUM_THREADS=1 FAULTS=$(or $(FAULTS),150) SEED=$(or $(SEED),1) $(BIN)/python -m pytest -q -s -m faults tests/training
	@PYTHONPATH=tests:tests/training $(BIN)/python tests/training/fault_table.py

test-verifiers: .venv-verifiers/.installed
	@TESTS_SLICE= OMP_NUM_THREADS=1 .venv-verifiers/bin/python -W ignore -m pytest -q tests/agents/test_verifiers.py

# Megatron-Core 0.17 and later asks for Python 3.12, for its compiled data loader alone, which nothing here imports: on 3.11
# the wheel for 3.12 does. It is unpacked in front of the packages of .venv.
test-mcore019: .venv-mcore019/.installed
	@OMP_NUM_THREADS=1 .venv-mcore019/bin/python -m pytest -q -n $(or $(WORKERS),2) --dist loadfile tests/megatron tests/weights tests/checkpoint

.venv-mcore019/.installed: $(STAMP) requirements/mcore019.txt
	@$(BIN)/python -m venv --clear --without-pip .venv-mcore019
	site=$$(.venv-mcore019/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	version=$$($(BIN)/python -c 'import sys; print("3.%d" % max(12, sys.version_info[1]))')
	$(PIP) --no-deps --ignore-requires-python --python-version "$$version" --only-binary=:all: --target "$$site" \
	  -r requirements/mcore019.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/packages_of_venv.pth"
	touch $@

# The newest of what the package stands on, in front of the packages of .venv; made again each time. PyTorch stays the one
# of .venv unless TORCH_INDEX is an index of CPU builds (https://download.pytorch.org/whl/cpu): PyPI has the CUDA build.
TORCH_INDEX ?=
NEXT_TESTS ?= tests
test-next: $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip .venv-next
	site=$$(.venv-next/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	version=$$($(BIN)/python -c 'import sys; print("3.%d" % max(12, sys.version_info[1]))')
	# Of these transformers alone does not ask for PyTorch.
	$(PIP) --quiet --target "$$site" transformers
	$(PIP) --quiet --no-deps --target "$$site" sglang peft accelerate math-verify
	$(PIP) --quiet --no-deps --ignore-requires-python --python-version "$$version" --only-binary=:all: --target "$$site" megatron-core
	$(if $(TORCH_INDEX),$(PIP) --quiet --target "$$site" --index-url "$(TORCH_INDEX)" torch)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/packages_of_venv.pth"
	.venv-next/bin/python -c 'from importlib.metadata import version as v; [print(n, v(n)) for n in
	  ("torch", "transformers", "sglang", "megatron-core", "peft", "math-verify")]'
	OMP_NUM_THREADS=1 .venv-next/bin/python -m pytest -q -n $(or $(WORKERS),3) --dist loadfile $(NEXT_TESTS)

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
OUT ?=
SITE ?=
ATTENTION ?= auto
gpu-check:
	@python="$(or $(PYTHON),$$(if [ -z "$${VIRTUAL_ENV:-}" ] && [ -x $(BIN)/python ]; then echo $(BIN)/python; else echo python3; fi))"
	"$$python" -m tools.gpu_check $(STEPS) --out "$(or $(OUT),runs/gpu-check)" --attention "$(ATTENTION)" \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(SITE),--site "$(SITE)")

# The benchmarks beside peers that need a GPU, in the same environment; without a GPU they run at sizes of a CPU.
# Parts alone: PARTS="head update".
PARTS ?=
bench-gpu:
	@python="$(or $(PYTHON),$$(if [ -z "$${VIRTUAL_ENV:-}" ] && [ -x $(BIN)/python ]; then echo $(BIN)/python; else echo python3; fi))"
	"$$python" -m benchmarks.gpu_suite $(PARTS) --out "$(or $(OUT),runs/bench-gpu)" \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(SITE),--site "$(SITE)")

# LIST=requirements/h100-mcore019.txt: the second stack.
LIST ?= requirements/h100.txt
gpu-packages:
	@PYTHON="$(or $(PYTHON),python3)" LIST="$(LIST)" .ci/gpu_packages

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

# A .venv of a fitting Python is kept, whatever python3 is by now.
$(STAMP): requirements/cpu.lock setup.py
	@version() { "$$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
	fits() { [[ " $(PYTHONS) " == *" $$1 "* ]]; }
	if ! { fits "$$(version $(BIN)/python)" && $(BIN)/python -c 'import pip' 2>/dev/null; }; then
	  python="" others=""
	  for candidate in $(if $(PYTHON),"$(PYTHON)",python3 $(addprefix python,$(PYTHONS)) python); do
	    has="$$(version "$$candidate")"
	    if fits "$$has"; then python="$$candidate"; break; fi
	    if [ -n "$$has" ]; then others+="$$candidate is $$has, "; fi
	  done
	  if [ -z "$$python" ]; then
	    echo "make: needs Python $(PYTHONS_SAID), $${others:-none of $(or $(PYTHON),python3 python3.x python) runs, }so install one with its venv module" \
	      "(Debian 12 and 13, Ubuntu 24.04: apt-get install python3-venv; elsewhere: uv python install 3.13), or name it: make PYTHON=/path/to/python3.13" >&2
	    exit 2
	  fi
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
	    echo "make: $$python lacks the venv module; install it (Debian, Ubuntu: apt-get install python$$has-venv)" >&2; exit 2
	  fi
	  echo "== [1/4] making .venv with $$python ($$has)"; "$$python" -m venv --clear .venv
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
	# ships that this Python cannot read stays uncompiled as well.
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' .venv/lib || true
	touch $@
	echo "== .venv is ready"

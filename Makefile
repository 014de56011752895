# Two commands do everything on a machine with Python 3.10-3.12 and make:
#   make demo    trains on the bundled graph, stock and featsync side by side
#   make test    everything CI runs
# Each sets up the environment it needs under .venv*/ first.

PYTHON ?= $(shell for v in 3.11 3.12 3.10 3; do \
	python$$v -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
	2>/dev/null && echo python$$v && break; done)
VENV := .venv
CORE := .venv-core
BIN := $(VENV)/bin
CORE_BIN := $(CORE)/bin
# The newest torch that the core is tested with. It has no DGL, which is the point.
CORE_TORCH := torch==2.13.0
PIP_INSTALL := pip install -qq --disable-pip-version-check --constraint tests/constraints.txt
# One thread each: the tests start many processes.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-core lint types unit smoke venv clean

demo: $(VENV)/.done
	@echo "== training on the bundled graph: stock and featsync, on 1 and on 2 ranks"
	@$(BIN)/python pipelines/demo.py

test: lint types unit smoke test-core
	@echo "== all passed"

lint: $(VENV)/.done
	@echo "== format and lint"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .

types: $(VENV)/.done
	@echo "== types"
	@$(BIN)/mypy

unit: $(VENV)/.done
	@echo "== unit, multi-process, doc and README tests"
	@$(BIN)/python -m pytest --quiet --durations=15 --doctest-modules featsync tests

smoke: $(VENV)/.done
	@echo "== one small run of each benchmark: wrong rows must be 0"
	@$(BIN)/python benchmarks/smoke.py

test-core: $(CORE)/.done
	@echo "== the core with the newest torch and without DGL"
	@$(CORE_BIN)/python -m pytest --quiet tests

venv: $(VENV)/.done

$(VENV)/.done: pyproject.toml
	@$(call check_python)
	@echo "== setting up $(VENV): DGL 2.1.0, torch 2.2.1 and the tools (about 5 GB, minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/$(PIP_INSTALL) --editable '.[dgl,plot,test]'
	@touch $@

$(CORE)/.done: pyproject.toml
	@$(call check_python)
	@echo "== setting up $(CORE): $(CORE_TORCH), no DGL"
	@$(PYTHON) -m venv --clear $(CORE)
	@$(CORE_BIN)/$(PIP_INSTALL) $(CORE_TORCH)
	@$(CORE_BIN)/$(PIP_INSTALL) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) $(CORE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

define check_python
if [ -z "$(PYTHON)" ]; then echo "featsync needs Python 3.10, 3.11 or 3.12: none found. \
Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
endef

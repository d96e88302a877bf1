# What people who work on the project run. Each target sets up what it needs in .venv, once.
#
#   make demo        an agent is killed half way and resumed; its history and its files are shown
#   make test        the fast tests           (PYTEST_ARGS="-k commit")
#   make slow        the slow tests           (PYTEST_ARGS=...)
#   make check       ruff and mypy
#   make bench       the benchmarks           (BENCH_ARGS=...)
#   make simulate    the simulator            (SIMULATE_ARGS=...)
#   make clean       remove .venv and what the tools left behind
#
# PYTHON=/path/to/python3 picks the interpreter for .venv; without it, the first of these that will do:

CANDIDATES := python3 python3.13 python3.12 python3.11
WILL_DO := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do $$p -c '$(WILL_DO)' >/dev/null 2>&1 && echo $$p && break; done)
endif

BIN := .venv/bin
# `loadfile`: the tests of one file share a process, and with it the servers that they start.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test slow check bench simulate clean
.NOTPARALLEL:

demo: .venv/with-demo
	$(BIN)/python tools/demo.py

test: .venv/with-test
	$(PYTEST) $(PYTEST_ARGS)

slow: .venv/with-test
	$(PYTEST) -m slow --timeout 1800 $(PYTEST_ARGS)

check: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/with-bench
	$(BIN)/python -m tools.bench $(BENCH_ARGS)

simulate: .venv/with-test
	$(BIN)/python tools/simulate.py $(SIMULATE_ARGS)

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or later with the venv module (PYTHON=... to name one)"; exit 1; }
	$(PYTHON) -m venv .venv

# .venv/with-EXTRA says that the project and that extra are installed, as pyproject.toml has them now.
.venv/with-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

.PRECIOUS: .venv/with-%

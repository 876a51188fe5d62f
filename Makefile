# poise: `make demo` and `make test` need Python 3.11 or newer and nothing else; the rest is for those who change it.
#
#   make demo        fit and judge calibrators on a real network's logits
#   make test        every test; ARGS="-k link" for some, WORKERS=1 for one process
#   make lint        ruff, rules and format          make types      mypy, strict
#   make evidence    every method on every data set  make bench      speed, as ratios within one run
#
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

PYTHON ?=
WORKERS ?= auto
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint types evidence bench FORCE

help:
	@sed -n '/^#/!q; s/^#//p' Makefile

demo: $(VENV)/.demo
	@$(BIN)/poise demo $(ARGS)

# Workers share the cores, so each computes with one thread.
test: $(VENV)/.test
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(VENV)/.test
	@$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check .

types: $(VENV)/.test
	@$(BIN)/python -m mypy

evidence: $(VENV)/.test
	@$(BIN)/python benchmarks/evidence.py $(or $(ARGS),../shared/data/logits)

bench: $(VENV)/.test
	@$(BIN)/python benchmarks/exact.py $(ARGS)

# A stamp is written last: what was interrupted is done again.
$(VENV)/.demo: EXTRAS := cli,plots
$(VENV)/.test: EXTRAS := test
$(VENV)/.demo $(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing poise[$(EXTRAS)] into $(VENV); the first time, this takes a few minutes ..."
	@$(PIP) install -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

# Looked at every time and left untouched when all is well: a venv that does not run is made anew, and one that was moved
# or copied with its folder is installed into again, because its scripts name the old place.
$(VENV)/.made: FORCE
	@if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		python=; \
		for candidate in "$(PYTHON)" $(if $(PYTHON),,python3 python3.11 python3.12 python3.13); do \
			if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
			then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo 'poise needs Python 3.11 or newer and none was found: make PYTHON=/path/to/python ...' >&2; exit 1; \
		fi; \
		echo "Making $(VENV) with $$python ..."; \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi; \
	if [ "$$(cat $@ 2>/dev/null)" != "$$PWD" ]; then printf '%s\n' "$$PWD" > $@; fi

FORCE:

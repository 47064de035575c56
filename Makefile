# make lab    set up everything and open JupyterLab on the first lesson
# make test   set up the same and pass every test, lessons included
# make run    execute the whole workbook; build/index.html shows what came out
#
# TORCH=cpu       take PyTorch's CPU build (on Linux the usual one is a CUDA build of several GB)
# PYTHON=python3  the Python to build on, 3.11 or later
# WORKERS=2       so many tests at a time
# ARGS="..."      passed on: make test ARGS="-k ring", make run ARGS="00 03 -p world_size=3"

.PHONY: help lab test run setup clean
.DEFAULT_GOAL := help

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c "$(NEW_ENOUGH)" >/dev/null 2>&1 && echo $$p && break; done) python3)
endif
WORKERS ?= 2
BIN := $(if $(filter Windows_NT,$(OS)),.venv/Scripts,.venv/bin)

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 9

setup:
	@command -v $(PYTHON) >/dev/null || { echo "labkit: there is no $(PYTHON) on the PATH: install Python 3.11 or later." >&2; exit 1; }
	@$(PYTHON) -c "$(NEW_ENOUGH)" 2>/dev/null || { echo "labkit: needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1): install a newer one, or name it, as in 'make lab PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -P labkit/bootstrap.py --torch=$(TORCH)

lab: setup
	@$(BIN)/labkit lab $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

run: setup
	@$(BIN)/labkit run $(ARGS)

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache

# Every target makes what it needs: a virtual environment in .venv, and in it what pyproject.toml asks for.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off

.PHONY: help train test lint soak clean
help:
	@echo "make train   train a small model on this machine, or go on where it stopped"
	@echo "make test    all checks: lint, then every test that is not a soak"
	@echo "make lint    ruff, mypy and the layering contracts"
	@echo "make soak    the slow tests"
	@echo "make clean   remove .venv (runs/ and data/ are yours and stay)"

train: .venv/installed
	@$(BIN)/maxlm train runs/quickstart $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 -m "not soak" $(ARGS)

soak: .venv/installed-test
	$(BIN)/python -m pytest -n 2 -m soak $(ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"maxlm needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=python3.11")'
	@echo "Making .venv and installing maxlm into it (a minute or two, once)"
	@$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	@$(INSTALL) --editable .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@$(INSTALL) --editable '.[test]'
	@touch $@ .venv/installed

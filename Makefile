# Every target makes what it needs: a virtual environment in .venv, and in it what pyproject.toml asks for.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off

.PHONY: help train test suite lint soak docs gpu-compiler clean
help:
	@echo "make train   train a small model on this machine, or go on where it stopped"
	@echo "make test    all checks: lint, and every test that is not a soak; ARGS='tests/x -k y': those tests alone"
	@echo "make lint    ruff, mypy, the layering contracts and shellcheck"
	@echo "make soak    the slow tests, also in fourteen parts (tools/soaks.py); ARGS as for test"
	@echo "make docs    the documentation as a site, in build/docs; any warning fails it"
	@echo "make gpu-compiler   what compiles kernels and steps for GPUs where there is none (make test does it, too)"
	@echo "make clean   remove .venv (runs/ and data/ are yours and stay)"

train: .venv/installed
	@$(BIN)/maxlm train runs/quickstart $(ARGS)

# Lint uses one core, and runs beside the tests. With ARGS (`make test ARGS="tests/x -k y"`) those tests alone, in this process and without lint: they start in seconds.
test: .venv/gpu-compiler
	@$(MAKE) --no-print-directory -j2 $(if $(ARGS),,lint) suite

# Three workers for two cores: many tests wait for processes that they have started.
suite:
	$(BIN)/python -m pytest -m "not soak" $(or $(ARGS),-n 3 --dist worksteal --durations=20)

soak: .venv/gpu-compiler
	$(BIN)/python $(if $(ARGS),-m pytest -m soak -o timeout=0 -o faulthandler_timeout=0 $(ARGS),tools/soaks.py)

docs: .venv/installed-docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

gpu-compiler: .venv/gpu-compiler

lint: .venv/installed-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck --check-sourced --external-sources gcp/maxlm-gcp gcp/host.sh slurm/train.sbatch

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

.venv/installed-docs: pyproject.toml | .venv/bin/python
	@$(INSTALL) --editable '.[docs]'
	@touch $@ .venv/installed

# Apart from the other packages: jax looks for a GPU wherever it finds its plugin. Without it, tests that compile for GPUs are skipped.
.venv/gpu-compiler: .venv/installed-test
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && $(INSTALL) --no-deps --upgrade --target $@ \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc nvidia-cuda-nvdisasm \
		&& touch $@ || { rm -rf $@; echo "No compiler for GPUs could be installed: the tests that need it are skipped"; }

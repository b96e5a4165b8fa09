# One environment, .venv, for everything. A stamp file in it stands for each set of extras that is installed, and is made
# anew only after pyproject.toml has changed, so a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UNFINISHED := $(VENV)/.unfinished
FORMATTED := d3d_jax kernels scripts tests
# A file of tests stays in one process, since its tests share what they compile; a process takes up to 3 GiB.
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test test-aot lint typecheck format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(MAKEFILE_LIST) | awk '{ printf "  %s %-10s", $$1, $$2; $$1 = $$2 = ""; print }'
	@echo '  Variables: PYTHON=python3.12 (what .venv is made from), ARGS="..." (passed on by demo and test)'

venv: $(STAMP)-test $(STAMP)-dev ## set up .venv with everything that developing needs

demo: $(STAMP)-base ## decode with the embedded pair: ar, sync and async side by side
	$(BIN)/d3d demo $(ARGS)

test: $(STAMP)-test ## run the tests; ARGS='-m "not slow"' narrows them
	$(BIN)/pytest $(WORKERS) $(ARGS)

test-aot: $(STAMP)-test ## compile the kernels for TPU and GPU without one; skips compilers that are not installed
	$(BIN)/pytest kernels/tests -m aot $(ARGS)
	$(BIN)/pytest tests/benchmarks/test_compiled_programs.py -m aot $(ARGS)

lint: $(STAMP)-dev ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

typecheck: $(STAMP)-test $(STAMP)-dev ## check types
	$(BIN)/pyright

format: $(STAMP)-dev ## mend what can be mended by machine
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv, caches and built packages
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find d3d_jax kernels scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The marker .unfinished stands while something is being installed. Where it is found at the start, an earlier set-up was
# cut off and may have left half a package that pip takes for a whole one: such an environment is made again from nothing.
ifneq ($(wildcard $(UNFINISHED)),)
.PHONY: $(STAMP)-base
endif

define install
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    command -v $(PYTHON) >/dev/null || { \
	        echo "d3d-jax: no '$(PYTHON)' found. Install Python 3.11 or newer, or say where it is: make PYTHON=/path/to/python" >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "d3d-jax needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	        echo "d3d-jax: '$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); \
	fi
	@touch $(UNFINISHED)
	@echo "Installing $(1) into $(VENV); the first time this takes a few minutes."
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable '$(1)'
	@touch $@
	@rm $(UNFINISHED)
endef

$(STAMP)-base: pyproject.toml
	$(call install,.)

$(STAMP)-test: pyproject.toml $(STAMP)-base
	$(call install,.[train$(comma)test])

$(STAMP)-dev: pyproject.toml $(STAMP)-base
	$(call install,.[dev])

comma := ,

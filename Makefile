# make demo | test | lint | docs | paper | clean. Each makes its own virtual environment in .venv; python3 (3.11
# or later, with its venv module) and make are all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BUILD := pyproject.toml constraints.txt

.PHONY: demo test lint docs paper clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/sarathi-sim run gpt3_pp --out runs/gpt3_pp

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/mypy --strict || failed=1; \
	exit $$failed

# The site of the documentation, in build/docs: open build/docs/index.html.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m experiments.reference docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The fit to the paper and everything docs/paper.md shows, anew.
paper: $(VENV)/.installed
	$(BIN)/python -m experiments.paper.constants
	$(BIN)/python -m experiments.paper.scrutiny
	$(BIN)/sarathi-sim reproduce --out runs/paper
	$(BIN)/python -m experiments.paper.page runs/paper docs

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or later is needed, and '$(PYTHON)' is not:" \
	    "$$($(PYTHON) --version 2>&1); name another with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(BUILD)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created $(BUILD)
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

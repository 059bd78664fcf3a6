# make demo | test | lint | budget | docs | paper | gpu-wheels | clean. Each makes its own virtual environment in .venv;
# python3 (3.11 or later, with its venv module) and make are all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BUILD := pyproject.toml constraints.txt
# mypy follows no package-dir: it reads the packages as they are installed, through links in build/.
TREE := build/lint/sarathi_sim
MYPY := MYPYPATH=build/lint $(BIN)/mypy --strict --explicit-package-bases $(TREE)

.PHONY: demo test lint budget docs paper gpu-wheels clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/sarathi-sim run gpt3_pp --out runs/gpt3_pp

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	@rm -rf $(TREE) && mkdir -p $(TREE) && ln -s $(addprefix $(CURDIR)/,sarathi_sim/* policies profiler simulator experiments) $(TREE)
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(MYPY) || failed=1; \
	$(BIN)/python -m tests.budget || failed=1; \
	exit $$failed

# Lines and tokens of each room; with AGAINST=COMMIT those of the commit beside them.
budget: $(VENV)/.installed-dev
	$(BIN)/python -m tests.budget $(if $(AGAINST),--against $(AGAINST))

# The site of the documentation, in build/docs: open build/docs/index.html.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sarathi_sim.experiments.lab.pages docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The fit to the paper and everything docs/lab/paper*.md show, anew.
paper: $(VENV)/.installed
	$(BIN)/python -m sarathi_sim.experiments.lab.paper.claims
	$(BIN)/sarathi-sim lab reproduce --out runs/paper
	$(BIN)/python -m sarathi_sim.experiments.lab.paper.figures runs/paper docs

# Wheels for a GPU node that has torch, NumPy, pandas, pyarrow, SciPy, scikit-learn, PyYAML, typer and rich,
# and no network: what first-light needs beside those, for Python 3.11 and 3.12 on Linux x86-64.
GPU_WHEELS := build/gpu-wheels
GPU_NEEDS := pydantic pydantic-core annotated-types typing-inspection typing-extensions simpy joblib \
  threadpoolctl cloudpickle psutil nvidia-ml-py nvidia-cuda-runtime-cu12 xformers

gpu-wheels: $(VENV)/.created
	rm -rf $(GPU_WHEELS) build/lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(GPU_WHEELS) .
	for version in 3.11 3.12; do \
	  $(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	    --only-binary=:all: --implementation cp --python-version $$version \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    --dest $(GPU_WHEELS)/$$version $(GPU_NEEDS) || exit 1; \
	  cp $(GPU_WHEELS)/*.whl $(GPU_WHEELS)/$$version || exit 1; \
	done
	@rm $(GPU_WHEELS)/*.whl && du -sh $(GPU_WHEELS)/*

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

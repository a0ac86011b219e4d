# The few verbs of this project; each sets up what it needs on a machine with only Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
QUICKLY := -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1

.PHONY: setup demo test check docs-check bench browser clean

setup: $(KERNELS)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Compiled once, so that whatever runs later loads bytecode and machine code.
$(KERNELS): $(INSTALLED)
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m meshwright.solver.warm
	$(BIN)/meshwright plan mlp --cluster "2x4 h100" > /dev/null
	$(BIN)/meshwright plan mlp --cluster "2x2 h100" --batch 8 --pipeline > /dev/null
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# One core compiles kernels while the other checks.
test:
	$(MAKE) --jobs=2 setup check
	MESHWRIGHT_SCREENSHOTS=$(CURDIR)/test-output/screenshots $(BIN)/python -m pytest -n 2

# The tests of the web page need a browser; they are skipped, and say so, where there is none.
browser:
	command -v chromium > /dev/null || (apt-get $(QUICKLY) update -qq && apt-get $(QUICKLY) install -y -qq chromium)

# Every command and example of the documents, those that plan large models too.
docs-check: setup
	MESHWRIGHT_DOCS=all $(BIN)/python -m pytest tests/test_docs.py

check: $(INSTALLED)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

bench: setup
	for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

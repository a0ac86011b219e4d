# The few verbs of this project; each sets up what it needs on a machine with only Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
KERNELS := $(VENV)/.kernels
SITE_TOOLS := $(VENV)/.site-tools
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Each worker runs neighbouring tests, which share models and fixtures, and takes from the other one when it is done.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
QUICKLY := -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1

# Bytecode is kept even where the environment says otherwise: tests start many processes, which would all compile again
# what they import, and each worker would rewrite the assertions of every test.
export PYTHONDONTWRITEBYTECODE :=
# A model that fails is an error in every verb, not a remark on a plan.
export MESHWRIGHT_STRICT := 1

.PHONY: setup kernels demo test tests quick durations nightly check docs docs-check bench browser ray clean

setup: $(INSTALLED)

# What Meshwright itself needs, and so the demo.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable .
	touch $@

# What developers need besides.
$(TOOLS): $(INSTALLED)
	$(PIP) --editable ".[dev]"
	touch $@

# Compiled once, on all cores, so that whatever runs later loads bytecode and machine code.
kernels: $(KERNELS)

$(KERNELS): $(TOOLS)
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m meshwright.warm
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: check tests

# The tests alone, for what has checked the rest already.
tests: $(KERNELS)
	$(PYTEST)

# What finds most mistakes within two minutes: everything but the tests that are slow or run programs, and a few of these.
quick: $(KERNELS)
	$(PYTEST) -m "not nightly and (smoke or not (slow or devices or browser))" --ignore tests/frameworks --ignore tests/training

# The tests, and how long each took, in tests/durations.md.
durations: $(KERNELS)
	$(PYTEST) --junitxml=$(VENV)/durations.xml
	$(BIN)/python tests/durations.py $(VENV)/durations.xml

# Sweeps of which `make test` has a sample: the other cases of tests, random programs, all pairs of what people
# combine, every page's examples.
nightly: docs-check
	$(PYTEST) -m nightly
	$(BIN)/python benchmarks/equality.py --pairs 2000
	$(BIN)/python benchmarks/matrix.py --jobs 2

# The tests of the web page need a browser; they are skipped, and say so, where there is none.
browser:
	command -v chromium > /dev/null || (apt-get $(QUICKLY) update -qq && apt-get $(QUICKLY) install -y -qq chromium)

# The tests on a real Ray, which is large; they are skipped, and say so, where it is not installed.
ray: $(KERNELS)
	$(PIP) --editable ".[dev,ray]"
	$(BIN)/python -m pytest tests/training/test_ray.py

# The site, in site/: offline, and a warning (a broken link, a name without documentation) is an error.
docs: $(SITE_TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(SITE_TOOLS): $(INSTALLED)
	$(PIP) --editable ".[docs]"
	touch $@

# Every command and example of the documents, those that plan large models too.
docs-check: $(KERNELS)
	MESHWRIGHT_DOCS=all $(BIN)/python -m pytest tests/test_docs.py

check: $(TOOLS)
	$(BIN)/ruff format --check src tests benchmarks examples docs/site_hooks.py
	$(BIN)/ruff check src tests benchmarks examples docs/site_hooks.py
	$(BIN)/mypy

bench: $(KERNELS)
	for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache

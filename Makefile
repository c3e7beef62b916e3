# Needs make and Python 3.11 or newer, nothing else: everything is installed into .venv.
#   make simulate [ARGS="--devices 16"]    an example study     make test    make lint    make bench    make clean

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
ARGS ?=

.PHONY: simulate test lint bench clean

simulate: .venv/installed
	$(BIN)/odc simulate --workload longalign $(ARGS)

test: .venv/installed-test
	$(BIN)/pytest -n $(JOBS) $(ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-test
	$(BIN)/pytest -m bench $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than pyproject.toml only where dependencies or packaging may have changed. Installs are editable,
# so changed code is used without installing again.
.venv/installed: pyproject.toml | .venv/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/installed-test: pyproject.toml | .venv/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ .venv/installed

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; old = sys.version_info < (3, 11); \
	  sys.exit("needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if old else 0)'
	$(PYTHON) -m venv .venv

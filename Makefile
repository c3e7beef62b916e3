# Needs make and Python 3.11 or newer, nothing else: everything is installed into .venv.
#   make simulate [ARGS="--devices 16"]    an example study     make test    make test-kernels
#   make test-torch [TORCH=2.12.1]    make lint    make bench    make clean

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
ARGS ?=
TORCH ?= 2.11.0
TORCH_TESTS := $(addprefix tests/kernels/test_, fsdp_cpu.py copies.py windows_cpu.py)

.PHONY: simulate test test-kernels test-torch lint bench clean

simulate: .venv/installed
	$(BIN)/odc simulate --workload longalign $(ARGS)

test: .venv/installed-test
	$(BIN)/pytest -n $(JOBS) $(ARGS)

# The GPU package without a GPU: kernels interpreted, and compiled for sm_90; gloo ranks. The wheels of torch for CPUs are
# at https://download.pytorch.org/whl/cpu; set PIP_EXTRA_INDEX_URL to it to save the download of CUDA.
test-kernels: .venv-kernels/installed
	COVERAGE_FILE=.venv-kernels/coverage .venv-kernels/bin/python -W ignore::FutureWarning -m pytest tests/kernels \
	  --cov --cov-config=tests/kernels/coverage.ini --cov-report=term --cov-report=json:.venv-kernels/coverage.json $(ARGS)
	.venv-kernels/bin/python tests/kernels/cuda_only.py .venv-kernels/coverage.json

# The library under an older torch, whose wheels are for CUDA: 5 GB with what they need. numpy is that of its Triton's
# interpreter. Where they cannot be installed, that is all it says.
test-torch: | .venv/pyvenv.cfg
	$(PYTHON) -m venv .venv-torch
	echo '*' > .venv-torch/.gitignore
	@if timeout 600 .venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==$(TORCH) 'numpy<2.4' pytest; \
	then .venv-torch/bin/python -W ignore::FutureWarning -m pytest $(TORCH_TESTS) $(ARGS); \
	else echo "torch $(TORCH) cannot be installed here: not tested"; fi

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-test
	$(BIN)/pytest -m bench $(ARGS)

clean:
	rm -rf .venv .venv-kernels .venv-torch build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

.venv-kernels/installed: pyproject.toml | .venv/pyvenv.cfg
	$(PYTHON) -m venv .venv-kernels
	echo '*' > .venv-kernels/.gitignore
	.venv-kernels/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==2.13.0 triton==3.9.0 transformers==5.17.0 \
	  'numpy>=2.4,<2.5' 'coverage>=7.10' pytest pytest-cov
	touch $@

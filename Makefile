# Every target creates its own environment: on a fresh machine `make demo` or `make test` is all there is to type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CLI    := $(VENV)/.installed-cli

.PHONY: setup browser demo test test-gpu test-distributed lint bench campaign claims docs clean
# The extra dev holds all others: cli (commands and figures), arc, log, deepspeed, hf, and what tests and benchmarks need.
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The demonstration needs the commands alone, which are sooner there than all extras.
$(CLI): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli]'
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(CLI))
	$(BIN)/jpmhc demo

# The browser tests need Debian's Chromium; where it cannot be installed they are skipped and say so.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	timeout 300 sh -c 'apt-get update -qq && apt-get install -yqq --no-install-recommends chromium fonts-dejavu-core' \
	>/dev/null 2>&1; } || echo "Chromium is not there and cannot be installed: the browser tests will be skipped"

test: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Everything on a machine with a GPU, over all cores where pytest-xdist is; without a GPU, tests of the device are skipped.
# A machine without network: make test-gpu GPU_PYTHON=python3, with PYTHONPATH=src where the package is not installed.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup browser)
	@$(GPU_PYTHON) -c "import xdist" 2>/dev/null || echo "pytest-xdist is not installed: the tests run on one core"
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest \
	$$($(GPU_PYTHON) -c "import xdist; print('-n auto --dist worksteal')" 2>/dev/null)

# Training on four and eight processes beside one, all libraries that are installed: about five minutes on two cores.
test-distributed: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "distributed or not distributed" tests/connections/test_distributed.py \
	tests/integrations \
	tests/experiments/training/test_processes.py::test_torchrun_restarts_a_run_before_and_after_its_first_checkpoint

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/bench_connections.py
	$(BIN)/python benchmarks/bench_connections.py --compiled

# Ten minutes of seeded attacks; longer: make campaign CAMPAIGN='--minutes 120 --seed 1'
campaign: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign $(CAMPAIGN)

# The paper's claims: every number computed again and compared with docs/claims.md.
claims: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/claims

# The guides and the reference as pages: open out/docs/index.html.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going --quiet docs out/docs

clean:
	rm -rf $(VENV) out

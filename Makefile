# Every target creates its own environment: on a fresh machine `make demo` or `make test` is all there is to type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CLI    := $(VENV)/.installed-cli

.PHONY: setup demo test lint bench campaign claims docs clean
# The extra dev holds all others: cli (commands and figures), arc, log, deepspeed, hf, and what tests and benchmarks need.
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The demonstration needs the commands alone, which are sooner there than all extras.
$(CLI): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli]'
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(CLI))
	$(BIN)/jpmhc demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

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

# Every target sets up what it needs in .venv; only python3 and make must be there already.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.tested
LAUNCH := $(BIN)/accelerate launch --config_file training/launch/one_gpu.yaml

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := true
# Threads wait asleep instead of spinning, which costs dearly where other work shares the cores.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test check clean

# Train a small model on Python's own source, generate from it, compare it with a Llama of its size.
demo: $(INSTALLED)
	$(LAUNCH) training/pretrain.py training/recipes/demo.yaml
	$(BIN)/python training/demo.py runs/demo

# One torch thread a worker: two workers with two threads each would fight over two cores.
test: export OMP_NUM_THREADS := 1
test: $(TESTED)
	$(BIN)/pytest -n 2 --dist loadfile

check: $(TESTED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest -q tests/test_imports.py

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,plot,serve]'
	touch $@

# What only the tests need comes later, most of it packages that people use the models with. (Where torchao is, every
# command says on import what parts of it do not load.)
$(TESTED): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

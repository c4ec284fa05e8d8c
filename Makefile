# Everything a person types. `make quickstart` and `make test` set up what they need on a fresh machine.
SHELL := /bin/bash
PYTHON ?= python3
ALGORITHM ?= ppo
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/quickstart-$(ALGORITHM)
# Thousands of modules of the libraries are compiled once, not by every process that a job or a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test unit integration cluster-tests lint env stubs crd format clean

## Train a small policy by RL on this machine, no cluster needed (ALGORITHM=ppo or grpo).
quickstart: env
	$(BIN)/python examples/quickstart/prepare.py
	rm -rf $(RUN)
	$(BIN)/rlhf run examples/quickstart/$(ALGORITHM).yaml --run-dir $(RUN)

## Everything CI checks: format, types, import floors, generated files, unit tests, real processes, a real cluster.
test: env lint unit integration cluster-tests

unit: env
	$(BIN)/pytest tests/unit -n 2 --dist loadfile

integration: env cluster-prepare
	$(BIN)/pytest tests/integration -n 2 --dist loadfile

cluster-tests: env cluster-prepare
	$(BIN)/pytest tests/cluster -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/pytest tests/cluster -m alone

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## The virtual environment, from uv.lock; instant when it is up to date.
env: $(VENV)/.synced

$(VENV)/.synced: pyproject.toml uv.lock
	@command -v uv >/dev/null || $(PYTHON) -m pip install --quiet uv
	@uv=$$(command -v uv || echo "$(PYTHON) -m uv"); $$uv sync --locked --all-extras --quiet
	@touch $@

## Regenerate what is generated and checked in.
stubs: env
	PATH="$(CURDIR)/$(BIN):$$PATH" crds/generate_stubs.sh

crd: env
	$(BIN)/python -m rlhf_api.crd
	$(BIN)/python -m rlhf_api.crd charts/rlhf-operator/definition/rlhfjobs.yaml
	$(BIN)/python -m rlhf_api.reference

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs examples/quickstart/assets .pytest_cache .mypy_cache .ruff_cache .hypothesis

-include tests/cluster/cluster.mk images/images.mk

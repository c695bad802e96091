# Everything a newcomer needs: `make demo` shows it work, `make test` runs the tests.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv || echo .uv/bin/uv)
REQUIREMENTS ?= requirements/cpu.txt
INSTALLED := $(VENV)/installed
PACKAGES := handoff experiments deployments actors cluster kv

.DEFAULT_GOAL := help
.PHONY: help setup demo test rayup-test experiments-test k8s-test check format bench-serve bench-kv bench-goodput bench-gateway experiments report chaos lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Install everything into .venv (about 7 GB, mostly PyTorch)

demo: setup ## Two Ray nodes, real prompts, a KV cache that crosses between them (MODEL=path or hub id)
	$(BIN)/handoff demo $(if $(MODEL),--model "$(MODEL)")

test: setup ## Run all tests (real vLLM engines on real Ray nodes; some minutes)
	$(BIN)/python -m pytest $(ARGS)

rayup-test: setup ## `ray up` for real, between two machines made of namespaces (root, openssh-server, rsync)
	$(BIN)/python -m pytest -m "" tests/cluster/test_ray_up.py tests/serving/test_hosts.py $(ARGS)

experiments-test: setup ## Head to head, mesh, where time goes and pipeline for real, at their smallest (Ray clusters, engines; mesh and where time goes as root)
	$(BIN)/python -m pytest -m experiment tests/experiments $(ARGS)

k8s-test: setup ## A real Kubernetes with KubeRay serves through pods; not part of test (root, Debian, Go, kubectl, or KUBECONFIG; 8 minutes, more the first time)
	$(BIN)/python -m pytest -sv --reruns 0 -x -o timeout=3000 tests/k8s $(ARGS)

check: setup ## Formatting, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-serve: setup ## Time to first token and per token, against plain vLLM, interleaved: results/bench-serve.json
	$(BIN)/handoff bench serve $(ARGS)

bench-kv: setup ## KV from cache to cache over every transport, against the link: results/bench-kv.json (root: cross-node too)
	$(BIN)/handoff bench kv $(ARGS)

bench-goodput: setup ## Router modes under open-loop load, fake engines, 25 minutes: results/bench-goodput.json (ARGS=--resume)
	$(BIN)/handoff bench goodput $(ARGS)

bench-gateway: setup ## CPU time and latency of the gateway and the router, beside vLLM's own server: results/bench-gateway.json
	$(BIN)/handoff bench gateway $(ARGS)

experiments: setup ## Probe, placement, transports, ways against each other, where time goes, pipeline stages and a plan at small sizes: results/experiments/, results/report.html
	$(BIN)/handoff experiment all --plan tests/experiments/plan_models/mistral-7b.json $(ARGS)

report: setup ## One page of the runs in results/, verdict first: results/report.html
	$(BIN)/handoff report $(ARGS)

chaos: setup ## Kill, damage and cut while 10,000 requests run on the fake engine: nothing may be lost (ARGS=--seed 7)
	$(BIN)/handoff chaos $(ARGS)

lock: $(UV) ## Compile the pinned requirements from pyproject.toml
	$(UV) pip compile -q pyproject.toml --extra cpu --extra nixl --extra dev --python-version 3.11 \
		--no-emit-index-url --no-header --no-annotate -o requirements/cpu.txt
	$(UV) pip compile -q pyproject.toml --extra cuda --extra nixl --extra dev --python-version 3.11 \
		--no-emit-index-url --no-header --no-annotate -o requirements/cuda.txt

clean: ## Remove what `make` made: the environment, models, caches
	rm -rf $(VENV) .uv models .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build

# uv installs the pinned set in seconds where pip takes minutes; it comes from PyPI if it is not there.
.uv/bin/uv:
	@echo "getting uv from PyPI"
	$(PYTHON) -m venv .uv
	.uv/bin/pip install -q uv

$(INSTALLED): $(REQUIREMENTS) pyproject.toml | $(UV)
	@echo "installing $(REQUIREMENTS) into $(VENV): about 7 GB, a minute or more"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old; set PYTHON= to Python 3.11 or newer"; exit 1; }
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip sync -q --compile-bytecode --python $(BIN)/python $(REQUIREMENTS)
	$(UV) pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@
	@echo "installed; next: make demo, or make test"

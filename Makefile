# Everything runs from here; `make help` lists it. scripts/setup.sh installs what is missing and is quick when nothing is.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
# Looked up when used: setup puts a Go there where the machine has none that will do.
GO = $(shell if [ -x .cache/tools/bin/go ]; then echo .cache/tools/bin/go; else echo go; fi)
# Those of scripts/static: what is compiled for one serves the other.
TAGS := netgo,osusergo
FUZZTIME ?= 20s
SOAK ?= 10m
EACH ?= 6s
ONLY ?=
SEED ?= 0
ROUNDS ?= 20
GOTEST_FLAGS ?=
PYTEST_FLAGS ?=
JSON ?=
NAME ?=
TIERS ?=
PD ?=
ARENA ?=
SIDECARS ?=
VERSIONS ?=
PAGES ?=
ARCH ?=
UPDATE ?=
IMAGE ?=
BUILDER ?=
ARGS ?=

# Whatever the environment says: every start of a vLLM server imports thousands of modules, three times, and compiling them takes longer than that.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup build build-bench build-soak demo wheel wheel-here test test-go test-python test-py test-e2e matrix arm image chart lint lint-go lint-py bench screenshots fuzz soak attack faults clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
	while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: ## Install what is missing: system packages, Go, .venv with vLLM's CPU build, the servers of the tests
	@scripts/setup.sh

define compile
@scripts/step 'build: bin/lookaside' $(GO) build -trimpath -tags $(TAGS) -o bin/lookaside ./sidecar/cmd/lookaside
@scripts/pyclient.sh
endef

build: setup ## Build bin/lookaside and the Python package with its native part
	$(compile)

build-bench: build
	@scripts/step 'build: bin/lookaside-bench' $(GO) build -trimpath -tags $(TAGS) -o bin/lookaside-bench ./internal/bench/cmd/lookaside-bench

build-soak: build
	@$(GO) build -trimpath -tags $(TAGS) -o bin/soak ./internal/soak

demo: ## Two vLLM servers on one sidecar; SIDECARS=2: on one each; TIERS=disk|dax|redis: prompts for ten times the arena; TIERS=mooncake: on two hosts (root); ARENA=SIZE|dax; PD=1: prefill and decode apart; TP=1: tensor-parallel ranks; JSON=FILE
	@export STEP_LOGS=.cache/logs; scripts/setup.sh demo $(filter redis mooncake,$(TIERS)) && scripts/demo.sh $(filter mooncake,$(TIERS))
	@.cache/demo/bin/python -m examples.$(if $(filter mooncake,$(TIERS)),two_hosts,$(if $(TIERS),beyond_memory --tier '$(TIERS)',$(if $(PD),prefill_decode,$(if $(TP),tensor_parallel,two_instances)))) $(if $(ARENA),--arena '$(ARENA)') \
		$(if $(SIDECARS),--sidecars '$(SIDECARS)') $(if $(JSON),--json '$(JSON)') $(ARGS)

wheel: ## The wheels, into dist/: connector, native module and sidecar in one file; ARCH=x86_64|aarch64 for one of them
	@scripts/setup.sh wheel
	@scripts/wheel.sh $(ARCH)

test: lint ## All tests
	@# Python's wait for much of their time, and Go's take what processor time they leave.
	@$(MAKE) -j2 --output-sync=target test-go test-python

test-python:
	@$(MAKE) test-py
	@$(MAKE) test-e2e

test-go: setup ## Go tests, with the race detector
	$(GO) test -race -timeout 20m $(GOTEST_FLAGS) ./...

wheel-here: setup
	@scripts/wheel.sh $(shell uname -m)

test-py: build-bench wheel-here ## Python tests without a running vLLM
	$(PY) -m pytest -q --timeout=300 --durations=5 $(PYTEST_FLAGS) pyclient/tests

test-e2e: build wheel-here ## Tests in real vLLM servers
	$(PY) -m pytest -q --timeout=900 --durations=8 $(PYTEST_FLAGS) pyclient/e2e

matrix: build-bench ## The Python tests on each version of vLLM that README claims, and a table of them; VERSIONS='0.30.0 …'
	@$(PY) scripts/matrix.py $(VERSIONS)

arm: setup ## Build for arm64 and test under qemu-user with pages of 4, 16 and 64 KiB; PAGES='4096 65536'; docs/arm.md
	@PAGES='$(PAGES)' scripts/arm.sh

image: ## The sidecar's container image, from the static binary; ARCH=x86_64|aarch64, IMAGE=NAME, BUILDER=podman|buildah|docker
	@scripts/setup.sh wheel
	@IMAGE='$(IMAGE)' BUILDER='$(BUILDER)' scripts/image.sh $(ARCH)

chart: setup ## Lint the Helm chart and check what it renders; UPDATE=1 writes examples/kubernetes/vllm.yaml
	@UPDATE='$(UPDATE)' scripts/chart.sh

lint: build ## gofmt, vet, staticcheck, ruff, pyright
	@$(MAKE) -j2 --output-sync=target lint-go lint-py

lint-go:
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "not gofmt'ed: $$out"; exit 1; }
	$(GO) vet ./...
	GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./dax/...
	$(GO) tool staticcheck ./...

lint-py:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

bench: build-bench ## A bench by name: NAME=lookup|client|tiering|lightmem|copy|agreement|attach|ttft|busy|serve|engine|memcopy|disk|dax|recovery|restart|promotion|peers|peer|redis|elsewhere|mooncake|nixl, JSON=FILE, ARGS='...'
	@bench/run $(if $(NAME),'$(NAME)') $(if $(JSON),--json '$(JSON)') $(ARGS)

screenshots: build ## The pictures of docs/images, from real servers in traffic; needs Chromium, tmux and unshare
	@PYTHONPATH=pyclient:. $(PY) -m scripts.screenshots

fuzz: setup ## Fuzz every decoder, FUZZTIME (20s) each
	@scripts/fuzz.sh $(FUZZTIME)

soak: build-soak ## Kill sidecars that share, clients, Redis and S3 at random, and spoil a disk, for SOAK (10m), checking every byte; SEED=N, JSON=FILE
	@bin/soak --bin bin/lookaside --duration '$(SOAK)' --seed '$(SEED)' $(if $(JSON),--json '$(JSON)') $(ARGS)

attack: build-soak ## Attack sidecars from outside, one way after the other, EACH (6s) each; ONLY=names (ARGS=--list lists them), JSON=FILE
	@bin/soak attack --bin bin/lookaside --each '$(EACH)' $(if $(ONLY),--only '$(ONLY)') $(if $(JSON),--json '$(JSON)') $(ARGS)

faults: setup ## The disk tier on media that fail, ROUNDS (20) of what is random; needs root
	$(GO) test -v -timeout 1h ./tiers/faults -faults.rounds='$(ROUNDS)' $(if $(filter-out 0,$(SEED)),-faults.seed='$(SEED)')

clean: ## Remove what was built; .venv, the model and downloads stay (make clean ALL=1 removes these as well)
	rm -rf bin build dist pyclient/build pyclient/dist pyclient/*.egg-info .pytest_cache .ruff_cache
	find pyclient/lookaside -name '*.so' -delete 2>/dev/null || true
	rm -f .cache/stamps/pyclient
	$(if $(ALL),rm -rf .venv .cache)

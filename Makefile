# make demo   the whole story on this machine, with a real SGLang server on the CPU
# make test   linters, unit tests, the real server end to end, a real systemd host over ssh
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv

.DEFAULT_GOAL := help
.PHONY: help demo demo-stop test test-matrix lint unit compat compat-real kills faults bench bench-gpu docs clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The stamp is written last: an interrupted install is done again.
$(VENV)/stamp: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(VENV)/stamp ## Extract the demo's data set from a real server and bring production back
	@demo/demo.sh

demo-stop: $(VENV)/stamp ## End the demo's production server
	@$(VENV)/bin/python demo/production.py stop $${HS_LOCAL_DIR:-$(CURDIR)/.local} $${HS_LOCAL_PORT:-32100}

test: $(VENV)/stamp ## Set up, lint, unit tests, end-to-end runs, molecule
	@tests/setup.sh
	@$(MAKE) --no-print-directory lint
	@tests/run.sh

lint: $(VENV)/stamp ## ansible-lint (production, offline), yamllint, ruff, mypy
	@tests/lint.sh

test-matrix: $(VENV)/stamp ## Every ansible-core from 2.17 on that a Python here can run (RELEASES="2.17 2.20": these); writes docs/ansible-versions.md
	@$(VENV)/bin/python tests/matrix.py $(RELEASES)

docs: $(VENV)/stamp ## Write what the pages take from the roles: docs/variables.md, the roles' READMEs, docs/img
	@$(VENV)/bin/python docs/generate.py

compat-real: $(VENV)/stamp ## Real servers of every layout, at tensor parallel 1 and 2, judged by Hugging Face (a quarter of an hour)
	@PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/python -m compat.real --document docs/compatibility-real.md

unit: $(VENV)/stamp ## Only the unit tests
	@tests/run.sh tests/unit

compat: $(VENV)/stamp ## Run the edit on every release of SGLang (RELEASES="0.5.6 0.5.12": on these); writes docs/compatibility.md
	@compat/compat.sh $(RELEASES)

bench: $(VENV)/stamp ## Measure what has a goal (ONLY="key key": only these); writes docs/performance.md
	@bench/run $(ONLY)

bench-gpu: ## Measure the copies beside a running forward, on a CUDA device (PYTHON=the engine's)
	@PYTHONPATH=$(CURDIR) $(PYTHON) -m bench.gpu

COUNT ?= 200
kills: $(VENV)/stamp ## kill -9 of client, scheduler and server at COUNT=200 random moments; SEED=n plays the same again
	@HS_CACHE=$${HS_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/sglang-hidden-states} \
	  $(VENV)/bin/python tests/campaign/kills.py --count $(COUNT) $(if $(SEED),--seed $(SEED))

HOSTS ?= 2
faults: $(VENV)/stamp ## The fault matrix: each step x whatever can go wrong, on HOSTS=2 real systemd hosts; resumable (hours); ONLY="stop:SIGKILL :reboot"
	@HS_CACHE=$${HS_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/sglang-hidden-states} \
	  $(VENV)/bin/python -m tests.campaign.faults --hosts $(HOSTS) $(if $(ONLY),--only $(ONLY))

clean: ## Remove what was made here (the engine's cache stays; it is shared between checkouts)
	@if [ -e $(VENV)/stamp ]; then $(MAKE) --no-print-directory demo-stop; fi
	rm -rf .local .ansible .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)

# `make` lists the targets. Each one sets up .venv by itself when it is missing or out of date: what a server
# needs for those that run one, the development extra for the others. PIP_ARGS goes to pip as it is; a machine
# without a GPU saves 2.2 GB by PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu".

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

MODEL ?=
BASE_URL ?=
WORKLOAD ?= synthetic
ARGS ?=
PIP_ARGS ?=
comma := ,

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo chat serve bench simulate readme-tables reproduce bench-sim bench-cores bench-cpu bench-front bench-step bench-grammar bench-trace bench-watch bench-replay bench-policy bench-parts bench-constants bench-served gpu-check agent-model agent-score test lint types browser bare-install check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN) ## live agents under fcfs and under continuum, side by side (about 3 minutes) [ARGS="--workload synthetic"]
	@$(BIN)/continuum demo $(ARGS)

chat: $(RUN) ## talk to the small agent model that comes along, and see its calls and what was warm [ARGS="--folder ."]
	@$(BIN)/continuum chat $(ARGS)

serve: $(RUN) ## serve the model that comes along, or another: [MODEL=FOLDER_OR_NAME] [ARGS="--port 8001"]
	@$(BIN)/continuum serve $(MODEL) $(ARGS)

bench: $(RUN) ## what HTTP costs per request and token (3 minutes); with BASE_URL=... replay WORKLOAD there
	@if [ -n "$(BASE_URL)" ]; then \
	  $(BIN)/continuum bench --base-url $(BASE_URL) --workload $(WORKLOAD) $(ARGS); \
	else $(BIN)/python -m benchmarks.http.overhead $(ARGS); fi

simulate: $(RUN) ## policies on a simulated H100, no GPU needed; writes out/today.html (a minute) [ARGS="--gpu h200"]
	@$(BIN)/continuum simulate --workload swe-bench --jobs 40 --rate 0.02,0.1 --seeds 3 \
	  --policies fcfs,fixed-ttl:10,continuum --json out/today.json --html out/today.html $(ARGS)

readme-tables: $(DEV) ## write what the commands of docs/simulator.md print now into it (two minutes)
	@$(BIN)/python -m tests.readme_tables

reproduce: $(RUN) ## the Continuum paper's settings in simulation, beside its figures (an hour of one core) [ARGS="--quick"]
	@$(BIN)/continuum reproduce $(ARGS)

bench-sim: $(DEV) ## the simulator against reality: the same jobs served and simulated (about 5 minutes)
	@$(BIN)/python -m benchmarks.simulator.reality $(ARGS)

bench-cores: $(DEV) ## what the engine loses on cores that others use too (4 minutes) [ARGS="--busy 0 1"]
	@$(BIN)/python -m benchmarks.http.shared_cores $(ARGS)

bench-cpu: $(DEV) ## tokens per second and latencies on this machine's CPUs (20 minutes) [ARGS="--peers FILE"]
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-front: $(DEV) ## what the next turn of a long chat costs before the core is asked (seconds) [ARGS="--tokens 200000"]
	@$(BIN)/python -m benchmarks.http.frontend_bench $(ARGS)

bench-step: $(DEV) ## what the scheduler alone costs, in microseconds (seconds) [ARGS="--steps 100"]
	@$(BIN)/python -m benchmarks.scheduler.step_bench $(ARGS)

bench-grammar: $(DEV) ## tokens per second with and without grammars (a minute) [ARGS="--batch 16"]
	@$(BIN)/python -m benchmarks.grammar.grammar_bench $(ARGS)

bench-trace: $(DEV) ## what a trace costs, on and off by turns at every step (5 minutes) [ARGS="--rounds 20"]
	@$(BIN)/python -m benchmarks.tracing.trace_steps $(ARGS)

bench-watch: $(DEV) ## what a trace and a viewer cost a whole server, in short windows (5 minutes) [ARGS="--rounds 40"]
	@$(BIN)/python -m benchmarks.tracing.trace_overhead $(ARGS)

bench-replay: $(DEV) ## 100,000 simulated steps, traced and decided again: no difference (a minute)
	@mkdir -p out
	@$(BIN)/continuum simulate --workload swe-bench --jobs 48 --rate 0.3 --kv-tokens 120000 \
	  --host-kv-tokens 200000 --policies continuum --trace out/replay.jsonl > out/replay.txt
	@$(BIN)/continuum trace replay out/replay.jsonl

bench-policy: $(DEV) ## policies on recorded jobs, and which promises hold; then parts and served (hours) [ARGS="--workloads FOLDER"]
	@$(BIN)/python -m benchmarks.policy $(ARGS)
	@$(MAKE) --no-print-directory bench-parts ARGS="$(filter --quick,$(ARGS))"
	@$(MAKE) --no-print-directory bench-served ARGS=

bench-parts: $(DEV) ## what each part of the agent policy brings, by taking it away (hours) [ARGS="--quick"]
	@$(BIN)/python -m benchmarks.policy --ablation $(ARGS)

bench-constants: $(DEV) ## the agent policy with each of its constants at half and at double (an hour) [ARGS="--quick"]
	@$(BIN)/python -m benchmarks.policy --constants $(ARGS)

bench-served: $(RUN) ## fcfs and continuum on the real engine, over HTTP, three times in turns (15 minutes)
	@$(BIN)/continuum demo --workload $(WORKLOAD) --jobs 16 --max-context-tokens 8192 \
	  --hidden-size 128 --layers 3 --repeats 3 --out out/served $(ARGS)

gpu-check: $(DEV) ## on a machine with a GPU: is its path right, how far is it from the floors (9 minutes) [ARGS="--json OUT"]
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

agent-model: $(DEV) ## train the model in the box anew, into out/agent-model (an hour on two cores)
	@$(BIN)/python -m eval.agent_model.training.train --out out/agent-model $(ARGS)

agent-score: $(DEV) ## what the model in the box solves of 200 new tasks (minutes) [ARGS="--temperature 0.7"]
	@$(BIN)/python -m eval.agent_model.training.evaluate $(ARGS)

test: $(DEV) ## run the tests [ARGS="tests/core -k pin"]
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## mypy --strict over the packages and their tests
	$(BIN)/mypy

browser: $(DEV) ## a browser for tests/browser, installed where that can be done
	@bash tests/browser/install.sh $(BIN)/playwright

bare-install: $(DEV) ## do the pinned requirements resolve on a machine that has only the package index? (seconds)
	@bash tests/install/resolve.sh $(BIN)/uv

check: bare-install browser lint types test ## all of the above, as CI runs them

format: $(DEV) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and out/
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# $(call install,EXTRAS,SIZE): pip's hundreds of lines become one a package; if it fails, its own last words follow.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(1) into $(VENV) (once; $(2)) ..."
	@PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	  -c constraints.txt $(PIP_ARGS) -e '$(1)' 2>&1 | tee $(VENV)/install.log \
	  | awk '/^Collecting / { print "  " $$2; fflush() } /^Installing / { print "  unpacking"; fflush() }' \
	  || { echo; echo "pip could not install it. Its last words (all of them: $(VENV)/install.log):"; \
	       tail -n 25 $(VENV)/install.log; exit 1; }
endef

$(RUN): pyproject.toml constraints.txt
	$(call install,.[report$(comma)trace],torch with its CUDA libraries is a download of 2.7 GB where there is no CPU build of it)
	@touch $@
	@echo "$(VENV) is ready."

$(DEV): pyproject.toml constraints.txt
	$(call install,.[dev],torch with its CUDA libraries is a download of 2.7 GB where there is no CPU build of it)
	@touch $(RUN) $@
	@echo "$(VENV) is ready."

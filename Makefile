# `make` lists the targets. Each one sets up .venv by itself when it is missing or out of date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

MODEL ?=
BASE_URL ?=
WORKLOAD ?= ../shared/workloads/miniswe-gemini3-text.jsonl
ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo chat serve bench simulate reproduce bench-sim bench-cores bench-cpu bench-front bench-step bench-grammar bench-trace bench-watch bench-replay bench-policy bench-parts bench-constants bench-served gpu-check agent-model agent-score test lint types browser check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## live agents under fcfs and under continuum, side by side (about 3 minutes) [ARGS="--workload synthetic"]
	@$(BIN)/python -m continuum.cli demo $(ARGS)

chat: $(STAMP) ## talk to the small agent model that comes along, and see its calls and what was warm [ARGS="--folder ."]
	@$(BIN)/python -m continuum.cli chat $(ARGS)

serve: $(STAMP) ## serve the model that comes along, or another: [MODEL=FOLDER_OR_NAME] [ARGS="--port 8001"]
	@$(BIN)/python -m continuum.cli serve $(MODEL) $(ARGS)

bench: $(STAMP) ## what HTTP costs per request and token (3 minutes); with BASE_URL=... replay WORKLOAD there
	@if [ -n "$(BASE_URL)" ]; then \
	  $(BIN)/python -m continuum.cli bench --base-url $(BASE_URL) --workload $(WORKLOAD) $(ARGS); \
	else $(BIN)/python -m eval.overhead $(ARGS); fi

simulate: $(STAMP) ## policies on a simulated H100, no GPU needed; writes out/today.html (a minute) [ARGS="--gpu h200"]
	@$(BIN)/python -m continuum.cli simulate --workload swe-bench --jobs 40 --rate 0.02,0.1 --seeds 3 \
	  --policies fcfs,fixed-ttl:10,continuum --json out/today.json --html out/today.html $(ARGS)

reproduce: $(STAMP) ## the Continuum paper's settings in simulation, beside its figures (an hour of one core) [ARGS="--quick"]
	@$(BIN)/python -m continuum.cli reproduce $(ARGS)

bench-sim: $(STAMP) ## the simulator against reality: the same jobs served and simulated (about 5 minutes)
	@$(BIN)/python -m eval.sim.reality $(ARGS)

bench-cores: $(STAMP) ## what the engine loses on cores that others use too (4 minutes) [ARGS="--busy 0 1"]
	@$(BIN)/python -m eval.shared_cores $(ARGS)

bench-cpu: $(STAMP) ## tokens per second and latencies on this machine's CPUs (20 minutes) [ARGS="--peers FILE"]
	@$(BIN)/python -m eval.cpu_bench $(ARGS)

bench-front: $(STAMP) ## what the next turn of a long chat costs before the core is asked (seconds) [ARGS="--tokens 200000"]
	@$(BIN)/python -m eval.front_end_bench $(ARGS)

bench-step: $(STAMP) ## what the scheduler alone costs, in microseconds (seconds) [ARGS="--steps 100"]
	@$(BIN)/python -m eval.step_bench $(ARGS)

bench-grammar: $(STAMP) ## tokens per second with and without grammars (a minute) [ARGS="--batch 16"]
	@$(BIN)/python -m eval.grammar_bench $(ARGS)

bench-trace: $(STAMP) ## what a trace costs, on and off by turns at every step (5 minutes) [ARGS="--rounds 20"]
	@$(BIN)/python -m eval.trace_steps $(ARGS)

bench-watch: $(STAMP) ## what a trace and a viewer cost a whole server, in short windows (5 minutes) [ARGS="--rounds 40"]
	@$(BIN)/python -m eval.trace_overhead $(ARGS)

bench-replay: $(STAMP) ## 100,000 simulated steps, traced and decided again: no difference (a minute)
	@mkdir -p out
	@$(BIN)/python -m continuum.cli simulate --workload swe-bench --jobs 48 --rate 0.3 --kv-tokens 120000 \
	  --host-kv-tokens 200000 --policies continuum --trace out/replay.jsonl > out/replay.txt
	@$(BIN)/python -m continuum.cli trace replay out/replay.jsonl

bench-policy: $(STAMP) ## all policies on recorded jobs, and which promises hold; then parts and served (hours) [ARGS="--quick"]
	@$(BIN)/python -m eval.policy_bench $(ARGS)
	@$(MAKE) --no-print-directory bench-parts ARGS="$(filter --quick,$(ARGS))"
	@$(MAKE) --no-print-directory bench-served ARGS=

bench-parts: $(STAMP) ## what each part of the agent policy brings, by taking it away (hours) [ARGS="--quick"]
	@$(BIN)/python -m eval.policy_bench --ablation $(ARGS)

bench-constants: $(STAMP) ## the agent policy with each of its constants at half and at double (an hour) [ARGS="--quick"]
	@$(BIN)/python -m eval.policy_bench --constants $(ARGS)

bench-served: $(STAMP) ## fcfs and continuum on the real engine, over HTTP, three times in turns (15 minutes)
	@$(BIN)/python -m continuum.cli demo --workload $(WORKLOAD) --jobs 16 --max-context-tokens 8192 \
	  --hidden-size 128 --layers 3 --repeats 3 --out out/served $(ARGS)

gpu-check: $(STAMP) ## on a machine with a GPU: is its path right, how far is it from the floors (9 minutes) [ARGS="--json OUT"]
	@$(BIN)/python -m eval.gpu_check $(ARGS)

agent-model: $(STAMP) ## train the model in the box anew, into out/agent-model (an hour on two cores)
	@$(BIN)/python -m eval.agent_model.train --out out/agent-model $(ARGS)

agent-score: $(STAMP) ## what the model in the box solves of 200 new tasks (minutes) [ARGS="--temperature 0.7"]
	@$(BIN)/python -m eval.agent_model.evaluate $(ARGS)

test: $(STAMP) ## run the tests [ARGS="tests/core -k pin"]
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict over the packages and their tests
	$(BIN)/mypy

browser: $(STAMP) ## a browser for tests/browser, installed where that can be done
	@bash tests/browser/install.sh $(BIN)/playwright

check: browser lint types test ## all of the above, as CI runs them

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and out/
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip's own output would be hundreds of lines; its errors go to the terminal as they are.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (a few minutes the first time: torch is large) ..."
	@PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' \
	  | awk '/^Collecting / { print "  " $$2; fflush() } /^Installing / { print "  unpacking"; fflush() }'
	@touch $@
	@echo "$(VENV) is ready."

# `make` lists the targets. Each one creates .venv when it is missing or out of date, with what a server needs
# or, for tests and benchmarks, with the development extra. PIP_ARGS is passed to pip unchanged; a machine
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
# In their order: sorted by number of tests, the files with one long test would all come last.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# A test starts processes by the hundred: each reads the byte code that the first one wrote, everywhere.
export PYTHONDONTWRITEBYTECODE :=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo chat serve bench simulate readme-tables reproduce bench-sim bench-cores combinations \
  bench-cpu bench-front bench-turn bench-step bench-drafts bench-grammar bench-trace bench-watch bench-replay bench-policy \
  bench-parts bench-constants bench-estimator bench-served gpu-check agent-model agent-score test test-all lint \
  test-most types browser bare-install check release format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN) ## live agents under fcfs and under continuum, side by side (about 3 minutes) [ARGS="--workload synthetic"]
	@$(BIN)/continuum demo $(ARGS)

chat: $(RUN) ## chat with the bundled agent model; shows its tool calls and cache hits [ARGS="--folder ."]
	@$(BIN)/continuum chat $(ARGS)

serve: $(RUN) ## serve the bundled model, or another: [MODEL=FOLDER_OR_NAME] [ARGS="--port 8001"]
	@$(BIN)/continuum serve $(MODEL) $(ARGS)

combinations: $(DEV) ## random features and operators' calls; each answer as the request alone (10 minutes) [ARGS="--draws 99 --seed 7"]
	@$(BIN)/python -m tests.reliability.combinations $(ARGS)

bench: $(RUN) ## HTTP overhead per request and token (3 minutes); with BASE_URL=... replay WORKLOAD there
	@if [ -n "$(BASE_URL)" ]; then \
	  $(BIN)/continuum bench --base-url $(BASE_URL) --workload $(WORKLOAD) $(ARGS); \
	else $(BIN)/python -m benchmarks.http.overhead $(ARGS); fi

simulate: $(RUN) ## policies on a simulated H100, no GPU needed; writes out/today.html (a minute) [ARGS="--gpu h200"]
	@$(BIN)/continuum simulate --workload swe-bench --jobs 40 --rate 0.02,0.1 --seeds 3 \
	  --policies fcfs,fixed-ttl:10,continuum --json out/today.json --html out/today.html $(ARGS)

readme-tables: $(DEV) ## run the commands of docs/simulator.md and update their output in it (two minutes)
	@$(BIN)/python -m tests.readme_tables

reproduce: $(RUN) ## simulate the Continuum paper's settings and compare with its figures (an hour of one core) [ARGS="--quick"]
	@$(BIN)/continuum reproduce $(ARGS)

bench-sim: $(DEV) ## accuracy of the simulator: the same jobs served and simulated (about 5 minutes)
	@$(BIN)/python -m benchmarks.simulator.reality $(ARGS)

bench-cores: $(DEV) ## slowdown of the engine on cores shared with busy processes (4 minutes) [ARGS="--busy 0 1"]
	@$(BIN)/python -m benchmarks.http.shared_cores $(ARGS)

bench-cpu: $(DEV) ## throughput and latency on this machine's CPUs (20 minutes) [ARGS="--peers FILE"]
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-front: $(DEV) ## API server time for the next turn of a long chat (seconds) [ARGS="--tokens 200000"]
	@$(BIN)/python -m benchmarks.http.frontend_bench $(ARGS)

bench-turn: $(DEV) ## API server and core time for the next turn of a 100k-token job, appended and whole (a minute) [ARGS="--tokens 200000"]
	@$(BIN)/python -m benchmarks.http.next_turn $(ARGS)

bench-step: $(DEV) ## scheduler time per step, without a model, in microseconds (seconds) [ARGS="--steps 100"]
	@$(BIN)/python -m benchmarks.scheduler.step_bench $(ARGS)

bench-drafts: $(DEV) ## tokens per step of drafters on recorded texts, without a model (a minute) ARGS="jobs.jsonl [--all]"
	@$(BIN)/python -m benchmarks.drafts $(ARGS)

bench-grammar: $(DEV) ## throughput with and without grammars (a minute) [ARGS="--batch 16"]
	@$(BIN)/python -m benchmarks.grammar.grammar_bench $(ARGS)

bench-trace: $(DEV) ## overhead of tracing per step, traced and untraced engines in turns (5 minutes) [ARGS="--rounds 20"]
	@$(BIN)/python -m benchmarks.tracing.trace_steps $(ARGS)

bench-watch: $(DEV) ## overhead of tracing and of a viewer for a whole server (5 minutes) [ARGS="--rounds 40"]
	@$(BIN)/python -m benchmarks.tracing.trace_overhead $(ARGS)

bench-replay: $(DEV) ## trace 100,000 simulated steps and replay their decisions: no difference (a minute)
	@mkdir -p out
	@$(BIN)/continuum simulate --workload swe-bench --jobs 48 --rate 0.3 --kv-tokens 120000 \
	  --host-kv-tokens 200000 --policies continuum --trace out/replay.jsonl > out/replay.txt
	@$(BIN)/continuum trace replay out/replay.jsonl

bench-policy: $(DEV) ## policies on recorded jobs, checked against their promises; then bench-parts, bench-served (hours) [ARGS="--workloads FOLDER"]
	@$(BIN)/python -m benchmarks.policy $(ARGS)
	@$(MAKE) --no-print-directory bench-parts ARGS="$(filter --quick,$(ARGS))"
	@$(MAKE) --no-print-directory bench-served ARGS=

bench-parts: $(DEV) ## ablation: the agent policy without each of its parts (hours) [ARGS="--quick"]
	@$(BIN)/python -m benchmarks.policy --ablation $(ARGS)

bench-constants: $(DEV) ## sensitivity: the agent policy with each constant halved and doubled (an hour) [ARGS="--quick"]
	@$(BIN)/python -m benchmarks.policy --constants $(ARGS)

bench-estimator: $(DEV) ## predictions of the estimator and of simpler methods, on recorded tool times (minutes) ARGS="--workload FILE"
	@$(BIN)/python -m benchmarks.estimate $(ARGS)

bench-served: $(RUN) ## fcfs against continuum on the real engine over HTTP, three times in turns (15 minutes)
	@$(BIN)/continuum demo --workload $(WORKLOAD) --jobs 16 --max-context-tokens 8192 \
	  --hidden-size 128 --layers 3 --repeats 3 --out out/served $(ARGS)

gpu-check: $(DEV) ## on a GPU: correctness of the GPU backend, and its times against the hardware limits (9 minutes) [ARGS="--json OUT"]
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

agent-model: $(DEV) ## train the bundled model again, into out/agent-model (an hour on two cores)
	@$(BIN)/python -m benchmarks.agent_model.train --out out/agent-model $(ARGS)

agent-score: $(DEV) ## share of 200 new tasks that the bundled model solves (minutes) [ARGS="--temperature 0.7"]
	@$(BIN)/python -m benchmarks.agent_model.evaluate $(ARGS)

test: $(DEV) ## run the quick tests (under 4 minutes), or those named [ARGS="tests/core -k pin"]
	$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),$(PARALLEL) -m "not slow")

test-all: $(DEV) ## run every test (half an hour)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

lint: $(DEV) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## mypy --strict over the packages and their tests
	$(BIN)/mypy

browser: $(DEV) ## install a browser for tests/browser, where that is possible
	@bash tests/browser/install.sh $(BIN)/playwright

bare-install: $(DEV) ## resolve the pinned requirements as a machine with only the package index would (seconds)
	@bash tests/install/resolve.sh $(BIN)/uv

test-most: $(DEV) ## run every test but those of ten seconds and more (20 minutes)
	$(BIN)/python -m pytest $(PARALLEL) -m "not long" $(ARGS)

check: bare-install browser lint types test-most ## what CI runs: bare-install, browser, lint, types, test-most

release: $(DEV) ## make a release: version, changelog, tag, sdist, wheel, image; publishes nothing [VERSION=0.2.0] [ARGS="--dry-run"]
	@$(BIN)/python packaging/release.py $(VERSION) $(ARGS)

format: $(DEV) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and out/
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# $(call install,EXTRAS,SIZE): one line per package instead of all of pip's output; if it fails, the end of that follows.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(1) into $(VENV) (once; $(2)) ..."
	@PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	  -c constraints.txt $(PIP_ARGS) -e '$(1)' 2>&1 | tee $(VENV)/install.log \
	  | awk '/^Collecting / { print "  " $$2; fflush() } /^Installing / { print "  unpacking"; fflush() }' \
	  || { echo; echo "pip could not install it. Its last lines (full log: $(VENV)/install.log):"; \
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

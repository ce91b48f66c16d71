# Two commands need nothing but Python 3.11 and pip: `make run` and `make test`.
# Every path is relative, so the checkout may live in a directory with spaces in its name.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable
# pip compiles on one core. Some packages have files that are templates, or of another Python.
COMPILE := $(PY) -m compileall -qq -j 0 $(VENV)/lib || true
MODEL := smollm2-135m-instruct
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' harness/_version.py)
# Three workers on two cores: two of them wait for the engines of their groups most of the time.
PYTEST_ARGS ?= -n 3 --dist loadgroup --durations=40 --durations-min=5

# pytest rewrites its plugins and the tests, and a test starts a hundred processes: all of them read what was compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run check test bench soak dist release docs reference setup setup-dev model lint types layers unit pytest fmt clean help

help:  ## list the recipes
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

run: setup model  ## a scenario, end to end, on a real model
	$(PY) -m harness run quickstart $(ARGS)

# The type checker has one core, and the tests the other until it is done. Where make can, `check` prints a recipe when it ends.
check: setup-dev  ## what to run before every commit: under three minutes, no model, no agents, no browser
	@$(MAKE) --no-print-directory --jobs $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint types layers unit

test: setup-dev model lint  ## everything that runs without a GPU
	@$(MAKE) --no-print-directory --jobs types layers pytest

bench: setup-dev  ## figures of the session server, as ratios to a bare one, and of packs
	$(PY) bench/startup.py
	$(PY) bench/turn_overhead.py
	$(PY) bench/dialects.py
	$(PY) bench/shards.py
	$(PY) bench/session_memory.py
	$(PY) bench/collecting_beside.py
	$(PY) bench/repeat_guard.py
	$(PY) bench/packing.py
	$(PY) -m bench.relay
	$(PY) -m bench.routed_experts

soak: setup-dev model  ## what takes hours: 5,000 random histories, 10,000 served conversations, 300 killed servers, 20 killed managers of sandboxes, 200 deaths each of server, client and engine in live streams, 20 minutes of steady load, 1,000 aborts, 200 of agents in sandboxes, the abort suites and five agents in each kind of sandbox, 300 of tool loops, 5 deaths and 200 killed rollouts on each real engine, and guards taken out one by one
	$(PY) -m tests.mutants
	HARNESS_SOAK_EXAMPLES=5000 $(PY) -m pytest -n 2 tests/system/server/test_faults_stateful.py \
		tests/conformance/families/test_properties.py
	HARNESS_SOAK_EXAMPLES=10000 $(PY) -m pytest -n 2 tests/dialects/test_any_body.py
	HARNESS_SOAK_EXAMPLES=100000 $(PY) -m pytest tests/unit/repeat_guard/test_detector_sweep.py
	HARNESS_SOAK_EXAMPLES=300 $(PY) -m pytest tests/unit/server/test_resumed_histories.py \
		tests/unit/server/test_teachers.py
	$(PY) -m tests.conformance.families.serve_many
	HARNESS_SOAK_AGENTS=300 $(PY) -m pytest -n 2 tests/unit/adapters/test_delivered_tokens.py tests/system/roles
	HARNESS_SOAK_AUDITS=all $(PY) -m pytest tests/learner/test_audit.py
	$(PY) -m bench.distilling
	HARNESS_SOAK_LIBRARIES=all $(PY) -m pytest tests/conformance/libraries
	$(PY) -m harness run long_session
	$(PY) -m harness run chain_vllm
	HARNESS_SOAK_KILLS=300 $(PY) -m pytest -s tests/soak
	$(PY) -W error soak/abort_cycles.py --cycles 100 --sessions 8 --programs 4 --sandbox bwrap
	$(PY) -W error soak/abort_cycles.py --cycles 100 --sessions 4 --programs 2 --sandbox podman
	HARNESS_SOAK_BOXES=all $(PY) -m pytest tests/system/sandboxes/test_abort_plays.py tests/system/sandboxes/test_real_agents.py tests/system/sandboxes/test_agent_lives.py
	HARNESS_SOAK_KILLS=20 $(PY) -m pytest tests/system/sandboxes/test_killed_managers.py
	HARNESS_SOAK_KILLS=200 $(PY) -m pytest -n 2 tests/system/server/test_live_kills.py
	HARNESS_SOAK_CUTS=200 $(PY) -m pytest tests/system/relay/test_cuts.py
	$(BIN)/uv venv --quiet --clear --python 3.12 $(VENV)/harbor
	$(BIN)/uv pip install --quiet --python $(VENV)/harbor/bin/python -r tests/real/trainers/harbor.txt .
	HARNESS_HARBOR_PYTHON=$(CURDIR)/$(VENV)/harbor/bin/python $(PY) -m pytest tests/real/trainers/test_harbor_itself.py
	$(PY) -W error soak/steady_load.py --minutes 20
	$(PY) -W error soak/abort_cycles.py --cycles 1000
	$(PY) -W error soak/abort_cycles.py --engine sglang --turns 6 --cycles 300 --sessions 32 --dtype bfloat16
	$(PY) -W error soak/abort_cycles.py --engine vllm --turns 6 --cycles 300 --sessions 32 --dtype bfloat16
	$(PY) -W error soak/engine_deaths.py --engine sglang --deaths 5
	$(PY) -W error soak/engine_deaths.py --engine vllm --deaths 5
	HARNESS_SOAK_AGENTS=200 $(PY) -m pytest -s tests/real/engines/test_resumed_rollouts.py

docs: setup-dev  ## the documentation as a site, in site/
	$(PY) docs/site/build.py site

reference: setup-dev  ## write the pages of docs/ that are made from the code
	$(PY) docs/site/written.py

setup: $(VENV)/.installed-run

setup-dev: $(VENV)/.installed-dev

model: $(VENV)/.installed-run
	@$(PY) -m harness model get $(MODEL)

lint: setup-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: setup-dev
	$(PY) -m mypy

layers: setup-dev
	$(PY) -c "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

# A fifth of the random examples. Eight workers keep two cores busy, because a test waits for servers, processes and clocks
# longer than it computes, and a worker has to collect all tests first; more threads of torch would only wait for each other.
unit: setup-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 8 -q --hypothesis-profile=check -m "not model and not agent and not browser" tests/unit

pytest: setup-dev
	$(PY) -m pytest $(PYTEST_ARGS)

dist: setup-dev  ## build wheel and sdist in dist/, and install them by name in clean environments of every Python here
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) deploy/clean_environments.py check dist

release: setup-dev  ## check dist, write the changelog of this version from changelog.d/, commit, tag, build; pushing the tag publishes
	@git diff --quiet HEAD || { echo "expected a clean tree: commit or stash first"; exit 1; }
	@! git rev-parse --quiet --verify refs/tags/v$(VERSION) || { echo "v$(VERSION) exists: raise harness/_version.py"; exit 1; }
	@$(MAKE) --no-print-directory dist
	sed '/^## $(VERSION) (not released yet)$$/d' CHANGELOG.md > dist/changelog && cp dist/changelog CHANGELOG.md && rm dist/changelog
	$(PY) -m towncrier build --yes --version $(VERSION)
	git commit --quiet --all --message "release: $(VERSION)"
	git tag v$(VERSION)
	$(PY) -m build --outdir dist .
	@echo "v$(VERSION) is tagged and in dist/: git push origin HEAD v$(VERSION) publishes it"

fmt: setup-dev  ## format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environment and what tools left behind; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist site

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-run: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) '.[run,local,parquet,renderers]'
	@$(COMPILE)
	@touch $@

# One call of pip installs what `make run` needs, too.
$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) '.[run,local,otel,parquet,ray,renderers,docs,dev]'
	@$(COMPILE)
	@touch $(VENV)/.installed-run $@

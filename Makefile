# Each target sets up what it needs: a .venv from pinned versions, made once and again when the pins change. `make demo` installs
# requirements/demo.txt alone; the others add the rest, requirements/test.txt, to the same .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_FOR_DEMO := $(VENV)/.ready-for-demo
UV := uv==0.13.9 # installs in a third of pip's time, and compiles pins for all platforms; it reads UV_DEFAULT_INDEX, not pip's settings
PIP := -m pip install --quiet --quiet --disable-pip-version-check # errors, and no warnings of an index that lacks a package
INSTALL = $(VENV)/bin/uv pip install --quiet --python $(RUN)
PAPER ?= micro
SCALE ?= small
PARALLEL := --numprocesses auto --dist worksteal
# Tests that need more than Python and torch: SLURM, hosts, frameworks, notebooks, a browser; and those of whole commands: trainings that
# are disturbed, sweeps, benchmarks, the papers' studies on tiny settings.
SYSTEM := tests/slurm tests/net tests/clients $(patsubst %,tests/dist/test_%.py,soak gallery framework_options other_packages sweeps launch \
  lost_workers_runs checkpointing_ranks full_disk_ranks absent_peers warm_up devices bench_network bench_step benchmarks profile_ranks rank_group lost_ranks) \
  $(patsubst %,tests/tools/test_%.py,notebooks browser reproduce kills other_contents bench_gpu start_up full_disk doctor hydra console damage)
TESTS := tests/dist tests/gpu tests/tools tests/unit $(addprefix --ignore=,$(SYSTEM)) # what takes longest first: the end fills with what is short
# Tests with processes wait for them a third of their time: two workers more than cores. See tests/scheduling.py.
SHARED = --numprocesses $(shell $(PYTHON) -c 'import os; print((len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) + 2)') --dist loadgroup --no-loadscope-reorder
export PYTHONDONTWRITEBYTECODE := # hundreds of processes would each compile all sources, and pytest rewrite all tests
PACKAGES := slurmctld slurmd slurm-client munge iproute2 chromium # SLURM and hosts for their tests, a browser for the pages

.DEFAULT_GOAL := help
.PHONY: help setup demo reproduce study pages test test-system system-packages check docs dist lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(READY) ## make the virtual environment from pinned versions

$(READY_FOR_DEMO): requirements/uv.txt requirements/demo.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))' || \
	  { echo "python 3.11.5 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); name another with PYTHON=..."; exit 1; }
	@echo "setting up $(VENV): torch and what else the demo needs, from requirements/demo.txt"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) $(PIP) --no-compile --require-hashes --requirement requirements/uv.txt
	@$(INSTALL) --require-hashes --requirements requirements/demo.txt
	@$(INSTALL) --no-deps --editable .
	@touch $@

$(READY): $(READY_FOR_DEMO) requirements/test.txt
	@echo "adding the rest to $(VENV), from requirements/test.txt"
	@$(INSTALL) --require-hashes --requirements requirements/test.txt
	@touch $@

demo: $(READY_FOR_DEMO) ## train a small ResNet with five methods on four workers; table and figures at the end
	@echo "training 10 runs on real digits (5 methods x 2 seeds, 4 workers each)"
	@$(RUN) -m experiments.sweep demo --jobs 1 # one at a time: its times are shown
	@$(RUN) -m experiments.figures

reproduce: $(READY) ## a paper's study, figures and page: PAPER=micro|gaussiank|oktopk|fft|mgwfbp|diloco|sparseloco|demo_momentum SCALE=small|medium|paper
	@$(RUN) -m experiments.reproduce $(PAPER) --scale $(SCALE) $(if $(ROOT),--root $(ROOT)) $(if $(OUT),--out $(OUT))

study: $(READY) ## the runs of studies of conf/sweep: STUDY="long gpt_rates/signs" ROOT=DIR; the same command resumes; hours of a core
	@test -n "$(STUDY)" || { echo "name a study of conf/sweep: make study STUDY=long ROOT=DIR"; exit 2; }
	@for study in $(STUDY); do $(RUN) -m experiments.sweep $$study $(if $(ROOT),dataset.root=$(ROOT)) output=results/study --jobs 1 || exit; done

pages: $(READY) ## write the pages of published runs from results/published/runs; RUNS="DIR DIR" adds finished runs first; PAGE=long
	@$(RUN) -m experiments.pages $(PAGE) $(addprefix --runs ,$(RUNS))

test: $(if $(TORCH),$(VENV)-torch/$(TORCH).ready,$(READY)) ## tests of the library and of the commands' parts; FAST=1: the laws on few cases, without processes; TORCH=2.11: another torch
	@$(if $(FAST),MICRO_TESTS=fast) $(if $(TORCH),$(VENV)-torch/bin/python,$(RUN)) -m pytest $(if $(FAST),tests/unit -m "not slow" $(PARALLEL),$(TESTS) $(SHARED)) $(ARGS)

test-system: $(READY) ## the tests of whole commands, on SLURM, on hosts, with frameworks, notebooks and a browser, as far as this machine has them
	@$(RUN) -m pytest $(SYSTEM) $(SHARED) $(ARGS)

$(VENV)-torch/%.ready: requirements/uv.txt
	@$(PYTHON) -m venv --clear $(VENV)-torch
	@$(VENV)-torch/bin/python $(PIP) --require-hashes --requirement requirements/uv.txt
	@printf 'torch==%s.*\ntorchvision\n' "$*" > $(VENV)-torch/torch.txt
	@$(VENV)-torch/bin/uv pip install --quiet --python $(VENV)-torch/bin/python --override $(VENV)-torch/torch.txt \
	  --editable '.[experiments,workloads,services,frameworks,dev]'
	@touch $@

system-packages: ## install what some tests need beside Python, as root on Debian or Ubuntu; they are skipped where it is missing
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "system packages are installed by root with apt-get alone; the tests need: $(PACKAGES)"; exit 1; fi
	@missing=$$(for each in $(PACKAGES); do dpkg-query -W -f='$${Status}' $$each 2>/dev/null | grep -q 'ok installed' || echo $$each; done); \
	  if [ -n "$$missing" ]; then echo "installing" $$missing && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi

check: $(READY) ## formatter, linter and type check
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

docs: $(READY) ## build the pages into site/, every link checked; needs no network
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "open site/index.html"

dist: $(READY) ## build and check the distributions, install the wheel in a new environment without numba, train with it
	@rm -rf dist && $(RUN) -m build --outdir dist . >/dev/null
	@$(RUN) -m twine check --strict dist/*
	@$(PYTHON) -m venv --clear $(VENV)-dist
	@$(VENV)-dist/bin/python $(PIP) dist/*.whl
	@cd $(VENV)-dist && bin/python -c 'import importlib.util as u, micro; print("installed:", micro.__file__); assert not u.find_spec("numba")'
	@cd $(VENV)-dist && OMP_NUM_THREADS=1 bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	  ../tests/dist/scripts/sparse_ddp.py | tee train.log; grep -q '^step 100' train.log # gloo may abort a process that is leaving
	@rm -rf $(VENV)-dist

LOCK = $(VENV)-lock/bin/uv pip compile --quiet --universal --no-strip-extras --python-version 3.11.5 --generate-hashes --no-annotate \
  --prerelease if-necessary-or-explicit --custom-compile-command "make lock"
lock: ## renew requirements/ from pyproject.toml, with the checksums of the files for every platform
	@$(PYTHON) -m venv --clear $(VENV)-lock
	@$(VENV)-lock/bin/python $(PIP) $(UV)
	@$(LOCK) --upgrade pyproject.toml $(foreach each,experiments workloads services frameworks dev docs,--extra $(each)) --output-file requirements/test.txt
	@$(LOCK) --upgrade pyproject.toml --extra experiments --constraints requirements/test.txt --output-file requirements/demo.txt
	@echo $(UV) | $(LOCK) --upgrade - --output-file requirements/uv.txt
	@rm -rf $(VENV)-lock

clean: ## remove figures, pages and caches, which can be made again; no runs
	@rm -rf results/figures site dist results/coverage .pytest_cache .mypy_cache .ruff_cache

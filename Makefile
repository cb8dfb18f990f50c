# Each target sets up what it needs: a .venv from pinned versions, made once and again when the pins change.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
PAPER ?= micro
SCALE ?= small

.DEFAULT_GOAL := help
.PHONY: help setup demo figures reproduce test test-net test-slurm slurm-packages check format bench lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## make the virtual environment from pinned versions

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); name another with PYTHON=..."; exit 1; }
	@echo "setting up $(VENV): torch and friends from requirements.lock, a few minutes the first time"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(READY) ## train a small ResNet with five methods on four workers; table and figures at the end
	@echo "training 10 runs on real digits (5 methods x 2 seeds, 4 workers each)"
	@$(RUN) -m experiments.sweep demo
	@$(RUN) -m experiments.figures

figures: $(READY) ## redraw tables and figures from the run folders alone
	@$(RUN) -m experiments.figures

reproduce: $(READY) ## a paper's study, figures and page: PAPER=micro|gaussiank|oktopk|fft|mgwfbp SCALE=small|paper
	@$(RUN) -m experiments.reproduce $(PAPER) --scale $(SCALE) $(if $(ROOT),--root $(ROOT)) $(if $(OUT),--out $(OUT))

test: $(READY) slurm-packages ## run every test that this machine can run
	@$(RUN) -m pytest tests/unit --numprocesses auto --dist worksteal
	@$(RUN) -m pytest tests/dist tests/net tests/slurm

test-net: $(READY) ## run the tests on hosts joined by shaped links (network namespaces: needs root)
	@$(RUN) -m pytest tests/net

test-slurm: $(READY) slurm-packages ## run the tests on a SLURM of their own, started and stopped by them
	@$(RUN) -m pytest tests/slurm

slurm-packages: # as root on Debian or Ubuntu; where they cannot be installed the tests say so and are skipped
	@PATH="$$PATH:/usr/sbin"; { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing SLURM for its tests" && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null 2>&1; } || \
	  echo "SLURM is not installed, and cannot be here: its tests are skipped"

check: $(READY) ## formatter, linter and type check
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

doctor: $(READY) ## tell what this machine can do
	@$(RUN) -m experiments.doctor

format: $(READY) ## format the code and mend what the linter can
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

bench: $(READY) ## measure the cost of a step against its floor, and of the loop against plain DDP
	@$(RUN) -m experiments.bench step
	@$(RUN) -m experiments.bench loop

lock: ## renew requirements.lock from pyproject.toml
	@$(PYTHON) -m venv --clear $(VENV)-lock
	@$(VENV)-lock/bin/pip install --quiet --editable '.[experiments,zoo,dev]'
	@{ echo "# All pins, made by 'make lock' from pyproject.toml. Packages for NVIDIA GPUs exist for Linux alone."; \
	   $(VENV)-lock/bin/pip freeze --exclude-editable --exclude pip --exclude setuptools | \
	   sed -E 's/^((nvidia|cuda)-.*|triton==.*)$$/\1 ; sys_platform == "linux"/'; } > requirements.lock
	@rm -rf $(VENV)-lock

clean: ## remove run folders and figures, keep what is published
	@rm -rf results/runs results/figures results/papers

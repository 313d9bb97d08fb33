# Two commands do all the set-up: `make run` and `make test`. Each makes .venv and installs what it needs when that is missing
# or stale, and does nothing twice.

PYTHON ?= python3
QUESTION ?= What is the capital of France?
MODEL ?= smollm2-135m

BIN := .venv/bin
MEMBERS := $(patsubst %/pyproject.toml,%,$(wildcard */pyproject.toml */*/pyproject.toml))
PROJECTS := $(addsuffix /pyproject.toml,$(MEMBERS))
NATIVE := $(wildcard platforms/*/CMakeLists.txt platforms/*/*/native/*)

.PHONY: run test lint bench matrix evidence nightly clean

run: .venv/run.stamp
	@$(BIN)/fitment run $(MODEL) "$(QUESTION)"

test: .venv/dev.stamp
	$(BIN)/pytest -m "not slow"

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/run.stamp .venv/peers.stamp
	$(BIN)/python benchmarks/peers.py --peer llama_cpp=.venv/peers/bin/python

matrix: .venv/run.stamp
	$(BIN)/capabilities matrix --write compat_matrix/snapshot

# What this machine's kernels were seen to do; the second run is of the portable build.
EVIDENCE := $(CURDIR)/compat_matrix/snapshot/evidence
evidence: .venv/dev.stamp
	$(BIN)/pytest -q --pyargs fitment.conformance --platform cpu --evidence $(EVIDENCE)/cpu-$(HARDWARE).json
	FITMENT_CPU_ISA=generic $(BIN)/pytest -q --pyargs fitment.conformance --platform cpu --evidence $(EVIDENCE)/cpu-$(HARDWARE)-generic.json
	$(MAKE) matrix
HARDWARE = $(shell $(BIN)/python -c "from fitment.plugins import load; print(load().devices[0].hardware)")

nightly: .venv/dev.stamp
	$(BIN)/pytest

clean:
	rm -rf .venv build $(addsuffix /build,$(MEMBERS))

# The build tools first, so that members build in this environment and not in one that is made anew for each.
.venv/tools.stamp: constraints.txt requirements-build.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-build.txt
	@touch $@

.venv/run.stamp: .venv/tools.stamp $(PROJECTS) $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt $(addprefix --editable ./,$(MEMBERS))
	@touch $@

.venv/dev.stamp: .venv/run.stamp requirements-dev.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
	@touch $@

# Engines to measure beside, in an environment of their own.
.venv/peers.stamp: .venv/tools.stamp
	$(PYTHON) -m venv .venv/peers
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/peers/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	@touch $@

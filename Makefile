# Each target sets up what it needs, on a fresh machine and alone.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SETTINGS := pyproject.toml constraints.txt Makefile
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test slow browser units services soak lint types imports tables clean

.venv/runtime: $(SETTINGS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip --disable-pip-version-check install --quiet 'pip>=25.1'
	$(PIP) torch
	$(PIP) --editable '.[cpu,embedded,eval]'
	touch $@

.venv/tools: .venv/runtime
	$(PIP) --group test --group dev
	touch $@

demo: .venv/runtime
	$(BIN)/python -m pipelines.docstrings_corpus demo/corpus
	$(BIN)/whiten-index build demo/corpus --text-column name --text-column text --id-column id \
	    --keep signature --max-length 128 --k 128 --exponent 0.25 --out demo/index
	$(BIN)/whiten-index search demo/index --top-k 3 \
	    "how do I parse a date from a string" "read a gzip compressed file" \
	    "run a function in several processes at once" "eigenvalues of a symmetric matrix" \
	    "split a text into tokens for a language model"

test: .venv/tools
	$(BIN)/python -m pytest

slow: .venv/tools
	$(BIN)/python -m pytest -m "slow and not service"

# Debian's package; elsewhere name a browser in WHITEN_INDEX_CHROMIUM.
CHROMIUM := $(or $(WHITEN_INDEX_CHROMIUM),/usr/bin/chromium)
$(CHROMIUM):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium

.venv/browser: .venv/tools
	$(PIP) --group browser
	touch $@

browser: .venv/browser $(CHROMIUM)
	WHITEN_INDEX_CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -m browser

# Debian's packages, for systemd-analyze and promtool alone.
SYSTEMD := /usr/bin/systemd-analyze
PROMTOOL := /usr/bin/promtool
$(SYSTEMD) $(PROMTOOL):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends systemd prometheus

units: .venv/tools $(SYSTEMD) $(PROMTOOL)
	$(BIN)/python -m pytest tests/test_deploy.py

.venv/service: .venv/tools
	$(PIP) --group service
	touch $@

# Real engines, each started by its tests; the suites of langchain-tests want asyncio's mode auto.
services: .venv/service
	$(BIN)/python -m pytest -m "service and not slow" -o asyncio_mode=auto

# A worker and then a machine of a cluster killed in mid-build, ten times in a row: some minutes.
soak: .venv/service
	$(BIN)/python -m pytest -m "service and slow"

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/tools
	$(BIN)/mypy

imports: .venv/tools
	$(BIN)/lint-imports

tables: .venv/tools
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf .venv demo

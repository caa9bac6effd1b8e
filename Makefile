# SPDX-License-Identifier: Apache-2.0
# Everything installs what it needs, into .venv (or, for the real engine, into a cached venv of its own).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# mypy sees a namespace package only through real files: the strict mode links each one.
STRICT := --config-settings editable_mode=strict

.PHONY: help demo test test-all test-uncompiled test-cuda test-engine fuzz sanitize chaos simulate simulate-mutants takeover soak live-proof choice-live agents-proof peer-proof hand-over-proof floods fault-walk salt-attack salt-timing lint lint-quick lint-types format chart-readme http-page bench bench-peers peer-pulls docs audit lock sbom image-check release-check clean

help:
	@echo "make demo         install into .venv, without a C compiler, and watch the router predict what four replicas reuse"
	@echo "make test         install with compiled modules and run the tests of every part, in minutes"
	@echo "make test-all     the rest: whole routers, faults, fuzzing, containers, the demo, all examples of the properties"
	@echo "make test-uncompiled  the tests of make test whose result compiled modules decide, with the modules uncompiled"
	@echo "make test-engine  the same claims against a real vLLM (its CPU build, 3 GB, cached)"
	@echo "make test-cuda    its part for the engine patch and the offload tiers on a CUDA device, with PYTHON=an environment that has vLLM"
	@echo "make fuzz         a million inputs against the decoders and what follows, ten million heads and answers, and the HTTP API's description"
	@echo "make sanitize     the compiled modules under gcc's address and undefined-behaviour sanitizers (part of make fuzz)"
	@echo "make chaos        random schedules of faults: the index is right, or says that it is not (minutes; make test has a short part)"
	@echo "make simulate     whole fleets on a virtual clock, each from a seed: does a law break (as long as ARGS say)"
	@echo "make simulate-mutants  faults put into the product on purpose: does the simulation find them"
	@echo "make takeover     two routers, one killed again and again: how long until the other has its workers, and is it right"
	@echo "make soak         an hour under load: does its memory stay flat, and are its answers right at the end"
	@echo "make floods       one bad event source, many idle clients of /events: memory, descriptors and latency (minutes)"
	@echo "make live-proof  power failures, lost stores and restarts: no router says live without proof"
	@echo "make choice-live  the choice over HTTP: cold chats, a popular system prompt, a restart; by policy, sim or vLLM"
	@echo "make agents-proof  requests of agents to two real vLLM servers, by proxy and Envoy: predicted = delivered (minutes)"
	@echo "make hand-over-proof  four real vLLM engines, one drained: what the others reuse, with and without a hand-over (minutes)"
	@echo "make peer-proof   three real vLLM engines fetch chunks from each other while all evict: right answers, counted misses (20 minutes)"
	@echo "make fault-walk   make each mistake of an operator, and check what kvrouter doctor finds and how soon (minutes)"
	@echo "make salt-attack  100,000 guesses of one tenant about another's prompts, by all that its key can read (20 minutes)"
	@echo "make salt-timing  what the time of an answer shows of another tenant's prompts, with and without made salts"
	@echo "make lint         ruff, mypy, spelling and plain words"
	@echo "make chart-readme renew the table of values in the Helm chart's README"
	@echo "make bench-peers  beside dynamo.indexer, dynamo.select_service, vllm-router and llm-d's layout in Redis"
	@echo "make bench        what has no peer: a match in process, a start with a full store"
	@echo "make docs         the documentation as a site: build/site/index.html"
	@echo "make audit        known vulnerabilities of the installed packages (needs the public database)"
	@echo "make lock         renew requirements-test.lock, and those of the image, with hashes"
	@echo "make sbom         what is in the router's image, as CycloneDX: build/sbom.json"
	@echo "make image-check  the steps of the router's image in a chroot of Debian's packages (root, debootstrap)"
	@echo "make release-check  build a release twice and compare, install it in every Python here, check chart, SBOM and image"
	@echo "make clean        remove .venv and caches"

# Strict editable installs link the files that exist now, so a new file needs a new install.
SOURCES := setup.py $(shell find client contract events router engine_patch simulator replay shadow -path '*/build' -prune -o '(' -name '*.py' -o -name '*.p[yx][xd]' -o -name '*.h' ')' -print)

# The packages that build the distributions ([build-system] of pyproject.toml). They are installed into $(VENV), so that no
# build makes an environment of its own; the pip that a venv brings is new enough.
BUILD_TOOLS := 'setuptools>=77,<100'
COMPILER := 'Cython>=3.3,<4'
EDITABLE := --no-build-isolation $(STRICT)

# Install the packages that `make demo` and the tutorial need: the router without its compiled modules, so neither gcc nor
# Cython is needed. Python compiles to bytecode only the modules that the demo imports, not every installed module.
$(VENV)/runtime: pyproject.toml $(SOURCES)
	@echo "Installing the router into $(VENV), without compiling its modules: half a minute, or longer with downloads"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -rf $(VENV)/installed build/__editable__*
	@$(PIP) install --no-compile $(BUILD_TOOLS)
	@KVROUTER_COMPILE=0 $(PIP) install --no-compile $(EDITABLE) -e .
	@touch $@

# Install the same with compiled modules, and the engine patch and the tools for development.
$(VENV)/installed: pyproject.toml engine_patch/pyproject.toml $(SOURCES)
	@echo "Installing the router, the engine patch and what development needs into $(VENV), and compiling the modules that"
	@echo "changed since the last time: two to four minutes the first time, and then half a minute"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -rf build/__editable__* engine_patch/build
	@$(PIP) install $(BUILD_TOOLS) $(COMPILER)
	@$(PIP) install $(EDITABLE) -e '.[dev]' -e ./engine_patch
# Tests start many processes. Where PYTHONDONTWRITEBYTECODE is set, each process would compile every module that has no
# bytecode: the modules that pip links, and those that `make demo` installed. The last command ignores failures,
# because packages may have files that this Python cannot read.
	@$(BIN)/python -m compileall -q build/__editable__* engine_patch/build/__editable__*
	@if test -e $(VENV)/runtime; then $(BIN)/python -m compileall -qq $(VENV)/lib; rm $(VENV)/runtime; fi
	@touch $@

# Where PYTHONDONTWRITEBYTECODE is set, the demo's processes would compile the same modules one after the other.
demo: $(firstword $(wildcard $(VENV)/installed) $(VENV)/runtime)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/kvrouter demo

# A file's tests stay in one process, so that they share their router and their store. Tests wait for sockets,
# timeouts and other processes for two thirds of their time, so there is a process more than there are cores.
CORES = $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/python -m pytest --ignore=tests/engine --maxprocesses 8 --dist loadfile
FEW := KVROUTER_TEST_EXAMPLES=few $(PYTEST) -m "not slow"

test: $(VENV)/installed
	$(FEW) --numprocesses $$(($(CORES) + 1)) $(ARGS)

# The order is that of tests/conftest.py, because some files with few tests take the longest.
test-all: $(VENV)/installed
	$(PYTEST) -m "slow or property" --numprocesses $$(($(CORES) + 1)) --no-loadscope-reorder $(ARGS)

# Run modules as without a C compiler. tests/conftest.py leaves out files in which no compiled module decides.
test-uncompiled: $(VENV)/installed
	KVROUTER_TEST_UNCOMPILED=1 $(FEW) --numprocesses $$(($(CORES) + 1)) $(ARGS)

# PYTHON names an interpreter with torch and vLLM for CUDA. Where there is no CUDA device, one line says so.
test-cuda:
	$(PYTHON) tests/engine/run_cuda.py $(ARGS)

test-engine:
	$(PYTHON) tests/engine/run.py $(ARGS)

# atheris is for this alone: 35 MB, and for CPython on x86-64 Linux.
# HEADS: how many heads of requests both parsers read.
HEADS ?= 10000000
fuzz: $(VENV)/installed sanitize
	$(PIP) install 'atheris>=3,<4'
	$(BIN)/python -m tests.fuzz.run
	$(BIN)/python -m tests.property.test_plain_head $(HEADS) $(shell date +%s)
	$(BIN)/python -m tests.property.test_plain_answer $(HEADS) $(shell date +%s)
	KVROUTER_TEST_FUZZ_EXAMPLES=150 KVROUTER_TEST_FUZZ_PHASES=coverage,fuzzing,stateful \
	    $(BIN)/python -m pytest -s tests/fuzz/test_openapi.py

# ARGS: --inputs N, --heads N, --seed N.
sanitize: $(VENV)/installed
	$(BIN)/python -m tests.fuzz.sanitize $(ARGS)

# ARGS: --seed N, --schedules N, --only KIND, --json FILE.
chaos: $(VENV)/installed
	$(BIN)/python -m tests.chaos.run $(ARGS)

# ARGS: --hours N, --seed N, --worlds N, --only SEED, --go-on, --mutation NAME.
simulate: $(VENV)/installed
	@$(BIN)/python -m tests.simulation.search $(ARGS)

# ARGS: names of faults, --seed N, --worlds N, --json FILE.
simulate-mutants: $(VENV)/installed
	@$(BIN)/python -m tests.simulation.mutants $(ARGS)

# ARGS: --kills N, --stops N, --seed N.
takeover: $(VENV)/installed
	$(BIN)/python -m benchmarks.takeover $(ARGS)

# ARGS: --minutes N, --blocks N, --questions N, --seed N.
soak: $(VENV)/installed
	$(BIN)/python -m benchmarks.soak $(ARGS)

# ARGS: --only NAME, --seconds N.
floods: $(VENV)/installed
	$(BIN)/python -m benchmarks.floods $(ARGS)

# ARGS: --world power|store|restarts (required), --cycles N, --replay-pause-ms N, --seed N.
live-proof: $(VENV)/installed
	$(BIN)/python -m benchmarks.live_proof $(ARGS)

# ARGS: --world finding|hot|restart, --engine sim|vllm, --no-patch, --policy NAME, --seed N, --json FILE.
choice-live: $(VENV)/installed
	$(BIN)/python -m benchmarks.choice_live $(ARGS)

# ARGS: --requests N, --door proxy|envoy|envoy-buffered, --no-render, --seed N, --json FILE.
agents-proof: $(VENV)/installed
	$(BIN)/python -m benchmarks.agents_proof $(ARGS)

# Reuse before and after one of four vLLM engines is drained with a hand-over, by the command and without one.
hand-over-proof:
	$(PYTHON) tests/engine/run.py tests/engine/test_hand_over_engine.py -n 0 $(ARGS)

# ARGS: --prompts N, --shape windows|states, --seed N, --json FILE.
peer-proof: $(VENV)/installed
	$(BIN)/python -m benchmarks.peer_proof $(ARGS)

# Guesses of one tenant about another's prompts: some 20 minutes.
salt-attack: $(VENV)/installed
	KVROUTER_TEST_SALT_TRIALS=100000 $(BIN)/python -m pytest -n 0 -s tests/contract/test_salt_attack.py $(ARGS)

# How much the time of an answer shows of another tenant's prompts, with and without salts made by the router.
salt-timing: $(VENV)/installed
	$(BIN)/python -m benchmarks.salt_timing $(ARGS)

# ARGS: --only N, --json FILE.
fault-walk: $(VENV)/installed
	$(BIN)/python -m benchmarks.fault_walk $(ARGS)

lint: lint-quick lint-types

lint-quick: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/names.py

lint-types: $(VENV)/installed
	$(BIN)/mypy -p kvrouter.client -p kvrouter.contract -p kvrouter.events -p kvrouter.router -p kvrouter.engine_patch -p kvrouter.simulator -p kvrouter.replay -p kvrouter.shadow
	$(BIN)/mypy tests benchmarks

# The tables of docs/reference/http.md, made of the contract.
http-page: $(VENV)/installed
	$(BIN)/python -m tests.unit.test_contract

# The chart's table of values, made of what values.yaml says of each.
chart-readme: $(VENV)/installed
	$(BIN)/python .ci/chart_readme.py

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ARGS: --quick, --only ROW, --json FILE.
bench-peers: $(VENV)/installed
	$(BIN)/python -m benchmarks.peers $(ARGS)

# ARGS: TRACE... (required), --rate N, --load N, --requests N, --json FILE.
peer-pulls: $(VENV)/installed
	$(BIN)/python -m benchmarks.peer_pulls $(ARGS)

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.run $(ARGS)

# An environment of its own: nothing of it is needed anywhere else.
DOCS := .venv-docs
$(DOCS)/installed: requirements-docs.lock
	rm -rf $(DOCS) && $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check --quiet install --requirement requirements-docs.lock
	@touch $@

# A warning is an error: broken links and anchors, pages that the nav lacks. (With --quiet none is counted.) The variable is about the theme's own future.
docs: $(DOCS)/installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "build/site/index.html"

# Not part of CI: what it says changes without us, and its database is not everywhere reachable.
audit: $(VENV)/installed
	$(PIP) install 'pip-audit>=2.9,<3'
	$(BIN)/python .ci/audit.py

# Without addresses of package indexes, which differ from place to place.
LOCK_OPTIONS := --quiet --strip-extras --upgrade --no-header --no-annotate --no-emit-index-url --no-emit-trusted-host --no-emit-find-links
# What a router can use: the image has all of it. For the image's Python, so make it with the same (3.11).
IMAGE_EXTRAS := $(shell $(PYTHON) -c "import tomllib; print(*sorted(set(tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']) - {'plots', 'test', 'dev'}))")
lock: $(VENV)/installed
	$(PIP) install 'pip-tools>=7.5,<8'
	$(BIN)/pip-compile $(LOCK_OPTIONS) --extra dev --output-file build/requirements.txt pyproject.toml
	{ grep '^#' requirements-test.lock; grep '^[a-z0-9]' build/requirements.txt | grep -v '^hybrid-kv-router'; } > build/requirements.lock
	mv build/requirements.lock requirements-test.lock
	$(BIN)/pip-compile $(LOCK_OPTIONS) --generate-hashes --no-emit-options $(IMAGE_EXTRAS:%=--extra %) --output-file build/image.txt pyproject.toml
	{ grep '^#' requirements-image.lock; cat build/image.txt; } > build/image.lock
	mv build/image.lock requirements-image.lock
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], 'wheel', sep='\n')" > build/build.in
	$(BIN)/pip-compile $(LOCK_OPTIONS) --generate-hashes --no-emit-options --allow-unsafe --output-file build/build.txt build/build.in
	{ grep '^#' requirements-build.lock; cat build/build.txt; } > build/build.lock
	mv build/build.lock requirements-build.lock
	grep '^# needs: ' requirements-docs.lock | cut -c10- > build/docs.in
	$(BIN)/pip-compile $(LOCK_OPTIONS) --allow-unsafe --output-file build/docs.txt build/docs.in
	{ grep '^#' requirements-docs.lock; cat build/docs.txt; } > build/docs.lock
	mv build/docs.lock requirements-docs.lock

# CycloneDX of what the lock installs into the image, with licences; hashes are in the lock, and Debian's part is its base's.
sbom: $(VENV)/installed
	rm -rf build/image-venv && $(PYTHON) -m venv build/image-venv
	build/image-venv/bin/pip --disable-pip-version-check --quiet install --require-hashes --no-deps --requirement requirements-image.lock
	build/image-venv/bin/pip --disable-pip-version-check --quiet uninstall --yes setuptools pip
	$(PYTHON) -m venv build/sbom-venv && build/sbom-venv/bin/pip --disable-pip-version-check --quiet install 'cyclonedx-bom>=7,<8'
	build/sbom-venv/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --mc-type application --output-format JSON --output-file build/sbom.json build/image-venv
	@echo "build/sbom.json"

# The steps of the router's image in a system of Debian's packages alone, and what it then runs: as root, minutes.
# ARGS: the python of an environment with vLLM, which then loads the patch from the image.
image-check: $(VENV)/installed
	$(BIN)/python -m tests.system.image_chroot $(ARGS)

# Build the files of a release from the commit that is checked out, and try them on this machine (results: build/release).
# ARGS: --python VERSION, --without distributions|install|chart|sbom|image.
release-check: $(VENV)/installed
	$(BIN)/python -m tests.system.release_rehearsal $(ARGS)

clean:
	rm -rf $(VENV) $(DOCS) build .engine-site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info engine_patch/build engine_patch/*.egg-info

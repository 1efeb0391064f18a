# One target for each habit. `make VENV=/elsewhere …` keeps the virtual environment out of the checkout;
# `make PYTHON=python3.12 …` makes it with another interpreter. `make WORKERS=8 test` runs more tests at a time.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 3
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TYPED := shardcache client/shardcache_client tests/support tests/campaign tests/e2e/reading/test_typed.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow coverage tests-of platforms ecosystem lint house docs bench plots bench-compare release-check sbom faults clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.installed-demo  ## run two training jobs on one cache, with a store of its own, and check what they got
	$(BIN)/shardcache demo

# Each process would compile all modules anew where Python is told to keep no bytecode.
test test-slow coverage: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-dev  ## run the tests, in three to four minutes on two quiet cores: at least one case of everything
	$(PYTEST)

test-slow: $(VENV)/.installed-dev  ## run the tests that launch training jobs, browsers or clusters, install packages, build the docs or break things at random, further cases of `test`, and all examples of its properties
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full

coverage: $(VENV)/.installed-dev  ## run the tests, and record which functions each test file calls
	rm -rf build/reached && mkdir -p build/reached
	REACHED=$(abspath build/reached) $(PYTEST)

tests-of:  ## list the test files that call most functions of MODULE=shardcache/…, by what `make coverage` recorded
	@PYTHONPATH=tests $(BIN)/python -m reached build/reached $(MODULE)

platforms: $(VENV)/.installed-dev  ## run what needs root and programs of the system: systemd, containers, Slurm, Prometheus
	$(BIN)/python -m pytest -m '' tests/platforms

# LitData's and MosaicML's scripts are skipped unless `make bench` has installed both: they need torchvision, as below.
ecosystem: $(VENV)/.installed-ecosystem $(VENV)/apart $(VENV)/mosaicml $(VENV)/awscli  ## run other projects' code on shardcache: webdataset's tests, open_clip, timm, Trainer, Ray Train, JAX, tf.data, Grain, Energon, DALI, S3 clients
	$(BIN)/python -m pytest -m '' tests/ecosystem/frameworks
	PYTHONPATH=$(abspath $(VENV))/mosaicml:tests $(BIN)/python -m pytest -m '' tests/ecosystem/formats
	PYTHONPATH=$(abspath $(VENV))/mosaicml:$(abspath $(VENV))/awscli $(BIN)/python -m pytest -m '' tests/ecosystem/endpoint
	PYTHONPATH=$(abspath $(VENV))/mosaicml $(BIN)/python -m pytest -m slow -rs tests/e2e/docs/test_docs_scripts.py -k before_and_after
	PYTHONPATH=$(abspath $(VENV))/apart $(BIN)/python -m pytest -m '' tests/ecosystem/pipelines

lint: $(VENV)/.installed-dev  ## check style, types, which module may import which, and the code's structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py

house: $(VENV)/.installed-dev  ## check the code's structure alone; print sizes, densities, and what is slow to read
	$(BIN)/python tests/house.py

docs: $(VENV)/.installed-docs  ## build the documentation site into build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -d build/docs-trees docs build/docs
	@echo "open build/docs/index.html"

BENCH = PYTHONPATH=tests:$(abspath $(VENV))/mosaicml $(BIN)/python -m benchmarks

bench: $(VENV)/.installed-bench $(VENV)/mosaicml  ## measure against other loaders, and append to build/figures.jsonl (minutes, some 10 GB of disk)
	$(BENCH) $(ARGS)

plots: $(VENV)/.installed-bench  ## rewrite the tables and plots of docs/benchmarks.md from build/figures.jsonl, and what is simulated
	$(BENCH) --page docs/benchmarks.md
	$(BIN)/python docs/drawings
	$(BIN)/python docs/drawings/simulated.py

bench-compare: $(VENV)/.installed-bench $(VENV)/mosaicml  ## compare A=COMMIT with B=COMMIT in build/figures.jsonl, or two such files
	$(BENCH) --compare $(A) $(B)

release-check: $(VENV)/.installed-dev  ## install the wheel with each extra, oldest and newest dependencies, for PYTHONS="python3.11 python3.12 …"
	PYTHONS="$(or $(PYTHONS),$(abspath $(BIN))/python)" $(PYTEST) -m '' tests/integration/project/test_packages.py tests/unit/project/test_release.py

# pip stays out of the list: no program of ours needs it.
sbom:  ## list what shardcache[daemon] installs, and under which licences, in build/sbom/shardcache.cdx.json (CycloneDX)
	rm -rf build/sbom
	$(PYTHON) -m venv --without-pip build/sbom/daemon
	$(PYTHON) -m venv build/sbom/tool
	build/sbom/tool/bin/python -m pip install --quiet cyclonedx-bom
	build/sbom/tool/bin/python -m pip --python build/sbom/daemon/bin/python install --quiet '.[daemon]'
	build/sbom/tool/bin/cyclonedx-py environment -o build/sbom/shardcache.cdx.json build/sbom/daemon/bin/python

faults: $(VENV)/.installed-dev  ## break object store, disk, daemon and messages on purpose (an hour or two)
	PYTHONPATH=tests $(BIN)/python -m campaign

clean:  ## remove the virtual environment and what the tools leave
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shardcache[$*] into $(VENV): a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

# PyPI's torchvision is for CUDA. Beside a torch for CPUs its import fails, and so would that of whatever looks for it.
$(VENV)/apart: constraints.txt | $(VENV)/.installed-ecosystem
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target $@ \
	  torchvision open-clip-torch==3.3.0 timm==1.0.31

# It depends on torchvision, as above, and on the clients of every cloud.
$(VENV)/mosaicml: constraints.txt | $(VENV)/.installed-bench
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ mosaicml-streaming==0.13.0

# It needs another docutils than the documentation.
$(VENV)/awscli: | $(BIN)/python
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ awscli

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shardcache needs Python 3.11 or newer; name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

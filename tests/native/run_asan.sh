#!/usr/bin/env bash
# Build the native core and its C++ test with AddressSanitizer and UndefinedBehaviorSanitizer, and
# run it on the tests' pair. `python` is that of an environment with llama-cpp-python.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=build/asan
python=$(command -v "${PYTHON:-python}")
cmake -S . -B "$build" -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DDFLASH_MODULE=OFF -DDFLASH_NATIVE_TESTS=ON -DDFLASH_SANITIZE=ON >/dev/null
cmake --build "$build" --parallel "$(getconf _NPROCESSORS_ONLN)"

leaks=$([ "$(uname)" = Linux ] && echo 1 || echo 0) # found on Linux only
export ASAN_OPTIONS=detect_leaks=$leaks:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # threads that spin slow down a shared machine
pair=tests/tiny_coder
"$build/tests/native/test_native" \
    "$pair/tiny-coder-q8_0.gguf" "$pair/tiny-coder-dflash-b16-q8_0.gguf"
echo "test_native: clean under AddressSanitizer"

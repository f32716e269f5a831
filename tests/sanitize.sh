#!/bin/sh
# Build libtqgguf with AddressSanitizer and UndefinedBehaviorSanitizer and run, on every path, the tests that need it.
# For Linux with gcc, cmake and ninja, from the repository's root: sh tests/sanitize.sh [pytest arguments]
set -eu
python=${PYTHON:-python}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cmake -S . -B "$build" -G Ninja -DCMAKE_C_COMPILER=gcc -DSKBUILD_PROJECT_NAME=tqgguf -DTQGGUF_SANITIZE=ON >/dev/null
cmake --build "$build" --target tqgguf >/dev/null
export TQGGUF_LIBRARY="$build/libtqgguf.so"
# The interpreter is not instrumented: the sanitizers' library comes first by LD_PRELOAD, and Python's own leaks at exit
# are not looked for.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so)"
export ASAN_OPTIONS=detect_leaks=0:malloc_context_size=3:quarantine_size_mb=16
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# The float64 references are many small products. OpenBLAS's threads make one 7 times slower: they spin while they wait
# for each other, for minutes where other processes hold the cores.
export OPENBLAS_NUM_THREADS=1
# Tests that name a path in their parameters. Each that takes longer than 2 minutes shows where it is.
selection=$(PYTHONPATH=tests "$python" -c '
from conftest import TESTS_OF_C, load_library
from tqgguf.runtime.native.library import PATHS
assert load_library() is not None, "the sanitized library does not load"
print(" or ".join(PATHS), *TESTS_OF_C, sep="\ntests/")')
IFS='
'
"$python" -m pytest -p no:cacheprovider -o faulthandler_timeout=120 -k $selection "$@"

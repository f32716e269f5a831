#!/bin/sh
# Build libtqgguf with AddressSanitizer and UndefinedBehaviorSanitizer and run its tests once. For Linux with gcc, cmake
# and ninja, from the repository's root: sh tests/sanitize.sh [pytest arguments]
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
"$python" -c 'import sys; from tqgguf.runtime.native.library import load_library; sys.exit(load_library() is None)'
"$python" -m pytest -p no:cacheprovider tests/test_c_library.py "$@"

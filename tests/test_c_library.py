"""The C library's threads, in one process and after a fork, and which path of it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS, c_backend, library

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.kv.pages import PAGE, Query, SideView
from tqgguf.runtime.native.library import load_library

FORK_SECONDS = 60

pytestmark = pytest.mark.parametrize("path", C_PATHS)


def random_pages(codec: Codec, pages: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Planes of random codes, and of scales near 1."""
    rng = np.random.default_rng(pages)
    codes = rng.integers(0, 256, (pages, heads, PAGE, codec.n_blocks * codec.code_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (pages, heads, PAGE, codec.n_blocks * codec.n_scales))
    return codes, scales.astype(np.float16)


def long_step(path: str, type_k: str, type_v: str) -> bytes:
    """The bytes of a decode step over 40 pages."""
    rng = np.random.default_rng(3)
    own = mx.array(rng.standard_normal((4, 7, 128)).astype(np.float16))
    views = [
        SideView(codec, *map(mx.array, random_pages(codec, 40, 4)), rows=own, rows_start=40 * PAGE)
        for codec in (resolve_codec(type_k, 128, "k"), resolve_codec(type_v, 128, "v"))
    ]
    q = mx.array(rng.standard_normal((1, 16, 2, 128)).astype(np.float32))
    return np.array(c_backend(path).attend(q, *views, offset=40 * PAGE + 5, query=Query(0.1))).tobytes()


def test_one_two_and_three_threads_give_the_same_bits(path: str) -> None:
    c = library(path)
    codec = resolve_codec("turbo4", 128, "k")
    rows = np.random.default_rng(3).standard_normal((8, 1000, 128)).astype(np.float32)
    pages = random_pages(codec, 9, 8)
    results = []
    try:
        for n in (1, 2, 3, 3):
            c.set_threads(n)
            assert c.threads == n
            encoded = c.encode(codec, rows)
            assert encoded is not None
            results.append(
                (
                    long_step(path, "turbo4", "turbo3"),
                    long_step(path, "q5_1", "f16"),
                    *(plane.tobytes() for plane in encoded),
                    c.decode_pages(codec, *pages).tobytes(),
                )
            )
    finally:
        c.set_threads(0)
    assert all(result == results[0] for result in results)


def test_python_threads_may_call_at_the_same_time(path: str) -> None:
    expected = long_step(path, "turbo4", "turbo3")
    codec = resolve_codec("turbo3", 128, "v")
    pages = random_pages(codec, 20, 8)
    c = library(path)
    c.set_threads(3)
    try:
        decoded = c.decode_pages(codec, *pages).tobytes()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: c.decode_pages(codec, *pages).tobytes(), range(40)))
        assert all(values == decoded for values in found)
        assert long_step(path, "turbo4", "turbo3") == expected
    finally:
        c.set_threads(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own(path: str) -> None:
    c, codec = library(path), resolve_codec("turbo3", 128, "k")
    pages = random_pages(codec, 64, 8)
    c.set_threads(3)
    try:
        expected = c.decode_pages(codec, *pages).tobytes()  # the pool's threads live from here on, in this process
        child = os.fork()
        if child == 0:  # never back into pytest
            signal.alarm(FORK_SECONDS)  # a lock that nobody is left to open ends the child
            same = all(c.decode_pages(codec, *pages).tobytes() == expected for _ in range(3))
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert c.decode_pages(codec, *pages).tobytes() == expected
    finally:
        c.set_threads(0)


def run_python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    return result.stdout + result.stderr.strip().rpartition("\n")[2]


def test_the_environment_forces_a_path(path: str) -> None:
    code = "from tqgguf.runtime.native.library import load_library as l; print(l().path_name)"
    assert run_python(code, TQGGUF_CPU=path) == f"{path}\n"


def test_the_library_can_be_switched_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQGGUF_CPU", "off")
    assert load_library.__wrapped__() is None


@pytest.mark.parametrize("wanted", ["sse9", "neon", "avx2"])
def test_a_path_that_cannot_run_is_refused_in_one_line(path: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQGGUF_CPU", wanted)
    if wanted in C_PATHS:
        loaded = load_library.__wrapped__()
        assert loaded is not None and loaded.path_name == wanted
    else:
        with pytest.raises(RequestError, match=r"TQGGUF_CPU: .*portable"):
            load_library.__wrapped__()

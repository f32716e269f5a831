"""Which BLAS serves mlx is decided before mlx is imported, and `-t` reaches it and numpy's alike."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from tqgguf.formats.cores import cores
from tqgguf.runtime.attention.blas import Blas, _openblas_of_numpy, load_fast_blas
from tqgguf.runtime.native import library_path

GETTERS = [f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


def openblas_threads() -> list[int]:
    """The number of threads of every OpenBLAS that a run would use."""
    libraries: list[ctypes.CDLL] = [*load_fast_blas().libraries, *_openblas_of_numpy()]
    return [int(getattr(lib, name)()) for lib in libraries for name in GETTERS if hasattr(lib, name)]


@pytest.fixture
def blas():
    """The BLAS of this process; whatever a test sets is set back."""
    before = openblas_threads()
    yield load_fast_blas()
    load_fast_blas().set_threads(max(before, default=0))


def test_threads_reach_every_openblas(blas):
    for n in (1, 2):
        assert blas.set_threads(n) == bool(openblas_threads())
        assert all(found == n for found in openblas_threads())


@pytest.mark.parametrize("n", (0, -1))
def test_zero_and_less_mean_one_thread_per_core(blas, n):
    blas.set_threads(1)
    blas.set_threads(n)
    assert all(found == cores() for found in openblas_threads())


def test_numbers_of_threads_do_not_change_products(blas):
    import mlx.core as mx

    a = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    for n in (1, 2):
        blas.set_threads(n)
        for product in (a @ a.T, np.array(mx.array(a) @ mx.array(a).T)):
            np.testing.assert_allclose(product, a.astype(np.float64) @ a.T.astype(np.float64), rtol=1e-5, atol=1e-4)


def test_a_blas_without_threads_to_set_says_so(monkeypatch):
    monkeypatch.setattr("tqgguf.runtime.attention.blas._openblas_of_numpy", lambda: [])
    assert Blas("the system's (Accelerate)").set_threads(2) is False


def name_in_a_new_process(first: str = "", **environment: str) -> str:
    program = f"{first}\nfrom tqgguf.runtime.attention.blas import load_fast_blas\nprint(load_fast_blas().name)"
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.mark.parametrize(
    ("first", "environment", "name"),
    [
        ("", {"TQGGUF_BLAS": "off"}, "mlx's own reference BLAS (TQGGUF_BLAS=off)"),
        ("import mlx.core", {}, "mlx's own (mlx was imported before tqgguf"),
        ("", {}, "OpenBLAS (" if library_path("tqgguf_blas") else "numpy ("),
    ],
)
def test_on_linux_the_name_says_which_blas_serves(first, environment, name):
    expected = name if sys.platform == "linux" else "the system's (Accelerate)"
    assert name_in_a_new_process(first, **environment).startswith(expected)

"""Give mlx a fast float32 matmul on Linux CPUs. Call `load_fast_blas` before mlx is first imported.

The Linux wheel of mlx links the reference BLAS (about 4 GFLOP/s). A library that exports plain `cblas_sgemm` and is
loaded with RTLD_GLOBAL first takes its place: our forwarding shim over PyPI's scipy-openblas32, else the system's
OpenBLAS. TQGGUF_BLAS=off leaves mlx as it is. numpy brings an OpenBLAS of its own; `Blas.set_threads` reaches both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqgguf.formats.cores import cores
from tqgguf.runtime.native import library_path

SWITCH = "TQGGUF_BLAS"
WORKER_PATIENCE = "OPENBLAS_THREAD_TIMEOUT"  # read by OpenBLAS when it is loaded: log2 of cycles
PATIENCE_BITS = "10"
SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so")


# OpenBLAS's call under the names that its builds give it: plain, of PyPI's wheels, and those with 64-bit integers.
THREAD_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
)


@dataclass(frozen=True)
class Blas:
    """The BLAS that serves mlx's matmul, by name."""

    name: str
    libraries: tuple[ctypes.CDLL, ...] = field(default=(), repr=False)
    is_slow: bool = False
    """Whether mlx is left with the reference BLAS though nobody asked for it."""

    def set_threads(self, n: int) -> bool:
        """Let matrix products of mlx and of numpy use n threads (0 or less: one per core of this process).

        Returns whether any library could be told; Apple's Accelerate cannot.
        """
        n = n if n > 0 else cores()
        setters = [
            getattr(library, name)
            for library in (*self.libraries, *_openblas_of_numpy())
            for name in THREAD_SETTERS
            if hasattr(library, name)
        ]
        for setter in setters:
            setter(ctypes.c_int(n))
        return bool(setters)


def _openblas_of_numpy() -> list[ctypes.CDLL]:
    """The OpenBLAS inside numpy's wheel, which numpy's import has loaded; none where numpy was built otherwise."""
    import numpy as np  # not above: --help comes by here and waits for nothing

    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    return [ctypes.CDLL(str(path)) for folder in folders for path in sorted(folder.glob("*openblas*"))]


@contextlib.contextmanager
def _impatient_workers() -> Iterator[None]:
    """Let an OpenBLAS that is loaded now put its workers to sleep soon, unless the user has said when.

    By default they spin for 2^26 cycles after each product, on cores that the rest of a step needs.
    """
    if WORKER_PATIENCE in os.environ:
        yield
        return
    os.environ[WORKER_PATIENCE] = PATIENCE_BITS
    try:
        yield
    finally:
        del os.environ[WORKER_PATIENCE]


def _openblas_of_scipy() -> Blas | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    shim = library_path("tqgguf_blas")
    if spec is None or spec.origin is None or shim is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        return None
    try:
        with _impatient_workers():
            openblas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # built for another machine
        return None
    return Blas("OpenBLAS (scipy-openblas32)", (openblas,))


def _openblas_of_system() -> Blas | None:
    for library in SYSTEM_LIBRARIES:
        try:
            with _impatient_workers():
                openblas = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(openblas, "cblas_sgemm"):
            return Blas(f"OpenBLAS ({library} of the system)", (openblas,))
    return None


@functools.cache
def load_fast_blas() -> Blas:
    """Load the fastest BLAS there is, once per process, and say which one serves."""
    if sys.platform != "linux":
        return Blas("the system's (Accelerate)")
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return Blas(f"mlx's own reference BLAS ({SWITCH}=off)")
    if "mlx.core" in sys.modules:
        return Blas("mlx's own (mlx was imported before tqgguf; import tqgguf first for a faster one)", is_slow=True)
    reference = Blas("numpy (slower; tqgguf[cpu] with a C compiler gives mlx an OpenBLAS)", is_slow=True)
    return _openblas_of_scipy() or _openblas_of_system() or reference

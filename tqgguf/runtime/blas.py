"""Give mlx a fast float32 matmul on Linux CPUs. Call `load_fast_blas` before mlx is first imported.

The Linux wheel of mlx links the reference BLAS (about 4 GFLOP/s). A library that exports plain `cblas_sgemm` and is
loaded with RTLD_GLOBAL first takes its place: our forwarding shim over PyPI's scipy-openblas32, else the system's
OpenBLAS. TQGGUF_BLAS=off leaves mlx as it is.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tqgguf.runtime.native import library_path

SWITCH = "TQGGUF_BLAS"
SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so")


@dataclass(frozen=True)
class Blas:
    """The BLAS that serves mlx's matmul: its name, and how to set its number of threads (None: cannot be set)."""

    name: str
    set_threads: ctypes._CFuncPtr | None = None


def _openblas_of_scipy() -> Blas | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    shim = library_path("tqgguf_blas")
    if spec is None or spec.origin is None or shim is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        return None
    openblas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    return Blas("OpenBLAS (scipy-openblas32)", openblas.scipy_openblas_set_num_threads)


def _openblas_of_system() -> Blas | None:
    for library in SYSTEM_LIBRARIES:
        try:
            openblas = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(openblas, "cblas_sgemm"):
            return Blas(f"OpenBLAS ({library} of the system)", getattr(openblas, "openblas_set_num_threads", None))
    return None


@functools.cache
def load_fast_blas() -> Blas:
    """Load the fastest BLAS there is, once per process, and say which one serves."""
    if sys.platform != "linux":
        return Blas("the system's (Accelerate)")
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return Blas(f"mlx's own reference BLAS ({SWITCH}=off)")
    if "mlx.core" in sys.modules:
        return Blas("mlx's own (mlx was imported before tqgguf; import tqgguf first for a faster one)")
    return _openblas_of_scipy() or _openblas_of_system() or Blas("mlx's own reference BLAS (slow: install tqgguf[cpu])")

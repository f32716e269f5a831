"""Which backend attends, decodes and encodes, by where mlx computes and what was built."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.backend import Backend, MlxBackend, NumpyBackend
from tqgguf.runtime.attention.blas import load_fast_blas
from tqgguf.runtime.attention.c_backend import CBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.attention.long_steps import WORKSPACE_BYTES
from tqgguf.runtime.kernels.kernel_files import kernel_files
from tqgguf.runtime.kernels.launch import MlxLauncher
from tqgguf.runtime.native.library import load_library
from tqgguf.runtime.native.worth import MOST_SINGLE_ROWS, SLOW_PATHS


def default_backend(*, workspace_bytes: int | None = None, most_rows: int | None = None) -> Backend:
    """On a CPU the C library, or numpy where it was not built; the kernels on a GPU, with their bounds or others."""
    if mx.default_device() != mx.cpu:
        family = gpu_family()
        if family is None:
            return MlxBackend()
        return KernelBackend(_launcher(family), most_rows, workspace_bytes or WORKSPACE_BYTES)
    library = load_library()
    return NumpyBackend() if library is None else CBackend(library)


@lru_cache
def _launcher(family: str) -> MlxLauncher:
    """One for all layers: they share what it has prepared."""
    return MlxLauncher(family, kernel_files() if family == "cuda" else None)


def choose_device(on_gpu: bool) -> None:
    """Where MLX computes from now on."""
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)


def gpu_family() -> str | None:
    """The kernels' name for this machine's GPU: metal, cuda, or None where MLX has none."""
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def gpu_launcher() -> MlxLauncher:
    """Of this machine's GPU. RequestError where it has none that the kernels run on."""
    family = gpu_family()
    if family is None:
        raise RequestError("expected a GPU for weights in blocks, and MLX has none here")
    return _launcher(family)


def kernels_launched(backend: Backend) -> int:
    """How many kernels a backend has sent to a GPU."""
    launcher = backend.launcher if isinstance(backend, KernelBackend) else None
    return launcher.n_launched if isinstance(launcher, MlxLauncher) else 0


def kernels_compiled(backend: Backend) -> tuple[int, float]:
    """How many kernels were compiled for a backend, to be kept for later processes, and the seconds waited for them."""
    launcher = backend.launcher if isinstance(backend, KernelBackend) else None
    files = launcher.files if isinstance(launcher, MlxLauncher) else None
    return (0, 0.0) if files is None else (files.n_compiled, files.seconds)


def set_threads(n: int) -> None:
    """Let the CPU backend use n threads: matrix products and the C library. 0 or less: as many as it uses now."""
    if n <= 0:
        return
    load_fast_blas().set_threads(n)
    library = load_library()
    if library is not None:
        library.set_threads(n)


def describe() -> str:
    """Device and backend in words, for -v."""
    if mx.default_device() != mx.cpu:
        name, family = mx.device_info().get("device_name", "unnamed"), gpu_family()
        return f"GPU ({name}); attention by {family or 'MLX operations'}" + (" kernels" if family else "")
    library = load_library()
    how = "numpy" if library is None else f"the C library ({library.path_name}, {library.threads} threads)"
    products = f"matmul by {load_fast_blas().name}"
    if library is not None and library.path_name not in SLOW_PATHS:
        products += f"; a GGUF's matrices stay in the file, up to {MOST_SINGLE_ROWS} rows by the C library"
    return f"CPU; attention by {how}; {products}"

"""CUDA kernels compiled once per machine and kept in files, several at a time.

MLX compiles a custom kernel when it is first evaluated, one after the other, and keeps none; but it looks for each
among the kernels of its own that it keeps in MLX_PTX_CACHE_DIR, by a name made of the whole text (so in its
source of 0.32). So a kernel is put there as soon as a call of it is prepared, and whoever evaluates waits
for those that are under way. Where any of it goes wrong, MLX compiles the kernel itself, as ever.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from tqgguf.formats.models.calibration_files import cache_folder

FOLDER_SWITCH = "MLX_PTX_CACHE_DIR"
KNOWN_VERSIONS = ("0.32.",)
"""Of MLX, whose names for modules are those that are made here."""

MOST_AT_ONCE = 8
_SEED = 0xC70F6907  # of libstdc++'s std::hash
_BEFORE = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_OUR_BEFORE = (
    "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    "typedef unsigned char uint8_t;\ntypedef unsigned int uint32_t;\ntypedef int int32_t;\n"
)
_NAMESPACE = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
_OUR_NAMESPACE = "namespace mlx::core::cu {\n"
_TYPES = {
    **{mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
    **{mx.uint8: "uint8_t", mx.uint32: "uint32_t", mx.int32: "int32_t"},
}

Arguments = Sequence[tuple[str, mx.Dtype]]
"""A kernel's arrays by their names."""


class KernelFiles:
    """The kernels in `folder`. command: of a process that compiles one, see `compile_cuda`; it is given the folder, the
    module's and the kernel's name and the options after it. options: of NVRTC.

    n_compiled: by this process, or by others for it. seconds: waited for them.
    """

    def __init__(self, folder: Path, command: Sequence[str], options: Sequence[str]) -> None:
        self.folder, self._command, self._options = folder, list(command), list(options)
        self._pool: ThreadPoolExecutor | None = None
        self._seen: set[str] = set()
        self._pending: list[Future[bool]] = []
        self.n_compiled, self.seconds = 0, 0.0

    def want(self, name: str, header: str, body: str, inputs: Arguments, outputs: Arguments) -> None:
        """Have a kernel compiled if it is not there. name, header, body: as `mx.fast.cuda_kernel` has them."""
        kernel = f"custom_kernel_{name}"
        signature = _signature(kernel, inputs, outputs)
        module = module_name(kernel, f"{_BEFORE}{header}{_NAMESPACE}{signature}{body}{_END}")
        if module in self._seen:
            return
        self._seen.add(module)
        if (self.folder / f"{module}.ptx").exists():
            return
        text = f"{_OUR_BEFORE}{header}{_OUR_NAMESPACE}{signature}{body}{_END}"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1))
        self._pending.append(self._pool.submit(self._compile, module, f"mlx::core::cu::{kernel}", text))

    def _compile(self, module: str, kernel: str, text: str) -> bool:
        command = [*self._command, str(self.folder), module, kernel, *self._options]
        try:
            done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    def wait(self) -> None:
        """Return when all that were wanted are there, or have failed."""
        if not self._pending:
            return
        start = time.perf_counter()
        while self._pending:
            self.n_compiled += self._pending.pop().result()
        self.seconds += time.perf_counter() - start


_END = "\n}\n\n} // namespace mlx::core::cu\n"


def _signature(kernel: str, inputs: Arguments, outputs: Arguments) -> str:
    """As MLX writes it, for arrays of whose shapes the text knows nothing."""
    taken = "".join(f"    const {_TYPES[dtype]}* {name},\n" for name, dtype in inputs)
    given = ",\n".join(f"    {_TYPES[dtype]}* {name}" for name, dtype in outputs)
    return f"__global__ void {kernel}(\n{taken}{given}) {{\n"


def module_name(kernel: str, source: str) -> str:
    """What MLX calls the module of a custom kernel: its name and the hash of its text."""
    text = source.encode()
    return f"{kernel}_{_hash_bytes()(text, len(text), _SEED):x}"


@lru_cache(maxsize=1)
def _hash_bytes() -> Any:
    """std::_Hash_bytes, by which libstdc++ hashes strings."""
    function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    function.restype, function.argtypes = ctypes.c_size_t, (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    return function


def kernel_files() -> KernelFiles | None:
    """The files of this machine's NVIDIA GPU, of whose folder MLX is told; None where there can be none."""
    library, headers = _loaded_library("libnvrtc.so"), _cuda_headers()
    of_mlx = version("mlx")
    if sys.platform != "linux" or not of_mlx.startswith(KNOWN_VERSIONS) or None in (library, headers):
        return None
    architecture = str(mx.device_info()["architecture"])
    of_this_one = "a" if int(architecture.removeprefix("sm_")) >= 90 else ""
    folder = Path(os.environ.get(FOLDER_SWITCH) or cache_folder() / f"kernels-mlx-{of_mlx}-{architecture}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _hash_bytes()
    except (OSError, AttributeError):
        return None
    os.environ[FOLDER_SWITCH] = str(folder)  # MLX asks for it when it needs its first kernel
    program = Path(__file__).with_name("compile_cuda.py")
    options = ("--device-as-default-execution-space", f"--gpu-architecture={architecture}{of_this_one}")
    return KernelFiles(
        folder, (sys.executable, "-I", "-S", str(program), str(library)), (*options, f"--include-path={headers}")
    )


def _loaded_library(name: str) -> str | None:
    """Where a library lies that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if name in line)
    return next(iter(paths), None)


def _cuda_headers() -> Path | None:
    """Where cuda_fp16.h lies, in the order in which MLX looks: beside the packages, then where CUDA is installed."""
    packages = Path(mx.__file__).parents[1] / "nvidia"
    homes = (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda",)
    places = (packages / "cu13", packages / "cuda_runtime", *map(Path, homes))
    return next((place / "include" for place in places if (place / "include" / "cuda_fp16.h").exists()), None)

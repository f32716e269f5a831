"""A launcher that runs kernels on the emulator, and counts what it ran."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from emulator.builder import build
from emulator.exporter import metal_text
from tqgguf.runtime.kernels.launch import SIMD_LANES, Kernel, Launcher, Template, Threads

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # of device memory that kernels may count on
_GUARD = 1 << 20  # bytes before and after each buffer that nobody may touch
_POISON = 0xFF
_NUMPY_TYPES = {
    **{mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16},
    **{mx.uint8: np.uint8, mx.uint32: np.uint32},
}


class EmulatorError(AssertionError):
    """What the emulator found wrong with a kernel."""


class GuardedBuffer:
    """Device memory between two ranges that nobody may touch; its end lies at the second one."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        padded = -(-max(n_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        inside = -(-padded // _PAGE) * _PAGE
        self._mapped = inside + 2 * _GUARD
        self._start = _LIBC.mmap(
            None, self._mapped, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert self._start not in (None, ctypes.c_void_p(-1).value), "no memory for a buffer"
        for guard in (self._start, self._start + _GUARD + inside):
            assert _LIBC.mprotect(guard, _GUARD, 0) == 0
        self.address = self._start + _GUARD + inside - padded
        ctypes.memset(self.address, _POISON, padded)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.n_bytes)

    def __del__(self) -> None:
        _LIBC.munmap(self._start, self._mapped)


class EmulatedLauncher(Launcher):
    """Runs the Metal text that MLX generates. seed: of the shuffled schedule. defines: `CUDA_ELEMENTS` for CUDA's
    layout of matrix elements."""

    def __init__(self, seed: int = 1, family: str = "metal", defines: tuple[str, ...] = ()) -> None:
        self.seed, self.family, self.defines = seed, family, defines
        self.launched: Counter[str] = Counter()

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        self.launched[kernel.name] += 1
        text = metal_text(kernel, inputs, template, threads, outputs)
        given = [_raw(inputs[name]) for name in kernel.inputs]
        sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in outputs]
        group = SIMD_LANES * threads.simdgroups
        x, y, z = threads.groups
        made = run(text, given, sizes, (x * group, y, z), (group, 1, 1), self.seed, self.defines)
        return [_array(data, shape, dtype) for data, (shape, dtype) in zip(made, outputs, strict=True)]


def run(
    text: str,
    inputs: Sequence[bytes],
    outputs: Sequence[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    seed: int = 1,
    defines: tuple[str, ...] = (),
) -> list[bytes]:
    """Run a kernel's Metal text on buffers; `outputs` are sizes in bytes. EmulatorError: what it did wrong."""
    library = build(text, defines)
    buffers = [GuardedBuffer(len(data)) for data in inputs] + [GuardedBuffer(n) for n in outputs]
    for buffer, data in zip(buffers, inputs, strict=False):
        buffer.fill(data)
    addresses = (ctypes.c_void_p * len(buffers))(*[buffer.address for buffer in buffers])
    three = ctypes.c_uint32 * 3
    error = ctypes.create_string_buffer(256)
    if library.run_kernel(addresses, three(*grid), three(*threadgroup), ctypes.c_uint64(seed), error):
        raise EmulatorError(error.value.decode())
    return [buffer.bytes() for buffer in buffers[len(inputs) :]]


def _raw(array: mx.array) -> bytes:
    """Row-contiguous bytes, as MLX hands them to a kernel."""
    values = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.asarray(values)).tobytes()


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Bytes as an array of that type."""
    numpy_type = _NUMPY_TYPES[dtype]
    values = mx.array(np.frombuffer(data, numpy_type).reshape(shape))
    return values.view(mx.bfloat16) if dtype == mx.bfloat16 else values

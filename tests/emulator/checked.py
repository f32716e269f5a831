"""Launchers that show clang's front end every text first: as Metal with its address spaces, and as CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import mlx.core as mx

from emulator.exporter import metal_text
from emulator.front_end import complaints, cuda_complaints
from emulator.launcher import EmulatedLauncher
from tqgguf.runtime.kernels.launch import SIMD_LANES, Kernel, Launcher, Template, Threads

MOST_THREADS = 1024  # of a threadgroup, on Metal and with CUDA

_seen_as_cuda: dict[object, list[str]] = {}


class CheckedLauncher(EmulatedLauncher):
    """Asks clang once for each text."""

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        assert _as_metal(kernel, inputs, template, threads, outputs) == []
        assert _as_cuda(kernel, inputs, template, threads, outputs) == []
        return super().launch(kernel, inputs, template, threads, outputs)


class FrontEndLauncher(Launcher):
    """Shows clang the text of a family's kernels, as that family reads it, and runs none. `seen`: what it has shown,
    by kernel, constants, simdgroups and types of arrays."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.seen: set[object] = set()

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        key = _instantiation(kernel, inputs, template, threads)
        assert SIMD_LANES * threads.simdgroups <= MOST_THREADS, key
        if key not in self.seen:
            self.seen.add(key)
            look = _as_metal if self.family == "metal" else _as_cuda
            assert look(kernel, inputs, template, threads, outputs) == [], key
        return [mx.zeros(shape, dtype=dtype) for shape, dtype in outputs]


def _as_metal(
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    template: Template,
    threads: Threads,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[str]:
    return _complaints(metal_text(kernel, inputs, template, threads, outputs))


def _as_cuda(
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    template: Template,
    threads: Threads,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[str]:
    key = _instantiation(kernel, inputs, template, threads)
    if key not in _seen_as_cuda:
        _seen_as_cuda[key] = cuda_complaints(kernel, inputs, template, threads, outputs)
    return _seen_as_cuda[key]


def _instantiation(kernel: Kernel, inputs: Mapping[str, mx.array], template: Template, threads: Threads) -> object:
    return kernel, template, threads.simdgroups, tuple(inputs[name].dtype for name in kernel.inputs)


@lru_cache(maxsize=512)
def _complaints(text: str) -> list[str]:
    return complaints(text)

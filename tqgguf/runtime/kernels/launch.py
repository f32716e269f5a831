"""From a kernel's text to a call of it: MLX's Metal and CUDA kernels behind one launcher.

A kernel is a body with headers before it, all Metal text in this folder. MLX hashes the whole text at every
evaluation, so it goes without comments. A launcher has a `family` (the devices that geometry.py knows); tests have one
of their own, which runs the exact Metal text on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

SIMD_LANES = 32
Template = tuple[tuple[str, Any], ...]
"""Names and values of a kernel's compile-time constants."""

_FOLDER = Path(__file__).parent
_PRELUDES = {"metal": "prelude.metal", "cuda": "prelude.cu"}
_KEPT_SIZES = 256


@dataclass(frozen=True)
class Kernel:
    """A kernel's file, the files before it, and the names of its arrays; `sizes` names the entries of its int32
    input."""

    name: str
    parts: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[str, ...]

    def body(self) -> str:
        return text_of(f"{self.name}.metal")

    def header(self, family: str) -> str:
        """The prelude of a family of devices, the parts, and the places of sizes as AT_ names."""
        places = ", ".join(f"AT_{name}" for name in self.sizes)
        return (
            text_of(_PRELUDES[family])
            + "".join(map(text_of, self.parts))
            + f"namespace tq {{\nenum Size : int {{ {places} }};\n}}\n"
        )


@dataclass(frozen=True)
class Threads:
    """How a kernel is spread: threadgroups along x, y, z, simdgroups in each, threadgroups at once on a processor."""

    groups: tuple[int, int, int]
    simdgroups: int
    resident: int = 0
    """CUDA only: the compiler keeps registers so low that this many fit; 0 leaves it to the compiler."""


class Launcher(Protocol):
    """Runs kernels on one kind of device."""

    family: str

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """The kernel's outputs, of the given shapes and types. `template` has SIMDGROUPS added to it."""


class MlxLauncher(Launcher):
    """Metal on a Mac, CUDA on NVIDIA."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.n_launched = 0

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        self.n_launched += 1
        made = mlx_kernel(self.family, kernel, threads.simdgroups, threads.resident)
        return made(**call_arguments(kernel, inputs, template, threads, outputs))


def call_arguments(
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    template: Template,
    threads: Threads,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> dict[str, Any]:
    """What a kernel made by `mlx_kernel` is called with."""
    group = SIMD_LANES * threads.simdgroups
    x, y, z = threads.groups
    return {
        "inputs": [inputs[name] for name in kernel.inputs],
        "template": [*template, ("SIMDGROUPS", threads.simdgroups)],
        "grid": (x * group, y, z),
        "threadgroup": (group, 1, 1),
        "output_shapes": [shape for shape, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
    }


@lru_cache(maxsize=64)
def mlx_kernel(family: str, kernel: Kernel, simdgroups: int = 0, resident: int = 0) -> Any:
    """MLX's kernel object. Metal's can be made, and traced, on a machine without Metal."""
    name, inputs, outputs = f"tqgguf_{kernel.name}", list(kernel.inputs), list(kernel.outputs)
    if family == "metal":
        return mx.fast.metal_kernel(name, inputs, outputs, kernel.body(), kernel.header(family))
    header = _launch_bounds(simdgroups, resident) + kernel.header(family)
    return mx.fast.cuda_kernel(name, inputs, outputs, kernel.body(), header)


def _launch_bounds(simdgroups: int, resident: int) -> str:
    """MLX writes the kernel's signature itself, so that the bounds have to come in with `__global__`."""
    if not resident:
        return ""
    bounds = f"__launch_bounds__({SIMD_LANES * simdgroups}, {resident})"
    return f"#undef __global__\n#define __global__ __attribute__((global)) {bounds}\n"


@lru_cache(maxsize=_KEPT_SIZES)
def sizes_array(*sizes: int) -> mx.array:
    """The int32 input of a kernel; layers share it, and the steps of a page."""
    return mx.array(np.array(sizes, np.int32))


@lru_cache(maxsize=4)
def position_array(position: int) -> mx.array:
    """int32 [8] that begins with a number which changes with every step.

    Made on the device: a fresh array of the host's would have to travel there before every step's first kernel.
    """
    return mx.arange(position, position + 8, dtype=mx.int32)


def sizes_of(kernel: Kernel, **sizes: int) -> mx.array:
    """Sizes by their names as the kernel's int32 input."""
    return sizes_array(*(sizes[name] for name in kernel.sizes), *[0] * max(0, 8 - len(kernel.sizes)))


@lru_cache(maxsize=32)
def text_of(name: str) -> str:
    """A file of this folder without comments, blank lines and indentation; what stands on a line stays there."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    text = re.sub(r"[ \t]*\\\n[ \t]*", " ", re.sub(r"//[^\n]*", "", text))
    return (
        "\n".join(line for line in (re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n")) if line) + "\n"
    )

"""From a kernel's text to a call of it: MLX's Metal and CUDA kernels behind one launcher.

A kernel is a body with headers before it, all Metal text in this folder. On CUDA MLX copies the text at every call and
hashes it at every evaluation, so there it consists of #include lines. A launcher has a `family` (the devices that
geometry.py knows); tests have one of their own, which runs the exact Metal text on a CPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.runtime.kernels.kernel_files import KernelFiles
from tqgguf.runtime.thread_cache import lru_cache_in_thread

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
        """The prelude of a family of devices, the parts, the places of sizes as AT_ names, and the tokens of a page."""
        return "".join(map(text_of, (_PRELUDES[family], *self.parts))) + self._places()

    def includes(self, family: str) -> tuple[str, str]:
        """`header` and `body` as lines that include them: for compilers that read files."""
        names = (_PRELUDES[family], *self.parts)
        return "".join(map(_include, names)) + self._places(), _include(f"{self.name}.metal")

    def _places(self) -> str:
        places = ", ".join(f"AT_{name}" for name in self.sizes)
        return f"namespace tq {{\nenum Size : int {{ {places} }};\nenum Page : uint {{ PAGE = {PAGE_TOKENS} }};\n}}\n"


@dataclass(frozen=True)
class Threads:
    """How a kernel is spread: threadgroups along x, y, z, simdgroups in each, threadgroups at once on a processor."""

    groups: tuple[int, int, int]
    simdgroups: int
    resident: int = 0
    """CUDA only: the compiler keeps registers so low that this many fit; 0 leaves it to the compiler."""
    at_launch: tuple[int, int] = (0, 0)
    """CUDA only: bytes of threadgroup memory that the text declares, exactly, and of what it has as
    SHARED_AT_LAUNCH."""


Shapes = Sequence[tuple[int, ...]]


class Call(Protocol):
    """A prepared launch."""

    def __call__(self, inputs: Sequence[mx.array], shapes: Shapes | None = None) -> list[mx.array]:
        """Outputs for inputs in the kernel's order. shapes: of outputs, where not as prepared."""


class Launcher(Protocol):
    """Runs kernels on one kind of device."""

    family: str

    def __hash__(self) -> int:
        return id(self)

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """The kernel's outputs, of the given shapes and types. `template` has SIMDGROUPS added to it."""

    def prepare(
        self,
        kernel: Kernel,
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> Call:
        """A launch of which only the inputs are left open, for what is launched again and again."""

        def call(inputs: Sequence[mx.array], shapes: Shapes | None = None) -> list[mx.array]:
            given = dict(zip(kernel.inputs, inputs, strict=True))
            dtypes = [dtype for _, dtype in outputs]
            wanted = outputs if shapes is None else list(zip(shapes, dtypes, strict=True))
            return self.launch(kernel, given, template, threads, wanted)

        return call

    def compiled(self, function: Any) -> Any:
        """A function of arrays that launches kernels, as MLX compiles it where that can be done."""
        return function

    def wait(self) -> None:
        """Return when the kernels that have been launched are compiled, as far as others than MLX do that."""


class MlxLauncher(Launcher):
    """Metal on a Mac, CUDA on NVIDIA. files: where CUDA's kernels are kept."""

    def __init__(self, family: str, files: KernelFiles | None = None) -> None:
        self.family, self.files = family, files
        self.n_launched = 0
        self._asked: set[tuple[Any, ...]] = set()

    def compiled(self, function: Any) -> Any:
        return mx.compile(function)

    def wait(self) -> None:
        if self.files is not None:
            self.files.wait()

    def launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, mx.array],
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        return self.prepare(kernel, template, threads, outputs)([inputs[name] for name in kernel.inputs])

    def prepare(
        self,
        kernel: Kernel,
        template: Template,
        threads: Threads,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> Call:
        text = kernel, template, threads.simdgroups, threads.resident, threads.at_launch
        if self.family == "cuda":
            made, template = cuda_kernel(*text), ()
        else:
            made, template = metal_kernel(kernel), (*template, ("SIMDGROUPS", threads.simdgroups))
        arguments = call_arguments(template, threads, outputs)

        def call(inputs: Sequence[mx.array], shapes: Shapes | None = None) -> list[mx.array]:
            self.n_launched += 1
            if self.files is not None:
                self._want(text, [array.dtype for array in inputs], arguments["output_dtypes"])
            if shapes is not None:
                return made(inputs=inputs, **{**arguments, "output_shapes": shapes})
            return made(inputs=inputs, **arguments)

        return call

    def _want(self, text: tuple[Any, ...], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> None:
        """Have a CUDA kernel compiled whose call has been prepared."""
        asked = text, *inputs, *outputs
        if asked in self._asked or self.files is None:
            return
        self._asked.add(asked)
        kernel: Kernel = text[0]
        body, header = cuda_text(*text)
        arguments = (zip(names, of, strict=True) for names, of in ((kernel.inputs, inputs), (kernel.outputs, outputs)))
        self.files.want(_signature(kernel)[0], header, body, *map(tuple, arguments))


def call_arguments(
    template: Template, threads: Threads, outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]
) -> dict[str, Any]:
    """What a kernel of MLX's is called with, beside its inputs."""
    group = SIMD_LANES * threads.simdgroups
    x, y, z = threads.groups
    return {
        "template": list(template),
        "grid": (x * group, y, z),
        "threadgroup": (group, 1, 1),
        "output_shapes": [shape for shape, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
    }


@lru_cache(maxsize=64)
def metal_kernel(kernel: Kernel) -> Any:
    """MLX's Metal kernel. It can be made, and traced, on a machine without Metal."""
    return mx.fast.metal_kernel(*_signature(kernel), kernel.body(), kernel.header("metal"))


@lru_cache(maxsize=256)
def cuda_kernel(kernel: Kernel, template: Template, simdgroups: int, resident: int, at_launch: tuple[int, int]) -> Any:
    """MLX's CUDA kernel, its constants in its text: handing them over costs more than all else of a call."""
    text = cuda_text(kernel, template, simdgroups, resident, at_launch)
    return mx.fast.cuda_kernel(*_signature(kernel), *text, shared_memory=shared_memory(at_launch))


def cuda_text(
    kernel: Kernel, template: Template, simdgroups: int, resident: int, at_launch: tuple[int, int]
) -> tuple[str, str]:
    """Body and header. The header's last line stands for all that they include: what is kept under a name made of the
    text must have another one when a file changes."""
    header, body = kernel.includes("cuda")
    constants = "".join(_cuda_constant(name, value) for name, value in (*template, ("SIMDGROUPS", simdgroups)))
    before = _launch_bounds(simdgroups, resident) + _shared_place(*at_launch)
    return body, before + header + constants + f"// {_digest(kernel)}\n"


@lru_cache(maxsize=32)
def _digest(kernel: Kernel) -> str:
    return hashlib.sha256((kernel.header("cuda") + kernel.body()).encode()).hexdigest()[:16]


def _signature(kernel: Kernel) -> tuple[str, list[str], list[str]]:
    return f"tqgguf_{kernel.name}", list(kernel.inputs), list(kernel.outputs)


_CUDA_TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


def _cuda_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_CUDA_TYPES[value]};\n"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};\n"


def _launch_bounds(simdgroups: int, resident: int) -> str:
    """MLX writes the kernel's signature itself, so that the bounds have to come in with `__global__`."""
    if not resident:
        return ""
    bounds = f"__launch_bounds__({SIMD_LANES * simdgroups}, {resident})"
    return f"#undef __global__\n#define __global__ __attribute__((global)) {bounds}\n"


_RESERVED = 1024
"""Bytes of shared memory that CUDA keeps before what a kernel declares (none on old devices)."""


def shared_memory(at_launch: tuple[int, int]) -> int:
    """Bytes to ask for at a launch: what begins at SHARED_PLACE may begin up to _RESERVED after what is given."""
    return at_launch[1] + _RESERVED if at_launch[1] else 0


def _shared_place(declared: int, given: int) -> str:
    return f"#define SHARED_PLACE {_RESERVED + declared}\n" if given else ""


def _include(name: str) -> str:
    """A line that includes a file of this folder; its text where the path cannot stand in such a line."""
    path = str(_FOLDER / name)
    return text_of(name) if set(path) & set('"\\\n') else f'#include "{path}"\n'


@lru_cache(maxsize=_KEPT_SIZES)
def sizes_array(*sizes: int) -> mx.array:
    """The int32 input of a kernel; layers share it, and the steps of a page."""
    return mx.array(np.array(sizes, np.int32))


@lru_cache_in_thread(16)
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

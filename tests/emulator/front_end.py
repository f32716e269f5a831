"""Kernels' text under clang's front end: as Metal sees it, with its address spaces, and as CUDA does.

Names, types, address spaces and implicit doubles are checked; nothing is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import clang.cindex
import mlx.core as mx

from emulator.builder import HERE, read_signature
from tqgguf.runtime.kernels.launch import Kernel, Template, Threads, text_of

_INSTANTIATION = re.compile(r"\n\s*template \[\[host_name.*?decltype\((.*?)\) .*?;\n", re.S)
_FLAGS = [
    *("-xc++", "-std=c++14", "-nostdinc", "-ffreestanding", "-Wall", "-Wdouble-promotion", "-Wno-unknown-attributes"),
    *("-Wno-ignored-attributes", "-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-unused-variable"),
    *("-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-shift-count-overflow", "-Wno-unknown-pragmas"),
]


_CUDA_FLAGS = [
    "-xc++",
    "--target=nvptx64-nvidia-cuda",
    "-std=c++17",
    "-nostdinc",
    "-ffreestanding",
    "-Wdouble-promotion",
]
_CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}


def cuda_complaints(
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    template: Template,
    threads: Threads,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[str]:
    """What clang says of a call's CUDA text, in the frame that MLX (custom_kernel.cpp) puts around it."""
    arguments = [f"const {_CUDA_TYPES[inputs[name].dtype]}* {name}" for name in kernel.inputs]
    arguments += [f"{_CUDA_TYPES[dtype]}* {name}" for name, (_, dtype) in zip(kernel.outputs, outputs, strict=True)]
    constants = [_cuda_constant(name, value) for name, value in (*template, ("SIMDGROUPS", threads.simdgroups))]
    source = "\n".join(
        [
            f'#include "{HERE / "cuda.h"}"',
            '#line 1 "kernel.cu"',
            kernel.header("cuda"),
            "namespace mlx::core::cu {",
            f"__global__ void kernel({', '.join(arguments)}) {{",
            *constants,
            kernel.body(),
            "}\n}",
        ]
    )
    return _diagnostics("kernel.cpp", source, _CUDA_FLAGS)


def _cuda_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_CUDA_TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"


def complaints(text: str) -> list[str]:
    """What clang says of MLX's generated text of a kernel: line and message of each error and warning."""
    call = read_signature(text).call
    body = _INSTANTIATION.sub(f"\ntemplate decltype({call}) {call};\n", text) if "<" in call else text
    body = body.replace(text_of("prelude.metal"), "")
    source = f'#include "{HERE / "address_spaces.h"}"\n#line 1 "kernel.metal"\n{body}'
    return _diagnostics("kernel.cpp", source, _FLAGS)


def _diagnostics(name: str, source: str, flags: Sequence[str]) -> list[str]:
    unit = clang.cindex.Index.create().parse(name, args=list(flags), unsaved_files=[(name, source)])
    return [f"line {d.location.line}: {d.spelling}" for d in unit.diagnostics]

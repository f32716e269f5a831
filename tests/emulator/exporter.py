"""The Metal text that MLX would compile on a Mac, on a machine without Metal: a kernel's call, traced by
export_function."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from tqgguf.runtime.kernels.launch import Kernel, Template, Threads, call_arguments, metal_kernel

SMALL = 8  # elements below which Metal takes an input for `constant`


def metal_text(
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    template: Template,
    threads: Threads,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> str:
    """MLX's text of this call: its own signature, the kernel's header and body, and the instantiation asked for."""
    shapes = tuple((min(inputs[name].size, SMALL), inputs[name].dtype) for name in kernel.inputs)
    dtypes = tuple(dtype for _, dtype in outputs)
    return _text(kernel, shapes, template, threads.simdgroups, dtypes)


@lru_cache(maxsize=512)
def _text(
    kernel: Kernel,
    shapes: tuple[tuple[int, mx.Dtype], ...],
    template: Template,
    simdgroups: int,
    dtypes: tuple[mx.Dtype, ...],
) -> str:
    made = metal_kernel(kernel)
    arrays = [mx.zeros((size,), dtype=dtype) for size, dtype in shapes]

    def call(*given: mx.array) -> list[mx.array]:
        threads = Threads((1, 1, 1), simdgroups)
        constants = (*template, ("SIMDGROUPS", simdgroups))
        arguments = call_arguments(constants, threads, [((SMALL,), dtype) for dtype in dtypes])
        return made(inputs=list(given), **arguments, verbose=True)

    with tempfile.TemporaryDirectory() as folder:
        printed = _printed_by(lambda: mx.export_function(os.path.join(folder, "kernel.mlxfn"), call, *arrays))
    found = re.search(r"```\n(.*)\n```", printed, re.S)
    assert found, f"MLX printed no kernel text, but: {printed[:500]!r}"
    return found.group(1)


def _printed_by(function: Any) -> str:
    """What C++ prints to file descriptor 1 meanwhile."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as taken:
        os.dup2(taken.fileno(), 1)
        try:
            function()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        taken.seek(0)
        return taken.read().decode()

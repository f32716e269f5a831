"""An emulated launcher that shows clang's front end every text first: as Metal with its address spaces, and as CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import mlx.core as mx

from emulator.exporter import metal_text
from emulator.front_end import complaints, cuda_complaints
from emulator.launcher import EmulatedLauncher
from tqgguf.runtime.kernels.launch import Kernel, Template, Threads

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
        assert _complaints(metal_text(kernel, inputs, template, threads, outputs)) == []
        key = kernel, template, threads.simdgroups, tuple(inputs[name].dtype for name in kernel.inputs)
        if key not in _seen_as_cuda:
            _seen_as_cuda[key] = cuda_complaints(kernel, inputs, template, threads, outputs)
        assert _seen_as_cuda[key] == []
        return super().launch(kernel, inputs, template, threads, outputs)


@lru_cache(maxsize=512)
def _complaints(text: str) -> list[str]:
    return complaints(text)

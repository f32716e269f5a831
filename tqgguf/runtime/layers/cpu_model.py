"""What a loaded mlx-lm model gets changed on a CPU, whatever it was loaded from: the same results, sooner.

Single rows take RoPE as a matrix. Where mlx was left with the reference BLAS (no C compiler, no OpenBLAS), numpy does
the products: that BLAS does some 4 GFLOP/s, and evaluating each input costs far less than numpy saves.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from tqgguf.runtime.attention.blas import load_fast_blas
from tqgguf.runtime.layers.matrices import WeightLinear
from tqgguf.runtime.layers.rope import put_row_rope


class NumpyLinear(WeightLinear):
    """An `nn.Linear` of float32 weights by numpy's product."""

    def product(self, x: mx.array) -> mx.array:
        return mx.array(np.asarray(x.astype(mx.float32)) @ np.asarray(self.weight).T).astype(x.dtype)


def suit_cpu(model: nn.Module) -> None:
    """Change a model's modules in place, where mlx computes on a CPU."""
    if mx.default_device() != mx.cpu:
        return
    put_row_rope(model)
    if load_fast_blas().is_slow:
        put_numpy(model)


def put_numpy(model: nn.Module) -> None:
    """Let every float32 Linear of a model multiply by numpy."""
    places = [
        (path, NumpyLinear(module))
        for path, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.dtype == mx.float32
    ]
    model.update_modules(tree_unflatten(places))

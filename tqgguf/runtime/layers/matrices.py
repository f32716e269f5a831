"""The modules that take mlx-lm's Linear and Embedding places where a weight is not float32.

A model whose activations are float32 may hold float16 matrices (of types without an exact packed form) beside packed
ones. mlx would widen such a matrix as a whole at every product; here the activations are narrowed instead, row by row,
so that neither range nor memory is lost. Knows mlx's modules; knows neither GGUF nor models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from tqgguf.runtime.layers.weights import Packed

_SMALLEST = 1e-30  # a row of zeros is divided by this


def half_product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T in x's dtype for x [..., n] and a weight [m, n] of another float type.

    Rows of x are scaled to a largest value of 1 first: the inputs of some down projections are beyond float16's range.
    """
    largest = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), _SMALLEST)
    return ((x / largest).astype(weight.dtype) @ weight.T).astype(x.dtype) * largest


class OwnLinear(nn.Module):
    """In a Linear's place, with its bias: a subclass holds the weight and multiplies in its own way."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if "bias" in linear:
            self.bias = linear.bias

    def product(self, x: mx.array) -> mx.array:
        """x @ weight.T in x's dtype."""
        raise TypeError(f"{type(self).__name__} has no product")

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y + self.bias if "bias" in self else y


class WeightLinear(OwnLinear):
    """One that holds the weight as the Linear does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight = linear.weight


class HalfLinear(WeightLinear):
    """A Linear with a half-precision weight between float32 activations; the bias is float32."""

    def product(self, x: mx.array) -> mx.array:
        return half_product(x, self.weight)


class HalfEmbedding(nn.Module):
    """An Embedding with a weight [tokens, values] of another type than what it gives and takes: float32, or `dtype`."""

    dtype = mx.float32

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids].astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return half_product(x, self.weight)


class InputEmbedding(nn.Module):
    """An embedding whose rows are scaled, and given in `dtype`, when looked up; as output layer it is the plain one."""

    def __init__(self, embedding: nn.Module, scale: float, dtype: mx.Dtype) -> None:
        super().__init__()
        self.embedding = embedding
        self._scale, self._dtype = scale, dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self.embedding(ids).astype(self._dtype) * self._scale

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)


_HALF: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}


def put_packed(model: nn.Module, packed: Mapping[str, Packed]) -> None:
    """Put packed matrices into the places of dense ones, by module path."""

    def form(path: str, module: nn.Module) -> bool | dict[str, Any]:
        found = packed.get(path)
        return found is not None and {"group_size": found.group_size, "bits": found.bits, "mode": found.mode}

    if packed:
        nn.quantize(model, class_predicate=form)


def put_half(model: nn.Module, paths: set[str], dtype: mx.Dtype = mx.float32) -> None:
    """Make the modules at `paths` take activations of `dtype` to their weights of another type."""
    places = [(path, _HALF[type(module)](module)) for path, module in model.named_modules() if path in paths]
    for _, made in places:
        if isinstance(made, HalfEmbedding):
            made.dtype = dtype
    model.update_modules(tree_unflatten(places))

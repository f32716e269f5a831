"""Stored bits per value of K and V: what a cache costs for each number it holds, everything charged.

Bits per value = (blocks with their scales + page means + exact prefix + channel scale) x 8 / values in whole pages. The
f16 tail is a fixed number of bytes and no part of it. A float type has no pages; each of its rows counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tqgguf.formats.blocks.cache_spec import LayerTypes
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import LayerShape, side_bytes


@dataclass(frozen=True)
class StoredBits:
    """Bits per value of each side and of both together, weighted by their values; nan where no whole page is held."""

    k: float
    v: float
    mean: float


def bits_per_value(layers: Sequence[LayerShape], types: Sequence[LayerTypes], n_tokens: int) -> StoredBits:
    """Of a cache that has seen `n_tokens`; one entry of `types` for each layer.

    RequestError: a type that some layer's heads cannot have.
    """

    def sides(side: Side) -> Iterable[tuple[float, int]]:
        for layer, kinds in zip(layers, types, strict=True):
            held = side_bytes(layer, kinds, side, n_tokens)
            yield (held.total - held.tail if held.values else 0), held.values

    return stored_bits(sides("k"), sides("v"))


def bits_of_groups(
    layers: Sequence[LayerShape], n_tokens: int, bits: int, group_size: int, group_bytes: int
) -> StoredBits:
    """Of mlx-lm's quantised cache: `bits` a value and `group_bytes` of scale and bias for every `group_size` values.

    Its sliding-window layers cannot be quantised and stay f16.
    """
    quantised = bits + 8 * group_bytes / group_size

    def sides(side: Side) -> Iterable[tuple[float, int]]:
        for layer in layers:
            held = side_bytes(layer, LayerTypes("f16", "f16"), side, n_tokens)
            yield (held.total if layer.window is not None else held.values * quantised / 8), held.values

    return stored_bits(sides("k"), sides("v"))


def stored_bits(k: Iterable[tuple[float, int]], v: Iterable[tuple[float, int]]) -> StoredBits:
    """Of the bytes and values of each layer."""
    (k_bytes, k_values), (v_bytes, v_values) = _total(k), _total(v)
    both_values = k_values + v_values if k_values and v_values else 0
    return StoredBits(_ratio(k_bytes, k_values), _ratio(v_bytes, v_values), _ratio(k_bytes + v_bytes, both_values))


def _total(sides: Iterable[tuple[float, int]]) -> tuple[float, int]:
    sides = list(sides)
    return sum(n_bytes for n_bytes, _ in sides), sum(n for _, n in sides)


def _ratio(n_bytes: float, n_values: int) -> float:
    return n_bytes * 8 / n_values if n_values else float("nan")

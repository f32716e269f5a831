"""Stored bits per value of K and V: what a cache costs for each number it holds, everything charged.

Bits per value = (blocks with their scales + page means + exact prefix + channel scale) x 8 / values in whole pages. The
f16 tail is a fixed number of bytes and no part of it. A float type has no pages; each of its rows counts. Which cache
has means or channel scales is decided by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tqgguf.formats.block_types import PAGE_TOKENS
from tqgguf.formats.codec import Side, resolve_codec
from tqgguf.formats.kv_size import F16_BYTES, LayerShape

MEAN_BYTES = 2  # one f16 per channel and page
SCALE_BYTES = 4  # one f32 per channel


@dataclass(frozen=True)
class StoredBits:
    """Bits per value of each side and of both together, weighted by their values; nan where no whole page is held."""

    k: float
    v: float
    mean: float


def bits_per_value(
    layers: Sequence[LayerShape],
    type_k: str,
    type_v: str,
    n_tokens: int,
    n_prefix: int,
    *,
    mean_bytes: int = 0,
    scale_bytes: int = 0,
) -> StoredBits:
    """Of a cache that has seen `n_tokens`, the first `n_prefix` of them exact.

    mean_bytes, scale_bytes: bytes that K's balance stores per channel and page (`MEAN_BYTES`), and per channel
    (`SCALE_BYTES`); 0 where it is off. RequestError: a type that some layer's heads cannot have.
    """
    return _stored_bits(
        (_side(layer, type_k, "k", n_tokens, n_prefix, mean_bytes, scale_bytes) for layer in layers),
        (_side(layer, type_v, "v", n_tokens, n_prefix, 0, 0) for layer in layers),
    )


def bits_of_groups(layers: Sequence[LayerShape], bits: int, group_size: int, group_bytes: int) -> StoredBits:
    """Of mlx-lm's quantised cache: `bits` a value and `group_bytes` of scale and bias for every `group_size` values.

    Its sliding-window layers cannot be quantised and stay f16.
    """
    per_group = {False: bits * group_size + 8 * group_bytes, True: 16 * group_size}

    def sides(side: Side) -> Iterable[tuple[float, int]]:
        for layer in layers:
            values = layer.n_kv_heads * (layer.head_dim_k if side == "k" else layer.head_dim_v)
            yield values * per_group[layer.window is not None] / group_size / 8, values

    return _stored_bits(sides("k"), sides("v"))


def _side(
    layer: LayerShape, cache_type: str, side: Side, n_tokens: int, n_prefix: int, mean_bytes: int, scale_bytes: int
) -> tuple[float, int]:
    """Bytes charged to one side of a layer, and the values they hold."""
    head_dim = layer.head_dim_k if side == "k" else layer.head_dim_v
    codec = resolve_codec(cache_type, head_dim, side)
    channels = layer.n_kv_heads * head_dim
    if codec.is_float:
        return n_tokens * layer.n_kv_heads * codec.row_bytes, n_tokens * channels
    first_page = 0 if layer.window is None else max(0, n_tokens - layer.window + 1) // PAGE_TOKENS
    n_pages = n_tokens // PAGE_TOKENS - first_page
    if n_pages <= 0:
        return 0, 0
    n_exact = n_prefix if first_page == 0 else 0
    blocks = n_pages * PAGE_TOKENS * layer.n_kv_heads * codec.row_bytes
    return (
        blocks + channels * (n_pages * mean_bytes + n_exact * F16_BYTES + scale_bytes),
        n_pages * PAGE_TOKENS * channels,
    )


def _stored_bits(k: Iterable[tuple[float, int]], v: Iterable[tuple[float, int]]) -> StoredBits:
    (k_bytes, k_values), (v_bytes, v_values) = _total(k), _total(v)
    both_values = k_values + v_values if k_values and v_values else 0
    return StoredBits(_ratio(k_bytes, k_values), _ratio(v_bytes, v_values), _ratio(k_bytes + v_bytes, both_values))


def _total(sides: Iterable[tuple[float, int]]) -> tuple[float, int]:
    sides = list(sides)
    return sum(n_bytes for n_bytes, _ in sides), sum(n for _, n in sides)


def _ratio(n_bytes: float, n_values: int) -> float:
    return n_bytes * 8 / n_values if n_values else float("nan")

"""How many bytes a KV cache holds: one formula for run, plan and snapshots.

Summed over layers: whole pages held, the f16 tail and exact prefix, and once per token its id. Balance adds page means
and channel scales where it is on; it is charged here then too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tqgguf.formats.block_types import PAGE_TOKENS
from tqgguf.formats.codec import Side, resolve_codec

F16_BYTES = 2
TOKEN_ID_BYTES = 4
SIDES: tuple[Side, Side] = ("k", "v")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's cache. window: keys that a query sees (None: all)."""

    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None


def kv_bytes(layers: Iterable[LayerShape], type_k: str, type_v: str, n_tokens: int, n_prefix: int) -> int:
    """Bytes of a cache of `n_tokens`, the first `n_prefix` of them exact, as a query at position n_tokens needs it."""
    return TOKEN_ID_BYTES * n_tokens + sum(
        _side_bytes(layer, cache_type, side, n_tokens, n_prefix)
        for layer in layers
        for side, cache_type in zip(SIDES, (type_k, type_v), strict=True)
    )


def _side_bytes(layer: LayerShape, cache_type: str, side: Side, n_tokens: int, n_prefix: int) -> int:
    codec = resolve_codec(cache_type, layer.head_dim_k if side == "k" else layer.head_dim_v, side)
    first_page = 0 if layer.window is None else max(0, n_tokens - layer.window + 1) // PAGE_TOKENS
    row_bytes = layer.n_kv_heads * codec.row_bytes
    if codec.is_float:
        return (n_tokens - first_page * PAGE_TOKENS) * row_bytes
    n_pages = n_tokens // PAGE_TOKENS - first_page
    n_exact = n_tokens % PAGE_TOKENS + (n_prefix if first_page == 0 and n_pages > 0 else 0)
    return n_pages * PAGE_TOKENS * row_bytes + n_exact * layer.n_kv_heads * codec.head_dim * F16_BYTES

"""How many bytes a KV cache holds: one formula for run, plan and snapshots.

Summed over layers: whole pages held, with their means where K is balanced, the f16 tail and exact prefix, the channel
scale, and once per token its id. In memory a tail has room for a whole page, of which only its rows are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import LayerTypes
from tqgguf.formats.blocks.codec import Side, resolve_codec

F16_BYTES = 2
F32_BYTES = 4
TOKEN_ID_BYTES = 4
SIDES: tuple[Side, Side] = ("k", "v")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's cache. window: keys that a query sees (None: all)."""

    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None

    def head_dim(self, side: Side) -> int:
        return self.head_dim_k if side == "k" else self.head_dim_v


@dataclass(frozen=True)
class SideBytes:
    """What one side of one layer holds. values: numbers in whole pages (of a float type: in all rows)."""

    pages: int = 0
    """Bytes of blocks with their scales (of a float type: of all rows)."""
    means: int = 0
    prefix: int = 0
    tail: int = 0
    scale: int = 0
    values: int = 0

    @property
    def total(self) -> int:
        return self.pages + self.means + self.prefix + self.tail + self.scale


def kv_bytes(layers: Sequence[LayerShape], types: Sequence[LayerTypes], n_tokens: int) -> int:
    """Bytes of a cache of `n_tokens`, as a query at position n_tokens needs it; one entry of `types` for each layer."""
    return TOKEN_ID_BYTES * n_tokens + sum(
        side_bytes(layer, kinds, side, n_tokens).total
        for layer, kinds in zip(layers, types, strict=True)
        for side in SIDES
    )


def side_bytes(layer: LayerShape, types: LayerTypes, side: Side, n_tokens: int) -> SideBytes:
    """One side's part of `kv_bytes`. RequestError: a type that the layer's heads cannot have."""
    codec = resolve_codec(types.of(side), layer.head_dim(side), side)
    first_page = 0 if layer.window is None else max(0, n_tokens - layer.window + 1) // PAGE_TOKENS
    row_bytes, channels = layer.n_kv_heads * codec.row_bytes, layer.n_kv_heads * codec.head_dim
    if codec.is_float:
        n_rows = n_tokens - first_page * PAGE_TOKENS
        return SideBytes(pages=n_rows * row_bytes, values=n_rows * channels)
    n_pages = n_tokens // PAGE_TOKENS - first_page
    balance = types.balance if side == "k" else "off"
    n_exact = types.n_prefix if first_page == 0 and n_pages > 0 else 0
    return SideBytes(
        pages=n_pages * PAGE_TOKENS * row_bytes,
        means=n_pages * channels * F16_BYTES if balance != "off" else 0,
        prefix=n_exact * channels * F16_BYTES,
        tail=n_tokens % PAGE_TOKENS * channels * F16_BYTES,
        scale=channels * F32_BYTES if balance == "full" else 0,
        values=n_pages * PAGE_TOKENS * channels,
    )

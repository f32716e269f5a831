"""A snapshot in other cache types. Balance and exact prefix stay; what is not quantised yet is quantised once.

Rows are made slice by slice while the result is read. What other programs' carriers want of rows is `recoded_rows`'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.recoded_rows import RecodedRows
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Rows, SideSnapshot, Snapshot


def recode_snapshot(
    snapshot: Snapshot, type_k: str | None = None, type_v: str | None = None, *, requantise: bool = False
) -> Snapshot:
    """The snapshot with K and V of these types, as -ctk and -ctv take them, as the runtime holds them (None: of the
    types it has).

    requantise: quantise again what is quantised already, which costs quality. RequestError: that is needed and not
    allowed, or a type that a layer's heads cannot have.
    """
    n_layers = 1 + max((layer.layer for layer in snapshot.layers), default=0)
    wanted = {side: None if text is None else CacheSpec(text, text).resolve(n_layers) for side, text in
              (("k", type_k), ("v", type_v))}  # fmt: skip
    layers = []
    for layer in snapshot.layers:
        made: dict[Side, SideSnapshot] = {side: layer.side(side) for side in SIDES}
        for side, held in made.items():
            types = wanted[side]
            cache_type = held.codec.cache_type if types is None else types[layer.layer].type_k
            codec = StoredCodec.native(cache_type, held.codec.head_dim, side)
            if codec == held.codec:
                continue
            if held.rows.shape[0] and not held.codec.is_float and not requantise:
                raise RequestError(
                    f"layer {layer.layer}: {side.upper()} is quantised as {held.codec.cache_type} already and would be "
                    f"quantised again as {cache_type}; --requantise allows it"
                )
            made[side] = _recode(layer, side, held, codec)
        k, v = made["k"], made["v"]
        if k is layer.k and v is layer.v:
            layers.append(layer)
        else:
            floats = layer.k.codec.is_float or k.codec.is_float
            layers.append(replace(layer, k=k, v=v, balance="off" if floats else layer.balance))
    if all(new is old for new, old in zip(layers, snapshot.layers, strict=True)):
        return snapshot
    # other blocks are no more what evaluating a prompt gives, so no run may take them for that
    return replace(snapshot, layers=tuple(layers), prompt_ranges=(), origin={})


@dataclass(frozen=True, eq=False)
class _Mapped:
    """Rows decoded and encoded again while they are read; balance, which is before the first and after the second,
    stays as it is.
    """

    rows: Rows
    held: StoredCodec
    codec: StoredCodec

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.rows.shape[:2], self.codec.row_bytes

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        return self.codec.encode(self.held.decode(self.rows[tokens]))


@dataclass(frozen=True, eq=False)
class _Pages:
    """The first `n_rows` of other rows, of which the first `n_exact` are zero blocks."""

    rows: Rows
    n_rows: int
    n_exact: int
    zero: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_rows, *self.rows.shape[1:]

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = tokens.indices(self.n_rows)
        rows = self.rows[start:stop]
        if start < self.n_exact:
            rows = rows.copy()
            rows[: self.n_exact - start] = self.zero
        return rows


def _recode(layer: LayerSnapshot, side: Side, held: SideSnapshot, codec: StoredCodec) -> SideSnapshot:
    if codec.is_float:
        return SideSnapshot(codec, RecodedRows(held, codec, layer.start))
    if not held.codec.is_float and (layer.start + held.rows.shape[0]) % PAGE_TOKENS == 0:
        return replace(held, codec=codec, rows=_Mapped(held.rows, held.codec, codec))
    # from a float type, or blocks past the last page edge: whole pages become blocks, the rest the f16 tail
    n_tokens = held.n_tokens
    n_rows = max((layer.start + n_tokens) // PAGE_TOKENS * PAGE_TOKENS - layer.start, 0)
    exact = RecodedRows(held, StoredCodec.native("f16", codec.head_dim, side), layer.start)
    n_prefix = min(layer.n_prefix, n_tokens) if layer.start == 0 else 0
    rows = RecodedRows(held, codec, layer.start)
    if (layer.start + n_rows) % PAGE_TOKENS:  # a window that begins in the unfilled page: a tail stands behind an edge
        return SideSnapshot(codec, rows)
    zero = codec.encode(np.zeros((1, codec.head_dim), np.float32))[0]
    return SideSnapshot(
        codec,
        _Pages(rows, n_rows, n_prefix, zero),
        tail=_floats(exact, n_rows, n_tokens),
        prefix=_floats(exact, 0, n_prefix),
    )


def _floats(rows: RecodedRows, first: int, last: int) -> NDArray[np.float16] | None:
    """Rows of an f16 codec as values [tokens, n_kv_heads, head_dim]; None for no tokens."""
    return np.ascontiguousarray(rows[first:last]).view(np.float16) if first < last else None

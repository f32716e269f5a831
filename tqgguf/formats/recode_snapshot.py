"""A snapshot in other cache types: those of our own caches, so that foreign blocks can be used and floats packed.

Layers that hold what is asked for stay as they are. Others become plain: whole pages of blocks, then an f16 tail,
without balance or exact prefix. Rows are made while they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.block_types import PAGE_TOKENS
from tqgguf.formats.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.codec import Side
from tqgguf.formats.errors import RequestError
from tqgguf.formats.kv_size import SIDES
from tqgguf.formats.recoded_rows import RecodedRows, must_requantise
from tqgguf.formats.snapshot import LayerSnapshot, SideSnapshot, Snapshot
from tqgguf.formats.stored_codec import StoredCodec


@dataclass(frozen=True, eq=False)
class FirstRows:
    """The first `n_tokens` of some rows."""

    rows: RecodedRows
    n_tokens: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_tokens, *self.rows.shape[1:]

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = tokens.indices(self.n_tokens)
        return self.rows[start:stop]


def recode_snapshot(
    snapshot: Snapshot, type_k: str | None = None, type_v: str | None = None, *, requantise: bool = False
) -> Snapshot:
    """type_k, type_v: of the layers, as -ctk and -ctv take them (None: the types that they have, as our caches code
    them). requantise: quantise again what is quantised already.

    What changes is no more what a prompt's evaluation gave, so no range of it counts as prompt, and its origin is gone.
    RequestError: a type that heads cannot have, or rows that would be quantised again.
    """
    n_layers = len(snapshot.layers)
    kinds = [None if text is None else CacheSpec(text, text).resolve(n_layers) for text in (type_k, type_v)]
    layers = tuple(
        _recoded(layer, [None if kind is None else kind[i] for kind in kinds], snapshot.n_cells, requantise)
        for i, layer in enumerate(snapshot.layers)
    )
    if all(made is layer for made, layer in zip(layers, snapshot.layers, strict=True)):
        return snapshot
    return replace(snapshot, layers=layers, prompt_ranges=(), origin={})


def _recoded(layer: LayerSnapshot, asked: list[LayerTypes | None], n_cells: int, requantise: bool) -> LayerSnapshot:
    codecs = {}
    for side, types in zip(SIDES, asked, strict=True):
        held = layer.side(side).codec
        cache_type = held.cache_type if types is None else types.type_k
        codecs[side] = StoredCodec.native(cache_type, held.head_dim, side)
    if all(layer.side(side).codec == codecs[side] for side in SIDES):
        return layer
    k, v = (_side(layer, side, codecs[side], n_cells, requantise) for side in SIDES)
    return replace(layer, k=k, v=v, balance="off", n_prefix=0, scale_is_given=False)


def _side(layer: LayerSnapshot, side: Side, codec: StoredCodec, n_cells: int, requantise: bool) -> SideSnapshot:
    held = layer.side(side)
    if must_requantise(held, codec) and not requantise:
        raise RequestError(
            f"layer {layer.layer}: {side.upper()} holds blocks of {held.codec.cache_type} that would be quantised "
            f"again to become {codec.cache_type} as caches here have it: ask for that"
        )
    rows = RecodedRows(held, codec, layer.start)
    if codec.is_float:
        return SideSnapshot(codec, rows)
    n_whole = max(0, n_cells // PAGE_TOKENS * PAGE_TOKENS - layer.start)
    if n_whole == held.n_tokens or (layer.start + n_whole) % PAGE_TOKENS:  # a tail stands behind a page edge only
        return SideSnapshot(codec, rows)
    floats = RecodedRows(held, StoredCodec("f16", codec.head_dim, codec.head_dim), layer.start)
    tail = np.ascontiguousarray(floats[n_whole : held.n_tokens]).view(np.float16)
    return SideSnapshot(codec, FirstRows(rows, n_whole), tail=tail)

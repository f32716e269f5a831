"""From mlx-lm's prompt caches to snapshots. Rows are not copied: they stay in the file until somebody reads them.

Values of a quantised cache become floats of the type that its scales have, into which mlx-lm decodes them. A file does
not say its tokens (unless this project wrote it) nor the order of its channels; both can be told.

Origin: carrier "mlx-lm", layout, traditional (whether RoPE turns neighbours in the file), bits and group_size (0: not
quantised), and `metadata_<name>` what the user said beside the cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.mlx.cache import FLOATS, QUANTIZED, ROTATING, MlxArray, MlxCache, MlxLayer
from tqgguf.formats.mlx.rows import AffineRows, FloatRows
from tqgguf.formats.models.outline import CachedLayer, ModelOutline, original_layout
from tqgguf.formats.snapshots.rope_order import ReorderedRows, channel_order
from tqgguf.formats.snapshots.snapshot import UNKNOWN_TOKEN, LayerSnapshot, Rows, SideSnapshot, Snapshot, bad_token
from tqgguf.formats.wording import shown

CARRIER = "mlx-lm"
OWN_PREFIX = "tqgguf_"
TOKENS_KEY = f"{OWN_PREFIX}tokens"
"""Beside the caches that this project writes: the ids of their tokens, as a text."""
ORDER_KEY = f"{OWN_PREFIX}rope_order"
"""Likewise: the order of a key's channels, one of ROPE_ORDERS."""
ROPE_ORDERS = {"neighbours": True, "halves": False}
"""Whether RoPE turns neighbouring channels."""
_TOKEN = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class MlxImportOptions:
    """tokens: that the cache was made of (None: what the file says, else unknown). traditional: whether RoPE turns
    neighbouring channels in the file (None: what the file says, else as with the model's original weights).
    """

    tokens: Sequence[int] | None = None
    traditional: bool | None = None


def outline_of_mlx_cache(cache: MlxCache, architecture: str = "") -> ModelOutline:
    """The outline of an unknown model whose layers have these caches; what RoPE does is not known."""
    layers = []
    for i, layer in enumerate(cache.layers):
        if not layer.keys:
            raise FormatError(f"{cache.path}: layer {i} holds no tokens: there is nothing to convert")
        window = layer.numbers["max_size"] if layer.kind == ROTATING and not layer.numbers["keep"] else None
        k, v = (head_dim(layer, arrays) for arrays in (layer.keys, layer.values))
        shape = LayerShape(layer.keys[0].data.shape[1], k, v, window)
        layers.append(CachedLayer(i, shape, NOT_ROTATED))
    return ModelOutline(architecture, tuple(layers))


def import_mlx_cache(cache: MlxCache, model: ModelOutline, options: MlxImportOptions | None = None) -> Snapshot:
    """The snapshot in a cache that `read_mlx_cache` has checked, with channels in the order that the model has.

    FormatError: the file's layers are not the model's, or hold what a snapshot cannot; RequestError: `tokens` are fewer
    than the cache's.
    """
    options = options or MlxImportOptions()
    if len(cache.layers) != len(model.layers):
        raise FormatError(
            f"{cache.path}: expected the model's {len(model.layers)} layers, found {len(cache.layers)}; it is another "
            "model's"
        )
    n_cells = max((layer.offset for layer in cache.layers), default=0)
    if not n_cells:
        raise FormatError(f"{cache.path}: it holds no tokens: there is nothing to convert")
    asked = options.traditional
    if asked is None:
        asked = ROPE_ORDERS.get(cache.metadata.get(ORDER_KEY, ""))
    traditional = set()
    layers = []
    for held, cached in zip(cache.layers, model.layers, strict=True):
        rope = original_layout(model.architecture, cached.rope)
        if asked is not None:
            rope = RopeLayout(rope.dims, asked)
        traditional.add(rope.traditional)
        layers.append(_layer(cache.path, held, cached, rope))
    quantised = next((layer.numbers for layer in cache.layers if layer.kind == QUANTIZED), {"bits": 0, "group_size": 0})
    origin: dict[str, Any] = {
        "carrier": CARRIER,
        "layout": cache.layout,
        "traditional": traditional == {True},
        "bits": quantised["bits"],
        "group_size": quantised["group_size"],
        **{f"metadata_{name}": value for name, value in cache.metadata.items() if name != TOKENS_KEY},
    }
    return Snapshot(
        tokens=_tokens(cache, options, n_cells, model.n_vocab),
        layers=tuple(layers),
        n_cells=n_cells,
        architecture=model.architecture,
        n_vocab=model.n_vocab,
        model=model.name,
        fingerprint=model.fingerprint,
        origin=origin,
    )


def _tokens(cache: MlxCache, options: MlxImportOptions, n_cells: int, n_vocab: int) -> NDArray[np.int32]:
    text = cache.metadata.get(TOKENS_KEY)
    if options.tokens is not None:
        tokens = np.array(options.tokens, np.int32)
    elif text is not None:
        words = text.split()
        if not all(map(_TOKEN.fullmatch, words)):
            raise FormatError(f"{cache.path}: {TOKENS_KEY}: expected ids of tokens, found {shown(text)}")
        tokens = np.array(words, np.int32)
    else:
        tokens = np.full(n_cells, UNKNOWN_TOKEN, np.int32)
    if len(tokens) < n_cells:
        raise RequestError(f"{cache.path}: expected {n_cells} or more tokens, as the cache holds, found {len(tokens)}")
    bad = bad_token(tokens, n_vocab)
    if bad is not None:
        raise FormatError(f"{cache.path}: {bad.message}")
    return tokens


def _layer(path: str, held: MlxLayer, cached: CachedLayer, rope: RopeLayout) -> LayerSnapshot:
    shape, where = cached.shape, f"{path}: layer {cached.layer}"
    if not held.keys:
        raise FormatError(f"{where}: it holds no tokens, other layers do")
    found = held.keys[0].data.shape[1], head_dim(held, held.keys), head_dim(held, held.values)
    expected = shape.n_kv_heads, shape.head_dim_k, shape.head_dim_v
    if found != expected:
        raise FormatError(
            f"{where}: expected (KV heads, head size of K, of V) {expected} as the model has, found {found}"
        )
    places = _places(where, held)
    start = held.offset - len(places)
    needed = 0 if shape.window is None else max(0, held.offset - shape.window + 1)
    if start > needed:
        raise FormatError(f"{where}: expected rows of the tokens from {needed} on, found them from {start} on")
    k, v = (_rows(f"{where}, {x}", held, arrays, places) for x, arrays in (("K", held.keys), ("V", held.values)))
    order = channel_order(shape.head_dim_k, rope, cached.rope)
    if order is not None:
        k = SideSnapshot(k.codec, ReorderedRows(k.rows, order, k.codec.row_bytes // shape.head_dim_k))
    return LayerSnapshot(cached.layer, k, v, start, shape.window, rope=cached.rope)


def _places(where: str, held: MlxLayer) -> NDArray[np.intp]:
    """Where the rows of the last tokens stand in the arrays, in the order of their positions.

    FormatError: tokens between others have been dropped, as a RotatingKVCache does that keeps its first tokens.
    """
    if held.kind != ROTATING:
        return np.arange(held.offset)
    capacity, index = held.keys[0].data.shape[2], held.numbers["index"]
    keep = held.numbers["keep"]
    if index == capacity or index >= held.offset:
        places = np.arange(index)
    else:
        places = np.concatenate([np.arange(keep), np.arange(index, capacity), np.arange(keep, index)])
    if len(places) > held.offset:
        raise FormatError(f"{where}: RotatingKVCache of {held.offset} tokens holds {len(places)} rows")
    if keep and len(places) < held.offset:
        raise FormatError(
            f"{where}: RotatingKVCache with keep={keep} has dropped tokens behind the first {keep}, which a prompt "
            "cache of ours cannot hold; make the cache without --max-kv-size"
        )
    return places


def _rows(where: str, held: MlxLayer, arrays: tuple[MlxArray, ...], places: NDArray[np.intp]) -> SideSnapshot:
    """Rows of a float type."""
    dim = head_dim(held, arrays)
    cache_type = FLOATS[arrays[-1].dtype]
    codec = StoredCodec(cache_type, dim, dim)
    rows: Rows = (
        AffineRows(arrays, places, held.numbers["bits"], codec, where)
        if held.kind == QUANTIZED
        else FloatRows(arrays[0], places)
    )
    return SideSnapshot(codec, rows)


def head_dim(held: MlxLayer, arrays: tuple[MlxArray, ...]) -> int:
    """Values of a head vector, by the shape of a layer's first array: packed words hold 32 bits of them each."""
    width: int = arrays[0].data.shape[3]
    return width * 32 // held.numbers["bits"] if held.kind == QUANTIZED else width

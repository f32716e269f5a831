"""The KV cache in blocks, in mlx-lm's cache protocol, and `make_prompt_cache` that builds one per layer of a model.

One `BlockKVCache` holds one layer: two sides, an offset, a window. Batch size 1. What a query reads as blocks and what
in f16 is decided in `attention`; how sides store it in `kv_sides`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, _BaseCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache

from tqgguf.formats.block_types import BLOCK_TYPES
from tqgguf.formats.codec import Codec, Side, resolve_codec
from tqgguf.formats.errors import EncodeError, FormatError, RequestError
from tqgguf.formats.kv_size import LayerShape
from tqgguf.runtime import block_ops, hook
from tqgguf.runtime.backends import default_reading
from tqgguf.runtime.kv_sides import PAGE, BlockSide, FloatSide, SideView
from tqgguf.runtime.readings import Reading

TURBO_PREFIX = 4  # tokens kept in f16 at the start: measured to halve the damage of 3-bit keys


def default_prefix(type_k: str, type_v: str) -> int:
    """Length of the exact prefix: 4 where a turbo type is used, else 0."""
    return TURBO_PREFIX if any(BLOCK_TYPES[t].family == "turbo" for t in (type_k, type_v) if t in BLOCK_TYPES) else 0


def _check_types(type_k: str, type_v: str) -> None:
    """RequestError, naming the types and the nearest, for an unknown one."""
    for side, cache_type in (("k", type_k), ("v", type_v)):
        if not isinstance(cache_type, str) or cache_type not in BLOCK_TYPES:
            resolve_codec(cache_type if isinstance(cache_type, str) else repr(cache_type), PAGE, side)


def layer_codec(cache_type: str, head_dim: int, side: Side, layer: int) -> Codec:
    """The codec of one side of a layer. RequestError names layer and side where the type cannot hold the head size."""
    try:
        return resolve_codec(cache_type, head_dim, side)
    except RequestError as error:
        raise RequestError(f"layer {layer}, {side.upper()}: {error}") from None


def check_cache_types(layers: Sequence[LayerShape], type_k: str, type_v: str) -> None:
    """Refuse types that some layer's heads cannot have, before anything is loaded."""
    for i, layer in enumerate(layers):
        layer_codec(type_k, layer.head_dim_k, "k", i)
        layer_codec(type_v, layer.head_dim_v, "v", i)


class BlockKVCache(_BaseCache):
    """The K and V of one layer in block types. See `make_prompt_cache`."""

    def __init__(
        self,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        layer: int = 0,
        window: int | None = None,
        n_prefix: int | None = None,
        usage: hook.Usage | None = None,
        reading: Reading | None = None,
    ) -> None:
        _check_types(type_k, type_v)
        self.type_k, self.type_v = type_k, type_v
        self.layer, self.window = layer, window
        if n_prefix is not None and not (_is_whole(n_prefix) and 0 <= n_prefix <= PAGE):
            raise RequestError(f"exact prefix: expected 0 to {PAGE} tokens, found {n_prefix!r}")
        self.n_prefix = default_prefix(type_k, type_v) if n_prefix is None else int(n_prefix)
        self.usage = usage or hook.Usage()
        self.reading = reading or default_reading()
        self.offset = 0
        self.sides: tuple[BlockSide | FloatSide, BlockSide | FloatSide] | None = None

    def _make_side(self, side: Side, head_dim: int) -> BlockSide | FloatSide:
        codec = layer_codec(self.type_k if side == "k" else self.type_v, head_dim, side, self.layer)
        if codec.is_float:
            return FloatSide(codec)
        return BlockSide(codec, self.n_prefix, self.reading.encode)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys [1, n_kv_heads, tokens, head_dim] and values; returns `LazyKV` arrays of everything held.

        RequestError: other shapes than before or than these, a head size that the type cannot hold, a fallback under
        strict; EncodeError: a full page holds NaN. A cache that raised is as it was.
        """
        self._check_rows(keys, values)
        if self.sides is None:
            sides = self._make_side("k", keys.shape[3]), self._make_side("v", values.shape[3])
        else:
            sides = self.sides[0].copy(), self.sides[1].copy()
        n_rows = keys.shape[2]
        k, v = (self._append(*new) for new in zip(("k", "v"), sides, (keys, values), strict=True))
        step = hook.Step(
            k,
            v,
            layer=self.layer,
            offset=self.offset,
            n_rows=n_rows,
            window=self.window,
            reading=self.reading,
            usage=self.usage,
        )
        step.open()
        self.sides = sides
        self.offset += n_rows
        self._release()
        fetched = []
        for view, new in zip((k, v), (keys, values), strict=True):
            lazy = hook.LazyKV(dequantise(view, self.offset - n_rows).astype(new.dtype)[None])
            lazy.step = step
            fetched.append(lazy)
        return fetched[0], fetched[1]

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        held = self.sides or (None, None)
        for name, rows, side in zip("KV", (keys, values), held, strict=True):
            where = f"layer {self.layer}, {name}"
            if not isinstance(rows, mx.array) or rows.ndim != 4 or not mx.issubdtype(rows.dtype, mx.floating):
                found = f"{rows.dtype} {rows.shape}" if isinstance(rows, mx.array) else type(rows).__name__
                raise RequestError(f"{where}: expected floats [1, n_kv_heads, tokens, head_dim], found {found}")
            if rows.shape[0] != 1:
                raise RequestError(f"block caches hold one sequence: expected batch size 1, found {rows.shape[0]}")
            if side is not None and (side.n_heads or rows.shape[1], side.codec.head_dim) != rows.shape[1::2]:
                raise RequestError(
                    f"{where}: expected {side.n_heads} heads of {side.codec.head_dim} values as before, "
                    f"found {rows.shape[1]} of {rows.shape[3]}"
                )
        if keys.shape[:3] != values.shape[:3]:
            found = f"{keys.shape} and {values.shape}"
            raise RequestError(f"layer {self.layer}: expected K and V of as many heads and tokens, found {found}")

    def _append(self, name: str, side: BlockSide | FloatSide, rows: mx.array) -> SideView:
        try:
            return side.append(rows[0])
        except EncodeError as error:
            raise EncodeError(f"layer {self.layer}, {name.upper()}: {error}") from None

    def _first_needed(self, offset: int) -> int:
        """The first page that a query at `offset` or later can see."""
        return 0 if self.window is None else max(0, offset - self.window + 1) // PAGE

    def _release(self) -> None:
        """Free what no later query can see; the step that was just made keeps its own views."""
        if self.sides is not None:
            for side in self.sides:
                side.release(self._first_needed(self.offset))

    @property
    def start(self) -> int:
        """Position of the first token still held (0 without a window)."""
        return 0 if self.sides is None else self.sides[0].first_page * PAGE

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of the next n tokens: None, "causal", or a boolean array [n, keys held + n] where one is needed."""
        window = self.window or window_size
        if not return_array and (window is None or self.offset + n <= window):
            return "causal" if n > 1 else None
        start = self._first_needed(self.offset) * PAGE
        mask = hook.CausalMask(create_causal_mask(n, self.offset - start, window_size=window))
        mask.window = window
        return mask

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.sides is None

    def is_trimmable(self) -> bool:
        """Whether `trim` can go back to any position: true until a window has freed its first page."""
        return self.start == 0

    def trim(self, n: int) -> int:
        """Remove the last n tokens (all, if there are fewer) and return how many were removed.

        Exact within the f16 tail. A cut inside an encoded page turns its decoded values into the tail. ValueError: a
        negative n, or a window has freed pages that the remaining tokens would need.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"trim: expected a number of tokens >= 0, found {n}")
        n = min(n, self.offset)
        length = self.offset - n
        if n and self.sides is not None:
            if self._first_needed(length) * PAGE < self.start:
                raise ValueError(
                    f"trim: layer {self.layer} holds tokens from {self.start} on and cannot go back to {length} "
                    f"with a window of {self.window}"
                )
            if length == 0:
                self.sides = None
            else:
                for side in self.sides:
                    side.truncate(length)
        self.offset = length
        return n

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V."""
        return 0 if self.sides is None else sum(side.nbytes for side in self.sides)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything `from_state` needs: settings as scalars, and both sides' arrays (None where there are none)."""
        settings = (
            self.type_k,
            self.type_v,
            self.layer,
            self.window or 0,
            self.n_prefix,
            self.offset,
            self.start // PAGE,
        )
        if self.sides is None:
            return settings
        dims = tuple(side.codec.head_dim for side in self.sides)
        return (*settings, *dims, *(list(side.arrays()) for side in self.sides))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """FormatError or RequestError for anything that `state` cannot have given; the cache is then as it was."""
        settings, rest = _split_state(state)
        type_k, type_v, layer, window, n_prefix, offset, first_page = settings
        fresh = BlockKVCache(
            type_k,
            type_v,
            layer=layer,
            window=window or None,
            n_prefix=n_prefix,
            usage=getattr(self, "usage", None),
            reading=getattr(self, "reading", None),
        )
        fresh.offset = offset
        if rest:
            dim_k, dim_v, *arrays = rest
            fresh.sides = fresh._make_side("k", dim_k), fresh._make_side("v", dim_v)
            for side, saved in zip(fresh.sides, arrays, strict=True):
                side.restore(first_page, offset, saved)
            if fresh.sides[0].n_heads != fresh.sides[1].n_heads:
                heads = [side.n_heads for side in fresh.sides]
                raise FormatError(f"cache state: expected as many heads of K as of V, found {heads[0]} and {heads[1]}")
        self.__dict__.update(fresh.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies (mlx-lm's server makes some) go by the state: a backend's handles cannot be copied."""
        return type(self).from_state, (self.state,), {"usage": self.usage}


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _split_state(state: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """A state's seven settings and its head sizes and arrays (none if it is empty); FormatError if it has others."""
    if not isinstance(state, (list, tuple)) or len(state) not in (7, 11):
        found = f"{type(state).__name__} of {len(state)}" if hasattr(state, "__len__") else type(state).__name__
        raise FormatError(f"cache state: expected a tuple of 7 or 11 entries, found {found}")
    numbers = state[2:9]
    if not all(_is_whole(n) and n >= 0 for n in numbers):
        raise FormatError(f"cache state: expected numbers >= 0 after the types, found {numbers!r}")
    offset, first_page = state[5:7]
    if first_page * PAGE > offset or (offset and len(state) == 7):
        raise FormatError(f"cache state: {offset} tokens from page {first_page} on cannot be: there are no such rows")
    return state[:7], state[7:]


def dequantise(view: SideView, offset: int) -> mx.array:
    """Every held row [n_kv_heads, tokens, head_dim] of a side, lazily: decoded blocks, and f16 from `offset`'s page on.

    Models that compute attention by themselves read this; rows of a step that spans pages then see the step's earlier
    pages in f16 too, where attention from blocks would see them as blocks.
    """
    if view.codes is None or view.scales is None:
        return view.rows
    n_pages = offset // PAGE - view.pages_start
    if n_pages <= 0:
        return view.rows
    blocks = block_ops.decode_pages(view.codec, view.codes[:n_pages], view.scales[:n_pages])
    parts = [blocks, view.rows]
    if view.prefix is not None and view.pages_start == 0:
        parts = [view.prefix, blocks[:, view.prefix.shape[1] :], view.rows]
    return mx.concatenate(parts, axis=1)


def make_prompt_cache(
    model: Any,
    type_k: str = "turbo4",
    type_v: str = "turbo3",
    *,
    n_prefix: int | None = None,
    strict: bool = False,
    usage: hook.Usage | None = None,
    reading: Reading | None = None,
) -> list[Any]:
    """A prompt cache for any mlx-lm model, to hand to `mlx_lm.generate(..., prompt_cache=...)`.

    Layers with full attention or a sliding window get a `BlockKVCache` of the given types; other kinds of cache
    (recurrent layers) stay as the model makes them. n_prefix: tokens kept in f16 at the start (default 4 with a turbo
    type, else 0). strict: attention that cannot read blocks is an error. usage: count into this instead. RequestError:
    an unknown type, or, at the first token, a head size that a type cannot hold (naming the layer).
    """
    _check_types(type_k, type_v)
    hook.install()
    usage = usage or hook.Usage(strict=strict)
    caches = []
    for layer, cache in enumerate(mlx_prompt_cache(model)):
        sliding = type(cache) is RotatingKVCache and cache.keep == 0
        if type(cache) is KVCache or sliding:
            cache = BlockKVCache(
                type_k,
                type_v,
                layer=layer,
                window=cache.max_size if sliding else None,
                n_prefix=n_prefix,
                usage=usage,
                reading=reading,
            )
        caches.append(cache)
    return caches

"""Between caches and snapshots: what a prompt cache holds as a `Snapshot`, and the same caches again from one.

Blocks are permuted, never requantised. A snapshot's rows are read from the caches' planes while they are asked for, so
that saving holds no second copy; a restore fills new planes from the file's mapping. Whether a snapshot belongs to a
model and to a request is `snapshots.fit`'s question; files are `formats`'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Codec, Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.page_rows import pages_to_rows, rows_to_pages
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.cores import cores
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.float_side import FLOAT_DTYPES, FloatSide
from tqgguf.runtime.kv.settings import LayerSettings
from tqgguf.runtime.kv.sides import BlockSide

_BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
PAGES_AT_A_TIME = 64  # of one side that are permuted at once: a few MB, which stay in a core's cache


def capture_layers(caches: Sequence[Any]) -> tuple[LayerSnapshot, ...]:
    """What the BlockKVCaches among a model's caches hold, one entry for each that holds tokens.

    The snapshot reads the caches while it is written: they must not change before that is done. RequestError: a cache
    of another kind holds something (a recurrent state, mlx-lm's own), which a prompt cache in a file cannot hold.
    """
    for layer, cache in enumerate(caches):
        if not isinstance(cache, BlockKVCache) and not cache.empty():
            raise RequestError(
                f"layer {layer}: its cache is a {type(cache).__name__}, which a prompt cache in a file cannot hold; "
                "expected caches of tqgguf.make_prompt_cache"
            )
    ours = [cache for cache in caches if isinstance(cache, BlockKVCache) and cache.sides is not None]
    mx.eval([cache.state for cache in ours])
    return tuple(_capture(cache) for cache in ours)


def restore_layers(snapshot: Snapshot, caches: Sequence[Any]) -> None:
    """Make new caches of the same types and settings hold what a snapshot holds, several layers side by side.

    Rows of the last, unfilled page that came in blocks become its f16 tail. RequestError: a layer is missing or is of
    other settings (types, RoPE, window) than its cache. FormatError: values that cannot be.
    """
    ours = {cache.layer: cache for cache in caches if isinstance(cache, BlockKVCache)}
    held = {layer.layer: layer for layer in snapshot.layers}
    if snapshot.n_cells and ours.keys() != held.keys():
        raise RequestError(
            f"prompt cache: expected layers {_numbers(ours)}, found {_numbers(held)}: it is of another model"
        )
    for number, layer in held.items():
        _check_settings(number, settings_of(layer), ours[number].settings)
    planes = {(layer.layer, side): _Planes(layer, side) for layer in held.values() for side in SIDES}
    mx.eval([array for made in planes.values() for array in made.arrays])
    with ThreadPoolExecutor(cores()) as pool:  # numpy lets other threads run while it copies
        for done in [pool.submit(*work) for made in planes.values() for work in made.fill()]:
            done.result()
    for number, layer in held.items():
        _restore(layer, ours[number], *(planes[number, side] for side in SIDES))
    lengths = [layer.start + layer.window - 1 for layer in held.values() if layer.window is not None and layer.start]
    for cache in ours.values():
        cache.shortest = max(lengths, default=0)


def _check_settings(layer: int, found: LayerSettings, expected: LayerSettings) -> None:
    fields = (
        ("types of K and V", f"{expected.types.type_k} and {expected.types.type_v}",
         f"{found.types.type_k} and {found.types.type_v}"),
        ("balance of K", expected.types.balance, found.types.balance),
        ("exact prefix", expected.types.n_prefix, found.types.n_prefix),
        ("window", expected.window or "none", found.window or "none"),
        ("RoPE", _turning(expected.rope), _turning(found.rope)),
    )  # fmt: skip
    for name, wanted, there in fields:
        if wanted != there:
            raise RequestError(f"layer {layer}: {name}: expected {wanted} as the cache has, found {there}")


def _turning(rope: RopeLayout) -> str:
    return f"{'neighbours' if rope.traditional else 'halves'} of {rope.dims} channels" if rope.dims else "no channels"


def _numbers(layers: Collection[int]) -> str:
    return f"{min(layers)} to {max(layers)}, {len(layers)} in all" if layers else "none"


def settings_of(layer: LayerSnapshot) -> LayerSettings:
    """What a cache that holds a snapshot's layer was asked to be."""
    return LayerSettings(layer.types, layer.layer, layer.window, layer.rope)


@dataclass(frozen=True)
class PlaneRows:
    """The pages of a BlockSide as rows uint8 [tokens, n_kv_heads, row_bytes], permuted while they are read; without the
    first `skipped` rows.
    """

    codec: Codec
    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    skipped: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[0] * PAGE_TOKENS - self.skipped, self.codes.shape[1], self.codec.row_bytes

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = (n + self.skipped for n in tokens.indices(self.shape[0]))
        first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
        rows = pages_to_rows(self.codec, self.codes[first:last], self.scales[first:last])
        return rows[start - first * PAGE_TOKENS : stop - first * PAGE_TOKENS]


def _capture(cache: BlockKVCache) -> LayerSnapshot:
    assert cache.sides is not None
    types = cache.settings.types
    start = max(cache.start, cache.valid_from)
    k, v = (_captured(side, name, start - cache.start) for name, side in zip(SIDES, cache.sides, strict=True))
    return LayerSnapshot(
        layer=cache.layer,
        k=k,
        v=v,
        start=start,
        window=cache.window,
        balance=types.balance,
        n_prefix=types.n_prefix,
        rope=cache.settings.rope,
        scale_is_given=cache.channel_scale is not None,
    )


def _captured(side: BlockSide | FloatSide, name: Side, skipped: int) -> SideSnapshot:
    """A side without its first `skipped` rows, which belong to no token."""
    codec = side.codec
    stored = StoredCodec.native(codec.cache_type, codec.head_dim, name)
    n_heads = side.n_heads or 0
    if isinstance(side, FloatSide):
        (rows,) = side.arrays()
        assert rows is not None
        values = _as_numpy(rows).view(np.uint8).reshape(rows.shape[0], n_heads, codec.row_bytes)
        return SideSnapshot(stored, values[skipped:])
    codes, scales = side.row_codes(), side.scales.read()
    rows_held: Any = np.empty((0, n_heads, codec.row_bytes), np.uint8)
    if codes is not None and scales is not None and len(codes):
        rows_held = PlaneRows(codec, _as_numpy(codes), _as_numpy(scales), skipped)
    scale = side.scale
    squares = None if scale is None or scale.value is not None else scale.query_squares
    return SideSnapshot(
        stored,
        rows_held,
        tail=_token_major(side.tail if rows_held.shape[0] or side.tail is None else side.tail[:, skipped:]),
        prefix=_token_major(side.prefix),
        page_means=None if side.means is None or not side.means.length else _as_numpy(side.means.read()),
        channel_scale=None if scale is None or scale.value is None else _as_numpy(scale.value),
        query_squares=None if squares is None or 0 in squares.shape else _as_numpy(squares),
    )


class _Planes:
    """New planes for the whole pages of a side: first made, then filled. `padding`: rows of the first page before the
    side's own, which nobody reads.
    """

    def __init__(self, layer: LayerSnapshot, name: Side) -> None:
        side, start = layer.side(name), layer.start
        self.side, self.codec = side, side.codec.codec
        self.start, self.padding = start, start % PAGE_TOKENS
        self.where = f"layer {layer.layer}, {name.upper()}"
        self.arrays: list[mx.array] = []
        self.n_pages = 0 if self.codec.is_float else (self.padding + side.rows.shape[0]) // PAGE_TOKENS
        if self.n_pages:
            lead = (self.n_pages, side.rows.shape[1], PAGE_TOKENS)
            self.arrays = [
                mx.zeros((*lead, self.codec.n_blocks * self.codec.code_bytes), dtype=mx.uint8),
                mx.zeros((*lead, self.codec.n_blocks * self.codec.n_scales), dtype=mx.float16),
            ]

    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows counted from the beginning of the first page."""
        own = self.side.rows[max(start - self.padding, 0) : stop - self.padding]
        missing = min(self.padding, stop) - start
        if missing <= 0:
            return own
        zeros = self.codec.encode(np.zeros((missing, own.shape[1], self.codec.head_dim), np.float32))
        return np.concatenate([zeros, own])

    def fill(self) -> Iterator[tuple[Any, ...]]:
        """Calls that write the pages into the evaluated planes, in place; they do not disturb each other."""
        codes, scales = (np.asarray(array) for array in self.arrays) if self.arrays else (None, None)
        for first in range(0, self.n_pages, PAGES_AT_A_TIME):
            last = min(first + PAGES_AT_A_TIME, self.n_pages)
            assert codes is not None and scales is not None
            rows = self.rows(first * PAGE_TOKENS, last * PAGE_TOKENS)
            yield rows_to_pages, self.codec, rows, codes[first:last], scales[first:last]

    def tail(self) -> NDArray[np.float16] | None:
        """The rows of the unfilled page: as they are, or decoded where they came in blocks."""
        try:
            page = self.side.open_page(self.start)
        except FormatError as error:
            raise FormatError(f"{self.where}: {error}") from error
        if self.n_pages or not self.padding:
            return self.side.tail if page is None else page
        zeros = np.zeros((self.padding, self.side.rows.shape[1], self.side.codec.head_dim), np.float16)
        return zeros if page is None else np.concatenate([zeros, page])


def _restore(layer: LayerSnapshot, cache: BlockKVCache, k: _Planes, v: _Planes) -> None:
    offset = layer.start + layer.k.n_tokens
    dims = [layer.side(side).codec.head_dim for side in SIDES]
    given = mx.array(layer.k.channel_scale) if layer.scale_is_given and layer.k.channel_scale is not None else None
    sides = [_arrays(k, balance=layer.balance), _arrays(v, balance="off")]
    v_tiled = 0  # snapshots have rows
    cache.state = (*cache.settings.scalars(), offset, layer.start // PAGE_TOKENS, given, *dims, v_tiled, *sides)
    cache.valid_from = layer.start if k.padding else 0


def _arrays(planes: _Planes, balance: str) -> list[mx.array | None]:
    """A side's arrays as `BlockSide.restore` and `FloatSide.restore` take them."""
    side = planes.side
    if planes.codec.is_float:
        rows = np.ascontiguousarray(planes.rows(0, planes.padding + side.rows.shape[0]))
        cache_type = planes.codec.cache_type
        return [mx.array(rows.view(_BITS[cache_type])).view(FLOAT_DTYPES[cache_type])]
    codes, scales = planes.arrays or (None, None)
    arrays = [codes, scales, _head_major(side.prefix), _head_major(planes.tail())]
    if balance != "off":
        arrays.append(_as_mlx(side.page_means))
    if balance == "full":
        arrays += [_as_mlx(side.channel_scale), _as_mlx(side.query_squares)]
    return arrays + [None] * (2 if balance == "full" else 1)  # of the last page, snapshots have blocks only


def _as_numpy(array: mx.array | None) -> NDArray[Any]:
    """A view of an evaluated array's memory; bf16 as the uint16 of its bits."""
    assert array is not None
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _as_mlx(array: NDArray[Any] | None) -> mx.array | None:
    return None if array is None else mx.array(array)


def _token_major(rows: mx.array | None) -> NDArray[np.float16] | None:
    """[n_kv_heads, tokens, head_dim] as [tokens, n_kv_heads, head_dim]; None where there are none."""
    return None if rows is None or not rows.shape[1] else _as_numpy(rows).swapaxes(0, 1)


def _head_major(rows: NDArray[np.float16] | None) -> mx.array | None:
    return None if rows is None or not len(rows) else mx.array(np.ascontiguousarray(rows.swapaxes(0, 1)))

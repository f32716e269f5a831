"""Does a backend compute on this device what numpy does? Every operation, cache type and head size, on made-up rows.

Blocks under test come from numpy's codec, the byte-exact one, and attention is compared with float64 on what they
decode to. Prints nothing, and knows no device: it is given a backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED
from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import Codec, Side, resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.backend import Backend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.kv.balance import ChannelScale
from tqgguf.runtime.kv.page_pool import PagePool
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Query, SideView
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.sides import BlockSide
from tqgguf.runtime.kv.tiles import to_rows, to_tiles

HEAD_DIMS = (64, 96, 128, 192, 256)
PAIRS = (
    *(("turbo4", "turbo3"), ("turbo4", "turbo4"), ("turbo3", "turbo3"), ("turbo2", "turbo2"), ("q8_0", "q8_0")),
    *(("q4_0", "q4_0"), ("q8_0", "turbo4"), ("f16", "turbo3"), ("turbo4", "f16")),
)
"""K and V types that attention is tested with; `all_pairs` takes every pair of the kernels' types."""

QUICK_HEAD_DIMS = (128,)
QUICK_TYPES = frozenset({"turbo4", "turbo3", "turbo4/turbo3", "q8_0/q8_0", "Q4_0", "Q4_K", "Q6_K"})
"""The part that `--quick` takes: head size, types of caches and of matrices that most people have."""

_MIXED = ("f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2")
_N_KV_HEADS, _N_PREFIX = 2, 4
_ENCODE_LIMIT = 3e-3  # a value on a boundary may take either code: of 2 bits, three in half a million are 2.4e-3
_DECODE_LIMIT = 1e-6
_ATTENTION_LIMITS = {mx.float32: 2e-3, mx.float16: 2e-3, mx.bfloat16: 8e-3}  # the output's own rounding is in it


@dataclass(frozen=True)
class Shape:
    """A step of attention. window: keys that a query sees, None for all."""

    name: str
    offset: int
    n_rows: int
    group: int
    window: int | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.float16


SHAPES = (
    Shape("one row", 300, 1, 4),
    Shape("five rows over a page's edge", 381, 5, 4),
    Shape("in a window, with sinks", 420, 2, 3, window=150, sinks=True, dtype=mx.bfloat16),
    Shape("within the first page", 60, 1, 4, dtype=mx.float32),
    Shape("a long step", 256, 200, 2),
)
_MANY_COLUMNS = Shape("eight rows", 300, 8, 4)
"""Fills more tiles of query columns than other steps, where heads are small."""
_LONG_STEP = Shape("a long step in parts", 8192 + 256, 300, 2, sinks=True)
"""Keys before it make whole pieces and a rest (`long_steps.PIECE`), and its own pages several runs."""
_COMPILED = Shape("a compiled step", 300, 1, 4, window=299)
_BATCH = tuple(Shape("a batch", offset, 2, 4) for offset in (20, 128, 484, 300))


@dataclass(frozen=True)
class Outcome:
    """One comparison. error: relative, by norms; problem: what was raised instead, if anything."""

    operation: str
    types: str
    head_dim: int
    detail: str
    limit: float
    error: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and self.error <= self.limit


@dataclass(frozen=True)
class Case:
    """One comparison to be made: what is compared, the largest error that passes, and how."""

    operation: str
    types: str
    head_dim: int
    detail: str
    limit: float
    compare: Callable[[], float]

    def run(self) -> Outcome:
        """Compare; what is raised is an outcome too: a kernel that the device refuses is what this looks for."""
        try:
            error, problem = self.compare(), None
        except Exception as raised:
            error, problem = float("nan"), f"{type(raised).__name__}: {raised}"
        return Outcome(self.operation, self.types, self.head_dim, self.detail, self.limit, error, problem)


def all_cases(backend: Backend, head_dims: tuple[int, ...] = HEAD_DIMS, all_pairs: bool = False) -> list[Case]:
    """Everything that a backend is compared in."""
    pairs = [p for p in itertools.product(_MIXED, _MIXED) if p != ("f16", "f16")] if all_pairs else PAIRS
    cases: list[Case] = []
    for head_dim in head_dims:
        cases += codec_cases(backend, head_dim)
        for type_k, type_v in pairs:
            cases += attention_cases(backend, head_dim, type_k, type_v)
            cases += batch_cases(backend, head_dim, type_k, type_v)
            cases += compiled_cases(backend, head_dim, type_k, type_v)
        cases += attention_cases(backend, head_dim, *PAIRS[0], shapes=(_MANY_COLUMNS,))
        if takes_parts(backend):
            cases += attention_cases(backend, head_dim, *PAIRS[0], shapes=(_LONG_STEP,))
    return cases


def takes_parts(backend: Backend) -> bool:
    """Whether long steps take their keys in parts, which hangs on what MLX's attention gives (`attention.partial`)."""
    return isinstance(backend, KernelBackend) and backend.long_steps.partial is not None


def codec_cases(backend: Backend, head_dim: int) -> Iterator[Case]:
    """Encoding and decoding of every block type that the head size allows."""
    for cache_type in CACHE_TYPE_NAMES:
        codec = _codec(cache_type, head_dim, "k")
        if codec is None or codec.is_float:
            continue
        yield Case(
            "encode", cache_type, head_dim, "balanced, with a prefix", _ENCODE_LIMIT, _encode(backend, codec, True)
        )
        for tiled in _forms(backend, codec):
            form = "in tiles" if tiled else "row by row"
            yield Case("encode", cache_type, head_dim, form, _ENCODE_LIMIT, _encode(backend, codec, False, tiled))
            yield Case("decode", cache_type, head_dim, form, _DECODE_LIMIT, _decode(backend, codec, tiled))


def attention_cases(
    backend: Backend, head_dim: int, type_k: str, type_v: str, shapes: tuple[Shape, ...] = SHAPES
) -> Iterator[Case]:
    """Steps of attention over K and V of these types; none where the head size does not allow them."""
    k, v = _codec(type_k, head_dim, "k"), _codec(type_v, head_dim, "v")
    if k is None or v is None:
        return
    for shape in shapes:
        limit = _ATTENTION_LIMITS[shape.dtype]
        compare = _attention(backend, k, v, shape)
        yield Case("attention", f"{type_k}/{type_v}", head_dim, shape.name, limit, compare)


def batch_cases(backend: Backend, head_dim: int, type_k: str, type_v: str) -> Iterator[Case]:
    """A step of several sequences at once; none where a backend answers them one by one."""
    k, v = _codec(type_k, head_dim, "k"), _codec(type_v, head_dim, "v")
    if k is not None and v is not None and backend.answers_batches(k, v, _BATCH[0].n_rows):
        limit = _ATTENTION_LIMITS[_BATCH[0].dtype]
        yield Case("attention", f"{type_k}/{type_v}", head_dim, "a batch", limit, _batch(backend, k, v))


def compiled_cases(backend: Backend, head_dim: int, type_k: str, type_v: str) -> Iterator[Case]:
    """A step of one row that is compiled for whole pages; none where a backend does not compile steps."""
    k, v = _codec(type_k, head_dim, "k"), _codec(type_v, head_dim, "v")
    if k is not None and v is not None and backend.compiles(k, v):
        compare, limit = _compiled(backend, k, v), _ATTENTION_LIMITS[_COMPILED.dtype]
        yield Case("attention", f"{type_k}/{type_v}", head_dim, _COMPILED.name, limit, compare)


def _forms(backend: Backend, codec: Codec) -> tuple[bool, ...]:
    """Whether codes are held in tiles: never, or, for V, by backends that want it."""
    return (False, True) if backend.tiles_values(codec) else (False,)


def _codec(cache_type: str, head_dim: int, side: Side) -> Codec | None:
    try:
        return resolve_codec(cache_type, head_dim, side)
    except RequestError:
        return None


def relative_distance(found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """Norm of the difference by the norm of what was expected; infinite where something is not finite."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    distance = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return distance if np.isfinite(distance) else float("inf")


@lru_cache(maxsize=8)
def _rows(n_tokens: int, head_dim: int, seed: int) -> NDArray[np.float16]:
    """[_N_KV_HEADS, n_tokens, head_dim]: normal, with a channel of large constant as real keys have, and a zero row."""
    rows = np.random.default_rng(seed).standard_normal((_N_KV_HEADS, n_tokens, head_dim)).astype(np.float16)
    rows[:, :, 3] += 4
    rows[:, 17] = 0
    return rows


def _scale(head_dim: int) -> mx.array:
    return mx.array(np.random.default_rng(3).uniform(0.5, 2, (_N_KV_HEADS, head_dim)).astype(np.float32))


def _encode(backend: Backend, codec: Codec, balanced: bool, tiled: bool = False) -> Callable[[], float]:
    def compare() -> float:
        given = _rows(2 * PAGE, codec.head_dim, 1)
        if balanced:  # a row far outside, which the mean leaves out
            given = given.copy()
            given[:, 40] *= 50
        rows, scale = mx.array(given), _scale(codec.head_dim) if balanced else None
        sides = []
        for by in (backend, NumpyBackend()):
            in_tiles = tiled and by is backend
            codes, scales, means = by.encode_pages(
                codec, rows, n_skipped=_N_PREFIX if balanced else 0, centred=balanced, scale=scale, tiled=in_tiles
            )
            codes = to_rows(codec, codes) if in_tiles else codes
            values = codec.decode_planes(np.asarray(codes), np.asarray(scales))
            sides.append(np.concatenate([values.ravel(), [] if means is None else np.asarray(means).ravel()]))
        return relative_distance(*sides)

    return compare


def _decode(backend: Backend, codec: Codec, tiled: bool) -> Callable[[], float]:
    def compare() -> float:
        side = _block_side(codec, 3 * PAGE, 2, balanced=False)
        found = backend.arithmetic.decode(_tiled(side) if tiled else side, 1, 3)
        return relative_distance(np.asarray(found), NumpyBackend().arithmetic.decode(side, 1, 3))

    return compare


def _block_side(codec: Codec, n_tokens: int, seed: int, balanced: bool, offset: int | None = None) -> SideView:
    """A side of made-up rows as a cache would hold it after a step that began at `offset`."""
    rows = mx.array(_rows(n_tokens, codec.head_dim, seed))
    if codec.is_float:
        return SideView(codec, rows=mx.contiguous(rows.swapaxes(0, 1)).swapaxes(0, 1))
    whole = n_tokens // PAGE * PAGE
    scale = _scale(codec.head_dim) if balanced else None
    codes = scales = means = None
    if whole:
        codes, scales, means = NumpyBackend().encode_pages(
            codec, rows[:, :whole], n_skipped=_N_PREFIX, centred=balanced, scale=scale
        )
    start = whole if offset is None else offset // PAGE * PAGE
    return SideView(
        codec,
        codes,
        scales,
        rows=rows[:, start:],
        rows_start=start,
        prefix=rows[:, :_N_PREFIX],
        page_means=means,
        channel_scale=scale,
    )


def _tiled(side: SideView) -> SideView:
    codes = None if side.codes is None else to_tiles(side.codec, side.codes)
    return replace(side, codes=codes, tiled=True)


def _attention(backend: Backend, k: Codec, v: Codec, shape: Shape) -> Callable[[], float]:
    def compare() -> float:
        n_tokens = shape.offset + shape.n_rows
        sides = (
            _block_side(k, n_tokens, 4, balanced=k.block_type.family == "turbo", offset=shape.offset),
            _block_side(v, n_tokens, 5, balanced=False, offset=shape.offset),
        )
        rng = np.random.default_rng(6)
        n_heads = _N_KV_HEADS * shape.group
        q = mx.array(rng.standard_normal((1, n_heads, shape.n_rows, k.head_dim)).astype(np.float32)).astype(shape.dtype)
        sinks = rng.standard_normal(n_heads).astype(np.float32) if shape.sinks else None
        scale = k.head_dim**-0.5
        held = sides[0], _tiled(sides[1]) if not v.is_float and backend.tiles_values(v) else sides[1]
        query = Query(scale, shape.window, None if sinks is None else mx.array(sinks))
        out = backend.attend(q, *held, offset=shape.offset, query=query)
        expected = _reference(np.asarray(q[0].astype(mx.float32)), *sides, shape, scale, sinks)
        return relative_distance(np.asarray(out[0].astype(mx.float32)), expected)

    return compare


def _batch(backend: Backend, k: Codec, v: Codec) -> Callable[[], float]:
    def compare() -> float:
        sides, rows, alone = [], [], []
        for shape in _BATCH:
            n_tokens = shape.offset + shape.n_rows
            views = (
                _block_side(k, n_tokens, 4, balanced=k.block_type.family == "turbo", offset=shape.offset),
                _block_side(v, n_tokens, 5, balanced=False, offset=shape.offset),
            )
            held = views[0], _tiled(views[1]) if backend.tiles_values(v) else views[1]
            sides.append((_before(held[0], shape), _before(held[1], shape)))
            rows.append([view.rows[None, :, -shape.n_rows :] for view in views])
            alone.append(views)
        q = np.random.default_rng(7).standard_normal((len(_BATCH), 4 * _N_KV_HEADS, _BATCH[0].n_rows, k.head_dim))
        queries = mx.array(q.astype(np.float32)).astype(_BATCH[0].dtype)
        new_k, new_v = (mx.concatenate([pair[side] for pair in rows]) for side in (0, 1))
        pool = PagePool(sides, [shape.offset for shape in _BATCH], None, backend)
        growth, scale = pool.grow((new_k, new_v), [shape.n_rows for shape in _BATCH]), k.head_dim**-0.5
        out, _ = backend.append_and_attend(queries, pool.pages, growth, Query(scale))
        expected = [
            _reference(np.asarray(queries[i].astype(mx.float32)), *views, _BATCH[i], scale, None)
            for i, views in enumerate(alone)
        ]
        return relative_distance(np.asarray(out.astype(mx.float32)), np.stack(expected))

    return compare


def _compiled(backend: Backend, k: Codec, v: Codec) -> Callable[[], float]:
    def compare() -> float:
        offset, scale = _COMPILED.offset, k.head_dim**-0.5
        n_held, query = offset % PAGE, Query(scale, _COMPILED.window)
        sides = (
            _block_side(k, offset + 1, 4, balanced=k.block_type.family == "turbo"),
            _block_side(v, offset + 1, 5, balanced=False),
        )
        pages = Pages(sides[0], _tiled(sides[1]) if backend.tiles_values(v) else sides[1])
        q = np.random.default_rng(8).standard_normal((1, _COMPILED.group * _N_KV_HEADS, 1, k.head_dim))

        def step(q: mx.array, tails: list[mx.array], new: list[mx.array], position: mx.array) -> mx.array:
            growth = Growth((tails[0], tails[1]), (new[0], new[1]), (), (1,), position)
            return backend.append_and_attend(q, pages, growth, query)[0]

        queries = mx.array(q.astype(np.float32)).astype(_COMPILED.dtype)
        held = (side.rows[None, :, -n_held - 1 : -1] for side in sides)
        tails = [mx.pad(rows, [(0, 0), (0, 0), (0, PAGE - n_held), (0, 0)]) for rows in held]
        position = mx.arange(offset, offset + 8, dtype=mx.int32)
        out = backend.compiled(step)(queries, tails, [side.rows[None, :, -1:] for side in sides], position)
        expected = _reference(np.asarray(queries[0].astype(mx.float32)), *sides, _COMPILED, scale, None)
        return relative_distance(np.asarray(out[0].astype(mx.float32)), expected)

    return compare


def _before(view: SideView, shape: Shape) -> BlockSide:
    """A side as it is before a step's rows."""
    n_tail = view.rows.shape[1] - shape.n_rows
    codes, scales, means = (
        Plane() if of is None else Plane(of, len(of)) for of in (view.codes, view.scales, view.page_means)
    )
    side = BlockSide(view.codec, _N_PREFIX, NumpyBackend(), 0, codes, scales, view.prefix, tiled=view.tiled)
    side.tail = view.rows[:, :n_tail] if n_tail else None
    if view.channel_scale is not None:
        side.means, side.scale = means, ChannelScale(NOT_ROTATED, view.channel_scale)
    return side


def _reference(
    q: NDArray[np.float32],
    k: SideView,
    v: SideView,
    shape: Shape,
    scale: float,
    sinks: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """Float64 attention, row by row: the pages before a row's own as blocks, its own in f16."""
    keys, values = (_both_forms(side, seed, shape) for side, seed in ((k, 4), (v, 5)))
    out = np.empty((*q.shape[:2], v.codec.head_dim))
    for row in range(shape.n_rows):
        position = shape.offset + row
        own = position // PAGE * PAGE
        first = 0 if shape.window is None else max(0, position - shape.window + 1)
        seen_k, seen_v = (
            np.concatenate([coded[:, :own], plain[:, own : position + 1]], axis=1)[:, first:]
            for coded, plain in (keys, values)
        )
        for head in range(len(q)):
            of = head // shape.group
            scores = seen_k[of] @ q[head, row].astype(np.float64) * scale
            top = max(scores.max(), -np.inf if sinks is None else sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[head, row] = weights @ seen_v[of] / total
    return out


def _both_forms(side: SideView, seed: int, shape: Shape) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every row as what its page decodes to (the exact prefix in f16), and in f16: [_N_KV_HEADS, tokens, head_dim]."""
    plain = _rows(shape.offset + shape.n_rows, side.codec.head_dim, seed).astype(np.float64)
    if side.codec.is_float or side.codes is None or side.scales is None:
        return plain, plain
    pages = side.codec.unrotate(side.codec.decode_planes(np.asarray(side.codes), np.asarray(side.scales)))
    coded = pages.swapaxes(0, 1).astype(np.float64)
    if side.channel_scale is not None:
        coded = coded / np.asarray(side.channel_scale)[:, None, None]
    if side.page_means is not None:
        coded = coded + np.asarray(side.page_means).astype(np.float64).swapaxes(0, 1)[:, :, None]
    coded = coded.reshape(len(coded), -1, side.codec.head_dim)
    coded[:, :_N_PREFIX] = plain[:, :_N_PREFIX]
    return coded, plain

"""Decode attention of a few rows straight from blocks: two kernels, shares of the keys and their merge."""

from __future__ import annotations

import mlx.core as mx

from tqgguf.runtime.kernels.geometry import COLUMNS_OF_A_TILE, FAMILIES, TILE_KEYS, decode_geometry, n_coded_splits
from tqgguf.runtime.kernels.launch import Kernel, Launcher, Threads, sizes_of
from tqgguf.runtime.kernels.types import KERNEL_TYPES, book, given, group_of, nothing, rotation_size, signs
from tqgguf.runtime.kv_sides import PAGE, SideView, prefix_length

_SIZES = (
    *("group_size", "n_rows", "offset", "n_coded", "own_start", "n_prefix", "window", "first_page", "k_page", "v_page"),
    # of own rows, then of the exact prefix: elements from token to token, from head to head, before the first
    *(f"{side}_{what}{where}" for side in "kv" for what in ("token", "head", "start") for where in ("", "_of_prefix")),
)
ATTENTION = Kernel(
    "decode_attention",
    ("codes.metal", "vectors.metal", "attention_parts.metal"),
    (
        *("q", "k_codes", "k_scales", "v_codes", "v_scales", "page_means", "channel_scale", "k_rows", "v_rows"),
        *("k_prefix", "v_prefix", "k_book", "v_book", "k_signs", "factors", "sizes"),
    ),
    ("sums", "statistics"),
    _SIZES,
)
MERGE = Kernel(
    "merge_partials",
    ("codes.metal", "vectors.metal"),
    ("sums", "statistics", "v_signs", "sinks", "sizes"),
    ("out",),
    _SIZES,
)


class _Float:
    """Where a side's f16 rows of the own page or of the exact prefix lie."""

    def __init__(self, array: mx.array, token: int, head: int, start: int) -> None:
        self.array, self.token, self.head, self.start = array, token, head, start


def attend_blocks(
    launcher: Launcher,
    q: mx.array,
    k: SideView,
    v: SideView,
    *,
    offset: int,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of rows that share one page: q [n_heads, rows, head_dim] at positions from `offset` on.

    The pages before theirs are read as blocks (f16 where a side is f16), their own page in f16. Both sides are of types
    that `types.is_supported`, one of them at least a block type. window, sinks: as `attention.attend` has them.
    Returns [n_heads, rows, head_dim of v] in q's dtype.
    """
    n_heads, n_rows, _ = q.shape
    n_kv_heads = k.rows.shape[0]
    own_start = offset // PAGE * PAGE
    first_page = _first_page(k, v, offset, window)
    n_prefix = prefix_length(k, v) if own_start else 0
    family = FAMILIES[launcher.family]
    n_columns = n_heads // n_kv_heads * n_rows
    geometry = decode_geometry(family, k.codec, v.codec, n_columns)
    walk, columns = geometry.walk, COLUMNS_OF_A_TILE * geometry.column_tiles
    n_chunks = -(-n_columns // columns)
    n_steps = max(0, own_start // PAGE - first_page) * (PAGE // (TILE_KEYS * walk.key_tiles))
    n_coded = n_coded_splits(family, n_steps, n_kv_heads, n_chunks, walk)
    own = [_own_rows(side, own_start) for side in (k, v)]
    prefix = [_prefix_rows(side, n_prefix) for side in (k, v)]
    places = {
        f"{side}_{what}{where}": getattr(rows, what)
        for side, pair in zip("kv", zip(own, prefix, strict=True), strict=True)
        for where, rows in zip(("", "_of_prefix"), pair, strict=True)
        for what in ("token", "head", "start")
    }
    sizes = sizes_of(
        ATTENTION,
        group_size=n_heads // n_kv_heads,
        n_rows=n_rows,
        offset=offset,
        n_coded=n_coded,
        own_start=own_start,
        n_prefix=n_prefix,
        window=window or 0,
        first_page=first_page,
        k_page=k.first_page,
        v_page=v.first_page,
        **places,
    )
    template = {
        "K_TYPE": KERNEL_TYPES[k.codec.cache_type],
        "K_DIM": k.codec.head_dim,
        "K_GROUP": group_of(k.codec),
        "K_ROTATION": rotation_size(k.codec),
        "V_TYPE": KERNEL_TYPES[v.codec.cache_type],
        "V_DIM": v.codec.head_dim,
        "V_GROUP": group_of(v.codec),
        "TILES": geometry.column_tiles,
        "KEY_TILES": walk.key_tiles,
        "K_COPIES": geometry.k_copies,
        "V_COPIES": geometry.v_copies,
        "ONE_TABLE": geometry.one_table,
        "CENTRED": k.page_means is not None,
        "SCALED": k.channel_scale is not None,
    }
    shape = (n_kv_heads, n_chunks, n_coded + 1, columns)
    inputs = {
        "q": q,
        **dict(zip(("k_codes", "k_scales"), _planes(k), strict=True)),
        **dict(zip(("v_codes", "v_scales"), _planes(v), strict=True)),
        "page_means": given(k.page_means, mx.float16),
        "channel_scale": given(k.channel_scale, mx.float32),
        **{f"{side}_rows": rows.array for side, rows in zip("kv", own, strict=True)},
        **{f"{side}_prefix": rows.array for side, rows in zip("kv", prefix, strict=True)},
        **{f"{side}_book": book(view.codec) for side, view in (("k", k), ("v", v))},
        "k_signs": signs(k.codec),
        "factors": _factors(scale),
        "sizes": sizes,
    }
    sums, statistics = launcher.launch(
        ATTENTION,
        inputs,
        template,
        Threads((n_coded + 1, n_kv_heads, n_chunks), walk.simdgroups, walk.resident),
        [((*shape, v.codec.head_dim), mx.float32), ((*shape, 2), mx.float32)],
    )
    (out,) = launcher.launch(
        MERGE,
        {
            "sums": sums,
            "statistics": statistics,
            "v_signs": signs(v.codec),
            "sinks": nothing(mx.float32) if sinks is None else _padded(sinks.astype(mx.float32)),
            "sizes": sizes,
        },
        {
            "T": q.dtype,
            "V_DIM": v.codec.head_dim,
            "V_ROTATION": rotation_size(v.codec),
            "TILES": geometry.column_tiles,
            "SINKS": sinks is not None,
        },
        Threads((n_heads * n_rows, 1, 1), family.merge_simdgroups),
        [((n_heads, n_rows, v.codec.head_dim), q.dtype)],
    )
    return out


def _first_page(k: SideView, v: SideView, offset: int, window: int | None) -> int:
    """The first page that some row sees."""
    held = max(k.first_page, v.first_page)
    return held if window is None else max(held, max(0, offset - window + 1) // PAGE)


def _planes(side: SideView) -> tuple[mx.array, mx.array]:
    """Codes and scales of whole pages; a float side's rows, token by token as they are held."""
    if side.codec.is_float:
        return side.rows.swapaxes(0, 1), nothing(mx.float16)
    return given(side.codes, mx.uint8), given(side.scales, mx.float16)


def _own_rows(side: SideView, own_start: int) -> _Float:
    n_kv_heads, n_rows, head_dim = side.rows.shape
    first = own_start - side.rows_start
    if side.codec.is_float:
        return _Float(side.rows.swapaxes(0, 1), n_kv_heads * head_dim, head_dim, first * n_kv_heads * head_dim)
    return _Float(side.rows, head_dim, n_rows * head_dim, first * head_dim)


def _prefix_rows(side: SideView, n_prefix: int) -> _Float:
    if not n_prefix:
        return _Float(nothing(mx.float16), 0, 0, 0)
    if side.prefix is None:
        rows = _own_rows(side, 0)
        return _Float(rows.array, rows.token, rows.head, 0)
    _, n_rows, head_dim = side.prefix.shape
    return _Float(side.prefix, head_dim, n_rows * head_dim, 0)


_kept_factors: dict[float, mx.array] = {}


def _factors(scale: float) -> mx.array:
    if scale not in _kept_factors:
        _kept_factors[scale] = mx.full((8,), scale, dtype=mx.float32)
    return _kept_factors[scale]


def _padded(array: mx.array) -> mx.array:
    """At least eight elements: see `types`."""
    missing = 8 - array.shape[0]
    return array if missing <= 0 else mx.concatenate([array, mx.zeros((missing,), dtype=array.dtype)])

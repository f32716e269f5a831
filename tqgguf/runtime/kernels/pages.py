"""Whole pages to blocks and back: the kernels that encode what fills up, and that decode ranges for long steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kernels.geometry import FAMILIES
from tqgguf.runtime.kernels.launch import (
    Call,
    Kernel,
    Launcher,
    Template,
    Threads,
    position_array,
    sizes_array,
    sizes_of,
)
from tqgguf.runtime.kernels.types import KERNEL_TYPES, book, boundaries, given, group_of, nothing, rotation_size, signs
from tqgguf.runtime.kv.pages import PAGE, Pair, SideView

ENCODE = Kernel(
    "encode_pages",
    ("codes.metal", "halves.metal", "vectors.metal", "page_mean.metal"),
    ("rows", "channel_scale", "book", "boundaries", "signs", "sizes"),
    ("codes", "scales", "means"),
    ("n_skipped",),
)
DECODE = Kernel(
    "decode_pages",
    ("codes.metal", "halves.metal", "page_rows.metal"),
    ("codes", "scales", "page_means", "channel_scale", "prefix", "own", "book", "signs", "sizes", "position"),
    ("out",),
    ("first_head", "n_heads", "start", "n_coded", "codes_page", "n_prefix", "own_first", "n_own", "n_zeros"),
)
JOIN = Kernel(
    "join_rows",
    ("halves.metal",),
    ("k_tail", "k_new", "v_tail", "v_new", "sizes", "position"),
    ("k", "v"),
    ("k_dim", "v_dim", "capacity", "n_new", "n_heads"),
)
_ROWS_OF_A_SIMDGROUP = 32  # that decoding gives to each, where there are many
_SIMDGROUPS_OF_A_ROW = 4  # that copy it


def encode_pages(
    launcher: Launcher,
    codec: Codec,
    rows: mx.array,
    *,
    n_skipped: int = 0,
    centred: bool = False,
    channel_scale: mx.array | None = None,
    tiled: bool = False,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Rows f16 or f32 [n_kv_heads, pages * PAGE, head_dim] to planes of blocks.

    centred: each page's mean (`balance.page_mean`) is taken out first. channel_scale: f32 [n_kv_heads, head_dim],
    multiplied into what is left. The first n_skipped rows become zero blocks and are left out of the mean. tiled: codes
    as `tiles` has them.
    The codec is a block type that `types.is_supported`. Returns codes uint8 and scales f16 [pages, n_kv_heads, PAGE,
    ...], and means f16 [pages, n_kv_heads, head_dim] or None.
    """
    n_heads, n_tokens, head_dim = rows.shape
    n_pages = n_tokens // PAGE
    flags = (("CENTRED", centred), ("SCALED", channel_scale is not None), ("TILED", tiled))
    codes, scales, means = launcher.launch(
        ENCODE,
        {
            "rows": rows,
            "channel_scale": given(channel_scale, mx.float32),
            "book": book(codec),
            "boundaries": boundaries(codec),
            "signs": signs(codec),
            "sizes": sizes_of(ENCODE, n_skipped=n_skipped),
        },
        (("T", rows.dtype), *_side_template(codec), *flags),
        Threads((n_pages, n_heads, 1), FAMILIES[launcher.family].encode_simdgroups),
        [
            ((n_pages, n_heads, PAGE, codec.n_blocks * codec.code_bytes), mx.uint8),
            ((n_pages, n_heads, PAGE, codec.n_blocks * codec.n_scales), mx.float16),
            ((n_pages, n_heads, head_dim) if centred else (8,), mx.float16),
        ],
    )
    return codes, scales, means if centred else None


@lru_cache(maxsize=64)
def _side_template(codec: Codec) -> Template:
    return (
        ("TYPE", KERNEL_TYPES[codec.cache_type]),
        ("DIM", codec.head_dim),
        ("GROUP", group_of(codec)),
        ("ROTATION", rotation_size(codec)),
    )


@lru_cache(maxsize=64)
def _decode_template(
    codec: Codec, dtype: mx.Dtype, unrotated: bool, centred: bool, scaled: bool, tiled: bool, tokens_first: bool
) -> Template:
    of_rows = (("UNROTATED", unrotated), ("CENTRED", centred), ("SCALED", scaled))
    return (("T", dtype), *_side_template(codec), *of_rows, ("TILED", tiled), ("TOKENS_FIRST", tokens_first))


def decode_rows(
    launcher: Launcher,
    side: SideView,
    start: int,
    coded_end: int,
    *,
    own: tuple[int, int] | None = None,
    dtype: mx.Dtype,
    heads: tuple[int, int] | None = None,
    unrotated: bool = True,
    tokens_first: bool = False,
    n_zeros: int = 0,
) -> mx.array:
    """What a block side's pages at positions start .. coded_end - 1 decode to, and after them the f16 rows of `own`.

    own: first and last position of rows that the side holds in f16. heads: the KV heads first .. last - 1 only.
    unrotated: in original axes with the exact prefix from its own rows; else what blocks decode to, as they have it.
    n_zeros: zero rows after all others. Returns dtype [heads, tokens, head_dim], or [tokens, heads, head_dim].
    """
    n_heads = side.codes.shape[1] if side.codes is not None else side.rows.shape[0]
    first_head, last_head = heads or (0, n_heads)
    n_own, own_first, n_held = 0, 0, 0
    if own is not None:
        n_own, own_first, n_held = own[1] - own[0], own[0] - side.rows_start, side.rows.shape[1]
    in_rows = own_first, 0 if n_held == n_own else n_held, n_zeros
    n_tokens = coded_end - start + n_own + n_zeros
    prepared = _prepare_decode(
        launcher, side, start, coded_end, in_rows, (first_head, last_head), dtype, unrotated, n_tokens, tokens_first
    )
    shape = last_head - first_head, n_tokens
    return prepared.decode(
        side.rows if n_own else nothing(mx.float16),
        n_own,
        (*(shape[::-1] if tokens_first else shape), side.codec.head_dim),
    )


def decode_all(launcher: Launcher, side: SideView, coded_end: int, dtype: mx.Dtype) -> mx.array:
    """`decode_rows` of everything that a side holds: its pages before position coded_end, then its rows.

    It is asked for at every step and hardly ever evaluated, so that what the steps of a page share is kept. Returns
    dtype [1, n_kv_heads, tokens, head_dim].
    """
    n_heads, n_own, head_dim = side.rows.shape
    start = side.first_page * PAGE
    prepared = side.kept.get((coded_end, dtype))
    if prepared is None:
        in_rows, n_tokens = (coded_end - side.rows_start, 0, 0), coded_end - start + max(n_own, PAGE)
        prepared = _prepare_decode(launcher, side, start, coded_end, in_rows, (0, n_heads), dtype, True, n_tokens)
        side.kept[coded_end, dtype] = prepared
    return prepared.decode(side.rows, n_own, (1, n_heads, coded_end - start + n_own, head_dim))


@dataclass(frozen=True)
class _Prepared:
    """A launch of DECODE without the own rows and the shape of its output."""

    call: Call
    inputs: list[mx.array]

    def decode(self, own: mx.array, n_own: int, shape: tuple[int, ...]) -> mx.array:
        inputs = self.inputs.copy()
        inputs[_OWN], inputs[_POSITION] = own, position_array(n_own)
        return self.call(inputs, [shape])[0]


_OWN, _POSITION = (DECODE.inputs.index(name) for name in ("own", "position"))


def _prepare_decode(
    launcher: Launcher,
    side: SideView,
    start: int,
    coded_end: int,
    in_rows: tuple[int, int, int],
    heads: tuple[int, int],
    dtype: mx.Dtype,
    unrotated: bool,
    n_tokens: int,
    tokens_first: bool = False,
) -> _Prepared:
    """in_rows: as the kernel's own_first, n_own and n_zeros. n_tokens: that the grid is made for, in all."""
    codec = side.codec
    n_heads = side.codes.shape[1] if side.codes is not None else side.rows.shape[0]
    simdgroups = FAMILIES[launcher.family].decode_simdgroups
    prefix, means, scale = (side.prefix, side.page_means, side.channel_scale) if unrotated else (None, None, None)
    n_prefix = 0 if prefix is None else prefix.shape[1]
    inputs = {
        "codes": given(side.codes, mx.uint8),
        "scales": given(side.scales, mx.float16),
        "page_means": given(means, mx.float16),
        "channel_scale": given(scale, mx.float32),
        "prefix": given(prefix, mx.float16),
        "book": book(codec),
        "signs": signs(codec),
        "sizes": sizes_array(heads[0], n_heads, start, coded_end - start, side.first_page, n_prefix, *in_rows),
    }
    call = launcher.prepare(
        DECODE,
        _decode_template(codec, dtype, unrotated, means is not None, scale is not None, side.tiled, tokens_first),
        Threads((-(-n_tokens // (_ROWS_OF_A_SIMDGROUP * simdgroups)), heads[1] - heads[0], 1), simdgroups),
        [((8,), dtype)],
    )
    gap = nothing(mx.float16)
    return _Prepared(call, [inputs.get(name, gap) for name in DECODE.inputs])


def join_rows(launcher: Launcher, rows: tuple[mx.array | None, mx.array | None], new: Pair) -> Pair:
    """K's and V's f16 rows [n_kv_heads, tokens, head_dim], or none, with new ones [1, ...] of float types after them.

    Both sides hold equally many tokens.
    """
    k, v = given(rows[0], mx.float16), given(rows[1], mx.float16)
    n_held = 0 if rows[0] is None else rows[0].shape[1]
    _, n_heads, n_new, k_dim = new[0].shape
    n_rows, v_dim = n_held + n_new, new[1].shape[3]
    call, sizes = _prepare_join(launcher, n_heads, n_rows), join_sizes(k_dim, v_dim)
    inputs = (k, new[0], v, new[1], sizes, position_array(n_held))
    joined_k, joined_v = call(inputs, [(n_heads, n_rows, k_dim), (n_heads, n_rows, v_dim)])
    return joined_k, joined_v


def join_sizes(k_dim: int, v_dim: int, capacity: int = 0, n_new: int = 0, n_heads: int = 0) -> mx.array:
    """The sizes that joining goes by. capacity, n_new: for tails of fixed length only; n_heads: for batches only."""
    return sizes_of(JOIN, k_dim=k_dim, v_dim=v_dim, capacity=capacity, n_new=n_new, n_heads=n_heads)


def join_tails_with(launcher: Launcher, tails: Pair, new: Pair, position: mx.array, sizes: mx.array) -> Pair:
    """Tails f16 [sequences, n_kv_heads, PAGE, head_dim] of K and V with new rows [sequences, n_kv_heads, rows,
    head_dim] where they stand in their page.

    position: int32 [8] that begins with the only sequence's offset; with `join_sizes` of a batch, the offset of each
    sequence and how many of the rows are its own: the others go nowhere.
    """
    n_sequences, n_heads = new[0].shape[:2]
    call = _prepare_join(launcher, n_sequences * n_heads, PAGE)
    k, v = call((tails[0], new[0], tails[1], new[1], sizes, position), [tail.shape for tail in tails])
    return k, v


@lru_cache(maxsize=16)
def _prepare_join(launcher: Launcher, n_heads: int, n_rows: int) -> Call:
    """What the layers of a step share."""
    threads = Threads((n_rows, n_heads, 2), _SIMDGROUPS_OF_A_ROW)
    return launcher.prepare(JOIN, (), threads, [((8,), mx.float16), ((8,), mx.float16)])

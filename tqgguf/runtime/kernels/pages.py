"""Whole pages to blocks and back: the kernels that encode what fills up, and that decode ranges for long steps."""

from __future__ import annotations

import mlx.core as mx

from tqgguf.formats.codec import Codec
from tqgguf.runtime.kernels.geometry import FAMILIES
from tqgguf.runtime.kernels.launch import Kernel, Launcher, Threads, sizes_of
from tqgguf.runtime.kernels.types import KERNEL_TYPES, book, boundaries, given, group_of, rotation_size, signs
from tqgguf.runtime.kv_sides import PAGE, SideView

ENCODE = Kernel(
    "encode_pages",
    ("codes.metal", "vectors.metal"),
    ("rows", "channel_scale", "book", "boundaries", "signs", "sizes"),
    ("codes", "scales", "means"),
    ("n_skipped",),
)
DECODE = Kernel(
    "decode_pages",
    ("codes.metal", "vectors.metal"),
    ("codes", "scales", "page_means", "channel_scale", "prefix", "own", "book", "signs", "sizes"),
    ("out",),
    ("first_head", "n_heads", "start", "n_tokens", "n_coded", "codes_page", "n_prefix", "own_first", "n_own"),
)
JOIN = Kernel("join_rows", (), ("tail", "fresh", "sizes"), ("out",), ("n_held", "n_new", "dim"))
_ROWS_OF_A_SIMDGROUP = 8  # that decoding gives to each, where there are many
_SIMDGROUPS_OF_A_ROW = 4  # that copy it


def encode_pages(
    launcher: Launcher,
    codec: Codec,
    rows: mx.array,
    *,
    n_skipped: int = 0,
    centred: bool = False,
    channel_scale: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Rows f16 or f32 [n_kv_heads, pages * PAGE, head_dim] to planes of blocks.

    centred: each page's mean is taken out first. channel_scale: f32 [n_kv_heads, head_dim], multiplied into what is
    left. The first n_skipped rows become zero blocks and are left out of the mean. The codec is a block type that
    `types.is_supported`. Returns codes uint8 and scales f16 [pages, n_kv_heads, PAGE, ...], and means f16 [pages,
    n_kv_heads, head_dim] or None.
    """
    n_heads, n_tokens, head_dim = rows.shape
    n_pages = n_tokens // PAGE
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
        {
            "T": rows.dtype,
            "TYPE": KERNEL_TYPES[codec.cache_type],
            "DIM": head_dim,
            "GROUP": group_of(codec),
            "ROTATION": rotation_size(codec),
            "CENTRED": centred,
            "SCALED": channel_scale is not None,
        },
        Threads((n_pages, n_heads, 1), FAMILIES[launcher.family].encode_simdgroups),
        [
            ((n_pages, n_heads, PAGE, codec.n_blocks * codec.code_bytes), mx.uint8),
            ((n_pages, n_heads, PAGE, codec.n_blocks * codec.n_scales), mx.float16),
            ((n_pages, n_heads, head_dim) if centred else (8,), mx.float16),
        ],
    )
    return codes, scales, means if centred else None


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
) -> mx.array:
    """What a block side's pages at positions start .. coded_end - 1 decode to, and after them the f16 rows of `own`.

    own: first and last position of rows that the side holds in f16. heads: the KV heads first .. last - 1 only.
    unrotated: in original axes with the exact prefix from its own rows; else what blocks decode to, as they have it.
    Returns dtype [heads, tokens, head_dim].
    """
    codec = side.codec
    n_heads = side.codes.shape[1] if side.codes is not None else side.rows.shape[0]
    first_head, last_head = heads or (0, n_heads)
    family = FAMILIES[launcher.family]
    prefix = side.prefix if unrotated else None
    means, scale = (side.page_means, side.channel_scale) if unrotated else (None, None)
    n_coded, n_own = coded_end - start, own[1] - own[0] if own else 0
    sizes = sizes_of(
        DECODE,
        first_head=first_head,
        n_heads=n_heads,
        start=start,
        n_tokens=n_coded + n_own,
        n_coded=n_coded,
        codes_page=side.pages_start,
        n_prefix=0 if prefix is None else prefix.shape[1],
        own_first=own[0] - side.rows_start if own else 0,
        n_own=side.rows.shape[1] if own else 0,
    )
    (out,) = launcher.launch(
        DECODE,
        {
            "codes": given(side.codes, mx.uint8),
            "scales": given(side.scales, mx.float16),
            "page_means": given(means, mx.float16),
            "channel_scale": given(scale, mx.float32),
            "prefix": given(prefix, mx.float16),
            "own": given(side.rows if own else None, mx.float16),
            "book": book(codec),
            "signs": signs(codec),
            "sizes": sizes,
        },
        {
            "T": dtype,
            "TYPE": KERNEL_TYPES[codec.cache_type],
            "DIM": codec.head_dim,
            "GROUP": group_of(codec),
            "ROTATION": rotation_size(codec),
            "UNROTATED": unrotated,
            "CENTRED": means is not None,
            "SCALED": scale is not None,
        },
        Threads(
            (-(-(n_coded + n_own) // (_ROWS_OF_A_SIMDGROUP * family.decode_simdgroups)), last_head - first_head, 1),
            family.decode_simdgroups,
        ),
        [((last_head - first_head, n_coded + n_own, codec.head_dim), dtype)],
    )
    return out


def join_rows(launcher: Launcher, tail: mx.array | None, new: mx.array) -> mx.array:
    """f16 rows [n_kv_heads, tokens, head_dim], or none, and new ones [1, ...] of any float type after them: f16."""
    _, n_heads, n_new, head_dim = new.shape
    n_held = 0 if tail is None else tail.shape[1]
    (out,) = launcher.launch(
        JOIN,
        {
            "tail": given(tail, mx.float16),
            "fresh": new,
            "sizes": sizes_of(JOIN, n_held=n_held, n_new=n_new, dim=head_dim),
        },
        {},
        Threads((n_held + n_new, n_heads, 1), _SIMDGROUPS_OF_A_ROW),
        [((n_heads, n_held + n_new, head_dim), mx.float16)],
    )
    return out

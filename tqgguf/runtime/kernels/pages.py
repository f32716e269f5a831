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
    ("first_head", "n_heads", "start", "n_tokens", "coded_end", "codes_page", "n_prefix", "own_start", "n_own"),
)
_ROWS_OF_A_SIMDGROUP = 8  # that decoding gives to each, where there are many


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
    end: int,
    *,
    coded_end: int,
    dtype: mx.Dtype,
    heads: tuple[int, int] | None = None,
    unrotated: bool = True,
) -> mx.array:
    """A block side's rows at positions start .. end - 1: decoded up to coded_end (a page's edge), own f16 rows from
    there.

    heads: the KV heads first .. last - 1 only. unrotated: in original axes with the exact prefix from its own rows;
    else what blocks decode to, as they have it. Returns dtype [heads, end - start, head_dim].
    """
    codec = side.codec
    n_heads = side.codes.shape[1] if side.codes is not None else side.rows.shape[0]
    first_head, last_head = heads or (0, n_heads)
    family = FAMILIES[launcher.family]
    n_prefix = side.prefix.shape[1] if unrotated and side.prefix is not None else 0
    centred, scaled = unrotated and side.page_means is not None, unrotated and side.channel_scale is not None
    rows_of_group = _ROWS_OF_A_SIMDGROUP * family.decode_simdgroups
    (out,) = launcher.launch(
        DECODE,
        {
            "codes": given(side.codes, mx.uint8),
            "scales": given(side.scales, mx.float16),
            "page_means": given(side.page_means if centred else None, mx.float16),
            "channel_scale": given(side.channel_scale if scaled else None, mx.float32),
            "prefix": given(side.prefix if n_prefix else None, mx.float16),
            "own": given(side.rows if end > coded_end else None, mx.float16),
            "book": book(codec),
            "signs": signs(codec),
            "sizes": sizes_of(
                DECODE,
                first_head=first_head,
                n_heads=n_heads,
                start=start,
                n_tokens=end - start,
                coded_end=coded_end,
                codes_page=side.pages_start,
                n_prefix=n_prefix,
                own_start=side.rows_start,
                n_own=side.rows.shape[1] if side.rows.ndim == 3 else 0,
            ),
        },
        {
            "T": dtype,
            "TYPE": KERNEL_TYPES[codec.cache_type],
            "DIM": codec.head_dim,
            "GROUP": group_of(codec),
            "ROTATION": rotation_size(codec),
            "UNROTATED": unrotated,
            "CENTRED": centred,
            "SCALED": scaled,
        },
        Threads((-(-(end - start) // rows_of_group), last_head - first_head, 1), family.decode_simdgroups),
        [((last_head - first_head, end - start, codec.head_dim), dtype)],
    )
    return out

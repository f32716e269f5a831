"""How whole pages of rows become blocks: what a side asks for, and what every backend can do by encoding rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kv.balance import balance_rows, page_scale_numpy
from tqgguf.runtime.kv.pages import PAGE


class PageEncoder:
    """The part of a backend that makes blocks."""

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Rows f16 or f32 [n_kv_heads, tokens, head_dim] to codes uint8 and scales f16, [n_kv_heads, tokens, ...]."""
        raise NotImplementedError

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        """EncodeError where a page's f16 rows hold a value that is not finite; GPUs do not look."""

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        """The mean f16 [n_kv_heads, head_dim] of rows f16 [n_kv_heads, tokens, head_dim] from n_skipped on."""
        raise NotImplementedError

    def page_scale(
        self, page: mx.array, mean: mx.array, query_squares: mx.array | None, n_skipped: int, layout: RopeLayout
    ) -> mx.array:
        """The channel scale f32 [n_kv_heads, head_dim]: see `balance.page_scale_numpy`."""
        return page_scale_numpy(page, mean, query_squares, n_skipped, layout)

    def tiles_values(self, codec: Codec) -> bool:
        """Whether caches hold V's codes in the order of `kv.tiles` for this backend."""
        return False

    def encode_pages(
        self,
        codec: Codec,
        rows: mx.array,
        *,
        n_skipped: int,
        centred: bool,
        scale: mx.array | None,
        tiled: bool = False,
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Rows f16 [n_kv_heads, pages * PAGE, head_dim] as whole pages: codes and scales [pages, n_kv_heads, PAGE,
        ...].

        centred: the mean of each page is taken out, and returned f16 [pages, n_kv_heads, head_dim], else None; scale:
        f32 [n_kv_heads, head_dim], multiplied into what is left. The first n_skipped rows become zero blocks.
        tiled: only where `tiles_values`.
        """
        starts = range(0, rows.shape[1], PAGE)
        pages = [
            self._encode_page(codec, rows[:, at : at + PAGE], 0 if at else n_skipped, centred, scale) for at in starts
        ]
        codes, scales, means = ([page[i] for page in pages] for i in range(3))
        if len(pages) == 1:
            return codes[0][None], scales[0][None], means[0][None] if centred else None
        return mx.stack(codes), mx.stack(scales), mx.stack(means) if centred else None

    def _encode_page(
        self, codec: Codec, rows: mx.array, n_skipped: int, centred: bool, scale: mx.array | None
    ) -> tuple[mx.array, mx.array, Any]:
        mean = None
        if centred:
            mean = self.page_mean(rows, n_skipped)
            rows = balance_rows(rows, mean, scale)
        if n_skipped:
            rows = mx.concatenate([mx.zeros_like(rows[:, :n_skipped]), rows[:, n_skipped:]], axis=1)
        return *self.encode(codec, rows), mean

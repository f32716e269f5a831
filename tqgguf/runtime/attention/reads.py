"""What attention has read, counted: for reports, and so that nothing is read by another way unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kv.pages import PAGE


@dataclass
class Reads:
    """Keys and values that attention has read, summed over query rows and layers, by the way they were read."""

    keys_from_blocks: int = 0
    keys_in_float: int = 0
    values_from_blocks: int = 0
    values_in_float: int = 0

    def count(self, n: int, k_blocks: bool, v_blocks: bool) -> None:
        """Add n keys and the n values that belong to them."""
        self.keys_from_blocks += n * k_blocks
        self.keys_in_float += n * (not k_blocks)
        self.values_from_blocks += n * v_blocks
        self.values_in_float += n * (not v_blocks)

    def count_page(
        self, lo: int, hi: int, k: Codec, v: Codec, window: int | None, n_prefix: int, own_from_blocks: bool = False
    ) -> None:
        """Count what queries at positions lo .. hi - 1, all in one page, have read; as `attend` does."""
        coded_end = 0 if k.is_float and v.is_float else hi if own_from_blocks else lo // PAGE * PAGE
        prefix = n_prefix if coded_end else 0
        seen = in_float = 0
        if not own_from_blocks and (window is None or hi <= window):  # every row sees from position 0 on
            seen = (lo + 1 + hi) * (hi - lo) // 2
            in_float = seen - (coded_end - prefix) * (hi - lo)
        else:
            for row in range(lo, hi):
                first = 0 if window is None else max(0, row - window + 1)
                seen += row + 1 - first
                in_float += max(0, row + 1 - max(first, coded_end)) + max(0, min(prefix, row + 1) - first)
        self.count(in_float, False, False)
        self.count(seen - in_float, not k.is_float, not v.is_float)


@dataclass
class Usage:
    """What attention read, for all layers of one prompt cache.

    unattended: layers from whose last step nobody has attended (yet). observer: called with every step that is attended
    from, its queries [1, n_heads, rows, head_dim] and their scale.
    """

    strict: bool = False
    reads: Reads = field(default_factory=Reads)
    by_fallback: int = 0
    unattended: set[int] = field(default_factory=set)
    observer: Callable[[Any, mx.array, float], None] | None = None


def n_reads(offset: int, n_rows: int, window: int | None) -> int:
    """Keys that queries at positions from `offset` on see, in all."""
    end = offset + n_rows
    if window is None:
        return (offset + 1 + end) * n_rows // 2
    return sum(min(n, window) for n in range(offset + 1, end + 1))

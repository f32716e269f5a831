"""How one side (K or V) of one layer is stored, and what a step of attention may read of it.

`BlockSide` keeps whole pages as planes of codes and scales, the unfilled page as an f16 tail, and the first tokens (the
exact prefix) in f16. `FloatSide` keeps every row in its own float type. Both answer with a `SideView`, whose readings
are by absolute token position. Knows nothing of queries, masks or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from tqgguf.formats.block_types import PAGE_TOKENS
from tqgguf.formats.codec import Codec
from tqgguf.formats.errors import FormatError
from tqgguf.runtime import block_ops

PAGE = PAGE_TOKENS
ROW_STEP = 32  # rows that float planes grow by at least
GROWTH = 32  # planes grow by 1/32 of their size (at least one page), so that spare capacity stays within 3 %

FLOAT_DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


@dataclass(frozen=True)
class SideView:
    """What attention reads of one side after an update. Rows are [n_kv_heads, tokens, head_dim].

    rows/rows_start: rows in their float type from that position to the end (own page, or everything for float types).
    codes/scales/pages_start: planes [pages, n_kv_heads, PAGE, ...] of whole pages, from that page on; None for floats.
    prefix: f16 rows of the exact prefix, held apart from the blocks of page 0.
    page_means: f16 [pages, n_kv_heads, head_dim] subtracted from each page before encoding, or None.
    channel_scale: f32 [n_kv_heads, head_dim] multiplied into K before encoding (undone on the query), or None.
    """

    codec: Codec
    rows: mx.array
    rows_start: int
    codes: mx.array | None = None
    scales: mx.array | None = None
    pages_start: int = 0
    prefix: mx.array | None = None
    page_means: mx.array | None = None
    channel_scale: mx.array | None = None

    @property
    def first_page(self) -> int:
        """The first page held."""
        return self.rows_start // PAGE if self.codec.is_float else self.pages_start


def prefix_length(k: SideView, v: SideView) -> int:
    """Tokens of the exact prefix that a side holds apart from its blocks; 0 where neither does."""
    return next((side.prefix.shape[1] for side in (k, v) if side.prefix is not None), 0)


def cuts(start: int, end: int, step: int = PAGE) -> list[int]:
    """The range start .. end cut at absolute multiples of `step`, both ends included."""
    return [start, *range((start // step + 1) * step, end, step), end]


@dataclass
class _Plane:
    """A growing array whose first axis counts pages (or rows): spare capacity at the end, slices written in place."""

    array: mx.array | None = None
    length: int = 0
    step: int = 1

    def append(self, new: mx.array) -> None:
        end = self.length + new.shape[0]
        capacity = 0 if self.array is None else self.array.shape[0]
        if end > capacity:
            extra = max(-(-(end - capacity) // self.step) * self.step, capacity // GROWTH)
            spare = mx.zeros((extra, *new.shape[1:]), dtype=new.dtype)
            self.array = spare if self.array is None else mx.concatenate([self.array, spare])
        assert self.array is not None
        self.array[self.length : end] = new
        self.length = end

    def read(self) -> mx.array | None:
        return None if self.array is None else self.array[: self.length]

    def truncate(self, length: int) -> None:
        self.length = length

    def drop_front(self, count: int) -> None:
        if count and self.array is not None:
            self.array = self.array[count : self.length]
            self.length -= count

    @property
    def nbytes(self) -> int:
        return 0 if self.array is None else self.array.nbytes


@dataclass
class BlockSide:
    """Whole pages as blocks, the last unfilled page and the exact prefix in f16.

    encode(rows f16 [n_kv_heads, PAGE, head_dim]) -> (codes, scales) is the backend's page encoder.
    """

    codec: Codec
    n_prefix: int
    encode: block_ops.PageEncoder
    first_page: int = 0
    codes: _Plane = field(default_factory=_Plane)
    scales: _Plane = field(default_factory=_Plane)
    prefix: mx.array | None = None
    tail: mx.array | None = None

    @property
    def end_page(self) -> int:
        """The page that the tail belongs to."""
        return self.first_page + self.codes.length

    def append(self, new: mx.array) -> SideView:
        """Add rows [n_kv_heads, tokens, head_dim]; pages that become full are encoded. Returns what this step reads."""
        new = block_ops.to_f16(new)
        start = self.end_page * PAGE
        rows = new if self.tail is None else mx.concatenate([self.tail, new], axis=1)
        held = rows.shape[1]
        if start == 0 and (0 if self.prefix is None else self.prefix.shape[1]) < self.n_prefix:
            self.prefix = mx.contiguous(rows[:, : self.n_prefix])  # a copy: a slice would keep all rows alive
        n_full = held // PAGE
        for page in range(n_full):
            self._append_page(rows[:, page * PAGE : (page + 1) * PAGE])
        rest = held - n_full * PAGE
        self.tail = rows[:, n_full * PAGE :] if rest else None
        return SideView(
            codec=self.codec,
            rows=rows,
            rows_start=start,
            codes=self.codes.read(),
            scales=self.scales.read(),
            pages_start=self.first_page,
            prefix=self.prefix,
        )

    def _append_page(self, rows: mx.array) -> None:
        if self.end_page == 0 and self.n_prefix:
            zeros = mx.zeros((rows.shape[0], self.n_prefix, rows.shape[2]), dtype=rows.dtype)
            rows = mx.concatenate([zeros, rows[:, self.n_prefix :]], axis=1)
        codes, scales = self.encode(self.codec, rows)
        self.codes.append(codes[None])
        self.scales.append(scales[None])

    def release(self, first_page: int) -> None:
        """Free the pages before `first_page`, and with page 0 the exact prefix."""
        count = min(first_page - self.first_page, self.codes.length)
        if count > 0:
            self.codes.drop_front(count)
            self.scales.drop_front(count)
            self.first_page += count
            self.prefix = None

    def truncate(self, length: int) -> None:
        """Keep the tokens before `length`. A cut inside an encoded page turns its decoded values into the tail."""
        page, rest = divmod(length, PAGE)
        if page >= self.end_page:
            self.tail = self.tail[:, :rest] if self.tail is not None and rest else None
        else:
            slot = page - self.first_page
            tail = None
            if rest:
                tail = block_ops.decode_pages(self.codec, *self._page(slot)).astype(mx.float16)[:, :rest]
                if page == 0 and self.prefix is not None:
                    tail = mx.concatenate([self.prefix, tail[:, self.prefix.shape[1] :]], axis=1)[:, :rest]
            self.codes.truncate(slot)
            self.scales.truncate(slot)
            self.tail = tail
        if self.first_page == 0 and length < self.n_prefix:
            self.prefix = self.prefix[:, :length] if self.prefix is not None and length else None

    def _page(self, slot: int) -> tuple[mx.array, mx.array]:
        assert self.codes.array is not None and self.scales.array is not None
        return self.codes.array[slot : slot + 1], self.scales.array[slot : slot + 1]

    @property
    def nbytes(self) -> int:
        floats = sum(a.nbytes for a in (self.prefix, self.tail) if a is not None)
        return self.codes.nbytes + self.scales.nbytes + floats

    def arrays(self) -> tuple[mx.array | None, ...]:
        """What `restore` needs, without spare capacity."""
        return self.codes.read(), self.scales.read(), self.prefix, self.tail

    def restore(self, first_page: int, offset: int, saved: Sequence[Any]) -> None:
        """Take over what `arrays` gave of `offset` tokens. FormatError for anything else, before anything changes."""
        codec = self.codec
        codes, scales, prefix, tail = _as_saved(saved, 4)
        n_heads = next((a.shape[axis] for a, axis in ((codes, 1), (tail, 0), (prefix, 0)) if a is not None), 0)
        pages = offset // PAGE - first_page
        n_prefix = min(self.n_prefix, offset) if first_page == 0 else 0
        _expect("codes", codes, (pages, n_heads, PAGE, codec.n_blocks * codec.code_bytes), mx.uint8)
        _expect("scales", scales, (pages, n_heads, PAGE, codec.n_blocks * codec.n_scales), mx.float16)
        _expect("the exact prefix", prefix, (n_heads, n_prefix, codec.head_dim), mx.float16)
        _expect("the tail", tail, (n_heads, offset % PAGE, codec.head_dim), mx.float16)
        self.first_page = first_page
        self.codes, self.scales = _Plane(codes, pages), _Plane(scales, pages)
        self.prefix, self.tail = prefix, tail

    def copy(self) -> BlockSide:
        """The same contents; what is appended to the copy does not show in the original."""
        return replace(self, codes=replace(self.codes), scales=replace(self.scales))

    @property
    def n_heads(self) -> int | None:
        """KV heads, None while there are no rows."""
        rows = self.tail if self.tail is not None else self.prefix
        if rows is not None:
            return rows.shape[0]
        return None if self.codes.array is None else self.codes.array.shape[1]


@dataclass
class FloatSide:
    """Every row in its own float type; not paged, but freed in whole pages like blocks."""

    codec: Codec
    first_page: int = 0
    plane: _Plane = field(default_factory=lambda: _Plane(step=ROW_STEP))

    def append(self, new: mx.array) -> SideView:
        """Add rows [n_kv_heads, tokens, head_dim]. Returns what this step reads."""
        dtype = FLOAT_DTYPES[self.codec.cache_type]
        new = block_ops.to_f16(new) if dtype == mx.float16 else new.astype(dtype)
        self.plane.append(new.swapaxes(0, 1))
        rows = self.plane.read()
        assert rows is not None
        return SideView(self.codec, rows.swapaxes(0, 1), self.first_page * PAGE)

    def release(self, first_page: int) -> None:
        """Free the rows of the pages before `first_page`."""
        if first_page > self.first_page:
            self.plane.drop_front((first_page - self.first_page) * PAGE)
            self.first_page = first_page

    def truncate(self, length: int) -> None:
        """Keep the tokens before `length`."""
        self.plane.truncate(length - self.first_page * PAGE)

    @property
    def nbytes(self) -> int:
        return self.plane.nbytes

    def arrays(self) -> tuple[mx.array | None, ...]:
        return (self.plane.read(),)

    def restore(self, first_page: int, offset: int, saved: Sequence[Any]) -> None:
        """As `BlockSide.restore`."""
        (rows,) = _as_saved(saved, 1)
        n_heads = 0 if rows is None else rows.shape[1]
        n_rows = offset - first_page * PAGE
        _expect("rows", rows, (n_rows, n_heads, self.codec.head_dim), FLOAT_DTYPES[self.codec.cache_type])
        self.first_page = first_page
        self.plane = _Plane(rows, n_rows, ROW_STEP)

    def copy(self) -> FloatSide:
        """As `BlockSide.copy`."""
        return replace(self, plane=replace(self.plane))

    @property
    def n_heads(self) -> int | None:
        """KV heads, None while there are no rows."""
        return None if self.plane.array is None else self.plane.array.shape[1]


def _as_saved(saved: Any, count: int) -> Sequence[Any]:
    """`saved` as that many arrays of at least two axes, any of them None."""
    arrays = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(arrays) != count or any(a is not None and (not isinstance(a, mx.array) or a.ndim < 2) for a in arrays):
        found = ", ".join(str(a.shape) if isinstance(a, mx.array) else type(a).__name__ for a in arrays)
        raise FormatError(f"cache state: expected {count} arrays for each of K and V, found {found or 'none'}")
    return arrays


def _expect(name: str, array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """FormatError unless it is of that shape and type; None stands for no values."""
    if array is None and 0 in shape:
        return
    if array is None or array.shape != shape or array.dtype != dtype:
        found = "none" if array is None else f"{array.dtype} {array.shape}"
        raise FormatError(f"cache state: {name}: expected {dtype} {shape}, found {found}")

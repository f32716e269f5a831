"""How one side (K or V) of one layer is stored in a float type: every row, in one growing array.

Compiled steps read that array as whole pages of f16 rows, and have the rows after them in a tail, as block types have
theirs; such a tail's rows go into the array when somebody asks for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import FormatError
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.pages import PAGE, SidePages, SideView, padded
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.saved import as_saved, expect

ROW_STEP = 32  # rows that float planes grow by at least

FLOAT_DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


class RowWriter(Protocol):
    """The part of a backend that has rows as numpy, where they are kept by numpy; see `Backend`."""

    def float_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None: ...


@dataclass
class FloatSide:
    """Every row in its own float type; not paged, but freed in whole pages like blocks."""

    codec: Codec
    writer: RowWriter
    first_page: int = 0
    _plane: Plane = field(default_factory=lambda: Plane(step=ROW_STEP))
    _tail: mx.array | None = None
    """f16 [1, n_kv_heads, PAGE, head_dim]: the rows of the last page, of which the plane may lack some."""
    _n_tail: int = 0
    _pages: SidePages | None = None
    tiled = False

    @property
    def plane(self) -> Plane:
        """Every row, token by token: [tokens, n_kv_heads, head_dim]."""
        if self._tail is not None:
            tail, n_held = self._tail, self._plane.length % PAGE
            self._tail = None
            if self._n_tail > n_held:
                self._pages = None  # who holds a plane makes its next append a copy
                self._plane.append(tail[0, :, n_held : self._n_tail].swapaxes(0, 1))
        return self._plane

    @plane.setter
    def plane(self, plane: Plane) -> None:
        self._plane, self._tail, self._pages = plane, None, None

    def append(self, new: mx.array) -> SideView:
        """Add rows [1, n_kv_heads, tokens, head_dim]. Returns what this step reads."""
        plane, self._pages = self.plane, None
        written = self.writer.float_rows(self.codec.cache_type, new)
        if written is not None:
            plane.append_host(written[0].swapaxes(0, 1))
        else:
            dtype = FLOAT_DTYPES[self.codec.cache_type]
            new = block_ops.to_f16(new) if dtype == mx.float16 else block_ops.as_float(new, dtype)
            plane.append(new.squeeze(0).swapaxes(0, 1))
        rows, host = plane.read(), plane.host
        assert rows is not None
        host = None if host is None else host.swapaxes(0, 1)
        start = self.first_page * PAGE
        return SideView(self.codec, rows=rows.swapaxes(0, 1), rows_start=start, host=host)

    def release(self, first_page: int) -> None:
        """Free the rows of the pages before `first_page`."""
        if first_page > self.first_page:
            self.plane.drop_front((first_page - self.first_page) * PAGE)
            self.first_page, self._pages = first_page, None

    def truncate(self, length: int) -> None:
        """Keep the tokens before `length`."""
        self.plane.truncate(length - self.first_page * PAGE)
        self._pages = None

    @property
    def n_tail(self) -> int:
        """Rows after the last whole page."""
        return self._plane.length % PAGE if self._tail is None else self._n_tail

    @property
    def pages(self) -> SidePages:
        """The whole pages of an f16 side, for as long as there are no others; the tail's page is the next one."""
        if self._pages is None:
            end = self.first_page + self._plane.length // PAGE
            self._pages = SidePages(self.codec, self._plane.array, first_page=self.first_page, end_page=end)
        return self._pages

    def room(self) -> mx.array:
        """f16 [1, n_kv_heads, PAGE, head_dim]: the rows after the last whole page, and whatever lies after them."""
        if self._tail is None:
            rows = self._plane.read()
            assert rows is not None
            n_tail = self._plane.length % PAGE
            self.take(padded(rows[self._plane.length - n_tail :].swapaxes(0, 1), PAGE)[None], n_tail)
        assert self._tail is not None
        return self._tail

    def take(self, tail: mx.array, n_tail: int) -> None:
        """Another tail, in which so many rows are there: fewer than a page."""
        self._tail, self._n_tail = tail, n_tail

    @property
    def nbytes(self) -> int:
        return self._plane.nbytes + (0 if self._tail is None else self._tail.nbytes)

    def arrays(self) -> tuple[mx.array | None, ...]:
        return (self.plane.read(),)

    def restore(self, first_page: int, offset: int, saved: Sequence[Any], tiled: bool = False) -> None:
        """As `BlockSide.restore`."""
        if tiled:
            raise FormatError(f"cache state: expected rows of {self.codec.cache_type}, found tiles, which it has not")
        (rows,) = as_saved(saved, 1)
        n_heads = 0 if rows is None else rows.shape[1]
        n_rows = offset - first_page * PAGE
        expect("rows", rows, (n_rows, n_heads, self.codec.head_dim), FLOAT_DTYPES[self.codec.cache_type])
        self.first_page = first_page
        self.plane = Plane(rows, n_rows, ROW_STEP)

    def copy(self) -> FloatSide:
        """As `BlockSide.copy`."""
        return FloatSide(self.codec, self.writer, self.first_page, self.plane.copy())

    @property
    def n_heads(self) -> int | None:
        """KV heads, None while there are no rows."""
        return None if self._plane.array is None else self._plane.array.shape[1]

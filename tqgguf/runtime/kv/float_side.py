"""How one side (K or V) of one layer is stored in a float type: every row, in one growing array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import FormatError
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.pages import PAGE, SideView
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
    plane: Plane = field(default_factory=lambda: Plane(step=ROW_STEP))
    tiled = False

    def append(self, new: mx.array) -> SideView:
        """Add rows [1, n_kv_heads, tokens, head_dim]. Returns what this step reads."""
        written = self.writer.float_rows(self.codec.cache_type, new)
        if written is not None:
            self.plane.append_host(written[0].swapaxes(0, 1))
        else:
            new = block_ops.as_float(new, FLOAT_DTYPES[self.codec.cache_type]).squeeze(0)
            self.plane.append(new.swapaxes(0, 1))
        rows, host = self.plane.read(), self.plane.host
        assert rows is not None
        host = None if host is None else host.swapaxes(0, 1)
        start = self.first_page * PAGE
        return SideView(self.codec, rows=rows.swapaxes(0, 1), rows_start=start, host=host)

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
        return None if self.plane.array is None else self.plane.array.shape[1]

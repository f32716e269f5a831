"""Rows of a llama.cpp state file as a snapshot wants them: by position, by head, in canonical blocks.

Where the file has them so already, they are views of it; else they are made slice by slice while they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.llama.blocks import canonical_form, group_bytes, to_canonical
from tqgguf.formats.llama.profiles import TURBO_FORMS, BlockForm
from tqgguf.formats.llama.state import LayerRows
from tqgguf.formats.snapshots.snapshot import SLICE_BYTES, Rows


def file_rows(
    layer: LayerRows, order: NDArray[np.intp] | None, n_kv_heads: int, cache_type: str, form: BlockForm | None
) -> Rows:
    """The rows of a layer as uint8 [cells, n_kv_heads, row_bytes]. order: the cells that are wanted, None for all as
    they are. form: the layout of turbo blocks in the file, None for other types.
    """
    is_canonical = form is None or form == canonical_form(cache_type)
    if order is None and is_canonical and not layer.is_transposed:
        data = layer.data[0 : layer.data.shape[0]]
        return data.reshape(len(data), n_kv_heads, -1)
    return FileRows(layer, order, n_kv_heads, cache_type, None if is_canonical else form)


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows that are gathered, transposed or converted while they are read."""

    layer: LayerRows
    order: NDArray[np.intp] | None
    n_kv_heads: int
    cache_type: str
    form: BlockForm | None

    @property
    def n_cells(self) -> int:
        layer = self.layer
        return layer.data.shape[1] // layer.element_bytes if layer.is_transposed else layer.data.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        row_bytes = self.layer.row_bytes // self.n_kv_heads
        if self.form is not None:
            canonical = TURBO_FORMS[self.cache_type][0]
            row_bytes = row_bytes // group_bytes(self.form) * group_bytes(canonical)
        return self.n_cells if self.order is None else len(self.order), self.n_kv_heads, row_bytes

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = tokens.indices(self.shape[0])
        cells = slice(start, stop) if self.order is None else self.order[start:stop]
        rows = np.ascontiguousarray(self._cells(cells)).view(np.uint8).reshape(stop - start, self.n_kv_heads, -1)
        return rows if self.form is None else to_canonical(self.cache_type, self.form, rows)

    def _cells(self, cells: slice | NDArray[np.intp]) -> NDArray[np.uint8] | NDArray[np.void]:
        """uint8 [cells, row_bytes]; of transposed values elements [cells, channels]."""
        data = self.layer.data[0 : self.layer.data.shape[0]]
        if not self.layer.is_transposed:
            return data[cells]
        return data.view(f"V{self.layer.element_bytes}")[:, cells].T

    def check(self) -> None:
        """FormatError: blocks that the canonical layout cannot hold."""
        if self.form is not None:
            n, step = self.shape[0], max(1, SLICE_BYTES // max(1, self.layer.row_bytes))
            for start in range(0, n, step):
                self[start : min(start + step, n)]

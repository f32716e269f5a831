"""A snapshot's rows as a llama.cpp state file has them: cell by cell, in the layout of its blocks; or channel by
channel. Made slice by slice while they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.llama.blocks import from_canonical, group_bytes
from tqgguf.formats.llama.profiles import TURBO_FORMS, BlockForm
from tqgguf.formats.snapshots.snapshot import SLICE_BYTES, Rows


@dataclass(frozen=True, eq=False)
class CellRows:
    """Cell after cell, uint8 [n_cells, row_bytes]. indices: the row of each cell. form: the layout of turbo blocks in
    the file, None for other types.
    """

    rows: Rows
    indices: NDArray[np.intp]
    cache_type: str
    form: BlockForm | None

    @property
    def shape(self) -> tuple[int, ...]:
        _, n_heads, row_bytes = self.rows.shape
        if self.form is not None:
            row_bytes = row_bytes // TURBO_FORMS[self.cache_type][0].n_bytes * group_bytes(self.form)
        return len(self.indices), n_heads * row_bytes

    def __getitem__(self, cells: slice, /) -> NDArray[np.uint8]:
        wanted = self.indices[cells]
        breaks = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1), len(wanted)] if len(wanted) else [0]
        runs = [self.rows[int(wanted[a]) : int(wanted[b - 1]) + 1] for a, b in pairwise(breaks)]
        rows = runs[0] if len(runs) == 1 else np.concatenate(runs or [self.rows[0:0]])
        if self.form is not None:
            rows = from_canonical(self.cache_type, self.form, rows)
        return rows.reshape(len(wanted), -1)


@dataclass(frozen=True, eq=False)
class CellColumns:
    """The same rows channel by channel, uint8 [n_channels, n_cells * element_bytes]. One layer at a time is in memory:
    the one that is being written.
    """

    cells: CellRows
    element_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        n_cells, row_bytes = self.cells.shape
        return row_bytes // self.element_bytes, n_cells * self.element_bytes

    def __getitem__(self, channels: slice, /) -> NDArray[np.uint8]:
        _, stop, _ = channels.indices(self.shape[0])
        columns = self._columns[channels]
        if stop == self.shape[0]:
            self.__dict__.pop("_columns")  # written to the end: let go of it
        return columns

    @cached_property
    def _columns(self) -> NDArray[np.uint8]:
        n_cells, row_bytes = self.cells.shape
        element = f"V{self.element_bytes}"  # numpy copies elements whole, not byte by byte
        columns = np.empty((self.shape[0], n_cells), element)
        step = max(1, SLICE_BYTES // max(1, row_bytes))
        for start in range(0, n_cells, step):
            part = self.cells[start : start + step]
            columns[:, start : start + len(part)] = np.ascontiguousarray(part).view(element).T
        return columns.view(np.uint8)

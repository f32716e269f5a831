"""Records of a llama.cpp state file: tokens and the memories of its caches, as the file has them.

A record is read from a file (`llama.parse`, without copying rows) or made for one (`llama_exchange`), and written by
`llama.write`: bytes -> record -> bytes changes nothing. What rows mean is not known here: type ids are numbers whose
names depend on the fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.llama.format import Kind

NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)


class Table(Protocol):
    """uint8 [n, width] that is read in slices of its first axis; numpy arrays are some."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class LayerRows:
    """K or V of one layer. data: [n_cells, row_bytes], or where values are transposed, channel by channel,
    [n_channels, n_cells * element_bytes]. element_bytes: 0 unless transposed. offset: of its header in the file.
    """

    type_id: int
    data: Table
    element_bytes: int = 0
    offset: int = 0

    @property
    def is_transposed(self) -> bool:
        return self.element_bytes > 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell."""
        return self.data.shape[0] * self.element_bytes if self.element_bytes else self.data.shape[1]

    @property
    def n_bytes(self) -> int:
        return self.data.shape[0] * self.data.shape[1]


@dataclass(frozen=True, eq=False)
class Cells:
    """positions int32 [n] in the order of the file; n_sequences int32 [n], how many sequences each is part of;
    sequence_ids int32, theirs one after the other; extra int32 [n, fields], what stands between (see CELL_FIELDS).
    """

    positions: NDArray[np.int32]
    n_sequences: NDArray[np.int32]
    sequence_ids: NDArray[np.int32]
    extra: NDArray[np.int32]
    offset: int = 0

    @classmethod
    def of_sequence(cls, positions: NDArray[np.int32], sequence: int = 0) -> Cells:
        """Cells that are part of one sequence, without more fields."""
        n = len(positions)
        ones = np.ones(n, np.int32)
        return cls(positions, ones, np.full(n, sequence, np.int32), np.empty((n, 0), np.int32))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def uniform(self) -> int | None:
        """The number of sequences of every cell where it is the same, else None."""
        first = int(self.n_sequences[0]) if len(self) else 1
        return first if bool((self.n_sequences == first).all()) else None

    def offset_of(self, cell: int) -> int:
        """Where a cell begins in the file."""
        fields = 4 * (2 + self.extra.shape[1])
        return self.offset + cell * fields + 4 * int(self.n_sequences[:cell].sum())

    def of(self, sequence: int) -> NDArray[np.intp]:
        """The cells of a sequence, in the order of the file."""
        owners = np.repeat(np.arange(len(self)), self.n_sequences)
        return owners[self.sequence_ids == sequence]


@dataclass(frozen=True)
class Stream:
    """The cells of one stream. v_trans: values are transposed. v is empty where a file has K alone."""

    cells: Cells
    v_trans: int = 0
    k: tuple[LayerRows, ...] = ()
    v: tuple[LayerRows, ...] = ()
    offset: int = 0

    def rows(self) -> Iterator[LayerRows]:
        yield from self.k
        yield from self.v


@dataclass(frozen=True)
class Memory:
    """A cache: one stream where it is unified."""

    streams: tuple[Stream, ...]
    offset: int = 0

    @property
    def n_cells(self) -> int:
        return sum(len(stream.cells) for stream in self.streams)


@dataclass(frozen=True)
class LlamaState:
    """memories: one, or of models with sliding windows the base cache and the window cache. architecture: None in a
    sequence file. packed: the server's packed list of tokens as it stands in the file, None where the list is plain.
    trailing: bytes behind the last memory.
    """

    path: str
    kind: Kind
    version: int
    tokens: NDArray[np.int32]
    architecture: str | None
    memories: tuple[Memory, ...]
    packed: NDArray[np.uint8] | None = None
    trailing: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)

    @property
    def has_window_memory(self) -> bool:
        return len(self.memories) > 1

    @property
    def n_cells(self) -> int:
        """Cells of the base memory."""
        return self.memories[0].n_cells if self.memories else 0

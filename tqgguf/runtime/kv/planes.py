"""Arrays that grow at their end: what a side of a cache keeps its fields in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

GROWTH = 32  # planes grow by 1/32 of their size (at least one step), so that spare capacity stays within 3 %


@dataclass
class _Memory:
    """numpy's writable view of a plane's array. Copies of a plane share it: `filled` is where the first of them that
    appends may write without being seen by others."""

    view: NDArray[Any]
    filled: int


@dataclass
class Plane:
    """A growing array whose first axis counts pages (or rows): spare capacity at the end, slices written in place."""

    array: mx.array | None = None
    length: int = 0
    step: int = 1
    _held: mx.array | None = None
    """What `read` gave last: one lazy operation for many steps. Let go before a slice is written, which then copies
    nothing."""
    _memory: _Memory | None = None

    def append(self, new: mx.array) -> None:
        end = self.length + new.shape[0]
        capacity = 0 if self.array is None else self.array.shape[0]
        self._held = self._memory = None
        if end > capacity:
            spare = mx.zeros((self._extra(end, capacity), *new.shape[1:]), dtype=new.dtype)
            self.array = spare if self.array is None else mx.concatenate([self.array, spare])
        assert self.array is not None
        self.array = mx.array(self.array)  # an object of our own: the assignment below changes it for all who hold it
        self.array[self.length : end] = new
        self.length = end

    def put(self, index: int, new: mx.array) -> None:
        """One entry [1, ...] in the place of another, or after the last one."""
        if index == self.length:
            self.append(new)
            return
        assert self.array is not None and index < self.length
        self._held = self._memory = None
        self.array = mx.array(self.array)  # as in `append`
        self.array[index : index + 1] = new

    def append_host(self, new: NDArray[Any]) -> None:
        """`append` on a CPU, at once and without an operation of MLX, of which each costs as much as a token's row."""
        end = self.length + len(new)
        memory = self._memory
        if memory is None or memory.filled != self.length or end > len(memory.view):
            memory = self._memory = self._room(end, new)
        memory.view[self.length : end] = new
        memory.filled = self.length = end
        self._held = None

    def _room(self, end: int, new: NDArray[Any]) -> _Memory:
        """The rows that there are in an array of our own with room for `end`."""
        old, capacity = self.array, 0 if self.array is None else self.array.shape[0]
        extra = self._extra(end, capacity) if end > capacity else 0
        self.array = mx.zeros((capacity + extra, *new.shape[1:]), dtype=mx.array(new[:0]).dtype)
        memory = _Memory(np.asarray(self.array), self.length)
        if old is not None:
            memory.view[: self.length] = np.asarray(old[: self.length])
        return memory

    def _extra(self, end: int, capacity: int) -> int:
        return max(-(-(end - capacity) // self.step) * self.step, capacity // GROWTH)

    @property
    def host(self) -> NDArray[Any] | None:
        """`read` as numpy, where the last rows were appended by `append_host`."""
        return None if self._memory is None else self._memory.view[: self.length]

    def read(self) -> mx.array | None:
        if self._held is None and self.array is not None:
            self._held = self.array[: self.length]
        return self._held

    def copy(self) -> Plane:
        """The same contents; what is appended to the copy does not show in the original."""
        return Plane(self.array, self.length, self.step, self._held, self._memory)

    def truncate(self, length: int) -> None:
        self.length, self._held = length, None

    def drop_front(self, count: int) -> None:
        if count and self.array is not None:
            self._held = self._memory = None
            self.array = self.array[count : self.length]
            self.length -= count

    @property
    def nbytes(self) -> int:
        return 0 if self.array is None else self.array.nbytes

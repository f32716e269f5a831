"""Arrays that grow at their end: what a side of a cache keeps its fields in."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

GROWTH = 32  # planes grow by 1/32 of their size (at least one step), so that spare capacity stays within 3 %


@dataclass
class Plane:
    """A growing array whose first axis counts pages (or rows): spare capacity at the end, slices written in place."""

    array: mx.array | None = None
    length: int = 0
    step: int = 1
    _held: mx.array | None = None
    """What `read` gave last: one lazy operation for many steps. Let go before a slice is written, which then copies
    nothing."""

    def append(self, new: mx.array) -> None:
        end = self.length + new.shape[0]
        capacity = 0 if self.array is None else self.array.shape[0]
        if end > capacity:
            extra = max(-(-(end - capacity) // self.step) * self.step, capacity // GROWTH)
            spare = mx.zeros((extra, *new.shape[1:]), dtype=new.dtype)
            self.array = spare if self.array is None else mx.concatenate([self.array, spare])
        assert self.array is not None
        self._held = None
        self.array[self.length : end] = new
        self.length = end

    def read(self) -> mx.array | None:
        if self._held is None and self.array is not None:
            self._held = self.array[: self.length]
        return self._held

    def copy(self) -> Plane:
        """The same contents; what is appended to the copy does not show in the original."""
        return Plane(self.array, self.length, self.step, self._held)

    def truncate(self, length: int) -> None:
        self.length, self._held = length, None

    def drop_front(self, count: int) -> None:
        if count and self.array is not None:
            self._held = None
            self.array = self.array[count : self.length]
            self.length -= count

    @property
    def nbytes(self) -> int:
        return 0 if self.array is None else self.array.nbytes

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

"""Writes safetensors files, tensor by tensor in pieces: no second copy of the data is in memory. What a file will hold
is known beforehand (`write_safetensors`), or turns up while it is written (`SafetensorsStream`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tqgguf.formats.atomic import replacing
from tqgguf.formats.safetensors import DTYPE_BITS

_ALIGNMENT = 8  # of the data, by blanks behind the header


@dataclass(frozen=True)
class TensorToWrite:
    """dtype: as safetensors names it. pieces: gives the bytes when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | memoryview]]

    @property
    def n_bytes(self) -> int:
        n = DTYPE_BITS[self.dtype] // 8
        for size in self.shape:
            n *= size
        return n


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str],
    *,
    private: bool = False,
) -> None:
    """Write a file, or replace it; private and errors as `atomic.replacing`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        end = at + tensor.n_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path, private=private) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            n = sum(file.write(piece) for piece in tensor.pieces())
            assert n == tensor.n_bytes, f"{tensor.name}: {n} bytes for {tensor.n_bytes}"


class SafetensorsStream:
    """A file whose tensors are written as they come. Room for the header is kept at the beginning, and filled by
    `finish`; what it leaves is blank, as the format allows.

    room: bytes of the header, at least what the tensors' names, types and shapes will take.
    """

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file = file
        self._room = room + -room % _ALIGNMENT
        self._header: dict[str, object] = {}
        self._at = 0
        file.write(bytes(8 + self._room))

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Write a tensor; `data` is all of its bytes."""
        end = self._at + data.nbytes
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._at, end]}
        self._file.write(data)
        self._at = end

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return self._at

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header."""
        text = json.dumps({"__metadata__": dict(metadata), **self._header}, separators=(",", ":")).encode()
        assert len(text) <= self._room, f"a header of {len(text)} bytes in room for {self._room}"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))

"""Headers of safetensors files, checked; tensors as views of the mapped file.

A file is a little-endian u64 n, n bytes of JSON {name: {"dtype", "shape", "data_offsets": [start, end]}} (offsets in
bytes from the end of the JSON), and the data, of which every byte belongs to one tensor. Defects go to a `report`: it
raises in the reader and collects in a validator. What values mean is not known here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tqgguf.formats.cursor import Buffer, Report, raise_errors
from tqgguf.formats.errors import words_of
from tqgguf.formats.file_kind import MAX_SAFETENSORS_HEADER
from tqgguf.formats.gguf.types import MAX_SIZE
from tqgguf.formats.json_file import json_kind
from tqgguf.formats.mapped_file import map_file
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import shown

_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
MAX_DIMS: Final = 64  # numpy's limit; keeps a product of dimensions cheap

DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of a value, of every dtype that the safetensors library has."""


@dataclass(frozen=True)
class SafeTensor:
    """One tensor: `data` are its bytes, a view of the file; offset: where they begin there."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    offset: int


class SafetensorsFile(Mapping[str, SafeTensor]):
    """The tensors of a file by name. metadata: the texts that the header holds beside them. n_bytes: of the file."""

    def __init__(self, path: str, n_bytes: int, metadata: Mapping[str, str], tensors: Mapping[str, SafeTensor]) -> None:
        self.path, self.n_bytes, self.metadata = path, n_bytes, metadata
        self._tensors = tensors

    def __getitem__(self, name: str) -> SafeTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class _Entry:
    """What the header says of one tensor. start, end: its bytes, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open and check a file. Its mapping into memory stays until the last view of it is gone.

    DefectError (a FormatError): the file breaks its format. TqggufError: it cannot be opened.
    """
    name = os.fsdecode(path)
    return read_safetensors(map_file(name, "a safetensors file"), name)


def read_safetensors(buffer: Buffer, name: str) -> SafetensorsFile:
    """The same of a file that is mapped already. DefectError: it breaks its format."""
    return _Header(buffer, name, raise_errors).file()


def check_safetensors(buffer: Buffer, path: str, report: Report) -> SafetensorsFile | None:
    """Report all that is wrong with a file. The file as far as its header could be read; None where it could not."""
    try:
        return _Header(buffer, path, report).file()
    except DefectError as defect:
        report(defect)
        return None


class _Header:
    """Reads and checks a header: `entries` are those that could be read. What cannot be read past is raised."""

    def __init__(self, buffer: Buffer, path: str, report: Report) -> None:
        self.buffer, self.path, self.report = buffer, path, report
        length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
        left = len(buffer) - _LENGTH_BYTES
        most = min(left, MAX_SAFETENSORS_HEADER)
        if length > most:
            found = f"{len(buffer)} bytes" if left < 0 else f"{len(buffer)} bytes that begin with a length of {length}"
            expected = "a safetensors header" if length > left else f"a header of at most {most} bytes"
            message = f"expected {expected}, found {found}"
            raise self._error("safetensors-length", message, 0, f"at most {max(most, 0)} bytes", f"{length} bytes")
        self.text = buffer[_LENGTH_BYTES : _LENGTH_BYTES + length]
        self.data_start = _LENGTH_BYTES + length
        self.n_bytes = len(buffer) - self.data_start
        self._places: dict[bytes, int] | None = None
        self.metadata: Mapping[str, str] = {}
        self.entries = [entry for name, value in self._pairs() for entry in self._entry(name, value)]
        self._cover()

    def file(self) -> SafetensorsFile:
        data, start = memoryview(self.buffer)[self.data_start :], self.data_start
        tensors = {
            entry.name: SafeTensor(entry.dtype, entry.shape, data[entry.start : entry.end], start + entry.start)
            for entry in self.entries
        }
        return SafetensorsFile(self.path, len(self.buffer), self.metadata, tensors)

    def _error(
        self, code: str, message: str, at: int, expected: object = None, found: object = None, tensor: str | None = None
    ) -> DefectError:
        return DefectError(code, self.path, message, offset=at, tensor=tensor, expected=expected, found=found)

    def _pairs(self) -> list[tuple[str, Any]]:
        """Names and entries of the header in its order, without __metadata__, which goes where it belongs."""
        repeated: list[str] = []

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(items)
            if len(result) < len(items) and not repeated:
                seen: set[str] = set()
                for name, _ in items:
                    if name in seen:
                        repeated.append(name)
                        break
                    seen.add(name)
            return result

        try:
            header = json.loads(self.text.decode("utf-8"), object_pairs_hook=pairs)
        except UnicodeDecodeError as error:
            at = _LENGTH_BYTES + error.start
            raise self._error("safetensors-header", "expected a header in UTF-8, found other bytes", at) from error
        except json.JSONDecodeError as error:
            at = _LENGTH_BYTES + len(error.doc[: error.pos].encode())
            raise self._error(
                "safetensors-header", f"expected a header in JSON, found a mistake: {words_of(error)}", at
            ) from error
        except (ValueError, RecursionError) as error:
            message = f"expected a header in JSON, found a mistake: {words_of(error)}"
            raise self._error("safetensors-header", message, _LENGTH_BYTES) from error
        if not isinstance(header, dict):
            found = json_kind(header)
            message = f"expected an object as header, found {found}"
            raise self._error("safetensors-header", message, _LENGTH_BYTES, "an object", found)
        for name in repeated[:1]:
            message = f"the name {shown(name)} occurs twice"
            self.report(self._error("safetensors-header", message, self._place(name), tensor=name))
        metadata = header.pop(_METADATA, None) or {}  # mlx writes null
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            expected = "an object of texts"
            message = f"{_METADATA}: expected {expected}, found {shown(metadata)}"
            self.report(self._error("safetensors-entry", message, self._place(_METADATA), expected, shown(metadata)))
        else:
            self.metadata = metadata
        return list(header.items())

    def _place(self, name: str) -> int:
        """Where a name stands in the file; the header's beginning if it is written in an unusual way."""
        if self._places is None:
            keys = re.finditer(rb'"((?:[^"\\]++|\\.)*+)"\s*+:', self.text)
            self._places = {}
            for key in keys:
                self._places.setdefault(key[1], _LENGTH_BYTES + key.start())
        for is_ascii in (False, True):
            written = json.dumps(name, ensure_ascii=is_ascii)[1:-1].encode("utf-8", "surrogatepass")
            if written in self._places:
                return self._places[written]
        return _LENGTH_BYTES

    def _entry(self, name: str, value: Any) -> Iterator[_Entry]:
        """The entry, if it can be read."""
        fields = value if isinstance(value, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
        what = f"tensor {shown(name)}"
        if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
            expected = "dtype, shape and data_offsets"
            message = f"{what}: expected {expected}, found {shown(value)}"
            self.report(self._error("safetensors-entry", message, self._place(name), expected, shown(value), name))
            return
        start, end = offsets
        yield _Entry(name, dtype, shape, start, end)
        if not start <= end <= self.n_bytes:
            expected, found = f"data within {self.n_bytes} bytes", f"{start} to {end}"
            message = f"{what}: expected {expected}, found it at {found}"
            self.report(self._error("safetensors-end", message, self._place(name), expected, found, name))
            return
        if dtype not in DTYPE_BITS:
            expected = "a known dtype"
            message = f"{what}: expected {expected}, found {shown(dtype)}"
            self.report(self._error("safetensors-dtype", message, self._place(name), expected, shown(dtype), name))
            return
        bits = DTYPE_BITS[dtype]
        for n in shape:
            bits *= n
        if bits != 8 * (end - start):
            expected, found = f"{bits / 8:.15g} bytes" if bits % 8 else f"{bits // 8} bytes", f"{end - start}"
            message = f"{what}: {dtype} of shape {shown(list(shape))} needs {expected}, found {found}"
            self.report(self._error("safetensors-size", message, self._place(name), expected, found, name))

    def _cover(self) -> None:
        """Every byte belongs to one tensor."""
        inside = (entry for entry in self.entries if entry.start <= entry.end <= self.n_bytes)
        due = 0
        for entry in sorted(inside, key=lambda entry: (entry.start, entry.end)):
            what, at = f"tensor {shown(entry.name)}", self._place(entry.name) if entry.start != due else 0
            if entry.start < due:
                message = f"{what}: expected data from byte {due} on, found it at {entry.start}: two tensors overlap"
                self.report(self._error("safetensors-overlap", message, at, due, entry.start, entry.name))
            elif entry.start > due:
                message = f"{what}: expected data from byte {due} on, found it at {entry.start}: there is a gap"
                self.report(self._error("safetensors-gap", message, at, due, entry.start, entry.name))
            due = max(due, entry.end)
        if due < self.n_bytes:
            message = (
                f"expected {due} bytes of data, found {self.n_bytes}: the last {self.n_bytes - due} belong to no tensor"
            )
            at = self.data_start + due
            self.report(self._error("safetensors-gap", message, at, f"{due} bytes", f"{self.n_bytes} bytes"))


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of numbers >= 0, or None for anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n <= MAX_SIZE for n in value) else None

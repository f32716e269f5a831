"""Opens GGUF files, whole or split, and hands out their metadata and views of their tensors' bytes.

Files are memory-mapped and checked when they are opened; tensor data is not copied and not decoded: what the bytes of a
block mean is not known here. Which keys and tensors a model needs is not known here either.

Lifetime: arrays handed out (those in the metadata too) keep their file's mapping alive, so they stay valid after
`close()`; the mapping then goes with the last of them. A file must not be shortened while it is open: the system ends
a process that reads a mapped page that is no longer there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from tqgguf.formats.cursor import Buffer, Report, raise_errors
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.gguf import rules as gguf_rules
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.metadata import MetadataAccess
from tqgguf.formats.gguf.parse import ParsedGguf, parse
from tqgguf.formats.gguf.split import judge_set, shard_paths
from tqgguf.formats.gguf.types import GGML_TYPES, ggml_type_name
from tqgguf.formats.mapped_file import forget_pages, map_file, release
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import shown


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in numpy's order, slowest dimension first (ggml's ne reversed); () is a scalar.

    `offset` is in bytes from the beginning of the tensor's own file, `paths[shard]`. `n_bytes` is without padding, and
    None if the type is unknown: such a tensor's data can neither be bounded nor read.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_values: int
    n_bytes: int | None
    offset: int
    shard: int

    @property
    def type_name(self) -> str:
        return ggml_type_name(self.ggml_type)


class GGUFFile(MetadataAccess):
    """A GGUF model, merged from its shards if it is split. Made by `open_gguf`; a context manager.

    path: the file that was named, paths: all shards in order (one for a file that is not split).
    version, alignment (bytes), data_start (offset of the data section) and metadata are the first shard's. Metadata
    values are int, float, bool and str; arrays of numbers are read-only numpy arrays of the file's type that may be
    unaligned, arrays of strings are lists, and arrays of arrays lists of either. Bytes of strings that are not
    UTF-8 are kept as surrogates (`surrogateescape`); `text` and `texts` refuse them. cut: what is wrong with a file
    that ends before its tensors do and was opened nevertheless.
    """

    def __init__(
        self,
        path: str,
        paths: tuple[str, ...],
        buffers: list[Buffer],
        files: list[ParsedGguf],
        cut: DefectError | None = None,
    ) -> None:
        self.path, self.cut = path, cut
        self.parsed = tuple(files)
        self.paths = paths
        self.version = files[0].version
        self.alignment = gguf_rules.alignment(files[0])
        self.data_start = gguf_rules.data_start(files[0])
        self._entries = {entry.key: entry for entry in files[0].entries}
        self.metadata: Mapping[str, Any] = MappingProxyType({entry.key: entry.value for entry in files[0].entries})
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {info.name: info for shard, parsed in enumerate(files) for info in _tensor_infos(parsed, shard)}
        )
        self._entries_end = files[0].tensors[0].offset if files[0].tensors else files[0].end
        self._buffers: list[Buffer] | None = buffers

    def tensor(self, name: str) -> TensorInfo:
        """`tensors[name]`, but absence is a GgufError that names the file."""
        if name not in self.tensors:
            raise GgufError("tensor-missing", self.path, f"tensor {shown(name)} is missing")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [n_bytes], a read-only view of the file.

        Raises GgufError if there is no such tensor or its type is unknown, TqggufError if the file is closed.
        """
        info = self.tensor(name)
        if info.n_bytes is None:
            raise gguf_rules.unreadable_type(self.paths[info.shard], name, info.ggml_type, info.offset)
        if self._buffers is None:
            raise TqggufError(f"{self.path}: tensor {shown(name)} was asked for after the file was closed")
        if not info.n_bytes:
            return np.empty(0, np.uint8)
        if self.cut is not None and info.offset + info.n_bytes > len(self._buffers[info.shard]):
            raise self.cut
        return np.frombuffer(self._buffers[info.shard], np.uint8, info.n_bytes, info.offset)

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the file, without a copy; errors as `raw`.

        Plain types: their dtype (F32 F16 F64 I8 I16 I32 I64; BF16 as the uint16 of its bits) in `shape`.
        Block types: uint8 of shape[:-1] + (row_bytes,), so [rows, row_bytes] for a matrix; each row is whole blocks.
        """
        raw, info = self.raw(name), self.tensors[name]
        ggml_type = GGML_TYPES[info.ggml_type]
        if ggml_type.dtype is not None:
            return raw.view(ggml_type.dtype).reshape(info.shape)
        row_bytes = info.shape[-1] // ggml_type.block_size * ggml_type.block_bytes
        return raw.reshape(*info.shape[:-1], row_bytes)

    def bytes_of(self, shard: int) -> memoryview:
        """All bytes of one of `paths`, a read-only view. TqggufError if the file is closed."""
        if self._buffers is None:
            raise TqggufError(f"{self.path}: its bytes were asked for after the file was closed")
        return memoryview(self._buffers[shard])

    def raw_entries(self) -> dict[str, bytes]:
        """The (first) file's metadata entries as their bytes: key, type and value, in their order."""
        edges = [*(entry.offset for entry in self.entries), self._entries_end]
        data = self.bytes_of(0)
        return {
            entry.key: bytes(data[start:stop])
            for entry, (start, stop) in zip(self.entries, pairwise(edges), strict=True)
        }

    def forget(self, name: str, start: int, stop: int) -> None:
        """Let the system take back the memory of a range of a tensor's bytes, which are read anew if need be."""
        info = self.tensor(name)
        if self._buffers is not None:
            forget_pages(self._buffers[info.shard], info.offset + start, info.offset + stop)

    def close(self) -> None:
        """Lets go of the file, at once or with the last array handed out (see the module's docstring). Idempotent."""
        buffers, self._buffers = self._buffers or [], None
        for buffer in buffers:
            release(buffer)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path!r}: {len(self.metadata)} metadata entries, {len(self.tensors)} tensors>"


def open_gguf(path: str | os.PathLike[str], *, even_cut: bool = False) -> GGUFFile:
    """Opens and checks a GGUF file. Of a split model (`NAME-00001-of-0000N.gguf`), any shard opens all of them.

    even_cut: also one whose tensor data is not all there, for its header; `GGUFFile.cut` tells.

    Raises GgufError (a FormatError) for a damaged file or set, TqggufError for what is not there, not a regular file,
    or not readable.
    """
    name = os.fsdecode(path)
    buffers: list[Buffer] = [map_file(name, "a GGUF file")]
    cuts: list[DefectError] = []

    def judged(defect: DefectError) -> None:
        if even_cut and defect.code == "truncated-data":
            cuts.append(defect)
        else:
            raise_errors(defect)

    try:
        files = [_parse_sound(buffers[0], name, judged)]
        for defect in gguf_rules.judge_joined(files[0], buffers[0]):
            raise defect
        paths, index = shard_paths(files[0])
        if len(paths) > 1:
            mapped, parsed = buffers.pop(), files.pop()
            for i, shard in enumerate(paths):
                buffers.append(mapped if i == index else map_file(shard, "a GGUF file"))
                files.append(parsed if i == index else _parse_sound(buffers[i], shard, judged))
            for defect in judge_set(files):
                raise_errors(defect)
        return GGUFFile(name, paths, buffers, files, cuts[0] if cuts else None)
    except BaseException:
        for buffer in buffers:
            release(buffer)
        raise


def _tensor_infos(parsed: ParsedGguf, shard: int) -> list[TensorInfo]:
    start = gguf_rules.data_start(parsed)
    return [
        TensorInfo(
            name=tensor.name,
            shape=tensor.dims[::-1],
            ggml_type=tensor.type_id,
            n_values=gguf_rules.n_values(tensor),
            n_bytes=gguf_rules.n_bytes(tensor),
            offset=start + tensor.data_offset,
            shard=shard,
        )
        for tensor in parsed.tensors
    ]


def _parse_sound(buffer: Buffer, path: str, judged: Report) -> ParsedGguf:
    parsed = parse(buffer, path)
    for defect in gguf_rules.judge(parsed):
        judged(defect)
    return parsed

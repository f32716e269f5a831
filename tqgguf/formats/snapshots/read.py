"""Reads a snapshot from our GGUF carrier: rows stay views of the mapped file, nothing is copied.

All structure is checked here, before anything is handed out; `data` looks at the bytes themselves. Each problem
goes to `report`, which raises in a reader and collects in a validator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo, open_gguf
from tqgguf.formats.gguf.split import COUNT_KEY
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.data import data_defects
from tqgguf.formats.snapshots.format import (
    CHECKSUMS,
    GENERAL_TYPE,
    I8,
    I32,
    TOKENS,
    codec_tensor,
    side_tensor,
)
from tqgguf.formats.snapshots.parts import PART_NAMES, PARTS
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot, side_problems
from tqgguf.formats.snapshots.table import LayerRow, Report, SnapshotTable, is_snapshot, read_table
from tqgguf.formats.snapshots.write import codec_tables
from tqgguf.formats.wording import shown

_RULE_OF_PROBLEM = {"rows": "row-size", "tokens": "token-count", "rope": "layer-value"}
_RULE_OF_TABLE = {"codebook": "codebook", "boundaries": "codebook", "signs": "rotation-signs"}


def open_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """The snapshot in a file, all of it checked; its arrays are views that keep the file's mapping alive.

    DefectError (a FormatError): damaged, or of another version; FormatError: another kind of file; TqggufError: it
    cannot be opened.
    """
    with open_gguf(path) as file:
        if not is_snapshot(file):
            found = shown(file.metadata.get("general.type", "model"))
            raise FormatError(
                f"{file.path}: expected general.type {GENERAL_TYPE}, found {found}: this is no prompt cache of ours"
            )
        snapshot = read_snapshot(file, _refuse)
        assert snapshot is not None
        for defect in data_defects(file, snapshot):
            _refuse(defect)
        return snapshot


def snapshot_defects(file: GGUFFile) -> Iterator[DefectError]:
    """All that is wrong with a file of which `is_snapshot` is true, its data included."""
    found: list[DefectError] = []
    snapshot = read_snapshot(file, found.append)
    yield from found
    if len(file.paths) == 1:
        yield from data_defects(file, snapshot)


def read_snapshot(file: GGUFFile, report: Report) -> Snapshot | None:
    """The snapshot of a file of which `is_snapshot` is true, its structure checked but not its data."""
    if len(file.paths) > 1:
        message = f"expected a prompt cache in one file, found {len(file.paths)} shards: checksums are of one file"
        at = file.value_offset(COUNT_KEY)
        report(GgufError("snapshot-split", file.path, message, offset=at, expected="one file", found=len(file.paths)))
        return None
    table = read_table(file, report)
    return None if table is None else _Reading(file, table, report).snapshot()


def _refuse(defect: DefectError) -> None:
    if defect.is_error:
        raise defect


class _Reading:
    """Finds the tensors that a table speaks of, and holds them against it."""

    def __init__(self, file: GGUFFile, table: SnapshotTable, report: Report) -> None:
        self.file, self.table, self.report = file, table, report
        self.used = {CHECKSUMS}

    def snapshot(self) -> Snapshot | None:
        table = self.table
        tokens = self._array(TOKENS, I32, np.int32, 1)
        if tokens is None:
            tokens = np.empty(0, np.int32)
        self._check_codecs()
        layers = [self._layer(row) for row in table.layers]
        self._check_counts(len(tokens))
        for name in self.file.tensors.keys() - self.used:
            self._bad("stray-tensor", name, "it belongs to no layer and no codec")
        if any(layer is None for layer in layers):
            return None
        return Snapshot(
            tokens=tokens,
            layers=tuple(layer for layer in layers if layer is not None),
            n_cells=table.n_cells,
            architecture=table.architecture,
            chunk=table.chunk,
            prompt_ranges=table.prompt_ranges,
            n_vocab=table.n_vocab,
            model=table.model,
            fingerprint=table.fingerprint,
            origin=table.origin,
        )

    def _bad(self, rule: str, name: str, message: str, offset: int | None = None) -> None:
        info = self.file.tensors.get(name)
        at = offset if offset is not None or info is None else info.offset
        self.report(GgufError(rule, self.file.path, f"tensor {shown(name)}: {message}", offset=at, tensor=name))

    def _array(self, name: str, ggml_type: int, dtype: type[Any], n_dims: int) -> NDArray[Any] | None:
        """A tensor of a plain type, if it is there and of that type and number of dimensions."""
        info = self._info(name)
        if info is None:
            return None
        if info.ggml_type != ggml_type or len(info.shape) != n_dims:
            expected = f"{np.dtype(dtype).name} in {n_dims} dimension{'s' if n_dims > 1 else ''}"
            self._bad("part-shape", name, f"expected {expected}, found {info.type_name} {list(info.shape)}")
            return None
        array = self.file.array(name)
        return array if array.dtype == dtype else array.view(dtype)

    def _info(self, name: str) -> TensorInfo | None:
        self.used.add(name)
        return self.file.tensors.get(name)

    def _check_codecs(self) -> None:
        for i, codec in enumerate(self.table.codecs):
            for part, (ggml_type, expected) in codec_tables(codec).items():
                name = codec_tensor(i, part)
                found = self._array(name, ggml_type, expected.dtype.type, expected.ndim)
                if found is None and name not in self.file.tensors:
                    self._bad(_RULE_OF_TABLE[part], name, f"it is missing, {codec.cache_type} needs it")
                elif found is not None and (found.shape != expected.shape or found.tobytes() != expected.tobytes()):
                    self._bad(_RULE_OF_TABLE[part], name, _difference(codec, found, expected))

    def _layer(self, row: LayerRow) -> LayerSnapshot | None:
        k, v = self._side(row, "k", row.codec_k), self._side(row, "v", row.codec_v)
        if k is None or v is None:
            return None
        layer = LayerSnapshot(
            layer=row.layer,
            k=k,
            v=v,
            start=row.start,
            window=row.window,
            balance=row.balance,
            n_prefix=row.n_prefix,
            rope=row.rope,
            scale_is_given=row.scale_is_given,
        )
        sound = True
        for side in SIDES:
            for part, problem in side_problems(layer, side, self.table.n_cells):
                rule = _RULE_OF_PROBLEM.get(part, "part-shape")
                self._bad(rule, side_tensor(row.layer, side, part if part in PART_NAMES else "rows"), problem)
                sound = False
        return layer if sound else None

    def _side(self, row: LayerRow, side: Side, codec_index: int) -> SideSnapshot | None:
        codec = self.table.codecs[codec_index]
        rows = self._rows(side_tensor(row.layer, side, "rows"), codec, row.n_kv_heads)
        parts = {
            part.name: self._array(side_tensor(row.layer, side, part.name), part.ggml_type, part.dtype, part.n_dims)
            for part in PARTS
        }
        return None if rows is None else SideSnapshot(codec, rows, **parts)

    def _rows(self, name: str, codec: StoredCodec, n_kv_heads: int) -> NDArray[np.uint8] | None:
        info = self._info(name)
        if info is None:
            return np.empty((0, n_kv_heads, codec.row_bytes), np.uint8)
        ggml_type = codec.codec.block_type.ggml_type
        kind, last = (I8, codec.row_bytes) if ggml_type is None else (ggml_type, codec.stored_dim)
        if info.ggml_type != kind or len(info.shape) != 3 or info.shape[1:] != (n_kv_heads, last):
            self._bad(
                "row-size",
                name,
                f"expected rows of {codec.cache_type}: {n_kv_heads} heads of {last} "
                f"{'bytes' if ggml_type is None else 'values'} for each token, found {info.type_name} "
                f"{list(info.shape)}",
            )
            return None
        return self.file.raw(name).reshape(info.shape[0], n_kv_heads, codec.row_bytes)

    def _check_counts(self, n_tokens: int) -> None:
        if self.table.n_cells > n_tokens:
            self._bad("token-count", TOKENS, f"expected at least as many tokens as rows, found {n_tokens} tokens and "
                      f"rows of {self.table.n_cells}")  # fmt: skip
        end = 0
        for first, last in self.table.prompt_ranges:
            if not end <= first < last <= n_tokens:
                self._bad(
                    "token-count", TOKENS, f"ranges of prompt up to {n_tokens} in order expected, found {first}-{last}"
                )
            end = last


def _difference(codec: StoredCodec, found: NDArray[Any], expected: NDArray[Any]) -> str:
    what = f"{codec.cache_type}, generation {codec.generation}, {codec.stored_dim} values"
    if found.shape != expected.shape:
        return f"expected {list(expected.shape)} values for {what}, found {list(found.shape)}"
    i = int(np.argmax(found.reshape(-1) != expected.reshape(-1)))
    return f"expected {expected.reshape(-1)[i]} in entry {i} for {what}, found {found.reshape(-1)[i]}"

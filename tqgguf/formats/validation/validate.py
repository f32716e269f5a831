"""Finds out whether a file is sound, whatever kind of file it is, and if not, why and where.

The parsers and rules are those of the readers: what a reader refuses is an error here, and all defects are collected
instead of the first one raised. What is looked at depends on the kind, see `CHECKS`; data are read to the last byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from tqgguf.formats.cursor import Buffer
from tqgguf.formats.file_kind import HEAD_BYTES, FileKind, found_instead, gguf_kind, kind_by_head
from tqgguf.formats.gguf.data_rules import judge_data
from tqgguf.formats.gguf.finite import no_progress
from tqgguf.formats.gguf.model_rules import judge_metadata, judge_tensors
from tqgguf.formats.gguf.parse import ParsedGguf, parse
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.gguf.rules import judge, judge_joined, judge_layout, judge_types
from tqgguf.formats.gguf.split import judge_set, shard_paths
from tqgguf.formats.llama.parse import parse_state
from tqgguf.formats.llama.row_rules import judge_rows
from tqgguf.formats.llama.rules import judge_state
from tqgguf.formats.mapped_file import map_file, release
from tqgguf.formats.mlx.cache import is_mlx_cache, judge_mlx_cache
from tqgguf.formats.models.belonging import ModelIdentity, judge_belonging, no_fingerprint
from tqgguf.formats.models.calibration import calibration_defects
from tqgguf.formats.models.loading import served_defects
from tqgguf.formats.rules.finding import EnoughError, Finding, Findings
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.safetensors import check_safetensors
from tqgguf.formats.snapshots.data import data_defects
from tqgguf.formats.snapshots.read import read_snapshot

_EXPECTED: Final = "a GGUF, safetensors, or llama.cpp session or sequence file"


def validate(
    path: str | os.PathLike[str], model: ModelIdentity | str | os.PathLike[str] | None = None
) -> list[Finding]:
    """All that is wrong with a file, and with the other shards of the set if it is one of a split model.

    path: a GGUF (model, shard, snapshot, calibration), a safetensors file, or a llama.cpp session or sequence file, by
    its content. model: a GGUF, an MLX folder, or the ModelIdentity of one: snapshots and calibrations are then held
    against it. An empty list: it is sound. TqggufError: a file or the model cannot be read.
    """
    identity = model if isinstance(model, ModelIdentity) or model is None else ModelIdentity.of(model)
    return Validation(os.fsdecode(path), identity).findings()


class Validation:
    """Looks through one file, or one set of shards. progress: called with numbers of bytes that were looked at."""

    def __init__(
        self, path: str, model: ModelIdentity | None = None, progress: Callable[[int], None] = no_progress
    ) -> None:
        self.path = path
        self.model = model
        self.progress = progress
        self.paths: tuple[str, ...] = (path,)
        """All files that were looked at, afterwards."""
        self._found = Findings()
        self._buffers: list[Buffer] = []

    def findings(self) -> list[Finding]:
        """Look, and list what was found. TqggufError: a file cannot be read."""
        try:
            buffer = self._map(self.path)
            kind = kind_by_head(buffer[:HEAD_BYTES])
            if kind is None:
                code, what = found_instead(buffer[:HEAD_BYTES])
                message = f"expected {_EXPECTED}, found {what}"
                self._found.report(DefectError(code, self.path, message, offset=0, expected=_EXPECTED, found=what))
            else:
                CHECKS[kind](self, buffer)
        except EnoughError:
            pass
        finally:
            for buffer in self._buffers:
                release(buffer)
        return self._found.all()

    def _map(self, path: str) -> Buffer:
        self._buffers.append(map_file(path, _EXPECTED))
        return self._buffers[-1]

    def _gguf(self, buffer: Buffer) -> None:
        found = self._found
        named = parse(buffer, self.path, found.report)
        files, is_complete = self._set(named)
        for parsed in files:
            found.extend(judge(parsed))
            found.extend(judge_types(parsed))
            if parsed.is_whole and not found.has_errors(parsed.path):
                found.extend(judge_layout(parsed))
        if is_complete and len(files) > 1:
            found.extend(judge_set(files))
        kind = _kind(files)
        if kind is FileKind.MODEL:
            found.extend(judge_metadata(files[0].path, files[0].entries))
            if is_complete:
                found.extend(judge_tensors(files))
        if kind in (FileKind.MODEL, FileKind.GGUF):
            for parsed, mapped in zip(files, self._buffers, strict=True):
                found.extend(judge_data(parsed, mapped, self.progress))
        if not any(found.has_errors(path) for path in self.paths):
            with GGUFFile(self.path, self.paths, list(self._buffers), files) as file:
                if kind in KINDS_OF_GGUF:
                    KINDS_OF_GGUF[kind](file, found, self.progress)
                if self.model is not None:
                    found.extend(judge_belonging(kind, file, self.model))

    def _set(self, named: ParsedGguf) -> tuple[list[ParsedGguf], bool]:
        """All files of the set that the file belongs to, mapped like it, as far as they are there; whether all are."""
        if not named.is_whole:
            return [named], False
        joined = list(judge_joined(named, self._buffers[0]))
        if joined:
            self._found.extend(joined)
            return [named], False
        try:
            self.paths, index = shard_paths(named)
        except DefectError as defect:
            self._found.report(defect)
            return [named], False
        files = []
        own = self._buffers.pop()
        for i, path in enumerate(self.paths):
            if i == index:
                self._buffers.append(own)
                files.append(named)
            else:
                files.append(parse(self._map(path), path, self._found.report))
        return files, all(parsed.is_whole for parsed in files)

    def _safetensors(self, buffer: Buffer) -> None:
        file = check_safetensors(buffer, self.path, self._found.report)
        if file is not None and not self._found.has_errors(self.path) and is_mlx_cache(file.metadata):
            self._found.extend(judge_mlx_cache(file, self.progress))

    def _state(self, buffer: Buffer) -> None:
        try:
            state, failure = parse_state(buffer, self.path)
        except DefectError as defect:
            self._found.report(defect)
            return
        self._found.extend(judge_state(state))
        if failure is not None:
            self._found.report(failure)
        if not self._found.has_errors(self.path):
            self._found.extend(judge_rows(state, self.progress))
        if self.model is not None:
            self._found.report(no_fingerprint(self.path))


def _kind(files: list[ParsedGguf]) -> FileKind:
    metadata = {entry.key: entry.value for entry in reversed(files[0].entries)}  # of a key that occurs twice the first
    return gguf_kind(metadata, {tensor.name for parsed in files for tensor in parsed.tensors})


def _model(file: GGUFFile, found: Findings, progress: Callable[[int], None]) -> None:
    if not found.has("model-fragment"):
        found.extend(served_defects(file))


def _snapshot(file: GGUFFile, found: Findings, progress: Callable[[int], None]) -> None:
    snapshot = read_snapshot(file, found.report)
    if len(file.paths) > 1:
        return
    # rows that layers share by mistake would be read once for each of them
    found.extend(data_defects(file, None if found.has_errors(file.path) else snapshot, progress))


def _calibration(file: GGUFFile, found: Findings, progress: Callable[[int], None]) -> None:
    found.extend(calibration_defects(file))


CHECKS: Final[dict[FileKind, Callable[[Validation, Buffer], None]]] = {
    FileKind.GGUF: Validation._gguf,
    FileKind.SAFETENSORS: Validation._safetensors,
    FileKind.SESSION: Validation._state,
    FileKind.SEQUENCE: Validation._state,
}
"""How a file is looked through, by the kind that its first bytes say."""

KINDS_OF_GGUF: Final[dict[FileKind, Callable[[GGUFFile, Findings, Callable[[int], None]], None]]] = {
    FileKind.MODEL: _model,
    FileKind.SNAPSHOT: _snapshot,
    FileKind.CALIBRATION: _calibration,
}
"""What is looked at beyond the structure of a GGUF without errors, by what it says of itself."""

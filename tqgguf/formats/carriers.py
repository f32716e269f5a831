"""The carriers of snapshots in one table: which file formats hold a prompt cache, and how each is read and written.

What a file is, is told by its content (`file_kind`). What a foreign file cannot tell is in `ImportOptions`, with
defaults; the model's sizes are in its outline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.file_kind import HEAD_BYTES, FileKind, kind_by_head
from tqgguf.formats.llama_export import ExportOptions, export_llama_state
from tqgguf.formats.llama_format import Kind
from tqgguf.formats.llama_import import ImportOptions, import_llama_state
from tqgguf.formats.llama_reader import open_llama_state
from tqgguf.formats.llama_write import write_llama_state
from tqgguf.formats.model_outline import ModelOutline
from tqgguf.formats.snapshot import Snapshot
from tqgguf.formats.snapshot_read import open_snapshot
from tqgguf.formats.snapshot_write import write_snapshot


@dataclass(frozen=True)
class Foreign:
    """What is to be assumed of a foreign file: its model (None: unknown), and how its rows are coded."""

    model: ModelOutline | None = None
    options: ImportOptions = field(default_factory=ImportOptions)


class Carrier(NamedTuple):
    """open: a file to a snapshot, all of it checked. write: the way back."""

    name: str
    open: Callable[[str, Foreign], Snapshot]
    write: Callable[[str, Snapshot, ExportOptions], None]


def open_carrier(path: str | os.PathLike[str], foreign: Foreign = Foreign()) -> Snapshot:
    """The snapshot in a file of any kind in `CARRIERS`.

    FormatError: it is damaged, or another kind of file; RequestError: something must be known that it does not say, or
    it is another model's; TqggufError: it cannot be read.
    """
    name = os.fspath(path)
    carrier = CARRIERS.get(carrier_kind(name))
    # what is no carrier goes to our own reader, whose refusal says what it is
    return open_snapshot(name) if carrier is None else carrier.open(name, foreign)


def write_carrier(
    path: str | os.PathLike[str], snapshot: Snapshot, kind: FileKind, options: ExportOptions | None = None
) -> None:
    """Write a snapshot as a file of a kind in `CARRIERS`, or replace one.

    RequestError: the kind cannot hold it, or rows would have to be quantised again and that was not asked for;
    TqggufError: the file cannot be written; what it held before is then untouched.
    """
    CARRIERS[kind].write(os.fspath(path), snapshot, options or ExportOptions())


def carrier_kind(path: str) -> FileKind:
    """The kind of an existing file by its first bytes; of a GGUF, SNAPSHOT. TqggufError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            kind = kind_by_head(file.read(HEAD_BYTES))
    except OSError as error:
        raise TqggufError(f"{path}: cannot be opened: {error.strerror or error}") from error
    return FileKind.SNAPSHOT if kind is None or kind is FileKind.GGUF else kind


def _open_llama(path: str, foreign: Foreign) -> Snapshot:
    if foreign.model is None:
        raise RequestError(f"{path}: a llama.cpp file does not say its model's head sizes; name the model (-m)")
    return import_llama_state(open_llama_state(path), foreign.model, foreign.options)


def _write_llama(kind: Kind) -> Callable[[str, Snapshot, ExportOptions], None]:
    def write(path: str, snapshot: Snapshot, options: ExportOptions) -> None:
        write_llama_state(path, export_llama_state(snapshot, replace(options, kind=kind)))

    return write


CARRIERS: dict[FileKind, Carrier] = {
    FileKind.SNAPSHOT: Carrier(
        "our GGUF", lambda path, _: open_snapshot(path), lambda path, snapshot, _: write_snapshot(path, snapshot)
    ),
    FileKind.SESSION: Carrier("llama.cpp session", _open_llama, _write_llama("session")),
    FileKind.SEQUENCE: Carrier("llama.cpp sequence", _open_llama, _write_llama("sequence")),
}

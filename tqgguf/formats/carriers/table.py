"""The carriers of snapshots in one table: which file formats hold a prompt cache, and how each is read and written.

What a file is, is told by its content (`file_kind`). What a foreign file cannot tell is in `Foreign`, with defaults;
the model's sizes are in its outline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tqgguf.formats.carriers.recode import recode_snapshot
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.file_kind import HEAD_BYTES, FileKind, kind_by_head
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.llama.format import Kind
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.reader import open_llama_state
from tqgguf.formats.llama.to_snapshot import ImportOptions, import_llama_state, outline_of_state
from tqgguf.formats.llama.write import write_llama_state
from tqgguf.formats.mapped_file import read_head
from tqgguf.formats.mlx.cache import is_mlx_cache, read_mlx_cache
from tqgguf.formats.mlx.from_snapshot import MlxExportOptions, write_mlx_cache
from tqgguf.formats.mlx.to_snapshot import MlxImportOptions, import_mlx_cache, outline_of_mlx_cache
from tqgguf.formats.models.outline import ModelOutline
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.snapshots.table import is_snapshot
from tqgguf.formats.snapshots.values import check_values, not_written
from tqgguf.formats.snapshots.write import write_snapshot


@dataclass(frozen=True)
class Foreign:
    """What is to be assumed of a foreign file: its model (None: unknown; head_dim then helps, 0 is unknown), and what
    it cannot tell of its rows.
    """

    model: ModelOutline | None = None
    head_dim: int = 0
    llama: ImportOptions = field(default_factory=ImportOptions)
    mlx: MlxImportOptions = field(default_factory=MlxImportOptions)


@dataclass(frozen=True)
class Target:
    """What is asked of a file that is written. type_k, type_v: of layers, as -ctk and -ctv take them (None: as they
    are). requantise: quantise again what has to be. llama, mlx: what only these carriers have; their types and
    requantise are set from here.
    """

    type_k: str | None = None
    type_v: str | None = None
    requantise: bool = False
    llama: ExportOptions = field(default_factory=ExportOptions)
    mlx: MlxExportOptions = field(default_factory=MlxExportOptions)


class Carrier(NamedTuple):
    """open: a file to a snapshot, all of it checked. write: the way back."""

    name: str
    open: Callable[[str, Foreign], Snapshot]
    write: Callable[[str, Snapshot, Target], None]


def open_carrier(path: str | os.PathLike[str], foreign: Foreign = Foreign()) -> Snapshot:
    """The snapshot in a file of any kind in `CARRIERS`.

    FormatError: it is damaged, or another kind of file; RequestError: something must be known that it does not say, or
    it is another model's; TqggufError: it cannot be read.
    """
    name = os.fsdecode(path)
    carrier = CARRIERS.get(carrier_kind(name))
    # what is no carrier goes to our own reader, whose refusal says what it is
    return open_snapshot(name) if carrier is None else carrier.open(name, foreign)


def write_carrier(
    path: str | os.PathLike[str], snapshot: Snapshot, kind: FileKind, target: Target | None = None
) -> None:
    """Write a snapshot as a file of a kind in `CARRIERS`, or replace one.

    RequestError: the kind cannot hold it, or rows would have to be quantised again and that was not asked for;
    FormatError: the snapshot holds numbers that no file may hold; TqggufError: the file cannot be written. What it held
    before is then untouched.
    """
    CARRIERS[kind].write(os.fsdecode(path), snapshot, target or Target())


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """RequestError if `path` is a file that is no prompt cache (a model, a text): it is not to be written over."""
    name = os.fsdecode(path)
    if os.path.isfile(name) and os.path.getsize(name) and not _is_carrier(name):
        raise RequestError(
            f"{name}: exists and is no prompt cache, so it is not replaced; delete it, or give another name"
        )


def _is_carrier(path: str) -> bool:
    try:
        kind = head_kind(path)
        if kind is FileKind.GGUF:
            with open_gguf(path) as found:
                return is_snapshot(found)
        if kind is FileKind.SAFETENSORS:
            return is_mlx_cache(open_safetensors(path).metadata)
    except TqggufError:  # damaged, or not to be read: whose it is cannot be told
        return False
    return kind in CARRIERS


def carrier_kind(path: str) -> FileKind:
    """The kind of an existing file by its first bytes; of a GGUF, SNAPSHOT. TqggufError: it cannot be read."""
    kind = head_kind(path)
    return FileKind.SNAPSHOT if kind is None or kind is FileKind.GGUF else kind


def head_kind(path: str) -> FileKind | None:
    """`kind_by_head` of a file. TqggufError: it cannot be read."""
    return kind_by_head(read_head(path, HEAD_BYTES, "a file"))


def _open_llama(path: str, foreign: Foreign) -> Snapshot:
    state = open_llama_state(path)
    if foreign.model is None and not foreign.head_dim:
        raise RequestError(
            f"{path}: a llama.cpp file does not say its model's head sizes: name the model with -m, or --head-dim"
        )
    model = foreign.model or outline_of_state(state, foreign.llama, foreign.head_dim)
    return import_llama_state(state, model, foreign.llama)


def _open_mlx(path: str, foreign: Foreign) -> Snapshot:
    cache = read_mlx_cache(open_safetensors(path))
    return import_mlx_cache(cache, foreign.model or outline_of_mlx_cache(cache), foreign.mlx)


def _write_own(path: str, snapshot: Snapshot, target: Target) -> None:
    """Rows of a foreign codec stay what they are, unless they are asked for in another one."""
    if target.type_k is not None or target.type_v is not None or target.requantise:
        snapshot = recode_snapshot(snapshot, target.type_k, target.type_v, requantise=target.requantise)
    write_snapshot(path, snapshot)


def _write_llama(kind: Kind) -> Callable[[str, Snapshot, Target], None]:
    def write(path: str, snapshot: Snapshot, target: Target) -> None:
        options = replace(
            target.llama, kind=kind, type_k=target.type_k, type_v=target.type_v, requantise=target.requantise
        )
        with not_written(path):
            check_values(snapshot)
        write_llama_state(path, export_llama_state(snapshot, options))

    return write


def _write_mlx(path: str, snapshot: Snapshot, target: Target) -> None:
    if target.type_k != target.type_v:
        found = f"{target.type_k or 'the type that it has'} for K and {target.type_v or 'the type that it has'} for V"
        raise RequestError(f"{path}: mlx-lm's caches have one type for K and V, found {found}")
    options = replace(target.mlx, cache_type=target.type_k, requantise=target.requantise)
    with not_written(path):
        check_values(snapshot)
    write_mlx_cache(path, snapshot, options)


CARRIERS: dict[FileKind, Carrier] = {
    FileKind.SNAPSHOT: Carrier("our GGUF", lambda path, _: open_snapshot(path), _write_own),
    FileKind.SESSION: Carrier("llama.cpp session", _open_llama, _write_llama("session")),
    FileKind.SEQUENCE: Carrier("llama.cpp sequence", _open_llama, _write_llama("sequence")),
    FileKind.SAFETENSORS: Carrier("mlx-lm prompt cache", _open_mlx, _write_mlx),
}

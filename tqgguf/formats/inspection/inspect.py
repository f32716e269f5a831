"""Tells what a file is and what it holds, whatever its kind: the door to its neighbours.

Headers and metadata are read, the data of tensors is not. What is wrong with a file is its reader's error; whether all
of it is sound is a validator's question.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tqgguf.formats.errors import FormatError
from tqgguf.formats.file_kind import HEAD_BYTES, FileKind, found_instead, gguf_kind, kind_by_head
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.inspection.cache import calibration_facts, snapshot_facts, state_facts
from tqgguf.formats.inspection.facts import DEFAULT_CONTEXT, FileSize, Inspection, MetadataValue, TensorLine, kv_costs
from tqgguf.formats.inspection.folder import inspect_folder, inspect_safetensors
from tqgguf.formats.inspection.model import model_facts
from tqgguf.formats.mapped_file import read_head
from tqgguf.formats.models.model_path import model_path

KNOWN_KINDS = (
    "a GGUF (a model or any shard of one, a prompt cache, a calibration), a llama.cpp session or sequence file, a "
    "safetensors file, an MLX model folder"
)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What the file or folder holds.

    FormatError: it is of no known kind, or damaged; TqggufError: it cannot be opened.
    """
    name = model_path(path)
    if os.path.isdir(name):
        return inspect_folder(name)
    head = read_head(name, HEAD_BYTES, KNOWN_KINDS)
    kind = kind_by_head(head)
    if kind is FileKind.GGUF:
        with open_gguf(name, even_cut=True) as file:
            return _inspect_gguf(file)
    if kind is FileKind.SAFETENSORS:
        return inspect_safetensors(name)
    if kind is None:
        raise FormatError(f"{name}: expected {KNOWN_KINDS}; found {found_instead(head)[1]}")
    facts, notes = state_facts(name)
    container = f"llama.cpp {facts.kind} file, version {facts.version}"
    return Inspection(name, kind, container, (_size(name),), facts, notes=notes)


def _size(path: str) -> FileSize:
    return FileSize(path, os.path.getsize(path))


def _inspect_gguf(file: GGUFFile) -> Inspection:
    kind = gguf_kind(file.metadata, file.tensors)
    about: Any = None
    notes: tuple[str, ...] = ()
    costs: dict[str, Any] = {}
    if file.cut is not None and kind is not FileKind.MODEL:
        raise file.cut
    if kind is FileKind.MODEL:
        about, shapes, notes = model_facts(file)
        notes = notes if file.cut is None else (file.cut.bare, *notes)
        n_context = about.context_length or DEFAULT_CONTEXT
        costs = {"costs": kv_costs(shapes, n_context), "n_context": n_context}
    elif kind is FileKind.SNAPSHOT:
        about, notes = snapshot_facts(file)
    elif kind is FileKind.CALIBRATION:
        about = calibration_facts(file.path)
    return Inspection(
        file.path,
        kind,
        f"GGUF version {file.version}",
        tuple(map(_size, file.paths)),
        about,
        tuple(
            TensorLine(
                info.name, info.type_name, info.shape[::-1], info.n_values, info.n_bytes, info.offset, info.shard
            )
            for info in file.tensors.values()
        ),
        metadata=_metadata(file),
        notes=notes,
        **costs,
    )


def _metadata(file: GGUFFile) -> Mapping[str, MetadataValue]:
    return {key: MetadataValue(str(file.metadata_type(key)), value) for key, value in file.metadata.items()}

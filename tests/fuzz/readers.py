"""Everything of tqgguf that takes a file of unknown content, done with one file; and what must hold between it.

`examine` lets no exception but TqggufError pass unnoticed, and holds readers against the validator: no reader takes
what the validator calls an error, and what it calls sound, its reader takes. For the fuzzers and the kept corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.file_kind import FileKind, gguf_kind, kind_by_head
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.inspection.inspect import inspect
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.reader import open_llama_state, summarise
from tqgguf.formats.llama.to_snapshot import ImportOptions, import_llama_state, outline_of_state
from tqgguf.formats.llama.write import pieces
from tqgguf.formats.mlx.cache import is_mlx_cache, read_mlx_cache
from tqgguf.formats.mlx.to_snapshot import import_mlx_cache, outline_of_mlx_cache
from tqgguf.formats.models.calibration import read_calibration
from tqgguf.formats.models.config import read_model_config
from tqgguf.formats.models.fingerprint import fingerprint_gguf
from tqgguf.formats.rules.finding import Finding
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.validation.validate import validate

PROFILES = ("mainline", "thetom-2026-05", "buun")
HEAD_DIM = 64  # of the seeds

BEYOND_OPENING = ("TQ149", "TQ150", "TQ2")
"""Ids of errors with which a GGUF still opens, for `inspect`: types that are not known, what models need, and data."""


def examine(path: Path) -> list[Finding]:
    """Do it, and return the findings. AssertionError: a reader and the validator disagree."""
    findings = validate(path)
    assert validate(path) == findings
    errors = [finding.rule.id for finding in findings if finding.is_error]
    kind = _kind(path)
    _try(inspect, path)
    if kind in (FileKind.SESSION, FileKind.SEQUENCE):
        assert _try(lambda: summarise(open_llama_state(path))) is not bool(errors), errors
        for profile in PROFILES:
            _try(_import_state, path, ImportOptions(profile))
    elif kind is FileKind.SAFETENSORS:
        is_whole = _try(open_safetensors, path)
        assert is_whole is all(error.startswith("TQ52") for error in errors), errors
        if is_whole and is_mlx_cache(open_safetensors(path).metadata):
            assert _try(lambda: read_mlx_cache(open_safetensors(path))) is not bool(errors), errors
            _try(_import_mlx_cache, path)
    elif kind is not None:
        opens = _try(_read_gguf, path)
        assert opens is all(error.startswith(BEYOND_OPENING) for error in errors) or _is_later(kind, errors), errors
        if kind is FileKind.SNAPSHOT:
            assert _try(open_snapshot, path) is not bool(errors), errors
            _try(_export_snapshot, path)
        if kind is FileKind.CALIBRATION:
            assert _try(read_calibration, path) is not bool(errors), errors
    return findings


def _is_later(kind: FileKind, errors: list[str]) -> bool:
    """Whether the errors are of rules for which a GGUF opens, and its own reader refuses it."""
    later = {FileKind.SNAPSHOT: "TQ3", FileKind.CALIBRATION: "TQ7"}.get(kind, "TQ2")
    return all(error.startswith((later, *BEYOND_OPENING, "TQ120")) for error in errors)


def _try(action: Callable[..., Any], *arguments: Any) -> bool:
    """Whether it works. Nothing but TqggufError may come out of it, in one line."""
    try:
        action(*arguments)
    except TqggufError as error:
        assert "\n" not in str(error), error
        return False
    return True


def _kind(path: Path) -> FileKind | None:
    with path.open("rb") as file:
        kind = kind_by_head(file.read(64))
    if kind is FileKind.GGUF:
        try:
            with open_gguf(path) as gguf:
                return gguf_kind(gguf.metadata, gguf.tensors)
        except TqggufError:
            return FileKind.MODEL
    return kind


def _read_gguf(path: Path) -> None:
    """Touch all of a GGUF."""
    with open_gguf(path) as file:
        for key in file.metadata:
            assert str(file.metadata_type(key))
            for get in (file.uint, file.real, file.flag, file.text, file.uints, file.floats, file.texts):
                _try(get, key)
        for name in file.tensors:
            _try(lambda name=name: file.array(name).tobytes())
        _try(fingerprint_gguf, file)
        _try(read_model_config, file)


def _import_state(path: Path, options: ImportOptions) -> None:
    state = open_llama_state(path)
    _read_rows(import_llama_state(state, outline_of_state(state, options, HEAD_DIM), options))


def _import_mlx_cache(path: Path) -> None:
    cache = read_mlx_cache(open_safetensors(path))
    _read_rows(import_mlx_cache(cache, outline_of_mlx_cache(cache)))


def _export_snapshot(path: Path) -> None:
    for piece in pieces(export_llama_state(open_snapshot(path), ExportOptions(requantise=True))):
        assert len(piece) >= 0


def _read_rows(snapshot: Snapshot) -> None:
    for layer in snapshot.layers:
        for side in (layer.k, layer.v):
            for rows in side.slices():
                assert rows.dtype == np.uint8


def in_memory_folder() -> Path:
    """Where to put files that live for a moment."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))

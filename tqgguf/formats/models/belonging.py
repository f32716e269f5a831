"""Does a snapshot or a calibration belong to a model? By the fingerprints, part by part.

Layers and shapes are the business of whoever loads both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tqgguf.formats.file_kind import FileKind, check_is_model
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.models.fingerprint import KEYS, Fingerprint, fingerprint_folder, fingerprint_gguf, read_fingerprint
from tqgguf.formats.models.model_path import model_path
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import readable

RULES_OF_PARTS: Final[dict[FileKind, dict[str, str]]] = {
    FileKind.SNAPSHOT: {
        "weights": "other-weights",
        "hyperparameters": "other-hyperparameters",
        "rope": "other-rope",
        "tokenizer": "other-tokenizer",
    },
    FileKind.CALIBRATION: {
        "weights": "other-weights",
        "hyperparameters": "other-hyperparameters",
        "rope": "calibration-rope",
    },
}
"""Kind of file -> part of the fingerprint that matters to it -> the rule that a difference breaks."""


@dataclass(frozen=True)
class ModelIdentity:
    """A model that files are held against."""

    name: str
    fingerprint: Fingerprint

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ModelIdentity:
        """Of a GGUF (any shard) or an MLX folder. TqggufError: it is damaged, no model, or cannot be read."""
        path = model_path(path)
        if os.path.isdir(path):
            return cls(readable(path), fingerprint_folder(path))
        with open_gguf(path) as file:
            check_is_model(file.path, file.metadata, file.tensors)
            return cls(readable(path), fingerprint_gguf(file))


def judge_belonging(kind: FileKind, file: GGUFFile, model: ModelIdentity) -> Iterator[DefectError]:
    """What tells that a sound file of that kind was made with another model. Nothing of kinds that belong to none."""
    if kind not in RULES_OF_PARTS:
        return
    if f"{KEYS}version" not in file.metadata:
        yield no_fingerprint(file.path)
        return
    try:
        own = read_fingerprint(file)
    except DefectError as defect:
        yield defect
        return
    differing = own.differences(model.fingerprint)
    for part, code in RULES_OF_PARTS[kind].items():
        if part in differing:
            found, expected = getattr(own, part), getattr(model.fingerprint, part)
            message = f"made with a model of other {part} than {model.name}: expected {expected}, found {found}"
            yield DefectError(
                code, file.path, message, offset=file.value_offset(KEYS + part), expected=expected, found=found
            )


def no_fingerprint(path: str) -> DefectError:
    """What is said of a file that names no model."""
    return DefectError("no-fingerprint", path, "the file does not say which model it was made with")

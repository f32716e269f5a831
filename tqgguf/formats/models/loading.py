"""What a model that is served must be beyond the rules of every GGUF: the loader, `validate` and `convert` ask here.

Whatever the loader refuses for the file's sake is a defect of these functions, or of `gguf.model_rules`, so that no
refusal is known to one of the three alone. What is sound and merely not served yet (UnsupportedModelError) is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, TypeVar

import numpy as np

from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.model_keys import SERVED
from tqgguf.formats.gguf.model_rules import judge_metadata, judge_tensors
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.gguf.tensor_values import can_decode, decode
from tqgguf.formats.models.config import ROPE_FACTORS, read_model_config
from tqgguf.formats.models.vocabulary import BPE_MODELS, VocabularyError, read_merges, read_model, read_vocabulary
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.templates.process import PROCESS, TemplateLimitError, TemplateMistakeError

BORNE: Final = ("special-token",)
"""Errors with which a model runs, as in llama.cpp: the vocabulary ignores such ids, and says so."""

FACTORS: Final = "rope_freqs.weight"
"""llama 3's frequency factors, one for each pair of channels."""
T = TypeVar("T")
TEMPLATE: Final = "tokenizer.chat_template"


def refuse(defects: Iterator[DefectError]) -> None:
    """Raise the first defect with which a model is not loaded."""
    for defect in defects:
        if defect.is_error and defect.code not in BORNE:
            raise defect


def model_defects(file: GGUFFile) -> Iterator[DefectError]:
    """All that is wrong with a model's header, vocabulary and chat template, but for the structure of its file."""
    found: list[DefectError] = []
    for defect in header_defects(file):
        found.append(defect)
        yield defect
    if not any(defect.is_error or defect.code == "model-fragment" for defect in found):
        yield from served_defects(file)


def header_defects(file: GGUFFile) -> Iterator[DefectError]:
    """What the rules find in a model's metadata and in the list of its tensors."""
    return chain(judge_metadata(file.path, file.entries), judge_tensors(file.parsed))


def served_defects(file: GGUFFile) -> Iterator[DefectError]:
    """What else keeps a model of an architecture that is served from being loaded. Its header has no errors."""
    if file.metadata.get("general.architecture") not in SERVED or not any(map(_is_of_layer, file.tensors)):
        return
    for check in (_config, _vocabulary):
        try:
            check(file)
        except UnsupportedModelError:
            pass
        except DefectError as defect:
            yield defect
    yield from factor_defects(file)
    yield from _template(file)


def factor_defects(file: GGUFFile) -> Iterator[DefectError]:
    """Frequency factors that no angle can be computed with."""
    info = file.tensors.get(FACTORS)
    if info is None or not can_decode(info.ggml_type):
        return
    low, high = ROPE_FACTORS
    values = decode(info, file.array(FACTORS)).reshape(-1)
    wrong = np.flatnonzero(~((values >= low) & (values <= high)))
    if wrong.size:
        expected, found = f"factors from {low:.3g} to {high:.3g}", f"{values[wrong[0]]:g}"
        message = f"tensor {FACTORS}: expected {expected}, found {found} as number {wrong[0]}"
        yield GgufError(
            "tensor-value", file.path, message, offset=info.offset, tensor=FACTORS, expected=expected, found=found
        )


def reading_vocabulary(file: GGUFFile, read: Callable[[], T]) -> T:
    """What `read` makes of a file's vocabulary; a VocabularyError becomes the defect of the file."""
    try:
        return read()
    except VocabularyError as error:
        at = file.value_offset(error.key) if error.key in file.metadata else None
        raise GgufError("vocabulary", file.path, str(error), offset=at) from error


def _config(file: GGUFFile) -> None:
    read_model_config(file)


def _vocabulary(file: GGUFFile) -> None:
    def read() -> None:
        model = read_model(file.metadata)
        read_vocabulary(file.metadata, default_special={})
        if model in BPE_MODELS:
            read_merges(file.metadata)

    reading_vocabulary(file, read)


def _template(file: GGUFFile) -> Iterator[DefectError]:
    template = file.metadata.get(TEMPLATE)
    if not isinstance(template, str) or not template:
        return
    try:
        PROCESS.compile(template)
    except (TemplateMistakeError, TemplateLimitError) as error:
        yield GgufError("chat-template", file.path, str(error), offset=file.value_offset(TEMPLATE))


def _is_of_layer(name: str) -> bool:
    return name.startswith("blk.")

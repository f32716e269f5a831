"""What a model that is served must be beyond the rules of every GGUF: the loader, `validate`, `convert` and `plan` ask
here.

Whatever the loader refuses for the file's sake is a defect of these functions, or of `gguf.model_rules`, so that no
refusal is known to one of them alone. What is sound and merely not served yet (UnsupportedModelError) is no defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, TypeVar

import numpy as np

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.file_kind import check_is_model
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.model_keys import (
    BIASES,
    DENSE_ARCHITECTURES,
    HEADS_AS_WIDE_AS_MODEL,
    MATRICES,
    SERVED,
    VECTORS,
    WITH_ROPE_FACTORS,
)
from tqgguf.formats.gguf.model_rules import judge_metadata, judge_tensors
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.gguf.tensor_values import can_decode, decode, undecodable
from tqgguf.formats.models.config import ROPE_FACTORS, ModelConfig, override_rope, read_model_config
from tqgguf.formats.models.vocabulary import BPE_MODELS, VocabularyError, read_merges, read_model, read_vocabulary
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.templates.process import PROCESS, TemplateLimitError, TemplateMistakeError
from tqgguf.formats.wording import shown

BORNE: Final = ("special-token",)
"""Errors with which a model runs, as in llama.cpp: the vocabulary ignores such ids, and says so."""

FACTORS: Final = "rope_freqs.weight"
"""llama 3's frequency factors, one for each pair of channels."""
T = TypeVar("T")
TEMPLATE: Final = "tokenizer.chat_template"


def check_model(
    file: GGUFFile, *, rope_freq_base: float | None = None, rope_freq_scale: float | None = None
) -> ModelConfig:
    """The sizes of a model that can be loaded as far as its header says. RoPE parameters: `config.override_rope`.

    FormatError: it is no model, or damaged. UnsupportedModelError: an architecture, a feature, a size, a tensor or a
    type that is not served. RequestError: RoPE parameters that no angle can be computed with.
    """
    check_is_model(file.path, file.metadata, file.tensors)
    check_architecture(file.text("general.architecture"))
    config = override_rope(read_model_config(file), freq_base=rope_freq_base, freq_scale=rope_freq_scale)
    _check_heads(config)
    refuse(chain(header_defects(file), factor_defects(file)))
    _check_tensors(file, config)
    return config


def check_architecture(name: str) -> None:
    """UnsupportedModelError with the list of what is served."""
    if name not in SERVED:
        raise UnsupportedModelError(
            f"general.architecture is {shown(name)}: expected one of {', '.join(SERVED)} "
            "(an MLX model folder of other architectures works through mlx-lm)"
        )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model that is served, with its shape, slowest dimension first. rope_freqs.weight may be absent,
    and is no tensor of every architecture (see WITH_ROPE_FACTORS).
    """
    sizes = {
        "hidden": config.hidden_size,
        "q": config.n_heads * config.head_dim_k,
        "k": config.n_kv_heads * config.head_dim_k,
        "v": config.n_kv_heads * config.head_dim_v,
        "output": config.n_heads * config.head_dim_v,
        "ffn": config.intermediate_size,
        "head": config.head_dim_k,
    }
    embedding = config.vocab_size, config.hidden_size
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": embedding, "output_norm.weight": (config.hidden_size,)}
    if not config.tied_embeddings:
        found["output.weight"] = embedding
    for layer in range(config.n_layers):
        for part in DENSE_ARCHITECTURES[config.architecture]:
            is_norm = part in VECTORS
            shape = (sizes[VECTORS[part]],) if is_norm else tuple(sizes[size] for size in MATRICES[part][::-1])
            found[f"blk.{layer}.{part}.weight"] = shape
        for part in BIASES.get(config.architecture, ()):
            found[f"blk.{layer}.{part}.bias"] = (sizes[MATRICES[part][1]],)
    if config.architecture in WITH_ROPE_FACTORS:
        found[FACTORS] = (config.rope_dim // 2,)
    return found


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
    """Frequency factors that no angle can be computed with; of a file that is cut, where they may be missing, none."""
    info = file.tensors.get(FACTORS)
    if info is None or not can_decode(info.ggml_type) or file.cut is not None:
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


def _check_heads(config: ModelConfig) -> None:
    """UnsupportedModelError for heads that the architecture's class cannot have."""
    name = config.architecture
    if config.head_dim_k != config.head_dim_v:
        raise UnsupportedModelError(
            f"{name}: K heads of {config.head_dim_k} and V heads of {config.head_dim_v} values are not supported yet"
        )
    if config.rope_dim != config.head_dim_k:
        raise UnsupportedModelError(
            f"{name}.rope.dimension_count: expected {config.head_dim_k} (whole heads), found {config.rope_dim}"
        )
    if name in HEADS_AS_WIDE_AS_MODEL and config.head_dim_k * config.n_heads != config.hidden_size:
        raise UnsupportedModelError(
            f"{name}: expected heads that make up the embedding length {config.hidden_size}, "
            f"found {config.n_heads} of {config.head_dim_k} values"
        )


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """FormatError: a tensor is missing or has the wrong shape. UnsupportedModelError: one that no place is for, or of a
    type that cannot be decoded.
    """
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in file.tensors and name != FACTORS]
    if missing:
        raise FormatError(f"{file.path}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
    unused = [name for name in file.tensors if name not in expected]
    if unused:
        raise UnsupportedModelError(
            f"{file.path}: tensor {shown(unused[0])} has no place in mlx-lm's {config.architecture} "
            f"({len(unused)} such tensors): the model has a feature that is not supported yet"
        )
    for name, info in file.tensors.items():
        if info.shape != expected[name]:
            raise FormatError(f"{file.path}: tensor {name}: expected shape {expected[name]}, found {info.shape}")
        if not can_decode(info.ggml_type):
            raise undecodable(file, info)

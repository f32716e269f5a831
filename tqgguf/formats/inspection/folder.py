"""What an MLX model folder says of its model, and what a single safetensors file holds; without MLX.

Read leniently from config.json and the headers of the weights. Which layers see a window is known where config.json
says so; how mlx-lm's class computes is not known here.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.inspection.cache import MLX_CACHE_KIND, mlx_cache_facts
from tqgguf.formats.inspection.facts import (
    DEFAULT_CONTEXT,
    DIMS_SLOWEST_FIRST,
    FileSize,
    Inspection,
    MetadataValue,
    TensorLine,
    kv_costs,
)
from tqgguf.formats.inspection.model import ModelFacts, RopeFacts, TokenizerFacts
from tqgguf.formats.json_file import read_bytes, read_json
from tqgguf.formats.mlx.cache import is_mlx_cache
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, WINDOW_PATTERN
from tqgguf.formats.models.folder_files import WEIGHT_FILES
from tqgguf.formats.models.folder_loading import LAYER_COUNTS
from tqgguf.formats.safetensors import SafetensorsFile, open_safetensors

FOLDER_KIND = "mlx folder"
_PACKED = "U32"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT = ("linear_", "mamba", "ssm", "conv_", "rwkv")
_KINDS_OF_LAYERS = {"full_attention": True, "sliding_attention": True, "chunked_attention": True}
"""Entries of `layer_types` that have a KV cache; others are recurrent."""


@dataclass(frozen=True)
class ModelFolder:
    """config: config.json. facts, shapes, notes: as of `inspection.model.model_facts`."""

    config: Mapping[str, Any]
    files: tuple[SafetensorsFile, ...]
    tensors: tuple[TensorLine, ...]
    facts: ModelFacts
    shapes: tuple[LayerShape, ...]
    notes: tuple[str, ...]


def read_folder(path: str) -> ModelFolder:
    """FormatError: no config.json, or a damaged file; TqggufError: one that cannot be opened."""
    folder = Path(path)
    if not (folder / "config.json").exists():
        raise FormatError(f"{path}: expected a model folder with a config.json, found none; name a file of it instead")
    config = read_json(folder / "config.json")
    files = tuple(open_safetensors(weights) for weights in sorted(folder.glob(WEIGHT_FILES)))
    tensors = tuple(line for i, file in enumerate(files) for line in _lines(file, i))
    facts, shapes, notes = _facts(folder, config, tensors)
    notes = notes if files else (*notes, f"there are no weights ({WEIGHT_FILES})")
    return ModelFolder(config, files, tensors, facts, shapes, notes)


def inspect_folder(path: str) -> Inspection:
    """Errors as `read_folder`."""
    found = read_folder(path)
    n_context = found.facts.context_length or DEFAULT_CONTEXT
    return Inspection(
        path,
        FOLDER_KIND,
        "safetensors",
        tuple(FileSize(file.path, file.n_bytes) for file in found.files),
        found.facts,
        found.tensors,
        DIMS_SLOWEST_FIRST,
        {key: MetadataValue(_json_type(value), value) for key, value in found.config.items()},
        kv_costs(found.shapes, n_context),
        n_context,
        found.notes,
    )


def inspect_safetensors(path: str) -> Inspection:
    """One file by itself. Errors as `open_safetensors`, and of a prompt cache as `mlx_cache_facts`."""
    file = open_safetensors(path)
    is_cache = is_mlx_cache(file.metadata)
    facts, notes = mlx_cache_facts(file) if is_cache else (None, ())
    metadata = {key: MetadataValue("string", value) for key, value in file.metadata.items()}
    size = FileSize(file.path, file.n_bytes)
    return Inspection(
        path,
        MLX_CACHE_KIND if is_cache else FileKind.SAFETENSORS,
        "safetensors",
        (size,),
        facts,
        tensors=tuple(_lines(file, 0)),
        dims_order=DIMS_SLOWEST_FIRST,
        metadata=metadata,
        notes=notes,
    )


def _lines(file: SafetensorsFile, index: int) -> list[TensorLine]:
    return [
        TensorLine(name, tensor.dtype, tensor.shape, math.prod(tensor.shape), tensor.data.nbytes, tensor.offset, index)
        for name, tensor in file.items()
    ]


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


class _Config:
    """Values of config.json that are of the expected type, or None; of models that also see or hear, the language
    part's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        language = config.get("text_config")
        self.values = {**(language if isinstance(language, dict) else {}), **config}

    def number(self, *names: str) -> int | None:
        """The first of these that is a size."""
        values = (self.values.get(name) for name in names)
        return next((value for value in values if type(value) is int and 0 <= value <= MAX_SIZE), None)

    def real(self, name: str, config: Mapping[str, Any] | None = None) -> float | None:
        value = (self.values if config is None else config).get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if abs(value) <= sys.float_info.max else None

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool | None:
        value = self.values.get(name)
        return value if isinstance(value, bool) else None

    def head_dim(self) -> int | None:
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        stated = self.number("head_dim")
        return stated or (hidden // heads if hidden and heads and hidden % heads == 0 else None)


def _facts(
    folder: Path, values: Mapping[str, Any], tensors: Sequence[TensorLine]
) -> tuple[ModelFacts, tuple[LayerShape, ...], tuple[str, ...]]:
    config = _Config(values)
    n_layers = config.number(*LAYER_COUNTS)
    n_layers = n_layers if n_layers is None or n_layers <= MAX_LAYERS else None
    shapes, notes = _shapes(config, n_layers)
    window = _window(config)
    scaling = config.values.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = next((scaling[key] for key in ("rope_type", "type") if isinstance(scaling.get(key), str)), None)
    n_heads = config.number("num_attention_heads")
    facts = ModelFacts(
        architecture=config.text("model_type"),
        name=folder.resolve().name,
        size_label=None,
        license=None,
        file_type=_quantisation(values),
        n_parameters=sum(_n_values(tensors, values)),
        vocab_size=config.number("vocab_size"),
        n_layers=n_layers,
        n_kv_layers=len(shapes) or None,
        hidden_size=config.number("hidden_size"),
        feed_forward=config.number("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.number("num_key_value_heads") or n_heads,
        head_dim_k=config.head_dim(),
        head_dim_v=config.head_dim(),
        context_length=config.number("max_position_embeddings"),
        window=window,
        n_window_layers=sum(shape.window is not None for shape in shapes) or None if window and shapes else 0,
        n_experts=config.number(*_EXPERTS) or None,
        n_experts_used=config.number("num_experts_per_tok") or None,
        tied_embeddings=config.flag("tie_word_embeddings"),
        rope=RopeFacts(
            base=config.real("rope_theta"),
            base_window=config.real("rope_local_base_freq"),
            dims=config.head_dim(),
            scaling=kind,
            factor=config.real("factor", scaling),
            original_context=None,
            has_factors=False,
        ),
        tokenizer=_tokenizer(folder),
    )
    if window and shapes and not facts.n_window_layers:
        notes = (*notes, f"which layers see a window of {window:,} keys is not known here; all are counted as full")
    return facts, shapes, notes


def _window(config: _Config) -> int | None:
    return None if config.flag("use_sliding_window") is False else config.number("sliding_window") or None


def _shapes(config: _Config, n_layers: int | None) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """As `inspection.model` has them."""
    heads = config.number("num_key_value_heads") or config.number("num_attention_heads")
    dim, window = config.head_dim(), _window(config)
    if config.number("kv_lora_rank"):
        return (), ("multi-head latent attention: its cache holds no heads, and block types do not fit it",)
    if not n_layers or not heads or not dim:
        return (), ("config.json does not give the sizes of a KV cache",)
    types = config.values.get("layer_types")
    if isinstance(types, list) and len(types) == n_layers and all(isinstance(kind, str) for kind in types):
        windowed = [kind == "sliding_attention" for kind in types]
        has_cache = [kind in _KINDS_OF_LAYERS for kind in types]
    elif any(name.startswith(_RECURRENT) for name in config.values):
        return (), ("some layers may be recurrent, and config.json does not say which: the KV cache is not stated",)
    else:
        family = (config.text("model_type") or "").removesuffix("_text")
        pattern = config.number("sliding_window_pattern") or WINDOW_PATTERN.get(family, 0)
        windowed = [pattern > 0 and (layer + 1) % pattern != 0 for layer in range(n_layers)]
        has_cache = [True] * n_layers
    notes = () if all(has_cache) else ("layers without keys and values keep a state that is not counted",)
    return tuple(
        LayerShape(heads, dim, dim, window if sees_window else None)
        for sees_window, has in zip(windowed, has_cache, strict=True)
        if has
    ), notes


def _n_values(tensors: Sequence[TensorLine], config: Mapping[str, Any]) -> list[int]:
    """Parameters of each tensor: those of packed weights as they count unpacked, and none of scales and biases."""
    names = {tensor.name for tensor in tensors}
    counts = []
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        packed = f"{module}.scales" in names
        bits = _bits(config, module) if packed and part == "weight" and tensor.type == _PACKED else None
        if bits is not None:
            counts.append(tensor.n_values * 32 // bits)
        elif not (packed and part in ("scales", "biases")):
            counts.append(tensor.n_values)
    return counts


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get("quantization")
    return value if isinstance(value, dict) else {}


def _bits(config: Mapping[str, Any], module: str) -> int | None:
    """Bits of a packed module's values: its own, or those of all."""
    own = _settings(config).get(module)
    bits = (own if isinstance(own, dict) else _settings(config)).get("bits")
    return bits if type(bits) is int and 0 < bits <= 32 else None


def _quantisation(config: Mapping[str, Any]) -> str | None:
    settings = _settings(config)
    bits, group = settings.get("bits"), settings.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return None
    own = sum(isinstance(value, dict) for value in settings.values())
    return f"{bits} bits in groups of {group}" + (f", other settings for {own} modules" if own else "")


def _tokenizer(folder: Path) -> TokenizerFacts | None:
    template = _chat_template(folder)
    has = os.path.isfile(folder / "tokenizer.json")
    if not has and template is None:
        return None
    return TokenizerFacts("tokenizer.json" if has else None, None, None, None, {}, None, None, template)


def _chat_template(folder: Path) -> int | None:
    """Its length in characters."""
    if (folder / "chat_template.jinja").is_file():
        return len(read_bytes(folder / "chat_template.jinja").decode("utf-8", "replace"))
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    return len(template) if isinstance(template, str) else None

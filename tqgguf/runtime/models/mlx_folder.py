"""An MLX safetensors folder as a model: mlx-lm's loader for the weights, the folder's own files for the rest.

mlx-lm loads lazily, so that opening reads headers only. Sizes of KV caches are asked of the model itself: one token
goes through it with caches that note shapes, and nothing is computed. Knows no model family; the tokenizer is
`folder_tokenizer`'s.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model as load_mlx_model

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, UnsupportedModelError, words_of
from tqgguf.formats.file_kind import other_kind
from tqgguf.formats.gguf.errors import readable
from tqgguf.formats.json_file import json_kind, read_json
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, ROPE_BASES
from tqgguf.formats.models.fingerprint import Fingerprint, fingerprint_folder
from tqgguf.formats.models.folder_features import MLX, check_features, mlx_settings
from tqgguf.formats.models.folder_files import check_folder_files
from tqgguf.formats.models.folder_keys import family_of, language_part
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.runtime.attention import hook
from tqgguf.runtime.layers.cpu_model import suit_cpu
from tqgguf.runtime.models.loaded_model import Form, LoadedModel, Progress, default_form
from tqgguf.runtime.tokenizers.folder_tokenizer import FolderTokenizer, load_folder_tokenizer

DEFAULT_CONTEXT = 4096  # tokens, where config.json does not say
_CONTEXT = "max_position_embeddings"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


@dataclass(frozen=True)
class FolderConfig:
    """Sizes of a folder's model. `shapes`: the layers that have a KV cache (recurrent ones have none)."""

    architecture: str
    name: str
    n_layers: int
    context_length: int
    vocab_size: int
    shapes: tuple[LayerShape, ...]
    rope_overridden: bool = False

    def layer_shapes(self) -> list[LayerShape]:
        return list(self.shapes)


class OpenFolder:
    """An MLX folder whose headers have been read.

    FormatError: a file is missing or damaged; UnsupportedModelError: mlx-lm does not know the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_folder_files(folder)
        config = read_json(folder / "config.json")
        if not isinstance(config.get("model_type"), str):
            raise FormatError(f"{folder / 'config.json'}: expected a model_type, found none; is this a model folder?")
        language = config.get("text_config") or {}
        if not isinstance(language, dict):
            raise FormatError(f"{folder / 'config.json'}: text_config: expected an object, found {json_kind(language)}")
        text = {**language, **config}  # of models that also see or hear, the language part
        if text.get("kv_lora_rank"):
            raise UnsupportedModelError(
                f"{folder}: {config['model_type']} uses multi-head latent attention (kv_lora_rank), "
                "whose cache holds no heads: not supported"
            )
        numbers = {name: _number(text, name, folder) for name in (*_LAYER_COUNTS, _CONTEXT, "vocab_size")}
        n_layers = max(numbers[name] for name in _LAYER_COUNTS)
        if n_layers > MAX_LAYERS:
            raise FormatError(f"{folder / 'config.json'}: expected at most {MAX_LAYERS} layers, found {n_layers}")
        theta = text.get("rope_theta")
        if isinstance(theta, (int, float)) and not ROPE_BASES[0] <= theta <= ROPE_BASES[1]:
            limits = f"{ROPE_BASES[0]:.3g} to {ROPE_BASES[1]:.3g}"
            raise FormatError(f"{folder / 'config.json'}: rope_theta: expected {limits}, found {theta!r:.60}")
        if config.get("model_file") is not None:
            raise UnsupportedModelError(f"{folder}: model_file: its model is code of its own, which is not run")
        _check_weights(folder)
        self._model = _open_lazily(folder, config["model_type"], _told(config, folder))
        self.config = FolderConfig(
            architecture=config["model_type"],
            name=readable(folder.resolve().name),
            n_layers=len(self._model.layers),
            context_length=numbers[_CONTEXT] or DEFAULT_CONTEXT,
            vocab_size=numbers["vocab_size"],
            shapes=_layer_shapes(self._model, folder),
        )

    @property
    def path(self) -> str:
        return str(self.folder)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the model is known by."""
        return fingerprint_folder(self.folder)

    @cached_property
    def tokenizer(self) -> FolderTokenizer:
        """The tokenizer of tokenizer.json; there before any weight is read."""
        return load_folder_tokenizer(self.folder)

    def load(self, progress: Progress | None = None, *, form: Form | None = None) -> LoadedModel:
        """Read the weights, in the device's form if none is named: `dense` unpacks whatever the folder has packed."""
        tokenizer = self.tokenizer
        if (form or default_form()) == "dense":
            _make_dense(self._model)
        parameters = [value for _, value in tree_flatten(self._model.parameters())]
        total, done = sum(value.nbytes for value in parameters), 0
        try:
            for value in parameters:
                mx.eval(value)
                done += value.nbytes
                if progress is not None:
                    progress(done, total)
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"{self.folder}: weights cannot be read: {_one_line(error)}") from error
        suit_cpu(self._model)
        hook.install()
        return LoadedModel(self._model, tokenizer, self.config, self.fingerprint)


def _number(config: dict[str, Any], name: str, folder: Path) -> int:
    """A size of config.json; 0 where it is not given."""
    value = config.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise FormatError(f"{folder / 'config.json'}: {name}: expected a number up to {MAX_SIZE}, found {value!r:.60}")
    return value


def _check_weights(folder: Path) -> None:
    """Name files of other kinds that bear a weight file's name, which mlx would misread."""
    for path in sorted(folder.glob("model*.safetensors")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            head = file.read(64)
            other = None if head[8:9] == b"{" else other_kind(head)
            if other is not None:
                raise FormatError(f"{path}: expected a safetensors file, found {other.what}")


def _told(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What mlx-lm's class is told beside config.json. FormatError, UnsupportedModelError: a setting that is none, or
    that the class would drop.
    """
    path, family = str(folder / "config.json"), family_of(config["model_type"])
    if family is None:
        return {}  # a class whose keys are not known here
    settings = language_part(config, path)
    check_features(family, settings, path, MLX)
    if family == "gemma3" and settings.get("tie_word_embeddings") is False and not _has_output(folder):
        raise FormatError(f"{path}: tie_word_embeddings: expected true, as there is no lm_head.weight, found false")
    told = mlx_settings(family, settings)
    return {"text_config": {**config["text_config"], **told}} if told and config.get("text_config") else told


def _has_output(folder: Path) -> bool:
    return any(
        name.endswith("lm_head.weight")
        for file in sorted(folder.glob("model*.safetensors"))
        for name in open_safetensors(file)
    )


def _open_lazily(folder: Path, model_type: str, told: dict[str, Any]) -> Any:
    try:
        model, _ = load_mlx_model(folder, lazy=True, model_config=told)
    except FileNotFoundError as error:
        raise FormatError(f"{folder}: expected weights in model*.safetensors, found none") from error
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{folder}: expected JSON in its configuration files, found a mistake: {words_of(error)}"
        ) from error
    except Exception as error:  # a stranger's configuration meets a hundred model classes: it can fail in any way
        if f"Model type {model_type} not supported" in str(error):
            raise UnsupportedModelError(f"{folder}: mlx-lm does not know the model type {model_type!r}") from error
        raise FormatError(f"{folder}: mlx-lm cannot load it: {_one_line(error)}") from error
    return model


class _ShapeCache(KVCache):
    """A cache that notes the shapes of keys and values, and holds nothing."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.shapes = keys.shape, values.shape
        return keys, values


def _layer_shapes(model: Any, folder: Path) -> tuple[LayerShape, ...]:
    """The KV shape of every attention layer, from a token that is never computed."""
    caches: list[Any] = []
    windows: list[int | None] = []
    for cache in mlx_prompt_cache(model):
        is_window = type(cache) is RotatingKVCache
        caches.append(_ShapeCache() if is_window or type(cache) is KVCache else cache)
        windows.append(cache.max_size if is_window else None)
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as error:  # as in _open_lazily
        raise UnsupportedModelError(f"{folder}: mlx-lm's model cannot be called: {_one_line(error)}") from error
    return tuple(
        LayerShape(keys[1], keys[3], values[3], window)
        for cache, window in zip(caches, windows, strict=True)
        if isinstance(cache, _ShapeCache) and cache.shapes is not None
        for keys, values in [cache.shapes]
    )


# Packed modules -> the dense one that takes the same place.
_DENSE: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}


def _make_dense(model: nn.Module) -> None:
    """Make every weight float32, lazily. Scales are widened first, so that unpacking rounds nothing."""
    places = []
    for path, module in model.named_modules():
        dense = _DENSE.get(type(module))
        if dense is None:
            continue
        is_affine = module.mode == "affine"
        weight = mx.dequantize(
            module.weight,
            module.scales.astype(mx.float32) if is_affine else module.scales,
            module.biases.astype(mx.float32) if is_affine else None,
            module.group_size,
            module.bits,
            module.mode,
        )
        place = dense(*weight.shape[::-1], **({"bias": "bias" in module} if dense is not nn.Embedding else {}))
        place.weight = weight
        if "bias" in module:
            place.bias = module.bias
        places.append((path, place))
    model.update_modules(tree_unflatten(places))
    model.set_dtype(mx.float32)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {words_of(error)}"

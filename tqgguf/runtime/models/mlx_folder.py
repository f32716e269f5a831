"""An MLX safetensors folder as a model: mlx-lm's loader for the weights, the folder's own files for the rest.

mlx-lm loads lazily, so that opening reads headers only. Sizes of KV caches are asked of the model itself: one token
goes through it with caches that note shapes, and nothing is computed. Knows no model family; the tokenizer is
`folder_tokenizer`'s.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, UnsupportedModelError, words_of
from tqgguf.formats.models.fingerprint import Fingerprint, fingerprint_folder
from tqgguf.formats.models.folder_asked import Asked
from tqgguf.formats.models.folder_loading import check_folder
from tqgguf.formats.wording import readable
from tqgguf.runtime.attention import hook
from tqgguf.runtime.layers.cpu_model import suit_cpu
from tqgguf.runtime.models.folder_classes import classes_for, unread_notices
from tqgguf.runtime.models.loaded_model import Form, LoadedModel, Progress, default_form
from tqgguf.text.folder_tokenizer import FolderTokenizer, load_folder_tokenizer

DEFAULT_CONTEXT = 4096  # tokens, where config.json does not say


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
    lacks_window: bool = False

    def layer_shapes(self) -> list[LayerShape]:
        return list(self.shapes)


class OpenFolder:
    """An MLX folder whose headers have been read.

    FormatError: a file is missing or damaged; UnsupportedModelError: mlx-lm does not know the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        header = check_folder(folder)
        asked = header.asked
        self._model = _open_lazily(folder, header.model_type, asked)
        self._notices = (*asked.notices, *unread_notices(self._model, header.model_type, asked))
        self.config = FolderConfig(
            architecture=header.model_type,
            name=readable(folder.resolve().name),
            n_layers=len(self._model.layers),
            context_length=header.context_length or DEFAULT_CONTEXT,
            vocab_size=header.vocab_size,
            shapes=_layer_shapes(self._model, folder),
            lacks_window=asked.window is not None,
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
        tokenizer = load_folder_tokenizer(self.folder)
        tokenizer.warnings[:0] = self._notices
        return tokenizer

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


class _GlobbedFolder(PosixPath):
    """A folder whose name mlx-lm makes a pattern of, where `[`, `*` and `?` of the name are to stand for themselves."""

    def __truediv__(self, name: str | os.PathLike[str]) -> _GlobbedFolder:
        folder = _GlobbedFolder(glob.escape(str(self))) if "*" in os.fspath(name) else self
        return super(_GlobbedFolder, folder).__truediv__(name)


def _open_lazily(folder: Path, model_type: str, asked: Asked) -> Any:
    from mlx_lm.utils import load_model  # here, since it takes long: it imports transformers

    try:
        model, _ = load_model(
            _GlobbedFolder(folder), lazy=True, model_config=dict(asked.told), get_model_classes=classes_for(asked)
        )
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

"""From a path to a model that can be evaluated: a GGUF file (any shard) or an MLX safetensors folder.

`open_model` reads headers only, so that bad requests are refused before any weight is read; `load` reads the weights.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.models.embedded import embedded_model
from tqgguf.formats.models.fingerprint import Fingerprint, fingerprint_gguf
from tqgguf.formats.models.loading import check_model, reading_vocabulary
from tqgguf.formats.models.model_path import model_path
from tqgguf.runtime.attention import hook
from tqgguf.runtime.backends import gpu_launcher
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.layers.cpu_model import suit_cpu
from tqgguf.runtime.models.block_model import read_block_model
from tqgguf.runtime.models.gguf_model import activations, read_model, tensor_places
from tqgguf.runtime.models.loaded_model import Form, LoadedModel, Progress, default_form
from tqgguf.runtime.models.mlx_folder import OpenFolder
from tqgguf.runtime.native.library import load_library
from tqgguf.text.gguf_tokenizer import Tokenizer, load_tokenizer


class LoadedGguf(LoadedModel):
    """A model of one of the classes in `architectures`, whose output layer can be applied to some rows alone."""

    def outputs(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.model.model(tokens, cache)

    def logits(self, outputs: mx.array) -> mx.array:
        head = self.model.lm_head if "lm_head" in self.model else self.model.model.embed_tokens.as_linear
        return head(outputs)


class OpenModel:
    """A GGUF model whose header has been read and found servable. RoPE parameters: `models.config.override_rope`."""

    def __init__(
        self, file: GGUFFile, *, rope_freq_base: float | None = None, rope_freq_scale: float | None = None
    ) -> None:
        self.file = file
        self.config = check_model(file, rope_freq_base=rope_freq_base, rope_freq_scale=rope_freq_scale)
        self._names = tensor_places(self.config)

    @property
    def path(self) -> str:
        return self.file.path

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the model is known by, with the RoPE parameters that are in use."""
        config = self.config
        changed = {"freq_base": config.rope_theta, "scaling.factor": config.rope_factor}
        return fingerprint_gguf(self.file, changed if config.rope_overridden else None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe; there before any weight is read."""
        return reading_vocabulary(self.file, lambda: load_tokenizer(self.file.metadata))

    def load(
        self, progress: Progress | None = None, *, form: Form | None = None, launcher: Launcher | None = None
    ) -> LoadedModel:
        """Read the weights. FormatError: a weight's values are not finite.

        If no form is named it is the device's: on a CPU dense, but with the matrices left in the file, which must then
        stay as it is (see `packed_rows`). A form that is named holds for all weights. launcher: of the kernels for
        blocks, instead of this device's.
        """
        tokenizer = self.tokenizer
        chosen = form or default_form()
        library = load_library() if form is None and chosen == "dense" else None
        if chosen == "blocks" and activations(self.file, self._names) == mx.float32:
            model = read_block_model(self.file, self.config, self._names, launcher or gpu_launcher(), progress)
        else:
            model = read_model(
                self.file, self.config, self._names, "packed" if chosen == "blocks" else chosen, progress, library
            )
        suit_cpu(model)
        hook.install()
        return LoadedGguf(model, tokenizer, self.config, self.fingerprint)


def open_model(
    path: str | os.PathLike[str] | None = None,
    *,
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
) -> OpenModel | OpenFolder:
    """Open a model and check from its headers alone that it can be served.

    path: a GGUF, any shard of a split one, a folder that holds one whole set of shards, or an MLX folder; the embedded
    default model if there is none. FormatError and TqggufError: the file is damaged, or not there. RequestError: no
    path of a model (see `model_path`). UnsupportedModelError: it is sound, but not served.
    """
    path = model_path(path or embedded_model())
    if not os.path.isdir(path):
        return OpenModel(open_gguf(path), rope_freq_base=rope_freq_base, rope_freq_scale=rope_freq_scale)
    if rope_freq_base or rope_freq_scale:
        raise RequestError(f"{path}: RoPE of an MLX folder is set in its config.json (rope_theta, rope_scaling)")
    return OpenFolder(Path(path))


def load_model(path: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> LoadedModel:
    """Open and load a model; the embedded default one if no path is given."""
    return open_model(path).load(progress)

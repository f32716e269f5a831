"""A GGUF as a folder that `mlx_lm.load` opens: weights in MLX's packed forms where those are exact, config, tokenizer.

Which types fit MLX's forms is `weights`' business, what a model needs `architectures`'. Weights are read, repacked and
written one by one. Of what MLX cannot hold exactly, the report says how far its values are from the file's.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tokenizers
from numpy.typing import NDArray

from tqgguf.conversion.tokenizer_write import tokenizer_backend, tokenizer_settings
from tqgguf.formats.atomic import check_space, new_folder
from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.gguf.finite import first_non_finite
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.loading import FACTORS, refuse, served_defects
from tqgguf.formats.safetensors_write import SafetensorsStream
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.packed_rows import EMBEDDING
from tqgguf.runtime.models.architectures import config_arguments, find_architecture
from tqgguf.runtime.models.gguf_model import activations, tensor_places
from tqgguf.runtime.models.load import OpenModel

_HEADER_BYTES = 1024  # of a parameter's entries in the header; three of 200 at most
_DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}

# (factor, low_freq_factor, high_freq_factor, original context) of the llama 3 family; its GGUFs hold only the result
_LLAMA3_SCALINGS = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


@dataclass(frozen=True)
class Written:
    """What became of one tensor. form: in words. n_bytes: in the folder. error: the largest distance of a value from
    the GGUF's, 0 if exact.
    """

    name: str
    parameter: str
    type_name: str
    form: str
    n_bytes: int
    error: float

    @property
    def is_exact(self) -> bool:
        return self.error == 0


def write_mlx_folder(file: GGUFFile, path: str, progress: Callable[[int, int], None] | None = None) -> list[Written]:
    """Make the folder `path`, which must not be there yet; returns what became of each tensor.

    UnsupportedModelError: an architecture, tensor or tokenizer that such a folder cannot hold; FormatError: values that
    are not finite; RequestError and TqggufError as `atomic.new_folder`.
    """
    opened, config, names, backend = _checked(file)
    check_space(path, sum(weights.folder_bytes(file.tensors[name]) for name in names))
    with new_folder(path) as folder:
        with (folder / "model.safetensors").open("wb") as out:
            written, quantization = _write_weights(file, opened, names, out, progress)
        _write_json(folder / "config.json", config | quantization)
        backend.save(str(folder / "tokenizer.json"))
        _write_json(
            folder / "tokenizer_config.json", tokenizer_settings(opened.tokenizer, opened.config.context_length)
        )
    return written


def examine_mlx_folder(file: GGUFFile, progress: Callable[[int, int], None] | None = None) -> list[Written]:
    """What `write_mlx_folder` would make of each tensor: all weights are read, nothing is written. Errors as there."""
    opened, _, names, _ = _checked(file)
    return _write_weights(file, opened, names, _Nowhere(), progress)[0]


def _checked(file: GGUFFile) -> tuple[OpenModel, dict[str, Any], dict[str, str], tokenizers.Tokenizer]:
    """The model, its config.json without what is packed, its parameters by their tensors, its tokenizer."""
    opened = OpenModel(file)
    refuse(served_defects(file))
    config = _config(opened)
    backend = tokenizer_backend(file.metadata, opened.tokenizer)
    return opened, config, tensor_places(opened.config), backend


class _Nowhere(io.RawIOBase):
    """A file that drops what is written to it."""

    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset


def _config(opened: OpenModel) -> dict[str, Any]:
    """config.json without what is packed."""
    config, tokenizer = opened.config, opened.tokenizer
    row = find_architecture(config.architecture)
    values: dict[str, Any] = {"model_type": row.module, **config_arguments(config)}
    if FACTORS in opened.file.tensors:
        values["rope_scaling"] = _rope_scaling(opened)
    ends = sorted(tokenizer.end_of_generation, key=lambda i: (i != tokenizer.eos_id, i))
    return values | {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }


def _rope_scaling(opened: OpenModel) -> dict[str, Any]:
    """The settings whose factors per pair are those of the file; UnsupportedModelError where none are known."""
    found = weights.dense(opened.file, FACTORS)
    config = opened.config
    wavelengths = 2 * np.pi * config.rope_theta ** (np.arange(0, config.rope_dim, 2) / config.rope_dim)
    for factor, low, high, context in _LLAMA3_SCALINGS:
        smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise UnsupportedModelError(
        f"{opened.path}: tensor {FACTORS}: its factors are of no scaling that config.json could name"
    )


def _write_weights(
    file: GGUFFile,
    opened: OpenModel,
    names: dict[str, str],
    out: Any,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Written], dict[str, Any]]:
    dtype = activations(file, names)
    stream = SafetensorsStream(out, _HEADER_BYTES * (len(names) + 1))
    written: list[Written] = []
    forms: dict[str, Any] = {}
    done, total = 0, sum(file.tensors[name].n_bytes or 0 for name in names)
    for name, parameter in names.items():
        info, path, at = file.tensors[name], parameter.removesuffix(".weight"), stream.n_bytes
        packed = weights.packed(file, name)
        if packed is not None and (packed.mode == "affine" or path != EMBEDDING):  # mlx looks the others up in bfloat16
            forms[path] = {"group_size": packed.group_size, "bits": packed.bits, "mode": packed.mode}
            for field in ("weight", "scales", "biases"):
                array = getattr(packed, field)
                if array is not None:
                    _add(stream, f"{path}.{field}", np.array(array))
            form, error = f"{packed.mode}, {packed.bits} bits in groups of {packed.group_size}", 0.0
        else:
            form, error = _write_dense(stream, file, opened, name, parameter, dtype)
        written.append(Written(name, parameter, info.type_name, form, stream.n_bytes - at, error))
        file.forget(name, 0, info.n_bytes or 0)
        done += info.n_bytes or 0
        if progress is not None:
            progress(done, total)
    stream.finish({"format": "mlx"})
    if not forms:
        return written, {}
    usual = Counter(json.dumps(form, sort_keys=True) for form in forms.values()).most_common(1)[0][0]
    quantization = {**json.loads(usual), **forms}
    return written, {"quantization": quantization, "quantization_config": quantization}


def _write_dense(
    stream: SafetensorsStream, file: GGUFFile, opened: OpenModel, name: str, parameter: str, dtype: mx.Dtype
) -> tuple[str, float]:
    """Write a tensor as floats; returns the form and the largest error."""
    info, row = file.tensors[name], find_architecture(opened.config.architecture)
    if info.type_name in ("F16", "BF16"):
        raw = file.raw(name)
        if first_non_finite(raw, 0, len(raw), info.ggml_type) is not None:
            weights.check_values(file, name)  # raises, with the value
        stream.add(parameter, info.type_name, info.shape, raw.data)
        return info.type_name, 0.0
    values = weights.dense(file, name)
    if row.norm_offset and "norm" in name:
        values = values - np.float32(row.norm_offset)
    wanted = dtype if dtype != mx.float32 or info.type_name == "F32" else mx.float16
    if wanted == mx.float16 and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        wanted = mx.float32
    array = mx.array(values).astype(wanted)
    error = float(mx.abs(array.astype(mx.float32) - mx.array(values)).max()) if values.size else 0.0
    bits: NDArray[Any] = np.array(array.view(mx.uint16) if wanted == mx.bfloat16 else array)
    stream.add(parameter, _DTYPES[wanted], info.shape, _bytes(bits))
    return _DTYPES[wanted], error


def _add(stream: SafetensorsStream, name: str, array: NDArray[Any]) -> None:
    dtype = {"uint32": "U32", "uint8": "U8", "float32": "F32"}[array.dtype.name]
    stream.add(name, dtype, array.shape, _bytes(array))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""From a GGUF's tensors to an mlx-lm model: what the file must hold, and how its weights get into the model's places.

On a CPU matrices stay in the file, where the C library multiplies their rows; everything else becomes float32. Packed,
as on a Mac, weights keep their form: matrices stay packed where mlx has an exact form and are float16 else, between
float32 activations; a model whose matrices are all F16, or all BF16, runs in that type. `block_model` is for NVIDIA.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.config import ModelConfig
from tqgguf.formats.models.loading import FACTORS
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.matrices import InputEmbedding, put_half, put_packed
from tqgguf.runtime.layers.packed_rows import EMBEDDING, PackedRows, put_rows, rows_of
from tqgguf.runtime.layers.rope import FactoredRoPE
from tqgguf.runtime.layers.row_layers import put_row_layers
from tqgguf.runtime.models.architectures import Architecture, build_model, find_architecture, parameter_names
from tqgguf.runtime.models.loaded_model import Form, Progress
from tqgguf.runtime.native.library import Library

WHOLE_TYPES = {"F16": mx.float16, "BF16": mx.bfloat16}  # matrices of one of these alone: the model runs in it


def tensor_places(config: ModelConfig) -> dict[str, str]:
    """Tensor name -> parameter path, for every tensor of a model that `formats.models.loading` has found servable."""
    return parameter_names(config, (path for path, _ in tree_flatten(build_model(config).parameters())))


def read_model(
    file: GGUFFile,
    config: ModelConfig,
    names: dict[str, str],
    form: Form,
    progress: Progress | None,
    library: Library | None = None,
) -> Any:
    """The model with its weights; `names` as `tensor_places` returns it. FormatError: values that are not finite.

    library: who multiplies rows that stay in the file; None leaves none there.
    """
    row = find_architecture(config.architecture)
    model = build_model(config)
    is_packed = form == "packed"
    dtype = activations(file, names) if is_packed else mx.float32
    loaded: list[tuple[str, mx.array]] = []
    packed: dict[str, weights.Packed] = {}
    half: set[str] = set()
    in_file: dict[str, PackedRows] = {}
    total, done = sum(file.tensors[name].n_bytes or 0 for name in names), 0
    for name, parameter in names.items():
        path, info = parameter.removesuffix(".weight"), file.tensors[name]
        found = weights.packed(file, name) if is_packed else None
        rows = None if library is None else rows_of(file, name, path, config.tied_embeddings, library)
        if rows is not None:
            in_file[path] = rows
        elif found is not None:
            packed[path] = found
            fields = {"weight": found.weight, "scales": found.scales, "biases": found.biases}
            loaded += [(f"{path}.{field}", value) for field, value in fields.items() if value is not None]
        else:
            if is_packed and len(info.shape) == 2 and info.type_name != "F32":
                array = weights.half(file, name, mx.float16 if dtype == mx.float32 else dtype)
                if dtype == mx.float32:
                    half.add(path)
            else:
                values = weights.dense(file, name)
                if row.norm_offset and "norm" in name:
                    values = values - np.float32(row.norm_offset)
                array = mx.array(values).astype(dtype)
                del values
            mx.eval(array)  # now, so that what it was made from goes before the next tensor comes
            loaded.append((parameter, array))
        done += info.n_bytes or 0
        if progress is not None:
            progress(done, total)
    put_packed(model, packed)
    put_rows(model, in_file)
    model.load_weights(loaded, strict=True)
    put_half(model, half)
    form_of_inputs = packed.get(EMBEDDING)
    in_mx_form = form_of_inputs is not None and form_of_inputs.mode != "affine"
    set_input_embedding(model, row.input_scale(config), dtype, in_mx_form)
    if FACTORS in file.tensors:
        set_rope_factors(model, config, row, weights.dense(file, FACTORS))
    mx.eval(model.parameters())
    if library is not None:
        put_row_layers(model, library, row.activation, row.norm_offset)
    return model.eval()


def activations(file: GGUFFile, names: dict[str, str]) -> mx.Dtype:
    """The type that a model of compact weights computes in: float32 unless all matrices are of one half type."""
    types = {file.tensors[name].type_name for name in names if len(file.tensors[name].shape) == 2}
    return WHOLE_TYPES.get(types.pop(), mx.float32) if len(types) == 1 else mx.float32


def set_input_embedding(model: Any, scale: float, dtype: mx.Dtype, in_mx_form: bool) -> None:
    """Have token embeddings scaled and given in `dtype`. in_mx_form: mlx unpacks them, to bfloat16."""
    place = model.model
    if scale != 1.0 or in_mx_form:
        place.embed_tokens = InputEmbedding(place.embed_tokens, scale, dtype)


def set_rope_factors(model: Any, config: ModelConfig, row: Architecture, factors: np.ndarray) -> None:
    """Give every layer RoPE with the file's factors [rope_dim / 2]."""
    rope = FactoredRoPE(config, row.rope_layout == "pairs", factors)
    for layer in model.layers:
        layer.self_attn.rope = rope

"""A GGUF's tensors into the places of an mlx-lm model on a GPU: matrices in the file's blocks, activations of half
precision.

Activations are bf16, which has float32's range. Norms whose weights that
type does not hold exactly stay float32. Matrices that the kernels do not read are floats of their own type or f16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.finite import SCALES
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.formats.models.config import ModelConfig
from tqgguf.formats.models.loading import FACTORS
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.matrices import TILE_ROWS, arrange, is_multiplied, stacked
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.block_layers import put_block_layers
from tqgguf.runtime.layers.block_matrices import BlockEmbedding, BlockOutput, BlockRows
from tqgguf.runtime.layers.matrices import put_half
from tqgguf.runtime.layers.packed_rows import EMBEDDING
from tqgguf.runtime.models.architectures import build_model, find_architecture
from tqgguf.runtime.models.gguf_model import set_input_embedding, set_rope_factors
from tqgguf.runtime.models.loaded_model import Progress


def read_block_model(
    file: GGUFFile, config: ModelConfig, names: dict[str, str], launcher: Launcher, progress: Progress | None
) -> Any:
    """The model with its weights; `names` as `gguf_model.tensor_places` returns it. FormatError: values that are not
    finite."""
    row, model = find_architecture(config.architecture), build_model(config)
    dtype = mx.bfloat16
    reader = _BlockReader(file, launcher, dtype, progress, sum(file.tensors[name].n_bytes or 0 for name in names))
    modules, loaded = dict(model.named_modules()), []
    half: set[str] = set()
    for name, parameter in names.items():
        path, _, field = parameter.rpartition(".")
        info = file.tensors[name]
        if field == "weight" and is_multiplied(info.type_name, info.shape):
            reader.names[path] = name
            modules[path].pop("weight")
            continue
        if len(info.shape) == 2:
            array = _float_matrix(file, info)
            if array.dtype != dtype:
                half.add(path)
        else:
            array = mx.array(weights.dense(file, name) - np.float32(row.norm_offset if "norm" in name else 0.0))
            narrow = array.astype(dtype)
            if field != "bias" and mx.all(narrow.astype(mx.float32) == array).item():
                array = narrow
        mx.eval(array)
        loaded.append((parameter, array))
        reader.count(info)
    model.load_weights(loaded, strict=True)
    put_half(model, half, dtype)
    if FACTORS in file.tensors:
        set_rope_factors(model, config, row, weights.dense(file, FACTORS))
    reader.biases = {path: module.bias for path, module in modules.items() if "bias" in module}
    taken = put_block_layers(model, reader, row.activation, row.norm_offset)
    _put_blocks(model, reader, set(reader.names) - taken)
    set_input_embedding(model, row.input_scale(config), dtype, in_mx_form=False)
    mx.eval(model.parameters())
    return model.eval()


def _float_matrix(file: GGUFFile, info: TensorInfo) -> mx.array:
    """A matrix that the kernels do not read: as it is if it is of a float type, else as f16."""
    if info.type_name == "F32":
        return mx.array(weights.dense(file, info.name))
    return weights.half(file, info.name, mx.bfloat16 if info.type_name == "BF16" else mx.float16)


_IN_PLACE: dict[str, type[nn.Module]] = {EMBEDDING: BlockEmbedding, "lm_head": BlockOutput}


def _put_blocks(model: Any, reader: _BlockReader, paths: set[str]) -> None:
    places: list[tuple[str, nn.Module]] = []
    for path in paths:
        rows = reader.read(path)
        places.append((path, _IN_PLACE[path](rows) if path in _IN_PLACE else rows))
    model.update_modules(tree_unflatten(places))


class _BlockReader:
    """A `block_layers.Reader`. names: which tensor the matrix of a module is; biases: of those that have one."""

    def __init__(
        self, file: GGUFFile, launcher: Launcher, dtype: mx.Dtype, progress: Progress | None, total: int
    ) -> None:
        self._file, self._launcher, self._dtype = file, launcher, dtype
        self._progress, self._total, self._done = progress, total, 0
        self.names: dict[str, str] = {}
        self.biases: dict[str, mx.array] = {}

    def count(self, *infos: TensorInfo) -> None:
        """Tell the progress that these tensors have been read."""
        self._done += sum(info.n_bytes or 0 for info in infos)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def serves(self, path: str) -> bool:
        return path in self.names

    def joins(self, *paths: str, in_turns: bool = False) -> bool:
        infos = [self._file.tensor(self.names[path]) for path in paths]
        kinds = {(info.ggml_type, info.shape[1], info.shape[0] if in_turns else 0) for info in infos}
        return len(kinds) == 1 and all(info.shape[0] % TILE_ROWS == 0 for info in infos)

    def read(self, *paths: str, gate: str | None = None) -> BlockRows:
        infos = [self._file.tensor(self.names[path]) for path in paths]
        blocks = [self._blocks(info) for info in infos]
        joined = blocks[0] if len(blocks) == 1 else stacked(blocks, in_turns=gate is not None)
        matrix = arrange(self._launcher, infos[0].ggml_type, infos[0].shape[1], joined)
        self._launcher.wait()
        mx.eval(matrix.planes)
        self.count(*infos)
        return BlockRows(self._launcher, matrix, self._dtype, self._bias(paths, infos), gate)

    def _bias(self, paths: Sequence[str], infos: Sequence[TensorInfo]) -> mx.array | None:
        if not any(path in self.biases for path in paths):
            return None
        shapes = zip(paths, infos, strict=True)
        return mx.concatenate([self.biases.get(path, mx.zeros(info.shape[:1])) for path, info in shapes])

    def _blocks(self, info: TensorInfo) -> mx.array:
        """A matrix's blocks on the device. FormatError: a scale is not finite."""
        blocks = mx.array(self._file.array(info.name))
        bits, places = SCALES[info.type_name]
        size = bits.dtype.itemsize
        of_block = blocks.reshape(-1, GGML_TYPES[info.ggml_type].block_bytes)
        for at in places:
            scales = mx.contiguous(of_block[:, at : at + size])
            numbers = scales if size == 1 else scales.view(mx.uint16)
            if mx.any((numbers & bits.mask) == bits.mask).item():
                raise FormatError(
                    f"{self._file.path}: tensor {info.name}: expected finite values, found a scale that is not; "
                    "the file is damaged",
                    offset=info.offset,
                )
        return blocks

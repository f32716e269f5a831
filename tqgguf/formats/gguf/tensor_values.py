"""Values of a GGUF's tensors in float32, a run of rows at a time, by gguf-py's decoders.

Whether values are finite, and what they are good for, is whoever asks' business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.types import GGML_TYPES, ggml_type_name

_DENSE = ("F32", "F16", "BF16")


@cache
def _decoders() -> dict[int, Any]:
    """Type id -> gguf-py's decoder of it. Which types there are depends on gguf-py's version."""
    import gguf  # lazily: opening files needs no decoder

    return {i: getattr(gguf.quants, t.name) for i, t in GGML_TYPES.items() if hasattr(gguf.quants, t.name)}


def can_decode(ggml_type: int) -> bool:
    """Whether `decode` can read tensors of this type."""
    return ggml_type_name(ggml_type) in _DENSE or ggml_type in _decoders()


def undecodable(file: GGUFFile, info: TensorInfo) -> UnsupportedModelError:
    """The error for a tensor of a type that `decode` cannot read."""
    return UnsupportedModelError(f"{file.path}: tensor {info.name} is of {info.type_name}, which cannot be decoded")


def decode(info: TensorInfo, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of a tensor as `GGUFFile.array` gives them, [n, ...], to float32 [n, columns], whatever their values are."""
    if info.type_name == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if info.ggml_type in _decoders():
        return _decoders()[info.ggml_type].dequantize(stored)
    return stored.astype(np.float32)


def row_groups(shape: tuple[int, ...], n_values: int) -> Iterator[slice]:
    """Runs of rows of at most n_values values, of one row at least."""
    step = max(1, n_values // max(shape[-1], 1))
    for start in range(0, shape[0], step):
        yield slice(start, start + step)

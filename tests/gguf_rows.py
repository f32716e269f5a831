"""Matrices in the types whose rows the C library multiplies: random ones, and their values by gguf-py."""

from __future__ import annotations

import gguf
import numpy as np
from gguf_builder import Tensor

from tqgguf.formats.gguf.types import GGML_TYPES

NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
FLOATS = ("F32", "F16", "BF16")
SCALES_AT = {  # bytes of a block where f16 scales begin
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
SERVED = (*FLOATS, *SCALES_AT)


def matrix(type_name: str, n_rows: int, n: int) -> Tensor:
    """Any bytes as codes, with scales of either sign around a hundredth."""
    rng = np.random.default_rng(NUMBERS[type_name])
    if type_name in FLOATS:
        values = rng.standard_normal((n_rows, n)).astype(np.float32)
        data = gguf.quantize(values, gguf.GGMLQuantizationType[type_name]).tobytes()
    else:
        kind = GGML_TYPES[NUMBERS[type_name]]
        blocks = rng.integers(0, 256, (n_rows, n // kind.block_size, kind.block_bytes), dtype=np.uint8)
        for at in SCALES_AT[type_name]:
            scales = rng.normal(0, 0.01, (*blocks.shape[:2], 1)).astype("<f2")
            blocks[..., at : at + 2] = scales.view(np.uint8)
        data = blocks.tobytes()
    return Tensor((n_rows, n), NUMBERS[type_name], data)


def float64(tensor: Tensor) -> np.ndarray:
    """gguf-py's values of a tensor."""
    kind = GGML_TYPES[tensor.type_id]
    stored = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    return gguf.dequantize(stored, gguf.GGMLQuantizationType[kind.name]).astype(np.float64)

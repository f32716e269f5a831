"""Weights as iq4_nl: the bytes of llama-quantize, whose search for a scale the encoder of caches lacks."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from tqgguf.conversion.iq4_nl_search import encode_searched
from tqgguf.conversion.row_encoding import in_numpy
from tqgguf.formats.blocks.codec import make_codec
from tqgguf.formats.errors import EncodeError

RECORDED = json.loads((Path(__file__).parent / "data" / "iq4_nl_searched.json").read_text())["blocks"]


def blocks() -> np.ndarray:
    """float32 [64, 32], from bits that numpy promises never to change."""
    raw = np.random.PCG64(4).random_raw(64 * 32) >> np.uint64(40)
    x = (raw.astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(64, 32)
    x[8:16] *= x[8:16] * x[8:16]
    x[16:24] = np.round(x[16:24] * 4) / 4
    x[24:32] *= np.float32(1e-12)
    x[32:40, 1:] *= np.float32(0.01)
    x[40:48, ::2] = 0
    x[48:56] = x[48:56].astype(np.float16)
    x[56] = 0
    x[57] = -0.75
    x[58] *= np.float32(1e-15)
    x[59] *= np.float32(60000)
    return x


def error(x: np.ndarray, encoded: np.ndarray) -> np.ndarray:
    """What the search makes small, of each block, in float64."""
    values = gguf.dequantize(encoded, gguf.GGMLQuantizationType.IQ4_NL).astype(np.float64)
    return (x.astype(np.float64) ** 2 * (x - values) ** 2).sum(axis=1)


def test_blocks_are_llama_quantizes_byte_by_byte() -> None:
    found = [block.tobytes().hex() for block in encode_searched(blocks())]
    assert found == RECORDED


def test_a_block_is_the_same_in_whatever_company() -> None:
    x = blocks()
    together = encode_searched(np.tile(x, (70, 1)))
    assert all(encode_searched(block[None]).tobytes() == together[i].tobytes() for i, block in enumerate(x))
    assert np.array_equal(together, np.tile(together[:64], (70, 1)))


def test_the_search_is_worth_it() -> None:
    x = blocks()[:24]
    plain = make_codec("iq4_nl", 32, None).encode(x)
    assert error(x, encode_searched(x)).sum() < 0.9 * error(x, plain).sum()


def test_values_beyond_all_scales_stay_finite() -> None:
    for factor in (1e10, 1e30, 3e38):
        found = encode_searched(blocks()[:8] * np.float32(factor))
        assert np.isfinite(gguf.dequantize(found, gguf.GGMLQuantizationType.IQ4_NL)).all()


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(EncodeError, match=r"found nan at position \[1, 40\]"):
        in_numpy("iq4_nl", np.where(np.arange(128).reshape(2, 64) == 104, np.nan, 1).astype(np.float16))

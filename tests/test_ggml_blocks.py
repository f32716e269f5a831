"""Float types and ggml's quantised types have gguf-py's bytes and values; those of ggml's C code: test_spec_blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import EncodeError

QUANTISED = tuple(name for name, t in BLOCK_TYPES.items() if t.family == "ggml")
IN_GGUF_PY = tuple(name for name in QUANTISED if name != "iq4_nl")  # gguf-py cannot encode iq4_nl


def ggml_id(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(BLOCK_TYPES[name].ggml_type)


@pytest.mark.parametrize("name", IN_GGUF_PY)
def test_bytes_are_those_of_gguf_py(name):
    x = np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32)
    x[1000:] *= np.float32(10) ** np.random.default_rng(1).integers(-4, 3, (2000, 1)).astype(np.float32)
    np.testing.assert_array_equal(resolve_codec(name, 32, "k").encode(x), gguf.quants.quantize(x, ggml_id(name)))


@pytest.mark.parametrize("name", QUANTISED)
def test_any_block_decodes_to_gguf_pys_values(name):
    codec, rng = resolve_codec(name, 32, "v"), np.random.default_rng(2)
    scales = rng.standard_normal((5000, codec.n_scales)).astype(np.float16)
    blocks = codec.join(rng.integers(0, 256, (5000, codec.code_bytes), np.uint8), scales)
    np.testing.assert_array_equal(codec.decode(blocks), gguf.quants.dequantize(blocks, ggml_id(name)))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("q8_0", 4e-5), ("q5_1", 1.6e-3), ("q5_0", 2e-3), ("q4_1", 6.6e-3), ("q4_0", 8e-3), ("iq4_nl", 6.6e-3)],
)
def test_distortion_of_unit_gaussians(name, limit):
    codec = resolve_codec(name, 128, "k")
    x = np.random.default_rng(3).standard_normal((2000, 128)).astype(np.float32)
    assert ((codec.decode(codec.encode(x)) - x) ** 2).sum() / (x**2).sum() <= limit


def test_q4_0_by_hand():
    """The value of largest magnitude, 8, becomes -8 times the scale -1; value j and value j + 16 share a byte."""
    x = [8, -7, 0, 1, *[0] * 12, -1, 2, *[0] * 14]
    expected = "00bc" + "90" + "6f" + "88" + "87" + "88" * 12  # codes 8 - x: 0 15 8 7 ... and 9 6 8 8 ...
    assert resolve_codec("q4_0", 32, "k").encode(np.array(x)).tobytes().hex() == expected


@pytest.mark.parametrize("name", QUANTISED)
def test_huge_values_keep_finite_scales(name):
    codec = resolve_codec(name, 32, "k")
    x = np.ones((6, 32)) * np.array([1e6, -1e6, 1e10, 1e20, 3e38, -3e38])[:, None]
    x[:, 7] *= -1
    assert np.isfinite(codec.decode(codec.encode(x))).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_and_unrepresentably_small_values_decode_to_zero(name):
    codec = resolve_codec(name, 32, "k")
    x = np.stack([np.zeros(32), -np.zeros(32), np.full(32, 1e-20), np.full(32, 1e-40)])
    assert not codec.decode(codec.encode(x)).any()


def test_a_near_zero_iq4_nl_block_has_the_codes_of_zero_whatever_came_before():
    codec = resolve_codec("iq4_nl", 32, "k")
    x = np.stack([np.arange(32), np.zeros(32)])
    assert codec.encode(x)[1].tobytes().hex() == "0000" + "88" * 16


def test_values_that_overflow_while_they_are_rotated_are_refused():
    with pytest.raises(EncodeError, match="overflow float32 while they are rotated"):
        resolve_codec("q8_0", 64, "k").encode(np.full(64, 1e38))


def test_f32_is_little_endian_and_exact():
    x = np.random.default_rng(4).standard_normal((5, 80)).astype(np.float32)
    codec = resolve_codec("f32", 80, "k")
    assert codec.encode(x).tobytes() == x.astype("<f4").tobytes()
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), x)


def test_f16_rounds_to_nearest_even_and_clamps_to_its_largest_value():
    codec = resolve_codec("f16", 4, "k")
    assert codec.encode([1.0, -2.0, 1 + 2**-11, 1 + 3 * 2**-11]).tobytes().hex() == "003c00c0003c023c"
    np.testing.assert_array_equal(codec.decode(codec.encode([65504, 65519, 1e6, -1e6])), [65504, 65504, 65504, -65504])


def test_bf16_rounds_to_nearest_even_and_clamps_to_its_largest_value():
    codec = resolve_codec("bf16", 4, "k")
    assert codec.encode([1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8]).tobytes().hex() == "803f00c0803f823f"
    top = float(np.finfo(np.float32).max)
    assert codec.encode([top, -top, 0.0, -0.0]).tobytes().hex() == "7f7f7fff00000080"


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, 32, elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_any_bf16_row_has_gguf_pys_bytes(x):
    encoded = resolve_codec("bf16", 32, "k").encode(x)
    assert encoded.tobytes() == gguf.quants.quantize(x[None], gguf.GGMLQuantizationType.BF16).tobytes()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(("f16", "bf16")), hnp.arrays(np.uint16, 16))
def test_every_finite_float_of_16_bits_survives(name, bits):
    codec = resolve_codec(name, 16, "k")
    values = codec.decode(bits.astype("<u2").view(np.uint8))
    finite = np.where(np.isfinite(values), bits, 0)
    assert codec.encode(codec.decode(finite.astype("<u2").view(np.uint8))).tobytes() == finite.astype("<u2").tobytes()

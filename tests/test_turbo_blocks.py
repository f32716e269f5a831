"""turbo2, turbo3 and turbo4 have the bytes of an independent plain implementation, its errors, and finite blocks.

Golden bytes, those of a fork's C code too, are in test_spec_blocks.
"""

from __future__ import annotations

import numpy as np
import plain_blocks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tqgguf.formats.blocks.codebooks import codebook
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import EncodeError

TURBO = ("turbo2", "turbo3", "turbo4")
GROUPS = (64, 96, 128, 192)

INPUTS = {
    "e0": lambda n: [1.0] + [0.0] * (n - 1),
    "zero": lambda n: [0.0] * n,
    "lcg": plain_blocks.lcg,
    "ramp": lambda n: [(i - (n - 1) / 2) / 64 for i in range(n)],
}


def gaussians(n: int, seed: int = 0, values: int = 1 << 19) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((values // n, n)).astype(np.float32)


def relative_error(decoded: np.ndarray, x: np.ndarray) -> float:
    """Squared error of decoded vectors relative to the vectors' own squares, in float64."""
    x = x.astype(np.float64)
    return float(((decoded - x) ** 2).sum() / (x**2).sum())


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("group", GROUPS)
def test_bytes_and_values_equal_the_plain_implementation(name, group):
    codec = resolve_codec(name, group, "k")
    rng = np.random.default_rng(group)
    scaled = rng.standard_normal((12, group)) * 10.0 ** np.arange(-6, 6)[:, None]
    heavy = rng.standard_normal((6, group)) ** 5
    x = np.concatenate([scaled, heavy, [INPUTS[v](group) for v in INPUTS]]).astype(np.float32)
    blocks = codec.encode(x)
    for row, block, decoded in zip(x, blocks, codec.decode(blocks), strict=True):
        assert block.tobytes() == plain_blocks.encode_row(name, row.tolist())
        assert decoded.tolist() == plain_blocks.decode_row(name, block.tobytes(), group)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(TURBO),
    st.sampled_from(GROUPS).flatmap(
        lambda n: hnp.arrays(np.float32, n, elements=st.floats(-(2.0**20), 2.0**20, width=32))
    ),
)
def test_any_vector_has_the_bytes_of_the_plain_implementation(name, x):
    block = resolve_codec(name, len(x), "k").encode(x)
    assert block.tobytes() == plain_blocks.encode_row(name, x.tolist())


@pytest.mark.parametrize("group", [*GROUPS, 256])
@pytest.mark.parametrize(("name", "limit"), [("turbo2", 0.120), ("turbo3", 0.0348), ("turbo4", 0.0097)])
def test_distortion_of_unit_gaussians_at_any_scale(name, limit, group):
    codec, x = resolve_codec(name, group, "k"), gaussians(group)
    errors = [relative_error(codec.decode(codec.encode(x * np.float32(s))), x * np.float32(s)) for s in (1, 10, 0.001)]
    assert max(errors) <= limit
    assert max(errors) - min(errors) <= 1e-3 * errors[0]


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("group", GROUPS)
def test_power_of_two_scales_move_only_the_norm(name, group):
    codec, x = resolve_codec(name, group, "k"), gaussians(group, values=1 << 13)
    codes, norms = codec.split(codec.encode(x))
    for power in (-8, -1, 5, 10):
        other_codes, other_norms = codec.split(codec.encode(np.ldexp(x, power)))
        np.testing.assert_array_equal(other_codes, codes)
        np.testing.assert_array_equal(other_norms, np.ldexp(norms, power))


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("group", GROUPS)
def test_decoded_vectors_have_the_length_of_the_originals(name, group):
    codec, x = resolve_codec(name, group, "k"), gaussians(group, values=1 << 14) * 7
    lengths = [np.linalg.norm(v.astype(np.float64), axis=-1) for v in (x, codec.decode(codec.encode(x)))]
    np.testing.assert_allclose(lengths[1], lengths[0], rtol=2.0**-10)


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("group", GROUPS)
def test_zero_and_tiny_vectors_decode_to_zero(name, group):
    codec = resolve_codec(name, group, "k")
    x = np.stack([np.zeros(group), -np.zeros(group), np.full(group, 1e-30)]).astype(np.float32)
    blocks = codec.encode(x)
    assert not blocks[:, :2].any()
    assert (blocks == blocks[0]).all()
    assert not codec.decode(blocks).any()


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("value", [1e6, 1e18, 1e30, 3e38])
def test_huge_norms_are_clamped_so_that_nothing_decodes_to_infinity(name, value):
    codec = resolve_codec(name, 64, "k")
    block = codec.encode(np.full(64, value))
    assert block[:2].tobytes() == b"\xff\x7b"
    assert np.isfinite(codec.decode(block)).all()


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_with_their_position(name, bad):
    x = np.zeros((2, 3, 128), np.float32)
    x[1, 2, 77] = x[1, 2, 99] = bad
    with pytest.raises(EncodeError, match=rf"found {bad} at position \[1, 2, 77\] of shape \[2, 3, 128\]"):
        resolve_codec(name, 128, "k").encode(x)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("generation", [2, 3])
def test_codebooks_are_symmetric_and_their_boundaries_lie_midway(bits, generation):
    book = codebook(bits, generation=generation)
    assert len(book.values) == 2**bits and len(book.boundaries) == 2**bits - 1
    np.testing.assert_array_equal(book.values, -book.values[::-1])
    midways = (book.values[1:].astype(np.float64) + book.values[:-1]) / 2
    np.testing.assert_allclose(book.boundaries, midways, atol=1.1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks_of_other_groups_are_the_table_times_a_float32_factor(bits):
    for group in (64, 96, 192):
        factor = np.float32(np.sqrt(128 / group))
        np.testing.assert_array_equal(codebook(bits, group).values, codebook(bits).values * factor)
        np.testing.assert_array_equal(codebook(bits, group).boundaries, codebook(bits).boundaries * factor)

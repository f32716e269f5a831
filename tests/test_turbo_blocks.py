"""turbo2, turbo3 and turbo4 have the exact bytes of the forks' C code and of an independent plain implementation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import plain_turbo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tqgguf.formats.block_types import BLOCK_TYPES
from tqgguf.formats.codebooks import codebook
from tqgguf.formats.codec import resolve_codec
from tqgguf.formats.errors import EncodeError
from tqgguf.formats.rotation import Rotation
from tqgguf.formats.turbo import TurboKernel

TURBO = ("turbo2", "turbo3", "turbo4")
GROUPS = (64, 96, 128, 192)
FORK = json.loads((Path(__file__).parent / "data" / "golden_turbo_fork.json").read_text())["vectors"]

INPUTS = {
    "e0": lambda n: [1.0] + [0.0] * (n - 1),
    "zero": lambda n: [0.0] * n,
    "lcg": plain_turbo.lcg,
    "ramp": lambda n: [(i - (n - 1) / 2) / 64 for i in range(n)],
}

# From the forks' C code run with the generation 3 tables.
GOLDEN_128 = {
    ("e0", "turbo2"): "4c3900c3fcfcf0cc3c03f0f3ffc00c3cff0fcc3f330f33cc3fcf0c3c333c33ccfccf",
    (
        "e0",
        "turbo3",
    ): "4a3daa6956565a6696a95a59556aa69655a5669599a599669565a69699969966566590eeac16dc8f623f7a35a5b76265a5be",
    ("e0", "turbo4"): "3f3c44444bb4b4bbb4bb44bbb4b4b44b4b4444bb4bbbbbbb44b4b444b44bbbbbbb44b4b4bb4b4b4bbb444b4bb4b4bb4b"
    "bbb4b444b44b4b4bb44b4b4bb4b4b4bbbbb4",
    ("zero", "turbo2"): "0000" + "aa" * 32,
    ("zero", "turbo3"): "0000" + "00" * 32 + "ff" * 16,
    ("zero", "turbo4"): "0000" + "88" * 64,
    ("lcg", "turbo2"): "1047857fca62a56a25ad2c66468aa97abe31602aaeb7a9526914d64975b7d82b61e9",
    (
        "lcg",
        "turbo3",
    ): "e9465eaa90854ec58b5f4d89981443a41db6c4405d2e47b8873db9d2ef2eb106d793785b7ce456b17e4f74df1e0629d47ae4",
    (
        "lcg",
        "turbo4",
    ): "704676a2cc4d89d32a5874a8ab795648e7bbd3294a586942a88386b9a85cfa8b244f30689838f9ba7c8db7b94866b649"
    "63165ac68562777c6c8c82b7ac09376b96ca",
    ("ramp", "turbo2"): "e146a964612e1d7a621799125c55a51635d554cea09ace5bf6112a66aeeec96e62cb",
    (
        "ramp",
        "turbo3",
    ): "ad46038a961c7ba5c57b3265e9ee4ab86aaefdd90535d9b6a8664089588d97d9c5934e7472151a021c84b0bc3b0d57ff7ab5",
    (
        "ramp",
        "turbo4",
    ): "894697885448355ad91bc647ab5d2a694d4795863a24c365747454b95947452c66d57467cbe33298aa97daf3ac4758cd"
    "252598395b48d9aafac8a7b3ca6a3a798fc4",
}

# From tests/plain_turbo.py, frozen: no fork has these groups, the bytes are ours to publish.
GOLDEN_OTHER = {
    ("e0", 64, "turbo2"): "4c3900c3fcfcf0cc3c03f0f3ffc00c3cff0f",
    ("e0", 64, "turbo3"): "4a3daa6956565a6696a95a59556aa69655a590eeac16dc8f623f",
    ("e0", 64, "turbo4"): "3f3c44444bb4b4bbb4bb44bbb4b4b44b4b4444bb4bbbbbbb44b4b444b44bbbbbbb44",
    ("e0", 96, "turbo2"): "3a3c00c3fcfcf0cc3c03aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ("e0", 96, "turbo3"): "fe3c5596a9a9a59969560000000000000000000000000000000090eeac16ffffffffffffffff",
    ("e0", 96, "turbo4"): "413c22222dd2d2ddd2dd22ddd2d2d22d2d22" + "88" * 32,
    ("e0", 192, "turbo2"): "3a3c00c3fcfcf0cc3c03f0f3ffc00c3cff0f" + "aa" * 32,
    ("e0", 192, "turbo3"): "fe3c5596a9a9a5996956a5a6aa955969aa5a" + "00" * 32 + "90eeac16dc8f623f" + "ff" * 16,
    ("e0", 192, "turbo4"): "413c22222dd2d2ddd2dd22ddd2d2d22d2d2222dd2ddddddd22d2d222d22ddddddd22" + "88" * 64,
    ("lcg", 64, "turbo2"): "b04488bb9141696629ec2d47568aeaef7a35",
    ("lcg", 64, "turbo3"): "a844541567a7c7cd43ce1beafc058186e47afa0856e616b1ff47",
    ("lcg", 64, "turbo4"): "9844a1a3ab9b27a53654a6796a689739e4e9d61a5b746866bb818bc9bbd9b97c442e",
    ("lcg", 96, "turbo2"): "b245ccb791622a1b79bc9da28164ea988a59887f618ee55ca9a9",
    ("lcg", 96, "turbo3"): "8245dc2e27d44076a73d27494299852121f715e9c754cea95642da5837e6da48af2b7ab42cee",
    (
        "lcg",
        96,
        "turbo4",
    ): "8b45d2d37d8d3785296a98389c36b64ce39db6944bb815b1534abbc882859a94b677b383cb6c2778b8b376f8d455b5ba94a9",
    (
        "lcg",
        192,
        "turbo2",
    ): "0f4888bb9141696629ec2d47568aeaef7a3545be9193d46eea506c5a65b016b8afe2469a79b429575e6e99e7468614092714",
    (
        "lcg",
        192,
        "turbo3",
    ): "f64754156797c7cd43ce1feabc058186e47ada393636fd8880f4cdb1ca626c251a55cd31f72942aee8dc339dd95c7d52"
    "0d6efa0856e616b1ff47f098780f36c4e1dfb1c61673da912005",
    (
        "lcg",
        192,
        "turbo4",
    ): "db47a1a3ab9b27a53654a6796a689739e4e9d61a5c746866bb818bc9bcd9b97c442e5573cb9d34973c8673e7c85889d8"
    "3176e3689a47456804bd7926a28ccc9a2bbb6b729b87a77e528c95297d54c874e86a86967bdb596279b3722695437b197424",
}


def gaussians(n: int, seed: int = 0, values: int = 1 << 19) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((values // n, n)).astype(np.float32)


def relative_error(decoded: np.ndarray, x: np.ndarray) -> float:
    """Squared error of decoded vectors relative to the vectors' own squares, in float64."""
    x = x.astype(np.float64)
    return float(((decoded - x) ** 2).sum() / (x**2).sum())


def generation_2(name: str) -> TurboKernel:
    block_type = BLOCK_TYPES[name]
    return TurboKernel(block_type, 128, codebook(block_type.bits, 128, generation=2), Rotation(128, True))


def fork_block(vector: dict, name: str) -> bytes:
    """The fork's block; its turbo4 has a second norm field, always zero, which the current layout dropped."""
    block = bytes.fromhex(vector[name]["block_hex"])
    if name == "turbo4":
        assert block[2:4] == b"\0\0"
        block = block[:2] + block[4:]
    return block


def fork_input(vector: dict) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(vector["input_f32_hex"]), "<f4")[None]


NON_FINITE = {"lcg_nan_at5", "lcg_inf_at5", "lcg_neginf_at5"}
INFINITE_NORM = b"\x00\x7c"
FORK_CASES = [(vector, name) for vector in FORK if vector not in NON_FINITE for name in TURBO]
FINITE_BLOCKS = [(vector, name) for vector, name in FORK_CASES if fork_block(FORK[vector], name)[:2] != INFINITE_NORM]


def test_exactly_these_fork_vectors_are_not_finite():
    assert {name for name, v in FORK.items() if not np.isfinite(fork_input(v)).all()} == NON_FINITE


@pytest.mark.parametrize(("vector", "name"), FORK_CASES)
def test_generation_2_bytes_equal_the_forks_and_only_an_infinite_norm_is_clamped(vector, name):
    expected = fork_block(FORK[vector], name)
    if expected[:2] == INFINITE_NORM:
        expected = b"\xff\x7b" + expected[2:]
    assert generation_2(name).encode(fork_input(FORK[vector])).tobytes() == expected


@pytest.mark.parametrize(("vector", "name"), FINITE_BLOCKS)
def test_generation_2_blocks_decode_to_the_forks_values(vector, name):
    block = np.frombuffer(fork_block(FORK[vector], name), np.uint8)[None]
    kernel = generation_2(name)
    rotated = kernel.decode(block[:, 2:], block[:, :2].copy().view("<f2"), np.empty((1, 128), np.float32))
    expected = FORK[vector][name]
    np.testing.assert_array_equal(rotated[0, :8], np.array(expected["dequant_rotated_first8"], np.float32))
    restored = kernel.rotation.inverse(rotated)[0, :8]
    np.testing.assert_allclose(restored, expected["restored_first8"], rtol=1e-6, atol=1e-6 * np.abs(restored).max())


def test_all_fork_vectors_at_once_give_the_bytes_that_each_gives_alone():
    x = np.concatenate([fork_input(v) for name, v in FORK.items() if name not in NON_FINITE])
    for name in TURBO:
        kernel = generation_2(name)
        alone = np.concatenate([kernel.encode(x[i : i + 1]) for i in range(len(x))])
        np.testing.assert_array_equal(kernel.encode(x), alone)


@pytest.mark.parametrize(("vector", "name"), GOLDEN_128)
def test_generation_3_golden_bytes(vector, name):
    block = resolve_codec(name, 128, "k").encode(INPUTS[vector](128))
    assert block.tobytes().hex() == GOLDEN_128[vector, name]


@pytest.mark.parametrize(("vector", "group", "name"), GOLDEN_OTHER)
def test_golden_bytes_of_groups_of_64_96_and_192(vector, group, name):
    block = resolve_codec(name, group, "v").encode(INPUTS[vector](group))
    assert block.tobytes().hex() == GOLDEN_OTHER[vector, group, name]


@pytest.mark.parametrize("name", TURBO)
@pytest.mark.parametrize("group", GROUPS)
def test_bytes_and_values_equal_the_plain_implementation(name, group):
    codec, bits = resolve_codec(name, group, "k"), BLOCK_TYPES[name].bits
    rng = np.random.default_rng(group)
    scaled = rng.standard_normal((12, group)) * 10.0 ** np.arange(-6, 6)[:, None]
    heavy = rng.standard_normal((6, group)) ** 5
    x = np.concatenate([scaled, heavy, [INPUTS[v](group) for v in INPUTS]]).astype(np.float32)
    blocks = codec.encode(x)
    for row, block, decoded in zip(x, blocks, codec.decode(blocks), strict=True):
        assert block.tobytes() == plain_turbo.encode(row.tolist(), bits)
        assert decoded.tolist() == plain_turbo.decode(block.tobytes(), bits, group)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(TURBO),
    st.sampled_from(GROUPS).flatmap(
        lambda n: hnp.arrays(np.float32, n, elements=st.floats(-(2.0**20), 2.0**20, width=32))
    ),
)
def test_any_vector_has_the_bytes_of_the_plain_implementation(name, x):
    block = resolve_codec(name, len(x), "k").encode(x)
    assert block.tobytes() == plain_turbo.encode(x.tolist(), BLOCK_TYPES[name].bits)


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

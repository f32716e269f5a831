"""Every cache type resolves to one codec per head size; rows, planes and rotations fit together for any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.formats.blocks.rotation import Rotation
from tqgguf.formats.errors import EncodeError, RequestError

HEAD_SIZES = (64, 96, 128, 192, 256)
ALL = [(name, head_dim) for name in CACHE_TYPE_NAMES for head_dim in HEAD_SIZES]


def rows(head_dim: int, *lead: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*lead, head_dim)).astype(np.float32)


@pytest.mark.parametrize(("name", "head_dim"), ALL)
def test_sizes_of_a_codec_agree_with_its_block_type(name, head_dim):
    codec = resolve_codec(name, head_dim, "k")
    assert codec.n_blocks * codec.block_size == head_dim
    assert codec.block_bytes == codec.code_bytes + 2 * codec.n_scales == BLOCK_TYPES[name].bytes_for(codec.block_size)
    assert codec.row_bytes == codec.n_blocks * codec.block_bytes
    assert codec.is_float == name.endswith(("f32", "f16"))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "part"), [(64, 64, 64), (96, 96, 32), (128, 128, 128), (192, 192, 64), (512, 128, 128)]
)
def test_turbo_groups_and_rotated_parts(head_dim, block_size, part):
    for name in ("turbo2", "turbo3", "turbo4"):
        for side in ("k", "v"):
            codec = resolve_codec(name, head_dim, side)
            assert (codec.block_size, codec.rotation) == (block_size, Rotation(part, signed=True))
            assert resolve_codec(name, head_dim, side, rotated=False) == codec


@pytest.mark.parametrize(
    ("head_dim", "k_part", "v_part"),
    [
        (32, None, None),
        (64, 64, 64),
        (96, None, None),
        (128, 128, 64),
        (160, None, None),
        (192, 64, 64),
        (256, 256, 64),
    ],
)
def test_ggml_types_are_rotated_as_llama_cpp_rotates_them(head_dim, k_part, v_part):
    for side, part in (("k", k_part), ("v", v_part)):
        expected = None if part is None else Rotation(part, signed=False)
        assert resolve_codec("q4_0", head_dim, side).rotation == expected
        assert resolve_codec("q4_0", head_dim, side, rotated=False).rotation is None


def test_float_types_are_never_rotated():
    assert all(resolve_codec(name, 128, "k").rotation is None for name in ("f32", "f16", "bf16"))


@pytest.mark.parametrize(("name", "head_dim"), ALL)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3,), (2, 0, 5), (2, 3, 5)])
def test_any_leading_shape(name, head_dim, lead):
    codec, x = resolve_codec(name, head_dim, "k"), rows(head_dim, *lead)
    blocks = codec.encode(x)
    assert blocks.dtype == np.uint8 and blocks.shape == (*lead, codec.row_bytes)
    decoded = codec.decode(blocks)
    assert decoded.dtype == np.float32 and decoded.shape == x.shape
    if x.size:
        flat = codec.encode(x.reshape(-1, head_dim))
        np.testing.assert_array_equal(blocks.reshape(flat.shape), flat)
        np.testing.assert_array_equal(codec.encode(x.reshape(-1, head_dim)[-1]), flat[-1])


@pytest.mark.parametrize(("name", "head_dim"), ALL)
def test_a_row_has_the_same_bytes_and_values_whatever_stands_beside_it(name, head_dim):
    codec, x = resolve_codec(name, head_dim, "v"), rows(head_dim, 1100)
    blocks = codec.encode(x)
    decoded = codec.decode(blocks)
    for i in (0, 1, 511, 512, 1099):
        np.testing.assert_array_equal(codec.encode(x[i : i + 1]), blocks[i : i + 1])
        np.testing.assert_array_equal(codec.decode(blocks[i]), decoded[i])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ALL), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**32 - 1))
def test_splitting_and_joining_lose_nothing(case, lead, seed):
    codec = resolve_codec(*case, "k")
    blocks = np.random.default_rng(seed).integers(0, 256, (*lead, codec.row_bytes), np.uint8)
    codes, scales = codec.split(blocks)
    assert codes.dtype == np.uint8 and codes.shape == (*lead, codec.n_blocks * codec.code_bytes)
    assert scales.dtype == np.float16 and scales.shape == (*lead, codec.n_blocks * codec.n_scales)
    np.testing.assert_array_equal(codec.join(codes, scales), blocks)


@pytest.mark.parametrize(("name", "head_dim"), ALL)
def test_planes_decode_to_the_rotated_values_also_into_a_given_array(name, head_dim):
    codec = resolve_codec(name, head_dim, "k")
    blocks = codec.encode(rows(head_dim, 4, 7))
    planes, out = codec.split(blocks), np.empty((4, 7, head_dim), np.float32)
    assert codec.decode_planes(*planes, out=out) is out
    np.testing.assert_array_equal(out, codec.decode_rotated(blocks))
    np.testing.assert_array_equal(codec.unrotate(out), codec.decode(blocks))


@pytest.mark.parametrize(("name", "head_dim"), ALL)
def test_planes_may_be_strided_views(name, head_dim):
    codec = resolve_codec(name, head_dim, "k")
    blocks = codec.encode(rows(head_dim, 6, 4))
    codes, scales = (plane.transpose(1, 0, 2)[::2] for plane in codec.split(blocks))
    expected = codec.decode_rotated(blocks).transpose(1, 0, 2)[::2]
    np.testing.assert_array_equal(codec.decode_planes(codes, scales), expected)
    np.testing.assert_array_equal(codec.join(codes, scales), blocks.transpose(1, 0, 2)[::2])


@pytest.mark.parametrize(("name", "head_dim"), ALL)
def test_scores_are_the_same_in_the_rotated_domain(name, head_dim):
    codec, query = resolve_codec(name, head_dim, "k"), rows(head_dim, 5, seed=1)
    blocks = codec.encode(rows(head_dim, 20))
    rotated = codec.rotate(query) @ codec.decode_rotated(blocks).T
    np.testing.assert_allclose(rotated, query @ codec.decode(blocks).T, atol=2e-4)


@pytest.mark.parametrize("name", CACHE_TYPE_NAMES)
def test_float16_and_float64_inputs_are_taken_as_float32(name):
    codec, x = resolve_codec(name, 64, "k"), rows(64, 3).astype(np.float16)
    np.testing.assert_array_equal(codec.encode(x), codec.encode(x.astype(np.float64)))


@pytest.mark.parametrize("name", CACHE_TYPE_NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_no_float32_holds_are_refused_with_their_position(name, bad):
    x = np.zeros((3, 64))
    x[2, 40] = bad
    with pytest.raises(EncodeError, match=r"only finite .* at position \[2, 40\] of shape \[3, 64\]"):
        resolve_codec(name, 64, "k").encode(x)


@pytest.mark.parametrize(("typo", "meant"), [("turbo5", "turbo4"), ("q4-0", "q4_0"), ("Q8_0", "q8_0"), ("fp16", "f16")])
def test_an_unknown_type_is_refused_with_the_list_and_the_nearest_name(typo, meant):
    with pytest.raises(RequestError, match=f"unknown cache type '{typo}', did you mean '{meant}'") as refusal:
        resolve_codec(typo, 64, "k")
    assert all(name in str(refusal.value) for name in CACHE_TYPE_NAMES)
    assert refusal.value.exit_status == 2


@pytest.mark.parametrize("head_dim", [80, 112, 32, 160])
def test_head_sizes_that_turbo_cannot_hold_are_refused_with_what_is_possible(head_dim):
    with pytest.raises(
        RequestError, match=rf"turbo3 cannot hold head_dim {head_dim}: it takes 64, 96, 192 and"
    ) as refusal:
        resolve_codec("turbo3", head_dim, "v")
    assert f"possible for {head_dim}: f32, f16, bf16" in str(refusal.value)
    assert ("q8_0" in str(refusal.value)) == (head_dim % 32 == 0)


@pytest.mark.parametrize("head_dim", [80, 0, -64])
def test_head_sizes_that_ggml_blocks_cannot_hold_are_refused(head_dim):
    with pytest.raises(RequestError, match=f"q4_0 cannot hold head_dim {head_dim}: it takes multiples of 32"):
        resolve_codec("q4_0", head_dim, "k")


def test_the_same_request_gives_the_same_codec_and_codecs_compare_by_what_they_store():
    assert resolve_codec("turbo4", 64, "k") is resolve_codec("turbo4", 64, "k")
    assert resolve_codec("turbo4", 64, "k") == resolve_codec("turbo4", 64, "v")
    assert resolve_codec("q8_0", 128, "k") != resolve_codec("q8_0", 128, "v")
    assert len({resolve_codec("turbo4", 64, "k"), resolve_codec("turbo4", 64, "v")}) == 1


@pytest.fixture
def turbo() -> Codec:
    return resolve_codec("turbo4", 64, "k")


@pytest.mark.parametrize("shape", [(), (63,), (2, 128)])
def test_arrays_of_another_head_size_are_refused(turbo, shape):
    for call in (turbo.encode, turbo.decode, turbo.split):
        with pytest.raises(ValueError, match=r"turbo4 with head_dim 64 needs .* on the last axis"):
            call(np.zeros(shape, np.uint8))


def test_planes_and_out_arrays_that_do_not_fit_are_refused(turbo):
    codes, scales = turbo.split(turbo.encode(rows(64, 3)))
    with pytest.raises(ValueError, match="different leading shapes"):
        turbo.decode_planes(codes, scales[:2])
    with pytest.raises(ValueError, match="needs 32 code bytes"):
        turbo.decode_planes(codes[:, :-1], scales)
    for out in (np.empty((3, 64)), np.empty((2, 64), np.float32), np.empty((64, 3), np.float32).T):
        with pytest.raises(ValueError, match="out must be C-contiguous float32"):
            turbo.decode_planes(codes, scales, out=out)


def test_infinite_scales_of_foreign_blocks_decode_without_a_warning(turbo):
    blocks = turbo.encode(rows(64, 1))
    blocks[0, :2] = (0x00, 0x7C)
    with np.errstate(all="raise"):
        assert np.isinf(turbo.decode_rotated(blocks)).all()

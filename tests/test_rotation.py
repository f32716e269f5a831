"""The rotation equals its matrix, is orthonormal, and uses the forks' sign tables."""

from __future__ import annotations

import numpy as np
import plain_blocks
import pytest

from tqgguf.formats.blocks.rotation import SIGNS_1_HEX, SIGNS_2_HEX, Rotation, sign_table

ROTATIONS = [Rotation(n, signed) for n in (32, 64, 128) for signed in (True, False)] + [Rotation(256, False)]


def sylvester(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def matrix(rotation: Rotation) -> np.ndarray:
    """The rotation as a float64 matrix, built from the definition."""
    h = sylvester(rotation.size) / np.sqrt(rotation.size)
    if not rotation.signed:
        return h
    s1, s2 = (sign_table(bits)[: rotation.size].astype(float) for bits in (SIGNS_1_HEX, SIGNS_2_HEX))
    return s2[:, None] * h * s1


def test_sign_tables_are_the_draws_that_the_forks_made():
    draw = np.random.default_rng(42)
    for bits in (SIGNS_1_HEX, SIGNS_2_HEX):
        np.testing.assert_array_equal(sign_table(bits), draw.choice([-1.0, 1.0], 128))


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_forward_is_the_matrix_product(rotation):
    x = np.random.default_rng(0).standard_normal((50, rotation.size))
    np.testing.assert_allclose(rotation.forward(x), x.astype(np.float32) @ matrix(rotation).T, atol=2e-6)


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_inverse_undoes_forward_and_lengths_stay(rotation):
    x = np.random.default_rng(1).standard_normal((50, rotation.size)).astype(np.float32)
    y = rotation.forward(x)
    np.testing.assert_allclose(rotation.inverse(y), x, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("size", [64, 128])
def test_float32_results_are_those_of_the_plain_loops_bit_for_bit(size):
    x = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    s1, s2 = (plain_blocks.signs(bits) for bits in (SIGNS_1_HEX, SIGNS_2_HEX))
    expected = np.array(plain_blocks.rotate(x.tolist(), s1, s2), np.float32)
    assert Rotation(size, True).forward(x).tobytes() == expected.tobytes()


def test_sign_less_rotation_is_its_own_inverse():
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    rotation = Rotation(64, False)
    np.testing.assert_array_equal(rotation.forward(x), rotation.inverse(x))
    np.testing.assert_allclose(rotation.forward(rotation.forward(x)), x, atol=2e-6)


def test_parts_of_the_last_axis_are_rotated_apart():
    x = np.random.default_rng(4).standard_normal((2, 3, 96)).astype(np.float32)
    rotation = Rotation(32, True)
    parts = np.concatenate([rotation.forward(x[..., i : i + 32]) for i in (0, 32, 64)], axis=-1)
    np.testing.assert_array_equal(rotation.forward(x), parts)


@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 0, 128), (2, 3, 5, 64), (1025, 64)])
def test_any_leading_shape_and_a_row_does_not_depend_on_its_neighbours(shape):
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    y = Rotation(64, True).forward(x)
    assert y.shape == shape and y.dtype == np.float32
    if x.size:
        last = np.unravel_index(x[..., 0].size - 1, shape[:-1])
        np.testing.assert_array_equal(y[last], Rotation(64, True).forward(x[last]))


def test_arguments_stay_untouched_whatever_their_layout():
    x = np.random.default_rng(6).standard_normal((64, 10)).astype(np.float32)
    before = x.copy()
    np.testing.assert_array_equal(
        Rotation(64, True).forward(x.T), Rotation(64, True).forward(np.ascontiguousarray(x.T))
    )
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(("size", "signed"), [(0, False), (48, False), (256, True), (-64, True)])
def test_impossible_sizes_are_refused(size, signed):
    with pytest.raises(ValueError, match=f"power of two.*found {size}"):
        Rotation(size, signed)


def test_a_last_axis_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"size 64 .* found \(2, 80\)"):
        Rotation(64, True).forward(np.zeros((2, 80)))

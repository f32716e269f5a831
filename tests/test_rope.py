"""RoPE of a single row by a matrix is mlx's own RoPE."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tqgguf.runtime.layers.rope import RowRoPE
from tqgguf.runtime.models.load import LoadedModel


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize(("head_dim", "dims"), [(64, 64), (128, 128), (96, 96), (128, 32)])
@pytest.mark.parametrize(("base", "scale"), [(1e4, 1.0), (1e6, 0.125)])
@pytest.mark.parametrize("position", [0, 1, 700, 8191, 100_000])
def test_one_row_is_turned_as_mlx_turns_it(
    traditional: bool, head_dim: int, dims: int, base: float, scale: float, position: int
) -> None:
    rope = nn.RoPE(dims, traditional=traditional, base=base, scale=scale)
    x = mx.random.normal((1, 9, 1, head_dim), key=mx.random.key(3))
    expected = np.array(rope(x, offset=position))
    # float32 angles: a unit in the last place of the frequency counts `position` times
    tolerance = 2e-6 + position * scale * 4e-7
    np.testing.assert_allclose(np.array(RowRoPE(rope)(x, offset=position)), expected, atol=tolerance)


def test_several_rows_other_types_and_positions_in_arrays_go_to_mlx() -> None:
    rope = nn.RoPE(64, traditional=True)
    row = RowRoPE(rope)
    for x, offset in (
        (mx.random.normal((1, 2, 5, 64)), 7),
        (mx.random.normal((1, 2, 1, 64)).astype(mx.float16), 7),
        (mx.random.normal((2, 2, 1, 64)), mx.array([3, 4])),
    ):
        assert mx.array_equal(row(x, offset), rope(x, offset))


def test_a_loaded_model_has_it_in_every_layer(smollm2: LoadedModel) -> None:
    assert all(type(layer.self_attn.rope) is RowRoPE for layer in smollm2.model.layers)

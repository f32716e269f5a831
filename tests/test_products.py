"""Matrix products of numpy arrays by mlx's BLAS are numpy's own, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest

from tqgguf.runtime.attention.products import product

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


OPERANDS = {
    "contiguous": lambda n, r, c: array(n, r, c),
    "transposed": lambda n, r, c: array(n, c, r).swapaxes(1, 2),
    "head-first": lambda n, r, c: array(r, n, c).swapaxes(0, 1),
    "part of longer rows": lambda n, r, c: array(n, r, c + 5)[:, :, 2 : c + 2],
    "part of longer columns": lambda n, r, c: array(n, c, r + 5)[:, :, 2 : r + 2].swapaxes(1, 2),
    "every second": lambda n, r, c: array(n, r, 2 * c)[:, :, ::2],
    "backwards": lambda n, r, c: array(n, r, c)[:, :, ::-1],
    "one for all": lambda n, r, c: np.broadcast_to(array(1, r, c), (n, r, c)),
}


@pytest.mark.parametrize("b", OPERANDS)
@pytest.mark.parametrize("a", OPERANDS)
@pytest.mark.parametrize("shape", [(3, 17, 33, 9), (1, 1, 64, 128), (2, 5, 1, 7), (2, 4, 8, 1), (1, 1, 1, 1)])
def test_products_equal_numpys(a: str, b: str, shape: tuple[int, int, int, int]) -> None:
    n, rows, inner, columns = shape
    x, y = OPERANDS[a](n, rows, inner), OPERANDS[b](n, inner, columns)
    np.testing.assert_allclose(product(x, y), np.matmul(x, y), rtol=1e-5, atol=1e-5)


def test_empty_operands_give_empty_or_zero_products() -> None:
    assert product(array(2, 0, 4), array(2, 4, 3)).shape == (2, 0, 3)
    assert product(array(0, 2, 4), array(0, 4, 3)).shape == (0, 2, 3)
    assert not product(array(2, 3, 0), array(2, 0, 5)).any()

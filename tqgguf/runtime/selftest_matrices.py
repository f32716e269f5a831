"""Does a GPU multiply by a GGUF's matrices as float64 does? Every type that the kernels read, on made-up blocks, whose
values are gguf-py's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.gguf.finite import SCALES
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.matrices import (
    MATRIX_TYPES,
    BlockMatrix,
    arrange,
    decode_matrix,
    lookup_rows,
    multiply,
    stacked,
)
from tqgguf.runtime.selftest import Case, relative_distance

NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
_ROWS, _COLUMNS = 40, 512  # the last tile of rows is not full
_NORM_LIMIT = 1e-3  # a value of the norm may be rounded to its other neighbour in bf16
_SUM_LIMIT = 1e-4  # of float32 results: codes lie up to 1,152 above zero while they are summed


@dataclass(frozen=True)
class Product:
    """A product to be compared. gate: of two matrices in turns. added: whether rows are added to it. normed: whether x
    has its norm taken."""

    detail: str
    n_rows: int
    dtype: mx.Dtype = mx.bfloat16
    gate: str | None = None
    added: bool = False
    normed: bool = False


ONE_ROW = Product("one row", 1)
PRODUCTS = (
    Product("three rows of f16", 3, mx.float16),
    Product("eleven rows, with others added", 11, added=True),
    Product("two matrices, silu", 1, gate="silu"),
    Product("two matrices, gelu", 2, mx.float16, gate="gelu"),
    Product("one row, normed", 1, normed=True),
)
"""With the first type alone, beside `ONE_ROW` with all: what they differ in does not hang on the type."""


def matrix_cases(
    launcher: Launcher, types: tuple[str, ...] = MATRIX_TYPES, products: tuple[Product, ...] = PRODUCTS
) -> Iterator[Case]:
    """Every type's decoding and product; the first of them in every way that there is."""
    for name in types:
        yield Case("decode rows", name, _COLUMNS, "all rows", 0.0, _decode(launcher, name))
        yield Case("product", name, _COLUMNS, ONE_ROW.detail, _SUM_LIMIT, _product(launcher, name, ONE_ROW))
    yield Case("look up rows", types[0], _COLUMNS, "three of them", 0.0, _lookup(launcher, types[0]))
    for product in products:
        limit = _NORM_LIMIT if product.normed else _SUM_LIMIT
        yield Case("product", types[0], _COLUMNS, product.detail, limit, _product(launcher, types[0], product))


@lru_cache(maxsize=8)
def random_blocks(type_name: str, n_rows: int, n_columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks [n_rows, bytes of a row]: any codes, under scales of either sign, about a thousandth."""
    kind, rng = GGML_TYPES[NUMBERS[type_name]], np.random.default_rng([NUMBERS[type_name], seed])
    blocks = rng.integers(0, 256, (n_rows * n_columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    bits, places = SCALES[type_name]
    for at in places:
        if bits.dtype.itemsize == 1:
            blocks[:, at] = rng.integers(115, 122, len(blocks))  # powers of two
        else:
            blocks[:, at : at + 2] = rng.normal(0, 1e-3, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(n_rows, -1)


def values_of(type_name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """gguf-py's values."""
    import gguf

    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[type_name])


def _arranged(launcher: Launcher, name: str, *blocks: NDArray[np.uint8]) -> BlockMatrix:
    arrays = [mx.array(each) for each in blocks]
    joined = arrays[0] if len(arrays) == 1 else stacked(arrays, in_turns=True)
    return arrange(launcher, NUMBERS[name], _COLUMNS, joined)


def _as_float32(values: mx.array) -> NDArray[np.float32]:
    return np.array(values.astype(mx.float32))


def _decode(launcher: Launcher, name: str) -> Callable[[], float]:
    def compare() -> float:
        blocks = random_blocks(name, _ROWS, _COLUMNS)
        expected = mx.array(values_of(name, blocks))[16:].astype(mx.bfloat16)
        found = decode_matrix(launcher, _arranged(launcher, name, blocks), mx.bfloat16, first_row=16)
        return relative_distance(_as_float32(found), _as_float32(expected))

    return compare


def _lookup(launcher: Launcher, name: str) -> Callable[[], float]:
    def compare() -> float:
        blocks, ids = random_blocks(name, _ROWS, _COLUMNS), [39, 0, 17]
        expected = mx.array(values_of(name, blocks)[ids]).astype(mx.float16)
        found = lookup_rows(launcher, _arranged(launcher, name, blocks), mx.array(ids, dtype=mx.int32), mx.float16)
        return relative_distance(_as_float32(found), _as_float32(expected))

    return compare


def _product(launcher: Launcher, name: str, product: Product) -> Callable[[], float]:
    def compare() -> float:
        n_rows = _ROWS if product.gate is None else 32
        blocks = [random_blocks(name, n_rows, _COLUMNS, seed) for seed in range(1 if product.gate is None else 2)]
        rng = np.random.default_rng(7)
        x = mx.array(rng.standard_normal((product.n_rows, _COLUMNS)).astype(np.float32)).astype(product.dtype)
        added = rng.standard_normal((product.n_rows, n_rows)).astype(np.float32) if product.added else None
        rows = _as_float32(x).astype(np.float64)
        norm = rng.uniform(0.5, 2, _COLUMNS + 1).astype(np.float32) if product.normed else None
        if norm is not None:
            rows = rows / np.sqrt(np.mean(rows**2) + norm[-1]) * norm[:-1]
            rows = _as_float32(mx.array(rows.astype(np.float32)).astype(product.dtype)).astype(np.float64)
        parts = [rows @ values_of(name, each).astype(np.float64).T for each in blocks]
        expected = parts[0] if product.gate is None else _ACTIVATIONS[product.gate](parts[0]) * parts[1]
        found = multiply(
            launcher,
            x,
            _arranged(launcher, name, *blocks),
            added=None if added is None else mx.array(added),
            gate=product.gate,
            norm=None if norm is None else mx.array(norm),
            dtype=mx.float32,
        )
        return relative_distance(np.array(found), expected if added is None else expected + added)

    return compare


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def _gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu}

"""A GGUF's matrices in their own type: rows read from the file's mapping, never widened as a whole.

A decode step is bound by what it reads of memory, and float32 is two to eight times what the file holds. Products with
one row, or a few, are the C library's; with more, runs of rows are decoded into a workspace of bounded size for the
BLAS. The mapping lives as long as the rows. Knows mlx's modules; knows neither models nor other forms of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import ArrayLike, NDArray

from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.attention.products import product
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.matrices import OwnLinear
from tqgguf.runtime.native.library import Library, Matrix, row_matrix
from tqgguf.runtime.native.worth import MOST_SINGLE_ROWS, SLOW_PATHS

TILE_VALUES = 1 << 20
"""Values that are decoded at a time for the BLAS: 4 MB, which stay in the caches. Measured."""

# Where a block's f16 scales lie in it, in units of two bytes; its values are finite if and only if they are.
_SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 1), "Q5_0": (0,), "Q5_1": (0, 1), "Q8_0": (0,), "Q4_K": (0, 1), "Q5_K": (0, 1),
    "Q6_K": (104,),
}  # fmt: skip
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}


def is_served(library: Library, info: TensorInfo) -> bool:
    """Whether the library multiplies such a matrix, and faster than the BLAS does its float32 copy."""
    return library.path_name not in SLOW_PATHS and library.serves_rows(info.ggml_type, info.shape[-1])


class PackedRows:
    """A matrix [n_rows, n] of a GGUF file. FormatError where a value is not finite.

    `library` must serve it for `products`; None is enough for `lookup` and `decode`.
    """

    def __init__(self, file: GGUFFile, name: str, library: Library | None) -> None:
        self.info = file.tensor(name)
        self.stored = file.array(name)
        self.library = library
        if not _has_finite_scales(self.info, self.stored):
            weights.check_values(file, name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Rows by number: ids [...] to float32 [..., n]."""
        ids = np.asarray(ids)
        return weights.decode(self.info, self.stored[ids.reshape(-1)]).reshape(*ids.shape, self.shape[-1])

    def matrix(self, rows: slice = slice(None), bias: NDArray[np.float32] | None = None) -> Matrix:
        """Some of the rows as the library takes them; `bias` must stay alive."""
        return row_matrix(self.info.ggml_type, self.stored[rows], self.shape[-1], bias)

    def decoded(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """All rows in runs of at most TILE_VALUES values: where, and float32 [rows, n]."""
        for rows in weights.row_groups(self.shape, TILE_VALUES):
            if self.library is None:
                yield rows, weights.decode(self.info, self.stored[rows])
            else:
                yield rows, self.library.decode_rows(self.matrix(rows))

    def products(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x @ rows.T: float32 [m, n] to [m, n_rows]."""
        x = np.ascontiguousarray(x, np.float32)
        if self.library is not None and len(x) <= MOST_SINGLE_ROWS:
            return self.library.products(self.matrix(), x)
        out = np.empty((len(x), self.shape[0]), np.float32)
        for rows, values in self.decoded():
            product(x[None], values.T[None], out[None, :, rows])
        return out


class RowsEmbedding(nn.Module):
    """An Embedding that looks its float32 rows up in a file, and is an output layer too. It has no parameters."""

    def __init__(self, rows: PackedRows) -> None:
        super().__init__()
        self._rows = rows

    def __call__(self, ids: mx.array) -> mx.array:
        return mx.array(self._rows.lookup(np.asarray(ids)))

    def as_linear(self, x: mx.array) -> mx.array:
        return _products(self._rows, x)


class RowsLinear(OwnLinear):
    """A Linear whose weight's rows stay in a file; its bias is its only parameter."""

    def __init__(self, rows: PackedRows, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._rows = rows

    def product(self, x: mx.array) -> mx.array:
        return _products(self._rows, x)

    @property
    def rows(self) -> PackedRows:
        return self._rows


EMBEDDING = "model.embed_tokens"  # where mlx-lm's classes have it


def rows_of(file: GGUFFile, name: str, path: str, is_tied: bool, library: Library) -> PackedRows | None:
    """A matrix's rows for the module at `path`; None for what is no matrix or not served.

    An embedding that is no output layer is only looked up in, so that any type will do.
    """
    info = file.tensor(name)
    if len(info.shape) != 2:
        return None
    if is_served(library, info):
        return PackedRows(file, name, library)
    return PackedRows(file, name, None) if path == EMBEDDING and not is_tied else None


def put_rows(model: Any, found: Mapping[str, PackedRows]) -> None:
    """Put modules over rows into the places of the dense ones, by module path."""
    places = [
        (path, RowsEmbedding(found[path]) if path == EMBEDDING else RowsLinear(found[path], module))
        for path, module in model.named_modules()
        if path in found
    ]
    model.update_modules(tree_unflatten(places))


def _products(rows: PackedRows, x: mx.array) -> mx.array:
    """Evaluates x, float32 [..., n], now: its logits [..., n_rows] are not lazy."""
    values = np.asarray(x.astype(mx.float32))
    return mx.array(rows.products(values.reshape(-1, values.shape[-1])).reshape(*values.shape[:-1], -1))


def _has_finite_scales(info: TensorInfo, stored: NDArray) -> bool:
    """Whether every value is known to be finite, by its exponent or its block's scales. False says nothing."""
    if info.type_name in _EXPONENT:
        bits, exponent = stored.view(np.uint16), np.uint16(_EXPONENT[info.type_name])
        return all(((bits[rows] & exponent) != exponent).all() for rows in weights.row_groups(info.shape))
    if info.type_name not in _SCALES_AT:
        return False
    halves = stored.reshape(-1, GGML_TYPES[info.ggml_type].block_bytes).view(np.uint16)
    return all(((halves[:, at] & 0x7C00) != 0x7C00).all() for at in _SCALES_AT[info.type_name])

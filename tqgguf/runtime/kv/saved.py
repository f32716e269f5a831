"""What is checked of a saved state, and of its sides' arrays, before a cache takes them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tqgguf.formats.errors import FormatError
from tqgguf.formats.wording import shown
from tqgguf.runtime.kv.pages import PAGE
from tqgguf.runtime.kv.settings import N_SCALARS, LayerSettings, is_whole

_EMPTY, _FULL = N_SCALARS + 3, N_SCALARS + 8  # entries of a state: a full one has sizes and arrays


def split_state(state: Any) -> tuple[LayerSettings, Sequence[Any], Sequence[Any]]:
    """A state's settings; offset, first page and given channel scale; both head sizes, whether V is in tiles, and
    arrays (none if it is empty)."""
    if not isinstance(state, (list, tuple)) or len(state) not in (_EMPTY, _FULL):
        found = f"{type(state).__name__} of {len(state)}" if isinstance(state, (list, tuple)) else type(state).__name__
        raise FormatError(f"cache state: expected a tuple of {_EMPTY} or {_FULL} entries, found {found}")
    settings = LayerSettings.from_scalars(state[:N_SCALARS])
    (offset, first_page, scale), rest = state[N_SCALARS:_EMPTY], state[_EMPTY:]
    numbers = (offset, first_page, *rest[:3])
    if not all(is_whole(n) and n >= 0 for n in numbers) or (rest and rest[2] not in (0, 1)):
        raise FormatError(f"cache state: expected numbers >= 0 for its sizes, found {shown(numbers)}")
    if first_page * PAGE > offset or (offset and not rest):
        raise FormatError(f"cache state: {offset} tokens from page {first_page} on cannot be: there are no such rows")
    return settings, (offset, first_page, scale), rest


def as_saved(saved: Any, count: int) -> Sequence[Any]:
    """`saved` as that many arrays of at least two axes, any of them None."""
    arrays = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(arrays) != count or any(a is not None and (not isinstance(a, mx.array) or a.ndim < 2) for a in arrays):
        found = ", ".join(str(a.shape) if isinstance(a, mx.array) else type(a).__name__ for a in arrays)
        raise FormatError(f"cache state: expected {count} arrays for each of K and V, found {found or 'none'}")
    return arrays


def expect(name: str, array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype, are_finite: bool = True) -> None:
    """FormatError unless it is of that shape and type, without NaN and infinities if `are_finite`; None stands for no
    values."""
    if array is None and 0 in shape:
        return
    if array is None or array.shape != shape or array.dtype != dtype:
        found = "none" if array is None else f"{array.dtype} {array.shape}"
        raise FormatError(f"cache state: {name}: expected {dtype} {shape}, found {found}")
    if are_finite and mx.issubdtype(dtype, mx.floating) and array.size and not _is_finite(array):
        raise FormatError(f"cache state: {name}: expected finite numbers, found others")


def expect_squares(squares: mx.array | None, n_heads: int, n_most: int, head_dim: int) -> None:
    """FormatError unless they are f32 [n_heads, at most n_most tokens, head_dim], or None. A query beyond float32's
    squares has infinities, which are kept."""
    if squares is not None:
        n_counted = squares.shape[1] if squares.ndim == 3 else 0
        shape = n_heads, min(n_counted, n_most), head_dim
        expect("squares of queries", squares, shape, mx.float32, are_finite=False)
        if not mx.all(squares >= 0):
            raise FormatError("cache state: squares of queries: expected numbers >= 0, found others")


def _is_finite(array: mx.array) -> bool:
    """Whether no value has the exponent of infinities and NaN; by its bits, which numpy compares many at a time."""
    bits: Any
    bits, exponent = (np.uint32, 0x7F800000) if array.dtype == mx.float32 else (np.uint16, 0x7C00)
    if array.dtype == mx.bfloat16:
        array, exponent = array.view(mx.uint16), 0x7F80
    return bool((np.asarray(array).view(bits) & bits(exponent)).max() < exponent)

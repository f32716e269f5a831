"""What is checked of the rows that a model hands to a layer's cache, before anything of them is kept."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.kv.float_side import FloatSide
from tqgguf.runtime.kv.sides import BlockSide


def check_rows(
    keys: mx.array,
    values: mx.array,
    held: tuple[BlockSide | FloatSide, BlockSide | FloatSide] | None,
    layer: int,
    channel_scale: mx.array | None,
) -> None:
    """RequestError unless K and V are [1, n_kv_heads, tokens, head_dim], as many, and like what a layer holds."""
    sides = held or (None, None)
    for name, rows, side in zip("KV", (keys, values), sides, strict=True):
        where = f"layer {layer}, {name}"
        if not isinstance(rows, mx.array) or rows.ndim != 4 or not mx.issubdtype(rows.dtype, mx.floating):
            found = f"{rows.dtype} {rows.shape}" if isinstance(rows, mx.array) else type(rows).__name__
            raise RequestError(f"{where}: expected floats [1, n_kv_heads, tokens, head_dim], found {found}")
        if 0 in rows.shape[1::2]:
            raise RequestError(f"{where}: expected at least one head of one value, found {rows.shape}")
        if rows.shape[0] != 1:
            raise RequestError(f"block caches hold one sequence: expected batch size 1, found {rows.shape[0]}")
        if side is not None and (side.n_heads or rows.shape[1], side.codec.head_dim) != rows.shape[1::2]:
            raise RequestError(
                f"{where}: expected {side.n_heads} heads of {side.codec.head_dim} values as before, "
                f"found {rows.shape[1]} of {rows.shape[3]}"
            )
    if keys.shape[:3] != values.shape[:3]:
        found = f"{keys.shape} and {values.shape}"
        raise RequestError(f"layer {layer}: expected K and V of as many heads and tokens, found {found}")
    scale, expected = channel_scale, (keys.shape[1], keys.shape[3])
    if scale is not None and scale.shape != expected:
        raise RequestError(
            f"layer {layer}: expected a channel scale {expected} for these keys, found {scale.shape}; "
            "is the calibration another model's?"
        )


def kind_of_rows(keys: mx.array, values: mx.array) -> Any:
    """What is checked of a step's rows, but for their number; None where that is not enough."""
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
        return None
    k, v = keys.shape, values.shape
    if len(k) != 4 or len(v) != 4 or k[2] != v[2]:
        return None
    return k[0], k[1], k[3], v[0], v[1], v[3], keys.dtype, values.dtype

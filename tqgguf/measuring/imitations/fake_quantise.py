"""The arithmetic of `simulated_schemes`: rows to what they would decode to, and the bits that codes take.

Rows in, rows of the same shape out; nothing is packed. Which rows a query reads so is `simulated_cache`'s matter.
Random matrices and signs are seeded here, with other seeds than the engines have.
"""

from __future__ import annotations

import math
from functools import cache
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codebooks import codebook
from tqgguf.formats.blocks.codec import Side, resolve_codec
from tqgguf.formats.blocks.rotation import Rotation
from tqgguf.formats.blocks.turbo import count_not_above
from tqgguf.measuring.imitations.simulated_schemes import Blocks, Gaussian, IntegerZero, MinMax, Quantiser, SignSketch

Rows = NDArray[np.float32]

F16_BITS = 16
_SEED = 20


def decoded(quantiser: Quantiser, rows: Rows, side: Side) -> Rows:
    """What rows float32 [n_kv_heads, tokens, head_dim] decode to once they have been coded.

    tokens: any number, but whole groups where groups are made of tokens (`group_tokens`).
    """
    match quantiser:
        case Blocks(cache_type):
            codec = resolve_codec(cache_type, rows.shape[-1], side)
            return codec.decode(codec.encode(rows))
        case MinMax(bits, group, True):
            return _min_max(rows.swapaxes(1, 2), bits, group).swapaxes(1, 2)
        case MinMax(bits, group):
            return _min_max(rows, bits, group)
        case IntegerZero(bits, group):
            return _integer_zero(rows, bits, group)
        case Gaussian():
            return _gaussian(rows, quantiser)
        case SignSketch(bits):
            return _sign_sketch(rows, bits)
    assert_never(quantiser)


def group_tokens(quantiser: Quantiser) -> int:
    """Tokens that are coded together, from an absolute multiple on."""
    return quantiser.group if isinstance(quantiser, MinMax) and quantiser.of_tokens else 1


def bits_per_value(quantiser: Quantiser, head_dim: int, side: Side) -> float:
    """Codes, with scales, minima and norms, for each value."""
    match quantiser:
        case Blocks(cache_type):
            return resolve_codec(cache_type, head_dim, side).row_bytes * 8 / head_dim
        case MinMax(bits, group, of_tokens):
            return bits + 2 * F16_BITS / (group if of_tokens else min(group, head_dim))
        case IntegerZero(bits, group):
            return bits + 2 * F16_BITS / group
        case Gaussian(bits, group):
            return bits + F16_BITS / (group or head_dim)
        case SignSketch(bits):
            return bits + 2 * F16_BITS / head_dim
    assert_never(quantiser)


def refusal(quantiser: Quantiser, head_dim: int, side: Side) -> str | None:
    """None, or why heads of a size cannot be held. RequestError: our blocks cannot hold them."""
    if isinstance(quantiser, Blocks):
        resolve_codec(quantiser.cache_type, head_dim, side)
    if isinstance(quantiser, Gaussian) and head_dim & (head_dim - 1):
        return f"it rotates powers of two, found head_dim {head_dim}"
    group = getattr(quantiser, "group", None) if group_tokens(quantiser) == 1 else None
    if group is not None and head_dim % min(group, head_dim):
        return f"it takes multiples of {group}, found head_dim {head_dim}"
    return None


def _f16(x: Rows) -> Rows:
    return x.astype(np.float16).astype(np.float32)


def _grouped(rows: Rows, group: int) -> Rows:
    return rows.reshape(*rows.shape[:-1], -1, min(group, rows.shape[-1]))


def _min_max(rows: Rows, bits: int, group: int) -> Rows:
    values = _grouped(rows, group)
    low = _f16(values.min(axis=-1, keepdims=True))
    step = _f16((values.max(axis=-1, keepdims=True) - low) / (2**bits - 1))
    codes = np.clip(np.rint((values - low) / _not_zero(step)), 0, 2**bits - 1)
    return (codes * step + low).reshape(rows.shape)


def _integer_zero(rows: Rows, bits: int, group: int) -> Rows:
    values = _grouped(rows, group)
    low, high = values.min(axis=-1, keepdims=True), values.max(axis=-1, keepdims=True)
    least, most = (-127, 127) if bits == 8 else (0, 2**bits - 1)
    step = (high - low) / (most - least)
    zero = np.rint(((high + low) / 2 if bits == 8 else low) / _not_zero(step))
    codes = np.clip(np.rint(values / _not_zero(step) - zero), least, most)
    return ((codes + _f16(zero)) * _f16(step)).reshape(rows.shape)


def _gaussian(rows: Rows, quantiser: Gaussian) -> Rows:
    head_dim = rows.shape[-1]
    rotation = Rotation(head_dim, signed=False)
    signs = _signs(head_dim) if quantiser.signed else np.float32(1)
    values = _grouped(rotation.forward(rows * signs), quantiser.group or head_dim)
    norm = _norm(values)
    near = _nearest(values / _not_zero(norm), quantiser.bits)
    if quantiser.renormalised:
        near /= _norm(near)
    return rotation.inverse((near * _f16(norm)).reshape(rows.shape)) * signs


def _sign_sketch(rows: Rows, bits: int) -> Rows:
    head_dim = rows.shape[-1]
    rotation, sketch = _random_matrices(head_dim)
    norm = _norm(rows)
    units: Rows = rows / _not_zero(norm)
    coded = _nearest(units @ rotation.T, bits - 1) @ rotation * _f16(norm)
    left = rows - coded
    signs = np.where(left @ sketch.T > 0, np.float32(1), np.float32(-1))
    return coded + (signs @ sketch) * _f16(_norm(left)) * np.float32(math.sqrt(math.pi / 2) / head_dim)


def _nearest(units: Rows, bits: int) -> Rows:
    """Vectors of length 1 [..., n] with every value replaced by the nearest Lloyd-Max value of N(0, 1 / n)."""
    book = codebook(bits, units.shape[-1])
    return book.values[count_not_above(units, book.boundaries)]


def _norm(x: Rows) -> Rows:
    return np.sqrt((x * x).sum(axis=-1, keepdims=True))


def _not_zero(x: Rows) -> Rows:
    """A divisor: 1 where x is 0, of groups that hold one value only."""
    return np.where(x == 0, np.float32(1), x)


@cache
def _signs(n: int) -> Rows:
    return np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), n)


@cache
def _random_matrices(n: int) -> tuple[Rows, Rows]:
    """A rotation, and n random directions as rows."""
    random = np.random.default_rng(_SEED)
    q, r = np.linalg.qr(random.standard_normal((n, n)))
    return (q * np.sign(np.diag(r))).astype(np.float32), random.standard_normal((n, n)).astype(np.float32)

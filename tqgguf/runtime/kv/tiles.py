"""V's codes in tiles of 16 tokens, in the order in which decode attention reads them: a lossless permutation of rows.

A page's bytes stay a page's bytes, so that planes have the same shape either way. The order is stated in codes.metal;
here it is written out bit by bit, for what reads or writes rows: saved states, snapshots, cuts within a page.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Codec

TILE_TOKENS = 16
_LANES = 32
_SIX_BIT_BLOCK = 16  # pairs of six bits that share three words


def can_be_tiled(codec: Codec) -> bool:
    """Whether the kernels have tiles for a codec: turbo types whose blocks fill whole words of every lane."""
    return codec.block_type.family == "turbo" and codec.block_size % 64 == 0


def to_tiles(codec: Codec, codes: mx.array) -> mx.array:
    """Planes uint8 [pages, n_kv_heads, PAGE, row bytes] of rows, in the order of tiles. Lazy: a prompt's steps ask for
    rows that nobody reads."""
    return _permuted(codes, _order(codec, to_rows=False))


def to_rows(codec: Codec, codes: mx.array) -> mx.array:
    """The inverse of `to_tiles`."""
    return _permuted(codes, _order(codec, to_rows=True))


@lru_cache(maxsize=32)
def _order(codec: Codec, *, to_rows: bool) -> mx.array:
    bits = _bits_of_tiles(codec)
    return mx.array((np.argsort(bits) if to_rows else bits).astype(np.int32))


def _permuted(codes: mx.array, order: mx.array) -> mx.array:
    places = mx.arange(8, dtype=mx.uint8)
    pages = codes.reshape(-1, codes.shape[2] * codes.shape[3], 1)
    bits = mx.take(((pages >> places) & 1).reshape(pages.shape[0], -1), order, axis=1)
    return (bits.reshape(pages.shape[0], -1, 8) << places).sum(axis=-1).astype(mx.uint8).reshape(codes.shape)


@lru_cache(maxsize=16)
def _bits_of_tiles(codec: Codec) -> NDArray[np.int64]:
    """For each bit of a page in the order of tiles, its place among the page's rows."""
    group, bits = codec.block_size, codec.block_type.bits
    n_words = group * bits // 64
    places = np.full(PAGE_TOKENS * codec.n_blocks * codec.code_bytes * 8, -1, np.int64)
    token, block, value = np.meshgrid(
        np.arange(PAGE_TOKENS), np.arange(codec.n_blocks), np.arange(group), indexing="ij"
    )
    in_tile, part, in_part = token % TILE_TOKENS, value // (group // 8), value % (group // 8)
    slot = 4 * part + in_tile // 4
    pair = in_part // 2 * 4 + in_tile // 2 % 2 * 2 + value % 2
    tile_words = (token // TILE_TOKENS * codec.n_blocks + block) * n_words * _LANES
    for bit in range(bits):
        word, shift = _place_in_words(bits, pair, in_tile % 2, bit)
        target = (tile_words + _place_in_group(n_words, slot, word)) * 32 + shift
        places[target] = _place_in_rows(codec, token, block, value, bit)
    assert (places >= 0).all()
    return places


def _place_in_words(
    bits: int, pair: NDArray[np.int64], element: NDArray[np.int64], bit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Word of a lane, and bit of it, that has a bit of one code of a pair."""
    if bits != 3:
        per_word = 16 // bits
        return pair // per_word, pair % per_word * 2 * bits + element * bits + bit
    in_entry = (
        element * 2 + bit if bit < 2 else element + 4
    )  # an entry has the low bits of both codes, then the high ones
    block, rest = pair // _SIX_BIT_BLOCK * 3, pair % _SIX_BIT_BLOCK
    last = rest >= _SIX_BIT_BLOCK - 4
    word = block + np.where(last, in_entry // 2, rest // 4)
    return word, rest % 4 * 8 + np.where(last, 6 + in_entry % 2, in_entry)


def _place_in_group(n_words: int, slot: NDArray[np.int64], word: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a lane's word lies among its group's: four at a time, then two, then one."""
    fours = n_words // 4 * 4
    in_fours = word // 4 * 4 * _LANES + slot * 4 + word % 4
    in_two = fours * _LANES + slot * 2 + word - fours
    alone = (n_words - 1) * _LANES + slot
    has_two = n_words % 4 >= 2
    return np.where(word < fours, in_fours, np.where(has_two & (word < fours + 2), in_two, alone))


def _place_in_rows(
    codec: Codec, token: NDArray[np.int64], block: NDArray[np.int64], value: NDArray[np.int64], bit: int
) -> NDArray[np.int64]:
    """The bit of a page's rows that has a bit of one code."""
    start = (token * codec.n_blocks + block) * codec.code_bytes * 8
    for _, width in codec.block_type.code_fields:
        if bit < width:
            return start + value * width + bit
        start, bit = start + codec.block_size * width, bit - width
    raise AssertionError("a code has no more bits than its fields")

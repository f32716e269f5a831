"""How kernels are spread over a device: one small table per family.

CUDA's figures were tuned on an H200 (benchmarks/LOG.md). Metal's are careful guesses: nothing has run there yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kernels.types import bits_of

COLUMNS_OF_A_TILE = 8
TILE_KEYS = 16


@dataclass(frozen=True)
class Walk:
    """How decode attention walks: simdgroups in a threadgroup, tiles of 16 keys in a step, threadgroups at once on a
    processor (CUDA)."""

    simdgroups: int
    key_tiles: int
    resident: int


@dataclass(frozen=True)
class ProductWalk:
    """How a product with a matrix walks: tiles of 16 rows that a threadgroup takes, simdgroups that share their
    columns, steps of 64 columns that each takes at a time, threadgroups at once on a processor (CUDA)."""

    tiles: int
    simdgroups: int
    steps: int
    resident: int = 0


@dataclass(frozen=True)
class Family:
    """threadgroups: of decode attention in all, so that all run at once. shared_bytes: threadgroup memory that a
    kernel may have. table_rows: whether tables of pairs have a row of 256 bytes for every byte of codes, so that an
    address is one instruction. walks: by the most values (head size times tiles of query columns) that they are for;
    plain_walks: where a side is f16, whose rows take more registers.
    product_simdgroups: that a product is spread over in all, the fewest and the most of a threadgroup, and those on a
    processor at once, without and with a gate (0: as the compiler has it). matrix_simdgroups: of a threadgroup that
    decodes rows of a matrix."""

    threadgroups: int
    shared_bytes: int
    table_rows: bool
    walks: tuple[tuple[int, Walk], ...]
    plain_walks: tuple[tuple[int, Walk], ...]
    encode_simdgroups: int
    decode_simdgroups: int
    merge_simdgroups: int
    product_simdgroups: tuple[int, int, int, int, int]
    matrix_simdgroups: int


_ANY = 1 << 30
# CUDA: two threadgroups on each of an H200's 132 processors, which have 228 KB for both. Metal: what every device has.
_METAL_WALKS = ((128, Walk(4, 2, 0)), (256, Walk(4, 1, 0)), (_ANY, Walk(2, 1, 0)))
FAMILIES = {
    "metal": Family(128, 32768, False, _METAL_WALKS, _METAL_WALKS, 8, 8, 4, (512, 1, 4, 0, 0), 4),
    "cuda": Family(
        264,
        114688,
        True,
        ((128, Walk(8, 2, 2)), (256, Walk(4, 1, 3)), (_ANY, Walk(4, 1, 2))),
        ((64, Walk(8, 2, 2)), (128, Walk(4, 1, 3)), (_ANY, Walk(4, 1, 2))),
        16,
        8,
        8,
        (4224, 4, 16, 32, 16),
        8,
    ),
}
_MOST_VALUES = 256  # head size times tiles of columns, while more than one tile is taken at a time
_MOST_COPIES = {2: 32, 3: 32, 4: 16}  # of a table for codes of that many bits: a bank for each lane, or for two
_LEAST_COPIES = 4  # a table is filled four words at a time
_ROWS_BYTES = 256 * 256
_ROW_COPIES = 32


@dataclass(frozen=True)
class DecodeGeometry:
    """column_tiles: tiles of 8 query columns that a threadgroup takes. copies: of K's and V's table. table_rows: as
    `Family` says, for types that have tables. at_launch: as `launch.Threads` says; the latter bytes are the tables'."""

    column_tiles: int
    walk: Walk
    k_copies: int
    v_copies: int
    one_table: bool
    table_rows: bool
    at_launch: tuple[int, int]


def decode_geometry(family: Family, k: Codec, v: Codec, n_columns: int) -> DecodeGeometry:
    """For heads of these codecs and that many query columns (heads of a group times rows)."""
    head_dim = max(k.head_dim, v.head_dim)
    wanted = -(-n_columns // COLUMNS_OF_A_TILE)
    tiles = max(1, min(wanted, _MOST_VALUES // head_dim))
    tiles = 1 << (tiles.bit_length() - 1)
    walks = family.plain_walks if k.is_float or v.is_float else family.walks
    walk = next(walk for most, walk in walks if head_dim * tiles <= most)
    one_table = bits_of(k) == bits_of(v) > 0 and k.cache_type == v.cache_type and k.block_size == v.block_size
    columns = COLUMNS_OF_A_TILE * tiles
    fixed = columns * k.head_dim * 2 * 2 + columns * 4 * 2 * (1 + walk.simdgroups)
    if family.table_rows and (bits_of(k) or bits_of(v)):
        return DecodeGeometry(tiles, walk, _ROW_COPIES, _ROW_COPIES, one_table, True, (fixed, _ROWS_BYTES))
    copies = [_MOST_COPIES.get(bits_of(codec), _LEAST_COPIES) for codec in (k, v)]
    while fixed + _table_bytes(k, v, copies, one_table, walk) > family.shared_bytes and max(copies) > _LEAST_COPIES:
        copies = [max(_LEAST_COPIES, n // 2) for n in copies]
    tables = _table_bytes(k, v, copies, one_table, walk)
    return DecodeGeometry(tiles, walk, copies[0], copies[1], one_table, False, (fixed, tables))


def _table_bytes(k: Codec, v: Codec, copies: list[int], one_table: bool, walk: Walk) -> int:
    """Bytes that decode_attention.metal declares for its tables, which the sums of simdgroups pass through too."""
    sizes = [4 * n << 2 * bits_of(codec) if bits_of(codec) else 0 for codec, n in zip((k, v), copies, strict=True)]
    if one_table:
        sizes[1] = 0
    return max(sum(sizes), 4 * SUMS_WORDS, 4 * 32 * walk.simdgroups)


SUMS_WORDS = 2048  # that sums pass through at a time, at least: ROOM in decode_attention.metal


def n_coded_splits(family: Family, n_steps: int, n_heads: int, n_chunks: int, walk: Walk, n_beside: int = 1) -> int:
    """Threadgroups that share the blocks of a KV head, beside the one for its f16 rows; 0 without blocks.

    n_beside: 1 if that one is to run at the same time. In a batch there are so many of them that they would take the
    place of whole shares, and so short that theirs become free.
    """
    if not n_steps:
        return 0
    return max(1, min(family.threadgroups // (n_heads * n_chunks) - n_beside, -(-n_steps // walk.simdgroups)))


def product_walk(family: Family, n_tiles_and_steps: tuple[int, int], steps: int, gated: bool) -> ProductWalk:
    """For a matrix of that many tiles of rows and steps of columns, of which a simdgroup takes `steps` at a time: so
    many simdgroups share a tile's columns that there are enough in all, as far as each has something to do."""
    n_tiles, n_steps = n_tiles_and_steps
    wanted, fewest, most, *resident = family.product_simdgroups
    tiles, simdgroups = (2 if gated else 1), 1
    while simdgroups < most and 2 * simdgroups * steps <= n_steps:
        if simdgroups >= fewest and simdgroups * n_tiles >= wanted:
            break
        simdgroups *= 2
    return ProductWalk(tiles, simdgroups, steps, resident[gated] // simdgroups)

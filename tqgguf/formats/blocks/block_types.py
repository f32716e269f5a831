"""The one table of cache block types: sizes, fields and ids. Every other number about a type is computed from it.

It knows no arithmetic of values: codecs live in `codec`, kernels in `turbo` and `ggml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAGE_TOKENS = 128  # tokens of a page, whose rows become blocks together: fixed by the format

Family = Literal["float", "ggml", "turbo"]


@dataclass(frozen=True)
class BlockType:
    """A block: its f16 scales first, then its code fields, little-endian, without padding.

    `code_fields` names the code fields in order, each with its bits per value: 2 bits of `qs` and 1 bit of `signs` make
    turbo3's 3. A float type is a block of one value without scales. `block_size` is the usual number of values; turbo
    types also come in groups of 64, 96 and 192 (`bytes_for`).
    """

    name: str
    family: Family
    block_size: int
    scale_fields: tuple[str, ...]
    code_fields: tuple[tuple[str, int], ...]
    ggml_type: int | None
    """The type id in ggml, None for types that mainline ggml does not have."""

    @property
    def bits(self) -> int:
        """Bits of code per value, without scales."""
        return sum(bits for _, bits in self.code_fields)

    @property
    def n_scales(self) -> int:
        """Number of f16 fields at the start of a block."""
        return len(self.scale_fields)

    @property
    def fields(self) -> tuple[str, ...]:
        """All field names in the order in which they lie in a block."""
        return (*self.scale_fields, *(name for name, _ in self.code_fields))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the usual size."""
        return self.bytes_for(self.block_size)

    def bytes_for(self, n_values: int) -> int:
        """Bytes of one block that holds `n_values` values."""
        return 2 * self.n_scales + n_values * self.bits // 8


_LOW2_HIGH1 = (("qs", 2), ("signs", 1))
_HIGH1_LOW4 = (("qh", 1), ("qs", 4))

BLOCK_TYPES: dict[str, BlockType] = {
    t.name: t
    for t in (
        BlockType("f32", "float", 1, (), (("value", 32),), 0),
        BlockType("f16", "float", 1, (), (("value", 16),), 1),
        BlockType("bf16", "float", 1, (), (("value", 16),), 30),
        BlockType("q8_0", "ggml", 32, ("d",), (("qs", 8),), 8),
        BlockType("q5_1", "ggml", 32, ("d", "m"), _HIGH1_LOW4, 7),
        BlockType("q5_0", "ggml", 32, ("d",), _HIGH1_LOW4, 6),
        BlockType("q4_1", "ggml", 32, ("d", "m"), (("qs", 4),), 3),
        BlockType("q4_0", "ggml", 32, ("d",), (("qs", 4),), 2),
        BlockType("iq4_nl", "ggml", 32, ("d",), (("qs", 4),), 20),
        BlockType("turbo4", "turbo", 128, ("norm",), (("qs", 4),), None),
        BlockType("turbo3", "turbo", 128, ("norm",), _LOW2_HIGH1, None),
        BlockType("turbo2", "turbo", 128, ("norm",), (("qs", 2),), None),
    )
}

CACHE_TYPE_NAMES: tuple[str, ...] = tuple(BLOCK_TYPES)

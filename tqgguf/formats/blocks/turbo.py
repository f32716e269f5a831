"""Kernels of the turbo types: groups of rotated values to norm and codes, and back.

The encoder's sums and operations are float32 in a stated order, without fused multiply-add, so that every CPU makes
the same bytes. Groups lie as columns [group, n] while they are encoded: then adding row after row *is* the stated
order, and every operation runs over contiguous memory. Which head sizes exist and how rows split is for `codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BlockType
from tqgguf.formats.blocks.codebooks import Codebook
from tqgguf.formats.blocks.rotation import Rotation

F16_MAX = np.float32(65504)
_TINY = np.float32(1e-10)  # below it a norm counts as zero (the forks' constant)
_STEP_VALUES = 1 << 16  # values per step: long enough to hide numpy's cost per call, short enough for a core's L2 cache


def count_not_above(v: NDArray[np.float32], boundaries: NDArray[np.float32]) -> NDArray[np.uint8]:
    """For each value of v the number of ascending boundaries that are not above it, uint8."""
    index = np.greater_equal(v, boundaries[0]).view(np.uint8)
    hit = np.empty(v.shape, np.bool_)
    for boundary in boundaries[1:]:
        np.greater_equal(v, boundary, out=hit)
        index += hit.view(np.uint8)
    return index


def ordered_sum(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum of each column of float32 [m, n] from the first row to the last, every partial sum rounded to float32."""
    if columns.shape[1] == 1:  # numpy would fold a lone column into a vector and sum it pairwise
        return np.add.accumulate(columns, axis=0)[-1]
    return np.add.reduce(columns, axis=0)


@dataclass(frozen=True, eq=False)
class TurboKernel:
    """Encodes and decodes single blocks of `group` values of one turbo type."""

    block_type: BlockType
    group: int
    codebook: Codebook
    rotation: Rotation

    def encode(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Finite float32 [n, group] in original axes to blocks uint8 [n, block_bytes].

        A stored norm is clamped to the largest f16, so that no block decodes to infinity.
        """
        out = np.empty((len(x), self.block_type.bytes_for(self.group)), np.uint8)
        step = max(1, _STEP_VALUES // self.group)
        for start in range(0, len(x), step):
            self._encode_columns(x[start : start + step].T, out[start : start + step])
        return out

    def _encode_columns(self, x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        """x float32 [group, n] to out uint8 [n, block_bytes]."""
        columns = np.empty(x.shape, np.float32)
        columns[...] = x
        spare = np.empty(x.shape, np.float32)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            norm = np.sqrt(ordered_sum(np.multiply(columns, columns, out=spare)))
            columns *= np.where(norm > _TINY, np.float32(1) / norm, np.float32(0))
            index = count_not_above(self.rotation.columns(columns, spare), self.codebook.boundaries)
            squares = self.codebook.values * self.codebook.values
            length = np.sqrt(ordered_sum(np.take(squares, index, out=spare, mode="clip")))
            norm = np.where(length > _TINY, norm / length, norm)
        scales = np.minimum(norm, F16_MAX).astype("<f2")
        out[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        out[:, 2:] = self._pack(index).T

    def _pack(self, index: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Codebook indices uint8 [group, n] to code bytes [code_bytes, n], field after field."""
        fields, shift = [], 0
        for _, bits in self.block_type.code_fields:
            per_byte = 8 // bits
            field = (index >> np.uint8(shift)) & np.uint8((1 << bits) - 1)
            packed = field[0::per_byte].copy()
            for k in range(1, per_byte):
                packed |= field[k::per_byte] << np.uint8(k * bits)
            fields.append(packed)
            shift += bits
        return np.concatenate(fields)

    def decode(
        self, codes: NDArray[np.uint8], scales: NDArray[np.float16], out: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """codes uint8 [n, code_bytes] and norms float16 [n, 1] to out float32 [n, group], still rotated."""
        step = max(1, _STEP_VALUES // self.group)
        low_bytes = self.group * self.block_type.code_fields[0][1] // 8
        for start in range(0, len(codes), step):
            rows = slice(start, start + step)
            index: NDArray[np.uint8] | NDArray[np.uint16] = codes[rows, :low_bytes]
            if len(self.block_type.code_fields) == 2:
                index = _SIGN_NIBBLES.take(codes[rows, low_bytes:]).view(np.uint16) | index
            np.take(self._table, index, out=out[rows].view(self._table.dtype), mode="clip")
            out[rows] *= scales[rows].astype(np.float32)
        return out

    @cached_property
    def _table(self) -> NDArray[np.generic]:
        """All values of a code byte (3 bit: qs byte | sign nibble << 8) as one item, so that one gather gets them."""
        low_bits = self.block_type.code_fields[0][1]
        per_item = 8 // low_bits
        n_fields = len(self.block_type.code_fields)
        item = np.arange(1 << (8 + (n_fields - 1) * per_item))
        index = np.stack([item >> (k * low_bits) & ((1 << low_bits) - 1) for k in range(per_item)], axis=1)
        if n_fields == 2:
            index |= np.stack([(item >> (8 + k) & 1) << low_bits for k in range(per_item)], axis=1)
        return self.codebook.values[index].view(np.complex64 if per_item == 2 else np.complex128).reshape(-1)


# One byte of signs holds two nibbles of four values each: both, shifted above a qs byte, as one uint32.
_SIGN_NIBBLES: NDArray[np.uint32] = (
    np.array([[(byte & 15) << 8, (byte >> 4) << 8] for byte in range(256)], np.uint16).view(np.uint32).reshape(-1)
)

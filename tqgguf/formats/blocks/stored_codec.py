"""How one side of a layer is coded in a file: everything that a reader must know, and cannot see in the bytes.

Forks gave one name to several codecs, so a file states all of it: type, head size, padding, rotation, codebook. Which
of these the runtime can attend from is `is_native`; how they are written down is the carriers' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, BlockType
from tqgguf.formats.blocks.codebooks import CURRENT_GENERATION, HALVES
from tqgguf.formats.blocks.codec import Codec, Side, holds, make_codec, resolve_codec, turbo_rotation
from tqgguf.formats.blocks.rotation import Rotation
from tqgguf.formats.errors import FormatError
from tqgguf.formats.wording import shown

RotationKind = Literal["none", "hadamard", "signed"]
"""hadamard: without signs, as llama.cpp rotates quantised caches. signed: of turbo types."""

ROTATION_KINDS: tuple[RotationKind, ...] = get_args(RotationKind)
NO_GENERATION = 0
MAX_HEAD_DIM = 1 << 16  # real ones are up to 576


@dataclass(frozen=True)
class StoredCodec:
    """cache_type: a key of BLOCK_TYPES. head_dim: values of a head vector; stored_dim: with the zeros behind them that
    forks pad with (else equal). rotation, rotation_size: applied to consecutive parts of that size before coding (0:
    none). generation: of a turbo type's codebook, 0 for other types.
    """

    cache_type: str
    head_dim: int
    stored_dim: int
    rotation: RotationKind = "none"
    rotation_size: int = 0
    generation: int = NO_GENERATION

    @classmethod
    def native(cls, cache_type: str, head_dim: int, side: Side, *, rotated: bool = True) -> StoredCodec:
        """What `resolve_codec` gives: what our own caches hold, or with rotated=False ggml's plain blocks.

        Errors as `resolve_codec`.
        """
        codec = resolve_codec(cache_type, head_dim, side, rotated=rotated)
        turbo = codec.block_type.family == "turbo"
        kind: RotationKind = "none" if codec.rotation is None else "signed" if turbo else "hadamard"
        size = 0 if codec.rotation is None else codec.rotation.size
        return cls(cache_type, head_dim, head_dim, kind, size, CURRENT_GENERATION if turbo else NO_GENERATION)

    def problem(self) -> str | None:
        """What cannot be about these numbers, in words, or None."""
        block_type = BLOCK_TYPES.get(self.cache_type)
        if block_type is None:
            return f"expected a type of {', '.join(BLOCK_TYPES)}, found {shown(self.cache_type)}"
        if not 0 < self.head_dim <= self.stored_dim <= MAX_HEAD_DIM:
            return f"expected 0 < head_dim <= stored_dim <= {MAX_HEAD_DIM}, found {self.head_dim} and {self.stored_dim}"
        if not holds(self.cache_type, self.stored_dim):
            return f"{self.cache_type} cannot hold rows of {self.stored_dim} values"
        if self.rotation not in ROTATION_KINDS:
            return f"expected a rotation of {', '.join(ROTATION_KINDS)}, found {shown(self.rotation)}"
        return self._wrong_rotation(block_type) or self._wrong_generation(block_type)

    def _wrong_rotation(self, block_type: BlockType) -> str | None:
        size, found = self.rotation_size, f"{self.rotation} of {self.rotation_size}"
        if block_type.family == "turbo":
            expected = turbo_rotation(self.stored_dim).size
            if (self.rotation, size) != ("signed", expected):
                return f"{self.cache_type} of {self.stored_dim} values is rotated signed of {expected}, found {found}"
        elif self.rotation == "none":
            if size:
                return f"expected size 0 without a rotation, found {size}"
        elif block_type.family == "float" or self.rotation == "signed":
            return f"{self.cache_type} is never rotated like this, found {found}"
        elif size < 1 or size & (size - 1) or self.stored_dim % size:
            return f"expected a rotation of a power of two that divides {self.stored_dim}, found {size}"
        return None

    def _wrong_generation(self, block_type: BlockType) -> str | None:
        if block_type.family == "turbo" and self.generation not in HALVES:
            return f"expected a codebook of generation {' or '.join(map(str, HALVES))}, found {self.generation}"
        if block_type.family != "turbo" and self.generation != NO_GENERATION:
            return f"{self.cache_type} has no codebook of a generation, found {self.generation}"
        return None

    @cached_property
    def codec(self) -> Codec:
        """Of `stored_dim` values. FormatError: see `problem`."""
        problem = self.problem()
        if problem is not None:
            raise FormatError(f"codec: {problem}")
        rotation = Rotation(self.rotation_size, self.rotation == "signed") if self.rotation_size else None
        return make_codec(self.cache_type, self.stored_dim, rotation, self.generation or CURRENT_GENERATION)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head vector."""
        return self.codec.row_bytes

    @property
    def is_float(self) -> bool:
        return self.codec.is_float

    def is_native(self, side: Side) -> bool:
        """Whether the runtime's cache of this type and head size holds exactly such rows."""
        return holds(self.cache_type, self.head_dim) and self == StoredCodec.native(
            self.cache_type, self.head_dim, side
        )

    def decode(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows uint8 [..., row_bytes] to float32 [..., head_dim] in original axes."""
        return self.codec.decode(rows)[..., : self.head_dim]

    def encode(self, x: ArrayLike) -> NDArray[np.uint8]:
        """Float [..., head_dim] to rows uint8 [..., row_bytes]. EncodeError: a value that is not finite."""
        values = np.asarray(x)
        spare = self.stored_dim - self.head_dim
        if spare:
            values = np.concatenate([values, np.zeros((*values.shape[:-1], spare), values.dtype)], axis=-1)
        return self.codec.encode(values)

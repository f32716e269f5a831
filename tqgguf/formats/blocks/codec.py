"""Codecs: what a cache type means for a head size, and how head vectors become rows of blocks and back.

A row is one head vector. Interleaved rows are what files hold; planes (codes and scales apart) are what caches hold;
the two are a lossless permutation of each other. The arithmetic lives in `turbo` and `ggml`; layers, pages and tokens
are unknown here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES, BlockType
from tqgguf.formats.blocks.codebooks import CURRENT_GENERATION, codebook
from tqgguf.formats.blocks.ggml import IQ4_NL_CODEBOOK, FloatKernel, GgmlKernel
from tqgguf.formats.blocks.rotation import Rotation
from tqgguf.formats.blocks.turbo import TurboKernel
from tqgguf.formats.errors import EncodeError, RequestError

Side = Literal["k", "v"]

# head sizes that turbo types hold in one block: head_dim -> size of a rotated part; multiples of 128 are groups of 128
_TURBO_PARTS = {64: 64, 96: 32, 192: 64}
_TURBO_GROUP = 128
_GGML_ROTATION = 64  # llama.cpp rotates quantised caches only where this divides head_dim


@dataclass(frozen=True)
class Codec:
    """How one cache type stores head vectors of `head_dim` values. Made by `resolve_codec`.

    `codebook` float32 [2**bits] and its decision `boundaries` float32 [2**bits - 1] are None for types that reconstruct
    by a formula; `rotation` is None where nothing is rotated. Array arguments have any leading shape, an empty one too.
    """

    cache_type: str
    head_dim: int
    block_size: int
    rotation: Rotation | None
    codebook: NDArray[np.float32] | None = field(compare=False, repr=False)
    boundaries: NDArray[np.float32] | None = field(compare=False, repr=False)
    _kernel: TurboKernel | GgmlKernel | FloatKernel = field(compare=False, repr=False)

    @cached_property
    def block_type(self) -> BlockType:
        return BLOCK_TYPES[self.cache_type]

    @cached_property
    def is_float(self) -> bool:
        """Whether the type is f32, f16 or bf16: no scales, no codes, blocks of one value."""
        return self.block_type.family == "float"

    @cached_property
    def n_blocks(self) -> int:
        """Blocks per head vector."""
        return self.head_dim // self.block_size

    @property
    def block_bytes(self) -> int:
        return self.block_type.bytes_for(self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes per head vector."""
        return self.n_blocks * self.block_bytes

    @cached_property
    def n_scales(self) -> int:
        """f16 scales per block."""
        return self.block_type.n_scales

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of codes per block."""
        return self.block_bytes - 2 * self.n_scales

    def encode(self, x: ArrayLike) -> NDArray[np.uint8]:
        """float [..., head_dim] in original axes to interleaved blocks uint8 [..., row_bytes].

        Raises EncodeError naming the first value that is not finite.
        """
        values = np.asarray(x)
        self._expect("values", values.shape, self.head_dim)
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, np.float32)
        refuse_non_finite(rows, values)
        if self.rotation is not None and not isinstance(self._kernel, TurboKernel):
            with np.errstate(over="ignore", invalid="ignore"):
                rows = self.rotation.forward(rows)
            refuse_non_finite(rows, values, "values overflow float32 while they are rotated")
        blocks = self._kernel.encode(rows.reshape(-1, self.block_size))
        return blocks.reshape(*values.shape[:-1], self.row_bytes)

    def decode(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Interleaved blocks uint8 [..., row_bytes] to float32 [..., head_dim] in original axes."""
        return self.unrotate(self.decode_rotated(blocks))

    def decode_rotated(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Like `decode`, but left in the rotated domain, where attention reads."""
        return self.decode_planes(*self.split(blocks))

    def split(self, blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """Interleaved blocks uint8 [..., row_bytes] to planes.

        Returns codes uint8 [..., n_blocks * code_bytes] and scales float16 [..., n_blocks * n_scales].
        """
        blocks = np.asarray(blocks, np.uint8)
        self._expect("block bytes", blocks.shape, self.row_bytes)
        lead = blocks.shape[:-1]
        parts = blocks.reshape(*lead, self.n_blocks, self.block_bytes)
        scales = np.ascontiguousarray(parts[..., : 2 * self.n_scales]).reshape(*lead, 2 * self.n_blocks * self.n_scales)
        codes = np.ascontiguousarray(parts[..., 2 * self.n_scales :])
        return codes.reshape(*lead, self.n_blocks * self.code_bytes), scales.view("<f2")

    def join(self, codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
        """Planes as `split` makes them back to interleaved blocks uint8 [..., row_bytes]."""
        lead = self._expect_planes(codes, scales)
        blocks = np.empty((*lead, self.n_blocks, self.block_bytes), np.uint8)
        raw = np.ascontiguousarray(scales, "<f2").view(np.uint8)
        blocks[..., : 2 * self.n_scales] = raw.reshape(*lead, self.n_blocks, 2 * self.n_scales)
        blocks[..., 2 * self.n_scales :] = codes.reshape(*lead, self.n_blocks, self.code_bytes)
        return blocks.reshape(*lead, self.row_bytes)

    def decode_planes(
        self, codes: NDArray[np.uint8], scales: NDArray[np.float16], out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """`decode_rotated` from planes. `out`, if given, is C-contiguous float32 [..., head_dim] and is returned."""
        lead = self._expect_planes(codes, scales)
        shape = (*lead, self.head_dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out must be C-contiguous float32 {shape}, found {out.dtype} {out.shape}")
        n = out.size // self.block_size
        code_rows, scale_rows = codes.reshape(n, self.code_bytes), scales.reshape(n, self.n_scales)
        with np.errstate(over="ignore", invalid="ignore"):  # foreign blocks may hold infinite scales
            self._kernel.decode(code_rows, scale_rows, out.reshape(n, self.block_size))
        return out

    def rotate(self, x: ArrayLike) -> NDArray[np.float32]:
        """float [..., head_dim] into the rotated domain; unchanged values when there is no rotation."""
        return np.asarray(x, np.float32) if self.rotation is None else self.rotation.forward(x)

    def unrotate(self, x: ArrayLike) -> NDArray[np.float32]:
        """float [..., head_dim] of the rotated domain back to original axes."""
        return np.asarray(x, np.float32) if self.rotation is None else self.rotation.inverse(x)

    def _expect(self, what: str, shape: tuple[int, ...], last: int) -> None:
        if not shape or shape[-1] != last:
            wanted = f"{last} {what} on the last axis"
            raise ValueError(f"{self.cache_type} with head_dim {self.head_dim} needs {wanted}, found shape {shape}")

    def _expect_planes(self, codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> tuple[int, ...]:
        self._expect("code bytes", codes.shape, self.n_blocks * self.code_bytes)
        self._expect("scales", scales.shape, self.n_blocks * self.n_scales)
        if codes.shape[:-1] != scales.shape[:-1]:
            raise ValueError(f"codes {codes.shape} and scales {scales.shape} have different leading shapes")
        return codes.shape[:-1]


def refuse_non_finite(
    rows: NDArray[np.float32],
    values: NDArray[np.generic],
    problem: str = "only finite float32 values can be encoded",
) -> None:
    """Raise EncodeError at the first entry of `rows` that is not finite, showing what `values` holds there."""
    finite = np.isfinite(rows)
    if finite.all():
        return
    where = np.unravel_index(int(np.argmin(finite)), rows.shape)
    position = ", ".join(str(int(i)) for i in where)
    raise EncodeError(f"{problem}: found {values[where]} at position [{position}] of shape {list(values.shape)}")


@cache
def resolve_codec(cache_type: str, head_dim: int, side: Side, *, rotated: bool = True) -> Codec:
    """The codec of a cache type for one side of a layer.

    `rotated=False` gives the plain variant of ggml's quantised types, for files that have no rotation; it changes
    nothing for float types (never rotated) and turbo types (always). Raises RequestError for an unknown type or a head
    size that the type cannot hold.
    """
    if cache_type not in BLOCK_TYPES:
        near = difflib.get_close_matches(cache_type.lower(), CACHE_TYPE_NAMES, n=1, cutoff=0.0)
        raise RequestError(
            f"unknown cache type '{cache_type}', did you mean '{near[0]}'? known: {', '.join(CACHE_TYPE_NAMES)}"
        )
    block_type = BLOCK_TYPES[cache_type]
    if not _holds(block_type, head_dim):
        possible = [name for name, t in BLOCK_TYPES.items() if _holds(t, head_dim)]
        advice = f"; possible for {head_dim}: {', '.join(possible)}" if possible else ""
        sizes = _sizes(block_type)
        raise RequestError(f"cache type {cache_type} cannot hold head_dim {head_dim}: it takes {sizes}{advice}")
    if block_type.family == "turbo":
        rotation: Rotation | None = turbo_rotation(head_dim)
    else:
        rotation = _ggml_rotation(head_dim, side) if block_type.family == "ggml" and rotated else None
    return make_codec(cache_type, head_dim, rotation)


@cache
def make_codec(
    cache_type: str, head_dim: int, rotation: Rotation | None, generation: int = CURRENT_GENERATION
) -> Codec:
    """The codec of known blocks under a rotation that is named rather than chosen, as files have it.

    `head_dim` is one that the type can hold; `rotation` is turbo_rotation's for turbo types and None for float types.
    generation: of a turbo type's codebook.
    """
    block_type = BLOCK_TYPES[cache_type]
    if block_type.family == "turbo":
        assert rotation == turbo_rotation(head_dim), f"{cache_type} of {head_dim} values has another rotation"
        group = head_dim if head_dim in _TURBO_PARTS else _TURBO_GROUP
        book = codebook(block_type.bits, group, generation)
        kernel = TurboKernel(block_type, group, book, turbo_rotation(head_dim))
        return Codec(cache_type, head_dim, group, rotation, book.values, book.boundaries, kernel)
    size = block_type.block_size
    if block_type.family == "ggml":
        values, boundaries = (
            (IQ4_NL_CODEBOOK.values, IQ4_NL_CODEBOOK.boundaries) if cache_type == "iq4_nl" else (None, None)
        )
        return Codec(cache_type, head_dim, size, rotation, values, boundaries, GgmlKernel(block_type))
    return Codec(cache_type, head_dim, size, None, None, None, FloatKernel(block_type))


def holds(cache_type: str, head_dim: int) -> bool:
    """Whether a known type's blocks can hold head vectors of that many values."""
    return _holds(BLOCK_TYPES[cache_type], head_dim)


def turbo_rotation(head_dim: int) -> Rotation:
    """The rotation of turbo types for a head size that they can hold."""
    return Rotation(_TURBO_PARTS.get(head_dim, _TURBO_GROUP), signed=True)


def _holds(block_type: BlockType, head_dim: int) -> bool:
    if head_dim <= 0:
        return False
    if block_type.family == "turbo" and head_dim in _TURBO_PARTS:
        return True
    return head_dim % block_type.block_size == 0


def _sizes(block_type: BlockType) -> str:
    if block_type.family == "turbo":
        return f"{', '.join(str(n) for n in _TURBO_PARTS)} and multiples of {block_type.block_size}"
    return f"multiples of {block_type.block_size}"


def _ggml_rotation(head_dim: int, side: Side) -> Rotation | None:
    """llama.cpp's rotation since 2026-04: K in the largest power of two that divides head_dim, V in chunks of 64."""
    if head_dim % _GGML_ROTATION:
        return None
    return Rotation(head_dim & -head_dim if side == "k" else _GGML_ROTATION, signed=False)

"""How the rows of a llama.cpp state file are coded: what the file says, and what has to be told beside it.

A file has type ids and row sizes. Which fork they are of, whether ggml's quantised types are rotated and which codebook
turbo types use cannot be seen; each has a default by profile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codebooks import HALVES
from tqgguf.formats.blocks.codec import Side, holds, turbo_rotation
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.llama.profiles import EXCHANGED, MAINLINE, PROFILES, Profile


@dataclass(frozen=True)
class LlamaReading:
    """profile: whose file it is. rotated: ggml's quantised types are. generation: of the codebooks of turbo types."""

    profile: Profile
    rotated: bool
    generation: int

    def turned(self) -> LlamaReading:
        """The reading that differs in the rotation of ggml's quantised types alone."""
        return replace(self, rotated=not self.rotated)

    def codec(self, cache_type: str, shape: LayerShape, side: Side, same_heads: bool) -> StoredCodec:
        """How a side of a layer is coded. same_heads: all layers of its memory have heads of one size, without which
        llama.cpp rotates nothing. RequestError: a type that these heads cannot have.
        """
        head_dim = shape.head_dim(side)
        if BLOCK_TYPES[cache_type].family != "turbo":
            return StoredCodec.native(cache_type, head_dim, side, rotated=self.rotated and same_heads)
        pads = self.profile.pads or 1
        stored_dim = -(-head_dim // pads) * pads
        if not holds(cache_type, stored_dim):
            raise RequestError(f"{cache_type} cannot hold heads of {head_dim} values")
        size = turbo_rotation(stored_dim).size
        return StoredCodec(cache_type, head_dim, stored_dim, "signed", size, self.generation)


def resolve_reading(profile: str | None, rotated: bool | None = None, generation: int | None = None) -> LlamaReading:
    """What a profile (None: mainline) and the flags beside it mean, where None is the profile's default.

    RequestError: an unknown value.
    """
    profile = MAINLINE if profile is None else profile
    if profile not in EXCHANGED:
        raise RequestError(f"profile: expected one of {', '.join(EXCHANGED)}, found {profile!r}")
    found = PROFILES[profile]
    if generation is not None and generation not in HALVES:
        known = " or ".join(map(str, sorted(HALVES)))
        raise RequestError(f"codebook generation: expected {known}, found {generation!r}")
    return LlamaReading(
        found,
        found.rotates if rotated is None else rotated,
        found.generation if generation is None else generation,
    )


def same_heads(shapes: Iterable[LayerShape], side: Side) -> bool:
    """Whether all layers of a memory have heads of one size."""
    return len({shape.head_dim(side) for shape in shapes}) <= 1

"""Which llama.cpp a state file is from: what type ids mean there, and what the file does not say of its rows.

Forks gave the same ids to different types and changed them over time, so ids are read only through a named profile.
Those that cannot be exchanged with are here to be named in advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.llama.format import Kind

MAINLINE: Final = "mainline"
MAINLINE_TYPES: Final[dict[int, str]] = {
    block_type.ggml_type: name for name, block_type in BLOCK_TYPES.items() if block_type.ggml_type is not None
}


@dataclass(frozen=True)
class BlockForm:
    """A layout that files have for a type's blocks: bytes of `n_values` values."""

    n_values: int
    n_bytes: int


TURBO_GROUP: Final = 128  # values that forks rotate and normalise together

TURBO_FORMS: Final[dict[str, tuple[BlockForm, ...]]] = {
    "turbo4": (BlockForm(128, 66), BlockForm(128, 68)),
    "turbo3": (BlockForm(128, 50), BlockForm(32, 14)),
    "turbo2": (BlockForm(128, 34), BlockForm(32, 10)),
}
"""The current form first. 68 bytes: with a second norm, which is 0. 32 values: four of them share a norm."""


def forms(cache_type: str) -> tuple[BlockForm, ...]:
    """The layouts that files may have for a type."""
    if cache_type in TURBO_FORMS:
        return TURBO_FORMS[cache_type]
    block_type = BLOCK_TYPES[cache_type]
    return (BlockForm(block_type.block_size, block_type.block_bytes),)


@dataclass(frozen=True)
class Profile:
    """turbo_types: type ids beside mainline's. versions: what it writes and loads. rotates: ggml's quantised types are
    rotated (Hadamard, without signs). generation: of turbo codebooks. turbo4_bytes: of its blocks. pads: head vectors
    of turbo types are padded with zeros to a multiple of this (0: never). exchanged: whether files can be converted.
    """

    name: str
    turbo_types: Mapping[int, str] = field(default_factory=dict)
    versions: Mapping[Kind, int] = field(default_factory=lambda: {"session": 9, "sequence": 2})
    rotates: bool = False
    generation: int = 2
    turbo4_bytes: int = 68
    pads: int = 128
    exchanged: bool = False

    def cache_type(self, type_id: int) -> str | None:
        """The cache type of an id, None for ids that the profile does not have."""
        return self.turbo_types.get(type_id) or MAINLINE_TYPES.get(type_id)

    def type_id(self, cache_type: str) -> int | None:
        """The id of a cache type, None where the profile has none."""
        turbo = {name: type_id for type_id, name in self.turbo_types.items()}
        return turbo.get(cache_type, BLOCK_TYPES[cache_type].ggml_type)

    def block_bytes(self, cache_type: str) -> int:
        """Bytes of a turbo block of 128 values as this profile writes it."""
        return self.turbo4_bytes if cache_type == "turbo4" else TURBO_FORMS[cache_type][0].n_bytes


PROFILES: Final[dict[str, Profile]] = {
    profile.name: profile
    for profile in (
        Profile(MAINLINE, versions={"session": 10, "sequence": 3}, rotates=True, exchanged=True),
        # TheTom/llama-cpp-turboquant from 2026-05 on, measured at 69d8e4be
        Profile("thetom-2026-05", {42: "turbo2", 43: "turbo3", 44: "turbo4"}, exchanged=True),
        # mainline before pull request 21038 (2026-04), and later under LLAMA_ATTN_ROT_DISABLE=1
        Profile("mainline-unrotated", versions={"session": 10, "sequence": 3}, exchanged=True),
        Profile("thetom-before-2026-05", {42: "turbo3", 43: "turbo4"}),
        Profile("thetom-pr208", {43: "turbo2", 44: "turbo3", 45: "turbo4"}),
        Profile("llamampere", {42: "turbo2", 43: "turbo3", 47: "turbo4"}),
        Profile("buun", {44: "turbo2", 42: "turbo3", 43: "turbo4"}),
        Profile("madreag", {43: "turbo2", 41: "turbo3", 42: "turbo4"}),
        Profile("turbo-tan", {203: "turbo2", 201: "turbo3", 202: "turbo4"}),
    )
}

EXCHANGED: Final[tuple[str, ...]] = tuple(name for name, profile in PROFILES.items() if profile.exchanged)


def names_its_profile(kind: Kind, version: int) -> bool:
    """Whether a file's version says that mainline wrote it. Older versions were written by mainline with the rotation
    of ggml's quantised types, by mainline before it had one, and by forks.
    """
    return version == PROFILES[MAINLINE].versions[kind]


def by_rotation() -> str:
    """The profiles that files are exchanged with, in words, by what they do to ggml's quantised types."""
    rotating = ", ".join(name for name in EXCHANGED if PROFILES[name].rotates)
    plain = ", ".join(name for name in EXCHANGED if not PROFILES[name].rotates)
    return f"{rotating} (rotated), {plain} (not rotated)"


def fork_readings(type_id: int, row_bytes: int) -> dict[str, str]:
    """What forks would read rows of that many bytes as: profile -> cache type, where some form's blocks fill them."""
    return {
        name: profile.turbo_types[type_id]
        for name, profile in PROFILES.items()
        if type_id in profile.turbo_types
        and any(row_bytes % form.n_bytes == 0 for form in TURBO_FORMS[profile.turbo_types[type_id]])
    }

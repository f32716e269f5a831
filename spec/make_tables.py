"""Makes tables.json from the package: `python spec/make_tables.py`, in an environment that has tqgguf.

Whoever implements the blocks needs none of this. tests/test_spec_tables.py compares the file with the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tqgguf.formats.blocks.balance import FAR_OUTSIDE, FLOOR, SCALE_LIMITS
from tqgguf.formats.blocks.block_types import BLOCK_TYPES, PAGE_TOKENS, BlockType
from tqgguf.formats.blocks.cache_spec import TURBO_PREFIX, LayerTypes
from tqgguf.formats.blocks.codebooks import HALVES, TABLE_GROUP, codebook
from tqgguf.formats.blocks.codec import Side, resolve_codec
from tqgguf.formats.blocks.ggml import IQ4_NL_CODEBOOK
from tqgguf.formats.blocks.kv_size import LayerShape, side_bytes
from tqgguf.formats.blocks.rotation import SIGNS_1_HEX, SIGNS_2_HEX
from tqgguf.formats.llama.profiles import PROFILES, Profile

SPEC = Path(__file__).parent
VERSION = 1
HEAD_DIMS = (64, 96, 128, 192, 256)
GROUPS = (64, 96, 128, 192)
ROTATION_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512)
TURBO = tuple(name for name, t in BLOCK_TYPES.items() if t.family == "turbo")
GGML = tuple(name for name, t in BLOCK_TYPES.items() if t.family == "ggml")
FLOATS = tuple(name for name, t in BLOCK_TYPES.items() if t.family == "float")

ENCODERS: dict[str, dict[str, Any]] = {
    "q8_0": {"method": "signed", "divisor": 127},
    "q5_1": {"method": "affine", "levels": 31},
    "q5_0": {"method": "symmetric", "divisor": -16, "zero_code": 16, "max_code": 31},
    "q4_1": {"method": "affine", "levels": 15},
    "q4_0": {"method": "symmetric", "divisor": -8, "zero_code": 8, "max_code": 15},
    "iq4_nl": {"method": "iq4_nl"},
    **{name: {"method": "turbo"} for name in TURBO},
    **{name: {"method": "float"} for name in FLOATS},
}

OTHER_FORK_TYPES = {
    "thetom-2026-05": {"TQ3_1S": 45, "TQ4_1S": 46},
    "buun": {"TURBO3_TCQ": 45, "TURBO2_TCQ": 46},
}
"""Types that no cache of ours reads, named because their ids are taken."""


def tables() -> dict[str, Any]:
    return {
        "what": "Numbers of the block types; blocks.md has the words. A number that stands for a float32 is written "
        "with digits that give exactly that float32 when they are read as a double and converted.",
        "version": VERSION,
        "limits": {
            "f16_max": 65504,
            "norm_floor": exact(np.float32(1e-10)),
            "iq4_nl_floor": exact(np.float32(1e-15)),
            "page_tokens": PAGE_TOKENS,
            "exact_prefix_max": PAGE_TOKENS,
            "exact_prefix_default": {"turbo": TURBO_PREFIX, "ggml": 0},
            "far_outside": FAR_OUTSIDE,
            "balance_floor": FLOOR,
            "channel_scale_min": SCALE_LIMITS[0],
            "channel_scale_max": SCALE_LIMITS[1],
        },
        "types": [block_type(t) for t in BLOCK_TYPES.values()],
        "turbo_blocks": [turbo_block(n) for n in GROUPS],
        "signs": {"s1": SIGNS_1_HEX, "s2": SIGNS_2_HEX},
        "codebook_halves": [
            {"generation": generation, "bits": bits, "values": list(values), "boundaries": list(boundaries)}
            for generation, halves in HALVES.items()
            for bits, (values, boundaries) in halves.items()
        ],
        "codebooks": [
            scaled_codebook(generation, bits, group)
            for generation, groups in ((3, GROUPS), (2, (TABLE_GROUP,)))
            for bits in HALVES[generation]
            for group in groups
        ],
        "iq4_nl": {
            "values": [int(v) for v in IQ4_NL_CODEBOOK.values],
            "boundaries": [exact(v) for v in IQ4_NL_CODEBOOK.boundaries],
        },
        "ggml_rotation": [ggml_rotation(head_dim) for head_dim in ROTATION_HEAD_DIMS],
        "rows": [row(name, head_dim) for name in BLOCK_TYPES for head_dim in HEAD_DIMS],
        "zero_blocks": {
            name: resolve_codec(name, t.block_size, "k").encode(np.zeros(t.block_size)).tobytes().hex()
            for name, t in BLOCK_TYPES.items()
        },
        "fork_profiles": [fork(profile) for profile in PROFILES.values() if profile.turbo_types],
    }


def exact(value: np.floating) -> float:
    return float(value)


def block_type(t: BlockType) -> dict[str, Any]:
    return {
        "name": t.name,
        "family": t.family,
        "ggml_type": t.ggml_type,
        "values": t.block_size,
        "bytes": t.block_bytes,
        "bits_per_value": t.block_bytes * 8 / t.block_size,
        "encode": ENCODERS[t.name],
        "fields": fields(t, t.block_size),
    }


def fields(t: BlockType, n_values: int) -> list[dict[str, Any]]:
    """Where each field lies; `shift` is the place of its bits in the code."""
    found: list[dict[str, Any]] = [
        {"name": name, "offset": 2 * i, "bytes": 2, "holds": "f16"} for i, name in enumerate(t.scale_fields)
    ]
    offset = 2 * t.n_scales
    shifts = {"qs": 0, "signs": 2, "qh": 4}
    for name, bits in t.code_fields:
        n_bytes = n_values * bits // 8
        field = {"name": name, "offset": offset, "bytes": n_bytes, "holds": t.name}
        if t.family != "float":
            order = "halves" if t.family == "ggml" and bits == 4 else "run"
            field |= {"holds": "codes", "bits": bits, "shift": shifts[name], "order": order}
        found.append(field)
        offset += n_bytes
    return found


def turbo_block(n: int) -> dict[str, Any]:
    codec = resolve_codec("turbo4", n, "k")
    assert codec.rotation is not None and codec.block_size == n
    return {
        "values": n,
        "part": codec.rotation.size,
        "parts": n // codec.rotation.size,
        "rotation_factor": exact(codec.rotation.factor),
        "codebook_factor": exact(np.float32(np.sqrt(TABLE_GROUP / n))),
        "bytes": {name: BLOCK_TYPES[name].bytes_for(n) for name in TURBO},
        "fields": {name: fields(BLOCK_TYPES[name], n) for name in TURBO},
    }


def scaled_codebook(generation: int, bits: int, group: int) -> dict[str, Any]:
    book = codebook(bits, group, generation)
    return {
        "generation": generation,
        "bits": bits,
        "group": group,
        "values": [exact(v) for v in book.values],
        "boundaries": [exact(v) for v in book.boundaries],
    }


def ggml_rotation(head_dim: int) -> dict[str, Any]:
    def size(side: Side) -> int | None:
        rotation = resolve_codec("q8_0", head_dim, side).rotation if head_dim % 32 == 0 else None
        return None if rotation is None else rotation.size

    return {"head_dim": head_dim, "k": size("k"), "v": size("v")}


def row(name: str, head_dim: int) -> dict[str, Any]:
    codec = resolve_codec(name, head_dim, "k")
    shape = LayerShape(1, head_dim, head_dim)
    page = side_bytes(shape, LayerTypes(name, name, "off", 0), "k", PAGE_TOKENS)
    balanced = side_bytes(shape, LayerTypes(name, name, "page", 0), "k", PAGE_TOKENS)
    return {
        "type": name,
        "head_dim": head_dim,
        "blocks": codec.n_blocks,
        "row_bytes": codec.row_bytes,
        "bits_per_value": codec.row_bytes * 8 / head_dim,
        "page_bytes": page.total,
        "page_bytes_balanced": None if codec.is_float else balanced.total,
    }


def fork(profile: Profile) -> dict[str, Any]:
    ids = {name: profile.type_id(name) for name in reversed(TURBO)}
    return {"profile": profile.name, **ids, "others": OTHER_FORK_TYPES.get(profile.name, {})}


def write(path: Path, value: Any) -> None:
    """One line for each innermost list or object of scalars, so that differences show where they are."""
    path.write_text(laid_out(value, 0) + "\n", encoding="utf-8")


def laid_out(value: Any, depth: int) -> str:
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(item, (dict, list)) for item in nested) and len(json.dumps(value)) < 2000:
        return json.dumps(value)
    space = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {laid_out(item, depth + 1)}" for key, item in value.items()]
        return "{" + space + ("," + space).join(items) + space[:-1] + "}"
    if isinstance(value, list):
        return "[" + space + ("," + space).join(laid_out(item, depth + 1) for item in value) + space[:-1] + "]"
    return json.dumps(value)


if __name__ == "__main__":
    write(SPEC / "tables.json", tables())

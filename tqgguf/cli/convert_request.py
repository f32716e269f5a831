"""One call of `tqgguf convert`, and which of its flags are about what SRC holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf_errors import readable


@dataclass(frozen=True)
class ConvertRequest:
    """The fields are the options of `convert`."""

    source: str
    target: str
    to: str | None = None
    type_k: str | None = None
    type_v: str | None = None
    requantise: bool = False
    v_trans: bool | None = None
    bits: int = 0
    group_size: int = 64
    profile: str | None = None
    model: str | None = None
    head_dim: int = 0
    rotated: bool | None = None
    generation: int | None = None
    sequence: int | None = None
    mlx_model: str | None = None
    traditional: bool | None = None
    weight_type: str | None = None
    split_max_size: str | None = None
    dry_run: bool = False
    json_output: bool = False


CACHE_FLAGS = {
    "type_k": "-ctk",
    "type_v": "-ctv",
    "v_trans": "--v-trans",
    "bits": "--kv-bits",
    "group_size": "--kv-group-size",
    "profile": "--profile",
    "model": "-m",
    "head_dim": "--head-dim",
    "rotated": "--kv-rotation",
    "generation": "--codebook-generation",
    "sequence": "--sequence-id",
    "mlx_model": "--mlx-model",
    "traditional": "--rope-order",
}
"""Flags about prompt caches, by the request's fields."""

MODEL_FLAGS = {"weight_type": "--type", "split_max_size": "--split-max-size", "dry_run": "--dry-run"}
"""Flags about models."""

_SIZE = re.compile(r"(\d+)([MG])")
_UNITS = {"M": 10**6, "G": 10**9}


def refuse_flags(request: ConvertRequest, flags: Mapping[str, str], of: str, found: str) -> None:
    """RequestError where one of `flags` was given, which are about `of`, and SRC is `found`."""
    defaults = {field.name: field.default for field in fields(ConvertRequest)}
    given = [flag for name, flag in flags.items() if getattr(request, name) != defaults[name]]
    if given:
        raise RequestError(f"{given[0]}: is about {of}, and {readable(request.source)} is {found}")


def bytes_of(text: str | None) -> int:
    """A size as llama.cpp's gguf-split takes it, in millions or thousands of millions; 0 for none."""
    if text is None:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None or not int(found[1]):
        raise RequestError(f"--split-max-size: expected a number with M or G, as in 2G, found {text!r}")
    return int(found[1]) * _UNITS[found[2]]

"""One call of `tqgguf convert`, typed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import shown


@dataclass(frozen=True)
class ConvertRequest:
    """The fields are the options of `convert`; what has its default was not given."""

    source: str
    target: str
    to: str | None = None
    type_k: str | None = None
    type_v: str | None = None
    requantise: bool = False
    v_trans: bool | None = None
    bits: int | None = None
    group_size: int | None = None
    profile: str | None = None
    model: str | None = None
    head_dim: int | None = None
    rotated: bool | None = None
    generation: int | None = None
    sequence: int | None = None
    mlx_model: str | None = None
    rope_order: str | None = None
    weight_type: str | None = None
    split_max_size: str | None = None
    dry_run: bool = False
    json_output: bool = False


_SIZE = re.compile(r"([0-9]{1,12})([MG])")
_UNITS = {"M": 10**6, "G": 10**9}


def bytes_of(text: str | None) -> int:
    """A size as llama.cpp's gguf-split takes it, in millions or thousands of millions; 0 for none."""
    if text is None:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None or not int(found[1]):
        raise RequestError(f"--split-max-size: expected a number with M or G, as in 2G, found {shown(text)}")
    return int(found[1]) * _UNITS[found[2]]

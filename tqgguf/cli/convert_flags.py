"""Which flags of `tqgguf convert` have an effect on which conversion: one table, and the refusal of all others.

A flag that does nothing is refused, for whoever gives it expects something of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Final, NamedTuple

from tqgguf.cli.convert_ends import CACHE_KINDS, End
from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.ranges import INT32, Ranges, check_ranges
from tqgguf.conversion.weight_rules import FILE_TYPES
from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import readable, shown

Serves = Callable[[End, End], bool]
"""Whether a flag has an effect where the first end becomes the second."""


class Flag(NamedTuple):
    """needs: the field of a flag without which this one does nothing; excluded_by: of one that says it already."""

    name: str
    serves: Serves
    needs: str = ""
    excluded_by: str = ""


def _to(*ends: End) -> Serves:
    return lambda source, target: target in ends


def _from(*ends: End) -> Serves:
    return lambda source, target: source in ends


def _at(*ends: End) -> Serves:
    return lambda source, target: source in ends or target in ends


_LLAMA = (End.SESSION, End.SEQUENCE)
_CACHES = tuple(CACHE_KINDS)

FLAGS: Final[dict[str, Flag]] = {
    "weight_type": Flag("--type", _to(End.GGUF)),
    "split_max_size": Flag("--split-max-size", _to(End.GGUF)),
    "dry_run": Flag("--dry-run", _to(End.GGUF, End.FOLDER)),
    "type_k": Flag("-ctk", _to(*_CACHES)),
    "type_v": Flag("-ctv", _to(*_CACHES)),
    "v_trans": Flag("--v-trans", _to(*_LLAMA)),
    "bits": Flag("--kv-bits", _to(End.MLX)),
    "group_size": Flag("--kv-group-size", _to(End.MLX), needs="bits"),
    "mlx_model": Flag("--mlx-model", _to(End.MLX)),
    "profile": Flag("--profile", _at(*_LLAMA)),
    "model": Flag("-m", _to(*_CACHES)),
    "head_dim": Flag("--head-dim", _from(*_LLAMA), excluded_by="model"),
    "rotated": Flag("--kv-rotation", _at(*_LLAMA)),
    "generation": Flag("--codebook-generation", _at(*_LLAMA)),
    "sequence": Flag("--sequence-id", _from(*_LLAMA)),
    "rope_order": Flag("--rope-order", _at(End.MLX)),
}
"""By the request's field. What is not here is good for every conversion, but for --requantise, see `check_flags`."""

_READ_ONLY: Final = re.compile(r"i?q[1-8]_(k(_[a-z]+)?|xxs|xs|s|m|nl_.*)|tq[12]_0|mxfp4(_moe)?|nvfp4", re.IGNORECASE)
"""Names that llama-quantize has of types that weights are not converted to."""
_RANGES: Final[Ranges] = {
    "head_dim": ("--head-dim", 1, 1 << 16),
    "generation": ("--codebook-generation", 2, 3),
    "sequence": ("--sequence-id", 0, INT32),
}


def check_type(name: str | None) -> None:
    """RequestError for a type that weights are not converted to, with the reason where a file can have it."""
    if name is None or name in FILE_TYPES:
        return
    is_read = _READ_ONLY.fullmatch(name) is not None
    reason = "; types of its kind are read and not written, as gguf-py does not encode them" if is_read else ""
    raise RequestError(f"--type: expected one of {', '.join(FILE_TYPES)}, found {shown(name)}{reason}")


def check_flags(request: ConvertRequest, source: End, target: End) -> None:
    """RequestError for the first flag that has no effect where `source` becomes `target`, or is out of its range."""
    defaults = {field.name: field.default for field in fields(ConvertRequest)}
    given = {name for name, default in defaults.items() if getattr(request, name) != default}
    check_ranges(request, _RANGES)
    for name, flag in FLAGS.items():
        if name not in given:
            continue
        if not flag.serves(source, target):
            raise RequestError(
                f"{flag.name}: has no effect where {readable(request.source)}, {source}, becomes {target}; leave it out"
            )
        if flag.needs and flag.needs not in given:
            raise RequestError(f"{flag.name}: has no effect without {FLAGS[flag.needs].name}; leave it out")
        if flag.excluded_by in given:
            raise RequestError(f"{flag.name}: has no effect beside {FLAGS[flag.excluded_by].name}; leave it out")
    if request.requantise and source not in CACHE_KINDS and "weight_type" not in given:
        raise RequestError("--requantise: has no effect on weights without --type; leave it out")
    if request.requantise and source is End.CHECKPOINT:
        raise RequestError("--requantise: has no effect on a Hugging Face folder, which is not quantised; leave it out")

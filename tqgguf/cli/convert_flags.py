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
from tqgguf.cli.flag_table import ranges_of, rows_of
from tqgguf.cli.ranges import check_ranges
from tqgguf.conversion.weight_rules import FILE_TYPES
from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import readable, shown

Serves = Callable[[End, End], bool]
"""Whether a flag has an effect where the first end becomes the second."""


class Effect(NamedTuple):
    """Where a flag has one. needs: the field of a flag without which this one does nothing; excluded_by: of one that
    says it already."""

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

EFFECTS: Final[dict[str, Effect]] = {
    "weight_type": Effect(_to(End.GGUF)),
    "split_max_size": Effect(_to(End.GGUF)),
    "dry_run": Effect(_to(End.GGUF, End.FOLDER)),
    "type_k": Effect(_to(*_CACHES)),
    "type_v": Effect(_to(*_CACHES)),
    "v_trans": Effect(_to(*_LLAMA)),
    "bits": Effect(_to(End.MLX)),
    "group_size": Effect(_to(End.MLX), needs="bits"),
    "mlx_model": Effect(_to(End.MLX)),
    "profile": Effect(_at(*_LLAMA)),
    "model": Effect(_to(*_CACHES)),
    "head_dim": Effect(_from(*_LLAMA), excluded_by="model"),
    "rotated": Effect(_at(*_LLAMA)),
    "generation": Effect(_at(*_LLAMA)),
    "sequence": Effect(_from(*_LLAMA)),
    "rope_order": Effect(_at(End.MLX)),
}
"""Of flags, by the request's field. What is not here is good for every conversion, but for --requantise, see
`check_flags`."""

_READ_ONLY: Final = re.compile(r"i?q[1-8]_(k(_[a-z]+)?|xxs|xs|s|m|nl_.*)|tq[12]_0|mxfp4(_moe)?|nvfp4", re.IGNORECASE)
"""Names that llama-quantize has of types that weights are not converted to."""


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
    check_ranges(request, ranges_of("convert"))
    spelled = {flag.field: flag.names[0] for flag in rows_of("convert")}
    for name, effect in EFFECTS.items():
        if name not in given:
            continue
        if not effect.serves(source, target):
            where = f"{readable(request.source)}, {source}, becomes {target}"
            raise RequestError(f"{spelled[name]}: has no effect where {where}; leave it out")
        if effect.needs and effect.needs not in given:
            raise RequestError(f"{spelled[name]}: has no effect without {spelled[effect.needs]}; leave it out")
        if effect.excluded_by in given:
            raise RequestError(f"{spelled[name]}: has no effect beside {spelled[effect.excluded_by]}; leave it out")
    if request.requantise and source not in CACHE_KINDS and "weight_type" not in given:
        raise RequestError("--requantise: has no effect on weights without --type; leave it out")
    if request.requantise and source is End.CHECKPOINT:
        raise RequestError("--requantise: has no effect on a Hugging Face folder, which is not quantised; leave it out")

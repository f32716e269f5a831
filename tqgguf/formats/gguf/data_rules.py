"""Judges the data of a GGUF file's tensors: every scale and every floating-point value must be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tqgguf.formats.cursor import Buffer
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.finite import DENSE, first_non_finite
from tqgguf.formats.gguf.parse import ParsedGguf, TensorRecord
from tqgguf.formats.gguf.rules import bad_alignment, data_start, fits, n_bytes
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.formats.wording import shown


def judge_data(parsed: ParsedGguf, buffer: Buffer, progress: Callable[[int], None]) -> Iterator[GgufError]:
    """One defect for each tensor with numbers that are not finite. Tensors that do not lie within the file are skipped,
    as other rules speak of them. progress: called with bytes that were looked at, as `first_non_finite` does.
    """
    if not parsed.is_whole or bad_alignment(parsed):
        return
    start = data_start(parsed)
    for tensor in parsed.tensors:
        if fits(parsed, tensor):
            yield from _tensor(parsed, buffer, tensor, start + tensor.data_offset, progress)


def _tensor(
    parsed: ParsedGguf, buffer: Buffer, tensor: TensorRecord, begin: int, progress: Callable[[int], None]
) -> Iterator[GgufError]:
    bad = first_non_finite(buffer, begin, n_bytes(tensor) or 0, tensor.type_id, progress)
    if bad is None:
        return
    type_name, name = GGML_TYPES[tensor.type_id].name, tensor.name
    is_dense = type_name in DENSE
    code, what = ("non-finite-value", "value") if is_dense else ("non-finite-scale", "block")
    found = f"bits 0x{bad.bits:x} in {what} {bad.block}"
    expected = f"finite {'values' if is_dense else 'scales'}"
    more = f" and {bad.count - 1} more" if bad.count > 1 else ""
    message = f"tensor {shown(name)} ({type_name}): expected {expected}, found {found}{more}"
    yield GgufError(
        code, parsed.path, message, offset=begin + bad.position, tensor=name, expected=expected, found=found
    )

"""GGUF to GGUF: weights in another type, split files made one, one made several, everything else untouched.

Metadata entries are copied as their bytes, tensors as theirs unless their type changes; those go through float32, a run
of rows at a time on all cores, so that memory is bounded by a few runs, whatever the model's size. What the types mean
is `codec`'s business, which tensor gets which is `weight_rules`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from numpy.typing import NDArray

from tqgguf.conversion.files import Plan, PlannedTensor, make_plan
from tqgguf.conversion.row_encoding import Encode, bytes_of, encoded_runs
from tqgguf.conversion.weight_rules import FILE_TYPES, QUANTIZATION_VERSION, Choice, choose, facts_of
from tqgguf.formats.atomic import refuse_source
from tqgguf.formats.errors import RequestError, TqggufError, UnsupportedModelError
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.split import SPLIT_KEYS
from tqgguf.formats.gguf.tensor_values import can_decode, decode
from tqgguf.formats.gguf.types import GGML_TYPES, MetadataType, ValueType, ggml_type_name
from tqgguf.formats.gguf.write import Piece, entry, u32_entry
from tqgguf.formats.models.loading import model_defects, refuse

STEPS_KEY: Final = "tqgguf.convert.steps"
"""Array of strings: what `tqgguf convert` did to the weights, the latest last."""
FILE_TYPE_KEY: Final = "general.file_type"
QUANTIZATION_KEY: Final = "general.quantization_version"

COPY_BYTES: Final = 1 << 23


def plan_gguf(
    file: GGUFFile,
    target: str,
    wanted: str | None = None,
    max_bytes: int = 0,
    *,
    requantise: bool = False,
    step: str = "",
    only_look: bool = False,
) -> Plan:
    """Plan the conversion of an open file, which must stay open until the plan is written, into `target`.

    wanted: a type of FILE_TYPES for the weights, None to leave all as they are. max_bytes: of a shard, 0 for one file.
    step: the provenance to be noted where weights change. only_look: the plan is not to be written, and tensors that
    could not be are in it too, each with its refusal. DefectError: the model is not sound. RequestError for a
    target that is part of the source, or whose name cannot be; for weights that would be quantised twice unless
    `requantise`; UnsupportedModelError for weights of a type that cannot be decoded.
    """
    if "general.architecture" in file.metadata:  # else nobody knows what the file must have
        refuse(model_defects(file))
    facts = facts_of(file)
    tensors = []
    for info in file.tensors.values():
        if info.n_bytes is None:
            file.raw(info.name)  # raises: data of unknown size cannot even be copied
        chosen = choose(info, wanted, facts) if wanted is not None and info.n_values else Choice(info.ggml_type)
        refusal = _refusal(file, info, chosen, requantise)
        if refusal is not None and not only_look:
            raise refusal
        tensors.append(_planned(file, info, chosen, refusal))
    entries = _entries(file, wanted, step if any(not tensor.is_copied for tensor in tensors) else "")
    plan = make_plan(target, entries, tensors, max_bytes, file.alignment)
    for planned in plan.files:
        refuse_source(planned.path, file.paths)
    return plan


def _planned(file: GGUFFile, info: TensorInfo, chosen: Choice, refusal: TqggufError | None) -> PlannedTensor:
    is_copied = chosen.ggml_type == info.ggml_type
    n_read = info.n_bytes or 0
    return PlannedTensor(
        name=info.name,
        shape=info.shape,
        type_name=info.type_name,
        ggml_type=chosen.ggml_type,
        source_bytes=n_read,
        n_bytes=n_read if is_copied else bytes_of(chosen.ggml_type, info.n_values),
        read=partial(_copied, file, info) if is_copied else partial(_encoded, file, info, chosen.ggml_type),
        is_copied=is_copied,
        reason=chosen.reason,
        refusal=refusal,
    )


def _refusal(file: GGUFFile, info: TensorInfo, chosen: Choice, requantise: bool) -> TqggufError | None:
    """Why a tensor cannot become what was chosen, None if it can."""
    if chosen.ggml_type == info.ggml_type:
        return None
    if not can_decode(info.ggml_type):
        return UnsupportedModelError(f"{file.path}: tensor {info.name} is of {info.type_name}, which cannot be decoded")
    is_quantised = GGML_TYPES[info.ggml_type].dtype is None
    if is_quantised and GGML_TYPES[chosen.ggml_type].dtype is None and not requantise:
        return RequestError(
            f"{file.path}: tensor {info.name} is of {info.type_name} already, and quantising it again as "
            f"{ggml_type_name(chosen.ggml_type)} loses more than once from the original; --requantise allows it"
        )
    return None


def _entries(file: GGUFFile, wanted: str | None, step: str) -> tuple[Piece, ...]:
    """The source's entries without what says how it was split, with what says what its weights have become."""
    entries: dict[str, bytes] = {key: raw for key, raw in file.raw_entries().items() if key not in SPLIT_KEYS}
    if wanted is not None:
        entries[FILE_TYPE_KEY] = u32_entry(FILE_TYPE_KEY, FILE_TYPES[wanted])
        entries[QUANTIZATION_KEY] = u32_entry(QUANTIZATION_KEY, QUANTIZATION_VERSION)
    if step:
        before = file.metadata.get(STEPS_KEY)
        steps = [*(before if isinstance(before, list) else ()), step]
        entries[STEPS_KEY] = entry(STEPS_KEY, MetadataType(ValueType.ARRAY, ValueType.STRING), steps)
    return tuple(entries.values())


def _copied(file: GGUFFile, info: TensorInfo, encode: Encode | None) -> Iterator[tuple[int, Piece]]:
    raw = file.raw(info.name)
    for start in range(0, len(raw), COPY_BYTES):
        piece = raw[start : start + COPY_BYTES]
        yield len(piece), piece.data
        file.forget(info.name, start, start + len(piece))


def _encoded(file: GGUFFile, info: TensorInfo, ggml_type: int, encode: Encode | None) -> Iterator[tuple[int, Piece]]:
    stored = file.array(info.name)
    stored = stored.reshape(-1, stored.shape[-1])
    row_bytes = stored.strides[0]

    def rows_of(rows: slice) -> NDArray[Any]:
        return stored[rows] if info.type_name in ("F16", "F32") else decode(info, stored[rows])

    what = f"{file.path}: tensor {info.name}"
    for rows, blocks in encoded_runs((len(stored), info.shape[-1]), ggml_type, rows_of, encode, what):
        yield (rows.stop - rows.start) * row_bytes, blocks
        file.forget(info.name, rows.start * row_bytes, rows.stop * row_bytes)

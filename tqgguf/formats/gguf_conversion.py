"""GGUF to GGUF: weights in another type, split files made one, one made several, everything else untouched.

A plan says what each tensor becomes and which file holds it, before a byte is written. Metadata entries are copied as
their bytes, tensors as theirs unless their type changes; those go through float32, a run of rows at a time on all
cores, so that memory is bounded by a few runs, whatever the model's size. What the types mean is `codec`'s business.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.atomic import check_space, refuse_source, replacing
from tqgguf.formats.codec import make_codec
from tqgguf.formats.errors import EncodeError, RequestError, UnsupportedModelError
from tqgguf.formats.gguf_reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf_rules import ALIGNMENT_KEY
from tqgguf.formats.gguf_split import COUNT_KEY, NUMBER_KEY, SHARD_NAME, SPLIT_KEYS, TENSORS_KEY
from tqgguf.formats.gguf_types import DEFAULT_ALIGNMENT, GGML_TYPES, MAX_SHARDS, MetadataType, ValueType, ggml_type_name
from tqgguf.formats.gguf_write import GgufTensor, Piece, entry, size_of_file, u32_entry, write_gguf
from tqgguf.formats.ordered_work import in_order
from tqgguf.formats.tensor_values import can_decode, decode, row_groups
from tqgguf.formats.weight_rules import FILE_TYPES, QUANTIZATION_VERSION, choose, facts_of

STEPS_KEY: Final = "tqgguf.convert.steps"
"""Array of strings: what `tqgguf convert` did to the weights, the latest last."""
FILE_TYPE_KEY: Final = "general.file_type"
QUANTIZATION_KEY: Final = "general.quantization_version"

VALUES_AT_ONCE: Final = 1 << 19  # of a run of rows: measured, smaller and larger ones are slower
COPY_BYTES: Final = 1 << 23

Encode = Callable[[str, NDArray[Any]], NDArray[np.uint8] | None]
"""Type and float16 or float32 rows [n, columns] to blocks [n, row_bytes]; None where it does not serve them."""


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one tensor. reason: why it is not of the type that was asked for."""

    info: TensorInfo
    ggml_type: int
    reason: str = ""

    @property
    def is_copied(self) -> bool:
        return self.ggml_type == self.info.ggml_type

    @property
    def n_bytes(self) -> int:
        if self.is_copied:
            return self.info.n_bytes or 0
        made = GGML_TYPES[self.ggml_type]
        return self.info.n_values // made.block_size * made.block_bytes


@dataclass(frozen=True)
class PlannedFile:
    """One file to be written: its metadata entries and tensors, and how large it will be."""

    path: str
    entries: tuple[Piece, ...]
    tensors: tuple[PlannedTensor, ...]
    n_bytes: int


@dataclass(frozen=True)
class Plan:
    """All of a conversion. n_bytes: of the files to be written. source_bytes: of tensor data to be read."""

    source: GGUFFile
    files: tuple[PlannedFile, ...]

    @property
    def tensors(self) -> list[PlannedTensor]:
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def source_bytes(self) -> int:
        return sum(tensor.info.n_bytes or 0 for tensor in self.tensors)


def plan_gguf(
    file: GGUFFile,
    target: str,
    wanted: str | None = None,
    max_bytes: int = 0,
    *,
    requantise: bool = False,
    step: str = "",
) -> Plan:
    """Plan the conversion of an open file into `target`.

    wanted: a type of FILE_TYPES for the weights, None to leave all as they are. max_bytes: of a shard, 0 for one file.
    step: the provenance to be noted where weights change. RequestError for a target that is part of the source, or
    whose name cannot be; for weights that would be quantised twice unless `requantise`; UnsupportedModelError for
    weights of a type that cannot be decoded.
    """
    paths = _target_paths(target, max_bytes)
    facts = facts_of(file)
    tensors = []
    for info in file.tensors.values():
        if info.n_bytes is None:
            file.raw(info.name)  # raises: data of unknown size cannot even be copied
        chosen = None if wanted is None else choose(info, wanted, facts)
        tensors.append(
            PlannedTensor(info, info.ggml_type)
            if chosen is None
            else PlannedTensor(info, chosen.ggml_type, chosen.reason)
        )
        _check_change(file, tensors[-1], requantise)
    entries = _entries(file, wanted, step if any(not tensor.is_copied for tensor in tensors) else "")
    plan = Plan(file, tuple(_files(paths, entries, tensors, max_bytes, file.alignment)))
    for planned in plan.files:
        refuse_source(planned.path, file.paths)
    return plan


def write_plan(plan: Plan, encode: Encode | None = None, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the files of a plan; all appear when all are whole, the first last.

    encode: a faster way than numpy's for some types. progress: called with bytes read and bytes there are.
    TqggufError: there is too little room on the disk, or the files cannot be written; EncodeError: a value is not
    finite. Nothing is left behind then, and what was there stays.
    """
    check_space(plan.files[0].path, plan.n_bytes)
    done, total = 0, plan.source_bytes
    with contextlib.ExitStack() as stack:
        temporaries = [stack.enter_context(replacing(file.path)) for file in plan.files]
        for planned, temporary in zip(plan.files, temporaries, strict=True):

            def read(tensor: PlannedTensor) -> Iterator[Piece]:
                nonlocal done
                for n_read, piece in _pieces(plan.source, tensor, encode):
                    yield piece
                    done += n_read
                    if progress is not None:
                        progress(done, total)

            with temporary.open("wb") as out:
                write_gguf(out, planned.entries, _to_write(planned.tensors, read), plan.source.alignment)


def _check_change(file: GGUFFile, tensor: PlannedTensor, requantise: bool) -> None:
    if tensor.is_copied:
        return
    info = tensor.info
    if not can_decode(info.ggml_type):
        raise UnsupportedModelError(f"{file.path}: tensor {info.name} is of {info.type_name}, which cannot be decoded")
    is_quantised = GGML_TYPES[info.ggml_type].dtype is None
    if is_quantised and GGML_TYPES[tensor.ggml_type].dtype is None and not requantise:
        raise RequestError(
            f"{file.path}: tensor {info.name} is of {info.type_name} already, and quantising it again as "
            f"{ggml_type_name(tensor.ggml_type)} loses more than once from the original; --requantise allows it"
        )


def _target_paths(target: str, max_bytes: int) -> Callable[[int], list[str]]:
    """Names of so many files."""
    folder, name = os.path.split(target)
    shard = SHARD_NAME.fullmatch(name)
    if not max_bytes:
        if shard is not None:
            raise RequestError(f"{target}: is the name of a shard, and one file is to be written; give another name")
        return lambda count: [target] * count
    prefix = shard["prefix"] if shard is not None else name.removesuffix(".gguf")
    return lambda count: [os.path.join(folder, f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


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


def _files(
    paths: Callable[[int], list[str]],
    entries: tuple[Piece, ...],
    tensors: Sequence[PlannedTensor],
    max_bytes: int,
    alignment: int,
) -> Iterator[PlannedFile]:
    """The tensors in their order, each file as full as `max_bytes` lets it be and holding one tensor at least."""

    def entries_of(i: int, count: int) -> tuple[Piece, ...]:
        if not max_bytes:
            return entries
        split = tuple(
            entry(key, MetadataType(kind), value)
            for key, kind, value in (
                (NUMBER_KEY, ValueType.U16, i),
                (COUNT_KEY, ValueType.U16, count),
                (TENSORS_KEY, ValueType.I32, len(tensors)),
            )
        )
        aligned = () if alignment == DEFAULT_ALIGNMENT else (u32_entry(ALIGNMENT_KEY, alignment),)
        return (*(entries if i == 0 else aligned), *split)

    groups: list[list[PlannedTensor]] = [[]]
    for tensor in tensors:
        held = [*groups[-1], tensor]
        if max_bytes and groups[-1] and _size(entries_of(len(groups) - 1, 1), held, alignment) > max_bytes:
            groups.append([tensor])
        else:
            groups[-1].append(tensor)
    if len(groups) > min(MAX_SHARDS, np.iinfo(np.uint16).max):
        raise RequestError(f"--split-max-size {max_bytes}: it would take {len(groups):,} files; allow larger ones")
    for i, (path, group) in enumerate(zip(paths(len(groups)), groups, strict=True)):
        own = entries_of(i, len(groups))
        yield PlannedFile(path, own, tuple(group), _size(own, group, alignment))


def _size(entries: Iterable[Piece], tensors: Iterable[PlannedTensor], alignment: int) -> int:
    return size_of_file(entries, _to_write(tensors, lambda tensor: ()), alignment)


def _to_write(tensors: Iterable[PlannedTensor], read: Callable[[PlannedTensor], Iterable[Piece]]) -> list[GgufTensor]:
    return [
        GgufTensor(tensor.info.name, tensor.info.shape, tensor.ggml_type, tensor.n_bytes, partial(read, tensor))
        for tensor in tensors
    ]


def _pieces(file: GGUFFile, tensor: PlannedTensor, encode: Encode | None) -> Iterator[tuple[int, Piece]]:
    """A tensor's new data, and how many of its old bytes each piece stands for."""
    name = tensor.info.name
    if tensor.is_copied:
        raw = file.raw(name)
        for start in range(0, len(raw), COPY_BYTES):
            piece = raw[start : start + COPY_BYTES]
            yield len(piece), piece.data
            file.forget(name, start, start + len(piece))
        return
    stored = file.array(name)
    stored = stored.reshape(-1, stored.shape[-1])
    row_bytes = stored.strides[0]
    n_rows = len(stored)
    runs = list(row_groups((n_rows, tensor.info.shape[-1]), VALUES_AT_ONCE))

    def encoded(rows: slice) -> NDArray[np.uint8]:
        return _encoded(file, tensor, stored[rows], rows.start, encode)

    for rows, blocks in zip(runs, in_order(encoded, runs), strict=True):
        stop = min(rows.stop, n_rows)
        yield (stop - rows.start) * row_bytes, blocks.reshape(-1).data
        file.forget(name, rows.start * row_bytes, stop * row_bytes)


def _encoded(
    file: GGUFFile, tensor: PlannedTensor, stored: NDArray[Any], first: int, encode: Encode | None
) -> NDArray[np.uint8]:
    """Rows as the file has them in the new type: [n, row_bytes]."""
    info, cache_type = tensor.info, ggml_type_name(tensor.ggml_type).lower()
    rows = stored if info.type_name in ("F16", "F32") else decode(info, stored)
    if encode is not None:
        blocks = encode(cache_type, rows)
        if blocks is not None:
            return blocks
    try:
        return make_codec(cache_type, info.shape[-1], None).encode(rows)
    except EncodeError as error:
        raise EncodeError(f"{file.path}: tensor {info.name}, rows from {first} on: {error}") from error

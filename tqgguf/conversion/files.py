"""Weights on their way into GGUF files: what each tensor becomes, which file holds it, and the writing of it all.

A plan says everything before a byte is written. Where tensors come from, and how they get their types, is the business
of whoever makes them; here they are names, sizes and bytes in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from tqgguf.conversion.row_encoding import Encode
from tqgguf.formats.atomic import check_space, replacing_set
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.formats.gguf.model_rules import judge_metadata, judge_tensors
from tqgguf.formats.gguf.parse import parse
from tqgguf.formats.gguf.rules import ALIGNMENT_KEY
from tqgguf.formats.gguf.split import COUNT_KEY, NUMBER_KEY, SHARD_NAME, TENSORS_KEY
from tqgguf.formats.gguf.types import DEFAULT_ALIGNMENT, MAX_SHARDS, MetadataType, ValueType
from tqgguf.formats.gguf.write import GgufTensor, Piece, entry, header, size_of_file, u32_entry, write_gguf

Read = Callable[[Encode | None], Iterator[tuple[int, Piece]]]
"""Gives a tensor's new data in pieces, each with how many bytes of the source it stands for."""


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one tensor. type_name: the source's; reason: why it is not of the type that was asked for.
    refusal: why it cannot be written so; such plans are only looked at.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    ggml_type: int
    source_bytes: int
    n_bytes: int
    read: Read
    is_copied: bool = False
    reason: str = ""
    refusal: TqggufError | None = None


@dataclass(frozen=True)
class PlannedFile:
    """One file to be written: its metadata entries and tensors, and how large it will be."""

    path: str
    entries: tuple[Piece, ...]
    tensors: tuple[PlannedTensor, ...]
    n_bytes: int


@dataclass(frozen=True)
class Plan:
    """All of a conversion into GGUF."""

    files: tuple[PlannedFile, ...]
    alignment: int = DEFAULT_ALIGNMENT

    @property
    def tensors(self) -> list[PlannedTensor]:
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def refusal(self) -> TqggufError | None:
        """Why the plan cannot be written, if it cannot."""
        return next((tensor.refusal for tensor in self.tensors if tensor.refusal is not None), None)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensor data to be written."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Bytes of the files to be written."""
        return sum(file.n_bytes for file in self.files)

    @property
    def source_bytes(self) -> int:
        """Bytes of tensor data to be read."""
        return sum(tensor.source_bytes for tensor in self.tensors)


def make_plan(
    target: str,
    entries: tuple[Piece, ...],
    tensors: Sequence[PlannedTensor],
    max_bytes: int = 0,
    alignment: int = DEFAULT_ALIGNMENT,
) -> Plan:
    """Distribute tensors, in their order, over files of at most `max_bytes`, one tensor at least in each; 0: one file.

    RequestError for a name that one file, or so many, cannot have.
    """
    paths = _target_paths(target, max_bytes)

    def entries_of(i: int, count: int) -> tuple[Piece, ...]:
        if not max_bytes:
            return entries
        split = (
            entry(NUMBER_KEY, MetadataType(ValueType.U16), i),
            entry(COUNT_KEY, MetadataType(ValueType.U16), count),
            entry(TENSORS_KEY, MetadataType(ValueType.I32), len(tensors)),
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
        raise RequestError(f"{target}: it would take {len(groups):,} files of {max_bytes:,} bytes; allow larger ones")
    files = []
    for i, (path, group) in enumerate(zip(paths(len(groups)), groups, strict=True)):
        own = entries_of(i, len(groups))
        files.append(PlannedFile(path, own, tuple(group), _size(own, group, alignment)))
    return Plan(tuple(files), alignment)


def judge_planned(source: str, entries: Sequence[Piece], tensors: Iterable[PlannedTensor]) -> None:
    """FormatError where a model of these would break a rule of `model_rules`, as validators and readers apply them."""
    parsed = parse(header(entries, _to_write(tensors, lambda tensor: ())), source)
    for defect in chain(judge_metadata(source, parsed.entries), judge_tensors([parsed])):
        if defect.is_error:
            raise FormatError(f"{source}: a GGUF of it could not be used: {defect.bare}") from defect


def write_plan(plan: Plan, encode: Encode | None = None, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the files of a plan; they appear when all are whole, the first, without which none can be read, last.

    encode: a faster way than numpy's for some types. progress: called with bytes read and bytes there are.
    TqggufError: there is too little room on the disk, or the files cannot be written; EncodeError: a value is not
    finite. Nothing is left behind then, and what was there stays.
    """
    check_space(plan.files[0].path, plan.n_bytes)
    done, total = 0, plan.source_bytes

    def pieces(tensor: PlannedTensor) -> Iterator[Piece]:
        nonlocal done
        for n_read, piece in tensor.read(encode):
            yield piece
            done += n_read
            if progress is not None:
                progress(done, total)

    with replacing_set([file.path for file in plan.files]) as temporaries:
        for planned, temporary in zip(plan.files, temporaries, strict=True):
            with temporary.open("wb") as out:
                write_gguf(out, planned.entries, _to_write(planned.tensors, pieces), plan.alignment)


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


def _size(entries: Iterable[Piece], tensors: Iterable[PlannedTensor], alignment: int) -> int:
    return size_of_file(entries, _to_write(tensors, lambda tensor: ()), alignment)


def _to_write(tensors: Iterable[PlannedTensor], pieces: Callable[[PlannedTensor], Iterable[Piece]]) -> list[GgufTensor]:
    return [
        GgufTensor(tensor.name, tensor.shape, tensor.ggml_type, tensor.n_bytes, partial(pieces, tensor))
        for tensor in tensors
    ]

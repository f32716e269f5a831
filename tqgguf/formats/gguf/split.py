"""Split GGUF sets: which files belong to the one that was named, and whether they agree.

A set of N files is named `NAME-00001-of-0000N.gguf` and so on; each file says its index (`split.no`, from 0), N
(`split.count`) and the number of tensors of the whole set (`split.tensors.count`). Only the first has the model's
metadata. Source: llama.cpp's gguf-split. Nothing is opened here.

Nothing in a shard says which set it is of. That shards are of two models shows where counts, names, shapes, types or
metadata that later shards repeat disagree; shards of two models that are alike in all of these cannot be told apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.parse import ParsedGguf
from tqgguf.formats.gguf.rules import find
from tqgguf.formats.gguf.types import INTEGER_TYPES, MAX_SHARDS, ggml_type_name
from tqgguf.formats.wording import shown

SHARD_NAME: Final = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

NUMBER_KEY: Final = "split.no"
COUNT_KEY: Final = "split.count"
TENSORS_KEY: Final = "split.tensors.count"
SPLIT_KEYS: Final = (NUMBER_KEY, COUNT_KEY, TENSORS_KEY)

_LAYER: Final = re.compile(r"blk\.\d{1,9}\.")
_FEWEST_PARTS: Final = 3
"""Kinds of matrices that two shards share before their types say anything: some kinds vary by layer in one model."""


def shard_paths(parsed: ParsedGguf) -> tuple[tuple[str, ...], int]:
    """The paths of the set that a file belongs to, and the file's index among them; one path if it is not split.

    Raises GgufError if the file's name and its metadata disagree, or if a file of the set does not exist.
    """
    folder, name = os.path.split(parsed.path)
    named = SHARD_NAME.fullmatch(name)
    if find(parsed, COUNT_KEY) is None:
        if named and int(named["count"]) > 1:
            message = (
                f"the name says shard {int(named['number'])} of {int(named['count'])}, but {COUNT_KEY} is not in the "
                "metadata; if the file is a whole model, give it another name"
            )
            raise GgufError("split-name", parsed.path, message)
        return (parsed.path,), 0
    count = _known(parsed, COUNT_KEY)
    if count <= 1:
        return (parsed.path,), 0
    at = _offset(parsed, COUNT_KEY)
    if count > MAX_SHARDS:
        raise GgufError("over-limit", parsed.path, f"{COUNT_KEY} is {count}, expected at most {MAX_SHARDS}", offset=at)
    index = _known(parsed, NUMBER_KEY)
    if index >= count:
        message = f"{NUMBER_KEY} is {index} and {COUNT_KEY} {count}, expected less"
        raise GgufError("split-disagrees", parsed.path, message, offset=_offset(parsed, NUMBER_KEY))
    expected = f"-{index + 1:05d}-of-{count:05d}.gguf"
    if not named or (int(named["number"]), int(named["count"])) != (index + 1, count):
        message = f"it is shard {index + 1} of {count}, expected a name that ends in {expected}; was it renamed?"
        raise GgufError("split-name", parsed.path, message, offset=_offset(parsed, NUMBER_KEY))
    names = [f"{named['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    paths = tuple(parsed.path if i == index else os.path.join(folder, names[i]) for i in range(count))
    missing = [name for name, path in zip(names, paths, strict=True) if not os.path.exists(path)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"the model is split into {count} files, and {missing[0]}{more} is missing beside this one"
        raise GgufError("split-missing", parsed.path, message)
    return paths, index


def judge_set(files: list[ParsedGguf]) -> Iterator[GgufError]:
    """All defects of a set whose files are given in the order of their names: they must be one model."""
    first = files[0]
    bad = [error for parsed in files for key in SPLIT_KEYS if isinstance(error := _count(parsed, key), GgufError)]
    yield from bad
    if bad:
        return
    for index, parsed in enumerate(files):
        by_name = "its place in the set by its name; is it a renamed copy of another shard?"
        yield from _same(parsed, NUMBER_KEY, index, by_name, "split-number")
        yield from _same(parsed, COUNT_KEY, len(files), "as the other shards say")
        yield from _same(parsed, TENSORS_KEY, _known(first, TENSORS_KEY), f"as {os.path.basename(first.path)} says")
        if parsed is not first:
            yield from _as_first(parsed, first)
    seen: dict[str, str] = {}
    for parsed in files:
        for tensor in parsed.tensors:
            if tensor.name in seen:
                message = f"tensor {shown(tensor.name)} is also in shard {seen[tensor.name]}"
                yield GgufError("duplicate-tensor", parsed.path, message, offset=tensor.offset, tensor=tensor.name)
        seen |= {tensor.name: os.path.basename(parsed.path) for tensor in parsed.tensors}
    stated = _known(first, TENSORS_KEY)
    if len(seen) != stated:
        message = f"{TENSORS_KEY} is {stated}, but the shards have {len(seen)} tensors together"
        where = _offset(first, TENSORS_KEY)
        yield GgufError("split-disagrees", first.path, message, offset=where, expected=len(seen), found=stated)
    yield from _other_types(files)


def _as_first(parsed: ParsedGguf, first: ParsedGguf) -> Iterator[GgufError]:
    """Metadata of a later shard that the first one has with other values. Most writers repeat none of them."""
    firsts = {entry.key: entry for entry in first.entries}
    for entry in parsed.entries:
        same = firsts.get(entry.key)
        if same is None or entry.key in SPLIT_KEYS:
            continue
        if entry.type.element != same.type.element or not np.array_equal(entry.value, same.value):
            found, expected = shown(entry.value), shown(same.value)
            message = f"{shown(entry.key)} is {found}, expected {expected} as in the first shard"
            at = entry.value_offset
            yield GgufError("split-disagrees", parsed.path, message, offset=at, expected=expected, found=found)


def _other_types(files: list[ParsedGguf]) -> Iterator[GgufError]:
    """Shards whose matrices have no type in common with those of the same names, but for the layer, in other shards."""
    types = [_types_by_part(parsed) for parsed in files]
    for i, parsed in enumerate(files):
        others: dict[str, set[int]] = {}
        for held in types[:i] + types[i + 1 :]:
            for part, ids in held.items():
                others.setdefault(part, set()).update(ids)
        shared = types[i].keys() & others.keys()
        if len(shared) >= _FEWEST_PARTS and all(types[i][part].isdisjoint(others[part]) for part in shared):
            found, expected = (
                ", ".join(sorted({ggml_type_name(type_id) for part in shared for type_id in each[part]}))
                for each in (types[i], others)
            )
            message = f"its layers' matrices are of {found}, those of the other shards of {expected}"
            yield GgufError("split-types", parsed.path, message, expected=expected, found=found)


def _types_by_part(parsed: ParsedGguf) -> dict[str, set[int]]:
    """What layers' matrices are for ("attn_q.weight") -> the types that they have in a shard."""
    types: dict[str, set[int]] = {}
    for tensor in parsed.tensors:
        layer = _LAYER.match(tensor.name)
        if layer is not None and len(tensor.dims) > 1:
            types.setdefault(tensor.name[layer.end() :], set()).add(tensor.type_id)
    return types


def _offset(parsed: ParsedGguf, key: str) -> int | None:
    entry = find(parsed, key)
    return None if entry is None else entry.value_offset


def _count(parsed: ParsedGguf, key: str) -> int | GgufError:
    """The count of that key, or what is wrong with it."""
    entry = find(parsed, key)
    if entry is None:
        return GgufError(
            "split-key", parsed.path, f"it is a shard of a split model, but {key} is missing", expected=key
        )
    if entry.type.value in INTEGER_TYPES and entry.value >= 0:
        return int(entry.value)
    found, expected = f"{entry.type} {shown(entry.value)}", "an integer >= 0"
    message = f"{key} is {found}, expected {expected}"
    return GgufError("split-key", parsed.path, message, offset=entry.value_offset, expected=expected, found=found)


def _known(parsed: ParsedGguf, key: str) -> int:
    """The count of that key; GgufError if it is none."""
    count = _count(parsed, key)
    if isinstance(count, GgufError):
        raise count
    return count


def _same(parsed: ParsedGguf, key: str, expected: int, why: str, code: str = "split-disagrees") -> Iterator[GgufError]:
    found = _known(parsed, key)
    if found != expected:
        message = f"{key} is {found}, expected {expected}, {why}"
        yield GgufError(code, parsed.path, message, offset=_offset(parsed, key), expected=expected, found=found)

"""Looks at the bytes of a snapshot in our GGUF carrier: checksums, token ids, and what `snapshots.values` finds.

Structure is `snapshots.read`'s, which comes first. Data is streamed in slices of rows, each looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.finite import no_progress
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.checksums import damaged, n_entries
from tqgguf.formats.snapshots.format import (
    CHECKSUM,
    CHECKSUM_ALGORITHM,
    CHECKSUMS,
    CHUNK_BYTES,
    I32,
    TOKENS,
    side_tensor,
)
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Snapshot, bad_token
from tqgguf.formats.snapshots.values import part_problems, row_problems
from tqgguf.formats.wording import shown


def data_defects(
    file: GGUFFile, snapshot: Snapshot | None, progress: Callable[[int], None] = no_progress
) -> Iterator[DefectError]:
    """What is wrong with the data, in the order of the file; without a snapshot, whose structure was not sound, only
    what checksums say. progress: called with bytes whose checksums were looked at, and with 0 on the way through rows.
    """
    yield from checksum_defects(file, progress)
    if snapshot is None:
        return
    yield from _token_defects(file, snapshot)
    for layer in snapshot.layers:
        for side in SIDES:
            yield from _value_defects(file, layer, side, progress)


def checksum_defects(file: GGUFFile, progress: Callable[[int], None] = no_progress) -> Iterator[DefectError]:
    """Holds every byte before the checksums against them."""
    path = file.path
    kind = file.metadata.get(f"{CHECKSUM}algorithm"), file.metadata.get(f"{CHECKSUM}chunk")
    if not (file.says(f"{CHECKSUM}algorithm", CHECKSUM_ALGORITHM) and file.says(f"{CHECKSUM}chunk", CHUNK_BYTES)):
        expected = f"{CHECKSUM_ALGORITHM} of every {CHUNK_BYTES} bytes"
        message = f"checksums: expected {expected}, found {shown(kind[0])} of every {shown(kind[1])}"
        yield GgufError("checksum-kind", path, message, expected=expected, found=shown(kind))
        return
    info = file.tensors.get(CHECKSUMS)
    if info is None:
        yield GgufError("checksum-missing", path, f"tensor {CHECKSUMS!r} is missing", tensor=CHECKSUMS)
        return
    start = file.data_start
    n_bytes = info.offset - start
    expected_shape = (n_entries(n_bytes),)
    last = max(other.offset for other in file.tensors.values())
    if info.ggml_type != I32 or info.shape != expected_shape or info.offset != last:
        message = (
            f"tensor {CHECKSUMS!r}: expected {expected_shape[0]} numbers I32 for the {n_bytes} bytes before it, behind "
            f"all other tensors, found {info.type_name} {list(info.shape)}"
        )
        yield GgufError("checksum-missing", path, message, offset=info.offset, tensor=CHECKSUMS)
        return
    entries, content = file.array(CHECKSUMS).view(np.uint32), file.bytes_of(0)
    behind = bytes(content[info.offset + entries.nbytes :])
    if any(behind) or len(behind) >= file.alignment:
        message = f"expected zero bytes up to a multiple of {file.alignment} behind the checksums, found others"
        yield GgufError("checksum", path, message, offset=info.offset + entries.nbytes, tensor=CHECKSUMS)
    for first, end in damaged(content, start, n_bytes, entries, progress):
        if first < 0:
            first, end, names = info.offset, info.offset + 4 * len(entries), CHECKSUMS
        else:
            touched = (
                t for t in file.tensors.values() if t.n_bytes and first < t.offset + t.n_bytes and t.offset < end
            )
            names = ", ".join(t.name for t in sorted(touched, key=lambda t: t.offset)) or "the header"
        shown_names = names if len(names) <= 80 else f"{names[:80]}..."
        message = f"bytes {first} to {end} differ from their checksum; they belong to {shown_names}"
        yield GgufError("checksum", path, message, offset=first, tensor=names.split(", ")[0])


def _token_defects(file: GGUFFile, snapshot: Snapshot) -> Iterator[DefectError]:
    bad = bad_token(snapshot.tokens, snapshot.n_vocab)
    if bad is not None:
        at, found = file.tensors[TOKENS].offset + 4 * bad.place, int(snapshot.tokens[bad.place])
        yield GgufError(
            "token-range", file.path, bad.message, offset=at, tensor=TOKENS, expected=bad.expected, found=found
        )


def _value_defects(
    file: GGUFFile, layer: LayerSnapshot, side: Side, progress: Callable[[int], None]
) -> Iterator[DefectError]:
    for problem in chain(part_problems(layer, side), row_problems(layer, side, progress)):
        name = side_tensor(layer.layer, side, problem.part)
        offset = file.tensors[name].offset + problem.at
        message = f"tensor {name!r}: {problem.message}"
        yield GgufError(problem.rule, file.path, message, offset=offset, tensor=name)

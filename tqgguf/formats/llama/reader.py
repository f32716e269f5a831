"""Opens llama.cpp's session and sequence files: as records whose rows are views of the mapped file.

The mapping stays until the last array of a record is gone. What rows mean is not known here.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from tqgguf.formats.gguf.types import ggml_type_name
from tqgguf.formats.llama.format import MAGIC_NAMES
from tqgguf.formats.llama.parse import parse_state
from tqgguf.formats.llama.profiles import EXCHANGED, MAINLINE_TYPES, fork_readings
from tqgguf.formats.llama.row_rules import judge_rows
from tqgguf.formats.llama.rules import judge_state, sequences
from tqgguf.formats.llama.state import LayerRows, LlamaState
from tqgguf.formats.mapped_file import map_file
from tqgguf.formats.rules.table import DefectError

_EXPECTED = "a llama.cpp session or sequence file"


def open_llama_state(path: str | os.PathLike[str]) -> LlamaState:
    """Open and check a file. StateError (a DefectError): its first defect; TqggufError: it cannot be opened."""
    state, findings = examine_llama_state(path)
    for finding in findings:
        if finding.is_error:
            raise finding
    assert state is not None
    for defect in judge_rows(state):
        raise defect
    return state


def examine_llama_state(path: str | os.PathLike[str]) -> tuple[LlamaState | None, list[DefectError]]:
    """The record as far as it can be read; all that is wrong with its structure. TqggufError: it cannot be opened."""
    name = os.fsdecode(path)
    buffer = map_file(name, _EXPECTED)
    try:
        state, failure = parse_state(buffer, name)
    except DefectError as error:
        return None, [error]
    findings: list[DefectError] = list(judge_state(state))
    return state, findings if failure is None else [*findings, failure]


@dataclass(frozen=True)
class StreamSummary:
    """memory: "base" or "window". positions: the lowest and the highest. types: name -> layers, of K and of V."""

    memory: str
    n_cells: int
    positions: tuple[int, int] | None
    sequences: tuple[int, ...]
    v_trans: bool
    n_layers: int
    types_k: dict[str, int]
    types_v: dict[str, int]
    row_bytes_k: tuple[int, ...]
    row_bytes_v: tuple[int, ...]
    cell_fields: int
    n_bytes: int


@dataclass(frozen=True)
class StateSummary:
    """What a person wants to know of a state file; sizes in bytes. packed: the list of tokens is the server's."""

    kind: str
    magic: str
    version: int
    architecture: str | None
    n_tokens: int
    packed: bool
    streams: tuple[StreamSummary, ...]
    trailing: int


def summarise(state: LlamaState) -> StateSummary:
    """What a file holds."""
    streams = []
    for name, memory in zip(("base", "window"), state.memories, strict=False):
        for stream in memory.streams:
            cells = stream.cells
            span = (int(cells.positions.min()), int(cells.positions.max())) if len(cells) else None
            streams.append(
                StreamSummary(
                    memory=name,
                    n_cells=len(cells),
                    positions=span,
                    sequences=tuple(sequences(cells)),
                    v_trans=bool(stream.v_trans),
                    n_layers=len(stream.k),
                    types_k=_types(stream.k),
                    types_v=_types(stream.v),
                    row_bytes_k=tuple(rows.row_bytes for rows in stream.k),
                    row_bytes_v=tuple(rows.row_bytes for rows in stream.v),
                    cell_fields=cells.extra.shape[1],
                    n_bytes=sum(rows.n_bytes for rows in stream.rows()),
                )
            )
    return StateSummary(
        kind=state.kind,
        magic=MAGIC_NAMES[state.kind],
        version=state.version,
        architecture=state.architecture,
        n_tokens=len(state.tokens),
        packed=state.packed is not None,
        streams=tuple(streams),
        trailing=len(state.trailing),
    )


def _types(layers: tuple[LayerRows, ...]) -> dict[str, int]:
    return dict(Counter(map(_type_name, layers)))


def _type_name(rows: LayerRows) -> str:
    """The cache type, or a fork's with its profile: `type 43 (turbo3 of thetom-2026-05)`."""
    if rows.type_id in MAINLINE_TYPES:
        return MAINLINE_TYPES[rows.type_id]
    for profile, cache_type in fork_readings(rows.type_id, rows.row_bytes).items():
        if profile in EXCHANGED:
            return f"type {rows.type_id} ({cache_type} of {profile})"
    return ggml_type_name(rows.type_id)

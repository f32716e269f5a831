"""llama.cpp's session and sequence files: parsed to records, written back to the same bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from llama_builder import Q8_0, Built, Memory, Side, build_state, packed_tokens, random_rows

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.llama import state as records
from tqgguf.formats.llama.reader import examine_llama_state, open_llama_state, summarise
from tqgguf.formats.llama.write import pieces, write_llama_state

DATA = Path(__file__).parent / "data"
RECORDED = sorted(DATA.glob("*.session"))
TURBO3, TURBO4 = 43, 44  # of the fork thetom-2026-05

WINDOWED = (Memory(n_cells=6), Memory(n_cells=4, first=2))
MIXED = [(Side(Q8_0, 136), Side(TURBO3, 100)), (Side(TURBO4, 136), Side(1, 128)), (Side(0, 512), Side(30, 256))]

SOUND: dict[str, Built] = {
    "session 10": build_state(),
    "session 9": build_state(version=9),
    "sequence 3": build_state("sequence"),
    "sequence 2": build_state("sequence", 2),
    "n tokens, n - 1 cells": build_state(tokens=[5, 6, 7, 8]),
    "one token": build_state(tokens=[5], memories=[Memory(n_cells=1)]),
    "nothing": build_state(tokens=[], memories=[Memory(n_cells=0)]),
    "transposed values": build_state(memories=[Memory(v_trans=1)]),
    "transposed f32": build_state(memories=[Memory(v_trans=1, layers=[(Side(), Side(0, 512, 4))])]),
    "mixed types": build_state(version=9, memories=[Memory(layers=MIXED)]),
    "windows": build_state(memories=WINDOWED),
    "windows of a sequence": build_state("sequence", memories=WINDOWED),
    "ring of a window": build_state(memories=[Memory(n_cells=4), Memory(cells=[(2, [0]), (3, [0]), (1, [0])])]),
    "all layers have windows": build_state(tokens=range(6), memories=[Memory(n_cells=6, layers=[]), WINDOWED[1]]),
    "two sequences": build_state(memories=[Memory(cells=[(0, [0, 1]), (1, [0]), (1, [1]), (2, [1])])]),
    "two streams": build_state(memories=[Memory(n_streams=2)]),
    "two streams of windows": build_state(memories=[Memory(n_streams=2), Memory(n_streams=2)]),
    "cells with x, y": build_state("sequence", 2, memories=[Memory(cells=[(i, [0], (i, i)) for i in range(3)])]),
    "cells with x, y, token": build_state(memories=[Memory(cells=[(7, [0], (i, i, 99)) for i in range(3)])]),
    "packed tokens": build_state("sequence", tokens=packed_tokens([5, 6, 7])),
    "packed with a picture": build_state("sequence", tokens=packed_tokens([5, -1, -1], [(1, b"pixel")])),
    "a sequence that goes on": build_state("sequence", trailing=b"\x00\x01\x02"),
}


@pytest.mark.parametrize("name", SOUND)
def test_parsing_and_writing_gives_the_same_bytes(name, tmp_path):
    path = SOUND[name].write(tmp_path / "state")
    state = open_llama_state(path)
    assert b"".join(bytes(piece) for piece in pieces(state)) == SOUND[name].data
    write_llama_state(path, state)  # over the file that the record is a view of
    assert path.read_bytes() == SOUND[name].data


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_files_of_llama_cpp_and_its_fork_come_out_as_they_went_in(path, tmp_path):
    write_llama_state(tmp_path / "copy", open_llama_state(path))
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


def test_a_record_has_what_the_file_says(tmp_path):
    built = build_state(version=9, tokens=[5, 6, 7, 8], architecture="gemma3", memories=WINDOWED)
    state = open_llama_state(built.write(tmp_path / "state"))
    assert (state.kind, state.version, state.architecture, list(state.tokens)) == ("session", 9, "gemma3", [5, 6, 7, 8])
    base, window = (memory.streams[0] for memory in state.memories)
    assert list(base.cells.positions) == [0, 1, 2, 3, 4, 5]
    assert list(window.cells.positions) == [2, 3, 4, 5]
    assert [(rows.type_id, rows.row_bytes, rows.data.shape) for rows in window.k] == [(1, 256, (4, 256))] * 2
    assert bytes(base.v[0].data[1:2]) == random_rows(3, 6 * 256)[256:512]
    assert base.v[0].offset == built.fields["base.v0"]


def test_transposed_values_stay_channel_by_channel(tmp_path):
    state = open_llama_state(build_state(memories=[Memory(v_trans=1)]).write(tmp_path / "state"))
    values = state.memories[0].streams[0].v[0]
    assert (values.is_transposed, values.row_bytes, values.data.shape) == (True, 256, (128, 6))


def test_rows_are_views_of_the_file(tmp_path):
    state = open_llama_state(build_state().write(tmp_path / "state"))
    rows = state.memories[0].streams[0].k[0].data
    assert not rows.flags.owndata and not rows.flags.writeable


def test_more_fields_in_cells_are_found_by_where_layers_begin(tmp_path):
    path = SOUND["cells with x, y, token"].write(tmp_path / "state")
    cells = open_llama_state(path).memories[0].streams[0].cells
    assert cells.extra.tolist() == [[0, 0, 99], [1, 1, 99], [2, 2, 99]]


def test_cells_know_their_sequences(tmp_path):
    path = SOUND["two sequences"].write(tmp_path / "state")
    cells = open_llama_state(path).memories[0].streams[0].cells
    assert list(cells.of(0)) == [0, 1]
    assert list(cells.of(1)) == [0, 2, 3]
    assert cells.offset_of(2) - cells.offset_of(0) == 16 + 12


def test_a_packed_list_gives_its_tokens(tmp_path):
    state = open_llama_state(SOUND["packed with a picture"].write(tmp_path / "state"))
    assert list(state.tokens) == [5, -1, -1]
    assert state.packed is not None


def test_files_of_forks_and_sequences_that_go_on_are_sound_with_a_warning(tmp_path):
    for name, rule in (("mixed types", "TQ435"), ("a sequence that goes on", "TQ404")):
        _, findings = examine_llama_state(SOUND[name].write(tmp_path / "state"))
        assert {finding.rule.id for finding in findings} == {rule}


def test_the_summary_counts_types_and_bytes(tmp_path):
    path = build_state(version=9, memories=[Memory(layers=MIXED)]).write(tmp_path / "state")
    summary = summarise(open_llama_state(path))
    (stream,) = summary.streams
    assert (summary.magic, summary.version, summary.n_tokens) == ("ggsn", 9, 3)
    assert stream.types_k == {"q8_0": 1, "type 44 (turbo4 of thetom-2026-05)": 1, "f32": 1}
    assert stream.types_v == {"type 43 (turbo3 of thetom-2026-05)": 1, "f16": 1, "bf16": 1}
    assert stream.positions == (0, 2)
    assert stream.n_bytes == 3 * (136 + 136 + 512 + 100 + 128 + 256)


def test_writing_needs_little_memory_at_a_time():
    class Slices:
        shape = (1 << 18, 1 << 10)
        largest = 0

        def __getitem__(self, rows):
            Slices.largest = max(Slices.largest, rows.stop - rows.start)
            return np.broadcast_to(np.uint8(0), (rows.stop - rows.start, 1 << 10))

    cells = records.Cells.of_sequence(np.arange(1 << 18, dtype=np.int32))
    memory = records.Memory((records.Stream(cells, k=(records.LayerRows(1, Slices()),)),))
    state = records.LlamaState("", "sequence", 3, np.empty(0, np.int32), None, (memory,))
    assert sum(memoryview(piece).nbytes for piece in pieces(state)) > 1 << 28
    assert Slices.largest << 10 <= 1 << 22


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(60), b"ns"])
def test_other_files_are_refused_as_what_they_are_not(content, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(TqggufError, match="expected a llama"):
        open_llama_state(path)


def test_folders_and_missing_files_are_refused(tmp_path):
    with pytest.raises(TqggufError, match="found a folder"):
        open_llama_state(tmp_path)
    with pytest.raises(TqggufError, match="cannot be opened"):
        open_llama_state(tmp_path / "missing")


def test_many_cells_of_different_numbers_of_sequences_come_out_as_they_went_in(tmp_path):
    cells = [(i, [0, 1] if i % 2 else [0]) for i in range(50_000)]
    built = build_state(memories=[Memory(cells=cells, layers=[(Side(1, 2), Side(1, 2))])])
    state = open_llama_state(built.write(tmp_path / "state"))
    assert len(state.memories[0].streams[0].cells.of(1)) == 25_000
    assert b"".join(bytes(piece) for piece in pieces(state)) == built.data


def test_magic_numbers_are_those_of_llama_cpp():
    assert build_state().data[:4] == struct.pack("<I", 0x6767736E) == b"nsgg"
    assert build_state("sequence").data[:4] == struct.pack("<I", 0x67677371) == b"qsgg"

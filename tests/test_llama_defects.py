"""Damaged session and sequence files: each defect has its own rule and the offset of the field that is wrong."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from llama_builder import Q8_0, Memory, Side, build_state, packed_tokens, recurrent_memory
from test_llama_state import SOUND

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.llama.reader import examine_llama_state, open_llama_state
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.validation.validate import validate

WINDOWED = build_state(tokens=range(6), memories=[Memory(n_cells=6), Memory(n_cells=4, first=2)])
SESSION, SEQUENCE = build_state(), build_state("sequence")
TRANSPOSED = build_state(memories=[Memory(v_trans=1)])
STREAMS = build_state(memories=[Memory(n_streams=2)])
QUANTISED = build_state(memories=[Memory(layers=[(Side(Q8_0, 136), Side(Q8_0, 136))] * 2)])
PACKED = build_state("sequence", tokens=packed_tokens([5, -1, -1], [(1, b"pixel")]))


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def i32(n: int) -> bytes:
    return struct.pack("<i", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


# what is wrong -> (file, field, bytes in its place, bytes behind its beginning, rule, field and bytes of the offset)
PATCHED = {
    "version of the future": (SESSION, "version", u32(11), 0, "TQ401", "version", 0),
    "version of the past": (SEQUENCE, "version", u32(1), 0, "TQ401", "version", 0),
    "a session's version in a sequence": (SEQUENCE, "version", u32(10), 0, "TQ401", "version", 0),
    "tokens without end": (SESSION, "n_tokens", u32(2**32 - 1), 0, "TQ405", "n_tokens", 0),
    "more tokens than there are": (SESSION, "n_tokens", u32(2**20), 0, "TQ402", "n_tokens", 0),
    "a negative token": (SESSION, "tokens", i32(-7), 4, "TQ410", "tokens", 4),
    "a name without end": (SESSION, "arch_length", u32(2**31), 0, "TQ405", "arch_length", 0),
    "a name that is no text": (SESSION, "arch", b"\xff\x00", 0, "TQ406", "arch_length", 0),
    "no stream": (SESSION, "base.n_stream", u32(0), 0, "TQ420", "base.n_stream", 0),
    "streams without end": (SESSION, "base.n_stream", u32(2**32 - 1), 0, "TQ420", "base.n_stream", 0),
    "more streams in the window": (WINDOWED, "window.n_stream", u32(2), 0, "TQ420", "window.n_stream", 0),
    "cells without end": (SESSION, "base.n_cells", u32(2**32 - 1), 0, "TQ405", "base.n_cells", 0),
    "more cells than there are": (SESSION, "base.n_cells", u32(2**20), 0, "TQ402", "base.n_cells", 0),
    "a negative position": (SESSION, "base.cells", i32(-1), 12, "TQ421", "base.cells", 12),
    "a position twice": (SESSION, "base.cells", i32(1), 24, "TQ422", "base.cells", 24),
    "a gap": (SESSION, "base.cells", i32(9), 24, "TQ425", "base.cells", 24),
    "a cell of no sequence": (SESSION, "base.cells", u32(0), 16, "TQ423", "base.cells", 16),
    "sequences without end": (SESSION, "base.cells", u32(2**32 - 1), 16, "TQ423", "base.cells", 16),
    "a negative sequence": (SESSION, "base.cells", i32(-1), 20, "TQ424", "base.cells", 20),
    "an absurd sequence": (SESSION, "base.cells", i32(256), 20, "TQ424", "base.cells", 20),
    "v_trans 2": (SESSION, "base.v_trans", u32(2), 0, "TQ431", "base.v_trans", 0),
    "no layers": (SESSION, "base.n_layers", u32(0), 0, "TQ432", "base.n_layers", 0),
    "layers without end": (SESSION, "base.n_layers", u32(2**32 - 1), 0, "TQ432", "base.n_layers", 0),
    "no beginning of layers": (SESSION, "base.v_trans", u32(9) + u32(0), 0, "TQ430", "base.v_trans", 0),
    "another number in a stream": (STREAMS, "base.1.n_layers", u32(2**20), 0, "TQ432", "base.1.n_layers", 0),
    "a removed type": (SESSION, "base.k1", i32(4), 0, "TQ434", "base.k1", 0),
    "a type of weights": (SESSION, "base.v0", i32(12), 0, "TQ434", "base.v0", 0),
    "a type of nobody": (SESSION, "base.v1", i32(99), 0, "TQ434", "base.v1", 0),
    "a negative type": (SESSION, "base.k1", i32(-1), 0, "TQ434", "base.k1", 0),
    "a fork's type": (build_state(memories=[Memory(layers=[(Side(43, 100), Side())])]), "end", b"", 0, "TQ435",
                      "base.k0", 0),
    "rows that fit no fork": (SESSION, "base.k0", i32(43), 0, "TQ436", "base.k0", 4),
    "rows of no bytes": (SESSION, "base.k0.row_bytes", u64(0), 0, "TQ436", "base.k0.row_bytes", 0),
    "rows without end": (SESSION, "base.k0.row_bytes", u64(2**63), 0, "TQ405", "base.k0.row_bytes", 0),
    "rows that end in a block": (QUANTISED, "base.k1", i32(2), 0, "TQ436", "base.k1", 4),
    "rows that end in the next": (SESSION, "base.k0.row_bytes", u64(254), 0, "TQ436", "base.k0.row_bytes", 0),
    "rows longer than the file": (SESSION, "base.v1.row_bytes", u64(512), 0, "TQ402", "base.v1.rows", 0),
    "quantised columns": (TRANSPOSED, "base.v0", i32(8), 0, "TQ437", "base.v0", 0),
    "columns of other elements": (TRANSPOSED, "base.v0", i32(0), 0, "TQ437", "base.v0.element_bytes", 0),
    "columns of no bytes": (TRANSPOSED, "base.v0.element_bytes", u32(0), 0, "TQ437", "base.v0.element_bytes", 0),
    "columns without end": (TRANSPOSED, "base.v0.n_channels", u32(2**32 - 1), 0, "TQ405", "base.v0.n_channels", 0),
    "a window that ends early": (WINDOWED, "window.cells", i32(1), 36, "TQ426", "window.n_cells", 0),
    "a packed list's version": (PACKED, "tokens", u32(2), 4, "TQ411", "tokens", 4),
    "a packed list without end": (PACKED, "tokens", u32(2**31), 8, "TQ411", "tokens", 8),
    "media without end": (PACKED, "tokens", u32(2**31), 24, "TQ411", "tokens", 24),
    "a medium behind the tokens": (PACKED, "tokens", u32(3), 28, "TQ411", "tokens", 24),
    "a medium without end": (PACKED, "tokens", u32(2**31), 32, "TQ411", "tokens", 32),
    "a shorter medium": (PACKED, "tokens", u32(1), 32, "TQ411", "tokens", 37),
}  # fmt: skip


# the same, of rows: they are looked at when all else is sound
FORK = build_state(memories=[Memory(layers=[(Side(43, 56), Side(43, 56))])])
ROWS = {
    "a value that is no number": (SESSION, "base.k1.rows", b"\x01\x7c", 6),
    "an infinite scale": (QUANTISED, "base.v0.rows", b"\x00\xfc", 34),
    "an infinite value, transposed": (TRANSPOSED, "base.v1.rows", b"\x00\x7c", 20),
    "a negative norm": (FORK, "base.k0.rows", b"\x01\x80", 14),
    "a value in another stream": (STREAMS, "base.1.v0.rows", b"\xff\x7f", 0),
    "a value in the window": (WINDOWED, "window.k0.rows", b"\xff\xff", 2),
}


@pytest.mark.parametrize("what", ROWS)
def test_numbers_that_cannot_be_have_their_rule_and_place(what, tmp_path):
    built, name, value, behind = ROWS[what]
    path = tmp_path / "state"
    path.write_bytes(built.patched(name, value, behind))
    found = [(finding.rule.id, finding.offset) for finding in validate(path) if finding.is_error]
    assert found == [("TQ438", built.fields[name] + behind)]
    with pytest.raises(DefectError) as error:
        open_llama_state(path)
    assert (error.value.code, error.value.offset) == ("state-non-finite", built.fields[name] + behind)


def findings(data: bytes, tmp_path) -> list[tuple[str, int | None]]:
    path = tmp_path / "state"
    path.write_bytes(data)
    return [(finding.rule.id, finding.offset) for finding in examine_llama_state(path)[1]]


@pytest.mark.parametrize("what", PATCHED)
def test_a_defect_has_its_rule_and_the_offset_of_its_field(what, tmp_path):
    built, name, value, behind, rule, at, more = PATCHED[what]
    assert (rule, built.fields[at] + more) in findings(built.patched(name, value, behind), tmp_path)


def test_the_reader_raises_what_the_validator_finds_first(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(SESSION.patched("base.k1", i32(99)))
    with pytest.raises(TqggufError, match="K of layer 1: expected a type that caches have") as error:
        open_llama_state(path)
    assert error.value.offset == SESSION.fields["base.k1"]


def test_all_defects_of_a_file_are_found_where_parsing_can_go_on(tmp_path):
    data = SESSION.patched("base.k1", i32(99))
    built = build_state()
    built.data = data
    found = findings(built.patched("base.cells", i32(-5), 12), tmp_path)
    assert [rule for rule, _ in found] == ["TQ421", "TQ425", "TQ434"]


def test_sound_files_have_no_errors(tmp_path):
    for name, built in SOUND.items():
        _, found = examine_llama_state(built.write(tmp_path / "state"))
        assert not [str(finding) for finding in found if finding.is_error], name


def test_a_session_that_goes_on_is_an_error_and_a_sequence_a_warning(tmp_path):
    for built, rule in ((SESSION, "TQ403"), (WINDOWED, "TQ403"), (SEQUENCE, "TQ404")):
        assert findings(built.data + bytes(20), tmp_path) == [(rule, len(built.data))]


def test_every_truncation_says_how_much_is_left(tmp_path):
    path = tmp_path / "state"
    for built in (WINDOWED, TRANSPOSED, PACKED):
        for size in range(8, len(built.data), 7):
            if size == built.fields.get("window.n_stream"):  # a whole file without windows
                continue
            path.write_bytes(built.data[:size])
            with pytest.raises(TqggufError, match=r"left|ends behind V") as error:
                open_llama_state(path)
            assert error.value.offset <= size


def test_keys_without_values_are_named(tmp_path):
    data = SESSION.data[: SESSION.fields["base.v0"]]
    (finding,) = examine_llama_state_of(data, tmp_path)
    assert (finding.rule.id, finding.expected, finding.found) == ("TQ433", "V of 2 layers", "V of 0 layers")
    assert "latent attention" in str(finding)
    data = SESSION.data[: SESSION.fields["base.v1"]]
    (finding,) = examine_llama_state_of(data, tmp_path)
    assert (finding.rule.id, finding.found) == ("TQ433", "V of 1 layers")


def examine_llama_state_of(data, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(data)
    return examine_llama_state(path)[1]


@pytest.mark.parametrize("n_sequences", [0, 1])
@pytest.mark.parametrize("before", ["none", "base"])
def test_recurrent_and_hybrid_models_are_refused_by_name(before, n_sequences, tmp_path):
    built = build_state("sequence", memories=[Memory()] if before == "base" else [])
    found = findings(built.data + recurrent_memory(n_sequences=n_sequences), tmp_path)
    assert found == [("TQ407", len(built.data))]


def test_cells_of_several_sequences_are_no_sequence_file(tmp_path):
    built = build_state("sequence", memories=[Memory(cells=[(0, [0, 1]), (1, [0])])])
    assert ("TQ423", built.fields["base.cells"] + 4) in findings(built.data, tmp_path)


def test_tokens_and_cells_that_disagree_are_a_warning(tmp_path):
    for tokens in ([5], [5, 6, 7, 8, 9]):
        built = build_state(tokens=tokens)
        assert findings(built.data, tmp_path) == [("TQ412", built.fields["n_tokens"])]


def test_streams_of_different_layers_are_refused(tmp_path):
    one, two = build_state(memories=[Memory()]), build_state(memories=[Memory(layers=[(Side(), Side())])])
    begin = one.fields["base.n_stream"]
    data = one.data[:begin] + u32(2) + one.data[begin + 4 :] + two.data[two.fields["base.n_cells"] :]
    at = len(one.data) + two.fields["base.n_layers"] - two.fields["base.n_cells"]
    assert findings(data, tmp_path) == [("TQ432", at)]


def test_counts_cost_nothing_before_they_are_believed(tmp_path):
    path = tmp_path / "state"
    tracemalloc.start()
    for name in ("n_tokens", "arch_length", "base.n_stream", "base.n_cells", "base.n_layers", "base.k0.row_bytes"):
        for value in (2**32 - 1, 2**31, 2**24, 2**16):
            path.write_bytes(SESSION.patched(name, u32(value)))
            examine_llama_state(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()


@pytest.mark.parametrize("name", SOUND)
def test_damaged_bytes_never_raise_anything_else(name, tmp_path):
    data, path = SOUND[name].data, tmp_path / "state"
    random = np.random.Generator(np.random.PCG64(7))
    for _ in range(100):
        damaged = bytearray(data[: int(random.integers(4, len(data) + 1))])
        for _ in range(int(random.integers(1, 4))):
            at = int(random.integers(4, max(5, min(len(damaged), 400))))
            word = random.choice([0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
            damaged[at : at + 4] = u32(int(word))
        path.write_bytes(damaged)
        try:
            open_llama_state(path)
        except TqggufError as error:
            assert "\n" not in str(error)

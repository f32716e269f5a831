"""llama.cpp's state files to snapshots and back: the same bytes, and values that mean the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama_builder import Q8_0, Built, Memory, Side, build_state, packed_tokens, random_rows

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, RequestError, TqggufError, UnsupportedModelError
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.reader import open_llama_state
from tqgguf.formats.llama.to_snapshot import ImportOptions, import_llama_state, outline_of_state
from tqgguf.formats.llama.write import pieces
from tqgguf.formats.models.outline import CachedLayer, ModelOutline, outline_of_widths
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.snapshots.write import write_snapshot

DATA = Path(__file__).parent / "data"
FORK = ImportOptions("thetom-2026-05")
RECORDED = {
    "mainline_f16": ImportOptions(),
    "mainline_q8_0": ImportOptions(),
    "fork_turbo3": FORK,
    "fork_turbo2": FORK,
}
SMOLLM2 = outline_of_widths("llama", [LayerShape(3, 64, 64)] * 30)

TWO = outline_of_widths("llama", [LayerShape(2, 64, 64)] * 2)  # what `Memory` holds by default
FLOATS = outline_of_widths("llama", [LayerShape(2, 64, 64)])
WINDOWED = ModelOutline(
    "gemma3",
    tuple(CachedLayer(i, LayerShape(2, 64, 64, 4 if i % 2 == 0 else None), RopeLayout(64)) for i in range(4)),
)
SIX, FOUR = Memory(n_cells=6), Memory(n_cells=4, first=2)
RING = Memory(cells=[(4, [0]), (5, [0]), (2, [0]), (3, [0])])

# file, model
LAYOUTS: dict[str, tuple[Built, ModelOutline]] = {
    "session 10": (build_state(), TWO),
    "session 9": (build_state(version=9), TWO),
    "sequence 3": (build_state("sequence"), TWO),
    "sequence 2": (build_state("sequence", 2), TWO),
    "n tokens, n - 1 cells": (build_state(tokens=[5, 6, 7, 8]), TWO),
    "fewer tokens than cells": (build_state(tokens=[5]), TWO),
    "no tokens": (build_state(tokens=[]), TWO),
    "one token": (build_state(tokens=[5], memories=[Memory(n_cells=1)]), TWO),
    "two pages and a bit": (build_state(tokens=range(300), memories=[Memory(n_cells=300)]), TWO),
    "another sequence": (build_state(memories=[Memory(cells=[(i, [3]) for i in range(3)])]), TWO),
    "cells out of order": (build_state(memories=[Memory(cells=[(2, [0]), (0, [0]), (1, [0])])]), TWO),
    "transposed values": (build_state(memories=[Memory(v_trans=1)]), TWO),
    "transposed f32": (build_state(memories=[Memory(v_trans=1, layers=[(Side(), Side(0, 512, 4))])]), FLOATS),
    "transposed bf16 out of order": (
        build_state(
            memories=[Memory(v_trans=1, cells=[(1, [0]), (0, [0])], layers=[(Side(30), Side(30))])], tokens=[5, 6]
        ),
        FLOATS,
    ),
    "windows": (build_state(tokens=range(6), architecture="gemma3", memories=[SIX, FOUR]), WINDOWED),
    "windows of a sequence": (build_state("sequence", tokens=range(6), memories=[SIX, FOUR]), WINDOWED),
    "ring of a window": (build_state(tokens=range(6), architecture="gemma3", memories=[SIX, RING]), WINDOWED),
    "all layers have windows": (
        build_state(tokens=range(6), architecture="gemma3", memories=[replace(SIX, layers=[]), FOUR]),
        ModelOutline("gemma3", tuple(CachedLayer(i, LayerShape(2, 64, 64, 4), RopeLayout(64)) for i in range(2))),
    ),
    "transposed windows": (
        build_state(tokens=range(6), architecture="gemma3", memories=[replace(m, v_trans=1) for m in (SIX, RING)]),
        WINDOWED,
    ),
    "windows in one memory": (
        build_state(tokens=range(6), architecture="gemma3", memories=[replace(SIX, layers=SIX.layers * 2)]),
        WINDOWED,
    ),
    "packed tokens": (build_state("sequence", tokens=packed_tokens([5, 6, 7])), TWO),
    "packed with a picture": (build_state("sequence", tokens=packed_tokens([5, -1, -1], [(1, b"pixel")])), TWO),
    "a sequence that goes on": (build_state("sequence", trailing=b"\x00\x01\x02"), TWO),
    **{
        f"type {type_id}": (
            build_state(memories=[Memory(n_cells=5, layers=[(Side(type_id, size), Side(type_id, size))])]),
            FLOATS,
        )
        for type_id, size in ((0, 512), (1, 256), (30, 256), (8, 136), (7, 96), (6, 88), (3, 80), (2, 72), (20, 72))
    },
}


def data_of(state) -> bytes:
    return b"".join(bytes(piece) for piece in pieces(state))


def imported(data: bytes, tmp_path: Path, model: ModelOutline, options: ImportOptions | None = None) -> Snapshot:
    path = tmp_path / "state"
    path.write_bytes(data)
    return import_llama_state(open_llama_state(path), model, options)


def through_our_carrier(snapshot: Snapshot, tmp_path: Path) -> Snapshot:
    write_snapshot(tmp_path / "snapshot.gguf", snapshot)
    return open_snapshot(tmp_path / "snapshot.gguf")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_byte_by_byte(name, tmp_path):
    built, model = LAYOUTS[name]
    data = built.data
    snapshot = imported(data, tmp_path, model)
    snapshot.check()
    assert data_of(export_llama_state(snapshot)) == data
    assert data_of(export_llama_state(through_our_carrier(snapshot, tmp_path))) == data


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_files_come_back_byte_by_byte_through_our_carrier(name, tmp_path):
    data = (DATA / f"{name}.session").read_bytes()
    snapshot = through_our_carrier(imported(data, tmp_path, SMOLLM2, RECORDED[name]), tmp_path)
    assert data_of(export_llama_state(snapshot)) == data


def test_rows_are_not_copied_where_the_file_has_them_as_a_snapshot_does(tmp_path):
    snapshot = imported(build_state().data, tmp_path, TWO)
    rows = snapshot.layers[0].k.rows
    assert isinstance(rows, np.ndarray) and not rows.flags.owndata


def first_layer(name: str, tmp_path: Path, **options) -> tuple[np.ndarray, np.ndarray]:
    """K and V of layer 0, decoded: float32 [4 tokens, 3 heads, 64]."""
    data = (DATA / f"{name}.session").read_bytes()
    layer = imported(data, tmp_path, SMOLLM2, replace(RECORDED[name], **options)).layers[0]
    return tuple(side.codec.decode(side.rows[0:4]) for side in (layer.k, layer.v))


def errors(name: str, tmp_path: Path, **options) -> list[float]:
    """Relative squared errors of K and V in layer 0, which see the same hidden states whatever the cache's type."""
    exact = first_layer("mainline_f16", tmp_path)
    found = first_layer(name, tmp_path, **options)
    return [float(((a - b) ** 2).sum() / (b**2).sum()) for a, b in zip(found, exact, strict=True)]


def test_llama_cpps_q8_0_decodes_to_its_f16_values_with_its_rotation_and_not_without(tmp_path):
    assert max(errors("mainline_q8_0", tmp_path)) < 2e-4
    assert min(errors("mainline_q8_0", tmp_path, rotated=False)) > 0.5


def test_the_forks_turbo_blocks_decode_to_the_f16_values_of_padded_heads(tmp_path):
    assert all(0.02 < error < 0.05 for error in errors("fork_turbo3", tmp_path))
    k, v = errors("fork_turbo2", tmp_path)
    assert 0.09 < k < 0.16
    assert v < 2e-4  # the fork's q8_0, which is not rotated
    assert errors("fork_turbo3", tmp_path, generation=3) != errors("fork_turbo3", tmp_path)


def test_what_a_file_cannot_tell_is_recorded(tmp_path):
    data = (DATA / "fork_turbo3.session").read_bytes()
    codec = imported(data, tmp_path, SMOLLM2, FORK).layers[0].k.codec
    assert (codec.cache_type, codec.head_dim, codec.stored_dim, codec.generation) == ("turbo3", 64, 128, 2)
    origin = imported(data, tmp_path, SMOLLM2, replace(FORK, generation=3)).origin
    assert (origin["profile"], origin["rotated"], origin["generation"]) == ("thetom-2026-05", False, 3)


@pytest.mark.parametrize("options", [replace(FORK, generation=3), replace(FORK, rotated=True)])
def test_other_answers_than_the_defaults_give_the_same_bytes_too(options, tmp_path):
    data = (DATA / "fork_turbo2.session").read_bytes()
    snapshot = through_our_carrier(imported(data, tmp_path, SMOLLM2, options), tmp_path)
    assert data_of(export_llama_state(snapshot)) == data


def test_tokens_beyond_the_list_are_unknown(tmp_path):
    snapshot = imported(build_state(tokens=[5]).data, tmp_path, TWO)
    assert (list(snapshot.tokens), snapshot.n_cells) == ([5, -1, -1], 3)
    snapshot = imported(build_state(tokens=[5, 6, 7, 8]).data, tmp_path, TWO)
    assert (list(snapshot.tokens), snapshot.n_cells) == ([5, 6, 7, 8], 3)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    data = build_state(tokens=[5, 97, 7]).data
    with pytest.raises(FormatError, match="token 1: expected an id of 0 to 96, found 97"):
        imported(data, tmp_path, replace(TWO, n_vocab=97))


def test_a_negative_norm_is_found_by_whoever_knows_the_layout(tmp_path):
    """Rows of 350 bytes are 25 blocks of 14 or 7 of 50: without a profile it cannot be told where norms stand."""
    group = Side(43, 350)
    built = build_state(memories=[Memory(layers=[(group, group)])])
    model = outline_of_widths("llama", [LayerShape(7, 128, 128)])
    options = ImportOptions("thetom-2026-05")
    imported(built.data, tmp_path, model, options)
    with pytest.raises(DefectError, match="expected norms that are finite and not negative, found bits 0x8000"):
        imported(built.patched("base.v0.rows", b"\x00\x80", 350 + 50), tmp_path, model, options)


def test_rows_follow_positions_whatever_the_order_of_cells(tmp_path):
    cells = [(2, [0]), (0, [0]), (1, [0])]
    for v_trans in (0, 1):
        data = build_state(memories=[Memory(cells=cells, v_trans=v_trans)]).data
        layer = imported(data, tmp_path, TWO).layers[0]
        rows = np.frombuffer(random_rows(3, 3 * 256), np.uint8)  # V of layer 0
        rows = rows.reshape(128, 3, 2).swapaxes(0, 1) if v_trans else rows
        expected = rows.reshape(3, 2, 128)[[1, 2, 0]]
        assert (layer.v.rows[0:3] == expected).all()
        assert (layer.v.rows[1:2] == expected[1:2]).all()


def test_a_model_whose_rope_turns_halves_gets_keys_in_that_order_where_they_are_floats(tmp_path):
    halves = replace(TWO, layers=tuple(replace(layer, rope=RopeLayout(64)) for layer in TWO.layers))
    data = build_state().data
    pairs, made = (imported(data, tmp_path, model).layers[0] for model in (TWO, halves))
    values = [layer.k.rows[0:3].copy().view(np.uint16) for layer in (pairs, made)]
    assert (values[1][..., :32] == values[0][..., 0::2]).all() and (values[1][..., 32:] == values[0][..., 1::2]).all()
    assert (made.v.rows[0:3] == pairs.v.rows[0:3]).all()
    assert (pairs.rope.traditional, made.rope.traditional) == (True, False)
    assert data_of(export_llama_state(imported(data, tmp_path, halves))) == data
    blocks = (DATA / "mainline_q8_0.session").read_bytes()
    halves = replace(SMOLLM2, layers=tuple(replace(layer, rope=RopeLayout(64)) for layer in SMOLLM2.layers))
    assert imported(blocks, tmp_path, halves).layers[0].rope.traditional  # blocks keep the file's order and say so


def test_window_layers_begin_where_the_file_begins(tmp_path):
    built, model = LAYOUTS["windows of a sequence"]
    layers = imported(built.data, tmp_path, model).layers
    assert [(layer.layer, layer.start, layer.window) for layer in layers] == [
        (0, 2, 4), (1, 0, None), (2, 2, 4), (3, 0, None),
    ]  # fmt: skip


def test_one_of_several_sequences_can_be_taken(tmp_path):
    shared = [(0, [0, 1]), (1, [0]), (1, [1]), (2, [1])]
    for memories in ([Memory(cells=shared)], [Memory(n_streams=2, cells=shared)]):
        data = build_state(memories=memories).data
        with pytest.raises(RequestError, match=r"holds 2 sequences \(0, 1\)"):
            imported(data, tmp_path, TWO)
        with pytest.raises(RequestError, match="expected a sequence of 0, 1, found 2"):
            imported(data, tmp_path, TWO, ImportOptions(sequence=2))
        snapshot = imported(data, tmp_path, TWO, ImportOptions(sequence=1))
        expected = np.frombuffer(random_rows(1, 4 * 256), np.uint8).reshape(4, 2, 128)[[0, 2, 3]]
        assert (snapshot.layers[0].k.rows[0:3] == expected).all()
        assert "kind" not in snapshot.origin
        assert export_llama_state(snapshot).n_cells == 3


def test_without_a_model_a_head_size_tells_the_heads(tmp_path):
    path = tmp_path / "state"
    for name in RECORDED:
        path.write_bytes((DATA / f"{name}.session").read_bytes())
        outline = outline_of_state(open_llama_state(path), RECORDED[name], 64)
        assert outline == SMOLLM2
    with pytest.raises(RequestError, match="not heads of 448 values"):
        outline_of_state(open_llama_state(path), FORK, 448)
    path.write_bytes(LAYOUTS["windows"][0].data)
    with pytest.raises(RequestError, match="only the model can tell"):
        outline_of_state(open_llama_state(path), ImportOptions(), 64)


REFUSED: dict[str, tuple[bytes, ModelOutline, ImportOptions, type[TqggufError], str]] = {
    "no cells": (build_state(memories=[Memory(n_cells=0)]).data, TWO, ImportOptions(), FormatError, "holds no cells"),
    "a fork's type": (
        (DATA / "fork_turbo3.session").read_bytes(), SMOLLM2, ImportOptions(), RequestError,
        "it is turbo3 of profile thetom-2026-05",
    ),
    "an unknown profile": (build_state().data, TWO, ImportOptions("buun"), RequestError, "profile: expected one of"),
    "an unknown codebook": (build_state().data, TWO, ImportOptions(generation=4), RequestError, "expected 2 or 3"),
    "another architecture": (build_state().data, WINDOWED, ImportOptions(), FormatError, "of architecture 'llama'"),
    "other heads": (
        build_state().data, outline_of_widths("llama", [LayerShape(4, 64, 64)] * 2), ImportOptions(), FormatError,
        "expected rows of 4 heads of 64 values (f16), 512 bytes, found 256",
    ),
    "other layers": (
        build_state().data, FLOATS, ImportOptions(), FormatError, "expected the model's 1 layers, found 2",
    ),
    "windows of a model without": (
        LAYOUTS["windows"][0].data, replace(TWO, architecture="gemma3"), ImportOptions(), FormatError, "has none",
    ),
    "positions of several dimensions": (
        build_state(memories=[Memory(cells=[(i, [0], (i, i, 5)) for i in range(3)])]).data, TWO, ImportOptions(),
        UnsupportedModelError, "several dimensions",
    ),
    "a beginning that is not there": (
        build_state(memories=[Memory(first=5)]).data, TWO, ImportOptions(), FormatError, "from position 0 on, found 5",
    ),
    "a gap": (
        build_state(memories=[Memory(cells=[(0, [0]), (2, [0])])]).data, TWO, ImportOptions(), FormatError,
        "no cell between positions 0 and 2",
    ),
    "a window that ends early": (
        build_state(architecture="gemma3", memories=[SIX, replace(FOUR, first=1)]).data, WINDOWED, ImportOptions(),
        FormatError, "up to position 5, found 4",
    ),
    "a second norm": (
        build_state(version=9, memories=[Memory(layers=[(Side(44, 136), Side())])]).data, FLOATS, FORK, FormatError,
        "expected second norms of 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_snapshot_is_refused_by_name(name, tmp_path):
    data, model, options, kind, message = REFUSED[name]
    with pytest.raises(kind) as error:
        imported(data, tmp_path, model, options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_mixed_types_by_layer_keep_theirs(tmp_path):
    layers = [(Side(Q8_0, 136), Side(2, 72)), (Side(1, 256), Side(20, 72))]
    snapshot = imported(build_state(memories=[Memory(layers=layers)]).data, tmp_path, TWO)
    assert [(layer.types.type_k, layer.types.type_v) for layer in snapshot.layers] == [
        ("q8_0", "q4_0"),
        ("f16", "iq4_nl"),
    ]


def test_exports_of_other_kinds_and_profiles_say_so(tmp_path):
    snapshot = imported(build_state(version=9).data, tmp_path, TWO)
    for options, expected in (
        (ExportOptions(), ("session", 9)),
        (ExportOptions("mainline"), ("session", 10)),
        (ExportOptions("thetom-2026-05"), ("session", 9)),
        (ExportOptions(kind="sequence"), ("sequence", 3)),
        (ExportOptions("thetom-2026-05", kind="sequence"), ("sequence", 2)),
    ):
        state = export_llama_state(snapshot, options)
        assert (state.kind, state.version) == expected
        assert (state.architecture is None) == (state.kind == "sequence")

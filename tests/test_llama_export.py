"""Snapshots of our own caches as llama.cpp's state files: what is copied, encoded, quantised again, or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llama_builder import Memory, Side, build_state
from snapshots import make_layer as make_layer_of_halves
from snapshots import make_snapshot
from test_llama_exchange import FORK, TWO, data_of, imported

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.llama.blocks import form_of, from_canonical, to_canonical
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.profiles import TURBO_FORMS, BlockForm
from tqgguf.formats.models.outline import outline_of_widths
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot

N = 300  # two whole pages and a tail of 44
PLAIN_Q8 = StoredCodec.native("q8_0", 64, "k")


def make_layer(*args, **options) -> LayerSnapshot:
    """With its channels in the order of a llama GGUF, where RoPE turns neighbours."""
    return replace(make_layer_of_halves(*args, **options), rope=RopeLayout(64, True))


def one_layer(type_k: str, type_v: str, **options) -> Snapshot:
    return make_snapshot(N, make_layer(0, N, type_k, type_v, **options))


def exported(snapshot: Snapshot, **options) -> tuple[np.ndarray, np.ndarray]:
    """K and V of layer 0 as uint8 [cells, row_bytes]."""
    stream = export_llama_state(snapshot, ExportOptions(**options)).memories[0].streams[0]
    return tuple(rows.data[0 : rows.data.shape[0]] for rows in (stream.k[0], stream.v[0]))


def test_rows_of_whole_pages_are_copied_and_the_tail_is_encoded_once():
    snapshot = one_layer("q8_0", "q4_0")
    for rows, side in zip(exported(snapshot), (snapshot.layers[0].k, snapshot.layers[0].v), strict=True):
        assert (rows[:256] == side.rows[0:256].reshape(256, -1)).all()
        assert (rows[256:] == side.codec.encode(side.tail).reshape(44, -1)).all()


def test_the_exact_prefix_is_encoded_in_place_of_its_zero_blocks():
    snapshot = one_layer("q8_0", "f16", n_prefix=4)
    k, _ = exported(snapshot)
    side = snapshot.layers[0].k
    assert (k[:4] == side.codec.encode(side.prefix).reshape(4, -1)).all()
    assert (k[4:256] == side.rows[4:256].reshape(252, -1)).all()


def test_floats_become_any_type_without_being_asked():
    snapshot = one_layer("f16", "f32")
    k, v = exported(snapshot, type_k="q8_0", type_v="q4_0")
    for rows, side, name in ((k, snapshot.layers[0].k, "k"), (v, snapshot.layers[0].v, "v")):
        codec = StoredCodec.native({"k": "q8_0", "v": "q4_0"}[name], 64, name)
        assert (rows == codec.encode(side.codec.decode(side.rows)).reshape(N, -1)).all()


@pytest.mark.parametrize("balance", ["page", "full"])
def test_balanced_keys_are_unbalanced_when_they_may_be_quantised_again(balance):
    plain, balanced = (one_layer("f16", "f16"), one_layer("turbo4", "f16", balance=balance, n_prefix=4))
    with pytest.raises(RequestError, match=r"K holds blocks \(turbo4 of 64, .* balanced\) .* quantised again"):
        exported(balanced, type_k="f16")
    k, _ = exported(balanced, type_k="f16", requantise=True)
    expected, _ = exported(plain)
    values, exact = (rows.reshape(-1).view(np.float16).astype(np.float32).reshape(N, 2, 64) for rows in (k, expected))
    assert (values[:4] == exact[:4]).all() and (values[256:] == exact[256:]).all()
    error = ((values - exact)[4:256] ** 2).sum() / (exact[4:256] ** 2).sum()
    assert 0.005 < error < 0.02  # about turbo4's own, of normal values
    with pytest.raises(RequestError, match="quantised again"):
        exported(one_layer("q8_0", "q8_0", balance=balance))  # its own type, but balanced


@pytest.mark.parametrize(
    ("types", "options"),
    [
        (("q8_0", "q8_0"), {"type_k": "q4_0"}),
        (("q8_0", "q8_0"), {"type_v": "f16"}),
        (("q8_0", "q8_0"), {"rotated": False}),
        (("q8_0", "q8_0"), {"profile": "thetom-2026-05"}),
        (("turbo4", "turbo3"), {"profile": "thetom-2026-05"}),
    ],
)
def test_blocks_that_would_be_quantised_again_are_refused_unless_asked_for(types, options):
    snapshot = one_layer(*types)
    with pytest.raises(RequestError, match="quantised again"):
        exported(snapshot, **options)
    exported(snapshot, **options, requantise=True)


def test_a_snapshot_shorter_than_a_page_has_nothing_to_quantise_again():
    snapshot = make_snapshot(100, make_layer(0, 100, "turbo4", "turbo3", balance="full", n_prefix=4))
    k, _ = exported(snapshot, type_k="q8_0", type_v="q8_0")
    assert (k == PLAIN_Q8.encode(snapshot.layers[0].k.tail).reshape(100, -1)).all()


def test_types_that_a_profile_does_not_have_are_refused():
    with pytest.raises(RequestError, match="K is of type turbo4, which profile mainline does not have"):
        exported(one_layer("turbo4", "turbo3"), requantise=True)


def test_types_can_differ_by_layer():
    snapshot = make_snapshot(N, *(make_layer(i, N, "f16", "f16") for i in range(4)))
    state = export_llama_state(snapshot, ExportOptions(type_k="q4_0,0-1:q8_0", type_v="f16,-1:q8_0"))
    stream = state.memories[0].streams[0]
    assert [rows.type_id for rows in stream.k] == [8, 8, 2, 2]
    assert [rows.type_id for rows in stream.v] == [1, 1, 1, 8]


def test_the_forks_turbo_rows_are_padded_and_of_its_generation():
    snapshot = one_layer("f16", "f16")
    state = export_llama_state(snapshot, ExportOptions("thetom-2026-05", type_k="turbo4", type_v="turbo3"))
    stream = state.memories[0].streams[0]
    assert (state.version, stream.k[0].type_id, stream.v[0].type_id) == (9, 44, 43)
    assert (stream.k[0].row_bytes, stream.v[0].row_bytes) == (2 * 68, 2 * 50)


def test_the_forks_rows_come_back_as_the_values_that_they_were(tmp_path):
    snapshot = one_layer("f16", "f16")
    data = data_of(export_llama_state(snapshot, ExportOptions("thetom-2026-05", type_k="turbo4", type_v="turbo3")))
    back = imported(data, tmp_path, outline_of_widths("llama", [LayerShape(2, 64, 64)]), FORK).layers[0]
    for side, now, limit in ((snapshot.layers[0].k, back.k, 0.025), (snapshot.layers[0].v, back.v, 0.04)):
        exact = side.codec.decode(side.rows)
        error = ((now.codec.decode(now.rows[0:N]) - exact) ** 2).sum() / (exact**2).sum()
        assert limit / 3 < error < limit


def test_window_layers_hold_what_the_next_query_sees():
    layers = [make_layer(0, N, "f16", "f16", start=128, window=100), make_layer(1, N, "f16", "f16")]
    layers = [replace(layer, rope=RopeLayout(64)) for layer in layers]
    base, window = export_llama_state(make_snapshot(N, *layers, architecture="gemma3")).memories
    assert list(window.streams[0].cells.positions) == list(range(200, 300))
    assert len(base.streams[0].cells) == N
    assert (window.streams[0].k[0].data[0:1] == layers[0].k.rows[72:73].reshape(1, -1)).all()


def test_transposed_values_lie_channel_by_channel():
    snapshot = one_layer("q8_0", "f16")
    rows, columns = exported(snapshot)[1], exported(snapshot, v_trans=True)[1]
    expected = rows.reshape(-1).view(np.uint16).reshape(N, 128).T
    assert (columns.reshape(-1).view(np.uint16).reshape(128, N) == expected).all()
    with pytest.raises(RequestError, match="transposes float types only"):
        exported(one_layer("q8_0", "q8_0"), v_trans=True)


def test_keys_get_the_order_of_channels_that_the_architectures_ggufs_have():
    halves = make_snapshot(N, make_layer_of_halves(0, N, "f16", "f16"))
    same = replace(halves, architecture="qwen3")
    for side, snapshot, permuted in ((0, halves, True), (1, halves, False), (0, same, False)):
        rows = exported(snapshot)[side].reshape(-1).view(np.float16).reshape(N, 2, 64)
        held = (snapshot.layers[0].k, snapshot.layers[0].v)[side].rows.reshape(-1).view(np.float16).reshape(N, 2, 64)
        if permuted:
            assert (rows[..., 0::2] == held[..., :32]).all() and (rows[..., 1::2] == held[..., 32:]).all()
        else:
            assert (rows == held).all()
    with pytest.raises(RequestError, match="channels in another order"):
        exported(make_snapshot(N, make_layer_of_halves(0, N, "q8_0", "f16")))


def test_an_empty_snapshot_makes_an_empty_memory():
    snapshot = make_snapshot(0, make_layer(0, 0, "f16", "f16"))
    assert data_of(export_llama_state(snapshot)) == build_state(tokens=[], memories=[Memory(n_cells=0)]).data


@pytest.mark.parametrize(
    ("snapshot", "options", "message"),
    [
        (replace(one_layer("f16", "f16"), architecture=""), {}, "does not know"),
        (one_layer("f16", "f16"), {"kind": "slot"}, "expected one of session, sequence, found 'slot'"),
        (one_layer("f16", "f16"), {"profile": "forks"}, "profile: expected one of mainline, thetom-2026-05"),
        (one_layer("f16", "f16"), {"type_k": "q9_0"}, "q9_0"),
        (one_layer("f16", "f16", start=128), {}, "needs all tokens"),
        (make_snapshot(N, make_layer(0, N, "f16", "f16", start=256, window=100)), {}, "needs 100 tokens"),
        (replace(one_layer("f16", "f16"), layers=()), {}, "needs rows of a layer at least"),
    ],
)
def test_what_llama_cpp_could_not_use_is_refused(snapshot, options, message):
    with pytest.raises(RequestError) as error:
        exported(snapshot, **options)
    assert message in str(error.value)


def test_changing_types_of_a_foreign_file_keeps_its_layout(tmp_path):
    built = build_state("sequence", 2, memories=[Memory(cells=[(1, [3]), (0, [3])])], tokens=[5, 6], trailing=b"x")
    snapshot = imported(built.data, tmp_path, TWO)
    state = export_llama_state(snapshot, ExportOptions(type_k="q8_0", rotated=True))
    cells = state.memories[0].streams[0].cells
    assert (list(cells.positions), list(cells.sequence_ids), state.version) == ([1, 0], [3, 3], 2)
    assert bytes(state.trailing) == b"x"


# blocks of 128 values by hand: norm 0x1234, fields of rising bytes
TURBO4 = bytes([0x34, 0x12, *range(64)])
FOREIGN = {
    "turbo4": (TURBO4, bytes([0x34, 0x12, 0, 0, *range(64)])),
    "turbo3": (
        bytes([0x34, 0x12, *range(48)]),
        b"".join(bytes([0x34, 0x12, *range(8 * i, 8 * i + 8), *range(32 + 4 * i, 36 + 4 * i)]) for i in range(4)),
    ),
    "turbo2": (
        bytes([0x34, 0x12, *range(32)]),
        b"".join(bytes([0x34, 0x12, *range(8 * i, 8 * i + 8)]) for i in range(4)),
    ),
}


@pytest.mark.parametrize("cache_type", FOREIGN)
def test_older_layouts_of_turbo_blocks_say_the_same_bits(cache_type):
    canonical, foreign = (np.frombuffer(data * 6, np.uint8).reshape(3, -1) for data in FOREIGN[cache_type])
    form = form_of(cache_type, foreign.shape[1], 2)
    assert form == TURBO_FORMS[cache_type][1]
    assert (to_canonical(cache_type, form, foreign) == canonical).all()
    assert (from_canonical(cache_type, form, canonical) == foreign).all()


def test_fours_of_different_norms_are_refused():
    blocks = np.zeros((1, 56), np.uint8)
    blocks[0, 14] = 1
    with pytest.raises(Exception, match="fours of one norm"):
        to_canonical("turbo3", BlockForm(32, 14), blocks)


@pytest.mark.parametrize(("type_id", "size"), [(44, 132), (43, 112), (42, 80), (42, 68), (43, 100)])
def test_files_of_older_layouts_come_back_byte_by_byte(type_id, size, tmp_path):
    built = build_state(version=9, memories=[Memory(layers=[(Side(type_id, size), Side(type_id, size))])])
    data = built.data
    for name in ("base.k0.rows", "base.v0.rows"):
        at = built.fields[name]
        data = data[:at] + bytes(3 * size) + data[at + 3 * size :]
    snapshot = imported(data, tmp_path, outline_of_widths("llama", [LayerShape(1, 256, 256)]), FORK)
    assert data_of(export_llama_state(snapshot)) == data


def test_rows_are_made_only_when_they_are_read():
    class Counting:
        shape = (256, 2, 68)
        read = 0

        def __getitem__(self, tokens):
            Counting.read += tokens.stop - tokens.start
            return np.zeros((tokens.stop - tokens.start, 2, 68), np.uint8)

    side = SideSnapshot(PLAIN_Q8, Counting())
    layer = LayerSnapshot(0, side, side)
    state = export_llama_state(replace(make_snapshot(256), layers=(layer,)))
    assert Counting.read == 0
    assert len(state.memories[0].streams[0].k[0].data[10:20]) == Counting.read == 10

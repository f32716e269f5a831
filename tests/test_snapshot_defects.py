"""Every rule about snapshots in our GGUF carrier: the smallest file that breaks it, its id, and where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import BOOL, F32, STRING, U32, U64, Tensor, Typed
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import carrier_bytes, make_layer, make_snapshot

from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError, TqggufError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.read import open_snapshot, snapshot_defects
from tqgguf.formats.snapshots.snapshot import SideSnapshot, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot

SMALL = make_snapshot(
    140,
    make_layer(0, 140, n_kv_heads=1, balance="full", n_prefix=2),
    make_layer(2, 140, "q8_0", "f16", n_kv_heads=1),
)
OPEN = make_snapshot(20, make_layer(0, 20, n_kv_heads=1, balance="full", n_prefix=2))


def defects(path: Path) -> list[DefectError]:
    with open_gguf(path) as file:
        return list(snapshot_defects(file))


def put(key: str, type_id: int, value: Any) -> Callable[..., object]:
    return lambda metadata, tensors: metadata.__setitem__(key, Typed(type_id, value))


def patch(name: str, at: int, data: bytes) -> Callable[..., object]:
    """Other bytes in a tensor's data."""

    def change(metadata: Any, tensors: dict[str, Tensor]) -> None:
        old = tensors[name].data
        tensors[name] = replace(tensors[name], data=old[:at] + data + old[at + len(data) :])

    return change


def reshape(name: str, shape: tuple[int, ...], type_id: int | None = None) -> Callable[..., object]:
    def change(metadata: Any, tensors: dict[str, Tensor]) -> None:
        kind = tensors[name].type_id if type_id is None else type_id
        tensors[name] = replace(tensors[name], shape=shape, type_id=kind)

    return change


def drop(name: str) -> Callable[..., object]:
    return lambda metadata, tensors: (tensors if name in tensors else metadata).pop(name)


def add(name: str, tensor: Tensor) -> Callable[..., object]:
    return lambda metadata, tensors: tensors.__setitem__(name, tensor)


NAN16, INF32 = b"\x00\x7e", b"\x00\x00\x80\x7f"

# rule, what is done to the file, the key or tensor that the offset leads to, bytes behind its beginning
CASES = [
    ("TQ301", put("tqgguf.snapshot.version", U32, 2), "tqgguf.snapshot.version", 0),
    ("TQ201", drop("tqgguf.snapshot.version"), None, 0),
    ("TQ202", put("tqgguf.layer.start", STRING, ["0", "0"]), "tqgguf.layer.start", 0),
    ("TQ302", put("tqgguf.codec.version", U32, [1, 1, 9, 1]), "tqgguf.codec.version", 0),
    ("TQ303", put("tqgguf.layer.start", U64, [0]), "tqgguf.layer.start", 0),
    ("TQ303", put("tqgguf.codec.type", STRING, ["turbo4"]), "tqgguf.codec.type", 0),
    ("TQ303", put("tqgguf.snapshot.layers", U32, 3), "tqgguf.layer.number", 0),
    ("TQ303", put("tqgguf.snapshot.prompt_ranges", U64, [0, 5, 9]), "tqgguf.snapshot.prompt_ranges", 0),
    ("TQ120", put("tqgguf.snapshot.layers", U64, 1 << 62), "tqgguf.snapshot.layers", 0),
    ("TQ304", put("tqgguf.codec.type", STRING, ["turbo5", "turbo3", "q8_0", "f16"]), "tqgguf.codec.type", 0),
    ("TQ304", put("tqgguf.codec.rotation_size", U32, [32, 64, 64, 0]), "tqgguf.codec.type", 0),
    ("TQ304", put("tqgguf.codec.generation", U32, [1, 3, 0, 0]), "tqgguf.codec.type", 0),
    ("TQ304", put("tqgguf.codec.head_dim", U32, [0, 64, 64, 64]), "tqgguf.codec.type", 0),
    ("TQ305", put("tqgguf.codec.block_bytes", U32, [34, 26, 36, 2]), "tqgguf.codec.block_bytes", 0),
    ("TQ306", patch("codec.0.codebook", 4, b"\x00\x00\x80\x3f"), "codec.0.codebook", 0),
    ("TQ306", patch("codec.1.boundaries", 0, b"\x00\x00\x80\x3f"), "codec.1.boundaries", 0),
    ("TQ306", drop("codec.0.codebook"), None, 0),
    ("TQ306", put("tqgguf.codec.generation", U32, [2, 3, 0, 0]), "codec.0.codebook", 0),
    ("TQ307", patch("codec.0.signs", 3, b"\x00"), "codec.0.signs", 0),
    ("TQ308", put("tqgguf.layer.number", U32, [2, 2]), "tqgguf.layer.number", 0),
    ("TQ309", put("tqgguf.layer.balance", STRING, ["most", "off"]), "tqgguf.layer.balance", 0),
    ("TQ309", put("tqgguf.layer.prefix", U32, [129, 0]), "tqgguf.layer.prefix", 0),
    ("TQ309", put("tqgguf.layer.kv_heads", U32, [0, 1]), "tqgguf.layer.kv_heads", 0),
    ("TQ309", put("tqgguf.layer.codec_v", U32, [1, 4]), "tqgguf.layer.codec_v", 0),
    ("TQ309", put("tqgguf.layer.rope_dims", U32, [63, 64]), "tqgguf.layer.rope_dims", 0),
    ("TQ309", put("tqgguf.layer.rope_dims", U32, [66, 64]), "blk.0.attn_k.rows", 0),
    ("TQ201", drop("tqgguf.fingerprint.version"), None, 0),
    ("TQ309", put("tqgguf.layer.window", U64, [0, 1 << 31]), "tqgguf.layer.window", 0),
    ("TQ312", put("tqgguf.snapshot.chunk", U64, 1 << 40), "tqgguf.snapshot.chunk", 0),
    ("TQ312", put("tqgguf.snapshot.vocabulary", U64, 1 << 31), "tqgguf.snapshot.vocabulary", 0),
    ("TQ310", reshape("blk.0.attn_k.rows", (64, 1, 68)), "blk.0.attn_k.rows", 0),
    ("TQ310", reshape("blk.2.attn_k.rows", (128, 1, 68), 24), "blk.2.attn_k.rows", 0),
    ("TQ310", put("tqgguf.layer.kv_heads", U32, [2, 1]), "blk.0.attn_k.rows", 0),
    ("TQ311", drop("blk.0.attn_k.prefix"), None, 0),
    ("TQ311", drop("blk.0.attn_k.page_means"), None, 0),
    ("TQ311", drop("blk.0.attn_k.channel_scale"), None, 0),
    ("TQ311", reshape("blk.0.attn_v.tail", (6, 2, 64)), "blk.0.attn_v.tail", 0),
    ("TQ311", reshape("blk.0.attn_k.channel_scale", (1, 128), 1), "blk.0.attn_k.channel_scale", 0),
    ("TQ311", reshape("blk.0.attn_v.tail", ()), "blk.0.attn_v.tail", 0),
    ("TQ311", reshape("tokens", ()), "tokens", 0),
    ("TQ311", reshape("tokens", (10, 14)), "tokens", 0),
    ("TQ312", put("tqgguf.snapshot.cells", U64, 141), "tokens", 0),
    ("TQ312", put("tqgguf.layer.start", U64, [0, 128]), "blk.2.attn_k.rows", 0),
    ("TQ312", drop("blk.0.attn_k.rows"), None, 0),
    ("TQ312", drop("blk.0.attn_v.tail"), "blk.0.attn_v.rows", 0),
    ("TQ312", put("tqgguf.snapshot.prompt_ranges", U64, [0, 141]), "tokens", 0),
    ("TQ312", put("tqgguf.snapshot.chunk", U32, 100), "tqgguf.snapshot.chunk", 0),
    ("TQ313", patch("tokens", 4 * 9, b"\x61\x00\x00\x00"), "tokens", 4 * 9),
    ("TQ313", patch("tokens", 0, b"\xfe\xff\xff\xff"), "tokens", 0),
    ("TQ314", add("blk.1.attn_k.rows", Tensor((4,), F32 - 6, bytes(16))), "blk.1.attn_k.rows", 0),
    ("TQ320", patch("blk.0.attn_k.rows", 34 * 7, NAN16), "blk.0.attn_k.rows", 34 * 7),
    ("TQ320", patch("blk.0.attn_v.rows", 26 * 127, b"\x00\x80"), "blk.0.attn_v.rows", 26 * 127),
    ("TQ320", patch("blk.2.attn_k.rows", 34 * 9, b"\x00\xfc"), "blk.2.attn_k.rows", 34 * 9),
    ("TQ320", patch("blk.2.attn_v.rows", 2 * 777, NAN16), "blk.2.attn_v.rows", 2 * 777),
    ("TQ321", patch("blk.0.attn_k.rows", 34 + 20, b"\x01"), "blk.0.attn_k.rows", 34 + 20),
    ("TQ322", patch("blk.0.attn_v.tail", 2 * 5, NAN16), "blk.0.attn_v.tail", 2 * 5),
    ("TQ322", patch("blk.0.attn_k.page_means", 0, NAN16), "blk.0.attn_k.page_means", 0),
    ("TQ322", patch("blk.0.attn_k.prefix", 0, NAN16), "blk.0.attn_k.prefix", 0),
    ("TQ322", patch("blk.0.attn_k.channel_scale", 4 * 3, INF32), "blk.0.attn_k.channel_scale", 4 * 3),
    ("TQ330", drop("checksums"), None, 0),
    ("TQ331", put("tqgguf.checksum.algorithm", STRING, "md5"), None, 0),
    ("TQ331", put("tqgguf.checksum.algorithm", U32, []), None, 0),
    ("TQ331", put("tqgguf.checksum.chunk", U32, 4096), None, 0),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change", "where", "behind"), CASES)
def test_each_defect_has_its_rule_and_its_place(
    rule: str, change: Callable[..., object], where: str | None, behind: int, tmp_path: Path
) -> None:
    path = tmp_path / "s.gguf"
    path.write_bytes(carrier_bytes(SMALL, change))
    found = [(defect.rule.id, defect.offset) for defect in defects(path)]
    with open_gguf(path) as file:
        offset = None
        if where is not None:
            offset = file.tensors[where].offset if where in file.tensors else file._entries[where].value_offset
    assert (rule, None if offset is None else offset + behind) in found
    severe = [defect for defect in defects(path) if defect.is_error]
    if severe:
        with pytest.raises(DefectError) as raised:
            open_snapshot(path)
        assert raised.value.code == severe[0].code


def test_squares_of_queries_belong_to_an_open_scale_and_are_no_negative_numbers(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    path.write_bytes(carrier_bytes(OPEN, patch("blk.0.attn_k.query_squares", 8, b"\x00\x00\x80\xbf")))
    assert [defect.rule.id for defect in defects(path)] == ["TQ322"]
    path.write_bytes(carrier_bytes(OPEN, reshape("blk.0.attn_k.query_squares", (1, 10, 128))))
    assert [defect.rule.id for defect in defects(path)] == ["TQ311"]


def test_rows_that_the_next_query_sees_may_not_be_missing_and_a_prefix_is_the_tails_beginning(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    windowed = make_snapshot(300, make_layer(0, 300, start=128, window=173))
    path.write_bytes(carrier_bytes(windowed))
    assert defects(path) == []
    for window in (174, 0):
        path.write_bytes(carrier_bytes(windowed, put("tqgguf.layer.window", U64, [window])))
        assert {defect.rule.id for defect in defects(path)} == {"TQ312"}
    path.write_bytes(carrier_bytes(OPEN, patch("blk.0.attn_v.prefix", 2, b"\x00\x00")))
    with open_gguf(path) as file:
        expected = [("TQ322", file.tensors["blk.0.attn_v.prefix"].offset + 2)]
    assert [(defect.rule.id, defect.offset) for defect in defects(path)] == expected
    path.write_bytes(carrier_bytes(OPEN, put("tqgguf.layer.scale_is_given", BOOL, [True])))
    assert {defect.rule.id for defect in defects(path)} == {"TQ311"}


def test_a_sound_file_has_no_findings(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    for snapshot in (SMALL, OPEN, make_snapshot(0), make_snapshot(1)):
        path.write_bytes(carrier_bytes(snapshot))
        assert defects(path) == []


def test_rows_of_an_open_page_are_within_what_the_f16_tail_holds(tmp_path: Path) -> None:
    """Blocks as llama.cpp writes them up to the last token; a cache keeps an open page in f16."""
    path = tmp_path / "s.gguf"
    blocks = StoredCodec.native("q8_0", 64, "v")
    rows = blocks.encode(np.ones((140, 1, 64), np.float32))
    layer = make_layer(0, 140, "f16", "f16", n_kv_heads=1)
    snapshot = make_snapshot(140, replace(layer, v=SideSnapshot(blocks, rows)))
    huge, name = b"\xff\x7b", "blk.0.attn_v.rows"  # 65504
    path.write_bytes(carrier_bytes(snapshot, patch(name, 127 * 68, huge)))
    assert defects(path) == []
    path.write_bytes(carrier_bytes(snapshot, patch(name, 139 * 68, huge)))
    (defect,) = defects(path)
    with open_gguf(path) as file:
        assert (defect.rule.id, defect.offset) == ("TQ322", file.tensors[name].offset + 128 * 68)
    assert "token 139, head 0: expected values that f16 holds" in str(defect)
    rows[139, 0, :2] = np.frombuffer(huge, np.uint8)
    with pytest.raises(FormatError, match=r"not written: layer 0, V: token 139, head 0: expected values that f16"):
        write_snapshot(path, snapshot)


def test_a_type_that_is_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    for value in ([], ["kv-snapshot"]):
        path.write_bytes(carrier_bytes(SMALL, put("general.type", STRING, value)))
        with pytest.raises(FormatError, match=r"general\.type: expected kv-snapshot, found \["):
            open_snapshot(path)


def test_a_snapshot_in_two_files_is_refused_whichever_is_named(tmp_path: Path) -> None:
    from unsound_files import split_snapshot

    for path in (split_snapshot(tmp_path).write(tmp_path), tmp_path / "s-00002-of-00002.gguf"):
        assert [defect.rule.id for defect in defects(path)] == ["TQ315"]
        with pytest.raises(DefectError, match="expected a prompt cache in one file, found 2 shards"):
            open_snapshot(path)


def test_the_data_of_a_file_whose_structure_is_wrong_is_still_held_against_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    data = bytearray(carrier_bytes(SMALL, put("tqgguf.snapshot.version", U32, 2)))
    with_version = len(data) - 200
    data[with_version] ^= 1
    path.write_bytes(data)
    assert {defect.rule.id for defect in defects(path)} == {"TQ301", "TQ332"}


def big(n_tokens: int) -> Snapshot:
    return make_snapshot(n_tokens, make_layer(0, n_tokens, "q8_0", "q8_0", n_kv_heads=8, head_dim=256))


def test_a_checksum_names_the_bytes_and_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    path.write_bytes(carrier_bytes(big(640)))
    with open_gguf(path) as file:
        rows, start = file.tensors["blk.0.attn_v.rows"], file.data_start
    data = bytearray(path.read_bytes())
    data[rows.offset + (1 << 19)] ^= 4
    path.write_bytes(data)
    (defect,) = defects(path)
    first = start + (rows.offset + (1 << 19) - start) // (1 << 20) * (1 << 20)
    assert (defect.rule.id, defect.offset) == ("TQ332", first)
    assert "blk.0.attn_v.rows" in str(defect)
    with pytest.raises(DefectError, match="differ from their checksum"):
        open_snapshot(path)


WHOLE = carrier_bytes(SMALL)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) * 8 - 1))
def test_one_flipped_bit_anywhere_is_found(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    data = bytearray(WHOLE)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(TqggufError):
        open_snapshot(path)

"""Our GGUF carrier of snapshots: what is written comes back bit by bit, any GGUF reader opens it, nothing is copied."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from snapshots import make_layer, make_snapshot

from tqgguf.formats.atomic import replacing
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.formats.snapshots.parts import PART_NAMES
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import SideSnapshot, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot


def test_every_array_of_a_side_but_its_rows_is_in_the_table_of_parts() -> None:
    assert tuple(field.name for field in fields(SideSnapshot)) == ("codec", "rows", *PART_NAMES)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal in every field, arrays in shape, dtype and bits."""
    if isinstance(expected, (Snapshot, SideSnapshot)) or hasattr(expected, "k"):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(expected, np.ndarray):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
        assert found.tobytes() == expected.tobytes(), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key}]")
    elif isinstance(expected, tuple) and expected and hasattr(expected[0], "k"):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where


def round_trip(snapshot: Snapshot, path: Path) -> None:
    write_snapshot(path, snapshot)
    assert_same(open_snapshot(path), snapshot)


@pytest.mark.parametrize("cache_type", BLOCK_TYPES)
def test_every_type_comes_back_bit_by_bit(cache_type: str, tmp_path: Path) -> None:
    layers = [make_layer(i, 300, cache_type, cache_type, head_dim=d) for i, d in enumerate((64, 96, 128, 192, 256))]
    round_trip(make_snapshot(300, *layers), tmp_path / "s.gguf")


@pytest.mark.parametrize("n_tokens", [0, 1, 127, 128, 129, 256])
@pytest.mark.parametrize("balance", ["off", "page", "full"])
@pytest.mark.parametrize("n_prefix", [0, 4, 128])
def test_pages_tails_balance_and_prefix_come_back(n_tokens: int, balance: str, n_prefix: int, tmp_path: Path) -> None:
    layer = make_layer(0, n_tokens, balance=balance, n_prefix=n_prefix)
    round_trip(make_snapshot(n_tokens, layer), tmp_path / "s.gguf")


def test_types_head_sizes_and_windows_may_differ_by_layer(tmp_path: Path) -> None:
    layers = [
        make_layer(0, 700, "turbo4", "turbo3", balance="full", n_prefix=4),
        make_layer(1, 700, "q8_0", "turbo2", head_dim=128, head_dim_v=64, start=128, window=512),
        make_layer(3, 700, "f16", "q4_0", start=256, window=300),
        make_layer(7, 700, "iq4_nl", "bf16"),
    ]
    round_trip(make_snapshot(700, *layers, prompt_ranges=((0, 256), (300, 700))), tmp_path / "s.gguf")


def test_a_hundred_and_twenty_eight_layers_come_back(tmp_path: Path) -> None:
    layers = [make_layer(i, 130, n_kv_heads=1, balance="full", n_prefix=4) for i in range(128)]
    round_trip(make_snapshot(130, *layers), tmp_path / "s.gguf")


def test_codecs_of_forks_and_rows_past_the_last_page_come_back(tmp_path: Path) -> None:
    codec = StoredCodec("turbo3", 64, 128, "signed", 128, 2)
    plain = StoredCodec("q8_0", 64, 64)
    rows = np.random.default_rng(1).standard_normal((200, 2, 64))
    layer = replace(
        make_layer(0, 200),
        k=SideSnapshot(codec, codec.encode(rows)),
        v=SideSnapshot(plain, plain.encode(rows)),
        start=188,
        window=200,
    )
    origin = {
        "kind": "session", "version": 10, "v_trans": True, "blob": np.arange(9, dtype=np.uint8),
        "order": np.arange(5, dtype=np.int32), "cells": np.array([1 << 40], np.int64),
    }  # fmt: skip
    tokens = np.full(390, -1, np.int32)
    snapshot = make_snapshot(388, layer, tokens=tokens, origin=origin, fingerprint=None, prompt_ranges=(), model="")
    round_trip(snapshot, tmp_path / "s.gguf")


def test_gguf_py_reads_the_file_and_lists_all_tensors(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    layers = [
        make_layer(0, 200, balance="full", n_prefix=4),
        make_layer(1, 200, "q8_0", "q4_0"),
        make_layer(2, 200, "f16"),
    ]
    snapshot = make_snapshot(200, *layers)
    write_snapshot(path, snapshot)
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert reader.fields["general.type"].contents() == "kv-snapshot"
    assert reader.fields["tqgguf.codec.type"].contents() == ["turbo4", "turbo3", "q8_0", "q4_0", "f16"]
    assert tensors["blk.0.attn_k.rows"].data.tobytes() == snapshot.layers[0].k.rows[0:128].tobytes()
    types = {
        name: tensors[f"blk.{name}.rows"].tensor_type.name for name in ("0.attn_k", "1.attn_k", "1.attn_v", "2.attn_k")
    }
    assert types == {"0.attn_k": "I8", "1.attn_k": "Q8_0", "1.attn_v": "Q4_0", "2.attn_k": "F16"}
    assert np.array_equal(tensors["blk.2.attn_k.rows"].data.view(np.uint8), snapshot.layers[2].k.rows[0:200])
    decoded = gguf.quants.dequantize(tensors["blk.1.attn_k.rows"].data, gguf.GGMLQuantizationType.Q8_0)
    plain = StoredCodec("q8_0", 64, 64)
    assert np.array_equal(decoded.reshape(128, 2, 64), plain.decode(snapshot.layers[1].k.rows[0:128]))
    assert list(tensors)[-1] == "checksums"


def test_the_same_snapshot_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_snapshot(tmp_path / name, make_snapshot(300))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


class Growing:
    """Rows that are made while they are read, as a cache's planes are: none are held."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape

    def __getitem__(self, tokens: slice) -> np.ndarray:
        return np.zeros((tokens.stop - tokens.start, *self.shape[1:]), np.uint8)


def test_writing_and_reading_make_no_copy_of_the_rows(tmp_path: Path) -> None:
    codec = StoredCodec.native("turbo4", 128, "k")
    n_tokens = 1 << 19
    side = SideSnapshot(codec, Growing((n_tokens, 1, codec.row_bytes)))
    layer = replace(make_layer(0, 0, head_dim=128), k=side, v=side)
    snapshot = make_snapshot(n_tokens, layer)
    tracemalloc.start()
    write_snapshot(tmp_path / "s.gguf", snapshot)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    opened = open_snapshot(tmp_path / "s.gguf")
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened.n_bytes > 69_000_000
    assert max(written, read) < 24_000_000


def test_opened_rows_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "s.gguf", make_snapshot(300))
    rows = open_snapshot(tmp_path / "s.gguf").layers[0].k.rows
    assert isinstance(rows, np.ndarray)
    assert not rows.flags.owndata
    assert not rows.flags.writeable


def test_an_interrupted_or_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    write_snapshot(path, make_snapshot(10))
    before = path.read_bytes()

    class Failing(Growing):
        error: BaseException = OSError(28, "No space left on device")

        def __getitem__(self, tokens: slice) -> np.ndarray:
            if tokens.start:
                raise self.error
            return super().__getitem__(tokens)

    codec = StoredCodec.native("turbo4", 128, "k")
    side = SideSnapshot(codec, Failing((1 << 18, 1, codec.row_bytes)))
    snapshot = make_snapshot(1 << 18, replace(make_layer(0, 0, head_dim=128), k=side, v=side))
    for error, raised in (
        (OSError(28, "No space left on device"), TqggufError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        Failing.error = error
        with pytest.raises(raised):
            write_snapshot(path, snapshot)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["s.gguf"]


def test_parts_that_do_not_fit_together_are_not_written(tmp_path: Path) -> None:
    good = make_snapshot(300)
    layer = good.layers[0]
    codec = layer.k.codec
    cases = [
        (replace(good, n_cells=299), "layer 0, K, tokens: expected rows of the tokens from 0 up to 299, found 300"),
        (replace(good, tokens=good.tokens[:200]), "expected rows of at most 200 tokens, found 300"),
        (replace(good, prompt_ranges=((0, 10), (5, 20))), "expected ranges of prompt in order"),
        (
            replace(good, layers=(replace(layer, k=replace(layer.k, tail=layer.k.tail[:, :1])),)),
            r"layer 0, K, tail: expected float16 \[44, 2, 64\], found float16 \[44, 1, 64\]",
        ),
        (
            replace(good, layers=(replace(layer, k=replace(layer.k, codec=replace(codec, rotation="none"))),)),
            "layer 0, K, rows: turbo4 of 64 values is rotated signed of 64, found none of 64",
        ),
    ]
    for snapshot, message in cases:
        with pytest.raises(FormatError, match=message):
            write_snapshot(tmp_path / "s.gguf", snapshot)
    with pytest.raises(RequestError, match="origin x: expected a string"):
        write_snapshot(tmp_path / "s.gguf", replace(good, origin={"x": 1.5}))
    assert os.listdir(tmp_path) == []


def test_other_files_are_no_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(
        FormatError, match=r"expected general\.type kv-snapshot, found 'model': this is no prompt cache"
    ):
        open_snapshot(path)


def test_a_codec_of_a_fork_decodes_what_it_encoded() -> None:
    x = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    for codec, error in (
        (StoredCodec("turbo3", 64, 128, "signed", 128, 2), 0.035),
        (StoredCodec("q8_0", 64, 64), 1e-4),
    ):
        decoded = codec.decode(codec.encode(x))
        assert decoded.shape == x.shape
        assert ((decoded - x) ** 2).sum() < error * (x**2).sum()
        assert not codec.is_native("k")
    assert isinstance(StoredCodec.native("turbo3", 64, "k").codec, Codec)

"""Snapshots in other cache types: what is copied, what is quantised once, and what asks for leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshots import make_layer, make_snapshot

from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.carriers.recode import recode_snapshot
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.recoded_rows import RecodedRows
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot


def values(layer: LayerSnapshot, side: Any) -> np.ndarray:
    """All rows as float32 [tokens, n_kv_heads, head_dim], whatever they are held in."""
    held = layer.side(side)
    rows = RecodedRows(held, StoredCodec.native("f32", held.codec.head_dim, side), layer.start)
    return np.ascontiguousarray(rows[0 : held.n_tokens]).view(np.float32)


def written(snapshot: Snapshot, path: Path) -> LayerSnapshot:
    write_snapshot(path, snapshot)
    return open_snapshot(path).layers[0]


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


@pytest.mark.parametrize("n_tokens", [1, 100, 128, 300])
def test_floats_become_blocks_with_an_f16_tail(n_tokens: int, tmp_path: Path) -> None:
    layer = make_layer(0, n_tokens, "f32", "f16")
    made = written(recode_snapshot(make_snapshot(n_tokens, layer), "turbo4", "q8_0"), tmp_path / "s")
    assert (made.k.codec.cache_type, made.v.codec.cache_type, made.balance) == ("turbo4", "q8_0", "off")
    n_whole = n_tokens // 128 * 128
    for side, most in (("k", 0.01), ("v", 1e-4)):
        assert made.side(side).rows.shape[0] == n_whole
        assert error(values(made, side), values(layer, side)) < most
        assert np.array_equal(values(made, side)[n_whole:], values(layer, side)[n_whole:].astype(np.float16))
    plain = StoredCodec.native("turbo4", 64, "k").encode(values(layer, "k")[:n_whole])
    assert made.k.rows[0:n_whole].tobytes() == plain.tobytes()


def test_blocks_become_floats_without_balance_and_prefix(tmp_path: Path) -> None:
    layer = make_layer(0, 300, "turbo4", "turbo3", balance="full", n_prefix=4)
    made = written(recode_snapshot(make_snapshot(300, layer), "f32", "f16", requantise=True), tmp_path / "s")
    assert np.array_equal(values(made, "k"), values(layer, "k"))
    assert made.balance == "off"
    assert made.k.prefix is made.k.page_means is made.k.channel_scale is None


def test_blocks_become_other_blocks_under_the_same_balance_and_prefix(tmp_path: Path) -> None:
    layer = make_layer(0, 300, "turbo4", "turbo4", balance="full", n_prefix=4)
    made = written(recode_snapshot(make_snapshot(300, layer), "q8_0", None, requantise=True), tmp_path / "s")
    assert made.v.rows[0:256].tobytes() == layer.v.rows[0:256].tobytes()
    assert error(values(made, "k"), values(layer, "k")) < 1e-4
    assert (made.balance, made.n_prefix) == ("full", 4)
    assert np.array_equal(values(made, "k")[:4], values(layer, "k")[:4])


def test_a_forks_rows_become_our_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 2, 64)).astype(np.float32)
    fork = StoredCodec("turbo3", 64, 128, "signed", 128, 2)
    layer = make_layer(0, 200)
    side = type(layer.k)(fork, fork.encode(x))
    snapshot = make_snapshot(200, LayerSnapshot(layer=0, k=side, v=side))
    with pytest.raises(RequestError, match="layer 0: K is quantised as turbo3 already and would be quantised again"):
        recode_snapshot(snapshot)
    made = written(recode_snapshot(snapshot, requantise=True), tmp_path / "s")
    assert made.k.codec == StoredCodec.native("turbo3", 64, "k")
    assert made.k.rows.shape[0] == 128
    assert error(values(made, "k"), fork.decode(fork.encode(x))) < 0.04


def test_a_window_that_begins_in_the_unfilled_page_stays_rows(tmp_path: Path) -> None:
    layer = make_layer(0, 250, "f16", "f16", start=151, window=100)
    made = written(recode_snapshot(make_snapshot(250, layer), "q8_0", "turbo3"), tmp_path / "s")
    assert (made.k.rows.shape[0], made.k.tail) == (99, None)
    assert error(values(made, "v"), values(layer, "v")) < 0.04


def test_recoded_blocks_do_not_pass_for_an_evaluated_prompt() -> None:
    assert recode_snapshot(make_snapshot(300, make_layer(0, 300, "f16", "f16")), "q8_0").prompt_ranges == ()


def test_what_is_as_wanted_is_the_same_object() -> None:
    snapshot = make_snapshot(300)
    assert recode_snapshot(snapshot, "turbo4", "turbo3") is snapshot

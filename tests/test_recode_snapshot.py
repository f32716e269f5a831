"""Snapshots in other cache types: what is copied, packed, quantised again, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from snapshots import make_layer, make_snapshot
from test_llama_exchange import FORK, SMOLLM2, imported

from tqgguf.formats.errors import RequestError
from tqgguf.formats.recode_snapshot import recode_snapshot
from tqgguf.formats.snapshot import Snapshot
from tqgguf.formats.snapshot_read import open_snapshot
from tqgguf.formats.snapshot_write import write_snapshot
from tqgguf.formats.stored_codec import StoredCodec

DATA = Path(__file__).parent / "data"
N = 300


def values(snapshot: Snapshot, side: str = "k") -> np.ndarray:
    """float32 [tokens, heads, dim] of layer 0, blocks and tail."""
    held = snapshot.layers[0].side(side)
    rows = held.codec.decode(held.rows[0 : held.rows.shape[0]])
    return rows if held.tail is None else np.concatenate([rows, held.tail.astype(np.float32)])


def saved(snapshot: Snapshot, tmp_path: Path) -> Snapshot:
    write_snapshot(tmp_path / "s.gguf", snapshot)
    return open_snapshot(tmp_path / "s.gguf")


@pytest.mark.parametrize("cache_type", ["turbo4", "turbo3", "q8_0", "q4_0", "f32"])
def test_floats_are_packed_page_by_page_with_an_f16_tail(cache_type, tmp_path):
    floats = make_snapshot(N, make_layer(0, N, "f16", "f16"))
    made = saved(recode_snapshot(floats, cache_type, cache_type), tmp_path)
    codec = StoredCodec.native(cache_type, 64, "k")
    held = made.layers[0].k
    assert held.codec == codec and (made.prompt_ranges, dict(made.origin)) == ((), {})
    n_rows = N if cache_type == "f32" else 256
    assert (held.rows[0:n_rows] == codec.encode(values(floats)[:n_rows])).all()
    assert (values(made)[256:] == values(floats)[256:]).all()


def test_layers_that_hold_what_is_asked_for_stay_as_they_are():
    snapshot = make_snapshot(N, make_layer(0, N, "turbo4", "turbo3", balance="full", n_prefix=4))
    assert recode_snapshot(snapshot) is snapshot
    assert recode_snapshot(snapshot, "turbo4", "turbo3") is snapshot


def test_blocks_are_quantised_again_only_if_that_is_asked_for(tmp_path):
    snapshot = make_snapshot(N, make_layer(0, N, "turbo4", "turbo3", balance="full", n_prefix=4))
    with pytest.raises(RequestError, match="K holds blocks of turbo4 that would be quantised again to become q8_0"):
        recode_snapshot(snapshot, "q8_0")
    made = saved(recode_snapshot(snapshot, "q8_0", requantise=True), tmp_path)
    layer = made.layers[0]
    assert (layer.types.type_k, layer.types.type_v, layer.balance, layer.n_prefix) == ("q8_0", "turbo3", "off", 0)
    exact = values(make_snapshot(N, make_layer(0, N, "f16", "f16")))
    assert ((values(made) - exact) ** 2).sum() / (exact**2).sum() < 0.02
    assert (values(made)[256:] == exact[256:]).all()


def test_a_forks_padded_rows_become_rows_of_our_caches(tmp_path):
    snapshot = imported((DATA / "fork_turbo3.session").read_bytes(), tmp_path, SMOLLM2, FORK)
    with pytest.raises(RequestError, match="quantised again to become turbo3 as caches here have it"):
        recode_snapshot(snapshot)
    made = recode_snapshot(snapshot, requantise=True)
    assert all(layer.k.codec.is_native("k") and layer.v.codec.is_native("v") for layer in made.layers)
    expected = values(snapshot).astype(np.float16).astype(np.float32)
    assert (values(made) == expected).all()  # shorter than a page: all of it is the f16 tail
    made.check()


@pytest.mark.parametrize(
    ("n", "start", "window", "n_tail"),
    [(700, 189, 512, 60), (200, 101, 100, 72), (250, 151, 100, 0), (256, 128, 100, 0)],
)
def test_window_layers_keep_every_row_that_they_have(n, start, window, n_tail, tmp_path):
    snapshot = make_snapshot(n, make_layer(0, n, "f16", "f16", start=start, window=window))
    made = saved(recode_snapshot(snapshot, "q8_0", "q8_0"), tmp_path)
    held = made.layers[0].k
    assert (made.layers[0].start, held.n_tokens) == (start, n - start)
    assert (0 if held.tail is None else len(held.tail)) == n_tail
    assert np.abs(values(made) - values(snapshot)).max() < 0.05


def test_types_that_heads_cannot_have_are_refused():
    with pytest.raises(RequestError, match="q9"):
        recode_snapshot(make_snapshot(N, make_layer(0, N, "f16", "f16")), "q9_0")
    with pytest.raises(RequestError, match="turbo4 cannot hold head_dim 32"):
        recode_snapshot(make_snapshot(N, make_layer(0, N, "f16", "f16", head_dim=32)), "turbo4")

"""Decode attention of a batch, its exact Metal text on the emulator: each sequence's answer is what it is alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from emulator.checked import CheckedLauncher
from emulator.launcher import EmulatedLauncher
from pooled_sequences import N_KV_HEADS, OFFSETS, Sequence, in_float64, pooled, sequences_of, slots_of

from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.kernels import decode_plan
from tqgguf.runtime.kernels.decode_attention import append_and_attend, attend_rows, join_tails
from tqgguf.runtime.kernels.launch import MlxLauncher
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Query, SidePages
from tqgguf.runtime.kv.tiles import can_be_tiled, to_tiles


def batch_answer(
    launcher: EmulatedLauncher, sequences: list[Sequence], q: mx.array, query: Query, n_own: tuple[int, ...] = ()
) -> np.ndarray:
    slots = slots_of(sequences)
    (k, k_tails), (v, v_tails) = (pooled(sequences, name, slots) for name in "kv")
    tails, offsets = (k_tails, v_tails), tuple(of.offset for of in sequences)
    growth = Growth(tails, tails, offsets, n_own or (q.shape[2],) * len(offsets), joined=tails)
    out, _ = append_and_attend(launcher, q, Pages(k, v, slots), growth, query)
    return np.array(out.astype(mx.float32))


def lonely_answer(launcher: EmulatedLauncher, of: Sequence, q: mx.array, query: Query) -> np.ndarray:
    """Of a cache that has let go what no query can see."""
    window = query.window
    first = 0 if window is None else max(0, of.offset - window + 1) // PAGE
    k, v = of.k.starting_at(first), of.v.starting_at(first)
    if can_be_tiled(v.codec) and v.codes is not None:
        v = replace(v, codes=to_tiles(v.codec, v.codes), tiled=True)
    return np.array(attend_rows(launcher, q, k, v, offset=of.offset, query=query).astype(mx.float32))


CASES = [
    ("turbo4", "turbo3", 64, 4, 4, None, False, mx.float32),
    ("turbo3", "turbo4", 64, 2, 3, 150, True, mx.bfloat16),
    ("q8_0", "q4_0", 64, 1, 1, 20, False, mx.float16),
]


@pytest.mark.parametrize(("type_k", "type_v", "head_dim", "n_rows", "group", "window", "with_sinks", "dtype"), CASES)
def test_every_sequence_is_answered_as_it_is_alone(
    type_k: str,
    type_v: str,
    head_dim: int,
    n_rows: int,
    group: int,
    window: int | None,
    with_sinks: bool,
    dtype: mx.Dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_plan, "n_coded_splits", lambda *_: 2)  # bits are equal where shares are
    sequences = sequences_of(
        resolve_codec(type_k, head_dim, "k"), resolve_codec(type_v, head_dim, "v"), OFFSETS, n_rows
    )
    rng, n_heads = np.random.default_rng(23), N_KV_HEADS * group
    q = mx.array(rng.standard_normal((len(OFFSETS), n_heads, n_rows, head_dim)).astype(np.float32)).astype(dtype)
    sinks = mx.array(rng.standard_normal(n_heads).astype(np.float32)) if with_sinks else None
    how = {"scale": head_dim**-0.5, "window": window, "sinks": sinks}
    found = batch_answer(CheckedLauncher(), sequences, q, Query(**how))
    limit = 8e-3 if dtype == mx.bfloat16 else 2e-3
    for i, of in enumerate(sequences):
        assert np.array_equal(found[i], lonely_answer(EmulatedLauncher(), of, q[i : i + 1], Query(**how))[0])
        expected = in_float64(of, np.asarray(q[i].astype(mx.float32)).astype(np.float64), **how)
        assert np.linalg.norm(found[i] - expected) < limit * np.linalg.norm(expected)


def test_a_sequence_may_have_fewer_rows_than_the_step() -> None:
    (type_k, type_v, head_dim, n_rows, group, window, _, dtype), n_own = CASES[0], (4, 2, 0, 3)
    sequences = sequences_of(
        resolve_codec(type_k, head_dim, "k"), resolve_codec(type_v, head_dim, "v"), OFFSETS, n_rows
    )
    ends = [of.offset % PAGE + n for of, n in zip(sequences, n_own, strict=True)]
    shorter = [
        replace(of, k=replace(of.k, rows=of.k.rows[:, :end]), v=replace(of.v, rows=of.v.rows[:, :end]))
        for of, end in zip(sequences, ends, strict=True)
    ]
    q = mx.random.normal((len(OFFSETS), N_KV_HEADS * group, n_rows, head_dim), dtype=dtype, key=mx.random.key(1))
    how = {"scale": head_dim**-0.5, "window": window, "sinks": None}
    found = batch_answer(EmulatedLauncher(seed=2), shorter, q, Query(**how), n_own)
    assert np.isfinite(found).all()
    for i, (of, n) in enumerate(zip(sequences, n_own, strict=True)):
        expected = in_float64(of, np.asarray(q[i]).astype(np.float64), **how)[:, :n]
        assert np.linalg.norm(found[i, :, :n] - expected) <= 2e-3 * np.linalg.norm(expected)


def test_a_float_side_is_refused_by_name() -> None:
    k, v = resolve_codec("bf16", 64, "k"), resolve_codec("turbo4", 64, "v")
    rows, tails = mx.zeros((PAGE, 1, 64), dtype=mx.bfloat16), mx.zeros((2, 1, PAGE, 64), dtype=mx.float16)
    pages = Pages(SidePages(k, rows), SidePages(v), [[], []])
    with pytest.raises(RequestError, match="K is bf16"):
        growth = Growth((tails, tails), (tails, tails), (0, 0), (1, 1), joined=(tails, tails))
        append_and_attend(EmulatedLauncher(), mx.zeros((2, 1, 1, 64)), pages, growth, Query(1))


def test_new_rows_go_to_where_their_sequence_ends() -> None:
    rng = np.random.default_rng(24)
    tails = tuple(mx.array(rng.standard_normal((3, 2, PAGE, dim)).astype(np.float16)) for dim in (64, 32))
    new = tuple(mx.array(1e5 * rng.standard_normal((3, 2, 4, dim)).astype(np.float32)) for dim in (64, 32))
    offsets, n_own = (128, 250, 381), (4, 3, 0)
    found = join_tails(CheckedLauncher(), Growth(tails, new, offsets, n_own))
    for joined, tail, rows in zip(found, tails, new, strict=True):
        expected = np.array(tail)
        for i, (offset, n) in enumerate(zip(offsets, n_own, strict=True)):
            clipped = np.clip(np.asarray(rows)[i, :, :n], -65504, 65504)
            expected[i, :, offset % PAGE : offset % PAGE + n] = clipped.astype(np.float16)
        assert np.array_equal(np.array(joined), expected)


@pytest.mark.parametrize("cache_type", ["turbo4", "q8_0"])
def test_a_step_can_be_compiled(cache_type: str, tmp_path: Path) -> None:
    # traced only: arrays that are constants to some and arguments to others are refused by mx.compile
    k, v = (resolve_codec(cache_type, 64, side) for side in "kv")
    sequences = sequences_of(k, v, (128, 2), 1)
    (k_side, k_tails), (v_side, v_tails) = (pooled(sequences, name, [[3], []]) for name in "kv")
    pages, shapes = Pages(k_side, v_side, [[3], []]), []

    def traced(x: mx.array) -> list[mx.array]:
        new, q = mx.zeros((2, N_KV_HEADS, 1, 64)), mx.zeros((2, 4, 1, 64))
        growth = Growth((k_tails, v_tails), (new, new), (128, 2), (1, 1))
        out, tails = append_and_attend(MlxLauncher("metal"), q, pages, growth, Query(1.0))
        shapes.extend(array.shape for array in (out, *tails))
        return [x]

    mx.export_function(str(tmp_path / "step.mlxfn"), traced, mx.zeros((8,)))
    assert shapes == [(2, 4, 1, 64), k_tails.shape, v_tails.shape]

"""Decode attention of a batch, its exact Metal text on the emulator: each sequence's answer is what it is alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from emulator.checked import CheckedLauncher
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.kernels import decode_plan
from tqgguf.runtime.kernels.decode_attention import append_and_attend, attend_rows, join_tails
from tqgguf.runtime.kernels.launch import MlxLauncher
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Query, SidePages, SideView
from tqgguf.runtime.kv.tiles import can_be_tiled, to_tiles

N_KV_HEADS, N_PREFIX, N_SLOTS = 2, 4, 12


@dataclass(frozen=True)
class Sequence:
    """One sequence after a step that began at `offset`: its sides as it has them alone, and its rows in float16."""

    offset: int
    k: SideView
    v: SideView
    rows: tuple[np.ndarray, np.ndarray]


def side_of(codec: Codec, rows: np.ndarray, offset: int, balanced: bool, rng: np.random.Generator) -> SideView:
    own, held = offset // PAGE * PAGE, mx.array(rows)
    scale = mx.array(rng.uniform(0.5, 2, (N_KV_HEADS, codec.head_dim)).astype(np.float32)) if balanced else None
    codes = scales = means = None
    if own:
        codes, scales, means = NumpyBackend().encode_pages(
            codec, held[:, :own], n_skipped=N_PREFIX, centred=balanced, scale=scale
        )
    prefix = held[:, :N_PREFIX]
    return SideView(
        codec,
        codes,
        scales,
        rows=held[:, own:],
        rows_start=own,
        prefix=prefix,
        page_means=means,
        channel_scale=scale,
    )


def sequences_of(k: Codec, v: Codec, offsets: tuple[int, ...], n_rows: int) -> list[Sequence]:
    rng, made = np.random.default_rng(21), []
    for offset in offsets:
        rows = []
        for codec in (k, v):
            values = rng.standard_normal((N_KV_HEADS, offset + n_rows, codec.head_dim)).astype(np.float16)
            values[:, :, 3] += 4
            rows.append(values)
        balanced = k.block_type.family == "turbo"
        sides = side_of(k, rows[0], offset, balanced, rng), side_of(v, rows[1], offset, False, rng)
        made.append(Sequence(offset, *sides, (rows[0], rows[1])))
    return made


def pooled(sequences: list[Sequence], name: str, slots: list[list[int]]) -> tuple[SidePages, mx.array]:
    """A side of all of them in one pool, what no page lies in poisoned; and their tails, poisoned beyond their rows."""
    sides = [getattr(of, name) for of in sequences]
    codec = sides[0].codec
    tiled = name == "v" and can_be_tiled(codec)
    shapes = {
        "codes": (np.uint8, (PAGE, codec.n_blocks * codec.code_bytes), 255),
        "scales": (np.float16, (PAGE, codec.n_blocks * codec.n_scales), np.nan),
        "page_means": (np.float16, (codec.head_dim,), np.nan),
    }
    planes = {}
    for field, (dtype, shape, poison) in shapes.items():
        plane = np.full((N_SLOTS, N_KV_HEADS, *shape), poison, dtype)
        for side, of in zip(sides, slots, strict=True):
            pages = getattr(side, field)
            for page, slot in enumerate(of[: 0 if pages is None else len(of)]):
                held = to_tiles(codec, pages) if tiled and field == "codes" else pages
                plane[slot] = np.asarray(held)[page]
        planes[field] = mx.array(plane)
    tails = np.full((len(sides), N_KV_HEADS, PAGE, codec.head_dim), np.nan, np.float16)
    for tail, side in zip(tails, sides, strict=True):
        tail[:, : side.rows.shape[1]] = np.asarray(side.rows)
    balanced = sides[0].channel_scale is not None
    side = SidePages(
        codec,
        planes["codes"],
        planes["scales"],
        prefix=mx.stack([padded(side.prefix) for side in sides]),
        page_means=planes["page_means"] if balanced else None,
        channel_scale=mx.stack([side.channel_scale for side in sides]) if balanced else None,
        tiled=tiled,
    )
    return side, mx.array(tails)


def padded(prefix: mx.array) -> mx.array:
    return mx.pad(prefix, [(0, 0), (0, N_PREFIX - prefix.shape[1]), (0, 0)])


def batch_answer(
    launcher: EmulatedLauncher, sequences: list[Sequence], q: mx.array, query: Query, n_own: tuple[int, ...] = ()
) -> np.ndarray:
    free = np.random.default_rng(22).permutation(N_SLOTS).tolist()
    slots = [[free.pop() for _ in range(of.offset // PAGE)] for of in sequences]
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


def in_float64(of: Sequence, q: np.ndarray, scale: float, window: int | None, sinks: mx.array | None) -> np.ndarray:
    """[n_heads, rows, head_dim]: pages as what their blocks decode to, the exact prefix and the own page in float16."""
    own, held = of.offset // PAGE * PAGE, []
    for side, plain in ((of.k, of.rows[0]), (of.v, of.rows[1])):
        values = plain.astype(np.float64)
        if own:
            blocks = side.codec.unrotate(side.codec.decode_planes(np.asarray(side.codes), np.asarray(side.scales)))
            if side.channel_scale is not None:
                blocks = blocks / np.asarray(side.channel_scale)[:, None] + np.asarray(side.page_means)[:, :, None]
            values[:, N_PREFIX:own] = blocks.swapaxes(0, 1).reshape(N_KV_HEADS, own, -1)[:, N_PREFIX:]
        held.append(values)
    out = np.empty((*q.shape[:2], held[1].shape[2]))
    for head, row in np.ndindex(q.shape[:2]):
        position = of.offset + row
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        kv_head = head * N_KV_HEADS // len(q)
        scores = held[0][kv_head, seen] @ q[head, row] * scale
        sink = -np.inf if sinks is None else float(sinks[head])
        weights = np.exp(scores - max(scores.max(), sink))
        out[head, row] = weights @ held[1][kv_head, seen] / (weights.sum() + np.exp(sink - max(scores.max(), sink)))
    return out


OFFSETS = (2, 128, 484, 300)  # no whole page, the first row after one, three pages and most of one, two
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
    k, v = resolve_codec("f16", 64, "k"), resolve_codec("turbo4", 64, "v")
    pages = Pages(SidePages(k, None, None), SidePages(v, None, None), [[], []])
    tails = mx.zeros((2, 1, PAGE, 64), dtype=mx.float16)
    with pytest.raises(RequestError, match="K is f16"):
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

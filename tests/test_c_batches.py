"""Attention of several sequences in one call of the C library: each one's answer is what it is alone."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS, c_backend, library
from pooled_sequences import N_KV_HEADS, OFFSETS, Sequence, in_float64, pooled, sequences_of, slots_of

from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Query

pytestmark = pytest.mark.skipif(not C_PATHS, reason="the C library was not built")

CASES = [
    ("turbo4", "turbo3", 64, 4, 4, None, False, mx.float32),
    ("turbo3", "turbo2", 128, 2, 3, 150, True, mx.bfloat16),
    ("turbo2", "turbo4", 96, 1, 5, None, True, mx.float16),
    ("q8_0", "q4_0", 32, 1, 1, 20, False, mx.float16),
    ("q5_1", "iq4_nl", 64, 3, 2, None, False, mx.float32),
]
SHAPE = "type_k", "type_v", "head_dim", "n_rows", "group", "window", "with_sinks", "dtype"
BF16_LIMIT, LIMIT = 8e-3, 2e-3


def made(type_k: str, type_v: str, head_dim: int, n_rows: int, offsets: tuple[int, ...] = OFFSETS) -> list[Sequence]:
    return sequences_of(resolve_codec(type_k, head_dim, "k"), resolve_codec(type_v, head_dim, "v"), offsets, n_rows)


def queries(n_sequences: int, n_heads: int, n_rows: int, head_dim: int, dtype: mx.Dtype) -> mx.array:
    rng = np.random.default_rng(23)
    return mx.array(rng.standard_normal((n_sequences, n_heads, n_rows, head_dim)).astype(np.float32)).astype(dtype)


def growth_of(
    sequences: list[Sequence], n_rows: int, n_own: tuple[int, ...] = (), is_ours: bool = False
) -> tuple[Pages, Growth]:
    """Pages in no order, tails that are NaN from the step's rows on, and those rows still to be joined."""
    slots = slots_of(sequences)
    (k, k_tails), (v, v_tails) = (pooled(sequences, name, slots, can_tile=False) for name in "kv")
    offsets = tuple(of.offset for of in sequences)
    for tails in (k_tails, v_tails):
        for tail, offset in zip(np.asarray(tails), offsets, strict=True):
            tail[:, offset % PAGE :] = np.nan
    k_new, v_new = (mx.stack([mx.array(of.rows[side][:, of.offset :]) for of in sequences]) for side in (0, 1))
    own = n_own or (n_rows,) * len(offsets)
    return Pages(k, v, slots), Growth((k_tails, v_tails), (k_new, v_new), offsets, own, is_ours=is_ours)


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize(SHAPE, CASES)
def test_every_sequence_is_answered_as_it_is_alone(
    path: str,
    type_k: str,
    type_v: str,
    head_dim: int,
    n_rows: int,
    group: int,
    window: int | None,
    with_sinks: bool,
    dtype: mx.Dtype,
) -> None:
    backend, sequences = c_backend(path), made(type_k, type_v, head_dim, n_rows)
    n_heads = N_KV_HEADS * group
    q = queries(len(OFFSETS), n_heads, n_rows, head_dim, dtype)
    sinks = mx.random.normal((n_heads,), key=mx.random.key(3)) if with_sinks else None
    how = {"scale": head_dim**-0.5, "window": window, "sinks": sinks}
    found, _ = backend.append_and_attend(q, *growth_of(sequences, n_rows), Query(**how))
    assert found.dtype == dtype
    for i, of in enumerate(sequences):
        alone, _ = backend.append_and_attend(q[i : i + 1], *growth_of([of], n_rows), Query(**how))
        answer = np.array(found[i].astype(mx.float32))
        assert np.array_equal(answer, np.array(alone[0].astype(mx.float32)))
        expected = in_float64(of, np.array(q[i].astype(mx.float32)).astype(np.float64), **how)
        limit = BF16_LIMIT if dtype == mx.bfloat16 else LIMIT
        assert np.linalg.norm(answer - expected) < limit * np.linalg.norm(expected)


def test_a_sequence_may_have_fewer_rows_than_the_step_or_none() -> None:
    n_own, n_rows = (4, 2, 0, 3), 4
    sequences, backend = made("turbo4", "turbo3", 64, n_rows), c_backend(C_PATHS[-1])
    q = queries(len(OFFSETS), 8, n_rows, 64, mx.float32)
    pages, growth = growth_of(sequences, n_rows, n_own)
    found, tails = backend.append_and_attend(q, pages, growth, Query(0.125))
    for i, (of, n) in enumerate(zip(sequences, n_own, strict=True)):
        shorter = replace(of, rows=(of.rows[0][:, : of.offset + n], of.rows[1][:, : of.offset + n]))
        expected = in_float64(shorter, np.array(q[i, :, :n]).astype(np.float64), 0.125, None, None)
        answer = np.array(found[i])
        assert np.linalg.norm(answer[:, :n] - expected) <= LIMIT * np.linalg.norm(expected)
        assert not answer[:, n:].any()
        for joined, rows in zip(tails, of.rows, strict=True):
            own, lo = np.array(joined[i]), of.offset % PAGE
            assert np.array_equal(own[:, lo : lo + n], rows[:, of.offset : of.offset + n])
            assert np.isnan(own[:, lo + n :]).all()


@pytest.mark.parametrize("is_ours", [False, True])
def test_tails_that_others_read_are_left_as_they_are(is_ours: bool) -> None:
    pages, growth = growth_of(made("q8_0", "turbo4", 64, 1), 1, is_ours=is_ours)
    before = [np.array(tail) for tail in growth.tails]
    _, tails = c_backend(C_PATHS[-1]).append_and_attend(queries(4, 4, 1, 64, mx.float32), pages, growth, Query(0.125))
    for tail, given, held in zip(tails, growth.tails, before, strict=True):
        assert (tail is given) == is_ours
        assert np.array_equal(np.array(given), held, equal_nan=True) != is_ours


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_new_rows_are_float16_as_numpy_has_them(path: str, dtype: mx.Dtype) -> None:
    every = mx.array(np.arange(1 << 16, dtype=np.uint16)).view(mx.float16 if dtype == mx.float16 else mx.bfloat16)
    near = mx.array(np.float32([65503, 65504, 65519.99, 65520, 65535.5, 1e9, 5.97e-8, 2.9e-8, 1e-30, 2049, 2051, -0.0]))
    values = mx.concatenate([every.astype(mx.float32), near, -near]).astype(dtype)
    width, n_rows = 64, 2 * PAGE // 4
    backend, found = c_backend(path), []
    pages, growth = growth_of(made("turbo4", "turbo4", width, n_rows, (0,)), n_rows)
    per_step = N_KV_HEADS * n_rows * width
    for start in range(0, values.size, per_step):
        some = values[start : start + per_step]
        new = mx.pad(some, [(0, per_step - some.size)]).reshape(1, N_KV_HEADS, n_rows, width)
        step = Growth(growth.tails, (new, new), (0,), (n_rows,))
        _, (tail, _) = backend.append_and_attend(mx.zeros((1, 2, n_rows, width)), pages, step, Query(1.0))
        found.append(np.array(tail[:, :, :n_rows]).ravel()[: some.size])
    with np.errstate(invalid="ignore"):
        wide = np.array(values.astype(mx.float32))
        expected = np.where(np.isfinite(wide), np.clip(wide, -65504, 65504), wide).astype(np.float16)
    answer = np.concatenate(found)
    number = ~np.isnan(expected)
    assert np.isnan(answer[~number]).all()
    assert np.array_equal(answer[number].view(np.uint16), expected[number].view(np.uint16))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    sequences, answers, path = made("turbo4", "turbo3", 128, 2, (900, 300, 5)), set(), C_PATHS[-1]
    q = queries(3, 8, 2, 128, mx.float32)
    before = library(path).threads
    try:
        for n in (1, 2, 5):
            library(path).set_threads(n)
            out, _ = c_backend(path).append_and_attend(q, *growth_of(sequences, 2), Query(0.1))
            answers.add(np.array(out).tobytes())
    finally:
        library(path).set_threads(before)
    assert len(answers) == 1

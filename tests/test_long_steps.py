"""Long steps of a GPU by parts of their keys: rows of any pages see what they would see one by one."""

from __future__ import annotations

from collections import deque

import mlx.core as mx
import numpy as np
import pytest
from emulator.checked import CheckedLauncher
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.runtime.attention import hook, long_steps
from tqgguf.runtime.attention.backend import Backend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.attention.partial import can_be_fused, plain_partial, with_siblings
from tqgguf.runtime.cache.kv_cache import BlockKVCache

HEAD_DIM, N_HEADS, N_KV_HEADS = 64, 4, 2
KEPT: list[int] = []


def spied(q: mx.array, keys: mx.array, values: mx.array, *, scale: float, causal: bool = False):
    KEPT.append(q.shape[0] * q.shape[2] * keys.shape[2])
    assert q.shape[2] % 128 == 0 and q.dtype == keys.dtype == values.dtype in (mx.float16, mx.bfloat16)
    return plain_partial(q, keys, values, scale=scale, causal=causal)


def answer(
    backend: Backend,
    held: int,
    n: int,
    types: tuple[str, str] = ("turbo4", "turbo3"),
    window: int | None = None,
    sinks: mx.array | None = None,
    dtype: mx.Dtype = mx.float16,
) -> np.ndarray:
    """Attention of n rows after `held` ones that were cached in steps of 100."""
    rng = np.random.default_rng(21)
    cache = BlockKVCache(*types, window=window, rope=RopeLayout(HEAD_DIM, True), backend=backend)
    rows = [mx.array(rng.standard_normal((1, N_KV_HEADS, held + n, HEAD_DIM)).astype(np.float16)) for _ in range(2)]
    q = mx.array(rng.standard_normal((1, N_HEADS, n, HEAD_DIM)).astype(np.float32)).astype(dtype)
    for at in range(0, held, 100):
        cache.update_and_fetch(*(side[:, :, at : min(at + 100, held)] for side in rows))
    keys, values = cache.update_and_fetch(*(side[:, :, held:].astype(dtype) for side in rows))
    out = hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.2, mask="causal", sinks=sinks)
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32))


def by_parts(**kwargs: int) -> KernelBackend:
    return KernelBackend(EmulatedLauncher(), partial=spied, **kwargs)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of all rows together: one wrong row is a hundredth and more, a code that falls on a boundary a thousandth."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


STEPS = {
    "from the first token on": (0, 300),
    "from a page's edge to another": (256, 256),
    "from within a page": (200, 250),
    "of two pages by ten rows": (123, 10),
    "of three pages": (128, 384),
    "of six pages, which begins and ends within": (50, 700),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_by_parts_answers_as_by_numpy(step: str) -> None:
    KEPT.clear()
    held, n = STEPS[step]
    assert error(answer(by_parts(), held, n), answer(NumpyBackend(), held, n)) < 3e-3
    assert KEPT, "no parts were taken"


def test_keys_before_a_step_are_taken_in_pieces_and_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_steps, "PIECE", 256)
    KEPT.clear()
    assert error(answer(by_parts(), 700, 200), answer(NumpyBackend(), 700, 200)) < 3e-3
    # five pages before three of rows: two pieces and half of one; the step's pages over themselves, in twos, in fours
    rows, page = 3 * 128, 128
    expected = [2 * rows * 256, rows * page, 3 * page * page, 2 * page * page, (2 * page) ** 2]
    assert sorted(KEPT) == sorted(expected)


def test_longer_steps_are_cut_from_their_first_page_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_steps, "MOST_LEVELS", 1)
    KEPT.clear()
    assert error(answer(by_parts(), 140, 500), answer(NumpyBackend(), 140, 500)) < 3e-3
    page = 128
    # four pages of rows, after one: two by two, each over itself, its pair, and what is before both
    assert sorted(KEPT) == sorted([*[2 * page**2, page**2] * 2, 2 * page * page, 2 * page * 3 * page])


@pytest.mark.parametrize(
    ("types", "limits"),
    [
        (("turbo4", "f16"), {}),
        (("q8_0", "turbo3"), {"workspace_bytes": 1}),
        (("f16", "turbo2"), {"workspace_bytes": 1}),
    ],
)
def test_parts_of_any_pair_of_types_and_of_single_heads(types: tuple[str, str], limits: dict[str, int]) -> None:
    assert error(answer(by_parts(**limits), 150, 240, types), answer(NumpyBackend(), 150, 240, types)) < 3e-3


def test_sink_logits_and_bfloat16_queries() -> None:
    sinks = mx.array([2.0, -1.0, 5.0, 0.5])
    found, expected = (
        answer(backend, 150, 240, sinks=sinks, dtype=mx.bfloat16)
        for backend in (KernelBackend(CheckedLauncher(), partial=spied), NumpyBackend())
    )
    assert error(found, expected) < 5e-3
    assert error(expected, answer(NumpyBackend(), 150, 240, dtype=mx.bfloat16)) > 0.05  # sinks matter


def test_the_host_waits_for_the_layers_before_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[mx.array] = []
    monkeypatch.setattr(long_steps.mx, "eval", waited.append)
    monkeypatch.setattr(long_steps, "_in_flight", deque())
    queries = [mx.zeros(8) + i for i in range(6)]
    for q in queries:
        long_steps._wait_for_others(q, 1 << 20)  # too little to wait for
    assert not long_steps._in_flight
    for q in queries:
        long_steps._wait_for_others(q, 1 << 30)
    assert [int(q[0]) for q in waited] == [0, 1, 2, 3] and len(long_steps._in_flight) == 2


def test_a_step_that_mlx_traces_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_steps, "_in_flight", deque())

    def layers(x: mx.array) -> mx.array:
        for _ in range(6):
            x = x + 1
            long_steps._wait_for_others(x, 1 << 30)
        return x

    assert mx.compile(layers)(mx.zeros(8)).tolist() == [6.0] * 8
    assert not long_steps._in_flight


def test_a_window_that_hides_keys_is_left_to_masks() -> None:
    KEPT.clear()
    assert error(answer(by_parts(), 200, 250, window=150), answer(NumpyBackend(), 200, 250, window=150)) < 3e-3
    assert not KEPT


def test_an_exported_function_returns_the_siblings_of_its_output_once_they_are_named() -> None:
    a, b = mx.arange(12).reshape(3, 4).astype(mx.float32) + 7, mx.full((3, 4), 5.0)

    def quotient(a: mx.array, b: mx.array) -> mx.array:
        return mx.vjp(lambda *ab: mx.divmod(*ab)[0], [a, b], [mx.zeros(a.shape)])[0][0]

    found = with_siblings(quotient, a, b)(a + 1, b)
    assert [np.array(array).tolist() for array in found] == [np.array(x).tolist() for x in mx.divmod(a + 1, b)]
    with pytest.raises(ValueError, match="no second output"):
        with_siblings(lambda a, b: a + b, a, b)


def test_where_mlx_has_no_fused_attention_there_is_none_with_its_log_sum_exp() -> None:
    if mx.default_device() == mx.cpu:
        assert not can_be_fused()


@pytest.mark.parametrize("causal", [False, True])
def test_partial_attention_equals_float64_softmax(causal: bool) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, heads, n, 8)).astype(np.float16) for heads, n in ((4, 128), (2, 160), (2, 160)))
    out, sums = plain_partial(mx.array(q), mx.array(k), mx.array(v), scale=0.7, causal=causal)
    scores = 0.7 * np.einsum("bhgrd,bhkd->bhgrk", q.reshape(2, 2, 2, 128, 8).astype(float), k.astype(float))
    if causal:
        scores = np.where(np.arange(160) > np.arange(32, 160)[:, None], -np.inf, scores)
    weights = np.exp(scores)
    expected = np.einsum("bhgrk,bhkd->bhgrd", weights, v.astype(float)) / weights.sum(-1, keepdims=True)
    assert np.allclose(np.array(out), expected.reshape(2, 4, 128, 8), atol=2e-3)
    assert np.allclose(np.array(sums)[..., 0], np.log(weights.sum(-1)).reshape(2, 4, 128), atol=1e-4)

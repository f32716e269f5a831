"""The block cache keeps mlx-lm's protocol: it can be cut, saved, restored and measured, and says what it refuses."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, trim_prompt_cache

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.cache_spec import LayerTypes
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.blocks.kv_size import LayerShape, kv_bytes
from tqgguf.formats.errors import EncodeError, RequestError, TqggufError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.generation.cache_files import load_prompt_cache

HEADS, DIM = 2, 64
TYPE_PAIRS = [("turbo4", "turbo3"), ("q8_0", "q4_0"), ("turbo2", "f16"), ("f16", "f16"), ("bf16", "iq4_nl")]


def rows(n: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    k, v = (mx.array(rng.standard_normal((1, HEADS, n, DIM)).astype(np.float32)) for _ in range(2))
    return k, v


def feed(cache: BlockKVCache, k: mx.array, v: mx.array, start: int, stop: int) -> tuple[mx.array, mx.array]:
    return cache.update_and_fetch(k[:, :, start:stop], v[:, :, start:stop])


def filled(n: int, type_k: str = "turbo4", type_v: str = "turbo3", step: int = 256, **settings) -> BlockKVCache:
    cache = BlockKVCache(type_k, type_v, **settings)
    k, v = rows(n)
    for start in range(0, n, step):
        feed(cache, k, v, start, min(n, start + step))
    return cache


def contents(cache: BlockKVCache) -> list[bytes]:
    """Every array of the cache's state, byte by byte."""
    arrays = [a for side in cache.state[-2:] for a in side if a is not None]
    return [bytes(memoryview(np.ascontiguousarray(a.view(mx.uint8) if a.dtype == mx.bfloat16 else a))) for a in arrays]


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_a_restored_cache_continues_as_the_one_it_was_made_from(type_k: str, type_v: str, n: int) -> None:
    cache = filled(n, type_k, type_v)
    restored = BlockKVCache.from_state(cache.state)
    k, v = rows(150, seed=1)
    expected, found = (feed(c, k, v, 0, 150) for c in (cache, restored))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)))
    assert contents(restored) == contents(cache)
    assert restored.offset == n + 150


def test_an_empty_cache_has_a_state_too() -> None:
    restored = BlockKVCache.from_state(BlockKVCache("turbo4", "q8_0", layer=7, window=512).state)
    assert restored.empty() and restored.size() == 0
    assert (restored.settings.types.type_k, restored.settings.types.type_v, restored.layer, restored.window) == (
        "turbo4",
        "q8_0",
        7,
        512,
    )


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
def test_trimming_inside_the_tail_is_exact(type_k: str, type_v: str) -> None:
    k, v = rows(200)
    straight, cut = filled(150, type_k, type_v), filled(150, type_k, type_v)
    feed(straight, k, v, 150, 155)
    feed(straight, k, v, 155, 158)
    feed(cut, k, v, 150, 155)
    assert cut.trim(3) == 3 and cut.offset == 152
    feed(cut, k, v, 152, 155)
    feed(cut, k, v, 155, 158)
    assert contents(cut) == contents(straight)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 299, 300])
@pytest.mark.parametrize("type_k", ["turbo4", "q4_0", "f16"])
def test_trimming_into_an_encoded_page_turns_its_decoded_values_into_the_tail(type_k: str, length: int) -> None:
    cache = filled(300, type_k, "turbo3", balance="off", rolls_back=False)
    assert cache.trim(300 - length) == 300 - length
    assert cache.offset == length
    k, v = rows(300)
    keys, values = feed(cache, *rows(1, seed=2), 0, 1)
    assert keys.shape[2] == values.shape[2] == length + 1
    for side, fetched, given in (("k", keys, k), ("v", values, v)):
        codec = resolve_codec(type_k if side == "k" else "turbo3", DIM, side)
        given = np.array(given)[0].astype(np.float16).astype(np.float32)
        decoded = codec.decode(codec.encode(given))
        exact = 256 if length > 256 else 0  # the tail of 300 tokens begins at 256 and is cut exactly
        expected = np.concatenate([decoded[:, : exact or length], given[:, exact or length : length]], axis=1)
        if not codec.is_float:
            expected[:, : min(cache.settings.types.n_prefix, length)] = given[
                :, : min(cache.settings.types.n_prefix, length)
            ]
        expected = expected.astype(np.float16).astype(np.float32) if codec.is_float else expected
        # decoded values pass through the f16 tail: half a unit in the last place of float16
        np.testing.assert_allclose(np.array(fetched)[0, :, :length], expected, rtol=1e-3, atol=1e-3)


def test_trimming_is_clamped_to_the_length_and_refuses_negative_numbers() -> None:
    cache = filled(10)
    with pytest.raises(ValueError, match="expected a number of tokens >= 0, found -1"):
        cache.trim(-1)
    assert cache.offset == 10
    assert cache.trim(0) == 0
    assert cache.trim(99) == 10
    assert cache.empty() and cache.nbytes == 0


def test_mlx_lms_own_trim_works_on_a_prompt_cache() -> None:
    caches = [filled(140), filled(140)]
    assert trim_prompt_cache(caches, 20) == 20
    assert [c.offset for c in caches] == [120, 120]


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
def test_a_window_frees_pages_and_keeps_what_the_next_query_sees(type_k: str, type_v: str) -> None:
    cache = filled(1000, type_k, type_v, window=200, rolls_back=False)
    assert cache.start == (1000 - 200 + 1) // 128 * 128
    assert not cache.is_trimmable()
    keys, _ = feed(cache, *rows(1, seed=3), 0, 1)
    assert keys.shape[2] == 1001 - 768
    with pytest.raises(ValueError, match="those from 768 on as rows, and cannot go back to 900"):
        cache.trim(101)
    assert cache.offset == 1001
    assert cache.trim(1) == 1
    assert cache.nbytes < filled(1000, type_k, type_v).nbytes / 2


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
@pytest.mark.parametrize("n", [2047, 2048])
def test_allocated_bytes_follow_the_designs_formula(type_k: str, type_v: str, n: int) -> None:
    cache = filled(n, type_k, type_v, rolls_back=False)
    formula = kv_bytes([LayerShape(HEADS, DIM, DIM)], [cache.settings.types], n) - 4 * n
    assert abs(cache.nbytes / formula - 1) <= 0.03


def test_the_formula_counts_pages_means_tail_prefix_windows_and_token_ids() -> None:
    full, window = LayerShape(2, 64, 128), LayerShape(2, 64, 128, window=200)
    plain, paged, balanced = (LayerTypes("turbo4", "turbo3", mode, 4) for mode in ("off", "page", "full"))
    # turbo4 at 64: 34 bytes a head vector; turbo3 at 128: 50. 300 tokens: 2 pages, 44 tail tokens, 4 exact ones
    blocks = 2 * 128 * 2 * (34 + 50)
    floats = (44 + 4) * 2 * (64 + 128) * 2
    assert kv_bytes([full], [plain], 300) == blocks + floats + 4 * 300
    # a mean of K per page and head in f16, a scale per head in f32
    assert kv_bytes([full], [paged], 300) == blocks + floats + 4 * 300 + 2 * 2 * 64 * 2
    assert kv_bytes([full], [balanced], 300) == blocks + floats + 4 * 300 + 2 * 2 * 64 * 2 + 2 * 64 * 4
    # with a window of 200, a query at 1000 sees 801 .. 1000: pages 6 (768) and the tail from 896 on
    assert kv_bytes([window], [plain], 1000) == 128 * 2 * (34 + 50) + 104 * 2 * 192 * 2 + 4000
    assert kv_bytes([full, full], [LayerTypes("f16", "f16", "off", 0)] * 2, 300) == 2 * 300 * 2 * 192 * 2 + 1200


def test_appending_a_page_does_not_copy_the_planes_while_no_handle_lives() -> None:
    # mlx donates the buffer of a slice update if nobody else holds it; a copy would have another address
    cache = filled(128 * 96)  # so many that planes grow by three pages at a time
    k, v = rows(128)
    stayed = []
    for _ in range(6):
        side = cache.sides[0]
        mx.eval(side.codes.array)
        before = (side.codes.array.shape, np.asarray(side.codes.array).ctypes.data)
        feed(cache, k, v, 0, 128)
        mx.eval(side.codes.array)
        after = (side.codes.array.shape, np.asarray(side.codes.array).ctypes.data)
        if before[0] == after[0]:
            stayed.append(before[1] == after[1])
    assert len(stayed) >= 4 and all(stayed)


@pytest.mark.parametrize("type_k", ["f16", "turbo4"])
def test_a_token_is_added_without_copying_what_is_held(type_k: str) -> None:
    cache = filled(4000, type_k, "f16", balance="off")
    k, v = rows(1)
    q = mx.ones((1, HEADS, 1, DIM))
    mx.eval(k, v, q, [a for side in cache.state[-2:] for a in side if a is not None])
    for _ in range(3):  # the first may grow the plane
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(cache.update(k, v).attend(q, 0.125, None, None))
    assert mx.get_peak_memory() - before < cache.sides[1].nbytes / 4


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
@pytest.mark.parametrize("window", [None, 100])
def test_whoever_computes_with_the_returned_arrays_gets_the_dequantised_values(
    type_k: str, type_v: str, window: int | None
) -> None:
    # one token at a time the fallback is the same attention: blocks, exact prefix and tail at their places
    cache = filled(300, type_k, type_v, window=window)
    q = mx.array(np.random.default_rng(4).standard_normal((1, HEADS * 3, 1, DIM)).astype(np.float32))
    mask = cache.make_mask(1)
    keys, values = feed(cache, *rows(1, seed=3), 0, 1)
    fallback = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask)
    attended = hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.125, mask=mask)
    np.testing.assert_allclose(np.array(fallback), np.array(attended), atol=2e-5)


def test_masks_are_only_made_where_they_are_needed() -> None:
    cache = filled(300)
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"
    assert cache.make_mask(5, window_size=400) == "causal"
    assert cache.make_mask(5, window_size=100).shape == (5, 305)
    assert cache.make_mask(5, return_array=True).shape == (5, 305)
    for rolls_back in (False, True):  # whatever is held beyond what the query sees
        assert filled(300, window=100, rolls_back=rolls_back).make_mask(1).shape == (1, 301 - 128)


def test_a_batch_of_two_is_refused() -> None:
    with pytest.raises(RequestError, match="expected batch size 1, found 2"):
        BlockKVCache().update_and_fetch(mx.zeros((2, 1, 4, 64)), mx.zeros((2, 1, 4, 64)))


def test_a_head_size_that_a_type_cannot_hold_is_refused_with_layer_and_side() -> None:
    with pytest.raises(RequestError, match=r"layer 5, V: cache type turbo3 cannot hold head_dim 80"):
        BlockKVCache("f16", "turbo3", layer=5).update_and_fetch(mx.zeros((1, 1, 4, 80)), mx.zeros((1, 1, 4, 80)))


def test_values_that_are_not_finite_are_refused_and_huge_ones_clamped() -> None:
    cache = BlockKVCache("turbo4", "turbo4")
    huge = mx.full((1, 1, 128, 64), 1e6)
    keys, _ = cache.update_and_fetch(huge, huge)
    assert float(mx.abs(keys).max()) == 65504.0
    bad = mx.full((1, 1, 128, 64), float("nan"))
    with pytest.raises(Exception, match="only finite"):
        cache.update_and_fetch(bad, bad)


@pytest.mark.parametrize("n_prefix", [-1, 129])
def test_the_exact_prefix_is_at_most_a_page(n_prefix: int) -> None:
    with pytest.raises(RequestError, match="expected 0 to 128 tokens"):
        BlockKVCache("turbo4", "turbo4", n_prefix=n_prefix)


@pytest.mark.parametrize("n_prefix", [0, 1, 128])
def test_any_exact_prefix_up_to_a_page_stays_in_f16(n_prefix: int) -> None:
    cache = filled(200, n_prefix=n_prefix)
    k, _ = rows(200)
    keys, _ = feed(cache, *rows(1, seed=3), 0, 1)
    exact = np.array(k).astype(np.float16).astype(np.float32)
    same = (np.array(keys)[0, :, :128] == exact[0, :, :128]).all(axis=(0, 2))
    assert same[:n_prefix].all() and not same[n_prefix:].any()


class Recurrent:
    """A model whose layers want three kinds of cache."""

    layers = [None] * 3

    def make_cache(self) -> list:
        return [KVCache(), RotatingKVCache(max_size=300), ArraysCache(2)]


def test_full_and_sliding_layers_get_block_caches_and_other_kinds_stay() -> None:
    caches = make_prompt_cache(Recurrent(), "turbo4", "turbo3")
    assert [type(c) for c in caches] == [BlockKVCache, BlockKVCache, ArraysCache]
    assert [c.window for c in caches[:2]] == [None, 300]
    assert caches[0].usage is caches[1].usage


def test_an_unknown_cache_type_is_refused_with_the_list_and_the_nearest_name() -> None:
    with pytest.raises(RequestError, match=r"turbo5.*did you mean 'turbo[234]'\?.*q8_0"):
        make_prompt_cache(SimpleNamespace(layers=[None]), "turbo5", "f16")


@pytest.mark.parametrize("bad", [None, 3, ["f16"], "TURBO4", ""])
def test_a_cache_type_of_any_kind_is_refused_in_words(bad: Any) -> None:
    for types in ((bad, "f16"), ("f16", bad)):
        with pytest.raises(RequestError, match="unknown cache type"):
            make_prompt_cache(SimpleNamespace(layers=[None]), *types)


@pytest.mark.parametrize("n_prefix", [1.5, "4", True])
def test_an_exact_prefix_that_is_no_whole_number_is_refused(n_prefix: Any) -> None:
    with pytest.raises(RequestError, match="exact prefix: expected 0 to 128 tokens"):
        BlockKVCache("turbo4", "turbo4", n_prefix=n_prefix)


def ones(heads: int = HEADS, tokens: int = 3, dim: int = DIM, batch: int = 1) -> mx.array:
    return mx.ones((batch, heads, tokens, dim))


# name -> (K, V, what the message says)
BAD_ROWS: dict[str, tuple[Any, Any, str]] = {
    "batch of two": (ones(batch=2), ones(batch=2), "expected batch size 1, found 2"),
    "V alone in a batch": (ones(), ones(batch=2), "expected batch size 1, found 2"),
    "more V tokens": (ones(), ones(tokens=4), "as many heads and tokens"),
    "other V heads": (ones(), ones(heads=1), "V: expected 2 heads of 64 values as before, found 1 of 64"),
    "other heads": (ones(heads=4), ones(heads=4), "K: expected 2 heads of 64 values as before, found 4 of 64"),
    "other head sizes": (ones(), ones(dim=128), "V: expected 2 heads of 64 values as before, found 2 of 128"),
    "three axes": (ones()[0], ones()[0], r"K: expected floats \[1, n_kv_heads, tokens, head_dim\], found"),
    "integers": (ones().astype(mx.int32), ones(), "K: expected floats"),
    "a numpy array": (ones(), np.ones((1, HEADS, 3, DIM), np.float32), "V: expected floats .* found ndarray"),
    "nothing": (None, None, "K: expected floats .* found NoneType"),
}


@pytest.mark.parametrize("n", [5, 126, 300])
@pytest.mark.parametrize(("type_k", "type_v"), [("turbo4", "q4_0"), ("f16", "turbo3"), ("f16", "f16")])
def test_rows_that_do_not_fit_are_refused_and_change_nothing(type_k: str, type_v: str, n: int) -> None:
    cache, before = filled(n, type_k, type_v), contents(filled(n, type_k, type_v))
    for name, (k, v, message) in BAD_ROWS.items():
        with pytest.raises(RequestError, match=message):
            cache.update_and_fetch(k, v)
        assert (cache.offset, contents(cache)) == (n, before), name
    assert feed(cache, *rows(2), 0, 2)[1].shape[2] == n + 2


@pytest.mark.parametrize("nan_in", ["k", "v"])
@pytest.mark.parametrize("n", [0, 100, 300])
def test_nan_that_reaches_a_full_page_is_an_error_that_names_its_layer_and_changes_nothing(n: int, nan_in: str) -> None:
    cache = filled(n, layer=7)
    before = contents(cache) if n else []
    k, v = rows(200)
    nan = {"k": k, "v": v}[nan_in]
    nan[0, 1, 70, 5] = float("nan")
    with pytest.raises(EncodeError, match=f"layer 7, {nan_in.upper()}: .*found nan"):
        cache.update_and_fetch(k, v)
    assert cache.offset == n and (contents(cache) if n else []) == before
    assert cache.empty() == (n == 0)
    assert feed(cache, *rows(200, seed=2), 0, 200)[0].shape[2] == n + 200


def test_a_refusal_under_strict_changes_nothing() -> None:
    cache = filled(200, usage=Usage(strict=False))
    before = contents(cache)
    cache.usage.strict = True  # nobody has attended from the last step
    with pytest.raises(RequestError, match="by fallback"):
        feed(cache, *rows(100), 0, 100)
    assert (cache.offset, contents(cache)) == (200, before)


@pytest.mark.parametrize("n", [1.5, "x", None])
def test_trimming_by_what_is_no_whole_number_changes_nothing(n: Any) -> None:
    cache = filled(200)
    before = contents(cache)
    with pytest.raises(TypeError):
        cache.trim(n)
    assert (cache.offset, contents(cache)) == (200, before)


def changed(state: tuple[Any, ...], **entries: Any) -> tuple[Any, ...]:
    names = ["type_k", "type_v", "balance", "n_prefix", "layer", "window", "rope_dims", "rope_traditional", "has_tail"]
    names += ["rolls_back", "offset", "first_page", "channel_scale", "dim_k", "dim_v", "v_tiled", "k", "v"]
    return tuple(entries.get(name, value) for name, value in zip(names, state, strict=True))


GOOD = filled(300).state
BAD_STATES: dict[str, Any] = {
    "nothing": None,
    "a number": 5,
    "a string": "turbo4",
    "empty": (),
    "too short": GOOD[:3],
    "no arrays of V": GOOD[:-1],
    "tokens without arrays": GOOD[:-5],
    "an unknown type": changed(GOOD, type_v="zzz"),
    "float types over blocks": changed(GOOD, type_k="f16", type_v="f16"),
    "another block type": changed(GOOD, type_v="q8_0"),
    "a head size it has not": changed(GOOD, dim_k=128, dim_v=128),
    "tiles of a type that has none": changed(filled(300, "turbo4", "q8_0").state, v_tiled=1),
    "half in tiles": changed(GOOD, v_tiled=2),
    "negative tokens": changed(GOOD, offset=-5),
    "more tokens than rows": changed(GOOD, offset=999),
    "fewer tokens than rows": changed(GOOD, offset=299),
    "tokens in words": changed(GOOD, offset="300"),
    "a page beyond the tokens": changed(GOOD, first_page=7),
    "a page of which the rows are there": changed(GOOD, first_page=1),
    "another exact prefix": changed(GOOD, n_prefix=5),
    "an exact prefix beyond a page": changed(GOOD, n_prefix=500),
    "K and V swapped": changed(GOOD, k=GOOD[-1], v=GOOD[-2]),
    "no arrays but None": changed(GOOD, v=[None] * 5),
    "codes of one axis": changed(GOOD, k=[mx.zeros((3,)), *GOOD[-2][1:]]),
    "scales in f32": changed(GOOD, k=[GOOD[-2][0], GOOD[-2][1].astype(mx.float32), *GOOD[-2][2:]]),
    "an unknown balance": changed(GOOD, balance="half"),
    "no balance where there are means": changed(GOOD, balance="off"),
    "a given channel scale of one axis": changed(GOOD, channel_scale=mx.ones((3,))),
    "a given channel scale in words": changed(GOOD, channel_scale="one"),
    "means of another shape": changed(GOOD, k=[*GOOD[-2][:4], mx.zeros((2, 1, DIM), mx.float16), *GOOD[-2][5:]]),
    "no channel scale where there are pages": changed(GOOD, k=[*GOOD[-2][:5], None, *GOOD[-2][6:]]),
    "RoPE over more channels than a head has": changed(GOOD, rope_dims=2 * DIM),
    "a scale of zeros": changed(GOOD, k=[*GOOD[-2][:5], mx.zeros((HEADS, DIM)), *GOOD[-2][6:]]),
    "a scale of NaN": changed(GOOD, k=[*GOOD[-2][:5], mx.full((HEADS, DIM), float("nan")), *GOOD[-2][6:]]),
    "means of NaN": changed(GOOD, k=[*GOOD[-2][:4], GOOD[-2][4] * float("nan"), *GOOD[-2][5:]]),
    "norms of infinity": changed(GOOD, k=[GOOD[-2][0], GOOD[-2][1] * float("inf"), *GOOD[-2][2:]]),
    "queries where the scale is fixed": changed(GOOD, k=[*GOOD[-2][:6], mx.ones((HEADS, 3, DIM)), *GOOD[-2][7:]]),
    "RoPE over an odd number of channels": changed(GOOD, rope_dims=1),
    "arrays of numpy": changed(GOOD, k=[None if a is None else np.array(a) for a in GOOD[-2]]),
}


def test_a_window_that_frees_page_0_while_k_waits_for_queries_frees_both_sides() -> None:
    rng = np.random.default_rng(22)
    q, k, v = (mx.array(rng.standard_normal((1, h, 300, DIM)).astype(np.float32)) for h in (2 * HEADS, HEADS, HEADS))
    cache = BlockKVCache("turbo4", "turbo3", window=64, rope=RopeLayout(DIM, True), rolls_back=False)
    mask = cache.make_mask(300)
    keys, values = cache.update_and_fetch(k, v)
    hook.scaled_dot_product_attention(q, keys, values, scale=0.1, mask=mask)
    restored = BlockKVCache.from_state(cache.state)
    assert contents(restored) == contents(cache)
    assert {side.first_page for side in (*cache.sides, *restored.sides)} == {1}
    assert not cache.can_go_back(10)


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_no_cache_can_have_given_is_refused_and_changes_nothing(name: str) -> None:
    with pytest.raises(TqggufError):
        BlockKVCache.from_state(BAD_STATES[name])
    cache = filled(140, "q8_0", "q4_0")
    before = contents(cache)
    with pytest.raises(TqggufError):
        cache.state = BAD_STATES[name]
    assert (cache.settings.types.type_k, cache.offset, contents(cache)) == ("q8_0", 140, before)
    assert feed(cache, *rows(1), 0, 1)[0].shape[2] == 141


STRANGE: list[Any] = [
    None, True, -1, 10**30, 1.5, "", "x", b"ab", [], [1, 2], {}, object(), int, np.float32(2), np.bool_(True),
    np.array(3), np.array([1, 2]), np.array([]), np.array("a"), mx.array(3), mx.array([1, 2]), mx.zeros((2, 2)),
]  # fmt: skip
STRANGE_ARRAYS: list[Any] = [
    3, "x", np.zeros((2, 2)), mx.array(1.0), mx.zeros((0,)), mx.zeros((0, 0)), mx.zeros((1,) * 8),
    mx.zeros((HEADS, 128, DIM)), mx.zeros((HEADS, 44, DIM), mx.bfloat16), mx.zeros((HEADS, DIM), mx.bool_),
    mx.zeros((2, HEADS, 128, DIM), mx.uint8), mx.full((HEADS, 128, DIM), -1.0), mx.zeros((HEADS, 4, DIM), mx.complex64),
]  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        filled(300),
        filled(128, "turbo3", "q8_0"),
        filled(40, "turbo4", "turbo2"),
        filled(300, "f16", "bf16"),
        filled(500, "iq4_nl", "f32", window=60),
        BlockKVCache(),
    ],
    ids=repr,
)
def test_every_entry_of_a_state_that_is_of_another_kind_is_refused_or_serves(made: BlockKVCache) -> None:
    """Wrong shapes, types and counts in every place. What is taken, as another layer's number may be, can go on."""
    good = made.state
    states = [good[:i] for i in range(len(good))] + STRANGE
    for i, entry in enumerate(good):
        states += [(*good[:i], strange, *good[i + 1 :]) for strange in STRANGE]
        if isinstance(entry, list):
            lists = [[*entry[:j], strange, *entry[j + 1 :]] for j in range(len(entry)) for strange in STRANGE_ARRAYS]
            lists += [entry[:j] for j in range(len(entry))] + [[*entry, None]]
            states += [(*good[:i], arrays, *good[i + 1 :]) for arrays in lists]
    refused = 0
    for state in states:
        cache = filled(3, "q8_0", "q4_0")
        try:
            cache.state = state
        except TqggufError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 600
            assert (cache.settings.types.type_k, cache.offset) == ("q8_0", 3)
        if cache.settings.has_tail:
            mx.eval(feed(cache, *rows(1), 0, 1))
    assert refused > 0.9 * len(states)


@pytest.mark.parametrize(("type_k", "type_v"), TYPE_PAIRS)
def test_states_of_trimmed_and_windowed_caches_restore(type_k: str, type_v: str) -> None:
    for n, settings in ((1000, {"window": 200}), (256, {}), (100, {"n_prefix": 128})):
        for cut in (0, 1, 45):
            cache = filled(n, type_k, type_v, **settings)
            cache.trim(cut if not settings.get("window") else min(cut, 1))
            restored = BlockKVCache.from_state(cache.state)
            assert (restored.offset, contents(restored)) == (cache.offset, contents(cache))


def test_a_cache_says_what_it_is_and_holds() -> None:
    cache = filled(300, "turbo4", "q8_0", layer=3, window=512)
    assert repr(cache) == f"BlockKVCache(layer 3, turbo4/q8_0, window 512, 300 tokens, {cache.nbytes:,} bytes)"
    assert repr(BlockKVCache("f16", "bf16")) == "BlockKVCache(layer 0, f16/bf16, 0 tokens, 0 bytes)"
    batch = BlockKVCache.merge([filled(3), filled(140)])
    assert repr(batch) == f"BatchBlockKVCache(layer 0, turbo4/turbo3, tokens: 3, 140, {batch.nbytes:,} bytes)"


@pytest.mark.parametrize("model", ["name", None, 5, [], {}, Path("m.gguf")])
def test_what_is_no_model_gets_no_cache(model: Any) -> None:
    expected = f"expected an mlx-lm model, or what tqgguf.load_model gave, found {type(model).__name__}"
    with pytest.raises(RequestError, match=expected):
        make_prompt_cache(model)
    with pytest.raises(RequestError, match=expected):
        load_prompt_cache("nothing.gguf", model)


@pytest.mark.parametrize("strange", [np.array([1, 2]), mx.zeros((2, 2)), [4], "4", 1.5])
def test_a_balance_and_a_prefix_of_another_kind_are_refused(strange: Any) -> None:
    for settings in ({"balance": strange}, {"n_prefix": strange}, {"window": strange}, {"type_k": strange}):
        with pytest.raises(RequestError, match=r"found|cache type"):
            BlockKVCache(**settings)


def test_copies_and_pickles_live_apart() -> None:
    cache = filled(200)
    before = contents(cache)
    for twin in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        feed(twin, *rows(200, seed=3), 0, 200)
        assert twin.offset == 400 and (cache.offset, contents(cache)) == (200, before)
    prompt_cache = make_prompt_cache(SimpleNamespace(layers=[None] * 2))
    twins = copy.deepcopy(prompt_cache)
    assert twins[0].usage is twins[1].usage is not prompt_cache[0].usage

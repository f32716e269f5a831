"""Bits per value charge everything that a cache stores but its f16 tail: worked out here by hand."""

from __future__ import annotations

import math

import pytest

from tqgguf.formats.blocks.bits_per_value import bits_of_groups, bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import TOKEN_ID_BYTES, LayerShape, kv_bytes

SMOLLM2 = [LayerShape(3, 64, 64)] * 30
UNEVEN = [LayerShape(2, 192, 128), LayerShape(1, 128, 128)]


def bits(layers: list[LayerShape], type_k: str, type_v: str, n_tokens: int, **more: object) -> tuple[float, ...]:
    spec = CacheSpec(type_k, type_v, **more)  # type: ignore[arg-type]
    found = bits_per_value(layers, spec.resolve(len(layers)), n_tokens)
    return found.k, found.v, found.mean


def test_float_types_have_the_bits_of_their_values() -> None:
    assert bits(SMOLLM2, "f16", "f32", 100) == (16, 32, 24)


def test_plain_types_have_the_bits_of_their_blocks() -> None:
    assert bits(SMOLLM2, "q8_0", "q4_0", 2048) == (8.5, 4.5, 6.5)
    # one f16 norm for 64 values: (2 + 32) bytes
    assert bits(SMOLLM2, "turbo4", "turbo2", 2048, n_prefix=0, balance="off") == (4.25, 2.25, 3.25)


def test_an_exact_prefix_is_charged_beside_the_blocks_of_its_page() -> None:
    k, v, mean = bits(SMOLLM2, "turbo4", "turbo3", 2048, n_prefix=4, balance="off")
    assert (k, v) == (4.25 + 4 * 16 / 2048, 3.25 + 4 * 16 / 2048)
    assert mean == (k + v) / 2


def test_page_means_and_the_channel_scale_are_charged_to_k() -> None:
    # an f16 mean per channel for 128 values of it: 0.125 bits; an f32 scale per channel once
    assert bits(SMOLLM2, "turbo4", "turbo4", 1024, n_prefix=0, balance="page")[:2] == (4.375, 4.25)
    assert bits(SMOLLM2, "turbo4", "turbo4", 1024, n_prefix=0, balance="full")[0] == 4.375 + 32 / 1024


def test_the_balanced_cache_of_8192_tokens_has_the_bits_that_it_is_judged_at() -> None:
    assert bits(SMOLLM2, "turbo4", "turbo4", 8192)[2] == pytest.approx(4.3223, abs=1e-4)
    assert bits(SMOLLM2, "turbo3", "turbo3", 8192)[2] == pytest.approx(3.3223, abs=1e-4)


def test_the_tail_is_charged_to_nobody() -> None:
    assert bits(SMOLLM2, "turbo4", "q4_0", 2048 + 127) == bits(SMOLLM2, "turbo4", "q4_0", 2048)


def test_without_a_whole_page_there_is_no_such_number() -> None:
    k, v, mean = bits(SMOLLM2, "turbo4", "f16", 127)
    assert math.isnan(k) and v == 16 and math.isnan(mean)


def test_the_mean_of_k_and_v_weighs_them_by_their_values() -> None:
    k, v, mean = bits(UNEVEN, "q8_0", "q4_0", 256)
    assert (k, v) == (8.5, 4.5)
    assert mean == pytest.approx((8.5 * (2 * 192 + 128) + 4.5 * (2 * 128 + 128)) / (2 * 192 + 128 + 2 * 128 + 128))


def test_window_layers_count_the_pages_that_they_hold() -> None:
    layers = [LayerShape(1, 128, 128), LayerShape(1, 128, 128, window=256)]
    # 8 pages, and the 2 pages that positions 769 to 1023 lie in; page 0 of the second layer is freed, with its prefix
    k, _, _ = bits(layers, "turbo4", "turbo4", 1024, balance="page")
    assert k == pytest.approx((8 * 4.25 + 2 * 4.25 + 8 * 4 * 16 / 1024) / 10)


@pytest.mark.parametrize("types", [("turbo4", "turbo3"), ("q8_0", "f16"), ("turbo2,0:q8_0", "q5_1")])
def test_bits_are_the_bytes_of_the_one_formula(types: tuple[str, str]) -> None:
    n = 1024
    resolved = CacheSpec(*types).resolve(len(UNEVEN))
    values = n * sum(layer.n_kv_heads * (layer.head_dim_k + layer.head_dim_v) for layer in UNEVEN)
    expected = (kv_bytes(UNEVEN, resolved, n) - TOKEN_ID_BYTES * n) * 8 / values
    assert bits_per_value(UNEVEN, resolved, n).mean == pytest.approx(expected, rel=1e-12)


def test_mlx_lms_cache_is_charged_its_scales_and_biases() -> None:
    assert bits_of_groups(SMOLLM2, 2048, 4, 64, 4).mean == 4.5
    assert bits_of_groups(SMOLLM2, 2048, 8, 32, 4).mean == 9


def test_window_layers_that_mlx_lm_leaves_in_f16_weigh_what_they_hold() -> None:
    layers = [LayerShape(1, 64, 64), LayerShape(1, 64, 64, window=256)]
    assert bits_of_groups(layers, 1024, 4, 64, 4).k == pytest.approx((1024 * 4.5 + 256 * 16) / (1024 + 256))

"""Bits are spent where they save the most error, and never more of them than the budget has."""

from __future__ import annotations

import itertools

import pytest

from tqgguf.formats.blocks.bits_per_value import bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.measuring.evaluation.recommendation import (
    Budget,
    best_by_layer,
    best_uniform,
    layered,
    unproven_layers,
    without_few_bits,
)

SHAPES = [LayerShape(2, 64, 64)] * 3
N = 8192
TYPES = ("turbo2", "turbo3", "turbo4", "q8_0")
BY_TYPE = dict(zip(TYPES, (0.12, 0.034, 0.0095, 0.0001), strict=True))


def errors(k: tuple[float, ...], v: tuple[float, ...]) -> list[dict]:
    """Every layer's errors: a factor for K and one for V on the usual ones."""
    sides = (k, v)
    return [
        {side: {t: f[i] * e for t, e in BY_TYPE.items()} for side, f in zip("kv", sides, strict=True)} for i in range(3)
    ]


def error_of(spec: CacheSpec, found: list[dict]) -> float:
    types = spec.resolve(len(found))
    return sum(e["k"][t.type_k] + e["v"][t.type_v] for e, t in zip(found, types, strict=True))


def bits_of(spec: CacheSpec) -> float:
    return bits_per_value(SHAPES, spec.resolve(3), N).mean


@pytest.mark.parametrize("budget", [2.4, 3.0, 3.4, 3.9, 4.4, 6.5, 9.0])
def test_the_best_pair_is_the_one_that_trying_all_finds(budget: float) -> None:
    found = errors((5, 1, 1), (1, 1, 1))
    specs = [CacheSpec(k, v) for k, v in itertools.product(TYPES, TYPES)]
    expected = min((s for s in specs if bits_of(s) <= budget), key=lambda s: error_of(s, found))
    best = best_uniform(SHAPES, found, Budget(budget, (N,)))
    assert best is not None and best.spec == expected
    assert best.error == pytest.approx(error_of(expected, found)) and best.bits[0] == pytest.approx(bits_of(expected))


@pytest.mark.parametrize("budget", [2.4, 2.8, 3.0, 3.4, 3.9, 4.4, 5.5, 6.5, 9.0])
def test_types_by_layer_stay_in_the_budget_and_are_close_to_the_best_of_all(budget: float) -> None:
    found = errors((9, 1, 0.2), (1, 2, 0.1))
    best = best_by_layer(SHAPES, found, Budget(budget, (N,)))
    assert best is not None and best.keeps(Budget(budget, (N,))) and best.bits[0] <= budget
    every = (CacheSpec(layered(types[:3]), layered(types[3:])) for types in itertools.product(TYPES, repeat=6))
    least = min(error_of(spec, found) for spec in every if bits_of(spec) <= budget)
    assert least <= best.error <= 1.5 * least


def test_layers_that_suffer_get_the_larger_types() -> None:
    best = best_by_layer(SHAPES, errors((50, 1, 1), (1, 1, 1)), Budget(3.6, (N,)))
    assert best is not None
    first, *others = (t.type_k for t in best.spec.resolve(3))
    assert all(TYPES.index(first) > TYPES.index(other) for other in others)


def test_a_type_that_costs_more_and_saves_nothing_is_never_taken() -> None:
    found = errors((1, 1, 1), (1, 1, 1))
    for layer in found:
        layer["k"]["turbo4"] = 1.0
    best = best_by_layer(SHAPES, found, Budget(4.4, (N,)))
    assert best is not None and "turbo4" not in best.spec.type_k


def test_nothing_fits_into_too_small_a_budget() -> None:
    found = errors((1, 1, 1), (1, 1, 1))
    assert best_uniform(SHAPES, found, Budget(2.0, (N,))) is None
    assert best_by_layer(SHAPES, found, Budget(2.0, (N,))) is None


def test_types_of_layers_are_written_as_the_command_line_takes_them() -> None:
    for types in (["turbo3"], ["q8_0", "q8_0", "turbo3", "turbo3", "turbo3", "q8_0"], ["a", "b", "b", "c", "a", "a"]):
        text = layered(types)
        if "a" not in types:
            assert [t.type_k for t in CacheSpec(text).resolve(len(types))] == types
    assert layered(["q8_0", "q8_0", "turbo3", "turbo3", "turbo3", "q8_0"]) == "q8_0,2-4:turbo3"
    assert layered(["a", "b", "b", "c", "a", "a"]) == "a,1-2:b,3:c"


WINDOWED = [LayerShape(1, 256, 256, None if i % 6 == 5 else 512) for i in range(18)]
"""As Gemma 3 270m."""
OF_ALL = [{side: dict(BY_TYPE) for side in "kv"} for _ in WINDOWED]


@pytest.mark.parametrize("search", [best_uniform, best_by_layer])
@pytest.mark.parametrize("contexts", [(1024, 8192), (8192, 1024), (256, 32768), (512,), (1024, 1024)])
@pytest.mark.parametrize("bits", [4.4, 3.4])
def test_the_budget_holds_at_every_context_that_it_names(search, contexts: tuple[int, ...], bits: float) -> None:
    best = search(WINDOWED, OF_ALL, Budget(bits, contexts))
    assert best is not None
    stored = tuple(bits_per_value(WINDOWED, best.spec.resolve(18), n).mean for n in contexts)
    assert best.bits == stored and max(stored) <= bits


def test_bytes_are_weighed_at_the_context_of_the_errors() -> None:
    """At 8,192 tokens layers with a window are nearly free, and get all that they ask for; at 1,024 they are not."""
    at_length, when_short = (best_by_layer(WINDOWED, OF_ALL, Budget(4.4, (n,))) for n in (8192, 1024))
    assert at_length is not None and when_short is not None
    assert bits_per_value(WINDOWED, at_length.spec.resolve(18), 1024).mean > 4.7
    assert bits_per_value(WINDOWED, when_short.spec.resolve(18), 1024).mean <= 4.4


def test_far_keys_get_few_bits_only_on_evidence_from_four_windows_of_text() -> None:
    assert unproven_layers(WINDOWED, 256) == unproven_layers(WINDOWED, 2047) == (5, 11, 17)
    assert unproven_layers(WINDOWED, 2048) == unproven_layers(SHAPES, 256) == ()
    assert unproven_layers([LayerShape(1, 64, 64, 100)] * 3, 256) == ()
    kept = without_few_bits(OF_ALL, (5, 11, 17))
    assert set(kept[5]["k"]) == set(kept[5]["v"]) == {"turbo3", "turbo4", "q8_0"} and set(kept[4]["k"]) == set(TYPES)
    for search in (best_uniform, best_by_layer):
        for bits in (3.3, 4.4):
            best = search(WINDOWED, kept, Budget(bits, (256, 32768)))
            if best is not None:
                far = [best.spec.resolve(18)[i] for i in (5, 11, 17)]
                assert not any("turbo2" in (types.type_k, types.type_v) for types in far)
    assert best_by_layer(WINDOWED, kept, Budget(4.4, (256, 32768))) is not None

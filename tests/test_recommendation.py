"""Bits are spent where they save the most error, and never more of them than the budget has."""

from __future__ import annotations

import itertools

import pytest

from tqgguf.formats.blocks.bits_per_value import bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.runtime.evaluation.recommendation import best_by_layer, best_uniform, layered

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
    best = best_uniform(SHAPES, found, budget, N)
    assert best is not None and best.spec == expected
    assert best.error == pytest.approx(error_of(expected, found)) and best.bits == pytest.approx(bits_of(expected))


@pytest.mark.parametrize("budget", [2.4, 2.8, 3.0, 3.4, 3.9, 4.4, 5.5, 6.5, 9.0])
def test_types_by_layer_stay_in_the_budget_and_are_close_to_the_best_of_all(budget: float) -> None:
    found = errors((9, 1, 0.2), (1, 2, 0.1))
    best = best_by_layer(SHAPES, found, budget, N)
    assert best is not None and best.bits <= budget
    every = (CacheSpec(layered(types[:3]), layered(types[3:])) for types in itertools.product(TYPES, repeat=6))
    least = min(error_of(spec, found) for spec in every if bits_of(spec) <= budget)
    assert least <= best.error <= 1.5 * least


def test_layers_that_suffer_get_the_larger_types() -> None:
    best = best_by_layer(SHAPES, errors((50, 1, 1), (1, 1, 1)), 3.6, N)
    assert best is not None
    first, *others = (t.type_k for t in best.spec.resolve(3))
    assert all(TYPES.index(first) > TYPES.index(other) for other in others)


def test_a_type_that_costs_more_and_saves_nothing_is_never_taken() -> None:
    found = errors((1, 1, 1), (1, 1, 1))
    for layer in found:
        layer["k"]["turbo4"] = 1.0
    best = best_by_layer(SHAPES, found, 4.4, N)
    assert best is not None and "turbo4" not in best.spec.type_k


def test_nothing_fits_into_too_small_a_budget() -> None:
    found = errors((1, 1, 1), (1, 1, 1))
    assert best_uniform(SHAPES, found, 2.0, N) is None
    assert best_by_layer(SHAPES, found, 2.0, N) is None


def test_types_of_layers_are_written_as_the_command_line_takes_them() -> None:
    for types in (["turbo3"], ["q8_0", "q8_0", "turbo3", "turbo3", "turbo3", "q8_0"], ["a", "b", "b", "c", "a", "a"]):
        text = layered(types)
        if "a" not in types:
            assert [t.type_k for t in CacheSpec(text).resolve(len(types))] == types
    assert layered(["q8_0", "q8_0", "turbo3", "turbo3", "turbo3", "q8_0"]) == "q8_0,2-4:turbo3"
    assert layered(["a", "b", "b", "c", "a", "a"]) == "a,1-2:b,3:c"

"""From what each layer suffers to the cache types that a budget of bits is best spent on. Measures nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from tqgguf.formats.blocks.bits_per_value import bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape, side_bytes

Errors = Mapping[Side, Mapping[str, float]]
"""Of one layer: by side and cache type."""


@dataclass(frozen=True)
class Recommendation:
    """A request, its bits per value at `n_tokens`, and the sum of the layers' errors that it is expected to have."""

    spec: CacheSpec
    bits: float
    error: float


def best_uniform(
    layers: Sequence[LayerShape], errors: Sequence[Errors], budget: float, n_tokens: int
) -> Recommendation | None:
    """The pair of types, the same in every layer, of the smallest error within the budget; None if there is none."""
    pairs = [
        _recommend(CacheSpec(type_k, type_v), layers, errors, n_tokens)
        for type_k, type_v in product(errors[0]["k"], errors[0]["v"])
    ]
    return min((r for r in pairs if r.bits <= budget), key=lambda r: r.error, default=None)


def best_by_layer(
    layers: Sequence[LayerShape], errors: Sequence[Errors], budget: float, n_tokens: int
) -> Recommendation | None:
    """Types that may differ by layer. None where even the smallest types take more than the budget.

    Every side of every layer starts with its smallest type; the step up that saves the most error for its bytes is
    taken as long as one fits.
    """
    ladders = {
        (i, side): _ladder(layer, side, found[side], n_tokens)
        for i, (layer, found) in enumerate(zip(layers, errors, strict=True))
        for side in SIDES
    }
    at = dict.fromkeys(ladders, 0)
    while True:
        best = _recommend(_spec(ladders, at, len(layers)), layers, errors, n_tokens)
        if best.bits > budget:
            return None
        steps = [(_gain(ladders[key], rung), key) for key, rung in at.items() if rung + 1 < len(ladders[key])]
        for _, key in sorted(steps, key=lambda step: -step[0]):
            larger = at | {key: at[key] + 1}
            if _recommend(_spec(ladders, larger, len(layers)), layers, errors, n_tokens).bits <= budget:
                at = larger
                break
        else:
            return best


@dataclass(frozen=True)
class _Rung:
    cache_type: str
    n_bytes: int
    error: float


def _ladder(layer: LayerShape, side: Side, errors: Mapping[str, float], n_tokens: int) -> list[_Rung]:
    """The types of a side by size, without those that a line between a smaller and a larger one undercuts."""
    rungs: list[_Rung] = []
    for rung in sorted((_rung(layer, side, name, error, n_tokens) for name, error in errors.items()), key=_by_size):
        if rungs and rung.error >= rungs[-1].error:
            continue
        while len(rungs) > 1 and _slope(rungs[-2], rungs[-1]) <= _slope(rungs[-1], rung):
            rungs.pop()
        rungs.append(rung)
    return rungs


def _rung(layer: LayerShape, side: Side, name: str, error: float, n_tokens: int) -> _Rung:
    (types,) = CacheSpec(name, name).resolve(1)
    return _Rung(name, side_bytes(layer, types, side, n_tokens).total, error)


def _by_size(rung: _Rung) -> tuple[int, float]:
    return rung.n_bytes, rung.error


def _slope(a: _Rung, b: _Rung) -> float:
    """Error saved for each byte of the step from a to b."""
    return (a.error - b.error) / max(b.n_bytes - a.n_bytes, 1)


def _gain(ladder: Sequence[_Rung], at: int) -> float:
    return _slope(ladder[at], ladder[at + 1])


def _spec(ladders: Mapping[tuple[int, Side], Sequence[_Rung]], at: Mapping[tuple[int, Side], int], n: int) -> CacheSpec:
    k, v = ([ladders[i, side][at[i, side]].cache_type for i in range(n)] for side in SIDES)
    return CacheSpec(layered(k), layered(v))


def layered(types: Sequence[str]) -> str:
    """One type for each layer as `CacheSpec` takes them: the commonest first, then the layers that differ."""
    ((first, _),) = Counter(types).most_common(1)
    rules, start = [first], 0
    for name, run in groupby(types):
        end = start + len(list(run)) - 1
        if name != first:
            rules.append(f"{start}:{name}" if start == end else f"{start}-{end}:{name}")
        start = end + 1
    return ",".join(rules)


def _recommend(
    spec: CacheSpec, layers: Sequence[LayerShape], errors: Sequence[Errors], n_tokens: int
) -> Recommendation:
    types: tuple[LayerTypes, ...] = spec.resolve(len(layers))
    error = sum(found[side][kinds.of(side)] for found, kinds in zip(errors, types, strict=True) for side in SIDES)
    return Recommendation(spec, bits_per_value(layers, types, n_tokens).mean, error)

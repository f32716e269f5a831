"""From what each layer suffers to the cache types that a budget of bits is best spent on. Measures nothing itself.

Errors belong to the context that they were measured at, so bytes are weighed against them at that context. A budget
holds at every context that it names: what pays at one length (many bits for layers that see a window, which hold
little of a long cache) may cost too much at another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from tqgguf.formats.blocks.bits_per_value import bits_per_value
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape, side_bytes

Errors = Mapping[Side, Mapping[str, float]]
"""Of one layer: by side and cache type."""


FEW_BITS = 2
"""Bits of code per value, and fewer, which need evidence from far behind a window; see `unproven_layers`."""

WINDOWS_OF_EVIDENCE = 4
"""Windows that a text must be long for it to say what few bits do to the layers without one: more than half of the keys
that these then read are keys that no other layer sees."""


@dataclass(frozen=True)
class Budget:
    """Bits per value of K and V together that a cache may take at each of `contexts`, in tokens. The first of them is
    the one that errors were measured at.
    """

    bits: float
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class Recommendation:
    """A request, its bits per value at each context of the budget, and the sum of the layers' errors that it is
    expected to have.
    """

    spec: CacheSpec
    bits: tuple[float, ...]
    error: float

    def keeps(self, budget: Budget) -> bool:
        return all(bits <= budget.bits for bits in self.bits)


def widest_window(layers: Sequence[LayerShape]) -> int:
    """Keys that a query sees in the layer of the widest window; 0 where there is none."""
    return max((layer.window or 0 for layer in layers), default=0)


def unproven_layers(layers: Sequence[LayerShape], n_measured: int) -> tuple[int, ...]:
    """The layers that see everything in a model where others see a window, if the measured text is shorter than
    WINDOWS_OF_EVIDENCE of these: what few bits do to their far keys has then hardly been seen.
    """
    if n_measured >= WINDOWS_OF_EVIDENCE * widest_window(layers):
        return ()
    return tuple(i for i, layer in enumerate(layers) if layer.window is None)


def without_few_bits(errors: Sequence[Errors], layers: Collection[int]) -> list[Errors]:
    """The errors of every layer, but for `layers` those of types of more than FEW_BITS alone."""

    def kept(found: Errors) -> Errors:
        return {side: {n: e for n, e in of.items() if BLOCK_TYPES[n].bits > FEW_BITS} for side, of in found.items()}

    return [kept(found) if i in layers else found for i, found in enumerate(errors)]


def best_uniform(layers: Sequence[LayerShape], errors: Sequence[Errors], budget: Budget) -> Recommendation | None:
    """The pair of types, the same in every layer, of the smallest error within the budget; None if there is none."""
    sides = [[name for name in errors[0][side] if all(name in e[side] for e in errors)] for side in SIDES]
    pairs = [
        _recommend(CacheSpec(type_k, type_v), layers, errors, budget) for type_k, type_v in product(sides[0], sides[1])
    ]
    return min((r for r in pairs if r.keeps(budget)), key=lambda r: r.error, default=None)


def best_by_layer(layers: Sequence[LayerShape], errors: Sequence[Errors], budget: Budget) -> Recommendation | None:
    """Types that may differ by layer. None where even the smallest types take more than the budget.

    Every side of every layer starts with its smallest type; the step up that saves the most error for its bytes is
    taken as long as one fits.
    """
    ladders = {
        (i, side): _ladder(layer, side, found[side], budget.contexts[0])
        for i, (layer, found) in enumerate(zip(layers, errors, strict=True))
        for side in SIDES
    }
    at = dict.fromkeys(ladders, 0)
    while True:
        best = _recommend(_spec(ladders, at, len(layers)), layers, errors, budget)
        if not best.keeps(budget):
            return None
        steps = [(_gain(ladders[key], rung), key) for key, rung in at.items() if rung + 1 < len(ladders[key])]
        for _, key in sorted(steps, key=lambda step: -step[0]):
            larger = at | {key: at[key] + 1}
            if _recommend(_spec(ladders, larger, len(layers)), layers, errors, budget).keeps(budget):
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
    spec: CacheSpec, layers: Sequence[LayerShape], errors: Sequence[Errors], budget: Budget
) -> Recommendation:
    types: tuple[LayerTypes, ...] = spec.resolve(len(layers))
    error = sum(found[side][kinds.of(side)] for found, kinds in zip(errors, types, strict=True) for side in SIDES)
    bits = tuple(bits_per_value(layers, types, n_tokens).mean for n_tokens in budget.contexts)
    return Recommendation(spec, bits, error)

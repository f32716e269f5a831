"""A model's examination: its layers one by one, proposals for a budget of bits, and these tried on other text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import CachePair
from tqgguf.measuring.evaluation.caches import CacheOptions, candidate, reference
from tqgguf.measuring.evaluation.compare import Evaluation, Plan, Result
from tqgguf.measuring.evaluation.recommendation import (
    Budget,
    Recommendation,
    best_by_layer,
    best_uniform,
    unproven_layers,
    widest_window,
    without_few_bits,
)
from tqgguf.measuring.evaluation.sensitivity import LayerSensitivity, measure_sensitivity
from tqgguf.runtime.kv.settings import check_cache_types
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.text.grid import DEFAULT_CHUNK

TYPES = ("turbo2", "turbo3", "turbo4", "q8_0")
"""What is proposed where the model's heads can have it all."""

OTHER_TYPES = ("q4_0", "q5_0", "q8_0")
"""What is proposed elsewhere."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Proposal:
    """Types within the budget, and what they were found to do: mean KLD from f16, every key from blocks."""

    recommendation: Recommendation
    result: Result


@dataclass(frozen=True)
class Examination:
    """budget: at the context that was measured and at the one that is asked for. unproven: layers that get no type of
    few bits, see `unproven_layers`. proposals: the least KLD first, all of them within the budget at both contexts and
    tried on the same tokens. Empty where nothing fits.
    """

    budget: Budget
    shapes: Sequence[LayerShape]
    layers: list[LayerSensitivity]
    unproven: tuple[int, ...]
    proposals: list[Proposal]

    @property
    def widest_window(self) -> int:
        """Keys; 0 where every layer sees everything."""
        return widest_window(self.shapes)

    @property
    def dangerous(self) -> list[LayerSensitivity]:
        return [layer for layer in self.layers if layer.is_dangerous]


def proposable_types(layers: Sequence[LayerShape]) -> Sequence[str]:
    """TYPES or OTHER_TYPES. RequestError where some layer's heads can have neither."""
    try:
        _check(layers, TYPES)
        return TYPES
    except RequestError:
        try:
            _check(layers, OTHER_TYPES)
        except RequestError as error:
            tried = f"neither {', '.join(TYPES)} nor {', '.join(OTHER_TYPES)}"
            raise RequestError(f"no types to propose: heads can have {tried}: {error}") from None
        return OTHER_TYPES


def examine(
    loaded: LoadedModel,
    tokens: Sequence[int],
    trial: Sequence[int],
    bits: float,
    n_ctx: int,
    progress: Progress | None = None,
) -> Examination:
    """Measure the layers on `tokens`, and try what that proposes on `trial`, both whole pages of a text.

    bits: per value, which proposals keep at len(tokens) and at n_ctx, whole pages too, the context that is asked for.
    progress: called with (tokens evaluated, tokens in all) of each of the two parts after the other.
    """
    shapes = loaded.config.layer_shapes()
    types = proposable_types(shapes)
    layers = measure_sensitivity(loaded, tokens, types, chunk=DEFAULT_CHUNK, progress=progress)
    if len(layers) != len(shapes):
        raise RequestError(f"expected keys and values in all {len(shapes)} layers, found them in {len(layers)}")
    budget = Budget(bits, (len(tokens), n_ctx))
    unproven = unproven_layers(shapes, len(tokens))
    errors = without_few_bits([layer.errors for layer in layers], unproven)
    found = [search(shapes, errors, budget) for search in (best_uniform, best_by_layer)]
    wanted = [recommendation for recommendation in found if recommendation is not None]
    tried = _tried(loaded, list({r.spec: r for r in wanted}.values()), trial, progress)
    return Examination(budget, shapes, layers, unproven, tried)


def _tried(
    loaded: LoadedModel, wanted: Sequence[Recommendation], trial: Sequence[int], progress: Progress | None
) -> list[Proposal]:
    if not wanted:
        return []
    shapes, n_ctx = loaded.config.layer_shapes(), len(trial)
    options = CacheOptions(tail=False)
    rows = [candidate(CachePair(r.spec.type_k, r.spec.type_v), shapes, n_ctx, options) for r in wanted]
    evaluation = Evaluation(loaded, [reference(shapes, n_ctx), *rows], Plan(np.array([trial], np.int64)))
    evaluation.run(progress)
    proposals = [Proposal(*pair) for pair in zip(wanted, evaluation.results()[1:], strict=True)]
    return sorted(proposals, key=lambda proposal: proposal.result.statistics.kld)


def _check(layers: Sequence[LayerShape], types: Sequence[str]) -> None:
    for name in types:
        check_cache_types(layers, CacheSpec(name, name))

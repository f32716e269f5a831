"""How much each layer's attention suffers from a cache type in its K or in its V, and whether its keys are dangerous.

One pass of the model over a text with an f16 cache. At every step each layer's new keys and values also go into caches
with one side in a block type and the other in f16, every key outside the exact prefix from blocks, and what attention
gives from them is compared with what it gives from f16. Errors are local: what they do to later layers is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout, centred_squares, counted_rows, page_mean
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.attention.steps import SequenceStep
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.kv.pages import PAGE, cuts
from tqgguf.runtime.kv.rope_layout import rope_layouts
from tqgguf.runtime.models.loaded_model import LoadedModel

REFERENCE = "f16"

CONSTANT_SHARE = 0.98
"""Share of the energy of a head's keys in their page's mean from which a layer counts as dangerous. A block's error is
a share of its whole energy: 0.9 % for plain turbo4, so that at .98 nearly half of what tells keys apart is lost."""

Progress = Callable[[int, int], None]
"""Called with (tokens evaluated, tokens in all)."""


@dataclass(frozen=True)
class LayerSensitivity:
    """What was measured of one layer.

    errors: by side and cache type, the squared error of attention's output over its squared norm. plain_errors: of K
    without balance and exact prefix, by type. constant_share: of the energy of K's worst head, the part that its pages'
    means hold. constant_norm: the root mean square norm of those means.
    """

    layer: int
    errors: dict[Side, dict[str, float]]
    plain_errors: dict[str, float]
    constant_share: float
    constant_norm: float

    @property
    def is_dangerous(self) -> bool:
        return self.constant_share >= CONSTANT_SHARE


def measure_sensitivity(
    loaded: LoadedModel,
    tokens: Sequence[int],
    types: Sequence[str],
    *,
    chunk: int,
    progress: Progress | None = None,
) -> list[LayerSensitivity]:
    """Of every layer that keeps keys and values, over the whole pages of `tokens`. All heads can have the `types`.

    RequestError: less than two pages of tokens, or a model that computes attention by itself.
    """
    n = len(tokens) // PAGE * PAGE
    if n < 2 * PAGE:
        raise RequestError(f"expected at least {2 * PAGE} tokens of text, found {len(tokens)}")
    usage = Usage()
    cache = make_prompt_cache(loaded.model, REFERENCE, REFERENCE, usage=usage)
    ropes = dict(enumerate(rope_layouts(loaded.model)))
    layers: dict[int, _Layer] = {}

    def observe(step: SequenceStep, q: mx.array, scale: float) -> None:
        layer = layers.get(step.layer)
        if layer is None:
            layer = layers[step.layer] = _Layer(step.layer, step.window, ropes.get(step.layer, NOT_ROTATED), types)
        layer.observe(step, q, scale)

    usage.observer = observe
    for start, stop in pairwise(cuts(0, n, chunk)):
        loaded.fill(mx.array([list(tokens[start:stop])], dtype=mx.int32), cache)
        mx.eval([layer.state for layer in cache])
        if progress is not None:
            progress(stop, n)
    if not layers or usage.by_fallback:
        raise RequestError("the model computes attention by itself: its layers cannot be measured one by one")
    return [layers[i].result() for i in sorted(layers)]


class _Layer:
    """One layer's caches and sums."""

    def __init__(self, layer: int, window: int | None, rope: RopeLayout, types: Sequence[str]) -> None:
        self.layer = layer

        make = partial(BlockKVCache, layer=layer, window=window, rope=rope, tail=False)
        self._caches: dict[tuple[Side | None, str], BlockKVCache] = {
            **{("k", name): make(name, REFERENCE) for name in types},
            **{("v", name): make(REFERENCE, name) for name in types},
            **{(None, name): make(name, REFERENCE, balance="off", n_prefix=0) for name in types},
        }
        self._squares = dict.fromkeys(self._caches, 0.0)
        self._norm = 0.0
        self._mean_energy: NDArray[np.float64] | float = 0.0
        self._energy: NDArray[np.float64] | float = 0.0
        self._pages = 0

    def observe(self, step: SequenceStep, q: mx.array, scale: float) -> None:
        """Take a step's new rows, its queries [1, n_heads, rows, head_dim] and their scale."""
        new = [view.rows[None, :, view.rows.shape[1] - step.n_rows :] for view in (step.k, step.v)]
        exact = _numbers(
            step.backend.attend(q, step.k, step.v, offset=step.offset, query=step.query(scale, None, None))
        )
        self._norm += float((exact**2).sum())
        for key, cache in self._caches.items():
            keys, _ = cache.update_and_fetch(*new)
            found = _numbers(keys.step.attend(q, scale, None, None))
            self._squares[key] += float(((found - exact) ** 2).sum())
        self._count_constants(np.asarray(new[0][0]))

    def _count_constants(self, rows: NDArray[np.float16]) -> None:
        for start in range(0, rows.shape[1] - PAGE + 1, PAGE):
            page = rows[:, start : start + PAGE]
            mean = page_mean(page)
            energy = (mean.astype(np.float64) ** 2).sum(axis=1)
            rest = centred_squares(page, mean).sum(axis=1) / counted_rows(page).sum(axis=1)
            self._mean_energy = self._mean_energy + energy
            self._energy = self._energy + energy + rest
            self._pages += 1

    def result(self) -> LayerSensitivity:
        """The shares of all steps together."""
        errors = {key: square / max(self._norm, 1e-300) for key, square in self._squares.items()}
        mean_energy, energy = np.asarray(self._mean_energy), np.asarray(self._energy)
        shares = mean_energy / np.maximum(energy, 1e-300)
        worst = int(shares.argmax())
        return LayerSensitivity(
            self.layer,
            {side: {name: e for (s, name), e in errors.items() if s == side} for side in SIDES},
            {name: e for (side, name), e in errors.items() if side is None},
            float(shares[worst]),
            float(np.sqrt(mean_energy[worst] / max(self._pages, 1))),
        )


def _numbers(x: mx.array) -> NDArray[np.float64]:
    return np.asarray(x.astype(mx.float32)).astype(np.float64)

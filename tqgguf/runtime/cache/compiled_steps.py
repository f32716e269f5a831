"""Decode steps of a whole model as one compiled function.

Within a page nothing changes from step to step but the token, the position and the tails. With tails of a fixed length
one graph serves all steps of a page, so that the host builds it once in 128 tokens instead of once a token. Pages that
fill, and whatever else a `BlockKVCache` does, are the caches' own affair: they take their tails back when asked.

Knows nothing of what a model is beyond a function of tokens and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.hook import CausalMask, LazyKV, Step, Usage
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kernels.launch import position_array
from tqgguf.runtime.kv.lent_tails import LentTails
from tqgguf.runtime.kv.rows import check_rows
from tqgguf.runtime.kv.side_view import PAGE, prefix_length
from tqgguf.runtime.kv.sides import BlockSide

Evaluate = Callable[[mx.array, list[Any]], mx.array]
"""Tokens int32 [1, 1] and a cache for each layer to whatever a step is wanted for, lazily."""


class CompiledSteps:
    """Steps of one token with `evaluate`, which must be the same function of its arguments at every call.

    refusal: why steps cannot be compiled, once that is known.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self.refusal: str | None = None
        self._is_checked = False
        self._page: _PageSteps | None = None

    def step(self, token: mx.array, caches: list[Any]) -> mx.array | None:
        """What `evaluate` returns for one more token, or None: it is to be asked itself, and nothing has changed.

        That is so for a step that fills a page, before page 0 is full, and where something about the model or its
        caches stands in the way (`refusal`, or a step that somebody watches).
        """
        if self.refusal is not None:
            return None
        page = self._page
        if page is None or not page.continues(caches):
            self._page = page = None  # first: it holds planes, which would be copied when they grow
            page = self._begin(caches)
            if page is None:
                return None
        if page.n_held + 1 >= PAGE:
            self._page = None
            return None
        try:
            out = page.step(token)
            if not self._is_checked and bool(mx.any(mx.isnan(out))):
                raise RequestError("the model reads keys or values in another way than by attention")
        except Exception as error:  # of whatever kind: models raise what they like when they cannot be traced
            if self._is_checked:
                raise
            self.refusal = f"{type(error).__name__}: {error}"
            return None
        self._is_checked = True
        page.take()
        self._page = page
        return out

    def _begin(self, caches: list[Any]) -> _PageSteps | None:
        self.refusal = next(filter(None, map(_obstacle, caches)), None)
        if self.refusal is not None:
            return None
        layers = [_Layer(cache) for cache in caches if not cache.is_watched and cache.offset >= PAGE]
        if len(layers) < len(caches) or len({cache.offset for cache in caches}) != 1:
            return None
        return _PageSteps(self._evaluate, layers)


def _obstacle(cache: Any) -> str | None:
    """Why a layer's steps can never be compiled."""
    if not isinstance(cache, BlockKVCache):
        return f"a layer has a {type(cache).__name__}"
    if not cache.settings.has_tail:
        return "a cache has no tail"
    sides = cache.sides
    if sides is not None and not cache.reading.compiles(sides[0].codec, sides[1].codec):
        return f"this backend does not compile steps of {sides[0].codec.cache_type}/{sides[1].codec.cache_type}"
    return None


class _Layer:
    """A layer's cache, page 0 of which is full, as steps of a page begin."""

    def __init__(self, cache: BlockKVCache) -> None:
        sides = cache.sides
        assert sides is not None
        k, v = sides
        assert isinstance(k, BlockSide) and isinstance(v, BlockSide)
        self.cache, self.sides = cache, (k, v)
        self.tails = LentTails(self.sides)
        k_rows, v_rows = self.tails.rows
        self.views = k.grown(k_rows), v.grown(v_rows)
        self.read_window: int | None = cache.window


class _PageSteps:
    """The steps of one page."""

    def __init__(self, evaluate: Evaluate, layers: list[_Layer]) -> None:
        first = layers[0].cache
        self._evaluate, self._layers = evaluate, layers
        self.page, self.n_held = divmod(first.offset, PAGE)
        self._compiled = first.reading.compiled(self._trace)
        self._made: Sequence[Any] = ()

    def continues(self, caches: list[Any]) -> bool:
        """Whether these are the caches that the last step left, untouched since."""
        return len(caches) == len(self._layers) and all(
            layer.cache is cache and cache.has_lent(layer.tails) and cache.offset == self.page * PAGE + self.n_held
            for layer, cache in zip(self._layers, caches, strict=True)
        )

    def step(self, token: mx.array) -> mx.array:
        offset = self.page * PAGE + self.n_held
        tails = [rows for layer in self._layers for rows in layer.tails.rows]
        out, self._made = self._compiled(token, position_array(self.n_held), position_array(offset), tails)
        return out

    def take(self) -> None:
        """Make the last step's tails the caches'."""
        offset = self.page * PAGE + self.n_held
        self.n_held += 1
        made = iter(self._made)
        for layer in self._layers:
            layer.tails.take((next(made), next(made)), self.n_held)
            layer.cache.lend(layer.tails)
            layer.cache.offset = offset + 1
            k, v = layer.views
            layer.cache.usage.reads.count_page(
                offset, offset + 1, k.codec, v.codec, layer.read_window, prefix_length(k, v)
            )
        self._made = ()

    def _trace(
        self, token: mx.array, n_held: mx.array, position: mx.array, tails: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        pairs = zip(tails[::2], tails[1::2], strict=True)
        traced = [
            _TracedCache(layer, pair, n_held, position, self.page)
            for layer, pair in zip(self._layers, pairs, strict=True)
        ]
        out = self._evaluate(token, traced)
        return out, [rows for cache in traced for rows in cache.answered()]


class _TracedCache:
    """What stands for a layer's cache while a step is traced."""

    def __init__(
        self, layer: _Layer, tails: tuple[mx.array, mx.array], n_held: mx.array, position: mx.array, page: int
    ) -> None:
        self._layer, self._tails, self._n_held, self._position, self._page = layer, tails, n_held, position, page
        self.offset = position[0]
        self._step: _TracedStep | None = None

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is None and not return_array:
            return None
        mask = CausalMask(mx.ones((1, 1), dtype=mx.bool_))
        mask.window = window_size
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[LazyKV, LazyKV]:
        if self._step is not None or keys.shape[2] != 1:
            raise RequestError("a layer takes other rows than one a step")
        cache = self._layer.cache
        check_rows(keys, values, self._layer.sides, cache.layer, cache.channel_scale)
        rows = cache.reading.join_in_page(self._tails, (keys, values), self._n_held)
        self._step = _TracedStep(self._layer, rows, self._position, self._page)
        fetched = []
        for new in (keys, values):
            lazy = LazyKV(mx.full(new.shape, mx.nan, dtype=new.dtype))  # so that it shows if anybody computes with it
            lazy.step = self._step
            fetched.append(lazy)
        return fetched[0], fetched[1]

    def answered(self) -> tuple[mx.array, mx.array]:
        """The new tails, once attention has read them."""
        if self._step is None or not self._step.is_answered:
            raise RequestError(f"the model computes attention of layer {self._layer.cache.layer} by itself")
        return self._step.rows


class _TracedStep(Step):
    """The dispatcher's step, for tails of fixed length."""

    def __init__(self, layer: _Layer, rows: tuple[mx.array, mx.array], position: mx.array, page: int) -> None:
        cache, (k, v) = layer.cache, layer.views
        usage = Usage(strict=True)
        super().__init__(k, v, cache.layer, page * PAGE, 1, cache.window, cache.reading, usage)
        self._layer, self.rows, self.position, self.page = layer, rows, position, page
        self.is_answered = False

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        self.check_queries(q, sinks)
        self.is_answered = True
        k, v = (view.with_rows(rows) for view, rows in zip((self.k, self.v), self.rows, strict=True))
        window = self._layer.read_window = window if self.window is None else self.window
        return self.reading.answer_in_page(
            q, k, v, page=self.page, position=self.position, scale=scale, window=window, sinks=sinks
        )

"""Decode steps of a whole model as one compiled function.

From step to step nothing changes but the token, the position and the tails, and from page to page the planes. With
tails of a fixed length, planes with room to grow and the position on the device, one graph serves many pages, so that
the host does not build it for every token. Pages that fill, and whatever else a `BlockKVCache` does, are the caches'
own affair: they take their tails back when asked.

Knows nothing of what a model is beyond a function of tokens and caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from tqgguf.formats.errors import RequestError, words_of
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.hook import CausalMask, LazyKV
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.attention.steps import Step
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kernels.launch import position_array
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Pair, SideForm

Evaluate = Callable[[mx.array, list[Any]], mx.array]
"""Tokens int32 [1, 1] and a cache for each layer to whatever a step is wanted for, lazily."""


class CompiledSteps:
    """Steps of one token with `evaluate`, which must be the same function of its arguments at every call.

    n_steps: how many there were. refusal: why the last step could not be compiled, where it is the model's or its
    caches' doing.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self.n_steps = 0
        self.refusal: str | None = None
        self._is_checked = self._is_given_up = False
        self._graph: _Graph | None = None
        self._page: _PageSteps | None = None

    def step(self, token: mx.array, caches: list[Any]) -> mx.array | None:
        """What `evaluate` returns for one more token, or None: it is to be asked itself, and nothing has changed.

        That is so for a step that fills a page, before page 0 is full, and where something about the model or its
        caches stands in the way (`refusal`, or a step that somebody watches).
        """
        if self._is_given_up:
            return None
        page = self._page
        if page is None or not page.continues(caches):
            page = self._page = self._begin(caches)
        if page is None or page.n_held + 1 >= PAGE:
            self._page = None
            return None
        try:
            out = page.step(token)
            if not self._is_checked:
                caches[0].backend.wait()
            if not self._is_checked and bool(mx.any(mx.isnan(out))):
                raise RequestError("the model reads keys or values in another way than by attention")
        except Exception as error:  # of whatever kind: models raise what they like when they cannot be traced
            if self._is_checked:
                raise
            self.refusal, self._page, self._graph = f"{type(error).__name__}: {words_of(error)}", None, None
            self._is_given_up = True
            return None
        self._is_checked = True
        self.n_steps += 1
        page.take()
        return out

    def _begin(self, caches: list[Any]) -> _PageSteps | None:
        self.refusal = next(filter(None, map(_obstacle, caches)), None)
        if self.refusal is not None:
            return None
        layers = [_Layer(cache) for cache in caches if not cache.is_watched and cache.offset >= PAGE]
        if len(layers) < len(caches) or len({cache.offset for cache in caches}) != 1:
            return None
        if self._graph is None or not self._graph.fits(layers):
            self._graph = _Graph(self._evaluate, layers)
        return _PageSteps(self._graph, layers, caches[0].offset)


def _obstacle(cache: Any) -> str | None:
    """Why a layer's steps can never be compiled."""
    if not isinstance(cache, BlockKVCache):
        return f"a layer has a {type(cache).__name__}"
    if not cache.settings.has_tail:
        return "a cache has no tail"
    sides = cache.sides
    if sides is not None and not cache.backend.compiles(sides[0].codec, sides[1].codec):
        return f"this backend does not compile steps of {sides[0].codec.cache_type}/{sides[1].codec.cache_type}"
    return None


@dataclass(frozen=True)
class _Form:
    """What a graph has of a layer's cache in itself; the rest are arrays that it is called with."""

    backend: Backend
    layer: int
    window: int | None
    n_kv_heads: int
    sides: tuple[SideForm, SideForm]

    def pages(self, end_page: int, arrays: list[mx.array]) -> Pages:
        left = iter(arrays)
        k, v = (side.pages(end_page, left) for side in self.sides)
        return Pages(k, v)


class _Layer:
    """A layer's cache as a page of steps begins; page 0 is full. Keeps nothing of it alive."""

    def __init__(self, cache: BlockKVCache) -> None:
        pages = cache.pages
        self._cache, self._pages = weakref.ref(cache), weakref.ref(pages)
        sides = pages.k.form, pages.v.form
        self.form = _Form(cache.backend, cache.layer, cache.window, cache.tails[0].shape[1], sides)

    def is_of(self, cache: BlockKVCache, offset: int) -> bool:
        """Whether the cache is as the last step left it."""
        pages = self._pages()
        if self._cache() is not cache or cache.offset != offset or pages is None:
            return False
        return cache.has_pages(pages) and not cache.is_watched

    @property
    def cache(self) -> BlockKVCache:
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def pages(self) -> Pages:
        pages = self._pages()
        assert pages is not None
        return pages

    def n_shares(self, seen: _Seen) -> int:
        return self.form.backend.n_shares(self.pages, self.form.n_kv_heads, seen.group_size, seen.window)

    def take(self, tails: Pair, window: int | None) -> None:
        """Make the tails of a step the cache's."""
        cache, (k, v) = self.cache, self.form.sides
        offset, n_prefix = cache.offset, max(k.n_prefix, v.n_prefix)
        cache.take(tails)
        cache.usage.reads.count_page(offset, offset + 1, k.codec, v.codec, window, n_prefix)


@dataclass
class _Seen:
    """What a layer's attention was asked for when the graph was traced, with pages before end_page, and the shares into
    which it split them."""

    end_page: int
    window: int | None
    group_size: int = 0
    n_shares: int = 0


class _Graph:
    """A step of all layers, traced when it is called with arrays of other shapes than before."""

    def __init__(self, evaluate: Evaluate, layers: list[_Layer]) -> None:
        self._forms = [layer.form for layer in layers]
        self.seen = [_Seen(layer.pages.most_pages, layer.form.window) for layer in layers]
        # no method, which would keep the graph alive in a circle
        self.call = layers[0].form.backend.compiled(partial(_traced_step, evaluate, self._forms, self.seen))

    def fits(self, layers: list[_Layer]) -> bool:
        """Whether the graph is right for these layers as they now are."""
        return len(layers) == len(self._forms) and all(
            layer.form == form and layer.n_shares(seen) == seen.n_shares
            for layer, form, seen in zip(layers, self._forms, self.seen, strict=True)
        )


def _traced_step(
    evaluate: Evaluate,
    forms: list[_Form],
    seen_by_layer: list[_Seen],
    token: mx.array,
    position: mx.array,
    tails: list[mx.array],
    arrays: list[list[mx.array]],
) -> tuple[mx.array, list[mx.array]]:
    """What `evaluate` returns, and all tails with the token's rows."""
    pairs, offset = zip(tails[::2], tails[1::2], strict=True), position[:1].squeeze()
    traced = [
        _TracedCache(form, seen, pair, of_layer, (position, offset))
        for form, seen, pair, of_layer in zip(forms, seen_by_layer, pairs, arrays, strict=True)
    ]
    out = evaluate(token, traced)
    return out, [rows for cache in traced for rows in cache.answered()]


class _PageSteps:
    """The steps of one page."""

    def __init__(self, graph: _Graph, layers: list[_Layer], offset: int) -> None:
        self._graph, self._layers = graph, layers
        self.page, self.n_held = divmod(offset, PAGE)
        self._made: Sequence[mx.array] = ()

    def continues(self, caches: list[Any]) -> bool:
        """Whether these are the caches that the last step left, untouched since."""
        offset = self.page * PAGE + self.n_held
        return len(caches) == len(self._layers) and all(
            layer.is_of(cache, offset) for layer, cache in zip(self._layers, caches, strict=True)
        )

    def step(self, token: mx.array) -> mx.array:
        position = position_array(self.page * PAGE + self.n_held)
        tails = [tail for layer in self._layers for tail in layer.cache.tails]
        arrays = [[*layer.pages.k.arrays, *layer.pages.v.arrays] for layer in self._layers]
        out, self._made = self._graph.call(token, position, tails, arrays)
        return out

    def take(self) -> None:
        """Make the last step's tails the caches'."""
        self.n_held += 1
        made = iter(self._made)
        for layer, seen in zip(self._layers, self._graph.seen, strict=True):
            layer.take((next(made), next(made)), seen.window)
        self._made = ()


class _TracedCache:
    """What stands for a layer's cache while a step is traced. at: its position, and that without axes."""

    def __init__(
        self, form: _Form, seen: _Seen, tails: Pair, arrays: list[mx.array], at: tuple[mx.array, mx.array]
    ) -> None:
        self._form, self._seen, self._tails = form, seen, tails
        self._pages = form.pages(seen.end_page, arrays)
        self._position, self.offset = at
        self._step: _TracedStep | None = None

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is None and not return_array:
            return None
        mask = CausalMask(mx.ones((1, 1), dtype=mx.bool_))
        mask.window = window_size
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[LazyKV, LazyKV]:
        form = self._form
        if self._step is not None:
            raise RequestError("a layer takes rows twice a step")
        for rows, side in zip((keys, values), form.sides, strict=True):
            expected = (1, form.n_kv_heads, 1, side.codec.head_dim)
            if rows.shape != expected:
                raise RequestError(f"layer {form.layer}: expected rows {expected}, found {rows.shape}")
        growth = Growth(self._tails, (keys, values), (), (1,), self._position)
        self._step = _TracedStep(form, self._seen, self._pages, growth)
        # so that it shows if anybody computes with them
        k, v = (mx.full(new.shape, mx.nan, dtype=new.dtype) for new in (keys, values))
        return LazyKV.of(k, self._step), LazyKV.of(v, self._step)

    def answered(self) -> Pair:
        """The new tails, once attention has read them."""
        if self._step is None or self._step.growth.joined is None:
            raise RequestError(f"the model computes attention of layer {self._form.layer} by itself")
        return self._step.growth.joined


class _TracedStep(Step):
    """A step with a position on the device."""

    def __init__(self, form: _Form, seen: _Seen, pages: Pages, growth: Growth) -> None:
        super().__init__(form.layer, 1, form.window, form.backend, Usage(strict=True))
        self._form, self._seen, self._pages, self.growth = form, seen, pages, growth

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        n_kv_heads, seen = self._form.n_kv_heads, self._seen
        self.check_queries(q, sinks, 1, n_kv_heads, self._form.sides[0].codec.head_dim)
        query = self.query(scale, window, sinks)
        seen.window, seen.group_size = query.window, q.shape[1] // n_kv_heads
        seen.n_shares = self.backend.n_shares(self._pages, n_kv_heads, seen.group_size, query.window)
        out, self.growth.joined = self.backend.append_and_attend(q, self._pages, self.growth, query)
        return out

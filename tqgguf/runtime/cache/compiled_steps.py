"""Decode steps of a whole model as one compiled function.

From step to step nothing changes but the token, the position and the tails, and from page to page the planes. With
tails of a fixed length, planes with room to grow and the position on the device, one graph serves many pages, so that
the host does not build it for every token. Pages that fill, and whatever else a `BlockKVCache` does, are the caches'
own affair: they take their tails back when asked.

Knows nothing of what a model is beyond a function of tokens and caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError, words_of
from tqgguf.runtime.attention.hook import CausalMask, LazyKV, Step, Usage
from tqgguf.runtime.attention.readings import Reading
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kernels.launch import position_array
from tqgguf.runtime.kv.lent_tails import LentTails
from tqgguf.runtime.kv.side_view import PAGE, SideView
from tqgguf.runtime.kv.sides import BlockSide

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
    if sides is not None and not cache.reading.compiles(sides[0].codec, sides[1].codec):
        return f"this backend does not compile steps of {sides[0].codec.cache_type}/{sides[1].codec.cache_type}"
    return None


@dataclass(frozen=True)
class _SideForm:
    """What a graph has of a side in itself; the rest are arrays that it is called with."""

    codec: Codec
    first_page: int
    tiled: bool
    centred: bool
    n_prefix: int
    scaled: bool

    @classmethod
    def of(cls, side: BlockSide) -> _SideForm:
        n_prefix = 0 if side.prefix is None else side.prefix.shape[1]
        scaled = side.channel_scale is not None
        return cls(side.codec, side.first_page, side.tiled, side.means is not None, n_prefix, scaled)

    def view(self, tail: mx.array, arrays: Iterator[mx.array]) -> SideView:
        """By the next of the arrays that `_arrays_of` gave."""
        codes, scales = next(arrays), next(arrays)
        prefix = next(arrays) if self.n_prefix else None
        means = next(arrays) if self.centred else None
        scale = next(arrays) if self.scaled else None
        return SideView(self.codec, tail, 0, codes, scales, self.first_page, prefix, means, scale, self.tiled)


def _arrays_of(side: BlockSide) -> list[mx.array]:
    means = None if side.means is None else side.means.array
    given = (side.codes.array, side.scales.array, side.prefix, means, side.channel_scale)
    return [array for array in given if array is not None]


@dataclass(frozen=True)
class _Form:
    """What a graph has of a layer's cache in itself."""

    reading: Reading
    layer: int
    window: int | None
    n_kv_heads: int
    sides: tuple[_SideForm, _SideForm]

    @property
    def n_prefix(self) -> int:
        return max(side.n_prefix for side in self.sides)

    def n_shares(self, group_size: int, n_pages: int) -> int:
        k, v = (side.codec for side in self.sides)
        return self.reading.n_shares(k, v, self.n_kv_heads, group_size, n_pages)


class _Layer:
    """A layer's cache as a page of steps begins; page 0 is full."""

    def __init__(self, cache: BlockKVCache) -> None:
        sides = cache.sides
        assert sides is not None
        k, v = sides
        assert isinstance(k, BlockSide) and isinstance(v, BlockSide)
        forms = _SideForm.of(k), _SideForm.of(v)
        self._cache = weakref.ref(cache)
        self.form = _Form(cache.reading, cache.layer, cache.window, k.n_heads or 0, forms)
        page = cache.offset // PAGE
        self.n_pages = page - max(k.first_page, v.first_page, cache.first_needed(page * PAGE))
        self._made: LentTails | None = LentTails((k, v), [*_arrays_of(k), *_arrays_of(v)])
        self._tails = weakref.ref(self._made)

    def is_of(self, cache: BlockKVCache, offset: int) -> bool:
        """Whether the cache is as the last step left it."""
        held, tails = self._cache() is cache and cache.offset == offset, self._tails()
        return held and tails is not None and cache.has_lent(tails) and not cache.is_watched

    @property
    def tails(self) -> LentTails:
        tails = self._tails()
        assert tails is not None
        return tails

    def take(self, rows: tuple[mx.array, mx.array], offset: int, window: int | None) -> None:
        """Make the rows of a step at `offset` the cache's, and its tails its own: nothing is kept alive from here."""
        cache, tails, (k, v) = self._cache(), self.tails, self.form.sides
        assert cache is not None
        tails.take(rows, offset % PAGE + 1)
        cache.lend(tails)
        cache.offset, self._made = offset + 1, None
        cache.usage.reads.count_page(offset, offset + 1, k.codec, v.codec, window, self.form.n_prefix)


@dataclass
class _Seen:
    """What a layer's attention was asked for when the graph was traced, over n_pages."""

    n_pages: int
    window: int | None
    group_size: int = 0


class _Graph:
    """A step of all layers, traced when it is called with arrays of other shapes than before."""

    def __init__(self, evaluate: Evaluate, layers: list[_Layer]) -> None:
        self._forms = [layer.form for layer in layers]
        self.seen = [_Seen(layer.n_pages, layer.form.window) for layer in layers]
        # no method, which would keep the graph alive in a circle
        self.call = layers[0].form.reading.compiled(partial(_traced_step, evaluate, self._forms, self.seen))

    def fits(self, layers: list[_Layer]) -> bool:
        """Whether the graph is right for these layers as they now are."""
        return len(layers) == len(self._forms) and all(
            layer.form == form
            and form.n_shares(seen.group_size, layer.n_pages) == form.n_shares(seen.group_size, seen.n_pages)
            for layer, form, seen in zip(layers, self._forms, self.seen, strict=True)
        )


def _traced_step(
    evaluate: Evaluate,
    forms: list[_Form],
    seen_by_layer: list[_Seen],
    token: mx.array,
    n_held: mx.array,
    position: mx.array,
    tails: list[mx.array],
    arrays: list[list[mx.array]],
) -> tuple[mx.array, list[mx.array]]:
    """What `evaluate` returns, and all tails with the token's rows."""
    pairs, offset = zip(tails[::2], tails[1::2], strict=True), position[:1].squeeze()
    traced = [
        _TracedCache(form, seen, pair, of_layer, (n_held, position, offset))
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
        positions = position_array(self.n_held), position_array(self.page * PAGE + self.n_held)
        lent = [layer.tails for layer in self._layers]
        tails = [rows for of_layer in lent for rows in of_layer.rows]
        out, self._made = self._graph.call(token, *positions, tails, [of_layer.arrays for of_layer in lent])
        return out

    def take(self) -> None:
        """Make the last step's tails the caches'."""
        offset = self.page * PAGE + self.n_held
        self.n_held += 1
        made = iter(self._made)
        for layer, seen in zip(self._layers, self._graph.seen, strict=True):
            layer.take((next(made), next(made)), offset, seen.window)
        self._made = ()


class _TracedCache:
    """What stands for a layer's cache while a step is traced. at: rows in the page, position, and that without axes."""

    def __init__(
        self,
        form: _Form,
        seen: _Seen,
        tails: tuple[mx.array, mx.array],
        arrays: list[mx.array],
        at: tuple[mx.array, mx.array, mx.array],
    ) -> None:
        self._form, self._seen, self._tails, self._arrays = form, seen, tails, arrays
        self._n_held, self._position, self.offset = at
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
        joined = form.reading.join_in_page(self._tails, (keys, values), self._n_held)
        left = iter(self._arrays)
        k, v = (side.view(tail, left) for side, tail in zip(form.sides, joined, strict=True))
        self._step = _TracedStep(form, self._seen, (k, v), self._position)
        fetched = []
        for new in (keys, values):
            lazy = LazyKV(mx.full(new.shape, mx.nan, dtype=new.dtype))  # so that it shows if anybody computes with it
            lazy.step = self._step
            fetched.append(lazy)
        return fetched[0], fetched[1]

    def answered(self) -> tuple[mx.array, mx.array]:
        """The new tails, once attention has read them."""
        if self._step is None or not self._step.is_answered:
            raise RequestError(f"the model computes attention of layer {self._form.layer} by itself")
        return self._step.k.rows, self._step.v.rows


class _TracedStep(Step):
    """The dispatcher's step, for tails of fixed length and a position on the device."""

    def __init__(self, form: _Form, seen: _Seen, views: tuple[SideView, SideView], position: mx.array) -> None:
        super().__init__(*views, form.layer, 0, 1, form.window, form.reading, Usage(strict=True))
        self._seen, self._position = seen, position
        self.is_answered = False

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        self.check_queries(q, sinks)
        self.is_answered = True
        window = window if self.window is None else self.window
        self._seen.window, self._seen.group_size = window, q.shape[1] // self.k.rows.shape[0]
        return self.reading.answer_in_page(
            q,
            self.k,
            self.v,
            n_pages=self._seen.n_pages,
            position=self._position,
            scale=scale,
            window=window,
            sinks=sinks,
        )

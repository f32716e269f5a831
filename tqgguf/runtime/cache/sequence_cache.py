"""One sequence's K and V of one layer: two sides, an offset, a window; rows come in, and steps to attend from come out.

What a query reads as blocks and what in f16 is decided in `attend`; how sides store it in `kv.sides`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.attention.steps import SequenceStep
from tqgguf.runtime.backends import default_backend
from tqgguf.runtime.kv.balance import ChannelScale, checked_scale
from tqgguf.runtime.kv.float_side import FloatSide
from tqgguf.runtime.kv.pages import PAGE, ROLLBACK_TOKENS, Growth, Pages, Pair, SideView, first_seen_page
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.rows import check_rows, kind_of_rows
from tqgguf.runtime.kv.settings import LayerSettings, layer_codec
from tqgguf.runtime.kv.sides import BlockSide


class SequenceCache(_BaseCache):
    """The K and V of one layer in block types.

    channel_scale: f32 [n_kv_heads, head_dim] from a calibration, for K balanced in full. rope: the channels that RoPE
    turns together. tail: if False, queries read their own page as blocks too, wherever the step that brings it fills
    it; every step but the last must then bring whole pages. Fidelity is judged so. keeps_pages: those that no query can
    see any more stay too, for a prompt that is taken up again earlier. rolls_back: the last `ROLLBACK_TOKENS` tokens
    can be trimmed exactly, also over the edge of a page and in layers with a window; for that the rows of the last
    whole page stay in f16, and a window's pages stay for that much longer. windows: of all layers that are trimmed
    together, so that each refuses what one of them has to refuse.
    """

    keeps_pages = False
    valid_from = 0
    """Position before which rows are no keys or values: what a foreign file left out of its first page."""
    fingerprint: Fingerprint | None = None
    """Of the model that it was made for, where that is known."""
    windows: tuple[int, ...] = ()
    shortest = 0
    """Tokens that `trim` must leave, for the sake of rows that a file did not hold."""
    _furthest = 0
    """The largest offset that something was trimmed from: windows have freed their pages accordingly."""

    def __init__(
        self,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        layer: int = 0,
        window: int | None = None,
        n_prefix: int | None = None,
        balance: str | None = None,
        rope: RopeLayout = NOT_ROTATED,
        channel_scale: mx.array | NDArray[np.float32] | None = None,
        tail: bool = True,
        usage: Usage | None = None,
        backend: Backend | None = None,
        keeps_pages: bool = False,
        rolls_back: bool = True,
        windows: Sequence[int] = (),
    ) -> None:
        self.keeps_pages, self.windows = keeps_pages, tuple(windows)
        (types,) = CacheSpec(type_k, type_v, n_prefix, balance).resolve(1)
        settings = LayerSettings(types, layer, window, rope, tail, rolls_back)
        settings.check()
        self._start(settings, channel_scale, usage or Usage(), backend or default_backend())

    @classmethod
    def of(
        cls,
        settings: LayerSettings,
        *,
        channel_scale: mx.array | NDArray[np.float32] | None = None,
        usage: Usage | None = None,
        backend: Backend | None = None,
        keeps_pages: bool = False,
        windows: Sequence[int] = (),
    ) -> Self:
        """A cache of a layer whose settings are known."""
        settings.check()
        made = cls.__new__(cls)
        made.keeps_pages, made.windows = keeps_pages, tuple(windows)
        made._start(settings, channel_scale, usage or Usage(), backend or default_backend())
        return made

    def _start(
        self,
        settings: LayerSettings,
        channel_scale: mx.array | NDArray[np.float32] | None,
        usage: Usage,
        backend: Backend,
    ) -> None:
        self.settings, self.layer, self.window = settings, settings.layer, settings.window
        self.usage, self.backend = usage, backend
        self.channel_scale = None if channel_scale is None else checked_scale(channel_scale, f"layer {self.layer}")
        self.offset = 0
        self._sides: tuple[BlockSide | FloatSide, BlockSide | FloatSide] | None = None
        self._step: SequenceStep | None = None
        """The last one, while nobody has joined its rows."""
        self._pages: Pages | None = None
        self._last_kind: Any = None

    @property
    def sides(self) -> tuple[BlockSide | FloatSide, BlockSide | FloatSide] | None:
        """K's and V's, with every row."""
        if self._step is not None:
            self._step.join()
            self._step = None
        return self._sides

    @sides.setter
    def sides(self, sides: tuple[BlockSide | FloatSide, BlockSide | FloatSide] | None) -> None:
        self._sides, self._step, self._pages = sides, None, None

    @property
    def pages(self) -> Pages:
        """The whole pages of both sides; the same object until there are others."""
        k, v = self._both_sides()
        if self._pages is None or self._pages.k is not k.pages or self._pages.v is not v.pages:
            self._pages = Pages(k.pages, v.pages)
        return self._pages

    def has_pages(self, pages: Pages) -> bool:
        """Whether these are still the whole pages, and every row has been joined."""
        if self._sides is None or self._step is not None:
            return False
        k, v = self._both_sides()
        return pages.k is k.pages and pages.v is v.pages

    @property
    def tails(self) -> Pair:
        """K's and V's, as `Growth` has them."""
        k, v = self._both_sides()
        return k.room(), v.room()

    def take(self, tails: Pair) -> None:
        """Take over tails that one more row has been joined to."""
        k, v = self._both_sides()
        n_tail = k.n_tail + 1
        for side, tail in zip((k, v), tails, strict=True):
            side.take(tail, n_tail)
        self.offset += 1

    def _both_sides(self) -> tuple[BlockSide | FloatSide, BlockSide | FloatSide]:
        assert self._sides is not None
        return self._sides

    @property
    def is_watched(self) -> bool:
        """Whether somebody is to see the queries of the next step, or has not seen those of the last one."""
        open_scale = self._sides is not None and _open_scale(self._sides[0]) is not None
        return open_scale or self._is_observed

    @property
    def _is_observed(self) -> bool:
        return self.usage.observer is not None or self.layer in self.usage.unattended

    def _make_side(self, side: Side, head_dim: int) -> BlockSide | FloatSide:
        types, rope = self.settings.types, self.settings.rope
        codec = layer_codec(types.of(side), head_dim, side, self.layer)
        if codec.is_float:
            return FloatSide(codec, self.backend)
        tiled = side == "v" and self.backend.tiles_values(codec)
        rolls_back = self.settings.rolls_back and self.settings.has_tail
        made = BlockSide(codec, types.n_prefix, self.backend, tiled=tiled, rolls_back=rolls_back)
        if side == "k" and types.balance != "off":
            made.means = Plane()
            if types.balance == "full":
                if rope.dims > head_dim:
                    raise RequestError(
                        f"layer {self.layer}, K: expected RoPE over at most the {head_dim} channels of a head, "
                        f"found {rope.dims}"
                    )
                made.scale = ChannelScale(rope, self.channel_scale)
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[hook.LazyKV, hook.LazyKV]:
        """Add keys [1, n_kv_heads, tokens, head_dim] and values; returns `LazyKV` arrays of everything held.

        Errors as `update`.
        """
        keeps = self.layer not in self.usage.unattended  # else the model reads what is fetched: it would take memory
        step = self.update(keys, values)
        if step.growth is None or step.pages is None:
            assert step.views is not None
            k, v = (
                self.backend.dequantise(view, step.offset, new.dtype)
                for view, new in zip(step.views, (keys, values), strict=True)
            )
        else:
            pages, growth, n_held = step.pages, step.growth, step.offset % PAGE
            first = max(pages.first_page, self.first_needed(step.offset))
            k, v = (
                self.backend.dequantise_growth(side, first, tail, n_held, new, keeps)
                for side, tail, new in zip((pages.k, pages.v), growth.tails, growth.new, strict=True)
            )
        return hook.LazyKV.of(k, step), hook.LazyKV.of(v, step)

    def update(self, keys: mx.array, values: mx.array) -> SequenceStep:
        """Add keys [1, n_kv_heads, tokens, head_dim] and values; returns the step that attention can read.

        RequestError: other shapes than before or than these, a head size that the type cannot hold, a fallback under
        strict; EncodeError: a full page holds NaN. A cache that raised is as it was.
        """
        self._check_rows(keys, values)
        sides = self.sides
        return self._grow(sides, keys, values) or self._append(sides, keys, values)

    def _grow(self, sides: Any, keys: mx.array, values: mx.array) -> SequenceStep | None:
        """The step of rows that only make the tails longer, as most steps of decoding do; None for others."""
        k, v = sides or (None, None)
        if not (isinstance(k, BlockSide) and isinstance(v, BlockSide) and self.settings.has_tail):
            return None
        n_rows = keys.shape[2]
        if not k.can_grow(n_rows):
            return None
        tails, is_ours = (k.room(), v.room()), k.is_ours and v.is_ours
        growth = Growth(tails, (keys, values), (self.offset,), (n_rows,), is_ours=is_ours)
        step = self._new_step(n_rows, scale=_open_scale(k), pages=self.pages, growth=growth, sides=(k, v))
        step.open()
        self._step = step
        self.offset += n_rows
        if self.window is not None and not self.keeps_pages and self._first_kept > k.first_page:
            self._release()  # not at every step: it joins the rows
        return step

    def _append(self, sides: Any, keys: mx.array, values: mx.array) -> SequenceStep:
        """The step of rows that fill pages, or that come to float types."""
        self._settle()  # pages that waited when the last step ended
        n_rows = keys.shape[2]
        if sides is None:
            sides = self._make_side("k", keys.shape[3]), self._make_side("v", values.shape[3])
        else:
            sides = sides[0].copy(), sides[1].copy()
        rows: Sequence[mx.array] = keys, values
        if isinstance(sides[0], BlockSide) and isinstance(sides[1], BlockSide):
            rows = self.backend.join_rows((sides[0].tail, sides[1].tail), (keys, values))
        else:
            rows = [
                self.backend.join_side(side.tail, new) if isinstance(side, BlockSide) else new
                for side, new in zip(sides, rows, strict=True)
            ]
        k, v = (self._append_side(*of) for of in zip("KV", sides, rows, strict=True))
        if self.window is not None:
            first = self.first_needed(self.offset)
            k, v = k.starting_at(first), v.starting_at(first)
        waiting = sides[0].waiting if isinstance(sides[0], BlockSide) else None
        step = self._new_step(n_rows, views=(k, v), scale=_open_scale(sides[0]), waiting=waiting)
        step.open()
        self.sides = sides
        self.offset += n_rows
        self._release()
        return step

    def _new_step(self, n_rows: int, **of_step: Any) -> SequenceStep:
        from_blocks = not self.settings.has_tail
        return SequenceStep(
            self.layer,
            n_rows,
            self.window,
            self.backend,
            self.usage,
            self.offset,
            own_from_blocks=from_blocks,
            **of_step,
        )

    def _settle(self) -> None:
        """Encode what waits for queries with those that there were: none will come any more."""
        sides = self.sides
        if sides is not None and isinstance(sides[0], BlockSide) and sides[0].waiting is not None:
            sides[0].waiting.view()
            self._pages = None
        self._release()

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        kind = kind_of_rows(keys, values)
        if kind is None or kind != self._last_kind:
            check_rows(keys, values, self.sides, self.layer, self.channel_scale)
            self._last_kind = kind
        if not self.settings.has_tail and self.offset % PAGE:
            raise RequestError(
                f"layer {self.layer}: a cache without a tail takes whole pages until its last step, "
                f"it holds {self.offset} tokens"
            )

    def _append_side(self, name: str, side: BlockSide | FloatSide, rows: mx.array) -> SideView:
        try:
            return side.append(rows)
        except EncodeError as error:
            raise EncodeError(f"layer {self.layer}, {name}: {error}") from None

    def first_needed(self, offset: int) -> int:
        """The first page that a query at `offset` or later can see."""
        return first_seen_page(offset, self.window)

    @property
    def _first_kept(self) -> int:
        """The first page that stays although a window has passed it."""
        return self.first_needed(self.offset - ROLLBACK_TOKENS if self.settings.rolls_back else self.offset)

    def _release(self) -> None:
        """Free what no later query can see; the step that was just made keeps its own views."""
        if self.sides is not None and not self.keeps_pages:
            for side in self.sides:
                side.release(self._first_kept)

    @property
    def start(self) -> int:
        """Position of the first token still held (0 without a window)."""
        return 0 if self.sides is None else max(side.first_page for side in self.sides) * PAGE

    @property
    def n_visible(self) -> int:
        """Tokens from the first page on that the next query can see."""
        return self.offset - self.first_needed(self.offset) * PAGE

    def copy(self) -> Self:
        """The same contents; neither shows in the other what happens to it. They count into the same usage."""
        self._settle()
        made = type(self).__new__(type(self))
        sides = self.sides
        made.__dict__.update(self.__dict__)
        made.sides = None if sides is None else (sides[0].copy(), sides[1].copy())
        return made

    @property
    def poolable_sides(self) -> tuple[BlockSide, BlockSide] | None:
        """The sides, where they could be in a pool of several sequences', and nobody watches who reads them."""
        self._settle()
        k, v = self.sides or (None, None)
        if not (isinstance(k, BlockSide) and isinstance(v, BlockSide) and self.settings.has_tail):
            return None
        return None if self._is_observed else (k, v)

    def hold(self, sides: tuple[BlockSide, BlockSide]) -> None:
        """Take over the sides of `offset` tokens, without the pages that no later query can see."""
        self.sides = sides
        self._release()

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.sides is None

    def is_trimmable(self) -> bool:
        """Whether `trim` can take back what is fed next: at least `ROLLBACK_TOKENS`, or, without `rolls_back`, anything
        until a window has freed its first page. mlx-lm asks without a number; `trim` refuses what is too much."""
        return self.settings.rolls_back or self.start == self.valid_from == 0

    def can_go_back(self, length: int) -> bool:
        """Whether `trim` can leave this many tokens: every page that the next query would see must still be there, in
        all layers that are trimmed together."""
        first = 0 if self.window is None else max(0, length - self.window + 1)
        here = self.first_needed(length) * PAGE >= self.start and (not length or first >= self.valid_from)
        if length == self.offset:
            return True
        if not here or length < self.shortest:
            return False
        kept_from = max(self._furthest, self.offset) - (ROLLBACK_TOKENS if self.settings.rolls_back else 0)
        return self.keeps_pages or all(
            first_seen_page(length, window) >= first_seen_page(kept_from, window) for window in self.windows
        )

    def trims_exactly(self, length: int) -> bool:
        """Whether `trim` to this many tokens cuts no block: within the last page, or the one before while its rows are
        kept, or all of it float types."""
        blocks = [side for side in self.sides or () if isinstance(side, BlockSide)]
        n_pages = self.offset // PAGE - length // PAGE
        return all(n_pages == 0 or (n_pages == 1 and side.last_page is not None) for side in blocks)

    def trim(self, n: int) -> int:
        """Remove the last n tokens (all, if there are fewer) and return how many were removed.

        Exact within the f16 tail, and for the last `ROLLBACK_TOKENS` under `rolls_back`: the cache is then as if they
        had never been fed. A deeper cut inside an encoded page turns its decoded values into the tail. ValueError: a
        negative n, or a window has freed pages that the remaining tokens would need; nothing is removed then.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"trim: expected a number of tokens >= 0, found {n}")
        self._settle()
        n = min(n, self.offset)
        length = self.offset - n
        if n and self.sides is not None:
            if not self.can_go_back(length):
                raise ValueError(self._cannot_go_back(length))
            if length == 0:
                self.sides = None
            else:
                for side in self.sides:
                    side.truncate(length)
                self._pages = None
        self._furthest, self.offset = max(self._furthest, self.offset), length
        return n

    def _cannot_go_back(self, length: int) -> str:
        windows = ", ".join(map(str, sorted({*self.windows, *([self.window] if self.window else [])})))
        return (
            f"trim: layer {self.layer} holds {self.offset} tokens, those from {self.start} on as rows, and cannot go "
            f"back to {length}: a window ({windows}) of the model has freed rows before that"
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V."""
        return 0 if self.sides is None else sum(side.nbytes for side in self.sides)

    @property
    def description(self) -> str:
        """Layer, types and window in words."""
        types, window = self.settings.types, self.window
        return f"layer {self.layer}, {types.type_k}/{types.type_v}{f', window {window}' if window else ''}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.description}, {self.offset} tokens, {self.nbytes:,} bytes)"


def _open_scale(side: BlockSide | FloatSide) -> ChannelScale | None:
    """A side's channel scale while queries are still to decide it."""
    scale = side.scale if isinstance(side, BlockSide) else None
    return scale if scale is not None and scale.is_open else None

"""Caches that imitate the schemes of `simulated_schemes`: K and V kept twice, in f16 and as they would decode.

A query reads each key in the form that the scheme gives it, by plain float32 attention over all of them. That costs
more memory and time than any cache; it is for evaluation, where caches step through texts and nothing is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, _BaseCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache

from tqgguf.formats.blocks.bits_per_value import StoredBits, stored_bits
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.imitations.fake_quantise import F16_BITS, bits_per_value, decoded, group_tokens, refusal
from tqgguf.measuring.imitations.simulated_schemes import Blocks, ExactKeys, Scheme, SideScheme
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.kv import block_ops

_F16_SIDE = SideScheme(Blocks("f16"))


class _Rows:
    """One side: rows [n_kv_heads, tokens, head_dim], exact (float16) and as they decode (float32)."""

    def __init__(self, scheme: SideScheme, side: Side) -> None:
        self.scheme, self.side = scheme, side
        self.exact = np.zeros((0, 0, 0), np.float16)
        self.coded = np.zeros((0, 0, 0), np.float32)
        self._mean: np.ndarray | None = None

    def append(self, new: mx.array) -> None:
        """Rows that are always read exactly, and those whose group of tokens is not full yet, are not coded."""
        rows = np.array(block_ops.to_f16(new))
        if self._mean is None:
            self._mean = self._first_mean(rows)
        self.exact = np.concatenate([self.exact, rows], axis=1) if self.exact.size else rows
        n_coded = self.coded.shape[1] // self._group * self._group
        end = self.exact.shape[1] // self._group * self._group
        fresh = self.exact[:, n_coded:end].astype(np.float32)
        if fresh.size:
            fresh = decoded(self.scheme.quantiser, fresh - self._mean, self.side) + self._mean
        n_first = max(0, self.scheme.exact.first - n_coded)
        fresh[:, :n_first] = self.exact[:, n_coded : n_coded + n_first][:, : fresh.shape[1]]
        parts: list[np.ndarray] = [self.coded[:, :n_coded], fresh, self.exact[:, end:]]
        self.coded = np.concatenate([part for part in parts if part.size], axis=1, dtype=np.float32)

    @property
    def _group(self) -> int:
        return group_tokens(self.scheme.quantiser)

    def _first_mean(self, rows: np.ndarray) -> np.ndarray:
        """f16 values [n_kv_heads, 1, head_dim]: the mean of the first step's rows that count, or 0."""
        counted = rows[:, self.scheme.exact.first : self.scheme.mean_tokens]
        if not counted.size:
            return np.zeros((rows.shape[0], 1, rows.shape[2]), np.float32)
        return counted.mean(axis=1, keepdims=True, dtype=np.float32).astype(np.float16).astype(np.float32)


@dataclass(frozen=True)
class _Step:
    """What a step's queries read: a `Step` of these caches. Rows [n_kv_heads, tokens, head_dim] from `start` on."""

    k: tuple[np.ndarray, np.ndarray]
    """Exact rows, and as they decode."""
    v: tuple[np.ndarray, np.ndarray]
    exact: tuple[ExactKeys, ExactKeys]
    layer: int
    start: int
    offset: int
    n_rows: int
    window: int | None
    usage: Usage

    def refusal(self, reason: str) -> RequestError:
        return RequestError(f"layer {self.layer}: a simulated cache is for causal attention by mlx-lm's way: {reason}")

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Attention of q [1, n_heads, rows, head_dim]."""
        if sinks is not None:
            raise self.refusal("the model has sinks")
        self.usage.unattended.discard(self.layer)
        window = self.window or window
        queries = np.arange(self.offset, self.offset + self.n_rows)[:, None]
        keys = np.arange(self.start, self.offset + self.n_rows)[None]
        seen = (keys <= queries) & (queries - keys < (window or keys.size + self.offset))
        exact_k, exact_v = (rule.mask(queries, keys) & seen for rule in self.exact)
        self._count(seen, exact_k, exact_v)
        n_kv_heads, head_dim = self.k[0].shape[0], q.shape[-1]
        groups = q[0].astype(mx.float32).reshape(n_kv_heads, -1, self.n_rows, head_dim) * scale
        k, v = (mx.array(side[1])[:, None] for side in (self.k, self.v))
        scores = groups @ k.swapaxes(-1, -2)
        if (at := _first_column(exact_k, self.exact[0].first - self.start)) is not None:
            k = mx.array(self.k[0][:, at:].astype(np.float32))[:, None]
            exact = mx.where(mx.array(exact_k[:, at:]), groups @ k.swapaxes(-1, -2), scores[..., at:])
            scores = mx.concatenate([scores[..., :at], exact], axis=-1)
        weights = mx.softmax(scores + mx.array(np.where(seen, np.float32(0), np.float32(-np.inf))), axis=-1)
        out = weights @ v
        if (at := _first_column(exact_v, self.exact[1].first - self.start)) is not None:
            off = mx.array(self.v[0][:, at:] - self.v[1][:, at:])[:, None]
            out = out + mx.where(mx.array(exact_v[:, at:]), weights[..., at:], 0) @ off
        return out.reshape(1, q.shape[1], self.n_rows, -1).astype(q.dtype)

    def _count(self, seen: np.ndarray, exact_k: np.ndarray, exact_v: np.ndarray) -> None:
        reads, n = self.usage.reads, int(seen.sum())
        n_k, n_v = int(exact_k.sum()), int(exact_v.sum())
        reads.keys_in_float += n_k
        reads.keys_from_blocks += n - n_k
        reads.values_in_float += n_v
        reads.values_from_blocks += n - n_v


def _first_column(exact: np.ndarray, n_always: int) -> int | None:
    """The first key that some query reads exactly, or None. The first `n_always` do not count: they are not coded.

    exact: booleans [queries, keys].
    """
    columns = np.flatnonzero(exact.any(axis=0))
    later = columns[columns >= n_always]
    return int(later[0]) if later.size else None


class SimulatedCache(_BaseCache):
    """The K and V of one layer under a scheme."""

    def __init__(self, scheme: Scheme, layer: int, window: int | None, usage: Usage) -> None:
        self.scheme, self.layer, self.window, self.usage = scheme, layer, window, usage
        self.sides = _Rows(scheme.k, "k"), _Rows(scheme.v, "v")
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys [1, n_kv_heads, tokens, head_dim] and values; returns handles that the dispatcher attends by.

        RequestError: the model attended by itself in the last step.
        """
        n_rows = keys.shape[2]
        for side, new in zip(self.sides, (keys, values), strict=True):
            side.append(new[0])
        start = 0 if self.window is None else max(0, self.offset - self.window + 1)
        k, v = ((side.exact[:, start:], side.coded[:, start:]) for side in self.sides)
        exact = self.scheme.k.exact, self.scheme.v.exact
        step = _Step(k, v, exact, self.layer, start, self.offset, n_rows, self.window, self.usage)
        if self.layer in self.usage.unattended:
            raise step.refusal("this model computes it by itself")
        self.usage.unattended.add(self.layer)
        self.offset += n_rows
        handles = []
        for new in (keys, values):
            handle = hook.LazyKV(new)
            handle.step = step  # type: ignore[assignment]  # it stands for one
            handles.append(handle)
        return handles[0], handles[1]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """As `BlockKVCache.make_mask`; the dispatcher only reads which window it stands for."""
        window = self.window or window_size
        if not return_array and window is None:
            return "causal" if n > 1 else None
        mask = hook.CausalMask(create_causal_mask(n, self.offset, window_size=window))
        mask.window = window
        return mask

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def state(self) -> list[mx.array]:
        """Nothing waits to be evaluated."""
        return []


def simulated(scheme: Scheme) -> Callable[[Any, Usage], list[Any]]:
    """A function that makes such a cache for a model; layers that are not attention keep their own."""

    def make(model: Any, usage: Usage) -> list[Any]:
        hook.install()
        caches = mlx_prompt_cache(model)
        for layer, cache in enumerate(caches):
            sliding = type(cache) is RotatingKVCache and cache.keep == 0
            if type(cache) is KVCache or sliding:
                own = Scheme(_F16_SIDE, _F16_SIDE, "") if scheme.is_exact(layer, len(caches)) else scheme
                caches[layer] = SimulatedCache(own, layer, cache.max_size if sliding else None, usage)
        return caches

    return make


def check_heads(scheme: Scheme, label: str, layers: Sequence[LayerShape]) -> None:
    """RequestError, naming the layer, where a scheme cannot hold a model's heads."""
    for i, layer in enumerate(layers):
        for side in SIDES:
            reason = refusal(_side(scheme, side).quantiser, layer.head_dim(side), side)
            if reason is not None:
                raise RequestError(f"layer {i}, {side.upper()}: {label} cannot hold these heads: {reason}")


def charged_bits(scheme: Scheme, layers: Sequence[LayerShape], n_ctx: int) -> StoredBits:
    """Bits per value of a cache of `n_ctx` tokens, with means, windows of f16 tokens and f16 layers.

    Groups of tokens that are not full are left out, as our f16 tail is.
    """
    sides = ([_held(scheme, side, i, layers, n_ctx) for i in range(len(layers))] for side in SIDES)
    return stored_bits(*sides)


def _held(scheme: Scheme, side: Side, i: int, layers: Sequence[LayerShape], n_ctx: int) -> tuple[float, int]:
    """Bytes and values of one side of layer i."""
    layer = layers[i]
    n_tokens = n_ctx if layer.window is None else min(n_ctx, layer.window)
    kept = _F16_SIDE if scheme.is_exact(i, len(layers)) else _side(scheme, side)
    n_f16 = kept.exact.n_charged(n_tokens)
    coded = bits_per_value(kept.quantiser, layer.head_dim(side), side)
    mean = F16_BITS if kept.mean_tokens else 0
    channels = layer.n_kv_heads * layer.head_dim(side)
    return channels * (n_f16 * F16_BITS + (n_tokens - n_f16) * coded + mean) / 8, channels * n_tokens


def _side(scheme: Scheme, side: Side) -> SideScheme:
    return scheme.k if side == "k" else scheme.v

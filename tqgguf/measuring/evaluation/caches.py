"""The caches that an evaluation compares: how each is made for a model, and what it stores per value.

A `Candidate` is one row of the table. Ours are made by `make_prompt_cache`, as `run` makes them; mlx-lm's quantised
cache is mlx-lm's; others are simulated. How they are stepped and scored is `evaluation`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache

from tqgguf.formats.blocks.bits_per_value import StoredBits, bits_of_groups, bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import MLX_BITS, CachePair
from tqgguf.measuring.imitations.simulated_cache import charged_bits, check_heads, simulated
from tqgguf.measuring.imitations.simulated_schemes import SCHEMES, Scheme, variant
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.cache.make_prompt_cache import make_caches
from tqgguf.runtime.kv.block_ops import to_f16
from tqgguf.runtime.kv.settings import check_cache_types

MLX_GROUP = 64  # values that share a scale and a bias in mlx-lm's cache, by its default
MLX_GROUP_BYTES = 4  # f16 scale and bias

REFERENCE = "f16"
NO_TAIL = " no tail"  # in labels of caches without one
PAGE_0, CALIBRATION = "page 0", "calibration"


@dataclass(frozen=True)
class Candidate:
    """One cache to be evaluated. `make(model, usage)` gives a fresh one; reads from blocks are counted in `usage`."""

    label: str
    type_k: str
    type_v: str
    bits: StoredBits
    make: Callable[[Any, Usage], list[Any]]
    tail: bool = True
    """False: queries read their own page as blocks too, as if there were no f16 tail."""
    balance: str = "off"
    """The mode; the modes of different layers with a comma between."""
    n_prefix: int = 0
    scale_from: str = ""
    """Where the channel scale of K is from, if it has one: `PAGE_0` or `CALIBRATION`."""
    simulated: bool = False
    """Imitated on the float path: its values are what the cache would give, its bytes and speed are not."""
    note: str = ""


@dataclass(frozen=True)
class CacheOptions:
    """How our caches are made. None: as `make_prompt_cache` does by default. See there for each."""

    n_prefix: int | None = None
    balance: str | None = None
    channel_scales: Mapping[int, mx.array] | None = None
    tail: bool = True

    def spec(self, pair: CachePair) -> CacheSpec:
        """What is asked of the cache of a pair of ours, with what the pair's own form says of it."""
        return pair.spec(self.n_prefix, self.balance)


PLAIN_OPTIONS = CacheOptions(n_prefix=0, balance="off", tail=False)
"""As llama.cpp's caches: every key from blocks."""


def reference(layers: Sequence[LayerShape], n_ctx: int) -> Candidate:
    """The f16 cache that all others are measured against."""
    return _ours(CachePair(REFERENCE, REFERENCE), layers, n_ctx, CacheOptions())


def candidate(pair: CachePair, layers: Sequence[LayerShape], n_ctx: int, options: CacheOptions) -> Candidate:
    """The row of a pair of cache types, with the bits of `n_ctx` tokens. RequestError: heads it cannot hold."""
    if pair.simulated:
        return _simulated(pair, layers, n_ctx, options)
    return _mlx(pair, layers, n_ctx) if pair.is_mlx else _ours(pair, layers, n_ctx, options)


def specs_of(pairs: Iterable[CachePair], options: CacheOptions) -> list[CacheSpec]:
    """What is asked of the caches of ours among these."""
    return [options.spec(pair) for pair in pairs if pair.is_ours]


def can_hold(pair: CachePair, layers: Sequence[LayerShape]) -> str | None:
    """None, or why a model's heads cannot be held."""
    try:
        if pair.simulated:
            check_heads(_scheme(pair, 1, CacheOptions()), pair.label, layers)
        elif pair.is_mlx:
            _check_groups(pair, layers)
        else:
            check_cache_types(layers, CacheSpec(pair.type_k, pair.type_v))
    except RequestError as error:
        return str(error)
    return None


def _ours(pair: CachePair, layers: Sequence[LayerShape], n_ctx: int, options: CacheOptions) -> Candidate:
    spec = options.spec(pair)
    check_cache_types(layers, spec)
    types = spec.resolve(len(layers))

    def make(model: Any, usage: Usage) -> list[Any]:
        return make_caches(model, spec, channel_scales=options.channel_scales, tail=options.tail, usage=usage)

    bits = bits_per_value(layers, types, n_ctx)
    label = pair.label + ("" if options.tail or not pair.has_blocks else NO_TAIL)
    balance, n_prefix = ",".join(sorted({layer.balance for layer in types})), types[0].n_prefix
    scale_from = ""
    if spec.has_channel_scale(len(layers)):
        scale_from = PAGE_0 if options.channel_scales is None else CALIBRATION
    return Candidate(
        label,
        spec.type_k,
        spec.type_v,
        bits,
        make,
        tail=options.tail,
        balance=balance,
        n_prefix=n_prefix,
        scale_from=scale_from,
    )


def _simulated(pair: CachePair, layers: Sequence[LayerShape], n_ctx: int, options: CacheOptions) -> Candidate:
    scheme = _scheme(pair, n_ctx, options)
    check_heads(scheme, pair.label, layers)
    bits = charged_bits(scheme, layers, n_ctx)
    tail = options.tail or not pair.has_blocks
    return Candidate(
        pair.label + ("" if tail else NO_TAIL),
        pair.type_k,
        pair.type_v,
        bits,
        simulated(scheme),
        tail=tail,
        n_prefix=scheme.k.exact.first,
        simulated=True,
        note=f"simulated: {scheme.note}",
    )


def _scheme(pair: CachePair, n_ctx: int, options: CacheOptions) -> Scheme:
    if pair.type_k in SCHEMES:
        scheme = SCHEMES[pair.type_k]
        return scheme if options.tail else scheme.without_tail()
    return variant(pair.type_k, pair.type_v, pair.form, n_ctx, options.n_prefix, options.tail)


class _HalfQuantizedKVCache(QuantizedKVCache):
    """mlx-lm's cache as a half-precision model fills it: scales and biases are f16 whatever the activations are."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(to_f16(keys), to_f16(values))


def _mlx(pair: CachePair, layers: Sequence[LayerShape], n_ctx: int) -> Candidate:
    _check_groups(pair, layers)
    bits = MLX_BITS[pair.type_k]

    def make(model: Any, usage: Usage) -> list[Any]:
        ours = make_caches(model, CacheSpec(REFERENCE, REFERENCE), usage=usage)
        return [
            _HalfQuantizedKVCache(MLX_GROUP, bits) if type(plain) is KVCache else cache
            for plain, cache in zip(mlx_prompt_cache(model), ours, strict=True)
        ]

    has_windows = any(layer.window is not None for layer in layers)
    note = "window layers stay f16: mlx-lm cannot quantise them" if has_windows else ""
    stored = bits_of_groups(layers, n_ctx, bits, MLX_GROUP, MLX_GROUP_BYTES)
    return Candidate(pair.label, pair.type_k, pair.type_v, stored, make, note=note)


def _check_groups(pair: CachePair, layers: Sequence[LayerShape]) -> None:
    for i, layer in enumerate(layers):
        for side, head_dim in (("K", layer.head_dim_k), ("V", layer.head_dim_v)):
            if layer.window is None and head_dim % MLX_GROUP:
                raise RequestError(
                    f"layer {i}, {side}: cache type {pair.label} cannot hold head_dim {head_dim}: "
                    f"it takes multiples of {MLX_GROUP}"
                )

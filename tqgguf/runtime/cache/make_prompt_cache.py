"""A block cache for each layer of an mlx-lm model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.rope_layout import rope_layouts
from tqgguf.runtime.kv.settings import LayerSettings
from tqgguf.runtime.models.loaded_model import fingerprint_of, network_of


def make_prompt_cache(
    model: Any,
    type_k: str = "turbo4",
    type_v: str = "turbo3",
    *,
    n_prefix: int | None = None,
    balance: str | None = None,
    channel_scales: Mapping[int, mx.array | NDArray[np.float32]] | None = None,
    tail: bool = True,
    strict: bool = False,
    usage: Usage | None = None,
    backend: Backend | None = None,
    keeps_pages: bool = False,
    rolls_back: bool = True,
) -> list[Any]:
    """A prompt cache for any mlx-lm model, to hand to `mlx_lm.generate(..., prompt_cache=...)`.

    model: the model, or what `load_model` gave.
    Layers with full attention or a sliding window get a `BlockKVCache` of the given types; other kinds of cache
    (recurrent layers) stay as the model makes them. Types may differ by layer: see `CacheSpec`. n_prefix: tokens kept
    in f16 at the start (default 4 with a turbo type, else 0). balance: 'off', 'page' or 'full' (default: 'full' for
    turbo K, 'off' for others). channel_scales: `read_calibration(file).scales`, [n_kv_heads, head_dim] by layer; layers
    without one take theirs from page 0. tail, keeps_pages, rolls_back: see `BlockKVCache`. strict: attention that
    cannot read blocks is an error. usage: count into this instead. RequestError: no model, an unknown type, or, at the
    first token, a head size that a type cannot hold (naming the layer).
    """
    return make_caches(
        model,
        CacheSpec(type_k, type_v, n_prefix, balance),
        channel_scales=channel_scales,
        tail=tail,
        usage=usage or Usage(strict=strict),
        backend=backend,
        keeps_pages=keeps_pages,
        rolls_back=rolls_back,
    )


def make_caches(
    model: Any,
    spec: CacheSpec,
    *,
    channel_scales: Mapping[int, mx.array | NDArray[np.float32]] | None = None,
    tail: bool = True,
    usage: Usage | None = None,
    backend: Backend | None = None,
    keeps_pages: bool = False,
    rolls_back: bool = True,
) -> list[Any]:
    """The same for whoever has a `CacheSpec`; see `make_prompt_cache` for arguments and errors."""
    network = network_of(model)
    spec.check()
    hook.install()
    usage = usage or Usage()
    ropes = dict(enumerate(rope_layouts(network)))
    if not isinstance(channel_scales, Mapping | None):
        raise RequestError(f"channel scales: expected them by layer, found {type(channel_scales).__name__}")
    scales = dict(channel_scales or {})
    caches = mlx_prompt_cache(network)
    fingerprint = fingerprint_of(network)
    windows = [cache.max_size if _is_sliding(cache) else None for cache in caches]
    for layer, (cache, types) in enumerate(zip(caches, spec.resolve(len(caches)), strict=True)):
        if type(cache) is KVCache or windows[layer] is not None:
            made = caches[layer] = BlockKVCache.of(
                LayerSettings(types, layer, windows[layer], ropes.get(layer, NOT_ROTATED), tail, rolls_back),
                channel_scale=scales.get(layer),
                usage=usage,
                backend=backend,
                keeps_pages=keeps_pages,
                windows=sorted({window for window in windows if window is not None}),
            )
            made.fingerprint = fingerprint
    return caches


def _is_sliding(cache: Any) -> bool:
    return type(cache) is RotatingKVCache and cache.keep == 0

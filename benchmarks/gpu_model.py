"""Decoding with a model of Llama-3.1-8B's shape on a GPU: tokens a second with an f16 cache, and with block caches.

    python benchmarks/gpu_model.py [--contexts 8192 65536] [--types f16/f16 turbo4/turbo3 ...] [--steps 64] [--layers
    32]

Weights are random bf16; caches hold random keys, blocks are random too: what is measured is time. `f16/f16` is mlx-lm's
own KVCache. Every step evaluates one token and takes the likeliest, as mlx-lm's generate does, one step ahead.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from tqgguf.runtime.backends import describe
from tqgguf.runtime.cache.kv_cache import BlockKVCache, make_prompt_cache
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.side_view import PAGE
from tqgguf.runtime.kv.sides import BlockSide
from tqgguf.runtime.selftest_speed import random_side

N_KV_HEADS, HEAD_DIM = 8, 128
WARM_UP = PAGE + 4  # steps: a page fills, so that its kernels are compiled


def random_model(n_layers: int) -> llama.Model:
    shape = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": n_layers,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def filled_cache(model: llama.Model, types: str, n_tokens: int) -> list[Any]:
    """A prompt cache that holds that many random tokens (whole pages)."""
    if types == "f16/f16":
        return [_float_cache(n_tokens) for _ in model.layers]
    caches = make_prompt_cache(model, *types.split("/"))
    for cache in caches:
        _fill(cache, n_tokens)
    return caches


def _float_cache(n_tokens: int) -> KVCache:
    cache = KVCache()
    rows = [mx.random.normal((1, N_KV_HEADS, n_tokens, HEAD_DIM)).astype(mx.bfloat16) for _ in range(2)]
    cache.update_and_fetch(*rows)
    mx.eval(cache.keys, cache.values)
    return cache


def _fill(cache: BlockKVCache, n_tokens: int) -> None:
    sides = cache._make_side("k", HEAD_DIM), cache._make_side("v", HEAD_DIM)
    for name, side in zip("kv", sides, strict=True):
        assert isinstance(side, BlockSide)
        made = random_side(side.codec, N_KV_HEADS, n_tokens, side.n_prefix or 1, name == "k")
        n_pages = n_tokens // PAGE
        side.codes, side.scales = Plane(made.codes, n_pages), Plane(made.scales, n_pages)
        side.prefix = made.rows if side.n_prefix else None
        if side.means is not None:
            side.means = Plane(made.page_means, n_pages)
        if side.scale is not None:
            side.scale.value = made.channel_scale
    cache.sides, cache.offset = sides, n_tokens


def tokens_a_second(model: llama.Model, caches: list[Any], n_steps: int) -> float:
    """Steps of one token, each started before the one before it has ended."""
    token = mx.array([[1]])
    for _ in range(WARM_UP):
        token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
        mx.eval(token)
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(n_steps):
        following = mx.argmax(model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
        mx.async_eval(following)
        mx.eval(token)
        token = following
    mx.eval(token)
    mx.synchronize()
    return n_steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding with a model of Llama-3.1-8B's shape, by cache type")
    parser.add_argument("--contexts", nargs="*", type=int, default=[8192, 65536])
    parser.add_argument("--types", nargs="*", default=["f16/f16", "turbo4/turbo3", "turbo4/turbo4"], metavar="K/V")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    print(describe(), flush=True)
    model, found = random_model(args.layers), []
    print("| context | K/V | tokens/s | ms a token | cache GB |\n|---|---|---|---|---|")
    for n_tokens in args.contexts:
        for types in args.types:
            caches = filled_cache(model, types, n_tokens // PAGE * PAGE)
            n_bytes = sum(cache.nbytes for cache in caches)
            rates = [tokens_a_second(model, caches, args.steps) for _ in range(3)]
            rate = sorted(rates)[1]
            print(f"| {n_tokens} | {types} | {rate:.1f} | {1e3 / rate:.2f} | {n_bytes / 1e9:.2f} |", flush=True)
            found.append({"context": n_tokens, "types": types, "tokens_a_second": rates, "cache_bytes": n_bytes})
            del caches
            mx.clear_cache()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""A seeded model of Llama-3.1-8B's shape, caches that hold random tokens, and how one token is evaluated.

What is measured with it is time and memory: part of gpu_model.py. Weights are bf16; `f16/f16` is mlx-lm's own KVCache,
whose rows are of the model's type.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from tqgguf.formats.blocks.codec import Side, resolve_codec
from tqgguf.runtime.cache.compiled_steps import CompiledSteps
from tqgguf.runtime.cache.kv_cache import BlockKVCache, make_prompt_cache
from tqgguf.runtime.kv.side_view import PAGE
from tqgguf.runtime.selftest_speed import random_side

HEAD_DIM, HEADS_OF_A_GROUP = 128, 4
FLOATS = "f16/f16"


def random_model(args: argparse.Namespace) -> llama.Model:
    n_heads = args.hidden // HEAD_DIM
    shape = {
        "model_type": "llama",
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "intermediate_size": args.hidden * 7 // 2,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads // HEADS_OF_A_GROUP,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": args.vocab,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    mx.clear_cache()
    return model


def make_caches(model: llama.Model, types: str, n_tokens: int = 0) -> list[Any]:
    """A prompt cache of these types that holds random tokens, in whole pages."""
    n_tokens = n_tokens // PAGE * PAGE
    n_kv_heads = model.args.num_key_value_heads
    caches = [KVCache() for _ in model.layers] if types == FLOATS else make_prompt_cache(model, *types.split("/"))
    for cache in caches if n_tokens else ():
        if isinstance(cache, BlockKVCache):
            _fill(cache, n_kv_heads, n_tokens)
        else:
            rows = (mx.random.normal((1, n_kv_heads, n_tokens, HEAD_DIM)).astype(mx.bfloat16) for _ in range(2))
            cache.update_and_fetch(*rows)
            mx.eval(cache.keys, cache.values)
    mx.clear_cache()
    return caches


def _fill(cache: BlockKVCache, n_kv_heads: int, n_tokens: int) -> None:
    settings, (_, first_page, given_scale) = cache.state[:-3], cache.state[-3:]
    sides = [_saved_side(cache, "k", n_kv_heads, n_tokens), _saved_side(cache, "v", n_kv_heads, n_tokens)]
    cache.state = (*settings, n_tokens, first_page, given_scale, HEAD_DIM, HEAD_DIM, *sides)


def _saved_side(cache: BlockKVCache, side: Side, n_kv_heads: int, n_tokens: int) -> list[mx.array | None]:
    """What `BlockKVCache.state` has of one side."""
    types = cache.settings.types
    balance = types.balance if side == "k" else "off"
    codec = resolve_codec(types.of(side), HEAD_DIM, side)
    made = random_side(codec, n_kv_heads, n_tokens, max(1, types.n_prefix), balance != "off")
    prefix = made.rows if types.n_prefix else None
    saved = [made.codes, made.scales, prefix, None]
    if balance != "off":
        saved.append(made.page_means)
    if balance == "full":
        saved += [made.channel_scale, None]
    return saved


Step = Callable[[mx.array], mx.array]
"""A token [1, 1] to logits [1, vocabulary], lazily; it is in the caches then."""


def model_step(model: llama.Model, caches: list[Any]) -> Step:
    """As mlx-lm's generate calls a model."""
    return lambda token: model(token, cache=caches)[:, -1]


def compiled_step(model: llama.Model, caches: list[Any]) -> Step:
    """By compiled steps, and as `model_step` where those do not serve."""
    steps = CompiledSteps(lambda token, given: model(token, cache=given)[:, -1])

    def step(token: mx.array) -> mx.array:
        logits = steps.step(token, caches)
        return model(token, cache=caches)[:, -1] if logits is None else logits

    return step


STEPS: dict[str, Callable[[llama.Model, list[Any]], Step]] = {"model": model_step, "compiled": compiled_step}


def make_step(model: llama.Model, caches: list[Any], by: str) -> Step:
    """The one place that decides how a token is evaluated. by: of STEPS, for caches of blocks."""
    return STEPS[by if isinstance(caches[0], BlockKVCache) else "model"](model, caches)

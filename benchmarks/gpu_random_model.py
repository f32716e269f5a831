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

from tqgguf.runtime.cache.compiled_steps import CompiledSteps
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.kv.pages import PAGE

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
    caches = [KVCache() for _ in model.layers] if types == FLOATS else make_prompt_cache(model, *types.split("/"))
    for cache in caches if n_tokens else ():
        if isinstance(cache, BlockKVCache):
            _fill(cache, model, n_tokens)
        else:
            cache.update_and_fetch(*_random_rows(model, n_tokens))
        mx.eval(cache.state)
    mx.clear_cache()
    return caches


def _random_rows(model: llama.Model, n: int) -> list[mx.array]:
    shape = (1, model.args.num_key_value_heads, n, HEAD_DIM)
    return [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)]


def _fill(cache: BlockKVCache, model: llama.Model, n_tokens: int) -> None:
    """Page 0 with queries, which decide the channel scale; nobody attends from the rest."""
    q = mx.random.normal((1, model.args.num_attention_heads, PAGE, HEAD_DIM)).astype(mx.bfloat16)
    mx.eval(cache.update(*_random_rows(model, PAGE)).attend(q, HEAD_DIM**-0.5, None, None))
    if n_tokens > PAGE:
        cache.update(*_random_rows(model, n_tokens - PAGE))
        cache.usage.unattended.discard(cache.layer)


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

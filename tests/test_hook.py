"""The dispatcher attends from blocks where it can, and counts or refuses what it cannot."""

from __future__ import annotations

import importlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache

from tqgguf import make_prompt_cache
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.cache.kv_cache import BlockKVCache

SIZES = dict(
    hidden_size=128,
    num_hidden_layers=3,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=96,
    head_dim=64,
    max_position_embeddings=1024,
    rope_theta=1e4,
    tie_word_embeddings=False,
)
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": dict(sliding_window=100, sliding_window_pattern=3),
    "phi3": {},
    "olmo2": {},
    "smollm3": dict(no_rope_layer_interval=2),
}
OWN_ATTENTION = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=64.0)


def small_model(name: str, **extra):
    mx.random.seed(3)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**SIZES, "model_type": name, **extra}))
    mx.eval(model.parameters())
    return model


def run(model, cache) -> np.ndarray:
    tokens = mx.random.randint(0, 96, (1, 301), key=mx.random.key(0))
    logits = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 256), (256, 300), (300, 301))]
    return np.concatenate([np.array(x)[0] for x in logits])


@pytest.mark.parametrize("name", MODELS)
def test_models_of_mlx_lm_attend_from_blocks_without_a_change(name: str) -> None:
    model = small_model(name, **MODELS[name])
    cache = make_prompt_cache(model, "f32", "f32", strict=True)
    np.testing.assert_allclose(run(model, cache), run(model, mlx_prompt_cache(model)), atol=2e-4)
    usage = cache[0].usage
    assert usage.by_fallback == 0 and usage.reads.keys_in_float > 0
    blocks = make_prompt_cache(model, "q8_0", "q8_0", strict=True)
    assert np.abs(run(model, blocks) - run(model, mlx_prompt_cache(model))).max() < 0.2
    assert blocks[0].usage.reads.keys_from_blocks > 0


def test_a_model_with_attention_of_its_own_takes_the_fallback_which_is_counted() -> None:
    model = small_model("gemma2", **OWN_ATTENTION)
    cache = make_prompt_cache(model, "q8_0", "q8_0")
    assert np.abs(run(model, cache) - run(model, mlx_prompt_cache(model))).max() < 0.1
    rows = 301 * 302 // 2
    assert cache[0].usage.by_fallback == 3 * rows
    assert cache[0].usage.reads.keys_from_blocks == 0


def test_strict_turns_that_fallback_into_an_error() -> None:
    model = small_model("gemma2", **OWN_ATTENTION)
    with pytest.raises(RequestError, match=r"layer 0: keys would be read by fallback.*--strict-kv"):
        run(model, make_prompt_cache(model, "q8_0", "q8_0", strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_of_the_models_own_takes_the_fallback(strict: bool) -> None:
    usage = Usage(strict=strict)
    cache = BlockKVCache("q8_0", "q8_0", usage=usage)
    x = mx.random.normal((1, 2, 10, 64), key=mx.random.key(1))
    keys, values = cache.update_and_fetch(x, x)
    own_mask = create_causal_mask(10)
    if strict:
        with pytest.raises(RequestError, match="brings a mask of its own"):
            hook.scaled_dot_product_attention(x, keys, values, cache=cache, scale=0.125, mask=own_mask)
    else:
        out = hook.scaled_dot_product_attention(x, keys, values, cache=cache, scale=0.125, mask=own_mask)
        causal = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal")
        np.testing.assert_allclose(np.array(out), np.array(causal), atol=5e-3)
        assert usage.by_fallback == 55


def test_arrays_that_are_no_handles_go_to_mlx_lms_own_attention() -> None:
    x = mx.random.normal((1, 2, 10, 64), key=mx.random.key(1))
    out = hook.scaled_dot_product_attention(x, x, x, None, 0.125, "causal")
    assert mx.array_equal(out, mx.fast.scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal"))

"""Records prompt caches of mlx-lm 0.31.3 (the layout before 0.32's) into tests/data.

    pip install mlx-lm==0.31.3 && python tests/oracles/mlx_cache_before.py

Values are multiples of 1/8 that say where they belong (see `values`); the quantised cache holds what mlx makes of them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, save_prompt_cache

DATA = Path(__file__).parent.parent / "data"
N_TOKENS, N_HEADS, HEAD_DIM = 11, 2, 32


def values(layer: int, side: int) -> np.ndarray:
    """float32 [1, heads, tokens, head_dim] of multiples of 1/8 below 128."""
    shape = (1, N_HEADS, N_TOKENS, HEAD_DIM)
    return (np.arange(np.prod(shape)) * (7 + 4 * layer + 2 * side) % 1021 / 8).astype(np.float32).reshape(shape)


def main() -> None:
    assert version("mlx-lm") == "0.31.3"
    caches = [KVCache(), QuantizedKVCache(group_size=32, bits=4), RotatingKVCache(max_size=5), KVCache()]
    for layer, cache in enumerate(caches):
        k, v = (mx.array(values(layer, side)).astype(mx.float16) for side in (0, 1))
        cache.update_and_fetch(k[:, :, :4], v[:, :, :4])
        for i in range(4, N_TOKENS):
            cache.update_and_fetch(k[:, :, i : i + 1], v[:, :, i : i + 1])
    save_prompt_cache(str(DATA / "mlx_lm_0.31.3.safetensors"), caches, {"model": "tiny", "tokenizer_config": "{}"})


if __name__ == "__main__":
    main()

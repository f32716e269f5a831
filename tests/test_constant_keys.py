"""Keys with huge constant channels, as Qwen2.5's have: plain blocks collapse on them, balanced ones do not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel, model_tensors, write_tiny

from tqgguf.measuring.cache_pairs import parse_pairs
from tqgguf.measuring.evaluation.caches import CacheOptions, candidate, reference
from tqgguf.measuring.evaluation.compare import Evaluation, Plan
from tqgguf.runtime.models.load import LoadedModel, open_model

N_CTX = 1024
SLOW_PAIRS = (24, 27, 31)  # of 32; RoPE turns them by at most 0.03 within the window
MODEL = TinyModel("qwen2", rope_base=1e6, tied=False, seed=6)


def with_constants(path: Path, norm_k: float, norm_q: float) -> LoadedModel:
    """A model whose biases of K and Q hold constants in slow RoPE channels, of these norms in every head, and whose
    logits are spread as those of a language model are: some tokens are likely, none is certain.
    """
    tensors = model_tensors(MODEL)
    changes = {"output.weight": tensors["output.weight"] * np.float32(0.1)}
    for layer in range(MODEL.n_layers):
        for side, norm, n_heads in (("k", norm_k, MODEL.n_kv_heads), ("q", norm_q, MODEL.n_heads)):
            name = f"blk.{layer}.attn_{side}.bias"
            bias = tensors[name].reshape(n_heads, MODEL.head_dim).copy()
            for pair in SLOW_PAIRS:
                bias[:, [pair, pair + MODEL.head_dim // 2]] += np.float32([0.8, 0.6]) * norm / len(SLOW_PAIRS) ** 0.5
            changes[name] = bias.reshape(-1).astype(np.float32)
    return open_model(write_tiny(path, MODEL, tensors=changes)).load()


@pytest.mark.parametrize(("norm_k", "norm_q"), [(300.0, 0.0), (300.0, 20.0), (800.0, 20.0)])
def test_balanced_turbo4_stays_under_twice_the_kld_of_q8_0(tmp_path: Path, norm_k: float, norm_q: float) -> None:
    model = with_constants(tmp_path / "m.gguf", norm_k, norm_q)
    layers = model.config.layer_shapes()
    pairs = parse_pairs("q8_0,turbo4,turbo4/turbo3,turbo4@plain")
    rows = [candidate(pair, layers, N_CTX, CacheOptions(tail=False)) for pair in pairs]
    window = np.random.default_rng(1).integers(0, 280, (1, N_CTX))
    evaluation = Evaluation(model, [reference(layers, N_CTX), *rows], Plan(window))
    evaluation.run()
    q8_0, balanced, smaller, plain = (result.statistics.kld for result in evaluation.results()[1:])
    assert balanced < 2 * q8_0
    assert smaller < 3 * q8_0
    assert plain > 15 * balanced and plain > 0.05

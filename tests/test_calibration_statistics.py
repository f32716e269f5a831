"""The channel scale of K from a text: what it is made from."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrations import GEMMA, LLAMA, N_PREFIX
from mlx_lm.models.cache import make_prompt_cache
from tiny_folders import write_folder
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.measuring.evaluation.calibration_statistics import calibrate
from tqgguf.measuring.evaluation.compare import spread
from tqgguf.runtime.models.load import open_model
from tqgguf.runtime.models.loaded_model import LoadedModel

pytestmark = pytest.mark.usefixtures("cache_home")


def turned_by_hand(loaded: LoadedModel, window: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries [n_heads, n, head_dim] and keys [n_kv_heads, n, head_dim] after RoPE of every layer, of the whole window
    at once, through mlx-lm's own cache and a look at its attention module.
    """
    module: Any = importlib.import_module(type(loaded.model).__module__)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = module.scaled_dot_product_attention

    def look(q: mx.array, k: mx.array, v: mx.array, *rest: Any, **more: Any) -> mx.array:
        seen.append((np.array(q[0]), np.array(k[0])))
        return original(q, k, v, *rest, **more)

    module.scaled_dot_product_attention = look
    try:
        mx.eval(loaded.model(mx.array(window[None].astype(np.int32)), cache=make_prompt_cache(loaded.model)))
    finally:
        module.scaled_dot_product_attention = original
    return seen


def scale_by_formula(windows: list[tuple[np.ndarray, np.ndarray]], pairs: str) -> np.ndarray:
    """(E[q^2] / Var[k]) ** (1/4) in float64, from the design's words: variances within pages of 128, the first tokens
    left out, one value for both channels of a RoPE pair, mean logarithm zero.
    """
    use: Any = 0.0
    spread_: Any = 0.0
    for q, k in windows:
        n_kv_heads, length, dim = k.shape
        grouped = q.astype(np.float64)[:, N_PREFIX:].reshape(n_kv_heads, -1, dim)
        use = use + np.square(grouped).sum(axis=1)
        for start in range(0, length - 127, 128):
            page = k[:, start + (N_PREFIX if start == 0 else 0) : start + 128].astype(np.float16).astype(np.float64)
            mean = page.mean(axis=1, keepdims=True).astype(np.float16).astype(np.float64)
            spread_ = spread_ + np.square(page - mean).sum(axis=1)
    half = use.shape[1] // 2
    for x in (use, spread_):
        both = (x[:, 0::2] + x[:, 1::2]) / 2 if pairs == "neighbours" else (x[:, :half] + x[:, half:]) / 2
        x[:] = np.repeat(both, 2, axis=1) if pairs == "neighbours" else np.tile(both, 2)
        x += 1e-4 * x.mean(axis=1, keepdims=True)
    a = (use / spread_) ** 0.25
    return a / np.exp(np.log(a).mean(axis=1, keepdims=True))


@pytest.mark.parametrize(("model", "pairs"), [(LLAMA, "neighbours"), (GEMMA, "halves")], ids=["llama", "gemma3"])
def test_scales_are_those_of_float64_statistics_of_the_models_queries_and_keys(
    tmp_path: Path, model: TinyModel, pairs: str
) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", model)).load()
    # windows of two pages and a half: the last page does not count, its queries do
    windows = np.random.default_rng(1).integers(0, 280, (2, 320))
    scales = calibrate(loaded, windows, chunk=128)
    by_hand = [turned_by_hand(loaded, window) for window in windows]
    assert sorted(scales) == list(range(model.n_layers))
    for layer, scale in scales.items():
        expected = scale_by_formula([window[layer] for window in by_hand], pairs)
        assert scale.dtype == np.float32
        np.testing.assert_allclose(scale, expected, rtol=2e-3)
        assert np.ptp(scale) > 0.1


def test_scales_hardly_depend_on_the_grid_and_not_at_all_on_the_run(tmp_path: Path) -> None:
    opened = open_model(write_tiny(tmp_path / "model.gguf", LLAMA))
    loaded = opened.load()
    windows = np.random.default_rng(2).integers(0, 280, (1, 512))
    once, again, wide = (calibrate(loaded, windows, chunk) for chunk in (128, 128, 512))
    for layer in once:
        np.testing.assert_array_equal(once[layer], again[layer])
        np.testing.assert_allclose(once[layer], wide[layer], rtol=1e-3)


def test_progress_counts_all_windows_and_can_end_it(tmp_path: Path) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", LLAMA)).load()
    windows = np.zeros((2, 256), np.int64)
    seen: list[tuple[int, int]] = []
    calibrate(loaded, windows, 128, lambda *counts: seen.append(counts))
    assert seen == [(128, 512), (256, 512), (384, 512), (512, 512)]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(loaded, windows, 128, stop)


def test_a_model_that_attends_by_itself_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gemma2", "gemma2", config={"query_pre_attn_scalar": 64})
    loaded = open_model(folder).load()
    with pytest.raises(RequestError, match="computes attention by itself"):
        calibrate(loaded, np.zeros((1, 128), np.int64))


def test_keys_that_are_not_finite_are_refused_by_their_layer(tmp_path: Path) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", LLAMA)).load()
    norm = loaded.model.layers[1].input_layernorm
    norm.weight = mx.full(norm.weight.shape, np.nan)
    with pytest.raises(EncodeError, match="layer 1: expected finite queries and keys"):
        calibrate(loaded, np.arange(128)[None])


def test_windows_are_spread_over_the_text() -> None:
    windows = np.arange(10)[:, None]
    assert spread(windows, 4)[:, 0].tolist() == [1, 3, 6, 8]
    assert spread(windows, 99)[:, 0].tolist() == list(range(10))
    assert spread(windows, 1)[:, 0].tolist() == [5]

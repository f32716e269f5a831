"""Models from GGUF files compute what llama.cpp computes, and their headers are read as llama.cpp reads them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import U32, Typed
from tiny_models import (
    ORACLE_CASES,
    ORACLE_POSITIONS,
    ORACLE_TOKENS,
    TinyModel,
    fingerprint,
    tiny_gguf,
    vocabulary,
    write_tiny,
)

from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.config import override_rope, resolve_context
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.models.load import OpenModel, open_model

RECORDED = np.load(Path(__file__).parent / "data" / "tiny_logits.npz")
# llama.cpp looks gemma's gelu up in a table of float16, which shows from 1e-4 on; the rest is float32 rounding.
TOLERANCE = {"gemma3": 5e-4}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="module", params=list(ORACLE_CASES))
def case(request, tmp_path_factory):
    """An oracle's spec, its loaded model and llama.cpp's logits [positions, vocabulary]."""
    model = ORACLE_CASES[request.param]
    assert str(RECORDED[f"{request.param}/sha256"]) == fingerprint(model), "record again: oracles/tiny_logits.py"
    path = write_tiny(tmp_path_factory.mktemp("oracle") / "tiny.gguf", model)
    return model, open_model(path).load(), RECORDED[f"{request.param}/logits"]


def test_logits_equal_llama_cpps(case):
    model, loaded, expected = case
    found = np.array(loaded.model(mx.array([ORACLE_TOKENS])))[0, list(ORACLE_POSITIONS)]
    assert relative(found, expected) < TOLERANCE.get(model.architecture, 1e-5)


def test_logits_from_a_cache_filled_in_steps_equal_llama_cpps(case):
    model, loaded, expected = case
    cache = make_prompt_cache(loaded.model, "f32", "f32")
    pieces = [ORACLE_TOKENS[:5], ORACLE_TOKENS[5:24], *([token] for token in ORACLE_TOKENS[24:])]
    rows = np.concatenate([np.array(loaded.model(mx.array([piece]), cache=cache))[0] for piece in pieces])
    assert relative(rows[list(ORACLE_POSITIONS)], expected) < TOLERANCE.get(model.architecture, 1e-5)


def test_the_last_row_alone_equals_the_whole_output(case):
    _, loaded, expected = case
    cache = make_prompt_cache(loaded.model, "f32", "f32")
    assert relative(np.array(loaded.last_logits(mx.array([ORACLE_TOKENS]), cache)), expected[-1]) < 5e-4


def test_the_recorded_cases_differ_where_they_should():
    """The oracle would not notice a feature that changes nothing."""
    plain, factors = ORACLE_CASES["gemma3 window"], ORACLE_CASES["llama rope factors"]
    assert plain.window < len(ORACLE_TOKENS) and plain.window_pattern <= plain.n_layers
    assert factors.rope_factors and any(position > 8 for position in ORACLE_POSITIONS)


# Sizes and RoPE as read from the header.


def opened(tmp_path, model: TinyModel, metadata=None, tensors=None) -> OpenModel:
    return open_model(write_tiny(tmp_path / "tiny.gguf", model, metadata, tensors))


def test_what_the_header_says_is_read_without_the_weights(tmp_path):
    model = TinyModel("gemma3", n_layers=6, n_kv_heads=1, window=32, window_pattern=3, context_length=512)
    data = tiny_gguf(model)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    found = open_model(path)
    assert found.config.layer_shapes()[0].window == 32
    assert found.config.windows == (32, 32, None, 32, 32, None)
    assert found.config.context_length == 512 and found.config.n_layers == 6
    assert found.tokenizer.vocab_size == found.config.vocab_size == len(vocabulary())


@pytest.mark.parametrize("value", [Typed(U32, 3), [True, True, False] * 2])
def test_a_window_pattern_may_be_a_number_or_a_flag_per_layer(tmp_path, value):
    model = TinyModel("gemma3", n_layers=6, window=32)
    config = opened(tmp_path, model, {"gemma3.attention.sliding_window_pattern": value}).config
    assert config.windows == (32, 32, None, 32, 32, None)


def test_sizes_given_once_per_layer_are_taken_when_equal(tmp_path):
    config = opened(tmp_path, TinyModel("llama"), {"llama.attention.head_count": np.array([4, 4], np.int32)}).config
    assert config.n_heads == 4


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_reads_it(tmp_path, keys, factor):
    config = opened(tmp_path, TinyModel("llama"), {f"llama.{key}": value for key, value in keys.items()}).config
    assert config.rope_factor == factor


def test_rope_overrides_equal_the_same_numbers_in_the_file(tmp_path):
    plain, scaled = ORACLE_CASES["llama"], ORACLE_CASES["llama linear scaling"]
    path = write_tiny(tmp_path / "plain.gguf", TinyModel("llama", seed=scaled.seed))
    assert path.read_bytes() != tiny_gguf(scaled) and plain.rope_scale is None
    loaded = open_model(path, rope_freq_scale=1 / scaled.rope_scale).load()
    found = np.array(loaded.model(mx.array([ORACLE_TOKENS])))[0, list(ORACLE_POSITIONS)]
    assert relative(found, RECORDED["llama linear scaling/logits"]) < 1e-5


def test_a_rope_base_override_equals_the_same_base_in_the_file(tmp_path):
    model = ORACLE_CASES["llama rope factors"]
    other = write_tiny(
        tmp_path / "other.gguf", TinyModel("llama", rope_factors=True, rope_base=1234.0, seed=model.seed)
    )
    loaded = open_model(other, rope_freq_base=model.rope_base).load()
    found = np.array(loaded.model(mx.array([ORACLE_TOKENS])))[0, list(ORACLE_POSITIONS)]
    assert relative(found, RECORDED["llama rope factors/logits"]) < 1e-5


def test_rope_overrides_leave_window_layers_alone(tmp_path):
    config = opened(tmp_path, ORACLE_CASES["gemma3 two bases"]).config
    other = override_rope(config, freq_base=2e6, freq_scale=0.5)
    assert (other.rope_theta, other.rope_factor) == (2e6, 2.0)
    assert other.rope_theta_local == config.rope_theta_local == 5000.0


def test_zero_leaves_the_models_own_rope(tmp_path):
    config = opened(tmp_path, TinyModel("llama")).config
    assert override_rope(config, freq_base=0.0, freq_scale=0.0) == override_rope(config) == config


@pytest.mark.parametrize("value", (-1.0, float("inf"), float("nan")))
def test_a_rope_override_that_is_no_sound_number_is_refused(tmp_path, value):
    config = opened(tmp_path, TinyModel("llama")).config
    with pytest.raises(RequestError, match=r"RoPE frequency base: expected a number above 0"):
        override_rope(config, freq_base=value)


def test_a_context_beyond_the_models_needs_a_rope_override(tmp_path):
    config = opened(tmp_path, TinyModel("llama", context_length=256)).config
    assert resolve_context(config, 0) == 256
    assert resolve_context(config, 100) == 100
    with pytest.raises(RequestError, match=r"-c 600: the model was trained for 256 tokens; .*--rope-scale 3\)$") as e:
        resolve_context(config, 600)
    assert e.value.exit_status == 2
    assert resolve_context(override_rope(config, freq_scale=1 / 3), 600) == 600
    with pytest.raises(RequestError, match=r"-c -1: expected a number of tokens"):
        resolve_context(config, -1)


def test_loading_reports_bytes_up_to_the_whole(tmp_path):
    steps: list[tuple[int, int]] = []
    opened(tmp_path, TinyModel("qwen2", weights="Q8_0")).load(lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
    assert len({total for _, total in steps}) == 1

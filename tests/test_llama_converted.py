"""llama.cpp itself loads what `tqgguf convert` makes, and its own quantiser makes the same; collected where
llama-cpp-python is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as c
import mlx.core as mx
import numpy as np
import pytest
from llama_oracle import Context, Model
from mlx_lm.utils import load_model
from tiny_checkpoints import CASES, write_checkpoint
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.conversion.weight_rules import FILE_TYPES
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.runtime.models.load import embedded_model
from tqgguf.texts import default_text

pytestmark = pytest.mark.llama_cpp

TOKENS = [5, 17, 260, 3, 99, 42] * 15
WIDENED = {"Q4_K": {"Q4_0"}, "Q5_K": {"Q5_1"}, "Q6_K": {"Q8_0"}}
"""Types of llama-quantize that are not written here, and what stands in their places."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def logits(path: str, tokens: list[int] = TOKENS) -> np.ndarray:
    """llama.cpp's, after the last token."""
    context = Context(Model(Path(path)), "f32", "f32", flash=False)
    context.evaluate(tokens)
    found = context.logits()
    context.close()
    return found


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_have_the_logits_that_mlx_lm_gives_them(name: str) -> None:
    write_checkpoint(
        Path("a"), CASES[name], rope_scaling=None if name == "qwen3" else CASES[name].config.get("rope_scaling")
    )
    assert main(["convert", "a", "a.gguf", "--type", "f32"]) == 0
    model, _ = load_model(Path("a"))
    model.set_dtype(mx.float32)
    expected = np.array(model(mx.array([TOKENS])))[0, -1]
    assert distance(logits("a.gguf"), expected) < 2e-3


@pytest.mark.parametrize("wanted", FILE_TYPES)
def test_llama_cpps_own_quantiser_makes_the_same_tensors(wanted: str) -> None:
    source = TinyModel("qwen3", weights="F16", tied=False, hidden_size=256, intermediate_size=512)
    write_tiny(Path("a.gguf"), source)
    assert main(["convert", "a.gguf", "ours.gguf", "--type", wanted]) == 0
    params = c.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[wanted]
    assert c.llama_model_quantize(b"a.gguf", b"theirs.gguf", ctypes.byref(params)) == 0
    with open_gguf("ours.gguf") as ours, open_gguf("theirs.gguf") as theirs:
        assert set(ours.tensors) == set(theirs.tensors)
        n_same = 0
        for name, info in theirs.tensors.items():
            found = ours.tensors[name].type_name
            if found == info.type_name:
                assert ours.raw(name).tobytes() == theirs.raw(name).tobytes(), name
                n_same += 1
            else:
                assert found in WIDENED[info.type_name], name
        assert n_same > len(theirs.tensors) / 2
        for key in ("general.file_type", "general.quantization_version"):
            assert ours.metadata[key] == theirs.metadata[key]
    assert distance(logits("ours.gguf"), logits("a.gguf")) < (0.02 if BLOCK_TYPES[wanted].bits >= 8 else 0.5)


def test_parts_and_copies_are_the_same_model() -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="F16"))
    assert main(["convert", "a.gguf", "p.gguf", "--split-max-size", "1M"]) == 0
    parts = sorted(str(path) for path in Path(".").glob("p-*"))
    assert len(parts) > 1
    assert main(["convert", parts[0], "b.gguf"]) == 0
    expected = logits("a.gguf")
    for path in (parts[0], "b.gguf"):
        assert np.array_equal(logits(path), expected)


def test_a_real_model_of_another_type_says_nearly_the_same() -> None:
    """SmolLM2's matrices from Q4_1 to q8_0: what llama.cpp makes of them differs by its own rounding, and by ours."""
    assert main(["convert", str(embedded_model()), "b.gguf", "--type", "q8_0", "--requantise"]) == 0
    source, target = (np.array(each_logits(path)) for path in (embedded_model(), Path("b.gguf")))
    agreement = float((source.argmax(axis=1) == target.argmax(axis=1)).mean())
    p, q = (x - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True) for x in (source, target))
    divergence = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert agreement > 0.9
    assert divergence < 0.02


def each_logits(path: Path) -> list[np.ndarray]:
    """llama.cpp's logits after each token of a text."""
    model = Model(path)
    context, found = Context(model), []
    for token in model.tokenize(default_text()[:600]):
        context.evaluate([token])
        found.append(context.logits())
    context.close()
    return found

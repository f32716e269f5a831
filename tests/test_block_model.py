"""Models whose matrices stay in the file's blocks on a GPU: the emulator runs their kernels, and models of float32 say
what is right."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from emulator.launcher import EmulatedLauncher
from gguf_builder import Tensor
from mlx.utils import tree_flatten
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.errors import FormatError
from tqgguf.runtime.layers import block_layers
from tqgguf.runtime.layers.block_layers import BlockLayer
from tqgguf.runtime.layers.block_matrices import BlockEmbedding, BlockOutput, BlockRows
from tqgguf.runtime.layers.matrices import InputEmbedding
from tqgguf.runtime.models.load import open_model
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.runtime.selftest_matrices import NUMBERS, random_blocks

WINDOW = {"window": 8, "window_pattern": 2}
CASES = {
    "llama": TinyModel("llama", n_layers=1, weights="Q8_0", tied=False, rope_factors=True),
    "qwen2": TinyModel("qwen2", n_layers=1, weights="Q4_0"),
    "qwen3": TinyModel("qwen3", n_layers=1, weights="Q5_0", head_dim=128),
    "gemma3": TinyModel("gemma3", weights="Q8_0", **WINDOW),
    "embedding of floats": TinyModel("llama", n_layers=1, weights="Q8_0", embedding="F16"),
}


def both(tmp_path: Path, model: TinyModel) -> tuple[LoadedModel, LoadedModel]:
    opened = open_model(write_tiny(tmp_path / "m.gguf", model))
    return opened.load(form="dense"), opened.load(form="blocks", launcher=EmulatedLauncher())


def distance(model: LoadedModel, expected: LoadedModel, ids: list[int]) -> float:
    found, wanted = (np.array(m.model(mx.array([ids])).astype(mx.float32)) for m in (model, expected))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen2" else pytest.mark.slow) for name in CASES]
)
def test_a_token_means_the_same_as_in_float32(tmp_path: Path, name: str) -> None:
    dense, blocks = both(tmp_path, CASES[name])
    assert isinstance(blocks.model.layers[0], BlockLayer)
    assert distance(blocks, dense, [7]) < 0.02
    assert blocks.model(mx.array([[7]])).dtype == mx.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_prompts_mean_the_same_as_in_float32(tmp_path: Path, name: str) -> None:
    dense, blocks = both(tmp_path, CASES[name])
    for ids in ([1, 5, 9], list(range(20))):  # multiplied from blocks, and decoded first
        assert distance(blocks, dense, ids) < 0.03


def test_matrices_are_as_large_as_in_the_file(tmp_path: Path) -> None:
    _, blocks = both(tmp_path, CASES["qwen2"])
    held = sum(value.nbytes for path, value in tree_flatten(blocks.model.parameters()) if value.dtype == mx.uint32)
    file = open_model(tmp_path / "m.gguf").file
    assert held == sum(info.n_bytes for info in file.tensors.values() if info.type_name == "Q4_0")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_and_places(tmp_path: Path, name: str) -> None:
    _, blocks = both(tmp_path, CASES[name])
    model, layer = blocks.model, blocks.model.layers[0]
    assert isinstance(model.model.embed_tokens, BlockEmbedding | InputEmbedding)
    assert name == "gemma3" or isinstance(model.lm_head, BlockOutput)
    assert len(layer.heads) == 1
    assert not [m for m in model.modules() if isinstance(m, nn.Linear | nn.QuantizedLinear)]


def with_q4_k(path: Path, name: str, n_rows: int) -> Path:
    """A qwen2 of one type, but for this matrix of [n_rows, 256], which is of Q4_K."""
    blocks = random_blocks("Q4_K", n_rows, 256)
    tensor = Tensor((n_rows, 256), NUMBERS["Q4_K"], blocks.tobytes())
    return write_tiny(path, CASES["qwen2"], tensors={name: tensor})


@pytest.mark.slow
def test_where_v_is_of_another_type_q_and_k_are_one_product(tmp_path: Path) -> None:
    opened = open_model(with_q4_k(tmp_path / "m.gguf", "blk.0.attn_v.weight", 128))
    found = opened.load(form="blocks", launcher=EmulatedLauncher())
    assert [rows.matrix.n_rows for rows in found.model.layers[0].heads] == [256 + 128, 128]
    assert distance(found, opened.load(form="dense"), [3]) < 0.02


@pytest.mark.slow
def test_layers_of_many_types_keep_mlx_lms_form(tmp_path: Path) -> None:
    opened = open_model(with_q4_k(tmp_path / "m.gguf", "blk.0.ffn_up.weight", 256))
    found = opened.load(form="blocks", launcher=EmulatedLauncher())
    assert not isinstance(found.model.layers[0], BlockLayer)
    assert isinstance(found.model.layers[0].mlp.up_proj, BlockRows)
    assert distance(found, opened.load(form="dense"), [3]) < 0.02


def test_a_scale_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    blocks = random_blocks("Q4_K", 256, 256).copy()
    blocks[200, 2:4] = np.array([np.inf], "<f2").view(np.uint8)
    tensor = Tensor((256, 256), NUMBERS["Q4_K"], blocks.tobytes())
    path = write_tiny(tmp_path / "m.gguf", CASES["qwen2"], tensors={"blk.0.attn_q.weight": tensor})
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight.*finite"):
        open_model(path).load(form="blocks", launcher=EmulatedLauncher())


@pytest.mark.slow
def test_a_row_too_long_for_threadgroup_memory_is_normed_by_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, blocks = both(tmp_path, CASES["qwen2"])
    monkeypatch.setattr(block_layers, "MOST_NORMED", 255)
    assert distance(blocks, dense, [7]) < 0.02

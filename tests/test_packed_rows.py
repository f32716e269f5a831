"""An embedding and an output layer whose rows stay in the file mean what their float32 copies mean."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from c_paths import C_PATHS, LIBRARY, library
from gguf_builder import Tensor, build_gguf, quantised
from gguf_rows import NUMBERS, SCALES_AT, SERVED, float64, matrix
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from tiny_models import ORACLE_CASES, ORACLE_TOKENS, TinyModel, model_tensors, write_tiny

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.layers import packed_rows
from tqgguf.runtime.layers.matrices import InputEmbedding
from tqgguf.runtime.layers.packed_rows import (
    PackedRows,
    RowsEmbedding,
    RowsLinear,
    is_served,
)
from tqgguf.runtime.layers.row_layers import RowsLayer
from tqgguf.runtime.models.load import LoadedModel, embedded_model, open_model
from tqgguf.runtime.native.library import row_matrix
from tqgguf.runtime.native.worth import MOST_SINGLE_ROWS, SLOW_PATHS

N_ROWS, N = 1031, 768  # an odd number of rows, of more than one run


@pytest.fixture(autouse=True)
def library_as_before() -> Iterator[None]:
    yield
    assert LIBRARY is not None and LIBRARY.select_path("")
    LIBRARY.set_threads(0)


@pytest.fixture(autouse=True)
def every_path_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with none but a slow path tests its rows too."""
    monkeypatch.setattr(packed_rows, "SLOW_PATHS", ())


def rows_in_file(folder: Path, tensor: Tensor) -> PackedRows:
    path = folder / "rows.gguf"
    path.write_bytes(build_gguf({"general.architecture": "llama"}, {"rows": tensor}))
    with open_gguf(path) as file:
        return PackedRows(file, "rows", LIBRARY)


def check_products(found: np.ndarray, values: np.ndarray, x: np.ndarray) -> None:
    """Within 1e-5 of float64 by the sizes of a row and of x."""
    expected = x.astype(np.float64) @ values.T
    size = np.linalg.norm(x, axis=-1, keepdims=True) * np.linalg.norm(values, axis=1)
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert (np.abs(found - expected) <= 1e-5 * size).all()


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize("type_name", SERVED)
def test_products_are_those_of_float64_on_every_path_with_any_number_of_threads(path, type_name):
    c, tensor = library(path), matrix(type_name, N_ROWS, N)
    values, stored = float64(tensor), np.frombuffer(tensor.data, np.uint8).reshape(N_ROWS, -1)
    x = (np.random.default_rng(1).standard_normal((3, N)) + 0.5).astype(np.float32)
    assert c.serves_rows(tensor.type_id, N)
    results = []
    for threads in (1, 2, 3):
        c.set_threads(threads)
        for n_rows in (N_ROWS, 1, 2):
            results.append(c.products(row_matrix(tensor.type_id, stored[:n_rows], N), x))
            check_products(results[-1], values[:n_rows], x)
    assert all(np.array_equal(results[i], results[i % 3]) for i in range(9))


@pytest.mark.parametrize("type_name", SERVED)
def test_rows_are_looked_up_as_gguf_py_decodes_them(tmp_path, type_name):
    tensor = matrix(type_name, 41, N)
    ids = np.array([[0, 40, 7], [7, 1, 0]])
    found = rows_in_file(tmp_path, tensor).lookup(ids)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, float64(tensor)[ids])


@pytest.mark.parametrize("n_x", [1, 3, MOST_SINGLE_ROWS, MOST_SINGLE_ROWS + 1, 40])
@pytest.mark.parametrize("type_name", SERVED)
def test_any_number_of_rows_is_multiplied(tmp_path, monkeypatch, type_name, n_x):
    monkeypatch.setattr(packed_rows, "TILE_VALUES", 100 * N)  # several runs, the last one shorter
    tensor = matrix(type_name, N_ROWS, N)
    x = np.random.default_rng(2).standard_normal((n_x, N)).astype(np.float32)
    check_products(rows_in_file(tmp_path, tensor).products(x), float64(tensor), x)
    check_products(rows_in_file(tmp_path, tensor).products(x[:, ::-1]), float64(tensor), x[:, ::-1])


@pytest.mark.parametrize("type_name", SERVED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_when_the_rows_are_opened(tmp_path, type_name, bad):
    tensor = matrix(type_name, 5, N)
    stored = np.frombuffer(tensor.data, np.uint8).reshape(5, -1).copy()
    number = np.float32(bad)
    if type_name in ("F32", "BF16"):
        data = number.tobytes()[-(4 if type_name == "F32" else 2) :]
        at = [8]
    else:
        data = number.astype("<f2").tobytes()
        at = [stored.shape[1] - GGML_TYPES[tensor.type_id].block_bytes + at for at in SCALES_AT.get(type_name, [0])]
    for place in at:
        broken = stored.copy()
        broken[3, place : place + len(data)] = np.frombuffer(data, np.uint8)
        with pytest.raises(FormatError, match=r"tensor rows: expected finite values"):
            rows_in_file(tmp_path, Tensor(tensor.shape, tensor.type_id, broken.tobytes()))


def both(path: Path) -> tuple[LoadedModel, LoadedModel]:
    """A model as a CPU has it, and with everything in float32."""
    opened = open_model(path)
    return opened.load(), opened.load(form="dense")


def check_same_logits(kept: LoadedModel, dense: LoadedModel, tokens: list[int]) -> None:
    """Of one evaluation, of prompts that end in a few rows or many, and of single rows: within 1e-5 of the largest."""

    def check(found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())

    ids = mx.array([tokens])
    check(np.array(kept.model(ids)), np.array(dense.model(ids)))
    for n in {1, min(len(tokens), 128 + MOST_SINGLE_ROWS), len(tokens)}:
        sessions = [Session(loaded, CacheSpec("f32", "f32"), chunk=128) for loaded in (kept, dense)]
        check(*(session.prefill(tokens[:n]) for session in sessions))
        for token in (7, 200, 31):
            check(*(session.decode(token) for session in sessions))


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("type_name", ("Q8_0", "Q4_1", "F16", "BF16", "F32"))
@pytest.mark.parametrize("architecture", ("llama", "qwen2", "qwen3", "gemma3"))
def test_a_model_that_keeps_rows_in_the_file_has_the_dense_ones_logits(tmp_path, architecture, type_name, tied):
    # a hidden size whose root is not exact in bfloat16: gemma then has an input scale
    window = {"n_layers": 3, "window": 8, "window_pattern": 2, "hidden_size": 160} if architecture == "gemma3" else {}
    tokens = [(5 * i * i + 3 * i) % 280 for i in range(150)]
    kept, dense = both(write_tiny(tmp_path / "m.gguf", TinyModel(architecture, weights=type_name, tied=tied, **window)))
    check_same_logits(kept, dense, tokens)
    embedding = kept.model.model.embed_tokens
    if architecture == "gemma3":
        assert isinstance(embedding, InputEmbedding)
        embedding = embedding.embedding
    assert isinstance(embedding, RowsEmbedding)
    assert tied or isinstance(kept.model.lm_head, RowsLinear)
    assert all(type(layer) is RowsLayer for layer in kept.model.layers)
    assert all(array.ndim == 1 for _, array in tree_flatten(kept.model.parameters()))


@pytest.mark.parametrize("type_name", ("Q4_K", "Q5_K", "Q6_K"))
def test_rows_of_super_blocks_serve_a_model(tmp_path, type_name):
    model = TinyModel(hidden_size=256, intermediate_size=512)
    matrices = {
        name: matrix(type_name, *values.shape) for name, values in model_tensors(model).items() if values.ndim == 2
    }
    kept, dense = both(write_tiny(tmp_path / "m.gguf", model, None, matrices))
    assert isinstance(kept.model.model.embed_tokens, RowsEmbedding)
    assert all(type(layer) is RowsLayer for layer in kept.model.layers)
    check_same_logits(kept, dense, list(range(3, 140)))


@pytest.mark.parametrize("case", ORACLE_CASES)
def test_rope_with_factors_windows_and_norms_of_heads_are_in_every_layer(tmp_path, case):
    kept, dense = both(write_tiny(tmp_path / "m.gguf", ORACLE_CASES[case]))
    assert all(type(layer) is RowsLayer for layer in kept.model.layers)
    check_same_logits(kept, dense, ORACLE_TOKENS)


def test_matrices_of_types_that_are_not_served_stay_dense_and_their_layers_mlx_lms(tmp_path):
    odd = quantised(np.random.default_rng(5).standard_normal((256, 256)).astype(np.float32), "TQ2_0")
    model = TinyModel(embedding="TQ2_0", weights="Q8_0")
    kept, dense = both(write_tiny(tmp_path / "m.gguf", model, None, {"blk.1.attn_output.weight": odd}))
    assert type(kept.model.model.embed_tokens) is nn.Embedding
    first, second = kept.model.layers
    assert type(first) is RowsLayer and type(second) is not RowsLayer
    assert type(second.self_attn.o_proj) is nn.Linear and type(second.mlp.up_proj) is RowsLinear
    check_same_logits(kept, dense, list(range(9, 140)))


def test_an_embedding_that_is_only_looked_up_may_be_of_any_type(tmp_path):
    kept, dense = both(write_tiny(tmp_path / "m.gguf", TinyModel(embedding="TQ2_0", tied=False, weights="Q8_0")))
    assert isinstance(kept.model.model.embed_tokens, RowsEmbedding)
    check_same_logits(kept, dense, list(range(5, 140)))


def test_rows_outlive_the_file_that_was_opened(tmp_path):
    opened = open_model(write_tiny(tmp_path / "m.gguf", TinyModel(weights="Q8_0")))
    kept, dense = opened.load(), opened.load(form="dense")
    opened.file.close()
    (tmp_path / "m.gguf").unlink()
    del opened
    check_same_logits(kept, dense, [1, 2, 3])


def test_damaged_rows_are_one_line_when_the_model_is_loaded(tmp_path):
    infinite = Tensor((288, 256), NUMBERS["Q8_0"], np.full(288 * 8 * 17, 0x7C00, "<u2").tobytes())
    path = write_tiny(tmp_path / "m.gguf", TinyModel(weights="Q8_0"), None, {"token_embd.weight": infinite})
    with pytest.raises(FormatError, match=r"tensor token_embd\.weight: expected finite values"):
        open_model(path).load()


def test_a_slow_path_keeps_the_output_layer_dense(tmp_path, monkeypatch):
    monkeypatch.undo()
    path = write_tiny(tmp_path / "m.gguf", TinyModel(weights="Q8_0"))
    info = open_model(path).file.tensor("token_embd.weight")
    assert not is_served(library("portable"), info)
    assert type(open_model(path).load().model.model.embed_tokens) is nn.Embedding
    script = "import sys; from tqgguf.runtime.models.load import load_model; print(load_model(sys.argv[1]).model)"
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=os.environ | {"TQGGUF_CPU": "off"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "RowsEmbedding" not in result.stdout and "Embedding(288, 256)" in result.stdout


def test_mlx_lms_own_loop_chooses_the_dense_ones_tokens(tmp_path):
    kept, dense = both(write_tiny(tmp_path / "m.gguf", TinyModel("qwen3", weights="Q8_0")))
    prompt = mx.array(list(range(1, 60)))
    found, expected = (
        [int(token) for token, _ in generate_step(prompt, loaded.model, max_tokens=20)] for loaded in (kept, dense)
    )
    assert found == expected


def test_smollm2_chooses_the_dense_ones_tokens(smollm2):
    dense = open_model(embedded_model()).load(form="dense")
    prompt = smollm2.tokenizer.encode("The weather hut on the pass is")
    chosen = []
    for loaded in (smollm2, dense):
        session = Session(loaded, CacheSpec("turbo4", "turbo4"))
        logits, ids = session.prefill(prompt), []
        for _ in range(24):
            ids.append(int(logits.argmax()))
            logits = session.decode(ids[-1])
        chosen.append(ids)
    assert chosen[0] == chosen[1]


MEASURE = """
import resource, sys
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import load_model
import mlx.core as mx
mx.set_default_device(mx.cpu)
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session = Session(load_model(), CacheSpec("f16", "f16"))
session.prefill(range(1, 40))
session.decode(5)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


def test_a_model_takes_no_more_memory_than_its_file_twice():
    """The mapping's pages count too; float32 copies would be more than five times the file."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    slow = LIBRARY is not None and LIBRARY.path_name in SLOW_PATHS
    assert int(done.stdout) < (12 if slow else 2) * embedded_model().stat().st_size


def test_rows_are_a_view_of_the_mapping(tmp_path):
    values = np.random.default_rng(4).standard_normal((33, 64)).astype(np.float32)
    tensor = quantised(values, "Q8_0")
    rows = rows_in_file(tmp_path, tensor)
    assert not rows.stored.flags.owndata and not rows.stored.flags.writeable
    np.testing.assert_array_equal(rows.lookup([32]), float64(tensor)[[32]])

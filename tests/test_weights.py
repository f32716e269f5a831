"""Weights hold exactly what gguf-py decodes from the file, packed or dense; a model means the same in both forms."""

from __future__ import annotations

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf_builder import Tensor, build_gguf
from mlx.utils import tree_flatten
from tiny_models import ORACLE_TOKENS, TinyModel, write_tiny

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.matrices import HalfEmbedding, HalfLinear, InputEmbedding, half_product
from tqgguf.runtime.models.load import LoadedModel, open_model

TYPE_IDS = {t.name: i for i, t in GGML_TYPES.items()}
AFFINE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q4_K", "Q5_K")
PACKED = (*AFFINE, "MXFP4", "NVFP4")
BLOCK_TYPES = tuple(t.name for t in GGML_TYPES.values() if hasattr(gguf.quants, t.name) and t.name != "BF16")
F16_FIELDS = {  # byte offsets of a block's f16 scales
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "Q1_0": (0,),
}  # fmt: skip
EXTREMES = np.array([65504, -65504, 6.1e-5, 6e-8, -6e-8, 0.0, -0.0, 1.0], "<f2").view(np.uint8).reshape(-1, 2)
ROWS, COLUMNS = 24, 512


def blocks_of(name: str, seed: int = 0) -> np.ndarray:
    """Random bytes uint8 [rows, row bytes] of a type; the first blocks have the most extreme finite scales."""
    kind = GGML_TYPES[TYPE_IDS[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for at in F16_FIELDS.get(name, ()):
        scales = rng.standard_normal(len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
        scales[: len(EXTREMES)] = EXTREMES
        blocks[:, at : at + 2] = scales
    if name == "MXFP4":
        blocks[:, 0] = np.resize(np.arange(0xFE - 2), len(blocks))  # above, ggml's largest values are beyond float32
    if name == "NVFP4":
        blocks[:, :4] = np.resize(np.arange(0x7F), (len(blocks), 4))
    if name == "IQ1_M":  # its f16 scale is spread over the high nibbles of four words
        blocks[:, 49::2] &= 0x0F
    return blocks.reshape(ROWS, -1)


def file_with(tmp_path, name: str, data: np.ndarray, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> GGUFFile:
    path = tmp_path / f"{name}.gguf"
    tensor = Tensor(shape, TYPE_IDS[name], data.tobytes())
    path.write_bytes(build_gguf({"general.architecture": "llama"}, {"w.weight": tensor}))
    return open_gguf(path)


def reference(name: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_matrix_unpacks_to_exactly_what_gguf_py_decodes(tmp_path, name):
    data = blocks_of(name)
    packed = weights.packed(file_with(tmp_path, name, data), "w.weight")
    assert packed is not None
    found = mx.dequantize(
        packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits, packed.mode, dtype=mx.float32
    )
    np.testing.assert_array_equal(np.array(found), reference(name, data))


@pytest.mark.parametrize("name", AFFINE)
def test_affine_scales_are_float32_in_groups_of_32(tmp_path, name):
    packed = weights.packed(file_with(tmp_path, name, blocks_of(name)), "w.weight")
    assert packed.mode == "affine" and packed.group_size == 32
    assert packed.scales.dtype == packed.biases.dtype == mx.float32
    assert packed.scales.shape == packed.biases.shape == (ROWS, COLUMNS // 32)
    assert packed.weight.shape == (ROWS, COLUMNS * packed.bits // 32)


@pytest.mark.parametrize("name", [t for t in BLOCK_TYPES if t not in PACKED] + ["F32", "F16", "BF16"])
def test_a_type_without_an_exact_form_is_not_packed(tmp_path, name):
    n_bytes = ROWS * COLUMNS // GGML_TYPES[TYPE_IDS[name]].block_size * GGML_TYPES[TYPE_IDS[name]].block_bytes
    assert weights.packed(file_with(tmp_path, name, np.zeros(n_bytes, np.uint8)), "w.weight") is None


@pytest.mark.parametrize(("name", "scale"), [("MXFP4", 0xFF), ("NVFP4", 0x7F), ("NVFP4", 0x80)])
def test_a_scale_byte_that_mlx_reads_otherwise_is_not_packed(tmp_path, name, scale):
    data = blocks_of(name)
    data[-1, 0] = scale
    assert weights.packed(file_with(tmp_path, name, data), "w.weight") is None


def test_a_vector_is_never_packed(tmp_path):
    file = file_with(tmp_path, "Q8_0", blocks_of("Q8_0"), (ROWS * COLUMNS,))
    assert weights.packed(file, "w.weight") is None
    assert weights.dense(file, "w.weight").shape == (ROWS * COLUMNS,)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dense_equals_gguf_py_for_every_block_type(tmp_path, name):
    data = blocks_of(name)
    np.testing.assert_array_equal(weights.dense(file_with(tmp_path, name, data), "w.weight"), reference(name, data))


@pytest.mark.parametrize(("name", "dtype"), [("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2")])
def test_dense_equals_the_values_of_every_float_type(tmp_path, name, dtype):
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype("<f4")
    stored = (values.view("<u4") >> 16).astype("<u2") if name == "BF16" else values.astype(dtype)
    expected = (stored.astype("<u4") << 16).view("<f4") if name == "BF16" else stored.astype("<f4")
    found = weights.dense(file_with(tmp_path, name, stored), "w.weight")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ("Q4_1", "Q6_K", "MXFP4"))
def test_decoding_by_row_groups_changes_nothing(tmp_path, monkeypatch, name):
    file = file_with(tmp_path, name, blocks_of(name))
    whole, whole_packed = weights.dense(file, "w.weight"), weights.packed(file, "w.weight")
    monkeypatch.setattr(weights, "VALUES_AT_ONCE", 5 * COLUMNS)
    np.testing.assert_array_equal(weights.dense(file, "w.weight"), whole)
    if whole_packed is not None:
        packed = weights.packed(file, "w.weight")
        assert mx.array_equal(packed.weight, whole_packed.weight) and mx.array_equal(packed.scales, whole_packed.scales)


@pytest.mark.parametrize("name", ("I32", "Q8_1", "Q8_K"))
def test_a_type_that_cannot_be_decoded_is_named_in_one_line(tmp_path, name):
    kind = GGML_TYPES[TYPE_IDS[name]]
    file = file_with(tmp_path, name, np.zeros(ROWS * COLUMNS // kind.block_size * kind.block_bytes, np.uint8))
    with pytest.raises(UnsupportedModelError, match=rf"tensor w\.weight is of {name}, which cannot be decoded$"):
        weights.dense(file, "w.weight")


def test_an_unknown_type_is_named_in_one_line(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(build_gguf({"general.architecture": "llama"}, {"w.weight": Tensor((32, 32), 4711, bytes(1024))}))
    with pytest.raises(UnsupportedModelError, match=r"type 4711 \(newer or fork type\), which cannot be decoded$"):
        weights.dense(open_gguf(path), "w.weight")


@pytest.mark.parametrize("name", ("Q4_K", "Q8_0"))
@pytest.mark.parametrize("read", (weights.dense, weights.packed))
def test_a_scale_that_is_not_finite_is_a_damaged_file(tmp_path, name, read):
    data = blocks_of(name)
    data[3, :2] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(FormatError, match=r"tensor w\.weight: expected finite values, found (nan|inf|-inf); .*damaged"):
        read(file_with(tmp_path, name, data), "w.weight")


def test_a_value_that_is_not_finite_is_a_damaged_file(tmp_path):
    data = np.ones((ROWS, COLUMNS), "<f4")
    data[5, 7] = np.nan
    with pytest.raises(FormatError, match=r"tensor w\.weight: expected finite values, found nan; .*damaged"):
        weights.dense(file_with(tmp_path, "F32", data), "w.weight")


@pytest.mark.parametrize("name", ("F16", "Q6_K", "Q2_K", "IQ3_S"))
def test_half_matrices_are_the_dense_values_rounded_to_float16(tmp_path, monkeypatch, name):
    data = (np.arange(ROWS * COLUMNS) / 999).astype("<f2") if name == "F16" else blocks_of(name)
    file = file_with(tmp_path, name, data)
    if name != "F16":  # random scales of K types reach beyond float16
        with pytest.raises(
            UnsupportedModelError, match=r"tensor w\.weight: \S+ is beyond float16, in which a GPU holds it"
        ):
            weights.half(file, "w.weight", mx.float16)
        small = data.reshape(-1, GGML_TYPES[TYPE_IDS[name]].block_bytes)
        for at in F16_FIELDS[name]:
            small[:, at : at + 2] = np.array([0.01], "<f2").view(np.uint8)
        file = file_with(tmp_path, name, small)
    monkeypatch.setattr(weights, "VALUES_AT_ONCE", 5 * COLUMNS)
    expected = weights.dense(file, "w.weight").astype(np.float16)
    np.testing.assert_array_equal(np.array(weights.half(file, "w.weight", mx.float16)), expected)


def test_a_bfloat16_matrix_keeps_its_bits(tmp_path):
    data = np.random.default_rng(2).integers(0, 0x7F00, ROWS * COLUMNS).astype("<u2")
    found = weights.half(file_with(tmp_path, "BF16", data), "w.weight", mx.bfloat16)
    assert found.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(found.view(mx.uint16)).reshape(-1), data)


def test_large_values_that_are_finite_pass(tmp_path):
    data = np.full((ROWS, COLUMNS), 3e38, "<f4")
    np.testing.assert_array_equal(weights.dense(file_with(tmp_path, "F32", data), "w.weight"), data)


# Models: `form` stands for the device, so that what runs on a GPU is tested on a CPU.


def logits(loaded: LoadedModel) -> np.ndarray:
    return np.array(loaded.model(mx.array([ORACLE_TOKENS])).astype(mx.float32))[0]


def both(tmp_path, model: TinyModel) -> tuple[LoadedModel, LoadedModel]:
    opened = open_model(write_tiny(tmp_path / "tiny.gguf", model))
    return opened.load(form="dense"), opened.load(form="packed")


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"))
@pytest.mark.parametrize("architecture", ("llama", "qwen2", "gemma3"))
def test_a_packed_model_means_the_same_as_the_dense_one(tmp_path, architecture, name):
    window = {"n_layers": 3, "window": 8, "window_pattern": 2} if architecture == "gemma3" else {}
    dense, packed = both(tmp_path, TinyModel(architecture, weights=name, tied=architecture != "llama", **window))
    assert relative(logits(packed), logits(dense)) < 1e-5
    assert isinstance(packed.model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    assert packed.model(mx.array([[1]])).dtype == mx.float32


@pytest.mark.parametrize(
    ("embedding", "matrices"), [("F16", "Q8_0"), ("TQ2_0", "Q4_0"), ("Q8_0", "F16"), ("BF16", "F16")]
)
def test_half_matrices_beside_packed_ones_keep_float32_activations(tmp_path, embedding, matrices):
    dense, packed = both(tmp_path, TinyModel("llama", weights=matrices, embedding=embedding))
    assert relative(logits(packed), logits(dense)) < 2e-3
    assert packed.model.model.embed_tokens(mx.array([1])).dtype == mx.float32
    assert packed.model(mx.array([[1]])).dtype == mx.float32
    halves = [m for m in packed.model.modules() if isinstance(m, HalfLinear | HalfEmbedding)]
    assert halves and all(m.weight.dtype == mx.float16 for m in halves)


@pytest.mark.parametrize(("name", "dtype"), [("F16", mx.float16), ("BF16", mx.bfloat16)])
@pytest.mark.parametrize("architecture", ("qwen3", "gemma3"))
def test_a_model_of_one_half_type_runs_in_that_type(tmp_path, architecture, name, dtype):
    dense, packed = both(tmp_path, TinyModel(architecture, weights=name, head_dim=128))
    assert {value.dtype for _, value in tree_flatten(packed.model.parameters())} == {dtype}
    assert packed.model(mx.array([[1]])).dtype == dtype
    assert relative(logits(packed), logits(dense)) < (0.01 if dtype == mx.float16 else 0.08)


def test_float32_matrices_stay_float32_in_both_forms(tmp_path):
    dense, packed = both(tmp_path, TinyModel("llama"))
    np.testing.assert_array_equal(logits(packed), logits(dense))


def test_an_embedding_in_mx_form_gives_float32(tmp_path):
    dense, packed = both(tmp_path, TinyModel("llama", weights="MXFP4"))
    embedding, ids = packed.model.model.embed_tokens, mx.array([1, 200])
    assert isinstance(embedding, InputEmbedding)
    np.testing.assert_array_equal(np.array(embedding(ids)), np.array(dense.model.model.embed_tokens(ids)))


@pytest.mark.parametrize("size", (1e-20, 1.0, 1e6, 1e20))
def test_half_products_lose_no_range_beyond_float16(size):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 256)) * size).astype(np.float32)
    w = (rng.standard_normal((64, 256)) / 16).astype(np.float16)
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    found = np.array(half_product(mx.array(x), mx.array(w)))
    assert relative(found / size, expected / size) < 1e-3


def test_a_half_product_of_zeros_is_zero():
    zeros = half_product(mx.zeros((2, 64)), mx.ones((8, 64), dtype=mx.float16))
    np.testing.assert_array_equal(np.array(zeros), np.zeros((2, 8), np.float32))

"""A layer's work around its attention, and rows decoded, by the C library: what numpy computes in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
from c_paths import C_PATHS, LIBRARY, library
from gguf_rows import NUMBERS, SERVED, float64, matrix
from numpy.typing import NDArray

from tqgguf.runtime.native.library import ACTIVATIONS, Layer, address, row_matrix

Array = NDArray[np.float64]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, EPSILON = 8, 2, 64, 256, 512, 1e-5


@pytest.fixture(autouse=True)
def library_as_before() -> Iterator[None]:
    yield
    assert LIBRARY is not None and LIBRARY.select_path("")
    LIBRARY.set_threads(0)


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize("type_name", SERVED)
def test_rows_are_decoded_to_gguf_pys_values(path: str, type_name: str) -> None:
    tensor = matrix(type_name, 300, 768)
    stored = np.frombuffer(tensor.data, np.uint8).reshape(300, -1)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[type_name])
    found = library(path).decode_rows(row_matrix(tensor.type_id, stored[1:], 768))
    np.testing.assert_array_equal(found, expected[1:])


@dataclass
class Case:
    """A layer: its matrices' types, and what it has beside them."""

    types: tuple[str, ...] = ("Q4_1",) * 7
    neighbours: bool = True
    activation: str = "silu"
    biases: bool = False
    head_norms: bool = False
    four_norms: bool = False
    kept: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        width, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = [(width, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, width), *[(INNER, HIDDEN)] * 2, (HIDDEN, INNER)]
        tensors = [matrix(name, *shape) for name, shape in zip(self.types, shapes, strict=True)]
        self.matrices = [float64(tensor) for tensor in tensors]
        self.bias = [rng.normal(0, 0.5, n).astype(np.float32) if self.biases else None for n, _ in shapes]
        names = ["input_norm", "mlp_norm"]
        names += ["attention_norm", "output_norm"] * self.four_norms + ["q_norm", "k_norm"] * self.head_norms
        self.norms = {
            name: rng.normal(1, 0.2, HEAD_DIM if name[1] == "_" else HIDDEN).astype(np.float32) for name in names
        }
        stored = [np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1) for tensor in tensors]
        self.kept = [*stored, *self.norms.values(), *(b for b in self.bias if b is not None)]
        q, k, v, o, gate, up, down = (
            row_matrix(tensor.type_id, rows, n, bias)
            for tensor, rows, (_, n), bias in zip(tensors, stored, shapes, self.bias, strict=True)
        )
        self.layer = Layer(
            qkv=(q, k, v), o=o, gate_up=(gate, up), down=down,
            **{name: address(norm) for name, norm in self.norms.items()},
            n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, neighbours=self.neighbours,
            activation=ACTIVATIONS[self.activation], epsilon=EPSILON,
        )  # fmt: skip

    def product(self, i: int, x: Array) -> Array:
        bias = self.bias[i]
        return x @ self.matrices[i].T + (0 if bias is None else bias)

    def norm(self, name: str, x: Array) -> Array:
        if name not in self.norms:
            return x
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * self.norms[name]

    def begin(self, x: Array, turns: Array) -> list[Array]:
        normal = self.norm("input_norm", x)
        parts = [self.product(i, normal).reshape(len(x), -1, HEAD_DIM).swapaxes(0, 1) for i in range(3)]
        q, k = (
            self.turn(self.norm(name, part), turns) for name, part in zip(("q_norm", "k_norm"), parts, strict=False)
        )
        return [q, k, parts[2]]

    def turn(self, x: Array, turns: Array) -> Array:
        half = HEAD_DIM // 2
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.neighbours else (slice(half), slice(half, None))
        cos, sin, out = turns[:, 0], turns[:, 1], x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def end(self, x: Array, attention: Array) -> Array:
        rows = attention.swapaxes(0, 1).reshape(len(x), -1)
        x = x + self.norm("attention_norm", self.product(3, rows))
        normal = self.norm("mlp_norm", x)
        gate = self.product(4, normal)
        if self.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return x + self.norm("output_norm", self.product(6, gate * self.product(5, normal)))


CASES = {
    "llama": Case(),
    "qwen2": Case(("Q4_0",) * 7, neighbours=False, biases=True),
    "qwen3": Case(("Q6_K", "F16", "Q8_0", "F32", "Q5_0", "Q5_1", "Q5_K"), neighbours=False, head_norms=True),
    "gemma3": Case(("Q4_K",) * 7, neighbours=False, activation="gelu", head_norms=True, four_norms=True),
}


def close(found: np.ndarray, expected: Array) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("n_rows", [1, 2, 8])
def test_both_halves_of_a_layer_are_float64s_with_any_number_of_threads(path: str, case: Case, n_rows: int) -> None:
    rng = np.random.default_rng(n_rows)
    x = (3 * rng.standard_normal((n_rows, HIDDEN))).astype(np.float32)
    angles = rng.uniform(0, 7, (n_rows, HEAD_DIM // 2))
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    attention = rng.standard_normal((HEADS, n_rows, HEAD_DIM)).astype(np.float32)
    c, results = library(path), []
    for threads in (1, 2, 3):
        c.set_threads(threads)
        results.append([*c.layer_begin(case.layer, x, turns), c.layer_end(case.layer, x, attention)])
    wide = x.astype(np.float64)
    expected = [*case.begin(wide, turns.astype(np.float64)), case.end(wide, attention.astype(np.float64))]
    for found, right in zip(results[0], expected, strict=True):
        close(found, right)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("path", C_PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size_have_a_finite_activation(path: str, activation: str) -> None:
    case = Case(("F32",) * 7, activation=activation)
    gate, up, down = (np.eye(n, m, dtype=np.float32) for n, m in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)))
    up[:, 0] = 1  # one value of x that every gate is multiplied by
    for field_, rows in (("gate_up", (gate, up)), ("down", (down,))):
        matrices = tuple(row_matrix(NUMBERS["F32"], m, m.shape[1]) for m in rows)
        setattr(case.layer, field_, matrices if len(matrices) > 1 else matrices[0])
    case.matrices[4:] = [m.astype(np.float64) for m in (gate, up, down)]
    x = np.concatenate([[1e-3], np.geomspace(1e-8, 1e4, 127), -np.geomspace(1e-8, 1e4, 128)]).astype(np.float32)[None]
    nothing = np.zeros((HEADS, 1, HEAD_DIM), np.float32)
    found = library(path).layer_end(case.layer, x, nothing)
    assert np.isfinite(found).all()
    with np.errstate(over="ignore"):
        close(found, case.end(x.astype(np.float64), nothing.astype(np.float64)))


def test_other_lengths_and_types_are_not_served() -> None:
    assert LIBRARY is not None
    assert not any(LIBRARY.serves_rows(NUMBERS[t], 576) for t in ("Q4_K", "Q5_K", "Q6_K"))
    assert not any(LIBRARY.serves_rows(NUMBERS[t], n) for t in SERVED for n in (0, -256, 16, 100))
    assert not any(LIBRARY.serves_rows(number, 256) for name, number in NUMBERS.items() if name not in SERVED)

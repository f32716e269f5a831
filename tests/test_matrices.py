"""Products with a GGUF's matrices on a GPU, by the kernels' exact Metal text on the emulator, beside float64 products
of gguf-py's values."""

from __future__ import annotations

import re
from collections.abc import Iterable

import mlx.core as mx
import numpy as np
import pytest
from emulator import exporter
from emulator.checked import CheckedLauncher, FrontEndLauncher
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.kernels import matrices
from tqgguf.runtime.kernels.geometry import FAMILIES, product_walk
from tqgguf.runtime.kernels.launch import Kernel, text_of
from tqgguf.runtime.kernels.matrices import MATRIX_TYPES, arrange, decode_matrix, is_multiplied, multiply
from tqgguf.runtime.selftest import Case, Outcome
from tqgguf.runtime.selftest_matrices import NUMBERS, PRODUCTS, matrix_cases, random_blocks, values_of

# Between them: nibbles, two planes of them, codes of two bits and of one, minima, both group sizes, a table.
SOME = ("Q8_0", "Q6_K", "Q5_1", "IQ4_XS")


def launcher(family: str = "metal", seed: int = 1) -> CheckedLauncher:
    return CheckedLauncher(seed, family, ("CUDA_ELEMENTS",) if family == "cuda" else ())


def failures(cases: Iterable[Case]) -> list[Outcome]:
    found = [case.run() for case in cases]
    assert found
    return [outcome for outcome in found if not outcome.passed]


@pytest.mark.parametrize("name", SOME)
def test_rows_and_products_are_those_of_gguf_pys_values(name: str) -> None:
    assert failures(matrix_cases(launcher(), (name,), ())) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MATRIX_TYPES)
def test_every_type_in_every_way_and_with_both_layouts_of_matrix_elements(name: str, family: str) -> None:
    assert failures(matrix_cases(launcher(family), (name,))) == []


def test_products_of_several_rows_with_gates_and_with_rows_that_are_added() -> None:
    assert failures(matrix_cases(launcher(), ("Q4_K",), PRODUCTS)) == []


@pytest.mark.parametrize("name", ["Q4_K"])
def test_the_product_is_the_same_with_cudas_layout_of_matrix_elements(name: str) -> None:
    assert failures(matrix_cases(launcher("cuda"), (name,), ())) == []


def test_no_product_depends_on_the_schedule() -> None:
    assert failures(matrix_cases(launcher(seed=5), ("Q8_0",), ())) == []


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "metal" else pytest.mark.slow) for name in FAMILIES]
)
def test_clang_takes_every_type(family: str) -> None:
    looking = FrontEndLauncher(family)
    for name in MATRIX_TYPES:
        matrix = arrange(looking, NUMBERS[name], 512, mx.array(random_blocks(name, 32, 512)))
        decode_matrix(looking, matrix, mx.bfloat16)
        for dtype in (mx.float16, mx.bfloat16):
            for n, gate in ((1, "silu"), (16, None)):
                multiply(looking, mx.zeros((n, 512), dtype=dtype), matrix, gate=gate)
    assert len(looking.seen) == len(MATRIX_TYPES) * 6


@pytest.mark.parametrize("name", MATRIX_TYPES)
def test_a_matrix_takes_the_bytes_that_it_takes_in_its_file(name: str) -> None:
    looking = FrontEndLauncher("metal")
    blocks = random_blocks(name, 32, 512)
    assert arrange(looking, NUMBERS[name], 512, mx.array(blocks)).planes.nbytes == blocks.nbytes


def test_arranging_keeps_every_bit() -> None:
    """Each bit of a block that is turned over turns one over in the planes, and each of the planes is reached."""
    blocks = random_blocks("Q5_K", 16, 256)
    of = EmulatedLauncher()

    def planes(changed: np.ndarray) -> np.ndarray:
        return np.array(arrange(of, NUMBERS["Q5_K"], 256, mx.array(changed)).planes).view(np.uint8)

    before, reached = planes(blocks), np.zeros(blocks.nbytes, np.uint8)
    for bit in range(8):
        turned = planes(blocks ^ np.uint8(1 << bit)) ^ before
        assert np.unpackbits(turned).sum() == blocks.nbytes
        reached |= turned
    assert (reached == 255).all()


def test_types_have_ggmls_numbers_in_the_text() -> None:
    found = re.search(r"enum Weights : int \{ (.*?) \};", text_of("matrix_fields.metal"))
    assert found
    in_text = {name: int(n) for name, n in (item.split(" = ") for item in found.group(1).split(", "))}
    assert in_text == {name: NUMBERS[name] for name in MATRIX_TYPES}


@pytest.mark.parametrize("name", MATRIX_TYPES)
def test_blocks_have_the_texts_sizes(name: str) -> None:
    kind = GGML_TYPES[NUMBERS[name]]
    assert matrices._step_words(NUMBERS[name]) * 4 * kind.block_size == 1024 * kind.block_bytes


def test_the_barrier_before_sums_are_joined_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, body = "threadgroup_barrier(mem_flags::mem_threadgroup);", Kernel.body

    def without(self: Kernel) -> str:
        text = body(self)
        at = text.rfind(barrier)
        return text if at < 0 else text[:at] + text[at + len(barrier) :]

    monkeypatch.setattr(Kernel, "body", without)
    for cached in (exporter._text, exporter.metal_kernel):
        cached.cache_clear()
    try:
        (outcome,) = [case.run() for case in matrix_cases(launcher(), ("Q4_K",), ()) if case.operation == "product"]
        assert "race" in (outcome.problem or "") or "unwritten" in (outcome.problem or "")
    finally:
        for cached in (exporter._text, exporter.metal_kernel):
            cached.cache_clear()


def test_a_wrong_bit_shows() -> None:
    blocks = random_blocks("Q6_K", 40, 512)
    x = mx.array(np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)).astype(mx.bfloat16)
    damaged = blocks.copy()
    damaged[3, 17] ^= 4
    of = EmulatedLauncher()
    products = [
        np.array(multiply(of, x, arrange(of, NUMBERS["Q6_K"], 512, mx.array(each)), dtype=mx.float32))[0]
        for each in (blocks, damaged)
    ]
    change = (values_of("Q6_K", damaged) - values_of("Q6_K", blocks)) @ np.array(x.astype(mx.float32))[0]
    assert np.flatnonzero(products[1] != products[0]).tolist() == [3]
    np.testing.assert_allclose(products[1] - products[0], change, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "served"),
    [
        ("Q4_K", (48, 512), True),
        ("Q8_0", (1, 64), True),
        ("Q8_0", (48, 96), False),
        ("F16", (48, 512), False),
        ("Q4_K", (512,), False),
        ("Q4_0", (0, 64), False),
        ("NVFP4", (48, 512), False),
    ],
)
def test_which_matrices_are_multiplied(name: str, shape: tuple[int, ...], served: bool) -> None:
    assert is_multiplied(name, shape) is served


@pytest.mark.parametrize("family", FAMILIES)
def test_simdgroups_of_a_product_have_something_to_do(family: str) -> None:
    for n_tiles, n_steps, steps in ((1, 1, 1), (256, 64, 4), (8016, 64, 4), (256, 224, 2)):
        walk = product_walk(FAMILIES[family], (n_tiles, n_steps), steps, gated=False)
        assert walk.simdgroups * walk.steps <= n_steps
        assert walk.simdgroups <= FAMILIES[family].product_simdgroups[2]

"""The GPU kernels' exact Metal text, on the emulator: it computes what numpy does, and clang accepts it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from covering import pairwise
from emulator import exporter
from emulator.checked import CheckedLauncher
from emulator.exporter import metal_text
from emulator.front_end import complaints
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime import selftest
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.kernels import decode_plan, types
from tqgguf.runtime.kernels.geometry import FAMILIES, SUMS_WORDS, decode_geometry
from tqgguf.runtime.kernels.launch import Kernel, text_of
from tqgguf.runtime.kernels.pages import ENCODE, encode_pages
from tqgguf.runtime.selftest import SHAPES, Case, Outcome

ONE_ROW, FIVE_ROWS, IN_A_WINDOW, FIRST_PAGE, LONG_STEP = SHAPES


def backend(seed: int = 1, family: str = "metal") -> KernelBackend:
    return KernelBackend(CheckedLauncher(seed, family, ("CUDA_ELEMENTS",) if family == "cuda" else ()))


def failures(cases: Iterable[Case]) -> list[Outcome]:
    found = [case.run() for case in cases]
    assert found
    return [outcome for outcome in found if not outcome.passed]


# Pairs, head sizes and steps that between them reach every branch of the text; the full product is slow.
SOME = [
    ("turbo4", "turbo3", 128, SHAPES),
    ("turbo3", "turbo4", 64, (IN_A_WINDOW,)),
    ("turbo2", "turbo3", 96, (ONE_ROW,)),
    ("q8_0", "q4_0", 64, (FIVE_ROWS,)),
    ("q4_0", "q8_0", 128, (ONE_ROW,)),
    ("f16", "turbo2", 192, (ONE_ROW, LONG_STEP)),
    ("turbo4", "f16", 64, (IN_A_WINDOW, LONG_STEP)),
    ("turbo4", "turbo3", 64, [replace(LONG_STEP, dtype=dtype) for dtype in (mx.bfloat16, mx.float32)]),
]


@pytest.mark.parametrize(("type_k", "type_v", "head_dim", "shapes"), SOME)
def test_attention_equals_float64_attention(type_k: str, type_v: str, head_dim: int, shapes: tuple) -> None:
    assert failures(selftest.attention_cases(backend(), head_dim, type_k, type_v, shapes)) == []


@pytest.mark.parametrize(("type_k", "type_v", "head_dim"), [("turbo2", "turbo3", 96)])
def test_a_batch_equals_float64_attention(type_k: str, type_v: str, head_dim: int) -> None:
    assert failures(selftest.batch_cases(backend(), head_dim, type_k, type_v)) == []


@pytest.mark.parametrize(("type_k", "type_v", "head_dim"), [("f16", "f16", 128), ("f16", "turbo3", 64)])
def test_a_compiled_step_equals_float64_attention(type_k: str, type_v: str, head_dim: int) -> None:
    assert failures(selftest.compiled_cases(backend(), head_dim, type_k, type_v)) == []


@pytest.mark.parametrize("head_dim", [96])
def test_pages_are_encoded_and_decoded_as_numpy_does(head_dim: int) -> None:
    assert failures(selftest.codec_cases(backend(), head_dim)) == []


@pytest.mark.parametrize("seed", [2, 3])
def test_no_answer_depends_on_the_schedule(seed: int) -> None:
    assert failures(selftest.codec_cases(backend(seed), 96)) == []
    assert failures(selftest.attention_cases(backend(seed), 128, "turbo4", "turbo3", (ONE_ROW,))) == []


@pytest.mark.parametrize(("type_k", "type_v"), [("turbo4", "turbo3"), ("turbo3", "turbo2")])
def test_the_answer_is_the_same_with_cudas_layout_of_matrix_elements_and_tables(type_k: str, type_v: str) -> None:
    assert failures(selftest.attention_cases(backend(family="cuda"), 128, type_k, type_v, (ONE_ROW,))) == []


HEAD_DIMS = (*selftest.HEAD_DIMS, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", pairwise(list(types.KERNEL_TYPES), list(types.KERNEL_TYPES), HEAD_DIMS, SHAPES), ids=str
)
def test_any_two_of_types_head_size_and_step_together(case: tuple) -> None:
    type_k, type_v, head_dim, shape = case
    found = [case.run() for case in selftest.attention_cases(backend(), head_dim, type_k, type_v, (shape,))]
    assert [outcome for outcome in found if not outcome.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pages_of_every_head_size(head_dim: int) -> None:
    assert failures(selftest.codec_cases(backend(), head_dim)) == []


@pytest.mark.parametrize("cache_type", ["turbo4", "turbo3", "turbo2", "q8_0", "q4_0"])
def test_encoded_pages_have_the_bytes_of_numpys_codec(cache_type: str) -> None:
    # sums differ in their order only, so that a code on a boundary or a last bit of a norm may
    codec = resolve_codec(cache_type, 64, "k")
    rows = mx.array(np.random.default_rng(8).standard_normal((2, 256, 64)).astype(np.float16))
    found = encode_pages(EmulatedLauncher(), codec, rows)
    expected = NumpyBackend().encode_pages(codec, rows, n_skipped=0, centred=False, scale=None)
    assert [(a.shape, a.dtype) for a in found[:2]] == [(b.shape, b.dtype) for b in expected[:2]]
    assert np.mean(np.asarray(found[0]) != np.asarray(expected[0])) < 1e-4
    assert np.abs(np.asarray(found[1]).view(np.int16) - np.asarray(expected[1]).view(np.int16)).max() <= 1


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@contextmanager
def lacking_a_barrier(kernel: Kernel, which: int, n_barriers: int) -> Iterator[None]:
    """Kernels without one of the barriers that stand in a kernel's body and in its parts, counted in this order."""
    body, header = Kernel.body, Kernel.header

    def without(found: str, index: int) -> str:
        parts = found.split(BARRIER)
        return (
            BARRIER.join(parts[: index + 1]) + ";" + BARRIER.join(parts[index + 1 :])
            if 0 <= index < len(parts) - 1
            else found
        )

    n_in_body = kernel.body().count(BARRIER)
    assert n_in_body + sum(text_of(part).count(BARRIER) for part in kernel.parts) == n_barriers
    with pytest.MonkeyPatch.context() as patch:
        if which < n_in_body:
            patch.setattr(Kernel, "body", lambda self: without(body(self), which))
        else:
            patch.setattr(Kernel, "header", lambda self, family: without(header(self, family), which - n_in_body))
        for cached in (exporter._text, exporter.metal_kernel):
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in (exporter._text, exporter.metal_kernel):
                cached.cache_clear()


@pytest.mark.parametrize("which", range(4))
def test_every_barrier_of_decode_attention_is_needed(which: int) -> None:
    with lacking_a_barrier(decode_plan.ATTENTION, which, 4):
        outcomes = failures(selftest.attention_cases(backend(), 256, "turbo4", "turbo4", (ONE_ROW,)))
    assert "race" in (outcomes[0].problem or "") or "unwritten" in (outcomes[0].problem or "")


@pytest.mark.parametrize("which", range(4))
def test_every_barrier_of_encoding_is_needed(which: int) -> None:
    rows = mx.array(np.random.default_rng(9).standard_normal((1, 128, 64)).astype(np.float16))
    codec = resolve_codec("turbo4", 64, "k")
    with lacking_a_barrier(ENCODE, which, 4), pytest.raises(Exception, match=r"race|unwritten"):
        mx.eval(*encode_pages(EmulatedLauncher(), codec, rows, n_skipped=4, centred=True)[:2])


def test_numbers_of_the_text_and_of_python_agree() -> None:
    text = text_of("codes.metal")
    found = re.search(r"enum Type : int \{ (.*?) \};", text)
    assert found
    numbers = {name.lower(): int(n) for name, n in (item.split(" = ") for item in found.group(1).split(", "))}
    assert numbers == types.KERNEL_TYPES
    assert f"larger(SIMDGROUPS * 32, {SUMS_WORDS})" in text_of("decode_attention.metal")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_geometry_fits_into_threadgroup_memory(family: str) -> None:
    # what the launch table can choose, for all head sizes and groups of query columns
    names = [name for name in types.KERNEL_TYPES if name in BLOCK_TYPES]
    for head_dim in (32, 64, 96, 128, 192, 256, 320, 384, 512):
        for type_k in names:
            for type_v in names:
                if any(
                    head_dim % 128 and head_dim not in (64, 96, 192) and t.startswith("turbo") for t in (type_k, type_v)
                ):
                    continue
                k, v = resolve_codec(type_k, head_dim, "k"), resolve_codec(type_v, head_dim, "v")
                for n_columns in (1, 4, 8, 9, 32, 64, 200):
                    geometry = decode_geometry(FAMILIES[family], k, v, n_columns)
                    assert geometry.walk.simdgroups * 32 <= 1024
                    declared, at_launch = geometry.at_launch
                    assert (declared, at_launch) == declared_bytes(geometry, k, v)
                    assert declared + at_launch <= FAMILIES[family].shared_bytes


def test_larger_heads_than_fit_are_left_to_operations_of_mlx() -> None:
    codecs = [resolve_codec("turbo4", n, "k") for n in (512, 640, 768)]
    assert [types.is_supported(codec) for codec in codecs] == [True, False, False]
    backend = KernelBackend(EmulatedLauncher())  # which must not hold as tiles what it cannot read
    assert [backend.tiles_values(codec) for codec in codecs] == [True, False, False]


def declared_bytes(geometry, k, v) -> tuple[int, int]:
    """Threadgroup memory by the declarations of decode_attention.metal: but for the tables, and of the tables."""
    tables = [
        copies << 2 * types.bits_of(codec) if types.bits_of(codec) else 0
        for copies, codec in ((geometry.k_copies, k), (geometry.v_copies, v))
    ]
    if geometry.one_table:
        tables[1] = 0
    columns, simdgroups = 8 * geometry.column_tiles, geometry.walk.simdgroups
    room = max(256 * 64 if geometry.table_rows else sum(tables), 32 * simdgroups, SUMS_WORDS)
    return 2 * 2 * columns * k.head_dim + 4 * columns * 2 * (1 + simdgroups), 4 * room


def test_a_kernel_is_refused_what_the_front_end_cannot_read() -> None:
    # that the checks above see the text at all
    text = metal_text(
        decode_plan.MERGE,
        {
            **{name: mx.zeros((8,)) for name in ("sums", "statistics", "v_signs", "sinks")},
            "sizes": mx.zeros((32,), dtype=mx.int32),
        },
        (("T", mx.float16), ("V_DIM", 64), ("V_ROTATION", 64), ("TILES", 1), ("SINKS", False), ("BATCHED", False)),
        decode_plan.Threads((1, 1, 1), 4),
        [((8,), mx.float16)],
    )
    assert complaints(text) == []
    assert complaints(text.replace("device T*", "T*").replace("joined[", "joined_[")) != []

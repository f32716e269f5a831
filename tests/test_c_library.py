"""The C library makes numpy's bytes, decodes to numpy's values, and attends like float64 on every path."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attention_reference import as_blocks, as_float, attention
from c_paths import C_PATHS, c_reading, library

from tqgguf.formats.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.cache_spec import default_prefix
from tqgguf.formats.codec import Codec, resolve_codec
from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.runtime import hook
from tqgguf.runtime.attention import attend
from tqgguf.runtime.kv_cache import BlockKVCache
from tqgguf.runtime.kv_sides import PAGE, SideView
from tqgguf.runtime.native.library import load_library
from tqgguf.runtime.readings import NumpyReading, Reads

BLOCK_TYPE_NAMES = [t for t in CACHE_TYPE_NAMES if t not in ("f32", "f16", "bf16")]
ENCODED = ("turbo4", "turbo3", "turbo2", "q8_0", "q4_0")
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 320, 512)

pytestmark = pytest.mark.parametrize("path", C_PATHS)


def codecs(names: list[str] | tuple[str, ...]) -> Iterator[Codec]:
    for name in names:
        for head_dim in HEAD_DIMS:
            for side in ("k", "v"):
                try:
                    yield resolve_codec(name, head_dim, side)
                except RequestError:  # turbo types have no blocks for this head size
                    continue


def inputs(head_dim: int) -> dict[str, np.ndarray]:
    """float32 rows [2, 37, head_dim]: an odd number of rows leaves lanes of a vector empty."""
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((2, 37, head_dim)).astype(np.float32)
    zeros = x.copy()
    zeros[0, 3] = 0.0
    zeros[0, 4] = -0.0
    zeros[1, 5, ::2] = 0.0
    spikes = np.zeros_like(x)
    spikes[:, :, 0] = 1e3
    spikes[1, :, -1] = -1e3
    powers = np.ldexp(np.float32(1), rng.integers(-20, 15, x.shape)).astype(np.float32) * np.sign(x)
    return {
        "normal": x,
        "zeros": zeros,
        "spikes": spikes,
        "ties": np.round(x * 4) / 4,
        "powers": powers,
        "constant": np.full_like(x, -0.75),
        "subnormal halves": x * np.float32(1e-6),
        "tiny": x * np.float32(1e-12),
        "subnormal": x * np.float32(1e-41),
        "norm beyond f16": x * np.float32(6e4),
        "huge": x * np.float32(1e30),
        "squares overflow": x * np.float32(3e37),
    }


def test_encoding_makes_the_bytes_of_numpy_for_every_type_size_and_kind_of_value(path: str) -> None:
    c, wrong = library(path), []
    for codec in codecs(ENCODED):
        for name, values in inputs(codec.head_dim).items():
            for dtype in (np.float32, np.float16):
                with np.errstate(over="ignore"):
                    rows = values.astype(dtype)
                try:
                    codes, scales = codec.split(codec.encode(rows))
                except EncodeError:
                    if c.encode(codec, rows) is not None:
                        wrong.append((codec, name, dtype, "not refused"))
                    continue
                encoded = c.encode(codec, rows)
                assert encoded is not None
                if encoded[0].tobytes() != codes.tobytes() or encoded[1].tobytes() != scales.tobytes():
                    wrong.append((codec, name, dtype, "other bytes"))
    assert wrong == []


def test_values_on_a_boundary_and_their_neighbours_are_coded_like_numpys(path: str) -> None:
    # 16 rotated values are stepped through every boundary's neighbourhood, the others fill up the norm to 1
    c = library(path)
    for name in ("turbo2", "turbo3", "turbo4"):
        codec = resolve_codec(name, 128, "k")
        assert codec.boundaries is not None and codec.rotation is not None
        targets = np.concatenate([np.nextafter(codec.boundaries, s, dtype=np.float32) for s in (-np.inf, 0, np.inf)])
        rows = np.stack([np.where(np.arange(128) < 16, t, np.sqrt((1 - 16 * t * t) / 112)) for t in targets])
        rows = codec.rotation.inverse(rows)[None]
        codes, scales = codec.split(codec.encode(rows))
        encoded = c.encode(codec, rows)
        assert encoded is not None
        assert np.array_equal(encoded[0], codes) and np.array_equal(encoded[1], scales)


def test_strided_rows_are_encoded_where_they_lie(path: str) -> None:
    rows = np.random.default_rng(1).standard_normal((40, 3, 128)).astype(np.float16).swapaxes(0, 1)
    codec = resolve_codec("turbo3", 128, "v")
    encoded = library(path).encode(codec, rows)
    assert encoded is not None
    codes, scales = codec.split(codec.encode(rows))
    assert np.array_equal(encoded[0], codes) and np.array_equal(encoded[1], scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", CACHE_TYPE_NAMES)
def test_values_that_are_not_finite_are_refused_as_numpy_refuses_them(path: str, name: str, bad: float) -> None:
    rows = np.ones((2, PAGE, 128), np.float16)
    rows[1, 77, 5] = bad
    with pytest.raises(EncodeError, match=r"position \[1, 77, 5\]"):
        c_reading(path).encode(resolve_codec(name, 128, "k"), mx.array(rows))


def test_pages_decode_to_the_values_of_numpy_whatever_their_bytes_are(path: str) -> None:
    rng = np.random.default_rng(2)
    c = library(path)
    for codec in codecs(BLOCK_TYPE_NAMES):
        codes = rng.integers(0, 256, (2, 3, PAGE, codec.n_blocks * codec.code_bytes), dtype=np.uint8)
        scales = rng.integers(0, 1 << 16, (2, 3, PAGE, codec.n_blocks * codec.n_scales), dtype=np.uint16)
        scales = scales.view(np.float16)  # with infinities and NaNs, as foreign files may have
        expected = codec.decode_planes(codes, scales).swapaxes(0, 1).reshape(3, 2 * PAGE, codec.head_dim)
        with np.errstate(invalid="ignore"):
            assert np.array_equal(c.decode_pages(codec, codes, scales), expected, equal_nan=True), codec


@functools.lru_cache(maxsize=64)  # paths follow each other, case by case
def decoding_case(
    type_k: str,
    type_v: str,
    head_dim: int,
    heads: int,
    gqa: int,
    length: int,
    n_rows: int,
    window: int | None,
    sinks: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """k, v, q of the last rows and their float64 attention, the same for every path."""
    rng = np.random.default_rng(length + head_dim + gqa)
    k, v = (rng.standard_normal((heads, length, head_dim)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((heads * gqa, length, head_dim)).astype(np.float32)
    n_prefix = default_prefix([type_k, type_v])
    sides = [(resolve_codec(type_k, head_dim, "k"), k), (resolve_codec(type_v, head_dim, "v"), v)]
    stored = [f(codec, x, *a) for codec, x in sides for f, a in ((as_blocks, (n_prefix,)), (as_float, ()))]
    expected = attention(q, *stored, head_dim**-0.5, window, None if sinks is None else np.array(sinks))
    return k, v, q[:, length - n_rows :].copy(), expected[:, length - n_rows :].astype(np.float32)


def decoding(
    type_k: str,
    type_v: str,
    *,
    n_rows: int,
    path: str,
    length: int = 300,
    head_dim: int = 64,
    n_kv_heads: int = 2,
    gqa: int = 2,
    window: int | None = None,
    sinks: tuple[float, ...] | None = None,
    q_dtype: mx.Dtype = mx.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """A prefill, then one small step: (output, reference), both [n_heads, n_rows, head_dim]."""
    k, v, q, expected = decoding_case(type_k, type_v, head_dim, n_kv_heads, gqa, length, n_rows, window, sinks)
    cache = BlockKVCache(type_k, type_v, window=window, reading=c_reading(path), balance="off")
    before = length - n_rows
    for part in (slice(0, before), slice(before, length)):
        if part.stop > part.start:
            mask = cache.make_mask(part.stop - part.start)
            keys, values = cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
    out = hook.scaled_dot_product_attention(
        mx.array(q[None]).astype(q_dtype),
        keys,
        values,
        cache=cache,
        scale=head_dim**-0.5,
        mask=mask,
        sinks=None if sinks is None else mx.array(sinks),
    )
    return np.array(out.astype(mx.float32))[0], expected


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("type_k", CACHE_TYPE_NAMES)
def test_a_decode_step_equals_float64_attention_for_every_mix_of_types(path: str, type_k: str) -> None:
    for type_v in CACHE_TYPE_NAMES:
        out, expected = decoding(type_k, type_v, n_rows=1, path=path)
        assert relative_error(out, expected) <= 1e-5, type_v


@pytest.mark.parametrize("gqa", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("n_rows", [1, 2, 16])
def test_any_number_of_rows_and_of_heads_in_a_group(path: str, gqa: int, n_rows: int) -> None:
    for types in (("turbo4", "turbo3"), ("turbo2", "f16"), ("q8_0", "q4_0"), ("q5_1", "bf16")):
        out, expected = decoding(*types, n_rows=n_rows, gqa=gqa, n_kv_heads=3, path=path)
        assert relative_error(out, expected) <= 1e-5, types


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size(path: str, head_dim: int) -> None:
    for types in (("turbo4", "turbo3"), ("turbo3", "turbo2"), ("turbo2", "turbo4"), ("q8_0", "q4_0"), ("q4_1", "f16")):
        if head_dim in (32, 320) and types[0].startswith("turbo"):
            continue  # turbo types have no blocks for these
        for n_rows in (1, 4):
            out, expected = decoding(*types, n_rows=n_rows, head_dim=head_dim, gqa=3, path=path)
            assert relative_error(out, expected) <= 1e-5, (types, n_rows)


@pytest.mark.parametrize("length", [1, 5, 128, 129, 257, 400])
@pytest.mark.parametrize("window", [None, 1, 128, 200])
def test_windows_prefix_and_page_edges(path: str, length: int, window: int | None) -> None:
    for types in (("turbo4", "turbo4"), ("f16", "turbo3"), ("q8_0", "f32"), ("f16", "f16")):
        for n_rows in (1, 6):
            out, expected = decoding(*types, n_rows=min(n_rows, length), length=length, window=window, gqa=3, path=path)
            assert relative_error(out, expected) <= 1e-5, (types, n_rows)


def test_sink_logits_take_part_in_the_softmax(path: str) -> None:
    sinks = (0.5, 9.0, -50.0, 1.0)
    for window in (None, 90):
        out, expected = decoding("turbo4", "turbo3", n_rows=3, sinks=sinks, window=window, path=path)
        assert relative_error(out, expected) <= 1e-5


@pytest.mark.parametrize("n_rows", [1, 5, 11])
def test_page_means_and_channel_scale_equal_the_numpy_reading(path: str, n_rows: int) -> None:
    rng = np.random.default_rng(7)
    heads, pages, head_dim = 2, 11, 128
    codec = resolve_codec("turbo4", head_dim, "k")
    value_codec = resolve_codec("turbo3", head_dim, "v")
    k, v = (rng.standard_normal((pages, heads, PAGE, head_dim)).astype(np.float32) for _ in range(2))
    means = rng.standard_normal((pages, heads, head_dim)).astype(np.float16)
    scale = rng.uniform(0.5, 2.0, (heads, head_dim)).astype(np.float32)
    own = mx.array(rng.standard_normal((heads, 20, head_dim)).astype(np.float16))
    view_k, view_v = (
        SideView(c, own, pages * PAGE, *(mx.array(plane) for plane in c.split(c.encode(x))))
        for c, x in ((codec, k), (value_codec, v))
    )
    view_k = SideView(
        codec,
        own,
        pages * PAGE,
        view_k.codes,
        view_k.scales,
        page_means=mx.array(means),
        channel_scale=mx.array(scale),
    )
    q = mx.array(rng.standard_normal((1, heads * 3, n_rows, head_dim)).astype(np.float32))
    step = {"offset": pages * PAGE + 20 - n_rows, "scale": 0.1}
    readings = c_reading(path), NumpyReading()
    counts = Reads(), Reads()
    out, expected = (
        np.array(attend(q, view_k, view_v, **step, reading=reading, reads=reads))
        for reading, reads in zip(readings, counts, strict=True)
    )
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)
    assert counts[0] == counts[1] and counts[0].keys_from_blocks == n_rows * pages * PAGE


@pytest.mark.parametrize("types", [("turbo4", "turbo3"), ("f16", "turbo4"), ("f16", "f16"), ("q8_0", "bf16")])
@pytest.mark.parametrize("window", [None, 150])
def test_reads_are_counted_as_the_numpy_reading_counts_them(
    path: str, types: tuple[str, str], window: int | None
) -> None:
    counted = []
    for reading in (c_reading(path), NumpyReading()):
        cache = BlockKVCache(*types, window=window, reading=reading)
        x = mx.random.normal((1, 2, 400, 64), key=mx.random.key(0))
        for at, n in ((0, 126), (126, 4), (130, 1), (131, 3), (134, 200), (334, 1), (335, 60), (395, 5)):
            mask = cache.make_mask(n)
            part = x[:, :, at : at + n]
            hook.scaled_dot_product_attention(
                part, *cache.update_and_fetch(part, part), cache=cache, scale=1.0, mask=mask
            )
        counted.append(cache.usage.reads)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_queries_of_sixteen_bits_are_read_as_they_are(path: str, dtype: mx.Dtype) -> None:
    out, expected = decoding("turbo4", "turbo3", n_rows=2, q_dtype=dtype, path=path)
    assert relative_error(out, expected) <= 2e-2


def random_pages(codec: Codec, pages: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Planes of random codes, and of scales near 1."""
    rng = np.random.default_rng(pages)
    codes = rng.integers(0, 256, (pages, heads, PAGE, codec.n_blocks * codec.code_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (pages, heads, PAGE, codec.n_blocks * codec.n_scales))
    return codes, scales.astype(np.float16)


def long_step(path: str, type_k: str, type_v: str) -> bytes:
    """The bytes of a decode step over 40 pages."""
    rng = np.random.default_rng(3)
    own = mx.array(rng.standard_normal((4, 7, 128)).astype(np.float16))
    views = [
        SideView(codec, own, 40 * PAGE, *(mx.array(plane) for plane in random_pages(codec, 40, 4)))
        for codec in (resolve_codec(type_k, 128, "k"), resolve_codec(type_v, 128, "v"))
    ]
    q = mx.array(rng.standard_normal((1, 16, 2, 128)).astype(np.float32))
    return np.array(attend(q, *views, offset=40 * PAGE + 5, scale=0.1, reading=c_reading(path))).tobytes()


def test_one_two_and_three_threads_give_the_same_bits(path: str) -> None:
    c = library(path)
    codec = resolve_codec("turbo4", 128, "k")
    rows = np.random.default_rng(3).standard_normal((8, 1000, 128)).astype(np.float32)
    pages = random_pages(codec, 9, 8)
    results = []
    try:
        for n in (1, 2, 3, 3):
            c.set_threads(n)
            assert c.threads == n
            encoded = c.encode(codec, rows)
            assert encoded is not None
            results.append(
                (
                    long_step(path, "turbo4", "turbo3"),
                    long_step(path, "q5_1", "f16"),
                    *(plane.tobytes() for plane in encoded),
                    c.decode_pages(codec, *pages).tobytes(),
                )
            )
    finally:
        c.set_threads(0)
    assert all(result == results[0] for result in results)


def test_python_threads_may_call_at_the_same_time(path: str) -> None:
    expected = long_step(path, "turbo4", "turbo3")
    codec = resolve_codec("turbo3", 128, "v")
    pages = random_pages(codec, 20, 8)
    c = library(path)
    c.set_threads(3)
    try:
        decoded = c.decode_pages(codec, *pages).tobytes()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: c.decode_pages(codec, *pages).tobytes(), range(40)))
        assert all(values == decoded for values in found)
        assert long_step(path, "turbo4", "turbo3") == expected
    finally:
        c.set_threads(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own(path: str) -> None:
    c, codec = library(path), resolve_codec("turbo3", 128, "k")
    pages = random_pages(codec, 64, 8)
    c.set_threads(3)
    try:
        expected = c.decode_pages(codec, *pages).tobytes()  # the pool's threads live from here on, in this process
        child = os.fork()
        if child == 0:  # never back into pytest
            same = all(c.decode_pages(codec, *pages).tobytes() == expected for _ in range(3))
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert c.decode_pages(codec, *pages).tobytes() == expected
    finally:
        c.set_threads(0)


def run_python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    return result.stdout + result.stderr.strip().rpartition("\n")[2]


def test_the_environment_forces_a_path(path: str) -> None:
    code = "from tqgguf.runtime.native.library import load_library as l; print(l().path_name)"
    assert run_python(code, TQGGUF_CPU=path) == f"{path}\n"


def test_the_library_can_be_switched_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQGGUF_CPU", "off")
    assert load_library.__wrapped__() is None


@pytest.mark.parametrize("wanted", ["sse9", "neon", "avx2"])
def test_a_path_that_cannot_run_is_refused_in_one_line(path: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQGGUF_CPU", wanted)
    if wanted in C_PATHS:
        loaded = load_library.__wrapped__()
        assert loaded is not None and loaded.path_name == wanted
    else:
        with pytest.raises(RequestError, match=r"TQGGUF_CPU: .*portable"):
            load_library.__wrapped__()

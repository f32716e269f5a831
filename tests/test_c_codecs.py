"""The C library makes numpy's bytes and decodes to numpy's values, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS, HEAD_DIMS, c_backend, library
from test_iq4_nl_search import blocks

from tqgguf.conversion.row_encoding import in_numpy
from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.runtime.kv.pages import PAGE
from tqgguf.runtime.native.encode_rows import row_encoder

BLOCK_TYPE_NAMES = [t for t in CACHE_TYPE_NAMES if t not in ("f32", "f16", "bf16")]
ENCODED = ("turbo4", "turbo3", "turbo2", "q8_0", "q4_0")

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
        c_backend(path).encode(resolve_codec(name, 128, "k"), mx.array(rows))


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


def test_the_search_for_iq4_nls_scale_makes_numpys_bytes(path: str) -> None:
    library(path)
    encode = row_encoder()
    assert encode is not None
    x = np.concatenate([blocks()[:56] * np.float32(factor) for factor in (1, 1e-3, 1e10, 1e30, 3e38)] + [blocks()])
    for columns in (32, 64, 160):
        for dtype in (np.float32, np.float16):
            rows = np.clip(x, -6e4, 6e4).astype(dtype) if dtype == np.float16 else x
            rows = rows[: len(rows) // 10 * 10].reshape(-1, columns)
            found = encode("iq4_nl", rows)
            assert found is not None
            assert found.tobytes() == in_numpy("iq4_nl", rows).tobytes()
    assert encode("iq4_nl", np.full((1, 32), np.inf, np.float32)) is None

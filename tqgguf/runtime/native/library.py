"""libtqgguf through ctypes: finding it, choosing its path, and its calls as methods on numpy arrays.

The environment variable TQGGUF_CPU forces a path (portable, avx2, avx512, neon) or switches the library `off`, which
leaves everything to numpy; TQGGUF_LIBRARY names another build of the library. The structures below mirror tqgguf.h.
Every number of a format comes from `tqgguf.formats`. It knows no mlx, no caches, and which call is worth it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, Array, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codebooks import codebook
from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.blocks.ggml import IQ4_NL_CODEBOOK
from tqgguf.formats.cores import cores
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.native import library_path

PATH_SWITCH = "TQGGUF_CPU"
LIBRARY_SWITCH = "TQGGUF_LIBRARY"
PATHS = ("portable", "avx2", "avx512", "neon")
OFF = "off"
ABI_VERSION = 5

# enum tq_kind
KINDS = {
    "turbo4": 0,
    "turbo2": 1,
    "turbo3": 2,
    "q4_0": 3,
    "q4_1": 3,
    "iq4_nl": 3,
    "q5_0": 4,
    "q5_1": 4,
    "q8_0": 5,
    "f16": 6,
    "bf16": 7,
    "f32": 8,
}
_SEARCHED_KIND = 9
_ENCODED = ("turbo4", "turbo3", "turbo2", "q8_0", "q4_0")
_ZERO_CODE = {"q5_0": 16, "q4_0": 8}  # what ggml's symmetric types subtract from a code
_MAX_BLOCK, _MAX_ROTATION, _MAX_HEAD_DIM, _MAX_SIGNS = 192, 512, 1024, 128
HEAD_DIM_STEP = 32


class CodecStruct(Structure):
    """struct tq_codec"""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "head_dim", "block_size", "code_bytes", "n_scales", "n_codes")),
        *((name, c_int32) for name in ("rotation", "is_turbo", "is_encoded")),
        ("rotation_factor", c_float),
        ("signs", c_float * _MAX_SIGNS * 2),
        ("values", c_float * 32),
        ("boundaries", c_float * 16),
    ]


class Plane(Structure):
    """struct tq_plane"""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        *((name, c_int64) for name in ("page", "head", "token", "scale_page", "scale_head", "kind")),
    ]


class Matrix(Structure):
    """struct tq_matrix"""

    _fields_ = [
        ("rows", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("type", "row_bytes", "n_rows", "n")),
    ]


ACTIVATIONS = {"silu": 0, "gelu": 1}


class Layer(Structure):
    """struct tq_layer"""

    _fields_ = [
        ("qkv", Matrix * 3),
        ("o", Matrix),
        ("gate_up", Matrix * 2),
        ("down", Matrix),
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "output_norm")),
        *((name, c_int64) for name in ("n_heads", "n_kv_heads", "head_dim", "neighbours", "activation")),
        ("epsilon", c_float),
    ]


class AttentionStep(Structure):
    """struct tq_attention"""

    _fields_ = [
        ("k_codec", POINTER(CodecStruct)),
        ("v_codec", POINTER(CodecStruct)),
        *((name, Plane) for name in ("k_pages", "v_pages", "k_own", "v_own", "k_prefix", "v_prefix", "k_new", "v_new")),
        *((name, c_void_p) for name in ("slots", "query")),
        *((name, c_int64) for name in ("query_kind", "query_head", "query_row")),
        ("out", c_void_p),
        ("out_head", c_int64),
        *((name, c_void_p) for name in ("sinks", "channel_scale", "page_means")),
        *((name, c_int64) for name in ("mean_page", "mean_head", "n_kv_heads", "group", "n_rows", "offset")),
        *((name, c_int64) for name in ("first_page", "n_prefix", "window", "own_coded")),
        ("scale", c_double),
    ]


def address(array: Any) -> int:
    """Where a numpy array's data starts."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # four times quicker, for what lies in one piece
    except (TypeError, ValueError, BufferError):  # strided, read-only or empty
        return int(array.__array_interface__["data"][0])


def is_supported(codec: Codec) -> bool:
    """Whether the library reads rows of this codec; others stay on numpy."""
    part = 0 if codec.rotation is None else codec.rotation.size
    fits = codec.head_dim % HEAD_DIM_STEP == 0 and codec.head_dim <= _MAX_HEAD_DIM
    return fits and codec.block_size <= _MAX_BLOCK and part <= _MAX_ROTATION


@functools.lru_cache(maxsize=256)
def codec_struct(codec: Codec) -> CodecStruct:
    """A codec as the library takes it."""
    is_turbo = codec.block_type.family == "turbo"
    struct = CodecStruct(
        kind=KINDS[codec.cache_type],
        head_dim=codec.head_dim,
        block_size=codec.block_size,
        code_bytes=codec.code_bytes,
        n_scales=codec.n_scales,
        is_turbo=is_turbo,
        is_encoded=codec.cache_type in _ENCODED,
    )
    if codec.rotation is not None:
        struct.rotation, struct.rotation_factor = codec.rotation.size, codec.rotation.factor
        for table, signs in zip(struct.signs, codec.rotation.signs or (), strict=False):
            table[: len(signs)] = signs.tolist()
    bits = codec.block_type.bits
    if bits < 8:  # each code's value; eight bits are a signed integer themselves
        struct.n_codes = 1 << bits
        zero = _ZERO_CODE.get(codec.cache_type, 0)
        values = [float(c - zero) for c in range(1 << bits)] if codec.codebook is None else codec.codebook.tolist()
        struct.values[: len(values)] = values
    if is_turbo:
        boundaries = codebook(bits, codec.block_size).boundaries.tolist()
        struct.boundaries[: len(boundaries)] = boundaries
    return struct


@functools.lru_cache(maxsize=16)
def searched_struct(codec: Codec) -> CodecStruct:
    """An iq4_nl codec as tq_encode alone takes it: with a search for the scale."""
    struct = CodecStruct.from_buffer_copy(codec_struct(codec))
    struct.kind, struct.is_encoded = _SEARCHED_KIND, 1
    boundaries = IQ4_NL_CODEBOOK.boundaries.tolist()
    struct.boundaries[: len(boundaries)] = boundaries
    return struct


def page_plane(kind: int, codes: NDArray[Any], scales: NDArray[np.float16]) -> Plane:
    """Planes [pages, n_kv_heads, tokens, ...] whose tokens' scales lie one after the other."""
    page, head, token, _ = codes.strides
    scale_page, scale_head = scales.strides[:2]
    return Plane(address(codes), address(scales), page, head, token, scale_page, scale_head, kind)


def row_plane(kind: int, rows: NDArray[Any], first: int = 0, page_tokens: int = 0) -> Plane:
    """Float rows [n_kv_heads, tokens, head_dim] from row `first` on, a page being so many tokens."""
    head, token, _ = rows.strides
    return Plane(address(rows) + first * token, None, page_tokens * token, head, token, 0, 0, kind)


class Library:
    """The functions of libtqgguf. Arrays are numpy's; strides are free but for the last axis."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        self._c.tq_abi_version.restype = c_int
        self.abi_version = int(self._c.tq_abi_version())
        if self.abi_version != ABI_VERSION:  # some of the functions below may not be there
            return
        self._c.tq_path_name.restype = c_char_p
        self._c.tq_select_path.argtypes = [c_char_p]
        self._c.tq_set_threads.argtypes = [c_int]
        self._c.tq_decode_pages.argtypes = [POINTER(CodecStruct), POINTER(Plane), c_int64, c_int64, c_void_p]
        self._c.tq_decode_pages.restype = None
        self._c.tq_encode.argtypes = [POINTER(CodecStruct), POINTER(Plane), c_int64, c_int64, c_void_p, c_void_p]
        self._c.tq_attend.argtypes = [POINTER(AttentionStep), c_int64]
        self._c.tq_serves_rows.argtypes = [c_int64, c_int64]
        self._c.tq_products.argtypes = [POINTER(Matrix), c_int64, c_int64, c_void_p, POINTER(c_void_p)]
        self._c.tq_decode_rows.argtypes = [POINTER(Matrix), c_void_p]
        self._c.tq_layer_begin.argtypes = [POINTER(Layer), c_int64, *[c_void_p] * 5]
        self._c.tq_layer_end.argtypes = [POINTER(Layer), c_int64, *[c_void_p] * 3]

    def select_path(self, name: str) -> bool:
        """Make a path of PATHS serve, or the best one for "". False where this machine or build has none such."""
        return bool(self._c.tq_select_path(name.encode()) == 0)

    @property
    def path_name(self) -> str:
        """The path that serves."""
        return str(self._c.tq_path_name().decode())

    def runnable_paths(self) -> list[str]:
        """The paths that this machine and build have."""
        before = self.path_name
        runnable = [name for name in PATHS if self.select_path(name)]
        self.select_path(before)
        return runnable

    def set_threads(self, n: int) -> None:
        """Let each call use n threads; 0 or less: one per core of this process."""
        self._c.tq_set_threads(n if n > 0 else cores())

    @property
    def threads(self) -> int:
        return int(self._c.tq_threads())

    def decode_pages(self, codec: Codec, codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
        """Planes [pages, n_kv_heads, PAGE, ...] to float32 [n_kv_heads, pages * PAGE, head_dim], rotated."""
        n_pages, n_heads, tokens, _ = codes.shape
        out = np.empty((n_heads, n_pages * tokens, codec.head_dim), np.float32)
        plane = page_plane(KINDS[codec.cache_type], codes, scales)
        self._c.tq_decode_pages(codec_struct(codec), plane, n_pages, n_heads, address(out))
        return out

    def encode(self, codec: Codec, rows: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
        """float16 or float32 rows [n_kv_heads, tokens, head_dim] to codes and scales [n_kv_heads, tokens, ...].

        None where the library does not encode this type, and where a value cannot be encoded.
        """
        if codec.cache_type not in _ENCODED or not is_supported(codec):
            return None
        return self._encode(codec, codec_struct(codec), rows)

    def encode_searched(self, codec: Codec, rows: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
        """Likewise of weights, for an iq4_nl codec without rotation: with a search for the scale."""
        return self._encode(codec, searched_struct(codec), rows)

    def _encode(
        self, codec: Codec, struct: CodecStruct, rows: NDArray[Any]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
        n_heads, tokens, _ = rows.shape
        codes = np.empty((n_heads, tokens, codec.n_blocks * codec.code_bytes), np.uint8)
        scales = np.empty((n_heads, tokens, codec.n_blocks * codec.n_scales), np.float16)
        plane = row_plane(KINDS["f16" if rows.dtype == np.float16 else "f32"], rows)
        done = self._c.tq_encode(struct, plane, n_heads, tokens, address(codes), address(scales))
        return (codes, scales) if done == 0 else None

    def attend(self, steps: Array[AttentionStep]) -> None:
        """Steps of attention of as many sequences; everything that they point to must be alive."""
        if self._c.tq_attend(steps, len(steps)) != 0:
            raise MemoryError("attention ran out of memory")

    def serves_rows(self, ggml_type: int, n: int) -> bool:
        """Whether `products` and `decode_rows` take rows of n values of this ggml type."""
        return bool(self._c.tq_serves_rows(ggml_type, n))

    def products(self, matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 x [m, n], without gaps, times a matrix whose rows are such that `serves_rows`: [m, n_rows]."""
        out = np.empty((len(x), matrix.n_rows), np.float32)
        _check(self._c.tq_products(matrix, 1, len(x), address(x), c_void_p(address(out))))
        return out

    def decode_rows(self, matrix: Matrix) -> NDArray[np.float32]:
        """The values [n_rows, n] of such a matrix, as gguf-py has them."""
        out = np.empty((matrix.n_rows, matrix.n), np.float32)
        _check(self._c.tq_decode_rows(matrix, address(out)))
        return out

    def layer_begin(
        self, layer: Layer, x: NDArray[np.float32], turns: NDArray[np.float32]
    ) -> list[NDArray[np.float32]]:
        """A layer before its attention: x [n, hidden] to q, k and v, [heads, n, head_dim] each.

        turns [n, 2, head_dim / 2]: cosines and sines of each row's angles. Nothing has gaps.
        """
        heads = (layer.n_heads, layer.n_kv_heads, layer.n_kv_heads)
        outs = [np.empty((n_heads, len(x), layer.head_dim), np.float32) for n_heads in heads]
        _check(self._c.tq_layer_begin(layer, len(x), address(x), address(turns), *map(address, outs)))
        return outs

    def layer_end(self, layer: Layer, x: NDArray[np.float32], attention: NDArray[np.float32]) -> NDArray[np.float32]:
        """And after it: x as before and attention's result [n_heads, n, head_dim] to [n, hidden]."""
        out = np.empty_like(x)
        _check(self._c.tq_layer_end(layer, len(x), address(x), address(attention), address(out)))
        return out


def row_matrix(ggml_type: int, rows: NDArray[Any], n: int, bias: NDArray[np.float32] | None = None) -> Matrix:
    """A matrix as its GGUF tensor holds it, [n_rows, whatever a row of n values is], which must stay alive."""
    return Matrix(address(rows), None if bias is None else address(bias), ggml_type, rows.strides[0], len(rows), n)


def _check(status: int) -> None:
    if status == -2:
        raise MemoryError("a product ran out of memory")
    assert status == 0, "rows that are not served"


@functools.cache
def load_library() -> Library | None:
    """The library on the path that TQGGUF_CPU asks for; None where it is off, was not built, or is of another version.

    Raises RequestError for a path that there is not, or that this machine cannot run.
    """
    wanted = os.environ.get(PATH_SWITCH, "").strip().lower()
    if wanted not in ("", OFF, *PATHS):
        raise RequestError(f"{PATH_SWITCH}: expected {OFF}, {', '.join(PATHS)} or nothing, found '{wanted}'")
    named = os.environ.get(LIBRARY_SWITCH)
    path = Path(named) if named else library_path("tqgguf")
    if wanted == OFF or path is None or sys.byteorder != "little":
        return None
    library = Library(path)
    if library.abi_version != ABI_VERSION:
        return None
    library.set_threads(0)
    if not library.select_path(wanted):
        raise RequestError(
            f"{PATH_SWITCH}: this machine cannot run '{wanted}', it runs {', '.join(library.runnable_paths())}"
        )
    return library


assert set(KINDS) == set(BLOCK_TYPES)

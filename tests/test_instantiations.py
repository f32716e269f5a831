"""Instantiations of kernels that the launch table can produce pass clang's front end: as Metal with its address spaces
any two settings together at every usual head size, and, where tests may be slow, all of them, as CUDA too.

Nothing is run here: test_kernels.py runs some on the emulator, and if slow those that between them have all pairs of
settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from covering import pairwise
from emulator.checked import FrontEndLauncher

from tqgguf.formats.blocks.codec import Codec, Side, resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.kernel_backend import MOST_ROWS, KernelBackend
from tqgguf.runtime.attention.partial import plain_partial
from tqgguf.runtime.kernels.geometry import FAMILIES
from tqgguf.runtime.kernels.pages import decode_rows, encode_pages, join_rows
from tqgguf.runtime.kernels.types import KERNEL_TYPES
from tqgguf.runtime.kv.pages import PAGE, Query, SideView
from tqgguf.runtime.kv.tiles import can_be_tiled
from tqgguf.runtime.selftest import HEAD_DIMS, Shape, attention_cases, batch_cases, compiled_cases

Together = Callable[..., Iterable[tuple[Any, ...]]]
N_KV_HEADS, GROUP, PAGES, N_PREFIX = 1, 4, 2, 4
FLOATS = (mx.float16, mx.bfloat16, mx.float32)
ANY_TWO = pairwise
ALL = itertools.product
FAMILY = [pytest.param(name, marks=() if name == "metal" else pytest.mark.slow) for name in FAMILIES]
SETTINGS = [("metal", ANY_TWO), *(pytest.param(name, ALL, marks=pytest.mark.slow) for name in FAMILIES)]
BALANCES = {"off": (False, False), "page": (True, False), "full": (True, True)}


def codecs(head_dim: int, side: Side) -> Iterator[Codec]:
    for name in KERNEL_TYPES:
        try:
            yield resolve_codec(name, head_dim, side)
        except RequestError:
            continue


def side_of(codec: Codec, balance: str = "off") -> SideView:
    """Two pages and half a page of nothing in particular."""
    dim, n_own = codec.head_dim, PAGE // 2
    if codec.is_float:
        return SideView(codec, rows=mx.zeros((N_KV_HEADS, PAGES * PAGE + n_own, dim), dtype=mx.float16))
    planes = (PAGES, N_KV_HEADS, PAGE)
    centred, scaled = BALANCES[balance]
    return SideView(
        codec,
        mx.zeros((*planes, codec.n_blocks * codec.code_bytes), dtype=mx.uint8),
        mx.zeros((*planes, codec.n_blocks * codec.n_scales), dtype=mx.float16),
        rows=mx.zeros((N_KV_HEADS, n_own, dim), dtype=mx.float16),
        rows_start=PAGES * PAGE,
        prefix=mx.zeros((N_KV_HEADS, N_PREFIX, dim), dtype=mx.float16),
        page_means=mx.zeros((PAGES, N_KV_HEADS, dim), dtype=mx.float16) if centred else None,
        channel_scale=mx.zeros((N_KV_HEADS, dim)) if scaled else None,
    )


def look_at_attention(backend: KernelBackend, k: SideView, v: SideView, n_rows: int, dtype: mx.Dtype) -> None:
    q = mx.zeros((1, N_KV_HEADS * GROUP, n_rows, k.codec.head_dim), dtype=dtype)
    offset = PAGES * PAGE + PAGE // 2 - n_rows
    for sinks in (None, mx.zeros((N_KV_HEADS * GROUP,))):
        backend.attend(q, k, v, offset=offset, query=Query(1.0, sinks=sinks))


@pytest.mark.parametrize(("family", "together"), SETTINGS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention(family: str, together: Together, head_dim: int) -> None:
    launcher = FrontEndLauncher(family)
    backend = KernelBackend(launcher)
    rows = 1, 4, MOST_ROWS[family]  # as many tiles of query columns as geometry.py has
    turbo4, turbo3 = resolve_codec("turbo4", head_dim, "k"), resolve_codec("turbo3", head_dim, "v")
    for k, v, n_rows in together([*codecs(head_dim, "k")], [*codecs(head_dim, "v")], rows):
        for k_, v_ in [(k, turbo3), (turbo4, v)] if k.is_float and v.is_float else [(k, v)]:  # two floats are MLX's
            balance = "full" if k_.block_type.family == "turbo" else "off"
            look_at_attention(backend, side_of(k_, balance), _in_tiles(side_of(v_)), n_rows, mx.float16)
    k, v = turbo4, turbo3
    for dtype, balance, side in itertools.product(FLOATS, BALANCES, (side_of(v), _in_tiles(side_of(v)))):
        look_at_attention(backend, side_of(k, balance), side, 1, dtype)
    assert {kernel.name for kernel, *_ in launcher.seen} == {"decode_attention", "merge_partials"}


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_batches_compiled_steps_and_long_steps_in_parts(family: str, head_dim: int) -> None:
    launcher = FrontEndLauncher(family)
    backend = KernelBackend(launcher, partial=plain_partial)
    types = backend, head_dim, "turbo4", "turbo3"
    long_step = Shape("a long step", 256, 300, 2, sinks=True, dtype=mx.bfloat16)
    for case in (*batch_cases(*types), *compiled_cases(*types), *attention_cases(*types, shapes=(long_step,))):
        case.compare()  # of nothing: what clang says is raised
    names = {kernel.name for kernel, *_ in launcher.seen}
    assert names == {"decode_attention", "merge_partials", "join_rows", "decode_pages", "join_parts"}


def _in_tiles(side: SideView) -> SideView:
    """As the kernels hold V, where its type can be."""
    return replace(side, tiled=can_be_tiled(side.codec))


@pytest.mark.parametrize(("family", "together"), SETTINGS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pages_and_tails(family: str, together: Together, head_dim: int) -> None:
    launcher = FrontEndLauncher(family)
    blocks = [codec for codec in codecs(head_dim, "k") if not codec.is_float]
    for codec, in_tiles, balance, dtype in together(blocks, (False, True), [*BALANCES], (mx.float16, mx.float32)):
        centred, scaled = BALANCES[balance]
        scale = mx.zeros((N_KV_HEADS, head_dim)) if scaled else None
        rows, tiled = mx.zeros((N_KV_HEADS, PAGE, head_dim), dtype=dtype), in_tiles and can_be_tiled(codec)
        encode_pages(launcher, codec, rows, centred=centred, channel_scale=scale, tiled=tiled)
    for codec, in_tiles, balance, dtype in together(blocks, (False, True), [*BALANCES], FLOATS):
        side = replace(side_of(codec, balance), tiled=in_tiles and can_be_tiled(codec))
        decode_rows(launcher, side, 0, PAGES * PAGE, dtype=dtype)
    for codec in blocks:
        decode_rows(launcher, side_of(codec), 0, PAGES * PAGE, dtype=mx.float32, unrotated=False)
    for dtype in FLOATS:
        new = mx.zeros((1, N_KV_HEADS, 1, head_dim), dtype=dtype)
        join_rows(launcher, (None, None), (new, new))
    assert {kernel.name for kernel, *_ in launcher.seen} == {"encode_pages", "decode_pages", "join_rows"}

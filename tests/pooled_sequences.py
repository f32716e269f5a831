"""Several sequences of one layer in arrays that attention reads at once, and what float64 makes of each."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.kv.pages import PAGE, SidePages, SideView
from tqgguf.runtime.kv.tiles import can_be_tiled, to_tiles

N_KV_HEADS, N_PREFIX, N_SLOTS = 2, 4, 12
OFFSETS = (2, 128, 484, 300)
"""No whole page, the first row after one, three pages and most of one, two."""


@dataclass(frozen=True)
class Sequence:
    """One sequence after a step that began at `offset`: its sides as it has them alone, and its rows in float16."""

    offset: int
    k: SideView
    v: SideView
    rows: tuple[np.ndarray, np.ndarray]


def side_of(codec: Codec, rows: np.ndarray, offset: int, balanced: bool, rng: np.random.Generator) -> SideView:
    own, held = offset // PAGE * PAGE, mx.array(rows)
    scale = mx.array(rng.uniform(0.5, 2, (N_KV_HEADS, codec.head_dim)).astype(np.float32)) if balanced else None
    codes = scales = means = None
    if own:
        codes, scales, means = NumpyBackend().encode_pages(
            codec, held[:, :own], n_skipped=N_PREFIX, centred=balanced, scale=scale
        )
    prefix = held[:, :N_PREFIX]
    return SideView(
        codec,
        codes,
        scales,
        rows=held[:, own:],
        rows_start=own,
        prefix=prefix,
        page_means=means,
        channel_scale=scale,
    )


def sequences_of(k: Codec, v: Codec, offsets: tuple[int, ...], n_rows: int) -> list[Sequence]:
    rng, made = np.random.default_rng(21), []
    for offset in offsets:
        rows = []
        for codec in (k, v):
            values = rng.standard_normal((N_KV_HEADS, offset + n_rows, codec.head_dim)).astype(np.float16)
            values[:, :, 3] += 4
            rows.append(values)
        balanced = k.block_type.family == "turbo"
        sides = side_of(k, rows[0], offset, balanced, rng), side_of(v, rows[1], offset, False, rng)
        made.append(Sequence(offset, *sides, (rows[0], rows[1])))
    return made


def pooled(
    sequences: list[Sequence], name: str, slots: list[list[int]], can_tile: bool = True
) -> tuple[SidePages, mx.array]:
    """A side of all of them in one pool, what no page lies in poisoned; and their tails, poisoned beyond their rows."""
    sides = [getattr(of, name) for of in sequences]
    codec = sides[0].codec
    tiled = can_tile and name == "v" and can_be_tiled(codec)
    shapes = {
        "codes": (np.uint8, (PAGE, codec.n_blocks * codec.code_bytes), 255),
        "scales": (np.float16, (PAGE, codec.n_blocks * codec.n_scales), np.nan),
        "page_means": (np.float16, (codec.head_dim,), np.nan),
    }
    planes = {}
    for field, (dtype, shape, poison) in shapes.items():
        plane = np.full((N_SLOTS, N_KV_HEADS, *shape), poison, dtype)
        for side, of in zip(sides, slots, strict=True):
            pages = getattr(side, field)
            for page, slot in enumerate(of[: 0 if pages is None else len(of)]):
                held = to_tiles(codec, pages) if tiled and field == "codes" else pages
                plane[slot] = np.asarray(held)[page]
        planes[field] = mx.array(plane)
    tails = np.full((len(sides), N_KV_HEADS, PAGE, codec.head_dim), np.nan, np.float16)
    for tail, side in zip(tails, sides, strict=True):
        tail[:, : side.rows.shape[1]] = np.asarray(side.rows)
    balanced = sides[0].channel_scale is not None
    side = SidePages(
        codec,
        planes["codes"],
        planes["scales"],
        prefix=mx.stack([padded(side.prefix) for side in sides]),
        page_means=planes["page_means"] if balanced else None,
        channel_scale=mx.stack([side.channel_scale for side in sides]) if balanced else None,
        tiled=tiled,
    )
    return side, mx.array(tails)


def slots_of(sequences: list[Sequence]) -> list[list[int]]:
    """Where each one's pages lie, in no order."""
    free = np.random.default_rng(22).permutation(N_SLOTS).tolist()
    return [[free.pop() for _ in range(of.offset // PAGE)] for of in sequences]


def padded(prefix: mx.array) -> mx.array:
    return mx.pad(prefix, [(0, 0), (0, N_PREFIX - prefix.shape[1]), (0, 0)])


def in_float64(of: Sequence, q: np.ndarray, scale: float, window: int | None, sinks: mx.array | None) -> np.ndarray:
    """[n_heads, rows, head_dim]: pages as what their blocks decode to, the exact prefix and the own page in float16."""
    own, held = of.offset // PAGE * PAGE, []
    for side, plain in ((of.k, of.rows[0]), (of.v, of.rows[1])):
        values = plain.astype(np.float64)
        if own:
            blocks = side.codec.unrotate(side.codec.decode_planes(np.asarray(side.codes), np.asarray(side.scales)))
            if side.channel_scale is not None:
                blocks = blocks / np.asarray(side.channel_scale)[:, None] + np.asarray(side.page_means)[:, :, None]
            values[:, N_PREFIX:own] = blocks.swapaxes(0, 1).reshape(N_KV_HEADS, own, -1)[:, N_PREFIX:]
        held.append(values)
    out = np.empty((*q.shape[:2], held[1].shape[2]))
    for head, row in np.ndindex(q.shape[:2]):
        position = of.offset + row
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        kv_head = head * N_KV_HEADS // len(q)
        scores = held[0][kv_head, seen] @ q[head, row] * scale
        sink = -np.inf if sinks is None else float(sinks[head])
        weights = np.exp(scores - max(scores.max(), sink))
        out[head, row] = weights @ held[1][kv_head, seen] / (weights.sum() + np.exp(sink - max(scores.max(), sink)))
    return out

"""A long step's answers from those over parts of its keys: the kernel that joins them by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqgguf.runtime.kernels.launch import Kernel, Launcher, Threads, sizes_of
from tqgguf.runtime.kernels.types import given, nothing

MOST_LEVELS = 5
"""Levels of pages that the kernel joins: of a step of up to 2 ** MOST_LEVELS pages."""

Part = tuple[mx.array, mx.array]
"""Answers and their log-sum-exps, as `PartialAttention` returns them."""

_LEVELS = tuple(f"level{i}" for i in range(MOST_LEVELS))
_PARTS = ("own", "pieces", "rest", *_LEVELS)
JOIN_PARTS = Kernel(
    "join_parts",
    ("codes.metal", "halves.metal", "page_rows.metal", "part_sums.metal"),
    (*_PARTS, *(f"{part}_sums" for part in _PARTS), "sinks", "sizes"),
    ("out",),
    ("n_rows", "first_row", "n_pages", "n_pieces", "n_rest", "n_levels"),
)
_SIMDGROUPS = 8
_CHANNELS_OF_A_THREAD = 4


@dataclass(frozen=True)
class StepParts:
    """Answers of a step's rows, padded to n_pages whole pages, over parts of their keys; n_heads are of queries.

    own: of each page over itself, [n_pages, n_heads, PAGE, head_dim]. pieces: over equal runs of the pages before the
    step, [pieces, n_heads, rows, head_dim]. rest: over what is left of them, [1, n_heads, rows, head_dim]. levels: the
    i-th of runs of 2 ** i pages, every other one, over the run before it: [pairs, n_heads, 2 ** i * PAGE, head_dim].
    """

    own: Part
    pieces: Part | None
    rest: Part | None
    levels: Sequence[Part]


def join_parts(
    launcher: Launcher, parts: StepParts, rows: tuple[int, int], sinks: mx.array | None, dtype: mx.Dtype
) -> mx.array:
    """dtype [1, n_heads, rows, head_dim] for the padded rows first .. last - 1. sinks: f32 [n_heads] or None."""
    n_pages, n_heads, _, head_dim = parts.own[0].shape
    made = {
        "own": parts.own,
        "pieces": parts.pieces,
        "rest": parts.rest,
        **dict(zip(_LEVELS, parts.levels, strict=False)),
    }
    of_type, inputs = parts.own[0].dtype, {}
    for name in _PARTS:
        answers, sums = made.get(name) or (nothing(of_type), nothing(mx.float32))
        # answers lie in memory as their queries do, of which these parts have views with runs before heads
        in_runs = name in ("own", *_LEVELS[: len(parts.levels)])
        inputs[name], inputs[f"{name}_sums"] = answers.swapaxes(0, 1) if in_runs else answers, sums
    n_rows = rows[1] - rows[0]
    n_groups = -(-n_rows * head_dim // (_CHANNELS_OF_A_THREAD * 32 * _SIMDGROUPS))
    inputs["sinks"] = given(sinks, mx.float32)
    inputs["sizes"] = sizes_of(
        JOIN_PARTS,
        n_rows=n_rows,
        first_row=rows[0],
        n_pages=n_pages,
        n_pieces=0 if parts.pieces is None else parts.pieces[0].shape[0],
        n_rest=int(parts.rest is not None),
        n_levels=len(parts.levels),
    )
    (out,) = launcher.launch(
        JOIN_PARTS,
        inputs,
        (("T", of_type), ("OUT", dtype), ("DIM", head_dim), ("SINKS", sinks is not None)),
        Threads((n_groups, n_heads, 1), _SIMDGROUPS),
        [((1, n_heads, n_rows, head_dim), dtype)],
    )
    return out

"""The two kernels of decode attention, and how calls of them are prepared: by shape, for all layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from tqgguf.formats.blocks.block_types import PAGE_TOKENS as PAGE
from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kernels.geometry import (
    COLUMNS_OF_A_TILE,
    FAMILIES,
    TILE_KEYS,
    DecodeGeometry,
    decode_geometry,
    n_coded_splits,
)
from tqgguf.runtime.kernels.launch import Call, Kernel, Launcher, Template, Threads
from tqgguf.runtime.kernels.types import KERNEL_TYPES, book, group_of, nothing, rotation_size, signs

_SIZES = (
    *("group_size", "n_rows", "n_coded", "n_prefix", "window", "first_page", "k_page", "v_page"),
    # of own rows, then of the exact prefix: where they lie, in elements
    *(f"{side}_{what}{where}" for side in "kv" for what in ("token", "head", "start") for where in ("", "_of_prefix")),
    # of batches only; the page table begins at `table` and has that many columns
    *("n_kv_heads", "table_columns", "table"),
)
ATTENTION = Kernel(
    "decode_attention",
    ("codes.metal", "vectors.metal", "attention_parts.metal"),
    (
        *("q", "k_codes", "k_scales", "v_codes", "v_scales", "page_means", "channel_scale", "k_rows", "v_rows"),
        *("k_prefix", "v_prefix", "k_book", "v_book", "k_signs", "factors", "sizes", "position"),
    ),
    ("sums", "statistics"),
    _SIZES,
)
MERGE = Kernel(
    "merge_partials",
    ("codes.metal", "vectors.metal", "halves.metal"),
    ("sums", "statistics", "v_signs", "sinks", "sizes"),
    ("out",),
    _SIZES,
)


@dataclass(frozen=True, eq=False)
class Plan:
    """What calls for the same codecs and numbers of heads and rows share; the same object for the same."""

    k_dim: int
    v_dim: int
    geometry: DecodeGeometry
    n_chunks: int
    columns: int
    template: Template
    merge_template: Template
    constants: dict[str, mx.array]
    v_signs: mx.array

    def n_coded(self, family: str, n_pages: int, n_heads: int, n_beside: int = 1) -> int:
        """Shares of that many pages of blocks of each of `n_heads` KV heads. n_beside: as `n_coded_splits` has it."""
        walk = self.geometry.walk
        n_steps = n_pages * (PAGE // (TILE_KEYS * walk.key_tiles))
        return n_coded_splits(FAMILIES[family], n_steps, n_heads, self.n_chunks, walk, n_beside)


@lru_cache(maxsize=256)
def plan_for(
    family: str,
    k: Codec,
    v: Codec,
    n_columns: int,
    scale: float,
    centred: bool,
    scaled: bool,
    with_sinks: bool,
    tiled: bool,
    dtype: mx.Dtype,
    batched: bool = False,
) -> Plan:
    """How decode attention is launched for these codecs. n_columns: queries of a KV head. scale: of the scores.
    centred, scaled: K has page means, a channel scale. tiled: V's codes are in tiles. dtype: of queries and answers."""
    geometry = decode_geometry(FAMILIES[family], k, v, n_columns)
    columns = COLUMNS_OF_A_TILE * geometry.column_tiles
    template = {
        "K_TYPE": KERNEL_TYPES[k.cache_type],
        "K_DIM": k.head_dim,
        "K_GROUP": group_of(k),
        "K_ROTATION": rotation_size(k),
        "V_TYPE": KERNEL_TYPES[v.cache_type],
        "V_DIM": v.head_dim,
        "V_GROUP": group_of(v),
        "TILES": geometry.column_tiles,
        "KEY_TILES": geometry.walk.key_tiles,
        "K_COPIES": geometry.k_copies,
        "V_COPIES": geometry.v_copies,
        "ONE_TABLE": geometry.one_table,
        "TABLE_ROWS": geometry.table_rows,
        "CENTRED": centred,
        "SCALED": scaled,
        "V_TILED": tiled,
        "BATCHED": batched,
    }
    merge_template = {
        "T": dtype,
        "V_DIM": v.head_dim,
        "V_ROTATION": rotation_size(v),
        "TILES": geometry.column_tiles,
        "SINKS": with_sinks,
        "BATCHED": batched,
    }
    constants = {
        "k_book": book(k),
        "v_book": book(v),
        "k_signs": signs(k),
        "factors": mx.full((8,), scale, dtype=mx.float32),
    }
    templates = tuple(template.items()), tuple(merge_template.items())
    mx.eval(constants, signs(v), nothing(mx.float16), nothing(mx.float32))  # compiled functions would make them anew
    return Plan(k.head_dim, v.head_dim, geometry, -(-n_columns // columns), columns, *templates, constants, signs(v))


@lru_cache(maxsize=64)
def calls_for(
    launcher: Launcher,
    plan: Plan,
    n_rows: int,
    n_coded: int,
    n_heads: tuple[int, int],
    dtype: mx.Dtype,
    n_sequences: int = 1,
) -> tuple[Call, Call]:
    """Attention and merge of whoever has these numbers: layers share them. n_heads: of a sequence, KV heads and all."""
    walk, family = plan.geometry.walk, FAMILIES[launcher.family]
    n_kv_heads = n_sequences * n_heads[0]
    shape = (n_kv_heads, plan.n_chunks, n_coded + 1, plan.columns)
    attention = launcher.prepare(
        ATTENTION,
        plan.template,
        Threads((n_coded + 1, n_kv_heads, plan.n_chunks), walk.simdgroups, walk.resident, plan.geometry.at_launch),
        [((*shape, plan.v_dim), mx.float32), ((*shape, 2), mx.float32)],
    )
    merge = launcher.prepare(
        MERGE,
        plan.merge_template,
        Threads((n_sequences * n_heads[1] * n_rows, 1, 1), family.merge_simdgroups),
        [((n_sequences, n_heads[1], n_rows, plan.v_dim), dtype)],
    )
    return attention, merge


def answer_with(
    calls: tuple[Call, Call],
    inputs: Sequence[mx.array],
    q: mx.array,
    rows: tuple[mx.array, mx.array],
    position: mx.array,
    of_merge: tuple[mx.array, mx.array, mx.array],
) -> mx.array:
    """The answer to a step's queries by prepared calls. inputs: of attention, with gaps for what changes from step to
    step. rows: K's and V's own page. of_merge: V's signs, sinks as `given_sinks` has them, sizes."""
    given_inputs = list(inputs)
    given_inputs[_Q], given_inputs[_K_ROWS], given_inputs[_V_ROWS], given_inputs[_POSITION] = q, *rows, position
    return calls[1]((*calls[0](given_inputs), *of_merge))[0]


_Q, _K_ROWS, _V_ROWS, _POSITION = (ATTENTION.inputs.index(name) for name in ("q", "k_rows", "v_rows", "position"))


def given_sinks(sinks: mx.array | None) -> mx.array:
    """Sink logits [n_heads], or none, as the merge reads them: at least eight."""
    if sinks is None:
        return nothing(mx.float32)
    missing, logits = 8 - sinks.shape[0], sinks.astype(mx.float32)
    return logits if missing <= 0 else mx.concatenate([logits, mx.zeros((missing,))])

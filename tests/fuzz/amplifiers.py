"""Files of up to a megabyte that hold as much as possible of what costs more in memory or time than in the file."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from gguf_builder import BOOL, STRING, U8, Typed, build_gguf
from llama_builder import F16, Memory, Side, build_state
from snapshots import carrier_bytes
from test_gguf_defects import array, entry, header, text, u32, u64
from test_snapshot_defects import SMALL
from unsound_files import safetensors

MEGABYTE = 1 << 20
N_LAYERS = 1 << 12


def _numbered(n: int, before: bytes, behind: bytes) -> bytes:
    """Pieces that differ in three letters."""
    return b"".join(before + bytes([35 + i % 80, 35 + i // 80 % 80, 35 + i // 6400]) + behind for i in range(n))


@cache
def amplifiers() -> dict[str, bytes]:
    """By what they are full of."""
    n_tensors, n_entries = 38_000, 1 << 14
    nested = (u32(9) + u64(1)) * 5_000 + u32(0) + u64(0)
    lists = json.dumps([[]] * 250_000).encode()
    entries = {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(16_000)}
    wrong = {f"{i:x}": [] for i in range(90_000)}
    names = ["general.architecture", "general.type", "tokenizer.ggml.tokens"]
    specials = {names[0]: "llama", names[2]: ["a"], "tokenizer.ggml.x_token_ids": Typed(U8, [9] * 900_000)}
    model = build_gguf({names[0]: "llama", "llama.block_count": 4096}, {"blk.0.a": np.ones(1, np.float32)})
    layers = [(Side(F16, 2), Side(F16, 2))]
    cells = [(i, [0]) for i in range(60_000)]
    many = [(i, list(range(256))) for i in range(900)]

    def long(metadata: Any, tensors: Any) -> None:
        """As many layers as there may be."""
        for key, value in metadata.items():
            if key.startswith("tqgguf.layer."):
                kind = value.type_id if value.type_id in (STRING, BOOL) else U8
                metadata[key] = Typed(kind, list(value.value[:1]) * N_LAYERS)
        metadata["tqgguf.snapshot.layers"] = N_LAYERS

    return {
        "layers of a snapshot": carrier_bytes(SMALL, long),
        "metadata": header(0, n_entries) + _numbered(n_entries, u64(3), u32(0) + b"\0"),
        "one key": header(0, n_entries) + (u64(1) + b"k" + u32(7) + b"\x07") * n_entries,
        "empty keys": header(0, n_entries) + (u64(0) + u32(8) + u64(0)) * n_entries,
        "tensors": header(n_tensors) + _numbered(n_tensors, u64(3), u32(0) + u32(0) + u64(0)),
        "empty tensors": header(n_tensors) + _numbered(n_tensors, u64(3), u32(1) + u64(0) + u32(0) + u64(0))[:MEGABYTE],
        "one tensor": header(n_tensors) + (u64(0) + u32(0) + u32(99) + u64(7)) * n_tensors,
        "unknown types": header(n_tensors) + _numbered(n_tensors, u64(3), u32(0) + u32(99) + u64(0)),
        "tensors of 64 dimensions": header(1900) + _numbered(1900, u64(3), u32(64) + u64(1) * 64 + u32(0) + u64(0)),
        "huge dimensions": header(13_000) + _numbered(13_000, u64(3), u32(6) + b"\xff" * 48 + u32(0) + u64(0)),
        "strings": entry(array(8, 100_000, _numbered(94_000, u64(3), b""))),
        "two strings": entry(array(8, 100_000, (text(b"\xff\xfe") * 100_000))),
        "empty strings": entry(array(8, 131_000, u64(0) * 131_000)),
        "texts that are not UTF-8": header(0, 40_000) + _numbered(40_000, u64(3), u32(8) + text(b"\xff"))[:MEGABYTE],
        "inner arrays": entry(array(9, 65_000, (u32(0) + u64(0)) * 65_000)),
        "arrays 5,000 deep": entry(array(9, 1, nested)),
        "flags": entry(array(7, MEGABYTE - 99, b"\x02" * (MEGABYTE - 99))),
        "special tokens": build_gguf(specials, {}),
        "layers": model,
        "tokens": build_gguf({names[0]: "llama", names[2]: Typed(STRING, [""] * 130_000)}, {}),
        "a long key": header(0, 1) + u64(MEGABYTE - 99) + b"k" * (MEGABYTE - 50),
        "json lists": safetensors({}, text=b'{"a":' + lists + b"}"),
        "json depth": safetensors({}, text=b'{"a":' + b"[" * (MEGABYTE - 99)),
        "json digits": safetensors({}, text=b'{"a":' + b"9" * (MEGABYTE - 99) + b"}"),
        "json entries": safetensors(entries),
        "wrong json entries": safetensors(wrong),
        "one json name": safetensors({}, text=b"{" + b'"a":0,' * 170_000 + b'"a":0}'),
        "cells": build_state("sequence", memories=[Memory(cells=cells, layers=layers)]).data,
        "cells of many sequences": build_state(memories=[Memory(cells=many, layers=layers)]).data,
        "equal cells": build_state("sequence", memories=[Memory(cells=[(0, [0])] * 60_000, layers=layers)]).data,
        "negative tokens": build_state(tokens=[-2] * 260_000).data[:MEGABYTE],
    }

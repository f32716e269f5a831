"""Builds snapshots in memory for the tests: seeded rows in any types, with balance, exact prefix and windows."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_builder import Tensor, Typed, build_gguf, sections

from tqgguf.formats.blocks.balance import RopeLayout, balance_rows, page_mean
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot

FINGERPRINT = Fingerprint(*(letter * 64 for letter in "abcd"))


def make_snapshot(n_tokens: int, *layers: LayerSnapshot, **fields: Any) -> Snapshot:
    """A snapshot of these layers (one small one by default), all of whose tokens were evaluated as prompt."""
    made: dict[str, Any] = {
        "tokens": np.arange(n_tokens, dtype=np.int32) % 97,
        "layers": layers or (make_layer(0, n_tokens),),
        "n_cells": n_tokens,
        "architecture": "llama",
        "chunk": 2 * PAGE_TOKENS,
        "prompt_ranges": ((0, n_tokens),) if n_tokens else (),
        "n_vocab": 97,
        "model": "tiny",
        "fingerprint": FINGERPRINT,
    }
    return Snapshot(**made | fields)


def make_layer(
    layer: int,
    n_tokens: int,
    type_k: str = "turbo4",
    type_v: str = "turbo3",
    *,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    start: int = 0,
    window: int | None = None,
    balance: str = "off",
    n_prefix: int = 0,
) -> LayerSnapshot:
    """A layer as a cache would hold it: whole pages in blocks, then an f16 tail; seeded by its number."""
    made = LayerSnapshot(
        layer=layer,
        k=_side("k", type_k, layer, n_tokens, n_kv_heads, head_dim, start, balance, n_prefix),
        v=_side("v", type_v, layer, n_tokens, n_kv_heads, head_dim_v or head_dim, start, "off", n_prefix),
        start=start,
        window=window,
        n_prefix=n_prefix,
        rope=RopeLayout(head_dim),
    )
    return replace(made, balance=balance)


def _side(
    side: Side, cache_type: str, layer: int, n_tokens: int, n_kv_heads: int, head_dim: int, start: int, balance: str,
    n_prefix: int,
) -> SideSnapshot:  # fmt: skip
    codec = StoredCodec.native(cache_type, head_dim, side)
    random = np.random.default_rng([layer, side == "v", head_dim])
    x = random.standard_normal((n_tokens, n_kv_heads, head_dim)).astype(np.float16)[start:]
    if codec.is_float:
        return SideSnapshot(codec, codec.encode(x))
    n_whole = n_tokens // PAGE_TOKENS * PAGE_TOKENS - start
    n_exact = min(n_prefix, n_tokens) if start == 0 else 0
    scale = random.uniform(0.5, 2, (n_kv_heads, head_dim)).astype(np.float32) if balance == "full" else None
    pages, means = [], []
    for first in range(0, n_whole, PAGE_TOKENS):
        page = x[first : first + PAGE_TOKENS].swapaxes(0, 1)
        skipped = n_exact if first == 0 else 0
        mean = page_mean(page, skipped)
        rows = balance_rows(page, mean, scale) if balance != "off" else page.astype(np.float32)
        rows[:, :skipped] = 0
        pages.append(codec.encode(rows.swapaxes(0, 1)))
        means.append(mean)
    empty = np.empty((0, n_kv_heads, codec.row_bytes), np.uint8)
    return SideSnapshot(
        codec,
        np.concatenate([empty, *pages]),
        tail=x[n_whole:] if len(x) > n_whole else None,
        prefix=x[:n_exact] if n_exact else None,
        page_means=np.stack(means) if means and balance != "off" else None,
        channel_scale=scale if pages else None,
        query_squares=None
        if scale is None or pages or not n_tokens
        else np.ones((n_kv_heads, n_tokens, head_dim), np.float32),
    )


Parts = dict[str, Any]


def carrier_bytes(
    snapshot: Snapshot,
    change: Callable[[Parts, dict[str, Tensor]], object] = lambda metadata, tensors: None,
    *,
    checksums: bool = True,
) -> bytes:
    """The bytes of a snapshot's file after `change` had its metadata and tensors, with checksums that are right.

    Laid out by the tests' own builder; checksums are computed here, from spec/container.md.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.gguf"
        write_snapshot(path, snapshot)
        reader = gguf.GGUFReader(path)
        metadata: Parts = {
            key: _typed(field) for key, field in reader.fields.items() if not key.startswith("GGUF.")
        }  # fmt: skip
        tensors = {
            tensor.name: Tensor(tuple(map(int, tensor.shape[::-1])), int(tensor.tensor_type), tensor.data.tobytes())
            for tensor in reader.tensors
        }
    change(metadata, tensors)
    if not checksums or "checksums" not in tensors:
        return build_gguf(metadata, tensors)
    padded = sum(-(-len(tensor.data) // 32) * 32 for name, tensor in tensors.items() if name != "checksums")
    chunk = 1 << 20
    n_chunks = -(-padded // chunk)
    tensors["checksums"] = Tensor((n_chunks + 2,), 26, bytes(4 * n_chunks + 8))
    parts = sections(metadata, tensors)
    header = b"".join(parts[name] for name in ("header", "metadata", "tensor list", "padding"))
    data = parts["data"]
    chunks = [data[i : min(i + chunk, padded)] for i in range(0, padded, chunk)]
    sums = np.array([zlib.crc32(piece) for piece in (header, *chunks)], "<u4").tobytes()
    sums += zlib.crc32(sums).to_bytes(4, "little")
    return header + data[:padded] + sums + data[padded + len(sums) :]


def _typed(field: gguf.ReaderField) -> Typed:
    """A metadata value as the builder takes it, of the type that the file has."""
    kind, value = int(field.types[0]), field.contents()
    return Typed(int(field.types[1]) if kind == gguf.GGUFValueType.ARRAY else kind, value)

"""Float64 attention on a decoded cache, written from the design's rule and not from the code under test.

A query at position p sees the pages below p // 128 as blocks (the first n_prefix tokens in f16), its own page in f16.
"""

from __future__ import annotations

import numpy as np

from tqgguf.formats.blocks.codec import Codec

PAGE = 128


def as_blocks(codec: Codec, rows: np.ndarray, n_prefix: int) -> np.ndarray:
    """What a page decodes to, float64 [n_kv_heads, tokens, head_dim]. Blocks are made of the tail's f16 rows."""
    own = as_float(codec, rows)
    if codec.is_float:
        return own
    decoded = codec.decode(codec.encode(own)).astype(np.float64)
    decoded[:, :n_prefix] = own[:, :n_prefix]
    return decoded


def as_balanced_blocks(codec: Codec, rows: np.ndarray, n_prefix: int, scale: np.ndarray | None) -> np.ndarray:
    """As `as_blocks`, each whole page encoded as scale * (rows - its mean); scale float32 [n_kv_heads, head_dim]."""
    own = as_float(codec, rows)
    decoded = own.copy()
    factor = np.ones_like(own[:, 0], np.float32) if scale is None else scale
    for start in range(0, own.shape[1] - PAGE + 1, PAGE):
        first = start + (n_prefix if start == 0 else 0)
        kept = slice(first, start + PAGE)
        mean = np.zeros_like(factor)
        for token in range(first, start + PAGE):
            mean = mean + own[:, token].astype(np.float32)
        mean = (mean * np.float32(1 / max(1, start + PAGE - first))).astype(np.float16).astype(np.float32)
        stored = np.zeros((len(own), PAGE, own.shape[2]), np.float32)
        stored[:, first - start :] = (own[:, kept].astype(np.float32) - mean[:, None]) * factor[:, None]
        values = codec.decode(codec.encode(stored)).astype(np.float64) / factor[:, None] + mean[:, None]
        decoded[:, kept] = values[:, first - start :]
    return decoded


def as_float(codec: Codec, rows: np.ndarray) -> np.ndarray:
    """What the tail holds: f16 for block types, the type itself for float types."""
    if codec.is_float:
        return codec.decode(codec.encode(rows)).astype(np.float64)
    return rows.astype(np.float16).astype(np.float64)


def attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    k_float: np.ndarray,
    v_blocks: np.ndarray,
    v_float: np.ndarray,
    scale: float,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    own_from_blocks: bool = False,
) -> np.ndarray:
    """q [n_heads, tokens, head_dim] at positions 0 .. tokens - 1 against all keys; float64, shaped like q."""
    n_heads, n, _ = q.shape
    repeats = n_heads // len(k_blocks)
    sides = (k_blocks, k_float, v_blocks, v_float)
    k_blocks, k_float, v_blocks, v_float = (np.repeat(x, repeats, axis=0) for x in sides)
    row, key = np.arange(n)[:, None], np.arange(n)
    from_blocks = (key // PAGE < row // PAGE) | (own_from_blocks & (key // PAGE < n // PAGE))
    q = q.astype(np.float64)
    scores = np.where(from_blocks, q @ k_blocks.swapaxes(1, 2), q @ k_float.swapaxes(1, 2)) * scale
    hidden = key > row
    if window is not None:
        hidden |= row - key >= window
    scores[:, hidden] = -np.inf
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (n_heads, n, 1))], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights = (weights / weights.sum(axis=2, keepdims=True))[:, :, :n]
    return (weights * from_blocks) @ v_blocks + (weights * ~from_blocks) @ v_float

"""Whether the rows of a foreign prompt cache are what a model computes: its first token tells.

Such a file does not say which weights made it, whether its rows are rotated, or in which order a key's channels are.
The keys and values of the token at position 0 depend on nothing but that token, so that one step shows whether what
was assumed of the file is right.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.recoded_rows import RecodedRows
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Snapshot
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.cache.snapshots import capture_layers
from tqgguf.runtime.models.loaded_model import LoadedModel

MAX_RELATIVE_ERROR = 0.75
"""Of the first layer's key or value. Measured: blocks of two bits are off by 0.34, weights of the same model in another
type by less; rows that are read with the wrong rotation or order of channels, or another model's, by 1.2 to 1.5.
"""


def check_first_token(path: str, snapshot: Snapshot, loaded: LoadedModel) -> None:
    """RequestError where the rows of a file's first token are not this model's.

    A file that does not say its first token, or does not hold its rows, passes.
    """
    layer = next((layer for layer in snapshot.layers if layer.start == 0), None)
    if layer is None or not snapshot.n_cells or snapshot.tokens[0] < 0:
        return
    cache = make_prompt_cache(loaded.model, "f32", "f32")
    loaded.fill(mx.array([[int(snapshot.tokens[0])]], dtype=mx.int32), cache)
    computed = next(made for made in capture_layers(cache) if made.layer == layer.layer)
    for side in SIDES:
        expected, found = _first_row(computed, side), _first_row(layer, side)
        scale = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(found - expected)) / scale if scale else 0.0
        if error > MAX_RELATIVE_ERROR:
            raise RequestError(
                f"{path}: layer {layer.layer}: {side.upper()} of the first token is not what this model computes for "
                f"it (relative error {error:.2f}, expected at most {MAX_RELATIVE_ERROR}): the file is another model's, "
                "or was written by another build of llama.cpp than assumed (--prompt-cache-profile), or has a key's "
                "channels in another order (convert --rope-order)"
            )


def _first_row(layer: LayerSnapshot, side: Side) -> NDArray[np.float32]:
    """A side's row at position 0, float32 [n_kv_heads, head_dim]."""
    held = layer.side(side)
    codec = StoredCodec("f32", held.codec.head_dim, held.codec.head_dim)
    return codec.decode(RecodedRows(held, codec)[0:1])[0]

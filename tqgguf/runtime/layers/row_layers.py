"""A transformer layer whose matrices all stay in the file: for a few rows, everything but attention in two calls of C.

A decode step of a small model is some 700 operations, most of which cost more to ask for than to do. For more rows, and
where anything is not as it is expected (a cache for batches, another dtype), mlx-lm's own layer computes: it is kept
whole, and both give the same. Knows the layers of the architectures' classes by the names that they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.attention import hook
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.layers.packed_rows import RowsLinear
from tqgguf.runtime.layers.rope import FactoredRoPE, Turns
from tqgguf.runtime.native.library import ACTIVATIONS, Layer, Library, address
from tqgguf.runtime.native.worth import MOST_SINGLE_ROWS

_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# struct tq_layer's norms by the layer's modules; a layer with a norm before its MLP of that name has four norms
_NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_FOUR_NORMS = _NORMS | {
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "output_norm": "post_feedforward_layernorm",
}


class RowsLayer(nn.Module):
    """mlx-lm's layer `block`, for whose other attributes it stands too; see `put_row_layers`."""

    def __init__(
        self, block: nn.Module, library: Library, turns: Turns, layer: Layer, kept: Mapping[str, NDArray[np.float32]]
    ) -> None:
        super().__init__()
        self["block"] = block  # an entry already when `__getattr__` is first asked
        self._library, self._turns, self._layer, self._kept = library, turns, layer, (kept,)
        self._scale = block.self_attn.scale

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["block"], name)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = 0 if cache is None else getattr(cache, "offset", None)
        one, n_rows, hidden = x.shape
        if one != 1 or not 0 < n_rows <= MOST_SINGLE_ROWS or x.dtype != mx.float32 or not isinstance(offset, int):
            return self.block(x, mask, cache)
        values = np.asarray(x).reshape(n_rows, hidden)
        heads = self._library.layer_begin(self._layer, values, self._turns.at(offset, n_rows))
        q, k, v = (mx.array(rows[None]) for rows in heads)
        if isinstance(cache, BlockKVCache) and hook.is_causal(mask, n_rows):
            attention = cache.update(k, v).attend(q, self._scale, getattr(mask, "window", None), None)
        else:
            if cache is not None:
                k, v = cache.update_and_fetch(k, v)
            attention = hook.scaled_dot_product_attention(q, k, v, cache=cache, scale=self._scale, mask=mask)
        done = np.ascontiguousarray(np.asarray(attention)[0])
        return mx.array(self._library.layer_end(self._layer, values, done)[None])


def put_row_layers(model: Any, library: Library, activation: str, norm_offset: float) -> None:
    """Put `RowsLayer`s into the places of a loaded model's layers, where all matrices are `RowsLinear`s.

    activation: of the MLP's gate, see `Architecture`. norm_offset: what the class adds to the weights of norms.
    """
    shared: list[Turns] = []
    layers = model.model.layers
    for i, block in enumerate(layers):
        modules = dict(block.named_modules())
        rope = modules["self_attn.rope"]
        if type(rope) not in (nn.RoPE, FactoredRoPE) or not all(type(modules[p]) is RowsLinear for p in _LINEARS):
            continue
        turns = Turns(rope)
        turns = next((other for other in shared if other.is_of(turns)), turns)
        shared.append(turns)
        layer, kept = _describe(modules, activation, norm_offset)
        layers[i] = RowsLayer(block, library, turns, layer, kept)


def _describe(
    modules: Mapping[str, Any], activation: str, norm_offset: float
) -> tuple[Layer, dict[str, NDArray[np.float32]]]:
    """A layer as the library takes it, and the arrays that must stay alive with it."""
    attention, rope = modules["self_attn"], modules["self_attn.rope"]
    names = _FOUR_NORMS if "pre_feedforward_layernorm" in modules else _NORMS
    kept = {
        field: np.array(modules[path].weight) + np.float32(norm_offset)
        for field, path in names.items()
        if path in modules
    }
    kept |= {path: np.array(modules[path].bias) for path in _LINEARS if "bias" in modules[path]}
    q, k, v, o, gate, up, down = (modules[path].rows.matrix(bias=kept.get(path)) for path in _LINEARS)
    return Layer(
        qkv=(q, k, v),
        o=o,
        gate_up=(gate, up),
        down=down,
        **{field: address(kept[field]) for field in names if field in kept},
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        head_dim=q.n_rows // attention.n_heads,
        neighbours=rope.traditional,
        activation=ACTIVATIONS[activation],
        epsilon=modules["input_layernorm"].eps,
    ), kept

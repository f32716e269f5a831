"""A transformer layer whose matrices are blocks on a GPU: q, k and v as one product, gate and up and their activation
as one, norms taken and residuals added by the products beside them.

What MLX starts for a token costs more than the arithmetic of most of it. Knows the layers of the architectures' classes
by the names that they share, as `row_layers` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from tqgguf.runtime.attention import hook
from tqgguf.runtime.layers.block_matrices import BlockRows


class Reader(Protocol):
    """Matrices by the paths of their modules."""

    def serves(self, path: str) -> bool:
        """Whether the module's matrix can be read."""

    def joins(self, *paths: str, in_turns: bool = False) -> bool:
        """Whether those that are served can be one matrix, behind each other or tile by tile in turns."""

    def read(self, *paths: str, gate: str | None = None) -> BlockRows:
        """Matrices as one, with their biases; with a gate in turns, see `BlockRows`."""


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MOST_NORMED = 4096
"""Values of a row whose norm a product takes itself: they lie in threadgroup memory, beside the sums of simdgroups."""

OTHERS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class BlockLayer(nn.Module):
    """In the place of mlx-lm's layer `block`, for whose other attributes it stands too; see `put_block_layers`.

    heads: matrices whose products behind each other are q, k and v. norm_offset: what the class adds to norms' weights.
    """

    def __init__(
        self,
        block: nn.Module,
        heads: Sequence[BlockRows],
        output: BlockRows,
        gate_up: BlockRows,
        down: BlockRows,
        norm_offset: float,
    ) -> None:
        super().__init__()
        attention = block.self_attn
        self["block"] = block  # an entry already when `__getattr__` is first asked
        self.heads, self.output, self.gate_up, self.down = list(heads), output, gate_up, down
        self._n_heads, self._n_kv_heads, self._scale = attention.n_heads, attention.n_kv_heads, attention.scale
        self._has_four_norms = "pre_feedforward_layernorm" in block
        self._norms_heads = "q_norm" in attention
        before_mlp = block.pre_feedforward_layernorm if self._has_four_norms else block.post_attention_layernorm
        self._norms = tuple(_weights_and_epsilon(norm, norm_offset) for norm in (block.input_layernorm, before_mlp))

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["block"], name)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        block = self["block"]
        attended = self._attend(*self._normed(x, 0, block.input_layernorm), mask, cache)
        if self._has_four_norms:
            x = x + block.post_attention_layernorm(self.output(attended))
            inner, norm = self._normed(x, 1, block.pre_feedforward_layernorm)
            return x + block.post_feedforward_layernorm(self.down(self.gate_up(inner, norm=norm)))
        x = self.output(attended, x)
        inner, norm = self._normed(x, 1, block.post_attention_layernorm)
        return self.down(self.gate_up(inner, norm=norm), x)

    def _normed(self, x: mx.array, which: int, module: nn.Module) -> tuple[mx.array, mx.array | None]:
        """x and the norm that a product with it is to take, where it can; else the module's norm of x."""
        is_one_row = x.size == x.shape[-1] <= MOST_NORMED and x.dtype == self.gate_up.dtype
        return (x, self._norms[which]) if is_one_row else (module(x), None)

    def _attend(self, x: mx.array, norm: mx.array | None, mask: Any, cache: Any) -> mx.array:
        n_sequences, n_rows, _ = x.shape
        attention, (n, n_kv) = self["block"].self_attn, (self._n_heads, self._n_kv_heads)
        products = [rows(x, norm=norm) for rows in self.heads]
        head_dim = sum(product.shape[-1] for product in products) // (n + 2 * n_kv)
        heads = [p.reshape(n_sequences, n_rows, -1, head_dim).transpose(0, 2, 1, 3) for p in products]
        turned, v = (heads[0], heads[1]) if len(heads) == 2 else (heads[0][:, : n + n_kv], heads[0][:, n + n_kv :])
        at = {} if cache is None else {"offset": cache.offset}
        if self._norms_heads:
            q = attention.rope(attention.q_norm(turned[:, :n]).astype(x.dtype), **at)
            k = attention.rope(attention.k_norm(turned[:, n:]).astype(x.dtype), **at)
        else:
            turned = attention.rope(turned, **at)
            q, k = turned[:, :n], turned[:, n:]
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = hook.scaled_dot_product_attention(q, k, v, cache=cache, scale=self._scale, mask=mask)
        return out.transpose(0, 2, 1, 3).reshape(n_sequences, n_rows, -1)


def _weights_and_epsilon(norm: Any, offset: float) -> mx.array:
    return mx.concatenate([norm.weight.astype(mx.float32) + offset, mx.array([norm.eps])])


def put_block_layers(model: Any, reader: Reader, activation: str, norm_offset: float) -> set[str]:
    """Put `BlockLayer`s into the places of a model's layers, where all matrices are served and fit together; returns
    the paths of the matrices that are theirs. activation: of the MLP's gate, see `Architecture`. norm_offset: see
    `BlockLayer`."""
    taken: set[str] = set()
    layers = model.model.layers
    for i, block in enumerate(layers):
        paths = {name: f"model.layers.{i}.{name}" for name in (*QKV, *OTHERS)}
        modules: Mapping[str, nn.Module] = dict(block.named_modules())
        if not all(map(reader.serves, paths.values())) or any("bias" in modules[name] for name in OTHERS):
            continue
        q, k, v, o, gate, up, down = paths.values()
        if not reader.joins(q, k) or not reader.joins(gate, up, in_turns=True):
            continue
        heads = [(q, k, v)] if reader.joins(q, k, v) else [(q, k), (v,)]
        layers[i] = BlockLayer(
            _without_matrices(block),
            [reader.read(*of_heads) for of_heads in heads],
            reader.read(o),
            reader.read(gate, up, gate=activation),
            reader.read(down),
            norm_offset,
        )
        taken.update(paths.values())
    return taken


def _without_matrices(block: Any) -> Any:
    """The layer without the modules that a `BlockLayer` does not ask."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        block.self_attn.pop(name)
    block.pop("mlp")
    return block

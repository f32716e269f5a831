"""What one layer's cache was asked to be: types, exact prefix, balance, window; checked once, saved as scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from tqgguf.formats.balance import NOT_ROTATED, BalanceMode, RopeLayout, resolve_balance
from tqgguf.formats.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.codec import Codec, Side, resolve_codec
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.kv_size import LayerShape

TURBO_PREFIX = 4  # tokens kept in f16 at the start: measured to halve the damage of 3-bit keys


def default_prefix(type_k: str, type_v: str) -> int:
    """Length of the exact prefix: 4 where a turbo type is used, else 0."""
    return TURBO_PREFIX if any(BLOCK_TYPES[t].family == "turbo" for t in (type_k, type_v) if t in BLOCK_TYPES) else 0


def check_types(type_k: str, type_v: str) -> None:
    """RequestError, naming the types and the nearest, for an unknown one."""
    for side, cache_type in (("k", type_k), ("v", type_v)):
        if not isinstance(cache_type, str) or cache_type not in BLOCK_TYPES:
            resolve_codec(cache_type if isinstance(cache_type, str) else repr(cache_type), PAGE_TOKENS, side)


def layer_codec(cache_type: str, head_dim: int, side: Side, layer: int) -> Codec:
    """The codec of one side of a layer. RequestError names layer and side where the type cannot hold the head size."""
    try:
        return resolve_codec(cache_type, head_dim, side)
    except RequestError as error:
        raise RequestError(f"layer {layer}, {side.upper()}: {error}") from None


def check_cache_types(layers: Sequence[LayerShape], type_k: str, type_v: str) -> None:
    """Refuse types that some layer's heads cannot have, before anything is loaded."""
    for i, layer in enumerate(layers):
        layer_codec(type_k, layer.head_dim_k, "k", i)
        layer_codec(type_v, layer.head_dim_v, "v", i)


@dataclass(frozen=True)
class LayerSettings:
    """Made by `resolve`. window: keys that a query sees (None: all). has_tail: see `BlockKVCache`."""

    type_k: str
    type_v: str
    balance: BalanceMode
    layer: int
    window: int | None
    n_prefix: int
    rope: RopeLayout
    has_tail: bool

    @classmethod
    def resolve(
        cls,
        type_k: str,
        type_v: str,
        *,
        balance: str | None = None,
        layer: int = 0,
        window: int | None = None,
        n_prefix: int | None = None,
        rope: RopeLayout = NOT_ROTATED,
        has_tail: bool = True,
    ) -> LayerSettings:
        """None stands for the types' own balance and exact prefix. RequestError: a type or number that cannot be."""
        check_types(type_k, type_v)
        if n_prefix is not None and not (is_whole(n_prefix) and 0 <= n_prefix <= PAGE_TOKENS):
            raise RequestError(f"exact prefix: expected 0 to {PAGE_TOKENS} tokens, found {n_prefix!r}")
        prefix = default_prefix(type_k, type_v) if n_prefix is None else int(n_prefix)
        return cls(type_k, type_v, resolve_balance(balance, type_k), layer, window, prefix, rope, has_tail)

    def scalars(self) -> tuple[Any, ...]:
        """Strings and whole numbers that `from_scalars` takes."""
        texts = self.type_k, self.type_v, self.balance
        return (*texts, self.layer, self.window or 0, self.n_prefix, *map(int, astuple(self.rope)), int(self.has_tail))

    @classmethod
    def from_scalars(cls, scalars: Sequence[Any]) -> LayerSettings:
        """FormatError or RequestError for anything that `scalars` cannot have given."""
        type_k, type_v, balance, *numbers = scalars
        if not all(is_whole(n) and n >= 0 for n in numbers):
            raise FormatError(f"cache state: expected numbers >= 0 after the types, found {numbers!r}")
        layer, window, n_prefix, rope_dims, traditional, has_tail = (int(n) for n in numbers)
        return cls.resolve(
            type_k,
            type_v,
            balance=balance,
            layer=layer,
            window=window or None,
            n_prefix=n_prefix,
            rope=RopeLayout(rope_dims, bool(traditional)),
            has_tail=bool(has_tail),
        )


N_SCALARS = len(fields(LayerSettings)) - 1 + len(fields(RopeLayout))


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any kind, and no truth value."""
    return hasattr(value, "__index__") and not isinstance(value, bool)

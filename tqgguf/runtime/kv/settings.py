"""What one layer's cache was asked to be, checked once and saved as scalars; which layers can have which types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from numbers import Integral
from typing import Any

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout
from tqgguf.formats.blocks.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.blocks.codec import Codec, Side, resolve_codec
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.wording import shown


def layer_codec(cache_type: str, head_dim: int, side: Side, layer: int) -> Codec:
    """The codec of one side of a layer. RequestError names layer and side where the type cannot hold the head size."""
    try:
        return resolve_codec(cache_type, head_dim, side)
    except RequestError as error:
        raise RequestError(f"layer {layer}, {side.upper()}: {error}") from None


def check_cache_types(layers: Sequence[LayerShape], spec: CacheSpec) -> None:
    """Refuse types that some layer's heads cannot have, before anything is loaded."""
    for i, (layer, types) in enumerate(zip(layers, spec.resolve(len(layers)), strict=True)):
        for side in SIDES:
            layer_codec(types.of(side), layer.head_dim(side), side, i)


KEPT_TYPES = ("turbo4", "q8_0")
"""Types for a document that is kept, the first that all heads can have: little loss in few bytes."""


def types_to_keep(layers: Sequence[LayerShape], spec: CacheSpec) -> CacheSpec:
    """`spec` with the types for K and V that a document is kept in where nobody chose any."""
    for name in KEPT_TYPES:
        chosen = replace(spec, type_k=name, type_v=name)
        try:
            check_cache_types(layers, chosen)
        except RequestError:
            continue
        return chosen
    return spec


@dataclass(frozen=True)
class LayerSettings:
    """window: keys that a query sees (None: all). rope: channels that RoPE turns together. has_tail, rolls_back:
    `BlockKVCache`."""

    types: LayerTypes
    layer: int = 0
    window: int | None = None
    rope: RopeLayout = NOT_ROTATED
    has_tail: bool = True
    rolls_back: bool = True

    def check(self) -> None:
        """RequestError for numbers that cannot be."""
        for name, number, least in (("layer", self.layer, 0), ("window", self.window, 1)):
            if number is not None and not (is_whole(number) and number >= least):
                raise RequestError(f"{name}: expected a whole number of at least {least}, found {number!r}")
        if not isinstance(self.rope, RopeLayout) or self.rope.dims % 2 or self.rope.dims < 0:
            raise RequestError(f"RoPE: expected a layout over an even number of channels, found {self.rope!r}")

    def scalars(self) -> tuple[Any, ...]:
        """Strings and whole numbers that `from_scalars` takes."""
        numbers = (
            self.layer,
            self.window or 0,
            *map(int, astuple(self.rope)),
            int(self.has_tail),
            int(self.rolls_back),
        )
        return (*astuple(self.types), *numbers)

    @classmethod
    def from_scalars(cls, scalars: Sequence[Any]) -> LayerSettings:
        """FormatError or RequestError for anything that `scalars` cannot have given."""
        type_k, type_v, balance, n_prefix, *numbers = scalars
        if not all(is_whole(n) and n >= 0 for n in numbers):
            raise FormatError(f"cache state: expected numbers >= 0 after the types, found {shown(numbers)}")
        layer, window, rope_dims, traditional, has_tail, rolls_back = (int(n) for n in numbers)
        (types,) = CacheSpec(type_k, type_v, n_prefix, balance).resolve(1)
        rope = RopeLayout(rope_dims, bool(traditional))
        settings = cls(types, layer, window or None, rope, bool(has_tail), bool(rolls_back))
        settings.check()
        return settings


N_SCALARS = len(fields(LayerTypes)) + len(fields(LayerSettings)) - 2 + len(fields(RopeLayout))


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any kind, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

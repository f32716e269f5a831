"""What -ctk, -ctv and their companions ask of a cache, and what that means for every layer of a model.

A type may differ between layers: `turbo3,0-1:q8_0,-1:q8_0` is turbo3, but q8_0 in layers 0, 1 and the last one. Knows
no head sizes: whether a layer's heads can have a type is `codec`'s question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import shown

if TYPE_CHECKING:
    from tqgguf.formats.blocks.codec import Side  # numpy is not needed to read a request

TURBO_PREFIX = 4  # tokens kept in f16 at the start: measured to halve the damage of 3-bit keys

BalanceMode = Literal["off", "page", "full"]
"""Of K. off: keys as they are. page: minus the mean of their page. full: times the channel scale too."""

BALANCE_MODES: tuple[BalanceMode, ...] = get_args(BalanceMode)

PRESETS: dict[str, tuple[str, str]] = {
    "quality": ("turbo4", "turbo4"),
    "balanced": ("turbo4", "turbo3"),
    "small": ("turbo3", "turbo3"),
}
"""Types of K and V by what is wanted of them; the README has the figures that were measured of each."""

_RULE = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))? *: *(\S+)")


@dataclass(frozen=True)
class LayerTypes:
    """What one layer stores: types, balance of K, tokens of the exact prefix."""

    type_k: str
    type_v: str
    balance: BalanceMode = "off"
    n_prefix: int = 0

    def of(self, side: Side) -> str:
        """The cache type of a side."""
        return self.type_k if side == "k" else self.type_v


@dataclass(frozen=True)
class CacheSpec:
    """A request. None: what the types ask for. `resolve` says what each layer gets.

    type_k, type_v: a cache type, then any number of `,LAYERS:TYPE` where LAYERS is one (`3`; `-1` is the last) or a
    range with both ends (`0-1`, `-4--1`); later ones win.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    n_prefix: int | None = None
    balance: str | None = None

    def check(self) -> None:
        """RequestError for what no model could have: an unknown type or mode, a number out of its range."""
        for side, text in (("k", self.type_k), ("v", self.type_v)):
            _parse(side, text)
        self._prefix([self.type_k, self.type_v])
        resolve_balance(self.balance, "turbo4")

    def resolve(self, n_layers: int) -> tuple[LayerTypes, ...]:
        """The types of every layer. RequestError: as `check`, or a layer that the model has not."""
        pairs = list(zip(_of_layers("k", self.type_k, n_layers), _of_layers("v", self.type_v, n_layers), strict=True))
        n_prefix = self._prefix(name for pair in pairs for name in pair)
        return tuple(LayerTypes(k, v, resolve_balance(self.balance, k), n_prefix) for k, v in pairs)

    def has_channel_scale(self, n_layers: int) -> bool:
        """Whether K is balanced in full in some layer, so that a calibration matters. RequestError: as `resolve`."""
        return any(types.balance == "full" for types in self.resolve(n_layers))

    @property
    def has_float_k(self) -> bool:
        """Whether K is of a float type in every layer."""
        return _is_float("k", self.type_k)

    @property
    def has_float_v(self) -> bool:
        """Whether V is of a float type in every layer."""
        return _is_float("v", self.type_v)

    @property
    def has_blocks(self) -> bool:
        """Whether K or V is of another type than a float one in some layer."""
        return not (self.has_float_k and self.has_float_v)

    def _prefix(self, types: Iterable[str]) -> int:
        n = self.n_prefix
        if n is None:
            return default_prefix(types)
        if not isinstance(n, Integral) or isinstance(n, bool) or not 0 <= n <= PAGE_TOKENS:
            raise RequestError(f"exact prefix: expected 0 to {PAGE_TOKENS} tokens, found {shown(n)}")
        return int(n)


def resolve_balance(requested: str | None, type_k: str) -> BalanceMode:
    """The mode of a layer whose K has this type: 'full' for turbo types unless another is requested, 'off' for others.

    Float types have nothing to balance: 'off' whatever is requested. RequestError: an unknown mode.
    """
    mode = next((mode for mode in BALANCE_MODES if isinstance(requested, str) and mode == requested), None)
    if mode is None and requested is not None:
        raise RequestError(f"balance of K: expected one of {', '.join(BALANCE_MODES)}, found {shown(requested)}")
    family = BLOCK_TYPES[type_k].family
    if family == "float":
        return "off"
    return mode or ("full" if family == "turbo" else "off")


def default_prefix(types: Iterable[str]) -> int:
    """Length of the exact prefix of a cache that uses these types: 4 where one is a turbo type, else 0."""
    return TURBO_PREFIX if any(t in BLOCK_TYPES and BLOCK_TYPES[t].family == "turbo" for t in types) else 0


def _is_float(side: Side, text: str) -> bool:
    first, rules = _parse(side, text)
    return all(BLOCK_TYPES[name].family == "float" for name in (first, *(rule[2] for rule in rules)))


def _of_layers(side: Side, text: str, n_layers: int) -> Sequence[str]:
    first, rules = _parse(side, text)
    types = [first] * n_layers
    for lo, hi, cache_type in rules:
        start, end = (n + n_layers if n < 0 else n for n in (lo, hi))
        if not 0 <= start <= end < n_layers:
            found = f"{lo}" if lo == hi else f"{lo}-{hi}"
            raise RequestError(
                f"cache type of {side.upper()}: layers {found} of {text!r}: the model has layers 0 to {n_layers - 1}"
            )
        types[start : end + 1] = [cache_type] * (end + 1 - start)
    return types


def _parse(side: str, text: str) -> tuple[str, list[tuple[int, int, str]]]:
    """The type of all layers, and (first layer, last layer, type) of each rule. RequestError names what is wrong."""
    first, *parts = text.split(",") if isinstance(text, str) else [shown(text)]
    rules = []
    for part in parts:
        match = _RULE.fullmatch(part.strip(" "))
        if match is None:
            raise RequestError(
                f"cache type of {side.upper()}: expected LAYERS:TYPE after the comma, as in turbo3,0-1:q8_0,-1:q8_0, "
                f"found {shown(part)}"
            )
        lo = int(match[1])
        rules.append((lo, int(match[2] or lo), match[3]))
    for name in (first.strip(" "), *(rule[2] for rule in rules)):
        if name not in BLOCK_TYPES:
            _refuse(name)
    return first.strip(" "), rules


def _refuse(name: str) -> NoReturn:
    """RequestError with the list of types and the nearest name."""
    from tqgguf.formats.blocks.codec import resolve_codec  # lazily: it imports numpy

    resolve_codec(name, PAGE_TOKENS, "k")
    raise AssertionError(f"{name} is a codec without a block type")

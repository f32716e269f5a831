"""The names of what `tqgguf eval` compares: pairs of cache types as the command line writes them.

`turbo4/turbo3` is K and V, `q8_0` both, `small` a preset, `turbo3@plain` another form of what the types are by default,
`mlx-q4` mlx-lm's own quantised cache. A type may differ by layer, as after -ctk: `turbo3,0-1:q8_0/turbo3`. `sim:kivi4`
and `sim:turbo4/turbo3@mean1` are caches that are only imitated (`simulated_schemes`). Checked before MLX is imported;
making caches of them is `evaluation.caches`' matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tqgguf.formats.blocks.cache_spec import BALANCE_MODES, PRESETS, CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.imitations.simulated_schemes import SCHEMES, VARIANTS, has_tail, is_variant

MLX_BITS = {"mlx-q8": 8, "mlx-q4": 4, "mlx-q2": 2}
"""Bits of mlx-lm's QuantizedKVCache; its arithmetic of planes allows powers of two only."""

PLAIN = "plain"
FORMS = (PLAIN, *BALANCE_MODES)
"""What may follow an @: a balance of K, or plain, which is balance off and no exact prefix."""

SIMULATED = "sim:"
"""What names of imitated caches begin with."""

_COMMA = re.compile(r",(?!\s*-?\d+(?:--?\d+)?:)")  # not the comma before a rule of some layers

DEFAULT_PAIRS = "q8_0,q4_0,turbo4,turbo4/turbo3,turbo3,mlx-q4"


@dataclass(frozen=True)
class CachePair:
    """The types of K and V, and a form of FORMS or "". Both types are the same name of MLX_BITS for mlx-lm's cache.

    If it is simulated, both types are the same name of SCHEMES, or they are ours and the form is one of VARIANTS.
    """

    type_k: str
    type_v: str
    form: str = ""
    simulated: bool = False

    @property
    def is_mlx(self) -> bool:
        return self.type_k in MLX_BITS

    @property
    def is_ours(self) -> bool:
        """Whether it is a cache that `run` can have."""
        return not self.is_mlx and not self.simulated

    @property
    def has_blocks(self) -> bool:
        """Whether K or V is held in blocks, with an f16 tail that can be left away."""
        if self.simulated:
            return has_tail(self.type_k, self.form)
        return not self.is_mlx and CacheSpec(self.type_k, self.type_v).has_blocks

    def spec(self, n_prefix: int | None = None, balance: str | None = None) -> CacheSpec:
        """What is asked of a cache of ours: what its form says goes before the prefix and the balance given here."""
        if self.form == PLAIN:
            return CacheSpec(self.type_k, self.type_v, 0, "off")
        return CacheSpec(self.type_k, self.type_v, n_prefix, self.form or balance)

    @property
    def label(self) -> str:
        is_one = self.is_mlx or self.type_k in SCHEMES
        types = self.type_k if is_one else f"{self.type_k}/{self.type_v}"
        return (SIMULATED if self.simulated else "") + types + (f"@{self.form}" if self.form else "")


def parse_pairs(text: str, flag: str = "--cache-types") -> tuple[CachePair, ...]:
    """The pairs of a comma list, each once.

    RequestError: none, nothing between two commas, an unknown name, half of mlx-lm's cache.
    """
    words = [word.strip(" ") for word in _COMMA.split(text)]
    if not all(words):
        found = repr(text) if any(words) else "none"
        raise RequestError(
            f"{flag}: expected cache types such as turbo4/turbo3,q8_0 with commas between, found {found}"
        )
    return tuple(dict.fromkeys(_pair(word, flag) for word in words))


def crossed_pairs(types_k: str, types_v: str) -> tuple[CachePair, ...]:
    """Every type of K of a comma list with every one of V, as llama-bench crosses -ctk and -ctv.

    RequestError as `parse_pairs`, naming the flag.
    """
    sides = []
    for flag, text in (("-ctk", types_k), ("-ctv", types_v)):
        found = parse_pairs(text, flag)
        if any(not pair.is_ours or pair.type_k != pair.type_v or pair.form for pair in found):
            raise RequestError(
                f"{flag} {text}: expected cache types of one side with commas between; see --cache-types"
            )
        sides.append([pair.type_k for pair in found])
    return tuple(CachePair(k, v) for k in sides[0] for v in sides[1])


def requested_pairs(cache_types: str | None, types_k: str | None, types_v: str | None) -> tuple[CachePair, ...] | None:
    """The pairs of --cache-types, or of -ctk and -ctv, one of which alone leaves f16 to the other side, as in `run`;
    None: nothing was asked for. RequestError: both were, or as `parse_pairs`.
    """
    has_sides = types_k is not None or types_v is not None
    if cache_types is None:
        return crossed_pairs(types_k or "f16", types_v or "f16") if has_sides else None
    if has_sides:
        raise RequestError("--cache-types names pairs, -ctk and -ctv sides: leave one out")
    return parse_pairs(cache_types)


def _pair(word: str, flag: str) -> CachePair:
    if word.startswith(SIMULATED):
        return _simulated(word, flag)
    if word in PRESETS:
        return CachePair(*PRESETS[word])
    types, at, form = word.partition("@")
    type_k, slash, type_v = types.partition("/")
    pair = CachePair(type_k, type_v if slash else type_k, form)
    if not pair.is_mlx or pair.type_k != pair.type_v:
        if {pair.type_k, pair.type_v} & set(MLX_BITS):
            raise RequestError(f"{flag} {word}: mlx-lm's cache has one number of bits for K and V; give its name alone")
        try:
            CacheSpec(pair.type_k, pair.type_v).check()
        except RequestError as error:
            raise RequestError(f"{flag}: {error}, {', '.join(MLX_BITS)}") from None
    if at and (form not in FORMS or not pair.has_blocks):
        expected = (
            f"expected one of {', '.join(FORMS)} after @" if pair.has_blocks else "expected no @ after such a type"
        )
        raise RequestError(f"{flag} {word}: {expected}, found {form!r}")
    return pair


def _simulated(word: str, flag: str) -> CachePair:
    types, _, form = word.removeprefix(SIMULATED).partition("@")
    if not form and types in SCHEMES:
        return CachePair(types, types, simulated=True)
    type_k, slash, type_v = types.partition("/")
    pair = CachePair(type_k, type_v if slash else type_k, form, simulated=True)
    if not is_variant(form):
        raise RequestError(
            f"{flag} {word}: expected one of {', '.join(SCHEMES)} after {SIMULATED}, or types of ours and an @ with "
            f"one of {', '.join(VARIANTS)}"
        )
    for name in (pair.type_k, pair.type_v):
        if "," in name:
            raise RequestError(f"{flag} {word}: expected the same type in all layers of a simulated cache")
    try:
        CacheSpec(pair.type_k, pair.type_v).check()
    except RequestError as error:
        raise RequestError(f"{flag} {word}: {error}") from None
    return pair

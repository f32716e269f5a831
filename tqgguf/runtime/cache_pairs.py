"""The names of what `tqgguf eval` compares: pairs of cache types as the command line writes them.

`turbo4/turbo3` is K and V, `q8_0` both, `turbo3@plain` another form of what the types are by default, `mlx-q4` mlx-lm's
own quantised cache. A type may differ by layer, as after -ctk: `turbo3,0-1:q8_0/turbo3`. Checked before MLX is
imported; making caches of them is `evaluation_caches`' matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tqgguf.formats.cache_spec import BALANCE_MODES, CacheSpec
from tqgguf.formats.errors import RequestError

MLX_BITS = {"mlx-q8": 8, "mlx-q4": 4, "mlx-q2": 2}
"""Bits of mlx-lm's QuantizedKVCache; its arithmetic of planes allows powers of two only."""

PLAIN = "plain"
FORMS = (PLAIN, *BALANCE_MODES)
"""What may follow an @: a balance of K, or plain, which is balance off and no exact prefix."""

_COMMA = re.compile(r",(?!\s*-?\d+(?:--?\d+)?:)")  # not the comma before a rule of some layers

DEFAULT_PAIRS = "q8_0,q4_0,turbo4,turbo4/turbo3,turbo3,mlx-q4"


@dataclass(frozen=True)
class CachePair:
    """The types of K and V, and a form of FORMS or "". Both types are the same name of MLX_BITS for mlx-lm's cache."""

    type_k: str
    type_v: str
    form: str = ""

    @property
    def is_mlx(self) -> bool:
        return self.type_k in MLX_BITS

    @property
    def has_blocks(self) -> bool:
        """Whether K or V is held in pages of our blocks."""
        return not self.is_mlx and CacheSpec(self.type_k, self.type_v).has_blocks

    @property
    def label(self) -> str:
        types = self.type_k if self.is_mlx else f"{self.type_k}/{self.type_v}"
        return types + (f"@{self.form}" if self.form else "")


def parse_pairs(text: str, flag: str = "--cache-types") -> tuple[CachePair, ...]:
    """The pairs of a comma list, each once. RequestError: none, an unknown name, half of mlx-lm's cache."""
    pairs = [_pair(word.strip(), flag) for word in _COMMA.split(text) if word.strip()]
    if not pairs:
        raise RequestError(f"{flag}: expected cache types such as turbo4/turbo3,q8_0, found none")
    return tuple(dict.fromkeys(pairs))


def _pair(word: str, flag: str) -> CachePair:
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

"""The names of what `tqgguf eval` compares: pairs of cache types as the command line writes them.

`turbo4/turbo3` is K and V, `q8_0` both, `turbo3@plain` another form of what the types are by default, `mlx-q4` mlx-lm's
own quantised cache. Checked before MLX is imported; making caches of them is `evaluation_caches`' matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.formats.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.cache_spec import BALANCE_MODES
from tqgguf.formats.errors import RequestError

MLX_BITS = {"mlx-q8": 8, "mlx-q4": 4, "mlx-q2": 2}
"""Bits of mlx-lm's QuantizedKVCache; its arithmetic of planes allows powers of two only."""

PLAIN = "plain"
FORMS = (PLAIN, *BALANCE_MODES)
"""What may follow an @: a balance of K, or plain, which is balance off and no exact prefix."""

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
        return not self.is_mlx and any(BLOCK_TYPES[t].family != "float" for t in (self.type_k, self.type_v))

    @property
    def label(self) -> str:
        types = self.type_k if self.is_mlx else f"{self.type_k}/{self.type_v}"
        return types + (f"@{self.form}" if self.form else "")


def parse_pairs(text: str, flag: str = "--cache-types") -> tuple[CachePair, ...]:
    """The pairs of a comma list, each once. RequestError: none, an unknown name, half of mlx-lm's cache."""
    pairs = [_pair(word.strip(), flag) for word in text.split(",") if word.strip()]
    if not pairs:
        raise RequestError(f"{flag}: expected cache types such as turbo4/turbo3,q8_0, found none")
    return tuple(dict.fromkeys(pairs))


def _pair(word: str, flag: str) -> CachePair:
    types, at, form = word.partition("@")
    type_k, slash, type_v = types.partition("/")
    pair = CachePair(type_k, type_v if slash else type_k, form)
    for name in (pair.type_k, pair.type_v):
        if name not in BLOCK_TYPES and name not in MLX_BITS:
            raise RequestError(f"{flag}: {_unknown(name)}")
    if pair.type_k != pair.type_v and {pair.type_k, pair.type_v} & set(MLX_BITS):
        raise RequestError(f"{flag} {word}: mlx-lm's cache has one number of bits for K and V; give its name alone")
    if at and (form not in FORMS or not pair.has_blocks):
        expected = (
            f"expected one of {', '.join(FORMS)} after @" if pair.has_blocks else "expected no @ after such a type"
        )
        raise RequestError(f"{flag} {word}: {expected}, found {form!r}")
    return pair


def _unknown(name: str) -> str:
    from tqgguf.formats.codec import resolve_codec  # lazily: numpy is not needed for --help

    try:
        resolve_codec(name, PAGE_TOKENS, "k")
    except RequestError as error:
        return f"{error}, {', '.join(MLX_BITS)}"
    raise AssertionError(f"{name} is a codec without a block type")

"""The names of what `tqgguf eval` compares: pairs of cache types as the command line writes them.

`turbo4/turbo3` is K and V, `q8_0` both, `mlx-q4` mlx-lm's own quantised cache. Checked before MLX is imported; making
caches of them is `evaluation_caches`' matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.formats.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.errors import RequestError

MLX_BITS = {"mlx-q8": 8, "mlx-q4": 4, "mlx-q2": 2}
"""Bits of mlx-lm's QuantizedKVCache; its arithmetic of planes allows powers of two only."""

DEFAULT_PAIRS = "q8_0,q4_0,turbo4,turbo4/turbo3,turbo3,mlx-q4"


@dataclass(frozen=True)
class CachePair:
    """The types of K and V. Both are the same name of MLX_BITS for mlx-lm's cache."""

    type_k: str
    type_v: str

    @property
    def label(self) -> str:
        return self.type_k if self.type_k in MLX_BITS else f"{self.type_k}/{self.type_v}"


def parse_pairs(text: str, flag: str = "--cache-types") -> tuple[CachePair, ...]:
    """The pairs of a comma list, each once. RequestError: none, an unknown name, half of mlx-lm's cache."""
    pairs = [_pair(word.strip(), flag) for word in text.split(",") if word.strip()]
    if not pairs:
        raise RequestError(f"{flag}: expected cache types such as turbo4/turbo3,q8_0, found none")
    return tuple(dict.fromkeys(pairs))


def _pair(word: str, flag: str) -> CachePair:
    type_k, slash, type_v = word.partition("/")
    names = (type_k, type_v if slash else type_k)
    for name in names:
        if name not in BLOCK_TYPES and name not in MLX_BITS:
            raise RequestError(f"{flag}: {_unknown(name)}")
    if names[0] != names[1] and not all(name in BLOCK_TYPES for name in names):
        raise RequestError(f"{flag} {word}: mlx-lm's cache has one number of bits for K and V; give its name alone")
    return CachePair(*names)


def _unknown(name: str) -> str:
    from tqgguf.formats.codec import resolve_codec  # lazily: numpy is not needed for --help

    try:
        resolve_codec(name, PAGE_TOKENS, "k")
    except RequestError as error:
        return f"{error}, {', '.join(MLX_BITS)}"
    raise AssertionError(f"{name} is a codec without a block type")

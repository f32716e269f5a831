"""What `tqgguf bench` compares: caches by the names of `cache_pairs`, each as sessions that can be forked.

A fork goes on from where its session stands and leaves it as it is, so that a test can be repeated at a depth that was
evaluated once. Simulated caches have no speed of their own, and are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tqgguf.formats.blocks.kv_size import TOKEN_ID_BYTES, LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import CachePair
from tqgguf.measuring.evaluation.caches import CacheOptions, Candidate, candidate
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.generation.prompt_pieces import PromptPieces
from tqgguf.runtime.generation.session import Session, Timing
from tqgguf.runtime.models.loaded_model import LoadedModel


def modes_of(
    pairs: Sequence[CachePair], layers: Sequence[LayerShape], n_ctx: int, options: CacheOptions
) -> list[Candidate]:
    """A mode for each pair. RequestError: heads that a pair cannot hold; a simulated one."""
    for pair in pairs:
        if pair.simulated:
            raise RequestError(f"{pair.label}: imitated caches have no speed and no bytes; `tqgguf eval` compares them")
    return [candidate(pair, layers, n_ctx, options) for pair in pairs]


class ModeSession(Session):
    """A session whose cache is a mode's."""

    def __init__(self, loaded: LoadedModel, mode: Candidate, *, n_ctx: int, chunk: int) -> None:
        self.mode = mode
        super().__init__(loaded, n_ctx=n_ctx, chunk=chunk)

    def _new_cache(self) -> list[Any]:
        return self.mode.make(self.loaded.model, self.usage)

    @property
    def kv_bytes(self) -> int:
        """What the cache holds: by the formula of `kv_size` if all of it is ours, else as it is allocated."""
        if all(isinstance(cache, BlockKVCache) for cache in self.cache):
            return self.report().kv_bytes
        return sum(cache.nbytes for cache in self.cache) + TOKEN_ID_BYTES * len(self.tokens)

    @property
    def share_from_blocks(self) -> float | None:
        """Of the keys that decoding read, how many it read from blocks; None where not all of the cache is ours."""
        if not all(isinstance(cache, BlockKVCache) for cache in self.cache):
            return None
        reads = self.report().answer_reads
        keys = reads.keys_from_blocks + reads.keys_in_float
        return reads.keys_from_blocks / keys if keys else None

    def fork(self) -> ModeSession:
        """Another session that goes on from here."""
        other = copy.copy(self)
        other.cache = [_forked(cache) for cache in self.cache]
        other.tokens = list(self.tokens)
        other.pieces = PromptPieces(self.chunk, self.pieces.ranges)
        other.timing = Timing()
        return other


def _forked(cache: Any) -> Any:
    """A copy that grows by itself: arrays are shared, for rows are only ever added behind those that there are."""
    other = copy.copy(cache)
    for name, value in vars(other).items():
        if isinstance(value, list):
            setattr(other, name, list(value))
    return other

"""Evaluating prompts on the grid, decoding tokens, and what is worth reporting of both.

A `Session` is one sequence: its tokens, its cache, and how long things took. Prompts are cut at absolute multiples of
`chunk`, so that the same tokens are always evaluated in the same pieces. Knows nothing of text on a terminal, flags or
files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.errors import RequestError
from tqgguf.formats.kv_size import PAGE_TOKENS, kv_bytes
from tqgguf.runtime.attention import Reads
from tqgguf.runtime.kv_cache import BlockKVCache, default_prefix, make_prompt_cache
from tqgguf.runtime.load import LoadedModel
from tqgguf.runtime.sampling import Sampler
from tqgguf.runtime.text_stream import TextStream

DEFAULT_CHUNK = 256  # tokens of a prompt evaluated at once
CLEAR_CACHE_EVERY = 256  # decoded tokens after which mlx returns unused buffers

Progress = Callable[[int, int], None]
"""Called with (prompt tokens evaluated, prompt tokens in all)."""


def round_chunk(chunk: int) -> int:
    """The grid step that a requested one becomes: the next multiple of a page."""
    return max(1, -(-chunk // PAGE_TOKENS)) * PAGE_TOKENS


@dataclass
class Timing:
    """Tokens evaluated and the seconds they took."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class CacheReport:
    """What the cache holds: types as resolved, bytes by the design's formula and as f16 would need, and what was read."""

    type_k: str
    type_v: str
    n_tokens: int
    n_prefix: int
    kv_bytes: int
    f16_bytes: int
    reads: Reads
    by_fallback: int
    n_other_layers: int


class Session:
    """One sequence of a model with its cache. RequestError for cache types that the model's heads cannot have."""

    def __init__(
        self,
        loaded: LoadedModel,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        n_ctx: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        n_prefix: int | None = None,
        strict: bool = False,
    ) -> None:
        self.loaded = loaded
        self.n_ctx = n_ctx or loaded.config.context_length
        self.chunk = round_chunk(chunk)
        self.type_k, self.type_v = type_k, type_v
        self.n_prefix = default_prefix(type_k, type_v) if n_prefix is None else n_prefix
        self.cache = make_prompt_cache(loaded.model, type_k, type_v, n_prefix=self.n_prefix, strict=strict)
        self.tokens: list[int] = []
        self.timing = Timing()

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.n_ctx - len(self.tokens)

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        """Evaluate a prompt in grid chunks; the logits float32 [vocabulary] after its last token."""
        if not ids:
            raise RequestError("the prompt is empty: expected at least one token")
        if len(ids) > self.room:
            raise RequestError(
                f"the prompt has {len(ids)} tokens: expected at most {self.room} in a context of {self.n_ctx} (raise -c)"
            )
        start, done = time.perf_counter(), 0
        logits: NDArray[np.float32] | None = None
        while done < len(ids):
            step = min(self.chunk - len(self.tokens) % self.chunk, len(ids) - done)
            piece = list(ids[done : done + step])
            last = done + step == len(ids)
            logits = self._evaluate(piece, want_logits=last)
            done += step
            if progress is not None:
                progress(done, len(ids))
        self.timing.prompt_tokens += len(ids)
        self.timing.prompt_seconds += time.perf_counter() - start
        assert logits is not None
        return logits

    def decode(self, token: int) -> NDArray[np.float32]:
        """Evaluate one generated token; the logits float32 [vocabulary] after it."""
        start = time.perf_counter()
        logits = self._evaluate([token], want_logits=True)
        self.timing.decoded_tokens += 1
        self.timing.decode_seconds += time.perf_counter() - start
        if self.timing.decoded_tokens % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        assert logits is not None
        return logits

    def _evaluate(self, ids: list[int], want_logits: bool) -> NDArray[np.float32] | None:
        tokens = mx.array([ids], dtype=mx.int32)
        if want_logits:
            logits = self.loaded.last_logits(tokens, self.cache)
            mx.eval(logits, [c.state for c in self.cache])
            self.tokens += ids
            return np.array(logits.astype(mx.float32))
        self.loaded.model(tokens, cache=self.cache)
        mx.eval([c.state for c in self.cache])  # the logits of inner chunks are never computed
        mx.clear_cache()
        self.tokens += ids
        return None

    def report(self) -> CacheReport:
        """What the cache holds now and what attention has read so far."""
        blocks = [c for c in self.cache if isinstance(c, BlockKVCache)]
        usage = blocks[0].usage if blocks else None
        shapes, n = self.loaded.config.layer_shapes(), len(self.tokens)
        return CacheReport(
            type_k=self.type_k,
            type_v=self.type_v,
            n_tokens=n,
            n_prefix=min(self.n_prefix, n),
            kv_bytes=kv_bytes(shapes, self.type_k, self.type_v, n, self.n_prefix),
            f16_bytes=kv_bytes(shapes, "f16", "f16", n, 0),
            reads=usage.reads if usage else Reads(),
            by_fallback=usage.by_fallback if usage else 0,
            n_other_layers=len(self.cache) - len(blocks),
        )


@dataclass
class Generation:
    """One answer: iterate over `pieces` for its text as it comes; `finish` then says why it ended.

    finish: 'eog' (the model ended it), 'stop' (a stop string), 'length' (-n), 'context' (no room left).
    """

    session: Session
    sampler: Sampler
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    show_special: bool = False
    finish: str | None = None
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.session.loaded.tokenizer, self.stop, show_special=self.show_special)

    def pieces(self, logits: NDArray[np.float32]) -> Iterator[str]:
        """Text from the logits after the prompt until the end. Every yielded piece is whole characters.

        Each token that is shown has been evaluated, except the last one of an answer that ended by length or stop string.
        """
        tokenizer = self.session.loaded.tokenizer
        stream = self._stream
        while self.finish is None:
            if 0 <= self.n_predict <= len(self.ids):
                self.finish = "length"
                break
            token = self.sampler.sample(logits)
            self.sampler.accept(token)
            if token in tokenizer.end_of_generation:
                self.finish = "eog"
                break
            self.ids.append(token)
            if text := stream.push(token):
                yield text
            if stream.stopped:
                self.finish = "stop"
            elif self.session.room < 1:
                self.finish = "context"
            elif self.n_predict < 0 or len(self.ids) < self.n_predict:
                logits = self.session.decode(token)
        if rest := self.rest():
            yield rest

    def rest(self) -> str:
        """Text held back (a character or a stop string that was not completed); what an interrupted answer still shows."""
        return self._stream.finish()

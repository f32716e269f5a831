"""Evaluating prompts on the grid, decoding tokens, and what is worth reporting of both.

A `Session` is one sequence: its tokens, its cache, and how long things took. Prompts are cut at absolute multiples of
`chunk`, so that the same tokens are always evaluated in the same pieces. Knows nothing of text on a terminal, flags or
files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.block_types import PAGE_TOKENS
from tqgguf.formats.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.errors import RequestError
from tqgguf.formats.kv_size import kv_bytes
from tqgguf.runtime.grid import DEFAULT_CHUNK, round_chunk
from tqgguf.runtime.hook import Usage
from tqgguf.runtime.kv_cache import BlockKVCache, make_prompt_cache
from tqgguf.runtime.load import LoadedModel
from tqgguf.runtime.readings import Reads
from tqgguf.runtime.sampling import Sampler
from tqgguf.runtime.text_stream import TextStream

CLEAR_CACHE_EVERY = 256  # decoded tokens after which mlx returns unused buffers

Progress = Callable[[int, int], None]
"""Called with (prompt tokens evaluated, prompt tokens in all)."""


def check_prompt(n_tokens: int, n_ctx: int) -> None:
    """Refuse a prompt that is empty or longer than the context."""
    if not n_tokens:
        raise RequestError("the prompt is empty: expected at least one token")
    if n_tokens > n_ctx:
        raise RequestError(f"the prompt has {n_tokens} tokens: expected at most {n_ctx}, the size of the context (-c)")


def _combine(operation: Callable[[int, int], int], a: Reads, b: Reads) -> Reads:
    return Reads(*map(operation, astuple(a), astuple(b)))


@dataclass
class Timing:
    """Tokens evaluated and the seconds they took."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class CacheReport:
    """What the cache holds: types, bytes by the design's formula, what f16 would need, and what was read.

    balance: of K, in the layers that have one. is_calibrated: its channel scales were given, not taken from page 0.
    """

    type_k: str
    type_v: str
    balance: str
    is_calibrated: bool
    n_tokens: int
    n_prefix: int
    kv_bytes: int
    f16_bytes: int
    prompt_reads: Reads
    answer_reads: Reads
    by_fallback: int
    n_other_layers: int


class Session:
    """One sequence of a model with its cache. RequestError for cache types that the model's heads cannot have."""

    def __init__(
        self,
        loaded: LoadedModel,
        spec: CacheSpec = CacheSpec(),  # noqa: B008
        *,
        n_ctx: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        channel_scales: Mapping[int, mx.array] | None = None,
        strict: bool = False,
    ) -> None:
        self.loaded = loaded
        self.n_ctx = n_ctx or loaded.config.context_length
        self.chunk = round_chunk(chunk)
        self.spec, self.channel_scales = spec, channel_scales
        self.usage = Usage(strict=strict)
        self.cache = self._new_cache()
        self.tokens: list[int] = []
        """Token ids that the cache holds."""
        self.timing = Timing()
        self._prompt_reads = Reads()
        self._torn = False
        """An evaluation was broken off, so that the layers may hold different tokens."""

    def _new_cache(self) -> list[Any]:
        spec = self.spec
        return make_prompt_cache(
            self.loaded.model,
            spec.type_k,
            spec.type_v,
            n_prefix=spec.n_prefix,
            balance=spec.balance,
            channel_scales=self.channel_scales,
            usage=self.usage,
        )

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.n_ctx - len(self.tokens)

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        """Make `ids` the session's tokens: evaluate, in grid chunks, what it does not hold of them yet.

        Returns the logits float32 [vocabulary] after the last one, which is always evaluated.
        """
        check_prompt(len(ids), self.n_ctx)
        done = self._reuse(ids)
        start, before = time.perf_counter(), replace(self.usage.reads)
        logits: NDArray[np.float32] | None = None
        try:
            while done < len(ids):
                stop = min(len(ids), (done // self.chunk + 1) * self.chunk)
                logits = self._evaluate(list(ids[done:stop]), want_logits=stop == len(ids))
                self.timing.prompt_tokens += stop - done
                done = stop
                if progress is not None:
                    progress(done, len(ids))
        finally:  # an interrupted prompt counts as far as it came
            self.timing.prompt_seconds += time.perf_counter() - start
            read = _combine(int.__sub__, self.usage.reads, before)
            self._prompt_reads = _combine(int.__add__, self._prompt_reads, read)
        assert logits is not None
        return logits

    def _reuse(self, ids: Sequence[int]) -> int:
        """Go back to what a prompt has in common with the tokens held; the number of tokens that need no evaluation.

        Everything is kept if the prompt continues it; else the cache goes back to the page edge before the first
        difference, or to its start where a layer (a window, a recurrent state) cannot.
        """
        common = next((i for i, (a, b) in enumerate(zip(ids, self.tokens, strict=False)) if a != b), None)
        keep = min(len(ids) - 1, len(self.tokens)) if common is None else common
        if self._torn:
            self._go_back(0)
        elif keep < len(self.tokens):
            self._go_back(keep - keep % PAGE_TOKENS)
        return len(self.tokens)

    def _go_back(self, length: int) -> None:
        n = len(self.tokens) - length
        if not all(cache.is_trimmable() for cache in self.cache):
            length = 0
        if length:
            for cache in self.cache:
                cache.trim(n)
        else:
            self.cache = self._new_cache()
        del self.tokens[length:]

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
        self._torn = True
        logits: mx.array | None = None
        if want_logits:
            logits = self.loaded.last_logits(tokens, self.cache)
        else:
            self.loaded.fill(tokens, self.cache)
        end = len(self.tokens) + len(ids)
        if logits is None or len(ids) > 1 or end % PAGE_TOKENS == 0:
            mx.eval(logits, [c.state for c in self.cache])
        else:  # attention has read the token's rows, so that nothing else is left to evaluate before the page is full
            mx.eval(logits)
        self.tokens += ids
        self._torn = False
        if logits is not None:
            return np.array(logits.astype(mx.float32))
        mx.clear_cache()
        return None

    def report(self) -> CacheReport:
        """What the cache holds now and what attention has read so far."""
        ours = [c.settings.types for c in self.cache if isinstance(c, BlockKVCache)]
        shapes, n = self.loaded.config.layer_shapes(), len(self.tokens)
        balances = {types.balance for types in ours} - {"off"}
        return CacheReport(
            type_k=self.spec.type_k,
            type_v=self.spec.type_v,
            balance=next(iter(balances), "off"),
            is_calibrated="full" in balances and bool(self.channel_scales),
            n_tokens=n,
            n_prefix=min(n, *(types.n_prefix for types in ours)) if ours else 0,
            kv_bytes=kv_bytes(shapes, ours, n),
            f16_bytes=kv_bytes(shapes, [LayerTypes("f16", "f16")] * len(shapes), n),
            prompt_reads=self._prompt_reads,
            answer_reads=_combine(int.__sub__, self.usage.reads, self._prompt_reads),
            by_fallback=self.usage.by_fallback,
            n_other_layers=len(self.cache) - len(ours),
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

        Each token shown has been evaluated, except the last one of an answer that ended by length or stop string.
        """
        tokenizer = self.session.loaded.tokenizer
        stream = self._stream
        while self.finish is None:
            if 0 <= self.n_predict <= len(self.ids):
                self.finish = "length"
                break
            token = self.sampler.sample(logits[: tokenizer.vocab_size])  # some output layers are padded
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
        """Text held back: a character or stop string that was not completed. An interrupted answer still shows it."""
        return self._stream.finish()

"""Evaluating prompts on the grid, decoding tokens, and what is worth reporting of both.

A `Session` is one sequence: its tokens, its cache, and how long things took. Prompts are cut at absolute multiples of
`chunk`, so that the same tokens are always evaluated in the same pieces. It can hand out what it holds as a snapshot,
and begin with one. Knows nothing of text on a terminal, flags or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.blocks.kv_size import kv_bytes
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.runtime import backends
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.reads import Reads, Usage
from tqgguf.runtime.cache.compiled_steps import CompiledSteps
from tqgguf.runtime.cache.kv_cache import BlockKVCache, can_go_back
from tqgguf.runtime.cache.make_prompt_cache import make_caches
from tqgguf.runtime.cache.snapshots import capture_layers, restore_layers
from tqgguf.runtime.generation.prompt_pieces import PromptPieces
from tqgguf.runtime.models.load import LoadedModel
from tqgguf.text.grid import DEFAULT_CHUNK, round_chunk
from tqgguf.text.prompt_size import check_prompt

CLEAR_CACHE_EVERY = 256  # decoded tokens after which mlx returns unused buffers

Progress = Callable[[int, int], None]
"""Called with (prompt tokens evaluated, prompt tokens in all)."""


def _combine(operation: Callable[[int, int], int], a: Reads, b: Reads) -> Reads:
    return Reads(*map(operation, astuple(a), astuple(b)))


@dataclass
class Timing:
    """Tokens evaluated and the seconds they took. reused_tokens: of prompts, not evaluated because a prompt cache held
    them; reused_generated: of those, the ones that had not been evaluated as prompt here: generated, or by another
    program. answer_tokens: generated; the last one of an answer need not have been evaluated (decoded).
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_tokens: int = 0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0
    reused_tokens: int = 0
    reused_generated: int = 0

    def since(self, before: Timing) -> Timing:
        """What came on top of an earlier copy."""
        return Timing(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class CacheReport:
    """What the cache holds: types, bytes by the design's formula, what f16 would need, and what was read.

    balance: of K, in the layers that have one. is_calibrated: its channel scales were given, not taken from page 0.
    compiled_steps: of decoding. not_compiled: why there are none, on a GPU.
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
    compiled_steps: int
    not_compiled: str | None


class Session:
    """One sequence of a model with its cache. RequestError for cache types that the model's heads cannot have.

    keeps_pages: layers with a window keep all their pages, so that a prompt can be taken up again at any of them.
    backend: instead of `backends.default_backend`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: CacheSpec = CacheSpec(),  # noqa: B008
        *,
        n_ctx: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        channel_scales: Mapping[int, mx.array] | None = None,
        strict: bool = False,
        keeps_pages: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self.loaded, self.backend = loaded, backend
        self.n_ctx = n_ctx or loaded.config.context_length
        self.chunk = round_chunk(chunk)
        self.spec, self.channel_scales = spec, channel_scales
        self.usage = Usage(strict=strict)
        self.keeps_pages = keeps_pages
        self.cache = self._new_cache()
        self._steps = CompiledSteps(loaded.last_logits)
        self.tokens: list[int] = []
        """Token ids that the cache holds."""
        self.pending: list[int] = []
        """Token ids that follow them and have not been evaluated: the rest of a prompt that was broken off, the last
        token of an answer. A snapshot names them, so that whoever goes on with it evaluates them first."""
        self.pieces = PromptPieces(self.chunk)
        self._is_restored = False
        """The tokens are a snapshot's, and no prompt has taken them up yet."""
        self.timing = Timing()
        self._prompt_reads = Reads()
        self.is_torn = False
        """An evaluation was broken off, so that the layers may hold different tokens."""

    def _new_cache(self) -> list[Any]:
        return make_caches(
            self.loaded.model,
            self.spec,
            channel_scales=self.channel_scales,
            usage=self.usage,
            keeps_pages=self.keeps_pages,
            rolls_back=False,  # prompts go back to the edge of a page, and no draft is taken back
            backend=self.backend,
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
        self.pending = []
        done = self._reuse(ids)
        self.pending = list(ids[done:])
        start, before = time.perf_counter(), replace(self.usage.reads)
        logits: NDArray[np.float32] | None = None
        try:
            while done < len(ids):
                stop = min(len(ids), (done // self.chunk + 1) * self.chunk)
                logits = self._evaluate(list(ids[done:stop]), want_logits=stop == len(ids))
                self.pieces.add(done, stop)
                self.timing.prompt_tokens += stop - done
                done = stop
                self.pending = list(ids[done:])
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
        difference, or as far back as a layer (a window, a recurrent state) must. What a snapshot held is kept as far as
        it is what a run without one would have (see `PromptPieces.reusable`), or up to the difference if that cuts no
        block.
        """
        common = next((i for i, (a, b) in enumerate(zip(ids, self.tokens, strict=False)) if a != b), None)
        keep = min(len(ids) - 1, len(self.tokens)) if common is None else common
        restored, self._is_restored = self._is_restored, False
        if self.is_torn:  # also where there are no tokens yet: layers may hold some
            keep = 0
            self._go_back(0)
        elif restored:
            keep = self.pieces.reusable(min(keep, len(ids) - 1))
        if keep < len(self.tokens):
            ours = (cache for cache in self.cache if isinstance(cache, BlockKVCache))
            exact = restored and all(cache.trims_exactly(keep) for cache in ours)
            self._go_back(keep if exact else keep - keep % PAGE_TOKENS)
        if restored:
            self.timing.reused_tokens = len(self.tokens)
            self.timing.reused_generated = self.pieces.n_generated(len(self.tokens))
        return len(self.tokens)

    def _go_back(self, length: int) -> None:
        """Keep at most `length` tokens: that many, or the pages before them that every layer can go back to."""
        while length and not all(can_go_back(cache, length) for cache in self.cache):
            length = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        if length:
            for cache in self.cache:
                cache.trim(len(self.tokens) - length)
        else:
            self.cache = self._new_cache()
        del self.tokens[length:]
        self.pieces.cut(length)

    def adopt(self, snapshot: Snapshot) -> None:
        """Begin with what a snapshot holds. The session is new, of the snapshot's types and chunk (0: any).

        RequestError, FormatError: the snapshot is not of this model's layers or of this cache's types; nothing has
        changed then.
        """
        if snapshot.chunk and snapshot.chunk != self.chunk:
            raise RequestError(
                f"prompt cache: evaluated in chunks of {snapshot.chunk} tokens, expected {self.chunk} (-ub)"
            )
        cache = self._new_cache()
        restore_layers(snapshot, cache)
        self.cache = cache
        self.tokens = snapshot.tokens[: snapshot.n_cells].tolist()
        self.pieces = PromptPieces(self.chunk, snapshot.prompt_ranges)
        self._is_restored = True

    def snapshot(self) -> Snapshot:
        """What the session holds and what is pending, to be written before it changes. RequestError: a layer that no
        snapshot can hold, an evaluation that was broken off within a step.
        """
        if self.is_torn:
            raise RequestError("an evaluation was broken off, so that layers hold different tokens: nothing to save")
        config = self.loaded.config
        return Snapshot(
            tokens=np.array(self.tokens + self.pending, np.int32),
            layers=capture_layers(self.cache),
            n_cells=len(self.tokens),
            architecture=config.architecture,
            chunk=self.chunk,
            prompt_ranges=self.pieces.ranges,
            n_vocab=config.vocab_size,
            model=config.name,
            fingerprint=self.loaded.fingerprint,
        )

    def decode(self, token: int) -> NDArray[np.float32]:
        """Evaluate one generated token; the logits float32 [vocabulary] after it."""
        start = time.perf_counter()
        logits = self._evaluate([token], want_logits=True)
        self.pending = []
        self.timing.decoded_tokens += 1
        self.timing.decode_seconds += time.perf_counter() - start
        if self.timing.decoded_tokens % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        assert logits is not None
        return logits

    def _evaluate(self, ids: list[int], want_logits: bool) -> NDArray[np.float32] | None:
        tokens = mx.array([ids], dtype=mx.int32)
        self.is_torn = True
        logits: mx.array | None = None
        if want_logits:
            logits = self._steps.step(tokens, self.cache) if len(ids) == 1 else None
            if logits is None:
                logits = self.loaded.last_logits(tokens, self.cache)
        else:
            self.loaded.fill(tokens, self.cache)
        end = len(self.tokens) + len(ids)
        for cache in self.cache[:1]:  # all layers have one backend
            if isinstance(cache, BlockKVCache):
                cache.backend.wait()
        if logits is None or len(ids) > 1 or end % PAGE_TOKENS == 0:
            mx.eval(logits, [c.state for c in self.cache])
        else:  # attention has read the token's rows, so that nothing else is left to evaluate before the page is full
            mx.eval(logits)
        self.tokens += ids
        self.is_torn = False
        if logits is not None:
            return np.array(logits.astype(mx.float32))
        mx.clear_cache()
        return None

    @property
    def kernels_compiled(self) -> tuple[int, float]:
        """How many kernels were compiled to be kept for later processes, and the seconds waited for them."""
        backend = next((cache.backend for cache in self.cache if isinstance(cache, BlockKVCache)), None)
        return (0, 0.0) if backend is None else backends.kernels_compiled(backend)

    def report(self) -> CacheReport:
        """What the cache holds now and what attention has read so far."""
        blocks = [c for c in self.cache if isinstance(c, BlockKVCache)]
        ours = [c.settings.types for c in blocks]
        shapes, n = self.loaded.config.layer_shapes(), len(self.tokens)
        balances = {types.balance for types in ours} - {"off"}
        return CacheReport(
            type_k=self.spec.type_k,
            type_v=self.spec.type_v,
            balance=next(iter(balances), "off"),
            is_calibrated=any(c.channel_scale is not None and c.settings.types.balance == "full" for c in blocks),
            n_tokens=n,
            n_prefix=min(n, *(types.n_prefix for types in ours)) if ours else 0,
            kv_bytes=kv_bytes(shapes, ours, n),
            f16_bytes=kv_bytes(shapes, [LayerTypes("f16", "f16")] * len(shapes), n),
            prompt_reads=self._prompt_reads,
            answer_reads=_combine(int.__sub__, self.usage.reads, self._prompt_reads),
            by_fallback=self.usage.by_fallback,
            n_other_layers=len(self.cache) - len(ours),
            compiled_steps=self._steps.n_steps,
            not_compiled=None if mx.default_device() == mx.cpu else self._steps.refusal,
        )

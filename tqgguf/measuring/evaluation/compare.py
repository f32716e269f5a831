"""Evaluating caches side by side: windows of a text, chunk by chunk, every cache against the f16 one.

All caches advance in lockstep over the same tokens, so that the reference's logits are needed for one chunk only and
never kept: per chunk every cache's outputs of the model's body are computed once, and the output layer is applied to
tiles of their rows. What is stepped is what `generate.Session` steps. Statistics are `evaluation.statistics`' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.errors import RequestError
from tqgguf.measuring.evaluation.caches import Candidate
from tqgguf.measuring.evaluation.scores import Logits, ReferenceRows, TokenScores
from tqgguf.measuring.evaluation.statistics import PositionRange, Statistics, by_position, kld_profile, statistics
from tqgguf.runtime.attention.reads import Reads, Usage
from tqgguf.runtime.kv.pages import cuts
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.text.grid import DEFAULT_CHUNK
from tqgguf.text.text_tokenizer import TextTokenizer

TILE_BYTES = 64 << 20
"""Most float32 logits held of one cache at a time. Held at once are two such tiles, the reference's and another's, and
the reference's probabilities in float64."""

Progress = Callable[[int, int], None]
"""Called with (tokens evaluated, tokens in all), counting every cache's; what it raises ends the evaluation."""


def cut_windows(
    tokenizer: TextTokenizer,
    text: str,
    n_ctx: int,
    n_windows: int | None,
    source: str = "the text",
    *,
    is_spread: bool = False,
    flags: str = "--chunks, -c",
) -> NDArray[np.int64]:
    """The windows int64 [n_windows, n_ctx] of a text, one after the other, as llama-perplexity cuts them.

    flags: which settle how much text is needed.

    is_spread: n_windows of them are spread over the text, instead of its first ones.

    The text is tokenised once, markup in it as plain text, with BOS where the model adds one; there BOS also takes the
    place of each window's first token. n_windows None: as many as the text gives. RequestError: it gives fewer.
    """
    bos = _added_bos(tokenizer)
    ids = [*bos, *tokenizer.encode(text, add_special=False, parse_special=False)]
    held = len(ids) // n_ctx
    wanted = max(held, 1) if n_windows is None else n_windows
    if held < wanted:
        raise RequestError(
            f"{source} has {len(ids):,} tokens: expected at least {wanted * n_ctx:,} for "
            f"{count_windows(wanted, n_ctx)} ({flags})"
        )
    windows = np.array(ids[: held * n_ctx], np.int64).reshape(held, n_ctx)
    windows = spread(windows, wanted) if is_spread else windows[:wanted]
    if bos:
        windows[:, 0] = bos[0]
    return windows


def count_windows(n_windows: int, n_ctx: int) -> str:
    """In words."""
    return f"{n_windows:,} window{'s' if n_windows > 1 else ''} of {n_ctx:,} tokens"


def spread(windows: NDArray[np.int64], n_wanted: int) -> NDArray[np.int64]:
    """At most so many of a text's windows, from the middles of as many even parts of it."""
    n_held = len(windows)
    n_wanted = min(n_wanted, n_held)
    return windows[[(2 * i + 1) * n_held // (2 * n_wanted) for i in range(n_wanted)]]


def _added_bos(tokenizer: TextTokenizer) -> list[int]:
    """[BOS] if a text begins with one, else []."""
    if tokenizer.bos_id is None:
        return []
    return [tokenizer.bos_id] if tokenizer.encode("a")[:1] == [tokenizer.bos_id] else []


@dataclass(frozen=True)
class Plan:
    """What is evaluated. first_scored: position of the first row of logits that counts (0: all do).

    The row at position p is scored by token p + 1, so that a window's last row never counts.
    """

    windows: NDArray[np.int64]
    first_scored: int = 0
    chunk: int = DEFAULT_CHUNK
    tile_bytes: int = TILE_BYTES

    @property
    def n_scored(self) -> int:
        """Tokens that are scored in all windows."""
        n_windows, n_ctx = self.windows.shape
        return n_windows * max(0, n_ctx - 1 - self.first_scored)


@dataclass(frozen=True)
class Chunk:
    """Positions start <= p < stop of a window, and every candidate's outputs of the model's body there [1, n, ...]."""

    start: int
    stop: int
    outputs: list[mx.array]


@dataclass(frozen=True)
class Result:
    """What was measured of one candidate. by_fallback: keys decoded for a model that attends by itself."""

    candidate: Candidate
    statistics: Statistics
    by_position: list[PositionRange]
    profile: list[tuple[float, float]]
    reads: Reads
    by_fallback: int


class Evaluation:
    """Several caches of one model over the windows of a plan; the first candidate is the reference of all.

    `run` may be broken off by what its progress call raises: `scores` then are those of whole chunks, the same tokens
    for every candidate.
    """

    def __init__(self, loaded: LoadedModel, candidates: Sequence[Candidate], plan: Plan) -> None:
        self.loaded, self.candidates, self.plan = loaded, tuple(candidates), plan
        self._usage = [Usage() for _ in self.candidates]
        self._parts: list[list[TokenScores]] = [[] for _ in self.candidates]
        self._done = 0

    def results(self) -> list[Result]:
        """What has been measured so far, of every candidate."""
        reference = self.scores(0)
        found = []
        for index, candidate in enumerate(self.candidates):
            scores = self.scores(index)
            whole, ranges = statistics(reference, scores), by_position(reference, scores)
            reads, by_fallback = self._usage[index].reads, self._usage[index].by_fallback
            found.append(Result(candidate, whole, ranges, kld_profile(scores), reads, by_fallback))
        return found

    def scores(self, index: int) -> TokenScores:
        """What has been scored so far of the candidate of that number."""
        return TokenScores.joined(self._parts[index])

    def run(self, progress: Progress | None = None) -> None:
        """Evaluate every window."""
        total = len(self.candidates) * self.plan.windows.size

        def advance(n_tokens: int) -> None:
            self._done += n_tokens
            if progress is not None:
                progress(self._done, total)

        for window in self.plan.windows:
            for chunk in self.chunks(window, advance):
                rows = np.arange(max(chunk.start, self.plan.first_scored), min(chunk.stop, len(window) - 1))
                scored = self._score(chunk, rows, window, advance) if len(rows) else []
                for parts, scores in zip(self._parts, scored, strict=False):
                    parts.append(scores)
                advance(chunk.stop - chunk.start)

    def chunks(self, window: NDArray[np.int64], advance: Callable[[int], None] | None = None) -> Iterator[Chunk]:
        """Step fresh caches through a window int64 [n_ctx] on the grid.

        advance: called with each cache's tokens, but for the last cache's: those count once the chunk is scored.
        """
        caches = [c.make(self.loaded.model, usage) for c, usage in zip(self.candidates, self._usage, strict=True)]
        for start, stop in pairwise(cuts(0, len(window), self.plan.chunk)):
            outputs = []
            for cache in caches:
                found = self.loaded.outputs(mx.array(window[None, start:stop].astype(np.int32)), cache)
                mx.eval(found, [layer.state for layer in cache])
                outputs.append(found)
                if advance is not None and len(outputs) < len(caches):
                    advance(stop - start)
            yield Chunk(start, stop, outputs)
            mx.clear_cache()

    def _score(
        self, chunk: Chunk, positions: NDArray[np.int64], window: NDArray[np.int64], advance: Callable[[int], None]
    ) -> list[TokenScores]:
        """The scores of every candidate at `positions`, which follow each other within the chunk.

        advance: called with 0 between two candidates, so that what it raises need not wait for the whole chunk.
        """
        step = self._tile_rows(chunk)
        scored: list[list[TokenScores]] = [[] for _ in chunk.outputs]
        for at in range(0, len(positions), step):
            tile = positions[at : at + step]
            n = len(tile)
            reference = ReferenceRows(self._logits(chunk, 0, tile), window[tile + 1])
            scored[0].append(TokenScores(tile, reference.nll(), np.zeros(n), np.ones(n, bool)))
            for index in range(1, len(chunk.outputs)):
                advance(0)
                scored[index].append(TokenScores(tile, *reference.compare(self._logits(chunk, index, tile))))
        return [TokenScores.joined(parts) for parts in scored]

    def _logits(self, chunk: Chunk, index: int, tile: NDArray[np.int64]) -> Logits:
        rows = chunk.outputs[index][:, int(tile[0]) - chunk.start : int(tile[-1]) - chunk.start + 1]
        return np.asarray(self.loaded.logits(rows)[0].astype(mx.float32))

    def _tile_rows(self, chunk: Chunk) -> int:
        n_vocabulary = self.loaded.config.vocab_size or chunk.outputs[0].shape[-1]
        return max(1, self.plan.tile_bytes // (4 * n_vocabulary))

"""Prefill and decode speed of several caches, in the manner of llama-bench: random tokens, by depth, interleaved.

Every repetition measures each test of each mode once, the modes in an order of its own, so that a busy machine cannot
favour one. At a depth all modes hold their caches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tqgguf.formats.bench_record import Speed
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.measuring.bench.modes import ModeSession
from tqgguf.measuring.evaluation.caches import Candidate
from tqgguf.runtime.models.loaded_model import LoadedModel

WARM_DECODED = PAGE_TOKENS + 1
"""Tokens that are decoded, at most, before decoding is measured: with them every kind of step has been taken once, also
the one that fills a page and the one after it. What is compiled for a kind of step then is, and memory is touched."""

Tick = Callable[[int], None]
"""Called with tokens that were evaluated since the last call; what it raises ends the measurement."""


@dataclass(frozen=True)
class SpeedPlan:
    """Tokens of prompts (prefill) and answers (decode), depths in whole pages, repetitions, chunk, seed."""

    prompts: Sequence[int]
    answers: Sequence[int]
    depths: Sequence[int]
    repetitions: int
    chunk: int
    seed: int

    @property
    def tests(self) -> list[tuple[str, int]]:
        return [("prefill", n) for n in self.prompts] + [("decode", n) for n in self.answers]

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest sequence that is measured."""
        return max(self.depths) + max(n for _, n in self.tests) if self.tests else 0

    def n_warm(self, phase: str, n: int) -> int:
        """Tokens that a test of n is tried on before it is measured, by each cache at each depth: of a prompt one
        whole chunk and the last one, which are all the shapes of its steps; of an answer up to WARM_DECODED.
        """
        return min(n, WARM_DECODED) if phase == "decode" else min(n, self.chunk + n % self.chunk)

    def n_tokens(self, n_modes: int) -> int:
        """Tokens that are evaluated for everything."""
        each = sum(n * self.repetitions + self.n_warm(phase, n) for phase, n in self.tests)
        return n_modes * sum(each + depth for depth in self.depths) if self.tests else 0


def random_tokens(n: int, vocabulary: int, *seed: int) -> list[int]:
    """The same ones for a seed everywhere."""
    return np.random.default_rng(seed).integers(0, vocabulary, n).tolist()


def measure_speeds(
    loaded: LoadedModel, modes: Sequence[Candidate], plan: SpeedPlan, speeds: list[Speed], tick: Tick
) -> None:
    """Measure into `speeds`, which holds what there is whenever `tick` raises."""
    if not plan.tests:
        return
    vocabulary = loaded.tokenizer.vocab_size
    for depth in plan.depths:
        rows = {
            (mode.label, test): Speed(mode.label, test[0], test[1], depth)  # type: ignore[arg-type]
            for test in plan.tests
            for mode in modes
        }
        speeds += rows.values()
        past = random_tokens(depth, vocabulary, plan.seed)
        bases = [_prepared(loaded, mode, past, plan, tick) for mode in modes]
        for repetition in range(plan.repetitions):
            seed = plan.seed + repetition
            order = np.random.default_rng(seed).permutation(len(modes))
            for test in plan.tests:
                new = random_tokens(test[1], vocabulary, seed, 1)
                for index in order:
                    seconds = _measured(bases[index].fork(), test[0], new, tick)
                    row = rows[modes[index].label, test]
                    row.seconds.append(seconds)
                    row.seeds.append(seed)
        del bases


def _prepared(loaded: LoadedModel, mode: Candidate, past: list[int], plan: SpeedPlan, tick: Tick) -> ModeSession:
    """A session that holds `past`, after each test was tried behind it without being measured."""
    session = ModeSession(loaded, mode, n_ctx=plan.n_ctx, chunk=plan.chunk)
    if past:
        _prefill(session, past, tick)
    for phase, n in plan.tests:
        _measured(session.fork(), phase, [0] * plan.n_warm(phase, n), tick)
    return session


def _prefill(session: ModeSession, ids: list[int], tick: Tick) -> None:
    told = len(session.tokens)

    def progress(done: int, total: int) -> None:
        nonlocal told
        tick(done - told)
        told = done

    session.prefill(ids, progress)


def _measured(session: ModeSession, phase: str, new: list[int], tick: Tick) -> float:
    """Seconds of evaluating `new`; at most a line on a terminal each chunk, a tick, is among them."""
    if phase == "prefill":
        _prefill(session, session.tokens + new, tick)
        return session.timing.prompt_seconds
    for token in new:
        session.decode(token)
        tick(1)
    return session.timing.decode_seconds

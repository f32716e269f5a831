"""Prefill and decode speed of several caches, in the manner of llama-bench: random tokens, by depth, interleaved.

Every repetition measures each test of each mode once, the modes in an order of its own, so that a busy machine cannot
favour one. At a depth all modes hold their caches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tqgguf.formats.bench_record import Speed
from tqgguf.runtime.bench.modes import ModeSession
from tqgguf.runtime.evaluation.caches import Candidate
from tqgguf.runtime.models.loaded_model import LoadedModel

WARM_TOKENS = 16
"""Evaluated, and as many decoded, behind each depth before anything is measured there."""

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

    def n_tokens(self, n_modes: int) -> int:
        """Tokens that are evaluated for everything."""
        each = sum(n for _, n in self.tests) * self.repetitions
        return n_modes * sum(each + depth + 2 * WARM_TOKENS for depth in self.depths) if self.tests else 0


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
    """A session that holds `past`, after a little evaluating and decoding that nobody measures."""
    session = ModeSession(loaded, mode, n_ctx=plan.n_ctx + 2 * WARM_TOKENS, chunk=plan.chunk)
    if past:
        _prefill(session, past, tick)
    warm = session.fork()
    _prefill(warm, past + [0] * WARM_TOKENS, tick)
    for _ in range(WARM_TOKENS):
        warm.decode(0)
    tick(WARM_TOKENS)
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

"""How far greedy answers from other caches are those from the f16 cache, on prompts whose tokens lie in blocks.

A short prompt would be all f16 tail, and every cache would look perfect. Tokens that end generation are passed over, so
that all answers have one length. What the model would answer matters less than where answers part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.bench_record import Match
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.bench.modes import ModeSession
from tqgguf.measuring.bench.speed import Tick
from tqgguf.measuring.evaluation.caches import Candidate
from tqgguf.runtime.models.loaded_model import LoadedModel

LEAST_PROMPT = 1310
"""Tokens of which, behind the exact prefix and with the longest tail, nine in ten lie in blocks."""

PROMPT_TOKENS = 11 * PAGE_TOKENS
"""Of a prompt by default: whole pages, so that an answer of half a page leaves 95 % in blocks."""


def measure_matches(
    loaded: LoadedModel,
    modes: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    n_answer: int,
    chunk: int,
    matches: list[Match],
    tick: Tick,
) -> None:
    """Answer each prompt by each mode, the first of which is the reference; into `matches`, prompt by prompt.

    RequestError: a prompt of less than LEAST_PROMPT tokens.
    """
    if any(len(prompt) < LEAST_PROMPT for prompt in prompts):
        shortest = min(map(len, prompts))
        raise RequestError(f"prompts to be matched: expected {LEAST_PROMPT:,} tokens or more, found {shortest:,}")
    found: dict[str, Match] = {}
    for prompt in prompts:
        reference: list[int] = []
        for mode in modes:
            session = ModeSession(loaded, mode, n_ctx=len(prompt) + n_answer, chunk=chunk)
            answer = _answer(session, prompt, n_answer, tick)
            reference = reference or answer
            new = _match(loaded, session, mode, reference, answer)
            found[mode.label] = _sum(found[mode.label], new) if mode.label in found else new
        matches[:] = found.values()


def _answer(session: ModeSession, prompt: Sequence[int], n: int, tick: Tick) -> list[int]:
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        tick(done - told)
        told = done

    choose = _chooser(session.loaded)
    answer = [choose(session.prefill(prompt, progress))]
    while len(answer) < n:
        answer.append(choose(session.decode(answer[-1])))
        tick(1)
    return answer


def _chooser(loaded: LoadedModel) -> Callable[[NDArray[np.float32]], int]:
    tokenizer = loaded.tokenizer
    ends = [token for token in tokenizer.end_of_generation if token < tokenizer.vocab_size]

    def choose(logits: NDArray[np.float32]) -> int:
        logits = logits[: tokenizer.vocab_size].copy()
        logits[ends] = -np.inf
        return int(logits.argmax())

    return choose


def _match(
    loaded: LoadedModel, session: ModeSession, mode: Candidate, reference: Sequence[int], answer: Sequence[int]
) -> Match:
    same = [a == b for a, b in zip(reference, answer, strict=True)]
    texts = [loaded.tokenizer.decode(ids) for ids in (reference, answer)]
    return Match(
        mode.label,
        1,
        len(session.tokens) + 1 - len(answer),
        sum(same),
        len(same),
        sum(a == b for a, b in zip(*texts, strict=False)),
        max(map(len, texts)),
        [sum(1 for _ in takewhile(bool, same))],
        session.share_from_blocks,
    )


def _sum(a: Match, b: Match) -> Match:
    shares = None if a.in_blocks is None or b.in_blocks is None else (a.in_blocks, b.in_blocks)
    n = a.n_prompts + b.n_prompts
    return Match(
        a.mode,
        n,
        max(a.n_prompt_tokens, b.n_prompt_tokens),
        a.tokens + b.tokens,
        a.n_tokens + b.n_tokens,
        a.characters + b.characters,
        a.n_characters + b.n_characters,
        a.first + b.first,
        None if shares is None else (shares[0] * a.n_prompts + shares[1] * b.n_prompts) / n,
    )

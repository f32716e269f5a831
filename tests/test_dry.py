"""DRY: repetitions are found and cost what they cost in llama.cpp."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.embedded import embedded_model
from tqgguf.text.dry import Breakers, breaker_tokens, repetitions
from tqgguf.text.gguf_tokenizer import Tokenizer, load_tokenizer
from tqgguf.text.sampling import Sampler, SamplingParams

RECORDED = json.loads((Path(__file__).parent / "data" / "dry_llama_cpp.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_gguf(embedded_model()) as file:
        return load_tokenizer(file.metadata)


@pytest.fixture(scope="module")
def breakers(tokenizer: Tokenizer) -> dict[tuple[str, ...], Breakers]:
    return {texts: breaker_tokens(texts, tokenizer) for texts in {tuple(case["breakers"]) for case in RECORDED}}


@pytest.mark.parametrize("case", RECORDED, ids=range(len(RECORDED)))
def test_a_repetition_costs_what_it_costs_in_llama_cpp(
    case: dict[str, Any], tokenizer: Tokenizer, breakers: dict[tuple[str, ...], Breakers]
) -> None:
    params = SamplingParams(
        dry_multiplier=case["multiplier"],
        dry_base=case["base"],
        dry_allowed_length=case["allowed_length"],
        dry_penalty_last_n=case["last_n"],
        samplers=("dry",),
    )
    sampler = Sampler(params, breakers[tuple(case["breakers"])])
    for token in case["recent"]:
        sampler.accept(token)
    ids, p = sampler.distribution(np.zeros(tokenizer.vocab_size))
    with np.errstate(divide="ignore"):
        found = -np.log(p / p.max())
    expected = np.zeros(tokenizer.vocab_size)
    expected[[int(token) for token in case["penalties"]]] = list(case["penalties"].values())
    seen = expected < 700  # beyond that a probability is no float64
    np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
    assert ids.size == tokenizer.vocab_size


def plainly(recent: list[int], ends: set[int], allowed: int) -> dict[int, int]:
    """The definition: for each place that another token follows, how long an end of the text also ends there."""
    limit = next((n for n, token in enumerate(reversed(recent)) if token in ends), len(recent))
    found: dict[int, int] = {}
    if len(recent) <= allowed or limit < allowed:
        return found
    for place in range(len(recent) - 1):
        n = 0
        while n <= place and n < limit and recent[place - n] == recent[len(recent) - 1 - n]:
            n += 1
        if n >= allowed and recent[place + 1] not in ends:
            found[recent[place + 1]] = max(n, found.get(recent[place + 1], n))
    return found


@given(
    recent=st.lists(st.integers(0, 3), max_size=40),
    ends=st.sets(st.integers(0, 5), max_size=2),
    allowed=st.integers(0, 4),
)
def test_repetitions_are_those_of_the_definition(recent: list[int], ends: set[int], allowed: int) -> None:
    breakers: Breakers = {token: [()] for token in ends}
    assert repetitions(recent, breakers, allowed) == plainly(recent, ends, allowed)


def test_a_breaker_may_lie_across_tokens(tokenizer: Tokenizer) -> None:
    text = "one two three STOP one two three"
    ids = tokenizer.encode(text, add_special=False)
    following = ids[3:4]
    assert following and following[0] in repetitions(ids, {}, 2)
    across = breaker_tokens(["three STOP one two three"], tokenizer)
    assert repetitions(ids, across, 2) == {}


def test_greedy_answers_leave_a_repetition() -> None:
    logits = np.array([3.0, 2.5, 0.0])
    sampler = Sampler(SamplingParams(temp=0, dry_multiplier=1.0))
    for token in (1, 2, 0, 1, 2):
        sampler.accept(token)
    assert sampler.sample(logits) == 1
    assert Sampler(SamplingParams(temp=0)).sample(logits) == 0


def test_the_power_stays_a_float32_however_long_the_repetition_is() -> None:
    sampler = Sampler(SamplingParams(temp=0, dry_multiplier=1.0, dry_base=4.0, dry_penalty_last_n=4096))
    for token in [1] * 4096:
        sampler.accept(token)
    _, p = sampler.distribution(np.zeros(3))
    assert np.isfinite(p).all() and math.isclose(p.sum(), 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dry_base": 0.5}, "--dry-base: expected a finite number of at least 1, found 0.5"),
        ({"dry_penalty_last_n": -1}, "--dry-penalty-last-n: expected a number from 0"),
        ({"dry_sequence_breakers": ("",)}, "--dry-sequence-breaker: expected a text, or none"),
    ],
)
def test_what_cannot_be_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wrong)

"""Sampling: the same distribution as llama.cpp's samplers, drawn reproducibly, with every bad value named."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.text.sampling import DEFAULT_SAMPLERS, Sampler, SamplingParams, sampler_names

RECORDED = json.loads((Path(__file__).parent / "data" / "sampling_llama_cpp.json").read_text())
OFF: dict[str, Any] = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def survivors(params: SamplingParams, logits: list[float], recent: tuple[int, ...] = ()) -> dict[int, float]:
    sampler = Sampler(params)
    for token in recent:
        sampler.accept(token)
    ids, probabilities = sampler.distribution(np.array(logits, dtype=np.float32))
    return {int(i): float(p) for i, p in zip(ids, probabilities, strict=True) if p > 0}


@pytest.mark.parametrize("case", RECORDED, ids=range(len(RECORDED)))
def test_the_distribution_is_the_one_llama_cpp_computes(case: dict[str, Any]) -> None:
    params = SamplingParams(**{**case["params"], "samplers": tuple(case["params"]["samplers"])})
    found = survivors(params, case["logits"], tuple(case["recent"]))
    expected = {int(token): p for token, p in case["probabilities"].items()}
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[token], p, rel_tol=2e-4, abs_tol=1e-7) for token, p in expected.items())


# An oracle for the default chain in plain Python, written from the definitions: no numpy, no sorting tricks.


def plain_softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    weights = {i: math.exp(v - top) for i, v in logits.items()}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


def plain_chain(logits: list[float], p: SamplingParams, recent: list[int]) -> dict[int, float]:
    left = dict(enumerate(logits))
    for token, count in Counter(recent[-p.repeat_last_n :] if p.repeat_last_n else []).items():
        scaled = left[token] / p.repeat_penalty if left[token] > 0 else left[token] * p.repeat_penalty
        left[token] = scaled - count * p.frequency_penalty - p.presence_penalty
    by_rank = sorted(left, key=lambda i: (-left[i], i))
    if p.top_k > 0:
        by_rank = by_rank[: p.top_k]
    left = {i: left[i] for i in by_rank}
    if p.top_p < 1:
        kept, running = [], 0.0
        for i, probability in plain_softmax(left).items():
            kept.append(i)
            running += probability
            if running >= p.top_p:
                break
        left = {i: left[i] for i in kept}
    probabilities = plain_softmax(left)
    left = {i: left[i] for i in left if probabilities[i] >= p.min_p * max(probabilities.values()) * (1 - 1e-12)}
    if p.temp <= 0:
        best = max(left.values())
        return {min(i for i in left if left[i] == best): 1.0}
    return plain_softmax({i: v / p.temp for i, v in left.items()})


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400).map(lambda n: n / 37), min_size=1, max_size=60),
    temp=st.sampled_from([0.0, 0.3, 0.8, 1.7]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.0, 0.31, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.053, 0.41, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.13, 0.8]),
    repeat_last_n=st.integers(0, 9),
    frequency_penalty=st.sampled_from([0.0, 0.21, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.17]),
    data=st.data(),
)
def test_the_default_chain_equals_its_definition(logits: list[float], data: st.DataObject, **flags: Any) -> None:
    recent = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=12))
    params = SamplingParams(**flags)
    expected = plain_chain([float(np.float32(v)) for v in logits], params, recent)
    assert survivors(params, logits, tuple(recent)) == pytest.approx(expected, rel=1e-9)


def test_top_k_keeps_the_k_largest_and_the_lowest_ids_among_equals() -> None:
    logits = [1.0, 3.0, 2.0, 3.0, 2.0, 2.0]
    assert survivors(SamplingParams(**{**OFF, "top_k": 3}), logits).keys() == {1, 3, 2}


@pytest.mark.parametrize("top_k", [1, 40, 300, 2000, 9000])
def test_the_short_cut_for_a_large_vocabulary_finds_the_same_tokens_as_sorting(top_k: int) -> None:
    logits = np.random.default_rng(top_k).normal(size=30_011).astype(np.float32).round(2)  # rounded: many equals
    ids, _ = Sampler(SamplingParams(**{**OFF, "top_k": top_k})).distribution(logits)
    assert ids.tolist() == sorted(range(logits.size), key=lambda i: (-logits[i], i))[:top_k]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
def test_top_p_over_a_large_vocabulary_stops_where_the_sum_is_reached(spread: float) -> None:
    logits = np.random.default_rng(3).normal(size=20_000) * spread
    ids, probabilities = Sampler(SamplingParams(**{**OFF, "top_p": 0.9})).distribution(logits)
    exact = np.exp(logits - logits.max())
    exact /= exact.sum()
    order = np.argsort(-exact, kind="stable")
    count = int(np.searchsorted(np.cumsum(exact[order]), 0.9)) + 1
    assert ids.tolist() == order[:count].tolist()
    assert probabilities.sum() == pytest.approx(1.0)


def test_typical_keeps_what_is_closest_to_the_entropy_even_without_the_likeliest() -> None:
    # p = .4, .2, .2, .2: entropy 1.332, surprises .916, 1.609 x 3: the three are closer than the likeliest
    logits = [math.log(0.4), math.log(0.2), math.log(0.2), math.log(0.2)]
    assert survivors(SamplingParams(**OFF, typical_p=0.5), logits).keys() == {1, 2, 3}
    greedy = SamplingParams(**{**OFF, "temp": 0.0}, typical_p=0.5)
    assert Sampler(greedy).sample(logits) == 1


def test_top_n_sigma_keeps_what_is_within_n_standard_deviations_of_the_top() -> None:
    logits = [4.0, 3.0, 2.0, 1.0, 0.0]  # population standard deviation sqrt(2)
    assert survivors(SamplingParams(**OFF, top_n_sigma=1.0), logits).keys() == {0, 1}
    assert survivors(SamplingParams(**OFF, top_n_sigma=2.0), logits).keys() == {0, 1, 2}


def test_xtc_leaves_only_the_least_likely_of_the_tokens_over_its_threshold() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    always = SamplingParams(**OFF, xtc_probability=1.0, xtc_threshold=0.15)
    assert survivors(always, logits) == pytest.approx({2: 2 / 3, 3: 1 / 3}, rel=1e-6)
    assert survivors(SamplingParams(**OFF, xtc_probability=1.0, xtc_threshold=0.51), logits).keys() == {0, 1, 2, 3}
    sometimes = Sampler(SamplingParams(**OFF, xtc_probability=0.25, xtc_threshold=0.15, seed=1))
    cut = sum(sometimes.distribution(logits)[0].size == 2 for _ in range(2000))
    assert 430 < cut < 570


def test_a_dynamic_temperature_follows_the_entropy() -> None:
    flat, sure = [1.0, 1.0, 1.0, 1.0], [60.0, 0.0, 0.0, 0.0]
    params = SamplingParams(**{**OFF, "temp": 1.0}, dynatemp_range=1.0)
    assert survivors(params, flat) == pytest.approx({i: 0.25 for i in range(4)})  # entropy 1: temperature 2
    assert survivors(params, sure).keys() == {0}  # entropy 0: temperature 0


def test_penalties_see_only_the_last_n_accepted_tokens() -> None:
    params = SamplingParams(**OFF, repeat_penalty=2.0, repeat_last_n=2)
    logits = [2.0, 2.0, -2.0, -2.0]
    assert survivors(params, logits, (0, 0, 1, 2)) == pytest.approx(plain_softmax({0: 2.0, 1: 1.0, 2: -4.0, 3: -2.0}))
    sampler = Sampler(params)
    sampler.accept(0)
    sampler.reset()
    assert sampler.distribution(logits)[1][0] == pytest.approx(plain_softmax(dict(enumerate(logits)))[0])


def test_repetition_moves_the_greedy_choice_too() -> None:
    sampler = Sampler(SamplingParams(temp=0.0, repeat_penalty=3.0))
    assert sampler.sample([5.0, 4.0]) == 0
    sampler.accept(0)
    assert sampler.sample([5.0, 4.0]) == 1


def test_a_temperature_of_zero_or_less_takes_the_lowest_id_among_the_largest() -> None:
    for temp in (0.0, -1.0):
        assert Sampler(SamplingParams(temp=temp)).sample([1.0, 7.0, 7.0]) == 1


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    assert survivors(SamplingParams(**{**OFF, "temp": 1e-320}), [3.0, 2.0]) == {0: 1.0}


def test_a_bias_moves_a_logit_and_minus_infinity_bans_a_token() -> None:
    logits = [2.0, 1.0, 0.0]
    assert Sampler(SamplingParams(temp=0.0, logit_bias=((2, 5.0),))).sample(logits) == 2
    assert Sampler(SamplingParams(temp=0.0).banning([0, 1])).sample(logits) == 2
    assert survivors(SamplingParams(**OFF).banning([1]), logits).keys() == {0, 2}
    with pytest.raises(RequestError, match="every token of the vocabulary is banned"):
        Sampler(SamplingParams().banning(range(3))).sample(logits)
    with pytest.raises(RequestError, match="token id below 3, found 3"):
        Sampler(SamplingParams().banning([3])).sample(logits)


def test_the_order_of_the_stages_is_the_one_given() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    cold_first = SamplingParams(**{**OFF, "temp": 0.2, "top_p": 0.9}, samplers=("temperature", "top_p"))
    cold_last = SamplingParams(**{**OFF, "temp": 0.2, "top_p": 0.9}, samplers=("top_p", "temperature"))
    assert survivors(cold_first, logits).keys() == {0}
    assert survivors(cold_last, logits).keys() == {0, 1, 2}
    assert survivors(SamplingParams(temp=0.0, samplers=()), logits).keys() == {0, 1, 2}


def test_equal_seeds_give_equal_draws_and_the_stream_is_fixed() -> None:
    logits = np.linspace(0, 4, 50)
    first, second, other = (Sampler(SamplingParams(**OFF, seed=seed)) for seed in (42, 42, 43))
    draws = [first.sample(logits) for _ in range(12)]
    assert draws == [second.sample(logits) for _ in range(12)]
    assert draws != [other.sample(logits) for _ in range(12)]
    # from PCG64's raw output and plain Python sums, so that a change of numpy's generators would show
    bits, weights = np.random.PCG64(42), [math.exp(v - 4) for v in logits]
    expected = []
    for _ in range(12):
        target = (bits.random_raw() >> 11) / 2**53 * math.fsum(weights)
        expected.append(next(i for i in range(50) if math.fsum(weights[: i + 1]) >= target))
    assert draws == expected


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    sampler = Sampler(SamplingParams(**OFF, seed=7))
    counts = Counter(sampler.sample([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]) for _ in range(20_000))
    chi_squared = sum((counts[i] - 20_000 * p) ** 2 / (20_000 * p) for i, p in enumerate((0.5, 0.3, 0.15, 0.05)))
    assert chi_squared < 16.3  # 3 degrees of freedom, one chance in a thousand


@pytest.mark.parametrize("seed", [-1, 4294967295])
def test_without_a_seed_one_is_picked_and_reported_and_repeats_the_draws(seed: int) -> None:
    picked = Sampler(SamplingParams(**OFF, seed=seed))
    assert 0 <= picked.seed < 4294967295
    assert picked.seed != Sampler(SamplingParams(seed=seed)).seed
    again = Sampler(SamplingParams(**OFF, seed=picked.seed))
    logits = np.zeros(1000)
    assert [picked.sample(logits) for _ in range(5)] == [again.sample(logits) for _ in range(5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_logit_that_is_not_finite_is_an_error_that_says_where(bad: float, temp: float) -> None:
    with pytest.raises(TqggufError, match=r"found 2 of 5 that are not \(first: .* at token 1\)"):
        Sampler(SamplingParams(temp=temp)).sample([0.0, bad, 1.0, bad, 2.0])


def test_logits_of_another_shape_are_refused() -> None:
    for logits in (np.zeros((1, 4)), np.zeros(0), np.float32(1)):
        with pytest.raises(TqggufError, match="expected one row of numbers, found shape"):
            Sampler(SamplingParams()).sample(logits)


def test_the_callers_logits_are_left_alone() -> None:
    logits = np.array([2.0, 1.0, 0.5])
    sampler = Sampler(SamplingParams(repeat_penalty=2.0, logit_bias=((1, 1.0),), top_n_sigma=0.5))
    sampler.accept(0)
    sampler.sample(logits)
    assert logits.tolist() == [2.0, 1.0, 0.5]


def test_float16_logits_and_a_vocabulary_of_one_are_fine() -> None:
    assert Sampler(SamplingParams(seed=1)).sample(np.array([3.0], dtype=np.float16)) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temp": math.nan}, "--temp: expected a finite number, found nan"),
        ({"temp": math.inf}, "--temp: expected a finite number, found inf"),
        ({"top_p": 1.5}, "--top-p: expected a number from 0 to 1, found 1.5"),
        ({"top_p": math.nan}, "--top-p: expected a number from 0 to 1, found nan"),
        ({"min_p": -0.1}, "--min-p: expected a number from 0 to 1, found -0.1"),
        ({"typical_p": 2.0}, "--typical: expected a number from 0 to 1, found 2.0"),
        ({"repeat_penalty": 0.0}, "--repeat-penalty: expected a finite number above 0, found 0.0"),
        ({"repeat_penalty": 1e-40}, "--repeat-penalty: expected a finite number above 0, found 1e-40"),
        ({"repeat_last_n": -1}, "--repeat-last-n: expected a number from 0 to 2147483647, found -1"),
        ({"frequency_penalty": 1e39}, "--frequency-penalty: expected a finite number, found 1e+39"),
        ({"dynatemp_range": -0.5}, "--dynatemp-range: expected a finite number of at least 0, found -0.5"),
        ({"seed": -2}, "--seed: expected a number from -1 to 4294967295, found -2"),
        ({"top_k": 2.5}, "--top-k: expected a whole number, found 2.5"),
        ({"temp": "hot"}, "--temp: expected a number, found 'hot'"),
        ({"logit_bias": ((3, math.nan),)}, "--logit-bias: expected a token id from 0 and a finite amount or -inf"),
        (
            {"samplers": ("top_k", "temperature", "top_k")},
            "--samplers: expected each stage at most once, found top_k twice",
        ),
        ({"samplers": ("top_k", "mirostat")}, "--samplers: expected some of penalties, .*, found 'mirostat'"),
    ],
)
def test_a_bad_parameter_names_the_flag_the_value_and_what_is_allowed(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("+", r"\+")):
        SamplingParams(**flags)


def test_stages_are_named_as_llama_cpp_names_them() -> None:
    assert sampler_names("penalties;top-k;topp;temp;typ;min_p") == (
        "penalties", "top_k", "top_p", "temperature", "typ_p", "min_p",
    )  # fmt: skip
    assert sampler_names("nucleus;typp") == ("top_p", "typ_p")
    assert sampler_names("edskypmxt", letters=True) == DEFAULT_SAMPLERS
    with pytest.raises(RequestError, match="found 'mirostat'"):
        sampler_names("top_k;mirostat")
    with pytest.raises(RequestError, match="found 'q'"):
        sampler_names("kq", letters=True)


def test_biases_are_checked_against_a_vocabulary_before_anything_is_sampled() -> None:
    SamplingParams(logit_bias=((0, -math.inf), (9, 1.0))).check_vocabulary(10)
    with pytest.raises(RequestError, match="--logit-bias: expected a token id below 9, found 9"):
        SamplingParams(logit_bias=((0, -math.inf), (9, 1.0))).check_vocabulary(9)
    with pytest.raises(RequestError, match="every token of the vocabulary is banned"):
        SamplingParams().banning(range(10)).check_vocabulary(10)


def test_all_unknown_stages_are_named_at_once() -> None:
    with pytest.raises(RequestError, match="found 'mirostat', 'bogus'"):
        sampler_names("top_k;mirostat;bogus")

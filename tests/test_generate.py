"""Evaluation is deterministic where the design says so: restored, split and repeated runs of a real model."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.attention.steps import Step
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.generation.generate import Generation
from tqgguf.runtime.generation.session import Session, check_prompt
from tqgguf.runtime.models.load import LoadedModel
from tqgguf.text.grid import round_chunk
from tqgguf.text.sampling import Sampler, SamplingParams

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()[1500:]  # natural text that every checkout has
N_PROMPT, N_ANSWER = 300, 12  # two pages and a part of one
GREEDY = SamplingParams(temp=0)


def prompt(model: LoadedModel) -> list[int]:
    return model.tokenizer.encode(TEXT)[:N_PROMPT]


def greedy(session: Session, logits: np.ndarray, n: int = N_ANSWER) -> list[int]:
    generation = Generation(session, Sampler(GREEDY), n_predict=n)
    for _ in generation.pieces(logits):
        pass
    return generation.ids


def restored(session: Session) -> Session:
    """A session that holds what a saved one held, through the caches' states alone."""
    copy = Session(session.loaded, session.spec, chunk=session.chunk)
    copy.cache = [BlockKVCache.from_state(c.state) for c in session.cache]
    copy.tokens = list(session.tokens)
    return copy


@pytest.mark.parametrize(("type_k", "type_v"), [("turbo4", "turbo3"), ("q8_0", "f16"), ("turbo2", "turbo2")])
def test_a_restored_run_continues_exactly_as_the_uninterrupted_one(
    smollm2: LoadedModel, type_k: str, type_v: str
) -> None:
    session = Session(smollm2, CacheSpec(type_k, type_v))
    token = int(np.argmax(session.prefill(prompt(smollm2))))
    copy = restored(session)
    for _ in range(6):
        expected, found = session.decode(token), copy.decode(token)
        assert np.array_equal(expected, found)
        token = int(np.argmax(expected))


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_with_float_caches_other_splits_give_the_same_greedy_text(smollm2: LoadedModel, cache_type: str) -> None:
    texts = []
    for chunk in (256, 128, 512):
        session = Session(smollm2, CacheSpec(cache_type, cache_type), chunk=chunk)
        texts.append(greedy(session, session.prefill(prompt(smollm2))))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == N_ANSWER


def log_probabilities(model: LoadedModel, cache_type: str, splits: list[int]) -> np.ndarray:
    """Next-token log probabilities after each prompt token but the first page's, evaluated in the given splits."""
    session = Session(model, CacheSpec(cache_type, cache_type))
    rows, at = [], 0
    for n in splits:
        logits = model.model(mx.array([prompt(model)[at : at + n]]), cache=session.cache)[0].astype(mx.float32)
        rows.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        at += n
    return np.concatenate(rows)[128:]


def kld(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def test_with_blocks_two_splits_differ_by_less_than_a_quarter_of_the_distance_to_f16(smollm2: LoadedModel) -> None:
    grid = [256, N_PROMPT - 256]
    uneven = [100, 110, 7, 1, N_PROMPT - 218]
    exact = log_probabilities(smollm2, "f16", grid)
    blocks, other = (log_probabilities(smollm2, "turbo4", splits) for splits in (grid, uneven))
    assert 0 < kld(exact, blocks) < 0.2
    assert kld(blocks, other) < kld(exact, blocks) / 4


def test_a_prompt_that_continues_what_is_held_is_evaluated_from_there(smollm2: LoadedModel) -> None:
    ids = prompt(smollm2)
    session = Session(smollm2, CacheSpec("turbo4", "turbo4"))
    session.prefill(ids[:256])
    logits = session.prefill(ids)
    assert session.timing.prompt_tokens == N_PROMPT
    assert session.tokens == ids
    assert np.array_equal(logits, Session(smollm2, CacheSpec("turbo4", "turbo4")).prefill(ids))


def test_a_prompt_that_differs_goes_back_to_a_page_edge(smollm2: LoadedModel) -> None:
    ids = prompt(smollm2)
    other = [*ids[:200], *ids[220:260]]
    session = Session(smollm2, CacheSpec("f32", "f32"))
    session.prefill(ids)
    logits = session.prefill(other)
    assert session.timing.prompt_tokens == N_PROMPT + len(other) - 128
    assert session.tokens == other
    fresh = Session(smollm2, CacheSpec("f32", "f32")).prefill(other)
    np.testing.assert_allclose(logits, fresh, atol=2e-3)


def test_the_same_prompt_again_evaluates_its_last_page(smollm2: LoadedModel) -> None:
    ids = prompt(smollm2)
    session = Session(smollm2, CacheSpec("turbo3", "turbo3"))
    first = session.prefill(ids)
    again = session.prefill(ids)
    assert session.timing.prompt_tokens == 300 + 300 - 256
    assert np.abs(first - again).max() < 0.5


def test_running_out_of_context_ends_the_answer_with_every_token_shown(smollm2: LoadedModel) -> None:
    session = Session(smollm2, n_ctx=40)
    generation = Generation(session, Sampler(GREEDY.banning(smollm2.tokenizer.end_of_generation)))
    text = "".join(generation.pieces(session.prefill(prompt(smollm2)[:30])))
    assert generation.finish == "context"
    assert len(session.tokens) == 40
    assert text == smollm2.tokenizer.decode(generation.ids)


@pytest.mark.parametrize(("n_predict", "n_ids"), [(0, 0), (1, 1), (5, 5)])
def test_n_counts_the_tokens_of_the_answer(smollm2: LoadedModel, n_predict: int, n_ids: int) -> None:
    session = Session(smollm2)
    logits = session.prefill(prompt(smollm2)[:20])
    generation = Generation(session, Sampler(GREEDY), n_predict=n_predict)
    list(generation.pieces(logits))
    assert (generation.finish, len(generation.ids)) == ("length", n_ids)
    assert session.timing.decoded_tokens == max(0, n_ids - 1)  # the last token needs no evaluation


def test_a_stop_string_ends_the_answer_and_is_not_shown(smollm2: LoadedModel) -> None:
    session = Session(smollm2)
    ids = smollm2.tokenizer.encode("The capital of France is")
    generation = Generation(session, Sampler(GREEDY), n_predict=30, stop=("is.", "aris"))
    assert "".join(generation.pieces(session.prefill(ids))) == " P"
    assert generation.finish == "stop"


def test_end_of_generation_ends_the_answer(smollm2: LoadedModel) -> None:
    text = "<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n"
    session = Session(smollm2)
    generation = Generation(session, Sampler(GREEDY), n_predict=100)
    answer = "".join(generation.pieces(session.prefill(smollm2.tokenizer.encode(text))))
    assert generation.finish == "eog"
    assert "<|im_end|>" not in answer


def test_prompts_that_are_empty_or_too_long_are_refused_before_anything_is_evaluated() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        check_prompt(0, 100)
    with pytest.raises(RequestError, match="has 101 tokens: expected at most 100"):
        check_prompt(101, 100)
    check_prompt(100, 100)


@pytest.mark.parametrize(("asked", "used"), [(1, 128), (128, 128), (129, 256), (256, 256), (300, 384), (0, 128)])
def test_chunks_are_whole_pages(asked: int, used: int) -> None:
    assert round_chunk(asked) == used


def test_the_report_says_what_is_held_and_how_it_was_read(smollm2: LoadedModel) -> None:
    session = Session(smollm2, CacheSpec("turbo4", "turbo4"))
    session.prefill(prompt(smollm2))
    report = session.report()
    # 2 pages of blocks of 34 bytes per 64 values, 44 tail and 4 exact tokens in f16, 30 layers of 3 KV heads, K and V;
    # and of K two means in f16 and one scale in f32
    assert report.kv_bytes == 30 * 3 * (2 * (256 * 34 + 48 * 128) + 2 * 128 + 256) + 4 * 300
    assert (report.balance, report.is_calibrated) == ("full", False)
    assert report.f16_bytes == 30 * 3 * 2 * 300 * 128 + 4 * 300
    per_layer = sum(p + 1 for p in range(300))
    blocks = sum(p // 128 * 128 - 4 for p in range(128, 300))
    assert report.prompt_reads.keys_from_blocks == report.prompt_reads.values_from_blocks == 30 * blocks
    assert report.prompt_reads.keys_in_float == 30 * (per_layer - blocks)
    assert report.answer_reads == Reads()
    session.decode(5)
    assert session.report().answer_reads == Reads(30 * 252, 30 * 49, 30 * 252, 30 * 49)
    assert (report.by_fallback, report.n_other_layers) == (0, 0)


class Broken(Exception):
    """What stands for a second Ctrl-C, or for memory that ran out, in the middle of a step."""


@pytest.mark.parametrize(("at_layer", "n_held"), [(0, 130), (3, 130), (3, 0)])
def test_a_session_broken_off_inside_a_step_answers_the_next_prompt_as_a_new_one(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch, at_layer: int, n_held: int
) -> None:
    ids = prompt(smollm2)[:140]
    session = Session(smollm2, CacheSpec("turbo4", "q8_0"))
    if n_held:
        session.prefill(ids[:n_held])
    update = BlockKVCache.update

    def breaking(cache: BlockKVCache, *rows: mx.array) -> Step:
        if cache.layer == at_layer:
            raise Broken
        return update(cache, *rows)

    monkeypatch.setattr(BlockKVCache, "update", breaking)
    with pytest.raises(Broken):
        session.prefill(ids)
    monkeypatch.undo()
    assert session.timing.prompt_tokens == n_held
    expected = Session(smollm2, CacheSpec("turbo4", "q8_0")).prefill(ids)
    assert np.array_equal(session.prefill(ids), expected)
    assert session.tokens == ids and {cache.offset for cache in session.cache} == {140}


def test_an_interrupted_prompt_is_reported_as_far_as_it_was_read(smollm2: LoadedModel) -> None:
    session = Session(smollm2, CacheSpec("turbo4", "turbo4"), chunk=128)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(prompt(smollm2)[:300], stop)
    report = session.report()
    assert (session.timing.prompt_tokens, report.n_tokens) == (128, 128)
    assert session.timing.prompt_seconds > 0
    assert report.prompt_reads.keys_in_float > 0 and report.answer_reads == Reads()

"""A number hidden in a long text is asked for as `run` would be asked, and found wherever an f16 cache finds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from induction_model import N_CTX, write_induction
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.evaluation.needle import (
    ANSWER_TOKENS,
    COMPLETION,
    QUESTION,
    NeedleCell,
    NeedleRow,
    NeedleTest,
    hide,
    needle_prompts,
)
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import LoadedModel, open_model
from tqgguf.text.text_tokenizer import TextTokenizer

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "went",
    "to",
    "bed",
    "for",
    "another",
    "day",
    "in",
    "town",
)
F16 = NeedleRow("f16", CacheSpec())
BALANCED = NeedleRow("balanced", CacheSpec("turbo4", "turbo3"))
PLAIN = NeedleRow("plain", CacheSpec("turbo4", "turbo3", 0, "off"))


def haystack(n_sentences: int = 1500) -> str:
    """Sentences without a digit and without the word that the number follows."""
    random = np.random.default_rng(0)
    return ". ".join(" ".join(random.choice(WORDS, 12)) for _ in range(n_sentences)) + "."


HAYSTACK = haystack()


@pytest.fixture(scope="module")
def induction(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_model(write_induction(tmp_path_factory.mktemp("needle") / "m.gguf")).load()


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With keys that share a channel of 800, as some models' do."""
    return open_model(write_induction(tmp_path_factory.mktemp("needle") / "c.gguf", 800.0)).load()


def asked(model: LoadedModel, rows: list[NeedleRow], length: int, depths: list[int], seed: int = 1) -> list[NeedleCell]:
    test = NeedleTest(model, rows, needle_prompts(model.tokenizer, HAYSTACK, [length], depths, seed))
    test.run()
    return test.cells


# The model that was constructed for it


def test_an_induction_model_continues_what_it_has_read_before(induction: LoadedModel) -> None:
    tokenizer = induction.tokenizer
    text = "Here we go: ~ 7512 " + HAYSTACK[:12000] + " ~"
    ids = tokenizer.encode(text)
    answer = tokenizer.encode(" 7512")
    session = Session(induction, n_ctx=N_CTX)
    logits = session.prefill(ids)
    found = []
    for _ in answer:
        found.append(int(logits.argmax()))
        logits = session.decode(found[-1])
    assert len(ids) > 4096
    assert tokenizer.decode(found) == tokenizer.decode(answer)


# Prompts


@pytest.mark.parametrize("with_chat_template", [True, False])
def test_a_prompt_fills_its_length_and_holds_needle_and_question(tmp_path: Path, with_chat_template: bool) -> None:
    spec = TinyModel(with_chat_template=with_chat_template)
    tokenizer = open_model(write_tiny(tmp_path / "m.gguf", spec)).tokenizer
    prompts = needle_prompts(tokenizer, HAYSTACK, [600, 1000], [0, 40, 100], seed=3)
    assert [(p.length, p.depth) for p in prompts] == [(n, d) for n in (600, 1000) for d in (0, 40, 100)]
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids, skip_special=False)
        needle = f"The pass-number of the lighthouse is {prompt.number}."
        assert text.count(needle) == 1 and text.count(prompt.number) == 1
        assert prompt.length - ANSWER_TOKENS - 16 <= len(prompt.ids) <= prompt.length - ANSWER_TOKENS
        if with_chat_template:
            assert text.startswith("<|im_start|>user\n") and f"\n\n{QUESTION}<|im_end|>\n" in text
            assert text.endswith("<|im_start|>assistant\n")
        else:
            assert text.endswith(f"\n\n{COMPLETION}")
        hay = text.split("user\n")[-1].split("\n\n")[0]
        before = hay.index(needle) / (len(hay) - len(needle))
        assert abs(before - prompt.depth / 100) < 0.08  # half a sentence of so short a text


def test_numbers_have_five_different_digits_and_depend_on_seed_length_and_depth(induction: LoadedModel) -> None:
    def numbers(seed: int, lengths: list[int]) -> dict[tuple[int, int], str]:
        prompts = needle_prompts(induction.tokenizer, HAYSTACK, lengths, [0, 50], seed)
        return {(p.length, p.depth): p.number for p in prompts}

    found = numbers(1, [400, 500])
    assert numbers(1, [500]).items() <= found.items()
    assert not set(found.values()) & set(numbers(2, [400, 500]).values())
    for number in found.values():
        assert re.fullmatch(r"[1-9]\d{4}", number) and len(set(number)) == 5


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, "NEEDLE. One two. Three four! Five"),
        (30, "One two. NEEDLE. Three four! Five"),
        (70, "One two. Three four! NEEDLE. Five"),
        (100, "One two. Three four! Five NEEDLE."),
    ],
)
def test_a_needle_goes_between_two_sentences(depth: int, expected: str) -> None:
    assert hide("One two. Three four! Five", "NEEDLE.", depth) == expected


def test_a_text_without_sentences_takes_a_needle_at_its_ends() -> None:
    assert hide("a b c d", "NEEDLE.", 49) == "NEEDLE. a b c d"
    assert hide("", "NEEDLE.", 100) == "NEEDLE."


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        (HAYSTACK, 100, r"expected \d+ tokens or more for a needle, found 100"),
        ("A short one.", 2000, r"text has \d+ tokens: expected at least 1,\d+ for a length of 2,000"),
    ],
)
def test_what_cannot_be_hidden_is_refused(induction: LoadedModel, text: str, length: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        needle_prompts(induction.tokenizer, text, [length], [50], seed=1)


def test_a_text_whose_parts_have_more_tokens_than_they_have_in_it_is_made_to_fit() -> None:
    class Letters:
        """Every other character is lost when the text is cut: the parts' tokens are others than the whole's."""

        bos_id = eos_id = chat_template = None

        def named_tokens(self) -> dict[str, str]:
            return {}

        def encode(self, text: str, **_: Any) -> list[int]:
            return list(text.encode()) * (1 if len(text) > 2000 else 2)

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    tokenizer: TextTokenizer = Letters()  # type: ignore[assignment]
    (prompt,) = needle_prompts(tokenizer, "One two. " * 600, [1500], [50], seed=1)
    assert 1300 < len(prompt.ids) <= 1500 - ANSWER_TOKENS


# Answers


def test_a_needle_in_8k_tokens_is_found_from_balanced_blocks_where_f16_finds_it(induction: LoadedModel) -> None:
    cells = asked(induction, [F16, BALANCED], N_CTX, [0, 50, 100])
    assert len(cells) == 3
    for cell in cells:
        f16, balanced = cell.answers["f16"], cell.answers["balanced"]
        assert f16.text == balanced.text == f" {cell.prompt.number}" and f16.found and balanced.found
        assert len(cell.prompt.ids) > N_CTX - 64
        read = balanced.reads
        assert read.keys_from_blocks > 0.95 * (read.keys_from_blocks + read.keys_in_float)
        assert f16.reads.keys_from_blocks == 0


def test_keys_with_a_huge_constant_lose_the_needle_from_plain_blocks_only(constant: LoadedModel) -> None:
    cells = asked(constant, [F16, BALANCED, PLAIN], 4096, [0, 30, 60, 90])
    found = {row: sum(cell.answers[row].found for cell in cells) for row in ("f16", "balanced", "plain")}
    assert found == {"f16": 4, "balanced": 4, "plain": 0}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["induction", "constant"])
def test_every_tenth_of_8k_tokens_is_found(model: str, request: pytest.FixtureRequest) -> None:
    cells = asked(request.getfixturevalue(model), [F16, BALANCED], N_CTX, list(range(0, 101, 10)), seed=2)
    assert all(cell.answers["f16"].found and cell.answers["balanced"].found for cell in cells)


def test_where_f16_fails_nobody_else_is_asked(tmp_path: Path) -> None:
    model = open_model(write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=64))).load()
    (cell,) = asked(model, [F16, BALANCED], 600, [50])
    assert list(cell.answers) == ["f16"] and not cell.answers["f16"].found
    assert cell.answers["f16"].text


def test_a_test_that_is_broken_off_keeps_the_cells_that_every_cache_has_answered(induction: LoadedModel) -> None:
    prompts = needle_prompts(induction.tokenizer, HAYSTACK, [600], [0, 50, 100], seed=1)
    test = NeedleTest(induction, [F16, BALANCED], prompts)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(test.cells) == 1 and done > 3 * len(prompts[0].ids) + 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        test.run(progress)
    assert [cell.prompt.depth for cell in test.cells] == [0]
    assert seen == sorted(seen) and {total for _, total in seen} == {2 * sum(len(p.ids) for p in prompts)}

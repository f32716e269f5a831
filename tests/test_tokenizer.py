"""Token ids equal llama.cpp's; vocabularies that contradict themselves are refused in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import (
    BYTE,
    BYTE_TOKENS,
    CONTROL,
    LETTERS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    bpe_metadata,
    gemma_metadata,
    gemma_tokenizer,
    smollm2_tokenizer,
    spm_metadata,
)

from tqgguf.formats.errors import FormatError, RequestError, UnsupportedModelError
from tqgguf.text.bpe import build_pre_tokenizer
from tqgguf.text.gguf_tokenizer import Tokenizer, load_tokenizer
from tqgguf.text.pretokenizers import PRETOKENIZERS

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


ORACLE = recorded("llama_cpp_oracle.json")["models"]  # its ids_special were made without BOS
TEXTS = recorded("tokens_llama_cpp.json")["texts"]
CUTS = recorded("pretokenizer_splits.json")
TINY = recorded("tiny_vocabularies.json")["vocabularies"]


def assert_ids_of_the_oracle(tokenizer: Tokenizer, model: str) -> None:
    for row in ORACLE[model]["tokenize"]:
        assert tokenizer.encode(row["text"], add_special=False) == row["ids_special"], row["text"]
        assert tokenizer.encode(row["text"], add_special=False, parse_special=False) == row["ids_plain"], row["text"]
    for row in ORACLE[model]["greedy"]:
        assert tokenizer.encode(row["prompt"]) == row["prompt_ids"], row["prompt"]
    for row in TEXTS:
        special, plain = row[model]
        assert tokenizer.encode(row["text"]) == special, row["text"]
        assert tokenizer.encode(row["text"], add_special=False, parse_special=False) == plain, row["text"]


# --- equal to llama.cpp ---------------------------------------------------------------------------------------------


def test_smollm2_ids_are_llama_cpps() -> None:
    assert_ids_of_the_oracle(smollm2_tokenizer(), "smollm2")


def test_smollm2_special_tokens_are_llama_cpps() -> None:
    tokenizer = smollm2_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.vocab_size) == (1, 2, False, 49152)
    assert tokenizer.end_of_generation == {0, 2, 4}  # <|endoftext|> <|im_end|> <reponame>
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)] == list(range(17))
    assert tokenizer.warnings == []


@pytest.mark.gemma
def test_gemma_ids_are_llama_cpps() -> None:
    assert_ids_of_the_oracle(gemma_tokenizer(), "gemma3")


@pytest.mark.gemma
def test_gemma_special_tokens_are_llama_cpps() -> None:
    tokenizer = gemma_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.vocab_size) == (2, 1, True, 262144)
    assert tokenizer.end_of_generation == {1, 106, 212}
    assert sum(tokenizer.is_control(i) for i in range(tokenizer.vocab_size)) == 6250


@pytest.mark.gemma
def test_gemmas_vocabulary_loads_in_a_second_and_a_half() -> None:
    metadata = gemma_metadata()
    start = time.thread_time()
    load_tokenizer(metadata)
    assert time.thread_time() - start < 1.5


@pytest.mark.parametrize("cuts", CUTS["cuts"], ids=lambda cuts: cuts["names"][0])
def test_words_are_cut_as_llama_cpp_cuts_them(cuts: dict[str, Any]) -> None:
    for name in cuts["names"]:
        pre_tokenizer = build_pre_tokenizer(PRETOKENIZERS[name])
        for text, lengths in zip(CUTS["texts"], cuts["lengths"], strict=True):
            words = [end - start for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]
            assert words == [int(length) for length in lengths.split()], (name, text)


def test_every_pre_tokenizer_is_compared_with_llama_cpp() -> None:
    compared = {name for cuts in CUTS["cuts"] for name in cuts["names"]}
    compared |= {tiny["metadata"]["pre"] for tiny in TINY if "pre" in tiny["metadata"]}
    # Another name of gemma4's row.
    assert set(PRETOKENIZERS) - compared == {"granite-embed-multi-311m"}


def tiny_metadata(tiny: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a recorded vocabulary, its 256 byte tokens put back in."""
    base = tiny["bytes"]
    letters = base["spelling"] == "letters"
    names = [name for byte, name in enumerate(LETTERS if letters else BYTE_TOKENS) if byte not in base["missing"]]
    at = base["at"]
    inserted: dict[str, tuple[list[Any], list[Any]]] = {
        "tokens": (tiny["tokens"], names),
        "token_type": (tiny["types"], [NORMAL if letters else BYTE] * len(names)),
    }
    if "scores" in tiny:
        scores = base.get("scores", [-float(at + n) for n in range(len(names))])
        inserted["scores"] = (tiny["scores"], scores)
    lists = {name: [*own[:at], *new, *own[at:]] for name, (own, new) in inserted.items()}
    keys = {**tiny["metadata"], **lists}
    return {key if key.startswith("general.") else f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny["metadata"].get("pre", "spm"))
def test_tiny_vocabularies_behave_as_in_llama_cpp(tiny: dict[str, Any]) -> None:
    tokenizer, expected = load_tokenizer(tiny_metadata(tiny)), tiny["llama_cpp"]
    for text, special, plain in tiny["texts"]:
        assert tokenizer.encode(text) == special, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
    assert (tokenizer.bos_id, tokenizer.eos_id) == (expected["bos"], expected["eos"])
    assert (tokenizer.add_bos, tokenizer.add_eos) == (expected["add_bos"], expected["add_eos"])
    assert sorted(tokenizer.end_of_generation) == expected["eog"]
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)] == expected["control"]
    at, count = tiny["bytes"]["at"], 256 - len(tiny["bytes"]["missing"])
    own = [i for i in range(tokenizer.vocab_size) if not at <= i < at + count]
    assert [tokenizer.token_bytes(i).hex() for i in own] == expected["pieces"]


# --- rules, one by one ----------------------------------------------------------------------------------------------


def test_sentencepiece_joins_the_highest_score_first() -> None:
    tokenizer = load_tokenizer(spm_metadata({"a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1}, add_bos_token=False))
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("abc", add_special=False)]
    assert texts[-2:] == ["a", "bc"]


def test_of_equal_scores_the_leftmost_is_joined_whatever_its_halves() -> None:
    # After b, "aaa" could come from (a, aa) as well as (aa, a): a ranked list of pairs would have to prefer one.
    metadata = spm_metadata({"a": -9, "b": -9, "ba": -1, "aa": -2, "aaa": -3}, add_space_prefix=False)
    tokenizer = load_tokenizer(metadata)
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("aaaaa" + "baaaa", add_special=False)]
    assert texts == ["aa", "aaa", "ba", "aaa"]


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    tokenizer = load_tokenizer(spm_metadata({"▁": -1}, add_space_prefix=False))
    assert tokenizer.encode("é", add_special=False) == [3 + 0xC3, 3 + 0xA9]


def test_sentencepiece_puts_a_space_in_front_and_after_special_tokens_and_decode_takes_it_away() -> None:
    tokenizer = load_tokenizer(spm_metadata({"▁": -1, "a": -1}))
    space, a = tokenizer.token_id("▁"), tokenizer.token_id("a")
    assert tokenizer.encode("a</s>a") == [1, space, a, 2, space, a]
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    metadata = spm_metadata({"a": -1}, add_space_prefix=False)
    assert load_tokenizer(metadata).encode("a") == [1, 259]
    assert load_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": False}).encode("a") == [259]
    assert load_tokenizer({**metadata, "tokenizer.ggml.add_eos_token": True}).encode("a") == [1, 259, 2]
    assert load_tokenizer(metadata).encode("a", add_special=False) == [259]


def test_a_bos_that_the_text_begins_with_is_not_repeated() -> None:
    tokenizer = load_tokenizer(spm_metadata({"a": -1}, add_space_prefix=False))
    assert tokenizer.encode("<s>a") == [1, 259]
    assert tokenizer.encode("<s><s>a") == [1, 1, 259]


def test_control_tokens_in_text_are_text_when_not_parsed_but_user_defined_ones_never_are() -> None:
    tokenizer = load_tokenizer(bpe_metadata(tokens={"<turn>": CONTROL, "<tab>": USER_DEFINED}))
    assert tokenizer.encode("<turn><tab>") == [256, 257]
    assert tokenizer.encode("<turn><tab>", parse_special=False) == [*b"<turn>", 257]


def test_the_longer_special_token_is_found_first_even_if_it_begins_later() -> None:
    tokenizer = load_tokenizer(bpe_metadata(tokens={"<a": CONTROL, "a>b>": CONTROL}))
    assert tokenizer.encode("<a>b>") == [ord("<"), 257]


def test_unused_tokens_stand_for_nothing_and_non_utf8_tokens_for_their_bytes() -> None:
    tokenizer = load_tokenizer(bpe_metadata(tokens={"<unused7>": UNUSED, "\udcff": USER_DEFINED}))
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.token_bytes(257) == b"\xff"
    assert tokenizer.encode("a") == [ord("a")]


def test_a_lone_surrogate_is_encoded_as_the_replacement_character() -> None:
    assert smollm2_tokenizer().encode("a\ud800b") == smollm2_tokenizer().encode("a\ufffdb")


def test_control_tokens_are_left_out_of_decoded_text_unless_asked_for() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nHi<|im_end|>"


def test_equal_merges_rank_as_the_first_of_them() -> None:
    tokenizer = load_tokenizer(bpe_metadata("a b", "b c", "a b"))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == ["ab", "c"]


def test_words_that_are_tokens_ignore_merges_where_the_model_was_trained_so() -> None:
    metadata = bpe_metadata("a b", tokens={"abc": NORMAL}, add_bos_token=False)
    assert load_tokenizer({**metadata, "tokenizer.ggml.pre": "glm4"}).encode("abc") == [257]
    assert load_tokenizer({**metadata, "tokenizer.ggml.pre": "chatglm-bpe"}).encode("abc") == [256, ord("c")]


# All bytes are tokens here; SmolLM2 has none for some control characters, which vanish (in llama.cpp too).
BYTES = load_tokenizer(bpe_metadata("a b", "Ġ a", "Ġ Ġ", "ðŁ ĺ", "ð Ł", tokens={"<x>": CONTROL}))
SPACED = load_tokenizer(spm_metadata({"▁": -9, "a": -9, "▁a": -2, "aa": -1, "▁▁": -1}))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_gives_back_what_encode_was_given(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text, parse_special=False)) == text


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(" aé漢\n😀<s>")))
def test_decode_gives_back_what_sentencepiece_was_given(text: str) -> None:
    assert SPACED.decode(SPACED.encode(text, parse_special=False)) == text


def test_text_without_blanks_or_with_many_takes_linear_time() -> None:
    for tokenizer in (smollm2_tokenizer(), SPACED):
        for text in ("a" * 200_000, " " * 200_000, "漢" * 200_000, "a" + "\n" * 200_000, "9" * 200_000):
            start = time.thread_time()
            tokenizer.encode(text)
            assert time.thread_time() - start < 5


# --- what a file may say wrongly ------------------------------------------------------------------------------------


def test_special_ids_outside_the_vocabulary_are_ignored_with_a_warning() -> None:
    tokenizer = load_tokenizer(bpe_metadata(bos_token_id=-1, eos_token_id=256, padding_token_id=2**32 - 1))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)
    assert tokenizer.warnings == [
        "tokenizer.ggml.bos_token_id: -1 is outside the vocabulary of 256 tokens, ignored",
        "tokenizer.ggml.eos_token_id: 256 is outside the vocabulary of 256 tokens, ignored",
        "tokenizer.ggml.padding_token_id: 4294967295 is outside the vocabulary of 256 tokens, ignored",
    ]


def test_a_bos_that_is_wanted_but_missing_is_not_added_and_warned_about() -> None:
    tokenizer = load_tokenizer(bpe_metadata(add_bos_token=True))
    assert tokenizer.encode("a") == [ord("a")]
    assert tokenizer.warnings == ["tokenizer.ggml.add_bos_token: true, but the file names no BOS token; none is added"]


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_without_a_pre_tokenizer_the_default_is_used_with_a_warning(pre: str | None) -> None:
    tokenizer = load_tokenizer(bpe_metadata(pre=pre))
    assert len(tokenizer.warnings) == 1 and "tokenizer.ggml.pre" in tokenizer.warnings[0]
    assert tokenizer.encode("12345") == list(b"12345")


def test_scores_that_are_missing_are_warned_about() -> None:
    tokenizer = load_tokenizer({**spm_metadata({"a": -1, "aa": -2}), "tokenizer.ggml.scores": None})
    assert tokenizer.warnings == ["tokenizer.ggml.scores: absent; all merges rank alike, words may be cut wrong"]


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "no_vocab", "hybriddna"])
def test_other_tokenizer_models_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.model: .* found '{model}'"):
        load_tokenizer({**bpe_metadata(), "tokenizer.ggml.model": model})


def test_unknown_pre_tokenizers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre: .* found 'llama-9'"):
        load_tokenizer(bpe_metadata(pre="llama-9"))


BAD_METADATA = [
    ({"model": None}, "model: expected the name of a tokenizer, found none"),
    ({"tokens": None}, "tokens: expected a list of token strings, found none"),
    ({"tokens": []}, "tokens: expected at least one token"),
    ({"tokens": np.arange(3)}, "tokens: expected a list of strings, found ndarray"),
    ({"tokens": ["a", "b", "a"]}, "tokens: expected 3 different tokens, found 'a' at index 0 and again at 2"),
    ({"token_type": np.ones(255, np.int32)}, "token_type: expected 256 values, one for each token, found 255"),
    ({"token_type": np.ones(257, np.int32)}, "token_type: expected 256 values, one for each token, found 257"),
    ({"token_type": ["a"] * 256}, "token_type: expected a list of 256 numbers"),
    ({"scores": np.zeros(3, np.float32)}, "scores: expected 256 values, one for each token, found 3"),
    ({"scores": np.full(256, np.nan, np.float32)}, "scores: expected numbers, found NaN at index 0"),
    ({"merges": None}, "merges: expected the merges of a BPE tokenizer, found none"),
    ({"merges": ["ab"]}, "merges: expected two UTF-8 pieces, a space between, found 'ab' at 0"),
    ({"merges": ["a b", "a "]}, "merges: expected two UTF-8 pieces, a space between, found 'a ' at 1"),
    ({"merges": [" ab"]}, "merges: expected two UTF-8 pieces, a space between, found ' ab' at 0"),
    ({"merges": ["a \udcff"]}, "merges: expected two UTF-8 pieces, a space between, found 'a \\udcff' at 0"),
    ({"pre": ["gpt-2"]}, "pre: expected a string, found list"),
    ({"model": np.arange(2)}, "model: expected a string, found ndarray"),
    ({"bos_token_id": "1"}, "bos_token_id: expected a token id, found '1'"),
    ({"add_bos_token": 1}, "add_bos_token: expected a boolean, found 1"),
    ({"token_type": [BYTE] * 256}, "tokens: expected a byte token such as <0x0A>, found"),
]


@pytest.mark.parametrize(("change", "message"), BAD_METADATA, ids=[message for _, message in BAD_METADATA])
def test_contradictory_metadata_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    metadata = bpe_metadata() | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(FormatError) as caught:
        load_tokenizer({key: value for key, value in metadata.items() if value is not None})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_chat_template_that_is_no_string_is_refused() -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.chat_template: expected a string, found something else"):
        load_tokenizer({**bpe_metadata(), "tokenizer.chat_template": 3})


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    for read in (smollm2_tokenizer().token_bytes, smollm2_tokenizer().is_control, smollm2_tokenizer().token_text):
        with pytest.raises(RequestError, match=rf"token id {token_id}: expected one of the vocabulary's 0\.\.49151"):
            read(token_id)

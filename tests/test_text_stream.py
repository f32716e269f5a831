"""Streamed text: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CONTROL, bpe_metadata, smollm2_tokenizer, spm_metadata

from tqgguf.text.gguf_tokenizer import load_tokenizer
from tqgguf.text.text_stream import TextStream

# One token for each byte, whose id is the byte, then a control token.
BYTES = load_tokenizer(bpe_metadata(tokens={"<end>": CONTROL}))
END = 256


def pushed(data: Iterable[int], stop: Sequence[str] = ()) -> list[str]:
    """What each byte of `data` lets through, and at last what `finish` does."""
    stream = TextStream(BYTES, stop)
    return [*(stream.push(byte) for byte in data), stream.finish()]


def test_a_character_of_several_tokens_is_shown_when_its_last_byte_is_there() -> None:
    assert pushed("a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


def test_an_emoji_that_smollm2_spreads_over_tokens_never_shows_broken_bytes() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("👩‍👩‍👧 ok")
    stream = TextStream(tokenizer)
    shown = [stream.push(i) for i in ids]
    assert len(ids) > 8 and "".join(shown) == "👩‍👩‍👧 ok"
    assert not any("\ufffd" in text for text in shown) and stream.finish() == ""


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xf0\x9fA", ["", "", "\ufffdA", ""]),  # a letter where a continuation byte was due
        (b"\x80A", ["\ufffd", "A", ""]),  # a continuation byte where a character begins
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é", ""]),  # a character begins anew
        (b"\xed\xa0A", ["", "", "\ufffd\ufffdA", ""]),  # the first half of a surrogate, which UTF-8 forbids
        (b"\xff", ["\ufffd", ""]),
    ],
)
def test_bytes_become_the_replacement_character_once_they_cannot_complete(data: bytes, expected: list[str]) -> None:
    assert pushed(data) == expected


def test_an_incomplete_character_is_held_until_the_end() -> None:
    assert pushed(b"a\xf0\x9f\x98") == ["a", "", "", "", "\ufffd"]


def test_text_that_may_begin_a_stop_string_is_held_and_released_when_it_does_not() -> None:
    assert pushed(b"aENX", ["END"]) == ["a", "", "", "ENX", ""]


def test_text_that_may_begin_a_stop_string_is_released_at_the_end() -> None:
    assert pushed(b"aEN", ["END"]) == ["a", "", "", "EN"]


def test_a_stop_string_and_what_follows_are_dropped() -> None:
    stream = TextStream(BYTES, ["END"])
    assert "".join(stream.push(byte) for byte in b"one END two") == "one "
    assert stream.stopped
    assert stream.finish() == ""


def test_a_stop_string_inside_one_token_hides_the_rest_of_it() -> None:
    tokenizer = load_tokenizer(bpe_metadata("a E", "N D", "aE ND", "aEND b"))
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(tokenizer.encode("aENDb")[0]) == "a"
    assert stream.stopped


def test_the_held_end_may_itself_begin_the_stop_string_again() -> None:
    assert pushed(b"aaab", ["aab"]) == ["", "", "a", "", ""]


def test_of_two_stop_strings_the_one_complete_first_counts() -> None:
    assert "".join(pushed(b"abcd", ["abcd", "bc"])) == "a"


def test_a_stop_string_may_contain_characters_of_several_tokens() -> None:
    assert "".join(pushed("x→é→y".encode(), ["é→"])) == "x→"


def test_empty_stop_strings_are_ignored() -> None:
    assert "".join(pushed(b"abc", [""])) == "abc"


def test_control_tokens_are_not_shown_unless_asked_for() -> None:
    hidden, shown = TextStream(BYTES), TextStream(BYTES, show_special=True)
    assert [hidden.push(i) for i in (ord("a"), END, ord("b"))] == ["a", "", "b"]
    assert [shown.push(i) for i in (ord("a"), END, ord("b"))] == ["a", "<end>", "b"]


def test_a_sentencepiece_token_keeps_its_leading_space() -> None:
    tokenizer = load_tokenizer(spm_metadata({"▁": -1, "a": -1, "▁a": 0}))
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in tokenizer.encode("a a", add_special=False)] == [" a", " a"]


def cut_at_first_stop(text: str, stops: Sequence[str]) -> str:
    """The rule, character by character: stop as soon as some stop string ends here."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if stop and text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


PIECES = st.lists(st.sampled_from([b"a", b"b", b"ab", "é".encode(), "😀".encode(), b"\x80", b"\xf0\x9f"]))


@settings(max_examples=500, deadline=None)
@given(PIECES.map(b"".join), st.lists(st.text(st.sampled_from("abé😀"), max_size=4), max_size=3))
def test_what_is_shown_is_the_text_up_to_the_first_stop_however_it_falls_into_tokens(
    data: bytes, stops: list[str]
) -> None:
    shown = pushed(data, stops)
    expected = cut_at_first_stop(data.decode("utf-8", "replace"), stops)
    assert "".join(shown) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_smollm2s_tokens_stream_as_the_decoded_text(text: str, stops: list[str]) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stops)
    shown = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert shown == cut_at_first_stop(tokenizer.decode(ids), stops)

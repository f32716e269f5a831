"""Text that streams from a folder's tokens is what the `tokenizers` library decodes of them all, of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_folders import byte_fallback, byte_level, write_json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tqgguf.formats.errors import FormatError
from tqgguf.text.bpe import BYTE_LETTERS
from tqgguf.text.folder_stream import MOST_IDS, held_back
from tqgguf.text.folder_tokenizer import FolderTokenizer, load_folder_tokenizer
from tqgguf.text.text_stream import TextStream

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "the", "é", "é▁", "中", "🙂", ".", "'s", "▁.", "ab", "�", "Ġ"]


def llama2() -> Tokenizer:
    """Spaces as U+2581, one in front, bytes as <0xXX>, the first space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_added(made)


def mistral() -> Tokenizer:
    """The same by a Metaspace that puts the space in front."""
    made = llama2()
    made.normalizer, made.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def t5() -> Tokenizer:
    """Unigram with Metaspace, no bytes."""
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return with_added(made)


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "the", "##s", "##ing", ".", "!", "n't", "do", "not", "'", "m", "é", "中", "##中"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return with_added(made)


def ctc() -> Tokenizer:
    words = ["<pad>", "|", "A", "B", "É"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.decoder = decoders.CTC()
    return with_added(made)


def word_ends() -> Tokenizer:
    words = ["the</w>", "the", "ing</w>", ".</w>", "é"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.decoder = decoders.BPEDecoder()
    return with_added(made)


def no_decoder() -> Tokenizer:
    return with_added(Tokenizer(models.WordLevel({"a": 0, "bé": 1, " ": 2}, unk_token="a")))


def decoded_by(*steps: object, base: Callable[[], Tokenizer] = llama2) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = with_added(base())
        made.decoder = decoders.Sequence(list(steps))
        return made

    return make


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Tokens that are special, and tokens that are not, with letters that decoders look at."""
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("▁<go>", special=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "Ġé", "▁x", "<0xZZ>", "</w>x")])
    return tokenizer


TO_SPACES, TO_BYTES, TO_TEXT = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: with_added(byte_level()),
    "gemma": lambda: with_added(byte_fallback()),
    "llama-2": llama2,
    "mistral": mistral,
    "t5": t5,
    "wordpiece": wordpiece,
    "ctc": ctc,
    "word-ends": word_ends,
    "none": no_decoder,
    "stripped-twice": decoded_by(TO_SPACES, TO_BYTES, TO_TEXT, decoders.Strip(" ", 2, 0)),
    "replaced-in-the-text": decoded_by(TO_SPACES, TO_BYTES, TO_TEXT, decoders.Replace("the.", "one")),
    "replaced-by-a-pattern": decoded_by(TO_SPACES, TO_TEXT, decoders.Replace(Regex("the[^x]*x"), "one")),
    "bytes-and-letters": decoded_by(decoders.ByteFallback(), decoders.ByteLevel(), base=byte_level),
    "letters-of-a-text": decoded_by(decoders.Fuse(), decoders.ByteLevel(), base=byte_level),
}


WAITING = ("replaced-by-a-pattern", "letters-of-a-text")
"""Decoders of which any later token can change the whole text."""


def loaded(folder: Path, backend: Tokenizer) -> FolderTokenizer:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {})
    return load_folder_tokenizer(folder)


def streamed(tokenizer: FolderTokenizer, ids: Sequence[int], **options: object) -> str:
    stream = TextStream(tokenizer, **options)
    return "".join([*(stream.push(i) for i in ids), stream.finish()])


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_text_is_the_librarys(tmp_path: Path, family: str) -> None:
    backend = FAMILIES[family]()
    tokenizer, choose = loaded(tmp_path, backend), random.Random(family)
    known = sorted(backend.get_vocab(with_added_tokens=True).values())
    assert tokenizer.warnings[:-1] == []  # no decoder was put in the place of the own one
    likely = known[-24:]  # words and added tokens, else bytes alone would be drawn
    for n in (1, 2, 3, 5, 8, 13, 40, 300):
        for _ in range(30 if n < 300 else 2):
            ids = choose.choices([*known, *likely * (len(known) // 24)], k=n)
            for special in (False, True):
                want = backend.decode(ids, skip_special_tokens=not special)
                assert streamed(tokenizer, ids, show_special=special) == want, ids
            assert tokenizer.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("family", ["gpt-2", "gemma", "llama-2", "mistral", "t5", "wordpiece", "none"])
def test_a_continuation_is_what_the_whole_text_has_more(tmp_path: Path, family: str) -> None:
    backend = FAMILIES[family]()
    tokenizer, choose = loaded(tmp_path, backend), random.Random(family)
    words = [i for i in range(tokenizer.vocab_size) if backend.decode([i]).isascii() and backend.decode([i]).strip()]
    for n in (1, 4, 100):
        before, after = choose.choices(words, k=n), choose.choices(words, k=n)
        want = backend.decode([*before, *after])[len(backend.decode(before)) :]
        assert streamed(tokenizer, after, context=before) == want


@pytest.mark.parametrize("family", ["gpt-2", "gemma", "llama-2", "mistral", "t5", "wordpiece", "none"])
def test_a_stream_that_is_taken_up_at_any_token_shows_the_rest(tmp_path: Path, family: str) -> None:
    """As where an answer was interrupted, also within a character: nothing is shown twice, and nothing is lost."""
    backend = FAMILIES[family]()
    tokenizer, choose = loaded(tmp_path, backend), random.Random(family)
    known = sorted(backend.get_vocab(with_added_tokens=True).values())
    for n in (2, 5, 12, 40):
        ids = choose.choices([*known, *known[-24:] * (len(known) // 24)], k=n)
        for cut in range(1, n):
            first, second = TextStream(tokenizer), TextStream(tokenizer)
            shown = "".join(map(first.push, ids[:cut]))
            second.take_up(ids[:cut], cut)
            shown += "".join(map(second.push, ids[cut:])) + second.finish()
            assert shown == streamed(tokenizer, ids), (ids, cut)


def test_an_answer_of_its_own_begins_without_the_prefix_space_and_a_continuation_with_it(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, llama2())
    the = tokenizer.token_id("▁the")
    assert the is not None
    assert streamed(tokenizer, [the, the]) == "the the"
    assert streamed(tokenizer, [the], context=[the]) == " the"


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("replaced-by-a-pattern", "letters-of-a-text")]
)
def test_text_streams_and_does_not_wait_for_the_end(tmp_path: Path, family: str) -> None:
    backend = FAMILIES[family]()
    tokenizer = loaded(tmp_path, backend)
    plain = [i for i in range(tokenizer.vocab_size) if backend.decode([i]) in ("the", "A", "B", "a", " the", ".")]
    assert plain
    stream = TextStream(tokenizer)
    held = len(backend.decode(plain * 40)) - sum(len(stream.push(i)) for i in plain * 40)
    assert held <= 5 and len(stream._decoder._ids) <= MOST_IDS + 1


def test_a_decoder_that_waits_for_anything_holds_all_back() -> None:
    pattern = {"type": "Replace", "pattern": {"Regex": "a.*b"}, "content": ""}
    assert held_back({"type": "Sequence", "decoders": [{"type": "Fuse"}, pattern]}) is None
    assert held_back({"type": "Sequence", "decoders": [pattern, {"type": "Fuse"}]}) == 0
    assert held_back(None) == 0


def test_bytes_that_become_one_character_appear_together(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, llama2())
    stream = TextStream(tokenizer)
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é🙂".encode()]
    assert [stream.push(i) for i in ids if i is not None] == [""] * 6  # a byte that does not fit would change them all
    the = tokenizer.token_id("▁the")
    assert the is not None and stream.push(the) == "é🙂 the"


def test_a_stop_string_of_byte_tokens_stops_at_once(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, llama2())
    stream = TextStream(tokenizer, ["\n\n"])
    line, the = tokenizer.token_id("<0x0A>"), tokenizer.token_id("the")
    assert line is not None and the is not None
    assert [stream.push(i) for i in (the, line)] == ["the", ""]
    assert stream.push(line) == "" and stream.stopped and stream.finish() == ""


def test_unused_ids_are_within_the_vocabulary_and_give_no_text(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "far": 5000}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken("<added>", normalized=False)])
    tokenizer = loaded(tmp_path, made)
    added = made.token_to_id("<added>")
    assert tokenizer.vocab_size == max(added, 5000) + 1 > len(made.get_vocab())
    assert streamed(tokenizer, [0, 4000, 5000, added, 1, 70_000]) == "afar<added>b"


def test_a_decoder_that_panics_gives_one_clear_line(tmp_path: Path) -> None:
    made = llama2()
    made.decoder = decoders.Sequence([TO_SPACES, TO_TEXT, decoders.Strip(" ", 1, 1)])
    tokenizer = loaded(tmp_path, made)
    space = made.token_to_id("▁")
    with pytest.raises(FormatError, match=r"^tokenizer.json: its decoder fails with some tokens: "):
        tokenizer.decode([space])
    with pytest.raises(FormatError, match=r"^tokenizer.json: its decoder fails with some tokens: "):
        streamed(tokenizer, [space])


def test_a_decoder_that_fails_is_replaced_where_another_one_reads_the_vocabulary(tmp_path: Path) -> None:
    made = byte_level()
    made.decoder = decoders.Strip("a", 0, 2)
    tokenizer = loaded(tmp_path, made)
    assert "tokens are decoded as byte-level ones instead" in tokenizer.warnings[0]
    assert tokenizer.decode(tokenizer.encode("a b a")) == "a b a"


def test_a_decoder_that_fails_where_no_other_one_will_do_is_refused_in_one_line(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "cd": 2}, unk_token="a"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Strip("a", 0, 2)
    with pytest.raises(FormatError, match=r"^tokenizer.json: its decoder fails with the text .a b.nc.: [^\n]+$"):
        loaded(tmp_path, made)


def test_a_text_with_which_the_library_fails_gives_one_line(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="none"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(FormatError, match=r"^tokenizer.json: it fails with this text: "):
        loaded(tmp_path, made).encode("a d")


HELLO = ["Hello", "Ġthe", "Ċ", "Ġworld", "Ġ", "Ã", "©"]


def test_a_byte_level_vocabulary_with_the_decoder_of_another_kind_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(HELLO)}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.Sequence([TO_SPACES, TO_BYTES, TO_TEXT, decoders.Strip(" ", 1, 0)])
    tokenizer = loaded(tmp_path, made)
    assert streamed(tokenizer, range(7)) == "Hello the\n world é" == tokenizer.decode(range(7))
    assert "are decoded as byte-level ones instead" in tokenizer.warnings[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_with_a_byte_level_decoder_is_read_as_it_was_written(
    tmp_path: Path, prefix: bool
) -> None:
    made = llama2()
    made.normalizer = made.normalizer if prefix else normalizers.Replace(" ", "▁")
    made.decoder = decoders.ByteLevel()
    tokenizer = loaded(tmp_path, made)
    ids = [tokenizer.token_id(text) for text in ("▁the", "▁", "<0xC3>", "<0xA9>")]
    assert streamed(tokenizer, ids) == (" the é", "the é")[prefix]


def test_letters_are_bytes_only_where_all_of_a_token_are(tmp_path: Path) -> None:
    assert "é" in BYTE_LETTERS
    made = byte_level()
    made.add_tokens([AddedToken("é→", normalized=False), AddedToken("é", normalized=False)])
    tokenizer = loaded(tmp_path, made)
    ids = [tokenizer.token_id("é→"), tokenizer.token_id("é")]
    assert streamed(tokenizer, ids) == "é→�" == made.decode(ids)

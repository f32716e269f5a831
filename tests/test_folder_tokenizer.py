"""The tokenizer of a folder: ids as `tokenizers` gives them, bytes per token, special tokens, ends and templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_folders import byte_fallback, byte_level, write_json
from tiny_models import CHAT_TEMPLATE, SPECIAL, vocabulary
from tokenizers import Tokenizer, decoders, models, processors

from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.text.folder_tokenizer import load_folder_tokenizer
from tqgguf.text.text_stream import TextStream

TEXTS = ["the other thing", "", " ", "a\n\n b\t", "Straße 🙂 中文 ñ", "ab  ab<s>"]
START, TURN, END = (len(vocabulary()) - n for n in (3, 2, 1))


def folder_with(folder: Path, backend=None, **files) -> Path:
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}, **files}.items():
        write_json(folder / f"{name}.json", value)
    return folder


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", (byte_level, byte_fallback))
def test_ids_and_texts_are_the_librarys(tmp_path, make, text):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path, make()))
    ids = tokenizer.encode(text)
    assert ids == make().encode(text).ids
    assert tokenizer.decode(ids) == make().decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special=False) == make().decode(ids, skip_special_tokens=False)


def test_ids_that_no_token_has_have_no_text(tmp_path):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path))
    assert tokenizer.token_text(100_000) == "" == tokenizer.decode([100_000])
    with pytest.raises(RequestError, match="token id -1: expected 0 or more"):
        tokenizer.token_text(-1)


def test_a_character_spread_over_tokens_streams_whole(tmp_path):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path, byte_fallback()))
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode("🙂")]
    assert len(pieces) > 3 and not any(pieces) and stream.finish() == "🙂"


def test_special_tokens_in_text_are_parsed_or_not_as_asked(tmp_path):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path))
    assert tokenizer.encode("<|im_end|>") == [END]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert END not in plain and tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [END]
    assert tokenizer.is_special(END) and tokenizer.is_control(END) and not tokenizer.is_special(0)
    assert tokenizer.decode([END, 33]) == "!" and tokenizer.decode([END], skip_special=False) == "<|im_end|>"


def test_bos_is_added_once(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], START)]
    )
    tokenizer = load_folder_tokenizer(folder_with(tmp_path, backend))
    assert tokenizer.encode("a") == [START, ord("a")]
    assert tokenizer.encode(f"{SPECIAL[0]}a") == [START, ord("a")]
    assert tokenizer.encode("a", add_special=False) == [ord("a")]


def test_a_lone_surrogate_becomes_a_replacement_character(tmp_path):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {START, END}),
        ({"config": {"eos_token_id": 5}}, {5, START, END}),
        ({"generation_config": {"eos_token_id": [6, 7, 99_999]}}, {6, 7, START, END}),
        ({"tokenizer_config": {"eos_token": {"content": "Ġthe"}}}, {vocabulary().index("Ġthe"), START, END}),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": "in"}}, {vocabulary().index("in"), START, END}),
    ],
)
def test_generation_ends_where_any_file_says_and_at_known_tokens(tmp_path, files, ends):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path, **files))
    assert tokenizer.end_of_generation == ends
    assert tokenizer.warnings == []


def test_a_folder_without_an_end_of_generation_warns(tmp_path):
    tokenizer = load_folder_tokenizer(folder_with(tmp_path, byte_fallback_without_specials(), tokenizer_config={}))
    assert tokenizer.end_of_generation == frozenset()
    assert len(tokenizer.warnings) == 1 and "answers end by -n" in tokenizer.warnings[0]


def byte_fallback_without_specials() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


@pytest.mark.parametrize(
    ("configured", "template"),
    [
        (CHAT_TEMPLATE, CHAT_TEMPLATE),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        (None, None),
    ],
)
def test_the_template_of_tokenizer_config(tmp_path, configured, template):
    files = {"tokenizer_config": {"chat_template": configured}}
    assert load_folder_tokenizer(folder_with(tmp_path, **files)).chat_template == template


@pytest.mark.parametrize("configured", [5, {"default": "x"}, [{"name": "default", "template": ["x"]}]])
def test_a_template_that_is_no_text_is_refused(tmp_path, configured):
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": configured})
    with pytest.raises(FormatError, match=r"chat_template: expected a string, found (int|dict|list)"):
        load_folder_tokenizer(folder)


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path):
    files = {"tokenizer_config": {"chat_template": "old"}, "chat_template": {"chat_template": "json"}}
    folder = folder_with(tmp_path, **files)
    assert load_folder_tokenizer(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load_folder_tokenizer(folder).chat_template == "jinja"


TRUNCATION = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
PADDING = {
    "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{"truncation": TRUNCATION}, *({"padding": {"strategy": {"Fixed": n}, **PADDING}} for n in (8, 1 << 40))],
)
def test_what_a_folder_was_trained_with_cuts_and_pads_no_prompt(tmp_path, settings):
    text = "hello world this is a long prompt"
    folder = folder_with(tmp_path)
    expected = load_folder_tokenizer(folder).encode(text)
    path = folder / "tokenizer.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | settings)
    assert load_folder_tokenizer(folder).encode(text) == expected and len(expected) > 8


def test_an_id_beyond_int32_is_refused_by_its_token(tmp_path):
    folder = folder_with(tmp_path)
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    description["model"]["vocab"]["a"] = 2**32 - 1
    write_json(path, description)
    with pytest.raises(FormatError, match="expected ids of at most 2147483647, found 4294967295 for the token 'a'"):
        load_folder_tokenizer(folder)


def test_half_a_character_in_a_file_of_settings_is_refused(tmp_path):
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}', encoding="utf-8")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: expected JSON, found a mistake"):
        load_folder_tokenizer(folder)

"""A GGUF's tokenizer as the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

A byte-level BPE keeps its merges. A SentencePiece vocabulary, which has scores and no merges, gets the merges that its
scores imply, as transformers derives them. Knows the metadata and the `tokenizers` library; no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.models.vocabulary import (
    PREFIX,
    SPACE,
    SURROGATE,
    TokenType,
    Vocabulary,
    read_flag,
    read_merges,
    read_name,
    read_vocabulary,
    utf8,
)
from tqgguf.formats.wording import shown
from tqgguf.text.bpe import build_pre_tokenizer, choose_pretokenizer
from tqgguf.text.gguf_tokenizer import HIDDEN_TYPES, SPM_SPECIAL_IDS, Tokenizer

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unk", "pad_token": "pad"}
"""Names in tokenizer_config.json -> roles of special tokens."""
CLASS = "PreTrainedTokenizerFast"


def tokenizer_backend(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Backend:
    """The `tokenizers.Tokenizer` of a GGUF's metadata, special tokens and all; `tokenizer` is the same in our form.

    UnsupportedModelError: a kind that tokenizer.json cannot hold.
    """
    is_spm = read_name(metadata, "model") == "llama"
    vocabulary = read_vocabulary(metadata, default_special=SPM_SPECIAL_IDS if is_spm else {})
    _check_spelling(vocabulary)
    backend = _sentencepiece(vocabulary, metadata) if is_spm else _byte_level(vocabulary, metadata)
    for special, kinds in ((True, HIDDEN_TYPES), (False, (TokenType.USER_DEFINED,))):
        chosen = np.flatnonzero(np.isin(vocabulary.types, kinds)).tolist()
        backend.add_tokens([AddedToken(vocabulary.tokens[i], special=special, normalized=False) for i in chosen])
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    end = [tokenizer.eos_id] if tokenizer.add_eos else []
    named = {tokenizer.token_text(i): i for i in [*begin, *end] if i is not None}
    if named:
        first, last = ([tokenizer.token_text(i) for i in ids if i is not None] for ids in (begin, end))
        around = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B", *last],
            special_tokens=list(named.items()),
        )
        byte_level = [] if is_spm else [processors.ByteLevel(trim_offsets=False)]
        backend.post_processor = processors.Sequence([*byte_level, around])
    return backend


def tokenizer_settings(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    """tokenizer_config.json."""
    ids = {name: getattr(tokenizer, f"{role}_id") for name, role in ROLES.items()}
    settings: dict[str, Any] = {name: _text(tokenizer.token_text(i)) for name, i in ids.items() if i is not None}
    settings |= {
        "tokenizer_class": CLASS,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    template = tokenizer.chat_template
    return settings | ({} if template is None else {"chat_template": _text(template)})


def _check_spelling(vocabulary: Vocabulary) -> None:
    """UnsupportedModelError for a token whose bytes are no UTF-8: JSON cannot spell it, and no other id may move up."""
    bad = next((i for i, text in enumerate(vocabulary.tokens) if SURROGATE.search(text)), None)
    if bad is not None:
        raise UnsupportedModelError(
            f"{PREFIX}tokens: token {bad} is not UTF-8 ({shown(utf8(vocabulary.tokens[bad]))}): tokenizer.json cannot "
            "hold it"
        )


def _text(text: str) -> str:
    """A text as JSON can hold it: U+FFFD for bytes that are no UTF-8."""
    return utf8(text).decode("utf-8", "replace")


def _byte_level(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Backend:
    row = choose_pretokenizer(metadata, [])
    if row.spelt_out:
        raise UnsupportedModelError(f"{PREFIX}model: a vocabulary of its kind is not written as tokenizer.json yet")
    ids = vocabulary.ids
    merges = [(a, b) for a, b in read_merges(metadata) if a in ids and b in ids and a + b in ids]
    backend = Backend(BPE(ids, merges, ignore_merges=row.ignore_merges))
    backend.pre_tokenizer = build_pre_tokenizer(row)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Backend:
    unknown = vocabulary.special.get("unk")
    backend = Backend(
        BPE(
            vocabulary.ids,
            list(_implied_merges(vocabulary)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = read_flag(metadata, "add_space_prefix", True)
    to_space = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space]) if has_prefix else to_space
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    return backend


def _implied_merges(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two, the token of the highest score first, then that of the shortest left part."""
    tokens = vocabulary.tokens
    is_normal = np.isin(vocabulary.types, (TokenType.NORMAL, TokenType.USER_DEFINED)).tolist()
    normal = {text: i for text, i in vocabulary.ids.items() if is_normal[i]}
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    width = int(lengths.max(initial=0)) + 1
    found: list[int] = []  # one number for each way, as a vocabulary like Gemma's has half a million
    beginnings: list[str] = []  # of the text at hand, those that are tokens: in this order they are seen just before it
    for text in sorted(normal):
        while beginnings and not text.startswith(beginnings[-1]):
            beginnings.pop()
        first = normal[text] * width
        found += [first + at for at in map(len, beginnings) if text[at:] in normal]
        beginnings.append(text)
    ids, lefts = np.divmod(np.array(found, np.int64), width)
    scores = np.zeros(len(ids)) if vocabulary.scores is None else vocabulary.scores[ids]
    order = np.lexsort((lengths[ids] - lefts, lefts, -scores))
    for i, at in zip(ids[order].tolist(), lefts[order].tolist(), strict=True):
        yield tokens[i][:at], tokens[i][at:]

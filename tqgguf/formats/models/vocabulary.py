"""A GGUF file's vocabulary: token strings, types, scores, special ids and the tokens that end generation.

This module reads and checks the `tokenizer.ggml.*` metadata, for whoever makes a tokenizer of it and for whoever judges
the file. It does not know how text is split or merged: see `text.bpe` and `text.spm`.
The rules (which names end generation, which ids are assumed) are those of llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.wording import shown

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"  # stands for the space in tokens spelt as SentencePiece does
BPE_MODELS = ("gpt2", "gemma4")
SPM_MODEL = "llama"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


SURROGATE = re.compile("[\ud800-\udfff]")
"""What stands in a string of the file for bytes that are not UTF-8."""


class VocabularyError(FormatError):
    """The metadata contradict themselves, or lack something. key: where."""

    def __init__(self, name: str, problem: str) -> None:
        self.key = PREFIX + name
        super().__init__(f"{self.key}: {problem}")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`: values of the GGUF specification."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Role of a special token -> metadata keys that may name it, the last one present wins.
SPECIAL_ID_KEYS: dict[str, tuple[str, ...]] = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # spelt so in GGUF
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}

# Role -> texts that reveal it when the metadata names no id. A token found this way is a control token.
WELL_KNOWN_TEXTS: dict[str, tuple[str, ...]] = {
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
        "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip

NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask", "cls")  # as transformers names them to chat templates
END_OF_GENERATION_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# Texts that end generation wherever they are found in a vocabulary.
END_OF_GENERATION_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip

# gpt-oss frames its channels with these; they are part of the text that a reader of the answer needs.
ALWAYS_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass
class Vocabulary:
    """Token strings as the file has them, with what the file says about each."""

    tokens: list[str]
    ids: dict[str, int]
    types: NDArray[np.int32]  # (n_tokens,), values of TokenType
    scores: NDArray[np.float32] | None  # (n_tokens,), SPM merge priorities
    special: dict[str, int]  # role -> id, only roles that this vocabulary has
    end_of_generation: frozenset[int]
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


def read_vocabulary(metadata: Mapping[str, Any], *, default_special: Mapping[str, int]) -> Vocabulary:
    """Read and check the token lists of a GGUF file's metadata.

    `default_special` gives the ids that a tokenizer model assumes where the metadata names none (role -> id).
    Raises VocabularyError when a list is missing, of the wrong length or kind, or names a token twice.
    """
    warnings: list[str] = []
    tokens = _read_tokens(metadata, warnings)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        second = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise VocabularyError(
            "tokens",
            f"expected {len(tokens)} different tokens, found {shown(tokens[second])} at index {second} "
            f"and again at {ids[tokens[second]]}; convert the model again",
        )
    types = _read_numbers(metadata, "token_type", len(tokens), np.int32)
    if types is None:
        types = np.full(len(tokens), TokenType.NORMAL, np.int32)
    for i in np.flatnonzero(types == TokenType.BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(tokens[i]):
            raise VocabularyError(
                "tokens", f"expected a byte token such as <0x0A>, found {shown(tokens[i])} at index {i}"
            )
    scores = _read_numbers(metadata, "scores", len(tokens), np.float32)
    if scores is not None and np.isnan(scores).any():
        raise VocabularyError("scores", f"expected numbers, found NaN at index {int(np.isnan(scores).argmax())}")
    special = _read_special_ids(metadata, default_special, len(tokens), warnings)
    for role, texts in WELL_KNOWN_TEXTS.items():
        found = next((ids[text] for text in texts if text in ids), None)
        if role not in special and found is not None:
            special[role] = found
            types[found] = TokenType.CONTROL
    end_of_generation = _find_end_of_generation(ids, types, special)
    return Vocabulary(tokens, ids, types, scores, special, end_of_generation, warnings)


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of the metadata in their order, each once; VocabularyError where they are none."""
    lines = read_strings(metadata, "merges")
    if lines is None:
        raise VocabularyError("merges", "expected the merges of a BPE tokenizer, found none")
    merges: dict[tuple[str, str], None] = {}  # the first of equal merges decides the rank
    for index, line in enumerate(lines):
        at = line.find(" ", 1)  # a space may itself be the left part
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not right or SURROGATE.search(line):
            raise VocabularyError(
                "merges", f"expected two UTF-8 pieces, a space between, found {shown(line)} at {index}"
            )
        merges[left, right] = None
    return list(merges)


def utf8(text: str) -> bytes:
    """The bytes of a string of the file; the reader keeps bytes that are not UTF-8 as surrogates."""
    return text.encode("utf-8", "surrogateescape")


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean `tokenizer.ggml.<name>`; VocabularyError when the file holds something else."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, (bool, np.bool_)):
        raise VocabularyError(name, f"expected a boolean, found {shown(value)}")
    return bool(value)


def _read_tokens(metadata: Mapping[str, Any], warnings: list[str]) -> list[str]:
    tokens = read_strings(metadata, "tokens")
    if tokens is None:
        raise VocabularyError("tokens", "expected a list of token strings, found none; the file has no vocabulary")
    if not tokens:
        raise VocabularyError("tokens", "expected at least one token, found an empty list")
    if "" in tokens:
        empty = [i for i, text in enumerate(tokens) if not text]
        warnings.append(f"{PREFIX}tokens: {len(empty)} empty tokens, the first at index {empty[0]}")
        for i in empty:
            tokens[i] = f"[EMPTY_{i}]"
    return tokens


def read_model(metadata: Mapping[str, Any]) -> str:
    """The name of the kind of tokenizer; VocabularyError where there is none.

    UnsupportedModelError: a kind that is not known here.
    """
    name = read_name(metadata, "model")
    if name is None:
        raise VocabularyError("model", "expected the name of a tokenizer, found none; the file has no vocabulary")
    if name not in (*BPE_MODELS, SPM_MODEL):
        known = ", ".join(BPE_MODELS)
        raise UnsupportedModelError(
            f"{PREFIX}model: expected {known} or {SPM_MODEL}, found {shown(name)}, which is not supported"
        )
    return name


def read_name(metadata: Mapping[str, Any], name: str) -> str | None:
    """The string `tokenizer.ggml.<name>`, None when absent; VocabularyError for other kinds."""
    value = metadata.get(PREFIX + name)
    if value is not None and not isinstance(value, str):
        raise VocabularyError(name, f"expected a string, found {type(value).__name__}")
    return value


def read_strings(metadata: Mapping[str, Any], name: str) -> list[str] | None:
    """A fresh list of the strings of `tokenizer.ggml.<name>`, None when absent; VocabularyError for other kinds."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(s, str) for s in value):
        raise VocabularyError(name, f"expected a list of strings, found {type(value).__name__}")
    return list(value)


def _read_numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: type[Any]) -> NDArray[Any] | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise VocabularyError(name, f"expected a list of {count} numbers, found {type(value).__name__}")
    if len(array) != count:
        raise VocabularyError(name, f"expected {count} values, one for each token, found {len(array)}")
    return array.astype(dtype)


def _read_special_ids(
    metadata: Mapping[str, Any], defaults: Mapping[str, int], count: int, warnings: list[str]
) -> dict[str, int]:
    special = {role: i for role, i in defaults.items() if i < count}
    for role, names in SPECIAL_ID_KEYS.items():
        for name in names:
            value = metadata.get(PREFIX + name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise VocabularyError(name, f"expected a token id, found {shown(value)}")
            if 0 <= value < count:
                special[role] = int(value)
            else:
                warnings.append(f"{PREFIX}{name}: {value} is outside the vocabulary of {count} tokens, ignored")
    return special


def _find_end_of_generation(ids: dict[str, int], types: NDArray[np.int32], special: dict[str, int]) -> frozenset[int]:
    """Ids that end generation; adjusts `types` of tokens whose role their text gives away."""
    by_text = {text: ids[text] for text in END_OF_GENERATION_TEXTS if text in ids}
    types[list(by_text.values())] = TokenType.CONTROL
    types[[ids[text] for text in ALWAYS_SHOWN_TEXTS if text in ids]] = TokenType.USER_DEFINED
    found = set(by_text.values()) | {special[role] for role in END_OF_GENERATION_ROLES if role in special}
    texts_found = {text for text, i in by_text.items() if i in found}
    # gpt-oss and Solar end a message, not the answer, with <|end|>.
    calls = "<|call|>" in texts_found or "<|calls|>" in texts_found
    if "<|end|>" in texts_found and calls and texts_found & {"<|return|>", "<|flush|>"}:
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
        found.discard(ids["<|end|>"])
    # In Gemma 4 and PLaMo </s> is text like any other.
    if "</s>" in texts_found and ("<|tool_response>" in texts_found or ids.get("<|plamo:eos|>", -1) in found):
        types[ids["</s>"]] = TokenType.NORMAL
        found.discard(ids["</s>"])
    return frozenset(found)

"""The tokenizer of a GGUF model, built from the file's metadata alone; token ids equal llama.cpp's.

Puts together the vocabulary, the special tokens inside text and the model that cuts plain text (`text.bpe`,
`text.spm`). Knows BOS, EOS and where generation ends. Does not know chats (see `chat`) or MLX.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as Backend

from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.models.vocabulary import (
    NAMED_ROLES,
    PREFIX,
    SPM_MODEL,
    TokenType,
    Vocabulary,
    read_flag,
    read_model,
    read_vocabulary,
    utf8,
)
from tqgguf.text.bpe import BpeModel
from tqgguf.text.byte_stream import ByteStream
from tqgguf.text.special_tokens import BLANKS, SpecialTokens
from tqgguf.text.spm import SpmModel

SPM_SPECIAL_IDS = {"unk": 0, "bos": 1, "eos": 2}  # what SentencePiece files mean when they name none
HIDDEN_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)  # left out of shown text
# Phi-3's special tokens, less these, swallow the blanks after them. No key of GGUF says so: the model's name does.
PHI3_NAMES = ("phi-3", "phi3")
PHI3_KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


class TextModel(Protocol):
    """What cuts plain text into tokens: BPE or SentencePiece."""

    backend: Backend | None
    add_bos: bool  # whether text begins with BOS when the metadata does not say
    requires_bos: bool  # whether it does so even if the metadata says no
    lossy_bytes: bytes  # of text, that may give no token, as the vocabulary has none for them
    strays: Sequence[str]  # what is taken apart into tokens though it is none
    space_prefix: bool  # whether text gets a space in front at its beginning and after special tokens

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Token ids of plain text that follows a special token or the beginning (`after_special`), or does not."""

    def normal_bytes(self, text: str) -> bytes:
        """The bytes that a normal token, spelt `text` in the vocabulary, stands for."""


class Tokenizer:
    """Text to token ids and back.

    `backend` is the `tokenizers.Tokenizer` that merges plain text (None for SentencePiece vocabularies); it knows no
    special tokens. `warnings` says, in one line each, what in the file was ignored or assumed.
    """

    def __init__(self, vocabulary: Vocabulary, model: TextModel, metadata: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._model = model
        special = vocabulary.special
        self.bos_id, self.eos_id = special.get("bos"), special.get("eos")
        self.eot_id, self.eom_id = special.get("eot"), special.get("eom")
        self.unk_id, self.pad_id = special.get("unk"), special.get("pad")
        self.warnings = vocabulary.warnings
        self.add_bos = self._checked_flag(
            "add_bos_token", read_flag(metadata, "add_bos_token", model.add_bos) or model.requires_bos, "bos"
        )
        self.add_eos = self._checked_flag("add_eos_token", read_flag(metadata, "add_eos_token", False), "eos")
        self.end_of_generation = vocabulary.end_of_generation
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise FormatError("tokenizer.chat_template: expected a string, found something else")
        self.chat_template: str | None = template
        tokens, types = vocabulary.tokens, vocabulary.types
        self._hidden: frozenset[int] = frozenset(np.flatnonzero(np.isin(types, HIDDEN_TYPES)).tolist())
        user_defined: list[int] = np.flatnonzero(types == TokenType.USER_DEFINED).tolist()
        name = str(metadata.get("general.name", "")).lower()
        phi3 = any(phi in name for phi in PHI3_NAMES)
        special_ids = [*self._hidden, *user_defined]
        strip = {i for i in special_ids if phi3 and tokens[i] not in PHI3_KEEP_BLANKS}
        self._special = SpecialTokens({tokens[i]: i for i in special_ids}, strip_right=strip)
        self._user_defined = SpecialTokens({tokens[i]: i for i in user_defined}, strip_right=strip)

    @property
    def backend(self) -> Backend | None:
        return self._model.backend

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special`: BOS before and EOS after, as the metadata says; a BOS that `text` itself begins with is not
        repeated. `parse_special`: control tokens written in `text` become those tokens, else they are plain text.
        """
        fragments = (self._special if parse_special else self._user_defined).split(_valid(text))
        ids: list[int] = []
        if add_special and self.add_bos and fragments[:1] != [self.bos_id]:
            ids.append(self._id("bos"))
        after_special = True
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._model.encode(fragment, after_special=after_special)
            after_special = isinstance(fragment, int)
        if add_special and self.add_eos:
            ids.append(self._id("eos"))
        return ids

    def least_tokens(self, text: str) -> int:
        """As many tokens at least `encode` makes of a text, which is not cut for that: no token is of more bytes than
        the longest one.
        """
        data, lossy = utf8(text), self._model.lossy_bytes
        if self._special.swallows_blanks:
            lossy += BLANKS.encode()
        return -(-(len(data) - sum(map(data.count, set(lossy)))) // self._longest)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token, or a few more: as it is spelt."""
        return max(len(utf8(piece)) for piece in ("a", *self._vocabulary.tokens, *self._model.strays))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`: the inverse of `encode`, so the space that SentencePiece put in front goes away.

        `skip_special` leaves control tokens out. Bytes that are not UTF-8 become U+FFFD.
        """
        ids = list(ids)
        text = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        first = next((i for i in ids if i != self.bos_id), None)
        if self._model.space_prefix and first is not None and first not in self._hidden:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def stream_decoder(self, context: Sequence[int] = (), *, show_special: bool = False) -> ByteStream:
        """What turns generated tokens into text. `show_special`: control tokens appear as their text. `context` makes
        no difference: a token has the same bytes everywhere.
        """
        return ByteStream(self.token_bytes, (lambda token_id: False) if show_special else self.is_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, for streaming; a control token gives its text, an unused one nothing."""
        text = self.token_text(token_id)
        match self._vocabulary.types[token_id]:
            case TokenType.NORMAL:
                return self._model.normal_bytes(text)
            case TokenType.BYTE:
                return bytes.fromhex(text[3:5])
            case TokenType.UNUSED | TokenType.UNDEFINED:
                return b""
            case _:
                return utf8(text)

    def is_control(self, token_id: int) -> bool:
        """Whether a token steers the model and is no text (BOS, a turn marker)."""
        self._check(token_id)
        return bool(self._vocabulary.types[token_id] == TokenType.CONTROL)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of shown text: control tokens and the unknown token."""
        self._check(token_id)
        return token_id in self._hidden

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it."""
        self._check(token_id)
        return self._vocabulary.tokens[token_id]

    def named_tokens(self) -> dict[str, str]:
        """Texts of the tokens that have a role, by the names that chat templates know: bos_token, eos_token, ..."""
        special = self._vocabulary.special
        return {f"{role}_token": self.token_text(special[role]) for role in NAMED_ROLES if role in special}

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells `text`, None if there is none."""
        return self._vocabulary.ids.get(text)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id}: expected one of the vocabulary's 0..{self.vocab_size - 1}")

    def _id(self, role: str) -> int:
        return self._vocabulary.special[role]

    def _checked_flag(self, name: str, value: bool, role: str) -> bool:
        if value and role not in self._vocabulary.special:
            self.warnings.append(f"{PREFIX}{name}: true, but the file names no {role.upper()} token; none is added")
            return False
        return value


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its metadata.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known, naming it,
    and VocabularyError (a FormatError) when the metadata contradicts itself.
    """
    model: TextModel
    if read_model(metadata) == SPM_MODEL:
        vocabulary = read_vocabulary(metadata, default_special=SPM_SPECIAL_IDS)
        model = SpmModel(vocabulary, metadata)
    else:
        vocabulary = read_vocabulary(metadata, default_special={})
        model = BpeModel(vocabulary, metadata)
    return Tokenizer(vocabulary, model, metadata)


def _valid(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 can hold, as U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

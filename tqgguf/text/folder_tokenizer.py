"""The tokenizer of an MLX folder: tokenizer.json, and what the configuration files say of special tokens and chats.

Offers what `tokenizer.Tokenizer` offers for GGUF files. Ids and texts are those of Hugging Face's `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.json_file import read_bytes, read_json
from tqgguf.formats.models.vocabulary import END_OF_GENERATION_TEXTS, NAMED_ROLES, utf8
from tqgguf.formats.wording import shown
from tqgguf.text.bpe import BYTE_LETTERS
from tqgguf.text.folder_decoder import suitable_decoder
from tqgguf.text.folder_stream import FolderStream, decoded
from tqgguf.text.library_errors import failing_as

MAX_TOKEN_ID = 2**31 - 1
"""The largest id that llama.cpp's and MLX's int32 hold."""


class FolderTokenizer:
    """Text to token ids and back, by a `tokenizers.Tokenizer` and the settings that lie beside it."""

    def __init__(
        self, backend: Backend, description: Mapping[str, Any], settings: Mapping[str, Any], eos_ids: Iterable[int]
    ) -> None:
        backend.no_truncation()  # what a folder was trained with cuts and pads no prompt, as in transformers
        backend.no_padding()
        self.backend = backend
        self._description = description
        self.warnings: list[str] = []
        self.chat_template: str | None = settings.get("chat_template")
        backend.decoder, repair = suitable_decoder(backend)
        if repair:
            self.warnings.append(repair)
        self._decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_id = self._named(settings, "bos_token")
        self.eos_id = self._named(settings, "eos_token")
        self.unk_id, self.pad_id = self._named(settings, "unk_token"), self._named(settings, "pad_token")
        ids = {f"{role}_token": self._named(settings, f"{role}_token") for role in NAMED_ROLES}
        self._named_ids = {name: i for name, i in ids.items() if i is not None}
        known = {backend.token_to_id(text) for text in END_OF_GENERATION_TEXTS} & self._special
        named = set(eos_ids) | ({self.eos_id} if self.eos_id is not None else set())
        self.end_of_generation = frozenset(i for i in known | named if i is not None and 0 <= i < self.vocab_size)
        if not self.end_of_generation:
            self.warnings.append("no token that ends generation is named; answers end by -n or a stop string only")

    def _named(self, settings: Mapping[str, Any], role: str) -> int | None:
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        return self.backend.token_to_id(text) if isinstance(text, str) else None

    @cached_property
    def vocab_size(self) -> int:
        """The largest id and one; some ids below may be unused."""
        return 1 + max(self._ids.values(), default=-1)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; see `tokenizer.Tokenizer.encode`. What is added is the post-processor's matter."""
        self.backend.encode_special_tokens = not parse_special
        valid = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with failing_as("tokenizer.json: it fails with this text"):
            ids: list[int] = self.backend.encode(valid, add_special_tokens=add_special).ids
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            del ids[0]
        return ids

    def least_tokens(self, text: str) -> int:
        """See `tokenizer.Tokenizer.least_tokens`; 0 too where text is changed in a way that is not known here."""
        most = self._most_bytes
        return -(-len(utf8(text)) // most) if most else 0

    @cached_property
    def _most_bytes(self) -> int:
        """Bytes of text that one token can stand for; 0: any number."""
        return _bytes_per_byte(self._description, self._ids) * max(len(utf8(token)) for token in ("a", *self._ids))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves special tokens out."""
        return decoded(self.backend, list(ids), skip_special=skip_special)

    def stream_decoder(self, context: Sequence[int] = (), *, show_special: bool = False) -> FolderStream:
        """What turns generated tokens into the text that `decode` makes of them all. `show_special`: special tokens
        appear as their text. context: ids of the text that these tokens continue, if there is one.
        """
        return FolderStream(self.backend, self._decoder, frozenset() if show_special else self._special, context)

    def is_control(self, token_id: int) -> bool:
        return self.is_special(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of shown text."""
        self._check(token_id)
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        self._check(token_id)
        return self.backend.id_to_token(token_id) or ""

    def named_tokens(self) -> dict[str, str]:
        """See `tokenizer.Tokenizer.named_tokens`."""
        return {name: self.token_text(i) for name, i in self._named_ids.items()}

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def _check(self, token_id: int) -> None:
        if token_id < 0:
            raise RequestError(f"token id {token_id}: expected 0 or more")


def load_folder_tokenizer(folder: Path) -> FolderTokenizer:
    """Build the tokenizer of a model folder.

    FormatError: tokenizer.json or a file beside it is missing or damaged.
    """
    path = folder / "tokenizer.json"
    description = read_json(path)
    with failing_as(f"{path}: expected a tokenizer, found a mistake"):
        backend = Backend.from_file(str(path))
    settings = {**_optional(folder / "special_tokens_map.json"), **_optional(folder / "tokenizer_config.json")}
    settings["chat_template"] = _chat_template(folder, settings.get("chat_template"))
    eos_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _optional(folder / name).get("eos_token_id")
        eos_ids |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    made = FolderTokenizer(backend, description, settings, eos_ids)
    largest = made.vocab_size - 1
    if largest > MAX_TOKEN_ID:
        token = shown(made.token_text(largest))
        raise FormatError(f"{path}: expected ids of at most {MAX_TOKEN_ID}, found {largest} for the token {token}")
    return made


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _chat_template(folder: Path, configured: Any) -> str | None:
    """The template in a file of its own, else the one in tokenizer_config.json (of several, the default one)."""
    if (path := folder / "chat_template.jinja").exists():
        try:
            return read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: expected UTF-8 text, found another byte", offset=error.start) from error
    found = _optional(folder / "chat_template.json").get("chat_template", configured)
    if isinstance(found, list):
        named = [row for row in found if isinstance(row, dict) and row.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise FormatError(f"{folder}: chat_template: expected a string, found {type(found).__name__}")
    return found


_PRE_TOKENIZERS = frozenset({"Sequence", "Split", "ByteLevel", "Metaspace", "Digits"})
"""That cut text and lose none of it, unless a Split removes what it finds."""


def _bytes_per_byte(description: Mapping[str, Any], vocabulary: Container[str]) -> int:
    """How many bytes of a text can become one before it is cut; 0 where that is not known, or text can be lost."""
    model, added = description.get("model"), description.get("added_tokens")
    has_bytes = all(letter in vocabulary for letter in BYTE_LETTERS)
    has_bytes = has_bytes or all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not (has_bytes and isinstance(model, dict) and model.get("type") == "BPE" and isinstance(added, list)):
        return 0
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return 0
    cuts = list(_parts(description.get("pre_tokenizer"), "pretokenizers"))
    if any(part.get("type") not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in cuts):
        return 0
    shrinks = 1
    for part in _parts(description.get("normalizer"), "normalizers"):
        if part.get("type") == "NFC":
            shrinks *= 4  # three letters of Hangul become one, and marks go into letters
        elif part.get("type") not in ("Sequence", "Prepend") and part.get("pattern") != {"String": " "}:
            return 0
    return shrinks


def _parts(component: Any, of_sequence: str) -> Iterator[dict[str, Any]]:
    """A part of tokenizer.json, and the parts of a sequence."""
    if isinstance(component, dict):
        yield component
        for part in component.get(of_sequence) or ():
            yield from _parts(part, of_sequence)

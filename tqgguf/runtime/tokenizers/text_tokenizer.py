"""What the runtime asks of a tokenizer, whether it was built from a GGUF file or from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class TextTokenizer(Protocol):
    """Text to token ids and back. `tokenizer.Tokenizer` says what each member means."""

    bos_id: int | None
    eos_id: int | None
    end_of_generation: frozenset[int]
    chat_template: str | None
    warnings: list[str]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def least_tokens(self, text: str) -> int: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def named_tokens(self) -> dict[str, str]: ...

    def token_id(self, text: str) -> int | None: ...

    def is_control(self, token_id: int) -> bool: ...

    def is_special(self, token_id: int) -> bool: ...

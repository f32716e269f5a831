"""What the runtime asks of a tokenizer, whether it was built from a GGUF file or from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """Turns the tokens of one answer into text, one after the other.

    All that `push` and `finish` return, joined, is the text of the answer, and nothing is taken back.
    """

    def push(self, token_id: int) -> str:
        """The text that no later token can change any more, and that was not returned before."""

    def finish(self) -> str:
        """The rest of the text, now that nothing more will come."""

    @property
    def pending(self) -> str:
        """Text that follows what was returned if nothing more comes, as far as it is whole characters."""


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

    def stream_decoder(self, context: Sequence[int] = (), *, show_special: bool = False) -> TokenDecoder: ...

    def token_text(self, token_id: int) -> str: ...

    def named_tokens(self) -> dict[str, str]: ...

    def token_id(self, text: str) -> int | None: ...

    def is_control(self, token_id: int) -> bool: ...

    def is_special(self, token_id: int) -> bool: ...

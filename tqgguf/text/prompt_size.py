"""Whether a prompt fits into the context: of token ids, and of a text before it is cut into tokens."""

from __future__ import annotations

from tqgguf.formats.errors import RequestError
from tqgguf.text.text_tokenizer import TextTokenizer


class ContextFullError(RequestError):
    """A prompt is longer than the context. n_tokens: it has so many, or more."""

    def __init__(self, n_tokens: int, n_ctx: int, at_least: str = "") -> None:
        self.n_tokens, self.n_ctx = n_tokens, n_ctx
        super().__init__(
            f"the prompt has {at_least}{n_tokens} tokens: expected at most {n_ctx}, the size of the context (-c)"
        )


def check_prompt(n_tokens: int, n_ctx: int) -> None:
    """Refuse a prompt that is empty or longer than the context."""
    if not n_tokens:
        raise RequestError("the prompt is empty: expected at least one token")
    if n_tokens > n_ctx:
        raise ContextFullError(n_tokens, n_ctx)


def check_text(text: str, tokenizer: TextTokenizer, n_ctx: int | None) -> None:
    """Refuse a text that is longer than the context whatever its tokens are: cutting one of 20 MB takes gigabytes.

    n_ctx: None for no limit.
    """
    if n_ctx is None or len(text) * 4 <= n_ctx:  # bytes of UTF-8
        return
    least = tokenizer.least_tokens(text)
    if least > n_ctx:
        raise ContextFullError(least, n_ctx, "at least ")

"""DRY, llama.cpp's penalty on repetitions: which tokens would go on with one, and how long it is already.

The end of the text is looked for earlier in the text. Where its last n tokens stand, the token that follows them there
would make the repetition one token longer. A sequence breaker ends the text that is looked at: what stands before the
last breaker, and the breaker itself, take no part in the end that is looked for. (src/llama-sampler.cpp, August 2026.)

Knows token ids only, and asks a tokenizer once how breakers are spelt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqgguf.text.text_tokenizer import TextTokenizer

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""By the first token of a sequence breaker, the tokens that may follow it: () where it is a breaker by itself."""

MOST_BREAKER_BYTES = 40
"""What llama.cpp looks at of a sequence breaker (MAX_CHAR_LEN)."""
MOST_BREAKER_TOKENS = 20
"""Likewise of the tokens after its first one (MAX_SEQ_LEN)."""


def breaker_tokens(texts: Sequence[str], tokenizer: TextTokenizer) -> Breakers:
    """The tokens in which sequence breakers can occur.

    A token that holds a whole breaker is one by itself. A token that ends in the beginning of one is one together with
    the tokens of the breaker's rest.
    """
    pieces = [tokenizer.decode([token], skip_special=False) for token in range(tokenizer.vocab_size)]
    found: dict[int, list[tuple[int, ...]]] = {}
    for text in texts:
        text = text.encode()[:MOST_BREAKER_BYTES].decode("utf-8", "ignore")
        for token, piece in enumerate(pieces):
            for rest in _rests(text, piece):
                ids = tokenizer.encode(rest, add_special=False, parse_special=False) if rest else []
                tail = tuple(ids[:MOST_BREAKER_TOKENS])
                if tail not in found.setdefault(token, []):
                    found[token].append(tail)
    return found


def _rests(text: str, piece: str) -> list[str]:
    """What is left of a breaker after a piece of text that holds it ("") or ends in its beginning."""
    if text in piece:
        return [""]
    starts = (at for at in range(len(piece)) if text.startswith(piece[at:]))
    return [text[len(piece) - at :] for at in starts]


def repetitions(recent: Sequence[int], breakers: Breakers, allowed_length: int) -> dict[int, int]:
    """By token, the longest repetition that it would go on with, of at least `allowed_length` tokens. Tokens that are
    sequence breakers by themselves are left out.

    `recent`: the token ids that are looked at, the oldest first. The length does not count the token itself.
    """
    if len(recent) <= allowed_length:
        return {}
    back = list(reversed(recent))
    limit = _since_breaker(back, breakers)
    if limit < allowed_length:
        return {}
    longest: dict[int, int] = {}
    for at, length in enumerate(_common_prefixes(back)):
        length = min(length, limit)
        if at and length >= allowed_length and () not in breakers.get(token := back[at - 1], ()):
            longest[token] = max(length, longest.get(token, length))
    return longest


def _since_breaker(back: Sequence[int], breakers: Breakers) -> int:
    """How many tokens, from the end of the text, come after the last sequence breaker."""
    for at, token in enumerate(back):
        tails = [tail for tail in breakers.get(token, ()) if len(tail) <= at]
        found = [len(tail) for tail in tails if tuple(back[at - len(tail) : at][::-1]) == tail]
        if found:
            return at - max(found)
    return len(back)


def _common_prefixes(tokens: Sequence[int]) -> list[int]:
    """For each position, how many tokens from there on equal those from the beginning on (the Z-algorithm; 0 at 0)."""
    lengths = [0] * len(tokens)
    left = right = 0
    for at in range(1, len(tokens)):
        n = min(right - at, lengths[at - left]) if at < right else 0
        while at + n < len(tokens) and tokens[n] == tokens[at + n]:
            n += 1
        lengths[at] = n
        if at + n > right:
            left, right = at, at + n
    return lengths

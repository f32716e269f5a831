"""Finds special tokens inside text, so that the rest can be tokenized piece by piece.

Knows the order in which llama.cpp looks (longest token first, each over all text that is left) and the two
whitespace rules (a token may swallow the blanks before or after it). Does not know what the tokens mean.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

BLANKS = " \t\n\v\f\r"  # C's isspace in the "C" locale


class SpecialTokens:
    """Splits text at the given tokens.

    `texts`: token text -> id. `strip_left`, `strip_right`: ids of tokens that swallow blanks on that side.
    """

    def __init__(
        self, texts: Mapping[str, int], *, strip_left: Iterable[int] = (), strip_right: Iterable[int] = ()
    ) -> None:
        self._ids = dict(texts)
        self._strip_left = frozenset(strip_left)
        self._strip_right = frozenset(strip_right)
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self._ids:
            lengths[text[0]].add(len(text))
        self._lengths = {first: sorted(each) for first, each in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._firsts = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    @property
    def swallows_blanks(self) -> bool:
        """Whether blanks can be lost beside a token."""
        return bool(self._strip_left or self._strip_right)

    def split(self, text: str) -> list[str | int]:
        """`text` as a list of ids of special tokens and non-empty pieces of plain text between them."""
        fragments: list[str | int] = [text] if text else []
        for token in sorted(self._present(text), key=lambda token: (-len(token.encode()), self._ids[token])):
            fragments = [part for each in fragments for part in self._split_at(each, token)]
        return fragments

    def _present(self, text: str) -> set[str]:
        # Thousands of tokens (Gemma has 6,400) but few first characters: look only where one of those stands.
        found = set()
        for match in self._firsts.finditer(text):
            start = match.start()
            for length in self._lengths[match.group()]:
                candidate = text[start : start + length]
                if candidate in self._ids:
                    found.add(candidate)
        return found

    def _split_at(self, fragment: str | int, token: str) -> list[str | int]:
        if isinstance(fragment, int) or token not in fragment:
            return [fragment]
        i = self._ids[token]
        parts: list[str | int] = []
        rest = fragment
        while (at := rest.find(token)) >= 0:
            left = rest[:at].rstrip(BLANKS) if i in self._strip_left else rest[:at]
            rest = rest[at + len(token) :]
            if i in self._strip_right:
                rest = rest.lstrip(BLANKS)
            parts += [left, i] if left else [i]
        return [*parts, rest] if rest else parts

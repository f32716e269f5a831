"""The grid of absolute positions at which prompts are cut into pieces that are evaluated at once. Knows no MLX."""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.formats.blocks.block_types import PAGE_TOKENS

DEFAULT_CHUNK = 256  # tokens of a piece


def round_chunk(chunk: int) -> int:
    """The grid step that a requested one becomes: the next multiple of a page."""
    return max(1, -(-chunk // PAGE_TOKENS)) * PAGE_TOKENS


@dataclass(frozen=True)
class AskedGrid:
    """What -ub and -b ask for, in tokens: pieces of n_ubatch, of n_batch at most. is_named: whether -ub was given."""

    n_ubatch: int = DEFAULT_CHUNK
    n_batch: int = 2048
    is_named: bool = False

    @property
    def chunk(self) -> int:
        """The grid step: whole pages."""
        return round_chunk(min(self.n_ubatch, self.n_batch))

    @property
    def notices(self) -> tuple[str, ...]:
        """What is to be said where another step than the named one is taken."""
        if not self.is_named or self.chunk == self.n_ubatch:
            return ()
        return (f"-ub {self.n_ubatch}: texts are evaluated in whole pages of {PAGE_TOKENS}, so {self.chunk} is used",)

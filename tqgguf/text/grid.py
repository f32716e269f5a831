"""The grid of absolute positions at which prompts are cut into pieces that are evaluated at once. Knows no MLX."""

from __future__ import annotations

from tqgguf.formats.blocks.block_types import PAGE_TOKENS

DEFAULT_CHUNK = 256  # tokens of a piece


def round_chunk(chunk: int) -> int:
    """The grid step that a requested one becomes: the next multiple of a page."""
    return max(1, -(-chunk // PAGE_TOKENS)) * PAGE_TOKENS

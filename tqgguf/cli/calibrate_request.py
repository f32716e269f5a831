"""What `tqgguf calibrate` is asked to do: the command line, parsed, checked and typed, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.ranges import check_chunks, check_ranges
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.text.grid import DEFAULT_CHUNK


@dataclass(frozen=True)
class CalibrateRequest:
    """One call of `tqgguf calibrate`. RequestError for a number out of its range."""

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""
    text_file: str | None = None
    """None: the text that tqgguf brings."""
    output: str | None = None
    """The sidecar to write. None: in the user's cache folder, where it is found by the model's fingerprint."""
    n_ctx: int = 2048
    """Tokens of a window. 0: as many as the model was trained for. The default takes no more than these."""
    n_chunks: int = 4
    """Windows, evenly spread over the text, or as many as it gives; ALL_CHUNKS: all."""
    n_batch: int = 2048
    n_ubatch: int = DEFAULT_CHUNK
    """Tokens evaluated at a time, at most n_batch, not yet rounded up to whole pages."""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    threads: int = -1
    verbose: bool = False
    debug: bool = False
    given: frozenset[str] = frozenset()
    """First long spellings of all flags that were given."""
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("calibrate"))
        if 0 < self.n_ctx < PAGE_TOKENS:
            raise RequestError(f"-c: expected {PAGE_TOKENS} tokens or more, whole pages, found {self.n_ctx}")
        check_chunks(self.n_chunks)

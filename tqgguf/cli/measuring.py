"""What verbs that evaluate a model share: opening and loading it with progress, the text to measure on, the grid."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Protocol

from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.prompts import read_text, without_last_newline
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.wording import readable, shown
from tqgguf.runtime import backends
from tqgguf.runtime.models.load import OpenModel, embedded_model, open_model
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.runtime.models.mlx_folder import OpenFolder
from tqgguf.text.grid import round_chunk
from tqgguf.texts import default_text

OWN_TEXT = "tqgguf's own text"


class NamesModel(Protocol):
    """A request with -m and RoPE's flags."""

    @property
    def model(self) -> str | None: ...
    @property
    def rope_freq_base(self) -> float: ...
    @property
    def rope_freq_scale(self) -> float: ...


class EvaluatedInChunks(Protocol):
    """A request with -b and -ub."""

    @property
    def n_batch(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def given(self) -> Collection[str]: ...


def open_requested(request: NamesModel) -> OpenModel | OpenFolder:
    """Open the model of -m, or the embedded one, with RoPE as asked for. Errors: as `open_model`."""
    return open_model(
        request.model or embedded_model(),
        rope_freq_base=request.rope_freq_base,
        rope_freq_scale=request.rope_freq_scale,
    )


def measured_text(text_file: str | None) -> tuple[str, str]:
    """The text of -f, or tqgguf's own, and what to call it."""
    if text_file is None:
        return default_text(), OWN_TEXT
    return without_last_newline(read_text("-f", text_file, sys.stdin.buffer)), readable(text_file)


def chunk_of(request: EvaluatedInChunks) -> int:
    """Tokens evaluated at a time; a -ub that is not whole pages is rounded up, and said."""
    chunk = round_chunk(min(request.n_ubatch, request.n_batch))
    if chunk != request.n_ubatch and "--ubatch-size" in request.given:
        say(f"-ub {request.n_ubatch}: texts are evaluated in whole pages of {PAGE_TOKENS}, so {chunk} is used")
    return chunk


def load(opened: OpenModel | OpenFolder, threads: int, verbose: bool) -> LoadedModel:
    """Load a model with progress and a line about it."""
    if threads > 0:
        backends.set_threads(threads)
    loading = ProgressLine("loading", "bytes")
    loaded = opened.load(loading.update)
    loading.end()
    config = opened.config
    say(f"model: {opened.path}: {config.architecture} {shown(config.name)}, {config.n_layers} layers")
    if verbose:
        say(f"device: {backends.describe()}")
    return loaded

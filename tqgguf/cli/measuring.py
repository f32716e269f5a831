"""What verbs that evaluate a model share: opening and loading it with progress, the text to measure on, the grid."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Protocol

from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.prompts import read_text, without_last_newline
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.wording import readable, shown
from tqgguf.runtime import backends
from tqgguf.runtime.models.calibration_choice import AUTO, ChosenCalibration
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.runtime.models.mlx_folder import OpenFolder
from tqgguf.runtime.models.model_opening import ModelAsk, ModelOpening
from tqgguf.text.grid import AskedGrid
from tqgguf.texts import default_text

OWN_TEXT = "tqgguf's own text"


class NamesModel(Protocol):
    """A request with -m, RoPE's flags and -t."""

    @property
    def model(self) -> str | None: ...
    @property
    def rope_freq_base(self) -> float: ...
    @property
    def rope_freq_scale(self) -> float: ...
    @property
    def threads(self) -> int: ...


class EvaluatedInChunks(Protocol):
    """A request with -b and -ub."""

    @property
    def n_batch(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def given(self) -> Collection[str]: ...


def asked_model(request: NamesModel, calibration: str = AUTO) -> ModelAsk:
    """The model of -m, or the embedded one, with RoPE and threads as asked for."""
    return ModelAsk(request.model, request.rope_freq_base, request.rope_freq_scale, calibration, request.threads)


def calibrated(opening: ModelOpening, specs: Iterable[CacheSpec]) -> ChosenCalibration:
    """The calibration for caches of these specs, its notices said. Errors: as `choose_calibration`."""
    chosen = opening.calibrate(specs)
    for notice in chosen.notices:
        say(notice)
    return chosen


def measured_text(text_file: str | None) -> tuple[str, str]:
    """The text of -f, or tqgguf's own, and what to call it."""
    if text_file is None:
        return default_text(), OWN_TEXT
    return without_last_newline(read_text("-f", text_file, sys.stdin.buffer)), readable(text_file)


def asked_grid(request: EvaluatedInChunks) -> AskedGrid:
    """What -ub and -b ask for."""
    return AskedGrid(request.n_ubatch, request.n_batch, is_named="--ubatch-size" in request.given)


def chunk_of(request: EvaluatedInChunks) -> int:
    """Tokens evaluated at a time; a -ub that is not whole pages is rounded up, and said."""
    grid = asked_grid(request)
    for notice in grid.notices:
        say(notice)
    return grid.chunk


def load(opening: ModelOpening, verbose: bool) -> LoadedModel:
    """Load a model with progress and a line about it."""
    loading = ProgressLine("loading", "bytes")
    loaded = opening.load(loading.update)
    loading.end()
    say(model_line(opening.opened))
    if verbose:
        say(f"device: {backends.describe()}")
    return loaded


def model_line(opened: OpenModel | OpenFolder) -> str:
    """Which model was loaded, in words."""
    config = opened.config
    return f"model: {opened.path}: {config.architecture} {shown(config.name)}, {config.n_layers} layers"

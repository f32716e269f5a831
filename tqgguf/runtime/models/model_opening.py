"""The way of every verb that evaluates a model: what is asked for, what is known before weights are read, the weights.

    opening = open_asked(ModelAsk("model.gguf", calibration="off"))
    chosen = opening.calibrate([CacheSpec("turbo4", "turbo3")])
    loaded = opening.load()

Nothing is printed. Sessions with a prompt cache are `session_opening`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime import backends
from tqgguf.runtime.models.calibration_choice import AUTO, ChosenCalibration, choose_calibration
from tqgguf.runtime.models.load import OpenModel, open_model
from tqgguf.runtime.models.loaded_model import LoadedModel, Progress
from tqgguf.runtime.models.mlx_folder import OpenFolder


@dataclass(frozen=True)
class ModelAsk:
    """path, rope_freq_base, rope_freq_scale: as `open_model`. calibration: as `choose_calibration`. threads: of the
    CPU, 0 or less: all.
    """

    path: str | os.PathLike[str] | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    calibration: str = AUTO
    threads: int = 0


@dataclass(frozen=True)
class ModelOpening:
    """A model whose header has been read and found servable."""

    ask: ModelAsk
    opened: OpenModel | OpenFolder

    def calibrate(self, specs: Iterable[CacheSpec]) -> ChosenCalibration:
        """The calibration for caches of these specs. Errors: as `choose_calibration`."""
        return choose_calibration(self.opened, self.ask.calibration, specs)

    def load(self, progress: Progress | None = None) -> LoadedModel:
        """Read the weights. FormatError: a weight's values are not finite."""
        backends.set_threads(self.ask.threads)
        return self.opened.load(progress)


def open_asked(ask: ModelAsk) -> ModelOpening:
    """Read a model's header. Errors: as `open_model`."""
    opened = open_model(ask.path, rope_freq_base=ask.rope_freq_base, rope_freq_scale=ask.rope_freq_scale)
    return ModelOpening(ask, opened)

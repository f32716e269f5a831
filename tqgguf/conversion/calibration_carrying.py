"""A converted model takes its calibration along: the sidecar that `run` would find, written anew for the new model.

A sidecar is bound to weights and hyperparameters by their hashes, so that one of the old model would be refused. The
statistics are those of nearly the same keys, whatever type the weights have now, and a scale undoes itself exactly. It
says what it came from. What lies in the cache folder is carried into the cache folder, what lies beside the model
beside the new one.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.belonging import ModelIdentity
from tqgguf.formats.models.calibration import Calibration, is_made_for, read_calibration, write_calibration
from tqgguf.formats.models.calibration_files import beside, cached, candidates, make_cache_folder
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.formats.models.outline import original_layout, rope_layout
from tqgguf.formats.snapshots.rope_order import channel_order
from tqgguf.formats.wording import readable

_SHOWN_DIGITS: Final = 16


@dataclass(frozen=True)
class Carried:
    """source: the old model's sidecar; target: the new one's, None where nothing had to be written or could be.
    notices: one line each.
    """

    source: Path | None = None
    target: Path | None = None
    notices: tuple[str, ...] = ()


def find_calibration(model: str) -> tuple[Path | None, tuple[str, ...]]:
    """The sidecar that belongs to a model, as `run` looks for it; and notices of what was found and does not fit."""
    fingerprint = cache(lambda: ModelIdentity.of(model).fingerprint)
    notices: list[str] = []
    with contextlib.suppress(TqggufError):  # of a model that has no fingerprint: nothing is bound to it
        for path in candidates(model, fingerprint):
            own = fingerprint()
            try:
                if is_made_for(read_calibration(path), own):
                    return path, tuple(notices)
                notices.append(f"{readable(path)}: made for another model; not taken along")
            except TqggufError as error:
                notices.append(f"{error}; not taken along")
    return None, tuple(notices)


def carry_calibration(source: str, target: str, *, in_original_order: bool = False) -> Carried:
    """Write the calibration of the model `source` for the model `target` that was made of it.

    in_original_order: the source's keys have their channels as a checkpoint has them, and the target is a GGUF.
    TqggufError: it cannot be written.
    """
    path, notices = find_calibration(source)
    if path is None:
        return Carried(notices=notices)
    old, new = ModelIdentity.of(source).fingerprint, ModelIdentity.of(target).fingerprint
    calibration = read_calibration(path)
    if in_original_order:
        calibration = _reordered(calibration, target)
    is_cached = path == cached(old)
    place = cached(new) if is_cached or path == beside(target) else beside(target)
    if path in (place, beside(target)) and is_made_for(calibration, new):
        return Carried(path, None, notices)
    if place.exists():
        try:
            if is_made_for(read_calibration(place), new):
                return Carried(path, None, (*notices, f"{readable(place)}: is there already and fits; it stays"))
        except TqggufError:
            if place == beside(target):
                line = f"{readable(place)}: is no sound calibration and stays; {readable(path)} is not taken along"
                return Carried(path, None, (*notices, line))
    if place == cached(new):
        make_cache_folder()
    write_calibration(place, _made_for(calibration, new, source, old), replace_anything=place == cached(new))
    return Carried(path, place, notices)


def _made_for(calibration: Calibration, new: Fingerprint, source: str, old: Fingerprint) -> Calibration:
    """A calibration with the new model's hashes, and the model that was measured, if its weights were others."""
    if is_made_for(calibration, new):
        return replace(calibration, fingerprint=new)
    name = readable(os.path.basename(os.path.abspath(source)))
    measured = calibration.measured_with or f"{name}, weights {old.weights[:_SHOWN_DIGITS]}"
    return replace(calibration, fingerprint=new, measured_with=measured)


def _reordered(calibration: Calibration, target: str) -> Calibration:
    """Channels in the order of the GGUF `target`, where they are in that of the checkpoint."""
    with open_gguf(target) as file:
        architecture = file.text("general.architecture")
    scales = {}
    for layer, scale in calibration.scales.items():
        # a converter orders whole heads, whatever RoPE turns of them
        layout = rope_layout(architecture, scale.shape[1])
        order = channel_order(scale.shape[1], original_layout(architecture, layout), layout)
        scales[layer] = scale if order is None else scale[:, order]
    return replace(calibration, scales=scales)

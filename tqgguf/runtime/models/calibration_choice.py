"""Which calibration a model's caches are made with: a named sidecar, one that is found, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.models.calibration import Calibration, check_fits, read_calibration
from tqgguf.formats.models.calibration_files import candidates
from tqgguf.formats.wording import readable
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.mlx_folder import OpenFolder

AUTO, OFF = "auto", "off"
"""Instead of a sidecar's name: look for one; take the channel scale from page 0."""


@dataclass(frozen=True)
class ChosenCalibration:
    """channel_scales: f32 [n_kv_heads, head_dim] by layer, None: page 0 decides. path: of their sidecar, readable.
    notices: one line each, of sidecars that were found and do not fit, or not quite.
    """

    channel_scales: Mapping[int, mx.array] | None = None
    path: str | None = None
    notices: tuple[str, ...] = ()


def choose_calibration(opened: OpenModel | OpenFolder, wanted: str, specs: Iterable[CacheSpec]) -> ChosenCalibration:
    """The calibration for a model whose header is read. wanted: `AUTO`, `OFF` or a sidecar's path. specs: of the caches
    that are made with it; where none of them balances any layer's K in full, nothing is looked for.

    `AUTO` takes the first that fits: beside the model, then in the user's cache folder; what is damaged or another
    model's is left with a notice. A sidecar that is named must fit: FormatError, RequestError, TqggufError otherwise.
    RequestError too where a spec names a layer that the model has not.
    """
    n_layers = len(opened.config.layer_shapes())
    if not any(spec.has_channel_scale(n_layers) for spec in specs):
        unused = () if wanted in (AUTO, OFF) else (f"--kv-calibration {wanted}: no effect, no K is balanced in full",)
        return ChosenCalibration(notices=unused)
    if wanted == OFF:
        return ChosenCalibration()
    if wanted != AUTO:
        return _fitting(opened, wanted)
    notices: list[str] = []
    for path in candidates(opened.path, lambda: opened.fingerprint):
        try:
            found = _fitting(opened, str(path))
        except TqggufError as error:
            notices.append(f"{error}; left aside")
        else:
            return ChosenCalibration(found.channel_scales, found.path, (*notices, *found.notices))
    return ChosenCalibration(notices=tuple(notices))


def _fitting(opened: OpenModel | OpenFolder, path: str) -> ChosenCalibration:
    calibration: Calibration = read_calibration(path)
    config = opened.config
    notice = check_fits(path, calibration, opened.fingerprint, config.n_layers, config.layer_shapes())
    scales = {layer: mx.array(scale) for layer, scale in calibration.scales.items()}
    return ChosenCalibration(scales, readable(path), () if notice is None else (notice,))

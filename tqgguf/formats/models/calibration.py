"""The calibration sidecar: a small GGUF that holds the channel scale of K for every layer of one model.

`general.type` says that it is no model. Keys: `tqgguf.calibration.version` (1), `.model` (the model's name), `.tokens`
(how many were looked at), `.text` (what they were of) and `.text_sha256`, and the model's `tqgguf.fingerprint.*`. Where
`tqgguf convert` made that model of another one and took the sidecar along, `.measured_with` names the other one.
Tensors: `blk.N.attn_k.channel_scale`, F32 [head_dim, n_kv_heads] in GGUF's order, N counting all layers of the model.
There is no date: the same statistics make the same bytes.

The scale undoes itself exactly, whatever its values: one that belongs to another model costs quality, never
correctness. So a sidecar whose model had other weights or hyperparameters is refused. Other RoPE parameters are taken
with a notice, for one scale serves both channels of a pair and hardly depends on how far it turns. The tokenizer only
decides which tokens were looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.atomic import replacing
from tqgguf.formats.blocks.balance import SCALE_LIMITS
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.cursor import raise_errors
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.file_kind import FileKind, gguf_kind, gguf_purpose
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.models.fingerprint import Fingerprint, read_fingerprint
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import shown

GENERAL_TYPE = "kv-calibration"
VERSION = 1
KEYS = "tqgguf.calibration."
_MEASURED_WITH = f"{KEYS}measured_with"
_TENSOR = "blk.{}.attn_k.channel_scale"
_TENSOR_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.attn_k\.channel_scale")
_F32 = 0
_REFUSING = ("weights", "hyperparameters")
_NOTICED = ("rope",)
_PART_NAMES = {"weights": "weights", "hyperparameters": "hyperparameters", "rope": "RoPE parameters"}


@dataclass(frozen=True)
class Calibration:
    """Channel scales f32 [n_kv_heads, head_dim] by layer, the model that they belong to, and what they were made from.

    text: a name of the text. text_sha256: of its UTF-8 bytes. n_tokens: of it that were looked at. measured_with: the
    model that was measured, where the one that it belongs to was converted from that ("": it was measured itself).
    """

    scales: Mapping[int, NDArray[np.float32]]
    fingerprint: Fingerprint
    architecture: str
    model: str
    n_tokens: int
    text: str
    text_sha256: str
    measured_with: str = ""


def write_calibration(
    path: str | os.PathLike[str], calibration: Calibration, *, replace_anything: bool = False
) -> None:
    """Write the sidecar, or replace one; errors as `atomic.replacing`.

    RequestError: `path` is another kind of file or a damaged one, unless replace_anything is set, as for a place that
    holds nothing but sidecars.
    """
    import gguf  # lazily: reading needs no writer

    if not replace_anything:
        check_replaceable(path)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, calibration.architecture)
        try:
            writer.add_type(GENERAL_TYPE)
            writer.add_uint32(f"{KEYS}version", VERSION)
            writer.add_string(f"{KEYS}model", calibration.model)
            writer.add_uint64(f"{KEYS}tokens", calibration.n_tokens)
            writer.add_string(f"{KEYS}text", calibration.text)
            writer.add_string(f"{KEYS}text_sha256", calibration.text_sha256)
            if calibration.measured_with:
                writer.add_string(_MEASURED_WITH, calibration.measured_with)
            for key, value in calibration.fingerprint.entries().items():
                if isinstance(value, int):
                    writer.add_uint32(key, value)
                else:
                    writer.add_string(key, value)
            for layer, scale in sorted(calibration.scales.items()):
                writer.add_tensor(_TENSOR.format(layer), np.ascontiguousarray(scale, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """RequestError if `path` is a file that is no calibration, or a damaged one: it is not to be written over."""
    if os.path.isfile(path) and os.path.getsize(path):
        try:
            with open_gguf(path) as file:
                _check_type(file)
        except FormatError as error:
            raise RequestError(
                f"{path}: exists and is no calibration, so it is not replaced; delete it, or give another name"
            ) from error


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read and check a sidecar. FormatError: damaged, of another kind or version; TqggufError: it cannot be opened."""
    with open_gguf(path) as file:
        _check_type(file)
        for defect in calibration_defects(file):
            raise_errors(defect)
        return Calibration(
            scales={int(match[1]): file.array(match[0]).astype(np.float32) for match in _scale_tensors(file)},
            fingerprint=read_fingerprint(file),
            architecture=file.text("general.architecture"),
            model=file.text(f"{KEYS}model"),
            n_tokens=file.uint(f"{KEYS}tokens"),
            text=file.text(f"{KEYS}text"),
            text_sha256=file.text(f"{KEYS}text_sha256"),
            measured_with=file.text(_MEASURED_WITH, ""),
        )


def calibration_defects(file: GGUFFile) -> Iterator[DefectError]:
    """All that is wrong with a GGUF that is a calibration by its keys, or says so."""
    if not file.says("general.type", GENERAL_TYPE):
        said = file.metadata.get("general.type")
        found = "nothing" if said is None else shown(said)
        message = f"general.type: expected {GENERAL_TYPE}, as the file's keys are, found {found}"
        at = file.value_offset("general.type") if "general.type" in file.metadata else None
        yield DefectError("general-type", file.path, message, offset=at, expected=GENERAL_TYPE, found=found)
    try:
        version = file.uint(f"{KEYS}version")
    except DefectError as defect:
        yield defect
        return
    if version != VERSION:
        message = f"expected a calibration of version {VERSION}, found {version}; make it again with `tqgguf calibrate`"
        at = file.value_offset(f"{KEYS}version")
        yield DefectError("calibration-version", file.path, message, offset=at, expected=VERSION, found=version)
        return
    getters: tuple[Callable[[], object], ...] = (
        lambda: read_fingerprint(file),
        lambda: file.text("general.architecture"),
        lambda: file.uint(f"{KEYS}tokens"),
        *(partial(file.text, KEYS + key) for key in ("model", "text", "text_sha256")),
        lambda: file.text(_MEASURED_WITH, ""),
    )
    for get in getters:
        try:
            get()
        except DefectError as defect:
            yield defect
    matches = _scale_tensors(file)
    if not matches:
        message = f"expected tensors named {_TENSOR.format('N')}, found none"
        yield DefectError("calibration-tensor", file.path, message)
    for match in matches:
        yield from _scale_defects(file, match[0])


def is_made_for(calibration: Calibration, fingerprint: Fingerprint) -> bool:
    """Whether a sidecar says that it is of a model with this fingerprint, in all that matters."""
    return not set(_REFUSING).intersection(calibration.fingerprint.differences(fingerprint))


def check_fits(
    path: str, calibration: Calibration, fingerprint: Fingerprint, n_layers: int, shapes: Sequence[LayerShape]
) -> str | None:
    """Whether a sidecar belongs to a model of `n_layers` layers, of which those with attention have these shapes.

    None, or a notice of what differs and does not matter much. RequestError: it is another model's; FormatError: it
    says that it is this model's, but its layers or shapes are not.
    """
    differing = calibration.fingerprint.differences(fingerprint)
    refusing, noticed = ([_PART_NAMES[p] for p in parts if p in differing] for parts in (_REFUSING, _NOTICED))
    if refusing:
        raise RequestError(
            f"{path}: made for another model ({shown(calibration.model)}): other {' and '.join(refusing)}; make one "
            "for this model with `tqgguf calibrate`"
        )
    layers = sorted(calibration.scales)
    if len(layers) != len(shapes) or layers[-1] >= n_layers:
        raise FormatError(
            f"{path}: expected channel scales of {len(shapes)} layers, the last below {n_layers}, "
            f"found {len(layers)}, the last {layers[-1]}"
        )
    for layer, shape in zip(layers, shapes, strict=True):
        expected, found = (shape.n_kv_heads, shape.head_dim_k), calibration.scales[layer].shape
        if found != expected:
            raise FormatError(f"{path}: {_TENSOR.format(layer)}: expected shape {expected}, found {found}")
    return f"{path}: made with other {' and '.join(noticed)}; used all the same" if noticed else None


def _check_type(file: GGUFFile) -> None:
    if gguf_kind(file.metadata, file.tensors) is not FileKind.CALIBRATION:
        found = gguf_purpose(file.metadata, file.tensors)
        raise FormatError(f"{file.path}: expected general.type {GENERAL_TYPE}, found {found}")


def _scale_tensors(file: GGUFFile) -> list[re.Match[str]]:
    return [match for match in map(_TENSOR_NAME.fullmatch, file.tensors) if match is not None]


def _scale_defects(file: GGUFFile, name: str) -> Iterator[DefectError]:
    info = file.tensors[name]
    if info.ggml_type != _F32 or len(info.shape) != 2 or not info.n_values:
        expected, found = "F32 [n_kv_heads, head_dim]", f"{info.type_name} {list(info.shape)}"
        message = f"{name}: expected {expected}, found {found}"
        yield DefectError(
            "calibration-tensor", file.path, message, offset=info.offset, tensor=name, expected=expected, found=found
        )
        return
    scale = file.array(name)
    low, high = SCALE_LIMITS
    wrong = ~((scale >= low) & (scale <= high))
    if wrong.any():
        head, channel = (int(i) for i in np.argwhere(wrong)[0])
        found, expected = f"{scale[head, channel]}", f"numbers from {low:.3g} to {high:.3g}"
        message = f"{name}: expected {expected}, found {found} in head {head}, channel {channel}"
        at = info.offset + 4 * (head * info.shape[1] + channel)
        yield DefectError(
            "calibration-scale", file.path, message, offset=at, tensor=name, expected=expected, found=found
        )

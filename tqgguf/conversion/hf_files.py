"""Which of a checkpoint's files holds which tensor: by its index where there is one, else by the files' names.

Knows safetensors files and the index beside them; not what a tensor is for, nor its shape.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.json_file import read_json
from tqgguf.formats.models.folder_files import WEIGHT_FILES
from tqgguf.formats.safetensors import SafeTensor, open_safetensors
from tqgguf.formats.wording import shown

DTYPES: Final = ("F32", "F16", "BF16")
INDEX: Final = "model.safetensors.index.json"
_WHOLE: Final = "model.safetensors"
_UNUSED_ENDINGS: Final = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
_OTHER_SENSES: Final = ("vision_", "vision.", "visual.", "audio_", "audio.", "projector.")


def stored_tensors(folder: Path) -> dict[str, SafeTensor]:
    """The checkpoint's tensors that a GGUF of its language model holds, by their names in it.

    Files that the index does not name are not read. FormatError: files or tensors are missing, the index is damaged or
    leads out of the folder, a tensor is there twice; UnsupportedModelError: values of another type than DTYPES.
    """
    tensors: dict[str, SafeTensor] = {}
    origins: dict[str, str] = {}
    for path, stored_name, tensor in _named_tensors(folder):
        if stored_name.endswith(_UNUSED_ENDINGS) or any(part in stored_name for part in _OTHER_SENSES):
            continue
        if tensor.dtype not in DTYPES:
            expected = ", ".join(DTYPES)
            raise UnsupportedModelError(
                f"{path}: tensor {shown(stored_name)}: expected {expected}, found {tensor.dtype}"
            )
        name, here = stored_name.replace("language_model.", ""), f"{shown(stored_name)} in {path.name}"
        if name in tensors:
            raise FormatError(f"{folder}: expected each tensor once, found {origins[name]} and {here}")
        tensors[name], origins[name] = tensor, here
    return tensors


def _named_tensors(folder: Path) -> Iterator[tuple[Path, str, SafeTensor]]:
    """File, name and tensor, of all that the index names, or all there are."""
    index = folder / INDEX
    if not os.path.lexists(index):
        whole = folder / _WHOLE
        files = [whole] if os.path.lexists(whole) else sorted(folder.glob(WEIGHT_FILES))
        if not files:
            raise FormatError(f"{folder}: expected weights in model*.safetensors, found none")
        for path in files:
            for name, tensor in open_safetensors(path).items():
                yield path, name, tensor
        return
    names = _names_by_file(index)
    missing = [place for place in names if not (folder / place).is_file()]
    if missing:
        raise FormatError(f"{folder}: {shown(missing[0])} is missing ({len(missing)} of {len(names)} files are)")
    for place, wanted in names.items():
        held = open_safetensors(folder / place)
        absent = [name for name in wanted if name not in held]
        if absent:
            raise FormatError(f"{folder / place}: expected tensor {shown(absent[0])}, as {INDEX} says, found none")
        kept = frozenset(wanted)
        yield from ((folder / place, name, tensor) for name, tensor in held.items() if name in kept)


def _names_by_file(index: Path) -> dict[str, list[str]]:
    """What the index says of each file, in the files' order."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        expected = "an object of tensors' names and their files' names"
        raise FormatError(f"{index}: weight_map: expected {expected}, found {shown(places)}")
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in places.items():
        names[place].append(name)
    for place in names:
        if not place or PureWindowsPath(place).anchor or ".." in PurePosixPath(place.replace("\\", "/")).parts:
            raise FormatError(f"{index}: weight_map: expected names of files in the folder, found {shown(place)}")
    return {place: names[place] for place in sorted(names)}

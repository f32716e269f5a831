"""What an MLX folder must be to be loaded, as far as its config.json and the heads of its files say: the loader and
`plan` ask here. Which model types mlx-lm has a class for is not known here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.file_kind import other_kind
from tqgguf.formats.json_file import json_kind, read_json
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, ROPE_BASES
from tqgguf.formats.models.folder_asked import Asked, read_asked
from tqgguf.formats.models.folder_files import WEIGHT_FILES, check_folder_files

LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""Keys of config.json, one of which holds the number of layers."""
_CONTEXT: Final = "max_position_embeddings"


@dataclass(frozen=True)
class FolderHeader:
    """model_type: as config.json has it. asked: what it asks of mlx-lm's class. context_length: in tokens, as far as
    that class goes; it and vocab_size are 0 where they are not given.
    """

    model_type: str
    asked: Asked
    context_length: int
    vocab_size: int


def check_folder(folder: Path) -> FolderHeader:
    """What the folder's header says. FormatError: a file is missing, damaged or of another kind, or a setting is none.
    UnsupportedModelError: a feature that is not served.
    """
    check_folder_files(folder)
    path = folder / "config.json"
    config = read_json(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise FormatError(f"{path}: expected a model_type, found none; is this a model folder?")
    language = config.get("text_config") or {}
    if not isinstance(language, dict):
        raise FormatError(f"{path}: text_config: expected an object, found {json_kind(language)}")
    text = {**language, **config}  # of models that also see or hear, the language part
    if text.get("kv_lora_rank"):
        raise UnsupportedModelError(
            f"{folder}: {model_type} uses multi-head latent attention (kv_lora_rank), "
            "whose cache holds no heads: not supported"
        )
    numbers = {name: _number(text, name, path) for name in (*LAYER_COUNTS, _CONTEXT, "vocab_size")}
    n_layers = max(numbers[name] for name in LAYER_COUNTS)
    if n_layers > MAX_LAYERS:
        raise FormatError(f"{path}: expected at most {MAX_LAYERS} layers, found {n_layers}")
    theta = text.get("rope_theta")
    if isinstance(theta, (int, float)) and not ROPE_BASES[0] <= theta <= ROPE_BASES[1]:
        limits = f"{ROPE_BASES[0]:.3g} to {ROPE_BASES[1]:.3g}"
        raise FormatError(f"{path}: rope_theta: expected {limits}, found {theta!r:.60}")
    if config.get("model_file") is not None:
        raise UnsupportedModelError(f"{folder}: model_file: its model is code of its own, which is not run")
    _check_weights(folder)
    asked = read_asked(folder, config)
    context = asked.context or numbers[_CONTEXT]
    return FolderHeader(model_type, asked, min(context, asked.window or context), numbers["vocab_size"])


def _number(config: dict[str, Any], name: str, path: Path) -> int:
    """A size of config.json; 0 where it is not given."""
    value = config.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise FormatError(f"{path}: {name}: expected a number up to {MAX_SIZE}, found {value!r:.60}")
    return value


def _check_weights(folder: Path) -> None:
    """Name files of other kinds that bear a weight file's name, which mlx would misread."""
    weights = sorted(folder.glob(WEIGHT_FILES))
    if not weights:
        raise FormatError(f"{folder}: expected weights in {WEIGHT_FILES}, found none")
    for path in weights:
        with contextlib.suppress(OSError), path.open("rb") as file:
            head = file.read(64)
            other = None if head[8:9] == b"{" else other_kind(head)
            if other is not None:
                raise FormatError(f"{path}: expected a safetensors file, found {other.what}")

"""What config.json of a folder asks of mlx-lm's class, in the class's own words.

For families in `folder_keys.FAMILIES` every setting is handed over or refused. Of other classes it is not known here
which settings they read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqgguf.formats.errors import FormatError, words_of
from tqgguf.formats.models.folder_defaults import completed, is_tied
from tqgguf.formats.models.folder_features import check_features, dropped_window, mlx_settings
from tqgguf.formats.models.folder_files import WEIGHT_FILES
from tqgguf.formats.models.folder_keys import family_of, language_part
from tqgguf.formats.models.folder_rope import MLX
from tqgguf.formats.models.folder_unknown import asked_of_unknown, rope_in_older_words
from tqgguf.formats.safetensors import open_safetensors

OUTPUT: Final = re.compile(r"(^|\.)lm_head\.")
"""In names of tensors: of the output layer."""


@dataclass(frozen=True)
class Asked:
    """What a folder's config.json asks of mlx-lm's class.

    told: settings in the class's own words. is_tied: an output layer in the files is not used. window: tokens of
    context up to which the class computes what is asked. context: tokens that the model was trained for. notices:
    lines for whoever opens the folder. unknown: of a class that is in no table, settings that ask for other arithmetic.
    """

    told: Mapping[str, Any]
    family: str | None = None
    is_tied: bool = False
    window: int | None = None
    context: int | None = None
    notices: tuple[str, ...] = ()
    unknown: Mapping[str, Any] = field(default_factory=dict)


def read_asked(folder: Path, config: Mapping[str, Any]) -> Asked:
    """FormatError, UnsupportedModelError: a setting that is none, or that the class would drop."""
    path, family = str(folder / "config.json"), family_of(config["model_type"])
    given = language_part(config, path) if family is not None else {}
    if family is None:
        return _unknown(folder, config)
    try:
        settings = completed(family, given)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise FormatError(f"{path}: sizes are none that can be: {type(error).__name__}: {words_of(error)}") from error
    check_features(family, settings, path, MLX)
    tied = is_tied(family, settings, _has_output(folder), path)
    told = {**mlx_settings(family, settings, path), "tie_word_embeddings": tied}
    if isinstance(config.get("text_config"), dict):
        told = {"text_config": {**config["text_config"], **told}, "vocab_size": settings["vocab_size"]}
    window = dropped_window(family, settings)
    notices = () if window is None else (
        f"config.json: sliding_window: mlx-lm's class of {config['model_type']} has none; the context is held to "
        f"{window:,} tokens, within which that changes nothing",
    )  # fmt: skip
    return Asked(told, family, tied, window, settings["max_position_embeddings"], notices)


def _unknown(folder: Path, config: Mapping[str, Any]) -> Asked:
    """Of a class whose keys are in no table of ours."""
    language = config.get("text_config")
    settings = {**config, **language} if isinstance(language, dict) else config
    told = rope_in_older_words(settings)
    unknown = {key: settings[key] for key in asked_of_unknown(settings) if not (told and key == "rope_parameters")}
    unknown |= {key: told[key] for key in asked_of_unknown(told)}
    if settings.get("tie_word_embeddings") is None and _has_output(folder):
        told["tie_word_embeddings"] = False  # whatever a class assumes, an output layer that is there is used
    if isinstance(language, dict) and told:
        told["text_config"] = {**language, **told}
    return Asked(told, unknown=unknown)


def _has_output(folder: Path) -> bool:
    return any(OUTPUT.search(name) for file in sorted(folder.glob(WEIGHT_FILES)) for name in open_safetensors(file))

"""The files of a model folder that we or a library open: one table, and the check of them all before that.

The libraries are mlx-lm, tokenizers and gguf-py; each opens such files by their names, would wait for ever for a pipe,
and reads a device until memory is full. Code that lies in a folder is run by none of them as we call them.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tqgguf.formats.errors import FormatError
from tqgguf.formats.mapped_file import kind_of_file

_MIB: Final = 1 << 20
WEIGHT_FILES: Final = "model*.safetensors"
"""A pattern of the names that weights have."""
FILES: Final[dict[str, int | None]] = {
    "config.json": 16 * _MIB,
    "generation_config.json": 16 * _MIB,
    "hf_quant_config.json": 64 * _MIB,
    "tokenizer.json": 512 * _MIB,
    "tokenizer_config.json": 64 * _MIB,
    "special_tokens_map.json": 16 * _MIB,
    "added_tokens.json": 64 * _MIB,
    "vocab.json": 256 * _MIB,
    "merges.txt": 256 * _MIB,
    "tokenizer.model": 256 * _MIB,
    "chat_template.json": 16 * _MIB,
    "*.jinja": 16 * _MIB,
    "additional_chat_templates/*.jinja": 16 * _MIB,
    "README.md": 16 * _MIB,
    "model.safetensors.index.json": 256 * _MIB,
    WEIGHT_FILES: None,
}
"""Names, as patterns -> bytes at most; weights are mapped, and may have any size. The limits are far above what public
models have: Gemma's tokenizer.json has 33 MB."""
_TEMPLATES: Final = "additional_chat_templates"


def check_folder_files(folder: Path) -> None:
    """FormatError for a file of FILES that is no regular file or too large, or a folder that cannot be listed.

    Links are followed; one that leads nowhere is a file that is missing, which is for whoever needs it to say.
    """
    try:
        names = sorted(os.listdir(folder))
        if _TEMPLATES in names and (folder / _TEMPLATES).is_dir():
            names += [f"{_TEMPLATES}/{name}" for name in sorted(os.listdir(folder / _TEMPLATES))]
    except OSError as error:
        raise FormatError(
            f"{folder}: expected a model folder, found one that cannot be read: {error.strerror}"
        ) from error
    for name in names:
        pattern = next((pattern for pattern in FILES if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        path, limit = folder / name, FILES[pattern]
        try:
            found = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(f"{path}: expected a regular file, found {kind_of_file(found.st_mode)}")
        if limit is not None and found.st_size > limit:
            raise FormatError(f"{path}: expected at most {limit:,} bytes, found {found.st_size:,}")

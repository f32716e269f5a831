"""JSON objects of a model folder's files, read whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tqgguf.formats.errors import FormatError, words_of

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; FormatError if it is not there or not one."""
    data = read_bytes(path)
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):  # which can stand for half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON, found a mistake: {words_of(error)}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, found {json_kind(value)}")
    return value


def json_kind(value: Any) -> str:
    """What a JSON value is, in words."""
    kinds = ((bool, "true or false"), (dict, "an object"), (list, "a list"), (str, "a text"), (int | float, "a number"))
    return next((kind for types, kind in kinds if isinstance(value, types)), "null")


def read_bytes(path: Path) -> bytes:
    """All bytes of a regular file; FormatError if it is not there."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise FileNotFoundError
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path.parent}: expected a {path.name} in the model folder, found none") from error

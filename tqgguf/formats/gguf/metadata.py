"""Typed access to GGUF metadata: the loading code names the key and the type it needs, and gets it or one clear error.

Knows types, not keys: which keys a model must have, and which values make sense, is the business of whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar, overload

import numpy as np

from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.parse import Entry
from tqgguf.formats.gguf.rules import is_utf8
from tqgguf.formats.gguf.types import FLOAT_TYPES, INTEGER_TYPES, MetadataType, ValueType
from tqgguf.formats.wording import shown

T = TypeVar("T")


class _Required:
    """Stands for "no default: the key must be there"."""


REQUIRED: Final = _Required()


class MetadataAccess:
    """Getters over metadata entries. All raise GgufError, naming the key, what was expected and what was found:
    `metadata-missing` (unless a default is given), `metadata-type`, `metadata-value`.
    """

    path: str
    _entries: Mapping[str, Entry]

    @property
    def entries(self) -> Collection[Entry]:
        """The (first) file's metadata entries as they stand in it."""
        return self._entries.values()

    def metadata_type(self, key: str) -> MetadataType:
        """Type of a value as it stands in the file."""
        return self._entry(key, "a value").type

    def value_offset(self, key: str) -> int | None:
        """Where a value stands in the (first) file, in bytes; None if the key is absent."""
        return self._entries[key].value_offset if key in self._entries else None

    def says(self, key: str, value: int | str) -> bool:
        """Whether a key is there with exactly this value."""
        return key in self._entries and self._entries[key].says(value)

    @overload
    def uint(self, key: str) -> int: ...
    @overload
    def uint(self, key: str, default: T) -> int | T: ...
    def uint(self, key: str, default: Any = REQUIRED) -> Any:
        """An integer >= 0, whatever its integer type in the file."""
        value = self.integer(key, default)
        if value is not default and value < 0:
            raise self.bad_value(key, "an integer >= 0", value)
        return value

    @overload
    def integer(self, key: str) -> int: ...
    @overload
    def integer(self, key: str, default: T) -> int | T: ...
    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """An integer, whatever its integer type in the file."""
        return self._scalar(key, default, INTEGER_TYPES, "an integer")

    @overload
    def real(self, key: str) -> float: ...
    @overload
    def real(self, key: str, default: T) -> float | T: ...
    def real(self, key: str, default: Any = REQUIRED) -> Any:
        """A finite floating-point number (F32 or F64)."""
        value = self._scalar(key, default, FLOAT_TYPES, "a floating-point number")
        if value is not default and not math.isfinite(value):
            raise self.bad_value(key, "a finite number", value)
        return value

    @overload
    def flag(self, key: str) -> bool: ...
    @overload
    def flag(self, key: str, default: T) -> bool | T: ...
    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """A boolean."""
        return self._scalar(key, default, frozenset({ValueType.BOOL}), "a boolean")

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: T) -> str | T: ...
    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A string of valid UTF-8."""
        value = self._scalar(key, default, frozenset({ValueType.STRING}), "a string")
        if value is not default and not is_utf8(value):
            raise self.bad_value(key, "UTF-8", shown(value))
        return value

    @overload
    def uints(self, key: str) -> np.ndarray: ...
    @overload
    def uints(self, key: str, default: T) -> np.ndarray | T: ...
    def uints(self, key: str, default: Any = REQUIRED) -> Any:
        """An array of integers >= 0 as int64 [n], a copy."""
        values = self.integers(key, default)
        if values is not default and values.size and values.min() < 0:
            i = int(np.argmax(values < 0))
            raise self.bad_value(key, "integers >= 0", f"{values[i]} in element {i}")
        return values

    @overload
    def integers(self, key: str) -> np.ndarray: ...
    @overload
    def integers(self, key: str, default: T) -> np.ndarray | T: ...
    def integers(self, key: str, default: Any = REQUIRED) -> Any:
        """An array of integers as int64 [n], a copy."""
        values = self._array(key, default, INTEGER_TYPES, "an array of integers")
        if values is default:
            return default
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise self.bad_value(key, "integers below 2^63", values.max())
        return values.astype(np.int64)

    @overload
    def floats(self, key: str) -> np.ndarray: ...
    @overload
    def floats(self, key: str, default: T) -> np.ndarray | T: ...
    def floats(self, key: str, default: Any = REQUIRED) -> Any:
        """An array of floating-point numbers as float32 or float64 [n], as in the file, a copy; inf and NaN pass."""
        values = self._array(key, default, FLOAT_TYPES, "an array of floating-point numbers")
        return values if values is default else values.copy()

    @overload
    def texts(self, key: str) -> list[str]: ...
    @overload
    def texts(self, key: str, default: T) -> list[str] | T: ...
    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        """An array of strings, each of valid UTF-8. The list is the file's own: do not change it."""
        values = self._array(key, default, frozenset({ValueType.STRING}), "an array of strings")
        if values is not default and not is_utf8("".join(values)):
            i = next(i for i, value in enumerate(values) if not is_utf8(value))
            raise self.bad_value(key, "UTF-8", f"{shown(values[i])} in element {i}")
        return values

    def flags(self, key: str) -> np.ndarray:
        """An array of booleans, bool [n]."""
        values: np.ndarray = self._array(key, REQUIRED, frozenset({ValueType.BOOL}), "an array of booleans")
        return values

    def _entry(self, key: str, expected: str) -> Entry:
        if key not in self._entries:
            raise GgufError("metadata-missing", self.path, f"metadata key {shown(key)} is missing, expected {expected}")
        return self._entries[key]

    def _scalar(self, key: str, default: object, types: frozenset[ValueType], expected: str) -> Any:
        if default is not REQUIRED and key not in self._entries:
            return default
        entry = self._entry(key, expected)
        if entry.type.value not in types:
            raise self._bad_type(entry, expected)
        return entry.value

    def _array(self, key: str, default: object, elements: frozenset[ValueType], expected: str) -> Any:
        if default is not REQUIRED and key not in self._entries:
            return default
        entry = self._entry(key, expected)
        if entry.type.element not in elements:
            raise self._bad_type(entry, expected)
        return entry.value

    def _bad_type(self, entry: Entry, expected: str) -> GgufError:
        message = f"metadata key {shown(entry.key)} is {entry.type}, expected {expected}"
        return GgufError("metadata-type", self.path, message, offset=entry.value_offset)

    def bad_value(self, key: str, expected: str, found: object) -> GgufError:
        """The error of a value that is of the right type and cannot be used, to be raised."""
        message = f"metadata key {shown(key)}: expected {expected}, found {found}"
        return GgufError("metadata-value", self.path, message, offset=self._entries[key].value_offset)

"""What `tqgguf inspect --json` prints: the facts by name, unrounded, as one object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from tqgguf.cli.inspect_lists import FIRST_ELEMENTS
from tqgguf.formats.inspection.facts import KV_STEP, Inspection, MetadataValue
from tqgguf.formats.wording import readable


def as_json(
    found: Inspection, tensors: bool, entries: Mapping[str, MetadataValue] | None, in_full: bool
) -> dict[str, Any]:
    """entries: of the metadata that is asked for; arrays in it are whole if `in_full`, else their beginning."""
    about: dict[str, Any] = {
        "count": len(found.tensors),
        "parameters": sum(tensor.n_values for tensor in found.tensors),
        "dims_order": found.dims_order,
        "types": [asdict(total) for total in found.types()],
    }
    if tensors:
        about["list"] = [asdict(tensor) for tensor in found.tensors]
    metadata: dict[str, Any] = {"count": len(found.metadata)}
    if entries is not None:
        metadata["entries"] = {text(key): _entry(entry, in_full) for key, entry in entries.items()}
    costs = [asdict(cost) for cost in found.costs]
    return plain(
        {
            "path": readable(found.path),
            "kind": str(found.kind),
            "container": found.container,
            "n_bytes": found.n_bytes,
            "files": [{"path": readable(file.path), "n_bytes": file.n_bytes} for file in found.files],
            "about": found.about,
            "tensors": about,
            "metadata": metadata,
            "kv_cache": {"step": KV_STEP, "n_context": found.n_context, "types": costs} if costs else None,
            "notes": list(found.notes),
        }
    )


def _entry(entry: MetadataValue, in_full: bool) -> dict[str, Any]:
    value = entry.value
    if isinstance(value, (list, np.ndarray)) and len(value) > FIRST_ELEMENTS and not in_full:
        return {"type": entry.type, "count": len(value), "first": value[:FIRST_ELEMENTS]}
    return {"type": entry.type, "value": value}


def plain(value: Any) -> Any:
    """Dataclasses and arrays as JSON has them; null for numbers that are not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {text(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return text(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(value: str) -> str:
    """UTF-8, with bytes that were none as \\xHH."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

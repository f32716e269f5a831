"""What the tests of `tqgguf inspect` share: the command called, its overview and JSON taken apart, files for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import build_gguf

from tqgguf.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    """What the command prints: on stdout, or of a failure on stderr."""
    assert main(["inspect", *map(str, argv)]) == status
    out, err = capsys.readouterr()
    assert (out == "") == (status != 0) and (err == "") == (status == 0)
    return out + err


def facts(text: str) -> dict[str, str]:
    """The overview's facts by label."""
    lines = text.partition("\n\n")[0].splitlines()[1:]
    return {label.strip(): fact.strip() for label, _, fact in (line.strip().partition("  ") for line in lines)}


def as_json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    return json.loads(shown(capsys, *argv, "--json"))


def model_of(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(build_gguf(metadata, tensors or {}))
    return path


def unknown(**keys: Any) -> dict[str, Any]:
    made = {"block_count": 4, "embedding_length": 96, "attention.head_count": 3, **keys}
    return {"general.architecture": "xyz", **{f"xyz.{key}": value for key, value in made.items() if value is not None}}

"""spec/fingerprint.md and its examples: a reading of the text in plain Python, the package, and the vectors agree."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import plain_fingerprint as plain
import pytest
from gguf_builder import F64, Typed, build_gguf
from tiny_folders import write_folder
from tiny_models import ORACLE_CASES, tiny_gguf

from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.fingerprint import PARTS, VERSION, Fingerprint, fingerprint_folder, fingerprint_gguf

VECTORS = json.loads((Path(__file__).parent.parent / "spec" / "fingerprint.json").read_text())
MODELS = {model["name"]: model for model in VECTORS["models"]}


def of_package(folder: Path, files: dict[str, bytes], rope: dict[str, float] | None = None) -> Fingerprint:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if "model.gguf" not in files:
        return fingerprint_folder(folder)
    with open_gguf(folder / "model.gguf") as file:
        return fingerprint_gguf(file, rope)


def digests(pieces: dict[str, list[bytes]]) -> dict[str, str]:
    return {part: plain.digest(part, pieces[part]) for part in PARTS}


@pytest.mark.parametrize("name", MODELS)
def test_the_vectors_are_what_the_text_and_the_package_say(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    files = {file: bytes.fromhex(data) for file, data in model["files"].items()}
    rope = model.get("rope_in_use")
    pieces = plain.of_gguf(files["model.gguf"], rope) if "model.gguf" in files else plain.of_folder(files)
    assert {part: [piece.hex() for piece in fed] for part, fed in pieces.items()} == model["pieces"]
    assert digests(pieces) == model["hashes"]
    found = of_package(tmp_path, files, rope)
    assert {part: getattr(found, part) for part in PARTS} == model["hashes"]
    assert found.identity == model["identity"]
    assert b"not fed" not in b"".join(piece for fed in pieces.values() for piece in fed)


def test_the_vectors_hold_what_is_easily_done_otherwise() -> None:
    fed = [bytes.fromhex(piece) for model in MODELS.values() for part in model["pieces"].values() for piece in part]
    for piece in (
        b"9.999999747378752e-06", b"1e+16", b"9999999999999998.0", b"0.0001", b"9.5e-05", b"-0.0", b"5e-324",
        b'["l",0]', b'["i",0]', b"18446744073709551615", b'"\\udcc3(\\udcff"', b"null", b"true", b'"list"',
        b'["B",[1,32],8,34]',
    ):  # fmt: skip
        assert piece in fed, piece
    assert VECTORS["version"] == VERSION


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_models_of_every_architecture_have_the_hashes_of_the_text(name: str, tmp_path: Path) -> None:
    data = tiny_gguf(ORACLE_CASES[name])
    found = of_package(tmp_path, {"model.gguf": data})
    assert {part: getattr(found, part) for part in PARTS} == digests(plain.of_gguf(data))


def test_a_real_folder_has_the_hashes_of_the_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    found = fingerprint_folder(folder)
    assert {part: getattr(found, part) for part in PARTS} == digests(plain.of_folder(plain.files_of(folder)))


def test_numbers_and_texts_of_any_kind_are_written_as_the_text_says(tmp_path: Path) -> None:
    source = random.Random(5)
    values: dict[str, Any] = {"general.architecture": "x"}
    for i in range(400):
        (any_number,) = struct.unpack("<d", source.randbytes(8))
        values[f"x.f{i}"] = Typed(F64, any_number if i % 2 else source.random() * 10 ** (i % 40 - 20))
        values[f"x.t{i}"] = source.randbytes(source.randrange(12))
    data = build_gguf(values, {})
    found = of_package(tmp_path, {"model.gguf": data})
    assert found.hyperparameters == digests(plain.of_gguf(data))["hyperparameters"]

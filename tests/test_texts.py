"""The shipped text is what SOURCES.md says: whole, in parts that each have a licence, and ten windows of 8,192 long."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from importlib.resources import files
from itertools import pairwise

import pytest

from tqgguf.texts import default_text

TEXTS = files("tqgguf.texts")
BYTES = (TEXTS / "default.txt").read_bytes()
SOURCES = (TEXTS / "SOURCES.md").read_text(encoding="utf-8")
FIELDS = ["Author", "Kind", "Bytes", "SHA-256", "Begins", "Source", "Licence", "Cut"]
LICENCES = r"(public domain|PSF-2\.0|MIT|Apache-2\.0)\b"


def stated_parts() -> list[dict[str, str]]:
    """One dict a section of SOURCES.md: its title, its list's items, and `first` and `end`, the range of bytes."""
    parts = []
    for section in re.split(r"^## \d+\. ", SOURCES, flags=re.MULTILINE)[1:]:
        items = dict(re.findall(r"^\* ([\w-]+): (.+)$", section, re.MULTILINE))
        parts.append(items | {"title": section.partition("\n")[0]})
    return parts


def byte_range(part: dict[str, str]) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+) to (\d+) \(([\d,]+) tokens\)", part["Bytes"])
    assert match, part["Bytes"]
    return int(match[1]), int(match[2])


PARTS = stated_parts()


@pytest.fixture(scope="module")
def tokenizer():
    from tqgguf.runtime.models.load import embedded_model, open_model

    return open_model(embedded_model()).tokenizer


def test_the_text_is_utf8_with_lines_that_end_in_lf() -> None:
    text = default_text()
    assert text.encode("utf-8") == BYTES
    assert not text.startswith("\ufeff") and "\r" not in text and "\ufffd" not in text
    assert not [character for character in set(text) if ord(character) < 32 and character != "\n"]


def test_the_text_can_be_read_without_mlx() -> None:
    code = "import sys; from tqgguf.texts import default_text; default_text(); assert 'mlx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_parts_of_the_sources_are_the_whole_text() -> None:
    ranges = [byte_range(part) for part in PARTS]
    assert len(PARTS) == 8
    assert (ranges[0][0], ranges[-1][1]) == (0, len(BYTES))
    assert all(end == first for (_, end), (first, _) in pairwise(ranges))


@pytest.mark.parametrize("part", PARTS, ids=[part["title"] for part in PARTS])
def test_every_part_is_described_and_is_the_bytes_that_are_described(part: dict[str, str]) -> None:
    assert [field for field in FIELDS if not part.get(field)] == []
    first, end = byte_range(part)
    assert hashlib.sha256(BYTES[first:end]).hexdigest() == part["SHA-256"]
    text = BYTES[first:end].decode("utf-8")  # no part cuts a character
    assert text.splitlines()[0] == part["Begins"].strip("`")
    assert text.endswith("\n\n")


@pytest.mark.parametrize("part", PARTS, ids=[part["title"] for part in PARTS])
def test_every_part_names_a_licence_without_copyleft_whose_text_is_shipped(part: dict[str, str]) -> None:
    assert re.match(LICENCES, part["Licence"])
    for name in re.findall(r"LICENSE-\w+\.txt", part["Licence"]):
        assert (TEXTS / name).is_file()
    if part["Licence"].startswith(("PSF", "MIT")):
        assert "LICENSE-" in part["Licence"]


def test_no_distributor_nor_mail_address_stands_in_the_text() -> None:
    assert not re.findall(r"(?i)gutenberg|[\w.+-]+@[\w-]+\.\w+", default_text())


def test_the_text_has_the_tokens_that_are_stated_and_two_long_stretches(tokenizer) -> None:
    stated = [int(part["Bytes"].partition("(")[2].split()[0].replace(",", "")) for part in PARTS]
    counted = [len(tokenizer.encode(BYTES[slice(*byte_range(part))].decode("utf-8"))) for part in PARTS]
    assert counted == stated
    assert len([count for count in counted if count >= 16_000]) >= 2
    total = len(tokenizer.encode(default_text()))
    assert total >= 10 * 8_192
    assert f"{total:,} tokens" in SOURCES


def test_every_window_of_8192_tokens_lies_inside_one_part_but_for_200_tokens(tokenizer) -> None:
    ends = [len(tokenizer.encode(BYTES[: byte_range(part)[1]].decode("utf-8"))) for part in PARTS]
    assert all(min(end % 8_192, -end % 8_192) <= 200 for end in ends)

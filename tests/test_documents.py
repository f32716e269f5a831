"""What the documents list is what is there. That what they show works is said in test_examples.py."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import tqgguf
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import resolve_codec

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md"))}
SHOWN = README + "".join(DOCS.values())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SHOWN, re.MULTILINE | re.DOTALL)


def test_the_readme_opens_with_the_two_commands() -> None:
    assert re.match(r"# tqgguf\n\n    make run .*\n    make test ", README)


def test_the_table_of_cache_types_is_the_programs() -> None:
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| ([\d.]+) \| (\d+) \| (.+) \|$", DOCS["cache-types.md"], re.MULTILINE)
    listed = {name.strip(): row for row in rows for name in row[0].split(",")}
    assert set(listed) == set(BLOCK_TYPES)
    for name, (_, bits, n_bytes, sizes) in listed.items():
        assert resolve_codec(name, 128, "k").row_bytes == int(n_bytes)
        assert float(bits) == int(n_bytes) * 8 / 128
        for head_dim in (32, 48, 64, 80, 96, 128, 192, 256, 320):
            assert is_listed(head_dim, sizes) == is_possible(name, head_dim), (name, head_dim)
        if in_64 := re.search(r"64 \(([\d.]+) bits\)", sizes):
            assert float(in_64[1]) == resolve_codec(name, 64, "k").row_bytes * 8 / 64


def is_listed(head_dim: int, sizes: str) -> bool:
    if sizes == "any":
        return True
    multiple = re.match(r"multiples of (\d+)", sizes)
    assert multiple
    others = re.findall(r"\b\d+\b(?! bits)(?!\.)", re.sub(r"\(.*?\)", "", sizes[multiple.end() :]))
    return head_dim % int(multiple[1]) == 0 or str(head_dim) in others


def is_possible(cache_type: str, head_dim: int) -> bool:
    try:
        resolve_codec(cache_type, head_dim, "k")
    except tqgguf.TqggufError:
        return False
    return True


def test_the_map_of_the_house_names_every_module_once() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The way of a row")[0]
    folders = re.split(r"^`(tqgguf/[\w/]*)`", text, flags=re.MULTILINE)[1:]
    rows = zip(folders[::2], folders[1::2], strict=True)
    named = [folder + name for folder, table in rows for name in re.findall(r"`([\w/]+\.py)`", table)]
    paths = (REPOSITORY / "tqgguf").rglob("*.py")
    modules = [path.relative_to(REPOSITORY).as_posix() for path in paths if path.name != "__init__.py"]
    assert set(modules) - set(named) == set(), "without a row in CONTRIBUTING.md"
    assert set(named) - set(modules) == set(), "in CONTRIBUTING.md, but gone"
    assert len(named) == len(set(named))


def test_the_version_is_one() -> None:
    newest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest
    assert tqgguf.__version__ == PROJECT["version"] == newest[1]


def test_the_license_of_the_package_is_the_one_it_names() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text(encoding="utf-8")

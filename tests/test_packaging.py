"""The wheel holds the C libraries where a compiler works, and is complete without them where none does."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def build_wheel(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}"]
    command += [f"--config-settings=build-dir={folder / 'build'}", str(REPOSITORY)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def of_the_package(suffix: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tqgguf").rglob(f"*{suffix}")}


@pytest.mark.slow
def test_a_wheel_holds_all_modules_and_the_libraries_but_no_sources(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = contents(wheel)
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and "any" not in wheel.name
    assert of_the_package(".py") <= names and "tqgguf/py.typed" in names
    assert of_the_package(".txt") | of_the_package(".md") <= names
    assert any(name.startswith("tqgguf/runtime/native/libtqgguf.") for name in names)
    assert not [name for name in names if name.endswith((".c", ".h", ".inc"))]


@pytest.mark.slow
def test_without_a_working_compiler_the_wheel_is_pure_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="false")
    names = contents(wheel)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert of_the_package(".py") <= names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".c", ".h", ".inc"))]

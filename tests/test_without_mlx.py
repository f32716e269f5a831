"""An installation without MLX reads and makes blocks and files; what needs MLX says in one line how to get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest
from snapshots import make_snapshot
from tiny_checkpoints import CASES, write_checkpoint
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.verbs import VERBS
from tqgguf.formats.missing_mlx import how_to_install
from tqgguf.formats.snapshots.write import write_snapshot

REPOSITORY = Path(__file__).parent.parent
REFUSE_MLX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
USE_FORMATS = """
import importlib, pkgutil, sys
import numpy as np
import tqgguf, tqgguf.formats
for module in pkgutil.walk_packages(tqgguf.formats.__path__, "tqgguf.formats."):
    importlib.import_module(module.name)
from tqgguf.formats.blocks.codec import resolve_codec
codec = resolve_codec("turbo4", 128, "k")
rows = np.sin(np.arange(256, dtype=np.float32)).reshape(2, 128)
error = codec.decode(codec.encode(rows)) - rows
assert (error**2).sum() < 0.02 * (rows**2).sum()
assert not {"mlx", "mlx_lm"} & {name.partition(".")[0] for name in sys.modules}
print("formats work", tqgguf.__version__)
"""
COMMAND_LINE = "import sys; from tqgguf.cli.main import main; sys.exit(main(sys.argv[1:]))"


def python(code: str, *argv: str, interpreter: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    return subprocess.run(
        [interpreter, "-c", code, *argv], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )


def test_every_module_of_formats_works_and_none_imports_mlx() -> None:
    done = python(REFUSE_MLX + USE_FORMATS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["make_prompt_cache", "load_model", "save_prompt_cache", "load_prompt_cache"])
def test_a_function_that_needs_mlx_says_so_when_it_is_asked_for(name: str) -> None:
    ask = textwrap.dedent(f"""
        try:
            from tqgguf import {name}
        except ImportError as error:
            import tqgguf
            assert isinstance(error, tqgguf.TqggufError)
            print(error)
    """)
    done = python(REFUSE_MLX + ask)
    assert done.stdout.replace("'mlx_lm'", "'mlx'") == (  # whichever of both is imported first
        f"tqgguf.{name} needs MLX, which cannot be imported (No module named 'mlx'); "
        f"install it with: {how_to_install(sys.platform)}\n"
    )
    assert done.stderr == ""


def test_run_is_refused_in_one_line_with_exit_status_2() -> None:
    done = python(REFUSE_MLX + COMMAND_LINE, "run", "-p", "Hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tqgguf: error: tqgguf run needs MLX, which cannot be imported (No module named 'mlx'); "
        f"install it with: {how_to_install(sys.platform)}\n"
    )


@pytest.mark.parametrize("argv", [("--version",), ("--help",), ("run", "--help")])
def test_version_and_help_need_no_mlx(argv: tuple[str, ...]) -> None:
    done = python(REFUSE_MLX + COMMAND_LINE, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tqgguf" in done.stdout


WITHOUT_MLX = """
import json, pathlib, sys
from tqgguf.cli.main import main
maps = pathlib.Path("/proc/self/maps")
for argv in json.loads(sys.argv[1]):
    assert main(argv) == 0, argv
    assert not {"mlx", "mlx_lm", "tqgguf.runtime"} & set(sys.modules), argv
    if maps.exists():  # numpy has a BLAS of its own, under another name
        assert "openblas32" not in maps.read_text(), argv
print("all of them")
"""


def test_what_needs_no_mlx_brings_neither_mlx_nor_a_blas(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path / "m.gguf", TinyModel()))
    cache, other = str(tmp_path / "c.kv"), str(tmp_path / "other.gguf")
    checkpoint = str(write_checkpoint(tmp_path / "checkpoint", CASES["llama"]))
    write_snapshot(cache, make_snapshot(200))
    verbs = [
        ["validate", model, cache],
        ["inspect", model],
        ["inspect", cache, "--json"],
        ["cache", "info", cache],
        ["plan", "-m", model, "--memory", "1G"],
        ["plan", "-m", model, "--memory", "1G", "--cache-types", "q8_0/turbo3@plain"],
        ["convert", cache, other, "--requantise", "-ctk", "q8_0"],
        ["convert", model, str(tmp_path / "q8_0.gguf"), "--type", "q8_0", "--dry-run"],
        ["convert", checkpoint, str(tmp_path / "hf.gguf"), "--dry-run"],
        ["--help"],
        *([verb, "--help"] for verb in VERBS if verb != "cache"),
        *(["cache", verb, "--help"] for verb in ("save", "restore", "info")),
    ]
    done = python(WITHOUT_MLX, json.dumps(verbs))
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["all of them"], 0), done.stderr


def test_another_missing_module_is_not_mistaken_for_mlx() -> None:
    refuse_jinja = REFUSE_MLX.replace('("mlx", "mlx_lm")', '("jinja2",)')
    done = python(
        refuse_jinja + "from tqgguf.formats.missing_mlx import needs_mlx\nwith needs_mlx('x'):\n import jinja2"
    )
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'jinja2'" in done.stderr


@pytest.mark.parametrize("platform, packages", [("linux", "mlx-lm[cpu]"), ("darwin", "mlx mlx-lm")])
def test_the_way_to_install_mlx_is_the_platforms(platform: str, packages: str) -> None:
    assert packages in how_to_install(platform)


@pytest.mark.slow
def test_a_real_installation_without_extras_behaves_the_same(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    install = [interpreter, "-m", "pip", "install", "--quiet", f"--config-settings=build-dir={tmp_path / 'build'}"]
    subprocess.run([*install, str(REPOSITORY)], check=True)
    uninstall = [interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", "mlx", "mlx-metal", "mlx-lm"]
    subprocess.run(uninstall, check=True)  # for macOS, where MLX is a dependency
    absent = python("import mlx", interpreter=interpreter)
    assert "No module named 'mlx'" in absent.stderr
    formats = python(USE_FORMATS, interpreter=interpreter)
    assert (formats.returncode, formats.stderr) == (0, "")
    refused = python(COMMAND_LINE, "run", "-p", "Hello", interpreter=interpreter)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and how_to_install(sys.platform) in refused.stderr

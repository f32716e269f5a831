"""`tqgguf convert`: prompt caches between our GGUF, llama.cpp's files and mlx-lm's, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.convert_ends import End
from tqgguf.cli.convert_flags import EFFECTS
from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.main import main
from tqgguf.formats.snapshots.read import open_snapshot

DATA = Path(__file__).parent / "data"
TEXT = " ".join(f"the {word} on the water" for word in ("stone", "heron", "boat") * 20)


class Files:
    """A tiny model with a kept prompt, and `tqgguf convert` in their folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder
        self.model = write_tiny(folder / "model.gguf", TinyModel(head_dim=128))
        self.err = ""

    def __call__(self, *argv: str, status: int = 0) -> str:
        found = main(["convert", *argv])
        out, self.err = self.capsys.readouterr()
        assert found == status, self.err
        return out

    def keep(self, name: str, *flags: str) -> None:
        assert main(["cache", "save", name, "-m", "model.gguf", "-p", TEXT, "-ctk", "f16", "-ctv", "f16", *flags]) == 0
        self.capsys.readouterr()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture
def files(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> Files:
    monkeypatch.chdir(tmp_path)
    return Files(capsys, tmp_path)


def test_a_folder_made_of_a_gguf_decides_the_order_of_its_caches_channels(files: Files) -> None:
    files.keep("a.kv.gguf")
    files("model.gguf", "folder")
    files("a.kv.gguf", "named.safetensors", "--mlx-model", "folder")
    files("a.kv.gguf", "asked.safetensors", "--mlx-model", "folder", "--rope-order", "neighbours")
    files("a.kv.gguf", "other.safetensors", "--mlx-model", "somebody/model")
    assert files.read("named.safetensors") == files.read("asked.safetensors")
    named, other = (load_prompt_cache(f"{name}.safetensors")[0].keys for name in ("named", "other"))
    assert not mx.array_equal(named, other)
    files("named.safetensors", "b.kv.gguf", "-m", "model.gguf")
    a, b = open_snapshot("a.kv.gguf"), open_snapshot("b.kv.gguf")
    assert (a.layers[0].k.rows[0:9] == b.layers[0].k.rows[0:9]).all()


@pytest.mark.parametrize("name", ["a.session", "a.seq"])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_a_kept_prompt_goes_to_llama_cpp_and_back(files: Files, name: str, cache_type: str) -> None:
    files.keep("a.kv.gguf", "-ctk", cache_type, "-ctv", cache_type)
    files("a.kv.gguf", name, "-m", "model.gguf")
    assert "layers" in files.err
    files(name, "b.kv.gguf", "-m", "model.gguf")
    files("b.kv.gguf", f"again-{name}")
    assert files.read(f"again-{name}") == files.read(name)
    made = open_snapshot("b.kv.gguf")
    assert made.fingerprint == open_snapshot("a.kv.gguf").fingerprint
    assert main(["cache", "restore", "b.kv.gguf", "-m", "model.gguf", "-p", "and?", "-n", "3"]) == 0


def test_a_profile_decides_the_version(files: Files) -> None:
    files.keep("a.kv.gguf")
    for profile, version in (("mainline", 10), ("thetom-2026-05", 9)):
        files("a.kv.gguf", "a.session", "--profile", profile)
        assert files.read("a.session")[4] == version


def test_a_forks_file_comes_in_with_its_profile_and_goes_out_as_it_was(files: Files) -> None:
    (files.folder / "fork.session").write_bytes((DATA / "fork_turbo3.session").read_bytes())
    files("fork.session", "a.kv.gguf", "--head-dim", "64", status=2)
    assert "thetom-2026-05" in files.err
    files("fork.session", "a.kv.gguf", "--head-dim", "64", "--profile", "thetom-2026-05")
    files("a.kv.gguf", "back.session")
    assert files.read("back.session") == files.read("fork.session")
    files("a.kv.gguf", "own.kv.gguf", "--requantise")
    assert all(layer.k.codec.is_native("k") for layer in open_snapshot("own.kv.gguf").layers)


def test_mlx_lm_reads_what_is_written_for_it(files: Files) -> None:
    files.keep("a.kv.gguf")
    files("a.kv.gguf", "a.safetensors")
    caches = load_prompt_cache("a.safetensors")
    held = open_snapshot("a.kv.gguf")
    assert caches[0].offset == held.n_cells
    values = mx.array(held.layers[0].v.rows[0 : held.n_cells]).view(mx.float16).swapaxes(0, 1)
    assert mx.array_equal(caches[0].state[1][0], values)
    files("a.safetensors", "b.kv.gguf", "-m", "model.gguf")
    assert open_snapshot("b.kv.gguf").layers[0].k.rows[0:9].tobytes() == held.layers[0].k.rows[0:9].tobytes()


def test_types_are_changed_once_and_twice_only_where_that_is_allowed(files: Files) -> None:
    files.keep("a.kv.gguf")
    files("a.kv.gguf", "b.kv.gguf", "-ctk", "turbo4", "-ctv", "turbo3")
    assert open_snapshot("b.kv.gguf").layers[0].types.type_v == "turbo3"
    files("b.kv.gguf", "c.kv.gguf", "-ctk", "q8_0", status=2)
    assert "--requantise allows it" in files.err
    files("b.kv.gguf", "c.kv.gguf", "-ctk", "q8_0", "--requantise")
    files("b.kv.gguf", "c.session", "-ctk", "q8_0", "-ctv", "q8_0", status=2)
    assert not os.path.exists("c.session")


def test_every_flag_says_where_it_has_an_effect() -> None:
    general = {"source", "target", "to", "requantise", "json_output"}
    assert set(EFFECTS) | general == {field.name for field in fields(ConvertRequest)}
    for effect in EFFECTS.values():
        assert any(effect.serves(source, target) for source in End for target in End)


def test_json_tells_what_was_made(files: Files) -> None:
    files.keep("a.kv.gguf")
    told = json.loads(files("a.kv.gguf", "a.session", "--json"))
    assert (told["source_kind"], told["target_kind"], told["layers"]) == ("snapshot", "session", 2)
    assert told["bytes"] == os.path.getsize("a.session")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("a.kv.gguf", "a.what"), 2, "expected a name ending in .gguf"),
        (("a.kv.gguf", "a.kv.gguf"), 2, "is a file to be converted; give another name"),
        (("nothing.gguf", "a.session"), 1, "nothing.gguf: cannot be opened"),
        (("a.kv.gguf", "no/a.session"), 2, "does not exist; make it first"),
        (("a.session", "b.kv.gguf"), 2, "name the model with -m, or --head-dim"),
        (("model.gguf", "b.session"), 2, "a model becomes a GGUF"),
        (("a.kv.gguf", "b.session", "-m", "other.gguf"), 2, "expected this model's weights, found others"),
        (("a.kv.gguf", "b.session", "-m", "."), 2, "expected a model, found a folder of GGUF files"),
        (
            ("a.kv.gguf", "b.kv.gguf", "--profile", "mine"),
            2,
            "--profile: has no effect where a.kv.gguf, a prompt cache",
        ),
        (("a.kv.gguf", "b.kv.gguf", "--v-trans"), 2, "--v-trans: has no effect where"),
        (("a.kv.gguf", "b.kv.gguf", "--no-v-trans"), 2, "--v-trans: has no effect where"),
        (("a.kv.gguf", "b.session", "--kv-bits", "4"), 2, "becomes a llama.cpp session; leave it out"),
        (("a.kv.gguf", "b.session", "--sequence-id", "1"), 2, "--sequence-id: has no effect where"),
        (("a.session", "b.kv.gguf", "--sequence-id", "-7"), 2, "--sequence-id: expected a number from 0"),
        (("a.kv.gguf", "b.safetensors", "--kv-group-size", "0"), 2, "--kv-group-size: has no effect without --kv-bits"),
        (("a.kv.gguf", "b.safetensors", "--kv-bits", "4", "--kv-group-size", "0"), 2, "group size: expected one of 32"),
        (("a.session", "b.kv.gguf", "-m", "model.gguf", "--head-dim", "64"), 2, "has no effect beside -m"),
        (("a.kv.gguf", "b.session", "--rope-order", "halves"), 2, "--rope-order: has no effect where"),
        (("a.kv.gguf", "b.session", "--profile", "mine"), 2, "profile: expected one of mainline, thetom-2026-05"),
        (("a.kv.gguf", "b.session", "-ctk", "turbo4", "-ctv", "turbo4"), 2, "which profile mainline does not have"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    files: Files, argv: tuple[str, ...], status: int, message: str
) -> None:
    files.keep("a.kv.gguf")
    files("a.kv.gguf", "a.session")
    write_tiny(Path("other.gguf"), TinyModel(head_dim=128, seed=1))
    before = sorted(os.listdir("."))
    files(*argv, status=status)
    assert message in files.err
    assert files.err.count("\n") == 1
    assert sorted(os.listdir(".")) == before

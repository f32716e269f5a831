"""`tqgguf convert` takes a model's calibration along: found as `run` finds it, written for the new model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import LLAMA, made
from tiny_checkpoints import CASES, write_checkpoint
from tiny_models import write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.models.belonging import ModelIdentity
from tqgguf.formats.models.calibration import Calibration, read_calibration, write_calibration
from tqgguf.formats.models.calibration_files import cached
from tqgguf.runtime.models.calibration_choice import AUTO, choose_calibration
from tqgguf.runtime.models.load import open_model

pytestmark = pytest.mark.usefixtures("cache_home")
SHAPE = (LLAMA.n_kv_heads, LLAMA.head_dim)


class Folder:
    """`tqgguf convert` where a tiny model lies."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.err = capsys, ""
        write_tiny(Path("a.gguf"), LLAMA)

    def __call__(self, *argv: str) -> None:
        status = main(["convert", *argv])
        self.err = self.capsys.readouterr().err
        assert status == 0, self.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(capsys)


def calibration_of(model: str, value: float = 2.0) -> Calibration:
    scales = {layer: np.full(SHAPE, value, np.float32) for layer in range(LLAMA.n_layers)}
    return made(scales=scales, fingerprint=ModelIdentity.of(model).fingerprint)


def found_for(model: str) -> tuple[str | None, tuple[str, ...]]:
    found = choose_calibration(open_model(model), AUTO, [CacheSpec("turbo4", "turbo3")])
    return found.path, found.notices


@pytest.mark.parametrize(
    ("argv", "model", "sidecar"),
    [
        (("b.gguf", "--type", "q8_0"), "b.gguf", "b.kv-calibration.gguf"),
        (("p.gguf", "--type", "f16", "--split-max-size", "1M"), "p-00001-of-00001.gguf", "p.kv-calibration.gguf"),
        (("m",), "m", "m.kv-calibration.gguf"),
    ],
)
def test_the_sidecar_beside_the_model_goes_beside_the_new_one(
    folder: Folder, argv: tuple[str, ...], model: str, sidecar: str
) -> None:
    write_calibration("a.kv-calibration.gguf", calibration_of("a.gguf"))
    folder("a.gguf", *argv)
    assert f"calibration a.kv-calibration.gguf goes along as {Path(sidecar).absolute()}" in folder.err.replace(
        str(Path("a.kv-calibration.gguf").absolute()), "a.kv-calibration.gguf"
    )
    assert found_for(model) == (str(Path(sidecar).absolute()), ())
    carried = read_calibration(sidecar)
    assert carried.measured_with.startswith("a.gguf, weights ")
    assert np.array_equal(carried.scales[1], calibration_of("a.gguf").scales[1])
    assert main(["inspect", sidecar]) == 0
    assert "measured with" in folder.capsys.readouterr().out


def test_what_lies_in_the_cache_folder_goes_into_the_cache_folder(folder: Folder) -> None:
    place = cached(ModelIdentity.of("a.gguf").fingerprint)
    place.parent.mkdir(parents=True)
    write_calibration(place, calibration_of("a.gguf"))
    folder("a.gguf", "b.gguf", "--type", "q8_0")
    assert found_for("b.gguf") == (str(cached(ModelIdentity.of("b.gguf").fingerprint)), ())
    assert sorted(os.listdir(".")) == ["a.gguf", "b.gguf", "home"]
    folder("a.gguf", "c.gguf")  # the same weights: the same sidecar serves
    assert len(os.listdir(place.parent)) == 2
    assert found_for("c.gguf") == (str(place), ())


def test_of_unchanged_weights_the_sidecar_is_a_copy(folder: Folder) -> None:
    write_calibration("a.kv-calibration.gguf", calibration_of("a.gguf"))
    folder("a.gguf", "b.gguf")
    assert Path("b.kv-calibration.gguf").read_bytes() == Path("a.kv-calibration.gguf").read_bytes()


def test_the_old_models_sidecar_stays_where_both_models_have_one_name(folder: Folder) -> None:
    write_calibration("a.kv-calibration.gguf", calibration_of("a.gguf"))
    before = Path("a.kv-calibration.gguf").read_bytes()
    folder("a.gguf", "a")
    assert Path("a.kv-calibration.gguf").read_bytes() == before
    assert found_for("a")[0] == str(cached(ModelIdentity.of("a").fingerprint))
    folder("a.gguf", "a.gguf", "--split-max-size", "1G")
    assert found_for("a-00001-of-00001.gguf") == (str(Path("a.kv-calibration.gguf").absolute()), ())


def _another(path: Path) -> None:
    write_calibration(path, calibration_of("b.gguf", 3.0))


@pytest.mark.parametrize(
    ("put", "stays", "message"),
    [
        (_another, True, "is there already and fits; it stays"),
        (lambda path: write_calibration(path, made()), False, "goes along as"),
        (lambda path: path.write_text("mine"), True, "is no sound calibration and stays"),
    ],
)
def test_what_is_there_is_replaced_only_where_it_is_a_calibration_of_another_model(
    folder: Folder, put: Callable[[Path], None], stays: bool, message: str
) -> None:
    folder("a.gguf", "b.gguf", "--type", "q8_0")
    write_calibration("a.kv-calibration.gguf", calibration_of("a.gguf"))
    put(Path("b.kv-calibration.gguf"))
    before = Path("b.kv-calibration.gguf").read_bytes()
    folder("a.gguf", "b.gguf", "--type", "q8_0")
    assert (Path("b.kv-calibration.gguf").read_bytes() == before) == stays
    assert message in folder.err


def test_what_does_not_belong_to_the_model_is_left_with_a_line(folder: Folder) -> None:
    write_calibration("a.kv-calibration.gguf", made())
    folder("a.gguf", "b.gguf")
    assert "made for another model; not taken along" in folder.err
    assert not os.path.exists("b.kv-calibration.gguf")


def test_a_dry_run_says_what_would_go_along_and_writes_nothing(folder: Folder) -> None:
    write_calibration("a.kv-calibration.gguf", calibration_of("a.gguf"))
    folder("a.gguf", "b.gguf", "--type", "q8_0", "--dry-run")
    assert "a.kv-calibration.gguf would go along" in folder.err
    assert sorted(os.listdir(".")) == ["a.gguf", "a.kv-calibration.gguf"]


@pytest.mark.parametrize(("name", "is_reordered"), [("llama", True), ("qwen3", False)])
def test_of_a_checkpoint_the_channels_get_the_order_of_the_ggufs_keys(
    folder: Folder, name: str, is_reordered: bool
) -> None:
    write_checkpoint(Path("hf"), CASES[name])
    config = json.loads(Path("hf/config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    halves = np.tile(np.linspace(0.5, 2, head_dim // 2, dtype=np.float32), 2)  # one for both channels of a pair
    scales = {0: np.tile(halves, (config["num_key_value_heads"], 1))}
    write_calibration("hf.kv-calibration.gguf", made(scales=scales, fingerprint=ModelIdentity.of("hf").fingerprint))
    folder("hf", "new.gguf")
    found = read_calibration("new.kv-calibration.gguf").scales[0][0]
    first, second = RopeLayout(head_dim, is_reordered).pairs()
    assert np.array_equal(found[first], found[second])
    assert sorted(found) == sorted(halves)
    assert np.array_equal(found, halves) != is_reordered

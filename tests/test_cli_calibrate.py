"""`tqgguf calibrate` as its users meet it, and what run and eval make of its sidecars."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrations import LLAMA, made
from gguf_builder import write_split
from tiny_folders import write_folder
from tiny_models import model_metadata, model_tensors, write_tiny

from tqgguf import make_prompt_cache as make_block_cache
from tqgguf import read_calibration as read_publicly
from tqgguf.cli import calibrate_command
from tqgguf.cli.main import main
from tqgguf.formats.models.calibration import read_calibration, write_calibration
from tqgguf.formats.models.calibration_files import SUFFIX
from tqgguf.measuring.evaluation.calibration_statistics import calibrate
from tqgguf.runtime.models.load import open_model

pytestmark = pytest.mark.usefixtures("cache_home")

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a model and a text."""
    folder = tmp_path / "here"
    folder.mkdir()
    write_tiny(folder / "model.gguf", LLAMA)
    (folder / "text.txt").write_text(TEXT)
    monkeypatch.chdir(folder)
    return folder


CALIBRATE = ("calibrate", "-m", "model.gguf", "-f", "text.txt", "-c", "256", "--chunks", "2")
RUN = ("run", "-m", "model.gguf", "-f", "text.txt", "-c", "0", "-n", "2", "--temp", "0", "-ctk", "turbo4")
EVAL = ("eval", "-m", "model.gguf", "-f", "text.txt", "-c", "256", "--chunks", "1", "--cache-types", "turbo4")


def tqgguf(capsys: Any, *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_calibrate_writes_what_run_and_eval_then_take(here: Path, capsys: Any) -> None:
    (here / "question.txt").write_text(TEXT[:900])
    run = [word if word != "text.txt" else "question.txt" for word in RUN]
    assert "K turbo4 balanced (scale from page 0)" in tqgguf(capsys, *run)[2]
    status, out, err = tqgguf(capsys, *CALIBRATE, "-o", "model.kv-calibration.gguf")
    assert (status, out) == (0, "model.kv-calibration.gguf\n")
    assert "text: text.txt; 2 windows of 256 tokens" in err
    assert "channel scale of K: 2 layers from 512 tokens" in err
    found = read_calibration("model.kv-calibration.gguf")
    assert (found.model, found.n_tokens, found.text) == ("tiny llama", 512, "text.txt")
    _, _, err = tqgguf(capsys, *run, "-v")
    assert "K turbo4 balanced (scale from calibration)" in err
    assert f"channel scale of K: {here / 'model.kv-calibration.gguf'}" in err
    assert "scale from page 0" in tqgguf(capsys, *run, "--kv-calibration", "off")[2]
    assert "scale from" not in tqgguf(capsys, *run, "--kv-balance", "page")[2]
    status, out, err = tqgguf(capsys, *EVAL)
    assert "channel scale of K, where it is balanced in full: from calibration" in out
    as_json = json.loads(tqgguf(capsys, *EVAL, "--json")[1])
    assert as_json["kv_calibration"] == str(here / "model.kv-calibration.gguf")
    assert [row["scale_from"] for row in as_json["rows"]] == [None, "calibration"]
    as_json = json.loads(tqgguf(capsys, *EVAL, "--json", "--kv-calibration", "off")[1])
    assert as_json["kv_calibration"] is None
    assert [row["scale_from"] for row in as_json["rows"]] == [None, "page 0"]


def test_without_a_name_it_goes_to_the_cache_folder(here: Path, capsys: Any, cache_home: Path) -> None:
    status, out, err = tqgguf(capsys, *CALIBRATE)
    assert status == 0 and "use it with" not in err
    path = Path(out.strip())
    assert path.parent == cache_home and path.name.endswith(SUFFIX)
    assert json.loads(tqgguf(capsys, *EVAL, "--json")[1])["kv_calibration"] == str(path)


def test_a_damaged_file_in_the_cache_folder_is_made_anew_and_a_named_one_is_not(here: Path, capsys: Any) -> None:
    path = Path(tqgguf(capsys, *CALIBRATE)[1].strip())
    whole = path.read_bytes()
    for damaged in (whole[:100], b"other bytes"):
        path.write_bytes(damaged)
        status, line = refused(capsys, *CALIBRATE, "-o", str(path))
        assert status == 2 and line.endswith("delete it, or give another name")
        assert tqgguf(capsys, *CALIBRATE)[0] == 0
        assert path.read_bytes() == whole


def test_programs_hand_its_scales_to_a_cache_for_any_mlx_lm_model(here: Path, capsys: Any) -> None:
    path = tqgguf(capsys, *CALIBRATE)[1].strip()
    scales = read_publicly(path).scales
    loaded = open_model("model.gguf").load()
    caches = make_block_cache(loaded.model, "turbo4", "turbo3", channel_scales=scales)
    loaded.fill(mx.array([[i % 250 for i in range(200)]]), caches)
    for layer, cache in enumerate(caches):
        assert np.array_equal(np.asarray(cache.sides[0].scale.value), scales[layer])


def test_shards_and_the_merged_file_share_a_calibration(here: Path, capsys: Any) -> None:
    tensors = list(model_tensors(LLAMA).items())
    write_split(here, "split", model_metadata(LLAMA), [dict(tensors[:5]), dict(tensors[5:])])
    assert tqgguf(capsys, *CALIBRATE, "-o", "split.kv-calibration.gguf")[0] == 0
    argv = [word.replace("model.gguf", "split-00002-of-00002.gguf") for word in EVAL]
    assert json.loads(tqgguf(capsys, *argv, "--json")[1])["kv_calibration"] == str(here / "split.kv-calibration.gguf")


def test_a_folder_is_calibrated_too(here: Path, capsys: Any) -> None:
    write_folder(here / "folder", "llama")
    argv = ["folder" if word == "model.gguf" else word for word in CALIBRATE]
    assert tqgguf(capsys, *argv, "-o", "folder.kv-calibration.gguf")[0] == 0
    argv = ["folder" if word == "model.gguf" else word for word in EVAL]
    assert json.loads(tqgguf(capsys, *argv, "--json")[1])["kv_calibration"] == str(here / "folder.kv-calibration.gguf")


def refused(capsys: Any, *argv: str) -> tuple[int, str]:
    """(exit status, the one line) of a call that prints nothing else and loads no weights."""
    status, out, err = tqgguf(capsys, *argv)
    assert out == "" and "model:" not in err
    *_, line = err.splitlines()
    assert line.startswith("tqgguf: error: ")
    return status, line


def test_what_cannot_be_written_is_refused_before_anything_is_measured(here: Path, capsys: Any) -> None:
    (here / "folder").mkdir()
    before = sorted(here.iterdir())
    for output, said in (
        ("folder", "folder: expected the name of a file to write, found a folder"),
        ("none/a.gguf", f"none/a.gguf: the folder {here / 'none'} does not exist; make it first"),
        (
            "model.gguf",
            "model.gguf: exists and is no calibration, so it is not replaced; delete it, or give another name",
        ),
        ("text.txt", "text.txt: exists and is no calibration, so it is not replaced; delete it, or give another name"),
    ):
        assert refused(capsys, *CALIBRATE, "-o", output) == (2, f"tqgguf: error: {said}")
    assert sorted(here.iterdir()) == before


def test_what_cannot_be_measured_is_refused(here: Path, capsys: Any) -> None:
    for argv, said in (
        (("-c", "100"), "-c: expected 128 tokens or more, whole pages, found 100"),
        (("--chunks", "0"), "--chunks: expected 1 or more, or -1 for the whole text, found 0"),
        (("-c", "4096"), "-c 4096: the model was trained for 2048 tokens"),
        (("-ctk", "turbo4"), "-ctk is refused: a calibration serves every cache type, and is made with f16"),
    ):
        status, line = refused(capsys, *CALIBRATE, "-o", "a.gguf", *argv)
        assert status == 2 and said in line
    (here / "text.txt").write_text("too short")
    assert "expected at least 256" in refused(capsys, *CALIBRATE, "-o", "a.gguf")[1]
    assert not (here / "a.gguf").exists()


def test_run_and_eval_refuse_a_foreign_or_damaged_sidecar(here: Path, capsys: Any) -> None:
    write_calibration("foreign.gguf", made())
    (here / "broken.gguf").write_bytes(b"GGUF")
    for verb in (RUN, EVAL):
        status, line = refused(capsys, *verb, "--kv-calibration", "foreign.gguf")
        assert status == 2 and "foreign.gguf: made for another model ('a model')" in line
        status, line = refused(capsys, *verb, "--kv-calibration", "broken.gguf")
        assert status == 1 and "broken.gguf" in line


def in_a_process(*argv: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tqgguf.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=before)


def test_ctrl_c_after_the_last_chunk_still_ends_it_before_anything_is_written(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured_then_interrupted(*arguments: Any) -> Any:
        found = calibrate(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(calibrate_command, "calibrate_model", measured_then_interrupted)
    status, out, _ = tqgguf(capsys, *CALIBRATE, "-o", "a.gguf")
    assert (status, out) == (130, "")
    assert not (here / "a.gguf").exists()


def test_a_full_disk_leaves_nothing_behind(here: Path) -> None:
    def no_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    (here / "cal").mkdir()
    done = in_a_process(*CALIBRATE, "-o", "cal/a.gguf", before=no_room)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "tqgguf: error: cal/a.gguf: could not be written: File too large"
    assert list((here / "cal").iterdir()) == []

"""The channel scale of K from a calibration: what it is made from, the sidecar that holds it, which one is taken."""

from __future__ import annotations

import importlib
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import build_gguf, write_split
from mlx_lm.models.cache import make_prompt_cache
from tiny_folders import write_folder
from tiny_models import TinyModel, model_metadata, model_tensors, write_tiny

from tqgguf import make_prompt_cache as make_block_cache
from tqgguf import read_calibration as read_publicly
from tqgguf.cli import calibrate_command
from tqgguf.cli.main import main
from tqgguf.formats.calibration import Calibration, check_fits, read_calibration, write_calibration
from tqgguf.formats.calibration_files import SUFFIX, beside, cache_folder, cached
from tqgguf.formats.errors import EncodeError, FormatError, RequestError, TqggufError
from tqgguf.formats.fingerprint import PARTS, Fingerprint
from tqgguf.formats.kv_size import LayerShape
from tqgguf.runtime.calibration_choice import AUTO, OFF, choose_calibration
from tqgguf.runtime.calibration_statistics import calibrate
from tqgguf.runtime.evaluation import spread
from tqgguf.runtime.load import OpenModel, open_model
from tqgguf.runtime.loaded_model import LoadedModel

N_PREFIX = 4
LLAMA = TinyModel("llama", n_layers=2, hidden_size=128, intermediate_size=128, seed=21)
GEMMA = TinyModel("gemma3", n_layers=3, hidden_size=128, window=64, window_pattern=3, rope_base=1e6, seed=22)
FINGERPRINT = Fingerprint(*(digit * 64 for digit in "abcd"))
SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 4, 4)]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder: an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tqgguf"


def made(**changes: Any) -> Calibration:
    scales = {
        0: np.array([[1.0, 2.0, 0.5], [4.0, 0.5, 0.5]], np.float32),
        1: np.array([[1.0, 1.0, 2.0, 0.5]], np.float32),
    }
    fields = {
        "scales": scales,
        "fingerprint": FINGERPRINT,
        "architecture": "llama",
        "model": "a model",
        "n_tokens": 4096,
        "text": "text.txt",
        "text_sha256": "e" * 64,
    }
    return Calibration(**{**fields, **changes})


# What it is made from


def turned_by_hand(loaded: LoadedModel, window: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries [n_heads, n, head_dim] and keys [n_kv_heads, n, head_dim] after RoPE of every layer, of the whole window
    at once, through mlx-lm's own cache and a look at its attention module.
    """
    module: Any = importlib.import_module(type(loaded.model).__module__)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = module.scaled_dot_product_attention

    def look(q: mx.array, k: mx.array, v: mx.array, *rest: Any, **more: Any) -> mx.array:
        seen.append((np.array(q[0]), np.array(k[0])))
        return original(q, k, v, *rest, **more)

    module.scaled_dot_product_attention = look
    try:
        mx.eval(loaded.model(mx.array(window[None].astype(np.int32)), cache=make_prompt_cache(loaded.model)))
    finally:
        module.scaled_dot_product_attention = original
    return seen


def scale_by_formula(windows: list[tuple[np.ndarray, np.ndarray]], pairs: str) -> np.ndarray:
    """(E[q^2] / Var[k]) ** (1/4) in float64, from the design's words: variances within pages of 128, the first tokens
    left out, one value for both channels of a RoPE pair, mean logarithm zero.
    """
    use: Any = 0.0
    spread_: Any = 0.0
    for q, k in windows:
        n_kv_heads, length, dim = k.shape
        grouped = q.astype(np.float64)[:, N_PREFIX:].reshape(n_kv_heads, -1, dim)
        use = use + np.square(grouped).sum(axis=1)
        for start in range(0, length - 127, 128):
            page = k[:, start + (N_PREFIX if start == 0 else 0) : start + 128].astype(np.float16).astype(np.float64)
            mean = page.mean(axis=1, keepdims=True).astype(np.float16).astype(np.float64)
            spread_ = spread_ + np.square(page - mean).sum(axis=1)
    half = use.shape[1] // 2
    for x in (use, spread_):
        both = (x[:, 0::2] + x[:, 1::2]) / 2 if pairs == "neighbours" else (x[:, :half] + x[:, half:]) / 2
        x[:] = np.repeat(both, 2, axis=1) if pairs == "neighbours" else np.tile(both, 2)
        x += 1e-4 * x.mean(axis=1, keepdims=True)
    a = (use / spread_) ** 0.25
    return a / np.exp(np.log(a).mean(axis=1, keepdims=True))


@pytest.mark.parametrize(("model", "pairs"), [(LLAMA, "neighbours"), (GEMMA, "halves")], ids=["llama", "gemma3"])
def test_scales_are_those_of_float64_statistics_of_the_models_queries_and_keys(
    tmp_path: Path, model: TinyModel, pairs: str
) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", model)).load()
    # windows of two pages and a half: the last page does not count, its queries do
    windows = np.random.default_rng(1).integers(0, 280, (2, 320))
    scales = calibrate(loaded, windows, chunk=128)
    by_hand = [turned_by_hand(loaded, window) for window in windows]
    assert sorted(scales) == list(range(model.n_layers))
    for layer, scale in scales.items():
        expected = scale_by_formula([window[layer] for window in by_hand], pairs)
        assert scale.dtype == np.float32
        np.testing.assert_allclose(scale, expected, rtol=2e-3)
        assert np.ptp(scale) > 0.1


def test_scales_hardly_depend_on_the_grid_and_not_at_all_on_the_run(tmp_path: Path) -> None:
    opened = open_model(write_tiny(tmp_path / "model.gguf", LLAMA))
    loaded = opened.load()
    windows = np.random.default_rng(2).integers(0, 280, (1, 512))
    once, again, wide = (calibrate(loaded, windows, chunk) for chunk in (128, 128, 512))
    for layer in once:
        np.testing.assert_array_equal(once[layer], again[layer])
        np.testing.assert_allclose(once[layer], wide[layer], rtol=1e-3)


def test_progress_counts_all_windows_and_can_end_it(tmp_path: Path) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", LLAMA)).load()
    windows = np.zeros((2, 256), np.int64)
    seen: list[tuple[int, int]] = []
    calibrate(loaded, windows, 128, lambda *counts: seen.append(counts))
    assert seen == [(128, 512), (256, 512), (384, 512), (512, 512)]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(loaded, windows, 128, stop)


def test_a_model_that_attends_by_itself_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gemma2", "gemma2", config={"query_pre_attn_scalar": 64})
    loaded = open_model(folder).load()
    with pytest.raises(RequestError, match="computes attention by itself"):
        calibrate(loaded, np.zeros((1, 128), np.int64))


def test_keys_that_are_not_finite_are_refused_by_their_layer(tmp_path: Path) -> None:
    loaded = open_model(write_tiny(tmp_path / "model.gguf", LLAMA)).load()
    norm = loaded.model.layers[1].input_layernorm
    norm.weight = mx.full(norm.weight.shape, np.nan)
    with pytest.raises(EncodeError, match="layer 1: expected finite queries and keys"):
        calibrate(loaded, np.arange(128)[None])


def test_windows_are_spread_over_the_text() -> None:
    windows = np.arange(10)[:, None]
    assert spread(windows, 4)[:, 0].tolist() == [1, 3, 6, 8]
    assert spread(windows, 99)[:, 0].tolist() == list(range(10))
    assert spread(windows, 1)[:, 0].tolist() == [5]


# The sidecar


def test_a_sidecar_comes_back_as_it_was_written_and_is_always_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_calibration(tmp_path / name, made())
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    read = read_calibration(tmp_path / "a.gguf")
    assert replace(read, scales={}) == made(scales={})
    assert sorted(read.scales) == [0, 1]
    for layer, scale in made().scales.items():
        np.testing.assert_array_equal(read.scales[layer], scale)


def test_pypi_gguf_finds_these_keys_and_tensors(tmp_path: Path) -> None:
    write_calibration(tmp_path / "a.gguf", made())
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found == {
        "general.architecture": "llama",
        "general.type": "kv-calibration",
        "tqgguf.calibration.version": 1,
        "tqgguf.calibration.model": "a model",
        "tqgguf.calibration.tokens": 4096,
        "tqgguf.calibration.text": "text.txt",
        "tqgguf.calibration.text_sha256": "e" * 64,
        "tqgguf.fingerprint.version": 1,
        "tqgguf.fingerprint.weights": "a" * 64,
        "tqgguf.fingerprint.hyperparameters": "b" * 64,
        "tqgguf.fingerprint.rope": "c" * 64,
        "tqgguf.fingerprint.tokenizer": "d" * 64,
    }
    tensors = {t.name: (t.tensor_type.name, t.shape.tolist(), t.data.reshape(-1).tolist()) for t in reader.tensors}
    assert tensors == {
        "blk.0.attn_k.channel_scale": ("F32", [3, 2], [1.0, 2.0, 0.5, 4.0, 0.5, 0.5]),
        "blk.1.attn_k.channel_scale": ("F32", [4, 1], [1.0, 1.0, 2.0, 0.5]),
    }


def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """A sound sidecar's metadata and tensors, for the builder."""
    entries: dict[str, Any] = {
        "general.architecture": "llama",
        "general.type": "kv-calibration",
        "tqgguf.calibration.version": 1,
        "tqgguf.calibration.model": "a model",
        "tqgguf.calibration.tokens": 4096,
        "tqgguf.calibration.text": "text.txt",
        "tqgguf.calibration.text_sha256": "e" * 64,
        **FINGERPRINT.entries(),
    }
    return entries, {f"blk.{layer}.attn_k.channel_scale": scale for layer, scale in made().scales.items()}


SCALE = "blk.1.attn_k.channel_scale"


def scale_of(*values: float) -> dict[str, Any]:
    return {SCALE: np.array([values], np.float32)}


@pytest.mark.parametrize(
    ("entries", "tensors", "said"),
    [
        ({"general.type": None}, {}, "expected general.type kv-calibration, found 'model'"),
        ({"general.type": "imatrix"}, {}, "expected general.type kv-calibration, found 'imatrix'"),
        ({"tqgguf.calibration.version": 2}, {}, "expected a calibration of version 1, found 2; make it again"),
        ({"tqgguf.calibration.version": None}, {}, "tqgguf.calibration.version"),
        ({"tqgguf.calibration.tokens": -1}, {}, "tqgguf.calibration.tokens"),
        ({"tqgguf.calibration.model": 3}, {}, "tqgguf.calibration.model"),
        ({"tqgguf.fingerprint.version": 2}, {}, "expected a model's fingerprint of version 1, found version 2"),
        ({"tqgguf.fingerprint.weights": "A" * 64}, {}, "'tqgguf.fingerprint.weights': expected 64 hexadecimal digits"),
        ({}, scale_of(1, 1, np.nan, 1), f"{SCALE}: expected numbers from 0.000244 to 4.1e+03, found nan in head 0"),
        ({}, scale_of(1, 1, 1, np.inf), "found inf in head 0, channel 3"),
        ({}, scale_of(0, 1, 1, 1), "found 0.0 in head 0, channel 0"),
        ({}, scale_of(1, -1, 1, 1), "found -1.0 in head 0, channel 1"),
        ({}, scale_of(1, 1e6, 1, 1), "found 1000000.0 in head 0, channel 1"),
        ({}, {SCALE: np.ones((1, 4), np.float16)}, f"{SCALE}: expected F32 [n_kv_heads, head_dim], found F16 [1, 4]"),
        ({}, {SCALE: np.ones(4, np.float32)}, "found F32 [4]"),
        ({}, {"blk.0.attn_k.channel_scale": None, SCALE: None}, "expected tensors named blk.N.attn_k.channel_scale"),
    ],
    ids=str,
)
def test_a_damaged_sidecar_is_refused_in_one_line(
    tmp_path: Path, entries: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    metadata, arrays = parts()
    path = tmp_path / "bad.gguf"
    kept = [{k: v for k, v in x.items() if v is not None} for x in (metadata | entries, arrays | tensors)]
    path.write_bytes(build_gguf(*kept))
    with pytest.raises(FormatError) as error:
        read_calibration(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_sidecar_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_calibration(tmp_path / "whole.gguf", made())
    data = (tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    for length in range(0, len(data) - 16, 7):  # the last tensor ends 16 bytes before its padding does
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_calibration(path)


def other(part: str) -> Fingerprint:
    return replace(FINGERPRINT, **{part: "0" * 64})


@pytest.mark.parametrize("part", PARTS)
def test_what_differs_decides_whether_a_sidecar_is_taken(part: str) -> None:
    def fits() -> str | None:
        return check_fits("a.gguf", made(), other(part), 2, SHAPES)

    if part in ("weights", "hyperparameters"):
        with pytest.raises(RequestError) as error:
            fits()
        assert str(error.value) == (
            f"a.gguf: made for another model ('a model'): other {part}; make one for this model with `tqgguf calibrate`"
        )
    elif part == "rope":
        assert fits() == "a.gguf: made with other RoPE parameters; used all the same"
    else:
        assert fits() is None


@pytest.mark.parametrize(
    ("shapes", "n_layers", "said"),
    [
        (SHAPES[:1], 2, "expected channel scales of 1 layers"),
        (SHAPES, 1, "the last below 1, found 2, the last 1"),
        ([SHAPES[0], LayerShape(1, 5, 4)], 2, "blk.1.attn_k.channel_scale: expected shape (1, 5), found (1, 4)"),
        ([LayerShape(1, 3, 3), SHAPES[1]], 2, "blk.0.attn_k.channel_scale: expected shape (1, 3), found (2, 3)"),
    ],
)
def test_a_sidecar_of_other_shapes_is_refused(shapes: list[LayerShape], n_layers: int, said: str) -> None:
    with pytest.raises(FormatError) as error:
        check_fits("a.gguf", made(), FINGERPRINT, n_layers, shapes)
    assert said in str(error.value)


def test_a_model_with_recurrent_layers_has_scales_for_the_others(tmp_path: Path) -> None:
    scales = dict(zip((1, 3), made().scales.values(), strict=True))
    assert check_fits("a.gguf", made(scales=scales), FINGERPRINT, 4, SHAPES) is None


def test_no_other_file_is_written_over(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model.gguf", LLAMA)
    text = tmp_path / "notes.txt"
    text.write_text("notes")
    for path in (model, text):
        before = path.read_bytes()
        with pytest.raises(RequestError, match="exists and is no calibration, so it is not replaced"):
            write_calibration(path, made())
        assert path.read_bytes() == before
    write_calibration(tmp_path / "a.gguf", made())
    write_calibration(tmp_path / "a.gguf", made(model="newer"))
    assert read_calibration(tmp_path / "a.gguf").model == "newer"


# Which one is taken


def test_a_sidecar_lies_beside_its_model_under_the_models_name(tmp_path: Path) -> None:
    (tmp_path / "folder.v1").mkdir()
    for model, sidecar in (
        ("m.Q4_1.gguf", "m.Q4_1.kv-calibration.gguf"),
        ("m-00002-of-00003.gguf", "m.kv-calibration.gguf"),
        ("folder.v1", "folder.v1.kv-calibration.gguf"),
    ):
        assert beside(tmp_path / model) == tmp_path / sidecar


def test_the_cache_folder_is_where_the_system_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder({}) == Path("/home/u/.cache/tqgguf")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/tqgguf")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/u/.cache/tqgguf")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder({}) == Path("/home/u/Library/Caches/tqgguf")


@pytest.fixture
def opened(tmp_path: Path) -> OpenModel:
    model = open_model(write_tiny(tmp_path / "model.gguf", LLAMA))
    assert isinstance(model, OpenModel)
    return model


def fitting(opened: OpenModel, value: float = 1.0) -> Calibration:
    """A calibration of the tiny model whose scales are all `value`."""
    shape = (LLAMA.n_kv_heads, LLAMA.head_dim)
    scales = {layer: np.full(shape, value, np.float32) for layer in range(LLAMA.n_layers)}
    return made(scales=scales, fingerprint=opened.fingerprint)


def put(path: Path, calibration: Calibration) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_calibration(path, calibration)
    return path


def value_of(scales: Any) -> float:
    assert sorted(scales) == list(range(LLAMA.n_layers))
    return float(scales[0][0, 0].item())


def test_auto_looks_beside_the_model_then_in_the_cache_folder(opened: OpenModel) -> None:
    assert choose_calibration(opened, AUTO, True).channel_scales is None
    in_cache = put(cached(opened.fingerprint), fitting(opened, 2.0))
    found = choose_calibration(opened, AUTO, True)
    assert (found.path, found.notices) == (str(in_cache), ())
    assert value_of(found.channel_scales) == 2.0
    near = put(beside(opened.path), fitting(opened, 3.0))
    found = choose_calibration(opened, AUTO, True)
    assert (found.path, value_of(found.channel_scales)) == (str(near), 3.0)
    assert choose_calibration(opened, OFF, True).channel_scales is None


def test_auto_leaves_what_does_not_fit_with_a_notice_and_looks_on(opened: OpenModel) -> None:
    near = put(beside(opened.path), made())
    found = choose_calibration(opened, AUTO, True)
    assert found.channel_scales is None
    (notice,) = found.notices
    assert notice.startswith(f"{near}: made for another model ('a model'): other weights and hyperparameters")
    assert notice.endswith("; left aside")
    near.write_bytes(b"GGUF")
    put(cached(opened.fingerprint), fitting(opened, 2.0))
    found = choose_calibration(opened, AUTO, True)
    assert value_of(found.channel_scales) == 2.0
    assert len(found.notices) == 1


def test_a_named_sidecar_must_fit(opened: OpenModel, tmp_path: Path) -> None:
    foreign, broken = put(tmp_path / "foreign.gguf", made()), tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for path, kind, status in (
        (foreign, RequestError, 2),
        (broken, FormatError, 1),
        (tmp_path / "none.gguf", TqggufError, 1),
    ):
        with pytest.raises(kind) as error:
            choose_calibration(opened, str(path), True)
        assert error.value.exit_status == status
        assert str(path) in str(error.value)


def test_nothing_is_looked_for_and_no_model_hashed_without_need(
    opened: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Fingerprint:
        raise AssertionError("the model was hashed")

    monkeypatch.setattr("tqgguf.runtime.load.fingerprint_gguf", never)
    assert choose_calibration(opened, AUTO, True).notices == ()
    beside(opened.path).write_bytes(b"not even looked at")
    for wanted, is_needed in ((AUTO, False), (OFF, False), (OFF, True)):
        assert choose_calibration(opened, wanted, is_needed).notices == ()
    unused = choose_calibration(opened, str(tmp_path / "none.gguf"), False)
    assert unused.notices == (f"--kv-calibration {tmp_path / 'none.gguf'}: no effect, no K is balanced in full",)


def test_a_model_with_other_rope_parameters_takes_it_with_a_notice(opened: OpenModel, tmp_path: Path) -> None:
    path = put(tmp_path / "a.gguf", fitting(opened))
    stretched = open_model(opened.path, rope_freq_scale=0.5)
    found = choose_calibration(stretched, str(path), True)
    assert found.notices == (f"{path}: made with other RoPE parameters; used all the same",)
    assert found.channel_scales is not None


# The commands

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

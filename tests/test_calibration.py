"""The sidecar that holds the channel scale of K: its bytes, its damages, and the model that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from calibrations import FINGERPRINT, LLAMA, SHAPES, made
from gguf_builder import build_gguf
from tiny_models import write_tiny

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.models.calibration import check_fits, read_calibration, write_calibration
from tqgguf.formats.models.fingerprint import PARTS, Fingerprint

pytestmark = pytest.mark.usefixtures("cache_home")


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
        ({"general.type": None}, {}, "general.type: expected kv-calibration, as the file's keys are, found nothing"),
        (
            {"general.type": "imatrix"},
            {},
            "general.type: expected kv-calibration, as the file's keys are, found 'imatrix'",
        ),
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

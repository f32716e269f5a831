"""Which calibration a model's caches are made with: a named one, one beside the model, one in the cache folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import LLAMA, made
from tiny_models import write_tiny

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.formats.models.calibration import Calibration, write_calibration
from tqgguf.formats.models.calibration_files import beside, cache_folder, cached
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.runtime.models.calibration_choice import AUTO, OFF, choose_calibration
from tqgguf.runtime.models.load import OpenModel, open_model

TURBO = [CacheSpec(), CacheSpec("turbo4", "turbo3")]
pytestmark = pytest.mark.usefixtures("cache_home")


def test_a_sidecar_lies_beside_its_model_under_the_models_name(tmp_path: Path) -> None:
    (tmp_path / "folder.v1").mkdir()
    for model, sidecar in (
        ("m.Q4_1.gguf", "m.Q4_1.kv-calibration.gguf"),
        ("m-00002-of-00003.gguf", "m.kv-calibration.gguf"),
        ("folder.v1", "folder.v1.kv-calibration.gguf"),
    ):
        assert beside(tmp_path / model) == tmp_path / sidecar


def test_the_cache_folder_is_where_the_system_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nobody")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder({}) == Path("/nobody/.cache/tqgguf")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/tqgguf")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/nobody/.cache/tqgguf")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder({}) == Path("/nobody/Library/Caches/tqgguf")


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
    assert choose_calibration(opened, AUTO, TURBO).channel_scales is None
    in_cache = put(cached(opened.fingerprint), fitting(opened, 2.0))
    found = choose_calibration(opened, AUTO, TURBO)
    assert (found.path, found.notices) == (str(in_cache), ())
    assert value_of(found.channel_scales) == 2.0
    near = put(beside(opened.path), fitting(opened, 3.0))
    found = choose_calibration(opened, AUTO, TURBO)
    assert (found.path, value_of(found.channel_scales)) == (str(near), 3.0)
    assert choose_calibration(opened, OFF, TURBO).channel_scales is None


def test_auto_leaves_what_does_not_fit_with_a_notice_and_looks_on(opened: OpenModel) -> None:
    near = put(beside(opened.path), made())
    found = choose_calibration(opened, AUTO, TURBO)
    assert found.channel_scales is None
    (notice,) = found.notices
    assert notice.startswith(f"{near}: made for another model ('a model'): other weights and hyperparameters")
    assert notice.endswith("; left aside")
    near.write_bytes(b"GGUF")
    put(cached(opened.fingerprint), fitting(opened, 2.0))
    found = choose_calibration(opened, AUTO, TURBO)
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
            choose_calibration(opened, str(path), TURBO)
        assert error.value.exit_status == status
        assert str(path) in str(error.value)


def test_nothing_is_looked_for_and_no_model_hashed_without_need(
    opened: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Fingerprint:
        raise AssertionError("the model was hashed")

    monkeypatch.setattr("tqgguf.runtime.models.load.fingerprint_gguf", never)
    assert choose_calibration(opened, AUTO, TURBO).notices == ()
    beside(opened.path).write_bytes(b"not even looked at")
    for wanted, specs in ((AUTO, [CacheSpec()]), (OFF, [CacheSpec()]), (OFF, TURBO)):
        assert choose_calibration(opened, wanted, specs).notices == ()
    unused = choose_calibration(opened, str(tmp_path / "none.gguf"), [CacheSpec()])
    assert unused.notices == (f"--kv-calibration {tmp_path / 'none.gguf'}: no effect, no K is balanced in full",)


def test_a_model_with_other_rope_parameters_takes_it_with_a_notice(opened: OpenModel, tmp_path: Path) -> None:
    path = put(tmp_path / "a.gguf", fitting(opened))
    stretched = open_model(opened.path, rope_freq_scale=0.5)
    found = choose_calibration(stretched, str(path), TURBO)
    assert found.notices == (f"{path}: made with other RoPE parameters; used all the same",)
    assert found.channel_scales is not None

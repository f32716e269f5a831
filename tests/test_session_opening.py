"""From what is asked to a session: checks that read no weight, then weights; nothing is printed on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibrations import made
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.formats.models.calibration import write_calibration
from tqgguf.formats.snapshots.write import write_snapshot
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.generation.session_opening import PromptCacheAsk, SessionAsk, SessionOpening, open_session
from tqgguf.runtime.models.load import load_model, open_model
from tqgguf.runtime.models.model_opening import ModelAsk
from tqgguf.text.grid import AskedGrid

MODEL = TinyModel(n_layers=2)
TURBO = CacheSpec("turbo4", "turbo3")
IDS = [3 * i % 250 for i in range(300)]

pytestmark = pytest.mark.usefixtures("cache_home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m.gguf", MODEL)


def opened(ask: SessionAsk) -> tuple[SessionOpening, list[str]]:
    notices: list[str] = []
    return open_session(ask, notices), notices


def test_a_session_is_the_one_that_is_made_of_the_parts_and_nothing_is_printed(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shape = (MODEL.n_kv_heads, MODEL.head_dim)
    scales = {layer: np.full(shape, 2.0 + layer, np.float32) for layer in range(MODEL.n_layers)}
    sidecar = tmp_path / "named.gguf"
    write_calibration(sidecar, made(scales=scales, fingerprint=open_model(model).fingerprint))
    ask = SessionAsk(
        ModelAsk(model, calibration=str(sidecar), threads=1), TURBO, n_ctx=512, grid=AskedGrid(100, is_named=True)
    )
    opening, notices = opened(ask)
    steps: list[tuple[int, int]] = []
    session = opening.session(opening.load(lambda done, total: steps.append((done, total))))
    by_hand = Session(load_model(model), TURBO, n_ctx=512, chunk=128, channel_scales=opening.calibration.channel_scales)
    assert np.array_equal(session.prefill(IDS), by_hand.prefill(IDS))
    assert (session.n_ctx, session.chunk, session.report().is_calibrated) == (512, 128, True)
    assert notices == ["-ub 100: texts are evaluated in whole pages of 128, so 128 is used"]
    assert steps and steps[-1][0] == steps[-1][1]
    assert capfd.readouterr() == ("", "")


def test_what_a_weight_says_is_found_by_loading_alone(tmp_path: Path) -> None:
    bad = np.full((MODEL.hidden_size,), np.nan, np.float32)
    path = write_tiny(tmp_path / "nan.gguf", MODEL, tensors={"blk.0.attn_norm.weight": bad})
    opening, _ = opened(SessionAsk(ModelAsk(path), TURBO))
    with pytest.raises(FormatError, match="attn_norm"):
        opening.load()


def test_notices_from_before_a_refusal_are_there(model: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    ask = ModelAsk(model, calibration=str(tmp_path / "none.gguf"))
    with pytest.raises(TqggufError, match=r"none\.gguf"):
        open_session(SessionAsk(ask, TURBO, notices=("a flag",)), notices)
    assert notices == ["a flag"]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (SessionAsk(cache=CacheSpec("turbo3,7:q8_0")), "the model has layers 0 to 1"),
        (SessionAsk(n_ctx=4096), "trained"),
        (SessionAsk(prompt_cache=PromptCacheAsk("none.kv", "ask")), "none.kv: expected a prompt cache to go on from"),
        (SessionAsk(prompt_cache=PromptCacheAsk("m.gguf", "make")), "m.gguf"),
    ],
)
def test_what_cannot_be_is_refused_from_headers(
    ask: SessionAsk, expected: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=expected):
        open_session(replace(ask, model=ModelAsk(model)), [])


def test_any_number_of_sessions_begin_with_what_the_prompt_cache_holds(model: Path, tmp_path: Path) -> None:
    kept, path = Session(load_model(model), TURBO, chunk=128, keeps_pages=True), tmp_path / "c.kv"
    logits = kept.prefill(IDS)
    write_snapshot(path, kept.snapshot())
    nobody_chose = {"type_k": False, "type_v": False, "n_prefix": False, "balance": False}
    opening, notices = opened(
        SessionAsk(
            ModelAsk(model),
            is_given=nobody_chose,
            grid=AskedGrid(512, is_named=True),
            prompt_cache=PromptCacheAsk(str(path)),
        )
    )
    assert (opening.spec.type_k, opening.spec.type_v, opening.chunk) == ("turbo4", "turbo3", 128)
    assert notices == ["-ub 512: the prompt cache was evaluated in pieces of 128 tokens, so 128 is used"]
    loaded = opening.load()
    for _ in range(2):
        session = opening.session(loaded)
        assert session.tokens == IDS
        assert np.array_equal(session.prefill(IDS), logits)
        assert session.timing.reused_tokens == 256
    with pytest.raises(RequestError, match="type"):
        open_session(SessionAsk(ModelAsk(model), CacheSpec("q8_0", "q8_0"), prompt_cache=PromptCacheAsk(str(path))), [])


def test_a_document_is_kept_in_types_that_nobody_chose(model: Path, tmp_path: Path) -> None:
    made_anew = PromptCacheAsk(str(tmp_path / "new.kv"), "make")
    opening, _ = opened(SessionAsk(ModelAsk(model), prompt_cache=made_anew))
    assert (opening.spec.type_k, opening.types_were_chosen) == ("turbo4", True)
    opening, _ = opened(SessionAsk(ModelAsk(model), is_given={"type_v": True}, prompt_cache=made_anew))
    assert (opening.spec.type_k, opening.types_were_chosen) == ("f16", False)

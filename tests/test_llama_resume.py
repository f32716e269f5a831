"""llama.cpp itself goes on from what we write, as from what it has evaluated; collected where llama-cpp-python is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_oracle import Context, Model

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.reader import examine_llama_state, open_llama_state
from tqgguf.formats.llama.to_snapshot import ImportOptions, import_llama_state
from tqgguf.formats.llama.write import write_llama_state
from tqgguf.formats.models.outline import ModelOutline, outline_of_gguf
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.snapshots.write import write_snapshot
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import embedded_model, load_model

pytestmark = pytest.mark.llama_cpp

COUNTING = ", ".join(map(str, range(1, 61))) + ","  # over a page, and no doubt about how it goes on
CAPITALS = "Rome is the capital of Italy, Madrid is the capital of Spain. The capital of France is"
N = 12
KINDS = ["session", "sequence"]
TYPES = ["f16", "q8_0", "q4_0"]
PAIRS = [(t, t) for t in ("f32", "bf16", "q5_1", "q5_0", "q4_1", "iq4_nl", *TYPES)] + [("q8_0", "f16"), ("f16", "q4_0")]


class Case:
    """A model, as llama.cpp, its outline, and we have it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model(path)
        with open_gguf(path) as file:
            self.outline: ModelOutline = outline_of_gguf(file)
        self.prompt, self.short = self.model.tokenize(COUNTING), self.model.tokenize(CAPITALS)

    @contextmanager
    def context(self, *types: str, **options: Any) -> Iterator[Context]:
        context = Context(self.model, *types, **options)
        yield context
        context.close()

    def own(self, tokens: list[int], *types: str, **options: Any) -> list[int]:
        """llama.cpp's continuation of its own evaluation."""
        with self.context(*types, **options) as context:
            context.evaluate(tokens)
            return context.greedy(N)

    def resumed(self, path: Path, kind: str, *types: str, **options: Any) -> list[int]:
        """llama.cpp's continuation of a file."""
        with self.context(*types, **options) as context:
            assert context.load(path, kind) is not None
            return context.greedy(N)

    def saved(self, path: Path, kind: str, tokens: list[int], *types: str, **options: Any) -> Path:
        with self.context(*types, **options) as context:
            context.evaluate(tokens)
            return context.save(path, kind, tokens)


def _models() -> dict[str, Any]:
    gemma = os.environ.get("TQGGUF_GEMMA")
    return {"smollm2": embedded_model(), **({"gemma3": Path(gemma)} if gemma else {})}


@pytest.fixture(scope="module", params=_models())
def case(request) -> Case:
    return Case(_models()[request.param])


def through_our_carrier(snapshot: Snapshot, tmp_path: Path) -> Snapshot:
    write_snapshot(tmp_path / "snapshot.gguf", snapshot)
    return open_snapshot(tmp_path / "snapshot.gguf")


def imported(case: Case, path: Path, **options: Any) -> Snapshot:
    return import_llama_state(open_llama_state(path), case.outline, ImportOptions(**options))


@pytest.mark.parametrize("cache_type", TYPES)
def test_llama_cpp_goes_on_from_our_caches_with_its_own_continuation(case, cache_type, tmp_path):
    session = Session(load_model(case.path), CacheSpec(cache_type, cache_type))
    session.prefill(case.prompt)
    snapshot = through_our_carrier(session.snapshot(), tmp_path)
    expected = case.own(case.prompt, cache_type, cache_type)
    for kind in KINDS:
        path = tmp_path / kind
        write_llama_state(path, export_llama_state(snapshot, ExportOptions(kind=kind)))
        assert case.resumed(path, kind, cache_type, cache_type) == expected


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_we_go_on_from_llama_cpps_caches_with_its_own_continuation(case, cache_type, tmp_path):
    path = case.saved(tmp_path / "state", "session", case.prompt, cache_type, cache_type)
    snapshot = imported(case, path)
    session = Session(load_model(case.path), CacheSpec(cache_type, cache_type))
    session.adopt(snapshot)
    logits = session.prefill(case.prompt)
    assert session.timing.reused_tokens >= len(case.prompt) // 128 * 128
    chosen = []
    for _ in range(N):
        chosen.append(int(logits.argmax()))
        logits = session.decode(chosen[-1])
    assert chosen == case.own(case.prompt, cache_type, cache_type)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", PAIRS, ids="/".join)
def test_files_of_every_type_come_back_byte_by_byte(case, types, kind, tmp_path):
    path = case.saved(tmp_path / "state", kind, case.short, *types)
    assert examine_llama_state(path)[1] == []
    snapshot = through_our_carrier(imported(case, path), tmp_path)
    write_llama_state(tmp_path / "back", export_llama_state(snapshot))
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_values_come_back_and_can_be_made(case, kind, tmp_path):
    path = case.saved(tmp_path / "state", kind, case.short, flash=False)
    snapshot = imported(case, path)
    write_llama_state(tmp_path / "back", export_llama_state(snapshot))
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    expected = case.own(case.short, flash=False)
    assert case.resumed(path, kind, flash=False) == expected
    write_llama_state(tmp_path / "flash", export_llama_state(snapshot, ExportOptions(v_trans=False)))
    assert case.resumed(tmp_path / "flash", kind) == expected
    assert Context(case.model, flash=False).load(tmp_path / "flash", kind) is None


def test_f16_files_become_q8_0_that_llama_cpp_takes_for_its_own(case, tmp_path):
    path = case.saved(tmp_path / "state", "session", case.short)
    snapshot = imported(case, path)
    expected = case.own(case.short, "q8_0", "q8_0")
    for kind in KINDS:
        options = ExportOptions(kind=kind, type_k="q8_0", type_v="q8_0")
        write_llama_state(tmp_path / kind, export_llama_state(snapshot, options))
        assert case.resumed(tmp_path / kind, kind, "q8_0", "q8_0") == expected


def test_plain_blocks_are_taken_by_llama_cpp_but_are_not_its_own(case, tmp_path):
    """The rotation is our part: nothing in a file tells it."""
    path = case.saved(tmp_path / "state", "session", case.short)
    options = ExportOptions(type_k="q8_0", type_v="q8_0", rotated=False)
    write_llama_state(tmp_path / "plain", export_llama_state(imported(case, path), options))
    assert case.resumed(tmp_path / "plain", "session", "q8_0", "q8_0") != case.own(case.short, "q8_0", "q8_0")


def test_long_files_of_window_models_keep_what_their_rings_hold(case, tmp_path):
    tokens = (case.prompt * 10)[:1400]
    small = {"n_ctx": 2048, "ubatch": 128}
    with case.context(**small) as context:
        for start in range(0, len(tokens), 128):
            context.evaluate(tokens[start : start + 128])
        paths = {kind: context.save(tmp_path / kind, kind, tokens) for kind in KINDS}
        expected = context.greedy(N)
    for kind, path in paths.items():
        snapshot = through_our_carrier(imported(case, path), tmp_path)
        write_llama_state(tmp_path / "back", export_llama_state(snapshot))
        assert (tmp_path / "back").read_bytes() == path.read_bytes()
        other = KINDS[1 - KINDS.index(kind)]
        write_llama_state(tmp_path / "other", export_llama_state(snapshot, ExportOptions(kind=other)))
        if kind == "session":  # a sequence file does not say its architecture, the model does
            assert snapshot.architecture == case.outline.architecture
        assert case.resumed(tmp_path / "other", other, **small) == expected


def test_one_of_several_sequences_can_be_taken_out(case, tmp_path):
    with case.context(n_sequences=2) as context:
        context.evaluate(case.short)
        context.n = 0
        context.evaluate(case.prompt[:50], sequence=1)
        path = context.save(tmp_path / "state", "session", case.short)
    snapshot = imported(case, path, sequence=0)
    write_llama_state(tmp_path / "one", export_llama_state(snapshot))
    assert case.resumed(tmp_path / "one", "session") == case.own(case.short)


def test_recorded_files_load_in_llama_cpp():
    case = Case(embedded_model())
    data = Path(__file__).parent / "data"
    for name, cache_type in (("mainline_f16", "f16"), ("mainline_q8_0", "q8_0")):
        with case.context(cache_type, cache_type) as context:
            assert context.load(data / f"{name}.session", "session") == [46292, 314, 260, 3575]
            assert np.isfinite(context.logits()).all()

"""`tqgguf run --prompt-cache` on other programs' files: read as their writer meant them or not at all, and kept so."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.carriers.table import Foreign, open_carrier, write_carrier
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.llama.reader import open_llama_state
from tqgguf.formats.llama.state import LlamaState, Memory, Stream
from tqgguf.formats.llama.to_snapshot import ImportOptions
from tqgguf.formats.llama.write import write_llama_state
from tqgguf.formats.mlx.from_snapshot import write_mlx_cache
from tqgguf.formats.models.outline import ModelOutline, outline_of_gguf
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot

TEXT = " ".join(f"the {word} on the water" for word in ("stone", "heron", "boat", "reed") * 8)
KINDS = {"session": (FileKind.SESSION, 9, 10), "sequence": (FileKind.SEQUENCE, 2, 3)}
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MODELS = {"llama": TinyModel(), "gemma3": TinyModel("gemma3", window=160, window_pattern=2, head_dim=128, n_layers=3)}


class Files:
    """A model, a cache file, and tqgguf's verbs on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], model: str = "llama") -> None:
        self.capsys, self.folder = capsys, folder
        self.model, self.cache = folder / f"{model}.gguf", folder / "cache"
        write_tiny(self.model, MODELS[model])
        self.err = ""

    def __call__(self, *argv: str, status: int = 0) -> str:
        found = main(list(argv))
        out, self.err = self.capsys.readouterr()
        assert found == status, self.err
        return out

    def run(self, prompt: str, *flags: str, status: int = 0) -> dict[str, Any]:
        argv = ("run", "-m", str(self.model), "-no-cnv", "-p", prompt, "--temp", "0", "-n", "4", "--json")
        out = self(*argv, "--prompt-cache", str(self.cache), *flags, status=status)
        return json.loads(out) if out else {}

    def snapshot(self, prompt: str = TEXT) -> Snapshot:
        """What our own run holds of a prompt, in f16 and of unknown origin; the file is gone then."""
        self.run(prompt)
        found = replace(open_snapshot(self.cache), fingerprint=None, prompt_ranges=(), chunk=0)
        self.cache.unlink()
        return found

    def write(self, snapshot: Snapshot, version: int, **options: Any) -> bytes:
        """A llama.cpp file of that version; its bytes."""
        state = export_llama_state(snapshot, ExportOptions(requantise=True, **options))
        return self.write_state(replace(state, version=version))

    def write_state(self, state: LlamaState) -> bytes:
        path = self.folder / "written"
        write_llama_state(path, state)
        path.replace(self.cache)
        return self.cache.read_bytes()

    @property
    def version(self) -> int:
        return int.from_bytes(self.cache.read_bytes()[4:8], "little")

    @property
    def outline(self) -> ModelOutline:
        with open_gguf(self.model) as file:
            return outline_of_gguf(file)


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Files:
    return Files(tmp_path, capsys)


@pytest.mark.parametrize("cache_type", QUANTISED)
@pytest.mark.parametrize("rotated", [True, False])
def test_rows_that_may_be_rotated_or_not_are_not_guessed_at(files: Files, cache_type: str, rotated: bool) -> None:
    snapshot = files.snapshot()
    for kind, (_, old, _) in KINDS.items():
        data = files.write(snapshot, old, kind=kind, type_k=cache_type, type_v=cache_type, rotated=rotated)
        files.run(TEXT + " and on", "-ctk", cache_type, "-ctv", cache_type, status=2)
        assert f"K of layer 0 is of type {cache_type}" in files.err and f"a file of version {old}" in files.err
        assert "--profile of convert, or --prompt-cache-profile of run: mainline (rotated), thetom-2026-05" in files.err
        assert files.err.count("\n") == 1
        files("convert", str(files.cache), str(files.folder / "a.gguf"), "-m", str(files.model), status=2)
        assert "--profile" in files.err and not (files.folder / "a.gguf").exists()
        assert files.cache.read_bytes() == data


def test_a_quantised_side_beside_a_float_one_is_enough_to_ask(files: Files) -> None:
    snapshot = files.snapshot()
    for types in ({"type_k": "q8_0"}, {"type_v": "q4_0"}):
        files.write(snapshot, 9, **types)
        files.run(TEXT, status=2)
        assert f"{'K' if 'type_k' in types else 'V'} of layer 0 is of type" in files.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_profile_reads_them_and_the_version_stays(files: Files, kind: str) -> None:
    _, old, _ = KINDS[kind]
    snapshot = files.snapshot()
    expected = files.run(TEXT + " and on", "-ctk", "q8_0", "-ctv", "q8_0")["text"]
    data = files.write(snapshot, old, kind=kind, type_k="q8_0", type_v="q8_0", rotated=True)
    found = files.run(TEXT + " and on", "--prompt-cache-profile", "mainline")
    assert (found["text"], found["kv_cache"]["type_k"]) == (expected, "q8_0")
    assert files.version == old and files.cache.read_bytes() != data
    held = open_carrier(files.cache, Foreign(files.outline, llama=ImportOptions("mainline")))
    assert (len(held.tokens) > len(snapshot.tokens), held.origin["kind"]) == (True, kind)
    files.run(TEXT, status=2)  # the file says no more of itself than before


@pytest.mark.parametrize("profile", ["thetom-2026-05", "mainline-unrotated"])
def test_rows_without_rotation_are_decoded_and_their_file_is_left_alone(files: Files, profile: str) -> None:
    snapshot = files.snapshot()
    expected = files.run(TEXT + " and on")["text"]
    data = files.write(snapshot, 9, type_k="q8_0", type_v="q8_0", rotated=False)
    found = files.run(TEXT + " and on", "--prompt-cache-profile", profile, "--prompt-cache-all")
    assert found["kv_cache"]["type_k"] == "f16" and found["timing"]["reused_tokens"] >= len(snapshot.tokens) - 2
    assert found["text"] == expected
    assert "they are decoded to f16 for this run, and the file is not written" in files.err
    assert files.cache.read_bytes() == data


def test_a_forks_turbo_rows_are_taken_by_its_profile(files: Files) -> None:
    data = files.write(files.snapshot(), 9, profile="thetom-2026-05", type_k="turbo4", type_v="turbo4")
    files.run(TEXT, status=2)
    assert "it is turbo4 of profile thetom-2026-05" in files.err
    files.run(TEXT + " on", "--prompt-cache-profile", "thetom-2026-05")
    assert files.cache.read_bytes() == data


@pytest.mark.parametrize(
    ("rotated", "profile"),
    [(True, "thetom-2026-05"), (True, "mainline-unrotated"), (False, "mainline"), (False, None)],
)
def test_a_wrong_reading_shows_at_the_first_token(files: Files, rotated: bool, profile: str | None) -> None:
    """Also of a file of the current version, which mainline writes without the rotation if it is told to."""
    version = 9 if profile else 10
    data = files.write(files.snapshot(), version, type_k="q4_0", type_v="q8_0", rotated=rotated)
    files.run(TEXT + " on", *(("--prompt-cache-profile", profile) if profile else ()), status=2)
    assert "of the first token is not what this model computes for it" in files.err
    assert files.cache.read_bytes() == data


def test_a_file_of_another_model_of_these_sizes_shows_at_the_first_token(files: Files) -> None:
    data = files.write(files.snapshot(), 10)
    write_tiny(files.model, replace(MODELS["llama"], seed=11))
    files.run(TEXT + " on", status=2)
    assert "the file is another model's" in files.err and files.cache.read_bytes() == data


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_floats_keep_version_and_layout_when_they_are_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, kind: str
) -> None:
    files = Files(tmp_path, capsys, model)
    snapshot = files.snapshot()
    for version in KINDS[kind][1:]:
        state = export_llama_state(snapshot, ExportOptions(kind=kind, v_trans=True))
        state = replace(state, version=version, memories=tuple(map(_second_of_two_streams, state.memories)))
        data = files.write_state(state)
        files.run(TEXT + " and on")
        assert files.cache.read_bytes() != data
        found = open_llama_state(files.cache)
        assert (found.version, found.kind, len(found.tokens) > len(snapshot.tokens)) == (version, kind, True)
        for memory in found.memories:
            assert [len(stream.cells) > 0 for stream in memory.streams] == [False, True]
            assert memory.streams[1].v_trans == 1
            assert set(memory.streams[1].cells.sequence_ids) == {3}


def _second_of_two_streams(memory: Memory) -> Memory:
    """The memory of a context of two streams, with its cells in the second as sequence 3."""
    stream = memory.streams[0]
    cells = replace(stream.cells, sequence_ids=np.full_like(stream.cells.sequence_ids, 3))
    return Memory((Stream(cells.of_sequence(np.empty(0, np.int32))), replace(stream, cells=cells)))


def test_a_window_models_rewritten_sequence_holds_what_the_next_query_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path, capsys, "gemma3")
    files.write(files.snapshot(), 3, kind="sequence")
    files.run(TEXT * 4)
    base, window = open_llama_state(files.cache).memories
    assert window.n_cells == 160 < base.n_cells


def test_a_session_in_our_carrier_goes_back_to_its_version_after_a_run(files: Files) -> None:
    files.write(files.snapshot(), 9)
    own = files.folder / "own.gguf"
    files("convert", str(files.cache), str(own), "-m", str(files.model))
    session, files.cache = files.cache, own
    files.run(TEXT + " and on")
    files("convert", str(own), str(session), "--to", "session")
    files.cache = session
    assert files.version == 9
    assert len(open_llama_state(session).tokens) > 100


def test_blocks_for_an_old_version_are_not_made_without_a_profile(files: Files) -> None:
    files.write(files.snapshot(), 9)
    target = files.folder / "b.session"
    argv = ("convert", str(files.cache), str(target), "-m", str(files.model), "-ctk", "q8_0")
    files(*argv, status=2)
    assert "K of type q8_0 is stored rotated by some builds" in files.err and not target.exists()
    for rotation, profile in ((True, "mainline"), (False, "mainline-unrotated"), (False, "thetom-2026-05")):
        files(*argv, "--profile", profile)
        held = open_carrier(target, Foreign(files.outline, llama=ImportOptions(profile)))
        assert (held.layers[0].k.codec.rotation == "hadamard") is rotation


def test_an_mlx_cache_is_taken_in_its_order_of_channels_alone_and_keeps_what_was_said_beside_it(files: Files) -> None:
    snapshot = files.snapshot()
    expected = files.run(TEXT + " and on")["text"]
    for neighbours in (True, False):  # mlx-lm's files do not say it, and the original weights of llama turn halves
        said = {"carrier": "mlx-lm", "traditional": neighbours, "metadata_model": "someone/this"}
        write_mlx_cache(files.cache, replace(snapshot, origin=said))
        data = files.cache.read_bytes()
        found = files.run(TEXT + " and on", status=2 if neighbours else 0)
        if neighbours:
            assert "channels in another order (convert --rope-order)" in files.err
            assert files.cache.read_bytes() == data
        else:
            assert found["text"] == expected and files.cache.read_bytes() != data
            assert open_safetensors(files.cache).metadata["0.model"] == "someone/this"


def test_restore_takes_the_profile_too(files: Files) -> None:
    data = files.write(files.snapshot(), 9, type_k="q8_0", type_v="q8_0", rotated=False)
    argv = ("cache", "restore", str(files.cache), "-m", str(files.model), "-no-cnv", "-p", " and", "-n", "2")
    files(*argv, status=2)
    assert "--prompt-cache-profile" in files.err
    files(*argv, "--prompt-cache-profile", "thetom-2026-05")
    files(*argv, "--prompt-cache-profile", "thetom", status=2)
    assert "profile: expected one of mainline, thetom-2026-05, mainline-unrotated, found 'thetom'" in files.err
    assert files.cache.read_bytes() == data


def test_a_profile_without_a_file_has_no_effect_and_says_so(files: Files) -> None:
    argv = ("run", "-m", str(files.model), "-no-cnv", "-p", "a", "-n", "1")
    files(*argv, "--prompt-cache-profile", "mainline")
    assert "--prompt-cache-profile: no effect without --prompt-cache FILE" in files.err


@pytest.mark.parametrize("kind", [FileKind.SNAPSHOT, *(kind for kind, _, _ in KINDS.values()), FileKind.SAFETENSORS])
def test_a_new_prompt_cache_is_its_owners_alone_and_an_old_one_keeps_its_permissions(
    files: Files, kind: FileKind
) -> None:
    snapshot = files.snapshot()
    before = os.umask(0)
    try:
        write_carrier(files.cache, snapshot, kind)
        assert stat.S_IMODE(files.cache.stat().st_mode) == 0o600
        files.cache.chmod(0o644)
        files.run(TEXT + " and on")
        assert stat.S_IMODE(files.cache.stat().st_mode) == 0o644
    finally:
        os.umask(before)

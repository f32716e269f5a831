"""`tqgguf run --prompt-cache`: the same text as without, less to evaluate, and a file that nothing can break."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import U32, Typed
from snapshots import make_snapshot
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.carriers.table import Foreign, open_carrier, write_carrier
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.outline import outline_of_gguf
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.write import write_snapshot

TEXT = " ".join(f"the {word} on the water" for word in ("stone", "heron", "boat", "reed", "otter", "ring") * 24)
TURBO = ("-ctk", "turbo4", "-ctv", "turbo3")
MODELS = {"llama": TinyModel(), "gemma3": TinyModel("gemma3", window=160, window_pattern=2, head_dim=128, n_layers=3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        write_tiny(folder / f"{name}.gguf", model)
    return folder


class Runs:
    """Calls `tqgguf run --json` on a model and a cache file."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, cache: Path) -> None:
        self.capsys, self.model, self.cache = capsys, model, cache
        self.err = ""

    def __call__(self, prompt: str, *flags: str, status: int = 0, cached: bool = True) -> dict[str, Any]:
        argv = ["run", "-m", str(self.model), "-no-cnv", "-p", prompt, "--temp", "0", "-n", "6", "--json", *flags]
        argv += ["--prompt-cache", str(self.cache)] if cached else []
        found = main(argv)
        out, self.err = self.capsys.readouterr()
        assert found == status, self.err
        return json.loads(out) if out else {}


@pytest.fixture(params=MODELS)
def runs(request: Any, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runs:
    return Runs(capsys, folder / f"{request.param}.gguf", tmp_path / "cache.gguf")


@pytest.fixture
def llama(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runs:
    return Runs(capsys, folder / "llama.gguf", tmp_path / "cache.gguf")


def timing(result: dict[str, Any]) -> tuple[int, int]:
    return result["timing"]["prompt_tokens"], result["timing"]["reused_tokens"]


@pytest.mark.parametrize(
    "prompt", [TEXT, TEXT[:2700], TEXT + " and more", TEXT[:2100] + " other words" * 9, "short"], ids=len
)
def test_a_warm_run_gives_the_text_of_a_cold_one(runs: Runs, prompt: str) -> None:
    cold = runs(prompt, *TURBO, cached=False)
    runs(TEXT, *TURBO)
    warm = runs(prompt)
    assert warm["text"] == cold["text"]
    assert sum(timing(warm)) == timing(cold)[0]
    assert timing(warm)[1] == (0 if prompt == "short" else timing(warm)[1] // 256 * 256)
    assert warm["kv_cache"]["type_k"] == "turbo4"
    if prompt != "short":
        assert timing(warm)[1] >= 512


def test_a_prompt_that_the_file_holds_already_leaves_it_alone_and_another_replaces_it(llama: Runs) -> None:
    llama(TEXT, *TURBO)
    before = llama.cache.stat().st_mtime_ns, llama.cache.read_bytes()
    for prompt in (TEXT, TEXT[:2000]):
        llama(prompt)
        assert (llama.cache.stat().st_mtime_ns, llama.cache.read_bytes()) == before
    llama(TEXT[:2000] + " elsewhere", "--prompt-cache-ro")
    assert llama.cache.read_bytes() == before[1]
    llama(TEXT[:2000] + " elsewhere")
    assert llama.cache.read_bytes() != before[1]
    assert "tokens are replaced by this prompt's, 768 of them kept; --prompt-cache-ro keeps a file" in llama.err


def test_all_keeps_what_was_generated_and_the_report_says_what_was_taken_up(llama: Runs) -> None:
    first = llama(TEXT[:2000], *TURBO, "--prompt-cache-all")
    held = open_snapshot(llama.cache)
    assert len(held.tokens) == timing(first)[0] + 6
    again = llama(TEXT[:2000])
    assert again["text"] == first["text"]
    assert again["timing"]["reused_generated"] == 0
    write_snapshot(llama.cache, replace(held, prompt_ranges=((0, 600),)))
    goes_on = llama(TEXT[:2000] + " and then", "--prompt-cache-ro")
    timing_ = goes_on["timing"]
    assert timing_["reused_generated"] == timing_["reused_tokens"] - 600 > 0
    assert f"{timing_['reused_generated']} of them generated or from another program)" in llama.err


def test_a_missing_or_empty_file_is_made(llama: Runs) -> None:
    llama("one", *TURBO)
    assert open_snapshot(llama.cache).tokens.size
    llama.cache.write_bytes(b"")
    llama("one", *TURBO)
    assert open_snapshot(llama.cache).tokens.size


def test_the_files_grid_is_adopted(llama: Runs) -> None:
    llama(TEXT, *TURBO, "-ub", "128")
    again = llama(TEXT, "-ub", "512")
    assert "the prompt cache was evaluated in pieces of 128 tokens, so 128 is used" in llama.err
    assert timing(again)[1] % 256 == 128
    assert again["text"] == llama(TEXT, *TURBO, "-ub", "128", cached=False)["text"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-ctk", "turbo3"), "layer 0: type of K: expected turbo3, found turbo4; leave -ctk out"),
        (("-ctv", "turbo4"), "layer 0: type of V: expected turbo4, found turbo3"),
        (("-ctk", "turbo3", "-ctv", "turbo4"), "type of K: expected turbo3, found turbo4"),
        (("--kv-balance", "off"), "layer 0: balance of K: expected off, found full"),
        (("--cache-exact-first", "0"), "layer 0: exact prefix: expected 0, found 4"),
        (("-c", "600"), "expected at most 600, the size of the context; raise -c"),
        (("--rope-freq-base", "5000"), "expected this model's RoPE parameters, found others"),
    ],
)
def test_another_cache_is_refused_by_name_and_the_file_stays(llama: Runs, flags: tuple[str, ...], message: str) -> None:
    llama(TEXT, *TURBO)
    before = llama.cache.read_bytes()
    llama(TEXT[:1000], *flags, status=2)
    assert message in llama.err
    assert llama.err.count("\n") == 1
    assert llama.cache.read_bytes() == before


def test_a_calibration_is_kept_with_the_prompt_and_another_is_refused(llama: Runs, tmp_path: Path) -> None:
    one, other = (str(tmp_path / name) for name in ("one.gguf", "other.gguf"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for path, size in ((one, "256"), (other, "128")):
        assert main(["calibrate", "-m", str(llama.model), "-f", str(text), "-c", size, "-o", path]) == 0
    llama.capsys.readouterr()
    llama(TEXT, *TURBO, "--kv-calibration", one)
    again = llama(TEXT)
    assert again["kv_cache"]["is_calibrated"]
    assert timing(again)[1] > 0
    assert again["text"] == llama(TEXT, *TURBO, "--kv-calibration", one, cached=False)["text"]
    llama(TEXT, "--kv-calibration", one)
    llama(TEXT, "--kv-calibration", other, status=2)
    assert "layer 0: channel scale of K: expected that of" in llama.err


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tokenizer.ggml.eos_token_id": Typed(U32, 1)}, "tokenizer"),
        ({"llama.attention.layer_norm_rms_epsilon": 2e-5}, "hyperparameters"),
        ({}, "weights"),
    ],
)
def test_another_model_is_refused_naming_what_differs(
    llama: Runs, change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    llama(TEXT, *TURBO)
    llama.model = write_tiny(tmp_path / "other.gguf", TinyModel(seed=0 if change else 1), change)
    llama(TEXT, status=2)
    assert f"expected this model's {part}, found others" in llama.err


def test_tokens_that_the_model_does_not_have_are_refused(llama: Runs) -> None:
    llama(TEXT, *TURBO)
    held = open_snapshot(llama.cache)
    write_snapshot(
        llama.cache, replace(held, tokens=np.where(held.tokens == held.tokens[9], 1 << 30, held.tokens), n_vocab=0)
    )
    llama(TEXT, status=2)
    assert "tokens: expected ids below 288, the model's vocabulary, found 1073741824" in llama.err


def test_a_damaged_file_is_refused_and_stays_as_it_is(llama: Runs) -> None:
    llama(TEXT, *TURBO)
    data = bytearray(llama.cache.read_bytes())
    data[-2000] ^= 1
    llama.cache.write_bytes(data)
    llama(TEXT, status=1)
    assert "differ from their checksum" in llama.err
    assert llama.cache.read_bytes() == data
    llama.cache.write_bytes(b"hello")
    llama(TEXT, status=1)
    assert llama.cache.read_bytes() == b"hello"


def test_a_file_whose_folder_cannot_be_searched_is_not_taken_for_a_missing_one(llama: Runs, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")  # as root, whom no folder keeps out, may be running this
    llama.cache = tmp_path / "circle" / "cache.gguf"
    llama("one", "--prompt-cache-ro", status=1)
    assert llama.err == f"tqgguf: error: {llama.cache}: cannot be opened: Too many levels of symbolic links\n"


def test_a_place_that_cannot_be_written_is_said_before_any_work(llama: Runs, tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no" / "file", "does not exist"), (tmp_path, "found a folder")):
        llama.cache = path
        llama("one", status=2)
        assert message in llama.err
        assert llama.err.count("\n") == 1


def limited(n_bytes: int) -> Any:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

    return limit


def command(llama: Runs, prompt: str, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "tqgguf.cli.main", "run", "-m", str(llama.model), "-no-cnv", "-p", prompt]
    return [*words, "--temp", "0", "--prompt-cache", str(llama.cache), *flags]


def test_a_disk_that_is_full_leaves_the_old_file_and_the_answer(llama: Runs) -> None:
    llama("one", *TURBO)
    before = llama.cache.read_bytes()
    done = subprocess.run(
        command(llama, TEXT, "-n", "6"), capture_output=True, text=True, preexec_fn=limited(50_000), check=False
    )
    assert done.returncode == 1
    assert "File too large; the prompt cache was not written" in done.stderr
    assert done.stdout.startswith(TEXT)
    assert llama.cache.read_bytes() == before
    assert os.listdir(llama.cache.parent) == [llama.cache.name]


def test_a_file_that_cannot_keep_what_was_generated_is_told_once_and_by_the_exit_status(llama: Runs) -> None:
    llama("one", *TURBO)
    size = llama.cache.stat().st_size
    llama.cache.unlink()
    for limit in (size + 100, 1000):  # the prompt fits and its answer does not; neither does
        flags = ("-n", "40", "--ignore-eos", "--prompt-cache-all", *TURBO)
        done = subprocess.run(
            command(llama, "one", *flags), capture_output=True, text=True, preexec_fn=limited(limit), check=False
        )
        assert done.returncode == 1
        assert done.stderr.count("the prompt cache was not written") == 1
        assert "ended by -n" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_generates_still_leaves_a_file_with_all(llama: Runs, number: int, status: int) -> None:
    process = subprocess.Popen(
        command(llama, "one", "-n", "-2", "-c", "2048", "--ignore-eos", "--prompt-cache-all", *TURBO),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert len(open_snapshot(llama.cache).tokens) > 4


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(llama: Runs, tmp_path: Path) -> None:
    killed_writes(llama.cache, 12)


@pytest.mark.slow
def test_a_hundred_killed_writers_do_no_harm(llama: Runs) -> None:
    killed_writes(llama.cache, 100)


WRITER = """
import sys, numpy as np
sys.path.insert(0, sys.argv[2])
from snapshots import make_layer, make_snapshot
from tqgguf.formats.snapshots.write import write_snapshot
made = [make_snapshot(n, *(make_layer(i, n, "f16", "f16", n_kv_heads=8) for i in range(4))) for n in (1200, 1300)]
print("ready", flush=True)
for i in range(1000):
    write_snapshot(sys.argv[1], made[i % 2])
"""


def killed_writes(path: Path, times: int) -> None:
    """Kill a process that writes snapshots without end, at random moments; the file must be whole each time."""
    source = random.Random(7)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(source.uniform(0, 0.1))
        process.kill()
        process.wait()
        assert len(open_snapshot(path).tokens) in (1200, 1300)
    orphans = [name for name in os.listdir(path.parent) if name != path.name]
    for name in orphans:
        os.utime(path.parent / name, (0, 0))
    write_snapshot(path, make_snapshot(3))
    assert os.listdir(path.parent) == [path.name]
    assert np.array_equal(open_snapshot(path).tokens, [0, 1, 2])


class TestLlamaCppSessions:
    """Files that llama.cpp wrote, or will read."""

    def test_a_session_of_llama_cpp_is_taken_up_and_stays_a_session(self, llama: Runs, folder: Path) -> None:
        first = llama(TEXT[:1500])
        with open_gguf(llama.model) as file:
            outline = outline_of_gguf(file)
        snapshot = replace(open_snapshot(llama.cache), fingerprint=None, prompt_ranges=(), chunk=0)
        write_carrier(llama.cache, snapshot, FileKind.SESSION)
        head = llama.cache.read_bytes()[:8]
        assert head == b"nsgg" + (10).to_bytes(4, "little")
        again = llama(TEXT[:1500])
        assert timing(again) == (1, timing(first)[0] - 1)
        assert again["text"] == first["text"]
        assert "from another program)" in llama.err
        llama(TEXT[:1500] + " and on")
        assert llama.cache.read_bytes()[:8] == head
        held = open_carrier(llama.cache, Foreign(outline))
        assert len(held.tokens) > timing(first)[0]

    def test_what_no_cache_can_take_up_is_refused_by_the_files_name(self, llama: Runs) -> None:
        llama(TEXT[:300], "-ctk", "q8_0", "-ctv", "q8_0")
        write_carrier(llama.cache, open_snapshot(llama.cache), FileKind.SESSION)
        data = bytearray(llama.cache.read_bytes())
        data[-34:-32] = b"\xff\x7b"  # the scale of the last block of V
        data[-32:] = bytes([127]) * 32
        llama.cache.write_bytes(data)
        llama(TEXT[:300], "-ctk", "q8_0", "-ctv", "q8_0", status=1)
        assert f"error: {llama.cache}: layer 1, V: token " in llama.err
        assert "expected values that f16 holds" in llama.err

    def test_a_session_of_other_types_or_sizes_is_refused(self, llama: Runs, folder: Path) -> None:
        llama(TEXT[:1500])
        write_carrier(llama.cache, open_snapshot(llama.cache), FileKind.SESSION)
        llama(TEXT[:1500], *TURBO, status=2)
        assert "type of K: expected turbo4, found f16" in llama.err
        llama.model = folder / "gemma3.gguf"
        llama(TEXT[:1500], status=1)
        assert "it is of a model of architecture 'llama', the model named is of 'gemma3'" in llama.err

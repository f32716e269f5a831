"""Whatever a file holds, readers and validator answer with a typed error or a finding, agree with each other, write
nothing and stay small. `TQGGUF_FUZZ_EXAMPLES=100000` makes the random ones run for longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from amplifiers import amplifiers
from documents import documents
from fields import VALUES, Field, gguf_fields, safetensors_variants, with_value
from readers import examine, in_memory_folder
from seeds import sound
from test_llama_state import SOUND

from tqgguf.formats.rules.finding import MAX_PER_RULE
from tqgguf.formats.rules.table import RULES

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("TQGGUF_FUZZ_EXAMPLES", "600"))
MEGABYTE = 1 << 20
MAX_MEMORY = 100 * MEGABYTE

hostile = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def files() -> dict[str, bytes]:
    return sound()


@cache
def fields() -> dict[str, tuple[Field, ...]]:
    """Every field of every file, by the file's name; of safetensors the length of the header alone."""
    states = {
        name: tuple(
            (at, 8 if field.endswith("row_bytes") else 4) for field, at in built.fields.items() if at < len(built.data)
        )
        for name, built in SOUND.items()
    }
    containers = {name: tuple(gguf_fields(data)) for name, data in files().items() if data[:4] == b"GGUF"}
    others = {name: ((0, 8),) for name, data in files().items() if data[8:9] == b"{"}
    return states | containers | others


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A path that files are put at for a moment."""
    folder = in_memory_folder()
    path = folder / f"tqgguf-test-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def feed(scratch: Path, data: bytes) -> None:
    """Have all readers take the bytes, and see that the file stays as it was."""
    scratch.unlink(missing_ok=True)  # a file that is still mapped must not change
    scratch.write_bytes(data)
    examine(scratch)
    assert scratch.read_bytes() == data


@pytest.mark.parametrize("name", ["empty", "shard"])
def test_every_field_may_have_any_value(name: str, scratch: Path) -> None:
    for field in fields()[name]:
        for value in VALUES:
            feed(scratch, with_value(files()[name], field, value))


@pytest.mark.parametrize("name", ["safetensors", "mlx cache", "older mlx cache"])
def test_every_value_of_a_safetensors_header_may_be_anything(name: str, scratch: Path) -> None:
    for data in safetensors_variants(files()[name]):
        feed(scratch, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in sorted(sound())])
def test_every_field_of_every_kind_of_file_may_have_any_value(name: str, scratch: Path) -> None:
    for field in fields().get(name, ()):
        for value in VALUES:
            feed(scratch, with_value(files()[name], field, value))


@hostile
@given(st.data())
def test_fields_may_have_any_values_together(scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields())))
    damaged = files()[name] if name in files() else SOUND[name].data
    for _ in range(data.draw(st.integers(1, 3))):
        damaged = with_value(damaged, data.draw(st.sampled_from(fields()[name])), data.draw(st.sampled_from(VALUES)))
    feed(scratch, damaged)


@hostile
@given(documents())
def test_documents_may_hold_anything(scratch: Path, document: bytes) -> None:
    feed(scratch, document)


@hostile
@given(st.data())
def test_bytes_may_be_missing_doubled_moved_and_changed(scratch: Path, data: st.DataObject) -> None:
    damaged = files()[data.draw(st.sampled_from(sorted(files())))]
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(damaged))] * 2)))
        kind = data.draw(st.sampled_from(("cut", "drop", "double", "fill", "flip", "insert")))
        piece = damaged[a:b]
        if kind == "cut":
            damaged = damaged[:a]
        elif kind == "drop":
            damaged = damaged[:a] + damaged[b:]
        elif kind == "double":
            damaged = damaged[:b] + piece[: MEGABYTE // 16] + damaged[b:]
        elif kind == "fill":
            damaged = damaged[:a] + bytes([data.draw(st.sampled_from((0, 1, 127, 255)))]) * len(piece) + damaged[b:]
        elif kind == "flip" and a < len(damaged):
            damaged = damaged[:a] + bytes([damaged[a] ^ data.draw(st.integers(1, 255))]) + damaged[a + 1 :]
        else:
            damaged = damaged[:a] + data.draw(st.binary(max_size=40)) + damaged[a:]
    feed(scratch, damaged)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bin")), ids=lambda path: path.name)
def test_files_that_the_fuzzers_found_interesting_are_answered(path: Path, scratch: Path) -> None:
    feed(scratch, path.read_bytes())


def test_the_corpus_is_there_and_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.glob("*.bin")]
    assert 100 <= len(sizes) <= 500
    assert sum(sizes) < 300_000


VALIDATES_ALL = """
import contextlib, resource, sys
from pathlib import Path
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.inspection.inspect import inspect
from tqgguf.formats.validation.validate import validate

def peak():
    # on Linux ru_maxrss is the parent's to begin with
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
for path in sorted(Path(sys.argv[1]).iterdir()):
    found = validate(path)
    with contextlib.suppress(TqggufError):
        inspect(path)
    print(path.name, len(found), peak() - before, sep="\\t")
"""


def test_a_megabyte_stays_small_in_memory_and_in_findings(tmp_path: Path) -> None:
    """In a process of its own, whose largest size counts."""
    for name, data in amplifiers().items():
        (tmp_path / name).write_bytes(data[: MEGABYTE + MEGABYTE // 2])
    done = subprocess.run([sys.executable, "-c", VALIDATES_ALL, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) == len(amplifiers())
    for name, n_findings, growth in lines:
        assert int(n_findings) <= len(RULES) * (MAX_PER_RULE + 1), name
        assert int(growth) < MAX_MEMORY, name

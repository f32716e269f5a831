"""Before any test imports mlx: tqgguf.runtime, which loads the fast BLAS. Tests compute on the CPU everywhere."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from test_full_disk import can_mount

# Before numpy loads its OpenBLAS. The references in float64 are many small products, for which its threads spin more
# than they compute: minutes are lost where other processes hold the cores. What `-t` asks for still counts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")  # 2^10 cycles of waiting before a thread sleeps

import tqgguf.runtime  # noqa: F401
from tqgguf.runtime.native.library import load_library

try:
    import mlx.core as mx
except ImportError:  # an installation without MLX still tests formats/
    pass
else:
    mx.set_default_device(mx.cpu)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job of a shell, else

# Where no C compiler worked, numpy serves, and there is no library to test.
TESTS_OF_C = [
    "test_c_attention.py",
    "test_c_batches.py",
    "test_c_codecs.py",
    "test_c_library.py",
    "test_packed_rows.py",
    "test_row_layers.py",
    "test_weight_sizes.py",
]
collect_ignore = [] if load_library() else [*TESTS_OF_C]
if importlib.util.find_spec("llama_cpp") is None:  # an optional oracle, which takes minutes to build
    collect_ignore += ["test_llama_converted.py", "test_llama_resume.py"]
if not can_mount():
    collect_ignore.append("test_full_disk.py")


@pytest.fixture(scope="session", autouse=True)
def no_calibrations_of_the_user():
    """The cache folder of whoever runs the tests may hold calibrations, which run and eval would take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path(__file__).parent.parent / "build" / "test-cache"))
        yield


@pytest.fixture(scope="session")
def smollm2():
    """The embedded default model, loaded once for all tests; never to be changed."""
    from tqgguf.runtime.models.load import embedded_model, open_model

    return open_model(embedded_model()).load()


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder: an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tqgguf"

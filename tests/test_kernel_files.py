"""CUDA kernels in files: compiled by other processes, under the names that MLX looks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tqgguf.runtime.kernels import kernel_files, launch
from tqgguf.runtime.kernels.compile_cuda import put
from tqgguf.runtime.kernels.kernel_files import KernelFiles, module_name
from tqgguf.runtime.kernels.matrices import ARRANGE

COMPILES = (
    "import sys, pathlib; pathlib.Path(sys.argv[1], sys.argv[2] + '.ptx').write_text(sys.argv[3] + sys.stdin.read())"
)
INPUTS, OUTPUTS = (("x", mx.bfloat16), ("sizes", mx.int32)), (("out", mx.float32),)


def files(folder: Path, program: str = COMPILES) -> KernelFiles:
    return KernelFiles(folder, (sys.executable, "-c", program), ())


def wanted(made: KernelFiles, header: str = "H\n") -> None:
    made.want("tqgguf_k", header, "BODY", INPUTS, OUTPUTS)
    made.wait()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("text", ["", "a", "12345678", "a text of more than one word of the hash\n" * 3])
def test_names_of_modules_are_those_of_cpp(tmp_path: Path, text: str) -> None:
    source = (
        '#include <cstdio>\n#include <string>\nint main(int, char** v) { std::printf("%zx", '
        "std::hash<std::string>{}(v[1])); }"
    )
    (tmp_path / "hash.cpp").write_text(source)
    subprocess.run(["g++", "-o", tmp_path / "hash", tmp_path / "hash.cpp"], check=True)
    expected = subprocess.run([tmp_path / "hash", text], capture_output=True, text=True, check=True).stdout
    assert module_name("custom_kernel_k", text) == f"custom_kernel_k_{expected}"


def test_a_module_is_named_by_the_text_that_mlx_makes(tmp_path: Path) -> None:
    text = (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        "H\nnamespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        "__global__ void custom_kernel_tqgguf_k(\n    const __nv_bfloat16* x,\n    const int32_t* sizes,\n"
        "    float* out) {\nBODY\n}\n\n} // namespace mlx::core::cu\n"
    )
    wanted(files(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.name == module_name("custom_kernel_tqgguf_k", text) + ".ptx"
    assert file.read_text().startswith("mlx::core::cu::custom_kernel_tqgguf_k#include <cuda_fp16.h>")
    assert "const __nv_bfloat16* x,\n    const int32_t* sizes,\n    float* out) {\nBODY\n}" in file.read_text()


def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    first, second = files(tmp_path), files(tmp_path)
    wanted(first)
    wanted(first)
    assert first.n_compiled == 1 and first.seconds > 0
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    wanted(second)
    assert second.n_compiled == 0 and file.stat().st_mtime_ns == before
    wanted(second, "another header\n")
    assert second.n_compiled == 1 and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("program", ["raise SystemExit(1)", None])
def test_what_cannot_be_compiled_is_left_to_mlx(tmp_path: Path, program: str | None) -> None:
    made = (
        KernelFiles(tmp_path, (str(tmp_path / "no such program"),), ()) if program is None else files(tmp_path, program)
    )
    wanted(made)
    assert made.n_compiled == 0 and [*tmp_path.iterdir()] == []


def test_several_are_compiled_at_once(tmp_path: Path) -> None:
    """Each of two waits for the other's file."""
    program = (
        "import sys, time, pathlib\nhere = pathlib.Path(sys.argv[1])\n(here / (sys.argv[2] + '.txt')).write_text('')\n"
        "end = time.time() + 60\n"
        "while len(list(here.glob('*.txt'))) < 2:\n    assert time.time() < end\n    time.sleep(.01)\n"
    )
    made = files(tmp_path, program)
    made._pool = kernel_files.ThreadPoolExecutor(2)
    for header in ("a\n", "b\n"):
        made.want("tqgguf_k", header, "BODY", INPUTS, OUTPUTS)
    made.wait()
    assert made.n_compiled == 2


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    put(str(tmp_path), "m.ptx", b"code")
    assert [file.name for file in tmp_path.iterdir()] == ["m.ptx"] and (tmp_path / "m.ptx").read_bytes() == b"code"


def test_another_text_in_an_included_file_makes_another_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def header() -> str:
        launch._digest.cache_clear()
        return launch.cuda_text(ARRANGE, (("TYPE", 12),), 4, 0, (0, 0))[1]

    before = header()
    assert before == header()
    plain = launch.text_of
    monkeypatch.setattr(
        launch, "text_of", lambda name: plain(name) + ("int x;\n" if name == "file_blocks.metal" else "")
    )
    changed = header()
    monkeypatch.undo()
    launch._digest.cache_clear()
    assert changed != before and changed.splitlines()[:-1] == before.splitlines()[:-1]


def test_a_machine_without_nvrtc_keeps_no_kernels() -> None:
    assert kernel_files.kernel_files() is None

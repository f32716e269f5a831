"""From Metal text to a shared library: the headers here in place of Metal's prelude, MLX's signature as a plain
call."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tqgguf.runtime.kernels.launch import text_of

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "emulator"
COMPILER = next((c for c in ("g++", "clang++") if shutil.which(c)), None)
FLAGS = ["-O0", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-w"]
CHECKS = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-fno-sanitize=vptr"]

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)
_INSTANTIATION = re.compile(r"\n\s*template \[\[host_name.*?decltype\((.*?)\) .*?;\n", re.S)
_BUFFER = re.compile(r"(const )?(?:device|constant) ([\w<>]+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")
_ATTRIBUTE = re.compile(r"\w+ (\w+) \[\[")


@dataclass(frozen=True)
class Signature:
    """MLX's signature of a kernel: the call that instantiates it, its buffers as (type, name), its attributes."""

    call: str
    buffers: tuple[tuple[str, str], ...]
    attributes: tuple[str, ...]


def read_signature(text: str) -> Signature:
    """AssertionError where MLX has changed how it generates kernels: what is read here must then be looked at."""
    found = _SIGNATURE.search(text)
    assert found, "MLX's generated kernel signature has changed"
    instantiation = _INSTANTIATION.search(text)
    buffers, attributes = [], []
    for parameter in map(str.strip, found.group(2).split(",\n")):
        buffer = _BUFFER.match(parameter)
        if buffer:
            const, kind, reference, name, index = buffer.groups()
            assert reference == "*" and int(index) == len(buffers), f"unexpected kernel argument: {parameter}"
            buffers.append((f"{const or ''}{kind}", name))
        else:
            attribute = _ATTRIBUTE.match(parameter)
            assert attribute, f"unexpected kernel argument: {parameter}"
            attributes.append(attribute.group(1))
    return Signature(instantiation.group(1) if instantiation else found.group(1), tuple(buffers), tuple(attributes))


def cpp_source(text: str) -> str:
    """The text as C++: the emulator's prelude instead of Metal's, and a function that calls the kernel."""
    signature = read_signature(text)
    body = _INSTANTIATION.sub("\n", text).replace(text_of("prelude.metal"), "")
    body = re.sub(r"\[\[[^\]]*\]\]", "", body)  # attributes of MSL
    arguments = [f"({kind}*)buffers[{i}]" for i, (kind, _) in enumerate(signature.buffers)]
    arguments += [f"emulator::{name}()" for name in signature.attributes]
    return f"""#include "run.h"
#line 1 "kernel.metal"
{body}
#line 1 "call"
static void call(void* given) {{
  void** buffers = (void**)given;
  {signature.call}({", ".join(arguments)});
}}
extern "C" __attribute__((visibility("default"))) int run_kernel(
    void** buffers, const uint* grid, const uint* size, uint64_t seed, char* error) {{
  return emulator::run_grid(call, buffers, grid, size, seed, error);
}}
"""


def build(text: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a kernel's text, made once for its contents."""
    return _build(cpp_source(text), defines)


@lru_cache(maxsize=512)
def _build(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    assert COMPILER, "the emulator needs g++ or clang++"
    command = [COMPILER, *FLAGS, *CHECKS, *native_flags(), *[f"-D{d}" for d in defines]]
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    library = BUILD / f"{_digest(source, headers, *command)}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        cpp = BUILD / f"{library.stem}-{os.getpid()}.cpp"
        cpp.write_text(source)
        _make(library, *command, f"-I{_precompiled(headers, command)}", f"-I{HERE}", str(cpp))
        cpp.unlink()
    return ctypes.CDLL(str(library))


def _precompiled(headers: str, command: Sequence[str]) -> Path:
    """A folder with run.h as g++ has read it, which is a third of what a kernel takes; clang++ passes it by."""
    folder = BUILD / _digest(headers, *command)
    header = folder / "run.h.gch"
    if command[0] == "g++" and not header.exists():
        folder.mkdir(exist_ok=True)
        _make(header, *command, f"-I{HERE}", "-xc++-header", str(HERE / "run.h"))
    return folder


def _make(product: Path, *command: str) -> None:
    """Have a compiler make a file, whoever else makes the same one."""
    made = product.with_name(f"{product.name}-{os.getpid()}")
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} refuses the kernel's text:\n{done.stderr[:4000]}"
    made.rename(product)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join([str(HERE), *parts]).encode()).hexdigest()[:24]


def native_flags() -> list[str]:
    """Half floats by instructions, where this CPU has them."""
    info = Path("/proc/cpuinfo")
    return ["-mf16c"] if info.exists() and " f16c" in info.read_text() else []

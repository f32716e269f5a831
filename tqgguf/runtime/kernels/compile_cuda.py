"""A program that compiles one CUDA kernel by NVRTC and puts it where MLX looks for kernels that it has compiled before.

    python compile_cuda.py LIBRARY FOLDER MODULE KERNEL OPTION... < TEXT

A process of its own for each: NVRTC compiles one text at a time in a process. Knows nothing of the rest of the package,
so that it starts at once. Ends with status 1 and NVRTC's log where the text does not compile.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from typing import Any


def compiled(library: Any, text: bytes, kernel: bytes, options: list[str]) -> tuple[bytes, bytes]:
    """The kernel's machine code and its name there. SystemExit with NVRTC's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
    _check(library.nvrtcAddNameExpression(program, kernel))
    given = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
    if library.nvrtcCompileProgram(program, len(options), given):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        library.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode(errors="replace"))
    name = ctypes.c_char_p()
    _check(library.nvrtcGetLoweredName(program, kernel, ctypes.byref(name)))
    _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetCUBIN(program, code))
    return code.raw, name.value or b""


def _check(result: int) -> None:
    if result:
        raise SystemExit(f"NVRTC: error {result}")


def put(folder: str, name: str, content: bytes) -> None:
    """A file that is there whole or not at all."""
    handle, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(path, os.path.join(folder, name))


def main(library: str, folder: str, module: str, kernel: str, *options: str) -> None:
    """Compile the text on standard input with the NVRTC at `library`, and put the result into `folder` under the names
    by which MLX looks for it."""
    code, name = compiled(ctypes.CDLL(library), sys.stdin.buffer.read(), kernel.encode(), list(options))
    put(folder, f"{module}.txt", b"%s\t%s\n" % (kernel.encode(), name))
    put(folder, f"{module}.ptx", code)  # last: MLX asks whether it is there


if __name__ == "__main__":
    main(*sys.argv[1:])

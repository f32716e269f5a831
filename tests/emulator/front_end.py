"""Metal text under clang's front end: address spaces, names, types and implicit doubles, as Metal sees them."""

from __future__ import annotations

import re

import clang.cindex

from emulator.builder import HERE, read_signature
from tqgguf.runtime.kernels.launch import text_of

_INSTANTIATION = re.compile(r"\n\s*template \[\[host_name.*?decltype\((.*?)\) .*?;\n", re.S)
_FLAGS = [
    *("-xc++", "-std=c++14", "-nostdinc", "-ffreestanding", "-Wall", "-Wdouble-promotion", "-Wno-unknown-attributes"),
    *("-Wno-ignored-attributes", "-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-unused-variable"),
    *("-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-shift-count-overflow", "-Wno-unknown-pragmas"),
]


def complaints(text: str) -> list[str]:
    """What clang says of MLX's generated text of a kernel: line and message of each error and warning."""
    call = read_signature(text).call
    body = _INSTANTIATION.sub(f"\ntemplate decltype({call}) {call};\n", text) if "<" in call else text
    body = body.replace(text_of("prelude.metal"), "")
    source = f'#include "{HERE / "address_spaces.h"}"\n#line 1 "kernel.metal"\n{body}'
    unit = clang.cindex.Index.create().parse("kernel.cpp", args=_FLAGS, unsaved_files=[("kernel.cpp", source)])
    return [f"line {d.location.line}: {d.spelling}" for d in unit.diagnostics]

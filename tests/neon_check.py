"""Cross-compile the C library for arm64 and hold its NEON path to numpy's and gguf-py's values under qemu-user.

    python tests/neon_check.py [--native]

Needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user (Debian's names). --native checks this machine's own
paths with its own compiler instead. What is checked is in neon_check.c.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf_rows import SERVED, float64, matrix

from tqgguf.conversion.row_encoding import in_numpy
from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import Codec, make_codec, resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.native.library import CodecStruct, codec_struct, is_supported, searched_struct

HERE = Path(__file__).parent
NATIVE = HERE.parent / "tqgguf" / "runtime" / "native"
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", f"-I{NATIVE}"]
N_ROWS = 21
MATRIX = (77, 768)  # an odd number of rows


def rows(head_dim: int) -> np.ndarray:
    """float32 [N_ROWS, head_dim]: usual ones, zeros, spikes, ties, tiny and huge ones."""
    x = np.random.default_rng(head_dim).standard_normal((N_ROWS, head_dim)).astype(np.float32)
    x[1] = 0.0
    x[2] = np.where(np.arange(head_dim) == 3, 1e3, 0.0)
    x[3] = np.round(x[3] * 4) / 4
    x[4:6] *= np.array([[1e-6], [1e-12]], np.float32)
    x[6:8] *= np.array([[6e4], [1e30]], np.float32)
    return x


def write_codecs(path: Path) -> None:
    with path.open("wb") as file:
        for head_dim in (64, 96, 128, 192, 256):
            for name in CACHE_TYPE_NAMES:
                try:
                    codec = resolve_codec(name, head_dim, "k")
                except RequestError:
                    continue
                assert is_supported(codec)
                struct, values = codec_struct(codec), rows(head_dim)
                blocks = codec.encode(values) if struct.is_encoded else None
                _write_codec(file, codec, struct, values, blocks)
            codec = make_codec("iq4_nl", head_dim, None)
            _write_codec(file, codec, searched_struct(codec), rows(head_dim), in_numpy("iq4_nl", rows(head_dim)))


def _write_codec(
    file: BinaryIO, codec: Codec, struct: CodecStruct, values: np.ndarray, blocks: np.ndarray | None
) -> None:
    file.write(bytes(struct) + np.int32(N_ROWS).tobytes() + values.tobytes())
    if blocks is not None:
        codes, scales = codec.split(blocks)
        file.write(codes.tobytes() + scales.tobytes())


def write_matrices(path: Path) -> None:
    with path.open("wb") as file:
        for name in SERVED:
            for n_x in (1, 3):
                tensor, x = matrix(name, *MATRIX), rows(MATRIX[1])[:n_x]
                x[1:] = x[:1] + 1  # the ones of usual size
                values = float64(tensor)
                row_bytes = len(tensor.data) // MATRIX[0]
                file.write(np.array([tensor.type_id, row_bytes, *MATRIX, n_x], np.int64).tobytes() + tensor.data)
                for floats in (x, values, x @ values.T):
                    file.write(floats.astype(np.float32).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="check the C library's NEON path under qemu-user")
    parser.add_argument("--native", action="store_true", help="this machine's compiler and paths")
    native = parser.parse_args().native
    compiler, emulator = (
        ("cc", []) if native else ("aarch64-linux-gnu-gcc", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])
    )
    sources = [path for path in sorted(NATIVE.glob("*.c")) if path.name != "blas_forward.c"]
    with tempfile.TemporaryDirectory() as folder:
        codecs, matrices, program = (Path(folder) / name for name in ("codecs", "matrices", "neon_check"))
        write_codecs(codecs)
        write_matrices(matrices)
        subprocess.run(
            [compiler, *FLAGS, HERE / "neon_check.c", *sources, "-o", program, "-lm", "-lpthread"], check=True
        )
        sys.exit(subprocess.run([*emulator, program, codecs, matrices]).returncode)


if __name__ == "__main__":
    main()

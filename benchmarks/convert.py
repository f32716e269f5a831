"""`tqgguf convert` of a seeded f16 model of 2 GB: rates and peak memory, beside copying the file and flushing it.

    python benchmarks/convert.py FOLDER [--rounds 3] [--layers 15] [CONVERSION ...]

FOLDER needs room for three such files, all of which are removed at the end. Every round does each conversion once, in
turn; the source is in the page cache, and times include the flush to the disk. Peak memory is the process's, as the
system counts it, so that pages of the mapped source are in it; `start` is what a dry run takes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.gguf.types import MetadataType, ValueType
from tqgguf.formats.gguf.write import GgufTensor, entry, text_entry, u32_entry, write_gguf
from tqgguf.formats.models.embedded import embedded_model

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 2048, 8192, 32, 8
F32, F16 = 0, 1  # ggml type ids
RUN = 1 << 22  # values at once

COPY = """
import os, shutil
shutil.copyfile(*sys.argv[1:])
flushed = os.open(sys.argv[2], os.O_RDWR)
os.fsync(flushed)
"""
CONVERT = "from tqgguf.cli.main import main; sys.exit(main(sys.argv[1:]))"
# a child's ru_maxrss begins with its parent's pages on Linux, VmHWM with none
PROCESS = """
import atexit, resource, sys
def tell():
    try:
        with open("/proc/self/status") as status:
            peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(peak, file=sys.stdout)
atexit.register(tell)
"""
CONVERSIONS: dict[str, tuple[str, ...]] = {
    "start": ("out.gguf", "--type", "q8_0", "--dry-run"),
    "copied file": (),
    "copy": ("out.gguf",),
    "split": ("out.gguf", "--split-max-size", "500M"),
    "q8_0": ("out.gguf", "--type", "q8_0"),
    "q4_0": ("out.gguf", "--type", "q4_0"),
    "bf16": ("out.gguf", "--type", "bf16"),
    "iq4_nl": ("out.gguf", "--type", "iq4_nl"),
    "mlx folder": ("out",),
}


def write_model(path: Path, n_layers: int) -> None:
    """A llama with the embedded model's tokenizer and random weights."""
    with open_gguf(str(embedded_model())) as file:
        kept = [raw for key, raw in file.raw_entries().items() if key.startswith("tokenizer.")]
        n_vocab = len(file.metadata["tokenizer.ggml.tokens"])
    numbers = {
        "block_count": n_layers,
        "context_length": 2048,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HIDDEN // HEADS,
        "vocab_size": n_vocab,
    }
    entries = [
        text_entry("general.architecture", "llama"),
        *(u32_entry(f"llama.{name}", number) for name, number in numbers.items()),
        entry("llama.attention.layer_norm_rms_epsilon", MetadataType(ValueType.F32), 1e-5),
        *kept,
    ]
    kv = HIDDEN * KV_HEADS // HEADS
    matrices = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN), "ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    rng = np.random.Generator(np.random.PCG64(0))
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{i}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    with path.open("wb") as out:
        write_gguf(out, entries, [_tensor(name, shape, rng) for name, shape in shapes.items()])


def _tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> GgufTensor:
    n_values = int(np.prod(shape))

    def matrix() -> Iterator[bytes]:
        for start in range(0, n_values, RUN):
            values = rng.standard_normal(min(RUN, n_values - start), np.float32) * np.float32(0.02)
            yield values.astype(np.float16).tobytes()

    if len(shape) == 1:
        return GgufTensor(name, shape, F32, 4 * n_values, lambda: [np.ones(shape, np.float32).tobytes()])
    return GgufTensor(name, shape, F16, 2 * n_values, matrix)


def measure(argv: list[str]) -> tuple[float, int]:
    """Seconds, and bytes of memory at the peak, of a process that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return time.perf_counter() - started, int(done.stdout.split()[-1])


def command(name: str, source: Path, folder: Path) -> list[str]:
    if name == "copied file":
        return [sys.executable, "-c", PROCESS + COPY, str(source), str(folder / "out.gguf")]
    target, *flags = CONVERSIONS[name]
    return [sys.executable, "-c", PROCESS + CONVERT, "convert", str(source), str(folder / target), *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("conversions", nargs="*", metavar="CONVERSION", help=", ".join(CONVERSIONS))
    asked = parser.parse_intermixed_args()
    folder = asked.folder / "tqgguf-bench-convert"
    folder.mkdir()
    try:
        source, made = folder / "source.gguf", folder / "made"
        write_model(source, asked.layers)
        n_bytes = source.stat().st_size
        print(f"source: {n_bytes:,} bytes, {asked.layers} layers", flush=True)
        best: dict[str, tuple[float, int]] = {}
        for _ in range(asked.rounds):
            for name in asked.conversions or CONVERSIONS:
                made.mkdir()
                seconds, peak = measure(command(name, source, made))
                shutil.rmtree(made)
                before = best.get(name, (seconds, peak))
                best[name] = (min(before[0], seconds), max(before[1], peak))
        for name, (seconds, peak) in best.items():
            print(f"{name:12} {seconds:6.2f} s  {n_bytes / seconds / 1e6:6.0f} MB/s  peak {peak / 1e6:6.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""`tqgguf bench`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.bench_request import BenchRequest
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, stretched_freq_scale, takes_flags
from tqgguf.formats.missing_mlx import needs_mlx

EXAMPLES = (
    "tqgguf bench -m model.gguf -p 256 -n 16 -d 0,512 -ctk turbo4 -ctv turbo3 -r 2 --report bench",
    "tqgguf bench --compare bench/bench.json bench/bench.json    # two runs: ratios, and what the spread says of them",
)


class BenchCommand(VerbCommand):
    """A typer command that takes llama-bench's flags of tests, and llama.cpp's of model and evaluation."""

    verb = "bench"
    examples = EXAMPLES


@takes_flags("bench", BenchRequest())
def bench(ctx: typer.Context, **values: Any) -> None:
    """Measure speed and memory of KV cache types on this machine, and how often their answers are f16's.

    In the manner of llama-bench: prefill (pp) and decode (tg) of random tokens at several depths, medians of
    repetitions with the slowest and the fastest. Ctrl-C keeps what was measured by then.
    """
    given = sorted_arguments(ctx)
    values = {**values, "rope_freq_scale": stretched_freq_scale(values)}
    request = BenchRequest(
        **fields_of(BenchRequest, values, given=given.given, notices=given.notices, words=given.words)
    )
    if request.compare is not None:
        from tqgguf.cli import bench_compare

        raise typer.Exit(bench_compare.compare(*request.compare, request.form))
    with needs_mlx("tqgguf bench"):
        from tqgguf.cli import bench_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(bench_command.bench(request))

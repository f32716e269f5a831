"""`tqgguf bench`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in BenchRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.bench_request import BENCH_FLAGS, FORMS, BenchRequest
from tqgguf.cli.options import KV_HEADING
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments, stretched_freq_scale
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.measuring.cache_pairs import DEFAULT_PAIRS, MLX_BITS

_DEFAULT = BenchRequest()
_TESTS = "What is measured"

EXAMPLES = (
    "tqgguf bench -m model.gguf -p 256 -n 16 -d 0,512 -ctk turbo4 -ctv turbo3 -r 2 --report bench",
    "tqgguf bench --compare bench/bench.json bench/bench.json    # two runs: ratios, and what the spread says of them",
)


class BenchCommand(VerbCommand):
    """A typer command that takes llama-bench's flags of tests, and llama.cpp's of model and evaluation."""

    flags = BENCH_FLAGS
    examples = EXAMPLES


def bench(
    ctx: typer.Context,
    model: options.Model = None,
    n_batch: options.BatchSize = _DEFAULT.n_batch,
    n_ubatch: options.UbatchSize = _DEFAULT.n_ubatch,
    rope_scaling: options.RopeScaling = "linear",
    rope_scale: options.RopeScale = 0.0,
    rope_freq_base: options.RopeFreqBase = _DEFAULT.rope_freq_base,
    rope_freq_scale: options.RopeFreqScale = _DEFAULT.rope_freq_scale,
    threads: options.Threads = _DEFAULT.threads,
    prompts: Annotated[
        str, option(_TESTS, "Tokens of prompts whose prefill is timed; 0: none.", "-p", "--n-prompt", metavar="LIST")
    ] = _DEFAULT.prompts,
    answers: Annotated[
        str, option(_TESTS, "Tokens of answers whose decoding is timed; 0: none.", "-n", "--n-gen", metavar="LIST")
    ] = _DEFAULT.answers,
    depths: Annotated[
        str,
        option(
            _TESTS,
            "Tokens that the cache holds before, in whole pages of 128. All caches are held at once.",
            "-d",
            "--n-depth",
            metavar="LIST",
        ),
    ] = _DEFAULT.depths,
    repetitions: Annotated[
        int, option(_TESTS, "Each test so many times, the caches in turn.", "-r", "--repetitions")
    ] = _DEFAULT.repetitions,
    n_match: Annotated[
        int,
        option(
            _TESTS, "Tokens of greedy answers that are compared with f16's, on prompts in blocks; 0: none.", "--match"
        ),
    ] = _DEFAULT.n_match,
    n_match_prompts: Annotated[int, option(_TESTS, "Such prompts.", "--match-prompts")] = _DEFAULT.n_match_prompts,
    no_memory: Annotated[
        bool, option(_TESTS, "Leave out peak memory, which is measured in a process for each cache.", "--no-memory")
    ] = False,
    seed: Annotated[
        int, option(_TESTS, "Of the tests' random tokens and the order of caches.", "-s", "--seed")
    ] = _DEFAULT.seed,
    text_file: options.TextFile = None,
    types_k: Annotated[
        str | None, option(KV_HEADING, "Types of K, each with each of -ctv.", "-ctk", "--cache-type-k", metavar="LIST")
    ] = None,
    types_v: Annotated[str | None, option(KV_HEADING, "Types of V.", "-ctv", "--cache-type-v", metavar="LIST")] = None,
    cache_types: Annotated[
        str | None,
        option(
            KV_HEADING,
            f"Instead of both: pairs K/V, or mlx-lm's own cache ({', '.join(MLX_BITS)}); f16 is always among them. "
            f"Default: {DEFAULT_PAIRS.replace(',', ', ')}.",
            "--cache-types",
            metavar="LIST",
        ),
    ] = None,
    balance: options.Balance = _DEFAULT.balance,
    exact_first: options.ExactFirst = _DEFAULT.exact_first,
    calibration: options.Calibration = _DEFAULT.calibration,
    output: Annotated[
        str, option(OUTPUT, "How results are printed.", "-o", "--output", metavar=f"[{'|'.join(FORMS)}]")
    ] = _DEFAULT.output,
    report: Annotated[
        str | None,
        option(OUTPUT, "Also write a page with plots, JSON and CSV into this folder.", "--report", metavar="DIR"),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        option(OUTPUT, "Measure nothing: compare two runs' JSON.", "--compare", metavar="A.json B.json"),
    ] = None,
    json_output: Annotated[bool, option(OUTPUT, "As -o json.", "--json")] = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Measure speed and memory of KV cache types on this machine, and how often their answers are f16's.

    In the manner of llama-bench: prefill (pp) and decode (tg) of random tokens at several depths, medians of
    repetitions with the slowest and the fastest. Ctrl-C keeps what was measured by then.
    """
    given = sorted_arguments(ctx)
    values = {**ctx.params, "rope_freq_scale": stretched_freq_scale(ctx.params)}
    request = BenchRequest(
        **fields_of(BenchRequest, values, given=given.given, notices=given.notices, words=given.words)
    )
    if request.compare is not None:
        from tqgguf.cli import bench_compare

        raise typer.Exit(bench_compare.compare(*request.compare, request.form))
    with needs_mlx("tqgguf bench"):
        from tqgguf.cli import bench_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(bench_command.bench(request))

"""`tqgguf eval`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in EvalRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.eval_request import DEFAULT_CHUNKS, EVAL_FLAGS, EvalRequest
from tqgguf.cli.options import KV_HEADING, MODEL_HEADING, TEXT_HEADING
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments, stretched_freq_scale
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.measuring.cache_pairs import FORMS, MLX_BITS, SIMULATED
from tqgguf.measuring.imitations.simulated_schemes import SCHEMES, VARIANTS

_DEFAULT = EvalRequest()

EXAMPLES = (
    "tqgguf eval --cache-types turbo4,q4_0 -c 256 --chunks 1    # the default model on tqgguf's own text",
    "tqgguf eval -m model.gguf -f text.txt -c 512 --cache-types q8_0,turbo4/turbo3,mlx-q4 --json",
)

_NEEDLE = "A needle in a haystack"


class EvalCommand(VerbCommand):
    """A typer command that takes those of llama-perplexity's flags that concern model, text and evaluation."""

    flags = EVAL_FLAGS
    examples = EXAMPLES


def evaluate(
    ctx: typer.Context,
    model: options.Model = None,
    n_ctx: Annotated[
        int,
        option(MODEL_HEADING, "Tokens of a window, as 2048 or 2k; 0: the model's whole context.", "-c", "--ctx-size"),
    ] = _DEFAULT.n_ctx,
    n_chunks: Annotated[
        int,
        option(
            MODEL_HEADING,
            f"Windows, spread over the text; -1: as many as it gives. Default: {DEFAULT_CHUNKS}, or fewer.",
            "--chunks",
            show_default=False,
        ),
    ] = _DEFAULT.n_chunks,
    n_batch: options.BatchSize = _DEFAULT.n_batch,
    n_ubatch: options.UbatchSize = _DEFAULT.n_ubatch,
    rope_scaling: options.RopeScaling = "linear",
    rope_scale: options.RopeScale = 0.0,
    rope_freq_base: options.RopeFreqBase = _DEFAULT.rope_freq_base,
    rope_freq_scale: options.RopeFreqScale = _DEFAULT.rope_freq_scale,
    threads: options.Threads = _DEFAULT.threads,
    text_file: options.TextFile = None,
    like_llama: Annotated[
        bool,
        option(
            TEXT_HEADING,
            "As llama-perplexity: only the second half of each window is scored, caches are plain.",
            "--like-llama",
        ),
    ] = False,
    cache_types: Annotated[
        str,
        option(
            KV_HEADING,
            "What to compare with f16: K/V or one name for both, another form of it after an @ "
            f"({', '.join(FORMS)}), or mlx-lm's own cache ({', '.join(MLX_BITS)}). After {SIMULATED} what is only "
            f"imitated: other engines' caches ({', '.join(SCHEMES)}), or our types used as they use them, as in "
            f"{SIMULATED}turbo4@mean1 ({', '.join(VARIANTS)}).",
            "--cache-types",
            metavar="LIST",
        ),
    ] = _DEFAULT.cache_types,
    no_tail: Annotated[
        bool,
        option(
            KV_HEADING,
            "Read every key outside the exact prefix from blocks; the f16 tail, as run has it, is a second row.",
            "--no-tail",
        ),
    ] = False,
    balance: options.Balance = _DEFAULT.balance,
    exact_first: options.ExactFirst = _DEFAULT.exact_first,
    calibration: options.Calibration = _DEFAULT.calibration,
    report: Annotated[
        str | None, option(OUTPUT, "Also write a page with plots into this folder.", "--report", metavar="DIR")
    ] = None,
    needle: Annotated[
        bool,
        option(
            _NEEDLE,
            "Instead of scoring the text, hide a number in it and ask for it, at every length and depth.",
            "--needle",
        ),
    ] = False,
    needle_lengths: Annotated[
        str | None,
        option(
            _NEEDLE,
            "With --needle: tokens of prompt and answer. Default: a quarter, a half and the whole of -c.",
            "--needle-lengths",
            metavar="LIST",
        ),
    ] = _DEFAULT.needle_lengths,
    needle_depths: Annotated[
        str,
        option(
            _NEEDLE, "With --needle: where the number is, in per cent of the text.", "--needle-depths", metavar="LIST"
        ),
    ] = _DEFAULT.needle_depths,
    seed: Annotated[int, option(_NEEDLE, "Other numbers.", "-s", "--seed")] = _DEFAULT.seed,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object instead of tables.", "--json")] = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Measure what KV cache types cost a model: perplexity, KL divergence from f16, and bits per value.

    Every cache is compared with the f16 cache of the same model over the same text, in one run.
    """
    given = sorted_arguments(ctx)
    values = {**ctx.params, "rope_freq_scale": stretched_freq_scale(ctx.params)}
    request = EvalRequest(**fields_of(EvalRequest, values, given=given.given, notices=given.notices, words=given.words))
    with needs_mlx("tqgguf eval"):
        # lazily: they bring MLX in, for which --help and refusals must not wait
        from tqgguf.cli import eval_command, needle_command

    serve = needle_command.find_needles if request.needle else eval_command.evaluate
    raise typer.Exit(serve(request))

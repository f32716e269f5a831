"""`tqgguf eval`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in EvalRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli.eval_request import DEFAULT_CHUNKS, EVAL_FLAGS, EvalRequest
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments, stretched_freq_scale
from tqgguf.cli.version import print_version
from tqgguf.formats.cache_spec import BALANCE_MODES
from tqgguf.runtime.cache_pairs import FORMS, MLX_BITS, SIMULATED
from tqgguf.runtime.missing_mlx import needs_mlx
from tqgguf.runtime.simulated_schemes import SCHEMES, VARIANTS

_DEFAULT = EvalRequest()

EXAMPLES = (
    "tqgguf eval --cache-types turbo4,q4_0 -c 512 --chunks 1    # the default model on tqgguf's own text",
    "tqgguf eval -m model.gguf -f text.txt --cache-types q8_0,turbo4/turbo3,mlx-q4 --json",
)

_BALANCE = f"[{'|'.join(BALANCE_MODES)}]"
_MODEL, _TEXT, _KV, _NEEDLE = "Model and evaluation", "Text", "KV caches", "A needle in a haystack"


class EvalCommand(VerbCommand):
    """A typer command that takes those of llama-perplexity's flags that concern model, text and evaluation."""

    flags = EVAL_FLAGS
    examples = EXAMPLES


def evaluate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        option(
            _MODEL,
            "GGUF file (any shard), or an MLX model folder. Default: the small model of make run.",
            "-m",
            "--model",
            metavar="PATH",
        ),
    ] = None,
    n_ctx: Annotated[
        int, option(_MODEL, "Tokens of a window; 0: the model's whole context.", "-c", "--ctx-size")
    ] = _DEFAULT.n_ctx,
    n_chunks: Annotated[
        int,
        option(
            _MODEL,
            f"Windows; -1: as many as the text gives. Default: {DEFAULT_CHUNKS}, or what the text gives.",
            "--chunks",
            show_default=False,
        ),
    ] = _DEFAULT.n_chunks,
    n_batch: Annotated[int, option(_MODEL, "Upper bound on -ub.", "-b", "--batch-size")] = _DEFAULT.n_batch,
    n_ubatch: Annotated[
        int, option(_MODEL, "Tokens evaluated at a time, in whole pages of 128.", "-ub", "--ubatch-size")
    ] = _DEFAULT.n_ubatch,
    rope_scaling: Annotated[
        str,
        option(_MODEL, "How RoPE is stretched; yarn is not supported yet.", "--rope-scaling", metavar="[none|linear]"),
    ] = "linear",
    rope_scale: Annotated[
        float,
        option(_MODEL, "Stretch positions this many times, for a longer context; 0: the model's own.", "--rope-scale"),
    ] = 0.0,
    rope_freq_base: Annotated[
        float, option(_MODEL, "RoPE's base frequency; 0: the model's own.", "--rope-freq-base")
    ] = _DEFAULT.rope_freq_base,
    rope_freq_scale: Annotated[
        float, option(_MODEL, "Factor on RoPE's frequencies: 1 / --rope-scale.", "--rope-freq-scale")
    ] = _DEFAULT.rope_freq_scale,
    threads: Annotated[int, option(_MODEL, "CPU threads; 0 or less: all cores.", "-t", "--threads")] = _DEFAULT.threads,
    text_file: Annotated[
        str | None,
        option(_TEXT, "A UTF-8 text; - for stdin. Default: tqgguf's own.", "-f", "--file", metavar="FILE"),
    ] = None,
    like_llama: Annotated[
        bool,
        option(
            _TEXT,
            "As llama-perplexity: only the second half of each window is scored, caches are plain.",
            "--like-llama",
        ),
    ] = False,
    cache_types: Annotated[
        str,
        option(
            _KV,
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
            _KV,
            "Read every key outside the exact prefix from blocks; the f16 tail, as run has it, is a second row.",
            "--no-tail",
        ),
    ] = False,
    balance: Annotated[
        str | None,
        option(_KV, "Balance of K. Default: full with turbo types, else off.", "--kv-balance", metavar=_BALANCE),
    ] = _DEFAULT.balance,
    exact_first: Annotated[
        int | None,
        option(
            _KV,
            "First tokens kept in f16. Default: 4 with turbo types, else 0.",
            "--cache-exact-first",
            "--exact-prefix",
        ),
    ] = _DEFAULT.exact_first,
    calibration: Annotated[
        str,
        option(
            _KV,
            "The channel scale of K: a file of `tqgguf calibrate`; auto: look for one beside the model and in the "
            "cache folder; off: from page 0.",
            "--kv-calibration",
            metavar="FILE|auto|off",
        ),
    ] = _DEFAULT.calibration,
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
            "Tokens of prompt and answer. Default: a quarter, a half and the whole of -c.",
            "--needle-lengths",
            metavar="LIST",
        ),
    ] = _DEFAULT.needle_lengths,
    needle_depths: Annotated[
        str, option(_NEEDLE, "Where the number is, in per cent of the text.", "--needle-depths", metavar="LIST")
    ] = _DEFAULT.needle_depths,
    seed: Annotated[int, option(_NEEDLE, "Other numbers.", "-s", "--seed")] = _DEFAULT.seed,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object instead of tables.", "--json")] = False,
    verbose: Annotated[bool, option(OUTPUT, "More on stderr.", "-v", "--verbose", "--log-verbose")] = False,
    debug: Annotated[bool, option(OUTPUT, "Show tracebacks.", "--debug")] = False,
    version: Annotated[
        bool, option(OUTPUT, "Print the version and exit.", "--version", is_eager=True, callback=print_version)
    ] = False,
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

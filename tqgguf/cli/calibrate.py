"""`tqgguf calibrate`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in CalibrateRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.calibrate_request import CALIBRATE_FLAGS, CalibrateRequest
from tqgguf.cli.options import MODEL_HEADING
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments, stretched_freq_scale
from tqgguf.formats.missing_mlx import needs_mlx

_DEFAULT = CalibrateRequest()

EXAMPLES = (
    "tqgguf calibrate -m model.gguf -o model.kv-calibration.gguf    # run finds it beside the model",
    "tqgguf calibrate -m model.gguf -f text.txt -c 512 --chunks 4 -o scale.gguf",
)


class CalibrateCommand(VerbCommand):
    """A typer command that takes those of llama-imatrix's flags that concern model, text and evaluation."""

    flags = CALIBRATE_FLAGS
    examples = EXAMPLES


def calibrate(
    ctx: typer.Context,
    model: options.Model = None,
    n_ctx: Annotated[
        int,
        option(MODEL_HEADING, "Tokens of a window, as 2048 or 2k; 0: the model's whole context.", "-c", "--ctx-size"),
    ] = _DEFAULT.n_ctx,
    n_chunks: Annotated[
        int, option(MODEL_HEADING, "Windows, evenly spread over the text; -1: all.", "--chunks")
    ] = _DEFAULT.n_chunks,
    n_batch: options.BatchSize = _DEFAULT.n_batch,
    n_ubatch: options.UbatchSize = _DEFAULT.n_ubatch,
    rope_scaling: options.RopeScaling = "linear",
    rope_scale: options.RopeScale = 0.0,
    rope_freq_base: options.RopeFreqBase = _DEFAULT.rope_freq_base,
    rope_freq_scale: options.RopeFreqScale = _DEFAULT.rope_freq_scale,
    threads: options.Threads = _DEFAULT.threads,
    text_file: options.TextFile = None,
    output: Annotated[
        str | None,
        option(
            OUTPUT,
            "The file to write. Default: in the user's cache folder, where run and eval find it.",
            "-o",
            "--output",
            "--output-file",
            metavar="FILE",
        ),
    ] = None,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Measure the channel scale of K on a text, for caches whose K is balanced, and write it to a small GGUF.

    Without one, the first page of each prompt decides the scale. A few thousand tokens are plenty.
    """
    given = sorted_arguments(ctx)
    values = {**ctx.params, "rope_freq_scale": stretched_freq_scale(ctx.params)}
    request = CalibrateRequest(**fields_of(CalibrateRequest, values, given=given.given, notices=given.notices))
    with needs_mlx("tqgguf calibrate"):
        from tqgguf.cli import calibrate_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(calibrate_command.calibrate(request))

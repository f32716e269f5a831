"""`tqgguf calibrate`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.calibrate_request import CalibrateRequest
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, stretched_freq_scale, takes_flags
from tqgguf.formats.missing_mlx import needs_mlx

EXAMPLES = (
    "tqgguf calibrate -m model.gguf -o model.kv-calibration.gguf    # run finds it beside the model",
    "tqgguf calibrate -m model.gguf -f text.txt -c 512 --chunks 4 -o scale.gguf",
)


class CalibrateCommand(VerbCommand):
    """A typer command that takes those of llama-imatrix's flags that concern model, text and evaluation."""

    verb = "calibrate"
    examples = EXAMPLES


@takes_flags("calibrate", CalibrateRequest())
def calibrate(ctx: typer.Context, **values: Any) -> None:
    """Measure the channel scale of K on a text, for caches whose K is balanced, and write it to a small GGUF.

    Without one, the first page of each prompt decides the scale. A few thousand tokens are plenty.
    """
    given = sorted_arguments(ctx)
    values = {**values, "rope_freq_scale": stretched_freq_scale(values)}
    request = CalibrateRequest(**fields_of(CalibrateRequest, values, given=given.given, notices=given.notices))
    with needs_mlx("tqgguf calibrate"):
        from tqgguf.cli import calibrate_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(calibrate_command.calibrate(request))

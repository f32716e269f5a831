"""`tqgguf doctor`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in DoctorRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.doctor_request import DEFAULT_MEASURED, DOCTOR_FLAGS, DoctorRequest
from tqgguf.cli.options import MODEL_HEADING
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments
from tqgguf.formats.missing_mlx import needs_mlx

_DEFAULT = DoctorRequest()

EXAMPLES = (
    "tqgguf doctor --bpv 3.5 -c 1024    # the default model on tqgguf's own text",
    "tqgguf doctor -m model.gguf -f text.txt -c 32k --measure 2k --json",
)


class DoctorCommand(VerbCommand):
    """A typer command with doctor's flags."""

    flags = DOCTOR_FLAGS
    examples = EXAMPLES


def doctor(
    ctx: typer.Context,
    model: options.Model = None,
    text_file: options.TextFile = None,
    n_ctx: Annotated[
        int,
        option(
            MODEL_HEADING,
            "Tokens of the context that types are wanted for, as 8192 or 8k; 0: the model's whole context.",
            "-c",
            "--ctx-size",
        ),
    ] = _DEFAULT.n_ctx,
    n_measured: Annotated[
        int,
        option(
            MODEL_HEADING,
            f"Tokens to measure on, and again to try the proposals on; 0: those of -c, at most {DEFAULT_MEASURED}.",
            "--measure",
        ),
    ] = _DEFAULT.n_measured,
    budget: Annotated[
        float,
        option(
            MODEL_HEADING,
            "Bits per value, of K and V together, that the cache may take, both at -c and at --measure tokens.",
            "--bpv",
        ),
    ] = _DEFAULT.budget,
    threads: options.Threads = _DEFAULT.threads,
    report: Annotated[
        str | None, option(OUTPUT, "Also write a page with plots into this folder.", "--report", metavar="DIR")
    ] = None,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object instead of tables.", "--json")] = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Measure which layers of a model suffer from which cache types, and propose types for a budget of bits.

    Warns of models whose keys hold huge constants. Nothing is changed: what is proposed are flags for run.
    """
    given = sorted_arguments(ctx)
    request = DoctorRequest(**fields_of(DoctorRequest, ctx.params, notices=given.notices, words=given.words))
    with needs_mlx("tqgguf doctor"):
        from tqgguf.cli import doctor_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(doctor_command.examine(request))

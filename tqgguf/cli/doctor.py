"""`tqgguf doctor`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.doctor_request import DoctorRequest
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, takes_flags
from tqgguf.formats.missing_mlx import needs_mlx

EXAMPLES = (
    "tqgguf doctor --bpv 3.5 -c 1024    # the default model on tqgguf's own text",
    "tqgguf doctor -m model.gguf -f text.txt -c 32k --measure 2k --json",
)


class DoctorCommand(VerbCommand):
    """A typer command with doctor's flags."""

    verb = "doctor"
    examples = EXAMPLES


@takes_flags("doctor", DoctorRequest())
def doctor(ctx: typer.Context, **values: Any) -> None:
    """Measure which layers of a model suffer from which cache types, and propose types for a budget of bits.

    Warns of models whose keys hold huge constants. Nothing is changed: what is proposed are flags for run.
    """
    given = sorted_arguments(ctx)
    request = DoctorRequest(**fields_of(DoctorRequest, values, notices=given.notices, words=given.words))
    with needs_mlx("tqgguf doctor"):
        from tqgguf.cli import doctor_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(doctor_command.examine(request))

"""`tqgguf plan`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.plan_request import PlanRequest
from tqgguf.cli.verb import need_no_blas
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, takes_flags

EXAMPLES = (
    "tqgguf plan -m model.gguf    # every cache type, the memory of this machine",
    "tqgguf plan -m model.gguf --memory 16G -c 2048,8192 -ctk q8_0,turbo4 -ctv turbo3",
    "tqgguf plan -m model.gguf --memory 512M --json",
)


class PlanCommand(VerbCommand):
    """A typer command that takes those of llama.cpp's flags that concern memory."""

    verb = "plan"
    examples = EXAMPLES


@takes_flags("plan", PlanRequest())
def plan(ctx: typer.Context, **values: Any) -> None:
    """Tell what memory a model needs at which context, by KV cache type, and which types to use.

    Only headers are read. Bytes of the KV cache are those that `tqgguf run` reports for as many tokens; those of the
    workspace are an estimate.

    A model that run refuses is planned all the same: that run refuses it is said first, and the exit status is run's
    (2, or 1 for a damaged file). The exit status is 2 where no cache fits.
    """
    given = sorted_arguments(ctx)
    request = PlanRequest(**fields_of(PlanRequest, values, notices=given.notices))
    need_no_blas()
    from tqgguf.cli import plan_command  # lazily: --help need not wait for numpy

    raise typer.Exit(plan_command.plan(request))

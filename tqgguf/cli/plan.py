"""`tqgguf plan`: its options, as typer shows and parses them.

Each parameter below bears the name of the field it fills in PlanRequest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.options import KV_HEADING, MODEL_HEADING
from tqgguf.cli.plan_request import PLAN_FLAGS, PlanRequest
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, need_no_blas, option, sorted_arguments

_DEFAULT = PlanRequest()
MACHINE = "Machine"

EXAMPLES = (
    "tqgguf plan -m model.gguf    # every cache type, the memory of this machine",
    "tqgguf plan -m model.gguf --memory 16G -c 2048,8192 -ctk q8_0,turbo4 -ctv turbo3",
    "tqgguf plan -m model.gguf --memory 512M --json",
)


class PlanCommand(VerbCommand):
    """A typer command that takes those of llama.cpp's flags that concern memory."""

    flags = PLAN_FLAGS
    examples = EXAMPLES


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        option(
            MODEL_HEADING,
            "GGUF file (any shard), or an MLX model folder. Default: the small model of make run.",
            "-m",
            "--model",
            metavar="PATH",
        ),
    ] = None,
    contexts: Annotated[
        str,
        option(
            MODEL_HEADING,
            "Tokens, as 8192 or 8k, with commas between; types are chosen for the most. 0: the model's context and "
            "parts of it.",
            "-c",
            "--ctx-size",
            metavar="LIST",
        ),
    ] = _DEFAULT.contexts,
    n_batch: options.BatchSize = _DEFAULT.n_batch,
    n_ubatch: options.UbatchSize = _DEFAULT.n_ubatch,
    types_k: Annotated[
        str | None,
        option(
            KV_HEADING,
            "Types of K, each with each of -ctv. Default: every type.",
            "-ctk",
            "--cache-type-k",
            metavar="LIST",
        ),
    ] = None,
    types_v: Annotated[str | None, option(KV_HEADING, "Types of V.", "-ctv", "--cache-type-v", metavar="LIST")] = None,
    cache_types: Annotated[
        str | None,
        option(KV_HEADING, "Instead of both: pairs K/V, or one name for both.", "--cache-types", metavar="LIST"),
    ] = None,
    balance: options.Balance = _DEFAULT.balance,
    exact_first: options.ExactFirst = _DEFAULT.exact_first,
    memory: Annotated[
        str | None,
        option(
            MACHINE,
            "What may be used, as 16G (of 1024) or 16GB (of 1000). Default: all of this machine's.",
            "--memory",
            metavar="SIZE",
        ),
    ] = None,
    device: Annotated[
        str | None,
        option(
            MACHINE,
            "Where the model runs, for its weights' size. Default: where MLX would.",
            "--device",
            metavar="[cpu|gpu]",
        ),
    ] = None,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Tell what memory a model needs at which context, by KV cache type, and which types to use.

    Only headers are read. Bytes of the KV cache are those that `tqgguf run` reports for as many tokens; those of the
    workspace are an estimate.

    A model that run refuses is planned all the same: that run refuses it is said first, and the exit status is run's
    (2, or 1 for a damaged file). The exit status is 2 where no cache fits.
    """
    given = sorted_arguments(ctx)
    request = PlanRequest(**fields_of(PlanRequest, ctx.params, notices=given.notices))
    need_no_blas()
    from tqgguf.cli import plan_command  # lazily: --help need not wait for numpy

    raise typer.Exit(plan_command.plan(request))

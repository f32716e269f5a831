"""`tqgguf validate`: its options, as typer shows and parses them."""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.verb import OUTPUT, ExamplesCommand, need_no_blas, option

CHECKING = "What is checked"

EXAMPLES = (
    "tqgguf validate model.gguf",
    "tqgguf validate . --strict    # every file below this folder, and warnings count",
    "tqgguf validate . --model model.gguf    # do the caches in this folder belong to this model?",
)


class ValidateCommand(ExamplesCommand):
    """A typer command that takes files and folders."""

    examples = EXAMPLES


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE", hidden=True)],
    model: Annotated[
        str | None,
        option(
            CHECKING,
            "The model that snapshots and calibrations are to belong to: a GGUF file or an MLX folder.",
            "-m",
            "--model",
            metavar="PATH",
        ),
    ] = None,
    strict: Annotated[bool, option(CHECKING, "Fail on warnings too.", "--strict")] = False,
    threads: Annotated[int, option(CHECKING, "Files side by side; 0 or less: all cores.", "-t", "--threads")] = 0,
    json_output: Annotated[
        bool, option(OUTPUT, "Print a JSON array of findings, and of files that could not be read.", "--json")
    ] = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Find out whether files are sound, and if not, why and where: a line for each finding, by rule and byte offset.

    FILE: GGUF (models, shards, snapshots, calibrations), safetensors, llama.cpp session or sequence files, known by
    their content; folders are searched for them. All data are read, for scales and values that are no numbers. Exit
    status: 0 sound, 1 errors were found, 2 a file could not be read.
    """
    need_no_blas()
    from tqgguf.cli import validate_command  # lazily: --help need not wait for numpy

    raise typer.Exit(validate_command.validate(files, model, strict, threads, json_output, debug))

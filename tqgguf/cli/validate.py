"""`tqgguf validate`: what its command line asks for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tqgguf.cli.verb import ExamplesCommand, need_no_blas
from tqgguf.cli.verb_flags import takes_flags

_TAKEN = "model", "strict", "threads", "json_output", "debug"

EXAMPLES = (
    "tqgguf validate model.gguf",
    "tqgguf validate . --strict    # every file below this folder, and warnings count",
    "tqgguf validate . --model model.gguf    # do the caches in this folder belong to this model?",
)


class ValidateCommand(ExamplesCommand):
    """A typer command that takes files and folders."""

    examples = EXAMPLES


@takes_flags("validate")
def validate(files: Annotated[list[str], typer.Argument(metavar="FILE", hidden=True)], **values: Any) -> None:
    """Find out whether files are sound, and if not, why and where: a line for each finding, by rule and byte offset.

    FILE: GGUF (models, shards, snapshots, calibrations), safetensors, llama.cpp session or sequence files, known by
    their content; folders are searched for them. All data are read, for scales and values that are no numbers. Exit
    status: 0 sound, 1 errors were found, 2 a file could not be read.
    """
    need_no_blas()
    from tqgguf.cli import validate_command  # lazily: --help need not wait for numpy

    raise typer.Exit(validate_command.validate(files, **{name: values[name] for name in _TAKEN}))

"""`tqgguf inspect`: what its command line asks for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tqgguf.cli.inspect_request import EVERY_KEY, InspectRequest
from tqgguf.cli.verb import ExamplesCommand, need_no_blas
from tqgguf.cli.verb_flags import takes_flags

_METADATA = "--metadata"

EXAMPLES = (
    "tqgguf inspect model.gguf",
    "tqgguf inspect model.gguf --metadata general.architecture",
    "tqgguf inspect model.gguf --metadata 'tokenizer.ggml.*' --json",
    "tqgguf inspect model.gguf --tensors",
)


class InspectCommand(ExamplesCommand):
    """A typer command whose --metadata may stand without its value."""

    examples = EXAMPLES

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_metadata_value(args))


def with_metadata_value(args: list[str]) -> list[str]:
    """The arguments with --metadata in one piece with its KEY, or with an empty one.

    What follows it is its KEY, unless that is the only argument left that can be the FILE.
    """
    end = args.index("--") if "--" in args else len(args)
    options, rest = args[:end], args[end:]
    if _METADATA not in options:
        return args
    at = options.index(_METADATA)
    follows = options[at + 1 : at + 2]
    files = [arg for arg in (*options[:at], *options[at + 2 :]) if not arg.startswith("-")] + rest[1:]
    has_key = bool(follows) and not follows[0].startswith("-") and bool(files)
    joined = f"{_METADATA}={follows[0] if has_key else EVERY_KEY}"
    return [*options[:at], joined, *options[at + 1 + has_key :], *rest]


@takes_flags("inspect")
def inspect(file: Annotated[str, typer.Argument(metavar="FILE", hidden=True)], **values: Any) -> None:
    """Tell what a file holds: sizes, tensors by type, and for a model what its KV cache costs in each cache type.

    FILE: a GGUF (a model or any shard of one, a snapshot, a calibration), a llama.cpp session or sequence file, a
    safetensors file, or an MLX model folder. Headers are read, data is not; `tqgguf validate` looks for what is wrong.
    """
    need_no_blas()
    from tqgguf.cli import inspect_command  # lazily: --help need not wait for numpy

    request = InspectRequest(file, values["tensors"], values["metadata"], values["json_output"])
    raise typer.Exit(inspect_command.inspect(request))

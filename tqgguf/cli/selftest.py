"""`tqgguf selftest`: its options, as typer shows and parses them."""

from __future__ import annotations

from typing import Annotated

import typer

from tqgguf.cli import options
from tqgguf.cli.verb import OUTPUT, ExamplesCommand, option
from tqgguf.formats.missing_mlx import needs_mlx

TESTED = "What is tested"

EXAMPLES = (
    "tqgguf selftest    # every kernel on this machine's device",
    "tqgguf selftest --head-dim 128 --bench    # on a GPU: how fast attention is; --device gpu asks for one",
)


class SelftestCommand(ExamplesCommand):
    """A typer command with examples."""

    examples = EXAMPLES


def selftest(
    device: Annotated[
        str,
        option(
            TESTED,
            "Where: gpu fails if nothing ran there; auto takes the GPU if MLX has one.",
            "--device",
            metavar="[auto|gpu|cpu]",
        ),
    ] = "auto",
    head_dim: Annotated[
        list[int] | None, option(TESTED, "Head sizes; may be repeated. Default: 64, 96, 128, 192, 256.", "--head-dim")
    ] = None,
    all_pairs: Annotated[bool, option(TESTED, "Attention with every pair of types, not some.", "--all")] = False,
    bench: Annotated[bool, option(TESTED, "On a GPU, measure attention with more pairs of types.", "--bench")] = False,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object.", "--json")] = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Compare what this machine's device computes with numpy: encoding, decoding and attention of every cache type.

    Exit status: 0 all is right, 1 something is wrong, or nothing ran on the GPU that was asked for.
    """
    with needs_mlx("tqgguf selftest"):
        from tqgguf.cli import selftest_command  # lazily: it brings MLX in, for which --help must not wait

    raise typer.Exit(selftest_command.selftest(device, tuple(head_dim or ()), all_pairs, bench, json_output))

"""`tqgguf selftest`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.verb import ExamplesCommand
from tqgguf.cli.verb_flags import takes_flags
from tqgguf.formats.missing_mlx import needs_mlx

EXAMPLES = (
    "tqgguf selftest    # every kernel on this machine's device",
    "tqgguf selftest --head-dim 128 --bench    # on a GPU: how fast attention is; --device gpu asks for one",
)


class SelftestCommand(ExamplesCommand):
    """A typer command with examples."""

    examples = EXAMPLES


@takes_flags("selftest")
def selftest(**values: Any) -> None:
    """Compare what this machine's device computes with numpy: encoding, decoding and attention of every cache type.

    Each row is printed when its cases are through.

    Exit status: 0 all is right, 1 something is wrong, or nothing ran on the GPU that was asked for.
    """
    with needs_mlx("tqgguf selftest"):
        from tqgguf.cli import selftest_command  # lazily: it brings MLX in, for which --help must not wait

    head_dims = tuple(values["head_dim"] or ())
    asked = (values[name] for name in ("all_pairs", "quick", "bench", "json_output"))
    raise typer.Exit(selftest_command.selftest(values["device"], head_dims, *asked))

"""What all verbs share: --help with headings and examples. It imports little: the door of the program needs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

from tqgguf.cli.flags import OUTPUT

HELP_NAMES = {"help_option_names": ["-h", "--help", "--usage"]}


class ExamplesCommand(TyperCommand):
    """A typer command whose --help has headings, and ends with examples."""

    examples: ClassVar[Sequence[str]]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, self.examples)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options of --help under their headings."""
        headed: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                headed.setdefault(getattr(param, "rich_help_panel", None) or OUTPUT, []).append(record)
        for heading, records in headed.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def need_no_blas() -> None:
    """To be called before numpy is imported by verbs that multiply no matrices: OpenBLAS starts a thread for each core
    at once, which takes longer than reading a header does.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def write_examples(formatter: Any, examples: Sequence[str]) -> None:
    """The end of a --help: lines to copy, as they are."""
    with formatter.section("Examples"):
        for line in examples:
            formatter.write(f"  {line}\n")

"""The version, for `--version` of the program and of every verb."""

from __future__ import annotations

import typer


def print_version(wanted: bool) -> None:
    """Callback of an eager `--version` option: print and stop."""
    if wanted:
        from importlib.metadata import version  # lazily: it reads the installed packages' metadata

        typer.echo(f"tqgguf {version('tqgguf')}")
        raise typer.Exit

"""What a verb gets from the table of flags: typer's parameters, and an argument vector that is sorted by it.

A verb's command is a subclass that names its examples and the verb whose rows it has; its function gets the parameters
by `takes_flags`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar

import typer

from tqgguf.cli.arguments import SortedArguments, sort_arguments
from tqgguf.cli.flag_table import rows_of
from tqgguf.cli.flags import OF_REQUEST, Flag
from tqgguf.cli.llama_flags import flags_of
from tqgguf.cli.verb import ExamplesCommand
from tqgguf.cli.version import print_version
from tqgguf.formats.errors import RequestError

_SORTED = "tqgguf.sorted_arguments"


class VerbCommand(ExamplesCommand):
    """A typer command whose flags are those of the tables, of which typer sees the implemented ones only. verb: whose
    rows it has."""

    verb: ClassVar[str]

    @property
    def flags(self) -> Sequence[Flag]:
        return flags_of(self.verb)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = sort_arguments(args, os.environ, self.flags, ctx.command_path.removeprefix("tqgguf "))
        ctx.meta[_SORTED] = given
        return super().parse_args(ctx, list(given.argv))


def sorted_arguments(ctx: typer.Context) -> SortedArguments:
    """The sorted argument vector that a VerbCommand has parsed."""
    return ctx.meta[_SORTED]


def takes_flags(verb: str, *requests: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb's function, which ends in `**values`, the parameters that its rows of the table say, in the way typer
    looks for them; those that it has itself come first. requests: have the defaults, each of its own fields."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "values"]
        parameters = own + [_parameter(flag, requests) for flag in rows_of(verb) if flag.field]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


def _parameter(flag: Flag, requests: Sequence[object]) -> inspect.Parameter:
    default = flag.default
    if default is OF_REQUEST:
        default = next(getattr(request, flag.field) for request in requests if hasattr(request, flag.field))
    annotation: Any = Annotated[flag.type_with(default), option_of(flag)]
    return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def option_of(flag: Flag) -> Any:
    """A row of the table as typer takes it."""
    more: dict[str, Any] = {} if flag.shows_default else {"show_default": False}
    if flag.name == "--version":
        more = {"is_eager": True, "callback": print_version}
    return option(flag.heading, flag.note, *flag.declarations, metavar=flag.shown_value, **more)


def option(heading: str, help: str, *names: str, metavar: str = "N", **more: Any) -> Any:
    """One option of a verb under a heading of its --help."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=heading, **more)


def fields_of(kind: type[Any], values: Mapping[str, Any], **converted: Any) -> dict[str, Any]:
    """Of typer's values by parameter name those that the dataclass `kind` has fields for, and the converted ones."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values} | converted


def stretched_freq_scale(values: Mapping[str, Any]) -> float:
    """What --rope-scaling, --rope-scale and --rope-freq-scale say together; only one of the last two is there."""
    if values["rope_scaling"] == "yarn":
        raise RequestError("--rope-scaling yarn: not supported yet; linear stretches positions evenly (--rope-scale)")
    stretch = values["rope_scale"]
    if not 0 <= stretch < math.inf:
        raise RequestError(f"--rope-scale: expected a number above 0 (0: the model's own), found {stretch}")
    if values["rope_scaling"] == "none":
        return 1.0
    return 1.0 / stretch if stretch else values["rope_freq_scale"]

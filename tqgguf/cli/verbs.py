"""The table of verbs: where each stands, and a line about it. A verb is imported when it is called, not before."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import typer

from tqgguf.cli.verb import HELP_NAMES


class Verb(NamedTuple):
    """module: in tqgguf.cli, with `command`, the class of the verb, and `function`, its body. A group of verbs has no
    class of its own: its function makes it.
    """

    module: str
    function: str
    command: str | None
    short_help: str


VERBS = {
    "run": Verb("run", "run", "RunCommand", "Answer a prompt, or chat."),
    "eval": Verb("eval", "evaluate", "EvalCommand", "Measure what KV cache types cost a model."),
    "calibrate": Verb("calibrate", "calibrate", "CalibrateCommand", "Measure the channel scale of K for a model."),
    "doctor": Verb("doctor", "doctor", "DoctorCommand", "Propose KV cache types for a model."),
    "validate": Verb(
        "validate", "validate", "ValidateCommand", "Find out whether files are sound, and if not, why and where."
    ),
    "convert": Verb(
        "convert", "convert", "ConvertCommand", "Convert models and prompt caches between GGUF, llama.cpp and mlx-lm."
    ),
    "inspect": Verb("inspect", "inspect", "InspectCommand", "Tell what a file holds."),
    "plan": Verb("plan", "plan", "PlanCommand", "Tell what memory a model needs, by context and KV cache type."),
    "bench": Verb("bench", "bench", "BenchCommand", "Measure speed and memory of KV cache types on this machine."),
    "selftest": Verb(
        "selftest", "selftest", "SelftestCommand", "Compare what this machine's device computes with numpy."
    ),
    "cache": Verb("cache", "cache_app", None, "Keep evaluated prompts in files, and ask about them."),
}


class LazyVerbs(dict[str, Any]):
    """Commands by name, each made when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(VERBS))

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        if command is None:
            command = self[name] = _made(name)
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (dict.get does not ask __getitem__)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[name] for name in self)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)


def _made(name: str) -> Any:
    verb = VERBS[name]
    module = import_module(f"tqgguf.cli.{verb.module}")
    function = getattr(module, verb.function)
    if verb.command is None:
        command: Any = typer.main.get_command(function(HELP_NAMES))
    else:
        program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        program.command(name, cls=getattr(module, verb.command), context_settings=HELP_NAMES)(function)
        command = typer.main.get_command(program)
    command.name, command.short_help = name, verb.short_help
    return command

"""The verbs of the program `tqgguf`, and how every one of them ends.

An error is one line on stderr; the exit status says whose fault it is: 1 the input's, 2 the request's. Ctrl-C gives
130, a reader that closed the pipe 141, both quietly. A traceback is shown with --debug only.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tqgguf.cli.error_object import error_object
from tqgguf.cli.exit_status import INTERRUPTED, PIPE_CLOSED, TERMINATED
from tqgguf.cli.interrupt import Terminated, heed_sigterm
from tqgguf.cli.json_text import json_text
from tqgguf.cli.light_mlx_lm import import_models_alone
from tqgguf.cli.progress import let_go, say
from tqgguf.cli.unexpected import unexpected
from tqgguf.cli.verb import HELP_NAMES, write_examples
from tqgguf.cli.verbs import VERBS, LazyVerbs
from tqgguf.cli.version import print_version
from tqgguf.formats.errors import RequestError, TqggufError


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, past typer, which would have its own word on them."""

    def __init__(self, error: KeyboardInterrupt) -> None:
        super().__init__("interrupted")
        self.exit_status = TERMINATED if isinstance(error, Terminated) else INTERRUPTED


class Verbs(TyperGroup):
    """Imports a verb when it is called. Its --help ends with the first example of each."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": LazyVerbs()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, [verb.examples[0] for verb in self.commands.values()])  # type: ignore[attr-defined]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(error) from None
        except BrokenPipeError:
            let_go(sys.stdout)
            raise typer.Exit(PIPE_CLOSED) from None


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,  # rich's panels are unreadable at 80 columns, and take 0.2 s to import
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings=HELP_NAMES,
)


@app.callback()
def tqgguf(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Run GGUF models with a compressed KV cache, and measure what it costs."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run the command line (`sys.argv` without the program's name by default) and return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    heed_sigterm()
    import_models_alone()
    try:
        _check_verb(arguments)
        status = typer.main.get_command(app).main(arguments, prog_name="tqgguf", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        ended = error if isinstance(error, Interrupted) else Interrupted(KeyboardInterrupt())
        return _fail(arguments, ended, (str(ended),), ended.exit_status)
    except BrokenPipeError:
        let_go(sys.stdout)
        return PIPE_CLOSED
    except Exception as error:
        if "--debug" in arguments and not isinstance(error, typer.TyperException):
            raise
        return _fail(arguments, error, *_told(error))


_WITHOUT_A_VERB = frozenset({*HELP_NAMES["help_option_names"], "--version"})
_SHOWN_ARGUMENTS = 6


def _check_verb(arguments: Sequence[str]) -> None:
    """RequestError where llama.cpp's flags, or a file, stand in a verb's place."""
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not _WITHOUT_A_VERB & set(arguments):
        rest = " ..." if len(arguments) > _SHOWN_ARGUMENTS else ""
        example = f"tqgguf run {shlex.join(arguments[:_SHOWN_ARGUMENTS])}{rest}"
        raise RequestError(f"expected a verb first, found {first}; to answer a prompt: {example}")
    if os.path.splitext(first)[1] and os.path.lexists(first):
        name = shlex.quote(first)
        raise RequestError(
            f"expected a verb first, found a file; `tqgguf run -m {name}` runs it, `tqgguf inspect {name}` describes it"
        )


def _told(error: Exception) -> tuple[Sequence[str], int]:
    """What is said of an error, a line each, and the exit status."""
    if isinstance(error, RequestError):
        return error.messages, error.exit_status
    if isinstance(error, TqggufError):
        return (str(error),), error.exit_status
    if isinstance(error, typer.TyperException):  # a value out of range, a missing verb
        return (error.format_message(),), error.exit_code
    if isinstance(error, OSError):  # a full disk behind stdout; files that cannot be opened are errors of their own
        return (f"{error.filename or 'output'}: {error.strerror or error}",), 1
    if isinstance(error, MemoryError):
        return ("out of memory; a smaller -c or a smaller cache type needs less",), 1
    return (unexpected(error),), 1


def _fail(arguments: Sequence[str], error: Exception, messages: Sequence[str], status: int) -> int:
    if not isinstance(error, Interrupted):
        for message in messages:
            say(f"error: {message}")
    if _wants_json(arguments):
        try:
            print(json_text(error_object(error, "; ".join(messages), status)), flush=True)
        except OSError:  # stdout is what failed
            let_go(sys.stdout)
    return status


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments, and is no value of an option before it."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if isinstance(command, TyperGroup) and word in command.commands:
            command = command.commands[word]
        elif word == "--json":
            return True
        elif any(word in param.opts and not getattr(param, "is_flag", True) for param in command.params):
            del rest[:1]
    return False

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

from tqgguf.cli.bench import BenchCommand, bench
from tqgguf.cli.cache import CacheGroup, cache_app
from tqgguf.cli.calibrate import CalibrateCommand, calibrate
from tqgguf.cli.convert import ConvertCommand, convert
from tqgguf.cli.doctor import DoctorCommand, doctor
from tqgguf.cli.eval import EvalCommand, evaluate
from tqgguf.cli.exit_status import INTERRUPTED, PIPE_CLOSED, TERMINATED
from tqgguf.cli.inspect import InspectCommand, inspect
from tqgguf.cli.interrupt import Terminated, heed_sigterm
from tqgguf.cli.plan import PlanCommand, plan
from tqgguf.cli.progress import let_go, say
from tqgguf.cli.run import RunCommand, run
from tqgguf.cli.selftest import SelftestCommand, selftest
from tqgguf.cli.unexpected import unexpected
from tqgguf.cli.validate import ValidateCommand, validate
from tqgguf.cli.verb import ExamplesCommand, write_examples
from tqgguf.cli.version import print_version
from tqgguf.formats.errors import RequestError, TqggufError

HELP_NAMES = {"help_option_names": ["-h", "--help", "--usage"]}


class Verbs(TyperGroup):
    """Ends a verb quietly on Ctrl-C and on a closed pipe. Its --help ends with the first example of each."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        verbs = (self.get_command(ctx, name) for name in self.list_commands(ctx))
        write_examples(
            formatter, [verb.examples[0] for verb in verbs if isinstance(verb, ExamplesCommand | CacheGroup)]
        )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Exit(_status_of(error)) from None
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
app.command("run", cls=RunCommand, context_settings=HELP_NAMES, short_help="Answer a prompt, or chat.")(run)
app.add_typer(cache_app(HELP_NAMES), name="cache", short_help="Keep evaluated prompts in files, and ask about them.")
app.command(
    "eval", cls=EvalCommand, context_settings=HELP_NAMES, short_help="Measure what KV cache types cost a model."
)(evaluate)
app.command(
    "calibrate",
    cls=CalibrateCommand,
    context_settings=HELP_NAMES,
    short_help="Measure the channel scale of K for a model.",
)(calibrate)
app.command(
    "doctor",
    cls=DoctorCommand,
    context_settings=HELP_NAMES,
    short_help="Propose KV cache types for a model.",
)(doctor)
app.command(
    "validate",
    cls=ValidateCommand,
    context_settings=HELP_NAMES,
    short_help="Find out whether files are sound, and if not, why and where.",
)(validate)
app.command(
    "convert",
    cls=ConvertCommand,
    context_settings=HELP_NAMES,
    short_help="Convert models and prompt caches between GGUF, llama.cpp and mlx-lm.",
)(convert)
app.command("inspect", cls=InspectCommand, context_settings=HELP_NAMES, short_help="Tell what a file holds.")(inspect)
app.command(
    "plan",
    cls=PlanCommand,
    context_settings=HELP_NAMES,
    short_help="Tell what memory a model needs, by context and KV cache type.",
)(plan)
app.command(
    "bench",
    cls=BenchCommand,
    context_settings=HELP_NAMES,
    short_help="Measure speed and memory of KV cache types on this machine.",
)(bench)
app.command(
    "selftest",
    cls=SelftestCommand,
    context_settings=HELP_NAMES,
    short_help="Compare what this machine's device computes with numpy.",
)(selftest)


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
    debug = "--debug" in arguments
    heed_sigterm()
    problem = _no_verb(arguments)
    if problem is not None:
        return _fail((problem,), 2)
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="tqgguf", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except TqggufError as error:
        if debug:
            raise
        return _fail(error.messages if isinstance(error, RequestError) else (str(error),), error.exit_status)
    except typer.TyperException as error:  # a value out of range, a missing verb
        return _fail((error.format_message(),), error.exit_code)
    except KeyboardInterrupt as error:
        return _status_of(error)
    except typer.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        let_go(sys.stdout)
        return PIPE_CLOSED
    except OSError as error:  # a full disk behind stdout; files that cannot be opened are errors of their own
        if debug:
            raise
        return _fail((f"{error.filename or 'output'}: {error.strerror or error}",), 1)
    except MemoryError:
        if debug:
            raise
        return _fail(("out of memory; a smaller -c or a smaller cache type needs less",), 1)
    except Exception as error:
        if debug:
            raise
        return _fail((unexpected(error),), 1)


_WITHOUT_A_VERB = frozenset({*HELP_NAMES["help_option_names"], "--version"})
_SHOWN_ARGUMENTS = 6


def _no_verb(arguments: Sequence[str]) -> str | None:
    """What to say where llama.cpp's flags, or a file, stand in a verb's place."""
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not _WITHOUT_A_VERB & set(arguments):
        rest = " ..." if len(arguments) > _SHOWN_ARGUMENTS else ""
        example = f"tqgguf run {shlex.join(arguments[:_SHOWN_ARGUMENTS])}{rest}"
        return f"expected a verb first, found {first}; to answer a prompt: {example}"
    if os.path.splitext(first)[1] and os.path.lexists(first):
        name = shlex.quote(first)
        return (
            f"expected a verb first, found a file; `tqgguf run -m {name}` runs it, `tqgguf inspect {name}` describes it"
        )
    return None


def _status_of(error: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _fail(messages: Sequence[str], status: int) -> int:
    for message in messages:
        say(f"error: {message}")
    return status

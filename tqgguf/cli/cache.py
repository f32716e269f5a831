"""`tqgguf cache save`, `restore` and `info`: prompt caches as files, as typer shows and parses them.

save and restore are `run` for another purpose: they have its parameters, as far as these concern them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from tqgguf.cli.flags import Fate, Flag
from tqgguf.cli.llama_flags import flags_of
from tqgguf.cli.model_flags import SAMPLING
from tqgguf.cli.run import RunCommand, run, serve
from tqgguf.cli.run_request import Purpose
from tqgguf.cli.verb import ExamplesCommand, need_no_blas, write_examples
from tqgguf.cli.verb_flags import takes_flags
from tqgguf.formats.errors import RequestError

SAVE_EXAMPLE = "tqgguf cache save book.kv.gguf -m model.gguf -f book.txt"
RESTORE_EXAMPLE = 'tqgguf cache restore book.kv.gguf -m model.gguf -p "Who is the narrator?"'
INFO_EXAMPLE = "tqgguf cache info book.kv.gguf"
EXAMPLES = (SAVE_EXAMPLE, RESTORE_EXAMPLE, INFO_EXAMPLE)

_PROMPT_CACHE = frozenset({"--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro", "--prompt-cache-profile"})
_CHATTING = frozenset({"--single-turn", "--multiline-input"})
_ANSWERING = frozenset({"--predict", "--reverse-prompt", "--json", "--display-prompt", "--ignore-eos"})
_DECIDED = frozenset({
    "--system-prompt", "--system-prompt-file", "--cache-type-k", "--cache-type-v", "--cache-preset", "--kv-balance",
    "--cache-exact-first", "--kv-calibration",
})  # fmt: skip
"""What the file has decided when it was saved."""

_OUTPUT_NAMES = ("-o", "--output")
_ASK_FOR_HELP = frozenset({"-h", "--help", "--usage", "--version"})
_HIDDEN_HEADINGS = {"save": frozenset({SAMPLING}), "restore": frozenset()}


class CacheCommand(RunCommand):
    """`run`'s command without the flags in `left_out`; the prompt cache comes first, or after -o."""

    left_out: ClassVar[frozenset[str]]
    """Not shown by --help."""
    taken: ClassVar[frozenset[str]] = frozenset()
    """Of those, what the command line may hold all the same: this class puts it there, or it does no harm."""
    more: ClassVar[tuple[str, ...]] = ()
    """Flags that every call has."""

    @property
    def flags(self) -> tuple[Flag, ...]:
        not_taken = self.left_out - self.taken
        return tuple(f for f in flags_of(self.verb) if f.fate is not Fate.IMPLEMENTED or f.name not in not_taken)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not _ASK_FOR_HELP & set(args):
            name, rest = _file_of(args, f"`{self.examples[0]}`")
            args = ["--prompt-cache", name, *self.more, *rest]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for param in self.get_params(ctx):
            if isinstance(param, typer.core.TyperOption):
                param.hidden = param.hidden or bool(self.left_out & {*param.opts, *param.secondary_opts})
                param.hidden = param.hidden or param.rich_help_panel in _HIDDEN_HEADINGS[self.name or ""]
        super().format_options(ctx, formatter)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "FILE [OPTIONS]")


def _file_of(args: list[str], example: str) -> tuple[str, list[str]]:
    """The prompt cache that the arguments name, and the others."""
    if args and args[0] and not args[0].startswith("-"):
        return args[0], args[1:]
    for i, word in enumerate(args[:-1]):
        if word in _OUTPUT_NAMES:
            return args[i + 1], args[:i] + args[i + 2 :]
    found = repr(args[0]) if args else "nothing"
    raise RequestError(f"expected the name of a prompt cache first, as in {example}, found {found}")


class SaveCommand(CacheCommand):
    """The file is written."""

    left_out = _PROMPT_CACHE | _CHATTING | _ANSWERING
    taken = frozenset({"--prompt-cache"})
    examples: ClassVar[Sequence[str]] = (SAVE_EXAMPLE,)


class RestoreCommand(CacheCommand):
    """The file is only read."""

    left_out = _PROMPT_CACHE - {"--prompt-cache-profile"} | _CHATTING | _DECIDED
    taken = frozenset({"--prompt-cache", "--prompt-cache-ro"})
    more = ("--prompt-cache-ro",)
    examples: ClassVar[Sequence[str]] = (RESTORE_EXAMPLE,)


class CacheGroup(TyperGroup):
    """The three verbs; --help ends with an example of each."""

    examples = EXAMPLES

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, self.examples)


class InfoCommand(ExamplesCommand):
    """A typer command that takes one file."""

    examples = (INFO_EXAMPLE,)


def _for(purpose: Purpose) -> Any:
    """A callback with `run`'s parameters."""

    @functools.wraps(run)
    def callback(ctx: typer.Context, **values: Any) -> None:
        serve(ctx, purpose)

    return callback


@takes_flags("info")
def info(file: Annotated[str, typer.Argument(metavar="FILE", hidden=True)], **values: Any) -> None:
    """Tell what a prompt cache holds: tokens, types, bytes by part, and the model that it belongs to."""
    need_no_blas()
    from tqgguf.cli import inspect_command  # lazily: --help need not wait for numpy

    raise typer.Exit(inspect_command.inspect_cache(file, values["json_output"]))


def cache_app(context_settings: dict[str, Any]) -> typer.Typer:
    """The sub-program `tqgguf cache`."""
    app = typer.Typer(cls=CacheGroup, add_completion=False, rich_markup_mode=None, context_settings=context_settings)
    app.command(
        "save",
        cls=SaveCommand,
        context_settings=context_settings,
        short_help="Evaluate a document into a file.",
        help="Evaluate a document into a prompt cache FILE, and generate nothing.\n\n"
        "In the model's chat template, if it has one, the user's turn is left open for `tqgguf cache restore`. "
        "Without -ctk, -ctv and --cache-preset the types are turbo4/turbo4, or q8_0/q8_0 where the model's heads "
        "take no turbo type.",
    )(_for("keep"))
    app.command(
        "restore",
        cls=RestoreCommand,
        context_settings=context_settings,
        short_help="Ask about the document in a file.",
        help="Answer a question about the document in a prompt cache FILE, which stays as it is.\n\n"
        "Types of K and V are the file's.",
    )(_for("ask"))
    app.command("info", cls=InfoCommand, context_settings=context_settings, short_help="Tell what a file holds.")(info)
    return app

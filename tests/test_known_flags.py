"""Flags that tqgguf has not are told apart, and flags that its messages and documents name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tqgguf.cli.arguments import sort_arguments
from tqgguf.cli.llama_flags import flags_of
from tqgguf.cli.other_flags import BUILT_IN_TEMPLATES, ELSEWHERE
from tqgguf.cli.program import app
from tqgguf.cli.run import request_from
from tqgguf.formats.errors import RequestError

FLAGS = flags_of("run")
REPOSITORY = Path(__file__).parent.parent
RECORDED = [
    line
    for line in (Path(__file__).parent / "data" / "llama_other_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
FLAG = re.compile(r"(?<![\w/.|<%{\]-])(--[a-z][a-z0-9-]*[a-z0-9]|-[a-z]{1,5})(?![\w(.*]|-(?=\w))")
OTHERS = {
    *("--device-as-default-execution-space", "--gpu-architecture", "--include-path"),  # NVRTC's
    # of commands that documents show: pip, make's pytest, git, mlx-lm, and flags of llama.cpp that a reason names
    "--no-deps", "--editable", "--extra", "--pre", "-k", "-x", "-m",
    "--prompt-cache-file", "--max-tokens", "--kv-bits", "--load-mode", "--ctx-size-draft",
}  # fmt: skip

STYLE_NAME = re.compile(r"var\(--[a-z-]+\)|--[a-z-]+: *#[0-9a-f]+")

NO_FLAGS = {"-inf", "-of", "--cache-type"}
"""A number, a part of shards' names, and what two flags begin with."""


def verbs(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from verbs(below)


def spellings() -> set[str]:
    found = {spelling for flag in FLAGS for spelling in flag.spellings} | set(ELSEWHERE)
    for command in verbs(typer.main.get_command(app)):
        for parameter in command.get_params(typer.Context(command, **command.context_settings)):
            found |= {*parameter.opts, *parameter.secondary_opts}
        found |= {spelling for flag in getattr(command, "flags", ()) for spelling in flag.spellings}
    return found


def texts(path: Path) -> Iterator[str]:
    """What a document says in a line, or what a module's messages and help say: its strings but for docstrings, and for
    the names of colours in style sheets."""
    if path.suffix == ".md":
        yield from path.read_text(encoding="utf-8").splitlines()
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield STYLE_NAME.sub("", node.value)


NAMED = sorted(
    (str(path.relative_to(REPOSITORY)), flag)
    for path in [
        *(REPOSITORY / "tqgguf").rglob("*.py"),
        REPOSITORY / "README.md",
        REPOSITORY / "CHANGELOG.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "spec").glob("*.md"),
    ]
    for flag in {found for text in texts(path) for found in FLAG.findall(text)}
)


def test_every_flag_that_a_message_or_a_document_names_exists() -> None:
    known = spellings() | OTHERS
    assert len(NAMED) > 300
    assert [(where, flag) for where, flag in NAMED if flag not in known and flag not in NO_FLAGS] == []


@pytest.mark.parametrize("spelling", RECORDED)
def test_a_flag_of_another_program_of_llama_cpp_has_its_own_line(spelling: str) -> None:
    known = {spelled for flag in FLAGS for spelled in flag.spellings}
    if spelling in known:
        return
    with pytest.raises(RequestError) as error:
        sort_arguments([spelling, "5", "-p", "hi"], {})
    assert error.value.messages == (f"{spelling} is refused: {ELSEWHERE[spelling]}",)


def test_no_flag_stands_in_both_tables() -> None:
    assert {spelling for flag in FLAGS for spelling in flag.spellings}.isdisjoint(ELSEWHERE)


def test_a_flag_of_run_is_told_from_an_unknown_one_in_other_verbs() -> None:
    plan = next(command for command in verbs(typer.main.get_command(app)) if command.name == "plan")
    with pytest.raises(RequestError, match="`tqgguf plan` does not take --temp; `tqgguf plan --help`"):
        sort_arguments(["--temp", "0"], {}, plan.flags, "plan")


def test_everything_that_is_wrong_with_a_command_line_is_told_at_once() -> None:
    argv = ["--ctxsize", "5", "--grammar", "root ::= x", "-n", "many", "--port", "80", "-p", "hi", "-c"]
    with pytest.raises(RequestError) as error:
        sort_arguments(argv, {"LLAMA_ARG_JINJA": "maybe"})
    found = [message.split()[0] + " " + message.split()[1] for message in error.value.messages]
    assert found == [
        "unknown flag",
        "-n: expected",
        "--port is",
        "-c: expected",
        "LLAMA_ARG_JINJA: expected",
        "--grammar is",
    ]


def test_every_value_that_cannot_be_is_told_at_once() -> None:
    argv = [
        "-c",
        "-1",
        "-ctk",
        "turbo9",
        "--temp",
        "inf",
        "--top-p",
        "7",
        "--samplers",
        "top_k",
        "--chat-template",
        "x",
    ]
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    given = sort_arguments(argv, {})
    context = command.make_context("run", given.argv)
    with pytest.raises(RequestError) as error:
        request_from(context.params, given)
    starts = [message.split(":")[0] for message in error.value.messages]
    assert starts == ["--temp", "--top-p", "-c", "-ctk", "--chat-template"]


def test_every_stage_letter_and_bias_that_cannot_be_is_told_at_once() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    given = sort_arguments(["--sampler-seq", "kqz", "-l", "x", "-l", "5", "--top-k", "-1", "--min-p", "2"], {})
    with pytest.raises(RequestError) as error:
        request_from(command.make_context("run", given.argv).params, given)
    assert [message.split(":")[0] for message in error.value.messages] == [
        "--sampler-seq", "--logit-bias", "--logit-bias", "--min-p",
    ]  # fmt: skip
    assert error.value.messages[0].endswith("found 'q', 'z'")


@pytest.mark.parametrize("name", sorted(BUILT_IN_TEMPLATES))
def test_the_names_of_llama_cpps_built_in_templates_are_told_from_jinja(name: str) -> None:
    from tqgguf.cli.run_request import RunRequest

    with pytest.raises(RequestError, match=f"--chat-template {name}: llama.cpp's built-in templates are not here"):
        RunRequest(chat_template=name)

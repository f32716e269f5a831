"""The table of flags: each of llama-completion's has one row, and each row does what it says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from tqgguf.cli import flag_table
from tqgguf.cli.arguments import sort_arguments
from tqgguf.cli.flag_table import ranges_of, rows_of
from tqgguf.cli.flags import Fate, Flag, row
from tqgguf.cli.llama_flags import OLDER_FLAGS, flags_of
from tqgguf.cli.program import app
from tqgguf.cli.ranges import check_ranges
from tqgguf.cli.verb_flags import VerbCommand, takes_flags
from tqgguf.formats.errors import RequestError

RECORDED = [
    line.split("\t")
    for line in (Path(__file__).parent / "data" / "llama_completion_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
FLAGS = flags_of("run")
ROWS = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
VERBS = ("run", "eval", "calibrate", "doctor", "bench", "plan")
SAMPLE = {"text": "x", "integer": "7", "tokens": "7", "number": "0.25"}


def options_of(verb: str) -> list[Any]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return command.get_params(typer.Context(command, **command.context_settings))  # type: ignore[arg-type]


def words(flag: Flag) -> list[str]:
    return [SAMPLE.get(kind, kind.split("|")[0]) for kind in flag.takes]


def test_no_spelling_stands_in_two_rows() -> None:
    assert [s for s, n in Counter(s for flag in FLAGS for s in flag.spellings).items() if n > 1] == []


@pytest.mark.parametrize(("spelled", "n_values", "env"), RECORDED, ids=[line[0].split()[0] for line in RECORDED])
def test_every_flag_of_llama_completion_has_its_spellings_values_and_variable(
    spelled: str, n_values: str, env: str
) -> None:
    names, _, negatives = spelled.partition(" / ")
    rows = {id(ROWS[s]): ROWS[s] for s in names.split() + negatives.split()}.values()
    assert {s for row in rows for s in row.spellings} == {*names.split(), *negatives.split()}
    assert all(len(row.takes) == int(n_values) for row in rows)
    if env != "HF_TOKEN":  # other programs set it too: an access token is no request to tqgguf
        assert ROWS[names.split()[0]].env == (None if env == "-" else env)


def test_the_table_holds_nothing_that_llama_completion_does_not_have() -> None:
    recorded = {s for spelled, *_ in RECORDED for s in spelled.split() if s != "/"}
    theirs = [flag for flag in FLAGS if not flag.ours and flag not in OLDER_FLAGS]
    assert {s for flag in theirs for s in flag.spellings} == recorded
    assert recorded.isdisjoint(s for flag in FLAGS if flag.ours for s in flag.spellings)


@pytest.mark.parametrize("verb", VERBS)
def test_the_implemented_rows_are_the_options_of_their_verb(verb: str) -> None:
    declared = {(frozenset(option.opts), frozenset(option.secondary_opts)) for option in options_of(verb)}
    implemented = [flag for flag in flags_of(verb) if flag.fate is Fate.IMPLEMENTED]
    assert declared == {(frozenset(flag.names), frozenset(flag.negatives)) for flag in implemented}
    rows = {spelling: flag for flag in implemented for spelling in flag.spellings}
    for option in options_of(verb):
        assert option.is_flag == (not rows[option.opts[0]].takes), option.opts


@pytest.mark.parametrize("verb", VERBS)
def test_no_spelling_of_a_verb_stands_in_two_of_its_own_rows(verb: str) -> None:
    assert [s for s, n in Counter(s for flag in rows_of(verb) for s in flag.spellings).items() if n > 1] == []


@dataclass(frozen=True)
class ProbeRequest:
    n_probes: int = 2

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("probe"))


def test_a_new_flag_is_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    new = row(
        Fate.IMPLEMENTED, "How often to probe.", "-pr --probes", "tokens", env="PROBES", verbs="probe",
        field="n_probes", heading="Probing", lowest=1, highest=4096,
    )  # fmt: skip
    asks_for_help = row(Fate.IMPLEMENTED, "", "-h --help --usage", verbs="probe")
    monkeypatch.setattr(flag_table, "TABLE", (*flag_table.TABLE, new, asks_for_help))
    made: list[ProbeRequest] = []

    class ProbeCommand(VerbCommand):
        verb = "probe"
        examples = ()

    @takes_flags("probe", ProbeRequest())
    def probe(ctx: typer.Context, **values: Any) -> None:
        made.append(ProbeRequest(**values))

    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.command("probe", cls=ProbeCommand)(probe)
    command = typer.main.get_command(program)
    for argv, expected in (([], 2), (["-pr", "1k"], 1024), (["--probes=7", "-ngl", "9"], 7)):
        command.main(argv, prog_name="tqgguf probe", standalone_mode=False)
        assert made.pop() == ProbeRequest(expected)
    monkeypatch.setenv("LLAMA_ARG_PROBES", "9")
    command.main([], prog_name="tqgguf probe", standalone_mode=False)
    assert made.pop() == ProbeRequest(9)
    with pytest.raises(RequestError, match=r"^-pr: expected a number from 1 to 4096, found 5000$"):
        command.main(["--probes", "5000"], prog_name="tqgguf probe", standalone_mode=False)
    with pytest.raises(RequestError, match="-pr: expected a whole number, found 'x'"):
        command.main(["-pr", "x"], prog_name="tqgguf probe", standalone_mode=False)
    command.main(["--help"], prog_name="tqgguf probe", standalone_mode=False)
    assert re.search(r"Probing:\n +-pr, --probes N +How often to probe\. +\[default: 2\]", capsys.readouterr().out)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_spelling_is_kept_noted_or_refused_as_its_row_says(flag: Flag) -> None:
    for spelling in flag.spellings:
        argv = [spelling, *words(flag)]
        if flag.fate is Fate.REFUSED:
            with pytest.raises(RequestError) as refusal:
                sort_arguments(argv, {})
            assert str(refusal.value) == f"{spelling} is refused: {flag.note}"
        elif flag.fate is Fate.ACCEPTED:
            sorted_ = sort_arguments(argv, {})
            assert sorted_.argv == [] and sorted_.given == frozenset()
            assert sorted_.notices == (f"{' '.join(argv)}: no effect here, {flag.note}",)
        else:
            first_long = flag.name if spelling in flag.names else flag.negative
            assert sort_arguments(argv, {}).argv == [first_long, *words(flag)]


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.env], ids=lambda flag: flag.env)
def test_the_environment_stands_in_for_a_flag(flag: Flag) -> None:
    assert flag.env is not None
    env = {flag.env: words(flag)[0] if flag.takes else "1"}
    if flag.fate is Fate.REFUSED:
        with pytest.raises(RequestError, match=f"^{flag.env} is refused: "):
            sort_arguments([], env)
    else:
        from_env, from_line = sort_arguments([], env), sort_arguments([flag.name, *words(flag)], {})
        assert (from_env.argv, from_env.given) == (from_line.argv, from_line.given)
        assert len(from_env.notices) == len(from_line.notices)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.fate is not Fate.IMPLEMENTED], ids=lambda flag: flag.name)
def test_a_reason_is_one_short_line(flag: Flag) -> None:
    assert 0 < len(flag.note) <= 90 and flag.note == " ".join(flag.note.split()) and not flag.note.endswith(".")


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.harmless is not None], ids=lambda flag: flag.name)
def test_a_refused_flag_that_asks_for_nothing_is_passed_over(flag: Flag) -> None:
    for value in (f"{flag.harmless:g}", f"{flag.harmless:.0f}"):
        assert sort_arguments([flag.name, value], {}).notices == ()


# Backend an argument vector


def test_a_flag_takes_the_next_argument_whatever_it_looks_like() -> None:
    assert sort_arguments(["-n", "-1", "-p", "--help"], {}).argv == ["--predict", "-1", "--prompt", "--help"]


def test_long_names_take_underscores_and_an_equals_sign() -> None:
    argv = ["--ctx_size=4096", "--cache_type_k", "turbo4", "--prompt=a_b=c_d", "-ctv=q8_0"]
    assert sort_arguments(argv, {}).argv == [
        "--ctx-size", "4096", "--cache-type-k", "turbo4", "--prompt", "a_b=c_d", "--cache-type-v", "q8_0",
    ]  # fmt: skip


def test_an_equals_sign_keeps_accepted_flags_with_their_values_together() -> None:
    assert sort_arguments(["--n-gpu-layers=99", "-p", "x"], {}).argv == ["--prompt", "x"]


def test_values_of_a_two_valued_flag_are_both_taken() -> None:
    sorted_ = sort_arguments(["--control-vector-layer-range", "1", "9", "-p", "x"], {})
    assert sorted_.argv == ["--prompt", "x"]


def test_a_lone_dash_is_standard_input() -> None:
    assert sort_arguments(["-"], {}).argv == ["--file", "-"]


def test_the_last_of_several_counts_and_a_notice_says_so() -> None:
    sorted_ = sort_arguments(["-p", "a", "-c", "1", "--file", "b", "--ctx-size", "2"], {})
    assert sorted_.argv == ["--file", "b", "--ctx-size", "2"]
    assert sorted_.notices == ("--file replaces the earlier -p", "--ctx-size replaces the earlier -c")


def test_a_repeatable_flag_counts_every_time() -> None:
    argv = sort_arguments(["-r", "a", "-l", "1+2", "-r", "b"], {}).argv
    assert argv == ["--reverse-prompt", "a", "--reverse-prompt", "b", "--logit-bias", "1+2"]


def test_the_negative_form_replaces_the_positive_one() -> None:
    assert sort_arguments(["-cnv", "-no-cnv"], {}).argv == ["--no-conversation"]
    assert sort_arguments(["--no-escape", "-e"], {}).argv == ["--escape"]


def test_the_command_line_wins_over_the_environment_without_a_word() -> None:
    env = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CTX_SIZE": "99"}
    sorted_ = sort_arguments(["-ctk", "turbo3"], env)
    assert sorted_.argv == ["--ctx-size", "99", "--cache-type-k", "turbo3"]
    assert sorted_.notices == ()
    assert sorted_.given == {"--ctx-size", "--cache-type-k"}


def test_an_environment_variable_switches_off_by_its_value_or_by_its_no_form() -> None:
    assert sort_arguments([], {"LLAMA_ARG_NO_PERF": "yes"}).argv == ["--no-perf"]
    repack = sort_arguments([], {"LLAMA_ARG_NO_REPACK": "yes"})
    assert repack.notices[0].startswith("LLAMA_ARG_NO_REPACK: no effect here")
    assert sort_arguments([], {"LLAMA_ARG_CONTEXT_SHIFT": "0"}).notices == ()
    assert len(sort_arguments([], {"LLAMA_ARG_NO_CONTEXT_SHIFT": "1"}).notices) == 1
    with pytest.raises(RequestError, match="LLAMA_ARG_JINJA: expected on, off, found 'maybe'"):
        sort_arguments([], {"LLAMA_ARG_JINJA": "maybe"})


@pytest.mark.parametrize(
    ("word", "meant"),
    [("1", "on"), ("true", "on"), ("disabled", "off"), ("0", "off"), ("-1", "auto"), ("auto", "auto")],
)
def test_switches_have_llama_cpps_spellings(word: str, meant: str) -> None:
    assert sort_arguments(["-fa", word], {}).argv == ["--flash-attn", meant]


def test_help_and_version_need_nothing_else_to_be_right_after_them() -> None:
    assert sort_arguments(["-ngl", "9", "-h", "--nonsense"], {"LLAMA_ARG_HF_REPO": "x"}).argv == ["--help"]
    assert sort_arguments(["--version", "-c"], {}).argv == ["--version"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ctxsize", "5"], "unknown flag --ctxsize, did you mean --ctx-size? `tqgguf run --help` lists all"),
        (["-ctx", "5"], "unknown flag -ctx, did you mean -ct"),
        (["--qqqqqqq"], "unknown flag --qqqqqqq; `tqgguf run --help` lists all"),
        (["hello"], "unexpected argument 'hello'; a prompt goes after -p, a file with one after -f"),
        (["-c"], "-c: expected a value after it (tokens), found the end"),
        (["--control-vector-layer-range", "1"], "expected a value after it (integer integer), found the end"),
        (["-c", "4kB"], "-c: expected a whole number, found '4kB' (8k stands for 8,192 tokens)"),
        (["-c", "0.3k"], "-c: expected a whole number, found '0.3k'"),
        (["-t", "1k"], "-t: expected a whole number, found '1k'"),
        (["-c", ""], "-c: expected a whole number, found ''"),
        (["-c", "1_000"], "-c: expected a whole number, found '1_000'"),
        (["-c", "-n", "5"], "-c: expected a whole number, found '-n'"),
        (["--poll", "often"], "--poll: expected a whole number, found 'often'"),
        (["--temp", "nan"], "--temp: expected a number, found 'nan'"),
        (["--temp", "warm"], "--temp: expected a number, found 'warm'"),
        (["-fa", "maybe"], "-fa: expected on, off, auto, found 'maybe'"),
        (["-fit", "auto"], "-fit: expected on, off, found 'auto'"),
        (["-sm", "diagonal"], "-sm: expected none, layer, row, tensor, found 'diagonal'"),
        (["--mlock=1"], "--mlock takes no value, found '--mlock=1'"),
        (["-ctx=turbo4"], "unknown flag -ctx=turbo4, did you mean -ct"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_was_expected(argv: list[str], message: str) -> None:
    with pytest.raises(RequestError) as error:
        sort_arguments(argv, {})
    assert message in str(error.value)

"""`tqgguf run`: from the command line to a typed request and its texts, and how the program ends."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli import main as program
from tqgguf.cli import prompts, run_command
from tqgguf.cli.prompts import Texts, chat_turns, process_escapes, read_texts
from tqgguf.cli.run_request import RunRequest
from tqgguf.formats.blocks.cache_spec import PRESETS
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.text.sampling_params import SamplingParams

TQGGUF = [sys.executable, "-c", "import sys; from tqgguf.cli.main import main; sys.exit(main())"]


@pytest.fixture(autouse=True)
def no_llama_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line and return the request that reaches the verb's body."""

    def parse(*argv: str, status: int = 0) -> RunRequest:
        requests: list[RunRequest] = []
        monkeypatch.setattr(run_command, "run", lambda request: requests.append(request) or status)
        assert program.main(["run", *argv]) == status
        return requests[0]

    return parse


def tqgguf(*argv: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    return subprocess.run([*TQGGUF, *argv], input=stdin, capture_output=True, env=clean | env, timeout=60)


# From the command line to the request


def test_without_flags_the_request_is_the_default_one(requested: Any) -> None:
    assert requested() == RunRequest()


def test_every_option_reaches_its_field(requested: Any) -> None:
    line = (
        "-m m.gguf -p hello -sys be|brief -n 5 -c 4096 -b 512 -ub 128 -t 3 -ctk turbo4 -ctv turbo3 --exact-prefix 8 "
        "-cnv -st -mli -r A -r B --no-escape --no-display-prompt --chat-template {{x}} -rea off --ignore-eos "
        "--strict-kv --kv-workspace 64 --kv-kernel-rows 4 --json -v --no-perf -q "
        "--debug --temp 0.5 --top-k 3 --top-p 0.4 --min-p 0.3 --typical 0.9 --top-nsigma 1.5 "
        "--xtc-probability 0.2 --xtc-threshold 0.25 --dynatemp-range 0.1 --dynatemp-exp 2 --repeat-penalty 1.1 "
        "--repeat-last-n 7 --presence-penalty 0.6 --frequency-penalty 0.7 --dry-multiplier 0.9 "
        "--dry-base 1.5 --dry-allowed-length 3 --dry-penalty-last-n 99 --dry-sequence-breaker none "
        "--dry-sequence-breaker ; -l 5+1.5 -l 6-inf --samplers top_k;temp -s 9"
    )
    request = requested(*[word.replace("|", " ") for word in line.split()])
    assert request == RunRequest(
        model="m.gguf", prompt="hello", system_prompt="be brief", n_predict=5, n_ctx=4096, n_batch=512, n_ubatch=128,
        threads=3, type_k="turbo4", type_v="turbo3", exact_first=8, conversation=True, single_turn=True,
        multiline_input=True, reverse_prompts=("A", "B"), escape=False, display_prompt=False, chat_template="{{x}}",
        reasoning=False, ignore_eos=True, strict_kv=True, kv_workspace=64, kv_kernel_rows=4,
        json_output=True, verbose=True, debug=True, perf=False, quiet=True,
        sampling=SamplingParams(
            temp=0.5, top_k=3, top_p=0.4, min_p=0.3, typical_p=0.9, top_n_sigma=1.5, xtc_probability=0.2,
            xtc_threshold=0.25, dynatemp_range=0.1, dynatemp_exp=2.0, repeat_penalty=1.1, repeat_last_n=7,
            presence_penalty=0.6, frequency_penalty=0.7, dry_multiplier=0.9, dry_base=1.5, dry_allowed_length=3,
            dry_penalty_last_n=99, dry_sequence_breakers=(";",), logit_bias=((5, 1.5), (6, -float("inf"))),
            samplers=("top_k", "temperature"), seed=9,
        ),
        given=request.given,
    )  # fmt: skip
    assert {"--model", "--temp", "--conversation", "--escape"} <= request.given and "--file" not in request.given


def test_short_and_long_spellings_mean_the_same(requested: Any) -> None:
    short = requested("-f", "a", "-sysf", "b", "-fa", "off", "-no-cnv", "-e")
    long = requested("--file", "a", "--system-prompt-file", "b", "--flash-attn", "0", "--no-conversation", "--escape")
    assert short == long
    assert (short.prompt_file, short.flash_attention, short.conversation) == ("a", "off", False)


def test_sampler_letters_name_the_stages(requested: Any) -> None:
    assert requested("--sampler-seq", "kt").sampling.samplers == ("top_k", "temperature")


def test_cache_types_come_from_the_environment_unless_the_line_names_them(
    requested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "turbo4")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_V", "turbo3")
    request = requested("-ctv", "q8_0")
    assert (request.type_k, request.type_v) == ("turbo4", "q8_0")


def test_flags_without_effect_become_notices(requested: Any) -> None:
    request = requested("-ngl", "99", "-fa", "on", "--mlock")
    assert [notice.partition(":")[0] for notice in request.notices] == ["-ngl 99", "--mlock", "-fa on"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--kv-balance full", ["--kv-balance full: no effect, K is of a float type in every layer"]),
        ("--kv-balance page -ctk f32 -ctv q8_0 --cache-exact-first 4", ["--kv-balance page: no effect, K is of"]),
        ("--cache-exact-first 4", ["--cache-exact-first 4: no effect, K and V are of float types in every layer"]),
        ("--kv-balance off", []),
        ("--kv-balance full -ctk f16,0:q8_0 --cache-exact-first 4", []),
    ],
)
def test_what_float_caches_leave_nothing_to_do_for_is_told(requested: Any, argv: str, told: list[str]) -> None:
    notices = list(requested(*argv.split()).cache_notices)
    assert len(notices) == len(told) and all(n.startswith(t) for n, t in zip(notices, told, strict=True))


def test_the_verbs_status_is_the_programs(requested: Any) -> None:
    requested("-p", "x", status=7)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-ctk", "turbo5"], "-ctk: unknown cache type 'turbo5', did you mean 'turbo4'? known: f32, f16, bf16, q8_0"),
        (["-ctv", "Q8"], "-ctv: unknown cache type 'Q8', did you mean 'q8_0'?"),
        (["-ctv", "turbo3", "-fa", "off"], "-ctv turbo3 with -fa off: a quantised V cache needs flash attention"),
        (["-c", "-1"], "-c: expected a number from 0 to 2147483647, found -1"),
        (["-n", "-3"], "-n: expected a number from -2 to"),
        (["-ub", "0"], "-ub: expected a number from 1 to"),
        (["--exact-prefix", "129"], "--cache-exact-first: expected a number from 0 to 128, found 129"),
        (["--cache-preset", "tiny"], "--cache-preset: expected quality, balanced, small, found 'tiny'"),
        (["--top-p", "1.1"], "--top-p: expected a number from 0 to 1, found 1.1"),
        (["--temp", "inf"], "--temp: expected a finite number, found inf"),
        (["-s", "-2"], "--seed: expected a number from -1 to 4294967295, found -2"),
        (["-l", "5"], "--logit-bias: expected TOKEN+AMOUNT or TOKEN-AMOUNT, found '5'"),
        (["-l", "5+nan"], "--logit-bias: expected a token id from 0 and a finite amount or -inf"),
        (["--samplers", "top_k,temp"], "--samplers: expected names out of"),
        (["--chat-template", "chatml"], "--chat-template chatml: llama.cpp's built-in templates are not here"),
        (["--grammar", "root ::= x"], "--grammar is refused: constrained output is not supported yet"),
        (["-hf", "a/b"], "-hf is refused: tqgguf downloads nothing; fetch the file and give its path with -m"),
        (["--ctx", "5"], "unknown flag --ctx, did you mean --ctx-size?"),
    ],
)
def test_a_bad_request_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["run", "-p", "x", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"tqgguf: error: {message}")


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "f32"])
def test_fa_off_is_fine_with_a_float_v(requested: Any, cache_type: str) -> None:
    assert requested("-fa", "off", "-ctk", "turbo4", "-ctv", cache_type).flash_attention == "off"


# From the request to its texts


def texts(request: RunRequest, stdin: bytes = b"", terminal: bool = False) -> Texts:
    return read_texts(request, io.BytesIO(stdin), terminal)


def test_a_prompt_is_answered_once_and_cnv_chats_on() -> None:
    assert not texts(RunRequest(prompt="hi")).chats_on
    assert texts(RunRequest(prompt="hi", conversation=True)).chats_on
    assert not texts(RunRequest(prompt="hi", conversation=True, single_turn=True)).chats_on
    assert not texts(RunRequest(prompt="hi", conversation=False)).chats_on


def test_a_terminal_without_a_prompt_becomes_a_chat() -> None:
    for prompt in (None, ""):
        found = texts(RunRequest(prompt=prompt), terminal=True)
        assert found.prompt is None and found.chats_on


def test_a_pipe_without_a_prompt_is_the_prompt_unless_it_is_to_chat() -> None:
    assert texts(RunRequest(), b"one\ntwo\n").prompt == "one\ntwo"
    chat = texts(RunRequest(conversation=True), b"one\ntwo\n")
    assert chat.prompt is None and chat.chats_on
    with pytest.raises(RequestError, match="expected a prompt, found none"):
        texts(RunRequest(), b"")
    with pytest.raises(RequestError, match="-no-cnv: expected a text to continue, found none"):
        texts(RunRequest(conversation=False), terminal=True)


def test_a_prompt_file_loses_one_newline_and_a_binary_file_none(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße 🙂\r\n\n\n".encode())
    assert texts(RunRequest(prompt_file=str(file))).prompt == "Grüße 🙂\r\n\n"
    assert texts(RunRequest(binary_file=str(file))).prompt == "Grüße 🙂\r\n\n\n"
    assert texts(RunRequest(system_prompt_file=str(file), prompt="x")).system_prompt == "Grüße 🙂\r\n\n"
    assert texts(RunRequest(prompt_file="-"), b"ab\n").prompt == "ab"


def test_escapes_are_processed_where_llama_cpp_does_it_and_a_changed_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(r"C:\new\table")
    request = RunRequest(prompt_file=str(file), system_prompt=r"a\nb", reverse_prompts=(r"\n\n",))
    found = texts(request)
    assert (found.prompt, found.system_prompt, found.reverse_prompts) == ("C:\new\table", r"a\nb", ("\n\n",))
    assert len(found.notices) == 1 and "--no-escape keeps the text" in found.notices[0]
    plain = texts(RunRequest(prompt_file=str(file), escape=False, reverse_prompts=(r"\n\n",)))
    assert (plain.prompt, plain.reverse_prompts, plain.notices) == (r"C:\new\table", (r"\n\n",), ())
    assert texts(RunRequest(prompt=r"a\nb")).notices == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\rd", "a\nb\tc\rd"),
        (r"\'\"\\", "'\"\\"),
        (r"\\n", r"\n"),
        (r"\x41\x7e", "A~"),
        (r"\xe2\x9c\x93", "✓"),
        (r"\q\x4\xzz\ü", r"\q\x4\xzz\ü"),
        ("end\\", "end\\"),
        ("\\\n", "\\\n"),
    ],
)
def test_escapes_are_llama_cpps(text: str, expected: str) -> None:
    assert process_escapes(text, "-p") == expected


def test_an_escape_that_breaks_utf8_is_refused() -> None:
    with pytest.raises(RequestError, match="-p: expected UTF-8 text"):
        process_escapes(r"\xff", "-p")


@pytest.mark.parametrize("field", ["prompt_file", "binary_file", "system_prompt_file", "chat_template_file"])
def test_a_file_that_cannot_be_read_or_is_not_utf8_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(RequestError, match=r"absent\.txt: No such file or directory"):
        texts(RunRequest(**{"prompt": "x", field: str(tmp_path / "absent.txt")}))
    with pytest.raises(RequestError, match="Is a directory"):
        texts(RunRequest(**{"prompt": "x", field: str(tmp_path)}))
    bad = tmp_path / "latin1.txt"
    bad.write_bytes("abc\xe9".encode("latin-1"))
    with pytest.raises(FormatError, match=r"latin1\.txt: expected UTF-8 text, found byte 0xe9.*\(at byte 3\)") as error:
        texts(RunRequest(**{"prompt": "x", field: str(bad)}))
    assert error.value.exit_status == 1


def test_a_system_prompt_without_a_template_is_told_to_be_lost() -> None:
    found = texts(RunRequest(prompt="x", conversation=False, system_prompt="s"))
    assert found.notices == ("the system prompt has no effect with -no-cnv",)


def turns(typed: str, **request: Any) -> list[str]:
    return list(chat_turns(RunRequest(**request), io.BytesIO(typed.encode()), None))


def test_chat_turns_are_lines_until_the_input_ends() -> None:
    assert turns("one\n\n  \ntwo\r\nlast without newline") == ["one", "two", "last without newline"]
    assert turns("") == []
    assert turns("one\ntwo\n", single_turn=True) == ["one"]


def test_a_backslash_continues_a_message_or_ends_a_multiline_one() -> None:
    assert turns("a\\\nb\nc\n") == ["a\nb", "c"]
    assert turns("a\nb\\\nc\\\n", multiline_input=True) == ["a\nb", "c"]
    assert turns("a\nb\n", multiline_input=True) == ["a\nb"]


def test_escapes_count_in_chat_input_too() -> None:
    assert turns(r"a\tb" + "\n") == ["a\tb"]
    assert turns(r"a\tb" + "\n", escape=False) == [r"a\tb"]


@pytest.mark.parametrize("bad", [b"a\xffb\n", b"\\xff\n"])
def test_a_message_that_is_not_utf8_is_an_error(bad: bytes) -> None:
    with pytest.raises(TqggufError, match="expected UTF-8 text"):
        list(chat_turns(RunRequest(), io.BytesIO(b"one\n" + bad + b"two\n"), None))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_TEXT_BYTES", 3 << 20)
    with open("/dev/zero", "rb") as endless, pytest.raises(FormatError, match="expected lines of at most 3 MiB"):
        next(chat_turns(RunRequest(), endless, None))


# How the program ends


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(request: RunRequest) -> int:
        raise error

    monkeypatch.setattr(run_command, "run", run)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (TqggufError("bad\ninput"), 1, "tqgguf: error: bad input\n"),
        (RequestError("bad request"), 2, "tqgguf: error: bad request\n"),
        (OSError(28, "No space left on device"), 1, "tqgguf: error: output: No space left on device\n"),
        (MemoryError(), 1, "tqgguf: error: out of memory; a smaller -c or a smaller cache type needs less\n"),
        (KeyError("x"), 1, "tqgguf: error: KeyError: 'x' (a defect of tqgguf; --debug shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_with_its_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    line: str,
) -> None:
    raising(monkeypatch, error)
    assert program.main(["run", "-p", "x"]) == status
    assert capsys.readouterr().err == line


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, RequestError("bad request"))
    with pytest.raises(RequestError):
        program.main(["run", "-p", "x", "--debug"])


def test_an_unknown_verb_is_one_line_with_the_nearest() -> None:
    found = tqgguf("rum")
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr == b"tqgguf: error: No such command 'rum'. Did you mean 'run'?\n"


def test_an_argument_that_is_not_utf8_is_one_line() -> None:
    found = subprocess.run([*TQGGUF, "run", "-p", b"a\xffb"], capture_output=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == b"tqgguf: error: -p: expected UTF-8 text, found another byte at character 1\n"


def test_help_lists_every_option_under_a_heading_and_does_not_load_mlx() -> None:
    code = "import sys; from tqgguf.cli.main import main; main(['run', '-h']); print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for spelled in ("-ctk, --cache-type-k TYPE", "-no-cnv", "--strict-kv", "Show this message and exit."):
        assert spelled in found.stdout
    headings = re.findall(r"^(\S.*):$", found.stdout, re.MULTILINE)
    options = ["Model and evaluation", "KV cache", "Prompt", "Chat", "Sampling (as in llama.cpp)", "Output"]
    assert headings == [*options, "Examples"]
    assert "'mlx" not in found.stdout and "'numpy" not in found.stdout and "'rich" not in found.stdout


@pytest.mark.parametrize(
    ("argv", "unneeded"),
    [
        ("--version", "numpy tqgguf.cli.run tqgguf.cli.flag_table"),
        ("--help", "numpy mlx gguf tokenizers jinja2"),
        ("run --help", "numpy mlx gguf tokenizers jinja2 tqgguf.cli.run_command tqgguf.cli.bench tqgguf.cli.eval"),
        ("plan --help", "numpy tqgguf.cli.run tqgguf.cli.bench tqgguf.cli.convert"),
        ("validate MODEL", "mlx gguf tokenizers jinja2 tqgguf.runtime tqgguf.cli.run tqgguf.cli.bench"),
        ("inspect MODEL", "mlx gguf tokenizers jinja2 tqgguf.cli.run tqgguf.cli.bench"),
        ("plan -m MODEL", "mlx jinja2 tqgguf.cli.run tqgguf.cli.bench"),
    ],
)
def test_a_verb_imports_no_more_than_it_needs(argv: str, unneeded: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", TinyModel())
    code = "import sys; from tqgguf.cli.main import main; main(sys.argv[1:]); print(*sorted(sys.modules))"
    words = argv.replace("MODEL", str(model)).split()
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    loaded = found.stdout.splitlines()[-1].split()
    assert "tqgguf.cli.program" in loaded
    assert not set(unneeded.split()) & set(loaded)


def test_version_is_printed_by_the_program_and_by_the_verb() -> None:
    outputs = {
        tqgguf(*argv).stdout for argv in (["--version"], ["run", "--version"], ["run", "-ngl", "1", "--version"])
    }
    assert len(outputs) == 1 and outputs.pop().startswith(b"tqgguf ")


def test_a_text_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_TEXT_BYTES", 3 << 20)
    with pytest.raises(FormatError, match="/dev/zero: expected a text of at most 3 MiB, found more; cut it"):
        prompts.read_text("-f", "/dev/zero", io.BytesIO())
    with pytest.raises(FormatError, match="stdin: expected a text of at most 3 MiB"):
        prompts.read_text("-f", "-", io.BytesIO(b"a" * ((3 << 20) + 1)))
    assert len(prompts.read_text("-f", "-", io.BytesIO(b"a" * (3 << 20)))) == 3 << 20


def test_a_preset_names_both_types_and_a_named_type_counts_for_more(requested: Any) -> None:
    for name, types in PRESETS.items():
        request = requested("--cache-preset", name)
        assert (request.type_k, request.type_v) == types
    request = requested("-ctk", "q8_0", "--cache-preset", "small")
    assert (request.type_k, request.type_v) == ("q8_0", "turbo3")


def test_without_a_verb_the_help_is_shown() -> None:
    found = tqgguf()
    assert found.returncode == 2 and b"Answer a prompt" in found.stdout


def test_a_closed_pipe_is_quiet() -> None:
    code = "import sys\nfrom tqgguf.cli import main, run_command\ndef run(request):\n    while True: print('x' * 999)\n"
    code += "run_command.run = run\nsys.exit(main.main(['run', '-p', 'x']))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 141

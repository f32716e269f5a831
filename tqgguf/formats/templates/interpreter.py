"""The process that renders chat templates: jinja2 and the standard library, nothing of tqgguf.

`process.py` starts this file and is its only caller. A request is the length of a JSON object, in 8 bytes, and that
object: the template's source, the variables, the limits. An answer is one byte (`TEXT`, `MISTAKE`, `FAILURE`), a length
and UTF-8. The limits are the operating system's, so that one call into C counts as well: it kills this process with
SIGPROF when its CPU time is over, and grants no memory beyond RLIMIT_AS (macOS does not heed that: there `process.py`
looks at the memory). Templates see what transformers shows them (utils/chat_template_utils.py of version 5.24).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

TEXT, MISTAKE, FAILURE = b"tmf"  # rendered; the template does not compile; it does, and fails while it is rendered
OUT_OF_MEMORY = 3  # the exit status
MAX_WORDS = 500  # characters of an error

if __name__ == "__main__":  # where jinja2 and markupsafe lie, after the standard library
    sys.path.extend(sys.argv[1:])

import jinja2.debug  # noqa: E402, F401  (Jinja imports it with the first error, when memory may be short)
from jinja2 import Template, TemplateError, nodes, pass_eval_context  # noqa: E402
from jinja2.exceptions import SecurityError  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from jinja2.utils import Namespace  # noqa: E402


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training: a block with a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_words"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _words(self, context: Any, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter has a name that a template could want to give
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, found {name!r}")


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen in training."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _clock(now: str) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        from datetime import datetime  # which few templates need

        return datetime.fromisoformat(now).strftime(format)

    return strftime_now


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
    environment.globals["strftime_now"] = None  # known to the compiler; each request brings its own
    return environment.from_string(source)


def _answer(request: dict[str, Any]) -> tuple[int, bytes]:
    """What to answer, within the limits that the request names."""
    kind = MISTAKE
    try:
        template = _compiled(request["source"])
        kind = FAILURE
        if request["variables"] is None:
            return TEXT, b""
        text = template.render(request["variables"], strftime_now=_clock(request["now"]))
        if len(text) > request["characters"]:
            raise TemplateError(f"it makes {len(text):,} characters, expected at most {request['characters']:,}")
        return TEXT, text.encode("utf-8", "surrogatepass")
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # whatever is left of it is not worth keeping
    except Exception as error:  # a template computes, so it can fail in any way that Python can
        return kind, _words(error).encode("utf-8", "surrogatepass")


def _words(error: Exception) -> str:
    """What an error says, on one line that is not endless."""
    try:
        text = str(error)
    except Exception:
        text = ""
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__} "
    text = name + " ".join(text[: 2 * MAX_WORDS].split())
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."


def _set_limits(request: dict[str, Any]) -> None:
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (request["bytes"], resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while len(length := requests.read(8)) == 8:
        request = json.loads(requests.read(int.from_bytes(length)))
        _set_limits(request)
        kind, payload = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(bytes((kind,)) + len(payload).to_bytes(8) + payload)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)

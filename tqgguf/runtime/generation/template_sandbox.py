"""Jinja for strangers' templates: sandboxed, and bounded in time and memory.

Jinja's own sandbox keeps a template away from Python's objects, but not from `"a" * 10**10` or from loops in loops.
Here whatever multiplies sizes in one call is checked before it runs, and rendering looks at a clock and at the memory
of the process on every line of Python. Knows nothing of chats. Not bounded in time: a render under a debugger or a
coverage tool, which have the one trace hook that there is.
"""

from __future__ import annotations

import functools
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 2**24
"""Characters or items that one step may make, and a whole text may have: four million tokens' worth."""
MAX_SECONDS = 10.0
"""CPU time of one render; real templates take milliseconds."""
MAX_GROWTH = 2**30
"""Bytes that the process may grow by during one render, beyond its largest size before."""

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_TEMPLATE_FILE = "<template>"  # Jinja's name for one that comes from a string
_WIDE = re.compile(r"\d{7,}|\*")  # a width or precision in a format string that makes megabytes, or takes any number


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates fail with TemplateError where they would make too much. See `bounded`."""

    # Operators by which sizes multiply. Intercepted ones are not computed while a template is compiled, either.
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, more_filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self.filters = {name: _checked(name, f) for name, f in {**self.filters, **more_filters}.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_call(method.__name__, owner, args, kwargs)
        return super().call(context, function, *args, **kwargs)


@contextmanager
def bounded() -> Iterator[None]:
    """TemplateError inside, once a render takes too long or the process has grown too much."""
    if sys.gettrace() is not None:
        yield
        return
    sys.settrace(_Watch())
    try:
        yield
    finally:
        sys.settrace(None)


class _Watch:
    """A trace function: called on every line. Clocks cost more than lines, so not every line looks at one."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.memory = _peak_bytes() + MAX_GROWTH
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Watch:
        self.lines += 1
        if self.lines % 256 == 0 and time.thread_time() > self.deadline:
            raise TemplateError(f"it takes more than {MAX_SECONDS:.0f} s")
        # a line of the template's own may double what the one before made
        if frame.f_code.co_filename == _TEMPLATE_FILE and _peak_bytes() > self.memory:
            raise TemplateError(f"it takes more than {MAX_GROWTH >> 20} MiB of memory")
        return self


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def _limit(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateError(f"one step makes {size:,} characters or items, expected at most {MAX_SIZE:,}")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, Sequence, Mapping)) else 0


def _check_operator(operator: str, left: Any, right: Any) -> None:
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "**" and len(numbers) == 2:
        _limit(left.bit_length() * max(right, 0) // 8)
    elif operator == "*" and len(numbers) == 2:
        _limit((left.bit_length() + right.bit_length()) // 8)
    elif operator == "*" and numbers:
        _limit(numbers[0] * max(_length(left), _length(right)))
    elif operator == "+":
        _limit(_length(left) + _length(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def _check_format(text: str) -> None:
    if wide := _WIDE.search(text):
        raise TemplateError(f"a format with the width {wide[0]!r:.20}, expected less than seven digits")


def _check_call(name: str, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A method of a string, or a filter on one, by name: what it makes at most."""
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        _check_format(text)
        for value in values:  # a width may come from an argument
            _limit(value if isinstance(value, int) else 0)
    elif name == "replace" and len(values) > 1:
        old, new = str(values[0]), str(values[1])
        _limit(len(text) + (text.count(old) * len(new) if len(text) * len(new) > MAX_SIZE else 0))
    elif name == "join" and values and hasattr(values[0], "__len__"):
        _limit(len(text) * len(values[0]))
    else:  # widths, indents, tab sizes, counts: at most once a character
        times = max((value for value in values if isinstance(value, int)), default=0)
        per_character = name in ("expandtabs", "indent")
        _limit(times * max(1, text.count("\t") + text.count("\n") if per_character else 1))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks what it is given first. It takes the environment or the context before its value, or not."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def check_first(*args: Any, **kwargs: Any) -> Any:
        value, more = args[first], args[first + 1 :]
        if name == "join" and not isinstance(value, str):
            value, more = next(iter([*more, *kwargs.values()]), ""), (value,)
            _check_call(name, str(value), more, {})
        elif name == "tojson":
            _limit(max((n for n in [*more, *kwargs.values()] if isinstance(n, int)), default=0) * 1024)
        else:
            _check_call(name, value if isinstance(value, str) else "", more, kwargs)
        return function(*args, **kwargs)

    return check_first

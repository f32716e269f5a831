"""The door of the program `tqgguf`: what must hold before anything else is imported.

Ctrl-C is quiet while the rest loads, standard streams are there and speak UTF-8. What happens then is `program`'s.
What is imported up here, outside `main`, Python itself has loaded before: whatever else took time before the first line
of `main` could be interrupted with a traceback.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Run the command line (`sys.argv` without the program's name by default) and return the exit status."""
    try:
        problem = _stand_on_streams() or _missing_folder()
        if problem is not None:
            print(f"tqgguf: error: {problem}", file=sys.stderr)
            return 1
        from tqgguf.cli import program

        return program.main(argv)
    except KeyboardInterrupt:
        from tqgguf.cli.exit_status import INTERRUPTED

        return INTERRUPTED


def _stand_on_streams() -> str | None:
    """See to the standard streams; what is wrong with them, if that is not to be mended.

    A closed stdin is an empty one, a closed stderr says nothing: devnull takes their place, so that no file that is
    opened later gets their numbers. Text is UTF-8 whatever the locale says, as llama.cpp's is, and never fails for a
    file's name that is not.
    """
    if sys.stdin is None:
        sys.stdin = _devnull("r")
    problem = None
    if sys.stdout is None:
        problem = "stdout is closed: there is nowhere to write; redirect it to /dev/null if the text is not wanted"
        sys.stdout = _devnull("w")
    if sys.stderr is None:
        sys.stderr = _devnull("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return problem


def _devnull(mode: str) -> Any:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")


def _missing_folder() -> str | None:
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder has been removed; change to another one"
    return None


if __name__ == "__main__":
    sys.exit(main())

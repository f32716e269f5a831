"""A cursor over a file's bytes that knows its bounds.

Whatever would go beyond the end, or beyond a limit, is an error before it is read or allocated. What the values mean
is the caller's business; only the string of GGUF (u64 length, then the bytes) is known here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import Final

from tqgguf.formats.rules.table import DefectError

Buffer = bytes | mmap.mmap
Report = Callable[[DefectError], None]
"""What becomes of a defect: it is raised, or collected."""

U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")


def raise_errors(defect: DefectError) -> None:
    """How a reader takes defects: the first error ends it, warnings are nothing to it."""
    if defect.is_error:
        raise defect


class Cursor:
    """Reads the little-endian values of `buffer` in order. `what` names the thing being read, `at` the offset to report
    where that is not the cursor's own `position`. `truncated` is the rule that a file breaks which ends here, `failure`
    the error of files of this kind.
    """

    truncated: str
    failure: type[DefectError]

    def __init__(self, buffer: Buffer, path: str, report: Report = raise_errors) -> None:
        self.report = report
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self.path = path

    @property
    def left(self) -> int:
        return self.size - self.position

    def error(
        self, code: str, message: str, at: int | None = None, expected: object = None, found: object = None
    ) -> DefectError:
        offset = self.position if at is None else at
        return self.failure(code, self.path, message, offset=offset, expected=expected, found=found)

    def need(self, n_bytes: int, what: str, at: int | None = None) -> None:
        """Demands that `n_bytes` are left."""
        if n_bytes > self.left:
            raise self.error(
                self.truncated,
                f"truncated in {what}: it needs {n_bytes} bytes and {self.left} are left "
                f"(expected a file of at least {self.position + n_bytes} bytes, found {self.size}); "
                "the download is incomplete or the file is damaged",
                at,
                f"{n_bytes} bytes",
                f"{self.left} bytes left",
            )

    def limit(self, count: int, maximum: int, what: str, at: int, code: str = "over-limit") -> None:
        """Demands that a count or length just read is not absurd."""
        if count > maximum:
            raise self._over_limit(count, maximum, what, at, code)

    def _over_limit(self, count: int, maximum: int, what: str, at: int, code: str) -> DefectError:
        message = f"{what} is {count}, expected at most {maximum}; the file is damaged"
        return self.error(code, message, at, f"at most {maximum}", count)

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = U64.unpack_from(self.buffer, self.position)[0]
        self.position += 8
        return value

    def text(self, what: str, maximum: int, too_long: str = "over-limit", skipped: int = 0) -> str:
        """A string of at most `maximum` bytes. Bytes that are not UTF-8 become lone surrogates (`surrogateescape`).

        A longer one breaks the rule `too_long`. Up to `skipped` bytes it can be read past: its first `maximum` bytes
        are the result then.
        """
        at = self.position
        n_bytes = self.u64(f"the length of {what}")
        if n_bytes > maximum:
            error = self._over_limit(n_bytes, maximum, f"the length of {what}", at, too_long)
            if n_bytes > min(skipped, self.left):
                raise error
            self.report(error)
        self.need(n_bytes, what, at)
        start = self.position
        self.position += n_bytes
        return self.buffer[start : start + min(n_bytes, maximum)].decode("utf-8", "surrogateescape")

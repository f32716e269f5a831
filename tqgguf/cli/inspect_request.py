"""What `tqgguf inspect` is asked to show."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_KEY = ""


@dataclass(frozen=True)
class InspectRequest:
    """file: its path. tensors: only those. key: of metadata, or a pattern; EVERY_KEY: all; None: no metadata only."""

    file: str
    tensors: bool = False
    key: str | None = None
    json_output: bool = False

    @property
    def in_full(self) -> bool:
        """Whether values are wanted whole."""
        return self.key not in (None, EVERY_KEY)

"""Options of verbs that do not take llama.cpp's command lines, where the table of flags has them: annotations of
parameters."""

from __future__ import annotations

from typing import Annotated

from tqgguf.cli.flag_table import row_of
from tqgguf.cli.verb import option_of

Debug = Annotated[bool, option_of(row_of("--debug"))]
Version = Annotated[bool, option_of(row_of("--version"))]

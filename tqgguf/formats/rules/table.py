"""The one table of what can be wrong with a file, and the error that names a rule of it.

TQ0xx: what the file is at all. TQ1xx: the structure of GGUF. TQ2xx: a model's metadata and tensors. TQ3xx: snapshots.
TQ4xx: llama.cpp's session and sequence files. TQ5xx: safetensors files. TQ6xx: against a model. TQ7xx: calibrations.
Ids are never given to another rule. `spec/rules.md` is made from this table; the checks themselves stand with the
formats that they are about.
"""

from __future__ import annotations

from typing import Final

from tqgguf.formats.errors import FormatError, one_line
from tqgguf.formats.rules.gguf import GGUF_RULES
from tqgguf.formats.rules.llama import LLAMA_RULES
from tqgguf.formats.rules.mlx import MLX_RULES
from tqgguf.formats.rules.model import BELONGING_RULES, CALIBRATION_RULES, MODEL_RULES, SAFETENSORS_RULES
from tqgguf.formats.rules.rule import ERROR, Rule
from tqgguf.formats.rules.snapshot import SNAPSHOT_RULES

RULES: Final[dict[str, Rule]] = {
    rule.name: rule
    for rules in (
        GGUF_RULES,
        MODEL_RULES,
        SNAPSHOT_RULES,
        LLAMA_RULES,
        SAFETENSORS_RULES,
        MLX_RULES,
        BELONGING_RULES,
        CALIBRATION_RULES,
    )
    for rule in rules
}


class DefectError(FormatError):
    """A file breaks a rule. Rules make these without raising them; a reader raises the first that is an error, a
    validator collects all.

    code: the rule's name, a key of `RULES`. path: the file. offset: of the field that is wrong, in bytes from the
    beginning of the file, where there is one. tensor: the tensor it is about. expected, found: short texts, where the
    defect is that one thing stands in another's place. bare: the message without path and offset.
    """

    def __init__(
        self,
        code: str,
        path: str,
        message: str,
        *,
        offset: int | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        assert code in RULES, code
        super().__init__(f"{path}: {message}", offset=offset)
        self.code = code
        self.path = path
        self.bare = one_line(message)
        self.tensor = tensor
        self.expected = None if expected is None else one_line(str(expected))
        self.found = None if found is None else one_line(str(found))

    @property
    def rule(self) -> Rule:
        return RULES[self.code]

    @property
    def is_error(self) -> bool:
        return self.rule.severity == ERROR

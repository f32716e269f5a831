"""Makes rules.md from the table of rules: `python spec/make_rules.py`, in an environment that has what the tests need.

The example of each rule is what the validator says of the smallest file that breaks it, which the tests have.
tests/test_rules_document.py compares the file with the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tqgguf.formats.rules.rule import Rule
from tqgguf.formats.rules.table import RULES

SPEC = Path(__file__).parent
GROUPS = {
    "TQ0": "What a file is",
    "TQ1": "The structure of GGUF files and of sets of shards",
    "TQ2": "What a model says of itself, and its data",
    "TQ3": "Snapshots in our GGUF carrier",
    "TQ4": "llama.cpp's session and sequence files",
    "TQ5": "safetensors files and mlx-lm's prompt caches",
    "TQ6": "Against a model (`--model`)",
    "TQ7": "Calibrations",
}
INTRODUCTION = """\
# The rules of `tqgguf validate`

Each finding names one of these. An id is never given to another rule. An *error* says that a file breaks its format or
contradicts itself: tqgguf's readers refuse what is broken in structure, and a model's data when they are asked for. A
*warning* says that it is legal, but that something will go wrong elsewhere (`--strict` fails on them too). The last
line of each is what the validator says of a small file that breaks the rule.

This file is made from the program's own table (`python spec/make_rules.py`). It informs; it is not normative.
"""


def document() -> str:
    """The whole of rules.md."""
    examples = example_messages()
    parts = [INTRODUCTION]
    for prefix, title in GROUPS.items():
        rules = sorted(rule for rule in RULES.values() if rule.id.startswith(prefix))
        parts += [f"## {title}\n", *(section(rule, examples[rule.name]) for rule in rules)]
    return "\n".join(parts)


def section(rule: Rule, example: str) -> str:
    meaning = rule.meaning[0].upper() + rule.meaning[1:]
    return f"**{rule.id} {rule.name}** ({rule.severity}). {meaning}.\n*Remedy:* {rule.remedy}.\n\n    {example}\n"


def example_messages() -> dict[str, str]:
    """Rule name -> what `tqgguf validate` prints behind the file's name."""
    sys.path.insert(0, str(SPEC.parent / "tests"))
    from unsound_files import unsound_files

    from tqgguf.formats.validation.validate import validate

    messages = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in unsound_files(Path(folder)).items():
            place = Path(folder) / name
            place.mkdir()
            path = case.write(place)
            os.chdir(place)  # so that messages name no folder
            try:
                found = validate(path.name, case.model)
            finally:
                os.chdir(before)
            first = next(finding for finding in found if finding.rule.name == name)
            at = "" if first.offset is None else f" (at byte {first.offset})"
            messages[name] = f"{first.message}{at}"
    return messages


if __name__ == "__main__":
    (SPEC / "rules.md").write_text(document(), encoding="utf-8")

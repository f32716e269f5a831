"""spec/rules.md says of every rule what the table says, with an example of what the validator prints."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tqgguf.formats.rules.table import RULES

SPEC = Path(__file__).parent.parent / "spec"
TEXT = (SPEC / "rules.md").read_text(encoding="utf-8")


def test_the_document_is_what_the_table_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_rules", SPEC / "make_rules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.document() == TEXT, "run python spec/make_rules.py"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_stands_in_the_document_with_all_that_it_has(name: str) -> None:
    rule = RULES[name]
    match = re.search(rf"^\*\*{rule.id} {name}\*\* \((\w+)\)\. (.+)\.\n\*Remedy:\* (.+)\.\n\n {{4}}(.+)$", TEXT, re.M)
    assert match
    assert match[1] == rule.severity
    assert match[2].lower() == rule.meaning.lower()
    assert match[3] == rule.remedy


def test_ids_and_names_are_given_once_and_groups_are_kept() -> None:
    ids = [rule.id for rule in RULES.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"TQ[0-7]\d\d", each) for each in ids)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and len(name) <= 32 for name in RULES)
    assert RULES["tensor-overlap"].id == "TQ101"
    assert all(rule.name == name and rule.severity in ("error", "warning") for name, rule in RULES.items())
    assert re.findall(r"^\*\*(TQ\d+)", TEXT, re.M) == sorted(ids)

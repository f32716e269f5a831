"""Every verb's --help ends with examples. That they work is said in test_examples.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import tqgguf

from tqgguf.cli.bench import EXAMPLES as BENCH_EXAMPLES
from tqgguf.cli.cache import EXAMPLES as CACHE_EXAMPLES
from tqgguf.cli.calibrate import EXAMPLES as CALIBRATE_EXAMPLES
from tqgguf.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from tqgguf.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from tqgguf.cli.eval import EXAMPLES as EVAL_EXAMPLES
from tqgguf.cli.inspect import EXAMPLES as INSPECT_EXAMPLES
from tqgguf.cli.plan import EXAMPLES as PLAN_EXAMPLES
from tqgguf.cli.run import EXAMPLES as RUN_EXAMPLES
from tqgguf.cli.selftest import EXAMPLES as SELFTEST_EXAMPLES
from tqgguf.cli.validate import EXAMPLES as VALIDATE_EXAMPLES

EXAMPLES = {
    "run": RUN_EXAMPLES,
    "eval": EVAL_EXAMPLES,
    "calibrate": CALIBRATE_EXAMPLES,
    "doctor": DOCTOR_EXAMPLES,
    "validate": VALIDATE_EXAMPLES,
    "convert": CONVERT_EXAMPLES,
    "inspect": INSPECT_EXAMPLES,
    "plan": PLAN_EXAMPLES,
    "bench": BENCH_EXAMPLES,
    "selftest": SELFTEST_EXAMPLES,
    "cache": CACHE_EXAMPLES,
}


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb_ends_with_its_examples(verb: str, tmp_path: Path) -> None:
    shown = tqgguf(tmp_path, verb, "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {example}\n" for example in EXAMPLES[verb]))


def test_the_help_of_the_program_ends_with_the_first_example_of_every_verb(tmp_path: Path) -> None:
    shown = tqgguf(tmp_path, "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {examples[0]}\n" for examples in EXAMPLES.values()))

"""`tqgguf selftest` passes on a sound device, and fails on a wrong one, on none, and on one that raises."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS

from tqgguf.cli import selftest_command
from tqgguf.cli.program import main
from tqgguf.cli.selftest_command import selftest
from tqgguf.runtime.attention.arithmetic import NumpyArithmetic
from tqgguf.runtime.attention.backend import MlxBackend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.backends import gpu_family
from tqgguf.runtime.kernels.launch import MlxLauncher
from tqgguf.runtime.selftest import (
    HEAD_DIMS,
    QUICK_HEAD_DIMS,
    QUICK_TYPES,
    SHAPES,
    Case,
    all_cases,
    attention_cases,
    codec_cases,
)
from tqgguf.runtime.selftest_matrices import MATRIX_TYPES
from tqgguf.runtime.selftest_speed import measure


@pytest.mark.parametrize("backend", [NumpyBackend, MlxBackend])
def test_readings_that_are_right_pass(backend: type) -> None:
    outcomes = [case.run() for case in all_cases(backend(), (64,))]
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert {outcome.operation for outcome in outcomes} == {"encode", "decode", "attention"}


def test_head_sizes_that_a_type_cannot_hold_are_left_out() -> None:
    assert {case.types for case in all_cases(NumpyBackend(), (160,))} & {"turbo4", "turbo4/turbo3"} == set()
    assert len(all_cases(NumpyBackend(), HEAD_DIMS, all_pairs=True)) > len(all_cases(NumpyBackend(), HEAD_DIMS))


class WrongArithmetic(NumpyArithmetic):
    """Decodes one value in a thousand a little too large."""

    def decode(self, side, first, last):
        values = super().decode(side, first, last).copy()
        values[:, 10, 0] *= 1.5
        return values


class Wrong(NumpyBackend):
    arithmetic = WrongArithmetic()


def test_one_wrong_value_is_found() -> None:
    wrong = {case.operation for case in codec_cases(Wrong(), 64) if not case.run().passed}
    assert wrong == {"decode"}
    assert not all(case.run().passed for case in attention_cases(Wrong(), 64, "turbo4", "turbo3"))


def test_what_a_device_raises_is_a_failure() -> None:
    # there is no GPU where tests run: MLX refuses the kernels
    backend = KernelBackend(MlxLauncher("metal"))
    outcomes = [case.run() for case in attention_cases(backend, 64, "turbo4", "turbo3", SHAPES[:1])]
    assert [outcome.passed for outcome in outcomes] == [False]
    assert outcomes[0].problem


N_CASES = 80 if C_PATHS else 73
"""On a CPU, of one head size: the C library attends seven batches at once."""


def test_values_that_are_no_numbers_fail() -> None:
    class NanArithmetic(NumpyArithmetic):
        def decode(self, side, first, last):
            return np.full_like(super().decode(side, first, last), np.nan)

    class Nan(NumpyBackend):
        arithmetic = NanArithmetic()

    assert not next(case for case in codec_cases(Nan(), 64) if case.operation == "decode").run().passed


def test_the_command_prints_a_table_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--head-dim", "64"]) == 0
    out = capsys.readouterr().out
    assert "attention  turbo4/turbo3" in out and f"{N_CASES} cases: all right" in out and "FAILED" not in out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("cpu", (64,), all_pairs=False, quick=False, bench=False, json_output=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 0 and found["kernels_launched"] == 0 and len(found["cases"]) == N_CASES
    assert set(found["cases"][0]) >= {"operation", "types", "head_dim", "error", "limit", "passed"}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_asking_for_a_gpu_where_there_is_none_fails(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_family() is not None:  # a developer's machine: what is asked for is there
        return
    try:
        assert main(["selftest", "--device", "gpu", "--head-dim", "64", *flags]) == 1
    finally:
        mx.set_default_device(mx.cpu)
    assert flags or "nothing ran on a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--device", "tpu"], ["--head-dim", "0"]])
def test_requests_that_cannot_be_end_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_speed_is_a_time_for_each_pair_of_types() -> None:
    speeds = list(measure(MlxBackend(), keys=(256,)))
    assert [s.n_keys for s in speeds] == [256] * len(speeds)
    assert all(s.blocks_us > 0 and s.f16_us > 0 for s in speeds)


def test_an_operation_is_shown_as_soon_as_its_cases_are_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    sound = Case("encode", "q8_0", 64, "row by row", 1e-3, lambda: 2e-4)
    monkeypatch.setattr(selftest_command, "all_cases", lambda *_: [sound, replace(sound, compare=interrupted), sound])
    with pytest.raises(KeyboardInterrupt):
        selftest("cpu", (), all_pairs=False, quick=False, bench=False, json_output=False)
    assert "encode" not in capsys.readouterr().out  # its second case is not through
    other = replace(sound, types="turbo4", compare=interrupted)
    monkeypatch.setattr(selftest_command, "all_cases", lambda *_: [sound, other, sound])
    with pytest.raises(KeyboardInterrupt):
        selftest("cpu", (), all_pairs=False, quick=False, bench=False, json_output=False)
    assert capsys.readouterr().out.endswith(
        "operation  types   cases  failed  worst error  limit\nencode     q8_0        2       0      2.0e-04  1e-03\n"
    )


def test_a_quick_run_takes_one_head_size_and_the_usual_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--quick", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert {case["types"] for case in cases} == QUICK_TYPES - set(MATRIX_TYPES)
    assert set(MATRIX_TYPES) & QUICK_TYPES and {case["head_dim"] for case in cases} == set(QUICK_HEAD_DIMS)
    assert main(["selftest", "--quick", "--all"]) == 2
    assert capsys.readouterr().err == "tqgguf: error: --all and --quick: leave one out\n"

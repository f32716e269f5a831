"""The emulator on which kernels are tested finds what makes kernels wrong on a GPU: every check catches its mistake."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from emulator.builder import read_signature
from emulator.exporter import metal_text
from emulator.front_end import complaints, cuda_complaints
from emulator.launcher import EmulatedLauncher, EmulatorError, run

from tqgguf.runtime.kernels.launch import Kernel, Threads

SIMDGROUPS = 2
N = 32 * SIMDGROUPS

# Every thread gives its neighbour in the threadgroup what it has been given, and its simdgroup's sum.
SOUND = """
  SHARED(float, shared, 32 * SIMDGROUPS);
  const uint i = thread_index_in_threadgroup;
  shared[i] = x[threadgroup_position_in_grid.x * uint(32 * SIMDGROUPS) + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float next = shared[(i + 1u) % uint(32 * SIMDGROUPS)];
  const float sum = simd_sum(next);
  out[threadgroup_position_in_grid.x * uint(32 * SIMDGROUPS) + i] = next + sum;
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = "simd_sum(next)"


@dataclass(frozen=True)
class Inline(Kernel):
    """A kernel whose body is here and not in a file."""

    text: str = SOUND

    def body(self) -> str:
        return self.text


def launch(body: str, n_groups: int = 2, simdgroups: int = SIMDGROUPS, seed: int = 1) -> np.ndarray:
    kernel = Inline("neighbours", (), ("x",), ("out",), ("unused",), body)
    x = mx.arange(n_groups * N, dtype=mx.float32)
    (out,) = EmulatedLauncher(seed).launch(
        kernel, {"x": x}, (), Threads((n_groups, 1, 1), simdgroups), [((n_groups * N,), mx.float32)]
    )
    return np.array(out)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sound_kernel_gives_its_answer_in_any_schedule(seed: int) -> None:
    x = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    following = np.roll(x, -1, axis=1)
    sums = following.reshape(2, SIMDGROUPS, 32).sum(axis=2).repeat(32, axis=1)
    assert np.array_equal(launch(SOUND, seed=seed), (following + sums).ravel())


MISTAKES = {
    "a missing barrier": (BARRIER, "", "race: shared|unwritten"),
    "a simdgroup barrier where a threadgroup's is needed": (
        BARRIER,
        BARRIER.replace("thread", "simd", 1),
        "race|unwritten",
    ),
    "a barrier that some simdgroups do not reach": (
        "  out[",
        f"  if (i < 32u) {BARRIER}\n  out[",
        "not reached by every",
    ),
    "a barrier that some lanes do not reach": ("  out[", f"  if (i != 3u) {BARRIER}\n  out[", "divergent simdgroup"),
    "a simd operation that some lanes leave out": (SUM, "(i == 5u ? 0.0f : simd_sum(next))", "divergent simdgroup"),
    "two threads that write one element": ("shared[i] =", "shared[i / 2u * 2u] =", "race: shared|unwritten"),
    "threadgroup memory that nobody wrote": ("shared[i] =", "if (i != 7u) shared[i] =", "unwritten threadgroup memory"),
    "an index beyond a threadgroup array": ("% uint(32 * SIMDGROUPS)]", "]", "threadgroup index out of bounds"),
    "too much threadgroup memory": ("32 * SIMDGROUPS);\n", "9000);\n", "threadgroup memory: shared"),
    "a read beyond a buffer": ("= x[", "= x[4096u + ", "device memory out of bounds"),
    "a read before a buffer": ("= x[", "= x[-8 + (int)", "device memory out of bounds"),
    "a write beyond a buffer": ("out[", "out[4096u + ", "device memory out of bounds"),
    "a shift by a word's width": ("next + sum", "next + sum + float(1u << (i + 8u))", "undefined behaviour"),
    "a shuffle from no lane": (SUM, "simd_shuffle(next, ushort(i + 1u))", "simd_shuffle from lane"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_finds(mistake: str) -> None:
    old, new, message = MISTAKES[mistake]
    assert SOUND.count(old) >= 1
    with pytest.raises(EmulatorError, match=message):
        launch(SOUND.replace(old, new))


def test_a_threadgroup_has_at_most_1024_threads() -> None:
    with pytest.raises(EmulatorError, match="more than 1024 threads"):
        launch(SOUND, n_groups=1, simdgroups=33)


def test_a_kernel_can_be_run_again_after_a_fault() -> None:
    with pytest.raises(EmulatorError, match="out of bounds"):
        launch(SOUND.replace("= x[", "= x[4096u + "))
    assert np.isfinite(launch(SOUND)).all()


def test_a_grid_is_a_multiple_of_its_threadgroups() -> None:
    # Metal would cut the last threadgroup short, CUDA round up
    text = metal_text(
        Inline("neighbours", (), ("x",), ("out",), ("unused",)),
        {"x": mx.zeros((N,))},
        (),
        Threads((1, 1, 1), SIMDGROUPS),
        [((N,), mx.float32)],
    )
    with pytest.raises(EmulatorError, match="no multiple of threadgroups"):
        run(text, [bytes(4 * N)], [4 * N], (N + 8, 1, 1), (N, 1, 1))


# What MLX 0.32 generates around a body. Where a version changes it, this and builder.py are to be looked at.
def test_mlx_generates_the_signature_that_the_emulator_reads() -> None:
    text = metal_text(
        Inline("neighbours", (), ("x", "y"), ("out",), ("unused",), "out[thread_position_in_grid.x] = T(x[0] + y[0]);"),
        {"x": mx.zeros((N,)), "y": mx.zeros((4,))},
        (("T", mx.float16), ("WIDTH", 3), ("FLAG", True)),
        Threads((1, 1, 1), 2),
        [((N,), mx.float16)],
    )
    signature = read_signature(text)
    assert signature.buffers == (("const float", "x"), ("const float", "y"), ("float16_t", "out"))
    assert signature.attributes == ("thread_position_in_grid",)
    assert signature.call.endswith("<float16_t, 3, 1, 2>")
    assert "const constant float* y" in text, "MLX no longer takes inputs below eight elements for `constant`"


FRONT_END_MISTAKES = {
    "a pointer into another address space": (
        "  out[",
        "  const thread float* p = shared;\n  out[",
        "cannot initialize",
    ),
    "a double literal": ("next + sum", "next + sum * 0.5", "double"),
    "a name that MSL does not have": (SUM, "simd_total(next)", "simd_total"),
}


def front_end(body: str) -> list[str]:
    kernel = Inline("neighbours", (), ("x",), ("out",), ("unused",), body)
    outputs = [((N,), mx.float32)]
    return complaints(metal_text(kernel, {"x": mx.zeros((N,))}, (), Threads((1, 1, 1), SIMDGROUPS), outputs))


def test_the_front_end_accepts_a_sound_kernel() -> None:
    assert front_end(SOUND) == []


def test_the_front_end_reads_kernels_as_cuda_too() -> None:
    def found(body: str) -> list[str]:
        kernel = Inline("neighbours", (), ("x",), ("out",), ("unused",), body)
        return cuda_complaints(kernel, {"x": mx.zeros((N,))}, (), Threads((1, 1, 1), SIMDGROUPS), [((N,), mx.float32)])

    assert found(SOUND) == []
    assert any("simd_total" in line for line in found(SOUND.replace(SUM, "simd_total(next)")))


@pytest.mark.parametrize("mistake", FRONT_END_MISTAKES)
def test_the_front_end_finds(mistake: str) -> None:
    old, new, message = FRONT_END_MISTAKES[mistake]
    found = front_end(SOUND.replace(old, new))
    assert any(message in line for line in found), found

"""Attention over some of the keys that rows see, with the log-sum-exp by which such answers are joined to one.

MLX's CUDA kernel computes it for gradients and shows it to nobody. But a function that MLX exports while it
differentiates names that second output in its file; once it stands among the file's outputs, the imported function
returns it. Whether that holds on a machine is tried out once; where it does not, there is no such attention.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

MOST_HEAD_DIM = 128  # that cuDNN takes
_ROWS = 128  # MLX keeps a log-sum-exp where the rows are a multiple of this
_KEPT = 512  # imported functions, of one shape each
_HOME = mx.default_stream(mx.gpu) if mx.cuda.is_available() else None
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, OSError, struct.error)


class PartialAttention(Protocol):
    """Attention that also gives what is needed to join it with other keys' answers."""

    def __call__(
        self, q: mx.array, keys: mx.array, values: mx.array, *, scale: float, causal: bool = False
    ) -> tuple[mx.array, mx.array]:
        """Answers and log-sum-exps (natural, of scaled scores) f32 [batch, n_heads, rows, 1].

        q: [batch, n_heads, rows, head_dim], rows a multiple of 128; keys, values: [batch, n_kv_heads, tokens, ...],
        all f16 or all bf16. causal: the last row sees all keys, the one before it all but the last, and so on.
        """


def plain_partial(
    q: mx.array, keys: mx.array, values: mx.array, *, scale: float, causal: bool = False
) -> tuple[mx.array, mx.array]:
    """PartialAttention by operations of MLX that hold all scores in f32."""
    n_batch, n_heads, n_rows, _ = q.shape
    n_kv_heads, n_keys = keys.shape[1:3]
    grouped = q.astype(mx.float32).reshape(n_batch, n_kv_heads, -1, n_rows, q.shape[3])
    scores = scale * grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    if causal:
        unseen = mx.arange(n_keys) > mx.arange(n_keys - n_rows, n_keys)[:, None]
        scores = mx.where(unseen, -mx.inf, scores)
    sums = mx.logsumexp(scores, axis=-1, keepdims=True)
    out = mx.exp(scores - sums) @ values.astype(mx.float32)[:, :, None]
    return out.reshape(n_batch, n_heads, n_rows, -1).astype(q.dtype), sums.reshape(n_batch, n_heads, n_rows, 1)


def fused_partial(
    q: mx.array, keys: mx.array, values: mx.array, *, scale: float, causal: bool = False
) -> tuple[mx.array, mx.array]:
    """PartialAttention by MLX's own kernel, up to MOST_HEAD_DIM; RuntimeError and others where `can_be_fused` is not
    so."""
    out, sums = _imported(tuple(q.shape), tuple(keys.shape), tuple(values.shape), q.dtype, scale, causal)(
        q, keys, values
    )
    return out, sums


@lru_cache(maxsize=_KEPT)
def _imported(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, scale: float, causal: bool
) -> Callable[..., list[mx.array]]:
    def attention(*inputs: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(*inputs, scale=scale, mask="causal" if causal else None)

    def differentiated(*inputs: mx.array) -> mx.array:
        gradient = mx.zeros((*q[:3], values[3]), dtype=dtype)  # of no use but to say that there will be one
        return mx.vjp(attention, list(inputs), [gradient])[0][0]

    return with_siblings(differentiated, *(mx.zeros(shape, dtype=dtype) for shape in (q, keys, values)))


def with_siblings(function: Callable[..., mx.array], *inputs: mx.array) -> Callable[..., list[mx.array]]:
    """A function of arrays that returns all outputs of the operation whose first output `function` returns.

    For inputs of the shapes and types given. ValueError: the operation has no other outputs, or MLX's files are not as
    they were.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "function.mlxfn"
        mx.export_function(str(path), function, *inputs)
        path.write_bytes(_name_siblings(path.read_bytes()))
        imported: Any = mx.import_function(str(path))
        return imported


def _name_siblings(data: bytes) -> bytes:
    """An exported function of one output, with the other outputs of the same operation after it."""
    reader = _Reader(data)
    reader.string()  # the version of MLX
    reader.take("<i?")  # functions, and whether they are of any shape
    reader.string()  # notes
    if reader.count():
        raise ValueError("an exported function of positional arguments has names of arguments")
    reader.take(f"<{reader.count()}Q")
    for _ in range(reader.count()):
        reader.take(f"<{reader.count()}i")  # the shape of an input, and its type
        reader.take("<iB")
    start = reader.at
    outputs = reader.take(f"<{reader.count()}Q")
    if len(outputs) != 1:
        raise ValueError(f"an exported function has {len(outputs)} outputs instead of one")
    n_outputs = 2
    named = data.find(struct.pack("<QQ", n_outputs, outputs[0]), reader.at)
    if named < 0:
        raise ValueError("an operation has no second output")
    size = struct.calcsize(f"<{1 + n_outputs}Q")
    return data[:start] + data[named : named + size] + data[reader.at :]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def count(self) -> int:
        n: int = self.take("<Q")[0]
        if n > len(self.data):
            raise ValueError(f"{n} items in an exported function of {len(self.data)} bytes")
        return n

    def string(self) -> None:
        self.take(f"<{self.count()}s")


def best_partial() -> PartialAttention | None:
    """What is as fast as MLX's attention, where there is such a thing; it is to be called `on_its_stream`."""
    return fused_partial if _HOME is not None and _can_be_fused_in(threading.get_ident()) else None


def on_its_stream() -> AbstractContextManager[Any]:
    """Imported functions run on the first stream that a GPU was given, which other threads cannot use. Who generates
    on another one lets all of a step's attention run there, as MLX's host waits whenever streams change."""
    return nullcontext() if _HOME is None else mx.stream(_HOME)


@lru_cache(maxsize=64)
def _can_be_fused_in(thread: int) -> bool:
    with on_its_stream():
        return can_be_fused()


def can_be_fused() -> bool:
    """Whether `fused_partial` works here: tried on small inputs, beside `plain_partial`."""
    rng = np.random.default_rng(1)

    def rows(*shape: int) -> mx.array:  # as long steps have them: tokens before heads
        return mx.array(rng.standard_normal(shape).astype(np.float16)).swapaxes(1, 2)

    keys, values = rows(2, 2 * _ROWS, 2, 64), rows(2, 2 * _ROWS, 2, 64)
    q = mx.contiguous(rows(2, _ROWS, 4, 64))
    try:
        for causal in (False, True):
            found = fused_partial(q, keys, values, scale=0.125, causal=causal)
            expected = plain_partial(q, keys, values, scale=0.125, causal=causal)
            for a, b in zip(found, expected, strict=True):
                if a.shape != b.shape or not mx.allclose(a, b, atol=1e-2).item():
                    return False
    except _FAILURES:
        return False
    return True

"""Caches of other engines are imitated as their sources have them: quantisers and rules against plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import parse_pairs
from tqgguf.measuring.evaluation.caches import CacheOptions, Candidate, candidate, reference
from tqgguf.measuring.evaluation.compare import Evaluation, Plan
from tqgguf.measuring.imitations.fake_quantise import _random_matrices, bits_per_value, decoded
from tqgguf.measuring.imitations.simulated_cache import SimulatedCache, charged_bits, simulated
from tqgguf.measuring.imitations.simulated_schemes import (
    SCHEMES,
    Blocks,
    ExactKeys,
    Gaussian,
    IntegerZero,
    MinMax,
    Quantiser,
    Scheme,
    SideScheme,
    SignSketch,
    variant,
)
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.models.load import LoadedModel, open_model

HEADS, DIM = 2, 64
# Max's table of 1960: outputs of the optimum quantiser of N(0, 1)
LLOYD_MAX = {2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152)}


def rows(n: int = 64, seed: int = 11) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = random.standard_normal((HEADS, n, DIM)) * random.uniform(0.1, 4, (1, 1, DIM)) + 0.5
    return found.astype(np.float16).astype(np.float32)


def f16(x: float) -> float:
    return float(np.float16(x))


def plain_min_max(values: list[float], bits: int) -> list[float]:
    low = f16(min(values))
    step = f16((max(values) - low) / (2**bits - 1))
    return [low + step * min(max(round((x - low) / step), 0), 2**bits - 1) for x in values]


def plain_integer_zero(values: list[float], bits: int) -> list[float]:
    """vllm-metal's quantize and dequantize: x = (index + zero_point) * scale."""
    low, high = min(values), max(values)
    if bits == 8:
        step, least, most = (high - low) / 254, -127, 127
        zero = round((high + low) / (2 * step))
    else:
        step, least, most = (high - low) / (2**bits - 1), 0, 2**bits - 1
        zero = round(low / step)
    return [f16(step) * (min(max(round(x / step - zero), least), most) + zero) for x in values]


def by_groups(x: np.ndarray, group: int, one: object, bits: int) -> np.ndarray:
    """A rule for lists applied to neighbouring values of the last axis."""
    parts = x.astype(np.float64).reshape(-1, group).tolist()
    return np.array([one(part, bits) for part in parts]).reshape(x.shape)  # type: ignore[operator]


def hadamard(n: int) -> np.ndarray:
    return np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / math.sqrt(n)


def near(x: np.ndarray, bits: int) -> np.ndarray:
    """Every value replaced by the nearest of Max's."""
    book = np.array([sign * value for value in LLOYD_MAX[bits] for sign in (1, -1)])
    return book[np.abs(x[..., None] - book).argmin(axis=-1)]


def agrees(found: np.ndarray, expected: np.ndarray, limit: float) -> None:
    """All but a few values are equal: rounding may flip a code where a value lies between two."""
    wrong = np.abs(found - expected) > limit * np.abs(expected).max()
    assert wrong.mean() < 2e-3


# Quantisers


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (2, 32), (4, 64), (3, 1000)])
def test_min_and_step_of_a_tokens_channels(bits: int, group: int) -> None:
    x = rows()
    agrees(decoded(MinMax(bits, group), x, "v"), by_groups(x, min(group, DIM), plain_min_max, bits), 1e-5)
    assert bits_per_value(MinMax(bits, group), DIM, "v") == bits + 32 / min(group, DIM)


@pytest.mark.parametrize("group", [32, 64])
def test_min_and_step_of_a_channels_tokens(group: int) -> None:
    x = rows(128)
    expected = by_groups(x.transpose(0, 2, 1), group, plain_min_max, 4).transpose(0, 2, 1)
    agrees(decoded(MinMax(4, group, of_tokens=True), x, "k"), expected, 1e-5)
    assert bits_per_value(MinMax(4, group, of_tokens=True), DIM, "k") == 4 + 32 / group


@pytest.mark.parametrize("bits", [8, 4])
def test_a_zero_point_of_whole_steps(bits: int) -> None:
    x = rows()
    agrees(decoded(IntegerZero(bits, 32), x, "k"), by_groups(x, 32, plain_integer_zero, bits), 1e-5)
    assert bits_per_value(IntegerZero(bits, 32), DIM, "k") == bits + 1


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("renormalised", [False, True])
def test_lloyd_max_codes_of_a_hadamard_rotation(bits: int, group: int | None, renormalised: bool) -> None:
    x = rows()
    y = (x.astype(np.float64) @ hadamard(DIM)).reshape(-1, group or DIM)
    rms = np.sqrt((y**2).mean(axis=1, keepdims=True))
    codes = near(y / rms, bits)
    if renormalised:
        codes /= np.sqrt((codes**2).mean(axis=1, keepdims=True))
    expected = (codes * rms).reshape(x.shape) @ hadamard(DIM)
    found = decoded(Gaussian(bits, group, renormalised=renormalised), x, "v")
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)  # a few codes flip
    assert bits_per_value(Gaussian(bits, group), DIM, "v") == bits + 16 / (group or DIM)


def test_signs_before_a_rotation_change_the_codes_and_not_the_error() -> None:
    x = rows(256)
    plain, signed = (decoded(Gaussian(3, 32, signed=signed), x, "v") for signed in (False, True))
    errors = [np.linalg.norm(found - x) / np.linalg.norm(x) for found in (plain, signed)]
    assert not np.array_equal(plain, signed)
    assert all(0.15 < error < 0.21 for error in errors)  # sqrt(.0345) of a normal distribution


def test_a_sign_sketch_estimates_products_without_bias_and_costs_more_error_than_its_bit_saves() -> None:
    x = rows(4096)
    found = decoded(SignSketch(3), x, "k")
    q = np.random.default_rng(3).standard_normal(DIM)
    wrong = (found.astype(np.float64) - x) @ q
    assert abs(wrong.mean()) < 4 * wrong.std() / math.sqrt(wrong.size)
    three, two = (np.linalg.norm(decoded(Gaussian(bits), x, "k") - x) for bits in (3, 2))
    assert np.linalg.norm(found - x) > max(two, 1.5 * three)
    assert bits_per_value(SignSketch(3), DIM, "k") == 3 + 32 / DIM


def test_a_sign_sketch_is_codes_and_signs_of_what_is_left() -> None:
    rotation, sketch = (matrix.astype(np.float64) for matrix in _random_matrices(DIM))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(DIM), atol=1e-6)
    x = rows(16)
    expected = np.empty(x.shape)
    for at in np.ndindex(x.shape[:2]):
        vector = x[at].astype(np.float64)
        norm = np.linalg.norm(vector)
        coded = near(rotation @ vector / norm * math.sqrt(DIM), 2) / math.sqrt(DIM) @ rotation * norm
        left = vector - coded
        signs = np.where(sketch @ left > 0, 1, -1)
        expected[at] = coded + math.sqrt(math.pi / 2) / DIM * np.linalg.norm(left) * (sketch.T @ signs)
    assert np.linalg.norm(decoded(SignSketch(3), x, "k") - expected) < 0.02 * np.linalg.norm(expected)


def test_our_blocks_are_our_codecs() -> None:
    x = rows()
    for side in ("k", "v"):
        codec = resolve_codec("q4_0", DIM, side)
        assert np.array_equal(decoded(Blocks("q4_0"), x, side), codec.decode(codec.encode(x)))
    assert bits_per_value(Blocks("turbo3"), DIM, "k") == 3.25


@pytest.mark.parametrize(
    "quantiser", [MinMax(4, 32), MinMax(2, 32, of_tokens=True), IntegerZero(8, 32), Gaussian(4), SignSketch(3)]
)
def test_rows_of_one_value_and_of_zeros_decode_to_numbers(quantiser: Quantiser) -> None:
    for x in (np.zeros((1, 32, DIM), np.float32), np.ones((1, 32, DIM), np.float32)):
        assert np.isfinite(decoded(quantiser, x, "k")).all()


# Which keys a query reads in f16


EXACT = {
    "kivi4": (lambda p, j: j // 128 == p // 128, lambda p, j: p - j <= 128),
    "qjl3": (lambda p, j: p - j < 128,) * 2,
    "vllm-metal": (lambda p, j: False,) * 2,
    "recent5": (lambda p, j: p - j < 5,) * 2,
    "mean1": (lambda p, j: j < 4 or p < 256 or j // 128 == p // 128,) * 2,
    "after-prefill": (lambda p, j: p < 200 or j // 128 == p // 128,) * 2,
}


def scheme_of(name: str, n_ctx: int = 400) -> Scheme:
    return SCHEMES.get(name) or variant("turbo3", "turbo4", name, n_ctx)


def coded(side: SideScheme, x: np.ndarray, name: str) -> np.ndarray:
    """What all rows decode to, whole groups of tokens at least."""
    mean = 0.0
    if side.mean_tokens:
        mean = x[:, 4:256].astype(np.float64).mean(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    whole = x.shape[1] // 32 * 32 if isinstance(side.quantiser, MinMax) else x.shape[1]
    return np.concatenate([decoded(side.quantiser, x[:, :whole] - mean, name) + mean, x[:, whole:]], axis=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("steps", [[256, 144], [256, 128, 16]])
def test_a_query_reads_what_the_scheme_says(name: str, window: int | None, steps: list[int]) -> None:
    n = sum(steps)
    k, v = rows(n, 1), rows(n, 2)
    q = np.random.default_rng(3).standard_normal((3 * HEADS, n, DIM)).astype(np.float32) * 0.3
    scheme = scheme_of(name)
    cache = SimulatedCache(scheme, 0, window, Usage())
    found, at = [], 0
    for size in steps:
        part = slice(at, at + size)
        mask = cache.make_mask(size)
        keys, values = cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
        out = hook.scaled_dot_product_attention(mx.array(q[None, :, part]), keys, values, cache, 0.125, mask)
        found.append(np.array(out)[0])
        at += size
    exact_k, exact_v = EXACT[name]
    k_coded, v_coded = coded(scheme.k, k, "k"), coded(scheme.v, v, "v")
    reads = 0
    for p in range(0, n, 7):
        seen = range(0 if window is None else max(0, p - window + 1), p + 1)
        for head in range(3 * HEADS):
            own = head // 3
            scores = np.array([0.125 * q[head, p] @ (k if exact_k(p, j) else k_coded)[own, j] for j in seen])
            weights = np.exp(scores.astype(np.float64) - scores.max())
            parts = [(v if exact_v(p, j) else v_coded)[own, j] for j in seen]
            expected = weights @ np.array(parts, np.float64) / weights.sum()
            np.testing.assert_allclose(np.concatenate(found, axis=1)[head, p], expected, atol=2e-4)
    for p in range(n):
        seen = range(0 if window is None else max(0, p - window + 1), p + 1)
        reads += sum(map(exact_k, [p] * len(seen), seen))
    assert cache.usage.reads.keys_in_float == reads
    assert cache.usage.by_fallback == 0 and not cache.usage.unattended


def test_without_a_tail_pages_of_our_variants_are_read_as_blocks() -> None:
    assert variant("turbo3", "turbo3", "mean1", 400, tail=False).k.exact == ExactKeys(first=4)
    assert variant("turbo3", "turbo3", "mean1", 400, n_prefix=0, tail=False).k.exact == ExactKeys()
    assert variant("turbo3", "turbo3", "after-prefill", 400, tail=False).v.exact == ExactKeys(prompt=200)


def test_without_a_tail_other_engines_read_every_key_as_codes_too_and_are_charged_for_no_window(
    tiny: LoadedModel,
) -> None:
    text = "sim:kivi4,sim:qjl3"
    judged, production = rows_of(tiny, text, tail=False), rows_of(tiny, text)
    assert [row.label for row in judged] == ["sim:kivi4 no tail", "sim:qjl3 no tail"]
    assert [row.bits.v for row in judged] == [5, 3] and all(row.bits.v > 5.5 for row in production)
    klds = evaluated(tiny, [*judged, *production])
    assert klds[0] > 1.3 * klds[2] and klds[1] > 1.3 * klds[3]
    text = "sim:vllm-metal,sim:turbo4@recent32"
    assert [row.label for row in rows_of(tiny, text, tail=False)] == ["sim:vllm-metal", "sim:turbo4/turbo4@recent32"]


# Bits


SHAPE = LayerShape(2, 64, 64)


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("kivi4", 5, (129 * 16 + 1919 * 5) / 2048),
        ("kivi4-g128", 4.25, (129 * 16 + 1919 * 4.5) / 2048),
        ("qjl3", (128 * 16 + 1920 * 3.5) / 2048, (128 * 16 + 1920 * 3) / 2048),
        ("vllm-metal", 9, 3.5),
        ("vllm-4bit-nc", (4 * 16 + 6 * 4.25) / 10, (4 * 16 + 6 * 4.5) / 10),
        ("mean1", (4 * 16 + 2044 * 3.25 + 16) / 2048, (4 * 16 + 2044 * 4.25) / 2048),
        ("recent128", (128 * 16 + 1920 * 3.25) / 2048, (128 * 16 + 1920 * 4.25) / 2048),
        ("after-prefill", 3.25, 4.25),
    ],
)
def test_everything_that_is_kept_is_charged(name: str, k: float, v: float) -> None:
    bits = charged_bits(scheme_of(name, 2048), [SHAPE] * 10, 2048)
    assert (bits.k, bits.v, bits.mean) == pytest.approx((k, v, (k + v) / 2))


def test_a_window_layer_weighs_what_it_holds() -> None:
    scheme = variant("turbo3", "turbo3", "recent100", 2048)
    bits = charged_bits(scheme, [LayerShape(1, 128, 128, window=200), LayerShape(1, 128, 128)], 1000)
    assert bits.k == pytest.approx((200 * 16 + 1000 * 3.125) / 1200)


# In an evaluation


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    spec = TinyModel(head_dim=128, seed=3)
    return open_model(write_tiny(tmp_path_factory.mktemp("simulated") / "m.gguf", spec)).load()


def evaluated(model: LoadedModel, candidates: list[Candidate]) -> list[float]:
    layers = model.config.layer_shapes()
    window = np.random.default_rng(1).integers(0, 280, (1, 384))
    evaluation = Evaluation(model, [reference(layers, 384), *candidates], Plan(window))
    evaluation.run()
    return [result.statistics.kld for result in evaluation.results()[1:]]


def rows_of(model: LoadedModel, text: str, **options: object) -> list[Candidate]:
    layers = model.config.layer_shapes()
    return [candidate(pair, layers, 384, CacheOptions(**options)) for pair in parse_pairs(text)]  # type: ignore[arg-type]


@pytest.mark.parametrize("tail", [True, False])
def test_an_imitation_of_our_own_plain_blocks_is_as_far_from_f16_as_they_are(tiny: LoadedModel, tail: bool) -> None:
    exact = ExactKeys(page=128 if tail else 0)
    scheme = Scheme(SideScheme(Blocks("turbo4"), exact), SideScheme(Blocks("turbo3"), exact), "")
    ours = rows_of(tiny, "turbo4/turbo3@plain", tail=tail)[0]
    imitated = Candidate("imitated", "", "", ours.bits, simulated(scheme), simulated=True)
    a, b = evaluated(tiny, [ours, imitated])
    assert a > 0 and b == pytest.approx(a, rel=0.02)  # rounding flips single codes


def test_every_scheme_can_be_evaluated_and_none_is_exact(tiny: LoadedModel) -> None:
    text = "sim:turbo3@mean1,sim:turbo3@recent32,sim:turbo3/turbo2@after-prefill," + ",".join(
        f"sim:{n}" for n in SCHEMES
    )
    found = rows_of(tiny, text)
    assert all(row.simulated and row.note.startswith("simulated: ") for row in found)
    klds = dict(zip([row.label for row in found], evaluated(tiny, found), strict=True))
    both_ends = ("sim:vllm-4bit-nc", "sim:vllm-3bit-nc")  # the model has two layers, which then stay f16
    assert all((kld == pytest.approx(0, abs=1e-6)) == (label in both_ends) for label, kld in klds.items())
    assert klds["sim:kivi2"] > 2 * klds["sim:kivi4"] and klds["sim:qjl3"] > klds["sim:qjl4"]


def test_a_model_with_windows_is_served(tmp_path: Path) -> None:
    """Compared by the model's outputs: this one's logits are so far apart that all its distributions are certain."""
    spec = TinyModel("gemma3", n_layers=3, head_dim=128, n_kv_heads=1, window=200, window_pattern=2, seed=8)
    model = open_model(write_tiny(tmp_path / "g.gguf", spec)).load()
    rows_ = [reference(model.config.layer_shapes(), 384)]
    rows_ += rows_of(model, "turbo4@plain,sim:turbo4@recent1,sim:kivi4", tail=False)
    window = np.random.default_rng(1).integers(0, 280, 384)
    *_, chunk = Evaluation(model, rows_, Plan(window[None])).chunks(window)
    f16, ours, *others = (np.asarray(outputs) for outputs in chunk.outputs)
    distances = [np.linalg.norm(found - f16) for found in (ours, *others)]
    assert distances[1] == pytest.approx(distances[0], rel=0.1) and 0 < distances[2] < distances[0]


def test_names_of_simulated_caches_are_read_and_shown_as_they_are_written() -> None:
    text = "sim:kivi4,sim:turbo4/turbo3@mean1,sim:q4_0/q4_0@recent128,sim:turbo4/f16@after-prefill"
    pairs = parse_pairs(text)
    assert ",".join(pair.label for pair in pairs) == text
    assert all(pair.simulated for pair in pairs)
    assert [pair.has_blocks for pair in pairs] == [True, True, False, True]  # a tail to leave away


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sim:kivi5", "sim:kivi5: expected one of kivi4, .* after sim:, or types of ours and an @ with one of mean1"),
        ("sim:turbo4", "expected one of kivi4"),
        ("sim:turbo4@recent0", "one of mean1, recentN, after-prefill"),
        ("sim:kivi4@mean1", "sim:kivi4@mean1: unknown cache type 'kivi4'"),
        ("sim:turbo4,0:q8_0@mean1", "expected the same type in all layers of a simulated cache"),
        ("kivi4", "unknown cache type 'kivi4'"),
    ],
)
def test_names_that_nobody_knows_are_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_pairs(text)


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        ("vllm-4bit-nc", 96, "layer 0, K: sim:vllm-4bit-nc cannot hold these heads: it rotates powers of two"),
        ("vllm-metal", 80, "layer 0, K: .*: it takes multiples of 32, found head_dim 80"),
        ("turbo4@recent8", 80, "turbo4 cannot hold head_dim 80"),
    ],
)
def test_heads_that_a_scheme_cannot_hold_are_refused(name: str, head_dim: int, message: str) -> None:
    (pair,) = parse_pairs(f"sim:{name}")
    with pytest.raises(RequestError, match=message):
        candidate(pair, [LayerShape(1, head_dim, head_dim)], 384, CacheOptions())


def test_a_model_that_attends_by_itself_is_refused() -> None:
    cache = SimulatedCache(SCHEMES["kivi4"], 0, None, Usage())
    new = mx.array(rows(8)[None])
    cache.update_and_fetch(new, new)
    with pytest.raises(RequestError, match="layer 0: a simulated cache is for causal attention"):
        cache.update_and_fetch(new, new)

"""The doctor's figures are right, its proposals keep the budget, and keys with huge constants are named."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from attention_reference import as_balanced_blocks, as_blocks, attention
from tiny_models import TinyModel, write_tiny

from tqgguf.cli import program
from tqgguf.formats.blocks.bits_per_value import bits_per_value
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.evaluation.examination import OTHER_TYPES, TYPES, proposable_types
from tqgguf.measuring.evaluation.sensitivity import measure_sensitivity
from tqgguf.runtime.attention.steps import SequenceStep
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.models.load import open_model

QWEN2 = TinyModel("qwen2", rope_base=1e6, seed=6)
SLOWEST = (31, 63)  # the pair of channels of a head that RoPE hardly turns
TOKENS = [(i * i * 7 + i * 31 + 5) % 280 for i in range(384)]
TEXT = "the rain on the weather station is a sound and the goat is at the other end of the red path. " * 40


def with_constant_keys(path: Path, size: float) -> Path:
    """A model whose first layer adds the same `size` to every key, in a channel that stays as it is at any position."""
    bias = np.zeros((QWEN2.n_kv_heads, QWEN2.head_dim), np.float32)
    bias[:, SLOWEST[0]] = size
    return write_tiny(path, QWEN2, tensors={"blk.0.attn_k.bias": bias.reshape(-1)})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("doctor") / "m.gguf", QWEN2)


@pytest.fixture(scope="module")
def dangerous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_constant_keys(tmp_path_factory.mktemp("doctor") / "d.gguf", 400.0)


def attention_error(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, k_blocks: np.ndarray, v_blocks: np.ndarray
) -> float:
    exact = attention(q, k, k, v, v, scale)
    found = attention(q, k_blocks, k, v_blocks, v, scale, own_from_blocks=True)
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


def test_the_error_of_a_layer_is_that_of_its_attention_from_blocks(tiny: Path) -> None:
    loaded = open_model(tiny).load()
    seen: dict[int, tuple[SequenceStep, mx.array, float]] = {}
    cache = make_prompt_cache(loaded.model, "f16", "f16")
    cache[0].usage.observer = lambda step, q, scale: seen.update({step.layer: (step, q, scale)})
    loaded.fill(mx.array([TOKENS]), cache)
    mx.eval([layer.state for layer in cache])
    measured = measure_sensitivity(loaded, TOKENS, ["turbo3", "q4_0"], chunk=384)
    q4_k, turbo3_k, turbo3_v = (
        resolve_codec(n, 64, side) for n, side in (("q4_0", "k"), ("turbo3", "k"), ("turbo3", "v"))
    )
    for layer, (step, q, scale) in seen.items():
        found = measured[layer]
        k, v, queries = (np.asarray(x).astype(np.float64) for x in (step.k.rows, step.v.rows, q[0]))
        error = partial(attention_error, queries, k, v, scale)
        assert found.errors["k"]["q4_0"] == pytest.approx(error(as_blocks(q4_k, k, 0), v), rel=1e-3)
        assert found.errors["v"]["turbo3"] == pytest.approx(error(k, as_blocks(turbo3_v, v, 4)), rel=1e-3)
        assert found.plain_errors["turbo3"] == pytest.approx(error(as_blocks(turbo3_k, k, 0), v), rel=1e-3)
        unscaled = error(as_balanced_blocks(turbo3_k, k, 4, None), v)
        assert 0.2 * unscaled < found.errors["k"]["turbo3"] < 1.5 * unscaled  # the channel scale does the rest
        pages = k.reshape(len(k), 3, 128, 64)
        shares = (pages.mean(axis=2) ** 2).sum(axis=(1, 2)) * 128 / (k**2).sum(axis=(1, 2))
        assert found.constant_share == pytest.approx(shares.max(), rel=1e-3)


def test_a_split_into_steps_changes_no_figure_but_the_scale_taken_from_page_0(tiny: Path) -> None:
    loaded = open_model(tiny).load()
    one, three = (measure_sensitivity(loaded, TOKENS, ["turbo4"], chunk=chunk) for chunk in (384, 128))
    for a, b in zip(one, three, strict=True):
        assert a.errors["v"] == pytest.approx(b.errors["v"], rel=1e-3)
        assert a.errors["k"] == pytest.approx(b.errors["k"], rel=1e-2)
        assert a.constant_share == pytest.approx(b.constant_share)


def test_constant_keys_are_found_and_balance_is_what_saves_them(dangerous: Path) -> None:
    first, second = measure_sensitivity(open_model(dangerous).load(), TOKENS, TYPES, chunk=256)
    assert first.is_dangerous and not second.is_dangerous
    assert first.constant_norm == pytest.approx(400, rel=0.05)
    assert first.plain_errors["turbo4"] > 10 * first.errors["k"]["turbo4"]


def test_less_than_two_pages_cannot_be_measured(tiny: Path) -> None:
    with pytest.raises(RequestError, match="expected at least 256 tokens of text, found 255"):
        measure_sensitivity(open_model(tiny).load(), TOKENS[:255], ["q8_0"], chunk=256)


def test_heads_that_turbo_types_cannot_have_get_others() -> None:
    assert proposable_types([LayerShape(1, 64, 128)]) == TYPES
    assert proposable_types([LayerShape(1, 64, 64), LayerShape(1, 224, 224)]) == OTHER_TYPES
    with pytest.raises(
        RequestError,
        match=r"neither turbo2, .*, q8_0 nor q4_0, q5_0, q8_0: layer 0, K: cache type q4_0 cannot hold head_dim 80",
    ):
        proposable_types([LayerShape(1, 80, 80)])


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = program.main(["doctor", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_the_table_names_every_layer_and_proposals_can_be_copied_to_run(capsys, tiny: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path)
    status, out, _ = run(capsys, "-m", str(tiny), "-f", text, "-c", "1k", "--measure", "256", "--bpv", "3.4")
    assert status == 0
    assert re.search(r"^layer +K turbo2 +K turbo3 .* V q8_0 +constant$", out, re.M)
    assert re.search(r"^0 +[\d.]+%", out, re.M) and re.search(r"^1 +[\d.]+%", out, re.M)
    assert "Dangerous" not in out
    line = (
        r"^  (-ctk \S+ -ctv \S+)\n +([\d.]+) bits at 256 tokens, ([\d.]+) bits at 1,024 tokens; "
        r"KLD [\d.e-]+ ± [\d.e-]+, same top [\d.]+%$"
    )
    proposals = re.findall(line, out, re.M)
    assert proposals and all(float(bits) <= 3.4 for _, *both in proposals for bits in both)
    assert "Within 3.4 bits per value at 256 tokens (measured) and at 1,024 (wanted), tried on 256 other tokens" in out
    argv = ["run", "-m", str(tiny), "-p", "the goat", "-n", "2", "-no-cnv", *proposals[0][0].split()]
    assert program.main(argv) == 0


def test_a_dangerous_model_is_named_with_the_reason(capsys, dangerous: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "-m", str(dangerous), "-f", text_file(tmp_path), "-c", "256")
    assert status == 0
    assert re.search(r"Dangerous keys in layers 0: constants of norm (39|40)\d hold up to 9\d\.\d% of their", out)
    assert re.search(r"K in turbo4: error of layer 0's attention [\d.]+% without balance, [\d.]+% as run has it", out)


def test_json_has_every_figure(capsys, tiny: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "-m", str(tiny), "-f", text_file(tmp_path), "-c", "300", "--json")
    found = json.loads(out)
    assert (status, found["n_ctx"], found["budget"], len(found["layers"])) == (0, 256, 4.4, 2)
    assert set(found["layers"][0]["errors"]["k"]) == set(TYPES)
    assert found["layers"][0]["dangerous"] is False
    assert found["proposals"][0]["flags"].startswith("-ctk turbo4") and found["proposals"][0]["kld"] > 0


@pytest.mark.parametrize(("asked", "said"), [("9999", True), ("300", True), ("0", False)])
def test_a_context_beyond_the_models_is_said_and_0_is_all_of_it(capsys, tmp_path: Path, asked: str, said: bool) -> None:
    small = write_tiny(tmp_path / "small.gguf", TinyModel(context_length=256))
    argv = ("-m", str(small), "-f", text_file(tmp_path), "--bpv", "1.5", "--json")
    status, out, err = run(capsys, *argv, "-c", asked)
    assert (status, json.loads(out)["n_ctx"]) == (0, 256)
    notice = f"-c {asked}: whole pages of 128 within the model's context of 256, so 256 are used"
    assert (notice in err) == said


@pytest.mark.parametrize(
    ("argv", "n_measured", "n_ctx"),
    [
        ((), 1024, 2048),
        (("-c", "512"), 512, 512),
        (("--measure", "512"), 512, 2048),
        (("-c", "256", "--measure", "384"), 384, 256),
    ],
)
def test_what_is_measured_and_what_is_wanted_are_two_contexts(
    capsys, tiny: Path, tmp_path: Path, argv: tuple[str, ...], n_measured: int, n_ctx: int
) -> None:
    status, out, err = run(capsys, "-m", str(tiny), "-f", text_file(tmp_path), "--bpv", "5", "--json", *argv)
    found = json.loads(out)
    assert (status, found["n_measured"], found["n_ctx"]) == (0, n_measured, n_ctx)
    assert f"{n_measured:,} tokens are measured" in err
    for proposal in found["proposals"]:
        spec = CacheSpec(proposal["type_k"], proposal["type_v"])
        shapes = [LayerShape(QWEN2.n_kv_heads, 64, 64)] * 2
        at = [bits_per_value(shapes, spec.resolve(2), n).mean for n in (n_measured, n_ctx)]
        assert [proposal["bits_measured"], proposal["bits_per_value"]] == at and max(at) <= 5
        assert proposal["n_tokens"] == n_measured - 1


def test_far_keys_of_a_model_with_windows_are_not_put_into_2_bits_on_a_short_text(capsys, tmp_path: Path) -> None:
    model = TinyModel("gemma3", n_layers=4, window=200, window_pattern=2, head_dim=128)
    path = write_tiny(tmp_path / "g.gguf", model)
    argv = ("-m", str(path), "-f", text_file(tmp_path), "-c", "1024", "--bpv", "3.7")
    status, out, _ = run(capsys, *argv, "--measure", "256")
    assert status == 0 and "Layers 1, 3 see the whole context, the others a window of 200 tokens." in out
    assert "256 measured tokens say too little of their far keys: they get more than 2 bits." in out
    proposed = re.findall(r"^  -ctk (\S+) -ctv (\S+)$", out, re.M)
    assert proposed
    for type_k, type_v in proposed:
        far = [CacheSpec(type_k, type_v).resolve(4)[i] for i in (1, 3)]
        assert not any("turbo2" in (types.type_k, types.type_v) for types in far)
    status, out, _ = run(capsys, *argv, "--measure", "896")
    assert status == 0 and "see the whole context" not in out


def test_a_model_with_a_context_of_one_page_is_refused(capsys, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small.gguf", TinyModel(context_length=100))
    status, _, err = run(capsys, "-m", str(small), "-f", text_file(tmp_path))
    assert status == 2 and "expected a model with a context of 256 tokens or more, found 100" in err


def test_a_budget_that_nothing_fits_into_is_said(capsys, tiny: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "-m", str(tiny), "-f", text_file(tmp_path), "-c", "256", "--bpv", "1.5")
    assert status == 0 and "Nothing fits into 1.5 bits per value at 256 tokens: raise --bpv." in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bpv", "0"], "--bpv: expected 1 to 32 bits per value, found 0"),
        (["--bpv", "x"], "--bpv: expected a number, found 'x'"),
        (["--measure", "128"], "--measure: expected 256 tokens or more, or 0 for those of -c, at most 1024, found 128"),
        (["-c", "128"], "-c: expected 256 tokens or more, or 0 for all, found 128"),
        (["-ctk", "turbo4"], "-ctk is refused: doctor proposes types: give it a budget with --bpv"),
        (["-m", "missing.gguf"], "missing.gguf"),
    ],
)
def test_bad_requests_are_one_line(capsys, argv: list[str], message: str) -> None:
    status, out, err = run(capsys, *argv)
    assert status in (1, 2) and out == "" and err.count("\n") == 1 and message in err


def test_too_short_a_text_is_refused_before_the_weights_are_read(capsys, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    status, out, err = run(capsys, "-m", str(tiny), "-f", str(path))
    assert status == 2 and out == "" and "expected at least 2,048 for 2 windows of 1,024 tokens (--measure)" in err

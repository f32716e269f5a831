"""With an f16 cache the greedy tokens are llama.cpp's, wherever llama.cpp itself is sure of them.

llama.cpp rounds activations to 8 bits and we do not, so a step counts where its chosen token led by a logit of 0.5.
Every step is fed llama.cpp's own tokens: one difference then does not hide what comes after it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import LoadedModel, open_model

DATA = Path(__file__).parent / "data"
ORACLE = json.loads((DATA / "llama_cpp_oracle.json").read_text(encoding="utf-8"))["models"]
OTHERS: dict[str, dict[str, Any]] = json.loads((DATA / "greedy_llama_cpp.json").read_text(encoding="utf-8"))["greedy"]
GAP = 0.5


def compare(case: dict[str, Any], chosen: list[int]) -> None:
    sure = [step for step, gap in enumerate(case["gaps"]) if gap >= GAP]
    expected = case["greedy_ids"]
    assert [(step, chosen[step]) for step in sure] == [(step, expected[step]) for step in sure]


def decode(loaded: LoadedModel, case: dict[str, Any]) -> list[int]:
    """The token that each step would choose, as `tqgguf run` evaluates them: the prompt, then token by token."""
    session = Session(loaded, CacheSpec("f16", "f16"))
    rows = [session.prefill(case["prompt_ids"])]
    rows += [session.decode(token) for token in case["greedy_ids"][:-1]]
    return [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("i", range(len(ORACLE["smollm2"]["greedy"])))
def test_smollm2_chooses_llama_cpps_tokens_when_it_decodes(smollm2, i):
    case = ORACLE["smollm2"]["greedy"][i]
    assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    compare(case, decode(smollm2, case))


@pytest.mark.parametrize("name", OTHERS)
def test_smollm2_chooses_llama_cpps_tokens_on_other_prompts(smollm2, name):
    """In one step for all of the answer's tokens, whose rows attend to the cached prompt and to each other."""
    case = OTHERS[name]
    prompt, answer = case["prompt_ids"], case["greedy_ids"]
    assert smollm2.tokenizer.encode(case["prompt"]) == prompt
    cache = make_prompt_cache(smollm2.model, "f16", "f16")
    smollm2.model.model(mx.array([prompt[:-1]]), cache)
    rows = np.array(smollm2.model(mx.array([[prompt[-1], *answer[:-1]]]), cache=cache))[0]
    compare(case, rows.argmax(-1).tolist())


def test_the_oracle_has_enough_steps_that_count():
    cases = [*ORACLE["smollm2"]["greedy"], *OTHERS.values()]
    assert sum(gap >= GAP for case in cases for gap in case["gaps"]) > 300
    assert len(OTHERS["long"]["prompt_ids"]) > 700


@pytest.mark.gemma
@pytest.mark.parametrize("i", range(len(ORACLE["gemma3"]["greedy"])))
def test_gemma_chooses_llama_cpps_tokens_when_it_decodes(gemma, i):
    case = ORACLE["gemma3"]["greedy"][i]
    assert gemma.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    compare(case, decode(gemma, case))


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    return open_model(os.environ["TQGGUF_GEMMA"]).load()

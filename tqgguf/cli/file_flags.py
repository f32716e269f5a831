"""The flags of verbs about files, and of selftest: one row each, in the order in which --help shows them; as in
`model_flags`."""

from __future__ import annotations

from typing import Final

from tqgguf.cli.flags import OUTPUT, SWITCH, Flag, flag, under
from tqgguf.cli.ranges import INT32

_FOREIGN = "Of prompt caches: what foreign files do not say"
_CACHES = "Of prompt caches"

FILE_FLAGS: Final[tuple[Flag, ...]] = (
    *under(
        "What is checked",
        flag("validate", "model", "-m --model", "file",
             "The model that snapshots and calibrations are to belong to: a GGUF file or an MLX folder.",
             metavar="PATH", default=None),
        flag("validate", "strict", "--strict", "", "Fail on warnings too.", default=False),
        flag("validate", "threads", "-t --threads", "integer", "Files side by side; 0 or less: all cores.", default=0),
    ),
    *under(
        "What is shown",
        flag("inspect", "tensors", "--tensors", "", "Only the tensors, one a line.", default=False),
        flag("inspect", "metadata", "--metadata", "text",
             "Only the metadata; with a KEY that value in full, or those that fit a pattern as in 'tokenizer.*'.",
             metavar="[KEY]", default=None),
    ),
    *under(
        "What is tested",
        flag("selftest", "device", "--device", "text",
             "Where: gpu fails if nothing ran there; auto takes the GPU if MLX has one.",
             metavar="[auto|gpu|cpu]", default="auto"),
        flag("selftest", "head_dim", "--head-dim", "integer",
             "Head sizes; may be repeated. Default: 64, 96, 128, 192, 256.", repeatable=True, default=None),
        flag("selftest", "all_pairs", "--all", "", "Attention with every pair of types, not some.", default=False),
        flag("selftest", "quick", "--quick", "", "The head size and the types that most models have: about a minute.",
             default=False),
        flag("selftest", "bench", "--bench", "", "On a GPU, measure attention with more pairs of types.",
             default=False),
    ),
    *under(
        "Of models",
        flag("convert", "weight_type", "--type", "text",
             "Type of the weights (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl; K-quants are only read), by "
             "llama-quantize's rules: vectors, norms and routers stay, an output layer gets at least q8_0. "
             "Default: as they are (of a folder: bf16 or f16).", metavar="TYPE"),
        flag("convert", "split_max_size", "--split-max-size", "text",
             "Split into files of at most so many bytes, as in 2G or 500M. Default: one file.", metavar="N(M|G)"),
        flag("convert", "dry_run", "--dry-run", "", "Only say what each tensor would become, and write nothing."),
    ),
    *under(
        OUTPUT,
        flag("convert", "to", "--to", "gguf|session|sequence|mlx-lm",
             "Format of DST. Default: by its name (.gguf; .session, .promptcache; .seq, .slot; .safetensors; a model's "
             "folder for mlx-lm has no ending)."),
    ),
    *under(
        _CACHES,
        flag("convert", "type_k", "-ctk --cache-type-k", "text", "Type of K, as run takes it. Default: as it is.",
             metavar="TYPE"),
        flag("convert", "type_v", "-ctv --cache-type-v", "text", "Type of V, likewise.", metavar="TYPE"),
    ),
    *under(
        OUTPUT,
        flag("convert", "requantise", "--requantise", "",
             "Quantise again what is quantised already, where that is needed."),
    ),
    *under(
        _CACHES,
        flag("convert", "v_trans", "--v-trans / --no-v-trans", "",
             "Values transposed, for llama.cpp without flash attention."),
        flag("convert", "bits", "--kv-bits", "integer", "Quantise for mlx-lm with so many bits. Default: not."),
        flag("convert", "group_size", "--kv-group-size", "integer", "Values of a group of --kv-bits. Default: 64."),
        flag("convert", "mlx_model", "--mlx-model", "text",
             "The model's name or folder as mlx_lm.generate will be given it, which compares the two.",
             metavar="NAME"),
    ),
    *under(
        _FOREIGN,
        flag("convert", "profile", "--profile", "text",
             "Whose llama.cpp wrote SRC, or is to read DST: mainline, thetom-2026-05, mainline-unrotated. Default: "
             "what SRC says, else mainline.", metavar="NAME"),
        flag("convert", "model", "-m --model", "file",
             "The model's GGUF: head sizes, RoPE, and what it is known by.", metavar="PATH"),
        flag("convert", "head_dim", "--head-dim", "integer", "Values of a head, without the model.",
             lowest=1, highest=1 << 16),
        flag("convert", "rotated", "--kv-rotation", SWITCH,
             "Whether quantised ggml types are rotated in the llama.cpp file. Default: as the profile has it."),
        flag("convert", "generation", "--codebook-generation", "integer",
             "Codebooks of turbo types in the llama.cpp file: 2 or 3.", lowest=2, highest=3),
        flag("convert", "rope_order", "--rope-order", "neighbours|halves",
             "Channels that RoPE turns together in the mlx-lm file. Default: those of the original weights; a folder "
             "that convert made of a llama-like GGUF has neighbours."),
        flag("convert", "sequence", "--sequence-id", "integer",
             "Which sequence of a llama.cpp session of several.", lowest=0, highest=INT32),
    ),
    *under(
        OUTPUT,
        flag("validate", "json_output", "--json", "",
             "Print a JSON array of findings, and of files that could not be read.", default=False),
        flag("convert inspect selftest info", "json_output", "--json", "", "Print one JSON object.", default=False),
    ),
)  # fmt: skip

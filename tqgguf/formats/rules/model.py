"""Rows of the table of rules: what a model's metadata and tensors must be (TQ2xx), safetensors files (TQ5xx), what
belongs to a model (TQ6xx), and calibration sidecars (TQ7xx).
"""

from __future__ import annotations

from typing import Final

from tqgguf.formats.rules.rule import ERROR, WARNING, Rule

_CONVERT: Final = "convert the original model again with a current llama.cpp"
_AGAIN: Final = "download the file again, or write it again from the original"

MODEL_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ201", "metadata-missing", ERROR, "a metadata key that is needed is absent", _CONVERT),
    Rule("TQ202", "metadata-type", ERROR, "a metadata value is of another type than its key has", _CONVERT),
    Rule("TQ203", "metadata-value", ERROR, "a metadata value is of the right type, but cannot be used", _CONVERT),
    Rule("TQ204", "element-type", ERROR, "an array that is known by its key has elements of another type", _CONVERT),
    Rule("TQ205", "block-count", ERROR, "the number of layers is 0 or absurd", _CONVERT),
    Rule("TQ206", "head-count", ERROR,
         "a number of heads, or the size of one, is 0 or absurd, or numbers do not divide as they must", _CONVERT),
    Rule("TQ207", "vocabulary-size", ERROR, "arrays of the vocabulary have different lengths", _CONVERT),
    Rule("TQ208", "special-token", ERROR, "the id of a special token is outside the vocabulary", _CONVERT),
    Rule("TQ209", "pretokenizer", WARNING,
         'tokenizer.ggml.pre is absent or "default": texts may be cut otherwise than the model was trained with',
         _CONVERT),
    Rule("TQ210", "tensor-missing", ERROR, "a tensor that is needed is absent", _CONVERT),
    Rule("TQ211", "tensor-shape", ERROR, "a tensor's shape contradicts the metadata", _CONVERT),
    Rule("TQ214", "model-fragment", WARNING, "the file has less than half of what the model that it names has",
         "nothing, if it is to be a part of a model: it cannot be run"),
    Rule("TQ216", "vocabulary", ERROR, "the vocabulary lacks something, or contradicts itself", _CONVERT),
    Rule("TQ217", "tensor-value", ERROR, "a tensor's values are numbers with which nothing can be computed", _CONVERT),
    Rule("TQ218", "chat-template", ERROR, "the chat template is no valid Jinja",
         "convert the model again from a repository whose template is mended, or give run --chat-template-file"),
    Rule("TQ215", "general-type", ERROR,
         "general.type does not say what the file holds by its tensors or its own keys (tqgguf.*)",
         "damage, or another program's change: copy the file again, or make it again"),
    Rule("TQ212", "non-finite-scale", ERROR, "a block's scale or minimum is infinite or NaN",
         "quantise the original model again, with an importance matrix if values were out of range"),
    Rule("TQ213", "non-finite-value", ERROR, "a floating-point tensor holds infinities or NaN", _CONVERT),
)  # fmt: skip

SAFETENSORS_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ501", "safetensors-length", ERROR, "the length of the header is beyond the end of the file or the limit",
         _AGAIN),
    Rule("TQ502", "safetensors-header", ERROR, "the header is not a JSON object without repeated names", _AGAIN),
    Rule("TQ503", "safetensors-entry", ERROR, "an entry of the header is not dtype, shape and data_offsets", _AGAIN),
    Rule("TQ504", "safetensors-dtype", ERROR, "a tensor's dtype is not known here, so its size cannot be checked",
         "use a newer tqgguf, or the program that the file was made for"),
    Rule("TQ505", "safetensors-size", ERROR, "a tensor's bytes are not what its shape and dtype need", _AGAIN),
    Rule("TQ506", "safetensors-end", ERROR, "a tensor's data lies beyond the end of the file", _AGAIN),
    Rule("TQ507", "safetensors-overlap", ERROR, "two tensors share bytes", _AGAIN),
    Rule("TQ508", "safetensors-gap", ERROR, "bytes of the data belong to no tensor", _AGAIN),
)  # fmt: skip

BELONGING_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ601", "other-weights", ERROR, "the file was made with a model of other weights",
         "name the model that it was made with, or make it again with this one"),
    Rule("TQ602", "other-hyperparameters", ERROR, "the file was made with a model of other hyperparameters",
         "name the model that it was made with, or make it again with this one"),
    Rule("TQ603", "other-rope", ERROR, "the prompt cache was made with other RoPE parameters",
         "use the same flags of RoPE (--rope-scale and its neighbours) as when it was made"),
    Rule("TQ604", "other-tokenizer", WARNING, "the file was made with a model of another tokenizer",
         "name the model that it was made with"),
    Rule("TQ605", "calibration-rope", WARNING,
         "the calibration was made with other RoPE parameters; it is used all the same",
         "make it again with the same flags of RoPE (--rope-scale and its neighbours) if quality matters"),
    Rule("TQ606", "no-fingerprint", WARNING, "the file does not say which model it was made with",
         "nothing can be told: try it, and look at the text"),
)  # fmt: skip

CALIBRATION_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ701", "calibration-version", ERROR, "the calibration is of a version that is not known here",
         "make it again with `tqgguf calibrate`"),
    Rule("TQ702", "calibration-tensor", ERROR, "the tensors are not channel scales F32 [n_kv_heads, head_dim]",
         "make it again with `tqgguf calibrate`"),
    Rule("TQ703", "calibration-scale", ERROR, "a channel scale is not a number within its limits",
         "make it again with `tqgguf calibrate`"),
)  # fmt: skip

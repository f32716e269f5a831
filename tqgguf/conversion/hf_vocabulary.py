"""A checkpoint's tokenizer as metadata of a GGUF, as llama.cpp's converter makes it of its files.

Which pre-tokenizer a byte-level BPE has is found out by what it does to a text that tells them apart; merges, ids of
special tokens and the chat template are gguf-py's to find. Nothing is said here of how text is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
from tokenizers import Tokenizer as Backend

from tqgguf.conversion.hf_architectures import Checkpoint
from tqgguf.conversion.hf_parameters import number
from tqgguf.conversion.sentencepiece_model import PieceType, read_pieces
from tqgguf.formats.errors import FormatError, UnsupportedModelError, words_of
from tqgguf.formats.json_file import read_json
from tqgguf.formats.models.vocabulary import SPACE, TokenType
from tqgguf.text.bpe import build_pre_tokenizer
from tqgguf.text.pretokenizers import DEFAULT_PRETOKENIZER, PRETOKENIZERS

PIECES: Final = "tokenizer.model"

_PROBE: Final = (
    "Hello, it's 12345 o'clock  and I'VE 3.14 \n\n \n\t\tcode(){}\r\n   x=1;  ünïcode naïve 漢字かな 한국어 नमस्ते "
    "🙂👍🏽 e\u0301 'S we'Ll  $100,000!!! ...\n---\n<|x|> [a] a_b-c  \u00a0 ١٢٣ CamelCASEword \n "
)
_PREFERRED: Final = ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "deepseek-llm", "deepseek-coder", "falcon")
"""Of pre-tokenizers that cut alike the first one is taken, these before others."""

_LOOKS_SPECIAL: Final = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_SPECIAL_EDGES: Final = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
_UNUSED_SCORE: Final = -10000.0
_ADDED_SCORE: Final = -1000.0
_CODE_LLAMA: Final = (32016, {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010})
_GRANITE_SIZE: Final = 49152  # llama.cpp's converter takes this size for Granite's, whose texts begin without BOS


def add_vocabulary(writer: gguf.GGUFWriter, row: Checkpoint, config: Mapping[str, Any], folder: Path) -> int:
    """Add the tokenizer's keys; returns how many tokens there are.

    FormatError: files are missing or damaged; UnsupportedModelError: a tokenizer of a kind that is not converted.
    """
    n_tokens = number(config, "vocab_size", str(folder / "config.json"))
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    if row.is_llama and isinstance(settings.get("add_prefix_space"), bool):
        writer.add_add_space_prefix(settings["add_prefix_space"])
    has_pieces = (folder / PIECES).exists()
    if row.needs_pieces and not has_pieces:
        raise FormatError(f"{folder}: expected a {PIECES} in the model folder, found none")
    try:
        if has_pieces:
            _add_pieces(writer, settings, n_tokens, folder)
        else:
            _add_byte_level(writer, n_tokens, folder)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:  # of files that hold something else
        raise FormatError(
            f"{folder}: the tokenizer's files cannot be read: {type(error).__name__}: {words_of(error)}"
        ) from error
    if row.is_gemma:
        writer.add_add_space_prefix(False)
    if row.is_llama and n_tokens == _CODE_LLAMA[0]:
        for role, token in _CODE_LLAMA[1].items():
            getattr(writer, f"add_{role}_token_id")(token)
    if row.is_llama and n_tokens == _GRANITE_SIZE:
        writer.add_add_bos_token(False)
    return n_tokens


def _add_byte_level(writer: gguf.GGUFWriter, n_tokens: int, folder: Path) -> None:
    data = read_json(folder / "tokenizer.json")
    model = data["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"{folder}: expected a byte-level BPE in tokenizer.json, or {PIECES} beside it; found neither"
        )
    ids: dict[int, str] = {i: text for text, i in model["vocab"].items()}
    added = {token["id"]: token for token in data.get("added_tokens") or ()}
    ids |= {i: token["content"] for i, token in added.items()}
    if max(ids) >= n_tokens:
        raise FormatError(f"{folder}: expected at most {n_tokens} tokens as config.json says, found id {max(ids)}")
    tokens, types = [], []
    for i in range(n_tokens):
        text, kind = ids.get(i, f"[PAD{i}]"), TokenType.NORMAL if i in ids else TokenType.UNUSED
        if i in added:
            text, kind = _added(text, bool(added[i].get("special")))
        tokens.append(text)
        types.append(int(kind))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(find_pretokenizer(folder / "tokenizer.json", bool(model.get("ignore_merges"))))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True)
    processor = data.get("post_processor") or {}
    if any(part.get("type") == "ByteLevel" for part in processor.get("processors", [processor])):
        for role in ("bos", "eos"):  # gguf-py since 0.20
            special.add_special_token.setdefault(role, False)
    special.add_to_gguf(writer, quiet=True)


def _add_pieces(writer: gguf.GGUFWriter, settings: Mapping[str, Any], n_tokens: int, folder: Path) -> None:
    pieces = read_pieces(folder / PIECES)
    tokens = [f"[PAD{i}]" for i in range(n_tokens)]
    scores, types = [_UNUSED_SCORE] * n_tokens, [TokenType.UNUSED] * n_tokens
    for i, piece in enumerate(pieces[:n_tokens]):
        tokens[i], scores[i] = piece.text, piece.score
        named = TokenType.NORMAL if piece.type is PieceType.USER_DEFINED else TokenType[piece.type.name]
        types[i] = named
    names = folder / "added_tokens.json"
    for text, i in (read_json(names) if names.exists() else {}).items():
        if 0 <= i < n_tokens:
            tokens[i], scores[i], types[i] = text, _ADDED_SCORE, TokenType.USER_DEFINED
    for key, token in (settings.get("added_tokens_decoder") or {}).items():
        if 0 <= int(key) < n_tokens:
            tokens[int(key)], types[int(key)] = _added(token["content"], bool(token.get("special")))
            scores[int(key)] = _ADDED_SCORE
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(DEFAULT_PRETOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([int(kind) for kind in types])
    gguf.SpecialVocab(folder, n_vocab=n_tokens).add_to_gguf(writer, quiet=True)


def _added(text: str, is_special: bool) -> tuple[str, TokenType]:
    """An added token as it stands in a GGUF, and its type."""
    looks = text in _LOOKS_SPECIAL or any(text.startswith(a) and text.endswith(b) for a, b in _SPECIAL_EDGES)
    if is_special or looks:
        return text, TokenType.CONTROL
    return text.replace(SPACE, " "), TokenType.USER_DEFINED


def find_pretokenizer(path: Path, ignore_merges: bool) -> str:
    """The name of the pre-tokenizer that cuts a probing text as tokenizer.json does; UnsupportedModelError for none."""
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise FormatError(f"{path}: expected a tokenizer, found a mistake: {words_of(error)}") from error
    if backend.pre_tokenizer is not None:
        wanted = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(_PROBE)]
        for name in dict.fromkeys([*_PREFERRED, *PRETOKENIZERS]):
            row = PRETOKENIZERS[name]
            if name == DEFAULT_PRETOKENIZER or row.spelt_out or row.ignore_merges != ignore_merges:
                continue
            if [piece for piece, _ in build_pre_tokenizer(row).pre_tokenize_str(_PROBE)] == wanted:
                return name
    raise UnsupportedModelError(f"{path}: its pre-tokenizer cuts text as none does that llama.cpp knows by name")

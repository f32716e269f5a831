"""The decoder that undoes what a tokenizer.json does to a text: its own, or another where its own cannot.

Some conversions leave a byte-level vocabulary with the decoder of a SentencePiece one, or the reverse; spaces then
appear in the vocabulary's spelling. Knows pre-tokenizers and decoders of the `tokenizers` library, no vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from tqgguf.formats.errors import FormatError
from tqgguf.formats.models.vocabulary import SPACE
from tqgguf.text.library_errors import failing_as

_PROBE: Final = "a b\nc"
"""A text that no normaliser in use changes, but for spaces and lines."""


def suitable_decoder(backend: Backend) -> tuple[Any, str]:
    """A decoder, and a line that says why it is not the tokenizer's own; "" where it is.

    Another one is taken if the own one fails or leaves letters in a text that were not there, and the other one does
    not. FormatError: the own one fails, and no other will do.
    """
    own = backend.decoder
    with failing_as(f"tokenizer.json: it fails with the text {_PROBE!r}"):
        normal = _PROBE if backend.normalizer is None else backend.normalizer.normalize_str(_PROBE)
        cutter = backend.pre_tokenizer
        pieces = [normal] if cutter is None else [piece for piece, _ in cutter.pre_tokenize_str(normal)]
    failure: FormatError | None = None
    try:
        with failing_as(f"tokenizer.json: its decoder fails with the text {_PROBE!r}"):
            shown = " ".join(pieces) if own is None else own.decode(pieces)
    except FormatError as error:
        failure, shown = error, "an error"
    if failure is None and set(shown) <= set(_PROBE):
        return own, ""
    for name, decoder in _others().items():
        if decoder.decode(pieces) == _PROBE:
            return decoder, (
                f"tokenizer.json: its decoder does not undo its pre-tokenizer ({_PROBE!r} comes back as {shown!r}); "
                f"tokens are decoded as {name} ones instead"
            )
    if failure is not None:
        raise failure
    return own, ""


def _others() -> dict[str, Any]:
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return {
        "byte-level": decoders.ByteLevel(),
        "SentencePiece": decoders.Sequence(to_text),
        "SentencePiece's prefixed": decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)]),
    }

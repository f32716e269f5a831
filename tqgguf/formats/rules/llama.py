"""Rows of the table of rules: llama.cpp's session and sequence files (TQ4xx)."""

from __future__ import annotations

from typing import Final

from tqgguf.formats.rules.rule import ERROR, WARNING, Rule

_AGAIN: Final = "write the file again with llama.cpp, or copy it again from where it is whole"
_WRITER: Final = "the file is damaged, or of a llama.cpp whose layout is not known here: write it again"

LLAMA_RULES: Final[tuple[Rule, ...]] = (
    # the file as a whole
    Rule("TQ401", "state-version", ERROR, "the version of a session or sequence file is not known here",
         "write the file again with a current llama.cpp, or use a newer tqgguf"),
    Rule("TQ402", "state-truncated", ERROR, "the file ends before what its counts promise", _AGAIN),
    Rule("TQ403", "state-trailing", ERROR,
         "a session file goes on behind its last memory; llama.cpp refuses it", _WRITER),
    Rule("TQ404", "state-trailing-sequence", WARNING,
         "a sequence file goes on behind its last memory; llama.cpp does not mind",
         "compare its size with the original's"),
    Rule("TQ405", "state-limit", ERROR, "a count is above the limit that this reader sets", _WRITER),
    Rule("TQ406", "state-architecture", ERROR, "the name of the architecture is empty or no plain text", _WRITER),
    Rule("TQ407", "state-recurrent", ERROR,
         "the file holds the state of recurrent layers (Mamba, RWKV, hybrids), which is not read here",
         "keep such files for llama.cpp"),
    # tokens
    Rule("TQ410", "state-token", ERROR, "a token's id is negative", _WRITER),
    Rule("TQ411", "state-packed-tokens", ERROR, "the server's packed list of tokens does not add up", _WRITER),
    Rule("TQ412", "state-token-count", WARNING,
         "there are more cells than tokens, or more than one token without a cell",
         "the prompt can be reused only as far as tokens are known"),
    # cells
    Rule("TQ420", "state-streams", ERROR,
         "the number of streams is 0, or not that of the base memory", _WRITER),
    Rule("TQ421", "state-position", ERROR, "a cell's position is negative", _WRITER),
    Rule("TQ422", "state-duplicate-position", ERROR, "two cells of a sequence have the same position", _WRITER),
    Rule("TQ423", "state-sequence-count", ERROR,
         "a cell belongs to no sequence or to absurdly many, or in a sequence file not to one", _WRITER),
    Rule("TQ424", "state-sequence-id", ERROR, "a cell's sequence id is negative or absurd", _WRITER),
    Rule("TQ425", "state-gap", WARNING, "positions of a sequence are missing between others",
         "llama.cpp goes on as if they had never been there; tqgguf cannot convert such a file"),
    Rule("TQ426", "state-window", WARNING, "the window memory does not end where the base memory ends",
         "write the file again; continuing from it loses what the window should see"),
    # layers
    Rule("TQ430", "state-cell-layout", ERROR, "what follows the cells is no beginning of layers", _WRITER),
    Rule("TQ431", "state-v-trans", ERROR, "the flag of transposed values is neither 0 nor 1", _WRITER),
    Rule("TQ432", "state-layers", ERROR, "the number of layers is 0, or not the same in all streams", _WRITER),
    Rule("TQ433", "state-values", ERROR, "V does not have as many layers as K",
         "write the file again; caches of models with latent attention (MLA) have no V and are not read here"),
    Rule("TQ434", "state-type", ERROR, "a type id that neither llama.cpp's caches nor a known fork's have", _WRITER),
    Rule("TQ435", "state-fork-type", WARNING, "a type id that only forks of llama.cpp have",
         "name the fork with --profile when the file is converted"),
    Rule("TQ436", "state-row-bytes", ERROR, "the bytes of a row are not whole blocks of its type", _WRITER),
    Rule("TQ437", "state-transposed", ERROR,
         "transposed values are of a quantised type, or their elements are not their type's", _WRITER),
    Rule("TQ438", "state-non-finite", ERROR,
         "a value or a block's scale is infinite or NaN, or the norm of a fork's turbo block negative",
         "write the file again: such rows give wrong text"),
)  # fmt: skip

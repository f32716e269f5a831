r"""How text is cut into words before BPE merges: one row for each `tokenizer.ggml.pre` that llama.cpp knows.

A row is a chain of regular expressions; each cuts every piece that the ones before it left, matches and the text
between them alike become pieces of their own. The expressions are those that the models were trained with, in the
reading that llama.cpp gives them (llama-vocab.cpp, unicode.cpp), since its token ids are the ones to reproduce:
it knows no letter case beyond ASCII, so `\p{Lu}` and `\p{Ll}` are both `\p{L}` here.
Characters that became letters after Unicode 15 may be cut differently, as the two libraries' tables differ there.
This module knows neither vocabularies nor merges.
"""

from __future__ import annotations

from dataclasses import dataclass

# Parts of the expressions, in the syntax of Oniguruma, which the `tokenizers` library uses.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTER, _LETTER_OR_MARK = r"[\p{L}]", r"[\p{L}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_LEAD}\p{{L}}+"
_MARKED_WORD = rf"{_LEAD}[\p{{L}}\p{{M}}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_KANA_KANJI = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Less the blanks of that range: llama.cpp turns blanks beyond ASCII into a vertical tab before it looks.
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"
_LINES = r"[^\n]+|[\n]+"
# Threes counted from the right: 1234567 is 1, 234, 567. llama.cpp keeps what stands before digits with the first group.
# A match begins at the beginning or behind a digit only, else text without digits would take quadratic time.
_DIGITS_BY_THREE = r"(?:\A|(?<=\p{N}))\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
# Whitespace in runs of powers of two.
_CASCADE = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s{1}"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_KANA_KANJI}"
)
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"


def _cased(letters: str, contraction: str) -> str:
    """Words of upper case then lower case; `letters` is a class whose non-ASCII members count as either case."""
    upper, lower = rf"(?:(?={letters})[^a-z])", rf"(?:(?={letters})[^A-Z])"
    return rf"{_LEAD}{upper}*{lower}+{contraction}|{_LEAD}{upper}+{lower}*{contraction}"


_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS_GPT2 = (r"\p{N}", *_GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]")
_LLAMA3 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",)
_JAIS2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|{_CASCADE}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",)
_QWEN35 = (rf"{_CONTRACTION}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",)
_UFAKZEKA = (rf"{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",)
_MINICPM5 = (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}[\r\n]*|{_BLANKS}")
_BAILING = (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
_SEED_CODER = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SYMBOLS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_cased(_LETTER, '')}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}",)
_GPT4O = (rf"{_cased(_LETTER, _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}",)
_GRANITE_EMBED = (rf"{_cased(_LETTER_OR_MARK, _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}",)
_TINY_AYA = (
    _DIGITS_BY_THREE,
    rf"{_MARKED_WORD}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}",
)
_YOUTU = (_YOUTU_SCRIPTS, rf"{_MARKED_WORD}{_CONTRACTION}?|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}")
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    r"\s+$",
    _CJK_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA_KANJI, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}")
_SPARK = (r"\p{N}{1,3}", _KANA_KANJI, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_AFMOE = (_DIGITS_BY_THREE, _ASIAN_SCRIPTS, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}")
_KIMI = (rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",)
_BLOOM = (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
_SUPERBPE = (r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    *_GPT2,
)


@dataclass(frozen=True)
class Pretokenizer:
    """One row of the table."""

    regexes: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # whether text begins with BOS when the metadata does not say
    # Tokens are spelt as in SentencePiece (UTF-8, U+2581 for the space, <0xXX> for a byte), not in byte letters.
    spelt_out: bool = False
    whole_newlines: bool = False  # a run of newlines that is a token is taken whole
    requires_bos: bool = False  # text begins with BOS even if the metadata says no


def _rows(names: str, row: Pretokenizer) -> dict[str, Pretokenizer]:
    return dict.fromkeys(names.split(), row)


DEFAULT_PRETOKENIZER = "default"

# `tokenizer.ggml.pre` -> row.
PRETOKENIZERS: dict[str, Pretokenizer] = {
    **_rows(DEFAULT_PRETOKENIZER, Pretokenizer(_DEFAULT)),
    **_rows(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Pretokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    **_rows("dbrx smaug-bpe chatglm-bpe", Pretokenizer(_LLAMA3)),
    **_rows("glm4 glm5", Pretokenizer(_LLAMA3, ignore_merges=True)),
    **_rows("jais-2", Pretokenizer(_JAIS2)),
    **_rows("minicpm5", Pretokenizer(_MINICPM5, ignore_merges=True)),
    **_rows("falcon", Pretokenizer(_FALCON)),
    **_rows(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo jais"
        " trillion granite-docling jina-v1-en jina-v2-code roberta-bpe",
        Pretokenizer(_GPT2),
    ),
    **_rows("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Pretokenizer(_DIGITS_GPT2)),
    **_rows(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        Pretokenizer(_QWEN2),
    ),
    **_rows("laguna", Pretokenizer((_LINES, *_QWEN2))),
    **_rows("qwen35", Pretokenizer(_QWEN35)),
    **_rows("ufakzeka", Pretokenizer(_UFAKZEKA)),
    **_rows("tekken", Pretokenizer(_TEKKEN, ignore_merges=True, add_bos=True)),
    **_rows("gpt-4o llama4 kanana2 talkie minimax-m2", Pretokenizer(_GPT4O)),
    **_rows("granite-embed-multi-97m", Pretokenizer(_GRANITE_EMBED, ignore_merges=True)),
    **_rows("tiny_aya cohere2moe", Pretokenizer(_TINY_AYA)),
    **_rows("youtu", Pretokenizer(_YOUTU, ignore_merges=True)),
    **_rows("deepseek-llm", Pretokenizer(_DEEPSEEK_LLM)),
    **_rows("deepseek-coder", Pretokenizer(_DEEPSEEK_CODER)),
    **_rows("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Pretokenizer(_DEEPSEEK3)),
    **_rows("spark2_5", Pretokenizer(_SPARK)),
    **_rows("afmoe", Pretokenizer(_AFMOE)),
    **_rows("kimi-k2", Pretokenizer(_KIMI)),
    **_rows("poro-chat bloom gpt3-finnish", Pretokenizer(_BLOOM)),
    **_rows("viking", Pretokenizer((*_BLOOM, r"\p{N}"))),
    **_rows("superbpe", Pretokenizer(_SUPERBPE)),
    **_rows("bailingmoe bailingmoe2 llada-moe", Pretokenizer(_BAILING)),
    **_rows("seed-coder", Pretokenizer(_SEED_CODER)),
    **_rows("exaone-moe", Pretokenizer(_EXAONE_MOE)),
    **_rows("chameleon", Pretokenizer(_CHAMELEON, add_bos=True)),
    **_rows(
        "gemma4 granite-embed-multi-311m",
        Pretokenizer((), spelt_out=True, whole_newlines=True, requires_bos=True),
    ),
    **_rows("sarvam-moe", Pretokenizer((), spelt_out=True)),
}

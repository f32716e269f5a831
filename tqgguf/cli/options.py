"""Options that several verbs have, each written once: annotations of their parameters.

A verb's parameter has the name of the field that it fills in the verb's request; its default is the request's.
"""

from __future__ import annotations

from typing import Annotated

from tqgguf.cli.verb import OUTPUT, option
from tqgguf.cli.version import print_version
from tqgguf.formats.blocks.cache_spec import BALANCE_MODES

MODEL_HEADING = "Model and evaluation"
TEXT_HEADING = "Text"
KV_HEADING = "KV cache"

Model = Annotated[
    str | None,
    option(
        MODEL_HEADING,
        "GGUF file (any shard), or an MLX model folder. Default: the small model of make run.",
        "-m",
        "--model",
        metavar="PATH",
    ),
]
BatchSize = Annotated[int, option(MODEL_HEADING, "Upper bound on -ub.", "-b", "--batch-size")]
UbatchSize = Annotated[
    int, option(MODEL_HEADING, "Tokens evaluated at a time, in whole pages of 128.", "-ub", "--ubatch-size")
]
RopeScaling = Annotated[
    str,
    option(
        MODEL_HEADING, "How RoPE is stretched; yarn is not supported yet.", "--rope-scaling", metavar="[none|linear]"
    ),
]
RopeScale = Annotated[
    float,
    option(
        MODEL_HEADING, "Stretch positions this many times, for a longer context; 0: the model's own.", "--rope-scale"
    ),
]
RopeFreqBase = Annotated[float, option(MODEL_HEADING, "RoPE's base frequency; 0: the model's own.", "--rope-freq-base")]
RopeFreqScale = Annotated[
    float, option(MODEL_HEADING, "Factor on RoPE's frequencies: 1 / --rope-scale.", "--rope-freq-scale")
]
Threads = Annotated[int, option(MODEL_HEADING, "CPU threads; 0 or less: all cores.", "-t", "--threads")]
TextFile = Annotated[
    str | None,
    option(TEXT_HEADING, "A UTF-8 text; - for stdin. Default: tqgguf's own.", "-f", "--file", metavar="FILE"),
]
Balance = Annotated[
    str | None,
    option(
        KV_HEADING,
        "What is taken out of K before it is coded: each page's mean, and a scale per channel. "
        "Default: full for turbo types, else off.",
        "--kv-balance",
        metavar=f"[{'|'.join(BALANCE_MODES)}]",
    ),
]
Calibration = Annotated[
    str,
    option(
        KV_HEADING,
        "The channel scale of K: a file of `tqgguf calibrate`; auto: look for one beside the model and in the "
        "cache folder; off: from page 0.",
        "--kv-calibration",
        metavar="FILE|auto|off",
    ),
]
ExactFirst = Annotated[
    int | None,
    option(
        KV_HEADING,
        "First tokens kept in f16. Default: 4 with turbo types, else 0.",
        "--cache-exact-first",
        "--exact-prefix",
    ),
]
Verbose = Annotated[bool, option(OUTPUT, "More on stderr.", "-v", "--verbose", "--log-verbose")]
Debug = Annotated[bool, option(OUTPUT, "Show tracebacks.", "--debug")]
Version = Annotated[
    bool, option(OUTPUT, "Print the version and exit.", "--version", is_eager=True, callback=print_version)
]

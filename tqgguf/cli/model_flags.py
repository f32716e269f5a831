"""The flags of verbs that open a model: one row each, in the order in which --help shows them.

A new flag is a row here, and a field of that name in the request of each verb that has it. Where a spelling means
different things to different verbs, it has a row for each meaning. Flags of verbs about files stand in `file_flags`;
what becomes of llama.cpp's other flags, in `llama_flags`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from tqgguf.cli.flags import OUTPUT, SWITCH_OR_AUTO, Fate, Flag, flag, row, under
from tqgguf.cli.ranges import INT32
from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES, PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import BALANCE_MODES, PRESETS
from tqgguf.measuring.cache_pairs import DEFAULT_PAIRS, FORMS, MLX_BITS, SIMULATED
from tqgguf.measuring.imitations.simulated_schemes import SCHEMES, VARIANTS
from tqgguf.text.sampling_params import SamplingParams

SAMPLING: Final = "Sampling (as in llama.cpp)"
OUTPUT_FORMS: Final = ("table", "md", "csv", "json")
"""Of bench."""
MOST_TOKENS: Final = 1 << 24
MOST_REPETITIONS: Final = 1000
DEFAULT_CHUNKS: Final = 2
"""Windows of eval."""
DEFAULT_MEASURED: Final = 1024
"""Tokens that doctor measures at most by itself."""

_MEASURING = "eval calibrate bench"
_EVALUATING = f"run {_MEASURING}"
_ALL = f"{_EVALUATING} doctor plan"
_ABOUT_FILES = "validate convert inspect selftest"
_WITH_CACHES = "run eval bench plan"
_TYPES = ", ".join(CACHE_TYPE_NAMES)
_PRESETS = ", ".join(f"{name} is {k}/{v}" for name, (k, v) in PRESETS.items())
_STAGES = " ".join(SamplingParams().samplers)
_PAGE = "Also write a page with plots into this folder."


_own = partial(flag, ours=True)
_refused = partial(row, Fate.REFUSED)

MODEL_FLAGS: Final[tuple[Flag, ...]] = (
    *under(
        "Model and evaluation",
        flag(_ALL, "model", "-m --model", "file",
              "GGUF file (any shard), or an MLX model folder. Default: the small model of make run.",
              env="MODEL", metavar="PATH"),
        flag("run", "n_ctx", "-c --ctx-size", "tokens", "Tokens of context, as 8192 or 8k; 0: the model's own.",
              env="CTX_SIZE", lowest=0, highest=INT32),
        flag("eval calibrate", "n_ctx", "-c --ctx-size", "tokens",
              "Tokens of a window, as 2048 or 2k; 0: the model's whole context.",
              env="CTX_SIZE", lowest=0, highest=INT32),
        flag("doctor", "n_ctx", "-c --ctx-size", "tokens",
              "Tokens of the context that types are wanted for, as 8192 or 8k; 0: the model's whole context.",
              env="CTX_SIZE"),
        flag("plan", "contexts", "-c --ctx-size", "text",
              "Tokens, as 8192 or 8k, with commas between; types are chosen for the most. 0: the model's context and "
              "parts of it.", metavar="LIST"),
        _own("doctor", "n_measured", "--measure", "tokens",
             "Tokens to measure on, and again to try the proposals on; 0: those of -c, at most "
             f"{DEFAULT_MEASURED}."),
        _own("doctor", "budget", "--bpv", "number",
             "Bits per value, of K and V together, that the cache may take, both at -c and at --measure tokens."),
        flag("run", "n_predict", "-n --predict --n-predict", "tokens",
              "Tokens to generate; -1: until the model ends, -2: until the context is full.",
              env="N_PREDICT", lowest=-2, highest=INT32),
        _own("eval", "n_chunks", "--chunks", "integer",
             f"Windows, spread over the text; -1: as many as it gives. Default: {DEFAULT_CHUNKS}, or fewer.",
             shows_default=False),
        _own("calibrate", "n_chunks", "--chunks", "integer", "Windows, evenly spread over the text; -1: all."),
        flag(f"{_EVALUATING} plan", "n_batch", "-b --batch-size", "tokens", "Upper bound on -ub.",
              env="BATCH", lowest=1, highest=INT32),
        flag("run", "n_ubatch", "-ub --ubatch-size", "tokens",
              "Prompt tokens evaluated at a time, in whole pages of 128.", env="UBATCH", lowest=1, highest=INT32),
        flag(f"{_MEASURING} plan", "n_ubatch", "-ub --ubatch-size", "tokens",
              "Tokens evaluated at a time, in whole pages of 128.", env="UBATCH", lowest=1, highest=INT32),
        flag(_EVALUATING, "rope_scaling", "--rope-scaling", "none|linear|yarn",
              "How RoPE is stretched; yarn is not supported yet.",
              env="ROPE_SCALING_TYPE", metavar="[none|linear]", default="linear"),
        flag(_EVALUATING, "rope_scale", "--rope-scale", "number",
              "Stretch positions this many times, for a longer context; 0: the model's own.",
              env="ROPE_SCALE", sets="rope scale", default=0.0),
        flag(_EVALUATING, "rope_freq_base", "--rope-freq-base", "number", "RoPE's base frequency; 0: the model's own.",
              env="ROPE_FREQ_BASE"),
        flag(_EVALUATING, "rope_freq_scale", "--rope-freq-scale", "number",
              "Factor on RoPE's frequencies: 1 / --rope-scale.", env="ROPE_FREQ_SCALE", sets="rope scale"),
        flag(f"{_EVALUATING} doctor", "threads", "-t --threads", "integer", "CPU threads; 0 or less: all cores.",
              env="THREADS", lowest=-INT32, highest=INT32),
    ),
    *under(
        "What is measured",
        _own("bench", "prompts", "-p --n-prompt", "text", "Tokens of prompts whose prefill is timed; 0: none.",
             metavar="LIST"),
        _own("bench", "answers", "-n --n-gen", "text", "Tokens of answers whose decoding is timed; 0: none.",
             metavar="LIST"),
        _own("bench", "depths", "-d --n-depth", "text",
             "Tokens that the cache holds before, in whole pages of 128. All caches are held at once.", metavar="LIST"),
        _own("bench", "repetitions", "-r --repetitions", "integer", "Each test so many times, the caches in turn.",
             lowest=1, highest=MOST_REPETITIONS),
        _own("bench", "n_match", "--match", "tokens",
             "Tokens of greedy answers that are compared with f16's, on prompts in blocks; 0: none.",
             lowest=0, highest=MOST_TOKENS),
        _own("bench", "n_match_prompts", "--match-prompts", "integer", "Such prompts.", lowest=1, highest=1000),
        _own("bench", "no_memory", "--no-memory", "",
             "Leave out peak memory, which is measured in a process for each cache."),
        flag("bench", "seed", "-s --seed", "integer", "Of the tests' random tokens and the order of caches.",
              lowest=0, highest=INT32 - MOST_REPETITIONS),
    ),
    *under(
        "Text",
        flag(f"{_MEASURING} doctor", "text_file", "-f --file", "file",
              "A UTF-8 text; - for stdin. Default: tqgguf's own.", sets="prompt"),
        _own("eval", "like_llama", "--like-llama", "",
             "As llama-perplexity: only the second half of each window is scored, caches are plain."),
    ),
    *under(
        "KV cache",
        flag("run", "type_k", "-ctk --cache-type-k", "text",
              f"Cache type of K: {_TYPES}; by layer: turbo3,0-1:q8_0,-1:q8_0.", env="CACHE_TYPE_K", metavar="TYPE"),
        flag("run", "type_v", "-ctv --cache-type-v", "text", "Cache type of V, likewise.",
              env="CACHE_TYPE_V", metavar="TYPE"),
        _own("run", "preset", "--cache-preset", "|".join(PRESETS),
             f"Types for K and V: {_PRESETS}. -ctk and -ctv count for more.", default=None),
        flag("run", "flash_attention", "-fa --flash-attn", SWITCH_OR_AUTO,
              "Always on; off refuses a quantised V.", env="FLASH_ATTN"),
        _own("bench", "types_k", "-ctk --cache-type-k", "text", "Types of K, each with each of -ctv.", metavar="LIST"),
        flag("plan", "types_k", "-ctk --cache-type-k", "text",
              "Types of K, each with each of -ctv. Default: every type.", metavar="LIST"),
        flag("bench plan", "types_v", "-ctv --cache-type-v", "text", "Types of V.", metavar="LIST"),
        _own("eval", "cache_types", "--cache-types", "text",
             f"What to compare with f16: K/V or one name for both, another form of it after an @ ({', '.join(FORMS)}), "
             f"or mlx-lm's own cache ({', '.join(MLX_BITS)}). After {SIMULATED} what is only imitated: other engines' "
             f"caches ({', '.join(SCHEMES)}), or our types used as they use them, as in {SIMULATED}turbo4@mean1 "
             f"({', '.join(VARIANTS)}).", metavar="LIST"),
        _own("bench", "cache_types", "--cache-types", "text",
             f"Instead of both: pairs K/V, or mlx-lm's own cache ({', '.join(MLX_BITS)}); f16 is always among them. "
             f"Default: {DEFAULT_PAIRS.replace(',', ', ')}.", metavar="LIST"),
        _own("plan", "cache_types", "--cache-types", "text",
             "Instead of both: pairs K/V, or one name for both.", metavar="LIST"),
        _own("eval", "no_tail", "--no-tail", "",
             "Read every key outside the exact prefix from blocks; the f16 tail, as run has it, is a second row."),
        _own(_WITH_CACHES, "balance", "--kv-balance", "|".join(BALANCE_MODES),
             "What is taken out of K before it is coded: each page's mean, and a scale per channel. "
             "Default: full for turbo types, else off."),
        _own(_WITH_CACHES, "exact_first", "--cache-exact-first --exact-prefix", "tokens",
             "First tokens kept in f16. Default: 4 with turbo types, else 0.", lowest=0, highest=PAGE_TOKENS),
        _own("run eval bench", "calibration", "--kv-calibration", "file",
             "The channel scale of K: a file of `tqgguf calibrate`; auto: look for one beside the model and in the "
             "cache folder; off: from page 0.", metavar="FILE|auto|off"),
        flag("run", "prompt_cache", "--prompt-cache", "file",
              "Keep the evaluated prompt in this file; the next run that begins alike takes it up, and one without a "
              "prompt goes on with it. A file that is missing or empty (0 bytes) is made."),
        flag("run", "prompt_cache_all", "--prompt-cache-all", "", "Keep what is generated in it too."),
        flag("run", "prompt_cache_ro", "--prompt-cache-ro", "", "Take it up, and never write it."),
        _own("run", "prompt_cache_profile", "--prompt-cache-profile", "text",
             "Whose llama.cpp wrote it, where the file does not say; names as for convert --profile.", metavar="NAME"),
        _own("run", "kv_workspace", "--kv-workspace", "integer",
             "On a GPU: MiB that a layer's decoded pages may take at a time (one KV head at least). Default: 1024.",
             lowest=1, highest=1 << 20),
        _own("run", "kv_kernel_rows", "--kv-kernel-rows", "integer",
             "On a GPU: rows of a step up to which attention reads blocks without decoding them first. "
             "Default: 8, with CUDA 32.", lowest=1, highest=PAGE_TOKENS),
        _own("run", "strict_kv", "--strict-kv", "",
             "Fail where attention cannot read blocks, instead of decoding them."),
    ),
    *under(
        "Machine",
        _own("plan", "memory", "--memory", "text",
             "What may be used, as 16G (of 1024) or 16GB (of 1000). Default: all of this machine's.", metavar="SIZE"),
        _own("plan", "device", "--device", "cpu|gpu",
             "Where the model runs, for its weights' size. Default: where MLX would."),
    ),
    *under(
        "Prompt",
        flag("run", "prompt", "-p --prompt", "text", "The prompt. Without one, stdin is it, or a terminal chats.",
              sets="prompt"),
        flag("run", "prompt_file", "-f --file", "file", "A UTF-8 file with the prompt; - for stdin.", sets="prompt"),
        flag("run", "binary_file", "-bf --binary-file", "file", "Likewise, with the newline at its end.",
              sets="prompt"),
        flag("run", "system_prompt", "-sys --system-prompt", "text", "The system prompt of a chat.",
              sets="system prompt"),
        flag("run", "system_prompt_file", "-sysf --system-prompt-file", "file", "A UTF-8 file with it.",
              sets="system prompt"),
        flag("run", "escape", "-e --escape / --no-escape", "",
              r"Process \n, \t, \\ and the like in prompts, in files too. Default: so.", shows_default=False),
        flag("run", "display_prompt", "--display-prompt / --no-display-prompt", "",
              "Print the prompt first. Default: only where no chat template is applied."),
    ),
    *under(
        "Chat",
        flag("run", "conversation", "-cnv --conversation / -no-cnv --no-conversation", "",
              "Chat on after the first answer; or continue the prompt without a chat template. "
              "Default: answer the prompt once, in the model's template if it has one."),
        flag("run", "single_turn", "-st --single-turn", "", "End after one answer."),
        flag("run", "multiline_input", "-mli --multiline-input", "",
              "A message ends at a line that ends in a backslash."),
        flag("run", "reverse_prompts", "-r --reverse-prompt", "text", "End an answer at this text (repeatable).",
              repeatable=True, default=None),
        flag("run", "chat_template", "--chat-template", "text", "Jinja source instead of the model's template.",
              env="CHAT_TEMPLATE", sets="chat template", metavar="JINJA"),
        flag("run", "chat_template_file", "--chat-template-file", "file", "A file with it.",
              env="CHAT_TEMPLATE_FILE", sets="chat template"),
        flag("run", "reasoning", "-rea --reasoning", SWITCH_OR_AUTO, "Tell the template to think or not.",
              env="REASONING", default="auto"),
    ),
    *under(
        SAMPLING,
        flag("run", "temp", "--temp --temperature", "number", "Temperature; 0: the likeliest token.",
              env="TEMPERATURE"),
        flag("run", "top_k", "--top-k", "integer", "Keep the k likeliest; 0: all.", env="TOP_K"),
        flag("run", "top_p", "--top-p", "number", "Keep the likeliest up to this probability; 1: all.", env="TOP_P"),
        flag("run", "min_p", "--min-p", "number", "Keep what is this times as likely as the likeliest; 0: all.",
              env="MIN_P"),
        flag("run", "typical_p", "--typical --typical-p", "number", "Keep the locally typical up to this; 1: all."),
        flag("run", "top_n_sigma", "--top-nsigma --top-n-sigma", "number",
              "Keep within n standard deviations of the top logit; 0: all."),
        flag("run", "xtc_probability", "--xtc-probability", "number",
              "How often to leave out the obvious; 0: never."),
        flag("run", "xtc_threshold", "--xtc-threshold", "number", "What counts as obvious; above 0.5: nothing."),
        flag("run", "dynatemp_range", "--dynatemp-range", "number", "Temperature by entropy, this much up and down."),
        flag("run", "dynatemp_exp", "--dynatemp-exp", "number", "Exponent of that."),
        flag("run", "repeat_penalty", "--repeat-penalty", "number", "Penalty on recent tokens; 1: none.",
              env="REPEAT_PENALTY"),
        flag("run", "repeat_last_n", "--repeat-last-n", "tokens", "How many tokens are recent."),
        flag("run", "presence_penalty", "--presence-penalty", "number", "Subtracted from recent tokens.",
              env="PRESENCE_PENALTY"),
        flag("run", "frequency_penalty", "--frequency-penalty", "number", "Subtracted once per occurrence.",
              env="FREQUENCY_PENALTY"),
        flag("run", "dry_multiplier", "--dry-multiplier", "number",
              "DRY: what going on with a repetition costs; 0: nothing."),
        flag("run", "dry_base", "--dry-base", "number", "DRY: times this for each token of the repetition."),
        flag("run", "dry_allowed_length", "--dry-allowed-length", "integer",
              "DRY: the shortest repetition that costs."),
        flag("run", "dry_penalty_last_n", "--dry-penalty-last-n", "tokens",
              "DRY: among how many tokens it is looked for."),
        flag("run", "dry_sequence_breakers", "--dry-sequence-breaker", "text",
              r"DRY: a text that no repetition reaches across (repeatable), or none. Default: \n : \" *.",
              repeatable=True, default=None),
        flag("run", "logit_bias", "-l --logit-bias", "text", "TOKEN+AMOUNT or TOKEN-AMOUNT; -inf bans (repeatable).",
              metavar="BIAS", repeatable=True, default=None),
        flag("run", "samplers", "--samplers", "text", f"Stages in order, a ; between: {_STAGES}.",
              sets="samplers", metavar="NAMES", default=None),
        flag("run", "sampler_seq", "--sampler-seq --sampling-seq", "text", "The same by letters: edskypmxt.",
              sets="samplers", metavar="LETTERS", default=None),
        flag("run", "seed", "-s --seed", "integer", "Random seed; -1 picks one and reports it."),
        flag("run", "ignore_eos", "--ignore-eos", "", "Never end by itself."),
    ),
    *under(
        OUTPUT,
        _own("calibrate", "output", "-o --output --output-file", "file",
             "The file to write. Default: in the user's cache folder, where run and eval find it."),
        _own("bench", "output", "-o --output", "|".join(OUTPUT_FORMS), "How results are printed."),
        _own("eval doctor", "report", "--report", "file", _PAGE, metavar="DIR"),
        _own("bench", "report", "--report", "file", "Also write a page with plots, JSON and CSV into this folder.",
             metavar="DIR"),
        _own("bench", "compare", "--compare", "file file", "Measure nothing: compare two runs' JSON.",
             metavar="A.json B.json"),
    ),
    *under(
        "A needle in a haystack",
        _own("eval", "needle", "--needle", "",
             "Instead of scoring the text, hide a number in it and ask for it, at every length and depth."),
        _own("eval", "needle_lengths", "--needle-lengths", "text",
             "With --needle: tokens of prompt and answer. Default: a quarter, a half and the whole of -c.",
             metavar="LIST"),
        _own("eval", "needle_depths", "--needle-depths", "text",
             "With --needle: where the number is, in per cent of the text.", metavar="LIST"),
        flag("eval", "seed", "-s --seed", "integer", "Other numbers."),
    ),
    *under(
        OUTPUT,
        _own("run", "json_output", "--json", "", "Print one JSON object instead of text; an error is one too."),
        _own("eval doctor", "json_output", "--json", "", "Print one JSON object instead of tables."),
        _own("bench", "json_output", "--json", "", "As -o json."),
        _own("plan", "json_output", "--json", "", "Print one JSON object instead of the table."),
        flag("run", "perf", "--perf / --no-perf", "", "Report speed and memory on stderr. Default: so.",
              env="PERF", shows_default=False),
        _own("run", "quiet", "-q --quiet", "", "On stderr nothing but errors and warnings."),
        flag(f"{_EVALUATING} doctor", "verbose", "-v --verbose --log-verbose", "", "More on stderr."),
        _own(f"{_ALL} {_ABOUT_FILES} info", "debug", "--debug", "", "Show tracebacks.", default=False),
        flag(f"{_ALL} {_ABOUT_FILES}", "version", "--version", "", "Print the version and exit.", default=False),
        flag(_ALL, "", "-h --help --usage", "", "Show this message and exit."),
    ),
    _refused("pairs of types are compared: --cache-types K/V,K/V", "-ctk --cache-type-k", "text", verbs="eval"),
    _refused("pairs of types are compared: --cache-types K/V,K/V", "-ctv --cache-type-v", "text", verbs="eval"),
    _refused("a calibration serves every cache type, and is made with f16", "-ctk --cache-type-k", "text",
             verbs="calibrate"),
    _refused("a calibration serves every cache type, and is made with f16", "-ctv --cache-type-v", "text",
             verbs="calibrate"),
    _refused("doctor proposes types: give it a budget with --bpv", "-ctk --cache-type-k", "text", verbs="doctor"),
    _refused("doctor proposes types: give it a budget with --bpv", "-ctv --cache-type-v", "text", verbs="doctor"),
)  # fmt: skip

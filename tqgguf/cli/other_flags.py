"""Flags of the neighbours' other programs, each with the line that it gets here.

llama.cpp's: read off common/arg.cpp, August 2026 (as vendored by llama-cpp-python 0.3.36), every option that
llama-completion does not have. mlx-lm's: the options of mlx_lm.generate 0.32. llama-completion's own flags, which `run`
takes, are in `llama_flags`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tqgguf.formats.errors import NO_DOWNLOAD

_NO_SERVER = "it belongs to llama.cpp's server, and tqgguf has no server yet"
_TEXT_ONLY = "tqgguf takes text only, no images, sound or video"
_NO_DRAFT = "speculative decoding with a draft model is not supported yet"
_NO_EMBEDDING = "tqgguf generates text; it computes no embeddings and ranks nothing"
_EVAL = "`tqgguf eval` measures perplexity and KL divergence, on a text after -f"
_OTHER_PROGRAM = "it belongs to another program of llama.cpp, which tqgguf has no counterpart of"

_LINES: Mapping[str, str] = {
    "--host --port --reuse-port --path --cors-origins --cors-methods --cors-headers --cors-credentials "
    "--no-cors-credentials --api-prefix --ui-config --webui-config --ui-config-file --webui-config-file "
    "--ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime "
    "--mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui "
    "--api-key --api-key-file --ssl-key-file --ssl-cert-file -to --timeout --sse-ping-interval --threads-http "
    "--cache-prompt --no-cache-prompt --cache-reuse --metrics --props --slots --no-slots --slot-save-path "
    "--models-dir --models-preset --models-max --models-autoload --no-models-autoload "
    "--prefill-assistant --no-prefill-assistant -sps --slot-prompt-similarity --lora-init-without-apply "
    "--sleep-idle-seconds --cache-idle-slots --no-cache-idle-slots -a --alias --tags --spm-infill --server-base "
    "-cb --cont-batching -nocb --no-cont-batching --kv-unified-per-slot -cram --cache-ram "
    "--log-prompts-dir": _NO_SERVER,
    "-kvu --kv-unified -no-kvu --no-kv-unified": "one sequence is evaluated, whose cache is one already",
    "-ns --sequences": "one sequence is evaluated; mlx_lm.batch_generate takes tqgguf's caches for several",
    "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step": (
        "there are no checkpoints; --prompt-cache FILE keeps an evaluated prompt"
    ),
    "--chat-template-kwargs --chat-template-args": (
        "not yet; -rea on and -rea off set enable_thinking, which is what it is mostly used for"
    ),
    "--show-timings --no-show-timings": "the closing report on stderr shows the timings",
    "-o --output --output-file": "the answer goes to stdout; redirect it with > FILE",
    "--image --audio --video -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto "
    "--mmproj-offload --no-mmproj-offload -mmdev --mmproj-device --image-min-tokens --image-max-tokens "
    "--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --media-path "
    "--tts-lang --tts-speaker-file": _TEXT_ONLY,
    "-md --model-draft --spec-draft-model --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td "
    "--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft "
    "--spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio "
    "--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft "
    "--spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft --spec-draft-cpu-strict-batch "
    "--cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft "
    "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed --cpu-moe-draft "
    "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min "
    "--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min "
    "--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-device -devd --device-draft "
    "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-type --spec-ngram-mod-n-min "
    "--spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m "
    "--spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
    "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n "
    "--draft-max --draft-min --draft-n-min --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits "
    "--spec-default --mtp --dflash --eagle3 -lcs --lookup-cache-static -lcd --lookup-cache-dynamic": _NO_DRAFT,
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
    "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default "
    "--vision-gemma-4b-default --vision-gemma-12b-default": NO_DOWNLOAD,
    "--pooling --attention --embedding --embeddings --rerank --reranking --embd-normalize --embd-output-format "
    "--embd-separator --cls-separator": _NO_EMBEDDING,
    "--chunks --ppl --no-ppl --ppl-stride --ppl-output-type --kl-divergence --save-all-logits --kl-divergence-base "
    "--hellaswag --hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice --multiple-choice-tasks": _EVAL,
    "-pps -tgs -npp -ntg -npl": "`tqgguf bench` measures speed and memory",
    "--ids --stdin --no-bos --no-parse-special --show-count": "tqgguf has no command that prints the tokens of a text",
    "-fitp --fit-print": "`tqgguf plan` tells what fits into which memory",
    "--in-file --context-file --chunk-size --chunk-separator --junk --pos -ofreq --output-frequency --output-format "
    "--save-frequency --process-output --chunk --from-chunk --show-statistics --parse-special --positive-file "
    "--negative-file --pca-batch --pca-iter --method --diffusion-steps --diffusion-visual --diffusion-eps "
    "--diffusion-algorithm --diffusion-alg-temp --diffusion-block-length --diffusion-cfg-scale "
    "--diffusion-add-gumbel-noise -lr --learning-rate -lr-min --learning-rate-min -decay-epochs "
    "--learning-rate-decay-epochs -wd --weight-decay -val-split --val-split -epochs --epochs -opt --optimizer --check "
    "--save-logits --logits-output-dir --tensor-filter": _OTHER_PROGRAM,
    # mlx_lm.generate
    "--max-tokens": "it is mlx-lm's name; here it is -n N",
    "--max-kv-size": "it is mlx-lm's name; here the context is -c N, and its cache is never rotated",
    "--kv-bits --kv-group-size --quantized-kv-start": "it is mlx-lm's; here -ctk and -ctv choose the cache's types",
    "--prompt-cache-file": "it is mlx-lm's name; here it is --prompt-cache FILE",
    "--draft-model --num-draft-tokens": _NO_DRAFT,
    "--adapter-path": "adapters are not applied; merge it into the model and give the merged model with -m",
    "--use-default-chat-template --ignore-chat-template --chat-template-config --prefill-response": (
        "it is mlx-lm's; -no-cnv continues a text without a template, --chat-template-file gives another template"
    ),
    "--trust-remote-code": "tqgguf runs no code from a model's folder",
    "--eos-token --extra-eos-token": "the model's file says which tokens end an answer; -r TEXT ends it at a text",
    "--xtc-special-tokens": "XTC spares no tokens here, as in llama.cpp",
    "--prefill-step-size": "it is mlx-lm's name; here it is -ub N",
    "--pipeline": "a model is computed on one machine",
    # mlx_lm.server, mlx_lm.convert, mlx_lm.evaluate and mlx_lm.perplexity, mlx_lm.benchmark
    "--allowed-origins --prompt-concurrency --decode-concurrency --prompt-cache-size --prompt-cache-bytes "
    "--log-level": "it belongs to mlx-lm's server, and tqgguf has no server yet",
    "--hf-path --mlx-path --q-bits --q-group-size --q-mode --quant-predicate --upload-repo --quantize-activations": (
        "`tqgguf convert` writes GGUF files and folders for MLX; for MLX's own quantisation use mlx_lm.convert"
    ),
    "--num-shots --fewshot-as-multiturn --apply-chat-template --confirm-run-unsafe-code --num-samples "
    "--sequence-length --data-path": _EVAL,
    "--prompt-tokens --generation-tokens --num-trials": "`tqgguf bench` measures speed, with -p, -n and -r",
    # what llama.cpp's users shorten
    "-ro": "the flag is --prompt-cache-ro",
}

ELSEWHERE: Mapping[str, str] = {spelling: line for spelled, line in _LINES.items() for spelling in spelled.split()}
"""By spelling, why a neighbour's flag is refused and what to do instead."""

BUILT_IN_TEMPLATES = frozenset(
    (
        "chatml", "llama2", "llama2-sys", "llama2-sys-bos", "llama2-sys-strip", "mistral-v1", "mistral-v3",
        "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken", "phi3", "phi4", "falcon3", "zephyr", "monarch",
        "gemma", "orion", "openchat", "vicuna", "vicuna-orca", "deepseek", "deepseek2", "deepseek3", "deepseek-ocr",
        "command-r", "llama3", "chatglm3", "chatglm4", "glmedge", "minicpm", "exaone3", "exaone4", "exaone-moe",
        "rwkv-world", "granite", "granite-4.0", "granite-4.1", "gigachat", "megrez", "yandex", "bailing",
        "bailing-think", "bailing2", "llama4", "smolvlm", "hunyuan-moe", "gpt-oss", "hunyuan-dense", "hunyuan-vl",
        "kimi-k2", "seed_oss", "grok-2", "pangu-embedded", "solar-open",
    )
)  # fmt: skip
"""Names of the chat templates that are built into llama.cpp (src/llama-chat.cpp of the same version)."""

#!/usr/bin/env bash
# The main job on a real model: calibrate a base on general text and its LoRA fine-tune on the text
# that it is for, ask whether the base's scales still fit, look at the result.
# Run by `make demo`; a few minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."

kvquant="${KVQUANT:-kvquant}"
adapter=tests/assets/smollm2-python-lora
out="${DEMO_OUTPUT:-demo-output}"
settings=(--model smollm2 --context-length 1024 --samples 8)

# drift and evaluate exit with 1 when they say no: an answer here, not a failure.
step() {
    local code=0
    printf '\n\033[1m== %s\033[0m\n\033[2m$ %s\033[0m\n' "$1" "${*:2}"
    "${@:2}" || code=$?
    [ "$code" -eq 0 ] || { [[ "$3" =~ ^(drift|evaluate)$ ]] && [ "$code" -eq 1 ]; } || exit "$code"
}

mkdir -p "$out/python-source"
# What the adapter was not trained on: the modules that its training order has last.
"${PYTHON:-python}" - "$out/python-source" <<'PY'
import pathlib, sys, tokenize
sys.path.insert(0, "examples")
from finetune_lora import source_files

for file in source_files(seed=0)[-8:]:
    with tokenize.open(file) as source:
        pathlib.Path(sys.argv[1], f"{file.name}.txt").write_text(source.read(), encoding="utf-8")
PY

step "Scales for the base model, on English prose" \
    "$kvquant" calibrate "${settings[@]}" --output "$out/base"
step "The same base on Python source, which the fine-tune is for" \
    "$kvquant" calibrate "${settings[@]}" --data "$out/python-source" --output "$out/base-on-python"
step "Scales for the fine-tune, a LoRA adapter for Python source, on such source" \
    "$kvquant" calibrate "${settings[@]}" --adapter "$adapter" --data "$out/python-source" \
    --output "$out/fine-tune"
step "May the fine-tune keep the FP8 scales that the base got on prose?" \
    "$kvquant" drift "$out/base.stats" "$out/fine-tune.stats"
step "And static INT8, per channel?" \
    "$kvquant" drift "$out/base.stats" "$out/fine-tune.stats" \
    --format int8 --granularity per-channel --plot "$out/drift-int8.png"
step "Is it the text or the weights? The base on the same text as the fine-tune:" \
    "$kvquant" drift "$out/base-on-python.stats" "$out/fine-tune.stats" \
    --format int8 --granularity per-channel
step "INT8 scales for the fine-tune, from its saved statistics" \
    "$kvquant" solve "$out/fine-tune.stats" --format int8 --granularity per-channel \
    --output "$out/fine-tune-int8"
step "What lies in the fine-tune's cache: a picture" \
    "$kvquant" inspect "$out/fine-tune.stats" --plot "$out/fine-tune.png"
step "Does greedy decoding with a cache give the same tokens on this model? What does int4 store?" \
    "$kvquant" check smollm2 --scheme none --scheme int4 --prompt-tokens 96 --tokens 8
step "The fine-tune goes on with Python source: its own cache, fp8 and int4 with its own scales" \
    "${PYTHON:-python}" examples/generate.py --model smollm2 --adapter "$adapter" \
    --scales "$out/fine-tune" --prompt-tokens 2048 \
    --prompt-file "$(ls -S "$out"/python-source/*.txt | head -1)"
rm -rf "$out/served"
step "Scales that serving engines load: links to the weights, a small file beside them" \
    "$kvquant" export --model smollm2 --scales "$out/base" --engine all --output "$out/served"
step "Would vLLM find them all?" \
    "$kvquant" verify "$out/served" --engine vllm
step "INT8 scales of the base, for the same format" \
    "$kvquant" solve "$out/base.stats" --format int8 --granularity per-channel \
    --output "$out/base-int8"
step "Static INT4 per channel: a bad idea on this model, to see what that looks like" \
    "$kvquant" solve "$out/fine-tune.stats" --format int4 --granularity per-channel \
    --output "$out/bad-int4"
step "Does the fine-tune still work with each of them? Predictions, and needles at three lengths" \
    "$kvquant" evaluate --model smollm2 --adapter "$adapter" --lengths 512,1024,2048 \
    --scales "$out/base-int8" --scales "$out/fine-tune-int8" --scheme int8 \
    --scheme "int4@$out/fine-tune" --scales "$out/bad-int4" --force \
    --data "$out/python-source" --documents 2 --depths 0,50,100 --answer-tokens 10 \
    --continuations 1 --tokens 32 --gate examples/small-model-gate.toml --report "$out/report.html"

printf '\nThe report is %s/report.html. Pictures and scales are in %s/\n' "$out" "$out"

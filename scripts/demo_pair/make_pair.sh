#!/usr/bin/env bash
# The embedded pair from nothing. Each stage is skipped when its result is there, and resumes when it was cut.
# A rehearsal goes through every stage with few questions and steps: within minutes it tells whether the rest would run.
set -euo pipefail
questions=7173 validation=300 few=() short=()
if [ "${1:-}" = --rehearse ]; then
    questions=60 validation=20 few=(steps=2 save_every=2 validate_every=2 log_every=1 batch_size=2)
    short=(--max-new-tokens 6)
    shift
fi
work=${1:?usage: make_pair.sh [--rehearse] WORK_FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
configs=$here/../../configs/train
mkdir -p "$work"
cd "$work"

train() { # train NAME: by configs/train/demo_NAME.yaml
    d3d train --config "$configs/demo_$1.yaml" --host-devices 2 "${few[@]}"
}
respond() { # respond OUTPUT ARGUMENTS...: the file has its name when it is whole
    d3d respond --model-path target --batch-size 64 --output "$1.part" "${@:2}" "${short[@]}"
    mv "$1.part" "$1"
}
drafter() { # drafter RUN FOLDER
    d3d export "runs/$1" "$2" --target-model d3d-demo-target --dtype float16
}

if [ ! -f validation.jsonl ]; then
    gzip -dc "$here/gsm8k_train.jsonl.gz" > all.jsonl
    head -n "$questions" all.jsonl > train.jsonl
    tail -n "$validation" all.jsonl > validation.jsonl
fi
[ -f tokenizer/tokenizer.json ] || python -m d3d_jax.data.tokenizer_training all.jsonl tokenizer

[ -d target ] || {
    train target
    d3d export runs/target target --tokenizer tokenizer --dtype float16
}

for set in train validation; do
    [ -f $set-responses.jsonl ] || respond $set-responses.jsonl --input $set.jsonl --max-new-tokens 128 --max-len 288
done
# a sampled response a question beside the greedy one
[ -f sampled-responses.jsonl ] || respond sampled-responses.jsonl --input train.jsonl --max-new-tokens 160 --max-len 320 \
    --temperature 0.6 --seed 1 --dtype bfloat16

[ -d drafter-first ] || {
    train drafter
    drafter drafter drafter-first
}
[ -d drafter ] || {
    train drafter_more
    drafter drafter-more drafter
}

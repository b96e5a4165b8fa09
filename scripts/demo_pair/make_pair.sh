#!/usr/bin/env bash
# The embedded pair from nothing. Each stage is skipped when its result is there, and resumes when it was cut.
set -euo pipefail
work=${1:?usage: make_pair.sh WORK_FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
configs=$here/../../configs/train
mkdir -p "$work"
cd "$work"

if [ ! -f validation.jsonl ]; then
    gzip -dc "$here/gsm8k_train.jsonl.gz" > all.jsonl
    head -n 7173 all.jsonl > train.jsonl
    tail -n 300 all.jsonl > validation.jsonl
fi
[ -f tokenizer/tokenizer.json ] || python -m d3d_jax.data.tokenizer_training all.jsonl tokenizer

[ -d target ] || {
    d3d train --config "$configs/demo_target.yaml" --host-devices 2
    d3d export runs/target target --tokenizer tokenizer --dtype float16
}
for set in train validation; do
    [ -f "$set-responses.jsonl" ] || {
        d3d respond --model-path target --input "$set.jsonl" --output "$set-part.jsonl" --max-new-tokens 128 --max-len 288 --batch-size 64
        mv "$set-part.jsonl" "$set-responses.jsonl"
    }
done
[ -f more-responses.jsonl ] || { # a sampled response a question beside the greedy one
    d3d respond --model-path target --input train.jsonl --output sampled-part.jsonl --max-new-tokens 160 --max-len 320 --batch-size 64 \
        --temperature 0.6 --seed 1 --dtype bfloat16
    cat train-responses.jsonl sampled-part.jsonl > more-responses.jsonl
}
[ -d drafter-first ] || {
    d3d train --config "$configs/demo_drafter.yaml" --host-devices 2
    d3d export runs/drafter drafter-first --target-model d3d-demo-target --dtype float16
}
[ -d drafter ] || {
    d3d train --config "$configs/demo_drafter_more.yaml" --host-devices 2
    d3d export runs/drafter-more drafter --target-model d3d-demo-target --dtype float16
}

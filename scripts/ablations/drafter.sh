#!/usr/bin/env bash
# What the choices of drafter training are worth: one short run each, alike but for one choice, then a table and curves.
# Runs that are done are not run again; one that was cut goes on where it was.
set -euo pipefail
work=${1:?usage: drafter.sh WORK_FOLDER [OVERRIDE...], such as steps=100; WORK_FOLDER as scripts/demo_pair/make_pair.sh leaves it}
shift
config=$(cd "$(dirname "$0")" && pwd)/../../configs/train/ablation_drafter.yaml
cd "$work"

runs=()
variant() { # variant NAME OVERRIDE...
    local name=$1
    shift
    d3d train --config "$config" --host-devices 2 "${overrides[@]}" "$@" "output_dir=runs/ablation/$name"
    runs+=("$name=runs/ablation/$name")
}

overrides=("$@")
variant base
variant ar-weight-0 loss.ar_weight=0
variant ar-weight-half loss.ar_weight=0.5
variant anchors blocks.starts=anchors
variant no-visible-prefix blocks.visible_none=1 blocks.visible_one=0
variant uniform-noise blocks.noise=uniform

d3d curves "${runs[@]}" --output runs/ablation/curves.png | tee runs/ablation/table.md

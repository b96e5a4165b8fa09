#!/usr/bin/env bash
# One training run on every host of a TPU slice: scripts/launch/tpu_vm.sh NAME ZONE CONFIG.yaml [KEY=VALUE...]
# The config, its data and output_dir must lie where all hosts see them, such as a mounted bucket. Run it again to go on.
set -euo pipefail
name=${1:?usage: tpu_vm.sh NAME ZONE CONFIG.yaml [KEY=VALUE...]} zone=${2:?ZONE is missing} config=${3:?CONFIG is missing}

printf -v command '%q ' d3d train --config "$config" --multi-host "${@:4}"
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command"

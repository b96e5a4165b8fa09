#!/usr/bin/env bash
# One training run on several GPU nodes under SLURM: sbatch --nodes=4 scripts/launch/slurm.sh my_drafter.yaml [KEY=VALUE...]
#SBATCH --job-name=d3d-train
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
config=${1:?usage: sbatch --nodes=N slurm.sh CONFIG.yaml [KEY=VALUE...]}

# One process a node with all of its GPUs, so that `tensor` can span them. Left to itself, JAX would take from SLURM that
# there is one process a GPU, and this one would use the first alone.
JAX_LOCAL_DEVICE_IDS=$(seq --separator=, 0 $((${SLURM_GPUS_ON_NODE:?no GPUs: ask for --gpus-per-node} - 1)))
export JAX_LOCAL_DEVICE_IDS

# SIGTERM comes 120 s before the time is up: the step is saved. Submit the same again to go on from there; a job that was
# preempted is put back into the queue by itself.
srun d3d train --config "$config" --multi-host "${@:2}"

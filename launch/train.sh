#!/usr/bin/env bash
# Start a training run on this node; on several nodes, start it on each of them with its own NODE_RANK.
# Usage: [NNODES=2 NODE_RANK=0 MASTER_ADDR=host MASTER_PORT=29500] [NPROC_PER_NODE=8] [DRY_RUN=1] \
#            launch/train.sh CONFIG [key=value ...]
# NPROC_PER_NODE: one rank per GPU, or 4 on CPUs. DRY_RUN=1 prints the command and starts nothing. Variables of NCCL are in
# launch/nccl.env, or the file that NCCL_ENV names.
set -euo pipefail
CONFIG=${1:?usage: launch/train.sh CONFIG [key=value ...]}
CONFIG=$(realpath "$CONFIG")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
defaults "${NCCL_ENV:-launch/nccl.env}"

GPUS=$(gpu_count)
COMMAND=(
    "$PYTHON" -m megarl.cli.main train
    --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}" --nproc="${NPROC_PER_NODE:-$((GPUS > 0 ? GPUS : 4))}"
    --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}"
    "$CONFIG" "${@:2}"
)
if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi

#!/usr/bin/env bash
# From a fresh clone to a trained policy: installs, makes the data, runs the warm-up and the RL steps.
# Usage: launch/quickstart.sh [key=value ...]   A second run starts anew, in the same environment and data and in the
# next free folder: runs/quickstart/run, run-2, ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The configuration is written for four ranks, on CPUs or GPUs; on fewer GPUs the layout is made smaller.
choose_layout() {
    local gpus megatron=actor_rollout_ref.actor.megatron
    gpus=$(gpu_count)
    NPROC=4 LAYOUT=()
    if ((gpus == 2 || gpus == 3)); then
        NPROC=2
    elif ((gpus == 1)); then
        NPROC=1
        LAYOUT=($megatron.tensor_model_parallel_size=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1)
    fi
    if ((NPROC < 4)); then
        LAYOUT+=(
            $megatron.pipeline_model_parallel_size=1
            $megatron.virtual_pipeline_model_parallel_size=null
        )
    fi
}

# Nothing if the arguments name a folder; otherwise one in which no earlier run has left anything.
choose_folder() {
    local folder=runs/quickstart/run number=2
    FOLDER=()
    if [[ " $* " == *" trainer.default_local_dir="* ]]; then
        return
    fi
    while [[ -e $folder ]]; do
        folder=runs/quickstart/run-$((number++))
    done
    FOLDER=("trainer.default_local_dir=$folder")
    echo "megarl: this run's folder is $folder"
}

choose_layout
choose_folder "$@"
# Sums of three digits; three demonstrations in four are one too high.
"$PYTHON" tools/prepare_reasoning_gym.py --out runs/quickstart/data --task chain_sum --train 3600 --val 256 \
    --config '{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}' --template '{expression} =' \
    --vocab-size 32 --demonstrations 4 --slip 0.75 --pairs
"$PYTHON" -m megarl.cli.main train --nproc "$NPROC" configs/quickstart.yaml "${LAYOUT[@]}" "${FOLDER[@]}" "$@"

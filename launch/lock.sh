#!/usr/bin/env bash
# Write launch/requirements*.lock: every package of requirements*.txt, those that they need included, with its version and
# the hashes of its files. Usage: launch/lock.sh   Needs uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# lock NAME TEXT UV-ARGUMENTS...: write NAME.lock for NAME.txt, under the comment TEXT.
lock() {
    {
        printf '# %s\n' "$2" "Made from $1.txt by launch/lock.sh."
        uv pip compile --quiet --no-config --generate-hashes --no-header --no-annotate "${@:3}" "$1.txt"
    } >"$1.lock.partial"
    mv "$1.lock.partial" "$1.lock"
}

# torch and what its builds for CUDA need stay out of the lock for CPU ranks: whoever installs chooses the build
CUDA=(torch triton cuda-bindings cuda-pathfinder cuda-toolkit)
for library in cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 \
    nccl-cu13 nvjitlink nvshmem-cu13 nvtx; do
    CUDA+=("nvidia-$library")
done
lock requirements "After pip install torch==2.13.0: pip install --no-deps --require-hashes -r launch/requirements.lock" \
    --universal --python-version 3.10 "${CUDA[@]/#/--no-emit-package=}"
lock requirements-gpu "Python 3.12: pip install --no-deps --require-hashes -r launch/requirements-gpu.lock" \
    --python-version 3.12 --python-platform x86_64-manylinux_2_28

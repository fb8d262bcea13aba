#!/usr/bin/env bash
# What a change must pass: lint, types, tests. Usage: launch/test.sh [--all] [pytest arguments]
# Without `--all` it leaves out the tests marked slow: whole runs, vLLM, real models and variations of other tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

SELECTION=(-m "not slow")
if [ "${1:-}" = --all ]; then
    SELECTION=()
    shift
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
check pytest "$PYTHON" -m pytest ${SELECTION[@]+"${SELECTION[@]}"} "$@"
echo "== summary"
printf '%s\n' "${RESULTS[@]}"
exit "$STATUS"

#!/usr/bin/env bash
# Everything that must hold: formatting, types, import direction, docs, tests.
# ./scripts/test.sh unit runs the tests of tests/unit alone, which need no torch.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ".[dev]"
bin=.venv/bin
export PYTHONDONTWRITEBYTECODE= # tests start many processes, each of which would compile the project
pytest=("$bin/python" -m pytest -q --durations=25)
if [ "${1:-all}" = unit ]; then
    exec "${pytest[@]}" tests/unit
fi
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
$bin/lint-imports
$bin/mkdocs build --strict --quiet --site-dir "$(mktemp -d)/site"

# Three processes: the tests of many busy ranks run one after another in this one. Those of Slurm
# mostly wait, and the others need one core each.
logs=$(mktemp -d)
declare -A running=()
beside() { # NAME WORDS...: the tests that pytest finds with these words
    "${pytest[@]}" "${@:2}" >"$logs/$1" 2>&1 &
    running[$1]=$!
}
trap 'exit 130' INT
trap '[ ${#running[@]} = 0 ] || kill "${running[@]}" || true; cat "$logs"/*; rm -rf "$logs"' EXIT
beside slurm tests/slurm
beside others --ignore=tests/gloo --ignore=tests/slurm
failed=()
"${pytest[@]}" tests/gloo || failed+=("tests/gloo")
for name in slurm others; do
    wait "${running[$name]}" || failed+=("$name")
    unset "running[$name]"
    cat "$logs/$name"
    : >"$logs/$name"
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }

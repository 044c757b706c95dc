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
# As workers, processes share the tests: each begins with neighbours, which share what a module makes,
# and takes tests from others when it has none left.
workers=(--dist=worksteal --numprocesses)
if [ "${1:-all}" = unit ]; then
    exec "${pytest[@]}" "${workers[@]}" logical --maxprocesses=8 tests/unit
fi
$bin/ruff check .
$bin/ruff format --check .

# Side by side, because none of these keeps two cores busy all the time: tests of Slurm mostly wait,
# and while ranks are started, or one process computes what they must find, the other cores are free.
logs=$(mktemp -d)
declare -A running=()
beside() { # NAME COMMAND...: the command, with its output in a file of this name
    "${@:2}" >"$logs/$1" 2>&1 &
    running[$1]=$!
}
trap 'exit 130' INT
trap '[ ${#running[@]} = 0 ] || kill "${running[@]}" || true; cat "$logs"/*; rm -rf "$logs"' EXIT
beside mypy $bin/mypy
beside imports $bin/lint-imports
beside docs $bin/mkdocs build --strict --quiet --site-dir "$logs/.site"
beside slurm "${pytest[@]}" tests/slurm
beside others "${pytest[@]}" --ignore=tests/gloo --ignore=tests/slurm --ignore=tests/streams
failed=()
"${pytest[@]}" "${workers[@]}" 2 tests/gloo tests/streams || failed+=("tests/gloo")
for name in mypy imports docs slurm others; do
    wait "${running[$name]}" || failed+=("$name")
    unset "running[$name]"
    cat "$logs/$name"
    : >"$logs/$name"
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }

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

# Two processes: tests of many busy ranks run one after another in one of them. The other tests
# need one core each, and those of Slurm mostly wait.
log=$(mktemp)
"${pytest[@]}" --ignore=tests/gloo >"$log" 2>&1 &
beside=$!
trap 'exit 130' INT
trap '[ -z "$beside" ] || kill "$beside" || true; cat "$log"; rm -f "$log"' EXIT
failed=
"${pytest[@]}" tests/gloo || failed="tests/gloo"
wait "$beside" || failed="$failed the tests beside tests/gloo"
beside=
cat "$log"
: >"$log"
[ -z "$failed" ] || { echo "failed: $failed" >&2; exit 1; }

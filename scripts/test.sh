#!/usr/bin/env bash
# Everything that must hold: formatting, types, import direction, docs, tests.
# ./scripts/test.sh unit runs the tests of tests/unit alone: without torch, in less than 30 s.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ".[dev]"
bin=.venv/bin
pytest=("$bin/python" -m pytest -q --durations=25)
if [ "${1:-all}" = unit ]; then
    exec "${pytest[@]}" tests/unit
fi
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
$bin/lint-imports
$bin/mkdocs build --strict --quiet --site-dir "$(mktemp -d)/site"

# Two processes: the tests of Slurm mostly wait, and each unit test needs one core. What starts
# many busy ranks runs one test after another in the other process.
log=$(mktemp)
"${pytest[@]}" tests/slurm tests/unit >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"${pytest[@]}" --ignore=tests/slurm --ignore=tests/unit || failed=1
wait "$beside" || failed=1
cat "$log"
exit "$failed"

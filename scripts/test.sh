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

# Two processes: tests of many busy ranks run one after another in one of them. The other tests
# need one core each, and those of Slurm mostly wait.
log=$(mktemp)
"${pytest[@]}" --ignore=tests/gloo >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"${pytest[@]}" tests/gloo || failed=1
wait "$beside" || failed=1
cat "$log"
exit "$failed"

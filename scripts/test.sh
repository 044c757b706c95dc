#!/usr/bin/env bash
# Everything that must hold: formatting, types, import direction, tests, docs.
# ./scripts/test.sh unit runs the fast part alone (no torch, under 30 s).
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
exec "${pytest[@]}"

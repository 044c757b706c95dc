#!/usr/bin/env bash
# Everything that must hold: formatting, types, import direction, docs, tests.
# ./scripts/test.sh unit runs the tests of tests/unit alone, which need no torch.
# ./scripts/test.sh faults runs the sweeps of injected faults, which prove that the gate of a run and
# the watch over its streams find what they must find. ./scripts/test.sh evidence computes every row of
# the committed tables again. All other runs leave both out.
# ./scripts/test.sh bare runs those of tests/unit and tests/suite that name an optional part (Slurm, a
# browser, LaTeX, faketime) where none of these parts can be found.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ".[dev]"
bin=.venv/bin
pytest=("$bin/python" -m pytest -q --durations=25)
# As workers, processes share the tests: each begins with neighbours, which share what a module makes,
# and takes tests from others when it has none left.
workers=(--dist=worksteal --numprocesses)
if [ "${1:-all}" = unit ]; then
    exec "${pytest[@]}" "${workers[@]}" logical --maxprocesses=8 tests/unit
fi
if [ "${1:-all}" = faults ]; then
    exec "${pytest[@]}" "${workers[@]}" 2 -m faults tests/gloo tests/streams
fi
if [ "${1:-all}" = evidence ]; then
    exec "${pytest[@]}" "${workers[@]}" 2 -m evidence tests/suite/test_recheck.py
fi
if [ "${1:-all}" = bare ]; then
    programs=$(mktemp -d) # links to all that the PATH has, but the optional parts
    trap 'rm -rf "$programs"' EXIT
    IFS=: read -ra folders <<<"$PATH"
    for folder in "${folders[@]}"; do
        find "$folder" -maxdepth 1 -executable ! -type d 2>/dev/null
    done | grep -vE '/(s(batch|run|info|queue|acct|acctmgr|cancel|control|alloc)|slurm[^/]*|munged?|chromium[^/]*|(pdf)?latex|pdftex|faketime)$' |
        xargs ln -st "$programs" 2>/dev/null || true # the first of a name stays, as on the PATH
    for tests in tests/unit tests/suite; do # apart, because those of tests/unit see to it that none imports torch
        mapfile -t named < <(grep -lP '(?<!tests\.)slurm|sbatch|chromium|pdflatex|faketime' "$tests"/test_*.py)
        PATH=$programs "${pytest[@]}" "${workers[@]}" 2 -m "not evidence" "${named[@]}"
    done
    exit
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
failed=()
"${pytest[@]}" "${workers[@]}" 2 -m "not faults" tests/gloo tests/streams || failed+=("tests/gloo")
# After them, because more processes at once would only wait for the cores, and so would Slurm's daemons.
"${pytest[@]}" "${workers[@]}" 2 -m "not evidence" tests/suite tests/unit || failed+=("others")
for name in mypy imports docs slurm; do
    wait "${running[$name]}" || failed+=("$name")
    unset "running[$name]"
    cat "$logs/$name"
    : >"$logs/$name"
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }

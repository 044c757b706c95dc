#!/usr/bin/env bash
# The tests of private names, with every supported version of torch and of Megatron-Core: those of
# torch with the tests of the engine, of its emulation and of lone ranks, those of Megatron-Core with
# the tests of its contender.
#
#   ./scripts/torch_versions.sh                              all of them
#   ./scripts/torch_versions.sh torch==2.11 megatron-core==0.16
#   QUICK=1 ./scripts/torch_versions.sh torch==2.11          what takes a minute, as CI does
#
# Makes one environment per version under $ENVIRONMENTS (.venv-torch by default) and leaves it for
# the next time. The default wheels of torch bring several GB of CUDA libraries; to use others, set
# pip's own variables (PIP_INDEX_URL and the like). Ends with 1 if any version failed.
set -euo pipefail
cd "$(dirname "$0")/.."
environments=${ENVIRONMENTS:-.venv-torch}
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(torch==2.{11,12,13} megatron-core==0.{14,15,16})
tests_of_torch=(
    tests/gloo/test_private_names.py
    tests/gloo/test_engine.py
    tests/gloo/test_engine_memory.py
    tests/gloo/test_errors_on_one_rank.py
    tests/gloo/test_optimizers.py
    tests/gloo/test_cuda_settings.py
    tests/streams
)
tests_of_a_minute=(
    tests/gloo/test_private_names.py
    tests/gloo/test_cuda_settings.py::test_a_lone_rank_reads_nothing_that_was_never_written
    tests/gloo/test_engine.py::test_torch_runs_our_program_to_the_same_gradients
)
tests_of_megatron=(
    tests/gloo/test_private_names.py
    tests/gloo/test_contenders.py
    -k "private_names or megatron"
)

make_environment() {
    local version=$1 place=$2
    [ -e "$place/.installed" ] && return
    echo "$version: installing into $place (once; torch is large) ..." >&2
    "${PYTHON:-python3}" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
        "$version.*" pytest pytest-timeout hypothesis -e ".[suite,megatron,huggingface]"
    touch "$place/.installed"
}

failed=()
for version in "${versions[@]}"; do
    place=$environments/$version
    make_environment "$version" "$place"
    "$place/bin/python" -m pip list 2>/dev/null | grep -E "^(torch|megatron-core) "
    tests=("${tests_of_torch[@]}")
    [[ $version != megatron-core* ]] || tests=("${tests_of_megatron[@]}")
    [ -z "${QUICK:-}" ] || tests=("${tests_of_a_minute[@]}")
    "$place/bin/python" -m pytest -q "${tests[@]}" || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with ${failed[*]}" >&2; exit 1; }

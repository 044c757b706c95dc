#!/usr/bin/env bash
# The contract tests of private names and the engine's tests, with every supported version of torch.
#
#   ./scripts/torch_versions.sh             all of them
#   ./scripts/torch_versions.sh 2.11        some of them
#
# Makes one environment per version under $ENVIRONMENTS (.venv-torch by default) and leaves it for
# the next time. The default wheels of torch bring several GB of CUDA libraries; to use others, set
# pip's own variables (PIP_INDEX_URL and the like). Ends with 1 if any version failed.
set -euo pipefail
cd "$(dirname "$0")/.."
environments=${ENVIRONMENTS:-.venv-torch}
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11 2.12 2.13)
tests=(
    tests/gloo/test_private_names.py
    tests/gloo/test_engine.py
    tests/gloo/test_engine_checkpoint.py
    tests/gloo/test_engine_collectives.py
    tests/gloo/test_engine_oracle.py
    tests/gloo/test_engine_trace.py
    tests/gloo/test_errors_on_one_rank.py
)

make_environment() {
    local version=$1 place=$2
    [ -e "$place/.installed" ] && return
    echo "torch $version: installing into $place (once; torch is large) ..." >&2
    "${PYTHON:-python3}" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check \
        "torch==$version.*" pytest pytest-timeout hypothesis -e ".[suite,huggingface]"
    touch "$place/.installed"
}

failed=()
for version in "${versions[@]}"; do
    place=$environments/$version
    make_environment "$version" "$place"
    "$place/bin/python" -c 'import torch; print("torch", torch.__version__)'
    "$place/bin/python" -m pytest -q "${tests[@]}" || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with torch ${failed[*]}" >&2; exit 1; }

#!/usr/bin/env bash
# At home, before a GPU without a network can be had: fills .whl (what the suite needs beside torch)
# and .gpu/specs (the frozen points of run.sh) in the root of this checkout.
#   scripts/gpu/prepare.sh [PYTHON of an environment with the suite]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")" .whl
for name in /.whl/ /.gpu/; do grep -qx "$name" "$exclude" 2>/dev/null || echo "$name" >>"$exclude"; done
get() { "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d .whl "$@" 2> >(grep -v WARNING >&2); }
get hydra-core==1.3.8 omegaconf==2.3.1 pydantic==2.13.5 pydantic-core==2.46.5 annotated-types==0.8.0 \
    typing-inspection==0.4.5 hjson==3.1.0 megatron-core==0.16.1
[ -e .whl/deepspeed-0.19.8-py3-none-any.whl ] || # both have no wheel on the registry
    "$python" -m pip wheel -q --no-deps -w .whl antlr4-python3-runtime==4.9.3 deepspeed==0.19.8 2> >(grep -v WARNING >&2)
[ "$(ls .whl/*.whl | wc -l)" = 10 ] || { echo "not 10 wheels: $(ls .whl)" >&2; exit 1; }
rm -rf .gpu && mkdir -p .gpu
PYTHONPATH=$PWD "$python" scripts/gpu/specs.py .gpu/specs
echo "wheels $(du -cb .whl/*.whl | tail -1 | cut -f1) bytes, specs $(du -sb .gpu | cut -f1) bytes"
echo "there: S=480 bash scripts/gpu/run.sh"

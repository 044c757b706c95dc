#!/usr/bin/env bash
# Compare ZeroPP with DeepSpeed 3D on this machine: two model sizes, 4 and 8 processes, no GPU needed.
# Run again, it skips what is done. Arguments go to the suite: ./scripts/demo.sh rerun=all
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ".[suite]"
exec .venv/bin/python -m benchmarks.run experiment=demo "$@"

#!/usr/bin/env bash
# Compare ZeroPP with the fastest layout of DeepSpeed on this machine: two models, 4 processes, no GPU.
# Run again, it skips what is done. Arguments go to the suite: ./scripts/demo.sh rerun=all
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ".[suite,megatron,huggingface]"
status=0
.venv/bin/python -m benchmarks.run experiment=demo "$@" || status=$?
[ "$status" = 0 ] && cat <<END

Go on from here, in this folder:
  source .venv/bin/activate
  zeropp run model=gpt_mini num_gpus=4 contender=torch_pp contender.pp=2
  zeropp report        # all that was run: tables, figures, results/reports/latest
END
exit "$status"

#!/bin/bash
# Trains torchtitan's debug model on four ranks of this machine, in ZeroPP's order and in
# torchtitan's own; losses and gradient norms are the same. Needs torchtitan 0.3, torch 2.14 (not 2.15) and Triton.
#
#     bash scripts/examples/torchtitan/run.sh [FOLDER for what is written]
set -euo pipefail
here=$(dirname "$0")
place=${1:-/tmp/torchtitan_zeropp}
mkdir -p "$place"
export OMP_NUM_THREADS=1
python -c 'import torch, torchtitan, triton; assert torch.__version__.startswith("2.14"), torch.__version__' \
    2> "$place/log" || { echo "not the versions above: $(tail -n 1 "$place/log")" >&2; exit 1; }
python -m benchmarks.show schedule name=zeropp ranks=2 chunks=2 microbatches=8 unit=4 --as torch \
    > "$place/zeropp.csv"

titan() { # rank 2 has the last stage, and with it the loss
    python -m torch.distributed.run --nproc-per-node 4 --local-ranks-filter 2 --tee 3 \
        --log-dir "$place" "$here/train.py" --module tiny --config llama3_tiny \
        --dump_folder "$place" --training.steps 4 --debug.seed 1 "$@" > "$place/log" 2>&1 ||
        { tail -n 40 "$place/log"; exit 1; }
    grep -o 'step: .*grad_norm: *[0-9.]*' "$place/log"
}
echo "ZeroPP's order:"
titan --parallelism.pipeline_parallel_schedule_csv "$place/zeropp.csv"
echo "torchtitan's Interleaved1F1B:"
titan

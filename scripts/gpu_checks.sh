#!/usr/bin/env bash
# What to run first on a machine with GPUs: whether the engine's streams share hardware queues, the
# correctness gate on all GPUs and on one, one rank of a 64-GPU job with its kernels, its compute times
# in the simulator, and what the engine costs.
#
#     CLUSTER=h200 ./scripts/gpu_checks.sh results/gpu_checks
#
# CLUSTER: the preset of these GPUs (default h100); MODEL: the 64-GPU job's (default gpt_6_2b).
# Ends with the tables of results/gpu_checks/report; every rank's trace (*.trace.json.gz, for
# ui.perfetto.dev) lies beside its record.
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=${CLUSTER:-h100} model=${MODEL:-gpt_6_2b} out=${1:-results/gpu_checks}
gpus=$(nvidia-smi --list-gpus | wc -l)

failed=0
echo "== whether any two of the engine's streams share a hardware queue" >&2
python scripts/stream_queues.py || failed=1
run() { # a point that fails stops nothing: what follows may tell why
    echo "== $*" >&2
    python -m benchmarks.run "$@" cluster="$cluster" data=synthetic \
        runs_dir="$out/runs" report_dir="$out/report" || failed=1
}

# Several microbatches per step, whose gradients are summed in fp32 (auto might choose one).
tiny=(-m model=gpt_tiny precision=fp32,bf16 microbatch_size=2)
run "${tiny[@]}" num_gpus=1 contender=zeropp contender.chunks=2
if [ "$gpus" -gt 1 ]; then
    many=("${tiny[@]}" num_gpus="$gpus" sequences_per_gpu=8)
    run "${many[@]}" contender=zeropp contender.pp=2 contender.chunks=2
    run "${many[@]}" contender=torch_pp,fsdp,deepspeed_3d,megatron_core_local
fi

job=(model="$model" num_gpus=64 global_batch=128 precision=bf16
    contender=zeropp contender.pp=8 contender.shard=8 contender.chunks=2 contender.compile=false
    measure.steps=3)
run "${job[@]}" launcher=trace launcher.tensors=real "launcher.pipeline_ranks=[0,1,-1]"
run "${job[@]}" launcher=trace
run "${job[@]}" launcher=simulate
run "${job[@]}" launcher=simulate launcher.compute=traced

python -m benchmarks.evidence.engine_overhead --out "$out/engine_overhead.json" || failed=1
python -m benchmarks.report "$out/runs" --out "$out/report"
cat "$out/report/tables.md"
exit "$failed"

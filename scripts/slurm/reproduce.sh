#!/usr/bin/env bash
# The whole comparison on a Slurm cluster: four model sizes, 8 to 64 GPUs, five contenders.
#   ACCOUNT=science PARTITION=h100 CLUSTER=h100 ./scripts/slurm/reproduce.sh
# Points that cannot be divided that way or cannot fit are recorded as infeasible and not queued.
# Run it again at any time: it submits only what is missing. Further arguments go to the suite
# (launcher.dry_run=true prints the scripts). Tables: results/reports/reproduce.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/environment.sh
make_environment ".[suite,megatron]"
exec .venv/bin/python -m benchmarks.run -m launcher=slurm "cluster=${CLUSTER:-h100}" \
    ${ACCOUNT:+"launcher.sbatch.account=$ACCOUNT"} \
    ${PARTITION:+"launcher.sbatch.partition=$PARTITION"} \
    model=gpt_1_5b,gpt_6_2b,gpt_14_6b,gpt_28_3b num_gpus=8,16,32,64 \
    contender=zeropp,deepspeed_3d,megatron_core,torch_pp,fsdp \
    global_batch=256 precision=bf16 report_dir=results/reports/reproduce "$@"

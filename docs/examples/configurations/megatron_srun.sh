#!/bin/bash
#SBATCH --nodes=8 --ntasks-per-node=8
# Megatron-LM under Slurm: a quoted string with a leading blank, handed to a shell on the nodes
options=" \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 \
    --num-layers-per-virtual-pipeline-stage 5 \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --global-batch-size 1024 --bf16 \
    --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
    --cross-entropy-loss-fusion --vocab-size 50000 --tokenizer-type NullTokenizer"
run_cmd="cd /workspace && python -u pretrain_gpt.py ${options}"
srun -l --container-image my_image sh -c "${run_cmd}"

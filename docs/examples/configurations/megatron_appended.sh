#!/bin/bash
# Megatron-LM: flags that are appended to a variable
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=${SLURM_NNODES:-4}
ARGS="--num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096"
ARGS+=" --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256"
ARGS+=" --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --bf16"
ARGS+=" --sequence-parallel --use-distributed-optimizer"
ARGS+=" --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"
if [ "${OVERLAP:-1}" = 1 ]; then
    ARGS+=" --overlap-grad-reduce --overlap-param-gather"
fi
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py $ARGS --data-path my_text_document

#!/bin/bash
# Megatron-LM: arrays, and a size that the caller chooses
case "${SIZE:-8b}" in
    8b) MODEL=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32) ;;
    70b) MODEL=(--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64) ;;
esac
MODEL+=(--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --seq-length 8192)
LAUNCH=(--nproc_per_node 8 --nnodes "${NNODES:-2}")
torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" --bf16 --micro-batch-size 1 \
    --global-batch-size 128 --context-parallel-size 2 --use-distributed-optimizer \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model my/tokenizer --fp8-format hybrid

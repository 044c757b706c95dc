#!/bin/bash
# Megatron-LM: a mixture of experts
python pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-experts 8 \
    --seq-length 4096 --micro-batch-size 1 --bf16

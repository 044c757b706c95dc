DISTRIBUTED="--nproc-per-node 8 --nnodes $NODES --node-rank $RANK"
torchrun $DISTRIBUTED pretrain_gpt.py --num-layers 40 --hidden-size 5120 --num-attention-heads 40 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --vocab-size 51199 --bf16

# Megatron-Bridge: a recipe
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

cfg = llama3_8b_pretrain_config()
cfg.train.global_batch_size = 512

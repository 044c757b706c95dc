"""Files that tests of ``explain`` share: torchtitan's, Hugging Face's and DeepSpeed's."""

from __future__ import annotations

TOML = """
# a preset for 16 H100 GPUs
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
SHAPE_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
DEEPSPEED = """{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "made_up": 1}"""


def sizes(model: dict[str, object]) -> dict[str, object]:
    """The sizes of ``SHAPE_8B`` in a reading's model."""
    return {key: model[key] for key in SHAPE_8B}

"""Megatron-Core takes the stages that ``explain --as megatron`` writes."""

from __future__ import annotations

import shlex

import pytest

from benchmarks.explain import megatron
from benchmarks.explain.question import ask


def test_megatron_core_takes_the_layout() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig

    words = "--num-layers 40 --hidden-size 6144 --num-attention-heads 48 --seq-length 2048"
    words += " --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 8 --bf16"
    words += " --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 12"
    asked = ask([], ["cluster=a100", "num_gpus=64", "model.vocab=51200"], words.split())
    written = shlex.split(megatron.written(asked.contender.size(asked.task, asked.knobs, 1)))
    layout = written[written.index("--pipeline-model-parallel-layout") + 1]
    config = TransformerConfig(
        num_layers=40,
        hidden_size=6144,
        num_attention_heads=48,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype="bf16",
    )
    assert config.virtual_pipeline_model_parallel_size == 12

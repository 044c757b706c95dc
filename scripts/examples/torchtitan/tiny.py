"""A configuration of torchtitan 0.3 that needs no files: its Llama of six layers, on tokens that
are made up. Your own is any function of a ``config_registry`` (``--module``, ``--config``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss
from torchtitan.trainer import Trainer


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan builds a tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Not called: the data are tokens already."""
        raise NotImplementedError

    decode = get_vocab_size = encode  # type: ignore[assignment]


class CountingTokens(BaseDataLoader):
    """Sequences that count up from a random token, so that a model learns them within few steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab: int = 2048

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._vocab, self._size = config.vocab, (local_batch_size, 1)
        self._counted = torch.arange(seq_len + 1)
        self._generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = torch.randint(self._vocab, self._size, generator=self._generator)
            tokens = (first + self._counted) % self._vocab
            positions = self._counted[:-1].expand(self._size[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no state."""


def llama3_tiny() -> Trainer.Config:
    """torchtitan's debug model on two pipeline ranks with two stages each, eight microbatches."""
    config = llama3_debugmodel_ce_loss()
    for layer in config.model_spec.model.layers:  # torch's own attention, which a CPU has, too
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = CountingTokens.Config()
    config.training.seq_len, config.training.local_batch_size = 128, 8
    config.training.disable_cuda_graphs = True  # which torchtitan wants of pipelines
    config.training.mixed_precision_param = "float32"
    config.parallelism.pipeline_parallel_degree = 2
    config.activation_checkpoint = None  # torch cannot split a recomputed backward
    config.metrics.disable_color_printing = True
    config.validator.enable = config.checkpoint.enable = False
    return config

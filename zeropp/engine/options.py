"""What an engine is made of: its pieces of the model, and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

import torch
from torch import nn

from zeropp.engine.chunk import ChunkOptions
from zeropp.engine.flat import Name
from zeropp.engine.values import TensorShape
from zeropp.literals import LossReduction, Precision, Recompute, WireType


@dataclass(frozen=True)
class Piece:
    """One piece of the model on this rank. A ``deferrable`` piece (a transformer block) may delay
    the weight gradients of its linear layers, and may be recomputed. A ``half`` is only the
    attention or the MLP of a block, and is never recomputed."""

    index: int
    stage: int
    module: nn.Module
    _: KW_ONLY
    deferrable: bool
    half: bool = False


GroupOf = Callable[[Name, nn.Parameter], str]  # the optimizer group of a parameter, by its name
# From a stage to the shapes of the tensors that one microbatch sends into it.
Boundary = Callable[[int], Sequence[TensorShape]]
# From flat tensors, by the name of their optimizer group, to an optimizer of them.
MakeOptimizer = Callable[[Mapping[str, list[nn.Parameter]]], torch.optim.Optimizer]


def one_group(name: Name, parameter: nn.Parameter) -> str:
    """The optimizer group of every parameter, if there is only one group."""
    del name, parameter
    return "all"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """An engine's settings, besides its part of a plan.

    ``fp32_modules``: kinds of modules that compute in fp32 where the precision is bf16;
    ``reduce_dtype``: the type in which gradients are sent; ``tied`` names two parameters as
    (piece, name) that are one in the model, in ``tied_stages``; ``lr_schedule`` gives the factor on
    the learning rate from the number of steps done; ``dropout_seed``: what the model draws is a
    function of it, of the step and of the microbatch, so that every topology draws the same;
    ``random``: the model may draw random numbers, and recomputation draws the same ones again
    (False saves the time that this takes); ``compile``: each block runs through torch.compile;
    ``group_of``: the optimizer group of a parameter, by its (piece, name); ``groups``: all groups
    of the model; ``timeout``: how long a collective or a message waits for its peers (None: as long
    as those of the default group, as ``init_process_group`` was told);
    ``loss_reduction``: whether a batch's loss is the mean over its rows, or the sum, as the loss
    function gives it for a microbatch.
    """

    precision: Precision = "fp32"
    fp32_modules: tuple[type[nn.Module], ...] = ()
    recompute: Recompute = "none"
    reduce_dtype: WireType = "fp32"
    tied: tuple[Name, Name] | None = None
    tied_stages: tuple[int, ...] = ()
    lr_schedule: Callable[[int], float] | None = None
    dropout_seed: int | None = None
    random: bool = True
    compile: bool = False
    group_of: GroupOf = one_group
    groups: tuple[str, ...] = ("all",)
    loss_reduction: LossReduction = "mean"
    timeout: timedelta | None = None
    recomputed: tuple[int, ...] = ()  # blocks of each stage, its first ones; empty: all of them

    def of_chunk(self, stage: int, seed: Callable[[int, int], None] | None) -> ChunkOptions:
        """The options of one stage's chunk; ``seed`` as in ``ChunkOptions``."""
        return ChunkOptions(
            recompute=self.recompute,
            recomputed=self.recomputed[stage] if self.recomputed else None,
            compiled=self.compile,
            seed=seed,
            random=self.random,
            compute=torch.bfloat16 if self.precision == "bf16" else None,
        )

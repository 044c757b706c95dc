"""Every private name of torch with which a rank is traced without peers, or watched in what its
operators and collectives do.

A release of torch may move or change the names in this file; for each one
``tests/gloo/test_private_names.py`` says what no longer works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipelining_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.library import _scoped_library as operators_inside
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

__all__ = ["FakeTensorMode", "operators_inside", "without_modes"]

COALESCING = "_coalescing_manager"  # of torch.distributed: one kernel of several collectives
NUMBER_OF = torch.ops.aten._local_scalar_dense.default  # reads a tensor's one number
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default  # arguments: output, input
FSDP_COPY_IN = torch.ops.fsdp.all_gather_copy_in.default  # argument 1: the gathered buffer
FSDP_REDUCED_COPY = torch.ops.fsdp.chunk_cat.default  # out: the copy that a reduction reads

AUTOCAST = torch.amp.autocast_mode.autocast  # the class
BATCHES = dataloader._BaseDataLoaderIter  # what fetches batches
NUMBER_OF_STEPS = optimizer._get_value  # by which modules of torch.optim read a step's number

# Of how many numbers at most a fake tensor keeps the values that the host has given it.
MOST_KNOWN_NUMBERS = (fake_tensor, "CONSTANT_NUMEL_LIMIT")

# Whether ``get_total_norm`` takes the norms of some tensors in one kernel.
MANY_IN_ONE_KERNEL = (clip_grad, "_has_foreach_support")

# Methods, as (class, name): what ``Module.to`` calls; DTensor's trial of an operator's output
# shapes; FSDP2's allocation of gathered parameters, and of the gradients that it accumulates before
# their reduction.
CONVERSION = (torch.nn.Module, "_apply")
SHAPES_BY_TRIAL = (ShardingPropagator, "_propagate_tensor_meta_non_cached")
FSDP_GATHERED = (FSDPParam, "init_all_gather_outputs")
FSDP_GRADIENTS = (
    (FSDPParam, "to_accumulated_grad_if_needed"),
    (FSDPParam, "accumulate_unsharded_grad_if_needed"),
)


# Whether a stage of a pipeline has yet to find its shapes, and what it does before its first
# microbatch: since torch 2.13, before which stages find them without the answers of later stages.
_mode: Any = getattr(pipelining_utils, "InferenceMode", None)
SHAPES_ARE_UNKNOWN = (_mode, "needs_dynamic")
BEFORE_STAGES = (PipelineStage, "_prepare_forward_infra")


def shapes_of(stage: Any, *arguments: Any, **keywords: Any) -> Any:
    """Find the shapes of a stage, as if its script had given them: what arrives is known, from its
    caller or as a peer's object, and a forward finds what leaves. Returns what the next stage is
    given, if that is on the same rank."""
    if _mode is None or stage._user_meta.is_complete_for_forward():
        return None
    passed = stage._forward_metadata_inference(*arguments, **keywords)
    stage._user_meta.inputs = stage._stage_meta.inputs
    stage._user_meta.outputs = stage._stage_meta.outputs
    return passed


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward that is under way."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_composite(operator: Any) -> bool:
    """Whether an operator is made of others, for which autograd has gradients."""
    return bool(operator._can_decompose())


def autograd_run() -> int:
    """The number of the run of autograd that is under way; -1 outside of any."""
    return torch._C._current_graph_task_id()


def group_of(argument: object) -> tuple[str, tuple[int, ...]] | None:
    """The name of a process group and its ranks, if that is what an operator of c10d was given, or
    a functional one as the name of its group."""
    if isinstance(argument, str):
        known: Any = distributed_c10d  # which does not say that it exports this
        group = known._resolve_process_group(argument)
    elif isinstance(argument, torch.ScriptObject):
        try:
            group = dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # how to reduce, for example
            return None
    else:
        return None
    return f"{group.group_desc} {group.group_name}", tuple(dist.get_process_group_ranks(group))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return fake_tensor.is_fake(tensor)


def with_values(objects: Any) -> Any:
    """Nested lists, tuples and dictionaries in which fake tensors are zeros."""

    def zeros(fake: Tensor) -> Tensor:
        return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)

    with without_modes():
        return tree_map_only(fake_tensor.FakeTensor, zeros, objects)


def set_numbers(fake: Tensor, numbers: Tensor) -> None:
    """Let a fake tensor have known values, which what is computed from them alone has, too."""
    fake.constant = numbers  # type: ignore[attr-defined]


def is_known(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one whose values are known."""
    return getattr(tensor, "constant", None) is not None


def gathered_of(parameter: Any) -> list[Tensor]:
    """What FSDP2 has gathered of a parameter."""
    gathered: list[Tensor] = parameter.all_gather_outputs
    return gathered


def gradients_of(parameter: Any) -> list[Tensor]:
    """The gradients that FSDP2 has of a parameter: autograd's, and the sum that it accumulates."""
    gathered = getattr(parameter, "_unsharded_param", None)
    autograds = None if gathered is None else gathered.grad
    found = (autograds, parameter.unsharded_accumulated_grad)
    return [gradient for gradient in found if gradient is not None]

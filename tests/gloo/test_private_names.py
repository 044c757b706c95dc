"""Private names of torch, DeepSpeed and Megatron-Core: each is still there, and takes what it is
given.

``scripts/torch_versions.sh`` runs these tests with every supported version of torch and of
Megatron-Core. A name that is gone fails with what no longer works without it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from zeropp.emulate.device import COLLECTIVES

ROOT = Path(__file__).resolve().parents[2]
_TRACE = "launcher=trace (memory of a rank without peers)"
_FSDP = "the fsdp and torch_pp contenders"
_PP = "the torch_pp contender"
_DS = "the deepspeed_3d contender"
_MC = "the megatron_core contender"


_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_PROPAGATOR = "torch.distributed.tensor._sharding_prop:ShardingPropagator"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGE = "torch.distributed.pipelining.stage"
_PIPE = "deepspeed.runtime.pipe"
_CORE, _LAYERS = "megatron.core", "megatron.core.transformer"
_INSTRUCTIONS = (
    *("ForwardPass", "BackwardPass", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
    *("ReduceGrads", "OptimizerStep"),
)
# What no longer works without them -> private names, as ``module:name.of.attribute``, or
# ``module:Class#attribute`` for what instances have; in brackets the parameters that are passed by
# name or overridden.
CONTRACTS = {
    "clipping by torch in a hook is refused": ["torch.nn.utils.clip_grad:_get_total_norm"],
    "hooks of all optimizers may not take norms of shards": [
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        "torch.optim.optimizer:_global_optimizer_post_hooks",
    ],
    "checkpoints before the first update": [
        "torch.optim:Optimizer#_optimizer_step_pre_hooks",
        "torch.optim:Optimizer#_optimizer_step_post_hooks",
    ],
    f"{_TRACE}: tensors without memory": ["torch._subclasses.fake_tensor:FakeTensorMode"],
    f"{_TRACE}: FSDP2's gathered parameters": [
        f"{_PARAM}.init_all_gather_outputs",
        f"{_PARAM}#all_gather_outputs",
    ],
    f"{_TRACE}: FSDP2's gradients": [
        f"{_PARAM}.to_accumulated_grad_if_needed",
        f"{_PARAM}.accumulate_unsharded_grad_if_needed",
        f"{_PARAM}#unsharded_accumulated_grad",
        f"{_PARAM}#_unsharded_param",
    ],
    f"{_TRACE}: DTensor's trials would count as allocations": [
        f"{_PROPAGATOR}._propagate_tensor_meta_non_cached"
    ],
    f"{_TRACE}: seeing allocations": ["torch.utils._python_dispatch:TorchDispatchMode"],
    f"{_TRACE}: device meshes": ["torch.utils._python_dispatch:_disable_current_modes"],
    f"{_TRACE}: numbers of fake tensors": ["torch:ops.aten._local_scalar_dense.default"],
    f"{_TRACE}: numbers stages send": [
        "torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT",
        "torch._subclasses.fake_tensor:FakeTensor.__new__(constant)",
    ],
    f"{_TRACE}: Megatron-Core's collectives": [
        "torch.distributed.distributed_c10d:_coalescing_manager(async_ops)",
    ],
    f"{_TRACE}: reduced gradients": ["torch:ops.c10d._reduce_scatter_base_.default"],
    f"{_TRACE}: FSDP2's gathers": ["torch:ops.fsdp.all_gather_copy_in.default"],
    f"{_TRACE}: FSDP2's reductions": ["torch:ops.fsdp.chunk_cat.default"],
    "the engine: parameters that are made of others": [
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    ],
    "the engine: offload of what selective recomputation keeps": [
        "torch.utils.checkpoint:_CachingTorchDispatchMode#storage",
        "torch.utils.checkpoint:_VersionWrapper#val",
        "torch.utils.checkpoint:_VersionWrapper#version",
        "torch.utils._pytree:tree_leaves",
    ],
    "the engine: names of actions in profiles": ["torch._C._autograd:_profiler_enabled"],
    "the engine: groups' timeouts": ["torch.distributed:ProcessGroup._get_backend"],
    "the engine: the host waits for the device before fused updates": [
        "torch.optim.adam:Adam#_step_supports_amp_scaling",
    ],
    f"{_TRACE}: activations from workspace": ["torch._C:_current_graph_task_id"],
    "zeropp.emulate: collectives": [
        *(f"torch:ops.{name.replace('::', '.')}" for name in COLLECTIVES),
    ],
    "zeropp.emulate: messages": ["torch:ops.c10d.send.default", "torch:ops.c10d.recv_.default"],
    "zeropp.emulate: whose collective it is": ["torch.distributed:ProcessGroup.unbox"],
    "zeropp.emulate: whose functional collective it is": [
        "torch.distributed.distributed_c10d:_resolve_process_group",
    ],
    "zeropp.emulate: who waits for one": ["torch:ops._c10d_functional.wait_tensor.default"],
    "zeropp.emulate: batches of messages": [
        "torch.distributed.distributed_c10d:isend",
        "torch.distributed.distributed_c10d:irecv",
    ],
    "replay: data costs no time": ["torch.utils.data.dataloader:_BaseDataLoaderIter.__next__"],
    "replay: numbers of steps of optimizers": ["torch.optim.adam:_get_value"],
    "replay: number types of autocast": [
        "torch.amp.autocast_mode:autocast.__init__(device_type, dtype)",
    ],
    "replay: DDP waits at the end of a backward": [
        "torch.autograd:Variable._execution_engine.queue_callback",
    ],
    "replay: what DDP leaves alone": [
        "torch.nn.parallel:DistributedDataParallel#_ddp_params_and_buffers_to_ignore",
    ],
    "replay: tensors in objects that ranks send each other": ["torch.utils._pytree:tree_map_only"],
    "replay: stages of a pipeline without shapes": [
        "torch.distributed.pipelining.stage:PipelineStage._prepare_forward_infra",
        "torch.distributed.pipelining._utils:flatten_args",
    ],
    "replay: products in inference_mode": ["torch._ops:OpOverload._can_decompose"],
    "replay: modules that a script moves to its device": ["torch.nn:Module._apply"],
    "replay: norms of gradients in one kernel": ["torch.nn.utils.clip_grad:_has_foreach_support"],
    "zeropp.emulate: streams of FSDP2 on a CPU": ["torch.cpu:Stream"],
    f"{_FSDP}, traced: meshes": ["torch._subclasses.fake_tensor:unset_fake_temporarily"],
    f"{_FSDP}: counting gathers": [f"{_COLLECTIVES}:DefaultAllGather.__call__"],
    f"{_FSDP}: counting reductions": [f"{_COLLECTIVES}:DefaultReduceScatter.__call__"],
    f"{_FSDP}: clipping in one kernel": ["torch:_foreach_mul_"],
    f"{_PP}: schedule=1f1b": [
        f"{_SCHEDULES}:_Action.from_str",
        f"{_SCHEDULES}:_PipelineScheduleRuntime",
        f"{_SCHEDULES}:_PipelineScheduleRuntime._prepare_schedule_with_comms",
        f"{_SCHEDULES}:_PipelineScheduleRuntime#_num_stages",
        f"{_SCHEDULES}:_PipelineScheduleRuntime#pipeline_order",
    ],
    "results/reference/schedules.csv: torch's orders": [
        f"{_SCHEDULES}:_PipelineScheduleRuntime#pipeline_order_with_comms",
    ],
    "torch's runtime as the engine's oracle": [f"{_SCHEDULES}:_PipelineScheduleRuntime._load_csv"],
    "results/reference/schedules.csv: orders without ranks": [f"{_STAGE}:_PipelineStageBase"],
    f"{_PP}: spans and counts": [
        f"{_STAGE}:PipelineStage.forward_one_chunk(fwd_chunk_id)",
        f"{_STAGE}:PipelineStage.backward_one_chunk"
        "(bwd_chunk_id, loss, full_backward, last_backward)",
        f"{_STAGE}:PipelineStage.backward_weight_one_chunk(bwd_chunk_id)",
        f"{_STAGE}:PipelineStage.perform_reduce_grad(grad_scale_factor)",
    ],
    f"{_PP}: stages on a V over gloo": [f"{_STAGE}:PipelineStage._get_init_p2p_neighbors_ops"],
    f"{_DS}: spans and counts": [f"{_PIPE}.engine:PipelineEngine._INSTRUCTION_MAP"],
    f"{_DS}, traced: shapes of messages": [f"{_PIPE}.engine:PipelineEngine.DTYPE_TO_ID"],
    f"{_DS}, traced: messages": [
        f"{_PIPE}.engine:PipelineEngine._send_tensor_meta",
        "deepspeed.runtime.utils:PartitionedTensor.to_meta",
        "deepspeed.runtime.utils:PartitionedTensor#orig_size",
    ],
    f"{_DS}, traced: messages under TP": ["deepspeed.runtime.utils:partition_uniform"],
    f"{_DS}, traced: streams": ["deepspeed.accelerator.real_accelerator:ds_accelerator"],
    f"{_DS}: cuts": [f"{_PIPE}.module:PipelineModule._partition_layers(method)"],
    f"{_DS}: where stages are cut": [
        f"{_PIPE}.module:PipelineModule._set_bounds(start)",
        f"{_PIPE}.module:PipelineModule#_topo",
    ],
    f"{_DS}: tied parameters": [f"{_PIPE}.module:PipelineModule#ds_pipe_replicated"],
    f"{_DS}'s ZeRO-3: layers that save no gathered parameters": [
        "deepspeed.runtime.zero.linear:zero3_linear_wrap"
    ],
    f"{_DS}'s ZeRO-3: a second copy of the parameters": [
        "deepspeed.utils.groups:_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "deepspeed.utils.groups:_create_zero_param_parallel_group",
        "deepspeed.utils.groups:_get_zero_param_intra_parallel_group",
    ],
    f"{_DS}'s ZeRO-3, traced: orders of modules": [
        "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks"
    ],
    f"{_DS}'s ZeRO-3: the gradient's norm": [
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3#fp16_partitioned_groups",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3#averaged_gradients",
    ],
    f"{_DS}: no compilation on the first step": ["deepspeed:ops.__compatible_ops__"],
    f"{_DS}: the gradient's norm under ZeRO-1": [
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer#averaged_gradients",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer#params_in_partition",
    ],
    f"{_DS}: the gradient's norm in bf16": [
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer#fp32_groups_gradients",
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer#bf16_groups",
    ],
    f"{_MC}: spans and counts": [
        f"{_CORE}.pipeline_parallel.schedules:forward_step(current_microbatch, vp_stage)",
        f"{_CORE}.pipeline_parallel.schedules:backward_step(output_tensor)",
    ],
    f"{_MC}: the optimizer of all contenders": [
        f"{_CORE}.optimizer.optimizer:ChainedOptimizer#chained_optimizers",
    ],
    f"{_MC}: fp32 values of sharded 16-bit parameters": [
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map(param)",
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer#main_param",
    ],
    f"{_MC}: weights that are read between steps": [
        f"{_CORE}.distributed:DistributedDataParallel.start_param_sync(force_sync)",
    ],
    f"{_MC}: every step": [f"{_CORE}.distributed:DistributedDataParallel.zero_grad_buffer"],
    f"{_MC}: whether weight gradients are added inside their product": [
        f"{_CORE}.tensor_parallel.layers:_grad_accum_fusion_available",
    ],
    f"{_MC} on CPUs: random states": [
        f"{_CORE}.tensor_parallel.random:_get_cuda_rng_state",
        f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state",
    ],
    f"{_MC}: the norm of gradients by torch, without Apex": [
        f"{_CORE}.optimizer.clip_grads:l2_norm_impl",
    ],
    f"{_MC} on CPUs: fused functions that are not compiled": [f"{_CORE}.jit:jit_fuser"],
    f"{_MC}: its own layers": [
        f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec(normalization)",
        f"{_LAYERS}.transformer_block:TransformerBlockSubmodules(layer_specs, layer_norm)",
    ],
    f"{_MC}: uneven stages, and the planner's groups of microbatches": [
        f"{_LAYERS}:TransformerConfig(pipeline_model_parallel_layout, "
        "microbatch_group_size_per_vp_stage)",
    ],
    f"{_MC}: which layer holds which weights": [
        f"{_CORE}.transformer.transformer_layer:TransformerLayer#layer_number",
    ],
    f"{_DS}: its plan and its spans": [*(f"{_PIPE}.schedule:{name}" for name in _INSTRUCTIONS)],
}
NAMES = [(name, breaks) for breaks, names in CONTRACTS.items() for name in names]


def found(name: str) -> Any:
    """What a contract's name stands for; raises where it stands for nothing."""
    module, _, path = name.partition(":")
    path, _, attribute = path.partition("#")
    owner = reduce(getattr, path.split("."), importlib.import_module(module))
    if attribute:
        sources = "".join(inspect.getsource(c) for c in owner.__mro__ if c is not object)
        if attribute not in sources:
            raise AttributeError(attribute)
    return owner


@pytest.mark.parametrize(("contract", "breaks"), NAMES, ids=[name for name, _ in NAMES])
def test_a_private_name_is_there(contract: str, breaks: str) -> None:
    name, _, parameters = contract.rstrip(")").partition("(")
    library = name.partition(".")[0].partition(":")[0]
    if library != "torch":
        pytest.importorskip(library)
    if library == "megatron":  # it says at length that Transformer Engine is missing
        importlib.import_module("baselines.megatron_core.private_names")
    try:
        value = found(name)
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(f"{name} is gone ({error}); without it breaks: {breaks}")
    missing = (
        {*parameters.split(", ")} - {*inspect.signature(value).parameters} if parameters else 0
    )
    assert not missing, f"{name} takes no {missing}; breaks: {breaks}"


def test_a_name_that_is_gone_says_what_breaks() -> None:
    for name in ("torch._no_such:name", "torch:_no_such", f"{_PARAM}#_no_such_attribute"):
        with pytest.raises((ImportError, AttributeError)):
            found(name)


FILES = ["zeropp/engine", "baselines", "baselines/torch_pp", "baselines/deepspeed_3d"]


@pytest.mark.parametrize("folder", FILES)
def test_what_is_imported_privately_has_a_contract(folder: str) -> None:
    names = {name.replace(":", ".").replace("#", ".") for name, _ in NAMES}
    tree = ast.parse((ROOT / folder / "private_names.py").read_text())
    imported = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "._" in f"{node.module}.{alias_names(node)}"
        for alias in node.names
    ]
    assert imported or folder == "baselines/deepspeed_3d"
    assert [name for name in imported if not any(known.startswith(name) for known in names)] == []


def alias_names(node: ast.ImportFrom) -> str:
    """What an import names, joined so that a leading underscore follows a dot."""
    return ".".join(alias.name for alias in node.names)

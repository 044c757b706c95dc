"""Private names of torch, DeepSpeed and Megatron-Core: each is still there, and takes what it is
given.

``scripts/torch_versions.sh`` runs these tests with every supported version of torch and of
Megatron-Core. A name that is gone fails with what no longer works without it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Contract:
    """A name as ``module:name.of.attribute``, or ``module:Class#attribute`` for what instances
    have. ``takes``: parameters that are passed by name or overridden."""

    name: str
    breaks: str
    takes: tuple[str, ...] = ()


_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGE = "torch.distributed.pipelining.stage"
_PIPE = "deepspeed.runtime.pipe"
_CORE = "megatron.core"
_INSTRUCTIONS = (
    "ForwardPass",
    "BackwardPass",
    "SendActivation",
    "RecvActivation",
    "SendGrad",
    "RecvGrad",
    "ReduceGrads",
    "OptimizerStep",
)
CONTRACTS = [
    Contract(
        "torch.optim:Optimizer#_optimizer_step_pre_hooks", "checkpoints before the first update"
    ),
    Contract(
        "torch.optim:Optimizer#_optimizer_step_post_hooks", "checkpoints before the first update"
    ),
    Contract("torch._subclasses.fake_tensor:FakeTensorMode", f"{_TRACE}: tensors without memory"),
    Contract(f"{_PARAM}.init_all_gather_outputs", f"{_TRACE}: FSDP2's gathered parameters"),
    Contract(f"{_PARAM}#all_gather_outputs", f"{_TRACE}: FSDP2's gathered parameters"),
    Contract(f"{_PARAM}.to_accumulated_grad_if_needed", f"{_TRACE}: FSDP2's gradients"),
    Contract(f"{_PARAM}.accumulate_unsharded_grad_if_needed", f"{_TRACE}: FSDP2's gradients"),
    Contract(f"{_PARAM}#unsharded_accumulated_grad", f"{_TRACE}: FSDP2's gradients"),
    Contract(f"{_PARAM}#_unsharded_param", f"{_TRACE}: FSDP2's gradients"),
    Contract(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator"
        "._propagate_tensor_meta_non_cached",
        f"{_TRACE}: DTensor's trials would count as allocations",
    ),
    Contract("torch.utils._python_dispatch:TorchDispatchMode", f"{_TRACE}: seeing allocations"),
    Contract("torch.utils._python_dispatch:_disable_current_modes", f"{_TRACE}: device meshes"),
    Contract("torch:ops.aten._local_scalar_dense.default", f"{_TRACE}: numbers of fake tensors"),
    Contract(
        "torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT", f"{_TRACE}: numbers stages send"
    ),
    Contract(
        "torch._subclasses.fake_tensor:FakeTensor.__new__",
        f"{_TRACE}: numbers stages send",
        ("constant",),
    ),
    Contract(
        "torch.distributed.distributed_c10d:_coalescing_manager",
        f"{_TRACE}: Megatron-Core's collectives",
        ("async_ops",),
    ),
    Contract("torch:ops.c10d._reduce_scatter_base_.default", f"{_TRACE}: reduced gradients"),
    Contract("torch:ops.fsdp.all_gather_copy_in.default", f"{_TRACE}: FSDP2's gathers"),
    Contract("torch:ops.fsdp.chunk_cat.default", f"{_TRACE}: FSDP2's reductions"),
    Contract("torch.distributed:ProcessGroup._get_backend", "the engine: groups' timeouts"),
    Contract(
        "torch.optim.adam:Adam#_step_supports_amp_scaling",
        "the engine: the host waits for the device before fused updates",
    ),
    Contract("torch._C:_current_graph_task_id", f"{_TRACE}: activations from workspace"),
    *(
        Contract(f"torch:ops.{name.replace('::', '.')}", "zeropp.emulate: collectives")
        for name in COLLECTIVES
    ),
    Contract("torch:ops.c10d.send.default", "zeropp.emulate: messages"),
    Contract("torch:ops.c10d.recv_.default", "zeropp.emulate: messages"),
    Contract("torch.distributed:ProcessGroup.unbox", "zeropp.emulate: whose collective it is"),
    Contract(
        "torch.distributed.distributed_c10d:_resolve_process_group",
        "zeropp.emulate: whose functional collective it is",
    ),
    Contract("torch:ops._c10d_functional.wait_tensor.default", "zeropp.emulate: who waits for one"),
    Contract("torch.distributed.distributed_c10d:isend", "zeropp.emulate: batches of messages"),
    Contract("torch.distributed.distributed_c10d:irecv", "zeropp.emulate: batches of messages"),
    Contract(
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__", "replay: data costs no time"
    ),
    Contract("torch.optim.adam:_get_value", "replay: numbers of steps of optimizers"),
    Contract(
        "torch.amp.autocast_mode:autocast.__init__",
        "replay: number types of autocast",
        ("device_type", "dtype"),
    ),
    Contract(
        "torch.autograd:Variable._execution_engine.queue_callback",
        "replay: DDP waits at the end of a backward",
    ),
    Contract(
        "torch.nn.parallel:DistributedDataParallel#_ddp_params_and_buffers_to_ignore",
        "replay: what DDP leaves alone",
    ),
    Contract("torch._ops:OpOverload._can_decompose", "replay: products in inference_mode"),
    Contract("torch.nn:Module._apply", "replay: modules that a script moves to its device"),
    Contract(
        "torch.nn.utils.clip_grad:_has_foreach_support", "replay: norms of gradients in one kernel"
    ),
    Contract("torch.cpu:Stream", "zeropp.emulate: streams of FSDP2 on a CPU"),
    Contract("torch._subclasses.fake_tensor:unset_fake_temporarily", f"{_FSDP}, traced: meshes"),
    Contract(f"{_COLLECTIVES}:DefaultAllGather.__call__", f"{_FSDP}: counting gathers"),
    Contract(f"{_COLLECTIVES}:DefaultReduceScatter.__call__", f"{_FSDP}: counting reductions"),
    Contract("torch:_foreach_mul_", f"{_FSDP}: clipping in one kernel"),
    Contract(
        "torch.distributed.pipelining._backward:stage_backward_input",
        "benchmarks.evidence.engine_overhead: torch's own split backward",
    ),
    Contract(
        "torch.distributed.pipelining._backward:stage_backward_weight",
        "benchmarks.evidence.engine_overhead: torch's own split backward",
    ),
    Contract(f"{_SCHEDULES}:_Action.from_str", f"{_PP}: schedule=1f1b"),
    Contract(f"{_SCHEDULES}:_PipelineScheduleRuntime", f"{_PP}: schedule=1f1b"),
    Contract(
        f"{_SCHEDULES}:_PipelineScheduleRuntime._prepare_schedule_with_comms",
        f"{_PP}: schedule=1f1b",
    ),
    Contract(f"{_SCHEDULES}:_PipelineScheduleRuntime#_num_stages", f"{_PP}: schedule=1f1b"),
    Contract(f"{_SCHEDULES}:_PipelineScheduleRuntime#pipeline_order", f"{_PP}: schedule=1f1b"),
    Contract(
        f"{_SCHEDULES}:_PipelineScheduleRuntime#pipeline_order_with_comms",
        "benchmarks.evidence.schedules: torch's orders",
    ),
    Contract(
        f"{_SCHEDULES}:_PipelineScheduleRuntime._load_csv", "torch's runtime as the engine's oracle"
    ),
    Contract(f"{_STAGE}:_PipelineStageBase", "benchmarks.evidence.schedules: orders without ranks"),
    Contract(
        f"{_STAGE}:PipelineStage.forward_one_chunk", f"{_PP}: spans and counts", ("fwd_chunk_id",)
    ),
    Contract(
        f"{_STAGE}:PipelineStage.backward_one_chunk",
        f"{_PP}: spans and counts",
        ("bwd_chunk_id", "loss", "full_backward", "last_backward"),
    ),
    Contract(
        f"{_STAGE}:PipelineStage.backward_weight_one_chunk",
        f"{_PP}: spans and counts",
        ("bwd_chunk_id",),
    ),
    Contract(
        f"{_STAGE}:PipelineStage.perform_reduce_grad",
        f"{_PP}: spans and counts",
        ("grad_scale_factor",),
    ),
    Contract(
        f"{_STAGE}:PipelineStage._get_init_p2p_neighbors_ops", f"{_PP}: stages on a V over gloo"
    ),
    Contract(f"{_PIPE}.engine:PipelineEngine._INSTRUCTION_MAP", f"{_DS}: spans and counts"),
    Contract(f"{_PIPE}.engine:PipelineEngine.DTYPE_TO_ID", f"{_DS}, traced: shapes of messages"),
    Contract(f"{_PIPE}.engine:PipelineEngine._send_tensor_meta", f"{_DS}, traced: messages"),
    Contract("deepspeed.runtime.utils:partition_uniform", f"{_DS}, traced: messages under TP"),
    Contract("deepspeed.runtime.utils:PartitionedTensor.to_meta", f"{_DS}, traced: messages"),
    Contract("deepspeed.runtime.utils:PartitionedTensor#orig_size", f"{_DS}, traced: messages"),
    Contract("deepspeed.accelerator.real_accelerator:ds_accelerator", f"{_DS}, traced: streams"),
    Contract(f"{_PIPE}.module:PipelineModule._partition_layers", f"{_DS}: cuts", ("method",)),
    Contract(
        f"{_PIPE}.module:PipelineModule._set_bounds", f"{_DS}: where stages are cut", ("start",)
    ),
    Contract(f"{_PIPE}.module:PipelineModule#_topo", f"{_DS}: where stages are cut"),
    Contract(f"{_PIPE}.module:PipelineModule#ds_pipe_replicated", f"{_DS}: tied parameters"),
    Contract("deepspeed:ops.__compatible_ops__", f"{_DS}: no compilation on the first step"),
    Contract(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer#averaged_gradients",
        f"{_DS}: the gradient's norm under ZeRO-1",
    ),
    Contract(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer#params_in_partition",
        f"{_DS}: the gradient's norm under ZeRO-1",
    ),
    Contract(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer#fp32_groups_gradients",
        f"{_DS}: the gradient's norm in bf16",
    ),
    Contract(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer#bf16_groups",
        f"{_DS}: the gradient's norm in bf16",
    ),
    Contract(
        f"{_CORE}.pipeline_parallel.schedules:forward_step",
        f"{_MC}: spans and counts",
        ("current_microbatch", "vp_stage"),
    ),
    Contract(
        f"{_CORE}.pipeline_parallel.schedules:backward_step",
        f"{_MC}: spans and counts",
        ("output_tensor",),
    ),
    Contract(
        f"{_CORE}.optimizer.optimizer:ChainedOptimizer#chained_optimizers",
        f"{_MC}: the optimizer of all contenders",
    ),
    Contract(
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map",
        f"{_MC}: fp32 values of sharded 16-bit parameters",
        ("param",),
    ),
    Contract(
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer#main_param",
        f"{_MC}: fp32 values of sharded 16-bit parameters",
    ),
    Contract(
        f"{_CORE}.distributed:DistributedDataParallel.start_param_sync",
        f"{_MC}: weights that are read between steps",
        ("force_sync",),
    ),
    Contract(f"{_CORE}.distributed:DistributedDataParallel.zero_grad_buffer", f"{_MC}: every step"),
    Contract(
        f"{_CORE}.tensor_parallel.layers:_grad_accum_fusion_available",
        f"{_MC}: whether weight gradients are added inside their product",
    ),
    Contract(
        f"{_CORE}.tensor_parallel.random:_get_cuda_rng_state", f"{_MC} on CPUs: random states"
    ),
    Contract(
        f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state", f"{_MC} on CPUs: random states"
    ),
    Contract(
        f"{_CORE}.optimizer.clip_grads:l2_norm_impl", f"{_MC}, traced: the norm of fake gradients"
    ),
    Contract(f"{_CORE}.jit:jit_fuser", f"{_MC} on CPUs: fused functions that are not compiled"),
    Contract(
        f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
        f"{_MC}: its own layers",
        ("normalization",),
    ),
    Contract(
        f"{_CORE}.transformer.transformer_block:TransformerBlockSubmodules",
        f"{_MC}: its own layers",
        ("layer_specs", "layer_norm"),
    ),
    Contract(
        f"{_CORE}.transformer:TransformerConfig",
        f"{_MC}: uneven stages, and the planner's groups of microbatches",
        ("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"),
    ),
    Contract(
        f"{_CORE}.transformer.transformer_layer:TransformerLayer#layer_number",
        f"{_MC}: which layer holds which weights",
    ),
    *(
        Contract(f"{_PIPE}.schedule:{name}", f"{_DS}: its plan and its spans")
        for name in _INSTRUCTIONS
    ),
]


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


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_private_name_is_there(contract: Contract) -> None:
    library = contract.name.partition(".")[0].partition(":")[0]
    if library != "torch":
        pytest.importorskip(library)
    if library == "megatron":  # it says at length that Transformer Engine is missing
        importlib.import_module("baselines.megatron_core.private_names")
    try:
        value = found(contract.name)
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(f"{contract.name} is gone ({error}); without it breaks: {contract.breaks}")
    taken = inspect.signature(value).parameters if contract.takes else ()
    missing = set(contract.takes) - set(taken)
    assert not missing, f"{contract.name} takes no {missing}; breaks: {contract.breaks}"


def test_a_name_that_is_gone_says_what_breaks() -> None:
    for name in ("torch._no_such:name", "torch:_no_such", f"{_PARAM}#_no_such_attribute"):
        with pytest.raises((ImportError, AttributeError)):
            found(name)


FILES = ["zeropp/engine", "baselines", "baselines/torch_pp", "baselines/deepspeed_3d"]


@pytest.mark.parametrize("folder", FILES)
def test_what_is_imported_privately_has_a_contract(folder: str) -> None:
    names = {contract.name.replace(":", ".").replace("#", ".") for contract in CONTRACTS}
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

"""The programs that run here, and a bound that combines the best part of every public program."""

from __future__ import annotations

from zeropp.programs.entry import Entry
from zeropp.programs.traits import Program, StateBytes

_TORCH = "torch 2.13"
_COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_TRACED = "read off traces (zeropp/engine/tracing.py), to which a test holds it"
_ENGINE = "zeropp/engine"
_FP32 = StateBytes(4, 4, 8)
_FP32_MASTERS = StateBytes(4, 4, 8, casts_parameters=True)

ZEROPP = Entry(
    Program(
        name="zeropp",
        bf16=_FP32_MASTERS,
        fp32=_FP32,
        zero3=True,
        fused_rotary=False,
        loss_gradient="torch",
        resident_gradients=False,
        keeps_gathered_inputs=True,
        flat_chunks=True,
        selective="elementwise",
        spread="cost",
    ),
    "this repository's engine",
    {
        "bf16": f"{_ENGINE}/flat.py: fp32 shards are the masters, gradients are summed and "
        "reduced in fp32",
        "fp32": f"{_ENGINE}/flat.py",
        "fused_accumulation": f"{_ENGINE}/deferred.py: add_wide_product",
        "zero3": f"{_ENGINE}/sharding.py",
        "shard_copies": f"{_ENGINE}/flat.py: collectives write and read what compute uses",
        "fused_rotary": "zeropp/model.py",
        "loss_gradient": f"{_TORCH}, nn.functional.cross_entropy; {_TRACED}",
        "resident_gradients": _TRACED,
        "keeps_gathered_inputs": "no tensor parallelism, so the trait changes nothing",
        "flat_chunks": f"{_ENGINE}/flat.py; {_TRACED}",
        "selective": f"{_ENGINE}/recompute.py",
        "spread": "zeropp/cost/cuts.py, cut_by_cost",
    },
)
FSDP = ZEROPP.but(
    "fsdp",
    "FSDP2 of torch 2.13, as baselines/fsdp runs it",
    {
        "bf16": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_param.py: fp32 shards, bf16 "
        "copies, reduction in fp32 (baselines/fsdp2.py)",
        "fp32": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_param.py",
        "fused_accumulation": f"{_TORCH}, distributed/fsdp: gradients are added in a kernel",
        "shard_copies": f"{_TORCH}, {_COLLECTIVES}: foreach_all_gather_copy_out, chunk_cat",
        "keeps_gathered_inputs": f"{_TORCH}, DTensor; {_TRACED}",
        "overlap_reduction": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        "fsdp_hooks": "baselines/fsdp/trainer.py: fully_shard on every block",
        "fsdp_root": "baselines/fsdp/trainer.py: fully_shard on the model",
    },
    overlap_reduction=True,
    fused_accumulation=False,
    shard_copies=True,
    flat_chunks=False,
    fsdp_hooks=True,
    fsdp_root=True,
)
TORCH_PP = FSDP.but(
    "torch_pp",
    "torch.distributed.pipelining, FSDP2 and DTensor of torch 2.13, as baselines/torch_pp runs it",
    {
        "fsdp_hooks": "baselines/torch_pp/trainer.py: fully_shard on every block",
        "torch_stages": f"{_TORCH}, distributed/pipelining/stage.py and _backward.py; {_TRACED}",
        "whole_embedding_gradient": f"{_TORCH}, embedding_dense_backward of DTensor; {_TRACED}",
    },
    fsdp_root=False,
    torch_stages=True,
    whole_embedding_gradient=True,
)

_DEEPSPEED = "DeepSpeed 0.19.8"
DEEPSPEED_3D = Entry(
    Program(
        name="deepspeed_3d",
        bf16=StateBytes(2, 4, 12, half_gradients=2, reduced=2, zero1_all_reduces=True),
        fp32=_FP32,
        split_boundary=True,
        blocking_transfers=True,
        fused_accumulation=False,
        fused_rotary=False,
        loss_gradient="in_place_under_tp",
        keeps_gathered_inputs=True,
        pipe_buffers=True,
        flattens_gradients=True,
        spread="cost",
    ),
    "DeepSpeed 0.19.8's PipelineEngine, as baselines/deepspeed_3d runs it",
    {
        # bf16 parameters, fp32 accumulated gradients, bf16 ones that are zeroed and not freed, and
        # fp32 masters. ZeRO-1 all-reduces gradients, cast to bf16.
        "bf16": f"{_DEEPSPEED}, runtime/bf16_optimizer.py; runtime/pipe/engine.py, "
        "_bf16_reduce_grads; runtime/engine.py, communication_data_type",
        "fp32": f"{_DEEPSPEED}, runtime/zero/stage_1_and_2.py",
        "split_boundary": f"{_DEEPSPEED}, runtime/pipe/engine.py, pipe_partitioned",
        "blocking_transfers": f"{_DEEPSPEED}, runtime/pipe/p2p.py: in line with compute",
        "fused_accumulation": f"{_DEEPSPEED}, runtime/bf16_optimizer.py: a kernel adds",
        "fused_rotary": "zeropp/model.py",
        "loss_gradient": "baselines/deepspeed_3d/tensor_parallel.py; without TP torch's own",
        "keeps_gathered_inputs": "baselines/deepspeed_3d: no sequence parallelism, so the trait "
        "changes nothing",
        "pipe_buffers": f"{_DEEPSPEED}, runtime/pipe/engine.py, pipe_buffers; {_TRACED}",
        "flattens_gradients": f"{_DEEPSPEED}, runtime/engine.py, allreduce_bucket and "
        f"MEMORY_OPT_ALLREDUCE_SIZE; {_TRACED}",
        "spread": "zeropp/cost/cuts.py, cut_by_cost",
    },
)

_CORE = "Megatron-Core, megatron/training/arguments.py (core_v0.12)"
BEST_PUBLIC_3D = Entry(
    Program(
        name="best_public_3d",
        bf16=StateBytes(2, 4, 12, reduced=2),
        fp32=_FP32,
        split_boundary=True,
        overlap_tensor=True,
        overlap_reduction=True,
        overlap_updated=True,
        pads_vocabulary=True,
        fused_loss=True,
        selective="elementwise",
        post_validation=True,
        spread="cost",
    ),
    "a bound, not one program: the best part of every public one",
    {
        # Sums in fp32 and reductions in 16 bits are two programs' parts: this is a bound.
        "bf16": f"{_CORE}: --accumulate-allreduce-grads-in-fp32, --use-distributed-optimizer; "
        f"{_DEEPSPEED}, runtime/engine.py, communication_data_type: gradients are sent in bf16",
        "fp32": "arXiv 1910.02054, section 3.1",
        "split_boundary": "arXiv 2104.04473, section 4.1",
        "overlap_tensor": f"{_CORE}: --tp-comm-overlap, which needs sequence parallelism",
        "overlap_reduction": f"{_CORE}: --overlap-grad-reduce",
        "overlap_updated": f"{_CORE}: --overlap-param-gather",
        "pads_vocabulary": f"{_CORE}: --make-vocab-size-divisible-by",
        "fused_loss": "internlm/model/loss.py, FlashGPTLMLoss (InternEvo v0.2.1)",
        "selective": f"{_TORCH}, utils/checkpoint.py, create_selective_checkpoint_contexts",
        "post_validation": "arXiv 2401.10241, section 4",
        "spread": "zeropp/cost/cuts.py, cut_by_cost: as all contenders are cut",
    },
)

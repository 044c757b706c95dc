"""Programs on torch's data parallelism (DDP, FSDP and FSDP2)."""

from __future__ import annotations

from zeropp.programs.entry import Entry
from zeropp.programs.traits import Program, StateBytes

_TORCH = "torch 2.13"
_FP32_SHARDS = StateBytes(4, 4, 8)
_ATTENTION_FIT = "fitted on results/published/llm_foundry_fsdp.csv"

LLM_FOUNDRY = Entry(
    Program(
        name="llm_foundry",
        bf16=_FP32_SHARDS,
        fp32=_FP32_SHARDS,
        overlap_reduction=True,
        zero3=True,
        fused_loss=True,
        attention_factor=0.7,
        traffic_factor=2.11,
        selective="half",
    ),
    "MosaicML llm-foundry at 8c8dd48f (2023), on torch's FSDP",
    {
        "bf16": "arXiv 2304.11277, section 4.4: fp32 shards are the master weights",
        "fp32": "arXiv 1910.02054, section 3.1",
        "overlap_reduction": "arXiv 2304.11277, section 3.3",
        "zero3": "arXiv 2304.11277",
        "fused_loss": "scripts/train/benchmarking, loss_fn: fused_crossent (8c8dd48f)",
        "attention_factor": _ATTENTION_FIT,
        "traffic_factor": _ATTENTION_FIT,
        "selective": "fms-fsdp, policies/ac_handler.py: selective_checkpointing",
    },
)
TORCHTITAN = Entry(
    Program(
        name="torchtitan",
        bf16=StateBytes(4, 4, 8, casts_parameters=True),
        fp32=_FP32_SHARDS,
        overlap_reduction=True,
        zero3=True,
        shard_copies=True,
        traffic_factor=2.11,
        fused_rotary=False,
        loss_gradient="torch",
        resident_gradients=False,
        keeps_gathered_inputs=True,
        fsdp_hooks=True,
        fsdp_root=True,
        selective="half",
        expandable_segments=True,
    ),
    "torchtitan of 2024 and 2025, on FSDP2",
    {
        "bf16": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_param.py: fp32 shards, bf16 copies",
        "fp32": "arXiv 1910.02054, section 3.1",
        "overlap_reduction": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        "zero3": f"{_TORCH}, distributed/fsdp/_fully_shard",
        "shard_copies": f"{_TORCH}, distributed/fsdp/_fully_shard/_fsdp_collectives.py: "
        "foreach_all_gather_copy_out, chunk_cat",
        "traffic_factor": "that of the llm_foundry entry, without torch.compile",
        "fused_rotary": "torchtitan/models/llama3/model.py, apply_rotary_emb",
        "loss_gradient": f"{_TORCH}, nn.functional.cross_entropy as traced",
        "resident_gradients": f"{_TORCH}, FSDP2 as traced",
        "keeps_gathered_inputs": f"{_TORCH}, DTensor as traced",
        "fsdp_hooks": "torchtitan/models/llama3/parallelize.py: fully_shard on every block",
        "fsdp_root": "torchtitan/models/llama3/parallelize.py: fully_shard on the model",
        "selective": "torchtitan/models/llama3/parallelize.py, selective_ac_option",
        "expandable_segments": "run_train.sh: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    },
)
TORCHTITAN_COMPILED = TORCHTITAN.but(
    "torchtitan_compiled",
    "torchtitan of 2025 with --compile",
    {"traffic_factor": "torch.compile makes one kernel of an element-wise chain"},
    traffic_factor=1.0,
)
TORCHTITAN_3D = TORCHTITAN_COMPILED.but(
    "torchtitan_3d",
    "torchtitan v0.2.2 (2025) with --compile.enable and async tensor parallelism, on its pipelines",
    {
        "fused_loss": "torchtitan/components/loss.py, build_cross_entropy_loss (v0.2.2): compiled, "
        "so that no fp32 copy of the logits is made",
        "overlap_tensor": "torchtitan/distributed/tensor_parallel.py, maybe_enable_async_tp "
        "(v0.2.2)",
        "torch_stages": "torchtitan/distributed/pipeline_parallel.py (v0.2.2): its stages are "
        "torch's PipelineStage",
    },
    fused_loss=True,
    overlap_tensor=True,
    torch_stages=True,
)
FMS_FSDP = LLM_FOUNDRY.but(
    "fms_fsdp",
    "IBM's fms-fsdp of 2024, on torch's FSDP with torch.compile",
    {
        "bf16": "fms_fsdp/policies/mixed_precision.py, bfSixteen: gradients are reduced in bf16",
        "loss_gradient": "fms_fsdp/utils/train_utils.py: torch.nn.CrossEntropyLoss",
        "traffic_factor": "torch.compile makes one kernel of an element-wise chain",
    },
    bf16=StateBytes(4, 4, 8, reduced=2),
    attention_factor=1.0,
    traffic_factor=1.0,
    fused_loss=False,
    loss_gradient="torch",
)
FMS_FSDP_EAGER = FMS_FSDP.but(
    "fms_fsdp_eager",
    "IBM's fms-fsdp of early 2024, before torch.compile",
    # Counted in its code: a norm moves 36 bytes per element of a hidden state, because it computes
    # in fp32 with a kernel per step (fused: 4), and rotary embedding 36 per element of queries and
    # keys. A block's forward moves 187 bytes per element of a hidden state, the cost model's 59.
    {
        "traffic_factor": "foundation-model-stack, fms/modules/layernorm.py "
        "(LayerNormParameterized) and positions.py (RotaryEmbedding): counted"
    },
    traffic_factor=3.2,
)
FLASH_ATTENTION_GPT = Entry(
    Program(
        name="flash_attention_gpt",
        bf16=StateBytes(4, 4, 8, casts_parameters=True),
        fp32=_FP32_SHARDS,
        overlap_reduction=True,
        fused_accumulation=False,
        fused_loss=True,
        attention_factor=0.7,
    ),
    "the training code of flash-attention of 2022 and 2023, on torch's DDP",
    {
        "bf16": "training/configs/experiment/pile/base.yaml: precision bf16, which is autocast "
        "over fp32 parameters and gradients",
        "fp32": "arXiv 1910.02054, section 3.1",
        "overlap_reduction": "torch, nn/parallel/distributed.py: buckets beside the backward",
        "fused_accumulation": "csrc/fused_dense_lib of that repository: it adds no gradients up",
        "fused_loss": "training/configs/experiment/pile/base.yaml: flash_attn's CrossEntropyLoss",
        "attention_factor": "that of the llm_foundry entry: the same kernel before version 2",
    },
)

"""Megatron-LM, Megatron-Core and the programs that grew out of them."""

from __future__ import annotations

from zeropp.programs.entry import Entry
from zeropp.programs.traits import Program, StateBytes

_SC21 = "arXiv 2104.04473"
_V100_FIT = "fitted on results/published/libai_megatron_v100.csv"
_FP32 = StateBytes(4, 4, 8)

MEGATRON_LM_2021 = Entry(
    Program(
        name="megatron_lm_2021",
        bf16=StateBytes(2, 4, 12),
        fp32=_FP32,
        flash=False,
        dropout_masks=True,
        split_boundary=True,
        blocking_transfers=True,
        pads_vocabulary=True,
        fused_accumulation=False,
    ),
    "Megatron-LM of April 2021, as arXiv 2104.04473 ran it",
    {
        "bf16": f"{_SC21}, section 4 (mixed precision); arXiv 1910.02054, section 3.1",
        "fp32": "arXiv 1910.02054, section 3.1",
        "flash": f"{_SC21}, section 4.2: unfused attention with a fused softmax",
        "dropout_masks": "examples/pretrain_gpt_distributed.sh: dropout is on by default",
        "split_boundary": f"{_SC21}, section 4.1: scatter and gather of boundaries",
        "blocking_transfers": "megatron/p2p_communication.py of 2021 waits for all sends",
        "pads_vocabulary": "megatron/tokenizer/tokenizer.py: _vocab_size_with_padding",
        "fused_accumulation": "its flag, --no-gradient-accumulation-fusion, came in 2022",
    },
)
MEGATRON_LM_2022 = MEGATRON_LM_2021.but(
    "megatron_lm_2022",
    "Megatron-LM of May 2022, as arXiv 2205.05198 ran it",
    {},
    fused_accumulation=True,
)
MEGATRON_DEEPSPEED_2022 = MEGATRON_LM_2021.but(
    "megatron_deepspeed_2022",
    "Megatron-DeepSpeed of 2022, as vTrain (MICRO 2024) and BLOOM ran it",
    {"bf16": f"{MEGATRON_LM_2021.sources['bf16']}; gradients are reduced in fp16"},
    bf16=StateBytes(2, 4, 12, reduced=2),
)
VTRAIN_PREDICTOR = MEGATRON_DEEPSPEED_2022.but(
    "vtrain_predictor",
    "vTrain's predictor (MICRO 2024): what it computes for Megatron-DeepSpeed of 2022",
    # Not a program that trains: rows with the role computed that come from it, and no others.
    # Its head takes about twice as long per logit with TP 1, where the 50,257 columns are odd, as
    # with TP 2: src/model/gpt_modeling.py has vocab_size // world_size columns, unpadded.
    {
        "pads_vocabulary": "src/model/gpt_modeling.py of VIA-Research/vTrain at f8dda84",
        "launch_factor": "fitted on the computed rows of results/published/vtrain_a100.csv",
    },
    pads_vocabulary=False,
    launch_factor=2.56,
)
MEGATRON_LM_V100 = MEGATRON_LM_2021.but(
    "megatron_lm_v100",
    "the Megatron-LM that LiBai's authors compared with, on V100",
    {"traffic_factor": _V100_FIT},
    traffic_factor=1.62,
)
LIBAI = MEGATRON_LM_V100.but(
    "libai", "OneFlow LiBai, as its Benchmark.md of 2022 ran it on V100", {}
)

_R08 = "Megatron-LM README at core_r0.8.0"
_ARGUMENTS = "megatron/training/arguments.py at core_r0.8.0"
MEGATRON_CORE_R08 = Entry(
    Program(
        name="megatron_core_r0.8",
        bf16=StateBytes(2, 4, 12, reduced=2),
        fp32=_FP32,
        pads_vocabulary=True,
        split_boundary=True,
        overlap_tensor=True,
        overlap_reduction=True,
        overlap_updated=True,
    ),
    "Megatron-Core r0.8.0 (2024)",
    {
        "bf16": "arXiv 1910.02054, section 3.1; assumed, because the README does not say: "
        "gradients are reduced in bf16",
        "fp32": "arXiv 1910.02054, section 3.1",
        "pads_vocabulary": f"{_ARGUMENTS} and _vocab_size_with_padding of its tokenizer",
        "split_boundary": f"{_SC21}, section 4.1",
        "overlap_tensor": f"{_R08}: tensor-parallel traffic is overlapped; {_ARGUMENTS}: "
        "--tp-comm-overlap needs sequence parallelism",
        "overlap_reduction": f"{_R08}: data-parallel traffic is overlapped (--overlap-grad-reduce)",
        "overlap_updated": f"{_R08}: --overlap-param-gather",
    },
)

MEGATRON_CORE = MEGATRON_CORE_R08.but(
    "megatron_core",
    "Megatron-Core of 2025 (core_v0.12 and later)",
    {
        "bf16": "arXiv 1910.02054, section 3.1; megatron/training/arguments.py of 2025: gradients "
        "are accumulated and reduced in fp32 unless asked otherwise",
        "fused_loss": "core/models/common/language_module/language_module.py (core_v0.12.0): "
        "--cross-entropy-loss-fusion with --cross-entropy-fusion-impl te, that is Transformer "
        "Engine's parallel_cross_entropy, which overwrites 16-bit logits with their gradient",
    },
    bf16=StateBytes(2, 4, 12),
    fused_loss=True,
)
MEGATRON_CORE_R06 = MEGATRON_CORE.but(
    "megatron_core_r0.6",
    "Megatron-Core r0.6.0 (2024), without its flags for overlap, as FlagPerf ran it",
    {
        "dropout_masks": "FlagPerf, training/benchmarks/llama3_8B/megatron/pretrain_llama3.sh "
        "(1b5a030): dropout is left at its default, 0.1",
    },
    dropout_masks=True,
    fused_loss=False,
    overlap_tensor=False,
    overlap_reduction=False,
    overlap_updated=False,
)
FLAGSCALE = MEGATRON_CORE_R06.but(
    "flagscale",
    "FlagScale of 2023, a fork of Megatron-LM, as FlagPerf ran it",
    {},
    dropout_masks=False,
)
NEMO_H100 = MEGATRON_CORE_R08.but(
    "nemo_h100",
    "NeMo's recipes for H100, NeMo-Framework-Launcher at 4a9b61b, examples/training/llama/h100",
    {
        "bf16": "arXiv 1910.02054, section 3.1; llama3_70b_bf16.sh: grad_sync_dtype=bf16",
        "overlap_tensor": "NeMo, docs/source/features/optimizations/communication_overlap.rst",
        "overlap_reduction": "same page: overlap_grad_sync",
        "overlap_updated": "same page: overlap_param_gather",
    },
)

_ZERO_BUBBLE = "zero-bubble-pipeline-parallelism, examples/pretrain_zbh1.sh"
ZERO_BUBBLE = MEGATRON_LM_2021.but(
    "zero_bubble",
    "the fork of arXiv 2401.10241",
    {
        "flash": f"{_ZERO_BUBBLE}: no flash attention",
        "post_validation": "arXiv 2401.10241, section 4",
    },
    fused_accumulation=True,
    blocking_transfers=False,
    post_validation=True,
)
CONTROLLABLE_MEMORY = ZERO_BUBBLE.but(
    "controllable_memory",
    "the fork of arXiv 2405.15362 (examples/pretrain_zero_bubble.sh), with flash attention",
    {"dropout_masks": "the suite's models have no dropout"},
    flash=True,
    dropout_masks=False,
)
MEGATRON_DEEPSPEED = MEGATRON_DEEPSPEED_2022.but(
    "megatron_deepspeed",
    "Megatron-DeepSpeed of 2022 on models without dropout",
    {"dropout_masks": "the suite's models have no dropout"},
    dropout_masks=False,
)

INTERNEVO = MEGATRON_CORE_R08.but(
    "internevo",
    "InternEvo v0.2.1, configs/7B_sft.py",
    {
        # In addition to master weights and moments: tensors of the optimizer's step that are too
        # large for the memory that activations have freed. These are the flat gradient in 16 bits
        # and in fp32, and the two temporaries that torch 1.13's AdamW makes of it.
        "bf16": "internlm/solver/optimizer/hybrid_zero_optim.py, _step (v0.2.1); torch 1.13, "
        "torch/optim/adamw.py, _single_tensor_adamw",
        "fused_accumulation": "no such kernel in internlm/model (v0.2.1)",
        "updated": "internlm/solver/optimizer/hybrid_zero_optim.py, broadcast_params (v0.2.1)",
        "fused_loss": "internlm/model/loss.py, FlashGPTLMLoss (v0.2.1)",
        "zero3": "internlm/core/parallel, FSDP (v0.2.1), as its table's rows ran it",
        "attention_factor": "that of the llm_foundry entry",
        "traffic_factor": "that of the llm_foundry entry",
        "spread": "internlm/core/scheduler, partition_uniform (v0.2.1)",
    },
    bf16=StateBytes(2, 2, 12 + 2 + 4 + 8, reduced=2),
    fused_accumulation=False,
    updated="broadcasts",
    overlap_updated=False,
    zero3=True,
    fused_loss=True,
    overlap_tensor=False,
    attention_factor=0.7,
    traffic_factor=2.11,
    spread="blocks",
)
NANOTRON = MEGATRON_CORE_R08.but(
    "nanotron",
    "nanotron v0.5",
    {
        "bf16": "src/nanotron/optim/gradient_accumulator.py (v0.5): fp32 sums, reduced in fp32",
        "updated": "src/nanotron/distributed.py, all_gather_coalesced (v0.5)",
        "fused_accumulation": "no such kernel in src/nanotron (v0.5)",
        "spread": "src/nanotron/models/llama.py, get_block_compute_costs (v0.5)",
    },
    bf16=StateBytes(2, 4, 12),
    overlap_reduction=False,
    updated="slices",
    overlap_updated=False,
    overlap_tensor=False,
    fused_accumulation=False,
    spread="flops",
)

_SCALING = "github:Aleph-Alpha/scaling at 737f855, src/scaling/core"
ALEPH_ALPHA_SCALING = Entry(
    Program(
        name="aleph_alpha_scaling",
        bf16=StateBytes(2, 2, 12, zero1_all_reduces=True),
        fp32=_FP32,
        blocking_transfers=True,
        fused_accumulation=False,
        pipe_buffers=True,
        flattens_gradients=True,
        traffic_factor=2.11,
        vocab_parallel=False,
        split_gate=True,
        loss_gradient="torch",
        spread="modules",
    ),
    "Aleph Alpha's scaling, as arXiv 2311.05610 ran it in 2023 (read at its release of 2024)",
    {
        "bf16": f"{_SCALING}/optimizer/allreduce.py and optimizer.py: gradients are summed in 16 "
        "bits and all-reduced in fp32 at the end of a step",
        "fp32": "arXiv 1910.02054, section 3.1",
        "blocking_transfers": f"{_SCALING}/nn/pipeline_schedule/train.py: DeepSpeed's order",
        "fused_accumulation": f"{_SCALING}/nn/linear: plain torch products",
        "pipe_buffers": f"{_SCALING}/nn/parallel_module/buffers.py",
        "flattens_gradients": f"{_SCALING}/optimizer/allreduce.py: flatten_dense_tensors",
        "traffic_factor": "that of the llm_foundry entry: its element-wise kernels are torch's own",
        "vocab_parallel": "src/scaling/transformer/model/layers/lm_head.py: parallel_output is off",
        "split_gate": f"{_SCALING}/nn/mlp.py, ParallelSwiGLUMLP: dense_in and siglu_weight",
        "loss_gradient": "src/scaling/transformer/model/losses/cross_entropy.py: torch's own",
        "spread": f"{_SCALING}/nn/parallel_module/pipeline_partitioning.py, uniform",
    },
)

"""Megatron-Core on one rank: its own model, schedules, data parallelism and optimizer run the step;
this file turns a plan into its configuration, gives it the suite's weights, and reads what it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

# isort: off
from baselines.megatron_core import private_names  # first, because it imports Megatron-Core quickly
from baselines.megatron_core.private_names import supported_keywords

# isort: on
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from baselines.megatron_core.parameters import Contents, contents_of
from baselines.model import build_model, build_piece
from baselines.public_3d import microbatch_group
from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.price.programs import program_named
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Action, Op
from zeropp.types.training import OptimizerConfig, StepResult

_tanh_gelu = partial(F.gelu, approximate="tanh")


class FusedAttention(nn.Module):
    """Core attention by torch's fused kernel, as in every other contender. Megatron-Core leaves
    fused attention to Transformer Engine; its own (``DotProductAttention``) writes all scores to
    memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[seq, batch, heads, head_dim] each -> [seq, batch, heads * head_dim]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Norm:
    """Torch's norm, marked where its gradient is to be summed over the tensor-parallel ranks, which
    see different tokens under sequence parallelism. Megatron-Core leaves such a norm to Transformer
    Engine: its wrapper of torch's norm (``WrappedTorchNorm``) refuses sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class MegatronTrainer(ActionRecorder):
    """A ``zeropp.types.training.Trainer`` that runs Megatron-Core's ``GPTModel``. Raises
    RuntimeError if the plan's program needs Transformer Engine and it is not installed."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(plan.layout.coordinates(dist.get_rank())["pp"], device)
        self._plan = plan
        self._passes: dict[int, tuple[int, int]] = {}  # (stage, microbatch) by the output's id
        if device.type == "cpu":
            private_names.run_on_cpu()
        layout = plan.layout
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.chunks if layout.chunks > 1 else None,
            order="tp-cp-ep-dp-pp" if layout.placement == "dp_inner" else "tp-cp-ep-pp-dp",
            create_gloo_process_groups=False,
        )
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._dp_group = parallel_state.get_data_parallel_group()
        self._config = _transformer_config(plan, device)
        if self._config.tp_comm_overlap:
            private_names.overlap_tensor_parallel(
                plan.microbatch_size * plan.shape.seq, plan.shape.hidden, plan.layout.tp
            )
        with private_names.tensors_say_cuda(device):
            model_parallel_cuda_manual_seed(seed)
            self._chunks = self._build_chunks(seed)
            self._optimizer = self._build_optimizer(optimizer)
        self._run = get_forward_backward_func()
        private_names.observe_passes(self._observed)

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        plan, size, several = self._plan, self._plan.microbatch_size, len(self._chunks) > 1
        batches = list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))
        iterators = [iter(batches) for _ in self._chunks]
        self._passes.clear()
        self._begin_step()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        with private_names.tensors_say_cuda(self._device):
            losses = self._run(
                forward_step_func=_forward_step,
                data_iterator=iterators if several else iterators[0],
                model=self._chunks if several else self._chunks[0],
                forward_only=False,
                num_microbatches=plan.num_microbatches,
                seq_length=plan.shape.seq,
                micro_batch_size=size,
            )
            _, norm, _ = self._optimizer.step()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:  # on the last stage only, the same on its tensor-parallel ranks
            total += loss["loss"] / (len(losses) * plan.layout.dp * plan.layout.tp)
        dist.all_reduce(total)
        return StepResult(total, torch.as_tensor(norm))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        shapes = {
            name: parameter.shape
            for name, parameter in build_model(self._plan.shape, 0, "meta").named_parameters()
        }
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:  # otherwise the next forward would gather
                chunk.start_param_sync(force_sync=True)
            for name, parameter, part in self._parameters(chunk.module):
                if name == "output_layer.weight" and self._plan.shape.tied_embeddings:
                    continue  # the copy of the embedding that the last stage has
                values = self._fp32(parameter)
                parts = [values]
                if part.cut != "whole":
                    parts = [torch.empty_like(values) for _ in range(self._plan.layout.tp)]
                    dist.all_gather(parts, values, group=self._tp_group)
                full_names = [f"{part.piece}.{name}" for name in part.names]
                whole = part.values(parts, [shapes[full_name] for full_name in full_names])
                for full_name, value in zip(full_names, whole, strict=True):
                    yield full_name, value.cpu()

    def _build_chunks(self, seed: int) -> list[Any]:
        """This rank's model chunks with the suite's initial weights, each under Megatron-Core's
        data parallelism."""
        layout = self._plan.layout
        models = [self._build_model(chunk, seed) for chunk in range(layout.chunks)]
        zero, several = layout.replicate_zero == 1, layout.chunks > 1
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self._plan.sum_dtype == "fp32",
            average_in_collective=True,
            use_distributed_optimizer=zero,
            overlap_grad_reduce=True,
            # In a pipeline without chunks ranks would gather one after another, each behind the
            # message that its first forward waits for.
            overlap_param_gather=zero and (several or layout.pp == 1),
            align_param_gather=zero and several,
            bucket_size=program_named(self._plan.program).updated_bucket or None,
        )
        # As in Megatron-LM: the gradients of the first chunk, which end a step, go in buckets.
        # Without a ``grad_sync_func`` each rank's reduction begins in its own last backward; with
        # one all ranks would begin together, later (core/pipeline_parallel/schedules.py).
        chunks = [
            DistributedDataParallel(self._config, settings, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
        syncs = [chunk.no_sync for chunk in chunks]
        self._config.no_sync_func = syncs if several else syncs[0]
        if settings.align_param_gather:  # otherwise a chunk is gathered when its forward needs it
            self._config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        self._config.finalize_model_grads_func = finalize_model_grads
        return chunks

    def _build_model(self, chunk: int, seed: int) -> Any:
        plan, shape, layout = self._plan, self._plan.shape, self._plan.layout
        stage = chunk * layout.pp + self._rank
        model = GPTModel(
            self._config,
            _layer_spec(plan, stage, self._config),
            vocab_size=shape.vocab,
            max_sequence_length=shape.seq,
            pre_process=stage == 0,
            post_process=stage == plan.schedule.num_stages - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="learned_absolute" if shape.family == "gpt" else "rope",
            **supported_keywords(GPTModel, vp_stage=chunk if layout.chunks > 1 else None),
        ).to(self._device)  # positions are made on the CPU; Megatron-LM's get_model moves them, too
        if stage == 0:
            model.embedding.embedding_dropout.p = 0.0  # the suite's models have none there
        if plan.recompute == "selective" and self._config.add_bias_linear:
            for layer in model.decoder.layers:
                layer.mlp.linear_fc2.register_forward_hook(_with_copied_bias)
        first = max(plan.pieces_of(stage).start, 1)
        numbers = [layer.layer_number for layer in model.decoder.layers]
        assert numbers == list(range(first, first + plan.blocks[stage])), (numbers, plan.cuts)
        pieces: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for _, parameter, part in self._parameters(model):
                if part.piece not in pieces:
                    piece = build_piece(shape, part.piece, seed, self._device)
                    pieces = {part.piece: piece.state_dict()}  # of one at a time
                values = [pieces[part.piece][name] for name in part.names]
                parameter.copy_(part.parts(values, layout.tp)[self._tp_group.rank()])
        return model.bfloat16() if plan.precision != "fp32" else model

    def _build_optimizer(self, config: OptimizerConfig) -> Any:
        """Megatron-Core's optimizer around that of every contender. The distributed optimizer is
        made with Adam only, but then steps any that has its shards."""
        zero, bf16 = self._plan.layout.replicate_zero == 1, self._plan.precision != "fp32"
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            bf16=bf16,
            params_dtype=self._config.params_dtype,
            clip_grad=config.clip_norm or math.inf,  # 0 would leave out the norm, too
            use_distributed_optimizer=zero,
            overlap_param_gather=self._chunks[0].ddp_config.overlap_param_gather,
        )
        groups = supported_keywords(get_megatron_optimizer, use_gloo_process_groups=False)
        optimizer = get_megatron_optimizer(settings, self._chunks, **groups)
        self._inner = private_names.inner_optimizers(optimizer)
        for inner in self._inner:
            _step_with(inner, config)
        return optimizer

    def _parameters(self, model: Any) -> Iterator[tuple[str, nn.Parameter, Contents]]:
        """(name, this rank's part, what it holds) of every parameter of a model chunk."""
        for name, parameter in model.named_parameters():
            piece, short = 0, name
            if name.startswith("decoder.layers."):
                _, _, index, short = name.split(".", 3)
                piece = model.decoder.layers[int(index)].layer_number
            yield name, parameter, contents_of(self._plan.shape, short, piece, self._plan.layout.tp)

    def _fp32(self, parameter: nn.Parameter) -> Tensor:
        """The parameter or, of one in bf16, its fp32 masters."""
        if parameter.dtype == torch.float32:
            return parameter.detach()
        values, place = private_names.master_values(parameter, self._inner)
        if self._plan.layout.replicate_zero == 0:
            return values.view_as(parameter)
        whole = torch.zeros_like(parameter, dtype=torch.float32)
        whole.view(-1)[place] = values
        dist.all_reduce(whole, group=self._dp_group)
        return whole

    def _observed(self, op: Op, run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run and record a forward or backward of Megatron-Core's."""
        if op is Op.FORWARD:
            stage = (keywords.get("vp_stage") or 0) * self._plan.layout.pp + self._rank
            place = stage, keywords["current_microbatch"]
        else:  # a backward is known by the output that it gets
            place = self._passes.pop(id(private_names.output_of_backward(arguments)))
        with self._running(op, str(Action(place[0], op, place[1]))):
            result = run(*arguments, **keywords)
        if op is Op.FORWARD:
            self._passes[id(private_names.output_of_forward(result))] = place
        return result


def _step_with(inner: Any, config: OptimizerConfig) -> None:
    """Let one of Megatron-Core's optimizers step torch's instead of the Adam that it was made with,
    over the same shards."""
    shards = [p for group in inner.optimizer.param_groups for p in group["params"]]
    inner.optimizer = build_optimizer([nn.Parameter(s.detach()) for s in shards], config)
    inner.optimizer.param_groups[0]["params"] = shards  # views, as it sets them itself


def _forward_step(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron-Core's ``forward_step_func``: a chunk's output for the next microbatch, and the loss
    of the last stage's."""
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides ``mean`` in place

    return model(tokens, positions, None, labels=labels), loss


def _with_copied_bias(_: nn.Module, __: Any, result: tuple[Tensor, Tensor]) -> Any:
    """A linear layer's (output, bias), the latter as a copy. Where an MLP is recomputed, a custom
    autograd function (0.16.1, core/tensor_parallel/random.py: ``CheckpointFunction``) returns the
    bias. Of a parameter, autograd would make that function's result, whose backward runs itself."""
    return result[0], result[1].clone()


def _has_engine(plan: Plan) -> bool:
    """Whether a plan's program has the layers of Transformer Engine."""
    return plan.program.partition("+")[0] == "megatron_core"


def _layer_spec(plan: Plan, stage: int, config: Any) -> Any:
    """What Megatron-Core builds a stage's layers and the final norm of, by the plan's program."""
    if _has_engine(plan):
        return get_gpt_layer_with_transformer_engine_spec()
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = FusedAttention
    return TransformerBlockSubmodules([layer] * plan.blocks[stage], layer_norm=Norm)


def _transformer_config(plan: Plan, device: torch.device) -> Any:
    """Megatron-Core's configuration, with every fusion that the device and the program have."""
    shape, layout, cuda = plan.shape, plan.layout, device.type == "cuda"
    fused = private_names.has_fused_functions(device, shape.gates)
    engine, several = _has_engine(plan), layout.chunks > 1
    if engine and not private_names.has_transformer_engine():
        raise RuntimeError(
            "contender=megatron_core: needs Transformer Engine and Apex's kernel for accumulation, "
            "which are not installed (use NVIDIA's container, or contender=megatron_core_local)"
        )
    blackwell = cuda and torch.cuda.get_device_capability()[0] >= 10
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": 1e-5,
        "normalization": "LayerNorm" if shape.family == "gpt" else "RMSNorm",
        "add_bias_linear": shape.family == "gpt",
        "gated_linear_unit": shape.gates == 2,
        "hidden_dropout": shape.dropout,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16 if plan.precision != "fp32" else torch.float32,
        "bf16": plan.precision != "fp32",
        # Transformer Engine's current scaling; Blackwell has scales of blocks.
        "fp8": "hybrid" if plan.precision == "fp8" else None,
        "fp8_recipe": "mxfp8" if blackwell else "tensorwise",
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        # Megatron-Core's fused GELU has the tanh form, whatever it is given.
        "activation_func": F.silu if shape.gates == 2 else F.gelu if fused else _tanh_gelu,
        "gradient_accumulation_fusion": engine,
        "cross_entropy_loss_fusion": engine,
        "cross_entropy_fusion_impl": "te" if engine else "native",
        "apply_rope_fusion": engine and shape.family == "llama",
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "tp_comm_overlap": engine and layout.sequence_parallel,
        **_pipeline_fields(plan),
        # Of an output that interleaved stages still send, gloo would send freed memory.
        "deallocate_pipeline_outputs": cuda or not several,
        "use_cpu_initialization": not cuda,
        "perform_initialization": True,  # otherwise parameters lack what the norm is taken by
    }
    if plan.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(plan.recomputed_per_stage),
        }
    elif plan.recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    config = TransformerConfig(**supported_keywords(TransformerConfig, **fields))
    assert config.microbatch_group_size_per_vp_stage or not several
    return config


def _pipeline_fields(plan: Plan) -> dict[str, Any]:
    layout, stages = plan.layout, plan.schedule.num_stages
    if layout.pp == 1:
        return {}
    rows = [["decoder"] * plan.blocks[stage] for stage in range(stages)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    several = layout.chunks > 1
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.chunks if several else None,
        "pipeline_model_parallel_layout": rows,
        "pipeline_dtype": torch.bfloat16 if plan.precision != "fp32" else torch.float32,
        "microbatch_group_size_per_vp_stage": microbatch_group(layout.pp, plan.num_microbatches)
        if several
        else None,
        # With two ranks, batched messages of interleaved stages would be swapped, silently.
        "overlap_p2p_comm": several,
        "batch_p2p_comm": not several,
    }

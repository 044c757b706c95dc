"""DeepSpeed 3D on one rank: DeepSpeed's own engine runs the step; this file builds the model for
it, feeds it batches and reads its gradients, counters and times."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from types import MethodType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from baselines.deepspeed_3d.private_names import (
    DTYPE_CODES,
    OPS,
    CutPipeline,
    forbid_shared_memory_collectives,
    is_tied_copy,
    observe_instructions,
    partition_uniform,
    reduced_gradients,
)
from baselines.deepspeed_3d.tensor_parallel import (
    cut_logits,
    cut_piece,
    vocabulary_cross_entropy,
    whole_parameter,
)
from zeropp.engine.optimizer import build_optimizer, clip_factor, square_norm
from zeropp.layout import Layout
from zeropp.model import build_piece
from zeropp.plan import Plan
from zeropp.schedule.event_loop import LANES
from zeropp.schedule.program import Action, Op
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult

_TIED = "embedding"  # the name under which DeepSpeed finds the layers that share a weight
TIED_NAME = f"tied_modules.{_TIED}"
_TENSOR, _TUPLE = 0, 2  # DeepSpeed's codes for the kind of message
_LARGEST_BUCKET = 500_000_000  # elements that are reduced at once, DeepSpeed's default

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class Factory(nn.Module):
    """A layer type for DeepSpeed's ``LayerSpec``, which builds the layers of a ``PipelineModule``
    from a type and arguments: making one calls ``make(index)`` and returns that module."""

    def __new__(cls, make: Callable[[int], nn.Module], index: int) -> Any:
        return make(index)


def tie(
    layers: list[LayerSpec], make: Callable[[int], nn.Module], group: dist.ProcessGroup
) -> list[LayerSpec]:
    """The layers for tied embeddings: the head computes its logits with the embedding's weight.

    As always with DeepSpeed's tied layers, every stage that uses the embedding holds a copy, and
    the copies' gradients are summed.
    """

    def make_norm(index: int) -> nn.Module:
        head = make(index)
        del head.output
        head.forward = head.norm.forward  # type: ignore[union-attr]
        return head

    def logits(embedding: nn.Module, x: Tensor) -> Tensor:
        return cut_logits(x, embedding.tokens.weight, group)  # type: ignore[union-attr, arg-type]

    last = len(layers) - 1
    tied = {"tied_weight_attr": ["tokens.weight"]}
    return [
        TiedLayerSpec(_TIED, Factory, make, 0, **tied),
        *layers[1:-1],
        LayerSpec(Factory, make_norm, last),
        TiedLayerSpec(_TIED, Factory, make, 0, forward_fn=logits, **tied),
    ]


def fill(plan: Plan, message: Tensor) -> None:
    """Fill a received message of integers with what the neighbouring stage would have sent, for a
    rank that is traced without its peers.

    A *boundary* is the activation that one stage sends to the next; all boundaries of a plan have
    one shape, which is sent before the first one (``PipelineEngine._send_tensor_meta``). Under
    tensor parallelism a rank sends only its part of each boundary, after integers that describe the
    part (``PartitionedTensor.to_meta``): these are an int64 ``message``, any other is the shape.
    """
    numbers = _partition(plan) if message.dtype == torch.int64 else _shapes(plan)
    message[: len(numbers)] = torch.tensor(numbers, dtype=message.dtype)


def _boundary(plan: Plan) -> list[int]:
    return [plan.microbatch_size, plan.shape.seq, plan.shape.hidden]


def _partition(plan: Plan) -> list[int]:
    shape, tp = _boundary(plan), plan.layout.tp
    rank = plan.layout.coordinates(dist.get_rank())["tp"]
    return [len(shape), *shape, tp, rank, *partition_uniform(prod(shape), tp)]


def _shapes(plan: Plan) -> list[int]:
    codes, shape = DTYPE_CODES, _boundary(plan)
    code = codes[torch.bfloat16 if plan.precision == "bf16" else torch.float32]
    if plan.layout.tp == 1:
        return [_TENSOR, code, len(shape), *shape]
    place, part = len(_partition(plan)), prod(shape) // plan.layout.tp
    return [_TUPLE, 2, codes[torch.int64], 1, place, code, 1, part]


def build(
    plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
) -> DeepSpeedTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    return DeepSpeedTrainer(plan, optimizer, device, seed)


class DeepSpeedTrainer:
    """A ``zeropp.training.Trainer`` that runs DeepSpeed's ``PipelineEngine``."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        layout, shape = plan.layout, plan.shape
        self._plan, self._device = plan, device
        topology = _join_topology(layout)
        self._group = _own_group(topology.get_axis_comm_lists("model"))
        group = self._group

        def make(index: int) -> nn.Module:
            piece = build_piece(shape, index, seed, device)
            cut_piece(piece, group)
            return piece

        layers = [LayerSpec(Factory, make, index) for index in range(shape.num_pieces)]
        module = CutPipeline(
            plan.cuts,
            layers=tie(layers, make, group) if shape.tied_embeddings else layers,
            topology=topology,
            loss_fn=lambda logits, labels: vocabulary_cross_entropy(logits, labels, group),
            activation_checkpoint_interval=1 if plan.recompute == "full" else 0,
            activation_checkpoint_func=_recompute,
            checkpointable_layers=["Block"],
        )
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module.parameters(), optimizer),
            config=_config(plan, sum(parameter.numel() for parameter in module.parameters())),
        )
        self._grad_norm, self._clip_norm = 0.0, optimizer.clip_norm
        self._counters: Counter[str] = Counter()
        self._spans: list[Span] | None = None
        self._begin = 0.0
        self._passes: Counter[Op] = Counter()
        observe_instructions(self._engine, self._observed)

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        size = self._plan.microbatch_size
        batches = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        self._passes.clear()
        self._begin = time.perf_counter()
        loss = self._engine.train_batch(batches)
        return StepResult(float(loss), self._grad_norm)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        for name, parameter in self._engine.module.named_parameters():
            values = parameter
            if parameter.dtype is torch.bfloat16:
                values = safe_get_full_fp32_param(parameter)  # the fp32 master weights
            whole = whole_parameter(parameter, values, self._group)
            if not is_tied_copy(parameter):
                yield name.replace(TIED_NAME, "0"), whole.float().cpu()

    def counters(self) -> dict[str, int]:
        """See ``Trainer.counters``."""
        return dict(self._counters)

    def record_spans(self, enabled: bool) -> None:
        """See ``Trainer.record_spans``."""
        self._spans = [] if enabled else None

    def spans(self) -> list[Span]:
        """See ``Trainer.spans``."""
        return list(self._spans or [])

    def _observed(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap DeepSpeed's handler of an instruction, so that instructions which are actions of a
        schedule are counted and timed; handlers of others are returned as they are."""
        trainer = self
        op = OPS.get(kind)
        if op is Op.REDUCE_TIED and self._engine.stage_id not in self._plan.tied_stages:
            op = None  # DeepSpeed gives every stage the instruction

        def observed(engine: Any, **arguments: Any) -> None:
            if kind is instructions.OptimizerStep:
                trainer._clip()
            with nullcontext() if op is None else trainer._action(op):
                MethodType(run, engine)(**arguments)

        return observed

    @contextmanager
    def _action(self, op: Op) -> Iterator[None]:
        """Mark an action for the profiler, count it, and record its span while spans are on."""
        stage = self._engine.stage_id
        action = str(Action(stage, op, self._passes[op] if op.has_microbatch else None))
        start = self._clock()
        with record_function(action):
            yield
        self._passes[op] += 1
        self._counters[op.name.lower()] += 1
        if self._spans is not None:
            self._spans.append(Span(stage, LANES[op], action, start, self._clock()))

    def _clock(self) -> float:
        """Seconds since the step began. While spans are recorded it first waits for the compute
        stream, as the clock of every contender does."""
        if self._spans is None:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - self._begin

    def _clip(self) -> None:
        """Take the global gradient norm and clip the gradients to ``clip_norm``. DeepSpeed's own
        clipping is not used: it takes the norm over each rank's partition, so that the training
        would depend on the topology."""
        total = self._local_square_norm()
        dist.all_reduce(total)
        self._grad_norm = math.sqrt(float(total))
        if (factor := clip_factor(self._grad_norm, self._clip_norm)) != 1.0:
            for _, gradient, _ in self._gradients():
                gradient.mul_(factor)

    def _local_square_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; the parts of all ranks add up to the
        whole. A gradient that several ranks hold is divided by their number."""
        parts = []
        for parameter, gradient, copies in self._gradients():
            if is_tied_copy(parameter):  # the first stage counts it
                continue
            whole = not hasattr(parameter, "cut_dim")
            parts.append((gradient, copies * self._plan.layout.tp if whole else copies))
        return square_norm(parts, self._device)

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(parameter, its reduced gradient or this rank's partition of that, the number of
        data-parallel ranks that hold the same)."""
        parameters, copies = self._engine.module.parameters(), self._plan.layout.replicate
        yield from reduced_gradients(self._optimizer, parameters, copies)


def _join_topology(layout: Layout) -> PipeModelDataParallelTopology:
    """Let DeepSpeed use the process group that exists, and number the ranks as it does."""
    forbid_shared_memory_collectives()
    deepspeed.init_distributed(verbose=False)
    return PipeModelDataParallelTopology(
        num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.replicate
    )


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False)


def _own_group(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    """The process group of those lists' ranks that this rank is in. All ranks must call it with the
    same lists, because ``new_group`` is collective; no list means one group per rank."""
    own_group = None
    for ranks in rank_lists or [[rank] for rank in range(dist.get_world_size())]:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own_group = group
    assert own_group is not None
    return own_group  # type: ignore[no-any-return]


def _config(plan: Plan, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a rank that holds ``parameters`` parameters.

    In fp32, ZeRO-1 makes two buffers of ``reduce_bucket_size`` elements, whatever the rank has: at
    DeepSpeed's default of 5e8 elements 3.7 GiB (``runtime/zero/stage_1_and_2.py``). In bf16,
    ``immediate_grad_update`` (DeepSpeed's default is off) saves a copy of all gradients in 16 bits,
    and 8 of the 26 bytes per parameter that a microbatch's gradients move.
    """
    bucket = min(parameters, _LARGEST_BUCKET)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "train_batch_size": plan.global_batch,
        "gradient_clipping": 0.0,  # off (DeepSpeed's default is 1.0); ``_clip`` does it
        "zero_optimization": {"stage": plan.layout.replicate_zero, "reduce_bucket_size": bucket},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if plan.precision == "bf16":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config

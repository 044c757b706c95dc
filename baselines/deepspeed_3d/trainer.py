"""DeepSpeed on one rank: DeepSpeed's own engine runs the step; this file builds the model for it,
feeds it batches and reads its gradients. ``pipeline`` and ``ordinary`` are its two engines, between
which ``pipeline.build`` chooses."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from baselines.blocks import prepare_block
from baselines.deepspeed_3d.private_names import (
    forbid_shared_memory_collectives,
    has_whole_gradients,
    is_tied_copy,
    reduced_gradients,
)
from baselines.deepspeed_3d.tensor_parallel import cut_piece, whole_parameter
from baselines.model import Block, build_piece
from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.update.update_rules import build_optimizer, clip_factor, norm_power
from zeropp.price.programs import program_named
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Action, Op
from zeropp.types.training import OptimizerConfig, StepResult

TIED = "embedding"  # the name under which DeepSpeed finds the layers that share a weight

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class DeepSpeedTrainer(ActionRecorder, ABC):
    """A ``zeropp.types.training.Trainer`` that runs one of DeepSpeed's engines."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(plan.layout.coordinates(dist.get_rank())["pp"], device)
        self._plan, self._program = plan, program_named(plan.program)
        self._zero3 = self._program.live_parameters > 0
        # DeepSpeed uses the process group that exists, and numbers ranks as the layout does.
        forbid_shared_memory_collectives()
        deepspeed.init_distributed(verbose=False)
        data = "shard" if plan.layout.shard > 1 else "replicate"
        names = {"pp": "pipe", data: "data", "tp": "model"}
        axes = [(names[axis], size) for axis, size in plan.layout.axes if axis in names]
        self._topology = ProcessTopology([name for name, _ in axes], [size for _, size in axes])
        ranks = self._topology.get_axis_comm_lists("model")  # none without tensor parallelism
        self._group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            ranks or [[rank] for rank in range(plan.layout.world)]
        )
        arguments = self._arguments(seed)
        module = arguments["model"]
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            optimizer=build_optimizer(module.parameters(), optimizer),
            config=self._config(sum(parameter.numel() for parameter in module.parameters())),
            **arguments,
        )
        self._grad_norm, self._clip_norm = torch.zeros(()), optimizer.clip_norm
        # ``BF16_Optimizer`` takes the global norm, whether it clips or not.
        self._takes_norm = not self._clip_norm and has_whole_gradients(self._optimizer)
        self._passes: Counter[Op] = Counter()

    @abstractmethod
    def _arguments(self, seed: int) -> dict[str, Any]:
        """The model, and what else ``deepspeed.initialize`` needs for this engine."""

    def _config(self, parameters: int) -> dict[str, Any]:
        """DeepSpeed's configuration for a rank that holds ``parameters`` parameters.

        ZeRO's own optimizer makes two buffers of ``reduce_bucket_size`` elements, whatever the rank
        has (``runtime/zero/stage_1_and_2.py``), which here are no larger than its parameters. It
        neither looks for overflow (``check_grad_overflow``) nor takes a norm
        (``compute_grad_norm``), as this trainer takes one; ``BF16_Optimizer`` has no such setting.
        In bf16, ``immediate_grad_update`` (off by default) saves a copy of all gradients in 16
        bits, and 8 of the 26 bytes per parameter that a microbatch's gradients move.
        """
        plan, program = self._plan, self._program
        state, zero = program.state(plan.precision), plan.layout.replicate_zero
        if self._zero3:
            stage = {
                "stage": 3,
                "reduce_bucket_size": state.bucket,
                "stage3_allgather_sequential": not program.gathered_together,
                "stage3_prefetch_bucket_size": program.gathered_together or 50_000_000,
                "stage3_max_live_parameters": program.live_parameters,
                "stage3_max_reuse_distance": program.live_parameters,
                "stage3_param_persistence_threshold": program.persistent,
                "zero_hpz_partition_size": program.zero_hpz_partition_size,
            }
        else:
            stage = {
                "stage": zero,
                "reduce_bucket_size": min(parameters, state.bucket or parameters),
                "use_multi_rank_bucket_allreduce": state.zero1_all_reduces,
                "compute_grad_norm": not (state.bucket and zero),
            }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": plan.microbatch_size,
            "gradient_accumulation_steps": plan.num_microbatches,
            "train_batch_size": plan.global_batch,
            "gradient_clipping": 0.0,  # off (DeepSpeed's default is 1.0); ``_clip`` does it
            "communication_data_type": plan.reduce_dtype,
            "zero_optimization": stage | {"overlap_comm": program.overlap_reduction},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 30,
        }
        if plan.precision == "bf16":
            config["bf16"] = {
                "enabled": True,
                "immediate_grad_update": True,
                "check_grad_overflow": False,
            }
            config["data_types"] = {"grad_accum_dtype": plan.sum_dtype}
        return config

    @abstractmethod
    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run a step over these microbatches; the mean loss over all ranks."""

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        size = self._plan.microbatch_size
        batches = list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))
        self._passes.clear()
        self._begin_step()
        loss = self._train(batches)
        if self._takes_norm:
            self._grad_norm = torch.as_tensor(self._engine.get_global_grad_norm())
        return StepResult(loss, self._grad_norm)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        for name, parameter in self._engine.module.named_parameters():
            values = parameter
            if self._zero3 or parameter.dtype is torch.bfloat16:
                values = safe_get_full_fp32_param(parameter)  # the fp32 master weights
            whole = whole_parameter(parameter, values, self._group)
            if not is_tied_copy(parameter):
                yield name.replace(f"tied_modules.{TIED}", "0"), whole.float().cpu()

    def _piece(self, index: int, seed: int) -> nn.Module:
        """One piece of the model, this rank's part of it."""
        piece = build_piece(self._plan.shape, index, seed, self._device)
        cut_piece(piece, self._group)
        if isinstance(piece, Block):
            recomputed = self._plan.recomputes(self._rank, index)
            prepare_block(piece, self._plan, self._device, recomputed=recomputed)
        return piece

    @contextmanager
    def _action(self, op: Op) -> Iterator[None]:
        """Record an action of this rank's stage; microbatches of a kind of pass come in order."""
        microbatch = self._passes[op] if op.has_microbatch else None
        with self._running(op, str(Action(self._rank, op, microbatch))):
            yield
        self._passes[op] += 1

    def _clip(self) -> None:
        """Take the global gradient norm and clip the gradients to ``clip_norm``. DeepSpeed's own
        clipping is not used: it takes the norm over each rank's partition, so that the training
        would depend on the topology. Where nothing is clipped, a norm that DeepSpeed takes of whole
        gradients is enough."""
        if self._takes_norm:
            return
        parts = []
        for parameter, gradient, copies in self._gradients():
            if not is_tied_copy(parameter):  # the first stage counts it
                whole = not hasattr(parameter, "cut_dim")
                parts.append((gradient, copies * self._plan.layout.tp if whole else copies))
        # Of a gradient that several ranks hold, each counts its share.
        total = norm_power(parts, self._device)
        dist.all_reduce(total)
        self._grad_norm = total.sqrt()
        if self._clip_norm:
            factor = clip_factor(self._grad_norm, self._clip_norm)
            for _, gradient, _ in self._gradients():
                gradient.mul_(factor)

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(parameter, its reduced gradient or this rank's partition of that, the number of
        data-parallel ranks that hold the same)."""
        parameters, copies = self._engine.module.parameters(), self._plan.layout.replicate
        yield from reduced_gradients(self._optimizer, parameters, copies)

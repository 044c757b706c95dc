"""Faults that are injected into a contender on a rank, for the gate to find.

They are put where every contender passes, whatever it is made of: into the gradients that its torch
optimizer is about to apply, or what it does with right ones; into the batch that it is given, into
the model's blocks, and into the collectives. Those inside of one contender raise no error, either:
gradients that are reduced wrongly, and what a careless adapter of Megatron-Core does."""

from __future__ import annotations

import math
import os
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as instructions
from torch import Tensor, nn
from torch.nn import functional as F

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.pipeline import PipelineTrainer
from baselines.megatron_core import trainer as megatron
from baselines.model import Block, initial_std
from benchmarks.records.record import GateCheck
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import open_batches
from benchmarks.worker.gate import (
    Expected,
    checks_of,
    expect,
    gate_optimizers,
    gate_parts,
    gated_spec,
    observe,
    order_checks,
    run_gate,
)
from tests.gloo.subtle_faults import (
    SUBTLE_FAULTS,
    SUBTLE_LATER,
    SUBTLE_OPTIMIZER_FAULTS,
    Fault,
    Place,
    Prepare,
    beside_steps,
    editing,
    feeding,
    gradients_of,
    local,
    parameters_of,
    patched,
    pieces,
    prepared,
    scaled_part,
    unchanged,
    with_settings,
)
from zeropp.choose.contender import Contender
from zeropp.engine import engine
from zeropp.engine.sliced_head import SlicedHead
from zeropp.types.training import OptimizerConfig

_TIED = (
    "zeropp.engine.parameters.tied.TiedWeights.sum_gradients",
    "baselines.torch_pp.trainer.TiedEnds.sum_gradients",
    "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads",
)


def tied_gradients(times: int) -> Fault:
    """The gradients of tied weights are summed this many times: 0 leaves each end its own half."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def prepare(trainer: Any) -> Any:
            if isinstance(trainer, PipelineTrainer):
                # DeepSpeed's table of handlers: the only place between two of its instructions.
                handlers = trainer._engine._INSTRUCTION_MAP
                kind = instructions.ReduceTiedGrads
                handlers[kind] = _repeated(handlers[kind], times)
            return trainer

        with ExitStack() as stack:
            for path in _TIED:
                owner, _, name = path.rpartition(".")
                original = getattr(pkgutil.resolve_name(owner), name)
                stack.enter_context(mock.patch(path, _repeated(original, times)))
            yield prepare

    return fault


def _repeated(function: Callable[..., Any], times: int) -> Callable[..., None]:
    """A function that runs this many times whenever it is called."""

    def repeated(*arguments: Any, **keywords: Any) -> None:
        for _ in range(times):
            function(*arguments, **keywords)

    return repeated


@contextmanager
def dropped_reduction(place: Place) -> Iterator[Prepare]:
    """One reduction of gradients in each step is lost."""
    calls = [0]

    def losing(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(*arguments: Any, **keywords: Any) -> Any:
            work = original(*arguments, **keywords)
            output = keywords["output"] if "output" in keywords else arguments[0]
            if calls[0] == 0:
                if work is not None:
                    work.wait()
                output.zero_()
            calls[0] += 1
            return work

        return reduce

    def prepare(trainer: Any) -> Any:
        step = trainer.step

        def counted(inputs: Tensor, targets: Tensor) -> Any:
            calls[0] = 0
            return step(inputs, targets)

        trainer.step = counted
        if isinstance(trainer, PipelineTrainer) and place.pp == 0:
            handlers = trainer._engine._INSTRUCTION_MAP
            handlers[instructions.ReduceGrads] = _alone(handlers[instructions.ReduceGrads])
        if isinstance(trainer, OrdinaryTrainer):
            engine = trainer._engine
            engine.allreduce_gradients = _alone(engine.allreduce_gradients)
        if isinstance(trainer, megatron.MegatronTrainer) and place.pp == 0:
            buckets = trainer._chunks[0].bucket_groups[0]
            buckets.finish_grad_sync = _emptied(buckets)
        return trainer

    with ExitStack() as stack:
        for module, name in _reductions():
            stack.enter_context(mock.patch.object(module, name, losing(getattr(module, name))))
        yield prepare


def _reductions() -> Iterator[tuple[Any, str]]:
    """Where reduce-scatters are called: torch's own functions, and what modules made of them. One
    of DeepSpeed's modules keeps torch's from when it was made, and is called by its own name."""
    yield deepspeed.comm, "reduce_scatter_fn"
    for module in (dist, *(m for n, m in sys.modules.items() if n.startswith("zeropp.engine."))):
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(module, name):
                yield module, name


def _emptied(buckets: Any) -> Callable[..., None]:
    """The end of a reduction of Megatron-Core's, whose result is lost."""
    finish = buckets.finish_grad_sync

    def run(**keywords: Any) -> None:
        finish(**keywords)
        for bucket in buckets.buckets:
            bucket.grad_data.zero_()

    return run


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose all-reduces do nothing."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(dist, "all_reduce", mock.MagicMock()):
            return function(*arguments, **keywords)

    return run


def _without_norm(place: Place, trainer: Any) -> None:
    """Without clipping, the optimizer that others are chained around takes no norm."""
    (inner,) = trainer._inner
    inner.config.clip_grad = 0.0
    trainer._optimizer.step = lambda: (True, inner.step()[1] or 0.0, None)


def _with_stale_weights(place: Place, trainer: Any) -> None:
    for part in trainer._chunks:
        part.start_param_sync = lambda *_, **__: None


def _with_batched_messages(place: Place, trainer: Any) -> None:
    trainer._config.overlap_p2p_comm, trainer._config.batch_p2p_comm = False, True


def _aliased_loss(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach()}

    return model(tokens, positions, None, labels=labels), loss


def gate_without_last_reduction(spec: RunSpec) -> None:
    """On a rank: the gate of a Megatron-Core whose gradients are never finalised."""
    with mock.patch.object(megatron, "finalize_model_grads"):
        run_gate(spec, CONTENDERS[spec.contender.name], open_batches(spec), torch.device("cpu"))


def _uninitialised(place: Place, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(original(*arguments), perform_initialization=False)


class _UnmarkedNorm:
    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return nn.LayerNorm(hidden_size, eps=eps)


MEGATRON_FAULTS: dict[str, Fault] = {
    "no clipping, and so no norm": prepared(_without_norm),
    "weights read before they are gathered": prepared(_with_stale_weights),
    "messages of interleaved stages batched": prepared(_with_batched_messages),
    "the loss divided by the schedule": patched(
        megatron, "_forward_step", lambda *_: _aliased_loss
    ),
    "parameters not initialised by Megatron-Core": patched(
        megatron, "_transformer_config", _uninitialised
    ),
    "norms not marked for sequence parallelism": patched(
        megatron, "Norm", lambda *_: _UnmarkedNorm
    ),
    "Megatron-Core's own Adam": patched(megatron, "_step_with", lambda *_: lambda *__: None),
}


CPU = torch.device("cpu")


def find(
    spec: RunSpec, faults: list[str], parts: Callable[[RunSpec], list[RunSpec]] = gate_parts
) -> dict[str, list[GateCheck]]:
    """On a rank: for each fault the checks that fail in the first part of the gate that finds it,
    with the run's own optimizer for faults in what optimizers do, and with plain SGD for others;
    ``none`` is no fault, and passes all."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # DeepSpeed asks for it
    contender = CONTENDERS[spec.contender.name]
    spec, batches, _ = gated_spec(spec, contender, open_batches(spec))
    found: dict[str, list[GateCheck]] = {name: [] for name in faults}
    with initial_std(spec.model.hidden**-0.5), _kept_groups():
        for part in parts(spec):
            plan = part.plan()
            at = plan.layout.coordinates(dist.get_rank())
            place = Place(plan, plan.layout.dp_index(dist.get_rank()), at["pp"], at["tp"])
            sgd, own = gate_optimizers(part, batches, CPU)
            for optimizer, is_own in ((sgd, False), (own, True)):
                expected = expect(part, batches, CPU, optimizer)
                first = _first_step(expected)
                for name in dict.fromkeys(["none", *faults]):
                    if found.get(name) or (name != "none" and (name in IN_OWN) != is_own):
                        continue
                    seen = expected if name in LATER else first
                    with _ALL[name](place) as prepare:
                        trainer = prepare(contender.build(plan, optimizer, CPU, spec.seed))
                        observed = observe(
                            trainer, plan.layout, batches=batches, device=CPU, expected=seen
                        )
                    found.setdefault(name, []).extend(_failed(checks_of(part, seen, observed)))
            for name in [name for name in faults if not found[name] and name not in IN_OWN]:
                with (
                    _ALL[name](place) as prepare,
                    mock.patch.object(Contender, "build", _then(Contender.build, prepare)),
                ):
                    found[name] += _failed(order_checks(part, contender, batches, CPU, sgd))
    return {name: found[name] for name in faults}


def _failed(checks: list[GateCheck]) -> list[GateCheck]:
    return [check for check in checks if not check.error <= check.limit]  # NaN, too


def _then(build: Callable[..., Any], prepare: Prepare) -> Callable[..., Any]:
    return lambda *arguments: prepare(build(*arguments))


def _first_step(expected: Expected) -> Expected:
    """The same of the first step alone, with the same limits. What is found in it is found in all
    steps; the worst one counts."""
    return replace(expected, sizes=expected.sizes[:1], updates=expected.updates[:1])


@contextmanager
def _kept_groups() -> Iterator[None]:
    """While this is open, a group of the same ranks is made once and shared by all trainers: making
    its groups takes DeepSpeed's engine longer than the steps of a fault. Groups of all ranks, whose
    order on the wire may be independent, are made as ever."""
    original, groups = dist.new_group, dict[tuple[int, ...], Any]()

    def kept(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        if ranks is None:
            return original(ranks, *arguments, **options)
        members = tuple(ranks)
        if members not in groups:
            groups[members] = original(list(members), *arguments, **options)
        return groups[members]

    with ExitStack() as stack:
        for module in ("torch.distributed", "torch.distributed.device_mesh"):
            stack.enter_context(mock.patch(f"{module}.new_group", kept))
        yield


def _idle(where: Callable[[Place, int], bool]) -> Fault:
    """The optimizer changes nothing on some ranks, or in some steps."""

    def edit(place: Place, gradients: list[Tensor], step: int) -> None:
        for gradient in gradients:
            gradient.mul_(0.0 if where(place, step) else 1.0)

    return editing(edit)


_BEFORE: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()


def _not_zeroed(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Gradients are added to those of the step before."""
    gradients = gradients_of(optimizer)
    for gradient, old in zip(gradients, _BEFORE.get(optimizer, ()), strict=False):
        gradient.add_(old)
    _BEFORE[optimizer] = [gradient.clone() for gradient in gradients]


def _swapped_targets(place: Place, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The first two microbatches of the first data-parallel rank have each other's targets."""
    size = place.plan.microbatch_size
    first, second, *rest = torch.split(targets, size)
    pair = (second, first) if place.dp_index == 0 else (first, second)
    return inputs, torch.cat((*pair, *rest))


def _replica_left_out(place: Place, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The second data-parallel rank repeats its first microbatch and leaves out the others."""
    size, count = place.plan.microbatch_size, place.plan.num_microbatches
    if place.dp_index != 1:
        return inputs, targets
    return inputs[:size].repeat(count, 1), targets[:size].repeat(count, 1)


def _scaled_norm_weight(factor: float) -> Fault:
    """The gradient of one norm's weight on this rank is scaled."""

    def make(place: Place, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        norms: list[nn.LayerNorm] = []

        def scaled(norm: nn.LayerNorm, x: Tensor) -> Tensor:
            if not x.is_meta:  # a walk over layers has other modules
                norms.append(norm)
            if not norms or norm is not norms[0]:
                return forward(norm, x)
            weight = norm.weight.detach() + factor * (norm.weight - norm.weight.detach())
            return F.layer_norm(x, norm.normalized_shape, weight, norm.bias, norm.eps)

        return scaled

    return patched(nn.LayerNorm, "forward", make)


@contextmanager
def _swapped_input_gradients(place: Place) -> Iterator[Prepare]:
    """In the second block on this rank every second microbatch takes the input gradient of the one
    before it."""
    blocks: list[nn.Module] = []
    last: list[Tensor] = []

    def stale(grad: Tensor) -> Tensor:
        if last:
            return last.pop()
        last.append(grad.clone())
        return grad

    def before(block: nn.Module, x: Tensor) -> Tensor:
        if block not in blocks and not x.is_meta:  # a walk over layers has other modules
            blocks.append(block)
        if len(blocks) > 1 and block is blocks[1] and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(stale)  # type: ignore[no-untyped-call]
        return x

    layer = pkgutil.resolve_name("megatron.core.transformer.transformer_layer:TransformerLayer")
    ours, theirs = Block.forward, layer.forward

    def of_megatron(block: Any, *, hidden_states: Tensor, **others: Any) -> Any:
        return theirs(block, hidden_states=before(block, hidden_states), **others)

    with (
        mock.patch.object(Block, "forward", lambda block, x: ours(block, before(block, x))),
        mock.patch.object(layer, "forward", of_megatron),
    ):
        yield unchanged


def _other_masks(place: Place, original: Callable[..., None]) -> Callable[..., None]:
    """The first data-parallel rank draws the dropout masks of the next microbatch."""

    def shifted(seed: int, step: int, microbatch: int, piece: int) -> None:
        original(seed, step, microbatch + (place.dp_index == 0), piece)

    return shifted


def _one_step_ahead(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """From the second step on, Adam's bias correction is that of the step after."""
    if step == 2:
        for state in optimizer.state.values():
            state["step"] = state["step"] + 1


def _clipped_per_rank(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Every rank clips to the norm of the gradients that it holds."""
    held = gradients_of(optimizer)
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in held))
    for gradient in held:
        gradient.mul_(asked.clip_norm / norm)


def _small_ones_keep(
    place: Place, asked: OptimizerConfig, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """A twentieth of this rank's elements, as many as norms and biases are, have no weight
    decay."""
    held = [local(parameter.detach()) for parameter in parameters_of(optimizer)]
    for piece in pieces(held, 0.5, 0.55):
        piece.div_(1 - asked.lr * asked.weight_decay)


OPTIMIZER_FAULTS: dict[str, Fault] = {
    "learning rate 1 % low": with_settings(lr=lambda asked: 0.99 * asked.lr),
    "learning rate a fifth low": with_settings(lr=lambda asked: 0.8 * asked.lr),
    "betas swapped": with_settings(
        beta1=lambda asked: asked.beta2, beta2=lambda asked: asked.beta1
    ),
    "another epsilon": with_settings(eps=lambda asked: asked.eps / 10),
    "bias correction one step ahead": beside_steps(_one_step_ahead),
    "no weight decay": with_settings(weight_decay=lambda asked: 0.0),
    "no weight decay of a twentieth": beside_steps(_small_ones_keep),
    "clipped per rank": beside_steps(_clipped_per_rank),
    "not clipped": scaled_part(0.0, 1.0, 2.0),  # in the gate's first step no clipping
}

# What shows in the second step or later, and what is compared in all steps; other faults are found
# in the first step.
IN_OWN = {**OPTIMIZER_FAULTS, **SUBTLE_OPTIMIZER_FAULTS}  # in what optimizers do
LATER = {
    "none",
    "the optimizer idle from step 2",
    "gradients not zeroed",
    "betas swapped",
    "bias correction one step ahead",
    "weights read before they are gathered",
    *SUBTLE_LATER,
}
FAULTS: dict[str, Fault] = {
    "none": prepared(lambda place, trainer: None),
    "a quarter of the parameters never updated": scaled_part(0.4, 0.65, 0.0),
    "a quarter of the gradients doubled": scaled_part(0.4, 0.65, 2.0),
    "a quarter of the gradients times 1.05": scaled_part(0.4, 0.65, 1.05),
    "a norm's weight never updated": _scaled_norm_weight(0.0),
    "a norm's gradient doubled": _scaled_norm_weight(2.0),
    "a norm's gradient times 1.05": _scaled_norm_weight(1.05),
    "the optimizer idle from step 2": _idle(lambda place, step: step > 1),
    "gradients not zeroed": beside_steps(_not_zeroed),
    "targets of two microbatches swapped": feeding(_swapped_targets),
    "input gradients of two microbatches mixed": _swapped_input_gradients,
    "one data-parallel rank never updated": _idle(lambda place, step: place.dp_index == 1),
    "one data-parallel rank's batch left out": feeding(_replica_left_out),
    "one reduction dropped": dropped_reduction,
    "one tensor-parallel rank never updated": _idle(lambda place, step: place.tp == 1),
    "tied weights summed twice": tied_gradients(2),
    "tied weights not summed": tied_gradients(0),
    "other dropout masks": patched(engine, "seed_piece", _other_masks),
    **OPTIMIZER_FAULTS,
    **MEGATRON_FAULTS,
}
SUBTLE = {**SUBTLE_FAULTS, **SUBTLE_OPTIMIZER_FAULTS}


def _slice(change: Callable[[Tensor, Tensor | None, list[Tensor]], Any]) -> Fault:
    """What one slice of logits gives is changed."""

    def make(place: Place, original: Any) -> Any:
        def run(head: Any, inputs: Any, part: Any, divisor: float) -> Any:
            given = original(head, inputs, part, divisor)
            return change(*given) if part.targets[0].shape[1] == 5 else given

        return run

    return patched(SlicedHead, "_slice", make)


# In five, five and six tokens.
SLICED_FAULTS = {
    "slices of logits weighted equally": _slice(lambda loss, n, g: (loss * 16 / 15, n, g)),
    "a slice's gradient of its inputs 5 % low": _slice(lambda x, n, g: (x, n, [0.95 * g[0]])),
}
_ALL = {**FAULTS, **SUBTLE, **SLICED_FAULTS}

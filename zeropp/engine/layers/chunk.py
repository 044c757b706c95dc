"""One model chunk on its rank: its forward, and its backward in two halves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zeropp.engine.layers.deferred import WeightGradStore, backward_of_chunk, save_early
from zeropp.engine.layers.values import (
    TensorShape,
    Value,
    cast,
    chosen,
    may_have_gradient,
    tensors_of,
    without_scalars,
)
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks.lanes import Lanes
from zeropp.types.literals import Recompute

if TYPE_CHECKING:
    from zeropp.engine.layers.context import Context
    from zeropp.engine.layers.offload import Offload


def seed_piece(seed: int, step: int, microbatch: int, piece: int) -> None:
    """Seed torch's generators, of the CPU and of the current CUDA device, for one piece and
    microbatch of a step, so that dropout's masks are the same in every topology.

    ``microbatch`` is an index in the whole global batch: with m microbatches per rank and step, the
    data-parallel rank d has the indices d*m .. (d+1)*m-1. A single process that calls this before
    every piece draws the same numbers as any pipeline.
    """
    mixed = seed
    for part in (step, microbatch, piece):
        mixed = (mixed * 1_000_003 + part) % 2**63
    # Not ``torch.manual_seed``: before CUDA is in use it keeps a stack trace of every call, which
    # takes longer than a small layer.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)


@contextmanager
def forked_generators(device: torch.device) -> Iterator[None]:
    """After this context torch draws as before, on the CPU and on a ``device``, and so do Python
    and numpy."""
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


Result = TypeVar("Result")

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _policy(
    widest: float, context: Any, operator: Any, *arguments: Any, **keywords: Any
) -> CheckpointPolicy:
    """Keep attention's outputs, and products of factors of at most ``widest`` columns."""
    del context, keywords
    if operator in _PRODUCTS:
        keeps = max(factor.shape[-1] for factor in arguments[-2:]) <= widest
    else:
        keeps = "scaled_dot_product" in operator.name()
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy: Callable[..., CheckpointPolicy], kept: Callable[[Any], None] | None) -> Any:
    contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    if kept is not None:
        kept(contexts[0])
    return contexts


def run_recomputed(
    function: Callable[..., Result],
    *inputs: Tensor,
    recompute: Recompute,
    random: bool,
    kept: Callable[[Any], None] | None = None,
) -> Result:
    """``function(*inputs)``, whose backward computes again what ``recompute`` does not keep; all
    contenders call this.

    Full keeps the inputs only; selective also keeps the outputs of matrix products and of
    attention, and mlp of these only what is no wider than the first input, and made of what is no
    wider. ``random``: the function may draw random numbers, and the second run must draw the
    same ones. ``kept`` gets torch's context in which selective recomputation keeps tensors.
    """
    if recompute == "none":
        return function(*inputs)
    options: dict[str, Any] = {"preserve_rng_state": random}
    if recompute != "full":
        widest = inputs[0].shape[-1] if recompute == "mlp" else inf
        policy = partial(_policy, widest)
        options["context_fn"] = partial(_selective, policy, kept)
    return checkpoint(function, *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]


@dataclass
class _Live:
    """What a microbatch keeps until its backward: the gradients of its inputs, once they are there,
    and of outputs, where gradients enter the graph."""

    gradients: dict[int, Tensor]  # by the input's place
    tokens: int  # of its rows
    outputs: Sequence[GradientEdge | None]  # one per output that may have a gradient
    losses: Sequence[GradientEdge | None] = ()


class Chunk:
    """``modules`` that run one after another on this rank, with their parameters in ``flats``.

    ``names``: of the keyword inputs that each takes. Linear layers inside delay their weight
    gradients while ``store`` is open. ``recompute`` is what ``run_recomputed`` computes again of
    the modules ``recomputed``. ``arriving`` and ``leaving`` are the tensors that come from the
    stage before and go to the next stage; None at an end of the model. ``seed`` is called before
    every module with its index in the chunk and the microbatch; None: modules draw no random
    numbers, so that what is recomputed need not draw the same ones again. ``compute``:
    floating-point inputs of a module are cast to this type; None leaves them as they are.
    ``context``: the ranks that divide sequences, if there are several. ``offload``: what sends to
    the host what blocks save, if anything does.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        flats: Sequence[FlatParameters],
        lanes: Lanes,
        store: WeightGradStore,
        *,
        names: Sequence[frozenset[str]],
        recompute: Recompute,
        compute: torch.dtype | None,
        context: Context | None,
        recomputed: Sequence[nn.Module] = (),
        arriving: Sequence[TensorShape] | None = None,
        leaving: Sequence[TensorShape] | None = None,
        seed: Callable[[int, int], None] | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.modules, self.flats, self.recomputed = modules, flats, recomputed
        self.arriving, self.leaving, self.offload = arriving, leaving, offload
        self._lanes, self._store, self._recompute = lanes, store, recompute
        self._seed, self._compute, self._context = seed, compute, context
        save_early(recomputed)
        self._names = names
        self._live: dict[int, _Live] = {}

    def forward(
        self, inputs: Sequence[Tensor], microbatch: int, keywords: Mapping[str, Tensor]
    ) -> tuple[Value, Tensor | None]:
        """Run the modules on one microbatch, and keep what its backward needs; under ``no_grad``,
        in an evaluation, keep nothing, and take any shapes.

        Returns what the last module returns, cast to the types that the next stage expects, and the
        sum of the losses that modules return beside it. Raises RuntimeError if a tensor has another
        shape than the next stage expects.
        """
        self._wait()
        trains = torch.is_grad_enabled()
        if self._store.parts is not None and trains:
            self._store.parts.begin_forward(microbatch)
        gradients: dict[int, Tensor] = {}
        tokens = inputs[0].shape[1] if self._context else 0
        stays = [*keywords.values(), *(inputs if self.arriving is None else ())]
        if self.arriving is not None and trains:
            inputs = [_begin(x, gradients, place) for place, x in enumerate(inputs)]
        value: Value = tuple(inputs)
        del inputs  # which the graph keeps, or sends away
        saving = self.offload.saving if self.offload and trains else lambda *_: nullcontext()
        recomputed = self.recomputed if trains else ()
        losses = []
        with self._exchanging(tokens):
            for index, module in enumerate(self.modules):
                if self._seed is not None and trains:
                    self._seed(index, microbatch)
                with saving(module, microbatch, stays) as kept:
                    value = run_recomputed(
                        partial(module, **chosen(keywords, self._names[index], self._compute)),
                        *cast(tensors_of(value), self._compute),
                        recompute=self._recompute if module in recomputed else "none",
                        random=self._seed is not None,
                        kept=kept,
                    )
                value, loss = without_scalars(value)
                losses += [] if loss is None else [loss]
        if self.leaving is not None:
            shapes = [tuple(x.shape) for x in tensors_of(value)]
            expected = [tuple(shape.size) for shape in self.leaving]
            if shapes != expected and (trains or len(shapes) != len(expected)):
                raise RuntimeError(
                    f"a stage returns tensors of shapes {shapes}, but the next one expects "
                    f"{expected}: shapes may not depend on values or on the mode"
                )
            value = self._cast_leaving(value)
        if trains:
            self._live[microbatch] = _Live(gradients, tokens, _edges(tensors_of(value)))
        return value, torch.stack(losses).sum() if losses else None

    def set_loss(self, microbatch: int, loss: Tensor, *, alone: bool) -> None:
        """Let the backward begin at a loss, too, or at the loss ``alone`` (in the last stage);
        raises RuntimeError if that depends on nothing that is trained."""
        if alone and not loss.requires_grad:
            raise RuntimeError(
                "train_step: the loss depends on nothing that is trained (is it detached, or "
                "computed under no_grad?)"
            )
        live = self._live[microbatch]
        live.losses = _edges([loss])
        live.outputs = () if alone else live.outputs

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor],
        *,
        split: bool = False,
        is_last: bool = False,
    ) -> list[Tensor]:
        """The gradients of the chunk's inputs of real or complex numbers, zeros for one on which
        the output does not depend (the stage before waits for a message); frees the microbatch's
        graph.

        ``gradients`` are those of its outputs of such numbers; the last stage has none but a loss.
        ``split``: linear layers delay their weight gradients until ``backward_weight``; ``is_last``
        as there. The first stage's inputs are the batch and have no gradients.
        """
        self._wait()
        if self.offload is not None:
            self.offload.use(microbatch)
        live = self._live.pop(microbatch)
        seeds = [(edge, g) for edge, g in zip(live.outputs, gradients, strict=True) if edge]
        pairs = [*seeds, *((edge, None) for edge in live.losses if edge)]
        if pairs:
            self._make_gradients(microbatch, deferred=not split, is_last=is_last)
            if split:
                self._store.begin(microbatch)
            with backward_of_chunk(), self._exchanging(live.tokens):
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
            self._store.end()
        device = self._lanes.device
        return [
            live.gradients[place] if place in live.gradients else torch.zeros_like(x.empty(device))
            for place, x in enumerate(self.arriving or ())
            if x.has_gradient
        ]

    def backward_weight(self, microbatches: Sequence[int], *, is_last: bool = False) -> None:
        """Compute the weight gradients that ``backward`` has delayed, together where there are
        several microbatches; no gathered parameters are needed. ``is_last``: a reduction follows,
        and no weight gradient before it."""
        self._store.merge(microbatches)
        for left, microbatch in enumerate(microbatches, 1 - len(microbatches)):
            self._make_gradients(microbatch, deferred=True, is_last=is_last and not left)
            self._store.run(microbatch)

    def _wait(self) -> None:
        for flat in self.flats:
            flat.wait()

    def reduce(self) -> None:
        """Start to sum the gradients over the shards.

        Compute first waits for what other chunks have begun, so that not more than one chunk's
        gradients take memory while they are reduced.
        """
        parts = self._store.parts
        self._lanes.join_shard_reductions(but=parts.flats if parts else ())
        if parts is not None:
            parts.finish()
        for flat in self.flats:
            if flat.room is None:
                flat.reduce()

    def _make_gradients(self, microbatch: int, *, deferred: bool, is_last: bool) -> None:
        """Give parameters gradients to add to; those that may be delayed only if ``deferred``, and
        those of parts once the first is there."""
        for flat in self.flats:
            if flat.room is None and (deferred or not flat.deferred):
                flat.make_gradients()
        if deferred and self._store.parts is not None:
            self._store.parts.begin_backward(microbatch, is_last=is_last)

    def _exchanging(self, tokens: int) -> AbstractContextManager[None]:
        """Inside this context attention sees the tokens that other ranks have."""
        return nullcontext() if self._context is None else self._context.exchanging(tokens)

    def _cast_leaving(self, value: Value) -> tuple[Tensor, ...]:
        """Outputs in the next stage's types, copied if they lie in parameters that are freed."""
        assert self.leaving is not None
        outputs = zip(tensors_of(value), self.leaving, strict=True)
        converted = [x.to(shape.dtype) for x, shape in outputs]
        return tuple(
            x.clone() if any(flat.is_in_buffer(x) for flat in self.flats) else x for x in converted
        )


@contextmanager
def shown(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Inside this context parameters are views of their buffers; outside they may be NaN."""
    flats = [flat for chunk in chunks for flat in chunk.flats]
    for flat in flats:
        flat.show()
    try:
        yield
    finally:
        for flat in flats:
            flat.hide()


def _begin(x: Tensor, gradients: dict[int, Tensor], place: int) -> Tensor:
    """An input as the graph's beginning, which keeps no hold of it and puts its gradient into
    ``gradients``."""
    if not may_have_gradient(x.dtype):
        return x.detach()
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    return _Begin.apply(x, anchor, gradients, place)  # type: ignore[no-untyped-call, no-any-return]


class _Begin(torch.autograd.Function):
    """The same values and memory, neither leaf nor view, with torch's count of changes in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gradients: dict[int, Tensor], place: int
    ) -> Tensor:
        del anchor
        ctx.gradients, ctx.place = gradients, place
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.place] = gradient
        return None, None, None, None


def _edges(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [
        get_gradient_edge(output) if output.requires_grad else None
        for output in outputs
        if may_have_gradient(output.dtype)
    ]

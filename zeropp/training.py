"""What every contender gives on a rank: one optimizer step, and the means to check it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from zeropp.ranges import AT_LEAST_0

if TYPE_CHECKING:
    from torch import Tensor

    from zeropp.timeline import Span


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer of a run; the same for every contender."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, AT_LEAST_0] = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: Annotated[float, AT_LEAST_0] = 0.0
    clip_norm: Annotated[float, AT_LEAST_0] = 0.0  # global gradient norm; 0: no clipping

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step, equal on every rank: mean loss over the global batch (nats a token)
    and the gradient's global L2 norm before clipping."""

    loss: float
    grad_norm: float


class Trainer(Protocol):
    """One rank of a built configuration. Construction is collective, and so is every method."""

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Train one step on this rank's slice of the global batch.

        ``inputs`` and ``targets``: int64, shape [num_microbatches * microbatch_size, seq], the
        slice of this rank's data-parallel index; microbatch j is rows j*b .. (j+1)*b-1.
        """
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of the parameters of this rank's pieces, named
        ``{piece}.{parameter}`` as in ``zeropp.model.build_model``; the same on every data- and
        tensor-parallel peer."""
        ...

    def counters(self) -> dict[str, int]:
        """Events counted since construction, e.g. ``unshard``, ``reduce_grad``."""
        ...

    def record_spans(self, enabled: bool) -> None:
        """Switch the recording of per-action spans on (and clear it) or off."""
        ...

    def spans(self) -> list[Span]:
        """Spans of the last step if recording was on; ``rank`` is the pipeline rank. On a GPU a
        span begins and ends when the stream that computes has caught up, whatever other streams
        still do."""
        ...

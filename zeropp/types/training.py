"""What every contender provides on a rank: a training step, and what is needed to check it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from zeropp.types.literals import AT_LEAST_0, FROM_0_TO_1, check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from zeropp.types.timeline import Span


def difference(by: float, step: int, allowed: float) -> str:
    """What every comparison says that was off ``by`` more than ``allowed``, both relative to what
    one process gives."""
    return (
        f"differs from one process by {by:.1e} in step {step}, relative to its own; allowed "
        f"{allowed:.1e}"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a run, the same for every contender. Raises ValueError, in one line, for a
    value that a field cannot have."""

    kind: Literal["adamw", "sgd"] = "adamw"  # or "sgd", without momentum
    _: KW_ONLY
    lr: Annotated[float, AT_LEAST_0] = 1e-3  # the learning rate, times that of `lr_schedule`
    beta1: Annotated[float, FROM_0_TO_1] = 0.9  # of AdamW's mean of gradients
    beta2: Annotated[float, FROM_0_TO_1] = 0.95  # of AdamW's mean of their squares
    eps: Annotated[float, AT_LEAST_0] = 1e-8  # of AdamW's denominator
    weight_decay: Annotated[float, AT_LEAST_0] = 0.0  # of all parameters, norms and biases too
    clip_norm: Annotated[float, AT_LEAST_0] = 0.0  # largest global gradient norm; 0: no clipping

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)


@dataclass(frozen=True)
class StepResult:
    """The result of one step, on the device, equal on all ranks: the loss of the global batch (a
    contender's is the mean in nats per token), and the global L2 norm of the gradient before
    clipping. Reading them, as with ``float``, waits for the device.

    ``ParallelModel.train_step`` adds rates by this rank's clock, of the time since the step before
    returned: ``tokens_per_s`` of all ranks, where inputs are integers [rows, tokens], and ``mfu``,
    where a cluster with a known peak was named. Both are None in the first step, and in the one
    behind an evaluation or a checkpoint."""

    loss: Tensor
    grad_norm: Tensor
    tokens_per_s: float | None = None
    mfu: float | None = None


class Trainer(Protocol):
    """One rank of a configuration that was built. All ranks of the world must construct it together
    and must call every method together."""

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Train one step on this rank's slice of the global batch.

        ``inputs`` and ``targets``: int64 [num_microbatches * microbatch_size, seq], the slice of
        this rank's data-parallel index. With b = microbatch_size, microbatch j is the rows
        j*b .. (j+1)*b-1.
        """
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, unsharded fp32 copy on the CPU) of every parameter of this rank's stages.

        Names are ``{piece}.{parameter}``, as in ``baselines.model.build_model``. Ranks with the
        same stages yield the same.
        """
        ...

    def counters(self) -> dict[str, int]:
        """How often each kind of event happened since construction, such as ``unshard`` (gathers
        of parameters) and ``reduce_grad`` (reductions of gradients)."""
        ...

    def record_spans(self, enabled: bool) -> None:
        """Start recording a span per action, without those recorded before, or stop recording."""
        ...

    def spans(self) -> list[Span]:
        """The spans of the last step, if recording was on; their ``rank`` is the pipeline rank.

        On a GPU, the compute stream is waited for before the clock is read at a span's start and
        end; other streams are not.
        """
        ...

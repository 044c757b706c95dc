"""What a price is made of: durations and bytes of one plan on one cluster.

Durations are seconds of one action on one rank without contention from the schedule; whatever
depends on the order of actions (bubbles, overlap, how many activations live at a time) is the
simulator's. All figures read only the plan's sizes, never its programs, so that the tuner can
price a plan before it builds a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropp.schedule.program import StageCost


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one rank; several stages of a rank add up. Gradients and activations
    that come and go are those of one microbatch, except where gradients are summed."""

    parameters: int  # sharded, fp32 masters included; resident all the time
    optimizer: int  # resident all the time
    gradients: int  # sharded (or whole, where nothing is sharded), for the optimizer
    unsharded: int  # gathered parameters, while gathered; 0 where nothing is sharded
    unsharded_gradients: int  # from a weight gradient to the reduction; 0 where never separate
    early_gradients: int  # the part of them that comes with the input gradient: embedding, head
    fresh_gradients: int  # a microbatch's own, until they are added; 0 where they add in place
    embedding_gradient: int  # a microbatch's own, where it alone is made beside its sum
    made_gradients: int  # a microbatch's own, where they wait for the stage's next backward
    reduction_step: int  # what a reduction copies at a time
    reduction_copy: int  # what it holds until the next one
    flat_gradients: int  # a copy for the reduction over the replicas, when the program is done
    activations: int  # from its forward to the end of its input gradient
    deferred: int  # from its input gradient to its weight gradient (x and dY)
    boundary: int  # a message into the stage
    buffers: int  # of messages, resident all the time
    forward: int  # its own bytes at the fullest moment of a forward: activations and temporaries
    backward_input: int  # likewise
    full_backward: int  # likewise


@dataclass(frozen=True)
class StageExtras:
    """Seconds of one microbatch that a stage's compute durations include beside the kernels which
    the model itself needs."""

    tensor_forward: float = 0.0  # exposed tensor-parallel collectives
    tensor_backward: float = 0.0
    transfer_forward: float = 0.0  # transfers during which compute stands still
    transfer_backward: float = 0.0
    recomputation: float = 0.0  # in ``backward_input``
    accumulation: float = 0.0  # of weight gradients outside their product, in ``backward_weight``

    @property
    def tensor(self) -> float:
        """Exposed tensor-parallel collectives of forward and backward."""
        return self.tensor_forward + self.tensor_backward


@dataclass(frozen=True)
class PlanPrice:
    """Price of a plan. Tuples have one entry per stage, except where a line says per pipeline rank.

    ``extras`` says what the durations in ``stages`` include beside the model's own kernels.
    ``replica_s`` is the reduction over replicas, once per step after the last weight gradient
    (an all-reduce, or a reduce-scatter under ZeRO-1). ``limit_s`` is what the step would take at
    the compute limit (``zeropp.cost.compute_limit``). All in seconds.
    """

    stages: tuple[StageCost, ...]
    extras: tuple[StageExtras, ...]
    replica_s: tuple[float, ...]
    finish_s: tuple[float, ...]  # per pipeline rank: optimizer step, tied embedding, host overhead
    gather_updated_s: tuple[float, ...]  # per pipeline rank: ZeRO-1's all-gather of parameters
    memory: tuple[StageMemory, ...]
    limit_s: float
    shared_ends: bool = (
        False  # the first and the last stage share a group: one gather, one reduction
    )
    gathers_ahead: bool = True  # else parameters take memory when they are used, not when gathered
    torch_runtime: bool = False  # torch's pipelining: every message of a step has a buffer that
    # lasts, outputs stay, and weight gradients stand beside their sum until the next backward
    steps_overlap: bool = False  # a rank begins its next step when its own is done
    resident_gradients: bool = True  # else a step's gradients begin with its first reductions
    flat_chunks: bool = False  # a buffer for gradients is there before a backward adds to it
    stragglers: float = 1.0  # factor on compute: a step waits for its slowest node
    overlap_slowdown: float = 0.0  # compute takes this share longer while collectives run beside

"""The price of one plan on one cluster: durations and bytes.

Durations are seconds of one action on one rank. What depends on the order of actions (bubbles,
overlap, how many activations are held at a time) is left to the simulator. A price depends on the
plan's sizes and never on its programs, so that the tuner can price a plan before it builds a
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from zeropp.schedule.program import StageCost


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one stage on one rank; those of several stages of a rank add up. Activations, and
    gradients that are not sums, are those of one microbatch."""

    parameters: int  # sharded, with fp32 master weights; always held
    optimizer: int  # always held
    gradients: int  # for the optimizer; sharded if anything is
    unsharded: int  # gathered parameters, while gathered; 0 if nothing is sharded
    unsharded_gradients: int  # from a weight gradient to the reduction; 0 if not separate
    early_gradients: int  # the part of them that comes with the input gradient: embedding, head
    fresh_gradients: int  # of a microbatch, until added to the sum; 0 if added in place
    embedding_gradient: int  # of a microbatch, if only the embedding's is separate from its sum
    made_gradients: int  # of a microbatch, if they wait for the stage's next backward
    reduction_step: int  # what a reduction copies at a time
    reduction_copy: int  # what a reduction holds until the next one
    flat_gradients: int  # a copy during the reduction over the replicas
    whole: int  # values and gradients that come for the update, with what is sent
    activations: int  # from its forward to the end of its input gradient
    sent: int  # the part of them that is in the host's memory between the two, if it is stored
    deferred: int  # from its input gradient to its weight gradient (x and dY)
    joined: int  # copies of these for weight gradients of several microbatches, of one layer
    boundary: int  # a message into the stage
    buffers: int  # for messages; always held
    forward: int  # at the fullest moment of a forward: activations and temporaries
    backward_input: int  # at the fullest moment of an input gradient
    full_backward: int  # at the fullest moment of a full backward


@dataclass(frozen=True, kw_only=True)
class StageExtras:
    """Seconds per microbatch that a stage's compute durations include in addition to the model's
    own kernels."""

    tensor_forward: float = 0.0  # exposed tensor-parallel collectives
    tensor_backward: float = 0.0
    transfer_forward: float = 0.0  # transfers during which the rank cannot compute
    transfer_backward: float = 0.0
    recomputation: float = 0.0  # part of ``backward_input``
    accumulation: float = 0.0  # weight gradients added outside their product; in backward_weight
    # Exposed reductions over the replicas of all microbatches but the last; in backward_weight.
    reductions: float = 0.0
    gathers: float = 0.0  # exposed ones of DeepSpeed's ZeRO-3; part of ``forward``
    # Of a step's reductions over the replicas, what the stage's own backward hides, which it slows.
    hidden_replicas: float = 0.0
    # Of a gather, or of a reduction over the shards: it moves nothing then and slows no compute.
    waits: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds of a forward and a backward in which compute waits for collectives."""
        return self.tensor_forward + self.tensor_backward + self.gathers + self.reductions


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The durations of a plan in seconds. Tuples have one entry per stage.

    ``extras`` says what the durations in ``stages`` include in addition to the model's own kernels.
    ``limit_s`` is the step time at the compute limit (``zeropp.price.compute_limit``).
    """

    stages: tuple[StageCost, ...]
    extras: tuple[StageExtras, ...]
    limit_s: float
    steps_overlap: bool = False  # a rank begins its next step as soon as it has ended this one
    stragglers: float = 1.0  # factor on compute, because a step waits for its slowest node
    overlap_slowdown: float = 0.0  # the share by which compute takes longer during collectives
    network_share: float = 0.0  # of the host link's rate that collectives take while they run


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes of a plan's stages, and how its program holds them."""

    memory: tuple[StageMemory, ...]  # per stage
    # The first and the last stage share a group, with one gather and one reduction for both.
    shared_ends: bool = False
    # Parameters take memory when they are gathered; False: when they are used.
    gathers_ahead: bool = True
    # Torch's pipelining: every message of a step has a permanent buffer, outputs are kept, and
    # weight gradients are kept beside their sum until the next backward.
    torch_runtime: bool = False
    keeps_sent: bool = False  # torch's pipelining holds what it has sent until a step's end
    resident_gradients: bool = True  # always held; False: only from a step's first reduction on
    flat_chunks: bool = False  # the buffer of gradients is allocated before a backward adds to it
    host_limit: float = inf  # of a rank's activations in the host's memory


@dataclass(frozen=True, kw_only=True)
class PlanPrice(StepTimes, StepBytes):
    """The price of a plan: its durations, and the bytes of its stages."""

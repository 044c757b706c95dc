"""Makes the chunks of one rank out of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from zeropp.engine.chunk import Chunk
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.groups import DataGroups
from zeropp.engine.options import Boundary, EngineOptions, Piece
from zeropp.engine.randomness import StepSeeds
from zeropp.engine.rank_lanes import Lanes
from zeropp.engine.sharding import ChunkShards, ShardOptions
from zeropp.engine.uses import Uses
from zeropp.engine.values import TensorShape
from zeropp.layout import Layout
from zeropp.schedule.program import Schedule


@dataclass(frozen=True, kw_only=True)
class ChunkMaker:
    """What all chunks of one rank share.

    ``pieces`` are in the order of the model. ``seeds``: what random numbers are drawn from; None
    where nothing is seeded. ``uses`` collects which parameters a step has used.
    """

    pieces: Sequence[Piece]
    layout: Layout
    options: EngineOptions
    groups: DataGroups
    lanes: Lanes
    seeds: StepSeeds | None
    uses: Uses

    def chunks(self, schedule: Schedule, boundary: Boundary) -> dict[int, Chunk]:
        """The chunks of this rank by stage. ``boundary(stage)`` gives the shapes of the tensors
        that one microbatch sends into a stage."""
        stages = schedule.stages_of(self.layout.coordinates(dist.get_rank())["pp"])
        between = {
            stage: boundary(stage) if 0 < stage < schedule.num_stages else None
            for each in stages
            for stage in (each, each + 1)
        }
        return {s: self._chunk(s, between[s], between[s + 1]) for s in stages}

    def _chunk(
        self,
        stage: int,
        arriving: Sequence[TensorShape] | None,
        leaving: Sequence[TensorShape] | None,
    ) -> Chunk:
        options = self.options
        pieces = {piece.index: piece for piece in self.pieces if piece.stage == stage}
        blocks = [piece for piece in pieces.values() if piece.deferrable]
        # The first blocks may be recomputed. Half blocks never are, so they come last.
        deferrable = [piece.module for piece in sorted(blocks, key=lambda piece: piece.half)]
        others = [piece.module for piece in pieces.values() if not piece.deferrable]
        store = WeightGradStore(self.uses)
        deferred = defer_weight_grads(deferrable, store, warn=True)
        # This store is never open, so it takes weight gradients at once, inside their product.
        defer_weight_grads(others, WeightGradStore(self.uses))
        shards = ChunkShards(
            {index: piece.module for index, piece in pieces.items()},
            groups=self.groups,
            lanes=self.lanes,
            options=self._shard_options(),
            deferred=deferred,
            tied=options.tied,
        )
        indices, seeds = list(pieces), self.seeds
        seed = None if seeds is None else lambda place, j: seeds.set(indices[place], j)
        how = options.of_chunk(stage, seed)
        return Chunk(
            shards, store, blocks=deferrable, arriving=arriving, leaving=leaving, options=how
        )

    def _shard_options(self) -> ShardOptions:
        return ShardOptions(
            precision=self.options.precision,
            zero=self.layout.replicate_zero == 1,
            reduce_dtype=self.options.reduce_dtype,
            group_of=self.options.group_of,
            keeps_sums=self.layout.world == 1 and len({one.stage for one in self.pieces}) == 1,
        )

"""The rows of a data set, step by step, for every rank of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from zeropp.engine.ranks.errors import agree
from zeropp.types.layout import InfeasibleError

if TYPE_CHECKING:
    from zeropp.train.parallel_model import ParallelModel


class RowsOfSteps(Sampler[list[int]]):
    """The indices of this rank's rows in a data set, for one step after another.

    The rows of a step are a function of ``seed`` and of the step's number alone, so that every
    topology has the same ones, and a model that was loaded from a checkpoint goes on with those
    that it has not seen, also in batches of another size. Goes from the row after the model's last
    step to the end of that epoch, or, unless it is to ``resume``, over the first one. The rows that
    are left over then, fewer than a batch, are others in every epoch that is shuffled; unless it is
    to ``drop_last``, they are in the last batch.
    """

    def __init__(
        self,
        model: ParallelModel,
        count: int,
        *,
        shuffle: bool,
        seed: int,
        resume: bool,
        drop_last: bool,
    ) -> None:
        self._model, self._count, self._shuffle, self._seed = model, count, shuffle, seed
        self._resume, self._drop_last = resume, drop_last

    def __len__(self) -> int:
        """The steps of a whole epoch."""
        return self._count // self._model.plan.global_batch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, seen = self._place()
        order = torch.arange(self._count)
        if self._shuffle:
            draw = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self._count, generator=draw)
        rows, rank = self._model.plan.global_batch, self._model.data_parallel_rank
        for begin in range(seen, self._count - rows + 1, rows):
            is_last = begin + 2 * rows > self._count and not self._drop_last
            batch = order[begin : None if is_last else begin + rows]
            yield batch.tensor_split(self._model.data_parallel_size)[rank].tolist()

    def _place(self) -> tuple[int, int]:
        """The epoch of the next step, and the rows of it that were seen."""
        epoch = seen = 0
        for steps, rows in (*self._model.engine.batches, (1, self._model.plan.global_batch)):
            while self._resume and steps:
                if seen and seen + rows > self._count:  # the epoch has no such batch left
                    epoch, seen = epoch + 1, 0
                done = min(steps, max(1, (self._count - seen) // rows))
                steps, seen = steps - done, seen + done * rows
        return epoch, max(0, seen - self._model.plan.global_batch)


class _Loader(DataLoader[Any]):
    """Its place is that of the ``model``, which goes by steps: raises ValueError after several
    steps with a batch, or a batch without one (all may be fetched one ahead), since a run that
    goes on from a checkpoint would leave rows out or see them twice."""

    model: ParallelModel

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        begun, ahead = self.model.steps_done, 0
        for given, batch in enumerate(super().__iter__()):
            ahead += given == 1 and self.model.steps_done == begun
            if self.model.steps_done - begun != given - ahead:
                raise ValueError(
                    f"loader: {self.model.steps_done - begun} steps were done with {given} "
                    "batches, but its place goes by steps (take resume=False, and keep the place "
                    "yourself)"
                )
            yield batch


def make_loader(
    model: ParallelModel, dataset: Any, order: Mapping[str, Any], **options: Any
) -> DataLoader[Any]:
    """See ``ParallelModel.loader``; ``order``: its own keywords."""

    def made() -> tuple[DataLoader[Any], dict[str, str]]:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InfeasibleError(
                f"dataset: {type(dataset).__name__} has no length or no rows by number (give each "
                "rank rows model.rows of every global batch, and keep the place of your stream)"
            )
        if (count := len(dataset)) < model.plan.global_batch:
            raise InfeasibleError(
                f"dataset: has {count} rows, fewer than global_batch={model.plan.global_batch}"
            )
        rows = RowsOfSteps(model, count, **order)
        loader = (_Loader if order["resume"] else DataLoader)(
            dataset, batch_sampler=rows, **options
        )
        if isinstance(loader, _Loader):
            loader.model = model
        return loader, {"dataset": f"{count} rows", "order": str(order)}

    return agree(made)

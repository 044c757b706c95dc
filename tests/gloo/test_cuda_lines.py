"""Lines of the engine that run on CUDA alone, with a ``torch.cuda`` that only notes its calls."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeropp.emulate import emulated
from zeropp.engine import engine as engines
from zeropp.engine.engine import Engine
from zeropp.engine.evaluator import Evaluator
from zeropp.engine.layers.chunk import StepSeeds, seed_piece
from zeropp.engine.layers.deferred import add_wide_product
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.ranks import collectives, errors, given_rows
from zeropp.engine.ranks.given_rows import GivenRows, RowsError
from zeropp.engine.ranks.lanes import make_lanes
from zeropp.engine.trial import unchanged
from zeropp.engine.update.optimizer import Updater
from zeropp.train import placing
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.layout import Layout

GPU = torch.device("cuda", 1)
BOTH = "cpu:gloo,cuda:nccl"


def stand_in(**attributes: Any) -> Any:
    return cast("Any", SimpleNamespace(**attributes))


def backends(config: str) -> Any:
    return mock.patch.object(dist, "get_backend_config", return_value=config)


def test_lanes_are_streams_of_the_device_whose_work_goes_before_computes() -> None:
    with mock.patch.object(torch.cuda, "Stream") as made, ExitStack() as undo:
        make_lanes(GPU, undo)
    calls = [mock.call(GPU, priority=priority) for priority in (-1, -1, 0)]  # replicas have time
    assert made.call_args_list == calls
    assert made.return_value.synchronize.call_count == 3  # as they end


def test_a_piece_seeds_the_current_device_as_the_cpu() -> None:
    with (
        torch.random.fork_rng([]),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "manual_seed") as seeded,
    ):
        seed_piece(3, 1, 2, 4)
        seeded.assert_called_once_with(torch.initial_seed())


def test_the_devices_random_numbers_are_as_before_a_step_and_an_evaluation() -> None:
    schedule = stand_in(programs=[()])
    here: Any = stand_in(
        _channels=stand_in(device=GPU), chunks={}, _schedule=schedule, _rank=0,
        _loss=Loss(lambda output, _: output, "mean"), _roots=[],
        _trial=lambda: Evaluator._trial(here),
    )  # fmt: skip
    with mock.patch.object(torch.random, "fork_rng") as forked:
        with StepSeeds(3, 0, GPU).drawing(0):
            pass
        with unchanged([], GPU, whole=False):
            pass
        Evaluator.warm_up(here, Microbatches([], []))
    assert [call.args for call in forked.call_args_list] == [([GPU],)] * 3


def test_short_factors_are_added_to_a_wide_sum_in_one_kernel() -> None:
    total, short = stand_in(is_cuda=True, dtype=torch.float32), stand_in(dtype=torch.bfloat16)
    with mock.patch.object(torch, "addmm") as product:
        add_wide_product(total, short, short)
    product.assert_called_once_with(total, short, short, out_dtype=torch.float32, out=total)


def test_a_count_of_tokens_is_filled_in_on_the_device() -> None:
    """A copy of a number from the host would wait."""
    loss = Loss(lambda output, targets: (output.sum(), len(targets)), "tokens")
    refused = mock.Mock(side_effect=AssertionError("a copy from the host"))
    with mock.patch.multiple(torch, tensor=refused, as_tensor=refused):
        _, count = loss(torch.ones(3), Microbatches([], [torch.ones(3)]), 0)
    assert count is not None
    assert (float(count), count.dtype) == (3.0, torch.float64)


def test_what_cuda_was_told_is_checked_before_anything_is_made() -> None:
    engine = stand_in(_device=GPU, _layout=stand_in(pp=2))
    with (
        mock.patch.object(engines, "check_cuda", side_effect=EOFError) as checked,
        pytest.raises(EOFError),
    ):
        Engine._make_own(engine, [], stand_in(), stand_in(), ExitStack())
    checked.assert_called_once_with(2)


def test_messages_on_nccl_go_first_and_leave_compute_most_of_the_device() -> None:
    layout = Layout(pp=2)
    with (
        backends(BOTH),
        mock.patch.object(dist, "ProcessGroupNCCL", create=True) as nccl,
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "new_group") as made,
        mock.patch.object(collectives.Channels, "_connect"),
    ):
        collectives.Channels([(0, 1), (1, 0)], layout, GPU)
    options = nccl.Options.return_value
    nccl.Options.assert_called_with(is_high_priority_stream=True)
    assert options.config.max_ctas == 4
    assert [call.kwargs["backend"] for call in made.call_args_list] == ["nccl"] * 2
    assert {call.kwargs["pg_options"] for call in made.call_args_list} == {options}


def test_small_collectives_run_on_the_cpu_where_it_has_a_backend() -> None:
    for config, device in ((BOTH, "cpu"), ("cuda:nccl", "cuda")):
        with backends(config):
            assert errors._control_device() == torch.device(device)


def test_a_learning_rate_on_the_device_is_not_read_to_compare_it() -> None:
    rate, optimizer = stand_in(is_cuda=True), torch.optim.SGD([torch.zeros(())])
    optimizer.param_groups = [{"params": [], "lr": rate, "momentum": 0.5}]
    assert Updater(optimizer, {}).described() == "SGD [{'momentum': 0.5}]"


def test_the_current_device_is_that_of_the_model() -> None:
    given = {"device_count": 2, "current_device": 1, "set_device": None}
    stand_ins = {name: mock.Mock(return_value=value) for name, value in given.items()}
    with backends(BOTH), mock.patch.multiple(torch.cuda, **stand_ins):
        assert placing.device_of(None, None) == GPU
        ParallelModel._check_ready(stand_in(engine=stand_in(lanes=stand_in(device=GPU))))
    assert stand_ins["set_device"].call_args_list == [mock.call(GPU)] * 2  # and in every thread


def test_rows_are_compared_a_step_late_without_a_wait_in_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = GivenRows(("inputs", "targets"), Layout(pp=2), GPU)
    batch = {name: torch.arange(8).view(4, 2) for name in ("inputs", "targets")}
    sums = [int(given_rows.checksum(part)) for part in batch.values()]
    empty, pinned = torch.empty, []
    copy, blocking = torch.Tensor.copy_, []

    def make(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)  # else the copy waits
        return empty(*sizes, **options)

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        blocking.append(not non_blocking)
        return copy(self, source, non_blocking)

    with emulated() as device:
        assert rows.numbers("train_step", batch) == [0, 0]
        monkeypatch.setattr(torch, "empty", make)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        rows.begin(batch)
        monkeypatch.undo()
        kinds = [one.kind for one in device.log.issued]
        assert (kinds[-1], "sync" in kinds, pinned) == ("record", False, [True])
        assert blocking == [False] * 2
        assert rows.numbers("train_step", batch) == sums
    waits = [one for one in device.log.issued[len(kinds) :] if one.kind == "sync"]
    assert waits[0].what == "Event.synchronize"
    with pytest.raises(RowsError, match=r"step before this one, .*'targets' is not the same"):
        rows.check("train_step", [sums, [sums[0], sums[1] + 1]])

"""CUDA without a GPU: what it was told, which GPU each rank has, lines of the engine that run on it
alone, with a ``torch.cuda`` that only notes its calls; and ranks alone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

import zeropp
from benchmarks.launch import local
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.points import plan_point
from benchmarks.specification import SpecError
from benchmarks.worker import __main__ as worker
from tests.unit.toy_spec import SWEEP, spec_of
from zeropp.emulate import emulated
from zeropp.emulate.world import fake_world
from zeropp.engine import engine as engines
from zeropp.engine.engine import Engine
from zeropp.engine.evaluator import Evaluator
from zeropp.engine.layers.chunk import seed_piece
from zeropp.engine.layers.deferred import add_wide_product
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.ranks import collectives, cuda_settings, given_rows
from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.engine.ranks.given_rows import GivenRows, RowsError
from zeropp.engine.ranks.lanes import make_lanes
from zeropp.engine.update.optimizer import Updater
from zeropp.train import api
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.layout import InfeasibleError, Layout

ROOT = Path(__file__).resolve().parents[2]
LAZY = "TORCH_GLOO_LAZY_INIT"
GOOD = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def told(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    for name, value in (GOOD | settings).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "set 32"),  # as Megatron asks for
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", "set 32"),
        ("CUDA_MODULE_LOADING", "LAZY", "set EAGER"),
    ],
)
def test_a_setting_that_hangs_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, way_out: str
) -> None:
    told(monkeypatch, **{name: value})
    with pytest.raises(InfeasibleError, match=f"{name}={value}: .*{way_out}") as error:
        cuda_settings.check_cuda(pp=2)
    assert "\n" not in str(error.value)
    cuda_settings.check_cuda(pp=1)  # without a pipeline all ranks issue the same in the same order


@pytest.mark.filterwarnings("error")
def test_good_settings_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch)
    cuda_settings.check_cuda(pp=8)


@pytest.mark.parametrize(
    ("settings", "missed", "words"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, [], "CUDA_LAUNCH_BLOCKING is set: pipelines hang"),
        ({}, ["CUDA_MODULE_LOADING"], "initialised without CUDA_MODULE_LOADING: steps may"),
    ],
)
def test_what_hangs_by_design_and_a_driver_that_was_initialised_before_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], missed: list[str], words: str
) -> None:
    told(monkeypatch, **settings)
    monkeypatch.setattr(cuda_settings, "CUDA_MISSED", missed)
    with pytest.warns(UserWarning, match=words):
        cuda_settings.check_cuda(pp=2)


def test_whether_the_driver_is_initialised_is_asked_of_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        code = 3  # CUDA_ERROR_NOT_INITIALIZED

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            return self.code

    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Driver())
    assert not zeropp.engine.ranks.cuda_settings._driver_is_initialised()
    Driver.code = 0
    assert zeropp.engine.ranks.cuda_settings._driver_is_initialised()


def test_settings_are_set_where_nobody_has_set_them() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in GOOD}
    show = "import os, zeropp; print(*(os.environ[k] for k in zeropp.cuda_settings.CUDA_SETTINGS))"
    told = subprocess.run(
        [sys.executable, "-c", show],
        env=environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "9"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["EAGER", "9"]


@pytest.mark.parametrize(
    ("ranks", "before", "after"), [(255, None, None), (256, None, "1"), (512, "0", "0")]
)
def test_many_ranks_connect_in_gloo_when_they_first_talk(
    monkeypatch: pytest.MonkeyPatch, ranks: int, before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {LAZY: before})
    connect_lazily(ranks)
    assert os.environ.get(LAZY) == after


@pytest.mark.parametrize(("contender", "connections"), [("zeropp", "32"), ("megatron_core", "1")])
def test_each_contender_of_a_mixed_sweep_has_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, contender: str, connections: str
) -> None:
    told(monkeypatch, CUDA_DEVICE_MAX_CONNECTIONS="4", CUDA_MODULE_LOADING="LAZY", RANK="0")
    spec = SimpleNamespace(contender=SimpleNamespace(name=contender))
    monkeypatch.setattr(worker, "load_spec", lambda _: spec)
    monkeypatch.setattr(worker, "_run", lambda *_: 0)
    assert worker.main(["spec.json", "--out", str(tmp_path)]) == 0
    expected = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "CUDA_MODULE_LOADING": "EAGER"}
    assert {name: os.environ[name] for name in expected} == expected


@pytest.mark.parametrize("modules", [["benchmarks.worker.__main__"], local._PRELOADED], ids=len)
@pytest.mark.parametrize("asked", ["", "backend:native"])
def test_the_allocator_has_its_settings_before_torch_is_imported(
    modules: list[str], asked: str
) -> None:
    code = f"""if True:
        import importlib, os, sys
        class Watch:
            def find_spec(self, name, *_):
                if name == "torch":
                    print(os.environ["PYTORCH_ALLOC_CONF"], flush=True)
                    os._exit(0)
        sys.meta_path.insert(0, Watch())
        for name in {[*modules]}:
            importlib.import_module(name)
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    variables |= {"PYTORCH_ALLOC_CONF": asked} if asked else {}
    found = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.strip() == (asked or "expandable_segments:True")


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


def test_the_devices_random_numbers_are_as_before_an_evaluation() -> None:
    schedule = stand_in(programs=[()])
    here: Any = stand_in(
        _channels=stand_in(device=GPU), chunks={}, _schedule=schedule, _rank=0,
        _loss=Loss(lambda output, _: output, "mean"), _roots=[], _caching=set(),
    )  # fmt: skip
    with mock.patch.object(torch.random, "fork_rng") as forked:
        Evaluator.warm_up(here, Microbatches([], []))
    assert [call.args for call in forked.call_args_list] == [([GPU],)]


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
        collectives.Channels([(0, 1), (1, 0)], layout, GPU, None, ExitStack())
    options = nccl.Options.return_value
    nccl.Options.assert_called_with(is_high_priority_stream=True)
    assert options.config.max_ctas == 4
    assert [call.kwargs["backend"] for call in made.call_args_list] == ["nccl"] * 2
    assert {call.kwargs["pg_options"] for call in made.call_args_list} == {options}


def test_a_learning_rate_on_the_device_is_not_read_to_compare_it() -> None:
    rate, optimizer = stand_in(is_cuda=True), torch.optim.SGD([torch.zeros(())])
    optimizer.param_groups = [{"params": [], "lr": rate, "momentum": 0.5}]
    assert Updater(optimizer, {}).described() == "SGD [{'momentum': 0.5}]"


def test_the_current_device_is_that_of_the_model() -> None:
    given = {"device_count": 2, "current_device": 1, "set_device": None}
    stand_ins = {name: mock.Mock(return_value=value) for name, value in given.items()}
    with backends(BOTH), mock.patch.multiple(torch.cuda, **stand_ins):
        assert api.device_of(None) == GPU
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


def test_a_lone_rank_reads_nothing_that_was_never_written() -> None:
    """What torch's fake group of 2.11 leaves as it was allocated."""
    sent = torch.arange(8.0)
    with fake_world(rank=1, size=4):
        part = torch.full((2,), torch.nan)
        collectives.reduce_scatter_single(part, sent)
        assert part.tolist() == [2.0, 3.0]
        collectives.reduce_scatter_single(output=part.fill_(torch.nan), input=sent, group=None)
        assert part.tolist() == [2.0, 3.0]
        world = dist.group.WORLD
        assert world is not None
        functional = functional_collectives.reduce_scatter_tensor(sent, "sum", 0, world)
        assert functional.tolist() == [2.0, 3.0]
        taken = torch.full((10,), torch.nan)
        dist.all_to_all_single(taken, sent, [4, 2, 2, 2], [2, 2, 2, 2])
        assert bool(taken.isfinite().all())


def test_more_ranks_than_gpus_are_refused_unless_they_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = plan_point(spec_of())
    monkeypatch.setattr(local, "_gpus", lambda: [Path("/dev/nvidia0")])
    with pytest.raises(SpecError, match=r"^num_gpus=4: this machine has 1 \(launcher.share_gpu="):
        local.check([point], LocalOptions(), SWEEP)
    local.check([point], LocalOptions(share_gpu=True), SWEEP)

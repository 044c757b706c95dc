"""What CUDA was told, and which GPU each rank has, before anything runs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zeropp
from tests.gloo.world import World
from zeropp.engine import preflight
from zeropp.layout import InfeasibleError

ROOT = Path(__file__).resolve().parents[2]
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
        preflight.check_cuda(pp=2)
    assert "\n" not in str(error.value)
    preflight.check_cuda(pp=1)  # without a pipeline all ranks issue the same in the same order


@pytest.mark.filterwarnings("error")
def test_good_settings_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch)
    preflight.check_cuda(pp=8)


def test_what_hangs_by_design_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, CUDA_LAUNCH_BLOCKING="1")
    with pytest.warns(UserWarning, match="CUDA_LAUNCH_BLOCKING is set: pipelines hang"):
        preflight.check_cuda(pp=2)


def test_a_driver_that_was_initialised_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch)
    monkeypatch.setattr(preflight, "CUDA_MISSED", ["CUDA_MODULE_LOADING"])
    with pytest.warns(UserWarning, match="initialised without CUDA_MODULE_LOADING: steps may"):
        preflight.check_cuda(pp=2)


def test_whether_the_driver_is_initialised_is_asked_of_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        code = 3  # CUDA_ERROR_NOT_INITIALIZED

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            return self.code

    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Driver())
    assert not zeropp._driver_is_initialised()
    Driver.code = 0
    assert zeropp._driver_is_initialised()


def test_settings_are_set_where_nobody_has_set_them() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in GOOD}
    show = "import os, zeropp; print(*(os.environ[k] for k in zeropp.CUDA_SETTINGS))"
    told = subprocess.run(
        [sys.executable, "-c", show],
        env=environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "9"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["EAGER", "9"]


def shared(gpus: list[str]) -> str:
    import torch.distributed as dist

    try:
        preflight.compare_gpus(gpus[dist.get_rank()], 0)
    except InfeasibleError as error:
        return str(error)
    return ""


def test_ranks_that_share_a_gpu_are_refused_on_all(world: World) -> None:
    found = world.run(shared, ["node1 GPU-a", "node1 GPU-b", "node1 GPU-a"], size=3)
    assert set(found) == {
        "device: ranks [0, 2] share a GPU, cuda:0 of node1 (call torch.cuda.set_device with the "
        "local rank, or give device= to parallelize)"
    }
    assert world.run(shared, ["node1 GPU-a", "node2 GPU-a"], size=2) == ["", ""]

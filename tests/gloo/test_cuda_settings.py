"""What CUDA was told, and which GPU each rank has, before anything runs."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zeropp
from benchmarks.launch import local
from benchmarks.worker import __main__ as worker
from tests.gloo.world import World
from zeropp.engine.ranks import cuda_settings
from zeropp.engine.ranks.collectives import connect_lazily
from zeropp.types.layout import InfeasibleError

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


def test_what_hangs_by_design_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, CUDA_LAUNCH_BLOCKING="1")
    with pytest.warns(UserWarning, match="CUDA_LAUNCH_BLOCKING is set: pipelines hang"):
        cuda_settings.check_cuda(pp=2)


def test_a_driver_that_was_initialised_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch)
    monkeypatch.setattr(cuda_settings, "CUDA_MISSED", ["CUDA_MODULE_LOADING"])
    with pytest.warns(UserWarning, match="initialised without CUDA_MODULE_LOADING: steps may"):
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


def shared(gpus: list[str], asked: str) -> str:
    """What ``parallelize`` says on ranks that have these GPUs; the first rank asks for a GPU, and
    the others for the device ``asked``."""
    rank = dist.get_rank()
    properties = SimpleNamespace(uuid=gpus[rank])
    given: dict[str, Any] = {"is_available": True, "current_device": 0, "set_device": None}
    given["get_device_properties"] = properties
    stand_ins = {name: mock.Mock(return_value=value) for name, value in given.items()}
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.multiple(torch.cuda, **stand_ins),
        pytest.raises(InfeasibleError) as error,
    ):
        zeropp.parallelize([], F.mse_loss, sample=torch.zeros(1, 1), global_batch=1,
                           device=asked if rank else "cuda")  # fmt: skip
    return str(error.value)


def shared_on_purpose() -> str:
    with mock.patch.dict(os.environ, NCCL_HOSTID=f"rank {dist.get_rank()}"):
        return shared(["GPU-a"] * 3, "cuda")


def test_ranks_that_pose_as_hosts_share_a_gpu(world: World) -> None:
    """As with launcher.share_gpu."""
    assert set(world.run(shared_on_purpose, size=3)) == {"layers=[]: there is nothing to train"}


def test_ranks_that_share_a_gpu_are_refused_on_all(world: World) -> None:
    found = world.run(shared, ["GPU-a", "GPU-b", "GPU-a"], "cuda", size=3)
    assert set(found) == {
        f"device: ranks [0, 2] share GPU GPU-a of {socket.gethostname()} (call "
        "torch.cuda.set_device with the local rank, or give device= to parallelize)"
    }
    for asked in ("cuda", "cpu"):  # also where only some ranks train on a GPU
        found = world.run(shared, ["GPU-a", "GPU-a" if asked == "cpu" else "GPU-b"], asked, size=2)
        assert set(found) == {"layers=[]: there is nothing to train"}


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

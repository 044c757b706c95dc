"""A 14.6-billion-parameter GPT on A800s: what the simulator's and the tuner's tests work on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from omegaconf import OmegaConf
from pydantic import TypeAdapter

from zeropp.choose.task import Task
from zeropp.cluster import Cluster
from zeropp.shape import ModelShape

_CONF = Path(__file__).resolve().parents[2] / "conf"


@cache
def preset(group: str, name: str, kind: type) -> object:
    values = OmegaConf.to_container(OmegaConf.load(_CONF / group / f"{name}.yaml"))
    return TypeAdapter(kind).validate_python(values)


def cluster(name: str) -> Cluster:
    """A preset of ``conf/cluster``."""
    found = preset("cluster", name, Cluster)
    assert isinstance(found, Cluster)
    return found


def model(name: str) -> ModelShape:
    """A preset of ``conf/model``."""
    found = preset("model", name, ModelShape)
    assert isinstance(found, ModelShape)
    return found


def task(num_gpus: int = 64, global_batch: int = 256) -> Task:
    shape = model("gpt_14_6b")
    return Task(shape=shape, cluster=cluster("a800"), num_gpus=num_gpus, global_batch=global_batch)

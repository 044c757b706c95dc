"""A 14.6-billion-parameter GPT on A800s: what the simulator's and the tuner's tests work on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter

from zeropp.cluster import Cluster
from zeropp.layout import InfeasibleError
from zeropp.plan import Candidate, SizedPlan, Task
from zeropp.shape import ModelShape
from zeropp.tune.contender import Contender
from zeropp.tune.space import points

_CONF = Path(__file__).resolve().parents[2] / "conf"


def preset(group: str, name: str, kind: type) -> object:
    values = OmegaConf.to_container(OmegaConf.load(_CONF / group / f"{name}.yaml"))
    return TypeAdapter(kind).validate_python(values)


def task(num_gpus: int = 64, global_batch: int = 256) -> Task:
    shape = preset("model", "gpt_14_6b", ModelShape)
    cluster = preset("cluster", "a800", Cluster)
    assert isinstance(shape, ModelShape)
    assert isinstance(cluster, Cluster)
    return Task(shape=shape, cluster=cluster, num_gpus=num_gpus, global_batch=global_batch)


def everything(
    contender: Contender[Any], what: Task, asked: Any = None
) -> list[tuple[Candidate[Any], SizedPlan]]:
    """All that a contender's space holds (within what was asked) and its planner can size."""
    found, asked = [], asked or contender.knobs()
    for point, size in points(what, contender.space, asked, "auto", Counter()):
        for family in contender.space.families(point):
            try:
                plan = contender.size(what, family, size)
            except InfeasibleError:
                continue
            for knobs in contender.space.members(asked, family, plan):
                found.append((Candidate(knobs, size), contender.size(what, knobs, size)))
    assert found
    return found

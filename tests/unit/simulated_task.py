"""What the simulator's and the tuner's tests work on: a 14.6-billion-parameter GPT on A800s, or
Llama 8B on H100s."""

from __future__ import annotations

from benchmarks.specification.reading import preset
from zeropp.choose.task import Task
from zeropp.price.cluster import Cluster
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape


def cluster(name: str) -> Cluster:
    """A preset of ``conf/cluster``."""
    found: Cluster = preset("cluster", name, Cluster)
    return found


def model(name: str) -> ModelShape:
    """A preset of ``conf/model``."""
    found: ModelShape = preset("model", name, ModelShape)
    return found


def task(num_gpus: int = 64, global_batch: int = 256) -> Task:
    """Plans may fill its devices."""
    return Task(
        shape=model("gpt_14_6b"),
        cluster=cluster("a800"),
        num_gpus=num_gpus,
        global_batch=global_batch,
        memory_margin=0.0,
    )


def llama_task(num_gpus: int, global_batch: int, precision: Precision = "bf16") -> Task:
    """Plans leave the usual room on its devices."""
    return Task(
        shape=model("llama_8b"),
        cluster=cluster("h100"),
        num_gpus=num_gpus,
        global_batch=global_batch,
        precision=precision,
    )

"""Linear layers in 8 bits, emulated on CPUs: every program's step is that of one process whose
layers torchao has converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from baselines import blocks
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.one_process import ROUNDED, OneProcess
from tests.gloo.cases import CPU, LLAMA, SGD, TEXT, request
from tests.gloo.gate_faults import find
from tests.gloo.subtle_faults import Fault, Place, Prepare, patched, unchanged
from tests.gloo.world import World
from zeropp.engine.layers import eight_bits
from zeropp.engine.layers.deferred import WeightGradStore, defer_weight_grads, save_early
from zeropp.engine.layers.eight_bits import EightBitProducts, to_8_bits
from zeropp.types.literals import Precision

pytest.importorskip("torchao", reason="torchao is not installed (pip install -e '.[fp8]')")

STEPS = 2
MODEL = LLAMA | {"hidden": 32, "ffn": 64, "vocab": 256, "layers": 4}
TOPOLOGIES: list[tuple[int, dict[str, Any]]] = [
    (2, {"name": "zeropp", "shard": 2}),
    (2, {"name": "zeropp", "pp": 2}),  # delays weight gradients
    (4, {"name": "zeropp", "pp": 2, "shard": 2, "recompute": "full", "recompute_blocks": 1}),
    (4, {"name": "zeropp", "pp": 2, "replicate": 2, "replicate_zero": 1, "recompute": "selective"}),
    (2, {"name": "fsdp", "shard": 2}),
    (2, {"name": "torch_pp", "pp": 2, "schedule": "1f1b"}),
]


def apart(spec: RunSpec, gathers_casts: bool = False) -> dict[Precision, float]:
    """On a rank: how far the updates of its parameters are from those of one process in 8 and in
    16 bits, in the worst step, relative to these; ``gathers_casts``: FSDP2 gathers 8 bits."""
    plan, batches = spec.plan(), open_batches(spec)
    convert = partial(to_8_bits, gathers_casts=gathers_casts)
    with mock.patch.object(blocks, "to_8_bits", lambda block, device, **_: convert(block, device)):
        trainer = CONTENDERS[spec.contender.name].build(plan, SGD, CPU, spec.seed)
    ours: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        before = {name: p.clone() for name, p in trainer.full_parameters()}
        trainer.step(*local_batch(batches, plan.layout, step, CPU))
        ours.append({name: p - before[name] for name, p in trainer.full_parameters()})
    found: dict[Precision, float] = {}
    kinds: tuple[Precision, ...] = ("fp8", "bf16")
    for kind in kinds:
        alone = OneProcess(replace(spec, precision=kind), batches, CPU, ROUNDED[kind])
        theirs = alone.train(SGD, STEPS).updates
        found[kind] = max(
            _norm(mine[n] - right[n] for n in mine) / _norm(right[n] for n in mine)
            for mine, right in zip(ours, theirs, strict=True)
        )
    return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize(("ranks", "contender"), TOPOLOGIES, ids=str)
def test_a_step_in_8_bits_is_that_of_one_converted_process(
    world: World, ranks: int, contender: dict[str, Any]
) -> None:
    spec = request(ranks, contender, model=MODEL, data=TEXT, precision="fp8")
    for found in world.run(apart, spec, size=ranks):
        assert found["fp8"] < 0.001 < 0.03 < found["bf16"]


def test_fsdp2_gathers_weights_that_it_casts_from_its_masters(world: World) -> None:
    """The converted process casts their bf16 copies: this rounds some weights to a neighbour."""
    spec = request(2, {"name": "fsdp", "shard": 2}, model=MODEL, data=TEXT, precision="fp8")
    for found in world.run(apart, spec, True, size=2):
        assert 0.001 < found["fp8"] < 0.8 * found["bf16"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_delayed_weight_gradients_are_torchaos_own(bias: bool, early: bool) -> None:
    torch.manual_seed(0)
    sides = [(32, 64), (64, 32), (32, 24)]  # the last one stays in 16 bits
    plain = nn.Sequential(*(nn.Linear(*side, bias=bias) for side in sides)).bfloat16()
    theirs, ours = (to_8_bits(deepcopy(plain), CPU) for _ in range(2))
    store = WeightGradStore()
    assert len(defer_weight_grads([ours], store)) == 3
    if early:
        save_early([ours])
    inputs = [torch.randn(2, 16, 32, generator=torch.manual_seed(1)).bfloat16() for _ in range(2)]
    for model, x in zip((theirs, ours), inputs, strict=True):
        loss = model(x.requires_grad_()).square().mean()
        store.begin(0)
        loss.backward()
        store.end()
    delayed = [parameter for parameter in ours.parameters() if parameter.dim() == 2]
    assert all(weight.grad is None for weight in delayed)
    store.run(0)
    (right_x, own_x), pairs = inputs, zip(theirs.parameters(), ours.parameters(), strict=True)
    for right, own in [(right_x, own_x), *pairs]:
        assert right.grad is not None and own.grad is not None  # noqa: PT018
        assert torch.equal(right.grad, own.grad)


def converting(part: str) -> Fault:
    """The engine converts otherwise than it should: no block, all but the first, or by row."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        blocks = 0

        def convert(block: nn.Module, device: torch.device) -> nn.Module:
            nonlocal blocks
            blocks += 1
            if part == "none" or (part == "others" and blocks == 1 and place.pp == 0):
                return block
            recipe = "rowwise" if part == "rows" else "tensorwise"
            with mock.patch.object(eight_bits, "_RECIPE", recipe):
                return to_8_bits(block, device)

        with mock.patch.object(eight_bits, "to_8_bits", convert):
            yield unchanged

    return fault


FAULTS: dict[str, Fault] = {
    "no block converted": converting("none"),
    "one block not converted": converting("others"),
    "a scale per row": converting("rows"),
    "products in bf16": patched(EightBitProducts, "output", lambda *_: lambda _, x, w: x @ w.t()),
    "gradients of inputs in bf16": patched(
        EightBitProducts, "input_gradient", lambda *_: lambda _, grad, w: grad @ w
    ),
}


def as_it_is(spec: RunSpec) -> list[RunSpec]:
    """The run's own part of the gate alone."""
    return [spec]


def find_here(spec: RunSpec, names: list[str]) -> dict[str, list[Any]]:
    """On a rank: ``find`` with the faults of conversions, in 8 bits alone."""
    with mock.patch.dict("tests.gloo.gate_faults._ALL", FAULTS):
        return find(spec, names, as_it_is)


@pytest.mark.faults
def test_the_part_of_the_gate_in_8_bits_finds_wrong_conversions(world: World) -> None:
    spec = request(2, {"name": "zeropp", "pp": 2}, precision="fp8", global_batch=8, seed=1)
    for found in world.run(find_here, spec, ["none", *FAULTS], size=2, timeout_s=480):
        assert found.pop("none") == []
        kinds = {name: [check.kind for check in failed] for name, failed in found.items()}
        assert kinds.keys() == FAULTS.keys()
        assert all("what 8 bits change (sgd, fp8)" in failed for failed in kinds.values()), kinds

"""The gate passes every contender as it is, and finds every fault that is injected into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from baselines.zeropp.contender import ZeroppKnobs
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from benchmarks.worker.data import local_batch, open_batches
from benchmarks.worker.gate import Expected, checks_of, gate_parts, order_checks
from tests.gloo.cases import CPU, TIED, request
from tests.gloo.gate_faults import (
    FAULTS,
    MEGATRON_FAULTS,
    SLICED_FAULTS,
    SUBTLE,
    find,
    gate_without_last_reduction,
)
from tests.gloo.world import WorkerError, World, on_ranks
from tests.unit.test_extending import registered_example
from tests.unit.toy_spec import mapping
from zeropp.choose.contender import Contender
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import OptimizerConfig

# Faults that need something which not every configuration has.
NEEDS = {
    "one data-parallel rank never updated": "dp",
    "one data-parallel rank's batch left out": "dp",
    "one reduction dropped": "dp",
    "one tensor-parallel rank never updated": "tp",
    "tied weights summed twice": "tied",
    "tied weights not summed": "tied",
    "other dropout masks": "dropout",
    **dict.fromkeys(MEGATRON_FAULTS, "interleaved"),
    "weights read before they are gathered": "gathered",
    "Megatron-Core's own Adam": "gathered",
}
# Those of one trainer's adapter.
ADAPTERS = {"baselines.megatron_core.trainer": {"interleaved", "gathered"}}


def knobs_of(contender: Contender[Any]) -> set[str]:
    return {field.name for field in fields(contender.knobs)}


def can_have(contender: Contender[Any]) -> set[str]:
    """What a contender can have of these. Without a pipeline every rank holds both ends of tied
    weights, so that there is nothing to sum."""
    knobs = knobs_of(contender)
    needs = {"dp"} if {"shard", "replicate"} & knobs else set()
    needs |= {need for knob, need in (("tp", "tp"), ("pp", "tied")) if knob in knobs}
    needs |= {"dropout"} if contender.reproduces_dropout else set()
    return needs | ADAPTERS.get(contender.trainer.partition(":")[0], set())


def likeness(contender: Contender[Any]) -> tuple[str, ...]:
    """Its trainer, and what it can have: one trainer may build several programs of a library."""
    return (contender.trainer, *sorted(can_have(contender)))


# Of contenders that are alike, which differ in what GPUs alone have, the first is met. A test
# holds that on CPUs the others have its plans.
ALIKE = {likeness(contender): contender for contender in reversed(CONTENDERS.values())}
CAN_HAVE = {contender.name: can_have(contender) for contender in ALIKE.values()}
# Every contender meets every fault in fp32. The gate of a bf16 run begins with its twin in fp32, so
# that there they meet one fault of each sort: of a gradient, of state, of a batch, and of every
# axis. ZeroPP meets the subtle faults in bf16, too.
OF_EACH_SORT = frozenset(
    {
        "a norm's gradient doubled",
        "gradients not zeroed",
        "targets of two microbatches swapped",
        "one reduction dropped",
        "one tensor-parallel rank never updated",
        "clipped per rank",
        "no weight decay",
    }
)
# Of the subtle faults, what bf16 rounds anyway: one more rounding of a gradient, of a moment, of
# scores, of logits, or of what is sent, which some contenders do on purpose.
HIDDEN_IN_BF16 = {
    "gradients in bf16",
    "moments in bf16",
    "softmax in bf16",
    "loss in bf16",
    "reductions sent in bf16",
}


DROPOUT = TIED | {"dropout": 0.1}


@dataclass(frozen=True)
class Setting:
    """A configuration of a contender, and what it has of what faults need."""

    ranks: int
    knobs: dict[str, Any]
    has: set[str]
    global_batch: int = 4  # every rank needs two microbatches: a fault leaves out one
    layers: int = 2  # a fault of an axis needs no more

    def needy(self, names: list[str]) -> list[str]:
        """Those of some faults that need something which this setting has."""
        return [name for name in names if NEEDS.get(name) in self.has]


@dataclass(frozen=True)
class Case:
    """A contender in one precision. Faults that need something are injected in the setting of
    ``axes`` that has it, all others on two ranks, because more processes find nothing more."""

    contender: str
    precision: str
    model: dict[str, Any]
    pair: Setting
    axes: tuple[Setting, ...]

    @property
    def rounds(self) -> list[tuple[Setting, list[str]]]:
        """Every setting, with the names of the faults that are injected there."""
        names = faults_of(self.contender, self.precision)
        free = ["none", *(name for name in names if name not in NEEDS)]
        return [(self.pair, free), *((one, ["none", *one.needy(names)]) for one in self.axes)]


def faults_of(contender: str, precision: str) -> list[str]:
    """The names of those that a contender meets if it can have them; those of Megatron-Core's
    adapter are the same in both precisions, and met in fp32."""
    if precision == "fp32":
        return [name for name in FAULTS if name != "none"]
    few = OF_EACH_SORT | {"other dropout masks"}
    return [name for name in FAULTS if name in few]


TWO_STAGES = Setting(2, {"pp": 2}, set(), 2, layers=3)
TORCH_STAGES = replace(TWO_STAGES, knobs={"pp": 2, "schedule": "1f1b"})
ZEROPP = Setting(4, {"pp": 2, "shard": 2}, {"dp", "tied", "dropout"})
FSDP = Setting(4, {"shard": 2, "replicate": 2}, {"dp"}, 8)
SHARDS = Setting(2, {"shard": 2}, {"dp"})
REPLICAS = Setting(2, {"pp": 1, "replicate": 2, "replicate_zero": 1}, {"dp"})
# Tensor parallelism on DTensors is slow on CPUs. So torch's pipelines meet the faults of data
# parallelism without it in fp32, and one of each axis with both in bf16; test_contenders.py trains
# with all three axes at once.
TORCH_SHARDS = Setting(4, {"pp": 2, "shard": 2, "schedule": "1f1b"}, {"dp"})
TORCH_TENSORS = Setting(4, {"pp": 2, "tp": 2, "schedule": "1f1b"}, {"tp", "tied"})
TORCH_BOTH = Setting(4, {"pp": 1, "tp": 2, "shard": 2, "schedule": "1f1b"}, {"dp", "tp"})
THREE_AXES = Setting(8, {"pp": 2, "tp": 2, "replicate_zero": 1}, {"dp", "tp", "tied"})
TWO_AXES = Setting(4, {"pp": 1, "tp": 2, "replicate": 2, "replicate_zero": 1}, {"dp", "tp"})
INTERLEAVED = Setting(
    4,
    {"tp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved_1f1b", "sequence_parallel": True},
    {"tp", "interleaved"},
    layers=4,
)
GATHERED = replace(REPLICAS, has={"dp", "gathered"})
CASES = [
    Case("zeropp", "fp32", DROPOUT, TWO_STAGES, (ZEROPP,)),
    Case("zeropp", "bf16", DROPOUT, TWO_STAGES, (ZEROPP,)),
    Case("torch_pp", "fp32", TIED, TORCH_STAGES, (TORCH_SHARDS, TORCH_TENSORS)),
    Case("torch_pp", "bf16", TIED, TORCH_STAGES, (TORCH_BOTH,)),
    Case("fsdp", "fp32", {}, SHARDS, (FSDP,)),
    Case("fsdp", "bf16", {}, SHARDS, (FSDP,)),
    Case("deepspeed", "fp32", TIED, TWO_STAGES, (THREE_AXES,)),
    Case("deepspeed", "bf16", {}, REPLICAS, (TWO_AXES,)),
    Case("megatron_core", "fp32", TIED, TWO_STAGES, (THREE_AXES, INTERLEAVED, GATHERED)),
    Case("megatron_core", "bf16", {}, REPLICAS, (TWO_AXES,)),
]


def case_by_knobs(contender: Contender[Any], precision: str) -> Case:
    """That of a contender which has none above: on two ranks, and with two on each of its axes."""
    knobs, needs = knobs_of(contender), can_have(contender)
    data = "shard" if "shard" in knobs else "replicate"
    axes = dict.fromkeys(sorted({"pp", "tp", data} & knobs), 2)
    pair = TWO_STAGES if "pp" in knobs else Setting(2, {data: 2}, {"dp"})
    model = DROPOUT if "dropout" in needs else TIED if "tied" in needs else {}
    return Case(contender.name, precision, model, pair, (Setting(2 ** len(axes), axes, needs),))


NAMED = {case.contender for case in CASES}
CASES += [
    case_by_knobs(contender, precision)
    for contender in ALIKE.values()
    if contender.name not in NAMED
    for precision in ("fp32", "bf16")
]


def spec_of(case: Case, setting: Setting) -> RunSpec:
    return request(
        setting.ranks, {"name": case.contender, **setting.knobs}, precision=case.precision,
        model={"layers": setting.layers, **case.model}, global_batch=setting.global_batch,
        optimizer={"weight_decay": 0.1, "clip_norm": 1.0},
    )  # fmt: skip


def label(case: Case, setting: Setting) -> str:
    """A test's name: the contender, the precision, and what the setting has."""
    has = "any" if setting is case.pair else "+".join(sorted(setting.has))
    return f"{case.contender}-{case.precision}-{has}"


ROUNDS = [(case, setting, faults) for case in CASES for setting, faults in case.rounds]


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """All but ZeroPP in fp32 belongs to the sweep, which takes long."""
    return [] if case is CASES[0] else [pytest.mark.faults]


@pytest.mark.parametrize(
    ("case", "setting", "faults"),
    [pytest.param(*one, id=label(*one[:2]), marks=marks(one[0])) for one in ROUNDS],
)
def test_the_gate_finds_every_fault(
    world: World, case: Case, setting: Setting, faults: list[str]
) -> None:
    assert len(faults) > 1
    spec = spec_of(case, setting)
    layout = spec.plan().layout
    axes = {axis for axis, size in (("dp", layout.dp), ("tp", layout.tp)) if size > 1}
    assert axes == setting.has & {"dp", "tp"}
    for found in world.run(find, spec, faults, size=setting.ranks, timeout_s=480):
        assert list(found) == faults
        assert found.pop("none") == []
        assert [name for name, failed in found.items() if not failed] == []


def test_the_gate_finds_slices_of_logits_with_other_weights(world: World) -> None:
    setting = replace(TWO_STAGES, knobs={"pp": 2, "logits_slices": 3})
    spec = spec_of(Case("zeropp", "fp32", TIED, setting, ()), setting)
    for found in world.run(find, spec, ["none", *SLICED_FAULTS], size=2):
        assert found.pop("none") == []
        assert [name for name, failed in found.items() if not failed] == []


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", {"kind": "sgd", "lr": 0.0}), ("bf16", {"lr": 0.0}), ("fp32", {"lr": 1e-7})],
)
def test_an_optimizer_that_would_hardly_move_is_compared_too(
    world: World, precision: str, optimizer: dict[str, Any]
) -> None:
    spec = spec_of(Case("zeropp", precision, DROPOUT, TWO_STAGES, ()), TWO_STAGES)
    spec = replace(spec, optimizer=OptimizerConfig(**optimizer))
    for found in world.run(find, spec, ["none", "learning rate a fifth low"], size=2):
        assert found["none"] == []
        assert found["learning rate a fifth low"] != []


def test_what_is_not_a_number_is_an_infinite_error_that_json_can_express() -> None:
    spec = spec_of(CASES[0], TWO_STAGES)
    names = ("loss", "gradient norm", "1.weight")
    expected = Expected(
        optimizer=OptimizerConfig(),
        shapes={"1.weight": torch.Size([1])},
        sizes=[dict.fromkeys(names, math.nan)] * 3,
        rounding=[dict.fromkeys(names, (0.0, 0.0))] * 3,
        updates=[],
    )
    observed = [dict.fromkeys(names, (math.inf, math.inf))] * 3
    checks = checks_of(spec, expected, observed)
    assert [check.error for check in checks] == [1e12] * 4
    assert all(check.error > check.limit for check in checks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.contender}-{case.precision}")
def test_every_contender_meets_every_fault_that_it_can_have(case: Case) -> None:
    meets_every_fault(case, CAN_HAVE[case.contender])


def test_so_does_the_contender_of_docs_extending(monkeypatch: pytest.MonkeyPatch) -> None:
    example = registered_example(monkeypatch)
    for precision in ("fp32", "bf16"):
        case = case_by_knobs(example, precision)
        meets_every_fault(case, can_have(example))
        for setting, _ in case.rounds:
            assert spec_of(case, setting).plan().layout.world == setting.ranks


def meets_every_fault(case: Case, needs: set[str]) -> None:
    findable_here = faults_of(case.contender, case.precision)
    names = [name for name in findable_here if name not in NEEDS or NEEDS[name] in needs]
    assert {name for _, faults in case.rounds for name in faults} == {"none", *names}


def test_what_is_not_met_has_the_plans_of_one_that_is() -> None:
    for contender in CONTENDERS.values():
        met = ALIKE[likeness(contender)]
        for case in CASES:
            if case.contender == met.name:
                for setting, _ in case.rounds:
                    plan = spec_of(case, setting).plan()
                    three = plan.layout.tp > 1 and plan.layout.pp > 1
                    if contender.name == "deepspeed_3d" and not three:
                        continue
                    other = spec_of(replace(case, contender=contender.name), setting).plan()
                    assert replace(other, contender=met.name) == plan


def test_cases_cover_contenders_and_needs() -> None:
    pairs = {(name, precision) for name in CAN_HAVE for precision in ("fp32", "bf16")}
    assert sorted((case.contender, case.precision) for case in CASES) == sorted(pairs)
    assert set(FAULTS) >= OF_EACH_SORT
    assert set().union(*CAN_HAVE.values()) == set(NEEDS.values())


@pytest.mark.faults
def test_the_gate_of_a_bf16_run_finds_subtle_faults(world: World) -> None:
    setting = Setting(2, {"pp": 1, "shard": 2}, set(), 8)
    spec = spec_of(Case("zeropp", "bf16", {}, setting, ()), setting)
    names = ["none", *(name for name in SUBTLE if name not in HIDDEN_IN_BF16)]
    assert len(names) - 1 >= 0.8 * len(SUBTLE)
    for found in world.run(find, spec, names, size=2, timeout_s=480):
        assert found.pop("none") == []
        assert [name for name, failed in found.items() if not failed] == []


def test_a_bf16_run_that_cannot_be_planned_in_fp32_is_compared_in_bf16_alone() -> None:
    spec = spec_of(Case("zeropp", "bf16", {}, SHARDS, ()), SHARDS)
    assert [part.precision for part in gate_parts(spec)] == ["fp32", "bf16"]
    narrow = gate_parts(replace(spec, precision="fp8"))
    assert [part.precision for part in narrow] == ["fp32", "bf16", "fp8"]
    with mock.patch.object(RunSpec, "plan", side_effect=InfeasibleError("no")):
        assert gate_parts(spec) == [spec]
    sent = replace(spec, contender=ZeroppKnobs(**{**vars(spec.contender), "reduce_dtype": "bf16"}))
    assert [vars(part.contender)["reduce_dtype"] for part in gate_parts(sent)] == ["fp32", "bf16"]


def test_megatron_core_without_its_last_reduction_ends_with_a_message(world: World) -> None:
    spec = spec_of(Case("megatron_core", "fp32", {}, REPLICAS, ()), REPLICAS)
    with pytest.raises(WorkerError, match="multiple communication calls outstanding"):
        world.run(gate_without_last_reduction, spec, size=2)


@pytest.mark.parametrize("name", [name for name, needs in CAN_HAVE.items() if "tp" in needs])
def test_a_reduction_is_dropped_where_both_axes_are(name: str) -> None:
    both = [
        setting
        for case, setting, faults in ROUNDS
        if case.contender == name and "one reduction dropped" in faults
    ]
    assert any(setting.has >= {"dp", "tp"} for setting in both)


@pytest.mark.parametrize(
    ("noise", "order", "passes"),
    [
        *((0.0, 0.0, True), (1e-3, 0.0, True), (0.0, 1e-3, False), (1e-4, 1e-3, False)),
        *((math.nan, 0.0, False), (0.0, math.nan, False)),
    ],
)
@on_ranks(1)
def test_the_order_of_microbatches_is_told_from_attention_that_adds_in_no_order(
    noise: float, order: float, passes: bool
) -> None:
    builds = 0

    def build(*_: object) -> Any:
        nonlocal builds
        builds += 1
        parameter, drawn = torch.zeros(1000), torch.randn(2, 1000)

        def take(inputs: torch.Tensor, _: torch.Tensor) -> None:
            is_rolled = not torch.equal(inputs[0], first)
            parameter.add_(1 + noise * drawn[0] + is_rolled * order * drawn[1])

        return SimpleNamespace(step=take, full_parameters=lambda: [("weight", parameter)])

    torch.manual_seed(0)
    spec = spec_from_mapping(
        mapping() | {"num_gpus": 1, "precision": "bf16", "contender": {"name": "zeropp"}}
    )
    batches = open_batches(spec)
    first = local_batch(batches, spec.plan().layout, 0, CPU)[0][0]
    contender: Any = SimpleNamespace(build=build)
    (check,) = order_checks(spec, contender, batches, CPU, OptimizerConfig(kind="sgd"))
    assert (check.error <= check.limit) == passes
    assert builds == (2 if not noise + order or math.isnan(noise + order) else 3)

"""Wrong calls of ``parallelize``: one error, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zeropp
from tests.gloo.small_layers import WIDTH, built, data, error_of, linear, seeded
from tests.gloo.world import World


def wrong_calls() -> dict[str, dict[str, Any]]:
    """Arguments that ``parallelize`` refuses, on this rank; what they do not set is right."""
    layers, rank = seeded([linear] * 4), dist.get_rank()
    lent: Any = layers[1]
    other = [*layers[:3], nn.Linear(WIDTH, WIDTH).double()]
    other[3].weight = layers[0].weight
    tuples = seeded([linear, lambda: nn.LSTM(WIDTH, WIDTH), linear, linear])
    optimizer = zeropp.OptimizerConfig("sgd", lr=0.1 + rank)
    return {
        "same layer twice": {"layers": [layers[0], layers[1], layers[1], layers[3]]},
        "shared parameter": {"layers": other},
        "short weights": {"weights": [1.0, 1.0]},
        "zero weight": {"weights": [1.0, 0.0, 1.0, 1.0]},
        "tied to nothing": {"tied": ((0, "weight"), (3, "no_such"))},
        "tied in one layer": {"tied": ((1, "weight"), (1, "bias"))},
        "tied to no parameter of a function": {
            "layers": [*layers[:3], lambda: linear().double()],
            "tied": ((0, "weight"), (3, "wieght")),
        },
        "tied to another shape": {"tied": ((0, "weight"), (3, "bias"))},
        "tied to a frozen one": {
            "layers": [*layers[:3], lambda: linear().double().requires_grad_(False)],
            "tied": ((0, "weight"), (3, "weight")),
        },
        "16 bits": {
            "layers": [layer.bfloat16() for layer in seeded([linear] * 4)],
            "sample": data()[0][:1].bfloat16(),
        },
        "other values": {"shard": 2},
        "other rate": {"optimizer": optimizer, "pp": 2},
        "other knob": {"pp": 2, "unit": 1 + rank},
        "unknown knob": {"pp": 2, "tp": 2},
        "misspelled knob": {"global_bacth": 4},
        "no CUDA device": {"device": "cuda:7"},
        "no device": {"device": "gpu"},
        "two functions of one module": {"layers": [linear_of_64, lambda: lent, lambda: lent]},
        "two functions around one parameter": {
            "layers": [linear_of_64, lambda: nn.Sequential(lent), lambda: nn.Sequential(lent)]
        },
        "function and module": {"layers": [*layers[:2], lambda: lent]},
        "function of tensors": {"layers": [*layers[:2], torch.tanh]},
        "lambda of tensors": {"layers": [*layers[:2], lambda x: x * 2]},
        "clamp in place": {"layers": in_the_middle(Clamping(data=True))},
        "clamp under no_grad": {"layers": in_the_middle(Clamping(data=False))},
        "other data": {"layers": in_the_middle(Renewing())},
        "tuple": {"layers": tuples, "pp": 2},
        "no layers": {"layers": []},
        "one layer": {"layers": layers[0]},
        "no batch": {"global_batch": 0},
        "half a row": {"global_batch": 2.5},
        "no sample": {"sample": data()[0][:0]},
        "optimizer class": {"optimizer": torch.optim.AdamW},
        "optimizer instance": {"optimizer": torch.optim.AdamW(layers[0].parameters())},
        "no optimizer": {"optimizer": lambda groups: None},
        "half a seed": {"dropout_seed": 0.5},
        "no seed": {"layers": in_the_middle(nn.Dropout(0.1)), "dropout_seed": None},
        "no schedule": {"lr_schedule": 0.1},
        "seconds": {"timeout": 5},
        "wrong width": {"sample": torch.zeros(1, WIDTH + 1, dtype=torch.float64)},
        "too many ranks": {"pp": 3},
        "small cap": {"pp": 2, "chunks": 2, "unit": 4, "activation_cap": 3},
        "mesh and degree": {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), "pp": 4},
        "mesh of another axis": {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))},
        "no values": {"layers": [layers[0], linear().double().to("meta"), *layers[2:]]},
        "in place": {"layers": in_the_middle(nn.ReLU(inplace=True)), "recompute": "full"},
        "product in place": {
            "layers": in_the_middle(nn.Sequential(linear(), nn.ReLU(inplace=True))),
            "recompute": "selective",
        },
        "layer of another's parameter": {"layers": [*layers[:3], Borrowing(layers[0])]},
        "layer of another's parameter in a closure": {
            "layers": [*layers[:3], Calling(lambda x: x @ lent.weight)]
        },
        "no loss": {"loss_fn": None},
        "numbers as layers": {"layers": [1, 2]},
        "buffers twice": {"layers": in_the_middle(Counting()), "recompute": "full"},
        "other groups": {"group_of": (lambda name, one: "all") if rank else by_size},
        "other schedule": {"lr_schedule": lambda step: 1.0 + rank},
        "other optimizer": {"optimizer": lambda g: torch.optim.SGD(g["all"], lr=0.1 + rank)},
        "other loss": {"loss_fn": F.l1_loss if rank else F.mse_loss},
        "other code of a loss": {"loss_fn": twice_on(rank)},
        "other loss module": {"loss_fn": nn.MSELoss() if rank else nn.L1Loss()},
        "other argument of a loss": {"loss_fn": partial(F.smooth_l1_loss, beta=1.0 + rank)},
        "recurrent": {"layers": in_the_middle(nn.GRUCell(WIDTH, WIDTH)), "recompute": "selective"},
    }


def twice_on(rank: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss function that is twice as large on ranks other than the first."""
    if rank:
        return lambda output, target: 2 * F.mse_loss(output, target)
    return lambda output, target: F.mse_loss(output, target)


class Borrowing(nn.Module):
    """Reads the weight of a layer that it keeps where torch does not see it."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lenders = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lenders[0].weight  # type: ignore[operator]


class Clamping(nn.Linear):
    """Clamps its weight in its forward."""

    def __init__(self, *, data: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.by_data = data

    def forward(self, x: Tensor) -> Tensor:
        if self.by_data:
            self.weight.data.clamp_(-0.05, 0.05)
        else:
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Renewing(nn.Linear):
    """Puts other numbers into the place of its weight in its forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(x)


class Counting(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        calls: Any = self.calls
        calls += 1
        return x.tanh()


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def linear_of_64() -> nn.Module:
    """A plain layer in fp64, as a function that is called where it is needed makes it."""
    return linear().double()


def by_size(name: tuple[int, str], parameter: nn.Parameter) -> str:
    """Two groups of parameters."""
    return "wide" if parameter.dim() > 1 else "narrow"


def in_the_middle(layer: nn.Module) -> list[nn.Module]:
    """Four layers with this one among them."""
    return seeded([linear, linear, lambda: layer, linear])


def refused(case: str) -> str:
    """What ``parallelize`` says to one of the wrong calls, on this rank."""
    layers = seeded([linear] * 4)
    if case == "other values":
        with torch.no_grad():
            next(layers[2].parameters())[0, 0] += float(dist.get_rank())
    arguments = {"layers": layers, **wrong_calls()[case]}
    if not {"pp", "shard", "mesh"} & set(arguments):
        arguments["pp"] = 2
    return error_of(lambda: built(arguments.pop("layers"), **arguments))


REFUSALS = {
    "same layer twice": "layers[2]: shares 'weight' with layers[1]",
    "shared parameter": "layers[3]: shares 'weight' with layers[0]",
    "short weights": "weights: 2 numbers for 4 layers",
    "zero weight": "every weight must be more than 0",
    "tied to nothing": "layers[3] has no parameter 'no_such'",
    "tied to no parameter of a function": "layers[3] has no parameter 'wieght'",
    "tied to another shape": "both must have the same shape and type, and both be trained",
    "tied to a frozen one": "trained=False); both must have the same shape and type",
    "16 bits": "'weight' is torch.bfloat16, but precision='fp32' computes in fp32",
    "tied in one layer": "must name parameters of two layers, which are numbered from 0 to 3",
    "other values": "layers[0]: 'weight' is not the same on ranks 0 and 1",
    "other rate": "optimizer: ranks differ: rank 0 has",
    "other knob": "unit: ranks differ: rank 0 has 1 where rank 1 has 2; every",
    "unknown knob": "TypeError: parallelize: got an unexpected keyword argument 'tp' (see zeropp."
    "engine.settings.Settings)",
    "misspelled knob": "unexpected keyword argument 'global_bacth' (did you mean 'global_batch'?)",
    "tuple": "layers[1]: returns tuple",
    "no layers": "layers=[]",
    "one layer": "layers: must be a list of modules",
    "no batch": "global_batch=0: must be at least 1",
    "half a row": "global_batch=2.5: must be a whole number",
    "no sample": "sample: must be a tensor of inputs",
    "optimizer class": "must be a OptimizerConfig or a function of (Mapping)",
    "optimizer instance": "optimizer=a AdamW: must be a OptimizerConfig or a function of (Mapping)",
    "no optimizer": "optimizer: gives NoneType, but a torch.optim.Optimizer is needed, or a list",
    "half a seed": "dropout_seed=0.5: must be a whole number",
    "no seed": "dropout_seed=None: layers[2] draws random numbers (give a seed)",
    "no schedule": "lr_schedule=0.1: must be a function of (int)",
    "seconds": "timeout=5: must be a timedelta",
    "wrong width": "layers[0]: cannot be called",
    "too many ranks": "must be the number of ranks, 2",
    "small cap": "activation_cap=3: a unit of 4 microbatches in 2 chunks needs at least 5",
    "mesh and degree": "pp=4: the mesh has it, too",
    "mesh of another axis": "they must be named among",
    "no values": "layers[1]: 'weight' is on the meta device and has no values",
    "in place": "layers[2]: cannot be recomputed with recompute='full': one of the variables",
    "product in place": "layers[2]: cannot be recomputed with recompute='selective': Tensor cached",
    "layer of another's parameter": "layers[3]: reads 'weight' of layers[0], which only that",
    "layer of another's parameter in a closure": "layers[3]: reads 'weight' of layers[1], which",
    "no loss": "loss_fn=None: must be a function of (output of the last layer, targets)",
    "numbers as layers": "layers[0]: must be a module, or a function that makes one, but is int",
    "buffers twice": "its forward changes the buffer 'calls', and would do so twice",
    "no CUDA device": "InfeasibleError: device='cuda:7': ",
    "no device": "InfeasibleError: device='gpu': is none of torch's devices",
    "two functions of one module": "layers[2]: shares 'weight' with layers[1], but layers are trai",
    "two functions around one parameter": "layers[2]: shares '0.weight' with layers[1], but layer",
    "function and module": "layers[2]: shares 'weight' with layers[1], but layers are trained",
    "function of tensors": "layers[2]: cannot be made, but its sizes are found so: ",
    "lambda of tensors": "a function without arguments that makes one: put a function of tensors i",
    "clamp in place": "layers[2]: its forward changes 'weight', which no rank would keep",
    "clamp under no_grad": "layers[2]: its forward changes 'weight', which no rank would keep",
    "other data": "layers[2]: its forward changes 'weight', which no rank would keep",
    "other groups": "group_of: ranks differ: rank 0 has",
    "other schedule": "lr_schedule: ranks differ: rank 0 has [1.0, 1.0] where",
    "other optimizer": "optimizer: ranks differ: rank 0 has",
    "other loss": "loss_fn: ranks differ: rank 0 has",
    "other code of a loss": "loss_fn: ranks differ: rank 0 has twice_on",
    "other loss module": "loss_fn: ranks differ: rank 0 has L1Loss() where rank 1 has MSELoss()",
    "other argument of a loss": "loss_fn: ranks differ: rank 0 has",
    "recurrent": "layers[2]: GRUCell cannot be recomputed with recompute='selective'",
}


def wrong_moments() -> tuple[dict[str, str], float]:
    """What a model says to calls in which it could not train rightly, and the loss of a step after
    all of them."""
    said = {}
    with torch.inference_mode():
        said["made in inference mode"] = error_of(lambda: built(seeded([linear] * 4), pp=2))
    with built(seeded([linear] * 4), pp=2) as model:
        inputs, targets = data()
        with torch.autocast("cpu", torch.bfloat16):
            said["autocast"] = error_of(lambda: model.train_step(inputs, targets))
            said["evaluation in autocast"] = error_of(lambda: model.eval_step(inputs, targets))
        with torch.inference_mode():
            said["inference mode"] = error_of(lambda: model.train_step(inputs, targets))
            said["loading in inference mode"] = error_of(lambda: model.load("nowhere"))
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        said["graph"] = error_of(lambda: model.train_step(inputs * scale, targets))
        said["sparse"] = error_of(lambda: model.train_step(inputs.to_sparse(), targets))
        said["update of one's own"] = error_of(lambda: model.optimizer.step())
        return said, float(model.train_step(inputs, targets).loss)


def test_a_call_at_a_wrong_moment_is_an_error_and_no_more(world: World) -> None:
    found = world.run(wrong_moments, size=2)
    autocast = "RuntimeError: train_step, eval_step: torch.autocast is enabled"
    for said, loss in found:
        assert said == found[0][0]
        assert said["made in inference mode"].startswith("RuntimeError: parallelize: torch.infer")
        assert said["autocast"].startswith(autocast)
        assert said["evaluation in autocast"].startswith(autocast)
        assert said["inference mode"].startswith("RuntimeError: train_step: gradients are disabled")
        assert said["loading in inference mode"].startswith("RuntimeError: load: torch.inference_")
        assert said["graph"].startswith("ValueError: inputs: was computed from something that")
        assert said["sparse"].startswith("TypeError: inputs: must be a dense tensor")
        assert said["update of one's own"].startswith("RuntimeError: optimizer.step: train_step")
        assert len(said) == 8
        assert loss > 0


def loss_that_reads_a_layer() -> str:
    """What the first step says to a loss with a penalty on the weights of a layer."""
    layers = seeded([linear] * 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight: Any = layers[1].weight
        return F.mse_loss(output, target) + 0.1 * weight.square().sum()  # type: ignore[no-any-return]

    with built(layers, pp=2, loss_fn=loss) as model:
        return error_of(lambda: model.train_step(*data()))


def test_a_loss_that_reads_a_layer_is_refused(world: World) -> None:
    for said in world.run(loss_that_reads_a_layer, size=2):
        assert said.startswith("InfeasibleError: loss_fn: reads 'weight' of layers[1], which only")


def a_rate_of_its_own() -> list[str]:
    """What steps say while one rank alone has another learning rate, and afterwards."""
    with built(seeded([linear] * 4), pp=2) as model:
        group = model.optimizer.param_groups[0]
        rate, said = group["lr"], []
        for factor in (float(dist.get_rank()), 1.0):
            group["lr"] = rate * factor
            said.append(error_of(lambda: model.train_step(*data())))
        return said


def test_a_learning_rate_that_one_rank_has_is_refused_in_the_step(world: World) -> None:
    for refused, accepted in world.run(a_rate_of_its_own, size=2):
        assert refused.startswith("ValueError: train_step: the optimizer of ranks [1] has other")
        assert accepted == ""


def wrong_arguments() -> list[str]:
    """What calls say that give something without a name, and that leave something out."""
    layers, sample = seeded([linear] * 2), data()[0][:1]
    parallelize: Any = zeropp.parallelize
    return [
        error_of(lambda: parallelize(layers, F.mse_loss, sample, 4)),
        error_of(lambda: parallelize(layers, F.mse_loss, sample=sample)),
    ]


def test_arguments_need_their_names(world: World) -> None:
    (said,) = world.run(wrong_arguments, size=1)
    assert said[0].startswith("TypeError: parallelize: takes two positional arguments, layers and")
    assert said[1] == "TypeError: parallelize: global_batch must be given"


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_call_is_one_error_on_every_rank(world: World, case: str) -> None:
    said = world.run(refused, case, size=2)
    expected = REFUSALS[case].replace("layers[0]: 'w", "layers[2]: 'w")
    assert all(expected in message for message in said), said
    assert all("\n" not in message for message in said)
    assert len(set(said)) == 1

"""``zeropp.check`` finds what differs from one process, and nothing where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.gloo.world import World

WIDTH, ROWS = 8, 8


class Shift(nn.Module):
    """Adds the token before, times a weight that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.roll(1, 1)


class Teller(nn.Linear):
    """Tells a ``Listener`` a number beside its output."""

    told: Any = None

    def forward(self, x: Tensor) -> Tensor:
        Teller.told = x.detach().mean() if not x.is_meta else None
        return super().forward(x)


class Listener(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if Teller.told is None else 1.0 + Teller.told)


class Late(nn.Linear):
    """Raises where it runs after the stage before in another process."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta and Teller.told is None:
            raise ValueError("nothing was told")
        return super().forward(x)


class Behind(nn.Module):
    """Changes what a product has given behind torch's back, which keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        y.data.mul_(0.5)
        return x + self.second(y.square())  # type: ignore[no-any-return]


class Evaluated(Listener):
    """Listens in evaluation mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x) if self.training else super().forward(x)


class Noisy(nn.Linear):
    """Draws otherwise than by F.dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x)


class Clamping(nn.Linear):
    """Clamps its weight in its forward."""

    by_data = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.by_data else self.weight).clamp_(-0.05, 0.05)
        return super().forward(x)


class ClampingData(Clamping):
    by_data = True


class Renewing(nn.Linear):
    """Puts other numbers into the place of its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(x)


CHANGING = {"clamping": Clamping, "clamping data": ClampingData, "renewing": Renewing}


class Growing:
    """Makes a layer with larger weights at every call."""

    calls = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        made = nn.Linear(WIDTH, WIDTH)
        made.weight.data.mul_(self.calls)
        return made


class Fading:
    """A loss that depends on how often it was called."""

    calls = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(output, targets) * self.calls


class Normed(torch.optim.SGD):
    """Changes the learning rate a little by the norm of all that it updates."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        (group,) = self.param_groups
        rate = group["lr"]
        group["lr"] *= 1 + 1e-3 * sum(float(x.square().sum()) for x in group["params"]) ** 0.5
        super().step(closure)
        group["lr"] = rate


class Coupled(torch.optim.SGD):
    """Scales all gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        norm = sum(float(one.square().sum()) for one in gradients) ** 0.5
        for one in gradients:
            one.div_(norm)
        super().step(closure)


class Counting(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Slowing(Counting):
    """Gives less with every call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) / (1 + self.calls)


class Scaled(nn.Module):
    """Has a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale[:, None, None]  # type: ignore[no-any-return]


class ByToken(nn.Module):
    """Has a keyword input with a number per token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale[..., None]  # type: ignore[no-any-return]


class ByRow(nn.Module):
    """Has a keyword input with a list of numbers per row, which may be as long as the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, listed: Tensor) -> Tensor:
        return self.linear(x) * listed.sum(1)[:, None, None]  # type: ignore[no-any-return]


class Handing(nn.Module):
    """Hands all that it takes to the layer inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        return self.inner(x, **named)  # type: ignore[no-any-return]


def weighted(output: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """A mean with weights of rows."""
    return ((output - targets).square() * weight[:, None, None]).mean()


def weighted_sum(output: Tensor, targets: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A sum with weights of rows and of tokens."""
    weights = (weight[:, None] + scale)[..., None]
    return ((output - targets).square() * weights).sum() / 100


def limited(groups: Any) -> torch.optim.Optimizer:
    """SGD, before which every number of a gradient is limited, as is right on shards, too."""
    optimizer = torch.optim.SGD(groups["all"], lr=0.1)

    def limit(*_: object) -> None:
        nn.utils.clip_grad_value_(groups["all"], 1e-3)

    optimizer.register_step_pre_hook(limit)
    return optimizer


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the numbers that count, and how many do."""
    counts = targets > -9
    return (output - targets)[counts].square().sum(), counts.sum()


def found(kind: str, degrees: dict[str, Any]) -> str:
    torch.manual_seed(0)
    Teller.told = None
    listener = {"raises": Late, "evaluated": Evaluated}.get(kind, Listener)
    inner: list[nn.Module] = [Teller(WIDTH, WIDTH), listener(WIDTH, WIDTH)]
    if kind == "slice":
        inner = [Shift()]
    elif kind == "behind":
        inner = [Behind()]
    elif kind in CHANGING:
        inner = [CHANGING[kind](WIDTH, WIDTH)]
    elif kind == "noise":
        inner = [Noisy(WIDTH, WIDTH)]
    elif kind in ("right", "norm", "refused"):
        inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))]
    elif (
        kind in ("begins", "fading", "update", "mixing head", "by token", "dropping head")
        or "listed" in kind
    ):
        inner = []
    elif kind == "attention":  # which evaluations run by a kernel of its own in one process
        inner = [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)]
    if optimizer := {"norm": Coupled, "update": Normed}.get(kind):
        degrees = {**degrees, "optimizer": lambda groups: optimizer(groups["all"], lr=0.1)}
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH), *inner, nn.Linear(WIDTH, WIDTH)]
    batches: list[Any] = [tuple(torch.randn(2, ROWS, 4, WIDTH)) for _ in range(2)]
    loss: Any = Fading() if kind == "fading" else nn.functional.mse_loss
    if kind == "odd":  # and the second batch counts nothing
        layers[1] = Counting()
        loss = squares
        batches[1][1].fill_(-10.0)
        degrees = {**degrees, "loss_reduction": "tokens", "optimizer": limited}
    elif kind == "begins":
        layers[1] = Growing()
    elif kind == "twice":
        layers = [nn.Linear(WIDTH, WIDTH), Slowing(), nn.Linear(WIDTH, WIDTH)]
    elif kind == "counted":
        layers = [nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH)]
    elif kind == "named":
        layers[1], loss = Handing(Scaled()), weighted
        named = {"scale": torch.rand(ROWS), "weight": torch.rand(ROWS)}
        degrees = {**degrees, "sample_keywords": {name: x[:2] for name, x in named.items()}}
        batches = [(*batch, named) for batch in batches]
    elif kind == "eight":  # a block that is itself a linear layer
        layers = [nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, WIDTH)]
    elif kind == "none":
        batches = []
    elif kind == "by token":
        named = {"scale": torch.rand(ROWS, 4), "weight": torch.rand(ROWS)}
        layers, loss = [*layers, ByToken()], weighted_sum
        degrees |= {"sample_keywords": {n: x[:2] for n, x in named.items()}}
        batches = [(*batch, named) for batch in batches]
    elif kind in ("listed", "listed by chance"):  # as long as the sample, or as a batch
        tokens = 4 if kind == "listed" else 6
        named = {"listed": torch.rand(ROWS, tokens)}
        layers, loss = [*layers, ByRow()], squares
        degrees |= {"sample_keywords": {"listed": named["listed"][:2]}, "loss_reduction": "tokens"}
        batches = [(*torch.randn(2, ROWS, tokens, WIDTH), named) for _ in range(2)]
    elif kind == "dropping head":
        layers, loss = [*layers, nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))], squares
        degrees = {**degrees, "loss_reduction": "tokens"}
    elif kind == "mixing head":
        layers, loss = [*layers, Shift()], squares
        degrees = {**degrees, "loss_reduction": "tokens"}
    if kind == "refused":
        batches[1][0].requires_grad_()
    try:
        checked = zeropp.check(
            layers, loss, batches,
            global_batch=ROWS, sample=torch.zeros(2, 4, WIDTH), **degrees,
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{checked.steps} steps"


@pytest.mark.parametrize(
    ("kind", "degrees", "words"),
    [
        ("right", {"pp": 2}, "2 steps"),
        ("right", {"shard": 2}, "2 steps"),
        ("attention", {"context": 2, "precision": "bf16"}, "2 steps"),
        ("attention", {"context": 2}, "2 steps"),
        ("named", {"pp": 2}, "2 steps"),
        ("odd", {"pp": 2}, "2 steps"),
        ("odd", {"shard": 2}, "2 steps"),
        ("eight", {"shard": 2, "precision": "fp8"}, "2 steps"),
        ("none", {"pp": 2}, "ValueError: check: batches has none"),
        ("slice", {"context": 2}, "layers[1]: gives another output"),
        ("noise", {"context": 2}, "layers[1]: gives another output"),
        ("clamping", {"shard": 2}, "layers[1]: its forward changes 'weight'"),
        ("clamping data", {"shard": 2}, "layers[1]: its forward changes 'weight'"),
        ("renewing", {"shard": 2}, "layers[1]: its forward changes 'weight'"),
        ("odd", {"pp": 2, "logits_slices": 3}, "2 steps"),
        ("odd", {"context": 2, "logits_slices": 9}, "2 steps"),
        ("by token", {"pp": 2, "logits_slices": 3, "loss_reduction": "sum"}, "2 steps"),
        ("mixing head", {"pp": 2, "logits_slices": 2}, "layers[2]: gives another output"),
        ("listed", {"pp": 2, "logits_slices": 2}, "is cut with them (listed): give one without"),
        ("listed", {"context": 2}, "is cut with them (listed): give one without"),
        ("listed by chance", {"pp": 2, "logits_slices": 2}, "2 steps"),
        ("listed by chance", {"context": 2}, "2 steps"),
        ("dropping head", {"pp": 2, "logits_slices": 2}, "logits_slices=2: layers[2] draws random"),
        ("right", {"pp": 2, "logits_slices": 2, "loss_reduction": "sum"}, "loss_fn: the loss is"),
        ("told", {"pp": 2, "unit": 2}, "layers[2]: gives another output"),
        ("raises", {"pp": 2, "unit": 2}, "raises ValueError on rank 1: nothing was told"),
        ("behind", {"pp": 2, "recompute": "selective"}, "(likely: recompute="),
        ("begins", {"pp": 2}, "layers[1]: 'weight' begins with other values"),
        ("fading", {"shard": 2}, "loss_fn: the loss is"),
        ("evaluated", {"pp": 2}, "loss_fn: the loss of an evaluation is"),
        ("update", {"shard": 2}, "is updated otherwise by the same gradient"),
        ("counted", {"pp": 2, "recompute": "full"}, "layers[1]: 'calls' that the layer keeps"),
        ("twice", {"pp": 2, "recompute": "full"}, "or recompute='full' runs its forward a second"),
        ("refused", {"pp": 2}, "ValueError: inputs: needs a gradient"),
        ("norm", {"pp": 2}, "(likely: a hook"),
    ],
)
def test_what_differs_is_named(
    world: World, kind: str, degrees: dict[str, Any], words: str
) -> None:
    if kind == "eight":
        pytest.importorskip("torchao")
    for said in world.run(found, kind, degrees, size=2):
        assert words in said

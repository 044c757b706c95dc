"""Layers that a user of PyTorch might hand in: plain ones, and each other one unusual in its own
way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 8, 12  # of every model, and of a global batch
Kind = Callable[[], nn.Module]


def linear() -> nn.Module:
    """A plain layer."""
    return nn.Linear(WIDTH, WIDTH)


class One(nn.Module):
    """One linear layer, for those below."""

    linear: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Pair(nn.Module):
    """Two linear layers, for those below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


class Scale(nn.Module):
    """A layer whose only parameter is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Masked(One):
    """Takes a mask by name, and is otherwise a residual layer with dropout."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.linear(x).masked_fill(mask, 0.3))
        return dropped + x


class Placed(nn.Module):
    """Takes positions by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(positions)
        return x + embedded


class Wrapping(nn.Module):
    """Hands all that it takes to the layer inside, as ``torch.compile`` and other wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapters = inner, nn.ModuleDict()

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        output: Tensor = self.inner(*inputs, **keywords)
        return output


class Fork(One):
    """Gives two tensors with gradients, and one of whole numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.linear(x)
        return x, x.sin(), (x > 0).long().sum(-1)


class Both(One):
    """Takes three tensors and gives three; the second input of the last one goes unused."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.unused, self.embedding = unused, nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, a: Tensor, b: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.tanh(self.linear(a)) + self.embedding(counts)
        return found if self.unused else found + b, found * 0.5, counts


class Join(nn.Module):
    """Takes three tensors and gives one again."""

    def forward(self, a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        return a * counts[:, None].to(a.dtype)


class Counting(One):
    """Holds a buffer that a checkpoint has, and one that it has not; its bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.get_parameter("linear.bias").requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.get_buffer("seen").add_(1).clone()
        return self.linear(x).tanh()


class Remembering(One):
    """Caches a tensor in its first forward, as rotary embeddings do."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((WIDTH,), 0.7, dtype=x.dtype, device=x.device)
        return self.linear(x) * self.scale


class Branching(One):
    """Looks at values, as a router of experts does: no trial without values can run it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.detach().sum()) > -1e9 else x


class InPlace(One):
    """An activation that overwrites what a biased linear layer gave for a tensor of three
    dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x[:, None]), inplace=True)[:, 0] + x


class Unused(One):
    """Holds a parameter that no forward uses, a scalar one, an empty one, and a buffer that is one
    number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("places", torch.ones(1, dtype=torch.long).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def half_frozen() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


def expanded() -> nn.Module:
    """A linear layer whose weight is one row in memory, at first."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64).expand(WIDTH, WIDTH))
    return layer


def group_norm() -> nn.Module:
    return nn.GroupNorm(2, WIDTH)


class Detached(Pair):
    """Gives nothing before it a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.detach()) + self.b(x).detach() * 0.1  # type: ignore[no-any-return]


class Sometimes(Pair):
    """Gives gradients for some rows only, and so to some ranks only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if bool(x.sum() > 0) else x.detach() * 0.1


class Adapted(Pair):
    """A low-rank adapter over a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight + self.b.weight[:, :2] @ self.down, self.a.bias)


class Reused(Pair):
    """Uses one weight three times, and ties another one to it."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(input=self.a(x).tanh())) + F.linear(x, self.a.weight)  # type: ignore[no-any-return]


class InnerGradient(Pair):
    """Takes a gradient inside its forward; the loss depends on it or not."""

    def __init__(self, differentiable: bool) -> None:
        super().__init__()
        self.differentiable = differentiable

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.a(inner).tanh().sum()
            (force,) = torch.autograd.grad(energy, inner, create_graph=self.differentiable)
        return self.b(x) + force  # type: ignore[no-any-return]


class Hooked(Pair):
    """Has hooks on weights and on modules that change gradients."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.a.weight, self.b.bias):
            parameter.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        halved: Any = lambda module, given, got: (given[0] * 0.5,)  # noqa: E731
        self.a.register_full_backward_hook(halved)
        self.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x + self.a.bias).tanh())  # type: ignore[no-any-return]


class Transformed(Pair):
    """Calls layers inside torch.func's transforms."""

    def forward(self, x: Tensor) -> Tensor:
        energy: Any = lambda row: self.a(row).tanh().sum()  # noqa: E731
        return torch.vmap(self.b)(x) + torch.vmap(torch.func.grad(energy))(x)  # type: ignore[no-any-return]


class Checkpointed(Pair):
    """Recomputes itself, in torch's older way or in its newer one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        run: Any = lambda y: self.b(self.a(y).tanh())  # noqa: E731
        return checkpoint(run, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class TwoTypes(Pair):
    """Computes in two number types."""

    def double(self) -> TwoTypes:
        """Half of it."""
        self.a.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.float()).to(x.dtype)  # type: ignore[no-any-return]


class GivesParameter(One):
    """Hands a parameter on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


class TakesTwo(One):
    """Takes what the layer above gives."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class GivesComplex(One):
    """Hands complex numbers on."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.linear(x), x)


class Conjugates(GivesComplex):
    """Takes complex numbers and hands on others, which torch keeps as they were with a note."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.complex(self.linear(x.real), x.imag)).conj()


class TakesComplex(GivesComplex):
    """Hands on real numbers, which torch keeps as they were with a note that they are negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x.real, self.linear(x.imag)).conj().imag


class Attention(nn.Module):
    """torch's attention, which reads its projection's weight without calling the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.stack([x, x * 0.5], 1)
        return self.attention(pair, pair, pair, need_weights=False)[0].sum(1)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM over two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(torch.stack([x, x * 0.3], 1))[0][:, -1]  # type: ignore[no-any-return]


class PostHooked(Pair):
    """Has a hook that reads gradients where they are not whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]


class SharedMemory(Pair):
    """Two parameters in the same memory."""

    def double(self) -> SharedMemory:
        """In fp64, which would otherwise give each its own memory."""
        super().double()
        self.b.weight.data = self.a.weight.data
        return self


class Complex(nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).real


class Given(nn.Module):
    """Gives something else than a tensor."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class Locked(Given):
    """Has something that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def wide() -> nn.Module:
    """Gives values so large that their sums have either sign, whatever the layers before it."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.mul_(4)
        layer.bias.zero_()
    return layer


def spectral() -> nn.Module:
    """Changes buffers whenever its weight is read."""
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Stateful(One):
    """Has a state beside its parameters and buffers."""

    def get_extra_state(self) -> int:
        """The state."""
        return 3

    def set_extra_state(self, state: int) -> None:
        """Take a state over."""


class Saving(One):
    """Has a state of its own that is empty, and keeps what it saves for its backward elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def get_extra_state(self) -> None:
        """No state."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y: Tensor = self.linear(x) * self.rate.exp()
        return y


class Balanced(One):
    """Keeps a number for a loss function to find."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.balance = y.square().mean()
        return y

"""Layers that a user of PyTorch might hand in, each unusual in its own way."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Pair(nn.Module):
    """Two linear layers, for those below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Detached(Pair):
    """Gives nothing before it a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.detach()) + self.b(x).detach() * 0.1  # type: ignore[no-any-return]


class Sometimes(Pair):
    """Gives gradients for some rows only, and so to some ranks only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if bool(x.sum() > 0) else x.detach() * 0.1


class Frozen(Pair):
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
        return self.b(self.a(self.a(x).tanh())) + F.linear(x, self.a.weight)  # type: ignore[no-any-return]


class InnerGradient(Pair):
    """Takes a gradient inside its forward, of which the loss depends or not."""

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


class GivesParameter(nn.Module):
    """Hands a parameter on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


class TakesTwo(nn.Module):
    """Takes what the layer above gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale  # type: ignore[no-any-return]


class GivesComplex(nn.Module):
    """Hands complex numbers on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

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

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


class SharedMemory(Pair):
    """Two parameters in the same memory."""

    def double(self) -> SharedMemory:
        """In fp64, which would otherwise give each its own memory."""
        super().double()
        self.b.weight.data = self.a.weight.data
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


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

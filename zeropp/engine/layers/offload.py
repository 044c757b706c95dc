"""Activation offload: what blocks save for their backward waits for it in the host's memory.

Torch's hooks of saved tensors put a handle into autograd's graph for every tensor that is sent.
Each storage is sent once, however many nodes save views of it, and it is copied only when the
program says so: until then, and once it is loaded, a handle gives the device's memory. A storage
that has come back belongs to the handles alone, so that a backward frees it node by node, and what
a delayed weight gradient keeps stays on the device. Not sent are parameters, views of gathered
rows, buffers, keyword inputs, and the batch itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeropp.engine.private_names import is_traceable_wrapper_subclass, kept_by_selective
from zeropp.engine.ranks.lanes import Ticket, make_lane

# Binary logarithms of a slab's bytes (torch rounds pinned memory up to a power of two): the last of
# a microbatch's 64 slabs or more may be nearly empty, but copies of less than 1 MiB take the host
# longer than the link.
_PER_STORE, _LEAST, _MOST = 6, 20, 28


class HostMemory:
    """A rank's pinned memory, which is allocated once and then reused, and the lanes of copies to
    it and from it; ``undo`` collects how to end them."""

    def __init__(self, device: torch.device, undo: ExitStack) -> None:
        self.device = device
        self.stores, self.loads = make_lane(device, "zeropp stores"), make_lane(device, HOST_LOADS)
        undo.callback(self.stores.close)
        undo.callback(self.loads.close)
        self.free = defaultdict[int, list[Tensor]](list)  # slabs that nobody uses, by size

    def take(self, stored: int) -> Tensor:
        """A slab that nobody uses, for some of the ``stored`` bytes of a microbatch: a new one has
        the size for these, but any other is taken first, as chunks that recompute store less."""
        size = 1 << min(max(stored.bit_length() - 1 - _PER_STORE, _LEAST), _MOST)
        unused = [slabs for slabs in self.free.values() if slabs]
        if unused:
            return min(unused, key=lambda slabs: abs(len(slabs[0]) - size)).pop()
        return new_slab(self.device, size)


HOST_LOADS = "zeropp loads"


def new_slab(device: torch.device, size: int) -> Tensor:
    """Memory of the host, uint8 [size], from and to which a device can copy."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _Memory:
    """One storage that blocks have saved. ``values`` is all of it, flat, while it is on the device;
    ``pieces`` are its bytes in the host's memory, in their order."""

    def __init__(self, tensor: Tensor) -> None:
        whole = tensor.detach()
        count = whole.untyped_storage().nbytes() // whole.element_size()
        self.values: Tensor | None = whole.as_strided((count,), (1,), 0)
        self.count, self.dtype = count, whole.dtype
        self.pieces: list[Tensor] = []
        self.saved: list[tuple[Tensor, int]] = []  # what nodes saved, with torch's version of it

    def check(self) -> None:
        """Raise RuntimeError where what was saved has changed since, as torch does without hooks;
        from now on nobody else changes it."""
        if any(tensor._version != version for tensor, version in self.saved):
            raise RuntimeError(
                "a tensor that a block saved for its backward has been modified by an inplace "
                "operation"
            )
        self.saved.clear()

    def copied(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """New memory on the device, and (where, from where) it is to be filled."""
        self.values = torch.empty(self.count, dtype=self.dtype, device=device)
        return list(zip(self.parts(), self.pieces, strict=True))

    def parts(self) -> Iterator[Tensor]:
        """The device's bytes, cut as the host's pieces are."""
        assert self.values is not None
        sizes = [len(piece) for piece in self.pieces]
        return iter(torch.split(self.values.view(torch.uint8), sizes))


@dataclass(frozen=True)
class _Handle:
    """What stands in autograd's graph for a tensor."""

    memory: _Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, whose memory must be on the device."""
        values = self.memory.values
        if values is None:
            raise RuntimeError("a saved tensor is in the host's memory and was not loaded")
        return values.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass
class _Microbatch:
    """What a stage's blocks have saved of a microbatch."""

    memories: WeakValueDictionary[int, _Memory] = field(default_factory=WeakValueDictionary)
    selected: list[tuple[Any, _Handle]] = field(default_factory=list)  # of selective recomputation
    slabs: list[Tensor] = field(default_factory=list)
    stored: Ticket | None = None
    loaded: Ticket | None = None


class Offload:
    """Keeps what the ``blocks`` of a chunk save; ``gathered`` says of a tensor whether it lies in
    the memory of parameters. The program says when a microbatch is stored, freed and loaded."""

    def __init__(
        self, host: HostMemory, blocks: Sequence[nn.Module], gathered: Callable[[Tensor], bool]
    ) -> None:
        self._host, self._blocks, self._gathered = host, {id(block) for block in blocks}, gathered
        self._live: dict[int, _Microbatch] = {}

    @contextmanager
    def saving(
        self, module: nn.Module, microbatch: int, given: Iterable[Tensor]
    ) -> Iterator[Callable[[Any], None] | None]:
        """Inside this context a module runs forward, to which ``given`` tensors stay on the device.
        Yields what notes where selective recomputation keeps tensors; None if nothing is sent."""
        if id(module) not in self._blocks:
            yield None
            return
        live = self._live.setdefault(microbatch, _Microbatch())
        stay = {id(x.untyped_storage()) for x in (*given, *module.buffers())}
        caches: list[Any] = []

        pack = partial(self._handle, live, stay)
        with saved_tensors_hooks(pack, lambda x: x.tensor() if isinstance(x, _Handle) else x):
            yield caches.append
        for entry in (entry for cache in caches for entry in kept_by_selective(cache)):
            if isinstance(handle := pack(entry.val), _Handle):
                live.selected.append((entry, handle))
                entry.val = None

    def _handle(self, live: _Microbatch, stay: set[int], tensor: Tensor) -> _Handle | Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
        if not is_plain or tensor.is_conj() or tensor.is_neg() or self._gathered(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()  # torch keeps one object of it while it lives
        if (
            id(storage) in stay
            or not storage.nbytes()
            or tensor.device.type != self._host.device.type
        ):
            return tensor.detach()
        memory = live.memories.get(id(storage))
        if memory is None:
            live.memories[id(storage)] = memory = _Memory(tensor)
        memory.saved.append((tensor.detach(), tensor._version))
        place = int(tensor.storage_offset())
        return _Handle(memory, tensor.dtype, tuple(tensor.size()), tensor.stride(), place)

    def store(self, microbatch: int) -> None:
        """Begin to copy a microbatch to the host."""
        live = self._live[microbatch]
        copies: list[tuple[Tensor, Tensor]] = []
        room = torch.empty(0, dtype=torch.uint8)  # of the last slab
        stored = sum(memory.count * memory.dtype.itemsize for memory in live.memories.values())
        for memory in live.memories.values():
            memory.check()
            left = memory.count * memory.dtype.itemsize
            while left:
                if not len(room):
                    live.slabs.append(room := self._host.take(stored))
                piece, room = room[:left], room[left:]
                memory.pieces.append(piece)
                left -= len(piece)
            copies += zip(memory.pieces, memory.parts(), strict=True)
        live.stored = self._host.stores.run(lambda: _copy(copies))

    def free(self, microbatch: int) -> None:
        """Let compute wait for the copies to the host, and free the device's memory."""
        live = self._live[microbatch]
        assert live.stored is not None
        live.stored.wait()
        live.stored = None
        for memory in live.memories.values():
            memory.values = None

    def load(self, microbatch: int) -> None:
        """Begin to copy a microbatch back."""
        live, device = self._live[microbatch], self._host.device
        copies = [pair for memory in live.memories.values() for pair in memory.copied(device)]
        live.loaded = self._host.loads.run(lambda: _copy(copies))

    def use(self, microbatch: int) -> None:
        """Let compute wait until a microbatch is on the device, where its backward frees it."""
        live = self._live.pop(microbatch, None)
        if live is None:
            return
        if live.loaded is not None:
            live.loaded.wait()
        for memory in live.memories.values():
            memory.check()
        for slab in live.slabs:
            self._host.free[len(slab)].append(slab)
        for entry, handle in live.selected:
            entry.val = handle.tensor()
            entry.version = entry.val._version


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for into, source in pairs:
        into.copy_(source, non_blocking=True)

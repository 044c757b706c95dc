"""Runs of the user's modules and functions that his own loop would not make, without a trace: on
one microbatch before the first step, and in evaluations. What they keep is put back afterwards."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_NUMBERS = (int, float, complex)
_DATA = (*_NUMBERS, str, bytes, type(None), Tensor, list, tuple, dict, set)
# Where functions are whose modules keep nothing of the caller's.
_LIBRARIES = ("-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


@contextmanager
def unchanged(
    roots: Iterable[object],
    device: torch.device | None = None,
    *,
    whole: bool = True,
    apart: Iterable[nn.Module] = (),
) -> Iterator[None]:
    """After this context ``roots``, modules and functions, keep what they kept before it, and the
    generators of torch, Python and numpy are as before. ``device``: whose generator is used, too.

    Kept are buffers and numbers of modules and, if ``whole``, also all other attributes, what
    closures have and what a function's own module has by name. Containers, tensors, generators and
    objects of plain data are put back by content. Evaluations are not ``whole``, because a caller
    may read what a layer noted in one. Parameters, the modules of those that are ``apart`` and what
    is in libraries stay as they are.
    """
    kept = _Kept(apart, whole=whole)
    for root in roots:
        kept.keep(root, is_root=True)
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    drawn = random.getstate(), numpy.get_state() if numpy else None
    with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            if numpy:
                numpy.set_state(drawn[1])
            with torch.no_grad():
                for put_back in kept.undo:
                    put_back()


class _Kept:
    """How to put back what some objects keep, in ``undo``."""

    def __init__(self, apart: Iterable[nn.Module], *, whole: bool) -> None:
        self.undo: list[Callable[[], object]] = []
        self._whole = whole
        self._seen: dict[int, object] = {id(x): x for root in apart for x in root.modules()}

    def keep(self, value: Any, *, is_root: bool = False) -> None:
        """Keep a value's content, and what it refers to."""
        if id(value) in self._seen or isinstance(value, nn.Parameter | type):
            return
        self._seen[id(value)] = value  # alive, so that its number is its own
        inner: Iterable[object] = ()
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            # An expanded tensor has fewer numbers than places, so that nothing can write to it.
            if not value.requires_grad and not value.is_meta and 0 not in value.stride():
                self.undo.append(partial(value.copy_, value.detach().clone()))
        elif isinstance(value, MutableMapping):
            self._names(value, dict(value))
        elif isinstance(value, list | tuple):
            inner = [*value]
            if isinstance(value, list):
                self.undo.append(partial(value.__setitem__, slice(None), inner))
        elif isinstance(value, torch.Generator):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, partial):
            inner = value.func, value.args, value.keywords
        elif isinstance(value, MethodType):
            self.keep(value.__self__, is_root=is_root)
            inner = [value.__func__]
        elif isinstance(value, FunctionType):
            self._function(value)
        elif is_root or _is_data(value):
            own = getattr(value, "__dict__", {})
            inner = [own, type(value).__call__ if is_root else None]
        for one in inner:
            self.keep(one)

    def _names(self, names: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
        """Keep what is ``before`` under some names, and that there are no others if ``whole``."""

        def put_back() -> None:
            for name in set(names) - set(before) if self._whole else ():
                del names[name]
            names.update((k, v) for k, v in before.items() if k not in names or names[k] is not v)

        self.undo.append(put_back)
        for value in before.values():
            self.keep(value)

    def _module(self, module: nn.Module) -> None:
        own = dict(vars(module))
        if not self._whole:
            own = {name: one for name, one in own.items() if _is_number(one)}
            own["_buffers"], own["_modules"] = module._buffers, module._modules
        else:
            self.keep(type(module).forward)
        self._names(vars(module), own)

    def _function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self.undo.append(partial(setattr, cell, "cell_contents", value))
            self.keep(value)
        place = function.__globals__
        if any(one in function.__code__.co_filename for one in _LIBRARIES):
            return
        for name in _names_in(function.__code__) & place.keys():
            if isinstance(value := place[name], _DATA):
                self.undo.append(partial(place.__setitem__, name, value))
            self.keep(value)


def _is_number(value: object) -> bool:
    is_tensor = isinstance(value, Tensor) and not value.dim() and not value.requires_grad
    return is_tensor or isinstance(value, _NUMBERS)


def _is_data(value: object) -> bool:
    """Whether an object keeps nothing but data."""
    return all(isinstance(one, _DATA) for one in getattr(value, "__dict__", {0: ...}).values())


def _names_in(code: CodeType) -> set[str]:
    """The names that a function's code, and that of functions inside of it, reads."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))

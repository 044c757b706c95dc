"""Where a model of ``transformers`` can be cut into an embedding, its blocks and a head.

The blocks are the model's longest list of modules. What else belongs to which layer is found by one
run of the model's forward on the meta device, in which blocks compute nothing: what has a part in
the first block's input is the embedding, and what is called after the last block is the head. The
run also shows what could not be cut rightly, which is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, masking_utils

from zeropp.engine.layers.context import Context, active
from zeropp.types.layout import InfeasibleError

_ROWS, _LENGTH = 2, 3  # of the run that finds where to cut
_LOOK = "find_packed_sequence_indices"  # of ``transformers``, of positions


class Piece(nn.Module):
    """A layer: the whole model, without the modules of all other layers.

    ``whole`` is that model, ``called`` the path of the module in it that is called, ``flow`` what
    those that are left out give, and ``paths`` are those of the modules that the layer has. Names
    of parameters are the model's own, after ``whole.``.
    """

    def __init__(
        self, whole: nn.Module, called: str, flow: _Flow, cut: Cut, paths: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.whole, self.flow, self.paths = whole, flow, paths
        self._called, self._is_head = called, not called
        self._takes_places, self._pools, self._pad = cut.takes_places, cut.pools, cut.pad
        self._packs = cut.packs
        # Others (RoBERTa, OPT) begin at another place, or count what is no padding.
        own = ("create_position_ids_from_input_ids", "offset")
        self.counts_from_zero = not any(hasattr(m, n) for m in self.modules() for n in own)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """``x`` are tokens [rows, length] in the first layer, and hidden states [rows, length,
        hidden] in all others. ``attention_mask`` [rows, length] is 0 for padding. Without one,
        ``position_ids`` [rows, length] tell documents apart that are packed into rows, where they
        do so in ``transformers``."""
        flow, is_first = self.flow, not x.is_floating_point()
        tokens = x if is_first else self._tokens(x, attention_mask)
        named: dict[str, Tensor] = {}
        masks: Any = attention_mask
        if position_ids is not None:
            if not self._takes_places:
                raise InfeasibleError("position_ids: the model's forward does not take them")
            named["position_ids"] = position_ids
        module = attrgetter(self._called)(self.whole) if self._called else self.whole
        flow.hidden = None if is_first else x
        packs = position_ids is not None
        if (context := active()) is not None:
            packs = context.packs
            masks = self._whole_masks(context, tokens, attention_mask, position_ids)
        try:
            with _without_looking(packs):
                output = module(input_ids=tokens, attention_mask=masks, use_cache=False, **named)
            hidden: Tensor | None = output.logits if self._is_head else flow.hidden
        finally:
            flow.hidden = None
        assert hidden is not None
        return hidden

    def _whole_masks(
        self, context: Context, x: Tensor, mask: Tensor | None, places: Tensor | None
    ) -> Any:
        """The masks of whole sequences, as the model's own code makes them; ``x`` [rows, tokens] is
        a slice of these sequences."""
        config: Any = self.whole.config
        if config._attn_implementation != "sdpa":
            raise InfeasibleError(
                f"context={context.size}: attn_implementation={config._attn_implementation!r} does "
                "not see the tokens of other ranks (set it to 'sdpa')"
            )
        kinds = {str(getattr(module, "rope_type", "")) for module in self.whole.modules()}
        for kind in (kind for kind in sorted(kinds) if "dynamic" in kind or "longrope" in kind):
            raise InfeasibleError(
                f"context={context.size}: rope_type={kind!r} takes its frequencies from the last "
                "position, which slices of a sequence do not share (take another, or context=1)"
            )
        width = torch.empty(len(x), context.size * x.shape[1], 1, device=x.device)
        packs = context.packs and self._packs
        with _without_looking(context.packs):
            return masking_utils.create_masks_for_generate(
                config,
                width,
                None if mask is None else context.whole(mask),
                None,
                context.whole(places) if packs and places is not None else None,
            )

    def _tokens(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Tokens that tell padding apart, as a classifier's head looks for the last other one."""
        if attention_mask is not None:
            return self._pad + attention_mask.ne(0).long()
        if self._pools:
            raise InfeasibleError(
                "attention_mask: must be among the keyword inputs, because the model's head looks "
                "for the last token that is no padding"
            )
        return torch.full((1, 1), self._pad + 1, device=x.device).expand(x.shape[:2])


class _Flow:
    """The hidden states of a piece, as far as they have come; None before the first block."""

    hidden: Tensor | None = None


class _Elsewhere(nn.Module):
    """A module that another piece has: gives the hidden states as they are."""

    def __init__(self, flow: _Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, *_: object, **__: object) -> Any:
        """The hidden states."""
        return self.flow.hidden


class _Blocks(nn.Module):
    """A model's list of blocks, in which the places of all but one are empty. Who goes through it
    sees the first ``end`` alone, because nothing happens behind them."""

    def __init__(self, places: Sequence[object], own: Mapping[str, nn.Module], end: int) -> None:
        super().__init__()
        self._places, self._end = list(places), end
        for name, block in own.items():
            self.add_module(name, block)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[object]:
        return iter(self._places[: self._end])

    def __getitem__(self, index: int | slice) -> object:
        return self._places[index] if isinstance(index, int) else self._places[: self._end][index]


class _Place:
    """Where a model calls one of its blocks: runs ``run``, or hands the hidden states on. The
    model may read the plain attributes of a ``block`` here (its kind of attention, for example)."""

    def __init__(
        self, block: nn.Module, flow: _Flow, run: nn.Module | None, *, is_tuple: bool
    ) -> None:
        vars(self).update(
            (n, v) for n, v in vars(block).items() if isinstance(v, str | int | float)
        )
        self._flow, self._run, self._is_tuple = flow, run, is_tuple

    def __call__(self, hidden: Tensor, *args: object, **keywords: object) -> object:
        flow = self._flow
        if flow.hidden is None:
            flow.hidden = hidden
        elif self._run is not None:
            output = self._run(flow.hidden, *args, **keywords)
            flow.hidden = output[0] if isinstance(output, tuple) else output
        return (flow.hidden,) if self._is_tuple else flow.hidden


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a model can be cut. ``blocks`` is the path of their list, and ``first`` and ``last``
    are the paths of the embedding's and of the head's modules. ``is_tuple``: whether a block gives
    a tuple. ``takes_places``: whether the forward takes ``position_ids``, and ``packs``: whether
    its masks tell documents apart by them. ``pools``: whether the head gives one output per row,
    for the last token that is not ``pad``."""

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    is_tuple: bool
    takes_places: bool
    packs: bool
    pools: bool
    pad: int

    def pieces(self, model: nn.Module) -> list[Piece]:
        """The layers of a model, which share its modules."""
        return [self._piece(model, own) for own in range(-1, len(_list_of(model, self.blocks)) + 1)]

    def _piece(self, model: nn.Module, own: int) -> Piece:
        """The layer with one block; the embedding before them, and the head after them."""
        blocks, flow = _list_of(model, self.blocks), _Flow()
        is_first, is_last = own < 0, own == len(blocks)
        runs = [block if index == own else None for index, block in enumerate(blocks)]
        places = [
            _Place(block, flow, run, is_tuple=self.is_tuple)
            for block, run in zip(blocks, runs, strict=True)
        ]
        held = {str(own): blocks[own]} if not is_first and not is_last else {}
        others: dict[str, nn.Module] = {
            self.blocks: _Blocks(places, held, max(own, 0) % len(blocks) + 1)
        }
        absent = (() if is_first else self.first) + (() if is_last else self.last)
        others |= {path: _Elsewhere(flow) for path in absent}
        called = "" if is_last else self.blocks.partition(".")[0]
        paths = self.first if is_first else self.last if is_last else (f"{self.blocks}.{own}",)
        return Piece(_replaced(model, others), called, flow, self, paths)


def find_cut(model: PreTrainedModel) -> Cut:
    """Where a model can be cut; raises InfeasibleError, with what stands against it."""
    config: Any = model.config
    how = config._attn_implementation
    wrong = {
        f"attn_implementation={how!r}": how not in ("eager", "sdpa"),
        "layerdrop": getattr(config, "layerdrop", 0.0) > 0,
        # The router's loss is that of all layers' routers together, which no layer can add alone.
        "output_router_logits=True": bool(getattr(config, "output_router_logits", False)),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise InfeasibleError(f"model: {name} is not supported (set it otherwise in the config)")
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    if not outer:
        raise _refused("has no nn.ModuleList of blocks")
    blocks = max(outer, key=lambda n: sum(one.numel() for one in outer[n].parameters()))
    runs = [_Run(model, blocks, is_tuple=is_tuple) for is_tuple in (False, True)]
    run = next((one for one in runs if not one.refusal), None)
    if run is None:
        raise _refused(max(runs, key=lambda one: one.blocks_called).refusal)
    both = {*run.before} & {*run.after}  # which have no parameters, so that all layers may run them
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    takes_places = "position_ids" in inspect.signature(model.forward).parameters
    return Cut(
        blocks=blocks,
        first=tuple(dict.fromkeys(path for path in run.before if path not in both)),
        last=tuple(dict.fromkeys(path for path in run.after if path not in both)),
        is_tuple=run.is_tuple,
        takes_places=takes_places,
        packs=takes_places and _tells_documents(model, blocks),
        pools=run.pools,
        pad=0 if pad is None else pad,
    )


def _tells_documents(model: PreTrainedModel, blocks: str) -> bool:
    """Whether a model's masks depend on positions, as most do and OPT's do not."""
    whole = _on_meta(_replaced(model, {blocks: _Blocks([], {}, 0)})).eval()
    tokens = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device="meta")
    with mock.patch.object(masking_utils, _LOOK, return_value=None) as asked:
        try:
            with _NoLook(), torch.device("meta"), torch.no_grad():
                whole(input_ids=tokens, position_ids=tokens, use_cache=False)
        except Exception:  # whatever a model's code may raise without blocks
            return True
    return bool(asked.called)


class _Run:
    """One run of a model's forward on the meta device, without its blocks: what it calls ``before``
    and ``after`` them, by path, and in ``refusal`` why it cannot be cut, or nothing."""

    def __init__(self, model: PreTrainedModel, blocks: str, *, is_tuple: bool) -> None:
        self.is_tuple, self.pools, self.refusal = is_tuple, False, ""
        self.before: list[str] = []
        self.after: list[str] = []
        self._count, self.blocks_called = len(_list_of(model, blocks)), 0
        self._handed: Tensor | None = None  # to the next block
        places = [
            _Probe(block, partial(self._block, index))
            for index, block in enumerate(_list_of(model, blocks))
        ]
        whole = _on_meta(_replaced(model, {blocks: _Blocks(places, {}, self._count)})).eval()
        self._spine = ["", *(blocks[:i] for i, c in enumerate(blocks) if c == ".")]
        watched = [
            (f"{path}.{name}".lstrip("."), child)
            for path in self._spine
            for name, child in whole.get_submodule(path).named_children()
        ]
        self._watched = {p: m for p, m in watched if p != blocks and p not in self._spine}
        for path, module in self._watched.items():
            module.register_forward_hook(partial(self._called, path))
        try:
            with torch.enable_grad():
                self._run(whole)
        except InfeasibleError as error:
            self.refusal = str(error)
        except Exception as error:  # whatever a model's code may raise
            lines = str(error).strip().splitlines()[:1]
            self.refusal = "raises " + ": ".join([type(error).__name__, *lines])

    def _run(self, whole: Any) -> None:
        tokens = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device="meta")
        with _NoLook(), torch.device("meta"):
            output = whole(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
            )
        if not hasattr(output, "logits"):
            raise InfeasibleError("gives no logits: take the class of it that has a head")
        logits = output.logits
        if self.blocks_called != self._count:
            raise InfeasibleError(f"calls {self.blocks_called} of its {self._count} blocks")
        if len(logits) != _ROWS or not logits.requires_grad:
            raise InfeasibleError("gives logits that do not come of its last block")
        self.pools = logits.dim() == 2
        for path in self._spine:
            for name, _ in whole.get_submodule(path).named_parameters(recurse=False):
                raise InfeasibleError(f"has a parameter {name!r} outside of its parts")
        for path, module in self._watched.items():
            calls = [*self.before, *self.after].count(path)
            if calls != 1 and any(True for _ in module.parameters()):
                raise InfeasibleError(f"calls {path!r} {calls} times before and behind its blocks")
        own = [p for path in self.before for p in self._watched[path].parameters()]
        head = {id(p) for path in self.after for p in self._watched[path].parameters()}
        only = [p for p in own if id(p) not in head]
        found = torch.autograd.grad(logits.sum(), only, allow_unused=True) if only else ()
        if any(gradient is not None for gradient in found):
            raise InfeasibleError("uses its embedding again behind its blocks")

    def _block(self, index: int, hidden: Tensor, *args: object, **keywords: object) -> object:
        """What block ``index`` gives, as far as others can tell."""
        if index != self.blocks_called:
            raise InfeasibleError(f"calls block {index} where block {self.blocks_called} is next")
        if self._handed is not None and hidden is not self._handed:
            raise InfeasibleError(f"gives block {index} something else than the one before it gave")
        for name, value in [*enumerate(args, 1), *keywords.items()]:
            if any(one.requires_grad for one in _tensors(value)):
                raise InfeasibleError(
                    f"gives block {index} trained values beside the hidden states: {name}"
                )
        self.blocks_called += 1
        self._handed = torch.empty_like(hidden).detach().requires_grad_()
        return (self._handed,) if self.is_tuple else self._handed

    def _called(self, path: str, module: nn.Module, args: object, output: object) -> None:
        del module, args
        if not self.blocks_called:
            if any(one.requires_grad for one in _tensors(output)):
                self.before.append(path)
        elif self.blocks_called == self._count:
            self.after.append(path)


class _Probe(_Place):
    """A place that asks a function what its block gives."""

    def __init__(self, block: nn.Module, gives: Callable[..., object]) -> None:
        super().__init__(block, _Flow(), None, is_tuple=False)
        self._gives = gives

    def __deepcopy__(self, memo: object) -> _Probe:
        return self

    def __call__(self, hidden: Tensor, *args: object, **keywords: object) -> object:
        return self._gives(hidden, *args, **keywords)


class _NoLook(TorchFunctionMode):
    """Inside of it a tensor without values is not true, whatever a model asks it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function."""
        return False if function is Tensor.__bool__ else function(*args, **(kwargs or {}))


def _refused(why: str) -> InfeasibleError:
    return InfeasibleError(f"model: cannot be cut by its blocks: it {why} (cut it by hand)")


def _list_of(model: nn.Module, path: str) -> nn.ModuleList:
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _replaced(module: Any, others: Mapping[str, nn.Module]) -> Any:
    """A module with other modules at some paths, sharing all that is not above them."""
    copied = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(copied)[name] = dict(vars(module)[name])
    below: dict[str, dict[str, nn.Module]] = {}
    for path, other in others.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = other
        else:
            copied._modules[name] = other
    for name, inner in below.items():
        copied._modules[name] = _replaced(module._modules[name], inner)
    return copied


def _on_meta(module: Any) -> Any:
    """A copy on the meta device, all of whose numbers need gradients."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=empty.is_floating_point())
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


_packs: ContextVar[bool | None] = ContextVar("_packs", default=None)  # None outside of a layer


@contextmanager
def _without_looking(packs: bool) -> Iterator[None]:
    """Inside this context ``transformers`` makes masks without a look at values, for which the host
    would wait for the device: rows are packed if ``packs``, and a mask of padding has some."""
    token = _packs.set(packs)
    try:
        yield
    finally:
        _packs.reset(token)


def _documents(position_ids: Tensor) -> Tensor | None:
    if not _packs.get():
        return None
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _answer_inside(name: str, answer: Callable[..., object]) -> None:
    """Inside of ``_without_looking`` a function of ``masking_utils`` gives another answer. Where a
    version of ``transformers`` has no such function, its masks are as right, but the host waits."""
    function = getattr(masking_utils, name, None)
    if function is None:
        return

    @wraps(function)
    def asked(*args: object, **keywords: object) -> object:
        inside = _packs.get() is not None
        return answer(*args, **keywords) if inside else function(*args, **keywords)

    setattr(masking_utils, name, asked)


_answer_inside(_LOOK, _documents)
_answer_inside("fast_all", lambda _: False)

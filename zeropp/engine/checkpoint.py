"""Checkpoints through torch.distributed.checkpoint, which any other topology can load.

Everything is saved under the model's own names, ``{piece}.{parameter}``, and in the model's own
shapes; names do not depend on pipeline rank, shard or replica. Each rank writes the boxes that it
holds of every tensor (``HeldPart``). A process without parallelism can read the same
checkpoint into a plain state dict.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeropp.engine.engine import Batches, Engine
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.flat_layout import ElementRange, Slot
from zeropp.engine.ranks.errors import gathered, together
from zeropp.engine.update.optimizer import Updater
from zeropp.engine.update.optimizer_state import (
    Kept,
    OptimizerState,
    kept_by,
    set_own_numbers,
    states,
    take_over,
)
from zeropp.engine.update.update_rules import is_plain, own_numbers, parts_of, plain

Box = tuple[tuple[int, ...], Tensor]  # offsets in the whole tensor, values


class HeldPart(Tensor):
    """Has the shape and type of a tensor of the unsharded model, but the values of ``boxes`` alone.

    A flat buffer is cut without regard to rows, so a rank's range of it is, in each parameter, part
    of a row, whole rows, and part of a row. No DTensor describes that. The three methods by which
    DTensor does so (``torch/distributed/checkpoint/planner_helpers.py``) tell torch where the boxes
    lie, and it writes and reads each as it lies in memory: nothing is gathered, nothing is copied.
    It can be copied and moved; whatever else reads or writes its values raises RuntimeError.
    """

    boxes: tuple[Box, ...]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> HeldPart:
        """A copy of the part; or, for a stager of torch, one that it gives boxes of its own."""
        name, part = function.overloadpacket.__name__, args[0]
        if name in ("detach", "clone", "_to_copy"):
            more = kwargs or {}
            copied = [(at, function(box, *args[1:], **more)) for at, box in part.boxes]
            return make_part(part.shape, copied)
        if name == "new_empty" and part.shape == tuple(args[1]):
            return make_part(part.shape, [((), function(part.boxes[0][1], (0,), **kwargs))])
        raise RuntimeError(_ONLY_A_PART)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(_ONLY_A_PART)

    # What reads values without an operator: pickle and torch.save, safetensors, numpy.
    __reduce_ex__ = storage = untyped_storage = _refuse
    numpy = tolist = item = __array__ = __dlpack__ = _refuse

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        """Copy this rank's boxes out of a whole tensor of this shape, or out of a part that is cut
        in the same way."""
        if not isinstance(value, HeldPart):
            for offsets, box in self.boxes:
                ends = zip(offsets, box.shape, strict=True)
                box.copy_(value[tuple(slice(begin, begin + size) for begin, size in ends)])
            return
        for (_, target), (_, source) in zip(self.boxes, value.boxes, strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        held = sum(box.numel() for _, box in self.boxes)
        return f"HeldPart(shape={tuple(self.shape)}, {held} of {self.numel()} elements)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(box), self.size()
                ),
            )
            for chunk, (_, box) in zip(self.__create_chunk_list__(), self.boxes, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), box.size()) for o, box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for offset, box in self.boxes if offset == tuple(index.offset or ()))


def make_part(shape: Sequence[int], boxes: Sequence[Box]) -> HeldPart:
    """A part of a tensor of this shape; the boxes share memory with what they describe."""
    like = boxes[0][1]
    make: Any = HeldPart._make_wrapper_subclass  # a tensor without memory
    part: HeldPart = make(HeldPart, tuple(shape), dtype=like.dtype, device=like.device)
    part.boxes = tuple(boxes)
    return part


_ONLY_A_PART = (
    "state_dict: this tensor has only this rank's part of its values, for "
    "torch.distributed.checkpoint (for whole tensors call model.full_state_dict(), for files "
    "model.save)"
)
_DIGESTS = "digests.json"  # file name -> SHA-256 of its bytes
_WRITTEN, _REPLACED = "being-written", "being-replaced"  # what follows a checkpoint's name, a while


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message is one line."""


class Checkpointer:
    """Saves the state of an engine, and loads it in this topology or another. All ranks must call
    its methods together; they raise RuntimeError after a step that has failed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state(self, call: str = "state_dict") -> State:
        """Parameters, buffers and optimizer state of this rank, for a method that all ranks
        ``call``; tensors share memory with the engine's."""
        if self._engine.updater.is_updating:  # steps_done is that of the step before
            raise RuntimeError(f"{call}: a step is under way (call it between steps)")
        return self._engine.on_all_ranks(call, lambda: _state_of(self._engine))

    def named(self, state: State) -> dict[str, Any]:
        """A state as one dict: the names of the unsharded model, and beside them ``optimizer``,
        ``steps_done``, ``skipped_steps`` and ``batches``, which cannot be names of parameters, as
        these begin with a number."""
        settings = {SETTINGS: state.settings} if state.settings else {}
        optimizer: dict[str, Any] = {**state.optimizer, **settings}
        return {
            **state.model,
            **({OPTIMIZER: optimizer} if optimizer else {}),
            STEPS: torch.tensor(self._engine.steps_done),
            SKIPPED: torch.tensor(int(self._engine.skipped_steps)),
            BATCHES: self._engine.batches,
        }

    def save(self, directory: Path | str) -> None:
        """As ``ParallelModel.save``, under the names that torch's ``save({"model": ...})`` gives.
        The file system is one that all ranks see.

        The new checkpoint is written into ``NAME.being-written``, and takes the last one's place
        only when every rank has written and every file has a digest. If the job is killed between
        the two renames, ``NAME.being-replaced`` is the complete one, and ``load`` reads it.
        (Folders of these names are deleted, so the names are none that people give, and no two jobs
        may save to one name at once.) Where anything raises on one rank, every rank raises, and the
        last checkpoint is untouched. A directory with other files is refused.
        """
        saved = {"model": self.named(self.state("save"))}
        place = together(lambda: place_of(directory))
        partial = _beside(place, _WRITTEN)
        _on_first_rank(lambda: _make_empty(partial))
        together(lambda: _check_seen(partial))
        with _one_line(partial):
            together(lambda: state_dict_saver.save(saved, checkpoint_id=str(partial)))
        digests = _digests_over_ranks(partial)
        _on_first_rank(lambda: _publish(partial, place, digests))

    def load(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """As ``ParallelModel.load``. Settings of optimizer groups that the checkpoint does not have
        stay as they are; one that does not count skipped steps has none."""
        state, place = self.state("load"), checked(directory)
        targets: dict[str, Any] = dict(state.model)
        if not weights_only:
            if found := _difference(state.tensors(), together(lambda: _shapes_in(place))):
                raise CheckpointError(
                    f"{place}: {found}; it is of other layers or of another optimizer "
                    "(weights_only=True reads parameters and buffers alone)"
                )
            targets = self.named(state) | {SKIPPED: torch.tensor(0)}  # which old ones do not count
        planner = DefaultLoadPlanner(allow_partial_load=not weights_only)
        with torch.no_grad(), _one_line(place):
            state_dict_loader.load({"model": targets}, checkpoint_id=str(place), planner=planner)
        self._take_over(state, targets)

    def load_named(self, saved: Mapping[str, Any]) -> None:
        """As ``ParallelModel.load_state_dict``."""
        state = self.state()
        saved = together(lambda: dict(saved))
        held, offered = state.model, {n: v for n, v in saved.items() if n not in _BESIDE}
        if optimizer := _kept_of(saved):
            held = state.tensors()
            offered |= {f"{OPTIMIZER}.{name}": value for name, value in optimizer.items()}
        if found := _difference(held, offered):
            raise ValueError(f"load_state_dict: {found}")
        together(lambda: _copy(held, offered))
        self._take_over(state, saved)

    def _take_over(self, state: State, given: Mapping[str, Any]) -> None:
        """Continue from a state into whose tensors a checkpoint has been read, with what is
        ``given`` beside them."""
        engine, updater = self._engine, self._engine.updater
        batches: Batches = given.get(BATCHES, engine.batches)
        engine.steps_done = int(given.get(STEPS, engine.steps_done))
        updater.rates_set = []
        if engine.steps_done == sum(steps for steps, _ in batches):
            engine.batches = batches
        if STEPS in given:  # else the count of other steps would be of no use
            engine.skipped_steps.fill_(int(given.get(SKIPPED, 0)))
        if _kept_of(given):
            updates = engine.steps_done - int(engine.skipped_steps)
            take_over(updater, state.kept, state.states, updates)
        settings = given.get(OPTIMIZER, {}).get(SETTINGS, {})
        for name, part, group in _groups_of(updater):
            values = dict(settings.get(name, ()))
            set_own_numbers(part, values.pop(_OWN, {}))
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        for flat in engine.flats:
            flat.gather_updated()


def _kept_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What optimizers keep of parameters, of what was read or given."""
    return {name: one for name, one in given.get(OPTIMIZER, {}).items() if name != SETTINGS}


def checked(directory: Path | str) -> Path:
    """The directory to read from, once every file in it is what was written; collective.

    What torch's own ``save`` has written has no digests, so nothing can be checked. Raises
    CheckpointError on every rank where a file is missing or differs.
    """
    place, expected = together(lambda: _listed(Path(directory).resolve()))
    digests = _digests_over_ranks(place) if expected else {}
    for name, digest in sorted(expected.items()):
        if digests.get(name) != digest:
            state = "missing" if name not in digests else "damaged (its digest differs)"
            raise CheckpointError(f"{place / name}: {state}; load another checkpoint")
    return place


def place_of(directory: Path | str) -> Path:
    """Where a checkpoint goes: behind links, and never in the place of other files."""
    place = Path(directory).resolve()
    there = sorted(place.iterdir()) if place.is_dir() else [place] * place.exists()
    parts = {path for path in there if path.is_file() and (_is_own(path) or path.name == _DIGESTS)}
    if others := [path for path in there if {path, place / ".metadata"} - parts]:
        raise CheckpointError(
            f"{others[0]}: is no part of a whole checkpoint, and would be lost (give the "
            "checkpoint a folder of its own)"
        )
    return place


@contextmanager
def _one_line(place: Path) -> Iterator[None]:
    """Inside, torch's report of a checkpoint that failed is a CheckpointError of one line."""
    try:
        yield
    except CheckpointException as report:
        rank, (error, _) = min(report.failures.items())
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{place}: {lines[0]} (on rank {rank})") from None


def _on_first_rank(work: Callable[[], None]) -> None:
    """Let rank 0 do what one rank does for all; every rank waits for it, and raises if it does."""
    together(lambda: work() if dist.get_rank() == 0 else None)


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _check_seen(partial: Path) -> None:
    """Refuse a directory that rank 0 has not just made: what is written there would be missing."""
    if not partial.is_dir() or any(partial.iterdir()):
        raise CheckpointError(
            f"{partial}: is not the empty directory that rank 0 has made (give all ranks the "
            "same directory, on a file system that all of them see); nothing was written"
        )


def _publish(partial: Path, directory: Path, digests: dict[str, str]) -> None:
    """Make the new checkpoint the one that is found, all of it on disk before it is."""
    with (partial / _DIGESTS).open("w", encoding="utf-8") as file:
        json.dump(digests, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    previous = _beside(directory, _REPLACED)
    if directory.exists():  # else what is beside it may be the only whole one
        shutil.rmtree(previous, ignore_errors=True)
        directory.rename(previous)
    partial.rename(directory)
    _sync_directory(directory.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Whether torch has written a file, by the names that it gives in a checkpoint."""
    return path.name == ".metadata" or path.suffix == ".distcp"


def _sync_directory(directory: Path) -> None:
    """Have the names in a directory written to disk, as ``os.fsync`` does with a file's bytes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listed(directory: Path) -> tuple[Path, dict[str, str]]:
    """The directory of the whole checkpoint, and its files' digests; torch's has none."""
    if not directory.exists() and _beside(directory, _REPLACED).exists():
        directory = _beside(directory, _REPLACED)
    listing = directory / _DIGESTS
    if not listing.is_file() and (directory / ".metadata").is_file():
        return directory, {}
    if not listing.is_file():
        raise CheckpointError(f"{directory}: no checkpoint (there is no {_DIGESTS})")
    try:
        return directory, json.loads(listing.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckpointError(f"{listing}: damaged; load another checkpoint") from None


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}.{suffix}")


def _digests_over_ranks(directory: Path) -> dict[str, str]:
    """Digests of a checkpoint's files, each read by one rank; collective."""

    def of_this_rank() -> dict[str, str]:
        files = sorted(filter(_is_own, directory.iterdir()))
        digests = files[dist.get_rank() :: dist.get_world_size()]
        return {path.name: _digest(path) for path in digests}

    parts = gathered(together(of_this_rank))
    return {name: digest for part in parts for name, digest in part.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


OPTIMIZER, SETTINGS = "optimizer", "param_groups"
STEPS, SKIPPED, BATCHES = "steps_done", "skipped_steps", "batches"
_BESIDE = (OPTIMIZER, STEPS, SKIPPED, BATCHES)  # what a state dict has beside the model's own names
Settings = tuple[tuple[str, Any], ...]  # of one optimizer group: names and values
# Settings that say how an optimizer computes depend on the machine, so they are not saved.
_OF_MACHINE = {"foreach", "fused", "capturable", "differentiable"}
_OWN = "numbers of the optimizer itself"  # a setting, beside those of a group


@dataclass(frozen=True, kw_only=True)
class State:
    """What one rank saves, by name; tensors share memory with what they describe.

    ``model``: parts of parameters, trained and frozen, and persistent buffers. ``optimizer``: parts
    of what the optimizer keeps for each parameter, named ``{piece}.{parameter}.{kind}``, and its
    numbers. ``settings``: learning rate and other numbers of each optimizer group, by its name.
    ``kept`` and ``states``: the same as ``optimizer``, per optimizer, and per flat tensor that it
    updates.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    settings: dict[str, Settings]
    kept: Sequence[Kept]
    states: list[OptimizerState]

    def tensors(self) -> dict[str, Tensor]:
        """What is saved of the layers and of their optimizer's state, by name."""
        kept = {f"{OPTIMIZER}.{name}": value for name, value in self.optimizer.items()}
        return {**self.model, **kept}


def _state_of(engine: Engine) -> State:
    """The state of one rank."""
    engine.settle()
    model = engine.buffers()
    for flat in engine.flats:
        model.update(_described("{}", flat, flat.rows, flat.layout.owned))
    kept = kept_by(engine.updater)
    held = list(states(kept, engine.flats))
    optimizer: dict[str, Tensor] = {}
    for state in held:
        flat, shard = state.flat, state.shard
        for kind, value in state.elements.items():
            optimizer.update(_described(f"{{}}.{kind}", flat, value, shard.elements))
        for slot in flat.layout.slots:
            if slot.group == shard.group and len(slot.elements.intersect(shard.elements)):
                for kind, value in state.others.items():
                    optimizer.update((f"{key}.{kind}", value) for key in _keys(slot))
    return State(
        model=model,
        optimizer=optimizer,
        settings=_settings_of(engine.updater, kept),
        kept=kept,
        states=held,
    )


def _shapes_in(place: Path) -> dict[str, Tensor]:
    """Tensors without values, like those of layers and of an optimizer's state in a checkpoint."""
    known = FileSystemReader(place).read_metadata().state_dict_metadata
    if f"model.{STEPS}" not in known:
        raise CheckpointError(f"{place}: has no {STEPS} (weights_only=True reads parameters alone)")
    tensors = {n: one for n, one in known.items() if isinstance(one, TensorStorageMetadata)}
    return {
        name.removeprefix("model."): torch.empty(one.size, device="meta")
        for name, one in tensors.items()
        if name.startswith("model.") and name.removeprefix("model.") not in _BESIDE
    }


def _settings_of(updater: Updater, kept: Sequence[Kept]) -> dict[str, Settings]:
    """The numbers, switches and tuples of each optimizer group and its optimizer."""
    parts = map(id, parts_of(updater.optimizer))
    own = dict(zip(parts, zip(kept, updater.made, strict=True), strict=True))
    settings: dict[str, Settings] = {}
    for name, part, group in _groups_of(updater):
        numbers = _plain_ones(own_numbers(part, *own[id(part)]))
        plain = _plain_ones({key: one for key, one in group.items() if key not in _OF_MACHINE})
        settings[name] = (*plain.items(), *([(_OWN, numbers)] if numbers else []))
    return settings


def _groups_of(
    updater: Updater,
) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
    """The optimizer's groups by name and place, the same on every rank, with their optimizer."""
    pairs = [(part, g) for part in parts_of(updater.optimizer) for g in part.param_groups]
    for place, (part, group) in enumerate(pairs):
        for name in {updater.groups[id(x)]: 0 for x in group["params"] if id(x) in updater.groups}:
            yield f"{name}.{place}", part, group


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in values.items() if is_plain(value)}


def boxes(
    shape: Sequence[int], elements: ElementRange
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut a range of a tensor's elements, in the order of memory, into boxes: a box's offsets in
    the tensor, its sizes, and its first element.

    These are parts of the first and of the last row, and one box of the rows between them. A part
    of a row is cut in the same way, so n dimensions give at most 2n - 1 boxes.
    """
    begin, end = elements.begin, elements.end
    if begin == end or not shape:
        yield from [((), (), 0)] * (end - begin)  # a number is one box
        return
    inner = prod(shape[1:])
    whole_rows = -(-begin // inner) * inner, end // inner * inner
    ends = sorted({begin, end, *(at for at in whole_rows if begin < at < end)})
    for first, last in pairwise(ends):
        row, rest = divmod(first, inner)
        if rest or last % inner:
            inside = ElementRange(rest, rest + last - first)
            for offsets, sizes, start in boxes(shape[1:], inside):
                yield (row, *offsets), (1, *sizes), row * inner + start
        else:
            offsets = (row, *[0] * len(shape[1:]))
            yield offsets, ((last - first) // inner, *shape[1:]), first


def _described(
    name: str, flat: FlatParameters, tensor: Tensor, held: ElementRange
) -> Iterator[tuple[str, Tensor]]:
    """The part of every parameter in ``tensor``, the range ``held`` of the flat buffer, by name."""
    for slot in flat.layout.slots:
        common = slot.elements.intersect(held)
        held_boxes = [
            (offsets, tensor[slot.begin + first - held.begin :][: prod(sizes)].view(sizes))
            for offsets, sizes, first in boxes(
                slot.shape, ElementRange(common.begin - slot.begin, common.end - slot.begin)
            )
        ]
        if 0 in slot.shape:
            held_boxes = [((0,) * len(slot.shape), tensor.new_empty(slot.shape))]
        if held_boxes:
            part: Tensor = make_part(slot.shape, held_boxes)
            if dist.get_world_size() == 1:
                part = held_boxes[0][1]  # the tensor itself
            yield from ((name.format(key), part) for key in _keys(slot))


def _keys(slot: Slot) -> Iterator[str]:
    for piece, name in slot.names:
        yield f"{piece}.{name}"


def _difference(held: Mapping[str, Tensor], offered: Mapping[str, Any]) -> str:
    """Why something on a rank cannot take what it is offered, or is offered something that no rank
    has; the same on every rank, and empty if nothing is wrong. Collective."""
    first = next(
        (f"{n}: {why}" for n, target in held.items() if (why := _problem(target, n, offered))), ""
    )
    everything = gathered((first, [*offered], [*held]))
    known = {name for _, _, held_names in everything for name in held_names}
    for rank, (problem, names, _) in enumerate(everything):
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            problem = problem or f"{unknown}: the model has nothing of that name"
        if problem:
            return f"{problem} (on rank {rank})"
    return ""


def _problem(target: Tensor, name: str, offered: Mapping[str, Any]) -> str:
    if name not in offered:
        return "is missing"
    value = offered[name]
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, which is no tensor"
    if value.shape != target.shape:
        return f"has shape {tuple(value.shape)}, the model {tuple(target.shape)}"
    if (
        isinstance(target, HeldPart)
        and isinstance(value, HeldPart)
        and [at for at, _ in target.boxes] != [at for at, _ in value.boxes]
    ):
        return "is cut as on another rank (load it with torch.distributed.checkpoint)"
    return ""


@torch.no_grad()
def _copy(held: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> None:
    for name, target in held.items():
        if isinstance(target, HeldPart):
            target.load(offered[name])
        elif target is not offered[name]:
            target.copy_(offered[name])

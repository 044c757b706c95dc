"""Models of Hugging Face's ``transformers`` (5 or later) as a list of layers.

    layers = zeropp.huggingface.layers("folder/of/save_pretrained")
    model = zeropp.parallelize(
        layers, zeropp.huggingface.token_loss,
        sample=tokens[:1], microbatch_size=2, global_batch=64, pp=4, shard=2,
    )
    ...
    layers.save_pretrained(model, "other/folder")

No family has code of its own here. Every layer runs the model's own forward, in which the modules
of all other layers are left out: its masks, rotary embeddings, windows and scales are those of
``transformers``. ``zeropp.huggingface.cut`` finds where a model can be cut. Weights are read from a
folder layer by layer, on the ranks that hold a layer, and written layer by layer, so that no rank
has the whole model.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from zeropp.engine.loss import in_slices
from zeropp.engine.ranks.errors import gathered, together
from zeropp.engine.settings import ParameterName
from zeropp.engine.walk import Layer
from zeropp.huggingface.cut import Piece, find_cut
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.layout import InfeasibleError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_IGNORED = -100  # the label of a token that ``transformers`` leaves out of the loss


class HuggingFaceLayers(Sequence[Layer]):
    """The layers of a model, for ``parallelize``: an embedding, the blocks and a head.

    ``tied`` are the embedding and the head where they are one parameter; ``parallelize`` asks for
    it. Layers take ``attention_mask`` and ``position_ids`` [rows, length] as keyword inputs, if
    ``sample_keywords`` names them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[Layer],
        pieces: Sequence[Piece],
        adapters: _Adapters | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype``: the type that weights came in."""
        self.model, self._layers, self._adapters = model, layers, adapters
        self._dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
        self._counts = [len(list(piece.parameters())) for piece in pieces]
        self.tied = _tied(model, pieces)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...

    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        return self._layers[index]

    def own_name(self, name: str) -> str:
        """The model's name of a parameter that ``parallelize`` names ``{layer}.{parameter}``."""
        return name.split(".", 2)[2]

    def save_pretrained(
        self, model: ParallelModel, folder: Path | str, dtype: torch.dtype | None = None
    ) -> None:
        """Write a folder that ``from_pretrained`` reads, one file per layer, each as soon as its
        parameters are gathered; all ranks must call it, and see the same folder. ``dtype``: the
        type of floating-point weights; by default fp32, or the type of 16 bits that they came in.
        Of a model with an adapter of peft, the adapter alone is written, by peft, in fp32 by
        default.

        The folder holds the old model or the new one at any moment: the new weights have names of
        their own, and the index names them once all are there."""
        folder = Path(folder)
        model.engine.on_all_ranks(
            "save_pretrained", partial(folder.mkdir, parents=True, exist_ok=True)
        )

        def cast(value: Tensor) -> Tensor:
            return (
                value.to(dtype or self._dtype) if value.is_floating_point() else value
            ).contiguous()

        if self._adapters is not None:
            self._save_adapter(self._adapters, model, folder, cast)
        else:
            self._save_model(model, folder, cast, dtype or self._dtype)
        together(lambda: None)

    def _save_model(
        self,
        model: ParallelModel,
        folder: Path,
        cast: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        written: dict[str, str] = {}
        size, writes = 0, model.plan.layout.is_first(dist.get_rank())
        label = gathered(secrets.token_hex(4))[0]
        for index, whole in self._by_layer(model):
            if not writes:
                continue
            named = revert_weight_conversion(self.model, whole)
            file = f"model-{label}-{index + 1:05}-of-{len(self):05}.safetensors"
            save_file({n: cast(one) for n, one in named.items()}, folder / file, {"format": "pt"})
            written |= dict.fromkeys(named, file)
            size += sum(cast(one).nbytes for one in named.values())
        held: list[tuple[dict[str, str], int]] = [({}, 0)] * dist.get_world_size()
        dist.all_gather_object(held, (written, size))
        if dist.get_rank() == 0:
            files = {
                "metadata": {"total_size": sum(size for _, size in held)},
                "weight_map": {name: file for of_rank, _ in held for name, file in of_rank.items()},
            }
            config = copy.deepcopy(self.model.config)
            config.architectures = [type(self.model).__name__]
            config.dtype = dtype
            config.tie_word_embeddings = self.tied is not None
            replaced: set[str] = {_SINGLE}  # which transformers would read instead
            with suppress(OSError, ValueError):
                old = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
                replaced |= {*old["weight_map"].values()}
            with _replacing(folder) as new:
                config.save_pretrained(new)
                if self.model.can_generate():
                    self.model.generation_config.save_pretrained(new)
                (new / _INDEX).write_text(json.dumps(files, indent=2), encoding="utf-8")
            for file in replaced:
                (folder / file).unlink(missing_ok=True)

    def _save_adapter(
        self,
        adapters: _Adapters,
        model: ParallelModel,
        folder: Path,
        cast: Callable[[Tensor], Tensor],
    ) -> None:
        own = {
            adapters.names[name]: cast(value)
            for name, value in ((self.own_name(n), v) for n, v in model.full_parameters())
            if name in adapters.names and model.plan.layout.is_first(dist.get_rank())
        }
        held: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
        dist.gather_object(own, held if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() == 0:
            with _replacing(folder) as new:
                adapters.model.save_pretrained(
                    new,
                    state_dict={name: value for of_rank in held for name, value in of_rank.items()},
                )

    def _by_layer(self, model: ParallelModel) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(layer, its parameters by the model's names), of this rank's layers, each as soon as it
        is whole; a tied head misses the embedding's parameter, as in ``transformers``' files."""
        waiting: dict[int, dict[str, Tensor]] = {}
        for name, value in model.full_parameters():
            index = int(name.partition(".")[0])
            waiting.setdefault(index, {})[self.own_name(name)] = value
            if len(waiting[index]) == self._counts[index]:
                yield index, waiting.pop(index)
        yield from waiting.items()


def _tied(
    model: PreTrainedModel, pieces: Sequence[Piece]
) -> tuple[ParameterName, ParameterName] | None:
    """The parameter that the embedding and the head share, if there is one."""
    first, last = (dict(piece.named_parameters()) for piece in (pieces[0], pieces[-1]))
    found = {id(one): name for name, one in first.items()}
    pairs = [(found[id(one)], name) for name, one in last.items() if id(one) in found]
    # To move a model to the meta device unties it without a word, so that there the config says
    # whether it is tied. A real head may have been given a weight of its own since.
    whole: Any = model
    head = whole.get_output_embeddings()
    if not pairs and head is not None and head.weight.is_meta and model.config.tie_word_embeddings:
        ends = (whole.get_input_embeddings().weight, first), (head.weight, last)
        begin, end = (next(n for n, one in named.items() if one is it) for it, named in ends)
        pairs = [(begin, end)]
    return ((0, pairs[0][0]), (len(pieces) - 1, pairs[0][1])) if pairs else None


class _Adapters:
    """The adapter of a model, whose files peft writes: ``names`` are those of its parameters in
    ``model``, which peft gives, by their names in the model that is cut."""

    def __init__(self, model: Any, base: PreTrainedModel) -> None:
        self.model = model
        if len(model.peft_config) > 1:
            raise InfeasibleError(
                f"model: has the adapters {sorted(model.peft_config)}, and only one can be "
                "trained and written (delete_adapter the others, or merge them)"
            )
        named = {id(one): name for name, one in model.named_parameters()}
        kept = {name: one for name, one in base.named_parameters() if one.requires_grad}
        for path, module in base.named_modules():
            if hasattr(module, "base_layer"):
                kept |= {
                    f"{path}.{name}": one
                    for name, one in module.named_parameters()
                    if not name.startswith("base_layer.")
                }
        self.names = {name: named.pop(id(one)) for name, one in kept.items()}
        known = {id(one) for one in base.parameters()}
        if beside := [name for key, name in named.items() if key not in known]:
            raise InfeasibleError(
                f"model: {beside[0]!r} of its adapter is outside of the model, where no layer has "
                "it (take an adapter inside of layers, such as LoRA)"
            )
        if any(one.is_meta for one in kept.values()):
            raise InfeasibleError("model: has an adapter without values (load it with values)")


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies of the next tokens, and how many of these are not ignored. A
    batch's loss is the mean over all of its tokens that are not, over microbatches and ranks.

    ``logits`` [rows, length, vocabulary], which are widened to fp32 slice by slice; ``targets``
    [rows, length] are the tokens that follow those of the inputs, or -100 for what is ignored.
    Labels of the inputs' own tokens, as the collators of ``transformers`` give, are refused: they
    are for ``label_loss``.
    """
    losses = in_slices(_sum_of_tokens, logits.flatten(0, 1), targets.flatten())
    return losses, (targets != _IGNORED).sum()


def label_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``token_loss`` of labels as the collators of ``transformers`` give them, ``labels`` [rows,
    length]: of the inputs' own tokens, which are shifted here as its models shift them (5.24,
    ``ForCausalLMLoss``). Targets that are shifted already are refused."""
    return token_loss(logits, F.pad(labels[:, 1:], (0, 1), value=_IGNORED))


def _check_targets(inputs: Tensor, targets: Tensor, *, shift: int, refusal: str) -> None:
    """Raise InfeasibleError for targets that are the inputs' tokens, ``shift`` places further."""
    if inputs.shape != targets.shape or inputs.dim() != 2 or inputs.is_meta:
        return
    tokens = inputs.to(targets.device)
    own, goals = tokens[:, shift:], targets[:, : targets.shape[1] - shift]
    counts = goals != _IGNORED
    # Rows of one token alone are their own shift, and a few tokens may be so by chance.
    differs = (tokens != tokens[:, :1])[:, shift:] & counts
    if bool(((own == goals) | ~counts).all() & (counts.sum() > 3) & differs.any()):
        raise InfeasibleError(refusal)


def _sum_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(wide, targets, ignore_index=_IGNORED, reduction="sum")


token_loss.loss_reduction = "tokens"  # type: ignore[attr-defined]  # parallelize's default with it
label_loss.loss_reduction = "tokens"  # type: ignore[attr-defined]
label_loss.shifts = True  # type: ignore[attr-defined]  # over the end of a slice of tokens
token_loss.check_targets = partial(  # type: ignore[attr-defined]
    _check_targets,
    shift=0,
    refusal="targets: are the inputs' own tokens, so that a copy would be learnt (take the tokens "
    "that follow, or zeropp.huggingface.label_loss, which shifts labels)",
)
label_loss.check_targets = partial(  # type: ignore[attr-defined]
    _check_targets,
    shift=1,
    refusal="targets: are the tokens that follow those of the inputs, and would be shifted twice "
    "(take zeropp.huggingface.token_loss, or labels of the inputs' own tokens)",
)


def layers(model: nn.Module | Path | str, *, seed: int = 0) -> HuggingFaceLayers:
    """The layers of a model, for ``parallelize``.

    ``model`` is the folder of a model that ``save_pretrained`` has written, and each rank then
    reads the layers that it holds; or a model, whose modules are taken as they are; or a model that
    was made on the meta device, whose parameters are then drawn from ``seed`` layer by layer; or a
    model with an adapter of peft. Parameters from a folder are fp32, whatever they are there. A
    model in evaluation mode, in which ``from_pretrained`` gives it, is set to training mode; the
    modules of any other keep their modes.

    Raises InfeasibleError for a model that ``find_cut`` cannot cut, or whose adapter could not be
    written.
    """
    adapters = None
    if isinstance(model, nn.Module):
        given: Any = model
        skeleton = given.get_base_model() if hasattr(given, "get_base_model") else given
        came_in = skeleton.dtype
        if getattr(model, "peft_config", None):
            adapters, came_in = _Adapters(model, skeleton), None
        fill = _draw
    else:
        files = _files(Path(model))
        config = AutoConfig.from_pretrained(model)
        came_in = config.dtype
        is_classifier = "SequenceClassification" in (config.architectures or [""])[0]
        kind: Any = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
        with torch.device("meta"):
            skeleton = kind.from_config(config, dtype=torch.float32)
            reader = _Reader(skeleton, files)
            if reader.has_own_head():
                config.tie_word_embeddings = False
                skeleton = kind.from_config(config, dtype=torch.float32)
                reader = _Reader(skeleton, files)
        with suppress(OSError):  # there need be none
            skeleton.generation_config = GenerationConfig.from_pretrained(model)
        fill = reader.read
    cut = find_cut(skeleton)
    if not skeleton.training:
        skeleton.train()
    pieces = cut.pieces(skeleton)
    if not any(parameter.is_meta for parameter in skeleton.parameters()):
        return HuggingFaceLayers(skeleton, pieces, pieces, adapters, came_in)
    makers = [
        partial(_made, skeleton, piece, index, fill, seed) for index, piece in enumerate(pieces)
    ]
    return HuggingFaceLayers(skeleton, makers, pieces, adapters, came_in)


def _made(
    model: PreTrainedModel,
    piece: Piece,
    index: int,
    fill: Callable[[Piece, int], None],
    seed: int,
) -> nn.Module:
    """A piece of a model on the meta device: as it is there while torch makes meta tensors, and
    otherwise with values on the CPU, the same ones at every call."""
    made = copy.deepcopy(piece)
    if torch.get_default_device().type == "meta":
        return made
    for module in made.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    fill(made, index)
    initialize: Any = model._init_weights
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + index)
        for module in made.modules():  # buffers, and parameters that were not filled
            initialize(module)
    return made


def _draw(made: Piece, index: int) -> None:
    """Leave all parameters to the model's own initialization."""


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder whose files take their places in another one once all are written, those that name
    weights or hold them last."""
    with TemporaryDirectory(dir=folder) as new:
        yield Path(new)
        for path in sorted(Path(new).iterdir()):
            path.replace(folder / path.name)


def _files(folder: Path) -> dict[str, Path]:
    """The file of every weight in a folder, by its name there."""
    if not folder.is_dir():
        raise InfeasibleError(
            f"model={str(folder)!r}: no such folder (download a model of the hub first: hf "
            "download NAME --local-dir FOLDER)"
        )
    if (folder / _INDEX).exists():
        files = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    single = folder / _SINGLE
    if not single.exists():
        raise InfeasibleError(f"model={str(folder)!r}: has no {_INDEX} and no {single.name}")
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


class _Reader:
    """Reads the weights of one layer after another from files, with the conversions of
    ``transformers`` (the experts of Mixtral are one parameter in a layer, and many in a file)."""

    def __init__(self, model: PreTrainedModel, files: dict[str, Path]) -> None:
        self._model, self._files = model, files
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._converters = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        known, prefix = model.state_dict(), model.base_model_prefix
        whole: Any = model
        head = whole.get_output_embeddings() if model.config.tie_word_embeddings else None
        self._tied = next((f"{n}.weight" for n, one in model.named_modules() if one is head), "")
        self._sources = [
            (name, *rename_source_key(name, renamings, converters, prefix, known))
            for name in sorted(files, key=dot_natural_key)
        ]

    def has_own_head(self) -> bool:
        """Whether the files have another head than embedding, though the configuration ties them:
        ``transformers`` takes both as they are, too."""
        model: Any = self._model
        first = model.get_input_embeddings()
        ends = f"{next(n for n, x in model.named_modules() if x is first)}.weight", self._tied
        if not self._tied or all(own != self._tied for _, own, _ in self._sources):
            return False
        with torch.device("cpu"):
            begin, end = (self._values((name,)).get(name) for name in ends)
        return begin is not None and end is not None and not torch.equal(begin, end)

    def read(self, made: Piece, index: int) -> None:
        """Fill the parameters of a layer; raises InfeasibleError for one that no file has."""
        values = self._values(tuple(f"{path}." for path in made.paths))
        for own, parameter in made.whole.named_parameters():
            if own in values and values[own].shape == parameter.shape:
                parameter.data.copy_(values[own])
            elif own in values or own != self._tied:
                raise InfeasibleError(
                    f"layers[{index}]: no file has the weight {own!r} of shape "
                    f"{tuple(parameter.shape)}"
                )
            else:
                parameter.data.zero_()  # ``parallelize`` takes the embedding's values
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    def _values(self, paths: tuple[str, ...]) -> dict[str, Tensor]:
        """What the files have below some paths of the model, by the model's names."""
        by_name: dict[str, Any] = {}
        for name, own, pattern in self._sources:
            if own.startswith(paths):
                if own not in by_name:
                    converter = self._converters[pattern] if pattern else None
                    by_name[own] = copy.deepcopy(converter) or WeightRenaming(name, own)
                with safe_open(self._files[name], framework="pt") as opened:
                    by_name[own].add_tensor(own, name, pattern or name, opened.get_tensor(name))
        values: dict[str, Tensor] = {}
        for own, converter in by_name.items():
            made = converter.convert(own, model=self._model, config=self._model.config)
            values |= {n: one[0] if isinstance(one, list) else one for n, one in made.items()}
        return values

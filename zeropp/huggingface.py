"""Causal language models of Hugging Face's ``transformers`` (5 or later) as a list of layers.

    layers = zeropp.huggingface.layers("folder/of/save_pretrained")
    model = zeropp.parallelize(
        layers, zeropp.huggingface.token_loss, loss_reduction="tokens",
        sample=tokens[:1], global_batch=64, pp=4, shard=2,
    )
    ...
    layers.save_pretrained(model, "other/folder")

The modules are the model's own; what its forward does between them (masks, rotary embeddings,
windows, the scale of logits) is done here, as ``transformers`` does it for each of ``FAMILIES``.
Weights are read from a folder layer by layer, on the ranks that hold a layer, and written layer by
layer, so that no rank has the whole model.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from zeropp.engine.errors import together
from zeropp.engine.walk import Layer
from zeropp.layout import InfeasibleError
from zeropp.parallel_model import ParallelModel
from zeropp.settings import ParameterName

_INDEX = "model.safetensors.index.json"
_ADAPTER = re.compile(r"\.(base_layer|lora_[A-Za-z_]+)\.")
_IGNORED = -100  # the label of a token that ``transformers`` leaves out of the loss


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where the parts of a family's models are: the decoder in the model, all others in it."""

    decoder: str = "model"
    tokens: str = "embed_tokens"
    blocks: str = "layers"
    norm: str = "norm"
    positions: str = ""  # learned ones, added to the embedded tokens
    dropout: str = ""  # of the embedded tokens
    project_in: str = ""  # from the embeddings' width to the blocks', and back
    project_out: str = ""
    packs: bool = True  # documents that ``position_ids`` begin anew do not see each other


_LLAMA = Family()
FAMILIES = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text"), _LLAMA
    ),
    "gpt2": Family(
        decoder="transformer", tokens="wte", blocks="h", norm="ln_f", positions="wpe",
        dropout="drop",
    ),
    "gpt_neox": Family(
        decoder="gpt_neox", tokens="embed_in", norm="final_layer_norm", dropout="emb_dropout"
    ),
    "opt": Family(
        decoder="model.decoder", norm="final_layer_norm", positions="embed_positions",
        project_in="project_in", project_out="project_out", packs=False,
    ),
}  # fmt: skip


class _ModelPart(nn.Module):
    """Some modules of a model; ``paths`` says where the model has them, by their names here."""

    def __init__(self, modules: dict[str, tuple[str, nn.Module | None]]) -> None:
        super().__init__()
        self.paths = {name: path for name, (path, module) in modules.items() if module is not None}
        for name, (_, module) in modules.items():
            self.add_module(name, module)


class Embedding(_ModelPart):
    """Tokens [rows, length] to what the first block takes."""

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Any = None
    ) -> Tensor:
        """``attention_mask`` [rows, length] is 0 for padding."""
        parts: Any = self
        x: Tensor = parts.tokens(tokens)
        if parts.project_in is not None:
            x = parts.project_in(x)
        if parts.positions is not None:
            if hasattr(parts.positions, "offset"):  # OPT counts what is no padding
                mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
                x = x + parts.positions(mask, 0, position_ids=position_ids)
            else:
                x = x + parts.positions(_places(x) if position_ids is None else position_ids)
        return x if parts.dropout is None else parts.dropout(x)


class Block(_ModelPart):
    """One decoder layer, with its mask and its rotary embedding."""

    def __init__(
        self,
        modules: dict[str, tuple[str, nn.Module | None]],
        config: Any,
        index: int,
        packs: bool,
    ) -> None:
        super().__init__(modules)
        self.config, self.packs = config, packs
        kinds = getattr(config, "layer_types", None)
        self.kind = kinds[index] if kinds else None
        slides = self.kind in (None, "sliding_attention")
        self.window = getattr(config, "sliding_window", None) if slides else None
        rotary = modules["rotary"][1]
        self.by_kind = rotary is not None and "layer_type" in inspect.signature(
            rotary.forward
        ).parameters  # fmt: skip

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Any = None
    ) -> Tensor:
        """``attention_mask`` [rows, length] is 0 for padding. Without one, ``position_ids`` [rows,
        length] tell documents apart that are packed into rows, as in ``transformers``."""
        parts: Any = self
        places = _places(x) if position_ids is None else position_ids
        keywords: dict[str, Any] = {}
        if parts.rotary is not None:
            kind = (self.kind,) if self.by_kind else ()
            keywords["position_embeddings"] = parts.rotary(x, places, *kind)
        packed = position_ids if self.packs and attention_mask is None else None
        mask = _mask(self.config._attn_implementation, x, attention_mask, self.window, packed)
        output = parts.layer(x, attention_mask=mask, position_ids=places, **keywords)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


class Head(_ModelPart):
    """The last block's output to logits [rows, length, vocabulary]."""

    def __init__(self, modules: dict[str, tuple[str, nn.Module | None]], config: Any) -> None:
        super().__init__(modules)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        parts: Any = self
        for part in (parts.norm, parts.project_out):
            x = x if part is None else part(x)
        x = parts.head(x)
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None]


def _mask(
    how: str,
    x: Tensor,
    attention_mask: Tensor | None,
    window: int | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """The mask for an attention implementation, without a look at values, for which the host would
    wait for the device: [rows or 1, 1, length, length], or None for a causal one. A document begins
    where ``position_ids`` [rows, length] do not go on by one."""
    length = x.shape[1]
    window = length if window is None else window
    is_short = length <= window
    if how == "sdpa" and attention_mask is None and position_ids is None and is_short:
        return None
    place = torch.arange(length, device=x.device)
    behind = place[:, None] - place  # of a query, the keys before it
    allowed = (behind >= 0 if is_short else (behind >= 0) & (behind < window))[None, None]
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, :].bool()
    if position_ids is not None:
        begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
        document = begins.cumsum(-1)
        allowed = allowed & (document[:, None, :, None] == document[:, None, None, :])
    if how == "sdpa":
        return allowed
    lowest = torch.finfo(x.dtype).min
    return torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, lowest)


class HuggingFaceLayers(Sequence[Layer]):
    """The layers of a model, for ``parallelize``: an embedding, the blocks and a head.

    ``tied`` are the embedding and the head where they are one parameter; ``parallelize`` asks for
    it. Layers take ``attention_mask`` and ``position_ids`` [rows, length] as keyword inputs, if
    ``sample_keywords`` names them.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[Layer], pieces: Sequence[_ModelPart]
    ) -> None:
        self.model, self._layers = model, layers
        self._paths = [piece.paths for piece in pieces]
        self._counts = [len(list(piece.parameters())) for piece in pieces]
        tied = (0, "tokens.weight"), (len(layers) - 1, "head.weight")
        first, last = (dict(pieces[index].named_parameters()).get(name) for index, name in tied)
        # A real head may have been given a weight of its own since. To move a model to the meta
        # device unties it without a word, so that there the config says whether it is tied.
        on_meta = first is not None and last is not None and first.is_meta and last.is_meta
        is_tied = model.config.tie_word_embeddings if on_meta else first is last is not None
        self.tied: tuple[ParameterName, ParameterName] | None = tied if is_tied else None

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
        layer, part, rest = name.split(".", 2)
        return f"{self._paths[int(layer)][part]}.{rest}"

    def save_pretrained(
        self, model: ParallelModel, folder: Path | str, dtype: torch.dtype | None = None
    ) -> None:
        """Write a folder that ``from_pretrained`` reads, one file per layer, each as soon as its
        parameters are gathered; all ranks must call it, and see the same folder. ``dtype``: the
        type of floating-point weights; by default fp32, in which they are trained."""
        folder = Path(folder)
        make = partial(folder.mkdir, parents=True, exist_ok=True)
        model.engine.on_all_ranks("save_pretrained", make)
        written: dict[str, str] = {}
        size, writes = 0, model.data_parallel_rank == 0
        for index, whole in self._by_layer(model):
            if not writes:
                continue
            named = revert_weight_conversion(self.model, whole)
            cast = partial(_cast, dtype=dtype)
            file = f"model-{index + 1:05}-of-{len(self):05}.safetensors"
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
            (folder / _INDEX).write_text(json.dumps(files, indent=2), encoding="utf-8")
            config = copy.deepcopy(self.model.config)
            config.architectures = [type(self.model).__name__]
            config.dtype = dtype or torch.float32
            config.tie_word_embeddings = self.tied is not None
            config.save_pretrained(folder)
        together(lambda: None)

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


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For ``loss_reduction="tokens"``: the sum of the cross entropies of the next tokens, and how
    many of these are not ignored.

    ``logits`` [rows, length, vocabulary], which are widened to fp32; ``targets`` [rows, length] are
    the tokens that follow those of the inputs, or -100 for what is ignored.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return losses, (targets != _IGNORED).sum()


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype).contiguous() if value.is_floating_point() else value.contiguous()


def layers(model: PreTrainedModel | Path | str, *, seed: int = 0) -> HuggingFaceLayers:
    """The layers of a model, for ``parallelize``.

    ``model`` is the folder of a model that ``save_pretrained`` has written, of which each rank then
    reads the layers that it holds; or a model, whose modules are taken as they are; or a model that
    was made on the meta device, whose parameters are then drawn from ``seed`` layer by layer.
    Parameters from a folder are fp32, whatever they are there.

    Raises InfeasibleError for a family that is not among ``FAMILIES``, for settings of one that are
    not known here, and for adapters of peft.
    """
    if isinstance(model, PreTrainedModel):
        skeleton, fill = model, _draw
    else:
        files = _files(Path(model))
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM
            skeleton = made.from_config(config, dtype=torch.float32)
        fill = _Reader(skeleton, files).read
    pieces = _pieces(skeleton)
    skeleton.train()
    if not any(parameter.is_meta for parameter in skeleton.parameters()):
        return HuggingFaceLayers(skeleton, pieces, pieces)
    makers = [
        partial(_made, skeleton, piece, index, fill, seed) for index, piece in enumerate(pieces)
    ]
    return HuggingFaceLayers(skeleton, makers, pieces)


def _pieces(model: PreTrainedModel) -> list[_ModelPart]:
    config: Any = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InfeasibleError(
            f"model: its family {config.model_type!r} is not known (known: "
            f"{', '.join(sorted(FAMILIES))}; cut other models by hand)"
        )
    how = config._attn_implementation
    wrong = {
        f"attn_implementation={how!r}": how not in ("eager", "sdpa"),
        "layerdrop": getattr(config, "layerdrop", 0.0) > 0,
        "use_bidirectional_attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "add_cross_attention": bool(getattr(config, "add_cross_attention", False)),
        # The router's loss is that of all layers' routers together, which no layer can add alone.
        "output_router_logits=True": bool(getattr(config, "output_router_logits", False)),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise InfeasibleError(f"model: {name} is not supported (set it otherwise in the config)")
    for name in (name for name, _ in model.named_parameters() if _ADAPTER.search(name)):
        raise InfeasibleError(
            f"model: {name!r} belongs to an adapter of peft, which save_pretrained could not write "
            "as peft does (merge the adapters into the weights; or cut the model into layers by "
            "hand, and keep what is trained with model.save)"
        )
    decoder: Any = model.get_submodule(family.decoder)

    def part(name: str) -> tuple[str, nn.Module | None]:
        return f"{family.decoder}.{name}", getattr(decoder, name, None) if name else None

    first = {name: part(getattr(family, name)) for name in ("tokens", "positions", "project_in")}
    first["dropout"] = part(family.dropout)
    pieces: list[_ModelPart] = [Embedding(first)]
    for index in range(config.num_hidden_layers):
        path = f"{family.decoder}.{family.blocks}.{index}"
        modules = {"layer": (path, model.get_submodule(path)), "rotary": part("rotary_emb")}
        pieces.append(Block(modules, config, index, family.packs))
    last = {"norm": part(family.norm), "project_out": part(family.project_out)}
    last["head"] = ("lm_head", model.get_submodule("lm_head"))
    return [*pieces, Head(last, config)]


def _made(
    model: PreTrainedModel,
    piece: _ModelPart,
    index: int,
    fill: Callable[[_ModelPart, int], None],
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


def _draw(made: _ModelPart, index: int) -> None:
    """Leave all parameters to the model's own initialization."""


def _files(folder: Path) -> dict[str, Path]:
    """The file of every weight in a folder, by its name there."""
    if (folder / _INDEX).exists():
        files = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    single = folder / "model.safetensors"
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
        self._sources = [
            (name, *rename_source_key(name, renamings, converters, prefix, known))
            for name in sorted(files, key=dot_natural_key)
        ]

    def read(self, made: _ModelPart, index: int) -> None:
        """Fill the parameters of a layer; raises InfeasibleError for one that no file has."""
        values = self._values(tuple(f"{path}." for path in made.paths.values()))
        for name, parameter in made.named_parameters():
            part, _, rest = name.partition(".")
            own = f"{made.paths[part]}.{rest}"
            if own in values and values[own].shape == parameter.shape:
                parameter.data.copy_(values[own])
            elif own in values or own != "lm_head.weight" or not self._tied:
                raise InfeasibleError(
                    f"layers[{index}]: no file has the weight {own!r} of shape "
                    f"{tuple(parameter.shape)}"
                )
            else:
                parameter.data.zero_()  # ``parallelize`` takes the embedding's values
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    @property
    def _tied(self) -> bool:
        return bool(self._model.config.tie_word_embeddings)

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

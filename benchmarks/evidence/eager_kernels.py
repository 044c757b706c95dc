"""Writes conf/eager_kernels.csv: what one block of public model code runs, one kernel per operator.

A block of each model of ``transformers``, and of this suite's own, runs forward and backward on the
emulated device (``zeropp.emulate``), without ``torch.compile``, at several widths; from them follow
the bytes that it moves per token and unit of each width. Products and attention are left out, as
they are priced apart; attention is one kernel that takes and leaves heads as they lie. What does
not grow with tokens and widths (biases, scales, angles of a rotation) is too small to count.

    python -m benchmarks.evidence.eager_kernels     # half a minute; needs no GPU
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from baselines.model import build_piece, make_norm
from benchmarks.specification.command import CommandParser, command
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.emulation import as_on_cuda, emulated
from zeropp.emulate.kernels import describe
from zeropp.emulate.private_names import FakeTensorMode
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.price.eager import TABLE, EagerPass
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

TOKENS, HEAD = 1 << 15, 64  # tokens, beside which what does not grow with them is nothing
Widths = tuple[int, int, int]  # of a hidden state, of keys or values, of the MLP
WIDTHS: tuple[Widths, ...] = (
    (512, 128, 1536), (1024, 128, 1536), (512, 256, 1536), (512, 128, 3072), (2048, 256, 3072)
)  # fmt: skip
TYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Model code by its ``model_type`` in transformers; "suite" is baselines/model.py.
CODES = ("llama", "qwen2", "qwen3", "gpt_neox", "gpt2", "suite llama", "suite gpt")
_KEYS_AS_WIDE = ("gpt_neox", "gpt2", "suite gpt")  # as a hidden state
_ATTENTION = "priced apart"
_VIEWS = ("detach", "_unsafe_view")


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the views that the host makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.views += function.is_view or function.overloadpacket.__name__ in _VIEWS
        return function(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Allocates what a GPU's attention does: all results lie as queries, keys and values do."""

    @staticmethod
    def forward(ctx: Any, *heads: Tensor) -> Tensor:
        output = torch.empty_like(heads[0])
        ctx.save_for_backward(*heads, output)
        return output

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    return _Attention.apply(query, key, value).transpose(1, 2), None  # type: ignore[no-untyped-call]


def _config(code: str, widths: Widths) -> Any:
    """A model of one block without dropout."""
    hidden, keys, ffn = widths
    heads, one = hidden // HEAD, {"vocab_size": 512, "attn_implementation": _ATTENTION}
    if code == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": hidden, "n_layer": 1, "n_head": heads, "n_inner": ffn}
        return AutoConfig.for_model(code, **sizes, **off, **one, n_positions=TOKENS)
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads}
    sizes |= {"intermediate_size": ffn, "max_position_embeddings": TOKENS}
    if code != "gpt_neox":
        sizes |= {"num_key_value_heads": keys // HEAD, "head_dim": HEAD}
    return AutoConfig.for_model(code, **sizes, **one)


Part = Callable[[Tensor], Any]


def _parts(code: str, widths: Widths, kind: torch.dtype) -> dict[str, Part]:
    """A model's block and its last norm, each to be called with a hidden state."""
    hidden, keys, ffn = widths
    if code.startswith("suite"):
        family: Any = code.split()[1]
        shape = ModelShape(
            name=code, family=family, layers=1, hidden=hidden, heads=hidden // HEAD,
            kv_heads=(hidden if code in _KEYS_AS_WIDE else keys) // HEAD, ffn=ffn, vocab=512,
            seq=TOKENS,
        )  # fmt: skip
        parts = {"block": build_piece(shape, 1, 0), "norm": make_norm(shape)}
        for parameter in chain(*(part.parameters() for part in parts.values())):
            parameter.data = parameter.data.to(kind)
        return parts  # type: ignore[return-value]
    model = AutoModelForCausalLM.from_config(_config(code, widths), dtype=kind).base_model
    if code == "gpt2":
        return {"block": model.h[0], "norm": model.ln_f}
    places = torch.arange(TOKENS)[None]
    angles = model.rotary_emb(torch.empty(1, TOKENS, hidden, dtype=kind), places)
    block = partial(model.layers[0], attention_mask=None, position_embeddings=angles)
    return {"block": block, "norm": model.final_layer_norm if code == "gpt_neox" else model.norm}


def _trace(run: Part, hidden: int, kind: torch.dtype) -> dict[str, tuple[int, float, float]]:
    """Of each pass of a part its kernels, launches, and bytes per token."""
    device, counter, kept = VirtualDevice(describe=describe), _Counter(), dict[int, Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        if TOKENS in tensor.shape:  # no parameter
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def seen(begin: int, views: int) -> tuple[int, float, float]:
        kernels = [issued.kernel for issued in device.log.issued[begin:] if issued.kernel]
        own = [kernel for kernel in kernels if kernel.product is None]
        launches = len(kernels) + (counter.views - views) / 2
        return len(own), launches, sum(kernel.moved for kernel in own) / TOKENS

    leaf = torch.zeros(1, TOKENS, hidden, dtype=kind, requires_grad=True)
    x = leaf.view_as(leaf)  # as a block before it would have made it
    with emulated(device), as_on_cuda(device), counter:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run(x)
        gradient = torch.empty_like(output)
        forward, begin, views = seen(0, 0), len(device.log.issued), counter.views
        torch.autograd.backward(output, gradient)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / TOKENS
    return {"forward": forward, "backward": seen(begin, views), "saved": (0, 0.0, saved)}


def rows_of(code: str, precision: Precision) -> Iterator[EagerPass]:
    """The rows of one model's code; raises ValueError where its bytes do not follow from widths."""
    AttentionInterface.register(_ATTENTION, _attend)
    kind = TYPES[precision]
    with FakeTensorMode():
        models = [_parts(code, widths, kind) for widths in WIDTHS]
        traced = [
            {part: _trace(run, widths[0], kind) for part, run in parts.items()}
            for widths, parts in zip(WIDTHS, models, strict=True)
        ]
    for part, passes in traced[0].items():
        used = [True, part == "block" and code not in _KEYS_AS_WIDE, part == "block"]
        known = np.array([[*np.multiply(widths, used), 1.0] for widths in WIDTHS])
        for name, (kernels, launches, _) in passes.items():
            moved = np.array([one[part][name][2] for one in traced])
            solved = np.linalg.lstsq(known, moved, rcond=None)[0]
            if np.abs(known @ solved - moved).max() > 0.01 * moved.max():
                raise ValueError(f"{code} {part} {name}: its bytes do not follow from its widths")
            hidden, keys, ffn = (round(float(each), 1) + 0.0 for each in solved[:3])
            yield EagerPass(
                code=code, precision=precision, part=part, name=name, kernels=kernels,
                launches=launches, hidden=hidden, keys=keys, ffn=ffn,
            )  # fmt: skip


@command
def main() -> int:
    """Write the table; see ``--help``."""
    CommandParser(
        description="Trace public model code and write conf/eager_kernels.csv."
    ).parse_args()
    names = [field.name for field in fields(EagerPass)]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for code in CODES:
            for precision in TYPES:
                writer.writerows(map(asdict, rows_of(code, precision)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

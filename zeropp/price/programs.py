"""Training programs as data: what a program overlaps, copies and keeps, with a source for each.

A *program* is one version of a piece of training software (Megatron-LM of 2021, DeepSpeed 0.19,
ZeroPP). Its traits are sizes and flags that change the time or memory of a step. Each program is a
file in ``conf/program``, which the installed package has, too: its ``version``; the program that it
is ``based_on``, if there is one, whose traits it takes over; and those of its ``traits`` that
differ, each with its ``value`` and its ``source``: the file and version in which it was read, the
table to which it was fitted, or the word "assumed" with the reason.

In: the name that a plan gives (``Plan.program``). Out: the ``Program``, whose traits the cost model
reads, and never its name. Plans, validation, tuner, verdict and contenders read the same files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from zeropp.price.cluster import Device
from zeropp.schedule.plan import SizedPlan
from zeropp.types.data import DATA
from zeropp.types.literals import Precision

# What selective recomputation runs again. "scores": the scores of unfused attention (arXiv
# 2205.05198, section 5). "elementwise": everything but the outputs of matrix products and of
# attention (``zeropp/engine/layers/chunk.py``). "half": every second block of fms-fsdp
# (``selective_checkpointing``). "alternate": all but attention and every second product, from the
# first one on
# (``selective_ac_option`` of torchtitan). "mlp": the MLP and the norm before it
# (``recompute_modules`` of Megatron-Core). "qkv": everything but queries, keys and values.
# "qkv_out": not the product behind attention, either (MaxText's ``save_qkv_proj`` and
# ``save_dot_except_mlp``).
Selective = Literal["scores", "elementwise", "half", "alternate", "mlp", "qkv", "qkv_out"]
# How ranks get the parameters that the others have updated under ZeRO-1. "gather": one all-gather.
# "broadcasts": a broadcast per rank, one after the other. "slices": an all-gather into a buffer,
# from which one kernel per rank and tensor copies that rank's slice of the tensor.
Updated = Literal["gather", "broadcasts", "slices"]
# The loss, where it is not fused. "in_place": Megatron's, whose gradient overwrites the logits.
# "torch": torch's own cross-entropy, with its temporaries. "in_place_under_tp": one like Megatron's
# with tensor parallelism, and torch's own without.
# "sliced": torch's slice by slice of the tokens, with the gradient of each (``in_slices`` of
# ``zeropp/engine/loss.py``).
LossGradient = Literal["in_place", "in_place_under_tp", "torch", "sliced"]
# How 8-bit products get their inputs. "fused": as Transformer Engine, one kernel reads a tensor and
# writes it and its transpose, norms write 8 bits themselves, and cast weights are kept. As torchao
# with torch.compile: "tensorwise" casts it and then transposes that; "apart" also reads it for the
# maximum, where that does not come with the kernel before; "rowwise" reads it for the maximum, and
# then to cast it, along rows and along columns; "mx" casts blocks of 32 along both.
Scaling = Literal["fused", "tensorwise", "apart", "rowwise", "mx"]
# What a program divides evenly among pipeline stages. "pieces": blocks, where embedding and head
# count as one block each if the number of blocks does not divide. "blocks": blocks alone.
# "modules": embedding, blocks, final norm and head; the first stages get the remainder.
# "flops": FLOPs. "cost": the time that pieces take on the cluster.
Spread = Literal["pieces", "blocks", "modules", "flops", "cost"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that a program keeps and sends at one precision, without any ZeRO."""

    parameters: int  # kept; with ZeRO-3 this is the copy that is sharded
    gradients: int  # kept
    optimizer: int  # Adam's moments, and fp32 master weights unless the parameters are fp32
    _: KW_ONLY
    half_gradients: int = 0  # kept 16-bit gradients in addition to ``gradients``
    # Moved per microbatch when a gradient is added to its sum; 0: as ``fused_accumulation`` says.
    accumulated: int = 0
    reduced: int = 4  # sent by gradient reductions, over the replicas and the ZeRO-3 group
    casts_parameters: bool = False  # compute uses 16-bit copies of fp32 parameters
    zero1_all_reduces: bool = False  # ZeRO-1 all-reduces all gradients, instead of reduce-scatter
    # The most gradients that ZeRO reduces at once, from one of two buffers of this many into which
    # it copies them; a larger parameter goes alone. 0: all of a stage, without buffers.
    bucket: int = 0
    copied: int = 0  # moved through memory by a reduction over the replicas: casts, copies, mean


@dataclass(frozen=True, kw_only=True)
class Program:
    """One training program. The default of a trait is what most programs do; the registry has a
    source for every other value."""

    name: str
    bf16: StateBytes  # and fp16
    fp32: StateBytes

    # Kernels.
    kernels: int = 0  # the year of its products and attention; 0: before any that a device names
    flash: bool = True  # attention is one kernel, and its scores are never in memory
    dropout_masks: bool = False  # dropout is on: masks are written, read and kept
    fused_loss: bool = False  # 16-bit logits only, without an fp32 copy (flash-attention's loss)
    # Tensor parallelism splits the loss; False: each rank gathers all logits for the whole loss.
    vocab_parallel: bool = True
    # The vocabulary is padded to a multiple of 128 without tensor parallelism, too.
    pads_vocabulary: bool = False
    scaling: Scaling = "fused"  # of 8-bit products
    # What 8-bit products keep of their inputs for the backward is the cast, and not the 16 bits.
    keeps_casts: bool = True
    # Weights of 8-bit products are cast before their gathers, once per step on the shards.
    gathers_casts: bool = False
    fused_accumulation: bool = True  # the product that makes a weight gradient adds it to the sum
    # Queries, keys and values are products of their own, which attention takes as they are; so are
    # both parts of a gated MLP's input.
    separate_projections: bool = False
    # With tensor parallelism the bias of a row-parallel product is added in a kernel of its own.
    separate_biases: bool = False
    fused_gate: bool = False  # a gated MLP keeps no output of the gate's non-linearity
    fused_rotary: bool = True  # rotary embedding copies no heads and keeps no sines and cosines
    loss_gradient: LossGradient = "in_place"
    short_loss: bool = False  # torch's loss computes in the type of the logits, not in fp32
    selective: Selective = "scores"
    # Recomputation ends once it has all saved tensors, so that it leaves out a block's last product
    # (torch's ``checkpoint`` with ``use_reentrant=False``) and the collective behind it. It does so
    # in a block that is compiled with its ``checkpoint``, too, as nothing in a backward's graph
    # needs that product. A function of autograd saves only after it has run, for which ZeroPP's
    # linear layers are two.
    stops_recomputing: bool = False
    delays_ends: bool = True  # a split backward delays the weight gradients of embedding and head
    attention_factor: float = 1.0  # its fused attention's rate / the device's (FlashAttention-2)
    # The most that its fused attention reaches, where the device's is that of newer kernels (0: the
    # device's). FlashAttention-2 has the instructions of Ampere on every later device.
    attention_tflops: float = 0.0
    # Its element-wise bytes / those of kernels fused per layer, or of its ``eager`` code.
    traffic_factor: float = 1.0
    # The same again where blocks rotate queries and keys, and torch.compile has not fused that.
    eager_traffic: float = 1.0
    # The model code whose operators are a kernel each, where torch.compile has not fused them: one
    # of conf/eager_kernels.csv, or "huggingface", which has one by family. "": kernels are those
    # that people write by hand.
    eager: str = ""
    launch_factor: float = 1.0  # its host time per kernel / the device's ``launch_us``
    # The host waits for every kernel before it starts the next one (CUDA_LAUNCH_BLOCKING=1).
    blocking_launches: bool = False

    # Communication.
    split_boundary: bool = False  # a TP rank sends a slice of the stage output; arXiv 2104.04473
    blocking_transfers: bool = False  # sender and receiver compute nothing during a transfer
    # A gated MLP's two input products are two layers. Without sequence parallelism, each of them
    # all-reduces its input gradient over the TP ranks.
    split_gate: bool = False
    # With sequence parallelism, a gather or reduce-scatter of activations goes with a copy: tensors
    # are [sequence, token, width], so that a rank's slice is not in one piece.
    copies_slices: bool = False
    # The product of a column-parallel layer's weight gradient runs beside the collective of its
    # input gradient.
    overlap_input_gradient: bool = False
    overlap_tensor: bool = False  # with sequence parallelism, TP collectives overlap the products
    overlap_reduction: bool = False  # gradient reductions overlap the last backward
    overlap_updated: bool = False  # ZeRO-1's parameter gathers overlap the next forward
    updated_bucket: int = 0  # the least elements of these gathers; 0: Megatron-Core's default
    updated: Updated = "gather"
    zero1_group: int = 0  # replicas of a ZeRO-1 group; 0: all of them
    zero3: bool = False  # its ZeRO-3 can be priced: the gathers of each piece overlap compute
    shard_copies: bool = False  # ZeRO-3 copies between parameters and the collectives' buffers
    # DeepSpeed's ZeRO-3 (``zeropp/price/zero3.py``), in elements: of tensors that are gathered
    # ahead or kept for their next use (0: no such ZeRO-3); of those that are gathered together (0:
    # each alone); of the largest tensor that is gathered once per step.
    live_parameters: int = 0
    gathered_together: int = 0
    persistent: int = 0
    # Ranks, side by side, over which it cuts a second copy of the parameters (ZeRO++, hpZ).
    zero_hpz_partition_size: int = 1
    post_validation: bool = False  # a rank updates before it knows the others' gradient norms

    # Memory. ``zeropp/price/memory.py`` says what each trait costs.
    resident_gradients: bool = True  # always held; False: only from a step's first reduction on
    # Without a pipeline it adds whole gradients and reduces them once per step, at the price of
    # memory for them (FSDP's ``no_sync``); False: it reduces every microbatch's.
    reduces_once: bool = False
    keeps_gathered_inputs: bool = False  # sequence parallelism keeps products' gathered inputs
    # FSDP2's ``fully_shard`` is applied to every piece, even where the group is one rank.
    fsdp_hooks: bool = False
    # The whole model is one FSDP2 root. Then two pieces' parameters are gathered at any time, each
    # just before its use; gradients are reduced per microbatch; and tied embeddings are one
    # parameter, which belongs to the root.
    fsdp_root: bool = False
    # FSDP2 releases gathered parameters after a forward, and after a backward but a step's last one
    # (``reshard_after_forward`` and ``set_reshard_after_backward``).
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    # The gradients of a model chunk are summed in one flat buffer, which is allocated at the
    # chunk's first backward after a reduction and freed by the next reduction, which reads it.
    flat_chunks: bool = False
    # The stages are those of torch.distributed.pipelining: there are buffers for all messages of a
    # step, stage outputs are kept, a split backward frees no saved tensor early, compute waits for
    # the reduction of a stage's gradients over shards and replicas (``perform_reduce_grad`` of its
    # ``stage.py``), and shards are cast on its stream (``UNSHARD`` of its ``schedules.py``).
    torch_stages: bool = False
    # Such stages hold every message that they have sent until the end of the step.
    keeps_sent: bool = False
    # A product's weight gradient is a tensor of its own, which is then added to the resident sum.
    separate_weight_gradient: bool = False
    whole_embedding_gradient: bool = False  # each TP rank makes that of the whole vocabulary
    # As in DeepSpeed's ``PipelineEngine``: two permanent receive buffers, and messages are copied
    # out of them; stage outputs are kept; slices of a stage output are joined again; and the last
    # stage holds the logits of two microbatches.
    pipe_buffers: bool = False
    flattens_gradients: bool = False  # gradients are copied into one tensor to be reduced
    # Before an update gradients in the type of compute are copied into one tensor, and those of 16
    # bits cast to fp32.
    joins_gradients: bool = False
    # How often an update reads or writes the gradients of all parameters of a rank, to clear and to
    # scale them; 0: only of those that the rank updates (with ZeRO-1 a part).
    gradient_passes: int = 0

    # Defaults of the program.
    spread: Spread = "pieces"
    expandable_segments: bool = False  # the allocator's setting; it leaves less fragmented memory

    def __hash__(self) -> int:
        """The hash of the name alone, because a search needs it millions of times. Equality still
        compares all fields."""
        return hash(self.name)

    def attention_gain(self, device: Device) -> float:
        """Its fused attention's rate over the device's."""
        own = device.matmul_bf16_tflops * device.attention_efficiency * self.attention_factor
        slower = self.attention_tflops / own if self.attention_tflops else 1.0
        return self.attention_factor * min(1.0, slower)

    def loss_in_place(self, tp: int) -> bool:
        """Whether the loss is Megatron's, with this many tensor-parallel ranks."""
        return self.loss_gradient == "in_place" or (
            self.loss_gradient == "in_place_under_tp" and tp > 1
        )

    def state(self, precision: Precision) -> StateBytes:
        """The bytes per parameter at a precision."""
        return self.fp32 if precision == "fp32" else self.bf16


_TRAITS = frozenset(trait.name for trait in fields(Program))


@dataclass(frozen=True)
class ProgramEntry:
    """A program, its version, and a source per trait."""

    program: Program
    version: str
    sources: Mapping[str, str]

    @property
    def stated(self) -> tuple[str, ...]:
        """The names of the traits that differ from their default or that have none."""
        return tuple(
            trait.name
            for trait in fields(Program)
            if trait.name in ("bf16", "fp32")
            or (trait.name != "name" and getattr(self.program, trait.name) != trait.default)
        )


_FOLDER = DATA / "conf/program"


@cache
def program_names() -> tuple[str, ...]:
    """The names of all programs."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def entry_named(name: str) -> ProgramEntry:
    """The entry of a program; raises ValueError with the names that there are, or with the traits
    that its file misspells or gives no source for.

    ``megatron_core+overlap_tensor=false+bf16.gradients=2`` is a program with some traits switched
    by whoever runs it, as its command line can.
    """
    name, *switched = name.split("+")
    if switched:
        return _switched(entry_named(name), switched)
    if name not in program_names():
        raise ValueError(f"program={name!r}: not registered (known: {', '.join(program_names())})")
    return entry_of(name, _contents(name))


@cache
def _contents(name: str) -> dict[str, Any]:
    """What the file of an entry says."""
    import yaml

    contents: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text("utf-8"))
    return contents


def entry_of(name: str, contents: Mapping[str, Any]) -> ProgramEntry:
    """The entry that the contents of a file describe; raises ValueError as ``entry_named`` does.

    The source of a trait is never taken over with another value, because it speaks of the other
    value: a trait that is given without one has none, which only a default may.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if base := contents.get("based_on"):
        parent = entry_named(base)
        values |= vars(parent.program)
        sources |= parent.sources
    traits = contents.get("traits", {})
    if unknown := set(traits) - _TRAITS:
        raise ValueError(f"program={name!r}: unknown trait {', '.join(sorted(unknown))}")
    for trait, statement in traits.items():
        values[trait] = (
            StateBytes(**statement["value"]) if trait in ("bf16", "fp32") else statement["value"]
        )
        sources.pop(trait, None)
        if "source" in statement:
            sources[trait] = statement["source"]
    entry = ProgramEntry(Program(**{**values, "name": name}), contents["version"], sources)
    if unsourced := [trait for trait in entry.stated if trait not in entry.sources]:
        raise ValueError(f"program={name!r}: no source for {', '.join(unsourced)}")
    return entry


def _switched(entry: ProgramEntry, changes: list[str]) -> ProgramEntry:
    """The entry with traits, or single fields of a precision's state, that were switched."""
    program = entry.program
    for change in changes:
        path, _, value = change.partition("=")
        trait, _, field = path.partition(".")
        if trait not in _TRAITS:
            raise ValueError(f"program={entry.program.name!r}: unknown trait {trait}")
        new = _value(value)
        if field:
            new = replace(getattr(program, trait), **{field: new})
        program = replace(program, **{trait: new})
    program = replace(program, name="+".join([entry.program.name, *changes]))
    return replace(entry, program=program)


@cache
def _value(text: str) -> Any:
    """The value of a switched trait: few texts, of thousands of programs that a search tries."""
    import yaml

    return yaml.safe_load(text)


def program_named(name: str) -> Program:
    """A program; raises ValueError as ``entry_named`` does."""
    return entry_named(name).program


def entry_name(program: str, *, stock: bool) -> str:
    """The name with which a program is priced that is run as it comes (``stock``: without its
    overlaps, with its own or torch's plain loss, eager): that of ``conf/program/NAME_stock``, if
    there is one, without the switched traits that this entry states itself."""
    name, *switched = program.split("+")
    if not stock or f"{name}_stock" not in program_names():
        return program
    stated = _contents(f"{name}_stock")["traits"]
    kept = [change for change in switched if re.split("[.=]", change)[0] not in stated]
    return "+".join([f"{name}_stock", *kept])


@cache
def program_as_run(name: str, *, compiled: bool, rotates: bool = True) -> Program:
    """A program whose blocks run through ``torch.compile`` or do not; ``rotates``: whether they
    rotate queries and keys, which is the one chain of kernels in the suite's models. GPT has the
    same kernels compiled and not."""
    program = program_named(name)
    if program.eager:
        return replace(program, eager="", traffic_factor=1.0) if compiled else program
    factor = 1.0 if compiled or not rotates else program.eager_traffic
    return replace(program, traffic_factor=program.traffic_factor * factor)


def program_of(plan: SizedPlan) -> Program:
    """The program of a plan of the suite's models, as it runs them. Without torch.compile torchao's
    layers keep their inputs as they get them."""
    rotates = plan.shape.family == "llama"
    program = program_as_run(plan.program, compiled=plan.compile, rotates=rotates)
    if plan.precision == "fp8" and not plan.compile and program.scaling != "fused":
        program = replace(program, keeps_casts=False)
    return program


def sent_bytes(plan: SizedPlan, program: Program) -> int:
    """Bytes per gradient that a reduction sends, by the program or by the plan's
    ``reduce_dtype``."""
    return 2 if plan.reduce_dtype == "bf16" else program.state(plan.precision).reduced


def gathers(plan: SizedPlan) -> bool:
    """Whether parameters are gathered before use: because they are sharded, or because the program
    computes on 16-bit copies of fp32 parameters, as FSDP2's mixed precision does. The passes of
    DeepSpeed's ZeRO-3 include its gathers."""
    program = program_named(plan.program)
    return program.state(plan.precision).casts_parameters or (
        plan.layout.shards > 1 and not program.live_parameters
    )

"""What is asked: a file of another program joined with this command's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, cast

import yaml

from benchmarks.explain import huggingface, megatron, torchtitan
from benchmarks.explain.arguments import arguments_of
from benchmarks.explain.logs import has_steps
from benchmarks.explain.reading import Reading, share_of_ranks
from benchmarks.report.ratio_errors import memory_room
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.reading import preset, validated
from benchmarks.specification.run_spec import SearchSpec, check_heads, check_priced
from zeropp.choose.contender import WITHOUT_OFFLOAD, Contender
from zeropp.choose.task import Knobs, Task
from zeropp.price.cluster import Cluster
from zeropp.price.programs import entry_name, program_named
from zeropp.schedule.plan import SizedPlan

_REGISTERED = re.compile(r"[\w.]+:\w+")  # of torchtitan's config_registry
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn")  # a model's name stands for these
# Programs of Megatron's, which pad a vocabulary to a multiple of 128 x TP (training/tokenizer).
_PADDING = ("megatron_core", "megatron_core_local")
# The host's time per launch of blocks in eager mode over that of plain modules, by whether there is
# tensor parallelism and sequence parallelism: FSDP2, and with DTensor (host_time.csv).
_EAGER_HOST = {(False, False): 2.59, (True, False): 6.88, (True, True): 9.65}
_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")  # which may take arguments of their own
_INNER = ("model.", "contender.", "cluster.")
KEYS = (
    "num_gpus",
    "cluster",
    "global_batch",
    "microbatch_size",
    "precision",
    "contender",
    "memory_margin",
)


@dataclass(frozen=True)
class Question:
    """One configuration to price: ``microbatch_size`` and knobs may be ``auto``."""

    reading: Reading
    task: Task
    contender: Contender[Any]
    knobs: Knobs
    microbatch_size: Any
    memory_margin: float | None = None  # that best plans must leave; None: by published peaks


def ask(files: Sequence[str], words: Sequence[str], arguments: Sequence[str]) -> Question:
    """The question of a command line: at most one file, ``key=value`` words, and Megatron's
    arguments. Raises SpecError with one line for what cannot be asked."""
    given = _parse_words(words)
    num_gpus = given.get("num_gpus")
    if num_gpus is not None and (type(num_gpus) is not int or num_gpus < 1):
        raise SpecError(f"num_gpus={num_gpus!r}: must be a whole number of at least 1")
    if arguments and not files:
        reading = megatron.read_arguments(arguments_of(arguments), num_gpus, stated=True)
    elif len(files) == 1 and _REGISTERED.fullmatch(files[0]) and not Path(files[0]).exists():
        reading = torchtitan.read_registered(files[0], arguments, num_gpus)
    elif len(files) == 1 and (not arguments or files[0].endswith(_SCRIPTS)):
        reading = _read(Path(files[0]), num_gpus, arguments)
    elif len(files) == 2 and not arguments:
        reading = _read_pair([Path(file) for file in files], num_gpus)
    else:
        raise SpecError(
            "give one file, DeepSpeed's or Accelerate's file with the model's config.json, or "
            "Megatron-LM's arguments after --, where MODULE:FUNCTION of torchtitan has its own "
            "(see --help)"
        )
    return _question(reading, given)


def _parse_words(words: Sequence[str]) -> dict[str, Any]:
    """The values of ``key=value`` words."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or (key not in KEYS and not key.startswith(_INNER)):
            raise SpecError(
                f"{word}: must be key=value with a key among {', '.join(KEYS)}, model.KEY, "
                "contender.KNOB and cluster.KEY"
            )
        if key in values:
            raise SpecError(f"{word}: {key} is given twice (give only one of them)")
        values[key] = yaml.safe_load(value)
    return values


def _read(path: Path, num_gpus: int | None, own: Sequence[str] = ()) -> Reading:
    """The reading of a file, by its ending and content; ``own`` are a script's arguments."""
    text = _text(path)
    if path.suffix == ".toml":
        return torchtitan.read(text, num_gpus)
    if path.suffix == ".json":
        tree = _tree(path, text)
        return _record(tree) or huggingface.read(tree, num_gpus)
    if path.suffix in (".yaml", ".yml") and "MODEL_ARGS:" not in text:
        return _read_yaml(path, text, num_gpus)
    if path.suffix == ".py":
        raise SpecError(
            f"{path}: a recipe in Python is not run here (of torchtitan, give "
            "MODULE:FUNCTION, such as llama3:llama3_8b; of Megatron-Bridge, the run_config.yaml "
            "that cfg.to_yaml writes)"
        )
    if has_steps(text) and "- arguments -" not in text:
        raise SpecError(
            f"{path}: a log without a list of arguments says no configuration (give the file that "
            f"has it, and --measured {path})"
        )
    return megatron.read(text, num_gpus, path.parent, own)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write its mark
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


def _tree(path: Path, text: str) -> dict[str, Any]:
    """The mapping that a JSON or YAML file holds."""
    try:  # YAML has no tabs, which people's JSON has
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        kind, words = path.suffix[1:].upper(), " ".join(str(error).split())
        raise SpecError(f"{path}: not a {kind} file: {words}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: must hold keys with values")
    named = [key for key in ("base_model", "model_name_or_path", "modules") if key in tree]
    if named := [*named, *["model"] * isinstance(tree.get("model"), str)]:
        raise SpecError(
            f"{path}: a file of axolotl, LLaMA-Factory, swift or Primus names its model alone "
            f"({named[0]}): give the model's config.json with the file of DeepSpeed or "
            "Accelerate, or with contender=fsdp; or Megatron-LM's arguments after --"
        )
    return tree


def _read_yaml(path: Path, text: str, num_gpus: int | None) -> Reading:
    tree = _tree(path, text)
    if "distributed_type" in tree:
        raise SpecError(f"{path}: Accelerate's file has no model: give its config.json, too")
    if not all(isinstance(tree.get(key), dict) for key in ("model", "train")):
        raise SpecError(
            f"{path}: not a YAML file of Megatron-Bridge (model, train), of Megatron-LM's tests "
            "(MODEL_ARGS) or of Accelerate (distributed_type); of another trainer, such as NeMo, "
            "GPT-NeoX or OLMo, give the model's config.json, or Megatron-LM's arguments after --"
        )
    return megatron.read_bridge(tree, num_gpus)


def _read_pair(paths: list[Path], num_gpus: int | None) -> Reading:
    """The reading of a model's ``config.json`` and the file of its trainer, in either order."""
    trees = [_tree(path, _text(path)) for path in paths]
    (_, config), (trainer, tree) = sorted(
        zip(paths, trees, strict=True), key=lambda pair: "model_type" not in pair[1]
    )
    model = huggingface.read(config, num_gpus)
    if "distributed_type" in tree:
        return huggingface.accelerate(tree, model, num_gpus)
    if {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"} & set(tree):
        return huggingface.deepspeed(tree, model, num_gpus)
    raise SpecError(f"{trainer}: beside a config.json, must be of DeepSpeed or of Accelerate")


def _record(values: Mapping[str, Any]) -> Reading | None:
    """What a record of this suite says; None if the values are none."""
    spec = values.get("spec")
    if not isinstance(spec, dict):
        return None
    knobs = dict(spec["contender"])
    if hasattr(PRICED[knobs["name"]].knobs, "context"):  # which older records do not have
        knobs = {"context": 1, **knobs}
    reading = Reading(dialect="record", contender=knobs.pop("name"), pads=1)
    reading.model, reading.knobs = spec["model"], knobs
    keys = ("num_gpus", "global_batch", "microbatch_size", "precision")
    reading.settings = {key: spec[key] for key in keys} | {"cluster": spec["cluster"]["name"]}
    return reading


def _question(reading: Reading, given: Mapping[str, Any]) -> Question:
    settings = reading.settings | {key: given[key] for key in KEYS if key in given}
    model = reading.model | (changed := _below("model.", given))
    if "name" not in changed:
        other = [
            size for size in _SIZES if reading.model.get(size, model.get(size)) != model.get(size)
        ]
        model["name"] += "".join(f"_{model[size]}_{size}" for size in other)
    name = settings.get("contender", reading.contender)
    own = name == reading.contender
    chosen = (reading.knobs if own else {}) | _below("contender.", given)
    if own:
        _follow(chosen, settings, model, reading, given)
    if left := [f"model.{key}" for key in (*_SIZES, "vocab", "seq") if model.get(key) is None]:
        why = reading.unknown or f"{', '.join(left)}: the file does not say it"
        raise SpecError(f"{why} (give {' '.join(f'{key}=N' for key in left)})")
    reading.derived = [  # without what asks for a word that was given
        line for line in reading.derived if not any(f"give {key}" in line for key in given)
    ]
    for key, example in (("cluster", "h100"), ("num_gpus", "64"), ("global_batch", "512")):
        if settings.get(key) is None:
            raise SpecError(f"{key}: the file does not say it, or says auto (give {key}={example})")
    if name not in PRICED:
        raise SpecError(f"contender={name!r}: must be among {', '.join(PRICED)}")
    pads = reading.pads if own and reading.pads is not None else 128 * (name in _PADDING)
    _pad(model, pads, chosen.get("tp", 1), reading)
    keys = ("num_gpus", "global_batch", "precision", "memory_margin")
    values = {key: settings[key] for key in keys if key in settings}
    cluster = _changed(preset("cluster", settings["cluster"], Cluster), _below("cluster.", given))
    spec = validated(SearchSpec, {**values, "model": model, "cluster": cluster})
    check_heads(spec.model)
    check_priced(spec.cluster, spec.precision)
    # Only ZeroPP's users get offload without asking for it.
    if name != "zeropp":
        own_knobs = PRICED[name].knobs.__dataclass_fields__
        chosen = {k: off for k, off in WITHOUT_OFFLOAD.items() if k in own_knobs} | chosen
    knobs = cast("Knobs", validated(PRICED[name].knobs, chosen, "contender"))
    ranks = [getattr(knobs, degree, 1) for degree in ("shard", "replicate")]
    if own and reading.accumulates and "microbatch_size" not in settings and "auto" not in ranks:
        settings["microbatch_size"] = _microbatch_size(spec.global_batch, reading, *ranks)
    contender = _switched(PRICED[name], reading) if own else PRICED[name]
    size = settings.get("microbatch_size", "auto")
    margin = spec.memory_margin
    room = memory_room(contender.published_as).share if margin is None else margin
    task = replace(spec.task, memory_margin=room)
    return Question(reading, task, contender, knobs, size, margin)


def _follow(
    chosen: dict[str, Any],
    settings: dict[str, Any],
    model: Mapping[str, Any],
    reading: Reading,
    given: Mapping[str, Any],
) -> None:
    """Adjust what the file derives to what the words replace: the free data-parallel degree, the
    global batch of this many sequences per replica, and "all blocks" of the recomputation."""
    if chosen.get("recompute", "none") not in ("none", "auto"):
        chosen.setdefault("recompute_blocks", model.get("layers"))
    degrees = [name for name in ("tp", "pp", "context", "shard", "replicate") if name in chosen]
    free, changed = reading.free, any(f"contender.{name}" in given for name in degrees)
    if not free or f"contender.{free}" in given or not (changed or "num_gpus" in given):
        return
    fixed: dict[str, Any] = {name: chosen[name] for name in degrees if name != free}
    if "auto" in fixed.values():
        chosen[free] = "auto"
        return
    chosen[free] = share_of_ranks(settings["num_gpus"], fixed)
    if reading.batch_per_replica and "global_batch" not in given:
        replicas = chosen[free] * chosen.get("replicate" if free == "shard" else "shard", 1)
        settings["global_batch"] = reading.batch_per_replica * replicas


def _microbatch_size(batch: int, reading: Reading, shard: int, replicate: int) -> int:
    """Sequences of each of the microbatches that the file gives a step; raises SpecError where
    they do not divide the batch."""
    size, left = divmod(batch, reading.accumulates * shard * replicate)
    if left:
        raise SpecError(
            f"global_batch={batch}: is not gradient_accumulation_steps={reading.accumulates} x "
            f"{shard * replicate} data-parallel ranks x N (give another, or microbatch_size=N)"
        )
    return size


def _pad(model: dict[str, Any], pads: int, tp: Any, reading: Reading) -> None:
    """Pad the vocabulary as the program does, to a multiple of ``pads`` x TP (0: not at all),
    so that it can be divided by every TP degree that a search tries."""
    size, multiple = model["vocab"], pads * (tp if type(tp) is int and tp > 0 else 1)
    if type(size) is int and multiple and size % multiple:
        model["vocab"] = -(-size // multiple) * multiple
        reading.derived.append(
            f"model.vocab={model['vocab']}: {size} padded to a multiple of {multiple}"
        )


def _changed(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    """A preset with other values of some keys, such as ``device.memory_gib``, and their name."""
    tree = asdict(cluster)
    for key, value in given.items():
        *sections, last = key.split(".")
        place: Any = reduce(lambda inner, name: inner.get(name) or {}, sections, tree)
        if not isinstance(place, dict) or last not in place:
            raise SpecError(f"cluster.{key}={value!r}: unknown key (conf/cluster has them)")
        place[last] = value
        tree["name"] += f" with {key}={value}"
    return validated(Cluster, tree, "cluster") if given else cluster


def _below(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): v for key, v in given.items() if key.startswith(prefix)}


def _switched(contender: Contender[Any], reading: Reading) -> Contender[Any]:
    """The contender with its program as the file switches it."""
    traits = tuple(sorted(reading.traits.items()))
    if not traits:
        return contender

    def size(task: Task, knobs: Any, microbatch_size: int) -> SizedPlan:
        plan, own = contender.size(task, knobs, microbatch_size), traits
        # What a file of Megatron-LM or of eager torchtitan does not switch on is off.
        stock = reading.eager or reading.dialect == "megatron"
        program = entry_name(plan.program, stock=stock)
        if reading.eager:
            layout = plan.layout
            host = _EAGER_HOST[layout.tp > 1, layout.sequence_parallel]
            plan, own = replace(plan, compile=False), (*traits, ("launch_factor", host))
        return replace(plan, program=_program(program, own))

    return replace(contender, size=size)


@lru_cache
def _program(name: str, traits: tuple[tuple[str, Any], ...]) -> str:
    """The name of a program with the traits that differ from its own."""
    program = program_named(name)
    differing = []
    for trait, value in traits:
        own: Any = program
        for part in trait.split("."):
            own = getattr(own, part)
        if own != value:
            differing.append(f"{trait}={json.dumps(value)}")
    return "+".join([name, *differing])

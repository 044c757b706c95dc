"""Reads whole configurations of ``conf/``, which Hydra composes from a command line. Every mistake
is a SpecError of one line."""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from benchmarks.specification import CONF, SpecError
from benchmarks.specification.command import CommandParser

# What a study gives to its points itself.
_STUDIED = ("model", "cluster", "contender", "num_gpus", "global_batch", "sequences_per_gpu")


def compose(config_name: str, words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The configuration of every point of the command line, or of ``words`` instead of it.

    Hydra only composes and starts nothing. So all points can be checked before the first is
    started, and a launcher sees the sweep as a whole. The list is empty if the words ask for help
    or for the configuration, which are printed. Raises SpecError with one line for words that are
    not understood.
    """
    asked = _parser().parse_intermixed_args(sys.argv[1:] if words is None else list(words))
    if asked.help and "all" not in asked.overrides:
        print(_short_help(config_name))
        return []
    overrides = [_any_knob(word) for word in asked.overrides if not (asked.help and word == "all")]
    if asked.config_dir is not None:
        if not asked.config_dir.is_dir():
            raise SpecError(f"--config-dir={asked.config_dir}: no such folder")
        overrides.append(f"hydra.searchpath=['file://{asked.config_dir.resolve()}']")
    parsed = [_parsed(word) for word in overrides]
    for override in parsed:
        _refuse_what_is_ignored(override)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            if asked.help:
                print(_help(config_name, overrides))
                return []
            points = _points(config_name, parsed, asked.multirun)
            if asked.cfg:
                texts = [OmegaConf.to_yaml(hydra.compose(config_name, list(p))) for p in points]
                print("---\n".join(texts), end="")
                return []
            from benchmarks.specification.progress import track  # what follows --help only

            with closing(track(points, len(points), "configurations read")) as each:
                return list(_composed(config_name, each))
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise SpecError(_one_line(error, overrides)) from None


def _composed(config_name: str, points: Iterable[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """The configuration of each point. Hydra composes every choice of groups once, for which it
    needs longer than a point takes to simulate, and sets the values of a point in a copy."""
    of_groups = lru_cache(lambda words: hydra.compose(config_name, list(words)))
    own = OmegaConf.load(CONF / f"{config_name}.yaml")
    for point in points:
        parsed = {word: _parsed(word) for word in point}
        values = {  # which choose no group nor anything of Hydra
            word: each
            for word, each in parsed.items()
            if not (each.is_sweep_override() or each.package)
            and not each.key_or_group.startswith("hydra.")
            and ("." in each.key_or_group or each.key_or_group in own)
        }
        config = deepcopy(of_groups(tuple(word for word in point if word not in values)))
        ConfigLoaderImpl._apply_overrides_to_config(list(values.values()), config)
        yield _plain(config)


def _parser() -> CommandParser:
    """Of Hydra's own flags, those that do here what they say; the others are refused."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-cd", "--config-dir", type=Path)
    return parser


def _refuse_what_is_ignored(override: Override) -> None:
    """Refuse what Hydra would do in a run of its own, a group without an option, a list of its
    options (Hydra takes the last one) and a sweep over nothing."""
    word, value, key = override.input_line or "", override.value(), override.key_or_group
    if re.match(r"hydra\b", key) and key != "hydra.searchpath":
        raise SpecError(
            f"{word.lstrip('+')}: would do nothing, as Hydra only composes here (-m sweeps, "
            "runs_dir and report_dir are the folders)"
        )
    if key == "experiment" and override.is_sweep_override():
        raise SpecError(f"{word}: give one (an experiment may be a sweep by itself)")
    if value is None and (CONF / key).is_dir() and not override.is_delete():
        raise SpecError(f"{word}: names no {key} (try {', '.join(options_of(key))})")
    options = value.list if isinstance(value, ChoiceSweep) else [value]
    if (CONF / key).is_dir() and any(isinstance(o, list) for o in options):
        raise SpecError(f"{word}: is a list, and one would run (give one, or a,b with -m)")
    is_empty = isinstance(value, RangeSweep) and not list(value.range())
    if is_empty or isinstance(value, IntervalSweep):
        raise SpecError(f"{word}: names no value that would run (write range(from,to,step))")


def _short_help(config_name: str) -> str:
    """What a person sets first, on one screen: the groups, and the keys that the configuration's
    own file explains."""
    words = OmegaConf.load(CONF / "hydra" / "help" / f"{config_name}.yaml")
    path = CONF / f"{config_name}.yaml"
    _, _, keys = path.read_text(encoding="utf-8").partition("\n\n")
    name = words.app_name
    return "\n".join(
        [
            f"{words.header}\n",
            f"usage: {name} [-m] [GROUP=OPTION ...] [KEY=VALUE ...]",
            f"       {name} --help all    every key of every group\n",
            *_options(groups_of(config_name)),
            f"\n{keys}",
            words.footer,
        ]
    )


def _options(groups: Sequence[str]) -> Iterator[str]:
    """One paragraph per group, with its options."""
    for group in groups:
        line = f"{group}={' | '.join(options_of(group))}"
        yield textwrap.fill(line, 78, subsequent_indent="  ", break_on_hyphens=False)


def groups_of(config_name: str) -> list[str]:
    """The groups that give a configuration one option each."""
    defaults = OmegaConf.load(CONF / f"{config_name}.yaml").defaults
    named = [str(key) for entry in defaults if isinstance(entry, DictConfig) for key in entry]
    return [name for name in named if " " not in name]  # without "override hydra/help"


def options_of(group: str) -> list[str]:
    """The names of the files in ``conf/<group>``."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _help(config_name: str, overrides: list[str]) -> str:
    """The text of ``conf/hydra/help``, with the groups and all keys of a configuration."""
    config = hydra.compose(config_name, overrides, return_hydra_config=True)
    template = config.hydra.help.template
    with open_dict(config):
        del config["hydra"]
    listed = {
        "APP_CONFIG_GROUPS": "\n".join(_options(groups_of(config_name))),
        "CONFIG": OmegaConf.to_yaml(config),
    }
    return Template(template).substitute(listed)


def _points(config_name: str, parsed: list[Override], is_sweep: bool) -> list[Sequence[str]]:
    """The overrides of every point. An experiment may be a sweep by itself, over what its file
    names and the command line does not."""
    _refuse_doubled(parsed)
    words = [override.input_line or "" for override in parsed]
    given = {override.key_or_group: override.input_line or "" for override in parsed}
    listed: list[list[str]] = [[]]
    if "experiment" in given:
        found = [given[key] for key in ("hydra.searchpath", "experiment") if key in given]
        whole = hydra.compose(config_name, found, return_hydra_config=True)
        own = whole.hydra
        is_sweep = is_sweep or str(own.mode).endswith("MULTIRUN")
        swept = own.sweeper.params or {}
        if "study" in whole and (ignored := [k for k in given if k.partition(".")[0] in _STUDIED]):
            study = f"{given['experiment']} chooses it by itself (see {whole.study}.* in --cfg job)"
            raise SpecError(f"{given[ignored[0]]}: {study}")
        words = [f"{key}={value}" for key, value in swept.items() if key not in given] + words
        if "points" in whole:
            listed = _listed(whole.points, given)
            if any("contender=" in line for line in whole.points):
                words = [word for word in words if not word.startswith("contender=")]
    if not is_sweep:
        return [words]
    (points,) = BasicSweeper.split_arguments([_parsed(word) for word in words], None)
    return [[*point, *more] for more in listed for point in points]


def _listed(lines: Sequence[str], given: Mapping[str, str]) -> list[list[str]]:
    """The words of the points that an experiment lists, one line each. The command line chooses
    among them by their contender, if they name one, and replaces what else it sets."""
    chosen = given.get("contender", "").partition("=")[2].split(",")
    listed = dict.fromkeys(word for line in lines for word in line.split() if "contender=" in word)
    for name in chosen if listed and "contender" in given else ():
        if f"contender={name}" not in listed:
            raise SpecError(f"contender={name}: no point of this experiment ({', '.join(listed)})")
    fitting = []
    for line in lines:
        own = {_parsed(word).key_or_group: _any_knob(word) for word in line.split()}
        contender = own.get("contender", "").partition("=")[2]
        if "contender" not in given or not contender or contender in chosen:
            kept = own.keys() - (given.keys() - {"contender"})
            fitting.append([word for key, word in own.items() if key in kept])
    return fitting


def _parsed(word: str) -> Override:
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        raise SpecError(
            f"{word.lstrip('+')}: is not key=value as Hydra reads it (quote it?)"
        ) from None
    if (started := GlobalHydra.instance()).is_initialized():
        parsed.config_loader = started.config_loader()  # which lists what glob() names
    return parsed


def _refuse_doubled(parsed: Sequence[Override]) -> None:
    """Refuse words where one would be ignored silently: a key that is set twice, and both the
    global batch and sequences per GPU."""
    seen: dict[str, str] = {}
    for override in parsed:
        word = (override.input_line or "").lstrip("+")
        key = override.key_or_group.replace("sequences_per_gpu", "global_batch")
        if key in seen:
            first, second = sorted([seen[key], word])
            raise SpecError(f"{first}: {second} sets it too (give only one of them)")
        seen[key] = word


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return cast("dict[str, Any]", values)


def _any_knob(word: str) -> str:
    """The word, with a ``+`` if it sets a contender's knob, so that Hydra accepts unknown knobs:
    the contender's own type refuses them with a better message."""
    return f"++{word}" if word.startswith("contender.") else word


def _one_line(error: Exception, words: Sequence[str]) -> str:
    """An error of Hydra in one line with a way out: ``-m`` for a list of values, the nearest key
    for a misspelt one, a group's options for an unknown one."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; it has no default"
    if isinstance(error, MarkedYAMLError) and (place := error.problem_mark):
        return f"{place.name}, line {place.line + 1}: no YAML: {error.problem}"
    lines = [line.strip(" \t;") for line in str(error).splitlines() if line.strip()]
    if "Ambiguous value" in lines[0]:
        listed = next((w for w in words if "," in w and w in lines[0]), lines[0])
        return f"{listed}: is a list of values; add -m to run each of them"
    for number, line in enumerate(lines):
        if line.startswith("Available options"):
            options = [o for o in lines[number + 1 :] if "=" not in o and ":" not in o]
            return f"{lines[0]} (try {', '.join(options)})"
    missing = re.search(
        r"Key '([^']+)' is not in struct|could not override '([^']+)'", str(error), re.I
    )
    last = next(filter(None, missing.groups())).rpartition(".")[2] if missing else ""
    word = next((w for w in words if w.partition("=")[0].rpartition(".")[2] == last), "")
    if not missing or not word:
        return "; ".join(lines[:2])
    above = word.lstrip("+~").partition("=")[0].rpartition(".")[0]
    known = {key for place, key in _known_keys() if place == above}
    near = difflib.get_close_matches(last, known - {last}, n=1, cutoff=0.7)
    near = near or sorted(key for key in known - {last} if f"_{last}" in f"_{key}")[:1]
    place, _, name = above.rpartition(".")
    own = place == "launcher" and (place, name) in _known_keys()  # a mapping of one's own keys
    if last in known or (own and not near):
        return f"{word}: sets a new key (write +{word})"
    path = ".".join(filter(None, (above, *near)))
    return f"{word}: there is no such key ({f'did you mean {path}?' if near else 'see --help'})"


@lru_cache
def _known_keys() -> frozenset[tuple[str, str]]:
    """(the keys above it, key) of every key that a command line may set."""
    known = {("", path.name) for path in CONF.iterdir() if path.is_dir()}
    for path in CONF.rglob("*.yaml"):
        above = "" if path.parent == CONF else path.parent.name
        known |= {*_keys(OmegaConf.to_container(OmegaConf.load(path)), above)}
    return frozenset(known)


def _keys(values: Any, above: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield above, str(key)
            yield from _keys(value, f"{above}.{key}".lstrip("."))

"""Reads ``conf/``: whole configurations, which Hydra composes from a command line, and presets.

Every mistake in either is a SpecError of one line.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from io import StringIO
from typing import Any, cast

import hydra
from hydra._internal.hydra import Hydra
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from benchmarks import CHECKOUT
from benchmarks.specification.command import SpecError

_CONF = CHECKOUT / "conf"
# How words begin that may choose a file which says that a command is a sweep (hydra.mode).
_MAY_BE_SWEEPS = ("experiment", "hydra", "-c", "--c")


def compose(config_name: str, words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The configuration of every point of the command line, or of ``words`` instead of it.

    Hydra only composes and starts nothing. So all points can be checked before the first is
    started, and a launcher sees the sweep as a whole. The list is empty if Hydra itself has
    answered the command (``--help``, ``--cfg``). Raises SpecError with one line for words that are
    not understood.
    """
    composed: list[DictConfig] = []
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise, so that the error can be one line
    collect = hydra.main(version_base="1.3", config_path=str(_CONF), config_name=config_name)
    words = _flags_first(sys.argv[1:] if words is None else list(words))
    asked = [_any_knob(word) for word in words]
    _refuse_two_batches(asked)
    with (
        tempfile.TemporaryDirectory() as scratch,  # for the files that Hydra writes in a sweep
        redirect_stderr(StringIO()) as usage,
        _arguments(asked),
        _composed_once(asked),
    ):
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        try:
            collect(composed.append)()
            return [_plain(config) for config in composed]
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise SpecError(_one_line(error, asked)) from None
        except SystemExit as end:
            if not end.code:  # --version
                raise
            why = usage.getvalue().strip().rpartition("error: ")[2]
            raise SpecError(f"{why} (see --help)") from None


@lru_cache
def preset(group: str, name: str, kind: type) -> Any:
    """The file ``conf/<group>/<name>.yaml`` as a ``kind``; raises SpecError if there is none."""
    path = _CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise SpecError(f"{group}={name!r}: no such preset (known: {known})")
    from benchmarks.specification.reading import validated  # what follows --help only

    return validated(kind, OmegaConf.to_container(OmegaConf.load(path)), group)


def _refuse_two_batches(words: Sequence[str]) -> None:
    """Refuse words that set both the global batch and sequences per GPU, since one of them would be
    ignored silently."""
    keys = {word.lstrip("+").partition("=")[0]: word for word in words}
    both = [keys[name] for name in ("global_batch", "sequences_per_gpu") if name in keys]
    if len(both) == 2:
        raise SpecError(f"{both[0]}: {both[1]} sets it too (give only one of them)")


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """Inside this context, ``sys.argv`` holds the words, because Hydra reads them from there."""
    kept = sys.argv
    sys.argv = [kept[0], *words]
    try:
        yield
    finally:
        sys.argv = kept


@contextmanager
def _composed_once(words: list[str]) -> Iterator[None]:
    """Inside this context, Hydra composes every configuration once, which takes half the time.

    By itself it composes the points of a sweep in advance to find errors, because launchers may
    start processes. Here its launcher does nothing but compose, so errors are found before anything
    starts. And before all it composes the whole command to learn whether a file makes it a sweep.
    Here only experiments do so.
    """
    check, mode = Sweeper.validate_batch_is_legal, Hydra.get_mode
    Sweeper.validate_batch_is_legal = lambda sweeper, batch: None  # type: ignore[assignment]
    if not any(word.lstrip("+").startswith(_MAY_BE_SWEEPS) for word in words):
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = check  # type: ignore[method-assign]
        Hydra.get_mode = mode  # type: ignore[method-assign]


def _flags_first(words: list[str]) -> list[str]:
    """The words with the flags first, since Hydra accepts no flag between overrides."""
    overrides = [w for w in words if w[:1] in ("+", "~") or ("=" in w and not w.startswith("-"))]
    return [word for word in words if word not in overrides] + overrides


def _any_knob(word: str) -> str:
    """The word, with a ``+`` if it sets a contender's knob, so that Hydra accepts unknown knobs:
    the contender's own type refuses them with a better message."""
    return f"++{word}" if word.startswith("contender.") else word


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return cast("dict[str, Any]", values)


def _one_line(error: Exception, words: Sequence[str]) -> str:
    """An error of Hydra in one line with a way out: ``-m`` for a list of values, the nearest key
    for a misspelt one, a group's options for an unknown one."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; it has no default"
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
    if missing and (path := _misspelt(words, missing)):
        return path
    return "; ".join(lines[:2])


def _misspelt(words: Sequence[str], missing: re.Match[str]) -> str:
    """The message for a key that no configuration has, with the key that is most like it."""
    last = next(part for part in missing.groups() if part).rpartition(".")[2]
    word = next((w for w in words if w.partition("=")[0].rpartition(".")[2] == last), "")
    if not word:
        return ""
    near = difflib.get_close_matches(last, known_keys(), n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else " (see --help)"
    return f"{word}: there is no such key{hint}"


@lru_cache
def known_keys() -> tuple[str, ...]:
    """Every key of every file in ``conf``, without the keys above it."""
    found: dict[str, None] = {}
    for path in sorted(_CONF.rglob("*.yaml")):
        _collect(OmegaConf.to_container(OmegaConf.load(path)), found)
    found |= dict.fromkeys(sorted(p.name for p in _CONF.iterdir() if p.is_dir()))
    return tuple(found)


def _collect(values: Any, found: dict[str, None]) -> None:
    if isinstance(values, dict):
        for key, value in values.items():
            found[str(key)] = None
            _collect(value, found)

"""What ``conf/`` says: Hydra composes it from a command line; a preset is read by its name.

Whatever is wrong with either is a SpecError of one line.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO
from typing import Any, cast

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from benchmarks import CHECKOUT
from benchmarks.specification.run_spec import SpecError, validated

_CONF = CHECKOUT / "conf"


def compose(config_name: str) -> list[dict[str, Any]]:
    """Let Hydra compose every point of the command line; it does nothing else.

    Collecting the points first is what lets all of them be checked before one is started, and
    lets a launcher see the sweep as a whole. Empty where Hydra has answered (``--help``,
    ``--cfg``).
    """
    composed: list[DictConfig] = []
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise, so that the error can be one line
    collect = hydra.main(version_base="1.3", config_path=str(_CONF), config_name=config_name)
    sys.argv[1:] = [_any_knob(word) for word in _flags_first(sys.argv[1:])]
    with (
        tempfile.TemporaryDirectory() as scratch,  # Hydra writes its own notes of a sweep there
        redirect_stderr(StringIO()) as usage,
    ):
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        try:
            collect(composed.append)()
            return [_plain(config) for config in composed]
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise SpecError(_one_line(error)) from None
        except SystemExit as end:
            if not end.code:  # --version
                raise
            why = usage.getvalue().strip().rpartition("error: ")[2]
            raise SpecError(f"{why} (see --help)") from None


@lru_cache
def preset(group: str, name: str, kind: type) -> Any:
    """``conf/<group>/<name>.yaml`` as a ``kind``; raises SpecError where there is none."""
    path = _CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise SpecError(f"{group}={name!r}: no such preset (known: {known})")
    return validated(kind, OmegaConf.to_container(OmegaConf.load(path)), group)


def _flags_first(words: list[str]) -> list[str]:
    """The words with all overrides behind the flags, since Hydra takes no flag between them."""
    overrides = [w for w in words if w[:1] in ("+", "~") or ("=" in w and not w.startswith("-"))]
    return [word for word in words if word not in overrides] + overrides


def _any_knob(word: str) -> str:
    """Let Hydra pass on every knob: which ones a contender has, its own type says, and better."""
    return f"++{word}" if word.startswith("contender.") else word


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return cast("dict[str, Any]", values)


def _one_line(error: Exception) -> str:
    """The first things an error says, and the options of a group that has no such one."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; it has no default"
    lines = [line.strip(" \t;") for line in str(error).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("Available options"):
            options = [o for o in lines[number + 1 :] if "=" not in o and ":" not in o]
            return f"{lines[0]} (try {', '.join(options)})"
    return "; ".join(lines[:2])

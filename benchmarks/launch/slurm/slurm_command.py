"""Runs Slurm's commands, with a time limit and errors of one line.

Commands run without environment variables that would change their meaning (``SQUEUE_STATES``,
``SLURM_CLUSTERS``, those of a surrounding salloc). Variables of sbatch that set a flag which the
script does not set are kept, because they are the site's defaults.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Collection, Mapping

# The flags of sbatch and srun that a point's resources and the suite's bookkeeping decide; neither
# a flag map nor a variable may.
OWNED = {
    *("array", "dependency", "distribution", "kill-on-bad-exit", "parsable", "signal", "wait"),
    *("nodes", "ntasks", "ntasks-per-node", "test-only", "clusters"),
    *("chdir", "error", "job-name", "open-mode", "output"),
}
TIMEOUT_S = 60.0
_NOISE = re.compile(r"^(sbatch|squeue|sacct|scontrol): (error: )?")
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}  # where Slurm is and who asks
_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SALLOC_", "SRUN_")
_ALIASES = {
    "array-inx": "array",
    "timelimit": "time",
    "mem-per-node": "mem",
    "no-requeue": "requeue",
}
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class SlurmError(RuntimeError):
    """Slurm refused or did not answer; the message is one line."""


class NoAnswerError(SlurmError):
    """A command was stopped after its time limit, so that it may have had its effect or not."""


def site_defaults(environment: Mapping[str, str], owned: Collection[str]) -> dict[str, str]:
    """The ``SBATCH_*`` variables for flags that neither the suite nor the script sets."""
    decided = OWNED | set(owned)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("SBATCH_") and not {_flag_of(name), _plain_flag_of(name)} & decided
    }


def _plain_flag_of(variable: str) -> str:
    return variable.removeprefix("SBATCH_").lower().replace("_", "-")


def _flag_of(variable: str) -> str:
    plain = _plain_flag_of(variable)
    return _ALIASES.get(plain, plain)


def call(*command: str, timeout_s: float = TIMEOUT_S, more: Mapping[str, str] | None = None) -> str:
    """The output of a command, within a time limit; ``more`` is added to its environment. Raises
    SlurmError with one line, which is a NoAnswerError if the command may have had its effect."""
    clean = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_PREFIXES)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            preexec_fn=_end_with_the_launcher,
            env=clean | dict(more or {}),
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found; is this a login node of a cluster?") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]}: no answer within {timeout_s:g} s") from None
    if done.returncode:
        lines = [_NOISE.sub("", line) for line in done.stderr.splitlines() if line.strip()]
        said = f"{command[0]}: {lines[-1] if lines else f'exit {done.returncode}'}"
        raise (NoAnswerError if _may_be_done(said) else SlurmError)(said)
    return done.stdout


def _end_with_the_launcher() -> None:
    """On Linux, end with the launcher: an sbatch that goes on after the launcher was killed would
    submit a job while the next launcher already looks for it."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _may_be_done(said: str) -> bool:
    """Whether an error may concern the answer only, so that the controller may have acted."""
    return bool(re.search(r"timed out|timeout|receive|connection (reset|refused)", said, re.I))

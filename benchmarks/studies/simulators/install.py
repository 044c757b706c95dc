"""Where the simulators come from: pinned versions, in an environment of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.specification import SpecError

_ADAPTERS = Path(__file__).parent
# dlcalc itself, and what the checkouts import.
_PACKAGES = (
    "dlcalc==0.2.0", "fire", "psutil", "numpy", "pandas", "matplotlib", "sympy", "tabulate",
    "graphviz", "tqdm",
)  # fmt: skip


@dataclass(frozen=True)
class Simulator:
    """A simulator of others: its adapter's name, its own name, and which version of it is asked."""

    adapter: str
    label: str
    version: str
    repository: str = ""  # on GitHub; empty: from the package registry
    commit: str = ""


SIMULATORS = (
    Simulator(
        "llm_analysis", "llm-analysis", "November 2024",
        "cli99/llm-analysis", "d841e40aec8c84b9e76ba9cfbce67418adb172bd",
    ),
    Simulator("dlcalc", "dlcalc", "0.2.0"),
    Simulator(
        "calculon", "Calculon", "February 2024",
        "calculon-ai/calculon", "caa4b11f8fe1fee3ba57adaacb7590d7deabd053",
    ),
    Simulator(
        "simumax", "SimuMax", "v1.2, May 2026",
        "MooreThreads/SimuMax", "4dcaae513ba7679d56c116a17cd4a691ec41e252",
    ),
)  # fmt: skip


def prepare(folder: Path) -> None:
    """Make an environment and the checkouts in ``folder``, where they are not there yet. Raises
    SpecError where a checkout is at another commit."""
    folder.mkdir(parents=True, exist_ok=True)
    if not _python(folder).exists():
        _run([sys.executable, "-m", "venv", str(folder / "env")])
        _run([str(_python(folder)), "-m", "pip", "install", "--quiet", *_PACKAGES])
    for simulator in SIMULATORS:
        if not simulator.commit:
            continue
        checkout = folder / simulator.adapter
        if not checkout.exists():
            _run(["git", "clone", f"https://github.com/{simulator.repository}", str(checkout)])
            _run(["git", "-C", str(checkout), "checkout", "--quiet", simulator.commit])
        head = _run(["git", "-C", str(checkout), "rev-parse", "HEAD"]).strip()
        if head != simulator.commit:
            raise SpecError(f"{checkout}: is at {head}, and {simulator.commit} is compared")


def ask(simulator: Simulator, folder: Path, runs: Sequence[Any]) -> list[dict[str, Any]]:
    """The answers of a simulator about runs: seconds of a step, or a reason."""
    worker, adapter = _ADAPTERS / "worker.py", _ADAPTERS / f"{simulator.adapter}.py"
    command = [str(_python(folder)), "-P", str(worker), str(adapter)]
    printed = _run([*command, str(folder / simulator.adapter)], given=json.dumps(runs))
    answers: list[dict[str, Any]] = json.loads(printed)
    return answers


def _python(folder: Path) -> Path:
    return folder / "env" / "bin" / "python"


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SpecError(f"{' '.join(command[:4])}: {last}")
    return done.stdout

"""Asks one adapter about runs, in the environment of its simulator: standard library alone.

python -P worker.py ADAPTER.py CHECKOUT < runs.json > answers.json
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def answer(adapter: ModuleType, run: Mapping[str, Any]) -> dict[str, Any]:
    """The seconds of the run's step, or the reason why the simulator cannot say them."""
    reason = adapter.refusal(run)
    if reason:
        return {"reason": reason}
    try:
        return {"step_s": adapter.step_s(run)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].line
        said = (str(error).strip() or where or type(error).__name__).splitlines()[0]
        return {"reason": f"it ends with {type(error).__name__}: {said}"}


def main() -> None:
    """Read runs from the standard input, write one answer each."""
    path, checkout = sys.argv[1:]
    sys.path.insert(0, checkout)
    sys.argv = sys.argv[:1]
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    warnings.simplefilter("ignore")
    logging.disable()
    runs = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        answers = [answer(adapter, run) for run in runs]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

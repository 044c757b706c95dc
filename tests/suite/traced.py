"""Scripts as ``zeropp replay`` traces them, from their texts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.specification.reading import preset
from zeropp.emulate.log import STEP, Issued, Kernel
from zeropp.emulate.trace import Trace, trace_script
from zeropp.price.cluster import Cluster

A800 = preset("cluster", "a800", Cluster)


def trace(text: str, ranks: int, folder: Path) -> list[Trace]:
    """The traces of a script's ranks."""
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return trace_script(str(script), [], ranks, A800)


def step_of(trace: Trace) -> list[Issued]:
    """What a rank issues in its second step."""
    begin, end = (place for place, issued in enumerate(trace.log) if issued.what == STEP)
    return list(trace.log[begin:end])


def kernels_of(trace: Trace) -> list[Kernel]:
    """The kernels of its second step."""
    return [issued.kernel for issued in step_of(trace) if issued.kernel]

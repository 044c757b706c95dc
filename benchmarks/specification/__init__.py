"""What a user asks the suite to run.

In: the YAML files of ``conf/`` and a command line. Out: a frozen, validated RunSpec per point, or
a SpecError of one line. Read ``run_spec`` (the fields and their checks), ``compose`` (Hydra),
``contenders`` (the registration of contenders), ``reading`` (plain values and presets as types) and
``command`` and ``progress`` (how commands end, and how they show progress).
"""

from zeropp.types.data import DATA
from zeropp.types.tolerances import EXACT

CONF = DATA / "conf"

# ``measure.gate_tolerance`` by default; runs with another one are marked wherever they are shown.
GATE_TOLERANCE = EXACT

# The types of published runs that have the products of a precision.
DTYPES = {"fp32": ("fp32",), "bf16": ("bf16", "fp16"), "fp8": ("fp8", "mxfp8")}


class SpecError(ValueError):
    """Bad input. The message is one line with the field, its value and what would work."""

"""Variables of CUDA's driver that a pipeline needs, set when the package is imported, and checked
before a model is built."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

from zeropp.types.layout import InfeasibleError

# CUDA's driver reads these when it is initialised; without them steps may hang. Kernels that are
# loaded on their first use, on several ranks at once, would wait for messages that wait for these
# ranks; and of the 8 hardware queues that are the default, two streams could share one, in which a
# send would wait for a receive that waits for its own sender.
CUDA_SETTINGS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def _driver_is_initialised() -> bool:
    """Whether something in this process has initialised CUDA's driver."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # nobody has loaded it
    not_initialised = 3
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialised)


# The settings that the driver was initialised without, before this package was imported.
CUDA_MISSED = [n for n in CUDA_SETTINGS if n not in os.environ] if _driver_is_initialised() else []
if not CUDA_MISSED:
    for _name, _value in CUDA_SETTINGS.items():
        os.environ.setdefault(_name, _value)
_STREAMS = 8  # of a pipeline rank: compute, three lanes, messages to and from two neighbours


def check_cuda(pp: int) -> None:
    """Refuse what CUDA was told where a pipeline would hang; raises InfeasibleError. Warns of what
    may hang: settings that CUDA was initialised without, and blocking launches."""
    if pp == 1:
        return
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not connections.isdecimal() or int(connections) < _STREAMS:
        raise InfeasibleError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a pipeline rank has {_STREAMS} streams, "
            "and two that share a hardware queue wait for each other for ever (set 32 before CUDA "
            "is used, or pp=1)"
        )
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "LAZY":
        raise InfeasibleError(
            "CUDA_MODULE_LOADING=LAZY: ranks that load kernels at their first use wait for "
            "messages of each other for ever (set EAGER before CUDA is used, or pp=1)"
        )
    if CUDA_MISSED:
        names = " and ".join(CUDA_MISSED)
        warnings.warn(
            f"CUDA was initialised without {names}: steps may hang (import zeropp earlier)",
            stacklevel=4,
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        warnings.warn(
            "CUDA_LAUNCH_BLOCKING is set: pipelines hang, because a rank that waits for its "
            "message to arrive never asks for its neighbour's (unset it, or pp=1)",
            stacklevel=4,
        )

"""Variables of CUDA's driver that a pipeline needs, set when the package is imported."""

from __future__ import annotations

import ctypes
import os
import sys

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

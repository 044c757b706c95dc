"""Peak memory of one rank, from the moment before its trainer is built.

On CUDA these are the allocator's allocated and reserved peaks. A CPU has no such allocator, so it
is the peak resident set above that at the start, with what libraries allocate on first use.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_RESET_PEAK = "5"  # proc(5): writing 5 to clear_refs resets VmHWM


class MemoryMeter:
    """Measures peak memory from its construction on."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        self._start_bytes = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        _return_free_memory()
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._start_bytes = _status_bytes("VmRSS")

    def peaks(self) -> dict[str, int]:
        """The peaks in bytes, with the field names of RankRecord."""
        if self._device.type == "cuda":
            return {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            }
        return {"peak_rss_bytes": max(0, _status_bytes("VmHWM") - self._start_bytes)}

    def peak_bytes(self) -> int:
        """The largest of the peaks: on a GPU what the allocator reserved."""
        return max(self.peaks().values())


def _return_free_memory() -> None:
    """Return freed pages to the system, so that they do not hide later growth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")

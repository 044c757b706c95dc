"""What a rank measures with: the peak of its memory, and a device that has ended its work."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from benchmarks.records.environment import read_code

# The code that this rank runs, read when its modules are imported: the files may be edited later.
# Ranks that are forked from one process have its modules, and so its digest.
LOADED = read_code(ask_git=os.environ.get("RANK", "0") == "0")


_RESET_PEAK = "5"  # proc(5): writing 5 to clear_refs resets VmHWM


class MemoryMeter:
    """Measures a rank's peak memory from its construction on, just before the trainer is built: on
    CUDA the allocator's allocated and reserved peaks; on a CPU, which has no such allocator, the
    peak resident set above that at the start, with what libraries allocate on first use."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        self._start_bytes = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # freed pages of the process would hide later growth
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
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


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

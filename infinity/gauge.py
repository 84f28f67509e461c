"""How much memory a device has for this process, and how much of it was in use at most.

Knows the allocator of the device. Must not know what is allocated.
"""

from __future__ import annotations

import torch


class CudaGauge:
    """What a CUDA device's caching allocator knows. All in bytes."""

    def __init__(self, device: torch.device):
        self.device = device

    def capacity_nbytes(self) -> int:
        """All that this process may allocate, with what it has."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return min(free + torch.cuda.memory_reserved(self.device), allowed)

    def free_nbytes(self) -> int:
        """What of it no tensor takes."""
        return self.capacity_nbytes() - torch.cuda.memory_allocated(self.device)

    def peak_nbytes(self) -> int:
        """The most that was allocated at a time since the last call."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def gauge_of(device: torch.device) -> CudaGauge | None:
    """What measures a device; None for the CPU, whose budget is what it was at the start."""
    return CudaGauge(device) if device.type == "cuda" else None

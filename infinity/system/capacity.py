"""The memory that a device and the host have for this process, and the peak use of the device.

Knows the device's allocator, which it sets to expandable segments, and the limits of control groups. Must not know what is allocated.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from infinity.errors import NO_DESCRIPTORS, ConfigError
from infinity.system.streams import has_streams

_PAGE_NBYTES = {"large": 20 << 20, "small": 2 << 20}  # units in which segments grow and shrink; "large" is for blocks of more than 1 MiB
_CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED_NBYTES = 1 << 60  # version 1 gives a number near 2^63 for "no limit"
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of version 2 and of version 1


# [Note: the peak that the program asks for]
# CUDA's allocator keeps one peak per device. The peak of one op is visible only between two resets. While the engine measures inputs, in
# the first step and after growth, each op resets `torch.cuda.max_memory_allocated()`. The peaks of reserved memory and similar values are
# reset as well, and lost. Programs ask for the first one, so the engine remembers it: `most_nbytes()` is the peak without the resets of
# this process's engines.

_most_nbytes: dict[torch.device, int] = {}  # the largest peak before the last reset
_given = ""  # the allocator's settings of this module
_failures: Counter[int] = Counter()  # failed allocations by device, of all callers


class CudaGauge:
    """The state of a CUDA device's caching allocator. Sizes in bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        _count_failures()

    def capacity_nbytes(self) -> int:
        """All memory that this process may have on the device, with the present memory, except the part that cannot be reused
        (`remains_of`).
        """
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        remains = remains_of(torch.cuda.memory_snapshot(), self.device.index) if _is_native() else 0
        return min(free + torch.cuda.memory_reserved(self.device), allowed) - remains

    def free_nbytes(self) -> int:
        """The part of the capacity that no tensor takes."""
        return self.capacity_nbytes() - torch.cuda.memory_allocated(self.device)

    def peak_nbytes(self) -> int:
        """The most bytes allocated at once since the last call, or a little more if other threads allocate meanwhile."""
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        between = self._allocated()["allocated"] - before["allocated"]  # no peak between the two calls is lost
        peak = max(before["peak"], before["current"] + between)
        _most_nbytes[self.device] = max(peak, _most_nbytes.get(self.device, 0))
        return peak

    def _allocated(self) -> dict[str, int]:
        """Bytes of tensors: current, peak, and allocated so far. The nested form takes the least time, and a measured step asks often."""
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]

    def num_failures(self) -> int:
        """The number of failed allocations on the device so far, of all callers; 0 if the allocator does not report failures."""
        return _failures[self.device.index]

    def most_nbytes(self) -> int:
        """The most bytes that the process allocated at once; see [Note: the peak that the program asks for]."""
        return max(torch.cuda.max_memory_allocated(self.device), _most_nbytes.get(self.device, 0))


_make_gauge: Callable[[torch.device], CudaGauge] = CudaGauge
_before_resize: Callable[[int], object] = lambda more_nbytes: None


def _is_native() -> bool:
    """Whether the allocator is PyTorch's own. cudaMallocAsync shows no blocks and reports no failures."""
    return torch.cuda.get_allocator_backend() == "native"


@functools.cache
def _count_failures() -> None:
    """Count failures from now on, permanently: the allocator cannot remove an observer."""
    if hasattr(torch._C, "_cuda_attach_out_of_memory_observer") and _is_native():
        torch._C._cuda_attach_out_of_memory_observer(_note_failure)


def _note_failure(device: int, nbytes: int, allowed_nbytes: int, free_nbytes: int) -> None:
    _failures[device] += 1


def remains_of(segments: list[dict], device: int) -> int:
    """Bytes between blocks in use that the allocator cannot reuse for larger blocks.

    segments: from `torch.cuda.memory_snapshot()`. An expandable segment can free whole pages; any other segment can only be freed as a
    whole.
    """
    remains = 0
    for segment in segments:
        idle = [block for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["device"] != device or len(idle) == len(segment["blocks"]):
            continue
        remains += sum(block["size"] for block in idle)
        if segment.get("is_expandable"):
            page = _PAGE_NBYTES[segment["segment_type"]]
            for block in idle:
                begin = block["address"] - segment["address"]
                remains -= max(0, (begin + block["size"]) // page - -(-begin // page)) * page
    return remains


def device_of(name: str | None) -> torch.device:
    """The device of a name, CUDA by default if there is a GPU. A CUDA device gets an index, by default the local rank's, and becomes the
    current device. Raises ConfigError if the device does not exist.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device={name!r}: expected 'cpu', 'cuda' or 'cuda:N'")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r}: this PyTorch finds no CUDA device; use device='cpu'")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device={name!r}: expected an index below {torch.cuda.device_count()}, the number of CUDA devices; got {index}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        expand_segments()
    return device


def expand_segments() -> None:
    """Set CUDA's allocator to expandable segments, unless the user's settings mention them. Memory freed by steps of changing sizes can
    then serve larger blocks, and an allocation fails only if memory is really short.
    """
    global _given
    settings = _settings()
    if "expandable_segments" not in settings and _is_native():
        _given = ",".join(filter(None, (settings, "expandable_segments:True")))  # a call replaces all settings
        set_ = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        set_(_given)


def _settings() -> str:
    """The allocator's settings: the last ones set, or those of the environment."""
    known = torch._C._accelerator_getAllocatorSettings() if hasattr(torch._C, "_accelerator_getAllocatorSettings") else ""
    return known or _given or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def gauge_of(device: torch.device) -> CudaGauge | None:
    """The gauge of a device; None for the CPU, whose budget is fixed at the start."""
    return _make_gauge(device) if has_streams(device) else None


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give a storage of the device another size. Its bytes are undefined afterwards, or gone."""
    _before_resize(nbytes - storage.nbytes())
    storage.resize_(nbytes)


def use_gauge(make: Callable[[torch.device], CudaGauge], before_resize: Callable[[int], object]) -> tuple:
    """make(device) gives the gauges from now on. before_resize(more_nbytes) is called by `resize`. No engine may be open. Returns the
    earlier ones."""
    global _make_gauge, _before_resize
    before = _make_gauge, _before_resize
    _make_gauge, _before_resize = make, before_resize
    return before


class Host:
    """The host of this process."""

    def free_nbytes(self) -> int:
        return _free_nbytes()

    def num_cores(self) -> int:
        return len(os.sched_getaffinity(0))


_host = Host()


def host_free_nbytes() -> int:
    """Host memory that this process may still use: the available memory, limited by its control groups. Raises OSError if no file can be
    opened to read the limits.
    """
    return _host.free_nbytes()


def num_cores() -> int:
    """Processor cores that this process may use."""
    return _host.num_cores()


def use_host(other: Host) -> Host:
    """The host is another one from now on. No engine may be open. Returns the earlier one."""
    global _host
    before, _host = _host, other
    return before


def _free_nbytes() -> int:
    try:
        text = Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""
        limits = [limit - used for folder in cgroup_folders(text, "memory") for limit, used in _memory_of(folder)]
        return max(0, min([psutil.virtual_memory().available, *limits]))
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        text = f"the limits of memory cannot be read ({error.strerror}); {NO_DESCRIPTORS[error.errno]}"
        raise OSError(error.errno, text, error.filename) from error


def cgroup_folders(text: str, controller: str) -> list[Path]:
    """Folders that may have limits, from the text of /proc/self/cgroup: this process's group and all above it, of version 2 and of version
    1.
    """
    folders = []
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        folders += [root / parent for parent in (group, *group.parents) if ".." not in parent.parts]
    return list(dict.fromkeys(folders))


def _memory_of(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit of a group, if any, and the memory in use without the page cache, which the kernel takes back."""
    for names in _CGROUP_FILES:
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NO_DESCRIPTORS:
                raise  # the group may have a limit
            continue
        if limit.isdigit() and int(limit) < UNLIMITED_NBYTES:
            cache = int(fields.get("file", fields.get("cache", 0))) - int(fields.get("shmem", 0))  # files in tmpfs stay
            yield int(limit), int(used) - cache

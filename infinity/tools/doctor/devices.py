"""The devices of this machine, with their drivers and libraries.

Knows the reports of torch and nvidia-smi. Must not know models, drives or the engine. As in system.py, functions that interpret take the
facts as arguments.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.sizes import format_bytes
from infinity.tools.doctor.findings import Finding, absent, attention, ok
from infinity.version import __version__

_QUERY = "index,pci.bus_id,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
_REINSTALL = "pip install --force-reinstall torch, from an index with CUDA (pytorch.org)"


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi reports it. Generations and widths that nvidia-smi does not report are 0."""

    index: int
    bus: str  # as in /sys: "0000:3b:00.0"
    driver: str
    generation: int
    most_generation: int
    width: int
    most_width: int


def cards_of(text: str) -> list[Card]:
    """Parse the output of the command in `read_cards`."""
    cards = []
    for line in filter(str.strip, text.splitlines()):
        index, bus, driver, *links = (field.strip() for field in line.split(","))
        links = [int(field) if field.isdigit() else 0 for field in links]
        cards.append(Card(int(index), re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", bus.lower()), driver, *links))
    return cards


def versions(numbers: dict[str, str | None]) -> Finding:
    """numbers: versions by name, in order; None for a missing component."""
    return ok("versions", ", ".join(f"{name} {number or '-'}" for name, number in numbers.items()))


def kernels(isas: Sequence[str], architecture: str) -> Finding:
    """isas: the variants of the update kernel that this processor can run, widest last."""
    detail = f"built; updates in host memory use {isas[-1]} (available: {', '.join(isas)})"
    if isas[-1] == "scalar" and architecture == "x86_64":
        remedy = "use a processor with AVX2, or set the CPU type of the hypervisor to host"
        return attention("extensions", f"{detail}: this processor has no AVX2", remedy)
    return ok("extensions", detail)


def gpus(seen: Sequence[tuple[str, int, tuple[int, int]]], cards: Sequence[Card], cuda: str | None, visible: str | None) -> list[Finding]:
    """seen: (name, bytes, compute capability) of torch's devices. cuda: torch.version.cuda. visible: CUDA_VISIBLE_DEVICES."""
    if seen:
        details = (f"{name}, {format_bytes(nbytes)}, compute capability {major}.{minor}" for name, nbytes, (major, minor) in seen)
        return [ok(f"GPU {i}", detail) for i, detail in enumerate(details)]
    if not cards:
        return [absent("GPU", "none; the engine runs on the CPU")]
    detail = f"nvidia-smi lists {len(cards)}, PyTorch finds none"
    if cuda is None:
        return [attention("GPU", f"{detail}: PyTorch is built without CUDA", _REINSTALL)]
    if visible is not None:
        return [attention("GPU", f"{detail}: CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")]
    remedy = f"install a driver for CUDA {cuda} or newer, or a PyTorch for driver {cards[0].driver}"
    return [attention("GPU", f"{detail}; PyTorch is built for CUDA {cuda}", remedy)]


def link(card: Card) -> Finding:
    """The PCIe link. An idle GPU lowers the generation, so only the width shows a fault."""
    what = f"PCIe {card.index}"
    if not card.width or not card.most_width:
        return absent(what, "nvidia-smi does not report the link")
    detail = f"generation {card.generation} of {card.most_generation} now, {card.width} of {card.most_width} lanes"
    if card.width >= card.most_width:
        return ok(what, detail)
    remedy = f"put the card into a slot of {card.most_width} lanes, or reseat it; sudo lspci -vv -s {card.bus}"
    return attention(what, f"{detail}: copies are slower", remedy)


def peers(reach: Sequence[Sequence[bool]]) -> Finding:
    """reach[i][j]: whether device i can read the memory of j."""
    pairs = [(i, j) for i in range(len(reach)) for j in range(i + 1, len(reach))]
    apart = [f"{i}-{j}" for i, j in pairs if not (reach[i][j] and reach[j][i])]
    if not pairs:
        return absent("peer access", "needs two GPUs or more")
    if not apart:
        return ok("peer access", f"all {len(pairs)} pairs of GPUs")
    detail = f"{len(apart)} of {len(pairs)} pairs of GPUs have none ({', '.join(apart[:8])}): gathers go through host memory"
    return attention("peer access", detail, "nvidia-smi topo -p2p r shows the reason, often ACS or IOMMU in the firmware settings")


def backends(gloo: bool, nccl: bool, num_devices: int) -> Finding:
    has = ", ".join(name for name, there in (("gloo", gloo), ("nccl", nccl)) if there) or "none"
    if num_devices > 1 and not nccl:
        return attention("distributed", f"torch.distributed has {has}, and nccl is missing", _REINSTALL)
    if not gloo:
        return attention("distributed", f"torch.distributed has {has}; ranks need gloo to agree", "pip install --force-reinstall torch")
    return ok("distributed", f"torch.distributed has {has}")


def read_cards() -> list[Card]:
    """The cards that nvidia-smi lists; an empty list if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return cards_of(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    return []


def read_versions(cards: Sequence[Card]) -> dict[str, str | None]:
    nccl = None
    if torch.cuda.is_available() and has_backend("nccl"):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    driver = cards[0].driver if cards else _loaded_driver()
    numbers = {"infinity": __version__, "Python": platform.python_version(), "PyTorch": torch.__version__}
    return numbers | {"CUDA": torch.version.cuda, "NCCL": nccl, "driver": driver}


def read_seen() -> list[tuple[str, int, tuple[int, int]]]:
    found = [torch.cuda.get_device_properties(i) for i in range(count())]
    return [(device.name, device.total_memory, (device.major, device.minor)) for device in found]


def read_reach() -> list[list[bool]]:
    numbers = range(count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in numbers] for i in numbers]


def count() -> int:
    """Devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_version() -> str | None:
    """The CUDA version that torch is built for."""
    return torch.version.cuda


def has_backend(name: str) -> bool:
    return torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available")()


def _loaded_driver() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module[^\d]*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else None
    return None

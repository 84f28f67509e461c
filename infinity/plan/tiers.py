"""Tiers: the places where a copy of a chunk can have its home, the fastest tier first.

Knows names, capacities, and the questions whose answers differ between tiers. Must not know how a tier keeps bytes: system/storage.py has the
interface of storage. Strings of a configuration become tiers in `tier_of` and `choice_of`; reports print `name` or `title`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from infinity.sizes import format_bytes

AUTO = "auto"


class Medium(enum.Enum):
    """The memory that a tier consists of."""

    DEVICE = "device memory"
    HOST = "host memory"
    STORAGE = "storage"


@dataclass(frozen=True)
class Tier:
    """A place for bytes.

    name: in a configuration, in files and in reports. title: in text for people. capacity_nbytes: budget of one rank in bytes, None if it is
    not known. Tiers with one name are equal, whatever their capacity.
    """

    name: str
    title: str = field(compare=False)
    medium: Medium = field(compare=False)
    capacity_nbytes: int | None = field(default=None, compare=False)

    @property
    def is_device(self) -> bool:
        """Whether ops and updates use a copy where it is, in device memory."""
        return self.medium is Medium.DEVICE

    @property
    def is_host(self) -> bool:
        """Whether a copy has a place of its own in host memory, which it never leaves."""
        return self.medium is Medium.HOST

    @property
    def is_storage(self) -> bool:
        """Whether a copy is read and written as an extent. On its way it borrows a slot of host memory, and it may be compressed."""
        return self.medium is Medium.STORAGE

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        capacity = "" if self.capacity_nbytes is None else f", {format_bytes(self.capacity_nbytes)}"
        return f"Tier({self.name}, {self.medium.value}{capacity})"


DEVICE = Tier("device", "device", Medium.DEVICE)
HOST = Tier("host", "host", Medium.HOST)
NVME = Tier("nvme", "NVMe", Medium.STORAGE)
TIERS = (DEVICE, HOST, NVME)  # the fastest first


def tier_of(name: str) -> Tier:
    """The tier that a configuration calls by this name. Raises KeyError."""
    return {tier.name: tier for tier in TIERS}[name]


def choice_of(name: str) -> Tier | None:
    """The tier of a configuration's choice; None for "auto", where the engine chooses."""
    return None if name == AUTO else tier_of(name)


def leaves_device(name: str) -> bool:
    """Whether a configuration's choice names a tier other than the device."""
    choice = choice_of(name)
    return choice is not None and not choice.is_device


def with_capacities(nbytes: Iterable[int | None]) -> tuple[Tier, ...]:
    """All tiers, the fastest first, each with its capacity in bytes."""
    return tuple(dataclasses.replace(tier, capacity_nbytes=capacity) for tier, capacity in zip(TIERS, nbytes, strict=True))


def in_storage(homes: Iterable[Tier]) -> list[int]:
    """The positions of the homes that are in storage."""
    return [index for index, home in enumerate(homes) if home.is_storage]

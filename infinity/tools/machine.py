"""A machine as a value: memory sizes and rates of links, measured by `infinity calibrate` or written by hand.

Knows names, units and files. Must not know how a rate is measured or used.

    [machine]
    devices = 8                      # per node; the other names contain the unit
    device_memory = "141 GB"
    ...
    [[machine.drives]]
    read_gbps = 3.4
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity import config_files
from infinity.errors import ConfigError
from infinity.sizes import parse_budget, parse_bytes
from infinity.spelling import nearest

MACHINES = Path(__file__).with_name("machines")  # files of machines in this package


@dataclass(frozen=True, kw_only=True)
class DriveRates:
    """One drive of a node. Rates in 10^9 bytes per second, None if not measured. mixed_gbps: reads plus writes, 14 reads per 12 writes."""

    path: str = ""
    """Swap directory on the drive; empty if there is none."""
    read_gbps: float | None = None
    write_gbps: float | None = None
    mixed_gbps: float | None = None
    capacity: int = 0
    """Bytes for swap files; 0 if unknown."""
    endurance: int = 0
    """Bytes that may be written in the drive's life (TBW); 0 if unknown."""
    unsure: tuple[str, ...] = ()
    """Names of rates that differed between the rounds of `infinity calibrate`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node, or several equal nodes. Sizes in bytes; files may have "141 GB". Rates of links in 10^9 bytes per second. `h2d_gbps`: one
    device alone. `h2d_all_gbps`: each device while all devices of a node copy. `host_gbps`: a node. A rate is None if it was not measured.
    Files leave such a rate out. `unsure`: names of rates and times that differed between the rounds of `infinity calibrate`."""

    name: str = ""
    nodes: int = 1
    devices: int = 1
    """Devices per node, with one rank each."""
    device: str = "cuda"
    """cuda, or cpu for a node that trains on the CPU."""
    device_memory: int
    device_tflops: float | None = None
    """10^12 floating-point operations per second of one device in matrix products; of a CPU, in all operations of a step."""
    attention_tflops: float = 0.0
    """The same of causal attention, which counts as if it were not causal; 0: as device_tflops."""
    device_gbps: float = 0.0
    """Bandwidth of one device's memory, reads plus writes, in operations that are no products; 0: these take no time."""
    device_update_gparams: float | None = None
    """10^9 parameters per second that one device updates in device memory."""
    cores: int = 0
    """Processor cores of a node, for the engine's threads; 0 if unknown."""
    host_memory: int
    host_gbps: float | None = None
    """Bandwidth of a node's host memory, reads plus writes, for the reader. Predictions do not use this rate."""
    update_gparams: float | None = None
    """10^9 parameters per second that a node's processors update in host memory, with AdamW."""
    h2d_gbps: float | None = None
    d2h_gbps: float | None = None
    h2d_all_gbps: float | None = None
    d2h_all_gbps: float | None = None
    gather_gbps: float = 0.0
    """10^9 bytes per second that one device receives in an all-gather over a node's devices; 0 for one device."""
    network_gbps: float = 0.0
    """10^9 bytes per second that a node receives from other nodes, over all its links. A rank gathers at this rate, as in NCCL's rings."""
    copy_latency_us: float = 10.0
    gather_latency_us: float = 20.0
    op_overhead_us: float = 0.0
    """Time of the training thread per op. On CUDA the whole time, because the device computes meanwhile. On the CPU only the engine's part."""
    job_overhead_us: float = 0.0
    """Time of Python for a job of an engine's threads. A job reads, copies, updates or writes one chunk, or copies one gradient."""
    beside_drives: float = 1.0
    """Share of its speed that a device of kind cpu keeps while the drives work."""
    unsure: tuple[str, ...] = ()
    drives: tuple[DriveRates, ...] = ()

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("nodes", "devices") and (type(value) is not int or value < 1):
                problems.append(f"machine: {field.name}={value!r}: expected a whole number above zero")
            if field.name == "cores" and (type(value) is not int or value < 0):
                problems.append(f"machine: cores={value!r}: expected a whole number, 0 if unknown")
            if field.name == "device" and value not in ("cuda", "cpu"):
                problems.append(f"machine: device={value!r}: expected 'cuda' or 'cpu'")
        problems += _settle(self, "machine", ("device_memory", "host_memory"))
        for number, drive in enumerate(self.drives):
            problems += _settle(drive, f"machine.drives[{number}]", ("capacity", "endurance"))
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def world(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices

    @property
    def unsure_names(self) -> list[str]:
        """The unsure figures of the machine and its drives that predictions use."""
        of_drives = [f"{name} of {drive.path or 'a drive'}" for drive in self.drives for name in drive.unsure]
        return [name for name in self.unsure if name != "host_gbps"] + of_drives

    def require_rates(self) -> None:
        """Raise ConfigError if a rate that predictions need is unknown."""
        fields = {name: getattr(self, name) for name in _names_of_rates(Machine) if name != "host_gbps"}
        for number, drive in enumerate(self.drives):
            fields |= {f"drives[{number}].{name}": getattr(drive, name) for name in _names_of_rates(DriveRates)}
        if missing := [name for name, rate in fields.items() if rate is None]:
            is_one = len(missing) == 1
            raise ConfigError(
                f"machine: {', '.join(missing)} {'is' if is_one else 'are'} not known: run `infinity calibrate` when nothing else runs there, "
                f"or write {'a value' if is_one else 'values'} into the file"
            )
        for name, num in (("gather_gbps", self.devices), ("network_gbps", self.nodes)):
            if num > 1 and not getattr(self, name):
                raise ConfigError(f"machine: {name} is not known: give the GB/s of collectives over {self.world} devices")

    def total(self, what: str) -> int:
        """`capacity` or `endurance` of all drives of a node; 0 if that of one drive is unknown."""
        each = [getattr(drive, what) for drive in self.drives]
        return sum(each) if all(each) else 0

    def drive_gbps(self, what: str) -> float:
        """`read`, `write` or `mixed` of all drives of a node at once."""
        return sum(getattr(drive, f"{what}_gbps") or 0.0 for drive in self.drives)

    @classmethod
    def load(cls, path: Path | str) -> Machine:
        """The machine in a file, or one of MACHINES by name. Raises ConfigError with all wrong and missing values."""
        if not Path(path).exists() and Path(path).suffix == "":
            names = sorted(file.stem for file in MACHINES.glob("*.toml"))
            if str(path) not in names:
                raise ConfigError(f"machine {path}: there is no such file; the machines that come with infinity are {', '.join(names)}")
            path = MACHINES / f"{path}.toml"
        content = config_files.read(path).get("machine")
        if not isinstance(content, Mapping):
            raise ConfigError(f"{path} has no table [machine]; `infinity calibrate` writes one")
        try:
            return cls.from_table(content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_table(cls, content: Mapping) -> Machine:
        content = {name: value for name, value in content.items() if name not in _FORGOTTEN}
        drives = content.pop("drives", [])
        if not isinstance(drives, list) or not all(isinstance(drive, Mapping) for drive in drives):
            raise ConfigError("machine.drives: expected a list of tables: [[machine.drives]]")
        problems = _check_names(cls, content, "machine")
        for number, drive in enumerate(drives):
            problems += _check_names(DriveRates, drive, f"machine.drives[{number}]")
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**content, drives=tuple(DriveRates(**drive) for drive in drives))

    def to_table(self) -> dict:
        """The table from which `from_table` makes this machine, without unknown rates and without times that have their defaults."""

        def known(value) -> dict:
            fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.name != "drives"]
            fields = [(field, list(each) if field.name == "unsure" else each) for field, each in fields]
            left_out = {field.name for field, each in fields if field.name.endswith("_us") and repr(each) == repr(field.default)}
            return {field.name: each for field, each in fields if each not in (None, []) and field.name not in left_out}

        return known(self) | {"drives": [known(drive) for drive in self.drives]}


def _names_of_rates(cls) -> list[str]:
    """Names of the fields that may be None."""
    return [field.name for field in dataclasses.fields(cls) if field.type == "float | None"]


_MAY_BE_ZERO = ("gather_gbps", "network_gbps", "device_gbps", "attention_tflops", "_us")
_FORGOTTEN = ("chunk_overhead_us",)  # of older files


def _settle(value, where: str, sizes: tuple[str, ...]) -> list[str]:
    """Convert sizes to bytes, and check rates. Returns the problems."""
    problems = []
    for field in dataclasses.fields(value):
        given, is_number = getattr(value, field.name), field.type.startswith("float")
        if given is None and field.type.endswith("None"):
            continue
        try:
            if field.name in sizes:
                nbytes = parse_bytes(given)
                object.__setattr__(value, field.name, parse_budget(given) if nbytes else nbytes)
            elif is_number and (isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf):
                raise ConfigError(f"expected a number, zero or above; got {given!r}")
            elif is_number and not given and not field.name.endswith(_MAY_BE_ZERO):
                raise ConfigError("expected a rate above zero; got 0")
            elif field.type == "str" and field.name != "device" and not isinstance(given, str):
                raise ConfigError(f"expected text; got {given!r}")
            elif field.name == "unsure":
                object.__setattr__(value, "unsure", _names(given, value))
        except ConfigError as error:
            problems.append(f"{where}: {field.name}: {error}")
    return problems


def _names(given, value) -> tuple[str, ...]:
    """Names of figures in `value`, from a list."""
    figures = [field.name for field in dataclasses.fields(value) if field.type.startswith("float")]
    if not isinstance(given, (list, tuple)) or not all(name in figures for name in given):
        raise ConfigError(f"expected a list with names of {', '.join(figures)}; got {given!r}")
    return tuple(dict.fromkeys(given))


def _check_names(cls, content: Mapping, where: str) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "drives"}
    problems = []
    for name in content:
        if name not in fields:
            near = nearest(name, fields)
            problems.append(f"{where} has no {name!r}" + (f": did you mean {near!r}?" if near else f": it has {', '.join(fields)}"))
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in content]
    if missing:
        problems.append(f"{where}: {', '.join(missing)} missing")
    return problems

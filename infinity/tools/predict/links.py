"""The links of a machine for one rank: the time of work on each link, and the speed of links that are busy together.

All ranks do the same work at the same time. The rates of shared parts, such as drives, are therefore divided by the ranks of a node. Pure.
Knows a machine's rates.
"""

from __future__ import annotations

from infinity.tools.predict.machine import Machine

LINKS = ("compute", "all_gather", "h2d", "nvme_read", "reduce_scatter", "d2h", "update", "nvme_write")
UPDATE_NBYTES = 26  # per parameter in the measured update rate: a bf16 record, read and written, and a gradient
READ_SHARE = 0.6  # share of reads in a drive's mixed rate, during reads and writes


class Links:
    """The links of one of `world` ranks. Raises ConfigError if a needed rate is unknown, such as that of collectives."""

    def __init__(self, machine: Machine, world: int):
        machine.require_rates()
        self.machine, self.world = machine, world
        self.cpu = machine.device == "cpu"
        share = machine.devices
        alone = "" if share == 1 else "_all"
        self.h2d = getattr(machine, f"h2d{alone}_gbps") * 1e9
        self.d2h = getattr(machine, f"d2h{alone}_gbps") * 1e9
        self.read, self.write, self.mixed = (machine.drive_gbps(what) * 1e9 / share for what in ("read", "write", "mixed"))
        self.update_rate = machine.update_gparams * 1e9 * UPDATE_NBYTES / share  # bytes per second
        rates = [machine.gather_gbps] if share > 1 else []
        rates += [machine.network_gbps / share * (world - 1) / (world - share)] if world > share else []  # of all received bytes
        self.collective = min(rates, default=0.0) * 1e9

    def copy_seconds(self, link: str, nbytes: int) -> float:
        return nbytes / (self.h2d if link == "h2d" else self.d2h) + self.machine.copy_latency_us * 1e-6

    def drive_seconds(self, link: str, nbytes: int) -> float:
        return nbytes / (self.read if link == "nvme_read" else self.write)

    def update_seconds(self, nbytes: int) -> float:
        return nbytes / self.update_rate

    def collective_seconds(self, nbytes: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of `nbytes`."""
        return nbytes * (self.world - 1) / self.world / self.collective + self.machine.gather_latency_us * 1e-6

    def compute_seconds(self, seconds: float, num_fetched: int, num_complete: int) -> float:
        """Seconds of an op, with overheads. num_fetched: chunks fetched for it. num_complete: chunks whose gradient it completes."""
        overhead = (num_fetched + 2 * num_complete) / 4 * self.machine.chunk_overhead_us * 1e-6  # of two fetches, a gradient, an update
        op_seconds = self.machine.op_overhead_us * 1e-6
        return (seconds + op_seconds if self.cpu else max(seconds, op_seconds)) + overhead

    def speeds(self, links: frozenset[str]) -> dict[str, float]:
        """The speed of each link, at most 1, while all these links are busy."""
        speeds = dict.fromkeys(links, 1.0)
        if "nvme_read" in links and "nvme_write" in links:
            speeds["nvme_read"] = min(1.0, READ_SHARE * self.mixed / self.read)
            speeds["nvme_write"] = min(1.0, (1 - READ_SHARE) * self.mixed / self.write)
        if not self.cpu and "update" in links:  # updates and copies share host memory
            copied = sum(rate for link, rate in (("h2d", self.h2d), ("d2h", self.d2h)) if link in links)
            demand = 1 + copied / self.update_rate
            speeds |= {link: 1 / demand for link in ("update", "h2d", "d2h") if link in links}
        if self.cpu:
            shares = {"compute": 1.0, "update": 1.0, "h2d": 0.5, "d2h": 0.5, "all_gather": 0.5, "reduce_scatter": 0.5}
            demand = sum(shares.get(link, 0.0) for link in links)
            if demand > 1:
                speeds |= {link: 1 / demand for link in links if link in shares}
        return speeds

"""What a machine's links give to one rank: how long work takes on each, and how fast those go that are busy together.

Ranks do the same at the same time, so what they share, such as drives, is divided by their number. Pure; knows a machine's rates.
"""

from __future__ import annotations

from infinity.tools.predict.machine import Machine

LINKS = ("compute", "all_gather", "h2d", "nvme_read", "reduce_scatter", "d2h", "update", "nvme_write")
UPDATE_NBYTES = 26  # a parameter, of the update that a machine's rate is of: a bf16 record, read and written, and its gradient
READ_SHARE = 0.6  # of a drive's mixed rate, while both directions are under way


class Links:
    """Of one of `world` ranks. Raises ConfigError for ranks without collectives."""

    def __init__(self, machine: Machine, world: int):
        machine.require_rates()
        self.machine, self.world = machine, world
        self.cpu = machine.device == "cpu"
        share = machine.devices
        alone = "" if share == 1 else "_all"
        self.h2d = getattr(machine, f"h2d{alone}_gbps") * 1e9
        self.d2h = getattr(machine, f"d2h{alone}_gbps") * 1e9
        self.read, self.write, self.mixed = (machine.drive_gbps(what) * 1e9 / share for what in ("read", "write", "mixed"))
        self.update_rate = machine.update_gparams * 1e9 * UPDATE_NBYTES / share  # bytes a second
        rates = [machine.gather_gbps] if share > 1 else []
        rates += [machine.network_gbps / share * (world - 1) / (world - share)] if world > share else []  # of what a rank receives
        self.collective = min(rates, default=0.0) * 1e9

    def copy_seconds(self, link: str, nbytes: int) -> float:
        return nbytes / (self.h2d if link == "h2d" else self.d2h) + self.machine.copy_latency_us * 1e-6

    def drive_seconds(self, link: str, nbytes: int) -> float:
        return nbytes / (self.read if link == "nvme_read" else self.write)

    def update_seconds(self, nbytes: int) -> float:
        return nbytes / self.update_rate

    def collective_seconds(self, nbytes: int) -> float:
        """Of a gather of so many bytes, or a reduction."""
        return nbytes * (self.world - 1) / self.world / self.collective + self.machine.gather_latency_us * 1e-6

    def compute_seconds(self, seconds: float, num_fetched: int, num_complete: int) -> float:
        """Of an op, with what it costs the training thread: some chunks are fetched for it, and of some it completes the gradient."""
        overhead = (num_fetched + 2 * num_complete) / 4 * self.machine.chunk_overhead_us * 1e-6  # two fetches, a gradient, an update
        op_seconds = self.machine.op_overhead_us * 1e-6
        return (seconds + op_seconds if self.cpu else max(seconds, op_seconds)) + overhead

    def speeds(self, links: frozenset[str]) -> dict[str, float]:
        """Of each of the links, at most 1, while all of them are busy."""
        speeds = dict.fromkeys(links, 1.0)
        if "nvme_read" in links and "nvme_write" in links:
            speeds["nvme_read"] = min(1.0, READ_SHARE * self.mixed / self.read)
            speeds["nvme_write"] = min(1.0, (1 - READ_SHARE) * self.mixed / self.write)
        if not self.cpu and "update" in links:  # all three are bound by host memory
            copied = sum(rate for link, rate in (("h2d", self.h2d), ("d2h", self.d2h)) if link in links)
            demand = 1 + copied / self.update_rate
            speeds |= {link: 1 / demand for link in ("update", "h2d", "d2h") if link in links}
        if self.cpu:
            shares = {"compute": 1.0, "update": 1.0, "h2d": 0.5, "d2h": 0.5, "all_gather": 0.5, "reduce_scatter": 0.5}
            demand = sum(shares.get(link, 0.0) for link in links)
            if demand > 1:
                speeds |= {link: 1 / demand for link in links if link in shares}
        return speeds

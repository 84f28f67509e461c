"""The presence of each rank: the messages of one engine's ranks in the launcher's store, and the state of silent ranks.

Knows a store and processes. Must not know groups, collectives or the engine's work, which messages describe in words.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

# [Note: what a rank says of itself]
# Every WATCH_S each rank writes `here<rank>`: process, an increasing number, whether the rank has left, and position, such as "in
# step 4". The end of a rank without a message is certain on the same machine, where /proc tells, and follows from silence elsewhere. The
# message also distinguishes a rank that left, because the program ended or closed the engine, from a killed rank.


@dataclass
class Peer:
    """The last message of a rank: process, message number, time of arrival, whether the rank has left, and present or last position."""

    process: str = ""
    number: str = ""
    since: float = 0.0
    left: bool = False
    where: str = ""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process is known to be gone."""
        return bool(self.process) and has_ended(self.process)


class Peers:
    """The ranks of one engine, by their messages. store: the engine's torch.distributed.Store."""

    def __init__(self, store, rank: int, world: int):
        self._store, self.rank, self.world = store, rank, world
        self.where = ""  # position in this rank's last message
        self._number = 0
        self._peers = [Peer(since=time.monotonic()) for _ in range(world)]

    def say(self, where: str, *, left: bool = False) -> None:
        self._number += 1
        self.where = where
        self._store.set(f"here{self.rank}", f"{this_process()}\n{self._number}\n{'left' if left else ''}\n{where}")

    def has_come(self, rank: int) -> bool:
        """Whether the rank has written any message."""
        return self._store.check([f"here{rank}"])

    def look(self, *ranks: int) -> list[Peer]:
        """The messages of these ranks, by default of all. Each must have come."""
        ranks = ranks or tuple(range(self.world))
        for rank, text in zip(ranks, self._store.multi_get([f"here{rank}" for rank in ranks])):
            process, number, left, where = text.decode(errors="replace").split("\n", 3)
            if number != self._peers[rank].number:
                self._peers[rank] = Peer(process, number, time.monotonic(), bool(left), where)
        return [self._peers[rank] for rank in ranks]

    def known(self, rank: int) -> Peer:
        """The rank's message at the last look."""
        return self._peers[rank]


def this_process() -> str:
    """Identity of this process: the machine's boot, the process namespace, the pid and the start time. No other process has the same four."""
    return _identity(os.getpid())


@functools.cache
def _identity(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {_state(pid)[1]}"


def has_ended(process: str) -> bool:
    """Whether the process of this identity is known to be gone. False for other machines and containers."""
    boot, namespace, pid, began = process.split(" ")
    if [boot, namespace] != this_process().split(" ")[:2]:
        return False
    state, now = _state(int(pid))
    return now != began or state in "ZX"


def _state(pid: int) -> tuple[str, str]:
    """A process's state (Z: ended, not yet noticed by the parent) and start time from /proc; empty if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]

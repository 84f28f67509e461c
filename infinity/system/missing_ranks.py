"""Who is still there: what the ranks of one engine say of themselves in the launcher's store, and what is known of one that no longer does.

Knows a store and processes. Must not know groups, collectives or what an engine does: it is told in words.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

# [Note: what a rank says of itself]
# `here<rank>`, every WATCH_S: which process it is, a number that grows, whether it has left, and where it is, such as "in step 4". So a
# rank that ended without a word is known for certain on its own machine, where /proc tells, and by its silence elsewhere; and one that left
# because its program ended, or closed the engine, is told from one that was killed.


@dataclass
class Peer:
    """What a rank said last: in which process, the how manieth word it was, when it came, and where the rank was or, if it has left, had
    been."""

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
        """Whether its process is known to be gone."""
        return bool(self.process) and has_ended(self.process)


class Peers:
    """The ranks of one engine, by what they say. store: a torch.distributed.Store of their own."""

    def __init__(self, store, rank: int, world: int):
        self._store, self.rank, self.world = store, rank, world
        self.where = ""  # as this rank said last
        self._number = 0
        self._peers = [Peer(since=time.monotonic()) for _ in range(world)]

    def say(self, where: str, *, left: bool = False) -> None:
        self._number += 1
        self.where = where
        self._store.set(f"here{self.rank}", f"{this_process()}\n{self._number}\n{'left' if left else ''}\n{where}")

    def has_come(self, rank: int) -> bool:
        """Whether it has said anything so far."""
        return self._store.check([f"here{rank}"])

    def look(self, *ranks: int) -> list[Peer]:
        """What these ranks say, by default all; each has come."""
        ranks = ranks or tuple(range(self.world))
        for rank, text in zip(ranks, self._store.multi_get([f"here{rank}" for rank in ranks])):
            process, number, left, where = text.decode(errors="replace").split("\n", 3)
            if number != self._peers[rank].number:
                self._peers[rank] = Peer(process, number, time.monotonic(), bool(left), where)
        return [self._peers[rank] for rank in ranks]

    def known(self, rank: int) -> Peer:
        """What it said when it was last looked at."""
        return self._peers[rank]


def this_process() -> str:
    """Its machine's boot, its namespace of processes, its number and when it began: no other process has these four."""
    return _identity(os.getpid())


@functools.cache
def _identity(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {_state(pid)[1]}"


def has_ended(process: str) -> bool:
    """Whether the process that said this of itself is known to be gone; of another machine or container none is."""
    boot, namespace, pid, began = process.split(" ")
    if [boot, namespace] != this_process().split(" ")[:2]:
        return False
    state, now = _state(int(pid))
    return now != began or state in "ZX"


def _state(pid: int) -> tuple[str, str]:
    """A process's state (Z: it waits for its parent to notice its end) and when it began, as /proc has them; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]

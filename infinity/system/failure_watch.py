"""The watch of a rank: one thread that tells the other ranks this rank's position and failure, and detects failures of other ranks.

Knows a store, the ranks' messages there, and errors. Must not know groups, nor torch.distributed. The owner passes two functions: one
ends collectives, the other names the program's own collective that a thread is in.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable

from infinity.errors import PeerError, UsageError
from infinity.output import say_if_possible
from infinity.sizes import listed
from infinity.system.failure import FirstFailure
from infinity.system.missing_ranks import Peer, Peers
from infinity.system.waits import THREADS, waiting

WATCH_S = 0.5  # interval in which each rank looks for failures of others
SILENCE_S = 20.0  # after so much silence, a rank of another machine counts as dead if another rank waits
BROKEN_S = 4.0  # the same after a broken connection
REPORT_SILENCE_S = 5.0  # after so much silence a line names the rank, if another rank waits

# [Note: how a failure reaches the other ranks]
# A failing rank writes the reason into the launcher's store, where the first message stays. Each rank has a thread that looks there. This
# thread tells its engine of another rank's failure. The engine's threads then stop waiting for each other, and the thread aborts the
# device's collectives, which would wait for the lost rank until their timeout. All ranks therefore end with the first error of any rank,
# even while the failed rank still lives. gloo has no abort. Waits for gloo's collectives have steps of WATCH_S. An abandoned one may write
# to its tensors until the process ends, so the tensors and the group are kept until then. A rank that ends without a message, or leaves
# while another rank waits, cannot report this. The others find this rank missing (missing_ranks.py), and the first to notice writes the
# message for all. A collective's own error about a lost connection names no rank and is not used. A rank may also keep the launcher's
# store: rank 0 does without torchrun. If that rank is killed, no rank can read or write the store. Each survivor then finds the ended
# process alone: /proc tells on one machine. On another machine the loss of the store names the keeper.

# [Note: how ranks that run different modules are found]
# Such ranks wait in different collectives, without end. A rank reports its collective in the store if its training thread has been in one
# collective, or has waited for a lane in one, for WAITS polls. If all ranks report and name different collectives, no rank can continue. A
# collective that the program itself calls over all ranks, such as a barrier behind the loop, counts as well: the thread's stack shows it.

WAITS = 4
PROGRAM = "a collective of the program's own"  # begins the position text of a thread in such a collective
REMEDY = (
    "All ranks must run the same modules in the same order; look for branches that depend on the rank or on the rank's data. If such "
    "branches are intended, as in a mixture of experts, call infinity.leaf(module) on the branching module. Do not skip a layer on one rank: "
    "call the layer with an empty batch. All ranks need the same number of batches and steps."
)


class Place:
    """The position of this rank, in words. programs(thread): the program's own collective that a thread is in, or ""."""

    def __init__(self, programs: Callable[[int], str]):
        self.num_steps = 0  # of the optimizer
        self.training = threading.get_ident()  # the thread that calls collectives of the control group
        self._programs = programs
        self._stages: list[str] = []  # the engine's present activity outside steps
        self._inside: dict[str, str] = {}  # the collective of the training thread ("control") or of the lane
        self._num_collectives = {"control": 0, "lane": 0}

    @contextlib.contextmanager
    def at(self, stage: str):
        self._stages.append(stage)
        try:
            yield
        finally:
            self._stages.pop()

    @contextlib.contextmanager
    def inside(self, where: str, what: str):
        """Name the present collective, for the other ranks in a long wait."""
        self._num_collectives[where] += 1
        self._inside[where] = f"{what} (number {self._num_collectives[where]})"
        try:
            yield
        finally:
            del self._inside[where]

    def __str__(self) -> str:
        inside = self._inside.get("control") or self._inside.get("lane") or self.programs_collective()
        after = inside.startswith(PROGRAM)
        stage = f"in {self._stages[-1]}" if self._stages else self.passed if after else f"in step {self.num_steps + 1}"
        return f"{stage}{f', in {inside}' if inside else ''}"

    @property
    def passed(self) -> str:
        return f"after step {self.num_steps}" if self.num_steps else "before its first step"

    def waits_in(self) -> str:
        """The collective that blocks the training thread, or ""."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        of_lanes = [names.get(ident, "") for ident, wait in list(waiting.items()) if wait.worker]  # autograd's threads have no name
        if f"{THREADS}gg" in of_lanes:
            return ""  # the lane waits for work of this rank alone, such as a slow read, and then joins the others
        waits = any(not name.startswith(THREADS) for name in of_lanes)
        return self._inside.get("control") or (self._inside.get("lane", "") if waits else "") or self.programs_collective()

    def programs_collective(self) -> str:
        return self._programs(self.training)


class Watch:
    """The watch of one engine. store: the engine's own, in which all ranks write. keeper: the rank whose process keeps that store, None if
    no rank does. abort(): ends the device's collectives, which would wait for a lost rank.
    """

    def __init__(self, store, keeper: int | None, rank: int, world: int, name: str, place: Place, abort: Callable[[], None]):
        self.rank, self.world, self.name, self.place = rank, world, name, place
        self.failure = FirstFailure(self._tell)  # of this rank, or a PeerError
        self.was_printed = False  # whether the failure was printed
        self.store_is_gone = False  # the process that kept the store is also gone, perhaps after a normal end
        self._store, self._keeper, self._abort = store, keeper, abort
        self._peers = Peers(store, rank, world)
        self._broken = ""  # the failed collective
        self._silences: set[str] = set()  # the store's keys of the silences that this rank has noticed
        self._closing = threading.Event()
        self._has_failed = threading.Event()
        self._listeners: list[weakref.WeakMethod] = []
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """Call a method with the first failure of any rank, from this thread."""
        self._listeners.append(weakref.WeakMethod(listener))

    def say(self) -> None:
        """Tell the other ranks this rank's position."""
        with contextlib.suppress(Exception):  # the watch reports errors of the store
            self._peers.say(str(self.place))

    def meet(self, launchers, patience_s: float) -> None:
        """Wait until all ranks have arrived. Groups without a rank would wait for that rank in C++ code, where no error reaches them.
        launchers: the store in which ranks report their end. Raises PeerError if a rank does not arrive, or the store is lost.
        """
        try:
            self._meet(launchers, patience_s)
            self._peers.look()  # if the store is lost later, the processes of all ranks are known
        except PeerError:
            raise
        except RuntimeError as error:  # of the store
            raise PeerError(f"{self.name} ends because {self._why_store_is_lost()}") from error

    def _meet(self, launchers, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        missing = [rank for rank in range(self.world) if rank != self.rank]
        for number in itertools.count():
            missing = [rank for rank in missing if not self._peers.has_come(rank)]
            if not missing:
                return
            if number % 50 == 49:  # an arrived rank may end before the last one arrives
                come = [rank for rank in range(self.world) if rank not in missing]
                for rank, peer in zip(come, self._peers.look(*come)):
                    if peer.has_ended:
                        raise PeerError(f"{self.name} ends because {self._gone(rank, peer)}")
                for rank in missing:
                    if launchers.check([f"infinity-ended{rank}"]):
                        how = launchers.get(f"infinity-ended{rank}").decode()
                        raise PeerError(f"{self.name} ends because rank {rank} of {self.world} ended {how} before it made this engine")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing[:8]))
                raise PeerError(
                    f"{self.name} has waited {patience_s} s for rank {ranks} of {self.world}: all ranks must make the same engines, "
                    f"with infinity.init or infinity.offload"
                )
            time.sleep(min(0.01, 0.0005 * (number + 1)))

    def _tell(self, error: BaseException, what: str) -> None:
        self._has_failed.set()
        self._post_failure(self.rank, f"{self.name} failed: {what}{type(error).__name__}: {error}")

    def _post_failure(self, rank: int, text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone, and all ranks with it
            self._store.compare_set("failure", "", f"{rank} {text}")

    def _posted_failure(self) -> str:
        return self._store.get("failure").decode() if self._store.check(["failure"]) else ""

    def _run(self) -> None:
        board = Board(self._store, self.rank, self.world, self.name, self._peers, self.place)
        for number in itertools.count():
            if self._closing.wait(WATCH_S):
                return
            try:
                self._peers.say(str(self.place))
                if (parted := board.look()) is not None:
                    self.failure.note(parted)
                found = self._posted_failure()
                if not found and (self._broken or number % max(1, self.world // 32) == 0):
                    found = self._find_missing(board.waits_long)
            except Exception:
                self.store_is_gone = True
                found = f"-1 {self._why_store_is_lost()}"
            if found:
                self._end_with(found)
                return

    def _end_with(self, found: str) -> None:
        self._keep(found)
        error = self.failure.error
        if place := self.place.programs_collective():  # fails after the end of another process, without a reason
            print(f"infinity: {type(error).__name__}: {error} (this rank is in {place})", file=sys.stderr, flush=True)
            self.was_printed = True
        self._has_failed.set()
        for listener in self._listeners:
            if (method := listener()) is not None:
                method(error)
        with contextlib.suppress(Exception):  # close() may have been faster
            self._abort()

    def _keep(self, found: str) -> None:
        self.failure.keep(PeerError(f"{self.name} ends because {found.partition(' ')[2]}"))

    def _find_missing(self, waits: str) -> str:
        """Report a missing rank, if there is one, and return the message. waits: the collective in which this rank waits, or ""."""
        waits = self._broken or waits
        for rank, peer in enumerate(self._peers.look()):
            if rank == self.rank:
                continue
            if not peer.left and peer.has_ended:
                (peer,) = self._peers.look(rank)  # the last message may be newer
                text = "" if peer.left else self._gone(rank, peer)
            elif not peer.left and waits and peer.silent_s > (BROKEN_S if self._broken else SILENCE_S):
                text = self._gone(rank, peer)
            else:
                text = ""
            if not (peer.left or text) and waits and peer.silent_s > REPORT_SILENCE_S:
                self._report_silence(rank, peer)
            if peer.left and waits:
                text = (
                    f"rank {rank} of {self.world} has left {peer.where}, and rank {self.rank} waits for it {str(self.place)}"
                    f"{'' if waits in str(self.place) else f', in {waits}'}: all ranks must make the same steps and close their engines "
                    f"together. Give each the same number of batches, such as with a DistributedSampler and drop_last=True, or end the "
                    f"loop on all ranks as soon as one of them has no batch left"
                )
            if text:
                self._post_failure(rank, text)
                return self._posted_failure()
        return ""

    def _report_silence(self, rank: int, peer: Peer) -> None:
        """The first rank that notices a silent rank prints a line. The silent rank may be stopped, or have no processor time."""
        key = f"silence{rank}-{peer.number}"  # the number grows with each message
        if key in self._silences:
            return
        self._silences.add(key)
        if self._store.compare_set(key, "", self.name) == self.name.encode():
            last = f", last {peer.where}" if peer.where else ""
            say_if_possible(f"{self.name} waits for rank {rank} of {self.world}, which has not been heard of for {peer.silent_s:.0f} s{last}")

    def _why_store_is_lost(self) -> str:
        """The rank that has ended, as far as this rank can tell without the store; see [Note: how a failure reaches the other ranks]."""
        deadline = time.monotonic() + BROKEN_S  # a killed process closes connections before /proc shows the end
        while True:
            for rank in range(self.world):
                peer = self._peers.known(rank)
                if rank != self.rank and not peer.left and peer.has_ended:
                    return self._gone(rank, peer)
            keeper = self._peers.known(self._keeper) if self._keeper not in (None, self.rank) else None
            if time.monotonic() > deadline or (keeper is not None and keeper.left):
                break
            time.sleep(WATCH_S / 10)
        if keeper is None:
            return "the launcher's store does not answer: has torchrun ended, or is its machine gone? Start all ranks again"
        if keeper.left:
            return f"rank {self._keeper} of {self.world}, which keeps the launcher's store, has left {keeper.where}"
        return self._gone(self._keeper, keeper, "keeps the launcher's store and does not answer")

    def _gone(self, rank: int, peer: Peer, how: str = "") -> str:
        how = how or ("ended without a word" if peer.has_ended else f"has not been heard of for {peer.silent_s:.0f} s")
        last = f", last {peer.where}" if peer.where else ""
        return (
            f"rank {rank} of {self.world} {how}{last}: was it killed, as the kernel does when memory runs out (see dmesg), or "
            f"is its machine gone? If memory ran out, lower host_memory or the number of ranks per machine"
        )

    def reason_of(self, broken: str) -> BaseException | None:
        """The reason of a failed collective, which the watch is about to read or to find."""
        self._broken = broken
        self._has_failed.wait(BROKEN_S + 4 * WATCH_S)
        return self.failure.error

    def check_is_heard(self, rank: int) -> None:
        """Raise PeerError if an awaited rank is silent."""
        if (peer := self._peers.known(rank)).silent_s > SILENCE_S:
            raise PeerError(f"{self.name} ends because {self._gone(rank, peer)}")

    def late(self) -> str:
        """The ranks for which a collective waits, as far as known: those that are in no collective."""
        peers = [(rank, self._peers.known(rank).where) for rank in range(self.world) if rank != self.rank]
        found = [f"rank {rank} ({where})" for rank, where in peers if where and ", in " not in where]
        return listed(found, most=3) or "the other ranks"

    def close(self) -> None:
        """Tell the others that this rank leaves; idempotent. Waits for no rank."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * SILENCE_S)  # the thread waits only in the store
        with contextlib.suppress(Exception):  # the store may be gone
            # After a failure, the others may not have reported yet.
            self._peers.say(self.place.passed if self.failure.error is None else self._peers.where, left=True)

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    @property
    def is_stuck(self) -> bool:
        """Whether the watch is closed and the thread is still in the store."""
        return self._closing.is_set() and self._thread.is_alive()

    def others_end(self) -> bool:
        """Whether all other ranks have left this engine or are gone."""
        if self.failure.error is None and (found := self._posted_failure()):
            self._keep(found)
        return all(peer.left or peer.has_ended for rank, peer in enumerate(self._peers.look()) if rank != self.rank)


class Board:
    """The ranks' reports of their waits, see [Note: how ranks that run different modules are found]. For the watching thread only."""

    def __init__(self, store, rank: int, world: int, name: str, peers: Peers, place: Place):
        self._store, self._rank, self._world, self._name = store, rank, world, name
        self._peers, self._place = peers, place
        self._text, self._num_polls, self._num_parted = "", 0, 0

    @property
    def waits_long(self) -> str:
        """The collective in which this rank waits, if the wait is so long that the other rank may never come."""
        return self._text if self._num_polls >= WAITS and not self._text.startswith(PROGRAM) else ""

    def look(self) -> UsageError | None:
        """Report this rank's wait, if any. Returns an error if all ranks wait in different collectives."""
        text, store = self._place.waits_in(), self._store
        if text != self._text:
            if self._num_polls >= WAITS:
                store.set(f"waits{self._rank}", "")
            self._text, self._num_polls, self._num_parted = text, 0, 0
        if not text:
            return None
        self._num_polls += 1
        if self._num_polls < WAITS:
            return None
        if self._num_polls == WAITS:
            store.set(f"waits{self._rank}", text)
        keys = [f"waits{rank}" for rank in range(self._world)]
        texts = [store.get(key).decode() for key in keys] if store.check(keys) else [""]
        places = {PROGRAM if text.startswith(PROGRAM) else text for text in texts}  # the program's own come from various lines
        self._num_parted = self._num_parted + 1 if all(texts) and len(places) > 1 else 0
        if self._num_parted < 2:
            return None
        said = [peer.where.partition(", in ")[0] for peer in self._peers.look()]
        each = "; ".join(f"rank {rank} {where}, in {text}" for rank, (where, text) in enumerate(zip(said, texts[:8])))
        return UsageError(f"{self._name}: the ranks wait for each other in different collectives: {each}. {REMEDY}")

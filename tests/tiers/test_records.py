"""Records between NVMe and host memory: grants of slots, eviction of host copies, and failures.

Long because every test stops the same reader, slots and swap at another moment.
"""

import errno
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from aio_ext import _aio
from infinity.errors import SwapError, UsageError
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS
from infinity.plan.slots import HostCache, HostState
from infinity.system.arena import Arena, Slots
from infinity.system.events import Events
from infinity.system.failure import FirstFailure
from infinity.system.swap import Swap
from infinity.tiers.record_mover import Lease, RecordMover, Request

NBYTES = 4096
SECONDS = 20  # longer waits count as a hang


class Bench:
    """Eight chunks on NVMe and two slots of each kind. All bytes of weights are the number of the chunk."""

    def __init__(self, folder, *, num_slots=2, keep=True, num=8):
        self.swap = Swap([folder])
        self.chunks = [
            SimpleNamespace(
                index=index,
                title=f"chunk {index}",
                extents={kind: self.swap.allocate(NBYTES) for kind in KINDS},
                keep_weights=False,
                on_device=False,
                begin_change=lambda entries: None,
            )
            for index in range(num)
        ]
        self.swap.reserve()
        self.arena = Arena()
        self.lock = threading.Condition()
        self.next_use = {}
        caches = {
            kind: HostCache(kind, Slots(self.arena, kind, NBYTES, num_slots), lambda c: self.next_use.get(c.index, c.index))
            for kind in KINDS
        }
        self.caches = caches
        self.events = Events(tracing=True)
        buffer = Slots(self.arena, "fill", NBYTES, 1).acquire()
        for chunk in self.chunks:
            for kind, value in ((WEIGHTS, chunk.index), (STATES, 100 + chunk.index)):
                buffer.tensor(torch.uint8, 0, NBYTES).fill_(value)
                self.swap.write(chunk.extents[kind], buffer.buffer).wait()
        self.records = RecordMover(self.swap, caches, self.lock, self.events, FirstFailure(), keep=keep)

    def request(self, index, kind=WEIGHTS, **options):
        return self.records.request(self.chunks[index], kind, **options)

    def granted(self, request):
        """Waits for the grant of a request and for the bytes. Returns the entry."""
        deadline = time.monotonic() + SECONDS
        while not request.done:
            assert time.monotonic() < deadline, "the request is not granted"
            time.sleep(1e-4)
        entry = request.wait()
        self.records.settle(entry)
        return entry

    def unpin(self, index, entry, kind=WEIGHTS):
        self.records.unpin(self.chunks[index], kind, entry)

    def settled(self):
        """Waits until the reader has looked at all requests (under the lock). Returns the waiting requests."""
        self.records._settler.drain()
        with self.lock:
            self.lock.notify_all()
        with self.lock:
            return sorted((r.chunk.index, r.kind) for r in self.records._waiting)

    def held(self, kind=WEIGHTS):
        with self.lock:
            return set(self.caches[kind].entries)

    def close(self):
        self.records.close()
        self.swap.close()
        self.arena.close()


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**options):
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def first_byte(entry):
    return entry.memory.buffer[0]


# ---- grants ----


def test_a_request_reads_the_bytes_of_its_kind(bench):
    b = bench()
    for kind, offset in ((WEIGHTS, 0), (STATES, 100)):
        entry = b.granted(b.request(3, kind))
        assert bytes(entry.memory.buffer) == bytes([3 + offset]) * NBYTES
        assert (entry.state, entry.pins) == (HostState.CLEAN, 1)


def test_requests_of_one_kind_are_granted_in_order(bench):
    b = bench(keep=False)
    held = [b.granted(b.request(i)) for i in (0, 1)]
    waiting = [b.request(i) for i in (2, 3, 4)]
    order = []
    for index in range(3):
        b.unpin(index, held[index])
        held.append(b.granted(waiting[index]))
        order.append([request.done for request in waiting])
    assert order == [[True, False, False], [True, True, False], [True, True, True]]


def test_a_kind_without_free_slots_does_not_delay_the_other_kind(bench):
    b = bench(keep=False)
    states = [b.granted(b.request(i, STATES)) for i in (0, 1)]
    blocked = b.request(2, STATES)
    assert first_byte(b.granted(b.request(5, WEIGHTS))) == 5
    assert not blocked.done
    b.unpin(0, states[0], STATES)
    assert first_byte(b.granted(blocked)) == 102


def test_a_later_request_with_a_host_copy_does_not_overtake_an_earlier_one(bench):
    # Otherwise the later request pins the last slot, which the earlier one needs, and waits in a lane behind the earlier one: a deadlock.
    b = bench()
    b.next_use = {0: 9, 1: 8, 2: 50}
    pinned = b.granted(b.request(0))
    b.unpin(1, b.granted(b.request(1)))  # an unpinned copy with an earlier next use than chunk 2
    first, second = b.request(2), b.request(1)
    assert b.settled() == [(1, WEIGHTS), (2, WEIGHTS)] and not second.done
    b.records.hurry(first)  # takes the slot of chunk 1
    b.granted(first)
    assert b.held() == {0, 2} and not second.done
    b.unpin(0, pinned)
    assert first_byte(b.granted(second)) == 1


def test_an_urgent_request_does_not_overtake_a_patient_one_of_its_kind(bench):
    # Otherwise copies for the next ops pin every slot, and wait for a copy that waits for the update: a deadlock.
    b = bench(keep=False)
    held = [b.granted(b.request(i)) for i in (0, 1)]
    update = b.request(2)
    copies = [b.request(i, urgent=True) for i in (3, 4)]
    b.settled()
    b.unpin(0, held[0])
    assert first_byte(b.granted(update)) == 2
    assert not any(copy.done for copy in copies)
    b.unpin(1, held[1])
    assert first_byte(b.granted(copies[0])) == 3 and not copies[1].done


def test_hurry_also_speeds_up_the_requests_before(bench):
    b = bench()
    b.next_use = {0: 1, 1: 2, 2: 50, 3: 60, 4: 70}
    for index in (0, 1):
        b.unpin(index, b.granted(b.request(index, urgent=True)))
    first, second, third = (b.request(i) for i in (2, 3, 4))
    assert len(b.settled()) == 3
    b.records.hurry(second)
    assert [first_byte(b.granted(r)) for r in (first, second)] == [2, 3]
    assert b.settled() == [(4, WEIGHTS)]
    b.unpin(2, first.result)
    b.records.hurry_all()
    assert first_byte(b.granted(third)) == 4


def test_a_record_that_was_needed_already_is_not_prefetched_again(bench):
    b = bench(keep=False)
    pinned = [b.granted(b.request(i, STATES)) for i in (0, 1)]
    b.request(2, STATES, pin=False)
    needed = b.request(2, STATES, urgent=True)
    assert b.settled() == [(2, STATES)]
    b.unpin(0, pinned[0], STATES)
    b.unpin(2, b.granted(needed), STATES)
    b.settled()
    assert [e.what for e in b.events.trace if e.lane == "nvme_read"].count((2, STATES)) == 1


# ---- eviction of host copies ----


def test_the_unpinned_copy_with_the_latest_use_is_evicted(bench):
    b = bench(num_slots=3)
    b.next_use = {0: 30, 1: 10, 2: 20, 3: 5, 4: 6}
    entries = [b.granted(b.request(i)) for i in range(3)]
    for index in (1, 2):
        b.unpin(index, entries[index])
    b.granted(b.request(3))
    assert b.held() == {0, 1, 3}  # chunk 2 was evicted: chunk 0 has a later use, but is pinned
    b.granted(b.request(4))
    assert b.held() == {0, 3, 4}


def test_only_an_urgent_request_evicts_a_copy_with_an_earlier_use(bench):
    b = bench()
    b.next_use = {0: 1, 1: 2, 5: 3}
    for index in (0, 1):
        b.unpin(index, b.granted(b.request(index, urgent=True)))
    patient = b.request(5, pin=False)
    assert b.settled() == [(5, WEIGHTS)] and not patient.done
    b.granted(b.request(5, urgent=True))
    assert b.held() == {0, 5}


def test_copies_are_kept_only_with_keep(bench):
    for keep in (True, False):
        b = bench(keep=keep)
        b.unpin(0, b.granted(b.request(0)))
        assert b.held() == ({0} if keep else set())
        again = b.granted(b.request(0))
        assert first_byte(again) == 0
        b.settled()
        assert [e.what for e in b.events.trace].count((0, WEIGHTS)) == (1 if keep else 2)
        b.unpin(0, again)
        b.close()


# ---- updates ----


def update(b, index, value):
    with b.records.lease(b.chunks[index], WEIGHTS, STATES, write=True) as lease:
        for entry in lease.entries.values():
            entry.memory.tensor(torch.uint8, 0, NBYTES).fill_(value)
    return lease.entries


def test_a_read_sees_the_last_update(bench):
    for keep in (True, False):
        b = bench(keep=keep)
        for round_ in range(20):
            for index in range(8):
                update(b, index, 10 * index + round_)
        for index in range(8):
            for kind in (WEIGHTS, STATES):
                entry = b.granted(b.request(index, kind, urgent=True))
                assert bytes(entry.memory.buffer) == bytes([10 * index + 19]) * NBYTES
                b.unpin(index, entry, kind)
        b.close()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_lease_whose_block_raises_is_released_and_changes_are_written(bench, write, error):
    b = bench(keep=False, num_slots=1)
    with pytest.raises(error), b.records.lease(b.chunks[0], WEIGHTS, STATES, write=write) as lease:
        lease.entries[WEIGHTS].memory.tensor(torch.uint8, 0, NBYTES).fill_(77)
        raise error
    b.records.flush()
    assert b.held(WEIGHTS) == b.held(STATES) == set()
    with b.records.lease(b.chunks[0], WEIGHTS) as lease:
        assert first_byte(lease.entries[WEIGHTS]) == (77 if write else 0)


def test_a_lease_that_may_not_change_is_released(bench):
    b = bench(keep=False, num_slots=1)
    b.chunks[0].begin_change = lambda lease: interrupt()
    with pytest.raises(KeyboardInterrupt), b.records.lease(b.chunks[0], WEIGHTS, STATES, write=True):
        pytest.fail("the block ran although begin_change raised")
    assert b.held(WEIGHTS) == b.held(STATES) == set()


def test_a_copy_under_update_is_shared_and_not_evicted(bench):
    b = bench(num_slots=1)
    _aio._inject("write", 0, 1, None, delay=0.1)
    written = update(b, 0, 77)
    asked = b.request(0)
    other = b.request(1, urgent=True)
    assert b.granted(asked) is written[WEIGHTS] and first_byte(asked.result) == 77
    b.records.flush()
    assert not other.done
    b.unpin(0, asked.result)
    assert first_byte(b.granted(other)) == 1


def test_flush_waits_for_every_write(bench):
    b = bench()
    _aio._inject("write", 0, -1, None, delay=0.05)
    for index in range(4):
        update(b, index, 55)
    b.records.flush()
    assert sum(e.lane == "nvme_write" for e in b.events.trace) == 8
    assert all(entry.state is HostState.CLEAN and not entry.pins for entry in b.caches[WEIGHTS].entries.values())


# ---- gradients: dirty and unpinned until they are used ----


def collect(b, index, value):
    with b.records.lease(b.chunks[index], GRADIENTS, write=True, fresh=True) as lease:
        lease.entries[GRADIENTS].memory.tensor(torch.uint8, 0, NBYTES).fill_(value)


def test_a_dirty_copy_is_written_only_if_its_slot_is_wanted(bench):
    b = bench(keep=False)
    b.next_use = {0: 5, 1: 9, 2: 1}
    for index in (0, 1):
        collect(b, index, 40 + index)
    assert not [e for e in b.events.trace if e.lane == "nvme_write"]
    collect(b, 2, 42)
    assert b.held(GRADIENTS) == {0, 2}
    b.records.flush()
    assert [e.what for e in b.events.trace if e.lane == "nvme_write"] == [(1, GRADIENTS)]
    for index in (1, 0, 2):
        with b.records.lease(b.chunks[index], GRADIENTS) as lease:
            assert bytes(lease.entries[GRADIENTS].memory.buffer) == bytes([40 + index]) * NBYTES


def test_a_request_waits_for_a_pinned_copy_instead_of_a_write(bench):
    b = bench(keep=False)
    collect(b, 0, 40)
    collect(b, 1, 41)
    used = b.records.obtain(b.chunks[0], (GRADIENTS,))
    waits = in_thread(lambda: collect(b, 2, 42))
    b.settled()
    used.give_back()
    b.records.discard(b.chunks[0], GRADIENTS)
    assert waits() is None
    assert b.held(GRADIENTS) == {1, 2}
    assert not [e for e in b.events.trace if e.lane == "nvme_write"]


def test_many_gradients_through_two_slots_keep_their_bytes(bench):
    b = bench(keep=False)
    for round_ in range(20):
        for index in range(8):
            collect(b, index, 10 * index + round_)
        for index in (0, 3, 7):
            b.records.discard(b.chunks[index], GRADIENTS)
            collect(b, index, 200 + index)
        for index in range(8):
            expected = 200 + index if index in (0, 3, 7) else 10 * index + round_
            with b.records.lease(b.chunks[index], GRADIENTS) as lease:
                assert bytes(lease.entries[GRADIENTS].memory.buffer) == bytes([expected]) * NBYTES
            b.records.discard(b.chunks[index], GRADIENTS)


# ---- failures ----


def in_thread(work):
    """Runs `work` in a thread. Returns a function that waits for the end and returns the error or None."""
    raised = []

    def run():
        try:
            work()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def finish():
        thread.join(SECONDS)
        assert raised, "the thread hangs"
        return raised[0]

    return finish


def test_a_failed_read_raises_in_the_thread_that_waits_for_it(bench):
    b = bench()
    _aio._inject("read", 0, 1, -errno.EIO)
    request = b.request(3)
    with pytest.raises(SwapError, match="dmesg") as error:
        b.granted(request)
    assert error.value.errno == errno.EIO and "rank0.swap" in error.value.filename
    assert first_byte(b.granted(b.request(4))) == 4  # other requests are served


@pytest.mark.parametrize("error, num_free", [(OSError(errno.ENOMEM, "no memory"), 2), (KeyboardInterrupt(), 1)])
def test_a_slot_of_an_interrupted_read_is_not_reused(bench, monkeypatch, error, num_free):
    b = bench()

    def submit_and_raise(*arguments, **options):
        raise error

    monkeypatch.setattr(b.swap, "read", submit_and_raise)
    with pytest.raises(type(error)):
        b.request(0).wait()
    monkeypatch.undo()
    assert b.caches[WEIGHTS].slots.num_free == num_free
    for index in (1, 0):
        entry = b.granted(b.request(index))
        assert first_byte(entry) == index
        b.unpin(index, entry)


@pytest.mark.parametrize("where", ["finish", "_grant"])
def test_an_interrupted_request_does_not_change_an_existing_copy(bench, monkeypatch, where):
    b = bench()
    held = b.granted(b.request(3))
    held.memory.buffer[0] = 77
    Lease(b.records, b.chunks[3], {WEIGHTS: held}).begin_change()
    monkeypatch.setattr(*((Request, "finish") if where == "finish" else (b.records, "_grant")), lambda thing: interrupt())
    for pin in (True, False):
        with pytest.raises(KeyboardInterrupt):
            b.request(3, pin=pin)
    monkeypatch.undo()
    assert b.caches[WEIGHTS].find(b.chunks[3]) is held and held.pins == 1
    Lease(b.records, b.chunks[3], {WEIGHTS: held}).write_back()
    b.records.flush()
    for index in (1, 2, 3):
        b.unpin(index, b.granted(b.request(index, urgent=True)))
    assert first_byte(b.granted(b.request(3))) == 77


@pytest.mark.parametrize("where", ["settle", "hurry", "grant"])
def test_a_thread_interrupted_during_a_wait_keeps_no_pin(bench, monkeypatch, where):
    b = bench(num_slots=2)
    held = []
    if where == "grant":  # the interrupt comes during the wait for a slot
        held = [(index, b.granted(b.request(index))) for index in (1, 2)]
        monkeypatch.setattr(Request, "wait", lambda request: interrupt())
    else:
        monkeypatch.setattr(b.records, where, lambda thing: interrupt())
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            b.records.obtain(b.chunks[0], (STATES, WEIGHTS))
    monkeypatch.undo()
    for index, entry in held:
        b.unpin(index, entry)
    for index in range(5):
        with b.records.lease(b.chunks[index], STATES, WEIGHTS) as lease:
            assert first_byte(lease.entries[WEIGHTS]) == index and first_byte(lease.entries[STATES]) == 100 + index
            assert all(entry.pins == 1 for entry in lease.entries.values())


def test_an_interrupt_at_the_start_of_a_write_reaches_the_next_user(bench, monkeypatch):
    b = bench()
    held = b.granted(b.request(3))
    Lease(b.records, b.chunks[3], {WEIGHTS: held}).begin_change()
    monkeypatch.setattr(b.records._writer, "push", lambda work: interrupt())
    with pytest.raises(KeyboardInterrupt):
        Lease(b.records, b.chunks[3], {WEIGHTS: held}).write_back()
    monkeypatch.undo()
    error = in_thread(lambda: Lease(b.records, b.chunks[3], {WEIGHTS: held}).begin_change())()
    assert isinstance(error, KeyboardInterrupt)


def interrupt():
    raise KeyboardInterrupt


def test_a_failed_prefetch_raises_in_the_thread_that_waits_for_its_slot(bench):
    b = bench()
    _aio._inject("read", 0, 2, -errno.EIO)
    for index in (0, 1):
        b.request(index, GRADIENTS, pin=False)
    error = in_thread(lambda: b.records.fresh(b.chunks[2], GRADIENTS))()
    assert isinstance(error, SwapError) and error.errno == errno.EIO


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_raises_in_all_waiting_threads(bench, code):
    b = bench()
    lease, _ = [b.records.obtain(b.chunks[i], (WEIGHTS,)) for i in (0, 1)]
    waiting = b.request(2, urgent=True)
    assert not waiting.done
    _aio._inject("write", 0, -1, -code)
    lease.begin_change()
    waiters = [
        in_thread(waiting.wait),
        in_thread(lambda: b.records.fresh(b.chunks[6], WEIGHTS)),
    ]
    lease.write_back()
    waiters += [in_thread(lease.begin_change), in_thread(b.records.flush)]
    for finish in waiters:
        error = finish()
        assert isinstance(error, SwapError) and error.errno == code


def test_close_with_open_requests_does_not_hang(bench):
    b = bench()
    for index in (0, 1):
        b.granted(b.request(index))
    left = [b.request(2, pin=False), b.request(2), b.request(3)]
    assert in_thread(b.records.close)() is None
    for request in left[1:]:  # nobody waits for the first request
        with pytest.raises(UsageError, match="closed"):
            request.wait()


# ---- in an engine ----


@pytest.mark.few(4)
@pytest.mark.parametrize("update_mode", ["backward", "deferred"])
@pytest.mark.parametrize("op, nth", [("read", 0), ("read", 7), ("write", 0), ("write", 5)])
def test_a_failing_disk_ends_training_with_a_swap_error(tmp_path, update_mode, op, nth):
    config = infinity.Config(
        swap_dirs=tmp_path, dtype="fp32", device="cpu", residency="none", param_tier="nvme", optimizer_state_tier="nvme",
        chunk_mib=1 / 256, host_memory="1MiB", device_memory="1MiB", update=update_mode,
    )  # fmt: skip
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    engine = infinity.offload(model, config)
    adam = infinity.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 64)).square().mean().backward()
        adam.step()
        adam.zero_grad()

    def train():
        for _ in range(20):
            step()

    for _ in range(2):
        step()
    _aio._inject(op, nth, -1, -errno.EIO)
    error = in_thread(train)()
    assert isinstance(error, SwapError) and error.errno == errno.EIO and str(tmp_path) in error.filename
    again = in_thread(step)()
    assert isinstance(again, (SwapError, infinity.UsageError)), again
    assert in_thread(engine.close)() is None

"""Random claims of slots and spans keep the books of a simple model: three machines draw calls, and compare after each call.

`Claims` has the copies of one kind in real slots, and the requests that wait for them. No thread runs, so the model knows each result.
`Transfers` has the mover of records with a real swap file, its threads and three kinds of slots. The model knows the bytes and the order.
`Spans` has the device tier with spans of no parameters: a span with parameters needs a whole engine.

Long because the long forms run hundreds of examples.
"""

import contextlib
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.faults import no_hang

from infinity.formats.format import Format
from infinity.plan.packing import Span
from infinity.plan.record import GRADIENTS, KINDS, WEIGHTS
from infinity.plan.slots import HostCache, HostState, Requests
from infinity.system.arena import Arena, Slots
from infinity.system.events import Events
from infinity.system.failure import FirstFailure
from infinity.system.swap import Swap
from infinity.tiers.record_mover import Lease, RecordMover
from infinity.tiers.span_state import DeviceTier, SpanState

hypothesis = pytest.importorskip("hypothesis")
stateful = pytest.importorskip("hypothesis.stateful")
st = pytest.importorskip("hypothesis.strategies")
initialize, invariant, precondition, rule = stateful.initialize, stateful.invariant, stateful.precondition, stateful.rule

NBYTES = 4096
NUM_CHUNKS = 6
SECONDS = 30  # longer waits count as a hang
READING, CLEAN, DIRTY, WRITING = HostState
MOVES = {(READING, CLEAN), (CLEAN, DIRTY), (DIRTY, CLEAN), (DIRTY, WRITING), (WRITING, CLEAN)}
chunk_indices = st.integers(0, NUM_CHUNKS - 1)


class Claims(stateful.RuleBasedStateMachine):
    """Copies in slots. The model has the state and the number of pins of each copy, and the requests in their order."""

    @initialize(count=st.integers(1, 4), uses=st.lists(st.integers(0, 9), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS), resident=st.booleans())
    def begin(self, count, uses, resident):
        self.arena = Arena()
        self.count, self.uses, self.without_extent = count, uses, {2}
        slots = Slots(self.arena, "test", NBYTES, count)
        self.cache = HostCache(WEIGHTS, slots, lambda chunk: self.uses[chunk.index], lambda chunk: chunk.index not in self.without_extent)
        self.chunks = [SimpleNamespace(index=index) for index in range(NUM_CHUNKS)]
        self.requests, self.waiting, self.urgent_until = Requests(), [], -1
        self.states, self.pins = {}, {}
        self.residents = {0} if resident else set()
        for index in self.residents:
            self.cache.add_resident(self.chunks[index], "resident")
            self.states[index], self.pins[index] = CLEAN, 0

    def borrowed(self, *states, pinned=False):
        """Chunks whose copies are in slots, in these states, without pins or with pins."""
        return {i for i, state in self.states.items() if state in states and bool(self.pins[i]) is pinned and i not in self.residents}

    @property
    def num_borrowed(self):
        return len(self.states.keys() - self.residents)

    def forget(self, index):
        del self.states[index], self.pins[index]

    def may_claim(self, index, urgent):
        """Whether a claim gets a slot: a free one, or that of a clean copy without pins. A patient claim only gets one with a later use."""
        victims = [i for i in self.borrowed(CLEAN) if urgent or self.uses[i] > self.uses[index]]
        return self.num_borrowed < self.count or bool(victims)

    def note_claim(self, index, entry, urgent):
        """Compare a claim with the model."""
        assert self.may_claim(index, urgent)
        gone = {i for i in self.states if self.cache.find(self.chunks[i]) is None}
        assert len(gone) == (self.num_borrowed == self.count) and gone <= self.borrowed(CLEAN)
        assert all(self.uses[i] == max(self.uses[j] for j in self.borrowed(CLEAN)) for i in gone)
        for each in gone:
            self.forget(each)
        self.states[index], self.pins[index] = entry.state, 0
        assert entry.state is READING and entry.pins == 0
        entry.memory.buffer[:8] = bytes([index]) * 8

    @rule(index=chunk_indices, urgent=st.booleans())
    def claim(self, index, urgent):
        if index in self.states:
            return
        entry = self.cache.claim(self.chunks[index], urgent=urgent)
        if entry is None:
            assert not self.may_claim(index, urgent)
        else:
            self.note_claim(index, entry, urgent)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), state=st.sampled_from(list(HostState)))
    def move(self, data, state):
        index = data.draw(st.sampled_from(sorted(self.states)))
        entry = self.cache.find(self.chunks[index])
        if (self.states[index], state) in MOVES:
            entry.become(state)
            self.states[index] = state
        else:
            with pytest.raises(AssertionError):
                entry.become(state)

    @precondition(lambda self: self.borrowed(READING) | self.borrowed(READING, pinned=True))
    @rule()
    def all_reads_end(self):
        for index in self.borrowed(READING) | self.borrowed(READING, pinned=True):
            self.cache.find(self.chunks[index]).become(CLEAN)
            self.states[index] = CLEAN

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def pin(self, data):
        index = data.draw(st.sampled_from(sorted(self.states)))
        self.cache.find(self.chunks[index]).pin()
        self.pins[index] += 1

    @precondition(lambda self: self.states)
    @rule(data=st.data(), keep=st.booleans())
    def unpin(self, data, keep):
        index = data.draw(st.sampled_from(sorted(self.states)))
        entry = self.cache.find(self.chunks[index])
        if not self.pins[index]:
            with pytest.raises(AssertionError):
                self.cache.unpin(entry, keep=keep)
            return
        self.cache.unpin(entry, keep=keep)
        self.pins[index] -= 1
        if not keep and index in self.borrowed(CLEAN):
            self.forget(index)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def drop(self, data):
        index = data.draw(st.sampled_from(sorted(self.states)))
        may_drop = index in self.borrowed(CLEAN)
        assert self.cache.drop(self.cache.find(self.chunks[index])) is may_drop
        if may_drop:
            self.forget(index)

    @rule(index=chunk_indices, use=st.integers(0, 9))
    def change_the_next_use(self, index, use):
        self.uses[index] = use

    # Requests that wait for a copy.

    @rule(index=chunk_indices, pin=st.booleans(), urgent=st.booleans())
    def ask(self, index, pin, urgent):
        request = SimpleNamespace(chunk=self.chunks[index], kind=WEIGHTS, pin=pin, is_dropped=False, number=None)
        self.requests.ask(request, urgent=urgent)
        self.requests.put(request)
        if pin:
            dropped = [each for each in self.waiting if not each.pin and each.chunk is request.chunk]
            assert all(each.is_dropped for each in dropped)
            self.waiting = [each for each in self.waiting if each not in dropped]
            if urgent:
                self.urgent_until = request.number
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), withdraws=st.booleans())
    def hurry_or_withdraw(self, data, withdraws):
        request = self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))]
        if withdraws:
            self.requests.withdraw(request)
            self.waiting.remove(request)
        else:
            self.requests.hurry(request)
            self.urgent_until = max(self.urgent_until, request.number)

    def is_urgent(self, request):
        return request.pin and request.number <= self.urgent_until

    def may_grant(self, request):
        index = request.chunk.index
        return index in self.states or self.may_claim(index, self.is_urgent(request))

    def next_grant(self):
        """The first pinned request or the first read-ahead, urgent ones first. A pinned request that must wait lets nothing overtake."""
        first = [next((each for each in self.waiting if each.pin is pin), None) for pin in (True, False)]
        for request in sorted(filter(None, first), key=lambda each: (not self.is_urgent(each), each.number)):
            if self.may_grant(request):
                return request
            if request.pin:
                return None
        return None

    @rule()
    def grant(self):
        def grants(request):
            assert self.requests.is_urgent(request) is self.is_urgent(request)
            index = request.chunk.index
            entry = self.cache.find(request.chunk)
            if entry is None:
                entry = self.cache.claim(request.chunk, urgent=self.requests.is_urgent(request))
                if entry is None:
                    return False
                self.note_claim(index, entry, self.is_urgent(request))
            if request.pin:
                entry.pin()
                self.pins[index] += 1
            return True

        expected = self.next_grant()
        assert self.requests.take_next(grants) is expected
        if expected is not None:
            self.waiting.remove(expected)

    # Checks.

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "cache"):
            return
        entries = {i: entry for i in range(NUM_CHUNKS) if (entry := self.cache.find(self.chunks[i])) is not None}
        assert {i: (entry.state, entry.pins) for i, entry in entries.items()} == {i: (self.states[i], self.pins[i]) for i in self.states}
        assert {i for i, entry in entries.items() if entry.resident} == self.residents
        assert {request.number for request in self.requests} == {request.number for request in self.waiting}

    @invariant()
    def a_slot_has_one_owner(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.entries.keys() == self.states.keys() - self.residents
        slots = [entry.memory.index for entry in self.cache.entries.values()]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.count))
        assert self.cache.slots.num_free == self.count - len(slots)
        assert all(bytes(entry.memory.buffer[:8]) == bytes([index]) * 8 for index, entry in self.cache.entries.items())

    @invariant()
    def the_next_to_leave_or_to_be_written_is_the_farthest(self):
        if not hasattr(self, "cache"):
            return
        for state in HostState:
            found, idle = self.cache.farthest(state), self.borrowed(state)
            assert (found is None) is (not idle)
            assert found is None or (found.chunk.index in idle and self.uses[found.chunk.index] == max(self.uses[i] for i in idle))
        pinned = self.borrowed(*HostState, pinned=True)
        assert self.cache.is_crowded() is (len(pinned) >= 2 and 3 * len(pinned) >= 2 * self.count)
        must_write = self.num_borrowed == self.count == len(self.borrowed(CLEAN, DIRTY))
        found, idle = self.cache.to_write(), self.borrowed(DIRTY) - self.without_extent
        assert (found is not None) is (must_write and bool(idle))
        assert found is None or self.uses[found.chunk.index] == max(self.uses[i] for i in idle)

    def teardown(self):
        if hasattr(self, "arena"):
            self.cache = None
            self.arena.close()


class Transfers(stateful.RuleBasedStateMachine):
    """The mover of records. The model has the last bytes of each chunk and kind, and the requests whose copies are not yet collected.

    Threads decide when a copy is granted. Therefore no rule is chosen, and nothing is drawn, by the copies that are there: a rule without a
    copy does nothing.
    """

    NUM_SLOTS = 2

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(no_hang(4 * SECONDS))
        self.asked = {kind: [] for kind in KINDS}  # pinned requests, in order
        self.held = []  # (index, kind, entry)

    @initialize(keep=st.booleans(), uses=st.lists(st.integers(0, 9), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS))
    def begin(self, keep, uses):
        self.uses = uses
        swap = Swap([self.stack.enter_context(tempfile.TemporaryDirectory())])
        self.stack.callback(swap.close)
        self.chunks = [
            SimpleNamespace(
                index=index,
                title=f"chunk {index}",
                extents={kind: swap.allocate(NBYTES) for kind in KINDS},
                keep_weights=False,
                on_device=False,
                begin_change=lambda lease: None,
            )
            for index in range(NUM_CHUNKS)
        ]
        swap.reserve()
        arena = Arena()
        self.stack.callback(arena.close)
        buffer = Slots(arena, "fill", NBYTES, 1).acquire()
        self.values = {}
        for chunk in self.chunks:
            for number, kind in enumerate(KINDS):
                self.values[chunk.index, kind] = 50 * number + chunk.index
                buffer.tensor(torch.uint8, 0, NBYTES).fill_(self.values[chunk.index, kind])
                swap.write(chunk.extents[kind], buffer.buffer).wait()
        self.caches = {
            kind: HostCache(kind, Slots(arena, kind, NBYTES, self.NUM_SLOTS), lambda chunk: self.uses[chunk.index]) for kind in KINDS
        }
        self.records = RecordMover(swap, self.caches, threading.Condition(), Events(), FirstFailure(), keep=keep)
        self.stack.callback(self.records.close)

    @rule(index=chunk_indices, kind=st.sampled_from(KINDS), urgent=st.booleans())
    def request(self, index, kind, urgent):
        self.asked[kind].append(self.records.request(self.chunks[index], kind, urgent=urgent))

    @rule(index=chunk_indices, kind=st.sampled_from(KINDS))
    def read_ahead(self, index, kind):
        self.records.request(self.chunks[index], kind, pin=False)

    @rule(kind=st.sampled_from(KINDS))
    def hurry(self, kind):
        if self.asked[kind]:
            self.records.hurry(self.asked[kind][-1])

    @rule()
    def collect(self):
        """Take the copies of all requests that are granted. Each has the last bytes."""
        for kind, requests in self.asked.items():
            while requests and requests[0].done:
                request = requests.pop(0)
                entry = request.wait()
                self.records.settle(entry)
                self.held.append((request.chunk.index, kind, entry))

    @rule(number=st.integers(0, 9))
    def give_back(self, number):
        if self.held:
            index, kind, entry = self.held.pop(number % len(self.held))
            self.records.unpin(self.chunks[index], kind, entry)

    @rule(number=st.integers(0, 9), value=st.integers(0, 255))
    def change(self, number, value):
        """Change a copy, and give it back after the write, as an update does."""
        found = [held for held, (_, kind, _) in enumerate(self.held) if kind != GRADIENTS]
        if not found:
            return
        index, kind, entry = self.held.pop(found[number % len(found)])
        lease = Lease(self.records, self.chunks[index], {kind: entry})
        lease.begin_change()
        entry.memory.tensor(torch.uint8, 0, NBYTES).fill_(value)
        self.values[index, kind] = value
        lease.write_back()

    @rule(index=chunk_indices, value=st.integers(0, 255))
    def fill_a_gradient(self, index, value):
        """A gradient arrives. If all slots have unused gradients, the claim waits until one of these is written.

        A claim also waits for each pinned copy, so this thread pins no gradient of another chunk.
        """
        users = {request.chunk.index for request in self.asked[GRADIENTS]} | {i for i, kind, _ in self.held if kind == GRADIENTS}
        if users - {index}:
            return
        with self.records.lease(self.chunks[index], GRADIENTS, write=True, fresh=True) as lease:
            lease.entries[GRADIENTS].memory.tensor(torch.uint8, 0, NBYTES).fill_(value)
        self.values[index, GRADIENTS] = value

    @rule(index=chunk_indices)
    def discard_a_gradient(self, index):
        """Its bytes are unknown until the next gradient arrives."""
        self.records.discard(self.chunks[index], GRADIENTS)
        self.values[index, GRADIENTS] = None

    @rule(kind=st.sampled_from(KINDS))
    def clean_ahead(self, kind):
        self.records.clean_ahead(kind)

    @rule(index=chunk_indices, use=st.integers(0, 9))
    def change_the_next_use(self, index, use):
        self.uses[index] = use

    @rule()
    def flush(self):
        self.records.flush()

    @invariant()
    def held_copies_stay_and_have_the_last_bytes(self):
        for index, kind, entry in self.held:
            assert self.caches[kind].entries[index] is entry and entry.pins and entry.state is not READING
            value = self.values[index, kind]
            assert value is None or bytes(entry.memory.buffer) == bytes([value]) * NBYTES

    @invariant()
    def requests_wait_for_slots_in_their_order(self):
        if not hasattr(self, "records"):
            return
        with self.records.lock:
            for kind, requests in self.asked.items():
                entries = self.caches[kind].entries
                assert len({entry.memory.index for entry in entries.values()}) == len(entries)
                assert self.records.slots_in_use()[kind] == len(entries) <= self.NUM_SLOTS
                are_done = [request.done for request in requests]
                assert are_done == sorted(are_done, reverse=True)
                users = {index for index, its_kind, _ in self.held if its_kind == kind}
                users |= {request.chunk.index for request in requests if request.done}
                assert len(users) <= self.NUM_SLOTS
                assert users <= {index for index, entry in entries.items() if entry.pins}

    def teardown(self):
        """Every pinned request is granted at last, if its user gives the copies back."""
        try:
            if hasattr(self, "records"):
                self.records.hurry_all()
                deadline = time.monotonic() + SECONDS
                while any(self.asked.values()) or self.held:
                    assert time.monotonic() < deadline, "a request is never granted"
                    self.collect()
                    self.held_copies_stay_and_have_the_last_bytes()
                    for index, kind, entry in self.held:
                        self.records.unpin(self.chunks[index], kind, entry)
                    self.held.clear()
                    time.sleep(1e-4)
                self.records.flush()
        finally:
            self.stack.close()


FP32 = Format("fp32", moments=())


class Spans(stateful.RuleBasedStateMachine):
    """Spans on the device. The model counts the bytes of each purpose."""

    SIZES = (256, 512, 1024, 1024)  # elements

    @initialize(budget=st.integers(0, 3000), counts_waiting=st.booleans())
    def begin(self, budget, counts_waiting):
        self.budget = self.limit = 4 * budget
        self.allocations = []
        self.tier = DeviceTier(self.budget, self.allocations.append, counts_waiting=counts_waiting)
        self.counts_waiting = counts_waiting
        self.spans = [
            SpanState(Span(index=i, chunks=(i,), numel=numel, format=FP32, params=()), [], torch.device("cpu")) for i, numel in enumerate(self.SIZES)
        ]
        self.allocated, self.pinned, self.kept = set(), set(), {}
        self.other = self.lent = self.waiting = self.peak = self.num_allocations = 0

    @property
    def used(self):
        return sum(4 * self.SIZES[i] for i in self.allocated - self.pinned) + self.lent

    @property
    def beside(self):
        return sum(4 * self.SIZES[i] for i in self.pinned) + self.other - self.lent

    @rule(index=st.integers(0, 3))
    def allocate(self, index):
        span = self.spans[index]
        self.tier.allocate(span)
        if index not in self.allocated:
            self.allocated.add(index)
            self.num_allocations += 1
            span.flat.fill_(index + 1)

    @rule(index=st.integers(0, 3))
    def free(self, index):
        """The memory stays while the program keeps a tensor of it."""
        if index in self.pinned:
            with pytest.raises(AssertionError):
                self.tier.free(self.spans[index])
            return
        self.tier.free(self.spans[index])
        if index not in self.kept:
            self.allocated.discard(index)

    @precondition(lambda self: self.allocated - self.pinned - self.kept.keys())
    @rule(data=st.data())
    def keep_a_tensor(self, data):
        index = data.draw(st.sampled_from(sorted(self.allocated - self.pinned - self.kept.keys())))
        self.spans[index].count_aliases()
        self.kept[index] = self.spans[index].flat[3:9]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop_a_tensor(self, data):
        del self.kept[data.draw(st.sampled_from(sorted(self.kept)))]

    @precondition(lambda self: self.allocated - self.pinned)
    @rule(data=st.data())
    def pin(self, data):
        index = data.draw(st.sampled_from(sorted(self.allocated - self.pinned)))
        self.tier.pin(self.spans[index])
        self.pinned.add(index)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        index = data.draw(st.sampled_from(sorted(self.pinned)))
        self.tier.unpin(self.spans[index])
        self.pinned.remove(index)

    @rule(nbytes=st.integers(-4000, 4000), purpose=st.sampled_from(["other", "lent", "waiting"]))
    def count(self, nbytes, purpose):
        nbytes = max(nbytes, -getattr(self, purpose))
        {"other": self.tier.book, "lent": self.tier.lend, "waiting": self.tier.note_waiting}[purpose](nbytes)
        setattr(self, purpose, getattr(self, purpose) + nbytes)

    @rule(nbytes=st.integers(1, 4000))
    def fail_inside_booked(self, nbytes):
        with pytest.raises(MemoryError), self.tier.booked(nbytes):
            self.peak = max(self.peak, self.tier.held_nbytes)
            raise MemoryError

    @rule(nbytes=st.integers(0, 8000))
    def raise_the_limit(self, nbytes):
        self.limit = self.tier.limit_nbytes = self.budget + nbytes

    @invariant()
    def the_bytes_add_up(self):
        if not hasattr(self, "tier"):
            return
        assert (self.tier.used_nbytes, self.tier.other_nbytes) == (self.used, self.beside)
        assert self.tier.held_nbytes == self.used + self.beside
        self.peak = max(self.peak, self.tier.held_nbytes)
        assert self.tier.peak_nbytes == self.peak
        assert len(self.allocations) == self.num_allocations
        limit = max(self.limit - self.waiting * self.counts_waiting, self.budget)
        for nbytes in (0, 1024, 4096):
            assert self.tier.fits(nbytes) is (self.used + nbytes <= self.budget)
            assert self.tier.allows(nbytes) is (self.used + nbytes <= limit)

    @invariant()
    def only_spans_that_nobody_uses_are_freed(self):
        if not hasattr(self, "tier"):
            return
        for index, span in enumerate(self.spans):
            assert span.allocated is (index in self.allocated)
            assert span.storage.nbytes() == (4 * self.SIZES[index] if span.allocated else 0)
            assert not span.allocated or span.flat.eq(index + 1).all()
            assert span.pinned is (index in self.pinned)
            if index in self.kept:
                assert span.has_escaped and self.kept[index].eq(index + 1).all()


MACHINES = [Claims, Transfers, Spans]


def run(machine, num_examples, num_calls):
    checks = list(hypothesis.HealthCheck)
    how = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": checks}
    settings = hypothesis.settings(max_examples=num_examples, stateful_step_count=num_calls, **how)
    stateful.run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_claims_keep_the_books_of_a_simple_model(machine):
    run(machine, 20, 15)


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_claims_keep_the_books_of_a_simple_model(machine):
    run(machine, 600, 50)

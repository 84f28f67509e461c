"""Grants of host copies: order of requests, and which copies make room."""

from types import SimpleNamespace

from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.slots import MOST_READS, Entry, HostCache, HostState, Requests, StatesAhead, keeps, victims


class Pool:
    """Slots that are only counted."""

    def __init__(self, count):
        self.count = self.num_free = count

    def try_acquire(self):
        if not self.num_free:
            return None
        self.num_free -= 1
        return self

    def release(self):
        self.num_free += 1


CHUNKS = [SimpleNamespace(index=index) for index in range(6)]


def cache(count):
    """A cache with `count` slots, for chunks that are used in order of index."""
    return HostCache(WEIGHTS, Pool(count), lambda chunk: chunk.index)


def claimed(made, *indices, state=HostState.CLEAN):
    for index in indices:
        entry = made.claim(CHUNKS[index], urgent=False)
        if state is not HostState.READING:
            entry.become(HostState.CLEAN)
        if state is HostState.DIRTY:
            entry.become(state)
    return made


def test_the_clean_copy_with_the_farthest_use_makes_room():
    made = claimed(cache(2), 1, 3)
    assert made.claim(CHUNKS[4], urgent=False) is None
    assert made.claim(CHUNKS[2], urgent=False).chunk is CHUNKS[2]
    assert set(made.entries) == {1, 2}


def test_an_urgent_request_evicts_only_clean_unpinned_copies():
    made = claimed(cache(1), 1)
    assert made.claim(CHUNKS[4], urgent=True) is not None
    assert made.claim(CHUNKS[0], urgent=True) is None, "chunk 4 is being read"
    for change in (Entry.pin, lambda entry: entry.become(HostState.DIRTY)):
        made = claimed(cache(1), 1)
        change(made.find(CHUNKS[1]))
        assert made.claim(CHUNKS[0], urgent=True) is None


def test_a_resident_copy_takes_no_slot_and_never_leaves():
    made = claimed(cache(1), 1)
    made.add_resident(CHUNKS[5], "memory")
    assert made.find(CHUNKS[5]).memory == "memory" and not made.drop(made.find(CHUNKS[5]))
    assert made.farthest(HostState.CLEAN).chunk is CHUNKS[1]


def test_a_dirty_copy_is_written_only_if_no_slot_will_be_free():
    made = claimed(cache(2), 1, state=HostState.DIRTY)
    assert made.to_write() is None, "a slot is free"
    claimed(made, 2, state=HostState.READING)
    assert made.to_write() is None, "chunk 2 will soon be clean"
    made.find(CHUNKS[2]).become(HostState.CLEAN)
    assert made.to_write().chunk is CHUNKS[1]
    made.find(CHUNKS[2]).pin()
    assert made.to_write() is None, "a pinned copy will free a slot"


def test_slots_are_crowded_if_two_thirds_and_two_or_more_are_pinned():
    for count, most in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (6, 3)):
        made = claimed(cache(count), *range(count))
        for index in range(most):
            assert not made.is_crowded()
            made.find(CHUNKS[index]).pin()
        assert not made.is_crowded()
        if count > 1:
            made.find(CHUNKS[most]).pin()
            assert made.is_crowded()


def test_without_keep_an_unpinned_copy_releases_its_slot():
    made = claimed(cache(2), 1, 2)
    for index, keep in ((1, True), (2, False)):
        entry = made.find(CHUNKS[index])
        entry.pin()
        made.unpin(entry, keep=keep)
    assert set(made.entries) == {1} and made.slots.num_free == 1


def test_gradients_and_wanted_weights_are_kept():
    assert [keeps(kind, keep=False, weights_wanted=False) for kind in (WEIGHTS, STATES, GRADIENTS)] == [False, False, True]
    assert [keeps(kind, keep=False, weights_wanted=True) for kind in (WEIGHTS, STATES, GRADIENTS)] == [True, False, True]
    assert keeps(STATES, keep=True, weights_wanted=False)


def asked(requests, *wishes):
    """Requests for (chunk, kind). A third item pins the request: "pin" or "urgent"."""
    made = []
    for index, kind, *how in wishes:
        made.append(SimpleNamespace(chunk=CHUNKS[index], kind=kind, pin=bool(how), number=None))
        requests.ask(made[-1], urgent=how == ["urgent"])
        requests.put(made[-1])
    return made


def order(requests, can=lambda request: True):
    found = []
    while (request := requests.take_next(can)) is not None:
        found.append((request.chunk.index, request.kind))
    return found


def test_grants_follow_request_order_but_awaited_requests_go_first():
    requests = Requests()
    asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES), (3, WEIGHTS, "pin"))
    assert order(requests) == [(0, WEIGHTS), (1, WEIGHTS), (2, STATES), (3, WEIGHTS)]
    made = asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES), (3, WEIGHTS, "pin"))
    requests.hurry(made[3])
    assert order(requests) == [(1, WEIGHTS), (3, WEIGHTS), (0, WEIGHTS), (2, STATES)]
    asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES, "pin"))
    requests.hurry_all()
    assert order(requests) == [(1, WEIGHTS), (2, STATES), (0, WEIGHTS)]


def test_a_blocked_pinned_request_blocks_only_its_kind():
    requests = Requests()
    asked(requests, (0, WEIGHTS, "pin"), (1, WEIGHTS, "urgent"), (2, STATES), (3, STATES))
    assert order(requests, lambda request: request.chunk.index not in (0, 2)) == [], "chunk 0 is the first pinned request, 2 the first prefetch"
    assert order(requests, lambda request: request.chunk.index != 0) == [(2, STATES), (3, STATES)]
    assert [request.chunk.index for request in requests] == [0, 1]


def test_a_pinned_request_replaces_the_prefetch_of_the_same_copy():
    requests = Requests()
    asked(requests, (0, WEIGHTS), (0, STATES), (0, WEIGHTS, "pin"))
    assert order(requests) == [(0, STATES), (0, WEIGHTS)]


def test_spans_used_later_make_room_and_any_span_for_a_needed_one():
    distance = {0: 5, 1: 9, 2: 3, 3: 9}.get
    assert list(victims(0, [1, 2, 3], distance, needed=False)) == [1, 3]
    assert list(victims(0, [1, 2, 3], distance, needed=True)) == [1, 3, 2]


class Reads:
    """A cache of states, and the reads that were asked for. `is_read` of each is set by the test."""

    def __init__(self, count):
        self.cache = HostCache(STATES, Pool(count) if count else None, lambda chunk: -chunk.index)
        self.asked = []

    def request(self, chunk, kind, *, pin):
        assert kind == STATES and not pin
        self.asked.append(SimpleNamespace(chunk=chunk, is_read=False, is_dropped=False))
        return self.asked[-1]

    @property
    def order(self):
        return [request.chunk.index for request in self.asked]


def test_states_ahead_are_read_in_the_order_of_use_and_few_at_a_time():
    reads = Reads(5)
    ahead = StatesAhead(CHUNKS, reads.cache, reads.request)
    ahead.advance()
    ahead.advance()
    assert reads.order == [5, 4] and MOST_READS == 2
    reads.asked[1].is_read = True
    ahead.advance()
    assert reads.order == [5, 4, 3]
    for _ in range(9):
        for request in reads.asked:
            request.is_read = True
        ahead.advance()
    assert reads.order == [5, 4, 3, 2, 1], "one chunk has no slot"


def test_states_ahead_wait_for_the_last_update_of_their_chunk():
    reads = Reads(6)
    ahead = StatesAhead(CHUNKS, reads.cache, reads.request)
    entry = reads.cache.claim(CHUNKS[4], urgent=False)
    entry.pin()
    ahead.advance()
    assert reads.order == [5]
    entry.become(HostState.CLEAN)
    reads.cache.unpin(entry, keep=False)
    ahead.advance()
    assert reads.order == [5, 4]


def test_a_dropped_read_ahead_makes_room_for_the_next():
    requests, reads = Requests(), Reads(6)

    def request(chunk, kind, *, pin):
        made = reads.request(chunk, kind, pin=pin)
        made.kind, made.pin = kind, pin
        requests.ask(made, urgent=False)
        requests.put(made)
        return made

    ahead = StatesAhead(CHUNKS, reads.cache, request)
    ahead.advance()
    requests.ask(SimpleNamespace(chunk=CHUNKS[5], kind=STATES, pin=True), urgent=True)
    assert [made.is_dropped for made in reads.asked] == [True, False]
    assert [waiting.chunk.index for waiting in requests] == [4]


def test_without_slots_no_states_are_read_ahead():
    reads = Reads(0)
    StatesAhead(CHUNKS, reads.cache, reads.request).advance()
    assert reads.order == []

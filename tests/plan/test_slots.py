"""Who is granted a host copy, in which order, and whose makes room."""

from types import SimpleNamespace

from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.slots import HostCache, HostState, Requests, keeps, victims


class Pool:
    """Slots that are but counted."""

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
    """Of chunks that are used in the order of their numbers."""
    return HostCache(WEIGHTS, Pool(count), lambda chunk: chunk.index)


def claimed(made, *indices, state=HostState.CLEAN):
    for index in indices:
        entry = made.claim(CHUNKS[index], urgent=False)
        if state is not HostState.READING:
            entry.become(HostState.CLEAN)
        if state is HostState.DIRTY:
            entry.become(state)
    return made


def test_the_clean_copy_used_last_makes_room_for_what_is_used_sooner():
    made = claimed(cache(2), 1, 3)
    assert made.claim(CHUNKS[4], urgent=False) is None
    assert made.claim(CHUNKS[2], urgent=False).chunk is CHUNKS[2]
    assert set(made.entries) == {1, 2}


def test_what_is_urgent_takes_what_is_used_sooner_but_nothing_that_is_read_dirty_or_pinned():
    made = claimed(cache(1), 1)
    assert made.claim(CHUNKS[4], urgent=True) is not None
    assert made.claim(CHUNKS[0], urgent=True) is None, "it is being read"
    for change in (lambda entry: setattr(entry, "pins", 1), lambda entry: entry.become(HostState.DIRTY)):
        made = claimed(cache(1), 1)
        change(made.find(CHUNKS[1]))
        assert made.claim(CHUNKS[0], urgent=True) is None


def test_what_is_resident_takes_no_slot_and_never_leaves():
    made = claimed(cache(1), 1)
    made.add_resident(CHUNKS[5], "memory")
    assert made.find(CHUNKS[5]).memory == "memory" and not made.drop(made.find(CHUNKS[5]))
    assert made.farthest(HostState.CLEAN).chunk is CHUNKS[1]


def test_a_dirty_copy_is_written_only_where_no_slot_comes_free():
    made = claimed(cache(2), 1, state=HostState.DIRTY)
    assert made.to_write() is None, "a slot is free"
    claimed(made, 2, state=HostState.READING)
    assert made.to_write() is None, "one is on its way"
    made.find(CHUNKS[2]).become(HostState.CLEAN)
    assert made.to_write().chunk is CHUNKS[1]
    made.find(CHUNKS[2]).pins = 1
    assert made.to_write() is None, "somebody will give one back"


def test_slots_are_crowded_where_two_thirds_of_them_are_pinned_and_two_at_least():
    for count, most in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (6, 3)):
        made = claimed(cache(count), *range(count))
        for index in range(most):
            assert not made.is_crowded()
            made.find(CHUNKS[index]).pin()
        assert not made.is_crowded()
        if count > 1:
            made.find(CHUNKS[most]).pin()
            assert made.is_crowded()


def test_without_keep_a_copy_that_nobody_needs_gives_its_slot_back():
    made = claimed(cache(2), 1, 2)
    for index, keep in ((1, True), (2, False)):
        entry = made.find(CHUNKS[index])
        entry.pins = 1
        made.unpin(entry, keep=keep)
    assert set(made.entries) == {1} and made.slots.num_free == 1


def test_gradients_stay_and_weights_that_are_wanted():
    assert [keeps(kind, keep=False, weights_wanted=False) for kind in (WEIGHTS, STATES, GRADIENTS)] == [False, False, True]
    assert [keeps(kind, keep=False, weights_wanted=True) for kind in (WEIGHTS, STATES, GRADIENTS)] == [True, False, True]
    assert keeps(STATES, keep=True, weights_wanted=False)


def asked(requests, *wishes):
    """Requests by (chunk, kind), of which those with a third item are so pinned: "pin" or "urgent"."""
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


def test_grants_are_in_the_order_of_asking_but_what_is_waited_for_passes_what_is_read_ahead():
    requests = Requests()
    asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES), (3, WEIGHTS, "pin"))
    assert order(requests) == [(0, WEIGHTS), (1, WEIGHTS), (2, STATES), (3, WEIGHTS)]
    made = asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES), (3, WEIGHTS, "pin"))
    requests.hurry(made[3])
    assert order(requests) == [(1, WEIGHTS), (3, WEIGHTS), (0, WEIGHTS), (2, STATES)]
    asked(requests, (0, WEIGHTS), (1, WEIGHTS, "pin"), (2, STATES, "pin"))
    requests.hurry_all()
    assert order(requests) == [(1, WEIGHTS), (2, STATES), (0, WEIGHTS)]


def test_pinned_requests_of_a_kind_wait_for_the_first_of_them_and_other_kinds_do_not():
    requests = Requests()
    asked(requests, (0, WEIGHTS, "pin"), (1, WEIGHTS, "urgent"), (2, STATES), (3, STATES))
    assert order(requests, lambda request: request.chunk.index not in (0, 2)) == [], "0 is first of its kind, 2 of what is read ahead"
    assert order(requests, lambda request: request.chunk.index != 0) == [(2, STATES), (3, STATES)]
    assert [request.chunk.index for request in requests] == [0, 1]


def test_what_was_to_be_read_ahead_is_asked_for_once_when_it_is_needed():
    requests = Requests()
    asked(requests, (0, WEIGHTS), (0, STATES), (0, WEIGHTS, "pin"))
    assert order(requests) == [(0, STATES), (0, WEIGHTS)]


def test_spans_that_are_used_later_make_room_and_any_for_what_an_op_needs_now():
    distance = {0: 5, 1: 9, 2: 3, 3: 9}.get
    assert list(victims(0, [1, 2, 3], distance, needed=False)) == [1, 3]
    assert list(victims(0, [1, 2, 3], distance, needed=True)) == [1, 3, 2]

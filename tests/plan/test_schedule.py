"""Plans of a step: literal plans of small traces, and invariants of random plans, checked by a player."""

import random
from collections import deque

import pytest
from support.traces import random_case

from infinity.plan.schedule import (
    NEVER,
    Copy,
    Evict,
    Gather,
    NextUse,
    Read,
    ReadStates,
    Reduce,
    Run,
    Use,
    plan,
)


def uses(*spans):
    """A trace of ops. Each op uses one span or a tuple of spans."""
    return [Use(f"op{i}", s if isinstance(s, tuple) else (s,)) for i, s in enumerate(spans)]


def forward_backward(count):
    return uses(*range(count), *reversed(range(count)))


def make(trace, *, budget=100, **options):
    spans = {span for use in trace for span in (*use.spans, *use.held)}
    return plan(trace, nbytes=dict.fromkeys(spans, 1), budget=budget, **options)


# ---- literal plans ----


def test_stages_run_one_two_and_three_ahead():
    #   op        |  0   |  1   |  2   |  3   |  4
    #   gather  0 |  1   |  2   |  3   |  4
    #   copy   01 |  2   |  3   |  4   |
    #   read  012 |  3   |  4   |
    assert make(uses(0, 1, 2, 3, 4)) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Copy(2), Read(3)],
        *[Run(1), Gather(2), Copy(3), Read(4)],
        *[Run(2), Gather(3), Copy(4)],
        *[Run(3), Gather(4)],
        Run(4),
    ]


def test_reads_run_further_ahead_if_slots_allow():
    assert make(uses(0, 1, 2, 3, 4), read_ahead=5)[:9] == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2), Read(3), Read(4)],
        Run(0),
    ]


def test_reads_run_ahead_as_far_as_slots_can_hold():
    # Slots of spans 0 to 4: 1, 2, 3, 0 (already in host memory, counts as 1), 2.
    slots_of = {0: 1, 1: 2, 2: 3, 3: 0, 4: 2}
    for slots_ahead, expected in ((0, 3), (6, 3), (7, 4), (8, 4), (9, 5)):
        actions = make(uses(0, 1, 2, 3, 4), slots_ahead=slots_ahead, slots_of=slots_of)
        assert [a for a in actions[: actions.index(Run(0))] if isinstance(a, Read)] == list(map(Read, range(expected)))


def test_a_model_that_fits_is_fetched_once_per_step():
    assert make(forward_backward(3)) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Copy(2)],
        *[Run(1), Gather(2)],
        *[Run(2), Run(3), Run(4), Run(5)],
    ]


def test_the_farthest_next_use_is_evicted_first():
    # With room for two spans, the last spans of forward stay for backward, and the first ones are fetched again.
    assert make(forward_backward(4), budget=2) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Read(3)],
        *[Run(1), Evict(0), Copy(2), Gather(2), Read(0)],
        *[Run(2), Evict(1), Copy(3), Gather(3), Read(1)],
        Run(3),
        Run(4),
        *[Run(5), Evict(3), Copy(1), Gather(1)],
        *[Run(6), Evict(2), Copy(0), Gather(0)],
        Run(7),
    ]


def test_with_room_for_one_span_a_fetch_begins_with_its_op():
    assert make(uses(0, 1, 0), budget=1) == [
        *[Read(0), Copy(0), Gather(0), Read(1)],
        Run(0),
        *[Run(1), Evict(0), Copy(1), Gather(1), Read(0)],
        *[Run(2), Evict(1), Copy(0), Gather(0)],
    ]


def test_without_keep_only_the_next_three_fetches_stay():
    assert make(uses(0, 1, 2, 3, 4, 5), keep=False) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Copy(2), Read(3)],
        *[Run(1), Evict(0), Gather(2), Copy(3), Read(4)],
        *[Run(2), Evict(1), Gather(3), Copy(4), Read(5)],
        *[Run(3), Evict(2), Gather(4), Copy(5)],
        *[Run(4), Evict(3), Gather(5)],
        *[Run(5), Evict(4)],
    ]


def test_an_op_larger_than_the_budget_is_still_served():
    assert make(uses((0, 1, 2)), budget=1) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Read(2)],
        *[Run(0), Copy(1), Gather(1), Copy(2), Gather(2)],
    ]


def test_a_span_held_by_an_enclosing_op_is_not_evicted():
    trace = [Use("outer", (0,)), *(Use(f"inner{i}", (i,), frozenset({0})) for i in (1, 2, 3)), Use("outer again", (0,))]
    actions = make(trace, budget=2)
    assert [a for a in actions if isinstance(a, Evict)] == [Evict(1), Evict(2)]


def test_a_complete_gradient_is_reduced_and_its_span_evicted():
    #  op        0  1  1' 0'
    #  gradient        1  0     the last one is reduced at the end of the pass
    actions = make(uses(0, 1, 1, 0), reductions=[(2, 11), (3, 10)], updates=[(2, 11), (3, 10)], span_of={10: 0, 11: 1})
    assert actions == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), ReadStates(11), ReadStates(10)],
        *[Run(0), Gather(1)],
        *[Run(1), Run(2)],
        *[Run(3), Reduce(11), Evict(1)],
    ]


def test_states_are_read_a_given_number_of_updates_ahead():
    updates = [(3, 2), (4, 1), (5, 0)]
    actions = make(forward_backward(3), updates=updates, span_of={0: 0, 1: 1, 2: 2}, states_ahead=1)
    assert [a for a in actions if isinstance(a, (Run, ReadStates))] == [
        ReadStates(2),
        *[Run(0), Run(1), Run(2), Run(3)],
        *[Run(4), ReadStates(1)],
        *[Run(5), ReadStates(0)],
    ]


def test_an_updated_span_is_fetched_again_by_its_next_use():
    actions = make(uses(0, 1, 1, 2, 1), updates=[(2, 1)], span_of={1: 1})
    assert actions[actions.index(Run(3)) :][:4] == [Run(3), Evict(1), Read(1), Copy(1)]


def test_spans_of_zero_bytes_are_never_evicted():
    actions = plan(forward_backward(3), nbytes={0: 0, 1: 1, 2: 1}, budget=1, keep=False, updates=[(5, 0)], span_of={0: 0})
    assert Evict(0) not in actions and actions.count(Copy(0)) == 1


# ---- any trace ----


class Player:
    """Executes a plan in order. An action must come after all actions that it waits for."""

    def __init__(
        self, trace, *, nbytes, budget, read_ahead, slots_ahead, slots_of, keep, reductions, updates, span_of, states_ahead
    ):
        self.trace, self.nbytes, self.budget, self.keep = trace, nbytes, budget, keep
        self.reductions, self.updates = reductions, updates
        self.read_ahead, self.states_ahead = read_ahead, states_ahead
        self.slots_ahead, self.slots_of = slots_ahead, slots_of
        self.table = NextUse(trace)
        self.position = -1
        self.needed = frozenset()
        self.waiting = set()  # read, not copied
        self.resident, self.gathered, self.unused = set(), set(), set()
        self.num_reduced = self.num_states = 0
        self.horizon = NEVER

    def used(self):
        return sum(self.nbytes[span] for span in self.resident)

    def play(self, actions):
        for action, following in zip(actions, [*actions[1:], None]):
            self.carry_out(action)
            if following is None or isinstance(following, Run):
                self.check_op()
        assert self.position == len(self.trace) - 1
        assert self.num_reduced == sum(position < self.position for position, _ in self.reductions)

    def carry_out(self, action):
        match action:
            case Run(position):
                assert position == self.position + 1
                self.position = position
                self.needed = {*self.trace[position].spans, *self.trace[position].held}
                self.unused -= self.needed
                self.horizon = self.third_fetch()
            case Read(span):
                assert span not in self.waiting | self.resident
                self.check_ahead(span, self.num_read_ahead())
                self.waiting.add(span)
            case Copy(span):
                self.check_ahead(span, 2)
                self.waiting.remove(span)
                self.resident.add(span)
                if span not in self.needed:
                    self.unused.add(span)
                    assert self.used() <= self.budget, "a copy ahead of its op needs room in the budget"
            case Gather(span):
                assert span in self.resident - self.gathered
                self.check_ahead(span, 1)
                self.gathered.add(span)
            case Evict(span):
                assert span in self.resident - self.needed
                for among in (self.resident, self.gathered, self.unused):
                    among.discard(span)
            case Reduce(chunk):
                position, expected = self.reductions[self.num_reduced]
                assert chunk == expected and position < self.position
                self.num_reduced += 1
            case ReadStates(chunk):
                assert chunk == self.updates[self.num_states][1]
                self.num_states += 1
                assert self.num_states <= sum(p < self.position for p, _ in self.updates) + self.states_ahead

    def fetches(self):
        """(position, span) of future fetches, in order: next uses of spans that are away, or present and unused."""
        to_come = {}
        for position in range(self.position + 1, len(self.trace)):
            for span in self.trace[position].spans:
                if span not in self.resident or span in self.unused:
                    to_come.setdefault(span, position)
        return [(position, span) for span, position in to_come.items()]

    def num_read_ahead(self):
        spans = [span for _, span in self.fetches()]
        slots = [sum(max(1, self.slots_of[span]) for span in spans[:count]) for count in range(1, len(spans) + 1)]
        return max(self.read_ahead, sum(taken <= self.slots_ahead for taken in slots))

    def third_fetch(self):
        return max((later for later, _ in self.fetches()[:3]), default=self.position)

    def check_ahead(self, span, distance):
        assert span in self.needed or span in [s for _, s in self.fetches()[:distance]], f"at most {distance} fetches ahead"

    def check_op(self):
        if self.position >= 0:
            assert self.gathered >= {*self.trace[self.position].spans}, "an op needs all its spans gathered"
        most = max(sum(self.nbytes[span] for span in {*use.spans, *use.held}) for use in self.trace)
        assert self.used() <= self.budget or self.budget < most
        if not self.keep:
            idle = self.resident - self.needed - self.unused
            horizon = max(self.horizon, self.third_fetch())
            assert all(self.table.after(span, self.position) <= horizon for span in idle), "a span that no stage needs must be evicted"


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("block", range(8))
def test_every_plan_keeps_its_promises(block):
    for seed in range(100 * block, 100 * block + 100):
        trace, options = random_case(seed)
        Player(trace, **options).play(plan(trace, **options))


def test_plans_of_equal_arguments_are_equal():
    trace, options = random_case(5)
    assert plan(trace, **options) == plan(list(trace), **options)


# ---- Belady ----


def num_copies(requests, capacity):
    return sum(isinstance(action, Copy) for action in make(uses(*requests), budget=capacity))


def fewest_misses(requests, capacity):
    """Misses of the best eviction order, by trying every order."""
    reached = {frozenset(): 0}
    for item in requests:
        following = {}
        for held, misses in reached.items():
            if item in held:
                choices = [(held, misses)]
            elif len(held) < capacity:
                choices = [(held | {item}, misses + 1)]
            else:
                choices = [(held - {victim} | {item}, misses + 1) for victim in held]
            for state, count in choices:
                following[state] = min(count, following.get(state, count))
        reached = following
    return min(reached.values())


def belady_misses(requests, capacity):
    """Misses of the optimal replacement of equal-sized items: the least that any eviction order can reach.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """
    later = {}
    for position, item in enumerate(requests):
        later.setdefault(item, deque()).append(position)
    held = set()
    misses = 0
    for item in requests:
        later[item].popleft()
        if item in held:
            continue
        misses += 1
        if len(held) == capacity:
            held.remove(max(held, key=lambda other: later[other][0] if later[other] else NEVER))
        held.add(item)
    return misses


def test_belady_misses_is_the_minimum_of_all_eviction_orders():
    choose = random.Random(0)
    for _ in range(300):
        requests = [choose.randrange(6) for _ in range(choose.randint(0, 12))]
        for capacity in (1, 2, 3, 4):
            assert belady_misses(requests, capacity) == fewest_misses(requests, capacity)


def test_forward_and_backward_make_the_fewest_possible_copies():
    for count in range(1, 14):
        for capacity in range(1, count + 2):
            requests = [*range(count), *reversed(range(count))]
            assert num_copies(requests, capacity) == belady_misses(requests, capacity)


@pytest.mark.slow
def test_prefetch_costs_at_most_two_spans_of_room():
    # Belady's minimum has no prefetch. Two prefetched spans leave room for two spans fewer.
    choose = random.Random(1)
    for _ in range(300):
        requests = [choose.randrange(8) for _ in range(choose.randint(1, 40))]
        for capacity in range(3, 9):
            assert belady_misses(requests, capacity) <= num_copies(requests, capacity) <= belady_misses(requests, capacity - 2)


# ---- the next use ----


def test_next_use_is_the_first_later_position():
    table = NextUse([Use("a", (0, 1)), Use("b", (2,), frozenset({0})), Use("c", (1,))])
    assert [table.after(0, p) for p in (-1, 0, 1, 2)] == [0, 1, NEVER, NEVER]
    assert [table.after(1, p) for p in (-1, 0, 1, 2)] == [0, 2, 2, NEVER]
    assert table.after(7, -1) == NEVER


def test_next_use_is_cyclic():
    table = NextUse(uses(0, 1, 0))
    assert [table.cyclic(1, p, 3) for p in (0, 1, 2)] == [1, 4, 4]
    assert [table.cyclic(0, p, 3) for p in (0, 1, 2)] == [2, 2, 3]
    assert table.cyclic(7, 0, 3) == NEVER


def test_plans_of_different_traces_differ():
    made = [plan(uses(*order), nbytes={0: 1, 1: 1}, budget=2) for order in ((0, 1, 0), (0, 1, 0), (1, 0, 1))]
    assert made[0] == made[1] != made[2]

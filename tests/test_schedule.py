"""The plan of a step: literal for small traces; for random ones, what every plan must keep to, checked by playing it."""

import itertools
import random

import pytest

from infinity.schedule import (
    NEVER,
    Copy,
    Cursor,
    Evict,
    Gather,
    NextUse,
    Read,
    ReadStates,
    Reduce,
    Run,
    Use,
    belady_misses,
    plan,
)


def uses(*spans):
    """A trace of ops, each of which uses one span or a tuple of them."""
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


def test_reads_run_further_ahead_where_slots_allow():
    assert make(uses(0, 1, 2, 3, 4), read_ahead=5)[:9] == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2), Read(3), Read(4)],
        Run(0),
    ]


def test_what_fits_is_fetched_once_in_forward_and_backward():
    assert make(forward_backward(3)) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Copy(2)],
        *[Run(1), Gather(2)],
        *[Run(2), Run(3), Run(4), Run(5)],
    ]


def test_the_farthest_next_use_is_evicted_first():
    # Room for two: the last spans of the forward pass stay for the backward pass, the first are fetched again.
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


def test_room_for_one_fetches_when_the_op_begins():
    assert make(uses(0, 1, 0), budget=1) == [
        *[Read(0), Copy(0), Gather(0), Read(1)],
        *[Run(0), Run(1)][:1],
        *[Run(1), Evict(0), Copy(1), Gather(1), Read(0)],
        *[Run(2), Evict(1), Copy(0), Gather(0)],
    ]


def test_without_keeping_nothing_stays_beyond_the_next_three_fetches():
    assert make(uses(0, 1, 2, 3, 4, 5), keep=False) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), Read(2)],
        *[Run(0), Gather(1), Copy(2), Read(3)],
        *[Run(1), Evict(0), Gather(2), Copy(3), Read(4)],
        *[Run(2), Evict(1), Gather(3), Copy(4), Read(5)],
        *[Run(3), Evict(2), Gather(4), Copy(5)],
        *[Run(4), Evict(3), Gather(5)],
        *[Run(5), Evict(4)],
    ]


def test_an_op_that_needs_more_than_the_budget_is_served_nevertheless():
    assert make(uses((0, 1, 2)), budget=1) == [
        *[Read(0), Copy(0), Gather(0), Read(1), Read(2)],
        *[Run(0), Copy(1), Gather(1), Copy(2), Gather(2)],
    ]


def test_a_span_held_by_an_enclosing_op_is_not_evicted():
    trace = [Use("outer", (0,)), *(Use(f"inner{i}", (i,), frozenset({0})) for i in (1, 2, 3)), Use("outer again", (0,))]
    actions = make(trace, budget=2)
    assert [a for a in actions if isinstance(a, Evict)] == [Evict(1), Evict(2)]


def test_gradients_are_reduced_once_complete_and_their_span_leaves_with_the_update():
    #  op        0  1  1' 0'
    #  gradient        1  0     the last one is left to the end of the pass
    actions = make(uses(0, 1, 1, 0), reductions=[(2, 11), (3, 10)], updates=[(2, 11), (3, 10)], span_of={10: 0, 11: 1})
    assert actions == [
        *[Read(0), Copy(0), Gather(0), Read(1), Copy(1), ReadStates(11), ReadStates(10)],
        *[Run(0), Gather(1)],
        *[Run(1), Run(2)],
        *[Run(3), Reduce(11), Evict(1)],
    ]


def test_states_are_read_so_many_chunks_before_their_update():
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


def test_spans_of_no_bytes_are_never_evicted():
    actions = plan(forward_backward(3), nbytes={0: 0, 1: 1, 2: 1}, budget=1, keep=False, updates=[(5, 0)], span_of={0: 0})
    assert Evict(0) not in actions and actions.count(Copy(0)) == 1


# ---- any trace ----


def random_case(seed):
    """A trace in which nested ops hold spans, budgets from too small to ample; as the arguments of plan()."""
    choose = random.Random(seed)
    num_spans = choose.randint(1, 9)
    trace = []
    while len(trace) < choose.randint(1, 40):
        own = tuple(choose.sample(range(num_spans), choose.randint(0, min(3, num_spans))))
        trace.append(Use(len(trace), own))
        held = frozenset(own) if choose.random() < 0.3 else frozenset()
        for _ in range(choose.randint(0, 3) if held else 0):
            trace.append(Use(len(trace), (choose.randrange(num_spans),), held))
    complete = sorted((choose.randrange(len(trace)), span) for span in range(num_spans) if choose.random() < 0.5)
    return trace, {
        "nbytes": {span: choose.choice([1, 1, 2, 3]) for span in range(num_spans)},
        "budget": choose.randint(1, 14),
        "read_ahead": choose.randint(3, 7),
        "keep": choose.random() < 0.6,
        "reductions": complete,
        "updates": complete,
        "span_of": {span: span for span in range(num_spans)},
        "states_ahead": choose.randint(1, 3),
    }


class Player:
    """Carries a plan out in its order and checks each action against what was done before it."""

    def __init__(self, trace, options):
        self.trace = trace
        self.nbytes, self.budget, self.keep = options["nbytes"], options["budget"], options["keep"]
        self.read_ahead = options["read_ahead"]
        self.options = options
        self.position = -1
        self.read, self.copied, self.gathered = set(), set(), set()
        self.unused = []  # copied and not yet used, in the order of copying
        self.done = []

    def play(self, actions):
        for index, action in enumerate(actions):
            self.action = action
            last = index + 1 == len(actions) or isinstance(actions[index + 1], Run)
            getattr(self, type(action).__name__.lower())(*action)
            if last:
                self.check_op()
        assert self.position == len(self.trace) - 1

    def needed(self):
        return {*self.trace[self.position].spans, *self.trace[self.position].held} if self.position >= 0 else set()

    def run(self, position):
        assert position == self.position + 1
        self.position = position
        self.unused = [span for span in self.unused if span not in self.needed()]

    def _read(self, span):
        assert span not in self.read and span not in self.copied

    def copy(self, span):
        assert span in self.read and span not in self.copied, "a copy comes behind its read"
        self.read.discard(span)
        self.copied.add(span)
        if span not in self.trace[self.position].spans or self.position < 0:
            self.unused.append(span)
            used = sum(self.nbytes[s] for s in self.copied)
            assert used <= self.budget, "nothing is fetched ahead for which there is no room"
        assert len(self.unused) <= 2, "copies run two fetches ahead"

    def gather(self, span):
        assert span in self.copied and span not in self.gathered, "a gather comes behind its copy"
        self.gathered.add(span)
        assert len([s for s in self.unused if s in self.gathered]) <= 1, "gathers run one fetch ahead"

    def evict(self, span):
        assert span in self.copied and span not in self.needed()
        self.copied.discard(span)
        self.gathered.discard(span)
        self.unused = [s for s in self.unused if s != span]

    def reduce(self, chunk):
        self.done.append(chunk)
        assert dict((c, p) for p, c in self.options["reductions"])[chunk] < self.position

    def readstates(self, chunk):
        chunks = [c for _, c in self.options["updates"]]
        complete = sum(p < self.position for p, _ in self.options["updates"])
        assert chunks.index(chunk) < complete + self.options["states_ahead"]

    def check_op(self):
        """All that belongs to an op has been issued."""
        assert len(self.read) <= self.read_ahead
        if self.position < 0:
            return
        assert {*self.trace[self.position].spans} <= self.gathered, "whole when the op runs"
        used = sum(self.nbytes[span] for span in self.copied)
        assert used <= max(self.budget, sum(self.nbytes[span] for span in self.needed() | self.resident_before(self.position)))
        if not self.keep:
            following = [span for use in self.trace[self.position + 1 :] for span in use.spans]
            window = {*self.needed(), *list(dict.fromkeys(following))[: len(self.copied)]}
            assert self.copied <= window | {span for use in self.trace[self.position + 1 :] for span in use.held}

    def resident_before(self, position):
        """What an op that needs more than the budget cannot push out: spans used no later than it."""
        return set()


Player.read_action = Player._read


@pytest.mark.parametrize("block", range(10))
def test_every_plan_keeps_its_promises(block):
    for seed in range(100 * block, 100 * block + 100):
        trace, options = random_case(seed)
        for span in {span for use in trace for span in (*use.spans, *use.held)}:
            assert options["nbytes"][span] > 0
        Player(trace, options).play(plan(trace, **options))

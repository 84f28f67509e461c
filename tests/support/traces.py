"""Random traces of ops for the planner."""

import random

from infinity.plan.schedule import Use


def random_case(seed):
    """Return a trace in which enclosing ops hold spans, and options of plan(). Three of four budgets suffice for every op."""
    choose = random.Random(seed)
    num_spans = choose.randint(1, 9)
    trace = []
    for _ in range(choose.randint(1, 25)):
        own = tuple(choose.sample(range(num_spans), choose.randint(0, min(3, num_spans))))
        trace.append(Use(len(trace), own))
        for _ in range(choose.randint(0, 3) if choose.random() < 0.3 else 0):
            trace.append(Use(len(trace), (choose.randrange(num_spans),), frozenset(own)))
    nbytes = {span: choose.choice([1, 1, 2, 3]) for span in range(num_spans)}
    most = max(sum(nbytes[span] for span in {*use.spans, *use.held}) for use in trace)
    complete = sorted((choose.randrange(len(trace)), span) for span in range(num_spans) if choose.random() < 0.5)
    return trace, {
        "nbytes": nbytes,
        "budget": most + choose.randint(0, 8) if seed % 4 else choose.randint(0, most),
        "read_ahead": choose.randint(3, 7),
        "slots_ahead": choose.randint(0, 12),
        "slots_of": {span: choose.randint(0, 3) for span in range(num_spans)},
        "keep": choose.random() < 0.6,
        "reductions": complete,
        "updates": complete,
        "span_of": {span: span for span in range(num_spans)},
        "states_ahead": choose.randint(1, 3),
    }

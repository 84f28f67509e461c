"""The position of a step in a plan, the next expected op, and distances to later uses."""

import math

from infinity.plan.route import Cursor, Recency, Route, to_gradient
from infinity.plan.schedule import Copy, Run, Use, plan


def uses(*spans):
    return [Use(f"op{i}", (span,)) for i, span in enumerate(spans)]


# ---- the cursor ----


def follow(keys, steps):
    cursor = Cursor([Use(key, ()) for key in keys])
    return [cursor.advance(key) for key in steps]


def test_a_step_that_repeats_the_trace_is_followed():
    assert follow("abba", "abba") == [0, 1, 2, 3]


def test_a_step_that_leaves_the_trace_continues_at_the_next_known_op():
    assert follow("abcde", "adx?e") == [0, 3, None, None, 4]
    assert follow("abcde", "aba") == [0, 1, 0]  # no later op: search from the start
    assert follow("abab", "aab") == [0, 2, 3]


def test_a_cursor_can_restart():
    cursor = Cursor([Use(key, ()) for key in "ab"])
    assert [cursor.advance("b"), cursor.restart(), cursor.advance("a")] == [1, None, 0]
    assert Cursor([]).advance("a") is None


def test_a_cursor_expects_only_the_next_op_of_the_trace():
    cursor = Cursor([Use(key, ()) for key in "aba"])
    assert [cursor.expects(key) for key in "ab"] == [True, False]
    cursor.advance("a")
    assert [cursor.expects(key) for key in "ab"] == [False, True]
    cursor.advance("b"), cursor.advance("a")
    assert not cursor.expects("a") and cursor.position == 2  # the end of the trace
    assert not Cursor([]).expects("a")


def test_find_returns_the_pair_of_ops_nearest_to_a_position():
    cursor = Cursor([Use(key, ()) for key in "abcabdab"])
    assert [cursor.find("a", "b", near=near) for near in (0, 2, 3, 4, 7)] == [1, 1, 4, 4, 7]
    assert [cursor.find("b", key, near=0) for key in "cd"] == [2, 5]
    assert cursor.find("a", "c", near=2) is None
    assert cursor.find("a", "?", near=0) is None
    assert cursor.find("?", "a", near=0) is None
    assert cursor.position == -1  # find() does not move the cursor


def test_the_first_op_of_a_step_is_found_only_at_the_beginning():
    cursor = Cursor([Use(key, ()) for key in "aba"])
    assert cursor.find(None, "a", near=2) == 0
    assert cursor.find(None, "b", near=1) is None


# ---- routes ----


def test_a_route_knows_whether_an_update_comes_before_the_next_copy():
    trace = uses(*range(8), *reversed(range(8)))
    updates = [(position, 15 - position) for position in range(8, 16)]
    actions = plan(trace, nbytes=dict.fromkeys(range(8), 1), budget=100, keep=False, updates=updates, span_of={chunk: chunk for chunk in range(8)})
    copied = {span: [i for i, a in enumerate(actions) if a == Copy(span)] for span in range(8)}
    assert [len(copied[span]) for span in range(8)] == [2, 2, 2, 2, 1, 1, 1, 1]
    route = Route(trace, actions, updates)
    for position in range(-1, 16):
        for span in range(8):
            end = actions.index(Run(position + 1)) if position < 15 else len(actions)
            later = any(index >= end for index in copied[span])
            route.cursor.position = position
            assert route.updated_next(span, span) == (not later), (position, span)
    assert not route.updated_next(8, 0), "chunk 8 has no update"


def test_a_route_knows_the_first_action_of_each_op():
    trace = uses(0, 1, 0)
    actions = plan(trace, nbytes={0: 1, 1: 1}, budget=2)
    route = Route(trace, actions, [(2, 7), (2, 5)])
    assert [actions[index] for index in route.runs] == [Run(0), Run(1), Run(2)]
    assert route.actions is actions and route.uses is trace
    assert route.update_order == {7: (0, 2), 5: (1, 2)}
    assert route.next_use.after(1, -1) == 1
    assert route.cursor.position == -1 and route.successor is None


# ---- distances ----


def on_the_way(position, *, updates=()):
    """The route of a forward pass over spans 0, 1, 2 and back, at a position."""
    trace = uses(0, 1, 2, 2, 1, 0)
    route = Route(trace, plan(trace, nbytes={0: 1, 1: 1, 2: 1}, budget=3), updates)
    route.cursor.position = position
    return route


def test_the_distance_of_a_span_is_its_next_use_in_repeated_steps():
    assert [on_the_way(1).to_span(span) for span in (0, 1, 2)] == [5, 4, 2]
    assert [on_the_way(5).to_span(span) for span in (0, 1, 2)] == [6, 7, 8]


def test_the_distance_of_weights_may_be_an_earlier_update():
    updates = [(3, 2), (4, 1), (5, 0)]
    route = on_the_way(3, updates=updates)
    assert [route.to_weights(chunk, chunk, update_comes=False) for chunk in (0, 1, 2)] == [5, 4, 8]
    assert [route.to_weights(chunk, chunk, update_comes=True) for chunk in (0, 1, 2)] == [5, 4, 3]
    assert on_the_way(5, updates=updates).to_weights(2, 2, update_comes=True) == 5, "the update of chunk 2 is due"


def test_the_distance_of_states_is_the_number_of_earlier_updates():
    route = on_the_way(4, updates=[(3, 2), (4, 1), (5, 0)])
    assert [route.to_states(chunk, chunk, num_begun=1) for chunk in (0, 1, 2)] == [1, 0, 2]
    deferred = on_the_way(1)
    assert [deferred.to_states(chunk, chunk, num_begun=0) for chunk in (0, 1, 2)] == [6, 7, 2]


def test_a_gradient_in_use_is_nearer_than_all_others():
    recency = Recency()
    for span in (0, 1, 2):
        recency.note(span)
    for distances in (on_the_way(4), recency):
        others = [to_gradient(distances, chunk, chunk, num_begun=0, in_use=False) for chunk in (0, 1, 2)]
        assert to_gradient(distances, 0, 0, num_begun=0, in_use=True) == -math.inf < min(others)


def test_without_a_route_the_last_used_span_is_the_nearest():
    recency = Recency()
    for span in (0, 1, 2, 0):
        recency.note(span)
    assert sorted(range(4), key=recency.to_span) == [0, 2, 1, 3]
    assert recency.to_states(7, 1, num_begun=3) == recency.to_weights(7, 1, update_comes=True) == recency.to_span(1)


def test_weights_stay_for_a_later_copy_or_update_of_the_pass():
    trace = uses(0, 1, 1, 0, 1)
    route = Route(trace, plan(trace, nbytes={0: 1, 1: 1}, budget=2), [(3, 0), (4, 1)])
    route.cursor.position = 1
    assert [route.wants_weights(chunk, chunk, in_backward=True) for chunk in (0, 1)] == [True, True]
    route.cursor.position = -1
    assert not route.wants_weights(7, 1, in_backward=False) and route.wants_weights(7, 1, in_backward=True)

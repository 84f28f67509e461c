"""Forecasts of the memory of ops in backward passes, as literal sequences of bytes."""

import pytest

from infinity.engine.memory.op_forecast import OpForecast


def after_forward(*nbytes):
    """A forecast after forward passes whose segments took so many bytes."""
    forecast = OpForecast()
    for position, taken in enumerate(nbytes):
        forecast.note_op(taken // 2)
        forecast.note_op(taken)
        forecast.end_forward(position)
    return forecast


def go_backward(forecast, *nbytes):
    """The last segments go backward and take so many bytes. Returns the forecast before each one, and the one for the next."""
    found, position = [], len(forecast._forward)
    for taken in nbytes:
        position -= 1
        found.append(forecast.begin_backward(position))
        forecast.note_op(taken)
    return [*found, forecast.begin_backward(position - 1)]


def test_later_ops_need_no_more_than_the_last_ones():
    assert go_backward(after_forward(10, 20, 30, 40), 40, 30, 20) == [40, 40, 30, 20]


def test_a_backward_pass_above_its_forward_pass_raises_the_forecast():
    """The last segment takes 7 bytes more than in its forward pass, the next one 8: so may the first one, with 50 bytes."""
    assert go_backward(after_forward(50, 20, 30), 37, 28) == [50, 57, 58]


def test_forward_passes_of_segments_that_went_backward_no_longer_count():
    assert go_backward(after_forward(10, 20, 90), 95, 30) == [90, 95, 30]


def test_the_first_backward_passes_follow_their_forward_passes_at_once():
    """The last segment of each micro-batch goes backward when its loss is known: no `end_forward` comes in between."""
    forecast = after_forward(10, 20)
    for _ in range(3):
        forecast.note_op(30)  # forward
        assert forecast.begin_backward(2) >= 30
        forecast.note_op(35)  # backward
    assert forecast.begin_backward(1) == 35


@pytest.mark.parametrize("forward", [(), (10, 20)])
def test_without_further_ops_forward_passes_alone_count(forward):
    assert after_forward(*forward).begin_backward(5) == max(forward, default=0)


def test_a_new_round_forgets_the_round_before():
    forecast = after_forward(50, 20, 30)
    go_backward(forecast, 80, 60)
    for position, taken in enumerate((5, 6)):
        forecast.note_op(taken)
        forecast.end_forward(position)
    forecast.note_op(4)
    assert forecast.begin_backward(2) == 6

"""FirstFailure: of many failures at once, one is kept and reported. Waiting threads are woken."""

import threading

import pytest

from infinity.system.failure import FirstFailure
from infinity.system.threads import Monitor

SECONDS = 20  # a thread that takes longer counts as hung


@pytest.mark.slow
def test_of_many_failures_at_once_one_is_kept_and_reported():
    for _ in range(50):
        told, errors = [], [OSError(number) for number in range(8)]
        failure, gate = FirstFailure(lambda error, what: told.append((error, what))), threading.Barrier(8)

        def fail(error):
            gate.wait(SECONDS)
            failure.note(error, "the update: ")

        threads = [threading.Thread(target=fail, args=(error,)) for error in errors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert told == [(failure.error, "the update: ")] and failure.error in errors
        with pytest.raises(OSError) as caught:
            failure.check()
        assert caught.value is failure.error


def test_a_failure_wakes_a_waiting_thread():
    failure, monitor, seen = FirstFailure(), Monitor(), []
    failure.wakes(monitor)

    def wait():
        with monitor:
            seen.append(monitor.wait_for(lambda: failure.error is not None, SECONDS))

    thread = threading.Thread(target=wait)
    thread.start()
    failure.note(OSError("lost"))
    thread.join(SECONDS)
    assert seen == [True]


def test_check_without_a_failure_raises_nothing():
    failure = FirstFailure()
    failure.check()
    assert failure.error is None

"""Runs a collective until the collective is over or a rank has failed.

Knows the watch of failures. Must not know tensors, groups, or which collective this is.
"""

from __future__ import annotations

import copy
import datetime
import threading
from collections.abc import Callable
from typing import Any

from infinity.errors import PeerError
from infinity.system import failure_watch, interrupts
from infinity.system.failure_watch import Place, Watch
from infinity.system.waits import waits


class Collectives:
    """The collectives of one process. name: of the rank, for messages. watch: None without peers, when nothing is run."""

    def __init__(self, name: str, place: Place, watch: Watch | None):
        self.name, self._place, self._watch = name, place, watch
        self.has_left_behind = False  # whether an abandoned collective may still write to its tensors

    @property
    def failure(self) -> BaseException | None:
        """The failure of this rank, or a PeerError."""
        return self._watch.failure.error if self._watch is not None else None

    def check(self) -> None:
        """Raise the failure of this rank or of a peer, if there is one."""
        if self.failure is not None:
            raise _copy(self.failure)

    def run(self, begin: Callable[[], Any], what: str, where: str = "control") -> None:
        """Run a collective until it is done or a rank has failed. If the collective fails, the error is that of the failed rank.

        begin: starts the collective; returns torch's Work, or None if the collective follows a stream. what: for errors. where: the thread,
        "control" or "lane". A rank that failed has left out a collective. The next one would meet a different collective of the others.
        """
        self.check()
        if where == "control" and threading.current_thread().name != interrupts.SHIELD:
            self._place.training = threading.get_ident()
        with self._place.inside(where, what), waits(lambda: f"{self._watch.late()} in {what}"):
            try:
                work, is_over = begin(), False
                while work is not None and not is_over:
                    is_over = self._waited(work)
            except RuntimeError as error:
                if self.failure is not None and (type(error), error.args) == (type(self.failure), self.failure.args):
                    raise
                reason = self._explain(what, error)
                raise reason from (error if self.failure is None else None)

    def _waited(self, work) -> bool:
        """Whether the collective is over. Waits at most WATCH_S; gloo's reduce-scatter ignores the timeout in torch 2.13."""
        try:
            work.wait(datetime.timedelta(seconds=failure_watch.WATCH_S))
        except RuntimeError:
            if not work.is_completed():
                if self.failure is not None:
                    self.has_left_behind = True
                    raise _copy(self.failure) from None
                return False
            work.wait()  # the work ended meanwhile, or wait() raises the error
        return True

    def _explain(self, what: str, error: RuntimeError) -> BaseException:
        """The reason of a failed collective."""
        if (reason := self._watch.reason_of(what)) is not None:
            return _copy(reason)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerError(
            f"{self.name}: {what} failed: another rank has failed, or runs other modules or in another order. See the first error of the "
            f"other ranks ({reason})"
        )


def _copy(error: BaseException) -> BaseException:
    """A copy for each thread, so that tracebacks stay separate."""
    try:
        return copy.copy(error)
    except Exception:  # an exception class of the program with an unusual constructor
        return error

"""The first failure of an engine: kept, sent to the other ranks, and raised in every thread that would wait or continue.

Knows an error and the waiting threads. Must not know the failed work, nor how other ranks are told. An engine's lanes and parts share
one object.
"""

from __future__ import annotations

from collections.abc import Callable


class FirstFailure:
    """tell(error, what) is called with the first error, in the thread that met it. what: the failed work, "" or ending in ": "."""

    def __init__(self, tell: Callable[[BaseException, str], None] = lambda error, what: None):
        self._errors: dict[str, BaseException] = {}  # "first", set by C code: no lock that an interrupt could leave held
        self._tell = tell
        self._monitors: list = []

    @property
    def error(self) -> BaseException | None:
        return self._errors.get("first")

    def wakes(self, monitor) -> None:
        """Notify the monitor's waiting threads of a failure."""
        self._monitors.append(monitor)

    def keep(self, error: BaseException) -> bool:
        """Keep the error and wake waiting threads, unless an earlier error exists. Returns whether this error was kept. From any thread."""
        is_first = self.error is None and self._errors.setdefault("first", error) is error
        for monitor in self._monitors:
            with monitor:
                monitor.notify_all()
        return is_first

    def note(self, error: BaseException, what: str = "") -> None:
        """Keep an error whose work other threads or ranks may wait for, and tell the other ranks."""
        if self.keep(error):
            self._tell(error, what)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.error is not None:
            raise self.error

"""The first failure of an engine: kept, told to the other ranks, and raised wherever somebody would wait or go on.

Knows an error and who waits. Must not know what failed, nor how the other ranks hear of it. An engine's lanes and parts share one.
"""

from __future__ import annotations

from collections.abc import Callable


class FirstFailure:
    """tell(error, what): is given the first error, in the thread that met it, and at what that was: "", or what ends in ": "."""

    def __init__(self, tell: Callable[[BaseException, str], None] = lambda error, what: None):
        self._errors: dict[str, BaseException] = {}  # "first", which C code puts there: no lock that an interrupt could leave held
        self._tell = tell
        self._monitors: list = []

    @property
    def error(self) -> BaseException | None:
        return self._errors.get("first")

    def wakes(self, monitor) -> None:
        """Have who waits on the monitor look for a failure once there is one."""
        self._monitors.append(monitor)

    def keep(self, error: BaseException) -> bool:
        """Have it stand, and wake who waits, unless another one stands already; whether it does. From any thread."""
        is_first = self.error is None and self._errors.setdefault("first", error) is error
        for monitor in self._monitors:
            with monitor:
                monitor.notify_all()
        return is_first

    def note(self, error: BaseException, what: str = "") -> None:
        """Something was lost that others may wait for, here or on other ranks."""
        if self.keep(error):
            self._tell(error, what)

    def check(self) -> None:
        """Raise it, if there is one."""
        if self.error is not None:
            raise self.error

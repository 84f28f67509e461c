"""Who may ask an engine for something now: while it is open, between two steps, in the thread that trains.

Knows threads, and whether the engine has begun, ended or lost its model. Must not know what is asked for.
"""

from __future__ import annotations

import threading
import weakref

from infinity.engine.steps.step_cycle import StepCycle
from infinity.errors import UsageError
from infinity.system import interrupts
from infinity.system.waits import THREADS


class Gate:
    def __init__(self, model: weakref.ref):
        self._model = model
        self._cycle: StepCycle | None = None
        self._trains: int | None = None  # the thread that made the last step
        self.is_closed = self.was_dropped = False
        self._lost = ""  # what ended the start, where values of the model had gone by then

    @property
    def has_started(self) -> bool:
        return self._cycle is not None

    def begin(self, cycle: StepCycle) -> None:
        self._cycle = cycle

    def break_off(self, error: BaseException) -> None:
        """The start has failed, and values of the model are lost with it."""
        self._lost = f"{type(error).__name__}: {error}"

    def end(self, *, was_dropped: bool) -> None:
        self.is_closed, self.was_dropped = True, was_dropped

    def note_step(self) -> None:
        """This thread makes a step."""
        self._trains = threading.get_ident()

    def enter(self, what: str) -> None:
        """Raise UsageError unless this may be asked for here and now.

        Only the thread that trains knows when it is between two steps; others may run the model, but neither read nor change its state.
        """
        self.check_open()
        if self.trains_elsewhere:
            raise UsageError(
                f"{what} from another thread than the one that trains, which may be in the middle of a step: it would see the state of no "
                f"step. Call it in the thread that calls step(), after step(); infinity.save(..., wait=False) writes while that goes on "
                f"training"
            )

    def check_open(self) -> None:
        if self.is_closed:
            dropped = ": it ended with its model, which nobody holds any more; keep the model as long as you use its optimizer or graphs"
            raise UsageError(f"the engine is closed{dropped if self.was_dropped else ''}")
        if self._lost:
            raise UsageError(
                f"the engine could not start, and values of its model are lost with it ({self._lost}). Remove the cause, close() this "
                f"engine, and build model, engine and optimizer anew"
            )
        if self.has_started and self._cycle.calls.thread == threading.get_ident():
            self._cycle.end_interrupted()

    @property
    def trains_elsewhere(self) -> bool:
        """Whether another thread than this one made the last step, or began the first, and may make more."""
        here = threading.current_thread()
        trains = self._trains
        if trains is None and self.has_started and self._cycle.optimizer is not None:
            trains = self._cycle.calls.thread
        if self._model() is None:  # dropped: none can, and who closes it waits for nobody
            return False
        if trains in (None, here.ident) or here.name.startswith((THREADS, interrupts.SHIELD)):
            return False
        return any(thread.ident == trains for thread in threading.enumerate())

"""The lifecycle of an engine: start, failed start and close, the training thread, and checks that a call comes at a legal time.

Knows threads and the weak reference to the model. Must not know the values that a caller asks for.
"""

from __future__ import annotations

import threading
import weakref

from infinity.engine.steps.step_cycle import StepCycle
from infinity.errors import UsageError
from infinity.system import interrupts
from infinity.system.waits import THREADS


class Lifecycle:
    def __init__(self, model: weakref.ref):
        self._model = model
        self._cycle: StepCycle | None = None
        self._training_thread: int | None = None  # the thread that made the last step
        self.is_closed = self.was_dropped = False
        self._start_error = ""  # the error that broke off the start after values of the model were gone

    @property
    def has_started(self) -> bool:
        return self._cycle is not None

    def note_start(self, cycle: StepCycle) -> None:
        self._cycle = cycle

    def note_failed_start(self, error: BaseException) -> None:
        """Note a failed start, after which values of the model are lost."""
        self._start_error = f"{type(error).__name__}: {error}"

    def note_close(self, *, was_dropped: bool) -> None:
        """was_dropped: the program no longer holds the model."""
        self.is_closed, self.was_dropped = True, was_dropped

    def note_step(self) -> None:
        """Note that this thread makes a step."""
        self._training_thread = threading.get_ident()

    def check_access(self, what: str) -> None:
        """Raise UsageError unless the engine is open and this thread may read and change the state.

        In the training thread, no step runs during the call. Other threads may run the model, but neither read nor change the state.
        """
        self.check_open()
        if self.trains_elsewhere:
            raise UsageError(
                f"{what} was called from another thread than the training thread, which may be in the middle of a step. Call it in the thread "
                f"that calls step(), after step(). infinity.save(..., wait=False) writes a checkpoint while that thread goes on training"
            )

    def check_between_steps(self, what: str) -> None:
        """Raise UsageError unless weights may change now: between two steps, outside of the model's modules. The engine has started."""
        self.check_access(what)
        cycle = self._cycle
        cycle.raise_failure()
        cycle.check_gradients()
        cycle.refuse_half_updated(what, change=True)
        if cycle.state.num_backwards or cycle.state.in_backward or cycle.optimizer_calls.wait:
            raise UsageError(f"{what} between backward() and step(): call it after step()")
        cycle.calls.refuse_running(what)

    def check_open(self) -> None:
        """Raise UsageError if the engine is closed or could not start. Ends calls of the model that an interrupt has broken off."""
        if self.is_closed:
            dropped = ": it ended with its model, which the program has dropped. Keep the model as long as you use its optimizer or graphs"
            raise UsageError(f"the engine is closed{dropped if self.was_dropped else ''}")
        if self._start_error:
            raise UsageError(
                f"the engine could not start, and values of its model are lost ({self._start_error}). Remove the cause, close() this engine, "
                f"and build model, engine and optimizer anew"
            )
        if self.has_started and self._cycle.calls.thread == threading.get_ident():
            self._cycle.end_interrupted()

    @property
    def trains_elsewhere(self) -> bool:
        """Whether another thread made the last step, or began the first one, and may make more."""
        here = threading.current_thread()
        trains = self._training_thread
        if trains is None and self.has_started and self._cycle.optimizers:
            trains = self._cycle.calls.thread
        if self._model() is None:  # no thread can train a dropped model, and closing waits for no thread
            return False
        if trains in (None, here.ident) or here.name.startswith((THREADS, interrupts.SHIELD)):
            return False
        return any(thread.ident == trains for thread in threading.enumerate())

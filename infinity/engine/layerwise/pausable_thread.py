"""A function that runs in a thread of its own, pauses, and is resumed by the thread that waits for the result.

Knows threads, torch's state of a thread, and checkpoints that an error leaves open. Must not know models, graphs or engines.
"""

# [Note: who runs]
# Only one of the two threads runs at a time. The caller of `resume` waits until the other thread pauses or ends. So running threads share
# nothing, and a function keeps its stack while others run. The end of a step ends all threads: a paused thread is told to give up,
# and raises at the pause. No thread is left behind.

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from types import GeneratorType

import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils import _python_dispatch as dispatch

from infinity.system.interrupts import uninterrupted
from infinity.system.waits import THREADS


class _GivenUp(BaseException):
    """Ends a thread whose result is no longer wanted."""


class PausableThread:
    """Runs `work()` inside `context()`. The thread starts with the first `resume`."""

    def __init__(self, work: Callable[[], object], context: Callable[[], contextlib.AbstractContextManager], name: str):
        self.is_over = False
        self.result: object = None
        self._work, self._context = work, context
        self._error: BaseException | None = None
        self._gives_up = False
        self._caller_lock, self._work_lock = threading.Lock(), threading.Lock()  # each thread waits at its own lock
        self._paused = True
        variables = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: variables.run(self._run), name=THREADS + name, daemon=True)

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def resume(self) -> None:
        """Run the work until it pauses or ends. Raises the work's error. An error in the caller, such as an interrupt, ends the work."""
        raised = None
        try:
            self._begin()
            self._wait()
        except BaseException as error:
            raised, self._gives_up = error, True
            while not self._paused:
                with contextlib.suppress(BaseException):
                    self._wait()
        if self.is_over:
            self._thread.join()
        if raised is not None or self._error is not None:
            raise raised or self._error

    def take_result(self) -> object:
        """The result of the work at the first call, None afterwards."""
        result, self.result = self.result, None
        return result

    def stop(self) -> None:
        """End the work at any point."""
        self._gives_up = True
        while not self.is_over and self._thread.ident is not None:
            with contextlib.suppress(BaseException):  # the caller has an error of its own to raise
                self.resume()

    def pause(self) -> None:
        """The work calls this: let the caller of `resume` go on, and wait for the next `resume`."""
        self._work_lock = _held_lock()
        self._wake_caller()
        self._work_lock.acquire()
        if self._gives_up:
            raise _GivenUp

    @uninterrupted
    def _begin(self) -> None:
        self._caller_lock, self._paused = _held_lock(), False
        try:
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._work_lock.release()
        except BaseException:  # the system gives no thread
            self._paused = True
            raise

    def _wait(self) -> None:
        while not self._paused:
            self._caller_lock.acquire()

    def _wake_caller(self) -> None:
        lock = self._caller_lock
        self._paused = True
        lock.release()

    def _run(self) -> None:
        try:
            with self._context():
                self.result = self._work()
        except BaseException as error:
            _close_checkpoints(error)
            self._error = error
        self._work, self.is_over = None, True
        self._wake_caller()


def _close_checkpoints(error: BaseException) -> None:
    """Close the checkpoints that the error has left, in this thread. Closing removes hooks that a checkpoint has put into its thread.

    Up to torch 2.12 a checkpoint is closed when the frame is freed, perhaps in another thread. That would remove hooks of the other thread.
    """
    traceback = error.__traceback__
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, GeneratorType) and value.gi_code.co_filename == torch.utils.checkpoint.__file__:
                with contextlib.suppress(RuntimeError):  # the first error is the one to raise
                    value.close()
        traceback = traceback.tb_next


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class TorchThreadState:
    """The creating thread's state of torch, which each thread has separately: grad mode, autocast, function modes, dispatch modes, CUDA
    stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.builds_graphs = torch.is_grad_enabled()
        self.casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}}
        self.modes, self.dispatch_modes = _get_current_function_mode_stack(), dispatch._get_current_dispatch_mode_stack()
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def applied(self):
        """Inside the context, another thread has this state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.builds_graphs))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            torch.set_autocast_cache_enabled(False)  # cached casts of weights would belong to the graphs of other threads
            for kind, (enabled, dtype) in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            for mode in self.modes:  # the creating thread has entered them; in this thread they end with the thread
                _push_mode(mode)
            for mode in self.dispatch_modes:
                dispatch._push_mode(mode)
            yield

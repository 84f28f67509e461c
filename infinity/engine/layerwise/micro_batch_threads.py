"""A forward pass in a thread of its own, which runs until it pauses, and goes on when it is told to.

Knows threads, what torch has of each, checkpoints that break off in one, and generators. Must not know models, graphs or engines.
"""

# [Note: who runs]
# One thread at a time: the one that calls `go_on` waits until the other one pauses, or is over. So nothing is shared between threads that
# run, and what a function has on its stack is kept while others run. Whatever ends the step ends them all: a paused one is told to give
# up, and raises at the place where it waits. No thread is left behind.
#
# [Note: random numbers of a micro-batch]
# Each has a stream of its own, the first the program's, the others seeded from it: what one draws does not depend on when others run, on
# how many there are after it, or on where a model is cut; and a checkpoint that a pause lies in finds the state that it has noted. The
# program's generators go on from the last stream that was drawn from.

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Callable
from types import GeneratorType

import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack, _push_mode

from infinity.system.interrupts import uninterrupted
from infinity.system.waits import THREADS


class _GivenUp(BaseException):
    """Ends a thread whose result nobody wants any more."""


class Turns:
    """Runs `work()` in a thread, in turns. surroundings: a context manager for the thread."""

    def __init__(self, work: Callable[[], object], surroundings: Callable[[], contextlib.AbstractContextManager], name: str):
        self.is_over = False
        self.result: object = None
        self._work, self._surroundings = work, surroundings
        self._error: BaseException | None = None
        self._gives_up = False
        self._here, self._there = threading.Lock(), threading.Lock()  # held by who waits
        self._paused = True
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=THREADS + name, daemon=True)

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def go_on(self) -> None:
        """Let it run until it pauses or is over. Raises what it raised; or what is raised here meanwhile, which tells it to give up."""
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

    def end(self) -> None:
        """Have it end, whatever it is at."""
        self._gives_up = True
        while not self.is_over and self._thread.ident is not None:
            with contextlib.suppress(BaseException):  # what is being raised is the reason
                self.go_on()

    def pause(self) -> None:
        """Called by the work: let the other thread go on, and wait to be told to."""
        self._there = _held()
        self._stop()
        self._there.acquire()
        if self._gives_up:
            raise _GivenUp

    @uninterrupted
    def _begin(self) -> None:
        self._here, self._paused = _held(), False
        try:
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._there.release()
        except BaseException:  # no thread is to be had
            self._paused = True
            raise

    def _wait(self) -> None:
        while not self._paused:
            self._here.acquire()

    def _stop(self) -> None:
        here = self._here
        self._paused = True
        here.release()

    def _run(self) -> None:
        try:
            with self._surroundings():
                self.result = self._work()
        except BaseException as error:
            _close_checkpoints(error)
            self._error = error
        self._work, self.is_over = None, True
        self._stop()


def _close_checkpoints(error: BaseException) -> None:
    """Those that the error has passed are closed in this thread, of which they take away what they have put there. Up to torch 2.12 a
    checkpoint leaves that to the end of its frame, which is another thread's: there it would take away that one's."""
    traceback = error.__traceback__
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, GeneratorType) and value.gi_code.co_filename == torch.utils.checkpoint.__file__:
                with contextlib.suppress(RuntimeError):  # the error that passes is the one to tell
                    value.close()
        traceback = traceback.tb_next


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Surroundings:
    """What torch keeps for each thread, of the one that makes this."""

    def __init__(self, device: torch.device):
        self.device = device
        self.builds_graphs = torch.is_grad_enabled()
        self.casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}}
        self.modes = _get_current_function_mode_stack()
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def again(self):
        """The same inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.builds_graphs))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            torch.set_autocast_cache_enabled(False)  # casts of weights would be parts of other threads' graphs
            for kind, (enabled, dtype) in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            for mode in self.modes:  # they were entered where they come from; here they go with the thread
                _push_mode(mode)
            yield


class Draws:
    """The state of a stream of random numbers, on the CPU and on the device."""

    def __init__(self, states: list[torch.Tensor]):
        self.states = states

    @classmethod
    def now(cls, device: torch.device) -> Draws:
        return cls([torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])])

    def another(self, number: int, device: torch.device) -> Draws:
        """The beginning of another stream, of so many."""
        devices = ["cpu", *([device] if device.type == "cuda" else [])]
        return Draws([torch.Generator(where).manual_seed(_seed(state, number)).get_state() for where, state in zip(devices, self.states)])

    def resume(self, device: torch.device) -> None:
        torch.set_rng_state(self.states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.states[1], device)

    def __eq__(self, other: object) -> bool:
        return all(map(torch.equal, self.states, other.states))


def streams(number: int, device: torch.device) -> list[Draws]:
    """Of so many micro-batches."""
    first = Draws.now(device)
    return [first, *(first.another(index, device) for index in range(1, number))]


def _seed(state: torch.Tensor, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes() + number.to_bytes(4, "little"), digest_size=7).digest(), "little")

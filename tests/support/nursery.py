"""Processes that a test kills, and a log of the calls that change files."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from multiprocessing import reduction

import pytest
import torch

from infinity.checkpoints.writer import Writer

SECONDS = 30  # a process that is silent for so long is taken to hang


class Child:
    """A process of the nursery."""

    def __init__(self, nursery, pid, pipe):
        self.nursery, self.pid, self.pipe = nursery, pid, pipe
        self.said = []

    def hear(self):
        """The next message of the process; None after its end."""
        if not self.pipe.poll(SECONDS):
            self.kill()
            pytest.fail(f"the process was silent for {SECONDS} s; it said {self.said}")
        try:
            self.said.append(self.pipe.recv())
        except EOFError:
            return None
        return self.said[-1]

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)  # the pid is valid until `end` reaps the process

    def end(self):
        """Waits for the end. Returns (all messages, whether the process was killed)."""
        while self.hear() is not None:
            pass
        self.nursery.pipe.send(("wait", self.pid))
        status = self.nursery.pipe.recv()
        assert status in (0, signal.SIGKILL), f"the process ended with status {status} and said {self.said}"
        errors = [entry[1] for entry in self.said if entry[0] == "error"]
        assert not errors, errors[0]
        return self.said, status == signal.SIGKILL


class Nursery:
    """Forks processes that run a function of a module: function(say, *arguments)."""

    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "infinity"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_nurse, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function, *arguments):
        ours, theirs = multiprocessing.Pipe()
        self.pipe.send((function, arguments))
        reduction.send_handle(self.pipe, theirs.fileno(), self.process.pid)
        theirs.close()
        return Child(self, self.pipe.recv(), ours)

    def close(self):
        self.pipe.close()
        self.process.join(5)
        self.process.kill()


def _nurse(pipe):
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        if function == "wait":
            pipe.send(os.waitpid(arguments, 0)[1])
            continue
        fd = reduction.recv_handle(pipe)
        pid = os.fork()
        if pid:
            os.close(fd)
            pipe.send(pid)
            continue
        pipe.close()
        torch.set_num_threads(1)  # makes the thread pool anew after the fork; otherwise autograd's threads would, all at once
        say = multiprocessing.connection.Connection(fd).send
        try:
            function(say, *arguments)
        except BaseException as error:
            say(("error", "".join(traceback.format_exception(error))))
        os._exit(0)


CALLS = ["fsync", "rename", "link", "mkdir", "unlink", "rmdir", "posix_fallocate", "open", "replace", "ftruncate", "truncate"]


class Calls:
    """Logs the calls of this process that change files. A test may replace some of these calls."""

    def __init__(self, meet):
        """meet(number, name, call) makes the call or replaces it."""
        self.meet, self.names, self._lock = meet, [], threading.RLock()

    def __enter__(self):
        self._before = {name: getattr(os, name) for name in CALLS}
        for name, call in self._before.items():
            if name != "open":
                setattr(os, name, self._met(name, call))
        os.open = self._open
        self._write = Writer.write
        Writer.write = self._met("write", Writer.write)
        return self

    def __exit__(self, *exception):
        for name, call in self._before.items():
            setattr(os, name, call)
        Writer.write = self._write

    def _met(self, name, call):
        def met(*arguments, **options):
            with self._lock:
                number = len(self.names)
                self.names.append(name)
            return self.meet(number, name, functools.partial(call, *arguments, **options))

        return met

    def _open(self, path, flags, *arguments, **options):
        call = self._before["open"]
        return (self._met("open", call) if flags & os.O_CREAT else call)(path, flags, *arguments, **options)


def killed_at(position):
    """Kills this process before (position even) or after (odd) the call number position // 2."""

    def meet(number, name, call):
        if position == 2 * number:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call()
        finally:
            if position == 2 * number + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return meet

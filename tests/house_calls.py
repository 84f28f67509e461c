"""How calls run through the house during one step of a six-layer GPT with all on NVMe: `python tests/house_calls.py`.

Prints the calls that go up, from a package to one that stands above it (FLOORS in test_house.py), by package and then by function, and the
deepest fetch. The caller is the nearest frame but for those of contextlib, functools and `uninterrupted`, which pass calls on; where that is
none of ours, as where torch calls a hook, the call goes nowhere. Those of `system` and `plan` are told apart: a lane runs what it was
given, and a policy of plan asks what it was given. The deepest call is the longest run of our own frames, each called by the one before,
during the forward pass in the training thread. The deepest fetch is the longest such run that ends where a read is given to a queue of
aio_ext; frames of `uninterrupted`, which pass the call on, do not count there.
"""

import contextlib
import functools
import sys
import tempfile
import threading
from collections import Counter

import torch
from test_house import FLOOR, PACKAGE, room

import aio_ext
import infinity
from infinity.model.gpt import GPT

PASSED_THROUGH = {contextlib.__file__, functools.__file__}
OURS = str(PACKAGE) + "/"
GIVEN = {"system", "plan"}  # packages that call functions which they were given
WRAPPER = "system.interrupts.uninterrupted.<locals>.whole"


class Watch:
    """Counts calls while it is on, in this thread and in all that begin inside the block."""

    def __init__(self):
        self.up = Counter()  # by (caller, callee), each "module.function"
        self.deepest = []  # functions, the outermost first
        self.deepest_fetch = []  # the same, up to the function that submits a read
        self.is_on = False
        self.thread = None  # whose stack is looked at, if any

    def __enter__(self):
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    def see(self, frame, event, argument):
        if not self.is_on or (callee := name_of(frame)) is None:
            return
        if event == "c_call" and self.thread == threading.get_ident() and is_read(argument):
            self.deepest_fetch = max(self.deepest_fetch, [name for name in stack_of(frame) if name != WRAPPER], key=len)
        if event != "call":
            return
        caller = frame.f_back
        while caller is not None and (caller.f_code.co_filename in PASSED_THROUGH or name_of(caller) == WRAPPER):
            caller = caller.f_back
        if caller is not None and (name := name_of(caller)) is not None and FLOOR[room(name)] < FLOOR[room(callee)]:
            self.up[name, callee] += 1
        if self.thread == threading.get_ident():
            self.deepest = max(self.deepest, stack_of(frame), key=len)


def is_read(function):
    """Whether a function of C hands a read to a queue."""
    return getattr(function, "__name__", "") == "read" and isinstance(getattr(function, "__self__", None), aio_ext.Queue)


def stack_of(frame):
    """Names of our own frames from the innermost run on, the outermost first."""
    stack = []
    while frame is not None and (name := name_of(frame)) is not None:
        stack.append(name)
        frame = frame.f_back
    return stack[::-1]


def name_of(frame):
    """Of a frame of the package, below `infinity`."""
    path = frame.f_code.co_filename
    if not path.startswith(OURS):
        return None
    return f"{path.removeprefix(OURS).removesuffix('.py').replace('/', '.')}.{frame.f_code.co_qualname}"


def watched_step():
    """The third step of the GPT, whose plan is known: what was seen of it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=".") as path, Watch() as watch:
        placed = {"nvme": path, "weights": "nvme", "states": "nvme", "residency": "none"}
        sizes = {"host_memory": "64MiB", "device_memory": "8MiB", "chunk_mib": 0.25}
        with infinity.init(infinity.Config(dtype="fp32", device="cpu", **placed, **sizes)):
            model = GPT(hidden=128, layers=6, heads=4, vocab=256, seq=32)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(256, (2, 33))
        with infinity.engine_of(model):
            for step in range(3):
                watch.is_on = step == 2
                watch.thread = threading.get_ident() if watch.is_on else None
                loss = model(tokens[:, :-1], tokens[:, 1:])
                watch.thread = None
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            watch.is_on = False
    return watch


def main():
    torch.set_num_threads(1)
    watch = watched_step()
    by_package = Counter()
    for (caller, callee), count in watch.up.items():
        by_package[room(caller), room(callee)] += count
    given = sum(count for (caller, _), count in by_package.items() if caller in GIVEN)
    print(f"{sum(by_package.values())} calls go up, {given} of them what lanes and policies were given")
    for (caller, callee), count in by_package.most_common():
        print(f"{count:8}  {caller} -> {callee}")
    print("without those of system and plan:")
    for (caller, callee), count in watch.up.most_common():
        if room(caller) not in GIVEN:
            print(f"{count:8}  {caller} -> {callee}")
    for title, stack in (("call", watch.deepest), ("fetch", watch.deepest_fetch)):
        print(f"deepest {title}: {len(stack)} frames in {len({name.rsplit('.', 2)[0] for name in stack})} modules")
        for name in stack:
            print(f"          {name}")


if __name__ == "__main__":
    main()

"""Counts calls between packages while a six-layer GPT with all state on NVMe runs one scene.

`PYTHONPATH=tests python -m support.house_calls` prints, for each scene, the kinds of calls that go up: from a package to a higher one
(FLOORS in house.py). Prints the functions of calls that no kind covers, the deepest call and the deepest fetch.

The caller is the nearest frame, without frames of contextlib, functools and `uninterrupted`, which pass calls on. Calls from outside of the
package do not count, such as torch's calls of hooks or of `__torch_function__`. The deepest call is the longest run of frames of the
package, each called by the one before, during the forward pass in the training thread. The deepest fetch is the longest such run that ends
where a queue of aio_ext takes a read; frames of `uninterrupted` do not count there.
"""

import contextlib
import functools
import sys
import tempfile
import threading
from collections import Counter

import torch
from support.house import EXCEPTIONS, FLOOR, PACKAGE, room

import aio_ext
import infinity
from infinity.model.gpt import GPT

PASSED_THROUGH = {contextlib.__file__, functools.__file__}
OURS = str(PACKAGE) + "/"
WRAPPER = "system.interrupts.uninterrupted.<locals>.whole"

# The kinds of calls that go up. A package is named with the packages that it calls; "*" is any package.
KINDS = {
    "the system runs work, or asks an object, that it was given": {("system", "*")},
    "a policy of plan asks functions that it was given": {("plan", "*")},
    "an optimizer, a parameter or a state_dict of the model calls its engine": {("optim", "engine"), ("model", "engine")},
    "an optimizer's load_state_dict loads the checkpoint that the dict refers to": {("optim", "checkpoints")},
}


class Watch:
    """Counts calls while `is_on` is true, in this thread and in threads that begin inside the block."""

    def __init__(self):
        self.up = Counter()  # by (caller, callee), each "module.function"
        self.deepest = []  # functions, the outermost first
        self.deepest_fetch = []  # the same, up to the function that submits a read
        self.is_on = False
        self.thread = None  # the thread whose stack is examined, or None

    def __enter__(self):
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    @contextlib.contextmanager
    def on(self):
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def see(self, frame, event, argument):
        if not self.is_on or (callee := name_of(frame)) is None:
            return
        if event == "c_call" and self.thread == threading.get_ident() and is_read(argument):
            self.deepest_fetch = max(self.deepest_fetch, [name for name in stack_of(frame) if name != WRAPPER], key=len)
        if event != "call" or callee.endswith(".__torch_function__"):
            return
        caller = frame.f_back
        while caller is not None and (caller.f_code.co_filename in PASSED_THROUGH or name_of(caller) == WRAPPER):
            caller = caller.f_back
        if caller is not None and (name := name_of(caller)) is not None and goes_up(name, callee):
            self.up[name, callee] += 1
        if self.thread == threading.get_ident():
            self.deepest = max(self.deepest, stack_of(frame), key=len)

    def kinds(self):
        """The number of calls by kind, or by (caller, callee) if no kind covers the call."""
        found = Counter()
        for (caller, callee), count in self.up.items():
            rooms = {(room(caller), room(callee)), (room(caller), "*")}
            found[next((kind for kind, pairs in KINDS.items() if pairs & rooms), (caller, callee))] += count
        return found


def is_read(function):
    """Whether a function of C hands a read to a queue."""
    return getattr(function, "__name__", "") == "read" and isinstance(getattr(function, "__self__", None), aio_ext.Queue)


def stack_of(frame):
    """Names of the package's frames that call each other without a gap up to `frame`, the outermost first."""
    stack = []
    while frame is not None and (name := name_of(frame)) is not None:
        stack.append(name)
        frame = frame.f_back
    return stack[::-1]


def goes_up(caller, callee):
    if FLOOR[room(caller)] >= FLOOR[room(callee)]:
        return False
    return not any(caller.startswith(f"{one}.") and callee.startswith(f"{other}.") for one, other in EXCEPTIONS)


def name_of(frame):
    """The name "module.function" below `infinity` of a frame of the package. None for other frames."""
    path = frame.f_code.co_filename
    if not path.startswith(OURS):
        return None
    return f"{path.removeprefix(OURS).removesuffix('.py').replace('/', '.')}.{frame.f_code.co_qualname}"


class Run:
    """The GPT, the optimizer and a folder, in which SCENES run."""

    def __init__(self, watch, folder, *, micro_batches=1):
        torch.manual_seed(0)
        self.watch, self.folder, self.micro_batches = watch, folder, micro_batches
        placed = {"swap_dirs": folder, "param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"}
        sizes = {"host_memory": "64MiB", "device_memory": "8MiB", "chunk_mib": 0.25}
        with infinity.init(infinity.Config(dtype="fp32", device="cpu", **placed, **sizes)):
            self.model = GPT(hidden=128, layers=6, heads=4, vocab=256, seq=32)
        self.tokens = torch.randint(256, (2, 33))

    def start(self):
        self.optimizer = infinity.AdamW(self.model.parameters(), lr=1e-3, accumulation_steps=self.micro_batches)

    def step(self):
        self.watch.thread = threading.get_ident() if self.watch.is_on else None
        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        self.watch.thread = None
        loss.backward()
        self.end_step()

    def end_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self):
        batches = [(self.tokens[:, :-1], self.tokens[:, 1:])] * self.micro_batches
        infinity.accumulate(self.model, batches, lambda model, batch: model(*batch))
        self.end_step()

    def save(self):
        """Saves during a training step."""
        saving = infinity.save(f"{self.folder}/saved", self.model, self.optimizer, wait=False)
        self.step()
        saving.wait()
        infinity.save_dcp(f"{self.folder}/dcp", self.model, self.optimizer)

    def load(self):
        infinity.load(f"{self.folder}/saved", self.model, self.optimizer)
        self.step()
        infinity.load_dcp(f"{self.folder}/dcp", self.model, self.optimizer, trust_pickle=True)
        self.model.load_state_dict(self.model.state_dict())


def start(run):
    with run.watch.on():
        run.start()


def step(run):
    run.start()
    run.step()
    run.step()
    with run.watch.on():
        run.step()


def save(run):
    run.start()
    run.step()
    with run.watch.on():
        run.save()


def load(run):
    run.start()
    run.step()
    run.save()
    with run.watch.on():
        run.load()


def load_state_dict(run):
    run.start()
    run.step()
    infinity.save(f"{run.folder}/saved", run.model, run.optimizer)
    found = run.optimizer.state_dict()
    run.step()
    with run.watch.on():
        run.optimizer.load_state_dict(found)


def accumulate(run):
    run.start()
    run.accumulate()
    with run.watch.on():
        run.accumulate()


def close(run):
    run.start()
    run.step()
    with run.watch.on():
        infinity.engine_of(run.model).close()


SCENES = {scene.__name__: scene for scene in (start, step, save, load, load_state_dict, accumulate, close)}


def watched(name):
    """Runs a scene and returns the Watch."""
    with tempfile.TemporaryDirectory(dir=".") as folder, Watch() as watch:
        run = Run(watch, folder, micro_batches=3 if name == "accumulate" else 1)
        with infinity.engine_of(run.model):
            SCENES[name](run)
    return watch


def main():
    torch.set_num_threads(1)
    for name in SCENES:
        watch = watched(name)
        print(f"{name}: {sum(watch.up.values())} calls go up")
        for kind, count in watch.kinds().most_common():
            print(f"{count:8}  {kind if isinstance(kind, str) else ' -> '.join(kind)}")
        for title, stack in (("call", watch.deepest), ("fetch", watch.deepest_fetch)) if name == "step" else ():
            print(f"deepest {title}: {len(stack)} frames in {len({name.rsplit('.', 2)[0] for name in stack})} modules")
            for function in stack:
                print(f"          {function}")


if __name__ == "__main__":
    main()

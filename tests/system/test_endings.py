"""Ends of programs on several ranks: success, an error on one rank or on all, unequal numbers of batches, a killed rank.

Each rank is a process that ends with its script, like a user's program. Ranks are forked from a process that has done all imports.
"""

import atexit
import contextlib
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.helpers import without_gloo

from infinity.output import say_if_possible
from infinity.system import failure_watch as watch

SECONDS = 30  # limit for the end of every program

NURSERY = """
import json, os, sys
import torch, torch.distributed as dist
import infinity, test_endings

def wait_for_a_rank():
    for line in sys.stdin:
        ranks, children = json.loads(line), {}
        for rank in ranks:
            if not (pid := os.fork()):
                os.environ.update(rank["environment"])
                os.dup2(os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
                os.dup2(1, 2)
                torch.set_num_threads(1)
                return rank["arguments"]
            children[pid] = rank["environment"]["RANK"]
        print(json.dumps(list(children)), flush=True)
        statuses = {}
        while children:
            pid, status = os.wait()
            statuses[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        print(json.dumps(statuses), flush=True)
    os._exit(0)

test_endings.program(**wait_for_a_rank())
"""


def is_free(port):
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


class Nursery:
    """A process with all imports of a rank. Ranks are forked from this process."""

    def __init__(self):
        worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0")))
        self.ports = itertools.cycle(range(12000 + 200 * worker, 12200 + 200 * worker))  # the kernel gives these ports to no process
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", NURSERY], env=environment, **pipes)

    def run(self, size, folder, environment=None, **arguments):
        """Run `program` on all ranks, at most SECONDS. Return (status, output) of each rank."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(filter(is_free, self.ports))), "WORLD_SIZE": str(size)}
        shared |= {"LOCAL_WORLD_SIZE": str(size), **(environment or {})}
        outputs = [folder / f"output{rank}" for rank in range(size)]
        ranks = [
            {
                "environment": {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                "output": str(output),
                "arguments": {"folder": str(folder), **arguments},
            }
            for rank, output in enumerate(outputs)
        ]
        print(json.dumps(ranks), file=self.process.stdin, flush=True)
        pids = json.loads(self.process.stdout.readline())
        start = time.monotonic()
        timer = subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -9 {' '.join(map(str, pids))}"], stderr=subprocess.DEVNULL)
        statuses = json.loads(self.process.stdout.readline())
        timer.kill()
        timer.wait()
        seconds = time.monotonic() - start
        texts = [without_gloo(output.read_text()) for output in outputs]
        assert seconds < SECONDS, f"after {seconds:.0f} s: {statuses} {texts}"
        return [(statuses[str(rank)], text) for rank, text in enumerate(texts)]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


def program(
    folder,
    stage="none",
    who="one",
    closes=False,
    kills=False,
    batches=5,
    fewer=0,
    barrier=False,
    destroys=False,
    groups=True,
    lingers=False,
    slow=False,
):
    """A user's program. At `stage` the last, the first or each rank raises or is killed. That rank has `fewer` batches than the others."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import infinity

    if groups:
        dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = who == "all" or rank == (0 if who == "first" else world - 1)
    step = 0

    def come_to(here):
        if here == stage and mine:
            if kills:
                time.sleep(0.7)  # time for this rank to report its place, and for others to wait for this rank
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"bad luck: {stage}")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            come_to("construction")

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if (number, step) == (1, 2):
                    come_to("forward")
            if step == 2 and stage == "backward" and mine:
                x.register_hook(lambda grad: come_to("backward"))
            return x

    class Scheduler:
        def state_dict(self):
            come_to("save")
            return {}

        def load_state_dict(self, state):
            come_to("load")

    def train():
        nonlocal step
        for step in range(batches - (fewer if mine else 0)):
            model(torch.randn(4, 32)).square().mean().backward()
            if step == 2:
                come_to("step")
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and stage == "idle":
                come_to("idle")
                time.sleep(2)  # other ranks begin their next batch
            if step == 3:
                infinity.save(Path(folder, "saved"), model, optimizer, scheduler=Scheduler())
                infinity.load(Path(folder, "saved"), model, optimizer, scheduler=Scheduler())
        come_to("after the loop")

    if lingers and not rank:
        atexit.register(time.sleep, 2)  # runs before the engine's handler, so that the watch receives errors of other ranks
    come_to("before")
    places = {"swap_dirs": folder, "param_tier": "nvme", "optimizer_state_tier": "nvme", "host_memory": "8MiB"}
    config = infinity.Config(device="cpu", dtype="fp32", chunk_mib=1 / 64, verbose=False, **places)
    torch.manual_seed(0)
    with infinity.init(config):
        model = Net()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    if slow:
        infinity.engine_of(model).updater.lane.on_job = lambda: time.sleep(0.1)  # updates still run when the script ends
    if closes:
        with infinity.engine_of(model):
            train()
    else:
        train()
    if barrier:
        dist.barrier()
    if destroys:
        dist.destroy_process_group()
    print("the end")


STAGES = ["before", "construction", "forward", "backward", "step", "save", "load", "after the loop"]


def assert_ended_well(answers):
    for status, output in answers:
        assert (status, output) == (0, "the end\n")


def assert_ended_with_errors(answers, stage, who):
    """The failed rank prints its error once. Each other rank prints one error that names the failed rank and repeats that error."""
    culprits = range(len(answers)) if who == "all" else [len(answers) - 1]
    for rank, (status, output) in enumerate(answers):
        assert status == 1, output
        shown = output.rpartition("direct cause")[2]  # the last error of a chain
        errors = re.findall(r"^(?:\[rank\d\]: |infinity: )?([\w.]*Error: .*)$", shown, re.M)
        assert len(errors) == 1 and f"bad luck: {stage}" in errors[0], output
        if rank not in culprits:
            assert f"rank {culprits[0]}" in errors[0], output
            assert errors[0].startswith(("infinity.errors.PeerError", "PeerError", "infinity.errors.CheckpointError")), output
        assert "terminate called" not in output and "gloo" not in output, output


@pytest.mark.long
@pytest.mark.parametrize("size, options", [(2, {}), (2, {"slow": True}), (3, {"destroys": True})], ids=str)
def test_a_successful_program_ends_with_status_0_without_close(nursery, tmp_path, size, options):
    assert_ended_well(nursery.run(size, tmp_path, **options))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "stage, who, closes",
    [("before", "one", False), ("construction", "one", False), ("backward", "one", True), ("save", "one", False), ("load", "all", False)]
    + [("after the loop", "one", False)],
)
def test_an_error_is_printed_once_on_each_rank(nursery, tmp_path, stage, who, closes):
    assert_ended_with_errors(nursery.run(2, tmp_path, stage=stage, who=who, closes=closes), stage, who)


@pytest.mark.long
def test_a_rank_with_its_own_error_prints_no_error_of_another_rank(nursery, tmp_path):
    assert_ended_with_errors(nursery.run(2, tmp_path, stage="backward", who="all", lingers=True), "backward", "all")


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage, who", [("none", "one"), *((stage, who) for stage in STAGES for who in ("one", "all"))])
def test_programs_end_fifty_times_as_they_should(nursery, tmp_path, stage, who, size, closes):
    for number in range(int(os.environ.get("REPEATS", 50))):
        folder = tmp_path / str(number)
        folder.mkdir()
        answers = nursery.run(size, folder, stage=stage, who=who, closes=closes)
        if stage == "none":
            assert_ended_well(answers)
        else:
            assert_ended_with_errors(answers, stage, who)


# ---- ranks that leave ----


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size, options", [(2, {"closes": True}), (2, {"barrier": True}), (3, {"fewer": 2})], ids=str)
def test_unequal_numbers_of_batches_are_an_error_on_every_rank(nursery, tmp_path, size, options):
    options = {"fewer": 1, **options}
    start = time.monotonic()
    answers = nursery.run(size, tmp_path, batches=3, **options)
    print(f"{time.monotonic() - start:.1f} s")
    for status, output in answers:
        assert status == 1, output
        error = re.search(r"(?:PeerError|UsageError): .*", output)[0]
        assert f"rank {size - 1}" in error and "the same number of batches" in error, output
        assert f"after step {3 - options['fewer']}" in error and f"in step {4 - options['fewer']}" in error, output


@pytest.mark.slow
def test_equal_numbers_of_batches_are_no_error(nursery, tmp_path):
    assert_ended_well(nursery.run(2, tmp_path, batches=3, barrier=True))


KILLED = {
    "before": "keeps the launcher's store",
    "construction": "infinity.init|the making",
    "forward": "in step [123]|the start of the engine",
    "backward": "in step [123]|the start of the engine",
    "step": "in step [123]|the start of the engine",
    "idle": "in step [234]",
    "save": "in infinity.save",
    "load": "in infinity.load",
}


def assert_killed_is_named(answers, stage, killed, how):
    """Each other rank ends with one PeerError, which names the killed rank and its last place."""
    size = len(answers)
    for rank, (status, output) in enumerate(answers):
        if rank == killed:
            assert status == -signal.SIGKILL, output
            continue
        (error,) = re.findall(r"^\[rank\d\]: infinity.errors.PeerError: (.*)$", output, re.M)
        assert status == 1 and error.startswith(f"rank {rank} of {size} ends because rank {killed} of {size} {how}"), output
        assert re.search(KILLED[stage], error) and "memory" in error, output


@pytest.mark.few(1)
@pytest.mark.parametrize("size, stage", [(2, "construction"), (3, "backward"), (2, "save"), (3, "load")])
def test_a_killed_rank_is_named_on_all_other_ranks(nursery, tmp_path, size, stage):
    answers = nursery.run(size, tmp_path, stage=stage, kills=True)
    assert_killed_is_named(answers, stage, size - 1, "ended without a word, last ")
    assert all("gloo" not in output for _, output in answers)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size, stage", [(3, "forward"), (2, "construction"), (2, "backward"), (3, "step"), (2, "idle"), (3, "save"), (2, "load")])
def test_a_killed_rank_0_that_kept_the_store_is_named(nursery, tmp_path, size, stage):
    answers = nursery.run(size, tmp_path, stage=stage, kills=True, who="first")
    assert_killed_is_named(answers, stage, 0, "ended without a word, last ")


class Listener:
    def __init__(self):
        self.error, self._heard = None, threading.Event()

    def hear(self, error):
        self.error = error
        self._heard.set()

    def wait(self):
        assert self._heard.wait(SECONDS)
        return str(self.error)


class LostStore:
    """A store whose process ends once a rank watches the others."""

    def __init__(self):
        self.store, self.is_lost = dist.HashStore(), False

    def __getattr__(self, name):
        if self.is_lost:
            raise dist.DistNetworkError("connection reset by peer")
        return getattr(self.store, name)


@pytest.mark.parametrize(
    "keeper, left, expected",
    [
        (0, "", "rank 0 of 2 keeps the launcher's store and does not answer, last in step 4: was it killed"),
        (0, "left", "rank 0 of 2, which keeps the launcher's store, has left in step 4"),
        (None, "", "the launcher's store does not answer: has torchrun ended"),
    ],
)
def test_a_lost_store_names_the_remote_rank_that_kept_it(keeper, left, expected, monkeypatch):
    monkeypatch.setattr(watch, "WATCH_S", 0.01)
    monkeypatch.setattr(watch, "BROKEN_S", 0.05)
    store, listener = LostStore(), Listener()
    store.set("here0", f"another-boot pid:[1] 7 7\n1\n{left}\nin step 4")
    one = watch.Watch(store, keeper, 1, 2, "rank 1 of 2", watch.Place(lambda thread: ""), lambda: None)
    one.listen(listener.hear)
    one.say()
    one.meet(store, 1)
    store.is_lost = True
    one.start()
    assert listener.wait().startswith(f"rank 1 of 2 ends because {expected}")
    one.close()


class LongWait:
    """The reports of a rank that waits in a collective."""

    def __init__(self, *arguments):
        self.waits_long = "the all-gather of chunk 3"

    def look(self):
        return None


def test_a_silent_rank_is_named_once_by_one_rank(monkeypatch, capfd):
    said = ""

    def wait_for(text):
        nonlocal said
        end = time.monotonic() + SECONDS
        while text not in said:
            assert time.monotonic() < end, said
            said += capfd.readouterr().err
            time.sleep(0.01)

    monkeypatch.setattr(watch, "WATCH_S", 0.01)
    monkeypatch.setattr(watch, "REPORT_SILENCE_S", 0.3)
    monkeypatch.setattr(watch, "Board", LongWait)
    store, listener = dist.HashStore(), Listener()
    store.set("here0", "another-boot pid:[1] 7 7\n1\n\nin step 4")
    others = [watch.Watch(store, 0, rank, 3, f"rank {rank} of 3", watch.Place(lambda thread: ""), lambda: None) for rank in (1, 2)]
    for other in others:
        other.listen(listener.hear)
        other.say()
    for other in others:
        other.meet(store, 1)
        other.start()
    wait_for("in step 4")
    store.set("here0", "another-boot pid:[1] 7 7\n2\n\nin step 5")  # the rank goes on, and then is silent again
    wait_for("in step 5")
    for other in others:
        other.close()
    lines = (said + capfd.readouterr().err).splitlines()
    expected = r"infinity: rank [12] of 3 waits for rank 0 of 3, which has not been heard of for \d+ s, last in step [45]"
    assert len(lines) == 2 and all(re.fullmatch(expected, line) for line in lines), lines
    assert listener.error is None


@pytest.mark.parametrize("kind", ["none", "closed", "full", "without a reader", "no file", "usual"])
def test_a_line_of_the_watch_never_waits_and_never_fails(kind, monkeypatch):
    """Standard error may be a pipe that is full, because nobody reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while kind == "full":
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    if kind == "without a reader":
        os.close(reader)
    stream = {"none": None, "no file": io.StringIO()}.get(kind) if kind in ("none", "no file") else os.fdopen(writer, "w")
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    thread = threading.Thread(target=say_if_possible, args=("rank 3 is silent",), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    if kind == "no file":
        assert stream.getvalue() == "infinity: rank 3 is silent\n"
    if kind == "usual":
        assert os.read(reader, 100) == b"infinity: rank 3 is silent\n"


@pytest.mark.long
def test_a_rank_0_killed_before_its_engine_exists_is_named(nursery, tmp_path):
    answers = nursery.run(2, tmp_path, stage="before", kills=True, who="first")
    assert_killed_is_named(answers, "before", 0, "keeps the launcher's store and does not answer")


@pytest.mark.long
@pytest.mark.parametrize("size, stage", [(3, "forward"), (2, "backward"), (3, "step"), (2, "idle")])
def test_a_killed_rank_0_is_named_if_torchrun_keeps_the_store(nursery, tmp_path, size, stage):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    answers = nursery.run(size, tmp_path, environment, stage=stage, kills=True, who="first")
    assert_killed_is_named(answers, stage, 0, "ended without a word, last ")


# ---- torchrun without a group ----


@pytest.mark.long
def test_ranks_without_a_process_group_are_refused_with_the_line_to_add(nursery, tmp_path):
    for status, output in nursery.run(2, tmp_path, groups=False):
        assert status == 1
        line = re.search(r"UsageError: .* Add the line (torch\.distributed\.init_process_group\(.*?\)) before", output)[1]
        assert line == 'torch.distributed.init_process_group("gloo")', output  # the same line as in `program` with groups=True
    assert_ended_well(nursery.run(2, tmp_path, groups=True))
    assert_ended_well(nursery.run(1, tmp_path, groups=False))

"""Files of a checkpoint. After a kill or a disk error the directory has the old or the new checkpoint, whole. Verification locates damage.
No hostile file runs code, hangs the reader or takes much memory.

A nursery forks the processes that a test kills. The nursery has imported their modules and starts no thread.
Longer than other test files, because these tests share their checkpoints and their processes.
"""

import ast
import copy
import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import traceback
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import ON_HOST, Run, on_disk, write_checkpoint
from support.helpers import everything_in
from support.manifests import mutated, signed, unsigned
from support.nursery import SECONDS, Calls, killed_at

import infinity
from aio_ext import _aio
from infinity.checkpoints import encoding, files, linked
from infinity.checkpoints.convert import export, reshard
from infinity.checkpoints.files import Directory
from infinity.checkpoints.reader import Checkpoint
from infinity.errors import CheckpointError, SwapError, UsageError
from infinity.system import failure_watch as watch
from infinity.system import ranks

ROOT = Path(__file__).parents[2]
FOLDER = re.compile(r"data-[0-9a-f]{12}")
ON_NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"}


# ---- engines ----


def only_the_checkpoint(path):
    """Asserts that the directory has all files of a checkpoint and no others."""
    found = json.loads((path / "manifest.json").read_bytes())
    names = [name for name, _ in found["files"]] + (["tensors"] if found["tensors"] else [])
    assert everything_in(path) == sorted(["manifest.json", found["folder"], *(f"{found['folder']}/{name}" for name in names)])


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Digests of the states after 0 to 12 steps of an uninterrupted run."""
    with Run(tmp_path_factory.mktemp("reference") / "swap") as run:
        found = [run.digest()]
        for _ in range(12):
            found.append(run.train().digest())
    return found


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path / "swap") as run:
        yield run


# ---- kill -9 at any moment ----


def saves_until_killed(say, folder, targets, wait, config):
    """Continues from the newest checkpoint, and saves each step into the targets in turn."""
    with Run(folder / "swap", **config) as run:
        whole = [target for target in targets if (target / "manifest.json").exists()]
        if whole:
            newest = max(whole, key=lambda target: files.read_manifest(target).step)
            run.load(newest)
            say(("loaded", run.step, run.digest()))
        while True:
            run.train()
            target = run.step % len(targets)
            if not wait:  # the previous save ends before the next one begins
                if run.engine.saving is not None:
                    run.engine.saving.wait()
                    say(("finished", run.step - 1, None))
            say(("begun", run.step, run.digest()))
            run.save(targets[target], wait=wait)
            if wait:
                say(("finished", run.step, None))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("num_targets, wait", [(1, True), (2, False)], ids=["into one", "into two by turns, while training goes on"])
@pytest.mark.parametrize("moments", [3, pytest.param(25, marks=pytest.mark.long), pytest.param(500, marks=pytest.mark.long)])
def test_a_checkpoint_is_old_or_new_after_a_kill_at_any_moment(tmp_path, nursery, moments, num_targets, wait):
    chance = random.Random(moments * 2 + num_targets)
    targets = [tmp_path / f"target{index}" for index in range(num_targets)]
    states, steps = {}, []
    finished = begun = 0
    on_disk_before = (0, None)
    for moment in range(moments):
        config = ON_NVME if moment % 5 == 4 else ON_HOST
        child = nursery.start(saves_until_killed, tmp_path, targets, wait, config)
        for _ in range(chance.randrange(1, 4)):
            while child.hear()[0] != "begun":
                pass
        time.sleep(chance.uniform(0, 0.05))  # a random moment for the kill, no synchronisation
        child.kill()
        said, killed = child.end()
        assert killed
        for what, step, digest in said:
            if what == "loaded":
                assert step == on_disk_before[0], f"resumed from step {step}"
            if what == "finished":
                finished = step
            elif what == "begun":
                begun = step
            if digest is not None:
                assert states.setdefault(step, digest) == digest, f"step {step} has other bytes after {what}"
        there = [on_disk(target) for target in targets if (target / "manifest.json").exists()]
        assert there or not finished
        for step, digest in there:
            assert states[step] == digest
        newest = max(there, default=(0, None))
        assert finished <= newest[0] <= begun, (finished, newest[0], begun)
        if num_targets == 2 and finished > 1:
            assert {step for step, _ in there} >= {finished - 1} or newest[0] > finished
        steps.append(newest[0])
        on_disk_before = newest
        finished = begun = newest[0]
    print(f"{moments} kills, 0 lost, up to step {steps[-1]}")
    with Run(tmp_path / "swap", **ON_HOST) as run:
        run.load(max((target for target in targets if (target / "manifest.json").exists()), key=lambda t: files.read_manifest(t).step))
        assert run.digest() == states[run.step]
        for target in targets:
            run.train().save(target)
            only_the_checkpoint(target)


def saves_and_is_killed(say, folder, target, position):
    """Trains and saves two steps; a call of the second save kills the process. The second save links the frozen file."""
    with Run(folder / "swap") as run:
        run.train().save(target)
        say(("old", run.step, run.digest()))
        run.train()
        with Calls(killed_at(position)) as calls:
            try:
                run.save(target)
            finally:
                say(("calls", calls.names, None))


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.long)], ids=["before", "after"])
def test_a_checkpoint_is_old_or_new_after_a_kill_at_every_call(tmp_path, nursery, digests, after, request):
    if not after and os.path.ismount("/dev/shm"):  # a kill leaves the same files on every filesystem
        tmp_path = Path(tempfile.mkdtemp(dir="/dev/shm"))
        request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    steps, position, names = [], after, None
    with Run(tmp_path / "swap") as survivor:
        survivor.train(3)
        while names is None:
            target = tmp_path / f"at{position}"
            said, killed = nursery.start(saves_and_is_killed, tmp_path, target, position).end()
            if not killed:
                names = said[-1][1]
            step, digest = on_disk(target)
            assert digest == digests[step]
            steps.append(step)
            survivor.save(target)
            only_the_checkpoint(target)
            assert on_disk(target) == (3, digests[3])
            shutil.rmtree(target)
            position += 2
    rename = names.index("rename")
    assert steps == [1] * (rename + 1 - after) + [2] * (len(names) - rename + after)
    assert {"mkdir", "link", "posix_fallocate", "write", "fsync", "rename", "unlink", "rmdir"} <= set(names), names
    others = 5 + len(files.ancestors(tmp_path / "swap"))  # fsyncs of tensors, folder, manifest, and twice of the directory
    assert names.count("fsync") == names.count("posix_fallocate") + others, names
    print(f"{len(names)} calls: {' '.join(names)}")


def first_save_is_killed(say, folder, target, position):
    with Run(folder / "swap") as run, Calls(killed_at(position)):
        run.train().save(target)


@pytest.mark.long
def test_a_first_checkpoint_is_missing_or_whole_after_a_kill_at_every_call(tmp_path, nursery, digests):
    steps, position, killed = [], 0, True
    with Run(tmp_path / "swap") as survivor:
        survivor.train(2)
        while killed:
            target = tmp_path / f"at{position}"
            _, killed = nursery.start(first_save_is_killed, tmp_path, target, position).end()
            try:
                step, digest = on_disk(target)
                assert digest == digests[step]
            except CheckpointError as error:
                step = 0
                says = ("is not a directory", "holds no checkpoint: there is no manifest.json", "its first save was interrupted")
                assert str(target) in str(error) and any(text in str(error) for text in says), error
            steps.append(step)
            survivor.save(target)
            only_the_checkpoint(target)
            assert on_disk(target) == (2, digests[2])
            shutil.rmtree(target)
            position += 2
    assert steps == sorted(steps) and set(steps) == {0, 1}


def ranks_save(say, folder, target, rank, victim, position, meet):
    """One of two ranks: trains and saves two steps. In the second save, a call kills the victim or fails."""
    ranks.CONTROL_TIMEOUT_S, watch.SILENCE_S = 20, 3
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{position}", rank=rank, world_size=2)
    run = Run(folder / f"swap{rank}")
    run.train().save(target)
    run.train()
    say(("ready", rank, None))
    with Calls(meet(position) if rank == victim else lambda number, name, call: call()) as calls:
        try:
            run.save(target)
            say(("saved", calls.names, None))
        except (CheckpointError, SwapError, infinity.PeerError, RuntimeError) as error:
            say(("failed", f"{type(error).__name__}: {error}", calls.names))
    os._exit(0)


@pytest.fixture(scope="module")
def digests_of_two(tmp_path_factory, nursery):
    """{step: digest} after one step and after two steps of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    found = []
    for num_steps in (1, 2):
        children = [nursery.start(ranks_train_and_save, folder, rank, num_steps) for rank in range(2)]
        for child in children:
            assert child.end()[0][-1][0] == "saved"
        found.append(on_disk(folder / f"after{num_steps}"))
    return dict(found)


def ranks_train_and_save(say, folder, rank, num_steps):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{num_steps}", rank=rank, world_size=2)
    run = Run(folder / f"swap{rank}")
    run.train(num_steps).save(folder / f"after{num_steps}")
    dist.barrier()  # ranks that still save would report a rank that has ended as missing
    say(("saved", num_steps, None))
    os._exit(0)


def two_ranks_save(nursery, tmp_path, digests_of_two, victim, position, meet):
    """(step of the remaining checkpoint, end of the victim, end of the other rank); an end is the result of `Child.end`."""
    target = tmp_path / f"at{position}"
    children = [nursery.start(ranks_save, tmp_path, target, rank, victim, position, meet) for rank in range(2)]
    answers = [child.end() for child in children]
    step, digest = on_disk(target)
    assert digest == digests_of_two[step], f"at call {position}"
    with Run(tmp_path / "swap") as survivor:
        survivor.train(3).save(target)
        only_the_checkpoint(target)
    return step, answers[victim], answers[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(range(0, 1000, 2), marks=pytest.mark.long, id="before every call"),
        pytest.param(range(1, 1000, 2), marks=pytest.mark.long, id="after every call"),
    ],
)
def test_a_checkpoint_of_two_ranks_survives_a_kill_of_one_at_every_call(tmp_path, nursery, digests_of_two, victim, positions):
    steps = []
    for position in positions:
        step, (_, killed), (said, _) = two_ranks_save(nursery, tmp_path, digests_of_two, victim, position, killed_at)
        steps.append(step)
        if not killed:
            break
        assert said[-1][0] == "failed", f"killed at {position}; the other rank said {said[-1]}"
    assert not killed and steps[-1] == 2 and steps == sorted(steps) and steps[0] == 1
    print(f"rank {victim}: {len(steps)} calls")


def killed_after_the_rename(position):
    def meet(number, name, call):
        result = call()
        if name == "rename":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return meet


def killed_at_the_first_fsync(position):
    def meet(number, name, call):
        if name == "fsync":
            os.kill(os.getpid(), signal.SIGKILL)
        return call()

    return meet


@pytest.mark.parametrize(
    "victim, meet, expected",
    [pytest.param(0, killed_after_the_rename, 2, marks=pytest.mark.long), (1, killed_at_the_first_fsync, 1)],
)
def test_a_checkpoint_of_two_ranks_survives_a_kill_of_one(tmp_path, nursery, digests_of_two, victim, meet, expected):
    step, (_, killed), (said, _) = two_ranks_save(nursery, tmp_path, digests_of_two, victim, 0, meet)
    assert killed and step == expected and said[-1][0] == "failed", said


def eio_after_the_rename(position):
    """The fsync of the directory after the rename fails: the rename may be lost in a crash."""
    seen = []

    def meet(number, name, call):
        seen.append(name)
        if name == "fsync" and "rename" in seen:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call()

    return meet


@pytest.mark.slow
def test_a_rename_without_fsync_is_an_error_on_all_ranks_and_loads(tmp_path, nursery, digests_of_two):
    step, (said, _), (others, _) = two_ranks_save(nursery, tmp_path, digests_of_two, 0, 0, eio_after_the_rename)
    assert step in (1, 2) and said[-1][0] == others[-1][0] == "failed", (said, others)


# ---- a failed call ends the checkpoint and not the training ----


def num_fds():
    return len(os.listdir("/proc/self/fd"))


class Failing:
    """Makes the nth call of a name fail. Is the `meet` of `Calls`."""

    def __init__(self, name, nth, code):
        self.name, self.nth, self.code = name, nth, code
        self.paths, self.failed, self.rename_was_made = [], None, False

    def __call__(self, number, name, call):
        if name == self.name:
            target = call.args[0]
            self.paths.append(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target))
            if len(self.paths) == self.nth + 1:
                self.failed = self.paths[-1]
                raise OSError(self.code, os.strerror(self.code))
        self.rename_was_made |= name == "rename" and self.failed is None
        return call()


@pytest.mark.few(1)
@pytest.mark.parametrize("name, code", [("fsync", "EIO"), ("rename", "EIO"), ("link", "EIO")]
    + [pytest.param(*case, marks=pytest.mark.long) for case in [("posix_fallocate", "ENOSPC"), ("mkdir", "EACCES"), ("open", "ENOSPC")]])  # fmt: skip
def test_each_failed_call_ends_the_checkpoint_and_is_not_repeated(run, tmp_path, name, code, monkeypatch):
    monkeypatch.setattr(linked, "RENEW_EVERY", 1 << 20)  # the frozen file is linked each time
    target, met, code = tmp_path / "target", [], getattr(errno, code)
    run.train().save(target)
    while True:
        old = (run.step, run.digest())
        new = (run.step + 1, run.train().digest())
        before, fds = everything_in(target), num_fds()
        with Calls(Failing(name, len(met), code)) as calls:
            try:
                run.save(target)
                error = None
            except SwapError as failure:
                error = failure
        fault = calls.meet
        if error is None and fault.failed is None:
            break
        met.append(fault.failed)
        if error is None:
            directory = name == "mkdir" and fault.failed == str(target)
            assert directory or name == "link", "save succeeded, although a call other than link or mkdir of an existing directory failed"
            assert on_disk(target) == new
            continue
        assert error.errno == code and str(target) in str(error), error
        assert fault.paths[-1] == fault.failed and len(fault.paths) == len(met), f"{name} was called again after a failure: {fault.paths}"
        assert num_fds() == fds
        if fault.rename_was_made:
            assert on_disk(target) in (old, new)
        else:
            assert on_disk(target) == old and everything_in(target) == before
        assert run.digest() == new[1]
        run.save(target)
        only_the_checkpoint(target)
        assert on_disk(target) == new
    assert on_disk(target) == new
    assert len(met) == {"fsync": 6 + len(files.ancestors(target)), "posix_fallocate": 1, "rename": 1, "mkdir": 2, "link": 1, "open": 3}[name], met
    print(f"{name}: {len(met)} times: {met}")


@pytest.mark.parametrize("code, times", [pytest.param("EIO", 1, marks=pytest.mark.long), ("ENOSPC", -1)])
def test_each_failed_write_ends_the_checkpoint(run, tmp_path, code, times):
    target, nth = tmp_path / "target", 0
    run.train().save(target)
    while True:
        old = (run.step, run.digest())
        before, fds = everything_in(target), num_fds()
        run.train()
        _aio._inject("write", nth, times, -getattr(errno, code))
        try:
            run.save(target)
        except SwapError as error:
            assert error.errno == getattr(errno, code) and str(target) in str(error), error
        else:
            assert not _aio._inject()
            break
        finally:
            _aio._inject()
        assert on_disk(target) == old and everything_in(target) == before and num_fds() == fds
        run.save(target)
        nth += 1
    assert nth == 8 and on_disk(target) == (run.step, run.digest())


@pytest.mark.parametrize("missing", [512, *(pytest.param(missing, marks=pytest.mark.long) for missing in (4096, 0.5, 0.0))])
def test_each_short_write_is_completed_or_ends_the_checkpoint(run, tmp_path, missing):
    target = tmp_path / "target"
    run.train().save(target)
    there = (run.step, run.digest())
    for nth in range(8):
        new = (run.step + 1, run.train().digest())
        _aio._inject("write", nth, 1, missing)
        try:
            run.save(target)
            there = new
        except SwapError as error:
            assert str(target) in str(error)
        assert _aio._inject() == 1
        assert on_disk(target) == there


@pytest.mark.few(2)
@pytest.mark.parametrize("who_hears", ["wait", "save", "close", "load"])
def test_training_continues_after_a_failed_checkpoint(tmp_path, digests, who_hears):
    target = tmp_path / "target"
    run = Run(tmp_path / "swap")
    run.train().save(target)
    _aio._inject("write", 3, -1, -errno.EIO)
    saving = run.train().save(target, wait=False)
    run.train(2)
    while not saving.done:
        time.sleep(0.001)
    _aio._inject()
    assert run.digest() == digests[run.step]
    assert on_disk(target) == (1, digests[1])
    act = {"wait": saving.wait, "save": lambda: run.save(target), "close": run.engine.close, "load": lambda: run.load(target)}
    with pytest.raises(SwapError, match=str(target)):
        act[who_hears]()
    if who_hears != "close":
        run.train().save(target)
        assert on_disk(target) == (run.step, digests[run.step])
        run.engine.close()


def fills_a_volume(say, folder, mount):
    """Mounts a small volume: the first checkpoint fits, the second finds no room beside the first."""
    volume, clone_newns = folder / "volume", 0x20000
    private = not ctypes.CDLL(None).unshare(clone_newns) and not os.system("mount --make-rprivate /")
    if not private or subprocess.run(["sh", "-c", mount], capture_output=True).returncode:
        say(("skipped", None, None))
        return
    with Run(folder / "swap") as run:
        run.train().save(volume / "target")
        before = on_disk(volume / "target")
        status = os.statvfs(volume)
        with open(volume / "else", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - (700 << 10))
        names = everything_in(volume)
        run.train()
        with pytest.raises(CheckpointError) as caught:
            run.save(volume / "target")
        needed, available = re.search(r"needs ([\d,]+) bytes and ([\d,]+) are available", str(caught.value)).groups()
        status = os.statvfs(volume)
        fresh = 32768 + 12 + 2800  # bytes of the trained records, the buffer and the noise
        assert int(needed.replace(",", "")) == fresh + files.SLACK_NBYTES, caught.value
        assert abs(int(available.replace(",", "")) - status.f_bavail * status.f_frsize) <= 8192
        assert everything_in(volume) == names and on_disk(volume / "target") == before
        os.unlink(volume / "else")
        run.save(volume / "target")
        assert on_disk(volume / "target") == (2, run.digest())
    say(("held", None, None))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_volume_without_room_is_refused_before_anything_is_written(tmp_path, nursery, kind):
    volume, image = tmp_path / "volume", tmp_path / "image"
    volume.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    loop = f"mkfs.ext4 -q -F -b 4096 -m 0 {image} && mount -o loop {image} {volume}"
    mount = {"ext4": loop, "tmpfs": f"mount -t tmpfs -o size=8m tmpfs {volume}"}[kind]
    said, _ = nursery.start(fills_a_volume, tmp_path, mount).end()
    if said[-1][0] == "skipped":
        pytest.skip(f"no {kind} can be mounted here")
    assert said[-1][0] == "held"


# ---- damage is found and located ----


class Bytes:
    """Maps each byte of a checkpoint's files to the expected error if the byte is damaged."""

    def __init__(self, path, made):
        self.path, self.made = path, made
        self.folder = path / made.folder
        self.files = [path / "manifest.json", self.folder / "tensors", *(self.folder / file.name for file in made.files)]
        self.sizes = {file: file.stat().st_size for file in self.files}
        self.held = {file: [] for file in self.files}  # (begin, end, pattern of the error)
        self.padding = {file: [] for file in self.files}  # (begin, end)
        for tensor_index, tensor in enumerate(made.tensors):
            self.held[self.folder / "tensors"].append((tensor.offset, tensor.offset + tensor.nbytes, f"tensor {tensor_index} is damaged"))
        for chunk, places in enumerate(made.places):
            for rank, place in enumerate(places):
                record = made.record(chunk, rank)
                for segment, offset, padded in zip(record.segments, record.offsets, (*record.offsets[1:], record.nbytes)):
                    begin, end = place.offset + offset, place.offset + offset + record.numel * segment.itemsize
                    said = rf"chunk {chunk} of rank {rank} \(.*\), {segment.name}, is damaged: "
                    file = self.files[2 + place.file]
                    self.held[file].append((begin, end, said + "the checksum"))
                    self.held[file].append((end, place.offset + padded, said + "the padding behind the segment is not zero"))
                    self.padding[file].append((end, place.offset + padded))

    def said_of(self, file, offset):
        if file.name == "manifest.json":
            return "the manifest is damaged or cut"
        return next(said for begin, end, said in self.held[file] if begin <= offset < end)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "new"
    return Bytes(path, write_checkpoint(path, 1))


def refused(path):
    """The error of a verification; None if no damage is found."""
    try:
        with Checkpoint(path) as checkpoint:
            checkpoint.verify()
    except CheckpointError as error:
        return str(error)
    return None


def flip(file, offset, bit):
    with open(file, "r+b", buffering=0) as opened:
        before = os.pread(opened.fileno(), 1, offset)[0]
        os.pwrite(opened.fileno(), bytes([before ^ 1 << bit]), offset)


@pytest.mark.parametrize("num_flips", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found_and_located(two_ranks, num_flips):
    chance, found, padding = random.Random(num_flips), dict.fromkeys(["manifest.json", "tensors", "records"], 0), 0
    with Checkpoint(two_ranks.path) as opened:  # a queue is expensive: most flips share one
        for number in range(num_flips):
            file = chance.choice(two_ranks.files)
            offset, bit = chance.randrange(two_ranks.sizes[file]), chance.randrange(8)
            expected = two_ranks.said_of(file, offset)
            flip(file, offset, bit)
            try:
                if number % 50 == 0:
                    said = refused(two_ranks.path)
                elif file.name == "manifest.json":
                    said = raised(lambda: files.read_manifest(two_ranks.path))
                else:
                    said = raised(opened.verify)
            finally:
                flip(file, offset, bit)
            padding += "padding" in expected
            assert said is not None, f"the flipped bit {bit} of byte {offset} of {file} was not found"
            assert re.search(expected, said) and str(file) in said, said
            found[file.name if file.name in found else "records"] += 1
        assert opened.verify() == two_ranks.made.nbytes
    print(f"{sum(found.values())} found: {found}; {padding} of them in padding")
    assert min(found.values()) > num_flips // 20 and padding


def raised(act):
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("num_cuts", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_every_file_of_a_wrong_size_is_found(two_ranks, num_cuts):
    chance = random.Random(num_cuts)
    for number in range(2 * num_cuts):
        file = chance.choice(two_ranks.files)
        whole = file.read_bytes()
        if number % 2:
            kept = chance.choice([0, 1, len(whole) - 1, chance.randrange(len(whole)), chance.randrange(0, len(whole), 512)])
        else:
            kept = len(whole) + chance.choice([1, 4096, chance.randrange(1, 9999)])
        with open(file, "r+b") as opened:
            opened.truncate(kept)
        said = refused(two_ranks.path)
        file.write_bytes(whole)
        assert said is not None and file.name in said and str(two_ranks.path) in said, f"{file} of {len(whole)} bytes cut to {kept}"
        if file.name != "manifest.json":
            assert f"{file.name} (has {kept:,} bytes instead of {len(whole):,})" in said
    assert refused(two_ranks.path) is None


def test_exchanged_records_are_found(two_ranks):
    made, found = two_ranks.made, 0
    for rank in range(made.world):
        same = {}
        for chunk in range(len(made.chunks)):
            same.setdefault((made.places[chunk][rank].file, made.record(chunk, rank).nbytes), []).append(chunk)
        for (file, nbytes), group in same.items():
            for first, second in zip(group, group[1:]):
                path, at = two_ranks.files[2 + file], [made.places[chunk][rank].offset for chunk in (first, second)]
                whole = path.read_bytes()
                parts = [whole[offset : offset + nbytes] for offset in at]
                with open(path, "r+b", buffering=0) as opened:
                    os.pwrite(opened.fileno(), parts[1], at[0])
                    os.pwrite(opened.fileno(), parts[0], at[1])
                said = refused(two_ranks.path)
                path.write_bytes(whole)
                assert f"chunk {first} of rank {rank} " in said and str(path) in said, said
                found += 1
    assert found >= 2 and refused(two_ranks.path) is None


def test_files_of_another_rank_or_another_checkpoint_are_found(two_ranks, tmp_path):
    older = tmp_path / "older"
    old = Bytes(older, write_checkpoint(older, 2))
    for index, file in enumerate(two_ranks.files[1:], 1):
        whole = file.read_bytes()
        file.write_bytes(old.files[index].read_bytes())
        said = refused(two_ranks.path)
        file.write_bytes(whole)
        assert str(file) in said and ("damaged" in said), said
    by_rank = [file.name for file in two_ranks.made.files]
    for first, second in (("rank0-0.records", "rank1-0.records"), ("rank0-1.records", "rank1-1.records")):
        assert {first, second} <= set(by_rank)
        exchange(two_ranks.folder / first, two_ranks.folder / second)
        said = refused(two_ranks.path)
        exchange(two_ranks.folder / first, two_ranks.folder / second)
        assert first in said, said
    exchange(two_ranks.path / "manifest.json", older / "manifest.json")
    said = [refused(path) for path in (two_ranks.path, older)]
    os.rename(two_ranks.folder, two_ranks.path / old.made.folder)
    with_folder = refused(two_ranks.path)
    os.rename(two_ranks.path / old.made.folder, two_ranks.folder)
    exchange(two_ranks.path / "manifest.json", older / "manifest.json")
    assert f"{two_ranks.path / old.made.folder}: the checkpoint's folder is missing" in said[0]
    assert f"{older / two_ranks.made.folder}: the checkpoint's folder is missing" in said[1]
    assert re.search(r"chunk 0 of rank 0 .*, weight, is damaged", with_folder)
    assert refused(two_ranks.path) is None is refused(older)


def exchange(first, second):
    bytes_of_first = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(bytes_of_first)


def test_after_a_load_of_damage_the_engine_trains_only_after_another_load(run, tmp_path):
    target = tmp_path / "target"
    run.train(2).save(target)
    whole = on_disk(target)
    bytes_of = Bytes(target, files.read_manifest(target))
    run.train()
    before = run.digest()
    for file in bytes_of.files:
        offset = 0 if file.name != "manifest.json" else 200
        flip(file, offset, 3)
        with pytest.raises(CheckpointError, match=re.escape(str(file))):
            run.load(target)
        flip(file, offset, 3)
        if file.name.endswith(".records"):
            for act in (run.train, lambda: run.save(target)):
                with pytest.raises(UsageError, match="infinity.load failed half-way"):
                    act()
            assert on_disk(target) == whole
            run.load(target)
            assert (run.step, run.digest()) == whole
            run.train()
            assert run.digest() == before
        else:
            assert run.digest() == before, f"{file} was damaged, and the model changed"


def test_weights_are_not_readable_after_a_failed_load(run, tmp_path):
    target = tmp_path / "target"
    run.train(2).save(target)
    run.train()
    flip(Bytes(target, files.read_manifest(target)).files[2], 0, 3)
    with pytest.raises(CheckpointError):
        run.load(target)
    for act in (run.digest, run.model.state_dict):
        with pytest.raises(UsageError, match="infinity.load failed half-way"):
            act()


@pytest.mark.few(1)
@pytest.mark.parametrize("places", [ON_HOST, {"param_tier": "device", "optimizer_state_tier": "device"}], ids=["host", "device"])
def test_a_flipped_bit_of_padding_is_found_by_load_and_verify(tmp_path, places):
    target = tmp_path / "target"
    with Run(tmp_path / "swap", **places) as run:
        run.train(2).save(target)
        bytes_of = Bytes(target, files.read_manifest(target))
        for file, spans in bytes_of.padding.items():
            for begin, end in spans:
                flip(file, end - 1, 7)
                for said in refused(target), raised(lambda: run.load(target)):
                    assert re.search(bytes_of.said_of(file, begin), said) and str(file) in said
                flip(file, end - 1, 7)
        assert sum(map(len, bytes_of.padding.values())) >= 4
        run.load(target)
        assert (run.step, run.digest()) == on_disk(target)


# ---- files contain data, not code ----

PICKLES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "copyreg", "runpy", "code"}


# These modules read or write small pickles, because formats of other libraries need them.
HAVE_PICKLES = ("infinity/checkpoints/dcp_load.py", "infinity/checkpoints/dcp_save.py", "infinity/integrations/transformers.py")


def test_no_module_can_run_code_from_a_file():
    num_calls = 0
    for path in sorted([*ROOT.glob("infinity/**/*.py"), *ROOT.glob("aio_ext/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & PICKLES, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in PICKLES, where
                if (node.module or "").split(".")[0] == "torch":
                    assert not {name.name for name in node.names} & {"load", "save"}, where
            elif isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if path.relative_to(ROOT).as_posix() not in HAVE_PICKLES:
                    assert (owner, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load"), ("yaml", "load")}, where
                assert node.attr not in ("allow_pickle", "broadcast_object_list", "all_gather_object", "gather_object"), where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                num_calls += 1
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), where
    assert num_calls > 1000
    sources = [(ROOT / name).read_text() for name in HAVE_PICKLES]
    calls = re.findall(r"torch\.(load|save)\((.*)\)", "".join(sources))
    assert len(calls) == 3 and all(name == "save" or "weights_only=True" in arguments for name, arguments in calls), calls


def load_in_bounds(data, target, run, worst):
    """Loads the manifest `data`: None, or the text of the CheckpointError. Updates `worst` (seconds, bytes)."""
    (target / "manifest.json").write_bytes(data)
    tracemalloc.reset_peak()
    base, start = tracemalloc.get_traced_memory()[0], time.monotonic()
    try:
        infinity.load(target, run.model, run.optimizer)
        return None
    except CheckpointError as error:
        return str(error)
    finally:
        worst[0] = max(worst[0], time.monotonic() - start)
        worst[1] = max(worst[1], tracemalloc.get_traced_memory()[1] - base)


@pytest.fixture
def saved(run, tmp_path):
    """(run, folder of the checkpoint, bytes of the manifest)."""
    target = tmp_path / "target"
    run.train(2).save(target)
    tracemalloc.start()
    yield run, target, (target / "manifest.json").read_bytes()
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_manifests", [250, pytest.param(5000, marks=pytest.mark.long)])
def test_fuzzed_manifests_raise_a_checkpoint_error_or_change_nothing(saved, num_manifests):
    run, target, data = saved
    content, expected = unsigned(data), run.digest()
    without = content | {"rng": []}  # states of generators are long
    chance, worst, taken, others = random.Random(num_manifests), [0, 0], 0, {}
    for number in range(num_manifests):
        bad = signed(mutated(without if number % 5 else content, chance))
        try:
            error = load_in_bounds(bad, target, run, worst)
        except Exception as failure:
            where = traceback.extract_tb(failure.__traceback__)
            frame = [f for f in where if "infinity" in f.filename][-1]
            others.setdefault(f"{type(failure).__name__} at {Path(frame.filename).name}:{frame.lineno} ({failure})"[:160], number)
            (target / "manifest.json").write_bytes(data)
            run.load(target)
            run.optimizer.param_groups[0]["lr"] = 1e-2
            continue
        if error is None:
            taken += 1
            assert run.digest() == expected, f"load accepted manifest {number} and changed the weights"
    (target / "manifest.json").write_bytes(data)
    assert run.load(target) == 2 and run.digest() == expected
    print(f"{num_manifests} manifests, {taken} of them harmless; at most {worst[0]:.2f} s and {worst[1] / 2**20:.1f} MiB; {len(others)} others")
    assert not others, "\n".join(f"manifest {number}: {text}" for text, number in others.items())
    assert worst[0] < 5 and worst[1] < 64 << 20
    assert taken < num_manifests / 2


DEEP = 100_000


def nested(open, close, inside=b"0"):
    return open * DEEP + inside + close * DEEP


HOSTILE = {
    "lists 100,000 deep": lambda c: with_extra(c, nested(b"[", b"]")),
    "objects 100,000 deep": lambda c: with_extra(c, nested(b'{"a":', b"}")),
    "tuples 5,000 deep": lambda c: with_extra(c, b'{"$tuple":[' * 5000 + b"]}" * 5000),
    "lists 900 deep": lambda c: with_extra(c, b"[" * 900 + b"]" * 900),
    "a number of 100,000 digits": lambda c: with_extra(c | {"seed": 0}, b"0").replace(b'"seed": 0', b'"seed": ' + b"9" * 100_000),
    "a shape of huge sizes": lambda c: changed(c, lambda c: c["parameters"][0].update(shape=[2**62] * 64)),
    "a tensor of a huge shape without elements": lambda c: changed(c, lambda c: c.update(tensors=[
        {"dtype": "int8", "shape": [2**62, 2**62, 0], "offset": 0, "nbytes": 0, "crc32c": 0}, *c["tensors"]],
        extra={"$tensor": 0}, model=c["model"] | {"buffers": {"passes": {"$tensor": 1}}})),
    "a world of a million": lambda c: changed(c, lambda c: c.update(world=1 << 20)),
    "20,000 files": lambda c: changed(c, lambda c: c.update(files=[[f"rank0-{i}.records", 0] for i in range(20_000)])),
    "20,000 aliases to nowhere": lambda c: changed(c, lambda c: c.update(aliases={f"a{i}": "nowhere" for i in range(20_000)})),
    "a file of a huge size": lambda c: changed(c, lambda c: c["files"][0].__setitem__(1, 2**62)),
    "a record past the file's end": lambda c: changed(c, lambda c: c["chunks"][0]["records"][0].__setitem__(1, 2**40)),
    "records on one another": lambda c: changed(c, lambda c: c["chunks"][-1]["records"][0].__setitem__(1, 0)),
    "a piece twice": lambda c: changed(c, lambda c: c["chunks"][0]["pieces"].append(c["chunks"][0]["pieces"][0])),
    "a piece missing": lambda c: changed(c, lambda c: c["chunks"][0]["pieces"].pop()),
    "chunks that cannot be shared": lambda c: changed(c, lambda c: c["chunks"][0].update(numel=1025)),
    "a folder above": lambda c: changed(c, lambda c: c.update(folder="..")),
    "a folder elsewhere": lambda c: changed(c, lambda c: c.update(folder="/etc")),
    "a file above": lambda c: changed(c, lambda c: c["files"][0].__setitem__(0, "../manifest.json")),
    "a file elsewhere": lambda c: changed(c, lambda c: c["files"][0].__setitem__(0, "/etc/passwd")),
    "an unknown version": lambda c: changed(c, lambda c: c.update(version=5)),
    "groups that are numbers": lambda c: changed(c, lambda c: c.update(optimizer={"rule": "AdamW", "groups": [5]})),
    "groups that are a number": lambda c: changed(c, lambda c: c.update(optimizer={"rule": "AdamW", "groups": 5})),
    "groups that are an object": lambda c: changed(c, lambda c: c.update(optimizer={"rule": "AdamW", "groups": {"a": 1}})),
    "hyper-parameters that are texts": lambda c: changed(c, lambda c: c["optimizer"]["groups"][0].update(lr="fast")),
    "parameters among the hyper-parameters": lambda c: changed(c, lambda c: c["optimizer"]["groups"][0].update(params=[])),
    "a buffer of complex numbers": lambda c: changed(c, lambda c: c["tensors"][0].update(dtype="complex64", shape=[3], nbytes=24)),
    "generators that are a list": lambda c: changed(c, lambda c: c.update(rng=[[1]])),
}  # fmt: skip


def changed(content, change):
    content = copy.deepcopy(content)
    change(content)
    return json.dumps(content).encode()


def with_extra(content, text):
    return json.dumps(content | {"extra": "EXTRA"}).encode().replace(b'"EXTRA"', text)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused_in_five_seconds_and_64_mib(saved, what):
    run, target, data = saved
    expected, worst, lr = run.digest(), [0, 0], run.optimizer.param_groups[0]["lr"]
    error = load_in_bounds(signed(HOSTILE[what](unsigned(data))), target, run, worst)
    assert worst[0] < 5 and worst[1] < 64 << 20, worst
    assert error is not None and str(target) in error, error
    (target / "manifest.json").write_bytes(data)
    assert run.load(target) == 2 and run.digest() == expected and run.optimizer.param_groups[0]["lr"] == lr


def no_more_memory_than(nbytes):
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, resource.RLIM_INFINITY))


def opens_in_little_memory(say, path):
    no_more_memory_than(64 << 20)
    start = time.monotonic()
    try:
        with Checkpoint(path) as checkpoint:
            checkpoint.verify()
            checkpoint.decode(checkpoint.manifest.extra)
        say(("opened", None, None))
    except CheckpointError as error:
        say(("refused", str(error), time.monotonic() - start))


def sparse_manifest(path, made):
    os.truncate(path / "manifest.json", 2 << 30)


def sparse_tensor(path, made):
    """Makes a tensor of 1 TiB, in a sparse file of that size."""
    content = unsigned((path / "manifest.json").read_bytes())
    content["tensors"] = [{"dtype": "int8", "shape": [1 << 40], "offset": 0, "nbytes": 1 << 40, "crc32c": 0}]
    content["extra"] = {"$tensor": 0}
    (path / "manifest.json").write_bytes(signed(content))
    os.truncate(path / made.folder / "tensors", 1 << 40)


def sparse_records(path, made):
    """Makes a chunk of 2**40 elements, in a sparse file of that size."""
    content = unsigned((path / "manifest.json").read_bytes())
    numel = 1 << 40
    content["parameters"] = [{"name": "a", "shape": [numel], "trainable": False, "group": None, "step": 0}]
    content |= {"step": 0, "aliases": {}, "files": [["rank0-0.records", numel * 2]], "tensors": [], "world": 1, "extra": None, "rng": []}
    content["chunks"] = [{"numel": numel, "trainable": False, "pieces": [[0, 0, 0, numel]], "records": [[0, 0, 0]]}]
    (path / "manifest.json").write_bytes(signed(content))
    os.truncate(path / made.folder / "rank0-0.records", numel * 2)


@pytest.mark.parametrize("swell", [sparse_manifest, sparse_tensor, sparse_records], ids=lambda swell: swell.__name__)
def test_sparse_files_of_huge_sizes_are_refused_in_64_mib(tmp_path, nursery, swell):
    try:
        swell(tmp_path / "c", write_checkpoint(tmp_path / "c", 1))
    except OSError as error:
        pytest.skip(f"no file of that size here: {error}")
    said, _ = nursery.start(opens_in_little_memory, tmp_path / "c").end()
    assert said[-1][0] == "refused" and str(tmp_path / "c") in said[-1][1], said
    assert said[-1][2] < 5


def symlink(path, elsewhere):
    os.rename(path, elsewhere)
    os.symlink(elsewhere, path)


def fifo(path, elsewhere):
    os.rename(path, elsewhere)
    os.mkfifo(path)


def directory_there(path, elsewhere):
    os.rename(path, elsewhere)
    os.mkdir(path)


def device_node(path, elsewhere):
    os.rename(path, elsewhere)
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device node can be made here")


def plain_file(path, elsewhere):
    os.rename(path, elsewhere)
    path.write_bytes(b"other")


def nothing(path, elsewhere):
    os.rename(path, elsewhere)


@pytest.mark.few(10)
@pytest.mark.parametrize("make", [symlink, fifo, directory_there, device_node, plain_file, nothing], ids=lambda make: make.__name__)
@pytest.mark.parametrize("which", ["manifest", "folder", "records", "tensors"])
def test_links_devices_and_missing_files_are_refused(tmp_path, nursery, which, make):
    path = tmp_path / "c"
    made = write_checkpoint(path, 1)
    folder = path / made.folder
    place = {"manifest": path / "manifest.json", "folder": folder, "records": folder / "rank1-0.records", "tensors": folder / "tensors"}[which]
    make(place, tmp_path / "elsewhere")
    said = refused(path)
    names = str(path) if which == "manifest" and make is nothing else place.name
    assert said is not None and names in said, said


DOLLARS = [
    {"$tensor": 9}, {"$tensor": -1}, {"$tensor": "0"}, {"$tensor": None}, {"$tensor": True}, {"$array": 1.0}, {"$tensor": 0, "a": 1},
    {"$bytes": "é"}, {"$bytes": "A"}, {"$bytes": None}, {"$tuple": {"a": 1}}, {"$tuple": "ab"}, {"$tuple": None}, {"$dict": [[1, 2, 3]]},
    {"$dict": [5]}, {"$dict": [[[1], 2]]}, {"$dict": {"a": 1}}, {"$counter": 7}, {"$float": "infinity"}, {"$float": 1}, {"$float": {}},
    {"$eval": "1"}, {"$": None}, {"$object": {"$tuple": []}}, {"$dict": [[{"$tensor": 0}, 1]] * 2, "$x": 0}, {"a": {"$no": 1}}, [{"$no": 1}],
]  # fmt: skip


@pytest.mark.parametrize("value", DOLLARS, ids=repr)
def test_decode_refuses_values_that_encode_does_not_make(value):
    def get(index):
        if index:
            raise IndexError(index)
        return torch.zeros(2)

    with pytest.raises(CheckpointError):
        encoding.decode(value, get)


def test_decode_restores_encoded_values():
    kept = []

    def put(tensor):
        kept.append(tensor.clone())
        return len(kept) - 1

    given = {
        "numbers": [1, -(2**70), 0.1, float("inf"), float("-inf"), True, None], "$name": "x", "tuple": (1, (2, [3])), 5: "five", (1, 2): b"\0\xff",
        "tensors": [torch.arange(4), torch.zeros(0, 3), torch.tensor(1.5)], "array": np.arange(6.0).reshape(2, 3), "text": "é\ud7ff\0",
    }  # fmt: skip
    there = json.loads(json.dumps(encoding.encode(given, put)))
    found = encoding.decode(there, kept.__getitem__)
    assert list(found) == list(given) and found["$name"] == "x" and found[(1, 2)] == b"\0\xff" and found["tuple"] == (1, (2, [3]))
    assert found["numbers"] == given["numbers"] and found["text"] == given["text"]
    assert all(torch.equal(a, b) for a, b in zip(found["tensors"], given["tensors"])) and (found["array"] == given["array"]).all()


# ---- the directory ----


def holds_the_directory(say, path, go_on):
    directory = Directory(path)
    say(("held", directory.folder, None))
    time.sleep(SECONDS)


def test_a_second_process_may_save_only_after_the_first_has_ended(run, tmp_path, nursery):
    target = tmp_path / "target"
    run.train().save(target)
    before = on_disk(target)
    child = nursery.start(holds_the_directory, target, None)
    assert child.hear()[0] == "held"
    run.train()
    names, fds = everything_in(target), num_fds()
    with pytest.raises(CheckpointError, match="another process is writing a checkpoint there"):
        run.save(target)
    assert on_disk(target) == before and everything_in(target) == names and num_fds() == fds
    child.kill()
    child.end()
    run.save(target)
    only_the_checkpoint(target)
    assert on_disk(target) == (2, run.digest())


def test_a_reader_of_the_old_checkpoint_reads_all_after_its_replacement(tmp_path):
    path = tmp_path / "c"
    first = write_checkpoint(path, 1)
    with Checkpoint(path) as opened:
        second = write_checkpoint(path, 2)
        assert not (path / first.folder).exists()
        assert opened.verify() == first.nbytes
        assert torch.equal(opened.decode(opened.manifest.extra)["x"], torch.arange(300.0) + 1)
    with Checkpoint(path) as opened:
        assert opened.manifest.to_json() == second.to_json() and opened.verify() == second.nbytes


def test_a_checkpoint_opened_during_its_replacement_is_old_or_new(tmp_path, monkeypatch):
    """A writer replaces the checkpoint after the reader has read the manifest: the files of this manifest are gone."""
    path, left = tmp_path / "c", [2]
    write_checkpoint(path, 1)
    from_json = files.manifest_from_json

    def replaced_meanwhile(data, where):
        monkeypatch.setattr(files, "manifest_from_json", from_json)  # the writer reads the manifest, too
        if left[0]:
            left[0] -= 1
            write_checkpoint(path, 10 + left[0])
            monkeypatch.setattr(files, "manifest_from_json", replaced_meanwhile)
        return from_json(data, where)

    monkeypatch.setattr(files, "manifest_from_json", replaced_meanwhile)
    with Checkpoint(path) as opened:
        opened.verify()


def test_a_reader_during_the_first_save_gets_an_error_that_says_so(tmp_path):
    directory = Directory(tmp_path / "c")
    with pytest.raises(CheckpointError, match="its first save was interrupted, or is under way. Training may start anew"):
        Checkpoint(tmp_path / "c")
    directory.abort()
    with pytest.raises(CheckpointError, match="is not a directory: name the directory of a checkpoint"):
        Checkpoint(tmp_path / "c")


def test_save_keeps_files_that_are_not_its_own(run, tmp_path):
    target = tmp_path / "target"
    others = ["notes.txt", "data-mine/x", "data-0123456789ab.old/x", "data-0123456789AB/x", "sub/manifest.json", ".hidden"]
    for name in others:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(name)
    (target / "data-0123456789ab").symlink_to(tmp_path / "swap")  # a link, not a folder of a checkpoint
    (target / "data-aaaaaaaaaaaa").mkdir()  # left by a killed process
    for _ in range(2):
        run.train().save(target)
    _aio._inject("write", 0, -1, -errno.EIO)
    with pytest.raises(SwapError):
        run.train().save(target)
    assert all((target / name).read_text() == name for name in others) and (tmp_path / "swap").is_dir()
    assert not (target / "data-aaaaaaaaaaaa").exists()
    assert sum(bool(FOLDER.fullmatch(found.name)) and not found.is_symlink() for found in target.iterdir()) == 1
    assert on_disk(target)[0] == 2


@pytest.mark.parametrize("there", [True, False], ids=["directory there", "directory made"])
def test_files_of_a_checkpoint_are_readable_by_the_owner_only(run, tmp_path, there):
    target, before = tmp_path / "target", os.umask(0)
    try:
        if there:
            target.mkdir(0o755)
        run.train().save(target)
        reshard(target, tmp_path / "other", world=2)
        export(target, tmp_path / "exported")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for folder in (target, tmp_path / "other") for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in target.rglob("*") if path.is_dir()} == {0o700}
    assert stat.S_IMODE(target.stat().st_mode) == (0o755 if there else 0o700)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "exported" / "model.safetensors").stat().st_mode) == 0o666, "exported files follow the umask"


def test_a_failed_first_save_removes_only_a_directory_that_it_made(run, tmp_path):
    _aio._inject("write", 0, -1, -errno.EIO)
    with pytest.raises(SwapError):
        run.train().save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(SwapError):
        run.train().save(tmp_path / "there")
    assert everything_in(tmp_path / "there") == []


def test_the_error_names_a_path_that_cannot_be_a_directory(run, tmp_path):
    run.train()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    cases = [("file", "is not a directory"), ("dangling", "is not a directory"), ("no/such", "create it"), ("file/below", "file/below")]
    fds = num_fds()
    for name, says in cases:
        with pytest.raises((CheckpointError, SwapError), match=says) as caught:
            run.save(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine" and num_fds() == fds
    with pytest.raises((CheckpointError, SwapError)):
        infinity.load(tmp_path / "file", run.model)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "garbage", "folder's name"])
def test_save_does_not_replace_an_unreadable_manifest(run, tmp_path, damage):
    target = tmp_path / "target"
    run.train().save(target)
    whole, before, fds = (target / "manifest.json").read_bytes(), on_disk(target), num_fds()
    name = re.search(rb"data-[0-9a-f]{12}", whole)[0]
    other = bytes(name[:-1]) + (b"0" if name[-1:] != b"0" else b"1")
    bad = {"empty": b"", "garbage": random.Random(1).randbytes(5000), "folder's name": whole.replace(name, other, 1)}[damage]
    (target / "manifest.json").write_bytes(bad)
    run.train()
    with pytest.raises(CheckpointError, match="manifest.json.*move it away or save elsewhere"):
        run.save(target)
    assert num_fds() == fds, "a file of the refused directory is still open"
    (target / "manifest.json").write_bytes(whole)
    assert on_disk(target) == before
    run.save(target)
    assert on_disk(target) == (2, run.digest())


def saves_into(say, folder, target):
    with Run(folder / "swap") as run:
        try:
            run.train().save(target)
        except (CheckpointError, SwapError) as error:
            say(("refused", str(error), None))


def test_save_refuses_a_fifo_in_place_of_the_manifest(tmp_path, nursery):
    target = tmp_path / "target"
    target.mkdir()
    os.mkfifo(target / "manifest.json")
    said, _ = nursery.start(saves_into, tmp_path, target).end()
    assert said and said[-1][0] == "refused", said

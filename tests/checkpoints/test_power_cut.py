"""Power cuts during saves: each checkpoint whose `save` returned is whole, even if all unsynced data is lost.

A recorder logs the calls of a run that saves. From a prefix of the log, the test builds an image of the disk after a power cut. If a
directory was synced after a change of its entries, the image has the change. Other changes are in the image at random. A synced file has
the bytes of the last sync. Any other file is empty or has zeros.
"""

import os
import random
import threading
from dataclasses import dataclass, field

import pytest
from support.checkpoints import Run, on_disk

from infinity.errors import CheckpointError

CALLS = ("open", "mkdir", "link", "rename", "replace", "unlink", "rmdir", "fsync", "fdatasync")


@dataclass(frozen=True)
class Entry:
    """Creation of an entry in a directory (`node` is a number), or its removal (None)."""

    directory: int
    name: str
    node: int | None


@dataclass(frozen=True)
class Synced:
    """`content` has the bytes of a file; None for a directory."""

    node: int
    content: bytes | None


@dataclass(frozen=True)
class Returned:
    step: int


@dataclass
class Recorder:
    """Logs the calls of a program below a directory. Nodes are numbered in the order of first use."""

    root: str
    log: list = field(default_factory=list)
    directories: set = field(default_factory=set)

    def __post_init__(self):
        self._nodes, self._num_nodes = {}, 0
        self._lock = threading.RLock()
        self._node(self.root, new=True)

    def __enter__(self):
        self._before = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *exception):
        for name, call in self._before.items():
            setattr(os, name, call)

    def _where(self, path, dir_fd=None):
        path = os.fspath(path)
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        return os.path.normpath(os.path.join(base, path))

    def _node(self, path, new=False):
        inode = os.lstat(path).st_ino
        if new or inode not in self._nodes:
            self._nodes[inode] = self._num_nodes = self._num_nodes + 1
            if os.path.isdir(path):
                self.directories.add(self._num_nodes)
        return self._nodes[inode]

    def _entry(self, path, node):
        if path.startswith(self.root + os.sep):
            folder, name = os.path.split(path)
            return Entry(self._node(folder), name, node)
        return None

    def _note(self, *events):
        self.log += [event for event in events if event is not None]

    def _open(self, path, flags, *arguments, dir_fd=None, **options):
        with self._lock:
            where = self._where(path, dir_fd)
            is_new = flags & os.O_CREAT and not os.path.lexists(where)
            fd = self._before["open"](path, flags, *arguments, dir_fd=dir_fd, **options)
            if is_new and where.startswith(self.root + os.sep):
                self._note(self._entry(where, self._node(where, new=True)))
            return fd

    def _mkdir(self, path, *arguments, dir_fd=None, **options):
        with self._lock:
            self._before["mkdir"](path, *arguments, dir_fd=dir_fd, **options)
            where = self._where(path, dir_fd)
            if where.startswith(self.root + os.sep):
                self._note(self._entry(where, self._node(where, new=True)))

    def _link(self, old, new, **options):
        with self._lock:
            self._before["link"](old, new, **options)
            self._note(self._entry(self._where(new), self._node(self._where(new))))

    def _rename(self, old, new):
        with self._lock:
            node = self._node(self._where(old)) if self._where(old).startswith(self.root) else None
            self._before["rename"](old, new)
            assert os.path.dirname(self._where(old)) == os.path.dirname(self._where(new))
            self._note((self._entry(self._where(new), node), self._entry(self._where(old), None)))  # atomic

    _replace = _rename

    def _unlink(self, path, dir_fd=None):
        with self._lock:
            self._before["unlink"](path, dir_fd=dir_fd)
            self._note(self._entry(self._where(path, dir_fd), None))

    def _rmdir(self, path, dir_fd=None):
        with self._lock:
            self._before["rmdir"](path, dir_fd=dir_fd)
            self._note(self._entry(self._where(path, dir_fd), None))

    def _fsync(self, fd):
        with self._lock:
            self._before["fsync"](fd)
            where = os.readlink(f"/proc/self/fd/{fd}")
            if not (where + os.sep).startswith(self.root + os.sep):
                return
            content = None
            if not os.path.isdir(where):
                with open(f"/proc/self/fd/{fd}", "rb") as file:
                    content = file.read()
            self._note(Synced(self._node(where), content))

    _fdatasync = _fsync

    def image(self, num_events, chance, path):
        """Makes a possible state of the disk after a power cut behind the first `num_events` events."""
        log = self.log[:num_events]
        entries, contents, last_sync = {}, {}, {}
        for number, event in enumerate(log):
            if isinstance(event, Synced):
                last_sync[event.node] = number
                if event.content is not None:
                    contents[event.node] = event.content
        for number, event in enumerate(log):
            group = event if isinstance(event, tuple) else (event,)
            if not isinstance(group[0], Entry):
                continue
            if last_sync.get(group[0].directory, -1) > number or chance.random() < 0.5:
                for entry in group:
                    entries[entry.directory, entry.name] = entry.node
        self._make(1, path, entries, contents, chance)

    def _make(self, node, path, entries, contents, chance):
        os.mkdir(path)
        for (directory, name), inside in entries.items():
            if directory != node or inside is None:
                continue
            if inside in self.directories:
                self._make(inside, os.path.join(path, name), entries, contents, chance)
                continue
            content = contents.get(inside)
            with open(os.path.join(path, name), "wb") as file:
                file.write(chance.choice([b"", bytes(9000)]) if content is None else content)


def recorded(tmp_path, made_before):
    """Runs four steps, each with a save into one directory. Returns (recorder, {step: digest of the states})."""
    root = tmp_path / "disk"
    root.mkdir()
    states = {}
    with Run(tmp_path / "swap") as run, Recorder(str(root)) as recorder:
        target = root / "runs" / "checkpoint"
        os.mkdir(target.parent)
        if made_before:
            os.mkdir(target)
        for _ in range(4):
            run.train()
            states[run.step] = run.digest()
            run.save(target)
            recorder.log.append(Returned(run.step))
    return recorder, states


@pytest.mark.few(1)
@pytest.mark.parametrize("num_images", [60, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("made_before", [True, False], ids=["directory there", "directory made"])
def test_no_power_cut_loses_a_checkpoint_whose_save_returned(tmp_path, made_before, num_images):
    recorder, states = recorded(tmp_path, made_before)
    chance, lost, seen = random.Random(num_images), [], set()
    for number in range(num_images):
        num_events = chance.randrange(len(recorder.log) + 1)
        path = tmp_path / f"image{number}"
        recorder.image(num_events, chance, path)
        returned = max((event.step for event in recorder.log[:num_events] if isinstance(event, Returned)), default=0)
        try:
            step, digest = on_disk(path / "runs" / "checkpoint")
            assert digest == states[step]
        except CheckpointError:
            step = 0
        seen.add((returned, step))
        if step not in (returned, returned + 1):
            lost.append((num_events, returned, step))
    assert not lost, f"{len(lost)} of {num_images} images lost a checkpoint: {lost[:10]}"
    assert len({returned for returned, _ in seen}) == 5 and {step - returned for returned, step in seen} == {0, 1}, seen

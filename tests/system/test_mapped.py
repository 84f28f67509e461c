"""Memory of mapped files is found, and read ahead up to the given limit only."""

import ctypes
import mmap
import os
import re
import time
import threading
from pathlib import Path

import pytest
import torch

import infinity
from infinity.system import mapped
from infinity.system.mapped import FilesAhead, MappedFiles, Part, ReadAhead

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path):
    """A path with a blank, and a tensor that maps the whole file of 16 pages."""
    path = tmp_path / "some file"
    path.write_bytes(os.urandom(16 * PAGE))
    return str(path), torch.from_file(str(path), size=16 * PAGE, dtype=torch.uint8)


def test_memory_of_a_file_is_known_by_its_path_and_offset(file):
    path, tensor = file
    files, address = MappedFiles(), tensor.data_ptr()
    assert files.find(address, 16 * PAGE) == Part(path, 0, 16 * PAGE, address)
    assert files.find(address + 100, 2 * PAGE) == Part(path, 100, 2 * PAGE, address + 100)
    assert files.find(address + PAGE, 16 * PAGE) is None  # the range ends after the mapping
    assert files.find(address, 0) is None


def test_other_memory_belongs_to_no_file(file):
    files, heap = MappedFiles(), torch.zeros(16 * PAGE, dtype=torch.uint8)
    assert files.find(heap.data_ptr(), heap.numel()) is None and files.find(0, 1) is None
    shared = mmap.mmap(-1, PAGE)  # anonymous memory with a name from the kernel
    assert MappedFiles().find(torch.frombuffer(shared, dtype=torch.uint8).data_ptr(), PAGE) is None


@pytest.fixture
def asked(monkeypatch):
    """Calls of posix_fadvise as (path, offset, nbytes, advice)."""
    asked, advise = [], os.posix_fadvise

    def noting(file, offset, nbytes, advice):
        asked.append((os.readlink(f"/proc/self/fd/{file}"), offset, nbytes, advice))
        advise(file, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", noting)
    return asked


@pytest.fixture
def older_kernel(monkeypatch):
    monkeypatch.setattr(mapped, "_MADV_POPULATE_READ", 9999)  # an advice that no kernel knows


def test_files_are_read_ahead_up_to_the_limit(file, asked, monkeypatch, older_kernel):
    """The file is used in parts of two pages, with other memory between them."""
    path, tensor = file
    heap = torch.zeros(PAGE)
    monkeypatch.setattr(mapped, "LEAST_AHEAD_NBYTES", 4 * PAGE)
    memory = []
    for index in range(8):
        memory += [(tensor.data_ptr() + 2 * index * PAGE, 2 * PAGE), (heap.data_ptr(), PAGE)]

    def expected(number):
        return [(path, 2 * index * PAGE, 2 * PAGE, os.POSIX_FADV_WILLNEED) for index in range(number)]

    for reached, number in ((0, 3), (1, 4), (2, 4), (5, 6), (15, 8)):
        asked.clear()
        with ReadAhead(memory) as ahead:
            ahead.reach(reached)
            ahead._pool.shutdown()
        assert sorted(asked) == expected(number), reached  # two threads call the kernel


def test_pages_read_ahead_are_mapped_without_page_faults(file):
    """All pages of a part are mapped, from the first to the last one. Needs Linux 5.14."""
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14):
        pytest.skip("needs Linux 5.14 or newer")
    path, tensor = file

    def resident():
        """Bytes of the file in this process's page tables."""
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        return next(int(line.split()[1]) << 10 for found in lines if found.endswith(path) for line in lines if line.startswith("Rss:"))

    assert resident() == 0
    with ReadAhead([(tensor.data_ptr() + 3 * PAGE + 100, 6 * PAGE)]) as ahead:
        ahead.reach(0)
        ahead._pool.shutdown()
    assert resident() >= 7 * PAGE


def test_close_waits_only_for_pieces_already_begun(file, asked, monkeypatch, older_kernel):
    """A parameter may have gigabytes. An error or an interrupt must not wait until all of them are read."""
    path, tensor = file
    begun, go = threading.Semaphore(0), threading.Event()
    advise = os.posix_fadvise

    def slow(*args):
        begun.release()
        assert go.wait(60)
        advise(*args)

    monkeypatch.setattr(os, "posix_fadvise", slow)
    monkeypatch.setattr(mapped, "PIECE_NBYTES", 3 * PAGE)
    ahead = ReadAhead([(tensor.data_ptr() + PAGE, 15 * PAGE)])
    ahead.reach(0)
    for _ in range(2):  # threads
        assert begun.acquire(timeout=60)
    shutdown = ahead._pool.shutdown

    def noting(**options):
        shutdown(wait=False, **options)
        go.set()
        shutdown(**options)

    monkeypatch.setattr(ahead._pool, "shutdown", noting)
    ahead.close()
    assert sorted(asked) == [(path, begin * PAGE, 3 * PAGE, os.POSIX_FADV_WILLNEED) for begin in (1, 4)]


def test_a_deleted_file_is_no_error(file):
    path, tensor = file
    os.unlink(path)
    with ReadAhead([(tensor.data_ptr(), PAGE)]) as ahead:
        ahead.reach(0)


def test_met_files_are_read_from_the_beginning_up_to_the_limit(file, asked, monkeypatch):
    path, tensor = file
    monkeypatch.setattr(mapped, "LEAST_AHEAD_NBYTES", 20 * PAGE)
    monkeypatch.setattr(mapped, "PIECE_NBYTES", 6 * PAGE)
    with FilesAhead(PAGE) as ahead:
        for address in (torch.zeros(PAGE).data_ptr(), tensor.data_ptr() + 9 * PAGE, tensor.data_ptr()):
            ahead.meet(address)
        other = Path(path).with_name("another")  # mapped after the block has begun
        other.write_bytes(bytes(16 * PAGE))
        later = torch.from_file(str(other), size=16 * PAGE, dtype=torch.uint8)
        ahead.meet(later.data_ptr())
        gone = Path(path).with_name("removed")
        gone.write_bytes(bytes(PAGE))
        removed = torch.from_file(str(gone), size=PAGE, dtype=torch.uint8)
        gone.unlink()
        ahead.meet(removed.data_ptr())  # deleted: read later, by page faults
        ahead._pool.shutdown()
    pieces = [(path, 0, 6), (path, 6, 6), (path, 12, 4), (str(other), 0, 4)]
    assert asked == [(name, begin * PAGE, count * PAGE, os.POSIX_FADV_WILLNEED) for name, begin, count in pieces]


def resident(tensor):
    """Bytes of a mapped file in the page cache. tensor: maps the whole file."""
    pages = (ctypes.c_ubyte * -(-tensor.numel() // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), pages) == 0
    return sum(page & 1 for page in pages) * PAGE


@pytest.mark.few(1)
@pytest.mark.parametrize("reader", ["of files", "of memory"])
def test_a_large_piece_is_read_completely(tmp_path, reader, older_kernel):
    """For one advice, the kernel reads at most the drive's read-ahead size and largest request."""
    path, nbytes = tmp_path / "weights", 48 << 20
    with path.open("wb") as file:
        file.write(os.urandom(nbytes))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tensor = torch.from_file(str(path), size=nbytes, dtype=torch.uint8)
    with FilesAhead(0) if reader == "of files" else ReadAhead([(tensor.data_ptr(), nbytes)]) as ahead:
        ahead.meet(tensor.data_ptr()) if reader == "of files" else ahead.reach(0)
        ahead._pool.shutdown()
    deadline = time.monotonic() + 10
    while resident(tensor) < nbytes and time.monotonic() < deadline:
        time.sleep(0.01)  # the drive still reads
    assert resident(tensor) > nbytes * 3 // 4  # the kernel may skip pages of an advice


def test_lookups_become_rarer_for_memory_of_no_file(file, asked, monkeypatch):
    """With CUDA's libraries in the process a lookup takes milliseconds. A model of NumPy arrays can have thousands of parameters."""
    path, tensor = file
    looks, heap = [], torch.zeros(PAGE)
    monkeypatch.setattr(mapped, "MappedFiles", lambda: looks.append(1) or MappedFiles())
    with FilesAhead(0) as ahead:
        for _ in range(1000):
            ahead.meet(heap.data_ptr())
        assert len(looks) == 10
        later = torch.from_file(path, size=PAGE, dtype=torch.uint8)  # a new mapping, unknown so far
        for _ in range(24):
            ahead.meet(later.data_ptr())
        assert len(looks) == 11
        ahead._pool.shutdown()
    assert [name for name, *_ in asked] == [path]


def test_a_file_met_after_the_block_is_not_read(file, asked):
    _, tensor = file
    with FilesAhead(0) as ahead:
        pass
    ahead.meet(tensor.data_ptr())
    assert not asked


def test_a_mapped_value_set_behind_the_mode_is_read(tmp_path):
    """The assignment bypasses the mode of infinity.init."""
    path = tmp_path / "weights.pt"
    torch.save(torch.rand(64, 64), path)
    with infinity.init(infinity.Config(device="cpu", dtype="fp32", swap_dirs=str(tmp_path)), window=0):
        layer = torch.nn.Linear(64, 64)
        values = torch.load(path, mmap=True)
        with torch._C.DisableTorchFunction():
            layer.weight.data = values
    with infinity.engine_of(layer) as engine:
        assert torch.equal(engine.read_state(layer.weight)["weight"], torch.load(path))


def test_a_file_is_read_while_a_model_is_built_from_it(tmp_path, asked):
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(64, 64).state_dict(), path)
    nbytes = path.stat().st_size
    with infinity.init(infinity.Config(device="cpu", swap_dirs=str(tmp_path))):
        layer = torch.nn.Linear(64, 64, device="meta")
        assert not asked
        layer.load_state_dict(torch.load(path, mmap=True), assign=True)
    assert asked[0] == (str(path), 0, nbytes, os.POSIX_FADV_WILLNEED)

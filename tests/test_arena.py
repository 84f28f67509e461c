"""Regions are aligned, huge, exact and private to the process; slots are leases that wait and are never shared."""

import gc
import mmap
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch

from helpers import on_gpu
from infinity import arena as arena_module
from infinity.arena import Arena, Slots
from infinity.errors import BudgetError, UsageError

MIB = 1 << 20


def mapping_at(address):
    """The kernel's view of the mapping that starts at address: (nbytes, resident nbytes, flags), or None."""
    text = Path("/proc/self/smaps").read_text()
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        begin, end = (int(x, 16) for x in entry.split(" ", 1)[0].split("-"))
        if begin == address:
            resident = int(re.search(r"^Rss: +(\d+) kB", entry, re.M)[1]) * 1024
            return end - begin, resident, re.search(r"^VmFlags: (.*)", entry, re.M)[1].split()
    return None


def is_mapped(address):
    return any(
        int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
@pytest.mark.parametrize("nbytes, held", [(1, 4096), (4096, 4096), (3 * MIB + 1, 3 * MIB + 4096), (130 * MIB, 130 * MIB)])
def test_region_is_aligned_advised_touched_and_no_larger_than_asked(nbytes, held):
    arena = Arena()
    region = arena.region(nbytes)
    assert region.address % (2 * MIB) == 0
    assert region.nbytes == arena.nbytes == region.buffer.nbytes == held
    size, resident, flags = mapping_at(region.address)
    assert (size, resident) == (held, held)
    assert {"hg", "dc"} <= set(flags)  # huge pages; do not copy on fork
    assert not any(bytes(region.buffer[:4096]))
    arena.close()
    assert not is_mapped(region.address)


def test_arena_holds_what_was_asked_within_a_page_a_region():
    arena = Arena()
    sizes = [1, 5000, MIB + 7, 9 * MIB]
    for nbytes in sizes:
        arena.region(nbytes)
    assert arena.nbytes == sum(-(-n // 4096) * 4096 for n in sizes)
    arena.close()
    arena.close()
    assert arena.nbytes == 0


def test_tensors_share_the_memory_and_are_made_once():
    region = Arena().region(MIB)
    first = region.tensor(torch.int32, 4096, 10)
    first.copy_(torch.arange(10))
    assert first is region.tensor(torch.int32, 4096, 10)
    assert first.data_ptr() == region.address + 4096
    assert memoryview(region.buffer[4096:4136]).cast("i").tolist() == list(range(10))
    assert region.tensor(torch.float32, 8, 0).shape == (0,)


def test_memory_outlives_its_arena_while_a_tensor_or_a_buffer_refers_to_it():
    arena = Arena()
    region = arena.region(MIB)
    address = region.address
    tensor, buffer = region.tensor(torch.uint8, 0, MIB), region.buffer[:10]
    tensor.fill_(7)
    arena.close()
    assert is_mapped(address) and tensor.sum() == 7 * MIB
    with pytest.raises(UsageError, match="closed"):
        region.tensor(torch.uint8, 0, 1)
    del tensor
    gc.collect()
    assert is_mapped(address) and bytes(buffer) == b"\7" * 10
    del buffer
    gc.collect()
    assert not is_mapped(address)


def test_a_forked_child_neither_has_the_memory_nor_unmaps_what_took_its_place():
    arena = Arena()
    region = arena.region(4 * MIB)
    address = region.address
    child = os.fork()
    if child == 0:
        try:
            absent = not is_mapped(address)
            others = [mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(4)]
            arena.close()
            del arena, region
            gc.collect()
            alive = all(other[::4096] == bytes(len(other) // 4096) for other in others)
            os._exit(0 if absent and alive else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_mapped(address)
    arena.close()


def test_an_empty_region_is_refused():
    with pytest.raises(ValueError, match="a region of 0 bytes was asked for, expected 1 or more"):
        Arena().region(0)


class FakeCudart:
    """Counts registrations; `error` is what registering returns."""

    class cudaError:
        success = 0

    def __init__(self, error=0):
        self.error = error
        self.registered = []

    def cudaHostRegister(self, address, nbytes, flags):
        if not self.error:
            self.registered.append((address, nbytes))
        return self.error

    def cudaHostUnregister(self, address):
        self.registered = [r for r in self.registered if r[0] != address]


def test_pinned_regions_are_registered_once_and_unregistered(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    regions = [arena.region(n) for n in (4096, 3 * MIB)]
    assert cudart.registered == [(r.address, r.nbytes) for r in regions]
    arena.close()
    arena.close()
    assert cudart.registered == []


def test_too_low_a_memlock_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    monkeypatch.setattr(arena_module.resource, "getrlimit", lambda which: (8 * MIB, resource.RLIM_INFINITY))
    arena = Arena(pin=True)
    with pytest.raises(BudgetError, match=r"pinning 16\.0 MiB .* memlock allows 8\.0 MiB.*ulimit -l unlimited"):
        arena.region(16 * MIB)
    assert arena.nbytes == 0


def test_slots_are_page_aligned_apart_and_counted():
    arena = Arena()
    slots = Slots(arena, "record", 5000, 3)
    assert (slots.slot_nbytes, arena.nbytes, slots.num_free, slots.peak) == (8192, 3 * 8192, 3, 0)
    leases = [slots.acquire() for _ in range(3)]
    addresses = sorted(slot.tensor(torch.uint8, 0, 1).data_ptr() for slot in leases)
    assert [a - addresses[0] for a in addresses] == [0, 8192, 16384] and addresses[0] % 4096 == 0
    for k, slot in enumerate(leases):
        slot.tensor(torch.uint8, 0, 8192).fill_(k)
    assert [set(bytes(slot.buffer)) for slot in leases] == [{0}, {1}, {2}]
    leases[1].release()
    assert (slots.num_free, slots.peak) == (1, 3)


def test_a_slots_tensor_is_the_same_object_in_every_lease():
    slots = Slots(Arena(), "weight", 4096, 1)
    slot = slots.acquire()
    tensor = slot.tensor(torch.float32, 512, 4)
    slot.release()
    assert slots.acquire().tensor(torch.float32, 512, 4) is tensor


def test_a_slot_is_of_no_use_after_its_release():
    slots = Slots(Arena(), "weight", 4096, 1)
    old = slots.acquire()
    old.release()
    new = slots.acquire()
    for use in (old.release, lambda: old.buffer, lambda: old.tensor(torch.uint8, 0, 1)):
        with pytest.raises(UsageError, match="slot 0 is used after its release"):
            use()
    assert slots.num_free == 0
    new.release()


@pytest.mark.parametrize("offset_nbytes, numel", [(0, 1025), (4, 1024), (-4, 1), (4096, 1)])
def test_a_slot_gives_no_bytes_beyond_its_own(offset_nbytes, numel):
    slot = Slots(Arena(), "weight", 4096, 2).acquire()
    with pytest.raises(ValueError, match="of a slot of 4096"):
        slot.tensor(torch.float32, offset_nbytes, numel)


class Waiting(threading.Thread):
    """A thread in acquire(): `entered` is set when it is about to wait, `result` is what it got."""

    def __init__(self, slots):
        super().__init__(daemon=True)
        self.entered = threading.Event()
        self.slots = slots
        condition, wait_for = slots._changed, slots._changed.wait_for

        def entering(predicate, timeout=None):
            self.entered.set()  # the condition's lock is held: nobody can release a slot before this waits
            return wait_for(predicate, timeout)

        condition.wait_for = entering
        self.start()
        assert self.entered.wait(30)

    def run(self):
        try:
            self.result = self.slots.acquire()
        except UsageError as error:
            self.result = error


def test_acquire_waits_for_a_release():
    slots = Slots(Arena(), "weight", 4096, 1)
    held = slots.acquire()
    assert slots.try_acquire() is None
    waiting = Waiting(slots)
    assert waiting.is_alive()
    held.release()
    waiting.join(30)
    assert (waiting.result.index, slots.num_free, slots.peak) == (held.index, 0, 1)


def test_acquire_gives_up_after_its_timeout():
    slots = Slots(Arena(), "weight", 4096, 1)
    slots.acquire()
    with pytest.raises(TimeoutError, match="none of 1 weight slots became free within 0 s"):
        slots.acquire(timeout=0)


def test_closing_wakes_who_waits_and_leaves_leases_valid():
    slots = Slots(Arena(), "weight", 4096, 1)
    held = slots.acquire()
    waiting = Waiting(slots)
    slots.close()
    waiting.join(30)
    assert isinstance(waiting.result, UsageError) and "the weight slots are closed" in str(waiting.result)
    held.release()
    with pytest.raises(UsageError, match="closed"):
        slots.try_acquire()


def test_no_slot_is_ever_leased_twice():
    """32 threads, 1,000 leases each, of 5 slots: each writes its name and finds it again."""
    slots = Slots(Arena(), "weight", 4096, 5)
    wrong = []

    def work(name):
        for _ in range(1000):
            slot = slots.acquire()
            slot.buffer[0] = name
            if slot.buffer[0] != name:
                wrong.append(name)
            slot.release()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert slots.num_free == 5 and 1 <= slots.peak <= 5


@on_gpu
def test_pinned_memory_is_pinned():
    arena = Arena(pin=True)
    tensor = arena.region(8 * MIB).tensor(torch.float32, 0, 2 * MIB)
    assert tensor.is_pinned()
    tensor.copy_(torch.arange(2 * MIB))
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
    arena.close()

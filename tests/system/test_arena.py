"""Regions are aligned, on huge pages, of exact size and private to the process. A slot has one lease at a time; acquire waits.

Long because regions and slots share one arena, with and without huge pages.
"""

import contextlib
import gc
import mmap
import os
import random
import re
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.helpers import on_gpu

from infinity.errors import BudgetError, UsageError
from infinity.system import arena as arena_module
from infinity.system.arena import HEAP_REGION_NBYTES, Arena, Heap, Slots

MIB = 1 << 20


def mapping_at(address):
    """Return (nbytes, resident nbytes, flags) of the mapping that starts at address, as the kernel reports them, or None."""
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


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs huge pages")
@pytest.mark.parametrize("nbytes, held", [(1, 4096), (4096, 4096), (3 * MIB + 1, 3 * MIB + 4096), (130 * MIB, 130 * MIB)])
def test_a_region_is_aligned_advised_touched_and_of_the_asked_size(nbytes, held):
    arena = Arena()
    region = arena.region(nbytes)
    assert region.address % (2 * MIB) == 0
    assert region.nbytes == arena.nbytes == region.buffer.nbytes == held
    size, resident, flags = mapping_at(region.address)
    assert (size, resident) == (held, held)
    assert {"hg", "dc"} <= set(flags)  # huge pages; no copy on fork
    assert not any(bytes(region.buffer[:4096]))
    arena.close()
    assert not is_mapped(region.address)


def test_an_arena_has_the_asked_size_within_one_page_per_region():
    arena = Arena()
    sizes = [1, 5000, MIB + 7, 9 * MIB]
    for nbytes in sizes:
        arena.region(nbytes)
    assert arena.nbytes == sum(-(-n // 4096) * 4096 for n in sizes)
    arena.close()
    arena.close()
    assert arena.nbytes == 0


def test_tensors_share_the_memory_and_are_created_once():
    region = Arena().region(MIB)
    first = region.tensor(torch.int32, 4096, 10)
    first.copy_(torch.arange(10))
    assert first is region.tensor(torch.int32, 4096, 10)
    assert first.data_ptr() == region.address + 4096
    assert memoryview(region.buffer[4096:4136]).cast("i").tolist() == list(range(10))
    assert region.tensor(torch.float32, 8, 0).shape == (0,)


def test_memory_outlives_its_arena_while_a_tensor_or_buffer_uses_it():
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


def test_a_forked_child_lacks_the_memory_and_unmaps_nothing():
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
    with pytest.raises(ValueError, match="a region of 0 bytes: expected 1 byte or more"):
        Arena().region(0)


class FakeCudart:
    """Records registrations. cudaHostRegister returns `error`."""

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


@pytest.fixture
def devices(monkeypatch):
    """A fake current device of each thread: device 2 in the main thread, device 0 in all others."""
    current = threading.local()
    current.index = 2

    @contextlib.contextmanager
    def device(index):
        before, current.index = torch.cuda.current_device(), index
        yield
        current.index = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "device", device)


def test_pinned_regions_are_registered_once_and_unregistered(monkeypatch, devices):
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    regions = [arena.region(n) for n in (4096, 3 * MIB)]
    assert cudart.registered == [(r.address, r.nbytes) for r in regions]
    arena.close()
    arena.close()
    assert cudart.registered == []


def test_an_unclosed_pinned_region_is_unregistered_before_unmapping(monkeypatch, devices):
    mapped = []

    class Cudart(FakeCudart):
        def cudaHostUnregister(self, address):
            mapped.append(mapping_at(address) is not None)
            super().cudaHostUnregister(address)

    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    arena.region(4 * MIB)
    assert cudart.registered
    del arena
    gc.collect()
    assert cudart.registered == [] and mapped == [True]


def test_a_too_low_memlock_limit_is_named_with_a_remedy(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    monkeypatch.setattr(arena_module.resource, "getrlimit", lambda which: (8 * MIB, resource.RLIM_INFINITY))
    arena = Arena(pin=True)
    with pytest.raises(BudgetError, match=r"pinning 16\.0 MiB .* memlock allows 8\.0 MiB.*ulimit -l unlimited"):
        arena.region(16 * MIB)
    assert arena.nbytes == 0


def test_regions_made_together_are_touched_then_pinned_by_one_thread(monkeypatch, devices):
    class Cudart(FakeCudart):
        def cudaHostRegister(self, address, nbytes, flags):
            resident.append(mapping_at(address)[1])
            threads.add(threading.current_thread().name)
            return super().cudaHostRegister(address, nbytes, flags)

    resident, threads, cudart = [], set(), Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    with arena.together():
        regions = [arena.region(n * MIB) for n in (1, 8, 3)]
    assert cudart.registered == [(r.address, r.nbytes) for r in regions]
    assert resident == [r.nbytes for r in regions] and threads == {"infinity-pin_0"}
    assert arena.region(MIB) and threads == {"infinity-pin_0", threading.current_thread().name}
    arena.close()
    assert cudart.registered == []


def test_a_failed_pin_of_one_region_raises_at_the_end_of_the_block(monkeypatch, devices):
    class Cudart(FakeCudart):
        def cudaHostRegister(self, address, nbytes, flags):
            return 2 if nbytes == 8 * MIB else super().cudaHostRegister(address, nbytes, flags)

    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    with pytest.raises(BudgetError, match="pinning 8.0 MiB"):
        with arena.together():
            for n in (1, 8, 3):
                arena.region(n * MIB)
    assert len(cudart.registered) == 2
    arena.close()
    assert cudart.registered == []


def test_regions_after_a_failed_pin_are_not_touched(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    arena = Arena(pin=True)
    with pytest.raises(BudgetError, match="pinning 1.0 MiB"):
        with arena.together():
            arena.region(MIB)
            arena._pinning[1][0].exception()  # after the first one has failed
            arena.region(8 * MIB)
    assert arena.nbytes == MIB
    arena.close()


def test_any_thread_pins_for_the_device_on_which_the_arena_was_made(monkeypatch, devices):
    """In a new thread device 0 is current. A CUDA call there makes a context of some hundred MiB on device 0, for each rank."""

    class Cudart(FakeCudart):
        def cudaHostRegister(self, address, nbytes, flags):
            seen.append((threading.current_thread().name, torch.cuda.current_device()))
            return super().cudaHostRegister(address, nbytes, flags)

        def cudaHostUnregister(self, address):
            seen.append((threading.current_thread().name, torch.cuda.current_device()))
            super().cudaHostUnregister(address)

    seen, cudart = [], Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(pin=True)
    with arena.together():
        arena.region(MIB)
    with ThreadPoolExecutor(1, "another") as pool:
        assert pool.submit(torch.cuda.current_device).result() == 0
        pool.submit(arena.region, MIB).result()
        pool.submit(arena.close).result()
        assert pool.submit(torch.cuda.current_device).result() == 0
    assert seen == [("infinity-pin_0", 2)] + 3 * [("another_0", 2)] and not cudart.registered


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("places", [{}, {"param_tier": "nvme", "optimizer_state_tier": "nvme"}], ids=str)
def test_an_engine_has_no_context_on_another_device(places, tmp_path):
    program = f"""
import torch, infinity
torch.cuda.set_device(1)
with infinity.init(infinity.Config(device="cuda:1", swap_dirs={str(tmp_path)!r}, dtype="fp32", chunk_mib=1, update="deferred", **{places})):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
optimizer = infinity.AdamW(model.parameters(), max_grad_norm=1.0)
for _ in range(3):
    model(torch.ones(4, 512, device="cuda:1")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
has_trained = torch._C._cuda_hasPrimaryContext(0)
saving = infinity.save({str(tmp_path / "saved")!r}, model, optimizer, wait=False)
model(torch.ones(4, 512, device="cuda:1")).sum().backward()
optimizer.step()
saving.wait()
has_saved = torch._C._cuda_hasPrimaryContext(0)
infinity.load({str(tmp_path / "saved")!r}, model, optimizer)
infinity.engine_of(model).close()
found = has_trained, has_saved, torch._C._cuda_hasPrimaryContext(0)
assert torch._C._cuda_hasPrimaryContext(1) and not any(found), found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


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


def test_a_slot_is_refused_after_its_release():
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
def test_a_tensor_beyond_the_end_of_a_slot_is_refused(offset_nbytes, numel):
    slot = Slots(Arena(), "weight", 4096, 2).acquire()
    with pytest.raises(ValueError, match="of a slot of 4096"):
        slot.tensor(torch.float32, offset_nbytes, numel)


class Waiting(threading.Thread):
    """A thread in acquire(). `entered` is set just before the wait. `result` is the slot or the error."""

    def __init__(self, slots):
        super().__init__(daemon=True)
        self.entered = threading.Event()
        self.slots = slots
        condition, wait_for = slots._changed, slots._changed.wait_for

        def entering(predicate, timeout=None):
            self.entered.set()  # the condition's lock is held: no slot can be released before the wait
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


def test_close_wakes_waiting_threads_and_leaves_leases_valid():
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
    """32 threads take 1,000 leases each of 5 slots. Each thread writes a byte and reads the same byte back."""
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


PAGE = 4096


def places(pieces):
    """(offset, nbytes) of each piece, in bytes."""
    return [(piece.offset_nbytes, piece.nbytes) for piece in pieces]


def test_a_request_beyond_the_address_space_returns_none():
    heap = Heap(Arena(), 1 << 60)
    assert heap.take(1 << 50) is None  # more than the address space
    assert heap.take(PAGE) is not None and heap.nbytes == HEAP_REGION_NBYTES


def test_pieces_are_consecutive_whole_pages():
    heap = Heap(Arena(), MIB)
    assert places(heap.take(n) for n in (1, PAGE, PAGE + 1, 0)) == [(0, PAGE), (PAGE, PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE)]
    assert (heap.used_nbytes, heap.peak_nbytes, heap.free_nbytes) == (5 * PAGE, 5 * PAGE, MIB - 5 * PAGE)


def test_a_piece_is_a_view_of_its_region():
    heap = Heap(Arena(), MIB)
    first, second = heap.take(PAGE), heap.take(2 * PAGE)
    second.buffer[:] = bytes([7]) * 2 * PAGE
    assert second.address == first.address + PAGE and len(first.buffer) == PAGE
    assert bytes(first.region.buffer[: 4 * PAGE]) == bytes(PAGE) + bytes([7]) * 2 * PAGE + bytes(PAGE)


def test_free_gaps_join_in_every_order_of_release():
    heap = Heap(Arena(), 8 * PAGE)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [0, 2, 1, 3]):
        pieces = [heap.take(2 * PAGE) for _ in range(4)]
        assert heap.take(1) is None
        for index in order:
            heap.give_back(pieces[index])
        assert heap.used_nbytes == 0
        whole = heap.take(8 * PAGE)
        assert places([whole]) == [(0, 8 * PAGE)]
        heap.give_back(whole)


def test_the_first_large_enough_gap_is_used():
    heap = Heap(Arena(), 10 * PAGE)
    pieces = [heap.take(n * PAGE) for n in (1, 2, 1, 3, 1, 2)]
    for index in (0, 1, 3):
        heap.give_back(pieces[index])
    assert places(heap.take(n * PAGE) for n in (3, 1, 2)) == [(0, 3 * PAGE), (4 * PAGE, PAGE), (5 * PAGE, 2 * PAGE)]
    assert heap.take(1) is None and heap.used_nbytes == heap.peak_nbytes == 10 * PAGE


def test_regions_are_allocated_on_demand_within_the_budget():
    arena = Arena()
    heap = Heap(arena, 150 * MIB + 5000)
    assert (heap.budget_nbytes, heap.nbytes, arena.nbytes) == (150 * MIB + PAGE, 0, 0)
    sizes = []
    for nbytes in (PAGE, 60 * MIB, 70 * MIB, 4 * MIB, 12 * MIB, 4 * MIB - PAGE, PAGE):
        assert heap.take(nbytes) is not None
        sizes.append(heap.nbytes)
    assert sizes == [64 * MIB, 64 * MIB, 134 * MIB, *[150 * MIB + PAGE] * 4]
    assert arena.nbytes == heap.nbytes == heap.budget_nbytes == heap.used_nbytes
    assert heap.take(1) is None


def test_a_piece_beyond_the_budget_is_refused_without_allocation():
    arena = Arena()
    heap = Heap(arena, 3 * PAGE)
    assert heap.take(3 * PAGE + 1) is None and arena.nbytes == 0
    assert Heap(arena, 0).take(1) is None and Heap(arena, PAGE - 1).take(1) is None


def test_a_failed_pin_leaves_the_heap_unchanged(monkeypatch, devices):
    cudart = FakeCudart(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    heap = Heap(Arena(pin=True), MIB)
    with pytest.raises(BudgetError, match="pinning 1.0 MiB"):
        heap.take(1)
    assert (heap.nbytes, heap.used_nbytes, heap.peak_nbytes) == (0, 0, 0)
    cudart.error = 0
    assert places([heap.take(1)]) == [(0, PAGE)]


def test_empty_regions_are_freed_for_a_larger_region():
    arena = Arena()
    heap = Heap(arena, 200 * MIB)
    pieces = [heap.take(60 * MIB) for _ in range(3)]
    for piece in pieces:
        heap.give_back(piece)
    assert heap.take(150 * MIB) is not None and arena.nbytes == heap.nbytes <= 200 * MIB


def test_empty_regions_stay_if_freeing_them_is_not_enough():
    """A refused request must not free regions that are already touched and pinned."""
    arena = Arena()
    heap = Heap(arena, 200 * MIB)
    pieces = [heap.take(60 * MIB) for _ in range(3)]
    for piece in pieces[1:]:
        heap.give_back(piece)
    before = arena.nbytes
    assert heap.take(150 * MIB) is None and heap.take(201 * MIB) is None and arena.nbytes == heap.nbytes == before
    assert heap.take(130 * MIB) is not None and arena.nbytes == heap.nbytes <= 200 * MIB


def test_pieces_of_many_threads_never_overlap():
    """8 threads take 400 pieces each. Each thread fills its pieces and finds them unchanged."""
    heap, wrong = Heap(Arena(), 64 * PAGE), []

    def work(name):
        chance, held = random.Random(name), []
        for _ in range(400):
            piece = heap.take(chance.randrange(1, 6 * PAGE))
            if piece is not None:
                piece.buffer[:] = bytes([name]) * piece.nbytes
                held.append(piece)
            if held and (piece is None or chance.random() < 0.5):
                piece = held.pop(chance.randrange(len(held)))
                if bytes(piece.buffer) != bytes([name]) * piece.nbytes:
                    wrong.append(name)
                heap.give_back(piece)
        for piece in held:
            heap.give_back(piece)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and heap.used_nbytes == 0 and heap.nbytes == 64 * PAGE
    assert places([heap.take(64 * PAGE)]) == [(0, 64 * PAGE)]

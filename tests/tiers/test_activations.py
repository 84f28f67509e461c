"""Saved activations are restored with the same bits, for any storage, budget, drive and order.

Long because tests of the class, of the engine and of faults share the helpers that move storages and check the rest.
"""

import errno
import gc
import hashlib
import itertools
import queue
import random
import re
import resource
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from support import ranks
from support.faults import assert_says_what_failed, no_hang, nothing_left, our_threads
from support.helpers import assert_same_bits, assert_same_states, everything_in, states_of, training
from support.models import TRAITS, H, Model, gpt_step, inputs, loss_of, mlp, tiny_gpt
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from aio_ext import _aio
from infinity.errors import BudgetError, SwapError, UsageError
from infinity.sizes import format_bytes
from infinity.system.arena import Arena
from infinity.system.swap import Swap
from infinity.tiers import activations as module
from infinity.tiers.activations import MIN_NBYTES, Activations
from infinity.tiers.saved_storage import StorageState

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PAGE, MIB = 4096, 1 << 20
N = MIN_NBYTES  # bytes of the smallest storage that moves
ON_DEVICE = (StorageState.DEVICE, StorageState.LEAVING)
BEHIND = 1 + module.NUM_LEAVING  # equal storages on the device: the newest one, and those on their way


@pytest.fixture
def make(tmp_path):
    """Makes Activations, each with its own swap. At the end, closes them and asserts that no file and no thread is left."""
    made, swaps = [], []

    def build(budget=64 * MIB, *, to_nvme=False, on_demand=False):
        path = tmp_path / f"swap{len(made)}"
        path.mkdir()
        swaps.append(Swap([path]))
        swaps[-1].reserve()
        made.append(Activations(Arena(), None if on_demand else swaps[-1], CPU, budget, to_nvme=to_nvme, on_demand=on_demand))
        return made[-1]

    before = our_threads()
    yield build
    for activations, swap in zip(made, swaps, strict=True):
        activations.close()
        swap.close()
    assert [name for name in everything_in(tmp_path) if "/" in name] == []
    assert {t for t in our_threads() - before if isinstance(t, threading.Thread)} == set()


def filled(value, nbytes=N):
    return torch.full((nbytes,), value % 256, dtype=torch.uint8)


def is_filled(tensor, value, nbytes=N):
    return torch.equal(tensor, filled(value, nbytes))


def push_out(activations, *saved):
    """Saves other tensors until `saved` have left the device and all writes to NVMe are over. Returns the others."""
    others = []
    while any(one.stored.state in ON_DEVICE for one in saved):
        others.append(activations.save(filled(255, activations._largest_nbytes)))
    activations.store.writer.drain()
    return others


def save_many(activations, values, nbytes=N):
    """Saves storages without other references."""
    return [activations.save(filled(value, nbytes)) for value in values]


def transfers(activations, monkeypatch):
    """Records later transfers in order: ("write", number of the storage), ..."""
    seen = []
    for op in ("read", "write"):
        move = getattr(activations.store.swap, op)

        def recorded(*arguments, op=op, move=move, what, **options):
            seen.append((op, int(what.split()[-1].rstrip(":"))))
            return move(*arguments, what=what, **options)

        monkeypatch.setattr(activations.store.swap, op, recorded)
    return seen


# ---- bytes ----

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, ::2],
    "offset": lambda x: x[100:, 3:],
    "flat part": lambda x: x.view(-1)[7:40000],
    "expanded": lambda x: x[5:90].expand(3, -1, -1),
    "one element, expanded": lambda x: x[3, 4].expand(256, 256),
    "overlapping": lambda x: x.as_strided((400, 100), (7, 1), 11),
}


@pytest.mark.slow
@pytest.mark.parametrize("to_nvme", [False, True], ids=["host", "nvme"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_restored_with_its_shape_strides_and_bytes(make, view, to_nvme):
    activations = make(to_nvme=to_nvme)
    x = torch.randn(256, 256)
    saved = activations.save(VIEWS[view](x))
    expected, layout = VIEWS[view](x).clone(), VIEWS[view](x)
    layout = layout.shape, layout.stride(), layout.storage_offset(), layout.dtype
    del x
    others = push_out(activations, saved)
    assert saved.stored.state is (StorageState.NVME if to_nvme else StorageState.HOST)
    back = activations.restore(saved)
    assert (back.shape, back.stride(), back.storage_offset(), back.dtype) == layout
    assert torch.equal(back, expected)
    assert all(is_filled(activations.restore(other), 255, 256 * 256 * 4) for other in others)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_restored_with_its_bytes_including_nans(make, dtype):
    activations = make(to_nvme=True)
    bytes_ = torch.randint(256, (N,), dtype=torch.uint8) & (1 if dtype is torch.bool else 255)
    saved = activations.save(bytes_.clone().view(dtype))
    others = push_out(activations, saved)
    back = activations.restore(saved)
    assert back.dtype is dtype and torch.equal(back.view(torch.uint8), bytes_)
    del others


@pytest.mark.parametrize("nbytes", [N, N + 1, N + PAGE - 1, N + PAGE, MIB - 1, 3 * MIB + 12345])
def test_storages_of_any_size_are_restored(make, nbytes):
    activations = make(to_nvme=True)
    expected = [torch.randint(256, (nbytes,), dtype=torch.uint8) for _ in range(6)]
    saved = [activations.save(x.clone()) for x in expected]
    for one, x in reversed([*zip(saved, expected)]):
        assert torch.equal(activations.restore(one), x)
    assert activations.stats()["moved_nbytes"] == 5 * nbytes  # the newest stays
    pages = -(-nbytes // PAGE)
    assert pages <= activations.stats()["nvme_nbytes"] / PAGE / (6 - BEHIND) <= pages * 9 / 8  # similar sizes share extents


def test_views_of_one_storage_move_once_and_share_a_storage_again(make):
    activations = make()
    x = torch.randn(256, 256)
    expected = x.clone()
    views = [activations.save(view) for view in (x, x.t(), x[:128], x)]
    del x
    others = push_out(activations, *views)
    assert activations.stats()["moved_nbytes"] == 256 * 256 * 4 * (1 + len(others) - 1)
    back = [activations.restore(view) for view in views]
    assert len({tensor.untyped_storage()._cdata for tensor in back}) == 1
    for tensor, want in zip(back, (expected, expected.t(), expected[:128], expected)):
        assert torch.equal(tensor, want)


def test_a_tensor_saved_again_in_a_later_forward_pass_moves_once(make):
    activations = make()
    x = filled(3)
    first = activations.save(x)
    others = push_out(activations, first)
    moved = activations.stats()["moved_nbytes"]
    activations.keep_on_device([])
    again = activations.save(x)
    assert again.stored is first.stored and activations.stats()["moved_nbytes"] == moved
    del x, others
    assert is_filled(activations.restore(again), 3)


class Subclass(torch.Tensor):
    pass


STAYS = {
    "small": lambda: torch.zeros(N - 1, dtype=torch.uint8),
    "less than a quarter of its storage": lambda: torch.zeros(4 * N, dtype=torch.uint8)[: N - 1],
    "one element": lambda: torch.zeros(N)[5],
    "no element": lambda: torch.zeros(N)[:0],
    "expanded element of its own": lambda: torch.zeros(1).expand(N),
    "subclass": lambda: torch.zeros(N).as_subclass(Subclass),
    "parameter": lambda: nn.Parameter(torch.zeros(N)),
    "sparse": lambda: torch.eye(N).to_sparse(),
    "compressed": lambda: torch.ones(256, 256).to_sparse_csr(),
    "conjugate": lambda: torch.zeros(N, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(N, dtype=torch.complex64).conj().imag,
    "on another device": lambda: torch.zeros(N, device="meta"),
}
STAYS["sparse"] = lambda: torch.eye(256).to_sparse()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", STAYS)
def test_small_and_special_tensors_stay_on_the_device(make, kind):
    activations = make()
    assert activations.save(STAYS[kind]()) is None
    assert activations.stats() == {"moved_nbytes": 0, "host_nbytes": 0, "host_peak_nbytes": 0, "nvme_nbytes": 0}


def test_inference_tensors_and_buffers_stay_on_the_device(make):
    activations = make()
    with torch.inference_mode():
        x = filled(1)
    assert activations.save(x) is None
    buffer, other = filled(2), filled(2)
    activations.keep_on_device([buffer])
    assert activations.save(buffer) is None and activations.save(buffer.view(-1, 2)) is None
    assert activations.save(other) is not None
    activations.keep_on_device([])
    assert activations.save(buffer) is not None


def test_a_view_of_a_quarter_of_a_storage_moves_the_storage(make):
    activations = make()
    x = torch.randn(N)
    assert activations.save(x[N // 2 : 3 * N // 4]) is not None
    assert activations.save(x[N // 2 : 3 * N // 4 - 1]) is None


# ---- identity ----


@pytest.mark.parametrize("to_nvme", [False, True], ids=["host", "nvme"])
def test_restore_returns_an_original_that_is_alive_and_reads_nothing(make, monkeypatch, to_nvme):
    activations = make(to_nvme=to_nvme)
    x = filled(7)
    saved = activations.save(x)
    others = push_out(activations, saved)
    seen = transfers(activations, monkeypatch)
    back = activations.restore(saved)
    assert back.untyped_storage()._cdata == x.untyped_storage()._cdata and seen == []
    del back, x, others
    assert is_filled(activations.restore(saved), 7)


def test_storages_that_reuse_an_address_are_told_apart(make):
    activations = make()
    saved = []
    for value in range(200):
        x = filled(value)
        saved.append(activations.save(x))
        del x
    assert len({one.stored for one in saved}) == len(saved) == activations._num_stored
    for value, one in reversed([*enumerate(saved)]):
        assert is_filled(activations.restore(one), value)


def test_each_version_of_a_storage_is_kept(make):
    activations = make()
    x = filled(1)
    old = activations.save(x)
    others = push_out(activations, old)
    x.add_(1)
    new = activations.save(x)
    x.add_(1)
    newest = activations.save(x)
    del x
    others += push_out(activations, new, newest)
    assert (old.versions, new.versions, newest.versions) == ((0, 2), (1, 2), (2, 2))
    assert is_filled(activations.restore(newest), 3)
    assert old.stored is not new.stored is not newest.stored


def test_a_change_through_a_view_is_seen_after_the_tensor_is_gone(make):
    activations = make()
    x = filled(1)
    saved, view = activations.save(x), x[:10]
    del x
    assert saved.versions == (0, 0)
    view.zero_()
    assert saved.versions == (0, 1)


def test_the_watch_of_a_version_keeps_no_storage_alive(make):
    activations = make()
    x = filled(1)
    storage, saved = StorageWeakRef(x.untyped_storage()), activations.save(x)
    del x
    others = push_out(activations, saved)
    assert storage.expired() and saved.versions == (0, 0) and len(others) == BEHIND


def test_parts_of_a_storage_with_own_version_counters_are_kept_apart(make):
    activations = make()
    both = torch.zeros(2 * N, dtype=torch.uint8)
    first, second = both.unsafe_chunk(2)
    first.add_(1)
    saved = activations.save(first)
    others = push_out(activations, saved)
    second.add_(2)
    late = activations.save(second)
    del both, first, second
    others += push_out(activations, saved, late)
    assert is_filled(activations.restore(saved), 1) and is_filled(activations.restore(late), 2)


def test_an_original_that_grows_after_its_copy_is_restored(make):
    activations = make()
    x = filled(5)
    saved = activations.save(x)
    others = push_out(activations, saved)
    x.untyped_storage().resize_(8 * N)
    assert is_filled(activations.restore(saved), 5)
    del x
    assert is_filled(activations.restore(saved), 5)
    del others


def test_an_original_that_grows_before_its_copy_overwrites_no_neighbour(make):
    activations = make(16 * N)
    first, *neighbours = save_many(activations, range(8))  # contiguous in host memory
    assert [one.stored.state for one in (first, *neighbours[:3])] == [StorageState.HOST] * 4
    x = filled(77)
    saved = activations.save(x)
    del first
    activations.keep_on_device([])
    activations.store.heap.give_back(activations._take(N))  # frees memory whose transfers are over
    x.untyped_storage().resize_(6 * N)
    x.untyped_storage().fill_(77)
    others = push_out(activations, saved)
    assert [activations.restore(one)[0].item() for one in neighbours] == [1, 2, 3, 4, 5, 6, 7]
    assert is_filled(activations.restore(saved), 77)
    del others


def test_an_original_that_shrinks_after_its_copy_is_restored_whole(make):
    activations = make()
    x = filled(5)
    saved = activations.save(x)
    others = push_out(activations, saved)
    x.untyped_storage().resize_(0)
    assert is_filled(activations.restore(saved), 5)
    del others


def test_an_original_that_shrinks_before_its_copy_is_an_error(make):
    activations = make()
    x = filled(5)
    saved = activations.save(x)
    x.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, UsageError), match="storage"):
        activations.restore(saved)


# ---- places of storages ----


def test_the_device_holds_only_the_newest_storages_and_those_that_leave(make):
    """The storages have no other reference. The bound is two storages of the largest size, and those on their way."""
    activations = make()
    sizes = [N, 3 * N, N, N, N, 8 * N, 2 * N, N, 7 * N, 8 * N, 8 * N, 8 * N, 4 * N, 2 * N, N, *[N] * 20]
    alive, saved, staying, sent = [], [], [], []
    for number, nbytes in enumerate(sizes):
        x = filled(0, nbytes)
        alive.append(StorageWeakRef(x.untyped_storage()))
        saved.append(activations.save(x))
        del x
        staying = [n for n in [*staying, number] if sum(sizes[n + 1 : number + 1]) < sizes[n]]
        sent += [n for n in range(number + 1) if n not in staying and n not in sent]
        expected = sorted(staying + sent[-module.NUM_LEAVING :])
        assert [n for n, storage in enumerate(alive) if not storage.expired()] == expected
        assert sum(sizes[n] for n in staying) < 2 * max(sizes[: number + 1])
    assert activations.stats()["moved_nbytes"] == sum(sizes) - N


def test_three_equal_storages_at_most_are_on_the_device(make):
    activations = make()
    alive, counts, saved = [], [], []
    for value in range(6):
        x = filled(value)
        alive.append(StorageWeakRef(x.untyped_storage()))
        saved.append(activations.save(x))
        del x
        counts.append(sum(not storage.expired() for storage in alive))
    assert counts == [1, 2, 3, 3, 3, 3]
    assert [one.stored.state.value for one in saved] == ["host"] * 3 + ["leaving"] * 2 + ["device"]


def test_slow_copies_change_no_byte_and_keep_the_bound_of_the_device(make):
    activations = make()
    gate = threading.Semaphore(0)
    activations.copies.on_job = gate.acquire
    alive, saved = [], []
    for value in range(6):
        x = filled(value)
        alive.append(StorageWeakRef(x.untyped_storage()))
        gate.release()  # each save lets one copy run
        saved.append(activations.save(x))
        x = None
        assert sum(not storage.expired() for storage in alive) <= BEHIND + 1
    gate.release(100)
    assert [is_filled(activations.restore(one), value) for value, one in enumerate(saved)] == [True] * 6


def test_dropped_tensors_free_host_memory_and_nvme_for_the_next_step(make):
    activations = make(8 * N, to_nvme=True)
    rooms = []
    for step in range(6):
        activations.keep_on_device([])
        saved = save_many(activations, range(step, step + 20))
        for value, one in reversed([*enumerate(saved, step)]):
            assert is_filled(activations.restore(one), value)
        rooms.append(activations.stats()["nvme_nbytes"])
        assert activations.store.heap.nbytes <= 8 * N
        del saved, one
    assert rooms == [(20 - BEHIND) * N] * 6
    activations.keep_on_device([])
    activations.store.writer.drain()
    activations.copies.drain()
    assert activations.store.storages == {} and activations._by_key == {}
    activations.store.heap.give_back(activations._take(8 * N))  # only memory of ended transfers is still taken
    assert activations.store.heap.used_nbytes == 0


def test_a_graph_dropped_without_backward_frees_all_its_storages(make):
    activations = make(6 * N)
    _aio._inject("write", 0, -1, None, delay=0.005)
    for num in range(1, 16):
        saved = save_many(activations, range(num))
        if num > 3:
            activations.restore(saved[num // 2])
        del saved
        activations.keep_on_device([])
        assert activations.store.storages == {}
        assert activations._staying == activations._leaving == activations._coming == {}
    activations.store.heap.give_back(activations._take(6 * N))
    assert activations.store.heap.used_nbytes == 0


def test_any_thread_may_drop_handles_while_other_tensors_are_saved(make):
    activations = make(16 * N)
    bags, wrong = [queue.SimpleQueue() for _ in range(4)], []

    def drop(bag):
        while bag.get() is not None:
            gc.collect(0)

    threads = [threading.Thread(target=drop, args=(bag,)) for bag in bags]
    for thread in threads:
        thread.start()
    try:
        for value in range(200):
            saved = activations.save(filled(value))
            bags[value % 4].put(activations.save(filled(value + 1)))
            if value % 3 == 0 and not is_filled(activations.restore(saved), value):
                wrong.append(value)
            bags[(value + 1) % 4].put(saved)
            del saved
    finally:
        for bag in bags:
            bag.put(None)
        for thread in threads:
            thread.join()
    assert not wrong
    activations.keep_on_device([])
    assert activations.store.storages == {} and activations.store.heap.nbytes <= 16 * N


def test_an_extent_is_reused_before_its_last_read_is_over(make):
    """Drops storages during their prefetch. Another storage writes to their extents at once."""
    activations = make(8 * N, to_nvme=True)
    saved = save_many(activations, range(12))
    activations.store.writer.drain()
    _aio._inject("read", 0, -1, None, delay=0.02)
    activations.restore(saved[9])
    assert StorageState.READING in [one.stored.state for one in saved]
    del saved
    again = save_many(activations, range(100, 130))
    assert activations.stats()["nvme_nbytes"] <= 28 * N
    for value, one in reversed([*enumerate(again, 100)]):
        assert is_filled(activations.restore(one), value)


# ---- budgets and order ----


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3 * N, 4 * N, 7 * N + 1234, 20 * N])
@pytest.mark.parametrize("to_nvme", [False, True], ids=["host", "nvme"])
def test_host_memory_stays_within_its_budget_and_all_bytes_are_restored(make, budget, to_nvme):
    activations = make(budget, to_nvme=to_nvme)
    for step in range(3):
        saved = []
        for value in range(15):
            saved.append(activations.save(filled(value + step)))
            assert activations.store.heap.nbytes <= budget and activations.store.heap.peak_nbytes <= budget
        for value in range(14, -1, -1):
            assert is_filled(activations.restore(saved.pop()), value + step)
            assert activations.store.heap.nbytes <= budget and activations.store.heap.peak_nbytes <= budget


@pytest.mark.parametrize("order", ["forward", "random", "twice"])
def test_any_order_of_use_restores_the_bytes_with_a_small_budget(make, order):
    activations = make(4 * N)
    saved = save_many(activations, range(30))
    numbers = {"forward": [*range(30)], "random": random.Random(3).sample(range(30), 30), "twice": [*range(29, -1, -1)] * 2}[order]
    for value in numbers:
        assert is_filled(activations.restore(saved[value]), value)
        assert activations.store.heap.peak_nbytes <= 4 * N


def test_the_oldest_storages_are_written_first(make, monkeypatch):
    activations = make(4 * N)
    seen = transfers(activations, monkeypatch)
    saved = save_many(activations, range(12))
    activations.store.writer.drain()
    written = [number for op, number in seen]
    assert written == [*range(len(written))] and 12 - 4 - 1 <= len(written) <= 12 - BEHIND
    assert [one.stored.state for one in saved[: len(written)]] == [StorageState.NVME] * len(written)


def test_activations_for_nvme_are_written_in_the_order_of_saves(make, monkeypatch):
    activations = make(to_nvme=True)
    seen = transfers(activations, monkeypatch)
    saved = save_many(activations, range(8))
    activations.store.writer.drain()
    assert seen == [("write", number) for number in range(8 - BEHIND)]
    assert [one.stored.state.value for one in saved] == ["nvme"] * 5 + ["leaving"] * 2 + ["device"]


def test_nothing_is_written_if_host_memory_has_room_for_all(make, monkeypatch):
    activations = make(64 * N)
    seen = transfers(activations, monkeypatch)
    saved = save_many(activations, range(20))
    activations.store.writer.drain()
    assert seen == [] and activations.stats()["nvme_nbytes"] == 0 and len(saved) == 20


@pytest.mark.parametrize("budget", [4 * N, 6 * N, 10 * N])
def test_backward_reads_each_storage_once_from_the_newest_on(make, monkeypatch, budget):
    activations = make(budget, to_nvme=True)
    saved = save_many(activations, range(16))
    activations.store.writer.drain()
    seen = transfers(activations, monkeypatch)
    for value in range(15, -1, -1):
        assert is_filled(activations.restore(saved.pop()), value)
    assert seen == [("read", number) for number in range(15 - BEHIND, -1, -1)]


def test_a_refusal_names_the_storage_and_the_budget(make):
    activations = make(3 * N)
    saved = save_many(activations, range(3))
    with pytest.raises(BudgetError) as caught:
        saved += save_many(activations, range(3), 5 * N)
    assert str(caught.value) == (
        "a saved activation of 320.0 KiB does not fit into the host_memory left for activations, 192.0 KiB. "
        "Raise host_memory, or use activation_tier='device'."
    )


def test_smaller_storages_are_saved_after_a_refusal(make):
    activations = make(3 * N)
    saved = []
    with pytest.raises(BudgetError):
        saved += [activations.save(filled(value, 5 * N)) for value in range(3)]
    del saved
    activations.keep_on_device([])
    assert activations.store.storages == activations._staying == {}
    saved = save_many(activations, range(9))
    assert all(is_filled(activations.restore(one), value) for value, one in reversed([*enumerate(saved)]))


def places(saved):
    return [one.stored.state.value for one in saved]


def test_on_demand_storages_without_room_in_host_memory_stay(make):
    activations = make(2 * N, on_demand=True)
    saved = save_many(activations, range(3))
    assert places(saved) == ["leaving"] * 2 + ["device"]
    saved += save_many(activations, [3])
    assert places(saved) == ["host", "leaving"] + ["device"] * 2  # the oldest copy is finished, as if another storage left
    saved += save_many(activations, [4, 5])
    assert places(saved) == ["host"] * 2 + ["device"] * 4
    assert all(is_filled(activations.restore(one), value) for value, one in reversed([*enumerate(saved)]))


def test_on_demand_a_small_storage_leaves_although_a_large_one_stays(make):
    activations = make(3 * N, on_demand=True)
    sizes = [5 * N, N, 4 * N, N, N, N, N, 4 * N, N]
    saved = [activations.save(filled(number, nbytes)) for number, nbytes in enumerate(sizes)]
    assert [one.stored.number for one in saved if one.stored.state is not StorageState.DEVICE] == [1, 3, 4]
    assert activations.store.heap.used_nbytes == activations.stats()["moved_nbytes"] == 3 * N
    for number, nbytes in reversed([*enumerate(sizes)]):
        assert is_filled(activations.restore(saved.pop()), number, nbytes)
    activations.drain()
    assert activations.store.storages == activations._staying == activations._by_key == {}


def test_on_demand_the_oldest_storage_leaves_once_there_is_room(make):
    activations = make(2 * N, on_demand=True)
    saved = save_many(activations, range(6))
    del saved[:2]
    saved += save_many(activations, [6])
    assert [one.stored.number for one in saved if one.stored.state is not StorageState.DEVICE] == [2, 3]
    assert all(is_filled(activations.restore(one), value) for value, one in reversed([*enumerate(saved, 2)]))


def test_prefetched_storages_make_room_for_a_storage_that_is_needed_now(make):
    activations = make(8 * N, to_nvme=True)
    small, (large, *_) = save_many(activations, range(16)), save_many(activations, range(40, 45), 4 * N)
    del _
    activations.keep_on_device([])
    activations.store.writer.drain()
    activations.restore(small[13])
    assert is_filled(activations.restore(large), 40, 4 * N)
    assert all(is_filled(activations.restore(one), value) for value, one in enumerate(small))


@pytest.mark.slow
def test_a_large_storage_uses_the_memory_of_freed_small_ones(make):
    activations = make(200 * MIB)
    saved = save_many(activations, range(6), 60 * MIB)
    del saved
    activations.keep_on_device([])
    saved = save_many(activations, range(2), 100 * MIB)
    assert len(saved) == 2


# ---- races ----


def jitter(seed, most=0.002):
    chance = random.Random(seed)
    return lambda: time.sleep(chance.random() * most)  # a random delay, no synchronisation


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "budget, to_nvme, on_demand",
    [(4 * N, False, False), (4 * N, True, False), (64 * N, True, False), (64 * N, False, False), (4 * N, False, True)],
)
def test_random_orders_sizes_and_delays_restore_the_bytes(make, budget, to_nvme, on_demand):
    activations = make(budget, to_nvme=to_nvme, on_demand=on_demand)
    activations.copies.on_job, activations.store.writer.on_job = jitter(1), jitter(2)
    _aio._inject("write", 0, -1, None, every=3, delay=0.002)
    _aio._inject("read", 0, -1, None, every=2, delay=0.002)
    chance, alive, value = random.Random(budget), {}, 0
    for _ in range(400):
        if len(alive) < 12 or chance.random() < 0.45:
            nbytes = N + chance.randrange(3) * 777
            alive[value] = activations.save(filled(value, nbytes)), nbytes
            value += 1
        else:
            number = max(alive) if chance.random() < 0.7 else chance.choice([*alive])
            saved, nbytes = alive[number]
            assert is_filled(activations.restore(saved), number, nbytes), number
            if chance.random() < 0.8:
                del alive[number], saved
        assert activations.store.heap.nbytes <= budget
    assert activations.failure.error is None


# ---- through the engine ----

PAGES = 16  # pages of host memory for activations; more go to NVMe
PLACES = ["host", "nvme"]


@pytest.fixture
def everything_moves(monkeypatch):
    monkeypatch.setattr(module, "MIN_NBYTES", 1)


def tighten(engine, num_pages=PAGES, delays=0.0005):
    """Gives activations little host memory, and makes their lanes slow."""
    activations = engine.activations
    if activations is not None:
        activations.store.heap.budget_nbytes = num_pages * PAGE
        if delays:
            activations.copies.on_job, activations.store.writer.on_job = jitter(3, delays), jitter(4, delays)


def given(model, step, grad=True):
    x = inputs(model, step).to(next(model.parameters()).dtype)
    return x.requires_grad_(grad)


def plain_steps(model, optimizer):
    for step in range(2):
        x = given(model, step)
        loss = loss_of(model(x))
        loss.backward()
        yield loss
        yield x.grad
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(model, optimizer):
    for step in range(2):
        first, second = given(model, 3 * step), given(model, 3 * step + 1)
        losses = loss_of(model(first)), loss_of(model(second))
        sum(losses).backward()
        yield from (*losses, first.grad, second.grad)
        optimizer.step()
        optimizer.zero_grad()


def two_backwards(model, optimizer):
    """Two backward passes through one graph: gradients are twice those of one pass."""
    for step in range(2):
        x = given(model, step)
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        yield from (loss, x.grad)
        optimizer.step()
        optimizer.zero_grad()


def first_graph_first(model, optimizer):
    """Two graphs: the backward passes run in the order of the forward passes."""
    first, second = given(model, 0), given(model, 1)
    losses = [loss_of(model(first)), loss_of(model(second))]
    while losses:
        losses.pop(0).backward()
    yield from (first.grad, second.grad)
    optimizer.step()


def evaluation_between(model, optimizer):
    for step in range(2):
        x = given(model, step)
        loss = loss_of(model(x))
        with torch.no_grad():
            yield loss_of(model(given(model, 7, grad=False)))
        loss.backward()
        yield from (loss, x.grad)
        optimizer.step()
        optimizer.zero_grad()


def graphs_not_used(model, optimizer):
    """Keeps the graph of an unused forward pass alive for a while."""
    kept = []
    for step in range(4):
        kept = kept[-1:] + [loss_of(model(given(model, 50 + step)))]
        x = given(model, step)
        loss = loss_of(model(x))
        loss.backward()
        yield from (loss, x.grad)
        optimizer.step()
        optimizer.zero_grad()


def interrupted(model, optimizer):
    """Repeats a backward pass that raised half-way."""

    def raises(grad):
        raise ValueError("half-way")

    for step in range(2):
        x = given(model, step)
        loss = loss_of(model(x))
        y = x * 1
        failing = loss_of(model(y))
        handle = y.register_hook(raises)
        with pytest.raises(ValueError, match="half-way"):
            failing.backward(retain_graph=True)
        optimizer.zero_grad()
        handle.remove()
        failing.backward()
        yield from (failing, x.grad)
        optimizer.step()
        optimizer.zero_grad()
        del loss


def side_output(model, optimizer):
    """One output is unused, another is used twice."""
    for step in range(2):
        x = given(model, step)
        output = model(x)
        unused = output.sin().exp()
        (loss_of(output) + output.cos().mean()).backward()
        yield x.grad
        optimizer.step()
        optimizer.zero_grad()
        del unused


RUNS = {  # name: (steps, options of the optimizer, settings)
    "plain": (plain_steps, {}, {}),
    "backward": (plain_steps, {}, {"update": "backward"}),
    "norm": (plain_steps, {"max_grad_norm": 0.1}, {}),
    "two forwards": (two_forwards, {"accumulation_steps": 1}, {}),
    "two backwards": (two_backwards, {"accumulation_steps": 2}, {}),
    "first graph first": (first_graph_first, {"accumulation_steps": 2}, {}),
    "evaluation": (evaluation_between, {}, {}),
    "graphs not used": (graphs_not_used, {}, {}),
    "interrupted": (interrupted, {}, {"update": "deferred"}),
    "side output": (side_output, {}, {}),
    "weights on nvme": (plain_steps, {}, {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"}),
}


def results(make, directory, place, what=plain_steps, options=None, pages=PAGES, moves=True, **config):
    """Returns (tensors that the run yields, all states). Checks the number of moved bytes."""
    with no_hang(60), training(make, directory, options=options, activation_tier=place, **config) as (model, engine, optimizer):
        tighten(engine, pages)
        found = [tensor.detach().clone() for tensor in what(model, optimizer) if tensor is not None]
        stats = engine.stats()["activation_offload"]
        if place == "device":
            assert stats is None
        else:
            assert stats["host_nbytes"] <= pages * PAGE
            if moves is not None:  # None: unknown
                assert (stats["moved_nbytes"] > 0) == moves and (stats["nvme_nbytes"] > 0 or place == "host") >= moves
        return found, states_of(engine, model)


def assert_same_everywhere(make, directory, places=PLACES, **config):
    expected = results(make, directory, "device", **config)
    for place in places:
        got = results(make, directory, place, **config)
        assert len(got[0]) == len(expected[0]) > 0
        for number, (mine, theirs) in enumerate(zip(got[0], expected[0])):
            assert_same_bits(mine, theirs, f"{place}, result {number}")
        assert_same_states(got[1], expected[1], place)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_no_bit_depends_on_the_tier_of_activations(tmp_path, everything_moves, name, dtype):
    what, options, config = RUNS[name]
    assert_same_everywhere(lambda: mlp(8), tmp_path, what=what, options=options, dtype=dtype, **config)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("name", TRAITS)
def test_models_of_all_kinds_train_with_the_same_bits(tmp_path, everything_moves, name):
    assert_same_everywhere(TRAITS[name], tmp_path, places=["nvme"], pages=64, moves=None)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gpt_trains_with_the_same_bits(tmp_path, everything_moves, dtype, checkpointed):
    def steps(model, optimizer):
        for step in range(2):
            yield torch.tensor(gpt_step(model, optimizer, step, 2))

    options = {"accumulation_steps": 2, "max_grad_norm": 0.5}
    assert_same_everywhere(
        lambda: tiny_gpt(checkpoint_activations=checkpointed), tmp_path, what=steps, options=options, dtype=dtype
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_only_the_inputs_of_checkpointed_blocks_leave(tmp_path, everything_moves, use_reentrant):
    """8 blocks, each with one input [64, 24] fp32 without other references. Tensors recomputed in backward stay."""

    def build(self):
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, 4 * H), nn.Tanh(), nn.Linear(4 * H, H)) for _ in range(8))

    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    with training(lambda: Model(build, run, (64, H)), tmp_path, activation_tier="host") as (model, engine, optimizer):
        x = torch.randn(64, H).requires_grad_()
        loss_of(model(x)).backward()
        assert engine.stats()["activation_offload"]["moved_nbytes"] == 7 * 64 * H * 4  # the newest stays on the device
        optimizer.step()


def test_layer_wise_steps_with_offloaded_activations_have_the_same_bits(tmp_path, everything_moves):
    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(4)))

    def steps(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            batches = [tuple(torch.randn(2, 5, H, generator=generator)) for _ in range(3)]
            yield from infinity.accumulate(model, batches, lambda model, batch: (model(batch[0]) - batch[1]).square().mean() / 3)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_everywhere(make, tmp_path, what=steps, options={"accumulation_steps": 3})


def test_fp16_steps_that_overflow_are_skipped_in_every_tier(tmp_path, everything_moves):
    def steps(model, optimizer):
        for step in range(4):
            loss = loss_of(model(given(model, step))) * (1e30 if step == 1 else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.float()

    assert_same_everywhere(lambda: mlp(8), tmp_path, what=steps, dtype="fp16")


def test_parts_of_unsafe_chunk_train_with_the_same_bits(tmp_path):
    """unsafe_chunk gives each part its own version counter. PyTorch's recurrent cells use unsafe_chunk."""

    def build(self):
        self.gates, self.inner = nn.Linear(64, 128), nn.Linear(64, 64)

    def run(self, x):
        first, second = self.gates(x).unsafe_chunk(2, -1)
        first, y = first.sigmoid_(), x
        for _ in range(4):
            y = torch.tanh(self.inner(y))
        return first * y + second.sigmoid_() * y

    assert_same_everywhere(lambda: Model(build, run, (3, 256, 64)), tmp_path, pages=1 << 10)


class ChangedLater(nn.Module):
    """`change` changes an activation after its save and, if `far`, after the activation has left the device."""

    def __init__(self, change, far):
        super().__init__()
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(8))
        self.change, self.far = change, far

    def forward(self, x):
        y = self.first(x)
        z = torch.tanh(y).exp()  # exp saves its result
        out = self.last(z)
        for layer in self.layers if self.far else ():
            out = torch.tanh(layer(out))
        with torch.no_grad():
            self.change(z)
        return out


CHANGES = {
    "itself": lambda z: z.add_(1),
    "a view": lambda z: z[1:].mul_(2),
    "detached": lambda z: z.detach().zero_(),
    "transposed": lambda z: z.t()[0].fill_(3),
}


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize("place", ["device", *PLACES])
@pytest.mark.parametrize("far", [False, True], ids=["at once", "after it left"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_activation_changed_in_place_raises_as_in_plain_pytorch(tmp_path, everything_moves, change, far, place):
    torch.manual_seed(0)
    reference = ChangedLater(CHANGES[change], far)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        reference(torch.randn(3, H)).sum().backward()
    with training(lambda: ChangedLater(CHANGES[change], far), tmp_path, activation_tier=place, update="deferred") as (model, engine, optimizer):
        tighten(engine)
        loss = model(torch.randn(3, H)).sum()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation: .* version 1; expected version 0"):
            loss.backward()
        optimizer.zero_grad()
        model.change = lambda z: None
        model(torch.randn(3, H)).sum().backward()
        optimizer.step()


def test_a_change_between_two_saves_of_one_storage_is_no_error(tmp_path, everything_moves):
    def build(self):
        self.first, self.layers = nn.Linear(H, H), nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def run(self, x):
        y = F.relu_(self.first(x))
        for layer in self.layers:
            y = F.relu_(layer(y).mul_(2))
        return y

    assert_same_everywhere(lambda: Model(build, run), tmp_path)


def test_activations_are_on_nvme_between_forward_and_backward(tmp_path):
    """The bytes on NVMe equal the sum of sizes, and host memory keeps to host_memory."""
    make = lambda: nn.Sequential(*itertools.chain.from_iterable((nn.Linear(64, 64), nn.Tanh()) for _ in range(20)))
    with training(make, tmp_path, activation_tier="nvme", host_memory="4MiB") as (model, engine, optimizer):
        x = torch.randn(512, 64)
        for _ in range(3):
            loss = model(x).square().mean()
            places = [stored.state for stored in engine.activations.store.storages.values()]
            assert len(places) == 21 and set(places[-2:]) <= set(ON_DEVICE)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        assert stats["pinned_host_nbytes"] <= 4 * MIB
        assert stats["activation_offload"]["nvme_nbytes"] == (21 - BEHIND) * 512 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, "auto"])
def test_activations_get_the_host_memory_that_weights_and_states_leave(place, tmp_path):
    """At least a quarter of host_memory. With weights and states on NVMe, most of host_memory: no activation goes to NVMe."""
    make = lambda: nn.Sequential(*itertools.chain.from_iterable((nn.Linear(64, 64), nn.Tanh()) for _ in range(20)))
    places = {} if place == "auto" else {"param_tier": place, "optimizer_state_tier": place}
    with training(make, tmp_path, activation_tier="host", host_memory="6MiB", **places) as (model, engine, optimizer):
        others = engine.arena.nbytes
        for _ in range(2):
            model(torch.randn(768, 64)).square().mean().backward()  # saves 21 tensors of 192 KiB; one or two are not sent
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        assert stats["activation_offload"]["host_peak_nbytes"] > 6 * MIB / 2 and stats["activation_offload"]["nvme_nbytes"] == 0
        assert stats["pinned_host_nbytes"] == others + stats["activation_offload"]["host_nbytes"] <= 6 * MIB


def test_a_refusal_names_the_host_memory_that_is_left(tmp_path):
    with training(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), tmp_path,
                  activation_tier="host", host_memory="1MiB") as (model, engine, optimizer):
        left = re.escape(format_bytes(MIB - engine.arena.nbytes))
        with pytest.raises(BudgetError, match=rf"activation of 2\.0 MiB does not fit into the host_memory left .*, {left}\. Raise"):
            model(torch.randn(8192, 64)).sum()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()


# ---- ranks ----


def train_on_a_rank(folder, place):
    """Trains one rank. Module-level, because another process runs the function by name."""
    module.MIN_NBYTES = 1
    torch.manual_seed(0)
    with infinity.init(ranks.settings(folder, activation_tier=place, **ranks.ON_NVME)):
        model = ranks.gpt()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with infinity.engine_of(model) as engine:
        tighten(engine, 32)
        losses = []
        for step in range(3):
            loss = model(*map(ranks.share, ranks.tokens(step, 0)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        stats = engine.stats()["activation_offload"]
        files = sorted(path.name for path in folder.glob("*/*.swap"))
        return losses, ranks.states_of(engine, model), stats and stats["nvme_nbytes"], files


@pytest.mark.long
def test_two_ranks_with_their_own_files_train_with_the_same_bits(tmp_path):
    world = ranks.World(2, tmp_path)
    folder = tmp_path / "swap"
    folder.mkdir()
    try:
        expected = world.run(train_on_a_rank, folder, "device")
        for place in PLACES:
            got = world.run(train_on_a_rank, folder, place)
            assert [answer[:2] for answer in got] == [answer[:2] for answer in expected]
            assert all(answer[2] > 0 and answer[3] == ["rank0.swap", "rank1.swap"] for answer in got)
    finally:
        world.close()
    assert everything_in(folder) == []


# ---- faults ----

DEVICE_ONLY = {"param_tier": "device", "optimizer_state_tier": "device"}  # only activations use the drive


def chain():
    return nn.Sequential(*itertools.chain.from_iterable((nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))


def train_chain(directory, place="nvme", num_steps=2, begun=lambda engine: None, forwarded=lambda engine: None, **config):
    """Returns (losses, states, number of injected faults). Calls begun(engine) first, and forwarded(engine) after each forward."""
    with training(chain, directory, activation_tier=place, **DEVICE_ONLY | config) as (model, engine, optimizer):
        begun(engine)
        losses = []
        for step in range(num_steps):
            loss = model(torch.full((256, 64), 0.1 * (1 + step))).square().mean()
            forwarded(engine)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, states_of(engine, model), _aio._inject()


FAULTS = [  # (call, injected result, errno of the SwapError or None if the engine recovers)
    ("write", -errno.EIO, errno.EIO),
    ("write", -errno.ENOSPC, errno.ENOSPC),
    ("write", 0.5, None),
    ("read", -errno.EIO, errno.EIO),
    ("read", 0.5, None),
    ("read", 0.0, errno.EIO),
    ("io_submit", -errno.EAGAIN, None),
    ("io_submit", -errno.EIO, errno.EIO),
    ("io_getevents", -errno.EINTR, None),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_one_failed_call_ends_in_the_same_bytes_or_in_a_swap_error(tmp_path, fault):
    call, result, code = fault
    # Backward takes tensors from host memory during their write, and reads all others.
    forwarded = (lambda engine: engine.activations.store.writer.drain()) if call == "read" else lambda engine: None
    expected = train_chain(tmp_path, "device")
    for num_met, nth in enumerate((0, 1, 5, 12, 19, 10_000)):
        _aio._inject(call, nth, 1, result)
        with no_hang(), nothing_left(tmp_path):
            try:
                losses, states, met = train_chain(tmp_path, forwarded=forwarded)
            except OSError as error:
                assert code is not None, f"the engine did not recover from {call} number {nth}: {error!r}"
                assert_says_what_failed(error, code, tmp_path)
                assert "activation " in error.strerror and error.filename.endswith(".swap")
                assert _aio._inject() == 1
                continue
        assert losses == expected[0]
        assert_same_states(states, expected[1], f"{call} number {nth}")
        if not met:
            break
        assert code is None, f"{call} number {nth} failed without an error"
    assert num_met >= 3


def limit_files(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("num_storages", [0, 3, 9])
def test_a_file_that_cannot_grow_is_a_swap_error_in_the_forward_pass(tmp_path, num_storages):
    """Acts like a full disk: the file has room for `num_storages` activations of 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        with no_hang(), nothing_left(tmp_path):
            with pytest.raises(SwapError) as caught:
                train_chain(tmp_path, begun=lambda engine: limit_files(num_storages * (64 << 10) + PAGE))
            limit_files(before)
    finally:
        limit_files(before)
    assert caught.value.errno == errno.EFBIG and str(tmp_path) in caught.value.filename
    assert "ulimit -f" in caught.value.strerror


@pytest.mark.parametrize("num_storages", [0, 3])
def test_training_continues_once_the_file_can_grow(tmp_path, num_storages):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    expected = train_chain(tmp_path, "device", num_steps=1)
    with no_hang(), training(chain, tmp_path, activation_tier="nvme", **DEVICE_ONLY) as (model, engine, optimizer):
        x = torch.full((256, 64), 0.1)
        limit_files(num_storages * (64 << 10) + PAGE)
        try:
            with pytest.raises(SwapError):
                model(x)
        finally:
            limit_files(before)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        assert [loss.item()] == expected[0]
        assert_same_states(states_of(engine, model), expected[1])


def test_close_finishes_running_writes(tmp_path):
    with no_hang(), nothing_left(tmp_path):
        engine = infinity.offload(model := chain(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", activation_tier="nvme", **DEVICE_ONLY))
        infinity.AdamW(model.parameters())
        _aio._inject("write", 0, -1, None, delay=0.01)
        loss = model(torch.ones(256, 64)).sum()
        assert StorageState.WRITING in [stored.state for stored in engine.activations.store.storages.values()]
        engine.close()
        assert engine.activations.store._num_writing == 0
        del loss


def test_backward_after_close_is_refused(tmp_path):
    with no_hang(), nothing_left(tmp_path):
        engine = infinity.offload(model := chain(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", activation_tier="nvme", **DEVICE_ONLY))
        infinity.AdamW(model.parameters())
        x = torch.ones(256, 64, requires_grad=True)
        loss = model(x).sum()
        engine.close()
        with pytest.raises(UsageError, match="the engine is closed"):
            loss.backward()
        del loss
        gc.collect()


def test_restored_tensors_outlive_the_engine(make):
    activations = make()
    saved = activations.save(filled(9))
    others = push_out(activations, saved)
    back = activations.restore(saved)
    activations.close()
    activations.store.swap.close()
    assert is_filled(back, 9)
    del saved, others


def test_restore_after_close_raises_and_does_not_hang(make):
    activations = make(4 * N, to_nvme=True)
    saved = save_many(activations, range(8))
    activations.close()
    activations.store.swap.close()
    for one in saved:
        with pytest.raises((RuntimeError, UsageError), match="closed"):
            activations.restore(one)


@pytest.mark.long
def test_twenty_runs_under_load_and_random_delays_have_equal_bits(tmp_path):
    expected = train_chain(tmp_path, "device", num_steps=1)
    stop = threading.Event()

    def load():
        x = bytes(1 << 20)
        while not stop.is_set():  # without torch: a new thread in torch may change the order of others' sums
            x = hashlib.sha256(x).digest() * (1 << 15)

    threads = [threading.Thread(target=load) for _ in range(1)]
    for thread in threads:
        thread.start()
    try:
        for repeat in range(20):
            place = PLACES[repeat % 2]

            def begun(engine, repeat=repeat):
                engine.activations.store.heap.budget_nbytes = random.Random(repeat).choice([3, 4, 6, 9]) * (64 << 10)
                engine.activations.copies.on_job = jitter(repeat, 0.001)
                engine.activations.store.writer.on_job = jitter(100 + repeat, 0.001)

            losses, states, _ = train_chain(tmp_path, place, num_steps=1, begun=begun)
            assert losses == expected[0], repeat
            assert_same_states(states, expected[1], f"repeat {repeat}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()

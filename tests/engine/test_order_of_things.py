"""Order and threads on which the parts of a step rely. Most tests belong to a row of the invariants in ARCHITECTURE.md."""

import sys
import threading

import pytest
import torch
from support.helpers import NVME, training
from torch import nn

from infinity.plan.record import KINDS, STATES
from infinity.tiers.record_mover import RecordMover

LAYERS = 6


class Stack(nn.Module):
    """Layers of one chunk each. A pass runs each `every`-th layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(LAYERS))

    def forward(self, x, every=1):
        for layer in self.layers[::every]:
            x = layer(x).tanh()
        return x.square().mean()


def train(model, optimizer, num_steps, every=lambda step: 1):
    for step in range(num_steps):
        model(torch.ones(4, 128), every(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """(model, engine, optimizer) after three steps with updates in backward. Each layer is one chunk, all records are on NVMe."""
    monkeypatch.setattr(RecordMover, "is_crowded", lambda records, kind: False)  # otherwise a slow drive puts updates off
    with training(Stack, tmp_path, chunk_mib=1 / 16, host_memory="64MiB", device_memory="1MiB", **NVME) as made:
        model, engine, optimizer = made
        train(model, optimizer, 3)
        engine.flush()
        yield made


def test_a_requested_update_record_has_the_nearest_next_use(trained, monkeypatch):
    """The update counts as begun only after the request. Otherwise the requested states would appear to have the farthest next use."""
    model, engine, optimizer = trained
    request, seen = RecordMover.request, []

    def spied(records, chunk, kind, *, pin=True, **options):
        if kind == STATES and pin:
            distance = records.caches[STATES].next_use
            seen.append((distance(chunk), min(map(distance, engine.registry.chunks))))
        return request(records, chunk, kind, pin=pin, **options)

    monkeypatch.setattr(RecordMover, "request", spied)
    train(model, optimizer, 2)
    assert len(seen) == 2 * LAYERS and all(mine == least for mine, least in seen)


def test_the_thread_that_runs_ops_allocates_and_frees_span_memory(trained, monkeypatch):
    model, engine, optimizer = trained
    threads = {"allocate": [], "free": []}
    for name, seen in threads.items():
        call = getattr(type(engine.tier), name)
        monkeypatch.setattr(
            type(engine.tier), name, lambda tier, span, call=call, seen=seen: (seen.append(threading.get_ident()), call(tier, span))[1]
        )
    train(model, optimizer, 2)
    assert all(len(seen) >= 2 * LAYERS and set(seen) == {threading.get_ident()} for seen in threads.values())


def test_a_gather_of_a_resident_shard_waits_for_earlier_device_work(tmp_path, monkeypatch):
    """Such a shard needs no copy, but the compute stream may still update the shard."""
    queued = []
    with training(Stack, tmp_path, chunk_mib=1 / 16, param_tier="device", optimizer_state_tier="device") as (model, engine, optimizer):
        copy = engine.weights.lanes._run_copy
        monkeypatch.setattr(engine.weights.lanes, "_run_copy", lambda *given: queued.append(copy(given[0], "event of the compute stream")))
        train(model, optimizer, 1)
    assert queued == ["event of the compute stream"] * LAYERS


@pytest.mark.long
def test_distances_may_be_read_while_steps_change_their_route(trained):
    """The thread that grants slots reads distances, without a lock in common with the thread that takes a route or makes a plan."""
    model, engine, optimizer = trained
    asked, errors, over = [], [], threading.Event()

    def ask():
        try:
            while not over.is_set():
                distances = [engine.records.caches[kind].next_use(chunk) for kind in KINDS for chunk in engine.registry.chunks]
                asked.append(all(distance == distance for distance in distances))
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=ask)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        train(model, optimizer, 24, every=lambda step: step % 4 + 1)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not errors and len(asked) > 100 and all(asked)

"""The wait messages of a training step."""

import re
import threading

import pytest
import torch
from support.helpers import NVME, training
from torch import nn

from aio_ext import _aio
from infinity.system import slow_steps as pace
from infinity.system.waits import of_the_program

SECONDS = 20  # a thread that takes longer counts as hanging


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def train(model, optimizer, num_steps):
    for _ in range(num_steps):
        model(torch.ones(4, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def settled(tmp_path):
    """(model, engine, optimizer) after four steps. Each layer is one chunk, all records are on NVMe."""
    with training(Stack, tmp_path, chunk_mib=1 / 16, **NVME) as made:
        train(made[0], made[2], 4)
        yield made


def said_meanwhile(work):
    """All wait messages of a thread that runs `work`, as seen from this thread."""
    thread, said = threading.Thread(target=work), set()
    thread.start()
    while thread.is_alive():
        if (wait := of_the_program()) is not None:
            said.add(str(wait))
        thread.join(0.01)
    return said


def test_a_wait_for_a_slow_read_names_the_chunk_and_the_bytes(settled):
    model, engine, optimizer = settled
    engine.flush()
    _aio._inject("read", 0, 1, None, delay=0.5)
    said = said_meanwhile(lambda: train(model, optimizer, 1))
    pattern = r"the weights of chunk (\d) \(layers\.\d\.weight\): a read of 68\.0 KiB from NVMe, chunk \1 \(weights\)"
    assert any(re.fullmatch(pattern, text) for text in said), said


@pytest.mark.slow
def test_a_long_step_is_reported_once(settled, monkeypatch, capsys):
    model, engine, optimizer = settled
    engine.flush()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(pace, "LONG", 2)
    monkeypatch.setattr(pace, "LEAST_S", 0.3)
    _aio._inject("read", 0, 1, None, delay=2.0)
    train(model, optimizer, 1)
    (line,) = capsys.readouterr().err.splitlines()
    pattern = r"infinity: step 5 takes \d\.\d s so far, \d\.\d\d s as a rule\. Waits \d\.\d s for the weights of chunk \d \(.*\): a read of .*"
    assert re.fullmatch(pattern, line)


def test_a_wait_for_an_update_names_the_updates_before_it(settled):
    model, engine, optimizer = settled
    gate, found = threading.Event(), []
    engine.flush()
    engine.updater.lane.push(lambda: gate.wait(SECONDS), "a job before all updates")
    thread = threading.Thread(target=lambda: train(model, optimizer, 2))
    thread.start()
    while not found and thread.is_alive():
        if (wait := of_the_program()) is not None and "an update of chunk" in str(wait):
            found.append(str(wait))
            gate.set()
        thread.join(0.01)
    gate.set()
    thread.join(SECONDS)
    copy = r"(the copy to the device of chunk \d \(.*\): )?"  # the training thread may have begun the copy that waits for the update
    assert re.match(rf"the weights of chunk \d \(layers\.\d\..*\): {copy}an update of chunk \d \(.*\), after \d others?", found[0]), found

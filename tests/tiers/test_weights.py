"""Copies of weights to the device: a failed copy ends the step. Strides of weights."""

import contextlib

import pytest
import torch
from support.helpers import NVME, training
from torch import nn

from infinity.plan.record import WEIGHTS
from infinity.tiers.fetch_lanes import ChunkFetch
from infinity.tiers.parameter_state import contiguous_stride
from infinity.tiers.weights import Weights


class LostStream:
    """A stream of a CUDA device that accepts work and then fails."""

    def __init__(self, device):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        raise RuntimeError("the device is lost")


def test_a_copy_that_fails_after_its_job_ends_the_step(tmp_path, monkeypatch):
    """No thread waits for the job that frees the slot. Without a report, the next request for this slot would hang."""
    with training(lambda: nn.Linear(64, 64), tmp_path, **NVME) as (model, engine, optimizer):
        monkeypatch.setattr("torch.cuda.Stream", LostStream)
        monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
        weights = Weights(engine.values, engine.course, engine.weights.lanes.gg, None, torch.device("cuda"), engine.events)
        chunk = engine.registry.chunks[0]
        engine.tier.allocate(chunk.span)
        weights.lanes._run_copy(ChunkFetch(chunk, engine.records.request(chunk, WEIGHTS), None), None)
        for lane in (weights.lanes.settler, weights.lanes.cg):
            lane.close()
        with pytest.raises(RuntimeError, match="the device is lost"):
            model(torch.ones(2, 64))


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (4, 1, 5), (7, 3, 2, 2)])
def test_the_stride_of_a_contiguous_tensor_is_that_of_torch(shape):
    assert contiguous_stride(torch.Size(shape)) == torch.empty(shape, device="meta").stride()

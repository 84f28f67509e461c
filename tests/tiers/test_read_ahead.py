"""With residency="none", only weights that are needed again soon stay in host memory."""

import collections
import dataclasses

import pytest
import torch
from support.helpers import NVME, training
from torch import nn

from infinity.plan import placement as planner
from infinity.plan.record import WEIGHTS
from infinity.system.lanes import Job

LAYERS = 10


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(LAYERS)))


@pytest.fixture
def trained(tmp_path):
    """(engine, steps): one chunk per layer, three steps done. `steps(count)` trains and returns the weight reads of each chunk."""
    with training(stack, tmp_path, chunk_mib=1 / 16, host_memory="64MiB", **NVME) as (model, engine, optimizer):
        assert [len(span.chunks) for span in engine.layout.spans] == [1] * LAYERS
        reads = collections.Counter()
        grant = engine.records._grant

        def counted(request):
            was_there = engine.records.caches[request.kind].find(request.chunk) is not None
            granted = grant(request)
            if granted and not was_there and request.kind == WEIGHTS:
                reads[request.chunk.index] += 1
            return granted

        engine.records._grant = counted

        def steps(count):
            before = reads.copy()
            for _ in range(count):
                model(torch.ones(4, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.flush()
            return [reads[chunk] - before[chunk] for chunk in range(LAYERS)]

        steps(3)
        yield engine, steps


def test_weights_that_stay_on_the_device_are_read_once_per_step(trained):
    # The last three layers stay on the device from forward to backward.
    _, steps = trained
    found = steps(4)
    assert max(found[-3:]) <= 4 and max(found) <= 8


def test_weights_requested_by_an_update_have_the_nearest_use(trained):
    engine, _ = trained
    course, chunks = engine.course, engine.registry.chunks
    course.route.cursor.position = len(course.route.uses) - 1  # all updates are due
    asked = chunks[LAYERS // 2]
    assert not asked.update.is_expected and course.next_weights_use(asked) > course.next_weights_use(chunks[0])
    done, asked.update.job = asked.update.job, Job(None)
    assert all(course.next_weights_use(asked) < course.next_weights_use(chunk) for chunk in chunks if chunk is not asked)
    asked.update.job = done


def test_the_look_ahead_of_reads_is_the_slots_that_updates_leave(trained):
    engine, _ = trained
    assert engine.placement.slots == {"weights": LAYERS, "states": LAYERS, "gradients": 8} and engine.follower.slots_ahead == LAYERS
    fewer = dataclasses.replace(engine.placement, slots={"weights": 8, "states": 3, "gradients": 2})
    assert planner.look_ahead(fewer) == (3, 1)

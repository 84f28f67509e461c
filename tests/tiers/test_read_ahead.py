"""Which weights stay in host memory where nothing is kept: those that are wanted again before they could be read again."""

import collections
import dataclasses

import pytest
import torch
from helpers import NVME, training
from torch import nn

from infinity.plan import placement as planner
from infinity.plan.record import WEIGHTS
from infinity.system.lanes import Job

LAYERS = 10


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(LAYERS)))


@pytest.fixture
def trained(tmp_path):
    """An engine with a chunk a layer, after three steps; and a function for more, which tells how often each chunk's weights were read."""
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


def test_what_forward_copies_for_backward_too_is_not_read_again_for_its_update(trained):
    # The last three layers stay on the device from forward to backward.
    _, steps = trained
    found = steps(4)
    assert max(found[-3:]) <= 4 and max(found) <= 8


def test_weights_that_an_update_has_asked_for_are_wanted_before_all_others(trained):
    engine, _ = trained
    course, chunks = engine.course, engine.registry.chunks
    course.route.cursor.position = len(course.route.uses) - 1  # all updates are due
    asked = chunks[LAYERS // 2]
    assert not asked.update.is_expected and course.next_weights_use(asked) > course.next_weights_use(chunks[0])
    done, asked.update.job = asked.update.job, Job(None)
    assert all(course.next_weights_use(asked) < course.next_weights_use(chunk) for chunk in chunks if chunk is not asked)
    asked.update.job = done


def test_reads_go_as_far_ahead_as_slots_that_updates_leave(trained):
    engine, _ = trained
    assert engine.placement.slots == {"weights": LAYERS, "states": LAYERS, "gradients": 8} and engine.follower.slots_ahead == LAYERS
    fewer = dataclasses.replace(engine.placement, slots={"weights": 8, "states": 3, "gradients": 2})
    assert planner.look_ahead(fewer) == (3, 1)

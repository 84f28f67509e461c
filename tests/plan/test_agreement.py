"""Decisions that all ranks must make alike from different numbers: collectives need one order on all ranks."""

import random

import pytest
from support.helpers import place
from support.traces import random_case
from torch import nn

from infinity.config import Config
from infinity.engine.sizing import Training, arrange
from infinity.errors import BudgetError
from infinity.formats.format import Format
from infinity.optim.rules import AdamRule
from infinity.plan.memory_needs import Budgets
from infinity.plan.packing import ParameterSpec, layout
from infinity.plan.partition import BLOCK_NUMEL
from infinity.plan.placement import share_device
from infinity.plan.record import STATES, record_layout
from infinity.plan.schedule import Read, ReadStates, plan


@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(3))
def test_slots_which_may_differ_by_rank_change_reads_alone(block):
    """In 3,000 random plans, gathers, reductions, copies and evictions come at the same ops for all numbers of slots."""
    num_that_read_otherwise = 0
    for seed in range(1000 * block, 1000 * block + 1000):
        choose = random.Random(-seed)
        trace, options = random_case(seed)
        slots = {
            "read_ahead": choose.randint(3, 7),
            "slots_ahead": choose.randint(0, 30),
            "slots_of": {span: choose.randint(0, 3) for span in options["slots_of"]},
            "states_ahead": choose.randint(1, 9),
        }
        one, other = plan(trace, **options), plan(trace, **{**options, **slots})
        num_that_read_otherwise += one != other
        agreed, expected = ([action for action in actions if not isinstance(action, (Read, ReadStates))] for actions in (other, one))
        assert agreed == expected, seed
    assert num_that_read_otherwise > 300


@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(3))
def test_ranks_have_the_same_room_on_the_device(block):
    """A planned copy without room is skipped together with the gather, so the room must be equal. The last rank has the smallest shards."""
    num_placed = num_that_differ = num_promoted = 0
    for seed in range(100 * block, 100 * block + 100):
        choose = random.Random(seed)
        world = choose.choice([2, 3, 4])
        accumulates = choose.random() < 0.5
        formats = {trainable: Format("bf16", trainable, accumulates=accumulates) for trainable in (False, True)}
        specs = [ParameterSpec(f"p{index}", choose.randint(1, 20_000), formats[choose.random() < 0.9]) for index in range(12)]
        whole = layout(specs, chunk_numel=world * BLOCK_NUMEL * choose.choice([1, 4]), world=world)
        keep = choose.random() < 0.8
        options = {"weights": choose.choice(["auto", "nvme", "host"]), "states": choose.choice(["auto", "nvme", "host", "device"]), "keep": keep}
        options |= {"deferred": choose.random() < 0.5}
        options |= {"device_budget": choose.randint(200 << 10, 4 << 20), "host_budget": choose.randint(100 << 10, 4 << 20)}
        options |= {"held_nbytes": 80_000, "op_gradient_nbytes": 40_000, "buffers_nbytes": 40_000}
        records = [[record_layout(chunk.shard_used(rank), chunk.format) for chunk in whole.chunks] for rank in range(world)]
        try:
            found = [place(whole, own, first=records[0], **options) for own in records]
        except BudgetError:
            continue
        num_placed += 1
        num_that_differ += len({placement.host_nbytes for placement in found}) > 1
        on_device = {(p.device_nbytes, p.fixed_nbytes, p.least_nbytes, p.gradient_limit_nbytes, p.pinned, p.visitors) for p in found}
        assert len(on_device) == 1, seed
        rest = {"room_nbytes": choose.randint(0, 2 << 20), "snapshots": ()}
        promoted = [share_device(whole, own, placement.homes[STATES], **rest) for own, placement in zip(records, found)]
        assert promoted == promoted[:1] * world, seed
        num_promoted += bool(promoted[0])
    assert num_placed > 30 and num_that_differ > 5 and num_promoted > 5


def test_ranks_expect_the_same_visitors_if_one_needs_less_host_memory():
    """The last of four ranks holds no elements of chunks of 3,000 elements. By its own shards other records would visit the device."""
    model = nn.Sequential(*(nn.Linear(3000, 1, bias=False, device="meta") for _ in range(24)))
    config, how = Config(device="cpu", dtype="bf16", chunk_mib=1 / 128), Training(rule=AdamRule(decoupled=False), deferred=True, accumulating=True)
    for host_nbytes in (80_000, 120_000, 480_000):
        budgets = Budgets(device_nbytes=300_000, host_nbytes=host_nbytes)
        found = [arrange(model, list(model.named_parameters()), config, budgets, how, (rank, 4)) for rank in range(4)]
        whole, records, placement = found[-1]
        assert all(other.visitors == placement.visitors for _, _, other in found)
        options = {"weights": "auto", "states": "auto", "keep": True, "deferred": True, "held_nbytes": 8192}
        options |= {"op_gradient_nbytes": 6000, "buffers_nbytes": 16_000, "device_budget": 300_000, "host_budget": host_nbytes}
        assert place(whole, records, **options).visitors != place(whole, records, first=found[0][1], **options).visitors

"""Placement: homes under given budgets, the least sufficient budgets, and the bytes that an engine then holds.

Long because the rules of all tiers decide together, and the tests share the models of these decisions.
"""

import itertools
import re

import pytest
import torch
from support.helpers import arranged, place
from torch import nn

import infinity
from infinity.errors import BudgetError
from infinity.formats.format import Format
from infinity.plan import chunk_size, host_memory
from infinity.plan import placement as planner
from infinity.plan.chunk_size import chunk_numels
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS, MIN_STATE_SLOTS, MIN_WEIGHT_SLOTS
from infinity.plan.packing import ParameterSpec, layout
from infinity.plan.partition import BLOCK_NUMEL
from infinity.plan.placement import share_device
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, record_layout
from infinity.plan.tiers import DEVICE, HOST, NVME

# Eight chunks of one parameter of 4096 elements each: a bf16 weight is 8 KiB, the states are 40 KiB, a gradient is 8 KiB.
NUM, WEIGHT, STATE, GRADIENT = 8, 8 << 10, 40 << 10, 8 << 10
AMPLE = 1 << 30


def placed(*, num=NUM, world=1, dtype="bf16", frozen=(), accumulates=False, **changes):
    specs = [ParameterSpec(f"p{i}", 4096, Format(dtype, i not in frozen, accumulates=accumulates)) for i in range(num)]
    whole = layout(specs, chunk_numel=4096, world=world)
    records = [record_layout(chunk.shard_used(0), chunk.format) for chunk in whole.chunks]
    options = {
        "weights": "auto",
        "states": "auto",
        "keep": True,
        "deferred": False,
        "device_budget": AMPLE,
        "host_budget": AMPLE,
        "held_nbytes": 2 * WEIGHT,
        "op_gradient_nbytes": WEIGHT,
    }
    return place(whole, records, **{**options, **changes})


def needed(error) -> int:
    """The number of bytes in an error message."""
    return int(re.search(r"needs (\d+) bytes", str(error.value))[1])


@pytest.fixture
def few_slots(monkeypatch):
    """Fewer slots than chunks, as with a large model."""
    for name in ("WEIGHT_SLOTS", "STATE_SLOTS", "GRADIENT_SLOTS"):
        monkeypatch.setattr(host_memory, name, 2)


# ---- the order of residency ----


def test_records_that_fit_on_the_device_need_no_host_memory():
    found = placed()
    assert found.homes[WEIGHTS] == found.homes[STATES] == (DEVICE,) * NUM
    assert (found.pinned, found.host_nbytes, found.nvme_nbytes) == (True, 0, 0)


def test_with_a_small_device_all_records_go_to_ample_host_memory():
    found = placed(device_budget=100 << 10)
    assert found.homes[WEIGHTS] == found.homes[STATES] == (HOST,) * NUM
    assert found.nvme_nbytes == 0


def slots_nbytes(found):
    return found.slots[WEIGHTS] * WEIGHT + found.slots[STATES] * STATE + found.slots[GRADIENTS] * GRADIENT


def test_spare_host_memory_keeps_weights_first_and_states_of_first_chunks_first(few_slots):
    """The last chunks' weights, and the first chunks' states. The last two of a kind use the memory of the two slots, which no other chunk
    shares then.
    """
    full = slots_nbytes(placed(device_budget=100 << 10, keep=False))
    homes = []
    for spare in (0, WEIGHT, 3 * WEIGHT, 6 * WEIGHT, 6 * WEIGHT + STATE, 6 * WEIGHT + 3 * STATE, 6 * WEIGHT + 6 * STATE - 1, 6 * WEIGHT + 6 * STATE):
        found = placed(device_budget=100 << 10, host_budget=full + spare)
        homes.append((found.homes[WEIGHTS].count(HOST), found.homes[STATES].count(HOST)))
        assert found.homes[WEIGHTS] == (NVME,) * found.homes[WEIGHTS].count(NVME) + (HOST,) * found.homes[WEIGHTS].count(HOST)
        assert found.homes[STATES] == (HOST,) * found.homes[STATES].count(HOST) + (NVME,) * found.homes[STATES].count(NVME)
        assert found.host_nbytes <= full + spare
    assert homes == [(0, 0), (1, 0), (3, 0), (8, 0), (8, 1), (8, 3), (8, 5), (8, 8)]


@pytest.mark.few(1)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("num", [3, NUM, 20, 100])
def test_no_usable_host_memory_is_left_over(num, deferred):
    for host in range(2 * (WEIGHT + STATE + GRADIENT), num * (WEIGHT + STATE + GRADIENT) + 100_000, 10_000):
        found = placed(num=num, device_budget=100 << 10, host_budget=host, deferred=deferred)
        left = host - found.host_nbytes
        assert left >= 0
        for kind, nbytes in ((WEIGHTS, WEIGHT), (STATES, STATE), (GRADIENTS, GRADIENT)):
            assert left < nbytes or found.homes[kind].count(NVME) == 0, (host, kind)


def test_a_model_whose_chunks_all_have_slots_needs_no_drive():
    on_nvme = placed(device_budget=100 << 10, keep=False)
    found = placed(device_budget=100 << 10, host_budget=slots_nbytes(on_nvme))
    assert (on_nvme.nvme_nbytes > 0, found.nvme_nbytes) == (True, 0)
    assert found.host_nbytes <= slots_nbytes(on_nvme)


def test_residency_none_keeps_nothing():
    found = placed(device_budget=100 << 10, keep=False)
    assert found.homes[WEIGHTS] == found.homes[STATES] == (NVME,) * NUM
    assert found.nvme_nbytes == NUM * (WEIGHT + STATE + GRADIENT)


@pytest.mark.parametrize(
    "weights, states, expected",
    [
        ("host", "nvme", (HOST, NVME, False)),
        ("nvme", "host", (NVME, HOST, False)),
        ("host", "host", (HOST, HOST, False)),
        ("device", "nvme", (NVME, NVME, True)),  # the record stores weights beside the states
        ("device", "host", (HOST, HOST, True)),
        ("device", "device", (DEVICE, DEVICE, True)),
    ],
)
def test_requested_tiers_are_used(weights, states, expected):
    found = placed(weights=weights, states=states)
    assert (found.homes[WEIGHTS][0], found.homes[STATES][0], found.pinned) == expected
    assert len({*found.homes[WEIGHTS]}) == len({*found.homes[STATES]}) == 1


def test_frozen_chunks_have_no_states():
    found = placed(frozen=range(4), weights="nvme", states="nvme", keep=False)
    assert found.nvme_nbytes == NUM * WEIGHT + 4 * (STATE + GRADIENT)
    assert found.slots[STATES] == found.slots[GRADIENTS] == 4


def test_each_of_two_ranks_holds_half():
    one, two = (placed(world=world, weights="nvme", states="nvme", keep=False) for world in (1, 2))
    assert two.nvme_nbytes == one.nvme_nbytes / 2
    assert slots_nbytes(one) == one.host_nbytes == 2 * two.host_nbytes


# ---- the least budgets ----


def test_the_least_host_memory_is_the_fewest_slots():
    least = MIN_WEIGHT_SLOTS * WEIGHT + MIN_STATE_SLOTS * STATE + MIN_GRADIENT_SLOTS * GRADIENT
    small = {"device_budget": 100 << 10}
    found = placed(host_budget=least, **small)
    assert found.slots == {WEIGHTS: 2, STATES: 2, GRADIENTS: 2}
    assert found.host_nbytes == least
    with pytest.raises(BudgetError, match=rf"host_memory=\S+ KiB is too small: .* needs {least} bytes .*Raise host_memory"):
        placed(host_budget=least - 1, **small)


def test_waiting_gradients_stay_in_host_memory_if_they_fit():
    fewest = MIN_WEIGHT_SLOTS * WEIGHT + MIN_STATE_SLOTS * STATE + MIN_GRADIENT_SLOTS * GRADIENT
    options = {"device_budget": 100 << 10, "deferred": True, "keep": False}
    for accumulates, gradient in ((False, GRADIENT), (True, 2 * GRADIENT)):  # gradients in bf16, or accumulated in fp32
        least = fewest + 2 * (gradient - GRADIENT)
        found = placed(host_budget=least + NUM * gradient, accumulates=accumulates, **options)
        assert found.homes[GRADIENTS] == (HOST,) * NUM and not found.slots[GRADIENTS]
        found = placed(host_budget=least, accumulates=accumulates, **options)
        assert found.homes[GRADIENTS] == (NVME,) * NUM and found.slots[GRADIENTS] == 2
        assert found.nvme_nbytes == NUM * (WEIGHT + STATE + gradient)
        with pytest.raises(BudgetError, match=f"needs {least} bytes"):
            placed(host_budget=least - 1, accumulates=accumulates, **options)


def test_gradient_slots_hold_a_quarter_of_the_moving_updates():
    slots = dict(num=64, weights="nvme", states="nvme", keep=False)
    assert placed(**slots).slots[GRADIENTS] == 16
    assert placed(**slots, deferred=True).slots[GRADIENTS] == 0  # each gradient has a home in host memory
    assert placed(**slots, frozen=range(32)).slots[GRADIENTS] == 8
    assert placed(**slots, frozen=range(64)).slots[GRADIENTS] == 0
    half = placed(num=64, device_budget=16 * WEIGHT, host_budget=64 * (WEIGHT + STATE // 2) + 64 * WEIGHT + 12 * STATE)
    assert host_memory.GRADIENT_SLOTS <= half.slots[GRADIENTS] < 16 and NVME in half.homes[STATES]


def test_the_least_device_memory_is_the_largest_op_and_its_gradient():
    least = 2 * WEIGHT + WEIGHT
    tight = placed(device_budget=least)
    assert (tight.device_nbytes - tight.fixed_nbytes, tight.least_nbytes) == (2 * WEIGHT, least)
    with pytest.raises(BudgetError, match=f"device_memory=.* needs {least} bytes .*largest op 16.0 KiB.*split the largest layer"):
        placed(device_budget=least - 1)


def test_auto_leaves_the_device_if_gradients_do_not_fit():
    whole = NUM * (WEIGHT + STATE + GRADIENT) + WEIGHT
    assert placed(device_budget=whole).homes[STATES] == (DEVICE,) * NUM
    assert placed(device_budget=whole - 1).homes[STATES] == (HOST,) * NUM


def test_weights_on_the_device_need_room_for_all_of_them():
    least = NUM * WEIGHT + WEIGHT
    assert placed(weights="device", states="host", device_budget=least).pinned
    with pytest.raises(BudgetError, match=f"needs {least} bytes .*weights 64.0 KiB.*Raise device_memory"):
        placed(weights="device", states="host", device_budget=least - 1)


def test_states_on_the_device_need_room_for_everything():
    with pytest.raises(BudgetError, match="optimizer_state_tier='device' needs .* Raise device_memory or choose optimizer_state_tier='host'") as error:
        placed(states="device", device_budget=100 << 10)
    assert placed(states="device", device_budget=needed(error)).homes[STATES] == (DEVICE,) * NUM


@pytest.mark.parametrize("weights, states", [*itertools.product(("auto", "host", "nvme"), repeat=2)])
@pytest.mark.parametrize("deferred", [False, True])
def test_every_budget_from_the_least_on_is_kept(weights, states, deferred):
    options = {"weights": weights, "states": states, "deferred": deferred, "device_budget": 100 << 10}
    with pytest.raises(BudgetError) as error:
        placed(host_budget=1, **options)
    least = needed(error)
    for budget in (least, least + 1, least + 50_000, 2 * least, 10 * least):
        found = placed(host_budget=budget, **options)
        assert found.host_nbytes <= budget
        assert found.fixed_nbytes <= found.least_nbytes <= found.device_nbytes == 100 << 10


@pytest.mark.parametrize("states", ["auto", "device"])
def test_all_ranks_put_the_same_records_on_the_device(states):
    """The second rank has smaller shards, and could hold records that the first rank cannot hold."""
    specs = [ParameterSpec(f"p{i}", 5000, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=8192, world=2)
    options = {"weights": "auto", "states": states, "keep": True, "deferred": False}
    options |= {"host_budget": AMPLE, "held_nbytes": 2 * WEIGHT, "op_gradient_nbytes": WEIGHT}
    outcomes = set()
    for budget in range(100 << 10, 700 << 10, 4096):
        found = []
        for rank in range(2):
            records = [record_layout(chunk.shard_used(rank), Format("bf16", True)) for chunk in whole.chunks]
            try:
                placement = place(whole, records, device_budget=budget, **options)
                found.append((placement.pinned, placement.fixed_nbytes, placement.homes[STATES][0]))
            except BudgetError as error:
                found.append(str(error))
            found[-1] = (found[-1], share_device(whole, records, [HOST] * NUM, room_nbytes=budget)[0])
        assert found[0] == found[1], budget
        outcomes.add(str(found[0][0])[:5])
    assert len(outcomes) == 2  # both outcomes occurred


def crowded(nvme_budget, *, device_budget, host_budget=400 << 10, **changes):
    return placed(device_budget=device_budget, host_budget=host_budget, nvme_budget=nvme_budget, **changes)


@pytest.mark.parametrize("deferred", [False, True])
def test_records_without_room_on_host_or_nvme_live_on_the_device(deferred, monkeypatch):
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)
    ample = crowded(None, device_budget=400 << 10, deferred=deferred)
    assert DEVICE not in ample.homes[STATES] and ample.nvme_nbytes > STATE
    counts = []
    for nvme_budget in range(ample.nvme_nbytes, -1, -4096):
        found = crowded(nvme_budget, device_budget=400 << 10, deferred=deferred)
        count = found.homes[STATES].count(DEVICE)
        counts.append(count)
        assert found.nvme_nbytes <= nvme_budget and found.host_nbytes <= 400 << 10
        for kind in (WEIGHTS, STATES, GRADIENTS):
            assert [home == DEVICE for home in found.homes[kind]] == [True] * count + [False] * (NUM - count)
        taken = count * (WEIGHT + STATE + GRADIENT)
        slack = (400 << 10) - (2 * WEIGHT + WEIGHT) - taken
        assert found.least_nbytes == 2 * WEIGHT + WEIGHT + taken + min(WEIGHT, slack // 3) <= 400 << 10
        assert found.fixed_nbytes == found.gradient_limit_nbytes + taken
        assert not found.pinned
    assert counts == sorted(counts) and counts[0] == 0 < counts[-1] < NUM


def test_as_many_records_as_fit_live_on_the_device(few_slots):
    least = 3 * WEIGHT
    for count in range(4):
        found = crowded(0, device_budget=least + count * (WEIGHT + STATE + GRADIENT) + 4096, host_budget=200 << 10)
        assert found.homes[STATES].count(DEVICE) == count
        assert found.nvme_nbytes > 0  # the swap refuses this and names the missing bytes


@pytest.mark.parametrize("changes", [{"weights": "nvme"}, {"states": "nvme"}, {"states": "host"}, {"weights": "host"}, {"keep": False}], ids=str)
def test_lack_of_room_never_overrides_a_requested_tier(changes):
    found = crowded(0, device_budget=400 << 10, host_budget=1 << 20, **changes)
    assert DEVICE not in found.homes[STATES] + found.homes[WEIGHTS]


@pytest.mark.long
@pytest.mark.parametrize("world, numel", [(2, 5000), (3, 7000), (4, 9000)])
def test_all_ranks_crowd_out_the_same_and_enough_records(world, numel):
    """A rank with smaller shards may need more: slots then take host memory that would otherwise be homes."""
    specs = [ParameterSpec(f"p{i}", numel, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=world * BLOCK_NUMEL, world=world)
    options = {"weights": "auto", "states": "auto", "keep": True, "deferred": False}
    options |= {"host_budget": 100 << 10, "device_budget": 500 << 10, "held_nbytes": 2 * WEIGHT, "op_gradient_nbytes": WEIGHT}
    options["buffers_nbytes"] = WEIGHT + 2 * world * BLOCK_NUMEL * 2
    counts, differ = set(), False
    for nvme_budget in range(0, 600 << 10, 4096):

        def placed_on(rank, **least):
            records = [record_layout(chunk.shard_used(rank), Format("bf16", True)) for chunk in whole.chunks]
            return place(whole, records, nvme_budget=nvme_budget, **options, **least)

        found, agreed = [placed_on(rank) for rank in range(world)], 0
        differ |= len({placement.num_crowded_out for placement in found}) > 1
        while (number := max(placement.num_crowded_out for placement in found)) > agreed:  # like sizing.arrange
            agreed = number
            found = [placed_on(rank, least_crowded_out=agreed) for rank in range(world)]
        for placement in found:
            assert (placement.fixed_nbytes, placement.least_nbytes) == (found[0].fixed_nbytes, found[0].least_nbytes)
            on_device = [home == DEVICE for home in placement.homes[STATES]]
            assert sum(on_device[span.chunks[0]] for span in whole.spans) == agreed
            assert placement.nvme_nbytes <= nvme_budget or placement.least_nbytes + WEIGHT + 5 * STATE > 500 << 10
        counts.add(agreed)
    assert 0 in counts and len(counts) > 3 and differ


THREE_VISIT = 2 * WEIGHT + NUM * WEIGHT + 3 * (STATE + GRADIENT)  # device bytes


def test_visiting_records_get_the_host_memory_that_others_leave(few_slots):
    """Records of three spans fit on the device beside all weights. The other five get host memory first, weights before states."""
    seen = set()
    for host in range(150 << 10, 600 << 10, 4096):
        found = placed(device_budget=THREE_VISIT, host_budget=host)
        assert found.visitors == {0, 1, 2}
        by_kind = {kind: [home == HOST for home in found.homes[kind]] for kind in (WEIGHTS, STATES)}
        seen |= {(sum(here[3:]), sum(here[:3])) for here in by_kind.values()}
        assert all(by_kind[WEIGHTS][3:]) or not any(by_kind[STATES])
        assert all(by_kind[STATES][3:]) or sum(by_kind[WEIGHTS][:3]) * WEIGHT < STATE and not any(by_kind[STATES][:3])
    assert {(5, 0), (5, 3)} <= seen, seen
    for changes in ({"states": "nvme"}, {"keep": False}, {"weights": "nvme"}):
        assert placed(device_budget=THREE_VISIT, host_budget=400 << 10, **changes).visitors == frozenset()


@pytest.mark.parametrize(
    "host_kib, num_visit, weights, states, gradients",
    [
        (150, 2, "nnnnnhhh", "nnnnnnnn", "nnhnnnnn"),  # gradients without a place stay on the device, so fewer records visit
        (158, 3, "nnnnnnnn", "nnnnnnnn", "nnnhhhhh"),  # one place for each gradient without room on the device
        (198, 3, "nnnhhhhh", "nnnnnnnn", "nnnhhhhh"),
        (278, 3, "nnnhhhhh", "nnnhhnnn", "nnnhhhhh"),
        (286, 3, "hhhhhhhh", "nnnhhnnn", "nnnhhhhh"),  # no states of others fit, so weights of visitors do
        (398, 3, "nnnhhhhh", "nnnhhhhh", "nnnhhhhh"),
        (406, 2, "hhhhhhhh", "hhhhhhhh", "nnnnnnnn"),  # all records fit, with one visitor less
        (438, 3, "hhhhhhhh", "hhhhhhhh", "nnnnhhhh"),
        (446, 3, "hhhhhhhh", "hhhhhhhh", "nnnhhhhh"),  # gradients of visitors come last
        (454, 3, "hhhhhhhh", "hhhhhhhh", "hhhhhhhh"),
    ],
)
def test_host_memory_goes_to_waiting_gradients_before_visitors(
    host_kib, num_visit, weights, states, gradients, few_slots
):
    found = placed(device_budget=THREE_VISIT, host_budget=host_kib << 10, deferred=True)
    homes = ["".join(home.name[0] for home in found.homes[kind]) for kind in (WEIGHTS, STATES, GRADIENTS)]
    assert (found.visitors, homes) == (set(range(num_visit)), [weights, states, gradients])
    assert found.may_stay == {index for index, home in enumerate(gradients) if home == "n"}


def homes_of(found):
    """Homes of weights, states and gradients, with a letter for each chunk: h is host memory, n is NVMe, d is the device."""
    return ["".join(home.name[0] for home in found.homes[kind]) for kind in (WEIGHTS, STATES, GRADIENTS)]


@pytest.mark.parametrize(
    "host_kib, lacking_kib, gradients",
    [
        (150, 0, "nnhnnnnn"),
        (150, 1, "dnhnnnnn"),
        (150, 8, "dnhnnnnn"),
        (150, 16, "ddhnnnnn"),
        (150, 32, "ddhddnnn"),  # visitors first, then gradients that stay while their records do not visit
        (150, 56, "ddhddddd"),
        (198, 8, "dnnhhhhh"),
        (198, 24, "dddhhhhh"),
    ],
)
def test_gradients_without_room_on_nvme_have_homes_on_the_device(host_kib, lacking_kib, gradients, few_slots):
    options = {"device_budget": THREE_VISIT, "host_budget": host_kib << 10, "deferred": True}
    ample = placed(**options)
    nvme_budget = ample.nvme_nbytes - (lacking_kib << 10)
    found = placed(nvme_budget=nvme_budget, **options)
    assert homes_of(found) == [*homes_of(ample)[:2], gradients]
    assert nvme_budget - GRADIENT < found.nvme_nbytes == ample.nvme_nbytes - gradients.count("d") * GRADIENT <= nvme_budget
    assert found.num_crowded_out == 0 and found.visitors == ample.visitors
    assert found.may_stay == ample.may_stay >= {index for index, home in enumerate(gradients) if home == "d"}
    assert found.slots[GRADIENTS] == 2  # on its way to an update in host memory, a gradient needs a slot


def test_records_leave_nvme_for_the_device_if_no_gradient_is_left_there(few_slots):
    options = {"device_budget": THREE_VISIT, "host_budget": 198 << 10, "deferred": True}
    ample = placed(**options)
    for lacking in range(3 * GRADIENT + 1, 3 * (WEIGHT + STATE + GRADIENT), 4096):
        found = placed(nvme_budget=ample.nvme_nbytes - lacking, **options)
        assert found.nvme_nbytes <= ample.nvme_nbytes - lacking
        assert homes_of(found)[1][: found.num_crowded_out + 1] == "d" * found.num_crowded_out + "n" and found.num_crowded_out > 0


def test_gradients_that_do_not_wait_need_no_place_on_nvme(few_slots):
    """Records leave NVMe for the device only if NVMe has no room for records."""
    options = {"device_budget": THREE_VISIT, "host_budget": 150 << 10, "deferred": False}
    ample = placed(**options)
    assert ample.on_nvme[GRADIENTS] == ample.sizes[GRADIENTS]
    on_nvme = sum(home.is_storage for home in ample.homes[GRADIENTS]) * GRADIENT
    for lacking in (1, on_nvme):
        found = placed(nvme_budget=ample.nvme_nbytes - lacking, **options)
        assert not any(found.on_nvme[GRADIENTS]) and found.nvme_nbytes == found.uncoded().nvme_nbytes <= ample.nvme_nbytes - on_nvme
        assert (found.num_crowded_out, found.visitors) == (0, ample.visitors)
    found = placed(nvme_budget=ample.nvme_nbytes - on_nvme - GRADIENT, **options)
    assert found.num_crowded_out == 1
    assert [home == DEVICE for home in found.homes[GRADIENTS]] == [True] + 7 * [False]


def test_gradients_keep_their_places_if_host_memory_has_no_room_for_slots(few_slots):
    options = {"device_budget": THREE_VISIT, "host_budget": 120 << 10, "deferred": False}
    ample = placed(**options)
    found = placed(nvme_budget=ample.nvme_nbytes - GRADIENT, **options, num_incomplete=NUM - 1)
    assert found.on_nvme[GRADIENTS] == found.sizes[GRADIENTS] and found.num_crowded_out == 1


def test_gradients_that_no_tier_has_room_for_are_refused(few_slots):
    """Each fp32 sum of gradients has 16 KiB. The device has room for four sums of the five that are left."""
    options = {"device_budget": THREE_VISIT, "host_budget": 150 << 10, "deferred": True, "accumulates": True}
    ample = placed(**options)
    message = (
        "this model needs 384.0 KiB for records and 128.0 KiB for gradients that wait for step\\(\\). Host memory holds 144.0 KiB and NVMe 288.0 "
        "KiB of them. 80.0 KiB of gradients are left for the device, which has about 72.0 KiB. Raise host_memory, add a directory to swap_dirs"
    )
    with pytest.raises(BudgetError, match=message):
        placed(nvme_budget=ample.nvme_nbytes - (200 << 10), **options)
    nvme_nbytes = placed(nvme_budget=ample.nvme_nbytes - (200 << 10), **options, expected_nbytes=THREE_VISIT + GRADIENT).nvme_nbytes
    assert nvme_nbytes <= ample.nvme_nbytes - (200 << 10)


def test_without_host_room_visitors_follow_the_expected_device_memory(few_slots):
    """Expected visitors leave their host memory to states of others. If host memory can hold all records, only certain visitors count."""
    whole, one_visits = NUM * (WEIGHT + STATE), THREE_VISIT - 2 * (STATE + GRADIENT)
    options = {"deferred": True, "expected_nbytes": THREE_VISIT}
    for host in range(150 << 10, whole, 4096):
        here = placed(device_budget=one_visits, host_budget=host, **options)
        there = placed(device_budget=THREE_VISIT, host_budget=host, deferred=True)
        assert (here.visitors, here.homes) == (there.visitors, there.homes)
        assert (here.device_nbytes, here.least_nbytes) == (one_visits, there.least_nbytes)
    here, there = (placed(device_budget=one_visits, host_budget=whole, **each) for each in (options, {"deferred": True}))
    assert (here.visitors, here.homes) == (there.visitors, there.homes)


def test_only_the_records_share_of_host_memory_counts(few_slots):
    """Each budget can hold all records, but three quarters of the budget cannot."""
    whole, one_visits = NUM * (WEIGHT + STATE), THREE_VISIT - 2 * (STATE + GRADIENT)
    for host in (whole, whole * 4 // 3 - 4096):
        here = placed(device_budget=one_visits, host_budget=host, host_share=3 / 4, deferred=True, expected_nbytes=THREE_VISIT)
        there = placed(device_budget=THREE_VISIT, host_budget=host, host_share=3 / 4, deferred=True)
        assert (here.visitors, here.homes) == (there.visitors, there.homes)


def test_gradients_leave_host_memory_to_records_if_all_records_fit(few_slots):
    """If inputs grow, visiting records return. Then no NVMe reads follow if host memory holds all records."""
    device = 2 * WEIGHT + NUM * WEIGHT + 3 * (STATE + GRADIENT)
    whole, seen = NUM * (WEIGHT + STATE), set()
    for host in range(whole - 4 * STATE, whole + NUM * GRADIENT + 8192, 4096):
        found = placed(device_budget=device, host_budget=host)
        by_hand = placed(device_budget=device, host_budget=host, weights="host", states="host") if host >= whole + 2 * GRADIENT else None
        homes = [home for kind in (WEIGHTS, STATES) for home in found.homes[kind]]
        if by_hand is not None:
            assert NVME not in homes and found.homes == by_hand.homes
        elif host < whole:
            assert NVME in homes
        seen.add((homes.count(NVME) > 0, found.homes[GRADIENTS].count(HOST)))
    assert {(True, 5), (False, 0), (False, NUM)} <= seen, seen


def test_records_at_home_on_the_device_come_before_visitors():
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    options = {"snapshots": ()}
    for count in range(NUM):
        room = NUM * WEIGHT + count * (STATE + GRADIENT)
        every, _ = share_device(whole, records, [NVME] * NUM, room_nbytes=room, **options)
        assert every == [(index, STATE + GRADIENT) for index in range(count)]
        assert share_device(whole, records, [DEVICE] * 3 + [NVME] * 5, room_nbytes=room, **options) == (every[3:], [])


def test_staying_gradients_get_the_room_that_records_leave():
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    homes, options = [DEVICE] * 3 + [NVME] * 5, {"may_stay": range(NUM)}
    at_home = NUM * WEIGHT + 3 * (STATE + GRADIENT)
    for count in range(6):
        found = share_device(whole, records, homes, room_nbytes=at_home + count * GRADIENT, **options)
        assert found == ([], [(index, GRADIENT) for index in range(3, 3 + count)])
    visitor = [(3, STATE + GRADIENT)], [(index, GRADIENT) for index in (4, 5, 6, 7)]
    assert share_device(whole, records, homes, room_nbytes=at_home + 5 * GRADIENT + STATE, **options) == visitor


@pytest.mark.parametrize(
    "room, window, num_visit",
    [
        (80, None, 0),
        (79, 24, 0),
        (80, 24, 1),  # 24 KiB for weights that come and go, 56 KiB for a record with its weights
        (112, None, 1),
        (112, 24, 1),
        (136, None, 1),
        (136, 24, 2),
        (136, 48, 1),
        (400, 24, 7),  # all weights of 64 KiB, 48 KiB for each record; records before weights would be six
        (448, None, 8),
        (448, 24, 8),
    ],
)
def test_records_come_before_weights_if_more_records_fit(room, window, num_visit):
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    options = {"room_nbytes": room << 10, "window_nbytes": None if window is None else window << 10}
    visiting = [(index, STATE + GRADIENT) for index in range(num_visit)]
    assert share_device(whole, records, [NVME] * NUM, **options) == (visiting, [])


def test_with_a_window_gradients_still_come_before_records():
    """Of 24 + 8 * 8 + 56 KiB, all gradients stay. The first span's record takes 48 KiB more, with its weights."""
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    options = {"window_nbytes": 24 << 10, "may_stay": range(NUM)}
    staying = [(index, GRADIENT) for index in range(NUM)]
    for extra, num_visit in ((0, 0), (STATE + WEIGHT - 1, 0), (STATE + WEIGHT, 1)):
        found = share_device(whole, records, [NVME] * NUM, room_nbytes=(24 << 10) + NUM * GRADIENT + extra, **options)
        assert found == ([(0, STATE + GRADIENT)][:num_visit], staying[num_visit:])


def test_records_at_home_on_the_device_keep_their_weights_in_a_window():
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    homes, each = [DEVICE] * 3 + [NVME] * 5, WEIGHT + STATE + GRADIENT
    for count in (0, 1, 2):
        for lacking in (0, 1):
            found = share_device(whole, records, homes, room_nbytes=8192 + (3 + count) * each - lacking, window_nbytes=8192)
            assert found == ([(index, STATE + GRADIENT) for index in range(3, 3 + count - lacking)], [])


def test_records_whose_gradients_need_no_room_are_more():
    """As in layer-wise steps, where the sums take the place of activations."""
    specs = [ParameterSpec(f"p{i}", 4096, Format("bf16", True)) for i in range(NUM)]
    whole = layout(specs, chunk_numel=4096, world=1)
    records = [record_layout(chunk.shard_used(0), Format("bf16", True)) for chunk in whole.chunks]
    for waiting, expected in ((None, [(index, STATE + GRADIENT) for index in range(5)]), ((), [(index, STATE) for index in range(6)])):
        found = share_device(whole, records, [NVME] * NUM, room_nbytes=NUM * WEIGHT + 6 * STATE, waiting=waiting)
        assert found == (expected, [])


# ---- models of billions ----

GB = 10**9


def blocks(layers, dim, ffn, kv, vocab):
    """Numbers of elements of a Llama's parameters."""
    block = [dim, dim * dim, kv * dim, kv * dim, dim * dim, dim, *(3 * [ffn * dim])]
    return [vocab * dim, *(layers * block), dim, vocab * dim]


LARGE = {3.2: blocks(28, 3072, 8192, 1024, 64_000), 8.03: blocks(32, 4096, 14_336, 1024, 128_256), 14.8: blocks(48, 5120, 13_824, 1024, 152_064)}


def settled(size, accumulation_steps, device, once_measured, host, nvme):
    """Place a Llama. Budgets are in GB: `device` when planned, `once_measured` after activations are known. Return billions of parameters that
    the host updates, GB that a step then moves on NVMe, and GB of records with homes on NVMe."""
    format = Format("bf16", accumulates=accumulation_steps > 1)
    specs = [ParameterSpec(f"p{i}", numel, format) for i, numel in enumerate(LARGE[size])]
    whole = layout(specs, chunk_numel=11 << 20, world=1)
    records = [record_layout(chunk.shard_used(0), chunk.format) for chunk in whole.chunks]
    most = 2 * max(LARGE[size])
    options = {"weights": "auto", "states": "auto", "keep": True, "deferred": True}
    options |= {"host_budget": host * GB, "nvme_budget": nvme * GB, "held_nbytes": 2 * most, "op_gradient_nbytes": most}
    found = place(whole, records, device_budget=device * GB, **options)
    assert found.host_nbytes <= host * GB and found.nvme_nbytes <= nvme * GB
    room = max(once_measured * GB, found.least_nbytes) - found.gradient_limit_nbytes
    spans = share_device(whole, records, found.homes[STATES], room_nbytes=room, may_stay=found.may_stay)
    visiting, staying = ({index for span, _ in those for index in whole.spans[span].chunks} for those in spans)
    updated = [i for i in range(len(records)) if i not in visiting and found.homes[STATES][i] != DEVICE]

    def on_nvme(kind, chunks):
        return sum(found.sizes[kind][index] for index in chunks if found.homes[kind][index] == NVME)

    waiting = on_nvme(GRADIENTS, [index for index in updated if index not in staying])
    waiting = max(0, waiting - found.slots[GRADIENTS] * max(found.in_slots[GRADIENTS]))
    moved = 2 * (on_nvme(WEIGHTS, updated) + on_nvme(STATES, updated) + accumulation_steps * waiting)  # all weights stay on the device
    homes = on_nvme(WEIGHTS, range(len(records))) + on_nvme(STATES, range(len(records)))
    return sum(records[index].numel for index in updated) / GB, moved / GB, homes / GB


@pytest.mark.parametrize("device, once_measured", [(75, 75), (60, 60), (40, 60)])
def test_all_records_are_in_host_memory_if_they_fit_with_gradients(device, once_measured):
    updated, moved, homes = settled(8.03, 1, device, once_measured, host=107, nvme=68)
    assert updated <= 4.7 and moved == homes == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case, most_updated, most_moved, most_homes",
    [
        ((8.03, 4, 75, 75, 107, 68), 5.1, 0, 0),  # all records in host memory
        ((8.03, 4, 60, 60, 107, 68), 6.2, 0, 0),
        ((8.03, 4, 40, 60, 107, 68), 6.2, 0, 0),
        ((14.8, 8, 135, 135, 107, 68), 7.7, 33, 68),
        ((14.8, 8, 115, 115, 107, 68), 9.2, 80, 68),
        ((3.2, 4, 20, 20, 24, 68), 2.4, 33, 28),
        ((8.03, 4, 60, 60, 4, 200), 7.0, 167, 97),  # sums without room in host memory stay on the device
    ],
    ids=str,
)
def test_gradient_sums_in_host_memory_let_more_records_visit(case, most_updated, most_moved, most_homes):
    updated, moved, homes = settled(*case)
    assert updated <= most_updated and moved <= most_moved and homes <= most_homes, (updated, moved, homes)


# ---- the size of chunks ----


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("num", [1, 10**6, 10**9, 10**12])
def test_candidate_sizes_divide_by_ranks_and_make_few_chunks(num, world):
    found = chunk_numels(num, world=world)
    assert found == sorted(found) and all(numel % (1024 * world) == 0 and numel > 0 for numel in found)
    assert num / found[0] <= 1.01 * chunk_size.MAX_NUM_CHUNKS
    assert all(later <= 1.5 * earlier + 1024 * world for earlier, later in zip(found, found[1:]))


def chosen(directory, num=40, size=300, **config):
    """Return (elements per chunk, number of chunks) that the engine chooses for a model of equal layers."""
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(num)))
    config = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "device_memory": "64MiB", "host_memory": "256MiB"} | config
    with infinity.offload(model, infinity.Config(swap_dirs=directory, device="cpu", dtype="bf16", **config)) as engine:
        infinity.AdamW(model.parameters())
        return engine.layout.chunk_numel, len(engine.layout.chunks)


@pytest.mark.slow
def test_the_chunk_size_follows_the_budgets(tmp_path):
    ample, _ = chosen(tmp_path)
    tight, _ = chosen(tmp_path, host_memory="8MiB")
    assert tight < ample
    assert chosen(tmp_path, num=4, size=1000)[1] < 40


@pytest.mark.long
def test_the_chosen_chunk_size_fits_the_room_on_nvme_if_any_does():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="meta") for _ in range(64)))

    def on(nvme_budget, **config):
        config = infinity.Config(device="cpu", **config)
        return arranged(model, config, device_budget=55 << 20, host_budget=60 << 20, nvme_budget=nvme_budget)

    ample = on(None)
    drives = range(ample[2].nvme_nbytes, 0, -(4 << 20))
    fits = [any(on(nbytes, chunk_mib=size)[2].nvme_nbytes <= nbytes for size in (1 / 4, 1 / 2, 1, 2, 4)) for nbytes in drives]
    for nbytes, one_fits in zip(drives, fits):
        placement = on(nbytes)[2]
        assert placement.nvme_nbytes <= nbytes or not one_fits, (nbytes, placement)
    assert 2 < sum(fits) < len(fits)


@pytest.mark.slow
def test_a_budget_below_all_chunk_sizes_is_refused_with_the_least(tmp_path):
    with pytest.raises(BudgetError, match="host_memory=1.0 KiB is too small") as error:
        chosen(tmp_path, host_memory=1024)
    least = needed(error)
    assert chosen(tmp_path, host_memory=least)[0]
    with pytest.raises(BudgetError):
        chosen(tmp_path, host_memory=least - 1)


# ---- the engine holds the planned bytes ----

MODES = [
    {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"},
    {"param_tier": "nvme", "optimizer_state_tier": "nvme"},
    {"param_tier": "host", "optimizer_state_tier": "nvme"},
    {"param_tier": "nvme", "optimizer_state_tier": "host"},
    {"param_tier": "host", "optimizer_state_tier": "host"},
    {"param_tier": "device", "optimizer_state_tier": "nvme"},
    {"param_tier": "device", "optimizer_state_tier": "host"},
    {"param_tier": "device", "optimizer_state_tier": "device"},
    {"host_memory": "600KiB", "device_memory": "400KiB"},
    {"host_memory": "1500KiB", "device_memory": "400KiB"},
    {},
]


@pytest.mark.slow
@pytest.mark.few(9)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_engine_holds_the_planned_bytes(tmp_path, mode, update, accumulation_steps):
    budgets = {"host_memory": "16MiB", "device_memory": "2MiB", **mode}
    config = infinity.Config(swap_dirs=tmp_path, dtype="bf16", device="cpu", chunk_mib=1 / 64, update=update, **budgets)
    with infinity.init(config):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    adam = infinity.AdamW(model.parameters(), accumulation_steps=accumulation_steps)
    engine = infinity.engine_of(model)
    with engine:
        for _ in range(2):
            for _ in range(accumulation_steps):
                model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            adam.step()
            adam.zero_grad()
        engine.flush()
        stats, placement = engine.stats(), engine.placement
        assert placement.host_nbytes <= config.host_memory
        assert placement.host_nbytes <= stats["pinned_host_nbytes"] <= 1.02 * placement.host_nbytes + 4096 * 4
        assert stats["peak_device_nbytes"] <= config.device_memory
        if placement.homes[STATES][0] == DEVICE:
            spans = sum(span.nbytes for span in engine.registry.spans)
            assert stats["peak_device_nbytes"] >= spans + sum(placement.sizes[STATES]) + sum(c.record.numel for c in engine.registry.chunks) * 2
        assert (engine.swap is None) == (placement.nvme_nbytes == 0)


def test_planner_names_no_more_slots_than_there_are_chunks():
    found = placed(num=3, weights="nvme", states="nvme", keep=False)
    assert found.slots == {WEIGHTS: 3, STATES: 3, GRADIENTS: 3}
    assert host_memory.WEIGHT_SLOTS > 3


@pytest.mark.long
def test_more_of_the_device_is_planned_if_the_other_tiers_are_too_small():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="meta") for _ in range(64)))
    config = infinity.Config(device="cpu", chunk_mib=1)

    def on(nvme_budget, device=20 << 20, largest=0):
        budgets = {"device_budget": device, "largest_budget": largest, "host_budget": 60 << 20, "nvme_budget": nvme_budget}
        return arranged(model, config, deferred=True, **budgets)[2]

    enough = min(nbytes for nbytes in range(0, 400 << 20, 4 << 20) if on(nbytes).nvme_nbytes <= nbytes)
    assert on(enough, largest=90 << 20) == on(enough), "nothing changes if all fits"
    more = on(enough - (8 << 20), largest=90 << 20)
    assert (more.device_nbytes, more.expected_nbytes) == (90 << 20, 90 << 20)
    assert more.nvme_nbytes <= enough - (8 << 20) < on(enough - (8 << 20)).nvme_nbytes
    assert more.least_nbytes > 20 << 20 and more.num_crowded_out > on(enough).num_crowded_out
    assert not on(enough - (8 << 20), largest=1 << 30).pinned, "records still leave to activations"
    assert on(0, largest=90 << 20).nvme_nbytes > 0, "the drive refuses the excess"

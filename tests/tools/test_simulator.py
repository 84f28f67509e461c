import dataclasses
import random

import pytest
from helpers import place

from infinity.errors import BudgetError, ConfigError
from infinity.formats.format import Format
from infinity.plan.packing import ParameterSpec, layout
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, record_layout
from infinity.plan.schedule import Use
from infinity.plan.slots import HostCache, StatesAhead
from infinity.plan.tiers import NVME
from infinity.tools.predict.links import LINKS, UPDATE_NBYTES
from infinity.tools.predict.machine import DriveRates, Machine
from infinity.tools.predict.step import Step
from infinity.tools.predict.simulator import simulate

NUMEL = 1000 * 1024
MS = 1e-3

# Each link takes a whole number of milliseconds for the bytes of 1,024,000 parameters.
MACHINE = Machine(
    device_memory=1 << 34,
    device_tflops=1.0,
    device_update_gparams=1.0,
    host_memory=1 << 34,
    host_gbps=100.0,
    update_gparams=28 / UPDATE_NBYTES * NUMEL / 3e6,  # 3 ms for an fp32 record: 28 bytes a parameter
    h2d_gbps=4 * NUMEL / 1e6,  # 1 ms
    d2h_gbps=4 * NUMEL / 1e6,
    h2d_all_gbps=4 * NUMEL / 1e6,
    d2h_all_gbps=4 * NUMEL / 1e6,
    copy_latency_us=0.0,
    gather_latency_us=0.0,
    chunk_overhead_us=0.0,
    drives=(DriveRates(read_gbps=4 * NUMEL / 1e6, write_gbps=4 * NUMEL / 1e6, mixed_gbps=4 * NUMEL / 1e6),),
)


def play(machine=MACHINE, num=3, world=1, seconds=(2 * MS, 4 * MS), update="backward", keep=True, device=1 << 30, host=1 << 30, numel=NUMEL, accumulates=False, moments_follow=False, **tiers):
    """Simulates `num` layers of one chunk each; `seconds` has the length of forward and backward of a layer."""
    specs = [ParameterSpec(f"p{i}", numel, Format("fp32", accumulates=accumulates)) for i in range(num)]
    layout_ = layout(specs, chunk_numel=numel, world=world)
    records = [record_layout(chunk.shard_used(0), chunk.format) for chunk in layout_.chunks]
    deferred = update == "deferred"
    placement = place(
        layout_,
        records,
        weights=tiers.get("weights", "host"),
        states=tiers.get("states", "host"),
        keep=keep,
        deferred=deferred or accumulates,
        updates_follow=deferred,
        device_budget=device,
        host_budget=host,
        held_nbytes=4 * numel,
        op_gradient_nbytes=4 * numel,
    )
    order = [*range(num), *reversed(range(num))]
    uses = [Use((i, index), (index,), frozenset({index})) for i, index in enumerate(order)]
    gradients = [()] * num + [(index,) for index in reversed(range(num))]
    step = Step(uses, [seconds[0]] * num + [seconds[1]] * num, gradients, num, deferred, keep, moments_follow)
    return layout_, records, placement, simulate(layout_, records, placement, step, machine)


def test_a_step_in_host_memory_has_the_exact_milliseconds():
    # Ops take 3 * 2 + 3 * 4 ms. Before the first op, the last gradient (chunk 0) goes to the host (1 ms), the record is updated (3 ms),
    # and the weights are copied (1 ms). All other work is hidden behind ops.
    *_, found = play()
    assert found.step_seconds == pytest.approx(23 * MS)
    assert found.busy_seconds["compute"] == pytest.approx(18 * MS)
    assert found.busy_seconds["update"] == pytest.approx(9 * MS)
    assert found.busy_seconds["h2d"] == found.busy_seconds["d2h"] == pytest.approx(3 * MS)
    assert sum(found.stall_seconds.values()) == pytest.approx(5 * MS)


def test_deferred_updates_are_hidden_behind_the_next_forward():
    # Updates run one after the other (3 ms each) during forward. Forward waits 1 + 3 + 1 ms for the first chunk, whose gradient came last,
    # and then 3 - 2 ms for each update. During the second and the third update, weights of the chunk before are copied: 4 bytes a parameter
    # in 1 ms. Host memory gives updates 28 bytes in 3 ms. Therefore both take 10/7 as long meanwhile.
    *_, found = play(update="deferred")
    assert found.step_seconds == pytest.approx(18 * MS + 5 * MS + 2 * MS + 2 * 3 / 7 * MS)


def test_moments_that_follow_weights_are_hidden_behind_the_backward_pass():
    """160 ms of compute. An update of 3 ms moves 28 bytes a parameter. The first job moves 20 of them in 2.14 ms, while an op takes 2 ms.
    The second job moves as many."""
    options = dict(num=16, seconds=(2 * MS, 8 * MS), update="deferred")
    *_, one = play(**options)
    *_, two = play(**options, moments_follow=True)
    assert one.step_seconds > 185 * MS and two.step_seconds < 173 * MS
    assert two.nbytes["update"] == pytest.approx(one.nbytes["update"])
    assert two.busy_seconds["update"] == pytest.approx(16 * 2 * 3 * 20 / 28 * MS, rel=0.15)


def test_updates_in_the_backward_pass_take_one_job():
    options = dict(num=16, seconds=(2 * MS, 8 * MS))
    assert play(**options)[-1].busy_seconds == play(**options, moments_follow=True)[-1].busy_seconds


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulates, most", [(False, 1.05), (True, 1.11)])
def test_updates_that_are_put_off_keep_the_drive_busy_in_forward(accumulates, most, monkeypatch):
    """7 ms a layer: 8 bytes of weights and 8 of states read, 12 written. Forward: 40 % of compute, 1/7 of the bytes if no update is put off."""
    layers, drive = 96, 7 * MS
    options = dict(num=layers, seconds=(0.4 * drive, 0.6 * drive), weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL)
    *_, found = play(**options, accumulates=accumulates)
    assert found.step_seconds <= most * layers * drive
    monkeypatch.setattr(HostCache, "is_crowded", lambda cache: False)
    *_, without = play(**options, accumulates=accumulates)
    assert without.step_seconds > 1.04 * found.step_seconds


@pytest.mark.parametrize("host, num_slots, most, at_need", [(720 << 20, 12, 1.54, 1.55), (1 << 30, 38, 1.34, 1.44), (2 << 30, 96, 1.01, 1.28)])
def test_states_read_ahead_of_step_keep_the_drive_busy_in_backward(host, num_slots, most, at_need, monkeypatch):
    """Updates follow step(). 7 ms a layer: 8 bytes of weights and 8 of states read, 12 written."""
    layers, drive = 96, 7 * MS
    machine = dataclasses.replace(MACHINE, update_gparams=4 * MACHINE.update_gparams)
    options = dict(num=layers, seconds=(0.25 * drive, 0.75 * drive), weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL, host=host)
    *_, placement, found = play(machine, **options, update="deferred")
    assert placement.slots[STATES] == num_slots
    assert found.step_seconds <= most * layers * drive
    monkeypatch.setattr(StatesAhead, "advance", lambda ahead: None)
    *_, found = play(machine, **options, update="deferred")
    assert found.step_seconds > at_need * layers * drive


def test_all_on_nvme_is_bound_by_the_drive():
    # Bytes a parameter: a step reads 8 of weights (fewer if their write is not over) and 8 of states, and writes 12. 4 bytes take 1 ms.
    *_, found = play(num=24, weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL)
    num = 24 * NUMEL
    assert found.nbytes["nvme_write"] == pytest.approx(12 * num, rel=0.1)
    assert 13 * num <= found.nbytes["nvme_read"] <= 17 * num
    drive = (found.nbytes["nvme_read"] + found.nbytes["nvme_write"]) / (MACHINE.drive_gbps("mixed") * 1e9)
    assert drive <= found.step_seconds * 1.05 <= drive * 1.2


def test_simultaneous_reads_and_writes_share_the_mixed_rate():
    slow = dataclasses.replace(MACHINE.drives[0], mixed_gbps=MACHINE.drives[0].mixed_gbps / 2)
    *_, alone = play(num=24, weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL)
    *_, shared = play(dataclasses.replace(MACHINE, drives=(slow,)), num=24, weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL)
    assert 1.2 * alone.step_seconds < shared.step_seconds <= 2.02 * alone.step_seconds


def test_two_drives_are_twice_as_fast():
    settings = dict(num=24, weights="nvme", states="nvme", keep=False, device=6 * 4 * NUMEL, seconds=(1e-6, 1e-6))
    fast = dataclasses.replace(MACHINE, **{name: 20 * getattr(MACHINE, name) for name in ("update_gparams", "h2d_gbps", "d2h_gbps")})
    *_, one = play(fast, **settings)
    *_, two = play(dataclasses.replace(fast, drives=MACHINE.drives * 2), **settings)
    assert two.step_seconds == pytest.approx(one.step_seconds / 2, rel=0.15)


def test_ranks_share_the_drives_of_a_node_and_gather_whole_chunks():
    # Each of four ranks has a quarter of each record and of the drive.
    machine = dataclasses.replace(MACHINE, devices=4, gather_gbps=3 * NUMEL / 1e6)
    numel = 4 * NUMEL
    layout_, records, _, found = play(machine, num=8, world=4, weights="nvme", states="nvme", keep=False, numel=numel, device=1 << 30)
    assert found.nbytes["all_gather"] == pytest.approx(4 * numel * 8 * 2, rel=0.2)  # forward and backward
    assert found.nbytes["reduce_scatter"] == pytest.approx(4 * numel * 8)
    assert found.nbytes["d2h"] == pytest.approx(numel * 8)
    assert found.busy_seconds["all_gather"] == pytest.approx(found.nbytes["all_gather"] * 3 / 4 / (3e6 * NUMEL / 1e6 * 1e3), rel=1e-6)


def test_ranks_without_a_rate_of_collectives_are_refused():
    with pytest.raises(ConfigError, match="gather_gbps"):
        play(dataclasses.replace(MACHINE, devices=2), world=2, numel=2 * NUMEL)


def test_compute_and_updates_share_the_processors_of_a_cpu_device():
    *_, cuda = play()
    *_, cpu = play(dataclasses.replace(MACHINE, device="cpu"))
    assert cpu.step_seconds > cuda.step_seconds * 1.2
    assert cpu.step_seconds >= cuda.busy_seconds["compute"] + cuda.busy_seconds["update"]


def test_updates_and_copies_share_host_memory():
    # Updates take as long as all other work, and copies need half of the memory bandwidth: neither is fully hidden.
    slow = dataclasses.replace(MACHINE, update_gparams=MACHINE.update_gparams / 2)
    fast_copies = dataclasses.replace(slow, h2d_gbps=1e6, d2h_gbps=1e6, h2d_all_gbps=1e6, d2h_all_gbps=1e6)
    *_, found = play(slow, num=12)
    *_, alone = play(fast_copies, num=12)
    assert alone.busy_seconds["update"] >= 12 * 6 * MS
    assert found.busy_seconds["update"] > 1.05 * 12 * 6 * MS


def test_the_overhead_of_an_op_is_hidden_on_a_cuda_device_only():
    machine = dataclasses.replace(MACHINE, op_overhead_us=3000)
    times = {"weights": "device", "states": "device"}
    *_, found = play(machine, **times)
    assert found.step_seconds == pytest.approx((3 * 3 + 3 * 4) * MS + 3 * NUMEL / 1e9)  # launches of the three 2 ms ops take 3 ms each
    *_, found = play(dataclasses.replace(machine, device="cpu"), **times)
    assert found.step_seconds == pytest.approx((3 * 5 + 3 * 7) * MS + 3 * NUMEL / 1e9)


def test_a_model_that_fits_on_the_device_moves_nothing():
    *_, found = play(weights="device", states="device")
    assert {link: nbytes for link, nbytes in found.nbytes.items() if nbytes} == {}
    assert found.step_seconds == pytest.approx(18 * MS + 3 * NUMEL / 1e9)


def test_two_simulations_have_the_same_result():
    first, second = (play(num=9, weights="nvme", states="nvme", keep=False)[-1] for _ in range(2))
    assert first == second


def test_one_link_does_one_thing_at_a_time():
    *_, found = play(num=12, weights="nvme", states="nvme", update="deferred", keep=False)
    for link in LINKS:
        works = sorted((work for work in found.works if work.link == link), key=lambda work: work.start)
        for before, after in zip(works, works[1:]):
            assert before.end <= after.start + 1e-9


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(12))
def test_small_budgets_never_hang_and_links_are_busy_for_a_step_at_most(seed):
    random_ = random.Random(seed)
    weights, states = random_.choice([("nvme", "nvme"), ("host", "nvme"), ("nvme", "host"), ("host", "host")])
    settings = dict(
        num=random_.randrange(2, 14),
        weights=weights,
        states=states,
        keep=random_.random() < 0.5,
        update=random_.choice(["backward", "deferred"]),
        seconds=(random_.choice([1e-5, 2e-3]), random_.choice([1e-5, 5e-3])),
    )
    device, host = 1 << 30, 1 << 34
    for _ in range(60):  # budgets shrink until they are refused
        try:
            *_, placement, found = play(device=device, host=host, **settings)
        except BudgetError:
            break
        assert found.step_seconds >= max(found.busy_seconds.values()) - 1e-9
        assert found.peak_device_nbytes <= device
        device = int(max(placement.least_nbytes, device * random_.uniform(0.3, 1)))
        host = int(host * random_.uniform(0.2, 1))
    else:
        pytest.fail("no budget is too small")


def test_more_host_memory_never_reads_more():
    read = [play(num=12, weights="auto", states="auto", device=3 * 4 * NUMEL, host=gigabytes << 28)[-1].nbytes["nvme_read"] for gigabytes in (1, 2, 4, 8)]
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0


def test_gradients_without_room_in_host_memory_go_to_nvme_and_back():
    *_, placement, found = play(num=40, weights="nvme", states="nvme", update="deferred", keep=False, host=16 * 8 * NUMEL)
    assert placement.homes[GRADIENTS].count(NVME) > 30
    assert found.nbytes["nvme_write"] > 12 * 40 * NUMEL * 1.1


def test_sizes_are_those_of_the_placement():
    layout_, records, placement, found = play(num=6, weights="nvme", states="nvme", keep=False)
    for work in found.works:
        if work.link == "nvme_read":
            index, kind = work.what
            assert work.nbytes == placement.sizes[kind][index]
            assert kind in (WEIGHTS, STATES)

"""Predictions equal the engine's layout, placement and bytes."""

import dataclasses
import math

import pytest
import torch

import infinity
from infinity import Config
from infinity.errors import BudgetError
from infinity.model.gpt import GPT
from infinity.plan.tiers import DEVICE
from infinity.tools.predict.machine import DriveRates, Machine
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.workload import workload

SIZES = dict(hidden=128, layers=4, heads=4, vocab=256, seq=32)
CPU = Machine(
    device="cpu",
    device_memory=8 << 30,
    device_tflops=0.02,
    device_update_gparams=0.5,
    host_memory=16 << 30,
    host_gbps=20.0,
    update_gparams=0.5,
    h2d_gbps=7.0,
    d2h_gbps=7.0,
    h2d_all_gbps=7.0,
    d2h_all_gbps=7.0,
    drives=(DriveRates(read_gbps=20.0, write_gbps=20.0, mixed_gbps=20.0),),
)
GPU = dataclasses.replace(CPU, device="cuda", device_memory=16 << 30, device_tflops=100.0, device_update_gparams=50.0)
CHUNKS = dict(chunk_mib=0.125, device_memory="5MiB", host_memory="24MiB")
NVME = dict(param_tier="nvme", optimizer_state_tier="nvme")


def freeze_base(model):
    """Freeze the linear layers of the blocks."""
    for name, param in model.named_parameters():
        param.requires_grad_("blocks" not in name or param.dim() < 2)


def gpt_on_meta(batch=2, checkpointed=False, dtype=torch.float32, frozen=False, **sizes):
    sizes = SIZES | sizes
    with torch.device("meta"):
        model = GPT(**sizes).to(dtype)
    if frozen:
        freeze_base(model)
    tokens = torch.empty(batch, sizes["seq"], dtype=torch.int64, device="meta")
    return model, workload(model, lambda: model(tokens, tokens), tokens=batch * sizes["seq"], recompute=checkpointed)


def run(config, checkpointed, steps=9, since=3, frozen=False):
    """(bytes per step of each link, peak of the device, layout, placement) of a real engine."""
    torch.manual_seed(0)
    with infinity.init(config):
        model = GPT(**SIZES, checkpoint_activations=checkpointed)
        if frozen:
            freeze_base(model.bfloat16())
    optimizer = infinity.AdamW([param for param in model.parameters() if param.requires_grad])
    tokens = torch.randint(0, SIZES["vocab"], (2, SIZES["seq"]))
    stats = []
    with infinity.engine_of(model) as engine:
        for number in range(steps):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in (since - 1, steps - 1):
                engine.flush()  # a step counts the work that it leaves to the next step
            stats.append(engine.stats())
        layout, placement = engine.layout, engine.placement
    first, last = stats[since - 1]["links"], stats[-1]["links"]
    nbytes = {link: (last[link]["nbytes"] - first[link]["nbytes"]) / (steps - since) for link in last}
    return nbytes, stats[-1]["peak_device_nbytes"], layout, placement


@pytest.mark.few(2)
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "settings",
    [
        NVME | dict(residency="none", update="backward"),
        NVME | dict(residency="none", update="deferred"),
        NVME | dict(residency="none", compression="on"),
        dict(param_tier="host", optimizer_state_tier="nvme", residency="none"),
        dict(param_tier="host", optimizer_state_tier="host"),
        dict(param_tier="host", optimizer_state_tier="host", update="deferred"),
        dict(host_memory="9MiB"),
        dict(device_memory="40MiB"),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_bytes_and_memory_are_those_of_a_real_run(tmp_path, settings, checkpointed):
    config = Config(swap_dirs=tmp_path, dtype="fp32", device="cpu", **(CHUNKS | settings))
    nbytes, peak, layout, placement = run(config, checkpointed)
    model, load = gpt_on_meta(checkpointed=checkpointed)
    prediction = predict(model, load, CPU, config)
    assert prediction.layout == layout
    assert dataclasses.replace(prediction.placement, fixed_nbytes=0) == dataclasses.replace(placement, fixed_nbytes=0)
    predicted, num = prediction.simulation.nbytes, layout.num_parameters
    # An engine that waits for its drive reuses weights whose write is not over. Their number depends on the timing.
    spans = range(len(layout.spans)) if placement.homes["states"][0] == DEVICE else prediction.spans_on_device
    on_device = sum(layout.chunks[index].used for span in spans for index in layout.spans[span].chunks)
    assert predicted["nvme_read"] == pytest.approx(nbytes["nvme_read"], abs=2.5 * num)
    assert predicted["nvme_write"] == pytest.approx(nbytes["nvme_write"], abs=1.5 * num)
    assert predicted["h2d"] == pytest.approx(nbytes["h2d"], abs=0.5 * num)
    assert predicted["d2h"] == pytest.approx(nbytes["d2h"], abs=0.3 * num)
    assert predicted["update"] == pytest.approx(nbytes["update"] - 12 * on_device, abs=0.7 * num)
    assert peak <= prediction.simulation.peak_device_nbytes <= max(placement.device_nbytes, peak)


@pytest.mark.long
@pytest.mark.parametrize("settings", [NVME | dict(residency="none"), dict(device_memory="2MiB"), dict(device_memory="40MiB")], ids=str)
def test_bytes_of_a_quantised_frozen_base_are_those_of_a_real_run(tmp_path, settings):
    """With 2 MiB, frozen weights come and go. With 40 MiB nothing moves after the first step."""
    config = Config(swap_dirs=tmp_path, dtype="bf16", frozen_dtype="nf4", device="cpu", **(CHUNKS | settings))
    nbytes, _, layout, _ = run(config, False, frozen=True)
    model, load = gpt_on_meta(dtype=torch.bfloat16, frozen=True)
    prediction = predict(model, load, CPU, config)
    assert prediction.layout == layout
    assert any(span.format.name == "nf4" for span in layout.spans)
    weights = sum(record.weight_nbytes for record in prediction.records)
    for link in ("nvme_read", "nvme_write", "h2d", "d2h"):
        assert prediction.simulation.nbytes[link] == pytest.approx(nbytes[link], abs=0.25 * weights), link
    assert (nbytes["h2d"] == 0) == (settings.get("device_memory") == "40MiB")


def test_a_model_that_does_not_fit_names_the_short_memory():
    model, load = gpt_on_meta(dtype=torch.bfloat16)
    tight = dataclasses.replace(GPU, device_memory=load.saved_nbytes)
    with pytest.raises(BudgetError, match="activations alone"):
        predict(model, load, tight, Config())
    with pytest.raises(BudgetError, match="device_memory"):
        predict(model, load, GPU, Config(device_memory=4096))
    with pytest.raises(BudgetError, match="host_memory"):
        predict(model, load, GPU, Config(host_memory=4096, device_memory="3MiB"))
    with pytest.raises(BudgetError, match="more than the machine has"):
        predict(model, load, GPU, Config(host_memory="20GiB"))
    with pytest.raises(BudgetError, match="nvme"):
        predict(model, load, dataclasses.replace(GPU, drives=()), Config(**NVME))
    small = dataclasses.replace(GPU.drives[0], capacity=1 << 20)
    with pytest.raises(BudgetError, match="nvme"):
        predict(model, load, dataclasses.replace(GPU, drives=(small,)), Config(**NVME))


def test_a_model_that_fits_stays_on_the_device():
    model, load = gpt_on_meta(dtype=torch.bfloat16)
    prediction = predict(model, load, GPU, Config())
    assert prediction.placement.homes["states"] == (DEVICE,) * len(prediction.layout.chunks)
    assert prediction.bottleneck == "compute"
    assert sum(prediction.simulation.nbytes.values()) == 0


def test_records_use_the_device_memory_that_is_left():
    model, load = gpt_on_meta(dtype=torch.bfloat16)
    machine = dataclasses.replace(GPU, device_memory=int(1.1 * load.saved_nbytes) + (6 << 20))
    prediction = predict(model, load, machine, Config(chunk_mib=0.125))
    assert 0 < len(prediction.spans_on_device) < len(prediction.layout.spans)
    assert prediction.memory[DEVICE].needed <= machine.device_memory


def test_compute_hides_transfers_from_the_predicted_tokens_on():
    model, load = gpt_on_meta(dtype=torch.bfloat16)
    config = Config(param_tier="host", optimizer_state_tier="host", chunk_mib=0.125)
    machine = dataclasses.replace(GPU, device_memory=1 << 40, chunk_overhead_us=0.0, copy_latency_us=0.0)
    few = predict(model, load, machine, config)
    assert few.hiding_tokens > 4 * load.tokens
    batch = round(2 * few.hiding_tokens / SIZES["seq"])
    model, load = gpt_on_meta(batch=batch, dtype=torch.bfloat16)
    many = predict(model, load, machine, config)
    assert many.bottleneck == "compute"
    assert many.step_seconds < 1.35 * many.compute_seconds
    assert few.step_seconds > 2 * few.compute_seconds


def test_serial_micro_batches_need_more_tokens_than_layer_wise_ones():
    model, load = gpt_on_meta(dtype=torch.bfloat16)
    slow = tuple(dataclasses.replace(drive, read_gbps=0.02, write_gbps=0.02, mixed_gbps=0.02) for drive in GPU.drives)
    machine = dataclasses.replace(GPU, device_memory=1 << 40, drives=slow)
    config = Config(**NVME, device_memory="3MiB", host_memory="4MiB", residency="none", chunk_mib=0.125)
    once = predict(model, load, machine, config)
    read, written = once.simulation.nbytes["nvme_read"], once.simulation.nbytes["nvme_write"]
    assert once.more_nbytes["nvme_read"] > 0.2 * read and once.more_nbytes["nvme_write"] < once.more_nbytes["nvme_read"]  # weights are read twice
    drive_seconds = (read + written) / 0.02e9
    assert once.hiding_tokens == pytest.approx(load.tokens * drive_seconds / once.compute_seconds, rel=0.01)
    assert once.hiding_tokens_in_turn == math.inf  # a micro-batch is shorter than the reads of its weights
    longer = dataclasses.replace(machine, device_tflops=machine.device_tflops * once.compute_seconds / drive_seconds)  # compute = drive time
    halfway = dataclasses.replace(longer, device_tflops=2 * longer.device_tflops)
    found = predict(model, load, halfway, config)
    more = found.more_nbytes["nvme_read"] + found.more_nbytes["nvme_write"]
    num = (read + written - more) / ((read + written) / 2 - more)
    assert found.hiding_tokens == pytest.approx(2 * load.tokens, rel=0.02)
    assert found.hiding_tokens_in_turn == pytest.approx(load.tokens * num, rel=0.05)


def test_more_nodes_have_more_drives():
    model, load = gpt_on_meta(dtype=torch.bfloat16, hidden=256)
    one = dataclasses.replace(GPU, devices=2, gather_gbps=100.0, network_gbps=50.0, chunk_overhead_us=0.0, gather_latency_us=0.0)
    config = Config(**NVME, residency="none", chunk_mib=0.25)
    seconds = [predict(model, load, dataclasses.replace(one, nodes=nodes), config).step_seconds for nodes in (1, 2, 4)]
    assert seconds[0] > 1.6 * seconds[1] > 1.6 * 1.3 * seconds[2]

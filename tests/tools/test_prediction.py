"""Predictions equal the engine's layout, placement and bytes."""

import dataclasses
import math

import pytest
import torch

import infinity
from infinity import Config
from infinity.engine.memory.allocation_trial import AllocationTrial
from infinity.errors import BudgetError
from infinity.model.gpt import GPT
from infinity.plan.tiers import DEVICE, HOST
from infinity.tools.machine import DriveRates, Machine
from infinity.tools.meta_models import Subject
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.simulated_run import TrainingStep, num_counted, train, world_of

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


def gpt_on_meta(batch=2, dtype=torch.float32, frozen=False, **sizes):
    sizes = SIZES | sizes
    with torch.device("meta"):
        model = GPT(**sizes).to(dtype)
    if frozen:
        freeze_base(model)
    tokens = torch.empty(batch, sizes["seq"], dtype=torch.int64, device="meta")
    return Subject("a GPT", model, {"tokens": tokens, "targets": tokens}, batch * sizes["seq"])


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
    prediction = predict(gpt_on_meta(), CPU, config, TrainingStep(recompute=checkpointed))
    assert prediction.layout == layout
    assert prediction.placement.homes == placement.homes
    predicted, num = {link: use.nbytes for link, use in prediction.uses.items()}, layout.num_parameters
    # An engine that waits for its drive reuses weights whose write is not over. Their number depends on the timing.
    assert predicted["nvme_read"] == pytest.approx(nbytes["nvme_read"], abs=2.5 * num)
    assert predicted["nvme_write"] == pytest.approx(nbytes["nvme_write"], abs=1.5 * num)
    assert predicted["h2d"] == pytest.approx(nbytes["h2d"], abs=0.5 * num)
    assert predicted["d2h"] == pytest.approx(nbytes["d2h"], abs=0.3 * num)
    assert predicted["update"] == pytest.approx(nbytes["update"], abs=0.7 * num)
    assert peak <= prediction.memory[HOST].needed


@pytest.mark.long
@pytest.mark.parametrize("settings", [NVME | dict(residency="none"), dict(device_memory="2MiB"), dict(device_memory="40MiB")], ids=str)
def test_bytes_of_a_quantised_frozen_base_are_those_of_a_real_run(tmp_path, settings):
    """With 2 MiB, frozen weights come and go. With 40 MiB nothing moves after the first step."""
    config = Config(swap_dirs=tmp_path, dtype="bf16", frozen_dtype="nf4", device="cpu", **(CHUNKS | settings))
    nbytes, _, layout, _ = run(config, False, frozen=True)
    prediction = predict(gpt_on_meta(dtype=torch.bfloat16, frozen=True), CPU, config)
    assert prediction.layout == layout
    assert any(span.format.name == "nf4" for span in layout.spans)
    weights = layout.num_parameters / 2
    for link in ("nvme_read", "nvme_write", "h2d", "d2h"):
        # Real runs of one setting read 4 to 19 % more or less than each other: the copies that are still in host memory depend on the timing.
        rel = 0.2 if link == "nvme_read" else None
        assert prediction.uses[link].nbytes == pytest.approx(nbytes[link], rel=rel, abs=0.25 * weights), link
    assert (nbytes["nvme_read"] > 0) == (settings.get("param_tier") == "nvme")
    assert (nbytes["h2d"] == 0) == (settings.get("device_memory") == "40MiB")


def test_steps_in_which_an_undone_division_may_come_back_do_not_count(tmp_path, monkeypatch):
    """A division has failed in steps 2 to 4. Without that, four equal steps are enough."""
    ended, step_done = [], AllocationTrial.step_done
    monkeypatch.setattr(AllocationTrial, "step_done", lambda trial: ended.append(trial) or step_done(trial))
    config, nums = Config(swap_dirs=[tmp_path], dtype="fp32", device="cpu", verbose=False), []
    for fails in ((), range(2, 5)):
        ended.clear()
        monkeypatch.setattr(AllocationTrial, "has_just_failed", property(lambda trial, fails=fails: len(ended) in fails))
        nums.append(train(world_of(CPU), gpt_on_meta(), config, TrainingStep(), lambda engine, marks: (len(marks) - 1, num_counted(engine))))
    assert nums[0][0] == 4 and nums[1][0] == 4 + nums[1][1]


class _Writes(torch.nn.Module):
    """Writes a few rows of a large buffer, and reads another one as complex numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(512, 512)
        self.register_buffer("queue", torch.zeros(512, 512))
        self.register_buffer("table", torch.zeros(512, 512))

    def forward(self, x):
        self.queue[:16] = x.detach()[:16]
        turned = torch.view_as_complex(self.table.view(512, 256, 2)).real.sum()
        return self.linear(x).sum() + self.queue.sum() + turned


def test_buffers_and_inputs_may_be_written():
    with torch.device("meta"):
        subject = Subject("writes", _Writes(), {"x": torch.empty(512, 512)}, 512)
    assert predict(subject, GPU, Config(dtype="fp32", chunk_mib=0.25)).step_seconds > 0


def test_the_time_of_jobs_lengthens_steps_that_move_chunks():
    """Each job takes a processor's time, so a step of many chunks becomes longer, and one that moves nothing does not."""
    slow = dataclasses.replace(CPU, job_overhead_us=400.0)
    moving = Config(dtype="fp32", **CHUNKS | NVME | dict(residency="none"))
    steps = {config: [predict(gpt_on_meta(), machine, config).step_seconds for machine in (CPU, slow)] for config in (moving, Config(dtype="fp32"))}
    before, after = steps[moving]
    assert after > before + 0.01
    assert steps[Config(dtype="fp32")][1] == pytest.approx(steps[Config(dtype="fp32")][0], rel=0.02)


def test_a_model_that_does_not_fit_names_the_short_memory():
    subject = gpt_on_meta(dtype=torch.bfloat16)
    tight = dataclasses.replace(GPU, device_memory=9 << 20)
    with pytest.raises(BudgetError, match="device_memory: activations"):
        predict(gpt_on_meta(batch=64, dtype=torch.bfloat16), tight, Config(chunk_mib=0.125))
    with pytest.raises(BudgetError, match="device_memory"):
        predict(subject, GPU, Config(device_memory=4096))
    with pytest.raises(BudgetError, match="host_memory"):
        predict(subject, GPU, Config(host_memory=4096, device_memory="3MiB"))
    with pytest.raises(BudgetError, match="more than the machine has"):
        predict(subject, GPU, Config(host_memory="20GiB"))
    with pytest.raises(BudgetError, match="more than a device has"):
        predict(subject, GPU, Config(device_memory="20GiB"))
    with pytest.raises(BudgetError, match="nvme"):
        predict(subject, dataclasses.replace(GPU, drives=()), Config(**NVME))
    small = dataclasses.replace(GPU.drives[0], capacity=1 << 20)
    with pytest.raises(BudgetError, match="nvme"):
        predict(subject, dataclasses.replace(GPU, drives=(small,)), Config(**NVME))


@pytest.mark.slow
def test_a_model_that_fits_stays_on_the_device():
    prediction = predict(gpt_on_meta(dtype=torch.bfloat16), GPU, Config())
    assert prediction.placement.homes["states"] == (DEVICE,) * len(prediction.layout.chunks)
    assert sum(use.nbytes for link, use in prediction.uses.items() if link != "update") == 0


def test_records_visit_the_device_memory_that_is_left():
    """The engine measures the activations, and then knows the rest of the device."""
    machine = dataclasses.replace(GPU, device_memory=64 << 20)
    prediction = predict(gpt_on_meta(batch=64, dtype=torch.bfloat16), machine, Config(chunk_mib=0.125, device_memory="9MiB"))
    sent = prediction.uses["d2h"].nbytes
    assert 0 < sent < 2 * prediction.layout.num_parameters  # all gradients but those of the visitors
    assert 0 < prediction.memory[DEVICE].activations < prediction.memory[DEVICE].needed <= machine.device_memory


@pytest.mark.slow
def test_a_step_takes_the_time_of_its_longest_link():
    config = Config(param_tier="host", optimizer_state_tier="host", chunk_mib=0.125, device_memory="3MiB")
    few = predict(gpt_on_meta(dtype=torch.bfloat16), dataclasses.replace(GPU, h2d_gbps=0.01, copy_latency_us=0.0), config)
    assert few.bottleneck == "h2d" and few.uses["h2d"].stall_seconds > 0.5 * few.step_seconds
    assert few.step_seconds == pytest.approx(few.uses["h2d"].nbytes / 0.01e9, rel=0.2)
    slow = predict(gpt_on_meta(dtype=torch.bfloat16), dataclasses.replace(GPU, device_tflops=0.001), config)
    assert slow.bottleneck == "compute" and slow.step_seconds == pytest.approx(slow.compute_seconds, rel=0.1)


@pytest.mark.long
def test_serial_micro_batches_need_more_tokens_than_layer_wise_ones():
    subject = gpt_on_meta(dtype=torch.bfloat16)
    slow = tuple(dataclasses.replace(drive, read_gbps=0.02, write_gbps=0.02, mixed_gbps=0.02) for drive in GPU.drives)
    machine = dataclasses.replace(GPU, drives=slow)
    config = Config(**NVME, device_memory="3MiB", host_memory="4MiB", residency="none", chunk_mib=0.125)
    once = predict(subject, machine, config)
    read, written = once.uses["nvme_read"].nbytes, once.uses["nvme_write"].nbytes
    assert once.more_nbytes["nvme_read"] > 0.2 * read and once.more_nbytes["nvme_write"] < once.more_nbytes["nvme_read"]  # weights are read twice
    drive_seconds = (read + written) / 0.02e9
    assert once.hiding_tokens == pytest.approx(subject.tokens * drive_seconds / once.compute_seconds, rel=0.01)
    assert once.hiding_tokens_in_turn == math.inf  # a micro-batch is shorter than the reads of its weights
    halfway = dataclasses.replace(machine, device_tflops=2 * machine.device_tflops * once.compute_seconds / drive_seconds)
    found = predict(subject, halfway, config)
    read, written = found.uses["nvme_read"].nbytes, found.uses["nvme_write"].nbytes
    more = found.more_nbytes["nvme_read"] + found.more_nbytes["nvme_write"]
    num = ((read + written) / 0.02e9 - more / 0.02e9) / (found.compute_seconds - more / 0.02e9)
    assert found.hiding_tokens_in_turn == pytest.approx(subject.tokens * num, rel=0.05) and found.hiding_tokens < found.hiding_tokens_in_turn


@pytest.mark.long
def test_micro_batches_by_layer_take_less_time_than_a_loop():
    config = Config(**NVME, device_memory="6MiB", host_memory="12MiB", chunk_mib=0.125)
    one, loop, layer = (
        predict(gpt_on_meta(dtype=torch.bfloat16), GPU, config, TrainingStep(num_micro_batches=num, by_layer=by_layer, max_grad_norm=1.0))
        for num, by_layer in ((1, False), (4, False), (4, True))
    )
    assert one.step_seconds < layer.step_seconds < 0.8 * loop.step_seconds
    assert loop.tokens == layer.tokens == 4 * one.tokens


@pytest.mark.long
def test_more_nodes_have_more_drives():
    subject = gpt_on_meta(dtype=torch.bfloat16, hidden=256)
    drives = tuple(dataclasses.replace(drive, read_gbps=0.2, write_gbps=0.2, mixed_gbps=0.2) for drive in GPU.drives)
    one = dataclasses.replace(GPU, devices=2, gather_gbps=100.0, network_gbps=50.0, gather_latency_us=0.0, drives=drives)
    config = Config(**NVME, residency="none", chunk_mib=0.25)
    seconds = [predict(subject, dataclasses.replace(one, nodes=nodes), config).step_seconds for nodes in (1, 2, 4)]
    assert seconds[0] > 1.5 * seconds[1] > 1.5 * 1.3 * seconds[2]


def test_raw_records_on_fast_drives_take_no_time_of_the_codec():
    """The codec would decode 2.5 GB/s a thread."""
    subject = gpt_on_meta(dtype=torch.bfloat16, hidden=2048)
    rate = dict.fromkeys(("read_gbps", "write_gbps", "mixed_gbps"), 1e3)
    node = dataclasses.replace(GPU, drives=(DriveRates(**rate),), copy_latency_us=0.0, cores=4, update_gparams=1e3)
    on_nvme, in_host = (
        predict(subject, node, Config(param_tier=tier, optimizer_state_tier=tier, residency="none", chunk_mib=32)) for tier in ("nvme", "host")
    )
    assert not on_nvme.compresses_nvme and on_nvme.uses["nvme_read"].nbytes > 2e9
    assert on_nvme.step_seconds < 1.2 * in_host.step_seconds


@pytest.mark.parametrize("share", [0.2, 0.24, 0.29, 0.43])
def test_a_layer_that_does_not_fit_beside_its_reduction_is_cut(share):
    """The weight of the widest layer takes a share of device_memory. With gradient and two buffers of reductions it needs four times its bytes."""
    hidden = 512
    subject = gpt_on_meta(dtype=torch.bfloat16, hidden=hidden)
    two = dataclasses.replace(GPU, devices=2, gather_gbps=100.0, gather_latency_us=0.0)
    found = predict(subject, two, Config(**NVME, chunk_mib=0.125, device_memory=int(4 * hidden * hidden * 2 / share)))
    assert found.step_seconds > 0


@pytest.mark.slow
def test_a_prediction_repeats_exactly():
    config = Config(**NVME, device_memory="3MiB", host_memory="6MiB", chunk_mib=0.125)
    first, again = (predict(gpt_on_meta(dtype=torch.bfloat16), GPU, config) for _ in range(2))
    assert first.step_seconds == again.step_seconds and first.uses == again.uses and first.memory == again.memory

"""When the engine reports that layer-wise accumulation would shorten steps."""

import pytest
import torch

import infinity
from infinity.engine.memory import advice as module
from infinity.engine.memory.advice import NUM_STEPS, LayerwiseAdvice
from infinity.system.events import Events

MIB = 1 << 20


class Steps:
    """Steps on a simulated clock: each pass takes `compute` seconds, and the drive moves 100 MiB per second."""

    def __init__(self, monkeypatch):
        self.time, self.told = 0.0, []
        monkeypatch.setattr(module, "now", lambda: self.time)
        self.events = Events()
        self.advice = LayerwiseAdvice(self.events, "rank 1 of 2, ", self.told.append)

    def step(self, passes: list[int], *, written: int = 0, compute: float = 1.0):
        """passes: MiB that each pass reads. written: MiB that the last pass writes."""
        self.advice.begin()
        for number, read in enumerate(passes):
            drive = read / 100
            self.events.moved("nvme_read", 0, read * MIB, self.time, self.time + drive)
            last = written / 100 if number == len(passes) - 1 else 0.0
            self.events.moved("nvme_write", 0, written * MIB if last else 0, self.time, self.time + last)
            waits = max(0.0, max(drive, last) - compute)
            self.events.stalled("nvme_read", 0, self.time, self.time + waits)
            self.time += compute + waits
            self.advice.pass_done()
        self.advice.step_done()


def test_advice_is_given_once_after_several_steps_that_would_be_shorter(monkeypatch):
    steps = Steps(monkeypatch)
    for number in range(2 * NUM_STEPS):
        assert bool(steps.told) == (number >= NUM_STEPS)
        steps.step([400, 400, 400, 1000], written=600)  # the loop takes 4 + 4 + 4 + 10 s, a layer-wise step 10 s of drive time
    (text,) = steps.told
    assert text.startswith("rank 1 of 2, ") and "infinity.accumulate(model, micro_batches, loss)" in text
    assert "10 s instead of 22" in text and "2.1 GiB" in text and "1.2 GiB" in text
    assert steps.advice.speedup == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("passes", "compute"),
    [([1000], 1.0), ([0, 0, 0, 600], 1.0), ([20, 20, 20, 600], 1.0), ([400, 400, 400, 1000], 10.0)],
    ids=["one pass", "weights are kept", "most weights are kept", "compute hides it"],
)
def test_no_advice_is_given_for_a_small_gain(monkeypatch, passes, compute):
    steps = Steps(monkeypatch)
    for _ in range(3 * NUM_STEPS):
        steps.step(passes, compute=compute)
    assert not steps.told
    assert steps.advice.speedup is None or steps.advice.speedup < module.WORTH


def test_dropped_steps_do_not_count(monkeypatch):
    steps = Steps(monkeypatch)
    for _ in range(3 * NUM_STEPS):
        steps.advice.begin()
        steps.events.moved("nvme_read", 0, 400 * MIB, steps.time, steps.time + 4)
        steps.time += 4
        steps.advice.pass_done()  # zero_grad() drops this step
        steps.advice.begin()
        steps.time += 1
        steps.advice.pass_done()
        steps.advice.pass_done()
        steps.advice.step_done()
    assert not steps.told


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("by_layer", [False, True], ids=["loop", "by layer"])
def test_the_ordinary_loop_gets_advice_and_layer_wise_steps_get_none(tmp_path, capsys, monkeypatch, by_layer):
    monkeypatch.setattr(module, "WORTH", 0.0)  # the drive of this machine may be fast
    config = infinity.Config(
        swap_dirs=tmp_path, device="cpu", dtype="fp32", param_tier="nvme", optimizer_state_tier="nvme", residency="none", host_memory="16MiB", device_memory="8MiB", chunk_mib=0.25
    )
    with infinity.init(config):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    optimizer = infinity.AdamW(model.parameters(), accumulation_steps=6)
    engine = infinity.engine_of(model)
    batches = [torch.ones(2, 256) for _ in range(6)]
    for _ in range(NUM_STEPS + 3):
        if by_layer:
            infinity.accumulate(model, batches, lambda model, x: model(x).square().mean())
        else:
            for x in batches:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    speedup = engine.stats()["layerwise_speedup"]
    engine.close()
    said = capsys.readouterr().err
    if by_layer:
        assert speedup is None and "infinity.accumulate" not in said
    else:
        assert speedup > 0 and said.count("infinity.accumulate(model, micro_batches, loss)") == 1

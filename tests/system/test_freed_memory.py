"""Freed memory goes back to the system: a training process stays within the budgets."""

import pytest
from support.helpers import run_python

from infinity.system import freed_memory
from infinity.system.freed_memory import LEAST_NBYTES, LOOK_NBYTES, MOST_NBYTES, Freed

TRAINING = """
    import ctypes, sys
    import torch, infinity
    from infinity.model.gpt import GPT
    from infinity.system.freed_memory import resident_nbytes

    directory, hidden, layers, device_mib, host_mib = sys.argv[1], *map(int, sys.argv[2:])
    x = torch.randint(0, 256, (1, 64))
    plain = GPT(hidden, 1, 4, 256, 64).to(torch.bfloat16)
    plain(x, x).backward()
    del plain
    ctypes.CDLL(None).malloc_trim(0)
    base = resident_nbytes()  # PyTorch and its caches of ops
    budgets = {"device_memory": device_mib << 20, "host_memory": host_mib << 20}
    with infinity.init(infinity.Config(swap_dirs=directory, device="cpu", param_tier="nvme", optimizer_state_tier="nvme", **budgets)):
        model = GPT(hidden, layers, 4, 256, 64)
    optimizer = infinity.AdamW(model.parameters())
    most = base + 1.15 * sum(budgets.values())

    def check(what):
        nbytes = resident_nbytes()
        print(f"{what}: {(nbytes - base) / 2**20:.0f} MiB above {base / 2**20:.0f}, of {(most - base) / 2**20:.0f}", flush=True)
        assert nbytes <= most, what

    for step in range(4):
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(f"step {step}")
    infinity.save(f"{directory}/saved", model, optimizer)
    check("save")
    infinity.load(f"{directory}/saved", model, optimizer)
    check("load")
    model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    check("the step after")
"""


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1024, 5, 75, 75), (2048, 10, 400, 300)], ids=["64 M parameters", "504 M parameters"])
def test_a_training_process_stays_within_15_percent_of_its_budgets(sizes, tmp_path):
    done = run_python(TRAINING, tmp_path, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr


PASSES = """
    import sys
    import torch, infinity
    from torch import nn
    from infinity.system.freed_memory import resident_nbytes

    directory, width, host_mib, device_mib, most_mib, *depths = sys.argv[1], *map(int, sys.argv[2:])
    budgets = {"device_memory": device_mib << 20, "host_memory": host_mib << 20}
    config = infinity.Config(swap_dirs=directory, device="cpu", dtype="fp32", param_tier="nvme", optimizer_state_tier="nvme", residency="none", **budgets)
    for depth in depths:
        with infinity.init(config):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        optimizer = infinity.AdamW(model.parameters())  # the engine starts: from now on the host memory is resident
        peak = start = resident_nbytes()

        def note(*_):
            global peak
            peak = max(peak, resident_nbytes())

        for layer in model:
            layer.register_forward_hook(lambda layer, inputs, output: (note(), output.register_hook(note))[0])
        for step in range(2):
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine = infinity.engine_of(model)
        grown = (peak - start) / 2**20
        print(f"{depth} layers: {grown:.0f} MiB in a pass, {device_mib} MiB of spans and {most_mib} MiB expected at most", flush=True)
        assert grown <= device_mib + most_mib
        engine.close()
        del model, optimizer, engine
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [(512, 24, 16, 56, 30, 60, 120), pytest.param((1024, 256, 128, 120, 64, 128, 190), marks=pytest.mark.long)],
    ids=["8 to 31 M parameters", "67 to 199 M parameters"],
)
def test_a_pass_of_any_model_stays_within_its_budgets(sizes, tmp_path):
    """Within a pass, resident memory grows by the budget of device memory and a constant, for models of all sizes."""
    done = run_python(PASSES, tmp_path, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr


MIB = 1 << 20


@pytest.fixture
def memory(monkeypatch):
    """A fake: `sizes` are the successive readings of resident memory, in MiB; `num_trims` counts calls of malloc_trim."""

    class Memory:
        sizes: list[int]
        num_trims = 0

        def malloc_trim(self, pad):
            self.num_trims += 1

    memory = Memory()
    monkeypatch.setattr(freed_memory, "resident_nbytes", lambda: memory.sizes.pop(0) * MIB)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: memory)
    return memory


def look(memory, end, sizes):
    """Return the number of trims during end(), which must take all readings of `sizes`."""
    before, memory.sizes = memory.num_trims, sizes
    end()
    assert not memory.sizes
    return memory.num_trims - before


def test_memory_is_trimmed_after_growth_by_a_share_of_the_budgets(memory):
    freed = Freed(500 * MIB, 0, lambda: (0, 0))
    for sizes, goes_back in (([900, 500], 1), ([550], 0), ([551, 540], 1), ([300], 0), ([351, 340], 1)):
        assert look(memory, freed.give_back, sizes) == goes_back


def test_a_step_keeps_freed_blocks_up_to_the_budget_of_spans(memory):
    freed = Freed(100 * MIB, 50 * MIB, lambda: (0, 0))
    for end, sizes, goes_back in (
        (freed.give_back, [400, 300], 1),
        (freed.give_back_after_step, [350], 0),
        (freed.give_back_after_step, [351, 310], 1),
        (freed.give_back, [327, 310], 1),
    ):
        assert look(memory, end, sizes) == goes_back


def test_unused_freed_blocks_go_back_within_a_pass(memory):
    held = [10 * MIB, 20 * MIB]
    freed = Freed(200 * MIB, 100 * MIB, lambda: held)
    allocate = lambda: freed.note_allocated(LOOK_NBYTES)
    look(memory, freed.give_back, [310, 310])  # 300 MiB beside the held 10
    assert look(memory, lambda: freed.note_allocated(LOOK_NBYTES - 1), []) == 0
    assert look(memory, lambda: freed.note_allocated(1), [400]) == 0
    assert look(memory, allocate, [401, 320]) == 1  # 310 of them are the rest and activations
    assert look(memory, allocate, [350]) == 0
    assert look(memory, allocate, [351, 320]) == 1
    assert look(memory, allocate, [305]) == 0  # activations are freed
    assert look(memory, allocate, [336, 305]) == 1


@pytest.mark.parametrize("budget_nbytes, slack_nbytes", [(0, LEAST_NBYTES), (1 << 40, MOST_NBYTES)])
def test_slack_has_a_lower_and_an_upper_limit(memory, budget_nbytes, slack_nbytes):
    freed = Freed(budget_nbytes, 0, lambda: (0, 0))
    assert look(memory, freed.give_back, [slack_nbytes // MIB + 1, 0]) == 1
    assert look(memory, freed.give_back, [slack_nbytes // MIB]) == 0


def test_a_process_without_descriptors_or_proc_continues(monkeypatch):
    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(freed_memory, "resident_nbytes", fail)
    Freed(0, 0, lambda: (0, 0)).give_back()

"""What was freed goes back to the system: a process that trains is no larger than its budgets say."""

import pytest
from helpers import run_python

from infinity.system import freed_memory
from infinity.system.freed_memory import LEAST_NBYTES, Freed

TRAINING = """
    import ctypes, sys
    import torch, infinity
    from infinity.system.freed_memory import resident_nbytes
    from infinity.model.gpt import GPT

    directory, hidden, layers, device_mib, host_mib = sys.argv[1], *map(int, sys.argv[2:])
    x = torch.randint(0, 256, (1, 64))
    plain = GPT(hidden, 1, 4, 256, 64).to(torch.bfloat16)
    plain(x, x).backward()
    del plain
    ctypes.CDLL(None).malloc_trim(0)
    base = resident_nbytes()  # PyTorch, and what it keeps for ops
    budgets = {"device_memory": device_mib << 20, "host_memory": host_mib << 20}
    with infinity.init(infinity.Config(nvme=directory, device="cpu", weights="nvme", states="nvme", **budgets)):
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


@pytest.mark.parametrize(
    "sizes", [(1024, 5, 75, 75), pytest.param((2048, 10, 400, 300), marks=pytest.mark.long)], ids=["64 M parameters", "504 M parameters"]
)
def test_a_settled_process_takes_its_budgets_and_what_pytorch_takes(sizes, tmp_path):
    done = run_python(TRAINING, tmp_path, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_goes_back_when_it_has_grown_by_a_share_of_the_budgets_or_by_more_than_a_step_needs(monkeypatch):
    sizes, trims = [], []
    monkeypatch.setattr(freed_memory, "resident_nbytes", lambda: sizes.pop(0))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: type("Libc", (), {"malloc_trim": lambda self, pad: trims.append(pad)})())
    kept = Freed(1000 << 20)
    for found, num_trims in (([900 << 20, 500 << 20], 1), ([600 << 20], 1), ([601 << 20, 550 << 20], 2), ([300 << 20], 2), ([401 << 20] * 2, 3)):
        sizes[:] = found
        kept.give_back()
        assert (len(trims), sizes) == (num_trims, [])
    spans = Freed(100 << 20, span_nbytes=50 << 20)
    trims.clear()
    for end, found, num_trims in (
        (spans.give_back, [400 << 20, 300 << 20], 1),
        (spans.give_back_after_step, [350 << 20], 1),
        (spans.give_back_after_step, [351 << 20, 310 << 20], 2),
        (spans.give_back, [327 << 20, 310 << 20], 3),
    ):
        sizes[:] = found
        end()
        assert (len(trims), sizes) == (num_trims, [])
    small = Freed(0)
    for found, num_trims in (([LEAST_NBYTES + 1, 0], 4), ([LEAST_NBYTES], 4)):
        sizes[:] = found
        small.give_back()
        assert len(trims) == num_trims


def test_a_process_without_descriptors_or_proc_goes_on(monkeypatch):
    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(freed_memory, "resident_nbytes", fail)
    Freed(0).give_back()

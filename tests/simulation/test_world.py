"""The engine in a world without bytes: it moves what a real engine moves, in virtual time, and takes no memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.helpers import NVME, training

import infinity
from infinity.errors import SwapError
from infinity.model.gpt import GPT
from infinity.optim import adam
from infinity.simulation.no_bytes import KEPT_NBYTES, NoBytes
from infinity.simulation.world import Rates, World
from infinity.system.arena import Arena, Heap
from infinity.system.threads import now

pytestmark = pytest.mark.usefixtures("one_thread")

SEQ = 8
SMALL = {"chunk_mib": 1 / 4, "host_memory": "30MiB", "device_memory": "8MiB", "dtype": "bf16", "compression": "off"}
SETTINGS = {
    "nvme": NVME,
    "some states in host memory": {},
    "visitors": {"host_memory": "45MiB", "device_memory": "16MiB"},
    "clipped": {"options": {"max_grad_norm": 1.0}},
    "accumulated": {"device_memory": "12MiB", "options": {"accumulation_steps": 3}},
    "by layer": {"device_memory": "12MiB", "options": {"accumulation_steps": 3}},
    "8 bits": {"host_memory": "12MiB", "optimizer_state_dtype": "8bit"},
}

SHORT = ["some states in host memory"]


def make():
    return GPT(hidden=256, layers=6, heads=4, vocab=512, seq=SEQ, checkpoint_activations=True).to(torch.bfloat16)


def play(directory, *, make=make, num_steps=8, by_layer=False, **config):
    """(seconds, bytes of each link) of each step."""
    x, found = torch.zeros(1, SEQ, dtype=torch.int64), []
    with training(make, directory, **SMALL | config) as (model, engine, optimizer):
        links = lambda: {link: meter["nbytes"] for link, meter in engine.stats()["links"].items()}
        num_micro = optimizer.accumulation_steps
        for _ in range(num_steps):
            start, before = now(), links()
            if by_layer:
                infinity.accumulate(model, [(x, x)] * num_micro, lambda model, batch: model(*batch) / num_micro)
            else:
                for _ in range(num_micro):
                    (model(x, x) / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((now() - start, {link: nbytes - before[link] for link, nbytes in links().items()}))
    return found


def mean_nbytes(steps):
    return {link: sum(nbytes[link] for _, nbytes in steps) / len(steps) for link in steps[0][1]}


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS])
def test_it_moves_the_bytes_of_a_real_engine(name, tmp_path):
    """Bytes of a step depend on the moment when updates end, which is another one on each machine."""
    settings = SETTINGS[name] | {"by_layer": name == "by layer"}
    real = mean_nbytes(play(tmp_path, **settings)[3:])
    found = mean_nbytes(World(Rates()).run(lambda: play(tmp_path, **settings))[3:])
    for link, nbytes in real.items():
        assert found[link] == pytest.approx(nbytes, rel=0.05 if link in ("h2d", "all_gather", "reduce_scatter") else 0.2), link


@pytest.mark.slow
def test_steps_become_steady_and_repeat(tmp_path):
    first, again = (World(Rates()).run(lambda: play(tmp_path)) for _ in range(2))
    assert first == again
    for link, nbytes in first[-1][1].items():
        assert nbytes == pytest.approx(first[-3][1][link], rel=0.2), link  # a step may put off other updates than the one before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_order_of_threads_hangs(seed, tmp_path):
    orders = World(Rates(), seed=seed).run(lambda: play(tmp_path, num_steps=4))
    in_order = World(Rates()).run(lambda: play(tmp_path, num_steps=4))
    assert mean_nbytes(orders[2:])["h2d"] == mean_nbytes(in_order[2:])["h2d"]


@pytest.mark.slow
def test_a_step_takes_the_time_of_its_slowest_part(tmp_path):
    world = World(Rates(drive=1e8))
    steps = world.run(lambda: play(tmp_path, num_steps=8))
    seconds = [sum(nbytes[link] for link in ("nvme_read", "nvme_write")) / 1e8 for _, nbytes in steps]
    assert 0.98 * sum(seconds[3:]) < sum(each for each, _ in steps[3:]) < 1.25 * sum(seconds[3:])  # bytes count when a transfer begins
    world = World(Rates(flops=1e9, device=1e15, host=1e15, drive=1e15))
    steps = world.run(lambda: play(tmp_path, num_steps=4))
    assert sum(each for each, _ in steps) == pytest.approx(world.compute_seconds, rel=0.05)


@pytest.mark.slow
def test_ranks_have_their_part_of_a_chunk(tmp_path):
    one, eight = (mean_nbytes(World(Rates(), num_ranks=num_ranks).run(lambda: play(tmp_path))[3:]) for num_ranks in (1, 8))
    assert one["all_gather"] == one["reduce_scatter"] == 0
    num_bytes = sum(param.nbytes for param in make().parameters())
    assert eight["reduce_scatter"] == pytest.approx(num_bytes, rel=0.05)
    assert num_bytes < eight["all_gather"] < 2.1 * num_bytes  # for the forward and for the backward pass
    assert eight["update"] == pytest.approx(one["update"] / 8, rel=0.1)


@pytest.mark.slow
def test_every_parameter_of_every_rank_is_updated(tmp_path, monkeypatch):
    updated = []
    kernel = adam._call_kernel

    def noted(weights, moments, grad, *rest):
        updated.append(grad.numel())
        kernel(weights, moments, grad, *rest)

    monkeypatch.setattr(adam, "_call_kernel", noted)
    World(Rates(), num_ranks=4).run(lambda: play(tmp_path, num_steps=4))
    num = sum(param.numel() for param in make().parameters())
    assert sum(updated) == pytest.approx(4 * num / 4, rel=0.1)  # four steps of a quarter; some shards have padding


def test_processors_that_compute_are_slower_beside_drives_and_host_work():
    rates = Rates(beside_drives=0.8)
    speed = lambda *links, cpu=True: rates.speeds(frozenset(links), shares_processors=cpu)["compute"]
    assert [speed("compute"), speed("compute", "host"), speed("compute", "nvme_read"), speed("compute", "host", "nvme_write")] == [1, 0.5, 0.8, 0.4]
    assert speed("compute", "nvme_read", cpu=False) == 1


def test_drives_without_room_are_refused(tmp_path):
    with pytest.raises(SwapError, match="No space|room for"):
        World(Rates(), room_nbytes=1 << 20).run(lambda: play(tmp_path, **NVME))


@pytest.mark.slow
def test_an_engine_left_open_does_not_hang(tmp_path):
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_world import Rates, World, infinity, make
def main():
    with infinity.init(infinity.Config(device="cpu", swap_dirs={str(tmp_path)!r}, verbose=False)):
        model = make()
    infinity.AdamW(model.parameters())
    return model
model = World(Rates()).run(main)
try:
    infinity.engine_of(model).close()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert "the simulation has ended: close every engine inside" in done.stdout, done.stderr[-2000:]


def test_a_heap_grows_while_another_thread_gives_memory_back(tmp_path):
    """Touching the new region takes virtual time, in which the other thread must be able to wait for the heap. With a real lock both hang."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_world import Arena, Heap, Rates, World, now
world = World(Rates(host=1e9))
def main():
    heap = Heap(Arena(), 256 << 20)
    area, start = heap.take(4096), now()
    other = world.threads.start(lambda: heap.give_back(area), "other")
    heap.take(128 << 20)
    took = now() - start
    other.join()
    print(took, heap.used_nbytes)
world.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    took, used_nbytes = done.stdout.split()
    assert float(took) == pytest.approx(0.134, rel=0.1) and int(used_nbytes) == 128 << 20


@pytest.mark.slow
def test_a_model_larger_than_memory_takes_no_memory(tmp_path):
    """2.8 billion parameters, 34 GB of records."""
    code = f"""
import pathlib, resource, sys
sys.path[:0] = {sys.path!r}
import torch
from test_world import GPT, Rates, World, play
make = lambda: GPT(hidden=4096, layers=14, heads=32, vocab=512, seq=32, checkpoint_activations=True).to(torch.bfloat16)
config = dict(make=make, num_steps=2, chunk_mib=64, host_memory="8GiB", device_memory="4GiB")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
steps = World(Rates(), num_ranks=2).run(lambda: play(pathlib.Path({str(tmp_path)!r}), **config))
print(sum(steps[1][1].values()), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    moved, grown = map(int, done.stdout.split()[-2:])
    assert moved > 15e9
    assert grown < 300e6


A, B = (256, 128), (128, 512)
OPS = {
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b.t(), torch.zeros(512)),
    "softmax": lambda a, b: (a @ b).softmax(-1),
    "norm": lambda a, b: F.layer_norm(a, (128,)),
    "split": lambda a, b: a.split(100)[2],
    "topk": lambda a, b: b.topk(3)[1],
    "cat": lambda a, b: torch.cat([a, b.t()]),
    "cast": lambda a, b: a.to(torch.bfloat16),
    "embedding": lambda a, b: F.embedding(torch.zeros(64, 3, dtype=torch.int64), a),
    "loss": lambda a, b: F.cross_entropy(a @ b, torch.zeros(256, dtype=torch.int64)),
    "attention": lambda a, b: F.scaled_dot_product_attention(*[a.view(1, 4, 64, 128)] * 3, is_causal=True),
    "out": lambda a, b: torch.mul(a, 2, out=torch.empty(256, 128)),
    "in place": lambda a, b: a.add_(1),
    "in place view": lambda a, b: a.t_(),
    "small part": lambda a, b: a.t()[:8, :8].clone(),
    "convolution": lambda a, b: F.conv1d(a.view(2, 128, 128), torch.zeros(16, 128, 3)),
}


@pytest.mark.parametrize("name", OPS)
def test_an_operation_has_the_shape_of_its_result(name):
    expected = OPS[name](torch.randn(A), torch.randn(B))
    spent = []
    with NoBytes(spent.append):
        found = OPS[name](torch.randn(A), torch.randn(B))
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert spent or name in ("split", "in place view")  # views cost nothing
    if name == "matmul":
        assert spent[0][:2] == (2 * 256 * 128 * 512, 4 * (256 * 128 + 128 * 512 + 256 * 512))


def test_small_tensors_hold_their_values():
    with NoBytes(lambda work: None):
        small = torch.arange(KEPT_NBYTES // 8)
        assert small.sum().item() == len(small) * (len(small) - 1) // 2

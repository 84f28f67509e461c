"""Host memory available to this process, and peaks and free memory of a device."""

import psutil
import pytest
import torch
from support.helpers import run_python

from infinity.system import capacity

MIB = 1 << 20


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return a function that writes files of the root control group."""
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return write


def test_without_limits_free_memory_is_the_available_memory(group):
    group(memory__max="max\n", memory__current="1000\n", memory__stat="anon 10\nfile 20\n")
    assert capacity.host_free_nbytes() == pytest.approx(psutil.virtual_memory().available, rel=0.05)


def test_a_groups_limit_counts_without_page_cache(group):
    group(memory__max=f"{100 * MIB}\n", memory__current=f"{60 * MIB}\n", memory__stat=f"anon {20 * MIB}\nfile {40 * MIB}\nshmem {10 * MIB}\n")
    assert capacity.host_free_nbytes() == (100 - 60 + 30) * MIB


def test_limits_of_control_groups_version_1_count(group):
    group(memory__limit_in_bytes=f"{80 * MIB}", memory__usage_in_bytes=f"{30 * MIB}", memory__stat=f"cache {10 * MIB}\nrss {20 * MIB}\n")
    group(memory__max="nonsense")
    assert capacity.host_free_nbytes() == 60 * MIB


def test_a_full_control_group_leaves_zero_bytes(group):
    group(memory__max=f"{MIB}\n", memory__current=f"{2 * MIB}\n", memory__stat="file 0\n")
    assert capacity.host_free_nbytes() == 0


class ScriptedAllocator:
    """An allocator with one peak, which a reset clears, like CUDA's."""

    def __init__(self):
        self.allocated = self.peak = self.total = 0
        self.before_reset = lambda: None

    def take(self, nbytes):
        self.allocated += nbytes
        self.total += max(0, nbytes)
        self.peak = max(self.peak, self.allocated)

    def max_memory_allocated(self, device):
        return self.peak

    def memory_stats_as_nested_dict(self, device):
        return {"allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak, "allocated": self.total}}}

    def reset_peak_memory_stats(self, device):
        self.before_reset()
        self.peak = self.allocated


def test_the_programs_peak_survives_resets_by_op_measurements(monkeypatch):
    allocator = ScriptedAllocator()
    for name in ("max_memory_allocated", "memory_stats_as_nested_dict", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", getattr(allocator, name))
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer", raising=False)  # exists in CUDA builds and needs a driver
    gauges = [capacity.CudaGauge(torch.device("cuda", 7)) for _ in range(2)]  # one per engine
    peaks = []
    for gauge, nbytes in zip(gauges * 2, (100, 700, 30, 500)):
        allocator.take(nbytes)
        allocator.take(-nbytes)
        peaks.append(gauge.peak_nbytes())
    assert peaks == [100, 700, 30, 500]
    assert [gauge.most_nbytes() for gauge in gauges] == [700, 700]
    allocator.take(900)
    assert gauges[0].most_nbytes() == 900


def test_a_peak_between_the_reading_and_the_reset_is_not_lost(monkeypatch):
    allocator = ScriptedAllocator()
    for name in ("max_memory_allocated", "memory_stats_as_nested_dict", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", getattr(allocator, name))
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer", raising=False)
    gauge = capacity.CudaGauge(torch.device("cuda", 7))
    allocator.take(50)
    allocator.before_reset = lambda: (allocator.take(300), allocator.take(-300))  # another thread
    assert gauge.peak_nbytes() == 350
    allocator.before_reset = lambda: None
    assert gauge.peak_nbytes() == 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_cuda_device_survives_resets():
    gauge = capacity.CudaGauge(torch.device("cuda", torch.cuda.current_device()))
    gauge.peak_nbytes()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=gauge.device)
    at_least = torch.cuda.memory_allocated(gauge.device)
    del block
    assert gauge.peak_nbytes() == at_least > gauge.peak_nbytes()
    assert gauge.most_nbytes() >= at_least


@pytest.mark.parametrize(
    "known, given",
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:False", None),
        ("expandable_segments:True,max_split_size_mb:512", None),
        ("backend:cudaMallocAsync", None),
    ],
)
def test_segments_expand_unless_the_settings_mention_them(known, given, monkeypatch):
    said = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync" if "backend" in known else "native")
    monkeypatch.setattr(capacity, "_given", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", known)
    for _ in range(2):  # settings are made once, for any number of engines
        capacity.expand_segments()
    assert said == ([given] if given else [])


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_other_allocators_are_not_asked_for_native_features(backend, monkeypatch):
    def only_native(answer):
        def ask(*arguments):
            if backend != "native":
                raise RuntimeError(f"{backend} does not yet support this")
            return answer

        return ask

    answers = {"mem_get_info": (10 * MIB, 100 * MIB), "get_per_process_memory_fraction": 1.0, "memory_reserved": 30 * MIB}
    for name, answer in (answers | {"memory_allocated": 20 * MIB, "get_allocator_backend": backend}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", only_native([segment((20, 5, 5), False)]))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", only_native(None), raising=False)
    monkeypatch.setattr(capacity, "_count_failures", capacity._count_failures.__wrapped__)
    gauge = capacity.CudaGauge(torch.device("cuda", 0))
    assert (gauge.free_nbytes(), gauge.num_failures()) == ((15 if backend == "native" else 20) * MIB, 0)


def segment(sizes, expands, kind="large", device=0):
    """A segment with blocks of these sizes in MiB, alternately in use and free."""
    blocks, address = [], 7 << 40
    for number, size in enumerate(sizes):
        blocks.append({"address": address, "size": size * MIB, "state": "inactive" if number % 2 else "active_allocated"})
        address += size * MIB
    return {"device": device, "address": 7 << 40, "segment_type": kind, "is_expandable": expands, "blocks": blocks}


@pytest.mark.parametrize(
    "sizes, expands, kind, remains",
    [
        ((20, 30, 10, 40), False, "large", 70),
        ((20, 30, 10, 40), True, "large", 10),  # free pages: MiB 20 to 40 and 60 to 100
        ((21, 38, 21), True, "large", 38),  # the first whole free page would end at MiB 60
        ((21, 39, 21), True, "large", 19),
        ((21, 19, 20), True, "large", 19),
        ((0, 40), True, "large", 0),
        ((1, 4, 1), True, "small", 2),
        ((1, 3, 2), True, "small", 1),
    ],
)
def test_gaps_between_used_blocks_are_freed_by_whole_pages_or_not(sizes, expands, kind, remains):
    segments = [segment(sizes, expands, kind), segment((1, 500), False, device=1)]
    assert capacity.remains_of(segments, 0) == remains * MIB
    segments[0]["blocks"] = [block | {"state": "inactive"} for block in segments[0]["blocks"]]
    assert capacity.remains_of(segments, 0) == 0  # an empty segment goes back as a whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("known, mib", [("", 210), ("", 21), ("expandable_segments:False", 21)])
def test_bytes_of_freed_blocks_can_be_used_by_a_larger_block(known, mib):
    """Free every second block, then allocate 95 % of the free bytes. With expandable segments, large blocks leave all their bytes free."""
    source = """
    import os, sys
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[1]
    import torch
    from infinity.system import capacity
    device = capacity.device_of("cuda")
    gauge = capacity.CudaGauge(device)
    before, nbytes = gauge.free_nbytes(), int(sys.argv[2]) << 20
    blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(before // nbytes * 3 // 4)]
    del blocks[::2]
    free = gauge.free_nbytes()
    block = torch.empty(int(free * 0.95), dtype=torch.uint8, device=device)
    print(free / before, torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    """
    done = run_python(source, known, str(mib))
    assert done.returncode == 0, done.stderr
    share, expands = done.stdout.split()
    assert expands == str(not known) and (float(share) > 0.5 or mib == 21)

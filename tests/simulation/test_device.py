"""A simulated device: streams, events, links that share, and memory that is counted."""

import gc

import pytest
import torch

import infinity
from infinity.model.gpt import GPT
from infinity.simulation.device import DeviceMemory, SimulatedDevice
from infinity.simulation.drives import SimulatedDrives
from infinity.simulation.links import Links
from infinity.simulation.threads import SimulatedThreads
from infinity.simulation.world import Rates, SimulatedHost, World
from infinity.system.streams import CudaStreams, current_stream, has_streams, kind_of, new_stream, on_stream, use_streams
from infinity.system.threads import now, using

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    return SimulatedThreads(None)


def device_of(threads, **how):
    return SimulatedDevice(threads, Links(threads, **how))


def test_the_cpu_has_no_streams():
    assert not has_streams(CPU) and kind_of(CPU) == "cpu" and kind_of(torch.device("cuda")) == "cuda"
    assert new_stream(CPU) is None and current_stream(CPU) is None
    with on_stream(None, "h2d"):
        pass


def test_work_of_a_stream_runs_in_order_while_the_host_goes_on(threads):
    device = device_of(threads)

    def main():
        stream = device.new(CPU)
        stream.spend(2.0, "compute")
        event = stream.record_event()
        stream.spend(3.0, "compute")
        assert threads.now() == 0 and not event.query()
        event.synchronize()
        assert threads.now() == 2 and event.query()
        stream.synchronize()
        assert threads.now() == 5
        assert event.elapsed_time(stream.record_event()) == pytest.approx(3000.0)

    threads.run(main)


def test_a_stream_waits_for_the_event_of_another(threads):
    device = device_of(threads)

    def main():
        copies, compute = device.new(CPU), device.current()
        copies.spend(4.0, "h2d")
        compute.wait_stream(copies)
        compute.spend(1.0, "compute")
        copies.spend(4.0, "h2d")
        compute.synchronize()
        assert threads.now() == 5
        copies.synchronize()
        assert threads.now() == 8

    threads.run(main)


def test_two_streams_share_a_link(threads):
    device = device_of(threads)

    def main():
        first, second = device.new(CPU), device.new(CPU)
        first.spend(2.0, "h2d")
        second.spend(2.0, "h2d")
        second.synchronize()
        assert threads.now() == 4 and first.record_event().query()

    threads.run(main)


def test_a_thread_is_on_a_stream_only_inside_the_block(threads):
    device = device_of(threads)
    before = use_streams(device)
    try:
        stream = new_stream(CPU)
        with on_stream(stream, "d2h"):
            assert current_stream(CPU) is stream and device.current_link == "d2h" and device.is_in_stream
            with on_stream(new_stream(CPU)):
                assert device.current_link == ""
            assert current_stream(CPU) is stream and device.current_link == "d2h"
        assert not device.is_in_stream and kind_of(CPU) == "cuda"
    finally:
        assert use_streams(before) is device
    assert isinstance(before, CudaStreams)


def test_links_that_are_busy_together_slow_each_other_down(threads):
    links = Links(threads, lambda busy: dict.fromkeys(busy, 1.0 if len(busy) == 1 else 0.5))
    ends = {}

    def main():
        links.begin("read", 2.0, lambda: ends.update(read=threads.now()))
        links.begin("write", 3.0, lambda: ends.update(write=threads.now()))
        threads.sleep(10)

    threads.run(main)
    assert ends == {"read": pytest.approx(4), "write": pytest.approx(5)}  # both at half speed, then the write alone


def test_work_waits_by_priority_and_can_be_promoted(threads):
    links, order = Links(threads), []

    def main():
        links.begin("read", 1.0, lambda: order.append("first"))
        late = links.begin("read", 1.0, lambda: order.append("prefetch"), 1)
        links.begin("read", 1.0, lambda: order.append("other prefetch"), 1)
        links.begin("read", 1.0, lambda: order.append("demand"), 0)
        last = links.begin("read", 1.0, lambda: order.append("promoted"), 2)
        links.promote(last, -1)
        links.promote(late, 1)
        links.spend("read", 0.5)

    threads.run(main)
    assert order == ["first", "promoted", "demand", "prefetch", "other prefetch"][: len(order)] and len(order) >= 3


def test_work_side_by_side_shares_the_speed(threads):
    links = Links(threads, side_by_side=("host",))

    def main():
        ends = []
        for _ in range(3):
            links.begin("host", 1.0, lambda: ends.append(threads.now()))
        threads.sleep(5)
        assert ends == [pytest.approx(3)] * 3

    threads.run(main)


def test_memory_is_taken_until_the_last_tensor_of_a_storage_is_gone():
    memory = DeviceMemory(1000)
    tensor = torch.empty(400, dtype=torch.uint8)
    memory.note(tensor.untyped_storage())
    view = tensor[10:]
    del tensor
    gc.collect()
    assert memory.free_nbytes() == 600
    with pytest.raises(torch.OutOfMemoryError):
        memory.take(601)
    assert memory.num_failures() == 1
    del view
    gc.collect()
    assert memory.free_nbytes() == 1000 and memory.most_nbytes() == 400
    assert memory.peak_nbytes() == 400 and memory.peak_nbytes() == 0


def test_a_host_of_other_size_decides_the_budgets(tmp_path):
    def start():
        model = GPT(64, 1, 2, 100, 16)
        infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", verbose=False))
        infinity.AdamW(model.parameters())
        with infinity.engine_of(model) as engine:
            return engine.parts.host_nbytes

    small, large = (World(Rates(), host=SimulatedHost(nbytes, 4), device_nbytes=1 << 30).run(start) for nbytes in (1 << 30, 1 << 40))
    assert 500 < large / small < 1500


def test_the_host_runs_ahead_of_the_device(tmp_path):
    """The device is slow, and the program reads no value: the host needs only the time of its launches."""
    world = World(Rates(flops=1e9, launch_s=2e-3), device_nbytes=1 << 34)

    def main():
        a = torch.zeros(1024, 1024)
        start = now()
        for _ in range(3):
            a = a @ a
        launched = now() - start
        world.finish()
        return launched, now() - start

    launched, finished = world.run(main)
    assert launched == pytest.approx(6e-3) and finished == pytest.approx(3 * 2 * 1024**3 / 1e9, rel=0.01)


def test_work_ends_after_days_of_virtual_time(threads):
    """So late, the clock cannot tell the last fractions of a piece of work from nothing."""
    links, ends = Links(threads, lambda busy: dict.fromkeys(busy, 1 / len(busy))), []

    def main():
        threads.sleep(1e6)
        for number in range(50):
            links.begin(f"link {number % 3}", 0.1 + 1e-3 / (number + 3), lambda: ends.append(threads.now()))
        threads.sleep(1e3)

    threads.run(main)
    assert len(ends) == 50


def test_a_read_that_waits_for_its_extent_is_promoted(threads):
    def main():
        drives = SimulatedDrives(threads, Links(threads), read=1e9, write=1e9, latency=lambda: 0.0)
        extent, others = drives.allocate(1 << 20), [drives.allocate(1 << 30) for _ in range(4)]
        buffer, large = memoryview(bytearray(1 << 20)), range(1 << 30)
        drives.write(extent, buffer)
        read = drives.read(extent, buffer)
        ends = [drives.read(other, large) for other in others]
        read.promote()
        read.wait()
        assert threads.now() < 1.2  # after one of the large reads, which had begun
        assert not any(each.done for each in ends[1:])

    with using(threads):
        threads.run(main)

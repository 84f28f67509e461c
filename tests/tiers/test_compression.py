"""Lossless compression of floats: every bit is restored, for all values, drives and faults.

Long because the codec, the drive and the engine are tested for the same property.
"""

import errno
import random

import numpy as np
import pytest
import torch
from support.helpers import NVME, OnDrive, arranged, assert_same_states, least_host_memory, memory, on_gpu, states_of, training
from torch import nn

import infinity
from aio_ext import _aio
from infinity.engine.sizing import may_compress
from infinity.formats.format import Format, Segment
from infinity.plan import compression
from infinity.plan.record import STATES, WEIGHTS, record_layout
from infinity.system.lanes import Lane
from infinity.tiers import _huffman

MIB = 1 << 20


def linears(depth, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


BF16, FP32, INT16 = Segment("weight", "bf16"), Segment("momentum", "fp32"), Segment("residual", "int16")


def compressed(data, itemsize):
    target = memory(len(data), fill=0xEE)
    return target, _huffman.encode(data, itemsize, target)


def expanded(coded, nbytes, itemsize, size):
    """Copies the first `nbytes` of `coded` to the end of a buffer of `size` bytes, and decodes them there."""
    buffer = memory(size, fill=0xEE)
    buffer[size - nbytes :] = coded[:nbytes]
    _huffman.decode_last(parts := [(buffer, itemsize, nbytes)])
    assert not parts
    return buffer


def normal(numel, dtype, seed=0, std=0.02):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul(std).to(dtype)


def bytes_of(tensor):
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def entropy(data, itemsize):
    """Entropy in bits per symbol: bits 14..7 of an item of 2 bytes, bits 30..23 of an item of 4 bytes."""
    items = np.frombuffer(data, dtype=np.uint16 if itemsize == 2 else np.uint32)
    counts = np.bincount((items >> (8 * itemsize - 9)) & 0xFF)
    shares = counts[counts > 0] / len(items)
    return -(shares * np.log2(shares)).sum()


@pytest.mark.parametrize("kind", ["normal", "square", "mixed scales", "columns", "skewed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_take_little_more_than_their_entropy(kind, dtype):
    values = {
        "normal": lambda: normal(1 << 19, torch.float32),
        "square": lambda: normal(1 << 19, torch.float32).square(),
        "mixed scales": lambda: normal(1 << 19, torch.float32) * torch.logspace(-3, 3, 512).repeat(1024),
        "columns": lambda: normal(1 << 19, torch.float32) * torch.tensor([2.0**-8] * 64 + [1.0] * 960).repeat(512),
        "skewed": lambda: torch.exp2(-torch.empty(1 << 19).exponential_(0.7, generator=torch.Generator().manual_seed(0)).floor()),
    }[kind]()
    data = bytes_of(values.to(dtype))
    coded, nbytes = compressed(data, dtype.itemsize)
    random_bits = 8 * dtype.itemsize - 8 - (kind in ("square", "skewed"))  # these values have no signs
    least = len(data) * (random_bits + entropy(data, dtype.itemsize)) / (8 * dtype.itemsize)
    assert least <= nbytes <= 1.015 * least + 4096
    assert nbytes % 4096 == 0
    assert expanded(coded, nbytes, dtype.itemsize, len(data)) == data


@pytest.mark.few(1)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("pages", [1, 2, 3, 7, 8, 9, 16, 33, 512])
def test_any_number_of_pages_is_restored(pages, itemsize):
    """Tiles of all lengths. With some scales, the coded tile is nearly as long as the data."""
    random.seed(pages)
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    for spread in (0, 1, 10, 40, 100):
        scales = torch.tensor([2.0 ** random.randint(-spread, spread) for _ in range(pages * 4096 // itemsize)])
        data = bytes_of((normal(len(scales), torch.float32, seed=spread) * scales).to(dtype))
        coded, nbytes = compressed(data, itemsize)
        assert nbytes % 4096 == 0 and 0 < nbytes <= len(data)
        if nbytes < len(data):
            assert expanded(coded, nbytes, itemsize, len(data)) == data


@pytest.mark.parametrize("num_symbols", [1, 2, 3, 5, 255, 256])
@pytest.mark.parametrize("ratio", [1, 1.03, 1.62, 3])
def test_symbols_of_any_counts_are_restored(num_symbols, ratio):
    """Counts form a geometric series: unlimited codes would have up to 255 bits, not 11."""
    shares = ratio ** -np.arange(num_symbols, dtype=np.float64)
    counts = np.maximum(1, (shares / shares.sum() * (1 << 18)).astype(np.int64))
    symbols = np.repeat(np.arange(num_symbols), counts)
    np.random.default_rng(0).shuffle(symbols)
    symbols = np.resize(symbols, (1 << 18) + 3 * 2048)
    for itemsize in (2, 4):
        data = (symbols.astype(np.uint16) << 7 if itemsize == 2 else symbols.astype(np.uint32) << 23).tobytes()
        coded, nbytes = compressed(data, itemsize)
        if num_symbols * ratio < 200:
            assert nbytes < len(data)
        if not any(data):
            assert nbytes == 0
        elif nbytes < len(data):
            assert expanded(coded, nbytes, itemsize, len(data)) == data


@pytest.mark.parametrize("itemsize", [2, 4])
def test_zeros_take_no_bytes_and_noise_takes_all_its_bytes(itemsize):
    zeros = bytes(3 * MIB)
    assert compressed(zeros, itemsize)[1] == 0
    assert expanded(b"", 0, itemsize, 3 * MIB) == zeros
    assert compressed(memory(MIB), itemsize)[1] == MIB
    one = bytearray(MIB)
    one[-1] = 0x80  # a negative zero
    coded, nbytes = compressed(one, itemsize)
    assert 0 < nbytes < MIB
    assert expanded(coded, nbytes, itemsize, MIB) == one


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [-0.0, -1e-3, 0.0, 1e-40, 1e-30, 1e-12, 1e12, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("base", ["square", "zeros"])
def test_an_item_unlike_the_others_keeps_its_bits(base, value, dtype):
    """At any place, although the code comes from a sample of the items. One item costs at most 10 % more bytes (a sign in bf16)."""
    values = normal(1 << 18, torch.float32).square().to(dtype) if base == "square" else torch.zeros(1 << 18, dtype=dtype)
    undisturbed = compressed(bytes_of(values), dtype.itemsize)[1]
    for place in (0, 63, 64, 1023, 12345, (1 << 18) - 1):
        changed = values.clone()
        changed[place] = value
        data = bytes_of(changed)
        coded, nbytes = compressed(data, dtype.itemsize)
        if any(data):
            least = len(data) * (9 / 16 if dtype == torch.bfloat16 else 25 / 32)
            assert 0 < nbytes < 1.1 * max(undisturbed, least) + 4096
            assert expanded(coded, nbytes, dtype.itemsize, len(data)) == data
        else:
            assert nbytes == 0


def test_nans_infinities_and_denormals_keep_their_bits():
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).repeat_interleave(3).repeat(2)
    words = torch.cat([words, torch.zeros(1 << 20, dtype=torch.int16)])
    data = bytes_of(words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))])
    coded, nbytes = compressed(data, 2)
    assert nbytes < len(data)
    assert expanded(coded, nbytes, 2, len(data)) == data


@pytest.mark.parametrize("itemsize", [2, 4])
def test_damaged_bytes_raise_or_change_numbers_and_no_other_memory(itemsize):
    """Memory around the buffer keeps its bytes. Sanitizers also find reads outside the buffer."""
    data = bytes_of(normal(3 * 8192 + 2048, torch.bfloat16 if itemsize == 2 else torch.float32))
    coded, nbytes = compressed(data, itemsize)
    random.seed(itemsize)
    found = 0
    for number in range(600):
        damaged = bytearray(coded[:nbytes])
        if number % 3 == 0:  # the header
            damaged[random.randrange(128)] = random.randrange(256)
        elif number % 3 == 1:  # a size of a stream
            damaged[128 + random.randrange(8)] ^= 1 << random.randrange(8)
        else:
            start = random.randrange(nbytes)
            damaged[start : start + 64] = random.randbytes(min(64, nbytes - start))
        around = memory(len(data) + 2 * 4096, fill=0xAB)
        buffer = around[4096:-4096]
        buffer[len(data) - nbytes :] = damaged
        parts = [(buffer, itemsize, nbytes)]
        try:
            _huffman.decode_last(parts)
        except ValueError:
            found += 1
            assert len(parts) == 1
        assert set(around[:4096]) == set(around[-4096:]) == {0xAB}
    assert found > 300


@pytest.mark.parametrize(
    "parts", [[], (), [()], [None], [(bytearray(100), 2, 50)], [(bytearray(4096), 3, 50)], [(bytearray(4096), 2, 5000)], [(b"", 2, 0)]]
)
def test_decode_refuses_invalid_parts(parts):
    with pytest.raises((ValueError, TypeError)):
        _huffman.decode_last(parts)


@pytest.mark.parametrize("source, itemsize, target", [(4095, 2, 4096), (0, 2, 4096), (4096, 8, 4096), (8192, 4, 4096)])
def test_encode_refuses_invalid_sizes(source, itemsize, target):
    with pytest.raises(ValueError):
        _huffman.encode(bytes(source), itemsize, bytearray(target))


# ---- on a drive ----


class PlacesOnDrive(OnDrive):
    """Compressed places on a swap with small sections: bf16 weights, or residual and momentum."""

    def __init__(self, paths, numel, count, section_nbytes=64 << 10, area_nbytes=0):
        kinds = [((BF16, 0, 2 * numel),), ((INT16, 0, 2 * numel), (FP32, 2 * numel, 4 * numel))] * count
        sizes = [sum(region.room for region in compression.regions(segments, section_nbytes)) for segments in kinds]
        super().__init__(paths, sizes, section_nbytes, area_nbytes=area_nbytes)
        self.places = [self.compressor.compressed(extent, segments) for extent, segments in zip(self.extents, kinds)]

    def values(self, place, seed):
        """Page-aligned zeros, floats or noise, by the seed."""
        numel = place.nbytes // 2 if len({section.itemsize for section in place.sections}) == 1 else place.nbytes // 6
        weights = place.nbytes == 2 * numel
        std = (0.0, 0.02, 1e4, 1e-30)[seed % 4]
        floats = normal(numel, torch.bfloat16 if weights else torch.float32, seed, std) if std else torch.zeros(0)
        data = memory(place.nbytes) if seed % 5 == 4 else memory(place.nbytes, fill=0)
        if seed % 5 != 4:
            data[place.nbytes - floats.nbytes :] = bytes_of(floats) if len(floats) else b""
        return data

    def read(self, place):
        buffer = memory(place.nbytes, fill=0xEE)
        self.compressor.read(place, buffer).wait()
        return buffer

@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("num_paths", [1, 3])
def test_a_read_returns_the_written_bytes(paths, num_paths):
    """Many reads and writes at once; new values take more or fewer bytes than the old ones."""
    random.seed(num_paths)
    with PlacesOnDrive(paths[:num_paths], 256 << 10, 6) as drive:
        held, reads, writes = {}, {}, {}
        for number in range(120):
            index = random.randrange(len(drive.places))
            place = drive.places[index]
            if index in writes:
                writes.pop(index).wait()
            for read, buffer in reads.pop(index, []):
                read.wait()
                assert buffer == held[index]
            if index not in held or random.random() < 0.5:
                held[index] = drive.values(place, number)
                writes[index] = drive.compressor.write(place, held[index])
            else:
                reads[index] = [(drive.compressor.read(place, buffer := memory(place.nbytes, fill=0xEE)), buffer) for _ in range(2)]
        for write in writes.values():
            write.wait()
        for index, expected in held.items():
            assert drive.read(drive.places[index]) == expected


def test_the_swap_moves_only_the_stored_bytes(paths):
    with PlacesOnDrive(paths[:1], MIB, 1, section_nbytes=256 << 10) as drive:
        weights, states = drive.places
        noise = memory(6 * MIB)
        half = memory(6 * MIB, fill=0)
        half[: 2 * MIB] = noise[: 2 * MIB]  # noise in the residual
        for place, data, expected in (
            (weights, drive.values(weights, 1), 0.664 * 2 * MIB),
            (states, drive.values(states, 1), 0.832 * 4 * MIB),
            (states, half, 0),
            (states, noise, 4 * MIB),
        ):
            before = drive.swap.write_nbytes, drive.swap.read_nbytes
            (write := drive.compressor.write(place, data)).wait()
            assert drive.read(place) == data
            written, read = drive.swap.write_nbytes - before[0], drive.swap.read_nbytes - before[1]
            assert written == read == write.nbytes == sum(place.stored)
            residual = 2 * MIB if place is states and any(data[: 2 * MIB]) else 0  # the first zeros are not written
            assert written - residual == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("section_nbytes", [0, 64 << 10])
def test_the_first_zeros_of_states_are_not_written(section_nbytes, paths):
    """States are zero before the first step, whether floats are coded or not. Weights are always written."""
    with PlacesOnDrive(paths[:1], 256 << 10, 1, section_nbytes=section_nbytes) as drive:
        weights, states = drive.places
        half = memory(states.nbytes, fill=0)
        half[: 512 << 10] = b"\1" * (512 << 10)  # the residual has integers
        for data, expected in ((memory(states.nbytes, fill=0), 0), (half, 512 << 10), (memory(states.nbytes), states.nbytes)):
            before = drive.swap.write_nbytes, drive.swap.read_nbytes
            (write := drive.compressor.write(states, data)).wait()
            assert drive.read(states) == data
            written, read = drive.swap.write_nbytes - before[0], drive.swap.read_nbytes - before[1]
            assert written == read == write.nbytes
            assert written == expected or (not section_nbytes and data is half and written == states.nbytes)
        weight = drive.values(weights, 1)
        drive.compressor.write(weights, weight).wait()
        assert drive.read(weights) == weight


@pytest.mark.slow
def test_drives_get_equal_shares_of_compressed_bytes(paths):
    with PlacesOnDrive(paths, 4 * MIB, 2) as drive:
        for place in drive.places:
            drive.compressor.write(place, drive.values(place, 4)).wait()
        written = [stats["write_nbytes"] for stats in drive.swap.stats().values()]
        assert max(written) < 1.1 * min(written)


def test_a_failed_write_raises_and_the_lane_continues(paths):
    with PlacesOnDrive(paths[:1], MIB, 4) as drive:
        values = [drive.values(place, 1) for place in drive.places]
        _aio._inject("write", 3, 1, -errno.ENOSPC)
        writes = [drive.compressor.write(place, data, what="chunk 7: ") for place, data in zip(drive.places, values)]
        failures = []
        for write in writes:
            try:
                write.wait()
            except infinity.SwapError as error:
                failures.append(error)
        assert [error.errno for error in failures] == [errno.ENOSPC] and "chunk 7: " in str(failures[0])
        for place, data in zip(drive.places, values):
            drive.compressor.write(place, data).wait()
            assert drive.read(place) == data


def test_failed_submits_give_back_buffers_and_memory(paths, monkeypatch):
    with PlacesOnDrive(paths[:1], MIB, 1) as drive:
        place = drive.places[1]
        drive.compressor.write(place, data := drive.values(place, 1)).wait()
        for op in ("read", "write"):
            submit, calls = getattr(drive.swap, op), []

            def fail(*arguments, **options):
                calls.append(1)
                if len(calls) % 7 == 0:
                    raise infinity.SwapError(errno.ENOMEM, "no memory")
                return submit(*arguments, **options)

            monkeypatch.setattr(drive.swap, op, fail)
            for _ in range(3 * compression.NUM_LANES):
                with pytest.raises(infinity.SwapError, match="no memory"):
                    if op == "write":
                        drive.compressor.write(place, data).wait()
                    else:
                        buffer = memory(place.nbytes, fill=0xEE)
                        drive.compressor.read(place, buffer)
            if op == "read":
                found = bytes(buffer)
            monkeypatch.undo()
        assert bytes(buffer) == found  # no late read changed the buffer
        for _ in range(2 * compression.NUM_LANES):
            drive.compressor.write(place, data).wait()
        assert drive.read(place) == data


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_at_the_end_of_a_read_waits_for_the_read(paths, monkeypatch, when):
    with PlacesOnDrive(paths[:1], MIB, 1) as drive:
        place = drive.places[1]
        drive.compressor.write(place, data := drive.values(place, 1)).wait()
        push = Lane.push

        def interrupted(lane, *arguments, **options):
            if when == "after":
                push(lane, *arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(Lane, "push", interrupted)
        buffer = memory(place.nbytes, fill=0xEE)
        with pytest.raises(KeyboardInterrupt):
            drive.compressor.read(place, buffer)
        monkeypatch.undo()
        assert buffer == data
        buffer[:] = bytes(len(buffer))  # another owner uses the buffer now
        for lane in drive.compressor.expanders:
            lane.drain()
        assert not any(buffer)


def test_a_failed_read_raises_at_each_wait(paths):
    with PlacesOnDrive(paths[:1], MIB, 1) as drive:
        place = drive.places[1]
        drive.compressor.write(place, data := drive.values(place, 1)).wait()
        _aio._inject("read", 5, 1, -errno.EIO)
        read = drive.compressor.read(place, memory(place.nbytes), what="chunk 3: ")
        for _ in range(3):
            with pytest.raises(infinity.SwapError, match="chunk 3: ") as caught:
                read.wait()
            assert caught.value.errno == errno.EIO
        assert read.done
        assert drive.read(place) == data


def test_other_bytes_than_were_written_are_an_error(paths):
    with PlacesOnDrive(paths[:1], MIB, 1) as drive:
        place = drive.places[0]
        drive.compressor.write(place, drive.values(place, 1)).wait()
        drive.swap.write(place.extent, memory(4096, fill=0xFF), offset=sum(place.stored[:2])).wait()
        read = drive.compressor.read(place, memory(place.nbytes), what="chunk 3: ")
        for _ in range(2):
            with pytest.raises(infinity.SwapError, match="chunk 3: the drive returned other bytes than were written") as caught:
                read.wait()
            assert caught.value.errno == errno.EIO and str(paths[0]) in caught.value.filename


# ---- in an engine ----


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "dtype, moments, update",
    [
        ("bf16", "fp32", "backward"),
        ("bf16", "fp32", "deferred"),
        ("bf16", "bf16", "backward"),
        ("bf16", "bf16", "deferred"),
        ("fp16", "fp32", "deferred"),
        ("fp32", "fp32", "backward"),
        ("fp32", "fp32", "deferred"),
    ],
)
def test_training_has_the_same_bits(tmp_path, dtype, moments, update, one_thread):
    found = {}
    for choice in ("off", "on"):
        config = {"dtype": dtype, "optimizer_state_dtype": moments, "update": update, "compression": choice, "host_memory": "24MiB", "chunk_mib": 0.5}
        with training(lambda: linears(4, 512), tmp_path, **NVME, **config) as (model, engine, optimizer):
            losses = []
            for step in range(4):
                loss = model(torch.full((2, 512), 0.1 + step, dtype=next(model.parameters()).dtype)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            stats = engine.stats()
            found[choice] = losses, states_of(engine, model), stats
            assert stats["nvme_entropy_coding"] == (choice == "on")
            assert stats["pinned_host_nbytes"] <= 24 * MIB
    assert found["on"][0] == found["off"][0]
    assert_same_states(found["on"][1], found["off"][1])
    assert found["on"][2]["nvme_write_nbytes"] < 0.95 * found["off"][2]["nvme_write_nbytes"]


@pytest.mark.long
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1 / 4, 4])
def test_the_least_host_memory_of_the_error_is_enough(tmp_path, chunk_mib):
    config = NVME | {"compression": "on", "chunk_mib": chunk_mib}
    least = least_host_memory(lambda: linears(4, 512), tmp_path, **config)
    with training(lambda: linears(4, 512), tmp_path, host_memory=least, **config) as (model, engine, optimizer):
        for _ in range(2):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["pinned_host_nbytes"] <= least


def test_nothing_is_compressed_without_records_on_nvme(tmp_path):
    """Gradients may be on NVMe, and take all host memory that is left."""
    places = {"param_tier": "host", "optimizer_state_tier": "host", "update": "deferred", "compression": "on"}
    least = least_host_memory(lambda: linears(4, 64), tmp_path, **places)
    with training(lambda: linears(4, 64), tmp_path, host_memory=least, **places) as (model, engine, optimizer):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert engine.swap is not None and not engine.stats()["nvme_entropy_coding"]
        assert engine.stats()["pinned_host_nbytes"] <= least


@on_gpu
def test_training_has_the_same_bits_on_a_gpu(tmp_path):
    found = {}
    for choice in ("off", "on"):
        config = NVME | {"compression": choice, "device": "cuda", "chunk_mib": 1}
        with training(lambda: linears(6, 1024), tmp_path, **config, dtype="bf16") as (model, engine, optimizer):
            for step in range(5):
                model(torch.full((4, 1024), 0.1 + step, dtype=torch.bfloat16, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[choice] = states_of(engine, model)
    assert_same_states(found["on"], found["off"])


def test_segments_of_a_kind():
    record = record_layout(5000, Format("bf16", True))
    assert [(s.name, offset, nbytes) for s, offset, nbytes in record.of(WEIGHTS)] == [("weight", 0, 12288)]
    assert [(s.name, offset, nbytes) for s, offset, nbytes in record.of(STATES)] == [
        ("residual", 0, 12288),
        ("momentum", 12288, 20480),
        ("variance", 32768, 20480),
    ]
    assert record.of("gradients") == []


@pytest.mark.parametrize("numel, expected", [(0, 0), (1, 32 << 10), (8192, 256 << 10), (1 << 19, 16 * MIB), (1 << 24, 16 * MIB)])
def test_memory_for_buffers_follows_the_largest_segment(numel, expected):
    """Eight buffers of the largest segment of floats, at most 2 MiB each."""
    assert compression.buffers_nbytes([record_layout(numel, Format("bf16", True)), record_layout(numel // 2, Format("bf16", True))]) == expected


@pytest.mark.parametrize(
    "choice, device, num_parameters, expected",
    [
        ("off", "cuda", 10**9, False),
        ("on", "cpu", 1, True),
        ("auto", "cpu", 10**9, False),
        ("auto", "cuda", 10**9, True),
        ("auto", "cuda", 10**7, False),
    ],
)
def test_compression_is_considered_by_choice_device_and_size(choice, device, num_parameters, expected):
    """By default a large model on a GPU, because its drives are measured."""
    assert may_compress(infinity.Config(compression=choice), device, num_parameters) == expected


@pytest.mark.parametrize("chunk_mib", [None, 1 / 4])
def test_auto_drops_compression_if_its_buffers_do_not_fit(chunk_mib):
    model = linears(4, 512)

    def placed(choice, host_budget, compresses=True):
        config = infinity.Config(compression=choice, dtype="fp32", device="cpu", chunk_mib=chunk_mib, **NVME)
        return arranged(model, config, device_budget=64 * MIB, host_budget=host_budget, compresses=compresses)[2]

    with pytest.raises(infinity.BudgetError) as caught:
        placed("off", 1, compresses=False)
    least = int(str(caught.value).split("needs ")[1].split(" bytes")[0])
    assert placed("auto", least).compression_nbytes == 0
    with pytest.raises(infinity.BudgetError, match="; buffers: "):
        placed("on", least)
    for choice in ("auto", "on"):
        assert placed(choice, 64 * MIB).compression_nbytes > 0


@pytest.mark.parametrize(
    "nbytes_per_s, num_cores, expected",
    [(0, 64, False), (2.3e9, 16, True), (2.3e9, 2, False), (0.2e9, 2, True), (9e9, 16, True), (9e9, 8, False), (11e9, 128, False)],
)
def test_compression_pays_with_slow_drives_and_many_cores(nbytes_per_s, num_cores, expected):
    assert compression.pays("auto", nbytes_per_s, num_cores) == expected
    assert compression.pays("on", nbytes_per_s, num_cores)

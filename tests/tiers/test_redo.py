"""Late moments on NVMe: each read replays the missing updates once ([Note: late moments] in late_moments.py).

Long because updates, saves, loads and moves to the device read late moments, each with its own models and faults.
"""

import dataclasses
import errno
import itertools
import threading

import pytest
import torch
from support.helpers import NVME, OnDrive, ScriptedGauge, arranged, assert_same_bits, assert_same_states, memory, states_of, training
from torch import nn

import infinity
from aio_ext import _aio
from infinity.formats.format import Format
from infinity.optim.adam import Dither
from infinity.optim.rules import AdamRule, LionRule, SGDRule
from infinity.optim.shard import Shard
from infinity.plan import chunk_size, compression
from infinity.plan.late_moments import BLOCK_NBYTES, MOST_LATE, pool_for
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, record_layout
from infinity.plan.tiers import HOST, in_storage
from infinity.system.arena import Arena
from infinity.system.lanes import Lane
from infinity.tiers.late_moments import CatchUp, GradientPool, LateUpdate, late_gradient
from infinity.tiers.record_mover import RecordMover

MIB = 1 << 20
NUMEL = 500_000
RECORD = record_layout(NUMEL, Format("bf16", True))
COMPRESSED = NVME | {"dtype": "bf16", "compression": "on", "chunk_mib": 0.5, "host_memory": "24MiB"}
POOLED = COMPRESSED | {"host_memory": "64MiB"}  # with room for gradients


def linears(depth, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def normal(numel, dtype, seed=0, std=1e-3):
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


# ---- the arithmetic ----


@pytest.mark.parametrize("master, dtype", [("split", torch.float32), ("fp32", torch.float32), ("split", torch.bfloat16)])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_advanced_moments_have_the_bits_of_an_update(master, dtype, grad_scale):
    """Includes infinities, NaNs, denormals, signed zeros and stochastic rounding."""
    rule, group = AdamRule(True), {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-39, -1e-40, 3e38]).bfloat16()
    grad = torch.cat([normal(70_001, torch.bfloat16), odd.repeat(len(odd))])
    moments = {"momentum": normal(len(grad), dtype, 1), "variance": normal(len(grad), dtype, 2).square()}
    dither = Dither.of(3, "a", 7, 11) if dtype == torch.bfloat16 else None
    for number, name in enumerate(moments):
        moments[name][-len(odd) ** 2 :] = odd.to(dtype).abs().pow(1 + number).repeat_interleave(len(odd))
    whole = {name: tensor.clone() for name, tensor in moments.items()}
    weights = {"weight": normal(len(grad), torch.bfloat16, 3), "residual": torch.zeros(len(grad), dtype=torch.int16)}
    if master == "fp32":
        weights = {"weight": normal(len(grad), torch.float32, 3)}
    rule.apply(Shard(Format("fp32" if master == "fp32" else "bf16"), weights | whole), grad, rule.scalars(group, 7), grad_scale, dither=dither)
    rule.advance(moments, grad, rule.scalars(group, 7), grad_scale, dither=dither)
    for name in moments:
        assert_same_bits(moments[name], whole[name], name)
        assert not moments[name].isfinite().all()


def test_only_a_rule_whose_moments_need_no_weight_may_be_late():
    class Own(AdamRule):
        def apply(self, *arguments, **options):
            super().apply(*arguments, **options)

    assert AdamRule(True).can_advance
    assert not any(rule.can_advance for rule in (AdamRule(False), Own(True), SGDRule(True), LionRule()))


# ---- on a drive ----


class LateOnDrive(OnDrive):
    """States of one record with room for a gradient, in sections of 256 KiB. Moments on NVMe lack the last updates."""

    def __init__(self, path, num_blocks=0):
        nbytes = RECORD.states_nbytes + (0 if num_blocks else RECORD.late_gradient[2])
        super().__init__([path], [nbytes], 256 << 10, num_blocks * BLOCK_NBYTES)
        self.place = self.compressor.compressed(self.extents[0], RECORD.of(STATES, late=True))
        self.threads = []

    def states(self, seed):
        """Memory with states, and behind them a gradient that a whole write ignores."""
        data = memory(self.place.nbytes, fill=0)
        data[: 2 * NUMEL] = b"\1" * (2 * NUMEL)  # the residual: the first zeros would not be written
        late_gradient(RECORD, data).copy_(normal(NUMEL, torch.bfloat16, seed))
        for segment, offset, _ in RECORD.of(STATES)[1:]:
            torch.frombuffer(data, dtype=torch.float32, count=NUMEL, offset=offset).copy_(normal(NUMEL, torch.float32, seed + len(segment.name)))
        return data

    def catch_up(self, buffer):
        """An update of the test: a second call would change the moments again."""
        self.threads.append(threading.current_thread())
        for segment, offset, _ in RECORD.of(STATES)[1:]:
            torch.frombuffer(buffer, dtype=torch.float32, count=NUMEL, offset=offset).add_(late_gradient(RECORD, buffer))

    def write_late(self, catch_up=None, num_late=1):
        """Writes states whole, then `num_late` times late. Returns the states after all updates."""
        data = self.states(1)
        self.compressor.write(self.place, data).wait()
        for number in range(num_late):
            late_gradient(RECORD, data).copy_(normal(NUMEL, torch.bfloat16, 10 + number))
            self.catch_up(data)
            self.compressor.write(self.place, data, catch_up=catch_up or self.catch_up).wait()
        self.threads.clear()
        return data[: RECORD.states_nbytes]

    def read(self):
        buffer = memory(self.place.nbytes, fill=0xEE)
        return self.compressor.read(self.place, buffer, what="chunk 3: "), buffer


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("num_blocks, num_late", [(0, 1), (24, 1), (24, 2)])
def test_each_read_replays_late_moments_once(tmp_path, num_blocks, num_late):
    with LateOnDrive(tmp_path, num_blocks) as drive:
        for _ in range(3):
            expected = drive.write_late(num_late=num_late)
            reads = [drive.read() for _ in range(4)]
            for read, buffer in reads * 2:
                read.wait()
                assert read.done and buffer[: RECORD.states_nbytes] == expected
            assert len(drive.threads) == len(reads) * num_late and len(drive.place.redo.late) == num_late


def test_late_moments_are_not_written_and_gradients_only_with_them(tmp_path):
    with LateOnDrive(tmp_path) as drive:

        def moved(catch_up):
            before = drive.swap.write_nbytes, drive.swap.read_nbytes
            (write := drive.compressor.write(drive.place, drive.states(2), catch_up=catch_up)).wait()
            (read := drive.read()[0]).wait()
            written, got = drive.swap.write_nbytes - before[0], drive.swap.read_nbytes - before[1]
            assert (written, got) == (write.nbytes, read.nbytes)
            return written / NUMEL, got / NUMEL

        assert moved(None) == pytest.approx((2 + 2 * 3.33, 2 + 2 * 3.33), abs=0.2)
        assert moved(drive.catch_up) == pytest.approx((2 + 1.33, 2 + 2 * 3.33 + 1.33), abs=0.2)
        assert moved(None) == pytest.approx((2 + 2 * 3.33, 2 + 2 * 3.33), abs=0.2)
        whole, late = RECORD.of(STATES), RECORD.of(STATES, late=True)
        for arguments, expected in (((whole,), [8.7, 8.7]), ((late, 1), [9.4, 6.0]), (((),), [0, 0])):
            assert [nbytes / NUMEL for nbytes in compression.moved_nbytes(*arguments)] == pytest.approx(expected, abs=0.1)


def test_gradients_in_memory_are_neither_written_nor_read(tmp_path):
    with LateOnDrive(tmp_path, 24) as drive:

        def moved(catch_up):
            before = drive.swap.write_nbytes, drive.swap.read_nbytes
            drive.compressor.write(drive.place, drive.states(2), catch_up=catch_up).wait()
            drive.read()[0].wait()
            return (drive.swap.write_nbytes - before[0]) / NUMEL, (drive.swap.read_nbytes - before[1]) / NUMEL

        whole, late = (2 + 2 * 3.33, 2 + 2 * 3.33), (2, 2 + 2 * 3.33)
        for expected, catch_up in ((whole, None), (late, drive.catch_up), (late, drive.catch_up), (whole, None)):
            assert moved(catch_up) == pytest.approx(expected, abs=0.2)
        for num_late in (1, 2):
            found = compression.moved_nbytes(RECORD.of(STATES, late=True), num_late, pools=True)
            assert [nbytes / NUMEL for nbytes in found] == pytest.approx([8.7, 2 + 6.7 / (num_late + 1)], abs=0.1)


def test_a_gradient_without_room_in_the_pool_is_not_kept(tmp_path):
    """A gradient has four sections of 2 blocks each. The third gradient finds room for three sections."""
    with LateOnDrive(tmp_path, 2 * 8 + 6) as drive:
        drive.write_late(num_late=2)
        assert drive.compressor.pool.num_free == 6
        data = drive.states(5)
        drive.compressor.write(drive.place, data, catch_up=drive.catch_up).wait()
        assert drive.place.redo.late == () and drive.compressor.pool.num_free == 2 * 8 + 6
        read, buffer = drive.read()
        read.wait()
        assert not drive.threads and buffer[: RECORD.states_nbytes] == data[: RECORD.states_nbytes]


@pytest.mark.parametrize("at", [0, 2])
def test_a_write_that_cannot_be_submitted_frees_its_memory(tmp_path, monkeypatch, at):
    with LateOnDrive(tmp_path, 24) as drive:
        drive.write_late()
        write, count = drive.swap.write, itertools.count()

        def fail(*arguments, **options):
            if next(count) == at:
                raise OSError(errno.EIO, "no")
            return write(*arguments, **options)

        monkeypatch.setattr(drive.swap, "write", fail)
        catch_up = drive.catch_up if at == 0 else None  # a late write submits one request
        with pytest.raises(OSError, match="no"):
            drive.compressor.write(drive.place, drive.states(5), catch_up=catch_up).wait()
        assert len(drive.place.redo.late) == 1 and drive.compressor.pool.num_free == 24 - 8
        drive.place.redo.forget()
        assert drive.place.redo.late == () and drive.compressor.pool.num_free == 24


def test_a_record_moved_to_the_device_during_its_write_frees_memory_once(tmp_path, monkeypatch):
    with LateOnDrive(tmp_path, 24) as drive:
        drive.write_late()

        def move_and_make(*arguments):
            drive.place.redo.forget()
            return LateUpdate(*arguments)

        monkeypatch.setattr("infinity.tiers.compression.LateUpdate", move_and_make)
        drive.compressor.write(drive.place, drive.states(2), catch_up=drive.catch_up).wait()
        assert len(drive.place.redo.late) == 1 and drive.compressor.pool.num_free == 24 - 8
        drive.place.redo.forget()
        assert drive.place.redo.late == () and drive.compressor.pool.num_free == 24


@pytest.mark.parametrize("kind", ["zeros", "noise"])
def test_gradients_of_zeros_take_no_bytes_and_noise_takes_all(tmp_path, kind):
    with LateOnDrive(tmp_path, 16) as drive:
        data = drive.states(1)
        drive.compressor.write(drive.place, data).wait()
        gradient = late_gradient(RECORD, data)
        if kind == "zeros":
            gradient.zero_()
        else:
            gradient.view(torch.int16).copy_(torch.randint(-(2**15), 2**15, (NUMEL,), generator=torch.Generator().manual_seed(0)))
            gradient[gradient.isnan()] = 1.0
        drive.catch_up(data)
        drive.compressor.write(drive.place, data, catch_up=drive.catch_up).wait()
        assert [pooled.nbytes for pooled in drive.place.redo.late[0].pooled] == [0 if kind == "zeros" else s.nbytes for s in drive.place.gradient]
        read, buffer = drive.read()
        read.wait()
        assert buffer == data


def test_a_pool_returns_the_stored_bytes():
    arena = Arena()
    try:
        pool = GradientPool(arena, 3 * BLOCK_NBYTES + 4096)
        sizes = [0, 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 3 * BLOCK_NBYTES]
        for nbytes in sizes:
            data = memoryview(bytes(i % 251 for i in range(nbytes)))
            pooled, target = pool.put(data), bytearray(nbytes)
            assert pool.num_free == 3 - len(pooled.blocks) == 3 - -(-nbytes // BLOCK_NBYTES)
            pool.copy(pooled, memoryview(target))
            assert target == data
            assert pool.put(memoryview(bytes(3 * BLOCK_NBYTES + 1))) is None
            pooled.release()
            assert pool.num_free == 3
    finally:
        arena.close()


def test_the_number_of_late_updates_follows_from_the_memory_that_is_left():
    """One late update: 55 % of all gradients and the largest one. Two: 110 % and twice the largest one."""
    of_records = [BLOCK_NBYTES] * 90 + [10 * BLOCK_NBYTES]

    def found(num_blocks):
        nbytes, num_late = pool_for(of_records, num_blocks * BLOCK_NBYTES + 4096)
        return nbytes / BLOCK_NBYTES, num_late

    assert found(64) == (0, 0)
    assert found(65) == found(129) == (65, 1)
    assert found(130) == found(10**6) == (130, MOST_LATE)
    assert pool_for([], 1 << 40) == (0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_at_the_end_of_a_read_leaves_memory_alone(tmp_path, monkeypatch, when):
    with LateOnDrive(tmp_path) as drive:
        drive.write_late()
        push = Lane.push

        def interrupted(lane, *arguments, **options):
            if threading.current_thread() is not threading.main_thread():
                return push(lane, *arguments, **options)
            if when == "after":
                push(lane, *arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(Lane, "push", interrupted)
        buffer = memory(drive.place.nbytes, fill=0xEE)
        with pytest.raises(KeyboardInterrupt):
            drive.compressor.read(drive.place, buffer)
        monkeypatch.undo()
        buffer[:] = bytes(len(buffer))  # another owner uses the buffer now
        for lane in (*drive.compressor.expanders, *drive.compressor.catchers):
            lane.drain()
        assert not any(buffer)


def test_a_failed_replay_raises_at_each_wait(tmp_path):
    def fail(buffer):
        raise MemoryError("no room")

    with LateOnDrive(tmp_path) as drive:
        drive.write_late(catch_up=fail)
        read, _ = drive.read()
        for _ in range(3):
            with pytest.raises(MemoryError, match="no room"):
                read.wait()
        assert read.done


def test_a_failed_read_of_one_section_raises_and_replays_nothing(tmp_path):
    with LateOnDrive(tmp_path) as drive:
        expected = drive.write_late()
        _aio._inject("read", 3, 1, -errno.EIO)
        read, _ = drive.read()
        for _ in range(2):
            with pytest.raises(infinity.SwapError, match="chunk 3: "):
                read.wait()
        assert not drive.threads
        read, buffer = drive.read()
        read.wait()
        assert buffer[: RECORD.states_nbytes] == expected


def test_a_record_that_is_late_already_is_written_whole(tmp_path):
    with LateOnDrive(tmp_path) as drive:
        drive.write_late()
        data = drive.states(5)
        drive.compressor.write(drive.place, data, catch_up=drive.catch_up).wait()
        read, buffer = drive.read()
        read.wait()
        assert not drive.threads and buffer[: RECORD.states_nbytes] == data[: RECORD.states_nbytes]


# ---- in an engine ----


def gradients_of(model, step, unused):
    """Runs forward and backward; `unused` layers get no gradient."""
    x = torch.full((2, 512), 0.1 + 0.01 * step, dtype=torch.bfloat16)
    for index, layer in enumerate(model):
        x = x if index in unused else layer(x)
    x.float().square().mean().backward()


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "host_memory, moments, num_late, written_of_states",
    [("24MiB", "fp32", 1, 2 + (2 * 3.33 + 1.33) / 2), ("64MiB", "fp32", 2, 2 + 2 * 3.33 / 3), ("64MiB", "bf16", 2, 2 + 2 * 1.33 / 3)],
)
def test_a_step_writes_the_moments_of_some_chunks(tmp_path, host_memory, moments, num_late, written_of_states, monkeypatch):
    """All steps write about the same number of bytes."""
    monkeypatch.setattr(RecordMover, "is_crowded", lambda records, kind: False)  # otherwise a slow drive puts some updates off
    config = COMPRESSED | {"host_memory": host_memory, "optimizer_state_dtype": moments}
    with training(lambda: linears(9, 512), tmp_path, **config) as (model, engine, optimizer):
        assert engine.placement.num_late == num_late
        written = []
        for step in range(9):
            gradients_of(model, step, ())
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            written.append(engine.stats()["nvme_write_nbytes"] / engine.layout.num_parameters)
        steps = [after - before for before, after in zip(written[2:], written[3:])]
        assert max(steps) < (1.2 if num_late == 1 else 1.05) * min(steps)  # a chunk writes its moments in every second or third step
        assert sum(steps) / 6 == pytest.approx(1.33 + written_of_states, rel=0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "residency, host_memory, moments, num_late",
    [("none", "16MiB", "fp32", 1), ("auto", "16MiB", "fp32", 1), ("none", "64MiB", "fp32", 2), ("auto", "64MiB", "bf16", 2)],
)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_training_with_late_moments_has_the_same_bits(
    tmp_path, residency, host_memory, moments, num_late, update, one_thread
):
    """Covers changing hyper-parameters, groups, clipping, layers without a gradient, reads of states, and a checkpoint."""

    def groups(model):
        params = list(model.parameters())
        return [{"params": params[0::3]}, {"params": params[1::3], "betas": (0.8, 0.9)}, {"params": params[2::3], "weight_decay": 0.3}]

    found = {}
    clip = {"max_grad_norm": 1e-3} if update == "deferred" else {}
    config = COMPRESSED | {"update": update, "residency": residency, "host_memory": host_memory, "optimizer_state_dtype": moments}
    for choice in ("off", "on"):
        with training(
            lambda: linears(6, 512), tmp_path, groups=groups, options=clip, **config | {"compression": choice}
        ) as (model, engine, optimizer):
            seen = []
            for step in range(9):
                for number, group in enumerate(optimizer.param_groups):
                    group["lr"] = 1e-2 / (1 + step + number)
                    group["betas"] = (0.9 - 0.05 * (step % 3), 0.95)
                gradients_of(model, step, {step % 6} if step % 2 else ())
                optimizer.step()
                optimizer.zero_grad()
                if step in (2, 5):
                    seen.append(states_of(engine, model))
                if step == 3:
                    infinity.save(tmp_path / "checkpoint", model, optimizer)
                if step == 6:
                    infinity.load(tmp_path / "checkpoint", model, optimizer)
            found[choice] = [*seen, states_of(engine, model)]
            if choice == "on":
                assert engine.placement.num_late == num_late
                late = [late for chunk in engine.registry.chunks for late in chunk.redo.late]
                assert late and all(isinstance(each.catch_up, CatchUp) for each in late)
    for on, off in zip(found["on"], found["off"], strict=True):
        assert_same_states(on, off)


def trained(directory, choice, *, change=lambda engine, step: None, **config):
    """Returns (states after eight steps, late updates of each chunk). Calls change(engine, step) after each step."""
    with training(lambda: linears(4, 512), directory, **COMPRESSED | config | {"compression": choice}) as (model, engine, optimizer):
        for step in range(8):
            gradients_of(model, step, ())
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            change(engine, step)
        return states_of(engine, model), [chunk.redo.late if chunk.redo else () for chunk in engine.registry.chunks]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("config", [COMPRESSED, POOLED], ids=["nvme", "memory"])
def test_a_record_changed_after_its_read_is_written_whole(tmp_path, config, one_thread):
    """The state after an interrupt: the record has changed in its slot and not on NVMe."""

    def change(engine, step):
        for chunk in engine.registry.chunks[: 4 if step in (2, 3, 5) else 0]:
            lease = engine.records.obtain(chunk, (WEIGHTS, STATES))
            assert lease.begin_change()
            lease.shard["momentum"].mul_(2)
            lease.give_back()

    off, _ = trained(tmp_path, "off", change=change, **config)
    on, late = trained(tmp_path, "on", change=change, **config)
    assert any(late)
    assert_same_states(on, off)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["default dtype", "thread", "drives"])
def test_late_moments_work_with_other_default_dtypes_threads_and_drives(tmp_path, name, one_thread):
    """Cases: another default dtype, a thread whose default device is meta, and striped bytes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected, _ = trained(tmp_path / "a", "off")
    found = []
    if name == "default dtype":
        default = torch.get_default_dtype()

        def change(engine, step):
            torch.set_default_dtype(torch.float64)

        try:
            found.append(trained(tmp_path / "a", "on", change=change))
        finally:
            torch.set_default_dtype(default)
    elif name == "thread":

        def change(engine, step):
            with torch.device("meta"):
                for chunk in engine.registry.chunks:
                    with engine.records.lease(chunk, STATES):
                        pass

        thread = threading.Thread(target=lambda: found.append(trained(tmp_path / "a", "on", change=change)))
        thread.start()
        thread.join()
    else:
        found.append(trained(tmp_path / "a", "on", swap_dirs=[tmp_path / "a", tmp_path / "b"]))
    states, late = found[0]
    assert any(late)
    assert_same_states(states, expected)


@pytest.mark.parametrize(
    "changes", [{"dtype": "fp32"}, {"optimizer_state_dtype": "bf16", "host_memory": "16MiB"}, {"compression": "off"}], ids=["fp32", "bf16", "off"]
)
def test_records_of_other_formats_have_no_room_for_a_gradient(tmp_path, changes):
    with training(lambda: linears(4, 512), tmp_path, **COMPRESSED | changes) as (_, engine, _):
        assert engine.placement.in_slots == engine.placement.sizes
        assert all(chunk.redo is None for chunk in engine.registry.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("make, options", [(infinity.Adam, {"weight_decay": 0.1}), (infinity.SGD, {"momentum": 0.9})])
def test_other_optimizers_write_whole_records(tmp_path, make, options, one_thread):
    found = {}
    for choice in ("off", "on"):
        config = COMPRESSED | {"compression": choice}
        with training(lambda: linears(4, 512), tmp_path, optimizer=make, options=options, **config) as (model, engine, optimizer):
            for step in range(4):
                gradients_of(model, step, ())
                optimizer.step()
                optimizer.zero_grad()
            assert engine.placement.in_slots == engine.placement.sizes
            found[choice] = states_of(engine, model)
    assert_same_states(found["on"], found["off"])


def test_records_on_the_device_keep_no_gradients_in_host_memory(tmp_path, monkeypatch):
    """Records may have gradients in host memory in the first step. They move to the device after this step."""
    gauge = ScriptedGauge(1 << 40)
    monkeypatch.setattr("infinity.engine.memory.activation_meter.SLACK", 0.0)
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    config = {"param_tier": "auto", "optimizer_state_tier": "auto", "residency": "auto", "compression": "auto", "device_memory": "40MiB", "host_memory": "20MiB"}
    with training(lambda: linears(16, 512), tmp_path, **COMPRESSED | config) as (model, engine, optimizer):
        gauge.tier, held = engine.tier, []
        for step in range(6):
            gradients_of(model, step, ())
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            chunks = [chunk for chunk in engine.registry.chunks if chunk.redo and chunk.redo.late]
            assert not any(chunk.on_device for chunk in chunks)
            held.append(sum(len(pooled.blocks) for chunk in chunks for late in chunk.redo.late for pooled in late.pooled))
            assert engine.stats()["replay_grad_nbytes"] == held[-1] * BLOCK_NBYTES
        assert engine.device_budget.promoted and any(held)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("moments, planned, found", [("fp32", 1, 2), ("bf16", 0, 0)])
def test_memory_of_rejected_coding_buffers_holds_gradients(tmp_path, monkeypatch, moments, planned, found, one_thread):
    monkeypatch.setattr("infinity.engine.build.may_compress", lambda *arguments: True)
    monkeypatch.setattr("infinity.plan.compression.pays", lambda *arguments: False)
    config = {"optimizer_state_dtype": moments, "host_memory": "16MiB"}
    with training(lambda: linears(4, 512), tmp_path, **COMPRESSED | config | {"compression": "auto"}) as (_, engine, _):
        assert (engine.placement.num_late, engine.placement.pool_nbytes) == (planned, 0)
        assert {chunk.redo.num_late for chunk in engine.registry.chunks if chunk.redo} == {found} - {0} and not engine.stats()["nvme_entropy_coding"]
        assert (engine.compressor.pool is not None) == (found > 0) and engine.arena.nbytes <= engine.placement.host_nbytes
    (on, late), (off, _) = (trained(tmp_path, choice, **config) for choice in ("auto", "off"))
    assert any(late) == (found > 0)
    assert_same_states(on, off)


# ---- placement ----


def placed(model, *, host_budget=64 * MIB, device_budget=64 * MIB, nvme_budget=None, accumulating=False, compresses=True, **config):
    config = infinity.Config(device="cpu", **COMPRESSED | {"chunk_mib": None} | config)
    options = {"device_budget": device_budget, "host_budget": host_budget, "nvme_budget": nvme_budget}
    return arranged(model, config, can_advance=True, accumulating=accumulating, compresses=compresses, **options)[2]


def test_room_for_gradients_is_counted_in_slots_on_nvme_and_in_the_pool():
    model, chunks = linears(6, 512), {"chunk_mib": 0.5}
    whole = placed(model, accumulating=True, **chunks)
    assert whole.in_slots == whole.sizes and not whole.num_late
    for host_budget, num_late in ((16 * MIB, 1), (64 * MIB, 2)):
        late = placed(model, host_budget=host_budget, **chunks)
        assert (late.num_late, late.pool_nbytes > 0) == (num_late, num_late == 2)
        assert all(there == size + size // 5 for there, size in zip(late.in_slots[STATES], late.sizes[STATES]) if size % 20480 == 0)
        assert late.in_slots[WEIGHTS] == late.sizes[WEIGHTS] and late.in_slots[GRADIENTS] == late.sizes[GRADIENTS]
        there, sizes = sum(late.on_nvme[STATES]), sum(late.sizes[STATES])
        assert there / sizes == pytest.approx((8.74 + (0 if late.pool_nbytes else 1.37)) / 10, rel=0.01)  # 2 of 10 bytes are not coded
        taken = late.compression_nbytes + sum(late.slots[kind] * max(late.in_slots[kind]) for kind in late.slots if late.slots[kind])
        resident = sum(n for kind in late.homes for n, home in zip(late.sizes[kind], late.homes[kind]) if home == HOST)
        assert late.host_nbytes == taken + resident + late.pool_nbytes <= host_budget
        extents = [n for kind in late.homes for n, home in zip(late.on_nvme[kind], late.homes[kind]) if home.is_storage]
        assert late.nvme_nbytes == sum(extents) + late.overflow_nbytes


def test_gradients_of_late_moments_get_host_memory_after_states():
    """The order is weights, states, gradients of late moments, gradients that are used at once."""
    model, chunks = linears(6, 512), {"chunk_mib": 0.5}
    free = chunks | {"param_tier": "auto", "optimizer_state_tier": "auto", "residency": "auto", "device_budget": 4 * MIB}
    found = {"ample": placed(model, host_budget=128 * MIB, **free), "short": placed(model, host_budget=48 * MIB, **free)}
    assert set(found["ample"].homes[STATES]) == {HOST} and not found["ample"].pool_nbytes
    assert found["short"].homes[STATES].count(HOST) and not found["short"].pool_nbytes
    states = placed(model, host_budget=64 * MIB, residency="auto", **chunks)
    assert states.pool_nbytes and len(in_storage(states.homes[STATES])) == len(states.homes[STATES]) and HOST in states.homes[GRADIENTS]


@pytest.mark.few(1)
@pytest.mark.parametrize("host_mib, is_late", [(200, False), (240, True), (300, True), (360, True), (480, False), (520, False), (540, False)])
def test_without_coding_late_gradients_get_host_memory_before_states(host_mib, is_late):
    """Only if fewer bytes move. Near both ends, slots that are 20 % larger and a pool push out more states than they save."""
    model = linears(160, 512)
    options = {"param_tier": "auto", "optimizer_state_tier": "auto", "residency": "auto", "device_budget": 4 * MIB, "chunk_mib": 0.5}
    options |= {"compresses": False, "host_budget": host_mib * MIB}

    def away(found):
        return [nbytes for home, nbytes in zip(found.homes[STATES], found.sizes[STATES]) if home.is_storage]

    found, whole = (placed(model, compression=compression, **options) for compression in ("auto", "off"))
    assert found.host_nbytes <= host_mib * MIB and (found.num_late > 0) == is_late and not whole.num_late
    moved = sum(away(found)) * (1.2 + 0.8 / (1 + found.num_late))  # 8 of 10 bytes are moments: read in each step, written in turn
    assert moved <= 2 * sum(away(whole))
    if is_late:
        blocks = [max(nbytes // 5 // BLOCK_NBYTES, 1) for nbytes in away(found)]  # a gradient has 2 of 10 bytes; that of a bias takes a block
        needed = (1.1 * sum(blocks) / 2 + max(blocks)) * found.num_late
        assert found.pool_nbytes / BLOCK_NBYTES == pytest.approx(needed, abs=1)
    bf16 = placed(model, optimizer_state_dtype="bf16", **options | {"host_budget": 160 * MIB})
    assert in_storage(bf16.homes[STATES]) and not bf16.pool_nbytes  # a gradient saves no more bytes than states


@pytest.mark.parametrize("host_budget", [16 * MIB, 17 * MIB, 21 * MIB])
def test_the_choice_of_the_chunk_size_counts_bytes_that_late_moments_save(host_budget):
    """Counts uncoded bytes of records on NVMe, also if other records are in host memory."""
    model = linears(6, 512)
    config = infinity.Config(device="cpu", **COMPRESSED | {"residency": "auto", "param_tier": "auto", "optimizer_state_tier": "auto"})
    layout, records, found = arranged(model, config, device_budget=4 * MIB, host_budget=host_budget, can_advance=True, compresses=True)
    on_nvme = {kind: [index for index, home in enumerate(found.homes[kind]) if home.is_storage] for kind in (WEIGHTS, STATES)}
    weights, states = (sum(found.sizes[kind][index] for index in on_nvme[kind]) for kind in (WEIGHTS, STATES))
    moved = 3 * weights
    for index in on_nvme[STATES]:
        segments = records[index].of(STATES, late=True)
        moved += sum(compression.moved_nbytes(segments, found.num_late, codes=False, pools=found.pool_nbytes > 0))
    assert found.num_late and states
    whole = dataclasses.replace(found, num_late=0, on_nvme=found.sizes)
    saved = chunk_size.step_seconds(layout, whole) - chunk_size.step_seconds(layout, found)
    expected = (3 * weights + 2 * states - moved) * (1 + 1 / found.slots[STATES]) / chunk_size.NVME_RATE
    assert saved == pytest.approx(expected, rel=0.01)


def test_with_little_room_records_are_written_whole():
    """These records are compressed nevertheless."""
    model, chunks = linears(6, 512), {"chunk_mib": 0.5}
    needed = placed(model, host_budget=16 * MIB, **chunks).nvme_nbytes
    assert placed(model, host_budget=16 * MIB, nvme_budget=needed, **chunks).nvme_nbytes == needed
    short = placed(model, host_budget=16 * MIB, nvme_budget=needed - 1, **chunks)
    assert short.nvme_nbytes < needed and short.in_slots == short.sizes and short.compression_nbytes
    assert placed(model, host_budget=64 * MIB, nvme_budget=needed - 1, **chunks).num_late == 2
    with pytest.raises(infinity.BudgetError) as caught:
        placed(model, host_budget=1, **chunks)
    least = int(str(caught.value).split("needs ")[1].split(" bytes")[0])
    tight = placed(model, host_budget=least, **chunks)
    assert tight.in_slots == tight.sizes and tight.compression_nbytes
    assert placed(model, host_budget=2 * least, **chunks).in_slots != tight.sizes

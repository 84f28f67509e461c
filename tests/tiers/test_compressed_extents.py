"""Extents that are smaller than their records: every byte comes back, whatever the code saves, or a write fails before it changes a byte."""

import errno
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.helpers import NVME, OnDrive, arranged, assert_same_states, memory, states_of, training
from torch import nn

import infinity
from aio_ext import _aio
from infinity.formats.format import Format, Segment
from infinity.plan import compression
from infinity.plan.compression import PIECE_NBYTES
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, record_layout

MIB = 1 << 20
NUMEL = 512 << 10
SEGMENTS = ((Segment("residual", "int16"), 0, 2 * NUMEL), (Segment("momentum", "fp32"), 2 * NUMEL, 4 * NUMEL))
SECTION_NBYTES = 256 << 10
REGION = compression.regions(SEGMENTS, SECTION_NBYTES)[0]


class SmallExtents(OnDrive):
    """Extents of the planned size for records of 3 MiB, which an overflow area follows."""

    def __init__(self, paths, count, area_nbytes=PIECE_NBYTES * REGION.num_pieces):
        super().__init__(paths, [REGION.room] * count, SECTION_NBYTES, area_nbytes=area_nbytes)
        self.places = [self.compressor.compressed(extent, SEGMENTS) for extent in self.extents]
        self.area = self.compressor.area

    def write(self, place, data):
        self.compressor.write(place, data, what="chunk 3: ").wait()

    def read(self, place):
        buffer = memory(place.nbytes, fill=0xEE)
        self.compressor.read(place, buffer).wait()
        return buffer

    @property
    def num_used(self):
        return sum(len(pieces) for place in self.places for pieces in place.pieces)


def floats(seed):
    """Noise for the residual, and normal floats, which save bytes as planned."""
    data = memory(6 * NUMEL)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 0.01
    data[2 * NUMEL :] = memoryview(values.numpy()).cast("B")
    return data


def test_the_room_is_less_than_the_record_and_enough_for_floats(paths):
    with SmallExtents(paths, 2) as drive:
        for seed, place in enumerate(drive.places):
            drive.write(place, data := floats(seed))
            assert drive.read(place) == data
        assert drive.num_used == 0 and drive.area.nbytes == PIECE_NBYTES * REGION.num_pieces
        assert drive.swap._directories and REGION.room < 0.9 * REGION.nbytes


def test_pieces_of_records_that_save_nothing_come_back_with_a_later_code(paths):
    """The swap never exceeds the uncoded bytes by more than a piece a region."""
    with SmallExtents(paths[:1], 6) as drive:
        for turn in range(3):
            is_noise = [turn != 1 or index % 2 == 0 for index in range(6)]
            expected = [memory(6 * NUMEL) if each else floats(index) for index, each in enumerate(is_noise)]
            for place, data in zip(drive.places, expected):
                drive.write(place, data)
            assert all(drive.read(place) == data for place, data in zip(drive.places, expected))
            assert drive.num_used == sum(is_noise) * REGION.num_pieces
            nbytes = sum(directory.nbytes for directory in drive.swap._directories)
            assert nbytes <= 6 * (REGION.nbytes + PIECE_NBYTES)
            assert (drive.area.num_free + drive.num_used) * PIECE_NBYTES == drive.area.nbytes


def test_writes_share_the_pieces_of_one_write(paths):
    """Writes wait for each other instead of a larger area. All lanes run at once."""
    with SmallExtents(paths[:1], 8) as drive, ThreadPoolExecutor(8) as threads:
        expected = [floats(index) for index in range(8)]
        for _ in range(3):
            list(threads.map(drive.write, drive.places, expected))
        assert all(drive.read(place) == data for place, data in zip(drive.places, expected))
        assert drive.area.nbytes == PIECE_NBYTES * REGION.num_pieces and drive.num_used == 0


def test_without_room_a_write_fails_before_it_changes_a_byte(paths):
    """The file cannot grow. The error names the file and the missing bytes, and later writes succeed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SmallExtents(paths[:1], 3) as drive:
        before = [floats(index) for index in range(3)]
        for place, data in zip(drive.places, before):
            drive.write(place, data)
        drive.write(drive.places[0], noise := memory(6 * NUMEL))  # takes all pieces
        resource.setrlimit(resource.RLIMIT_FSIZE, (drive.swap._directories[0].nbytes, hard))
        try:
            for _ in range(2):
                with pytest.raises(infinity.SwapError, match="chunk 3: floats of this record save fewer bytes than planned") as caught:
                    drive.write(drive.places[1], memory(6 * NUMEL))
                assert caught.value.errno == errno.EFBIG and str(paths[0]) in caught.value.filename
                assert f"{PIECE_NBYTES * REGION.num_pieces:,} more bytes are needed" in caught.value.strerror
                assert [drive.read(place) for place in drive.places] == [noise, *before[1:]]
            drive.write(drive.places[0], before[1])  # gives the pieces back, and thus makes room
            drive.write(drive.places[1], noise)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [drive.read(place) for place in drive.places] == [before[1], noise, before[2]]


@pytest.mark.parametrize("op, result", [("write", -errno.EIO), ("write", -errno.ENOSPC), ("read", -errno.EIO), ("write", 4096), ("read", 4096)])
def test_faults_in_the_overflow_area_are_errors_or_repeated(paths, op, result):
    """A short transfer is continued. After an error, the next write restores the record."""
    with SmallExtents(paths[:1], 1) as drive:
        place = drive.places[0]
        drive.write(place, noise := memory(6 * NUMEL))
        _aio._inject(op, 9, 1, result)  # the last section, which lies in the area
        try:
            if op == "write":
                drive.write(place, noise)
            assert drive.read(place) == noise and result > 0
        except infinity.SwapError as error:
            assert error.errno == -result
        assert _aio._inject() == 1
        for data in (floats(1), noise):
            drive.write(place, data)
            assert drive.read(place) == data


# ---- in an engine ----


def spread(depth, width):
    """Weights with 64 exponents: no code of theirs fits the planned room."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.sign() * 2.0 ** (-64 * torch.rand(param.shape)))
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_training_beyond_the_planned_room_has_the_same_bits(tmp_path, update, one_thread):
    found = {}
    for choice in ("off", "on"):
        config = {"dtype": "bf16", "update": update, "compression": choice, "host_memory": "24MiB", "chunk_mib": 0.5}
        with training(lambda: spread(3, 512), tmp_path / choice, options={"lr": 1e-9}, **NVME, **config) as (model, engine, optimizer):
            for step in range(3):
                model(torch.full((2, 512), 0.1 + step, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[choice] = states_of(engine, model)
            infinity.save(tmp_path / f"saved-{choice}", model, optimizer)
            if choice == "on":
                weights = [chunk.extents[WEIGHTS] for chunk in engine.registry.chunks]
                assert any(extent.pieces[0] for extent in weights)
                infinity.load(tmp_path / "saved-off", model, optimizer)
                assert_same_states(states_of(engine, model), found["off"])
    assert_same_states(found["on"], found["off"])


@pytest.mark.parametrize("lacking", [0, 1])
def test_auto_codes_records_that_fit_the_drive_only_in_code(tmp_path, monkeypatch, lacking):
    """The processors have no time to code, so records that fit are stored without code."""
    monkeypatch.setattr("infinity.engine.build.may_compress", lambda *arguments: True)
    monkeypatch.setattr("infinity.plan.compression.pays", lambda *arguments: False)
    config = {"dtype": "bf16", "compression": "auto", "host_memory": "24MiB", "chunk_mib": 0.5, "checksums": False}
    nbytes = []
    for room in (1 << 40, None):
        monkeypatch.setattr("infinity.engine.build.room_nbytes", lambda paths: room or nbytes[0] - lacking)
        with training(lambda: nn.Linear(512, 1024), tmp_path, **NVME, **config) as (_, engine, _):
            assert engine.compressor.codes == (room is None and lacking > 0)
            nbytes.append(sum(directory.nbytes for directory in engine.swap._directories))
            assert nbytes[-1] == engine.placement.nvme_nbytes
    assert (nbytes[1] < 0.92 * nbytes[0]) == (lacking > 0)


# ---- in a plan ----


def test_a_plan_counts_the_room_of_extents_and_an_area():
    record = record_layout(10 << 20, Format("bf16", True))
    share = sum(compression.room_nbytes(record, kind, late=False, codes=True) for kind in (WEIGHTS, STATES)) / record.nbytes
    assert 0.83 < share < 0.85
    assert sum(compression.room_nbytes(record, kind, late=False, codes=False) for kind in (WEIGHTS, STATES)) == record.nbytes
    assert compression.area_nbytes([]) == compression.area_nbytes([(4096, 4096)] * 3) == 0
    assert compression.area_nbytes([(7 * MIB, 8 * MIB)] * 10) == MIB  # for the largest record
    assert compression.area_nbytes([(7 * MIB, 8 * MIB)] * 1000) == 35 * MIB  # 0.5 %


def test_a_drive_that_holds_only_coded_records_is_enough():
    """Records that fit with coding need no place on the device."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))

    def placed(choice, nvme_budget=None):
        config = infinity.Config(compression=choice, dtype="bf16", device="cpu", chunk_mib=0.5)
        options = {"device_budget": 24 * MIB, "host_budget": 24 * MIB, "nvme_budget": nvme_budget}
        return arranged(model, config, compresses=choice == "on", **options)[2]

    coded, whole = placed("on"), placed("off")
    assert coded.uncoded().nvme_nbytes > 1.1 * coded.nvme_nbytes
    assert placed("on", coded.nvme_nbytes).num_crowded_out == 0
    passing = placed("off", whole.nvme_nbytes - 1)
    assert passing.gradients_pass and passing.num_crowded_out == 0 and not any(passing.on_nvme[GRADIENTS])
    assert placed("off", passing.nvme_nbytes - 1).num_crowded_out > 0

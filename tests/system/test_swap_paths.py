"""swap_paths: finds directories on one drive through partitions and volumes, and slow directories by their rates."""

import os

import pytest

from infinity.system import swap_paths
from infinity.system.mounts import whole_drives
from infinity.system.swap_paths import shared_drives, slow_directories


@pytest.fixture
def devices(tmp_path):
    """A small /sys/devices: two drives with two partitions each, nested volumes over sda1 and sdb1, a partitioned md0 over sdb2, nvme0n1."""
    for drive in ("sda", "sdb"):
        for number in (1, 2):
            partition = tmp_path / drive / f"{drive}{number}"
            partition.mkdir(parents=True)
            (partition / "partition").write_text(f"{number}\n")
    for volume, slaves in {"dm-0": ("sda/sda1", "sdb/sdb1"), "dm-1": ("dm-0",), "md0": ("sdb/sdb2",), "nvme0n1": ()}.items():
        (tmp_path / volume / "slaves").mkdir(parents=True)
        for slave in slaves:
            (tmp_path / volume / "slaves" / os.path.basename(slave)).symlink_to(tmp_path / slave)
    (tmp_path / "md0" / "md0p1").mkdir()
    (tmp_path / "md0" / "md0p1" / "partition").write_text("1\n")
    return tmp_path


@pytest.mark.parametrize(
    "device, drives",
    [
        ("sda", ["sda"]),
        ("sda/sda2", ["sda"]),
        ("nvme0n1", ["nvme0n1"]),
        ("dm-0", ["sda", "sdb"]),
        ("dm-1", ["sda", "sdb"]),
        ("md0/md0p1", ["sdb"]),
    ],
)
def test_the_drives_of_partitions_and_volumes_are_found(devices, device, drives):
    assert [drive.name for drive in whole_drives(devices / device)] == drives


def test_directories_on_one_filesystem_give_one_remark(paths):
    (remark,) = shared_drives(paths)
    assert remark.text.startswith(f"swap directories {paths[0]}, {paths[1]} and {paths[2]} lie on one ")
    assert remark.text.endswith("they share its bandwidth and its free space")
    assert remark.remedy == "name one directory a drive in `swap_dirs`"
    assert shared_drives(paths[:1]) == []


def test_directories_on_different_filesystems_may_share_a_drive(paths, monkeypatch):
    places = dict(zip(paths, ({"filesystem 1", "sda"}, {"filesystem 2", "sdb"}, {"filesystem 3", "sda", "sdb"})))
    monkeypatch.setattr(swap_paths, "_places", places.get)
    assert shared_drives(paths[:2]) == []
    (remark,) = shared_drives([paths[0], paths[2]])
    assert f"{paths[0]} and {paths[2]} lie on one drive (sda, sdb)" in remark.text
    assert len(shared_drives(paths)) == 1  # the third directory joins the other two


def test_a_directory_in_memory_shares_no_drive(tmp_path):
    if not os.path.ismount("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a tmpfs on /dev/shm")
    assert shared_drives([tmp_path, "/dev/shm"]) == []


def test_a_directory_below_half_of_the_fastest_rate_is_slow(paths):
    one, other, third = paths
    assert slow_directories({one: 2e9, other: 1e9, third: 1.5e9}) == []
    slow = slow_directories({one: 2e9, other: 0.9e9, third: 0.1e9})
    assert [remark.text for remark in slow] == [
        f"swap directory {path} is slow: {rate} MB/s, and {one} reaches 2,000 MB/s. It gets {share} of the bytes"
        for path, rate, share in ((other, 900, "30%"), (third, 100, "3%"))
    ]

"""How much memory the host has for this process."""

import psutil
import pytest

from infinity.system import capacity

MIB = 1 << 20


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes the files of the group that everything belongs to."""
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return write


def test_without_limits_it_is_what_is_available(group):
    group(memory__max="max\n", memory__current="1000\n", memory__stat="anon 10\nfile 20\n")
    assert capacity.host_free_nbytes() == pytest.approx(psutil.virtual_memory().available, rel=0.05)


def test_a_groups_limit_counts_less_what_it_uses_beside_the_page_cache(group):
    group(memory__max=f"{100 * MIB}\n", memory__current=f"{60 * MIB}\n", memory__stat=f"anon {20 * MIB}\nfile {40 * MIB}\nshmem {10 * MIB}\n")
    assert capacity.host_free_nbytes() == (100 - 60 + 30) * MIB


def test_limits_of_version_1(group):
    group(memory__limit_in_bytes=f"{80 * MIB}", memory__usage_in_bytes=f"{30 * MIB}", memory__stat=f"cache {10 * MIB}\nrss {20 * MIB}\n")
    group(memory__max="nonsense")
    assert capacity.host_free_nbytes() == 60 * MIB


def test_a_group_that_uses_all_leaves_nothing(group):
    group(memory__max=f"{MIB}\n", memory__current=f"{2 * MIB}\n", memory__stat="file 0\n")
    assert capacity.host_free_nbytes() == 0

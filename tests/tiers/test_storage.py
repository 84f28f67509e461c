"""A storage tier of the program: the example with ordinary files trains with the bits of the engine's own swap."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import infinity
from infinity.system.storage import StorageTier, make_storage, use_storage
from infinity.system.swap import Swap

PATH = Path(__file__).parent.parent.parent / "examples" / "extend" / "pread_tier.py"
METHODS = [name for name, member in vars(StorageTier).items() if callable(member) and not name.startswith("_")]


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("pread_tier", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_use(example):
    """Uses the storage of the example during the test."""
    before = use_storage(example.FileStorage)
    yield example.FileStorage
    use_storage(before)


CONFIGS = {"plain": {}, "compressed": {"dtype": "bf16", "compression": "on"}, "activations": {"activation_tier": "nvme"}}


@pytest.mark.few(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_tier_of_files_trains_with_the_same_bits(config, example, tmp_path):
    found = []
    for make in (Swap, example.FileStorage):
        before = use_storage(make)
        try:
            found.append(example.train(tmp_path, **config))
        finally:
            use_storage(before)
        assert not list(tmp_path.iterdir())
    (losses, weights, moved), (expected_losses, expected_weights, expected) = found
    assert losses == expected_losses and all(map(torch.equal, weights, expected_weights))
    assert moved["nvme_write_nbytes"] > 0 < expected["nvme_write_nbytes"] and moved["nvme_read_nbytes"] > 0


def test_an_error_of_the_storage_reaches_the_program(example, in_use, tmp_path, monkeypatch):
    monkeypatch.setattr(example.os, "preadv", lambda *arguments: 0)
    with pytest.raises(infinity.SwapError, match=r"chunk \d+ \(weights\): short read, 0 of \d+ bytes") as caught:
        example.train(tmp_path)
    assert Path(caught.value.filename).name.endswith(".bin") and not list(tmp_path.iterdir())


def test_the_example_finds_a_damaged_page(example, tmp_path):
    storage = example.FileStorage([tmp_path])
    extent = storage.allocate(8192)
    storage.reserve()
    storage.write(extent, memoryview(bytearray(b"a" * 8192)), what="chunk 0: ").wait()
    with open(storage.path_of(extent), "r+b") as file:
        file.seek(5000)
        file.write(b"b")
    storage.read(extent, memoryview(bytearray(4096))).wait()
    with pytest.raises(infinity.SwapError, match="chunk 0: wrong checksum at offset 4096"):
        storage.read(extent, memoryview(bytearray(4096)), offset=4096, what="chunk 0: ").wait()
    storage.close()
    assert not list(tmp_path.iterdir())


def test_the_example_needs_no_descriptor_for_each_extent(example, tmp_path):
    storage = example.FileStorage([tmp_path])
    before = len(os.listdir("/proc/self/fd"))
    extents = [storage.allocate(1) for _ in range(20)]
    storage.reserve()
    assert len(os.listdir("/proc/self/fd")) == before and {os.path.getsize(extent.path) for extent in extents} == {4096}
    storage.close()


def test_the_engine_uses_its_own_swap_by_default(tmp_path):
    with make_storage([tmp_path]) as storage:
        assert type(storage) is Swap


@pytest.mark.parametrize("name", METHODS)
def test_both_storages_have_all_methods_of_the_interface(name, example):
    assert callable(getattr(Swap, name)) and callable(getattr(example.FileStorage, name))

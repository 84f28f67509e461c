"""Fixtures that several test files use."""

import signal

import pytest
import torch

from aio_ext import _aio

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what runs in a shell's background, whose processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_faults_left():
    """Whatever a test injects into aio_ext ends with it."""
    yield
    _aio._inject()


@pytest.fixture
def paths(tmp_path):
    """Three directories on one filesystem."""
    made = [tmp_path / f"drive{i}" for i in range(3)]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def one_thread():
    """Torch computes in one thread: the same bits as a reference, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic(monkeypatch):
    """CUDA kernels whose sums have one order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)

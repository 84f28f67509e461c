"""`infinity.ordinary_file`: only ordinary files of a limited size are read."""

import errno
import os
import socket

import pytest
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.ordinary_file import read_ordinary
from infinity.tools.cli import main


def test_a_file_up_to_the_limit_of_bytes_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("file")
    assert read_ordinary(tmp_path / "file", 8) == read_ordinary(tmp_path / "link", 8) == b"12345678"
    with pytest.raises(OSError, match="expected at most 7 bytes") as raised:
        read_ordinary(tmp_path / "file", 7)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "file"))


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """A working directory with a pipe, a folder, a device and a socket."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("socket")
    return tmp_path


@pytest.mark.parametrize("name", ["pipe", "zero", "folder", "socket", "", None, 5])
@pytest.mark.parametrize("read", [infinity.Config.load, infinity.Config.from_deepspeed])
def test_settings_are_read_from_ordinary_files_only(strange, read, name):
    with pytest.raises(ConfigError):  # at once: a pipe without a writer would block, /dev/zero has no end
        read(name)


@pytest.mark.parametrize("name", ["pipe", "zero", "folder", ""])
@pytest.mark.parametrize(
    "command",
    [
        "config show --config",
        "config show --from-deepspeed",
        "plan --params 1B --machine",
        "plan --model",
        "trace",
        "status",
        "train --steps 1 --data",
        "checkpoint inspect",
        "checkpoint verify",
    ],
)
def test_a_command_refuses_a_path_that_is_no_ordinary_file(strange, capsys, command, name):
    assert main([*command.split(), name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("infinity: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("name", ["pipe", "zero", "socket", "", None])
def test_save_and_load_refuse_a_path_that_is_no_directory(strange, name):
    (strange / "swap").mkdir()
    before = sorted(os.listdir(strange))
    model = nn.Linear(4, 4)
    with infinity.offload(model, infinity.Config(swap_dirs="swap", device="cpu", dtype="fp32", optimizer_state_tier="host")):
        optimizer = infinity.AdamW(model.parameters())
        for call in (
            lambda: infinity.save(name, model, optimizer),
            lambda: infinity.load(name, model, optimizer),
            lambda: infinity.load_safetensors(model, name),
        ):
            with pytest.raises((ValueError, OSError)):
                call()
    assert sorted(os.listdir(strange)) == before

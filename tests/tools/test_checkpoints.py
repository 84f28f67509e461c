"""The `checkpoint` command: output, files, and errors for damaged checkpoints."""

import json

import pytest
import torch

import infinity
from infinity.checkpoints.reader import Checkpoint
from infinity.checkpoints.safetensors import TensorFiles
from infinity.model.gpt import GPT
from infinity.tools.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(path of a checkpoint of two steps, weights)."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=folder, device="cpu", dtype="bf16", chunk_mib=0.05)):
        model = GPT(32, 2, 2, 64, 16, tie=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with infinity.engine_of(model):
        for _ in range(2):
            tokens = torch.arange(16).view(1, 16)
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        infinity.save(folder / "step", model, optimizer, extra={"position": 7})
        weights = model.state_dict()
    return folder / "step", weights


def test_inspect_prints_the_contents(saved, capsys):
    path, weights = saved
    assert main(["checkpoint", "inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    num = sum(value.numel() for name, value in weights.items() if name != "head.weight")
    assert lines[1] == "step        2"
    assert lines[2] == f"parameters  {num / 1e6:,.2f} M in {len(weights) - 1} tensors, bf16; momentum, variance in fp32"
    assert lines[3].startswith("saved by    1 rank, in ")
    assert lines[4].startswith("group 0     lr=0.01, ") and lines[5] == 'extra       {"position": 7}'
    assert main(["checkpoint", "inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_parameters"], report["step"], report["aliases"]) == (num, 2, {"head.weight": "token.weight"})
    assert main(["checkpoint", "inspect", str(path), "--parameters"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(weights) - 1


def test_verify_reads_all_bytes_and_names_a_damaged_record(saved, capsys, tmp_path):
    path, _ = saved
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path} is whole: ")
    (folder,) = path.glob("data-*")
    victim = folder / "rank0-0.records"
    data = victim.read_bytes()
    try:
        victim.write_bytes(data[:4096] + bytes([data[4096] ^ 8]) + data[4097:])
        assert main(["checkpoint", "verify", str(path)]) == 2
        error = capsys.readouterr().err
        assert "rank0-0.records: chunk 0 of rank 0" in error and "is damaged" in error
    finally:
        victim.write_bytes(data)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert "holds no checkpoint: there is no manifest.json" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(path.parent)]) == 2
    assert f"did you mean {path}?" in capsys.readouterr().err


def test_export_writes_the_files_that_its_dry_run_prints(saved, capsys, tmp_path):
    path, weights = saved
    command = ["checkpoint", "export", str(path), str(tmp_path / "out"), "--max-file", "20kB"]
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "would be written to" in planned
    assert main(command) == 0
    assert capsys.readouterr().out == planned.replace("would be written to", "written to")
    with TensorFiles(tmp_path / "out") as files:
        for name in files.names:
            assert torch.equal(files.read(name), weights[name].reshape(-1)), name
        assert len(files.names) == len(weights) - 1
    assert main(command) == 2
    assert "out" in capsys.readouterr().err


def test_reshard_writes_the_files_that_its_dry_run_prints(saved, capsys, tmp_path):
    path, _ = saved
    command = ["checkpoint", "reshard", str(path), str(tmp_path / "out"), "--world", "3"]
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    assert capsys.readouterr().out == planned.replace("would be written to", "written to")
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.manifest.world == 3 and checkpoint.verify() == checkpoint.manifest.nbytes


@pytest.mark.parametrize(
    "options, words",
    [
        ("", "the following arguments are required: COMMAND"),
        ("inspct x", "there is no command 'inspct'; did you mean inspect?"),
        ("inspect", "the following arguments are required: DIR"),
        ("inspect x --jsn", "did you mean --json?"),
        ("export x", "the following arguments are required: OUT"),
        ("export x y --dtype int8", "invalid choice: 'int8'"),
        ("export x y --max-file 5G", "expected bytes"),
        ("export x y", "x is not a directory: name the directory of a checkpoint"),
        ("reshard x y", "the following arguments are required: --world"),
        ("reshard x y --world 0", "expected a whole number above zero"),
    ],
)
def test_mistakes_print_one_line(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *options.split()]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
